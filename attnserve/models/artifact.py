"""Read and write artifacts: an ONNX model, its tokenizer files and its record attnserve.json.

An artifact is a folder with ``model.onnx`` (or one other .onnx file), or an .onnx file. The files
``tokenizer.json`` and ``attnserve.json`` in the same folder belong to it. Models of the Hugging
Face hub are read too: ONNX files in a folder ``onnx`` below the tokenizer, and the pooling of
sentence-transformers.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import shutil
import stat
import tempfile
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path, PurePath
from typing import Any, Literal, cast

import numpy as np
import onnx
import onnx_ir as ir

from attnserve.choices import Activation, Padding, Pooling, Similarity
from attnserve.models.json_files import read_json
from attnserve.models.onnx_validation import external_file, external_locations, validated
from attnserve.models.sentence_transformers import stated_embedding
from attnserve.paths import StrPath
from attnserve.runtime.external_data import external_files, map_external_data
from attnserve.runtime.onnx_reader import read_in_place
from attnserve.runtime.onnx_writer import write_model
from attnserve.runtime.session import PROTOBUF_LIMIT_BYTES, weight_bytes
from graph_passes.emit.editing import capture_weights
from graph_passes.errors import InvalidModel, InvalidOutput

__all__ = [
    "Artifact",
    "Pooling",
    "check_files",
    "check_output",
    "check_target",
    "copy_companions",
    "data_file",
    "default_output",
    "external_data_locations",
    "fingerprint",
    "is_hub_folder",
    "load_model",
    "merged_record",
    "model_file",
    "open_artifact",
    "package_versions",
    "save_model",
    "sha256",
    "staged",
    "versions",
    "write_record",
    "write_rewritten",
]


PACKAGES = (
    "attnserve",
    "numpy",
    "onnx",
    "onnx-ir",
    "tensorly",
    "onnxruntime",
    "onnxruntime-gpu",
)
"""Packages that affect the results of a rewrite or an analysis."""

RECORD = "attnserve.json"
FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "lineage": (lambda value: isinstance(value, list), "a JSON list"),
    "files": (lambda value: isinstance(value, dict), "a JSON object"),
    "pooling": (
        lambda value: value in (None, "mean", "cls", "last", "none"), "mean, cls, last or none",
    ),
    "padding": (lambda value: value in (None, "right", "left"), "right or left"),
    "similarity": (lambda value: value in (None, "cosine", "dot"), "cosine or dot"),
    "normalize": (lambda value: isinstance(value, bool | None), "true or false"),
    "max_length": (lambda value: _is_count(value), "a number of tokens above 0"),
    "dimensions": (lambda value: _is_count(value), "a number of dimensions above 0"),
    "output": (lambda value: isinstance(value, str | None), "the name of an output"),
    "prompts": (lambda value: _is_texts(value), "a JSON object of texts"),
    "default_prompt": (lambda value: isinstance(value, str | None), "a name of prompts"),
    "activation": (
        lambda value: value in (None, "sigmoid", "softmax", "identity"),
        "sigmoid, softmax or identity",
    ),
    "template": (
        lambda value: value is None or _is_template(value),
        "a text with {query} and {document}, once each",
    ),
    "first_position": (
        lambda value: value is None or (type(value) is int and value >= 0), "a position from 0",
    ),
    "id2label": (lambda value: isinstance(value, dict | list | None), "a JSON object or list"),
}  # fmt: skip
"""Fields of the record: what is valid, in code and in words."""

POSITIONS_AFTER_PADDING = frozenset(
    {
        "camembert", "data2vec-text", "ibert", "lilt", "longformer", "luke", "markuplm", "mpnet",
        "roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "xmod",
    }
)  # fmt: skip
"""Values of ``model_type`` in config.json whose position ids start at ``pad_token_id`` + 1."""

COMPANIONS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "vocab.txt",
    "config.json",
    "generation_config.json",
    "chat_template.jinja",
)

HUB_FOLDER = "onnx"
"""The folder of ONNX files in a model of the Hugging Face hub."""


@dataclass(frozen=True)
class Artifact:
    """A model on disk with its companion files.

    Attributes:
        model: The .onnx file.
        record: The parsed attnserve.json; empty if there is none. Keys: ``source``, ``max_length``
            (tokens) and those of an embedding (``pooling``, ``normalize``, ``dimensions``,
            ``prompts``, ``default_prompt``, ``similarity``) and of scores (``activation``,
            ``template``) from ``export``; ``lineage`` (one entry per rewrite, oldest first) from
            ``optimize``.
        shared: A folder with companion files for all versions or files of a model, used for files
            that are not in the model's folder.
    """

    model: Path
    record: dict[str, Any] = field(default_factory=dict[str, Any])
    shared: Path | None = None

    @property
    def folder(self) -> Path:
        return self.model.parent

    @property
    def name(self) -> str:
        """The name of the folder for model.onnx, else the file name without its suffix.

        Of a symbolic link it is the name of the link, so that it stays when the link moves to
        another release. Hidden folders, such as ``..data`` of Kubernetes, and the folder ``onnx``
        name no model.
        """
        if self.model.stem != "model":
            return self.model.stem
        names = (folder.name for folder in Path(os.path.abspath(self.model)).parents)  # noqa: PTH100
        unnamed = ("", HUB_FOLDER)
        return next((n for n in names if n not in unnamed and not n.startswith(".")), "model")

    @property
    def tokenizer(self) -> Path | None:
        return self.companion("tokenizer.json")

    def companion(self, name: str) -> Path | None:
        """The path of a companion file; None if it does not exist."""
        folders = [self.folder] if self.shared is None else [self.folder, self.shared]
        return next((path for folder in folders if (path := folder / name).is_file()), None)

    @property
    def pooling(self) -> Pooling:
        return self.record.get("pooling") or "mean"

    @property
    def normalize(self) -> bool:
        """Whether pooled vectors are normalized to length one."""
        return bool(self.record.get("normalize", False))

    @property
    def dimensions(self) -> int | None:
        """The number of dimensions that pooled vectors keep; None for all."""
        return self.record.get("dimensions")

    @property
    def output(self) -> str | None:
        """The output that embeddings and scores are made of; None for the default one."""
        return self.record.get("output")

    @property
    def prompts(self) -> dict[str, str]:
        """Texts before an input, by name, for example "query"."""
        return self.record.get("prompts") or {}

    @property
    def similarity(self) -> Similarity:
        """The similarity of two vectors that the model was trained for."""
        return self.record.get("similarity") or "cosine"

    @property
    def padding(self) -> Padding:
        """The side of padding; "left" is for graphs that pool the last position themselves."""
        return self.record.get("padding") or "right"

    @property
    def activation(self) -> Activation | None:
        """What turns logits into scores; None for softmax, or sigmoid of a single logit."""
        return self.record.get("activation")

    @property
    def template(self) -> str | None:
        """The text of a pair, with {query} and {document}; None if the tokenizer joins pairs."""
        return self.record.get("template")

    @property
    def first_position(self) -> int:
        """The position id of the first token, for graphs with an input ``position_ids``.

        Those of RoBERTa's family start after the id of the pad token.

        Raises:
            InvalidModel: config.json is not valid.
        """
        if (stated := self.record.get("first_position")) is not None:
            return stated
        config = self.config
        if config.get("model_type") not in POSITIONS_AFTER_PADDING:
            return 0
        pad = config.get("pad_token_id", 1)
        return pad + 1 if isinstance(pad, int) else 0

    @cached_property
    def config(self) -> dict[str, Any]:
        """The config.json of the model; empty without one, or if it is not an object.

        Raises:
            InvalidModel: It is not JSON.
        """
        path = self.companion("config.json")
        config: Any = read_json(path) if path else {}
        return cast(dict[str, Any], config) if isinstance(config, dict) else {}

    def prompt(self, *names: str) -> str:
        """The prompt with the first of these names that exists, else the default prompt."""
        found = (self.prompts[name] for name in names if name in self.prompts)
        return next(found, self.prompts.get(self.record.get("default_prompt") or "", ""))

    @property
    def max_length(self) -> int | None:
        """Maximum number of tokens of a text, with special tokens; None if unknown."""
        return self.record.get("max_length")

    @property
    def lineage(self) -> list[dict[str, Any]]:
        """The rewrites of the model, oldest first; without entries that are no objects."""
        return [entry for entry in self.record.get("lineage", ()) if isinstance(entry, dict)]

    @property
    def source(self) -> str | None:
        """The exported model; of a local folder only the last two parts, to not publish its path.

        None if the record does not name it.
        """
        source = self.record.get("source")
        if not isinstance(source, str):
            return None
        path = PurePath(source)
        return "/".join(path.parts[-2:]) if path.is_absolute() else source

    @property
    def optimization(self) -> dict[str, Any] | None:
        """The size before the first rewrite and after the last; None without a rewrite."""
        if not self.lineage:
            return None
        first, last = self.lineage[0], self.lineage[-1]
        kept = ("after", "fidelity", "batch", "sequence", "break_even_sequence")
        return {
            "rewrites": [entry.get("rewrite") for entry in self.lineage],
            "before": first.get("before"),
            **{key: last.get(key) for key in kept},
        }

    @cached_property
    def plan_id(self) -> str | None:
        """A checksum of the plan that was applied last; None if there was none."""
        plan = self.lineage[-1].get("plan") if self.lineage else None
        if plan is None:
            return None
        return hashlib.sha256(json.dumps(plan, sort_keys=True).encode()).hexdigest()[:12]

    @property
    def labels(self) -> dict[int, str]:
        """Names of the classes: ``id2label`` in the record, else in config.json, else none.

        Raises:
            InvalidModel: They are not names by number, or config.json is not valid.
        """
        labels: Any = self.record.get("id2label")
        if labels is None:
            labels = self.config.get("id2label")
        if isinstance(labels, list):
            labels = dict(enumerate(labels))
        if not isinstance(labels, dict):
            return {}
        try:
            # JSON text of Python may hold lone surrogates, which have no UTF-8 form.
            return {int(key): str(label).encode().decode() for key, label in labels.items()}
        except ValueError as error:
            raise InvalidModel(
                f"{self.folder}: id2label: expected numbers and names: {error}",
                "correct it",
                code="artifact.labels",
            ) from error


def open_artifact(path: StrPath, shared: Path | None = None) -> Artifact:
    """Open the artifact at ``path``, an .onnx file or a folder with one.

    Args:
        shared: A folder with a tokenizer and a record, used if the model's folder has none.

    Raises:
        InvalidModel: ``path`` does not exist, or is a folder without exactly one model.
    """
    model = model_file(path)
    above = model.parent.parent
    if shared is None and model.parent.name == HUB_FOLDER and _has_configuration(above):
        shared = above
    record = _read_record(model)
    if not record and shared is not None and (shared / RECORD).is_file():
        found = _parse_record(shared / RECORD)
        if _described_model(found, shared) is None:  # else it is that of a model beside it
            record = {key: value for key, value in found.items() if key not in ("files", "others")}
    if "pooling" not in record:
        folders = [model.parent] if shared is None else [model.parent, shared]
        stated = next(((f, one) for f in folders if (one := stated_embedding(f))), None)
        if stated is not None:
            _check_fields(stated[0] / "modules.json", stated[1], "download the model again")
            record = stated[1] | record
    return Artifact(model, record, shared)


def model_file(path: StrPath) -> Path:
    """The .onnx file at ``path``, a file or a folder with one.

    Raises:
        InvalidModel: ``path`` does not exist, or is a folder without exactly one model.
    """
    path = Path(path)
    if not path.is_dir():
        if path.is_file():
            return path
        raise InvalidModel(
            f"{path}: no such file or folder", "check the path", code="artifact.missing"
        )
    if (path / "model.onnx").is_file():
        return path / "model.onnx"
    found = sorted(path.glob("*.onnx"))
    if not found and is_hub_folder(path):
        return path / HUB_FOLDER / "model.onnx"
    if len(found) != 1:
        raise InvalidModel(
            f"{path}: expected model.onnx in this folder, found {len(found)} .onnx files",
            "pass the path of the .onnx file",
            code="artifact.model_count",
        )
    return found[0]


def is_hub_folder(path: Path) -> bool:
    """Whether a folder has its model at onnx/model.onnx, as many on the Hugging Face hub."""
    return (path / HUB_FOLDER / "model.onnx").is_file() and _has_configuration(path)


def _has_configuration(path: Path) -> bool:
    return any((path / name).is_file() for name in ("config.json", "tokenizer.json", RECORD))


def check_files(artifact: Artifact) -> None:
    """Compare the files of an artifact with the checksums in its record.

    Raises:
        InvalidModel: A file is missing, or its checksum differs.
    """
    record = artifact.model.with_name(RECORD)
    for name, expected in artifact.record.get("files", {}).items():
        path = artifact.folder / name
        if Path(name).name != name or not isinstance(expected, str):
            raise InvalidModel(
                f"{record}: 'files' contains {name!r}: expected a file name and its sha256",
                "copy the artifact again",
                code="artifact.file_name",
            )
        if not path.is_file():
            raise InvalidModel(
                f"{path}: the file is listed in {record.name}, but missing",
                "copy the artifact again",
                code="artifact.file_missing",
            )
        found = sha256(path)
        if found != expected.lower():
            raise InvalidModel(
                f"{path}: the sha256 is {found[:12]}.., but {record.name} has {expected[:12]}..",
                "copy the artifact again, or export or optimize it again",
                code="artifact.checksum",
            )


def load_model(source: Artifact | Path, *, in_place: bool = False) -> ir.Model:
    """Read and validate a model; external data stays on disk and is memory-mapped on access.

    Weights are no inputs of the result, although a graph may list them there.

    Args:
        in_place: Memory-map also the weights inside the .onnx file, which must not change
            meanwhile. Sessions map them too. ``save_model`` writes such a model with its weights.

    Raises:
        InvalidModel: The file is not a valid ONNX model, or its external data is missing, too
            short, or outside the model's folder.
    """
    path = source.model if isinstance(source, Artifact) else source
    try:
        proto = _in_place(path) or onnx.load(path, format="protobuf", load_external_data=False)
    except OSError as error:
        raise InvalidModel(
            f"{path}: cannot be read: {error.strerror}",
            "check the path",
            code="artifact.unreadable",
        ) from error
    except Exception as error:  # protobuf's DecodeError, UnicodeDecodeError, ...
        raise InvalidModel(
            f"{path}: not an ONNX file, or truncated ({path.stat().st_size} bytes)",
            "download or export it again",
            code="artifact.not_onnx",
        ) from error
    proto = validated(path, proto)
    try:
        model = ir.from_proto(proto)
        ir.external_data.set_base_dir(model.graph, path.parent)
        _map_linked(model, path)
        model.graph.sort()  # some converters do not sort nodes
        capture_weights(model)
        _remove_weights_from_inputs(model)
    except Exception as error:  # onnx_ir raises ValueError for cycles, and other types
        raise InvalidModel(
            f"{path}: the graph is not well formed: {str(error)[:300]}",
            "check it with onnx.checker.check_model, or export it again",
            code="artifact.malformed",
        ) from error
    if not in_place:
        _read_own_weights(model, path)
    return model


def _map_linked(model: ir.Model, path: Path) -> None:
    """Map external data that links lead out of the model's folder, which onnx_ir refuses.

    ``validated`` allows it beside the target of a link to the model.
    """
    folder = path.parent.resolve()
    for graph in model.graphs():
        for value in graph.initializers.values():
            tensor = value.const_value
            if not isinstance(tensor, ir.ExternalTensor):
                continue
            file = Path(tensor.path).resolve()
            if not file.is_relative_to(folder):
                linked = ir.ExternalTensor(
                    file, tensor.offset, tensor.length, tensor.dtype, shape=tensor.shape,
                    name=tensor.name or "",
                )  # fmt: skip
                value.const_value = ir.Tensor(
                    linked.numpy(), tensor.dtype, name=tensor.name, doc_string=tensor.doc_string
                )


def external_data_locations(path: Path) -> list[str]:
    """The files with external data of a model, relative to its folder."""
    in_place = _in_place(path)
    proto = in_place or onnx.load(path, format="protobuf", load_external_data=False)
    found = external_locations(proto)
    return [one for one in found if in_place is None or one != path.name]


def _remove_weights_from_inputs(model: ir.Model) -> None:
    """Remove initializers from the inputs: those of IR version 3, and defaults of later versions.

    ONNX Runtime does not count them as inputs either, and fuses less while they are.
    """
    for value in [value for value in model.graph.inputs if value.is_initializer()]:
        model.graph.inputs.remove(value)
        model.ir_version = max(model.ir_version, 4)


def _read_own_weights(model: ir.Model, path: Path) -> None:
    """Copy the weights that are mapped from the .onnx file itself into memory."""
    for graph in model.graphs():
        for value in graph.initializers.values():
            tensor = value.const_value
            if isinstance(tensor, ir.ExternalTensor) and tensor.location == path.name:
                array = np.array(tensor.numpy())
                value.const_value = ir.Tensor(
                    array, tensor.dtype, name=tensor.name, doc_string=tensor.doc_string
                )


def _in_place(path: Path) -> onnx.ModelProto | None:
    """The model with its weights in the file; None if that is not possible."""
    try:
        # onnx_ir maps no file that has several hard links, or that is a link out of its folder.
        is_own = path.stat().st_nlink == 1 and path.resolve().parent == path.parent.resolve()
        is_own = is_own and external_file(path, path.name) is not None
        return read_in_place(path) if is_own else None
    except Exception:  # onnx.load reports the error
        return None


def save_model(model: ir.Model, path: Path, *, external: bool = False) -> None:
    """Write ``model`` to ``path``.

    Weights are written to ``path`` + ``.data`` if ``external``, or if they exceed 2 GB.
    """
    if external_files(model):
        model = model.clone()
        map_external_data(model)
    if external or weight_bytes(model) >= PROTOBUF_LIMIT_BYTES:
        ir.save(model, path, external_data=data_file(path).name)
    else:
        write_model(model, path)


def check_target(output: Path, artifact: Artifact, model: ir.Model, *, force: bool = False) -> Path:
    """Return the .onnx file to write for ``output``, after checks that nothing is overwritten.

    Args:
        output: An .onnx file, or a folder for model.onnx.
        artifact, model: The input, whose files are never overwritten.
        force: Allow to replace other existing files.

    Raises:
        InvalidOutput: ``output`` is a file of the input, exists, or cannot be written.
    """
    is_file = output.suffix.lower() == ".onnx" and not output.is_dir()
    target = output if is_file else output / "model.onnx"
    # A model above the folder onnx would hide the one in it.
    above = [artifact.shared] if artifact.shared and artifact.folder.name == HUB_FOLDER else []
    if any(_same(target.parent, folder) for folder in above):
        raise _is_the_input(target.parent)
    if not is_file and _same(output, artifact.folder):
        raise _is_the_input(output)
    for path in (artifact.model, *external_files(model)):
        for file in (target, data_file(target)):
            if _same(file, path):
                raise _is_the_input(file)
    check_output(target, force=force)
    check_output(data_file(target), force=force)
    if not _same(target.parent, artifact.folder):
        for name in COMPANIONS:
            ours, theirs = artifact.companion(name), target.parent / name
            if ours is None or (theirs.is_file() and ours.read_bytes() == theirs.read_bytes()):
                continue
            check_output(theirs, force=force)
    record = target.with_name(RECORD)
    # A folder with model.onnx and a record is one artifact; a second model must not be added.
    is_artifact = artifact.model.name == "model.onnx" and _same(target.parent, artifact.folder)
    if record.exists() and (
        is_artifact or _described_model(_parse_record(record), target.parent) is None
    ):
        check_output(record, force=force)
    return target


def default_output(model: Path, kind: Literal["optimized", "analysis", "plan"]) -> Path:
    """The default output path of a command, in the parent folder of ``model``.

    For ``minilm.onnx`` and the folder ``minilm`` these are the folders ``minilm-optimized`` and
    ``minilm-analysis``, and the file ``plan.json``.
    """
    if model.name in ("", ".."):  # ".", "a/.."
        model = model.resolve()
    if kind == "plan":
        return model.parent / "plan.json"
    name = model.name if model.is_dir() else model.stem
    return model.parent / f"{name}-{kind}"


def check_output(path: Path, *, source: Path | None = None, force: bool = False) -> None:
    """Check that an output can be written and overwrites nothing.

    Raises:
        InvalidOutput: The output is the input, exists (without ``force``), or cannot be written.
    """
    if source is not None and _same(path, source):
        raise _is_the_input(path)
    if path.exists() and not force and not (path.is_dir() and not any(path.iterdir())):
        raise InvalidOutput(
            f"{path}: the output exists already",
            "choose another `output`, or set `force`",
            code="output.exists",
        )
    parent = path.parent
    while not parent.exists():
        parent = parent.parent
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise InvalidOutput(
            f"{path}: {parent} is not a writable folder",
            "choose another `output`",
            code="output.not_writable",
        )


@contextmanager
def staged(folder: Path, finish: Callable[[Path], None] = lambda _: None) -> Generator[Path]:
    """Yield a temporary folder whose files are moved to ``folder`` when the context succeeds.

    After a failure nothing is moved, and folders that were created are removed. The content of the
    files is on disk before they appear.

    Args:
        finish: Writes files that depend on those in ``folder``; no other process moves files into
            ``folder`` between this call and the move.

    Raises:
        InvalidOutput: ``folder`` cannot be created or written.
    """
    made = [path for path in (folder, *folder.parents) if not path.exists()]  # innermost first
    stage: Path | None = None
    try:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            stage = Path(tempfile.mkdtemp(prefix=".attnserve-", dir=folder))
        except OSError as error:
            raise InvalidOutput(
                f"{folder}: cannot be written: {error.strerror}",
                "choose another `output`",
                code="output.not_writable",
            ) from error
        yield stage
        try:
            with _locked(folder):
                finish(stage)
                # The model is moved last, so that its companion files exist when it appears.
                for path in sorted(stage.iterdir(), key=lambda path: path.suffix == ".onnx"):
                    _flush(path)
                    path.replace(folder / path.name)
            _flush(folder)
        except OSError as error:
            raise InvalidOutput(
                f"{folder}: writing failed: {error.strerror}",
                "choose another `output`",
                code="output.not_writable",
            ) from error
    except OSError as error:  # raised inside the context, for example by a full disk
        raise InvalidOutput(
            f"{folder}: writing failed: {error.strerror or error}",
            "free some space, or choose another `output`",
            code="output.write_failed",
        ) from error
    finally:
        if stage is not None:
            shutil.rmtree(stage, ignore_errors=True)
        with suppress(OSError):  # folders that are not empty stay
            for path in made:
                path.rmdir()


@contextmanager
def _locked(folder: Path) -> Generator[None]:
    """Lock ``folder`` against the moves of other processes, where the system can."""
    if os.name != "posix":
        yield
        return
    import fcntl

    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # some network file systems have no locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _flush(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on disk."""
    if os.name != "posix":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def copy_companions(artifact: Artifact, folder: Path) -> None:
    """Copy the companion files of a model into ``folder``."""
    for name in COMPANIONS:
        if (path := artifact.companion(name)) is not None:
            shutil.copyfile(path, folder / name)


