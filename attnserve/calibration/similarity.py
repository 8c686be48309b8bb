"""Similarity of attention heads: eq. 2 and 3 of the Reuse Transformer (arXiv 2110.06821).

    S(A, A') = 1 - mean over queries of TV(A[p], A'[p]),    TV(a, b) = |a - b|_1 / 2
    c[(l, h), (l', h')] = mean over texts of S(A_lh, A_l'h')

The mean is taken over the queries of each text first and then over texts, as in the paper, so that
all texts have equal weight. The code sums minima, because |a - b| = a + b - 2 min(a, b).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, islice
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import onnx_ir as ir

from attnserve.calibration.activations import evenly, probabilities_by_head, probabilities_of
from attnserve.calibration.layerwise import LayerwiseRunner
from attnserve.context import DEFAULT_CONTEXT, RunContext
from attnserve.models.masks import no_token, not_finite, token_mask
from attnserve.models.rows import row_count
from attnserve.runtime.interface import Batch
from attnserve.runtime.observer import observe
from graph_passes.blocks import AttentionBlock
from graph_passes.errors import InvalidArgument, InvalidData

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int

__all__ = ["HeadSimilarity", "measure_similarity", "similarities"]

MOST_QUERIES = 8192
"""Approximate number of queries to compare, for three digits of the mean. The cost is proportional
to it. Each text contributes an equal share, at least one, spread evenly over its tokens."""


@dataclass(frozen=True, eq=False)
class HeadSimilarity:
    """The similarity of all pairs of heads, from 0 (disjoint) to 1 (equal).

    Attributes:
        layers: Block names in execution order.
        heads: Number of heads of each block.
        matrix: Symmetric; NaN between layers that attend over different tokens (self and cross
            attention, or other lengths).
        queries: Number of compared queries, of the layer with the most.
        uniform: The similarity of each head to uniform attention over the keys that its query can
            see; None if it was not measured. Heads of an untrained model are nearly uniform, and so
            similar to each other: a similarity below ``uniform`` is no reason for reuse.
    """

    layers: tuple[str, ...]
    heads: tuple[int, ...]
    matrix: Float[np.ndarray, "N N"]
    queries: int
    uniform: Float[np.ndarray, " N"] | None = None

    def between(self, layer: str, other: str) -> Float[np.ndarray, "H G"]:
        """Similarity of each head of ``layer`` with each head of ``other``.

        Raises:
            InvalidArgument: No layer of this name was measured.
        """
        return self.matrix[self._heads_of(layer), self._heads_of(other)]

    def baseline(self) -> Float[np.ndarray, " L"]:
        """The mean similarity of each layer's heads to uniform attention; 0 if not measured."""
        if self.uniform is None:
            return np.zeros(len(self.layers))
        return np.array([self.uniform[self._heads_of(layer)].mean() for layer in self.layers])

    def best(self) -> Float[np.ndarray, "L L"]:
        """[l, l'] = mean over the heads of l of the similarity to their best match in l' (eq. 3).

        The matrix is not symmetric: several heads may have the same match. The diagonal is 1.
        """
        rows = [
            [self.between(layer, other).max(1).mean() for other in self.layers]
            for layer in self.layers
        ]
        return np.array(rows).reshape(len(self.layers), len(self.layers))

    def sequential(self) -> dict[str, Float[np.ndarray, " H"]]:
        """Similarity of each layer's heads to the previous layer (figure 3 of the paper).

        For each layer, the similarity of each head with its closest match in the previous layer,
        ranked from the lowest (rank 1) to the highest. The previous layer is the last earlier layer
        that can be compared; a layer without a previous one is left out.
        """
        ranks: dict[str, np.ndarray] = {}
        for index, layer in enumerate(self.layers):
            for other in reversed(self.layers[:index]):
                closest = self.between(layer, other).max(1)
                if not np.isnan(closest).any():
                    ranks[layer] = np.sort(closest)
                    break
        return ranks

    def _heads_of(self, layer: str) -> slice:
        """The rows of a layer's heads.

        Raises:
            InvalidArgument: No layer of this name was measured.
        """
        if layer not in self.layers:
            raise InvalidArgument(
                f"no attention block {layer!r} was measured; expected one of: "
                f"{', '.join(self.layers) or 'none'}",
                "choose one of these",
                code="similarity.unknown_layer",
            )
        index = self.layers.index(layer)
        ends = [0, *accumulate(self.heads)]
        return slice(ends[index], ends[index + 1])


