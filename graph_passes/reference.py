"""Reference implementation of attention in numpy, from the fields of an ``AttentionBlock``.

Certification compares the graph with this reference, so it does not read any node of the graph.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from graph_passes.blocks import (
    AttentionBlock,
    Capped,
    Causal,
    Floor,
    FullLengths,
    KeyLengths,
    KeyMask,
    LogitStep,
    Mask,
    PositionBias,
    Projection,
    RotaryTerm,
    Scaled,
    Weighted,
)

if TYPE_CHECKING:
    from jaxtyping import Float

__all__ = ["ReferenceOutput", "attention_reference", "inputs_of", "logits_reference", "softmax"]


@dataclass(frozen=True, eq=False)
class ReferenceOutput:
    """Probabilities (B, H, S, T), context (B, S, H*V) and, if present, output (B, S, D).

    If the weight of the output projection is quantized, the output is the operand of that product.
    """

    probabilities: np.ndarray
    context: np.ndarray
    output: np.ndarray | None


def inputs_of(block: AttentionBlock) -> tuple[ir.Value, ...]:
    """The external inputs of a block: x, y, rotary angles, caches, masks and biases.

    A product with a quantized weight takes the place of its tokens.
    """
    scored = (block.q, block.k) if block.q.num_heads else ()
    parts = [part for part in (*scored, block.v, block.content) if part is not None]
    values = [part.source for part in parts]
    factors = [factor for part in parts for factor in part.factors]
    caches = [part.past for part in parts if part.past is not None]
    for layout in (*factors, *caches):
        values += [layout.value] + ([layout.positions] if layout.positions else [])
    for step in block.steps:
        operands = (getattr(step, name, None) for name in ("value", "total"))
        values += [operand for operand in operands if operand is not None]
    values += [reused.value for reused in block.reused]
    return tuple(dict.fromkeys(values))


def attention_reference(
    block: AttentionBlock, values: Mapping[ir.Value, np.ndarray], batch: int
) -> ReferenceOutput:
    """Compute equation 5 of arXiv 2006.16362 with the content term of equation 3, in float64.

    Heads that reuse attention probabilities read them from ``values``.

    Args:
        block: The attention to compute.
        values: An array for each of ``inputs_of(block)``.
        batch: B, which cannot be inferred from flattened tokens (B*S, D).
    """
    v = _project(block.v, values, batch)  # B H T V
    parts: list[np.ndarray] = []
    heads: list[np.ndarray] = []
    if block.q.num_heads:
        logits = logits_reference(block, values, batch)
        for step in block.steps:
            logits = _apply(step, logits, values)
        parts.append(softmax(logits))
        heads.append(block.own_heads)
    for reuse in block.reused:
        parts.append(values[reuse.value][:, reuse.sources])
        heads.append(reuse.heads)
    order = np.argsort(np.concatenate(heads))
    probabilities = np.concatenate(parts, axis=1)[:, order]  # B H S T
    width = v.shape[1] * v.shape[3]
    context = np.moveaxis(block.v.scale * (probabilities @ v), 1, 2)  # B S H V
    output = None
    if block.output is not None and block.output.is_quantized:
        elements = np.argsort(block.output.rows.reshape(-1))
        output = context.reshape(*context.shape[:2], width)[..., elements]
    elif block.output is not None:
        rows = block.output.matrix()[block.output.rows]  # H V D
        output = np.einsum("bshv,hvd->bsd", context, rows, optimize=True) + block.output.offset()
    return ReferenceOutput(probabilities, context.reshape(*context.shape[:2], width), output)


def logits_reference(
    block: AttentionBlock, values: Mapping[ir.Value, np.ndarray], batch: int
) -> Float[np.ndarray, "B H S T"]:
    """Scaled scores plus the content term, before ``block.steps``."""
    q = _project(block.q, values, batch)  # B H S K
    k = _project(block.k, values, batch)  # B H T K
    logits = block.scale * (q @ np.swapaxes(k, -1, -2))  # B H S T
    if block.content is not None:
        content = _project(block.content, values, batch)  # B H T 1
        logits = logits + block.content.scale * np.swapaxes(content, -1, -2)
    return logits


def softmax(logits: Float[np.ndarray, "*batch T"]) -> Float[np.ndarray, "*batch T"]:
    """Softmax over the last axis; fully masked rows are zero."""
    top = logits.max(axis=-1, keepdims=True)
    exp = np.exp(logits - np.where(np.isfinite(top), top, 0.0))
    total = exp.sum(axis=-1, keepdims=True)
    return exp / np.where(total == 0.0, 1.0, total)


def _project(
    projection: Projection, values: Mapping[ir.Value, np.ndarray], batch: int
) -> Float[np.ndarray, "B H T K"]:
    """The heads of all T tokens: the cached heads, then the heads of the new tokens."""
    if projection.past is None:
        return _present(projection, values, batch)
    cached = values[projection.past.value].astype(np.float64)
    past = projection.past.broadcast(cached, batch, cached.shape[projection.past.token_axis])
    if not projection.has_weight:
        return past
    return np.concatenate([past, _present(projection, values, batch)], axis=2)


def _present(
    projection: Projection, values: Mapping[ir.Value, np.ndarray], batch: int
) -> Float[np.ndarray, "B H T K"]:
    """The heads of the tokens that are not cached."""
    tokens = values[projection.source].astype(np.float64)
    is_quantized = projection.is_quantized
    width = tokens.shape[-1] if is_quantized else projection.width
    if projection.sequence_first:
        tokens = tokens.reshape(-1, batch, width).swapaxes(0, 1)  # B T D
    tokens = tokens.reshape(batch, -1, width)
    if not (projection.rotary_terms or projection.norm is not None or is_quantized):
        heads = np.einsum("btd,hdk->bhtk", tokens, projection.heads(), optimize=True)
        return heads + projection.offset[:, None, :]
    product = tokens if is_quantized else tokens @ projection.matrix()  # B T N
    if projection.norm is not None:
        groups = _sum_of_terms(projection.norm.operand(projection), product, values)  # B G T L
        normed = np.moveaxis(projection.norm(groups), 1, 2)
        product = normed.reshape(*product.shape[:2], -1)
    return _sum_of_terms(projection, product, values)


def _sum_of_terms(
    projection: Projection, product: np.ndarray, values: Mapping[ir.Value, np.ndarray]
) -> Float[np.ndarray, "B H T K"]:
    """The sum of factor * (product[columns] * gain + offset) over the terms of a projection."""
    batch, length = product.shape[:2]
    whole = RotaryTerm(None, projection.columns, projection.gain, projection.offset)
    total = np.zeros(())
    for term in projection.rotary_terms or (whole,):
        picked = np.moveaxis(product[:, :, term.columns], 2, 1)  # B H T K
        value = picked * term.gain[:, None, :] + term.offset[:, None, :]
        if (factor := term.factor) is not None:
            positions = None if factor.positions is None else values[factor.positions]
            angles = factor.broadcast(values[factor.value], batch, length, positions)
            value = value * angles
        total = total + value
    return total


def _apply(
    step: LogitStep, logits: np.ndarray, values: Mapping[ir.Value, np.ndarray]
) -> np.ndarray:
    """Apply one step to the logits (B, H, S, T)."""
    match step:
        case PositionBias():
            return logits + step.sign * _as_logits(step, values[step.value], logits.shape)
        case Mask():
            value = _as_logits(step, values[step.value], logits.shape)
            return np.where(value == step.keep, logits, step.fill)
        case Weighted():
            return logits * _as_logits(step, values[step.value], logits.shape)
        case KeyMask():
            seen = values[step.value] > 0
            seen = seen[:, None, None, :] if step.queries else seen[:, None]
            return logits + np.where(seen, 0.0, step.fill)
        case KeyLengths():
            keys = np.arange(logits.shape[-1])
            seen = keys < values[step.value].reshape(-1, 1, 1, 1) + step.extra
            return np.where(seen, logits, step.fill)
        case FullLengths():
            return logits
        case Causal():
            queries, keys = logits.shape[-2:]
            allowed = np.tri(queries, keys, keys - queries if step.ends_together else 0, dtype=bool)
            return np.where(allowed, logits, -np.inf)
        case Scaled():
            return logits * step.factor
        case Capped():
            return np.tanh(logits)
        case Floor():
            return np.maximum(logits, step.low)


def _as_logits(
    step: Mask | PositionBias | Weighted, value: np.ndarray, shape: tuple[int, ...]
) -> np.ndarray:
    """Reorder a mask from the graph's layout so that it broadcasts to (B, H, S, T)."""
    if step.axes is not None:
        value = value.reshape((1,) * (len(step.axes) - value.ndim) + value.shape)
        value = value.transpose(step.axes)
    batch, heads = shape[:2]
    if value.ndim == 3 and value.shape[0] == batch * heads:
        return value.reshape(batch, heads, *value.shape[1:])
    if value.ndim == 5:  # (B, windows, H, S, T), where each window is a sequence
        windows = value.shape[1]
        return np.broadcast_to(value, (batch // windows, windows, *shape[1:])).reshape(shape)
    return value
