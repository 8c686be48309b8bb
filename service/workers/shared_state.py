"""What the workers of one server know of each other: small files in a folder of their own.

    desired.json      what every worker is to have loaded, with a generation; written by the worker
                      that was asked to load or unload, while it holds the lock
    worker-I.json     what worker I has loaded, and how it is; it says so at least once a second
    error-I.json      why worker I could not start
    rewritten/       models in faster operators, as the worker that was asked to load them found
    seconds/          what each worker did in each of the last seconds, for /stats.json
    metrics/          the series of each worker, memory-mapped: they outlive a worker that is killed
    complete          is there once all workers have served

Every file is replaced as a whole, so that a reader never sees half of one, and a worker may die at
any moment: the lock goes with it, and the supervisor takes away what it said of itself.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import time
from typing import Any

import orjson

from graph_passes.errors import AttnserveError, InvalidArgument, InvalidModel, MissingExtra
from service.errors import NotReady

__all__ = ["Desired", "Runtime", "Status", "Wanted"]

STALE_S = 15
"""A worker that has said nothing for so long hangs; a busy one is late by a second or two."""

LOCK_POLL_S = 0.02

TOLD: Mapping[str, type[AttnserveError]] = {
    kind.__name__: kind for kind in (InvalidModel, InvalidArgument, MissingExtra, NotReady)
}
"""Errors that one process may pass on to another as they are."""


@dataclass(frozen=True)
class Wanted:
    """Of one model: a checksum of each version that is to serve, and why others do not."""

    contents: dict[str, str]
    failures: dict[str, str]


@dataclass(frozen=True)
class Desired:
    """What every worker is to have loaded.

    ``proofs`` are what the prober found of these contents: one probe is enough for all workers.
    """

    generation: int
    models: dict[str, Wanted]
    proofs: dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Status:
    """How one worker is.

    Attributes:
        serving: It accepts connections.
        ready: It serves all that it has loaded, which is all that is desired.
        generation: Of the desired state that it has tried to reach.
        error: Why it could not; None where it has.
        models: (model, version, rows waiting, requests in flight, ready) of what is loaded.
        at: When it said so, seconds since 1970.
    """

    worker: int
    pid: int
    serving: bool = False
    ready: bool = False
    generation: int = 0
    error: dict[str, str] | None = None
    models: list[tuple[str, str, int, int, bool]] = field(default_factory=list)
    rss_bytes: int = 0
    at: float = 0.0

    @property
    def hangs(self) -> bool:
        return time() - self.at > STALE_S


@dataclass(frozen=True)
class Runtime:
    """The folder, and what is in it.

    Args:
        path: It exists.
        workers: How many there are to be.
    """

    path: Path
    workers: int

    def prepare(self) -> None:
        """Make what the workers find."""
        self.metrics.mkdir()
        self.seconds.mkdir()

    @property
    def metrics(self) -> Path:
        return self.path / "metrics"

    @property
    def rewritten(self) -> Path:
        return self.path / "rewritten"

    @property
    def seconds(self) -> Path:
        return self.path / "seconds"

    @property
    def complete(self) -> bool:
        """Whether all workers have served: from then on, those that are left are enough."""
        return (self.path / "complete").exists()

    def say_complete(self) -> None:
        (self.path / "complete").touch()

    # -- what is desired --------------------------------------------------------------------------

    @asynccontextmanager
    async def changing(self) -> AsyncGenerator[None]:
        """Hold the lock of the desired state; where its holder dies, it is free."""
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

    @property
    def desired_stamp(self) -> tuple[int, int]:
        """What is another when the desired state is; it costs a look, not a reading."""
        try:
            facts = (self.path / "desired.json").stat()
        except FileNotFoundError:
            return (0, 0)
        return (facts.st_ino, facts.st_mtime_ns)

    def desired(self) -> Desired | None:
        """None until the first worker has loaded its models."""
        read = self._read("desired.json")
        if read is None:
            return None
        models = {name: Wanted(**wanted) for name, wanted in read["models"].items()}
        return Desired(read["generation"], models, read["proofs"])

    def desire(self, desired: Desired) -> None:
        """Only with the lock."""
        self._write("desired.json", asdict(desired))

    # -- how workers are --------------------------------------------------------------------------

    def status(self, worker: int) -> Status | None:
        """What a worker says of itself; None where it does not live, or says nothing yet."""
        read = self._read(f"worker-{worker}.json")
        return None if read is None else Status(**read)

    def serving(self, *, but: int | None = None) -> list[Status]:
        """The workers that accept connections, without worker ``but``."""
        found = [self.status(worker) for worker in range(self.workers) if worker != but]
        return [status for status in found if status is not None and status.serving]

    def say(self, status: Status) -> None:
        self._write(f"worker-{status.worker}.json", asdict(status))

    def forget(self, worker: int) -> None:
        """A worker is gone."""
        (self.path / f"worker-{worker}.json").unlink(missing_ok=True)

    def fail(self, worker: int, error: AttnserveError) -> None:
        """Say why a worker cannot start."""
        self._write(f"error-{worker}.json", as_told(error))

    def failure(self, worker: int) -> AttnserveError | None:
        """Why a worker could not start, where it said so; it is told once."""
        read = self._read(f"error-{worker}.json")
        (self.path / f"error-{worker}.json").unlink(missing_ok=True)
        return None if read is None else as_error(read)

    # -- the last seconds -------------------------------------------------------------------------

    def say_second(self, worker: int, second: int, did: Sequence[Any]) -> None:
        """What a worker did in one second, which is over."""
        self._write(f"seconds/{second}-{worker}.json", did)

    def forget_second(self, worker: int, second: int) -> None:
        (self.seconds / f"{second}-{worker}.json").unlink(missing_ok=True)

    def read_seconds(self, first: int, end: int) -> dict[int, list[Any]]:
        """What all workers did from second ``first`` to before ``end``, also those that died."""
        found: dict[int, list[Any]] = {}
        for path in self.seconds.iterdir():
            second = path.name.partition("-")[0]
            if second.isdigit() and first <= int(second) < end:
                found.setdefault(int(second), []).extend(self._read(f"seconds/{path.name}") or [])
        return found

    # -- files ------------------------------------------------------------------------------------

    def _read(self, name: str) -> Any:
        try:
            return orjson.loads((self.path / name).read_bytes())
        except FileNotFoundError:
            return None

    def _write(self, name: str, content: Any) -> None:
        new = self.path / f".{name.replace('/', '-')}.{os.getpid()}"
        with suppress(FileNotFoundError):  # the folder is gone: so is everybody who would read it
            new.write_bytes(orjson.dumps(content, option=orjson.OPT_NON_STR_KEYS))
            new.replace(self.path / name)


def as_told(error: AttnserveError) -> dict[str, str]:
    """``error`` as another process can read it."""
    return {"kind": type(error).__name__, "what": error.what, "fix": error.fix}


def as_error(told: Mapping[str, str]) -> AttnserveError:
    """The error that another process told."""
    return TOLD.get(told["kind"], NotReady)(told["what"], told["fix"])
