"""PruneNeurons: remove neurons of feed-forwards."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, ClassVar

import numpy as np
import onnx_ir as ir
from pydantic import BeforeValidator, Field, PlainSerializer

from graph_passes.analyses import Analyses
from graph_passes.analysis.constants import (
    constant_array,
    constant_shape,
    constant_tensor,
    constant_type,
    origin,
    readers,
)
from graph_passes.analysis.operator_sets import REWRITE_FIRST
from graph_passes.analysis.required import input_of, tensor_of
from graph_passes.analysis.shapes import ShapeInfo
from graph_passes.blocks import FeedForwardBlock
from graph_passes.emit.editing import Inserter
from graph_passes.errors import CannotRewrite, InvalidArgument, Refusal
from graph_passes.matching.feed_forward import last_entry, slice_bounds
from graph_passes.passes.base import FeedForwardPass, FeedForwardTargets, small_shapes
from graph_passes.passes.prune_heads import check_mask

__all__ = ["NeuronMask", "PruneNeurons", "mask_from_hex", "mask_to_hex", "neurons_refusal"]


def mask_to_hex(mask: Sequence[int]) -> str:
    """Write a mask as its length and hexadecimal digits, four bits each: ``1536:ff0...``.

    The first neuron is the highest bit of the first digit.
    """
    digits = -(-len(mask) // 4)
    bits = "".join(str(int(bit)) for bit in mask).ljust(4 * digits, "0")
    return f"{len(mask)}:{int(bits or '0', 2):0{digits}x}"


def mask_from_hex(text: str) -> list[int]:
    """Read a mask from the format of ``mask_to_hex``.

    Raises:
        ValueError: The text is not a mask in this format.
    """
    parts = HEX_MASK.fullmatch(text)
    size, digits = (int(parts[1]), parts[2]) if parts else (0, "")
    if not 0 < size <= 4 * len(digits) < size + 4:
        raise ValueError(f"{reprlib.repr(text)} is not a mask")
    bits = f"{int(digits, 16):0{4 * len(digits)}b}"
    if "1" in bits[size:]:
        raise ValueError(f"{reprlib.repr(text)} has more bits than its length {size}")
    return [int(bit) for bit in bits[:size]]


HEX_MASK = re.compile(r"([1-9][0-9]{0,8}):([0-9a-f]+)")


def _as_list(mask: object) -> object:
    if isinstance(mask, np.ndarray):
        return mask.tolist()
    return mask_from_hex(mask) if isinstance(mask, str) else mask


NeuronMask = Annotated[
    tuple[Annotated[int, Field(ge=0, le=1)], ...],
    BeforeValidator(_as_list),
    PlainSerializer(mask_to_hex),
]
"""1 for each neuron that stays, 0 for each that is removed; hexadecimal in JSON."""


class PruneNeurons(FeedForwardPass[NeuronMask]):
    """Remove masked neurons of feed-forwards.

    Before: out = sum over neurons j of f(x W_1 + b_1)_j W_2[j] + b_2
    After:  out = sum over the neurons j with mask_j = 1, of the same

    Columns of W_1 (of W_g and W_u, packed or not), elements of b_1 and rows of W_2 are deleted;
    nodes stay. Exact if the removed rows of W_2 are zero. If the removed activations are constant,
    their output can be added to b_2. Blocks that share weights (ALBERT) need the same mask, and
    share the pruned weights.

    Attributes:
        targets: The mask of each block to rewrite.
    """

    name: ClassVar[str] = "prune_neurons"
    lossy: ClassVar[bool] = True
    order: ClassVar[int] = 40

    @classmethod
    def validate_params(cls, block: FeedForwardBlock, params: Sequence[int]) -> None:
        check_mask(block.name, params, block.num_neurons, "neuron")
        if not any(params):
            raise InvalidArgument(
                f"the mask of {block.name} leaves no neuron",
                "keep at least one",
                code="prune_neurons.mask_empty",
            )

    @classmethod
    def changes(cls, block: FeedForwardBlock, params: Sequence[int]) -> bool:
        return not all(params)

    @classmethod
    def refusal(
        cls, block: FeedForwardBlock, params: Sequence[int] | None, analyses: Analyses
    ) -> Refusal | None:
        return neurons_refusal(block)

    def check(self, analyses: Analyses) -> None:
        """Check that no block is refused, and that blocks that share weights lose the same neurons.

        Raises:
            CannotRewrite: A block is refused, or another node reads its weights.
        """
        super().check(analyses)
        selection = self._selection(self._changed(analyses))
        cuts = _cuts(selection)
        for block, _ in selection:
            if reader := _read_elsewhere(block, cuts):
                raise CannotRewrite(
                    f"{block.name}: {reader.name or reader.op_type} shares its weights and is not "
                    "pruned by the same mask",
                    "give every layer that shares weights one mask, or leave them all out",
                    code="prune_neurons.shared_weights",
                )

    def rewrite(self, targets: FeedForwardTargets[Sequence[int]], analyses: Analyses) -> None:
        selection = self._selection(targets)
        info = small_shapes(analyses)
        makers = {
            block: Inserter(block.graph, block.product, f"{block.name}/pruned")
            for block, _ in selection
        }
        _cut(_cuts(selection), {at[:2]: makers[b] for b, _ in selection for at in b.operands()})
        for block, indices in selection:
            for node in block.widths:
                make = Inserter(block.graph, node, f"{block.name}/pruned")
                _set_width(node, block.num_neurons, len(indices), make, info)
            outputs = [v for node in (*block.products, *block.nodes) for v in node.outputs]
            for value in outputs:
                last = None if value.shape is None else value.shape[-1]
                if value.shape is not None and isinstance(last, int) and last >= block.num_neurons:
                    width = last // block.num_neurons * len(indices)
                    value.shape = ir.Shape([*value.shape[:-1], width])

    @staticmethod
    def _selection(
        targets: FeedForwardTargets[Sequence[int]],
    ) -> list[tuple[FeedForwardBlock, _Indices]]:
        return [(block, np.flatnonzero(np.asarray(mask))) for block, mask in targets]


_Indices = np.ndarray
_Place = tuple[ir.Node, int]
_Cuts = Mapping[_Place, Mapping[int, _Indices]]
"""For each reader of a constant to cut: the indices to keep, by axis."""


def neurons_refusal(block: FeedForwardBlock) -> Refusal | None:
    """Return why neurons cannot be removed from a block; None if they can."""
    if block.is_quantized:
        return Refusal("quantized", f"its weights are quantized: {REWRITE_FIRST}")
    behind = [value for operand in block.operands() for value in _behind(operand.value)]
    if any(value.is_graph_input() or value.is_graph_output() for value in behind):
        return Refusal("weights_external", "its weights are inputs or outputs of the graph")
    return None


def _cuts(selection: Sequence[tuple[FeedForwardBlock, _Indices]]) -> _Cuts:
    cuts: dict[_Place, dict[int, _Indices]] = {}
    for block, neurons in selection:
        for operand in block.operands():
            size = constant_shape(operand.value)[operand.axis]
            starts = np.arange(0, size, block.num_neurons)  # two if gate and up are packed
            indices = (starts[:, None] + neurons).reshape(-1)
            cuts.setdefault(operand[:2], {})[operand.axis] = indices
    return cuts


def _cut(cuts: _Cuts, makers: Mapping[_Place, Inserter]) -> None:
    """Cut constants in place if all readers need the same cut; copy the others."""
    cut_roots: set[ir.Value] = set()
    copies: dict[object, ir.Value] = {}
    for (node, index), axes in cuts.items():
        value = input_of(node, index)
        root = origin(value)
        if root in cut_roots:
            continue
        if root.is_initializer() and _is_cut_alike(root, axes, cuts):
            tensor = tensor_of(root)
            array = _taken(tensor.numpy(), axes)
            root.const_value = ir.Tensor(array, dtype=tensor.dtype, name=root.name)
            for alias in _aliases(root):
                if alias.type is not None:
                    alias.shape = ir.Shape(array.shape)
            cut_roots.add(root)
            continue
        key = (node.graph, value, _key(axes))
        if key not in copies:
            array = constant_array(value).astype(constant_type(value).numpy())
            copies[key] = makers[node, index].constant(_taken(array, axes), "constant")
        node.replace_input_with(index, copies[key])


def _is_cut_alike(root: ir.Value, axes: Mapping[int, _Indices], cuts: _Cuts) -> bool:
    aliases = _aliases(root)
    if any(value.is_graph_output() or value.is_graph_input() for value in aliases):
        return False
    readers = [at for value in aliases for at in value.uses() if not _is_identity(at.node)]
    return all(_key(cuts.get((at.node, at.idx), {})) == _key(axes) for at in readers)


def _read_elsewhere(block: FeedForwardBlock, cuts: _Cuts) -> ir.Node | None:
    """Find a node that reads a weight of the block and is not pruned by the same mask."""
    for operand in block.weights():
        masks = {indices.tobytes() for indices in cuts[operand[:2]].values()}
        for value in _behind(operand.value):
            tensor = constant_tensor(value)
            if tensor is None or tensor.size <= 1 or not tensor.dtype.is_floating_point():
                continue
            for node, index in readers(value):
                other_masks = {
                    indices.tobytes() for indices in cuts.get((node, index), {}).values()
                }
                if other_masks != masks:
                    return node
    return None


def _behind(value: ir.Value) -> Iterator[ir.Value]:
    """A constant and the constants that it is computed from."""
    yield value
    node = value.producer()
    for operand in () if node is None else node.inputs:
        if operand is not None:
            yield from _behind(operand)


def _aliases(root: ir.Value) -> list[ir.Value]:
    """A value and its copies by Identity."""
    copies = [node.outputs[0] for node, _ in root.uses() if _is_identity(node)]
    return [root, *(alias for copy in copies for alias in _aliases(copy))]


def _is_identity(node: ir.Node) -> bool:
    return node.op_type == "Identity" and not node.domain


def _taken(array: np.ndarray, axes: Mapping[int, _Indices]) -> np.ndarray:
    for axis, indices in axes.items():
        array = array.take(indices, axis)
    return np.ascontiguousarray(array)


def _key(axes: Mapping[int, _Indices]) -> object:
    return frozenset((axis, indices.tobytes()) for axis, indices in axes.items())


def _set_width(node: ir.Node, old: int, width: int, make: Inserter, info: ShapeInfo) -> None:
    """Replace F in the constants of a Reshape, Split or Slice, which other nodes may share."""
    if node.op_type == "Reshape":
        _set_last_axis(node, old, width, make)
    elif node.op_type == "Slice":
        bounds = slice_bounds(node, old, info)
        assert bounds is not None
        for index, name in enumerate(("start", "end")):
            constant = info.constant(node.inputs[1 + index])
            assert constant is not None
            bound = np.full_like(constant, bounds[index] // old * width)
            node.replace_input_with(1 + index, make.constant(bound, name))
    elif "split" in node.attributes:
        node.attributes["split"] = ir.AttrInt64s("split", [width, width])
    else:
        node.replace_input_with(1, make.integers([width, width], "sizes"))


def _set_last_axis(reshape: ir.Node, old: int, width: int, make: Inserter) -> None:
    """Replace the last axis of a Reshape's target shape, F or 2F."""
    shape = input_of(reshape, 1)
    end = last_entry(shape)
    node = shape.producer()
    assert end is not None
    array = constant_array(end).copy()
    array[-1] = array[-1] // old * width
    new = make.constant(array, "width")
    if end is not shape and node is not None:
        new = make.op("Concat", [*node.inputs[:-1], new], "shape", axis=0)
    reshape.replace_input_with(1, new)
