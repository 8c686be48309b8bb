"""Collaborate with cached keys: the cache holds the shared dimensions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from attnserve.context import ONE_THREAD
from attnserve.runtime.interface import SessionOptions
from attnserve.runtime.session import open_session
from graph_passes.errors import CannotRewrite, InvariantBroken
from graph_passes.matching.find import find_attention
from graph_passes.passes.collaborate import (
    Collaborate,
    Mixing,
    factor,
)
from graph_passes.passes.invariants import CacheShape, check_invariants, interface
from graph_passes.passes.shared_dimensions import sharing_refusal
from tests.errors import raises
from tests.graph_passes.graphs import (
    FUSED,
    PARTS,
    PLAIN_INPUT,
    SCALE,
    TENSOR,
    D,
    H,
    K,
    V,
    graph,
    only,
    renamed,
    weights,
)
from tests.graph_passes.layouts import DECODER, JOIN, KEYS, PAST, PRESENT, decoder

EXACT = H * K


PACKED = {
    "q": "\n packed = MatMul(x, Wqkv)\n biased = Add(packed, bqkv)"
         "\n q1, k1, v1 = Split <axis = -1> (biased, thirds)"
         "\n q2 = Reshape(q1, heads)\n q = Transpose <perm = [0, 2, 1, 3]> (q2)",
    "k": "\n k2 = Reshape(k1, heads)\n k = Transpose <perm = [0, 2, 1, 3]> (k2)" + JOIN,
    "v": "\n v2 = Reshape(v1, heads)\n v = Transpose <perm = [0, 2, 1, 3]> (v2)"
         "\n values = Concat <axis = 2> (pv, v)",
    "output": "\n out = MatMul(c, Wo12)",
}  # fmt: skip
COPIED = {
    "k": KEYS + "\n copy = Concat <axis = 2> (pk)\n sizes = Shape(copy)"
         "\n length = Gather(sizes, i2)\n floats = Cast <to = 1> (length)"
         "\n none = Mul(floats, zero)" + JOIN.replace("pk", "copy"),
    "mask": "\n m = Add(s, none)",
}  # fmt: skip
FUSED_DECODER: dict[str, Any] = {
    **FUSED,
    "k": DECODER["k"].replace("kT = Transpose", "unused = Transpose"),
    "context": PARTS["context"].replace(
        "MatMul(p, v)", f"Attention <scale = {SCALE}> (q, keys, values)"
    ),
}
WIDE_VALUES: dict[str, Any] = {"past": PAST.replace(f"{V}] pv", f"{K}] pv"),
               "present": PRESENT.replace(f"{V}] values", f"{K}] values")}  # fmt: skip


WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "packed": {**PACKED, **WIDE_VALUES},
    "no query bias": {"q": PARTS["q"].replace("Add(bq, q0)", "Identity(q0)")},
    "a copied past, whose length is read": COPIED,
    "the length of the present is read": {
        "mask": "\n sizes = Shape <start = 2, end = 3> (keys)\n floats = Cast <to = 1> (sizes)"
                "\n none = Mul(floats, zero)\n m = Add(s, none)"
    },
    "the length is a slice of the present's shape": {
        "mask": "\n sizes = Shape(keys)\n length = Slice(sizes, a2, a3)"
                "\n floats = Cast <to = 1> (length)\n none = Mul(floats, zero)"
                "\n m = Add(s, none)"
    },
    "the length is a slice along an axis": {
        "mask": "\n sizes = Shape(keys)\n length = Slice(sizes, a2, a3, a0)"
                "\n floats = Cast <to = 1> (length)\n none = Mul(floats, zero)"
                "\n m = Add(s, none)"
    },
    "a bias is as long as the cached values": {
        "mask": "\n sizes = Shape(values)\n length = Gather(sizes, i2)"
                "\n places = Range(i0, length, i1)\n bias = Cast <to = 1> (places)"
                "\n m = Add(s, bias)"
    },
}  # fmt: skip


def collaborate(model: ir.Model, rank: int) -> ir.Model:
    block = only(model)
    return Collaborate.with_factors({block.name: factor(block, rank)}, cache=True)(model).model


def decode(model: ir.Model, steps: Sequence[int] = (5, 1, 1, 1)) -> list[np.ndarray]:
    """The outputs of a prefill and of single tokens, with the cache of the step before."""
    rng = np.random.default_rng(3)
    session = open_session(model, ONE_THREAD, SessionOptions(optimize=False))
    shapes = {value.name: value.shape for value in session.get_inputs()}
    past = {name: np.zeros((2, shapes[name][1], 0, shapes[name][3]), np.float32)
            for name in ("pk", "pv")}  # fmt: skip
    outputs: list[np.ndarray] = []
    for length in steps:
        x = rng.standard_normal((2, length, D)).astype(np.float32)
        out, keys, values = session.run(None, {"x": x, **past})
        past = {"pk": keys, "pv": values}
        outputs.append(np.asarray(out))
    return outputs


def difference(model: ir.Model, other: ir.Model) -> float:
    pairs = zip(decode(model), decode(other), strict=True)
    return max(float(np.abs(a - b).max()) for a, b in pairs)


def shapes(model: ir.Model) -> dict[str, list[str]]:
    values = (*model.graph.inputs, *model.graph.outputs)
    return {value.name or "": [str(dim) for dim in value.shape or ()] for value in values}


@pytest.mark.parametrize("way", WAYS)
def test_collaborate_cache_at_full_rank_keeps_decoded_outputs(way: str) -> None:
    assert difference(decoder(**WAYS[way]), collaborate(decoder(**WAYS[way]), EXACT)) <= 1e-4


@pytest.mark.parametrize("rank", [1, 5, EXACT])
@pytest.mark.parametrize("way", WAYS)
def test_collaborate_cache_changes_only_the_cache_shapes(way: str, rank: int) -> None:
    before = shapes(decoder(**WAYS[way]))
    after = shapes(collaborate(decoder(**WAYS[way]), rank))
    width = rank + (0 if way == "no query bias" else H)
    assert after == {
        **before,
        "pk": ["batch", "1", "past", str(width)],
        "keys": ["batch", "1", "total", str(width)],
    }


@pytest.mark.parametrize("way", WAYS)
def test_collaborate_cache_block_is_certified(way: str) -> None:
    block = only(collaborate(decoder(**WAYS[way]), 5))
    assert (block.form, block.position, block.head_size) == ("collaborative", "none", 5)
    assert block.scale == pytest.approx(SCALE, rel=1e-6)
    assert block.k.past is not None and block.k.past.value.name == "pk"
    assert (block.content is not None) == (way != "no query bias")
    if block.content is not None:
        assert block.content.past is not None and block.content.past.value.name == "pk"
    refusal = sharing_refusal(block, caches=True)
    assert refusal and refusal.code == "collaborative"


def test_collaborate_cache_error_decreases_with_rank() -> None:
    errors = [difference(decoder(), collaborate(decoder(), R)) for R in (1, 4, 8, EXACT)]
    assert errors == sorted(errors, reverse=True)
    assert errors[0] > 10 * errors[-1]


def test_collaborate_cache_packed_values_get_own_product() -> None:
    """The product computes new values only; past values are inputs."""
    model = collaborate(decoder(**PACKED, **WIDE_VALUES), 5)
    assert "Wqkv" not in model.graph.initializers
    block = only(model)
    np.testing.assert_allclose(block.v.matrix(), weights()["Wqkv"][:, 24:], atol=1e-6)
    assert block.v.past is not None


def test_collaborate_cache_fused_operator_is_decomposed() -> None:
    model = decoder(opset=23, **FUSED_DECODER)
    (block,) = find_attention(model).blocks
    assert block.softmax is None
    assert difference(decoder(opset=23, **FUSED_DECODER), collaborate(model, EXACT)) <= 1e-4


def test_collaborate_cache_not_requested_is_refused() -> None:
    model = decoder()
    block = only(model)
    assert sharing_refusal(block, caches=True) is None
    with raises(CannotRewrite, "rewrite.cached"):
        Collaborate({block.name: Mixing(rank=4)})(model)
    assert shapes(model) == shapes(decoder())


SINGLE_HEAD = {
    "past": PAST.replace(f"{H},", "1,"),
    "present": PRESENT.replace(f"{H},", "1,"),
    "q": "\n q0 = MatMul(x, Wk1)\n q1 = Add(q0, bk1)\n q2 = Reshape(q1, one_head)"
         "\n q = Transpose <perm = [0, 2, 1, 3]> (q2)",
    "k": "\n k0 = MatMul(x, Wk1)\n k2 = Reshape(k0, one_head)"
         "\n k = Transpose <perm = [0, 2, 1, 3]> (k2)" + JOIN,
    "v": "\n v0 = MatMul(x, Wv1)\n v2 = Reshape(v0, one_v_head)"
         "\n v = Transpose <perm = [0, 2, 1, 3]> (v2)\n values = Concat <axis = 2> (pv, v)",
    "output": "\n o = MatMul(c, Wo1)\n out = Add(o, bo)",
}  # fmt: skip

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a single head": (SINGLE_HEAD, "single_head"),
    "present keys that are not returned": (
        {"present": f"float[batch, {H}, total, {V}] values"},
        "cache_present",
    ),
    "keys joined before their heads are apart": (
        {
            "past": PAST.replace(f"{H}, past, {K}", f"past, {H}, {K}"),
            "present": PRESENT.replace(f"{H}, total, {K}", f"total, {H}, {K}"),
            "k": "\n k0 = MatMul(x, Wk)\n k2 = Reshape(k0, heads)"
                 "\n keys = Concat <axis = 1> (pk, k2)"
                 "\n kT = Transpose <perm = [0, 2, 3, 1]> (keys)",
        },
        "cache_layout",
    ),
    "a cache of fixed length": (
        {"past": PAST.replace("past", "4")},
        "cache_fixed",
    ),
    "past keys that are read elsewhere": (
        {"mask": "\n size = ReduceSum <keepdims = 0> (pk)\n m = Add(s, size)"},
        "cache_shared",
    ),
    "a head size that is read": (
        {"mask": "\n sizes = Shape(keys)\n wide = Gather(sizes, i3)\n floats = Cast <to = 1> (wide)"
                 "\n m = Add(s, floats)"},
        "cache_shared",
    ),
    "a shape of the head size alone": (
        {"mask": "\n wide = Shape <start = 3> (keys)\n floats = Cast <to = 1> (wide)"
                 "\n m = Add(s, floats)"},
        "cache_shared",
    ),
    "a slice of the shape with the head size": (
        {"mask": "\n sizes = Shape(keys)\n wide = Slice(sizes, a3, n12)"
                 "\n floats = Cast <to = 1> (wide)\n m = Add(s, floats)"},
        "cache_shared",
    ),
    "any size, which an input picks": (
        {"past": f"{PAST}, int64 which",
         "mask": "\n sizes = Shape(keys)\n any = Gather(sizes, which)"
                 "\n floats = Cast <to = 1> (any)\n m = Add(s, floats)"},
        "cache_shared",
    ),
    "q/k norm": (
        {"scores": "\n q9 = LayerNormalization(q, k_ones)\n s0 = MatMul(q9, kT)"
                   "\n s = Mul(s0, scale)"},
        "qk_norm",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_collaborate_cache_unsupported_is_refused(case: str) -> None:
    parts, code = REFUSED[case]
    model = decoder(**parts)
    (block,) = find_attention(model).blocks
    refusal = sharing_refusal(block, caches=True)
    assert refusal and refusal.code == code
    with raises(CannotRewrite, f"rewrite.{code}"):
        Collaborate({block.name: Mixing(rank=4, cache=True)})(model)
    assert shapes(model) == shapes(decoder(**parts))


def test_collaborate_cache_of_an_outer_graph_is_refused() -> None:
    """The inputs of a graph do not change with the body of one of its nodes."""
    inside = renamed("".join((PARTS | DECODER).values()), "_yes")
    body = f"""
    out = If (flag) <
        then_branch = yes () => ({TENSOR} out_yes) {{{inside}
        }},
        else_branch = no () => ({TENSOR} out_no) {{
        out_no = Identity(x)
        }}>"""
    model = graph(body, inputs=f"{PLAIN_INPUT}, {PAST}, bool flag")
    (block,) = find_attention(model).blocks
    refusal = sharing_refusal(block, caches=True)
    assert refusal and refusal.code == "cache_scope"


def test_interface_with_caches_accepts_only_named_caches() -> None:
    model = decoder()
    before = interface(model)
    collaborate(model, 5)
    new = CacheShape(1, 5 + H)
    caches = {"pk": new, "keys": new}
    check_invariants(before.with_caches(caches), model, after="Collaborate")
    wrong_caches: list[dict[str, CacheShape]] = [
        {}, {"pk": new}, {**caches, "keys": CacheShape(1, 5)}, {**caches, "pv": new},
        {**caches, "pk": CacheShape(H, 5 + H)},
    ]  # fmt: skip
    for wrong in wrong_caches:
        with raises(InvariantBroken, "internal.invariant", "became"):
            check_invariants(before.with_caches(wrong), model, after="Collaborate")


def test_collaborate_cache_sparse_mixing_is_refused() -> None:
    model = decoder()
    (block,), _ = find_attention(model)
    with raises(CannotRewrite, "rewrite.cache_sparse"):
        Collaborate({block.name: Mixing(rank=5, head_size=3, cache=True)})(model)
