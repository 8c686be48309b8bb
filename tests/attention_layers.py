"""The attention layers that the configurations of models describe."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal


@dataclass(frozen=True)
class Layer:
    """One attention layer of a model configuration."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    scale: float
    kind: Literal["self", "cross"] = "self"
    position: Literal["none", "bias", "rope"] = "none"


def encoder(config: Any, position: Any = "none") -> list[Layer]:
    """The layers of a model with one stack."""
    heads = config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    layer = Layer(heads, kv_heads, size, size**-0.5, position=position)
    return [layer] * config.num_hidden_layers


rotary_encoder = partial(encoder, position="rope")


def disentangled(config: Any) -> list[Layer]:
    """DeBERTa: content and positions have one scale; the scores of positions are a bias."""
    terms = 1 + len(config.pos_att_type)
    own = encoder(config, position="bias")
    return [replace(layer, scale=(terms * layer.head_size) ** -0.5) for layer in own]


def gemma3_layers(config: Any) -> list[Layer]:
    """The scale is independent of the head size."""
    scale = config.query_pre_attn_scalar**-0.5
    return [replace(layer, scale=scale) for layer in rotary_encoder(config)]


def speech_encoder(config: Any) -> list[Layer]:
    """The encoder of BART, Marian or Whisper."""
    heads = config.encoder_attention_heads
    size = config.d_model // heads
    return [Layer(heads, heads, size, size**-0.5)] * config.encoder_layers


def cross_decoder(config: Any) -> list[Layer]:
    """The decoder of BART, Marian or Whisper."""
    heads = config.decoder_attention_heads
    size = config.d_model // heads
    layers = [Layer(heads, heads, size, size**-0.5, kind) for kind in ("self", "cross")]
    return layers * config.decoder_layers


def encoder_decoder(config: Any) -> list[Layer]:
    return speech_encoder(config) + cross_decoder(config)


def t5_layers(config: Any) -> list[Layer]:
    """No scale; only self-attention has relative positions."""

    def layer(kind: Any, position: Any) -> Layer:
        return Layer(config.num_heads, config.num_heads, config.d_kv, 1.0, kind, position)

    own = layer("self", "bias")
    return [own] * config.num_layers + [own, layer("cross", "none")] * config.num_decoder_layers


def pooling(config: Any) -> list[Layer]:
    """One layer, in which a learned query attends to the hidden states."""
    return [replace(encoder(config)[0], kind="cross")]


def windows(config: Any) -> list[Layer]:
    """Swin-v2: cosines of queries and keys, with a scale and a bias by head.

    Normalized by their length, they are 1 / sqrt(head size) of those normalized by mean square.
    """

    def layer(heads: int, size: int) -> Layer:
        return Layer(heads, heads, size, 1 / size, position="bias")

    return [
        layer(heads, config.embed_dim * 2**stage // heads)
        for stage, heads in enumerate(config.num_heads)
        for _ in range(config.depths[stage])
    ]


def mask_decoder(config: Any) -> list[Layer]:
    """SAM: prompts attend to themselves and to the image, and the image to the prompts."""
    heads = config.num_attention_heads

    def layer(rate: int, kind: Any) -> Layer:
        size = config.hidden_size // rate // heads
        return Layer(heads, heads, size, size**-0.5, kind)

    own, cross = layer(1, "self"), layer(config.attention_downsample_rate, "cross")
    return [own, cross, cross] * config.num_hidden_layers + [cross]
