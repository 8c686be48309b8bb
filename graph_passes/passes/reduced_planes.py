"""Reduce the pairs of elements that rotary positions rotate, by head or for all key heads."""

from __future__ import annotations

import numpy as np

from graph_passes.blocks import AttentionBlock
from graph_passes.emit.attention import KEY_TERM, entangled_bias_refusal
from graph_passes.emit.head_terms import heads_refusal
from graph_passes.emit.rotary import rotary_heads, rotary_planes
from graph_passes.errors import Refusal
from graph_passes.factorize.moments import TokenMoments
from graph_passes.factorize.rotary import RotaryFactors, shared_keys, truncated_planes
from graph_passes.passes.conditions import QK_NORM, quantized_refusal, scores_refusal

__all__ = ["plane_factors", "rotary_refusal"]


def rotary_refusal(block: AttentionBlock, *, shares_keys: bool) -> Refusal | None:
    """Return why pairs of elements cannot be reduced; None if they can.

    Args:
        shares_keys: All heads share their keys; if not, each head is truncated.
    """
    if refusal := quantized_refusal(block):
        return refusal
    parts = (block.q, block.k)
    if any(part.norm is not None for part in parts):
        return QK_NORM
    for part in parts:
        if refusal := heads_refusal(part):
            return refusal
    if block.content is not None:
        return KEY_TERM
    if refusal := entangled_bias_refusal(block):
        return refusal
    planes = [rotary_planes(part) for part in parts]
    if planes[0] is None or planes[1] is None:
        return Refusal("rotary_layout", "its rotary positions do not rotate pairs of elements")
    if not np.array_equal(planes[0].elements, planes[1].elements):
        return Refusal("rotary_layout", "its rotary positions pair queries and keys differently")
    if shares_keys and not (planes[0].is_rotation and planes[1].is_rotation):
        return Refusal(
            "rotary_angles", "the elements of a pair are not known to have the same rotary angle"
        )
    return scores_refusal(block)


def plane_factors(
    block: AttentionBlock, rank: int, head_size: int | None, moments: TokenMoments | None = None
) -> RotaryFactors:
    """Truncate each head to ``head_size`` elements; if it is None, share keys of R elements.

    Raises:
        InvalidArgument: The size is odd or out of range.
    """
    heads = rotary_heads(block)
    if head_size is None:
        return shared_keys(heads, rank, moments)
    return truncated_planes(heads, head_size, moments)
