"""One worker of several: a process that the supervisor starts, and that serves as one with others.

It reads what to do from its standard input, in a line. When that ends, the supervisor is no more:
the worker answers what it has accepted, and ends too.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import sys
import threading
from pathlib import Path
from typing import Any

import orjson
import uvicorn

from graph_passes.errors import AttnserveError
from service.app import Server, create_app, keep_for_good, server_config, start_log
from service.engine.repository import say_operators
from service.metrics import Metrics, share_series
from service.settings import Settings
from service.workers.shared_repository import SharedRepository
from service.workers.shared_state import Runtime

__all__: list[str] = []

INTERRUPTED = 128 + signal.SIGINT
"""The exit code of what was told to stop at once."""


class _Server(Server):
    """A server that counts as a worker while it accepts connections."""

    def __init__(
        self, config: uvicorn.Config, repository: SharedRepository, runtime: Runtime
    ) -> None:
        super().__init__(config, repository, self._started)
        self._shared, self._runtime = repository, runtime

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        # With the lock: between what it has and that it serves, nothing is loaded or unloaded.
        async with self._runtime.changing():
            await self._shared.join()
            await super().startup(sockets)

    def _started(self) -> None:
        keep_for_good()
        self._shared.say_serving()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        await self._shared.leave()


def main() -> int:
    """Serve until told to stop; the exit code."""
    told: dict[str, Any] = orjson.loads(sys.stdin.buffer.readline())
    settings = Settings(**told["settings"])
    runtime, worker = Runtime(Path(told["runtime"]), settings.workers), told["worker"]
    start_log(settings)
    orphaned = threading.Event()
    threading.Thread(target=_watch_parent, args=(orphaned,), daemon=True).start()
    share_series(runtime.metrics, worker)
    with socket.socket(fileno=told["listener"]) as listener:
        repository = SharedRepository(
            settings, Metrics(runtime.metrics), worker=worker, runtime=runtime
        )
        try:
            app = create_app(settings, repository)
            asyncio.run(repository.start())
            for engine in repository.engines() if worker == 0 else ():
                say_operators(engine)
            _Server(server_config(app), repository, runtime).run(sockets=[listener])
        except KeyboardInterrupt:
            return INTERRUPTED
        except AttnserveError as error:
            runtime.fail(worker, error)
            return error.exit_code
    if orphaned.is_set() and not runtime.serving():  # nobody else takes it away
        shutil.rmtree(runtime.path, ignore_errors=True)
    return 0


def _watch_parent(orphaned: threading.Event) -> None:
    """Stop as by SIGTERM when the supervisor is no more."""
    # Not by sys.stdin: the interpreter would wait for its lock at the end.
    while os.read(0, 1024):
        pass
    orphaned.set()
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main())
