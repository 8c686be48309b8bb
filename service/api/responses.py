"""Responses: JSON bodies, and the cost of every inference answer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from time import perf_counter
from typing import Any
from urllib.parse import quote

import numpy as np
import orjson
from fastapi import Request, Response
from starlette.background import BackgroundTask

from attnserve.runtime.memory_use import gpu_bytes, rss_bytes
from service.engine.engine import Answer, Engine

JSON = orjson.OPT_SERIALIZE_NUMPY

SLICE = 32_768
"""Numbers that are serialized at a time, in about 2 ms. orjson does not release the GIL, so that a
thread would block the event loop too."""


def json_response(content: Any, status: int = 200) -> Response:
    """A response with ``content`` as JSON; arrays become lists, NaN and infinities null."""
    return Response(orjson.dumps(content, option=JSON), status, media_type="application/json")


async def array_json(array: np.ndarray) -> orjson.Fragment:
    """``array`` flat in row-major order; other requests run between its slices."""
    flat = np.ascontiguousarray(array).ravel()
    slices = [orjson.dumps(flat[:SLICE], option=JSON)[1:-1]]
    for start in range(SLICE, flat.size, SLICE):
        await asyncio.sleep(0)
        slices.append(orjson.dumps(flat[start : start + SLICE], option=JSON)[1:-1])
    return orjson.Fragment(b"[%b]" % b",".join(slices))


def respond(
    request: Request,
    engine: Engine,
    answer: Answer,
    content: Any,
    raw: Sequence[memoryview] = (),
    cost_field: str = "",
) -> Response:
    """Stop the clock, and return the answer with its cost in the headers and the metrics.

    Args:
        content: The JSON of the body. Its serialization counts as time of the request.
        raw: Tensors whose bytes follow the JSON.
        cost_field: The field of ``content`` for the cost. ``content`` is then serialized when the
            time is known; large values in it should be ``orjson.Fragment``.
    """
    body = b"" if cost_field else orjson.dumps(content, option=JSON)
    total_ms = (perf_counter() - request.state.started) * 1e3
    cost = _cost(answer, total_ms, engine.settings.provider)
    engine.metrics.record_request(cost)
    request.scope["attnserve.cost"] = {"model": engine.name, "version": engine.version, **cost}
    headers = {f"x-{key.replace('_', '-')}": str(value) for key, value in cost.items()}
    headers["x-model"] = quote(engine.name)  # headers are ASCII; names of models may not be
    headers["x-model-version"] = engine.version
    if (plan := engine.model.artifact.plan_id) is not None:
        headers["x-plan"] = plan
    if cost_field:
        body = orjson.dumps({**content, cost_field: cost}, option=JSON)
    media_type = "application/json"
    if raw:
        headers["inference-header-content-length"] = str(len(body))
        body, media_type = b"".join([body, *raw]), "application/octet-stream"
    background = answer.follow_up and BackgroundTask(answer.follow_up)
    return Response(body, 200, headers, media_type, background)


def _cost(answer: Answer, total_ms: float, provider: str) -> dict[str, int | float]:
    """The cost of ``answer``, by the names of the v2 parameters.

    ``macs`` and ``flops`` are absent if the graph cannot be counted, ``gpu_bytes`` without a GPU,
    and ``out_of_calibration`` (rows that are not like the calibration data) if there are none.
    ``rss_bytes`` covers this process, ``gpu_bytes`` the whole device.
    """
    cost: dict[str, int | float] = {
        "queue_ms": round(answer.result.queue_ms, 3),
        "tokenize_ms": round(answer.result.prepare_ms, 3),
        "compute_ms": round(answer.result.compute_ms, 3),
        "total_ms": round(total_ms, 3),
        "tokens": answer.tokens,
        "padding_waste": round(answer.padding_waste, 4),
    }
    if answer.out_of_calibration:
        cost["out_of_calibration"] = answer.out_of_calibration
    if (macs := answer.macs) is not None:
        cost |= {"macs": macs, "flops": 2 * macs}
    cost["rss_bytes"] = rss_bytes()
    if provider == "cuda" and (used := gpu_bytes()) is not None:
        cost["gpu_bytes"] = used
    return cost
