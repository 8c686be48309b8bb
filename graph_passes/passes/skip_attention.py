"""SkipAttention: replace attention by an affine map of its input, or by a constant."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
import onnx_ir as ir
from pydantic import BaseModel, ConfigDict, Field, InstanceOf, model_validator

from graph_passes.analyses import Analyses
from graph_passes.analysis.constants import constant_array
from graph_passes.analysis.required import graph_of, input_of
from graph_passes.analysis.shapes import ShapeInfo
from graph_passes.blocks import AttentionBlock, OutputProjection
from graph_passes.emit.affine import emit_affine, emit_constant
from graph_passes.emit.editing import Inserter
from graph_passes.emit.head_terms import TOKEN_LAYOUT
from graph_passes.errors import InvalidArgument, Refusal
from graph_passes.matching.naming import SKIP_MARK
from graph_passes.passes.base import AttentionPass, AttentionTargets, small_shapes
from graph_passes.passes.conditions import (
    no_output_projection_refusal,
    quantized_refusal,
    returned_refusal,
    reused_refusal,
)

if TYPE_CHECKING:
    from jaxtyping import Float

__all__ = [
    "AffineMap",
    "Replacement",
    "SkipAttention",
    "Skipped",
    "emit_skip",
    "refill",
    "skip_refusal",
    "skipped",
]


@dataclass(frozen=True, eq=False)
class AffineMap:
    """The affine map x W + b; without a weight, the constant b."""

    weight: Float[np.ndarray, "D N"] | None
    bias: Float[np.ndarray, " N"]


@dataclass(frozen=True, eq=False, kw_only=True)
class Skipped:
    """A removed attention: the map from ``input`` to ``output`` that replaces it."""

    name: str
    input: ir.Value
    affine: AffineMap
    output: ir.Value
    nodes: tuple[ir.Node, ...]


class Replacement(BaseModel):
    """The replacement of an attention.

    Attributes:
        kind: An affine map of the input, or a constant.
        map: The weights, which are not in plan.json; by default zeros, which are fitted later.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["affine", "constant"] = "affine"
    map: InstanceOf[AffineMap] | None = Field(default=None, exclude=True)

    @model_validator(mode="before")
    @classmethod
    def _from_short_form(cls, value: object) -> object:
        if isinstance(value, str):
            return {"kind": value}
        if isinstance(value, AffineMap):
            return {"kind": "constant" if value.weight is None else "affine", "map": value}
        return value

    def map_for(self, block: AttentionBlock) -> AffineMap:
        """The map, by default zeros of the block's input and output size."""
        if self.map is not None:
            return self.map
        width = block.required_output.matrix().shape[1]
        weight = np.zeros((block.input_size, width)) if self.kind == "affine" else None
        return AffineMap(weight, np.zeros(width))


class SkipAttention(AttentionPass[Replacement]):
    """Replace attention by an affine map of its input (Skip ablation of arXiv 2110.06821, B.1).

    Before: out = attention(x, y)
    After:  out = x W + b, or b for every token

    Lossy; ``attnserve.calibration.refit`` finds the best W and b in closed form.

    Attributes:
        targets: The replacement of each block: ``"affine"``, ``"constant"``, or an ``AffineMap``.
    """

    name: ClassVar[str] = "skip_attention"
    lossy: ClassVar[bool] = True
    order: ClassVar[int] = 10

    @classmethod
    def validate_params(cls, block: AttentionBlock, params: Replacement) -> None:
        if params.map is not None and block.output is not None:  # else the block is refused
            _check_shapes(block, block.output, params.map)

    @classmethod
    def refusal(
        cls, block: AttentionBlock, params: Replacement | None, analyses: Analyses
    ) -> Refusal | None:
        refusal = returned_refusal(block) or skip_refusal(block)
        return refusal or reused_refusal(block, cls.find(analyses))

    def rewrite(self, targets: AttentionTargets[Replacement], analyses: Analyses) -> None:
        info = small_shapes(analyses)
        for block, params in targets:
            emit_skip(block, params.map_for(block), info)


