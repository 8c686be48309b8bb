"""An encoder-decoder transformer with the attention layers of a variant."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from attnserve.nn import (
    AttentionLayer,
    CollaborativeAttention,
    FixedHeadAttention,
    GroupedHeadAttention,
    reuse_transformer,
)
from benchmarks.training.data import BOS, EOS, PAD
from benchmarks.training.variants import MAPS, Settings, Variant

GROUPS = 2
"""Groups of heads, as in the paper's model with 75% fewer attention parameters."""


class Layer(nn.Module):
    """A layer with normalization before each part: attention, cross attention, feed-forward."""

    def __init__(
        self, settings: Settings, attention: AttentionLayer, cross: AttentionLayer | None = None
    ) -> None:
        super().__init__()
        D, hidden = settings.width, settings.hidden
        self.attention, self.cross, self.causal = attention, cross, cross is not None
        self.norms = nn.ModuleList(nn.LayerNorm(D) for _ in range(2 + self.causal))
        self.ffn = nn.Sequential(nn.Linear(D, hidden), nn.ReLU(), nn.Linear(hidden, D))
        self.dropout = nn.Dropout(settings.dropout)

    def forward(
        self, x: Tensor, padding: Tensor, memory: tuple[Tensor, Tensor] | None = None
    ) -> Tensor:
        """Tokens x (B, T, D), padding (B, T); memory: the encoder's output and its padding."""
        y = self.norms[0](x)
        out, _ = self.attention(
            y, y, y, key_padding_mask=padding, need_weights=False, is_causal=self.causal
        )
        x = x + self.dropout(out)
        if self.cross is not None and memory is not None:
            tokens, masked = memory
            y = self.norms[1](x)
            out, _ = self.cross(y, tokens, tokens, key_padding_mask=masked, need_weights=False)
            x = x + self.dropout(out)
        return x + self.dropout(self.ffn(self.norms[-1](x)))


class Translator(nn.Module):
    """The transformer, with one embedding for source, target and output."""

    def __init__(self, variant: Variant, settings: Settings, vocabulary: int) -> None:
        super().__init__()
        encoder, decoder, cross = (attention_stack(variant, settings) for _ in range(3))
        self.encoder = nn.ModuleList(Layer(settings, each) for each in encoder)
        self.decoder = nn.ModuleList(
            Layer(settings, *pair) for pair in zip(decoder, cross, strict=True)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(settings.width) for _ in range(2))
        self.embedding = nn.Embedding(vocabulary, settings.width, padding_idx=PAD)
        nn.init.normal_(self.embedding.weight, std=settings.width**-0.5)
        self.dropout = nn.Dropout(settings.dropout)
        self.register_buffer("positions", _positions(4 * settings.longest, settings.width), False)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Logits (B, T, vocabulary) of the tokens after each of ``target``."""
        return self.output(self.decode(target, self.encode(source)))

    def encode(self, source: Tensor) -> tuple[Tensor, Tensor]:
        """The encoder's output (B, S, D) and the padding (B, S)."""
        x, padding = self._embed(source), source == PAD
        for layer in self.encoder:
            x = layer(x, padding)
        return self.norms[0](x), padding

    def decode(self, target: Tensor, memory: tuple[Tensor, Tensor]) -> Tensor:
        """The decoder's output (B, T, D)."""
        x, padding = self._embed(target), target == PAD
        for layer in self.decoder:
            x = layer(x, padding, memory)
        return self.norms[1](x)

    def output(self, x: Tensor) -> Tensor:
        return x @ self.embedding.weight.T

    @torch.no_grad()
    def translate(self, source: Tensor, most: int) -> list[list[int]]:
        """Greedy translations of at most ``most`` tokens, without BOS and EOS."""
        memory = self.encode(source)
        return greedy(
            lambda target: self.output(self.decode(target, memory)[:, -1]), len(source), most
        )

    def _embed(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) * math.sqrt(self.embedding.embedding_dim)
        return self.dropout(x + self.positions[: tokens.shape[1]])


def greedy(logits: Callable[[Tensor], Tensor], rows: int, most: int) -> list[list[int]]:
    """The most likely token after the other, at most ``most``, without BOS and EOS.

    Nothing is cached: every step computes all tokens so far.

    Args:
        logits: Returns the logits (B, vocabulary) of the token after those of (B, T).
    """
    target = torch.full((rows, 1), BOS)
    done = torch.zeros(rows, dtype=torch.bool)
    while not done.all() and target.shape[1] <= most:
        token = logits(target).argmax(-1)
        token[done] = PAD
        done |= token == EOS
        target = torch.cat([target, token[:, None]], 1)
    return [[i for i in row if i not in (PAD, BOS, EOS)] for row in target.tolist()]


def attention_stack(variant: Variant, settings: Settings) -> Sequence[AttentionLayer]:
    """The attention layers of an encoder, of a decoder, or those between them."""
    D, H = settings.width, variant.heads
    K, V = D // variant.shrink // H, D // H

    def layer() -> AttentionLayer:
        match variant.kind:
            case "standard":
                return FixedHeadAttention(D, H, K, value_head_size=V, batch_first=True)
            case "fixed":
                return FixedHeadAttention(D, H, D // 4, batch_first=True)
            case "collaborative":
                return CollaborativeAttention(
                    D, H, D // variant.shrink, mixing="random", batch_first=True
                )
            case "grouped":
                value, attention, output = (name == variant.group_maps for name in MAPS)
                return GroupedHeadAttention(
                    D, H, K, num_groups=GROUPS, alpha=variant.group_weight,
                    beta=variant.group_weight, tau=(value, attention, output), batch_first=True,
                )  # fmt: skip

    layers = [layer() for _ in range(settings.layers)]
    if not variant.reuse:
        return layers
    exact = [each.trained() for each in layers if isinstance(each, FixedHeadAttention)]
    return reuse_transformer(exact, variant.reuse)


def _positions(length: int, width: int) -> Tensor:
    """Sinusoidal positions (length, width)."""
    rate = torch.exp(torch.arange(0, width, 2) * (-math.log(10000.0) / width))
    angle = torch.arange(length)[:, None] * rate
    return torch.stack([angle.sin(), angle.cos()], 2).flatten(1)
