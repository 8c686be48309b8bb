"""Fused attention operators: all forms of their operands match and are verified."""

from __future__ import annotations

import numpy as np
import pytest

from graph_passes.blocks import (
    Causal,
    FullLengths,
    KeyMask,
    Mask,
)
from graph_passes.matching.find import find_attention
from graph_passes.matching.operators import FUSED_OPERATORS
from graph_passes.matching.operators import OPERATORS as KNOWN
from graph_passes.passes.decompose_attention import decomposition_refusal
from tests.graph_passes.graphs import PLAIN_INPUT, D, H, K, V, graph, only, reasons, weights
from tests.graph_passes.operators import (
    APART,
    GROUPED,
    GROUPED_HEADS,
    GROUPED_INPUT,
    GROUPED_SIZE,
    GROUPS,
    MERGED,
    MICROSOFT,
    MULTI,
    ONNX,
    OPERATORS,
    OUTPUT,
    OUTPUT12,
    SAME_CACHE,
    SAME_SIZES,
    SIZES,
    Case,
    grouped,
    grouped_case,
    microsoft,
    multi,
    onnx,
    onnx_apart,
)


@pytest.mark.parametrize("name", OPERATORS)
def test_find_attention_operator_matches(name: str) -> None:
    case = OPERATORS[name]
    model = case.model()
    blocks, _ = find_attention(model)
    if not case.runs:
        (reason,) = reasons(case.model())
        assert "not certified" in reason
    block = only(model) if case.runs else blocks[0]
    assert (block.num_heads, block.num_kv_heads) == case.heads
    assert (block.head_size, block.v_head_size) == case.sizes
    assert block.scale == pytest.approx(case.scale, rel=1e-6)
    assert (block.input_size, block.kind, block.position) == (D, case.kind, case.position)
    assert tuple(type(step) for step in block.steps) == case.steps
    assert (block.k.past is not None, block.output is not None) == (case.past, case.output)
    assert (block.softmax, block.probabilities, block.form) == (None, None, "standard")
    operator = KNOWN[block.product.domain, block.product.op_type]
    assert block.idiom == operator.__name__
    assert block.q.num_heads == block.k.num_heads == block.v.num_heads
    weight = None if block.q.weight is None else block.q.weight.value.name
    if weight == "Wq" and block.q.rotary_terms == ():
        expected = weights()["Wq"].reshape(D, H, K).transpose(1, 0, 2)
        np.testing.assert_array_equal(block.q.heads(), expected)


def test_find_attention_operator_weight_is_three_projections() -> None:
    block = only(MICROSOFT["plain"].model())
    assert block.q.weight == block.k.weight == block.v.weight
    np.testing.assert_array_equal(block.k.heads()[1], weights()["Wk"][:, K : 2 * K])
    np.testing.assert_array_equal(block.v.heads()[2], weights()["Wv"][:, 2 * V :])
    np.testing.assert_array_equal(block.q.offset, weights()["bq"].reshape(H, K))
    assert (block.q.layout, block.q.output) == ("inside", None)
    assert only(ONNX["heads side by side"].model()).q.layout == "B T H*K"


def test_find_attention_packed_grouped_heads_have_own_columns() -> None:
    block = only(GROUPED["packed"].model())
    starts = [int(part.columns.min()) for part in (block.q, block.k, block.v)]
    heads = GROUPED_HEADS * GROUPED_SIZE
    assert starts == [0, heads, heads + GROUPS * GROUPED_SIZE]


def test_find_attention_causal_operator_with_cache_ends_together() -> None:
    for case in (ONNX["past and causal"], MULTI["past and unidirectional"]):
        assert only(case.model()).steps == (Causal(ends_together=True),)
    assert only(ONNX["causal"].model()).steps == (Causal(ends_together=False),)


def test_find_attention_operator_mask_records_fill() -> None:
    (given,) = only(MICROSOFT["mask by keys and a filter of its own"].model()).steps
    (default,) = only(MICROSOFT["mask by keys"].model()).steps
    assert isinstance(given, KeyMask) and isinstance(default, KeyMask)
    assert (given.fill, default.fill) == (-3.0, -10000.0)


def test_find_attention_operator_untyped_mask_is_boolean() -> None:
    case = Case(
        onnx(operands="q, k, v, seen", before=f"{MERGED}\n seen = Greater(mask, low)"),
        f"{PLAIN_INPUT}, float[batch, 1, sequence, sequence] mask",
    )
    (step,) = only(case.model()).steps
    assert isinstance(step, Mask) and step.value.dtype is None


FED = f"float[{D}, {H * (2 * K + V)}] fed, float[{H * (2 * K + V)}] fed_bias"

UNMATCHED: dict[str, tuple[Case, str]] = {
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


@pytest.mark.parametrize("name", UNMATCHED)
def test_find_attention_operator_near_miss_returns_reason(name: str) -> None:
    case, expected = UNMATCHED[name]
    (reason,) = reasons(case.model())
    assert reason and expected in reason


def test_find_attention_group_query_attention_without_causal_mask() -> None:
    assert [type(step) for step in only(grouped_case(grouped("causal = 0")).model()).steps] == [
        FullLengths
    ]


def test_decomposition_refusal_operator_with_scores_output() -> None:
    body = onnx().replace("c = A", "c, nk, nv, qk = A") + "\n e = Exp(qk)"
    block = only(Case(body).model())
    refusal = decomposition_refusal(block)
    assert refusal and refusal.code == "operator_outputs"


@pytest.mark.parametrize("name", sorted(FUSED_OPERATORS - {name for _, name in KNOWN}))
@pytest.mark.parametrize("domain", ["", "com.microsoft", "another.domain"])
def test_find_attention_unsupported_operator_returns_its_name(name: str, domain: str) -> None:
    model = graph(f"{MERGED}\n c = {f'{domain}.' if domain else ''}{name} (q, k, v){OUTPUT}")
    full = ".".join(filter(None, (domain, name)))
    assert reasons(model) == [f"the operator {full} is not supported"]


@pytest.mark.parametrize("name", sorted({name for _, name in KNOWN}))
def test_find_attention_operator_of_other_domain_returns_its_name(name: str) -> None:
    model = graph(f"{MERGED}\n c = another.domain.{name} (q, k, v){OUTPUT}")
    assert reasons(model) == [f"the operator another.domain.{name} is not supported"]


def test_find_attention_other_operator_is_no_candidate() -> None:
    assert reasons(graph("\n out = com.microsoft.FastGelu(x)")) == []


def test_all_operators_are_tested() -> None:
    tested = {
        (node.domain, node.op_type) for case in OPERATORS.values() for node in case.model().graph
    }
    assert set(KNOWN) <= tested
