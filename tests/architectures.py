"""Supported architectures as tiny random models, and the ways to export them with PyTorch.

A model is built from a Hugging Face configuration (or is a module of this file). The configuration
determines its attention (``Layer``). A ``Cell`` is one way to export it. The sizes of a model
differ as far as possible, so that axes cannot be confused. All weights are random, including
biases and normalizations, so that a match without one of them has other outputs.

torch and transformers are imported on first use: test collection needs neither.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import logging
import re
import warnings
from collections.abc import Callable, Generator, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import onnx
import onnx_ir as ir

from attnserve.context import ONE_THREAD
from attnserve.runtime.session import open_session

Attention = Literal["eager", "sdpa"]
Exporter = Literal["torchscript", "dynamo"]
Variant = Literal["", "fp16", "bf16", "dropout"]
Shape = tuple[int | str, ...]

GRAPHS = Path(__file__).parent / "fixtures" / "onnx"

VOCABULARY = 61
POSITIONS = 48
LENGTHS = {"batch": 2, "sequence": 7, "source": 9, "past": 6, "samples": 40}
"""Lengths of the traced example. Inputs may have sums of them: "past + sequence"."""

OTHER_LENGTHS = {"batch": 3, "sequence": 5, "source": 8, "past": 4, "samples": 32}
"""Other lengths: a graph that does not run at these does not count as exported."""

TYPES = {"tensor(int64)": np.int64, "tensor(float)": np.float32, "tensor(float16)": np.float16}


@dataclass(frozen=True)
class Layer:
    """One attention layer of a model configuration."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    scale: float
    kind: Literal["self", "cross"] = "self"
    position: Literal["none", "bias", "rope"] = "none"


@dataclass(frozen=True)
class Cell:
    """One way to export one architecture."""

    architecture: str
    attention: Attention
    exporter: Exporter
    opset: int
    variant: Variant = ""

    @property
    def column(self) -> str:
        parts = (f"{self.exporter}{self.opset}", self.attention, self.variant)
        return "-".join(filter(None, parts))

    @property
    def missed(self) -> bool:
        """Whether no layer matches: from opset 12 on, dropout in training mode is in the graph."""
        return (self.variant == "dropout" and self.opset >= 12) or self.architecture in UNREAD

    @property
    def committed(self) -> Path:
        """The path of the committed graph, which exists for the cells of ``COMMITTED``."""
        return GRAPHS / (re.sub(r"[^a-z0-9]+", "-", str(self).lower()) + ".onnx")

    def __str__(self) -> str:
        return f"{self.architecture}-{self.column}"


# ---- layers of configurations --------------------------------------------------------------------


def encoder(config: Any, position: Any = "none") -> list[Layer]:
    """The layers of a model with one stack."""
    heads = config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    layer = Layer(heads, kv_heads, size, size**-0.5, position=position)
    return [layer] * config.num_hidden_layers


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


# ---- networks ------------------------------------------------------------------------------------

SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 24,
    "num_attention_heads": 3,
    "num_hidden_layers": 2,
    "intermediate_size": 40,
    "max_position_embeddings": POSITIONS,
    "use_cache": False,
}
TWO_STACKS = {
    "vocab_size": VOCABULARY,
    "d_model": 24,
    "encoder_layers": 2,
    "encoder_attention_heads": 3,
    "encoder_ffn_dim": 40,
    "decoder_layers": 1,
    "decoder_attention_heads": 6,
    "decoder_ffn_dim": 44,
    "max_position_embeddings": POSITIONS,
    "pad_token_id": 1,
    "eos_token_id": 2,
    "use_cache": False,
}
GROUPED = {
    **SIZES,
    "hidden_size": 30,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 8,
}
IMAGE = {
    "hidden_size": 24,
    "num_attention_heads": 3,
    "num_hidden_layers": 2,
    "intermediate_size": 40,
    "image_size": 20,
    "patch_size": 5,
}
GPT2 = {"vocab_size": VOCABULARY, "n_embd": 24, "n_head": 3, "n_layer": 2, "n_positions": POSITIONS}
WHISPER = {
    **TWO_STACKS,
    "num_mel_bins": 10,
    "max_source_positions": 15,
    "max_target_positions": POSITIONS,
}

TEXT: Mapping[str, Shape] = {
    "input_ids": ("batch", "sequence"),
    "attention_mask": ("batch", "sequence"),
}
PIXELS: Mapping[str, Shape] = {"pixel_values": ("batch", 3, 20, 20)}
TWO_TEXTS: Mapping[str, Shape] = {
    "input_ids": ("batch", "source"),
    "attention_mask": ("batch", "source"),
    "decoder_input_ids": ("batch", "sequence"),
}


def hugging_face(
    name: str, part: str = "", *, model: str = "Model", **config: Any
) -> Callable[[Attention], Any]:
    """Return a function that builds ``name``Model from ``name``Config, or one part of it."""

    def build(attention: Attention) -> Any:
        import transformers

        values = getattr(transformers, f"{name}Config")(attn_implementation=attention, **config)
        network = getattr(transformers, f"{name}{model}")(values)
        return getattr(network, part) if part else network

    return build


