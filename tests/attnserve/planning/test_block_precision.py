"""The precision of rewritten blocks of models with quantized weights."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

import attnserve
from attnserve.models.onnx_files import load_model, save_model
from attnserve.planning.block_precision import (
    BlockPrecision,
    changed_precisions,
    describe_precisions,
    precision_of_block,
)
from attnserve.planning.plan import Plan
from graph_passes.analysis.constants import constant_array
from graph_passes.emit.editing import Inserter
from graph_passes.matching.find import find_attention
from graph_passes.passes.prune_heads import PruneHeads
from tests.fixtures.make import BERT

FLOAT = BERT / "sdpa-torchscript-17-2" / "model.onnx"


def with_bytes(model: ir.Model) -> ir.Model:
    """The model with the weights of its products as bytes, which DequantizeLinear reads."""
    for node in list(model.graph):
        weight = node.inputs[1] if node.op_type == "MatMul" else None
        if weight is None or not weight.is_initializer():
            continue
        array = constant_array(weight)
        scale = np.array(np.abs(array).max() / 127, np.float32)
        make = Inserter(model.graph, node, f"{weight.name}/bytes")
        bytes_ = make.constant(np.round(array / scale).astype(np.int8), "bytes")
        read = make.op("DequantizeLinear", [bytes_, make.constant(scale, "scale")], "read")
        node.replace_input_with(1, read)
    return model


@pytest.fixture(scope="module")
def int8(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("int8") / "model.onnx"
    save_model(with_bytes(load_model(FLOAT)), path)
    return path


def test_precision_of_block_is_the_type_of_its_weights(int8: Path) -> None:
    for path, precision in ((FLOAT, "float32"), (int8, "int8")):
        model = load_model(path)
        first, *_ = find_attention(model)[0]
        assert precision_of_block(model, first.name) == precision
    assert precision_of_block(load_model(int8), "no such block") is None


def test_optimize_quantized_model_reports_the_precision_of_changed_blocks(
    int8: Path, tmp_path: Path
) -> None:
    first, second = (block.name for block in find_attention(load_model(int8))[0])
    report = attnserve.optimize(int8, tmp_path / "out", prune_heads={"0": [1, 0, 1, 1]})
    assert report.block_precisions == {first: BlockPrecision("int8", "float32")}
    (warning,) = [text for text in report.warnings if "became float32" in text]
    assert first in warning and second not in warning
    record = json.loads((tmp_path / "out" / "attnserve.json").read_text())
    (entry,) = record["lineage"]
    assert entry["block_precisions"] == {first: {"before": "int8", "after": "float32"}}
    assert warning in entry["warnings"]
    made = load_model(tmp_path / "out" / "model.onnx")
    assert precision_of_block(made, second) == "int8"


def test_optimize_quantized_model_converts_changed_blocks_again(int8: Path, tmp_path: Path) -> None:
    first = find_attention(load_model(int8))[0][0].name
    report = attnserve.optimize(
        int8, tmp_path / "out", prune_heads={"0": [1, 0, 1, 1]}, precision="int8"
    )
    assert report.block_precisions == {first: BlockPrecision("int8", "int8")}
    assert report.after.parameters < report.before.parameters
    assert report.after.bytes < 1.2 * report.before.bytes


def test_optimize_float_model_has_no_precisions_of_blocks(tmp_path: Path) -> None:
    report = attnserve.optimize(FLOAT, tmp_path / "out", prune_heads={"0": [1, 0, 1, 1]})
    assert report.block_precisions == {} and "block_precisions" not in report.to_json()


def test_changed_precisions_of_float_blocks_stay_float(int8: Path) -> None:
    model = load_model(int8)
    first = find_attention(model)[0][0].name
    rewritten = load_model(FLOAT)
    pruned = PruneHeads({first: (True, False, True, True)})
    for blocks, after in (((), "int8"), ((first,), "float32")):
        plan = Plan((pruned,), "int8", blocks)
        found = changed_precisions(model, rewritten, plan)
        assert found == {first: BlockPrecision("int8", after)}


def test_describe_precisions_joins_blocks_with_the_same_change() -> None:
    change = BlockPrecision("int8", "float32")
    text = describe_precisions({"a": change, "b": change, "c": BlockPrecision("int8", None)})
    assert text is not None and "a, b" in text and "removed in c" in text
    assert describe_precisions({}) is None
