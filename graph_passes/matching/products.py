"""Match matrix products of attention: MatMul, Gemm, FusedMatMul or Einsum.

The products are tokens with a weight, queries with keys, and probabilities with values.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from graph_passes.analysis.constants import constant_shape, is_constant
from graph_passes.analysis.operator_sets import MICROSOFT
from graph_passes.analysis.shapes import ShapeInfo
from graph_passes.blocks import Linear

__all__ = ["ContextProduct", "ScoreProduct", "context_product", "linear", "score_product"]

MATRIX = {
    "MatMul": "",
    "Gemm": "",
    "FusedMatMul": MICROSOFT,
    "TransposeMatMul": MICROSOFT,
}
"""Products of two matrices, and the domain each is defined in."""


def linear(
    node: ir.Node,
    shape_of: Callable[[ir.Value], tuple[int, ...]],
    *,
    allow_activation: bool = False,
) -> Linear | None:
    """Match a product of tokens with a constant; None if the node is not one.

    Args:
        allow_activation: Match FusedGemm as well, which applies an activation to the product.
    """
    if node.op_type == "Einsum" and not node.domain and len(node.inputs) == 2:
        return _linear_einsum(node, shape_of)
    is_fused = allow_activation and node.op_identifier()[:2] == (MICROSOFT, "FusedGemm")
    if not (is_fused or MATRIX.get(node.op_type) == node.domain) or len(node.inputs) < 2:
        return None
    tokens, weight = node.inputs[:2]
    if tokens is None or not is_constant(weight) or is_constant(tokens) or _is_permuted(node):
        return None
    sizes = shape_of(tokens)
    shape = constant_shape(weight)
    if len(sizes) < 2 or len(shape) < 2:
        return None
    is_transposed = bool(node.attributes.get_int("transB", 0))
    lead = shape[:-2]
    contracted = len(shape) - (1 if is_transposed else 2)
    columns = shape[-2 if is_transposed else -1]
    if shape[contracted] != sizes[-1]:
        return None
    return Linear(
        node=node,
        tokens=tokens,
        weight=weight,
        contracted=(contracted,),
        width=shape[contracted],
        columns=np.arange(math.prod(lead) * columns).reshape(*lead, 1, columns),
        rows=np.arange(math.prod(sizes[:-1])).reshape(*sizes[:-1], 1),
        scale=node.attributes.get_float("alpha", 1.0),
    )


def _linear_einsum(node: ir.Node, shape_of: Callable[[ir.Value], tuple[int, ...]]) -> Linear | None:
    """Match an Einsum of tokens with a constant, such as "abc,cde->abde".

    The tokens may be either operand, and several axes may be contracted at once.
    """
    a, b = node.inputs
    if a is None or b is None or is_constant(a) == is_constant(b):
        return None
    letters = _letters(node, len(shape_of(a)), len(shape_of(b)))
    if letters is None:
        return None
    (a_letters, b_letters), out = letters
    tokens, token_letters = a, a_letters
    weight, weight_letters = b, b_letters
    if is_constant(a):
        tokens, token_letters = b, b_letters
        weight, weight_letters = a, a_letters
    contracted = [letter for letter in token_letters if letter in weight_letters]
    weight_axes = [letter for letter in weight_letters if letter not in token_letters]
    token_axes = [letter for letter in token_letters if letter not in weight_letters]
    if not contracted or not token_axes or token_letters[-len(contracted) :] != "".join(contracted):
        return None
    has_contracted = any(letter in out for letter in contracted)
    if has_contracted or sorted(out) != sorted([*token_axes, *weight_axes]):
        return None
    sizes = shape_of(tokens)
    shape = constant_shape(weight)
    length = {
        **dict(zip(token_letters, sizes, strict=True)),
        **dict(zip(weight_letters, shape, strict=True)),
    }

    def flat_indices(axes: list[str]) -> np.ndarray:
        """Flat indices over some axes, in a shape that broadcasts to the output."""
        count = np.arange(math.prod(length[axis] for axis in axes))
        count = count.reshape([length[axis] for axis in axes])
        order = [axes.index(axis) for axis in out if axis in axes]
        return count.transpose(order).reshape([length[a] if a in axes else 1 for a in out])

    return Linear(
        node=node,
        tokens=tokens,
        weight=weight,
        contracted=tuple(weight_letters.index(letter) for letter in contracted),
        width=math.prod(length[letter] for letter in contracted),
        columns=flat_indices(weight_axes),
        rows=flat_indices(token_axes),
        scale=1.0,
    )


@dataclass(frozen=True, eq=False)
class ScoreProduct:
    """scores[..., s, t] = scale * sum_k q[..., s, k] k[..., t, k].

    ``query_axes`` and ``key_axes`` bring the operands to (..., S, K) and (..., T, K).
    """

    node: ir.Node
    query: ir.Value
    key: ir.Value
    query_axes: tuple[int, ...]
    key_axes: tuple[int, ...]
    scale: float


def score_product(node: ir.Node, info: ShapeInfo) -> ScoreProduct | None:
    """Match a product of two activations as scores; None if the node is not one."""
    operands = _activations(node, info)
    if operands is None:
        return None
    (a, a_rank), (b, b_rank) = operands
    letters = _letters(node, a_rank, b_rank)
    if letters is None:
        return None
    (a_letters, b_letters), out = letters
    if len(out) < 2:
        return None
    *lead, s, t = out
    contracted = [letter for letter in a_letters if letter in b_letters and letter not in out]
    if (
        len(contracted) != 1
        or (s in a_letters) == (s in b_letters)
        or (t in a_letters) == (t in b_letters)
    ):
        return None
    if s in b_letters:  # the second operand counts the rows
        (a, a_letters), (b, b_letters) = (b, b_letters), (a, a_letters)
    if t not in b_letters:
        return None
    query_axes = _order(a_letters, [*lead, s, *contracted])
    key_axes = _order(b_letters, [*lead, t, *contracted])
    if query_axes is None or key_axes is None:
        return None
    scale = node.attributes.get_float("alpha", 1.0)
    return ScoreProduct(node, a, b, query_axes, key_axes, scale)


@dataclass(frozen=True, eq=False)
class ContextProduct:
    """context[..., s, v] = scale * sum_t probabilities[..., s, t] values[..., t, v].

    ``value_axes`` and ``context_axes`` bring values and context to these orders; ``contracted`` is
    the axis t of the probabilities.
    """

    node: ir.Node
    value: ir.Value
    value_axes: tuple[int, ...]
    context_axes: tuple[int, ...]
    contracted: int
    scale: float


def context_product(
    node: ir.Node, probabilities: ir.Value, order: tuple[int, ...], info: ShapeInfo
) -> ContextProduct | None:
    """Match a product of probabilities with values; None if the node is not one.

    Args:
        order: The permutation of the probabilities to (..., s, t).
    """
    operands = _activations(node, info)
    if operands is None:
        return None
    (a, a_rank), (b, b_rank) = operands
    if (a is probabilities) == (b is probabilities):
        return None
    rank = a_rank if a is probabilities else b_rank
    letters = _letters(node, a_rank, b_rank)
    if letters is None or rank != len(order):
        return None
    (a_letters, b_letters), out = letters
    p_letters, v_letters, value = (
        (a_letters, b_letters, b) if a is probabilities else (b_letters, a_letters, a)
    )
    contracted = [letter for letter in p_letters if letter in v_letters and letter not in out]
    size_letters = [letter for letter in v_letters if letter not in p_letters]
    if (
        len(contracted) != 1
        or len(size_letters) != 1
        or contracted[0] not in (p_letters[i] for i in order[-2:])
    ):
        return None
    row_letters = [p_letters[axis] for axis in order if p_letters[axis] != contracted[0]]  # ..., s
    value_axes = _order(v_letters, [*row_letters[:-1], *contracted, *size_letters])
    context_axes = _order(out, [*row_letters, *size_letters])
    if value_axes is None or context_axes is None:
        return None
    scale = node.attributes.get_float("alpha", 1.0)
    return ContextProduct(
        node, value, value_axes, context_axes, p_letters.index(contracted[0]), scale
    )


def _matrix_letters(
    node: ir.Node, left_rank: int, right_rank: int
) -> tuple[tuple[str, str], str] | None:
    """The Einsum letters of a (batched) matrix product."""
    if left_rank != right_rank or left_rank < 2:
        return None
    lead = "abcdefgh"[: left_rank - 2]
    transposed = [bool(node.attributes.get_int(name, 0)) for name in ("transA", "transB")]
    a = "ts" if transposed[0] else "st"
    b = "vt" if transposed[1] else "tv"
    return (lead + a, lead + b), f"{lead}sv"


def _activations(
    node: ir.Node, info: ShapeInfo
) -> tuple[tuple[ir.Value, int], tuple[ir.Value, int]] | None:
    """Both operands with their ranks; None if one is constant or there is a third input."""
    operands = [value for value in node.inputs if value is not None]
    if (
        node.op_type not in (*MATRIX, "Einsum")
        or len(operands) != 2
        or any(map(is_constant, operands))
    ):
        return None
    shapes = [info.shape(value) for value in operands]
    if shapes[0] is None or shapes[1] is None:
        return None
    if any(node.attributes.get_int(name, 0) for name in ("transBatchA", "transBatchB")):
        return None
    return (operands[0], len(shapes[0])), (operands[1], len(shapes[1]))


def _is_permuted(node: ir.Node) -> bool:
    """Whether a product transposes its first operand, or moves a batch axis of one."""
    flags = ("transA", "transBatchA", "transBatchB")
    return any(node.attributes.get_int(name, 0) for name in flags)


def _letters(node: ir.Node, left_rank: int, right_rank: int) -> tuple[tuple[str, str], str] | None:
    """The letters of a product of two operands, as of an Einsum; None if a term repeats a letter.

    Args:
        left_rank, right_rank: The ranks of the operands; an ellipsis is expanded to the remaining
            axes.
    """
    if node.op_type != "Einsum":
        return _matrix_letters(node, left_rank, right_rank)
    equation = node.attributes.get_string("equation", "").replace(" ", "")
    terms, arrow, out = equation.partition("->")
    parts = terms.split(",")
    if not arrow or len(parts) != 2:
        return None
    if "..." in equation:
        counts = {rank - len(p) + 3 for p, rank in zip(parts, (left_rank, right_rank), strict=True)}
        if len(counts) != 1 or not all("..." in part for part in (*parts, out)):
            return None
        spread = "ABCDEFGH"[: counts.pop()]
        *parts, out = (part.replace("...", spread) for part in (*parts, out))
    if any(len(set(part)) != len(part) for part in (*parts, out)):
        return None
    if (len(parts[0]), len(parts[1])) != (left_rank, right_rank):
        return None
    return (parts[0], parts[1]), out


def _order(letters: str, wanted: list[str]) -> tuple[int, ...] | None:
    """The permutation of axes with these letters to the wanted order; None if they differ."""
    if sorted(letters) != sorted(wanted):
        return None
    return tuple(letters.index(letter) for letter in wanted)
