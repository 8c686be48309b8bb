"""Task scores: computed by hand, against scipy, and of the real model."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnserve import evaluate
from attnserve.checks.scores import RatioScore, StsScore, pearson, spearman
from attnserve.checks.tasks import OpenModel
from attnserve.context import DEFAULT_CONTEXT
from attnserve.intervals import bootstrap_interval
from attnserve.models.artifact import open_artifact
from attnserve.models.embeddings import run_texts
from attnserve.models.tokenizer_files import load_encoder
from attnserve.runtime.session import open_session
from attnserve.serving.loaded_model import Model
from graph_passes.errors import (
    AttnserveError,
    CheckFailed,
    InvalidArgument,
    InvalidData,
    InvalidModel,
)
from tests.attnserve.checks.word_models import vectors_of, write_artifact
from tests.errors import raises
from tests.files import write_lines
from tests.word_tokenizer import word_tokenizer

# east and north are at right angles, northeast is between them; nan is what it says.
VECTORS = {"[PAD]": (9, 9), "east": (1, 0), "north": (0, 1), "northeast": (1, 1), "west": (-1, 0),
           "nan": (float("nan"), 0)}  # fmt: skip

LOGITS = """<ir_version: 10, opset_import: ["" : 18]>
classes (int64[batch, sequence] input_ids, int64[batch, sequence] attention_mask)
=> (float[batch, 2] logits) {
    zero = Constant<value_int = 0>()
    first = Gather<axis = 1>(input_ids, zero)
    logits = Gather(table, first)
}"""


def artifact(folder: Path, text: str) -> Path:
    table = np.array(list(VECTORS.values()), np.float32)
    return write_artifact(folder, text, table, word_tokenizer(list(VECTORS), unknown="[PAD]"))


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    """A model whose vector of a text is the mean of its words' vectors."""
    return artifact(tmp_path, vectors_of(2))


@pytest.fixture
def classes(tmp_path: Path) -> Path:
    """A model whose class is 0 for east, 1 for north."""
    return artifact(tmp_path, LOGITS)


def table(folder: Path, *lines: str) -> Path:
    return write_lines(folder / "data.tsv", lines)


STS = "score\tsentence1\tsentence2"


# --- correlation --------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(-3, 3), st.integers(-3, 3)), min_size=3, max_size=40))
def test_correlations_equal_scipy(pairs: list[tuple[int, int]]) -> None:
    stats = pytest.importorskip("scipy.stats")
    x, y = np.array(pairs, np.float64).T
    if np.ptp(x) and np.ptp(y):
        assert spearman(x, y) == pytest.approx(stats.spearmanr(x, y).statistic, abs=1e-12)
        assert pearson(x, y) == pytest.approx(stats.pearsonr(x, y).statistic, abs=1e-12)


# --- sts ----------------------------------------------------------------------------------------


def test_evaluate_sts_correlates_cosines_with_scores(tokens: Path) -> None:
    data = table(
        tokens,
        STS,
        "5\teast\teast",  # cosine 1
        "3\teast\tnortheast",  # 0.71
        "0\teast\twest",  # -1
        "1\teast east\tnorth",  # 0
    )
    score = evaluate(tokens, task="sts", data=data)
    assert isinstance(score, StsScore)
    np.testing.assert_allclose(score.cosines, [1, np.sqrt(0.5), -1, 0], atol=1e-6)
    content = json.loads(json.dumps(score.to_json(), allow_nan=False))
    assert score.value == content["spearman"] == pytest.approx(1, abs=1e-12)
    assert content["pearson"] == pytest.approx(np.corrcoef(score.cosines, [5, 3, 0, 1])[0, 1])
    assert content["spearman_ci95"] == pytest.approx([1, 1])
    assert list(content) == ["task", "rows", "spearman", "pearson", "spearman_ci95"]
    assert (content["task"], content["rows"], len(content["spearman_ci95"])) == ("sts", 4, 2)


def test_evaluate_columns_in_any_order_and_quotes_are_text(tokens: Path) -> None:
    data = table(
        tokens,
        "id\tSentence2\tsplit\tscore\tsentence1",
        '1\teast "\tdev\t5.0\teast\r',
        "",
        "2\twest\tdev\t-1e0\teast",
    )
    assert evaluate(tokens, task="sts", data=data).to_json()["rows"] == 2


