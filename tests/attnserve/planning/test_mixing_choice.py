"""--mixing and --head-dk: the fastest form at equal error, by measured time of what is served."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from attnserve import optimize, verify
from attnserve.checks.inspect import inspect
from attnserve.context import RunContext, TimedModel
from attnserve.literals import MixingKind
from attnserve.models.lineage import MixingReport
from attnserve.models.onnx_files import load_model
from attnserve.options import Target
from attnserve.planning.mixing_choice import MixingComparison, choose_mixing
from attnserve.planning.plans.plan import Plan
from attnserve.planning.served_speed import ServedTimer
from attnserve.runtime.times import Speedup
from graph_passes.analysis.constants import is_constant
from graph_passes.errors import InvalidArgument
from graph_passes.passes.collaborate import Collaborate
from tests.errors import raises
from tests.jobs import job_of

# Which form

FORMS: tuple[MixingKind, ...] = ("dense", "sparse", "own", "own", "own")
PLANS = [Plan() for _ in FORMS]
DENSE, SPARSE, *OWN = PLANS


def steady(value: float) -> Speedup:
    return Speedup(value=value, ci95=(value, value))


@dataclass(frozen=True)
class Built:
    """A built form; its plan stands for its model."""

    model: Plan


@dataclass
class Comparison:
    """Errors by plan, and (mean, slowest) speed-ups by kind."""

    errors: Sequence[float]
    known: Mapping[str, tuple[float, float]] | None
    built: list[Plan] = field(default_factory=list[Plan])

    def build(self, plan: Plan) -> Any:
        self.built.append(plan)
        return Built(plan)

    def sketch(self, plan: Plan) -> Any:
        return plan

    def error(self, rewritten: Any) -> float:
        return self.errors[PLANS.index(rewritten.model)]

    def reports(
        self, models: Mapping[MixingKind, Any], errors: Mapping[MixingKind, float]
    ) -> dict[MixingKind, MixingReport] | None:
        if self.known is None:
            return None
        finite = {kind: error for kind, error in errors.items() if math.isfinite(error)}
        reports: dict[MixingKind, MixingReport] = {}
        for kind in models:
            mean, slowest = map(steady, self.known[kind])
            reports[kind] = MixingReport(
                kind=kind, error=finite.get(kind), speedup=mean, slowest=slowest
            )
        return reports


def choose(
    errors: Sequence[float], speeds: Mapping[str, tuple[float, float]] | None
) -> tuple[Plan, list[Plan]]:
    """The plan of the chosen form, and those that were built."""
    comparison: Any = Comparison(errors, speeds)
    plans: dict[MixingKind, list[Plan]] = {}
    for form, plan, _ in zip(FORMS, PLANS, errors, strict=False):
        plans.setdefault(form, []).append(plan)
    state, choice = choose_mixing(plans, comparison.build, comparison)
    found: Any = state.model
    assert (choice is None) == (speeds is None)
    assert choice is None or choice.chosen == FORMS[PLANS.index(found)]
    return found, comparison.built


def test_choose_mixing_takes_the_fastest_form_of_at_most_the_dense_error():
    speeds = {"dense": (0.95, 0.8), "own": (1.1, 1.05), "sparse": (1.0, 1.0)}
    found, built = choose((0.10, 0.11, 0.2, 0.09, 0.01), speeds)
    assert found == OWN[1]
    assert built == [DENSE, OWN[0], OWN[1]]  # no larger own dimensions, no sparse form


def test_choose_mixing_fits_the_sparse_form_only_where_it_is_the_fastest():
    speeds = {"dense": (1.0, 1.0), "own": (1.1, 1.05), "sparse": (1.2, 1.0)}
    found, built = choose((0.10, 0.10, 0.09), speeds)
    assert found == SPARSE and built == [DENSE, OWN[0], SPARSE]
    found, built = choose((0.10, 0.15, 0.09), speeds)  # it loses more than dense
    assert found == OWN[0] and built == [DENSE, OWN[0], SPARSE]


def test_choose_mixing_takes_no_form_that_is_slower_at_some_length():
    found, _ = choose((0.10, 0.10), {"dense": (1.2, 0.9), "sparse": (1.05, 0.99)})
    assert found == SPARSE
    found, _ = choose((0.10, 0.10), {"dense": (0.9, 0.8), "sparse": (0.8, 0.7)})
    assert found == DENSE  # each is slower: the fastest of them


def test_choose_mixing_of_equal_speed_takes_the_smaller_error():
    speeds = {"dense": (1.100, 1.0), "own": (1.095, 1.0), "sparse": (1.0, 1.0)}
    found, _ = choose((0.10, 0.2, 0.09), speeds)
    assert found == OWN[0]


def test_choose_mixing_takes_a_form_whose_outputs_are_finite():
    speeds = {"dense": (1.0, 1.0), "own": (1.1, 1.05), "sparse": (1.2, 1.0)}
    found, _ = choose((0.10, math.inf, 0.09), speeds)
    assert found == OWN[0]
    found, _ = choose((math.inf, 0.10, 0.09), speeds)
    assert found == SPARSE


def test_choose_mixing_that_cannot_be_timed_is_dense():
    found, _ = choose((0.10, 0.1, 0.01), None)
    assert found == DENSE


# In the graph


@pytest.fixture
def forms(tiny: Path, sentences: Path, tmp_path: Path) -> Any:
    """(options) -> form and head size of each layer, as inspect reads the file."""

    def made(**options: Any) -> list[tuple[str, int]]:
        optimize(tiny, tmp_path / "new", calib=sentences, force=True, **options)
        blocks = inspect(tmp_path / "new").matches.blocks
        return [(block.form, block.head_size) for block in blocks]

    return made


@pytest.mark.timing(seconds=8)
def test_optimize_mixing_and_head_dk_set_the_form(forms: Any):
    """Heads of 8 that read 7 shared dimensions and their content; R = 12 of 32."""
    assert forms(collab_dk=12, mixing="dense") == [("collaborative", 12)] * 2
    assert forms(collab_dk=12, mixing="sparse") == [("sparse", 8)] * 2
    assert forms(collab_dk=12, head_dk=5) == [("sparse", 6)] * 2
    assert forms(head_dk=5) == [("standard", 6)] * 2
    assert forms(collab_dk=[12, 28], mixing="sparse") == [("sparse", 8), ("standard", 8)]


def test_form_comparison_times_again_if_a_form_seems_slower(tiny: Path) -> None:
    """A first measurement of some rounds may be wrong by some percent."""
    model, slow_ms = load_model(tiny / "model.onnx"), iter((1.1, 0.9))

    def timer(models: Sequence[TimedModel], seconds: float) -> list[np.ndarray]:
        slow = next(slow_ms)
        lengths = [feed["input_ids"].shape[1] for feed in models[0].feeds]
        return [np.array([[1.0] * 3, [slow if n == 512 else 0.8] * 3]) for n in lengths]

    job = job_of(model, target=Target(sequence=16), context=RunContext(timer=timer))
    found = MixingComparison(ServedTimer(job)).reports({"dense": model.clone()}, {"dense": 0.1})
    assert found is not None and found["dense"].error == 0.1
    mean, slowest = found["dense"].speedup, found["dense"].slowest
    assert mean == Speedup(value=1.25, ci95=(1.25, 1.25))
    assert slowest.value == pytest.approx((1.1 * 0.9) ** -0.5)
    assert slowest.low == pytest.approx(1 / 1.1) and slowest.high == pytest.approx(1 / 0.9)


@pytest.mark.parametrize(
    ("times", "forms"),  # of the fused original; dense, own, sparse
    [([10, 9, 11, 11], "collaborative"), ([10, 11, 8, 11], "standard"), ([10, 11, 11, 11], None)],
)
def test_optimize_auto_mixing_is_decided_by_time(
    times: list[int], forms: str | None, in_context: Callable[..., None], tiny: Path,
    sentences: Path, tmp_path: Path,
):  # fmt: skip
    """R = 12 of 32; if every form is slower than the fused original, the report says so."""

    def timer(models: Sequence[TimedModel], seconds: float) -> list[np.ndarray]:
        rows = np.array([[float(ms)] * 3 for ms in times[: len(models)]])
        return [rows] * len(models[0].feeds)

    in_context(timer=timer)
    report = optimize(tiny, tmp_path / "new", collab_dk=12, calib=sentences)
    assert report.record.mixing is not None
    assert {each.kind for each in report.record.mixing.candidates} >= {"dense", "own"}
    dense, *others = report.record.mixing.candidates
    assert dense.error is not None
    assert all(form.error is None or form.error <= 1.02 * dense.error for form in others)
    blocks = inspect(tmp_path / "new").matches.blocks
    if forms is not None:
        assert [block.form for block in blocks] == [forms] * 2
    told = report.to_json()["mixing"]
    assert told["chosen"] == report.record.mixing.chosen
    slow = forms is None
    assert (max(form["slowest"]["value"] for form in told["forms"]) < 1) == slow


def test_optimize_auto_mixing_of_full_rank_is_dense(tiny: Path, tmp_path: Path):
    """It is exact; nothing else is built or timed."""
    report = optimize(tiny, tmp_path / "new", collab_dk=32)
    assert report.record.mixing is None and report.fidelity.mean_cosine > 1 - 1e-6
    blocks = inspect(tmp_path / "new").matches.blocks
    assert [(block.form, block.head_size) for block in blocks] == [("collaborative", 32)] * 2


def test_optimize_steps_report_rank_and_head_size(tiny: Path, sentences: Path, tmp_path: Path):
    report = optimize(tiny, tmp_path / "new", collab_dk=12, head_dk=6, calib=sentences)
    assert [(change.rank, change.head_size) for change in report.changes] == [(12, 6)] * 2
    assert all(0 < (change.relative_error or 0) < 1 for change in report.changes)
    shared = report.plan.targets(Collaborate).values()
    assert [params.head_size for params in shared] == [6, 6]


def test_optimize_sparse_mixing_is_close_to_dense(tiny: Path, sentences: Path, tmp_path: Path):
    for mixing in ("dense", "sparse"):
        optimize(tiny, tmp_path / mixing, collab_dk=16, mixing=mixing, calib=sentences, refit=False)
    dense, sparse = (
        verify(tiny, tmp_path / mixing, data=sentences).mean_cosine
        for mixing in ("dense", "sparse")
    )
    assert sparse > dense - 0.01


@pytest.mark.parametrize(
    ("options", "code", "values"),
    [
        ({"collab_dk": 16, "mixing": "dense", "head_dk": 4}, "conflict", ("`head_dk` 4", "dense")),
        ({"mixing": "sparse", "prune": 0.5}, "conflict", ("`mixing` sparse", "`collab_dk`")),
        ({"collab_dk": 16, "head_dk": 9}, "range", ("`head_dk` is 9", "1 to 8")),
        ({"head_dk": 0}, "range", ("`head_dk` is 0", "1 to 8")),
        ({"collab_dk": 3, "head_dk": 4}, "range", ("`head_dk` is 4", "3 shared dimensions")),
    ],
)
def test_optimize_impossible_mixing_is_refused(
    options: dict[str, Any], code: str, values: tuple[str, ...], tiny: Path, sentences: Path,
    tmp_path: Path,
):  # fmt: skip
    with raises(InvalidArgument, f"request.{code}", *values):
        optimize(tiny, tmp_path / "new", calib=sentences, **options)
    assert not any(tmp_path.iterdir())


def test_optimize_head_dk_counts_remaining_heads(tiny: Path, sentences: Path, tmp_path: Path):
    """After pruning, R and the sizes count for the heads that stay."""
    report = optimize(
        tiny, tmp_path / "new", prune_heads={"0": [1, 0, 1, 1]}, head_dk=4, calib=sentences
    )
    ranks = [change.rank for change in report.changes if change.rewrite == "collaborate"]
    assert ranks == [12, 16]
    blocks = inspect(tmp_path / "new").matches.blocks
    assert [(b.num_heads, b.head_size) for b in blocks] == [(3, 5), (4, 5)]


def test_optimize_sparse_model_can_be_quantized(tiny: Path, sentences: Path, tmp_path: Path):
    """Every product with a weight becomes one of integers, at a mean cosine of 0.99."""
    from onnxruntime.quantization import quantize_dynamic

    optimize(tiny, tmp_path / "new", collab_dk=12, mixing="sparse", calib=sentences)
    path = tmp_path / "new" / "model.onnx"
    quantize_dynamic(path, tmp_path / "int8.onnx")
    nodes = [node.op_type for node in load_model(tmp_path / "int8.onnx").graph]
    weighted = [
        node
        for node in load_model(path).graph
        if node.op_type == "MatMul" and is_constant(node.inputs[1])
    ]
    assert nodes.count("MatMulInteger") == len(weighted)
    assert verify(path, tmp_path / "int8.onnx").mean_cosine > 0.99
