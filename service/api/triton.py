"""Triton's extensions of the Open Inference Protocol v2: configuration, statistics, repository.

https://github.com/triton-inference-server/server/tree/main/docs/protocol
"""

from __future__ import annotations

from typing import Any

import orjson
from fastapi import APIRouter, Response
from pydantic import Field

from attnserve.serving.signature import Tensor
from attnserve.serving.tensor_codec import NAMES
from graph_passes.errors import InvalidData
from service.api.exchange import Exchange, Here
from service.api.requests import Body, Extensible, JsonRoute, model_paths, serve_at
from service.api.responses import json_response
from service.engine.engine import Engine
from service.engine.repository import Entry

router = APIRouter(prefix="/v2", tags=["Triton's extensions of v2"], route_class=JsonRoute)


class ModelConfig(Extensible):
    """The supported fields of Triton's ModelConfig."""

    name: str
    platform: str
    backend: str
    max_batch_size: int
    """0 if requests cannot be batched."""
    input: list[dict[str, Any]]
    output: list[dict[str, Any]]


class Duration(Body):
    """A number of events, and their total time in nanoseconds."""

    count: int
    ns: int


class VersionStatistics(Body):
    """Statistics of one version of a model, since its first loading."""

    name: str
    version: str
    last_inference: int
    """Milliseconds since 1970; 0 if there was none."""
    inference_count: int
    """Number of answered rows."""
    execution_count: int
    """Number of runs of the model."""
    inference_stats: dict[str, Duration]
    """success, fail, queue, compute_input, compute_infer, compute_output, and cache_hit and
    cache_miss, which are always 0."""
    batch_stats: list[dict[str, Duration | int]]
    """batch_size, compute_input, compute_infer and compute_output."""


class ModelStatistics(Body):
    """Statistics of versions of models: exact counts, and times in nanoseconds."""

    model_stats: list[VersionStatistics]


class IndexRequest(Body):
    """Filter of the index."""

    ready: bool = False
    """Return only the versions that are ready."""


class RepositoryRequest(Body):
    """Parameters of a load or unload."""

    parameters: dict[str, Any] = Field(default={})


# Plain functions run in threads: the series of all workers are files.
@router.get("/models/stats", response_model=ModelStatistics)
def all_statistics(exchange: Here) -> Response:
    """Exact statistics of all loaded models, since their first loading."""
    return _statistics(exchange, exchange.repository.engines())


@serve_at(router, *model_paths("/stats"), method="GET", response_model=ModelStatistics)
def model_statistics(exchange: Here) -> Response:
    """Statistics of every version of a model, or of the version in the path."""
    repository, name = exchange.repository, exchange.path["name"]
    version = exchange.path.get("version")
    versions = [version] if version else repository.versions(name)
    return _statistics(exchange, [repository.engine(name, number) for number in versions])


@serve_at(router, *model_paths("/config"), method="GET", response_model=ModelConfig)
async def model_config(exchange: Here) -> Response:
    """The supported fields of Triton's ModelConfig.

    ``max_batch_size`` is 0 if requests cannot be batched; otherwise the first axis of every tensor
    is the batch axis, which ``dims`` does not include.
    """
    return json_response(configuration(exchange.engine()))


NO_FILTER = IndexRequest()
NO_PARAMETERS = RepositoryRequest()


@router.post("/repository/index", response_model=list[Entry])
async def index(exchange: Here, body: IndexRequest = NO_FILTER) -> Response:
    """All versions of all models, on disk or loaded; with ``ready`` only those that are ready."""
    entries = exchange.repository.index()
    return json_response([entry for entry in entries if entry.state == "READY" or not body.ready])


@serve_at(router, "/repository/models/{name}/load", response_class=Response)
async def load(exchange: Here, body: RepositoryRequest = NO_PARAMETERS) -> Response:
    """Load the model from disk and replace the loaded one; the answer is sent when it is ready.

    A configuration or files in the request are refused.
    """
    for key in body.parameters:
        if key == "config" or key.startswith("file:"):
            raise InvalidData(
                f"parameter {key!r} is not supported: models are loaded from disk", "omit it"
            )
    await exchange.repository.load(exchange.path["name"])
    return Response()


@serve_at(router, "/repository/models/{name}/unload", response_class=Response)
async def unload(exchange: Here, body: RepositoryRequest = NO_PARAMETERS) -> Response:
    """Unload the model; accepted requests are still answered.

    ``unload_dependents`` has no effect, because no model depends on another.
    """
    if not isinstance(body.parameters.get("unload_dependents", False), bool):
        raise InvalidData("parameters.unload_dependents: expected true or false", "omit it")
    await exchange.repository.unload(exchange.path["name"])
    return Response()


def configuration(engine: Engine) -> dict[str, Any]:
    """Triton's ModelConfig of ``engine``, as JSON."""
    settings, model = engine.settings, engine.model
    batches = model.rows_are_independent and model.max_rows is None
    config: dict[str, Any] = {
        "name": engine.name,
        "platform": f"{model.runtime_for(None)}_onnx",
        "backend": model.runtime_for(None),
        "version_policy": {"all": {}},
        # A row has at least one token, so max_padded_tokens also bounds the rows of a request.
        "max_batch_size": settings.max_padded_tokens if batches else 0,
        "input": [_tensor(tensor, batches) for tensor in model.signature.inputs],
        "output": [_tensor(tensor, batches) for tensor in model.signature.outputs],
        "instance_group": [
            {
                "name": engine.name,
                "kind": "KIND_GPU" if settings.provider == "cuda" else "KIND_CPU",
                "count": model.concurrency,
            }
        ],
        "default_model_filename": model.artifact.model.name,
        "parameters": {
            "max_batch_tokens": {"string_value": str(engine.batcher.queue.budget)},
            "operators": {"string_value": orjson.dumps(model.operators.to_json()).decode()},
            "precision": {"string_value": model.precision},
            "batch_invariant": {"string_value": "true" if model.batch_invariant else "false"},
        },
    }
    if model.int8_warning is not None:
        config["parameters"]["int8_warning"] = {"string_value": model.int8_warning}
    if batches:
        config["dynamic_batching"] = {
            "max_queue_delay_microseconds": round(settings.max_wait_ms * 1e3),
            "default_queue_policy": {
                "timeout_action": "REJECT",
                "default_timeout_microseconds": round(settings.timeout_ms * 1e3),
                "allow_timeout_override": True,
                "max_queue_size": settings.max_queue,
            },
        }
    return config


def _tensor(tensor: Tensor, batches: bool) -> dict[str, Any]:
    return {
        "name": tensor.name,
        "data_type": f"TYPE_{NAMES[tensor.dtype]}",
        "dims": tensor.shape[1:] if batches else tensor.shape,
    }


def _statistics(exchange: Exchange, engines: list[Engine]) -> Response:
    read = exchange.repository.metrics.statistics()
    stats = [engine.metrics.statistics(read[engine.name, engine.version]) for engine in engines]
    return json_response({"model_stats": stats})
