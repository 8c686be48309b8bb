"""The application: models from a repository, the protocols they are spoken to in, their metrics."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import asynccontextmanager
from types import FrameType
from typing import Any

import uvicorn
from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.middleware.cors import CORSMiddleware
from prometheus_client import CONTENT_TYPE_LATEST

from attnserve import __version__
from graph_passes.errors import InvalidArgument
from service.api import open_inference, openai, texts, triton
from service.api.routes import ObserveRequests, json_response
from service.api.schemas import Error
from service.auth import RequireKey, read_keys
from service.dashboard import router as dashboard
from service.dashboard.stats import report
from service.engine.device import on_device
from service.engine.repository import Repository, say_operators
from service.errors import install_handlers
from service.metrics import Metrics
from service.settings import Settings, read_settings

__all__ = [
    "Server",
    "bound_socket",
    "create_app",
    "say_serving",
    "serve",
    "server_config",
    "start_log",
]

log = logging.getLogger("attnserve")


def create_app(settings: Settings | None = None, repository: Repository | None = None) -> FastAPI:
    """The application that serves ``settings.model``.

    Args:
        settings: What to serve, and its limits; None for what the environment says.
        repository: Where the models are loaded already; else they are loaded when the application
            starts, which then raises what ``Repository.start`` raises.

    Raises:
        InvalidArgument: A setting cannot work, or the file with the API keys cannot be read.
    """
    chosen = settings or read_settings()
    models = repository or Repository(chosen, Metrics())
    chosen, metrics = models.settings, models.metrics

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncGenerator[None]:
        await models.start()
        try:
            yield
        finally:
            await models.close()

    app = FastAPI(
        title="attnserve",
        version=__version__,
        description="ONNX attention models: inference, embeddings, and what every answer cost.",
        lifespan=lifespan,
        redirect_slashes=False,
        responses={"4XX": {"model": Error}, "5XX": {"model": Error}},
        telemetry=NO_TELEMETRY,
    )
    app.state.settings = chosen
    app.state.repository = models
    app.state.metrics = metrics
    # The last one added sees a request first: refusals are counted, and have an id, too.
    if keys := read_keys(chosen):
        app.add_middleware(RequireKey, keys=keys)
    if chosen.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(chosen.cors_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["*"],
        )
    app.add_middleware(ObserveRequests, metrics=metrics)
    install_handlers(app, {"/v1": openai.render_error})
    told = APIRouter(tags=["Metrics"])

    @told.get("/metrics", response_class=Response)
    async def prometheus(request: Request) -> Response:
        """All series, in Prometheus' text format."""
        return Response(metrics.render(), media_type=CONTENT_TYPE_LATEST)

    @told.get("/stats.json")
    async def stats(request: Request) -> Response:
        """The last minute, by model and second, and what the models are."""
        return json_response(report(models))

    # Triton's routes come before v2's: /v2/models/stats is not the model "stats".
    for router in (texts, openai, triton, open_inference):
        app.include_router(router.router)
    app.include_router(dashboard)
    app.include_router(told)
    return app


def serve(settings: Settings) -> None:
    """Serve until told to stop; stdout stays silent, the log goes to stderr.

    Told to stop (SIGTERM, SIGINT), it says that it is not ready, answers what it has accepted, and
    returns. A SIGINT after that refuses what is not answered yet.

    Raises:
        KeyboardInterrupt: It was told to stop at once.
        InvalidArgument: The address cannot be listened on, the provider is not available here, the
            file with the API keys cannot be read, or this system has no several workers.
        InvalidModel: No model can be loaded.
        MissingExtra: ONNX Runtime is not installed.
        ServiceError: Of several workers, none could be started, or one did not end well.
    """
    if settings.workers > 1 and os.name != "posix":  # no sockets for children, no file locks
        raise InvalidArgument(
            f"--workers {settings.workers} needs Linux or macOS", "serve with one worker"
        )
    start_log(settings)
    settings = on_device(settings)
    with bound_socket(settings) as listener:
        if settings.workers > 1:
            from service.workers.supervisor import supervise  # it imports what only POSIX has

            supervise(settings, listener)
            return
        repository = Repository(settings, Metrics())
        app = create_app(settings, repository)
        # Loaded here and not at startup: what is wrong with it is an error like any other.
        asyncio.run(repository.start())

        def say() -> None:
            keep_for_good()
            say_serving(listener, (engine.name for engine in repository.engines()))
            for engine in repository.engines():
                say_operators(engine)

        Server(server_config(app), repository, say).run(sockets=[listener])


