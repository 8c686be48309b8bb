"""optimize with ``skip``, ``prune`` and ``reuse``, alone and combined."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir
import pytest

from attnserve import optimize, verify
from attnserve.checks.inspect import inspect
from attnserve.data.datasets import load_inputs
from attnserve.models.artifact import open_artifact
from attnserve.models.onnx_files import load_model
from attnserve.planning.optimize import OptimizeReport
from attnserve.planning.plans.apply import apply_plan
from attnserve.planning.plans.plan import Plan
from attnserve.runtime.session import open_session
from graph_passes.blocks import AttentionBlock
from graph_passes.errors import CannotRewrite, InvalidData
from graph_passes.matching.find import find_attention
from graph_passes.passes.prune_heads import PruneHeads
from graph_passes.passes.reuse_attention import ReuseAttention
from tests.errors import raises
from tests.files import read_record, tree
from tests.graph_passes.graphs import D, layers
from tests.jobs import job_of
from tests.texts import write_sentences

Build = Callable[..., Path]
ORDER = ["skip_attention", "prune_heads", "reuse_attention", "collaborate"]


def blocks_of(path: Path) -> tuple[AttentionBlock, ...]:
    return tuple(find_attention(load_model(open_artifact(path))).blocks)


# A BERT of three layers, and text


@pytest.fixture(scope="module")
def bert(tiny_export: Build) -> Path:
    """3 layers of 4 heads x 8; shared."""
    return tiny_export("eager", "torchscript", 17, 3)


@pytest.fixture(scope="module")
def calibration(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """200 sentences, about 2400 tokens."""
    return write_sentences(tmp_path_factory.mktemp("text") / "calibration.txt", 200, 20, seed=0)


@pytest.fixture(scope="module")
def unseen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Other sentences of the same vocabulary."""
    return write_sentences(tmp_path_factory.mktemp("unseen") / "unseen.txt", 60, 20, seed=7)


class Optimized(NamedTuple):
    folder: Path
    report: OptimizeReport


CASES: Mapping[str, dict[str, Any]] = {
    "prune": {"prune": 0.25},
    "reuse": {"reuse": "partial:2"},
    "skip": {"skip": ["1"]},
    "all": {"skip": ["2"], "prune": 0.25, "reuse": "partial:1", "collab_dk": 12, "mixing": "dense"},
}


@pytest.fixture(scope="module")
def optimized(
    bert: Path, calibration: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Optimized]:
    """(case, refit) -> the optimized BERT; each is computed once."""
    base = tmp_path_factory.mktemp("optimized")

    @cache
    def build(case: str, refit: bool) -> Optimized:
        folder = base / f"{case}-{refit}"
        report = optimize(bert, folder, calib=calibration, refit=refit, **CASES[case])
        return Optimized(folder, report)

    return lambda case, refit=True: build(case, refit)


Cases = Callable[..., Optimized]


@pytest.mark.parametrize("case", CASES)
def test_optimize_changes_follow_the_plan_and_add_up(optimized: Cases, case: str):
    report = optimized(case).report
    kinds = list(dict.fromkeys(change.rewrite for change in report.changes))
    assert kinds == [kind for kind in ORDER if kind in kinds]
    last = {
        change.block: change for change in report.changes
    }  # the last change of a layer holds its fitted error
    assert any(change.fitted_error is not None for change in last.values())
    assert report.changes[-1].macs_after == report.record.after.macs
    macs = [report.record.before.macs, *(change.macs_after for change in report.changes)]
    assert None not in macs
    if case != "all":  # sharing alone may add MACs
        assert macs == sorted(macs, reverse=True)  # pyright: ignore
    assert {change.block for change in report.changes} == set(report.plan.lossy_blocks)


def test_optimize_all_rewrites_are_one_plan_in_one_file(optimized: Cases):
    folder, report = optimized("all")
    kinds = [change.rewrite for change in report.changes]
    runs = [kind for i, kind in enumerate(kinds) if i == 0 or kinds[i - 1] != kind]
    assert runs == ORDER
    plan = report.plan
    assert [rewrite.name for rewrite in plan.passes] == ORDER
    masks, edges = plan.targets(PruneHeads), plan.targets(ReuseAttention)
    matches = inspect(folder).matches
    assert len(matches.blocks) == 2 and not matches.unmatched, "the third layer has no attention"
    for block in matches.blocks:
        mask = masks.get(block.name, [1, 1, 1, 1])
        assert block.num_heads == sum(mask)
        assert len(block.own_heads) == sum(mask) - len(edges.get(block.name, {}))


