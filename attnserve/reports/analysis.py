"""Analyze attention on texts: layer similarity, used dimensions and head importance.

For every layer: the similarity to earlier layers, the number of dimensions that projections and
scores use (spectra), and the importance of each head.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
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
from attnserve.context import DEFAULT_CONTEXT, RunContext
from attnserve.data.datasets import Dataset
from attnserve.models.lineage import Calibration
from attnserve.versions import versions
from graph_passes.blocks import AttentionBlock
from graph_passes.errors import InvalidArgument, InvalidModel, Refusal
from graph_passes.passes.conditions import quantized_refusal
from graph_passes.passes.decompose_attention import decompose_fused, decomposition_refusal
from graph_passes.passes.shared_dimensions import sharing_refusal

if TYPE_CHECKING:
    from jaxtyping import Float, Int

__all__ = ["SHARES", "Analysis", "LayerAnalysis", "LayerSummary", "NotAnalyzed", "analyze_graph"]

SHARES = (0.9, 0.99)
"""The shares of captured variance for which ranks are reported."""

MOST_POINTS = 64
"""Maximum number of points of a curve in analysis.json."""

DIGITS = 6
"""Significant digits of numbers in analysis.json."""


@dataclass(frozen=True, eq=False)
class LayerAnalysis:
    """Measurements of one attention block.

    Attributes:
        name, index: As in ``attnserve.inspect`` (from 0).
        kind: "self" or "cross".
        input_size: D, the width of the query input; None without a query projection.
        weights: Captured variance of the weights; None for the reason in ``notes``.
        calibrated: Captured variance weighted by the calibration data.
        ranks: Ranks of scores and probabilities; None if all heads reuse probabilities.
        energy: Energy of each head's output about its mean.
        leave_one_out: Relative squared change of the model outputs without the head.
        sensitivity: Mean change of the outputs with the head's gate (Michel et al. 2019).
        votes: Groups, votes and mask of Voting-to-Stay.
        notes: Reasons for missing measurements, one sentence each.
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
        """The share of each head in the layer's energy; equal shares if the energy is zero."""
        total = self.energy.sum()
        return self.energy / total if total > 0 else np.full(self.num_heads, 1 / self.num_heads)


@dataclass(frozen=True)
class NotAnalyzed:
    """An attention block that was not measured, and the reason."""

    name: str
    reason: str


@dataclass(frozen=True)
class LayerSummary:
    """Summary of one layer.

    Attributes:
        nearest: Index of the most similar earlier layer; None for the first.
        similarity: Mean similarity of this layer's heads to their best matches there (eq. 3).
        uniform: Mean similarity of this layer's heads to uniform attention, which a layer that is
            worth reusing must exceed.
        rank, full_rank: Directions that hold 99 % of W_Q and of W_K (the larger), and the maximum;
            weighted by the data if possible. The rank of the product W_Q W_K^T would be too
            optimistic: shared dimensions must serve every head, and heads cancel in the sum.
        weakest_head, weakest_share: The head with the least energy, and its share.
        kept: Number of heads that Voting-to-Stay keeps.
    """

    index: int
    name: str
    num_heads: int
    head_size: int
    nearest: int | None
    similarity: float | None
    uniform: float
    rank: int | None
    full_rank: int | None
    weakest_head: int
    weakest_share: float
    kept: int


