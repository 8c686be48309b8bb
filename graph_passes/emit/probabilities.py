"""Emit the probabilities of some heads, softmax(steps(q k^T)), (B, H, S, T), or new scores."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from graph_passes.analysis.shapes import ShapeInfo
from graph_passes.blocks import (
    AttentionBlock,
    Capped,
    Causal,
    Floor,
    FullLengths,
    KeyLengths,
    KeyMask,
    LogitStep,
    Mask,
    PositionBias,
    Scaled,
    Weighted,
)
from graph_passes.emit.caches import cache_of, has_separate_heads
from graph_passes.emit.editing import Inserter, in_precision, replace_uses, type_of
from graph_passes.emit.heads import emit_heads

__all__ = [
    "emit_probabilities",
    "emit_softmax",
    "emit_steps",
    "probabilities_by_head",
    "probabilities_type",
    "replace_logits",
]


def emit_probabilities(
    make: Inserter, block: AttentionBlock, heads: np.ndarray, info: ShapeInfo
) -> ir.Value:
    """Emit softmax(steps(scale q k^T)) of some heads, (B, H, S, T)."""
    q = emit_heads(make.part("query"), block.q, block.scale, heads)
    k = emit_heads(make.part("key"), block.k, 1.0, heads)
    keys = make.op("Transpose", [k], "keys", perm=[0, 1, 3, 2])
    logits = make.op("MatMul", [q, keys], "scores")
    return emit_softmax(make, block, logits, heads, info)


def emit_softmax(
    make: Inserter, block: AttentionBlock, logits: ir.Value, heads: np.ndarray, info: ShapeInfo
) -> ir.Value:
    """Emit the probabilities of scaled logits, in the precision of the original nodes.

    Fully masked rows are zero if they are in the original.
    """
    logits.type = ir.TensorType(block.q.dtype)
    dtype = _logits_type(block, info)
    logits = in_precision(make, logits, dtype, info)
    value = emit_steps(make, block, logits, heads, info)
    value = make.op("Softmax", [value], "softmax", axis=-1)
    guarded = block.softmax is None or any(node.op_type == "IsNaN" for node in block.nodes)
    if guarded and any(_hides_rows(step) for step in block.steps):
        zero = make.constant(0.0, "zero", dtype)
        parts = [make.op("IsNaN", [value], "is_nan"), zero, value]
        value = make.op("Where", parts, "probabilities")
    value.type = ir.TensorType(dtype)
    return in_precision(make, value, probabilities_type(block, info), info)


def probabilities_type(block: AttentionBlock, info: ShapeInfo) -> ir.DataType:
    """The precision of a block's own probabilities."""
    return type_of(block.own_probabilities, info) or block.q.dtype


def _logits_type(block: AttentionBlock, info: ShapeInfo) -> ir.DataType:
    """The widest precision between scores and softmax; the heads may have a narrower one."""
    softmax = [n.inputs[0] for n in block.nodes if n.op_type in ("Softmax", "BiasSoftmax", "Exp")]
    added = [step.value for step in block.steps if isinstance(step, PositionBias | Weighted)]
    dtypes = [dtype for value in (*softmax, *added) if (dtype := type_of(value, info))]
    return max([block.q.dtype, *dtypes], key=lambda dtype: dtype.itemsize)


def _hides_rows(step: LogitStep) -> bool:
    """Whether a step can mask all keys of a query, so that its softmax is NaN."""
    if isinstance(step, Mask | KeyMask | KeyLengths):
        return step.fill == -np.inf
    return isinstance(step, PositionBias)


def emit_steps(
    make: Inserter, block: AttentionBlock, logits: ir.Value, heads: np.ndarray, info: ShapeInfo
) -> ir.Value:
    """Emit all steps of a block on the logits (B, H, S, T) of some heads."""
    rows = _Rows(block, heads, info, logits.dtype or block.q.dtype)
    for step in block.steps:
        logits = _apply_step(make, step, logits, rows)
    return logits


@dataclass(frozen=True, eq=False)
class _Rows:
    """The emitted heads of a block, their precision, and shape information."""

    block: AttentionBlock
    heads: np.ndarray
    info: ShapeInfo
    dtype: ir.DataType

    @property
    def all(self) -> bool:
        """Whether all heads are emitted, in order."""
        return np.array_equal(self.heads, np.arange(self.block.num_heads))


