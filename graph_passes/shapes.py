"""What every value's shape is once the named axes have lengths.

Exporters write shapes as programs (Shape, Gather, Concat, Where, ...) that static inference cannot
follow. Here the axes are given lengths, the integer program is *run* on the ONNX reference
evaluator, and everything else is inferred node by node by ONNX's own rules. Nothing large is read:
weights stay on disk.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx
import onnx_ir as ir
from onnx import shape_inference

from graph_passes.constants import constant_tensor, evaluate

__all__ = ["Fact", "Facts", "bind_axes", "interpret", "named_axes"]

SMALL = 1024
"""Elements; shape programs and scales are smaller, weights and masks need not be known."""

NOT_RUN = frozenset({"RandomNormal", "RandomUniform", "RandomNormalLike", "RandomUniformLike",
                     "Multinomial", "Bernoulli", "If", "Loop", "Scan"})  # fmt: skip

GROWING = frozenset({"ConstantOfShape", "Expand", "Tile", "Range", "Pad", "OneHot", "EyeLike",
                     "Resize"})  # fmt: skip
"""From a few numbers these make as many as they are told to: run only where that is few."""


@dataclass(frozen=True, eq=False)
class Fact:
    """Element type, shape, and the elements themselves where they follow from shapes alone."""

    dtype: ir.DataType
    shape: tuple[int, ...]
    constant: np.ndarray | None = None


@dataclass(frozen=True, eq=False)
class Facts:
    """What is known of each value of a graph at one choice of axis lengths.

    ``unknown`` names the nodes whose outputs could not be inferred, with the reason.
    """

    axes: Mapping[str, int]
    known: Mapping[ir.Value, Fact] = field(repr=False)
    unknown: Mapping[ir.Node, str] = field(repr=False)

    def shape(self, value: ir.Value | None) -> tuple[int, ...] | None:
        fact = self.known.get(value) if value is not None else None
        return None if fact is None else fact.shape

    def constant(self, value: ir.Value | None) -> np.ndarray | None:
        """The elements of a small value that does not depend on the model's data."""
        fact = self.known.get(value) if value is not None else None
        return None if fact is None else fact.constant


def named_axes(graph: ir.Graph) -> dict[str, int]:
    """The free axes of the graph's inputs, each with the first position it appears at.

    A dynamic axis without a name is called ``input[position]``.
    """
    axes: dict[str, int] = {}
    for value in _real_inputs(graph):
        for position, dim in enumerate(value.shape or ()):
            for name in _symbols(value, position, dim):
                axes.setdefault(name, position)
    return axes


def bind_axes(graph: ir.Graph, *, batch: int, sequence: int) -> dict[str, int]:
    """Lengths for every axis: those that lead an input are batches, all others sequences.

    Axes with different names that a graph wants equal (two batches, two lengths) therefore are; a
    total length is that of the past and of the tokens.
    """
    axes = named_axes(graph)
    cached = any("past" in name for name in axes)
    return {
        name: batch if position == 0 else 2 * sequence if cached and "total" in name else sequence
        for name, position in axes.items()
    }


def input_shape(value: ir.Value, axes: Mapping[str, int]) -> tuple[int, ...] | None:
    """The shape of a graph input when its axes have these lengths; None where it has none."""
    if value.shape is None:
        return None
    lengths = [_length(value, i, dim, axes) for i, dim in enumerate(value.shape)]
    return None if any(length < 0 for length in lengths) else tuple(lengths)


def interpret(model: ir.Model, axes: Mapping[str, int]) -> Facts:
    """Run the shape program of a model with the given axis lengths, bodies of nodes included.

    Nodes that cannot be followed (unknown operators, data-dependent shapes, state that grows from
    one turn of a loop to the next) leave their outputs unknown; that is a fact, not an error.
    """
    known: dict[ir.Value, Fact] = {}
    unknown: dict[ir.Node, str] = {}
    for value in _real_inputs(model.graph):
        shape = input_shape(value, axes)
        if shape is not None and value.dtype is not None:
            known[value] = Fact(value.dtype, shape)
    for value in model.graph.initializers.values():
        if value.const_value is not None:
            known[value] = _of_tensor(value.const_value)
    _follow_all(model.graph, known, unknown, {"": 1, **model.opset_imports})
    return Facts(dict(axes), known, unknown)


