"""Scores of MTEB on data on disk, in its own layout, and their place in the model card."""

from __future__ import annotations

import json
import shutil
import sys
import warnings
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest

import attnserve
from attnserve.models.model_card import CARD, MARK, TaskScore, with_scores
from graph_passes.errors import InvalidArgument, InvalidData, InvalidOutput, MissingExtra
from tests.attnserve.cli.commands import Cli, refused
from tests.attnserve.cli.conftest import cli
from tests.errors import raises
from tests.files import write_json

__all__ = ["cli"]

WORDS = ["a", "man", "dog", "is", "playing", "the", "guitar", "very", "happy", "house"]
STS, RETRIEVAL = "BIOSSES", "NFCorpus"

CONFIGS = """---
configs:
- config_name: default
  data_files: [{split: test, path: qrels.jsonl}]
- config_name: corpus
  data_files: [{split: corpus, path: corpus.jsonl}]
- config_name: queries
  data_files: [{split: queries, path: queries.jsonl}]
---
"""

# ---- without mteb -------------------------------------------------------------------------------

CARD_TEXT = (
    "---\ntags: [x]\n---\n\n# m\n\n## Changes\n\nNone\n\n## Quality\n\nGood\n\n## Load\n\nSo\n"
)


def score(task: str, value: float, **fields: Any) -> TaskScore:
    return TaskScore(
        **{"task": task, "metric": "ndcg_at_10", "value": value, "splits": ("test",),
           "revision": "0123", "mteb": "2.0", **fields}
    )  # fmt: skip


def test_scores_follow_the_quality_and_replace_earlier_ones() -> None:
    first = with_scores(CARD_TEXT, [score("A", 0.5)])
    headings = [line for line in first.split("\n") if line.startswith("## ")]
    assert headings == ["## Changes", "## Quality", "## MTEB", "## Load"]
    second = with_scores(first, [score("A", 0.25), score("B|C", 1.0)])
    assert second.count("## MTEB") == 1 and "0.5000" not in second
    assert "| A | ndcg\\_at\\_10 | 0.2500 | test |" in second and "B\\|C" in second
    assert (
        second.replace(second[second.index("## MTEB") : second.index("## Load")], "") == CARD_TEXT
    )


def test_without_mteb_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, tiny: Path) -> None:
    monkeypatch.setitem(sys.modules, "mteb", None)
    with raises(MissingExtra, "extra.mteb", "attnserve[mteb]"):
        attnserve.evaluate_mteb(tiny, STS)


def test_options_belong_to_a_task_or_to_mteb(cli: Cli, tiny: Path, tmp_path: Path) -> None:
    data = ("--data", tmp_path)
    refused(cli("evaluate", tiny), "--task with --data, or --mteb")
    refused(cli("evaluate", tiny, "--task", "sts"), "--data")
    refused(cli("evaluate", tiny, "--task", "sts", "--mteb", STS, *data), "--mteb")
    refused(cli("evaluate", tiny, "--mteb", STS, "--pooling", "cls"), "--pooling has no effect")
    refused(cli("evaluate", tiny, "--task", "sts", *data, "-o", tmp_path), "--output")


class OwnLibrary:
    """A package with the interface of mteb, of which the task B is interrupted."""

    __version__ = "1"

    def get_task(self, name: str) -> Any:
        metadata = SimpleNamespace(name=name, dataset={"path": name}, main_score="s")
        return SimpleNamespace(metadata=metadata, load_data=lambda: None)

    def evaluate(self, encoder: object, task: Any, **_: Any) -> Any:
        if task.metadata.name == "B":
            raise KeyboardInterrupt
        result = SimpleNamespace(
            task_name=task.metadata.name, scores={"test": []}, get_score=lambda: 0.5,
            dataset_revision="0", mteb_version="1", to_disk=lambda path: path.write_text("{}"),
        )  # fmt: skip
        return SimpleNamespace(task_results=[result])


