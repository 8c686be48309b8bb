"""Verification of converted models in other runtimes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import onnx_ir as ir
import pytest

import attnserve
from attnserve.context import ONE_THREAD, Device, RunContext
from attnserve.job import Job
from attnserve.literals import SearchMeasure
from attnserve.models.artifact import open_artifact
from attnserve.models.measured import Fidelity, Losses, Quality, Share
from attnserve.models.onnx_files import load_model
from attnserve.options import Data
from attnserve.planning import runtime_verification
from attnserve.planning.optimize_warnings import unverified_runtimes
from attnserve.planning.runtime_verification import verify_in_other_runtimes
from attnserve.planning.scored_task import ScoredTask
from attnserve.precision.convert import convert
from attnserve.runtime import session
from attnserve.runtime.by_length import RowRuntimes
from attnserve.runtime.interface import DEFAULT_OPTIONS, Runtime, Session, SessionOptions
from attnserve.runtime.onnx_runtime import OnnxRuntime
from attnserve.runtime.session import OpenNew
from graph_passes.errors import InvalidModel
from graph_passes.registry import Registry

OTHER = RowRuntimes.one("other")
ALL_OTHERS = {OTHER, RowRuntimes("onnxruntime", "other"), RowRuntimes("other", "onnxruntime")}


class OtherRuntime(OnnxRuntime):
    """A second runtime, which refuses models or computes the original in place of each."""

    name = "other"

    def __init__(self, original: ir.Model | None) -> None:
        self._original = original

    def open(
        self,
        source: Path | ir.Model,
        device: Device,
        options: SessionOptions = DEFAULT_OPTIONS,
    ) -> Session:
        if self._original is None:
            raise InvalidModel("other: refuses the model", "none")
        return super().open(self._original, device, options)


@pytest.fixture
def job(tiny: Path, sentences: Path) -> Job:
    artifact = open_artifact(tiny)
    data = Data(calib=[sentences])
    return Job.read(artifact, load_model(artifact), data, context=RunContext(ONE_THREAD))


def use(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    both = Registry[Runtime]("runtime", OnnxRuntime(), runtime)
    monkeypatch.setattr(session, "RUNTIMES", both)


@pytest.mark.parametrize(
    ("lower", "keep", "verified"),
    [
        (0.5, None, ALL_OTHERS),
        (1.1, None, set()),  # no other runtime reaches the quality of the first one
        (0.5, 0.9, ALL_OTHERS),
    ],
)
def test_a_runtime_is_verified_if_it_keeps_the_quality(
    job: Job,
    monkeypatch: pytest.MonkeyPatch,
    lower: float,
    keep: float | None,
    verified: set[RowRuntimes],
) -> None:
    use(OtherRuntime(job.original), monkeypatch)
    model = convert(job.original, "int8", job.calibration)
    found = job.compare_held_out(model, job.required_data.to_verify)
    qualities = tuple(q.model_copy(update={"lower": lower}) for q in found.qualities)
    expected = found.model_copy(update={"several": qualities})
    comparisons = verify_in_other_runtimes(job, model, expected, keep)
    assert comparisons.keys() == verified
    # Alone, the other runtime computes the original, and as one of two a part of the texts.
    values = {
        name: min(quality.value for quality in fidelity.qualities)
        for name, fidelity in comparisons.items()
    }
    assert all(values[OTHER] >= value for value in values.values())


@pytest.mark.parametrize(
    ("count", "value", "is_kept"), [(1, 0.9899, False), (3, 0.9899, True), (3, 0.988, False)]
)
def test_bounds_of_several_qualities_hold_together(
    job: Job, monkeypatch: pytest.MonkeyPatch, count: int, value: float, is_kept: bool
) -> None:
    """A value just below its own bound of 95 % refuses the runtime only if it is the only one."""
    model = convert(job.original, "int8", job.calibration)
    use(OtherRuntime(model), monkeypatch)
    found = job.compare_held_out(model, job.required_data.to_verify)

    def compared(fidelity: Fidelity, value: float, lower: float) -> Fidelity:
        qualities = tuple(
            Quality(
                measure="similarity", value=value, lower=lower,
                output="last_hidden_state", file=str(index),
            ) for index in range(count)
        )  # fmt: skip
        return fidelity.model_copy(update={"several": qualities})

    monkeypatch.setattr(Job, "compare_held_out", lambda *_, **__: compared(found, value, 0.98))
    expected = compared(found, 0.995, 0.99)
    assert (verify_in_other_runtimes(job, model, expected).keys() == ALL_OTHERS) == is_kept


@pytest.mark.parametrize(
    ("measure", "keep", "lost", "is_kept"),
    [
        ("score", 0.99, 0.01, True),  # the quality need not be kept: it is much lower
        ("score", 0.99, 0.011, False),  # misses the goal
        ("score", 0.9, 0.021, False),  # below the bound in the first runtime
        ("score", None, 0.02, True),
        ("auto", 0.99, 0.01, False),  # the quality must be kept too
    ],
)
def test_the_score_of_a_task_must_be_kept_in_the_other_runtime(
    job: Job, monkeypatch: pytest.MonkeyPatch, measure: SearchMeasure, keep: float | None,
    lost: float, is_kept: bool,
) -> None:  # fmt: skip
    job = replace(job, measure=measure)
    model = convert(job.original, "int8", job.calibration)
    use(OtherRuntime(model), monkeypatch)
    found = job.compare_held_out(model, job.required_data.to_verify)
    far = Quality(
        measure="similarity", value=0.9, lower=0.8, output="last_hidden_state",
        losses=Losses(0.1, 0.2),
    )  # fmt: skip
    expected = found.model_copy(update={"several": (far,)})
    monkeypatch.setattr(Job, "compare_held_out", lambda *_, **__: expected)
    losses = [Losses(0.005, 0.02), *[Losses(lost, lost)] * 3]

    class Task:
        def share_in(self, model: ir.Model, job: Job, open_new: OpenNew) -> Share:
            assert open_new(model).get_inputs()
            return Share(value=1.0, losses=losses.pop(0))

    task = cast(ScoredTask, Task())
    found_in = verify_in_other_runtimes(job, model, expected, keep, task)
    assert found_in.keys() == (ALL_OTHERS if is_kept else set())


def test_a_goal_must_be_met_in_the_other_runtime(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    model = convert(job.original, "int8", job.calibration)
    use(OtherRuntime(model), monkeypatch)
    found = job.compare_held_out(model, job.required_data.to_verify)
    loss = max(quality.losses.measured for quality in found.qualities)
    assert loss > 0
    assert verify_in_other_runtimes(job, model, found, 1 - 2 * loss).keys() == ALL_OTHERS
    assert verify_in_other_runtimes(job, model, found, 1 - loss / 2) == {}


def test_a_runtime_that_refuses_the_model_is_not_verified(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(OtherRuntime(None), monkeypatch)
    model = convert(job.original, "int8", job.calibration)
    assert verify_in_other_runtimes(job, model, nothing()) == {}


def test_float_models_and_one_runtime_need_no_verification(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(OtherRuntime(job.original), monkeypatch)
    assert verify_in_other_runtimes(job, job.original, nothing()) == {}
    monkeypatch.setattr(session, "RUNTIMES", Registry[Runtime]("runtime", OnnxRuntime()))
    model = convert(job.original, "int8", job.calibration)
    assert verify_in_other_runtimes(job, model, nothing()) == {}


@pytest.mark.parametrize(
    ("verified", "openvino", "unverified"),
    [
        ([], False, []),  # verified in the default runtime
        ([], True, ["openvino"]),
        (["openvino"], True, []),
    ],
)
def test_runtimes_that_may_run_a_file_without_a_known_quality(
    job: Job, verified: list[str], openvino: bool, unverified: list[str]
) -> None:
    model = convert(job.original, "int8", job.calibration)
    others = [*map(RowRuntimes.one, verified)]

    def unknown(job: Job, model: ir.Model) -> list[str]:
        return unverified_runtimes(job, model, others, openvino=openvino)

    assert unknown(job, model) == unverified
    in_openvino = replace(job, context=RunContext(Device(runtime="openvino")))
    assert unknown(in_openvino, model) == ["onnxruntime"]
    assert not unknown(in_openvino, job.original)


def test_optimize_warns_of_a_runtime_that_does_not_keep_the_quality(
    tiny: Path, sentences: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("openvino")
    monkeypatch.setattr(runtime_verification, "_is_kept", lambda *_: False)
    options: dict[str, Any] = {"precision": "int8", "calib": sentences}
    report = attnserve.optimize(tiny, tmp_path / "new", **options, runtime="openvino")
    expected = "does not keep its quality in onnxruntime: use it in openvino (`runtime` openvino)"
    assert any(expected in warning for warning in report.record.warnings)
    report = attnserve.optimize(tiny, tmp_path / "both", **options, openvino=True)
    expected = "does not keep its quality in openvino: use it in onnxruntime"
    assert any(expected in warning for warning in report.record.warnings)


def nothing() -> Fidelity:
    quality = Quality(measure="similarity", value=0.0, lower=0.0)
    return Fidelity(outputs=(), mean_cosine=0, min_cosine=0, data="", qualities=(quality,))
