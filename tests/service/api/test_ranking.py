"""POST /rerank and /v1/rerank, and prompts and dimensions of embeddings."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import schemathesis
from schemathesis.specs.openapi.checks import response_schema_conformance
from starlette.testclient import TestClient

from attnserve.serving.loaded_model import Model
from tests.service.tiny import (
    PROMPTS,
    RERANKER,
    hidden_states,
    mean,
    write_encoder,
    write_reranker,
)


@pytest.fixture
def reranker(start: Callable[..., TestClient], tmp_path: Path) -> TestClient:
    return start(write_reranker(tmp_path / "reranker"))


BODY = {"query": "b b", "texts": ["a", "b b", "b", "c"]}


def sigmoid(x: float) -> float:
    return 1 / (1 + float(np.exp(-x)))


def test_rerank_orders_texts_by_score(reranker: TestClient) -> None:
    answer = reranker.post("/rerank", json=BODY)
    assert answer.status_code == 200, answer.text
    assert [one["index"] for one in answer.json()] == [1, 2, 0, 3]  # a tie keeps its order
    scores = [one["score"] for one in answer.json()]
    np.testing.assert_allclose(scores, [sigmoid(x) for x in (1, 0, -1, -1)], rtol=1e-6)
    assert set(answer.json()[0]) == {"index", "score"}
    # [CLS] b b [SEP] text [SEP]
    assert answer.headers["x-tokens"] == str(4 * 5 + 5)


def test_rerank_raw_scores_and_texts(reranker: TestClient) -> None:
    more = {"raw_scores": True, "return_text": True, "truncation_direction": "Right"}
    ranks = reranker.post("/rerank", json={**BODY, **more}).json()
    assert ranks[0] == {"index": 1, "score": 1.0, "text": "b b"}
    assert [one["score"] for one in ranks] == [1, 0, -1, -1]


def test_rerank_activation_of_the_model(start: Callable[..., TestClient], tmp_path: Path) -> None:
    client = start(write_reranker(tmp_path / "m", activation="identity"))
    assert [one["score"] for one in client.post("/rerank", json=BODY).json()] == [1, 0, -1, -1]
    body = {"query": "a", "documents": ["b b"]}
    (result,) = client.post("/v1/rerank", json=body).json()["results"]
    assert result["relevance_score"] == 1


def test_rerank_pair_in_a_template(start: Callable[..., TestClient], tmp_path: Path) -> None:
    graph = RERANKER.replace("Mul(ones, token_type_ids)", "Mul(ones, attention_mask)")
    folder = write_reranker(tmp_path / "m", graph, template="b {query} c {document} d")
    answer = start(folder).post("/rerank", json={**BODY, "raw_scores": True})
    # Each text has the letter "b" of the template and two of the query, and one is subtracted.
    assert [(one["index"], one["score"]) for one in answer.json()] == [
        (1, 4), (2, 3), (0, 2), (3, 2),
    ]  # fmt: skip
    assert answer.headers["x-tokens"] == str(4 * 5 + 5)


def test_rerank_long_pair_is_truncated_or_refused(reranker: TestClient) -> None:
    body = {"query": "b b", "texts": ["b " * 8], "raw_scores": True, "truncate": True}
    # Of 9 tokens, 3 are special and 2 those of the query: 4 of the text remain.
    assert reranker.post("/rerank", json=body).json()[0]["score"] == 3
    refused = reranker.post("/rerank", json={**body, "truncate": False})
    assert (refused.status_code, refused.json()["error_type"]) == (413, "Validation")
    assert "13 tokens, more than the limit of 9" in refused.json()["error"]


def test_rerank_batches_the_pairs_of_a_request_by_length(
    start: Callable[..., TestClient], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The measured cost of a run of this tiny model allows more padding.
    client = start(write_reranker(tmp_path / "m", max_length=512), run_overhead_tokens=4)
    shapes: list[tuple[int, int]] = []
    run = Model.run

    def counted(model: Model, inputs: Any, outputs: Any = ()) -> Any:
        shapes.append(inputs["input_ids"].shape)
        return run(model, inputs, outputs)

    monkeypatch.setattr(Model, "run", counted)
    numbers = np.random.default_rng(0).permutation(np.linspace(8, 200, 30).round().astype(int))
    texts = ["b " * number for number in numbers]
    answer = client.post("/rerank", json={"query": "a a", "texts": texts, "raw_scores": True})
    scores = {rank["index"]: rank["score"] for rank in answer.json()}
    assert [scores[at] for at in range(30)] == [number - 1 for number in numbers]
    tokens = int(answer.headers["x-tokens"])
    assert tokens == sum(numbers + 5)
    computed = sum(rows * longest for rows, longest in shapes)
    assert sum(rows for rows, _ in shapes) == 30
    assert computed <= 1.05 * tokens  # padded to the longest, they would be 1.9 times as many
    assert all(rows == 1 or rows * longest <= 512 for rows, longest in shapes)
    # Pairs of like length share runs.
    shapes.clear()
    client.post(
        "/rerank", json={"query": "a a", "texts": ["b " * (10 + at % 3) for at in range(30)]}
    )
    assert len(shapes) <= 3 and sum(rows * longest for rows, longest in shapes) <= 30 * 17


def test_rerank_of_cohere(reranker: TestClient) -> None:
    documents: list[Any] = ["a", {"text": "b b"}, {"text": "b", "title": "x"}, "c"]
    body = {"model": "reranker", "query": "b b", "documents": documents, "top_n": 2}
    answer = reranker.post("/v1/rerank", json={**body, "rank_fields": ["text"]})
    assert answer.status_code == 200, answer.text
    content = answer.json()
    assert [one["index"] for one in content["results"]] == [1, 2]
    assert content["results"][0]["relevance_score"] == pytest.approx(sigmoid(1), rel=1e-6)
    assert set(content["results"][0]) == {"index", "relevance_score"}
    assert (content["model"], content["usage"]) == ("reranker", {"total_tokens": 25})
    body["return_documents"] = True
    content = reranker.post("/v1/rerank", json=body).json()
    assert reranker.post("/v2/rerank", json=body).json() == content
    assert content["results"][0]["document"] == {"text": "b b"}


def test_rerank_answers_conform_to_openapi_document(reranker: TestClient) -> None:
    document = schemathesis.openapi.from_asgi("/openapi.json", reranker.app)
    cohere = {"query": "a", "documents": ["a", {"text": "b"}], "return_documents": True}
    for path, body in (("/rerank", {**BODY, "return_text": True}), ("/v1/rerank", cohere)):
        case = document[path]["POST"].Case(body=body, media_type="application/json")
        answer = case.call(session=reranker)
        assert answer.status_code == 200
        case.validate_response(answer, checks=[response_schema_conformance])


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"query": "a"}, 422),
        ({"query": "a", "texts": []}, 400),
        ({"query": "a", "texts": [1]}, 422),
        ({"query": ["a"], "texts": ["a"]}, 422),
        ({"query": "a", "texts": ["a"], "truncation_direction": "up"}, 422),
        ({"query": "a", "texts": ["a"] * 2049}, 413),
        ({"query": "a", "texts": ["a"], "model": "other"}, 404),
    ],
)
def test_rerank_invalid_body_is_refused(
    reranker: TestClient, body: dict[str, Any], status: int
) -> None:
    answer = reranker.post("/rerank", json=body)
    assert (answer.status_code, list(answer.json())) == (status, ["error", "error_type"])
    body = {"documents": body.pop("texts"), **body} if "texts" in body else body
    if "truncation_direction" not in body:
        answer = reranker.post("/v1/rerank", json=body)
        assert answer.status_code == (400 if status == 422 else status)
        assert list(answer.json()["error"]) == ["message", "type", "param", "code"]


def test_rerank_of_an_encoder_is_not_found(client: TestClient) -> None:
    answer = client.post("/rerank", json={"query": "a", "texts": ["a"]})
    assert answer.status_code == 424
    assert answer.json()["error"].startswith("tiny is not a reranker")


# -- prompts and dimensions -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "ids"), [(None, [2, 4, 3]), ("query", [2, 5, 4, 3]), ("document", [2, 6, 4, 3])]
)
def test_embed_prompt_by_name(
    name: str | None, ids: list[int], start: Callable[..., TestClient], tmp_path: Path
) -> None:
    client = start(write_encoder(tmp_path / "m", prompts=PROMPTS))
    (vector,) = client.post("/texts/embed", json={"inputs": "a", "prompt_name": name}).json()[
        "embeddings"
    ]
    np.testing.assert_allclose(vector, mean(ids), rtol=1e-6)
    body = {"model": "m", "input": "a", "prompt_name": name}
    found = client.post("/v1/embeddings", json=body).json()["data"][0]["embedding"]
    np.testing.assert_allclose(found, mean(ids), rtol=1e-6)


def test_embed_default_prompt_is_used_without_a_name(
    start: Callable[..., TestClient], tmp_path: Path
) -> None:
    client = start(write_encoder(tmp_path / "m", prompts=PROMPTS, default_prompt="query"))
    (vector,) = client.post("/texts/embed", json={"inputs": "a"}).json()["embeddings"]
    np.testing.assert_allclose(vector, mean([2, 5, 4, 3]), rtol=1e-6)
    ids = client.post("/v1/embeddings", json={"model": "m", "input": [2, 4, 3]}).json()
    np.testing.assert_allclose(ids["data"][0]["embedding"], mean([2, 4, 3]), rtol=1e-6)
    a, b = mean([2, 5, 4, 3]), mean([2, 5, 5, 3])
    expected = a @ b / np.linalg.norm(a) / np.linalg.norm(b)
    answer = client.post("/texts/similarity", json={"source": "a", "targets": ["b"]})
    np.testing.assert_allclose(answer.json()["similarities"], [expected], rtol=1e-5)


def test_default_prompt_of_a_cross_encoder_precedes_query_and_text(
    start: Callable[..., TestClient], tmp_path: Path
) -> None:
    prompted = {"prompts": {"own": "a a "}, "default_prompt": "own"}
    counts: list[tuple[int, int]] = []
    for name, record in (("plain", {}), ("prompted", prompted)):
        client = start(write_reranker(tmp_path / name, **record))
        ranked = client.post("/v1/rerank", json={"query": "b", "documents": ["c", "b c"]}).json()
        predicted = client.post("/texts/predict", json={"inputs": ["b", "c"]}).json()
        counts.append((ranked["usage"]["total_tokens"], predicted["usage"]["tokens"]))
    assert counts == [(11, 6), (15, 10)]


def test_embed_unknown_prompt_or_prompt_of_ids_is_refused(
    start: Callable[..., TestClient], tmp_path: Path
) -> None:
    client = start(write_encoder(tmp_path / "m", prompts=PROMPTS))
    answer = client.post("/texts/embed", json={"inputs": "a", "prompt_name": "passage"})
    assert answer.status_code == 422
    assert "prompts of m are document, query" in answer.json()["error"]
    for given in ({"prompt_name": "passage", "input": "a"},
                  {"prompt_name": "query", "input": [2, 4, 3]}):  # fmt: skip
        answer = client.post("/v1/embeddings", json={"model": "m", **given})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "prompt_name"


@pytest.mark.parametrize("normalize", [True, False])
def test_embed_dimensions_are_cut_and_then_normalized(
    normalize: bool, start: Callable[..., TestClient], tmp_path: Path
) -> None:
    client = start(write_encoder(tmp_path / "m", normalize=normalize))
    expected = mean([2, 4, 3])[:3]
    expected = expected / np.linalg.norm(expected) if normalize else expected
    (vector,) = client.post("/texts/embed", json={"inputs": "a", "dimensions": 3}).json()[
        "embeddings"
    ]
    np.testing.assert_allclose(vector, expected, rtol=1e-6)
    body = {"model": "m", "input": "a", "dimensions": 3}
    found = client.post("/v1/embeddings", json=body).json()["data"][0]["embedding"]
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    several = client.post("/texts/embed", json={"inputs": ["a", "a"], "dimensions": 3}).json()
    np.testing.assert_allclose(several["embeddings"], [expected] * 2, rtol=1e-6)
    refused = client.post("/texts/embed", json={"inputs": "a", "dimensions": 5})
    assert refused.status_code == 422
    assert "dimensions is 5, but vectors of m have 4" in refused.json()["error"]


def test_embed_output_of_artifact(start: Callable[..., TestClient], tmp_path: Path) -> None:
    folder = write_encoder(tmp_path / "m", output="last_hidden_state")
    (vector,) = start(folder).post("/texts/embed", json={"inputs": "a"}).json()["embeddings"]
    np.testing.assert_allclose(vector, mean([2, 4, 3]), rtol=1e-6)
    folder = write_encoder(tmp_path / "other", output="sentence_embedding")
    refused = start(folder).post("/texts/embed", json={"inputs": "a"})
    assert refused.status_code == 422
    assert "the outputs of the model are last_hidden_state, kept" in refused.json()["error"]


def test_embed_last_pooling_and_dimensions_of_artifact(
    start: Callable[..., TestClient], tmp_path: Path
) -> None:
    client = start(write_encoder(tmp_path / "m", pooling="last", dimensions=2, normalize=True))
    vectors = client.post("/texts/embed", json={"inputs": ["a b c", "d"]}).json()["embeddings"]
    for vector, ids in zip(vectors, ([2, 4, 5, 6, 3], [2, 7, 3]), strict=True):
        last = hidden_states(np.array([ids]))[0, -1, :2]
        np.testing.assert_allclose(vector, last / np.linalg.norm(last), rtol=1e-6)