def measure_similarity(
    model: ir.Model,
    blocks: Sequence[AttentionBlock],
    batches: Sequence[Batch],
    *,
    context: RunContext = DEFAULT_CONTEXT,
) -> HeadSimilarity:
    """Compare all heads of these blocks on the unmasked tokens of these batches.

    One batch at a time is run and reduced. Padding is excluded. ``MOST_QUERIES`` are compared.

    Args:
        blocks: In execution order. Their probabilities must be values of the graph (decompose fused
            operators first).

    Raises:
        InvalidData: The model refuses a batch, a block sees no real token, or its probabilities
            are not finite.
    """
    sums = _PairSums(blocks, batches)
    values = [probabilities_of(block) for block in blocks]
    for batch, arrays in observe(model, values, batches, context, "compare heads"):
        sums.add(arrays, batch)
    return sums.similarity()


def similarities(
    model: ir.Model,
    groups: Sequence[Sequence[AttentionBlock]],
    batches: Sequence[Batch],
    *,
    context: RunContext = DEFAULT_CONTEXT,
) -> Iterator[HeadSimilarity | None]:
    """Yield the similarity of the heads within each group of blocks, on unmasked tokens.

    The model runs once for all groups if they are in execution order. The result is None for a
    group of which a block sees no real token or has probabilities that are not finite.

    Args:
        groups: Their probabilities must be values of the graph (decompose fused operators first).

    Raises:
        InvalidData: The model refuses a batch.
    """
    runner = LayerwiseRunner(model, batches, context=context)
    values = [[*chain(*map(probabilities_of, blocks))] for blocks in groups]
    for index, blocks in enumerate(groups):
        sums = _PairSums(blocks, batches)
        later_values = list(chain(*values[index + 1 :]))
        runs = runner.run_to(values[index], later_values)
        for batch, arrays in zip(batches, runs, strict=True):
            remainder = iter(arrays)
            sums.add([[*islice(remainder, len(probabilities_of(b)))] for b in blocks], batch)
        try:
            yield sums.similarity()
        except InvalidData:
            yield None


