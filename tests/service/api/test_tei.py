"""The HTTP API of text-embeddings-inference: answers, defaults and errors."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient

from attnserve.serving.loaded_model import Model, ModelFailed
from tests.attack.requests import SPARSE
from tests.service.conftest import HeldRuns, samples, until
from tests.service.tiny import (
    PROMPTS,
    cosine,
    hidden_states,
    make_tokenizer,
    mean,
    write_classifier,
    write_encoder,
    write_model,
    write_reranker,
)

Start = Callable[..., TestClient]


def unit(vector: np.ndarray) -> np.ndarray:
    return vector / np.linalg.norm(vector)


def test_embed_answers_a_bare_list_of_normalized_vectors(client: TestClient) -> None:
    answer = client.post("/embed", json={"inputs": ["a b c", "d"], "user": "unknown fields"})
    assert answer.status_code == 200, answer.text
    expected = [unit(mean([2, 4, 5, 6, 3])), unit(mean([2, 7, 3]))]
    np.testing.assert_allclose(answer.json(), expected, rtol=1e-6, atol=1e-6)
    assert answer.headers["x-tokens"] == "8"
    (single,) = client.post("/embed", json={"inputs": "d"}).json()
    np.testing.assert_array_equal(single, answer.json()[1])
    plain = client.post("/embed", json={"inputs": "d", "normalize": False, "dimensions": 3})
    np.testing.assert_allclose(plain.json(), [mean([2, 7, 3])[:3]], rtol=1e-6)


def test_embed_normalize_false_of_a_model_that_normalizes(start: Start, tmp_path: Path) -> None:
    client = start(write_encoder(tmp_path / "m", normalize=True))
    plain = client.post("/embed", json={"inputs": "a", "normalize": False}).json()
    np.testing.assert_allclose(plain, [mean([2, 4, 3])], rtol=1e-6)
    ours = client.post("/texts/embed", json={"inputs": "a"}).json()["embeddings"]
    np.testing.assert_allclose(ours, [unit(mean([2, 4, 3]))], rtol=1e-6)


def test_embed_token_ids_and_texts_may_be_mixed(client: TestClient) -> None:
    text, ids = client.post("/embed", json={"inputs": ["a b", [2, 4, 5, 3]]}).json()
    assert text == ids
    assert client.post("/embed", json={"inputs": [2, 4, 5, 3]}).json() == [ids]
    refused = client.post("/embed", json={"inputs": [4, 5]})
    assert (refused.status_code, refused.json()["error_type"]) == (422, "Validation")


def test_embed_has_no_prompt_unless_named(start: Start, tmp_path: Path) -> None:
    client = start(write_encoder(tmp_path / "m", prompts=PROMPTS, default_prompt="query"))
    for name, ids in ((None, [2, 4, 3]), ("document", [2, 6, 4, 3])):
        body = {"inputs": "a", "prompt_name": name}
        np.testing.assert_allclose(
            client.post("/embed", json=body).json(), [unit(mean(ids))], rtol=1e-6
        )
        (row,) = client.post("/tokenize", json=body).json()
        assert [token["id"] for token in row] == ids
    assert client.post("/embed", json={"inputs": "a", "prompt_name": "x"}).status_code == 422
    assert client.post("/embed", json={"inputs": "a", "version": "9"}).status_code == 404


def test_embed_truncates_only_if_asked_and_at_either_side(client: TestClient) -> None:
    long = "a a a b b b c c c"
    refused = client.post("/embed", json={"inputs": long})
    assert (refused.status_code, refused.json()["error_type"]) == (413, "Validation")
    for side, ids in (
        (None, [2, 4, 4, 4, 5, 5, 5, 3]),
        ("Right", [2, 4, 4, 4, 5, 5, 5, 3]),
        ("left", [2, 5, 5, 5, 6, 6, 6, 3]),
    ):
        body = {"inputs": long, "truncate": True, "truncation_direction": side}
        vectors = client.post("/embed", json=body).json()
        np.testing.assert_allclose(vectors, [unit(mean(ids))], rtol=1e-5)


def test_embed_all_has_a_vector_per_token(client: TestClient) -> None:
    answer = client.post("/embed_all", json={"inputs": ["a b c", "d", "a"]})
    assert answer.status_code == 200, answer.text
    for found, ids in zip(answer.json(), ([2, 4, 5, 6, 3], [2, 7, 3], [2, 4, 3]), strict=True):
        np.testing.assert_allclose(found, hidden_states(np.array([ids]))[0], rtol=1e-6)


def test_embed_all_limits_the_size_of_its_answer(start: Start, encoder: Path) -> None:
    client = start(encoder, max_tensor_bytes=300)
    assert client.post("/embed_all", json={"inputs": ["a"] * 6}).status_code == 200
    refused = client.post("/embed_all", json={"inputs": ["a"] * 7})
    assert (refused.status_code, refused.json()["error_type"]) == (413, "Validation")


@pytest.fixture
def sparse(tmp_path: Path, start: Start) -> TestClient:
    (tmp_path / "sparse").mkdir()
    write_model(tmp_path / "sparse" / "model.onnx", SPARSE, tokenizer=True)
    config = {"architectures": ["BertForMaskedLM"], "vocab_size": 8}
    (tmp_path / "sparse" / "config.json").write_text(json.dumps(config))
    return start(tmp_path / "sparse")


def test_embed_sparse_of_splade(sparse: TestClient) -> None:
    answer = sparse.post("/embed_sparse", json={"inputs": ["a b c", "d"]})
    assert answer.status_code == 200, answer.text
    for row, ids in zip(answer.json(), ([2, 3, 4, 5, 6], [2, 3, 7]), strict=True):
        assert [one["index"] for one in row] == ids
        np.testing.assert_allclose([one["value"] for one in row], np.log(2), rtol=1e-6)
    assert sparse.get("/info").json()["model_type"] == {"embedding": {"pooling": "splade"}}
    assert sparse.post("/", json={"inputs": "d"}).json() == answer.json()[1:]


def test_routes_that_the_model_cannot_do_are_backend_errors(client: TestClient) -> None:
    for path, body in (
        ("/embed_sparse", {"inputs": "a"}),
        ("/predict", {"inputs": "a"}),
        ("/rerank", {"query": "a", "texts": ["b"]}),
    ):
        answer = client.post(path, json=body)
        assert (answer.status_code, answer.json()["error_type"]) == (424, "Backend"), path


def test_predict_of_a_text_a_pair_and_a_batch(start: Start, tmp_path: Path) -> None:
    client = start(write_classifier(tmp_path / "c", id2label={"0": "A", "1": "B", "2": "C"}))
    single = client.post("/predict", json={"inputs": "b b c"}).json()
    assert [one["label"] for one in single] == ["B", "C", "A"]
    powers = np.exp([2, 1, 0])
    np.testing.assert_allclose([one["score"] for one in single], powers / powers.sum())
    batch = client.post("/predict", json={"inputs": [["b b c"], ["a", "b"]]}).json()
    assert batch[0] == single and len(batch[1]) == 3
    assert client.post("/predict", json={"inputs": ["b b c"]}).json() == single
    assert client.post("/predict", json={"inputs": ["a", "b"]}).json() == batch[1]
    raw = client.post("/predict", json={"inputs": "b b c", "raw_scores": True}).json()
    assert [one["score"] for one in raw] == [2, 1, 0]
    refused = client.post("/predict", json={"inputs": ["a", "b", "c"]})
    assert refused.status_code == 422
    (kind,) = client.get("/info").json()["model_type"]
    assert kind == "classifier"


def test_similarity_of_a_sentence(client: TestClient) -> None:
    inputs = {"source_sentence": "a", "sentences": ["a", "b c"]}
    body = {"inputs": inputs, "parameters": {"truncate": True, "prompt_name": None}}
    expected = [1.0, cosine([2, 4, 3], [2, 5, 6, 3])]
    np.testing.assert_allclose(client.post("/similarity", json=body).json(), expected, rtol=1e-5)
    inputs["sentences"] = []
    assert client.post("/similarity", json=body).json()["error_type"] == "Empty"


def test_tokenize_places_are_bytes(client: TestClient) -> None:
    body = {"inputs": "\u00e9\u00e9 b", "add_special_tokens": False}
    (row,) = client.post("/tokenize", json=body).json()
    assert (row[-1]["start"], row[-1]["stop"]) == (5, 6)


def test_tokenize_limits_its_tokens(start: Start, encoder: Path) -> None:
    client = start(encoder, max_tokens=20)
    for path in ("/tokenize", "/texts/tokenize"):
        assert client.post(path, json={"inputs": ["a b c"] * 4}).status_code == 200
        assert client.post(path, json={"inputs": ["a b c"] * 5}).status_code == 413


def test_tokenize_and_decode(client: TestClient) -> None:
    (row,) = client.post("/tokenize", json={"inputs": "a  b"}).json()
    assert row[0] == {"id": 2, "text": "[CLS]", "special": True, "start": None, "stop": None}
    assert row[2] == {"id": 5, "text": "b", "special": False, "start": 3, "stop": 4}
    body = {"inputs": ["a b"] * 2, "add_special_tokens": False}
    rows = client.post("/tokenize", json=body).json()
    assert [[token["id"] for token in row] for row in rows] == [[4, 5]] * 2
    (long,) = client.post("/tokenize", json={"inputs": "a " * 50}).json()
    assert len(long) == 52


def test_decode_with_and_without_special_tokens(start: Start, tmp_path: Path) -> None:
    path = write_encoder(tmp_path / "m") / "tokenizer.json"
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens(["[CLS]", "[SEP]"])
    tokenizer.save(str(path))
    client = start(tmp_path / "m")
    ids = [2, 4, 5, 3]
    assert client.post("/decode", json={"ids": ids}).json() == ["a b"]
    every = client.post("/decode", json={"ids": [ids, [6]], "skip_special_tokens": False})
    assert every.json() == ["[CLS] a b [SEP]", "c"]
    assert client.post("/decode", json={"ids": [2, 2**31 - 1, 4]}).json() == ["a"]


@pytest.mark.parametrize(
    ("path", "body", "status", "kind"),
    [
        ("/embed", b"{", 400, "Validation"),
        ("/embed", {"inputs": []}, 400, "Empty"),
        ("/embed", {"inputs": [[]]}, 422, "Validation"),
        ("/embed", {"inputs": [True]}, 422, "Validation"),
        ("/embed", {"inputs": [2, 2**70]}, 422, "Validation"),
        ("/embed", {"inputs": [2, 9, 3]}, 422, "Validation"),
        ("/embed", {"inputs": ["a"] * 2049}, 413, "Validation"),
        ("/embed", {"inputs": "a", "dimensions": 0}, 422, "Validation"),
        ("/embed", {"inputs": "a", "normalize": "yes"}, 422, "Validation"),
        ("/embed", {"inputs": "a", "model": "other"}, 404, "Validation"),
        ("/models/other/embed", {"inputs": "a"}, 404, "Validation"),
        ("/models/other", {"inputs": "a"}, 404, "Validation"),
        ("/predict", {"inputs": []}, 400, "Empty"),
        ("/predict", {"inputs": {}}, 422, "Validation"),
        ("/rerank", {"query": "a", "texts": "a"}, 422, "Validation"),
        ("/similarity", {"inputs": []}, 422, "Validation"),
        ("/decode", {"ids": [-1]}, 422, "Validation"),
        ("/decode", {"ids": [2**31]}, 422, "Validation"),
        ("/decode", {"ids": "a"}, 422, "Validation"),
        ("/", [], 422, "Validation"),
        ("/invocations", {}, 422, "Validation"),
        ("/health", {}, 405, "Validation"),
        ("/models/tiny/nothing", {}, 404, "Validation"),
    ],
)
def test_errors_have_the_body_of_tei(
    client: TestClient, path: str, body: Any, status: int, kind: str
) -> None:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = client.post(path, content=content)
    assert answer.status_code == status, answer.text
    assert list(answer.json()) == ["error", "error_type"]
    assert answer.json()["error_type"] == kind


# (path, body) of each route that runs the model, for an encoder.
RUNS = [
    ("/embed", {"inputs": "a"}),
    ("/models/tiny/embed", {"inputs": ["a"]}),
    ("/embed_all", {"inputs": "a"}),
    ("/similarity", {"inputs": {"source_sentence": "a", "sentences": ["b"]}}),
    ("/", {"inputs": "a"}),
    ("/invocations", {"inputs": "a"}),
]


def test_full_queue_has_the_body_and_the_status_of_tei(
    start: Start, encoder: Path, hold: Callable[[], HeldRuns]
) -> None:
    client = start(encoder, max_queue=1)
    held = hold()
    with ThreadPoolExecutor(2) as threads:
        accepted = [threads.submit(client.post, "/embed", json={"inputs": "a"})]
        held.wait()
        accepted.append(threads.submit(client.post, "/embed", json={"inputs": "a"}))
        until(lambda: samples(client)["attnserve_queue_rows model=tiny version=1"] == 1)
        for path, body in RUNS:
            refused = client.post(path, json=body)
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "1"), path
            assert list(refused.json()) == ["error", "error_type"]
            assert refused.json()["error_type"] == "Overloaded"
        held.go.set()
        assert [one.result().status_code for one in accepted] == [200, 200]


@pytest.mark.parametrize(("path", "body"), RUNS)
def test_deadline_has_the_body_of_tei(
    start: Start, encoder: Path, hold: Callable[[], HeldRuns], path: str, body: Any
) -> None:
    client = start(encoder)
    held = hold()
    late = client.post(path, json=body, headers={"x-timeout-ms": "20"})
    held.go.set()
    assert late.status_code == 504
    assert list(late.json()) == ["error", "error_type"]
    assert late.json()["error_type"] == "Overloaded"


def test_retry_after_only_where_the_model_may_run_again(
    start: Start, encoder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = start(encoder)
    unsupported = client.post("/predict", json={"inputs": "a"})
    assert (unsupported.status_code, unsupported.headers.get("retry-after")) == (424, None)

    def fail(*_: Any) -> Any:
        raise ModelFailed("the device is lost")

    monkeypatch.setattr(Model, "run", fail)
    failed = client.post("/embed", json={"inputs": "a"})
    assert (failed.status_code, failed.json()["error_type"]) == (424, "Backend")
    assert failed.headers["retry-after"] == "5"
    until(lambda: client.get("/health").status_code == 503)
    broken = client.post("/embed", json={"inputs": "a"})
    assert (broken.status_code, broken.json()["error_type"]) == (503, "Unhealthy")
    assert broken.headers["retry-after"] == "5"


def test_health_and_root_by_accept(client: TestClient) -> None:
    for path in ("/health", "/ping", "/", "/models/tiny/health"):
        answer = client.get(path, headers={"accept": "*/*"})
        assert (answer.status_code, answer.content) == (200, b""), path
    page = client.get("/", headers={"accept": "text/html,application/xhtml+xml,*/*;q=0.8"})
    assert page.headers["content-type"].startswith("text/html")
    assert page.headers["vary"] == "Accept"


def test_health_is_unhealthy_without_models(start: Start, encoder: Path) -> None:
    client = start(encoder)
    assert client.post("/v2/repository/models/tiny/unload").status_code == 200
    answer = client.get("/health")
    assert (answer.status_code, answer.json()["error_type"]) == (503, "Unhealthy")
    assert client.post("/embed", json={"inputs": "a"}).json()["error_type"] == "Unhealthy"


def test_info_describes_the_model(client: TestClient) -> None:
    found = client.get("/info").json()
    assert found["served_model_name"] == "tiny"
    assert found["model_type"] == {"embedding": {"pooling": "mean"}}
    assert (found["max_input_length"], found["max_client_batch_size"]) == (8, 2048)
    assert found["auto_truncate"] is False


def test_post_root_is_the_main_route(start: Start, tmp_path: Path) -> None:
    embedded = start(write_encoder(tmp_path / "e"))
    body = {"inputs": "a"}
    expected = embedded.post("/embed", json=body).json()
    for path in ("/", "/invocations", "/models/e"):
        assert embedded.post(path, json=body).json() == expected
    compared = {"inputs": {"source_sentence": "a", "sentences": ["a", "b"]}}
    expected = embedded.post("/similarity", json=compared).json()
    for path in ("/", "/invocations", "/models/e"):
        assert embedded.post(path, json=compared).json() == expected
    classified = start(write_classifier(tmp_path / "c"))
    assert classified.post("/", json=compared).status_code == 422
    assert classified.post("/", json=body).json() == classified.post("/predict", json=body).json()
    reranked = start(write_reranker(tmp_path / "r"))
    query = {"query": "b", "texts": ["b", "a"]}
    assert reranked.post("/", json=query).json() == reranked.post("/rerank", json=query).json()
    assert list(reranked.get("/info").json()["model_type"]) == ["reranker"]


def test_several_models_by_setting_path_or_field(start: Start, tmp_path: Path) -> None:
    folder = tmp_path / "models"
    folder.mkdir()
    write_encoder(folder / "one")
    write_encoder(folder / "two", pooling="cls")

    def names(client: TestClient) -> list[str | None]:
        answers = [
            client.post("/embed", json={"inputs": "a"}),
            client.post("/models/one/embed", json={"inputs": "a"}),
            client.post("/embed", json={"inputs": "a", "model": "one"}),
        ]
        return [answer.headers.get("x-model") for answer in answers]

    assert names(start(folder)) == [None, "one", "one"]
    assert names(start(folder, default_model="two")) == ["two", "one", "one"]


def test_root_needs_a_key_to_post(start: Start, encoder: Path) -> None:
    client = start(encoder, api_keys="k")
    assert client.get("/health").status_code == client.get("/").status_code == 200
    refused = client.post("/", json={"inputs": "a"})
    assert (refused.status_code, list(refused.json())) == (401, ["error", "error_type"])
