"""Certify matched attention blocks against ``graph_passes.reference``.

The nodes of a block are extracted at its inputs (x, y, masks, biases) and run in ONNX Runtime on
random values. The reference computes the same from the matched weights, scale and mask. A block
whose difference exceeds ``TOLERANCE`` is reported as unmatched, and plans leave it unchanged.

Products with quantized weights are not run: their outputs are random values, and the operand of a
quantized output projection is compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx.reference import ReferenceEvaluator

from attnserve.checks.block_graph import UndecidedError, block_graph, single
from attnserve.context import ONE_THREAD
from attnserve.runtime.interface import SessionOptions
from attnserve.runtime.session import open_session
from graph_passes.analyses import Analyses
from graph_passes.analysis.axes import named_axes
from graph_passes.analysis.shapes import ShapeInfo, TensorInfo, infer_shapes_small
from graph_passes.blocks import (
    AttentionBlock,
    FullLengths,
    KeyLengths,
    KeyMask,
    LogitStep,
    Mask,
    PositionBias,
    Unmatched,
)
from graph_passes.errors import InvalidModel, MissingExtra
from graph_passes.matching.find import find_attention
from graph_passes.reference import attention_reference, inputs_of, logits_reference, softmax

__all__ = [
    "TOLERANCE",
    "Certified",
    "MatchReport",
    "certify",
    "read_attention",
    "require_attention",
]

TOLERANCE = 1e-4
"""Largest absolute difference of probabilities and output, relative above magnitude 1."""

SHAPES = ((2, 7), (3, 4))
"""(batch, sequence) of the two runs; a graph with static axes runs twice at its own shape.

Sequence axes with different names (queries and memory, past and present) have different lengths at
first. If the block does not run, they have equal lengths.
"""

SINGLE = ((1, 7), (1, 4))
"""Shapes for graphs that run only with a batch size of 1."""

SPREAD = 2.0
"""Target standard deviation of the logits, reached in ``ROUNDS`` steps because biases are fixed."""
ROUNDS = 3

IR_VERSION = 10
"""Maximum IR version of extracted graphs, which all supported versions of ONNX Runtime read."""

MASKED = 1e9
"""The value subtracted from the logits of masked keys."""


Evaluate = Callable[[ir.Model, Mapping[str, np.ndarray]], list[np.ndarray]]
"""Runs a small model. ONNX's reference evaluator is used if ONNX Runtime has no kernel."""


@dataclass(frozen=True, eq=False)
class Certified:
    """A certified block and its largest difference from the reference."""

    block: AttentionBlock
    max_abs_error: float


@dataclass(frozen=True, eq=False)
class MatchReport:
    """The certified blocks of a model, and the attention that was not matched."""

    certified: tuple[Certified, ...]
    unmatched: tuple[Unmatched, ...]

    @property
    def blocks(self) -> tuple[AttentionBlock, ...]:
        return tuple(certified.block for certified in self.certified)

    def failure(self, block: AttentionBlock) -> Unmatched | None:
        """The failed certification of a matched block; None if it is certified."""
        return next((each for each in self.unmatched if each.node is block.product), None)


def require_attention(matches: MatchReport) -> None:
    """Refuse a model without certified attention blocks.

    Raises:
        InvalidModel: No block is certified; the message has the reasons of up to two blocks.
    """
    if matches.blocks:
        return
    reasons = "; ".join(
        f"{m.node.name or m.node.op_type}: {m.reason}" for m in matches.unmatched[:2]
    )
    raise InvalidModel(
        "no attention was found"
        + (f" ({reasons[:400]})" if reasons else ": no softmax has scores of tokens as input"),
        "`attnserve inspect` lists the matched blocks, and why others were not matched",
        code="model.no_attention",
    )


def read_attention(model: ir.Model, *, seed: int = 0) -> MatchReport:
    """Find and certify all attention blocks of a model.

    Raises:
        MissingExtra: ONNX Runtime is not installed.
    """
    blocks, unmatched = Analyses.of(model).get(find_attention)
    failures = list(unmatched)
    certified: list[Certified] = []

    @cache
    def info_at(
        shapes: tuple[tuple[int, int], ...], distinct_lengths: bool = False
    ) -> list[ShapeInfo]:
        return [
            infer_shapes_small(
                model, batch=batch, sequence=sequence, distinct_lengths=distinct_lengths
            )
            for batch, sequence in shapes
        ]

    lengths = [name for name, position in named_axes(model.graph).items() if position > 0]
    runs = [
        *([(partial(info_at, SHAPES, True), onnx_runtime)] if len(lengths) > 1 else []),
        (partial(info_at, SHAPES), onnx_runtime),
        (partial(info_at, SINGLE), onnx_runtime),
        (partial(info_at, SHAPES), onnx_reference),
    ]
    for block in blocks:
        result = certify(model, block, runs, seed=seed)
        if isinstance(result, Unmatched):
            failures.append(result)
        else:
            certified.append(result)
    return MatchReport(tuple(certified), tuple(failures))


