"""Open Inference Protocol v2 over HTTP (KServe, Triton), with tensors as JSON or raw bytes.

https://kserve.github.io/website/docs/concepts/architecture/data-plane/v2-protocol

``tensors.py`` is the codec; ``triton.py`` holds Triton's extensions of the protocol.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Response
from pydantic import ConfigDict, FailFast, Field, NonNegativeInt

from attnserve import __version__
from attnserve.serving.signature import Tensor
from attnserve.serving.tensor_codec import NAMES, Datatype
from graph_passes.errors import InvalidData
from service.api.exchange import Exchange, Here
from service.api.requests import Body, Extensible, JsonRoute, Name, model_paths, serve_at
from service.api.responses import json_response, respond
from service.api.tensors import (
    HEADER_LENGTH,
    InputTensor,
    OutputTensor,
    decode_all,
    encode_all,
    split,
)
from service.errors import Error

EXTENSIONS = (
    "binary_tensor_data",
    "model_configuration",
    "model_repository",
    "model_repository(unload_dependents)",
    "parameters",
    "schedule_policy",
    "statistics",
)
"""Supported extensions. Not supported: classification, sequences, shared memory."""

MAX_TENSORS = 1024
"""Maximum number of inputs, and of outputs, of a request."""

SEQUENCES = ("sequences are not supported", "send each request without sequence parameters")
UNSUPPORTED = {
    "sequence_id": SEQUENCES,
    "sequence_start": SEQUENCES,
    "sequence_end": SEQUENCES,
    "shared_memory_region": ("shared memory is not supported", "send the tensor in the body"),
    "classification": (
        "classification is not supported",
        "request the scores, or POST /predict",
    ),
}
"""Refused parameters of requests and tensors, each with (what is wrong, how to fix it)."""

BINARY = {"schema": {"type": "string", "format": "binary"}}
"""OpenAPI description of a body with JSON and raw tensors after it."""


class OutputParameters(Extensible):
    """Parameters of a requested output."""

    binary_data: bool | None = None
    """Send raw bytes after the JSON; overrides ``binary_data_output``."""


class RequestedOutput(Body):
    """An output that the answer contains."""

    name: Name
    parameters: OutputParameters = OutputParameters()


class InferParameters(Extensible):
    """Parameters of an inference request."""

    binary_data_output: bool | None = None
    """Send outputs as raw bytes after the JSON, unless they set ``binary_data``."""
    timeout: NonNegativeInt | None = None
    """Time limit in microseconds (504 when exceeded); 0 for none."""
    priority: NonNegativeInt | None = None
    """Ignored: all requests have the same priority."""


class InferRequest(Body):
    """Open Inference Protocol v2, inference request. Unknown fields are ignored."""

    id: Name | None = None
    parameters: InferParameters = InferParameters()
    inputs: Annotated[list[InputTensor], FailFast()] = Field(min_length=1, max_length=MAX_TENSORS)
    outputs: Annotated[list[RequestedOutput], FailFast()] = Field([], max_length=MAX_TENSORS)
    """All outputs if omitted."""


class InferResponse(Body):
    """Open Inference Protocol v2, inference response; ``parameters`` holds its cost."""

    model_config = ConfigDict(protected_namespaces=())

    model_name: str
    model_version: str
    id: str | None = None
    parameters: dict[str, Any]
    outputs: list[OutputTensor]


class TensorMetadata(Body):
    """Name, type and shape of an input or output."""

    name: str
    datatype: Datatype
    shape: list[int]
    """-1 for axes of any size."""


class ModelMetadata(Body):
    """The loaded versions of a model, and its inputs and outputs."""

    name: str
    versions: list[str]
    platform: str
    """The runtime and the format, for example "onnxruntime_onnx"."""
    parameters: dict[str, Any]
    """``runtime``; ``precision``; ``refused``: why other runtimes do not run the model, by name;
    and ``long_rows``, if another runtime runs rows of more than ``above`` tokens."""
    inputs: list[TensorMetadata]
    outputs: list[TensorMetadata]


class ModelReady(Body):
    """Whether a model can run."""

    name: str
    ready: bool


class ServerMetadata(Body):
    """Name, version and extensions of the server."""

    name: str = "attnserve"
    version: str = __version__
    extensions: tuple[str, ...] = EXTENSIONS


HEADER_PARAMETER = {
    "name": "Inference-Header-Content-Length",
    "in": "header",
    "required": False,
    "schema": {"type": "integer", "minimum": 0},
    "description": "Bytes of JSON at the start of the body, if raw tensors follow it.",
}


class InferRoute(JsonRoute):
    """A route whose JSON may be followed by raw tensors, which go to ``Exchange.raw``."""

    async def read(self, exchange: Exchange) -> memoryview:
        exchange.engine()  # refuse unknown ones before the body
        length = exchange.request.headers.get(HEADER_LENGTH)
        head, exchange.raw = split(await exchange.read_body(), length)
        return head


router = APIRouter(prefix="/v2", tags=["Open Inference Protocol v2"], route_class=InferRoute)


@router.get("")
async def server_metadata() -> ServerMetadata:
    """Name, version and extensions of the server."""
    return ServerMetadata()


@router.get("/health/live")
async def live() -> dict[str, bool]:
    """The process is alive."""
    return {"live": True}


@router.get(
    "/health/ready", response_model=dict[str, bool], responses={503: {"model": dict[str, bool]}}
)
async def ready(exchange: Here) -> Response:
    """Models are loaded, and all of them can run. A full queue does not affect readiness."""
    is_ready = exchange.repository.ready
    return json_response({"ready": is_ready}, 200 if is_ready else 503)


@serve_at(router, *model_paths(""), method="GET")
async def model_metadata(exchange: Here) -> ModelMetadata:
    """The loaded versions of a model, and its inputs and outputs."""
    engine = exchange.engine()
    model = engine.model
    return ModelMetadata(
        name=engine.name,
        versions=exchange.repository.versions(engine.name),
        platform=f"{model.runtime_for(None)}_onnx",
        parameters={
            "runtime": model.runtime,
            "precision": model.precision,
            "refused": model.operators.refused_runtimes,
            **({"long_rows": asdict(model.long_rows)} if model.long_rows else {}),
        },
        inputs=_describe(model.signature.inputs),
        outputs=_describe(model.signature.outputs),
    )


@serve_at(
    router,
    *model_paths("/ready"),
    method="GET",
    response_model=ModelReady,
    responses={503: {"model": ModelReady | Error, "description": "The model cannot run."}},
)
async def model_ready(exchange: Here) -> Response:
    """Whether the model can run: 200, or 503 with the same body."""
    engine = exchange.engine()
    is_ready = exchange.repository.runs(engine)
    return json_response({"name": engine.name, "ready": is_ready}, 200 if is_ready else 503)


@serve_at(
    router,
    *model_paths("/infer"),
    response_model=InferResponse,
    responses={200: {"content": {"application/octet-stream": BINARY}}},
    openapi_extra={
        "requestBody": {"content": {"application/octet-stream": BINARY}},
        "parameters": [HEADER_PARAMETER],
    },
)
async def infer(exchange: Here, body: InferRequest) -> Response:
    """Run the model on tensors. The headers and the parameters of the answer hold its cost."""
    _refuse_unsupported(body)
    inputs = decode_all(body.inputs, exchange.raw)
    body.inputs.clear()  # lists of numbers need much more memory than the arrays
    engine = exchange.acquire()
    names = [output.name for output in body.outputs]
    deadline = exchange.deadline(body.parameters.timeout)
    answer = await exchange.run(engine.infer(inputs, names, deadline, exchange.hold_answer))
    outputs, raw_outputs = encode_all(answer.outputs, _binary_outputs(body, answer.outputs))
    content = {
        "model_name": engine.name,
        "model_version": engine.version,
        **({} if body.id is None else {"id": body.id}),
        "parameters": None,
        "outputs": outputs,
    }
    return await respond(exchange, engine, answer, content, raw_outputs, cost_field="parameters")


def _describe(tensors: Sequence[Tensor]) -> list[TensorMetadata]:
    return [
        TensorMetadata(name=tensor.name, datatype=NAMES[tensor.dtype], shape=tensor.shape)
        for tensor in tensors
    ]


def _binary_outputs(body: InferRequest, names: Iterable[str]) -> set[str]:
    """The outputs that are sent as raw bytes; ``binary_data`` of an output has priority."""
    chosen = {output.name: output.parameters.binary_data for output in body.outputs}
    default = bool(body.parameters.binary_data_output)
    return {name for name in names if (default if chosen.get(name) is None else chosen[name])}


def _refuse_unsupported(body: InferRequest) -> None:
    """Refuse unsupported parameters and repeated names."""
    for what, tensors in (("input", body.inputs), ("output", body.outputs)):
        for name, times in Counter(tensor.name for tensor in tensors).items():
            if times > 1:
                raise InvalidData(f"{what} {name!r} is given {times} times", "give it once")
        for tensor in tensors:
            _refuse_extensions(f"{what} {tensor.name!r}", tensor.parameters)
    _refuse_extensions("parameters", body.parameters)


def _refuse_extensions(what: str, parameters: Extensible) -> None:
    for key, (text, fix) in UNSUPPORTED.items():
        if (parameters.model_extra or {}).get(key):
            raise InvalidData(f"{what}: {text}", fix)
