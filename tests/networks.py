"""Tiny networks with random weights, and functions that call them: the parts of architectures.

torch and transformers are imported on first use: test collection needs neither.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Literal

Attention = Literal["eager", "sdpa"]
Shape = tuple[int | str, ...]

VOCABULARY = 61
POSITIONS = 48

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


def three_heads(attention: Attention) -> Any:
    """BGE-M3: XLM-R with a weight for each token (sparse) and a vector for each token (ColBERT)."""
    from torch import nn

    network = hugging_face("XLMRoberta", **SIZES)(attention)
    network.sparse_linear = nn.Linear(24, 1)
    network.colbert_linear = nn.Linear(24, 16)
    return network


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


# ---- calls ---------------------------------------------------------------------------------------


def states(network: Any, **inputs: Any) -> dict[str, Any]:
    return {"last_hidden_state": network(**inputs, return_dict=True).last_hidden_state}


def tensor(network: Any, **inputs: Any) -> dict[str, Any]:
    return {"last_hidden_state": network(**inputs)}


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