def write_record(folder: Path, record: dict[str, Any]) -> None:
    """Write attnserve.json as indented JSON."""
    text = json.dumps(record, indent=2, ensure_ascii=False, allow_nan=False)
    (folder / RECORD).write_text(text + "\n", encoding="utf-8")


def write_rewritten(
    target: Path, model: ir.Model, source: Artifact, entry: dict[str, Any], *, external: bool
) -> None:
    """Write a model that was made from ``source``, its record and companion files, atomically.

    Args:
        entry: Added to the lineage of the source.
        external: Write the weights to a file beside the model.
    """

    def finish(stage: Path) -> None:
        record = {
            **source.record,
            "format": 1,
            "files": {p.name: sha256(p) for p in sorted(stage.iterdir()) if p.suffix != ".json"},
            "lineage": [*source.lineage, entry],
        }
        write_record(stage, merged_record(target, record))

    with staged(target.parent, finish) as stage:
        save_model(model, stage / target.name, external=external)
        copy_companions(source, stage)


def merged_record(target: Path, record: dict[str, Any]) -> dict[str, Any]:
    """Add the records of other models in the folder of ``target`` under "others", by file name."""
    path = target.with_name(RECORD)
    if not path.is_file():
        return record
    earlier = _parse_record(path)
    others: dict[str, Any] = earlier.pop("others", {})
    name = _described_model(earlier, path.parent)
    if name is not None:
        others[name] = earlier
    others.pop(target.name, None)
    return {**record, "others": others} if others else record


