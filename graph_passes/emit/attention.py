"""Emit selected heads of an ``AttentionBlock`` in standard ONNX operators.

    heads           x W^h, with q/k norm and rotary embedding         (B, H, T, K)
    probabilities   softmax(steps(q k^T))                             (B, H, S, T)
    output          concat(heads)[rows] W_O + bias                    in the original layout

The result does not depend on the layout of the original nodes: each projection becomes one product
with scales folded into its weight. All operators have the same semantics from opset 11 on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from graph_passes.analysis.shapes import ShapeInfo
from graph_passes.blocks import (
    AttentionBlock,
    BroadcastLayout,
    Capped,
    Causal,
    Floor,
    FullLengths,
    KeyLengths,
    KeyMask,
    LogitStep,
    Mask,
    Norm,
    PositionBias,
    Projection,
    RotaryTerm,
    Scaled,
    Weighted,
)
from graph_passes.emit.editing import Inserter, replace_uses
from graph_passes.errors import Refusal

if TYPE_CHECKING:
    from jaxtyping import Float

__all__ = [
    "ENTANGLED_BIAS",
    "TOKEN_LAYOUT",
    "emission_refusal",
    "emit_affine",
    "emit_constant",
    "emit_context",
    "emit_heads",
    "emit_output",
    "emit_probabilities",
    "emit_softmax",
    "emit_steps",
    "heads_refusal",
    "in_precision",
    "num_groups",
    "probabilities_by_head",
    "probabilities_type",
    "type_of",
]

SPLIT_ORDER = {False: [0, 2, 1, 3], True: [1, 2, 0, 3]}
"""From (B, T, H, K), or (T, B, H, K) where the sequence comes first, to (B, H, T, K)."""
MERGE_ORDER = {False: [0, 2, 1, 3], True: [2, 0, 1, 3]}
"""From (B, H, S, V) back to (B, S, H, V) or (S, B, H, V)."""


TOKEN_LAYOUT = Refusal("token_layout", "its tokens are not laid out as (batch, sequence, size)")

ENTANGLED_BIAS = Refusal(
    "entangled_bias", "its position bias is computed from its own queries or keys"
)


def emission_refusal(
    block: AttentionBlock, info: ShapeInfo | None = None, *, allow_sparse: bool = False
) -> Refusal | None:
    """Why some heads of a block cannot be emitted in plain operators; None if they can.

    Args:
        info: Shapes, if known: masks may have too many axes.
        allow_sparse: Accept sparse collaborative heads; their shared columns are duplicated.
    """
    if len(block.own_heads) < block.num_heads:
        return Refusal(
            "reuses_heads", "some of its heads reuse the probabilities of another layer already"
        )
    if (
        block.content is not None
        or block.is_collaborative
        or (block.is_sparse and not allow_sparse)
    ):
        return Refusal(
            "collaborative", "its heads are collaborative: they share their queries and keys"
        )
    for part in (block.q, block.k, block.v):
        if refusal := heads_refusal(part):
            return refusal
    if any(isinstance(step, FullLengths) for step in block.steps):
        return Refusal("cache_lengths", "its operator reads the sequence lengths of a cache")
    if any(isinstance(step, PositionBias) and step.entangled for step in block.steps):
        return ENTANGLED_BIAS
    for mask in (step.value for step in block.steps if isinstance(step, MASKS)):
        shape = mask.shape if info is None else info.shape(mask)
        if info is not None and shape is None:
            return Refusal(
                "mask_shape", f"the shape of its mask {mask.name!r} could not be inferred"
            )
        if shape is not None and len(shape) > 4:
            return Refusal("window_mask", "its mask has an axis of windows beside batch and heads")
    return None


MOST_RUNS = 4
"""Consecutive elements are copied as slices if a permutation has at most so many runs of them."""

MASKS = (Mask, PositionBias, Weighted)


def heads_refusal(part: Projection) -> Refusal | None:
    """Why the heads of a projection cannot be emitted in plain operators; None if they can."""
    if part.weight is None or part.past is not None:
        return Refusal(
            "cached",
            "its cached keys and values are inputs of the graph, whose shapes would change",
        )
    if not (part.by_sequence or part.sequence_first):
        return TOKEN_LAYOUT
    try:
        _terms(part, np.arange(part.num_heads))
    except _UnsupportedError as error:
        return Refusal("projection_layout", str(error))
    return None


class _UnsupportedError(Exception):
    """A projection that cannot be emitted, with the reason."""


@dataclass(frozen=True, eq=False)
class _Terms:
    """A projection of some heads by distinct head; grouped heads are computed once.

    Attributes:
        base: The columns of W of each distinct head, G x K (of the norm, if any).
        head_groups: The distinct head of each head.
        rotary_terms: Each term with the order of the base elements that it reads.
        group: The row of the norm of each distinct head.
    """

    base: np.ndarray
    head_groups: np.ndarray
    rotary_terms: tuple[tuple[RotaryTerm, np.ndarray], ...]
    group: np.ndarray | None


def _terms(part: Projection, heads: np.ndarray) -> _Terms:
    whole = (RotaryTerm(None, part.columns, part.gain, part.offset),)
    rotary_terms = [
        RotaryTerm(turn.factor, turn.columns[heads], turn.gain[heads], turn.offset[heads])
        for turn in part.rotary_terms or whole
    ]
    per_head = np.concatenate([np.where(t.gain != 0, t.columns, -1) for t in rotary_terms], axis=1)
    angles = [axis[heads] for t in rotary_terms if t.factor for axis in t.factor.axes
              if not isinstance(axis, str)]  # fmt: skip
    rows = np.concatenate(
        [per_head, *(t.gain for t in rotary_terms), *(t.offset for t in rotary_terms), *angles],
        axis=1,
    )
    _, first, spread = np.unique(rows, axis=0, return_index=True, return_inverse=True)
    order = np.argsort(first)  # distinct heads in order of first use
    first, spread = first[order], np.argsort(order)[spread.reshape(-1)]
    if part.rotary_terms:
        base = [np.unique(row[row >= 0]) for row in per_head[first]]
        if len({len(row) for row in base}) > 1:
            raise _UnsupportedError(
                "its rotary embedding covers different numbers of elements by head"
            )
        base = np.stack(base)
    else:
        base = rotary_terms[0].columns[first]
    group = None
    if part.norm is not None:
        length = part.norm.columns.shape[1]
        rows_of = base // length
        if base.shape[1] != length or not (rows_of == rows_of[:, :1]).all():
            raise _UnsupportedError("its q/k norm covers all heads together")
        group = rows_of[:, 0]
        base = np.sort(base, axis=1) if part.rotary_terms else base
        if not part.rotary_terms and not (np.diff(base, axis=1) == 1).all():
            raise _UnsupportedError("the elements of its q/k norm are reordered")
    picked = [
        (
            RotaryTerm(t.factor, t.columns[first], t.gain[first], t.offset[first]),
            _order(t, first, base),
        )
        for t in rotary_terms
    ]
    for turn, _ in picked:
        if turn.factor is not None:
            _factor_axes(turn.factor, heads[first], turn.gain != 0)
    return _Terms(base, spread, tuple(picked), group)


def _order(turn: RotaryTerm, first: np.ndarray, base: np.ndarray) -> np.ndarray:
    """The base element of each element of a term, which must be the same in each head."""
    columns, used = turn.columns[first], turn.gain[first] != 0
    if np.array_equal(columns, base):
        return np.arange(base.shape[1])
    order = np.array([np.searchsorted(np.sort(b), c) for b, c in zip(base, columns, strict=True)])
    common = np.where(used, order, 0).max(axis=0)
    if not ((order == common) | ~used).all():
        raise _UnsupportedError("its rotary embedding has another order of elements in each head")
    return common


def num_groups(block: AttentionBlock) -> int:
    """G, if each of G key/value heads serves H / G consecutive query heads, else H."""
    heads = np.arange(block.num_heads)
    spread = [_terms(part, heads).head_groups for part in (block.k, block.v)]
    groups = int(spread[0].max()) + 1
    in_order = heads * groups // len(heads)
    is_even = len(heads) % groups == 0 and all(np.array_equal(each, in_order) for each in spread)
    return groups if is_even else len(heads)


def emit_heads(
    make: Inserter,
    part: Projection,
    scale: float,
    heads: Sequence[int] | np.ndarray | None = None,
    *,
    distinct: bool = False,
) -> ir.Value:
    """Emit ``scale`` times the projection of some heads, (B, H, T, K).

    ``emission_refusal`` must be None for the block.

    Args:
        distinct: Emit grouped heads once, (B, G, T, K), in order of first use.
    """
    chosen = np.arange(part.num_heads) if heads is None else np.asarray(heads)
    terms = _terms(part, chosen)
    dtype, (count, size) = part.dtype, terms.base.shape
    plain = (
        len(terms.rotary_terms) == 1
        and terms.rotary_terms[0][0].factor is None
        and part.norm is None
    )
    matrix, bias = part.matrix(), np.zeros(0)
    if part.norm is not None:
        assert terms.group is not None
        weight = matrix[:, part.norm.columns[terms.group]] * part.norm.gain[terms.group]
        weight, bias = weight * part.norm.scale, part.norm.offset[terms.group] * part.norm.scale
    elif plain:
        turn = terms.rotary_terms[0][0]
        weight, bias = scale * matrix[:, terms.base] * turn.gain, scale * turn.offset
    else:
        weight = scale * matrix[:, terms.base]
    weight = make.constant(weight.reshape(len(matrix), -1), "weight", dtype)
    value = make.op("MatMul", [part.input, weight], "product")
    if np.any(bias):
        value = make.op("Add", [value, make.constant(bias.reshape(-1), "bias", dtype)], "biased")
    value = make.op("Reshape", [value, make.integers([0, 0, count, size], "shape")], "heads")
    value = make.op("Transpose", [value], "heads_apart", perm=SPLIT_ORDER[part.sequence_first])
    if part.norm is not None:
        value = _apply_norm(make, value, part.norm, size, dtype)
    if not plain:
        value = _apply_rotary_terms(
            make, value, terms, scale, chosen, dtype, is_scaled=part.norm is None
        )
    if not distinct and not np.array_equal(terms.head_groups, np.arange(count)):  # grouped heads
        groups = make.integers(terms.head_groups, "groups")
        value = make.op("Gather", [value, groups], "spread", axis=1)
    return value


def _apply_norm(
    make: Inserter, value: ir.Value, norm: Norm, size: int, dtype: ir.DataType
) -> ir.Value:
    """Emit u / sqrt(mean(u^2) + epsilon), in float32 at least: squares overflow in float16.

    The mean is a matrix product, which does not depend on the opset. A centered norm uses
    LayerNormalization.
    """
    half = dtype.itemsize < 4
    single = ir.DataType.FLOAT if half else dtype
    if half:
        value = make.op("Cast", [value], "single", to=single.value)
    if norm.centered:
        ones = make.constant(np.ones(size), "ones", single)
        value = make.op("LayerNormalization", [value, ones], "normed", epsilon=norm.epsilon)
    else:
        mean = make.constant(np.full((size, 1), 1 / size), "mean", single)
        squared = make.op("Mul", [value, value], "squared")
        squares = make.op("MatMul", [squared, mean], "mean_square")
        safe = make.op("Add", [squares, make.constant(norm.epsilon, "epsilon", single)], "safe")
        value = make.op("Div", [value, make.op("Sqrt", [safe], "root")], "normed")
    if half:
        value = make.op("Cast", [value], "half", to=dtype.value)
    return value


def _apply_rotary_terms(
    make: Inserter,
    value: ir.Value,
    terms: _Terms,
    scale: float,
    heads: np.ndarray,
    dtype: ir.DataType,
    *,
    is_scaled: bool,
) -> ir.Value:
    """Emit the sum of factor * (gain * element + offset) over the terms.

    Args:
        scale: Of the offsets, and of the gains if ``is_scaled`` is false.
    """
    total: ir.Value | None = None
    for turn, order in terms.rotary_terms:
        gain = turn.gain if is_scaled else scale * turn.gain
        term, offset = _in_order(make, value, order, gain, dtype), scale * turn.offset
        if offset.any():
            added = make.constant(_by_head(offset), "offset", dtype)
            term = make.op("Add", [term, added], "offset_term")
        if turn.factor is not None:
            firsts = np.unique(terms.head_groups, return_index=True)[1]
            angles = _emit_angles(make, turn.factor, heads[firsts], turn.gain != 0)
            term = make.op("Mul", [term, angles], "turned")
        total = term if total is None else make.op("Add", [total, term], "sum")
    assert total is not None
    return total


def _in_order(
    make: Inserter, value: ir.Value, order: np.ndarray, gain: np.ndarray, dtype: ir.DataType
) -> ir.Value:
    """Emit ``gain * value[..., order]``.

    Halves that change places are sliced and joined: that copies rows of elements, where Gather
    copies single ones.
    """
    runs = np.split(order, np.flatnonzero(np.diff(order) != 1) + 1)
    if len(runs) in range(2, MOST_RUNS + 1):
        places = np.cumsum([0, *map(len, runs)])
        signs = [np.unique(gain[:, a:b]) for a, b in pairwise(places)]
        halves = [
            make.op("Slice", [value, *(make.integers([n], "end") for n in (a, b, -1))], "half")
            for a, b in ((run[0], run[-1] + 1) for run in runs)
        ]
        if all(sign.size == 1 and abs(sign[0]) == 1 for sign in signs):
            halves = [
                make.op("Neg", [half], "negative") if sign[0] < 0 else half
                for half, sign in zip(halves, signs, strict=True)
            ]
            gain = np.ones_like(gain)
        value = make.op("Concat", halves, "turn", axis=-1)
    elif len(runs) > 1:
        value = make.op("Gather", [value, make.integers(order, "order")], "turn", axis=-1)
    if (gain == 1).all():
        return value
    return make.op("Mul", [value, make.constant(_by_head(gain), "gain", dtype)], "gained")


def _by_head(array: np.ndarray) -> np.ndarray:
    """Reshape (H, K) to broadcast with (B, H, T, K); (K,) if all heads are equal."""
    return array[0] if (array == array[:1]).all() else array[:, None, :]


def _factor_axes(
    spread: BroadcastLayout, heads: np.ndarray, used: np.ndarray
) -> tuple[tuple[str, np.ndarray | None], ...]:
    """The role of each axis of the factor, and the selected elements.

    Roles are "batch", "token", "head", "element", "both" for elements that differ by head, or ""
    for a single element.

    Raises:
        _UnsupportedError: The layout is not supported.
    """
    if spread.is_last_position or (spread.positions is not None and spread.axes[:1] != ("batch",)):
        raise _UnsupportedError("its operator computes the rotary positions")
    roles: list[tuple[str, np.ndarray | None]] = []
    for axis in spread.axes:
        if isinstance(axis, str):
            roles.append((axis, None))
            continue
        index = np.where(used, axis[heads], -1)
        by_element, by_head = index.max(axis=0), index.max(axis=1)
        if not used.any() or (index[used] == index[used][0]).all():
            roles.append(("", np.array(max(index.max(), 0))))
        elif ((index == by_element) | ~used).all():
            roles.append(("element", np.maximum(by_element, 0)))
        elif ((index == by_head[:, None]) | ~used).all():
            roles.append(("head", np.maximum(by_head, 0)))
        else:
            roles.append(("both", np.maximum(index, 0)))
    names = [role for role, _ in roles if role]
    if (
        len(names) != len(set(names))
        or "token" not in names
        or ("both" in names and {"head", "element"} & {*names})
    ):
        raise _UnsupportedError("the layout of its rotary angles is not supported")
    return tuple(roles)


def _emit_angles(
    make: Inserter, spread: BroadcastLayout, heads: np.ndarray, used: np.ndarray
) -> ir.Value:
    """Emit the factor as (B or 1, H or 1, T, K or 1)."""
    value = spread.value
    if spread.positions is not None:
        value = make.op("Gather", [value, spread.positions], "angles_at", axis=0)
    roles = _factor_axes(spread, heads, used)
    for axis in reversed(range(len(roles))):  # last first: earlier axes keep their index
        index = roles[axis][1]
        if index is not None:
            elements = make.integers(index.reshape(-1) if index.ndim else index, "elements")
            value = make.op("Gather", [value, elements], "angles", axis=axis)
    kept = [(role, index) for role, index in roles if role]
    wanted = ["batch", "head", "token", "element", "both"]
    order = sorted(range(len(kept)), key=lambda i: wanted.index(kept[i][0]))
    if order != list(range(len(kept))):
        value = make.op("Transpose", [value], "angles_in_order", perm=order)
    sizes = {role: 0 if index is None else len(index) for role, index in kept}
    sizes["token"] = -1  # 0 copies the batch, the first axis
    by_head = next((index for role, index in kept if role == "both"), None)
    if by_head is not None and by_head.ndim:  # B T H*K
        shape = make.integers([sizes.get("batch", 1), -1, *by_head.shape], "angles_shape")
        apart = make.op("Reshape", [value, shape], "angles_apart")
        return make.op("Transpose", [apart], "factor", perm=[0, 2, 1, 3])
    shape = [sizes.get(role, 1) for role in wanted[:4]]
    return make.op("Reshape", [value, make.integers(shape, "angles_shape")], "factor")


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
    logits = in_precision(make, logits, _logits_type(block, info), info)
    dtype = logits.dtype
    assert dtype is not None
    value = emit_steps(make, block, logits, heads, info)
    value = make.op("Softmax", [value], "softmax", axis=-1)
    guarded = block.logits is None or any(node.op_type == "IsNaN" for node in block.nodes)
    if guarded and any(_hides_rows(step) for step in block.steps):
        zero = make.constant(0.0, "zero", dtype)
        parts = [make.op("IsNaN", [value], "is_nan"), zero, value]
        value = make.op("Where", parts, "probabilities")
    value.type = ir.TensorType(dtype)
    return in_precision(make, value, probabilities_type(block, info), info)


def probabilities_type(block: AttentionBlock, info: ShapeInfo) -> ir.DataType:
    """The precision of a block's own probabilities."""
    return type_of(block.probabilities, info) or block.q.dtype


