"""What a model's attention does on a user's text: what repeats, what is spare, what can go.

Of every layer: whose attention an earlier layer has already (similarity), how many dimensions its
projections and scores use (spectra), and what each head is worth (importance).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir

from attnserve.calibration.importance import head_energy, leave_one_out, sensitivity
from attnserve.calibration.moments import collect_moments
from attnserve.calibration.similarity import HeadSimilarity, measure_similarity
from attnserve.calibration.spectra import (
    RANK_TOLERANCE,
    CapturedVariance,
    ScoreRanks,
    Spectrum,
    captured_variance,
    measure_ranks,
    text_lengths,
)
from attnserve.calibration.voting import Votes, voting_to_stay
from attnserve.checks.certify import read_attention
from attnserve.context import Provider
from attnserve.models.artifact import versions
from attnserve.models.datasets import Dataset
from graph_passes.blocks import AttentionBlock
from graph_passes.errors import InvalidArgument, InvalidModel
from graph_passes.passes import collaborate
from graph_passes.passes import decompose_attention as decompose

if TYPE_CHECKING:
    from jaxtyping import Float, Int

__all__ = ["SHARES", "Analysis", "LayerAnalysis", "LayerSummary", "NotAnalysed", "analyze_graph"]

Stage = Callable[[str, int, int], None]
"""Progress: (what is being done, done, total)."""

SHARES = (0.9, 0.99)
"""Of captured variance, for which ranks are given."""

MOST_POINTS = 64
"""Of a curve in analysis.json."""

DIGITS = 6
"""Significant digits of a number in analysis.json."""


@dataclass(frozen=True, eq=False)
class LayerAnalysis:
    """One attention block.

    Attributes:
        name, index: As ``attnserve inspect`` lists it (from 0).
        kind: "self" or "cross".
        input_size: D, the width of its queries' tokens; None where no weight makes the queries.
        weights: Captured variance by the weights alone; None where ``notes`` say why.
        calibrated: The same, weighted by the calibration data.
        ranks: Of scores and attention; None where all heads take another layer's attention.
        energy: Mean square of what each head writes about its mean.
        leave_one_out: Relative squared change of the model's outputs without the head.
        sensitivity: Mean change of the outputs with the head's gate (Michel et al. 2019).
        votes: Voting-to-Stay: groups, votes and mask.
        notes: Why something was not measured, one sentence each.
    """

    name: str
    index: int
    kind: str
    num_heads: int
    head_size: int
    input_size: int | None
    weights: CapturedVariance | None
    calibrated: CapturedVariance | None
    ranks: ScoreRanks | None
    energy: Float[np.ndarray, " H"]
    leave_one_out: Float[np.ndarray, " H"]
    sensitivity: Float[np.ndarray, " H"]
    votes: Votes
    notes: tuple[str, ...] = ()

    @property
    def energy_share(self) -> Float[np.ndarray, " H"]:
        """Of the layer's heads together; even shares where none writes anything."""
        total = self.energy.sum()
        return self.energy / total if total > 0 else np.full(self.num_heads, 1 / self.num_heads)


@dataclass(frozen=True)
class NotAnalysed:
    """Attention that was found (or nearly), and why it was not measured."""

    name: str
    reason: str


@dataclass(frozen=True)
class LayerSummary:
    """One layer in a line.

    Attributes:
        nearest: Index of the earlier layer that attends most alike; None for the first.
        similarity: Mean over this layer's heads of their best matches there (eq. 3).
        rank, full_rank: Directions that hold 99 % of W_Q, and of W_K, of how many at most; on the
            data where that could be measured. Shared dimensions must serve every head, so the
            product, in whose sum heads cancel, promises too much.
        weakest_head, weakest_share: The head that writes least, and its share of the energy.
        kept: How many heads were voted to stay.
    """

    index: int
    name: str
    num_heads: int
    head_size: int
    nearest: int | None
    similarity: float | None
    rank: int | None
    full_rank: int | None
    weakest_head: int
    weakest_share: float
    kept: int


