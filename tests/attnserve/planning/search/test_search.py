"""Search for a plan: results, lengths and refusals.

Times are counted, not measured (``costs``): marked tests compute for long.
``tests/benchmarks/test_demo.py`` has a real clock.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

import attnserve
from attnserve import verify
from attnserve.checks.evaluate import score_session
from attnserve.checks.scores import Score
from attnserve.data.datasets import load_inputs
from attnserve.models.artifact import open_artifact
from attnserve.models.measured import ShapeLatency
from attnserve.models.onnx_files import load_model
from attnserve.options import Lengths
from attnserve.planning.search.judge import Candidate, Judge
from attnserve.runtime.interface import Session
from graph_passes.analysis.workload import Workload
from graph_passes.errors import (
    CannotRewrite,
    CheckFailed,
    InvalidArgument,
    InvalidModel,
    Refusal,
)
from graph_passes.passes.collaborate import Collaborate
from graph_passes.passes.prune_neurons import PruneNeurons
from graph_passes.passes.reuse_attention import ReuseAttention
from graph_passes.passes.skip_attention import SkipAttention
from tests.attnserve.costs import Count
from tests.attnserve.planning.conftest import Optimizer, Planner
from tests.attnserve.sentence_pairs import pairs
from tests.errors import raises

pytestmark = pytest.mark.usefixtures("cache")

Build = Callable[..., Path]


@pytest.mark.timing(seconds=6)
@pytest.mark.usefixtures("short_enough")
def test_search_truncates_queries_and_keys(
    replays: Callable[[], bool], planned: Planner, tmp_path: Path
):
    report = planned(keep=0.9)
    cut = [decision for decision in report.decisions if decision.head_size is not None]
    assert cut and all(decision.head_size == 4 for decision in cut)
    assert all("queries and keys of 4 dimensions lose" in decision.why for decision in cut)
    shared = report.plan.targets(Collaborate)
    assert {n: params.head_size for n, params in shared.items()} == {d.block: 3 for d in cut}
    assert report.fidelity.mean_cosine >= 0.9
    timed = next(row.kept for row in report.latency_ms if row.kind == "attention")
    heads = ["1", "2", "3", "4"]
    truncated = [f"{kept} x 4" for kept in heads]
    assert [*timed][:10] == ["none", *heads, *truncated, "4 x 4 of 8 shared"]
    assert replays()
    again = {row.block.name: row.block.head_size
             for row in attnserve.inspect(tmp_path / "a.onnx").matches.certified}  # fmt: skip
    assert again == {d.block: d.head_size or 8 for d in report.decisions if d.kind == "attention"}


@pytest.mark.timing(seconds=7)
def test_search_keeps_the_requested_quality_and_uses_the_allowance(planned: Planner):
    found = {keep: planned(f"{keep}.json", keep=keep, allow=["ffn"]) for keep in (0.99, 0.9, 0.4)}
    for keep, report in found.items():
        quality = report.quality
        assert report.gain and quality is not None
        # The third choice, if two fail by chance, is measured on all rows that were held out.
        assert quality.measure == "similarity" and quality.split in ("verify", "held out")
        assert quality.losses.measured <= 1 - keep
        chosen_by = report.quality_to_choose
        assert chosen_by is not None and chosen_by.losses.bounded <= 1 - keep
    speeds = [report.speedup for report in found.values()]
    assert speeds == sorted(speeds) and speeds[-1] > 1.2 * speeds[0]
    assert found[0.4].verifications[-1].loss > 0.1  # a larger allowance is used
    for report in found.values():  # every block is explained
        decisions = report.decisions
        assert len(decisions) == 4 and all(decision.why for decision in decisions)
        assert all(decision.ms_after <= decision.ms_before for decision in decisions)
    decisions = found[0.9].decisions
    assert any("others cannot reproduce" in decision.why for decision in decisions)


def test_search_keep_one_is_lossless(planned: Planner):
    report = planned(keep=1.0, allow=["ffn"])
    assert report.gain and not report.plan.lossy_blocks
    assert report.fidelity.mean_cosine > 1 - 1e-5
    assert {d.operator for d in report.decisions} == {"attention", "gelu"}


def test_search_removes_unimportant_attention(
    replays: Callable[[], bool], planned: Planner, model: Path, tmp_path: Path
):
    """An affine map replaces it."""
    graph = load_model(open_artifact(model))
    last = attnserve.inspect(model).matches.blocks[-1]
    weight = graph.graph.initializers[last.output.weight.value.name]
    weight.const_value = ir.tensor(weight.const_value.numpy() * np.float32(1e-3))
    ir.save(graph, model / "model.onnx")
    report = planned(keep=0.999)
    decision = next(d for d in report.decisions if d.block == last.name)
    assert (decision.kept, decision.operator) == (0, "skip")
    assert report.plan.targets(SkipAttention)[last.name].kind == "affine"
    assert "affine map" in decision.why
    assert report.gain and report.fidelity.mean_cosine >= 0.999
    assert replays()
    left = attnserve.inspect(tmp_path / "a.onnx").matches
    assert last.name not in {row.block.name for row in left.certified}


@pytest.mark.timing(seconds=7)
def test_search_reuses_probabilities_without_fused_operators(
    replays: Callable[[], bool], planned: Planner, model: Path, monkeypatch: pytest.MonkeyPatch
):
    """Keys of almost zero make the probabilities of all layers alike."""
    graph = load_model(open_artifact(model))
    for block in attnserve.inspect(model).matches.blocks:
        weight = graph.graph.initializers[block.k.weight.value.name]
        weight.const_value = ir.tensor(weight.const_value.numpy() * np.float32(1e-2))
    ir.save(graph, model / "model.onnx")
    monkeypatch.setattr("attnserve.planning.blocks.groups.OPERATORS", ())
    refusal = Refusal("test", "not here")
    monkeypatch.setattr("attnserve.planning.blocks.groups.skip_refusal", lambda *_: refusal)
    report = planned(keep=0.95)
    source, reader = (d for d in report.decisions if d.kind == "attention")
    assert reader.source == source.block and source.source is None
    assert reader.kept == source.kept > 0
    assert f"the probabilities of {source.block}" in reader.why
    edges = report.plan.targets(ReuseAttention)[reader.block]
    assert len(edges) == reader.kept and {layer for layer, _ in edges.values()} == {source.block}
    assert report.gain and report.verifications[-1].loss <= 0.05
    assert replays()


def test_search_raises_the_opset_for_a_newer_operator(
    optimized: Optimizer,
    planned: Planner,
    model: Path,
    tmp_path: Path,
    in_context: Callable[..., None],
):
    in_context(timer=Count(standard=0.8))
    assert load_model(open_artifact(model)).opset_imports[""] < 23
    found = optimized("a.onnx", keep=0.95)
    fused = [d.block for d in found.search.decisions if d.operator == "onnx"]
    written = load_model(open_artifact(tmp_path / "a.onnx"))
    assert written.opset_imports[""] == 23
    assert [n.op_type for n in written.graph].count("Attention") == len(fused) > 0
    planned(keep=0.95)
    optimized("b.onnx", plan=tmp_path / "p.json")
    assert (tmp_path / "a.onnx").read_bytes() == (tmp_path / "b.onnx").read_bytes()


def test_search_without_newer_opset_uses_older_operators(
    planned: Planner, in_context: Callable[..., None], monkeypatch: pytest.MonkeyPatch
):
    def refuse(model: ir.Model, opset: int) -> None:
        if model.opset_imports[""] < opset:
            raise CannotRewrite("no", "no")

    in_context(timer=Count(standard=0.8))
    monkeypatch.setattr("attnserve.fusion.raise_opset", refuse)
    report = planned(keep=1.0)
    assert {d.operator for d in report.decisions if d.kind == "attention"} == {"attention"}


def test_search_without_ffn_keeps_neurons(planned: Planner):
    report = planned(keep=0.96, measure="cosine")
    assert report.plan.lossy_blocks and not report.plan.targets(PruneNeurons)
    kinds = {d.kind: d for d in report.decisions}
    assert "`allow`" in kinds["feed_forward"].why


def test_goal_that_a_constant_predictor_reaches_is_refused(planned: Planner):
    with raises(CheckFailed, "search.constant", "`keep` is 0.9", "cosine"):
        planned(keep=0.9, measure="cosine")


@pytest.mark.timing(seconds=7)
def test_search_lower_target_speedup_loses_less(planned: Planner):
    found = [planned(f"{speed}.json", target_speedup=speed, allow=["ffn"]) for speed in (1.2, 1.6)]
    for wanted, report in zip((1.2, 1.6), found, strict=True):
        assert wanted <= report.speedup < 1.25 * wanted
    assert found[0].fidelity.mean_cosine > found[1].fidelity.mean_cosine


def test_search_unreachable_speedup_fails_and_writes_nothing(planned: Planner, tmp_path: Path):
    with raises(CheckFailed, "search.target_speedup", "`target_speedup` is 900.0"):
        planned(target_speedup=900.0)
    assert not list(tmp_path.glob("p.*"))


def test_search_without_gain_returns_the_original(
    optimized: Optimizer, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Every model is slower at 64 tokens."""

    def slow(
        judge: Judge, model: ir.Model, workloads: Sequence[Workload], *runtimes: Any
    ) -> list[ShapeLatency]:
        return [ShapeLatency(batch=1, sequence=n, original_ms=1.0, ms=1.1 if n == 64 else 0.8,
                      speedup=0.91 if n == 64 else 1.25)
                for n in (workload.length for workload in workloads)]  # fmt: skip

    monkeypatch.setattr(Judge, "_compare_speed", slow)
    report = optimized(keep=0.9)
    assert report.search is not None and not report.search.gain
    assert report.search.verdict.startswith("no gain: ")
    assert report.search.speedup == 1 and not report.search.speeds  # those of the original
    assert "0.91x" in report.search.verdict and "64 tokens" in report.search.verdict
    assert any(warning.startswith("no gain") for warning in report.record.warnings)
    same = verify(model, tmp_path / "out.onnx")
    assert same.outputs[0].max_abs_error == 0
    assert report.record.after.parameters == report.record.before.parameters


