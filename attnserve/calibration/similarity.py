"""How alike the heads of a model attend: eq. 2 and 3 of the Reuse Transformer (arXiv 2110.06821).

    S(A, A') = 1 - mean over queries of TV(A[p], A'[p]),    TV(a, b) = |a - b|_1 / 2
    c[(l, h), (l', h')] = mean over texts of S(A_lh, A_l'h')

as the paper averages: over the queries of each text first, then over texts, so that a long text
counts as much as a short one. Since |a - b| = a + b - 2 min(a, b), it is minima that are summed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from attnserve.calibration.moments import Progress
from attnserve.context import Provider
from attnserve.models.datasets import token_mask
from attnserve.runtime.session import Batch, open_session, run
from graph_passes.blocks import AttentionBlock
from graph_passes.emit.editing import exposing
from graph_passes.errors import InvalidArgument, InvalidData

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int

__all__ = ["HeadSimilarity", "measure_similarity"]

MOST_QUERIES = 8192
"""Enough for three digits of a mean over queries; the cost grows with them."""

CACHED = 2**16
"""Elements of heads that are compared at a time: with their minima they stay in a core's cache."""


@dataclass(frozen=True, eq=False)
class HeadSimilarity:
    """The similarity of every head with every other, 0 (nothing in common) to 1 (the same).

    Attributes:
        layers: Names of the blocks, in the order they were given (that of execution).
        heads: How many heads each has.
        matrix: Symmetric; NaN between layers that attend over different tokens (self and cross
            attention, or other lengths).
        queries: How many queries were compared, of the layer that has most.
    """

    layers: tuple[str, ...]
    heads: tuple[int, ...]
    matrix: Float[np.ndarray, "N N"]
    queries: int

    def between(self, layer: str, other: str) -> Float[np.ndarray, "H G"]:
        """Each head of ``layer`` with each of ``other``.

        Raises:
            InvalidArgument: No layer of that name was measured.
        """
        return self.matrix[self._heads_of(layer), self._heads_of(other)]

    def best(self) -> Float[np.ndarray, "L L"]:
        """[l, l'] = mean over the heads h of l of c_(l,h),l', that of its best match in l' (eq. 3).

        Not symmetric: several heads may have the same match. 1 on the diagonal.
        """
        rows = [
            [self.between(layer, other).max(1).mean() for other in self.layers]
            for layer in self.layers
        ]
        return np.array(rows).reshape(len(self.layers), len(self.layers))

    def sequential(self) -> dict[str, Float[np.ndarray, " H"]]:
        """Figure 3 of the paper: how far each layer's heads repeat the layer before it.

        For each layer, the similarity of each head with its closest match in the previous layer,
        ranked from the lowest (rank 1) to the highest. The previous layer is the last before it
        that can be compared; a layer without one is left out.
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
        if layer not in self.layers:
            raise InvalidArgument(
                f"no attention called {layer!r} was measured; expected one of: "
                f"{', '.join(self.layers) or 'none'}",
                "see `attnserve inspect`",
            )
        index = self.layers.index(layer)
        ends = [0, *accumulate(self.heads)]
        return slice(ends[index], ends[index + 1])


def measure_similarity(
    model: ir.Model,
    blocks: Sequence[AttentionBlock],
    batches: Sequence[Batch],
    *,
    provider: Provider = "cpu",
    threads: int = 0,
    progress: Progress | None = None,
    most_queries: int = MOST_QUERIES,
) -> HeadSimilarity:
    """Compare all heads of these blocks on the real tokens of these batches.

    Activations never accumulate: one batch at a time is run and reduced, padding excluded.

    Args:
        blocks: In the order of execution. Their probabilities must be values of the graph
            (decompose fused operators first).
        most_queries: About how many queries to compare: each text gives an even share of them,
            spread evenly over its tokens, and at least one.

    Raises:
        InvalidArgument: ``most_queries`` is not positive.
        InvalidData: The model refuses a batch, a block sees no real token, or its probabilities
            are not finite.
    """
    if most_queries < 1:
        raise InvalidArgument(f"most_queries is {most_queries}: expected 1 or more", "raise it")
    sums = _Sums(blocks)
    values = list(dict.fromkeys(_probabilities(block) for block in blocks))
    share = max(1, most_queries // max(1, sum(map(_texts, batches))))
    with exposing(model, values):
        session = open_session(model, provider=provider, threads=threads) if values else None
    for done, batch in enumerate(batches if session else (), start=1):
        seen = dict(zip(values, run(session, batch), strict=True))
        sums.add([seen[_probabilities(block)] for block in blocks], batch, share)
        if progress is not None:
            progress(done, len(batches))
    return sums.similarity()


def _probabilities(block: AttentionBlock) -> ir.Value:
    assert block.probabilities is not None, f"{block.name}: its probabilities are not in the graph"
    return block.probabilities


def _texts(batch: Mapping[str, np.ndarray]) -> int:
    return max((len(array) for array in batch.values() if array.ndim), default=1)


class _Sums:
    """Running sums over batches, of all heads one after the other."""

    def __init__(self, blocks: Sequence[AttentionBlock]) -> None:
        self.blocks = blocks
        heads, layers = sum(block.num_heads for block in blocks), len(blocks)
        self.layer_of = np.repeat(np.arange(layers), [block.num_heads for block in blocks])
        self.common = np.zeros((heads, heads))  # sum over texts of mean over queries of |min|_1
        self.texts = np.zeros(layers, dtype=np.int64)
        self.queries = np.zeros(layers, dtype=np.int64)
        self.alike = np.ones((layers, layers), dtype=bool)

    def add(self, probabilities: Sequence[np.ndarray], batch: Batch, share: int) -> None:
        """One batch: the probabilities of each block, heads apart or in the batch."""
        groups: dict[tuple[str, tuple[int, ...]], list[int]] = {}
        apart = [
            p.reshape(-1, block.num_heads, *p.shape[-2:])  # B H S T
            for block, p in zip(self.blocks, probabilities, strict=True)
        ]
        for index, (block, p) in enumerate(zip(self.blocks, apart, strict=True)):
            groups.setdefault((block.kind, (len(p), *p.shape[2:])), []).append(index)
        together = np.zeros_like(self.alike)
        for (_, (B, S, _)), members in groups.items():
            # An image in windows is several sequences to its attention.
            most = max(1, share * _texts(batch) // max(1, B))
            sequences, positions, weights = _chosen(token_mask(batch, (B, S)), most)
            together[np.ix_(members, members)] = True
            self.texts[members] += len(np.unique(sequences))
            self.queries[members] += len(sequences)
            rows = np.concatenate(
                [_rows(apart[i][sequences, :, positions], weights) for i in members]
            )
            at = np.flatnonzero(np.isin(self.layer_of, members))
            self.common[np.ix_(at, at)] += _common(rows)
        self.alike &= together

    def similarity(self) -> HeadSimilarity:
        names = tuple(block.name for block in self.blocks)
        if len(self.blocks) and not self.texts.all():
            unseen = names[int(np.argmin(self.texts))]
            raise InvalidData(
                f"{unseen}: the calibration data has no real token", "check the mask input"
            )
        if not np.isfinite(self.common).all():
            broken = self.layer_of[~np.isfinite(np.diag(self.common))]
            raise InvalidData(
                f"{names[broken[0]]}: the probabilities on the calibration data are not finite",
                "check the model and the data",
            )
        common = self.common / self.texts[self.layer_of][:, None]
        mass = np.diag(common)  # 1, but for queries that see no key
        matrix = np.clip(1 - (mass[:, None] + mass) / 2 + common, 0.0, 1.0)
        matrix[~self.alike[np.ix_(self.layer_of, self.layer_of)]] = np.nan
        heads = tuple(block.num_heads for block in self.blocks)
        return HeadSimilarity(names, heads, matrix, int(self.queries.max(initial=0)))


def _chosen(
    mask: Bool[np.ndarray, "B S"], most: int
) -> tuple[Int[np.ndarray, " Q"], Int[np.ndarray, " Q"], Float[np.ndarray, " Q"]]:
    """At most ``most`` real queries of each sequence: sequence, position, and weight.

    The weights of a sequence add up to 1.
    """
    sequences: list[int] = []
    positions: list[int] = []
    weights: list[float] = []
    for sequence, real in enumerate(mask):
        at = np.flatnonzero(real)
        if len(at) > most:
            at = at[((np.arange(most) + 0.5) * len(at) / most).astype(int)]
        sequences += [sequence] * len(at)
        positions += at.tolist()
        weights += [1 / max(1, len(at))] * len(at)
    return np.array(sequences, int), np.array(positions, int), np.array(weights, np.float32)


def _rows(
    p: Float[np.ndarray, "Q H T"], weights: Float[np.ndarray, " Q"]
) -> Float[np.ndarray, "H Q*T"]:
    weighted = p.astype(np.float32, copy=False) * weights[:, None, None]
    return weighted.swapaxes(0, 1).reshape(p.shape[1], -1)


def _common(rows: Float[np.ndarray, "N Z"]) -> Float[np.ndarray, "N N"]:
    """[i, j] = sum_z min(rows[i, z], rows[j, z])."""
    count, length = rows.shape
    width = max(1, min(length, CACHED // max(1, count)))
    total = np.zeros((count, count))
    minima = np.empty((count, width), rows.dtype)
    for start in range(0, length, width):
        part = np.ascontiguousarray(rows[:, start : start + width])
        for i in range(count):
            out = minima[: count - i, : part.shape[1]]
            np.minimum(part[i], part[i:], out=out)
            total[i, i:] += out.sum(1)
    return np.triu(total) + np.triu(total, 1).T
