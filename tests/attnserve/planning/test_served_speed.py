"""What fusion, precision and removal give, each measured beside the form before it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from attnserve import optimize
from attnserve.context import Device, RunContext, TimedModel
from attnserve.job import served_lengths
from attnserve.literals import Precision
from attnserve.models.measured import ServedSpeed
from attnserve.models.onnx_files import load_model
from attnserve.options import Target
from attnserve.planning import served_speed
from attnserve.planning.plans.plan import Plan
from attnserve.planning.served_speed import ServedTimer, time_models
from attnserve.precision.convert import convert
from attnserve.runtime.by_length import RowRuntimes
from attnserve.runtime.interface import RunFailed, Session, SessionOptions, SessionWrapper
from graph_passes.analysis.workload import Workload
from graph_passes.errors import InvalidModel
from graph_passes.matching.find import find_attention
from graph_passes.passes.prune_heads import PruneHeads
from tests.jobs import job_of

pytestmark = pytest.mark.usefixtures("served_fused")

AT = Target(sequence=(5, 6))
SHAPES = [Workload.of(1, 5), Workload.of(1, 6)]


def timer_of(model: ir.Model, *times: float, runtimes: Sequence[str] = ()) -> ServedTimer:
    """A timer that gives these milliseconds at all shapes, to each model in each runtime."""

    def timer(models: Sequence[TimedModel], seconds: float) -> list[np.ndarray]:
        rows = np.array([[float(ms)] * 4 for ms in times])
        assert len(models) == len(rows)
        return [rows] * len(SHAPES)

    job = job_of(model, target=AT, context=RunContext(timer=timer))
    return ServedTimer(replace(job, runtimes=runtimes))


def lossy(precision: Precision) -> Plan:
    return Plan.merged([PruneHeads({"a": [1, 0]})], precision, ())


def values(speed: ServedSpeed | None) -> list[Any]:
    assert speed is not None
    parts = (speed.fusion, speed.precision, speed.removal, speed.served)
    return [part and pytest.approx(part.value) for part in parts]


def test_served_timer_separates_fusion_precision_and_removal(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Original 12 ms, fused 10, in the precision with removal 4, without 5."""
    monkeypatch.setattr(served_speed, "product_flags", lambda: ("avx2", "avx512_vnni"))
    original = load_model(tiny / "model.onnx")
    pruned = original.clone()
    PruneHeads({find_attention(pruned).blocks[0].name: [1, 0, 1, 1]})(pruned)
    timer = timer_of(original, 12, 10, 4, 5)
    speed = timer.speed_of(pruned, pruned.clone(), lossy("int8"))
    assert values(speed) == [1.2, 2.0, 1.25, 2.5]
    assert speed is not None and speed.served_by_shape == pytest.approx((2.5, 2.5))
    assert speed.cpu_flags == ("avx2", "avx512_vnni")  # the times are those of one CPU
    text = speed.describe("int8")
    assert "1.20x by fused" in text and "2.00x by int8" in text and "1.25x by removal" in text


def test_served_timer_reference_is_the_faster_form_of_both(tiny: Path) -> None:
    """A fused original that is slower is not served; nor is the slower form of the result."""
    original = load_model(tiny / "model.onnx")
    pruned = original.clone()
    PruneHeads({find_attention(pruned).blocks[0].name: [1, 0, 1, 1]})(pruned)
    timer = timer_of(original, 10, 12, 8, 5)  # original, fused, pruned, pruned and fused
    speed = timer.speed_of(pruned, pruned, lossy("float32"))
    assert values(speed) == [1.0, None, 2.0, 2.0]


RUNTIMES = ("onnxruntime", "openvino")


def test_served_timer_compares_with_the_original_in_the_default_runtime(tiny: Path) -> None:
    """Also if only another one computes the precision: goals refer to the default one."""
    original = load_model(tiny / "model.onnx")
    exported, fused, converted = 8, 7, 5
    timer = timer_of(original, exported, fused, converted, runtimes=RUNTIMES)
    plan = Plan.merged([], "bfloat16-cpu", ())
    speed = timer.speed_of(original.clone(), original.clone(), plan)
    assert speed is not None and speed.runtimes == RUNTIMES
    assert values(speed) == [8 / 7, 7 / 5, None, 7 / 5]