def _apply_step(make: Inserter, step: LogitStep, logits: ir.Value, rows: _Rows) -> ir.Value:

    def number(value: float, name: str) -> ir.Value:
        return make.constant(value, name, rows.dtype)

    def operand(step: PositionBias | Weighted) -> ir.Value:
        return _as_logits(make, step, in_precision(make, step.value, rows.dtype, rows.info), rows)

    match step:
        case PositionBias():
            op = "Add" if step.sign == 1 else "Sub"
            return make.op(op, [logits, operand(step)], "biased")
        case Weighted():
            return make.op("Mul", [logits, operand(step)], "weighted")
        case Mask() if step.fill != -np.inf:
            mask = _as_logits(make, step, step.value, rows)
            masked = number(step.fill, "masked_logit")
            pair = [logits, masked] if step.keep else [masked, logits]
            return make.op("Where", [mask, *pair], "masked")
        case Mask():
            fill = step.fill
            allowed = _as_logits(make, step, step.value, rows)
            if not step.keep:
                allowed = make.op("Not", [allowed], "allowed")
        case KeyMask():
            fill = step.fill
            allowed = _key_mask(make, step)
        case KeyLengths():
            fill = step.fill
            allowed = _before_end(make, step, logits)
        case Causal():
            fill = -np.inf
            allowed = _causal(make, logits, ends_together=step.ends_together)
        case FullLengths():
            return logits
        case Scaled():
            return make.op("Mul", [logits, number(step.factor, "factor")], "scaled")
        case Floor():
            return make.op("Max", [logits, number(step.low, "floor")], "floored")
        case Capped():
            return make.op("Tanh", [logits], "capped")
    parts = [allowed, number(0.0, "zero"), number(fill, "masked_logit")]
    return make.op("Add", [logits, make.op("Where", parts, "mask")], "masked")