def certify(
    model: ir.Model,
    block: AttentionBlock,
    runs: Sequence[tuple[Callable[[], Sequence[ShapeInfo]], Evaluate]],
    *,
    seed: int = 0,
) -> Certified | Unmatched:
    """Run one block of ``model`` and compare it with the reference.

    A block that differs from the reference gives ``Unmatched``.

    Args:
        runs: Shapes and evaluators; the first pair that can run the block decides.
    """
    reasons: list[str] = []
    for group, evaluate in runs:
        try:
            max_error = max(
                _compare(model, block, info, evaluate, np.random.default_rng(seed + index))
                for index, info in enumerate(group())
            )
        except UndecidedError as undecided:
            reasons.append(str(undecided))
            continue
        if max_error <= TOLERANCE:
            return Certified(block, max_error)
        return Unmatched(
            block.product,
            f"read as attention {block.name!r}, but the graph computes something else "
            f"(difference {max_error:.1e}, at most {TOLERANCE:.0e} allowed)",
        )
    return Unmatched(
        block.product, f"read as attention {block.name!r}, not certified: {reasons[0]}"
    )


def _compare(
    model: ir.Model,
    block: AttentionBlock,
    info: ShapeInfo,
    evaluate: Evaluate,
    rng: np.random.Generator,
) -> float:
    """The largest difference at one shape, relative above magnitude 1; infinite if it is NaN."""
    batch = _batch(block, info)
    values = {value: _random(block, value, info, rng) for value in inputs_of(block)}
    output = block.context if block.output is None else block.output.output
    outputs = [v for v in (block.probabilities, output) if v is not None and v not in values]
    try:
        _moderate(block, values, batch)
        reference = attention_reference(block, values, batch)
    except (ValueError, IndexError) as error:  # shapes of the match and the graph differ
        raise UndecidedError(f"the reference cannot be computed: {error}") from error
    max_error = 0.0
    results = _run(model, block_graph(values, outputs, info, model.opset_imports), evaluate)
    for value, array in zip(outputs, results, strict=True):
        if value is block.probabilities:
            want = reference.probabilities
        elif block.output is not None:
            assert reference.output is not None
            want = reference.output
            want = want.swapaxes(0, 1) if block.output.sequence_first else want
        else:
            want = _laid_out_like(reference.context, array, block)
        if array.size != want.size:
            raise UndecidedError(f"{value.name!r} has {array.shape}, expected {want.shape}")
        difference = np.abs(array.reshape(want.shape).astype(np.float64) - want)
        if not np.isfinite(difference).all():
            return float("inf")
        max_error = max(
            max_error, float(np.max(difference / np.maximum(1.0, np.abs(want)), initial=0.0))
        )
    return max_error


def _moderate(block: AttentionBlock, values: dict[ir.Value, np.ndarray], batch: int) -> None:
    """Scale the tokens so that the logits have a standard deviation of ``SPREAD``.

    Large logits amplify rounding errors of float32. Small logits give uniform probabilities, which
    hide a wrong order of heads.
    """
    tokens = {block.q.source, block.k.source}
    for _ in range(ROUNDS if block.q.num_heads else 0):
        spread = float(np.std(logits_reference(block, values, batch)))
        if not np.isfinite(spread) or spread == 0.0:
            return
        factor = np.sqrt(SPREAD / spread)
        if 0.9 < factor < 1.1:
            return
        for value in tokens:
            values[value] = (values[value] * factor).astype(values[value].dtype)


def _batch(block: AttentionBlock, info: ShapeInfo) -> int:
    def shape_of(value: ir.Value) -> tuple[int, ...]:
        shape = info.shape(value)
        if shape is None:
            raise UndecidedError(f"the shape of {value.name!r} could not be inferred")
        return shape

    try:
        batch = block.q.sequences(shape_of)
    except ZeroDivisionError:
        batch = 0
    if batch == 0:
        raise UndecidedError("the block has no tokens at the tested lengths")
    return batch


