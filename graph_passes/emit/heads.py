"""Emit the heads of a projection: x W^h, with q/k norm and rotary embedding, (B, H, T, K).

The result does not depend on the layout of the original nodes: each projection becomes one product
with scales folded into its weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import onnx_ir as ir

from graph_passes.blocks import (
    AttentionBlock,
    BroadcastLayout,
    Norm,
    Projection,
    QuantizedProduct,
    RotaryTerm,
)
from graph_passes.emit.editing import Inserter
from graph_passes.errors import Refusal

__all__ = ["TOKEN_LAYOUT", "emit_columns", "emit_heads", "heads_refusal", "num_groups"]

SPLIT_ORDER = {False: [0, 2, 1, 3], True: [1, 2, 0, 3]}
"""From (B, T, H, K), or (T, B, H, K) where the sequence comes first, to (B, H, T, K)."""

TOKEN_LAYOUT = Refusal("token_layout", "its tokens are not laid out as (batch, sequence, size)")


def heads_refusal(part: Projection) -> Refusal | None:
    """Return why heads of a projection cannot be emitted in plain operators; None if they can."""
    if part.is_cached:
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
        group: The row of the norm of each distinct head; empty without a norm.
    """

    base: np.ndarray
    head_groups: np.ndarray
    rotary_terms: tuple[tuple[RotaryTerm, np.ndarray], ...]
    group: np.ndarray


def _terms(part: Projection, heads: np.ndarray) -> _Terms:
    """The terms of some heads.

    Raises:
        _UnsupportedError: The projection cannot be emitted.
    """
    identity = (RotaryTerm(None, part.columns, part.gain, part.offset),)
    rotary_terms = [_of_heads(term, heads) for term in part.rotary_terms or identity]
    first, head_groups = _distinct(rotary_terms, heads)
    base = _read_columns(rotary_terms, first) if part.rotary_terms else part.columns[heads[first]]
    group = np.zeros(0, np.int64)
    if part.norm is not None:
        group = _norm_rows(part.norm, base)
        if part.norm.rotary_terms:
            _terms(part.norm.operand(part), group)
        if part.rotary_terms:
            base = np.sort(base, axis=1)
        elif not (np.diff(base, axis=1) == 1).all():
            raise _UnsupportedError("the elements of its q/k norm are reordered")
    ordered_terms = [(_of_heads(term, first), _order(term, first, base)) for term in rotary_terms]
    for term, _ in ordered_terms:
        if term.factor is not None:
            _factor_axes(term.factor, heads[first], term.gain != 0)
    return _Terms(base, head_groups, tuple(ordered_terms), group)


def _of_heads(term: RotaryTerm, heads: np.ndarray) -> RotaryTerm:
    """The term of selected heads; its factor still covers all heads."""
    return RotaryTerm(term.factor, term.columns[heads], term.gain[heads], term.offset[heads])