def _as_logits(
    make: Inserter, step: Mask | PositionBias | Weighted, value: ir.Value, rows: _Rows
) -> ir.Value:
    """Emit the mask of a step in a layout that broadcasts to (B, H, S, T) of some heads."""
    shape = rows.info.shape(step.value)
    if shape is None or (step.axes is None and rows.all and len(shape) in (1, 2, 4)):
        return value
    if step.axes is not None and tuple(step.axes) != tuple(range(len(step.axes))):
        short = len(step.axes) - len(shape)
        if short:
            parts = [make.integers([1] * short, "ones"), make.op("Shape", [value], "mask_shape")]
            full = make.op("Concat", parts, "full", axis=0)
            value = make.op("Reshape", [value, full], "mask_spread")
            shape = (1,) * short + shape
        value = make.op("Transpose", [value], "mask_in_order", perm=list(step.axes))
        shape = tuple(shape[axis] for axis in step.axes)
    heads = rows.block.num_heads
    if len(shape) == 3 and shape[0] > heads and shape[0] % heads == 0:  # (B*H, S, T)
        value = _split_heads(make, value, heads, "mask_by_head")
        shape = (shape[0] // heads, heads, *shape[1:])
    if len(shape) >= 3 and shape[-3] == heads > 1 and not rows.all:
        index = make.integers(rows.heads, "heads")
        value = make.op("Gather", [value, index], "mask_of_heads", axis=len(shape) - 3)
    return value


def _split_heads(make: Inserter, value: ir.Value, heads: int, name: str) -> ir.Value:
    """Reshape (B*H, S, T) to (B, H, S, T)."""
    parts = [make.integers([-1, heads], "split"), make.lengths(value, 1, 3)]
    return make.op("Reshape", [value, make.op("Concat", parts, "by_head", axis=0)], name)


def _key_mask(make: Inserter, step: KeyMask) -> ir.Value:
    """Emit a mask (B, T) or (B, S, T) as (B, 1, 1 or S, T)."""
    allowed = make.op("Cast", [step.value], "allowed", to=ir.DataType.BOOL.value)
    shape = make.op("Shape", [step.value], "mask_shape")
    ends = [make.integers([n], name) for n, name in ((0, "from"), (1, "to"), (4, "end"))]
    batch = make.op("Slice", [shape, *ends[:2]], "rows_of_mask")
    keys = make.op("Slice", [shape, *ends[1:]], "keys_of_mask")
    ones = make.integers([1] * (1 + step.queries), "ones")
    spread = make.op("Concat", [batch, ones, keys], "spread", axis=0)
    return make.op("Reshape", [allowed, spread], "key_mask")


def _positions(make: Inserter, logits: ir.Value, axis: int, name: str) -> ir.Value:
    """Emit 0, 1, ... along an axis of the logits."""
    ends = [make.integers(n, label) for n, label in ((0, "first"), (1, "step"))]
    return make.op("Range", [ends[0], _length(make, logits, axis), ends[1]], name)


def _length(make: Inserter, logits: ir.Value, axis: int) -> ir.Value:
    index = make.integers(axis, "axis")
    return make.op("Gather", [make.op("Shape", [logits], "shape"), index], "length")


def _before_end(make: Inserter, step: KeyLengths, logits: ir.Value) -> ir.Value:
    """Emit allowed[b, t] = t < lengths[b] + extra."""
    keys = _positions(make, logits, 3, "key_positions")
    lengths = make.op("Cast", [step.value], "lengths", to=ir.DataType.INT64.value)
    rows = make.integers([-1, 1, 1, 1], "rows")
    ends = make.op("Add", [lengths, make.integers(step.extra, "extra")], "ends")
    return make.op("Less", [keys, make.op("Reshape", [ends, rows], "end_of_row")], "before_end")


def _causal(make: Inserter, logits: ir.Value, *, ends_together: bool) -> ir.Value:
    """Emit allowed[s, t] = t <= s, or t <= s + T - S."""
    queries = _positions(make, logits, 2, "query_positions")
    if ends_together:
        more = make.op("Sub", [_length(make, logits, 3), _length(make, logits, 2)], "more_keys")
        queries = make.op("Add", [queries, more], "query_ends")
    ends = make.op("Add", [queries, make.integers(1, "one")], "ends")
    ends = make.op("Reshape", [ends, make.integers([-1, 1], "column")], "end_of_query")  # S 1
    return make.op("Less", [_positions(make, logits, 3, "key_positions"), ends], "causal")


def probabilities_by_head(make: Inserter, block: AttentionBlock, info: ShapeInfo) -> ir.Value:
    """The own probabilities of a block, as (B, H, S, T) after a Reshape if they are (B*H, S, T)."""
    value = block.own_probabilities
    assert value is not None, f"{block.name}: its probabilities are not in the graph"
    shape = info.shape(value)
    if shape is None or len(shape) == 4:
        return value
    apart = _split_heads(make, value, block.q.num_heads, "probabilities_by_head")
    apart.type = ir.TensorType(probabilities_type(block, info))
    return apart


def replace_logits(
    make: Inserter, block: AttentionBlock, logits: ir.Value, info: ShapeInfo
) -> None:
    """Replace the logits of a block by new ones, (B, H, S, T), in the original precision."""
    _unpack_values(block)
    assert block.softmax is not None
    old = block.softmax.logits
    logits.type = ir.TensorType(block.q.dtype)
    logits = in_precision(make, logits, type_of(old, info) or block.q.dtype, info)
    replace_uses(old, _laid_out(make, logits, block.softmax.axes))


def _laid_out(make: Inserter, value: ir.Value, axes: tuple[int, ...]) -> ir.Value:
    """Emit (B, H, S, T) in the layout that ``axes`` permutes to (B, H, S, T) or (B*H, S, T)."""
    if len(axes) == 3:
        parts = [make.integers([-1], "rows"), make.lengths(value, 2, 4)]
        shape = make.op("Concat", parts, "rows_of", axis=0)
        value = make.op("Reshape", [value, shape], "folded")
    back = [int(axis) for axis in np.argsort(axes)]
    in_order = back == sorted(back)
    return value if in_order else make.op("Transpose", [value], "laid_out", perm=back)


def _unpack_values(block: AttentionBlock) -> None:
    """Emit a separate product for values that share one product with queries or keys.

    If values are cached, the product computes the new values.
    """
    v = block.v
    packed = not {*v.nodes}.isdisjoint((*block.q.nodes, *block.k.nodes))
    if not packed or not v.by_sequence or v.output is None:
        return
    if not v.is_cached and v.layout != "B T H*K":
        # Before the first that may read them: Shape nodes come before the scores.
        make = Inserter(block.graph, v.nodes[-1], f"{block.name}/value")
        replace_uses(v.output, _laid_out(make, emit_heads(make, v, v.scale), v.axes))
    elif v.layout == "B H T K" and (cache := cache_of(v)) is not None and has_separate_heads(v):
        make = Inserter(block.graph, cache.join, f"{block.name}/value")
        cache.join.replace_input_with(1, emit_heads(make, v, 1.0))
