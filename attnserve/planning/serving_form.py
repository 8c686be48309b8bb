"""Choose the graph that serving runs: the original, or one with fused operators.

``fusion`` rewrites the graph. Its speed depends on the machine, and sums are computed in another
order. The new model is therefore compared with the original and timed before it is used.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from attnserve.context import AUTO, CPU, Device
from attnserve.fusion import ATTENTION_OPERATORS, DEFECT, fuse, fusion_passes
from attnserve.limits import MIN_GAIN, MIN_LOSSLESS_GAIN, MIN_SPEEDUP
from attnserve.models.artifact import Artifact
from attnserve.models.example_inputs import example_inputs
from attnserve.models.onnx_files import data_file, load_model, save_model
from attnserve.models.quantized import rounds_activations
from attnserve.runtime.external_data import weight_bytes
from attnserve.runtime.inference_precision import computes_in_bfloat16
from attnserve.runtime.interface import Batch, Session
from attnserve.runtime.interleaved_timer import (
    InterleavedTimer,
    Speedup,
    paired_speedup,
    time_functions,
)
from attnserve.runtime.session import RUNTIMES, open_session
from graph_passes.analysis.shapes import infer_shapes_small
from graph_passes.analysis.workload import Workload
from graph_passes.emit.fused_attention import OPSETS, FusedOperator
from graph_passes.errors import AttnserveError, CannotRewrite, MissingExtra
from graph_passes.matching.find import find_attention
from graph_passes.passes.base import RewritePass
from graph_passes.passes.fuse_attention import FuseAttention
from graph_passes.passes.fuse_gelu import FuseGelu

__all__ = ["TOLERANCES", "FusionReport", "Tolerance", "fuse_lossless"]

log = logging.getLogger(__name__)

PRODUCTS = frozenset({"MatMul", "Gemm", "Attention", "MultiHeadAttention"})
"""Operators whose output has the type in which the model computes."""


@dataclass(frozen=True)
class Tolerance:
    """Maximum difference between the outputs of a fused model and of the original.

    Attributes:
        cosine: The lowest cosine of an output vector to the original's.
        error: The highest error of a number, relative to the largest one of its output.
    """

    cosine: float
    error: float


TOLERANCES: Mapping[ir.DataType, Tolerance] = {
    ir.DataType.FLOAT: Tolerance(1 - 1e-6, 1e-5),
    ir.DataType.FLOAT16: Tolerance(1 - 3e-5, 1e-2),
    ir.DataType.BFLOAT16: Tolerance(1 - 2e-3, 6e-2),
}
"""Tolerances by the element type of most products. For all-MiniLM-L6-v2 with fused attention and
norms on an H100, rounding gives 1 - cosine of 1e-12, 4e-6 and 4e-4, and errors of 6e-7, 1e-3 and
8e-3."""

LEAST_EXACT = Tolerance(0.9, 0.2)
"""Limit of the tolerance for models whose activations are rounded to integers.