@pytest.mark.parametrize("case", CASES)
def test_optimize_reported_costs_equal_those_of_the_file(optimized: Cases, case: str):
    folder, report = optimized(case)
    record, before, after = report.record, report.record.before, report.record.after
    read = inspect(folder, batch=record.batch, sequence=record.sequence)
    assert (read.parameters, read.total_macs) == (after.parameters, after.macs)
    assert after.parameters < before.parameters
    assert after.bytes < before.bytes
    session = open_session(folder / "model.onnx")
    for shape in ((1, 1), (3, 11), (2, 64)):  # the model accepts any shape
        feeds = {value.name: np.ones(shape, np.int64) for value in session.get_inputs()}
        assert np.asarray(session.run(None, feeds)[0]).shape == (*shape, 32)


def test_optimize_removes_parameters_of_pruned_and_reused_heads(optimized: Cases):
    report = optimized("prune", False).report
    removed = sum(mask.count(0) for mask in report.plan.targets(PruneHeads).values())
    assert removed == 3  # of 12
    head = 4 * 32 * 8  # W_Q, W_K, W_V and W_O; the biases are 0, one constant for all heads
    assert report.record.before.parameters - report.record.after.parameters == removed * head
    report = optimized("reuse").report
    before, after = report.record.before.parameters, report.record.after.parameters
    assert [len(heads) for heads in report.plan.targets(ReuseAttention).values()] == [2]
    assert before - after == 2 * (2 * 32 * 8) - 32  # a new bias


def test_optimize_json_has_the_keys_of_the_contract(optimized: Cases):
    folder, report = optimized("all")
    content = report.to_json()
    keys = {"before", "after", "steps", "fidelity", "break_even_sequence", "warnings", "plan"}
    assert keys <= content.keys()
    for side in ("before", "after"):
        assert list(content[side]) == ["parameters", "macs", "bytes"]
    assert list(content["fidelity"]) == ["mean_cosine", "min_cosine", "data"]
    assert content["fidelity"]["data"] == "held out of calibration.txt"
    for step in content["steps"]:
        assert {"rewrite", "block", "relative_error", "macs_after", "rank", "heads"} <= step.keys()
        assert step["relative_error"] is None or 0 <= step["relative_error"] < 100
    assert list(content["plan"]) == ["passes", "precision"]
    assert [entry["pass"] for entry in content["plan"]["passes"]] == ORDER
    assert json.loads(json.dumps(content, allow_nan=False)) == content
    (entry,) = read_record(folder)["lineage"]
    assert entry["rewrite"] == "+".join(ORDER)
    assert {name: entry[name] for name in content} == content


@pytest.mark.parametrize("case", ["prune", pytest.param("reuse", marks=pytest.mark.timing)])
def test_optimize_refit_improves_unseen_text(optimized: Cases, bert: Path, unseen: Path, case: str):
    fitted, plain = (
        verify(bert, optimized(case, refit).folder, data=unseen).outputs[0]
        for refit in (True, False)
    )
    assert fitted.mean_cosine > plain.mean_cosine
    assert fitted.relative_error < plain.relative_error
    plans = [optimized(case, refit).report.plan.to_json() for refit in (True, False)]
    assert plans[0] == plans[1]


def test_optimize_changes_have_errors_before_and_after_the_refit(optimized: Cases):
    assert all(change.fitted_error is None for change in optimized("prune", False).report.changes)
    for case in ("prune", "reuse"):
        for change in optimized(case).report.changes:
            assert change.relative_error is not None and change.fitted_error is not None
            assert change.fitted_error < change.relative_error


def test_optimize_without_refit_keeps_remaining_weights(optimized: Cases, bert: Path):
    folder, report = optimized("prune", False)
    originals = {block.name: block for block in blocks_of(bert)}
    for block in blocks_of(folder):
        original = originals[block.name]
        kept = np.flatnonzero(report.plan.targets(PruneHeads).get(block.name, [1] * 4))
        for new, old in ((block.k, original.k), (block.v, original.v)):
            np.testing.assert_array_equal(new.heads(), old.heads()[kept])
        queries = original.q.heads()[kept] * (original.scale / block.scale)
        np.testing.assert_allclose(block.q.heads(), queries, rtol=1e-6)
        assert block.output is not None and original.output is not None
        np.testing.assert_array_equal(
            block.output.matrix()[block.output.rows],
            original.output.matrix()[original.output.rows[kept]],
        )
        assert not np.any(block.output.offset()) and not np.any(original.output.offset())


