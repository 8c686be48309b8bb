"""The second noun, FeedForwardBlock, and PruneNeurons: neurons that are masked leave the graph."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import onnx_ir as ir

from graph_passes.attention import as_matrix
from graph_passes.constants import (
    constant_array,
    constant_shape,
    constant_tensor,
    constant_type,
    evaluate,
    is_constant,
    origin,
)
from graph_passes.edit import Inserter, remove_unused, share_constants
from graph_passes.errors import CannotRewrite
from graph_passes.invariants import check, interface
from graph_passes.names import PINNED
from graph_passes.products import Linear, linear
from graph_passes.shapes import Facts, interpret_small

if TYPE_CHECKING:
    from jaxtyping import Float

__all__ = ["FeedForwardBlock", "Operand", "PruneNeurons", "find_feed_forward", "why_not"]

LINEAR = frozenset({"Add", "Sub", "Mul", "Div", "Neg", "Where", "Cast", "CastLike", "Identity",
                    "Dropout"})  # fmt: skip
"""Linear in the tokens, but for products, quotients and choices of two activations."""

BENT = frozenset({"Pow", "Sqrt", "Reciprocal", "Exp", "Log", "Abs", "Sign", "Erf", "Tanh",
                  "Sigmoid", "HardSigmoid", "Relu", "PRelu", "LeakyRelu", "ThresholdedRelu", "Elu",
                  "Celu", "Selu", "Gelu", "Softplus", "Softsign", "Swish", "HardSwish", "Mish",
                  "Clip", "Min", "Max", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Equal",
                  "And", "Or", "Not"})  # fmt: skip
CONTRIB = frozenset({"Gelu", "FastGelu", "BiasGelu", "QuickGelu"})
LAID_OUT = frozenset({"Reshape", "Squeeze", "Unsqueeze", "Flatten"})
COUNTING = frozenset({"Gather", "Slice", "Squeeze", "Unsqueeze", "Cast", "Identity", "Concat"})
"""What picks lengths out of shapes, and makes shapes of lengths."""


class Operand(NamedTuple):
    """A constant where a node reads it; ``axis`` counts the neurons."""

    node: ir.Node
    position: int
    axis: int

    @property
    def value(self) -> ir.Value:
        value = self.node.inputs[self.position]
        assert value is not None
        return value


@dataclass(frozen=True, eq=False)
class FeedForwardBlock:
    """out = f(x W_1 + b_1) W_2 + b_2, or gated: (f(x W_g + b_g) * (x W_u + b_u)) W_2 + b_2.

    Column j of every value between the products is neuron j; whatever f is, it is element-wise.

    Attributes:
        name: Unique among the feed-forwards of the model.
        graph: Owns the nodes: the main graph, or the body of an If or a Loop.
        x: The tokens (..., D), as they were before an exporter flattened them.
        first: The products with W_1, or with W_g and W_u in order of execution.
        products: Their nodes.
        hidden: What the second product reads, (..., F), flattened where it is.
        second: The product with W_2.
        product: Its node.
        bias: b_2, where there is one.
        output: The value after b_2.
        nodes: Between the products, in order of execution.
        constants_by_neuron: b_1 and all other constants on the way with an element a neuron.
        widths: Each Reshape among them that is told a shape which ends in F.
    """

    name: str
    graph: ir.Graph
    x: ir.Value
    first: tuple[Linear, ...]
    products: tuple[ir.Node, ...]
    hidden: ir.Value
    second: Linear
    product: ir.Node
    bias: ir.Value | None
    output: ir.Value
    nodes: tuple[ir.Node, ...]
    constants_by_neuron: tuple[Operand, ...]
    widths: tuple[ir.Node, ...]

    @property
    def num_neurons(self) -> int:
        """F."""
        return self.second.width

    @property
    def input_size(self) -> int:
        """D."""
        return self.first[0].width

    def matrix(self, index: int = 0) -> Float[np.ndarray, "D F"]:
        """W_1, or W_g and W_u by their index in ``first``."""
        part = self.first[index]
        return as_matrix(constant_array(part.weight), part.contracted) * part.scale

    def second_matrix(self) -> Float[np.ndarray, "F N"]:
        """W_2."""
        part = self.second
        return as_matrix(constant_array(part.weight), part.contracted) * part.scale

    def weights(self) -> tuple[Operand, ...]:
        """Each weight, with its axis of neurons."""
        parts = zip(self.products, self.first, strict=True)
        first = [_weight(node, part, _columns_axis(part)) for node, part in parts]
        return (*first, _weight(self.product, self.second, self.second.contracted[0]))

    def operands(self) -> tuple[Operand, ...]:
        """All constants that are counted by neurons."""
        return (*self.weights(), *self.constants_by_neuron)


@dataclass(frozen=True, eq=False)
class PruneNeurons(ir.passes.InPlacePass):
    """Take masked neurons out of feed-forwards.

    Before: out = sum over neurons j of f(x W_1 + b_1)_j W_2[j] + b_2
    After:  out = sum over the neurons j with mask_j = 1, of the same

    Columns of W_1 (of W_g and W_u), elements of b_1 and rows of W_2 leave the graph; its nodes
    stay. Exact where the rows of W_2 are zero, and but for a constant that can be put into b_2
    where the activations are constant; lossy otherwise. Blocks that share weights (ALBERT) are
    given one mask, and go on sharing. Refused (``CannotRewrite``) where ``why_not`` gives a reason,
    where a mask is no 0 or 1 for each neuron or leaves none, and where a weight is also read by
    what is not pruned alike.

    Attributes:
        masks: For each block to rewrite, by its name, 1 for each neuron that stays, 0 for others.
    """

    masks: Mapping[str, Sequence[int] | np.ndarray]

    def requires(self, model: ir.Model) -> None:
        found = find_feed_forward(model)
        blocks = {block.name: block for block in found}
        for name, mask in self.masks.items():
            if (block := blocks.get(name)) is None:
                raise CannotRewrite(
                    f"{name}: no feed-forward has this name",
                    f"the model has {', '.join(blocks) or 'none'}",
                )
            _check_mask(name, mask, block.num_neurons)
            if not all(mask) and (reason := why_not(block)):
                raise CannotRewrite(f"{name}: {reason}", "leave this layer out of the masks")
        chosen = self._chosen(found)
        cuts = _cuts(chosen)
        for block, _ in chosen:
            if reader := _read_elsewhere(block, cuts):
                raise CannotRewrite(
                    f"{block.name}: {reader.name or reader.op_type} shares its weights and is not "
                    "pruned by the same mask",
                    "give every layer that shares weights one mask, or leave them all out",
                )

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        before, blocks = interface(model), find_feed_forward(model)
        chosen = self._chosen(blocks)
        if not chosen:
            return ir.passes.PassResult(model, modified=False)
        for block in blocks:
            block.product.metadata_props[PINNED] = block.name
        makers = {
            block: Inserter(block.graph, block.product, f"{block.name}/pruned")
            for block, _ in chosen
        }
        _cut(_cuts(chosen), {at[:2]: makers[b] for b, _ in chosen for at in b.operands()})
        for block, kept in chosen:
            for node in block.widths:
                _tell(node, len(kept), Inserter(block.graph, node, f"{block.name}/pruned"))
            for value in _made((*block.products, *block.nodes)):
                if value.shape is not None and value.shape[-1:] == (block.num_neurons,):
                    value.shape = ir.Shape([*value.shape[:-1], len(kept)])
        share_constants(model, since=before.initializers)
        remove_unused(model)
        check(before, model, after="PruneNeurons")
        return ir.passes.PassResult(model, modified=True)

    def _chosen(self, blocks: Sequence[FeedForwardBlock]) -> list[tuple[FeedForwardBlock, _Kept]]:
        masked = [block for block in blocks if not all(self.masks.get(block.name, (1,)))]
        return [(block, np.flatnonzero(np.asarray(self.masks[block.name]))) for block in masked]


_Kept = np.ndarray
_Place = tuple[ir.Node, int]
_Cuts = Mapping[_Place, Mapping[int, _Kept]]
"""Which elements stay, by the axis, wherever a node reads a constant that is cut."""


def find_feed_forward(model: ir.Model) -> list[FeedForwardBlock]:
    """Every feed-forward of a model, in order of execution, bodies of nodes included.

    Not found: two products with nothing but linear maps between them, values that anything outside
    reads, how many neurons there are included, and fewer neurons than the tokens have elements.
    Such bottlenecks (adapters, squeezed summaries) are codes, whose every column speaks of the
    whole token; a wide pooler with its classifier is a feed-forward by all that a graph tells.
    """
    runs = [interpret_small(model, batch=b, sequence=s) for b, s in ((2, 5), (3, 7))]
    nodes = ir.traversal.RecursiveGraphIterator(model.graph)
    read = (_read(node, runs, model.opset_imports) for node in nodes)
    blocks = [block for block in read if block is not None]
    names = [_name(block) for block in blocks]
    return [
        replace(block, name=name if name and names.count(name) == 1 else f"feed_forward_{index}")
        for index, (block, name) in enumerate(zip(blocks, names, strict=True))
    ]


def why_not(block: FeedForwardBlock) -> str:
    """Why neurons cannot be taken out of a block; empty where they can."""
    behind = [value for operand in block.operands() for value in _behind(operand.value)]
    if any(value.is_graph_input() or value.is_graph_output() for value in behind):
        return "its weights are inputs or outputs of the graph"
    makers = [node for value in behind if (node := value.producer()) is not None]
    if any(node.op_type == "DequantizeLinear" for node in makers):
        return "its weights are quantized"
    return ""


def _check_mask(name: str, mask: Sequence[int] | np.ndarray, neurons: int) -> None:
    fix = "write 1 for each neuron that stays and 0 for each that goes"
    array = np.asarray(mask)
    if array.shape != (neurons,):
        got = f"{len(array)} entries" if array.ndim == 1 else f"shape {array.shape}"
        raise CannotRewrite(f"the mask of {name} has {got}, expected {neurons}: one a neuron", fix)
    if len(odd := array[(array != 0) & (array != 1)]):
        raise CannotRewrite(f"the mask of {name} holds {odd[0]}, expected 0 or 1", fix)
    if not array.any():
        raise CannotRewrite(f"the mask of {name} leaves no neuron", "keep at least one")


# ---- finding ------------------------------------------------------------------------------------


def _read(
    product: ir.Node, runs: Sequence[Facts], opsets: Mapping[str, int]
) -> FeedForwardBlock | None:
    """The feed-forward that ends in this node; None where none does."""
    second = _linear(product, runs[0])
    if second is None or product.op_type == "FusedGemm" or not isinstance(product.graph, ir.Graph):
        return None
    if len(second.contracted) != 1 or not _is_plain(second):
        return None
    first: dict[ir.Node, Linear] = {}
    between: dict[ir.Node, None] = {}
    operands: list[Operand] = []
    pending = [second.tokens]
    while pending:
        value = pending.pop()
        node = value.producer()
        if node is None or node.graph is not product.graph:
            return None
        if node in first or node in between:
            continue
        if not _same_size(value, second.tokens, runs):
            return None
        if (part := _linear(node, runs[0])) is not None:
            first[node] = part
            given = list(enumerate(node.inputs))[2:]
        elif (count := _elementwise(node)) > 0:
            between[node] = None
            given = list(enumerate(node.inputs))[:count]
        else:
            return None
        active = [other for _, other in given if other is not None and not is_constant(other)]
        at = _by_neuron(node, [(i, other) for i, other in given if is_constant(other)], second)
        if at is None or (node in first and not _is_plain(first[node])):
            return None
        pending += active
        operands += at
    tokens = {_unflattened(part.tokens, runs) for part in first.values()}
    if len(first) > 2 or len(tokens) != 1 or not any(map(_is_bent, (*first, *between))):
        return None
    if PINNED not in product.metadata_props and second.width < max(p.width for p in first.values()):
        return None
    inner = {*first, *between, product}
    for value in _made((*first, *between)):
        readers = [node for node, _ in value.uses() if node.op_type != "Shape"]
        if value.is_graph_output() or not inner.issuperset(readers):
            return None
    widths = _widths([*first, *between], second.width, runs[0], opsets)
    if widths is None:
        return None
    order = [node for node in product.graph if node in inner]
    bias, output = _bias(product, second.columns.size)
    return FeedForwardBlock(
        name="",
        graph=product.graph,
        x=tokens.pop(),
        first=tuple(first[node] for node in order if node in first),
        products=tuple(node for node in order if node in first),
        hidden=second.tokens,
        second=second,
        product=product,
        bias=bias,
        output=output,
        nodes=tuple(node for node in order if node in between),
        constants_by_neuron=tuple(sorted(operands, key=lambda o: order.index(o.node))),
        widths=widths,
    )


def _linear(node: ir.Node, facts: Facts) -> Linear | None:
    """A product of tokens with a constant, FusedGemm included."""

    def shape_of(value: ir.Value) -> tuple[int, ...]:
        return facts.shape(value) or ()

    if (node.domain, node.op_type) != ("com.microsoft", "FusedGemm"):
        return linear(node, shape_of)
    tokens, weight = node.inputs[:2]
    if tokens is None or is_constant(tokens) or not is_constant(weight):
        return None
    sizes, shape = shape_of(tokens), constant_shape(weight)
    last = node.attributes.get_int("transB", 0)
    if node.attributes.get_int("transA", 0) or len(sizes) != 2 or sizes[1] != shape[last]:
        return None
    columns, rows = np.arange(shape[1 - last])[None], np.arange(sizes[0])[:, None]
    scale = node.attributes.get_float("alpha", 1.0)
    return Linear(tokens, weight, (last,), sizes[1], columns, rows, scale)


def _is_plain(part: Linear) -> bool:
    """Whether its last axis is that of the columns, in their order."""
    return len(part.contracted) == 1 and part.columns.shape[-1] == part.columns.size


def _elementwise(node: ir.Node) -> int:
    """How many inputs of a node meet element by element, from the first; 0 for other operators."""
    if node.domain == "com.microsoft":
        return len(node.inputs) if node.op_type in CONTRIB else 0
    if node.domain or node.op_type not in LINEAR | BENT | LAID_OUT:
        return 0
    if node.op_type == "Dropout" and len(node.inputs) > 2 and node.inputs[2] is not None:
        training = constant_tensor(node.inputs[2])
        return 0 if training is None or training.numpy().any() else 1
    return 1 if node.op_type in LAID_OUT | {"Dropout", "CastLike"} else len(node.inputs)


def _is_bent(node: ir.Node) -> bool:
    if node.op_type == "FusedGemm":
        return node.attributes.get_string("activation", "") != ""
    if node.op_type in ("Mul", "Div", "Where"):
        counted = {"Mul": 2, "Div": 2, "Where": 1}[node.op_type]
        chosen = node.inputs[1 if node.op_type == "Div" else 0 : counted]
        return not any(map(is_constant, chosen))
    return bool(node.domain) or node.op_type in BENT


def _same_size(value: ir.Value, hidden: ir.Value, runs: Sequence[Facts]) -> bool:
    """Whether a value has the last axis of the other, and as many elements."""
    shapes = [(run.shape(value), run.shape(hidden)) for run in runs]
    return all(a and b and a[-1] == b[-1] and math.prod(a) == math.prod(b) for a, b in shapes)


def _by_neuron(
    node: ir.Node, constants: Sequence[tuple[int, ir.Value]], second: Linear
) -> list[Operand] | None:
    """The constants with an element a neuron; None where one has neither that nor one for all."""
    found: list[Operand] = []
    for index, value in constants:
        shape = constant_shape(value)
        if math.prod(shape) == 1:
            continue
        if math.prod(shape) != second.width or shape[-1] != second.width:
            return None
        found.append(Operand(node, index, len(shape) - 1))
    return found


def _unflattened(tokens: ir.Value, runs: Sequence[Facts]) -> ir.Value:
    """The tokens as they were before exporters put their leading axes into one."""
    node = tokens.producer()
    if node is None or node.op_type not in LAID_OUT | {"Identity"} or node.inputs[0] is None:
        return tokens
    before = node.inputs[0]
    return _unflattened(before, runs) if _same_size(before, tokens, runs) else tokens


def _widths(
    nodes: Sequence[ir.Node], width: int, facts: Facts, opsets: Mapping[str, int]
) -> tuple[ir.Node, ...] | None:
    """Each Reshape that is told F; None where F is told or asked in a way that is not read."""
    asked = _asked(nodes, facts, opsets)
    if asked is None:
        return None
    found: list[ir.Node] = []
    for node in nodes:
        if node.op_type != "Reshape" or (shape := node.inputs[1]) is None:
            continue
        if shape in asked:
            if asked[shape][:-1].any():
                return None
            continue
        end = _end(shape)
        last = constant_array(end).reshape(-1)[-1:].tolist() if is_constant(end) else []
        if last == [width]:
            found.append(node)
        elif last != [-1]:
            return None
    return tuple(found)


def _end(shape: ir.Value) -> ir.Value | None:
    """What a shape ends in: itself, or what comes last in a Concat."""
    node = shape.producer()
    joined = not is_constant(shape) and node is not None and node.op_type == "Concat"
    return node.inputs[-1] if joined and node is not None else shape


def _tell(reshape: ir.Node, width: int, make: Inserter) -> None:
    """A shape that ends in another width, in the place of one that others may be told, too."""
    shape = reshape.inputs[1]
    assert shape is not None
    end, node = _end(shape), shape.producer()
    assert end is not None
    array = constant_array(end).copy()
    array[-1] = width
    new = make.constant(array, "width")
    if end is not shape and node is not None:
        new = make.op("Concat", [*node.inputs[:-1], new], "shape", axis=0)
    reshape.replace_input_with(1, new)


def _asked(
    nodes: Sequence[ir.Node], facts: Facts, opsets: Mapping[str, int]
) -> dict[ir.Value, np.ndarray] | None:
    """Where, in shapes and lengths that are asked of the nodes' values, F stands.

    None where anything but a Reshape among the nodes is told it.
    """
    marks: dict[ir.Value, np.ndarray] = {}
    pending = [user for v in _made(nodes) for user, _ in v.uses() if user.op_type == "Shape"]
    while pending:
        node = pending.pop()
        if node in nodes:
            continue
        if node.op_type == "Shape":
            rank = len(facts.shape(node.inputs[0]) or ())
            ends = node.attributes.get_int("start", 0), node.attributes.get_int("end", rank)
            mark = (np.arange(rank) == rank - 1)[slice(*ends)]
        elif node.op_type in COUNTING and not node.domain:
            given = [_mark(node, value, marks, facts) for value in node.inputs]
            told = node.op_type != "Concat" and any(v in marks for v in node.inputs[1:])
            lacking = [v for v, array in zip(node.inputs, given, strict=True) if array is None]
            if told or any(value is not None for value in lacking):
                return None
            mark = evaluate(node, given, opsets)[0].astype(bool)
        else:
            return None
        if mark.any():
            made = node.outputs[0]
            if made.is_graph_output():
                return None
            marks[made] = mark
            pending += [user for user, _ in made.uses()]
    return marks


def _mark(
    node: ir.Node, value: ir.Value | None, marks: Mapping[ir.Value, np.ndarray], facts: Facts
) -> np.ndarray | None:
    """An operand of a node that picks lengths, with ones for F and zeros for other lengths."""
    if value is not None and value in marks:
        return marks[value].astype(np.int64)
    if node.op_type == "Concat":
        shape = facts.shape(value)
        return None if shape is None else np.zeros(shape, np.int64)
    return facts.constant(value)


def _bias(product: ir.Node, width: int) -> tuple[ir.Value | None, ir.Value]:
    """What is added to a product, an element a column, and the sum."""
    made = product.outputs[0]
    given = product.inputs[2] if len(product.inputs) > 2 else None
    if given is not None:
        plain = is_constant(given) and math.prod(constant_shape(given)) == width
        beta = product.attributes.get_float("beta", 1.0)
        return (given if plain and beta == 1 else None), made
    readers = [node for node, _ in made.uses()]
    if len(readers) == 1 and readers[0].op_type == "Add" and not made.is_graph_output():
        for value in readers[0].inputs:
            if is_constant(value) and math.prod(shape := constant_shape(value)) == width:
                return (value, readers[0].outputs[0]) if shape[-1] == width else (None, made)
    return None, made


def _name(block: FeedForwardBlock) -> str:
    """The path that the names of both products' nodes and constants share; a pruned one's own."""
    pinned = block.product.metadata_props.get(PINNED)
    if pinned is not None:
        return pinned
    added = [operand.value.name for operand in block.constants_by_neuron]
    bias = None if block.bias is None else block.bias.name
    one = [block.products[0].name, block.first[0].weight.name, *added]
    two = [block.product.name, block.second.weight.name, bias]
    paths = [
        [[p for p in re.split(r"[/.]", name or "") if p] for name in own] for own in (one, two)
    ]
    for a in paths[0]:
        for b in paths[1]:
            same = [x == y for x, y in zip(a[:-1], b[:-1], strict=False)]
            common = a[: [*same, False].index(False)]
            if len(common) > 1 and any(c.isdigit() for part in common for c in part):
                return ".".join(common)
    return ""


# ---- cutting ------------------------------------------------------------------------------------


def _cuts(chosen: Sequence[tuple[FeedForwardBlock, _Kept]]) -> _Cuts:
    cuts: dict[_Place, dict[int, _Kept]] = {}
    for block, kept in chosen:
        for operand in block.operands():
            cuts.setdefault(operand[:2], {})[operand.axis] = kept
    return cuts


def _cut(cuts: _Cuts, makers: Mapping[_Place, Inserter]) -> None:
    """Constants that all readers want cut alike are cut where they stand, others copied."""
    done, copies = set[ir.Value](), dict[object, ir.Value]()
    for (node, index), axes in cuts.items():
        value = node.inputs[index]
        assert value is not None
        root = origin(value)
        if root in done:
            continue
        if root.is_initializer() and _is_cut_alike(root, axes, cuts):
            tensor = root.const_value
            assert tensor is not None
            array = _taken(tensor.numpy(), axes)
            root.const_value = ir.Tensor(array, dtype=tensor.dtype, name=root.name)
            for alias in _aliases(root):
                alias.shape = ir.Shape(array.shape)
            done.add(root)
            continue
        key = (node.graph, value, _key(axes))
        if key not in copies:
            array = constant_array(value).astype(constant_type(value).numpy())
            copies[key] = makers[node, index].constant(_taken(array, axes), "constant")
        node.replace_input_with(index, copies[key])


def _is_cut_alike(root: ir.Value, axes: Mapping[int, _Kept], cuts: _Cuts) -> bool:
    aliases = _aliases(root)
    if any(value.is_graph_output() or value.is_graph_input() for value in aliases):
        return False
    readers = [at for value in aliases for at in value.uses() if not _is_identity(at.node)]
    return all(_key(cuts.get((at.node, at.idx), {})) == _key(axes) for at in readers)


def _read_elsewhere(block: FeedForwardBlock, cuts: _Cuts) -> ir.Node | None:
    """A node that reads a weight of the block, and is not pruned by the same mask."""
    for operand in block.weights():
        masks = {kept.tobytes() for kept in cuts[operand[:2]].values()}
        for value in _behind(operand.value):
            tensor = constant_tensor(value)
            if tensor is None or tensor.size <= 1 or not tensor.dtype.is_floating_point():
                continue
            for node, index in _readers(value):
                own = {kept.tobytes() for kept in cuts.get((node, index), {}).values()}
                if own != masks:
                    return node
    return None


def _behind(value: ir.Value) -> Iterator[ir.Value]:
    """A constant and all that it is made of."""
    yield value
    node = value.producer()
    for operand in () if node is None else node.inputs:
        if operand is not None:
            yield from _behind(operand)


def _readers(value: ir.Value) -> Iterator[_Place]:
    """Where a constant, or a constant made of it, meets an activation."""
    for node, index in value.uses():
        if all(map(is_constant, node.outputs)):
            for made in node.outputs:
                yield from _readers(made)
        else:
            yield node, index


def _aliases(root: ir.Value) -> list[ir.Value]:
    """A value and what is the same by Identity."""
    copies = [node.outputs[0] for node, _ in root.uses() if _is_identity(node)]
    return [root, *(alias for copy in copies for alias in _aliases(copy))]


def _is_identity(node: ir.Node) -> bool:
    return node.op_type == "Identity" and not node.domain


def _taken(array: np.ndarray, axes: Mapping[int, _Kept]) -> np.ndarray:
    for axis, kept in axes.items():
        array = array.take(kept, axis)
    return np.ascontiguousarray(array)


def _key(axes: Mapping[int, _Kept]) -> object:
    return frozenset((axis, kept.tobytes()) for axis, kept in axes.items())


def _made(nodes: Sequence[ir.Node]) -> list[ir.Value]:
    return [value for node in nodes for value in node.outputs]


def _weight(node: ir.Node, part: Linear, axis: int) -> Operand:
    return Operand(node, list(node.inputs).index(part.weight), axis)


def _columns_axis(part: Linear) -> int:
    """The axis of a weight that counts its columns; others are contracted, or of length one."""
    shape = constant_shape(part.weight)
    free = [axis for axis in range(len(shape)) if axis not in part.contracted]
    return max(free, key=lambda axis: shape[axis])
