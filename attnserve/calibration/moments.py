"""Moments of the inputs and attention of each block, summed over calibration batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from attnserve.context import DEFAULT_CONTEXT, RunContext
from attnserve.models.masks import no_token, not_finite, token_mask
from attnserve.runtime.interface import Batch
from attnserve.runtime.observer import observe
from graph_passes.blocks import AttentionBlock
from graph_passes.factorize.moments import TokenMoments

__all__ = ["collect_moments"]


def collect_moments(
    model: ir.Model,
    blocks: Sequence[AttentionBlock],
    batches: Sequence[Batch],
    *,
    context: RunContext = DEFAULT_CONTEXT,
) -> dict[str, TokenMoments]:
    """Collect the moments that weight the factorization of each block, by block name.

    One batch at a time is run and reduced. Padding is excluded.

    Args:
        blocks: Their own probabilities must be values of the graph (decompose fused operators
            first).

    Raises:
        InvalidData: The model refuses a batch, or its activations are not finite.
    """
    sums = {block.name: _BlockSums(block) for block in blocks}
    values = [_observed_values(block) for block in blocks]
    for batch, arrays in observe(model, values, batches, context, "collect moments"):
        for block, (x, y, probabilities, v) in zip(blocks, arrays, strict=True):
            sums[block.name].add(x, y, probabilities, v.transpose(block.v.axes), batch)
    return {name: block_sums.moments() for name, block_sums in sums.items()}


def _observed_values(block: AttentionBlock) -> tuple[ir.Value, ir.Value, ir.Value, ir.Value]:
    """x, y, the own probabilities and v of a block."""
    own = block.own_probabilities
    assert own is not None, f"{block.name}: its probabilities are not in the graph"
    assert block.v.output is not None
    return block.x, block.y, own, block.v.output


class _BlockSums:
    """Running sums of one block over batches."""

    def __init__(self, block: AttentionBlock) -> None:
        self.block = block
        self.queries = 0
        self.x_sum: Any = 0.0
        self.x_products: Any = 0.0
        self.y_spread: Any = 0.0
        self.head_spread: Any = 0.0
        self.writes = _write_root(block)  # H V V

    def add(
        self,
        x: np.ndarray,
        y: np.ndarray,
        probabilities: np.ndarray,
        v: np.ndarray,
        batch: Mapping[str, np.ndarray],
    ) -> None:
        """Add one batch.

        Args:
            x: The input of the queries, (B, S, D).
            y: The input of the keys and values, (B, T, E).
            probabilities: Probabilities of the own heads, (B, H, S, T) or (B*H, S, T).
            v: The values, (B, H, T, V) or (B*H, T, V).
            batch: The inputs of the model, which hold the mask.
        """
        B, S, _ = x.shape
        real = token_mask(batch, (B, S))
        own_heads = self.block.own_heads
        p = probabilities.reshape(B, len(own_heads), S, -1)
        p = np.where(real[:, None, :, None], p, 0)  # padded queries have no weight
        dtype = np.promote_types(v.dtype, np.float32)  # squares of half precision overflow
        contributions = v.reshape(B, -1, *v.shape[-2:]) @ self.writes.astype(dtype)  # B H T V
        contributions = contributions[:, own_heads]
        x = x.astype(np.float64)
        self.queries += int(real.sum())
        self.x_sum = self.x_sum + x[real].sum(0)
        self.x_products = self.x_products + x[real].T @ x[real]
        tokens = y.astype(np.float64)
        tokens -= tokens.mean(1, keepdims=True)  # the same variances, with smaller rounding errors
        spread_tokens = np.empty_like(tokens)
        for row in range(B):  # one sequence at a time: (H, S, T) in double precision
            sequence = p[row].astype(np.float64)
            spread_tokens[row] = _key_spread(sequence) @ tokens[row]
            self.head_spread = self.head_spread + _head_spread(sequence, contributions[row])
        width = tokens.shape[-1]
        self.y_spread = self.y_spread + tokens.reshape(-1, width).T @ spread_tokens.reshape(
            -1, width
        )

    def moments(self) -> TokenMoments:
        """The moments of all batches.

        Raises:
            InvalidData: The data has no real token, or a moment is not finite.
        """
        name = self.block.name
        if not self.queries:
            raise no_token(name)
        mean = self.x_sum / self.queries
        covariance = self.x_products / self.queries - np.outer(mean, mean)
        keys = self.y_spread / (self.queries * self.block.q.num_heads)
        weight = np.sqrt(np.maximum(self.head_spread / self.queries, 0.0))
        if not all(np.isfinite(array).all() for array in (mean, covariance, keys, weight)):
            raise not_finite(name)
        return TokenMoments(mean, _symmetric(covariance), _symmetric(keys), weight)


def _key_spread(p: np.ndarray) -> np.ndarray:
    """The matrix M of the variance of the keys under p, for one sequence: (T, T).

    That variance, sum_t p y y^T - ybar ybar^T, summed over heads and queries, is y^T M y with
    M = diag(sum p) - sum p p^T. This form needs one T x T matrix, where ybar ybar^T would be
    multiplied out for every head and query.

    Args:
        p: Probabilities, (H, S, T).
    """
    rows = p.reshape(-1, p.shape[-1])  # H*S T
    return np.diag(rows.sum(0)) - rows.T @ rows


def _head_spread(p: np.ndarray, contributions: np.ndarray) -> np.ndarray:
    """The variance of written values under p by head, summed over one sequence: (H,).

    Args:
        p: Probabilities, (H, S, T).
        contributions: Values times ``_write_root``, (H, T, V).
    """
    means = p @ contributions  # H S V
    squares = (p @ (contributions**2)).sum(-1) - (means**2).sum(-1)  # H S
    return squares.sum(1)


def _write_root(block: AttentionBlock) -> np.ndarray:
    """L_h of L_h L_h^T = W_O^h W_O^hT, so that |v L_h| is the norm of a head's output."""
    if block.output is None:
        identity = np.eye(block.v_head_size)
        return np.broadcast_to(identity, (block.num_heads, *identity.shape))
    rows = block.output.matrix()[block.output.rows].astype(np.float64)  # H V D
    values, vectors = np.linalg.eigh(rows @ rows.swapaxes(1, 2))
    return vectors * np.sqrt(np.maximum(values, 0.0))[:, None, :]


def _symmetric(matrix: np.ndarray) -> np.ndarray:
    """The symmetric part of a matrix: rounding makes it slightly asymmetric."""
    return (matrix + matrix.T) / 2
