"""Prove each reading: run the graph beside ``graph_passes.reference``, and compare.

A block's own nodes are cut out at its inputs (x, y, masks, biases) and run by ONNX Runtime on
random values; the reference computes the same from the block's weights, scale and mask alone. What
disagrees beyond ``TOLERANCE`` becomes a miss, and no pass touches it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial

import numpy as np
import onnx_ir as ir

from attnserve.session import open_session
from graph_passes.attention import AttentionBlock, Mask, Miss, PositionBias
from graph_passes.errors import InvalidModel, MissingExtra
from graph_passes.find import find_attention
from graph_passes.reference import attention_reference, inputs_of
from graph_passes.shapes import Facts, bind_axes, interpret

__all__ = ["TOLERANCE", "Certified", "Reading", "certify", "read_attention"]

TOLERANCE = 1e-4
"""Largest absolute difference of probabilities and output, relative above magnitude 1."""

SHAPES = ((2, 7), (3, 4))
"""(batch, sequence) of the two runs; a graph without free axes runs twice at its own shape."""

SINGLE = ((1, 7), (1, 4))
"""Tried where ONNX Runtime refuses the first: some exporters' graphs run one sequence at a time."""


@dataclass(frozen=True, eq=False)
class Certified:
    """A block whose reading was proved, and the largest difference seen."""

    block: AttentionBlock
    max_abs_error: float


@dataclass(frozen=True, eq=False)
class Reading:
    """Everything that was read of a model."""

    certified: tuple[Certified, ...]
    misses: tuple[Miss, ...]

    @property
    def blocks(self) -> tuple[AttentionBlock, ...]:
        return tuple(certified.block for certified in self.certified)


def read_attention(model: ir.Model, *, seed: int = 0) -> Reading:
    """Find every attention of a model and certify it.

    Raises:
        MissingExtra: ONNX Runtime is not installed.
    """
    blocks, misses = find_attention(model)
    proved: list[Certified] = []

    @cache
    def facts_at(shapes: tuple[tuple[int, int], ...]) -> list[Facts]:
        return [
            interpret(model, bind_axes(model.graph, batch=batch, sequence=sequence))
            for batch, sequence in shapes
        ]

    runs = [partial(facts_at, SHAPES), partial(facts_at, SINGLE)]
    for block in blocks:
        result = certify(block, runs, dict(model.opset_imports), model.ir_version, seed=seed)
        if isinstance(result, Miss):
            misses.append(result)
        else:
            proved.append(result)
    return Reading(tuple(proved), tuple(misses))


def certify(
    block: AttentionBlock,
    runs: Sequence[Callable[[], Sequence[Facts]]],
    opsets: dict[str, int],
    ir_version: int,
    *,
    seed: int = 0,
) -> Certified | Miss:
    """Run one block and compare; a disagreement is a ``Miss``.

    Args:
        runs: Each gives the shapes to run at; the first that ONNX Runtime runs at all decides.
    """
    reasons: list[str] = []
    for group in runs:
        try:
            worst = max(
                _compare(block, facts, opsets, ir_version, np.random.default_rng(seed + index))
                for index, facts in enumerate(group())
            )
        except _UndecidedError as undecided:
            reasons.append(str(undecided))
            continue
        if worst <= TOLERANCE:
            return Certified(block, worst)
        return Miss(
            block.product,
            f"read as attention {block.name!r}, but the graph computes something else "
            f"(difference {worst:.1e}, at most {TOLERANCE:.0e} allowed)",
        )
    return Miss(block.product, f"read as attention {block.name!r}, not certified: {reasons[0]}")


class _UndecidedError(Exception):
    """The block could not be run."""


