"""The public names of the package, which ``graph_passes`` imports on first use."""

from __future__ import annotations

from graph_passes.analyses import Analyses
from graph_passes.blocks import AttentionBlock, FeedForwardBlock, Unmatched
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
from graph_passes.passes.base import BlockPass, RewritePass
from graph_passes.passes.collaborate import Collaborate, Mixing
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
from graph_passes.registry import Registry

__all__ = [
    "PASSES",
    "AffineMap",
    "Analyses",
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
    "InvalidArgument",
    "InvalidData",
    "InvalidModel",
    "InvariantBroken",
    "Mixing",
    "PruneHeads",
    "PruneNeurons",
    "Refusal",
    "ReuseAttention",
    "RewritePass",
    "SkipAttention",
    "StripCache",
    "ToBfloat16",
    "Unmatched",
    "find_attention",
    "find_feed_forward",
]

PASSES = Registry[type[RewritePass]](
    "pass",
    Collaborate,
    DecomposeAttention,
    FoldBiases,
    FuseAttention,
    FuseGelu,
    FuseResiduals,
    FuseSkipNorm,
    PruneHeads,
    PruneNeurons,
    ReuseAttention,
    SkipAttention,
    StripCache,
)
"""The passes that plans name."""
