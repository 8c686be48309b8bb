"""Benchmark of models: ratios, memory of the process of a model, and refusals."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper, parser

from attnserve import bench
from attnserve.checks import benchmark
from attnserve.checks.benchmark import BenchReport, Measurement
from attnserve.cli.app import main
from attnserve.context import ONE_THREAD, Device
from attnserve.runtime.isolation import Worker
from attnserve.runtime.memory_use import peak_bytes
from attnserve.runtime.onnx_runtime import OnnxRuntime
from graph_passes.errors import AttnserveError, InvalidArgument, InvalidModel
from tests.errors import raises

POSITIONS = 48


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """small.onnx embeds and multiplies once, large.onnx 24 times; both have 48 positions."""
    path = tmp_path_factory.mktemp("models")
    random = np.random.default_rng(0)
    tensors = [
        numpy_helper.from_array(random.standard_normal(shape).astype(np.float32) / 16, name)
        for name, shape in {"w": (11, 256), "p": (POSITIONS, 256), "m": (256, 256)}.items()
    ]
    for name, products in {"small": 1, "large": 24}.items():
        chain = " ".join(f"h{i + 1} = MatMul(h{i}, m)" for i in range(products))
        model = parser.parse_model(
            f"""<ir_version: 8, opset_import: ["" : 17]>
            g (int64[batch,seq] input_ids) => (float[batch,seq,256] y)
            <int64[1] zero = {{0}}, int64[1] one = {{1}}>
            {{
              e = Gather(w, input_ids)
              s = Shape<start = 1>(input_ids)
              r = Slice(p, zero, s, zero)
              h0 = Add(e, r)
              {chain}
              y = Identity(h{products})
            }}"""
        )
        model.graph.initializer.extend(tensors)
        onnx.save(model, path / f"{name}.onnx")
    return path


@pytest.fixture(scope="session")
def report(folder: Path) -> BenchReport:
    models = [folder / "small.onnx", folder / "large.onnx"]
    return bench(models, batches=(1, 2), sequences=(8, POSITIONS), rounds=6)


@pytest.mark.process
def test_bench_results_are_ordered_by_shape_and_model(report: BenchReport, folder: Path):
    rows = [(Path(r.model).stem, r.batch, r.sequence) for r in report.results]
    shapes = [(1, 8), (1, POSITIONS), (2, 8), (2, POSITIONS)]
    assert rows == [(model, *shape) for shape in shapes for model in ("small", "large")]
    assert report.results[0].model == str(folder / "small.onnx")


def test_bench_json_has_the_keys_of_the_contract(report: BenchReport):
    content = report.to_json()
    assert content.keys() == {"results", "machine"}
    assert list(content["results"][0]) == [
        "model",
        "batch",
        "sequence",
        "p50_ms",
        "p90_ms",
        "p99_ms",
        "speedup_vs_first",
        "speedup_ci95",
        "macs",
        "peak_rss_bytes",
        "runtime",
        "precision",
    ]
    assert json.loads(json.dumps(content, allow_nan=False)) == content
    assert content["machine"]["onnxruntime"] and content["machine"]["threads"] == 1


def test_bench_first_model_has_speedup_one(report: BenchReport):
    for result in report.results[::2]:
        assert result.speedup_vs_first == 1.0 and result.speedup_ci95 == (1.0, 1.0)


def test_bench_larger_model_is_slower_within_its_interval(report: BenchReport):
    small, large = report.results[-2:]
    assert large.p50_ms > small.p50_ms
    low, high = large.speedup_ci95
    assert 0 < low <= large.speedup_vs_first <= high < 1
    assert len(large.samples_ms) == 6 and large.first_ms == small.samples_ms


def test_bench_counts_macs_and_rate(report: BenchReport):
    large = report.results[-1]
    assert large.macs == 24 * 2 * POSITIONS * 256 * 256
    assert large.gmacs_per_second == pytest.approx(large.macs / (large.p50_ms * 1e-3) / 1e9)


def test_bench_peak_memory_excludes_the_parent(folder: Path):
    ballast = np.ones(2**27, dtype=np.uint8)  # 128 MiB that only the parent holds
    ballast_run = bench([folder / "small.onnx"], sequences=(8,), rounds=1).results[0]
    own = peak_bytes()
    assert ballast.all() and own > 2**27
    assert 2**24 < ballast_run.peak_rss_bytes < own


@pytest.mark.process
@pytest.mark.parametrize("told", [5 * 2**20, None])
def test_bench_gpu_peaks_are_per_model_and_shape_on_cuda_only(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    told: int | None,
):  # fmt: skip
    """The runs are on the CPU, in the place of a GPU."""
    asked: list[tuple[str, tuple[int, ...]]] = []

    def peak(self: OnnxRuntime, model: Path, inputs: Any, device: Device) -> int | None:
        assert device.provider == "cuda"
        asked.append((model.stem, inputs["input_ids"].shape))
        return told and told + len(asked)

    monkeypatch.setattr(OnnxRuntime, "peak_bytes", peak)
    monkeypatch.setattr(
        benchmark, "Worker", lambda runner, model, device: Worker(runner, model, ONE_THREAD)
    )
    models = [folder / "small.onnx", folder / "large.onnx"]
    report = bench(models, sequences=(8, 16), rounds=1, provider="cuda")
    assert asked == [(name, (1, n)) for n in (8, 16) for name in ("small", "large")]
    rows = report.to_json()["results"]
    assert [row.get("peak_gpu_bytes") for row in rows] == [
        told and told + place for place in (1, 2, 3, 4)
    ]
    assert all(("peak_gpu_bytes" in row) == (told is not None) for row in rows)
    for provider in ("cuda", "cpu"):
        given = ["bench", str(models[0]), "--seq", "8", "--rounds", "1", "--provider", provider]
        assert main(given) == 0
        shown = capsys.readouterr().out
        assert ("GPU" in shown) == (provider == "cuda")
        assert (" 5 " in shown) == (provider == "cuda" and told is not None)


def test_measurement_statistics_of_samples():
    # The machine halves its speed after the second round: pairs cancel what medians would not.
    result = Measurement("m", 1, 1, (1.0, 1.0, 2.0, 2.0), (3.0, 3.0, 6.0, 6.0), None, 0)
    assert (result.p50_ms, result.speedup_vs_first) == pytest.approx((1.5, 3.0))
    assert result.speedup_ci95 == pytest.approx((3.0, 3.0)) and result.gmacs_per_second is None


def test_speedup_interval_narrows_with_rounds_and_is_reproducible():
    def width(rounds: int) -> float:
        noise = np.random.default_rng(0).normal(10, 1, (2, rounds))
        result = Measurement("m", 1, 1, tuple(noise[0]), tuple(noise[1]), None, 0)
        assert result.speedup_ci95 == result.speedup_ci95
        low, high = result.speedup_ci95
        assert low < 1 < high
        return high - low

    assert width(400) < width(25) / 2


def test_bench_progress_ends_at_its_total(folder: Path):
    seen: list[tuple[int, int]] = []
    bench(
        [folder / "small.onnx"],
        sequences=(8, 16),
        rounds=2,
        progress=lambda stage, done, total: seen.append((done, total)),
    )
    assert seen == [(50, 200), (100, 200), (150, 200), (200, 200)]


@pytest.mark.process
def test_bench_runs_in_a_script_without_main_guard(folder: Path):
    """The child imports attnserve, never the caller's script."""
    script = (
        "from attnserve import bench\n"
        f"print(len(bench([{str(folder / 'small.onnx')!r}], sequences=(8,), rounds=1).results))"
    )
    run = [sys.executable, "-"]
    done = subprocess.run(run, input=script, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr, done.returncode) == ("1\n", "", 0)


