"""The measure "index": new queries against documents that the original embedded."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnserve.checks.measures import Scores
from attnserve.checks.meters import new_meter
from attnserve.checks.quality import QualityMeter, limited_losses
from attnserve.checks.relations import NEIGHBORS, IndexMeter
from attnserve.data.datasets import Dataset
from attnserve.data.row_batches import RowBatch, RowInfo
from attnserve.limits import TAIL
from attnserve.literals import Measure, Similarity
from attnserve.models.artifact import Artifact
from attnserve.models.embeddings import Embedding
from attnserve.models.lineage import Calibration
from attnserve.models.record import Record
from graph_passes.errors import InvalidArgument, InvalidData
from tests.errors import raises

WIDTH = 16

Pair = tuple[np.ndarray, np.ndarray]


def vectors(seed: int, rows: int, noise: float = 0.0) -> Pair:
    random = np.random.default_rng(seed)
    a, b = random.standard_normal((2, rows, WIDTH))
    return a, a + noise * b


def rotation(seed: int) -> np.ndarray:
    return np.linalg.qr(np.random.default_rng(seed).standard_normal((WIDTH, WIDTH)))[0]


def scores(queries: Pair, documents: Pair | None = None) -> Scores:
    meter = IndexMeter()
    if documents is None:
        meter.add(*queries, {})
    else:
        meter.add(*documents, RowBatch({}, RowInfo(role="document")))
        meter.add(*queries, RowBatch({}, RowInfo(role="query")))
    return meter.scores()


def nearest(
    queries: np.ndarray, documents: np.ndarray, *, count: int, itself: bool
) -> list[set[int]]:
    """The nearest documents of each query, by one query after the other."""
    found: list[set[int]] = []
    for row, query in enumerate(queries):
        cosines = [
            -np.inf
            if row == place and not itself
            else query @ one / np.linalg.norm(query) / np.linalg.norm(one)
            for place, one in enumerate(documents)
        ]
        found.append(set(np.argsort(cosines)[::-1][:count].tolist()))
    return found


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 99), st.integers(3, 70), st.booleans())
def test_index_of_equal_models_is_one(seed: int, rows: int, has_roles: bool):
    same = vectors(seed, rows)
    found = scores(same, vectors(seed + 1, rows) if has_roles else None)
    assert found.measure == "index" and found.value == 1 and found.also["overlap"] == 1
    assert (found.influence == 1).all() and found.documents == (rows if has_roles else 0)
    assert limited_losses(found).measured == pytest.approx(0, abs=1e-9)


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 99), st.booleans())
def test_index_loses_by_a_rotation_that_symmetric_measures_keep(seed: int, has_roles: bool):
    turn = rotation(seed)
    queries, documents = vectors(seed + 1, 60)[0], vectors(seed + 2, 60)[0]
    found = scores((queries, queries @ turn), (documents, documents @ turn) if has_roles else None)
    assert found.also["overlap"] == 1 and found.also["similarity"] == pytest.approx(1)
    assert found.value < 0.5
    assert limited_losses(found).measured > 0.5


@pytest.mark.parametrize("has_roles", [False, True])
def test_index_is_the_share_of_kept_documents(has_roles: bool):
    queries = vectors(0, 60, 0.3)
    documents = vectors(1, 80, 0.3) if has_roles else queries
    found = scores(queries, documents if has_roles else None)
    old, new, both = (
        nearest(some, index, count=NEIGHBORS, itself=has_roles)
        for some, index in (
            (queries[0], documents[0]), (queries[1], documents[0]), (queries[1], documents[1])
        )
    )  # fmt: skip
    shares = [len(a & b) / NEIGHBORS for a, b in zip(old, new, strict=True)]
    np.testing.assert_allclose(found.influence, shares)
    assert found.value == pytest.approx(np.mean(shares)) and 0.3 < found.value < 0.95
    symmetric = [len(a & b) / NEIGHBORS for a, b in zip(old, both, strict=True)]
    assert found.also["overlap"] == pytest.approx(np.mean(symmetric))
    assert found.value > found.also["overlap"], "only the queries have changed"


def test_new_vectors_of_documents_do_not_count():
    found = scores(vectors(0, 50), vectors(1, 50, noise=1.0))
    assert found.value == found.also["r2"] == 1 and found.also["overlap"] < 0.9


def test_constant_is_the_best_answer_to_all_queries():
    (queries, _), (documents, _) = vectors(2, 40), vectors(3, 60)
    answers = nearest(queries, documents, count=NEIGHBORS, itself=True)
    counts = np.bincount([one for answer in answers for one in answer], minlength=60)
    best = set(np.argsort(counts)[-NEIGHBORS:].tolist())
    expected = np.mean([len(answer & best) / NEIGHBORS for answer in answers])
    found = scores((queries, queries), (documents, documents))
    assert found.constant == pytest.approx(expected)
    constant = np.broadcast_to(queries.mean(0), queries.shape)
    assert scores((queries, constant), (documents, documents)).value <= found.constant


def test_tail_of_an_index_is_that_of_the_vectors():
    """One of ten neighbors of a query is more than any small loss allows."""
    found = scores(vectors(4, 200, 0.01))
    assert found.second is not None and found.second.measure == "r2"
    assert (1 - found.p5) / TAIL > 1 - found.value
    assert limited_losses(found).measured == pytest.approx(1 - found.value)


# Data


def meter(data: Dataset | None = None, output: str = "float[b, d] sentence_embedding"):
    graph = ir.from_onnx_text(
        '<ir_version: 10, opset_import: ["" : 20, "test" : 1]> g (float[b, t] x) => '
        f"({output}) {{ {output.split()[-1]} = test.Model(x, x) }}"
    )
    return QualityMeter(graph, Artifact(Path("model.onnx")), measure="index", data=data)


def batch(rows: int, length: int = 4) -> dict[str, np.ndarray]:
    return {"attention_mask": np.ones((rows, length), np.int64)}


def test_roles_are_those_of_the_batches():
    queries = RowBatch(batch(40), RowInfo(role="query"))
    documents = RowBatch(batch(60), RowInfo(role="document"))
    data = Dataset([queries, documents], [], [], 4, Calibration(), query_lengths=[4] * 40)
    found = meter(data)
    for seed, part in enumerate((queries, documents)):
        a, b = vectors(seed, len(part["attention_mask"]), 0.1)
        found.add([a], [b], part)
    (quality,) = found.results()
    assert (quality.measure, quality.rows, quality.documents) == ("index", 40, 60)
    assert quality.value == scores(vectors(0, 40, 0.1), vectors(1, 60, 0.1)).value
    assert set(quality.also) == {"similarity", "overlap", "r2"}
    assert "40 queries, 60 documents" in quality.describe()
    assert quality.to_json()["documents"] == 60


def test_short_queries_search_long_documents():
    """The lengths of texts are not measured apart."""
    short, long = batch(200, 4), batch(200, 64)
    data = Dataset([short, long], [], [], 4, Calibration(), lengths=[4, 64] * 200)
    assert data.length_edge is not None
    found = meter(data)
    for seed, part in enumerate((short, long)):
        a, b = vectors(seed, 200)
        found.add([a], [b], part)
    (quality,) = found.results()
    assert (quality.rows, quality.lengths, quality.documents) == (400, "", None)


@pytest.mark.parametrize(
    ("queries", "documents"), [(20, 0), (20, 1), (0, 20), (1, None), (2, None)]
)
def test_too_few_documents_are_refused(queries: int, documents: int | None):
    meter = IndexMeter()
    if documents is None:
        meter.add(*vectors(0, queries), {})
    for role, rows in (("query", queries), ("document", documents)):
        if documents is not None and rows:
            meter.add(*vectors(1, rows), RowBatch({}, RowInfo(role=role)))  # type: ignore[arg-type]
    with raises(InvalidData, "quality.few_documents", f"{queries} quer"):
        meter.scores()


@pytest.mark.parametrize("output", ["float[b, c] logits", "float[b] score"])
def test_outputs_that_are_no_embeddings_have_no_index(output: str):
    found = meter(output=output)
    a = vectors(0, 40)[0]
    a = a[:, 0] if output == "float[b] score" else a
    found.add([a], [a], batch(40))
    with raises(InvalidArgument, "quality.no_embedding", "index"):
        found.results()


def test_other_outputs_beside_embeddings_keep_their_measures():
    graph = ir.from_onnx_text(
        '<ir_version: 10, opset_import: ["" : 20, "test" : 1]> g (float[b, t] x) => '
        "(float[b, d] sentence_embedding, float[b, c] logits) "
        "{ sentence_embedding = test.Model(x, x) logits = test.Model(x, x) }"
    )
    found = QualityMeter(graph, Artifact(Path("model.onnx")), measure="index")
    a, b = vectors(0, 40)[0], vectors(1, 40)[0]
    found.add([a, b], [a, b], batch(40))
    assert {one.output: one.measure for one in found.results()} == {
        "sentence_embedding": "index",
        "logits": "kl",
    }


@pytest.mark.parametrize("similarity", ["cosine", "dot"])
@pytest.mark.parametrize("measure", ["index", "similarity"])
def test_lengths_of_vectors_count_for_models_of_dot_products(
    measure: Measure, similarity: Similarity
) -> None:
    """The new model changes the lengths of vectors alone."""
    random = np.random.default_rng(0)
    before = random.standard_normal((60, WIDTH)) * random.uniform(0.5, 2, (60, 1))
    after = before * random.uniform(0.2, 5, (60, 1))
    artifact = Artifact(Path("model.onnx"), Record(similarity=similarity))
    meter = new_meter(measure, Embedding.of(artifact))
    meter.add(before, after, {})
    found = meter.scores()
    products = [rows @ rows.T for rows in (before, after)]
    for product in products:
        np.fill_diagonal(product, -np.inf)
    if measure == "index":  # queries of the new model, documents of the original
        products[1] = after @ before.T
        np.fill_diagonal(products[1], -np.inf)
    old, new = (np.argsort(-product, axis=1)[:, :NEIGHBORS] for product in products)
    kept = np.mean([len({*a} & {*b}) / NEIGHBORS for a, b in zip(old, new, strict=True)])
    share = found.value if measure == "index" else found.also["overlap"]
    assert share == pytest.approx(1.0 if similarity == "cosine" else kept)
    assert (found.also["r2"] > 0.99) == (similarity == "cosine")
    assert Embedding.of(Artifact(Path("m.onnx"), Record(similarity="dot", normalize=True))).is_unit
