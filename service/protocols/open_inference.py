"""Open Inference Protocol v2 over HTTP, with tensors as JSON or as raw bytes (KServe, Triton).

https://kserve.github.io/website/docs/concepts/architecture/data-plane/v2-protocol

``protocols/tensors.py`` is the codec.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import orjson
from fastapi import APIRouter, Request, Response

from attnserve import __version__
from graph_passes.errors import InvalidData
from service.engine import Tensor
from service.errors import NotFound, NotReady
from service.http import (
    accepts,
    json_response,
    parse_json,
    read_body,
    respond,
    served,
    unless_gone,
)
from service.protocols.tensors import HEADER_LENGTH, NAMES, decode_all, encode_all, split
from service.schemas import (
    InferRequest,
    InferResponse,
    Live,
    ModelMetadata,
    ModelReady,
    Ready,
    ServerMetadata,
)

__all__ = ["router"]

VERSION = "1"
"""Of every model: one is served, in the one version that was given."""

BINARY = {"schema": {"type": "string", "format": "binary"}}
"""A body of JSON and raw tensors; Inference-Header-Content-Length says where the JSON ends."""

INFER = accepts(InferRequest) | {
    "responses": {200: {"content": {"application/octet-stream": BINARY}}}
}
INFER["openapi_extra"]["requestBody"]["content"]["application/octet-stream"] = BINARY
INFER["openapi_extra"]["parameters"] = [
    {
        "name": "Inference-Header-Content-Length",
        "in": "header",
        "required": False,
        "schema": {"type": "integer", "minimum": 0},
        "description": "Bytes of JSON at the start of the body, where raw tensors follow it.",
    }
]

router = APIRouter(prefix="/v2", tags=["Open Inference Protocol v2"])


def _describe(tensors: Sequence[Tensor]) -> list[dict[str, Any]]:
    return [
        {
            "name": tensor.name,
            "datatype": NAMES[tensor.dtype],
            "shape": [axis if isinstance(axis, int) else -1 for axis in tensor.axes],
        }
        for tensor in tensors
    ]


def _check_version(request: Request) -> None:
    asked = request.path_params.get("version", VERSION)
    if asked != VERSION:
        raise NotFound(f"unknown version {asked!r}: every model here has version {VERSION}")


@router.get("", response_model=ServerMetadata)
async def server_metadata() -> Response:
    return json_response({"name": "attnserve", "version": __version__, "extensions": []})


@router.get("/health/live", response_model=Live)
async def live() -> Response:
    """The process answers."""
    return json_response({"live": True})


@router.get("/health/ready", response_model=Ready, responses={503: {"model": Ready}})
async def ready(request: Request) -> Response:
    """The model is loaded and takes requests."""
    try:
        served(request)
    except NotReady:
        return json_response({"ready": False}, 503)
    return json_response({"ready": True})


@router.get("/models/{name}", response_model=ModelMetadata)
@router.get("/models/{name}/versions/{version}", response_model=ModelMetadata)
async def model_metadata(request: Request, name: str) -> Response:
    engine = served(request, name)
    _check_version(request)
    return json_response(
        {
            "name": engine.name,
            "versions": [VERSION],
            "platform": "onnxruntime_onnx",
            "inputs": _describe(engine.inputs),
            "outputs": _describe(engine.outputs),
        }
    )


@router.get("/models/{name}/ready", response_model=ModelReady)
@router.get("/models/{name}/versions/{version}/ready", response_model=ModelReady)
async def model_ready(request: Request, name: str) -> Response:
    engine = served(request, name)
    _check_version(request)
    return json_response({"name": engine.name, "ready": True})


@router.post("/models/{name}/infer", response_model=InferResponse, **INFER)
@router.post("/models/{name}/versions/{version}/infer", response_model=InferResponse, **INFER)
async def infer(request: Request, name: str) -> Response:
    """Run the model on tensors. What the answer cost is in its headers and its parameters."""
    engine = served(request, name)
    _check_version(request)
    head, raw = split(await read_body(request), request.headers.get(HEADER_LENGTH))
    body = parse_json(head, InferRequest)
    _refuse_unserved(body)
    inputs = decode_all(body.inputs, raw)
    answer = await unless_gone(
        request, engine.infer(inputs, [output.name for output in body.outputs])
    )
    identity = {} if body.id is None else {"id": body.id}

    def envelope(outputs: orjson.Fragment, cost: dict[str, int | float]) -> dict[str, Any]:
        return {
            "model_name": engine.name,
            "model_version": VERSION,
            **identity,
            "parameters": cost,
            "outputs": outputs,
        }

    outputs, raw_outputs = encode_all(answer.outputs, _binary_outputs(body, answer.outputs))
    return respond(request, engine, answer, outputs, envelope, raw_outputs)


def _binary_outputs(body: InferRequest, names: Iterable[str]) -> set[str]:
    """Those of ``names`` that are sent as raw bytes: an output's own word comes first."""
    chosen = {output.name: output.parameters.binary_data for output in body.outputs}
    default = bool(body.parameters.binary_data_output)
    return {name for name in names if (default if chosen.get(name) is None else chosen[name])}


def _refuse_unserved(body: InferRequest) -> None:
    """Refuse what would be answered otherwise than its sender expects."""
    _refuse_repeats("input", [tensor.name for tensor in body.inputs])
    _refuse_repeats("output", [output.name for output in body.outputs])
    asked = body.parameters.model_extra or {}
    for key in ("sequence_id", "sequence_start", "sequence_end"):
        if asked.get(key):
            raise InvalidData(
                f"parameter {key!r}: models here keep no state between requests",
                "send each request without sequence parameters",
            )
    for what, tensors in (("input", body.inputs), ("output", body.outputs)):
        for tensor in tensors:
            extra = tensor.parameters.model_extra or {}
            if "shared_memory_region" in extra:
                raise InvalidData(
                    f"{what} {tensor.name!r}: shared memory is not served", "send the bytes"
                )
            if extra.get("classification"):
                raise InvalidData(
                    f"{what} {tensor.name!r}: classification is not served here",
                    "ask for the scores, or POST /predict",
                )


def _refuse_repeats(what: str, names: list[str]) -> None:
    for name, times in Counter(names).items():
        if times > 1:
            raise InvalidData(f"{what} {name!r} is given {times} times")
