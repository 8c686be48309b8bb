"""Find multi-head attention and feed-forward blocks in ONNX graphs, and rewrite them.

>>> from graph_passes import PruneHeads, find_attention
>>> blocks, unmatched = find_attention(model)  # model: onnx_ir.Model
>>> [(block.num_heads, block.head_size) for block in blocks]
[(3, 4)]
>>> result = PruneHeads({blocks[0].name: [1, 0, 1]})(model)
>>> find_attention(result.model)[0][0].num_heads
2

A block is invalid once its graph has changed: find again after each rewrite. Each name is imported
on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from graph_passes.blocks import AttentionBlock, FeedForwardBlock, Unmatched
    from graph_passes.context import GraphContext
    from graph_passes.errors import (
        AttnserveError,
        CannotRewrite,
        InvalidArgument,
        InvalidData,
        InvalidModel,
        InvariantBroken,
        Refusal,
    )
    from graph_passes.factorize.cp import CollaborativeFactors
    from graph_passes.matching.feed_forward import find_feed_forward
    from graph_passes.matching.find import find_attention
    from graph_passes.passes.base import BlockPass, RewritePass, pass_named, registered_passes
    from graph_passes.passes.collaborate import Collaborate, SharedDimensions
    from graph_passes.passes.convert_bfloat16 import ToBfloat16
    from graph_passes.passes.decompose_attention import DecomposeAttention
    from graph_passes.passes.fold_biases import FoldBiases
    from graph_passes.passes.fuse_attention import FuseAttention
    from graph_passes.passes.fuse_gelu import FuseGelu
    from graph_passes.passes.fuse_residuals import FuseResiduals
    from graph_passes.passes.fuse_skip_norm import FuseSkipNorm
    from graph_passes.passes.prune_heads import PruneHeads
    from graph_passes.passes.prune_neurons import PruneNeurons
    from graph_passes.passes.reuse_attention import ReuseAttention
    from graph_passes.passes.skip_attention import AffineMap, SkipAttention
    from graph_passes.passes.strip_cache import StripCache

__all__ = [
    "AffineMap",
    "AttentionBlock",
    "AttnserveError",
    "BlockPass",
    "CannotRewrite",
    "Collaborate",
    "CollaborativeFactors",
    "DecomposeAttention",
    "FeedForwardBlock",
    "FoldBiases",
    "FuseAttention",
    "FuseGelu",
    "FuseResiduals",
    "FuseSkipNorm",
    "GraphContext",
    "InvalidArgument",
    "InvalidData",
    "InvalidModel",
    "InvariantBroken",
    "PruneHeads",
    "PruneNeurons",
    "Refusal",
    "ReuseAttention",
    "RewritePass",
    "SharedDimensions",
    "SkipAttention",
    "StripCache",
    "ToBfloat16",
    "Unmatched",
    "find_attention",
    "find_feed_forward",
    "pass_named",
    "registered_passes",
]

_NAMES = {
    "blocks": ("AttentionBlock", "FeedForwardBlock", "Unmatched"),
    "context": ("GraphContext",),
    "errors": (
        "AttnserveError",
        "CannotRewrite",
        "InvalidArgument",
        "InvalidData",
        "InvalidModel",
        "InvariantBroken",
        "Refusal",
    ),
    "factorize.cp": ("CollaborativeFactors",),
    "matching.feed_forward": ("find_feed_forward",),
    "matching.find": ("find_attention",),
    "passes.base": ("BlockPass", "RewritePass", "pass_named", "registered_passes"),
    "passes.collaborate": ("Collaborate", "SharedDimensions"),
    "passes.convert_bfloat16": ("ToBfloat16",),
    "passes.decompose_attention": ("DecomposeAttention",),
    "passes.fold_biases": ("FoldBiases",),
    "passes.fuse_attention": ("FuseAttention",),
    "passes.fuse_gelu": ("FuseGelu",),
    "passes.fuse_residuals": ("FuseResiduals",),
    "passes.fuse_skip_norm": ("FuseSkipNorm",),
    "passes.prune_heads": ("PruneHeads",),
    "passes.prune_neurons": ("PruneNeurons",),
    "passes.reuse_attention": ("ReuseAttention",),
    "passes.skip_attention": ("AffineMap", "SkipAttention"),
    "passes.strip_cache": ("StripCache",),
}
"""The public names of each module."""

_MODULES = {name: module for module, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
