"""The precision and the runtime of a search follow from measured times and losses."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from weakref import ReferenceType, ref

import numpy as np
import onnx_ir as ir
import pytest

from attnserve.context import Device, RunContext, TimedModel
from attnserve.job import Job
from attnserve.models.artifact import open_artifact
from attnserve.models.measured import Fidelity, ShapeLatency
from attnserve.models.onnx_files import load_model
from attnserve.models.quantized import int8_weight_bits
from attnserve.models.search_record import Point, PrecisionPoint, TrainingRounds
from attnserve.options import Data, Goal, Target
from attnserve.planning.plans.plan import Plan
from attnserve.planning.plans.plan_file import FORMAT, PlanRecord
from attnserve.planning.search import search, search_result
from attnserve.planning.search.judge import Candidate, Judge, TimedCandidate
from attnserve.planning.search.precision_search import PrecisionSearch
from attnserve.planning.search.precisions import PrecisionComparison, compare_precisions
from attnserve.planning.search.search import search_precisions
from attnserve.planning.search.search_result import SearchResult
from attnserve.planning.served_speed import ServedTimer
from attnserve.precision.schemes import SCHEMES
from attnserve.runtime.by_length import RowRuntimes
from attnserve.runtime.times import Speedup
from graph_passes.errors import CannotRewrite, CheckFailed, InvalidArgument, Refusal
from tests.attnserve.cli.conftest import Cli
from tests.attnserve.costs import SPEED_OF, Count, set_context
from tests.attnserve.planning.conftest import Optimizer, Planner
from tests.errors import raises
from tests.jobs import job_of

pytestmark = pytest.mark.usefixtures("cache")


class Timer(Count):
    """Counts operations, and divides the time by a speed.

    Args:
        int8: The speed of int8 models.
        openvino: The speed of OpenVINO.
    """

    def __init__(self, int8: float = 1.0, openvino: float = 0.9) -> None:
        super().__init__()
        self.int8, self.openvino = int8, openvino
        self.runtimes: list[str] = []

    def __call__(self, models: Any, seconds: float = 0.0) -> list[np.ndarray]:
        self.runtimes += [timed.device.runtime_name for timed in models]
        speeds = np.array([self.speed(timed) for timed in models])
        return [ms / speeds[:, None] for ms in super().__call__(models, seconds)]

    def speed(self, timed: TimedModel) -> float:
        speed = self.int8 if int8_weight_bits(timed.model) is not None else 1.0
        return speed * (self.openvino if timed.device.runtime == "openvino" else 1.0)


def is_int8(precision: str) -> bool:
    return SCHEMES[precision].bits is not None


@pytest.mark.timing(seconds=6)
@pytest.mark.parametrize(
    ("int8", "keep", "chooses_int8"),
    [
        (3.0, 0.9, True),
        (0.5, 0.9, False),  # int8 is slower
        (3.0, 0.999999, False),  # int8 loses too much, even alone
    ],
)
def test_search_of_any_precision_takes_the_fastest_that_keeps_the_quality(
    planned: Planner, monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
    int8: float, keep: float, chooses_int8: bool,
):  # fmt: skip
    set_context(monkeypatch, timer=Timer(int8))
    report = planned(keep=keep, precision="auto")
    assert is_int8(report.goal.precision) == chooses_int8
    assert is_int8(report.plan.precision) == chooses_int8
    points = {point.precision: point for point in report.precisions}
    assert points["float32"].loss == 0 and points["float32"].speedup.value == 1
    compared = next(point for point in report.precisions if is_int8(point.precision))
    assert 0 < compared.loss < 0.1
    assert compared.speedup.value > 1 if int8 > 1 else compared.speedup.value < 1
    assert report.quality is not None and report.quality.losses.measured <= 1 - keep
    written = json.loads((tmp_path / "p.json").read_text())
    assert {row["precision"] for row in written["precisions"]} == points.keys()
    assert [each.precision for each in report.precisions if not each.unused] == [
        report.goal.precision
    ]
    # The front of the result on the common scale: quality and speed rise and fall together.
    front = points[report.goal.precision].front
    assert [each.measured_loss for each in front] == [each.measured_loss for each in report.front]
    scales = [common.speedup / own.speedup for common, own in zip(front, report.front, strict=True)]
    assert scales == pytest.approx([scales[0]] * len(scales))
    fastest = next(each for each in reversed(front) if each.measured_loss is not None)
    assert fastest.speedup >= 0.9 * points[report.goal.precision].speedup.value


BFLOAT16_INT8 = "int8-full-bfloat16"


@pytest.mark.timing(seconds=3)
@pytest.mark.parametrize("openvino", [0.5, 2.0])
def test_search_times_candidates_in_the_runtime_that_computes_the_precision(
    planned: Planner, monkeypatch: pytest.MonkeyPatch, cpu_with: Callable[..., None],
    openvino: float,
):  # fmt: skip
    """Blocks that stay in floating point would be float32 in another one, which may be faster."""
    pytest.importorskip("openvino")
    cpu_with(int8=True, bfloat16=True)
    timer = Timer(int8=4.0, openvino=openvino)
    set_context(monkeypatch, timer=timer)
    report = planned(keep=0.9, precision=BFLOAT16_INT8)
    assert report.machine is not None and "openvino" in report.machine.lower()
    assert report.timed_runtime == "openvino"
    assert report.speedup == pytest.approx(4 * openvino, rel=0.15)  # and fusion
    assert timer.runtimes.count("openvino") > 0.6 * len(timer.runtimes)  # blocks, and candidates


def test_search_of_a_precision_of_every_runtime_times_the_default_one(
    planned: Planner, monkeypatch: pytest.MonkeyPatch
):
    timer = Timer(openvino=9.0)
    set_context(monkeypatch, timer=timer)
    assert planned(keep=0.9).timed_runtime == "onnxruntime"
    assert set(timer.runtimes) == {"onnxruntime"}


@pytest.mark.timing(seconds=3)
@pytest.mark.parametrize("is_kept", [True, False])
def test_int8_result_is_served_in_the_runtimes_that_keep_its_quality(
    optimized: Optimizer, monkeypatch: pytest.MonkeyPatch, cpu_with: Callable[..., None],
    is_kept: bool,
):  # fmt: skip
    """ONNX Runtime is twice as fast as OpenVINO, in which the search is timed."""
    pytest.importorskip("openvino")
    cpu_with(int8=True, bfloat16=True)
    monkeypatch.setattr(ServedTimer, "speed_of", SPEED_OF)
    set_context(monkeypatch, timer=Timer(int8=4.0, openvino=0.5))
    verified = {RowRuntimes.one("onnxruntime"): Fidelity()} if is_kept else {}
    monkeypatch.setattr(search_result, "verify_in_other_runtimes", lambda *_: verified)
    record = optimized(keep=0.9, precision=BFLOAT16_INT8).record
    assert record.search.gain and record.search.speedup < 3.5
    assert record.served_speedup > 3.5 if is_kept else record.served_speedup < 3.5
    assert list(record.other_runtimes.values()) == list(verified.values())
    assert set(record.other_runtimes) == ({"onnxruntime"} if is_kept else set())


def test_target_speedup_counts_in_the_runtime_of_the_precision(
    planned: Planner, monkeypatch: pytest.MonkeyPatch, cpu_with: Callable[..., None]
):
    pytest.importorskip("openvino")
    cpu_with(int8=True, bfloat16=True)
    set_context(monkeypatch, timer=Timer(int8=4.0, openvino=0.5))
    assert not planned(target_speedup=2.0, precision=BFLOAT16_INT8).plan.lossy_blocks
    assert planned("other.json", target_speedup=3.5, precision=BFLOAT16_INT8).plan.lossy_blocks


def test_verdict_and_goal_have_one_reference(
    planned: Planner, monkeypatch: pytest.MonkeyPatch, cpu_with: Callable[..., None]
):
    """The original in the default runtime, although it is faster in the other one."""
    pytest.importorskip("openvino")
    cpu_with(int8=True, bfloat16=True)
    monkeypatch.setattr(ServedTimer, "speed_of", SPEED_OF)
    set_context(monkeypatch, timer=Timer(int8=3.0, openvino=1.4))
    report = planned(target_speedup=4, precision=BFLOAT16_INT8)
    assert report.speedup is not None and report.speedup > 4
    assert float(report.verdict.split("x")[0]) == pytest.approx(report.speedup, rel=0.01)


@pytest.mark.parametrize(("final", "is_reached"), [(1.1, False), (1.19, True)])
def test_final_speed_must_reach_the_target_but_for_noise(
    planned: Planner, monkeypatch: pytest.MonkeyPatch, final: float, is_reached: bool
):
    def time(judge: Judge, candidate: Candidate) -> TimedCandidate:
        speeds = [
            ShapeLatency(batch=1, sequence=at.length, original_ms=final, ms=1.0, speedup=final)
            for at in judge.checked
        ]
        return TimedCandidate(candidate, speeds, final, None)

    monkeypatch.setattr(Judge, "time", time)
    if is_reached:
        assert planned(target_speedup=1.2, allow=["ffn"]).speedup == pytest.approx(final)
    else:
        with raises(CheckFailed, "search.target_speedup", "1.10x"):
            planned(target_speedup=1.2, allow=["ffn"])


@pytest.mark.parametrize(
    ("options", "runtimes"),
    [({}, ["onnxruntime", "openvino"]), ({"runtime": "onnxruntime"}, ["onnxruntime"])],
)
def test_a_replayed_plan_is_timed_in_the_runtimes_that_are_given(
    planned: Planner, optimized: Optimizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any], runtimes: list[str],
):  # fmt: skip
    pytest.importorskip("openvino")
    jobs: list[Job] = []
    speed_of = ServedTimer.speed_of

    def noted(timer: ServedTimer, *models: Any) -> Any:
        jobs.append(timer.job)
        return speed_of(timer, *models)

    monkeypatch.setattr(ServedTimer, "speed_of", noted)
    planned(keep=0.9)
    optimized(plan=tmp_path / "p.json", **options)
    assert [list(job.runtimes) for job in jobs] == [["onnxruntime", "openvino"], runtimes]


def test_a_large_model_and_a_precision_of_one_runtime_run_in_one_runtime(
    model: Path, monkeypatch: pytest.MonkeyPatch
):
    graph = load_model(open_artifact(model))
    job = job_of(graph, runtimes=["onnxruntime", "openvino"])
    assert job.runtimes_for("float32") == ["onnxruntime", "openvino"]
    assert job.runtimes_for("int8-full-bfloat16") == ["openvino", "onnxruntime"]
    assert job.runtimes_for("bfloat16-cpu") == ["openvino"]
    assert job.runtime_for("int8-full") == "onnxruntime"
    assert job.runtime_for("int8-full-bfloat16") == "openvino"
    monkeypatch.setattr("attnserve.job.ONE_RUNTIME_BYTES", 0)
    assert job.runtimes_for("float32") == ["onnxruntime"]
    assert job.runtimes_for("int8-full-bfloat16") == ["openvino"]


def test_precision_auto_needs_a_goal(cli: Cli, model: Path, tmp_path: Path):
    done = cli("optimize", model, "-o", tmp_path / "out.onnx", "--precision", "auto")
    assert done.code == 2 and "auto" in done.err and not (tmp_path / "out.onnx").exists()


def point(precision: str, speed: float, loss: float) -> PrecisionPoint:
    speedup = Speedup(value=speed, ci95=(speed, speed))
    return PrecisionPoint(precision=precision, runtime="onnxruntime", speedup=speedup, loss=loss)


FLOAT32, INT8, BFLOAT16 = (
    point("float32", 1.0, 0.0),
    point("int8", 3.0, 0.02),
    point("bfloat16-cpu", 2.0, 0.004),
)
COMPARED = PrecisionComparison([FLOAT32, INT8, BFLOAT16], fusion=1.5)


@pytest.mark.parametrize(
    ("goal", "first"),
    [
        (Goal(keep=0.9), ["int8", "bfloat16-cpu", "float32"]),
        # A speed-up is over the exported original: that of fusion counts.
        (Goal(target_speedup=1.4), ["float32", "bfloat16-cpu", "int8"]),
        (Goal(target_speedup=1.6), ["bfloat16-cpu", "int8", "float32"]),
        (Goal(target_speedup=3.5), ["int8", "bfloat16-cpu", "float32"]),
        (Goal(target_speedup=5.0), ["int8", "bfloat16-cpu", "float32"]),
    ],
)
def test_order_of_precisions(goal: Goal, first: list[str]):
    assert [each.precision for each in COMPARED.in_search_order(goal)] == first


@pytest.mark.parametrize(
    ("keep", "potential"),
    [
        (0.92, 3.0),  # all blocks may be int8
        (
            0.96,
            1 / (0.5 / 3 + 0.5 / 2),
        ),  # half of the loss beyond that of bfloat16, twice the share
        (0.98, 2.0),  # the rest alone uses the loss
    ],
)
def test_potential_of_a_precision_mixes_it_with_its_rest(keep: float, potential: float):
    rest, mixed = point("bfloat16-cpu", 2.0, 0.02), point("int8-full-bfloat16", 3.0, 0.1)
    in_float = point("int8-full", 3.0, 0.08)
    comparison = PrecisionComparison([FLOAT32, in_float, rest, mixed], 1.0)
    goal = Goal(keep=keep)
    assert comparison.potential(mixed, goal) == pytest.approx(potential, rel=1e-3)
    assert comparison.potential(rest, goal) == 2.0
    order = [each.precision for each in comparison.in_search_order(Goal(keep=0.98))]
    assert order == ["bfloat16-cpu", "int8-full-bfloat16", "int8-full", "float32"]


def test_equally_fast_precisions_are_in_the_order_of_their_losses():
    points = [FLOAT32, point("int8", 3.0, 0.02), point("int8-full", 3.01, 0.03)]
    ordered = PrecisionComparison(points, 1.0).in_search_order(Goal(keep=0.9))
    assert [each.precision for each in ordered] == ["int8", "int8-full", "float32"]


WHOLE, PARTLY, LOSES, NONE, FAILS, REFUSED = (), ("a",), "loses", None, "fails", "refused"
"""The blocks that stay float32; or no candidate, an error, or a candidate that is too slow."""

SLOW = Refusal("slow_length", "it is slow at 16 tokens")

KEEP, SPEED = "keep", "target_speedup"


@pytest.mark.parametrize(
    ("goal", "found", "speeds", "searched", "chosen"),
    [
        # The fastest precision meets the goal in all blocks.
        ({KEEP: 0.97}, {"int8": WHOLE}, {}, ["int8"], "int8"),
        # Some blocks stay float32, and the candidate is slower than another precision.
        ({KEEP: 0.99}, {"int8": PARTLY, "bfloat16-cpu": WHOLE}, {"int8": 1.5},
         ["int8", "bfloat16-cpu"], "bfloat16-cpu"),
        # It is faster than the other precision, which is not searched.
        ({KEEP: 0.99}, {"int8": PARTLY}, {"int8": 2.5}, ["int8"], "int8"),
        # The other precision loses too much, and has no blocks in float32.
        ({KEEP: 0.999}, {"int8": PARTLY}, {"int8": 1.5}, ["int8"], "int8"),
        # The precision alone loses too much.
        ({KEEP: 0.99}, {"int8": LOSES, "bfloat16-cpu": WHOLE}, {}, ["int8", "bfloat16-cpu"],
         "bfloat16-cpu"),
        ({KEEP: 0.9999}, {"int8": LOSES, "float32": WHOLE}, {}, ["int8", "float32"], "float32"),
        ({KEEP: 0.9999}, {"int8": LOSES, "float32": NONE}, {}, ["int8", "float32"], "float32"),
        ({KEEP: 0.9999}, {"int8": LOSES, "float32": LOSES}, {}, ["int8", "float32"], None),
        # Another error of one precision does not lose the result of another one.
        ({KEEP: 0.99}, {"int8": PARTLY, "bfloat16-cpu": FAILS}, {"int8": 1.5},
         ["int8", "bfloat16-cpu"], "int8"),
        # A candidate that is too slow at one length does not hide the next precision.
        ({KEEP: 0.97}, {"int8": REFUSED, "bfloat16-cpu": WHOLE}, {}, ["int8", "bfloat16-cpu"],
         "bfloat16-cpu"),
        ({KEEP: 0.99}, {"int8": REFUSED, "bfloat16-cpu": LOSES, "float32": REFUSED}, {},
         ["int8", "bfloat16-cpu", "float32"], "float32"),
        # The least loss that reaches a speed-up.
        ({SPEED: 1.2}, {"float32": WHOLE}, {}, ["float32"], "float32"),
        ({SPEED: 2.5}, {"bfloat16-cpu": WHOLE}, {}, ["bfloat16-cpu"], "bfloat16-cpu"),
        ({SPEED: 9.0}, {"int8": LOSES, "bfloat16-cpu": LOSES, "float32": LOSES}, {},
         ["int8", "bfloat16-cpu", "float32"], None),
    ],
)  # fmt: skip
def test_precisions_are_searched_until_no_other_one_may_be_better(
    model: Any, monkeypatch: pytest.MonkeyPatch, cache: Path, goal: dict[str, float],
    found: Mapping[str, Any], speeds: Mapping[str, float], searched: list[str], chosen: str | None,
):  # fmt: skip
    names: list[str] = []
    verified: list[str] = []
    failed: list[ReferenceType[Plan]] = []

    def choose_one(goal: Goal, job: Any, task: object) -> Any:
        assert not any(held() for held in failed), "a failed search holds its models"
        name = job.target.precision
        names.append(name)
        job.checkpoints.open("plans", name).write(lambda file: file.write(b"{}"))
        blocks = found[name]
        if blocks in (LOSES, FAILS):
            held = Plan(precision=name)  # stands for a model
            failed.append(ref(held))
        if blocks == LOSES:
            raise CheckFailed(f"{name} alone loses too much", "", code="search.precision")
        if blocks == FAILS:
            raise CannotRewrite("two models cannot be timed together", "", code="search.not_timed")
        alone = next(each.speedup.value for each in COMPARED.points if each.precision == name)
        speed = speeds.get(name, alone)
        plan = Plan(precision=name, float_blocks=() if blocks in (NONE, REFUSED) else blocks)
        state: Any = SimpleNamespace(plan=plan)

        def result() -> Any:
            verified.append(name)
            record: Any = SimpleNamespace(
                gain=True, model_copy=lambda update: SimpleNamespace(name=name, **update)
            )
            return SearchResult(record, state)

        return SimpleNamespace(
            speed=lambda: (COMPARED.fusion * speed, SLOW if blocks == REFUSED else None),
            best=None if blocks is NONE else SimpleNamespace(state=state),
            precision=name,
            points=lambda fused: [],
            recovery=None,
            verified=result,
        )

    monkeypatch.setattr(PrecisionSearch, "run", choose_one)
    monkeypatch.setattr(search, "checked_workloads", lambda job: None)
    monkeypatch.setattr(search, "compare_precisions", lambda job, task: COMPARED)
    job = job_of(model, target=Target(precision="auto"))
    # The machine may not compute a precision.
    monkeypatch.setattr(
        Job, "with_precision", lambda job, name: replace(job, target=Target(precision=name))
    )
    if chosen is None:
        with raises(CheckFailed, "search.precision", "float32: float32 alone loses too much"):
            search_precisions(Goal(**goal), job)
    else:
        result = search_precisions(Goal(**goal), job)
        record: Any = result.record
        assert record.name == chosen and verified == [chosen]  # no row verifies two candidates
        unused = {each.precision for each in record.precisions if each.unused}
        assert unused >= {"float32", "int8", "bfloat16-cpu"} - {chosen}
        assert len(list((cache / "plans").iterdir())) == len(names), "the result is not written yet"
        job.checkpoints.remove()  # also those of failed searches
        assert not list((cache / "plans").iterdir())
    assert names == searched


@dataclass(frozen=True)
class Trainable:
    """A search whose candidate may be trained, in place of ``PrecisionSearch``."""

    precision: str
    speedup: float
    trained: float | None
    recovery: object = "a training"

    @property
    def best(self) -> object:
        return self

    def points(self, fused: float) -> list[Point]:
        return []

    def speed(self) -> tuple[float, None]:
        return self.speedup, None

    def verified(self) -> SearchResult:
        rounds, speedup = None, self.speedup
        if self.recovery is not None:
            gain = self.trained is not None
            rounds = TrainingRounds(rounds=(), gain=gain, verdict="", torch="")
            speedup = self.trained or speedup
        record = PlanRecord(format=FORMAT, gain=True, speedup=speedup, recovered=rounds)
        state: Any = None
        return SearchResult(record, state)


@pytest.mark.parametrize(
    ("trained", "best", "is_trained"),
    [
        (3.0, 2.5, True),
        (2.9, 2.9, False),  # hardly faster than another precision without training
        (None, 2.5, False),  # no trained candidate meets the goal
    ],
)
def test_training_is_in_the_fastest_precision(
    model: Any, monkeypatch: pytest.MonkeyPatch, trained: float | None, best: float,
    is_trained: bool,
):  # fmt: skip
    """Without training, blocks of it stay float32, and another precision is faster."""
    searches = {
        "int8": Trainable("int8", 2.0, trained),
        "bfloat16-cpu": Trainable("bfloat16-cpu", best, None),
    }
    monkeypatch.setattr(search, "required_training", lambda *_: None)
    monkeypatch.setattr(search, "checked_workloads", lambda job: None)
    monkeypatch.setattr(search, "compare_precisions", lambda *_: COMPARED)
    monkeypatch.setattr(
        PrecisionSearch, "run", lambda goal, job, task: searches[job.target.precision]
    )
    monkeypatch.setattr(
        Job, "with_precision", lambda job, name: job_of(model, target=Target(precision=name))
    )
    job = job_of(model, target=Target(precision="auto"))
    record = search_precisions(Goal(keep=0.99, recover=1.0), job).record
    assert record.recovered is not None and record.recovered.gain == is_trained
    assert record.speedup == (trained if is_trained else best)
    unused = {point.precision for point in record.precisions if point.unused}
    assert unused == {"float32", "bfloat16-cpu" if is_trained else "int8"}


class SlowShortInt8(Timer):
    """Whole int8 models are slower than float32 on 16 tokens."""

    def milliseconds(self, model: ir.Model, feed: Mapping[str, np.ndarray]) -> float:
        ms = super().milliseconds(model, feed)
        is_short = "input_ids" in feed and feed["input_ids"].shape[1] <= 16
        return ms * 2 * self.int8 if is_short and int8_weight_bits(model) is not None else ms


@pytest.mark.timing(seconds=8)
def test_precision_that_is_slow_at_one_length_is_not_used(
    planned: Planner, monkeypatch: pytest.MonkeyPatch, cpu_with: Callable[..., None]
):
    cpu_with(int8=True, bfloat16=False)
    set_context(monkeypatch, timer=SlowShortInt8(int8=3.0))
    report = planned(keep=0.9, precision="auto")
    points = {point.precision: point for point in report.precisions}
    assert "16 tokens" in points["int8-full"].unused
    assert report.gain and report.plan.precision == "float32" and not points["float32"].unused


@pytest.mark.timing(seconds=8)
def test_precision_that_reaches_the_speed_up_in_an_untimed_runtime_only_is_not_searched_first(
    planned: Planner, monkeypatch: pytest.MonkeyPatch, cpu_with: Callable[..., None]
):
    """OpenVINO reaches it in float32, but a search in float32 times ONNX Runtime."""
    pytest.importorskip("openvino")
    cpu_with(int8=True, bfloat16=False)
    set_context(monkeypatch, timer=Timer(int8=3.0, openvino=1.4))
    report = planned(target_speedup=1.3, precision="auto", allow=("ffn",))
    points = {point.precision: point for point in report.precisions}
    assert points["float32"].runtime == "onnxruntime" and points["float32"].unused
    assert points["int8-full"].speedup.value == pytest.approx(3.0, rel=0.01)
    assert report.plan.precision == "int8-full" and not report.plan.lossy_blocks


def test_each_precision_is_compared_in_the_runtime_that_computes_it(
    model: Path, sentences: Path, monkeypatch: pytest.MonkeyPatch, cpu_with: Callable[..., None]
):
    pytest.importorskip("openvino")
    cpu_with(int8=True, bfloat16=True)
    artifact = open_artifact(model)
    job = Job.read(
        artifact, load_model(artifact), Data(calib=[sentences]), Target(precision="auto"),
        context=RunContext(Device(threads=1, runtime="auto"), timer=Timer(openvino=0.5)),
    )  # fmt: skip
    found = compare_precisions(job, None)
    assert {point.precision: point.runtime for point in found.points} == {
        "float32": "onnxruntime",
        "int8-full": "onnxruntime",
        "bfloat16-cpu": "openvino",
        BFLOAT16_INT8: "openvino",
    }


def test_unknown_precision_names_auto(planned: Planner):
    with raises(InvalidArgument, "precision.unknown", "auto"):
        planned(precision="fp12")
