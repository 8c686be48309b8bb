"""PruneHeads: projections and output lose the rows and columns of heads that are masked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from graph_passes.analysis.shapes import Facts, interpret_small
from graph_passes.blocks import AttentionBlock
from graph_passes.emit.attention import emit_context, emit_output, emit_probabilities, why_not
from graph_passes.emit.editing import (
    Inserter,
    keep_shapes,
    remove_unused,
    share_constants,
)
from graph_passes.errors import CannotRewrite, InvalidArgument
from graph_passes.matching.find import find_attention
from graph_passes.matching.naming import pin_names
from graph_passes.passes import refusals as rewrites
from graph_passes.passes import skip_attention as skip
from graph_passes.passes.invariants import check, interface

__all__ = ["PruneHeads", "check_mask"]


@dataclass(frozen=True, eq=False)
class PruneHeads(ir.passes.InPlacePass):
    """Take masked heads out of the graph (Voting-to-Stay of arXiv 2305.16000, Michel et al. 2019).

    Before: out = sum over heads h of softmax(s q_h k_h^T) v_h W_O^h + b
    After:  out = sum over the heads h with mask_h = 1, of the same

    Weights, biases and per-head position biases of the other heads leave the graph. Key/value heads
    that several query heads share stay as long as one of these does. A layer that loses all its
    heads becomes its constant b. Exact where the masked heads write nothing; what they wrote on
    average can be put into b afterwards (``calibration.refit``). Refused (``CannotRewrite``) where
    ``emit.why_not`` or ``rewrites.prune`` gives a reason.

    Attributes:
        masks: For each block to rewrite, by its name, 1 for each head that stays and 0 for others.
    """

    masks: Mapping[str, Sequence[int]]

    def requires(self, model: ir.Model) -> None:
        blocks = {block.name: block for block in find_attention(model)[0]}
        facts = interpret_small(model, batch=2, sequence=5)
        for name, mask in self.masks.items():
            if (block := blocks.get(name)) is None:
                raise CannotRewrite(
                    f"{name}: no attention has this name", "see `attnserve inspect`"
                )
            check_mask(name, mask, block.num_heads)
            if not all(mask) and (reason := _why_not(block, mask, facts)):
                raise CannotRewrite(f"{name}: {reason}", "leave this layer out of the mask")

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        before, facts = interface(model), interpret_small(model, batch=2, sequence=5)
        blocks = find_attention(model)[0]
        chosen = [block for block in blocks if not all(self.masks.get(block.name, (1,)))]
        if not chosen:
            return ir.passes.PassResult(model, modified=False)
        pin_names(blocks)
        for block in chosen:
            kept = np.flatnonzero(np.asarray(self.masks[block.name]))
            if len(kept):
                _prune(block, kept, facts)
            else:
                assert block.output is not None
                width = block.output.matrix().shape[1]
                bias = np.broadcast_to(block.output.offset(), (width,))
                skip.emit_skip(block, skip.AffineMap(None, bias), facts)
        share_constants(model, since=before.initializers)
        remove_unused(model)
        keep_shapes(model, chosen)
        check(before, model, after="PruneHeads")
        return ir.passes.PassResult(model, modified=True)


def _why_not(block: AttentionBlock, mask: Sequence[int], facts: Facts) -> str:
    reason = rewrites.prune(block) or why_not(block, facts)
    return reason or ("" if any(mask) else skip.why_not(block))


def check_mask(name: str, mask: Sequence[int], heads: int) -> None:
    """A mask holds a 0 or a 1 for each head.

    Raises:
        InvalidArgument: Naming the layer, and what its mask holds instead.
    """
    if len(mask) != heads:
        raise InvalidArgument(
            f"the mask of {name} has {len(mask)} entries, expected {heads}: one a head",
            "write 1 for each head that stays and 0 for each that goes",
        )
    odd = [entry for entry in mask if entry not in (0, 1)]
    if odd:
        raise InvalidArgument(
            f"the mask of {name} holds {odd[0]!r}, expected 0 or 1",
            "write 1 for each head that stays and 0 for each that goes",
        )


def _prune(block: AttentionBlock, kept: np.ndarray, facts: Facts) -> None:
    assert block.output is not None
    product = block.output.nodes[-1]
    make = Inserter(block.graph, product, f"{block.name}/pruned")
    probabilities = emit_probabilities(make, block, kept, facts)
    context = emit_context(make, block, probabilities, kept, facts)
    emit_output(make, block, context, kept, facts)
