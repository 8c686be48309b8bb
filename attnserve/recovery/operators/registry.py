"""The table of operators, and the helpers of their functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor

from graph_passes.errors import InvalidModel

__all__ = [
    "HALF",
    "ON_HOST",
    "OPERATORS",
    "Call",
    "Operator",
    "axes_of",
    "dtype_of",
    "integers",
    "operator",
    "tensor_of",
]


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
        numbers = self.node.attributes.get_ints(name, default)
        return None if numbers is None else list(numbers)

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

ON_HOST: dict[tuple[str, str], tuple[int, ...]] = {}
"""The inputs of an operator that its function reads on the host."""

HALF = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


def operator(
    *names: str, domain: str = "", on_host: tuple[int, ...] = ()
) -> Callable[[Operator], Operator]:
    """Register a function for these operators, which reads some inputs on the host."""

    def register(function: Operator) -> Operator:
        for name in names:
            OPERATORS[domain, name], ON_HOST[domain, name] = function, on_host
        return function

    return register


def dtype_of(dtype: ir.DataType) -> torch.dtype:
    """The type in which a value is computed: half precision is computed in float32."""
    if dtype in HALF:
        return torch.float32
    return torch.from_numpy(np.zeros(0, dtype.numpy())).dtype


def integers(tensor: Tensor | None) -> list[int] | None:
    return None if tensor is None else [int(x) for x in tensor.reshape(-1).tolist()]


def tensor_of(tensor: ir.TensorProtocol) -> Tensor:
    """The elements of a tensor, in a copy; half precision as float32."""
    array = np.array(tensor.numpy())
    if tensor.dtype in HALF:
        array = array.astype(np.float32)
    return torch.from_numpy(array)


def axes_of(call: Call, axes: Tensor | None) -> list[int] | None:
    """Axes from an input, or from the attribute of older opsets."""
    return integers(axes) if axes is not None else call.integers("axes")