Rounding in floating point moves few activations to the next integer, which changes an output by
much or not at all. The tolerance is therefore ``MARGIN`` times the difference of the original to
itself without the graph optimization of ONNX Runtime. For all-MiniLM-L6-v2 in integers of ONNX
Runtime (dynamic; static with QDQ; int4) on a CPU, at 15 inputs, that is a least cosine of 0.993,
0.938 and 0.999, and an error of 0.05, 0.10 and 0.02. Fused operators differ by as much or less, and
float32 by at least three times as much."""

MARGIN = 2.0

COMPARED = tuple(Workload.of(*shape) for shape in ((1, 1), (1, 7), (3, 16), (4, 33), (2, 128)))
"""(batch, sequence) of the compared inputs; in each, all rows but the first are padded. Shapes that
the model refuses are left out, but at least one must run."""

TIMED = ((1, 16), (8, 16), (1, 128), (1, 384))
"""(batch, sequence) at which the variants are timed, if the model accepts them; no length is above
the longest that is served. Fused attention gains most at the longest."""

TIMED_S = 1.6
"""Approximate time of all measurements of two variants."""

MANY_VARIANTS_BYTES = 300_000_000
"""Weight size above which only the fully fused variant is built, because each variant is a copy."""

MAX_VARIANTS = 4
"""Maximum number of fused variants that are timed; each is a session with its own weights."""

TIMER = InterleavedTimer(sample_seconds=5e-4, min_rounds=8, max_rounds=80)
"""Large models run for seconds at the longest shape."""

Times = Mapping[str, np.ndarray]
"""Milliseconds (sessions, rounds) by shape. Row 0: the file; row 1: all blocks fused."""


@dataclass(frozen=True, kw_only=True)
class FusionReport:
    """A fused model in comparison with the original.

    Attributes:
        attention, gelu: The numbers of fused blocks.
        min_cosine: The lowest cosine of all compared vectors.
        max_error: The largest error, relative to the largest number of the output.
        speedup: The geometric mean over the timed shapes.
        speedups: Speed-up at each shape.
        kept: Attention blocks that could be fused but are faster unfused.
        runtime: The name of the runtime that runs it.
        refused: Why another runtime does not run it, by its name.
    """

    attention: int
    gelu: int
    min_cosine: float
    max_error: float
    speedup: float
    speedups: Mapping[str, float] = field(default_factory=dict[str, float])
    kept: Sequence[str] = ()
    runtime: str = "onnxruntime"
    refused: Mapping[str, str] = field(default_factory=dict[str, str])


def fuse_lossless(source: Artifact, path: Path, device: Device = CPU) -> FusionReport:
    """Write the fused variant of a model to ``path``, if it is equal and faster.

    For rows with at least one token that is not masked, every output must equal the original's
    within ``TOLERANCES``. Inputs and outputs keep names, types and shapes. The mean speed-up over
    ``TIMED`` must be at least ``MIN_LOSSLESS_GAIN``. At each shape the upper end of its interval
    must be at least ``MIN_SPEEDUP``. If a variant seems too slow, all are timed once more, and both
    runs decide. Attention of one kind stays unfused if that is faster by ``MIN_GAIN`` outside the
    interval. The written file is what is compared and timed.

    Args:
        source: The model; it is not changed.
        path: An .onnx file to write or replace; its content is undefined if an error is raised.
            Weights over 2 GB are stored beside it.
        device: Device of the timed sessions.

    Raises:
        CannotRewrite: Nothing can be fused, or the result differs or is not faster.
        AttnserveError: The model cannot be read, or does not run.
    """
    model = load_model(source, in_place=True)
    try:
        passes = fusion_passes(model, device.provider)
    except CannotRewrite:
        if len(_runtimes(device)) == 1:
            raise
        passes = ()  # another runtime may be faster
    try:
        return _fuse_and_check(source, model, passes, path, device)
    except AttnserveError:
        operators: list[FusedOperator] = [
            name for name in ATTENTION_OPERATORS[device.provider] if name not in OPSETS
        ]
        older = fusion_passes(model, device.provider, operators) if passes else ()
        if _operators(older) == _operators(passes):
            raise
    # Some versions of ONNX Runtime have no fast kernel for the newest operator. Not in the handler:
    # its exception keeps the sessions of the first attempt.
    return _fuse_and_check(source, model, older, path, device)


def _operators(passes: Sequence[RewritePass]) -> dict[str, FusedOperator]:
    """The operator of each fused attention block."""
    fused = (one.targets for one in passes if isinstance(one, FuseAttention))
    return {name: operator for targets in fused for name, operator in targets.items()}


def _fuse_and_check(
    source: Artifact,
    model: ir.Model,
    passes: Sequence[RewritePass],
    path: Path,
    device: Device,
) -> FusionReport:
    """Write the fastest fused variant, and check it; see ``fuse_lossless``."""
    variants = _variants(model, passes, path, device)
    files = {variant.file: variant.passes for variant in variants}
    try:
        for file, fusion in files.items():
            _write(model, fusion, file)
        checks = _Checks.run(source, model, variants, device)
        times: dict[str, np.ndarray] = {}
        _add_times(times, checks)
        if _seems_slow(times):
            _add_times(times, checks)
        row = _fastest(times)
        if (slow := _too_slow(times, row)) is not None:
            raise CannotRewrite(slow, "use the model as it is", code="fusion.slow")
        fastest = checks.equal[row - 1]
        if fastest.variant.file != path:  # not renamed: it names the file of its external data
            _write(model, fastest.variant.passes, path)
    finally:
        for file in files:
            if file != path:
                file.unlink(missing_ok=True)
                data_file(file).unlink(missing_ok=True)
    fused = _operators(fastest.variant.passes)
    gelu = [one for one in fastest.variant.passes if isinstance(one, FuseGelu)]
    return FusionReport(
        attention=len(fused),
        gelu=sum(len(one.targets) for one in gelu),
        min_cosine=fastest.min_cosine,
        max_error=fastest.max_error,
        speedup=_speedup(times, row).value,
        speedups={shape: speedup.value for shape, speedup in _by_shape(times, row).items()},
        kept=sorted(_operators(passes).keys() - fused.keys()),
        runtime=fastest.variant.runtime,
        refused=checks.refused,
    )


@dataclass(frozen=True)
class _Variant:
    """An equivalent graph in a runtime.

    Attributes:
        passes: The fusion passes; none for the graph as it is.
        file: The file that it is written to.
        runtime: The name of the runtime.
    """

    passes: Sequence[RewritePass]
    file: Path
    runtime: str


@dataclass(frozen=True)
class _EqualVariant:
    """A variant whose outputs equal the original's, with the largest differences."""

    variant: _Variant
    session: Session
    min_cosine: float
    max_error: float


