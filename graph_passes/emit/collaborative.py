"""Emit the logits of collaborative heads in standard operators.

    dense    q = scale (x P) diag(M[h])             k = y Q             logits = q k^T + scale y v_h
    sparse   q = [scale (x P)[S_h] m_h, scale, 0]   k = [(y Q)[S_h], y v_h, 0]       logits = q k^T

With dense mixing, every head multiplies all R dimensions. Sparse mixing is ordinary multi-head
attention over the gathered dimensions and the content. It is padded to one size for all heads, a
multiple of ``ALIGN`` for fused kernels. Rows of (B, R, T), which are contiguous in memory, are
gathered instead of single elements. If no dimension is shared by two heads, nothing is gathered:
columns of P and Q are ordered by head.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np
import onnx_ir as ir

from graph_passes.blocks import AttentionBlock
from graph_passes.emit.caches import Cache
from graph_passes.emit.editing import Inserter, replace_uses
from graph_passes.factorize.cp import CollaborativeFactors

__all__ = [
    "cache_width",
    "dense_logits",
    "max_read_size",
    "padded_head_size",
    "padded_size",
    "sparse_logits",
]

ALIGN = 8
"""Head sizes above this value are padded to a multiple of it, for fused kernels."""


def cache_width(factors: CollaborativeFactors) -> int:
    """Cached elements per token: R, plus H if there are content logits."""
    return factors.rank + (len(factors.content) if _has_content(factors) else 0)


def padded_head_size(factors: CollaborativeFactors) -> int:
    """K' of sparse mixing: the size of the largest head, with content and padding."""
    largest = int((factors.mixing != 0).sum(axis=1).max())
    return padded_size(largest + int(_has_content(factors)))


def max_read_size(head_size: int, limit: int) -> int:
    """The largest size of a head that does not increase the padded size of ``head_size``."""
    return min(limit, padded_size(head_size + 1) - 1)


