"""Multi-head attention with PyTorch's call signature and an independent head size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self, Unpack

import torch
from torch import Tensor, nn

from attnserve.nn.latest_call import FeatureMaps, Latest, PassedOn
from attnserve.nn.trained import LayerOptions, TrainedAttention, require_trained
from graph_passes.errors import InvalidArgument

__all__ = [
    "AttentionLayer",
    "FixedHeadAttention",
    "Rotation",
    "check_size",
    "rotary_error",
    "value_size",
]

Rotation = tuple[Tensor, Tensor]
"""Cosines and sines of rotary positions, each (1 or B, T, P): dimensions i and i + P/2 of a head
are rotated as a pair; dimensions from P on are unchanged (arXiv 2104.09864, in the layout of
transformers)."""


MASK_THRESHOLD = -5000.0
"""An additive mask hides a token if its value is lower; some masks contain -10000."""


class _NotFused:
    """Placeholder for packed weights; PyTorch's fused kernels refuse arguments with this method."""

    @classmethod
    def __torch_function__(cls, *_: Any) -> Any:
        return NotImplemented


class AttentionLayer(nn.Module):
    """Base class of attention: values, output projection, masks and PyTorch's call signature.

    Subclasses define ``logits``.

        out = concat_h [ softmax(logits_h + mask) (y W_V^h + b_V^h) ] W_O + b_O

    Args:
        embed_dim: D, the width of queries and of the output.
        num_heads: H. It need not divide D.
        value_head_size: V, the size of the values of a head.
        scale: The factor of the logits.
        dropout: Dropout probability of attention probabilities, in training.
        bias: Whether projections have biases.
        kdim: E, the width of keys (default: D).
        vdim: F, the width of values (default: D).
        batch_first: Whether tokens are (B, S, D); the default of PyTorch is (S, B, D).

    Attributes:
        keep_maps: Keep the feature maps of each call in ``latest``, with their gradients.
        passed_on: The probabilities of the latest call, if another layer reuses them.
    """

    # torch.nn.TransformerEncoder and its layers read these values, which turn fused kernels and
    # nested tensors off.
    in_proj_weight = _NotFused()
    in_proj_bias = None
    _qkv_same_embed_dim = False

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        value_head_size: int,
        scale: float,
        dropout: float = 0.0,
        bias: bool = True,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
    ) -> None:
        super().__init__()
        sizes = {"embed_dim": embed_dim, "num_heads": num_heads, "head_size": value_head_size}
        for name, size in sizes.items():
            check_size(name, size)
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.value_head_size = value_head_size
        self.kdim = kdim or embed_dim
        self.vdim = vdim or embed_dim
        self.scale = scale
        self.dropout = dropout
        self.batch_first = batch_first
        self.keep_maps = False
        self.latest = Latest()
        self.passed_on = PassedOn()
        self.v_proj = input_projection(self.vdim, num_heads * value_head_size, bias=bias)
        self.out_proj = projection(num_heads * value_head_size, embed_dim, bias=bias)

    @torch.no_grad()
    def take_values(self, layer: TrainedAttention) -> None:
        """Copy the values and the output projection of a layer with heads of the same size."""
        self.v_proj.weight.copy_(layer.value.transpose(1, 2).flatten(0, 1))
        self.out_proj.weight.copy_(layer.output.flatten(0, 1).T)
        if layer.has_bias:
            self.v_proj.bias.copy_(layer.value_bias.flatten())
            self.out_proj.bias.copy_(layer.output_bias)

    def logits(self, query: Tensor, key: Tensor, rotation: Rotation | None = None) -> Tensor:
        """Scaled logits (B, H, S, T) of tokens x (B, S, D) and y (B, T, E)."""
        raise NotImplementedError

    @property
    def part_heads(self) -> tuple[int, ...]:
        """The number of heads of each part of the probabilities."""
        return (self.num_heads,)

    def probability_parts(
        self, query: Tensor, key: Tensor, mask: Tensor | None, rotation: Rotation | None = None
    ) -> tuple[Tensor, ...]:
        """Attention probabilities of consecutive heads, (B, h, S, T) with h in ``part_heads``.

        Args:
            query: Tokens x, (B, S, D).
            key: Tokens y, (B, T, E).
            mask: Broadcasts to (B, H, S, T). Boolean: True where attention is not allowed.
                Otherwise added to the logits.
            rotation: Rotary positions of queries and keys, which have the same length.
        """
        return (self.probabilities(query, key, mask, rotation),)

    def probabilities(
        self, query: Tensor, key: Tensor, mask: Tensor | None, rotation: Rotation | None = None
    ) -> Tensor:
        """The probabilities (B, H, S, T) that the layer computes from its ``logits``."""
        logits = self.logits(query, key, rotation)
        if mask is not None and mask.dtype == torch.bool:
            # A finite value: rows without any key become uniform instead of NaN.
            logits = logits.masked_fill(mask, torch.finfo(logits.dtype).min)
        elif mask is not None:
            logits = logits + mask
        return logits.softmax(-1)

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None = None,
        rotation: Rotation | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The output (B, S, D) and the ``probability_parts``, batch first.

        Each part is multiplied with its values. Joining the probabilities would copy S x T elements
        for each head, and training would keep the copy.

        Args:
            query: Tokens x, (B, S, D).
            key: Tokens of the keys, (B, T, E).
            value: Tokens of the values, (B, T, F).
            mask: Broadcasts to (B, H, S, T). Boolean: True where attention is not allowed.
                Otherwise added to the logits.
            rotation: Rotary positions of queries and keys, which have the same length.
        """
        parts = self.probability_parts(query, key, mask, rotation)
        self.passed_on.put(parts)
        values = by_head(self.v_proj(value), self.num_heads)
        values_of_parts = values.split(self.part_heads, 1) if len(parts) > 1 else (values,)
        dropped = [nn.functional.dropout(part, self.dropout, self.training) for part in parts]
        context = joined([p @ v for p, v in zip(dropped, values_of_parts, strict=True)])  # B H S V
        if self.keep_maps:
            probabilities = joined(parts)
            real = _real_tokens(mask, probabilities, is_self=key is query)
            self.latest.put(FeatureMaps(values, probabilities, context, *real))
        return self.out_proj(context.transpose(1, 2).flatten(2)), parts

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute ``torch.nn.MultiheadAttention.forward``, with the same shapes and masks.

        There are three differences: a query without any allowed key attends to all keys instead of
        returning NaN, ``is_causal`` without ``attn_mask`` masks later keys, and the probabilities
        are returned without dropout.

        Args:
            query: x, (S, B, D), (B, S, D) if ``batch_first``, or (S, D).
            key: (T, B, E), (B, T, E) or (T, E).
            value: (T, B, F), (B, T, F) or (T, F).
            key_padding_mask: (B, T) or (T,). Boolean: True for padding. Else added to the logits.
            need_weights: Return the probabilities.
            attn_mask: (S, T) or (B*H, S, T). Boolean: True where attention is not allowed. Else
                added to the logits.
            average_attn_weights: Return the mean of the probabilities over heads.
            is_causal: Query s attends to keys t <= s.

        Returns:
            The output, in the shape of ``query``, and the probabilities: (B, S, T), (B, H, S, T) if
            not averaged, without B for unbatched tokens, None if not needed.

        Raises:
            InvalidArgument: Tokens or masks have other shapes, or a mask is of integers.
        """
        if query.is_nested:
            raise InvalidArgument(
                "`query` is a nested tensor",
                "set `use_nested_tensor` of torch.nn.TransformerEncoder to False",
                code="nn.nested",
            )
        unbatched = query.ndim == 2
        tokens = [query, key, value]
        if unbatched:
            tokens = [part.unsqueeze(0) for part in tokens]
            key_padding_mask = None if key_padding_mask is None else key_padding_mask[None]
        elif not self.batch_first:
            tokens = [part.transpose(0, 1) for part in tokens]
        if key is query:  # keep one object: feature maps recognize self-attention by the identity
            tokens[1] = tokens[0]
        if not torch.jit.is_tracing():  # pyright: ignore[reportPrivateImportUsage]
            self._check(tokens[0], tokens[1], tokens[2], key_padding_mask, attn_mask)
        mask = self._mask(tokens[0], tokens[1], key_padding_mask, attn_mask, is_causal)
        out, parts = self.attend(*tokens, mask=mask)
        weights = None
        if need_weights:
            probabilities = joined(parts)
            weights = probabilities.mean(1) if average_attn_weights else probabilities
        if unbatched:
            return out.squeeze(0), None if weights is None else weights.squeeze(0)
        return out if self.batch_first else out.transpose(0, 1), weights

    def _check(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None,
        attn_mask: Tensor | None,
    ) -> None:
        """Check that tokens (batch first) and masks fit each other.

        Raises:
            InvalidArgument: The shapes do not fit each other, or tokens are not (B, S, D).
        """
        if query.ndim != 3 or query.shape[2] != self.embed_dim or key.ndim != 3:
            raise InvalidArgument(
                f"tokens have the shapes {tuple(query.shape)} and {tuple(key.shape)}, batch first: "
                f"expected two axes, or three with a batch, and queries of width {self.embed_dim}",
                "pass them as for torch.nn.MultiheadAttention; see `batch_first` for the order",
                code="nn.shape",
            )
        B, S, _ = query.shape
        T = key.shape[1]
        H = self.num_heads
        _check_shape("key", key, [(B, T, self.kdim)])
        _check_shape("value", value, [(B, T, self.vdim)])
        for name, mask, shapes in (
            ("key_padding_mask", key_padding_mask, [(B, T)]),
            ("attn_mask", attn_mask, [(S, T), (B * H, S, T)]),
        ):
            if mask is None:
                continue
            if mask.dtype != torch.bool and not mask.is_floating_point():
                raise InvalidArgument(
                    f"`{name}` is {mask.dtype}: expected bool (True: not allowed) or float (added)",
                    "convert it, for example `attention_mask == 0`",
                    code="nn.mask",
                )
            _check_shape(name, mask, shapes)

    def _mask(
        self,
        query: Tensor,
        key: Tensor,
        key_padding_mask: Tensor | None,
        attn_mask: Tensor | None,
        is_causal: bool,
    ) -> Tensor | None:
        """Join all masks of a call to one mask for ``attend``; None without a mask."""
        masks: list[Tensor] = []
        if is_causal and attn_mask is None:
            ones = torch.ones(query.shape[1], key.shape[1], dtype=torch.bool, device=query.device)
            masks.append(ones.triu(1))
        if attn_mask is not None:
            of_heads = attn_mask.ndim == 3
            masks.append(attn_mask.unflatten(0, (-1, self.num_heads)) if of_heads else attn_mask)
        if key_padding_mask is not None:
            masks.append(key_padding_mask[:, None, None])
        if not masks:
            return None
        if all(mask.dtype == torch.bool for mask in masks):
            return masks[0] if len(masks) == 1 else masks[0] | masks[1]
        return sum(
            (_additive(mask, query.dtype) for mask in masks[1:]), _additive(masks[0], query.dtype)
        )


