"""Models that other tools quantized: they are matched, certified and fused as they are."""

from __future__ import annotations

import logging
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnxruntime import quantization
from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

import attnserve
from attnserve.checks.certify import read_attention
from attnserve.checks.inspect import inspect_graph
from attnserve.context import ONE_THREAD, Device
from attnserve.fusion import fuse, fusion_passes
from attnserve.models.artifact import open_artifact
from attnserve.models.example_inputs import example_inputs
from attnserve.models.onnx_files import load_model, save_model
from attnserve.models.quantized import rounds_activations
from attnserve.planning.served_graph import variants
from attnserve.planning.served_graph.equality import Reference, distance
from attnserve.planning.served_graph.lossless import fuse_lossless
from attnserve.precision.int4 import quantize_to_int4
from attnserve.precision.int8 import quantize
from attnserve.runtime.session import open_session
from attnserve.serving.model_check import LoadChecker
from graph_passes.analyses import Analyses
from graph_passes.analysis.constants import is_constant
from graph_passes.analysis.cost import parameter_bytes
from graph_passes.analysis.workload import Workload
from graph_passes.errors import CannotRewrite, InvalidModel
from tests import architectures
from tests.architectures import ARCHITECTURES, COMMITTED, OTHER_LENGTHS
from tests.attnserve.costs import fused_is_faster
from tests.errors import raises
from tests.fixtures.checked_child import FAST

CELLS = {cell.architecture: cell for cell in COMMITTED if not cell.variant}
BERT_LIKE = ("BERT", "DistilBERT", "GPT-2", "ViT", "Llama")
PRODUCTS = ("MatMul", "Gemm", "Gather")

Feed = Mapping[str, np.ndarray]


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)  # the tools advise to preprocess models


class Calibration(quantization.CalibrationDataReader):
    """Hands batches to the calibration of ONNX Runtime."""

    def __init__(self, feeds: list[Feed]) -> None:
        self.feeds: Iterator[Feed] = iter(feeds)

    def get_next(self) -> Any:
        return next(self.feeds, None)


def products_of_activations(path: Path) -> list[str]:
    """The names of products without a constant, which stay in floating point."""
    return [
        node.name or ""
        for node in ir.load(path).graph
        if node.op_type == "MatMul" and not any(map(is_constant, node.inputs))
    ]


def dynamic(source: Path, path: Path, feed: Feed) -> None:
    quantization.quantize_dynamic(source, path, op_types_to_quantize=PRODUCTS)


def dynamic_by_channel(source: Path, path: Path, feed: Feed) -> None:
    quantization.quantize_dynamic(
        source, path, op_types_to_quantize=PRODUCTS, per_channel=True, reduce_range=True,
        weight_type=quantization.QuantType.QInt8,
    )  # fmt: skip


def static(source: Path, path: Path, feed: Feed, format: str = "QDQ") -> None:
    quantization.quantize_static(
        source, path, Calibration([feed]), quant_format=quantization.QuantFormat[format],
        op_types_to_quantize=["MatMul", "Gemm"], nodes_to_exclude=products_of_activations(source),
        reduce_range=True,  # kernels without VNNI would saturate, each in its own order
    )  # fmt: skip


def static_operators(source: Path, path: Path, feed: Feed) -> None:
    static(source, path, feed, "QOperator")


def optimized(source: Path, path: Path, feed: Feed) -> None:
    """What ONNX Runtime makes of it: MatMulIntegerToFloat and DynamicQuantizeMatMul."""
    dynamic(source, path, feed)
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.optimized_model_filepath = str(path)
    ort.InferenceSession(path.read_bytes(), options, providers=["CPUExecutionProvider"])


def four_bits(source: Path, path: Path, feed: Feed) -> None:
    tool = MatMulNBitsQuantizer(onnx.load(source), block_size=32, is_symmetric=True)
    tool.process()
    tool.model.save_model_to_file(str(path))


def own_int8(source: Path, path: Path, feed: Feed) -> None:
    model = load_model(source)
    quantize(model, 7, {})
    save_model(model, path)


def own_int4(source: Path, path: Path, feed: Feed) -> None:
    model = load_model(source)
    quantize_to_int4(model)
    save_model(model, path)


