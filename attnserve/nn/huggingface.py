"""Replace the attention layers of Hugging Face models."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from attnserve.nn.attention import AttentionLayer, Rotation, rotary_error
from attnserve.nn.collaborative import CollaborativeAttention
from attnserve.nn.reuse import ReuseAttention
from attnserve.nn.trained import TrainedAttention
from graph_passes.errors import InvalidArgument

__all__ = ["HuggingFaceAttention", "swap"]


@dataclass(frozen=True)
class _Names:
    """Attributes of an attention class of transformers.

    Attributes:
        projections: Queries, keys, values and output. If the output is missing, the output
            projection is ``output.dense`` of the parent.
        heads: The number of heads.
        dropout: The dropout of the probabilities.
        normalizes: Whether the class adds the residual and normalizes the sum (ALBERT).
        rotary: Whether the class has rotary positions, and its configuration the number of heads.
    """

    projections: tuple[str, ...]
    heads: str
    dropout: str
    normalizes: bool = False
    rotary: bool = False


_BERT = _Names(("query", "key", "value"), "num_attention_heads", "dropout")
_BART = _Names(("q_proj", "k_proj", "v_proj", "out_proj"), "num_heads", "dropout")
_LLAMA = _Names(
    ("q_proj", "k_proj", "v_proj", "o_proj"),
    "num_attention_heads",
    "attention_dropout",
    rotary=True,
)
_CLASSES = {
    "BertSelfAttention": _BERT,
    "BertCrossAttention": _BERT,
    "RobertaSelfAttention": _BERT,
    "RobertaCrossAttention": _BERT,
    "DistilBertSelfAttention": _Names(("q_lin", "k_lin", "v_lin", "out_lin"), "n_heads", "dropout"),
    "ViTAttention": _Names(
        ("q_proj", "k_proj", "v_proj", "o_proj"), "num_attention_heads", "attention_dropout"
    ),
    "AlbertAttention": _Names(
        ("query", "key", "value", "dense"),
        "num_attention_heads",
        "attention_dropout",
        normalizes=True,
    ),
    "BartAttention": _BART,
    "MarianAttention": _BART,
    "LlamaAttention": _LLAMA,
    "MistralAttention": _LLAMA,
    "Qwen2Attention": _LLAMA,
}
"""Attention classes of transformers, by name."""

SUPPORTED_MODELS = "BERT, RoBERTa, DistilBERT, ALBERT, ViT, BART, Marian, Llama, Mistral and Qwen2"


class HuggingFaceAttention(nn.Module):
    """An attention layer behind the interface of the attention modules of transformers 5.

    Attributes:
        layer: The attention, batch first.
        config: Configuration of the model, which names the implementation of attention.
        is_causal: Whether to mask later keys if no mask is passed, as transformers does.
        is_cross: Whether keys and values are the hidden states of the encoder.
        dropout: Applied to the output before the residual is added (ALBERT); else None.
        norm: Applied to the sum of output and residual (ALBERT); else None.
    """

    def __init__(
        self,
        layer: AttentionLayer,
        *,
        config: object = None,
        is_causal: bool = False,
        is_cross: bool = False,
        dropout: nn.Module | None = None,
        norm: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.layer = layer
        self.config = config
        self.is_causal = is_causal
        self.is_cross = is_cross
        self.dropout = dropout
        self.norm = norm

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        *,
        encoder_hidden_states: Tensor | None = None,
        key_value_states: Tensor | None = None,
        past_key_values: object = None,
        position_embeddings: Rotation | None = None,
        is_causal: bool | None = None,
        **_: object,
    ) -> tuple[Tensor, None]:
        """The output (B, S, D), and None in place of the probabilities, as with sdpa attention.

        Args:
            hidden_states: Tokens of the queries, (B, S, D).
            attention_mask: Broadcasts to (B, H, S, T): True where attention is allowed, or added to
                the logits.
            encoder_hidden_states: Tokens of keys and values in cross-attention, (B, T, E).
            key_value_states: ``encoder_hidden_states`` in other models.
            past_key_values: A cache, which is refused.
            position_embeddings: Cosines and sines of rotary positions.
            is_causal: Replaces the attribute in this call, as with sdpa attention of transformers;
                eager attention ignores it.

        Raises:
            InvalidArgument: A cache is passed.
        """
        if past_key_values is not None:
            raise InvalidArgument(
                "the model caches keys and values, which the layers of attnserve.nn do not",
                "call it with use_cache=False",
                code="nn.cache",
            )
        cross_states = encoder_hidden_states if key_value_states is None else key_value_states
        tokens = cross_states if self.is_cross and cross_states is not None else hidden_states
        mask = attention_mask
        use_causal_mask = self.is_causal
        if is_causal is not None:
            is_sdpa = getattr(self.config, "_attn_implementation", "") == "sdpa"
            use_causal_mask = is_causal if is_sdpa else use_causal_mask and is_causal
        if mask is None and use_causal_mask and not self.is_cross:
            S = hidden_states.shape[1]
            mask = torch.ones(S, S, dtype=torch.bool, device=hidden_states.device).triu(1)
        elif mask is not None and mask.dtype == torch.bool:
            mask = ~mask
        out = self.layer.attend(hidden_states, tokens, tokens, mask, position_embeddings)[0]
        if self.norm is not None and self.dropout is not None:
            out = self.norm(hidden_states + self.dropout(out))
        return out, None


def swap(
    model: nn.Module,
    convert: Callable[[Sequence[TrainedAttention]], Sequence[AttentionLayer]],
) -> list[str]:
    """Replace the attention layers of a Hugging Face model, in place.

    Swapped layers do not cache keys: call decoders with ``use_cache=False``. The model cannot
    return ``output_attentions`` of swapped layers. Its state dict has other names: to load it,
    first swap a model of the same configuration in the same way. Grouped keys and values are copied
    for each query head. New layers have biases if any projection of the old layer has one. Values
    and the output projection are frozen if the old ones are, and all other weights if the old
    queries and keys are. A query that may attend to no token attends to all tokens, as with eager
    attention of transformers; with sdpa, transformers computes other values.

    Args:
        model: BERT, RoBERTa, DistilBERT, ALBERT, ViT, BART, Marian, Llama, Mistral or Qwen2, with
            eager or sdpa attention.
        convert: Makes new layers from the weights of old layers, in order. It is called once for
            each stack of equal modules: encoder, decoder, and the cross-attention of the decoder.

    Returns:
        The names of the replaced modules.

    Raises:
        InvalidArgument: The model, its attention implementation, or a layer of ``convert`` is not
            supported. The model is then unchanged.
    """
    if any(isinstance(module, HuggingFaceAttention) for module in model.modules()):
        raise InvalidArgument(
            "the attention layers of `model` are swapped already",
            "swap a fresh model, or replace `layer` of its HuggingFaceAttention modules",
            code="nn.swapped",
        )
    stacks: dict[str, list[str]] = {}
    for name, module in model.named_modules():
        if name and type(module).__name__ in _CLASSES:
            stacks.setdefault(re.sub(r"\d+", "#", name), []).append(name)
    if not stacks:
        raise InvalidArgument(
            f"`model` is {type(model).__name__}: expected {SUPPORTED_MODELS}",
            "pass one of these models as a whole, or build one with the layers of attnserve.nn",
            code="nn.unsupported_model",
        )
    config: Any = getattr(model, "config", None)
    implementation = getattr(config, "_attn_implementation", "eager")
    if implementation not in ("eager", "sdpa"):
        raise InvalidArgument(
            f"`model` uses {implementation} attention: expected eager or sdpa",
            "load it with attn_implementation='sdpa'",
            code="nn.attention_implementation",
        )
    new_layers: dict[str, AttentionLayer] = {}
    for names in stacks.values():
        layers = list(convert([_read(model, name) for name in names]))
        if len(layers) != len(names):
            raise InvalidArgument(
                f"`convert` returned {len(layers)} layers: expected {len(names)}",
                "return one layer for each layer of the model",
                code="nn.layer_count",
            )
        for name, layer in zip(names, layers, strict=True):
            _check(model, name, layer)
            new_layers[name] = layer
        _check_windows(model, {name: new_layers[name] for name in names})
    for name, layer in new_layers.items():
        _install(model, name, layer.train(model.training))
    return list(new_layers)


def _named(model: nn.Module, name: str) -> tuple[Any, _Names]:
    """An attention module of transformers, and the names of its attributes."""
    module = model.get_submodule(name)
    return module, _CLASSES[type(module).__name__]


def _read(model: nn.Module, name: str) -> TrainedAttention:
    """Read the weights of an attention module.

    Raises:
        InvalidArgument: A projection is not a ``torch.nn.Linear``.
    """
    module, names = _named(model, name)
    linears = _linears(model, name)
    if not all(
        type(linear) is nn.Linear and linear.weight.is_floating_point() for linear in linears
    ):
        raise InvalidArgument(
            f"`{name}`: expected projections that are torch.nn.Linear, as in transformers 5",
            "merge adapters and dequantize first, or update transformers",
            code="nn.projections",
        )
    dropout = getattr(module, names.dropout)
    sizes = module.config if names.rotary else module
    return TrainedAttention.of_linears(
        *linears,
        num_heads=getattr(sizes, names.heads),
        scale=module.scaling,
        num_kv_heads=sizes.num_key_value_heads if names.rotary else None,
        dropout=dropout.p if isinstance(dropout, nn.Dropout) else dropout,
        rotary=names.rotary,
    )


def _check(model: nn.Module, name: str, layer: object) -> None:
    """Check that a layer of ``convert`` can replace a module.

    Raises:
        InvalidArgument: The layer cannot replace the module.
    """
    old, names = _named(model, name)
    widths = tuple(getattr(old, part).in_features for part in names.projections[:3])
    if not isinstance(layer, AttentionLayer) or (layer.embed_dim, layer.kdim, layer.vdim) != widths:
        raise InvalidArgument(
            f"`convert` returned {type(layer).__name__} for {name}: expected a layer of "
            f"attnserve.nn whose queries, keys and values have the widths {widths}",
            "create it from the weights that `convert` gets",
            code="nn.layer",
        )
    if names.rotary and isinstance(layer, CollaborativeAttention):
        raise rotary_error("CollaborativeAttention")


def _check_windows(model: nn.Module, layers: Mapping[str, AttentionLayer]) -> None:
    """Check that layers reuse only probabilities of layers with the same mask.

    Raises:
        InvalidArgument: A layer reuses probabilities of a layer with another mask.
    """
    names = {id(layer.passed_on): name for name, layer in layers.items()}
    for name, layer in layers.items():
        if not isinstance(layer, ReuseAttention) or id(layer.source) not in names:
            continue
        source = names[id(layer.source)]
        modules: list[Any] = [model.get_submodule(path) for path in (name, source)]
        window, source_window = (getattr(module, "sliding_window", None) for module in modules)
        groups = [re.findall(r"albert_layer_groups\.\d+", path) for path in (name, source)]
        if groups[0] != groups[1]:
            raise InvalidArgument(
                f"{name} reuses probabilities of {source}, which is called several times before it",
                "reuse within a group of layers",
                code="nn.reuse_group",
            )
        if window != source_window:
            raise InvalidArgument(
                f"{name} reuses probabilities of {source}, which has another mask: the sliding"
                f" windows are {window} and {source_window} tokens",
                "choose layers with the same window, for example by another configuration",
                code="nn.reuse_window",
            )


def _install(model: nn.Module, name: str, layer: AttentionLayer) -> None:
    old, names = _named(model, name)
    is_cross = "Cross" in type(old).__name__ or name.endswith("encoder_attn")
    extra = {"dropout": old.output_dropout, "norm": old.LayerNorm} if names.normalizes else {}
    _freeze(layer, *_linears(model, name))
    layer.to(getattr(old, names.projections[0]).weight)
    new = HuggingFaceAttention(
        layer,
        config=getattr(model, "config", None),
        is_causal=old.is_causal,
        is_cross=is_cross,
        **extra,
    )
    model.set_submodule(name, new)
    if len(names.projections) == 3:  # the layer has the output projection
        _output_of(model, name).dense = nn.Identity()


def _freeze(
    layer: AttentionLayer, query: nn.Linear, key: nn.Linear, value: nn.Linear, output: nn.Linear
) -> None:
    """Freeze the weights of a layer that replaces frozen projections."""

    def is_trained(*linears: nn.Linear) -> bool:
        return any(weight.requires_grad for linear in linears for weight in linear.parameters())

    by_part = {
        "v_proj": is_trained(value),
        "out_proj": is_trained(output),
        "classifier": is_trained(query, key, value, output),
    }
    of_scores = is_trained(query, key)
    for name, weight in layer.named_parameters():
        if not by_part.get(name.partition(".")[0], of_scores):
            weight.requires_grad_(False)


def _linears(model: nn.Module, name: str) -> list[Any]:
    """The projections of queries, keys, values and outputs; None for one that is missing."""
    module, names = _named(model, name)
    found: list[Any] = [getattr(module, part, None) for part in names.projections]
    return found if len(found) == 4 else [*found, _output_of(model, name).dense]


def _output_of(model: nn.Module, name: str) -> Any:
    """The module of transformers that has the output projection of an attention module."""
    return model.get_submodule(f"{name.rpartition('.')[0]}.output")
