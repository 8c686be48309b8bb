"""Attention as one fused operator of ONNX Runtime, with the masks that it adds to the scores."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import onnx_ir as ir

from graph_passes.analysis.constants import constant_array, is_constant
from graph_passes.analysis.shapes import ShapeInfo, infer_shapes_small
from graph_passes.blocks import (
    AttentionBlock,
    Causal,
    KeyLengths,
    KeyMask,
    LogitStep,
    Mask,
    PositionBias,
    Projection,
)
from graph_passes.emit.attention import emit_affine, emit_steps
from graph_passes.emit.editing import Inserter

if TYPE_CHECKING:
    from jaxtyping import Float

__all__ = ["DOMAIN", "LOW", "OPSETS", "FusedOperator", "emit_fused_blocks"]

FusedOperator = Literal["attention", "multi_head", "merged", "onnx"]
"""com.microsoft Attention, which projects inside; MultiHeadAttention, with three projections or
with one that is split; or ai.onnx Attention."""

DOMAIN = "com.microsoft"

OPSETS: Mapping[FusedOperator, int] = {"merged": 13, "onnx": 23}
"""The first ai.onnx opset that has the operators of a form: Split by sizes that are an input, and
Attention."""

ROLES = ("query", "key", "value")

SPREAD = frozenset({"Expand", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"})
"""Operators whose output holds what their first input holds."""

LOW: Mapping[ir.DataType, float] = {
    ir.DataType.FLOAT: -1e30,
    ir.DataType.FLOAT16: -3e4,
    ir.DataType.BFLOAT16: -1e30,
}
"""What hides a key, by the precision of the heads. -inf would make NaN of a query that sees no key.
The least of all floats would overflow to it beside a negative score, or beside a second mask that
the operator adds (its own causal one, say); of these, two and a score have room."""


def emit_fused_blocks(
    model: ir.Model,
    operators: Mapping[str, FusedOperator],
    blocks: Sequence[AttentionBlock],
    info: ShapeInfo,
) -> None:
    """Emit each block as one operator, in place of its nodes.

    Args:
        operators: The operator of each block, by name.
        info: Shapes of the model at a small batch and length.
    """
    ordered = _in_order(model, blocks)
    biases = _biases(model, ordered, info)
    for block in reversed(ordered):  # the output of an earlier block may be a later one's input
        _fuse(block, operators[block.name], biases.get(block.name), info)
    if any(operators[block.name] != "onnx" for block in blocks):
        model.opset_imports.setdefault(DOMAIN, 1)


def _in_order(model: ir.Model, blocks: Iterable[AttentionBlock]) -> list[AttentionBlock]:
    """By the order of the products in front of which they are written."""
    nodes = ir.traversal.RecursiveGraphIterator(model.graph)
    place = {node: index for index, node in enumerate(nodes)}
    return sorted(blocks, key=lambda block: place[_product(block)])


def _product(block: AttentionBlock) -> ir.Node:
    assert block.output is not None
    return block.output.nodes[-1]


# ---- masks --------------------------------------------------------------------------------------


def _is_causal(block: AttentionBlock) -> bool:
    """Whether the operator's own attribute says it: for S = T alone, both readings are one."""
    return block.kind == "self" and any(isinstance(step, Causal) for step in block.steps)


def _biases(
    model: ir.Model, blocks: Sequence[AttentionBlock], info: ShapeInfo
) -> dict[str, ir.Value]:
    """What is added to the scores of each block that has more than a causal mask, by its name.

    Blocks with the same masks, of sequences as long, have one between them, in front of the first.
    """
    distinct_lengths = infer_shapes_small(model, batch=3, sequence=7, distinct_lengths=True)
    made: dict[Hashable, ir.Value] = {}
    biases: dict[str, ir.Value] = {}
    for block in blocks:
        causal = _is_causal(block)
        steps = [
            _hiding(step)
            for step in block.steps
            if not (causal and isinstance(step, Causal)) and not _is_nothing(step)
        ]
        if not steps:
            continue
        same = [(type(step), *vars(step).items()) for step in steps]
        lengths = _lengths(block, steps, (info, distinct_lengths))
        heads = block.num_heads if any(_by_head(step, info) for step in steps) else 1
        key = (block.graph, heads, block.q.dtype, *same, lengths)
        if key not in made:
            made[key] = _emit_bias(replace(block, steps=tuple(steps)), info)
        biases[block.name] = made[key]
    return biases