@pytest.fixture
def own_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mteb", OwnLibrary())  # type: ignore[arg-type]
    monkeypatch.setattr("attnserve.integrations.mteb.load", lambda *_, **__: None)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A folder with a graph and a card."""
    text = '<ir_version: 10, opset_import: ["" : 18]> g (float[b] x) => (float[b] y) { y = Exp(x) }'
    onnx.save(onnx.parser.parse_model(text), tmp_path / "model.onnx")
    (tmp_path / CARD).write_text(f"{MARK}\n\n## Load\n")
    return tmp_path


@pytest.mark.usefixtures("own_library")
def test_results_stay_if_a_later_task_is_interrupted(small: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        attnserve.evaluate_mteb(small, ["A", "B", "C"])
    assert [path.name for path in small.glob("mteb/*/*")] == ["A.json"]
    assert "| A | s | 0.5000 | test |" in (small / CARD).read_text()


@pytest.mark.usefixtures("own_library")
@pytest.mark.parametrize(
    ("file", "content"),
    [("attnserve.json", {"prompts": {"query": "q: "}}), ("tokenizer_config.json", {"a": 1})],
)
def test_results_of_other_settings_are_not_in_the_card(
    small: Path, file: str, content: dict[str, Any]
) -> None:
    attnserve.evaluate_mteb(small, "A")
    write_json(small / file, content)
    attnserve.evaluate_mteb(small, "C")
    text = (small / CARD).read_text()
    assert "| C |" in text and "| A |" not in text


@pytest.mark.usefixtures("own_library")
def test_results_do_not_depend_on_the_origin_of_the_model(small: Path) -> None:
    attnserve.evaluate_mteb(small, "A")
    write_json(small / "attnserve.json", {"source": "a/b", "lineage": [{"rewrite": "fuse"}]})
    with raises(InvalidOutput, "output.exists", "A.json"):
        attnserve.evaluate_mteb(small, "A")


# ---- with mteb ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def library() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("mteb", reason="pip install 'attnserve[mteb]'")


@pytest.fixture
def with_mteb(library: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    return library


pytestmark = pytest.mark.filterwarnings("default")  # mteb and datasets have warnings of their own


@pytest.fixture
def card_model(model: Path) -> Path:
    """A model in a folder of its own, with a card."""
    attnserve.optimize(model, model.parent / "new", collab_dk=32, threads=1)
    return model.parent / "new"


def jsonl(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def sentences(random: np.random.Generator, count: int) -> list[str]:
    """Different sentences: those of equal scores are sorted differently."""
    found: dict[str, None] = {}
    while len(found) < count:
        found[" ".join(random.choice(WORDS, random.integers(3, 9)))] = None
    return list(found)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Data sets of two tasks in the layout of the hub, and the same in that of ``evaluate``."""
    random = np.random.default_rng(0)
    data = tmp_path / "data"
    first, second = sentences(random, 60), sentences(random, 60)
    scores = random.integers(0, 5, 60).tolist()
    rows = list(zip(scores, first, second, strict=True))
    jsonl(
        data / "mteb" / "biosses-sts" / "test.jsonl",
        ({"score": float(a), "sentence1": b, "sentence2": c} for a, b, c in rows),
    )
    table = ["score\tsentence1\tsentence2", *("\t".join(map(str, row)) for row in rows)]
    (tmp_path / "sts.tsv").write_text("\n".join(table))

    queries, documents = sentences(random, 20), sentences(random, 150)
    qrels = [(q, int(d)) for q in range(20) for d in random.choice(150, 3, replace=False)]
    nfcorpus = data / "nfcorpus"  # without the owner
    jsonl(nfcorpus / "queries.jsonl", ({"_id": f"q{i}", "text": t} for i, t in enumerate(queries)))
    jsonl(
        nfcorpus / "corpus.jsonl",
        ({"_id": f"d{i}", "title": "", "text": t} for i, t in enumerate(documents)),
    )
    jsonl(
        nfcorpus / "qrels.jsonl",
        ({"query-id": f"q{q}", "corpus-id": f"d{d}", "score": 1 + d % 2} for q, d in qrels),
    )
    (nfcorpus / "README.md").write_text(CONFIGS)
    beir = tmp_path / "beir"
    (beir / "qrels").mkdir(parents=True)
    for name in ("queries.jsonl", "corpus.jsonl"):
        shutil.copy(nfcorpus / name, beir)
    lines = ["query-id\tcorpus-id\tscore", *(f"q{q}\td{d}\t{1 + d % 2}" for q, d in qrels)]
    (beir / "qrels" / "test.tsv").write_text("\n".join(lines))
    return data


