"""Responses: JSON bodies, and the cost of every inference answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from time import perf_counter
from typing import Any
from urllib.parse import quote

import numpy as np
import orjson
from fastapi import Response
from starlette.background import BackgroundTask
from starlette.responses import StreamingResponse

from attnserve.runtime.memory_use import gpu_bytes, rss_bytes
from service.api.exchange import Exchange
from service.cost import AnswerCost
from service.engine.answer import Answer, TextAnswer
from service.engine.engine import Engine

JSON = orjson.OPT_SERIALIZE_NUMPY

PLACE = b"\0"
"""Placeholder of an array. JSON contains no such byte, because texts escape it."""

SLICE_BYTES = 262_144
"""Number of bytes per chunk of an answer."""

SLICE = 32_768
"""Number of elements that are serialized at a time, in about 2 ms. orjson does not release the GIL,
so a thread would block the event loop too."""


def json_response(content: Any, status: int = 200) -> Response:
    """A response with ``content`` as JSON; arrays become lists, NaN and infinities null."""
    return Response(orjson.dumps(content, option=JSON), status, media_type="application/json")


async def respond(
    exchange: Exchange,
    engine: Engine,
    answer: Answer,
    content: Any,
    raw: Sequence[memoryview] = (),
    cost_field: str = "",
) -> Response:
    """Build the answer, with its cost in the headers and the metrics.

    Args:
        content: The JSON of the body. Its serialization counts as time of the request.
        raw: Tensors whose bytes follow the JSON.
        cost_field: The field of ``content`` for the cost. ``content`` is then serialized when the
            time is known, and its "outputs" may hold large arrays, flat, as "data".
    """
    if isinstance(answer, TextAnswer) and answer.vectors.size > SLICE:
        content = await _in_parts(content)
    body = b"" if cost_field else orjson.dumps(content, option=JSON)
    total_ms = (perf_counter() - exchange.started) * 1e3
    cost = _cost(answer, total_ms, engine.settings.provider)
    engine.metrics.record_request(cost)
    fields = cost.to_json()
    exchange.cost = {"model": engine.name, "version": engine.version, **fields}
    headers = {f"x-{key.replace('_', '-')}": str(value) for key, value in fields.items()}
    headers["x-model"] = quote(engine.name)  # headers are ASCII; names of models may not be
    headers["x-model-version"] = engine.version
    precisions = dict.fromkeys(engine.model.precisions[name] for name in answer.runtimes)
    headers["x-runtime"] = "+".join(answer.runtimes)
    headers["x-precision"] = ", ".join(precisions)
    if (plan := engine.model.artifact.plan_id) is not None:
        headers["x-plan"] = plan
    background = answer.follow_up and BackgroundTask(answer.follow_up)
    arrays: list[np.ndarray] = []
    if cost_field:
        body, arrays = _without_large({**content, cost_field: fields})
    media_type = "application/octet-stream" if raw else "application/json"
    raw_bytes = sum(map(len, raw))
    if raw or exchange.request.scope["http_version"] == "1.0":  # 1.0 has no chunks
        size = sum([len(part) async for part in _parts(body, arrays)])
        headers["content-length"] = str(size + raw_bytes)
        if raw:
            headers["inference-header-content-length"] = str(size)
    if not arrays and raw_bytes <= SLICE_BYTES:
        return Response(b"".join([body, *raw]), 200, headers, media_type, background)
    parts = _parts(body, arrays, raw)
    return StreamingResponse(parts, 200, headers, media_type, background)


async def _in_parts(content: Any) -> Any:
    """``content`` with its arrays as JSON, serialized a slice at a time between other requests."""
    if isinstance(content, np.ndarray) and content.ndim < 2:
        await asyncio.sleep(0)
        return orjson.Fragment(orjson.dumps(np.ascontiguousarray(content), option=JSON))
    if isinstance(content, dict):
        return {name: await _in_parts(value) for name, value in content.items()}
    # A list of lists holds no arrays.
    if isinstance(content, np.ndarray | list) and not isinstance(content[0], list):
        return [await _in_parts(item) for item in content]
    return content


def _without_large(content: dict[str, Any]) -> tuple[bytes, list[np.ndarray]]:
    """``content`` as JSON with ``PLACE`` for each large array in "outputs", and these arrays."""
    large: list[np.ndarray] = []
    outputs: list[dict[str, Any]] = []
    for output in content["outputs"]:
        data = output.get("data")
        if data is not None and data.size > SLICE:
            large.append(data)
            output = {**output, "data": orjson.Fragment(PLACE)}
        outputs.append(output)
    return orjson.dumps({**content, "outputs": outputs}, option=JSON), large


async def _parts(
    body: bytes, arrays: Sequence[np.ndarray], raw: Sequence[memoryview] = ()
) -> AsyncGenerator[bytes | memoryview]:
    """Yield ``body`` with its arrays, then ``raw``, in small parts."""
    first, *rest = body.split(PLACE) if arrays else [body]
    yield first
    for array, part in zip(arrays, rest, strict=True):
        for start in range(0, array.size, SLICE):
            text = orjson.dumps(array[start : start + SLICE], option=JSON)
            yield (b"," if start else b"[") + text[1:-1]
            await asyncio.sleep(0)  # other requests run between the parts
        yield b"]" + part
    for tensor in raw:
        for start in range(0, len(tensor), SLICE_BYTES):
            yield tensor[start : start + SLICE_BYTES]


def _cost(answer: Answer, total_ms: float, provider: str) -> AnswerCost:
    macs = answer.macs
    return AnswerCost(
        queue_ms=round(answer.result.queue_ms, 3),
        tokenize_ms=round(answer.result.prepare_ms, 3),
        compute_ms=round(answer.result.compute_ms, 3),
        total_ms=round(total_ms, 3),
        tokens=answer.tokens,
        padding_waste=round(answer.padding_waste, 4),
        out_of_calibration=answer.out_of_calibration or None,
        macs=macs,
        flops=None if macs is None else 2 * macs,
        rss_bytes=rss_bytes(),
        gpu_bytes=gpu_bytes() if provider == "cuda" else None,
    )