def _real_inputs(graph: ir.Graph) -> list[ir.Value]:
    """Old graphs list their initializers among the inputs."""
    return [value for value in graph.inputs if value.name not in graph.initializers]


def _symbols(value: ir.Value, position: int, dim: int | ir.SymbolicDim) -> Sequence[str]:
    if isinstance(dim, int):
        return ()
    if dim.value is None:
        return (f"{value.name}[{position}]",)
    try:
        return sorted(dim.free_symbols()) or (dim.value,)  # past_sequence + sequence
    except ValueError:  # a name that is no expression
        return (dim.value,)


def _length(
    value: ir.Value, position: int, dim: int | ir.SymbolicDim, axes: Mapping[str, int]
) -> int:
    if isinstance(dim, int):
        return dim
    names = _symbols(value, position, dim)
    if len(names) == 1 and names[0] == (dim.value or f"{value.name}[{position}]"):
        return axes[names[0]]
    length = dim.evaluate({name: axes[name] for name in names})
    return length if isinstance(length, int) else -1  # n / 2 of an odd n


def _follow_all(
    graph: ir.Graph,
    known: dict[ir.Value, Fact],
    unknown: dict[ir.Node, str],
    opsets: Mapping[str, int],
) -> None:
    """Follow the nodes of a graph or a body in order."""
    for node in graph:
        body = BODIES.get(node.op_type) if not node.domain else None
        if body is not None:
            reason = body(node, known, unknown, opsets)
        else:
            reason = _follow(node, known, opsets)
        if reason:
            unknown[node] = reason


def _enter(
    body: ir.Graph,
    given: Sequence[Fact | None],
    known: dict[ir.Value, Fact],
    unknown: dict[ir.Node, str],
    opsets: Mapping[str, int],
) -> list[Fact | None]:
    """Follow a body whose inputs are these; what is known of its outputs."""
    for value, fact in zip(body.inputs, given, strict=False):
        if fact is not None:
            known[value] = Fact(fact.dtype, fact.shape)  # another at each turn: shape only
    for value in body.initializers.values():
        if value.const_value is not None:
            known[value] = _of_tensor(value.const_value)
    _follow_all(body, known, unknown, opsets)
    return [known.get(value) for value in body.outputs]


def _same(a: Fact | None, b: Fact | None) -> bool:
    return a is not None and b is not None and (a.dtype, a.shape) == (b.dtype, b.shape)


def _keep(
    outputs: Sequence[ir.Value], facts: Sequence[Fact | None], known: dict[ir.Value, Fact]
) -> None:
    for value, fact in zip(outputs, facts, strict=False):
        if fact is not None:
            known[value] = Fact(fact.dtype, fact.shape)


def _follow_if(
    node: ir.Node,
    known: dict[ir.Value, Fact],
    unknown: dict[ir.Node, str],
    opsets: Mapping[str, int],
) -> str:
    """Both branches; an output is known where they agree on it."""
    ends = [
        _enter(node.attributes[name].as_graph(), (), known, unknown, opsets)
        for name in ("then_branch", "else_branch")
    ]
    agreed = [a if _same(a, b) else None for a, b in zip(*ends, strict=False)]
    _keep(node.outputs, agreed, known)
    return "" if all(agreed) else "its branches make outputs of different shapes"


def _follow_loop(
    node: ir.Node,
    known: dict[ir.Value, Fact],
    unknown: dict[ir.Node, str],
    opsets: Mapping[str, int],
) -> str:
    """One turn of the body, from the initial state, which must keep its shape."""
    state = [known.get(value) if value is not None else None for value in node.inputs[2:]]
    turn, condition = Fact(ir.DataType.INT64, ()), Fact(ir.DataType.BOOL, ())
    body = node.attributes["body"].as_graph()
    ends = _enter(body, [turn, condition, *state], known, unknown, opsets)[1:]
    kept = [a if _same(a, b) else None for a, b in zip(state, ends, strict=False)]
    _keep(node.outputs, kept, known)
    return "" if len(kept) == len(node.outputs) and all(kept) else "its state is not of one shape"


