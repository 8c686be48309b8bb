"""Constants: weights wrapped in operators have the elements, shape and type of the graph."""

from __future__ import annotations

from itertools import pairwise

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest

from graph_passes.analysis.constants import (
    constant_array,
    constant_shape,
    constant_type,
    is_constant,
    origin,
)
from graph_passes.errors import InvalidModel
from tests.errors import raises
from tests.graph_passes.graphs import PLAIN_INPUT, D, H, K, attention, graph, only, reasons, weights

rng = np.random.default_rng(3)
QUANTIZED = rng.integers(-100, 100, (D, H * K)).astype(np.int8)
BY_COLUMN = rng.uniform(0.005, 0.02, H * K).astype(np.float32)
BY_ROW = rng.uniform(0.005, 0.02, D).astype(np.float32)
CONSTANTS = {
    "W8": QUANTIZED,
    "Wu8": (QUANTIZED.astype(np.int16) + 128).astype(np.uint8),
    "step": np.float32(0.01),
    "nothing": np.int8(0),
    "seven": np.int8(7),
    "middle": np.uint8(128),
    "by_column": BY_COLUMN,
    "by_row": BY_ROW,
    "zero_by_column": rng.integers(-5, 5, H * K).astype(np.int8),
    "by_block": rng.uniform(0.005, 0.02, (3, H * K)).astype(np.float32),
    "W16": weights()["Wq"].astype(np.float16),
    "Wb16": weights()["Wq"].astype(ml_dtypes.bfloat16),
    "W64": weights()["Wq"].astype(np.float64),
    "square": np.array([D, H * K], np.int64),
    "split_shape": np.array([D, H, K], np.int64),
    "Wq_half": weights()["Wq"][:, : H * K // 2].copy(),
    "Wq_other": weights()["Wq"][:, H * K // 2 :].copy(),
    "Wlow": rng.standard_normal((K, H * K)).astype(np.float32),
}
WQ = weights()["Wq"]
ELEMENTS = ", ".join(map(repr, WQ.ravel().tolist()))
CONSTANT_NODE = f"Constant <value = float[{D}, {H * K}] {{{ELEMENTS}}}> ()"
PLAIN = (QUANTIZED * np.float32(0.01)).astype(np.float32)

WRAPPED: dict[str, tuple[str, np.ndarray]] = {
    "nothing": ("W = Identity(Wq)", WQ),
    "two Identities": ("W1 = Identity(Wq)\n W = Identity(W1)", WQ),
    "Transpose": ("W = Transpose(WqT)", WQ),
    "Transpose of a Transpose": ("W1 = Transpose(Wq)\n W = Transpose <perm = [1, 0]> (W1)", WQ),
    "Cast from half precision": ("W = Cast <to = 1> (W16)", CONSTANTS["W16"].astype(np.float32)),
    "Cast from bfloat16": ("W = Cast <to = 1> (Wb16)", CONSTANTS["Wb16"].astype(np.float32)),
    "Cast from double": ("W = Cast <to = 1> (W64)", WQ),
    "CastLike of an activation's type": (
        "W = CastLike(W16, x)",
        CONSTANTS["W16"].astype(np.float32),
    ),
    "Reshape": ("W1 = Reshape(Wq, split_shape)\n W = Reshape(W1, square)", WQ),
    "Squeeze and Unsqueeze": ("W1 = Unsqueeze(Wq, a0)\n W = Squeeze(W1, a0)", WQ),
    "Concat": ("W = Concat <axis = 1> (Wq_half, Wq_other)", WQ),
    "Slice": ("W = Slice(Wqkv, n0, n12, a1)", weights()["Wqkv"][:, : H * K]),
    "Split": ("W, W8_, W9_ = Split <axis = 1> (Wqkv, thirds)", weights()["Wqkv"][:, : H * K]),
    "the second part of a Split": (
        "W8_, W, W9_ = Split <axis = 1> (Wqkv, thirds)",
        weights()["Wqkv"][:, H * K : 2 * H * K],
    ),
    "a product with a constant": ("W = Mul(Wq, inverse)", WQ * weights()["inverse"]),
    "a sum with a low-rank product": (
        "W1 = MatMul(Wk1, Wlow)\n W = Add(Wq, W1)",
        WQ + weights()["Wk1"] @ CONSTANTS["Wlow"],
    ),
    "DequantizeLinear": ("W = DequantizeLinear(W8, step)", PLAIN),
    "DequantizeLinear with a zero point": (
        "W = DequantizeLinear(W8, step, seven)",
        (QUANTIZED.astype(np.float32) - 7) * np.float32(0.01),
    ),
    "DequantizeLinear of unsigned bytes": ("W = DequantizeLinear(Wu8, step, middle)", PLAIN),
    "DequantizeLinear by column": (
        "W = DequantizeLinear <axis = 1> (W8, by_column)",
        QUANTIZED * BY_COLUMN,
    ),
    "DequantizeLinear by column with zero points": (
        "W = DequantizeLinear <axis = 1> (W8, by_column, zero_by_column)",
        (QUANTIZED.astype(np.float32) - CONSTANTS["zero_by_column"]) * BY_COLUMN,
    ),
    "DequantizeLinear by row": (
        "W = DequantizeLinear <axis = 0> (W8, by_row)",
        QUANTIZED * BY_ROW[:, None],
    ),
    "DequantizeLinear by row, its axis counted from the end": (
        "W = DequantizeLinear <axis = -2> (W8, by_row)",
        QUANTIZED * BY_ROW[:, None],
    ),
    "Transpose of DequantizeLinear": (
        "W1 = DequantizeLinear <axis = 0> (W8, by_row)\n W = Transpose(W1)",
        (QUANTIZED * BY_ROW[:, None]).T,
    ),
    "quantized and back": (
        "W1 = QuantizeLinear(Wq, step, nothing)\n W = DequantizeLinear(W1, step, nothing)",
        np.clip(np.rint(WQ / np.float32(0.01)), -128, 127) * np.float32(0.01),
    ),
    "a Constant node": (
        f"W = {CONSTANT_NODE}",
        WQ,
    ),
    "Identity of a Constant node": (
        f"W1 = {CONSTANT_NODE}\n W = Identity(W1)",
        WQ,
    ),
}


def query(wrapped: str) -> str:
    return f"""
        {wrapped}
        q0 = MatMul(x, W)
        q2 = Reshape(q0, heads)
        q = Transpose <perm = [0, 2, 1, 3]> (q2)"""


def wrapped(text: str, opset: int = 17) -> ir.Model:
    return attention(q=query(text), constants=CONSTANTS, opset=opset)


@pytest.mark.parametrize("case", WRAPPED)
def test_constant_wrapped_weight_has_elements_shape_and_type(case: str) -> None:
    text, expected = WRAPPED[case]
    value = value_of(text)
    assert is_constant(value)
    assert (constant_shape(value), constant_type(value)) == (expected.shape, ir.DataType.FLOAT)
    np.testing.assert_allclose(constant_array(value), expected, atol=1e-6, rtol=1e-6)
    block = only(wrapped(text))
    assert (block.num_heads, block.head_size, block.input_size) == (H, K, D)
    assert block.q.weight is not None
    weight = constant_array(block.q.weight.value)
    assert weight.dtype == np.float32
    np.testing.assert_allclose(weight, expected, atol=1e-6, rtol=1e-6)


def test_constant_block_quantized_weight_has_elements() -> None:
    """Opset 21: a scale for each 4 rows of a column."""
    text = "W = DequantizeLinear <axis = 0, block_size = 4> (W8, by_block)"
    block = only(wrapped(text, opset=21))
    expected = QUANTIZED * CONSTANTS["by_block"].repeat(4, axis=0)
    assert block.q.weight is not None
    weight = constant_array(block.q.weight.value)
    np.testing.assert_allclose(weight, expected, atol=1e-6, rtol=0)


def test_find_attention_wrapped_bias_is_offset() -> None:
    text = query("W = Identity(Wq)").replace(
        "q2 = Reshape(q0,", "row = Unsqueeze(bq, a0)\n q1 = Add(q0, row)\n q2 = Reshape(q1,"
    )
    block = only(attention(q=text))
    np.testing.assert_array_equal(block.q.offset, weights()["bq"].reshape(H, K))


def test_find_attention_wrapped_output_weight_matches() -> None:
    block = only(attention(output="\n W = Transpose(WoT)\n o = MatMul(c, W)\n out = Add(o, bo)"))
    assert block.output is not None
    np.testing.assert_array_equal(block.output.matrix(), weights()["Wo"])


def test_find_attention_identity_of_weight_is_shared() -> None:
    block = only(
        attention(
            q=query("W = Identity(Wq)"),
            k="\n Wk9 = Identity(Wq)\n k0 = MatMul(x, Wk9)\n k2 = Reshape(k0, heads)"
            "\n kT = Transpose <perm = [0, 2, 3, 1]> (k2)",
        )
    )
    assert block.q.weight == block.k.weight
    assert block.q.weight is not None and block.q.weight.value.name == "Wq"


@pytest.mark.parametrize(
    "text",
    [
        "W = Transpose(fed)",
        "W = Cast <to = 1> (fed)",
        "W = DequantizeLinear(W8, fed_step)",
        "W = Sin(Wq)",
        "W = RandomNormalLike(Wq)",
    ],
)
def test_find_attention_weight_not_constant_returns_reason(text: str) -> None:
    inputs = (
        f"{PLAIN_INPUT}, float[batch, 1, 1, sequence] mask, float[{D}, {D}] fed, float fed_step"
    )
    (reason,) = reasons(attention(q=query(text), inputs=inputs, constants=CONSTANTS))
    assert "MatMul is not supported between the query projection and the product" in reason


def value_of(text: str) -> ir.Value:
    """The value W of a text."""
    model = graph(f"\n {text}\n out = MatMul(x, W)", constants=CONSTANTS)
    return next(v for node in model.graph for v in node.outputs if v.name == "W")


@pytest.mark.parametrize(
    ("text", "dtype"),
    [
        ("W = Transpose(W16)", ir.DataType.FLOAT16),
        ("W = Identity(Wb16)", ir.DataType.BFLOAT16),
        ("W = Cast <to = 10> (Wq)", ir.DataType.FLOAT16),
    ],
)
def test_constant_array_half_precision_returns_single(text: str, dtype: ir.DataType) -> None:
    value = value_of(text)
    assert (constant_type(value), constant_array(value).dtype) == (dtype, np.float32)


def test_is_constant_deep_wrappers_returns_false() -> None:
    chain = "\n ".join(f"W{i + 1}_ = Transpose(W{i}_)" for i in range(20))
    value = value_of(f"W0_ = Transpose(Wq)\n {chain}\n W = Transpose(W20_)")
    assert not is_constant(value)
    assert not is_constant(None)


def test_origin_skips_identity_only() -> None:
    through, kept = value_of("W1 = Identity(Wq)\n W = Identity(W1)"), value_of("W = Transpose(Wq)")
    assert origin(through).name == "Wq"
    assert origin(kept) is kept


def test_constant_shape_does_not_load_elements(monkeypatch: pytest.MonkeyPatch) -> None:
    """The shape of a weight without wrappers is known without its elements."""
    value = value_of("W = Identity(Wq)")
    tensor = origin(value).const_value
    assert tensor is not None
    monkeypatch.setattr(type(tensor), "numpy", lambda self: pytest.fail("read"))
    assert is_constant(value)
    assert (constant_shape(value), constant_type(value)) == ((D, H * K), ir.DataType.FLOAT)


@pytest.mark.parametrize("body", ["W = MatMul(column, row)", "W = Add(column, row)"])
def test_constant_array_large_product_is_refused(body: str) -> None:
    """A file of 160 KB does not make 1.6 GB."""
    side = np.ones(20_000, np.float32)
    constants = {"column": side[:, None], "row": side[None, :]}
    model = graph(f"\n {body}\n out = Abs(W)", constants=constants)
    value = model.graph[0].outputs[0]
    assert is_constant(value)
    with raises(InvalidModel, "evaluation.too_large", "400000000"):
        constant_array(value)


def test_constant_array_repeated_concat_is_refused_in_time() -> None:
    """Each of 8 nodes has 12 equal inputs: 12^8 elements, and as many paths."""
    names = ["row", *(f"c{i}" for i in range(8))]
    body = "\n".join(
        f" {new} = Concat <axis = 0> ({', '.join([old] * 12)})" for old, new in pairwise(names)
    )
    model = graph(f"\n{body}\n out = Abs(c7)", constants={"row": np.ones(100, np.float32)})
    value = next(v for node in model.graph for v in node.outputs if v.name == "c7")
    assert is_constant(value)
    with raises(InvalidModel, "evaluation.too_large", "134217728"):
        constant_array(value)


def test_constant_array_invalid_node_is_refused() -> None:
    model = graph(
        "\n W = MatMul(a, a)\n out = Abs(W)", constants={"a": np.ones((2, 3), np.float32)}
    )
    with raises(InvalidModel, "evaluation.failed", "MatMul"):
        constant_array(model.graph[0].outputs[0])


def test_constant_array_blocks_longer_than_the_axis_are_not_repeated() -> None:
    """A block size of 10^9 takes no memory."""
    constants = {"W8": QUANTIZED, "row_scale": BY_COLUMN[None, :]}
    body = "W = DequantizeLinear <axis = 0, block_size = 1000000000> (W8, row_scale)"
    model = graph(f"\n {body}\n out = Abs(W)", constants=constants)
    array = constant_array(model.graph[0].outputs[0])
    assert np.array_equal(array, QUANTIZED * BY_COLUMN)
