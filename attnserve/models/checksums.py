"""Checksums of files and models."""

from __future__ import annotations

import hashlib
import stat
from pathlib import Path

from attnserve.models.artifact import Artifact
from attnserve.models.onnx_files import external_data_locations
from attnserve.models.record import RECORD
from graph_passes.errors import InvalidModel

__all__ = ["check_files", "fingerprint", "sha256"]


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
