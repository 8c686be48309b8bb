"""State shared by the workers of one server: small files in one temporary folder.

    target.json       the models that every worker must load, with a generation; written by the
                      worker that handles a load or unload request, while it holds the lock
    worker-I.json     status of worker I, rewritten after every change
    seconds-PID.json  totals of the last minute by second, for /stats.json
    checks/           results of the load check, if they are not in the user's cache folder
    shadow/           rows for worker 0 to compare with the original, and its reports
    metrics/          Prometheus series of each worker (PROMETHEUS_MULTIPROC_DIR)
    complete          exists once all workers have served

Every file is replaced atomically, so that a reader never sees a partial file and a worker may be
killed at any time. The lock is released with its process, and the supervisor removes the status.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import orjson
from pydantic import TypeAdapter

from attnserve.runtime.cache import write_atomically
from service.metrics import Second, Version, VersionState

LOCK_POLL_S = 0.02

ModelSeconds = tuple[str, str, list[Second]]
"""(model, version, recent seconds)."""

T = TypeVar("T")


@dataclass(frozen=True)
class TargetModel:
    """The checksum of each version of a model to serve, and the reasons of failed versions."""

    identities: dict[str, str]
    failures: dict[str, str]


@dataclass(frozen=True)
class TargetState:
    """The models that every worker must load."""

    generation: int
    models: dict[str, TargetModel]


@dataclass(frozen=True)
class Status:
    """State of one worker.

    Attributes:
        serving: Whether the worker accepts connections and has loaded the target state.
        ready: Whether the worker has reached the target state, and all its models can run.
        generation: Generation of the last target state that the worker tried to reach.
        error: The reason why the worker could not reach that state, or could not start.
        models: State of each loaded version.
    """

    worker: int
    serving: bool = False
    ready: bool = False
    generation: int = 0
    error: dict[str, str] | None = None
    models: list[VersionState] = field(default_factory=list[VersionState])
    rss_bytes: int = 0

    def runs(self, name: str, version: str) -> bool:
        """Whether this worker can run a version."""
        return any(model[:2] == (name, version) and model.ready for model in self.models)


@dataclass(frozen=True)
class SharedState:
    """Access to the shared folder.

    Args:
        path: An existing folder.
        workers: Number of workers.
    """

    path: Path
    workers: int

    @property
    def metrics(self) -> Path:
        return self.path / "metrics"

    @property
    def complete(self) -> bool:
        """Whether all workers have served; from then on, readiness requires only live workers."""
        return (self.path / "complete").exists()

    def set_complete(self) -> None:
        """Record that all workers have served."""
        (self.path / "complete").touch()

    # -- target state -----------------------------------------------------------------------------

    @asynccontextmanager
    async def lock(self) -> AsyncGenerator[None]:
        """Hold the lock of the target state, which the kernel releases if this process dies."""
        file = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    await asyncio.sleep(LOCK_POLL_S)
            yield
        finally:
            os.close(file)

    def target(self) -> TargetState | None:
        """The target state; None until the first worker has loaded its models."""
        return self._read("target.json", TargetState)

    def set_target(self, target: TargetState) -> None:
        """Replace the target state; the caller holds the lock."""
        self._write("target.json", target)

    # -- workers ----------------------------------------------------------------------------------

    def status(self, worker: int) -> Status | None:
        """The status of a worker; None if the worker is not running, or has not reported yet."""
        return self._read(f"worker-{worker}.json", Status)

    def serving(self, *, but: int | None = None) -> list[Status]:
        """The status of each worker that accepts connections, except worker ``but``."""
        statuses = [self.status(worker) for worker in range(self.workers) if worker != but]
        return [status for status in statuses if status is not None and status.serving]

    def set_status(self, status: Status) -> None:
        """Replace the status of a worker."""
        self._write(f"worker-{status.worker}.json", status)

    def remove_status(self, worker: int) -> None:
        """Remove the status of a worker that has exited."""
        (self.path / f"worker-{worker}.json").unlink(missing_ok=True)

    # -- the last minute --------------------------------------------------------------------------

    def set_seconds(self, seconds: list[ModelSeconds]) -> None:
        """Store (model, version, recent seconds) of this process."""
        self._write(f"seconds-{os.getpid()}.json", seconds)

    def seconds(self) -> dict[Version, dict[int, Second]]:
        """The recent seconds of each version in all workers, including exited workers."""
        merged: dict[Version, dict[int, Second]] = {}
        for path in self.path.glob("seconds-*.json"):
            for model, version, seconds in self._read(path.name, list[ModelSeconds]) or ():
                by_number = merged.setdefault((model, version), {})
                for second in seconds:
                    by_number.setdefault(second.second, Second(second.second)).add(second)
        return merged

    # -- files ------------------------------------------------------------------------------------

    def _read(self, name: str, kind: type[T]) -> T | None:
        try:
            return _adapter(kind).validate_json((self.path / name).read_bytes())
        except FileNotFoundError:
            return None

    def _write(self, name: str, content: Any) -> None:
        with suppress(FileNotFoundError):  # the server has stopped and removed the folder
            text = orjson.dumps(content, tuple, orjson.OPT_NON_STR_KEYS)
            write_atomically(self.path / name, text)


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    """Build the parser of ``kind`` once, because that takes milliseconds."""
    return TypeAdapter(kind)