def test_evaluate_batch_size_does_not_change_the_score(tokens: Path) -> None:
    words = ["east", "north", "northeast", "west"]
    rng = np.random.default_rng(0)
    lines = [
        f"{rng.integers(0, 6)}\t{' '.join(rng.choice(words, 3))}\t{' '.join(rng.choice(words, 5))}"
        for _ in range(40)
    ]
    data = table(tokens, STS, *lines)
    done: list[tuple[int, int]] = []
    one, seven = (
        evaluate(tokens, task="sts", data=data, batch_size=size, progress=progress)
        for size, progress in ((1, None), (7, lambda _, *counts: done.append(counts)))
    )
    assert isinstance(one, StsScore) and isinstance(seven, StsScore)
    np.testing.assert_allclose(one.cosines, seven.cosines, atol=1e-6)
    assert done[-1] == (80, 80) and len(done) == 12
    low, high = one.ci95
    assert low < one.value < high
    assert one.ci95 == seven.ci95


def test_evaluate_seed_changes_the_interval_only(tokens: Path) -> None:
    lines = ["5\teast\teast", "1\teast\twest", "3\teast\tnorth", "2\tnorth\tnortheast"]
    data = table(tokens, STS, *lines)
    first, again, other = (evaluate(tokens, task="sts", data=data, seed=s) for s in (0, 0, 1))
    assert first.to_json() == again.to_json()
    assert first.to_json()["spearman"] == other.to_json()["spearman"]


def _correlate(x: np.ndarray, y: np.ndarray, rows: np.ndarray) -> np.ndarray:
    return spearman(x[rows], y[rows])


def test_bootstrap_interval_has_its_nominal_coverage() -> None:
    """Normal pairs of correlation 0.5: Spearman's is 6/pi asin(0.25), Pearson 1907."""
    truth = 6 / np.pi * np.arcsin(0.25)
    rng = np.random.default_rng(0)
    inside = 0
    for seed in range(60):
        x, noise = rng.standard_normal((2, 120))
        y = 0.5 * x + np.sqrt(0.75) * noise
        low, high = bootstrap_interval(partial(_correlate, x, y), len(x), seed=seed)
        inside += low <= truth <= high
    assert inside >= 52  # of 60; 57 are expected, and 52 is its lower one-in-a-hundred


@pytest.mark.parametrize(
    ("lines", "cause", "value"),
    [
        ([""], "no_column", "line 1: no column score"),
        (["5\teast\teast", "1\teast\twest"], "no_column", "line 1: no column score"),
        (["score\tsentence1", "5\teast"], "no_column", "line 1: no column sentence2"),
        ([STS], "no_rows", ""),
        ([STS, "", "  "], "no_rows", ""),
        ([STS, "5\teast\teast", "", "1\teast"], "field_count", "line 4: 2"),
        ([STS, "5\teast\teast\tmore"], "field_count", "line 2: 4"),
        ([STS, "5\teast\t "], "empty_field", "line 2: sentence2"),
        ([STS, "5\teast\teast", "good\teast\twest"], "score_not_number", "line 3: score 'good'"),
        ([STS, "nan\teast\teast", "1\teast\twest"], "score_not_number", "line 2: score 'nan'"),
        ([STS, "5\teast\teast", "inf\teast\twest"], "score_not_number", "line 3: score 'inf'"),
        ([STS, "5\teast\teast"], "constant_scores", 1),
        ([STS, "2\teast\teast", "2\teast\twest"], "constant_scores", 2),
    ],
)
def test_evaluate_invalid_table_names_the_line(
    lines: list[str], cause: str, value: object, tokens: Path
) -> None:
    with raises(InvalidData, f"evaluate.{cause}", value) as caught:
        evaluate(tokens, task="sts", data=table(tokens, *lines))
    assert len(str(caught.value).splitlines()) <= 3


def test_evaluate_missing_or_binary_file_is_refused(tokens: Path) -> None:
    with raises(InvalidData, "text.unreadable"):
        evaluate(tokens, task="sts", data=tokens / "absent.tsv")
    (tokens / "data.tsv").write_bytes(b"score\tsentence1\xff")
    with raises(InvalidData, "text.not_utf8"):
        evaluate(tokens, task="sts", data=tokens / "data.tsv")


def test_evaluate_nan_or_constant_output_fails(tokens: Path) -> None:
    with raises(CheckFailed, "text.not_finite", "text 1"):
        evaluate(tokens, task="sts", data=table(tokens, STS, "1\teast\teast", "2\tnan\teast"))
    with raises(CheckFailed, "evaluate.constant_cosines"):
        evaluate(tokens, task="sts", data=table(tokens, STS, "1\teast\teast", "2\twest\twest"))


