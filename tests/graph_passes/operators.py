"""Graphs of fused attention operators with all forms of their operands, and the expected blocks."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from attnserve.models.opset import raise_opset
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
from graph_passes.emit.fused_attention import OPSETS, FusedOperator
from tests.graph_passes.graphs import PLAIN_INPUT, D, H, K, V, graph, weights
from tests.graph_passes.layouts import MEMORY

DEFAULT = K**-0.5

GROUPS, GROUPED_HEADS, GROUPED_SIZE = 2, 4, 16
"""GroupQueryAttention rotates heads only if their size is a multiple of 16."""

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
KEY_MASK = f"{PLAIN_INPUT}, int32[batch, sequence] mask"
QUERY_MASK = f"{PLAIN_INPUT}, int32[batch, sequence, sequence] mask"
LENGTHS = f"{PLAIN_INPUT}, int32[batch] mask"
BOOL_MASK = f"{PLAIN_INPUT}, bool[batch, 1, sequence, sequence] mask"
CROSS_INPUT = f"{PLAIN_INPUT}, {MEMORY}"
PAST_KEYS = f"{PLAIN_INPUT}, float[batch, {H}, past, {K}] pk"
CACHED_INPUT = f"{PAST_KEYS}, float[batch, {H}, past, {V}] pv"
SAME_CACHE = f"{PAST_KEYS}, float[batch, {H}, past, {K}] pv"


@dataclass(frozen=True)
class Case:
    """A graph in text, and the properties of its block.

    ``runs`` is False if ONNX Runtime has no CPU kernel for it.
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
    attributes = ", ".join(filter(None, ("q_num_heads = 3, kv_num_heads = 3", attributes)))
    return f"{before}\n        c = Attention <{attributes}> ({operands})"