class FixedHeadAttention(AttentionLayer):
    """Standard multi-head attention whose head size is independent of H and D (arXiv 2002.07028).

        logits_h = scale (x W_Q^h + b_Q^h)(y W_K^h + b_K^h)^T,    W_Q^h of shape (D, K)

    A head size of at least the sequence length removes the low-rank bottleneck (theorem 1).

    Args:
        embed_dim: D.
        num_heads: H; it need not divide D.
        head_size: K, and V by default.
        options: See ``AttentionLayer``. The scale is 1/sqrt(K) by default.

    Attributes:
        rotary: Whether the layer was made from a layer with rotary positions.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        head_size: int,
        **options: Unpack[LayerOptions],
    ) -> None:
        check_size("head_size", head_size)
        options = {"value_head_size": head_size, "scale": head_size**-0.5, **options}
        super().__init__(embed_dim, num_heads, **options)
        bias = options.get("bias", True)
        self.head_size = head_size
        self.rotary = False
        self.q_proj = input_projection(embed_dim, num_heads * head_size, bias=bias)
        self.k_proj = input_projection(self.kdim, num_heads * head_size, bias=bias)

    @classmethod
    def from_trained(
        cls, layer: TrainedAttention, *, head_size: int | None = None, **options: Any
    ) -> Self:
        """Make a layer that computes the same as ``layer``, with heads of this size or larger.

        New columns of W_Q and rows of W_O are zero, so outputs do not change. New columns of W_K
        and W_V are random: if they were zero too, no gradient would reach either side. The scale of
        ``layer`` is kept. The default head size is that of ``layer``.

        Raises:
            InvalidArgument: ``head_size`` is below the head size of the layer, or ``bias`` is False
                and the layer has biases.
        """
        require_trained(layer)
        biases = (layer.query_bias, layer.key_bias, layer.value_bias, layer.output_bias)
        has_bias = options.setdefault("bias", layer.has_bias)
        if not has_bias and any(bias.any() for bias in biases):
            raise InvalidArgument(
                "`bias` is False, but the layer has biases", "leave it out", code="nn.bias"
            )
        K = layer.head_size
        V = layer.value_head_size
        size = max(K, V) if head_size is None else head_size
        if size < max(K, V):
            raise InvalidArgument(
                f"`head_size` is {size}: expected at least {max(K, V)}, the layer's",
                "heads can only be widened; CollaborativeAttention narrows them",
                code="nn.head_size",
            )
        k, v = (K, V) if head_size is None else (size, size)
        options = {**layer.options, "value_head_size": v, **options}
        wide_layer = cls(layer.sizes[0], layer.num_heads, k, **options).to(layer.query)
        with torch.no_grad():
            for linear, weight, bias, factor in (
                (wide_layer.q_proj, layer.query, layer.query_bias, 0.0),
                (wide_layer.k_proj, layer.key, layer.key_bias, 1.0),
                (wide_layer.v_proj, layer.value, layer.value_bias, 1.0),
            ):
                columns = linear.weight.T.unflatten(1, (layer.num_heads, -1))  # D H K
                columns[:, :, weight.shape[2] :] *= factor
                columns[:, :, : weight.shape[2]] = weight.transpose(0, 1)
                if has_bias:
                    linear.bias.zero_()
                    linear.bias.unflatten(0, (layer.num_heads, -1))[:, : bias.shape[1]] = bias
            rows = wide_layer.out_proj.weight.T.unflatten(0, (layer.num_heads, -1))  # H V D
            rows[:, V:] = 0.0
            rows[:, :V] = layer.output
            if has_bias:
                wide_layer.out_proj.bias.copy_(layer.output_bias)
        wide_layer.rotary = layer.rotary
        return wide_layer

    def trained(self) -> TrainedAttention:
        """A copy of the weights."""
        return TrainedAttention.of_linears(
            self.q_proj,
            self.k_proj,
            self.v_proj,
            self.out_proj,
            num_heads=self.num_heads,
            scale=self.scale,
            dropout=self.dropout,
            batch_first=self.batch_first,
            rotary=self.rotary,
        )

    def logits(self, query: Tensor, key: Tensor, rotation: Rotation | None = None) -> Tensor:
        """Scaled logits (B, H, S, T) of tokens x (B, S, D) and y (B, T, E)."""
        q = by_head(self.q_proj(query), self.num_heads)
        k = by_head(self.k_proj(key), self.num_heads)
        if rotation is not None:
            q = rotated(q, rotation)
            k = rotated(k, rotation)
        return (q * self.scale) @ k.transpose(-1, -2)


def _check_shape(name: str, tensor: Tensor, shapes: Sequence[tuple[int, ...]]) -> None:
    """Check the shape of a tensor.

    Raises:
        InvalidArgument: The shape is not one of ``shapes``.
    """
    if tuple(tensor.shape) not in shapes:
        raise InvalidArgument(
            f"`{name}` has shape {tuple(tensor.shape)}: expected {' or '.join(map(str, shapes))}",
            "pass it as for torch.nn.MultiheadAttention; see `batch_first` for the order",
            code="nn.shape",
        )


def check_size(name: str, size: int) -> None:
    """Check that a size is positive.

    Raises:
        InvalidArgument: The size is below 1.
    """
    if size < 1:
        raise InvalidArgument(
            f"`{name}` is {size}: expected at least 1", "choose a positive size", code="nn.size"
        )


def value_size(embed_dim: int, num_heads: int, options: LayerOptions) -> int:
    """V: the size in the options, or else D/H.

    Raises:
        InvalidArgument: D/H is not an integer.
    """
    given = options.get("value_head_size")
    if given is None and embed_dim % num_heads:
        raise InvalidArgument(
            f"`embed_dim` is {embed_dim}: not a multiple of `num_heads` = {num_heads}",
            "pass `value_head_size`",
            code="nn.value_head_size",
        )
    return given or embed_dim // num_heads


def projection(inputs: int, outputs: int, *, bias: bool) -> nn.Linear:
    """A linear map with Xavier-uniform weights and zero biases."""
    linear = nn.Linear(inputs, outputs, bias=bias)
    nn.init.xavier_uniform_(linear.weight)
    if bias:
        nn.init.zeros_(linear.bias)
    return linear


def input_projection(inputs: int, outputs: int, *, bias: bool) -> nn.Linear:
    """A linear map for queries, keys or values, initialized as in torch.nn.MultiheadAttention.

    PyTorch initializes all three as one Xavier-uniform matrix (3 D, D), of variance 1/(2 D). This
    variance does not depend on the number and size of heads, so neither does the variance of the
    first logits.
    """
    linear = nn.Linear(inputs, outputs, bias=bias)
    nn.init.uniform_(linear.weight, -(limit := (1.5 / inputs) ** 0.5), limit)
    if bias:
        nn.init.zeros_(linear.bias)
    return linear


def by_head(tokens: Tensor, heads: int) -> Tensor:
    """Split (B, T, H*K) into heads (B, H, T, K)."""
    return tokens.unflatten(-1, (heads, -1)).transpose(1, 2)


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Join parts (B, h, ...) of consecutive heads to one tensor (B, H, ...)."""
    return parts[0] if len(parts) == 1 else torch.cat([*parts], 1)


