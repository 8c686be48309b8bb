"""Attention layers of the papers in PyTorch, their losses, and their use in trained models.

Needs the extra ``[torch]``. The layers have the call signature of ``torch.nn.MultiheadAttention``.

>>> from attnserve.nn import CollaborativeAttention, swap
>>> swap(model, lambda layers: [CollaborativeAttention.from_trained(l, rank=256) for l in layers])
"""

from __future__ import annotations

from graph_passes.errors import MissingExtra

try:
    import torch as _torch  # noqa: F401 # pyright: ignore[reportUnusedImport]
except ImportError as error:
    raise MissingExtra(
        f"{error.name or 'torch'} is not installed: attnserve.nn needs PyTorch",
        "pip install 'attnserve[torch]'",
        code="extra.torch",
    ) from error

from attnserve.nn.attention import AttentionLayer, FixedHeadAttention
from attnserve.nn.collaborative import CollaborativeAttention
from attnserve.nn.grouped import (
    GroupedHeadAttention,
    group_loss,
    keep_pillars,
    voting_to_stay,
)
from attnserve.nn.huggingface import swap
from attnserve.nn.latest_call import FeatureMaps
from attnserve.nn.reuse import ReuseAttention, SkipAttention, reuse_transformer
from attnserve.nn.shared_keys import SharedKeyAttention
from attnserve.nn.trained import TrainedAttention, read_trained_attention

__all__ = [
    "AttentionLayer",
    "CollaborativeAttention",
    "FeatureMaps",
    "FixedHeadAttention",
    "GroupedHeadAttention",
    "ReuseAttention",
    "SharedKeyAttention",
    "SkipAttention",
    "TrainedAttention",
    "group_loss",
    "keep_pillars",
    "read_trained_attention",
    "reuse_transformer",
    "swap",
    "voting_to_stay",
]
