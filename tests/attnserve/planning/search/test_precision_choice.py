"""The precision and the runtime of a search follow from measured times and losses."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from attnserve.context import RunContext, TimedModel
from attnserve.models.quantized import int8_weight_bits
from attnserve.models.search_record import PrecisionPoint
from attnserve.options import Goal, Target
from attnserve.planning.plans.plan import Plan
from attnserve.planning.search import search
from attnserve.planning.search.precision_choice import in_search_order
from attnserve.precision.schemes import SCHEMES
from attnserve.runtime.times import Speedup
from graph_passes.errors import CheckFailed, InvalidArgument
from tests.attnserve.cli.conftest import Cli
from tests.attnserve.costs import Count, set_context
from tests.attnserve.planning.conftest import Planner
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
        in_openvino = timed.device.runtime == "openvino"
        return (self.int8 if int8_weight_bits(timed.model) else 1.0) * (
            self.openvino if in_openvino else 1.0
        )


def is_int8(precision: str) -> bool:
    return SCHEMES[precision].is_int8


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


@pytest.mark.timing(seconds=3)
@pytest.mark.parametrize("runtime", ["onnxruntime", "openvino"])
def test_search_times_candidates_in_the_fastest_runtime(
    planned: Planner, monkeypatch: pytest.MonkeyPatch, runtime: str
):
    timer = Timer(openvino=2.0 if runtime == "openvino" else 0.5)
    set_context(monkeypatch, timer=timer)
    report = planned(keep=0.9)
    assert report.machine is not None and runtime in report.machine.lower().replace(" ", "")
    assert timer.runtimes.count(runtime) > 0.9 * len(timer.runtimes)  # blocks, and candidates


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


@pytest.mark.parametrize(
    ("goal", "first"),
    [
        (Goal(keep=0.9), ["int8", "bfloat16-cpu", "float32"]),
        (Goal(target_speedup=1.5), ["bfloat16-cpu", "int8", "float32"]),
        (Goal(target_speedup=2.5), ["int8", "bfloat16-cpu", "float32"]),
        (Goal(target_speedup=4.0), ["int8", "bfloat16-cpu", "float32"]),
    ],
)
def test_in_search_order(goal: Goal, first: list[str]):
    ordered = in_search_order([FLOAT32, INT8, BFLOAT16], goal)
    assert [each.precision for each in ordered] == first


WHOLE, PARTLY, LOSES = (), ("a",), None
"""The blocks that stay float32; None if the precision alone misses the goal."""


@pytest.mark.parametrize(
    ("keep", "found", "speeds", "searched", "chosen"),
    [
        # The fastest precision meets the goal in all blocks.
        (0.97, {"int8": WHOLE}, {}, ["int8"], "int8"),
        # Some blocks stay float32, and the result is slower than another precision.
        (0.99, {"int8": PARTLY, "bfloat16-cpu": WHOLE}, {"int8": 1.5}, ["int8", "bfloat16-cpu"],
         "bfloat16-cpu"),
        # It is faster than the other precision, which is not searched.
        (0.99, {"int8": PARTLY}, {"int8": 2.5}, ["int8"], "int8"),
        # The other precisions do not meet the goal, or are slower.
        (0.999, {"int8": PARTLY}, {"int8": 1.5}, ["int8"], "int8"),
        # The precision alone loses too much.
        (0.99, {"int8": LOSES, "bfloat16-cpu": WHOLE}, {}, ["int8", "bfloat16-cpu"],
         "bfloat16-cpu"),
        (0.9999, {"int8": LOSES, "bfloat16-cpu": LOSES, "float32": WHOLE}, {},
         ["int8", "bfloat16-cpu", "float32"], "float32"),
        (0.9999, {"int8": LOSES, "bfloat16-cpu": LOSES, "float32": LOSES}, {},
         ["int8", "bfloat16-cpu", "float32"], None),
    ],
)  # fmt: skip
def test_precisions_are_searched_until_no_other_one_may_be_faster(
    model: Any, monkeypatch: pytest.MonkeyPatch, keep: float,
    found: Mapping[str, tuple[str, ...] | None], speeds: Mapping[str, float],
    searched: list[str], chosen: str | None,
):  # fmt: skip
    names: list[str] = []

    def search_one(goal: Goal, job: Any) -> Any:
        name = job.target.precision
        names.append(name)
        blocks = found[name]
        if blocks is None:
            raise CheckFailed("int8 weights alone keep less", "", code="search.precision")
        served = SimpleNamespace(served=SimpleNamespace(value=speeds.get(name, 1.0)))
        record = SimpleNamespace(
            gain=True, speedups=served,
            model_copy=lambda update: SimpleNamespace(name=name, **update),
        )  # fmt: skip
        return record, SimpleNamespace(plan=Plan(precision=name, float_blocks=blocks))

    points = [FLOAT32, INT8, BFLOAT16]
    monkeypatch.setattr(search, "_search", search_one)
    monkeypatch.setattr(search, "compare_precisions", lambda goal, job: points)
    job = job_of(model, target=Target(precision="auto"), context=RunContext())
    monkeypatch.setattr(
        type(job), "with_precision", lambda job, name: job_of(model, target=Target(precision=name))
    )  # the machine may lack a precision
    goal = Goal(keep=keep)
    if chosen is None:
        with raises(CheckFailed, "search.precision"):
            search.run_search(goal, job)
    else:
        record, _ = search.run_search(goal, job)
        assert record.name == chosen and record.precisions == tuple(points)
    assert names == searched


def test_unknown_precision_names_auto(planned: Planner):
    with raises(InvalidArgument, "precision.unknown", "auto"):
        planned(precision="fp12")