def test_served_timer_of_float32_times_the_default_runtime(tiny: Path) -> None:
    original = load_model(tiny / "model.onnx")
    timer = timer_of(original, 12, 10, 8, 5, runtimes=RUNTIMES)  # each unfused and fused
    speed = timer.speed_of(original.clone(), original.clone(), lossy("float32"))
    assert values(speed) == [1.2, None, 2.0, 2.0]


@pytest.mark.parametrize("most_bytes", [0, 10**9], ids=["in a child", "in this process"])
def test_time_models_names_a_runtime_that_refuses_a_model(
    most_bytes: int, tiny: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(served_speed, "MOST_BYTES", most_bytes)
    model = load_model(tiny / "model.onnx")
    feeds = served_speed.example_feeds(model, SHAPES, seed=0)
    timed = [(model, "onnxruntime"), (model, "unknown"), (model.clone(), "onnxruntime")]
    found = time_models(timed, feeds, context=RunContext(), seconds=0.01)
    assert [np.isfinite(times.ms) for times in found] == [True, False, True]
    assert "unknown is not timed" in caplog.text


def test_a_large_model_is_timed_in_one_runtime(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attnserve.job.ONE_RUNTIME_BYTES", 0)
    original = load_model(tiny / "model.onnx")
    speed = timer_of(original, 12, 10, 4, runtimes=RUNTIMES).speed_of(
        original.clone(), original.clone(), Plan.merged([], "int8", ())
    )
    assert values(speed) == [1.2, 2.5, None, 2.5]


@pytest.mark.parametrize("fails", ["open", "run"])
def test_time_models_gives_no_time_of_a_runtime_that_fails(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    original = load_model(tiny / "model.onnx")
    open_session = served_speed.open_session

    class Failing(SessionWrapper[Session]):
        def run(self, *given: Any) -> Any:
            raise RunFailed("no kernel", {})

    def opened(model: Any, device: Device, options: SessionOptions) -> Session:
        session = open_session(model, replace(device, runtime="onnxruntime"), options)
        if device.runtime == "onnxruntime":
            return session
        if fails == "open":
            raise InvalidModel("an operator is unknown", "use another one", code="model.unknown")
        return Failing(session)

    monkeypatch.setattr(served_speed, "open_session", opened)
    feeds = served_speed.example_feeds(original, SHAPES, seed=0)
    timed = [(original, "onnxruntime"), (original, "other")]
    first, second = time_models(timed, feeds, context=RunContext(), seconds=0.1)
    assert np.isfinite(first.ms) and np.isinf(second.ms)


def test_served_timer_takes_the_faster_of_two_verified_runtimes_for_each_length(
    tiny: Path,
) -> None:
    """Of an int8 model: the first runtime is faster for short rows, the other one for long rows."""
    original = load_model(tiny / "model.onnx")
    converted = convert(original, "int8")
    by_shape = [[12, 10, 4, 8], [12, 10, 8, 4]]  # the converted model in both runtimes

    def times(models: Sequence[TimedModel], seconds: float) -> list[np.ndarray]:
        return [np.array([[ms] * 2 for ms in shape], float) for shape in by_shape]

    runtimes = ("onnxruntime", "openvino")
    job = job_of(original, target=AT, context=RunContext(timer=times), runtimes=runtimes)
    timer, plan = ServedTimer(job), Plan.merged([], "int8", ())

    def served(*verified: str) -> list[Any]:
        others = [*map(RowRuntimes.parse, verified)]
        speed = timer.speed_of(original.clone(), converted, plan, others)
        assert speed is not None
        return list(speed.served_by_shape)

    pair = "onnxruntime+openvino"
    assert served("openvino", pair) == pytest.approx([10 / 4, 10 / 4])
    assert served("openvino") == pytest.approx([10 / 4, 10 / 8])  # one of both, for all rows
    assert served("openvino", "openvino+onnxruntime") == pytest.approx([10 / 4, 10 / 8])


def test_served_timer_leaves_the_same_blocks_in_float(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What int8 gave is that of the precision of the result, of which some blocks are float32."""
    original, kept = load_model(tiny / "model.onnx"), list[Any]()
    convert = served_speed.convert

    def converted(*given: Any, **named: Any) -> ir.Model:
        kept.append((given[1], tuple(named["float_blocks"])))
        return convert(*given, **named)

    monkeypatch.setattr(served_speed, "convert", converted)
    name = find_attention(original).blocks[0].name
    plan = Plan.merged([PruneHeads({name: [1, 0, 1, 1]})], "int8", (name,))
    timer = timer_of(original, 12, 10, 4, 5)
    assert timer.speed_of(original.clone(), original.clone(), plan)
    assert kept == [("float32", ()), ("int8", (name,))]


def test_served_timer_of_other_inputs_is_none(tiny: Path) -> None:
    original = load_model(tiny / "model.onnx")
    other = original.clone()
    other.graph.inputs[0].name = "other"
    assert ServedTimer(job_of(original, target=AT)).speed_of(other, other, lossy("float32")) is None


@pytest.mark.timing(seconds=5)
@pytest.mark.parametrize("most_bytes", [0, 10**9], ids=["in a child", "in this process"])
def test_time_models_leaves_out_shapes_that_a_model_refuses(
    most_bytes: int, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served_speed, "MOST_BYTES", most_bytes)
    model = load_model(tiny / "model.onnx")
    shapes = [Workload.of(1, 5), Workload.of(2, 100_000)]
    feeds = served_speed.example_feeds(model, shapes[:1], 0)
    feeds[shapes[1]] = {name: np.resize(a, (2, 70)) for name, a in feeds[shapes[0]].items()}
    timed = [(model, "onnxruntime"), (model.clone(), "onnxruntime")]
    found = time_models(timed, feeds, context=RunContext(), seconds=0.01)
    assert [list(times.by_shape) for times in found] == [shapes[:1]] * 2
    assert all((times.by_shape[shapes[0]] > 0).all() for times in found)


@pytest.mark.parametrize(("least", "runs"), [(0.9, 1), (0.97, 2)])
def test_time_models_are_timed_twice_if_one_seems_slow(least: float, runs: int, tiny: Path) -> None:
    second_ms = [1.1, 0.9]

    def timer(models: Sequence[TimedModel], seconds: float) -> list[np.ndarray]:
        return [np.array([[1.0] * 4, [second_ms.pop(0)] * 4])]

    model = load_model(tiny / "model.onnx")
    feeds = served_speed.example_feeds(model, SHAPES[:1], 0)
    timed = [(model, "onnxruntime"), (model.clone(), "onnxruntime")]
    found = time_models(timed, feeds, context=RunContext(timer=timer), min_speedup=least)
    assert len(second_ms) == 2 - runs
    expected = [[1.0] * 4 * runs, [1.1] * 4 + [0.9] * 4 * (runs - 1)]
    assert [times.by_shape[SHAPES[0]].tolist() for times in found] == expected


def test_served_lengths_are_requested_or_those_of_the_data() -> None:
    assert served_lengths(None, None) == (16, 128, 512)
    assert served_lengths(64, None) == (64,)
    assert served_lengths((16, 256), None) == (16, 64, 256)


@pytest.mark.timing(seconds=5)
@pytest.mark.usefixtures("real_clock")
def test_optimize_reports_the_served_speedup(tiny: Path, sentences: Path, tmp_path: Path) -> None:
    """Also in the record; nothing is removed by a conversion alone."""
    report = optimize(tiny, tmp_path / "new", precision="int8", calib=sentences)
    told = report.to_json()
    assert report.record.speedups is not None
    assert told["served_speedup"] == report.record.speedups.served.value > 0
    assert told["speedups"]["removal"] is None
    assert set(told["speedups"]["precision"]) == {"value", "ci95"}
    assert len(told["speedups"]["shapes"]) == len(told["speedups"]["served_by_shape"]) > 0