@pytest.mark.timing(seconds=7)
def test_search_keeps_the_lower_bound_of_a_task_score(
    planned: Planner, sentences: Path, tmp_path: Path
):
    rows = pairs(tmp_path / "pairs.tsv", sentences)
    report = planned(keep=0.6, eval_data=rows, task="sts", measure="score", allow=["ffn"])
    share = report.fidelity.share
    assert share is not None and share.value >= 0.6
    assert share.losses.bounded >= share.losses.measured == 1 - share.value
    assert report.fidelity.quality is not None, "also reported if it is not a condition"
    both = planned("both.json", keep=0.6, eval_data=rows, task="sts", allow=["ffn"])
    assert both.speedup <= report.speedup
    assert both.verifications[-1].loss <= 0.4


@pytest.fixture
def retrieval(sentences: Path, tmp_path: Path) -> Path:
    lines = [line for line in sentences.read_text(encoding="utf-8").splitlines() if line.strip()]
    files = {
        "queries": ["id\ttext", *(f"{i}\t{line.split()[0]}" for i, line in enumerate(lines))],
        "documents": ["id\ttext", *(f"{i}\t{line}" for i, line in enumerate(lines))],
        "qrels": ["query\tdocument\trelevance", *(f"{i}\t{i}\t1" for i in range(len(lines)))],
    }
    data = tmp_path / "data"
    data.mkdir()
    for name, rows in files.items():
        (data / f"{name}.tsv").write_text("\n".join(rows), encoding="utf-8")
    return data


