"""Random changes of a graph, and mutants: seeds with one or two changes, always the same by number.

``corrupted`` changes the message of a file instead, so that most results are not valid models.

A mutation changes one thing and returns a description. It returns "" or raises ``NotApplicable``
if it does not apply to the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from graph_passes.analysis.axes import bind_axes
from graph_passes.analysis.constants import constant_array, is_constant
from graph_passes.analysis.shapes import ShapeInfo, infer_shapes_at
from graph_passes.analysis.workload import Workload
from tests.attnserve.mutation_seeds import SEEDS
from tests.graph_passes.graphs import H, V

Rng = np.random.Generator
Mutation = Callable[[ir.Model, Rng], str]


class NotApplicable(Exception):
    """The graph has nothing that the mutation changes."""


def nodes_of(model: ir.Model, *types: str) -> list[ir.Node]:
    return [node for node in model.graph if node.op_type in types]


def pick(rng: Rng, items: Sequence[Any]) -> Any:
    if not items:
        raise NotApplicable
    return items[int(rng.integers(len(items)))]


def pick_node(rng: Rng, model: ir.Model, *types: str) -> ir.Node:
    return pick(rng, nodes_of(model, *types))


def shapes_of(model: ir.Model) -> ShapeInfo:
    return infer_shapes_at(model, bind_axes(model.graph, Workload.of(2, 5)))


def tensors(model: ir.Model, shapes: ShapeInfo) -> list[ir.Value]:
    """Return the float outputs of nodes with two axes or more; the first input if there is none."""
    outputs = [
        value
        for node in model.graph
        for value in node.outputs
        if (known := shapes.known.get(value)) is not None
        and known.dtype == ir.DataType.FLOAT
        and len(known.shape) > 1
        and value.uses()
    ]
    return outputs or [model.graph.inputs[0]]


def pick_tensor(rng: Rng, model: ir.Model) -> ir.Value:
    return pick(rng, tensors(model, shapes_of(model)))


def pick_weight(rng: Rng, model: ir.Model, *, scalar: bool = False) -> Any:
    return pick(rng, [
        value for value in model.graph.initializers.values()
        if value.dtype == ir.DataType.FLOAT and value.uses()
        and (value.const_value.size == 1) is scalar
    ])  # fmt: skip


def pick_mask(rng: Rng, model: ir.Model) -> tuple[ir.Node, int]:
    """Return a node that reads a mask, and the index of the input."""
    return pick(rng, [
        (node, index) for value in model.graph.inputs if "mask" in (value.name or "")
        for node, index in value.uses()
    ])  # fmt: skip


def constant(model: ir.Model, array: Any) -> ir.Value:
    name = f"mutant_{len(model.graph.initializers)}"
    value = ir.val(name, const_value=ir.tensor(np.asarray(array), name=name))
    model.graph.register_initializer(value)
    return value


def name_output(model: ir.Model, node: ir.Node) -> None:
    node.outputs[0].name = f"mutant_{node.op_type}_{sum(1 for _ in model.graph)}"


def insert(
    model: ir.Model, rng: Rng, value: ir.Value, op: str, *others: ir.Value | None,
    first: bool = True, **attributes: Any
) -> str:  # fmt: skip
    """Insert a node after a value, for all of its uses or for one."""
    uses = list(value.uses())
    if not uses:
        return ""
    chosen = uses if rng.random() < 0.5 else [pick(rng, uses)]
    inputs = [value, *others] if first else [*others, value]
    node = ir.node(op, inputs, attributes=attributes)
    name_output(model, node)
    if (producer := value.producer()) is not None:
        model.graph.insert_after(producer, node)
    else:
        model.graph.insert_before(model.graph[0], node)
    for user, index in chosen:
        user.replace_input_with(index, node.outputs[0])
    model.graph.sort()
    return f"{op} {attributes} after {value.name}, for {len(chosen)} of {len(uses)}"


def bypass(node: ir.Node, index: int = 0) -> str:
    """Replace the output of a node by one of its inputs."""
    if node.outputs[0].is_graph_output() or node.inputs[index] is None:
        return ""
    for user, at in list(node.outputs[0].uses()):
        user.replace_input_with(at, node.inputs[index])
    return f"without {node.op_type} {node.outputs[0].name}"


def activation(node: ir.Node) -> int | None:
    """Return the index of the variable input of a node with one constant operand."""
    free = [i for i, value in enumerate(node.inputs[:2]) if not is_constant(value)]
    return free[0] if len(free) == 1 else None


def swapped_operands(model: ir.Model, rng: Rng) -> str:
    types = ("MatMul", "Add", "Sub", "Mul", "Div", "Concat", "Where", "Einsum", "Attention",
             "MultiHeadAttention")  # fmt: skip
    node = pick(rng, [n for n in nodes_of(model, *types) if len(n.inputs) > 1])
    last = 3 if node.op_type in ("Where", "Attention", "MultiHeadAttention") else 2
    i, j = rng.choice(min(last, len(node.inputs)), 2, replace=False)
    a, b = node.inputs[i], node.inputs[j]
    node.replace_input_with(i, b)
    node.replace_input_with(j, a)
    return f"operands {i} and {j} of {node.op_type} {node.outputs[0].name} swapped"


def other_permutation(model: ir.Model, rng: Rng) -> str:
    node = pick_node(rng, model, "Transpose")
    perm = list(node.attributes["perm"].as_ints())
    i = int(rng.integers(len(perm) - 1))
    perm[i], perm[i + 1] = perm[i + 1], perm[i]
    node.attributes.add(ir.AttrInt64s("perm", perm))
    return f"{node.outputs[0].name} by {perm}"


def other_split_of_heads(model: ir.Model, rng: Rng) -> str:
    node = pick_node(rng, model, "Reshape")
    target = node.inputs[1]
    if not is_constant(target):
        return ""
    shape = constant_array(target).tolist()
    places = [i for i, size in enumerate(shape) if size != 0]
    if len(places) < 2:
        return ""
    i, j = rng.choice(places, 2, replace=False)
    if rng.random() < 0.5:
        shape[i], shape[j] = shape[j], shape[i]
    else:
        shape[i], shape[j] = shape[i] * 2, max(1, shape[j] // 2)
    node.replace_input_with(1, constant(model, np.array(shape)))
    return f"{node.outputs[0].name} as {shape}"


def other_scale(model: ir.Model, rng: Rng) -> str:
    value = pick_weight(rng, model, scalar=True)
    factor = pick(rng, [0.5, 2.0, -1.0, 0.01])
    array = np.asarray(value.const_value.numpy() * np.float32(factor))
    value.const_value = ir.tensor(array, name=value.name)
    return f"{value.name} times {factor}"


def moved_scale(model: ir.Model, rng: Rng) -> str:
    """Remove the scale, and insert it after another value."""
    scales = [n for n in nodes_of(model, "Mul", "Div")
              if is_constant(n.inputs[1]) and constant_array(n.inputs[1]).size == 1]  # fmt: skip
    node = pick(rng, scales)
    if not bypass(node):
        return ""
    return insert(model, rng, pick_tensor(rng, model), node.op_type, node.inputs[1])


def scaled_once_more(model: ir.Model, rng: Rng) -> str:
    value = pick_tensor(rng, model)
    return insert(model, rng, value, "Mul", constant(model, np.float32(0.7)))


def scaled_by_element(model: ir.Model, rng: Rng) -> str:
    """Scale or shift by one constant per element of an axis."""
    shapes = shapes_of(model)
    value = pick(rng, tensors(model, shapes))
    shape = shapes.shape(value)
    if shape is None or len(shape) < 2:
        return ""
    axis = int(rng.integers(1, len(shape)))
    factor = np.linspace(0.5, 1.5, shape[axis], dtype=np.float32)
    factor = factor.reshape([-1] + [1] * (len(shape) - axis - 1))
    return insert(model, rng, value, pick(rng, ["Mul", "Add"]), constant(model, factor))


def scaled_by_length(model: ir.Model, rng: Rng) -> str:
    """Divide by the batch size or the length."""
    value = pick_tensor(rng, model)
    if value is model.graph.inputs[0]:
        return ""
    axis = int(rng.integers(2))
    ends = {"start": axis, "end": axis + 1}
    length = ir.node("Shape", [model.graph.inputs[0]], attributes=ends)
    scale = ir.node("Cast", length.outputs, attributes={"to": 1})
    for node in (length, scale):
        name_output(model, node)
        model.graph.append(node)
    return insert(model, rng, value, "Div", scale.outputs[0]) + f" by axis {axis}"


def other_axis(model: ir.Model, rng: Rng) -> str:
    types = ("Softmax", "Concat", "Gather", "Split", "ReduceSum", "ReduceMean", "ReduceMax")
    node = pick_node(rng, model, *types)
    axis = int(rng.integers(-4, 4))
    name = "axes" if "axes" in node.attributes else "axis"
    node.attributes.add(ir.AttrInt64s(name, [axis]) if name == "axes" else ir.AttrInt64(name, axis))
    return f"{node.op_type} {node.outputs[0].name} over axis {axis}"


def mask_removed(model: ir.Model, rng: Rng) -> str:
    node, index = pick_mask(rng, model)
    if node.op_type not in ("Add", "Where"):
        return ""
    keep = 1 if node.op_type == "Where" else 1 - index
    return bypass(node, keep)


def mask_twice(model: ir.Model, rng: Rng) -> str:
    """Apply the mask again, after the same node or elsewhere."""
    node, index = pick_mask(rng, model)
    if node.op_type not in ("Add", "Where"):
        return ""
    value = node.outputs[0] if rng.random() < 0.5 else pick_tensor(rng, model)
    mask = node.inputs[index]
    if node.op_type == "Add":
        return insert(model, rng, value, "Add", mask)
    return insert(model, rng, value, "Where", mask, node.inputs[2], first=False)


def mask_negated(model: ir.Model, rng: Rng) -> str:
    node, index = pick_mask(rng, model)
    mask = node.inputs[index]
    if mask.dtype == ir.DataType.INT32:
        return insert(model, rng, mask, "Sub", constant(model, np.int32(1)), first=False)
    return insert(model, rng, mask, "Not" if mask.dtype == ir.DataType.BOOL else "Neg")


def mask_transposed(model: ir.Model, rng: Rng) -> str:
    """Exchange the last two axes: (B, 1, T, S)."""
    node, index = pick_mask(rng, model)
    mask = node.inputs[index]
    if mask is None or mask.shape is None or len(mask.shape) < 4:
        return ""
    return insert(model, rng, mask, "Transpose", perm=[0, 1, 3, 2])


def also_an_output(model: ir.Model, rng: Rng) -> str:
    value = pick_tensor(rng, model)
    if value.is_graph_output():
        return ""
    model.graph.outputs.append(value)
    return f"{value.name} is an output too"


def also_read(model: ir.Model, rng: Rng) -> str:
    """Add a node that reads an intermediate value, and make its result an output."""
    value = pick_tensor(rng, model)
    op = pick(rng, ["Relu", "Exp", "Neg", "Shape", "Softmax", "Identity"])
    node = ir.node(op, [value])
    name_output(model, node)
    model.graph.append(node)
    model.graph.outputs.append(node.outputs[0])
    return f"{op} reads {value.name} too"


def weight_as_an_input(model: ir.Model, rng: Rng) -> str:
    value = pick_weight(rng, model)
    shape, name = ir.Shape(value.const_value.shape), f"{value.name}_input"
    source = ir.Value(name=name, shape=shape, type=ir.TensorType(ir.DataType.FLOAT))
    model.graph.inputs.append(source)
    for user, index in list(value.uses()):
        user.replace_input_with(index, source)
    return f"{value.name} is an input"


def weight_changed(model: ir.Model, rng: Rng) -> str:
    value = pick_weight(rng, model)
    array = value.const_value.numpy()
    noise = rng.standard_normal(array.shape).astype(np.float32)
    value.const_value = ir.tensor(np.asarray(array + noise), name=value.name)
    return f"{value.name} has other elements"


def transposed(model: ir.Model, rng: Rng) -> str:
    """Transpose once, or twice: by the inverse or the same permutation."""
    shapes = shapes_of(model)
    value = pick(rng, tensors(model, shapes))
    perm = [int(axis) for axis in rng.permutation(len(shapes.shape(value) or ()))]
    before = set(model.graph)
    change = insert(model, rng, value, "Transpose", perm=perm)
    (node,) = set(model.graph) - before
    if rng.random() < 0.3:
        return change
    again = [int(axis) for axis in np.argsort(perm)] if rng.random() < 0.6 else perm
    return f"{change}; {insert(model, rng, node.outputs[0], 'Transpose', perm=again)}"


def reversed_axis(model: ir.Model, rng: Rng) -> str:
    """Reverse one axis."""
    shapes = shapes_of(model)
    value = pick(rng, [*tensors(model, shapes), *model.graph.inputs])
    shape = shapes.shape(value)
    if not shape:
        return ""
    axis = int(rng.integers(len(shape)))
    ends = ([-1], [np.iinfo(np.int64).min], [axis], [-1])
    return insert(model, rng, value, "Slice", *(constant(model, np.array(end)) for end in ends)) + (
        f" axis {axis}"
    )


def heads_swapped(model: ir.Model, rng: Rng) -> str:
    """Permute a short axis: heads, or the elements of heads."""
    shapes = shapes_of(model)
    value = pick(rng, tensors(model, shapes))
    shape = shapes.shape(value) or ()
    axis = pick(rng, [axis for axis, size in enumerate(shape) if size in (H, 4, V)])
    order = rng.permutation(shape[axis])
    return insert(model, rng, value, "Gather", constant(model, order), axis=axis) + f" {order}"


def first_removed(model: ir.Model, rng: Rng) -> str:
    """Remove the first element of one axis: tokens or heads."""
    shapes = shapes_of(model)
    value = pick(rng, tensors(model, shapes))
    axis = int(rng.integers(len(shapes.shape(value) or ())))
    ends = (constant(model, np.array([end])) for end in (1, np.iinfo(np.int64).max, axis))
    return insert(model, rng, value, "Slice", *ends) + f" axis {axis}"


def only_the_first_eight(model: ir.Model, rng: Rng) -> str:
    """Keep at most eight elements of an axis; the certificate uses fewer."""
    shapes = shapes_of(model)
    value = pick(rng, [*tensors(model, shapes), model.graph.inputs[0]])
    shape = shapes.shape(value) or ()
    axis = pick(rng, [axis for axis, size in enumerate(shape) if size in (2, 5)])
    ends = (constant(model, np.array([end])) for end in (0, 8, axis))
    return insert(model, rng, value, "Slice", *ends) + f" axis {axis}"


def something_inserted(model: ir.Model, rng: Rng) -> str:
    value = pick(rng, [*tensors(model, shapes_of(model)), model.graph.inputs[0]])
    op = pick(
        rng, ["Identity", "Neg", "Neg", "Dropout", "Abs", "Relu", "Tanh", "Exp", "Cast", "Softmax"]
    )
    if op == "Cast":
        return insert(model, rng, value, op, to=pick(rng, [1, 1, 6, 11]))
    return insert(model, rng, value, op)


def clipped(model: ir.Model, rng: Rng) -> str:
    value = pick_tensor(rng, model)
    return insert(model, rng, value, pick(rng, ["Max", "Min"]), constant(model, np.float32(0.1)))


def node_removed(model: ir.Model, rng: Rng) -> str:
    """Remove a node that keeps the shape: a bias, a norm, a mask."""
    shapes = shapes_of(model)
    candidates = [
        (node, index)
        for node in model.graph
        for index, value in enumerate(node.inputs)
        if value is not None and value.producer() is not None and node.outputs[0].uses()
        and shapes.shape(value) is not None
        and shapes.shape(value) == shapes.shape(node.outputs[0])
    ]  # fmt: skip
    return bypass(*pick(rng, candidates))


def read_elsewhere(model: ir.Model, rng: Rng) -> str:
    """Replace one input of one node by another value of the same shape."""
    shapes = shapes_of(model)
    node = pick(rng, [n for n in model.graph if n.inputs])
    index = int(rng.integers(len(node.inputs)))
    value = node.inputs[index]
    if value is None:
        return ""
    earlier = [v for n in takewhile(lambda n: n is not node, model.graph) for v in n.outputs]
    pool = [*model.graph.inputs, *model.graph.initializers.values(), *earlier]
    other = pick(rng, [
        other
        for other in pool
        if other is not value
        and shapes.shape(other) is not None
        and shapes.shape(other) == shapes.shape(value)
        and shapes.known[other].dtype == shapes.known[value].dtype
    ])  # fmt: skip
    node.replace_input_with(index, other)
    return f"{node.op_type} {node.outputs[0].name} reads {other.name}, not {value.name}"


def another_source(model: ir.Model, rng: Rng) -> str:
    """Let one projection read a new input."""
    products = [n for n in nodes_of(model, "MatMul", "Gemm", "Einsum") if activation(n) is not None]
    node = pick(rng, products)
    value = node.inputs[activation(node)]
    if value.shape is None or any(other.name == "other_x" for other in model.graph.inputs):
        return ""
    source = ir.Value(name="other_x", shape=value.shape, type=ir.TensorType(ir.DataType.FLOAT))
    model.graph.inputs.append(source)
    node.replace_input_with(node.inputs.index(value), source)
    return f"{node.op_type} {node.outputs[0].name} reads a new input"


def added_to(model: ir.Model, rng: Rng) -> str:
    """Add, subtract or multiply another value of the same shape."""
    shapes = shapes_of(model)
    values = [*tensors(model, shapes), model.graph.inputs[0]]
    value = pick(rng, values)
    other = pick(rng, [v for v in values if shapes.shape(v) == shapes.shape(value)])
    order = {v: i for i, v in enumerate([*model.graph.inputs, *tensors(model, shapes)])}
    a, b = sorted((value, other), key=order.__getitem__)
    if not b.uses():
        return ""
    return insert(model, rng, b, pick(rng, ["Add", "Sub", "Mul"]), a) + f" and {a.name}"


def split_in_another_order(model: ir.Model, rng: Rng) -> str:
    node = pick_node(rng, model, "Split")
    i, j = rng.choice(len(node.outputs), 2, replace=False)
    a, b = list(node.outputs[i].uses()), list(node.outputs[j].uses())
    for uses, output in ((a, node.outputs[j]), (b, node.outputs[i])):
        for user, index in uses:
            user.replace_input_with(index, output)
    return f"outputs {i} and {j} of Split swapped"


def attribute_changed(model: ir.Model, rng: Rng) -> str:
    node, attribute = pick(rng, [
        (node, a) for node in model.graph for a in node.attributes.values()
        if a.type in (ir.AttributeType.INT, ir.AttributeType.FLOAT)
    ])  # fmt: skip
    if attribute.type == ir.AttributeType.FLOAT:
        value: Any = float(attribute.value * pick(rng, [0.5, 2.0, 0.0, -1.0]))
        node.attributes.add(ir.AttrFloat32(attribute.name, value))
    else:
        value = int(attribute.value + pick(rng, [-1, 1, 2]))
        node.attributes.add(ir.AttrInt64(attribute.name, value))
    return f"{attribute.name} of {node.op_type} is {value}"


ATTRIBUTES: dict[str, list[ir.Attr]] = {
    "Attention": [ir.AttrInt64("is_causal", 1), ir.AttrFloat32("softcap", 1.5),
                  ir.AttrFloat32("scale", 0.2), ir.AttrInt64("unidirectional", 1),
                  ir.AttrInt64("qk_matmul_output_mode", 1), ir.AttrInt64("do_rotary", 1),
                  ir.AttrInt64s("qkv_hidden_sizes", [12, 12, 12]),
                  ir.AttrFloat32("mask_filter_value", -5.0)],
    "MultiHeadAttention": [ir.AttrInt64("unidirectional", 1), ir.AttrFloat32("scale", 0.2),
                           ir.AttrFloat32("mask_filter_value", -5.0)],
    "Gemm": [ir.AttrFloat32("alpha", 0.5), ir.AttrFloat32("beta", 2.0), ir.AttrInt64("transA", 1),
             ir.AttrInt64("transB", 1)],
    "Reshape": [ir.AttrInt64("allowzero", 1)],
    "LayerNormalization": [ir.AttrFloat32("epsilon", 0.5), ir.AttrInt64("axis", -2)],
    "ReduceMean": [ir.AttrInt64("keepdims", 0)],
    "ReduceSum": [ir.AttrInt64("keepdims", 0)],
    "Split": [ir.AttrInt64("axis", 1)],
}  # fmt: skip


def attribute_added(model: ir.Model, rng: Rng) -> str:
    node = pick_node(rng, model, *ATTRIBUTES)
    attribute = pick(rng, ATTRIBUTES[node.op_type])
    node.attributes.add(attribute)
    return f"{attribute.name} of {node.op_type} is {attribute.value}"


def input_dropped(model: ir.Model, rng: Rng) -> str:
    """Remove an optional operand: a bias, a mask, a cache."""
    types = ("Attention", "MultiHeadAttention", "Gemm", "LayerNormalization")
    node = pick(rng, [n for n in nodes_of(model, *types) if len(n.inputs) > 2])
    index = int(rng.integers(1, len(node.inputs)))
    node.replace_input_with(index, None)
    return f"{node.op_type} without input {index}"


def twice(model: ir.Model, rng: Rng) -> str:
    """Duplicate a node, and let one of its readers use the copy."""
    node = pick_node(rng, model, "MatMul", "Softmax", "Einsum", "Reshape", "Attention")
    if not (uses := list(node.outputs[0].uses())):
        return ""
    attributes = list(node.attributes.values())
    copy = ir.Node(
        node.domain, node.op_type, node.inputs, attributes, num_outputs=len(node.outputs)
    )
    for output, original in zip(copy.outputs, node.outputs, strict=True):
        output.name = f"mutant_{original.name}"
    model.graph.insert_after(node, copy)
    user, index = pick(rng, uses)
    user.replace_input_with(index, copy.outputs[0])
    return f"{node.op_type} {node.outputs[0].name} is computed twice"


MUTATIONS: tuple[Mutation, ...] = (
    swapped_operands, other_permutation, other_split_of_heads, other_scale, moved_scale,
    scaled_once_more, scaled_by_element, scaled_by_length, other_axis, mask_removed, mask_twice,
    mask_negated, mask_transposed, also_an_output, also_read, weight_as_an_input, weight_changed,
    transposed, reversed_axis, heads_swapped, first_removed, only_the_first_eight,
    something_inserted, clipped, node_removed, read_elsewhere, another_source, added_to,
    split_in_another_order, attribute_changed, attribute_added, input_dropped, twice,
)  # fmt: skip


def mutant(number: int) -> tuple[ir.Model, str]:
    """Return the mutant of a number, and a description of its one or two changes."""
    rng = np.random.default_rng(number)
    name = list(SEEDS)[number % len(SEEDS)]
    model, changes = SEEDS[name](), list[str]()
    count = 1 if rng.random() < 0.7 else 2
    for mutation in rng.permutation(np.array(MUTATIONS, dtype=object)):
        if len(changes) == count:
            break
        with suppress(NotApplicable):
            if change := mutation(model, rng):
                changes.append(f"{mutation.__name__}: {change}")
    return model, f"#{number}, {name}; {'; '.join(changes)}"


# Corrupted files

TYPED = ("float_data", "int32_data", "int64_data", "double_data", "uint64_data")
Corruption = Callable[[onnx.ModelProto, Rng], object]


def tensor_of(proto: onnx.ModelProto, rng: Rng) -> onnx.TensorProto:
    attributes = [a.t for node in proto.graph.node for a in node.attribute if a.HasField("t")]
    return pick(rng, [*proto.graph.initializer, *attributes])


def node_of(proto: onnx.ModelProto, rng: Rng, field: str) -> onnx.NodeProto:
    return pick(rng, [node for node in proto.graph.node if len(getattr(node, field))])


def typed_elements(proto: onnx.ModelProto, rng: Rng) -> None:
    """Elements in the field of any type, sometimes one more or one less."""
    tensor = tensor_of(proto, rng)
    size = onnx.numpy_helper.to_array(tensor).size
    tensor.ClearField("raw_data")
    getattr(tensor, pick(rng, TYPED)).extend([1] * max(size + pick(rng, (-1, 0, 1)), 0))


def other_dims(proto: onnx.ModelProto, rng: Rng) -> None:
    tensor_of(proto, rng).dims[:] = pick(rng, [[1], [0], [2**40, 0], [2**62, 4], []])


def other_data_type(proto: onnx.ModelProto, rng: Rng) -> None:
    tensor_of(proto, rng).data_type = int(rng.integers(25))


def attribute_deleted(proto: onnx.ModelProto, rng: Rng) -> None:
    node = node_of(proto, rng, "attribute")
    del node.attribute[int(rng.integers(len(node.attribute)))]


def attribute_of_another_type(proto: onnx.ModelProto, rng: Rng) -> None:
    attribute = pick(rng, node_of(proto, rng, "attribute").attribute)
    value = pick(rng, [b"x", 1.5, 3, [1, 2], [1.5]])
    attribute.CopyFrom(onnx.helper.make_attribute(attribute.name, value))


def other_opset(proto: onnx.ModelProto, rng: Rng) -> None:
    proto.opset_import[0].version = pick(rng, [-1, 0, 1, 99, 2**31, 2**40, 2**62])


def other_operator(proto: onnx.ModelProto, rng: Rng) -> None:
    node = pick(rng, proto.graph.node)
    node.op_type = pick(rng, ["If", "Loop", "Scan", "Attention", "MultiHeadAttention", "Einsum",
                              "Constant", "Conv", "Split", "Softmax", "Reshape"])  # fmt: skip
    node.domain = pick(rng, ["", "", "com.microsoft"])


def other_input_axes(proto: onnx.ModelProto, rng: Rng) -> None:
    dims = pick(rng, proto.graph.input).type.tensor_type.shape.dim
    length = pick(rng, [-5, 0, 1, 2**40, 2**62])
    del dims[int(rng.integers(len(dims) + 1)) :]
    dims.add(dim_value=length)


def other_input_type(proto: onnx.ModelProto, rng: Rng) -> None:
    value = pick(rng, proto.graph.input)
    value.type.tensor_type.elem_type = pick(rng, [-1, 0, 1, 7, 8, 16, 99])


def input_deleted(proto: onnx.ModelProto, rng: Rng) -> None:
    inputs = node_of(proto, rng, "input").input
    del inputs[int(rng.integers(len(inputs)))]


def input_left_out(proto: onnx.ModelProto, rng: Rng) -> None:
    inputs = node_of(proto, rng, "input").input
    inputs[int(rng.integers(len(inputs)))] = ""


def outputs_changed(proto: onnx.ModelProto, rng: Rng) -> None:
    """No output, one more, or the output of another node."""
    node, other = (node_of(proto, rng, "output") for _ in range(2))
    node.output[:] = pick(rng, [[], [*node.output, "one_more"], list(other.output)])


CORRUPTIONS: tuple[Corruption, ...] = (
    typed_elements, other_dims, other_data_type, attribute_deleted, attribute_of_another_type,
    other_opset, other_operator, other_input_axes, other_input_type, input_deleted, input_left_out,
    outputs_changed,
)  # fmt: skip


def bytes_changed(content: bytearray, rng: Rng) -> None:
    for position in rng.integers(len(content), size=pick(rng, (1, 1, 4, 64))):
        content[position] = int(rng.integers(256))


def bytes_cut(content: bytearray, rng: Rng) -> None:
    start = int(rng.integers(len(content)))
    del content[start : pick(rng, (start + 1, start + 16, len(content)))]


def bytes_repeated(content: bytearray, rng: Rng) -> None:
    start, end = sorted(int(one) for one in rng.integers(len(content), size=2))
    content[start:start] = content[start : min(end, start + 256)]


DAMAGES = (bytes_changed, bytes_cut, bytes_repeated)


def corrupted(number: int, files: Sequence[Path]) -> tuple[bytes, str]:
    """Return the corrupted file of a number, and a description."""
    rng = np.random.default_rng(number)
    corruption, path = pick(rng, (*CORRUPTIONS, *DAMAGES)), pick(rng, files)
    if corruption in DAMAGES:
        content = bytearray(path.read_bytes())
        corruption(content, rng)
    else:
        proto = onnx.load(path)
        with suppress(NotApplicable):
            corruption(proto, rng)
        content = proto.SerializeToString()
    return bytes(content), f"#{number}, {path.name}; {corruption.__name__}"
