"""``--workers N``: processes that serve as one, and the parent that keeps them alive.

The parent serves nothing and loads nothing. It holds the address, starts the workers, puts another
in the place of one that dies, passes SIGTERM and SIGINT on as SIGTERM, and waits until every worker
has answered what it accepted. A second SIGINT is passed on as it is: nothing is waited for.

On Linux each worker listens on a socket of its own (SO_REUSEPORT): the kernel spreads connections
over those that live, and what dies takes only its own connections along. Elsewhere they share one.
"""

from __future__ import annotations

import logging
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

import orjson

from service.app import say_serving
from service.engine.isolation import environment, python
from service.errors import ServiceError
from service.settings import Settings
from service.workers.shared_state import Runtime

__all__ = ["supervise"]

BACK_OFF_S = (0.0, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
"""How long to wait before a worker is started again, by how often it failed in a row."""

TRIES = 3
"""After so many failures in a row, and with no worker that serves, there is no point in more."""

WELL_S = 10.0
"""A worker that served for so long was started well."""

POLL_S = 0.05
"""How often to look whether a worker that starts serves already."""

LOOK_S, HANGS_S = 5.0, 60.0
"""How often to look whether workers still speak, and how long one may be silent: then it is killed.
Time in which this process did not run either (a machine asleep) does not count."""

STOPS = (signal.SIGINT, signal.SIGTERM)

log = logging.getLogger("attnserve")


def supervise(settings: Settings, address: socket.socket) -> None:
    """Serve with ``settings.workers`` processes until told to stop.

    Args:
        address: Bound, not listening. It is held as long as this runs.

    Raises:
        KeyboardInterrupt: Told to stop at once, by a second SIGINT.
        ServiceError: No worker can be started, or one did not end well when told to stop.
        AttnserveError: What a worker said is wrong with its models or its settings.
    """
    settings = settings.model_copy(update={"threads": threads_of_each(settings)})
    with ExitStack() as stack:
        path = Path(tempfile.mkdtemp(prefix="attnserve-"))
        stack.callback(shutil.rmtree, path, ignore_errors=True)
        runtime = Runtime(path, settings.workers)
        runtime.prepare()
        wake = stack.enter_context(_signals())
        _Supervisor(settings, address, runtime, wake).run()


def threads_of_each(settings: Settings) -> int:
    """Threads of one run in each worker: all the cores that there are, shared out."""
    if settings.threads:
        return settings.threads
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return max(1, cores // (settings.workers * settings.concurrency))


@dataclass
class _Wake:
    """What ends a wait: a signal of any kind; ``stopping`` from the first that says to stop.

    ``hurry`` is called by a SIGINT that comes later, and ``hurried`` says so.
    """

    reader: socket.socket
    stopping: bool = False
    hurried: bool = False
    hurry: Callable[[], None] = lambda: None

    def wait(self, seconds: float) -> None:
        if select.select([self.reader], [], [], seconds)[0]:
            self.reader.recv(4096)


@contextmanager
def _signals() -> Generator[_Wake]:
    reader, writer = socket.socketpair()
    reader.setblocking(False)
    writer.setblocking(False)
    wake = _Wake(reader)

    def stop(number: int, frame: Any) -> None:
        if wake.stopping and number == signal.SIGINT:
            wake.hurried = True
            wake.hurry()
        wake.stopping = True

    # A handler for SIGCHLD, though it does nothing: else nobody wakes when a worker dies.
    handlers = dict.fromkeys(STOPS, stop) | {signal.SIGCHLD: _notice}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    previous = signal.set_wakeup_fd(writer.fileno())
    try:
        yield wake
    finally:
        signal.set_wakeup_fd(previous)
        for number, handler in before.items():
            signal.signal(number, handler)
        reader.close()
        writer.close()


def _notice(number: int, frame: Any) -> None:
    """The wait has ended: that is all."""


@dataclass
class _Worker:
    """A place for a process: who is there, and how often it failed in a row.

    ``spoke_at`` is when it last said how it is, on its own clock, ``silent_s`` how long it has said
    nothing new since, and ``looked_at`` when that was looked for.
    """

    number: int
    process: subprocess.Popen[bytes] | None = None
    serving_since: float | None = None
    failures: int = 0
    start_at: float = 0.0
    spoke_at: float = 0.0
    silent_s: float = 0.0
    looked_at: float = 0.0


class _Supervisor:
    def __init__(
        self, settings: Settings, address: socket.socket, runtime: Runtime, wake: _Wake
    ) -> None:
        self._settings, self._address = settings, address
        self._runtime, self._wake = runtime, wake
        wake.hurry = self._hurry
        self._workers = [_Worker(number) for number in range(settings.workers)]
        self._own_sockets = sys.platform == "linux"
        if self._own_sockets:
            # Only now: whoever else listens there was found out when it was bound.
            address.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)

    def run(self) -> None:
        try:
            while not self._wake.stopping:
                self._look()
                self._wake.wait(self._pause())
        except BaseException:
            self._stop()
            raise
        self._stop(must_end_well=True)
        if self._wake.hurried:
            raise KeyboardInterrupt

    def _look(self) -> None:
        """See who died and who serves, and start whose time has come."""
        for worker in self._workers:
            process = worker.process
            if process is not None and process.poll() is not None:
                self._died(worker, process)
            elif process is not None and worker.serving_since is None:
                status = self._runtime.status(worker.number)
                if status is not None and status.serving and status.pid == process.pid:
                    worker.serving_since = monotonic()
                    self._serves(worker)
            elif process is not None:
                self._listen(worker, process)
        for worker in self._workers:
            if worker.process is None and monotonic() >= worker.start_at:
                self._start(worker)

    def _pause(self) -> float:
        """Seconds until there is something to see, where no signal comes before."""
        if any(worker.process and worker.serving_since is None for worker in self._workers):
            return POLL_S
        waiting = [worker.start_at for worker in self._workers if worker.process is None]
        return min(1.0, max(0.0, min(waiting) - monotonic())) if waiting else LOOK_S

    def _listen(self, worker: _Worker, process: subprocess.Popen[bytes]) -> None:
        """Kill a worker that has been silent for too long: the next look finds it dead."""
        now, status = monotonic(), self._runtime.status(worker.number)
        passed, worker.looked_at = min(now - worker.looked_at, 2 * LOOK_S), now
        if status is not None and status.at != worker.spoke_at:
            worker.spoke_at, worker.silent_s = status.at, 0.0
            return
        worker.silent_s += passed
        if worker.silent_s > HANGS_S:
            log.error("worker %d (process %d) hangs: it is killed", worker.number, process.pid)
            process.kill()

    def _start(self, worker: _Worker) -> None:
        worker.silent_s = 0.0
        with self._listener() as listener:
            worker.process = subprocess.Popen(
                python("service.workers.worker"),
                stdin=subprocess.PIPE,
                env=environment("OTEL_"),  # a worker may export traces
                pass_fds=[listener.fileno()],
                process_group=0,  # what a terminal sends comes here alone, and is passed on
            )
            told = {
                "settings": _told(self._settings),
                "listener": listener.fileno(),
                "worker": worker.number,
                "runtime": str(self._runtime.path),
            }
            assert worker.process.stdin is not None
            try:
                # Left open: the worker notices by its end when this process is no more.
                worker.process.stdin.write(orjson.dumps(told) + b"\n")
                worker.process.stdin.flush()
            except BrokenPipeError:  # it is dead already: ``_look`` will say so
                pass

    def _listener(self) -> socket.socket:
        """What a worker listens on; it is closed here once the worker has it."""
        if not self._own_sockets:
            return self._address.dup()
        address = self._address
        listener = socket.socket(address.family, address.type, address.proto)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(address.getsockname())
        return listener

    def _serves(self, worker: _Worker) -> None:
        if self._runtime.complete:
            log.warning("worker %d serves again", worker.number)
        elif all(one.serving_since is not None for one in self._workers):
            desired = self._runtime.desired()
            models = desired.models.items() if desired else ()
            say_serving(self._address, (name for name, wanted in models if wanted.contents))
            self._runtime.say_complete()
            log.info(
                "%d workers: %d runs at once, %d threads each; statistics, metrics and load are"
                " those of all, limits those of each",
                len(self._workers),
                self._settings.concurrency * len(self._workers),
                self._settings.threads,
            )

    def _died(self, worker: _Worker, process: subprocess.Popen[bytes]) -> None:
        """A worker ended, and nobody told it to: it is started again.

        Raises:
            AttnserveError: It never came to serve, and that will not change.
        """
        self._take_away(worker, process)
        told = self._runtime.failure(worker.number)
        ended = _ended(process.returncode)
        since, worker.serving_since = worker.serving_since, None
        served_well = since is not None and monotonic() - since > WELL_S
        worker.failures = 0 if served_well else worker.failures + 1
        if since is None:
            error = told or ServiceError(
                f"worker {worker.number} {ended} before it served", "see the log above"
            )
            hopeless = told is not None and not self._runtime.complete
            alone = not any(other.serving_since for other in self._workers)
            if hopeless or (alone and worker.failures >= TRIES):
                raise error
            log.error("%s", str(error).replace("\n", "; "))
        # The first time at once: that it dies again is yet to be seen.
        tries = max(0, worker.failures - 1)
        delay = BACK_OFF_S[min(tries, len(BACK_OFF_S) - 1)]
        worker.start_at = monotonic() + delay
        log.error(
            "worker %d (process %d) %s: the others go on; started again %s",
            worker.number,
            process.pid,
            ended,
            f"in {delay:g} s" if delay else "now",
        )

    def _take_away(self, worker: _Worker, process: subprocess.Popen[bytes]) -> None:
        if process.stdin is not None:
            process.stdin.close()
        worker.process = None
        self._runtime.forget(worker.number)

    def _stop(self, *, must_end_well: bool = False) -> None:
        """Tell all workers to stop, and wait until they have answered what they accepted.

        Raises:
            ServiceError: One of them did not end well.
        """
        for worker in self._workers:
            if worker.process is not None:
                worker.process.send_signal(signal.SIGTERM)
        bad: list[str] = []
        for worker in self._workers:
            process = worker.process
            if process is not None:
                # One that was just being started knows no better than to die of it.
                starting = worker.serving_since is None
                if process.wait() and not (starting and process.returncode == -signal.SIGTERM):
                    bad.append(f"worker {worker.number} {_ended(process.returncode)}")
                self._take_away(worker, process)
        if bad and must_end_well and not self._wake.hurried:
            raise ServiceError(
                f"{bad[0]} when it was to stop", "requests that it had accepted may be lost"
            )

    def _hurry(self) -> None:
        """Told to stop for a second time: drop what is not answered yet."""
        for worker in self._workers:
            if worker.process is not None:
                worker.process.send_signal(signal.SIGINT)


def _told(settings: Settings) -> dict[str, Any]:
    """``settings`` as a worker reads them, secrets and all: it goes through a pipe."""
    told = settings.model_dump(mode="json")
    return told | {"api_keys": [key.get_secret_value() for key in settings.api_keys]}


def _ended(code: int) -> str:
    if code >= 0:
        return f"ended with {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"
