"""Reductions."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from attnserve.recovery.operators.registry import Call, axes_of, operator

__all__: list[str] = []


def _norm(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    return torch.linalg.vector_norm(x, dim=axes, keepdim=keep)


_REDUCED: dict[str, Callable[[Tensor, list[int], bool], Tensor]] = {
    "ReduceL2": _norm,
    "ReduceMax": lambda x, axes, keep: torch.amax(x, axes, keep),
    "ReduceMean": lambda x, axes, keep: torch.mean(x, axes, keep),
    "ReduceMin": lambda x, axes, keep: torch.amin(x, axes, keep),
    "ReduceSum": lambda x, axes, keep: torch.sum(x, axes, keep, dtype=x.dtype),
}


@operator(*_REDUCED, on_host=(1,))
def _reduce(call: Call, x: Tensor, axes: Tensor | None = None) -> Tensor:
    chosen = axes_of(call, axes)
    if not chosen:
        if call.integer("noop_with_empty_axes", 0):
            return x
        chosen = list(range(x.ndim))
    return _REDUCED[call.node.op_type](x, chosen, bool(call.integer("keepdims", 1)))


@operator("ReduceProd", on_host=(1,))
def _reduce_prod(call: Call, x: Tensor, axes: Tensor | None = None) -> Tensor:
    keep = bool(call.integer("keepdims", 1))
    chosen = sorted((axis % x.ndim for axis in axes_of(call, axes) or range(x.ndim)), reverse=True)
    for axis in chosen:
        x = torch.prod(x, axis, keepdim=keep, dtype=x.dtype)
    return x


@operator("ArgMax")
def _argmax(call: Call, x: Tensor) -> Tensor:
    if call.integer("select_last_index", 0):
        raise call.unsupported("it selects the last of equal elements")
    return torch.argmax(x, call.integer("axis", 0), keepdim=bool(call.integer("keepdims", 1)))


@operator("TopK", on_host=(1,))
def _topk(call: Call, x: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    largest, axis = bool(call.integer("largest", 1)), call.integer("axis", -1)
    # A stable sort takes the first of equal elements, as ONNX says; ``topk`` of PyTorch does not.
    values, places = torch.sort(x, dim=axis, descending=largest, stable=True)
    kept = int(count)
    return values.narrow(axis, 0, kept), places.narrow(axis, 0, kept)
