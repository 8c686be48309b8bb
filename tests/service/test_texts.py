from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from starlette.testclient import TestClient

from tests.service.tiny import ECHO, hidden_states, write_encoder, write_model


def mean(ids: list[int]) -> np.ndarray:
    return hidden_states(np.array([ids]))[0].mean(axis=0)


def test_texts_are_tokenized_run_and_averaged_without_padding(client: TestClient) -> None:
    body = client.post("/embed", json={"inputs": ["a b c", "d"], "truncate": True}).json()
    assert body["model"] == "tiny"
    assert body["usage"] == {"tokens": 8}  # two special tokens a text
    expected = [mean([2, 4, 5, 6, 3]), mean([2, 7, 3])]
    np.testing.assert_allclose(body["embeddings"], expected, rtol=1e-6, atol=1e-6)


def test_one_text_is_a_list_of_one(client: TestClient) -> None:
    one = client.post("/embed", json={"inputs": "a b"}).json()
    many = client.post("/embed", json={"inputs": ["a b"]}).json()
    assert one["embeddings"] == many["embeddings"]


def test_an_empty_text_is_its_special_tokens(client: TestClient) -> None:
    body = client.post("/embed", json={"inputs": ""}).json()
    assert body["usage"] == {"tokens": 2}
    np.testing.assert_allclose(body["embeddings"], [mean([2, 3])], rtol=1e-6, atol=1e-6)


def test_long_texts_are_cut_or_refused(client: TestClient) -> None:
    long = " ".join("abcd" * 5)
    cut = client.post("/embed", json={"inputs": long})
    assert cut.json()["usage"] == {"tokens": 8}
    np.testing.assert_allclose(
        cut.json()["embeddings"], [mean([2, 4, 5, 6, 7, 4, 5, 3])], rtol=1e-6, atol=1e-6
    )
    refused = client.post("/embed", json={"inputs": ["a", long], "truncate": False})
    assert refused.status_code == 422
    assert refused.json()["error"].startswith("text 1 has 22 tokens, more than the limit of 8")


@pytest.mark.parametrize("normalize", [True, False])
def test_pooling_is_the_artifacts(
    start: Callable[..., TestClient], tmp_path: Path, normalize: bool
) -> None:
    model = write_encoder(tmp_path / "model", pooling="cls", normalize=normalize)
    (vector,) = start(model).post("/embed", json={"inputs": "a"}).json()["embeddings"]
    first = hidden_states(np.array([[2, 4, 3]]))[0, 0]
    expected = first / np.linalg.norm(first) if normalize else first
    np.testing.assert_allclose(vector, expected, rtol=1e-6, atol=1e-6)


def test_too_many_texts(start: Callable[..., TestClient], encoder: Path) -> None:
    client = start(encoder, max_inputs=2)
    assert client.post("/embed", json={"inputs": ["a", "b"]}).status_code == 200
    refused = client.post("/embed", json={"inputs": ["a", "b", "c"]})
    assert refused.status_code == 413
    assert refused.json()["error"].startswith("3 texts in one request: at most 2")


def test_too_many_tokens(start: Callable[..., TestClient], encoder: Path) -> None:
    client = start(encoder, max_tokens=9)
    assert client.post("/embed", json={"inputs": ["a", "b", "c"]}).status_code == 200
    refused = client.post("/embed", json={"inputs": ["a b c", "a b c"]})
    assert refused.status_code == 413
    assert refused.json()["error"].startswith("10 tokens in one request")


def test_a_model_without_a_tokenizer_says_so(
    start: Callable[..., TestClient], tmp_path: Path
) -> None:
    answer = start(write_encoder(tmp_path / "bare", tokenizer=False)).post(
        "/embed", json={"inputs": "a"}
    )
    assert answer.status_code == 404
    assert answer.json() == {
        "error": "bare has no tokenizer.json beside it, which reading texts needs;"
        " send token ids to /v2/models/bare/infer"
    }


def test_a_model_that_takes_no_text_says_so(
    start: Callable[..., TestClient], encoder: Path, tmp_path: Path
) -> None:
    (tmp_path / "tokenizer.json").write_bytes((encoder / "tokenizer.json").read_bytes())
    client = start(write_model(tmp_path / "echo.onnx", ECHO))
    answer = client.post("/embed", json={"inputs": "a"})
    assert answer.status_code == 422
    assert "expected int64 or int32 tokens" in answer.json()["error"]