def _distinct(terms: Sequence[RotaryTerm], heads: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The first of each group of equal heads, in order, and the group of each head.

    Args:
        terms: The terms of ``heads``.
        heads: The index of each head in the layouts of the factors.
    """
    arrays = [np.where(term.gain != 0, term.columns, -1) for term in terms]
    for term in terms:
        arrays += [term.gain, term.offset]
        if term.factor is not None:
            arrays += [axis[heads] for axis in term.factor.axes if not isinstance(axis, str)]
    rows = np.concatenate(arrays, axis=1)
    _, first, groups = np.unique(rows, axis=0, return_index=True, return_inverse=True)
    order = np.argsort(first)  # distinct heads in order of first use
    return first[order], np.argsort(order)[groups.reshape(-1)]


def _read_columns(terms: Sequence[RotaryTerm], heads: np.ndarray) -> np.ndarray:
    """The columns of W that the terms of each head read, (G, K).

    Raises:
        _UnsupportedError: Heads read different numbers of columns.
    """
    read = np.concatenate([np.where(term.gain != 0, term.columns, -1) for term in terms], axis=1)
    columns = [np.unique(row[row >= 0]) for row in read[heads]]
    if len({len(row) for row in columns}) > 1:
        raise _UnsupportedError("its rotary embedding covers different numbers of elements by head")
    return np.stack(columns)


def _norm_rows(norm: Norm, base: np.ndarray) -> np.ndarray:
    """The row of the norm that each head reads, given its columns (G, K) of the flattened norm.

    Raises:
        _UnsupportedError: A head does not read one whole row.
    """
    length = norm.columns.shape[1]
    rows = base // length
    if base.shape[1] != length or not (rows == rows[:, :1]).all():
        raise _UnsupportedError("its q/k norm covers all heads together")
    return rows[:, 0]


def _order(term: RotaryTerm, first: np.ndarray, base: np.ndarray) -> np.ndarray:
    """The base element of each element of a term, which must be the same in each head."""
    columns = term.columns[first]
    is_used = term.gain[first] != 0
    if np.array_equal(columns, base):
        return np.arange(base.shape[1])
    pairs = zip(base, columns, strict=True)
    order = np.array([np.searchsorted(np.sort(read), wanted) for read, wanted in pairs])
    common = np.where(is_used, order, 0).max(axis=0)
    if not ((order == common) | ~is_used).all():
        raise _UnsupportedError("its rotary embedding has another order of elements in each head")
    return common


def num_groups(block: AttentionBlock) -> int:
    """G, if each of G key/value heads serves H / G consecutive query heads, else H."""
    heads = np.arange(block.num_heads)
    spread = [_terms(part, heads).head_groups for part in (block.k, block.v)]
    groups = int(spread[0].max()) + 1
    in_order = heads * groups // len(heads)
    is_even = len(heads) % groups == 0 and all(np.array_equal(group, in_order) for group in spread)
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
    indices = np.arange(part.num_heads) if heads is None else np.asarray(heads)
    terms = _terms(part, indices)
    dtype = part.dtype
    count, size = terms.base.shape
    is_plain = (
        len(terms.rotary_terms) == 1
        and terms.rotary_terms[0][0].factor is None
        and part.norm is None
    )
    if part.norm is not None and part.norm.rotary_terms:
        normed = part.norm.operand(part)
        value = emit_heads(make.part("turned"), normed, part.norm.scale, terms.group)
        value = _apply_norm(make, value, part.norm, size, dtype)
    else:
        value = _emit_product(make, part, terms, scale, is_plain=is_plain)
    if not is_plain:
        precision = _rotary_precision(terms) or dtype
        if precision != dtype:
            value = make.op("Cast", [value], "single", to=precision.value)
        value = _apply_rotary_terms(
            make, value, terms, scale, indices, precision, is_scaled=part.norm is None
        )
        if precision != dtype:
            value = make.op("Cast", [value], "half", to=dtype.value)
    if not distinct and not np.array_equal(terms.head_groups, np.arange(count)):  # grouped heads
        groups = make.integers(terms.head_groups, "groups")
        value = make.op("Gather", [value, groups], "spread", axis=1)
    return value


def emit_columns(
    make: Inserter,
    part: Projection,
    columns: np.ndarray,
    gain: np.ndarray,
    names: tuple[str, str] = ("weight", "product"),
) -> ir.Value:
    """Emit columns of the product of tokens and weight, times ``gain``: (B, T, columns).

    If the weight is quantized, the columns are gathered from the product in the graph.

    Args:
        names: Names of the new weight and of the new product.
    """
    quantized = part.weight
    if not isinstance(quantized, QuantizedProduct):
        weight = make.constant(part.matrix()[:, columns] * gain, names[0], part.dtype)
        return make.op("MatMul", [part.input, weight], names[1])
    value, width = quantized.product, quantized.num_columns
    if quantized.is_flat:
        lengths = [make.lengths(part.input, 0, 2), make.integers([width], "width")]
        apart = make.op("Concat", lengths, "by_token_shape", axis=0)
        value = make.op("Reshape", [value, apart], "by_token")
    if not np.array_equal(columns, np.arange(width)):
        if (np.diff(columns) == 1).all():
            ends = [make.integers([n], "end") for n in (columns[0], columns[-1] + 1, -1)]
            value = make.op("Slice", [value, *ends], "columns")
        else:
            value = make.op("Gather", [value, make.integers(columns, "order")], "columns", axis=-1)
    if (gain != 1).any():
        value = make.op("Mul", [value, make.constant(gain, "gain", part.dtype)], "gained")
    return value


def _emit_product(
    make: Inserter, part: Projection, terms: _Terms, scale: float, *, is_plain: bool
) -> ir.Value:
    """Emit the distinct heads (B, G, T, K) of the product, normalized if there is a norm.

    Args:
        scale: Factor of the heads; not applied if they are normalized.
        is_plain: Whether the bias belongs to the product, since no term has a factor.
    """
    dtype = part.dtype
    columns = terms.base
    count, size = columns.shape
    gain = np.full(columns.shape, scale)
    bias = np.zeros(0)
    if part.norm is not None:
        columns = part.norm.columns[terms.group]
        gain = part.norm.gain[terms.group] * part.norm.scale
        bias = part.norm.offset[terms.group] * part.norm.scale
    elif is_plain:
        term = terms.rotary_terms[0][0]
        gain = scale * term.gain
        bias = scale * term.offset
    value = emit_columns(make, part, columns.reshape(-1), gain.reshape(-1))
    if np.any(bias):
        value = make.op("Add", [value, make.constant(bias.reshape(-1), "bias", dtype)], "biased")
    value = make.op("Reshape", [value, make.integers([0, 0, count, size], "shape")], "heads")
    value = make.op("Transpose", [value], "heads_apart", perm=SPLIT_ORDER[part.sequence_first])
    return value if part.norm is None else _apply_norm(make, value, part.norm, size, dtype)


def _apply_norm(
    make: Inserter, value: ir.Value, norm: Norm, size: int, dtype: ir.DataType
) -> ir.Value:
    """Emit u / size(u), in float32 at least: squares overflow in float16.

    A LayerNormalization of the graph is emitted as a LayerNormalization.
    """
    half = dtype.itemsize < 4
    single = ir.DataType.FLOAT if half else dtype
    if half:
        value = make.op("Cast", [value], "single", to=single.value)
    if norm.node.op_type == "LayerNormalization":
        ones = make.constant(np.ones(size), "ones", single)
        value = make.op("LayerNormalization", [value, ones], "normed", epsilon=norm.epsilon)
    else:
        if norm.centered:
            center = _mean(make, value, size, "center", single)
            value = make.op("Sub", [value, center], "centered")
        squared = make.op("Mul", [value, value], "squared")
        root = _mean(make, squared, size, "mean_square", single)
        if norm.epsilon:
            epsilon = make.constant(norm.epsilon, "epsilon", single)
            root = make.op("Add", [root, epsilon], "safe")
        root = make.op("Sqrt", [root], "root")
        if norm.least:
            root = make.op("Max", [root, make.constant(norm.least, "least", single)], "at_least")
        if norm.added:
            root = make.op("Add", [root, make.constant(norm.added, "added", single)], "size")
        value = make.op("Div", [value, root], "normed")
    if half:
        value = make.op("Cast", [value], "half", to=dtype.value)
    return value


def _mean(make: Inserter, value: ir.Value, size: int, name: str, dtype: ir.DataType) -> ir.Value:
    """Emit the mean over the last axis, which stays with length 1.

    From opset 18 on, the axes of ReduceMean are an input. In older opsets, and in bodies, which
    state no opset, the mean is a matrix product.
    """
    if make.graph.opset_imports.get("", 0) >= 18:
        return make.op("ReduceMean", [value, make.integers([-1], "last")], name)
    mean = make.constant(np.full((size, 1), 1 / size), "mean", dtype)
    return make.op("MatMul", [value, mean], name)


def _rotary_precision(terms: _Terms) -> ir.DataType | None:
    """The precision of the factors; None if there are none, or if it is unknown."""
    factors = (term.factor for term, _ in terms.rotary_terms)
    return next((factor.dtype for factor in factors if factor is not None), None)


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
        scale: Factor of the offsets, and of the gains if ``is_scaled`` is false.
    """
    total: ir.Value | None = None
    for term, order in terms.rotary_terms:
        gain = term.gain if is_scaled else scale * term.gain
        offset = scale * term.offset
        summand = _reorder_elements(make, value, order, gain, dtype)
        if offset.any():
            constant = make.constant(_by_head(offset), "offset", dtype)
            summand = make.op("Add", [summand, constant], "offset_term")
        if term.factor is not None:
            firsts = np.unique(terms.head_groups, return_index=True)[1]
            angles = _emit_angles(make, term.factor, heads[firsts], term.gain != 0)
            summand = make.op("Mul", [summand, angles], "turned")
        total = summand if total is None else make.op("Add", [total, summand], "sum")
    assert total is not None
    return total


def _reorder_elements(
    make: Inserter, value: ir.Value, order: np.ndarray, gain: np.ndarray, dtype: ir.DataType
) -> ir.Value:
    """Emit ``gain * value[..., order]``.

    Up to four runs of consecutive elements, such as halves that change places, are sliced and
    joined: that copies rows of elements, where Gather copies single ones.
    """
    runs = np.split(order, np.flatnonzero(np.diff(order) != 1) + 1)
    if 2 <= len(runs) <= 4:
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
    spread: BroadcastLayout, heads: np.ndarray, is_used: np.ndarray
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
        index = np.where(is_used, axis[heads], -1)
        by_element = index.max(axis=0)
        by_head = index.max(axis=1)
        if not is_used.any() or (index[is_used] == index[is_used][0]).all():
            roles.append(("", np.array(max(index.max(), 0))))
        elif ((index == by_element) | ~is_used).all():
            roles.append(("element", np.maximum(by_element, 0)))
        elif ((index == by_head[:, None]) | ~is_used).all():
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
    make: Inserter, spread: BroadcastLayout, heads: np.ndarray, is_used: np.ndarray
) -> ir.Value:
    """Emit the factor as (B or 1, H or 1, T, K or 1)."""
    value = spread.value
    if spread.positions is not None:
        value = make.op("Gather", [value, spread.positions], "angles_at", axis=0)
    roles = _factor_axes(spread, heads, is_used)
    for axis in reversed(range(len(roles))):  # last first: earlier axes keep their index
        index = roles[axis][1]
        if index is not None:
            elements = make.integers(index.reshape(-1) if index.ndim else index, "elements")
            value = make.op("Gather", [value, elements], "angles", axis=axis)
    named_roles = [(role, index) for role, index in roles if role]
    role_order = ["batch", "head", "token", "element", "both"]
    order = sorted(range(len(named_roles)), key=lambda i: role_order.index(named_roles[i][0]))
    if order != list(range(len(named_roles))):
        value = make.op("Transpose", [value], "angles_in_order", perm=order)
    sizes = {role: 0 if index is None else len(index) for role, index in named_roles}
    sizes["token"] = -1  # 0 copies the batch, the first axis
    by_head = next((index for role, index in named_roles if role == "both"), None)
    if by_head is not None and by_head.ndim:  # B T H*K
        shape = make.integers([sizes.get("batch", 1), -1, *by_head.shape], "angles_shape")
        apart = make.op("Reshape", [value, shape], "angles_apart")
        return make.op("Transpose", [apart], "factor", perm=[0, 2, 1, 3])
    shape = [sizes.get(role, 1) for role in role_order[:4]]
    return make.op("Reshape", [value, make.integers(shape, "angles_shape")], "factor")
