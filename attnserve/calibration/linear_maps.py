"""The linear maps of a graph that can be fitted: find, read and write them.

Such maps are the output projection of attention, the second product of a feed-forward layer, and
the map in place of a removed attention layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from graph_passes.analyses import Analyses
from graph_passes.analysis.constants import constant_array, origin
from graph_passes.analysis.shapes import ShapeInfo
from graph_passes.blocks import AttentionBlock, Block, FeedForwardBlock
from graph_passes.emit.affine import emit_affine
from graph_passes.emit.editing import Inserter
from graph_passes.matching.feed_forward import find_feed_forward
from graph_passes.matching.find import find_attention
from graph_passes.matching.naming import pin_name
from graph_passes.passes.skip_attention import AffineMap, Skipped, refill, skipped

if TYPE_CHECKING:
    from jaxtyping import Float

__all__ = ["Site", "find_sites", "install", "last_map"]


@dataclass(frozen=True, eq=False)
class Site:
    """A linear map that can be fitted: an output projection, or the map of a removed attention.

    Weights are read on demand: in float64, the weights of all sites would take as much memory as
    half of the model.

    Attributes:
        name: The name of the block.
        tokens: The input of the map; None for a constant map.
        output: The value after the bias of the map.
        owner: The block or the removed attention of the map.
        residual: The residual to which the output is added; None if the output alone is
            fitted.
    """

    name: str
    tokens: ir.Value | None
    output: ir.Value
    owner: AttentionBlock | Skipped | FeedForwardBlock
    residual: ir.Value | None = None

    @property
    def weight(self) -> Float[np.ndarray, "N D"]:
        """The current weight."""
        match self.owner:
            case AttentionBlock(required_output=output):
                weight = output.matrix()
            case FeedForwardBlock() as block:
                weight = block.second.matrix()
            case gap:
                weight = gap.affine.weight
                weight = np.zeros((0, len(gap.affine.bias))) if weight is None else weight
        return weight.astype(np.float64)

    @property
    def bias(self) -> Float[np.ndarray, " D"]:
        """The current bias."""
        match self.owner:
            case AttentionBlock(required_output=output):
                bias = np.broadcast_to(output.offset(), output.matrix().shape[1:])
            case FeedForwardBlock() as block:
                bias = np.zeros(1) if block.bias is None else constant_array(block.bias).reshape(-1)
                bias = np.broadcast_to(bias, block.second.matrix().shape[1:])
            case gap:
                bias = gap.affine.bias
        return bias.astype(np.float64)

    @property
    def prior(self) -> Float[np.ndarray, "N D"]:
        """The weight that the fit is regularized towards: zero for a removed attention."""
        weight = self.weight
        return np.zeros_like(weight) if isinstance(self.owner, Skipped) else weight

    @property
    def sequence_first(self) -> bool:
        """Whether the output has the layout (S, B, D)."""
        output = self.owner.output if isinstance(self.owner, AttentionBlock) else None
        return output is not None and output.sequence_first

    @property
    def weight_key(self) -> object:
        """A key that is equal for sites of one weight."""
        match self.owner:
            case AttentionBlock(required_output=output):
                return origin(output.weight.value)
            case FeedForwardBlock(second=second):
                return origin(second.weight)
            case _:
                return self.owner


def find_sites(model: ir.Model, names: Sequence[str]) -> dict[str, Site]:
    """All maps that can be fitted, in execution order; feed-forward layers only if named."""
    attention = Analyses.of(model).get(find_attention).blocks
    blocks = [last_map(b) for b in attention if b.output is not None and not b.is_quantized]
    sites = [*blocks, *map(_of_skipped, skipped(model))]
    site_names = {site.name for site in sites}
    if not site_names.issuperset(names):
        sites += [last_map(b) for b in find_feed_forward(model) if b.name not in site_names]
    order = [value for node in model.graph.all_nodes() for value in node.outputs]
    place = {value: index for index, value in enumerate(order)}
    return {site.name: site for site in sorted(sites, key=lambda site: place[site.output])}


def last_map(block: Block) -> Site:
    """The output projection of attention, or the second product of a feed-forward layer."""
    if isinstance(block, FeedForwardBlock):
        return Site(block.name, block.hidden, block.output, block)
    output = block.required_output
    return Site(block.name, output.input, output.output, block)


def _of_skipped(gap: Skipped) -> Site:
    tokens = None if gap.affine.weight is None else gap.input
    return Site(gap.name, tokens, gap.output, gap)


def install(site: Site, weight: np.ndarray, bias: np.ndarray, info: ShapeInfo) -> ir.Node | None:
    """Write the map tokens W + b into the graph and return its product node, if it has one."""
    if isinstance(site.owner, Skipped):
        refill(site.owner, AffineMap(None if site.tokens is None else weight, bias), info)
        return None
    if isinstance(site.owner, FeedForwardBlock):
        make = Inserter(site.owner.graph, site.owner.product, f"{site.name}/refit")
        product = emit_affine(make, site.owner.hidden, weight, bias, site.owner.output, info)
        pin_name(product, site.name)
        return product
    output = site.owner.required_output
    make = Inserter(site.owner.graph, output.nodes[-1], f"{site.name}/refit")
    tokens = output.input
    if len(info.shape(tokens) or ()) == 4:
        merged = make.integers([0, 0, len(weight)], "merged")
        tokens = make.op("Reshape", [tokens, merged], "merged_heads")
    return emit_affine(make, tokens, weight, bias, output.output, info)