def test_bench_too_long_sequence_names_model_and_shape(folder: Path):
    with pytest.raises(InvalidArgument) as refused:
        bench([folder / "small.onnx"], sequences=(POSITIONS + 1,), rounds=1)
    assert "small.onnx: does not run at batch 1, sequence 49: " in refused.value.what
    assert refused.value.fix == "use a shorter sequence or a smaller batch"


def test_bench_too_long_sequence_names_the_maximum_length(folder: Path, tmp_path: Path):
    (tmp_path / "model.onnx").write_bytes((folder / "small.onnx").read_bytes())
    (tmp_path / "attnserve.json").write_text(json.dumps({"max_length": POSITIONS}))
    with raises(InvalidArgument, "benchmark.shape", "at most 48"):
        bench([tmp_path], sequences=(64,), rounds=1)


def test_bench_process_that_dies_names_its_model(folder: Path, monkeypatch: pytest.MonkeyPatch):
    def killed(*arguments: Any) -> Worker:
        worker = Worker(*arguments)
        worker.process.kill()
        return worker

    monkeypatch.setattr(benchmark, "Worker", killed)
    with raises(InvalidModel, "benchmark.process_died", "small.onnx", "SIGKILL"):
        bench([folder / "small.onnx"], sequences=(8,), rounds=1)


@pytest.mark.parametrize(
    ("options", "code", "value"),
    [
        ({"rounds": 0}, "benchmark.range", "`rounds` is 0: expected an integer, at least 1"),
        ({"batches": (1, 0)}, "benchmark.range", "`batches` is 0: expected an integer, at least 1"),
        (
            {"sequences": (-4,)},
            "benchmark.range",
            "`sequences` is -4: expected an integer, at least 1",
        ),
        ({"sequences": ()}, "benchmark.empty", "`sequences`"),
        ({"threads": -1}, "run.range", "`threads` is -1"),
        ({"provider": "tpu"}, "run.range", "cpu, cuda"),
        ({"models": []}, "benchmark.empty", "`models`"),
        ({"models": ["absent.onnx"]}, "artifact.missing", "absent.onnx"),
    ],
)
def test_bench_invalid_arguments_are_refused(folder: Path, options: dict, code: str, value: str):
    arguments = {"models": [folder / "small.onnx"], **options}
    with raises(AttnserveError, code, value) as refused:
        bench(**arguments)
    assert refused.value.exit_code == 2 and len(str(refused.value).splitlines()) <= 3


def test_bench_refused_graph_is_named(folder: Path, tmp_path: Path):
    model = onnx.load(folder / "small.onnx")
    model.graph.node[-1].op_type = "NoSuchOperator"
    onnx.save(model, tmp_path / "bad.onnx")
    with raises(InvalidModel, "session.graph_refused", "bad.onnx"):
        bench([tmp_path / "bad.onnx"], sequences=(8,), rounds=1)
