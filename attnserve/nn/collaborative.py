"""Collaborative heads: shared query and key dimensions (arXiv 2006.16362)."""

from __future__ import annotations

from typing import Any, Literal, Unpack

import torch
from torch import Tensor, nn

from attnserve.nn.attention import (
    AttentionLayer,
    Rotation,
    check_size,
    input_projection,
    rotary_error,
    value_size,
)
from attnserve.nn.shared_keys import SharedKeyAttention
from attnserve.nn.trained import LayerOptions, TrainedAttention, require_trained
from graph_passes.errors import InvalidArgument
from graph_passes.factorize.cp import CollaborativeFactors, collaborative_factors
from graph_passes.factorize.moments import TokenMoments
from graph_passes.factorize.sparse import sparse_factors

__all__ = ["CollaborativeAttention"]


class CollaborativeAttention(AttentionLayer):
    """Heads that share query and key dimensions (equations 6, 7 and 13 of arXiv 2006.16362).

        logits_h = scale [ (x W~Q) diag(m_h) (y W~K)^T + v_h^T y^T ]

    With a support, head h reads only the dimensions of its support, and costs as much as an
    ordinary head of that size; elsewhere m_h stays 0.

    Args:
        embed_dim: D.
        num_heads: H.
        rank: R, the number of shared dimensions.
        mixing: The initial M. "concatenation" is the block-of-ones structure of equation 8, which
            equals standard attention with heads of R/H (blocks differ by one if H does not divide
            R). "random" is normal with mean 1/sqrt(H) and standard deviation 1/(2 sqrt(H)), so that
            logits have nearly the same variance: all heads start from similar logits of all
            dimensions. Training from scratch is slower from mean 0, and from a concatenation.
        support: The entries of M that are learned, (H, R), boolean; None for all (dense mixing).
        options: See ``AttentionLayer``. V is D/H by default, and the scale 1/sqrt(R/H), as for the
            concatenated heads. With ``bias``, there are content vectors v_h (the query biases of
            standard attention, eq. 12) and biases of the value and output projections. The key bias
            does not change the softmax.

    Attributes:
        q_proj: W~Q, a linear map from D to R.
        k_proj: W~K, a linear map from E to R.
        mixing: M, (H, R).
        content: v, a linear map from E to H; None without content vectors.
        columns: The dimensions that each head reads, (H, W), padded with 0; None for all.
        reads: The mask of ``columns`` without padding, (H, W); None for all.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        rank: int,
        *,
        mixing: Literal["concatenation", "random"] = "concatenation",
        support: Tensor | None = None,
        **options: Unpack[LayerOptions],
    ) -> None:
        check_size("rank", rank)
        check_size("num_heads", num_heads)
        options = {
            "value_head_size": value_size(embed_dim, num_heads, options),
            "scale": (rank / num_heads) ** -0.5,
            **options,
        }
        super().__init__(embed_dim, num_heads, **options)
        self.rank = rank
        self.q_proj = input_projection(embed_dim, rank, bias=False)
        self.k_proj = input_projection(self.kdim, rank, bias=False)
        has_content = options.get("bias", True)
        self.content = nn.Linear(self.kdim, num_heads, bias=False) if has_content else None
        if self.content is not None:
            nn.init.zeros_(self.content.weight)
        if mixing not in ("concatenation", "random"):
            raise InvalidArgument(
                f"`mixing` is {mixing!r}: expected concatenation or random",
                "choose the initial mixing",
                code="nn.mixing",
            )
        if mixing == "random":
            start = (1 + 0.5 * torch.randn(num_heads, rank)) * num_heads**-0.5
        else:
            owner = torch.arange(rank) * num_heads // rank
            start = (owner == torch.arange(num_heads)[:, None]).to(torch.get_default_dtype())
        self.mixing = nn.Parameter(start)
        self.columns: Tensor | None
        self.reads: Tensor | None
        columns = reads = None
        if support is not None:
            columns, reads = _columns(support, (num_heads, rank))
        self.register_buffer("columns", columns)
        self.register_buffer("reads", reads)
        self.register_load_state_dict_pre_hook(CollaborativeAttention._take_sizes)

    @classmethod
    def from_trained(
        cls,
        layer: TrainedAttention,
        *,
        rank: int,
        head_size: int | None = None,
        moments: TokenMoments | None = None,
    ) -> CollaborativeAttention | SharedKeyAttention:
        """Factorize the queries and keys of a trained layer, keeping its scale.

        Under rotary positions, heads share only keys, see ``SharedKeyAttention``.

        Args:
            rank: R, from 1 to H*K, where the result is exact. Under rotary positions an even number
                from 2 to G*K, for G different key heads.
            head_size: Mean number of dimensions a head reads, for sparse mixing (default: dense).
            moments: Moments of the layer's tokens, for a calibrated decomposition.

        Raises:
            InvalidArgument: ``rank`` or ``head_size`` is out of range, or ``head_size`` is given
                for a layer with rotary positions.
            InvalidModel: Weights are not finite.
        """
        require_trained(layer)
        if layer.rotary:
            if head_size is not None:
                raise rotary_error("`head_size` (sparse mixing)")
            return SharedKeyAttention.from_trained(layer, rank=rank, moments=moments)
        parts = (layer.query, layer.key, layer.query_bias)
        q, k, bias = (part.double().cpu().numpy() for part in parts)
        if head_size is None:
            factors = collaborative_factors(q, k, rank, query_bias=bias, moments=moments)
        else:
            factors = sparse_factors(q, k, rank, head_size, query_bias=bias, moments=moments)
        return cls.from_factors(layer, factors, sparse=head_size is not None)

    @classmethod
    def from_factors(
        cls, layer: TrainedAttention, factors: CollaborativeFactors, *, sparse: bool = False
    ) -> CollaborativeAttention:
        """Make a layer of these factors, and the values, output projection and scale of ``layer``.

        Args:
            sparse: Learn only the entries of M that are not zero.
        """
        support = torch.from_numpy(factors.mixing != 0) if sparse else None
        collaborative_layer = cls(
            layer.sizes[0], layer.num_heads, factors.rank, support=support, **layer.options
        ).to(layer.query)
        collaborative_layer.take_values(layer)
        with torch.no_grad():
            collaborative_layer.q_proj.weight.copy_(torch.from_numpy(factors.query.T))
            collaborative_layer.k_proj.weight.copy_(torch.from_numpy(factors.key.T))
            collaborative_layer.mixing.copy_(torch.from_numpy(factors.mixing))
            if collaborative_layer.content is not None:
                collaborative_layer.content.weight.copy_(torch.from_numpy(factors.content))
        return collaborative_layer

    def _take_sizes(self, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
        """Take R and the support from a state dict that is about to be loaded.

        ``from_trained`` computes both from weights, so a new swapped model may have other ones.
        Incomplete weights change nothing.
        """
        names = ("mixing", "q_proj.weight", "k_proj.weight", "columns")
        mixing, query, key, columns = (state_dict.get(f"{prefix}{name}") for name in names)
        if mixing is None or query is None or key is None:
            return
        if mixing.shape[-1] != self.rank:
            self.rank = mixing.shape[-1]
            self.mixing.data = self.mixing.new_zeros(self.num_heads, self.rank)
            for linear in (self.q_proj, self.k_proj):
                linear.out_features = self.rank
                linear.weight.data = linear.weight.new_zeros(self.rank, linear.in_features)
        if columns is not None and self.columns is not None and self.reads is not None:
            shape = (self.num_heads, columns.shape[-1])
            self.columns = self.columns.new_empty(shape)
            self.reads = self.reads.new_empty(shape)

    def logits(self, query: Tensor, key: Tensor, rotation: Rotation | None = None) -> Tensor:
        """Scaled logits (B, H, S, T) of tokens x (B, S, D) and y (B, T, E).

        Raises:
            InvalidArgument: ``rotation`` is given: heads under rotary positions share only keys.
        """
        if rotation is not None:
            raise rotary_error("CollaborativeAttention")
        q = self.q_proj(query) * self.scale
        k = self.k_proj(key)
        if self.columns is None or self.reads is None:
            q = q.unsqueeze(1) * self.mixing.unsqueeze(1)
            k = k.unsqueeze(1)
        else:  # each head has the size of its support: B H S W and B H T W
            heads = self.columns.shape
            q, k = (part[..., self.columns.flatten()].unflatten(-1, heads) for part in (q, k))
            q = q * (self.mixing.gather(1, self.columns) * self.reads)
            q, k = q.transpose(1, 2), k.transpose(1, 2)
        logits = q @ k.transpose(-1, -2)
        if self.content is not None:
            logits = logits + (self.content(key) * self.scale).transpose(1, 2).unsqueeze(2)
        return logits


def _columns(support: Tensor, shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """The columns that each head reads (H, W), padded with 0, and the mask of the real ones.

    Raises:
        InvalidArgument: The support has another shape, or a head reads nothing.
    """
    fault = ""
    if tuple(support.shape) != shape:
        fault = f"shape {tuple(support.shape)}"
    elif not support.any(1).all():
        fault = "an empty row"
    if fault:
        raise InvalidArgument(
            f"`support` has {fault}: expected {shape} without empty rows",
            "let each head read at least one dimension",
            code="nn.support",
        )
    width = int(support.sum(1).max())
    reads = torch.arange(width) < support.sum(1, keepdim=True)
    columns = support.to(torch.uint8).argsort(dim=1, descending=True, stable=True)[:, :width]
    return columns * reads, reads
