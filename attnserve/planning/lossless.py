"""exact: a model in the operators that ONNX Runtime runs fastest, computing the same.

A plan of forms alone: attention as one operator, GELU as one, residual sums and biases in the
fewest nodes. Nothing is approximated, but sums are taken in another order, and whether they are
faster depends on the machine: so the new graph is run beside the original before it is used.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from attnserve.checks.certify import read_attention
from attnserve.context import Provider, RunContext
from attnserve.models.artifact import Artifact, load_model, save_model
from attnserve.models.example_inputs import example_inputs
from attnserve.models.opset import raise_opset
from attnserve.planning.apply import apply_plan
from attnserve.planning.plan import Plan
from attnserve.runtime.interleaved_timer import time_functions
from attnserve.runtime.session import Batch, open_session, run
from graph_passes.analysis.shapes import infer_shapes_small
from graph_passes.errors import AttnserveError, CannotRewrite
from graph_passes.matching.feed_forward import find_feed_forward
from graph_passes.passes.fold_biases import FoldBiases
from graph_passes.passes.fuse_attention import (
    IDIOMS,
    OPSETS,
    FuseAttention,
    FusedOperator,
    fusion_refusal,
)
from graph_passes.passes.fuse_gelu import FuseGelu, gelu_refusal
from graph_passes.passes.fuse_residuals import FuseResiduals

__all__ = [
    "LEAST_COSINE",
    "LEAST_GAIN",
    "MOST_ERROR",
    "FusionReport",
    "fuse_lossless",
    "fusion_plan",
]

FORMS: Sequence[FusedOperator] = ("onnx", "attention", "multi_head")
"""The first that fits is taken, in the order of their speed on the CPU provider."""

LEAST_COSINE = 1 - 1e-6
"""Of each vector of each output to the original's: rounding leaves 1 - 1e-10, a mistake less."""

MOST_ERROR = 1e-5
"""Of any number, as a share of the largest of its output."""

LEAST_GAIN = 1.02
"""Speed-up below which the original stays: less is noise."""

SLOWEST = 0.97
"""Of the original's speed at any of the timed shapes."""

COMPARED = ((1, 1), (1, 7), (3, 16), (4, 33), (2, 128))
"""(batch, sequence) of the inputs that both must agree on, in each all rows but the first padded;
those that the model refuses are left out, but not all."""

TIMED = ((1, 16), (8, 16), (1, 128))
"""(batch, sequence) at which both are timed, where the model takes them."""

TIMED_S = 0.8
"""Approximate time of all measurements."""


@dataclass(frozen=True)
class FusionReport:
    """A model that was rewritten, and how it compares with the original.

    Attributes:
        attention, gelu: How many blocks are one operator now.
        min_cosine: The least over all vectors compared.
        max_error: The largest, as a share of the largest number of the output.
        speedup: Geometric mean over the timed shapes, each by the fastest run of both.
    """

    attention: int
    gelu: int
    min_cosine: float
    max_error: float
    speedup: float


def fusion_plan(graph: ir.Model, forms: Sequence[FusedOperator] = FORMS) -> Plan:
    """Every block that can be, as one operator; each attention in the first of ``forms`` that fits.

    Raises:
        CannotRewrite: There is none.
    """
    facts, opsets = infer_shapes_small(graph, batch=2, sequence=5), dict(graph.opset_imports)
    with suppress(CannotRewrite):
        newest = graph.clone()
        raise_opset(newest, max(OPSETS.values()))
        opsets = dict(newest.opset_imports)
    reading = read_attention(graph)
    reasons = [miss.reason for miss in reading.unmatched]
    chosen: dict[str, FusedOperator] = {}
    for block in reading.blocks:
        if block.graph is not graph.graph or block.idiom in IDIOMS.values():
            continue
        for form in forms:
            found = fusion_refusal(block, form, facts, opsets)
            if found is None:
                chosen[block.name] = form
                break
            reasons.append(found.reason)
    gelu = [
        block.name
        for block in find_feed_forward(graph)
        if block.graph is graph.graph and gelu_refusal(block, facts, graph.opset_imports) is None
    ]
    if not chosen and not gelu:
        raise CannotRewrite(
            f"no block can be written in a faster operator: {(reasons or ['none was found'])[0]}"
        )
    return Plan.of([FuseAttention(chosen), FuseGelu(gelu), FoldBiases(), FuseResiduals()])


def fuse_lossless(
    source: Artifact, path: Path, *, provider: Provider = "cpu", threads: int = 0
) -> FusionReport:
    """Write a model in its fastest exact operators to ``path``, once that is known to be worth it.

    The law: for rows that have a token which is not masked, every output is the original's within
    ``LEAST_COSINE`` and ``MOST_ERROR``; inputs and outputs have the same names, types and shapes;
    over ``TIMED`` it runs at least ``LEAST_GAIN`` times as fast, at none of these shapes slower
    than ``SLOWEST``. What is compared and timed is the file that was written.

    Args:
        source: It is left as it is.
        path: An .onnx file that is written, or replaced; where an error is raised it may hold
            anything. Weights over 2 GB lie beside it.
        threads: Of a run.

    Raises:
        CannotRewrite: Nothing can be rewritten, it would not be the same, or it is not faster.
        AttnserveError: The model cannot be read, or does not run.
    """
    graph = load_model(source)
    plan = fusion_plan(graph)
    try:
        return _tried(source, graph, plan, path, provider, threads)
    except AttnserveError:
        older = fusion_plan(graph, [form for form in FORMS if form not in OPSETS])
        if older.targets(FuseAttention) == plan.targets(FuseAttention):
            raise
        # Not every ONNX Runtime has a kernel, or a fast one, for the newest operator.
        return _tried(source, graph, older, path, provider, threads)