@dataclass(frozen=True)
class _Checks:
    """The variants of a model, after each ran on all inputs.

    Attributes:
        original: The session of the model as it is.
        inputs: The inputs that are timed.
        equal: The variants that ran, with equal outputs.
        refused: Why a runtime runs no variant, or not all, by its name.
    """

    original: Session
    inputs: Sequence[Batch]
    equal: Sequence[_EqualVariant]
    refused: Mapping[str, str]

    @classmethod
    def run(
        cls, source: Artifact, model: ir.Model, variants: Sequence[_Variant], device: Device
    ) -> _Checks:
        """Open, run and compare all variants.

        Raises:
            CannotRewrite: A variant of the first runtime differs, or no runtime runs any.
            AttnserveError: The first runtime refuses or fails to run one.
        """
        first = device.runtime_name
        original = open_session(source.model, replace(device, runtime=first))
        compared = list(_runnable(model, COMPARED, original, padded=True))
        accepted = TOLERANCES[_computed_type(model)]
        if rounds_activations(model):
            plain = open_session(source.model, replace(device, runtime=first), optimize=False)
            accepted = _widened(accepted, compared, plain)
        inputs = [feed for feed, _ in _runnable(model, _timed(source.max_length), original)]
        equal: list[_EqualVariant] = []
        refused: dict[str, str] = {}
        for variant in variants:
            try:
                session = open_session(variant.file, replace(device, runtime=variant.runtime))
                differences = _compare(original, session, compared, accepted)
                for feed in inputs:
                    session.run(None, feed)  # allocates, and picks kernels
            except AttnserveError as error:
                if variant.runtime == first:
                    raise
                refused[variant.runtime] = error.what
                log.info("%s: %s", variant.runtime, error.what)
            else:
                equal.append(_EqualVariant(variant, session, *differences))
        if not equal:
            why = "; ".join(f"{name}: {reason}" for name, reason in refused.items())
            raise CannotRewrite(why, "use the model as it is", code="fusion.refused")
        return cls(original, inputs, equal, refused)


def _runtimes(device: Device) -> list[str]:
    """The names of the runtimes to compare: that of the device, or all that are installed."""
    if device.runtime != AUTO or device.provider != "cpu":
        return [device.runtime_name]
    installed: list[str] = []
    for runtime in RUNTIMES:
        with suppress(MissingExtra):
            runtime.version()
            installed.append(runtime.name)
    return installed


def _variants(
    model: ir.Model, passes: Sequence[RewritePass], path: Path, device: Device
) -> list[_Variant]:
    """All variants in each runtime; the graph as it is only in runtimes that are compared."""
    first, *others = _runtimes(device)
    fusions = _fusions(model, passes) if passes else []
    if others:
        fusions = [*fusions, ()]
    names = (f"{path.stem}.{number}{path.suffix}" for number in range(1, len(fusions)))
    files = [path, *map(path.with_name, names)]
    return [
        _Variant(fusion, file, runtime)
        for runtime in (first, *others)
        for fusion, file in zip(fusions, files, strict=True)
        if fusion or runtime != first
    ]


