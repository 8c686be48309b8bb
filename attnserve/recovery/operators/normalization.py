"""Softmax and normalization of the last axes."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from attnserve.recovery.operators.registry import Call, operator

__all__: list[str] = []


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