def _tried(
    source: Artifact, graph: ir.Model, plan: Plan, path: Path, provider: Provider, threads: int
) -> FusionReport:
    """One plan; see ``fuse_lossless``."""
    new = graph.clone()
    apply_plan(plan, new, RunContext(), original=graph, fit=False)
    save_model(new, path)
    pair = tuple(
        open_session(file, provider=provider, threads=threads) for file in (source.model, path)
    )
    min_cosine, max_error = _compare(graph, pair)
    return FusionReport(
        len(plan.targets(FuseAttention)),
        len(plan.targets(FuseGelu)),
        min_cosine,
        max_error,
        _speedup(graph, pair),
    )


def _compare(graph: ir.Model, pair: Sequence[Any]) -> tuple[float, float]:
    """(least cosine, largest error) of the second session to the first.

    Raises:
        CannotRewrite: They are too far apart, or there is nothing to compare them on.
    """
    for told in ("get_inputs", "get_outputs"):
        one, other = ([(v.name, v.type, v.shape) for v in getattr(s, told)()] for s in pair)
        if one != other:
            raise CannotRewrite(f"it would have {other}, expected {one}")
    outputs = [output.name for output in pair[0].get_outputs()]
    distances: list[tuple[float, float]] = []
    for feed, expected in _runnable(graph, COMPARED, pair[0], padded=True):
        found = run(pair[1], feed)
        for name, before, after in zip(outputs, expected, found, strict=True):
            cosine, error = _distance(before, after)
            if not (cosine >= LEAST_COSINE and error <= MOST_ERROR):  # NaN is neither
                raise CannotRewrite(
                    f"its output {name!r} would be another at {_shape(feed)}: cosine {cosine:.7f},"
                    f" off by {error:.1e} of its largest number"
                )
            distances.append((cosine, error))
    cosines, errors = zip(*distances, strict=True)
    return min(cosines), max(errors)


def _distance(before: np.ndarray, after: np.ndarray) -> tuple[float, float]:
    """(least cosine over the last axis, largest difference over the largest number)."""
    if before.shape != after.shape:
        return 0.0, np.inf
    if np.array_equal(before, after):
        return 1.0, 0.0
    width = before.shape[-1] if before.ndim else 1
    a, b = (array.astype(np.float64).reshape(-1, width) for array in (before, after))
    with np.errstate(all="ignore"):  # what is infinite or no number is too far from anything
        norms = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
        cosines = np.where(norms > 0, (a * b).sum(axis=1) / norms, (a == b).all(axis=1))
        return float(cosines.min()), float(np.abs(a - b).max() / np.abs(a).max())


def _speedup(graph: ir.Model, pair: Sequence[Any]) -> float:
    """Of the second session over the first, timed in turns.

    Raises:
        CannotRewrite: It is not faster.
    """
    gains: dict[str, float] = {}
    for feed, _ in _runnable(graph, TIMED, pair[0]):
        run(pair[1], feed)  # allocates, and picks kernels
        gains[_shape(feed)] = _gain(pair, feed, TIMED_S / len(TIMED))
    mean = float(np.exp(np.mean(np.log(list(gains.values())))))
    slowest = min(gains, key=gains.__getitem__)
    if mean < LEAST_GAIN:
        raise CannotRewrite(f"it would run {mean:.2f}x as fast: at least {LEAST_GAIN}x is worth it")
    if gains[slowest] < SLOWEST:
        raise CannotRewrite(f"it would run {gains[slowest]:.2f}x as fast at {slowest}")
    return mean


def _gain(pair: Sequence[Any], feed: Batch, seconds: float) -> float:
    """The time of the first session over that of the second, by the fastest run of each."""
    times = time_functions([partial(run, session, feed) for session in pair], seconds)
    return float(times[0].min() / times[1].min())


def _runnable(
    graph: ir.Model, shapes: Sequence[tuple[int, int]], session: Any, *, padded: bool = False
) -> Iterator[tuple[Batch, list[np.ndarray]]]:
    """Example inputs and the session's outputs, at those shapes that the model takes.

    Raises:
        CannotRewrite: It takes none.
    """
    taken, why = 0, ""
    for seed, (batch, sequence) in enumerate(shapes):
        try:
            feed = example_inputs(graph, batch, sequence, seed, padded=padded)
            outputs = run(session, feed)
        except AttnserveError as error:  # fixed axes, fewer positions, inputs without examples
            why = why or error.what
            continue
        taken += 1
        yield feed, outputs
    if not taken:
        raise CannotRewrite(f"it runs on no example inputs to compare it on: {why}")


def _shape(feed: Batch) -> str:
    """The shape of the first input."""
    return " x ".join(map(str, next(iter(feed.values())).shape))