def _logits_type(block: AttentionBlock, info: ShapeInfo) -> ir.DataType:
    """The widest precision between scores and softmax; some graphs use float32 only there."""
    softmax = [n.inputs[0] for n in block.nodes if n.op_type in ("Softmax", "BiasSoftmax", "Exp")]
    added = [step.value for step in block.steps if isinstance(step, PositionBias | Weighted)]
    dtypes = [dtype for value in (*softmax, *added) if (dtype := type_of(value, info))]
    return max([block.q.dtype, *dtypes], key=lambda dtype: dtype.itemsize)


def type_of(value: ir.Value | None, info: ShapeInfo) -> ir.DataType | None:
    """The element type of a value, if known."""
    if value is None:
        return None
    tensor = info.known.get(value)
    return value.dtype if tensor is None else tensor.dtype


def in_precision(make: Inserter, value: ir.Value, dtype: ir.DataType, info: ShapeInfo) -> ir.Value:
    """Cast a value to another precision, unless it has it or its own is unknown."""
    if type_of(value, info) in (None, dtype):
        return value
    return make.op("Cast", [value], "cast", dtype=dtype, to=dtype.value)


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
        return np.array_equal(self.heads, np.arange(self.block.num_heads))


def _apply_step(make: Inserter, step: LogitStep, logits: ir.Value, rows: _Rows) -> ir.Value:
    """Emit one step."""

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
            mask, fill = _as_logits(make, step, step.value, rows), number(step.fill, "masked_logit")
            pair = [logits, fill] if step.keep else [fill, logits]
            return make.op("Where", [mask, *pair], "masked")
        case Mask():
            allowed, fill = _as_logits(make, step, step.value, rows), step.fill
            if not step.keep:
                allowed = make.op("Not", [allowed], "allowed")
        case KeyMask():
            allowed, fill = _key_mask(make, step), step.fill
        case KeyLengths():
            allowed, fill = _before_end(make, step, logits), step.fill
        case Causal():
            allowed, fill = _causal(make, logits, ends_together=step.ends_together), -np.inf
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
    one = make.integers([1] * (1 + step.queries), "ones")
    spread = make.op("Concat", [batch, one, keys], "spread", axis=0)
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
    """The probabilities of a block as (B, H, S, T), after a Reshape if they are (B*H, S, T)."""
    value = block.probabilities
    assert value is not None, f"{block.name}: its probabilities are not in the graph"
    shape = info.shape(value)
    if shape is None or len(shape) == 4:
        return value
    apart = _split_heads(make, value, block.num_heads, "probabilities_by_head")
    apart.type = ir.TensorType(probabilities_type(block, info))
    return apart


