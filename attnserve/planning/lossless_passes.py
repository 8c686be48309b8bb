"""Lossless operator fusion: write a model in the operators that ONNX Runtime runs fastest.

Attention and GELU become one operator each, residual sums and biases use the fewest nodes. Nothing
is approximated, but sums are computed in another order, and the speed-up depends on the machine.
The new model is therefore compared with the original and timed before it is used.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from attnserve.checks.certify import read_attention
from attnserve.context import Provider, RunContext
from attnserve.models.artifact import Artifact
from attnserve.models.example_inputs import example_inputs
from attnserve.models.onnx_files import load_model, save_model
from attnserve.models.opset import raise_opset
from attnserve.planning.apply import DEFECT, apply_plan
from attnserve.planning.plan import Plan
from attnserve.planning.search.limits import MIN_LOSSLESS_GAIN, MIN_SPEEDUP
from attnserve.runtime.interleaved_timer import InterleavedTimer, time_functions
from attnserve.runtime.session import Batch, open_session, run
from graph_passes.analysis.shapes import infer_shapes_small
from graph_passes.emit.fused_attention import OPSETS, FusedOperator
from graph_passes.errors import AttnserveError, CannotRewrite
from graph_passes.passes.base import RewritePass
from graph_passes.passes.fold_biases import FoldBiases
from graph_passes.passes.fuse_attention import IDIOMS, FuseAttention, fusion_refusal
from graph_passes.passes.fuse_gelu import FuseGelu, fusible_gelus
from graph_passes.passes.fuse_residuals import FuseResiduals
from graph_passes.passes.fuse_skip_norm import FuseSkipNorm

__all__ = [
    "TOLERANCES",
    "FusionReport",
    "Tolerance",
    "fuse_lossless",
    "fusion_plan",
]

FORMS: Mapping[Provider, Sequence[FusedOperator]] = {
    "cpu": ("onnx", "attention", "multi_head"),
    "cuda": ("attention", "multi_head", "onnx"),
}
"""Attention operators, fastest first; the first that applies is used."""

PRODUCTS = frozenset({"MatMul", "Gemm", "Attention", "MultiHeadAttention"})
"""Operators whose output has the type in which the model computes."""

RESIDUALS: Mapping[Provider, type[RewritePass]] = {"cpu": FuseResiduals, "cuda": FuseSkipNorm}
"""The fastest form of residual additions."""


@dataclass(frozen=True)
class Tolerance:
    """How far the outputs of a fused model may be from the original's.

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
"""By the type of most products. For all-MiniLM-L6-v2 with fused attention and norms on an H100,
rounding gives 1 - cosine of 1e-12, 4e-6 and 4e-4, and errors of 6e-7, 1e-3 and 8e-3."""

COMPARED = ((1, 1), (1, 7), (3, 16), (4, 33), (2, 128))
"""(batch, sequence) of the compared inputs; in each, all rows but the first are padded. Shapes that
the model refuses are left out, but at least one must run."""

TIMED = ((1, 16), (8, 16), (1, 128), (1, 384))
"""(batch, sequence) at which both models are timed, if the model accepts them. Fused attention
gains most at the longest."""

TIMED_S = 0.8
"""Approximate time of all measurements."""

TIMER = InterleavedTimer(sample_seconds=5e-4, min_rounds=4, max_rounds=80)
"""Large models run for seconds at the longest shape."""


@dataclass(frozen=True)
class FusionReport:
    """A fused model in comparison with the original.

    Attributes:
        attention, gelu: The numbers of fused blocks.
        min_cosine: The lowest cosine of all compared vectors.
        max_error: The largest error, relative to the largest number of the output.
        speedup: The geometric mean over the timed shapes, each by the fastest runs.
    """

    attention: int
    gelu: int
    min_cosine: float
    max_error: float
    speedup: float


def fusion_plan(
    model: ir.Model,
    provider: Provider = "cpu",
    forms: Sequence[FusedOperator] | None = None,
) -> Plan:
    """The plan that fuses every possible block.

    Args:
        forms: Attention operators, of which the first that applies is used (None: ``FORMS`` of the
            provider).

    Raises:
        CannotRewrite: No block can be fused.
    """
    shapes, opsets = infer_shapes_small(model, batch=2, sequence=5), dict(model.opset_imports)
    with suppress(CannotRewrite):
        newest = model.clone()
        raise_opset(newest, max(OPSETS.values()))
        opsets = dict(newest.opset_imports)
    report = read_attention(model)
    reasons = [unmatched.reason for unmatched in report.unmatched]
    chosen: dict[str, FusedOperator] = {}
    for block in report.blocks:
        if block.graph is not model.graph or block.idiom in IDIOMS.values():
            continue
        for form in forms or FORMS[provider]:
            refusal = fusion_refusal(block, form, shapes, opsets)
            if refusal is None:
                chosen[block.name] = form
                break
            reasons.append(refusal.reason)
    gelu = fusible_gelus(model)
    if not chosen and not gelu:
        raise CannotRewrite(
            f"no block can be written in a faster operator: {(reasons or ['none was found'])[0]}",
            "use the model as it is",
            code="fusion.nothing",
        )
    return Plan.of([FuseAttention(chosen), FuseGelu(gelu), FoldBiases(), RESIDUALS[provider]()])


