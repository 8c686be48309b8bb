"""Sessions, rewrites and training on a GPU; skipped where there is none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

import attnserve
from attnserve.context import ONE_THREAD, Device
from attnserve.models.artifact import open_artifact
from attnserve.models.example_inputs import example_inputs
from attnserve.models.onnx_files import save_model
from attnserve.planning.served_graph.lossless import fuse_lossless
from attnserve.runtime.cuda import Cuda
from attnserve.runtime.interface import SessionOptions
from attnserve.runtime.session import open_session, require_cuda
from attnserve.serving.buckets import Buckets
from attnserve.serving.cuda_graphs import GraphRunner
from benchmarks import cuda
from benchmarks.gpu.encoder import random_encoder, to_half
from benchmarks.gpu.forms import FORMS, ORIGINAL, Size
from benchmarks.gpu.profiles import read_runs
from graph_passes.analysis.workload import Workload
from graph_passes.errors import Refusal
from tests.attnserve.costs import fused_is_faster

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        Refusal.of(require_cuda) is not None, reason="this machine has no usable GPU"
    ),
]

SIZE = Size(2, 64, 4)


@pytest.fixture
def encoder() -> ir.Model:
    return random_encoder(layers=2, hidden=64, heads=4, positions=64)


def test_session_agrees_with_the_cpu(encoder: ir.Model):
    feed = example_inputs(encoder, Workload.of(3, 20), padded=True)
    (expected,) = open_session(encoder, ONE_THREAD).run(None, feed)
    (got,) = open_session(encoder, Device("cuda")).run(None, feed)
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-4)


def test_rewritten_graphs_agree_in_float32(tmp_path: Path):
    errors = cuda.parity("cuda", tmp_path, SIZE, 64)
    assert set(errors) == {"collaborative", "fused"} and max(errors.values()) <= cuda.PARITY


@pytest.mark.parametrize("name", [name for name in FORMS if name != ORIGINAL])
def test_forms_in_half_precision_agree(name: str):
    """Half of the heads can be pruned, so pruning and sparse mixing lose little."""
    original = SIZE.build(64)
    feed = example_inputs(original, Workload.of(2, 32), padded=True)
    kept = feed["attention_mask"] == 1
    expected = open_session(original, Device("cuda")).run(None, feed)[0][kept]
    new = FORMS[name](original.clone(deep_copy=True), SIZE)
    got = open_session(new, Device("cuda")).run(None, feed)[0][kept]
    cosine = (got * expected).sum(-1) / (
        np.linalg.norm(got, axis=-1) * np.linalg.norm(expected, axis=-1)
    )
    # Reuse is an approximation: layers with random weights have different probabilities.
    assert cosine.min() > (0.5 if name == "reused fp16" else 0.99)


@pytest.mark.parametrize("half", [None, ir.DataType.FLOAT16, ir.DataType.BFLOAT16])
def test_models_are_fused_without_loss(encoder: ir.Model, half: ir.DataType | None, tmp_path: Path):
    if half is not None:
        to_half(encoder, half)
    save_model(encoder, tmp_path / "model.onnx")
    report = fuse_lossless(
        open_artifact(tmp_path / "model.onnx"),
        tmp_path / "fused.onnx",
        Device("cuda"),
        fused_is_faster,
    )
    assert (report.attention, report.gelu) == (2, 2)
    kinds = [node.op_type for node in ir.load(tmp_path / "fused.onnx").graph]
    assert kinds.count("SkipLayerNormalization") == 4


def test_captured_graphs_give_the_answers_of_plain_runs(encoder: ir.Model):
    runner = GraphRunner(
        open_session(encoder, Device("cuda"), SessionOptions(cuda=Cuda(graphs=True))),
        Buckets(4, longest=64),
    )
    runner.allow_padding(rows=True, tokens=True)
    plain = open_session(encoder, Device("cuda"))
    for seed, shape in enumerate([(3, 20), (3, 20), (3, 17), (1, 8), (1, 8), (3, 24), (1, 5)] * 2):
        feed = example_inputs(encoder, Workload.of(*shape), seed, padded=True)
        (got,), (expected,) = runner.run(None, feed), plain.run(None, feed)
        np.testing.assert_allclose(got, expected, rtol=0, atol=1e-4)
    assert runner.buckets.captured


def test_profile_has_memory_and_operators(encoder: ir.Model, tmp_path: Path):
    session: Any = open_session(encoder, Device("cuda"), SessionOptions(profile=tmp_path / "run"))
    feed = example_inputs(encoder, Workload.of(2, 32))
    for _ in range(2):
        session.run(None, feed)
    session.bind(feed)()
    runs = read_runs(Path(session.end_profiling()))
    assert all(run.peak_bytes for run in runs) and "MatMul" in runs[-1].shares


def test_search_and_benchmark_run_on_the_gpu(encoder: ir.Model, tmp_path: Path):
    model, data = tmp_path / "model.onnx", tmp_path / "data.npz"
    save_model(encoder, model)
    np.savez(data, **example_inputs(encoder, Workload.of(120, 24), padded=True))
    result = attnserve.optimize(
        model, tmp_path / "new", keep=0.9, calib=[data], measure="cosine", provider="cuda"
    )
    report = attnserve.bench(
        [model, tmp_path / "new"], batches=(8,), sequences=(24,), provider="cuda", rounds=20
    )
    quality = result.fidelity.quality
    assert quality is not None and quality.value >= 0.9
    assert all(row.peak_gpu_bytes for row in report.results)


@pytest.mark.export
def test_training_on_the_gpu_improves_a_rewritten_model(encoder: ir.Model, tmp_path: Path):
    model, data = tmp_path / "model.onnx", tmp_path / "data.npz"
    save_model(encoder, model)
    np.savez(data, **example_inputs(encoder, Workload.of(160, 24), padded=True))
    attnserve.optimize(
        model, tmp_path / "small", collab_dk=16, mixing="dense", calib=[data], provider="cuda"
    )
    report = attnserve.recover(
        tmp_path / "small", tmp_path / "trained", teacher=model, data=data, minutes=0.3,
        measure="cosine", provider="cuda",
    )  # fmt: skip
    before, after = report.before.quality, report.after.quality
    assert before is not None and after is not None
    assert report.record.gain and after.value > before.value
    assert (tmp_path / "trained" / "model.onnx").is_file()
