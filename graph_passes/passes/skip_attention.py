"""SkipAttention: a whole attention becomes an affine map of its input, or a constant."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from graph_passes.analysis.constants import constant_array
from graph_passes.analysis.shapes import Facts, interpret_small
from graph_passes.blocks import AttentionBlock
from graph_passes.emit.attention import emit_affine, emit_constant
from graph_passes.emit.editing import Inserter, keep_shapes, remove_unused, share_constants
from graph_passes.errors import CannotRewrite, InvalidArgument
from graph_passes.matching.find import find_attention
from graph_passes.matching.naming import pin_names
from graph_passes.passes.invariants import check, interface

if TYPE_CHECKING:
    from jaxtyping import Float

__all__ = ["AffineMap", "SkipAttention", "Skipped", "emit_skip", "refill", "skipped", "why_not"]

MARK = "/skip/"
"""Stands in the names of what takes an attention's place, after its name."""


@dataclass(frozen=True, eq=False)
class AffineMap:
    """x W + b; b alone where there is no weight."""

    weight: Float[np.ndarray, "D N"] | None
    bias: Float[np.ndarray, " N"]


@dataclass(frozen=True, eq=False)
class Skipped:
    """Where an attention was: the map of ``input`` that makes ``output`` now."""

    name: str
    input: ir.Value
    affine: AffineMap
    output: ir.Value
    nodes: tuple[ir.Node, ...]


@dataclass(frozen=True, eq=False)
class SkipAttention(ir.passes.InPlacePass):
    """Leave attention out (the Skip ablation of arXiv 2110.06821, B.1), with what x tells of it.

    Before: out = attention(x, y)
    After:  out = x W + b, or b for every token

    Lossy; the best W and b are found in closed form by ``attnserve.calibration.refit``. Refused
    (``CannotRewrite``) where ``why_not`` gives a reason.

    Attributes:
        maps: W (input size, output size) and b, for each block to leave out, by its name.
    """

    maps: Mapping[str, AffineMap]

    def requires(self, model: ir.Model) -> None:
        blocks = {block.name: block for block in find_attention(model)[0]}
        for name, affine in self.maps.items():
            block = blocks.get(name)
            reason = "no attention has this name" if block is None else why_not(block)
            if block is None or reason:
                raise CannotRewrite(f"{name}: {reason}", "leave this layer out of --skip")
            assert block.output is not None
            sizes = (block.input_size, block.output.matrix().shape[1])
            got = (None if affine.weight is None else affine.weight.shape, affine.bias.shape)
            if got[0] not in (None, sizes) or got[1] != sizes[1:]:
                raise InvalidArgument(
                    f"{name}: a map of shapes {got}, expected {sizes} and {sizes[1:]}",
                    "fit it to this layer's input and output",
                )

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        before, facts = interface(model), interpret_small(model, batch=2, sequence=5)
        blocks = find_attention(model)[0]
        chosen = [block for block in blocks if block.name in self.maps]
        if not chosen:
            return ir.passes.PassResult(model, modified=False)
        pin_names(blocks)
        for block in chosen:
            emit_skip(block, self.maps[block.name], facts)
        share_constants(model, since=before.initializers)
        remove_unused(model)
        keep_shapes(model, chosen)
        check(before, model, after="SkipAttention")
        return ir.passes.PassResult(model, modified=True)


def why_not(block: AttentionBlock) -> str:
    """Why a block cannot be left out; empty where it can."""
    if block.output is None:
        return "its context does not go straight to an output projection"
    if not (block.q.by_sequence or block.q.sequence_first):
        return "its tokens are not laid out as (batch, sequence, size)"
    if block.q.sequence_first != block.output.sequence_first:
        return "its input and its output count batch and tokens in different orders"
    return ""


def emit_skip(block: AttentionBlock, affine: AffineMap, facts: Facts) -> None:
    """Put a map in the place of a block."""
    assert block.output is not None
    _emit(block.output.nodes[-1], block.name, block.x, affine, block.output.output, facts)


def _emit(
    before: ir.Node, name: str, tokens: ir.Value, affine: AffineMap, old: ir.Value, facts: Facts
) -> None:
    assert isinstance(before.graph, ir.Graph)
    make = Inserter(before.graph, before, f"{name}{MARK}".rstrip("/"))
    if affine.weight is None:
        emit_constant(make, tokens, affine.bias, old, facts)
    else:
        emit_affine(make, tokens, affine.weight, affine.bias, old, facts)


def skipped(model: ir.Model) -> list[Skipped]:
    """The places where ``SkipAttention`` left an attention out, in order of execution."""
    found: dict[str, list[ir.Node]] = {}
    for node in ir.traversal.RecursiveGraphIterator(model.graph):
        name, mark, _ = (node.name or "").partition(MARK)
        if mark:
            found.setdefault(name, []).append(node)
    gaps = [_skipped(name, nodes) for name, nodes in found.items()]
    return [gap for gap in gaps if gap is not None]


def _skipped(name: str, nodes: list[ir.Node]) -> Skipped | None:
    """The map in these nodes; None where an exporter calls its own nodes so."""
    by_name = {(node.name or "").removeprefix(f"{name}{MARK}"): node for node in nodes}
    product, end = (_named(by_name, part) for part in ("output_product", "output"))
    source = product or _named(by_name, "shape")
    if source is None or (tokens := source.inputs[0]) is None:
        return None
    if product is not None:
        weight = constant_array(_given(product, 1))
        bias = np.zeros(weight.shape[1], weight.dtype)
        bias = bias if end is None else constant_array(_given(end, 1))
    elif end is not None:
        weight, bias = None, constant_array(_given(end, 0))
    else:
        return None
    return Skipped(name, tokens, AffineMap(weight, bias), nodes[-1].outputs[0], tuple(nodes))


def _named(by_name: Mapping[str, ir.Node], part: str) -> ir.Node | None:
    """The node called ``part``, or ``part_2`` where it took the place of another."""
    names = (name for name in by_name if re.fullmatch(rf"{part}(_\d+)?", name))
    return next((by_name[name] for name in names), None)


def _given(node: ir.Node, index: int) -> ir.Value:
    value = node.inputs[index]
    assert value is not None
    return value


def refill(gap: Skipped, affine: AffineMap, facts: Facts) -> None:
    """Put another map in the place of an attention that was left out."""
    _emit(gap.nodes[-1], gap.name, gap.input, affine, gap.output, facts)