@pytest.mark.timing(seconds=7)
def test_search_keeps_a_retrieval_score_of_a_folder(planned: Planner, retrieval: Path):
    report = planned(
        keep=0.5, eval_data=retrieval, task="retrieval", measure="score", allow=["ffn"]
    )
    assert report.fidelity.share is not None and report.fidelity.share.value >= 0.5


@pytest.mark.timing(seconds=7)
def test_search_scores_new_queries_in_documents_of_the_original(
    planned: Planner, retrieval: Path, monkeypatch: pytest.MonkeyPatch
):
    found: list[bool] = []

    def score(session: Session, *arguments: Any, index: Session | None, **options: Any) -> Score:
        found.append(index is not None and index is not session)
        return score_session(session, *arguments, index=index, **options)

    monkeypatch.setattr("attnserve.planning.scored_task.score_session", score)
    report = planned(keep=0.5, eval_data=retrieval, task="retrieval", measure="index")
    assert report.fidelity.share is not None and report.fidelity.share.value >= 0.5
    assert report.fidelity.quality is not None and report.fidelity.quality.measure == "index"
    first, *others = found
    assert others and not first and all(others), "the first one is that of the original"
    found.clear()
    planned("s.json", keep=0.5, eval_data=retrieval, task="retrieval")
    assert not any(found)


@pytest.mark.timing(seconds=10)
def test_plan_and_optimize_are_reproducible(planned: Planner, optimized: Optimizer, tmp_path: Path):
    """Equal requests give equal plans; a search and its plan give the same bytes."""
    for name in ("a.json", "b.json"):
        planned(name, keep=0.95, allow=["ffn"])
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()
    optimized("searched.onnx", keep=0.95, allow=["ffn"])
    optimized("again.onnx", plan=tmp_path / "a.json")
    assert (tmp_path / "searched.onnx").read_bytes() == (tmp_path / "again.onnx").read_bytes()