@pytest.mark.parametrize(
    ("record", "option", "cosines"),
    [({"pooling": "cls"}, "pooling", {None: 1, "cls": 1, "mean": -1}),
     ({"max_length": 1}, "max_length", {None: 1, 3: -1})],
    ids=["pooling", "max_length"],
)  # fmt: skip
def test_evaluate_pooling_and_length_default_to_the_artifact(
    tokens: Path, record: dict[str, Any], option: str, cosines: dict[Any, int]
) -> None:
    data = table(tokens, STS, "5\teast west west\teast", "1\tnorth\teast", "0\twest\teast")
    (tokens / "attnserve.json").write_text(json.dumps(record), encoding="utf-8")
    for value, cosine in cosines.items():
        options: dict[str, Any] = {option: value}
        score = evaluate(tokens, task="sts", data=data, **options)
        assert isinstance(score, StsScore)
        np.testing.assert_allclose(score.cosines, [cosine, 0, -1], atol=1e-6)
    with raises(InvalidArgument, "text.pooling", "none"):
        evaluate(tokens, task="sts", data=data, pooling="none")


# --- classification -----------------------------------------------------------------------------


@pytest.mark.parametrize("column", ["text", "sentence"])
def test_evaluate_classification_accuracy(column: str, classes: Path) -> None:
    lines = ["0\teast", "1\tnorth", "1\teast north north", "0\teast north"]
    data = table(classes, f"label\t{column}", *lines)
    score = evaluate(classes, task="classification", data=data)
    assert isinstance(score, RatioScore)
    assert score.gains.tolist() == [1, 1, 0, 1]
    content = json.loads(json.dumps(score.to_json(), allow_nan=False))
    assert list(content) == ["task", "rows", "accuracy", "accuracy_ci95"]
    assert (content["task"], content["rows"], content["accuracy"]) == ("classification", 4, 0.75)
    low, high = content["accuracy_ci95"]
    assert 0 <= low < 0.75 < high <= 1


def test_evaluate_perfect_accuracy_has_no_spread(classes: Path) -> None:
    data = table(classes, "label\ttext", "0\teast", "1\tnorth")
    assert evaluate(classes, task="classification", data=data).to_json() == {
        "task": "classification",
        "rows": 2,
        "accuracy": 1.0,
        "accuracy_ci95": [1.0, 1.0],
    }


def test_evaluate_labels_may_be_names_of_config(classes: Path) -> None:
    (classes / "config.json").write_text('{"id2label": {"0": "E", "1": "N"}}', encoding="utf-8")
    data = table(classes, "text\tlabel", "east\tE", "north\tN", "north\t1")
    assert evaluate(classes, task="classification", data=data).to_json()["accuracy"] == 1
    with raises(InvalidData, "evaluate.unknown_label", "line 2: label 'W'", "(E, N)"):
        evaluate(classes, task="classification", data=table(classes, "label\ttext", "W\twest"))


@pytest.mark.parametrize("label", ["-1", "0.5", "yes", "²"])
def test_evaluate_unknown_label_is_refused(label: str, classes: Path) -> None:
    with raises(InvalidData, "evaluate.unknown_label", "line 2: label", "(none)"):
        evaluate(classes, task="classification", data=table(classes, "label\ttext", f"{label}\tx"))


@pytest.mark.parametrize("label", ["2", "9" * 30])
def test_evaluate_label_beyond_the_classes_is_refused(label: str, classes: Path) -> None:
    data = table(classes, "label\ttext", "1\teast", f"{label}\teast")
    with raises(InvalidData, "evaluate.label_range", f"line 3: label '{label}'", "2 classes"):
        evaluate(classes, task="classification", data=data)


def test_evaluate_classification_without_logits_is_refused(tokens: Path) -> None:
    with raises(InvalidArgument, "evaluate.no_logits"):
        evaluate(tokens, task="classification", data=table(tokens, "label\ttext", "0\teast"))


def test_evaluate_reads_the_output_that_the_task_is_about(tmp_path: Path) -> None:
    """Of a graph with hidden states and logits; in either order, as the service does."""
    states = "last_hidden_state = Gather(table, input_ids)"
    scores = "zero = Constant<value_int = 0>() first = Gather<axis = 1>(input_ids, zero) " \
        "logits = Gather(table, first)"  # fmt: skip
    outputs = ["float[batch, sequence, 2] last_hidden_state", "float[batch, 2] logits"]
    found: list[object] = []
    for order in (outputs, outputs[::-1]):
        text = (
            '<ir_version: 10, opset_import: ["" : 18]>'
            "both (int64[batch, sequence] input_ids, int64[batch, sequence] attention_mask)"
            f"=> ({', '.join(order)}) {{ {states} {scores} }}"
        )
        folder = artifact(tmp_path, text)
        labels = table(folder, "label\ttext", "0\teast north", "1\tnorth east")
        classified = evaluate(folder, task="classification", data=labels)
        assert isinstance(classified, RatioScore)
        assert classified.gains.tolist() == [1, 1]
        pairs = table(folder, STS, "1\teast north\tnortheast", "0\teast\tnorth")
        similar = evaluate(folder, task="sts", data=pairs)
        assert isinstance(similar, StsScore)
        np.testing.assert_allclose(similar.cosines, [1, 0], atol=1e-6)  # of means of the tokens
        loaded = Model(open_artifact(folder))
        found.append([loaded.text_output(task) for task in ("embed", "classify", "rerank")])
    assert found == [["last_hidden_state", "logits", "logits"]] * 2


