"""Weights of a trained multi-head attention layer, by head."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, TypedDict

import torch
from torch import Tensor, nn

from graph_passes.errors import InvalidArgument

__all__ = ["LayerOptions", "TrainedAttention", "read_trained_attention", "require_trained"]


class LayerOptions(TypedDict, total=False):
    """The keyword arguments of ``AttentionLayer``."""

    value_head_size: int
    scale: float
    dropout: float
    bias: bool
    kdim: int | None
    vdim: int | None
    batch_first: bool


@dataclass(frozen=True, eq=False)
class TrainedAttention:
    """Weights of a standard layer: softmax(scale * (x W_Q^h + b_Q^h)(y W_K^h + b_K^h)^T) v W_O + b.

    Attributes:
        query: W_Q^h, (H, D, K).
        key: W_K^h, (H, E, K).
        value: W_V^h, (H, F, V).
        output: The rows of W_O of each head, (H, V, D).
        query_bias: b_Q^h, (H, K).
        key_bias: b_K^h, (H, K).
        value_bias: b_V^h, (H, V).
        output_bias: b, (D,).
        scale: The factor of the logits.
        dropout: Dropout probability of attention probabilities, in training.
        batch_first: Whether tokens are (B, S, D), not (S, B, D).
        rotary: Whether queries and keys are rotated by their positions before the product.
        has_bias: Whether any projection has a bias; otherwise all biases are zero.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor
    query_bias: Tensor
    key_bias: Tensor
    value_bias: Tensor
    output_bias: Tensor
    scale: float
    dropout: float = 0.0
    batch_first: bool = True
    rotary: bool = False
    has_bias: bool = True

    @property
    def num_heads(self) -> int:
        """H, the number of heads."""
        return self.query.shape[0]

    @property
    def head_size(self) -> int:
        """K, the size of queries and keys."""
        return self.query.shape[2]

    @property
    def value_head_size(self) -> int:
        """V, the size of values."""
        return self.value.shape[2]

    @property
    def sizes(self) -> tuple[int, int, int]:
        """D, E and F: the widths of queries, keys and values."""
        return self.query.shape[1], self.key.shape[1], self.value.shape[1]

    @property
    def options(self) -> LayerOptions:
        """The arguments of an ``AttentionLayer`` with the same values and scale."""
        _, E, F = self.sizes
        return {
            "value_head_size": self.value_head_size,
            "scale": self.scale,
            "dropout": self.dropout,
            "kdim": E,
            "vdim": F,
            "batch_first": self.batch_first,
            "bias": self.has_bias,
        }

    def of_heads(self, chosen: Any) -> TrainedAttention:
        """The layer with the heads of an index, slice or mask alone."""
        parts = ("query", "key", "value", "output", "query_bias", "key_bias", "value_bias")
        return replace(self, **{name: getattr(self, name)[chosen] for name in parts})

    @staticmethod
    def of_linears(
        query: nn.Linear,
        key: nn.Linear,
        value: nn.Linear,
        output: nn.Linear,
        *,
        num_heads: int,
        scale: float,
        num_kv_heads: int | None = None,
        dropout: float = 0.0,
        batch_first: bool = True,
        rotary: bool = False,
    ) -> TrainedAttention:
        """Copy the weights of the four projections of a layer.

        Args:
            num_kv_heads: Number of key/value heads, if fewer; each is copied for its query heads.
        """
        kv_heads = num_kv_heads or num_heads
        query_weight, query_bias = _heads(query, num_heads, num_heads)
        key_weight, key_bias = _heads(key, kv_heads, num_heads)
        value_weight, value_bias = _heads(value, kv_heads, num_heads)
        biases: list[Any] = [linear.bias for linear in (query, key, value, output)]
        return TrainedAttention(
            query=query_weight,
            key=key_weight,
            value=value_weight,
            output=output.weight.detach().clone().T.unflatten(0, (num_heads, -1)),  # H V D
            query_bias=query_bias,
            key_bias=key_bias,
            value_bias=value_bias,
            output_bias=_bias(output),
            scale=scale,
            dropout=dropout,
            batch_first=batch_first,
            rotary=rotary,
            has_bias=any(bias is not None for bias in biases),
        )


def require_trained(layer: object) -> None:
    """Check that ``layer`` holds weights.

    Raises:
        InvalidArgument: ``layer`` is another object, such as the module itself.
    """
    if not isinstance(layer, TrainedAttention):
        raise InvalidArgument(
            f"`layer` is {type(layer).__name__}: expected the weights of a layer",
            "read them with attnserve.nn.read_trained_attention, or with `trained()` of its own "
            "layers",
            code="nn.not_trained",
        )


def read_trained_attention(layer: nn.MultiheadAttention) -> TrainedAttention:
    """Copy the weights of PyTorch's attention layer.

    Raises:
        InvalidArgument: The layer appends learned or zero keys (``add_bias_kv``,
            ``add_zero_attn``), or is another module.
    """
    if not isinstance(layer, nn.MultiheadAttention):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidArgument(
            f"`layer` is {type(layer).__name__}: expected torch.nn.MultiheadAttention",
            "call `trained()` of a layer of attnserve.nn, or `swap` for Hugging Face models",
            code="nn.not_multihead",
        )
    if layer.bias_k is not None or layer.add_zero_attn:
        raise InvalidArgument(
            "`layer` appends keys (add_bias_kv or add_zero_attn), which is not supported",
            "pass a layer without them",
            code="nn.appended_keys",
        )
    # The weights are separate if the widths of keys and values differ from that of the queries.
    unpacked: list[Any] = [layer.q_proj_weight, layer.k_proj_weight, layer.v_proj_weight]
    packed: Any = layer.in_proj_weight
    weights: list[Tensor] = unpacked if packed is None else list(packed.chunk(3))
    bias: Any = layer.in_proj_bias
    biases: list[Tensor | None] = [None] * 3 if bias is None else list(bias.chunk(3))
    query, key, value = (_linear(w, b) for w, b in zip(weights, biases, strict=True))
    return TrainedAttention.of_linears(
        query,
        key,
        value,
        layer.out_proj,
        num_heads=layer.num_heads,
        scale=layer.head_dim**-0.5,
        dropout=layer.dropout,
        batch_first=layer.batch_first,
    )


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """A linear map with these weights, without a copy."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    linear.weight = nn.Parameter(weight.detach())
    if bias is not None:
        linear.bias = nn.Parameter(bias.detach())
    return linear


def _heads(linear: nn.Linear, heads: int, num_heads: int) -> tuple[Tensor, Tensor]:
    """W^h (H, D, K) and b^h (H, K); each head of ``heads`` < H is repeated."""
    weight = linear.weight.detach().clone().unflatten(0, (heads, -1)).transpose(1, 2)
    bias = _bias(linear).unflatten(0, (heads, -1))
    times = num_heads // heads
    return weight.repeat_interleave(times, 0), bias.repeat_interleave(times, 0)


def _bias(linear: nn.Linear) -> Tensor:
    """The bias, or zeros."""
    bias: Any = linear.bias
    if bias is None:
        return torch.zeros_like(linear.weight[:, 0]).detach()
    return bias.detach().clone()