@dataclass(frozen=True, eq=False)
class Analysis:
    """All measurements of a model.

    Attributes:
        model: {"file", "sha256"} of the .onnx file.
        calibration: File, rows, tokens and checksum of the data.
        layers: In execution order.
        similarity: Similarity of all heads of these layers.
        lengths: Number of tokens of each text, counted as keys of the first layer.
        not_analyzed: Attention that was not measured, with reasons.
        seed: The seed of grouping and certification.
        output: The folder of the written report, if any; not part of the content.
    """

    model: Mapping[str, Any]
    calibration: Calibration
    layers: tuple[LayerAnalysis, ...]
    similarity: HeadSimilarity
    lengths: Int[np.ndarray, " N"]
    not_analyzed: tuple[NotAnalyzed, ...]
    seed: int
    output: Path | None = None

    @property
    def mask(self) -> dict[str, list[int]]:
        """Content of mask.json: 1 for the heads that Voting-to-Stay keeps, by layer."""
        return {layer.name: layer.votes.mask.tolist() for layer in self.layers}

    def earlier(self, row: int) -> tuple[int, float] | None:
        """(row of the most similar layer before ``layers[row]``, its similarity)."""
        best = self.similarity.best()[row, :row]
        if not len(best) or np.isnan(best).all():
            return None
        source = int(np.nanargmax(best))
        return source, float(best[source])

    def summary(self) -> list[LayerSummary]:
        return [self._summary(row) for row in range(len(self.layers))]

    def _summary(self, row: int) -> LayerSummary:
        layer = self.layers[row]
        match = self.earlier(row)
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
            uniform=float(self.similarity.baseline()[row]),
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
            "calibration": self.calibration.to_json(),
            "seed": self.seed,
            "versions": versions(),
            "layers": [_layer_json(layer) for layer in self.layers],
            "summary": [_rounded(asdict(line)) for line in self.summary()],
            "similarity": {
                "layers": list(self.similarity.layers),
                "heads": list(self.similarity.heads),
                "queries": self.similarity.queries,
                "best": _numbers(self.similarity.best()),
                "uniform": _numbers(self.similarity.baseline()),
                "sequential": {name: _numbers(ranks) for name, ranks in sequential.items()},
                "matrix": _numbers(self.similarity.matrix, 4),
            },
            "lengths": {
                "median": float(np.median(self.lengths)),
                "longest": int(self.lengths.max()),
                "tokens": self.lengths.tolist(),
            },
            "mask": self.mask,
            "not_analyzed": [asdict(block) for block in self.not_analyzed],
        }


def analyze_graph(
    model: ir.Model,
    data: Dataset,
    *,
    source: Mapping[str, Any],
    groups: int | None = None,
    context: RunContext = DEFAULT_CONTEXT,
) -> Analysis:
    """Analyze a model in memory; its fused operators are decomposed in place.

    Args:
        data: All batches of ``data.fit`` are measured.
        source: Description of the model for the report.
        groups: Number of heads that Voting-to-Stay keeps in each layer; None for half of them.

    Raises:
        InvalidModel: No attention can be measured.
        InvalidArgument: ``groups`` is less than 1 or more than the heads of a layer.
        InvalidData: The model refuses a batch, or its activations are not finite.
    """
    blocks, indices, left_out = _measurable(model, context.seed)
    _check_groups(groups, blocks)

    lengths = text_lengths(model, blocks[0], data.fit, context=context)
    whitened = [block for block in blocks if sharing_refusal(block) is None]
    moments = collect_moments(model, whitened, data.fit, context=context)
    similarity = measure_similarity(model, blocks, data.fit, context=context)
    scored = [block for block in blocks if block.softmax is not None]
    ranks = measure_ranks(model, scored, data.fit, context=context)
    energy = head_energy(model, blocks, data.fit, context=context)
    head_counts = {block.name: groups or -(-block.num_heads // 2) for block in blocks}
    votes = voting_to_stay(model, blocks, data.fit, groups=head_counts, context=context)
    losses = leave_one_out(model, blocks, data.fit, context=context)
    gates = sensitivity(model, blocks, data.fit, context=context)

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
                input_size=block.input_size if block.q.has_weight else None,
                weights=by_weights,
                calibrated=calibrated,
                ranks=ranks.get(name),
                energy=energy[name],
                leave_one_out=losses[name],
                sensitivity=gates[name],
                votes=votes[name],
                notes=notes,
            )
        )
    return Analysis(source, data.source, tuple(layers), similarity, lengths, left_out, context.seed)


def _measurable(
    model: ir.Model, seed: int
) -> tuple[list[AttentionBlock], dict[str, int], tuple[NotAnalyzed, ...]]:
    """The blocks with observable attention, the index of every block, and the other blocks."""
    matches = read_attention(model, seed=seed)
    indices = {block.name: index for index, block in enumerate(matches.blocks)}
    fused = {b.name: decomposition_refusal(b) for b in matches.blocks if b.softmax is None}
    if fused:
        decompose_fused(model, fused)
        matches = read_attention(model, seed=seed)
    left_out = [
        NotAnalyzed(unmatched.node.name or unmatched.node.op_type, unmatched.reason)
        for unmatched in matches.unmatched
    ]
    blocks: list[AttentionBlock] = []
    for block in matches.blocks:
        if refusal := _observation_refusal(block, model, fused.get(block.name)):
            left_out.append(NotAnalyzed(block.name, refusal.reason))
        else:
            blocks.append(block)
    if not blocks:
        reasons = "; ".join(f"{block.name}: {block.reason}" for block in left_out[:2])
        raise InvalidModel(
            "no attention can be analyzed"
            + (f" ({reasons[:400]})" if reasons else ": no softmax has scores of tokens as input"),
            "see `attnserve.inspect`; export the model with eager attention if a fused operator "
            "hides the probabilities",
            code="analysis.no_attention",
        )
    return blocks, indices, tuple(left_out)


