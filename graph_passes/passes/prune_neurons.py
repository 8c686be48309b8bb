"""PruneNeurons: neurons that are masked leave the graph."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from graph_passes.analysis.constants import (
    constant_array,
    constant_tensor,
    constant_type,
    is_constant,
    origin,
)
from graph_passes.emit.editing import Inserter, remove_unused, share_constants
from graph_passes.errors import CannotRewrite
from graph_passes.matching.feed_forward import FeedForwardBlock, find_feed_forward, last_part
from graph_passes.matching.naming import PINNED
from graph_passes.passes.invariants import check, interface

__all__ = ["PruneNeurons", "why_not"]


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
            made = [v for node in (*block.products, *block.nodes) for v in node.outputs]
            for value in made:
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


def _tell(reshape: ir.Node, width: int, make: Inserter) -> None:
    """A shape that ends in another width, in the place of one that others may be told, too."""
    shape = reshape.inputs[1]
    assert shape is not None
    end, node = last_part(shape), shape.producer()
    assert end is not None
    array = constant_array(end).copy()
    array[-1] = width
    new = make.constant(array, "width")
    if end is not shape and node is not None:
        new = make.op("Concat", [*node.inputs[:-1], new], "shape", axis=0)
    reshape.replace_input_with(1, new)
