"""The cost of one answer: fields of the v2 parameters, and the same values as headers."""

from __future__ import annotations

from collections.abc import Mapping

from service.engine.answer import Answer
from service.memory import gpu_bytes, rss_bytes

__all__ = ["as_headers", "cost_of"]


def cost_of(answer: Answer, total_ms: float, provider: str) -> dict[str, int | float]:
    """The cost of ``answer``, by the names of the v2 parameters.

    ``macs`` and ``flops`` are absent if the graph cannot be counted, ``gpu_bytes`` without a GPU.
    ``rss_bytes`` covers this process, ``gpu_bytes`` the whole device.
    """
    cost: dict[str, int | float] = {
        "queue_ms": round(answer.queue_ms, 3),
        "tokenize_ms": round(answer.tokenize_ms, 3),
        "compute_ms": round(answer.compute_ms, 3),
        "total_ms": round(total_ms, 3),
        "tokens": answer.tokens,
        "padding_waste": round(answer.padding_waste, 4),
    }
    if answer.macs is not None:
        cost |= {"macs": answer.macs, "flops": 2 * answer.macs}
    cost["rss_bytes"] = rss_bytes()
    if provider == "cuda" and (used := gpu_bytes()) is not None:
        cost["gpu_bytes"] = used
    return cost


def as_headers(cost: Mapping[str, int | float]) -> dict[str, str]:
    """The headers of a cost: ``{"queue_ms": 0.1}`` becomes ``{"x-queue-ms": "0.1"}``."""
    return {f"x-{key.replace('_', '-')}": str(value) for key, value in cost.items()}
