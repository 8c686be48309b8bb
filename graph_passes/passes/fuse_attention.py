"""FuseAttention: write attention as one operator of ONNX Runtime."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

import numpy as np
import onnx_ir as ir
from pydantic import TypeAdapter

from graph_passes.analysis.constants import constant_array, is_constant
from graph_passes.analysis.shapes import ShapeInfo, infer_shapes_small
from graph_passes.blocks import (
    AttentionBlock,
    Capped,
    Causal,
    Floor,
    KeyLengths,
    KeyMask,
    LogitStep,
    Mask,
    PositionBias,
    Projection,
    Scaled,
    Weighted,
)
from graph_passes.context import GraphContext
from graph_passes.emit.attention import emission_refusal, emit_affine, emit_steps
from graph_passes.emit.editing import Inserter
from graph_passes.errors import Refusal
from graph_passes.passes.base import AttentionPass, small_shapes
from graph_passes.passes.collaborate import WEAK_FILL
from graph_passes.passes.invariants import Interface

if TYPE_CHECKING:
    from jaxtyping import Float

__all__ = ["IDIOMS", "LOW", "OPSETS", "FuseAttention", "FusedOperator", "fusion_refusal"]

FusedOperator = Literal["attention", "multi_head", "merged", "onnx"]
"""com.microsoft Attention, which projects inside; MultiHeadAttention, with three projections or
with one that is split; or ai.onnx Attention."""

DOMAIN = "com.microsoft"
IDIOMS: Mapping[FusedOperator, str] = {
    "attention": "microsoft_attention",
    "multi_head": "multi_head_attention",
    "merged": "multi_head_attention",
    "onnx": "attention_operator",
}
"""The functions of ``operators`` that read what is written here."""

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


class FuseAttention(AttentionPass[FusedOperator]):
    """Write attention as one operator of ONNX Runtime, which is faster than its parts.

    Before: out = softmax(steps(s q k^T)) v W_O + b_O, in as many nodes as the exporter wrote
    After:  out = Attention(x, [W_Q W_K W_V], [b_Q b_K b_V], bias = m) W_O + b_O
        or  out = MultiHeadAttention(x W_Q, y W_K, y W_V, [b_Q b_K b_V], bias = m) W_O + b_O
        or  the same of Split(x [W_Q W_K W_V])
        or  out = ai.onnx Attention(x W_Q + b_Q, y W_K + b_K, y W_V + b_V, mask = m) W_O + b_O

    with m = max(steps(0), LOW), (B or 1, H or 1, S, T), shared by layers with equal masks. Exact
    for each query that sees a key. A query that sees none attends to all keys, evenly in single
    precision, where the graph had zeros, NaN or what the mask's finite number left. The scale s is
    the block's own. Sparse heads stop sharing: each gets its own columns, H*K' instead of R. Blocks
    that are this operator already do not change. The model imports com.microsoft if needed; its
    operators support bfloat16 on a GPU only.

    Attributes:
        targets: The operator for each block to rewrite.
    """

    name: ClassVar[str] = "fuse_attention"
    params: ClassVar[TypeAdapter[Any]] = TypeAdapter(FusedOperator)

    @classmethod
    def changes(cls, block: AttentionBlock, params: FusedOperator) -> bool:
        return block.idiom != IDIOMS[params]

    @classmethod
    def refusal(
        cls, block: AttentionBlock, params: FusedOperator | None, context: GraphContext
    ) -> Refusal | None:
        opsets, shapes = context.model.opset_imports, small_shapes(context)
        forms: Sequence[FusedOperator] = get_args(FusedOperator) if params is None else (params,)
        found = [fusion_refusal(block, form, shapes, opsets) for form in forms]
        return None if None in found else found[0]

    def promised(self, before: Interface, context: GraphContext) -> Interface:
        forms = [form for _, form in self._chosen(context)]
        return before.with_opset(DOMAIN, 1) if set(forms) - {"onnx"} else before

    def rewrite_blocks(
        self, chosen: Sequence[tuple[AttentionBlock, FusedOperator]], context: GraphContext
    ) -> None:
        model, info = context.model, small_shapes(context)
        blocks = _in_order(model, [block for block, _ in chosen])
        biases = _biases(model, blocks, info)
        for block in reversed(blocks):  # the output of an earlier block may be a later one's input
            _fuse(block, self.targets[block.name], biases.get(block.name), info)
        if any(form != "onnx" for _, form in chosen):
            model.opset_imports.setdefault(DOMAIN, 1)

    def rewrite(self, block: AttentionBlock, params: FusedOperator, context: GraphContext) -> None:
        self.rewrite_blocks([(block, params)], context)


def fusion_refusal(
    block: AttentionBlock,
    form: FusedOperator,
    info: ShapeInfo | None = None,
    opsets: Mapping[str, int] | None = None,
) -> Refusal | None:
    """Why a block cannot be one operator of this form; None if it can be, or is already.

    Args:
        info: Shapes, if known: masks may have too many axes.
        opsets: Of the model, if known: ai.onnx Attention needs opset 23.
    """
    if block.idiom == IDIOMS[form]:
        return None
    if opsets is not None and (opset := opsets.get("", 0)) < OPSETS.get(form, 0):
        return Refusal(
            "opset", f"the operator needs opset {OPSETS[form]}, and the model has {opset}"
        )
    if (output := block.output) is None:
        return Refusal(
            "no_output_projection", "its context does not go straight to an output projection"
        )
    parts = (block.q, block.k, block.v)
    if any(part.rotary_terms for part in parts):
        return Refusal("rotary", "rotary positions stand between the projections and the scores")
    if any(part.norm for part in parts):
        return Refusal("qk_norm", "q/k norm stands between the projections and the scores")
    if found := emission_refusal(block, info, allow_sparse=True):
        return found
    if output.sequence_first or not all(part.by_sequence for part in parts):
        return Refusal("token_layout", "its tokens are not laid out as (batch, sequence, size)")
    if any(part.num_distinct_heads < block.num_heads for part in (block.k, block.v)):
        return Refusal(
            "grouped",
            "its key/value heads are grouped, and the operator wants one for each query head",
        )
    if any(isinstance(step, Scaled | Capped | Floor | Weighted) for step in block.steps):
        return Refusal(
            "capped", "its logits are scaled, capped or weighted after the scores, not only masked"
        )
    if any(isinstance(step, Mask) and step.fill > WEAK_FILL for step in block.steps):
        return Refusal(
            "weak_mask",
            "its mask fills in scores that softmax does not ignore, and the operator adds them",
        )
    dtypes = {part.dtype for part in parts}
    if len(dtypes) > 1 or not dtypes <= LOW.keys():
        held = ", ".join(sorted(dtype.name.lower() for dtype in dtypes))
        return Refusal(
            "dtype",
            f"its projections hold {held}, and the operator takes one of float and half types",
        )
    weights = (block.q.weight, block.k.weight, block.v.weight, output.weight)
    if any(_is_quantized(weight) for weight in weights):
        return Refusal("quantized", "its weights are quantized, and would be written as floats")
    if form in ("attention", "merged") and not block.q.input is block.k.input is block.v.input:
        return Refusal(
            "tokens_differ", "its queries, keys and values are not projected from the same tokens"
        )
    return _shared_refusal(block)


def _is_quantized(value: ir.Value | None) -> bool:
    """Whether a constant is made of integers."""
    node = None if value is None else value.producer()
    if node is None:
        return False
    return node.op_type == "DequantizeLinear" or any(map(_is_quantized, node.inputs))


def _shared_refusal(block: AttentionBlock) -> Refusal | None:
    """Whether something other than the block's output depends on what the operator would hide."""
    if _escapes(block, [block.product]):
        return Refusal(
            "probabilities_shared",
            "its scores or probabilities are read by another layer, or are an output",
        )
    if _escapes(block, [node for part in (block.q, block.k, block.v) for node in part.nodes]):
        return Refusal(
            "projections_shared",
            "its queries, keys or values are read elsewhere, so they would be computed twice",
        )
    return None


def _escapes(block: AttentionBlock, nodes: Iterable[ir.Node]) -> bool:
    """Whether these nodes reach an output of their graph on a way around the block's own."""
    assert block.output is not None
    pending = [value for node in nodes for value in node.outputs]
    seen = {block.output.output}
    while pending:
        value = pending.pop()
        if value in seen:
            continue
        seen.add(value)
        if value.is_graph_output():
            return True
        readers = [user for user, _ in value.uses() if user.op_type != "Shape"]
        pending += [made for user in readers for made in user.outputs]
    return False


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
