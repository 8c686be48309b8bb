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
from attnserve.models.artifact import Artifact
from attnserve.models.example_inputs import example_inputs
from attnserve.models.onnx_files import data_file, load_model, save_model
from attnserve.models.quantized import rounds_activations
from attnserve.planning.blocks.limits import MIN_LOSSLESS_GAIN, MIN_SPEEDUP
from attnserve.runtime.external_data import weight_bytes
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
from graph_passes.errors import AttnserveError, CannotRewrite, InvalidModel, MissingExtra
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

BETTER = 1.01
"""Minimum speed-up (lower end of its interval) over the best variant so far for which a partly
fused variant is selected."""

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
    """

    attention: int
    gelu: int
    min_cosine: float
    max_error: float
    speedup: float
    speedups: Mapping[str, float] = field(default_factory=dict[str, float])
    kept: Sequence[str] = ()
    runtime: str = "onnxruntime"


def fuse_lossless(source: Artifact, path: Path, device: Device = CPU) -> FusionReport:
    """Write the fused variant of a model to ``path``, if it is equal and faster.

    For rows with at least one token that is not masked, every output must equal the original's
    within ``TOLERANCES``. Inputs and outputs keep names, types and shapes. The mean speed-up over
    ``TIMED`` must be at least ``MIN_LOSSLESS_GAIN``. At each shape the upper end of its interval
    must be at least ``MIN_SPEEDUP``. If a variant seems too slow, all are timed once more, and both
    runs decide. Attention of one kind stays unfused if that is faster by ``BETTER`` outside the
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
    forms = _forms(model, passes, path, device)
    files = {form.file: form.passes for form in forms}
    try:
        for file, variant in files.items():
            _write(model, variant, file)
        original = _Form((), source.model, device.runtime_name)
        forms, sessions = _opened([original, *forms], device)
        times: dict[str, np.ndarray] = {}
        _add_times(times, model, sessions, source.max_length)
        if _seems_slow(times):
            _add_times(times, model, sessions, source.max_length)
        row = _fastest(times)
        if (slow := _too_slow(times, row)) is not None:
            raise CannotRewrite(slow, "use the model as it is", code="fusion.slow")
        fastest = forms[row]
        plain = None
        if rounds_activations(model):
            plain = open_session(source.model, device, optimize=False)
        min_cosine, max_error = _compare(model, (sessions[0], sessions[row]), plain)
        if fastest.file != path:  # not a renamed file: it names the file of its external data
            _write(model, fastest.passes, path)
    finally:
        for file in files:
            if file != path:
                file.unlink(missing_ok=True)
                data_file(file).unlink(missing_ok=True)
    fused = _operators(fastest.passes)
    gelu = [one for one in fastest.passes if isinstance(one, FuseGelu)]
    return FusionReport(
        attention=len(fused),
        gelu=sum(len(one.targets) for one in gelu),
        min_cosine=min_cosine,
        max_error=max_error,
        speedup=_speedup(times, row).value,
        speedups={shape: speedup.value for shape, speedup in _by_shape(times, row).items()},
        kept=sorted(_operators(passes).keys() - fused.keys()),
        runtime=fastest.runtime,
    )


@dataclass(frozen=True)
class _Form:
    """An equivalent graph in a runtime.

    Attributes:
        passes: The fusion passes; none for the graph as it is.
        file: The file that it is written to.
        runtime: The name of the runtime.
    """

    passes: Sequence[RewritePass]
    file: Path
    runtime: str


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


def _forms(
    model: ir.Model, passes: Sequence[RewritePass], path: Path, device: Device
) -> list[_Form]:
    """All variants in each runtime; the graph as it is only in runtimes that are compared."""
    first, *others = _runtimes(device)
    variants = _variants(model, passes) if passes else []
    if others:
        variants = [*variants, ()]
    files = [path, *(path.with_name(f"{path.stem}.{n}{path.suffix}")
                     for n in range(1, len(variants)))]  # fmt: skip
    return [
        _Form(variant, file, runtime)
        for runtime in (first, *others)
        for variant, file in zip(variants, files, strict=True)
        if variant or runtime != first
    ]


def _write(model: ir.Model, passes: Sequence[RewritePass], path: Path) -> None:
    """Write a copy of the model after fusion passes."""
    new = model.clone()
    if passes:
        fuse(new, passes)
    save_model(new, path)