def emit_context(
    make: Inserter,
    block: AttentionBlock,
    probabilities: ir.Value,
    heads: np.ndarray,
    info: ShapeInfo,
) -> ir.Value:
    """Emit probabilities (B, H, S, T) @ v of some heads, (B, H, S, V)."""
    v = emit_heads(make.part("value"), block.v, block.v.scale, heads)
    v.type = ir.TensorType(block.v.dtype)
    dtype = type_of(probabilities, info) or block.v.dtype
    v = in_precision(make, v, dtype, info)
    return make.op("MatMul", [probabilities, v], "context", dtype=dtype)


def emit_output(
    make: Inserter, block: AttentionBlock, context: ir.Value, heads: np.ndarray, info: ShapeInfo
) -> None:
    """Replace the block's output by the projection of the context (B, H, S, V) of some heads."""
    output = block.output
    assert output is not None
    merged = make.op("Transpose", [context], "by_token", perm=MERGE_ORDER[output.sequence_first])
    shape = make.integers([0, 0, -1], "merged")
    merged = make.op("Reshape", [merged, shape], "merged_heads", dtype=context.dtype)
    rows = output.matrix()[output.rows[heads]]  # H V D
    emit_affine(make, merged, rows.reshape(-1, rows.shape[-1]), output.offset(), output.output,
                info)  # fmt: skip