def _is_nothing(step: LogitStep) -> bool:
    """Whether a mask hides no key, however many there are: exporters write one for images."""
    match step:
        case Mask():
            return _everywhere(step.value) == step.keep
        case PositionBias():
            return _everywhere(step.value) == 0
        case _:
            return False


def _everywhere(value: ir.Value | None) -> float | None:
    """The one number that a value holds, where the graph itself says so."""
    if value is None:
        return None
    if is_constant(value):
        held = constant_array(value)
        return float(held.flat[0]) if held.size and (held == held.flat[0]).all() else None
    node = value.producer()
    if node is None or node.domain:
        return None
    if node.op_type in SPREAD:
        return _everywhere(node.inputs[0])
    if node.op_type == "Where" and (condition := _everywhere(node.inputs[0])) is not None:
        return _everywhere(node.inputs[1 if condition else 2])
    return None


def _hiding(step: LogitStep) -> LogitStep:
    """A step that sets scores to a low number hides them, whatever the number."""
    return replace(step, fill=-np.inf) if isinstance(step, Mask | KeyLengths) else step


def _by_head(step: LogitStep, info: ShapeInfo) -> bool:
    """Whether a step may tell heads apart: then layers of other heads have a bias of their own."""
    if not isinstance(step, Mask | PositionBias):
        return not isinstance(step, KeyMask | KeyLengths | Causal)
    shape = info.shape(step.value)
    if step.axes is not None or shape is None:
        return True
    return len(shape) > 2 and (len(shape) != 4 or shape[1] != 1)


def _lengths(
    block: AttentionBlock, steps: Sequence[LogitStep], runs: Sequence[ShapeInfo]
) -> Hashable:
    """The same for blocks whose S and T are the same: a mask by keys alone does not tell S.

    Axes of two names may have to be as long as each other: then shapes at lengths apart are not
    known, but the queries of self-attention are as many as the keys that its mask counts.
    """
    if block.kind == "self" and any(_counts_keys(step, runs[0]) for step in steps):
        return "as many as the mask has keys"
    shapes = [info.shape(tokens) for info in runs for tokens in (block.x, block.y)]
    if None in shapes:
        return block.x, block.y
    return tuple(shape[1] for shape in shapes if shape is not None)


def _counts_keys(step: LogitStep, info: ShapeInfo) -> bool:
    """Whether the last axis of a mask is that of the keys, not one that is spread over them."""
    if isinstance(step, Mask | PositionBias) and step.axes is None:
        return (info.shape(step.value) or (1,))[-1] > 1
    return isinstance(step, KeyMask)


def _emit_bias(block: AttentionBlock, info: ShapeInfo) -> ir.Value:
    """max(steps(0), LOW), (B or 1, H or 1, S, T): the operators spread only the first two axes."""
    make = Inserter(block.graph, _product(block), f"{block.name}/fused")
    ends = [make.constant(np.array([n], np.int64), name) for n, name in ((1, "from"), (2, "to"))]
    ones = make.constant(np.ones(2, np.int64), "ones")
    lengths = [
        make.op("Slice", [make.op("Shape", [tokens], "shape"), *ends], "length")
        for tokens in dict.fromkeys((block.x, block.y))
    ]
    shape = make.op("Concat", [ones, lengths[0], lengths[-1]], "mask_shape", axis=0)  # 1 1 S T
    dtype = block.q.dtype
    zero = make.constant(np.zeros((), dtype.numpy()), "zero")
    logits = make.op("Expand", [zero, shape], "no_mask")
    logits.type = ir.TensorType(dtype)
    mask = emit_steps(make, block, logits, np.arange(block.num_heads), info)
    low = make.constant(np.array(LOW[dtype], dtype.numpy()), "low")
    mask = make.op("Max", [mask, low], "mask")
    mask.type = ir.TensorType(dtype)
    return mask


