"""Replace the scaled scores of a block, which a softmax of the graph reads."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from graph_passes.analysis.shapes import ShapeInfo
from graph_passes.blocks import AttentionBlock
from graph_passes.emit.caches import cache_of, has_separate_heads
from graph_passes.emit.editing import Inserter, in_precision, replace_uses, type_of
from graph_passes.emit.heads import emit_heads

__all__ = ["replace_logits"]


def replace_logits(
    make: Inserter, block: AttentionBlock, logits: ir.Value, info: ShapeInfo
) -> None:
    """Replace the logits of a block by new ones, (B, H, S, T), in the original precision."""
    _unpack_values(block)
    assert block.softmax is not None
    old = block.softmax.logits
    logits.type = ir.TensorType(block.q.dtype)
    logits = in_precision(make, logits, type_of(old, info) or block.q.dtype, info)
    replace_uses(old, _laid_out(make, logits, block.softmax.axes))


def _laid_out(make: Inserter, logits: ir.Value, axes: tuple[int, ...]) -> ir.Value:
    """Emit logits (B, H, S, T) in the layout of the graph, which ``axes`` permutes back."""
    if len(axes) == 4:
        back = [int(axis) for axis in np.argsort(axes)]
        in_order = axes == (0, 1, 2, 3)
        return logits if in_order else make.op("Transpose", [logits], "laid_out", perm=back)
    return _folded(make, logits)


def _folded(make: Inserter, value: ir.Value) -> ir.Value:
    """Emit (B, H, S, T) as (B*H, S, T)."""
    parts = [make.integers([-1], "rows"), make.lengths(value, 2, 4)]
    return make.op("Reshape", [value, make.op("Concat", parts, "rows_of", axis=0)], "folded")


def _unpack_values(block: AttentionBlock) -> None:
    """Emit a separate product for values that share one product with queries or keys.

    If values are cached, the product computes the new values.
    """
    v = block.v
    packed = not {*v.nodes}.isdisjoint((*block.q.nodes, *block.k.nodes))
    if not packed or not v.by_sequence or v.output is None:
        return
    if not v.is_cached and v.layout != "B T H*K":
        # Before the first that may read them: Shape nodes come before the scores.
        make = Inserter(block.graph, v.nodes[-1], f"{block.name}/value")
        values = emit_heads(make, v, v.scale)
        if v.layout == "B*H T K":
            values = _folded(make, values)
        if (back := [int(axis) for axis in np.argsort(v.axes)]) != [0, 1, 2, 3]:
            values = make.op("Transpose", [values], "laid_out", perm=back)
        replace_uses(v.output, values)
    elif v.layout == "B H T K" and (cache := cache_of(v)) is not None and has_separate_heads(v):
        make = Inserter(block.graph, cache.join, f"{block.name}/value")
        cache.join.replace_input_with(1, emit_heads(make, v, 1.0))