def _read_record(model: Path) -> dict[str, Any]:
    """The record of one model; empty if attnserve.json describes only other models."""
    path = model.with_name(RECORD)
    if not path.is_file():
        return {}
    record = _parse_record(path)
    others: dict[str, Any] = record.pop("others", {})
    if model.name in others:
        return others[model.name]
    return record if _described_model(record, path.parent) in (model.name, None) else {}


def _described_model(record: dict[str, Any], folder: Path) -> str | None:
    """The existing model in ``folder`` that the top level of the record describes, if any."""
    files = record.get("files", {"model.onnx": ""})  # exports have no "files"
    return next(
        (name for name in files if name.endswith(".onnx") and (folder / name).is_file()), None
    )


def _parse_record(path: Path) -> dict[str, Any]:
    # orjson reads only what it can write: the service answers with parts of the record. Not at the
    # top of the module: Ctrl-C during this import ends Python with a segmentation fault.
    import orjson

    fix = "restore or remove the file"
    try:
        parsed: Any = orjson.loads(path.read_bytes())
    except (OSError, orjson.JSONDecodeError) as error:
        place = error.strerror if isinstance(error, OSError) else f"line {error.lineno}"
        raise InvalidModel(
            f"{path}: not valid JSON: {place}", fix, code="artifact.record"
        ) from error
    if not isinstance(parsed, dict):
        raise InvalidModel(f"{path}: expected a JSON object", fix, code="artifact.record")
    record = cast(dict[str, Any], parsed)
    others: Any = record.get("others", {})
    if not isinstance(others, dict) or not all(isinstance(one, dict) for one in others.values()):
        raise InvalidModel(
            f"{path}: 'others': expected a JSON object of objects", fix, code="artifact.record"
        )
    for entry in (record, *cast(dict[str, dict[str, Any]], others).values()):
        _check_fields(path, entry, fix)
    return record


