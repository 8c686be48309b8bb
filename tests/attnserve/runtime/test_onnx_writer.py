"""Models are written without copies of their weights, with the bytes of the protobuf library."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from attnserve.runtime.onnx_reader import LARGE
from attnserve.runtime.onnx_writer import write_model


def model_of(*tensors: ir.TensorProtocol) -> ir.Model:
    """One Identity per weight, with everything that a file may store."""
    values = [ir.val(tensor.name, const_value=tensor) for tensor in tensors]
    nodes = [ir.node("Identity", [value], name=f"n_{value.name}") for value in values]
    outputs = [node.outputs[0] for node in nodes]
    graph = ir.Graph(
        [], outputs, nodes=nodes, initializers=values, name="g", opset_imports={"": 17},
        doc_string="after the weights", metadata_props={"key": "value"},
    )  # fmt: skip
    return ir.Model(
        graph, ir_version=10, producer_name="test", doc_string="d", metadata_props={"a": "b"}
    )


def weights(count: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(count).astype(np.float32)


@pytest.mark.parametrize("count", [0, LARGE // 4 - 1, LARGE // 4, 3 * LARGE])
def test_write_model_equals_protobuf(count: int, tmp_path: Path):
    large = ir.tensor(weights(count), name="w", doc_string="behind the content")
    large.metadata_props["key"] = "value"
    model = model_of(ir.tensor(weights(3), name="first"), large, ir.tensor(weights(5), name="x"))
    write_model(model, tmp_path / "m.onnx")
    assert (tmp_path / "m.onnx").read_bytes() == ir.to_proto(model).SerializeToString()
    assert [path.name for path in tmp_path.iterdir()] == ["m.onnx"]
    assert model.graph.initializers["w"].const_value is large


@pytest.mark.parametrize("dtype", [ir.DataType.BFLOAT16, ir.DataType.INT4, ir.DataType.STRING])
def test_write_model_of_other_types_equals_protobuf(dtype: ir.DataType, tmp_path: Path):
    if dtype == ir.DataType.STRING:
        tensor: ir.TensorProtocol = ir.StringTensor(
            [b"abc"] * LARGE, shape=ir.Shape([LARGE]), name="w"
        )
    else:
        tensor = ir.tensor(np.ones(2 * LARGE, dtype.numpy()), dtype=dtype, name="w")
    model = model_of(tensor)
    write_model(model, tmp_path / "m.onnx")
    assert (tmp_path / "m.onnx").read_bytes() == ir.to_proto(model).SerializeToString()


def test_interrupted_write_leaves_the_old_file_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    path = tmp_path / "model.onnx"
    path.write_bytes(b"old")
    monkeypatch.setattr(ir.Tensor, "tofile", full)
    with pytest.raises(OSError, match="No space"):
        write_model(model_of(ir.tensor(weights(LARGE), name="w")), path)
    assert path.read_bytes() == b"old"
    assert [each.name for each in tmp_path.iterdir()] == ["model.onnx"]
