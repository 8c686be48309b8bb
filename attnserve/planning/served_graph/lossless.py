"""Choose the graph that serving runs: the original, or one with fused operators.

``fusion`` rewrites the graph. Its speed depends on the machine, and sums are computed in another
order. The new model is therefore compared with the original and timed before it is used.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import onnx_ir as ir

from attnserve.context import CPU, Device, ModelTimer, TimedModel
from attnserve.fusion import (
    ATTENTION_OPERATORS,
    fused_operators,
    fusion_passes,
    older_operators,
)
from attnserve.models.artifact import Artifact
from attnserve.models.onnx_files import load_model
from attnserve.planning.served_graph.equality import PLAUSIBLE, Reference, runnable, shape_name
from attnserve.planning.served_graph.fusion_report import FusionReport
from attnserve.planning.served_graph.timing import (
    fastest,
    speed_refusal,
    time_variants,
    timed_workloads,
)
from attnserve.planning.served_graph.variants import (
    MANY_VARIANTS_BYTES,
    Variant,
    compared_runtimes,
    list_variants,
)
from attnserve.runtime.by_length import by_length
from attnserve.runtime.external_data import weight_bytes
from attnserve.runtime.interface import AS_SERVED, Batch, LongRows, row_length
from attnserve.runtime.session import open_session
from attnserve.runtime.times import Times
from graph_passes.errors import AttnserveError, CannotRewrite
from graph_passes.passes.base import RewritePass
from graph_passes.passes.fuse_gelu import FuseGelu

__all__ = ["fuse_lossless"]

log = logging.getLogger(__name__)


def fuse_lossless(
    source: Artifact, path: Path, device: Device = CPU, timer: ModelTimer | None = None
) -> FusionReport:
    """Write the fused variant of a model to ``path``, if it is equal and faster.

    For rows with at least one token that is not masked, every output must equal the original's
    within ``TOLERANCES``. Inputs and outputs keep names, types and shapes. The mean speed-up over
    ``timing.TIMED``, without shapes at which the original still runs, must be at least
    ``MIN_LOSSLESS_GAIN``. At each shape the upper end of its interval must be at least
    ``MIN_SPEEDUP``. If a variant seems too slow at a shape, all are timed once more, and both runs
    decide. Attention of one kind stays unfused if that is faster by ``MIN_GAIN`` outside the
    interval. The comparison and the timing use the written file.

    With the runtime ``AUTO``, all installed runtimes are compared. The reference is the model in
    the runtime that it states (``runtime_of``); a runtime in which it was verified has one of
    its own (``Artifact.other_runtimes``). The fastest runtime is chosen, or one for short and
    one for long rows. If the default runtime does not give the outputs of the reference, the result
    need not be faster.

    Args:
        source: The model; it is not changed.
        path: An .onnx file to write or replace; its content is undefined if an error is raised.
            Weights over 2 GB are stored beside it.
        device: Device of the sessions.
        timer: Replaces the measurement.

    Raises:
        CannotRewrite: Nothing can be fused, or the result differs or is not faster.
        AttnserveError: The model cannot be read, or does not run.
    """
    model = load_model(source, in_place=True)
    try:
        passes = fusion_passes(model, device.provider)
    except CannotRewrite:
        if len(compared_runtimes(model, device)) == 1:
            raise
        passes = ()  # another runtime may be faster
    try:
        return _fuse_and_check(source, model, passes, path, device, timer)
    except AttnserveError:
        operators = older_operators(ATTENTION_OPERATORS[device.provider])
        older = fusion_passes(model, device.provider, operators) if passes else ()
        if fused_operators(older) == fused_operators(passes):
            raise
    # The second attempt is not in the handler: the exception keeps the sessions of the first one.
    return _fuse_and_check(source, model, older, path, device, timer)


def _fuse_and_check(
    source: Artifact,
    model: ir.Model,
    passes: Sequence[RewritePass],
    path: Path,
    device: Device,
    timer: ModelTimer | None,
) -> FusionReport:
    """Write the fastest fused variant, and check it; see ``fuse_lossless``."""
    runtimes = compared_runtimes(model, device)
    variants = list_variants(model, passes, path, runtimes)
    files = {variant.file: variant for variant in variants}
    stated = replace(device, runtime=runtimes[0])
    try:
        for variant in files.values():
            variant.write(model)
        equal, refused, inputs = _compare(source, model, variants, stated)
        # The unchanged file in the default runtime, unless that one differs or is not compared.
        unfused = next((each for each in equal if each.is_file_in(device.runtime_name)), None)
        original = (
            TimedModel(source.model, inputs, stated)
            if unfused is None
            else unfused.timed(inputs, stated)
        )
        others = [each.timed(inputs, stated) for each in equal if each is not unfused]
        original_times, *other_times = time_variants([original, *others], timer)
        times = iter(other_times)
        choices = [
            _Served(each, original_times if each is unfused else next(times), None)
            for each in equal
        ]
        if weight_bytes(model) <= MANY_VARIANTS_BYTES:  # each session holds the weights
            choices += _splits(choices, inputs, source.other_runtimes)
        served = choices[fastest(original_times, [choice.times for choice in choices])]
        # Without a result the file is served in the default runtime, which must be equal then.
        may_refuse = len(runtimes) == 1 or unfused is not None
        if may_refuse and (refusal := speed_refusal(original_times, served.times)):
            raise refusal.error("", "use the model as it is", area="fusion")
        variant = served.equal.variant
        if variant.file != path:  # not renamed: it names the file of its external data
            replace(variant, file=path).write(model)
    finally:
        for file, file_variant in files.items():
            if file != path:
                file_variant.remove()
    fused = fused_operators(variant.passes)
    gelu_passes = [rewrite for rewrite in variant.passes if isinstance(rewrite, FuseGelu)]
    return FusionReport(
        attention=len(fused),
        gelu=sum(len(gelu_pass.targets) for gelu_pass in gelu_passes),
        min_cosine=served.equal.min_cosine,
        max_error=served.equal.max_error,
        speedup=served.times.speedup_over(original_times).value,
        speedups={
            shape: speedup.value
            for shape, speedup in served.times.speedups_over(original_times).items()
        },
        kept=sorted(fused_operators(passes).keys() - fused.keys()),
        runtime=variant.runtime,
        long_rows=served.long_rows,
        refused=refused,
    )


@dataclass(frozen=True)
class _EqualVariant:
    """A variant whose outputs equal those of the original.

    Attributes:
        reference: The runtime of the original that it equals.
        min_cosine, max_error: The largest differences.
    """

    variant: Variant
    reference: str
    min_cosine: float
    max_error: float

    def is_file_in(self, runtime: str) -> bool:
        """Whether the variant is the unchanged file in this runtime."""
        return not self.variant.passes and self.variant.runtime == runtime

    def timed(self, inputs: Sequence[Batch], device: Device) -> TimedModel:
        """The variant in its runtime, to time at these inputs."""
        return TimedModel(self.variant.file, inputs, replace(device, runtime=self.variant.runtime))


class _Served(NamedTuple):
    """A way to serve a model: a variant, and the runtime for long rows if it differs."""

    equal: _EqualVariant
    times: Times[str]
    long_rows: LongRows | None


def _splits(
    singles: Sequence[_Served], inputs: Sequence[Batch], verified: Collection[str]
) -> list[_Served]:
    """One file in two runtimes each, one for short and one for long rows.

    Args:
        singles: The files in one runtime.
        verified: The pairs of runtimes whose outputs may differ.
    """
    pairs: list[_Served] = []
    lengths = {shape_name(feed): row_length(feed) or 0 for feed in inputs}
    for short, long in itertools.permutations(singles, 2):
        variants = short.equal.variant, long.equal.variant
        is_equal = short.equal.reference == long.equal.reference
        may_differ = by_length(*(variant.runtime for variant in variants)) in verified
        if variants[0].file == variants[1].file and (is_equal or may_differ):
            equal = replace(
                short.equal,
                min_cosine=min(short.equal.min_cosine, long.equal.min_cosine),
                max_error=max(short.equal.max_error, long.equal.max_error),
            )
            for above, times in short.times.splits(long.times, lengths).items():
                rows = LongRows(above, long.equal.variant.runtime)
                pairs.append(_Served(equal, times, rows))
    return pairs


def _compare(
    source: Artifact, model: ir.Model, variants: Sequence[Variant], stated: Device
) -> tuple[list[_EqualVariant], dict[str, str], list[Batch]]:
    """Run all variants, and compare them with the original.

    Args:
        stated: The device, in the runtime that the model states.

    Returns:
        The variants that are equal, why other runtimes are refused, and the inputs to time.

    Raises:
        CannotRewrite: A variant in the stated runtime differs.
        AttnserveError: That runtime refuses or fails to run one.
    """
    runtimes = dict.fromkeys(variant.runtime for variant in variants)
    references = _references(source, model, list(runtimes), stated)
    workloads = timed_workloads(source.max_length)
    inputs = [feed for feed, _ in runnable(model, workloads, references[stated.runtime].session)]
    equal: list[_EqualVariant] = []
    refused: dict[str, str] = {}
    for variant in variants:
        runtime = variant.runtime
        reference_runtime = runtime if runtime in references else stated.runtime
        reference = references[reference_runtime]
        try:
            session = reference.session
            if variant.passes or runtime not in references:
                device = replace(stated, runtime=runtime)
                session = open_session(variant.file, device, AS_SERVED)
            differences = reference.compare(session)
            for feed in inputs:
                session.run(None, feed)
        except AttnserveError as error:
            if runtime == stated.runtime:
                raise
            refused[runtime] = error.what
            log.info("%s: %s", runtime, error.what)
        else:
            equal.append(_EqualVariant(variant, reference_runtime, *differences))
    return equal, refused, inputs


def _references(
    source: Artifact, model: ir.Model, runtimes: Sequence[str], device: Device
) -> dict[str, Reference]:
    """The original in the first runtime, and in each other runtime in which it was verified.

    Outputs of other runtimes may differ from those of the first by more than rounding. If they
    differ by far, as on another CPU, that runtime has no reference of its own.
    """
    first, *others = runtimes
    references = {first: Reference.of(source.model, model, replace(device, runtime=first))}
    for runtime in source.other_runtimes.keys() & set(others):
        with suppress(AttnserveError):  # ``_open_equal`` says why it does not run
            other = Reference.of(source.model, model, replace(device, runtime=runtime))
            replace(references[first], accepted=PLAUSIBLE).compare(other.session)
            references[runtime] = other
    return references
