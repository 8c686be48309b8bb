"""Latency of collaborative attention with dense mixing, in different operators.

No operator takes keys that all heads share and separate values per head. The alternatives:

    broadcast   product of the mixed queries of each head and the shared keys, softmax, values
    folded      the same with heads as additional queries: one product per text, keys read once
    expanded    the shared keys copied for each head, and one fused operator of head size R
    own heads   fused attention of head size K, the baseline
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from attnserve.context import Device, Provider
from attnserve.runtime.interleaved_timer import time_functions
from attnserve.runtime.session import open_session

HEADS, SIZE = 12, 64
OWN = "own heads"

PLAIN = """
    p = Softmax<axis = -1>(s)  v_split = Reshape(v, apart)
    v_heads = Transpose<perm = [0, 2, 1, 3]>(v_split)  c = MatMul(p, v_heads)
    by_token = Transpose<perm = [0, 2, 1, 3]>(c)  y = Reshape(by_token, merged)"""
QUERIES = """
    q_tokens = Reshape(q, one_head)  q_mixed = Mul(q_tokens, m)
    k_tokens = Reshape(k, one_head)  k_turned = Transpose<perm = [0, 1, 3, 2]>(k_tokens)"""
FUSED = "y = com.microsoft.MultiHeadAttention<num_heads = {heads}, scale = 1.0>"

EXPRESSIONS: Mapping[str, str] = {
    "broadcast": QUERIES + "\n s = MatMul(q_mixed, k_turned)" + PLAIN,
    "folded": QUERIES
    + """
    q_folded = Reshape(q_mixed, one_head)  s_folded = MatMul(q_folded, k_turned)
    s = Reshape(s_folded, by_head)"""
    + PLAIN,
    "expanded": """
    q_tokens = Reshape(q, one_size)  mixing = Reshape(m, by_row)  q_mixed = Mul(q_tokens, mixing)
    q_side = Reshape(q_mixed, merged)  k_tokens = Reshape(k, one_size)
    k_all = Expand(k_tokens, heads)  k_side = Reshape(k_all, merged)
    """
    + FUSED
    + "(q_side, k_side, v)",
    OWN: FUSED + "(q, k, v)",
}


def graph(name: str, rank: int, *, heads: int = HEADS, size: int = SIZE) -> ir.Model:
    """Return a graph from q, k (B, S, R), m (H, 1, R) and v (B, S, H*V) to (B, S, H*V), in float16.

    ``OWN`` takes q and k (B, S, H*K), and no m.
    """
    own = name == OWN
    width = heads * size if own else rank
    mixing = "" if own else f", float16[{heads}, 1, {rank}] m"
    return ir.from_onnx_text(
        f"""<ir_version: 8, opset_import: ["" : 17, "com.microsoft" : 1]>
        context (float16[b, n, {width}] q, float16[b, n, {width}] k,
                 float16[b, n, {heads * size}] v{mixing}) => (float16[b, n, {heads * size}] y)
        <int64[4] apart = {{0, 0, {heads}, {size}}}, int64[3] merged = {{0, 0, -1}},
         int64[4] one_head = {{0, 1, -1, {rank}}}, int64[4] by_head = {{0, {heads}, -1, 0}},
         int64[4] one_size = {{0, 0, 1, {rank}}}, int64[2] by_row = {{{heads}, {rank}}},
         int64[4] heads = {{1, 1, {heads}, 1}}>
        {{ {EXPRESSIONS[name].replace("{heads}", str(heads))} }}"""
    )


def feeds(
    name: str, batch: int, tokens: int, rank: int, *, heads: int = HEADS, size: int = SIZE
) -> dict[str, np.ndarray]:
    """Return inputs; expressions of the same function get the same numbers."""
    random = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray:
        return random.standard_normal(shape).astype(np.float16)

    v, width = normal(batch, tokens, heads * size), heads * size if name == OWN else rank
    fed = {"v": v, "q": normal(batch, tokens, width), "k": normal(batch, tokens, width)}
    fed = fed | {"q": fed["q"] / np.float16(np.sqrt(width))}
    return fed if name == OWN else fed | {"m": normal(heads, 1, rank)}


def expressions(
    provider: Provider, shapes: Sequence[tuple[int, int]], ranks: Sequence[int], seconds: float
) -> list[dict[str, Any]]:
    """Measure all expressions in interleaved rounds, at texts x tokens and shared dimensions R."""
    rows: list[dict[str, Any]] = []
    for rank in ranks:
        sessions: dict[str, Any] = {
            name: open_session(graph(name, rank), Device(provider)) for name in EXPRESSIONS
        }
        for batch, tokens in shapes:
            runs = [s.bind(feeds(name, batch, tokens, rank)) for name, s in sessions.items()]
            times = time_functions(runs, seconds / len(ranks) / len(shapes))
            rows.append(
                {"batch": batch, "sequence": tokens, "R": rank}
                | {
                    f"{name.replace(' ', '_')}_p50_ms": round(float(np.median(ms)), 4)
                    for name, ms in zip(sessions, times, strict=True)
                }
            )
    return rows