@pytest.mark.export
@pytest.mark.usefixtures("with_mteb")
def test_scores_are_those_of_evaluate(card_model: Path, data: Path, tmp_path: Path) -> None:
    report = attnserve.evaluate_mteb(card_model, [STS, RETRIEVAL], data=data)
    sts, retrieval = report.scores
    expected = attnserve.evaluate(card_model, task="sts", data=tmp_path / "sts.tsv")
    assert (sts.metric, sts.value) == ("cosine_spearman", pytest.approx(expected.value, abs=1e-4))
    expected = attnserve.evaluate(card_model, task="retrieval", data=tmp_path / "beir")
    assert retrieval.metric == "ndcg_at_10"
    assert retrieval.value == pytest.approx(expected.value, abs=1e-4)
    content = json.loads(report.files[1].read_text())
    assert content["task_name"] == RETRIEVAL and content["scores"]["test"][0]["hf_subset"]
    assert content["dataset_revision"].startswith("sha256:")
    assert report.card == card_model / CARD
    text = report.card.read_text(encoding="utf-8")
    assert f"| {RETRIEVAL} |" in text and f"{sts.value:.4f}" in text


@pytest.mark.export
@pytest.mark.usefixtures("with_mteb")
def test_results_of_the_same_model_join_in_the_card(card_model: Path, data: Path) -> None:
    attnserve.evaluate_mteb(card_model, STS, data=data)
    with raises(InvalidOutput, "output.exists", f"{STS}.json"):
        attnserve.evaluate_mteb(card_model, STS, data=data)
    attnserve.evaluate_mteb(card_model, STS, data=data, force=True)
    report = attnserve.evaluate_mteb(card_model, RETRIEVAL, data=data)
    text = (card_model / CARD).read_text(encoding="utf-8")
    assert f"| {STS} |" in text and f"| {RETRIEVAL} |" in text
    # Another model in the folder has another revision: its card has its own scores only.
    attnserve.optimize(card_model.parent / "model", card_model, collab_dk=16, threads=1, force=True)
    other = attnserve.evaluate_mteb(card_model, RETRIEVAL, data=data)
    assert other.files[0].parent != report.files[0].parent
    assert f"| {STS} |" not in (card_model / CARD).read_text(encoding="utf-8")
    (other.files[0].parent / "broken.json").write_text("{}")
    with raises(InvalidData, "mteb.result", "broken.json"):
        attnserve.evaluate_mteb(card_model, STS, data=data)


@pytest.mark.export
@pytest.mark.usefixtures("with_mteb")
def test_output_elsewhere_leaves_the_model_unchanged(
    cli: Cli, card_model: Path, data: Path, tmp_path: Path
) -> None:
    before = {path: path.stat().st_mtime_ns for path in card_model.rglob("*")}
    content = cli(
        "evaluate", card_model, "--mteb", STS, "--data", data, "-o", tmp_path / "out", "--json"
    ).json()
    (result,) = content["results"]
    assert (result["task"], content["card"]) == (STS, None)
    assert Path(result["file"]) == tmp_path / "out" / f"{STS}.json"
    assert {path: path.stat().st_mtime_ns for path in card_model.rglob("*")} == before
    done = cli("evaluate", card_model, "--mteb", STS, "--data", data, "-o", tmp_path / "other")
    assert done.code == 0 and done.out.startswith(f"task {STS}, metric cosine_spearman, value ")


@pytest.mark.export
@pytest.mark.usefixtures("with_mteb")
def test_a_card_of_the_user_is_kept(card_model: Path, data: Path) -> None:
    (card_model / CARD).write_text("mine")
    assert attnserve.evaluate_mteb(card_model, STS, data=data).card is None
    assert (card_model / CARD).read_text() == "mine"


@pytest.mark.export
@pytest.mark.usefixtures("with_mteb")
def test_tasks_and_data_that_do_not_fit_are_refused(
    card_model: Path, data: Path, tmp_path: Path
) -> None:
    with raises(InvalidArgument, "mteb.unknown_task", "'BIOSSE'", "BIOSSES"):
        attnserve.evaluate_mteb(card_model, "BIOSSE", data=data)
    with raises(InvalidData, "mteb.no_folder", "mteb/scifact", "hf download"):
        attnserve.evaluate_mteb(card_model, "SciFact", data=data)
    with raises(InvalidData, "mteb.data", "SciFact", "hf download"):  # there is no network
        attnserve.evaluate_mteb(card_model, "SciFact")
    jsonl(data / "mteb" / "biosses-sts" / "test.jsonl", [{"other": 1}])
    with raises(InvalidData, "mteb.failed", STS):
        attnserve.evaluate_mteb(card_model, STS, data=data)
    (data / "mteb" / "biosses-sts" / "test.jsonl").write_text("{")
    with raises(InvalidData, "mteb.data", STS):
        attnserve.evaluate_mteb(card_model, STS, data=data)
    assert not (card_model / "mteb").exists()