def test_optimize_fused_export_gives_the_same_plan(
    tiny_bert: Build, calibration: Path, optimized: Cases, tmp_path: Path
):
    """The plan equals that of the unfused export, and the model nearly does."""
    from attnserve.exporters.hugging_face import export

    source = tiny_bert(num_hidden_layers=3, initializer_range=0.3)
    export(str(source), tmp_path / "fused", attention="sdpa", exporter="dynamo", opset=23)
    new = tmp_path / "new"
    report = optimize(tmp_path / "fused", new, calib=calibration, **CASES["all"])
    assert report.changes[-1].macs_after == report.record.after.macs
    other = optimized("all").report
    masks = [list(r.plan.targets(PruneHeads).values()) for r in (report, other)]
    assert masks[0] == masks[1]
    assert report.fidelity.mean_cosine == pytest.approx(other.fidelity.mean_cosine, abs=1e-3)


# A small graph and arrays: requests and their errors


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """3 layers of 3 heads over one stream; shared."""
    path = tmp_path_factory.mktemp("small") / "model.onnx"
    ir.save(layers(3), path)
    return path


@pytest.fixture(scope="module")
def arrays(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("arrays") / "tokens.npz"
    x = np.random.default_rng(0).standard_normal((40, 7, D)).astype(np.float32)
    np.savez(path, x=x, mask=np.zeros((40, 1, 1, 7), np.float32))
    return path


def forms(path: Path) -> list[str]:
    return [block.form for block in inspect(path).matches.blocks]


def test_optimize_mask_or_index_needs_no_data(small: Path, tmp_path: Path):
    report = optimize(small, tmp_path / "index.onnx", reuse="alternate", align="index")
    assert [change.heads for change in report.changes] == [0]
    assert forms(tmp_path / "index.onnx") == ["standard", "reuse", "standard"]
    report = optimize(small, tmp_path / "new.onnx", prune_heads={"1": [1, 0, 1], "2": [0, 0, 0]})
    changes = [(change.rewrite, change.heads) for change in report.changes]
    assert changes == [("prune_heads", 2), ("prune_heads", 0)]
    assert all(change.relative_error is not None for change in report.changes), "on random inputs"
    assert report.changes[-1].macs_after == report.record.after.macs
    assert report.fidelity.data == "random inputs"
    assert any("not calibrated" in warning for warning in report.record.warnings)
    assert [block.num_heads for block in inspect(tmp_path / "new.onnx").matches.blocks] == [3, 2]


def test_optimize_pruning_heads_without_output_is_exact(small: Path, tmp_path: Path):
    model = load_model(open_artifact(small))
    value = model.graph.initializers["Wo_1"]
    assert value.const_value is not None
    array = value.const_value.numpy().copy()
    array[2:4] = 0
    value.const_value = ir.tensor(array, name="Wo_1")
    ir.save(model, tmp_path / "silent.onnx")
    report = optimize(
        tmp_path / "silent.onnx", tmp_path / "new.onnx", prune_heads={"1": [1, 0, 1]},
        min_cosine=1 - 1e-6,
    )  # fmt: skip
    assert report.changes[0].relative_error == pytest.approx(0, abs=1e-5)
    new = verify(tmp_path / "silent.onnx", tmp_path / "new.onnx")
    assert new.outputs[0].relative_error <= 1e-5


def test_optimize_same_seed_gives_the_same_bytes(small: Path, arrays: Path, tmp_path: Path):
    for name in ("one", "two"):
        optimize(
            small, tmp_path / name / "model.onnx", prune=0.34, importance="voting", skip=["2"],
            reuse="partial:1", collab_dk=7, mixing="dense", calib=arrays, seed=3,
        )  # fmt: skip
    assert tree(tmp_path / "one") == tree(tmp_path / "two")


def test_optimize_dry_run_writes_nothing_and_recorded_plan_gives_the_same_graph(
    small: Path, arrays: Path, tmp_path: Path
):
    request: dict[str, Any] = {"skip": ["2:constant"], "prune": 0.34, "reuse": "partial:1"}
    dry = optimize(small, tmp_path / "a" / "model.onnx", dry_run=True, calib=arrays, **request)
    assert not any(tmp_path.iterdir())
    real = optimize(small, tmp_path / "a" / "model.onnx", calib=arrays, **request)
    assert dry.to_json() == real.to_json() and dry.output == real.output
    plan = read_record(tmp_path / "a")["lineage"][0]["plan"]
    assert [entry["pass"] for entry in plan["passes"]] == ORDER[:3]
    model, original = (load_model(open_artifact(small)) for _ in range(2))
    data = load_inputs(arrays, original, open_artifact(small))
    apply_plan(Plan.from_json(plan), job_of(original, data=data), model)
    ir.save(model, tmp_path / "b.onnx")
    written = load_model(tmp_path / "a" / "model.onnx").graph.initializers
    again = load_model(tmp_path / "b.onnx").graph.initializers
    assert written.keys() == again.keys()
    for name, value in written.items():
        np.testing.assert_array_equal(tensor_of(value), tensor_of(again[name]))


def tensor_of(value: ir.Value) -> np.ndarray:
    assert value.const_value is not None
    return value.const_value.numpy()


@pytest.mark.parametrize(
    "stage",
    ["measure blocks", "compare heads", "collect moments", "factor", "refit outputs", "verify"],
)
def test_optimize_interrupted_writes_nothing(small: Path, arrays: Path, tmp_path: Path, stage: str):
    def interrupt(what: str, done: int, total: int) -> None:
        if what == stage:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        optimize(
            small, tmp_path / "new.onnx", prune=0.25, reuse="partial:1", collab_dk=7,
            mixing="dense", calib=arrays, progress=interrupt,
        )  # fmt: skip
    assert not any(tmp_path.iterdir())


def test_optimize_calibration_without_tokens_is_refused(tiny: Path, tmp_path: Path):
    row = np.ones((12, 5), np.int64)
    np.savez(tmp_path / "p.npz", input_ids=row, attention_mask=0 * row, token_type_ids=0 * row)
    before = tree(tmp_path)
    requests: list[dict[str, Any]] = [{"prune": 0.25}, {"prune_heads": {"0": [1, 0, 1, 1]}}]
    for request in requests:
        with raises(InvalidData, "calibration.no_token"):
            optimize(tiny, tmp_path / "new", calib=tmp_path / "p.npz", **request)
    assert tree(tmp_path) == before


# Several calls


@pytest.mark.timing
def test_optimize_rewrites_of_several_calls_combine(small: Path, arrays: Path, tmp_path: Path):
    """Each call matches and certifies the output of the previous one."""
    requests: list[dict[str, Any]] = [
        {"reuse": {"1": {"0": ["0", 2]}}},
        {"prune_heads": {"2": [1, 0, 1]}},
        {"collab_dk": 7, "mixing": "sparse", "layers": ["0"]},  # the source of the first call
        {"reuse": {"2": {"0": ["1", 0]}}},
        {"skip": ["2:constant"]},
    ]
    path = small
    for number, request in enumerate(requests):
        new = tmp_path / str(number) / "model.onnx"
        report = optimize(path, new, calib=arrays, **request)
        assert report.changes[-1].macs_after == report.record.after.macs, request
        assert not inspect(new).matches.unmatched, request
        path = new
    assert forms(path) == ["sparse", "reuse"]
    assert len(read_record(path.parent)["lineage"]) == len(requests)
    assert verify(small, path).mean_cosine > 0


def test_optimize_reused_layer_of_an_earlier_call_is_refused(
    small: Path, arrays: Path, tmp_path: Path
):
    """Another layer still reads its probabilities."""
    once = tmp_path / "a" / "model.onnx"
    optimize(small, once, reuse={"2": {"0": ["1", 2]}})
    requests: list[dict[str, Any]] = [
        {"skip": ["1"]},
        {"prune_heads": {"1": [1, 1, 0]}},
        {"reuse": {"1": {"0": ["0", 0]}}},
        {"prune": 0.5, "layers": ["1"]},
        {"reuse": "full:1", "layers": ["1"]},
    ]
    for request in requests:
        with raises(CannotRewrite, "rewrite.reused", "attention_1", "attention_2"):
            optimize(once, tmp_path / "b.onnx", calib=arrays, **request)
    with raises(CannotRewrite, "rewrite.reuses_heads", "attention_2"):
        optimize(once, tmp_path / "b.onnx", reuse={"2": {"1": ["0", 0]}})
    report = optimize(once, tmp_path / "b.onnx", prune=0.3, calib=arrays)
    assert "attention_1" not in report.plan.targets(PruneHeads)
    assert any("attention_1" in w and "attention_2" in w for w in report.record.warnings)