def states(network: Any, **inputs: Any) -> dict[str, Any]:
    return {"last_hidden_state": network(**inputs, return_dict=True).last_hidden_state}


def cache_inputs(name: str, *shape: int | str, layers: int = 2) -> dict[str, Shape]:
    return {f"{name}.{i}.{part}": shape for i in range(layers) for part in ("key", "value")}


def cache_of(inputs: dict[str, Any], name: str) -> Any:
    """Remove the tensors of one cache from the inputs and return them as a cache."""
    import transformers

    tensors = [inputs.pop(key) for key in list(inputs) if key.startswith(f"{name}.")]
    return transformers.DynamicCache(list(zip(tensors[::2], tensors[1::2], strict=True)))


def cached_states(network: Any, **inputs: Any) -> dict[str, Any]:
    """Past keys and values are inputs, present ones outputs."""
    past = cache_of(inputs, "past_key_values")
    result = network(**inputs, past_key_values=past, use_cache=True, return_dict=True)
    return {"last_hidden_state": result.last_hidden_state} | presents(result.past_key_values)


def cached_cross_states(network: Any, **inputs: Any) -> dict[str, Any]:
    """As ``cached_states``; the keys and values of cross-attention are inputs only."""
    import transformers

    past = transformers.EncoderDecoderCache(
        cache_of(inputs, "past_key_values"), cache_of(inputs, "encoder_key_values")
    )
    result = network(**inputs, past_key_values=past, use_cache=True, return_dict=True)
    own = result.past_key_values.self_attention_cache
    return {"last_hidden_state": result.last_hidden_state} | presents(own)


def presents(cache: Any) -> dict[str, Any]:
    return {
        f"present.{i}.{part}": getattr(layer, f"{part}s")
        for i, layer in enumerate(cache.layers)
        for part in ("key", "value")
    }


def without_biases(attention: Attention) -> Any:
    """BERT without biases in the attention."""
    network = hugging_face("Bert", **SIZES)(attention)
    for layer in network.encoder.layer:
        own = layer.attention
        for dense in (own.self.query, own.self.key, own.self.value, own.output.dense):
            dense.bias = None
    return network


def fixed_head_size(attention: Attention) -> Any:
    """An encoder with a head size independent of its width (arXiv 2002.07028)."""
    import torch
    from torch import nn

    config = SimpleNamespace(
        hidden_size=20, num_attention_heads=3, head_dim=10, num_hidden_layers=2
    )
    heads, size, width = config.num_attention_heads, config.head_dim, config.hidden_size

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query, self.key, self.value = (nn.Linear(width, heads * size) for _ in range(3))
            self.output = nn.Linear(heads * size, width)
            self.norm = nn.LayerNorm(width)

        def forward(self, x: Any, mask: Any) -> Any:
            q, k, v = (
                dense(x).unflatten(-1, (heads, size)).transpose(1, 2)
                for dense in (self.query, self.key, self.value)
            )
            if attention == "sdpa":
                context = nn.functional.scaled_dot_product_attention(q, k, v, mask)
            else:
                context = ((q @ k.transpose(-1, -2)) * size**-0.5 + mask).softmax(-1) @ v
            return self.norm(x + self.output(context.transpose(1, 2).flatten(2)))

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.config = config
            self.embeddings = nn.Embedding(VOCABULARY, width)
            self.layers = nn.ModuleList(Layer() for _ in range(config.num_hidden_layers))

        def forward(self, input_ids: Any, attention_mask: Any) -> Any:
            x = self.embeddings(input_ids)
            mask = (1 - attention_mask[:, None, None].to(x.dtype)) * torch.finfo(x.dtype).min
            mask = mask.expand(-1, -1, x.shape[1], -1)  # as ONNX Runtime's Attention requires
            for layer in self.layers:
                x = layer(x, mask)
            return x

    return Encoder()


def torch_encoder(attention: Attention) -> Any:
    """PyTorch's encoder layers, with q, k and v packed in one weight."""
    from torch import nn

    config = SimpleNamespace(hidden_size=24, num_attention_heads=3, num_hidden_layers=2)

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.config = config
            self.embeddings = nn.Embedding(VOCABULARY, config.hidden_size)
            layer = nn.TransformerEncoderLayer(
                config.hidden_size, config.num_attention_heads, 40, batch_first=True
            )
            self.encoder = nn.TransformerEncoder(
                layer, config.num_hidden_layers, enable_nested_tensor=False
            )

        def forward(self, input_ids: Any, attention_mask: Any) -> Any:
            return self.encoder(
                self.embeddings(input_ids), src_key_padding_mask=attention_mask == 0
            )

    return Encoder()


