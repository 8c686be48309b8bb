"""OpenAI's protocol: embeddings, models, and errors in its own body."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from starlette.testclient import TestClient
from tokenizers import processors

from tests.service.tiny import ECHO, make_tokenizer, mean, write_encoder, write_model


def ask(client: TestClient, value: Any, **fields: Any) -> Any:
    return client.post("/v1/embeddings", json={"model": "tiny", "input": value, **fields})


def vectors(answer: Any) -> np.ndarray:
    assert answer.status_code == 200, answer.text
    return np.array([one["embedding"] for one in answer.json()["data"]])


def test_embeddings_forms_of_input_are_equivalent(client: TestClient) -> None:
    text = vectors(ask(client, "a b"))
    np.testing.assert_array_equal(vectors(ask(client, ["a b"])), text)
    np.testing.assert_array_equal(vectors(ask(client, [2, 4, 5, 3])), text)
    np.testing.assert_array_equal(vectors(ask(client, [[2, 4, 5, 3]])), text)


def test_embeddings_token_ids_are_passed_unchanged(
    start: Callable[..., TestClient], encoder: Path
) -> None:
    client = start(encoder, any_token_ids=True)
    answer = ask(client, [[4, 5], [6], [7, 7, 7, 7, 7, 7, 7, 7]])
    expected = [mean([4, 5]), mean([6]), mean([7] * 8)]
    np.testing.assert_allclose(vectors(answer), expected, rtol=1e-6, atol=1e-6)
    assert answer.json()["usage"] == {"prompt_tokens": 11, "total_tokens": 11}


def test_embeddings_token_ids_of_another_tokenizer_are_refused(client: TestClient) -> None:
    """langchain-openai sends ids of OpenAI's tokenizer, which has no special tokens."""
    option = "check_embedding_ctx_length=False"
    for ids in ([4, 5], [[2, 4, 3], [5, 6]], [15339, 1917]):
        answer = ask(client, ids)
        check(answer, 400, option, "invalid_request_error", "input", None)
    answer = ask(client, [2, 15339, 3])  # past the vocabulary
    check(answer, 400, option, "invalid_request_error", "input", None)
    assert "ATTNSERVE_ANY_TOKEN_IDS" in ask(client, [4]).text


