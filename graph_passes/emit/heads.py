"""Emit the heads of a projection: x W^h, with q/k norm and rotary embedding, (B, H, T, K).

The result does not depend on the layout of the original nodes: each projection becomes one product
with scales folded into its weight. ``head_terms`` states what is computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import onnx_ir as ir

from graph_passes.blocks import BroadcastLayout, Norm, Projection, QuantizedProduct
from graph_passes.emit.editing import Inserter
from graph_passes.emit.head_terms import HeadTerms, factor_axes, head_terms

__all__ = ["emit_columns", "emit_heads"]

SPLIT_ORDER = {False: [0, 2, 1, 3], True: [1, 2, 0, 3]}
"""From (B, T, H, K), or (T, B, H, K) where the sequence comes first, to (B, H, T, K)."""


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
    terms = head_terms(part, indices)
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
    make: Inserter, part: Projection, terms: HeadTerms, scale: float, *, is_plain: bool
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


def _rotary_precision(terms: HeadTerms) -> ir.DataType | None:
    """The precision of the factors; None if there are none, or if it is unknown."""
    factors = (term.factor for term, _ in terms.rotary_terms)
    return next((factor.dtype for factor in factors if factor is not None), None)


def _apply_rotary_terms(
    make: Inserter,
    value: ir.Value,
    terms: HeadTerms,
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


def _emit_angles(
    make: Inserter, spread: BroadcastLayout, heads: np.ndarray, is_used: np.ndarray
) -> ir.Value:
    """Emit the factor as (B or 1, H or 1, T, K or 1)."""
    value = spread.value
    if spread.positions is not None:
        value = make.op("Gather", [value, spread.positions], "angles_at", axis=0)
    roles = factor_axes(spread, heads, is_used)
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
