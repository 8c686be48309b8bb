"""``optimize --keep --recover``: a search that trains faster choices, on a tiny BERT.

Times are counted (``costs``), and the clock of the training runs by calls.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="pip install 'attnserve[torch]'")

import attnserve  # noqa: E402
from attnserve.cli.app import main  # noqa: E402
from attnserve.data.datasets import load_inputs  # noqa: E402
from attnserve.job import Job  # noqa: E402
from attnserve.literals import Precision  # noqa: E402
from attnserve.models.artifact import open_artifact  # noqa: E402
from attnserve.models.checksums import fingerprint  # noqa: E402
from attnserve.models.onnx_files import load_model  # noqa: E402
from attnserve.options import Goal  # noqa: E402
from attnserve.planning.optimize import OptimizeReport  # noqa: E402
from attnserve.planning.plans.apply import start  # noqa: E402
from attnserve.planning.plans.plan import Distill, Plan  # noqa: E402
from attnserve.planning.search import precision_search, recovery_search  # noqa: E402
from attnserve.recovery import training  # noqa: E402
from attnserve.recovery.operators.registry import OPERATORS  # noqa: E402
from attnserve.runtime.cache import cache_folder  # noqa: E402
from graph_passes.errors import AttnserveError  # noqa: E402
from graph_passes.matching.find import find_attention  # noqa: E402
from graph_passes.passes.prune_heads import PruneHeads  # noqa: E402
from tests.attnserve.cli.commands import without_torch  # noqa: E402
from tests.files import last_entry  # noqa: E402
from tests.texts import write_sentences  # noqa: E402

KEEP = 0.7
MINUTES = 2.0
"""Of ``counted_clock``: about 90 steps in each of three rounds."""

Optimize = Callable[..., Any]


@pytest.fixture(autouse=True)
def _learning_rate(monkeypatch: pytest.MonkeyPatch, counted_clock: None) -> None:
    monkeypatch.setattr(training, "LEARNING_RATE", 1e-2)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sentences(tmp_path_factory.mktemp("texts") / "texts.txt", 700)


def optimize(model: Path, output: Path, texts: Path, **options: Any) -> Any:
    request: dict[str, Any] = {
        "keep": KEEP,
        "allow": ["ffn"],
        "sequence": 16,
        "threads": 1,
        **options,
    }
    return attnserve.optimize(model, output, calib=texts, **request)


@pytest.fixture
def optimized(tiny: Path, texts: Path, tmp_path: Path) -> Optimize:
    """Optimize the tiny model; the output is the folder ``out``."""
    return partial(optimize, tiny, tmp_path / "out", texts)


@pytest.fixture(scope="module")
def plain(tiny: Path, texts: Path, tmp_path_factory: pytest.TempPathFactory) -> OptimizeReport:
    """The result of the search without training."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("plain")
        patch.setenv("ATTNSERVE_CACHE", str(folder / "cache"))
        return optimize(tiny, folder / "plain", texts)


def checkpoints() -> list[Path]:
    return [*(cache_folder() / "recover").glob("*"), *(cache_folder() / "plans").glob("*")]


@pytest.mark.timing(seconds=30)
def test_search_with_training_finds_a_faster_model(
    plain: OptimizeReport, optimized: Optimize, tmp_path: Path
):
    stages: list[tuple[str, int, int]] = []
    found = optimized(recover=MINUTES, progress=lambda *stage: stages.append(stage)).search
    recovered = found.recovered
    assert recovered.gain and 1 <= len(recovered.rounds) <= recovery_search.ROUNDS
    assert plain.search is not None and found.speedup > 1.01 * plain.search.speedup
    # The promise of the search, on data to choose and on data that nothing has seen.
    assert found.quality_to_choose.losses.bounded <= 1 - KEEP
    assert found.verifications[-1].loss <= 1 - KEEP
    assert found.quality.split == "verify"
    kept = [one for one in recovered.rounds if one.keeps]
    assert kept and all(one.steps and one.loss < one.built_loss for one in kept)
    assert max(one.built_loss for one in kept) > 1 - KEEP  # too much without training
    assert sum(one.seconds for one in recovered.rounds) < 1.05 * 60 * MINUTES
    assert any(stage == "round 1: train (s)" and total for stage, _, total in stages)
    assert not checkpoints()
    entry = last_entry(tmp_path / "out")
    assert entry["rewrite"].endswith("+recover")
    assert entry["trained"]["steps"] and entry["search"]["asked"]["recover"] == MINUTES
    assert len(entry["search"]["recovered"]["rounds"]) == len(recovered.rounds)
    assert "recovered" not in last_entry(plain.output.parent)["search"]