TOOLS = {tool.__name__: tool for tool in (
    dynamic, dynamic_by_channel, static, static_operators, optimized, four_bits, own_int8, own_int4,
)}  # fmt: skip

UNCHANGED = {("GPT-2", "four_bits"), ("GPT-2", "own_int4")}
"""Tools that leave Gemm in floating point."""


def made(architecture: str, tool: str, folder: Path) -> tuple[ir.Model, Feed]:
    """A quantized model, and inputs."""
    source, path = CELLS[architecture].committed, folder / "quantized.onnx"
    arrays = architectures.feeds(ARCHITECTURES[architecture], OTHER_LENGTHS)
    inputs = {value.name for value in ir.load(source).graph.inputs}
    feed = {name: array for name, array in arrays.items() if name in inputs}
    TOOLS[tool](source, path, feed)
    return load_model(path), feed


def outputs(model: ir.Model, feed: Feed) -> list[np.ndarray]:
    return [np.asarray(a) for a in open_session(model, ONE_THREAD).run(None, dict(feed))]


def kinds(model: ir.Model) -> Counter[str]:
    return Counter(node.op_type for node in model.graph)


@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize("architecture", BERT_LIKE)
def test_fuse_quantized_model_keeps_its_integers_and_outputs(
    architecture: str, tool: str, tmp_path: Path
) -> None:
    """No activation of these models moves to another integer, so that outputs are equal."""
    model, feed = made(architecture, tool, tmp_path)
    new = model.clone()
    report = Analyses.of(new).get(read_attention)
    assert [unmatched.reason for unmatched in report.unmatched] == []
    assert len(report.blocks) == 2
    is_quantized = (architecture, tool) not in UNCHANGED
    assert {block.is_quantized for block in report.blocks} == {is_quantized}
    assert {block.kind for block in report.blocks} == {"self"}
    # ONNX Runtime 1.31 refuses a Reshape behind a DequantizeLinear of unsigned bytes in later
    # opsets.
    old = tool.startswith("static") and architecture in ("GPT-2", "Llama")
    fuse(new, fusion_passes(new, operators=["multi_head"] if old else None))
    before, after = kinds(model), kinds(new)
    assert after["Softmax"] == after["Erf"] == after["Tanh"] == 0
    attention = after["Attention"] + after["MultiHeadAttention"]
    gelu = after["Gelu"] + after["FastGelu"]
    assert (attention, gelu) == (2, 0 if architecture == "Llama" else 2)
    if is_quantized:
        for kind in before.keys() & set(QUANTIZED):
            assert after[kind] == before[kind]
        assert parameter_bytes(new) <= parameter_bytes(model) + 1024
    for one, other in zip(outputs(model, feed), outputs(new, feed), strict=True):
        cosine, error = distance(one, other)
        assert cosine >= 1 - 1e-6 and error < 1e-5


QUANTIZED = ("MatMulInteger", "MatMulIntegerToFloat", "DynamicQuantizeMatMul", "MatMulNBits",
             "QLinearMatMul", "QGemm", "QuantizeLinear", "DynamicQuantizeLinear",
             "DequantizeLinear")  # fmt: skip


def test_read_attention_quantized_scores_are_unmatched_with_the_reason(tmp_path: Path) -> None:
    """By default, the tool puts QuantizeLinear and DequantizeLinear around the softmax too."""
    cell = CELLS["BERT"]
    feed = architectures.feeds(ARCHITECTURES["BERT"], OTHER_LENGTHS)
    inputs = {value.name for value in ir.load(cell.committed).graph.inputs}
    feed = {name: array for name, array in feed.items() if name in inputs}
    quantization.quantize_static(cell.committed, tmp_path / "q.onnx", Calibration([feed]))
    model = load_model(tmp_path / "q.onnx")
    matches = read_attention(model)
    assert not matches.blocks
    assert all("scores are quantized" in unmatched.reason for unmatched in matches.unmatched)
    assert len(matches.unmatched) == 2


def test_inspect_quantized_model_equals_the_float_model(tmp_path: Path) -> None:
    model, _ = made("BERT", "dynamic", tmp_path)
    plain = load_model(CELLS["BERT"].committed)
    content, original = (inspect_graph(m, batch=1, sequence=16).to_json() for m in (model, plain))
    same = ("kind", "num_heads", "head_size", "v_head_size", "input_size", "form", "macs")
    for block, other in zip(content["attention"], original["attention"], strict=True):
        assert {key: block[key] for key in same} == {key: other[key] for key in same}
        assert block["certified"] and "float model" in block["rewrites"]["prune_heads"]
        assert len(set(block["rewrites"].values())) == 1
    assert content["macs"] == original["macs"]


