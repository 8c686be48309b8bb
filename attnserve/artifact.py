"""What is on disk: model.onnx, the tokenizer, and attnserve.json, which says what was done.

An artifact is a folder that holds ``model.onnx`` (or any single .onnx file), or an .onnx file
itself; what lies beside it belongs to it: ``tokenizer.json`` and ``attnserve.json``.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import onnx
import onnx_ir as ir

from attnserve.session import PROTOBUF_LIMIT_BYTES
from graph_passes.errors import InvalidModel, InvalidOutput

__all__ = [
    "Artifact",
    "Pooling",
    "check_output",
    "copy_companions",
    "load_model",
    "open_artifact",
    "save_model",
    "staged",
    "write_record",
]

Pooling = Literal["mean", "cls", "none"]

RECORD = "attnserve.json"
COMPANIONS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "vocab.txt",
    "config.json",
)


@dataclass(frozen=True)
class Artifact:
    """A model on disk and what lies beside it.

    ``record`` is the parsed attnserve.json, empty where there is none. Its keys: ``pooling``,
    ``normalize``, ``max_length`` (tokens) and ``source`` from ``export``; ``lineage`` (a list, one
    entry a rewrite, oldest first) from ``optimize``.
    """

    model: Path
    record: dict[str, Any] = field(default_factory=lambda: {})

    @property
    def folder(self) -> Path:
        return self.model.parent

    @property
    def name(self) -> str:
        """model.onnx is named for its folder; any other file for itself."""
        stem = self.model.stem
        return self.model.resolve().parent.name if stem == "model" else stem

    @property
    def tokenizer(self) -> Path | None:
        path = self.folder / "tokenizer.json"
        return path if path.is_file() else None

    @property
    def pooling(self) -> Pooling:
        value = self.record.get("pooling")
        return value if value in ("mean", "cls", "none") else "mean"

    @property
    def normalize(self) -> bool:
        """Whether pooled vectors are scaled to length one."""
        return bool(self.record.get("normalize", False))

    @property
    def max_length(self) -> int | None:
        """The most tokens a text may have, special tokens included; None where unknown."""
        value = self.record.get("max_length")
        return value if isinstance(value, int) and value > 0 else None


def open_artifact(path: Path) -> Artifact:
    """The artifact at ``path``: an .onnx file, or a folder with one.

    Raises:
        InvalidModel: There is nothing there, or a folder without exactly one model.
    """
    if path.is_dir():
        model = path / "model.onnx"
        if not model.is_file():
            found = sorted(path.glob("*.onnx"))
            if len(found) != 1:
                raise InvalidModel(
                    f"{path}: expected model.onnx in this folder, found {len(found)} .onnx files",
                    "name the .onnx file itself",
                )
            model = found[0]
    elif path.is_file():
        model = path
    else:
        raise InvalidModel(f"{path}: no such file or folder", "check the path")
    return Artifact(model, _read_record(model.parent / RECORD, model.name))


def load_model(source: Artifact | Path) -> ir.Model:
    """Read the graph; weights stay on disk until they are asked for (external data, memory map).

    Raises:
        InvalidModel: Not an ONNX file, truncated, or its external data is missing, too short, or
            outside the model's folder.
    """
    path = source.model if isinstance(source, Artifact) else source
    try:
        proto = onnx.load(path, load_external_data=False)
    except (OSError, PermissionError) as error:
        raise InvalidModel(f"{path}: cannot be read: {error.strerror}", "check the path") from error
    except Exception as error:  # protobuf's DecodeError, UnicodeDecodeError, ...
        raise InvalidModel(
            f"{path}: not an ONNX file, or a truncated one ({path.stat().st_size} bytes)",
            "download or export it again",
        ) from error
    if not proto.HasField("graph") or not (proto.graph.node or proto.graph.output):
        raise InvalidModel(f"{path}: not an ONNX file: it holds no graph", "export it again")
    _check_external_data(path, proto)
    try:
        model = ir.from_proto(proto)
    except Exception as error:
        raise InvalidModel(
            f"{path}: the graph is not well formed: {error}", "check it with onnx.checker"
        ) from error
    ir.external_data.set_base_dir(model.graph, path.parent)
    return model


def save_model(model: ir.Model, path: Path, *, external: bool = False) -> None:
    """Write ``model`` at ``path``; weights go to ``path`` + ``.data`` when asked or over 2 GB."""
    size = sum(
        value.const_value.nbytes
        for graph in model.graphs()
        for value in graph.initializers.values()
        if value.const_value is not None
    )
    if external or size >= PROTOBUF_LIMIT_BYTES:
        ir.save(model, path, external_data=f"{path.name}.data")
    else:
        ir.save(model, path)


def check_output(path: Path, *, source: Path | None = None, force: bool = False) -> None:
    """Refuse an output that would overwrite something, before any work is done.

    Raises:
        InvalidOutput: It is the input, it exists (and not ``force``), or it cannot be written.
    """
    if source is not None and path.resolve() == source.resolve():
        raise InvalidOutput(
            f"{path}: the output is the input", "give another path with -o: inputs are never changed"
        )
    if path.exists() and not force and not (path.is_dir() and not any(path.iterdir())):
        raise InvalidOutput(f"{path}: exists already", "choose another -o, or add --force")
    parent = path.parent
    while not parent.exists():
        parent = parent.parent
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise InvalidOutput(f"{path}: {parent} is not a folder that can be written", "choose another -o")


@contextmanager
def staged(folder: Path) -> Iterator[Path]:
    """A temporary folder whose files move into ``folder`` together, at the end, or not at all.

    Raises:
        InvalidOutput: The folder cannot be made or written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        stage = Path(tempfile.mkdtemp(prefix=".attnserve-", dir=folder))
    except OSError as error:
        raise InvalidOutput(f"{folder}: cannot be written: {error.strerror}", "choose another -o") from error
    try:
        yield stage
        # The model comes last: a reader that sees it sees everything it needs beside it.
        for path in sorted(stage.iterdir(), key=lambda path: path.suffix == ".onnx"):
            path.replace(folder / path.name)
    except OSError as error:
        raise InvalidOutput(f"{folder}: writing failed: {error.strerror}", "free some space") from error
    finally:
        shutil.rmtree(stage, ignore_errors=True)


