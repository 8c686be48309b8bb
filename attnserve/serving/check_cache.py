"""Cache of the results of load checks, in a folder that several processes may share.

The key of a result covers the files, the package versions and the processor. Only this user can
write the folder, and an entry that does not fit its model counts as missing.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from time import sleep, time
from typing import Any

import orjson

from attnserve.models.checksums import sha256
from attnserve.models.onnx_files import data_file
from attnserve.models.recorded import Recorded
from attnserve.runtime.cache import cache_folder, private_folder, read_private, write_atomically
from attnserve.runtime.locks import open_folder, try_lock
from attnserve.runtime.machine import available_cores, cpu_flags
from attnserve.versions import package_versions
from graph_passes.errors import InvalidModel

__all__ = ["CheckCache", "compiled_file"]

PACKAGES = ("attnserve", "onnxruntime", "onnxruntime-gpu", "openvino", "tokenizers", "onnx-ir")

MOST_ENTRIES = 16
"""Maximum number of entries, by last use; each may contain a copy of the weights."""

RETRY_S = 3600.0
"""Seconds for which a result that may depend on the load of the machine is valid."""

ABANDONED_S = 86_400
"""Age in seconds from which a file without an entry counts as abandoned."""

LOCK_POLL_S = 0.2


class _Entry(Recorded, frozen=True):
    """The content of the file of an entry.

    Attributes:
        fused: The checksums of the fused model and of its data file; None without a fused model.
        until: The time until which the result is valid, in seconds; None for no limit.
        result: The stored result.
    """

    fused: tuple[str, ...] | None
    until: float | None
    result: Mapping[str, Any]


class CheckCache:
    """Entries of checks with the same settings, and their files.

    Args:
        folder: The folder, created if missing; None for a folder in the user's cache folder.
        settings: Other dependencies of the results, for example the provider.
    """

    def __init__(self, folder: Path | None = None, **settings: Any) -> None:
        self.folder = private_folder(folder or cache_folder() / "checks")
        """The folder; None if there is no folder that only this user can write."""
        machine = [package_versions(PACKAGES), sorted(cpu_flags()), available_cores()]
        self._setting = orjson.dumps([*machine, settings], option=orjson.OPT_SORT_KEYS)

    def file(self, checksum: str) -> Path | None:
        """The path of the fused model for a checksum of files; None without a folder."""
        key = hashlib.sha256(self._setting + checksum.encode()).hexdigest()
        return self.folder and self.folder / f"{key}.onnx"

    @contextmanager
    def lock(self, is_given_up: Callable[[], bool]) -> Generator[bool]:
        """Acquire the lock of this folder, waiting for other threads and processes.

        The kernel releases the lock when the process ends. Systems without locks do not wait.

        Args:
            is_given_up: Returns whether to stop waiting; the context value is then False.
        """
        with open_folder(self.folder) as folder:
            while not is_given_up():
                if try_lock(folder):
                    yield True
                    return
                sleep(LOCK_POLL_S)
            yield False

    @contextmanager
    def new_file(self, checksum: str) -> Generator[Path | None]:
        """Yield a path for writing the fused model; None without a folder.

        The name of the data file beside it follows from the path. ``keep`` stores the written
        files; the end of the context deletes files that were not kept.
        """
        file = self.file(checksum)
        folder = None
        with suppress(OSError):  # the disk is full
            if file is not None:
                folder = Path(tempfile.mkdtemp(prefix=f"{file.stem}.", dir=file.parent))
        try:
            yield folder / file.name if folder is not None and file is not None else None
        finally:
            if folder is not None:
                shutil.rmtree(folder, ignore_errors=True)

    def keep(self, new: Path) -> Path:
        """Move a model from the path of ``new_file`` to its final path; return the final path.

        Raises:
            OSError: The files cannot be moved.
        """
        assert self.folder is not None
        compiled_file(self.folder / new.name).unlink(missing_ok=True)  # compiled from another graph
        for path in (data_file(new), new):
            if path.exists():
                path.replace(self.folder / path.name)
        return self.folder / new.name

    def read(self, checksum: str) -> Mapping[str, Any] | None:
        """Read the stored result, if it is valid and the fused model is unchanged."""
        file = self.file(checksum)
        text = None if file is None else read_private(file.with_suffix(".json"))
        if file is None or text is None:
            return None
        with suppress(OSError, ValueError, InvalidModel):
            entry = _Entry.model_validate_json(text)
            is_valid = entry.until is None or time() < entry.until
            if is_valid and (entry.fused is None or entry.fused == _checksums(file)):
                os.utime(file.with_suffix(".json"))
                return entry.result
        return None

    def write(
        self, checksum: str, result: Mapping[str, Any], *, fused: bool, is_final: bool = True
    ) -> None:
        """Store a result, and the checksum of the fused model if there is one.

        Args:
            is_final: Whether a new check would have the same result; otherwise the result is valid
                for ``RETRY_S``.
        """
        file = self.file(checksum)
        if file is None:
            return
        with suppress(OSError):  # the cache is optional
            until = None if is_final else time() + RETRY_S
            checksums = _checksums(file) if fused else None
            entry = _Entry(fused=checksums, until=until, result=result)
            write_atomically(file.with_suffix(".json"), entry.model_dump_json().encode())
            self._delete_old(file.parent)

    def _delete_old(self, folder: Path) -> None:
        ages = {path: path.stat().st_mtime for path in folder.iterdir()}
        entries = sorted((p for p in ages if p.suffix == ".json"), key=ages.__getitem__)
        kept = {path.stem for path in entries[-MOST_ENTRIES:]}
        for path, age in ages.items():
            if path.is_dir():
                if age < time() - ABANDONED_S:
                    shutil.rmtree(path, ignore_errors=True)
            elif path.name.partition(".")[0] not in kept and (
                path in entries or age < time() - ABANDONED_S
            ):
                path.unlink(missing_ok=True)
                model = path.with_suffix(".onnx")
                for file in (model, data_file(model), compiled_file(model)):
                    file.unlink(missing_ok=True)


def compiled_file(model: Path) -> Path:
    """The path of the compiled model beside a fused model."""
    return model.with_suffix(".compiled")


def _checksums(file: Path) -> tuple[str, ...]:
    """The checksums of a model and of its data file, if there is one."""
    return tuple(sha256(path) for path in (file, data_file(file)) if path.exists())