@pytest.mark.parametrize(("template", "accepted", "refused"), [
    ("$A [SEP]", [4, 3], [4, 5]),  # as Qwen's
    ("$A", [4, 5], None),
])  # fmt: skip
def test_embeddings_token_ids_without_a_first_special_token_are_checked_at_the_end(
    start: Callable[..., TestClient], tmp_path: Path, template: str, accepted: Any, refused: Any
) -> None:
    folder = write_encoder(tmp_path / "tiny")
    tokenizer = make_tokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=template, special_tokens=[("[SEP]", 3)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    client = start(folder)
    assert ask(client, accepted).status_code == 200
    if refused:
        text = "token ids 0 of input do not end with [3]"
        check(ask(client, refused), 400, text, "invalid_request_error", "input", None)


def test_embeddings_any_token_ids_still_has_to_be_of_the_vocabulary(
    start: Callable[..., TestClient], encoder: Path
) -> None:
    answer = ask(start(encoder, any_token_ids=True), [8])
    check(answer, 400, "expected ids from 0 to 7", "invalid_request_error", "input", None)


def test_embeddings_without_v1_are_the_same(client: TestClient) -> None:
    body = {"model": "tiny", "input": "a"}
    same = client.post("/embeddings", json=body)
    assert same.json() == client.post("/v1/embeddings", json=body).json()
    refused = client.post("/embeddings", json={"input": "a"})
    check(refused, 400, "model: Field required", "invalid_request_error", "model", None)


def test_models_lists_loaded_models(client: TestClient) -> None:
    listed = client.get("/v1/models").json()
    assert listed["object"] == "list"
    (card,) = listed["data"]
    assert card["created"] > 1_600_000_000
    assert (card["id"], card["object"], card["owned_by"]) == ("tiny", "model", "attnserve")
    assert client.get("/v1/models/tiny").json() == card


REFUSED: dict[str, tuple[Any, str, str | None]] = {
    "no model": ({"input": "a"}, "model: Field required", "model"),
    "model no text": ({"model": 1, "input": "a"}, "model: Input should be a valid string", "model"),
    "no input": ({"model": "tiny"}, "input: Field required", "input"),
    "empty input": ({"model": "tiny", "input": []}, "input: expected a text, texts, or", "input"),
    "no ids": ({"model": "tiny", "input": [[]]}, "input: expected a text", "input"),
    "texts and ids": ({"model": "tiny", "input": ["a", 1]}, "input: expected a text", "input"),
    "a float": ({"model": "tiny", "input": [1.5]}, "input: expected a text", "input"),
    "a boolean": ({"model": "tiny", "input": [True]}, "input: expected a text", "input"),
    "id past the vocabulary": (
        {"model": "tiny", "input": [[2], [2, 8]]},
        "text 1 holds 8: expected ids from 0 to 7",
        "input",
    ),
    "negative id": (
        {"model": "tiny", "input": [2, -1]},
        "text 0 holds -1: expected ids from 0 to 7",
        "input",
    ),
    "id past int64": (
        {"model": "tiny", "input": [2, 2**64 - 1]},
        "expected ids from 0 to 7",
        "input",
    ),
    "too many ids": (
        {"model": "tiny", "input": [[2], [2] * 9]},
        "text 1 has 9 tokens, more than the limit of 8",
        "input",
    ),
    "too long": (
        {"model": "tiny", "input": "a " * 9},
        "text 0 has 11 tokens, more than the limit of 8",
        "input",
    ),
    "dimensions": (
        {"model": "tiny", "input": "a", "dimensions": 5},
        "dimensions is 5, but vectors of tiny have 4; reduce it, or leave it out",
        "dimensions",
    ),
    "dimensions of zero": ({"model": "tiny", "input": "a", "dimensions": 0}, "dim", "dimensions"),
    "encoding": (
        {"model": "tiny", "input": "a", "encoding_format": "int8"},
        "encoding_format: Input should be 'float' or 'base64'",
        "encoding_format",
    ),
    "unknown field": (
        {"model": "tiny", "input": "a", "inputs": 1},
        "Unrecognized request argument supplied: inputs",
        None,
    ),
    "user no text": ({"model": "tiny", "input": "a", "user": 1}, "user: Input should", "user"),
    "a list": ([], "the body: Input should be a valid dictionary", None),
}


def check(answer: Any, status: int, text: str, kind: str, param: Any, code: Any) -> None:
    assert answer.status_code == status, answer.text
    body = answer.json()
    assert list(body) == ["error"]
    error = body["error"]
    assert list(error) == ["message", "type", "param", "code"]
    assert text in error["message"]
    assert "\n" not in error["message"]
    assert (error["type"], error["param"], error["code"]) == (kind, param, code)


@pytest.mark.parametrize(("body", "text", "param"), REFUSED.values(), ids=REFUSED)
def test_embeddings_invalid_body_is_refused(
    client: TestClient, body: Any, text: str, param: Any
) -> None:
    answer = client.post("/v1/embeddings", content=orjson.dumps(body))
    check(answer, 400, text, "invalid_request_error", param, None)


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "text", "code"),
    [
        ("POST", "/v1/embeddings", b"{", 400, "the body is not JSON", None),
        (
            "POST",
            "/v1/embeddings",
            b'{"model": "other", "input": "a"}',
            404,
            "unknown model 'other'",
            "model_not_found",
        ),
        ("GET", "/v1/models/other", b"", 404, "unknown model 'other'", "model_not_found"),
        ("GET", "/v1/nothing", b"", 404, "GET /v1/nothing: Not Found", None),
        ("GET", "/v1", b"", 404, "GET /v1: Not Found", None),
        ("GET", "/v1/embeddings", b"", 405, "Method Not Allowed", None),
        ("POST", "/v1/models", b"", 405, "Method Not Allowed", None),
        ("POST", "/v1/embeddings", b" " * 2_000_001, 413, "larger than 2000000 bytes", None),
    ],
)
def test_errors_have_openai_body(
    client: TestClient, method: str, path: str, body: bytes, status: int, text: str, code: Any
) -> None:
    answer = client.request(method, path, content=body)
    param = "model" if code else None
    check(answer, status, text, "invalid_request_error", param, code)
    assert answer.headers["x-request-id"]


def test_errors_of_other_paths_keep_their_body(client: TestClient) -> None:
    assert client.get("/v10").json() == {"error": "GET /v10: Not Found"}
    assert client.get("/v2/nothing").json() == {"error": "GET /v2/nothing: Not Found"}


def test_embeddings_of_models_that_take_no_texts_or_ids_are_refused(
    start: Callable[..., TestClient], tmp_path: Path
) -> None:
    bare = start(write_encoder(tmp_path / "tiny", tokenizer=False))
    echo = start(write_model(tmp_path / "tiny.onnx", ECHO, tokenizer=True))
    for value in ("a", [2, 4, 3]):
        answer = ask(bare, value)
        check(answer, 404, "has no tokenizer.json", "invalid_request_error", None, None)
        answer = ask(echo, value)
        check(answer, 400, "expected int64 or int32", "invalid_request_error", "input", None)
    for client, status in ((bare, 404), (echo, 422)):
        assert client.post("/texts/embed", json={"inputs": "a"}).status_code == status


def test_embeddings_unexpected_exception_is_a_server_error(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.api.openai.respond", lambda *_: 1 / 0)
    check(ask(client, "a"), 500, "internal error", "server_error", None, None)
