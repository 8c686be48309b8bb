"""Parameters: elements of weights, also of quantized ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

from attnserve.models.onnx_files import load_model
from attnserve.precision.convert import convert
from graph_passes.analysis.cost import model_cost
from graph_passes.analysis.parameters import parameter_bytes, parameters
from tests.fixtures.make import BERT

ROWS, COLUMNS = 32, 6
MATRIX = ROWS * COLUMNS

BYTES = np.arange(MATRIX, dtype=np.int8).reshape(ROWS, COLUMNS)
UNSIGNED = BYTES.astype(np.uint8)
SCALES, ZEROS = np.ones(COLUMNS, np.float32), np.zeros(COLUMNS, np.int8)
ONE, ZERO = np.array(1, np.float32), np.array(0, np.int8)
UNSIGNED_ZERO = np.array(0, np.uint8)
BIAS = np.ones(COLUMNS, np.float32)
LONG_BIAS = np.ones(COLUMNS, np.int32)
NIBBLES = BYTES.astype(ml_dtypes.int4)
PACKED = np.zeros((COLUMNS, 1, ROWS // 2), np.uint8)
"""The matrix as MatMulNBits reads it, in one block."""

Node = tuple[str, list[str], dict[str, Any]]

X = ["q", "x_scale", "x_zero"]
"""What DynamicQuantizeLinear gives."""

FORMS: dict[str, tuple[list[Node], dict[str, np.ndarray], int]] = {
    "MatMulInteger": (
        [
            ("DynamicQuantizeLinear", ["x"], {}),
            ("MatMulInteger", ["q", "w", "x_zero", "z"], {}),
            ("Cast", ["a"], {"to": TensorProto.FLOAT}),
            ("Mul", ["x_scale", "s"], {}),
            ("Mul", ["b", "c"], {}),
            ("Add", ["d", "bias"], {}),
        ],
        {"w": BYTES, "s": SCALES, "z": ZEROS, "bias": BIAS},
        MATRIX + COLUMNS,
    ),
    "MatMulIntegerToFloat": (
        [
            ("DynamicQuantizeLinear", ["x"], {}),
            ("MatMulIntegerToFloat", ["q", "w", "x_scale", "s", "x_zero", "z", "bias"], {}),
        ],
        {"w": BYTES, "s": SCALES, "z": ZEROS, "bias": BIAS},
        MATRIX + COLUMNS,
    ),
    "DynamicQuantizeMatMul": (
        [("DynamicQuantizeMatMul", ["x", "w", "s", "z", "bias"], {})],
        {"w": BYTES, "s": SCALES, "z": ZEROS, "bias": BIAS},
        MATRIX + COLUMNS,
    ),
    "QDQ": (
        [
            ("QuantizeLinear", ["x", "one", "zero"], {}),
            ("DequantizeLinear", ["a", "one", "zero"], {}),
            ("DequantizeLinear", ["w", "s", "z"], {"axis": 1}),
            ("DequantizeLinear", ["bias", "s"], {}),
            ("Gemm", ["b", "c", "d"], {}),
        ],
        {"w": BYTES, "s": SCALES, "z": ZEROS, "one": ONE, "zero": ZERO, "bias": LONG_BIAS},
        MATRIX + COLUMNS,
    ),
    "QDQ transposed": (
        [
            ("Transpose", ["w"], {"perm": [1, 0]}),
            ("DequantizeLinear", ["a", "one", "zero"], {}),
            ("MatMul", ["y", "b"], {}),
        ],
        {"w": BYTES, "one": ONE, "zero": ZERO},
        MATRIX,
    ),
    "QDQ unsigned": (
        [("DequantizeLinear", ["w", "one", "zero"], {}), ("MatMul", ["x", "a"], {})],
        {"w": UNSIGNED, "one": ONE, "zero": UNSIGNED_ZERO},
        MATRIX,
    ),
    "QDQ of 4 bits": (
        [("DequantizeLinear", ["w", "one"], {}), ("MatMul", ["x", "a"], {})],
        {"w": NIBBLES, "one": ONE},
        MATRIX,
    ),
    "QLinearMatMul": (
        [
            ("QuantizeLinear", ["x", "one", "zero"], {}),
            ("QLinearMatMul", ["a", "one", "zero", "w", "s", "z", "one", "zero"], {}),
            ("DequantizeLinear", ["b", "one", "zero"], {}),
        ],
        {"w": BYTES, "s": SCALES, "z": ZEROS, "one": ONE, "zero": ZERO},
        MATRIX,
    ),
    "MatMulNBits": (
        [("MatMulNBits", ["x", "w", "s", "z", "", "bias"],
          {"K": ROWS, "N": COLUMNS, "bits": 4, "block_size": 32})],
        {"w": PACKED, "s": SCALES, "z": np.zeros((COLUMNS, 1), np.uint8), "bias": BIAS},
        MATRIX + COLUMNS,
    ),
    "QAttention": (
        [("QAttention", ["q", "w", "bias", "one", "s", "", "zero", "z"], {"num_heads": 1})],
        {"w": BYTES, "bias": BIAS, "one": ONE, "s": SCALES, "z": ZEROS, "zero": ZERO},
        MATRIX + COLUMNS,
    ),
    "QEmbedLayerNormalization": (
        [("QEmbedLayerNormalization",
          ["ids", "types", "w", "w2", "w3", "g", "beta", "", *["one"] * 5, *["zero"] * 5], {})],
        {"w": UNSIGNED, "w2": UNSIGNED + 1, "w3": UNSIGNED[:2], "g": UNSIGNED[0],
         "beta": UNSIGNED[1], "one": ONE, "zero": UNSIGNED_ZERO},
        2 * MATRIX + 4 * COLUMNS,
    ),
    "embeddings": (
        [("Gather", ["w", "ids"], {}), ("DequantizeLinear", ["a", "one", "zero"], {})],
        {"w": UNSIGNED, "one": ONE, "zero": UNSIGNED_ZERO},
        MATRIX,
    ),
    "embeddings of 4 bits": (
        [("GatherBlockQuantized", ["w", "ids", "s"], {"bits": 4, "block_size": 32})],
        {"w": PACKED[:, 0], "s": SCALES},
        MATRIX,
    ),
    "dequantized by hand": (
        [
            ("Cast", ["w"], {"to": TensorProto.FLOAT}),
            ("Mul", ["a", "s"], {}),
            ("MatMul", ["x", "b"], {}),
        ],
        {"w": BYTES, "s": SCALES},
        MATRIX,
    ),
    "quantized at run time": (
        [
            ("QuantizeLinear", ["w", "one", "zero"], {}),
            ("DequantizeLinear", ["a", "one", "zero"], {}),
            ("MatMul", ["x", "b"], {}),
        ],
        {"w": BYTES.astype(np.float32), "one": ONE, "zero": ZERO},
        MATRIX,
    ),
    "masks": (
        [("Cast", ["m"], {"to": TensorProto.BOOL}), ("Where", ["a", "x", "bias"], {})],
        {"m": UNSIGNED, "bias": BIAS},
        COLUMNS,
    ),
}  # fmt: skip

MICROSOFT = ("MatMulIntegerToFloat", "DynamicQuantizeMatMul", "MatMulNBits", "QAttention",
             "QEmbedLayerNormalization", "GatherBlockQuantized")  # fmt: skip


def build(nodes: list[Node], weights: dict[str, np.ndarray], *, constants: bool) -> ir.Model:
    """The nodes one after the other, with outputs a, b, c, ...; the graph is not run."""
    made: list[onnx.NodeProto] = []
    tensors = [numpy_helper.from_array(array, name) for name, array in weights.items()]
    if constants:
        made += [helper.make_node("Constant", [], [one.name], value=one) for one in tensors]
        tensors = []
    names = iter("abcdefgh")
    for op_type, inputs, attributes in nodes:
        outputs = X if op_type == "DynamicQuantizeLinear" else [next(names)]
        domain = "com.microsoft" if op_type in MICROSOFT else ""
        made.append(helper.make_node(op_type, inputs, outputs, domain=domain, **attributes))
    given = {"x", "y", "q", "ids", "types"} & {name for node in made for name in node.input}
    given -= {name for node in made for name in node.output}
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in given]
    out = helper.make_tensor_value_info(made[-1].output[0], TensorProto.FLOAT, None)
    return ir.from_proto(helper.make_model(helper.make_graph(made, "g", inputs, [out], tensors)))


@pytest.mark.parametrize("constants", [False, True], ids=["initializers", "Constant nodes"])
@pytest.mark.parametrize("form", FORMS)
def test_parameters_are_elements_of_weights(form: str, constants: bool) -> None:
    nodes, weights, expected = FORMS[form]
    model = build(nodes, weights, constants=constants)
    assert parameters(model) == expected
    if not constants:
        assert parameter_bytes(model) == sum(
            -(-array.size // 2) if array.dtype == NIBBLES.dtype else array.nbytes
            for array in weights.values()
        )


@pytest.mark.parametrize(
    ("nodes", "count"),
    [
        ([("DynamicQuantizeMatMul", ["x", "w", "s"], {}),
          ("DynamicQuantizeMatMul", ["a", "w", "s"], {}),
          ("DequantizeLinear", ["w", "s"], {"axis": 1})], MATRIX),
        ([("DequantizeLinear", ["w", "s"], {"axis": 1}), ("MatMul", ["x", "a"], {}),
          ("Add", ["b", "s"], {})], MATRIX + COLUMNS),
    ],
    ids=["a weight of three nodes", "a constant that is also a scale"],
)  # fmt: skip
def test_parameters_of_shared_quantized_constants_count_once(nodes: list[Node], count: int) -> None:
    assert parameters(build(nodes, {"w": BYTES, "s": SCALES}, constants=False)) == count


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_parameters_of_a_converted_model_are_those_of_the_original(precision: Any) -> None:
    original = load_model(BERT / "sdpa-torchscript-17-2" / "model.onnx")
    converted = convert(original, precision)
    before, after = model_cost(original), model_cost(converted)
    assert after.parameters == pytest.approx(before.parameters, abs=100)  # some scalars
    assert after.bytes < before.bytes


def test_parameters_of_a_model_of_onnxruntime_are_those_of_the_original(tmp_path: Path) -> None:
    from onnxruntime.quantization import quantize_dynamic

    path, made = BERT / "sdpa-torchscript-17-2" / "model.onnx", tmp_path / "int8.onnx"
    quantize_dynamic(path, made)
    before, after = parameters(load_model(path)), parameters(load_model(made))
    assert after == pytest.approx(before, abs=100)


def test_parameters_byte_masks_do_not_count() -> None:
    nodes: list[Node] = [
        ("Cast", ["w"], {"to": TensorProto.FLOAT}),
        ("Sub", ["one", "a"], {}),
        ("Mul", ["b", "far"], {}),
        ("Add", ["x", "c"], {}),
        ("Softmax", ["d"], {}),
    ]
    weights = {"w": UNSIGNED, "one": ONE, "far": np.array(-1e4, np.float32)}
    assert parameters(build(nodes, weights, constants=False)) <= 2
