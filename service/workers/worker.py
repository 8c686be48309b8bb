"""Entry point of one worker process, started by the supervisor.

Standard input is a socket of the supervisor. The worker reads its task from the first line, and
sends heartbeats, which need no file, so that a full disk does not count as a hang. At the end of
the input the supervisor has exited, and the worker drains and exits too.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import orjson
from fastapi import FastAPI

from graph_passes.errors import AttnserveError
from service.app import create_app
from service.engine.repository import say_operators
from service.metrics import Metrics
from service.server import Server, configure_log, stop_while_starting
from service.settings import Settings
from service.workers.shared_repository import SharedRepository
from service.workers.shared_state import SharedState, Status, error_to_json

__all__: list[str] = []

INTERRUPTED = 128 + signal.SIGINT
"""Exit code after an interrupted drain."""


class _WorkerServer(Server):
    """A server that reports its start and its end to the other workers."""

    def __init__(self, app: FastAPI, repository: SharedRepository, state: SharedState) -> None:
        super().__init__(app, repository, repository.set_serving)
        repository.beat = _beat
        self._shared, self._state = repository, state

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        # With the lock: the target state must not change between reaching it and serving.
        async with self._state.lock():
            await self._shared.join()
            await super().startup(sockets)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        await self._shared.leave()


def main() -> int:
    """Serve until stopped; return the exit code."""
    task: dict[str, Any] = orjson.loads(sys.stdin.buffer.readline())
    settings, worker = Settings(**task["settings"]), int(task["worker"])
    state = SharedState(Path(task["state"]), settings.workers)
    configure_log(settings)
    orphaned = threading.Event()
    threading.Thread(target=_watch_parent, args=(orphaned,), daemon=True).start()
    stop_while_starting()
    with socket.socket(fileno=task["listener"]) as listener:
        try:
            metrics = Metrics(state.metrics)
            repository = SharedRepository(settings, metrics, worker=worker, state=state)
            app = create_app(settings, repository)
            asyncio.run(repository.start())
            for engine in repository.engines() if worker == 0 else ():
                say_operators(engine)
            _WorkerServer(app, repository, state).run(sockets=[listener])
        except KeyboardInterrupt:
            return INTERRUPTED
        except AttnserveError as error:
            state.set_status(Status(worker, os.getpid(), error=error_to_json(error)))
            return error.exit_code
    if orphaned.is_set() and not state.serving():  # the last worker removes the folder
        shutil.rmtree(state.path, ignore_errors=True)
    return 0


def _beat() -> None:
    with suppress(OSError):  # the supervisor has exited
        os.write(0, b".")


def _watch_parent(orphaned: threading.Event) -> None:
    """Stop as after SIGTERM once the supervisor has exited."""
    # Not sys.stdin: at exit the interpreter would wait for its lock.
    while os.read(0, 1024):
        pass
    orphaned.set()
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main())