def _follow_scan(
    node: ir.Node,
    known: dict[ir.Value, Fact],
    unknown: dict[ir.Node, str],
    opsets: Mapping[str, int],
) -> str:
    """One turn of the body, on the first slice of what is scanned."""
    facts = [known.get(value) if value is not None else None for value in node.inputs]
    count = len(facts) - node.attributes.get_int("num_scan_inputs", 0)
    axes = node.attributes.get_ints("scan_input_axes", None) or [0] * (len(facts) - count)
    state, turns = facts[:count], None
    slices: list[Fact | None] = []
    for fact, axis in zip(facts[count:], axes, strict=False):
        if fact is None or not -len(fact.shape) <= axis < len(fact.shape):
            return "what it scans has no known shape"
        lengths = list(fact.shape)
        turns = lengths.pop(axis)
        slices.append(Fact(fact.dtype, tuple(lengths)))
    ends = _enter(node.attributes["body"].as_graph(), [*state, *slices], known, unknown, opsets)
    kept = [a if _same(a, b) else None for a, b in zip(state, ends, strict=False)]
    stacked: list[Fact | None] = []
    if turns is not None and not node.attributes.get_ints("scan_output_axes", None):
        stacked = [end and Fact(end.dtype, (turns, *end.shape)) for end in ends[count:]]
    _keep(node.outputs, [*kept, *stacked], known)
    return "" if all(kept) and all(stacked) else "its state is not of one shape"


BODIES = {"If": _follow_if, "Loop": _follow_loop, "Scan": _follow_scan}


def _of_tensor(tensor: ir.TensorProtocol) -> Fact:
    shape = tuple(tensor.shape.numpy())
    small = math.prod(shape) <= SMALL and tensor.dtype != ir.DataType.STRING
    return Fact(tensor.dtype, shape, tensor.numpy() if small else None)


def _follow(node: ir.Node, known: dict[ir.Value, Fact], opsets: Mapping[str, int]) -> str:
    """Add what the node's outputs are to ``known``; the reason where that cannot be told."""
    if node.op_type == "Constant" and not node.domain:
        tensor = constant_tensor(node.outputs[0])
        if tensor is None:
            return "its value is not a dense tensor"
        known[node.outputs[0]] = _of_tensor(tensor)
        return ""
    facts = [None if value is None else known.get(value) for value in node.inputs]
    if facts.count(None) > node.inputs.count(None):
        return "its inputs have no known shape"
    rule = RULES.get((node.domain, node.op_type))
    if rule is not None:
        shapes = rule([None if fact is None else fact.shape for fact in facts], node)
        types = [fact.dtype for fact in facts if fact is not None]
        if not types or not shapes:
            return f"{node.op_type} has no known shape"
        dtype = next((each for each in types if each.is_floating_point()), types[0])
        for index, (value, shape) in enumerate(zip(node.outputs, shapes, strict=False)):
            if shape is not None:
                counts = (node.op_type, index) in COUNTS
                known[value] = Fact(ir.DataType.INT32 if counts else dtype, shape)
        return ""
    if not onnx.defs.has(node.op_type, opsets[""], node.domain):
        return _guess(node, facts, known)
    if node.op_type == "Shape":
        return _follow_shape(node, facts, known)
    if _runs(node, facts):
        if node.op_type in GROWING:
            reason = _infer(node, facts, known, opsets)
            if not reason and math.prod(known[node.outputs[0]].shape) > SMALL:
                return ""
        if _run(node, facts, known, opsets):
            return ""
    return _infer(node, facts, known, opsets)


def _guess(node: ir.Node, facts: Sequence[Fact | None], known: dict[ir.Value, Fact]) -> str:
    """An operator that ONNX does not know: of one input and one output, taken to keep the shape.

    A wrong guess makes a wrong shape, which no reading and no certificate survives.
    """
    name = ".".join(filter(None, (node.domain, node.op_type)))
    if len(facts) != 1 or len(node.outputs) != 1 or facts[0] is None:
        return f"{name} is not an operator of ONNX"
    known[node.outputs[0]] = Fact(facts[0].dtype, facts[0].shape)
    return ""


def _runs(node: ir.Node, facts: Sequence[Fact | None]) -> bool:
    given = [fact for fact in facts if fact is not None]
    return (
        bool(given)
        and node.op_type not in NOT_RUN
        and all(fact.constant is not None for fact in given)
    )