def onnx_apart(attributes: str = "", operands: str = "q4, k4, v4") -> str:
    """ai.onnx Attention with its heads apart."""
    attributes = f" <{attributes}>" if attributes else ""
    return f"{APART}\n        c0 = Attention{attributes} ({operands}){MERGE}"


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
    "boolean mask": Case(onnx(operands="q, k, v, mask"), BOOL_MASK, steps=(Mask,)),
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
        onnx("is_causal = 1", "q, k, v, mask"), BOOL_MASK, steps=(Causal, Mask)
    ),
    "soft cap": Case(onnx("softcap = 3.0"), steps=(Scaled, Capped, Scaled)),
    "soft cap and mask": Case(
        onnx("softcap = 3.0", "q, k, v, mask"), BOOL_MASK, steps=(Scaled, Capped, Scaled, Mask)
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
    "cross attention": Case(onnx(before=CROSS), CROSS_INPUT, kind="cross"),
    "past": Case(
        onnx(operands="q, k, v, , pk, pv").replace("c = A", "c, present_k, present_v = A"),
        CACHED_INPUT,
        past=True,
    ),
    "past, heads apart and a mask": Case(
        onnx_apart(operands="q4, k4, v4, mask, pk, pv").replace("c0 = A", "c0, nk, nv = A"),
        f"{CACHED_INPUT}, float[batch, 1, sequence, total] mask",
        past=True,
        steps=(PositionBias,),
    ),
    "past and causal": Case(
        onnx("is_causal = 1", "q, k, v, , pk, pv").replace("c = A", "c, nk, nv = A"),
        CACHED_INPUT,
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


def microsoft(attributes: str, operands: str, *, weight: str = "Wqkv_v", outputs: str = "c") -> str:
    attributes = ", ".join(filter(None, ("num_heads = 3", attributes)))
    return f"\n {outputs} = com.microsoft.Attention <{attributes}> (x, {weight}{operands})"


SIZES = "qkv_hidden_sizes = [12, 12, 6]"
MICROSOFT = {
    "plain": Case(microsoft(SIZES, ", bqkv_v"), opset=17),
    "without a bias": Case(microsoft(SIZES, ""), opset=17),
    "one size for all": Case(
        microsoft("", ", bqkv", weight="Wqkv") + OUTPUT12, opset=17, sizes=(K, K)
    ),
    "a scale of its own": Case(microsoft(f"{SIZES}, scale = 0.37", ", bqkv_v"), scale=0.37),
    "unidirectional": Case(microsoft(f"{SIZES}, unidirectional = 1", ", bqkv_v"), steps=(Causal,)),
    "mask by keys": Case(microsoft(SIZES, ", bqkv_v, mask"), KEY_MASK, steps=(KeyMask,)),
    "mask by keys and a filter of its own": Case(
        microsoft(f"{SIZES}, mask_filter_value = -3.0", ", bqkv_v, mask"),
        KEY_MASK,
        steps=(KeyMask,),
    ),
    "mask by query": Case(microsoft(SIZES, ", bqkv_v, mask"), QUERY_MASK, steps=(KeyMask,)),
    "mask by lengths": Case(microsoft(SIZES, ", bqkv_v, mask"), LENGTHS, steps=(KeyLengths,)),
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
        microsoft("", ", bqkv, , past", weight="Wqkv", outputs="c, present") + OUTPUT12,
        f"{PLAIN_INPUT}, float[2, batch, {H}, past, {K}] past",
        past=True,
        sizes=(K, K),
    ),
    "past and unidirectional": Case(
        microsoft("unidirectional = 1", ", bqkv, , past", weight="Wqkv", outputs="c, present")
        + OUTPUT12,
        f"{PLAIN_INPUT}, float[2, batch, {H}, past, {K}] past",
        past=True,
        sizes=(K, K),
        steps=(Causal,),
    ),
}


def multi(
    attributes: str = "", operands: str = "q, k, v", *, before: str = NO_BIAS, outputs: str = "c"
) -> str:
    attributes = ", ".join(filter(None, ("num_heads = 3", attributes)))
    return f"{before}\n {outputs} = com.microsoft.MultiHeadAttention <{attributes}> ({operands})"


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

MULTI = {
    "heads side by side": Case(multi(), opset=17),
    "biases before": Case(multi(before=MERGED)),
    "bias inside": Case(multi(operands="q, k, v, bqkv_v")),
    "a scale of its own": Case(multi("scale = 0.37"), scale=0.37),
    "unidirectional": Case(multi("unidirectional = 1"), steps=(Causal,)),
    "mask by keys": Case(multi(operands="q, k, v, , mask"), KEY_MASK, steps=(KeyMask,)),
    "mask by query": Case(multi(operands="q, k, v, , mask"), QUERY_MASK, steps=(KeyMask,)),
    "mask by lengths": Case(multi(operands="q, k, v, , mask"), LENGTHS, steps=(KeyLengths,)),
    "bias of the logits": Case(
        multi(operands="q, k, v, bqkv_v, , bias"),
        f"{PLAIN_INPUT}, float[1, {H}, sequence, sequence] bias",
        steps=(PositionBias,),
        position="bias",
    ),
    "cross attention": Case(multi(before=CROSS), CROSS_INPUT, kind="cross"),
    "cross attention with its mask": Case(
        multi(operands="q, k, v, bqkv_v, mask", before=CROSS),
        f"{PLAIN_INPUT}, {MEMORY}, int32[batch, memory] mask",
        kind="cross",
        steps=(KeyMask,),
    ),
    "keys and values apart": Case(
        multi(operands="q, k4, v4", before=KEYS_APART) + OUTPUT12,
        CROSS_INPUT,
        kind="cross",
        sizes=(K, K),
    ),
    "keys and values apart, and a bias for the queries": Case(
        multi(operands="q, k4, v4, bqkv", before=KEYS_APART) + OUTPUT12,
        CROSS_INPUT,
        kind="cross",
        sizes=(K, K),
    ),
    "keys and values packed": Case(
        multi(
            operands="q, kv",
            before="\n q = MatMul(x, Wq)\n kv0 = MatMul(y, Wkv)\n kv = Reshape(kv0, kv_packed)",
        )
        + OUTPUT12,
        CROSS_INPUT,
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
        multi(operands="q, k, v, , , , pk, pv", before=SAME_SIZES, outputs="c, nk, nv") + OUTPUT12,
        SAME_CACHE,
        past=True,
        sizes=(K, K),
    ),
    "past and unidirectional": Case(
        multi(
            "unidirectional = 1",
            "q, k, v, bqkv, , , pk, pv",
            before=SAME_SIZES,
            outputs="c, nk, nv",
        )
        + OUTPUT12,
        SAME_CACHE,
        past=True,
        sizes=(K, K),
        steps=(Causal,),
    ),
    "past and a mask by keys": Case(
        multi(operands="q, k, v, , mask, , pk, pv", before=SAME_SIZES, outputs="c, nk, nv")
        + OUTPUT12,
        f"{SAME_CACHE}, int32[batch, total] mask",
        past=True,
        sizes=(K, K),
        steps=(KeyMask,),
    ),
    "keys and values handed in": Case(
        "\n q = MatMul(x, Wq)\n c = com.microsoft.MultiHeadAttention <num_heads = 3> (q, pk, pv)"
        + OUTPUT12,
        SAME_CACHE,
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
    attributes = ", ".join(filter(None, ("num_heads = 4, kv_num_heads = 2", attributes)))
    return (
        f"{before}\n c, nk, nv = com.microsoft.GroupQueryAttention <{attributes}> ({operands})"
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
    "no cache": grouped_case(grouped(operands="q, k, v, , , lengths, total"), NO_CACHE, past=False),
    "a scale of its own": grouped_case(grouped("scale = 0.37"), scale=0.37),
    "packed": grouped_case(
        grouped(operands="qkv, , , pk, pv, lengths, total", before="\n qkv = MatMul(x, Wpacked)")
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
        grouped(before=OWN_PARTS).replace("kv_num_heads = 2", "kv_num_heads = 4"),
        GROUPED_INPUT.replace(f"[batch, {GROUPS}, past", "[batch, 4, past"),
        heads=(4, 4),
        constants={"Wk_own": normal(D, 64), "Wv_own": normal(D, 64)},
    ),
}

OPERATORS = (
    {f"ai.onnx: {name}": case for name, case in ONNX.items()}
    | {f"Attention: {name}": case for name, case in MICROSOFT.items()}
    | {f"MultiHeadAttention: {name}": case for name, case in MULTI.items()}
    | {f"GroupQueryAttention: {name}": case for name, case in GROUPED.items()}
)


def any_feeds(model: ir.Model, memory: int = 4) -> dict[str, np.ndarray]:
    """Random tokens and biases, and masks that hide some keys but never the first."""
    rng = np.random.default_rng(3)
    lengths = {"batch": 2, "sequence": 6, "memory": memory}
    arrays: dict[str, np.ndarray] = {}
    whole = any(value.name == "total" for value in model.graph.inputs)  # of a cache, all keys
    for value in model.graph.inputs:
        assert value.name is not None and value.shape is not None and value.dtype is not None
        shape = tuple(
            dim if isinstance(dim, int) else lengths[str(dim.value)] for dim in value.shape
        )
        if value.dtype == ir.DataType.FLOAT:
            array = rng.standard_normal(shape)
        elif value.name == "total":
            array = np.array(6)
        elif len(shape) == 1 and whole:
            array = np.full(shape, 5)
        elif len(shape) == 1:
            array = rng.integers(1, 6, shape)
        else:
            array = rng.random(shape) < 0.7
            array[..., 0] = True
        arrays[value.name] = array.astype(value.dtype.numpy())
    return arrays


def raised(model: ir.Model, form: FusedOperator) -> ir.Model:
    """Raise the opset to one that has the operators of a form."""
    raise_opset(model, OPSETS.get(form, 0))
    return model
