"""plan.json is checked when it is read, and its promise when it is applied."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import attnserve
from attnserve.cli.app import main
from attnserve.data.datasets import load_inputs
from attnserve.models.artifact import open_artifact
from attnserve.models.checksums import fingerprint
from attnserve.models.lineage import search_of
from attnserve.models.onnx_files import load_model
from attnserve.models.search_record import GoalRecord
from attnserve.planning.plans.plan_file import PlanRecord, SavedPlan
from graph_passes.errors import (
    AttnserveError,
    CheckFailed,
    InvalidArgument,
    InvalidData,
)
from tests.attnserve.planning.conftest import Optimizer, Planner
from tests.attnserve.qualities import fidelity_of, quality_of
from tests.errors import raises

pytestmark = pytest.mark.usefixtures("cache")

UNKNOWN_MIXING = {"pass": "collaborate", "targets": {"block": {"rank": 4, "kind": "low_rank"}}}


@pytest.mark.parametrize(
    ("content", "error", "code"),
    [
        ("", InvalidData, "plan.invalid"),
        ("[]", InvalidData, "plan.format"),
        ("{}", InvalidData, "plan.format"),
        ('{"format": 2}', InvalidArgument, "plan.other_input"),
        ('{"format": 1, "rewrites": {}}', InvalidData, "plan.format"),
        ('{"format": 3, "plan": {}}', InvalidData, "plan.format"),
        ('{"format": "2", "plan": {}}', InvalidData, "plan.format"),
        ('{"format": 2, "plan": {}, "model": {"sha256": "0"}}', InvalidArgument,
         "plan.other_input"),
        ("[" * 10**5, InvalidData, "plan.invalid"),
    ],
)  # fmt: skip
def test_optimize_plan_file_that_is_no_plan_is_refused(
    optimized: Optimizer, content: str, error: type[AttnserveError], code: str, tmp_path: Path
):
    path = tmp_path / "p.json"
    path.write_text(content)
    with raises(error, code, path):
        optimized(plan=path)


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"plan": None}, "plan.invalid"),
        ({"plan": {"passes": [{"pass": "truncate"}]}}, "pass.unknown"),
        ({"plan": {"passes": [UNKNOWN_MIXING]}}, "pass.params"),
        ({"asked": {"seed": -1}}, "plan.invalid"),
        ({"asked": {"provider": "tpu"}}, "plan.invalid"),
        ({"asked": {"batch": 0}}, "plan.invalid"),
        ({"asked": {"sequences": [-1]}}, "plan.invalid"),
        ({"asked": {"threads": -1}}, "plan.invalid"),
        ({"plan": {"precision": "int3"}}, "plan.invalid"),
    ],
)
def test_optimize_plan_file_with_invalid_content_is_refused(
    optimized: Optimizer,
    changes: dict[str, Any],
    code: str,
    model: Path,
    sentences: Path,
    tmp_path: Path,
):
    content = empty_plan(model, sentences)
    path = tmp_path / "p.json"
    path.write_text(json.dumps(content))
    optimized("same.onnx", plan=path)
    path.write_text(json.dumps(content | changes))
    with raises(AttnserveError, code, path):
        optimized(plan=path)


def empty_plan(model: Path, texts: Path) -> dict[str, Any]:
    """A plan without steps for a model and its texts."""
    artifact = open_artifact(model)
    data = load_inputs(texts, load_model(artifact), artifact)
    return {
        "format": 2, "plan": {}, "model": {"sha256": fingerprint(artifact)},
        "calibration": data.source.to_json(),
    }  # fmt: skip


def test_optimize_plan_of_another_tokenizer_is_refused(
    optimized: Optimizer, model: Path, sentences: Path, tmp_path: Path
):
    path = tmp_path / "p.json"
    path.write_text(json.dumps(empty_plan(model, sentences)))
    content = json.loads((model / "tokenizer.json").read_text(encoding="utf-8"))
    other = tmp_path / "other.json"
    other.write_text(json.dumps(content | {"post_processor": None}), encoding="utf-8")
    with raises(InvalidArgument, "plan.other_input", "`tokens`", "`tokenizer`"):
        optimized(plan=path, tokenizer=other)


def test_optimize_plan_uses_its_workload_threads_and_seed_unless_others_are_given(
    model: Path, sentences: Path, tmp_path: Path
):
    path = tmp_path / "p.json"
    asked = {"batch": 2, "sequences": [4, 16, 64], "threads": 1, "seed": 3}
    path.write_text(json.dumps(empty_plan(model, sentences) | {"asked": asked}))

    def replayed(**options: Any) -> tuple[Any, ...]:
        found = attnserve.optimize(
            model, tmp_path / "out", calib=sentences, plan=path, force=True, **options
        ).record
        speeds = found.speedups
        assert speeds is not None
        return found.batch, found.sequence, found.seed, speeds.shapes, speeds.device.threads

    shapes = ((2, 4), (2, 16), (2, 64))
    assert replayed() == replayed(seed=3, runtime="onnxruntime") == (2, 16, 3, shapes, 1)
    assert replayed(batch=1, sequence=32, threads=2) == (1, 32, 3, ((1, 32),), 2)


@pytest.mark.parametrize("options", [{"seed": 4}, {"provider": "cuda"}, {"runtime": "openvino"}])
def test_optimize_plan_with_another_seed_provider_or_runtime_is_refused(
    optimized: Optimizer, options: dict[str, Any], model: Path, sentences: Path, tmp_path: Path
):
    path = tmp_path / "p.json"
    path.write_text(json.dumps(empty_plan(model, sentences)))
    with raises(InvalidArgument, "optimize.conflict", *map("`{}`".format, options), path):
        optimized(plan=path, **options)


@pytest.mark.parametrize("option", [{"seed": 0}, {"provider": "cpu"}])
def test_defaults_beside_a_plan_are_checked_if_they_are_given(
    optimized: Optimizer, option: dict[str, Any], model: Path, sentences: Path, tmp_path: Path
):
    path = tmp_path / "p.json"
    asked = {"seed": 3, "provider": "cuda"}
    path.write_text(json.dumps(empty_plan(model, sentences) | {"asked": asked}))
    with raises(InvalidArgument, "optimize.conflict", *map("`{}`".format, option), path):
        optimized(plan=path, **option)


def test_command_line_checks_only_the_options_that_it_has(
    model: Path, sentences: Path, tmp_path: Path
):
    path, output = tmp_path / "p.json", tmp_path / "out"
    path.write_text(json.dumps(empty_plan(model, sentences) | {"asked": {"seed": 3}}))
    arguments = ["optimize", str(model), "--plan", str(path), "--calib", str(sentences)]
    assert main([*arguments, "-o", str(output), "--seed", "0"]) == 2
    assert not output.exists()
    assert main([*arguments, "-o", str(output)]) == 0
    assert open_artifact(output).lineage[-1].seed == 3


@pytest.mark.parametrize("asked", [{"keep": 0.9}, {"target_speedup": 1.5}])
def test_too_low_cosine_of_a_plan_advises_another_goal(
    optimized: Optimizer, asked: dict[str, Any], model: Path, sentences: Path, tmp_path: Path
):
    path = tmp_path / "p.json"
    block = attnserve.inspect(model).matches.blocks[0]
    mask = [1, *[0] * (block.num_heads - 1)]
    content = empty_plan(model, sentences) | {
        "plan": {"passes": [{"pass": "prune_heads", "targets": {block.name: mask}}]},
        "asked": asked,
    }  # fmt: skip
    path.write_text(json.dumps(content))
    with raises(CheckFailed, "optimize.min_cosine", *map("`{}`".format, asked)):
        optimized(plan=path, min_cosine=1.0)


SCORE = {"keep": 0.9, "task": "sts", "eval_data": "sts.tsv", "measure": "score"}


@pytest.mark.parametrize(
    ("asked", "guaranteed"),
    [
        ({"keep": 0.9}, 0.9),
        ({"keep": 0.9, "runtime": "openvino"}, 0.9),
        (SCORE, 1.0),  # what was measured: a replay measures no score
        ({"target_speedup": 1.5}, 1.0),
    ],
    ids=["quality", "runtime", "score", "speed"],
)
def test_replayed_plan_is_verified_by_its_goal_and_in_its_runtime(
    model: Path, sentences: Path, tmp_path: Path, asked: dict[str, Any], guaranteed: float
):
    runtime = asked.get("runtime", "onnxruntime")
    pytest.importorskip(runtime)
    path = tmp_path / "p.json"
    content = empty_plan(model, sentences) | {"asked": asked | {"threads": 1}, "gain": True}
    path.write_text(json.dumps(content))
    attnserve.optimize(model, tmp_path / "out", calib=sentences, plan=path)
    (entry,) = open_artifact(tmp_path / "out").lineage
    search = search_of(entry)
    assert search is not None and asked.items() <= search.goal.to_json().items()
    report = attnserve.verify_again(tmp_path / "out", model, data=sentences)
    (check,) = report.guarantees
    assert check.runtime == runtime and check.guarantee == pytest.approx(guaranteed)
    assert report.holds


def test_replayed_plan_that_may_miss_its_goal_guarantees_what_was_measured(
    model: Path, sentences: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = tmp_path / "p.json"
    block = attnserve.inspect(model).matches.blocks[0]
    mask = [1, *[0] * (block.num_heads - 1)]
    content = empty_plan(model, sentences) | {
        "plan": {"passes": [{"pass": "prune_heads", "targets": {block.name: mask}}]},
        "asked": {"keep": 1.0, "threads": 1}, "gain": True,
    }  # fmt: skip
    path.write_text(json.dumps(content))
    monkeypatch.setattr(SavedPlan, "require_guarantee", lambda *_: None)  # as in its interval
    attnserve.optimize(model, tmp_path / "out", calib=sentences, plan=path)
    report = attnserve.verify_again(tmp_path / "out", model, data=sentences)
    assert report.holds and report.guarantees[0].guarantee < 1


def test_optimize_plan_that_is_a_folder_is_refused(optimized: Optimizer, tmp_path: Path):
    with raises(InvalidData, "plan.file", tmp_path):
        optimized(plan=tmp_path)


@pytest.mark.timing
def test_optimize_plan_of_other_data_is_refused(
    optimized: Optimizer, planned: Planner, model: Path, sentences: Path, tmp_path: Path
):
    planned()
    other = tmp_path / "other.txt"
    other.write_text(sentences.read_text(encoding="utf-8") + "one more\n", encoding="utf-8")
    with raises(InvalidArgument, "plan.other_input", "calibration"):
        optimized(calib=other, plan=tmp_path / "p.json")
    with raises(InvalidData, "plan.file", "none.json"):
        optimized(plan=tmp_path / "none.json")


def test_plan_that_certainly_keeps_less_than_it_promises_is_refused():
    file = PlanRecord(format=2, gain=True, goal=GoalRecord(keep=0.985))

    def check(*intervals: tuple[float, float] | None) -> None:
        found = [
            quality_of("similarity", 0.97, ci95=ci95, file=f"{place}.txt")
            for place, ci95 in enumerate(intervals)
        ]
        SavedPlan(Path("plan.json"), file).require_guarantee(fidelity_of(*found))

    check(None)
    check((0.95, 0.99))
    with raises(CheckFailed, "plan.promise", "0.985"):
        check((0.95, 0.98))
    with raises(CheckFailed, "plan.promise", "1.txt"):
        check((0.95, 0.99), (0.95, 0.98))


def test_promise_is_checked_in_its_own_measure(tmp_path: Path):
    path = tmp_path / "plan.json"
    for asked, given, expected in (("cosine", "auto", "cosine"), ("auto", "auto", "auto"),
                                   ("r2", "r2", "r2"), ("score", "r2", "r2")):  # fmt: skip
        path.write_text(json.dumps({"format": 2, "asked": {"measure": asked}}))
        assert SavedPlan.read(path).required_measure(given) == expected  # type: ignore[arg-type]
    path.write_text(json.dumps({"format": 2, "asked": {"measure": "cosine"}}))
    with raises(InvalidArgument, "optimize.conflict", "cosine", "r2"):
        SavedPlan.read(path).required_measure("r2")
