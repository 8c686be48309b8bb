"""Labels that ``attnserve.recover`` learns, on tiny models."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

torch = pytest.importorskip("torch", reason="pip install 'attnserve[torch]'")

import attnserve  # noqa: E402
from attnserve.checks.labeled_tables import LabeledRow  # noqa: E402
from attnserve.cli.app import main  # noqa: E402
from attnserve.data.datasets import Dataset, load_inputs  # noqa: E402
from attnserve.data.file_rows import wanted_inputs  # noqa: E402
from attnserve.literals import Pooling  # noqa: E402
from attnserve.models.artifact import open_artifact  # noqa: E402
from attnserve.models.embeddings import pool  # noqa: E402
from attnserve.models.onnx_files import load_model  # noqa: E402
from attnserve.models.tokenizer_files import load_encoder  # noqa: E402
from attnserve.recovery import training  # noqa: E402
from attnserve.recovery.batches import row_contents  # noqa: E402
from attnserve.recovery.labels import Labels, task_loss  # noqa: E402
from attnserve.recovery.loss import served_vectors  # noqa: E402
from attnserve.runtime.session import open_session  # noqa: E402
from graph_passes.errors import AttnserveError, InvalidData  # noqa: E402
from tests.errors import raises  # noqa: E402
from tests.files import last_entry, write_lines  # noqa: E402
from tests.texts import WORDS  # noqa: E402

MINUTES = 1.0
"""Of ``counted_clock``: about 120 steps."""


@pytest.fixture(autouse=True)
def _learning_rate(monkeypatch: pytest.MonkeyPatch, counted_clock: None) -> None:
    monkeypatch.setattr(training, "LEARNING_RATE", 3e-3)


def table(path: Path, rows: int = 600) -> Path:
    """Pairs of sentences with the share of common words."""
    chosen = random.Random(2)
    lines = [COLUMNS]
    for _ in range(rows):
        first = chosen.choices(WORDS, k=chosen.randint(3, 10))
        second = chosen.sample(first, k=len(first) // 2) + chosen.choices(WORDS, k=2)
        score = 5 * len({*first} & {*second}) / len({*first, *second})
        lines.append(f"{score:.2f}\t{' '.join(first)}\t{' '.join(second)}")
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return table(tmp_path_factory.mktemp("pairs") / "pairs.tsv")


@pytest.fixture(scope="module")
def pruned(tiny: Path, sentences: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pruned") / "pruned"
    attnserve.optimize(tiny, folder, prune=0.5, calib=sentences)
    return folder


@pytest.mark.timing(seconds=30)
def test_labels_raise_the_score_on_unseen_rows(
    pruned: Path, tiny: Path, pairs: Path, tmp_path: Path
):
    report = attnserve.recover(
        pruned, tmp_path / "out", teacher=tiny, data=pairs, minutes=MINUTES, task="sts"
    )
    assert report.record.gain and report.record.scores is not None
    scores = report.record.scores
    # The original never saw these labels, so that training may exceed it.
    assert scores["after"]["spearman"] > scores["before"]["spearman"] + 0.05
    assert scores["after"]["spearman"] > scores["teacher"]["spearman"]
    entry = last_entry(tmp_path / "out")
    assert entry["scores"] == scores and scores["before"]["task"] == "sts"
    assert sum(scores["rows"].values()) == 600
    # The file that was written has the score of the report on all rows, up to the rows to fit.
    before, after = (
        attnserve.evaluate(folder, task="sts", data=pairs).value
        for folder in (pruned, tmp_path / "out")
    )
    assert after > before + 0.05


def test_labels_without_time_return_an_equal_model(
    pruned: Path, tiny: Path, pairs: Path, tmp_path: Path
):
    report = attnserve.recover(
        pruned, tmp_path / "out", teacher=tiny, data=pairs, minutes=0, task="sts"
    )
    assert not report.record.gain and report.record.scores is not None
    assert report.record.scores["after"] == report.record.scores["before"]
    assert attnserve.verify(pruned, tmp_path / "out", data=pairs).mean_cosine == 1.0


def test_verification_after_labels_is_repeated_with_the_default_prompt(
    pruned: Path, tiny: Path, pairs: Path, tmp_path: Path
):
    model = Path(shutil.copytree(pruned, tmp_path / "model"))
    path = model / "attnserve.json"
    prompts = {"prompts": {"ask": "the dog "}, "default_prompt": "ask"}
    path.write_text(json.dumps(json.loads(path.read_text()) | prompts))
    attnserve.recover(model, tmp_path / "out", teacher=tiny, data=pairs, minutes=0, task="sts")
    again = attnserve.verify_again(tmp_path / "out", tiny, data=pairs)
    (check,) = again.guarantees
    assert again.is_recorded and again.holds
    assert check.value == pytest.approx(check.recorded, abs=1e-6)


@pytest.mark.timing(seconds=30)
def test_labels_teach_a_classifier(
    tiny_bert: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(training, "LEARNING_RATE", 1e-2)
    source = tiny_bert("BertForSequenceClassification", num_labels=4, initializer_range=0.3)
    model = tmp_path / "model"
    attnserve.export(str(source), model, task="sequence-classification")
    chosen = random.Random(3)
    texts = [" ".join(chosen.choices("abcdefgh", k=chosen.randint(3, 9))) for _ in range(500)]
    artifact = open_artifact(model)
    encoder, session = load_encoder(artifact), open_session(artifact.model)
    wanted = wanted_inputs(load_model(artifact))
    labels = [
        int(np.argmax(session.run(None, encoder.batch_inputs(encoder.encode([text]), wanted))[0]))
        for text in texts
    ]
    assert len({*labels}) > 1
    rows = [f"{label}\t{text}" for label, text in zip(labels, texts, strict=True)]
    data = tmp_path / "labels.tsv"
    data.write_text("\n".join(["label\ttext", *rows]) + "\n", encoding="utf-8")
    pruned = tmp_path / "pruned"
    plain = write_lines(tmp_path / "texts.txt", texts)
    attnserve.optimize(model, pruned, prune=0.5, ffn=0.5, calib=plain)
    report = attnserve.recover(
        pruned, tmp_path / "out", teacher=model, data=data, minutes=MINUTES, task="classification"
    )
    scores = report.record.scores
    assert report.record.gain and scores is not None
    assert scores["teacher"]["accuracy"] == 1.0
    assert scores["after"]["accuracy"] > scores["before"]["accuracy"]
    assert scores["after"]["task"] == "classification"
    # One label of many that the model does not have is found before the training.
    data.write_text("\n".join(["label\ttext", *rows, "4\ta b"]) + "\n", encoding="utf-8")
    with raises(InvalidData, "recovery.label_range", "4 classes"):
        attnserve.recover(
            pruned, tmp_path / "out", teacher=model, data=data, minutes=0, task="classification",
            force=True,
        )  # fmt: skip


def load(model: Path, data: Path, rows: Sequence[LabeledRow]) -> tuple[ir.Model, Dataset]:
    artifact = open_artifact(model)
    graph = load_model(artifact)
    texts = [text for row in rows for text in row.texts]
    return graph, load_inputs([data], graph, artifact, read=lambda _: texts)


def read(path: Path) -> list[LabeledRow]:
    lines = [line.split("\t") for line in path.read_text().splitlines()[1:]]
    return [
        LabeledRow(number, (first, second), float(score))
        for number, (score, first, second) in enumerate(lines, start=2)
    ]


def test_rows_to_fit_have_no_text_that_is_held_out(tiny: Path, pairs: Path):
    rows = read(pairs)
    graph, data = load(tiny, pairs, rows)
    labels = Labels("sts", rows, data, graph, open_artifact(tiny))
    fit, choose, verify = (
        {content for one in part for content in row_contents(one.batch)}
        for part in (labels.fit, labels.choose, labels.verify)
    )
    unseen = {content for batch in data.to_verify for content in row_contents(batch)}
    watched = {content for batch in data.choose for content in row_contents(batch)}
    assert not fit & (unseen | watched)
    assert not choose & unseen
    assert unseen <= verify
    parts = (labels.fit, labels.choose, labels.verify)
    assert sum(len(one.labels) for part in parts for one in part) == len(rows)
    # Each score is with its own pair.
    encoder, wanted = load_encoder(open_artifact(tiny)), wanted_inputs(graph)

    def content(text: str) -> bytes:
        return next(row_contents(encoder.batch_inputs(encoder.encode([text]), wanted)))

    known = {tuple(map(content, row.texts)): row.label for row in rows}
    for one in labels.fit:
        texts = [*row_contents(one.batch)]
        count = len(one.labels)
        pairs_of_texts = zip(texts[:count], texts[count:], strict=True)
        assert [known[pair] for pair in pairs_of_texts] == one.labels.tolist()


@pytest.mark.parametrize("pooling", ["mean", "cls", "last"])
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("dimensions", [None, 3])
def test_served_vectors_equal_those_of_the_service(
    pooling: Pooling, side: str, dimensions: int | None
):
    random_ = np.random.default_rng(0)
    hidden = random_.standard_normal((4, 6, 8)).astype(np.float32)
    mask = (np.arange(6) < np.array([1, 3, 6, 4])[:, None]).astype(np.int64)
    mask = mask if side == "right" else mask[:, ::-1].copy()
    batch = {"attention_mask": mask}
    found = served_vectors(torch.from_numpy(hidden), batch, pooling, dimensions)
    expected = pool(hidden, mask, pooling, True, dimensions)
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-6)


def test_perfect_predictions_have_no_loss_and_constant_ones_a_loss_of_one():
    gold = np.array([0.0, 1.0, 2.0, 5.0])

    def loss(predictions: torch.Tensor, labels: np.ndarray) -> float:
        return float(task_loss("sts", predictions, labels, 1.0))

    assert loss(torch.from_numpy(3 * gold - 1), gold) == pytest.approx(0, abs=1e-6)
    assert loss(torch.ones(4), gold) == pytest.approx(1)
    # Scores have any unit.
    other = torch.tensor([0.1, 0.5, 0.2, 0.9])
    losses = [loss(other, unit * gold) for unit in (1e-7, 1.0, 1e30)]
    np.testing.assert_allclose(losses, losses[1], rtol=1e-5)
    shares = np.array([0.25, 0.75])
    entropy = float(-(shares * np.log(shares)).sum())
    constant = torch.from_numpy(np.log(shares)).float().expand(4, 2)
    classes = task_loss("classification", constant, np.array([0, 1, 1, 1]), entropy)
    assert float(classes) == pytest.approx(1)


COLUMNS = "score\tsentence1\tsentence2"


@pytest.mark.parametrize(
    ("lines", "task", "code"),
    [
        (None, "sts", "recovery.no_table"),
        ([COLUMNS, *["1.0\ta dog\ta cat"] * 9], "sts", "recovery.few_labels"),
        (["score\tsentence1", "1.0\ta dog"], "sts", "evaluate.no_column"),
        ([COLUMNS, "high\ta\tb"], "sts", "evaluate.score_not_number"),
        ([COLUMNS], "sts", "evaluate.no_rows"),
        ([COLUMNS, *(f"1.0\tdog {n}\tcat {n}" for n in range(600))], "sts",
         "recovery.constant_labels"),
        (["label\ttext", *(f"{n % 2}\t{' '.join(WORDS[: 1 + n % 9])} {n}" for n in range(90))],
         "classification", "recovery.task_output"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_labels_that_cannot_be_used_are_refused(
    pruned: Path, tiny: Path, sentences: Path, tmp_path: Path, lines: list[str] | None, task: str,
    code: str,
):  # fmt: skip
    data = sentences
    if lines is not None:
        data = tmp_path / "table.tsv"
        data.write_text("\n".join(lines) + "\n", encoding="utf-8")
    with pytest.raises(AttnserveError) as caught:
        attnserve.recover(pruned, tmp_path / "out", teacher=tiny, data=data, minutes=0, task=task)
    assert caught.value.code == code
    assert not (tmp_path / "out").exists()


def test_task_without_labels_to_learn_is_refused(
    pruned: Path, tiny: Path, pairs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(AttnserveError) as caught:
        attnserve.recover(pruned, tmp_path / "out", teacher=tiny, data=pairs, task="retrieval")
    assert caught.value.code == "recovery.range"
    command = ["recover", pruned, "--teacher", tiny, "--data", pairs, "--task", "rerank"]
    assert main([str(part) for part in (*command, "-o", tmp_path / "out")]) == 2
    assert "sts" in capsys.readouterr().err
