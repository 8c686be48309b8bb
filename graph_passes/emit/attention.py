"""Emit selected heads of an ``AttentionBlock`` in standard ONNX operators.

    heads           x W^h, with q/k norm and rotary embedding         (B, H, T, K)
    probabilities   softmax(steps(q k^T))                             (B, H, S, T)
    output          concat(heads)[rows] W_O + bias                    in the original layout

All operators have the same semantics from opset 11 on.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from graph_passes.analysis.shapes import ShapeInfo
from graph_passes.blocks import AttentionBlock, FullLengths, Mask, PositionBias, Weighted
from graph_passes.emit.affine import emit_affine, emit_order
from graph_passes.emit.editing import Inserter, in_precision, type_of
from graph_passes.emit.head_terms import heads_refusal
from graph_passes.emit.heads import emit_heads
from graph_passes.errors import Refusal

__all__ = [
    "KEY_TERM",
    "emission_refusal",
    "emit_context",
    "emit_output",
    "emit_output_projection",
    "entangled_bias_refusal",
]

MERGE_ORDER = {False: [0, 2, 1, 3], True: [2, 0, 1, 3]}
"""From (B, H, S, V) back to (B, S, H, V) or (S, B, H, V)."""

KEY_TERM = Refusal(
    "key_term", "its scores include a content term of the keys alone, which is not a product"
)


def entangled_bias_refusal(block: AttentionBlock) -> Refusal | None:
    """Return why a bias that depends on q or k cannot be emitted; None without such a bias."""
    if any(isinstance(step, PositionBias) and step.entangled for step in block.steps):
        return Refusal(
            "entangled_bias", "its position bias is computed from its own queries or keys"
        )
    return None


def emission_refusal(block: AttentionBlock, info: ShapeInfo | None = None) -> Refusal | None:
    """Return why some heads of a block cannot be emitted in plain operators; None if they can.

    Args:
        info: Shapes, if known: masks may have too many axes.
    """
    if len(block.own_heads) < block.num_heads:
        return Refusal(
            "reuses_heads", "some of its heads reuse the probabilities of another layer already"
        )
    if block.is_collaborative or block.is_sparse:
        return Refusal(
            "collaborative", "its heads are collaborative: they share their queries and keys"
        )
    if block.content is not None:
        return KEY_TERM
    for part in (block.q, block.k, block.v):
        if refusal := heads_refusal(part):
            return refusal
    if any(isinstance(step, FullLengths) for step in block.steps):
        return Refusal("cache_lengths", "its operator reads the sequence lengths of a cache")
    if refusal := entangled_bias_refusal(block):
        return refusal
    masks = [step for step in block.steps if isinstance(step, Mask | PositionBias | Weighted)]
    for mask in (step.value for step in masks):
        shape = mask.shape if info is None else info.shape(mask)
        if info is not None and shape is None:
            return Refusal(
                "mask_shape", f"the shape of its mask {mask.name!r} could not be inferred"
            )
        if shape is not None and len(shape) > 4:
            return Refusal("window_mask", "its mask has an axis of windows beside batch and heads")
    return None


def emit_context(
    make: Inserter,
    block: AttentionBlock,
    parts: Sequence[tuple[ir.Value, np.ndarray]],
    info: ShapeInfo,
) -> ir.Value:
    """Emit probabilities @ v of some heads, (B, H, S, V), in the order of the parts.

    The values of all parts are one product. The contexts of several parts are joined; joined
    probabilities would copy S x T elements for each head.

    Args:
        parts: Probabilities (B, h, S, T), each with its h heads of the block.
    """
    heads = np.concatenate([heads for _, heads in parts])
    v = emit_heads(make.part("value"), block.v, block.v.scale, heads)
    v.type = ir.TensorType(block.v.dtype)
    contexts: list[ir.Value] = []
    dtype = block.v.dtype
    first = 0
    for probabilities, heads in parts:
        values = v
        if len(parts) > 1:
            ends = [make.integers([n], "end") for n in (first, first + len(heads), 1)]
            values = make.op("Slice", [v, *ends], "values", dtype=v.dtype)
            first += len(heads)
        dtype = type_of(probabilities, info) or block.v.dtype
        values = in_precision(make, values, dtype, info)
        contexts.append(make.op("MatMul", [probabilities, values], "context", dtype=dtype))
    if len(contexts) == 1:
        return contexts[0]
    contexts = [in_precision(make, context, dtype, info) for context in contexts]
    return make.op("Concat", contexts, "contexts_joined", axis=1, dtype=dtype)


def emit_output(
    make: Inserter, block: AttentionBlock, context: ir.Value, heads: np.ndarray, info: ShapeInfo
) -> None:
    """Replace the block's output by the projection of the context (B, H, S, V) of some heads."""
    order = MERGE_ORDER[block.required_output.sequence_first]
    merged = make.op("Transpose", [context], "by_token", perm=order)
    # Without -1, which no size follows from if the batch or the sequence is empty.
    shape = make.integers([0, 0, len(heads) * block.v_head_size], "merged")
    merged = make.op("Reshape", [merged, shape], "merged_heads", dtype=context.dtype)
    emit_output_projection(make, block, merged, heads, info)


def emit_output_projection(
    make: Inserter, block: AttentionBlock, context: ir.Value, heads: np.ndarray, info: ShapeInfo
) -> None:
    """Replace the block's output by the projection of the context (B, S, H*V) of some heads.

    If the weight of the projection is quantized, only the order of the elements is changed.
    """
    output = block.required_output
    if output.is_quantized:
        emit_order(make, context, np.argsort(output.rows.reshape(-1)), output.output, info)
        return
    rows = output.matrix()[output.rows[heads]]  # H V D
    emit_affine(
        make, context, rows.reshape(-1, rows.shape[-1]), output.offset(), output.output, info
    )