def rotated(heads: Tensor, rotation: Rotation) -> Tensor:
    """Apply rotary positions to the first dimensions of heads (B, H, T, K)."""
    cos, sin = (part.unsqueeze(1) for part in rotation)
    size = cos.shape[-1]
    if size < heads.shape[-1]:
        return torch.cat([rotated(heads[..., :size], rotation), heads[..., size:]], -1)
    first, second = heads.chunk(2, -1)
    return heads * cos + torch.cat([-second, first], -1) * sin


def rotary_error(kind: str) -> InvalidArgument:
    """The error for a layer that cannot have rotary positions."""
    return InvalidArgument(
        f"{kind} cannot have rotary positions",
        "use SharedKeyAttention, or another layer of attnserve.nn, for this model",
        code="nn.rotary",
    )


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a mask to a mask that is added to the logits."""
    # A quarter of the least value: the sum of two masks and of logits stays finite.
    least = torch.finfo(dtype).min / 4
    if mask.dtype != torch.bool:
        return mask.to(dtype).clamp(min=least)
    return torch.zeros_like(mask, dtype=dtype).masked_fill(mask, least)


def _real_tokens(
    mask: Tensor | None, probabilities: Tensor, *, is_self: bool
) -> tuple[Tensor, Tensor]:
    """Masks of real queries (B, S) and keys (B, T).

    A key is padding if no query attends to it. In self-attention, the query of such a token is
    padding too; the mask of cross-attention does not tell which queries are padding.
    """
    B, _, S, T = probabilities.shape
    if mask is None:
        queries, keys = (probabilities.new_ones(B, n, dtype=torch.bool) for n in (S, T))
        return queries, keys
    allowed = ~mask if mask.dtype == torch.bool else mask > MASK_THRESHOLD
    allowed = allowed[(None,) * (4 - allowed.ndim)]
    keys = allowed.expand(B, -1, -1, T).flatten(1, 2).any(1)
    return (keys if is_self else keys.new_ones(B, S)), keys
