"""Start, monitor and stop the worker processes of a server with several workers.

The supervisor binds the address, starts the workers, replaces a worker that exits or hangs,
forwards SIGTERM and SIGINT, and waits until the workers have answered the accepted requests. It
loads no model and answers no request.

Each worker listens on its own socket on Linux (SO_REUSEPORT): the kernel distributes connections,
and a dead worker loses only its own. On other systems the workers share one socket.

``uvicorn.supervisors.Multiprocess`` (tried with uvicorn 0.54) lacks these properties:

- A worker whose event loop is blocked is replaced. uvicorn answers its health check in a thread.
- The workers drain and exit if the supervisor is killed. uvicorn's keep running and serving.
- A worker that crashes at startup is restarted with a growing delay, and the server gives up if no
  worker serves. uvicorn restarts it every half second without limit.
- Workers receive an allow-list of the environment. multiprocessing passes all of it.
- A second SIGINT interrupts the drain. uvicorn's supervisor ignores it.
"""

from __future__ import annotations

import asyncio
import logging
import math
import pickle
import shutil
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic

from attnserve.runtime.isolation import allowed_environment, describe_exit, error_from_json
from attnserve.runtime.temporary import temporary_folder
from graph_passes.errors import AttnserveError
from service.errors import NotReady, ServiceError, one_line
from service.server import STOP_SIGNALS, log_ready
from service.settings import Settings
from service.workers.shared_state import SharedState

