"""Reuse Transformer: layers that take attention probabilities of an earlier layer (2110.06821)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Unpack

import torch
from torch import Tensor

from attnserve.nn.attention import AttentionLayer, FixedHeadAttention, Rotation
from attnserve.nn.trained import LayerOptions, TrainedAttention
from attnserve.planning.heads.selection import parse_reuse, reused_layers
from graph_passes.errors import InvalidArgument

__all__ = ["ReuseAttention", "SkipAttention", "reuse_transformer"]


class ReuseAttention(AttentionLayer):
    """Attention whose last K of H heads reuse probabilities (algorithm 1 of arXiv 2110.06821).

        A_l = [A_l,1 ... A_l,H-K computed, R_(l-1),1 ... R_(l-1),K reused],    R_l = A_l

    The layer has its own values and output projection. Computed and reused probabilities stay
    separate, and each part has a product with its values.

    Args:
        embed_dim: D.
        num_heads: H.
        head_size: K of queries and keys, and V by default.
        reused_heads: The number of reused heads, 1 to H.
        source: The earlier layer. It must be called first, on the same tokens and masks, in the
            same thread: the probabilities of its latest call are reused, so no call may skip it (as
            the layer dropout of BART does). Gradient checkpointing must not be reentrant, and needs
            a backward pass after each call of the model.
        options: See ``AttentionLayer``. The scale is 1/sqrt(K) by default.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        head_size: int,
        *,
        reused_heads: int,
        source: AttentionLayer,
        **options: Unpack[LayerOptions],
    ) -> None:
        max_heads = min(num_heads, source.num_heads)
        if not 1 <= reused_heads <= max_heads:
            raise InvalidArgument(
                f"`reused_heads` is {reused_heads}: expected 1 to {max_heads}",
                "reuse at most all heads of the layer before",
                code="nn.reused_heads",
            )
        options = {"value_head_size": head_size, "scale": head_size**-0.5, **options}
        super().__init__(embed_dim, num_heads, **options)
        self.reused_heads = reused_heads
        self.reused_parts = _first_heads(source.part_heads, reused_heads)
        self.source = source.passed_on  # not the layer: it would become a part of this one
        self._place = self.source.add_reader()
        num_own_heads = num_heads - reused_heads
        self.own: FixedHeadAttention | None = None
        if num_own_heads:
            self.own = FixedHeadAttention(
                embed_dim,
                num_own_heads,
                head_size,
                value_head_size=1,
                scale=self.scale,
                bias=options.get("bias", True),
                kdim=self.kdim,
            )
            # Only the queries and keys of ``own`` are used.
            del self.own.v_proj, self.own.out_proj

    @classmethod
    def from_trained(
        cls, layer: TrainedAttention, *, reused_heads: int, source: AttentionLayer
    ) -> ReuseAttention:
        """Make a layer of trained weights whose last ``reused_heads`` heads are reused."""
        reuse_layer = cls(
            layer.sizes[0],
            layer.num_heads,
            layer.head_size,
            reused_heads=reused_heads,
            source=source,
            **layer.options,
        ).to(layer.query)
        reuse_layer.take_values(layer)
        if reuse_layer.own is not None:
            own = FixedHeadAttention.from_trained(layer.of_heads(slice(reuse_layer.own.num_heads)))
            reuse_layer.own.q_proj = own.q_proj
            reuse_layer.own.k_proj = own.k_proj
        return reuse_layer

    @property
    def part_heads(self) -> tuple[int, ...]:
        """The number of own heads, if any, then of the reused heads of each part."""
        own = () if self.own is None else self.own.part_heads
        return (*own, *(heads for heads, _ in self.reused_parts))

    def probability_parts(
        self, query: Tensor, key: Tensor, mask: Tensor | None, rotation: Rotation | None = None
    ) -> tuple[Tensor, ...]:
        """The own probabilities, if there are own heads, and the reused probabilities."""
        taken = self.source.take(self._place, query)
        reused = tuple(  # TorchScript would export a Slice of all heads
            part if heads == most else part[:, :heads]
            for part, (heads, most) in zip(taken, self.reused_parts, strict=False)
        )
        if self.own is None:
            return reused
        if mask is not None and mask.ndim == 4 and mask.shape[1] == self.num_heads:
            mask = mask[:, : self.own.num_heads]
        return (self.own.probabilities(query, key, mask, rotation), *reused)


def _first_heads(parts: Sequence[int], count: int) -> tuple[tuple[int, int], ...]:
    """The parts that hold the first ``count`` heads of a layer.

    Args:
        parts: The number of heads of each part.

    Returns:
        For each such part, the number of these heads in it, and the size of the part.
    """
    taken: list[tuple[int, int]] = []
    for size in parts:
        if count > 0:
            taken.append((min(size, count), size))
        count -= size
    return tuple(taken)


class SkipAttention(AttentionLayer):
    """A removed attention layer: its output is zero (Skip, appendix B.1 of arXiv 2110.06821)."""

    def __init__(self, embed_dim: int, num_heads: int = 1, *, batch_first: bool = False) -> None:
        super().__init__(
            embed_dim, num_heads, value_head_size=1, scale=1.0, bias=False, batch_first=batch_first
        )
        del self.v_proj, self.out_proj

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None = None,
        rotation: Rotation | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Zeros in the shapes of the output and of the probabilities."""
        B, S, _ = query.shape
        return torch.zeros_like(query), (query.new_zeros(B, self.num_heads, S, key.shape[1]),)


def reuse_transformer(
    layers: Sequence[TrainedAttention],
    configuration: str,
    *,
    exact: Callable[[TrainedAttention], AttentionLayer] = FixedHeadAttention.from_trained,
) -> list[AttentionLayer]:
    """Connect the attention layers of a model, in execution order, by algorithm 1.

    Args:
        configuration: "partial:K" (K heads of all layers but the first and last), "partial:K:P" (K
            heads of the P layers after the first), "full:P" (all heads of these layers),
            "alternate" (every second layer), "all-end" or "all-end:P" (the P layers before the
            last), or "skip:P" (no attention in the P layers after the first).
        exact: Makes a layer that computes all its heads.

    Raises:
        InvalidArgument: The configuration is invalid, or there are too few layers or heads.
    """
    skips = configuration.startswith("skip:")
    try:
        reuse = parse_reuse(configuration.replace("skip", "full", 1) if skips else configuration)
    except InvalidArgument:
        reuse = None
    if reuse is None or reuse.kind == "auto":
        raise InvalidArgument(
            f"`configuration` is {configuration[:100]!r}",
            "choose partial:K[:P], full:P, alternate, all-end[:P] or skip:P",
            code="nn.reuse",
        ) from None
    try:
        reusing_indices = reused_layers(reuse, len(layers))
    except InvalidArgument as error:
        if not skips:
            raise
        raise InvalidArgument(
            f"`configuration` is {configuration}, of {len(layers)} layers: the first stays",
            "skip fewer layers",
            code=error.code,
        ) from error
    new_layers: list[AttentionLayer] = []
    source: AttentionLayer | None = None
    for index, layer in enumerate(layers):
        if index in reusing_indices and skips:
            new_layers.append(
                SkipAttention(layer.sizes[0], layer.num_heads, batch_first=layer.batch_first)
            )
            continue
        if index in reusing_indices and source is not None:
            heads = layer.num_heads if reuse.heads is None else reuse.heads
            source = ReuseAttention.from_trained(layer, reused_heads=heads, source=source)
        else:
            source = exact(layer)
        new_layers.append(source)
    return new_layers
