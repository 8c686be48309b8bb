"""DecomposeAttention: a fused operator becomes plain operators with the same output."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from attnserve.models.example_inputs import example_inputs
from attnserve.runtime.session import open_session
from graph_passes.analysis.workload import Workload
from graph_passes.matching.find import find_attention
from graph_passes.passes.decompose_attention import DecomposeAttention, decomposition_refusal
from tests.graph_passes.graphs import PLAIN_INPUT, D, H, attention, fused_parts, only, run
from tests.graph_passes.layouts import ONE_KEY_HEAD
from tests.graph_passes.operators import OPERATORS

FIXTURES = Path(__file__).parents[2] / "fixtures" / "onnx"
BOOL = f"{PLAIN_INPUT}, bool[batch, 1, sequence, sequence] mask"
S = 6
rng = np.random.default_rng(4)


def fused(operator: str, inputs: str = PLAIN_INPUT, **parts: str) -> ir.Model:
    return attention(opset=23, inputs=inputs, **{**fused_parts(operator), **parts})


def decompose(original: ir.Model) -> ir.Model:
    model = original.clone()
    names = frozenset(block.name for block in find_attention(model).blocks)
    return DecomposeAttention(names)(model).model


def tokens(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((2, S, D)).astype(np.float32)


def bool_mask() -> np.ndarray:
    """A random mask in which one query has no visible key."""
    mask = np.random.default_rng(1).random((2, 1, S, S)) < 0.6
    mask[..., 0] = True
    mask[0, 0, 2] = False
    return mask


OPERATOR_WITH_MASK = {
    "boolean mask": "Attention (q, k, v, mask)",
    "boolean mask and causal": "Attention <is_causal = 1> (q, k, v, mask)",
}


@pytest.mark.parametrize("case", OPERATOR_WITH_MASK)
def test_decompose_attention_rows_without_keys_keep_the_output(case: str) -> None:
    """The context of a query without keys is zero."""
    arrays = {"x": tokens(), "mask": bool_mask()}
    original = fused(OPERATOR_WITH_MASK[case], BOOL)
    plain = decompose(fused(OPERATOR_WITH_MASK[case], BOOL))
    assert "Attention" not in {node.op_type for node in plain.graph}
    got = run(plain, arrays)
    np.testing.assert_allclose(got, run(original, arrays), atol=1e-5, rtol=0)
    bias = np.asarray(plain.graph.initializers["bo"].const_value)
    np.testing.assert_allclose(got[0, 2], bias, atol=1e-6, rtol=0)
    assert find_attention(plain).blocks[0].probabilities is not None


def test_decompose_attention_of_graph_output_keeps_its_name() -> None:
    def model() -> ir.Model:
        return attention(
            opset=23,
            inputs=PLAIN_INPUT,
            output_type=f"float[batch, {H}, sequence, 2] out",
            **{**fused_parts(""), "context": "\n out = Attention (q, k, v)", "output": ""},
        )

    plain = decompose(model())
    assert [value.name for value in plain.graph.outputs] == ["out"]
    arrays = {"x": tokens()}
    np.testing.assert_allclose(run(plain, arrays), run(model(), arrays), atol=1e-5, rtol=0)


def test_decompose_attention_with_returned_keys_is_refused() -> None:
    plain = OPERATORS["ai.onnx: heads side by side"]
    body = plain.body.replace("c = A", "c, nk, nv = A")
    assert decomposition_refusal(only(replace(plain, body=body).model())) is None
    kept = only(replace(plain, body=f"{body}\n kept = Abs(nk)").model())
    refusal = decomposition_refusal(kept)
    assert refusal and refusal.code == "operator_outputs"


def ungrouped(name: str) -> ir.Model:
    """A case of GroupQueryAttention with as many key/value heads as query heads."""
    case = OPERATORS[f"GroupQueryAttention: {name}"]
    body = case.body.replace("kv_num_heads = 2", "kv_num_heads = 4")
    constants = {key: (rng.standard_normal((D, 64)) / 2).astype(np.float32)
                 for key in ("Wk_grouped", "Wv_grouped")}  # fmt: skip
    return replace(case, body=body, constants=constants).model()


def test_decompose_attention_single_key_head_is_repeated() -> None:
    one_key = ONE_KEY_HEAD["k"].replace("kT", "k").replace("0, 2, 3, 1", "0, 2, 1, 3")
    parts = ONE_KEY_HEAD | {"k": one_key}
    model = decompose(fused("Attention (q, k, v)", **parts))
    block = only(model)
    assert (block.num_heads, block.num_kv_heads) == (H, 1)
    arrays = {"x": tokens()}
    expected = run(fused("Attention (q, k, v)", **parts), arrays)
    np.testing.assert_allclose(run(model, arrays), expected, atol=1e-5, rtol=0)


def test_decompose_attention_ungrouped_group_query_keeps_the_output() -> None:
    original = ungrouped("no cache")
    model = decompose(original.clone())
    arrays = {"x": tokens(), "lengths": np.full(2, S - 1, np.int32), "total": np.array(S, np.int32)}
    assert "GroupQueryAttention" not in {node.op_type for node in model.graph}
    np.testing.assert_allclose(run(model, arrays), run(original, arrays), atol=1e-5, rtol=0)


def test_decompose_attention_of_heads_that_the_graph_repeats_keeps_the_output() -> None:
    """As PyTorch exports grouped keys: Expand and Reshape come before the operator."""
    model = ir.load(FIXTURES / "qwen3-cached-dynamo23-sdpa.onnx")
    [block, *_], _ = find_attention(model)
    assert block.num_kv_heads < block.num_heads
    feed = example_inputs(model, Workload.of(1, 6), 0)
    before, after = (open_session(each).run(None, feed) for each in (model, decompose(model)))
    for a, b in zip(before, after, strict=True):
        np.testing.assert_allclose(b, a, atol=1e-5, rtol=0)
