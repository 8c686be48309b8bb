"""Matched blocks as data: ``AttentionBlock``, ``FeedForwardBlock`` and their parts.

Dimensions, used in the whole project:

    B  batch                 H  heads                   K  head size (queries and keys)
    S  query length          G  key/value heads         V  value head size
    T  key length            D  input size (of x)       R  shared dimension of collaborative heads
    F  neurons               E  input size (of y)       N  columns of a projection

A block is invalid once its graph has changed: find again after each rewrite.
"""

from typing import TypeVar

from graph_passes.blocks.attention import AttentionBlock, BlockForm, Reused, Softmax, Unmatched
from graph_passes.blocks.feed_forward import FeedForwardBlock, Linear, Operand
from graph_passes.blocks.logit_steps import (
    Capped,
    Causal,
    Floor,
    FullLengths,
    KeyLengths,
    KeyMask,
    LogitStep,
    Mask,
    PositionBias,
    Scaled,
    Weighted,
)
from graph_passes.blocks.projections import (
    BroadcastLayout,
    Norm,
    OutputProjection,
    Projection,
    QuantizedProduct,
    QuantizedWeight,
    RotaryTerm,
    Weight,
)

Block = AttentionBlock | FeedForwardBlock
"""A block of any kind. All kinds have a last linear map: the output projection, or the second
product. Its inputs are the parts that can be removed: heads, or neurons."""

BlockT = TypeVar("BlockT", AttentionBlock, FeedForwardBlock)
"""A block of one kind."""

__all__ = [
    "AttentionBlock",
    "Block",
    "BlockForm",
    "BlockT",
    "BroadcastLayout",
    "Capped",
    "Causal",
    "FeedForwardBlock",
    "Floor",
    "FullLengths",
    "KeyLengths",
    "KeyMask",
    "Linear",
    "LogitStep",
    "Mask",
    "Norm",
    "Operand",
    "OutputProjection",
    "PositionBias",
    "Projection",
    "QuantizedProduct",
    "QuantizedWeight",
    "Reused",
    "RotaryTerm",
    "Scaled",
    "Softmax",
    "Unmatched",
    "Weight",
    "Weighted",
]
