"""The job of a command: a model, its data, and its target workloads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Self

import numpy as np
import onnx_ir as ir

from attnserve.checks.certify import MatchReport, read_attention
from attnserve.checks.compare import compare
from attnserve.checks.finite_weights import require_finite_weights
from attnserve.checks.quality import QualityMeter, check_measure
from attnserve.context import AUTO, DEFAULT_CONTEXT, RunContext
from attnserve.data.datasets import Dataset, load_inputs, require_rows
from attnserve.data.lengths import length_bounds, middle_length, spread_lengths
from attnserve.data.splits import LEAST_SEARCHED
from attnserve.literals import Precision, SearchMeasure, Split
from attnserve.models.artifact import Artifact
from attnserve.models.measured import Fidelity
from attnserve.models.rows import with_fixed_sizes
from attnserve.options import Data, Goal, Lengths, Target
from attnserve.precision.convert import context_for
from attnserve.precision.schemes import SCHEMES
from attnserve.runtime.checkpoint import Checkpoints
from attnserve.runtime.external_data import weight_bytes
from attnserve.runtime.interface import Batch
from attnserve.runtime.session import OpenNew, selectable_runtimes
from graph_passes.analysis.axes import has_cache
from graph_passes.analysis.workload import Workload
from graph_passes.errors import InvalidArgument

__all__ = ["Job", "served_lengths", "served_workloads"]

ONE_RUNTIME_BYTES = 600_000_000
"""Weight size above which a model is timed in one runtime only."""

DEFAULT_LENGTHS = (16, 128, 512)
"""Timed lengths without data and without a requested length."""

LIST_BATCH = 8
"""Default batch size for lists of documents: concurrent runs share the documents of a query. On two
cores, a list of 30 is served in four runs (``service.engine.row_queue``)."""

DEFAULT_LENGTH = 128
"""Length at which costs are reported without data and without a requested length."""


@dataclass(frozen=True, eq=False)
class Job:
    """The inputs of a command, which all steps share and none changes.

    Attributes:
        artifact: The original on disk.
        original: The graph of the original.
        data: Calibration data; without it, factors are computed from the weights alone.
        others: Data of ``also_prove``, by file name.
        tokenizer: The given tokenizer, which replaces the artifact's.
        measure: The measure of quality.
        target: The precision and the target workloads.
        runtimes: The runtimes from which serving selects; empty for that of the context.
        checkpoints: The files from which the command continues after an interruption.
    """

    artifact: Artifact
    original: ir.Model
    data: Dataset | None = None
    others: Sequence[tuple[str, Dataset]] = ()
    tokenizer: Path | None = None
    measure: SearchMeasure = "auto"
    target: Target = Target()
    context: RunContext = DEFAULT_CONTEXT
    runtimes: Sequence[str] = ()
    checkpoints: Checkpoints = field(default_factory=Checkpoints)

    @staticmethod
    def read(
        artifact: Artifact,
        original: ir.Model,
        options: Data = Data(),
        target: Target = Target(),
        *,
        measure: SearchMeasure = "auto",
        joined: Lengths | None = None,
        context: RunContext = DEFAULT_CONTEXT,
    ) -> Job:
        """Read the data of a job, and check its options.

        Args:
            joined: The lengths to which short calibration texts are joined; see ``load_inputs``.

        Raises:
            InvalidArgument: The phase of the target needs a cache, which the model does not have,
                or the runtime does not compute the precision.
            InvalidData: A file cannot be used.
            InvalidModel: A weight is not finite.
        """
        runtimes = selectable_runtimes(context.device)
        context = context_for(target.precision, context)
        require_finite_weights(original)
        load = partial(load_inputs, model=original, artifact=artifact, tokenizer=options.tokenizer)
        data = None
        if options.calib:
            data = load(options.calib, weights=options.calib_weights, sequence=joined)
            data = data.of_queries() if measure == "index" else data
        check_measure(measure, data)
        other_data = [(path.name, load(path, split=False)) for path in options.also_prove]
        served_workloads(original, target, data)  # raises errors before long work
        return Job(
            artifact,
            original,
            data,
            other_data,
            options.tokenizer,
            measure,
            target,
            context,
            runtimes,
        )

    @staticmethod
    def for_search(
        artifact: Artifact,
        original: ir.Model,
        goal: Goal,
        options: Data,
        target: Target = Target(),
        context: RunContext = DEFAULT_CONTEXT,
    ) -> Job:
        """Read the data of a job that searches for a goal; see ``Job.read``.

        Raises:
            InvalidData: The rows are too few for the parts to fit, to choose and to verify.
        """
        # With `measure` score, the lengths are those of the task's data.
        joined = None if goal.measure == "score" else target.sequence
        job = Job.read(
            artifact,
            original,
            options,
            target,
            measure=goal.measure,
            joined=joined,
            context=context,
        )
        require_rows(
            job.required_data, LEAST_SEARCHED, fix="give more rows in `calib`", code="data.few_rows"
        )
        return job

    @property
    def required_data(self) -> Dataset:
        """The data, which the checks of options and of steps have required."""
        assert self.data is not None
        return self.data

    @property
    def calibration(self) -> Sequence[Batch]:
        """The rows to fit; none without data."""
        return () if self.data is None else self.data.fit

    @property
    def lengths(self) -> Lengths:
        """The lengths of the target workloads."""
        if self.target.sequence is not None:
            return self.target.sequence
        return DEFAULT_LENGTH if self.data is None else self.data.length

    @cached_property
    def matches(self) -> MatchReport:
        """The certified attention of the original."""
        return read_attention(self.original, seed=self.context.seed)

    @cached_property
    def requested_workloads(self) -> tuple[Workload, ...]:
        """The target workloads, for example (1, 16), (1, 128), (1, 512).

        A model with fixed axes may refuse them.
        """
        return served_workloads(self.original, self.target, self.data)

    @cached_property
    def workloads(self) -> tuple[Workload, ...]:
        """The requested workloads that the model runs: fixed axes have the sizes of the model."""
        fixed = (with_fixed_sizes(self.original, workload) for workload in self.requested_workloads)
        return tuple(dict.fromkeys(fixed))

    @cached_property
    def counted_workload(self) -> Workload:
        """The workload at which MACs are counted: the middle one of the requested lengths."""
        middle = middle_length(self.lengths)
        requested = self.requested_workloads[0]
        workload = Workload.of(requested.batch, middle, requested.phase)
        return with_fixed_sizes(self.original, workload)

    @property
    def longest_length(self) -> int:
        """The longest length of the target workloads."""
        middle = middle_length(self.lengths)
        counted_length = self.counted_workload.length
        return length_bounds(self.lengths if counted_length == middle else counted_length)[1]

    def with_precision(self, precision: Precision) -> Self:
        """The job in another precision, on the runtime that computes it (``context_for``)."""
        return replace(
            self,
            target=self.target.model_copy(update={"precision": precision}),
            context=context_for(precision, self.context),
        )

    def runtime_for(self, precision: Precision) -> str:
        """The runtime in which a search times models in a precision.

        It is the one that computes the precision fully. If every runtime does, it is the default
        one, which other programs use too.
        """
        default = next(iter(self.runtimes), self.context.device.runtime_name)
        return SCHEMES[precision].runtime or default

    def runtimes_for(self, precision: Precision) -> Sequence[str]:
        """The runtimes in which serving may run a model in a precision, that of a search first.

        Another runtime than that of the scheme computes floating-point weights in float32. A large
        model is timed in one runtime only, because each session holds its weights.
        """
        scheme, first = SCHEMES[precision], self.runtime_for(precision)
        is_large = weight_bytes(self.original) > ONE_RUNTIME_BYTES
        if is_large or (scheme.runtime and scheme.bits is None):
            return [first]
        return list(dict.fromkeys([first, *self.runtimes]))

    def labeled(self, label: str) -> Self:
        """The job with a label before the names of its stages."""
        return replace(self, context=self.context.labeled(label))

    def on_all_threads(self) -> Self:
        """The job on as many threads as the runtime chooses, for work that is not timed."""
        return replace(self, context=self.context.on_all_threads())

    def meter(self, *, data: Dataset | None = None, split: Split = "data") -> QualityMeter:
        """Create a meter that compares outputs with those of the original."""
        return QualityMeter(
            self.original, self.artifact, measure=self.measure, data=data, split=split
        )

    def compare_held_out(
        self,
        model: ir.Model,
        batches: Sequence[Batch],
        split: Split = "verify",
        *,
        open_new: OpenNew | None = None,
    ) -> Fidelity:
        """Compare a model with the original on held-out rows.

        Args:
            batches: Held-out rows of ``data``.
            split: The part of the data; see ``Quality``.
            open_new: Opens the model; without it, it runs on the device of the context.

        Raises:
            InvalidModel: The models do not have the same inputs and outputs.
            CheckFailed: The outputs are not finite.
        """
        data = self.required_data
        meter = self.meter(data=data, split=split)
        return compare(
            self.original,
            model,
            batches,
            data.source.file,
            meter=meter,
            context=self.context,
            open_new=open_new,
        )


def served_workloads(model: ir.Model, target: Target, data: Dataset | None) -> tuple[Workload, ...]:
    """The target workloads, with the batch size and the phase of the target or their defaults.

    ``served_lengths`` gives the lengths.

    Raises:
        InvalidArgument: The phase needs a cache, which the model does not have.
    """
    phase = target.phase
    cached = has_cache(model.graph)
    if phase is None:
        for_tokens = target.precision != AUTO and SCHEMES[target.precision].for_tokens
        phase = "token" if cached and for_tokens else "sequence"
    if phase != "sequence" and not cached:
        raise InvalidArgument(
            f"`phase` is {phase}, but the model has no cache",
            "leave `phase` out, or export the model with a cache",
            code="search.phase",
        )
    batch = target.batch or (LIST_BATCH if data is not None and data.has_lists else 1)
    lengths = served_lengths(target.sequence, data)
    return tuple(Workload.of(batch, length, phase) for length in lengths)


def served_lengths(sequence: Lengths | None, data: Dataset | None) -> tuple[int, ...]:
    """The lengths of the target workloads in tokens.

    The lengths are the requested ones, else the medians of four equal parts of the data by length,
    else ``DEFAULT_LENGTHS``.
    """
    if sequence is not None:
        return spread_lengths(sequence)
    if data is None or not data.lengths:
        return DEFAULT_LENGTHS
    quartiles = np.quantile(data.lengths, (0.125, 0.375, 0.625, 0.875)).round().astype(int)
    return tuple(dict.fromkeys(max(int(length), 1) for length in quartiles))