@pytest.mark.parametrize(
    ("operator", "dtype", "dims"),
    [("ArgMax", ir.DataType.INT64, ("b", "s", 1)), ("ReduceMean", ir.DataType.FLOAT, ())],
)
def test_search_without_a_measurable_output_is_refused(
    operator: str, dtype: ir.DataType, dims: tuple[str | int, ...], model: Path, planned: Planner
):
    """The only output is the index of the best class, or one number for all rows."""
    path = model / "model.onnx"
    graph = load_model(path)
    attributes = {"axis": -1} if dims else {"keepdims": 0}
    node = ir.node(operator, list(graph.graph.outputs), attributes)
    (output,) = node.outputs
    output.name, output.dtype, output.shape = "result", dtype, ir.Shape(dims)
    graph.graph.append(node)
    graph.graph.outputs[:] = [output]
    ir.save(graph, path)
    with raises(InvalidModel, "quality.no_output", "result"):
        planned()


@pytest.mark.timing(seconds=7)
def test_search_of_several_files_verifies_each_of_them(
    planned: Planner,
    optimized: Optimizer,
    sentences: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    timed: list[Candidate] = []
    time = Judge.time
    monkeypatch.setattr(
        Judge, "time", lambda judge, candidate: timed.append(candidate) or time(judge, candidate)
    )
    other = tmp_path / "other.txt"
    subjects, verbs = ("dog", "cat", "man", "child"), ("is", "was", "and", "on", "with")
    lines = [f"{a} {b} {c}" for a in subjects for b in verbs for c in ("good", "bad", "happy")]
    other.write_text("\n".join(lines))
    both: Any = {"calib": [sentences, str(other)], "calib_weights": (1, 2)}
    report = planned(**both)
    assert report.gain
    assert report.quality_to_choose == timed[-1].measured.quality
    for fidelity in (report.fidelity, timed[-1].measured.fidelity):
        assert fidelity.quality is not None
        assert {quality.file for quality in fidelity.qualities} == {"sentences.txt", "other.txt"}
        losses = [quality.losses.bounded for quality in fidelity.qualities]
        assert fidelity.quality.losses.bounded == max(losses)
    losses = [quality.losses.measured for quality in report.fidelity.qualities]
    assert report.verifications[-1].loss == max(losses) <= 0.03
    content = json.loads((tmp_path / "p.json").read_text())["calibration"]
    assert [file["file"] for file in content["files"]] == ["sentences.txt", "other.txt"]
    assert content["weights"] == [1, 2]
    optimized("a.onnx", plan=tmp_path / "p.json", **both)
    optimized("b.onnx", plan=str(tmp_path / "p.json"), **both)
    assert (tmp_path / "a.onnx").read_bytes() == (tmp_path / "b.onnx").read_bytes()
    with raises(InvalidArgument, "plan.other_input", "calibration"):
        optimized("c.onnx", plan=tmp_path / "p.json", **(both | {"calib_weights": ()}))


@pytest.mark.parametrize("sequence", [65, (16, 65)])
def test_search_unsupported_length_is_refused(planned: Planner, sequence: Lengths):
    with raises(InvalidArgument, "search.shape", "batch 1, 65 tokens"):
        planned(sequence=sequence)


@pytest.mark.parametrize("sequence", [(512, 16), (0, 16), -1])
def test_plan_and_optimize_of_no_range_of_lengths_are_refused(
    planned: Planner, optimized: Optimizer, sequence: Lengths
):
    for command in (planned, optimized):
        with raises(InvalidArgument, "target.range"):
            command(sequence=sequence)


def test_search_range_is_timed_at_both_ends_and_between(
    planned: Planner, replays: Callable[[], bool], tmp_path: Path
):
    report = planned(sequence=(4, 64))
    assert report.goal.sequences == (4, 16, 64)
    assert {4, 16, 64} <= {speed.sequence for speed in report.speeds}
    assert report.calibration.joined_rows
    assert json.loads((tmp_path / "p.json").read_text())["calibration"]["joined_to"] == [4, 64]
    assert replays()


def test_search_default_lengths_are_quantiles_of_the_data(
    planned: Planner, model: Path, sentences: Path
):
    report = planned(sequence=None)
    graph = load_model(model / "model.onnx")
    lengths = load_inputs(sentences, graph, open_artifact(model)).lengths
    low, *_, high = report.goal.sequences
    assert np.quantile(lengths, 0.1) <= low < high <= np.quantile(lengths, 0.9)


def test_search_scalar_output_is_measured_by_r2(
    planned: Planner, tiny_bert: Build, sentences: Path, tmp_path: Path
):
    """The cosine of two numbers is always 1 or -1."""
    source = tiny_bert(cls="BertForSequenceClassification", num_labels=1)
    attnserve.export(str(source), tmp_path / "scored", task="sequence-classification")
    report = attnserve.plan(
        tmp_path / "scored", tmp_path / "p.json", calib=sentences, keep=0.9, threads=1
    ).record
    assert report.fidelity.quality is not None and report.fidelity.quality.measure == "r2"
    assert report.verifications[-1].loss <= 0.1
