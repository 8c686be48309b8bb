"""Refit output projections after a lossy rewrite, by ridge regression on the original's output.

With tokens c (input of the projection in the rewritten model) and targets t (what it should add to
the same tokens), the projection, or the second matrix of a feed-forward layer, becomes

    W, b = argmin sum |c W + b - t|^2 + ridge |W - W_O|^2          (b is free)

layer by layer from the first, each on the activations of the model as rewritten so far (arXiv
2110.06821 trains instead). Only Gram matrices are stored, so the data may have any length.

The target restores the residual stream of the original: t = s - r, with s the original's sum and r
the residual of the rewritten model. A layer thus compensates the errors of earlier layers
(all-MiniLM-L6-v2 without a third of its heads and a fifth of its neurons: cosine 0.972, against
0.967 with the original's output as target). Without a residual, and for layers that share one
weight, the target is the original's output.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import onnx_ir as ir

from attnserve.calibration.layerwise import LayerwiseRunner
from attnserve.calibration.ridge import FitMoments, NormalEquations
from attnserve.context import DEFAULT_CONTEXT, RunContext
from attnserve.data.datasets import thinned
from attnserve.models.masks import flat_mask, is_mask, no_token, not_finite, token_mask
from attnserve.models.rows import row_count
from attnserve.runtime.interface import Batch, owned
from graph_passes.analyses import Analyses
from graph_passes.analysis.constants import constant_array, origin, readers
from graph_passes.analysis.shapes import ShapeInfo, infer_shapes_small
from graph_passes.blocks import AttentionBlock, FeedForwardBlock, OutputProjection
from graph_passes.emit.affine import emit_affine
from graph_passes.emit.editing import Inserter, remove_unused, share_constants
from graph_passes.errors import CannotRewrite
from graph_passes.matching.feed_forward import find_feed_forward
from graph_passes.matching.find import find_attention
from graph_passes.matching.naming import pin_name, pin_names
from graph_passes.passes.fuse_residuals import residual_of
from graph_passes.passes.invariants import check_invariants, interface
from graph_passes.passes.skip_attention import AffineMap, Skipped, refill, skipped

if TYPE_CHECKING:
    from jaxtyping import Float

__all__ = [
    "Refit",
    "Site",
    "Targets",
    "collect_targets",
    "enough",
    "find_sites",
    "install",
    "last_map_moments",
    "refit",
]

FOLDS = 5
"""Number of folds of the cross-validation over texts."""

RIDGES = (1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0, np.inf)
"""Candidate ridges, relative to the mean variance of the input; infinity keeps the old weights."""

COLUMNS = 128
"""Number of random projections of the output that a ridge is chosen on. Ridges are a factor of ten
apart, and all of them are compared on the same projections."""

MANY_TOKENS = 5000
"""Number of tokens from which ridges are compared on one fold only: ridges are a factor of ten
apart, and the solutions take most of the time."""

FIRST_RIDGE = 1e-1
"""The first ridge to try; the search goes to weaker or stronger ones while the error falls."""


@dataclass(frozen=True)
class Refit:
    """The error of a layer's output before and after the fit, relative to the target's variation.

    Attributes:
        relative_error_before, relative_error: Root mean square, on the calibration data.
        ridge: The ridge chosen by cross-validation; None if no fit was better on held-out texts, so
            that the weights are unchanged.
        is_shared: Whether the weights are unchanged because other layers read them too.
    """

    relative_error_before: float
    relative_error: float
    ridge: float | None
    is_shared: bool = False


@dataclass(frozen=True, eq=False)
class Site:
    """A linear map that can be fitted: an output projection, or the map of a removed attention.

    Weights are read on demand: in float64, the weights of all sites would take as much memory as
    half of the model.

    Attributes:
        name: The name of the block.
        tokens: Its input; None for a constant map.
        output: The value after its bias.
        owner: The block or the removed attention that the map belongs to.
        residual: The residual that its output is added to; None if the target is the output itself.
    """

    name: str
    tokens: ir.Value | None
    output: ir.Value
    owner: AttentionBlock | Skipped | FeedForwardBlock
    residual: ir.Value | None = None

    @property
    def weight(self) -> Float[np.ndarray, "N D"]:
        """The current weight."""
        match self.owner:
            case AttentionBlock(output=output):
                assert output is not None
                weight = output.matrix()
            case FeedForwardBlock() as block:
                weight = block.second_matrix()
            case gap:
                weight = gap.affine.weight
                weight = np.zeros((0, len(gap.affine.bias))) if weight is None else weight
        return weight.astype(np.float64)

    @property
    def bias(self) -> Float[np.ndarray, " D"]:
        """The current bias."""
        match self.owner:
            case AttentionBlock(output=output):
                assert output is not None
                bias = np.broadcast_to(output.offset(), output.matrix().shape[1:])
            case FeedForwardBlock() as block:
                bias = np.zeros(1) if block.bias is None else constant_array(block.bias).reshape(-1)
                bias = np.broadcast_to(bias, block.second_matrix().shape[1:])
            case gap:
                bias = gap.affine.bias
        return bias.astype(np.float64)

    @property
    def prior(self) -> Float[np.ndarray, "N D"]:
        """The weight that the fit is regularized towards: zero for a removed attention."""
        weight = self.weight
        return np.zeros_like(weight) if isinstance(self.owner, Skipped) else weight

    @property
    def sequence_first(self) -> bool:
        """Whether the output has the layout (S, B, D)."""
        output = self.owner.output if isinstance(self.owner, AttentionBlock) else None
        return output is not None and output.sequence_first

    @property
    def weight_key(self) -> object:
        """A key that is equal for sites of one weight."""
        match self.owner:
            case AttentionBlock(output=OutputProjection(weight=weight)):
                return origin(weight)
            case FeedForwardBlock(second=second):
                return origin(second.weight)
            case _:
                return self.owner


def refit(
    model: ir.Model,
    original: ir.Model,
    names: Sequence[str],
    batches: Sequence[Batch],
    *,
    fit: bool = True,
    feed: Callable[[Batch], Batch] = lambda batch: batch,
    context: RunContext = DEFAULT_CONTEXT,
    targets: Targets | None = None,
    known: Sequence[Mapping[str, np.ndarray]] = (),
) -> dict[str, Refit]:
    """Fit the output projections of rewritten blocks in place, and return the errors by name.

    Blocks that share an output projection are fitted together and still share it afterwards. One
    that is shared with a block that is not rewritten stays as it is.
    Blocks in the body of another node (If, Loop) are ignored.

    Args:
        model: The rewritten model.
        original: The model it was made from.
        names: The rewritten blocks, including removed attention and feed-forward layers.
        batches: Inputs of both models.
        fit: False only measures the error; ``relative_error`` is then the error before.
        feed: Converts a batch to the rewritten model's inputs (caches may have other shapes).
        targets: Outputs of the original on these batches, for fitting several models to it; names
            without targets are ignored. None computes them layer by layer (``LayerwiseRunner``).
        known: Values of the rewritten model in front of its changes, see ``LayerwiseRunner``.

    Raises:
        InvalidData: A model refuses a batch, or its activations are not finite.
    """
    original_interface = interface(model)
    original_targets: _LayerwiseTargets | Targets = targets or _LayerwiseTargets(
        original, names, batches, context
    )
    site_names = [name for name in names if name in original_targets.sequence_first]
    with Analyses.of(model) as analyses:
        pin_names(analyses.get(find_attention)[0])
        shapes = analyses.get(infer_shapes_small, batch=2, sequence=5)
        sites = find_sites(model, site_names)
    groups = _names_by_weight(sites, site_names)
    runner = LayerwiseRunner(model, batches, feed=feed, known=known, context=context)
    progress = context.stage("refit outputs")
    results: dict[str, Refit] = {}
    for index, group in enumerate(groups):
        remaining_names = list(chain(*groups[index:]))
        if not all(_is_current(sites[name]) for name in remaining_names):
            sites = find_sites(model, site_names)
        for name in original_targets.names_with_residual & set(remaining_names):
            residual = residual_of(sites[name].output)
            if residual is None:
                raise CannotRewrite(
                    f"{name}: its residual addition is part of another operator",
                    "apply fuse_skip_norm after the passes that are not lossless",
                    code="refit.residual",
                )
            sites[name] = replace(sites[name], residual=residual[0])
        values_by_group = [
            _values_of(sites[name] for name in group_names) for group_names in groups[index:]
        ]
        group_values = values_by_group[0]
        later_values = list(chain(*values_by_group[1:]))
        if len(group) == 1:
            activations = runner.run_to(group_values, later_values)
        else:  # the first fit would change the inputs of the others
            first_values = _values_of([sites[group[0]]])
            for _ in runner.run_to(first_values, [*group_values, *later_values]):
                pass
            activations = runner.peek(group_values)
        folds = _Folds([sites[name] for name in group], original_targets.sequence_first)
        triples = zip(batches, activations, original_targets.of(group), strict=True)
        for step, (batch, arrays, group_targets) in enumerate(triples, start=1):
            folds.add(batch, dict(zip(group_values, arrays, strict=True)), group_targets)
            progress(index * len(batches) + step, len(groups) * len(batches))
        is_shared = _is_read_elsewhere(folds.sites)
        group_results = _fit(model, folds.sites, folds.moments(), shapes, fit=fit and not is_shared)
        for name, result in group_results.items():
            results[name] = replace(result, is_shared=is_shared)
        with Analyses.of(model) as analyses:
            analyses.invalidate()
    share_constants(model, since=original_interface.initializers)
    check_invariants(original_interface, model, after="refit")
    return results


def last_map_moments(
    model: ir.Model,
    blocks: Sequence[AttentionBlock | FeedForwardBlock],
    batches: Sequence[Batch],
    *,
    context: RunContext = DEFAULT_CONTEXT,
) -> Iterator[tuple[str, FitMoments]]:
    """Yield each block's name, and the moments of the input and output of its last linear map.

    That is the output projection of attention, and the second product of a feed-forward layer.
    Blocks are in execution order. Moments of one block are in memory at a time: those of all
    feed-forwards of an 8-billion-parameter model would take 67 GB.

    Raises:
        InvalidData: The model refuses a batch, or its activations are not finite.
    """
    order = {value: place for place, node in enumerate(model.graph) for value in node.outputs}
    sites = sorted(
        (_of_feed_forward(b) if isinstance(b, FeedForwardBlock) else _of_block(b) for b in blocks),
        key=lambda site: order.get(site.output, len(order)),
    )
    values = [[v for v in (site.tokens, site.output) if v is not None] for site in sites]
    runner = LayerwiseRunner(model, batches, context=context)
    for index, site in enumerate(sites):
        sums = _Sum()
        runs = runner.run_to(values[index], list(chain(*values[index + 1 :])))
        for batch, arrays in zip(batches, runs, strict=True):
            activations = dict(zip(values[index], arrays, strict=True))
            target = activations[site.output]
            tokens = _tokens(site, activations, target, batch, site.sequence_first)
            sums.add(tokens.inputs, tokens.targets)
        moments = sums.moments()
        if not moments.count:
            raise no_token(site.name)
        yield site.name, moments


def enough(
    batches: Sequence[Batch], blocks: Sequence[AttentionBlock | FeedForwardBlock]
) -> list[Batch]:
    """Batches with enough tokens to fit the last linear maps of these blocks.

    That is 32 tokens for each input, and at least 8192 tokens. Fewer cost quality: in a prototype,
    13 instead of 27 for each input raised the loss of MiniLM, without an eighth of its neurons, by
    23 %.
    """
    widths: list[int] = []
    for block in blocks:
        is_feed_forward = isinstance(block, FeedForwardBlock)
        widths.append(block.num_neurons if is_feed_forward else block.num_heads * block.v_head_size)
    return thinned(batches, max(8192, 32 * max(widths, default=0)))


@dataclass(frozen=True, eq=False)
class Targets:
    """Outputs of the original model, for fitting several models: rows x D numbers per layer.

    Attributes:
        arrays: By name, one array per batch, padding included.
        sequence_first: By name, whether the layout is (S, B, D).
        names_with_residual: Names whose arrays include the residual.
    """

    arrays: Mapping[str, Sequence[np.ndarray]]
    sequence_first: Mapping[str, bool]
    names_with_residual: frozenset[str] = frozenset()

    def of(self, names: Sequence[str]) -> Iterator[list[np.ndarray]]:
        """The arrays of these layers in each batch."""
        return (list(arrays) for arrays in zip(*(self.arrays[n] for n in names), strict=True))


def collect_targets(
    original: ir.Model,
    names: Sequence[str],
    batches: Sequence[Batch],
    *,
    context: RunContext = DEFAULT_CONTEXT,
) -> Targets:
    """Run the original once and store its outputs for several ``refit`` calls on these batches.

    Raises:
        InvalidData: The model refuses a batch.
    """
    targets = _LayerwiseTargets(original, names, batches, context)
    site_names = list(targets.sequence_first)
    arrays: dict[str, list[np.ndarray]] = {name: [] for name in site_names}
    for batch_arrays in targets.of(site_names):
        for name, array in zip(site_names, batch_arrays, strict=True):
            arrays[name].append(owned(array))
    return Targets(arrays, targets.sequence_first, targets.names_with_residual)


class _LayerwiseTargets:
    """Targets that are computed layer by layer and not stored."""

    def __init__(
        self,
        original: ir.Model,
        names: Sequence[str],
        batches: Sequence[Batch],
        context: RunContext,
    ) -> None:
        candidates = find_sites(original, names)
        sites = {n: candidates[n] for n in names if _is_target(candidates.get(n), original)}
        uses = Counter(site.weight_key for site in sites.values())
        # Layers that share a weight have no residual target: later ones depend on the fit itself.
        unshared_sites = {name: site for name, site in sites.items() if uses[site.weight_key] == 1}
        pairs = {name: residual_of(site.output) for name, site in unshared_sites.items()}
        sums = {name: pair[1] for name, pair in pairs.items() if pair is not None}
        self.outputs = {name: sums.get(name, site.output) for name, site in sites.items()}
        self.sequence_first = {name: site.sequence_first for name, site in sites.items()}
        self.names_with_residual = frozenset(sums)
        self.model = LayerwiseRunner(original, batches, context=context)

    def of(self, names: Sequence[str]) -> Iterator[list[np.ndarray]]:
        """Compute the arrays of these layers in each batch; each layer can be requested once."""
        values = [self.outputs.pop(name) for name in names]
        return self.model.run_to(values, list(self.outputs.values()))


def _is_target(site: Site | None, original: ir.Model) -> bool:
    """Whether the site is in the main graph and not already a removed attention."""
    return (
        site is not None
        and not isinstance(site.owner, Skipped)
        and site.owner.graph is original.graph
    )


def _values_of(sites: Iterable[Site]) -> list[ir.Value]:
    """The inputs and residuals of the sites, each value once."""
    values = (value for site in sites for value in (site.tokens, site.residual))
    return list(dict.fromkeys(value for value in values if value is not None))


def _is_current(site: Site) -> bool:
    """Whether the values of a site are still in its graph; other fits may replace them."""
    values = [value for value in (site.tokens, site.output, site.residual) if value is not None]
    nodes = [node for value in values if (node := value.producer()) is not None]
    return all(node.graph is not None for node in nodes)


def _is_read_elsewhere(sites: Sequence[Site]) -> bool:
    """Whether the weight of these sites is read by other nodes too."""
    weight = sites[0].weight_key
    return isinstance(weight, ir.Value) and len(set(readers(weight))) > len(sites)


def _names_by_weight(sites: Mapping[str, Site], names: Sequence[str]) -> list[list[str]]:
    """Names in execution order, grouped by shared weight."""
    groups: dict[object, list[str]] = {}
    for name in sorted(names, key=list(sites).index):
        groups.setdefault(sites[name].weight_key, []).append(name)
    return list(groups.values())


def find_sites(model: ir.Model, names: Sequence[str]) -> dict[str, Site]:
    """All maps that can be fitted, in execution order; feed-forward layers only if named."""
    with Analyses.of(model) as analyses:
        attention = analyses.get(find_attention)[0]
    blocks = [_of_block(b) for b in attention if b.output is not None and not b.is_quantized]
    sites = [*blocks, *map(_of_skipped, skipped(model))]
    site_names = {site.name for site in sites}
    if not site_names.issuperset(names):
        sites += [_of_feed_forward(b) for b in find_feed_forward(model) if b.name not in site_names]
    order = [value for node in model.graph.all_nodes() for value in node.outputs]
    place = {value: index for index, value in enumerate(order)}
    return {site.name: site for site in sorted(sites, key=lambda site: place[site.output])}


def _of_block(block: AttentionBlock) -> Site:
    """The output projection of attention."""
    assert block.output is not None
    return Site(block.name, block.output.input, block.output.output, block)


def _of_feed_forward(block: FeedForwardBlock) -> Site:
    """The second product of a feed-forward layer."""
    return Site(block.name, block.hidden, block.output, block)


def _of_skipped(gap: Skipped) -> Site:
    """The map of a removed attention."""
    tokens = None if gap.affine.weight is None else gap.input
    return Site(gap.name, tokens, gap.output, gap)


class _Folds:
    """Moments of inputs and targets, in ``FOLDS`` folds (or fewer, one per text).

    From ``MANY_TOKENS`` on, two are enough: the one that ridges are compared on, and the others.
    """

    def __init__(self, sites: Sequence[Site], sequence_first: Mapping[str, bool]) -> None:
        self.sites = sites
        self.sequence_first = sequence_first
        self.sums: dict[int, _Sum] = {}
        self.texts = self.tokens = 0  # of earlier batches

    def add(
        self,
        batch: Batch,
        activations: Mapping[ir.Value, np.ndarray],
        targets: Sequence[np.ndarray],
    ) -> None:
        """Add one batch.

        Args:
            activations: The inputs and residuals of the sites.
            targets: One for each site.
        """
        for site, target in zip(self.sites, targets, strict=True):
            tokens = _tokens(site, activations, target, batch, self.sequence_first[site.name])
            folds = (self.texts + tokens.texts) % FOLDS
            if self.tokens >= MANY_TOKENS:
                folds = np.minimum(folds, 1)
            for fold in np.unique(folds).tolist():
                in_fold = folds == fold
                self.sums.setdefault(fold, _Sum()).add(
                    tokens.inputs[in_fold], tokens.targets[in_fold]
                )
            self.tokens += len(tokens.inputs)
        self.texts += row_count(batch)
        if self.tokens >= MANY_TOKENS:
            for fold in [fold for fold in self.sums if fold > 1]:
                self.sums.setdefault(1, _Sum()).join(self.sums.pop(fold).moments())

    def moments(self) -> list[FitMoments]:
        """The moments of each fold.

        Raises:
            InvalidData: There is no real token.
        """
        if not self.sums:
            raise no_token(self.sites[0].name)
        return [part.moments() for part in self.sums.values()]


class _Sum:
    """Moments of tokens, buffered: one product of many rows is faster than many of few rows.

    Up to 1024 rows are buffered.
    """

    def __init__(self) -> None:
        self.sum: FitMoments | None = None
        self.pieces: list[tuple[np.ndarray, np.ndarray]] = []

    def add(self, inputs: np.ndarray, targets: np.ndarray) -> None:
        """Add rows of inputs (M, N) and targets (M, D)."""
        self.pieces.append((inputs, targets))
        if sum(len(rows) for rows, _ in self.pieces) >= 1024:
            self.moments()

    def join(self, part: FitMoments) -> None:
        """Add moments of other rows."""
        if self.sum is None:
            self.sum = part
        else:
            self.sum += part

    def moments(self) -> FitMoments:
        """The moments of all rows so far; later rows change them."""
        if self.pieces:
            inputs, targets = (np.concatenate(rows) for rows in zip(*self.pieces, strict=True))
            self.pieces = []
            self.join(FitMoments.of(inputs, targets))
        assert self.sum is not None
        return self.sum


class _Tokens(NamedTuple):
    """The unmasked tokens of a batch, in float64.

    Attributes:
        inputs: Inputs of the map, (M, N).
        targets: Outputs to fit, (M, D).
        texts: The number of each token's text in the batch, (M,).
    """

    inputs: np.ndarray
    targets: np.ndarray
    texts: np.ndarray


def _tokens(
    site: Site,
    activations: Mapping[ir.Value, np.ndarray],
    target: np.ndarray,
    batch: Batch,
    is_sequence_first: bool,
) -> _Tokens:
    """The unmasked tokens of a site in a batch.

    Args:
        activations: The input and the residual of the site.
        target: Its output in the original, with the residual if the site has one.
        is_sequence_first: Whether the target is (S, B, D).

    Raises:
        InvalidData: The activations are not finite.
    """
    if site.residual is not None:
        target = target - activations[site.residual]
    texts = _text_of(target, batch, is_sequence_first)
    real = texts >= 0
    targets = target.reshape(-1, target.shape[-1])[real].astype(np.float64)
    if site.tokens is None:
        inputs = np.zeros((len(targets), 0))
    else:
        inputs = activations[site.tokens].reshape(len(real), -1)[real].astype(np.float64)
    if not (np.isfinite(inputs).all() and np.isfinite(targets).all()):
        raise not_finite(site.name)
    return _Tokens(inputs, targets, texts[real])


def _text_of(target: np.ndarray, batch: Batch, is_sequence_first: bool) -> np.ndarray:
    """The text number of each token of the target, -1 for padding.

    The target is (B, S, D), (B*S, D), or (S, B, D) if ``is_sequence_first``. Windows of an image
    are one text.
    """
    rows = int(np.prod(target.shape[:-1]))
    if target.ndim == 2:
        mask = flat_mask(batch, rows)
        first, second = (1, rows) if mask is None else mask.shape
    else:
        first, second = target.shape[:2]
        has_sequence_first_mask = any(
            is_mask(n) and a.shape == (second, first) for n, a in batch.items()
        )
        is_sequence_first = is_sequence_first or (has_sequence_first_mask and first != second)
    sizes = (second, first) if is_sequence_first else (first, second)
    text = np.arange(sizes[0]) * row_count(batch) // sizes[0]
    texts = np.where(token_mask(batch, sizes), text[:, None], -1)
    texts = texts.T if is_sequence_first else texts
    return np.repeat(texts.reshape(-1), rows // texts.size)


def _fit(
    model: ir.Model,
    sites: Sequence[Site],
    folds: Sequence[FitMoments],
    shapes: ShapeInfo,
    *,
    fit: bool,
) -> dict[str, Refit]:
    """Choose a ridge, fit, and write the new weights into the graph.

    Args:
        sites: Those that share one weight.
        fit: False only measures the error.

    Returns:
        The errors by name.
    """
    moments = _total(folds)
    first_site = sites[0]
    varies = moments.variation > 1e-13 * moments.tt  # eps^2 of float32: less is rounding
    scale = moments.variation if varies else moments.tt or 1.0
    error = (moments.error(first_site.weight, first_site.bias) / scale) ** 0.5
    ridge = _choose_ridge(folds, first_site) if fit else None
    if ridge is None:
        return {site.name: Refit(error, error, None) for site in sites}
    weight, bias = NormalEquations(moments, first_site.prior).solve(ridge)
    squared_error = moments.error(weight, bias)
    for site in sites:
        install(site, weight, bias, shapes)
    remove_unused(model)
    return {site.name: Refit(error, (squared_error / scale) ** 0.5, ridge) for site in sites}


def _choose_ridge(folds: Sequence[FitMoments], site: Site) -> float | None:
    """The ridge with the least cross-validation error; None if the current weights have less.

    The search descends from ``FIRST_RIDGE``, and errors are measured on ``COLUMNS`` random
    projections of the output. With a single text there is no held-out text: then only removed
    attention layers, which have no weights yet, are fitted.
    """
    if len(folds) < 2:
        return RIDGES[-2] if isinstance(site.owner, Skipped) else None
    columns = np.eye(size := site.prior.shape[1])
    if size > COLUMNS:  # E |x @ columns|^2 = |x|^2, and the columns of W are independent fits
        columns = np.random.default_rng(0).standard_normal((size, COLUMNS)) / COLUMNS**0.5
    folds = [fold.projected(columns) for fold in folds]
    moments = _total(folds)
    prior = site.prior @ columns
    if moments.count >= MANY_TOKENS:
        folds = folds[:1]
    equations = [NormalEquations(moments - held_out, prior) for held_out in folds]

    @cache
    def error(place: int) -> float:
        """The cross-validation error of a ridge, minus that of the zero map."""
        if not 0 <= place < len(RIDGES):
            return np.inf
        pairs = zip(folds, equations, strict=True)
        return sum(
            held_out.error_above_zero_map(*equation.solve(RIDGES[place]))
            for held_out, equation in pairs
        )

    best = -1
    place = RIDGES.index(FIRST_RIDGE)
    while place != best:
        best = place
        place = min((best, best - 1, best + 1), key=error)
    held_out_sum = _total(folds)
    current_error = held_out_sum.error_above_zero_map(site.weight @ columns, site.bias @ columns)
    return RIDGES[best] if error(best) < current_error else None


def _total(folds: Sequence[FitMoments]) -> FitMoments:
    """The moments of all folds together."""
    total = folds[0]
    for fold in folds[1:]:
        total = total + fold
    return total


def install(site: Site, weight: np.ndarray, bias: np.ndarray, info: ShapeInfo) -> ir.Node | None:
    """Write the map tokens W + b into the graph and return its product node, if it has one."""
    if isinstance(site.owner, Skipped):
        refill(site.owner, AffineMap(None if site.tokens is None else weight, bias), info)
        return None
    if isinstance(site.owner, FeedForwardBlock):
        make = Inserter(site.owner.graph, site.owner.product, f"{site.name}/refit")
        product = emit_affine(make, site.owner.hidden, weight, bias, site.owner.output, info)
        pin_name(product, site.name)
        return product
    output = site.owner.output
    assert output is not None
    make = Inserter(site.owner.graph, output.nodes[-1], f"{site.name}/refit")
    tokens = output.input
    if len(info.shape(tokens) or ()) == 4:
        merged = make.constant(np.array([0, 0, -1], np.int64), "merged")
        tokens = make.op("Reshape", [tokens, merged], "merged_heads")
    return emit_affine(make, tokens, weight, bias, output.output, info)