def _laid_out_like(context: np.ndarray, array: np.ndarray, block: AttentionBlock) -> np.ndarray:
    """The context (B, S, H*V) in the layout of the graph."""
    if block.context_axes is None:
        return context
    heads = np.moveaxis(context.reshape(*context.shape[:2], block.num_heads, -1), 2, 1)
    permuted = heads.reshape([array.shape[axis] for axis in block.context_axes])
    return permuted.transpose(np.argsort(block.context_axes))


def _random(
    block: AttentionBlock, value: ir.Value, info: ShapeInfo, rng: np.random.Generator
) -> np.ndarray:
    """Random normal tokens, or random valid masks, lengths and positions."""
    tensor = info.known.get(value)
    if tensor is None:
        raise UndecidedError(f"the shape of {value.name!r} could not be inferred")
    if 0 in tensor.shape:
        raise UndecidedError(f"{value.name!r} is empty at the lengths that were tried")
    dtype = single(tensor.dtype).numpy()
    for step in block.steps:
        if value in (getattr(step, "value", None), getattr(step, "total", None)):
            return _random_mask(step, value, tensor, _keys(block, info), rng).astype(dtype)
    if any(value is reuse.value for reuse in block.reused):
        return softmax(rng.standard_normal(tensor.shape)).astype(dtype)
    for spread in (*block.q.factors, *block.k.factors, block.k.past):
        table = None if spread is None or spread.positions is not value else spread.value
        if table is not None:
            rows = info.shape(table)
            return rng.integers(0, max(1, rows[0] // 2) if rows else 1, tensor.shape).astype(dtype)
    return rng.standard_normal(tensor.shape).astype(dtype)


def _random_mask(
    step: LogitStep, value: ir.Value, tensor: TensorInfo, keys: int, rng: np.random.Generator
) -> np.ndarray:
    """A random mask in which no query masks the first key."""
    match step:
        case FullLengths():
            return np.full(tensor.shape, keys if value is step.total else keys - 1)
        case KeyLengths():
            return rng.integers(1, keys, tensor.shape, endpoint=True) - step.extra
        case _:
            pass
    by_key = isinstance(step, KeyMask) and step.queries  # shape (B, T)
    pattern = np.atleast_1d(rng.random((tensor.shape[0], keys) if by_key else tensor.shape) < 0.7)
    pattern[..., 0] = True
    pattern = pattern if tensor.shape else pattern[0]
    if isinstance(step, Mask):
        return pattern == step.keep
    if isinstance(step, KeyMask):
        return pattern
    low = -step.sign * MASKED if isinstance(step, PositionBias) else 0.0
    return np.where(pattern, rng.standard_normal(tensor.shape), low)


def _keys(block: AttentionBlock, info: ShapeInfo) -> int:
    """T, the number of keys in the cache and from the tokens."""
    total = 0
    if block.k.has_weight:
        tokens = info.shape(block.k.input) or (0,)
        total += math.prod(tokens[:-1]) // _batch(block, info)
    if block.k.past is not None:
        past = info.shape(block.k.past.value) or (0,)
        total += past[block.k.past.token_axis]
    return total


def _run(
    model: ir.Model, part: tuple[ir.Graph, dict[str, np.ndarray]], evaluate: Evaluate
) -> list[np.ndarray]:
    """Run a part of a model, without optimization."""
    graph, feeds = part
    try:
        return evaluate(ir.Model(graph, ir_version=min(model.ir_version, IR_VERSION)), feeds)
    except MissingExtra:
        raise
    except Exception as error:  # onnxruntime has an exception class for each status
        summary = (str(error).splitlines() or [type(error).__name__])[0][:300]
        is_own = isinstance(error, ValueError | InvalidModel)
        raise UndecidedError(summary if is_own else f"{evaluate.__name__}: {summary}") from error


def onnx_runtime(model: ir.Model, feeds: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    """Run a model in ONNX Runtime without graph optimization."""
    return open_session(model, ONE_THREAD, SessionOptions(optimize=False)).run(None, feeds)


def onnx_reference(model: ir.Model, feeds: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    """Run a model in ONNX's reference evaluator."""
    results: Any = ReferenceEvaluator(ir.to_proto(model)).run(None, dict(feeds))
    return [np.asarray(array) for array in results]
