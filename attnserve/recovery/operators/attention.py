"""Fused attention and rotary operators."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from attnserve.recovery.operators.registry import Call, operator

__all__: list[str] = []

MASK_FILTER = -10000.0
"""The default of ``mask_filter_value``."""


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    *,
    cap: float = 0.0,
    bias: Tensor | None = None,
    causal: bool = False,
    ends_together: bool = False,
) -> Tensor:
    """softmax(cap(scale q k^T) + bias) v for (B, H, S, K), (B, G, T, K) and (B, G, T, V).

    The context of a query without keys is 0.

    Args:
        cap: A soft cap of the scores, if not 0.
        bias: Added to the scores; False of a boolean bias hides a key.
        causal: Query s reads keys t <= s, or t <= s + T - S if ``ends_together``.
    """
    if k.shape[1] != q.shape[1]:
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
    if causal:
        queries, keys = q.shape[-2], k.shape[-2]
        shown = torch.ones(queries, keys, dtype=torch.bool, device=q.device)
        shown = shown.tril(keys - queries if ends_together else 0)
        if bias is None:
            bias = shown
        elif bias.dtype == torch.bool:
            bias = bias & shown
        else:
            bias = bias.masked_fill(~shown, -torch.inf)
    if cap:
        return _attend_capped(q, k, v, scale, cap, bias)
    if bias is not None and bias.dtype != torch.bool:
        bias = bias.to(q.dtype)
    added = v.shape[-1] - q.shape[-1]
    if added > 0:  # the fast kernels need equal sizes
        q, k = (F.pad(t, (0, added)) for t in (q, k))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scale)


def _attend_capped(
    q: Tensor, k: Tensor, v: Tensor, scale: float, cap: float, bias: Tensor | None
) -> Tensor:
    """``_attend`` for equal numbers of heads, with a soft cap."""
    scores = cap * torch.tanh(torch.matmul(q * scale, k.transpose(-1, -2)) / cap)
    if bias is not None and bias.dtype == torch.bool:
        bias = torch.zeros_like(bias, dtype=scores.dtype).masked_fill(~bias, -torch.inf)
    scores = (scores if bias is None else scores + bias).float()
    empty = (scores == -torch.inf).all(-1, keepdim=True)
    probabilities = F.softmax(scores.masked_fill(empty, 0.0), -1).masked_fill(empty, 0.0)
    return torch.matmul(probabilities.to(v.dtype), v)


def _heads(x: Tensor, heads: int) -> Tensor:
    """(B, T, H*K) -> (B, H, T, K); an input with four axes does not change."""
    return x if x.ndim == 4 else x.unflatten(-1, (heads, -1)).transpose(1, 2)


def _merged(x: Tensor) -> Tensor:
    """(B, H, T, K) -> (B, T, H*K)."""
    return x.transpose(1, 2).flatten(2)


def _with_past(past: Tensor | None, x: Tensor) -> Tensor:
    return x if past is None else torch.cat((past.to(x.dtype), x), 2)


@operator("Attention")
def _attention(
    call: Call,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    past_key: Tensor | None = None,
    past_value: Tensor | None = None,
    lengths: Tensor | None = None,
) -> tuple[Any, ...]:
    if lengths is not None:
        raise call.unsupported("it reads the lengths of its caches")
    if len(call.node.outputs) > 3 and call.node.outputs[3].uses():
        raise call.unsupported("it returns its scores")
    heads, groups = call.integer("q_num_heads", 0), call.integer("kv_num_heads", 0)
    query = _heads(q, heads)
    key, value = _with_past(past_key, _heads(k, groups)), _with_past(past_value, _heads(v, groups))
    context = _attend(
        query,
        key,
        value,
        call.number("scale", 0.0) or query.shape[-1] ** -0.5,
        cap=call.number("softcap", 0.0),
        bias=mask,
        causal=bool(call.integer("is_causal", 0)),
        ends_together=past_key is not None,
    )
    return (context if q.ndim == 4 else _merged(context)), key, value, key.new_empty(0)


def _microsoft(
    call: Call, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, added: Tensor | None
) -> Tensor:
    """The context of (B, H, S, K), (B, H, T, K) and (B, H, T, V), as (B, S, H*V)."""
    bias = added
    if mask is not None:
        if mask.ndim == 1 and len(mask) == len(q):  # the number of tokens of each text
            places = torch.arange(k.shape[2], device=mask.device)
            mask = (places < mask[:, None]).int()
        if mask.ndim not in (2, 3):
            raise call.unsupported(f"its mask has the shape {tuple(mask.shape)}")
        fill = call.number("mask_filter_value", MASK_FILTER)
        shown = mask[:, None, None, :] if mask.ndim == 2 else mask[:, None]
        hidden = torch.where(shown > 0, 0.0, fill).to(q.dtype)
        bias = hidden if bias is None else bias + hidden
    scale = call.number("scale", 0.0) or q.shape[-1] ** -0.5
    causal = bool(call.integer("unidirectional", 0))
    return _merged(_attend(q, k, v, scale, bias=bias, causal=causal, ends_together=True))


@operator("MultiHeadAttention", domain="com.microsoft")
def _multi_head_attention(
    call: Call,
    q: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    added: Tensor | None = None,
    past_key: Tensor | None = None,
    past_value: Tensor | None = None,
    *rest: Tensor | None,
) -> tuple[Any, ...]:
    if k is None or v is None or q.ndim != 3 or any(x is not None for x in rest):
        raise call.unsupported("its operands are packed, or its cache is shared")
    heads = call.integer("num_heads", 0)
    if bias is not None:
        width = q.shape[-1]
        q = q + bias[:width]
        if k.ndim == 3:
            k, v = k + bias[width : 2 * width], v + bias[2 * width :]
    key = _with_past(past_key, _heads(k, heads))
    value = _with_past(past_value, _heads(v, heads))
    return _microsoft(call, _heads(q, heads), key, value, mask, added), key, value


@operator("Attention", domain="com.microsoft")
def _packed_attention(
    call: Call,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    past: Tensor | None = None,
    added: Tensor | None = None,
    length: Tensor | None = None,
) -> Tensor:
    if past is not None or length is not None or call.integer("do_rotary", 0):
        raise call.unsupported("it has a cache or rotary positions")
    whole = torch.matmul(x, weight)
    whole = whole if bias is None else whole + bias
    sizes = call.integers("qkv_hidden_sizes") or [whole.shape[-1] // 3] * 3
    heads = call.integer("num_heads", 0)
    q, k, v = (_heads(columns, heads) for columns in torch.split(whole, sizes, -1))
    return _microsoft(call, q, k, v, mask, added)


@operator("GroupQueryAttention", domain="com.microsoft")
def _group_query_attention(
    call: Call,
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    past_key: Tensor | None,
    past_value: Tensor | None,
    lengths: Tensor,
    total: Tensor,
    *optional: Tensor | None,
) -> tuple[Any, ...]:
    cos, sin, positions, added, *rest = (*optional, None, None, None, None)
    heads, groups = call.integer("num_heads", 0), call.integer("kv_num_heads", 0)
    if any(x is not None for x in rest) or call.integer("smooth_softmax", 0) > 0:
        raise call.unsupported("it has attention sinks")
    if k is None or v is None:
        size = q.shape[-1] // (heads + 2 * groups)
        q, k, v = torch.split(q, [heads * size, groups * size, groups * size], -1)
    past, S = 0 if past_key is None else past_key.shape[2], q.shape[1]
    if past and bool((lengths.flatten() + 1 != past + S).any()):
        raise call.unsupported("its caches have different lengths")
    query, key = (x.unflatten(-1, (n, -1)) for x, n in ((q, heads), (k, groups)))  # B S H K
    places = torch.arange(past, past + S, device=q.device)
    if call.integer("do_rotary", 0) and cos is not None and sin is not None:
        at = places[None] if positions is None else positions.long()
        angles = [t[at][:, :, None] for t in (cos, sin)]
        interleaved = bool(call.integer("rotary_interleaved", 0))
        query, key = (_rotate(x, *angles, interleaved=interleaved) for x in (query, key))
    key = _with_past(past_key, key.transpose(1, 2))
    value = _with_past(past_value, _heads(v, groups))
    distance = places[:, None] - torch.arange(past + S, device=q.device)
    shown = distance >= 0
    if (window := call.integer("local_window_size", -1)) > 0:
        shown = shown & (distance < window)
    bias = shown if added is None else added.masked_fill(~shown, -torch.inf)
    context = _attend(
        query.transpose(1, 2),
        key,
        value,
        call.number("scale", 0.0) or query.shape[-1] ** -0.5,
        cap=call.number("softcap", 0.0),
        bias=bias,
    )
    return _merged(context), key, value


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
    """Rotate the first elements of (B, T, H, K) by angles (B or 1, T, 1, half of them)."""
    size = 2 * cos.shape[-1]
    rotated, rest = x[..., :size], x[..., size:]
    if interleaved:
        a, b = rotated[..., 0::2], rotated[..., 1::2]
    else:
        a, b = rotated.chunk(2, -1)
    real, imaginary = cos * a - sin * b, sin * a + cos * b
    if interleaved:
        rotated = torch.stack((real, imaginary), -1).flatten(-2)
    else:
        rotated = torch.cat((real, imaginary), -1)
    return torch.cat((rotated, rest), -1) if rest.shape[-1] else rotated


@operator("RotaryEmbedding")
def _rotary(
    call: Call, x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None = None
) -> Tensor:
    heads, size = call.integer("num_heads", 0), call.integer("rotary_embedding_dim", 0)
    if x.ndim == 4:
        tokens = x.transpose(1, 2)  # B T H K
    else:
        tokens = x.unflatten(-1, (heads, -1) if heads else (-1, size or 2 * cos.shape[-1]))
    size = size or tokens.shape[-1]
    if positions is not None:
        if positions.ndim == 1:  # the first position of all sequences
            steps = torch.arange(tokens.shape[1], device=positions.device)
            positions = positions.reshape(1, 1) + steps
        cos, sin = cos[positions.long()], sin[positions.long()]
    cos, sin = (t.reshape(-1, *t.shape[-2:])[:, :, None, : size // 2] for t in (cos, sin))
    rotated = _rotate(tokens, cos, sin, interleaved=bool(call.integer("interleaved", 0)))
    return rotated.transpose(1, 2) if x.ndim == 4 else rotated.flatten(2)


@operator("RotaryEmbedding", domain="com.microsoft")
def _microsoft_rotary(call: Call, x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return _rotary(call, x, cos, sin, positions)
