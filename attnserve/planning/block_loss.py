"""What the output of the whole model loses when something is done to one block.

The loss of a few sizes is measured, with the block's last map fitted in closed form to what is left
(``whatif``); between them it follows the share of the block's own output that others cannot take
over (``elimination``). Other changes are made and measured, each in a model of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import onnx_ir as ir

from attnserve.calibration.elimination import RIDGE, Elimination, eliminate, eliminate_neurons
from attnserve.calibration.moments import collect_moments
from attnserve.calibration.refit import Moments, context_moments, refit
from attnserve.calibration.similarity import measure_similarity
from attnserve.context import Provider, RunContext
from attnserve.planning.candidates import (
    MAX_CONFIGS,
    MULTIPLE,
    BlockConfig,
    LossCurve,
    ReusePair,
    TiedBlocks,
    apply_config,
    reuse,
)
from attnserve.planning.head_selection import Reuse, edges_of
from attnserve.planning.loss_estimation import LossEstimator
from attnserve.runtime.session import Batch
from graph_passes.blocks import FeedForwardBlock
from graph_passes.context import GraphContext
from graph_passes.errors import AttnserveError
from graph_passes.factorize.moments import TokenMoments
from graph_passes.matching.find import find_attention
from graph_passes.passes.decompose_attention import decompose_fused

if TYPE_CHECKING:
    from jaxtyping import Float

__all__ = ["Losses", "loss_curves"]

Stage = Callable[[str, int, int], None]

PROBES = (0.25, 0.5, 0.75)
"""Shares of a block that are taken out to see what the output loses."""

PROBE_ROWS = 48
"""Texts that are asked."""

MOMENT_ROWS = 300
"""About how many texts tell which dimensions of queries and keys matter."""

FIT_EVERY = 2
"""Of these, one batch in so many shows what is lost where a whole attention is replaced."""


class Losses(NamedTuple):
    """By the key of each group of which something can be taken out, and of pairs."""

    curves: dict[str, LossCurve]
    pairs: tuple[ReusePair, ...]


def loss_curves(
    model: ir.Model,
    groups: Sequence[TiedBlocks],
    batches: Sequence[Batch],
    *,
    changes: Mapping[str, Sequence[BlockConfig]] | None = None,
    pairs: Sequence[ReusePair] = (),
    provider: Provider = "cpu",
    threads: int = 0,
    report: Stage,
) -> Losses:
    """What is lost by taking parts out of groups, and by what else may be done to them.

    Args:
        changes: By the key of a group, to all of its heads, or with none left.
        pairs: To weigh; those that are not faster are left out.

    Raises:
        InvalidData: The model refuses a batch, or its activations are not finite.
    """
    able = [group for group in groups if not group.refusal]
    if not able:
        return Losses({}, ())
    blocks = [block for group in able for block in group.blocks]
    probes, rest = _apart(batches)
    moments = context_moments(
        model, blocks, rest, context=RunContext(provider, threads, progress=report)
    )
    estimator = LossEstimator(
        model, [b.name for b in blocks], probes, provider=provider, threads=threads
    )
    curves: dict[str, LossCurve] = {}
    for done, group in enumerate(able, start=1):
        total = _total([moments[name] for name in group.names])
        found, rows, weight = _elimination(group, total)
        count, gone, losses = group.count, list[int](), list[float]()
        for share in PROBES:
            n = max(round(share * count), 1)
            if n >= count or n in gone:
                continue
            kept = np.setdiff1d(np.arange(count), found.order[:n])
            fitted = _fitted(total, weight, rows[kept].reshape(-1))
            gone.append(n)
            losses.append(estimator.cosine_loss(dict.fromkeys(group.names, fitted)))
        rising = np.maximum.accumulate(np.maximum(losses, 1e-9)) if losses else np.zeros(0)
        own = np.maximum.accumulate(found.losses)
        if losses:
            curves[group.key] = LossCurve(
                tuple(found.order.tolist()), tuple(own.tolist()), tuple(gone),
                tuple(rising.tolist()),
            )  # fmt: skip
        report("weigh blocks", done, len(able))
    some = rest[:: max(len(rest) * PROBE_ROWS // MOMENT_ROWS // len(probes), 1)]
    weigh = _Weigh(model, estimator, some, provider, threads, report)
    wanted = {g: changes[g.key] for g in able if changes and g.key in changes and g.key in curves}
    for key, found in weigh.changes(wanted).items():
        curves[key] = replace(curves[key], changed=tuple(found))
    faster = [p for p in pairs if p.saved_ms > 0 and {p.source.key, p.reader.key} <= curves.keys()]
    return Losses(curves, tuple(weigh.pairs(faster)))


@dataclass(frozen=True, eq=False)
class _Weigh:
    """Models with one change, asked what their output has lost."""

    model: ir.Model
    estimator: LossEstimator
    batches: Sequence[Batch]
    provider: Provider
    threads: int
    report: Stage

    def changes(
        self, wanted: Mapping[TiedBlocks, Sequence[BlockConfig]]
    ) -> dict[str, list[tuple[BlockConfig, float]]]:
        """The loss of each change of a group that is one block; what cannot be made is left out."""
        single = {group: sizes for group, sizes in wanted.items() if len(group.blocks) == 1}
        names = [g.names[0] for g, sizes in single.items() if any(s.head_size for s in sizes)]
        plain, moments = self.model.clone(), dict[str, TokenMoments]()
        if names:
            _decompose(plain, names)
            blocks = [block for block in find_attention(plain)[0] if block.name in names]
            moments = collect_moments(
                plain, blocks, self.batches, context=RunContext(self.provider, self.threads)
            )
        found: dict[str, list[tuple[BlockConfig, float]]] = {}
        for done, (group, sizes) in enumerate(single.items(), start=1):
            block, name = group.blocks[0], group.names[0]
            for size in sizes:
                new = plain.clone() if size.head_size else self.model.clone()
                with suppress(AttnserveError):  # then it is no candidate
                    apply_config(new, block, size, moments.get(name))
                    loss = self._loss(new, [] if size.kept else [name])
                    found.setdefault(group.key, []).append((size, loss))
            self.report("weigh changes", done, len(single))
        return found

    def pairs(self, pairs: Sequence[ReusePair]) -> Iterator[ReusePair]:
        """Each with the heads that attend most alike, and what is lost when all are handed on."""
        if not pairs:
            return
        plain = self.model.clone()
        _decompose(
            plain, {name for pair in pairs for name in (*pair.source.names, *pair.reader.names)}
        )
        blocks = {block.name: block for block in find_attention(plain)[0]}
        for done, pair in enumerate(pairs, start=1):
            source, reader = pair.source.names[0], pair.reader.names[0]
            both = [blocks[source], blocks[reader]]
            with suppress(AttnserveError):  # then it is no candidate
                alike = measure_similarity(
                    plain,
                    both,
                    self.batches[::FIT_EVERY],
                    context=RunContext(self.provider, self.threads),
                )
                edges = edges_of(Reuse("full"), both, [reader], masks={}, similarity=alike)
                taken = edges.get(reader, {})
                if len(taken) < pair.reader.count:  # they do not attend over the same tokens
                    continue
                heads = tuple(taken[head][1] for head in range(pair.reader.count))
                new = self.model.clone()
                reuse(new, edges, {})
                yield replace(pair, heads=heads, loss=self._loss(new, [reader]))
            self.report("weigh pairs", done, len(pairs))

    def _loss(self, new: ir.Model, fitted: Sequence[str]) -> float:
        """With the outputs of these layers fitted to the model's own."""
        if fitted:
            refit(new, self.model, fitted, self.batches[::FIT_EVERY],
                  context=RunContext(self.provider, self.threads))  # fmt: skip
        return max(self.estimator.loss_of(new), 1e-9)


