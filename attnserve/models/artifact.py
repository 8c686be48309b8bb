"""Find the files of a model on disk: an artifact.

An artifact is a folder with ``model.onnx`` (or one other .onnx file), or an .onnx file. The files
``tokenizer.json`` and ``attnserve.json`` in the same folder belong to it. Models of the Hugging
Face hub are read too: ONNX files in a folder ``onnx`` below the tokenizer, and the pooling of
sentence-transformers.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePath
from typing import Any

from attnserve.literals import Activation, Pooling, Similarity
from attnserve.models.folder_settings import parse_settings, read_settings
from attnserve.models.json_files import json_object
from attnserve.models.lineage import LineageEntry, OptimizeEntry
from attnserve.models.measured import Fidelity
from attnserve.models.record import RECORD, Record, parse_record, read_record
from attnserve.models.settings_files import TransformersConfig
from attnserve.paths import StrPath, belongs_to
from graph_passes.errors import InvalidModel

__all__ = [
    "COMPANIONS",
    "HUB_FOLDER",
    "Artifact",
    "companions_to_copy",
    "copy_companions",
    "is_hub_folder",
    "model_file",
    "open_artifact",
]


COMPANIONS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "vocab.txt",
    "config.json",
    "generation_config.json",
    "chat_template.jinja",
)

EMPTY = Record()

HUB_FOLDER = "onnx"
"""The folder of ONNX files in a model of the Hugging Face hub."""


@dataclass(frozen=True)
class Artifact:
    """A model on disk with its companion files.

    Attributes:
        model: The .onnx file.
        record: The content of attnserve.json; empty if there is none.
        companion_folder: A folder with companion files for all versions or files of a model, used
            for files that are not in the model's folder.
    """

    model: Path
    record: Record = EMPTY
    companion_folder: Path | None = None

    @property
    def folder(self) -> Path:
        """The folder of the .onnx file."""
        return self.model.parent

    @property
    def folders(self) -> list[Path]:
        """The folders of the model's files, in the order in which they are searched."""
        return [self.folder, *filter(None, [self.companion_folder])]

    @property
    def name(self) -> str:
        """The name of the folder for model.onnx, else the file name without its suffix.

        For a symbolic link, the name of the link is used, which does not change with the target.
        Hidden folders, such as ``..data`` of Kubernetes, and the folder ``onnx`` name no model.
        """
        if self.model.stem != "model":
            return self.model.stem
        names = (folder.name for folder in Path(os.path.abspath(self.model)).parents)  # noqa: PTH100
        unnamed = ("", HUB_FOLDER)
        return next((n for n in names if n not in unnamed and not n.startswith(".")), "model")

    @property
    def tokenizer(self) -> Path | None:
        """The path of tokenizer.json; None without one."""
        return self.companion("tokenizer.json")

    def companion(self, name: str) -> Path | None:
        """The path of a companion file; None if it does not exist."""
        return next((path for folder in self.folders if (path := folder / name).is_file()), None)

    @property
    def pooling(self) -> Pooling:
        """The pooling of token vectors to one vector per text."""
        return self.record.pooling or "mean"

    @property
    def normalize(self) -> bool:
        """Whether pooled vectors are normalized to length one."""
        return bool(self.record.normalize)

    @property
    def dimensions(self) -> int | None:
        """The number of dimensions that pooled vectors keep; None for all."""
        return self.record.dimensions

    @property
    def output(self) -> str | None:
        """The output from which embeddings and scores are computed; None for the default."""
        return self.record.output

    @property
    def prompts(self) -> dict[str, str]:
        """Prompts that are put before a text, by name, for example "query"."""
        return self.record.prompts or {}

    @property
    def similarity(self) -> Similarity:
        """The similarity of two vectors that the model was trained for."""
        return self.record.similarity or "cosine"

    @property
    def ranks_unit_vectors(self) -> bool:
        """Whether the neighbors of a text are those of vectors of length one."""
        return self.normalize or self.similarity == "cosine"

    @property
    def activation(self) -> Activation | None:
        """The activation of scores; None for softmax, or sigmoid of a single logit."""
        return self.record.activation

    @property
    def first_position(self) -> int:
        """The position id of the first token, for graphs with an input ``position_ids``.

        Position ids of RoBERTa's family start after the id of the pad token.

        Raises:
            InvalidModel: config.json is not valid.
        """
        stated = self.record.first_position
        return self.settings.first_position if stated is None else stated

    @cached_property
    def config(self) -> dict[str, Any]:
        """The config.json of the model; empty without one, or if it is not an object.

        Raises:
            InvalidModel: The file is not JSON.
        """
        path = self.companion("config.json")
        return json_object(path) if path else {}

    @cached_property
    def settings(self) -> TransformersConfig:
        """The keys of config.json that the tokenizer and scores need.

        Raises:
            InvalidModel: The file is not valid.
        """
        path = self.companion("config.json")
        return TransformersConfig() if path is None else parse_settings(path, TransformersConfig)

    def prompt(self, *names: str) -> str:
        """The prompt with the first of these names that exists; without names, the default one.

        The default prompt is no prompt of queries or documents, as in sentence-transformers.
        """
        wanted = names or (self.record.default_prompt or "",)
        return next((self.prompts[name] for name in wanted if name in self.prompts), "")

    @property
    def max_length(self) -> int | None:
        """Maximum number of tokens of a text, with special tokens; None if unknown."""
        return self.record.max_length

    @property
    def lineage(self) -> tuple[LineageEntry, ...]:
        """The rewrites of the model, oldest first."""
        return self.record.lineage

    @property
    def other_runtimes(self) -> Mapping[str, Fidelity]:
        """The verifications of the last rewrite in further runtimes; see ``OptimizeEntry``."""
        last = self.lineage[-1] if self.lineage else None
        return last.other_runtimes if isinstance(last, OptimizeEntry) else {}

    @property
    def source(self) -> str | None:
        """The exported model; for a local folder only the last two path components, for privacy.

        None if the record does not name it.
        """
        source = self.record.source
        if source is None:
            return None
        path = PurePath(source)
        return "/".join(path.parts[-2:]) if path.is_absolute() else source

    @property
    def optimization(self) -> dict[str, Any] | None:
        """The size before the first rewrite and after the last; None without a rewrite."""
        if not self.lineage:
            return None
        first, last = self.lineage[0].to_json(), self.lineage[-1].to_json()
        kept = ("after", "fidelity", "batch", "sequence", "break_even_sequence")
        return {
            "rewrites": [entry.rewrite for entry in self.lineage],
            "before": first.get("before"),
            **{key: last.get(key) for key in kept},
        }

    @cached_property
    def plan_id(self) -> str | None:
        """Checksum of the last applied plan; None without a plan."""
        return self.lineage[-1].plan_id if self.lineage else None

    @property
    def labels(self) -> dict[int, str]:
        """Names of the classes: ``id2label`` in the record, else in config.json, else none.

        Raises:
            InvalidModel: The labels are not names by number, or config.json is not valid.
        """
        labels: Any = self.record.id2label
        if labels is None:
            labels = self.settings.labels
        if isinstance(labels, list):
            labels = dict(enumerate(labels))
        if not isinstance(labels, dict):
            return {}
        try:
            # Python's JSON text may contain lone surrogates, which have no UTF-8 form.
            return {int(key): str(label).encode().decode() for key, label in labels.items()}
        except ValueError as error:
            raise InvalidModel(
                f"{self.folder}: id2label: expected numbers and names: {error}",
                "correct it",
                code="artifact.labels",
            ) from error


