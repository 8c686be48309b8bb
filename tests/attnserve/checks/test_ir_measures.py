"""nDCG, MRR and recall of ``evaluate`` are those of trec_eval, which ir-measures runs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from attnserve import evaluate
from tests.attnserve.checks.word_models import vectors_of, write_artifact
from tests.files import write_lines
from tests.word_tokenizer import word_tokenizer

ir_measures = pytest.importorskip("ir_measures", reason="pip install ir-measures")

QUERIES, DOCUMENTS = 40, 300

# The score of a pair is the dot product of both vectors.
PAIRS = """<ir_version: 10, opset_import: ["" : 18]>
pairs (int64[batch, sequence] input_ids, int64[batch, sequence] attention_mask)
=> (float[batch, 1] logits) <int64[1] axis = {1}>
{
    vectors = Gather(table, input_ids)
    products = ReduceProd<keepdims = 0>(vectors, axis)
    logits = ReduceSum(products, axis)
}"""

Grades = Mapping[str, Mapping[str, int]]


@pytest.fixture(params=range(3))
def random(request: pytest.FixtureRequest) -> np.random.Generator:
    return np.random.default_rng(request.param)


def artifact(folder: Path, text: str, table: np.ndarray) -> Path:
    """A model whose texts are single words, w0 to the number of rows of the table."""
    words = [f"w{index}" for index in range(len(table))]
    tokenizer = word_tokenizer(words, single="$A", pair="$A $B", unknown="w0")
    return write_artifact(folder, text, table, tokenizer, {"similarity": "dot"})


def means(grades: Grades, similarities: np.ndarray, *measures: object) -> dict[str, float]:
    """The means of ir-measures; all documents of a query are ranked by their similarity."""
    scores = {
        f"w{query}": {f"w{QUERIES + document}": float(value) for document, value in enumerate(row)}
        for query, row in enumerate(similarities)
    }
    judged = {query: scores[query] for query in grades}
    return {str(k): v for k, v in ir_measures.calc_aggregate(measures, grades, judged).items()}


def graded(random: np.random.Generator, count: int) -> Grades:
    """Grades of ``count`` documents of each query, of which some are above 0."""
    grades: dict[str, dict[str, int]] = {}
    for query in range(QUERIES):
        documents = random.choice(DOCUMENTS, count, replace=False)
        values = [1, *random.integers(0, 4, count - 1).tolist()]
        grades[f"w{query}"] = {f"w{QUERIES + d}": v for d, v in zip(documents, values, strict=True)}
    return grades


def write_grades(path: Path, grades: Grades) -> Path:
    rows = [
        f"{query}\t{key}\t{v}" for query, of_query in grades.items() for key, v in of_query.items()
    ]
    return write_lines(path, ["query\tdocument\trelevance", *rows])


def test_retrieval_gives_the_numbers_of_trec_eval(
    random: np.random.Generator, tmp_path: Path
) -> None:
    table = random.standard_normal((QUERIES + DOCUMENTS, 8)).astype(np.float32)
    grades = graded(random, 30)
    data = tmp_path / "data"
    for name, start, end in (("queries", 0, QUERIES), ("documents", QUERIES, len(table))):
        rows = [f"w{index}\tw{index}" for index in range(start, end)]
        write_lines(data / f"{name}.tsv", ["id\ttext", *rows])
    write_grades(data / "qrels.tsv", grades)
    model = artifact(tmp_path, vectors_of(8), table)
    found = evaluate(model, task="retrieval", data=data).to_json()
    expected = means(
        grades, table[:QUERIES] @ table[QUERIES:].T, ir_measures.nDCG @ 10, ir_measures.R @ 100
    )
    assert found["ndcg_at_10"] == pytest.approx(expected["nDCG@10"], abs=1e-12)
    assert found["recall_at_100"] == pytest.approx(expected["R@100"], abs=1e-12)


def test_rerank_gives_the_numbers_of_trec_eval(random: np.random.Generator, tmp_path: Path) -> None:
    table = random.standard_normal((QUERIES + DOCUMENTS, 8)).astype(np.float32)
    grades = graded(random, 30)
    data = write_grades(tmp_path / "pairs.tsv", grades)
    found = evaluate(artifact(tmp_path, PAIRS, table), task="rerank", data=data).to_json()
    similarities = table[:QUERIES] @ table[QUERIES:].T
    for query, of_query in enumerate(grades.values()):  # only judged documents are ranked
        others = [d for d in range(DOCUMENTS) if f"w{QUERIES + d}" not in of_query]
        similarities[query, others] = -np.inf
    expected = means(grades, similarities, ir_measures.nDCG @ 10, ir_measures.RR @ 10)
    assert found["ndcg_at_10"] == pytest.approx(expected["nDCG@10"], abs=1e-12)
    assert found["mrr_at_10"] == pytest.approx(expected["RR@10"], abs=1e-12)