def _write(model: ir.Model, passes: Sequence[RewritePass], path: Path) -> None:
    """Write a copy of the model after fusion passes."""
    new = model.clone()
    if passes:
        fuse(new, passes)
    save_model(new, path)


def _fusions(model: ir.Model, passes: Sequence[RewritePass]) -> list[Sequence[RewritePass]]:
    """Passes of variants: all blocks fused; then, for each kind of attention, all but that kind.

    Attention of a kind has the same operator, heads and widths, and so the same speed.
    """
    operators = _operators(passes)
    if weight_bytes(model) > MANY_VARIANTS_BYTES:
        return [passes]
    kinds: dict[Hashable, list[str]] = {}
    for block in find_attention(model).blocks:
        if block.name in operators:
            sizes = (block.num_heads, block.head_size, block.v_head_size, block.input_size)
            kinds.setdefault((operators[block.name], block.kind, *sizes), []).append(block.name)
    others = [one for one in passes if not isinstance(one, FuseAttention)]
    fusions: list[Sequence[RewritePass]] = [passes]
    for names in kinds.values():
        rest = {name: operator for name, operator in operators.items() if name not in names}
        fusions.append([FuseAttention(rest), *others] if rest else others)
    return fusions[:MAX_VARIANTS]


Runs = Sequence[tuple[Batch, Sequence[np.ndarray]]]
"""Inputs, each with the outputs of the original."""


def _compare(
    original: Session, session: Session, compared: Runs, accepted: Tolerance
) -> tuple[float, float]:
    """(least cosine, largest error) of a session to the original.

    Raises:
        CannotRewrite: They differ.
    """
    for side in ("get_inputs", "get_outputs"):
        expected, found = (
            [(value.name, value.type, value.shape) for value in getattr(each, side)()]
            for each in (original, session)
        )
        if expected != found:
            raise CannotRewrite(
                f"the fused model has {found}, expected {expected}",
                DEFECT,
                code="fusion.interface",
            )
    outputs = [output.name for output in original.get_outputs()]
    differences: list[tuple[float, float]] = []
    for feed, expected in compared:
        for name, before, after in zip(outputs, expected, session.run(None, feed), strict=True):
            cosine, error = _distance(before, after)
            if not (cosine >= accepted.cosine and error <= accepted.error):  # also if NaN
                raise CannotRewrite(
                    f"output {name!r} of the fused model differs at {_shape(feed)}: cosine "
                    f"{cosine:.7f}, error {error:.1e} of its largest number",
                    "use the model as it is",
                    code="fusion.differs",
                )
            differences.append((cosine, error))
    cosines, errors = zip(*differences, strict=True)
    return min(cosines), max(errors)


def _widened(accepted: Tolerance, compared: Runs, plain: Session) -> Tolerance:
    """The tolerance of a model that rounds activations.

    Args:
        plain: The original without graph optimization.
    """
    found = [
        _distance(before, after)
        for feed, expected in compared
        for before, after in zip(expected, plain.run(None, feed), strict=True)
    ]
    cosine = 1 - MARGIN * (1 - min(cosine for cosine, _ in found))
    error = MARGIN * max(error for _, error in found)
    return Tolerance(
        max(min(accepted.cosine, cosine), LEAST_EXACT.cosine),
        min(max(accepted.error, error), LEAST_EXACT.error),
    )


def _computed_type(model: ir.Model) -> ir.DataType:
    """The floating-point type of most products, of the runtime that computes least exactly."""
    if computes_in_bfloat16(model):
        return ir.DataType.BFLOAT16
    known = infer_shapes_small(model, batch=2, sequence=5).known
    types = Counter(
        known[node.outputs[0]].dtype
        for node in model.graph.all_nodes()
        if node.op_type in PRODUCTS and node.outputs[0] in known
    )
    return max(TOLERANCES, key=lambda dtype: types[dtype])