def open_artifact(path: StrPath, companion_folder: Path | None = None) -> Artifact:
    """Open the artifact at ``path``, an .onnx file or a folder with one.

    Args:
        companion_folder: A folder with a tokenizer and a record, if the model's folder has none.

    Raises:
        InvalidModel: ``path`` does not exist, or is a folder without exactly one model.
    """
    model = model_file(path)
    folder = companion_folder
    hub_root = model.parent.parent
    if folder is None and model.parent.name == HUB_FOLDER and _has_configuration(hub_root):
        folder = hub_root
    record = read_record(model)
    if not record.stated and folder is not None and (folder / RECORD).is_file():
        found = parse_record(folder / RECORD)
        # Otherwise it describes another model in the folder.
        if found.describes(folder) is None:
            record = found.without("files", "others")
    if "pooling" not in record.stated:
        record = record.over(read_settings(model.parent, *filter(None, [folder])).record())
    return Artifact(model, record, folder)


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
    files = sorted(path.glob("*.onnx"))
    if not files and is_hub_folder(path):
        return path / HUB_FOLDER / "model.onnx"
    if len(files) != 1:
        raise InvalidModel(
            f"{path}: expected model.onnx in this folder, found {len(files)} .onnx files",
            "pass the path of the .onnx file",
            code="artifact.model_count",
        )
    return files[0]


def is_hub_folder(path: Path) -> bool:
    """Whether a folder has its model at onnx/model.onnx, as many on the Hugging Face hub."""
    return (path / HUB_FOLDER / "model.onnx").is_file() and _has_configuration(path)


def _has_configuration(path: Path) -> bool:
    return any((path / name).is_file() for name in ("config.json", "tokenizer.json", RECORD))


def copy_companions(artifact: Artifact, folder: Path) -> None:
    """Copy the companion files of a model into ``folder``.

    Raises:
        InvalidModel: A file is a link out of the model's folder.
    """
    for name, path in companions_to_copy(artifact).items():
        shutil.copyfile(path, folder / name)


def companions_to_copy(artifact: Artifact) -> dict[str, Path]:
    """The companion files of a model, by name.

    Raises:
        InvalidModel: A file is a link out of the model's folder: a copy would publish its target.
    """
    companions: dict[str, Path] = {}
    for name in COMPANIONS:
        path = artifact.companion(name)
        if path is None:
            continue
        above = artifact.companion_folder
        is_above = above is not None and path.resolve().is_relative_to(above.resolve())
        if not is_above and not belongs_to(path, artifact.model):
            raise InvalidModel(
                f"{path} is a link to {path.resolve()}, outside of the model's folder",
                "replace it by a copy of that file, or remove it",
                code="artifact.link_outside",
            )
        companions[name] = path
    return companions