def _check_fields(path: Path, entry: Mapping[str, Any], fix: str) -> None:
    """Check the values of a record, and that it can be written as JSON.

    Raises:
        InvalidModel: A value is invalid, holds lone surrogates, or is a number of over 64 bits.
    """
    import orjson

    for key, (is_valid, expected) in FIELDS.items():
        if key in entry and not is_valid(entry[key]):
            raise InvalidModel(
                f"{path}: {key!r} is {str(entry[key])[:80]!r}: expected {expected}",
                fix,
                code="artifact.record",
            )
    try:
        orjson.dumps(entry)
    except TypeError as error:
        raise InvalidModel(f"{path}: {error}", fix, code="artifact.record") from error


def _is_count(value: Any) -> bool:
    return value is None or (type(value) is int and value > 0)


def _is_texts(value: Any) -> bool:
    return value is None or (
        isinstance(value, dict)
        and all(isinstance(text, str) for text in cast(dict[str, Any], value).values())
    )


def _is_template(value: Any) -> bool:
    return isinstance(value, str) and value.count("{query}") == value.count("{document}") == 1


def data_file(model: Path) -> Path:
    """The file with the external data of a model that is written."""
    return model.with_name(f"{model.name}.data")


def _same(path: Path, other: Path) -> bool:
    """Whether two paths are the same file, also through links or different case."""
    if path.exists() and other.exists():
        return path.samefile(other)
    return path.resolve() == other.resolve()


