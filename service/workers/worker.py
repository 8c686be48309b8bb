"""Entry point of one worker process, started by the supervisor.

Standard input is a socket of the supervisor. The worker reads its task (a pickle) from it and sends
heartbeats, which need no file, so that a full disk does not count as a hang. If a heartbeat cannot
be sent, the supervisor has exited, and the worker drains and exits too.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import shutil
import signal
import socket
import sys
from functools import partial

from fastapi import FastAPI

from attnserve.runtime.isolation import error_to_json
from attnserve.runtime.temporary import keep_folder
from graph_passes.errors import AttnserveError
from service.app import create_app
from service.log import configure_log
from service.metrics import Metrics
from service.server import Server
from service.settings import Settings
from service.workers.shared_repository import SharedRepository
from service.workers.shared_state import SharedState, Status

BEAT_S = 1.0


class WorkerServer(Server):
    """A server that reports its start and its end to the other workers."""

    def __init__(self, app: FastAPI, repository: SharedRepository, state: SharedState) -> None:
        super().__init__(app, repository)
        self._shared, self._state = repository, state
        self._beating: asyncio.Task[None] | None = None
        self.is_orphaned = False
        """Whether the supervisor has exited."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._beating = asyncio.create_task(self.beat())
        open_port = partial(super().startup, sockets)
        if self._state.complete:  # others serve: this worker must not get connections yet
            await self._shared.join(open_port)
        else:
            await open_port()

    async def load(self) -> None:
        if not self._shared.serving:
            await self._shared.join()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        await self._shared.leave()

    async def beat(self) -> None:
        """Send heartbeats while the event loop runs, and stop once the supervisor has exited."""
        while not self.is_orphaned:
            try:
                os.write(0, b".")
            except BlockingIOError:  # the supervisor is suspended
                pass
            except OSError:
                self.is_orphaned = True
                os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(BEAT_S)


def main() -> int:
    """Serve until stopped; return the exit code."""
    task: tuple[Settings, int, SharedState, int] = pickle.load(sys.stdin.buffer)
    settings, worker, state, file = task
    os.set_blocking(sys.stdin.fileno(), False)
    configure_log(settings)
    keep_folder(state.path)
    with socket.socket(fileno=file) as listener:
        try:
            metrics = Metrics(state.metrics)
            repository = SharedRepository(settings, metrics, worker=worker, state=state)
            server = WorkerServer(create_app(settings, repository), repository, state)
            server.run(sockets=[listener])
        except KeyboardInterrupt:
            return 128 + signal.SIGINT
        except AttnserveError as error:
            state.set_status(Status(worker, error=error_to_json(error)))
            return error.exit_code
    if server.is_orphaned and not state.serving():  # the last worker removes the folder
        shutil.rmtree(state.path, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