@pytest.mark.timing(seconds=20)
def test_training_that_fails_returns_the_model_of_the_plain_search(
    plain: OptimizeReport, optimized: Optimize, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(training, "LEARNING_RATE", 1e30)
    report = optimized(recover=MINUTES / 8)
    assert report.search.gain and not report.search.recovered.gain
    assert "not finite" in report.search.recovered.verdict
    assert any(warning.startswith("no gain by training") for warning in report.record.warnings)
    assert report.plan.to_json() == plain.plan.to_json()
    assert report.fidelity == plain.fidelity
    same = attnserve.verify(plain.output, tmp_path / "out")
    assert same.outputs[0].max_abs_error == 0
    assert "recover" not in last_entry(tmp_path / "out")["rewrite"]
    assert "trained" not in last_entry(tmp_path / "out")


@pytest.mark.timing(seconds=20)
def test_interrupted_round_continues_from_its_checkpoint(optimized: Optimize, tmp_path: Path):
    def interrupt(stage: str, done: int, total: int) -> None:
        if stage.startswith("round 1: train") and done > 5:
            raise KeyboardInterrupt

    minutes = MINUTES / 4
    with pytest.raises(KeyboardInterrupt):
        optimized(recover=minutes, progress=interrupt)
    assert len(checkpoints()) == 2 and not (tmp_path / "out").exists()
    trained: list[int] = []

    def count(stage: str, done: int, total: int) -> None:
        if stage.startswith("round 1: train"):
            trained.append(done)

    report = optimized(recover=minutes, progress=count)
    assert trained[0] > 2  # the seconds before the interruption count
    assert report.search.recovered.rounds[0].seconds >= 9
    assert not checkpoints()


@pytest.mark.timing(seconds=20)
def test_training_for_a_target_speedup_loses_less(optimized: Optimize):
    report = optimized(keep=None, target_speedup=1.8, recover=MINUTES / 3)
    recovered = report.search.recovered
    assert len(recovered.rounds) == 1 and report.search.speedup >= 1.8
    assert recovered.gain and recovered.rounds[0].loss < recovered.rounds[0].built_loss


@pytest.mark.parametrize("minutes", [0.0, MINUTES / 4])
def test_replayed_training_is_recorded(minutes: float, tiny: Path, texts: Path, tmp_path: Path):
    artifact = open_artifact(tiny)
    model = load_model(artifact)
    masks = {block.name: [1, 1, 0, 0] for block in find_attention(model).blocks}
    plan = Plan((PruneHeads(masks),), (Distill(minutes=minutes),))
    content = {
        "format": 2, "plan": plan.to_json(), "model": {"sha256": fingerprint(artifact)},
        "calibration": load_inputs([texts], model, artifact).source.to_json(),
    }  # fmt: skip
    (tmp_path / "p.json").write_text(json.dumps(content))
    attnserve.optimize(tiny, tmp_path / "out", calib=texts, plan=tmp_path / "p.json", threads=1)
    entry = last_entry(tmp_path / "out")
    assert entry["rewrite"] == "prune_heads" + "+recover" * bool(minutes)
    warned = [text for text in entry["warnings"] if text.startswith("no gain by training")]
    assert len(warned) == (minutes == 0)
    trained = entry["trained"]
    assert (trained["loss"] < trained["first_loss"]) == (trained["steps"] > 0) == bool(minutes)
    assert entry["versions"]["torch"] and not checkpoints()


@pytest.mark.parametrize("precision", ["float32", "int8", "int4"])
def test_round_trains_what_its_plan_converts(precision: Precision, tiny: Path, texts: Path):
    artifact = open_artifact(tiny)
    model = load_model(artifact)
    data = load_inputs([texts], model, artifact)
    blocks = (find_attention(model).blocks[0].name,) * (precision != "float32")
    plan = Plan(precision=precision, float_blocks=blocks)
    state = start(plan, Job(artifact, model, data), model.clone())
    distillation = Distill()._distillation(state)
    rounded = distillation.module.replaced
    if precision != "int8":  # int4 is converted after the training
        assert not rounded
        return
    kinds = [
        {n.op_type for n in m.graph} for m in (distillation.student, distillation.module.model)
    ]
    assert "Erf" in kinds[0] and "Erf" not in kinds[1]  # GELU is trained as one operator
    first, second = find_attention(distillation.module.model).blocks
    assert rounded and not {*first.nodes} & rounded.keys()
    assert {*second.nodes} & rounded.keys()


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"recover": 0.0}, "goal.range"),
        ({"recover": float("nan")}, "goal.range"),
        ({"recover": 1.0, "keep": None, "prune": 0.5, "allow": ()}, "optimize.conflict"),
        ({"recover": 1.0, "keep": None, "allow": ()}, "optimize.conflict"),
    ],
    ids=str,
)
def test_recover_that_makes_no_sense_is_refused(
    optimized: Optimize, options: dict[str, Any], code: str, tmp_path: Path
):
    with pytest.raises(AttnserveError) as caught:
        optimized(**options)
    assert caught.value.code == code and "`recover`" in caught.value.what
    assert not (tmp_path / "out").exists()


def test_operator_that_cannot_be_trained_is_refused_before_the_search(
    tiny: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def searched(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("nothing is timed before the check")

    monkeypatch.setattr(precision_search.ModelLatency, "time", searched)
    key = next(key for key in OPERATORS if "Softmax" in str(key))
    monkeypatch.delitem(OPERATORS, key)
    with pytest.raises(AttnserveError) as caught:
        attnserve.optimize(tiny, tmp_path / "out", keep=KEEP, calib=texts, recover=1.0)
    assert caught.value.code == "recovery.operator" and "Softmax" in caught.value.what
    assert not (tmp_path / "out").exists()


def test_command_reads_the_time_of_the_training(
    tiny: Path, texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    times: list[Any] = [None, "20m", "90s", "1.5h", "20"]
    found = [Goal(keep=0.9, recover=time).recover for time in times]
    assert found == [None, 20.0, 1.5, 90.0, 20.0]
    command = ["optimize", tiny, "--keep", "0.9", "--calib", texts, "-o", tmp_path / "out"]
    assert main([str(part) for part in (*command, "--recover", "20 days")]) == 2
    assert "--recover is '20 days'" in capsys.readouterr().err
    assert main([str(part) for part in (*command, "--recover", "0m")]) == 2
    assert "--recover is 0" in capsys.readouterr().err


@pytest.mark.process
def test_search_with_training_without_torch_names_the_extra(
    tiny: Path, texts: Path, tmp_path: Path
):
    options = ("--keep", "0.9", "--calib", texts, "--recover", "1m", "-o", tmp_path / "o")
    done = without_torch("optimize", tiny, *options)
    assert done.returncode == 2
    assert "attnserve[torch]" in done.stderr and len(done.stderr.splitlines()) == 2