BACK_OFF_S = (0.0, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
"""Seconds before a restart, by the number of previous failures in a row."""

MAX_FAILURES = 3
"""Failures in a row of one worker after which the server gives up, if no other worker serves."""

STABLE_S = 10.0
"""Seconds of serving that reset the count of failures of a worker."""

POLL_S = 0.1
"""Interval of the checks of each worker."""

END_S = 10.0
"""Seconds after the time to drain at which a worker that has not ended is killed."""

HANG_S = 60.0
"""Seconds without a heartbeat after which a worker is killed. Time is counted in checks, so that
the sleep of a suspended machine does not count."""

IMPORT_S = 120.0
"""Seconds until the first heartbeat of a worker, which first imports the program."""

log = logging.getLogger("attnserve")


def supervise(settings: Settings, address: socket.socket) -> None:
    """Serve with ``settings.workers`` processes until SIGTERM or SIGINT.

    Args:
        address: A bound socket that does not listen; it stays open while this runs.

    Raises:
        KeyboardInterrupt: A second SIGINT interrupted the drain.
        ServiceError: No worker can be started, or a worker failed during the drain.
        AttnserveError: A worker reported an invalid model or setting.
    """
    path = temporary_folder()
    try:
        state = SharedState(path, settings.workers)
        state.metrics.mkdir()
        (path / "shadow").mkdir()
        asyncio.run(_Supervisor(settings, address, state).run())
    finally:
        shutil.rmtree(path, ignore_errors=True)


@dataclass
class _Worker:
    """A running worker process, and the socket that is its standard input."""

    number: int
    process: subprocess.Popen[bytes]
    pipe: socket.socket
    serving_since: float | None = None

    def __str__(self) -> str:
        return f"worker {self.number} (process {self.process.pid})"

    def has_beaten(self) -> bool:
        """Whether the worker has sent heartbeats since the last call."""
        try:
            return bool(self.pipe.recv(4096))
        except (BlockingIOError, ConnectionResetError):
            return False

    def kill(self, why: str) -> None:
        """Kill the process; ``why`` is the reason in the log."""
        log.error("%s %s: it is killed", self, why)
        self.process.kill()
        self.process.wait()


class _Supervisor:
    """Run one task per worker, which starts its process again after each exit."""

    def __init__(self, settings: Settings, address: socket.socket, state: SharedState) -> None:
        self._settings, self._address, self._state = settings, address, state
        self._workers: dict[int, _Worker] = {}
        self._error: AttnserveError | None = None
        self._stopping = asyncio.Event()
        self._must_end_at = math.inf
        self._interrupted = False
        self._own_sockets = sys.platform == "linux"
        if self._own_sockets:
            # After bind: without SO_REUSEPORT, bind detects another server on the address.
            address.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)

    async def run(self) -> None:
        """Run the workers until stopped; see ``supervise`` for the errors."""
        loop = asyncio.get_running_loop()
        for number in STOP_SIGNALS:
            loop.add_signal_handler(number, self._on_signal, number)
        try:
            await asyncio.gather(*map(self._keep_running, range(self._settings.workers)))
        finally:  # after an unexpected error some workers are still running
            self._signal_workers(signal.SIGTERM)
        if self._interrupted:
            raise KeyboardInterrupt
        if self._error is not None:
            raise self._error

    def _on_signal(self, number: int) -> None:
        if not self._stopping.is_set():
            self._stop()
        elif number == signal.SIGINT:
            self._interrupted = True
            self._signal_workers(signal.SIGINT)

    def _stop(self, error: AttnserveError | None = None) -> None:
        self._error = self._error or error
        settings = self._settings
        patience = settings.drain_delay_s + settings.drain_timeout_s + END_S
        self._must_end_at = min(self._must_end_at, monotonic() + patience)
        self._stopping.set()
        self._signal_workers(signal.SIGTERM)

    def _signal_workers(self, number: int) -> None:
        for worker in self._workers.values():
            worker.process.send_signal(number)

    async def _keep_running(self, number: int) -> None:
        """Start a worker, and start it again when it exits, until the server stops."""
        failures = 0
        while not self._stopping.is_set():
            worker = self._workers[number] = self._start(number)
            await self._wait(worker)
            del self._workers[number]
            worker.pipe.close()
            status = self._state.status(number)
            self._state.remove_status(number)
            code = worker.process.returncode
            serving_since = worker.serving_since
            exited = f"ended with {describe_exit(code)}"
            if self._stopping.is_set():
                is_starting = serving_since is None and code in (
                    -signal.SIGTERM,
                    128 + signal.SIGTERM,
                )
                if code and not is_starting:
                    self._error = self._error or ServiceError(
                        f"worker {number} {exited} during the drain",
                        "requests that it had accepted may be lost",
                        code="worker.drain_failed",
                    )
                return
            failures = (
                0
                if serving_since is not None and monotonic() - serving_since >= STABLE_S
                else failures + 1
            )
            if serving_since is None:
                reported = None if status is None else status.error
                error = (
                    ServiceError(
                        f"worker {number} {exited} before it served",
                        "see the log above",
                        code="worker.exited",
                    )
                    if reported is None
                    else error_from_json(reported, NotReady)
                )
                # A restart does not help an invalid model, unless other workers serve it.
                is_final = reported is not None and not self._state.complete
                if is_final or (failures >= MAX_FAILURES and not self._serving):
                    self._stop(error)
                    return
                log.error("%s", one_line(error))
            delay = BACK_OFF_S[min(max(0, failures - 1), len(BACK_OFF_S) - 1)]
            log.error("%s %s; restart in %g s", worker, exited, delay)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), delay)

    @property
    def _serving(self) -> int:
        return sum(worker.serving_since is not None for worker in self._workers.values())

    async def _wait(self, worker: _Worker) -> None:
        """Wait until a worker exits, and kill it if it hangs or does not start to serve."""
        silent_s, starting_s, is_up = 0.0, 0.0, False
        while worker.process.poll() is None:
            await asyncio.sleep(POLL_S)
            if self._stopping.is_set():
                if monotonic() > self._must_end_at:
                    worker.kill("does not stop")
                continue
            has_beaten = worker.has_beaten()
            is_up = is_up or has_beaten
            silent_s = 0.0 if has_beaten else silent_s + POLL_S
            if silent_s > (HANG_S if is_up else IMPORT_S):
                worker.kill("hangs")
            elif worker.serving_since is None:
                status = self._state.status(worker.number)
                if status is not None and status.serving:
                    worker.serving_since = monotonic()
                    self._on_serving(worker)
                elif self._state.complete:  # all workers have served: models can be loaded
                    starting_s += POLL_S
                    if starting_s > self._settings.probe_timeout_s:
                        worker.kill("does not come to serve")

    def _start(self, number: int) -> _Worker:
        variables = {"PROMETHEUS_MULTIPROC_DIR": str(self._state.metrics)}
        ours, theirs = socket.socketpair()
        with self._listener() as listener, theirs:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "service.workers.worker"],
                stdin=theirs.fileno(),
                env=allowed_environment("OTEL_", "FORWARDED_ALLOW_IPS") | variables,
                pass_fds=[listener.fileno()],
                process_group=0,  # signals of the terminal reach the supervisor only
            )
            task = self._settings, number, self._state, listener.fileno()
        with suppress(BrokenPipeError, ConnectionResetError):  # ``_wait`` handles the exit
            # The socket stays open: its end tells the worker that this process has exited.
            ours.sendall(pickle.dumps(task))  # not in the environment: the task holds the API keys
        ours.setblocking(False)
        return _Worker(number, process, ours)

    def _listener(self) -> socket.socket:
        """The socket of one worker; closed in this process once the worker has inherited it."""
        if not self._own_sockets:
            return self._address.dup()
        address = self._address
        listener = socket.socket(address.family, address.type, address.proto)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(address.getsockname())
        return listener

    def _on_serving(self, worker: _Worker) -> None:
        workers, settings = self._settings.workers, self._settings
        if self._state.complete:
            log.warning("worker %d serves again", worker.number)
        elif self._serving == workers:
            target = self._state.target()
            models = target.models.items() if target else ()
            names = (name for name, model in models if model.identities)
            log_ready(settings, self._address.getsockname(), names)
            self._state.set_complete()
            log.info(
                "%d workers: %d concurrent runs, %d threads each; statistics, metrics and loading"
                " cover all workers, limits apply to each",
                workers,
                max(1, settings.concurrency) * workers,
                settings.threads,
            )
