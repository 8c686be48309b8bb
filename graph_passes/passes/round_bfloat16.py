"""RoundInFloat32: emulate a bfloat16 graph on machines without bfloat16 kernels."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from graph_passes.analysis.required import graph_of
from graph_passes.passes.convert_bfloat16 import BFLOAT16, FLOAT, MOVES, cast, in_type, spread_types

__all__ = ["RoundInFloat32"]


@dataclass(frozen=True)
class RoundInFloat32(ir.passes.InPlacePass):
    """Compute a bfloat16 graph in float32 and round each result to bfloat16.

    Before: z = f(x, W) in bfloat16
    After:  z = float32(bfloat16(f(x, W))) in float32

    The result equals that of a kernel that sums in float32 and rounds once, except for the order of
    summation. Use the pass to measure the loss of bfloat16 without such kernels; it is slow.
    Constants keep their values. Inputs and outputs of type bfloat16 become float32.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        spread_types(model)
        is_modified = False
        for graph in list(model.graphs()):
            for value in graph.initializers.values():
                if value.const_value is not None and value.const_value.dtype == BFLOAT16:
                    value.const_value = in_type(value.const_value, FLOAT)
                    value.type = ir.TensorType(FLOAT)
                    is_modified = True
            for value in graph.inputs:
                if value.dtype == BFLOAT16:
                    value.type = ir.TensorType(FLOAT)
                    is_modified = True
            for node in list(graph):
                is_modified |= _round(node)
        return ir.passes.PassResult(model, modified=is_modified)


def _round(node: ir.Node) -> bool:
    is_modified = False
    for name, attribute in list(node.attributes.items()):
        if attribute.type == ir.AttributeType.TENSOR and attribute.as_tensor().dtype == BFLOAT16:
            node.attributes[name] = ir.AttrTensor(name, in_type(attribute.as_tensor(), FLOAT))
            is_modified = True
    if node.op_type == "Cast" and node.attributes.get_int("to", 1) == BFLOAT16:
        node.attributes["to"] = ir.AttrInt64("to", FLOAT)
    for value in node.outputs:
        if value.dtype != BFLOAT16:
            continue
        value.type = ir.TensorType(FLOAT)
        is_modified = True
        if node.op_type in MOVES and not node.domain:
            continue
        readers = tuple(value.uses())
        rounded_value = cast(value, BFLOAT16)
        float_value = cast(rounded_value, FLOAT)
        for user, place in readers:
            user.replace_input_with(place, float_value)
        if value.is_graph_output():
            outputs = graph_of(node).outputs
            for place in [i for i, output in enumerate(outputs) if output is value]:
                outputs[place] = float_value
            float_value.name, value.name = value.name, float_value.name
    return is_modified
