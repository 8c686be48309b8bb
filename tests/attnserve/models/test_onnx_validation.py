"""Local functions of a file are inlined, also those of another opset."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import parser

from attnserve.models.onnx_validation import validated
from graph_passes.errors import InvalidModel
from tests.errors import raises

MODEL = """<ir_version: 9, opset_import: ["": 18, "local": 1{imports}]>
    g (float[n, 4] x) => (float[n, 1] y) <{types}> {{ a = local.mean(x)  y = Abs(a) }}
    <domain: "local", opset_import: ["": 17{function_imports}]>
    mean (x) => (y) {{ {body} }}"""
MEAN = "y = ReduceMean <axes = [-1]> (x)"
TYPED = "float[n, 1] a"


def model(body: str = MEAN, types: str = TYPED, imports: tuple[str, str] = ("", "")):
    text = MODEL.format(body=body, types=types, imports=imports[0], function_imports=imports[1])
    return parser.parse_model(text)


def test_validated_inlines_functions_of_another_opset() -> None:
    """The axes are an attribute in the function and an input in the model."""
    proto = model()
    x = np.arange(8, dtype=np.float32).reshape(2, 4) - 4
    inlined = validated(Path("model.onnx"), proto)
    assert not inlined.functions
    (y,) = ort.InferenceSession(inlined.SerializeToString()).run(None, {"x": x})
    np.testing.assert_allclose(y, np.abs(x.mean(axis=1, keepdims=True)))


@pytest.mark.parametrize(
    "proto",
    [model(types=""), model("y = other.G(x)", imports=(', "other": 1', ', "other": 2'))],
    ids=["untyped result", "custom operators of another version"],
)
def test_validated_functions_that_cannot_be_converted_are_refused(proto: onnx.ModelProto) -> None:
    with raises(InvalidModel, "artifact.functions", "another opset"):
        validated(Path("model.onnx"), proto)


def test_validated_drops_functions_that_nothing_calls() -> None:
    proto = model(imports=(', "other": 1', ""))
    unused = proto.functions.add(name="unused", domain="local", input=["x"], output=["y"])
    unused.opset_import.extend(onnx.helper.make_opsetid(*pair) for pair in (("", 17), ("other", 2)))
    unused.node.append(onnx.helper.make_node("G", ["x"], ["y"], domain="other"))
    assert not validated(Path("model.onnx"), proto).functions
