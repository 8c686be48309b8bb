"""Open Inference Protocol v2 over HTTP, with tensors as JSON (KServe, Triton).

https://kserve.github.io/website/docs/concepts/architecture/data-plane/v2-protocol

Numbers are checked, never wrapped or rounded to another kind: 3.0 is no INT64, 300 is no UINT8,
and 1e39 is no FP32. JSON has no NaN and no infinity: not in requests, and null in answers.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import orjson
from fastapi import APIRouter, Request, Response

from attnserve import __version__
from graph_passes.errors import InvalidData
from service.errors import MalformedRequest
from service.http import (
    accepts,
    deadline,
    find,
    json_response,
    parse_body,
    respond,
    served,
    unless_gone,
)
from service.model import Tensor
from service.schemas import (
    InferRequest,
    InferResponse,
    InputTensor,
    Live,
    ModelMetadata,
    ModelReady,
    Ready,
    ServerMetadata,
)

__all__ = ["DATATYPES", "decode", "encode", "router"]

DATATYPES: dict[str, np.dtype[Any]] = {
    "BOOL": np.dtype(np.bool_),
    "UINT8": np.dtype(np.uint8),
    "UINT16": np.dtype(np.uint16),
    "UINT32": np.dtype(np.uint32),
    "UINT64": np.dtype(np.uint64),
    "INT8": np.dtype(np.int8),
    "INT16": np.dtype(np.int16),
    "INT32": np.dtype(np.int32),
    "INT64": np.dtype(np.int64),
    "FP16": np.dtype(np.float16),
    "FP32": np.dtype(np.float32),
    "FP64": np.dtype(np.float64),
}
NAMES = {dtype: name for name, dtype in DATATYPES.items()}
JSON_TYPES = {"b": {bool}, "u": {int}, "i": {int}, "f": {int, float}}
"""What JSON may hold for a datatype of each numpy kind."""

router = APIRouter(prefix="/v2", tags=["Open Inference Protocol v2"])


def decode(tensor: InputTensor) -> np.ndarray:
    """The array that ``tensor`` describes.

    Raises:
        InvalidData: Its data is ragged, of another size or nesting than its shape, or holds
            something that its datatype cannot.
    """
    dtype, shape = DATATYPES[tensor.datatype], tuple(tensor.shape)
    what = f"input {tensor.name!r}"
    nesting, values = _flatten(tensor.data, what)
    # Sizes and types first, in Python: numpy would allocate for any shape and any string.
    if len(values) != math.prod(shape):
        raise InvalidData(f"{what}: {len(values)} values for shape {list(shape)}")
    if len(nesting) > 1 and nesting != list(shape):
        raise InvalidData(f"{what}: data nested as {nesting}, shape {list(shape)}")
    if not set(map(type, values)) <= JSON_TYPES[dtype.kind]:
        raise InvalidData(f"{what}: its data is not all of {tensor.datatype}")
    in_range = True
    if dtype.kind in "iu" and values:
        limits = np.iinfo(dtype)
        in_range = limits.min <= min(values) and max(values) <= limits.max
    if in_range:
        with np.errstate(over="ignore"):
            array = np.array(values, dtype=dtype)
        if dtype.kind != "f" or np.isfinite(array).all():
            return _reshape(array, shape, what)
    raise InvalidData(f"{what}: its data holds numbers out of the range of {tensor.datatype}")


def encode(name: str, array: np.ndarray) -> dict[str, Any]:
    """``array`` as an output tensor, its data flat in row-major order."""
    return {
        "name": name,
        "shape": list(array.shape),
        "datatype": NAMES[array.dtype],
        "data": np.ascontiguousarray(array).ravel(),
    }


def _flatten(data: list[Any], what: str) -> tuple[list[int], list[Any]]:
    """(length at each level of nesting, the values in row-major order)."""
    nesting = [len(data)]
    while data and type(data[0]) is list:
        if set(map(type, data)) != {list} or len(set(map(len, data))) != 1:
            raise InvalidData(f"{what}: its data is ragged")
        nesting.append(len(data[0]))
        data = list(chain.from_iterable(data))
    return nesting, data


def _reshape(array: np.ndarray, shape: tuple[int, ...], what: str) -> np.ndarray:
    try:
        return array.reshape(shape)
    except (OverflowError, ValueError) as error:  # beside a 0, an axis may be of any length
        raise InvalidData(f"{what}: an axis of shape {list(shape)} is too long") from error


def _describe(tensors: Sequence[Tensor]) -> list[dict[str, Any]]:
    return [
        {
            "name": tensor.name,
            "datatype": NAMES[tensor.dtype],
            "shape": [axis if isinstance(axis, int) else -1 for axis in tensor.axes],
        }
        for tensor in tensors
    ]


@router.get("", response_model=ServerMetadata)
async def server_metadata() -> Response:
    return json_response({"name": "attnserve", "version": __version__, "extensions": []})


@router.get("/health/live", response_model=Live)
async def live() -> Response:
    """The process answers."""
    return json_response({"live": True})


@router.get("/health/ready", response_model=Ready, responses={503: {"model": Ready}})
async def ready(request: Request) -> Response:
    """Models are loaded, and all of them run; a full queue is no reason to say no."""
    is_ready = request.app.state.repository.ready
    return json_response({"ready": is_ready}, 200 if is_ready else 503)


@router.get("/models/{name}", response_model=ModelMetadata)
@router.get("/models/{name}/versions/{version}", response_model=ModelMetadata)
async def model_metadata(request: Request, name: str) -> Response:
    engine = find(request, name, request.path_params.get("version"))
    return json_response(
        {
            "name": engine.name,
            "versions": request.app.state.repository.versions(name),
            "platform": "onnxruntime_onnx",
            "inputs": _describe(engine.model.inputs),
            "outputs": _describe(engine.model.outputs),
        }
    )


@router.get(
    "/models/{name}/ready", response_model=ModelReady, responses={503: {"model": ModelReady}}
)
@router.get(
    "/models/{name}/versions/{version}/ready",
    response_model=ModelReady,
    responses={503: {"model": ModelReady}},
)
async def model_ready(request: Request, name: str) -> Response:
    engine = find(request, name, request.path_params.get("version"))
    return json_response({"name": engine.name, "ready": engine.ready}, 200 if engine.ready else 503)


@router.post("/models/{name}/infer", response_model=InferResponse, **accepts(InferRequest))
@router.post(
    "/models/{name}/versions/{version}/infer",
    response_model=InferResponse,
    **accepts(InferRequest),
)
async def infer(request: Request, name: str) -> Response:
    """Run the model on tensors. What the answer cost is in its headers and its parameters."""
    version = request.path_params.get("version")
    find(request, name, version)
    if "inference-header-content-length" in request.headers:
        raise MalformedRequest(
            "binary tensors are not served", "send JSON (tritonclient: binary_data=False)"
        )
    body = await parse_body(request, InferRequest)
    _refuse_repeats("input", [tensor.name for tensor in body.inputs])
    _refuse_repeats("output", [output.name for output in body.outputs])
    inputs = {tensor.name: decode(tensor) for tensor in body.inputs}
    engine = served(request, name, version)
    answer = await unless_gone(
        request,
        engine.infer(inputs, [output.name for output in body.outputs], deadline(request)),
    )
    identity = {} if body.id is None else {"id": body.id}

    def envelope(outputs: orjson.Fragment, cost: dict[str, int | float]) -> dict[str, Any]:
        return {
            "model_name": engine.name,
            "model_version": engine.version,
            **identity,
            "parameters": cost,
            "outputs": outputs,
        }

    outputs = [encode(name, array) for name, array in answer.outputs.items()]
    return respond(request, engine, answer, outputs, envelope)


def _refuse_repeats(what: str, names: list[str]) -> None:
    for name, times in Counter(names).items():
        if times > 1:
            raise InvalidData(f"{what} {name!r} is given {times} times")
