"""Task scores of retrieval, reranking, language models, labeled words and images."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from attnserve import evaluate
from attnserve.checks.evaluate import score_session
from attnserve.checks.scores import PerplexityScore, RatioScore, StsScore
from attnserve.checks.tasks import entities_of
from attnserve.models.artifact import open_artifact
from attnserve.runtime.interface import Session
from attnserve.runtime.session import open_session
from graph_passes.errors import InvalidArgument, InvalidData
from tests.attnserve.checks.word_models import vectors_of, write_artifact
from tests.errors import raises
from tests.files import write_lines
from tests.word_tokenizer import word_tokenizer

WORDS = ["[PAD]", "[SEP]", "east", "north", "northeast", "west", "ask"]
VECTORS = np.array([(9, 9), (0, 0), (1, 0), (0, 1), (1, 1), (-1, 0), (0, 9)], np.float32)

TOKENS = vectors_of(2)

# The score of a pair is the number of words of its document that are "east".
PAIRS = """<ir_version: 10, opset_import: ["" : 18]>
pairs (int64[batch, sequence] input_ids, int64[batch, sequence] token_type_ids,
       int64[batch, sequence] attention_mask)
=> (float[batch, 1] logits) <int64 east = {2}, int64[1] axis = {1}>
{
    same = Equal(input_ids, east)
    ones = Cast<to = 7>(same)
    counted = Mul(ones, token_type_ids)
    sums = ReduceSum(counted, axis)
    logits = Cast<to = 1>(sums)
}"""

# The logits of a token are the rows of a table.
TABLE = """<ir_version: 10, opset_import: ["" : 18]>
tokens (int64[batch, sequence] input_ids, int64[batch, sequence] attention_mask)
=> (float[batch, sequence, width] logits) { logits = Gather(table, input_ids) }"""

PIXELS = """<ir_version: 10, opset_import: ["" : 18]>
pixels (float[batch, 2, 2] image) => (float[batch, 2] logits) <int64[1] axis = {2}>
{ logits = ReduceSum<keepdims = 0>(image, axis) }"""


def artifact(folder: Path, text: str, table: np.ndarray = VECTORS, **record: Any) -> Path:
    templates = {"single": "$A", "pair": "$A [SEP] $B:1"} if text is PAIRS else {}
    tokenizer = word_tokenizer(WORDS, unknown="[PAD]", **templates)
    return write_artifact(folder, text, table, tokenizer, record)


def lines(path: Path, *rows: str) -> Path:
    return write_lines(path, rows)


# --- retrieval ----------------------------------------------------------------------------------

QUERIES = "id\ttext", "q1\teast", "q2\tnorth", "q3\twest"
DOCUMENTS = "id\ttext", "a\teast", "b\tnorth", "c\tnortheast", "d\twest"
QRELS = "query\tdocument\trelevance", "q1\tc\t1", "q1\td\t0", "q2\tb\t2", "q2\td\t1", "q3\ta\t0"


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    lines(tmp_path / "data" / "queries.tsv", *QUERIES)
    lines(tmp_path / "data" / "documents.tsv", *DOCUMENTS)
    lines(tmp_path / "data" / "qrels.tsv", *QRELS)
    return tmp_path / "data"


def test_evaluate_retrieval_by_hand(corpus: Path, tmp_path: Path) -> None:
    # q1 ranks a, c, b, d: c is second. q2 ranks b, c, a, d: relevance 2, 0, 0, 1. q3 has no
    # relevant document.
    score = evaluate(artifact(tmp_path, TOKENS), task="retrieval", data=corpus)
    first = 1 / np.log2(3)
    second = (2 + 1 / np.log2(5)) / (2 + 1 / np.log2(3))
    assert isinstance(score, RatioScore)
    np.testing.assert_allclose(score.gains, [first, second], atol=1e-12)
    content = json.loads(json.dumps(score.to_json(), allow_nan=False))
    assert list(content) == ["task", "rows", "ndcg_at_10", "ndcg_at_10_ci95", "recall_at_100"]
    assert content["ndcg_at_10"] == pytest.approx((first + second) / 2)
    assert (content["task"], content["rows"], content["recall_at_100"]) == ("retrieval", 2, 1)


def test_retrieval_in_an_index_of_another_model(corpus: Path, tmp_path: Path) -> None:
    """The new model turns all vectors: it finds its own documents, and not those of the index."""
    (tmp_path / "old").mkdir()
    (tmp_path / "new").mkdir()
    turned = VECTORS @ np.array([(0, 1), (-1, 0)], np.float32)
    folders = artifact(tmp_path / "old", TOKENS), artifact(tmp_path / "new", TOKENS, turned)
    old, new = (open_session(open_artifact(folder).model) for folder in folders)

    def score(session: Session, index: Session | None) -> float:
        found = score_session(
            session, open_artifact(folders[0]), task="retrieval", data=corpus, index=index
        )
        return found.value

    assert score(new, None) == score(old, None) == score(old, old)
    # The query east asks for north: b, c, a, d. The query north asks for west: d, b, c, a.
    first, second = 1 / np.log2(3), (1 + 2 / np.log2(3)) / (2 + 1 / np.log2(3))
    assert score(new, old) == pytest.approx((first + second) / 2)


def test_evaluate_retrieval_reads_beir_and_uses_prompts(corpus: Path, tmp_path: Path) -> None:
    for name in ("queries.tsv", "documents.tsv", "qrels.tsv"):
        (corpus / name).unlink()
    lines(corpus / "queries.jsonl", '{"_id": "q1", "text": "east"}', "")
    lines(
        corpus / "corpus.jsonl",
        '{"_id": "a", "title": "west", "text": "west"}',
        '{"_id": "b", "text": "north"}',
    )
    lines(corpus / "qrels" / "test.tsv", "query-id\tcorpus-id\tscore", "q1\tb\t1")
    plain = evaluate(artifact(tmp_path, TOKENS), task="retrieval", data=corpus)
    assert plain.value == 1
    folder = artifact(tmp_path, TOKENS, prompts={"query": "west west "}, similarity="dot")
    assert evaluate(folder, task="retrieval", data=corpus).value == pytest.approx(1 / np.log2(3))
    folder = artifact(
        tmp_path, TOKENS, prompts={"x": "west west "}, default_prompt="x", similarity="dot"
    )
    assert evaluate(folder, task="retrieval", data=corpus).value == 1  # as encode_query


@pytest.mark.parametrize(
    ("name", "rows", "code", "value"),
    [
        ("queries.tsv", ("id\ttext", "q1\ta", "q1\tb"), "repeated_id", "line 3: the id 'q1'"),
        ("queries.tsv", ("name\ttext",), "no_column", "line 1: no column id"),
        ("qrels.tsv", (QRELS[0], "q9\ta\t1"), "unknown_id", "line 2: unknown query 'q9'"),
        ("qrels.tsv", (QRELS[0], "q1\tz\t1"), "unknown_id", "line 2: unknown document 'z'"),
        ("qrels.tsv", (QRELS[0], "q1\ta\tyes"), "score_not_number", "relevance 'yes'"),
        ("qrels.tsv", (QRELS[0], "q1\ta\t0"), "no_relevant", "qrels.tsv"),
        ("documents.tsv", None, "no_file", "documents.tsv or corpus.jsonl"),
        ("qrels.tsv", None, "no_file", "qrels.tsv or qrels/test.tsv"),
    ],
)
def test_evaluate_broken_retrieval_file_is_refused(
    name: str, rows: tuple[str, ...] | None, code: str, value: str, corpus: Path, tmp_path: Path
) -> None:
    (corpus / name).unlink() if rows is None else lines(corpus / name, *rows)
    with raises(InvalidData, f"evaluate.{code}", value) as caught:
        evaluate(artifact(tmp_path, TOKENS), task="retrieval", data=corpus)
    assert len(str(caught.value).splitlines()) <= 3


@pytest.mark.parametrize("line", ["{", "[]", '{"_id": 1, "text": "a"}', '{"text": "a"}', "1"])
def test_evaluate_broken_json_line_is_refused(line: str, corpus: Path, tmp_path: Path) -> None:
    (corpus / "queries.tsv").unlink()
    lines(corpus / "queries.jsonl", '{"_id": "q1", "text": "east"}', line)
    with raises(InvalidData, "evaluate.json_line", "line 2"):
        evaluate(artifact(tmp_path, TOKENS), task="retrieval", data=corpus)


TWO_HEADS = """<ir_version: 10, opset_import: ["" : 18]>
heads (int64[batch, sequence] input_ids, int64[batch, sequence] attention_mask)
=> (float[batch, sequence, 2] last_hidden_state, float[batch, 2] sentence_embedding)
<int64 zero = {0}>
{
    last_hidden_state = Gather(table, input_ids)
    first = Gather<axis = 1>(last_hidden_state, zero)
    sentence_embedding = Neg(first)
}"""


def test_evaluate_uses_the_output_of_the_artifact(tmp_path: Path) -> None:
    data = lines(
        tmp_path / "data.tsv", "score\tsentence1\tsentence2",
        "5\teast west\teast", "1\tnorth\teast", "0\teast\twest",
    )  # fmt: skip
    folder = artifact(tmp_path, TWO_HEADS, output="sentence_embedding", pooling="none")
    score = evaluate(folder, task="sts", data=data)
    assert isinstance(score, StsScore)
    np.testing.assert_allclose(score.cosines, [1, 0, -1], atol=1e-6)
    folder = artifact(tmp_path, TWO_HEADS, output="pooled")
    with raises(InvalidArgument, "text.output", "last_hidden_state, sentence_embedding"):
        evaluate(folder, task="sts", data=data)


# --- rerank -------------------------------------------------------------------------------------


def test_evaluate_rerank_by_hand(tmp_path: Path) -> None:
    data = lines(
        tmp_path / "data.tsv", "query\tdocument\trelevance",
        "one\teast\t0", "one\teast east\t1", "one\tnorth\t0",  # best first
        "east\teast\t0", "east\tnorth\t1",  # best second: the query does not count
        "two\teast\t0",  # no relevant document
    )  # fmt: skip
    score = evaluate(artifact(tmp_path, PAIRS), task="rerank", data=data).to_json()
    assert (score["task"], score["rows"]) == ("rerank", 2)
    assert score["ndcg_at_10"] == pytest.approx((1 + 1 / np.log2(3)) / 2)
    assert score["mrr_at_10"] == pytest.approx(0.75)


def test_evaluate_rerank_of_embeddings_is_refused(tmp_path: Path) -> None:
    data = lines(tmp_path / "data.tsv", "query\ttext\tlabel", "east\teast\t1")
    with raises(InvalidArgument, "evaluate.no_logits", "[batch, 1]"):
        evaluate(artifact(tmp_path, TOKENS), task="rerank", data=data)
    lines(data, "query\ttext\tlabel", "east\teast\t0")
    with raises(InvalidData, "evaluate.no_relevant"):
        evaluate(artifact(tmp_path, PAIRS), task="rerank", data=data)


# --- perplexity ---------------------------------------------------------------------------------

LOGITS = np.random.default_rng(0).standard_normal((7, 7)).astype(np.float32)


def nats(*ids: int) -> float:
    rows = LOGITS[list(ids[:-1])].astype(np.float64)
    logs = rows - np.log(np.exp(rows).sum(1, keepdims=True))
    return -float(logs[np.arange(len(ids) - 1), list(ids[1:])].sum())


@pytest.mark.parametrize("form", ["txt", "npz"])
def test_evaluate_perplexity_by_hand(form: str, tmp_path: Path) -> None:
    if form == "txt":
        data = lines(tmp_path / "data.txt", "east north west", "", "ask", "west east")
        total, tokens, rows = nats(2, 3, 5) + nats(5, 2), 3, 3
    else:
        data = tmp_path / "data.npz"
        ids = np.array([[2, 3, 5], [5, 2, 0]])
        np.savez(data, input_ids=ids, attention_mask=(ids > 0).astype(np.int64))
        total, tokens, rows = nats(2, 3, 5) + nats(5, 2), 3, 2
    score = evaluate(artifact(tmp_path, TABLE, LOGITS), task="perplexity", data=data)
    assert isinstance(score, PerplexityScore)
    content = score.to_json()
    assert content["perplexity"] == pytest.approx(np.exp(total / tokens), rel=1e-6)
    assert (content["rows"], content["tokens"]) == (rows, tokens)
    low, high = content["perplexity_ci95"]
    assert low <= content["perplexity"] <= high
    assert score.value == pytest.approx(1 / content["perplexity"])


def test_evaluate_perplexity_of_other_models_or_single_tokens_is_refused(tmp_path: Path) -> None:
    data = lines(tmp_path / "data.txt", "east north")
    with raises(InvalidArgument, "evaluate.no_logits", "[1, 2, 2]"):
        evaluate(artifact(tmp_path, TOKENS), task="perplexity", data=data)
    with raises(InvalidData, "evaluate.no_tokens"):
        lines(data, "east")
        evaluate(artifact(tmp_path, TABLE, LOGITS), task="perplexity", data=data)


# --- token classification -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        ("O B-A I-A O B-A B-A", {(1, 3, "A"), (4, 5, "A"), (5, 6, "A")}),
        ("I-A I-A I-B O I-A", {(0, 2, "A"), (2, 3, "B"), (4, 5, "A")}),
        ("B-A I-B", {(0, 1, "A"), (1, 2, "B")}),
        ("verb noun O noun", {(0, 1, "verb"), (1, 2, "noun"), (3, 4, "noun")}),
        ("O", set()),
    ],
)
def test_entities_of_labels(labels: str, expected: set[Any]) -> None:
    assert entities_of(labels.split()) == expected


TAGS = {"0": "O", "1": "B-DIR", "2": "I-DIR"}


def tagger(folder: Path, **record: Any) -> Path:
    """A model that labels east and west as B-DIR, north as I-DIR and other words as O."""
    (folder / "config.json").write_text(json.dumps({"id2label": TAGS}), encoding="utf-8")
    classes = [0, 0, 1, 2, 0, 1, 0]
    return artifact(folder, TABLE, np.eye(3, dtype=np.float32)[classes], **record)


@pytest.mark.parametrize("padding", ["right", "left"])
def test_evaluate_token_classification_by_hand(padding: str, tmp_path: Path) -> None:
    data = lines(
        tmp_path / "data.txt", "-DOCSTART- O", "", "east B-DIR", "north\tI-DIR", "ask O", "",
        "ask X O", "west X O", "northeast X B-DIR", "ask O",
    )  # fmt: skip
    score = evaluate(tagger(tmp_path, padding=padding), task="token-classification", data=data)
    content = score.to_json()  # one entity is right; one is wrong and one is missed
    assert (content["rows"], content["f1"]) == (2, 0.5)
    assert (content["precision"], content["recall"]) == (0.5, 0.5)
    cut = evaluate(tagger(tmp_path), task="token-classification", data=data, max_length=1)
    assert cut.to_json()["f1"] == 0  # truncated words are labeled O: the entity is too short


@pytest.mark.parametrize(
    ("rows", "code", "value"),
    [
        (["east B-DIR", "north"], "no_label", "line 2: expected a word and its label"),
        (["", "ask O", "east B-LOC"], "unknown_label", "line 2: label 'B-LOC'"),
        (["ask O"], "no_entities", ""),
        (["", "-DOCSTART- O"], "no_rows", ""),
    ],
)
def test_evaluate_broken_words_file_is_refused(
    rows: list[str], code: str, value: str, tmp_path: Path
) -> None:
    with raises(InvalidData, f"evaluate.{code}", value):
        data = lines(tmp_path / "data.txt", *rows)
        evaluate(tagger(tmp_path), task="token-classification", data=data)


# --- image classification -----------------------------------------------------------------------


def test_evaluate_image_classification_by_hand(tmp_path: Path) -> None:
    images = np.zeros((3, 2, 2), np.float32)
    images[[0, 1, 2], [0, 1, 1]] = 1
    np.savez(tmp_path / "data.npz", image=images, label=np.array([0, 1, 0]))
    folder = artifact(tmp_path, PIXELS)
    score = evaluate(folder, task="image-classification", data=tmp_path / "data.npz", batch_size=2)
    assert isinstance(score, RatioScore)
    assert score.gains.tolist() == [1, 1, 0]
    content = score.to_json()
    assert (content["task"], content["accuracy"]) == ("image-classification", pytest.approx(2 / 3))
    np.savez(tmp_path / "data.npz", image=images, label=np.array([0, 1, 2]))
    with raises(InvalidData, "evaluate.label_range", "line 3: label '2'"):
        evaluate(folder, task="image-classification", data=tmp_path / "data.npz")
    np.savez(tmp_path / "data.npz", image=images)
    with raises(InvalidData, "data.array_names", "label"):
        evaluate(folder, task="image-classification", data=tmp_path / "data.npz")


def test_evaluate_image_classification_of_two_sizes(tmp_path: Path) -> None:
    folder, data = artifact(tmp_path, PIXELS.replace("2, 2]", "2, width]")), tmp_path / "data"
    data.mkdir()
    for file, (width, label) in enumerate([(2, 0), (3, 1), (2, 1)]):
        images = np.zeros((2, 2, width), np.float32)
        images[:, label] = 1
        np.savez(data / f"{file}.npz", image=images, label=np.array([label, label]))
    score = evaluate(folder, task="image-classification", data=data, batch_size=3)
    assert isinstance(score, RatioScore)
    assert score.gains.tolist() == [1] * 6


# --- models that others trained -----------------------------------------------------------------


def test_evaluate_stories_language_model(shared: Path, tmp_path: Path) -> None:
    """Random tokens are less likely than by a uniform guess: the model expects stories."""
    model = shared / "models" / "stories260K" / "stories260K.onnx"
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "data.npz", idx=rng.integers(3, 512, (2, 256)))
    score = evaluate(model, task="perplexity", data=tmp_path / "data.npz", threads=1)
    assert score.to_json()["tokens"] == 2 * 255
    assert score.to_json()["perplexity"] > 512
