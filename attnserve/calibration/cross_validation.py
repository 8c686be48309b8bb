"""The ridge of a refit, chosen by cross-validation over texts.

Each text belongs to one of ``FOLDS`` folds. For each ridge, a map is fitted to all other folds, and
its error is measured on the fold (from ``MANY_TOKENS`` on, for one fold only). Only the sums of
each fold are stored (``ridge.FitMoments``). The search begins with ``FIRST_RIDGE`` and goes to the
better neighbor until no neighbor is better. The result must be better on held-out folds than the
current weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache, reduce
from operator import add

import numpy as np
import onnx_ir as ir

from attnserve.calibration.linear_maps import Site
from attnserve.calibration.map_moments import MomentSum, real_tokens
from attnserve.calibration.ridge import FitMoments, NormalEquations
from attnserve.models.masks import no_token
from attnserve.models.rows import row_count
from attnserve.runtime.interface import Batch
from graph_passes.passes.skip_attention import Skipped

__all__ = ["RIDGES", "Folds", "choose_ridge"]

FOLDS = 5
"""Number of folds of the cross-validation over texts."""

RIDGES = (1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0, np.inf)
"""Candidate ridges, relative to the mean variance of the input; infinity keeps the old weights."""

COLUMNS = 128
"""Number of random projections of the output on which a ridge is chosen. Ridges are a factor of ten
apart, and all ridges are compared on the same projections."""

MANY_TOKENS = 5000
"""Number of tokens from which ridges are compared on one fold only: ridges are a factor of ten
apart, and the solutions take most of the time."""

FIRST_RIDGE = 1e-1
"""The first ridge to try; the search goes to weaker or stronger ones while the error falls."""


class Folds:
    """Moments of inputs and targets, in ``FOLDS`` folds (or fewer, one per text).

    From ``MANY_TOKENS`` on, two folds are enough: one to compare ridges on, and one with all other
    texts.
    """

    def __init__(self, sites: Sequence[Site], sequence_first: Mapping[str, bool]) -> None:
        self.sites = sites
        self.sequence_first = sequence_first
        self.sums: dict[int, MomentSum] = {}
        self.texts = self.tokens = 0  # numbers in earlier batches

    def add(
        self,
        batch: Batch,
        activations: Mapping[ir.Value, np.ndarray],
        outputs: Sequence[np.ndarray],
    ) -> None:
        """Add one batch.

        Args:
            activations: The inputs and residuals of the sites.
            outputs: The output of each site in the original, see ``real_tokens``.
        """
        for site, output in zip(self.sites, outputs, strict=True):
            tokens = real_tokens(site, activations, output, batch, self.sequence_first[site.name])
            folds = (self.texts + tokens.texts) % FOLDS
            if self.tokens >= MANY_TOKENS:
                folds = np.minimum(folds, 1)
            for fold in np.unique(folds).tolist():
                in_fold = folds == fold
                self.sums.setdefault(fold, MomentSum()).add(
                    tokens.inputs[in_fold], tokens.targets[in_fold]
                )
            self.tokens += len(tokens.inputs)
        self.texts += row_count(batch)
        if self.tokens >= MANY_TOKENS:
            for fold in [fold for fold in self.sums if fold > 1]:
                self.sums.setdefault(1, MomentSum()).join(self.sums.pop(fold).moments())

    def moments(self) -> list[FitMoments]:
        """The moments of each fold.

        Raises:
            InvalidData: The data has no real token.
        """
        if not self.sums:
            raise no_token(self.sites[0].name)
        return [fold_sum.moments() for fold_sum in self.sums.values()]


def choose_ridge(folds: Sequence[FitMoments], site: Site) -> float | None:
    """The ridge with the least cross-validation error; None if the current weights have less.

    The search descends from ``FIRST_RIDGE``, and errors are measured on ``COLUMNS`` random
    projections of the output. A single text leaves no held-out text: then only removed
    attention layers, which have no weights yet, are fitted.
    """
    if len(folds) < 2:
        return RIDGES[-2] if isinstance(site.owner, Skipped) else None
    columns = np.eye(size := site.prior.shape[1])
    if size > COLUMNS:  # E |x @ columns|^2 = |x|^2, and the columns of W are independent fits
        columns = np.random.default_rng(0).standard_normal((size, COLUMNS)) / COLUMNS**0.5
    folds = [fold.projected(columns) for fold in folds]
    moments = reduce(add, folds)
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
    held_out_sum = reduce(add, folds)
    current_error = held_out_sum.error_above_zero_map(site.weight @ columns, site.bias @ columns)
    return RIDGES[best] if error(best) < current_error else None
