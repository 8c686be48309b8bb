"""Element-wise operators: arithmetic, comparisons, activations and types."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import reduce

import onnx_ir as ir
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from attnserve.recovery.operators.registry import Call, Operator, dtype_of, operator

__all__ = ["UNARY"]

UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "Abs": torch.abs,
    "Ceil": torch.ceil,
    "Cos": torch.cos,
    "Erf": torch.erf,
    "Exp": torch.exp,
    "Floor": torch.floor,
    "HardSwish": F.hardswish,
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
    "CastLike": lambda x, like: x.to(like.dtype),
    "Equal": torch.eq,
    "Greater": torch.gt,
    "GreaterOrEqual": torch.ge,
    "Less": torch.lt,
    "LessOrEqual": torch.le,
    "MatMul": torch.matmul,
    "Mul": torch.mul,
    "Or": torch.logical_or,
    "PRelu": lambda x, slope: torch.where(x < 0, slope * x, x),
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


for _name, _function in {**UNARY, **_BINARY, "Where": torch.where}.items():
    operator(_name)(_of_tensors(_function))
for _name, _function in _FOLDED.items():
    operator(_name)(_folded(_function))


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


@operator("LeakyRelu")
def _leaky_relu(call: Call, x: Tensor) -> Tensor:
    return F.leaky_relu(x, call.number("alpha", 0.01))


@operator("Elu")
def _elu(call: Call, x: Tensor) -> Tensor:
    return F.elu(x, call.number("alpha", 1.0))


@operator("HardSigmoid")
def _hard_sigmoid(call: Call, x: Tensor) -> Tensor:
    return torch.clamp(call.number("alpha", 0.2) * x + call.number("beta", 0.5), 0, 1)


@operator("Gelu")
def _gelu(call: Call, x: Tensor) -> Tensor:
    return F.gelu(x, approximate=call.text("approximate", "none"))


@operator("Gelu", "BiasGelu", "FastGelu", domain="com.microsoft")
def _bias_gelu(call: Call, x: Tensor, bias: Tensor | None = None) -> Tensor:
    approximation = "tanh" if call.node.op_type == "FastGelu" else "none"
    return F.gelu(x if bias is None else x + bias, approximate=approximation)


@operator("QuickGelu", domain="com.microsoft")
@operator("Swish")
def _swish(call: Call, x: Tensor) -> Tensor:
    default = 1.702 if call.node.op_type == "QuickGelu" else 1.0
    return x * torch.sigmoid(call.number("alpha", default) * x)


@operator("Dropout")
def _dropout(call: Call, x: Tensor, *_: Tensor | None) -> tuple[Tensor, Tensor]:
    return x, torch.ones_like(x, dtype=torch.bool)  # as in inference