def _run(
    node: ir.Node,
    facts: Sequence[Fact | None],
    known: dict[ir.Value, Fact],
    opsets: Mapping[str, int],
) -> bool:
    """Whether the reference evaluator could compute the outputs; shapes may follow even so."""
    try:
        with np.errstate(all="ignore"):
            results = evaluate(node, [None if f is None else f.constant for f in facts], opsets)
        made = [(ir.DataType.from_numpy(result.dtype), result) for result in results]
    except Exception:  # it lacks the operator, or the operator makes no tensor of numbers
        return False
    for value, (dtype, result) in zip(node.outputs, made, strict=False):
        keep = result if result.size <= SMALL and dtype != ir.DataType.STRING else None
        known[value] = Fact(dtype, result.shape, keep)
    return bool(made)


def _follow_shape(node: ir.Node, facts: Sequence[Fact | None], known: dict[ir.Value, Fact]) -> str:
    if not facts or facts[0] is None:
        return "Shape reads nothing"
    start = node.attributes.get_int("start", 0)
    end = node.attributes.get_int("end", len(facts[0].shape))
    constant = np.array(facts[0].shape[start:end], dtype=np.int64)
    known[node.outputs[0]] = Fact(ir.DataType.INT64, constant.shape, constant)
    return ""


def _infer(
    node: ir.Node,
    facts: Sequence[Fact | None],
    known: dict[ir.Value, Fact],
    opsets: Mapping[str, int],
) -> str:
    schema = onnx.defs.get_schema(node.op_type, opsets[""], "")
    proto = ir.serde.serialize_node(node)
    proto.input[:] = [f"i{i}" if fact is not None else "" for i, fact in enumerate(facts)]
    proto.output[:] = [f"o{i}" for i in range(len(node.outputs))]
    types: dict[str, onnx.TypeProto] = {}
    data: dict[str, onnx.TensorProto] = {}
    imports = [onnx.helper.make_opsetid(domain, version) for domain, version in opsets.items()]
    try:
        for i, fact in enumerate(facts):
            if fact is not None:
                types[f"i{i}"] = onnx.helper.make_tensor_type_proto(fact.dtype.value, fact.shape)
                if fact.constant is not None:
                    data[f"i{i}"] = onnx.numpy_helper.from_array(fact.constant)
        inferred = shape_inference.infer_node_outputs(
            schema, proto, types, data, opset_imports=imports
        )
    except Exception as error:  # onnx raises bare InferenceError, KeyError, RuntimeError, ...
        return f"{node.op_type}: {str(error).splitlines()[0] if str(error) else 'not inferred'}"
    for i, value in enumerate(node.outputs):
        tensor = inferred[f"o{i}"].tensor_type if f"o{i}" in inferred else None
        if tensor is None or not tensor.HasField("shape"):
            continue
        dims = [dim.dim_value if dim.HasField("dim_value") else None for dim in tensor.shape.dim]
        if None not in dims:
            shape = tuple(int(dim) for dim in dims if dim is not None)
            known[value] = Fact(ir.DataType(tensor.elem_type), shape)
    if node.outputs and node.outputs[0] not in known:
        return f"the shape of {node.op_type} depends on data"
    return ""


Shapes = Sequence[tuple[int, ...] | None]


def _like_first(shapes: Shapes, node: ir.Node) -> Shapes:
    return [shapes[0]]


def _skip_normalization(shapes: Shapes, node: ir.Node) -> Shapes:
    return [shapes[0], None, None, shapes[0]]


def _fused_matmul(shapes: Shapes, node: ir.Node) -> Shapes:
    a, b = shapes[0], shapes[1]
    if a is None or b is None:
        return []
    if node.attributes.get_int("transA", 0):
        a = (*a[:-2], a[-1], a[-2])
    if node.attributes.get_int("transB", 0):
        b = (*b[:-2], b[-1], b[-2])
    return [(*np.broadcast_shapes(a[:-2], b[:-2]), a[-2], b[-1])]


def _matmul(shapes: Shapes, node: ir.Node) -> Shapes:
    a, b = shapes[:2]
    return [] if a is None or b is None or len(b) != 2 else [(*a[:-1], b[-1])]


def _fused_gemm(shapes: Shapes, node: ir.Node) -> Shapes:
    a, b = shapes[:2]
    if a is None or b is None or len(a) != 2 or len(b) != 2:
        return []
    transposed = [node.attributes.get_int(name, 0) for name in ("transA", "transB")]
    return [(a[1 if transposed[0] else 0], b[0 if transposed[1] else 1])]


