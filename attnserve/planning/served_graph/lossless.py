"""Choose the graph that serving runs: the original, or one with fused operators.

``fusion`` rewrites the graph. Its speed depends on the machine, and sums are computed in another
order. The new model is therefore compared with the original and timed before it is used.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import onnx_ir as ir

from attnserve.context import CPU, Device
from attnserve.fusion import (
    ATTENTION_OPERATORS,
    fused_operators,
    fusion_passes,
    older_operators,
)
from attnserve.models.artifact import Artifact
from attnserve.models.lineage import search_of
from attnserve.models.onnx_files import load_model
from attnserve.models.quantized import rounds_activations
from attnserve.planning.served_graph.equality import PLAUSIBLE, Reference, runnable
from attnserve.planning.served_graph.fusion_report import FusionReport, NotFaster
from attnserve.planning.served_graph.timing import (
    ShapeTimer,
    fastest,
    lengths_of,
    speed_refusal,
    time_variants,
    timed_workloads,
)
from attnserve.planning.served_graph.variants import (
    MANY_VARIANTS_BYTES,
    Variant,
    list_variants,
)
from attnserve.runtime.by_length import RowRuntimes
from attnserve.runtime.external_data import weight_bytes
from attnserve.runtime.interface import AS_SERVED, Batch, LongRows, Session
from attnserve.runtime.interleaved_timer import time_shapes
from attnserve.runtime.session import open_session, runtimes_of
from attnserve.runtime.times import Times
from graph_passes.errors import AttnserveError, CannotRewrite
from graph_passes.passes.base import RewritePass
from graph_passes.passes.fuse_gelu import FuseGelu

__all__ = ["fuse_lossless"]


def fuse_lossless(
    source: Artifact, path: Path, device: Device = CPU, timer: ShapeTimer = time_shapes
) -> FusionReport:
    """Write the fused variant of a model to ``path``, if it is equal and faster.

    For rows with at least one token that is not masked, every output must equal the original's
    within ``TOLERANCES``. Inputs and outputs keep names, types and shapes. The mean speed-up over
    ``timing.TIMED``, without shapes at which the original still runs, must be at least
    ``MIN_LOSSLESS_GAIN``. At each length the upper end of its interval must be at least
    ``MIN_SPEEDUP``. If a variant seems too slow at a shape, all are timed once more, and both runs
    decide. Attention of one kind stays unfused if that is faster by ``MIN_GAIN`` outside the
    interval. The comparison and the timing use the written file.

    With the runtime ``AUTO``, all installed runtimes are compared. The reference is the model in
    the runtime that it states (``runtime_of``), or in that of the search that verified it. Another
    runtime in which it was verified has its own reference (``Artifact.other_runtimes``). The
    fastest runtime is chosen, or one for short and one for long rows. If the default runtime does
    not give the outputs of the reference, the result need not be faster.

    Args:
        source: The model; it is not changed.
        path: An .onnx file to write or replace; its content is undefined if an error is raised.
            Weights over 2 GB are stored beside it.
        device: Device of the timed sessions.
        timer: Times the sessions.

    Raises:
        NotFaster: The result is not faster.
        CannotRewrite: Nothing can be fused, or the result differs.
        AttnserveError: The model cannot be read, or does not run.
    """
    model = load_model(source, in_place=True)
    try:
        passes = fusion_passes(model, device.provider)
    except CannotRewrite:
        if len(runtimes_of(model, device)) == 1:
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
    timer: ShapeTimer,
) -> FusionReport:
    """Write the fastest fused variant, and check it; see ``fuse_lossless``."""
    runtimes = _reference_first(source, model, runtimes_of(model, device))
    variants = list_variants(model, passes, path, runtimes)
    files = {variant.file: variant for variant in variants}
    stated = replace(device, runtime=runtimes[0])
    try:
        for variant in files.values():
            variant.write(model)
        references = _references(source, model, runtimes, device)
        reference = references[stated.runtime]
        workloads = timed_workloads(source.max_length)
        inputs = [feed for feed, _ in runnable(model, workloads, reference.session)]
        equal, refused = _open_equal(variants, references, inputs, stated)
        unfused = [variant for variant in equal if variant.is_file_in(device.runtime_name)]
        original = unfused[0].session if unfused else reference.session
        original_times, variant_times = _time(original, equal, inputs, timer)
        choices = [
            _Served(variant, times, None)
            for variant, times in zip(equal, variant_times, strict=True)
        ]
        lengths = lengths_of(inputs)
        if weight_bytes(model) <= MANY_VARIANTS_BYTES:  # each session holds the weights
            verified = [*map(RowRuntimes.parse, source.other_runtimes)]
            choices += _splits(choices, lengths, verified)
        times = [choice.times for choice in choices]
        served = choices[fastest(original_times, times, lengths)]
        # Without a result the file is served in the default runtime, which must be equal then.
        may_refuse = len(runtimes) == 1 or bool(unfused)
        if may_refuse and (refusal := speed_refusal(original_times, served.times, lengths)):
            error = refusal.error("", "use the model as it is", area="fusion")
            raise NotFaster(error.what, error.fix, code=error.code, refused=refused)
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
    """A variant whose outputs equal those of a reference, with the largest differences."""

    variant: Variant
    reference: Reference
    session: Session
    min_cosine: float
    max_error: float

    def is_file_in(self, runtime: str) -> bool:
        """Whether the variant is the unchanged file in this runtime."""
        return not self.variant.passes and self.variant.runtime == runtime


def _time(
    original: Session,
    equal: Sequence[_EqualVariant],
    inputs: Sequence[Batch],
    timer: ShapeTimer,
) -> tuple[Times[str], list[Times[str]]]:
    """``time_variants``, with the original among the variants timed once."""
    sessions = [variant.session for variant in equal if variant.session is not original]
    original_times, session_times = time_variants(original, sessions, inputs, timer)
    times = dict(zip(map(id, sessions), session_times, strict=True))
    return original_times, [times.get(id(variant.session), original_times) for variant in equal]


class _Served(NamedTuple):
    """A way to serve a model: a variant, and the runtime for long rows if it differs."""

    equal: _EqualVariant
    times: Times[str]
    long_rows: LongRows | None


def _splits(
    singles: Sequence[_Served], lengths: Mapping[str, int], verified: Collection[RowRuntimes]
) -> list[_Served]:
    """One file in two runtimes each, one for short and one for long rows.

    Args:
        singles: The files in one runtime.
        lengths: See ``lengths_of``.
        verified: The pairs of runtimes whose outputs may differ.
    """
    pairs: list[_Served] = []
    for short, long in itertools.permutations(singles, 2):
        variants = short.equal.variant, long.equal.variant
        is_equal = short.equal.reference is long.equal.reference
        may_differ = RowRuntimes(*(variant.runtime for variant in variants)) in verified
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


def _reference_first(source: Artifact, model: ir.Model, runtimes: Sequence[str]) -> Sequence[str]:
    """The runtimes, first the one in which the outputs of the model are trusted.

    If the model rounds activations, its outputs differ between runtimes by more than rounding in
    floating point. They are trusted in the runtime in which the search measured its quality.
    """
    search = search_of(source.lineage[-1]) if source.lineage else None
    if search is None or search.goal.runtime not in runtimes or not rounds_activations(model):
        return runtimes
    return list(dict.fromkeys([search.goal.runtime, *runtimes]))


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


def _open_equal(
    variants: Sequence[Variant],
    references: Mapping[str, Reference],
    inputs: Sequence[Batch],
    stated: Device,
) -> tuple[list[_EqualVariant], dict[str, str]]:
    """Open, run and compare all variants: those that are equal, and why others are refused.

    Args:
        references: The originals whose outputs a variant must equal; see ``_references``.
        inputs: The inputs that are timed.
        stated: The device, in the runtime of the reference.

    Raises:
        CannotRewrite: A variant in the runtime of the reference differs.
        AttnserveError: That runtime refuses or fails to run one.
    """
    equal: list[_EqualVariant] = []
    refused: dict[str, str] = {}
    for variant in variants:
        try:
            reference = references.get(variant.runtime, references[stated.runtime])
            session = reference.session
            if variant.passes or variant.runtime not in references:
                device = replace(stated, runtime=variant.runtime)
                session = open_session(variant.file, device, AS_SERVED)
            differences = reference.compare(session)
            for feed in inputs:
                session.run(None, feed)  # allocates, and picks kernels
        except AttnserveError as error:
            if variant.runtime == stated.runtime:
                raise
            refused[variant.runtime] = error.what
        else:
            equal.append(_EqualVariant(variant, reference, session, *differences))
    return equal, refused