def fuse_lossless(
    source: Artifact, path: Path, *, provider: Provider = "cpu", threads: int = 0
) -> FusionReport:
    """Write the fused form of a model to ``path``, if it is equal and faster.

    For rows with at least one token that is not masked, every output must equal the original's
    within ``TOLERANCES``. Inputs and outputs keep names, types and shapes. The mean speed-up over
    ``TIMED`` must be at least ``MIN_LOSSLESS_GAIN``, and at least ``MIN_SPEEDUP`` at each shape.
    The written file itself is compared and timed.

    Args:
        source: The model; it is not changed.
        path: An .onnx file to write or replace; its content is undefined if an error is raised.
            Weights over 2 GB are stored beside it.
        threads: Intra-op threads of the timed sessions.

    Raises:
        CannotRewrite: Nothing can be fused, or the result differs or is not faster.
        AttnserveError: The model cannot be read, or does not run.
    """
    model = load_model(source, in_place=True)
    plan = fusion_plan(model, provider)
    try:
        return _fuse_and_check(source, model, plan, path, provider, threads)
    except AttnserveError:
        forms: list[FusedOperator] = [form for form in FORMS[provider] if form not in OPSETS]
        older = fusion_plan(model, provider, forms)
        if older.targets(FuseAttention) == plan.targets(FuseAttention):
            raise
    # Some versions of ONNX Runtime have no fast kernel for the newest operator. Not in the handler:
    # its exception keeps the sessions of the first attempt.
    return _fuse_and_check(source, model, older, path, provider, threads)


def _fuse_and_check(
    source: Artifact, model: ir.Model, plan: Plan, path: Path, provider: Provider, threads: int
) -> FusionReport:
    """Apply one plan, and check the result; see ``fuse_lossless``."""
    new = model.clone()
    apply_plan(plan, new, RunContext(), original=model, fit=False)
    save_model(new, path)
    del new  # only its file is used
    pair = tuple(
        open_session(file, provider=provider, threads=threads) for file in (source.model, path)
    )
    min_cosine, max_error = _compare(model, pair)
    return FusionReport(
        len(plan.targets(FuseAttention)),
        len(plan.targets(FuseGelu)),
        min_cosine,
        max_error,
        _speedup(model, pair),
    )


def _compare(model: ir.Model, pair: Sequence[Any]) -> tuple[float, float]:
    """(least cosine, largest error) of the second session to the first.

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
    distances: list[tuple[float, float]] = []
    for feed, expected in _runnable(model, COMPARED, pair[0], padded=True):
        for name, before, after in zip(outputs, expected, run(pair[1], feed), strict=True):
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


def _speedup(model: ir.Model, pair: Sequence[Any]) -> float:
    """The speed-up of the second session over the first.

    Raises:
        CannotRewrite: It is too low.
    """
    gains: dict[str, float] = {}
    for feed, _ in _runnable(model, TIMED, pair[0]):
        run(pair[1], feed)  # allocates, and picks kernels
        gains[_shape(feed)] = _gain(pair, feed, TIMED_S / len(TIMED))
    mean = float(np.exp(np.mean(np.log(list(gains.values())))))
    slowest = min(gains, key=gains.__getitem__)
    if mean < MIN_LOSSLESS_GAIN:
        raise CannotRewrite(
            f"the fused model runs {mean:.2f}x as fast, expected at least {MIN_LOSSLESS_GAIN}x",
            "use the model as it is",
            code="fusion.slow",
        )
    if gains[slowest] < MIN_SPEEDUP:
        raise CannotRewrite(
            f"the fused model runs {gains[slowest]:.2f}x as fast at {slowest}, expected at least "
            f"{MIN_SPEEDUP}x",
            "use the model as it is",
            code="fusion.slow",
        )
    return mean


def _gain(pair: Sequence[Any], feed: Batch, seconds: float) -> float:
    """The time of the first session over that of the second, by the fastest run of each."""
    times = time_functions([partial(run, session, feed) for session in pair], seconds, TIMER)
    return float(times[0].min() / times[1].min())


def _runnable(
    model: ir.Model, shapes: Sequence[tuple[int, int]], session: Any, *, padded: bool = False
) -> Iterator[tuple[Batch, list[np.ndarray]]]:
    """Example inputs and the session's outputs, at the shapes that the model accepts.

    Raises:
        CannotRewrite: It accepts none.
    """
    taken, why = 0, ""
    for seed, (batch, sequence) in enumerate(shapes):
        try:
            feed = example_inputs(model, batch, sequence, seed, padded=padded)
            outputs = run(session, feed)
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
