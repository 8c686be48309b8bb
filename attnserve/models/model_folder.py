"""Find models on disk, in the layout of Triton's model repository.

A path is an .onnx file, an artifact folder, or a folder of models: NAME/VERSION/model.onnx, or
NAME/model.onnx for version 1; or NAME/onnx/model.onnx with config.json or tokenizer.json in NAME.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from attnserve.models.artifact import is_hub_folder, open_artifact
from graph_passes.errors import InvalidModel

__all__ = ["ModelLocation", "find_models"]

VERSION = re.compile(r"[1-9]\d{0,17}|0")


@dataclass(frozen=True)
class ModelLocation:
    """Location of a version; ``companion_folder`` is the folder above the versions of a model."""

    path: Path
    companion_folder: Path | None = None


def find_models(path: Path, *, must_exist: bool = False) -> dict[str, dict[str, ModelLocation]]:
    """The models at ``path``, by name and version. Stray files beside models are ignored.

    Raises:
        InvalidModel: The file or folder does not exist, or its name is not UTF-8.
        OSError: It cannot be read; with ``must_exist``, also if it does not exist.
    """
    if must_exist:
        path.stat()
    models = dict(_models(path)) if path.is_dir() else {}
    is_hub = is_hub_folder(path) and models.keys() <= {"onnx"}
    is_artifact = not path.is_dir() or (path / "model.onnx").is_file() or is_hub
    if is_artifact or (not models and any(path.glob("*.onnx"))):
        name = open_artifact(path).name
        if not _is_text(name):
            raise InvalidModel(
                f"{path!r}: the name is not UTF-8", "rename it", code="model.name_not_text"
            )
        return {name: {"1": ModelLocation(path)}}
    return models


def _is_text(name: str) -> bool:
    """Whether a name can be written in a URL and in JSON; any bytes can name a folder."""
    return name.encode(errors="ignore").decode() == name


def _models(path: Path) -> Iterator[tuple[str, dict[str, ModelLocation]]]:
    """(name, versions) of each model in a folder.

    Other folders are ignored, also those that this user may not read: the root of a volume has a
    ``lost+found``.
    """
    for folder in sorted(path.iterdir()):
        versions: dict[str, ModelLocation] = {}
        with suppress(PermissionError):
            if not folder.is_dir() or folder.name.startswith(".") or not _is_text(folder.name):
                continue
            versions = {
                child.name: ModelLocation(child, folder)
                for child in folder.iterdir()
                if VERSION.fullmatch(child.name) and (child / "model.onnx").is_file()
            }
            if not versions and ((folder / "model.onnx").is_file() or is_hub_folder(folder)):
                versions = {"1": ModelLocation(folder)}
        if versions:
            yield folder.name, versions