@dataclass(frozen=True, eq=False)
class Analysis:
    """Everything that was measured of a model.

    Attributes:
        model: {"file", "sha256"} of the .onnx file.
        calibration: The data: file, rows, tokens and checksum.
        layers: In order of execution.
        similarity: Of all heads of these layers.
        lengths: Tokens of each text, as the first layer's keys.
        not_analysed: The rest, with reasons.
        seed: Of the votes' grouping and the certificate.
        output: The folder that it was written to, if any; not part of the content.
    """

    model: Mapping[str, Any]
    calibration: Mapping[str, Any]
    layers: tuple[LayerAnalysis, ...]
    similarity: HeadSimilarity
    lengths: Int[np.ndarray, " N"]
    not_analysed: tuple[NotAnalysed, ...]
    seed: int
    output: Path | None = None

    @property
    def mask(self) -> dict[str, list[int]]:
        """mask.json: 1 for the heads of each layer that were voted to stay."""
        return {layer.name: layer.votes.mask.tolist() for layer in self.layers}

    def earlier(self, row: int) -> tuple[int, float] | None:
        """(row of the layer before ``layers[row]`` that attends most alike, its similarity)."""
        best = self.similarity.best()[row, :row]
        if not len(best) or np.isnan(best).all():
            return None
        source = int(np.nanargmax(best))
        return source, float(best[source])

    def summary(self) -> list[LayerSummary]:
        return [self._summary(row) for row in range(len(self.layers))]

    def _summary(self, row: int) -> LayerSummary:
        layer, match = self.layers[row], self.earlier(row)
        variance = layer.calibrated or layer.weights
        sides = () if variance is None else (variance.query, variance.key)
        weakest = int(layer.energy.argmin())
        return LayerSummary(
            index=layer.index,
            name=layer.name,
            num_heads=layer.num_heads,
            head_size=layer.head_size,
            nearest=None if match is None else self.layers[match[0]].index,
            similarity=None if match is None else match[1],
            rank=max((side.rank(SHARES[1]) for side in sides), default=None),
            full_rank=max((len(side.layer) for side in sides), default=None),
            weakest_head=weakest,
            weakest_share=float(layer.energy_share[weakest]),
            kept=int(layer.votes.mask.sum()),
        )

    def to_json(self) -> dict[str, Any]:
        sequential = self.similarity.sequential()
        return {
            "format": 1,
            "model": dict(self.model),
            "calibration": dict(self.calibration),
            "seed": self.seed,
            "versions": versions(),
            "layers": [_layer_json(layer) for layer in self.layers],
            "summary": [_rounded(asdict(line)) for line in self.summary()],
            "similarity": {
                "layers": list(self.similarity.layers),
                "heads": list(self.similarity.heads),
                "queries": self.similarity.queries,
                "best": _numbers(self.similarity.best()),
                "sequential": {name: _numbers(ranks) for name, ranks in sequential.items()},
                "matrix": _numbers(self.similarity.matrix, 4),
            },
            "lengths": {
                "median": float(np.median(self.lengths)),
                "longest": int(self.lengths.max()),
                "tokens": self.lengths.tolist(),
            },
            "mask": self.mask,
            "not_analysed": [asdict(each) for each in self.not_analysed],
        }


