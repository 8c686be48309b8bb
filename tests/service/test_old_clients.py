"""The calls in the documentation of version 1 (0.1.0): they work, or CHANGELOG.md names them."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from starlette.testclient import TestClient

from service.app import create_app
from service.settings import Settings
from tests.service.test_examples import Example, is_answer, parse_examples, write_bert

CHANGELOG = Path(__file__).parents[2] / "CHANGELOG.md"

# The examples of docs/howto/serve.md and README.md at commit 2696383b.
VERSION_1 = """
curl localhost:8000/embed -d '{"inputs": ["one text", "and another"]}'
# {"embeddings":[[...],[...]],"model":"smaller","usage":{"tokens":8}}
curl localhost:8000/similarity -d '{"source": "one text", "targets": ["one text", "another"]}'
# {"similarities":[...,...],"model":"smaller","usage":{"tokens":...}}
curl localhost:8000/tokenize -d '{"inputs": "one text"}'
# {"tokens":[[101,2028,3793,102]],"model":"smaller","usage":{"tokens":4}}
curl localhost:8000/v1/embeddings -d '{"model": "smaller", "input": [101, 2028, 3793, 102]}'
# {"object":"list","data":[{"object":"embedding","index":0,"embedding":[...]}],"model":"smaller",
#  "usage":{"prompt_tokens":4,"total_tokens":4}}
curl localhost:8000/v2/models/smaller/infer -d '{"inputs": [
  {"name": "input_ids", "shape": [1, 4], "datatype": "INT64", "data": [101, 2028, 3793, 102]},
  {"name": "attention_mask", "shape": [1, 4], "datatype": "INT64", "data": [1, 1, 1, 1]},
  {"name": "token_type_ids", "shape": [1, 4], "datatype": "INT64", "data": [0, 0, 0, 0]}]}'
# {"model_name":"smaller","model_version":"1","parameters":{"queue_ms":...},
#  "outputs":[{"name":"last_hidden_state","shape":[1,4,...],"datatype":"FP32","data":[...]}]}
curl localhost:8000/v2/models/smaller/stats
# {"model_stats":[{"name":"smaller","version":"1","last_inference":...,"inference_count":...}]}
curl -X POST localhost:8000/v2/repository/models/smaller/load
#
curl -X POST localhost:8000/v2/repository/index
# [{"name":"smaller","version":"1","state":"READY","reason":""}]
"""
MOVED = ("/embed", "/predict", "/similarity", "/tokenize")
"""Paths that are those of text-embeddings-inference now. The former ones are below /texts."""


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    folder = write_bert(tmp_path_factory.mktemp("models") / "smaller")
    with TestClient(create_app(Settings(model=folder, probe=False))) as client:
        yield client


def path_of(example: Example) -> str:
    (address,) = [word for word in shlex.split(example.command) if word.startswith("localhost")]
    return address.removeprefix("localhost:8000")


def replay(client: TestClient, example: Example, path: str) -> httpx.Response:
    """Send the request of a command to ``path``, as curl does."""
    words = shlex.split(example.command)
    if "-d" not in words:
        return client.request("POST" if "-X" in words else "GET", path)
    headers = {"content-type": "application/x-www-form-urlencoded", "accept": "*/*"}
    return client.post(path, content=words[words.index("-d") + 1], headers=headers)


@pytest.mark.parametrize("example", parse_examples(VERSION_1), ids=path_of)
def test_old_example_is_answered_as_documented(client: TestClient, example: Example) -> None:
    path = path_of(example)
    answer = replay(client, example, f"/texts{path}" if path in MOVED else path)
    assert answer.status_code == 200, answer.text
    assert is_answer(example, answer.text), answer.text


def test_old_headers_of_costs_are_in_the_answers(client: TestClient) -> None:
    body = {"inputs": "one text"}
    for path in ("/embed", "/texts/embed"):
        headers = client.post(path, json=body).headers
        assert headers["x-tokens"] == "4"
        assert {"x-queue-ms", "x-tokenize-ms", "x-compute-ms", "x-total-ms", "x-macs", "x-flops",
                "x-rss-bytes", "x-model", "x-request-id"} <= set(headers)  # fmt: skip


@pytest.mark.parametrize("path", MOVED)
def test_moved_routes_are_named_in_the_changelog(client: TestClient, path: str) -> None:
    paths = client.get("/openapi.json").json()["paths"]
    assert {path, f"/texts{path}"} <= set(paths)
    release = CHANGELOG.read_text().partition("\n## [0.1.0]")[0]
    assert f"`{path}`" in release.partition("### For users of version 1")[2].partition("\n### ")[0]
    changed = release.partition("\n### Changed")[2].partition("\n### ")[0]
    assert f"`{path}`" in changed and f"`/texts{path}`" in changed


@pytest.mark.parametrize(
    "body", [{"source": "a", "targets": ["a"]}, {"pairs": [["a", "b"]]}], ids=["source", "pairs"]
)
def test_old_similarity_on_the_route_of_tei_names_the_missing_field(
    client: TestClient, body: dict[str, object]
) -> None:
    refused = client.post("/similarity", json=body)
    assert refused.status_code == 422
    assert refused.json()["error"].startswith("inputs: Field required")
