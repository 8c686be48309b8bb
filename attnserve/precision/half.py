"""Half precision: float16 and bfloat16 graphs.

float16: ``onnxruntime.transformers.float16``. Inputs and outputs stay float32. It is for GPUs. A
CPU runs it through casts and is not faster.

bfloat16: ``passes.convert_bfloat16``; ONNX Runtime has no converter. bfloat16 has the range of
float32, so it cannot overflow, and 3 mantissa bits less than float16. Inputs, outputs and operators
without a CUDA kernel stay float32. ONNX Runtime has no bfloat16 matrix products for CPUs and
refuses such a model there; ``convert.on_cpu`` returns an equivalent that a CPU can run.
"""

from __future__ import annotations

import onnx
import onnx_ir as ir

from attnserve.models.quantized import FACTORS
from attnserve.runtime.workarounds import part_transposes
from graph_passes.analysis.constants import is_constant, is_dequantized
from graph_passes.analysis.operator_sets import is_quantized, operators
from graph_passes.analysis.shapes import set_missing_types
from graph_passes.emit.editing import remove_unused
from graph_passes.errors import CannotRewrite
from graph_passes.passes.convert_bfloat16 import ToBfloat16

__all__ = ["LARGEST", "to_bfloat16", "to_float16"]


LARGEST = 30_000.0
"""Largest absolute value of float16 constants; larger finite values are clamped to it. Additive
masks of -3.4e38 still mask. The sum of two masks and a score stays below 65504, so that no logit
is -inf and no row of probabilities is NaN."""

SCALES = frozenset({"Cast", "Mul", "Reshape", "Squeeze", "Transpose", "Unsqueeze"})
"""Operators between a sum of integer products and the multiplication by its scale."""

CONTAINERS = operators(
    "ConcatFromSequence Optional OptionalGetElement OptionalHasElement SequenceAt"
    " SequenceConstruct SequenceEmpty SequenceErase SequenceInsert SequenceLength SequenceMap"
    " SplitToSequence"
)
"""Operators of sequences and optional values."""


def to_float16(model: ir.Model) -> ir.Model:
    """Convert a model to float16; the model may be changed.

    Raises:
        CannotRewrite: An input or output is a sequence of float32 tensors.
    """
    from onnxruntime.transformers.float16 import convert_float_to_float16

    set_missing_types(model)  # the tool converts only values with the type float32
    containers = {node.name or "" for node in model.graph.all_nodes() if _is_container(node)}
    float32_names = sorted(_positions(model) | _around_quantized(model) | containers)
    proto = ir.to_proto(model)
    constants = {tensor.name for tensor in proto.graph.initializer}
    value_infos = [value for value in proto.graph.value_info if value.name not in constants]
    del proto.graph.value_info[:]  # otherwise the tool casts constants that stay float32
    proto.graph.value_info.extend(value_infos)
    _refuse_sequences(model)
    proto = convert_float_to_float16(
        proto,
        keep_io_types=True,
        disable_shape_infer=True,
        max_finite_val=LARGEST,
        node_block_list=float32_names,
    )
    _drop_repeats(proto)
    result = ir.from_proto(proto)
    result.graph.sort()  # the tool appends casts at the end
    _join_casts(result)
    part_transposes(result)
    return result


def _positions(model: ir.Model) -> set[str]:
    """Names of nodes that compute angles or buckets from positions.

    These nodes stay float32, because float16 represents integers exactly only up to 2048. They are
    the float ancestors of Sin, Cos and casts to integers, without roots that depend on weights.
    """
    names: set[str] = set()
    for root in model.graph.all_nodes():
        to = ir.DataType(root.attributes.get_int("to", 1)) if root.op_type == "Cast" else None
        if root.op_type not in ("Sin", "Cos") and (to is None or not to.is_integer()):
            continue
        positions = {root}
        pending = [root]
        while pending:
            for value in pending.pop().inputs:
                node = value.producer() if value is not None else None
                if node is not None and node not in positions and _is_float(node):
                    positions.add(node)
                    pending.append(node)
        inputs = [value for node in positions for value in node.inputs if value is not None]
        tensors = [value.const_value for value in inputs if value.is_initializer()]
        shapes = [tensor.shape.numpy() for tensor in tensors if tensor is not None]
        if not any(sum(length > 1 for length in shape) > 1 for shape in shapes):
            names |= {node.name or "" for node in positions}
    return names


