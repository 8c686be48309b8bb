"""Attention as one fused operator of ONNX Runtime, with the masks that it adds to the scores."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import onnx_ir as ir

from graph_passes.analysis.constants import constant_array, is_constant
from graph_passes.analysis.operator_sets import MICROSOFT
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
from graph_passes.emit.attention import emit_output, emit_output_projection
from graph_passes.emit.editing import Attribute, Inserter
from graph_passes.emit.head_terms import num_groups
from graph_passes.emit.heads import emit_columns, emit_heads
from graph_passes.emit.probabilities import emit_steps

__all__ = ["LOW", "OPSETS", "FusedOperator", "emit_fused_blocks", "is_plain"]

FusedOperator = Literal["attention", "multi_head", "merged", "onnx"]
"""com.microsoft Attention, which projects inside; MultiHeadAttention, with three projections or
with one that is split; or ai.onnx Attention."""

OPSETS: Mapping[FusedOperator, int] = {"merged": 13, "onnx": 23}
"""The first ai.onnx opset with the nodes that an operator needs: Split with the sizes as an input
(13), and Attention (23)."""

ROLES = ("query", "key", "value")
"""Names of the nodes that compute the operands."""

SPREADING_OPERATORS = frozenset(
    {"Expand", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"}
)
"""Operators whose output has the elements of their first input."""

LOW: Mapping[ir.DataType, float] = {
    ir.DataType.FLOAT: -1e30,
    ir.DataType.FLOAT16: -3e4,
    ir.DataType.BFLOAT16: -1e30,
}
"""The bias of a hidden key, by the precision of the heads. -inf would give NaN for a query without
keys. The lowest float would overflow to -inf when it is added to a negative score or to a second
mask, e.g. the causal mask of the operator. The sum of two such biases and a score is finite."""


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
    blocks_in_order = _blocks_in_order(model, blocks)
    biases = _biases(model, blocks_in_order, info)
    # The output of an earlier block may be a later one's input.
    for block in reversed(blocks_in_order):
        _fuse(block, operators[block.name], biases.get(block.name), info)
    if any(operators[block.name] != "onnx" for block in blocks):
        model.opset_imports.setdefault(MICROSOFT, 1)


def _blocks_in_order(model: ir.Model, blocks: Iterable[AttentionBlock]) -> list[AttentionBlock]:
    """Sort blocks by the places where they are emitted."""
    nodes = model.graph.all_nodes()
    place = {node: index for index, node in enumerate(nodes)}
    return sorted(blocks, key=lambda block: place[_place(block)])


def _place(block: AttentionBlock) -> ir.Node:
    """The node before which the operator is inserted: the last node of the output projection.

    If that projection is quantized, the first node that reads its input.
    """
    output = block.required_output
    if not output.is_quantized:
        return output.nodes[-1]
    readers = {user for user, _ in output.input.uses()}
    return next((node for node in block.graph if node in readers), output.nodes[-1])


def _is_causal(block: AttentionBlock) -> bool:
    """Whether the causal attribute of the operator applies; its definitions agree only if S = T."""
    return block.kind == "self" and any(isinstance(step, Causal) for step in block.steps)


def _biases(
    model: ir.Model, blocks: Sequence[AttentionBlock], info: ShapeInfo
) -> dict[str, ir.Value]:
    """The bias of the scores of each block that has more than a causal mask, by name.

    Blocks with equal masks and lengths share one bias, which is emitted before the first block.
    """
    distinct_lengths = infer_shapes_small(model, batch=3, sequence=7, distinct_lengths=True)
    bias_by_key: dict[Hashable, ir.Value] = {}
    biases: dict[str, ir.Value] = {}
    for block in blocks:
        causal = _is_causal(block)
        steps = [
            _hiding_step(step)
            for step in block.steps
            if not (causal and isinstance(step, Causal)) and not _hides_nothing(step)
        ]
        if not steps:
            continue
        masks = [(type(step), *vars(step).items()) for step in steps]
        lengths = _lengths(block, steps, (info, distinct_lengths))
        heads = block.num_heads if any(_may_differ_by_head(step, info) for step in steps) else 1
        key = (block.graph, heads, block.q.dtype, *masks, lengths)
        if key not in bias_by_key:
            bias_by_key[key] = _emit_bias(replace(block, steps=tuple(steps)), info)
        biases[block.name] = bias_by_key[key]
    return biases


def _hides_nothing(step: LogitStep) -> bool:
    """Whether a mask hides no key at any length; exporters write such masks for images."""
    match step:
        case Mask():
            return _uniform_element(step.value) == step.keep
        case PositionBias():
            return _uniform_element(step.value) == 0
        case _:
            return False


def _uniform_element(value: ir.Value | None) -> float | None:
    """The number that all elements of a value are equal to; None if unknown."""
    if value is None:
        return None
    if is_constant(value):
        array = constant_array(value)
        return float(array.flat[0]) if array.size and (array == array.flat[0]).all() else None
    node = value.producer()
    if node is None or node.domain:
        return None
    if node.op_type in SPREADING_OPERATORS:
        return _uniform_element(node.inputs[0])
    if node.op_type == "Where" and (condition := _uniform_element(node.inputs[0])) is not None:
        return _uniform_element(node.inputs[1 if condition else 2])
    return None


def _hiding_step(step: LogitStep) -> LogitStep:
    """Return a mask with the fill -inf, so that masks that differ only in their fill are equal."""
    return replace(step, fill=-np.inf) if isinstance(step, Mask | KeyLengths) else step


def _may_differ_by_head(step: LogitStep, info: ShapeInfo) -> bool:
    """Whether a step may differ between heads, so that its bias depends on their number."""
    if not isinstance(step, Mask | PositionBias):
        return not isinstance(step, KeyMask | KeyLengths | Causal)
    shape = info.shape(step.value)
    if step.axes is not None or shape is None:
        return True
    return len(shape) > 2 and (len(shape) != 4 or shape[1] != 1)


def _lengths(
    block: AttentionBlock, steps: Sequence[LogitStep], runs: Sequence[ShapeInfo]
) -> Hashable:
    """A key that is equal for blocks with equal S and T; a mask by keys does not determine S.

    If axes with different names must have equal lengths, shapes at distinct lengths are unknown.
    Self-attention still has as many queries as its mask has keys.
    """
    if block.kind == "self" and any(_counts_keys(step, runs[0]) for step in steps):
        return "as many as the mask has keys"
    shapes = [info.shape(tokens) for info in runs for tokens in (block.x, block.y)]
    if None in shapes:
        return block.x, block.y
    return tuple(shape[1] for shape in shapes if shape is not None)


def _counts_keys(step: LogitStep, info: ShapeInfo) -> bool:
    """Whether the last axis of a mask has the length of the keys and is not broadcast."""
    if isinstance(step, Mask | PositionBias) and step.axes is None:
        return (info.shape(step.value) or (1,))[-1] > 1
    return isinstance(step, KeyMask)


def _emit_bias(block: AttentionBlock, info: ShapeInfo) -> ir.Value:
    """Emit max(steps(0), LOW), (B or 1, H or 1, S, T); operators broadcast the first two axes."""
    make = Inserter(block.graph, _place(block), f"{block.name}/fused")
    dtype = block.q.dtype
    lengths = [make.lengths(tokens, 1, 2) for tokens in dict.fromkeys((block.x, block.y))]
    sizes = [make.integers([1, 1], "ones"), lengths[0], lengths[-1]]
    shape = make.op("Concat", sizes, "mask_shape", axis=0)  # 1 1 S T
    zero = make.constant(0.0, "zero", dtype)
    logits = make.op("Expand", [zero, shape], "no_mask", dtype=dtype)
    mask = emit_steps(make, block, logits, np.arange(block.num_heads), info)
    low = make.constant(LOW[dtype], "low", dtype)
    return make.op("Max", [mask, low], "mask", dtype=dtype)


@dataclass(frozen=True, eq=False)
class _Call:
    """A fused operator before it is emitted.

    Attributes:
        bias_position: The place of the bias of the scores after ``inputs``.
    """

    op_type: str
    domain: str
    inputs: Sequence[ir.Value | None]
    bias_position: int
    attributes: Mapping[str, Attribute]


def _fuse(
    block: AttentionBlock, operator: FusedOperator, bias: ir.Value | None, info: ShapeInfo
) -> None:
    """Emit a block as one operator.

    Args:
        bias: Added to the scores, (B or 1, H or 1, S, T).
    """
    make = Inserter(block.graph, _place(block), f"{block.name}/fused")
    call = _onnx_call(make, block) if operator == "onnx" else _microsoft_call(make, block, operator)
    inputs = [*call.inputs, *([None] * (call.bias_position - len(call.inputs))), bias]
    while inputs[-1] is None:
        inputs.pop()
    attributes = {"scale": float(block.scale), **call.attributes}
    context = make.op(
        call.op_type, inputs, "attention", domain=call.domain, dtype=block.q.dtype, **attributes
    )
    heads = np.arange(block.num_heads)
    if operator == "onnx" and not is_plain(block):
        emit_output(make, block, context, heads, info)
    else:
        emit_output_projection(make, block, context, heads, info)


def _onnx_call(make: Inserter, block: AttentionBlock) -> _Call:
    """Emit the operands of ai.onnx Attention: (B, T, H*K), or (B, H, T, K) with rotary heads."""
    attributes: dict[str, Attribute] = {}
    groups = num_groups(block)
    if is_plain(block):
        inputs = list(_project_operands(make, block, biased=True))
        attributes |= {"q_num_heads": block.num_heads, "kv_num_heads": groups}
    else:
        inputs = _heads(make, block, distinct=groups < block.num_heads)
    if _is_causal(block):
        attributes["is_causal"] = 1
    return _Call("Attention", "", inputs, 3, attributes)


def _microsoft_call(make: Inserter, block: AttentionBlock, operator: FusedOperator) -> _Call:
    """Emit the operands of com.microsoft Attention or MultiHeadAttention, (B, T, H*K)."""
    attributes: dict[str, Attribute] = {"num_heads": block.num_heads}
    if _is_causal(block):
        attributes["unidirectional"] = 1
    op_type = "MultiHeadAttention"
    inputs: list[ir.Value | None]
    if not is_plain(block):
        widths = [block.num_heads * part.head_size for _, part, _ in _parts(block)]
        heads = zip(_heads(make, block), widths, strict=True)
        inputs = [_merge_heads(make, value, width) for value, width in heads]
        return _Call(op_type, MICROSOFT, inputs, 5, attributes)
    parts = _parts(block)
    default = block.head_size**-0.5
    if operator == "attention" and not math.isclose(block.scale, default, rel_tol=1e-6):
        # OpenVINO computes this operator with the default scale, whatever its attribute states.
        name, query, factor = parts[0]
        parts[0] = (name, query, factor * block.scale / default)
        attributes["scale"] = default
    offset = np.concatenate([part.offset.reshape(-1) * scale for _, part, scale in parts])
    # Without a bias, even of zeros, ONNX Runtime's Attention crashes on the CPU.
    is_biased = operator == "attention" or offset.any()
    bias = make.constant(offset, "qkv_bias", block.q.dtype) if is_biased else None
    if operator == "multi_head":
        inputs = [*_project_operands(make, block), bias]
        return _Call(op_type, MICROSOFT, inputs, 5, attributes)
    factors = [part.matrix()[:, part.columns.reshape(-1)] for _, part, _ in parts]
    gains = [scale * part.gain.reshape(-1) for _, part, scale in parts]
    weights = [factor * gain for factor, gain in zip(factors, gains, strict=True)]
    weight = make.constant(np.hstack(weights), "qkv_weight", block.q.dtype)
    sizes = [len(gain) for gain in gains]
    if operator == "merged":
        qkv = make.op("MatMul", [block.x, weight], "qkv")
        widths = make.integers(sizes, "qkv_sizes")
        inputs = [*make.ops("Split", [qkv, widths], ROLES, axis=-1), bias]
    else:
        op_type = "Attention"
        attributes["qkv_hidden_sizes"] = sizes
        inputs = [block.x, weight, bias]
    return _Call(op_type, MICROSOFT, inputs, 5, attributes)


def is_plain(block: AttentionBlock) -> bool:
    """Whether queries, keys and values of all heads are products and biases only.

    Rotary embeddings, q/k norm and grouped heads are emitted before the operator.
    """
    parts = (block.q, block.k, block.v)
    return all(not part.rotary_terms and part.norm is None for part in parts) and all(
        part.num_distinct_heads == block.num_heads for part in parts[1:]
    )


def _heads(make: Inserter, block: AttentionBlock, *, distinct: bool = False) -> list[ir.Value]:
    """Emit queries (B, H, S, K), keys (B, H or G, T, K) and values (B, H or G, T, V).

    Args:
        distinct: Emit grouped heads once, G instead of H.
    """
    query = emit_heads(make.part("query"), block.q, 1.0)
    key = emit_heads(make.part("key"), block.k, 1.0, distinct=distinct)
    return [query, key, emit_heads(make.part("value"), block.v, block.v.scale, distinct=distinct)]


def _merge_heads(make: Inserter, heads: ir.Value, width: int) -> ir.Value:
    """Emit heads (B, H, T, K) as (B, T, H*K) of this width."""
    by_token = make.op("Transpose", [heads], "by_token", perm=[0, 2, 1, 3])
    return make.op("Reshape", [by_token, make.integers([0, 0, width], "merged")], "merged_heads")


def _parts(block: AttentionBlock) -> list[tuple[str, Projection, float]]:
    """Name, projection and remaining factor of queries, keys and values.

    The factors of queries and keys are in the scale of the scores.
    """
    scales = (1.0, 1.0, block.v.scale)
    return list(zip(ROLES, (block.q, block.k, block.v), scales, strict=True))


def _project_operands(
    make: Inserter, block: AttentionBlock, *, biased: bool = False
) -> Iterator[ir.Value]:
    """Emit queries, keys and values, (B, T, H*K), head after head.

    Args:
        biased: Add the biases of the projections.
    """
    for name, part, scale in _parts(block):
        columns = part.columns.reshape(-1)
        gain = scale * part.gain.reshape(-1)
        product = emit_columns(make, part, columns, gain, (f"{name}_weight", f"{name}_product"))
        if biased and part.offset.any():
            bias = make.constant(scale * part.offset.reshape(-1), f"{name}_bias", part.dtype)
            product = make.op("Add", [product, bias], name)
        yield product