def _observation_refusal(
    block: AttentionBlock, model: ir.Model, fused: Refusal | None
) -> Refusal | None:
    """Return why the attention of a block cannot be observed; None if it can.

    Args:
        fused: Why its fused operator cannot be decomposed, if it has one.
    """
    if block.graph is not model.graph:
        reason = "it is in a subgraph (If, Loop), whose values cannot be graph outputs"
        return Refusal("in_body", reason)
    if not block.probability_values:
        reason = "the graph has no probabilities of shape (batch, heads, queries, keys)"
        return fused or Refusal("probability_layout", reason)
    if block.v.output is None:
        return Refusal("no_values", "the graph has no value tensor")
    return quantized_refusal(block)


def _check_groups(groups: int | None, blocks: Sequence[AttentionBlock]) -> None:
    fewest = min(block.num_heads for block in blocks)
    if groups is not None and not 1 <= groups <= fewest:
        raise InvalidArgument(
            f"`groups` is {groups}: expected 1 to {fewest}, the least number of heads of a layer",
            "leave it out to keep half of the heads of each layer",
            code="analysis.groups",
        )


def _variance(
    block: AttentionBlock, moments: Any
) -> tuple[CapturedVariance | None, CapturedVariance | None, tuple[str, ...]]:
    """Captured variance of the weights, plain and weighted by the data, and reasons for gaps."""
    if refusal := _spectrum_refusal(block):
        return None, None, (f"no captured variance: {refusal}",)
    turned = block.position == "rope"
    heads = block.q.heads(), block.k.heads()
    by_weights = captured_variance(*heads, product=not turned)
    if moments is not None:
        return by_weights, captured_variance(*heads, moments), ()
    note = f"captured variance of the weights only: {sharing_refusal(block)}"
    return by_weights, None, (note,)


def _spectrum_refusal(block: AttentionBlock) -> Refusal | None:
    """Return why the captured variance of W_Q and W_K is not defined; None if it is."""
    if not block.q.num_heads:
        return Refusal("no_own_heads", "all heads reuse the probabilities of another layer")
    if block.is_collaborative or block.is_sparse:
        return Refusal("collaborative", "its heads are already collaborative")
    if not (block.q.has_weight and block.k.has_weight):
        reason = "its queries or keys are inputs of the graph, without a projection"
        return Refusal("no_projection", reason)
    if block.q.norm is not None or block.k.norm is not None:
        return Refusal("qk_norm", "q/k normalization is between the projections and the scores")
    return None


def _layer_json(layer: LayerAnalysis) -> dict[str, Any]:
    ranks = ("sizes", "scores", "probabilities", "used", "spanned")
    importance = ("energy", "energy_share", "leave_one_out", "sensitivity")
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
        if layer.ranks is None
        else {"tolerance": RANK_TOLERANCE, **_arrays(layer.ranks, *ranks)},
        "importance": _arrays(layer, *importance),
        "votes": _arrays(layer.votes, "groups", "votes", "mask"),
        "notes": list(layer.notes),
    }


def _arrays(measured: object, *names: str) -> dict[str, Any]:
    """The arrays of these names as lists of rounded numbers."""
    return {name: _numbers(getattr(measured, name)) for name in names}


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
    """Nested lists of rounded numbers for JSON; NaN and infinity become null."""
    return _rounded(array.tolist(), digits)


def _rounded(value: Any, digits: int = DIGITS) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(entry, digits) for key, entry in value.items()}
    if isinstance(value, list):
        return [_rounded(entry, digits) for entry in value]
    if isinstance(value, float):
        return float(f"{value:.{digits}g}") if np.isfinite(value) else None
    return value