# ---- the operator -------------------------------------------------------------------------------


def _fuse(
    block: AttentionBlock, form: FusedOperator, bias: ir.Value | None, info: ShapeInfo
) -> None:
    output, dtype = block.output, block.q.dtype
    assert output is not None
    make = Inserter(block.graph, _product(block), f"{block.name}/fused")

    def constant(array: np.ndarray, name: str) -> ir.Value:
        return make.constant(array.astype(dtype.numpy()), name)

    weights, offsets = zip(
        *(_side_by_side(part, scale) for part, scale in
          ((block.q, 1.0), (block.k, 1.0), (block.v, block.v.scale))),
        strict=True,
    )  # fmt: skip
    offset = np.concatenate(offsets)
    inputs: list[ir.Value | None]
    attributes: dict[str, Any] = {"scale": float(block.scale)}
    if form == "onnx":
        inputs = [*_projected(make, block, weights, constant, offsets), bias]
        attributes |= {"q_num_heads": block.num_heads, "kv_num_heads": block.num_heads}
        attributes |= {"is_causal": 1} if _is_causal(block) else {}
        operator, domain = "Attention", ""
    else:
        # Without a bias, even of zeros, ONNX Runtime's Attention crashes on the CPU.
        added = constant(offset, "qkv_bias") if form == "attention" or offset.any() else None
        attributes |= {"num_heads": block.num_heads}
        attributes |= {"unidirectional": 1} if _is_causal(block) else {}
        operator, domain = "MultiHeadAttention", DOMAIN
        sizes = [weight.shape[1] for weight in weights]
        if form == "multi_head":
            inputs = [*_projected(make, block, weights, constant), added]
        elif form == "merged":
            whole = make.op("MatMul", [block.x, constant(np.hstack(weights), "qkv_weight")], "qkv")
            widths = make.constant(np.array(sizes, np.int64), "qkv_sizes")
            inputs = [*make.ops("Split", [whole, widths], ROLES, axis=-1), added]
        else:
            operator, attributes["qkv_hidden_sizes"] = "Attention", sizes
            inputs = [block.x, constant(np.hstack(weights), "qkv_weight"), added]
        inputs = [*inputs, *([None] * (5 - len(inputs))), bias]
    while inputs[-1] is None:
        inputs.pop()
    context = make.op(operator, inputs, "attention", domain=domain, **attributes)
    context.type = ir.TensorType(dtype)
    rows = output.matrix()[output.rows]  # H V D
    emit_affine(make, context, rows.reshape(-1, rows.shape[-1]), output.offset(), output.output,
                info)  # fmt: skip


def _projected(
    make: Inserter,
    block: AttentionBlock,
    weights: Sequence[np.ndarray],
    constant: Callable[[np.ndarray, str], ir.Value],
    offsets: Sequence[np.ndarray] | None = None,
) -> Iterator[ir.Value]:
    """Queries, keys and values, each with all heads side by side; with their bias where given."""
    for index, part in enumerate((block.q, block.k, block.v)):
        name = ROLES[index]
        made = make.op(
            "MatMul", [part.input, constant(weights[index], f"{name}_weight")], f"{name}_product"
        )
        if offsets is not None and offsets[index].any():
            made = make.op("Add", [made, constant(offsets[index], f"{name}_bias")], name)
        yield made


def _side_by_side(
    part: Projection, scale: float
) -> tuple[Float[np.ndarray, "D H*K"], Float[np.ndarray, " H*K"]]:
    """Weight and bias of all heads of a projection, one after the other."""
    weight = part.matrix()[:, part.columns] * part.gain  # D H K
    return scale * weight.reshape(len(weight), -1), scale * part.offset.reshape(-1)
