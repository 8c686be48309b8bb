"""What a block computes, in numpy, from its own weights, scale and mask alone.

The certificate compares the graph with this, so nothing here looks at the graph's nodes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from graph_passes.attention import AttentionBlock, Causal, LogitStep, Mask, Projection

if TYPE_CHECKING:
    from jaxtyping import Float

__all__ = ["ReferenceOutput", "attention_reference", "inputs_of", "softmax"]


@dataclass(frozen=True, eq=False)
class ReferenceOutput:
    """Probabilities (B, H, S, T), context (B, S, H*V) and output (B, S, D) where there is one."""

    probabilities: np.ndarray
    context: np.ndarray
    output: np.ndarray | None


def inputs_of(block: AttentionBlock) -> tuple[ir.Value, ...]:
    """The values a block reads and does not make: x, y, angles, and what masks its logits."""
    values = [block.q.input, block.k.input, block.v.input]
    turns = (turn for part in (block.q, block.k, block.v) for turn in part.turns)
    values += [turn.factor for turn in turns if turn.factor is not None]
    values += [step.value for step in block.steps if not isinstance(step, Causal)]
    return tuple(dict.fromkeys(values))


def attention_reference(
    block: AttentionBlock, values: Mapping[ir.Value, np.ndarray], batch: int
) -> ReferenceOutput:
    """Equation 5 of arXiv 2006.16362 with the content term of equation 3, in double precision.

    Args:
        block: The reading.
        values: An array for each of ``inputs_of(block)``.
        batch: B, which flattened tokens (B*S, D) do not tell.
    """
    q = _project(block.q, values, batch)  # B H S K
    k = _project(block.k, values, batch)  # B H T K
    v = _project(block.v, values, batch)  # B H T V
    logits = block.scale * (q @ np.swapaxes(k, -1, -2))  # B H S T
    if block.content is not None:
        content = _project(block.content, values, batch)  # B H T 1
        logits = logits + block.content.scale * np.swapaxes(content, -1, -2)
    for step in block.steps:
        logits = _apply(step, logits, values)
    probabilities = softmax(logits)
    heads = v.shape[1] * v.shape[3]
    context = np.moveaxis(block.v.scale * (probabilities @ v), 1, 2)  # B S H V
    output = None
    if block.output is not None:
        rows = block.output.matrix()[block.output.rows]  # H V D
        output = np.einsum("bshv,hvd->bsd", context, rows, optimize=True) + block.output.offset()
    return ReferenceOutput(probabilities, context.reshape(*context.shape[:2], heads), output)


def softmax(logits: Float[np.ndarray, "*batch T"]) -> Float[np.ndarray, "*batch T"]:
    """Over the last axis; rows that are masked throughout are all zero."""
    top = logits.max(axis=-1, keepdims=True)
    exp = np.exp(logits - np.where(np.isfinite(top), top, 0.0))
    total = exp.sum(axis=-1, keepdims=True)
    return exp / np.where(total == 0.0, 1.0, total)


def _project(
    projection: Projection, values: Mapping[ir.Value, np.ndarray], batch: int
) -> Float[np.ndarray, "B H T K"]:
    tokens = values[projection.input].astype(np.float64)
    tokens = tokens.reshape(batch, -1, tokens.shape[-1])  # B T D
    if not projection.turns:
        heads = np.einsum("btd,hdk->bhtk", tokens, projection.heads(), optimize=True)
        return heads + projection.offset[:, None, :]
    total = np.zeros(())
    product = tokens @ projection.matrix()  # B T N
    for turn in projection.turns:
        picked = np.moveaxis(product[:, :, turn.columns], 2, 1)  # B H T K
        term = picked * turn.gain[:, None, :] + turn.offset[:, None, :]
        if turn.factor is not None:
            term = term * turn.angles(values[turn.factor], batch, tokens.shape[1])
        total = total + term
    return total


def _apply(
    step: LogitStep, logits: np.ndarray, values: Mapping[ir.Value, np.ndarray]
) -> np.ndarray:
    if isinstance(step, Causal):
        allowed = np.tri(*logits.shape[-2:], dtype=bool)
        return np.where(allowed, logits, -np.inf)
    value = _as_logits(values[step.value], logits.shape)
    if isinstance(step, Mask):
        return np.where(value == step.keep, logits, step.fill)
    return logits + value


def _as_logits(value: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Masks of (B*H, S, T) scores are laid out like them."""
    if value.ndim == 3 and value.shape[0] == shape[0] * shape[1]:
        return value.reshape(shape)
    return value
