"""Matrix products."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from attnserve.recovery.operators.elementwise import UNARY
from attnserve.recovery.operators.registry import Call, operator

__all__: list[str] = []


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
    return UNARY[name](product)


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