def _compare(
    block: AttentionBlock,
    facts: Facts,
    opsets: dict[str, int],
    ir_version: int,
    rng: np.random.Generator,
) -> float:
    values = {value: _random(block, value, facts, rng) for value in inputs_of(block)}
    targets = [value for value in (block.probabilities, _result(block)) if value is not None]
    got = _run(block.graph, values, targets, facts, opsets, ir_version)
    batch = _batch(block, facts)
    try:
        expected = attention_reference(block, values, batch)
    except ValueError as error:  # shapes that do not meet: the reading is not of this graph
        raise _UndecidedError(f"its reading does not fit: {error}") from error
    worst = 0.0
    for target, array in zip(targets, got, strict=True):
        if target is block.probabilities:
            want = expected.probabilities
        elif block.output is not None:
            assert expected.output is not None
            want = expected.output
        else:
            want = _laid_out_like(expected.context, array, block)
        if array.size != want.size:
            raise _UndecidedError(f"{target.name!r} has {array.shape}, expected {want.shape}")
        difference = np.abs(array.reshape(want.shape).astype(np.float64) - want)
        difference = np.where(np.isnan(difference), np.inf, difference)
        worst = max(worst, float(np.max(difference / np.maximum(1.0, np.abs(want)), initial=0.0)))
        if not np.isfinite(array).all():
            return float("inf")
    return worst


def _result(block: AttentionBlock) -> ir.Value:
    return block.context if block.output is None else block.output.output


def _batch(block: AttentionBlock, facts: Facts) -> int:
    made = facts.shape(block.q.nodes[0].outputs[0])
    laid_out = facts.shape(block.q.output)
    assert made is not None and laid_out is not None
    return int(np.prod(made[:-1])) // laid_out[-2]


def _laid_out_like(context: np.ndarray, array: np.ndarray, block: AttentionBlock) -> np.ndarray:
    """(B, S, H*V) as the graph keeps its context: heads merged, or (B, H, S, V)."""
    if array.ndim == 3 and array.shape == context.shape:
        return context
    return np.moveaxis(context.reshape(*context.shape[:2], block.num_heads, -1), 2, 1)


def _random(
    block: AttentionBlock, value: ir.Value, facts: Facts, rng: np.random.Generator
) -> np.ndarray:
    """Tokens are normal; masks are valid: at least one key is seen by every query."""
    fact = facts.known.get(value)
    if fact is None:
        raise _UndecidedError(f"the shape of {value.name!r} could not be inferred")
    kinds = [step for step in block.steps if getattr(step, "value", None) is value]
    dtype = fact.dtype.numpy()
    if not kinds:
        return rng.standard_normal(fact.shape).astype(dtype)
    seen = rng.random(fact.shape) < 0.7
    if seen.ndim:
        seen[..., 0] = True
    if isinstance(kinds[0], Mask):
        return (seen == kinds[0].keep).astype(dtype)
    assert isinstance(kinds[0], PositionBias)
    low = -1e4 if dtype.itemsize < 4 else -1e9
    return np.where(seen, rng.standard_normal(fact.shape), low).astype(dtype)


def _run(
    graph: ir.Graph,
    values: Mapping[ir.Value, np.ndarray],
    targets: Sequence[ir.Value],
    facts: Facts,
    opsets: dict[str, int],
    ir_version: int,
) -> list[np.ndarray]:
    """The targets, from the cut values and the shape program's results, without optimization."""
    cut = dict(values)
    pending, seen = list(targets), set[ir.Value]()
    while pending:
        value = pending.pop()
        if value in seen or value in cut:
            continue
        seen.add(value)
        node = value.producer()
        if node is None:
            if not value.is_initializer():
                raise _UndecidedError(f"it also depends on the graph input {value.name!r}")
            continue
        constant = facts.constant(value)
        if constant is not None and node.op_type != "Constant":
            cut[value] = constant
            continue
        pending += [parent for parent in node.inputs if parent is not None]
    try:
        part = ir.convenience.extract(graph, list(cut), list(targets))
        for inner in part.inputs:
            fact = facts.known.get(next(v for v in cut if v.name == inner.name))
            if fact is not None:
                inner.type, inner.shape = ir.TensorType(fact.dtype), ir.Shape(fact.shape)
        model = ir.Model(part, ir_version=ir_version)
        model.opset_imports.update(opsets)
        session = open_session(model, threads=1, optimize=False)
        feeds = {value.name: array for value, array in cut.items()}
        return [np.asarray(array) for array in session.run(None, feeds)]
    except MissingExtra:
        raise
    except (ValueError, InvalidModel) as error:
        raise _UndecidedError(str(error).splitlines()[0]) from error
    except Exception as error:  # onnxruntime raises a class of its own for each status
        raise _UndecidedError(f"ONNX Runtime: {str(error).splitlines()[0]}") from error