def _matmul_n_bits(shapes: Shapes, node: ir.Node) -> Shapes:
    return [] if shapes[0] is None else [(*shapes[0][:-1], node.attributes.get_int("N", 0))]


def _embedding(shapes: Shapes, node: ir.Node) -> Shapes:
    ids, table = shapes[0], shapes[2]
    if ids is None or table is None:
        return []
    return [(*ids, table[-1]), (ids[0],), (*ids, table[-1])]


def _attention(shapes: Shapes, node: ir.Node) -> Shapes:
    """com.microsoft Attention: x (B, S, D), weight (D, H*K + H*K + H*V)."""
    x, weight = shapes[:2]
    heads = node.attributes.get_int("num_heads", 0)
    if x is None or weight is None or len(x) != 3 or not heads:
        return []
    sizes = node.attributes.get_ints("qkv_hidden_sizes", None) or [weight[-1] // 3] * 3
    past = shapes[4] if len(shapes) > 4 else None
    length = x[1] + (past[3] if past is not None and len(past) == 5 else 0)
    return [(*x[:2], sizes[2]), (2, x[0], heads, length, sizes[0] // heads)]


def _multi_head_attention(shapes: Shapes, node: ir.Node) -> Shapes:
    q, k, v, _, _, _, past = [*shapes, *[None] * 7][:7]
    heads = node.attributes.get_int("num_heads", 0)
    if q is None or len(q) < 3 or not heads:
        return []
    if len(q) == 5:
        size, total, width = q[4], q[1], heads * q[4]
    else:
        size = q[-1] // heads
        total = q[1] if k is None else k[2] if len(k) == 4 else k[1]
        width = q[-1] if v is None else v[1] * v[3] if len(v) == 4 else v[2]
    total += past[2] if past is not None else 0
    present = (q[0], heads, total, size), (q[0], heads, total, width // heads)
    return [(*q[:2], width), *present]


def _group_query_attention(shapes: Shapes, node: ir.Node) -> Shapes:
    q, k, _, past = [*shapes, *[None] * 4][:4]
    heads, groups = (node.attributes.get_int(n, 0) for n in ("num_heads", "kv_num_heads"))
    if q is None or len(q) != 3 or not heads or not groups:
        return []
    size = q[-1] // (heads if k is not None else heads + 2 * groups)
    present = (q[0], groups, q[1] + (past[2] if past is not None else 0), size)
    return [(*q[:2], heads * size), present, present]


COUNTS = {("EmbedLayerNormalization", 1)}
"""Outputs of RULES that are 32-bit integers; all others have the type of the first float input."""

RULES: dict[tuple[str, str], Callable[[Shapes, ir.Node], Shapes]] = {
    ("com.microsoft", "Gelu"): _like_first,
    ("com.microsoft", "FastGelu"): _like_first,
    ("com.microsoft", "Attention"): _attention,
    ("com.microsoft", "BiasGelu"): _like_first,
    ("com.microsoft", "BiasSoftmax"): _like_first,
    ("com.microsoft", "EmbedLayerNormalization"): _embedding,
    ("com.microsoft", "GroupQueryAttention"): _group_query_attention,
    ("com.microsoft", "MultiHeadAttention"): _multi_head_attention,
    ("com.microsoft", "RotaryEmbedding"): _like_first,
    ("com.microsoft", "SimplifiedLayerNormalization"): _like_first,
    ("com.microsoft", "QuickGelu"): _like_first,
    ("", "LayerNormalization"): _like_first,
    ("", "SimplifiedLayerNormalization"): _like_first,
    ("com.microsoft", "DynamicQuantizeMatMul"): _matmul,
    ("com.microsoft", "FusedGemm"): _fused_gemm,
    ("com.microsoft", "MatMulIntegerToFloat"): _matmul,
    ("com.microsoft", "MatMulNBits"): _matmul_n_bits,
    ("com.microsoft", "TransposeMatMul"): _fused_matmul,
    ("com.microsoft", "SkipLayerNormalization"): _skip_normalization,
    ("com.microsoft", "SkipSimplifiedLayerNormalization"): _skip_normalization,
    ("com.microsoft", "FusedMatMul"): _fused_matmul,
}
"""Shapes of the operators that ONNX Runtime's own optimizer writes and ONNX does not know."""
