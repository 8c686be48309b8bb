"""The logits of collaborative heads in plain operators, from their factors.

    dense    q = scale (x P) diag(M[h])             k = y Q             logits = q k^T + scale y v_h
    sparse   q = [scale (x P)[S_h] m_h, scale, 0]   k = [(y Q)[S_h], y v_h, 0]       logits = q k^T

Dense mixing makes every head multiply all R dimensions. Sparse mixing is ordinary multi-head
attention again, over the gathered dimensions and the content, padded to a size that is the same for
all heads and a multiple of ``ALIGN``, as fused kernels take it. What is gathered are rows of
(B, R, T), whose tokens lie together in memory, not single elements. Where no dimension is read by
two heads there is nothing to gather: P and Q hold the heads side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from graph_passes.blocks import AttentionBlock
from graph_passes.emit.caches import Cache
from graph_passes.emit.editing import Inserter, replace_uses
from graph_passes.factorize.cp import CollaborativeFactors

__all__ = ["cache_width", "dense_logits", "max_read_size", "padded_head_size", "padded_size",
           "sparse_logits"]  # fmt: skip

ALIGN = 8
"""What fused kernels want head sizes to be multiples of; smaller heads are left as they are."""


def cache_width(factors: CollaborativeFactors) -> int:
    """The numbers that cached keys take a token: R, and H where there are content logits."""
    return factors.rank + (len(factors.content) if _has_content(factors) else 0)


def padded_head_size(factors: CollaborativeFactors) -> int:
    """K' of sparse mixing: what the largest head reads, its content and padding."""
    largest = int((factors.mixing != 0).sum(axis=1).max())
    return padded_size(largest + int(_has_content(factors)))


def max_read_size(head_size: int, limit: int) -> int:
    """The dimensions that a head may read where ``head_size`` are read on average, without more
    padding than that takes; at most ``limit``."""
    return min(limit, padded_size(head_size + 1) - 1)


def padded_size(size: int) -> int:
    return size if size <= ALIGN else -(-size // ALIGN) * ALIGN


def _has_content(factors: CollaborativeFactors) -> bool:
    return bool(np.any(factors.content))


def dense_logits(
    make: Inserter, block: AttentionBlock, factors: CollaborativeFactors, cache: Cache | None
) -> ir.Value:
    """(B, H, S, T), every head reading all R dimensions; through a cache where there is one."""
    weight = _Weights(make, block)
    rank, heads = factors.rank, block.q.num_heads
    scale = weight(np.array(block.scale), "scale")
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
    make: Inserter, block: AttentionBlock, factors: CollaborativeFactors, *, shared: bool = False
) -> ir.Value:
    """(B, H, S, T), every head reading the dimensions for which its mixing is not zero.

    Args:
        shared: Other blocks have the same W~Q and W~K, and a content of their own: it is joined to
            W~K in the graph, not in the weight.
    """
    weight = _Weights(make, block)
    heads, size = len(factors.mixing), padded_head_size(factors)
    layout = _layout_of(factors, size, gather=shared)
    scale = weight(np.array(block.scale), "scale")
    q = make.op("MatMul", [block.x, weight(layout.query, "query_weight")], "query")
    q = make.op("Mul", [q, scale], "scaled_query")
    if layout.constant.any():  # one, by the same scale, that meets the content
        q = make.op("Add", [q, weight(layout.constant * block.scale, "one")], "query_and_one")
    if shared and _has_content(factors):
        both = weight(factors.key, "key_weight"), weight(factors.content.T, "content_weight")
        key_weight = make.op("Concat", both, "key_and_content_weight", axis=1)
    else:
        key_weight = weight(layout.key, "key_weight")
    k = make.op("MatMul", [block.y, key_weight], "key")
    if layout.gathered:
        q = _gathered(make, q, layout.query_columns, "query")  # B H*K' S
        mixing = weight(layout.mixing.reshape(heads * size, 1), "mixing")
        q = make.op("Mul", [q, mixing], "mixed_query")
        k = _gathered(make, k, layout.key_columns, "key")  # B H*K' T
        rows = _shape(make, [0, heads, size, -1], "rows_apart")
        q = make.op("Reshape", [q, rows], "query_rows")
        q = make.op("Transpose", [q], "queries", perm=[0, 1, 3, 2])
        k = make.op("Reshape", [k, rows], "keys")
    else:
        apart = _shape(make, [0, 0, heads, size], "heads_apart")
        q = make.op("Reshape", [q, apart], "queries_apart")
        q = make.op("Transpose", [q], "queries", perm=[0, 2, 1, 3])
        k = make.op("Reshape", [k, apart], "keys_apart")
        k = make.op("Transpose", [k], "keys", perm=[0, 2, 3, 1])
    return make.op("MatMul", [q, k], "scores")  # of B H S K' and B H K' T