def start_log(settings: Settings) -> None:
    """Log to stderr, plain lines."""
    logging.basicConfig(
        stream=sys.stderr, level=settings.log_level.upper(), format="%(message)s", force=True
    )


def keep_for_good() -> None:
    """Do not look for garbage any more among all that there is now: modules, routes, models.

    They are a hundred thousand objects and more. Python would look through them every now and then,
    between two answers, for some 50 ms; among what requests make it takes 5.
    """
    gc.collect()
    gc.freeze()


def say_serving(listener: socket.socket, names: Iterable[str]) -> None:
    """The first line of the log."""
    host, port = listener.getsockname()[:2]
    address = f"[{host}]" if ":" in host else host
    log.info("serving %s at http://%s:%d", ", ".join(dict.fromkeys(names)), address, port)


def server_config(app: FastAPI) -> uvicorn.Config:
    """How uvicorn serves ``app``: we log, not it."""
    return uvicorn.Config(
        app,
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
    )


class Server(uvicorn.Server):
    """uvicorn, which drains: what was accepted is answered, and then the process ends well.

    Args:
        started: Called once connections are accepted.
    """

    def __init__(
        self, config: uvicorn.Config, repository: Repository, started: Callable[[], None]
    ) -> None:
        super().__init__(config)
        self._repository, self._say_started = repository, started
        self._hurried = False
        self._loop: asyncio.AbstractEventLoop | None = None

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until told to stop.

        Raises:
            KeyboardInterrupt: It was told to stop at once, by a second SIGINT.
        """
        # uvicorn raises the signals that it has caught again at its end: nobody else needs them.
        before = {number: signal.signal(number, _ignore) for number in STOPS}
        try:
            super().run(sockets)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        if self._hurried:
            raise KeyboardInterrupt

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        if self.started:
            self._say_started()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        again = self._repository.draining and sig == signal.SIGINT and not self._hurried
        if again and self._loop is not None:
            # uvicorn would cut every connection: a refusal tells their clients more.
            self._hurried = True
            self._loop.call_soon_threadsafe(self._repository.abandon)
            return
        self._repository.draining = True
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        delay = self._repository.settings.drain_delay_s
        while delay > 0 and not self._hurried:  # still answering, no longer ready
            await asyncio.sleep(min(delay, 0.1))
            delay -= 0.1
        await super().shutdown(sockets)


STOPS = (signal.SIGINT, signal.SIGTERM)

NO_TELEMETRY = {"tracing": False, "metrics": False, "logs": False}
"""FastAPI's own, since 0.165; earlier versions know nothing of it. Ours (``tracing``) says what an
answer cost, and there would be two spans a request."""

KEEP_ALIVE_S = 75
"""An idle connection is closed after this. uvicorn's own 5 s race clients that ask now and then: a
request that is on its way when the connection is closed gets no answer."""


def _ignore(number: int, frame: Any) -> None:
    """uvicorn has shut down already."""


def bound_socket(settings: Settings) -> socket.socket:
    """A socket at the address of ``settings``, which does not listen yet.

    Raises:
        InvalidArgument: The address is taken, or not one of this machine.
    """
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    # asyncio turns Nagle's algorithm off only for sockets that say TCP: else 40 ms an answer.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        if os.name == "posix":  # a restart need not wait for old connections to time out
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((settings.host, settings.port))
    except OSError as error:
        listener.close()
        raise InvalidArgument(
            f"cannot listen on {settings.host}:{settings.port}: {error.strerror}",
            "choose another --host or --port",
        ) from error
    return listener
