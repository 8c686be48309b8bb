"""A fused attention operator becomes the same attention in plain operators, exactly."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from graph_passes.decompose import DecomposeAttention, why_not
from graph_passes.errors import CannotRewrite
from graph_passes.find import find_attention
from tests.graph_passes.graphs import FUSED, PARTS, PLAIN_INPUT, D, H, attention, only, run

BOOL = f"{PLAIN_INPUT}, bool[batch, 1, sequence, sequence] mask"
FLOAT = f"{PLAIN_INPUT}, float[batch, {H}, sequence, sequence] mask"
S = 6


def fused(operator: str, inputs: str = PLAIN_INPUT, **parts: str) -> ir.Model:
    return attention(
        opset=23,
        inputs=inputs,
        **{
            **FUSED,
            "k": PARTS["k"].replace("kT", "k").replace("0, 2, 3, 1", "0, 2, 1, 3"),
            "context": PARTS["context"].replace("MatMul(p, v)", operator),
            **parts,
        },
    )


def decompose(model: ir.Model) -> ir.Model:
    names = frozenset(block.name for block in find_attention(model)[0])
    return DecomposeAttention(names)(model).model


def tokens(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((2, S, D)).astype(np.float32)


def bool_mask() -> np.ndarray:
    """Random, and one query that sees no key at all."""
    mask = np.random.default_rng(1).random((2, 1, S, S)) < 0.6
    mask[..., 0] = True
    mask[0, 0, 2] = False
    return mask


CASES = {
    "plain": ("Attention (q, k, v)", PLAIN_INPUT, {}),
    "scale": ("Attention <scale = 0.37> (q, k, v)", PLAIN_INPUT, {}),
    "causal": ("Attention <is_causal = 1> (q, k, v)", PLAIN_INPUT, {}),
    "float mask": (
        "Attention (q, k, v, mask)",
        FLOAT,
        {"mask": np.random.default_rng(2).standard_normal((2, H, S, S)).astype(np.float32)},
    ),
    "boolean mask": ("Attention (q, k, v, mask)", BOOL, {"mask": bool_mask()}),
    "boolean mask and causal": (
        "Attention <is_causal = 1> (q, k, v, mask)",
        BOOL,
        {"mask": bool_mask()},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_decomposed_operator_computes_the_same(case: str) -> None:
    """Within 1e-5, rows included that see no key."""
    operator, inputs, masks = CASES[case]
    arrays = {"x": tokens(), **masks}
    original, plain = fused(operator, inputs), decompose(fused(operator, inputs))
    assert "Attention" not in {node.op_type for node in plain.graph}
    np.testing.assert_allclose(run(plain, arrays), run(original, arrays), atol=1e-5, rtol=0)


def test_rows_that_see_no_key_are_zero() -> None:
    model = decompose(fused("Attention (q, k, v, mask)", BOOL))
    (block,), _ = find_attention(model)
    arrays = {"x": tokens(), "mask": bool_mask()}
    bias = np.asarray(model.graph.initializers["bo"].const_value)
    np.testing.assert_allclose(run(model, arrays)[0, 2], bias, atol=1e-6, rtol=0)
    assert block.probabilities is not None


def test_decomposed_block_is_read_with_name_scale_and_masks() -> None:
    before = only(fused("Attention <scale = 0.37> (q, k, v, mask)", FLOAT))
    after = only(decompose(fused("Attention <scale = 0.37> (q, k, v, mask)", FLOAT)))
    assert (after.name, after.num_heads) == (before.name, before.num_heads)
    assert after.scale == pytest.approx(before.scale, rel=1e-6)
    assert after.idiom == "softmax"
    assert after.logits is not None


def test_operator_that_is_the_output_of_the_graph_keeps_the_outputs_name() -> None:
    def model() -> ir.Model:
        return attention(
            opset=23,
            inputs=PLAIN_INPUT,
            output_type=f"float[batch, {H}, sequence, 2] out",
            **{
                **FUSED,
                "k": PARTS["k"].replace("kT", "k").replace("0, 2, 3, 1", "0, 2, 1, 3"),
                "context": "\n out = Attention (q, k, v)",
                "output": "",
            },
        )

    plain = decompose(model())
    assert [value.name for value in plain.graph.outputs] == ["out"]
    arrays = {"x": tokens()}
    np.testing.assert_allclose(run(plain, arrays), run(model(), arrays), atol=1e-5, rtol=0)


def test_grouped_heads_are_refused() -> None:
    parts = {
        "k": "\n k0 = MatMul(x, Wk1)\n k2 = Reshape(k0, one_head)"
        "\n k = Transpose <perm = [0, 2, 1, 3]> (k2)",
        "v": "\n v0 = MatMul(x, Wv1)\n v2 = Reshape(v0, one_v_head)"
        "\n v = Transpose <perm = [0, 2, 1, 3]> (v2)",
    }
    block = only(fused("Attention (q, k, v)", **parts))
    assert why_not(block) == "its key/value heads are grouped"


def test_plain_attention_and_unknown_names_are_refused() -> None:
    assert why_not(only(attention())) == "its scores are in the graph already"
    with pytest.raises(CannotRewrite, match="no attention is called 'layer_9'"):
        DecomposeAttention(frozenset({"layer_9"}))(attention())