@dataclass(frozen=True, eq=False)
class _SparseLayout:
    """Where sparse heads find what they read.

    Attributes:
        query, key: The weights of the two products.
        constant: What is added to each column of the queries, in units of the scale.
        gathered: Whether columns are gathered; else they are the heads, side by side.
        query_columns, key_columns: By head, and ``mixing`` what the queries are multiplied by.
    """

    query: np.ndarray  # D N
    key: np.ndarray  # E M
    constant: np.ndarray  # N
    gathered: bool
    query_columns: np.ndarray  # H K'
    key_columns: np.ndarray  # H K'
    mixing: np.ndarray  # H K'


def _layout_of(factors: CollaborativeFactors, size: int, *, gather: bool) -> _SparseLayout:
    (heads, rank), content = factors.mixing.shape, _has_content(factors)
    query = np.pad(factors.query, ((0, 0), (0, int(content))))  # its last column meets the content
    key = np.hstack([factors.key, factors.content.T]) if content else factors.key
    constant = (np.arange(query.shape[1]) == rank).astype(float)
    columns = np.zeros((2, heads, size), np.int64)
    mixing = np.zeros((heads, size))
    for head, row in enumerate(factors.mixing):
        read = np.flatnonzero(row)
        columns[:, head, : len(read)] = read
        mixing[head, : len(read)] = row[read]
        if content:
            columns[:, head, len(read)] = rank, rank + head
            mixing[head, len(read)] = 1.0
    if gather or int((factors.mixing != 0).sum(axis=0).max()) > 1:
        return _SparseLayout(query, key, constant, True, columns[0], columns[1], mixing)
    flat, weights = columns.reshape(2, -1), mixing.reshape(-1)
    apart = query[:, flat[0]] * weights, key[:, flat[1]] * (weights != 0)
    return _SparseLayout(*apart, constant[flat[0]] * weights, False, columns[0], columns[1], mixing)


def _gathered(make: Inserter, tokens: ir.Value, columns: np.ndarray, name: str) -> ir.Value:
    """Columns of (B, T, N) as rows (B, H*K', T)."""
    rows = make.op("Transpose", [tokens], f"{name}_by_column", perm=[0, 2, 1])
    indices = make.constant(columns.reshape(-1), f"{name}_columns")
    return make.op("Gather", [rows, indices], f"{name}_of_heads", axis=1)


class _Weights:
    """Constants in the type of a block's own weights."""

    def __init__(self, make: Inserter, block: AttentionBlock) -> None:
        self.make, self.dtype = make, block.q.dtype.numpy()

    def __call__(self, array: np.ndarray, name: str) -> ir.Value:
        return self.make.constant(array.astype(self.dtype), name)


def _shape(make: Inserter, lengths: Sequence[int], name: str) -> ir.Value:
    return make.constant(np.array(lengths, np.int64), name)


def _one_head(make: Inserter, value: ir.Value, columns: int, name: str) -> ir.Value:
    """Tokens (B, T, columns) as (B, 1, T, columns)."""
    return make.op("Reshape", [value, _shape(make, [0, 1, -1, columns], f"{name}_shape")], name)


def _through_cache(
    block: AttentionBlock, cache: Cache, factors: CollaborativeFactors
) -> tuple[ir.Value, ir.Value | None]:
    """Shared keys (B, 1, P+T, R) and content (B, 1, P+T, H), of which the past is cached."""
    make = Inserter(block.graph, cache.join, f"{block.name}/collaborative")
    rank, width = factors.rank, cache_width(factors)
    both = np.concatenate([factors.key, factors.content.T], axis=1)[:, :width]  # E R or E R+H
    key = make.op("MatMul", [block.y, _Weights(make, block)(both, "key_weight")], "key")
    new = _one_head(make, key, width, "key_tokens")
    present = make.op("Concat", [cache.join.inputs[0], new], "present_key", axis=2)
    for value, old in ((present, cache.present), *((past, past) for past in cache.past)):
        if old.shape is not None:
            value.shape = ir.Shape([old.shape[0], 1, old.shape[2], width])
    replace_uses(cache.present, present)
    if width == rank:
        return present, None
    axis = make.constant(np.array([3], np.int64), "last")
    ends = [make.constant(np.array([n], np.int64), f"at_{n}") for n in (0, rank, width)]
    return (
        make.op("Slice", [present, *ends[:2], axis], "cached_key"),
        make.op("Slice", [present, *ends[1:], axis], "cached_content"),
    )