def skip_refusal(block: AttentionBlock) -> Refusal | None:
    """Return why an affine map cannot replace a block; None if it can."""
    if refusal := quantized_refusal(block) or no_output_projection_refusal(block):
        return refusal
    if not (block.q.by_sequence or block.q.sequence_first):
        return TOKEN_LAYOUT
    if block.q.sequence_first != block.required_output.sequence_first:
        return Refusal(
            "token_order", "its input and its output count batch and tokens in different orders"
        )
    return None


def _check_shapes(block: AttentionBlock, output: OutputProjection, affine: AffineMap) -> None:
    """Check that a map has the input and output size of a block.

    Raises:
        InvalidArgument: The map has other sizes.
    """
    sizes = (block.input_size, output.matrix().shape[1])
    weight = None if affine.weight is None else affine.weight.shape
    if weight not in (None, sizes) or affine.bias.shape != sizes[1:]:
        raise InvalidArgument(
            f"{block.name}: a map of shapes {(weight, affine.bias.shape)}, "
            f"expected {sizes} and {sizes[1:]}",
            "fit it to this layer's input and output",
            code="skip_attention.shape",
        )


def emit_skip(block: AttentionBlock, affine: AffineMap, info: ShapeInfo) -> None:
    """Replace an attention block by an affine map of its input."""
    output = block.required_output
    _emit(output.nodes[-1], block.name, block.x, affine, output.output, info)


def _emit(
    before: ir.Node, name: str, tokens: ir.Value, affine: AffineMap, old: ir.Value, info: ShapeInfo
) -> None:
    make = Inserter(graph_of(before), before, f"{name}{SKIP_MARK}".rstrip("/"))
    if affine.weight is None:
        emit_constant(make, tokens, affine.bias, old, info)
    else:
        emit_affine(make, tokens, affine.weight, affine.bias, old, info)


def skipped(model: ir.Model) -> list[Skipped]:
    """The attention blocks that ``SkipAttention`` removed, in order of execution."""
    marked: dict[str, list[ir.Node]] = {}
    for node in model.graph.all_nodes():
        name, mark, _ = (node.name or "").partition(SKIP_MARK)
        if mark:
            marked.setdefault(name, []).append(node)
    gaps = [_skipped(name, nodes) for name, nodes in marked.items()]
    return [gap for gap in gaps if gap is not None]


def _skipped(name: str, nodes: list[ir.Node]) -> Skipped | None:
    """The map in these nodes; None if an exporter uses such names for other nodes."""
    by_name = {(node.name or "").removeprefix(f"{name}{SKIP_MARK}"): node for node in nodes}
    product, end = (_named(by_name, part) for part in ("output_product", "output"))
    source = product or _named(by_name, "shape")
    if source is None or (tokens := source.inputs[0]) is None:
        return None
    if product is not None:
        weight = constant_array(input_of(product, 1))
        bias = np.zeros(weight.shape[1], weight.dtype)
        bias = bias if end is None else constant_array(input_of(end, 1))
    elif end is not None:
        weight = None
        bias = constant_array(input_of(end, 0))
    else:
        return None
    return Skipped(
        name=name,
        input=tokens,
        affine=AffineMap(weight, bias),
        output=nodes[-1].outputs[0],
        nodes=tuple(nodes),
    )


def _named(by_name: Mapping[str, ir.Node], part: str) -> ir.Node | None:
    """The node named ``part``, or ``part_2`` if the name was taken."""
    names = (name for name in by_name if re.fullmatch(rf"{part}(_\d+)?", name))
    return next((by_name[name] for name in names), None)


def refill(gap: Skipped, affine: AffineMap, info: ShapeInfo) -> None:
    """Replace the map of a removed attention by another one."""
    _emit(gap.nodes[-1], gap.name, gap.input, affine, gap.output, info)