def _is_the_input(path: Path) -> InvalidOutput:
    return InvalidOutput(
        f"{path}: the output is the input model",
        "choose another `output`",
        code="output.is_input",
    )


def sha256(path: Path) -> str:
    """The SHA-256 checksum of a file in hexadecimal.

    Raises:
        InvalidModel: It cannot be read, or is no regular file: a device may have no end.
    """
    why: str | None = "it is no file"
    try:
        if stat.S_ISREG(path.stat().st_mode):
            with path.open("rb") as file:
                return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        why = error.strerror
    raise InvalidModel(f"{path}: cannot be read: {why}", "check the path", code="artifact.file")


def fingerprint(artifact: Artifact) -> str:
    """A checksum of the model file, its external data and its tokenizer."""
    digest = hashlib.sha256(sha256(artifact.model).encode())
    files = [artifact.folder / name for name in external_data_locations(artifact.model)]
    tokenizer = [] if artifact.tokenizer is None else [artifact.tokenizer]
    for path in (*sorted(files), *tokenizer):
        digest.update(f"{path.name} {sha256(path)}".encode())
    return digest.hexdigest()


def versions() -> dict[str, str]:
    """Versions of Python and the installed ``PACKAGES``, for reports."""
    return {"python": platform.python_version(), **package_versions(PACKAGES)}


def package_versions(packages: Iterable[str]) -> dict[str, str]:
    """The versions of those of the packages that are installed."""
    installed: dict[str, str] = {}
    for name in packages:
        with suppress(importlib.metadata.PackageNotFoundError):
            installed[name] = importlib.metadata.version(name)
    return installed
