"""The outputs of the original to which a refit fits linear maps, with or without the residual.

The fit restores the residual stream of the original: its target is t = s - r, with s the original's
sum and r the residual of the rewritten model. A layer thus compensates the errors of earlier layers
(all-MiniLM-L6-v2 without a third of its heads and a fifth of its neurons: cosine 0.972, against
0.967 with the original's output as target). Without a residual, and for layers that share one
weight, the target is the original's output.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from attnserve.calibration.layerwise import LayerwiseRunner
from attnserve.calibration.linear_maps import Site, find_sites
from attnserve.context import DEFAULT_CONTEXT, RunContext
from attnserve.runtime.interface import Batch, owned
from graph_passes.passes.fuse_residuals import residual_of
from graph_passes.passes.skip_attention import Skipped

__all__ = ["LayerwiseOutputs", "OriginalOutputs", "collect_outputs"]


@dataclass(frozen=True, eq=False)
class OriginalOutputs:
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


def collect_outputs(
    original: ir.Model,
    names: Sequence[str],
    batches: Sequence[Batch],
    *,
    context: RunContext = DEFAULT_CONTEXT,
) -> OriginalOutputs:
    """Run the original once and store its outputs for several ``refit`` calls on these batches.

    Raises:
        InvalidData: The model refuses a batch.
    """
    outputs = LayerwiseOutputs(original, names, batches, context)
    site_names = list(outputs.sequence_first)
    arrays: dict[str, list[np.ndarray]] = {name: [] for name in site_names}
    for batch_arrays in outputs.of(site_names):
        for name, array in zip(site_names, batch_arrays, strict=True):
            arrays[name].append(owned(array))
    return OriginalOutputs(arrays, outputs.sequence_first, outputs.names_with_residual)


class LayerwiseOutputs:
    """Outputs of the original that are computed layer by layer and not stored."""

    def __init__(
        self,
        original: ir.Model,
        names: Sequence[str],
        batches: Sequence[Batch],
        context: RunContext,
    ) -> None:
        candidates = find_sites(original, names)
        sites = {n: candidates[n] for n in names if _can_be_fitted(candidates.get(n), original)}
        uses = Counter(site.weight_key for site in sites.values())
        # Layers that share a weight have no residual: that of later ones depends on the fit itself.
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


def _can_be_fitted(site: Site | None, original: ir.Model) -> bool:
    """Whether the site is in the main graph and not already a removed attention."""
    return (
        site is not None
        and not isinstance(site.owner, Skipped)
        and site.owner.graph is original.graph
    )
