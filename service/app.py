"""The FastAPI application: routes of all protocols, metrics, dashboard and middleware."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from fastapi import APIRouter, FastAPI, Response
from fastapi.middleware.cors import CORSMiddleware
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.datastructures import Headers
from starlette.middleware.gzip import GZipMiddleware
from starlette.types import Receive, Scope, Send

from attnserve import __version__
from service.api import open_inference, openai, ranking, tei, texts, triton
from service.api.exchange import Here
from service.api.observe import ObserveRequests
from service.api.responses import json_response
from service.auth import Authorize, read_keys
from service.dashboard import page
from service.dashboard.stats import report
from service.engine.repository import Repository
from service.errors import Error, ErrorResponses
from service.present_state import PresentState
from service.settings import Settings

LARGE_BYTES = 262_144
"""Minimum size of compressed answers; the transfer of smaller ones is faster than compression."""

REFUSES_GZIP = re.compile(r"\bgzip\s*;\s*q=0(\.0*)?\s*(,|$)", re.IGNORECASE)


class CompressLarge(GZipMiddleware):
    """Compresses large JSON and text, in a thread; raw tensors do not shrink."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        accepted = Headers(raw=scope.get("headers", [])).get("accept-encoding", "")
        # HTTP/1.0 has no chunks, and the compressed length is not known before the first part.
        is_plain = REFUSES_GZIP.search(accepted) or scope.get("http_version") == "1.0"
        await (self.app if is_plain else super().__call__)(scope, receive, send)


router = APIRouter()


@router.get("/", include_in_schema=False)
async def root(exchange: Here) -> Response:
    """The dashboard for browsers; for other clients, the answer of /health."""
    is_browser = "text/html" in exchange.request.headers.get("accept", "")
    answer = page() if is_browser else await tei.health(exchange)
    answer.headers["vary"] = "Accept"
    return answer


# Plain functions run in threads: both routes read the files of all workers.
@router.get("/metrics", tags=["Metrics"], response_class=Response)
def prometheus(exchange: Here) -> Response:
    """All series in the Prometheus text format."""
    models = exchange.repository
    text = generate_latest(models.metrics) + generate_latest(PresentState(models))
    return Response(text, media_type=CONTENT_TYPE_LATEST)


@router.get("/stats.json", tags=["Metrics"])
def stats(exchange: Here) -> Response:
    """The last minute by model and second, and a description of each model."""
    return json_response(report(exchange.repository))


def create_app(settings: Settings | None = None, repository: Repository | None = None) -> FastAPI:
    """Create the application that serves ``settings.model``.

    Args:
        settings: Model path and limits; None reads the environment.
        repository: A repository that the caller starts. Without it, the startup of the application
            loads the models and raises the errors of ``Repository.start``.

    Raises:
        InvalidArgument: A setting is invalid, or the file of API keys cannot be read.
    """
    models = repository or Repository(settings or Settings.model_validate({}))
    renderers = {
        **dict.fromkeys(("/v1", "/v2/rerank", "/embeddings"), openai.render_error),
        **dict.fromkeys(tei.PREFIXES, tei.render_error),
    }
    errors = ErrorResponses(models.settings.model, renderers)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncGenerator[None]:
        if repository is None:
            await models.start()
        try:
            yield
        finally:
            await models.close()

    app = FastAPI(
        title="attnserve",
        version=__version__,
        description="Inference and embeddings with ONNX models, and the cost of every answer.",
        lifespan=lifespan,
        redirect_slashes=False,
        exception_handlers=errors.handlers,
        responses={"4XX": {"model": Error}, "5XX": {"model": Error}},
        # FastAPI creates spans of its own since 0.165: ``service.tracing`` creates one per request.
        telemetry={"tracing": False, "metrics": False, "logs": False},
    )
    app.state.repository = models
    _add_middleware(app, models, errors)
    # Triton's routes come before v2's: /v2/models/stats is not the model "stats".
    for module in (tei, texts, ranking, openai, triton, open_inference):
        app.include_router(module.router)
    app.include_router(router)
    return app


def _add_middleware(app: FastAPI, repository: Repository, errors: ErrorResponses) -> None:
    """Add the middleware; the one added last runs first."""
    settings = repository.settings
    app.add_middleware(
        CompressLarge,
        minimum_size=LARGE_BYTES,
        compresslevel=1,
        exclude_content_types=("application/octet-stream",),
    )
    app.add_middleware(Authorize, settings=settings, keys=read_keys(settings), errors=errors)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.cors_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["*"],
        )
    app.add_middleware(ObserveRequests, repository=repository, errors=errors)  # counts refusals too