def padded_size(size: int) -> int:
    """The size of a head after padding to a multiple of ``ALIGN``; small heads are not padded."""
    return size if size <= ALIGN else -(-size // ALIGN) * ALIGN


def _has_content(factors: CollaborativeFactors) -> bool:
    """Whether a head has content logits that are not zero."""
    return bool(np.any(factors.content))


def dense_logits(
    make: Inserter, block: AttentionBlock, factors: CollaborativeFactors, cache: Cache | None
) -> ir.Value:
    """Emit logits (B, H, S, T) of dense mixing, with a cache of shared keys if given."""
    weight = partial(make.constant, dtype=block.q.dtype)
    rank = factors.rank
    heads = block.q.num_heads
    scale = weight(block.scale, "scale")
    q = make.op("MatMul", [block.x, weight(factors.query, "query_weight")], "query")  # B S R
    q = _one_head(make, make.op("Mul", [q, scale], "scaled_query"), rank, "query_tokens")
    mixing = weight(factors.mixing.reshape(heads, 1, rank), "mixing")
    q = make.op("Mul", [q, mixing], "mixed_query")  # B H S R
    content = None
    if cache is not None:
        k, content = _through_cache(block, cache, factors)
    else:
        k = make.op("MatMul", [block.y, weight(factors.key, "key_weight")], "key")  # B T R
        k = _one_head(make, k, rank, "key_tokens")
        if _has_content(factors):
            of_keys = weight(factors.content.T, "content_weight")
            content = make.op("MatMul", [block.y, of_keys], "content")  # B T H
            content = _one_head(make, content, heads, "content_tokens")
    k = make.op("Transpose", [k], "shared_key", perm=[0, 1, 3, 2])  # B 1 R T
    logits = make.op("MatMul", [q, k], "scores")
    if content is None:
        return logits
    content = make.op("Mul", [content, scale], "scaled_content")  # B 1 T H
    content = make.op("Transpose", [content], "content_logits", perm=[0, 3, 1, 2])  # B H 1 T
    return make.op("Add", [logits, content], "logits")


def sparse_logits(
    make: Inserter, block: AttentionBlock, factors: CollaborativeFactors, *, gather: bool = False
) -> ir.Value:
    """Emit logits (B, H, S, T) of sparse mixing.

    Args:
        gather: Other blocks share W~Q and W~K but have another content. The content is then
            concatenated to W~K in the graph instead of in the weight.
    """
    weight = partial(make.constant, dtype=block.q.dtype)
    heads = len(factors.mixing)
    size = padded_head_size(factors)
    layout = _layout_of(factors, size, gather=gather)
    scale = weight(block.scale, "scale")
    q = make.op("MatMul", [block.x, weight(layout.query, "query_weight")], "query")
    q = make.op("Mul", [q, scale], "scaled_query")
    if layout.constant.any():  # a column of ones, for the content
        q = make.op("Add", [q, weight(layout.constant * block.scale, "one")], "query_and_one")
    if gather and _has_content(factors):
        weights = weight(factors.key, "key_weight"), weight(factors.content.T, "content_weight")
        key_weight = make.op("Concat", weights, "key_and_content_weight", axis=1)
    else:
        key_weight = weight(layout.key, "key_weight")
    k = make.op("MatMul", [block.y, key_weight], "key")
    if layout.gathered:
        q = _gathered(make, q, layout.query_columns, "query")  # B H*K' S
        mixing = weight(layout.mixing.reshape(heads * size, 1), "mixing")
        q = make.op("Mul", [q, mixing], "mixed_query")
        k = _gathered(make, k, layout.key_columns, "key")  # B H*K' T
        rows = make.integers([0, heads, size, -1], "rows_apart")
        q = make.op("Reshape", [q, rows], "query_rows")
        q = make.op("Transpose", [q], "queries", perm=[0, 1, 3, 2])
        k = make.op("Reshape", [k, rows], "keys")
    else:
        apart = make.integers([0, 0, heads, size], "heads_apart")
        q = make.op("Reshape", [q, apart], "queries_apart")
        q = make.op("Transpose", [q], "queries", perm=[0, 2, 1, 3])
        k = make.op("Reshape", [k, apart], "keys_apart")
        k = make.op("Transpose", [k], "keys", perm=[0, 2, 3, 1])
    return make.op("MatMul", [q, k], "scores")  # of B H S K' and B H K' T


@dataclass(frozen=True, eq=False)
class _SparseLayout:
    """Weights and column indices of sparse heads.

    Attributes:
        query: The weight of the queries, (D, N).
        key: The weight of the keys, (E, M).
        constant: Added to each column of the queries, in units of the scale, (N,).
        gathered: Whether columns are gathered; else they are ordered by head.
        query_columns: The column of ``query`` of each element of each head, (H, K').
        key_columns: The column of ``key`` of each element of each head, (H, K').
        mixing: Factors of the queries, (H, K').
    """

    query: np.ndarray
    key: np.ndarray
    constant: np.ndarray
    gathered: bool
    query_columns: np.ndarray
    key_columns: np.ndarray
    mixing: np.ndarray


def _layout_of(factors: CollaborativeFactors, size: int, *, gather: bool) -> _SparseLayout:
    """The layout of heads that are padded to ``size``.

    Args:
        gather: Gather columns even if no two heads share one.
    """
    heads, rank = factors.mixing.shape
    content = _has_content(factors)
    query = np.pad(factors.query, ((0, 0), (0, int(content))))  # the last column is for the content
    key = np.hstack([factors.key, factors.content.T]) if content else factors.key
    constant = (np.arange(query.shape[1]) == rank).astype(float)
    columns = np.zeros((2, heads, size), np.int64)
    mixing = np.zeros((heads, size))
    for head, row in enumerate(factors.mixing):
        indices = np.flatnonzero(row)
        columns[:, head, : len(indices)] = indices
        mixing[head, : len(indices)] = row[indices]
        if content:
            columns[:, head, len(indices)] = (rank, rank + head)
            mixing[head, len(indices)] = 1.0
    gathered = gather or int((factors.mixing != 0).sum(axis=0).max()) > 1
    if not gathered:
        query_order, key_order = columns.reshape(2, -1)
        weights = mixing.reshape(-1)
        query = query[:, query_order] * weights
        key = key[:, key_order] * (weights != 0)
        constant = constant[query_order] * weights
    return _SparseLayout(query, key, constant, gathered, columns[0], columns[1], mixing)


def _gathered(make: Inserter, tokens: ir.Value, columns: np.ndarray, name: str) -> ir.Value:
    """Gather columns of (B, T, N) as rows (B, H*K', T)."""
    rows = make.op("Transpose", [tokens], f"{name}_by_column", perm=[0, 2, 1])
    indices = make.integers(columns.reshape(-1), f"{name}_columns")
    return make.op("Gather", [rows, indices], f"{name}_of_heads", axis=1)


def _one_head(make: Inserter, value: ir.Value, columns: int, name: str) -> ir.Value:
    """Reshape tokens (B, T, columns) to (B, 1, T, columns).

    Bodies state no opset; in them, a Reshape infers T, which fails for an empty batch.
    """
    if make.graph.opset_imports.get("", 0) >= 13:
        return make.op("Unsqueeze", [value, make.integers([1], f"{name}_axis")], name)
    shape = make.integers([0, 1, -1, columns], f"{name}_shape")
    return make.op("Reshape", [value, shape], name)


def _through_cache(
    block: AttentionBlock, cache: Cache, factors: CollaborativeFactors
) -> tuple[ir.Value, ir.Value | None]:
    """Emit shared keys (B, 1, P+T, R) and content (B, 1, P+T, H) with a cache of P tokens."""
    make = Inserter(block.graph, cache.join, f"{block.name}/collaborative")
    rank = factors.rank
    width = cache_width(factors)
    columns = np.concatenate([factors.key, factors.content.T], axis=1)[:, :width]  # E R or E R+H
    weight = make.constant(columns, "key_weight", block.q.dtype)
    key = make.op("MatMul", [block.y, weight], "key")
    new = _one_head(make, key, width, "key_tokens")
    present = make.op("Concat", [cache.join.inputs[0], new], "present_key", axis=2)
    for value, old in ((present, cache.present), *((past, past) for past in cache.past)):
        if old.shape is not None:
            value.shape = ir.Shape([old.shape[0], 1, old.shape[2], width])
    replace_uses(cache.present, present)
    if width == rank:
        return present, None
    axis = make.integers([3], "last")
    ends = [make.integers([n], f"at_{n}") for n in (0, rank, width)]
    keys = make.op("Slice", [present, *ends[:2], axis], "cached_key")
    content = make.op("Slice", [present, *ends[1:], axis], "cached_content")
    return keys, content