def analyze_graph(
    model: ir.Model,
    data: Dataset,
    *,
    source: Mapping[str, Any],
    groups: int | None = None,
    provider: Provider = "cpu",
    threads: int = 0,
    seed: int = 0,
    progress: Stage | None = None,
) -> Analysis:
    """``analyze`` for a model in memory, whose fused operators are decomposed in place.

    Args:
        data: All of ``data.fit`` is measured.
        source: For the record: what the model is.
        groups: How many heads of each layer Voting-to-Stay keeps; half of them by default.

    Raises:
        InvalidModel: No attention can be measured.
        InvalidArgument: ``groups`` is more than a layer has heads, or less than one.
        InvalidData: The model refuses a batch, or its activations are not finite.
    """
    blocks, indices, left_out = _measurable(model, seed)
    _check_groups(groups, blocks)

    def measured(measure: Callable[..., Any], what: str, *arguments: Any, **options: Any) -> Any:
        report = None if progress is None else partial(progress, what)
        return measure(
            model, *arguments, data.fit, **options,
            provider=provider, threads=threads, progress=report,
        )  # fmt: skip

    first = blocks[0]
    lengths = text_lengths(model, first, data.fit, provider=provider, threads=threads)
    whitened = [block for block in blocks if not collaborate.why_not(block)]
    moments = measured(collect_moments, "moments", whitened) if whitened else {}
    similarity = measured(measure_similarity, "similarity", blocks)
    scored = [block for block in blocks if block.logits is not None and block.q.num_heads]
    ranks = measured(measure_ranks, "ranks", scored)
    energy = measured(head_energy, "energy", blocks)
    wanted = {block.name: groups or -(-block.num_heads // 2) for block in blocks}
    votes = measured(voting_to_stay, "voting", blocks, groups=wanted, seed=seed)
    without = measured(leave_one_out, "leave one out", blocks)
    gates = measured(sensitivity, "sensitivity", blocks)

    layers: list[LayerAnalysis] = []
    for block in blocks:
        name = block.name
        by_weights, calibrated, notes = _variance(block, moments.get(name))
        layers.append(
            LayerAnalysis(
                name=name,
                index=indices[name],
                kind=block.kind,
                num_heads=block.num_heads,
                head_size=block.head_size,
                input_size=None if block.q.weight is None else block.input_size,
                weights=by_weights,
                calibrated=calibrated,
                ranks=ranks.get(name),
                energy=energy[name],
                leave_one_out=without[name],
                sensitivity=gates[name],
                votes=votes[name],
                notes=notes,
            )
        )
    return Analysis(source, data.source, tuple(layers), similarity, lengths, left_out, seed)


def _measurable(
    model: ir.Model, seed: int
) -> tuple[list[AttentionBlock], dict[str, int], tuple[NotAnalysed, ...]]:
    """The blocks whose attention can be observed, the index of every block, and the rest."""
    reading = read_attention(model, seed=seed)
    indices = {block.name: index for index, block in enumerate(reading.blocks)}
    fused = {b.name: decompose.why_not(b) for b in reading.blocks if b.logits is None}
    names = frozenset(
        b.name for b in reading.blocks if fused.get(b.name) == "" and b.graph is model.graph
    )
    if names:
        decompose.DecomposeAttention(names)(model)
        reading = read_attention(model, seed=seed)
    left_out = [
        NotAnalysed(miss.node.name or miss.node.op_type, miss.reason) for miss in reading.misses
    ]
    blocks: list[AttentionBlock] = []
    for block in reading.blocks:
        reason = _unobservable(block, model, fused.get(block.name, ""))
        if reason:
            left_out.append(NotAnalysed(block.name, reason))
        else:
            blocks.append(block)
    if not blocks:
        reasons = "; ".join(f"{each.name}: {each.reason}" for each in left_out[:2])
        raise InvalidModel(
            "no attention can be analysed"
            + (f" ({reasons[:400]})" if reasons else ": the graph has no softmax"),
            "`attnserve inspect MODEL` says what was read; export with --attention eager where a "
            "fused operator hides the probabilities",
        )
    return blocks, indices, tuple(left_out)


def _unobservable(block: AttentionBlock, model: ir.Model, fused: str) -> str:
    """Why a block's attention cannot be taken out of a run; empty where it can."""
    if block.graph is not model.graph:
        return "it lies in the body of another node, whose values are no outputs of a run"
    if block.probabilities is None:
        return fused or "its probabilities are nowhere laid out as (batch, heads, queries, keys)"
    if block.v.output is None:
        return "its values are not in the graph"
    return ""


def _check_groups(groups: int | None, blocks: Sequence[AttentionBlock]) -> None:
    fewest = min(block.num_heads for block in blocks)
    if groups is not None and not 1 <= groups <= fewest:
        raise InvalidArgument(
            f"--groups {groups}: expected 1 to {fewest}, the fewest heads of a layer",
            "leave it out for half of each layer's heads",
        )


def _variance(
    block: AttentionBlock, moments: Any
) -> tuple[CapturedVariance | None, CapturedVariance | None, tuple[str, ...]]:
    """By the weights alone, weighted by the data, and why one of them is missing."""
    if reason := _no_spectrum(block):
        return None, None, (f"no captured variance: {reason}",)
    turned = block.position == "rope"
    heads = block.q.heads(), block.k.heads()
    by_weights = captured_variance(*heads, product=not turned)
    if moments is not None:
        return by_weights, captured_variance(*heads, moments), ()
    note = f"captured variance by the weights alone: {collaborate.why_not(block)}"
    return by_weights, None, (note,)


def _no_spectrum(block: AttentionBlock) -> str:
    """Why W_Q and W_K say nothing of a block's heads; empty where they do."""
    if not block.q.num_heads:
        return "all its heads take the probabilities of another layer"
    if block.is_collaborative or block.is_sparse:
        return "its heads are collaborative already"
    if block.q.weight is None or block.k.weight is None:
        return "its keys are handed in by the caller: no projection in this graph makes them"
    if block.q.norm is not None or block.k.norm is not None:
        return "q/k norm stands between the projections and the scores"
    return ""


def _layer_json(layer: LayerAnalysis) -> dict[str, Any]:
    ranks = layer.ranks
    return {
        "name": layer.name,
        "index": layer.index,
        "kind": layer.kind,
        "num_heads": layer.num_heads,
        "head_size": layer.head_size,
        "input_size": layer.input_size,
        "captured_variance": {
            "weights": _variance_json(layer.weights),
            "calibrated": _variance_json(layer.calibrated),
        },
        "ranks": None
        if ranks is None
        else {
            "tolerance": RANK_TOLERANCE,
            "sizes": ranks.sizes.tolist(),
            "scores": ranks.scores.tolist(),
            "probabilities": ranks.probabilities.tolist(),
            "used": _numbers(ranks.used),
            "spanned": _numbers(ranks.spanned),
        },
        "importance": {
            "energy": _numbers(layer.energy),
            "energy_share": _numbers(layer.energy_share),
            "leave_one_out": _numbers(layer.leave_one_out),
            "sensitivity": _numbers(layer.sensitivity),
        },
        "votes": {
            "groups": layer.votes.groups.tolist(),
            "votes": layer.votes.votes.tolist(),
            "mask": layer.votes.mask.tolist(),
        },
        "notes": list(layer.notes),
    }


def _variance_json(variance: CapturedVariance | None) -> dict[str, Any] | None:
    if variance is None:
        return None
    parts = (("query", variance.query), ("key", variance.key), ("product", variance.product))
    return {name: None if part is None else _spectrum_json(part) for name, part in parts}


def _spectrum_json(spectrum: Spectrum) -> dict[str, Any]:
    full = len(spectrum.layer)
    shown = np.unique(np.linspace(1, full, min(full, MOST_POINTS)).round().astype(int))
    ranks = {f"rank_{share * 100:.0f}": spectrum.rank(share) for share in SHARES}
    heads = {f"head_rank_{s * 100:.0f}": spectrum.head_ranks(s).tolist() for s in SHARES}
    captured = _numbers(spectrum.layer[shown - 1])
    return {**ranks, **heads, "full_rank": full, "directions": shown.tolist(), "captured": captured}


def _numbers(array: np.ndarray, digits: int = DIGITS) -> Any:
    """Nested lists of numbers as JSON has them: NaN and infinities are null."""
    return _rounded(array.tolist(), digits)


def _rounded(value: Any, digits: int = DIGITS) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(each, digits) for key, each in value.items()}
    if isinstance(value, list):
        return [_rounded(each, digits) for each in value]
    if isinstance(value, float):
        return float(f"{value:.{digits}g}") if np.isfinite(value) else None
    return value
