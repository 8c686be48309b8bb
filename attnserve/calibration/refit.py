"""Refit output projections after a lossy rewrite, by ridge regression on the original's output.

With tokens c (the input of the projection in the rewritten model) and targets t (the desired
output), the projection, or the second matrix of a feed-forward layer, becomes

    W, b = argmin sum |c W + b - t|^2 + ridge |W - W_O|^2          (b is free)

layer by layer from the first, each on the activations of the model as rewritten so far (arXiv
2110.06821 trains instead). Only Gram matrices are stored, so the data may have any length.

The ridge is chosen by cross-validation (``cross_validation``), and the target restores the residual
stream of the original (``original_outputs``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import chain
from operator import add

import numpy as np
import onnx_ir as ir

from attnserve.calibration.cross_validation import Folds, choose_ridge
from attnserve.calibration.layerwise import LayerwiseRunner
from attnserve.calibration.linear_maps import Site, find_sites, install
from attnserve.calibration.original_outputs import LayerwiseOutputs, OriginalOutputs
from attnserve.calibration.ridge import FitMoments, NormalEquations
from attnserve.context import DEFAULT_CONTEXT, RunContext
from attnserve.runtime.interface import Batch
from graph_passes.analyses import Analyses
from graph_passes.analysis.constants import readers
from graph_passes.analysis.shapes import ShapeInfo, infer_shapes_small
from graph_passes.emit.editing import remove_unused, share_constants
from graph_passes.errors import CannotRewrite
from graph_passes.matching.find import find_attention
from graph_passes.matching.naming import pin_names
from graph_passes.passes.fuse_residuals import residual_of
from graph_passes.passes.invariants import check_invariants, interface

__all__ = ["Refit", "refit"]


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


def refit(
    model: ir.Model,
    original: ir.Model,
    names: Sequence[str],
    batches: Sequence[Batch],
    *,
    fit: bool = True,
    feed: Callable[[Batch], Batch] = lambda batch: batch,
    context: RunContext = DEFAULT_CONTEXT,
    original_outputs: OriginalOutputs | None = None,
    known: Sequence[Mapping[str, np.ndarray]] = (),
) -> dict[str, Refit]:
    """Fit the output projections of rewritten blocks in place, and return the errors by name.

    Blocks that share an output projection are fitted together and still share it afterwards. A
    projection that is shared with an unchanged block does not change. Blocks in the body of another
    node (If, Loop) are ignored, and blocks of which a later block has removed outputs.

    Args:
        model: The rewritten model.
        original: The original of the rewritten model.
        names: The rewritten blocks, including removed attention and feed-forward layers.
        batches: Inputs of both models.
        fit: False only measures the error; ``relative_error`` is then the error before.
        feed: Converts a batch to the rewritten model's inputs (caches may have other shapes).
        original_outputs: Outputs of the original on these batches, for fitting several models;
            other names are ignored. None computes them layer by layer (``LayerwiseRunner``).
        known: Values of the rewritten model in front of its changes, see ``LayerwiseRunner``.

    Raises:
        InvalidData: A model refuses a batch, or its activations are not finite.
    """
    original_interface = interface(model)
    outputs = original_outputs or LayerwiseOutputs(original, names, batches, context)
    site_names = [name for name in names if name in outputs.sequence_first]
    analyses = Analyses.of(model)
    pin_names(analyses.get(find_attention).blocks)
    shapes = analyses.get(infer_shapes_small, batch=2, sequence=5)
    sites = find_sites(model, site_names)
    groups = _names_by_weight(sites, site_names)
    runner = LayerwiseRunner(model, batches, feed=feed, known=known, context=context)
    progress = context.stage("refit outputs")
    results: dict[str, Refit] = {}
    for index, group in enumerate(groups):
        remaining = groups[index:]
        sites = _current_sites(model, sites, list(chain(*remaining)), outputs.names_with_residual)
        runs = _activations(runner, sites, remaining)
        folds = Folds([sites[name] for name in group], outputs.sequence_first)
        steps = zip(batches, runs, outputs.of(group), strict=True)
        for step, (batch, activations, arrays) in enumerate(steps, start=1):
            folds.add(batch, activations, arrays)
            progress(index * len(batches) + step, len(groups) * len(batches))
        moments = folds.moments()
        if moments[0].ct.shape == folds.sites[0].weight.shape:  # else the output has lost columns
            results |= _fit(model, folds.sites, moments, shapes, fit=fit)
    share_constants(model, since=original_interface.initializers)
    check_invariants(original_interface, model, after="refit")
    return results


def _names_by_weight(sites: Mapping[str, Site], names: Sequence[str]) -> list[list[str]]:
    """Names in execution order, grouped by shared weight."""
    groups: dict[object, list[str]] = {}
    for name in sorted(names, key=list(sites).index):
        groups.setdefault(sites[name].weight_key, []).append(name)
    return list(groups.values())


def _current_sites(
    model: ir.Model, sites: Mapping[str, Site], names: Sequence[str], with_residual: Collection[str]
) -> dict[str, Site]:
    """The sites as earlier fits left them, with the residuals that the outputs include.

    Args:
        names: The sites that are not fitted yet.
        with_residual: The names of sites whose original output includes the residual.

    Raises:
        CannotRewrite: A residual addition is part of another operator.
    """
    is_current = all(_is_current(sites[name]) for name in names)
    sites = dict(sites) if is_current else find_sites(model, names)
    for name in names:
        if name not in with_residual:
            continue
        residual = residual_of(sites[name].output)
        if residual is None:
            raise CannotRewrite(
                f"{name}: its residual addition is part of another operator",
                "apply fuse_skip_norm after the lossy passes",
                code="refit.residual",
            )
        sites[name] = replace(sites[name], residual=residual[0])
    return sites


def _is_current(site: Site) -> bool:
    """Whether the values of a site are still in its graph; other fits may replace them."""
    values = [value for value in (site.tokens, site.output, site.residual) if value is not None]
    nodes = [node for value in values if (node := value.producer()) is not None]
    return all(node.graph is not None for node in nodes)


def _activations(
    runner: LayerwiseRunner, sites: Mapping[str, Site], groups: Sequence[Sequence[str]]
) -> Iterator[dict[ir.Value, np.ndarray]]:
    """The inputs and residuals of the sites of the first group, in each batch.

    Args:
        groups: The names that are not fitted yet; the runner stores what the later groups need.
    """
    first_group = groups[0]
    values, *later = (_values_of(sites[name] for name in group) for group in groups)
    later_values = list(chain(*later))
    if len(first_group) == 1:
        runs = runner.run_to(values, later_values)
    else:  # the first fit would change the inputs of the others
        first_values = _values_of([sites[first_group[0]]])
        for _ in runner.run_to(first_values, [*values, *later_values]):
            pass
        runs = runner.run_to(values, None)
    return (dict(zip(values, arrays, strict=True)) for arrays in runs)


def _values_of(sites: Iterable[Site]) -> list[ir.Value]:
    """The inputs and residuals of the sites, each value once."""
    values = (value for site in sites for value in (site.tokens, site.residual))
    return list(dict.fromkeys(value for value in values if value is not None))


def _is_read_elsewhere(sites: Sequence[Site]) -> bool:
    """Whether the weight of these sites is read by other nodes too."""
    weight = sites[0].weight_key
    return isinstance(weight, ir.Value) and len(set(readers(weight))) > len(sites)


def _fit(
    model: ir.Model,
    sites: Sequence[Site],
    folds: Sequence[FitMoments],
    shapes: ShapeInfo,
    *,
    fit: bool,
) -> dict[str, Refit]:
    """Choose a ridge, fit, and write the new weights into the graph; a shared weight is kept.

    Args:
        sites: All sites of one weight that are fitted.
        fit: False only measures the error.

    Returns:
        The errors by name.
    """
    is_shared = _is_read_elsewhere(sites)
    moments = reduce(add, folds)
    first_site = sites[0]
    varies = moments.variation > 1e-13 * moments.tt  # eps^2 of float32: less is rounding
    scale = moments.variation if varies else moments.tt or 1.0
    error = (moments.error(first_site.weight, first_site.bias) / scale) ** 0.5
    ridge = choose_ridge(folds, first_site) if fit and not is_shared else None
    if ridge is None:
        return {site.name: Refit(error, error, None, is_shared) for site in sites}
    weight, bias = NormalEquations(moments, first_site.prior).solve(ridge)
    squared_error = moments.error(weight, bias)
    for site in sites:
        install(site, weight, bias, shapes)
    remove_unused(model)
    return {site.name: Refit(error, (squared_error / scale) ** 0.5, ridge) for site in sites}
