"""Collaborative heads under rotary positions: all heads share one key head."""

from __future__ import annotations

from typing import Any, Unpack

import numpy as np
import torch
from torch import Tensor

from attnserve.nn.attention import (
    AttentionLayer,
    Rotation,
    by_head,
    check_size,
    input_projection,
    rotated,
    value_size,
)
from attnserve.nn.trained import LayerOptions, TrainedAttention
from graph_passes.factorize.moments import TokenMoments
from graph_passes.factorize.rotary import RotaryHeads, shared_keys

__all__ = ["SharedKeyAttention"]


class SharedKeyAttention(AttentionLayer):
    """Heads whose keys share R dimensions that are rotated by the position.

        logits_h = scale Re sum_n e^{i theta_f(n) (s - t)} (x W_Q^h)_n conj((y W~_K)_n)

    Elements n and n + R/2 are one complex number. All heads rotate it by the angle of its plane
    f(n), so that heads can share keys within a plane (arXiv 2006.16362 shares queries too; a shared
    query would need a complex mixing). Every head has R query dimensions.

    Args:
        embed_dim: D.
        num_heads: H.
        planes: f(n), the index of the angle of each complex number, (R/2,).
        options: See ``AttentionLayer``. V is D/H by default, and the scale 1/sqrt(R).

    Attributes:
        q_proj: The queries of all heads, a linear map from D to H*R.
        k_proj: The shared keys, a linear map from E to R.
    """

    planes: Tensor

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        planes: Tensor,
        **options: Unpack[LayerOptions],
    ) -> None:
        rank = 2 * len(planes)
        check_size("planes", rank)
        check_size("num_heads", num_heads)
        size = value_size(embed_dim, num_heads, options)
        options = {"value_head_size": size, "scale": rank**-0.5, **options}
        super().__init__(embed_dim, num_heads, **options)
        bias = options.get("bias", True)
        self.rank = rank
        self.q_proj = input_projection(embed_dim, num_heads * rank, bias=bias)
        self.k_proj = input_projection(self.kdim, rank, bias=bias)
        self.register_buffer("planes", planes)

    @classmethod
    def from_trained(
        cls, layer: TrainedAttention, *, rank: int, moments: TokenMoments | None = None
    ) -> SharedKeyAttention:
        """Share the keys of a trained layer with rotary positions, keeping its scale.

        Args:
            rank: R, an even number from 2 to G*K for G different key heads; exact at G*K.
            moments: Moments of the layer's tokens, for a calibrated decomposition.

        Raises:
            InvalidArgument: ``rank`` is out of range.
        """
        key = _complex(layer.key, layer.key_bias)
        _, index, groups = np.unique(key, axis=0, return_index=True, return_inverse=True)
        query = _complex(layer.query, layer.query_bias)
        heads = RotaryHeads(query, key[index], groups.reshape(-1), is_self=True)
        factors = shared_keys(heads, rank, moments)
        query = _real(factors.query)  # H D+1 R
        key = _real(factors.key)[0]  # E+1 R
        planes = torch.from_numpy(factors.planes[0])
        shared_layer = cls(layer.sizes[0], layer.num_heads, planes, **layer.options).to(layer.query)
        shared_layer.take_values(layer)
        with torch.no_grad():
            shared_layer.q_proj.weight.copy_(query[:, :-1].transpose(1, 2).flatten(0, 1))
            shared_layer.k_proj.weight.copy_(key[:-1].T)
            if layer.has_bias:
                shared_layer.q_proj.bias.copy_(query[:, -1].flatten())
                shared_layer.k_proj.bias.copy_(key[-1])
        return shared_layer

    def logits(self, query: Tensor, key: Tensor, rotation: Rotation | None = None) -> Tensor:
        """Scaled logits (B, H, S, T) of tokens x (B, S, D) and y (B, T, E)."""
        q = by_head(self.q_proj(query), self.num_heads)
        k = by_head(self.k_proj(key), 1)
        if rotation is not None:
            cos, sin = (part[..., self.planes] for part in rotation)
            turns = (torch.cat([cos, cos], -1), torch.cat([sin, sin], -1))
            q = rotated(q, turns)
            k = rotated(k, turns)
        return (q * self.scale) @ k.transpose(-1, -2)


def _complex(weight: Tensor, bias: Tensor) -> Any:
    """W^h (H, D, K) with the bias as the last row, as complex numbers (H, D+1, K/2)."""
    rows = torch.cat([weight, bias.unsqueeze(1)], 1).double().cpu().numpy()
    real, imaginary = np.split(rows, 2, axis=2)
    return real + 1j * imaginary


def _real(heads: Any) -> Tensor:
    """Complex numbers (H, D+1, N) as real elements (H, D+1, 2N): real parts, then imaginary."""
    return torch.from_numpy(np.concatenate([heads.real, heads.imag], axis=2))
