"""Weights inside an .onnx file are memory-mapped."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from attnserve.checks.inspect import inspect, inspect_graph
from attnserve.models.onnx_files import load_model
from attnserve.runtime.onnx_reader import LARGE, read_in_place


def model_of(path: Path, *arrays: np.ndarray) -> Path:
    """Tokens through one product a weight."""
    nodes, made = [], "x"
    for index in range(len(arrays)):
        nodes.append(helper.make_node("MatMul", [made, f"w{index}"], [f"y{index}"]))
        made = f"y{index}"
    width = arrays[0].shape[0]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", width])],
        [helper.make_tensor_value_info(made, TensorProto.FLOAT, ["n", arrays[-1].shape[1]])],
        [numpy_helper.from_array(array, f"w{index}") for index, array in enumerate(arrays)],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]), path)
    return path


def square(width: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((width, width)).astype(np.float32)


def test_read_in_place_large_weight_is_external(tmp_path: Path):
    weights = [square(128), square(128, seed=1)[:, :4]]
    path = model_of(tmp_path / "m.onnx", *weights)
    large, small = read_in_place(path).graph.initializer
    assert large.data_location == TensorProto.EXTERNAL and not large.HasField("raw_data")
    assert small.data_location == TensorProto.DEFAULT
    read = load_model(path, in_place=True).graph.initializers
    for index, weight in enumerate(weights):
        tensor = read[f"w{index}"].const_value
        assert tensor is not None
        np.testing.assert_array_equal(tensor.numpy(), weight)


@pytest.mark.parametrize(("size", "left"), [(LARGE // 4, True), (LARGE // 4 - 1, False)])
def test_read_in_place_limit_is_exact(tmp_path: Path, size: int, left: bool):
    weight = np.ones((1, size), np.float32)
    (tensor,) = read_in_place(model_of(tmp_path / "m.onnx", weight)).graph.initializer
    assert (tensor.data_location == TensorProto.EXTERNAL) == left


def test_read_in_place_equals_onnx_load_without_weights(tiny: Path):
    whole, in_place = onnx.load(tiny / "model.onnx"), read_in_place(tiny / "model.onnx")
    del whole.graph.initializer[:], in_place.graph.initializer[:]
    assert whole == in_place


def test_inspect_in_place_is_the_same(tiny: Path):
    whole = inspect_graph(load_model(tiny / "model.onnx"), batch=1, sequence=16)
    assert inspect(tiny, sequence=16).to_json() == whole.to_json()


@pytest.mark.parametrize("keep", [1, 40, 70_000])
def test_read_in_place_truncated_file_is_refused(tmp_path: Path, keep: int):
    path = model_of(tmp_path / "m.onnx", square(192))
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(Exception, match=r"field|number|Error parsing|wire"):
        read_in_place(path)


MEASURE = """
import resource, sys
from pathlib import Path
import attnserve, onnxruntime
attnserve.inspect(Path(sys.argv[1]))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
attnserve.inspect(Path(sys.argv[2]))
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


@pytest.mark.process
@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is in KiB on Linux")
def test_inspect_memory_is_below_the_file_size(tmp_path: Path):
    small = model_of(tmp_path / "small.onnx", square(8))
    large = model_of(tmp_path / "large.onnx", *(square(2048, seed) for seed in range(12)))
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(small), str(large)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(done.stdout) < 1.0 * large.stat().st_size