def _distance(before: np.ndarray, after: np.ndarray) -> tuple[float, float]:
    """(least cosine over the last axis, largest difference over the largest number)."""
    if before.shape != after.shape:
        return 0.0, np.inf
    if np.array_equal(before, after):
        return 1.0, 0.0
    width = before.shape[-1] if before.ndim else 1
    a, b = (array.astype(np.float64).reshape(-1, width) for array in (before, after))
    with np.errstate(all="ignore"):  # infinity and NaN fail the check
        norms = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
        cosines = np.where(norms > 0, (a * b).sum(axis=1) / norms, (a == b).all(axis=1))
        return float(cosines.min()), float(np.abs(a - b).max() / np.abs(a).max())


def _timed(longest: int | None) -> list[Workload]:
    """The shapes of ``TIMED``, with lengths up to ``longest``."""
    shapes = [(batch, min(length, longest or length)) for batch, length in TIMED]
    return [Workload.of(*shape) for shape in dict.fromkeys(shapes)]


def _add_times(times: dict[str, np.ndarray], checks: _Checks) -> None:
    """Add rounds of the original and all variants."""
    sessions = [checks.original, *(equal.session for equal in checks.equal)]
    seconds = TIMED_S / len(checks.inputs) * len(sessions) / 2
    for feed in checks.inputs:
        functions = [partial(session.run, None, feed) for session in sessions]
        rounds = time_functions(functions, seconds, TIMER)
        before = times.get(_shape(feed), rounds[:, :0])
        times[_shape(feed)] = np.hstack([before, rounds])


def _variants_timed(times: Times) -> range:
    """The rows of fused variants."""
    return range(1, len(next(iter(times.values()))))


def _speedup(times: Times, row: int, over: int = 0) -> Speedup:
    """The speed-up of a variant over another one, over all shapes."""
    return paired_speedup(
        [each[over] for each in times.values()], [each[row] for each in times.values()]
    )


def _by_shape(times: Times, row: int) -> dict[str, Speedup]:
    """The speed-up of a variant over the original, at each shape."""
    return {shape: _speedup({shape: each}, row) for shape, each in times.items()}


def _fastest(times: Times) -> int:
    """The row of the variant to run: all blocks fused, unless another is faster by ``MIN_GAIN``.

    Variants that are too slow are taken only if all are.
    """
    rows = _variants_timed(times)
    best, *others = [row for row in rows if _too_slow(times, row) is None] or rows
    for row in others:
        if _speedup(times, row, over=best).low >= MIN_GAIN:
            best = row
    return best


def _seems_slow(times: Times) -> bool:
    """Whether a variant is below a limit, inside or outside of its interval."""
    return any(
        _speedup(times, row).value < MIN_LOSSLESS_GAIN
        or min(speedup.value for speedup in _by_shape(times, row).values()) < MIN_SPEEDUP
        for row in _variants_timed(times)
    )


def _too_slow(times: Times, row: int) -> str | None:
    """Why a variant is not faster than the original; None if it is."""
    mean = _speedup(times, row).value
    if mean < MIN_LOSSLESS_GAIN:
        return f"the fused model runs {mean:.2f}x as fast, expected at least {MIN_LOSSLESS_GAIN}x"
    for shape, speedup in _by_shape(times, row).items():
        if speedup.high < MIN_SPEEDUP:
            return (
                f"the fused model runs {speedup.value:.2f}x as fast at {shape}, expected at least "
                f"{MIN_SPEEDUP}x"
            )
    return None


def _runnable(
    model: ir.Model, workloads: Sequence[Workload], session: Any, *, padded: bool = False
) -> Iterator[tuple[Batch, list[np.ndarray]]]:
    """Example inputs and the session's outputs, at the workloads that the model accepts.

    Raises:
        CannotRewrite: It accepts none.
    """
    taken, why = 0, ""
    for seed, workload in enumerate(workloads):
        try:
            feed = example_inputs(model, workload, seed, padded=padded)
            outputs = session.run(None, feed)
        except AttnserveError as error:  # fixed axes, fewer positions, inputs without examples
            why = why or error.what
            continue
        taken += 1
        yield feed, outputs
    if not taken:
        raise CannotRewrite(
            f"the model runs on no example inputs: {why}",
            "use the model as it is",
            code="fusion.no_inputs",
        )


def _shape(feed: Batch) -> str:
    """The shape of the first input."""
    return " x ".join(map(str, next(iter(feed.values())).shape))