def copy_companions(artifact: Artifact, folder: Path) -> None:
    """Copy the tokenizer files that lie beside a model into ``folder``."""
    for name in COMPANIONS:
        path = artifact.folder / name
        if path.is_file():
            shutil.copyfile(path, folder / name)


def write_record(folder: Path, record: dict[str, Any]) -> None:
    """Write attnserve.json, readable and diffable."""
    text = json.dumps(record, indent=2, ensure_ascii=False, allow_nan=False)
    (folder / RECORD).write_text(text + "\n", encoding="utf-8")


def _read_record(path: Path, model: str) -> dict[str, Any]:
    """attnserve.json speaks for one model: beside several .onnx files, for the one it names."""
    if not path.is_file():
        return {}
    try:
        record: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidModel(f"{path}: not valid JSON: {error}", "restore or remove the file") from error
    if not isinstance(record, dict):
        raise InvalidModel(f"{path}: expected a JSON object", "restore or remove the file")
    return record


def _check_external_data(path: Path, proto: onnx.ModelProto) -> None:
    """External data may name any path (and ONNX Runtime would open it): only the folder is safe."""
    folder = path.parent.resolve()
    for tensor in _tensors(proto):
        if tensor.data_location != onnx.TensorProto.EXTERNAL:
            continue
        facts = {entry.key: entry.value for entry in tensor.external_data}
        location = facts.get("location", "")
        where = f"{path}: external data of {tensor.name!r}"
        relative = Path(location)
        outside = (
            not location
            or relative.is_absolute()
            or "\\" in location
            or ":" in location
            or ".." in relative.parts
            or not (folder / relative).resolve().is_relative_to(folder)
        )
        if outside:
            raise InvalidModel(
                f"{where} is at {location!r}: expected a file inside the model's folder",
                "do not use this file: a model must not read outside its own folder",
            )
        data = folder / relative
        if not data.is_file():
            raise InvalidModel(f"{where} is missing: {location}", f"put {location} beside the model")
        try:
            end = int(facts.get("offset", "0")) + int(facts.get("length", "0"))
        except ValueError as error:
            raise InvalidModel(f"{where} has a broken offset or length", "export it again") from error
        if end > data.stat().st_size:
            raise InvalidModel(
                f"{where} ends at byte {end}, but {location} has {data.stat().st_size}",
                "the data file is truncated: copy it again",
            )


def _tensors(proto: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    graphs = [proto.graph]
    while graphs:
        graph = graphs.pop()
        yield from graph.initializer
        for node in graph.node:
            for attribute in node.attribute:
                if attribute.HasField("t"):
                    yield attribute.t
                if attribute.HasField("g"):
                    graphs.append(attribute.g)
                graphs.extend(attribute.graphs)
                yield from attribute.tensors