def emit_affine(
    make: Inserter,
    tokens: ir.Value,
    weight: Float[np.ndarray, "N D"],
    bias: Float[np.ndarray, " D"],
    old: ir.Value,
    info: ShapeInfo,
) -> ir.Node:
    """Replace ``old``, (B, S, D) or flattened, by tokens (B, S, N) @ weight + bias.

    Returns:
        The product.
    """
    dtype = type_of(old, info) or ir.DataType.FLOAT
    factors = [in_precision(make, tokens, dtype, info),
               make.constant(weight, "output_weight", dtype)]  # fmt: skip
    value = make.op("MatMul", factors, "output_product")
    product = value.producer()
    assert product is not None
    if bias.any():
        value = make.op("Add", [value, make.constant(bias, "output_bias", dtype)], "output")
    _replace(make, old, value, weight.shape[1], info)
    return product


def emit_constant(
    make: Inserter,
    tokens: ir.Value,
    bias: Float[np.ndarray, " D"],
    old: ir.Value,
    info: ShapeInfo,
) -> None:
    """Replace ``old`` by the bias, expanded to ``tokens`` (B, S, N)."""
    dtype = type_of(old, info) or ir.DataType.FLOAT
    value = make.constant(bias, "output_bias", dtype)
    lengths = [make.lengths(tokens, 0, 2), make.integers([len(bias)], "width")]
    shape = make.op("Concat", lengths, "output_shape", axis=0)
    _replace(make, old, make.op("Expand", [value, shape], "output"), len(bias), info)


def _replace(make: Inserter, old: ir.Value, new: ir.Value, width: int, info: ShapeInfo) -> None:
    if len(info.shape(old) or ()) == 2:  # tokens are flattened here
        new = make.op("Reshape", [new, make.integers([-1, width], "flat")], "flat_output")
    replace_uses(old, new)