def alibi_encoder(attention: Attention) -> Any:
    """jina-embeddings-v2: distances as biases of the scores, and GeGLU with one packed weight."""
    import torch
    from torch import nn

    config = SimpleNamespace(hidden_size=24, num_attention_heads=3, num_hidden_layers=2)
    heads, width, neurons = config.num_attention_heads, config.hidden_size, 40

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query, self.key, self.value, self.output = (
                nn.Linear(width, width) for _ in range(4)
            )
            self.gated_layers = nn.Linear(width, 2 * neurons, bias=False)
            self.wo = nn.Linear(neurons, width)
            self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))

        def forward(self, x: Any, bias: Any) -> Any:
            q, k, v = (
                dense(x).unflatten(-1, (heads, -1)).transpose(1, 2)
                for dense in (self.query, self.key, self.value)
            )
            if attention == "sdpa":
                context = nn.functional.scaled_dot_product_attention(q, k, v, bias)
            else:
                scores = q @ k.transpose(-1, -2) / (width // heads) ** 0.5
                context = (scores + bias).softmax(-1) @ v
            x = self.norms[0](x + self.output(context.transpose(1, 2).flatten(2)))
            both = self.gated_layers(x)
            gated = nn.functional.gelu(both[..., :neurons]) * both[..., neurons:]
            return self.norms[1](x + self.wo(gated))

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.config = config
            self.embeddings = nn.Embedding(VOCABULARY, width)
            self.layers = nn.ModuleList(Layer() for _ in range(config.num_hidden_layers))

        def forward(self, input_ids: Any, attention_mask: Any) -> Any:
            x = self.embeddings(input_ids)
            places = torch.arange(x.shape[1])
            distances = (places[:, None] - places).abs()
            slopes = 2.0 ** -torch.arange(1, 1 + heads)
            bias = -distances * slopes[:, None, None].to(x.dtype)
            mask = (1 - attention_mask[:, None, None].to(x.dtype)) * torch.finfo(x.dtype).min
            for layer in self.layers:
                x = layer(x, bias + mask)
            return x

    return Encoder()


def mean_pooled(network: Any, **inputs: Any) -> dict[str, Any]:
    """The normalized mean of the tokens that are not masked."""
    hidden = network(**inputs, return_dict=True).last_hidden_state
    kept = inputs["attention_mask"][..., None].to(hidden.dtype)
    return {"sentence_embedding": unit((hidden * kept).sum(1) / kept.sum(1))}


def first_pooled(network: Any, **inputs: Any) -> dict[str, Any]:
    """The normalized first token."""
    return {"sentence_embedding": unit(network(**inputs, return_dict=True).last_hidden_state[:, 0])}


def last_pooled(network: Any, **inputs: Any) -> dict[str, Any]:
    """The normalized last token that is not masked."""
    import torch

    hidden = network(**inputs, return_dict=True).last_hidden_state
    last = inputs["attention_mask"].sum(1) - 1
    return {"sentence_embedding": unit(hidden[torch.arange(hidden.shape[0]), last])}


def yes_or_no(network: Any, **inputs: Any) -> dict[str, Any]:
    """The probability of "yes", against "no", after the last token (a reranker)."""
    import torch

    logits = network(**inputs, return_dict=True).logits
    last = logits[torch.arange(logits.shape[0]), inputs["attention_mask"].sum(1) - 1]
    return {"scores": (last[:, 9] - last[:, 5]).sigmoid()}


def unit(vectors: Any) -> Any:
    return vectors / vectors.norm(dim=-1, keepdim=True)


def three_heads(attention: Attention) -> Any:
    """BGE-M3: XLM-R with a weight for each token (sparse) and a vector for each token (ColBERT)."""
    from torch import nn

    network = hugging_face("XLMRoberta", **SIZES)(attention)
    network.sparse_linear = nn.Linear(24, 1)
    network.colbert_linear = nn.Linear(24, 16)
    return network


def three_outputs(network: Any, **inputs: Any) -> dict[str, Any]:
    """Dense, sparse and ColBERT vectors."""
    hidden = network(**inputs, return_dict=True).last_hidden_state
    kept = inputs["attention_mask"][:, 1:, None].to(hidden.dtype)
    return {
        "dense_vecs": unit(hidden[:, 0]),
        "sparse_vecs": network.sparse_linear(hidden).relu(),
        "colbert_vecs": unit(network.colbert_linear(hidden[:, 1:])) * kept,
    }


def masks(network: Any, **inputs: Any) -> dict[str, Any]:
    """Masks of SAM and their scores."""
    found = network(**inputs, multimask_output=True)
    return dict(zip(("masks", "iou_scores"), found, strict=True))


def mask_decoder_network(attention: Attention) -> Any:
    """SAM's mask decoder, the part of SAM that runs for each prompt."""
    from transformers import SamMaskDecoderConfig
    from transformers.models.sam.modeling_sam import SamMaskDecoder

    config = SamMaskDecoderConfig(
        hidden_size=48, mlp_dim=60, num_attention_heads=3, iou_head_hidden_dim=20,
        attn_implementation=attention,
    )  # fmt: skip
    return SamMaskDecoder(config)


def pooling_network(attention: Attention) -> Any:
    """The head of SigLIP's vision encoder, which runs after its layers."""
    from transformers import SiglipVisionConfig
    from transformers.models.siglip.modeling_siglip import SiglipMultiheadAttentionPoolingHead

    network = SiglipMultiheadAttentionPoolingHead(SiglipVisionConfig(**IMAGE))
    network.config = SiglipVisionConfig(**IMAGE)
    return network


def detection_network(attention: Attention) -> Any:
    """DETR without its convolutions: positions are added to queries and keys, not to values."""
    import torch
    from torch import nn
    from transformers import DetrConfig, ResNetConfig
    from transformers.models.detr.modeling_detr import DetrDecoder, DetrEncoder

    config = DetrConfig(
        d_model=24, encoder_layers=1, encoder_attention_heads=3, encoder_ffn_dim=40,
        decoder_layers=1, decoder_attention_heads=6, decoder_ffn_dim=44, use_timm_backbone=False,
        backbone_config=ResNetConfig(), attn_implementation=attention,
    )  # fmt: skip

    class Detection(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.config = config
            self.queries = nn.Parameter(torch.randn(5, config.d_model))
            self.encoder, self.decoder = DetrEncoder(config), DetrDecoder(config)

        def forward(self, features: Any, positions: Any, pixel_mask: Any) -> Any:
            encoded = self.encoder(features, pixel_mask, positions).last_hidden_state
            queries = self.queries[None].expand(features.shape[0], -1, -1)
            found = self.decoder(
                torch.zeros_like(queries), None, encoded, pixel_mask, positions, queries
            )
            return found.last_hidden_state

    return Detection()


def tensor(network: Any, **inputs: Any) -> dict[str, Any]:
    return {"last_hidden_state": network(**inputs)}


@dataclass(frozen=True, eq=False)
class Architecture:
    """A tiny model and its attention layers.

    Attributes:
        build: Builds the network with an implementation of attention; weights are set afterwards.
        layers: Returns the attention layers of a configuration, in order of execution.
        inputs: The shape of each input. The name determines the content: ids, a mask, or floats.
        call: Runs the network on named tensors and returns its outputs by name.
        attentions: The available implementations of attention.
    """

    name: str
    build: Callable[[Attention], Any]
    layers: Callable[[Any], list[Layer]] = encoder
    inputs: Mapping[str, Shape] = field(default_factory=lambda: TEXT)
    call: Callable[..., dict[str, Any]] = states
    attentions: tuple[Attention, ...] = ("eager", "sdpa")


rotary_encoder = partial(encoder, position="rope")
CACHED: Mapping[str, Shape] = {
    "input_ids": ("batch", "sequence"),
    "attention_mask": ("batch", "past + sequence"),
    **cache_inputs("past_key_values", "batch", 3, "past", 8),
}
CACHED_CROSS: Mapping[str, Shape] = {
    "input_ids": ("batch", "sequence"),
    "encoder_hidden_states": ("batch", "source", 24),
    "encoder_attention_mask": ("batch", "source"),
    **cache_inputs("past_key_values", "batch", 6, "past", 4),
    **cache_inputs("encoder_key_values", "batch", 6, "source", 4),
}
BART_DECODER = {**TWO_STACKS, "decoder_layers": 2, "use_cache": True}
DISTILBERT = {
    "vocab_size": VOCABULARY, "dim": 24, "n_heads": 3, "n_layers": 2, "hidden_dim": 40,
    "max_position_embeddings": POSITIONS,
}  # fmt: skip
T5 = {
    "vocab_size": VOCABULARY, "d_model": 20, "d_kv": 6, "num_heads": 4, "d_ff": 40,
    "num_layers": 2, "num_decoder_layers": 1, "use_cache": False,
}  # fmt: skip
DEBERTA = {
    **SIZES, "relative_attention": True, "position_buckets": 8, "pos_att_type": ["p2c", "c2p"],
}  # fmt: skip

MODERN = {
    **SIZES, "local_attention": 4, "pad_token_id": 0, "eos_token_id": 2, "bos_token_id": 1,
    "cls_token_id": 1, "sep_token_id": 2, "layer_types": ["full_attention", "sliding_attention"],
}  # fmt: skip
GEMMA3 = {
    **GROUPED, "sliding_window": 4, "query_pre_attn_scalar": 12,
    "layer_types": ["sliding_attention", "full_attention"],
}  # fmt: skip
DEBERTA_V3 = {
    **DEBERTA, "share_att_key": True, "norm_rel_ebd": "layer_norm", "position_biased_input": False,
    "type_vocab_size": 0,
}  # fmt: skip
SPEECH = {
    **SIZES, "conv_dim": (8, 8), "conv_stride": (3, 2), "conv_kernel": (5, 3),
    "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2,
}  # fmt: skip
SWIN = {
    "embed_dim": 12, "depths": [1, 1], "num_heads": [3, 6], "window_size": 2, "image_size": 16,
    "patch_size": 4,
}  # fmt: skip
SQUARE: Mapping[str, Shape] = {"pixel_values": ("batch", 3, 16, 16)}
RAW_AUDIO: Mapping[str, Shape] = {"input_values": ("batch", "samples")}
FEATURES: Mapping[str, Shape] = {
    "features": ("batch", "source", 24),
    "positions": ("batch", "source", 24),
    "pixel_mask": ("batch", "source"),
}
PROMPTED: Mapping[str, Shape] = {
    "image_embeddings": ("batch", 48, 4, 3),
    "image_positional_embeddings": ("batch", 48, 4, 3),
    "sparse_prompt_embeddings": ("batch", 1, "sequence", 48),
    "dense_prompt_embeddings": ("batch", 48, 4, 3),
}

TABLE = (
    Architecture("BERT", hugging_face("Bert", **SIZES)),
    Architecture("BERT, single head", hugging_face("Bert", **{**SIZES, "num_attention_heads": 1})),
    Architecture("BERT, no biases", without_biases),
    Architecture("RoBERTa", hugging_face("Roberta", **SIZES)),
    Architecture("DistilBERT", hugging_face("DistilBert", **DISTILBERT)),
    Architecture(
        "ALBERT", hugging_face("Albert", **{**SIZES, "embedding_size": 20, "num_hidden_layers": 3})
    ),
    Architecture("ELECTRA", hugging_face("Electra", **SIZES, embedding_size=20)),
    Architecture(
        "MPNet", hugging_face("MPNet", **SIZES), partial(encoder, position="bias"),
        attentions=("eager",),
    ),
    Architecture(
        "DeBERTa-v2", hugging_face("DebertaV2", **DEBERTA), disentangled, attentions=("eager",)
    ),
    Architecture("ViT", hugging_face("ViT", **IMAGE), inputs=PIXELS),
    Architecture("DeiT", hugging_face("DeiT", **IMAGE), inputs=PIXELS),
    Architecture("CLIP text", hugging_face("CLIPText", **SIZES)),
    Architecture("CLIP vision", hugging_face("CLIPVision", **IMAGE), inputs=PIXELS),
    Architecture("GPT-2", hugging_face("GPT2", **GPT2, use_cache=False)),
    Architecture("GPT-2, cached", hugging_face("GPT2", **GPT2), encoder, CACHED, cached_states),
    Architecture("OPT", hugging_face("OPT", **SIZES, ffn_dim=40, word_embed_proj_dim=24)),
    Architecture("BART", hugging_face("Bart", **TWO_STACKS), encoder_decoder, TWO_TEXTS),
    Architecture(
        "BART decoder, cached", hugging_face("Bart", "decoder", **BART_DECODER), cross_decoder,
        CACHED_CROSS, cached_cross_states,
    ),
    Architecture("Marian", hugging_face("Marian", **TWO_STACKS), encoder_decoder, TWO_TEXTS),
    Architecture("T5", hugging_face("T5", **T5), t5_layers, TWO_TEXTS),
    Architecture(
        "Whisper encoder", hugging_face("Whisper", "encoder", **WHISPER), speech_encoder,
        {"input_features": ("batch", 10, 30)},
    ),
    Architecture(
        "Whisper decoder", hugging_face("Whisper", "decoder", **WHISPER), cross_decoder,
        {**TEXT, "encoder_hidden_states": ("batch", 15, 24)},
    ),
    Architecture("Llama", hugging_face("Llama", **GROUPED), rotary_encoder),
    Architecture(
        "Llama, cached", hugging_face("Llama", **{**GROUPED, "use_cache": True}), rotary_encoder,
        CACHED, cached_states,
    ),
    Architecture("Qwen3", hugging_face("Qwen3", **GROUPED), rotary_encoder),
    Architecture(
        "Qwen3, cached", hugging_face("Qwen3", **{**GROUPED, "use_cache": True}), rotary_encoder,
        CACHED, cached_states,
    ),
    Architecture(
        "Gemma", hugging_face("Gemma", **{**GROUPED, "num_key_value_heads": 1}), rotary_encoder
    ),
    Architecture("fixed head size", fixed_head_size, call=tensor),
    Architecture("ModernBERT", hugging_face("ModernBert", **MODERN), rotary_encoder),
    Architecture("NomicBERT", hugging_face("NomicBert", **SIZES), rotary_encoder),
    Architecture("XLM-R", hugging_face("XLMRoberta", **SIZES)),
    Architecture("BGE-M3", three_heads, call=three_outputs),
    Architecture("Snowflake Arctic", hugging_face("Bert", **SIZES), call=first_pooled),
    Architecture(
        "jina-v2 (ALiBi)", alibi_encoder, partial(encoder, position="bias"), call=tensor
    ),
    Architecture(
        "jina-v3", hugging_face("JinaEmbeddingsV3", **SIZES), rotary_encoder, call=mean_pooled
    ),
    Architecture(
        "DeBERTa-v3", hugging_face("DebertaV2", **DEBERTA_V3), disentangled, attentions=("eager",)
    ),
    Architecture(
        "EmbeddingGemma", hugging_face("Gemma3Text", **GEMMA3, use_bidirectional_attention=True),
        gemma3_layers, call=mean_pooled,
    ),
    Architecture(
        "Qwen3-Embedding", hugging_face("Qwen3", **GROUPED), rotary_encoder, call=last_pooled
    ),
    Architecture(
        "Qwen3-Reranker", hugging_face("Qwen3", model="ForCausalLM", **GROUPED), rotary_encoder,
        call=yes_or_no,
    ),
    Architecture("Gemma 3", hugging_face("Gemma3Text", **GEMMA3), gemma3_layers),
    Architecture("GPT-NeoX", hugging_face("GPTNeoX", **SIZES), rotary_encoder),
    Architecture("SigLIP text", hugging_face("SiglipText", **SIZES)),
    Architecture(
        "SigLIP pooling head", pooling_network, pooling,
        {"hidden_state": ("batch", "source", 24)}, tensor, ("sdpa",),
    ),
    Architecture("DINOv2", hugging_face("Dinov2", **IMAGE), inputs=PIXELS),
    Architecture(
        "DINOv3", hugging_face("DINOv3ViT", **IMAGE, num_register_tokens=2), rotary_encoder, PIXELS
    ),
    Architecture("Swin-v2", hugging_face("Swinv2", **SWIN), windows, SQUARE, attentions=("eager",)),
    Architecture("DETR", detection_network, encoder_decoder, FEATURES, tensor),
    Architecture("SAM mask decoder", mask_decoder_network, mask_decoder, PROMPTED, masks),
    Architecture("Wav2Vec2", hugging_face("Wav2Vec2", **SPEECH), encoder, RAW_AUDIO),
    Architecture("torch.nn", torch_encoder, call=tensor, attentions=("sdpa",)),
    Architecture(
        "torch.nn, fixed length", torch_encoder, encoder,
        {"input_ids": ("batch", 7), "attention_mask": ("batch", 7)}, tensor, ("sdpa",),
    ),
)  # fmt: skip
ARCHITECTURES = {architecture.name: architecture for architecture in TABLE}

EXPORTERS: tuple[tuple[Exporter, int], ...] = (("torchscript", 17), ("dynamo", 18), ("dynamo", 23))
OLD_OPSETS = (11, 12, 13, 14, 15, 16, 18)

UNREAD = frozenset({"DINOv3"})
"""Architectures whose attention is not matched, for the reasons that docs/support.md gives."""

COMMITTED = (
    Cell("BERT", "eager", "torchscript", 17),
    Cell("BERT, single head", "sdpa", "dynamo", 23),
    Cell("BERT, no biases", "eager", "dynamo", 18),
    Cell("RoBERTa", "sdpa", "torchscript", 17),
    Cell("DistilBERT", "sdpa", "dynamo", 18),
    Cell("ALBERT", "sdpa", "torchscript", 17),
    Cell("ELECTRA", "eager", "dynamo", 23),
    Cell("MPNet", "eager", "dynamo", 18),
    Cell("DeBERTa-v2", "eager", "torchscript", 17),
    Cell("ViT", "sdpa", "dynamo", 23),
    Cell("DeiT", "eager", "dynamo", 18),
    Cell("CLIP text", "sdpa", "dynamo", 18),
    Cell("CLIP vision", "eager", "torchscript", 17),
    Cell("GPT-2", "eager", "torchscript", 11),
    Cell("GPT-2, cached", "eager", "torchscript", 17),
    Cell("OPT", "sdpa", "dynamo", 23),
    Cell("BART", "eager", "dynamo", 18),
    Cell("BART decoder, cached", "sdpa", "dynamo", 18),
    Cell("Marian", "sdpa", "dynamo", 18),
    Cell("T5", "eager", "dynamo", 18),
    Cell("Whisper encoder", "sdpa", "dynamo", 23),
    Cell("Whisper decoder", "eager", "torchscript", 17),
    Cell("Llama", "eager", "dynamo", 18),
    Cell("Llama, cached", "sdpa", "torchscript", 17),
    Cell("Qwen3", "eager", "dynamo", 18),
    Cell("Qwen3, cached", "sdpa", "dynamo", 23),
    Cell("Gemma", "eager", "dynamo", 23),
    Cell("fixed head size", "sdpa", "dynamo", 18),
    Cell("torch.nn", "sdpa", "dynamo", 18),
    Cell("torch.nn, fixed length", "sdpa", "torchscript", 17),
    Cell("ModernBERT", "sdpa", "dynamo", 18),
    Cell("NomicBERT", "sdpa", "torchscript", 17),
    Cell("XLM-R", "eager", "torchscript", 17),
    Cell("BGE-M3", "sdpa", "dynamo", 18),
    Cell("Snowflake Arctic", "sdpa", "torchscript", 17),
    Cell("jina-v2 (ALiBi)", "sdpa", "torchscript", 17),
    Cell("jina-v3", "eager", "torchscript", 17),
    Cell("DeBERTa-v3", "eager", "torchscript", 17),
    Cell("EmbeddingGemma", "eager", "dynamo", 18),
    Cell("Qwen3-Embedding", "eager", "torchscript", 17),
    Cell("Qwen3-Reranker", "sdpa", "torchscript", 17),
    Cell("Gemma 3", "eager", "torchscript", 17),
    Cell("GPT-NeoX", "sdpa", "torchscript", 17),
    Cell("SigLIP text", "eager", "torchscript", 17),
    Cell("SigLIP pooling head", "sdpa", "dynamo", 18),
    Cell("DINOv2", "eager", "torchscript", 17),
    Cell("DETR", "eager", "torchscript", 17),
    Cell("SAM mask decoder", "sdpa", "torchscript", 17),
    Cell("Swin-v2", "eager", "torchscript", 17),
    Cell("Wav2Vec2", "eager", "torchscript", 17),
    Cell("BERT", "eager", "torchscript", 17, "fp16"),
)
"""One export per architecture, and one in half precision: ``python -m tests.fixtures.make`` writes
them to ``tests/fixtures/onnx``, where tests read them without torch."""

MINILM_EXPORTS = (
    ("sdpa", "torchscript", 17),
    ("eager", "torchscript", 17),
    ("sdpa", "dynamo", 18),
    ("sdpa", "dynamo", 23),
)
"""Attention, exporter and opset of the exports of the real encoder."""

EXTERNAL = (COMMITTED[2], COMMITTED[9])
"""Committed exports that keep their external data; the weights of the others are in the graph."""


def cells_of(architecture: Architecture) -> list[Cell]:
    """The exports of an architecture: those of ``EXPORTERS``, and more for a few architectures."""
    name, cells = architecture.name, list[Cell]()
    for attention in architecture.attentions:
        cells += [Cell(name, attention, *exporter) for exporter in EXPORTERS]
        if name in ("BERT", "GPT-2", "T5"):
            cells += [Cell(name, attention, "torchscript", opset) for opset in OLD_OPSETS]
        if name in ("BERT", "Llama"):
            halves: tuple[Variant, ...] = ("fp16", "bf16")
            cells += [Cell(name, attention, *to, half) for to in EXPORTERS[:2] for half in halves]
    if name == "BERT":
        cells += [Cell(name, "eager", "torchscript", opset, "dropout") for opset in (11, 17)]
    return cells


CELLS = [cell for architecture in TABLE for cell in cells_of(architecture)]
"""All cells: docs/support.md shows them, and ``make support`` exports them."""


def pairs_of(cell: Cell) -> set[tuple[Hashable, ...]]:
    """The pairs of properties of a cell that a covering subset has to have.

    Opsets are paired with families of architectures (those whose layers one function describes).
    """
    exporter = (cell.exporter, cell.opset)
    family = repr(ARCHITECTURES[cell.architecture].layers)
    by_architecture = itertools.product(
        [cell.architecture], (cell.exporter, cell.attention, cell.variant)
    )
    others = itertools.combinations((family, exporter, cell.attention, cell.variant), 2)
    return {*by_architecture, *others, (cell.exporter, cell.variant)}


def covering(cells: Sequence[Cell], chosen: Iterable[Cell]) -> tuple[Cell, ...]:
    """The chosen cells, and others until every pair of ``cells`` occurs; in the order of cells."""
    found = list(chosen)
    missing = set().union(*map(pairs_of, cells)).difference(*map(pairs_of, found))
    while missing:
        found.append(max(cells, key=lambda cell: len(pairs_of(cell) & missing)))
        missing -= pairs_of(found[-1])
    return tuple(cell for cell in cells if cell in found)


# ---- building and exporting ---------------------------------------------------------------------


@lru_cache(maxsize=4)
def network(name: str, attention: Attention, variant: Variant = "") -> Any:
    """The network in evaluation mode with random weights; the last few are cached."""
    import torch

    torch.manual_seed(0)
    with quiet():
        built = ARCHITECTURES[name].build(attention).eval()
    with torch.no_grad():
        for key, weight in built.named_parameters():
            centre = 1.0 if weight.ndim == 1 and key.endswith("weight") else 0.0
            weight.copy_(centre + 0.3 * torch.randn(weight.shape))
    return built.to({"fp16": torch.float16, "bf16": torch.bfloat16}.get(variant, torch.float32))


def feeds(
    architecture: Architecture, lengths: Mapping[str, int] = LENGTHS
) -> dict[str, np.ndarray]:
    """Inputs at the given lengths; masks end in padding except in the first row."""
    rng = np.random.default_rng(0)
    made = {}
    for name, dims in architecture.inputs.items():
        shape = [
            dim if isinstance(dim, int) else sum(lengths[part] for part in dim.split(" + "))
            for dim in dims
        ]
        if name.endswith("ids"):
            made[name] = rng.integers(3, VOCABULARY, shape)  # the first ids are padding and ends
        elif name.endswith("mask"):
            kept = np.linspace(shape[1], shape[1] // 2, shape[0]).astype(int)
            made[name] = (np.arange(shape[1]) < kept[:, None]).astype(np.int64)
        else:
            made[name] = rng.standard_normal(shape).astype(np.float32)
    return made


def export(cell: Cell, path: Path) -> str:
    """Export a cell with PyTorch's defaults; return the reason if that fails, or an empty string.

    The dynamo exporter stores weights in a file beside the graph. An export fails as well if ONNX's
    checker rejects the graph, or if the graph runs only at the lengths of the traced example.
    """
    import torch

    torch.set_num_threads(1)  # test machines have few cores, and share them
    torch.backends.mha.set_fastpath_enabled(False)  # its operator cannot be exported
    architecture = ARCHITECTURES[cell.architecture]
    model = network(cell.architecture, cell.attention, cell.variant)
    dtype = next(model.parameters()).dtype

    class Wrapper(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = model

        def forward(self, *values: Any) -> Any:
            return tuple(self.outputs(*values).values())

        def outputs(self, *values: Any) -> dict[str, Any]:
            inputs = dict(zip(architecture.inputs, values, strict=True))
            return architecture.call(self.network, **inputs)

    wrapper = Wrapper().eval()
    values = tuple(
        value.to(dtype) if value.is_floating_point() else value
        for value in map(torch.from_numpy, feeds(architecture).values())
    )
    with quiet(), torch.no_grad():
        options: dict[str, Any] = {
            "opset_version": cell.opset,
            "input_names": list(architecture.inputs),
            "output_names": list(wrapper.outputs(*values)),
        }
        if cell.exporter == "dynamo":
            shapes = _dynamic_shapes(architecture)
            options |= {"dynamic_shapes": (shapes,), "verbose": False}
        else:
            mode = torch.onnx.TrainingMode
            training = mode.TRAINING if cell.variant == "dropout" else mode.EVAL
            options |= {"dynamic_axes": _named_axes(architecture), "training": training}
        try:
            dynamo = cell.exporter == "dynamo"
            torch.onnx.export(wrapper, values, str(path), dynamo=dynamo, **options)
            onnx.checker.check_model(path, full_check=True)
        except Exception as error:
            return _short(error)
    as_traced, otherwise = (_runs(path, architecture, at) for at in (LENGTHS, OTHER_LENGTHS))
    return "the graph runs only at the lengths that were traced" if as_traced > otherwise else ""


def run(
    source: Path | ir.Model, architecture: Architecture, lengths: Mapping[str, int]
) -> list[np.ndarray]:
    """Run a graph in ONNX Runtime and return all outputs."""
    session = open_session(source, ONE_THREAD)
    made = feeds(architecture, lengths)
    values = {
        value.name: made[value.name].astype(TYPES[value.type]) for value in session.get_inputs()
    }
    return [np.asarray(output) for output in session.run(None, values)]


def _runs(path: Path, architecture: Architecture, lengths: Mapping[str, int]) -> bool:
    try:
        run(path, architecture, lengths)
    except Exception:  # onnxruntime raises a class of its own for each status
        return False
    return True


def _named_axes(architecture: Architecture) -> dict[str, dict[int, str]]:
    return {
        name: {axis: dim for axis, dim in enumerate(dims) if isinstance(dim, str)}
        for name, dims in architecture.inputs.items()
    }


def _dynamic_shapes(architecture: Architecture) -> tuple[dict[int, Any], ...]:
    """Named dimensions; sums of lengths cannot be named and are left to the exporter."""
    import torch

    @cache
    def dim(name: str) -> Any:
        if "+" in name:
            return torch.export.Dim.DYNAMIC
        return torch.export.Dim(name, min=1 if name == "batch" else 2, max=40)

    return tuple(
        {axis: dim(name) for axis, name in axes.items()}
        for axes in _named_axes(architecture).values()
    )


def _short(error: BaseException) -> str:
    """The sentence with the reason in PyTorch's report."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    first = lines[0] if lines else type(error).__name__
    first = re.sub(r"^\[ShapeInferenceError\] \(op_type:(\w+), node name: .*?\): ", r"\1: ", first)
    return re.split(r"(?<=[^.])\. ", first)[0].rstrip(".")[:160]


@contextlib.contextmanager
def quiet() -> Generator[None]:
    """Suppress output, warnings and logs of exporters; failures are exceptions."""
    silent, disabled = io.StringIO(), logging.root.manager.disable
    with (
        warnings.catch_warnings(),
        contextlib.redirect_stdout(silent),
        contextlib.redirect_stderr(silent),
    ):
        warnings.simplefilter("ignore")
        logging.disable(logging.CRITICAL)
        try:
            yield
        finally:
            logging.disable(disabled)
