"""Operators that hold a whole attention: each form of each operand, text in, certified out."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir
import pytest

from graph_passes.blocks import (
    Capped,
    Causal,
    FullLengths,
    KeyLengths,
    KeyMask,
    LogitStep,
    Mask,
    PositionBias,
    Scaled,
)
from graph_passes.matching.find import find_attention
from graph_passes.matching.operators import FUSED_OPERATORS, OPERATORS
from graph_passes.passes.decompose_attention import why_not
from tests.graph_passes.graphs import PLAIN_INPUT, D, H, K, V, graph, only, reasons, weights

DEFAULT = K**-0.5

GROUPS, GROUPED_HEADS, GROUPED_SIZE = 2, 4, 16
"""GroupQueryAttention rotates heads whose size is a multiple of 16 alone."""

rng = np.random.default_rng(5)


def normal(*shape: int) -> np.ndarray:
    return (rng.standard_normal(shape) / 2).astype(np.float32)


def angles(rows: int, half: int) -> tuple[np.ndarray, np.ndarray]:
    turns = rng.uniform(0, 6, (rows, half))
    return np.cos(turns).astype(np.float32), np.sin(turns).astype(np.float32)


COS, SIN = angles(32, GROUPED_SIZE // 2)
CONSTANTS = {
    "Wqkv_v": np.concatenate([weights()[name] for name in ("Wq", "Wk", "Wv")], axis=1),
    "bqkv_v": np.concatenate([weights()[name] for name in ("bq", "bk", "bv")]),
    "kv_packed": np.array([0, 0, H, 2, K], np.int64),
    "qkv_packed": np.array([0, 0, H, 3, K], np.int64),
    "Wkv": normal(D, 2 * H * K),
    "Wq_grouped": normal(D, GROUPED_HEADS * GROUPED_SIZE),
    "Wk_grouped": normal(D, GROUPS * GROUPED_SIZE),
    "Wv_grouped": normal(D, GROUPS * GROUPED_SIZE),
    "Wo_grouped": normal(GROUPED_HEADS * GROUPED_SIZE, D),
    "Wpacked": normal(D, (GROUPED_HEADS + 2 * GROUPS) * GROUPED_SIZE),
    "cos": COS,
    "sin": SIN,
    "q_norm": rng.uniform(0.5, 2, GROUPED_SIZE).astype(np.float32),
    "Wq16": normal(D, 4 * K),
    "Wk8": normal(D, 2 * K),
    "Wv4": normal(D, 2 * V),
    "Wo8": normal(4 * V, D),
    "fixed_lengths": np.array([2, 3], np.int32),
}

MERGED = """
        q0 = MatMul(x, Wq)
        q = Add(q0, bq)
        k0 = MatMul(x, Wk)
        k = Add(k0, bk)
        v0 = MatMul(x, Wv)
        v = Add(v0, bv)"""
NO_BIAS = """
        q = MatMul(x, Wq)
        k = MatMul(x, Wk)
        v = MatMul(x, Wv)"""
APART = f"""{MERGED}
        q2 = Reshape(q, heads)
        q4 = Transpose <perm = [0, 2, 1, 3]> (q2)
        k2 = Reshape(k, heads)
        k4 = Transpose <perm = [0, 2, 1, 3]> (k2)
        v2 = Reshape(v, v_heads)
        v4 = Transpose <perm = [0, 2, 1, 3]> (v2)"""
CROSS = """
        q = MatMul(x, Wq)
        k = MatMul(y, Wk)
        v = MatMul(y, Wv)"""
OUTPUT = "\n        o = MatMul(c, Wo)\n        out = Add(o, bo)"
OUTPUT12 = "\n        out = MatMul(c, Wo12)"
MERGE = "\n        c1 = Transpose <perm = [0, 2, 1, 3]> (c0)\n        c = Reshape(c1, merge)"
CACHED = f"float[batch, {H}, past, {K}] pk, float[batch, {H}, past, {V}] pv"
MEMORY = f"float[batch, memory, {D}] y"


@dataclass(frozen=True)
class Case:
    """A graph in text, and what must be read of it.

    ``runs`` is False where no ONNX Runtime has a kernel for it on the CPU.
    """

    body: str
    inputs: str = PLAIN_INPUT
    opset: int = 23
    scale: float = DEFAULT
    steps: tuple[type[LogitStep], ...] = ()
    heads: tuple[int, int] = (H, H)
    sizes: tuple[int, int] = (K, V)
    kind: str = "self"
    position: str = "none"
    past: bool = False
    output: bool = True
    constants: dict[str, np.ndarray] = field(default_factory=dict)
    runs: bool = True

    def model(self) -> ir.Model:
        text = self.body if "out =" in self.body else f"{self.body}{OUTPUT}"
        constants = CONSTANTS | self.constants
        return graph(text, inputs=self.inputs, opset=self.opset, constants=constants)


def onnx(attributes: str = "", operands: str = "q, k, v", *, before: str = MERGED) -> str:
    """ai.onnx Attention with its heads side by side."""
    given = ", ".join(filter(None, ("q_num_heads = 3, kv_num_heads = 3", attributes)))
    return f"{before}\n        c = Attention <{given}> ({operands})"


def onnx_apart(attributes: str = "", operands: str = "q4, k4, v4") -> str:
    """ai.onnx Attention with its heads apart."""
    given = f" <{attributes}>" if attributes else ""
    return f"{APART}\n        c0 = Attention{given} ({operands}){MERGE}"


ONNX = {
    "heads side by side": Case(onnx()),
    "heads side by side without biases": Case(onnx(before=NO_BIAS)),
    "heads apart": Case(onnx_apart()),
    "a scale of its own": Case(onnx("scale = 0.37"), scale=0.37),
    "a scale of its own, heads apart": Case(onnx_apart("scale = 0.37"), scale=0.37),
    "scaled queries and a scale": Case(
        onnx("scale = 0.37", "q9, k, v", before=f"{MERGED}\n q9 = Mul(q, root)"),
        scale=0.37 * float(np.sqrt(0.37)),
    ),
    "causal": Case(onnx("is_causal = 1"), steps=(Causal,)),
    "boolean mask": Case(
        onnx(operands="q, k, v, mask"),
        f"{PLAIN_INPUT}, bool[batch, 1, sequence, sequence] mask",
        steps=(Mask,),
    ),
    "boolean mask of two axes": Case(
        onnx(operands="q, k, v, mask"),
        f"{PLAIN_INPUT}, bool[sequence, sequence] mask",
        steps=(Mask,),
    ),
    "additive mask": Case(
        onnx_apart(operands="q4, k4, v4, mask"),
        f"{PLAIN_INPUT}, float[batch, 1, sequence, sequence] mask",
        steps=(PositionBias,),
    ),
    "bias by head": Case(
        onnx_apart(operands="q4, k4, v4, mask"),
        f"{PLAIN_INPUT}, float[1, {H}, sequence, sequence] mask",
        steps=(PositionBias,),
        position="bias",
    ),
    "mask and causal": Case(
        onnx("is_causal = 1", "q, k, v, mask"),
        f"{PLAIN_INPUT}, bool[batch, 1, sequence, sequence] mask",
        steps=(Causal, Mask),
    ),
    "soft cap": Case(onnx("softcap = 3.0"), steps=(Scaled, Capped, Scaled)),
    "soft cap and mask": Case(
        onnx("softcap = 3.0", "q, k, v, mask"),
        f"{PLAIN_INPUT}, bool[batch, 1, sequence, sequence] mask",
        steps=(Scaled, Capped, Scaled, Mask),
    ),
    "grouped heads": Case(
        "\n q = MatMul(x, Wq16)\n k = MatMul(x, Wk8)\n v = MatMul(x, Wv4)"
        "\n c = Attention <q_num_heads = 4, kv_num_heads = 2> (q, k, v)\n out = MatMul(c, Wo8)",
        heads=(4, 2),
    ),
    "one key/value head": Case(
        "\n q = MatMul(x, Wq)\n k = MatMul(x, Wk1)\n v = MatMul(x, Wv1)"
        "\n c = Attention <q_num_heads = 3, kv_num_heads = 1> (q, k, v)",
        heads=(H, 1),
    ),
    "cross attention": Case(onnx(before=CROSS), f"{PLAIN_INPUT}, {MEMORY}", kind="cross"),
    "past": Case(
        onnx(operands="q, k, v, , pk, pv").replace("c = A", "c, present_k, present_v = A"),
        f"{PLAIN_INPUT}, {CACHED}",
        past=True,
    ),
    "past, heads apart and a mask": Case(
        onnx_apart(operands="q4, k4, v4, mask, pk, pv").replace("c0 = A", "c0, nk, nv = A"),
        f"{PLAIN_INPUT}, float[batch, 1, sequence, total] mask, {CACHED}",
        past=True,
        steps=(PositionBias,),
    ),
    "past and causal": Case(
        onnx("is_causal = 1", "q, k, v, , pk, pv").replace("c = A", "c, nk, nv = A"),
        f"{PLAIN_INPUT}, {CACHED}",
        past=True,
        steps=(Causal,),
    ),
    "no output projection": Case(
        onnx_apart().replace(MERGE, "") + "\n out = Abs(c0)", output=False
    ),
    "lengths of the keys": Case(
        onnx_apart(operands="q4, k4, v4, , , , lengths"),
        f"{PLAIN_INPUT}, int64[batch] lengths",
        opset=24,
        steps=(KeyLengths,),
    ),
}


def microsoft(attributes: str, operands: str, *, weight: str = "Wqkv_v") -> str:
    given = ", ".join(filter(None, ("num_heads = 3", attributes)))
    return f"\n        c = com.microsoft.Attention <{given}> (x, {weight}{operands})"


SIZES = "qkv_hidden_sizes = [12, 12, 6]"
MICROSOFT = {
    "plain": Case(microsoft(SIZES, ", bqkv_v"), opset=17),
    "without a bias": Case(microsoft(SIZES, ""), opset=17),
    "one size for all": Case(
        microsoft("", ", bqkv", weight="Wqkv") + OUTPUT12,
        opset=17,
        sizes=(K, K),
    ),
    "a scale of its own": Case(microsoft(f"{SIZES}, scale = 0.37", ", bqkv_v"), scale=0.37),
    "unidirectional": Case(microsoft(f"{SIZES}, unidirectional = 1", ", bqkv_v"), steps=(Causal,)),
    "mask by keys": Case(
        microsoft(SIZES, ", bqkv_v, mask"),
        f"{PLAIN_INPUT}, int32[batch, sequence] mask",
        steps=(KeyMask,),
    ),
    "mask by keys and a filter of its own": Case(
        microsoft(f"{SIZES}, mask_filter_value = -3.0", ", bqkv_v, mask"),
        f"{PLAIN_INPUT}, int32[batch, sequence] mask",
        steps=(KeyMask,),
    ),
    "mask by query": Case(
        microsoft(SIZES, ", bqkv_v, mask"),
        f"{PLAIN_INPUT}, int32[batch, sequence, sequence] mask",
        steps=(KeyMask,),
    ),
    "mask by lengths": Case(
        microsoft(SIZES, ", bqkv_v, mask"),
        f"{PLAIN_INPUT}, int32[batch] mask",
        steps=(KeyLengths,),
    ),
    "bias of the logits": Case(
        microsoft(SIZES, ", bqkv_v, , , bias"),
        f"{PLAIN_INPUT}, float[batch, {H}, sequence, sequence] bias",
        steps=(PositionBias,),
        position="bias",
    ),
    "mask by keys and a bias": Case(
        microsoft(f"{SIZES}, unidirectional = 1", ", bqkv_v, mask, , bias"),
        f"{PLAIN_INPUT}, int32[batch, sequence] mask, float[1, {H}, sequence, sequence] bias",
        steps=(Causal, KeyMask, PositionBias),
        position="bias",
    ),
    "past": Case(
        microsoft("", ", bqkv, , past", weight="Wqkv").replace("c =", "c, present =") + OUTPUT12,
        f"{PLAIN_INPUT}, float[2, batch, {H}, past, {K}] past",
        past=True,
        sizes=(K, K),
    ),
    "past and unidirectional": Case(
        microsoft("unidirectional = 1", ", bqkv, , past", weight="Wqkv").replace(
            "c =", "c, present ="
        )
        + OUTPUT12,
        f"{PLAIN_INPUT}, float[2, batch, {H}, past, {K}] past",
        past=True,
        sizes=(K, K),
        steps=(Causal,),
    ),
}


def multi(attributes: str = "", operands: str = "q, k, v", *, before: str = NO_BIAS) -> str:
    given = ", ".join(filter(None, ("num_heads = 3", attributes)))
    return f"{before}\n        c = com.microsoft.MultiHeadAttention <{given}> ({operands})"


SAME_SIZES = "\n q = MatMul(x, Wq)\n k = MatMul(x, Wk)\n v = MatMul(x, Wq)"
"""MultiHeadAttention takes values of another size only where they are side by side."""
KEYS_APART = """
        q = MatMul(x, Wq)
        k = MatMul(y, Wk)
        v = MatMul(y, Wq)
        k2 = Reshape(k, heads)
        k4 = Transpose <perm = [0, 2, 1, 3]> (k2)
        v2 = Reshape(v, heads)
        v4 = Transpose <perm = [0, 2, 1, 3]> (v2)"""
SAME_CACHE = f"float[batch, {H}, past, {K}] pk, float[batch, {H}, past, {K}] pv"

MULTI = {
    "heads side by side": Case(multi(), opset=17),
    "biases before": Case(multi(before=MERGED)),
    "bias inside": Case(multi(operands="q, k, v, bqkv_v")),
    "a scale of its own": Case(multi("scale = 0.37"), scale=0.37),
    "unidirectional": Case(multi("unidirectional = 1"), steps=(Causal,)),
    "mask by keys": Case(
        multi(operands="q, k, v, , mask"),
        f"{PLAIN_INPUT}, int32[batch, sequence] mask",
        steps=(KeyMask,),
    ),
    "mask by query": Case(
        multi(operands="q, k, v, , mask"),
        f"{PLAIN_INPUT}, int32[batch, sequence, sequence] mask",
        steps=(KeyMask,),
    ),
    "mask by lengths": Case(
        multi(operands="q, k, v, , mask"),
        f"{PLAIN_INPUT}, int32[batch] mask",
        steps=(KeyLengths,),
    ),
    "bias of the logits": Case(
        multi(operands="q, k, v, bqkv_v, , bias"),
        f"{PLAIN_INPUT}, float[1, {H}, sequence, sequence] bias",
        steps=(PositionBias,),
        position="bias",
    ),
    "cross attention": Case(multi(before=CROSS), f"{PLAIN_INPUT}, {MEMORY}", kind="cross"),
    "cross attention with its mask": Case(
        multi(operands="q, k, v, bqkv_v, mask", before=CROSS),
        f"{PLAIN_INPUT}, {MEMORY}, int32[batch, memory] mask",
        kind="cross",
        steps=(KeyMask,),
    ),
    "keys and values apart": Case(
        multi(operands="q, k4, v4", before=KEYS_APART) + OUTPUT12,
        f"{PLAIN_INPUT}, {MEMORY}",
        kind="cross",
        sizes=(K, K),
    ),
    "keys and values apart, and a bias for the queries": Case(
        multi(operands="q, k4, v4, bqkv", before=KEYS_APART) + OUTPUT12,
        f"{PLAIN_INPUT}, {MEMORY}",
        kind="cross",
        sizes=(K, K),
    ),
    "keys and values packed": Case(
        multi(
            operands="q, kv",
            before="\n q = MatMul(x, Wq)\n kv0 = MatMul(y, Wkv)\n kv = Reshape(kv0, kv_packed)",
        )
        + OUTPUT12,
        f"{PLAIN_INPUT}, {MEMORY}",
        kind="cross",
        sizes=(K, K),
        runs=False,
    ),
    "queries, keys and values packed": Case(
        multi(operands="qkv", before="\n qkv0 = MatMul(x, Wqkv)\n qkv = Reshape(qkv0, qkv_packed)")
        + OUTPUT12,
        sizes=(K, K),
        runs=False,
    ),
    "past": Case(
        multi(operands="q, k, v, , , , pk, pv", before=SAME_SIZES).replace("c =", "c, nk, nv =")
        + OUTPUT12,
        f"{PLAIN_INPUT}, {SAME_CACHE}",
        past=True,
        sizes=(K, K),
    ),
    "past and unidirectional": Case(
        multi("unidirectional = 1", "q, k, v, bqkv, , , pk, pv", before=SAME_SIZES).replace(
            "c =", "c, nk, nv ="
        )
        + OUTPUT12,
        f"{PLAIN_INPUT}, {SAME_CACHE}",
        past=True,
        sizes=(K, K),
        steps=(Causal,),
    ),
    "past and a mask by keys": Case(
        multi(operands="q, k, v, , mask, , pk, pv", before=SAME_SIZES).replace("c =", "c, nk, nv =")
        + OUTPUT12,
        f"{PLAIN_INPUT}, int32[batch, total] mask, {SAME_CACHE}",
        past=True,
        sizes=(K, K),
        steps=(KeyMask,),
    ),
    "keys and values handed in": Case(
        "\n q = MatMul(x, Wq)\n c = com.microsoft.MultiHeadAttention <num_heads = 3> (q, pk, pv)"
        + OUTPUT12,
        f"{PLAIN_INPUT}, {SAME_CACHE}",
        kind="cross",
        past=True,
        sizes=(K, K),
    ),
}

GROUPED_CACHE = (
    f"int32[batch] lengths, int32 total, float[batch, {GROUPS}, past, {GROUPED_SIZE}] pk, "
    f"float[batch, {GROUPS}, past, {GROUPED_SIZE}] pv"
)
GROUPED_INPUT = f"{PLAIN_INPUT}, {GROUPED_CACHE}"
NO_CACHE = f"{PLAIN_INPUT}, int32[batch] lengths, int32 total"


GROUPED_PARTS = """
        q = MatMul(x, Wq_grouped)
        k = MatMul(x, Wk_grouped)
        v = MatMul(x, Wv_grouped)"""

OWN_PARTS = GROUPED_PARTS.replace("Wk_grouped", "Wk_own").replace("Wv_grouped", "Wv_own")


def grouped(
    attributes: str = "",
    operands: str = "q, k, v, pk, pv, lengths, total",
    *,
    before: str = GROUPED_PARTS,
) -> str:
    given = ", ".join(filter(None, ("num_heads = 4, kv_num_heads = 2", attributes)))
    return (
        f"{before}\n c, nk, nv = com.microsoft.GroupQueryAttention <{given}> ({operands})"
        "\n out = MatMul(c, Wo_grouped)"
    )


def grouped_case(body: str, inputs: str = GROUPED_INPUT, **changes: object) -> Case:
    known: dict[str, object] = {
        "scale": GROUPED_SIZE**-0.5,
        "heads": (GROUPED_HEADS, GROUPS),
        "sizes": (GROUPED_SIZE, GROUPED_SIZE),
        "steps": (FullLengths, Causal),
        "past": True,
    }
    return Case(body, inputs, **(known | changes))  # type: ignore[arg-type]


GROUPED = {
    "heads side by side": grouped_case(grouped()),
    "no cache": grouped_case(
        grouped(operands="q, k, v, , , lengths, total"), NO_CACHE, past=False
    ),
    "a scale of its own": grouped_case(grouped("scale = 0.37"), scale=0.37),
    "packed": grouped_case(
        grouped(
            operands="qkv, , , pk, pv, lengths, total", before="\n qkv = MatMul(x, Wpacked)"
        )
    ),
    "rotary": grouped_case(
        grouped("do_rotary = 1", "q, k, v, pk, pv, lengths, total, cos, sin"), position="rope"
    ),
    "rotary, interleaved": grouped_case(
        grouped(
            "do_rotary = 1, rotary_interleaved = 1", "q, k, v, pk, pv, lengths, total, cos, sin"
        ),
        position="rope",
    ),
    "rotary without a cache": grouped_case(
        grouped("do_rotary = 1", "q, k, v, , , lengths, total, cos, sin"),
        NO_CACHE,
        past=False,
        position="rope",
    ),
    "rotary with positions of its own": grouped_case(
        grouped("do_rotary = 1", "q, k, v, pk, pv, lengths, total, cos, sin, where"),
        f"{GROUPED_INPUT}, int64[batch, sequence] where",
        position="rope",
    ),
    "rotary and packed": grouped_case(
        grouped(
            "do_rotary = 1",
            "qkv, , , pk, pv, lengths, total, cos, sin",
            before="\n qkv = MatMul(x, Wpacked)",
        ),
        position="rope",
    ),
    "soft cap": grouped_case(
        grouped("softcap = 3.0"), steps=(Scaled, Capped, Scaled, FullLengths, Causal)
    ),
    "bias of the logits": grouped_case(
        grouped(operands="q, k, v, pk, pv, lengths, total, , , , bias"),
        f"{GROUPED_INPUT}, float[batch, 4, sequence, total] bias",
        steps=(FullLengths, Causal, PositionBias),
        position="bias",
    ),
    "all key/value heads of their own": grouped_case(
        grouped(before=OWN_PARTS)
        .replace("kv_num_heads = 2", "kv_num_heads = 4"),
        GROUPED_INPUT.replace(f"[batch, {GROUPS}, past", "[batch, 4, past"),
        heads=(4, 4),
        constants={"Wk_own": normal(D, 64), "Wv_own": normal(D, 64)},
    ),
}  # fmt: skip

READ = (
    {f"ai.onnx: {name}": case for name, case in ONNX.items()}
    | {f"Attention: {name}": case for name, case in MICROSOFT.items()}
    | {f"MultiHeadAttention: {name}": case for name, case in MULTI.items()}
    | {f"GroupQueryAttention: {name}": case for name, case in GROUPED.items()}
)


@pytest.mark.parametrize("name", READ)
def test_operator_is_read_as_what_it_is(name: str) -> None:
    case = READ[name]
    model = case.model()
    block = only(model) if case.runs else find_attention(model)[0][0]
    assert (block.num_heads, block.num_kv_heads) == case.heads
    assert (block.head_size, block.v_head_size) == case.sizes
    assert block.scale == pytest.approx(case.scale, rel=1e-6)
    assert (block.input_size, block.kind, block.position) == (D, case.kind, case.position)
    assert tuple(type(step) for step in block.steps) == case.steps
    assert (block.k.past is not None, block.output is not None) == (case.past, case.output)
    assert (block.logits, block.probabilities, block.form) == (None, None, "standard")


@pytest.mark.parametrize("name", [name for name, case in READ.items() if not case.runs])
def test_operator_that_no_cpu_runs_is_missed_for_that_reason(name: str) -> None:
    (said,) = reasons(READ[name].model())
    assert "not certified" in said


@pytest.mark.parametrize("name", READ)
def test_heads_are_those_of_the_weights(name: str) -> None:
    """Where the graph names Wq, the heads are its columns."""
    (block,), _ = find_attention(READ[name].model())
    if block.q.weight is not None and block.q.weight.name == "Wq" and block.q.rotary_terms == ():
        expected = weights()["Wq"].reshape(D, H, K).transpose(1, 0, 2)
        np.testing.assert_array_equal(block.q.heads(), expected)
    assert block.q.num_heads == block.k.num_heads == block.v.num_heads


def test_weight_inside_an_operator_is_three_projections() -> None:
    block = only(MICROSOFT["plain"].model())
    assert block.q.weight is block.k.weight is block.v.weight
    np.testing.assert_array_equal(block.k.heads()[1], weights()["Wk"][:, K : 2 * K])
    np.testing.assert_array_equal(block.v.heads()[2], weights()["Wv"][:, 2 * V :])
    np.testing.assert_array_equal(block.q.offset, weights()["bq"].reshape(H, K))
    assert (block.q.layout, block.q.output) == ("inside", None)


def test_packed_projection_of_grouped_heads_is_cut_where_it_should_be() -> None:
    block = only(GROUPED["packed"].model())
    starts = [int(part.columns.min()) for part in (block.q, block.k, block.v)]
    heads = GROUPED_HEADS * GROUPED_SIZE
    assert starts == [0, heads, heads + GROUPS * GROUPED_SIZE]


def test_causal_mask_ends_with_the_keys_where_there_is_a_past() -> None:
    for case in (ONNX["past and causal"], MULTI["past and unidirectional"]):
        assert only(case.model()).steps == (Causal(ends_together=True),)
    assert only(ONNX["causal"].model()).steps == (Causal(ends_together=False),)


def test_fill_of_a_mask_is_the_operators_own() -> None:
    (given,) = only(MICROSOFT["mask by keys and a filter of its own"].model()).steps
    (default,) = only(MICROSOFT["mask by keys"].model()).steps
    assert isinstance(given, KeyMask) and isinstance(default, KeyMask)
    assert (given.fill, default.fill) == (-3.0, -10000.0)


def test_mask_without_a_declared_type_is_still_known_as_boolean() -> None:
    case = Case(
        onnx(operands="q, k, v, seen", before=f"{MERGED}\n seen = Greater(mask, low)"),
        f"{PLAIN_INPUT}, float[batch, 1, sequence, sequence] mask",
    )
    (step,) = only(case.model()).steps
    assert isinstance(step, Mask) and step.value.dtype is None


FED = f"float[{D}, {H * (2 * K + V)}] fed, float[{H * (2 * K + V)}] fed_bias"

MISSED: dict[str, tuple[Case, str]] = {
    "ai.onnx without values": (
        Case(onnx(operands="q, k")),
        "Attention lacks queries, keys or values",
    ),
    "ai.onnx that cannot split its heads": (
        Case(onnx().replace("q_num_heads = 3", "q_num_heads = 5")),
        "Attention cannot split a query (2, 5, 12) into 5 heads",
    ),
    "ai.onnx without its numbers of heads": (
        Case(f"{MERGED}\n c = Attention (q, k, v)"),
        "Attention cannot split a query (2, 5, 12) into 0 heads",
    ),
    "ai.onnx, causal over caches of different lengths": (
        Case(
            onnx_apart("is_causal = 1", "q4, k4, v4, , , , lengths"),
            f"{PLAIN_INPUT}, int64[batch] lengths",
            opset=24,
        ),
        "Attention is causal from the end of caches of different lengths",
    ),
    "ai.onnx with more query heads than its groups share": (
        Case(
            "\n q = MatMul(x, Wq)\n k = MatMul(x, Wk8)\n v = MatMul(x, Wv4)"
            "\n c = Attention <q_num_heads = 3, kv_num_heads = 2> (q, k, v)",
        ),
        "3 query heads cannot share 2 key heads",
    ),
    "ai.onnx over its own input": (
        Case("\n c = Attention <q_num_heads = 3, kv_num_heads = 3> (x, x, x)"
             "\n out = MatMul(c, Wo12)"),
        "the query is 'x', an input of the graph: not the output of a projection",
    ),
    "Attention with a weight that is fed": (
        Case(microsoft(SIZES, ", bqkv_v", weight="fed"), f"{PLAIN_INPUT}, {FED}"),
        "Attention has projections that are not constant",
    ),
    "Attention with a bias that is fed": (
        Case(microsoft(SIZES, ", fed_bias"), f"{PLAIN_INPUT}, {FED}"),
        "Attention has projections that are not constant",
    ),
    "Attention that rotates its heads": (
        Case(microsoft(f"{SIZES}, do_rotary = 1", ", bqkv_v")),
        "Attention rotates its heads, or shares the buffer of its cache",
    ),
    "Attention with sizes that do not fit": (
        Case(microsoft("qkv_hidden_sizes = [12, 12, 12]", ", bqkv_v")),
        "Attention splits 30 columns into [12, 12, 12]",
    ),
    "Attention with heads that do not fit": (
        Case(microsoft(SIZES, ", bqkv_v").replace("num_heads = 3", "num_heads = 5")),
        "Attention cannot split a query",
    ),
    "Attention with a mask of four axes": (
        Case(microsoft(SIZES, ", bqkv_v, mask"), f"{PLAIN_INPUT}, int32[batch, 1, 9, 9] mask"),
        "Attention has a mask of shape (2, 1, 9, 9)",
    ),
    "MultiHeadAttention with a bias that is fed": (
        Case(multi(operands="q, k, v, fed_bias"), f"{PLAIN_INPUT}, {FED}"),
        "MultiHeadAttention adds a bias that is not constant",
    ),
    "MultiHeadAttention that shares its cache": (
        Case(
            multi(operands="q, k, v, , , , pk, pv, length"),
            f"{PLAIN_INPUT}, {SAME_CACHE}, int32[1] length",
        ),
        "MultiHeadAttention lacks queries, or shares the buffer of its cache",
    ),
    "MultiHeadAttention packed in four axes": (
        Case(multi(operands="q4", before=APART)),
        "MultiHeadAttention packs its query as (2, 3, 5, 4)",
    ),
    "GroupQueryAttention with a local window": (
        grouped_case(grouped("local_window_size = 2")),
        "GroupQueryAttention sees a local window, which is not supported",
    ),
    "GroupQueryAttention with a smooth softmax": (
        grouped_case(grouped("smooth_softmax = 1")),
        "GroupQueryAttention smooths its softmax, which is not supported",
    ),
    "GroupQueryAttention with sinks": (
        grouped_case(grouped(operands="q, k, v, pk, pv, lengths, total, , , , , sinks"),
                     f"{GROUPED_INPUT}, float[4] sinks"),
        "GroupQueryAttention has attention sinks, which is not supported",
    ),
    "GroupQueryAttention without the angles of its positions": (
        grouped_case(grouped("do_rotary = 1")),
        "GroupQueryAttention lacks the angles of its rotary positions",
    ),
    "GroupQueryAttention without lengths": (
        grouped_case(grouped(operands="q, k, v, pk, pv, , total")),
        "GroupQueryAttention lacks queries or the lengths of its sequences",
    ),
    "GroupQueryAttention with a norm inside": (
        grouped_case(
            grouped(operands="q, k, v, pk, pv, lengths, total, , , , , , , , q_norm, q_norm")
        ),
        "not certified",
    ),
    "Attention with a mask by ends and starts": (
        Case(microsoft(SIZES, ", bqkv_v, mask"), f"float[2, 5, {D}] x, int32[4] mask"),
        "not certified",
    ),
    "Attention with a mask of constant lengths": (
        Case(microsoft(SIZES, ", bqkv_v, fixed_lengths"), f"float[2, 5, {D}] x"),
        "Attention has a mask of shape (2,)",
    ),
    "MultiHeadAttention with half a past": (
        Case(
            multi(operands="q, k, v, , , , pk", before=SAME_SIZES) + OUTPUT12,
            f"{PLAIN_INPUT}, {SAME_CACHE}",
        ),
        "not certified",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MISSED)
def test_near_miss_is_missed_with_a_reason(name: str) -> None:
    case, reason = MISSED[name]
    (said,) = reasons(case.model())
    assert said and reason in said


def test_group_query_attention_that_is_not_causal() -> None:
    assert [type(step) for step in only(grouped_case(grouped("causal = 0")).model()).steps] == [
        FullLengths
    ]


def test_operator_that_returns_its_scores_is_read_and_left_whole() -> None:
    body = onnx().replace("c = A", "c, nk, nv, qk = A") + "\n e = Exp(qk)"
    block = only(Case(body).model())
    assert "also returns" in why_not(block)


@pytest.mark.parametrize("name", sorted(FUSED_OPERATORS - {name for _, name in OPERATORS}))
@pytest.mark.parametrize("domain", ["", "com.microsoft", "another.domain"])
def test_operator_that_nobody_reads_is_a_miss_that_names_it(name: str, domain: str) -> None:
    model = graph(f"{MERGED}\n c = {f'{domain}.' if domain else ''}{name} (q, k, v){OUTPUT}")
    full = ".".join(filter(None, (domain, name)))
    assert reasons(model) == [f"the operator {full} is not supported"]


@pytest.mark.parametrize("name", sorted({name for _, name in OPERATORS}))
def test_operator_of_the_same_name_in_another_domain_is_a_miss(name: str) -> None:
    model = graph(f"{MERGED}\n c = another.domain.{name} (q, k, v){OUTPUT}")
    assert reasons(model) == [f"the operator another.domain.{name} is not supported"]


def test_operator_that_is_not_about_attention_is_no_miss() -> None:
    assert reasons(graph("\n out = com.microsoft.FastGelu(x)")) == []


def test_every_operator_is_tested_here() -> None:
    tested = {(node.domain, node.op_type) for case in READ.values() for node in case.model().graph}
    assert set(OPERATORS) <= tested