def test_evaluate_puts_the_default_prompt_before_texts_as_the_service_does(classes: Path) -> None:
    record = {"prompts": {"ask": "north "}, "default_prompt": "ask"}
    (classes / "attnserve.json").write_text(json.dumps(record), encoding="utf-8")
    data = table(classes, "label\ttext", "0\teast", "1\tnorth")
    score = evaluate(classes, task="classification", data=data)
    assert isinstance(score, RatioScore)
    assert score.gains.tolist() == [0, 1]  # both have the class of the first token, which is 1


# --- what the model and the options may be ------------------------------------------------------


@pytest.mark.parametrize(
    ("task", "setting"),
    [
        ("classification", {"pooling": "cls"}),
        ("perplexity", {"pooling": "mean"}),
        ("image-classification", {"max_length": 8}),
        ("image-classification", {"tokenizer": Path("tokenizer.json")}),
    ],
)
def test_evaluate_setting_without_effect_is_refused(
    tmp_path: Path, task: Any, setting: dict[str, Any]
) -> None:
    (name,) = setting
    with raises(InvalidArgument, "evaluate.usage", f"`{name}`", task):
        evaluate(tmp_path, task=task, data=tmp_path, **setting)


def test_evaluate_unknown_task_missing_model_or_tokenizer_is_refused(
    tokens: Path, tmp_path: Path
) -> None:
    data = table(tokens, STS, "1\teast\teast", "2\tnorth\teast")

    def refused(error: type[AttnserveError], code: str, model: Path = tokens, task: str = "sts"):
        with raises(error, code):
            evaluate(model, task=task, data=data)  # type: ignore[arg-type]

    refused(InvalidArgument, "evaluate.task", task="qa")
    refused(InvalidModel, "artifact.missing", model=tmp_path / "absent")
    (tokens / "tokenizer.json").rename(tokens / "moved.json")
    refused(InvalidData, "text.no_tokenizer")
    evaluate(tokens, task="sts", data=data, tokenizer=tokens / "moved.json")


def test_run_texts_refused_batch_names_its_size(tokens: Path) -> None:
    model = onnx.load(tokens / "model.onnx")
    for value in model.graph.input:
        for axis, size in zip(value.type.tensor_type.shape.dim, (1, 4), strict=True):
            axis.dim_value = size
    onnx.save(model, tokens / "model.onnx")
    session, encoder = open_session(tokens / "model.onnx"), load_encoder(open_artifact(tokens))
    with raises(InvalidData, "text.batch_refused", "1 texts x 1 tokens"):
        list(run_texts(session, encoder, encoder.encode(["east", "west"])))


def test_embed_without_texts_is_refused(tokens: Path) -> None:
    artifact, session = open_artifact(tokens), open_session(tokens / "model.onnx")
    opened = OpenModel(session, artifact, "mean", None, 32, DEFAULT_CONTEXT)
    with raises(InvalidData, "text.no_texts"):
        opened.embed([], normalize=False)


@pytest.mark.parametrize("rows", [1, 3])
def test_evaluate_model_of_fixed_shape_equals_the_dynamic_one(tokens: Path, rows: int) -> None:
    data = table(tokens, STS, "5\teast\teast", "3\teast\tnortheast east", "0\teast\twest",
                 "1\teast east\tnorth")  # fmt: skip
    expected = evaluate(tokens, task="sts", data=data)
    model = onnx.load(tokens / "model.onnx")
    for value in model.graph.input:
        for axis, size in zip(value.type.tensor_type.shape.dim, (rows, 6), strict=True):
            axis.dim_value = size
    onnx.save(model, tokens / "model.onnx")
    found = evaluate(tokens, task="sts", data=data)
    np.testing.assert_allclose(found.cosines, expected.cosines, atol=1e-6)


# --- the real model -----------------------------------------------------------------------------


def test_evaluate_minilm_has_its_published_score(
    minilm_export: Callable[[str, str, int], Path], shared: Path
) -> None:
    data = shared / "data" / "sts" / "stsb_dev.tsv"
    score = evaluate(minilm_export("sdpa", "torchscript", 17), task="sts", data=data, threads=1)
    assert isinstance(score, StsScore)
    assert score.rows == 1500
    assert score.value == pytest.approx(0.8672, abs=5e-5)
    low, high = score.ci95
    assert 0.84 < low < score.value < high < 0.89
