"""Operators on shapes: constants, reshaping, selection and padding."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from attnserve.recovery.operators.registry import Call, axes_of, integers, operator, tensor_of

__all__: list[str] = []


@operator("Constant")
def _constant(call: Call) -> Tensor:
    value = call.node.attributes
    if (tensor := value.get_tensor("value", None)) is not None:
        return tensor_of(tensor)
    types = {
        "value_int": torch.int64,
        "value_ints": torch.int64,
        "value_float": torch.float32,
        "value_floats": torch.float32,
    }
    for name, dtype in types.items():
        if name in value:
            return torch.tensor(value[name].value, dtype=dtype)
    raise call.unsupported("its value is not a tensor of numbers")


@operator("Shape")
def _shape(call: Call, x: Tensor) -> Tensor:
    size = len(x.shape)
    start, end = call.integer("start", 0), call.integer("end", size)
    return torch.tensor(list(x.shape)[start:end], dtype=torch.int64)


@operator("Size")
def _size(call: Call, x: Tensor) -> Tensor:
    return torch.tensor(x.numel(), dtype=torch.int64)


@operator("Reshape", on_host=(1,))
def _reshape(call: Call, x: Tensor, shape: Tensor) -> Tensor:
    sizes = integers(shape) or []
    if not call.integer("allowzero", 0):
        sizes = [x.shape[i] if size == 0 else size for i, size in enumerate(sizes)]
    return x.reshape(sizes)


@operator("Flatten")
def _flatten(call: Call, x: Tensor) -> Tensor:
    axis = call.integer("axis", 1)
    axis = axis + x.ndim if axis < 0 else axis
    return x.reshape(math.prod(x.shape[:axis]), math.prod(x.shape[axis:]))


@operator("Transpose")
def _transpose(call: Call, x: Tensor) -> Tensor:
    return x.permute(call.integers("perm") or list(range(x.ndim))[::-1])


@operator("Unsqueeze", on_host=(1,))
def _unsqueeze(call: Call, x: Tensor, axes: Tensor | None = None) -> Tensor:
    chosen = axes_of(call, axes) or []
    rank = x.ndim + len(chosen)
    for axis in sorted(axis % rank for axis in chosen):
        x = x.unsqueeze(axis)
    return x


@operator("Squeeze", on_host=(1,))
def _squeeze(call: Call, x: Tensor, axes: Tensor | None = None) -> Tensor:
    chosen = axes_of(call, axes)
    return x.squeeze() if chosen is None else x.squeeze(tuple(chosen))


@operator("Concat")
def _concat(call: Call, *values: Tensor) -> Tensor:
    return torch.cat(values, call.integer("axis", 0))


@operator("Split", on_host=(1,))
def _split(call: Call, x: Tensor, sizes: Tensor | None = None) -> tuple[Tensor, ...]:
    axis, count = call.integer("axis", 0), len(call.node.outputs)
    lengths = integers(sizes) if sizes is not None else call.integers("split")
    if lengths is None:
        length = x.shape[axis]
        chunk = -(-length // count)
        lengths = [min(chunk, length - i * chunk) for i in range(count)]
    return torch.split(x, lengths, axis)


@operator("Slice", on_host=(1, 2, 3, 4))
def _slice(
    call: Call,
    x: Tensor,
    starts: Tensor | None = None,
    ends: Tensor | None = None,
    axes: Tensor | None = None,
    steps: Tensor | None = None,
) -> Tensor:
    begin = (integers(starts) if starts is not None else call.integers("starts")) or []
    stop = (integers(ends) if ends is not None else call.integers("ends")) or []
    chosen = axes_of(call, axes) or list(range(len(begin)))
    stride = integers(steps) or [1] * len(begin)
    for axis, low, high, step in zip(chosen, begin, stop, stride, strict=True):
        size = x.shape[axis]
        if step > 0:
            index = [slice(None)] * x.ndim
            index[axis] = slice(*slice(low, high, step).indices(size))
            x = x[tuple(index)]
        else:
            kept = range(size)[slice(low, high if high >= -size else None, step)]
            x = x.index_select(axis, torch.tensor(list(kept), device=x.device))
    return x


@operator("Expand", on_host=(1,))
def _expand(call: Call, x: Tensor, shape: Tensor) -> Tensor:
    return x.expand(torch.broadcast_shapes(x.shape, tuple(integers(shape) or ())))


@operator("Tile", on_host=(1,))
def _tile(call: Call, x: Tensor, repeats: Tensor) -> Tensor:
    return x.repeat(integers(repeats) or [])


@operator("Gather")
def _gather(call: Call, x: Tensor, indices: Tensor) -> Tensor:
    axis = call.integer("axis", 0) % x.ndim
    size = x.shape[axis]
    if indices.device.type == "cpu" and indices.ndim == 0:
        return x.select(axis, int(indices))
    flat = indices.reshape(-1).long()
    picked = x.index_select(axis, torch.where(flat < 0, flat + size, flat))
    return picked.reshape(*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :])


@operator("GatherElements")
def _gather_elements(call: Call, x: Tensor, indices: Tensor) -> Tensor:
    axis = call.integer("axis", 0) % x.ndim
    return torch.gather(x, axis, torch.where(indices < 0, indices + x.shape[axis], indices).long())


@operator("GatherND")
def _gather_nd(call: Call, x: Tensor, indices: Tensor) -> Tensor:
    batch = call.integer("batch_dims", 0)
    depth = indices.shape[-1]
    leading = [
        torch.arange(size, device=x.device).reshape(-1, *[1] * (indices.ndim - 2 - axis))
        for axis, size in enumerate(x.shape[:batch])
    ]
    return x[(*leading, *(indices[..., i].long() for i in range(depth)))]


def _adds(call: Call) -> bool:
    """Whether updates are added to elements of the input instead of replacing them."""
    reduction = call.text("reduction", "none")
    if reduction not in ("none", "add"):
        raise call.unsupported(f"its reduction is {reduction}")
    return reduction == "add"


@operator("ScatterElements")
def _scatter_elements(call: Call, x: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    axis = call.integer("axis", 0) % x.ndim
    places = torch.where(indices < 0, indices + x.shape[axis], indices).long()
    scatter = x.scatter_add if _adds(call) else x.scatter
    return scatter(axis, places, updates)


@operator("ScatterND")
def _scatter_nd(call: Call, x: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    places = tuple(indices[..., i].long() for i in range(indices.shape[-1]))
    return x.index_put(places, updates, accumulate=_adds(call))


@operator("ConstantOfShape", on_host=(0,))
def _constant_of_shape(call: Call, shape: Tensor) -> Tensor:
    tensor = call.node.attributes.get_tensor("value", None)
    value = torch.zeros(1) if tensor is None else tensor_of(tensor)
    return value.reshape(()).expand(integers(shape) or ()).clone()


@operator("Range", on_host=(0, 1, 2))
def _range(call: Call, start: Tensor, limit: Tensor, delta: Tensor) -> Tensor:
    return torch.arange(start.item(), limit.item(), delta.item(), dtype=start.dtype)


@operator("Trilu", on_host=(1,))
def _trilu(call: Call, x: Tensor, k: Tensor | None = None) -> Tensor:
    diagonal = 0 if k is None else int(k)
    return torch.triu(x, diagonal) if call.integer("upper", 1) else torch.tril(x, diagonal)


@operator("OneHot", on_host=(1,))
def _one_hot(call: Call, indices: Tensor, depth: Tensor, values: Tensor) -> Tensor:
    size, axis = int(depth), call.integer("axis", -1)
    ids = indices.long()
    hot = torch.where(ids < 0, ids + size, ids)[..., None] == torch.arange(size, device=ids.device)
    axis = axis % hot.ndim
    return torch.where(hot.movedim(-1, axis), values[1], values[0])


@operator("CumSum", on_host=(1,))
def _cumsum(call: Call, x: Tensor, axis: Tensor) -> Tensor:
    place = int(axis)
    values = x.flip(place) if call.integer("reverse", 0) else x
    total = torch.cumsum(values, place, dtype=x.dtype)
    total = total - values if call.integer("exclusive", 0) else total
    return total.flip(place) if call.integer("reverse", 0) else total


@operator("Pad", on_host=(1, 3))
def _pad(
    call: Call, x: Tensor, pads: Tensor, value: Tensor | None = None, axes: Tensor | None = None
) -> Tensor:
    mode = call.text("mode", "constant")
    if mode != "constant":
        raise call.unsupported(f"its mode is {mode}")
    amounts = integers(pads) or []
    chosen = [axis % x.ndim for axis in integers(axes) or range(x.ndim)]
    half = len(amounts) // 2
    by_axis = {axis: (amounts[i], amounts[i + half]) for i, axis in enumerate(chosen)}
    flat = [size for axis in reversed(range(x.ndim)) for size in by_axis.get(axis, (0, 0))]
    return F.pad(x, flat, value=0 if value is None else value.item())