class _PairSums:
    """Running sums over batches for all heads."""

    def __init__(self, blocks: Sequence[AttentionBlock], batches: Sequence[Batch]) -> None:
        self.blocks = blocks
        self.share = max(1, MOST_QUERIES // max(1, sum(map(row_count, batches))))  # of each text
        heads = sum(block.num_heads for block in blocks)
        layers = len(blocks)
        self.layer_of = np.repeat(np.arange(layers), [block.num_heads for block in blocks])
        self.common = np.zeros((heads, heads))  # sum over texts of mean over queries of |min|_1
        self.uniform = np.zeros(heads)  # the sum with uniform attention
        self.texts = np.zeros(layers, dtype=np.int64)
        self.queries = np.zeros(layers, dtype=np.int64)
        self.comparable = np.ones((layers, layers), dtype=bool)

    def add(self, probabilities: Sequence[Sequence[np.ndarray]], batch: Batch) -> None:
        """Add one batch.

        Args:
            probabilities: The elements of the ``probability_values`` of each block.
            batch: The inputs of the model, which hold the mask.
        """
        groups: dict[tuple[str, tuple[int, ...]], list[int]] = {}
        by_head = [
            probabilities_by_head(block, arrays)  # B H S T
            for block, arrays in zip(self.blocks, probabilities, strict=True)
        ]
        for index, (block, p) in enumerate(zip(self.blocks, by_head, strict=True)):
            sequences, _, queries, keys = p.shape
            groups.setdefault((block.kind, (sequences, queries, keys)), []).append(index)
        have_equal_keys = np.zeros_like(self.comparable)
        for (_, (B, S, _)), members in groups.items():
            # Attention over windows of an image has several sequences per image.
            max_queries = max(1, self.share * row_count(batch) // max(1, B))
            queries = _chosen(token_mask(batch, (B, S)), max_queries)
            have_equal_keys[np.ix_(members, members)] = True
            self.texts[members] += len(np.unique(queries.sequences))
            self.queries[members] += len(queries.sequences)
            samples = [
                by_head[i][queries.sequences, :, queries.positions] for i in members
            ]  # Q H T
            rows = np.concatenate([_rows(p, queries.weights) for p in samples])
            at = np.flatnonzero(np.isin(self.layer_of, members))
            self.uniform[at] += np.concatenate([_uniform(p, queries.weights) for p in samples])
            self.common[np.ix_(at, at)] += _common(rows)
        self.comparable &= have_equal_keys

    def similarity(self) -> HeadSimilarity:
        """The similarity of all heads on all batches.

        Raises:
            InvalidData: A block has no real token, or probabilities are not finite.
        """
        names = tuple(block.name for block in self.blocks)
        if len(self.blocks) and not self.texts.all():
            unseen = names[int(np.argmin(self.texts))]
            raise no_token(unseen)
        if not np.isfinite(self.common).all():
            broken = self.layer_of[~np.isfinite(np.diag(self.common))]
            raise not_finite(names[broken[0]], "probabilities")
        mean_products = self.common / self.texts[self.layer_of][:, None]
        mass = np.diag(mean_products)  # 1, except for queries without any key
        matrix = np.clip(1 - (mass[:, None] + mass) / 2 + mean_products, 0.0, 1.0)
        matrix[~self.comparable[np.ix_(self.layer_of, self.layer_of)]] = np.nan
        heads = tuple(block.num_heads for block in self.blocks)
        uniform = np.clip((1 - mass) / 2 + self.uniform / self.texts[self.layer_of], 0.0, 1.0)
        return HeadSimilarity(names, heads, matrix, int(self.queries.max(initial=0)), uniform)


class _Queries(NamedTuple):
    """Some queries of a batch; the weights of a sequence add up to 1."""

    sequences: Int[np.ndarray, " Q"]
    positions: Int[np.ndarray, " Q"]
    weights: Float[np.ndarray, " Q"]


def _chosen(mask: Bool[np.ndarray, "B S"], most: int) -> _Queries:
    """At most ``most`` unmasked queries of each sequence, spread evenly."""
    sequences: list[int] = []
    positions: list[int] = []
    weights: list[float] = []
    for sequence, real in enumerate(mask):
        at = evenly(np.flatnonzero(real).tolist(), most)
        sequences += [sequence] * len(at)
        positions += at
        weights += [1 / max(1, len(at))] * len(at)
    return _Queries(
        np.array(sequences, int), np.array(positions, int), np.array(weights, np.float32)
    )


def _rows(
    p: Float[np.ndarray, "Q H T"], weights: Float[np.ndarray, " Q"]
) -> Float[np.ndarray, "H Q*T"]:
    """The weighted probabilities of each head, all queries in one row."""
    weighted = p.astype(np.float32, copy=False) * weights[:, None, None]
    return weighted.swapaxes(0, 1).reshape(p.shape[1], -1)


def _uniform(
    p: Float[np.ndarray, "Q H T"], weights: Float[np.ndarray, " Q"]
) -> Float[np.ndarray, " H"]:
    """sum_qt weight_q min(p, u), where u is uniform over the keys that some head attends to."""
    seen = (p > 0).any(axis=1)  # Q T
    uniform = seen / np.maximum(seen.sum(axis=1, keepdims=True), 1)
    return np.asarray(weights @ np.minimum(p, uniform[:, None]).sum(axis=2), np.float64)


def _common(rows: Float[np.ndarray, "N Z"]) -> Float[np.ndarray, "N N"]:
    """[i, j] = sum_z min(rows[i, z], rows[j, z])."""
    count, length = rows.shape
    # 2^16 elements at a time; with their minima they fit a core's cache.
    width = max(1, min(length, 2**16 // max(1, count)))
    total = np.zeros((count, count))
    minima = np.empty((count, width), rows.dtype)
    for start in range(0, length, width):
        columns = np.ascontiguousarray(rows[:, start : start + width])
        for i in range(count):
            out = minima[: count - i, : columns.shape[1]]
            np.minimum(columns[i], columns[i:], out=out)
            total[i, i:] += out.sum(1)
    return np.triu(total) + np.triu(total, 1).T