def _opened(forms: Sequence[_Form], device: Device) -> tuple[list[_Form], list[Session]]:
    """The forms that their runtimes accept, with their sessions.

    Raises:
        InvalidModel: The first runtime refuses one.
    """
    accepted: list[_Form] = []
    sessions: list[Session] = []
    for form in forms:
        try:
            session = open_session(form.file, replace(device, runtime=form.runtime))
        except InvalidModel as refused:
            if form.runtime == forms[0].runtime:
                raise
            log.info("%s", refused.what)
            continue
        accepted.append(form)
        sessions.append(session)
    return accepted, sessions


def _variants(model: ir.Model, passes: Sequence[RewritePass]) -> list[Sequence[RewritePass]]:
    """Variants: all blocks fused; then, for each kind of attention, all but that kind.

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
    variants: list[Sequence[RewritePass]] = [passes]
    for names in kinds.values():
        rest = {name: operator for name, operator in operators.items() if name not in names}
        variants.append([FuseAttention(rest), *others] if rest else others)
    return variants[:MAX_VARIANTS]


def _compare(
    model: ir.Model, pair: Sequence[Session], plain: Session | None = None
) -> tuple[float, float]:
    """(least cosine, largest error) of the second session to the first.

    Args:
        plain: The first model without graph optimization, if it rounds activations to integers.

    Raises:
        CannotRewrite: They differ, or no example inputs run.
    """
    for side in ("get_inputs", "get_outputs"):
        one, other = ([(v.name, v.type, v.shape) for v in getattr(s, side)()] for s in pair)
        if one != other:
            raise CannotRewrite(
                f"the fused model has {other}, expected {one}", DEFECT, code="fusion.interface"
            )
    outputs = [output.name for output in pair[0].get_outputs()]
    accepted = TOLERANCES[_computed_type(model)]
    if plain is not None:
        accepted = _widened(accepted, model, (pair[0], plain))
    distances: list[tuple[float, float]] = []
    for feed, expected in _runnable(model, COMPARED, pair[0], padded=True):
        for name, before, after in zip(outputs, expected, pair[1].run(None, feed), strict=True):
            cosine, error = _distance(before, after)
            if not (cosine >= accepted.cosine and error <= accepted.error):  # also if NaN
                raise CannotRewrite(
                    f"output {name!r} of the fused model differs at {_shape(feed)}: cosine "
                    f"{cosine:.7f}, error {error:.1e} of its largest number",
                    "use the model as it is",
                    code="fusion.differs",
                )
            distances.append((cosine, error))
    cosines, errors = zip(*distances, strict=True)
    return min(cosines), max(errors)


def _widened(accepted: Tolerance, model: ir.Model, pair: Sequence[Any]) -> Tolerance:
    """The tolerance of a model that rounds activations, by two sessions of the same model."""
    found = [
        _distance(before, after)
        for feed, expected in _runnable(model, COMPARED, pair[0], padded=True)
        for before, after in zip(expected, pair[1].run(None, feed), strict=True)
    ]
    cosine = 1 - MARGIN * (1 - min(cosine for cosine, _ in found))
    error = MARGIN * max(error for _, error in found)
    return Tolerance(
        max(min(accepted.cosine, cosine), LEAST_EXACT.cosine),
        min(max(accepted.error, error), LEAST_EXACT.error),
    )


def _computed_type(model: ir.Model) -> ir.DataType:
    """The floating-point type of most products."""
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


def _add_times(
    times: dict[str, np.ndarray], model: ir.Model, sessions: Sequence[Any], longest: int | None
) -> None:
    """Add rounds of all sessions, at lengths up to ``longest``."""
    lengths = {length: min(length, longest or length) for _, length in TIMED}
    timed = [Workload.of(batch, lengths[length]) for batch, length in TIMED]
    workloads = list(dict.fromkeys(timed))
    seconds = TIMED_S / len(workloads) * len(sessions) / 2
    for feed, _ in _runnable(model, workloads, sessions[0]):
        for session in sessions[1:]:
            session.run(None, feed)  # allocates, and picks kernels
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
    """The row of the variant to run: all blocks fused, unless another one is faster by ``BETTER``.

    Variants that are too slow are taken only if all are.
    """
    rows = _variants_timed(times)
    best, *others = [row for row in rows if _too_slow(times, row) is None] or rows
    for row in others:
        if _speedup(times, row, over=best).low >= BETTER:
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
