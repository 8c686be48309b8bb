"""PruneHeads: remove attention heads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

import numpy as np
from pydantic import BeforeValidator, Field

from graph_passes.analyses import Analyses
from graph_passes.analysis.shapes import ShapeInfo
from graph_passes.blocks import AttentionBlock
from graph_passes.emit.attention import emission_refusal, emit_context, emit_output
from graph_passes.emit.editing import Inserter
from graph_passes.emit.probabilities import emit_probabilities
from graph_passes.errors import InvalidArgument, Refusal
from graph_passes.passes.base import AttentionPass, AttentionTargets, small_shapes
from graph_passes.passes.conditions import (
    no_output_projection_refusal,
    quantized_refusal,
    returned_refusal,
    reused_refusal,
)
from graph_passes.passes.skip_attention import AffineMap, emit_skip, skip_refusal

__all__ = ["HeadMask", "PruneHeads", "check_mask"]


def _as_list(mask: object) -> object:
    return mask.tolist() if isinstance(mask, np.ndarray) else mask


HeadMask = Annotated[
    tuple[Annotated[int, Field(ge=0, le=1)], ...], BeforeValidator(_as_list), Field(min_length=1)
]
"""1 for each head that stays, 0 for each that is removed."""


class PruneHeads(AttentionPass[HeadMask]):
    """Remove masked heads (Voting-to-Stay of arXiv 2305.14380; Michel et al. 2019).

    Before: out = sum over heads h of softmax(s q_h k_h^T) v_h W_O^h + b
    After:  out = sum over the heads h with mask_h = 1, of the same

    Weights, biases and per-head position biases of removed heads are deleted from the graph. A
    key/value head that several query heads share is kept as long as one of them is. A layer that
    loses all heads becomes its constant b. Exact if the removed heads write nothing; their mean
    output can be added to b afterwards (``attnserve.calibration.refit``).

    Attributes:
        targets: The mask of each block to rewrite.
    """

    name: ClassVar[str] = "prune_heads"
    lossy: ClassVar[bool] = True
    order: ClassVar[int] = 20

    @classmethod
    def validate_params(cls, block: AttentionBlock, params: Sequence[int]) -> None:
        check_mask(block.name, params, block.num_heads)

    @classmethod
    def changes(cls, block: AttentionBlock, params: Sequence[int]) -> bool:
        return not all(params)

    @classmethod
    def refusal(
        cls, block: AttentionBlock, params: Sequence[int] | None, analyses: Analyses
    ) -> Refusal | None:
        refusal = (
            quantized_refusal(block)
            or returned_refusal(block)
            or no_output_projection_refusal(block)
            or reused_refusal(block, cls.find(analyses))
            or emission_refusal(block, None if params is None else small_shapes(analyses))
        )
        if refusal is None and params is not None and not any(params):
            return skip_refusal(block)
        return refusal

    def rewrite(self, targets: AttentionTargets[Sequence[int]], analyses: Analyses) -> None:
        for block, mask in targets:
            _keep_heads(block, np.flatnonzero(np.asarray(mask)), small_shapes(analyses))


def check_mask(
    name: str, mask: Sequence[int], size: int, part: Literal["head", "neuron"] = "head"
) -> None:
    """Check that a mask has an entry for each head or neuron of a block.

    Raises:
        InvalidArgument: The mask has another length.
    """
    if len(mask) != size:
        raise InvalidArgument(
            f"the mask of {name} has {len(mask)} entries, expected {size}: one for each {part}",
            f"write 1 for each {part} that stays and 0 for each that is removed",
            code=f"prune_{part}s.mask_length",
        )


def _keep_heads(block: AttentionBlock, heads: np.ndarray, info: ShapeInfo) -> None:
    """Replace a block by some of its heads; without heads, by its bias."""
    output = block.required_output
    if not len(heads):
        bias = np.broadcast_to(output.offset(), output.matrix().shape[1:])
        emit_skip(block, AffineMap(None, bias), info)
        return
    make = Inserter(block.graph, output.nodes[-1], f"{block.name}/pruned")
    probabilities = emit_probabilities(make, block, heads, info)
    context = emit_context(make, block, [(probabilities, heads)], info)
    emit_output(make, block, context, heads, info)
