"""The application: one engine, the protocols it is spoken to in, and its metrics."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import uvicorn
from fastapi import FastAPI, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST

from attnserve import __version__
from graph_passes.errors import InvalidArgument
from service.engine import Engine
from service.errors import install_handlers
from service.http import ObserveRequests, describe_bodies
from service.metrics import Metrics
from service.protocols import embed, open_inference
from service.schemas import EmbedRequest, Error, InferRequest
from service.settings import Settings

__all__ = ["create_app", "serve"]

log = logging.getLogger("attnserve")


def create_app(settings: Settings | None = None, engine: Engine | None = None) -> FastAPI:
    """The application that serves ``settings.model``.

    Args:
        settings: What to serve, and its limits; None for what the environment says.
        engine: Where the model is loaded already; else it is loaded when the application starts,
            which then raises what ``Engine`` raises.
    """
    chosen = settings or Settings()  # pyright: ignore[reportCallIssue]  (from the environment)
    metrics = Metrics()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        loaded = engine or await asyncio.to_thread(Engine, chosen)
        metrics.watch(loaded)
        app.state.engine = loaded
        try:
            yield
        finally:
            app.state.engine = None
            loaded.close()

    app = FastAPI(
        title="attnserve",
        version=__version__,
        description="ONNX attention models: inference, embeddings, and what every answer cost.",
        lifespan=lifespan,
        redirect_slashes=False,
        responses={"4XX": {"model": Error}, "5XX": {"model": Error}},
    )
    app.state.engine = None
    app.state.metrics = metrics
    app.add_middleware(ObserveRequests, metrics=metrics)
    install_handlers(app)
    app.include_router(open_inference.router)
    app.include_router(embed.router)

    @app.get("/metrics", response_class=Response, tags=["Metrics"])
    async def prometheus(request: Request) -> Response:
        """All series, in Prometheus' text format."""
        return Response(metrics.render(), media_type=CONTENT_TYPE_LATEST)

    describe_bodies(app, InferRequest, EmbedRequest)
    return app


def serve(settings: Settings) -> None:
    """Serve until interrupted; stdout stays silent, the log goes to stderr.

    Raises:
        InvalidArgument: The address cannot be listened on, or the provider is not available here.
        InvalidModel: The model cannot be read.
        MissingExtra: ONNX Runtime is not installed.
    """
    logging.basicConfig(
        stream=sys.stderr, level=settings.log_level.upper(), format="%(message)s", force=True
    )
    with _bound_socket(settings) as listener:
        # Loaded here and not at startup: what is wrong with it is an error like any other.
        engine = Engine(settings)
        host, port = listener.getsockname()[:2]
        config = uvicorn.Config(
            create_app(settings, engine),
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
        )
        log.info(
            "serving %s at http://%s:%d", engine.name, f"[{host}]" if ":" in host else host, port
        )
        with suppress(KeyboardInterrupt):  # uvicorn has shut down already, and raises it again
            uvicorn.Server(config).run(sockets=[listener])


def _bound_socket(settings: Settings) -> socket.socket:
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
