"""Random encoders of any size, and their conversion to half precision."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
import onnx_ir as ir
from onnx_ir.passes.common import InlinePass

FLOAT, FLOAT16 = ir.DataType.FLOAT, ir.DataType.FLOAT16

WEAK = 0.02


def random_encoder(
    *,
    layers: int = 4,
    hidden: int = 768,
    heads: int = 12,
    positions: int = 512,
    spare: bool = False,
    seed: int = 0,
) -> ir.Model:
    """Return a BERT-like encoder with random weights, as a TorchScript export writes it (opset 17).

    Args:
        spare: Scale every second head, and the second half of the query and key dimensions, by
            ``WEAK``, so that they can be pruned. Heads of plain noise cannot.
    """
    random = np.random.default_rng(seed)
    weights: dict[str, np.ndarray] = {}
    lines: list[str] = []

    def weight(name: str, *shape: int) -> str:
        weights[name] = (random.standard_normal(shape) / np.sqrt(shape[0])).astype(np.float32)
        return name

    def dense(out: str, x: str, rows: int, columns: int) -> None:
        w, b = weight(f"{out}_weight", rows, columns), weight(f"{out}_bias", columns)
        lines.append(f"{out}_product = MatMul({x}, {w})  {out} = Add({out}_product, {b})")

    def norm(out: str, a: str, b: str) -> None:
        lines.append(f"{out}_sum = Add({a}, {b})")
        lines.append(f"{out} = LayerNormalization<axis = -1>({out}_sum, ones, zeros)")

    def weaken(name: str, axis: int, group: int) -> None:
        """Scale every second group of rows or columns."""
        factor = np.where(np.arange(hidden) // group % 2, WEAK, 1.0).astype(np.float32)
        weights[name] *= factor[:, None] if axis == 0 and weights[name].ndim == 2 else factor

    for i in range(layers):
        h = f"h{i}"
        for part, perm in {"q": "0, 2, 1, 3", "k": "0, 2, 3, 1", "v": "0, 2, 1, 3"}.items():
            dense(f"l{i}_{part}", h, hidden, hidden)
            if spare and part != "v":
                weaken(f"l{i}_{part}_weight", 1, hidden // heads // 2)
                weaken(f"l{i}_{part}_bias", 0, hidden // heads // 2)
            lines.append(f"l{i}_{part}_split = Reshape(l{i}_{part}, split)")
            lines.append(f"l{i}_{part}_heads = Transpose<perm = [{perm}]>(l{i}_{part}_split)")
        lines.append(f"l{i}_product = MatMul(l{i}_q_heads, l{i}_k_heads)")
        lines.append(f"l{i}_scores = Div(l{i}_product, root)")
        lines.append(f"l{i}_masked = Add(l{i}_scores, mask)")
        lines.append(f"l{i}_probabilities = Softmax<axis = -1>(l{i}_masked)")
        lines.append(f"l{i}_context = MatMul(l{i}_probabilities, l{i}_v_heads)")
        lines.append(f"l{i}_tokens = Transpose<perm = [0, 2, 1, 3]>(l{i}_context)")
        lines.append(f"l{i}_merged = Reshape(l{i}_tokens, merge)")
        dense(f"l{i}_output", f"l{i}_merged", hidden, hidden)
        if spare:
            weaken(f"l{i}_output_weight", 0, hidden // heads)
        norm(f"l{i}_attended", f"l{i}_output", h)
        dense(f"l{i}_up", f"l{i}_attended", hidden, 4 * hidden)
        lines.append(f"l{i}_part = Div(l{i}_up, root_of_two)  l{i}_erf = Erf(l{i}_part)")
        lines.append(f"l{i}_gate = Add(l{i}_erf, one)  l{i}_gated = Mul(l{i}_up, l{i}_gate)")
        lines.append(f"l{i}_gelu = Mul(l{i}_gated, half)")
        dense(f"l{i}_down", f"l{i}_gelu", 4 * hidden, hidden)
        norm(f"h{i + 1}", f"l{i}_down", f"l{i}_attended")
    weight("words", 1000, hidden)
    weight("places", positions, hidden)
    weights |= {"ones": np.ones(hidden, np.float32), "zeros": np.zeros(hidden, np.float32)}
    root = (hidden / heads) ** 0.5
    text = f"""<ir_version: 8, opset_import: ["" : 17]>
    encoder (int64[batch, sequence] input_ids, int64[batch, sequence] attention_mask)
      => (float[batch, sequence, {hidden}] last_hidden_state)
    <float one = {{1}}, float lowest = {{-3.4028235e38}}, float root = {{{root}}},
     float root_of_two = {{{2**0.5}}}, float half = {{0.5}},
     int64[1] begin = {{0}}, int64[1] step = {{1}}, int64[1] two = {{2}},
     int64[4] split = {{0, 0, {heads}, {hidden // heads}}}, int64[3] merge = {{0, 0, {hidden}}}>
    {{
      by_row = Unsqueeze(attention_mask, step)  by_head = Unsqueeze(by_row, two)
      kept = Cast<to = 1>(by_head)  dropped = Sub(one, kept)  mask = Mul(dropped, lowest)
      length = Shape<start = 1, end = 2>(input_ids)
      used = Slice(places, begin, length, begin, step)
      tokens = Gather(words, input_ids)  h0 = Add(tokens, used)
      {" ".join(lines)}
      last_hidden_state = Identity(h{layers})
    }}"""
    proto = onnx.parser.parse_model(text)
    proto.graph.initializer.extend(onnx.numpy_helper.from_array(a, n) for n, a in weights.items())
    return ir.from_proto(proto)


def to_half(model: ir.Model, half: ir.DataType = FLOAT16) -> None:
    """Convert a float32 model to float16 or bfloat16; inputs and outputs stay float32.

    Weights, constants, casts and value types change. Numbers out of range (the lowest float of a
    mask) become the largest finite ones, because an infinity makes a row without keys NaN. Not for
    graphs with operators that need float32 (Resize, quantization scales).
    """
    InlinePass()(model)
    for graph in model.graphs():
        for value in graph.initializers.values():
            tensor = value.const_value  # the value itself may have no type
            if tensor is not None and tensor.dtype == FLOAT:
                value.const_value, value.type = _half(tensor, half), ir.TensorType(half)
        for value in (*graph.inputs, *(out for node in graph for out in node.outputs)):
            if value.dtype == FLOAT and not (graph is model.graph and value.is_graph_input()):
                value.type = ir.TensorType(half)  # a clone shares the type object
        for node in graph:
            _make_half(node, half)
    _cast_inputs_and_outputs(model.graph, half)


def _half(tensor: ir.TensorProtocol | float | Sequence[float], half: ir.DataType) -> ir.Tensor:
    array = tensor.numpy() if isinstance(tensor, ir.TensorProtocol) else np.array(tensor)
    name = tensor.name if isinstance(tensor, ir.TensorProtocol) else None
    most = float(half.max)
    return ir.tensor(np.clip(array, -most, most).astype(half.numpy()), name=name)


def _make_half(node: ir.Node, half: ir.DataType) -> None:
    attributes = node.attributes
    if node.op_type == "Cast" and attributes.get_int("to") == FLOAT:
        attributes.add(ir.AttrInt64("to", half))
    elif node.op_type == "ConstantOfShape" and "value" not in attributes:
        attributes.add(ir.AttrTensor("value", _half([0.0], half)))
    for attribute in list(attributes.values()):
        if attribute.type == ir.AttributeType.TENSOR and attribute.as_tensor().dtype == FLOAT:
            attributes.add(ir.AttrTensor(attribute.name, _half(attribute.as_tensor(), half)))
        elif node.op_type == "Constant" and attribute.name in ("value_float", "value_floats"):
            del attributes[attribute.name]
            attributes.add(ir.AttrTensor("value", _half(attribute.value, half)))


def _cast_inputs_and_outputs(graph: ir.Graph, half: ir.DataType) -> None:
    first = graph[0]
    for value in graph.inputs:
        if value.dtype == FLOAT and value.name not in graph.initializers:
            uses = tuple(value.uses())
            cast = ir.node("Cast", [value], {"to": half})
            cast.outputs[0].name = f"{value.name}_half"
            cast.outputs[0].type, cast.outputs[0].shape = ir.TensorType(half), value.shape
            graph.insert_before(first, cast)
            for node, index in uses:
                node.replace_input_with(index, cast.outputs[0])
    for index, value in enumerate(graph.outputs):
        if value.dtype == half:
            cast = ir.node("Cast", [value], {"to": FLOAT})
            cast.outputs[0].name, value.name = value.name, f"{value.name}_half"
            cast.outputs[0].type, cast.outputs[0].shape = ir.TensorType(FLOAT), value.shape
            graph.append(cast)
            graph.outputs[index] = cast.outputs[0]
