"""optimize: exactness at R = H*K, effect of R and calibration, outputs, errors and warnings."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import numpy_helper

from attnserve import optimize, verify
from attnserve.checks.certify import read_attention
from attnserve.checks.finite_weights import require_finite_weights
from attnserve.checks.inspect import inspect
from attnserve.data.text_files import read_sentences
from attnserve.literals import Precision
from attnserve.models.artifact import open_artifact
from attnserve.models.onnx_files import load_model
from attnserve.models.tokenizer_files import load_encoder
from attnserve.planning.optimize import OptimizeReport
from attnserve.precision.convert import convert, on_cpu
from attnserve.runtime.session import open_session
from graph_passes.errors import (
    CannotRewrite,
    CheckFailed,
    InvalidArgument,
    InvalidModel,
)
from tests.architectures import Cell
from tests.attnserve.qualities import fidelity_of, quality_of
from tests.errors import raises
from tests.files import read_record, tree, write_lines
from tests.fixtures.make import TINY_EXPORTS
from tests.graph_passes.graphs import graph
from tests.onnx_text import EXP

EXACT = 32  # 4 heads x 8


def interface(path: Path) -> tuple:
    graph = load_model(path)
    values = [
        [(v.name, v.dtype, [str(d) for d in v.shape or ()]) for v in side]
        for side in (graph.graph.inputs, graph.graph.outputs)
    ]
    return (*values, graph.opset_imports[""])


# Exactness and errors


@pytest.mark.parametrize("export", TINY_EXPORTS, ids=lambda export: "-".join(map(str, export)))
def test_optimize_full_rank_is_exact_on_every_export(
    tiny_export: Callable[..., Path], tmp_path: Path, export: tuple
):
    original = tiny_export(*export) / "model.onnx"
    report = optimize(original, tmp_path / "new.onnx", collab_dk=EXACT, mixing="dense")
    assert [change.relative_error for change in report.changes] == [0, 0]
    fidelity = verify(original, tmp_path / "new.onnx")
    assert max(output.max_abs_error for output in fidelity.outputs) <= 1e-4
    assert fidelity.min_cosine >= 1 - 1e-7
    assert interface(report.output) == interface(original)
    # Any shape still runs, not only the one that was traced.
    session = open_session(report.output)
    for shape in ((1, 1), (3, 11), (2, 64)):
        feeds = {value.name: np.ones(shape, np.int64) for value in session.get_inputs()}
        assert session.run(None, feeds)[0].shape == (*shape, 32)


@pytest.mark.timing(seconds=5)
def test_optimize_error_falls_as_rank_grows(tiny: Path, sentences: Path, tmp_path: Path):
    reports = [
        optimize(
            tiny, tmp_path / str(R), collab_dk=R, mixing="dense", calib=sentences, dry_run=True
        )
        for R in (1, 24, EXACT)
    ]
    assert [report.changes[0].rank for report in reports] == [1, 24, EXACT]
    errors = [report.changes[0].relative_error for report in reports]
    assert errors == sorted(errors, reverse=True) and errors[-1] == 0
    cosines = [report.fidelity.mean_cosine for report in reports]
    assert cosines == sorted(cosines) and cosines[-1] >= 1 - 1e-7


@pytest.fixture(scope="module")
def plain(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> OptimizeReport:
    """R = 16 of 32 without calibration; shared."""
    return optimize(
        tiny, tmp_path_factory.mktemp("plain") / "a" / "b", collab_dk=16, mixing="dense"
    )


@pytest.fixture(scope="module")
def fitted(tiny: Path, sentences: Path, tmp_path_factory: pytest.TempPathFactory) -> OptimizeReport:
    """R = 16 of 32, calibrated; shared."""
    folder = tmp_path_factory.mktemp("fitted") / "a" / "b"
    return optimize(tiny, folder, collab_dk=16, mixing="dense", calib=sentences, seed=5)


def test_optimize_calibration_reduces_the_error(
    tiny: Path, sentences: Path, plain: OptimizeReport, fitted: OptimizeReport
):
    errors = [
        verify(tiny, report.output, data=sentences).outputs[0].relative_error
        for report in (fitted, plain)
    ]
    assert errors[0] < errors[1]


def test_optimize_short_calibration_texts_are_warned_of(
    tiny: Path, sentences: Path, tmp_path: Path
):
    """From four times the median length on, texts are joined; longer texts are still better."""
    encoder = load_encoder(open_artifact(tiny))
    lengths = [len(one) for one in encoder.encode(read_sentences(sentences))]
    least = int(np.ceil(4 * np.median(lengths)))

    def is_warned(sequence: int) -> bool:
        report = optimize(
            tiny,
            tmp_path / "new",
            collab_dk=16,
            mixing="dense",
            calib=sentences,
            sequence=sequence,
            dry_run=True,
        )
        return any("texts of the length to be served" in each for each in report.record.warnings)

    assert is_warned(least) and not is_warned(least - 1)


@pytest.mark.timing(seconds=20)
def test_optimize_full_rank_of_minilm_is_exact(
    minilm_export: Callable[[str, str, int], Path], tmp_path: Path
):
    folder = minilm_export("sdpa", "dynamo", 18)
    optimize(folder, tmp_path / "new", collab_dk=384, mixing="dense")
    assert verify(folder, tmp_path / "new").outputs[0].max_abs_error <= 1e-4


def sts_lines(shared: Path, name: str, rows: int) -> list[str]:
    path = shared / f"data/sts/{name}.tsv"
    return path.read_text(encoding="utf-8").splitlines()[: rows + 1]


@pytest.fixture(scope="module")
def pairs(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """300 sentence pairs of STS-B."""
    return write_lines(
        tmp_path_factory.mktemp("sts") / "pairs.tsv", sts_lines(shared, "stsb_dev", 300)
    )


@pytest.fixture(scope="module")
def minilm_spearman(minilm_export: Callable[[str, str, int], Path], pairs: Path) -> float:
    """Spearman of the unchanged encoder on ``pairs``."""
    from attnserve import evaluate

    return evaluate(minilm_export("sdpa", "dynamo", 18), task="sts", data=pairs).to_json()[
        "spearman"
    ]


@pytest.mark.timing(seconds=30)
@pytest.mark.parametrize("head_dk", [None, 24], ids=["dense", "sparse"])
def test_optimize_minilm_keeps_its_score(
    minilm_export: Callable[[str, str, int], Path],
    shared: Path,
    pairs: Path,
    minilm_spearman: float,
    tmp_path: Path,
    head_dk: int | None,
):
    """R = 128 of 384 without the fit, all read by each head or 24 of them: 98 % of Spearman on 300
    pairs. ``benchmarks/results`` has the whole set, and the two forms side by side."""
    from attnserve import evaluate

    header, *rows = (line.split("\t") for line in sts_lines(shared, "stsb_train", 400))
    calib = write_lines(tmp_path / "calib.txt", (row[header.index("sentence1")] for row in rows))
    folder = minilm_export("sdpa", "dynamo", 18)
    options: dict[str, Any] = {"mixing": "dense"} if head_dk is None else {"head_dk": head_dk}
    optimize(folder, tmp_path / "new", collab_dk=128, calib=calib, refit=False, **options)
    after = evaluate(tmp_path / "new", task="sts", data=pairs).to_json()["spearman"]
    assert after >= 0.98 * minilm_spearman


# Layers and ranks


def forms(path: Path) -> list[tuple[str, int]]:
    return [(block.form, block.head_size) for block in inspect(path).matches.blocks]


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ([24, 12], [("collaborative", 24), ("collaborative", 12)]),
        ({"1": 20}, [("standard", 8), ("collaborative", 20)]),
    ],
)
def test_optimize_rank_per_layer(tiny: Path, tmp_path: Path, ranks: Any, expected: Any):
    report = optimize(tiny, tmp_path / "new", collab_dk=ranks, mixing="dense")
    assert [change.rank for change in report.changes] == [
        K for form, K in expected if form != "standard"
    ]
    assert forms(tmp_path / "new") == expected


def test_optimize_layers_by_index_or_name(tiny: Path, tmp_path: Path):
    name = inspect(tiny).matches.blocks[1].name
    report = optimize(tiny, tmp_path / "new", collab_dk=16, layers=["1", name], mixing="dense")
    assert [change.block for change in report.changes] == [name]
    assert forms(tmp_path / "new") == [("standard", 8), ("collaborative", 16)]


# Output


def test_optimize_writes_complete_artifact(tiny: Path, fitted: OptimizeReport):
    folder = fitted.output.parent
    assert fitted.output == folder / "model.onnx"
    files = {path for path in tree(folder) if (folder / path).is_file()}
    added = {
        "README.md", "modules.json", "config_sentence_transformers.json",
        "sentence_bert_config.json", "1_Pooling/config.json",
    }  # fmt: skip
    assert files == {path.name for path in tiny.iterdir()} | added
    assert (folder / "tokenizer.json").read_bytes() == (tiny / "tokenizer.json").read_bytes()
    onnx.checker.check_model(str(fitted.output), full_check=True)
    original, new = open_artifact(tiny), open_artifact(folder)
    assert (new.pooling, new.max_length) == (original.pooling, original.max_length)
    (entry,) = new.lineage
    assert entry.rewrite == "collaborate" and entry.seed == 5
    assert entry.calibration is not None and entry.calibration.file == "sentences.txt"
    assert entry.changes == fitted.changes
    assert {"numpy", "onnxruntime", "python"} <= entry.to_json()["versions"].keys()


@pytest.mark.parametrize(("calibrated", "split"), [(True, "prove"), (False, "random")])
def test_optimize_reports_the_quality_and_its_data(
    tiny: Path, sentences: Path, tmp_path: Path, calibrated: bool, split: str
):
    other_file = tmp_path / "other.txt"
    shutil.copy(sentences, other_file)
    report = optimize(
        tiny, tmp_path / "new", collab_dk=16, mixing="dense",
        calib=sentences if calibrated else None, also_prove=[other_file], dry_run=True,
    )  # fmt: skip
    content = report.to_json()
    keys = {"measure", "value", "ci95", "p5", "constant", "rows", "split"}
    assert keys <= content["quality"].keys()
    assert content["quality"]["measure"] == "similarity"
    assert content["quality"]["split"] == split
    (other,) = report.record.also_verified
    assert other.data == "other.txt" and other.quality is not None
    assert other.quality.rows == 60 and other.quality.split == "data"
    assert content["also_proved"][0]["quality"]["value"] < 1


def test_optimize_costs_equal_inspection_of_the_files(tiny: Path, tmp_path: Path):
    report = optimize(tiny, tmp_path / "new", collab_dk=16, batch=2, sequence=10, mixing="dense")
    assert (report.record.batch, report.record.sequence) == (2, 10)
    for path, cost in ((tiny, report.record.before), (tmp_path / "new", report.record.after)):
        read = inspect(path, batch=2, sequence=10)
        assert (read.parameters, read.total_macs) == (cost.parameters, cost.macs)
    even = report.break_even_sequence
    assert even is not None
    costs = {
        n: [inspect(path, sequence=n).total_macs for path in (tiny, tmp_path / "new")]
        for n in (even - 1, even)
    }
    assert costs[even][1] > costs[even][0] and costs[even - 1][1] <= costs[even - 1][0]


def test_optimize_below_min_cosine_writes_nothing(tiny: Path, tmp_path: Path):
    with raises(CheckFailed, "optimize.min_cosine", "expected at least 1.0"):
        optimize(tiny, tmp_path / "new", collab_dk=1, mixing="dense", min_cosine=1.0)
    assert not any(tmp_path.iterdir())
    optimize(tiny, tmp_path / "new", collab_dk=EXACT, mixing="dense", min_cosine=1 - 1e-6)


def test_optimize_interrupted_while_writing_leaves_nothing(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("attnserve.models.outputs.write_record", interrupt)
    with pytest.raises(KeyboardInterrupt):
        optimize(tiny, tmp_path / "a" / "new", collab_dk=16, mixing="dense")
    assert not any(tmp_path.iterdir())


# Optimized models


def test_optimize_optimized_model_adds_to_lineage(tiny: Path, tmp_path: Path):
    optimize(tiny, tmp_path / "one", collab_dk=16, layers=["0"], mixing="dense")
    report = optimize(
        tmp_path / "one", tmp_path / "two", collab_dk=EXACT, mixing="dense", layers=["1"]
    )
    assert report.fidelity.min_cosine >= 1 - 1e-7, "measured against the model it was given"
    assert forms(tmp_path / "two") == [("collaborative", 16), ("collaborative", EXACT)]
    first, second = open_artifact(tmp_path / "two").lineage
    assert open_artifact(tmp_path / "one").lineage == (first,)
    assert second.source.sha256 == open_artifact(tmp_path / "one").record.files["model.onnx"]


def test_optimize_collaborative_layer_is_left_or_refused_if_requested(
    tiny: Path, sentences: Path, tmp_path: Path
):
    optimize(tiny, tmp_path / "one", collab_dk=16, layers=["0"], mixing="dense")
    before = tree(tmp_path)
    for options in ({"collab_dk": 16, "layers": ["0"]}, {"collab_dk": {"0": 16}}):
        with raises(CannotRewrite, "rewrite.collaborative"):
            optimize(tmp_path / "one", tmp_path / "two", **options)
    assert tree(tmp_path) == before
    report = optimize(tmp_path / "one", tmp_path / "two", collab_dk=16, mixing="dense")
    assert len(report.changes) == 1
    assert "is left as it is: its heads are collaborative already" in warnings(report)
    with raises(CannotRewrite, "request.nothing", "2 attention blocks"):
        optimize(tmp_path / "two", tmp_path / "three", collab_dk=16, mixing="dense")
    with raises(CannotRewrite, "request.nothing", "collaborative"):
        optimize(tmp_path / "two", tmp_path / "three", prune=0.25, calib=sentences)
    assert not (tmp_path / "three").exists()


# External data


def test_optimize_fused_export_with_external_data_is_exact(
    tiny_export: Callable[..., Path], sentences: Path, tmp_path: Path
):
    source = tiny_export("sdpa", "dynamo", 23)
    optimize(
        source, tmp_path / "one", collab_dk=EXACT, mixing="dense", layers=["0"], external_data=True
    )
    report = optimize(
        tmp_path / "one", tmp_path / "two", collab_dk=EXACT, mixing="dense", layers=["1"]
    )
    assert report.fidelity.min_cosine >= 1 - 1e-7
    assert verify(source, tmp_path / "two", data=sentences).outputs[0].max_abs_error <= 1e-4


# Calibration by arrays


def test_optimize_calibration_arrays_equal_their_text(
    tiny: Path, sentences: Path, fitted: OptimizeReport, tmp_path: Path
):
    from attnserve.data.datasets import load_inputs

    artifact = open_artifact(tiny)
    data = load_inputs(sentences, load_model(artifact), artifact, split=False)
    (tmp_path / "arrays").mkdir()
    for index, batch in enumerate(data.fit):
        np.savez(tmp_path / "arrays" / f"{index}.npz", **batch)
    report = optimize(
        tiny, tmp_path / "new", collab_dk=16, mixing="dense", calib=tmp_path / "arrays"
    )
    assert report.fidelity.data == "held out of arrays"
    for ours, theirs in zip(
        report.changes, fitted.changes, strict=True
    ):  # another tenth is held out
        assert ours.relative_error == pytest.approx(theirs.relative_error, rel=0.2)


# Warnings


def warnings(report: OptimizeReport) -> str:
    return "\n".join(report.record.warnings)


def test_optimize_break_even_warning_depends_on_length(tiny: Path, tmp_path: Path):
    def at(sequence: int) -> OptimizeReport:
        return optimize(
            tiny, tmp_path / "new", collab_dk=16, sequence=sequence, mixing="dense", dry_run=True
        )

    even = at(1).break_even_sequence
    assert even is not None and 1 < even <= 64
    report = at(even - 1)
    assert report.record.after.macs <= report.record.before.macs
    assert f"from {even} tokens on this model needs more MACs" in warnings(report)
    report = at(even)
    assert report.record.after.macs > report.record.before.macs
    assert f"at {even} tokens this model needs more MACs" in warnings(report)
    assert f"fewer only below {even} tokens" in warnings(report)


def test_optimize_break_even_past_max_length_is_no_warning(model: Path, tmp_path: Path):
    record = read_record(model)
    (model / "attnserve.json").write_text(json.dumps(record | {"max_length": 4}))
    report = optimize(
        model, tmp_path / "new", collab_dk=16, sequence=3, mixing="dense", dry_run=True
    )
    assert report.break_even_sequence is not None and "MACs" not in warnings(report)


def test_optimize_full_rank_costs_are_warned_of(tiny: Path, tmp_path: Path):
    report = optimize(tiny, tmp_path / "new", collab_dk=EXACT, mixing="dense", dry_run=True)
    assert "needs more MACs than the original at every length" in warnings(report)


@pytest.mark.timing(seconds=5)
def test_optimize_missing_or_scarce_calibration_is_warned_of(
    tiny: Path, sentences: Path, tmp_path: Path
):
    few = tmp_path / "few.txt"
    few.write_text("a man\na dog\n")
    assert "not calibrated" in warnings(
        optimize(tiny, tmp_path, collab_dk=16, mixing="dense", dry_run=True)
    )
    enough = optimize(tiny, tmp_path, collab_dk=16, mixing="dense", calib=sentences, dry_run=True)
    assert "calibrated" not in warnings(enough)
    scarce = optimize(tiny, tmp_path, collab_dk=16, mixing="dense", calib=few, dry_run=True)
    assert "calibrated on 4 tokens, fewer than the 32 features" in warnings(scarce)
    exact = optimize(tiny, tmp_path, collab_dk=EXACT, mixing="dense", dry_run=True)
    assert "calibrated" not in warnings(exact)


# Refused models


@pytest.mark.parametrize(("value", "where"), [(np.nan, "attention"), (-np.inf, "elsewhere")])
def test_optimize_weights_not_finite_are_refused(
    tiny: Path, tmp_path: Path, value: float, where: str
):
    path = tmp_path / "model.onnx"
    proto = onnx.load(tiny / "model.onnx")
    weight = inspect(tiny).matches.blocks[0].k.weight.value.name
    name = weight if where == "attention" else "word_embeddings.weight"
    tensor = next(t for t in proto.graph.initializer if str(name) in t.name)
    array = numpy_helper.to_array(tensor).copy()
    array[1, 1] = value
    tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
    onnx.save(proto, path)
    with raises(InvalidModel, "model.not_finite", name):
        optimize(path, tmp_path / "new", collab_dk=16, mixing="dense")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("array", "sound"),
    [
        (np.array([[0, -np.inf], [0, 0]]), True),
        (np.array(-np.inf), True),
        (np.array([[1, -np.inf], [0, 0]]), False),
        (np.array([[np.inf, -np.inf]]), False),
        (np.array([[0, np.inf]]), False),
        (np.array([[3.4e38, 3.4e38]]), True),
    ],
    ids=["mask", "fill", "weight", "both", "positive", "large"],
)
def test_require_finite_weights_accepts_infinite_masks_only(array: np.ndarray, sound: bool):
    model = ir.from_onnx_text(EXP)
    tensor = ir.tensor(array.astype(np.float32), name="w")
    model.graph.register_initializer(ir.Value(name="w", const_value=tensor))
    if sound:
        require_finite_weights(model)
    else:
        with raises(InvalidModel, "model.not_finite", "'w'"):
            require_finite_weights(model)


def of_table(body: str, table: np.ndarray) -> ir.Model:
    """A model that adds or multiplies a table, or rows of it that ids select."""
    return graph(
        body,
        inputs="int64[b, s] ids, float[b, s, 4] x",
        output="float[b, s, 4] y",
        constants={"table": table, "w": np.eye(4, dtype=np.float32)},
    )


@pytest.mark.parametrize("precision", ["float32", "float16", "bfloat16", "int8"])
def test_require_finite_weights_accepts_infinity_in_the_row_of_padding(precision: Precision):
    """An embedding that is added to scores holds -inf for padding."""
    table = np.random.default_rng(0).standard_normal((6, 4)).astype(np.float32)
    table[0] = -np.inf
    body = "bias = Gather(table, ids) z = Add(x, bias) p = Softmax <axis = 1> (z) y = MatMul(p, w)"
    model = of_table(body, table)
    require_finite_weights(model)
    feeds = {"ids": np.array([[0, 3]]), "x": np.ones((1, 2, 4), np.float32)}
    expected = np.asarray(open_session(model).run(None, feeds)[0])
    converted = convert(model, precision)
    require_finite_weights(converted)
    got = np.asarray(open_session(on_cpu(converted)).run(None, feeds)[0])
    np.testing.assert_allclose(got, expected, atol=0.02)
    np.testing.assert_array_equal(got[0, 0], 0)


def test_require_finite_weights_accepts_infinity_in_the_column_of_padding():
    """A table may hold the values of an id in a column: ``axis`` of the Gather says so."""
    table = np.ones((4, 6), np.float32)
    table[:, 0] = -np.inf
    require_finite_weights(of_table("y = Gather <axis = 1> (table, ids)", table))
    with raises(InvalidModel, "model.not_finite", "'table'"):
        require_finite_weights(of_table("y = Gather <axis = 0> (table, ids)", table))


@pytest.mark.parametrize(
    ("bad", "body"),
    [
        (np.nan, "bias = Gather(table, ids) y = Add(x, bias)"),
        (np.inf, "y = Mul(x, table)"),
        (-np.inf, "y = MatMul(x, table)"),
    ],
    ids=["NaN", "factor", "matrix"],
)
def test_require_finite_weights_refuses_nan_and_infinite_factors(bad: float, body: str):
    """An infinity that multiplies activations gives NaN for zeros."""
    table = np.ones((4, 4), np.float32)
    table[0, 0] = bad
    with raises(InvalidModel, "model.not_finite", "'table'"):
        require_finite_weights(of_table(body, table))


@pytest.mark.parametrize(("value", "warned"), [(0.9, False), (0.8994, True)])
def test_optimize_low_quality_is_warned_of(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: float, warned: bool
):
    fidelity = fidelity_of(quality_of("r2", value))
    monkeypatch.setattr("attnserve.planning.optimize.compare", lambda *_, **__: fidelity)
    report = optimize(tiny, tmp_path / "new", collab_dk=16, mixing="dense", dry_run=True)
    assert any("0.899 (held out of text.txt)" in each for each in report.record.warnings) is warned


@pytest.mark.parametrize("split", ["verify", "held out"])
def test_optimize_few_held_out_texts_are_warned_of(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, split: str
):
    fidelity = fidelity_of(quality_of("r2", 0.99, rows=6, lengths="up to 29 tokens", split=split))
    monkeypatch.setattr("attnserve.planning.optimize.compare", lambda *_, **__: fidelity)
    report = optimize(tiny, tmp_path / "new", collab_dk=16, mixing="dense", dry_run=True)
    assert any("210 different rows of up to 29 tokens" in each for each in report.record.warnings)


@pytest.mark.parametrize("options", [{"prune": 0.5}, {"collab_dk": 16, "mixing": "dense"}], ids=str)
def test_optimize_strip_cache_with_another_rewrite_says_to_run_it_first(
    options: dict[str, Any], tmp_path: Path
):
    original = Cell("GPT-2, cached", "eager", "torchscript", 17).committed
    arrays = {
        "input_ids": np.arange(200).reshape(20, 10) % 60,
        "attention_mask": np.ones((20, 10), int),
    }
    for value in load_model(original).graph.inputs:
        if value.name not in arrays:
            assert value.shape is not None
            arrays[value.name or ""] = np.zeros((20, value.shape[1], 0, value.shape[3]), np.float32)
    np.savez(tmp_path / "ids.npz", **arrays)
    report = optimize(
        original, tmp_path / "new.onnx", strip_cache=True, calib=tmp_path / "ids.npz", **options
    )
    assert [each.name for each in report.plan.passes] == ["strip_cache"]
    assert len([line for line in report.record.warnings if "`strip_cache` alone" in line]) == 1


def test_optimize_strip_cache_is_exact_and_allows_a_second_run(tmp_path: Path):
    """The original runs with an empty cache; heads of the new model can be pruned."""
    original = Cell("GPT-2, cached", "eager", "torchscript", 17).committed
    new = tmp_path / "new.onnx"
    report = optimize(original, new, strip_cache=True)
    assert report.fidelity.min_cosine == 1
    assert report.record.after.parameters == report.record.before.parameters
    assert [output.name for output in report.fidelity.outputs] == ["last_hidden_state"]
    inputs = [value.name for value in load_model(new).graph.inputs]
    assert inputs == ["input_ids", "attention_mask"]
    assert verify(original, new).outputs[0].max_abs_error == 0
    masks = {block.name: [1, 0, 1] for block in read_attention(load_model(new)).blocks}
    pruned = optimize(new, tmp_path / "pruned.onnx", prune_heads=masks)
    assert pruned.record.after.parameters < report.record.after.parameters


def test_an_unknown_runtime_is_refused_before_any_work(tiny: Path, tmp_path: Path) -> None:
    stages: list[str] = []
    with raises(InvalidArgument, "runtime.unknown"):
        optimize(
            tiny, tmp_path / "out", collab_dk=16, runtime="typo",
            progress=lambda stage, *_: stages.append(stage),
        )  # fmt: skip
    assert not stages