@pytest.fixture
def folder(tiny: Path, tmp_path: Path) -> Path:
    """An artifact whose model ONNX Runtime quantized."""
    path = Path(shutil.copytree(tiny, tmp_path / "int8"))
    (path / "model.onnx").rename(path / "float.onnx")
    dynamic(path / "float.onnx", path / "model.onnx", {})
    (path / "float.onnx").unlink()
    return path


def test_optimize_quantized_model_is_refused(folder: Path, sentences: Path) -> None:
    """Each by its name, with what to do."""
    for options in ({"prune": 0.25}, {"collab_dk": 16}, {"ffn": 0.25}):
        with raises(CannotRewrite, "request.nothing", "float model"):
            attnserve.optimize(folder, folder.parent / "new", calib=sentences, **options)
    with raises(CannotRewrite, "rewrite.quantized", "float model"):
        attnserve.optimize(folder, folder.parent / "new", calib=sentences, skip=["0"])
    with raises(InvalidModel, "analysis.no_attention", "quantized weights"):
        attnserve.analyze(folder, folder.parent / "report", calib=sentences)


def test_fuse_lossless_quantized_model_is_fused(folder: Path) -> None:
    found = fuse_lossless(open_artifact(folder), folder / "new.onnx", ONE_THREAD, fused_is_faster)
    assert (found.attention, found.gelu) == (2, 2)
    model = load_model(folder / "model.onnx")
    assert rounds_activations(model) and not rounds_activations(load_model(CELLS["BERT"].committed))


MASKS = {"Attention": 3, "MultiHeadAttention": 5}
"""The place of the mask of each operator."""


def test_fuse_lossless_quantized_model_without_its_mask_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tolerance is no wider than the differences that the original has to itself."""

    def unmasked(model: ir.Model, passes: Any) -> None:
        fuse(model, passes)
        for node in model.graph:
            if node.op_type in MASKS:
                node.replace_input_with(MASKS[node.op_type], None)

    monkeypatch.setattr(variants, "fuse", unmasked)
    with raises(CannotRewrite, "fusion.differs"):
        fuse_lossless(open_artifact(folder), folder / "new.onnx", ONE_THREAD)


@pytest.mark.process
def test_check_quantized_model_gives_its_fused_form(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, python = tmp_path / "child.py", tmp_path / "python"
    program.write_text(FAST.format(more=""))
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{program}"\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    checker = LoadChecker(device=Device("cpu", threads=1), timeout_s=60, rewrite=True, folder=None)
    found = checker.check(open_artifact(folder))
    if found.fusion is not None:  # a busy machine: it runs in the background
        found = found.fusion.result(300)
    assert found.fused_file is not None
    fused = found.operators.fused
    assert fused is not None and (fused.attention, fused.gelu) == (2, 2)
    assert kinds(ir.load(found.fused_file))["Softmax"] == 0


@pytest.mark.parametrize("tool", ["dynamic", "static", "own_int8"])
def test_fuse_quantized_minilm_is_within_the_tolerance(
    tool: str, minilm_export: Callable[[str, str, int], Path], tmp_path: Path
) -> None:
    """It consists of quantized products, Attention, Gelu and LayerNormalization."""
    source = minilm_export("eager", "torchscript", 17) / "model.onnx"
    plain = load_model(source)
    TOOLS[tool](source, tmp_path / "q.onnx", example_inputs(plain, Workload.of(4, 33), 0))
    model = load_model(tmp_path / "q.onnx")
    new = model.clone()
    fuse(new, fusion_passes(new))
    after = kinds(new)
    assert (after["Attention"], after["Gelu"], after["LayerNormalization"]) == (6, 6, 13)
    assert after["Softmax"] == after["Erf"] == after["Transpose"] == 0
    reference = Reference.of(tmp_path / "q.onnx", model, ONE_THREAD)
    least, largest = reference.compare(open_session(new, ONE_THREAD))
    assert least >= 0.9 and largest <= 0.2
