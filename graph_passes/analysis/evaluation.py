"""Evaluate single nodes on the ONNX reference evaluator, with a bounded output size.

A small file may contain operators with outputs of gigabytes. The output shapes are inferred first,
and a node with a larger output is refused.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from onnx import shape_inference
from onnx.reference import ReferenceEvaluator

from graph_passes.analysis.operator_sets import DATA_DEPENDENT, operators
from graph_passes.errors import InvalidModel

__all__ = ["MAX_ELEMENTS", "SMALL", "evaluate", "infer_outputs"]

SMALL = 1024
"""Maximum number of elements of a tracked constant: enough for shapes and scales."""

MAX_ELEMENTS = 1 << 27
"""Maximum number of elements of an array that is computed from a graph."""

EVALUATED_OPERATORS = operators(
    "Abs Add And ArgMax ArgMin BitShift BitwiseAnd BitwiseNot BitwiseOr BitwiseXor Cast CastLike"
    " Ceil Clip Concat ConstantOfShape Cos Cosh CumSum DequantizeLinear Div Dropout Elu Equal Erf"
    " Exp Expand EyeLike Flatten Floor Gather GatherElements GatherND Gelu Gemm Greater"
    " GreaterOrEqual HardSigmoid HardSwish Identity IsInf IsNaN LeakyRelu Less LessOrEqual Log"
    " MatMul Max Mean Min Mish Mod Mul Neg Not OneHot Or PRelu Pad Pow QuantizeLinear Range"
    " Reciprocal ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum Relu Reshape Round"
    " ScatterElements ScatterND Sigmoid Sign Sin Sinh Size Slice Softmax Softplus Split Sqrt"
    " Squeeze Sub Sum Swish Tan Tanh Tile TopK Transpose Trilu Unsqueeze Where Xor"
)
"""Operators whose time and memory are bounded by the sizes of their inputs and outputs. Other
operators, such as a convolution with large padding and strides, are not evaluated."""

Shape = tuple[int, ...]


def evaluate(
    node: ir.Node,
    inputs: Sequence[np.ndarray | None],
    opsets: Mapping[str, int],
    limit: int = MAX_ELEMENTS,
) -> list[np.ndarray]:
    """Run one node on the ONNX reference evaluator.

    Raises:
        InvalidModel: The operator is not in ``EVALUATED_OPERATORS``, or an output has more than
            ``limit`` elements.
    """
    _require_evaluated(node)
    proto = _renamed(node, [x is not None for x in inputs])
    proto.ClearField("name")  # equal nodes of several layers share an evaluator
    content = proto.SerializeToString(deterministic=True)
    _check_sizes(node, content, inputs, opsets, limit)
    feeds = {f"i{i}": x for i, x in enumerate(inputs) if x is not None}
    results: Any = _evaluator(content, tuple(opsets.items())).run(None, feeds)
    return [np.asarray(result) for result in results]


@lru_cache(1024)
def _evaluator(content: bytes, opsets: tuple[tuple[str, int], ...]) -> ReferenceEvaluator:
    """An evaluator of a serialized node, whose construction takes longer than a run."""
    node = onnx.NodeProto.FromString(content)
    graph = onnx.GraphProto(node=[node], name="node")
    graph.input.extend(onnx.ValueInfoProto(name=name) for name in node.input if name)
    graph.output.extend(onnx.ValueInfoProto(name=name) for name in node.output)
    # The evaluator assumes the newest opset for a node without a model.
    imports = _imports(dict(opsets))
    return ReferenceEvaluator(onnx.ModelProto(graph=graph, opset_import=imports, ir_version=10))


def infer_outputs(
    node: ir.Node,
    types: Sequence[tuple[ir.DataType, Shape] | None],
    arrays: Sequence[np.ndarray | None],
    opsets: Mapping[str, int],
) -> list[tuple[ir.DataType, Shape] | None]:
    """Infer the outputs of a node of the ONNX domain by ONNX's rules; None if unknown.

    Args:
        types: Element type and shape of each input; None for an input that is left out.
        arrays: The elements of inputs, where known.

    Raises:
        Exception: The node is invalid; onnx raises InferenceError, KeyError, RuntimeError, ...
    """
    schema = onnx.defs.get_schema(node.op_type, opsets[""], "")
    proto = _renamed(node, [tensor_type is not None for tensor_type in types])
    type_protos = {
        f"i{i}": onnx.helper.make_tensor_type_proto(tensor_type[0].value, tensor_type[1])
        for i, tensor_type in enumerate(types)
        if tensor_type is not None
    }
    data = {
        f"i{i}": onnx.numpy_helper.from_array(array)
        for i, array in enumerate(arrays)
        if array is not None
    }
    inferred = shape_inference.infer_node_outputs(
        schema, proto, type_protos, data, opset_imports=_imports(opsets)
    )
    return [_type_and_shape(inferred.get(name)) for name in proto.output]


def _type_and_shape(inferred: onnx.TypeProto | None) -> tuple[ir.DataType, Shape] | None:
    """Element type and shape of an inferred type; None if a length is unknown."""
    if inferred is None or not inferred.tensor_type.HasField("shape"):
        return None
    dims = inferred.tensor_type.shape.dim
    if not all(dim.HasField("dim_value") for dim in dims):
        return None
    return ir.DataType(inferred.tensor_type.elem_type), tuple(int(dim.dim_value) for dim in dims)


def _renamed(node: ir.Node, present: Sequence[bool]) -> onnx.NodeProto:
    """The node with the inputs i0, i1, ... and the outputs o0, o1, ..."""
    proto = ir.serde.serialize_node(node)
    proto.input[:] = [f"i{i}" if is_given else "" for i, is_given in enumerate(present)]
    proto.output[:] = [f"o{i}" for i in range(len(node.outputs))]
    return proto


def _imports(opsets: Mapping[str, int]) -> list[onnx.OperatorSetIdProto]:
    return [onnx.helper.make_opsetid(domain, version) for domain, version in opsets.items()]


def _require_evaluated(node: ir.Node) -> None:
    if node.op_type in DATA_DEPENDENT:
        return
    if node.op_type not in EVALUATED_OPERATORS or node.domain not in ("", "ai.onnx"):
        raise InvalidModel(
            f"{node.op_type} {node.name!r} is not evaluated",
            "simplify the graph, or report the model",
            code="evaluation.operator",
        )


def _check_sizes(
    node: ir.Node,
    content: bytes,
    inputs: Sequence[np.ndarray | None],
    opsets: Mapping[str, int],
    limit: int,
) -> None:
    """Refuse a node whose output is larger than ``limit``.

    Args:
        content: The node, serialized.
    """
    if node.op_type in DATA_DEPENDENT:
        return
    types = tuple(x is not None and (x.dtype, x.shape) for x in inputs)
    small = tuple(x is not None and x.size <= SMALL and x.tobytes() for x in inputs)
    key = content, types, small, tuple(opsets.items())
    sizes = _SIZES.get(key)
    if sizes is None:
        if len(_SIZES) >= 20_000:
            _SIZES.clear()
        sizes = _SIZES[key] = _output_sizes(node, inputs, opsets)
    if not max(sizes) <= limit:  # NaN too
        count = "an unknown number of" if max(sizes) == math.inf else f"{max(sizes):.0f}"
        raise InvalidModel(
            f"{node.op_type} {node.name!r} has {count} elements: expected at most {limit}",
            "export the model again: no model computes constants of this size",
            code="evaluation.too_large",
        )


_SIZES: dict[Hashable, list[float]] = {}
"""Output sizes by node, types and small inputs. Layers repeat nodes, and are read repeatedly."""


def _output_sizes(
    node: ir.Node, inputs: Sequence[np.ndarray | None], opsets: Mapping[str, int]
) -> list[float]:
    """The number of elements of each output; infinite if unknown."""
    arrays = [x for x in inputs if x is not None]
    if node.op_type == "Range":  # ONNX's rule overflows for 32-bit integers
        start, end, step = (float(x.item()) for x in arrays)
        return [max((end - start) / step, 0.0)]
    if node.op_type in ("GreaterOrEqual", "LessOrEqual"):  # opset 12 has no rule
        return [_size(np.broadcast_shapes(*(x.shape for x in arrays)))]
    types = [None if x is None else (ir.DataType.from_numpy(x.dtype), x.shape) for x in inputs]
    small = [x if x is not None and x.size <= SMALL else None for x in inputs]
    outputs = infer_outputs(node, types, small, opsets)
    return [math.inf if output is None else _size(output[1]) for output in outputs]


def _size(shape: Shape) -> int:
    """The number of elements; axes of length 0 count 1, since others may be extended first."""
    return math.prod(max(length, 1) for length in shape)
