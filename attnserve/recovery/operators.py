"""ONNX operators in PyTorch, by domain and name.

Each operator is a function (call, inputs ...) -> output, or a tuple of outputs. An input that is
left out is None. Shapes, axes and other integers that an operator reads on the host are tensors on
the CPU (``GraphModule`` keeps them there), so that a GPU is not waited for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import onnx_ir as ir
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from graph_passes.errors import InvalidModel

__all__ = ["HOST_INPUTS", "OPERATORS", "Call", "Operator", "dtype_of"]


@dataclass(frozen=True, eq=False)
class Call:
    """A node, and the opset version of its domain."""

    node: ir.Node
    version: int

    def integer(self, name: str, default: int) -> int:
        return self.node.attributes.get_int(name, default)

    def number(self, name: str, default: float) -> float:
        return self.node.attributes.get_float(name, default)

    def integers(self, name: str, default: Sequence[int] | None = None) -> list[int] | None:
        found = self.node.attributes.get_ints(name, default)
        return None if found is None else list(found)

    def text(self, name: str, default: str) -> str:
        return self.node.attributes.get_string(name, default)

    def unsupported(self, what: str) -> InvalidModel:
        """The error for a form of the operator that is not supported."""
        return InvalidModel(
            f"operator {self.node.op_type} of node {self.node.name!r} cannot be trained: {what}",
            "report the operator, or recover the model before it was fused",
            code="recovery.operator",
        )


Operator = Callable[..., Any]

OPERATORS: dict[tuple[str, str], Operator] = {}
"""(domain, operator) -> its function; the domain of ONNX is ""."""

HOST_INPUTS: dict[str, tuple[int, ...]] = {
    "ConstantOfShape": (0,),
    "CumSum": (1,),
    "Expand": (1,),
    "OneHot": (1,),
    "Pad": (1, 3),
    "Range": (0, 1, 2),
    "ReduceL2": (1,),
    "ReduceMax": (1,),
    "ReduceMean": (1,),
    "ReduceMin": (1,),
    "ReduceProd": (1,),
    "ReduceSum": (1,),
    "Reshape": (1,),
    "Resize": (1, 2, 3),
    "Slice": (1, 2, 3, 4),
    "Split": (1,),
    "Squeeze": (1,),
    "Tile": (1,),
    "Trilu": (1,),
    "Unsqueeze": (1,),
}
"""The inputs of an operator that are read on the host."""

HALF = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


def operator(*names: str, domain: str = "") -> Callable[[Operator], Operator]:
    """Register a function for these operators."""

    def register(function: Operator) -> Operator:
        for name in names:
            OPERATORS[domain, name] = function
        return function

    return register


def dtype_of(dtype: ir.DataType) -> torch.dtype:
    """The type in which a value is computed: half precision is computed in float32."""
    import numpy as np

    if dtype in HALF:
        return torch.float32
    return torch.from_numpy(np.zeros(0, dtype.numpy())).dtype


def _integers(tensor: Tensor | None) -> list[int] | None:
    return None if tensor is None else [int(x) for x in tensor.reshape(-1).tolist()]


# ---- element-wise -------------------------------------------------------------------------------

_UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "Abs": torch.abs,
    "Ceil": torch.ceil,
    "Cos": torch.cos,
    "Erf": torch.erf,
    "Exp": torch.exp,
    "Floor": torch.floor,
    "Identity": lambda x: x,
    "IsInf": torch.isinf,
    "IsNaN": torch.isnan,
    "Log": torch.log,
    "Neg": torch.neg,
    "Not": torch.logical_not,
    "Reciprocal": torch.reciprocal,
    "Relu": torch.relu,
    "Round": torch.round,
    "Sigmoid": torch.sigmoid,
    "Sign": torch.sign,
    "Sin": torch.sin,
    "Softplus": F.softplus,
    "Sqrt": torch.sqrt,
    "Tanh": torch.tanh,
}
_BINARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "Add": torch.add,
    "And": torch.logical_and,
    "Equal": torch.eq,
    "Greater": torch.gt,
    "GreaterOrEqual": torch.ge,
    "Less": torch.lt,
    "LessOrEqual": torch.le,
    "MatMul": torch.matmul,
    "Mul": torch.mul,
    "Or": torch.logical_or,
    "Sub": torch.sub,
    "Xor": torch.logical_xor,
}
_FOLDED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "Max": torch.maximum,
    "Min": torch.minimum,
    "Sum": torch.add,
}


def _of_tensors(function: Callable[..., Tensor]) -> Operator:
    """An operator without attributes."""

    def apply(call: Call, *values: Tensor) -> Tensor:
        return function(*values)

    return apply


def _folded(function: Callable[[Tensor, Tensor], Tensor]) -> Operator:
    """An operator that combines any number of inputs, two at a time."""

    def apply(call: Call, *values: Tensor) -> Tensor:
        return reduce(function, values)

    return apply


OPERATORS.update({("", name): _of_tensors(function) for name, function in _UNARY.items()})
OPERATORS.update({("", name): _of_tensors(function) for name, function in _BINARY.items()})
OPERATORS.update({("", name): _folded(function) for name, function in _FOLDED.items()})


@operator("Div")
def _div(call: Call, a: Tensor, b: Tensor) -> Tensor:
    return a / b if a.is_floating_point() else torch.div(a, b, rounding_mode="trunc")


@operator("Pow")
def _pow(call: Call, a: Tensor, b: Tensor) -> Tensor:
    if b.numel() == 1 and b.device.type == "cpu":
        exponent = b.item()
        if exponent == 2:
            return (a * a).reshape(torch.broadcast_shapes(a.shape, b.shape))
    return torch.pow(a, b.to(a.device)).to(a.dtype)


@operator("Mod")
def _mod(call: Call, a: Tensor, b: Tensor) -> Tensor:
    return torch.fmod(a, b) if call.integer("fmod", 0) else torch.remainder(a, b)


@operator("Mean")
def _mean(call: Call, *values: Tensor) -> Tensor:
    return reduce(torch.add, values) / len(values)


@operator("Where")
def _where(call: Call, condition: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return torch.where(condition, a, b)


@operator("Clip")
def _clip(call: Call, x: Tensor, low: Tensor | None = None, high: Tensor | None = None) -> Tensor:
    if call.version < 11:
        low, high = (
            torch.tensor(call.number(name, math.copysign(math.inf, sign)))
            for name, sign in (("min", -1), ("max", 1))
        )
    x = x if low is None else torch.maximum(x, low.to(x))
    return x if high is None else torch.minimum(x, high.to(x))


@operator("Cast")
def _cast(call: Call, x: Tensor) -> Tensor:
    return x.to(dtype_of(ir.DataType(call.integer("to", 1))))


@operator("CastLike")
def _cast_like(call: Call, x: Tensor, like: Tensor) -> Tensor:
    return x.to(like.dtype)


@operator("LeakyRelu")
def _leaky_relu(call: Call, x: Tensor) -> Tensor:
    return F.leaky_relu(x, call.number("alpha", 0.01))


@operator("Elu")
def _elu(call: Call, x: Tensor) -> Tensor:
    return F.elu(x, call.number("alpha", 1.0))


@operator("HardSigmoid")
def _hard_sigmoid(call: Call, x: Tensor) -> Tensor:
    return torch.clamp(call.number("alpha", 0.2) * x + call.number("beta", 0.5), 0, 1)


RESIZE_MODES: dict[tuple[str, ...], dict[str, Any]] = {
    ("nearest", "asymmetric", "floor"): {"mode": "nearest"},
    ("linear", "half_pixel"): {"mode": "bilinear", "align_corners": False},
    ("linear", "pytorch_half_pixel"): {"mode": "bilinear", "align_corners": False},
    ("linear", "align_corners"): {"mode": "bilinear", "align_corners": True},
    ("cubic", "half_pixel"): {"mode": "bicubic", "align_corners": False},
    ("cubic", "pytorch_half_pixel"): {"mode": "bicubic", "align_corners": False},
    ("cubic", "align_corners"): {"mode": "bicubic", "align_corners": True},
}
"""The forms of Resize that ``interpolate`` of PyTorch has, for images (B, C, height, width)."""


@operator("Resize")
def _resize(
    call: Call,
    x: Tensor,
    roi: Tensor | None = None,
    scales: Tensor | None = None,
    sizes: Tensor | None = None,
) -> Tensor:
    form = (call.text("mode", "nearest"), call.text("coordinate_transformation_mode", "half_pixel"))
    if form[0] == "nearest":
        form = (*form, call.text("nearest_mode", "round_prefer_floor"))
    is_usual = not (
        call.integer("antialias", 0)
        or call.integer("exclude_outside", 0)
        or call.text("keep_aspect_ratio_policy", "stretch") != "stretch"
        or call.integers("axes") is not None
        or (form[0] == "cubic" and call.number("cubic_coeff_a", -0.75) != -0.75)
    )
    options = RESIZE_MODES.get(form) if is_usual and call.version > 10 and x.ndim == 4 else None
    if options is None:
        raise call.unsupported(f"its mode is {', '.join(form)}")
    if sizes is not None and sizes.numel():
        return F.interpolate(x, size=_integers(sizes[2:]), **options)
    assert scales is not None
    return F.interpolate(x, scale_factor=scales[2:].tolist(), **options)


@operator("BatchNormalization")
def _batch_normalization(
    call: Call, x: Tensor, scale: Tensor, bias: Tensor, mean: Tensor, variance: Tensor
) -> Tensor:
    if call.integer("training_mode", 0):
        raise call.unsupported("it is in training mode")
    return F.batch_norm(x, mean, variance, scale, bias, eps=call.number("epsilon", 1e-5))


@operator("HardSwish")
def _hard_swish(call: Call, x: Tensor) -> Tensor:
    return F.hardswish(x)


@operator("GlobalAveragePool")
def _global_average_pool(call: Call, x: Tensor) -> Tensor:
    return x.mean(tuple(range(2, x.ndim)), keepdim=True)


@operator("Gelu")
def _gelu(call: Call, x: Tensor) -> Tensor:
    return F.gelu(x, approximate=call.text("approximate", "none"))


@operator("Gelu", "BiasGelu", domain="com.microsoft")
def _bias_gelu(call: Call, x: Tensor, bias: Tensor | None = None) -> Tensor:
    return F.gelu(x if bias is None else x + bias)


@operator("FastGelu", domain="com.microsoft")
def _fast_gelu(call: Call, x: Tensor, bias: Tensor | None = None) -> Tensor:
    return F.gelu(x if bias is None else x + bias, approximate="tanh")


@operator("QuickGelu", domain="com.microsoft")
def _quick_gelu(call: Call, x: Tensor) -> Tensor:
    return x * torch.sigmoid(call.number("alpha", 1.702) * x)


@operator("Swish")
def _swish(call: Call, x: Tensor) -> Tensor:
    return x * torch.sigmoid(call.number("alpha", 1.0) * x)


@operator("Dropout")
def _dropout(call: Call, x: Tensor, *_: Tensor | None) -> tuple[Tensor, Tensor]:
    return x, torch.ones_like(x, dtype=torch.bool)  # as in inference


# ---- shapes and selections ----------------------------------------------------------------------


@operator("Constant")
def _constant(call: Call) -> Tensor:
    value = call.node.attributes
    if (tensor := value.get_tensor("value", None)) is not None:
        return tensor_of(tensor)
    types = {"value_int": torch.int64, "value_ints": torch.int64, "value_float": torch.float32,
             "value_floats": torch.float32}  # fmt: skip
    for name, dtype in types.items():
        if name in value:
            return torch.tensor(value[name].value, dtype=dtype)
    raise call.unsupported("its value is not a tensor of numbers")


def tensor_of(tensor: ir.TensorProtocol) -> Tensor:
    """The elements of a tensor, in a copy; half precision as float32."""
    import numpy as np

    array = np.array(tensor.numpy())
    if tensor.dtype in HALF:
        array = array.astype(np.float32)
    return torch.from_numpy(array)


@operator("Shape")
def _shape(call: Call, x: Tensor) -> Tensor:
    size = len(x.shape)
    start, end = call.integer("start", 0), call.integer("end", size)
    return torch.tensor(list(x.shape)[start:end], dtype=torch.int64)


@operator("Size")
def _size(call: Call, x: Tensor) -> Tensor:
    return torch.tensor(x.numel(), dtype=torch.int64)


@operator("Reshape")
def _reshape(call: Call, x: Tensor, shape: Tensor) -> Tensor:
    sizes = _integers(shape) or []
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


def _axes(call: Call, axes: Tensor | None) -> list[int] | None:
    """Axes from an input, or from the attribute of older opsets."""
    return _integers(axes) if axes is not None else call.integers("axes")


@operator("Unsqueeze")
def _unsqueeze(call: Call, x: Tensor, axes: Tensor | None = None) -> Tensor:
    chosen = _axes(call, axes) or []
    rank = x.ndim + len(chosen)
    for axis in sorted(axis % rank for axis in chosen):
        x = x.unsqueeze(axis)
    return x


@operator("Squeeze")
def _squeeze(call: Call, x: Tensor, axes: Tensor | None = None) -> Tensor:
    chosen = _axes(call, axes)
    return x.squeeze() if chosen is None else x.squeeze(tuple(chosen))


@operator("Concat")
def _concat(call: Call, *values: Tensor) -> Tensor:
    return torch.cat(values, call.integer("axis", 0))


@operator("Split")
def _split(call: Call, x: Tensor, sizes: Tensor | None = None) -> tuple[Tensor, ...]:
    axis, parts = call.integer("axis", 0), len(call.node.outputs)
    given = _integers(sizes) if sizes is not None else call.integers("split")
    if given is None:
        length = x.shape[axis]
        chunk = -(-length // parts)
        given = [min(chunk, length - i * chunk) for i in range(parts)]
    return torch.split(x, given, axis)


@operator("Slice")
def _slice(
    call: Call,
    x: Tensor,
    starts: Tensor | None = None,
    ends: Tensor | None = None,
    axes: Tensor | None = None,
    steps: Tensor | None = None,
) -> Tensor:
    begin = (_integers(starts) if starts is not None else call.integers("starts")) or []
    stop = (_integers(ends) if ends is not None else call.integers("ends")) or []
    chosen = _axes(call, axes) or list(range(len(begin)))
    stride = _integers(steps) or [1] * len(begin)
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


@operator("Expand")
def _expand(call: Call, x: Tensor, shape: Tensor) -> Tensor:
    return x.expand(torch.broadcast_shapes(x.shape, tuple(_integers(shape) or ())))


@operator("Tile")
def _tile(call: Call, x: Tensor, repeats: Tensor) -> Tensor:
    return x.repeat(_integers(repeats) or [])


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


@operator("ConstantOfShape")
def _constant_of_shape(call: Call, shape: Tensor) -> Tensor:
    tensor = call.node.attributes.get_tensor("value", None)
    value = torch.zeros(1) if tensor is None else tensor_of(tensor)
    return value.reshape(()).expand(_integers(shape) or ()).clone()


@operator("Range")
def _range(call: Call, start: Tensor, limit: Tensor, delta: Tensor) -> Tensor:
    return torch.arange(start.item(), limit.item(), delta.item(), dtype=start.dtype)


@operator("Trilu")
def _trilu(call: Call, x: Tensor, k: Tensor | None = None) -> Tensor:
    diagonal = 0 if k is None else int(k)
    return torch.triu(x, diagonal) if call.integer("upper", 1) else torch.tril(x, diagonal)


@operator("OneHot")
def _one_hot(call: Call, indices: Tensor, depth: Tensor, values: Tensor) -> Tensor:
    size, axis = int(depth), call.integer("axis", -1)
    ids = indices.long()
    hot = torch.where(ids < 0, ids + size, ids)[..., None] == torch.arange(size, device=ids.device)
    axis = axis % hot.ndim
    return torch.where(hot.movedim(-1, axis), values[1], values[0])


@operator("CumSum")
def _cumsum(call: Call, x: Tensor, axis: Tensor) -> Tensor:
    place = int(axis)
    values = x.flip(place) if call.integer("reverse", 0) else x
    total = torch.cumsum(values, place, dtype=x.dtype)
    total = total - values if call.integer("exclusive", 0) else total
    return total.flip(place) if call.integer("reverse", 0) else total


@operator("Pad")
def _pad(
    call: Call, x: Tensor, pads: Tensor, value: Tensor | None = None, axes: Tensor | None = None
) -> Tensor:
    mode = call.text("mode", "constant")
    if mode != "constant":
        raise call.unsupported(f"its mode is {mode}")
    amounts = _integers(pads) or []
    chosen = [axis % x.ndim for axis in _integers(axes) or range(x.ndim)]
    half = len(amounts) // 2
    by_axis = {axis: (amounts[i], amounts[i + half]) for i, axis in enumerate(chosen)}
    flat = [size for axis in reversed(range(x.ndim)) for size in by_axis.get(axis, (0, 0))]
    return F.pad(x, flat, value=0 if value is None else value.item())


# ---- reductions ---------------------------------------------------------------------------------


def _norm(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    return torch.linalg.vector_norm(x, dim=axes, keepdim=keep)


_REDUCED: dict[str, Callable[[Tensor, list[int], bool], Tensor]] = {
    "ReduceL2": _norm,
    "ReduceMax": lambda x, axes, keep: torch.amax(x, axes, keep),
    "ReduceMean": lambda x, axes, keep: torch.mean(x, axes, keep),
    "ReduceMin": lambda x, axes, keep: torch.amin(x, axes, keep),
    "ReduceSum": lambda x, axes, keep: torch.sum(x, axes, keep, dtype=x.dtype),
}


def _reduce(call: Call, x: Tensor, axes: Tensor | None = None) -> Tensor:
    chosen = _axes(call, axes)
    if not chosen:
        if call.integer("noop_with_empty_axes", 0):
            return x
        chosen = list(range(x.ndim))
    return _REDUCED[call.node.op_type](x, chosen, bool(call.integer("keepdims", 1)))


OPERATORS.update({("", name): _reduce for name in _REDUCED})


@operator("ReduceProd")
def _reduce_prod(call: Call, x: Tensor, axes: Tensor | None = None) -> Tensor:
    keep = bool(call.integer("keepdims", 1))
    chosen = sorted((axis % x.ndim for axis in _axes(call, axes) or range(x.ndim)), reverse=True)
    for axis in chosen:
        x = torch.prod(x, axis, keepdim=keep, dtype=x.dtype)
    return x


@operator("ArgMax")
def _argmax(call: Call, x: Tensor) -> Tensor:
    if call.integer("select_last_index", 0):
        raise call.unsupported("it selects the last of equal elements")
    return torch.argmax(x, call.integer("axis", 0), keepdim=bool(call.integer("keepdims", 1)))


# ---- products and normalization -----------------------------------------------------------------


@operator("Gemm")
def _gemm(call: Call, a: Tensor, b: Tensor, c: Tensor | None = None) -> Tensor:
    a = a.T if call.integer("transA", 0) else a
    b = b.T if call.integer("transB", 0) else b
    product = torch.matmul(a, b)
    alpha, beta = call.number("alpha", 1.0), call.number("beta", 1.0)
    product = product if alpha == 1 else alpha * product
    return product if c is None else product + (c if beta == 1 else beta * c)


@operator("FusedGemm", domain="com.microsoft")
def _fused_gemm(call: Call, a: Tensor, b: Tensor, c: Tensor | None = None) -> Tensor:
    name = call.text("activation", "")
    product = _gemm(call, a, b, c)
    if name == "LeakyRelu":
        return F.leaky_relu(product, call.number("activation_alpha", 0.01))
    if name not in ("Relu", "Sigmoid", "Softplus", "Tanh"):
        raise call.unsupported(f"its activation is {name or 'missing'}")
    return _UNARY[name](product)


@operator("FusedMatMul", domain="com.microsoft")
def _fused_matmul(call: Call, a: Tensor, b: Tensor) -> Tensor:
    if call.integer("transBatchA", 0) or call.integer("transBatchB", 0):
        raise call.unsupported("it transposes the batch")
    a = a.transpose(-1, -2) if call.integer("transA", 0) else a
    b = b.transpose(-1, -2) if call.integer("transB", 0) else b
    return call.number("alpha", 1.0) * torch.matmul(a, b)


@operator("Einsum")
def _einsum(call: Call, *values: Tensor) -> Tensor:
    return torch.einsum(call.text("equation", "").replace(" ", ""), *values)


@operator("Softmax", "LogSoftmax")
def _softmax(call: Call, x: Tensor) -> Tensor:
    axis = call.integer("axis", -1 if call.version >= 13 else 1)
    shape = x.shape
    if call.version < 13:  # older opsets flatten the axes from this one on
        axis = axis % x.ndim
        x, axis = x.reshape(*shape[:axis], -1), -1
    if call.node.op_type == "LogSoftmax":
        return F.log_softmax(x, axis).reshape(shape)
    empty = (x == -torch.inf).all(axis, keepdim=True)
    if not bool(empty.any()):
        return F.softmax(x, axis).reshape(shape)
    # A row of -inf gives NaN, which graphs replace by 0; its gradient would stay NaN.
    finite = F.softmax(x.masked_fill(empty, 0.0), axis)
    return finite.masked_fill(empty, torch.nan).reshape(shape)


@operator("LayerNormalization")
def _layer_norm(call: Call, x: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    shape = x.shape[call.integer("axis", -1) % x.ndim :]
    weight, offset = (None if t is None else t.expand(shape) for t in (scale, bias))
    return F.layer_norm(x, shape, weight, offset, call.number("epsilon", 1e-5))


@operator("RMSNormalization", "SimplifiedLayerNormalization")
def _rms_norm(call: Call, x: Tensor, scale: Tensor) -> Tensor:
    axes = list(range(call.integer("axis", -1) % x.ndim, x.ndim))
    return _scaled(x, axes, call.number("epsilon", 1e-5)) * scale


def _scaled(x: Tensor, axes: list[int], epsilon: float) -> Tensor:
    return x * torch.rsqrt((x * x).mean(axes, keepdim=True) + epsilon)


@operator("SkipLayerNormalization", domain="com.microsoft")
def _skip_layer_norm(
    call: Call,
    x: Tensor,
    skip: Tensor,
    gamma: Tensor,
    beta: Tensor | None = None,
    bias: Tensor | None = None,
) -> tuple[Tensor, ...]:
    total = x + skip if bias is None else x + skip + bias
    normed = F.layer_norm(total, total.shape[-1:], gamma, beta, call.number("epsilon", 1e-12))
    none = total.new_empty(0)  # mean and inverse deviation, for training only
    return normed, none, none, total


@operator("SkipSimplifiedLayerNormalization", domain="com.microsoft")
def _skip_rms_norm(
    call: Call, x: Tensor, skip: Tensor, gamma: Tensor, bias: Tensor | None = None
) -> tuple[Tensor, ...]:
    total = x + skip if bias is None else x + skip + bias
    none = total.new_empty(0)
    return _scaled(total, [-1], call.number("epsilon", 1e-12)) * gamma, none, none, total


@operator("EmbedLayerNormalization", domain="com.microsoft")
def _embed_layer_norm(
    call: Call,
    ids: Tensor,
    segments: Tensor | None,
    words: Tensor,
    positions: Tensor,
    kinds: Tensor | None,
    gamma: Tensor,
    beta: Tensor,
    mask: Tensor | None = None,
    places: Tensor | None = None,
) -> tuple[Tensor, ...]:
    if places is None:
        places = torch.arange(ids.shape[1], device=ids.device)[None]
    total = words[ids.long()] + positions[places.long()]
    if segments is not None and kinds is not None:
        total = total + kinds[segments.long()]
    normed = F.layer_norm(total, total.shape[-1:], gamma, beta, call.number("epsilon", 1e-12))
    lengths = (ids.new_zeros(len(ids)) if mask is None else mask.sum(1)).int()
    return normed, lengths, total


@operator("InstanceNormalization")
def _instance_norm(call: Call, x: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    return F.instance_norm(x, weight=scale, bias=bias, eps=call.number("epsilon", 1e-5))


@operator("Conv")
def _conv(call: Call, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if call.text("auto_pad", "NOTSET") != "NOTSET":
        raise call.unsupported("it has automatic padding")
    axes = x.ndim - 2
    pads = call.integers("pads") or [0] * (2 * axes)
    # PyTorch pads from the last axis to the first, both sides of each.
    flat = [size for axis in reversed(range(axes)) for size in (pads[axis], pads[axis + axes])]
    x = F.pad(x, flat) if any(flat) else x
    convolve = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}[axes]
    return convolve(
        x, weight, bias, stride=call.integers("strides") or [1] * axes,
        dilation=call.integers("dilations") or [1] * axes, groups=call.integer("group", 1),
    )  # fmt: skip