def _refuse_sequences(model: ir.Model) -> None:
    """Check that no input or output is a sequence of float32 tensors.

    Raises:
        CannotRewrite: An input or output is a sequence of float32 tensors.
    """
    for value in (*model.graph.inputs, *model.graph.outputs):
        if isinstance(value.type, ir.SequenceType) and value.dtype == ir.DataType.FLOAT:
            raise CannotRewrite(
                f"float16: {value.name!r} is a sequence of float32 tensors, whose type ONNX "
                "Runtime's tool does not keep",
                "export the model with tensors as inputs and outputs, or convert to bfloat16",
                code="precision.signature",
            )


def _is_container(node: ir.Node) -> bool:
    """Whether a node reads or writes a sequence or an optional value, whose type the tool keeps."""
    values = [value for value in (*node.inputs, *node.outputs) if value is not None]
    kinds = (ir.SequenceType, ir.OptionalType)
    return node.op_type in CONTAINERS or any(isinstance(value.type, kinds) for value in values)


def _is_float(node: ir.Node) -> bool:
    """Whether an output of a node is float32."""
    return any(value.dtype == ir.DataType.FLOAT for value in node.outputs)


def _drop_repeats(proto: onnx.ModelProto) -> None:
    """Remove repeated casts: the tool adds one of the same name for each user of a value."""
    seen: set[str] = set()
    for node in list(proto.graph.node):
        if node.name.endswith("_cast_to_fp32_node"):
            if node.name in seen:
                proto.graph.node.remove(node)
            seen.add(node.name)


def _join_casts(model: ir.Model) -> None:
    """Remove the casts to float16 and back between two nodes that stay float32."""
    for node in model.graph.all_nodes():
        if not (node.name or "").endswith("_cast_to_fp32_node") or node.inputs[0] is None:
            continue
        before = node.inputs[0].producer()
        if before is not None and (before.name or "").endswith("_cast_to_fp16_node"):
            source = before.inputs[0]
            assert source is not None
            node.outputs[0].replace_all_uses_with(source)
    remove_unused(model)


def to_bfloat16(model: ir.Model) -> ir.Model:
    """Convert a model to bfloat16 in place."""
    set_missing_types(model)
    ToBfloat16(frozenset(_positions(model) | _around_quantized(model)))(model)
    return model


def _around_quantized(model: ir.Model) -> set[str]:
    """Names of the nodes that stay float32 because of quantized products.

    They are the quantized nodes, the products of dequantized values, which ONNX Runtime runs in
    integers, and the nodes between an integer product and its scale, whose sums exceed float16.
    """
    nodes = {node for node in model.graph.all_nodes() if is_quantized(node)}
    pending = [output for node in nodes for output in node.outputs if _is_unscaled(output)]
    nodes |= {
        n for n in model.graph.all_nodes() if n.op_type in FACTORS and _multiplies_quantized(n)
    }
    while pending:
        for user, _ in pending.pop().uses():
            if user in nodes or user.op_type not in SCALES:
                continue
            nodes.add(user)
            sources = [value.producer() for value in user.inputs if value is not None]
            if user.op_type == "Mul" and any(
                source and source.op_type == "Cast" for source in sources
            ):
                continue  # scaled
            pending += user.outputs
    return {node.name or "" for node in nodes}


def _multiplies_quantized(node: ir.Node) -> bool:
    """Whether a product has dequantized weights, or two dequantized factors."""
    factors = node.inputs[:2]
    producers = [None if value is None else value.producer() for value in factors]
    is_weight = [is_constant(value) and is_dequantized(value) for value in factors]
    return any(is_weight) or all(
        producer and producer.op_type == "DequantizeLinear" for producer in producers
    )


def _is_unscaled(value: ir.Value) -> bool:
    """Whether a value is a sum of integer products, or a scale that is computed at run time."""
    node = value.producer()
    if node is None:
        return False
    is_scale = node.op_type == "DynamicQuantizeLinear" and value is node.outputs[1]
    return is_scale or node.op_type in ("MatMulInteger", "ConvInteger")