def _decompose(model: ir.Model, names: Collection[str]) -> None:
    with GraphContext.of(model) as context:
        decompose_fused(context, names)


def _apart(batches: Sequence[Batch]) -> tuple[list[Batch], list[Batch]]:
    """About ``PROBE_ROWS`` rows of short and of long texts to estimator about, and the others to fit to:
    a block with many neurons fits its own texts better than any others."""
    if len(batches) < 2:
        return list(batches), list(batches)
    rows = [max((len(a) for a in batch.values() if a.ndim), default=1) for batch in batches]
    count = min(max(round(PROBE_ROWS / max(np.mean(rows), 1)), 1), len(batches) // 2)
    places = np.linspace(0, len(batches) - 1, 2 * count + 1)[1::2].round().astype(int).tolist()
    probes = [batches[index] for index in dict.fromkeys(places)]
    return probes, [batch for index, batch in enumerate(batches) if index not in places]


def _total(parts: Sequence[Moments]) -> Moments:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def _elimination(group: TiedBlocks, moments: Moments) -> tuple[Elimination, np.ndarray, np.ndarray]:
    """The order, which rows of the last weight each head or neuron owns, and that weight."""
    block = group.blocks[0]
    if isinstance(block, FeedForwardBlock):
        weight = block.second_matrix().astype(np.float64)
        rows = np.arange(block.num_neurons)[:, None]
        step = max(block.num_neurons // (2 * MAX_CONFIGS) // MULTIPLE, 1) * MULTIPLE
        return eliminate_neurons(moments.covariance, weight, step), rows, weight
    assert block.output is not None
    weight, rows = block.output.matrix().astype(np.float64), block.output.rows
    flat = rows.reshape(-1)
    found = eliminate(moments.covariance[np.ix_(flat, flat)], weight[flat], block.num_heads)
    return found, rows, weight


def _fitted(
    moments: Moments, weight: Float[np.ndarray, "N D"], kept: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The map that comes nearest to what the whole weight makes, of these rows alone."""
    gram = moments.covariance
    unit = RIDGE * (float(np.trace(gram)) / len(gram) or 1.0)
    fitted = np.zeros_like(weight)
    inner = gram[np.ix_(kept, kept)] + unit * np.eye(len(kept))
    fitted[kept] = np.linalg.solve(inner, gram[kept] @ weight + unit * weight[kept])
    return fitted, (moments.t - moments.c @ fitted) / max(moments.count, 1)
