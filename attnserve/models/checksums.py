"""Checksums of files and models."""

from __future__ import annotations

import functools
import hashlib
import stat
from collections.abc import Sequence
from pathlib import Path

import onnx_ir as ir

from attnserve.models.artifact import Artifact
from attnserve.models.lineage import LineageEntry, Source
from attnserve.models.onnx_files import external_data_locations, load_model
from attnserve.models.record import RECORD
from graph_passes.errors import InvalidModel

__all__ = [
    "check_checksums",
    "fingerprint",
    "last_rewrite_of",
    "path_sha256",
    "sha256",
    "source_entry",
]


def check_checksums(artifact: Artifact) -> None:
    """Compare the files of an artifact with the checksums in its record.

    Raises:
        InvalidModel: A file is missing, or its checksum differs.
    """
    record = artifact.model.with_name(RECORD)
    for name, digest in artifact.record.files.items():
        path = artifact.folder / name
        if Path(name).name != name:
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
        checksum = sha256(path)
        if checksum != digest.lower():
            raise InvalidModel(
                f"{path}: the sha256 is {checksum[:12]}.., but {record.name} has {digest[:12]}..",
                "copy the artifact again, or export or optimize it again",
                code="artifact.checksum",
            )


def sha256(path: Path) -> str:
    """The SHA-256 checksum of a file in hexadecimal.

    Raises:
        InvalidModel: It cannot be read, or is not a regular file: a device may have no end.
    """
    why: str | None = "it is not a regular file"
    try:
        if stat.S_ISREG(path.stat().st_mode):
            with path.open("rb") as file:
                return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        why = error.strerror
    raise InvalidModel(f"{path}: cannot be read: {why}", "check the path", code="artifact.file")


def path_sha256(path: Path, pattern: str = "**/*") -> str:
    """The SHA-256 checksum of a file, or of the names and contents of the files of a folder.

    Args:
        pattern: Which files of the folder count.

    Raises:
        InvalidModel: A file cannot be read.
    """
    if path.is_file():
        return sha256(path)
    digest = hashlib.sha256()
    for file in sorted(file for file in path.glob(pattern) if file.is_file()):
        digest.update(f"{file.relative_to(path).as_posix()} {sha256(file)}".encode())
    return digest.hexdigest()


def fingerprint(artifact: Artifact) -> str:
    """A checksum of the model file, its external data and its tokenizer."""
    digest = hashlib.sha256(sha256(artifact.model).encode())
    files = [artifact.folder / name for name in external_data_locations(artifact.model)]
    tokenizer = [] if artifact.tokenizer is None else [artifact.tokenizer]
    for path in (*sorted(files), *tokenizer):
        digest.update(f"{path.name} {sha256(path)}".encode())
    return digest.hexdigest()


def source_entry(artifact: Artifact, model: ir.Model) -> Source:
    """The record's entry for the rewritten model: its file, and checksums of file and weights.

    Args:
        model: The loaded model of the artifact. Loading it here would take its memory twice.
    """
    return Source(
        file=artifact.model.name, sha256=sha256(artifact.model), weights=_weights_sha256(model)
    )


def last_rewrite_of(original: Artifact, lineage: Sequence[LineageEntry]) -> int | None:
    """Index of the last rewrite that names this model as its source.

    0 if no rewrite names a source; None if all name other models. The model is identified by its
    weights, because it may be stored in another way since (for example with external data), or by
    the file in records of earlier versions.
    """
    sources = [entry.source for entry in lineage]
    if not any(source.sha256 for source in sources):
        return 0
    checksum = sha256(original.model)
    weights = functools.cache(lambda: _weights_sha256(load_model(original, in_place=True)))

    def is_same(source: Source) -> bool:
        if source.weights is not None:
            return source.weights == weights()
        return source.sha256 == checksum

    places = [place for place, source in enumerate(sources) if is_same(source)]
    return places[-1] if places else None


def _weights_sha256(model: ir.Model) -> str:
    """The SHA-256 checksum of all weights, by name."""
    digest = hashlib.sha256()
    weights = {
        f"{graph.name} {name}": value
        for graph in model.graphs()
        for name, value in graph.initializers.items()
    }
    for name in sorted(weights):
        tensor = weights[name].const_value
        if tensor is not None:
            digest.update(f"{name} {tensor.dtype} {tensor.shape}".encode())
            digest.update(tensor.tobytes())
    return digest.hexdigest()
