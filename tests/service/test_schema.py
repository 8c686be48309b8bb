"""Each route conforms to the OpenAPI document, for valid and invalid requests."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.core.result import Ok
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from starlette.testclient import TestClient

from service.api.tei import PREFIXES
from tests.attack.requests import SPARSE
from tests.service.tiny import (
    ids_request,
    write_classifier,
    write_encoder,
    write_model,
    write_reranker,
)

CASES = 12
ABLE = {"predict": "classes", "rerank": "pairs", "embed_sparse": "sparse"}
"""The model of ``write_models`` for the last part of a path; "tiny" for others."""

CONFORMS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]


def error_has_its_protocols_form(path: str, content: bytes) -> None:
    body = orjson.loads(content)
    if f"{path}/".startswith(tuple(f"{prefix}/" for prefix in PREFIXES)):
        assert list(body) == ["error", "error_type"], path
        assert isinstance(body["error"], str)
        return
    assert list(body) == ["error"], path
    if path.startswith(("/v1/", "/v2/rerank", "/embeddings")):
        assert list(body["error"]) == ["message", "type", "param", "code"]
        assert isinstance(body["error"]["message"], str)
    else:
        assert isinstance(body["error"], str)


def write_models(folder: Path) -> Path:
    """An encoder, a classifier, a reranker and a sparse model."""
    folder.mkdir()
    write_encoder(folder / "tiny")
    write_classifier(folder / "classes", id2label={"0": "A", "1": "B", "2": "C"})
    write_reranker(folder / "pairs", max_length=64)
    (folder / "sparse").mkdir()
    write_model(folder / "sparse" / "model.onnx", SPARSE, tokenizer=True)
    (folder / "sparse" / "attnserve.json").write_text(json.dumps({"task": "fill-mask"}))
    return folder


def call_often(
    client: TestClient, operation: schemathesis.APIOperation, tried: set[tuple[str, int]]
) -> None:
    """Check the answers to valid and invalid calls; add (route, status) of each to ``tried``."""
    task = operation.path.rpartition("/")[2]
    able = ABLE.get(task, "tiny")
    # Most bodies that are made up for tensors are malformed.
    cases = CASES * (8 if task == "infer" else 2 if task in ABLE else 1)
    modes = [GenerationMode.POSITIVE, GenerationMode.NEGATIVE]

    @settings(max_examples=cases, suppress_health_check=list(HealthCheck), deadline=None)
    @given(
        case=st.one_of([operation.as_strategy(generation_mode=mode) for mode in modes]),
        # Few names that are made up are those of a model.
        model=st.sampled_from([able, None, able, "tiny", *ABLE.values()]),
    )
    def check(case: schemathesis.Case, model: str | None) -> None:
        if model is not None:
            names = {"name": model, "version": "1"}
            case.path_parameters = {key: names[key] for key in case.path_parameters}
            if isinstance(case.body, dict):
                named = {"model": model, "version": "1"}
                case.body |= {key: named[key] for key in named if key in case.body}
                if task in ABLE:
                    case.body["model"] = model
        answer = case.call(session=client)
        case.validate_response(answer, checks=CONFORMS)
        if answer.status_code >= 400:
            error_has_its_protocols_form(case.path, answer.content)
        tried.add((f"{case.method} {case.path}", answer.status_code))
        if task == "unload" and answer.status_code == 200:
            name = case.path_parameters["name"]
            assert client.post(f"/v2/repository/models/{name}/load").status_code == 200

    check()


@pytest.mark.fuzz
def test_routes_conform_to_openapi_document(
    start: Callable[..., TestClient], tmp_path: Path
) -> None:
    client = start(write_models(tmp_path / "models"), default_model="tiny")
    document = schemathesis.openapi.from_asgi("/openapi.json", client.app)
    tried: set[tuple[str, int]] = set()
    for result in document.get_all_operations():
        assert isinstance(result, Ok)
        call_often(client, result.ok(), tried)
    for route in ("/embed", "/texts/embed", "/texts/predict", "/v2/repository/index"):
        assert (f"POST {route}", 200) in tried, route
    for route in ABLE:
        assert {(f"POST /{route}", 200), (f"POST /models/{{name}}/{route}", 200)} <= tried, route
        assert (f"POST /{route}", 424) in tried, "also models without the task"
    assert ("POST /v1/embeddings", 400) in tried
    infer = ("/v2/models/{name}/infer", "/v2/models/{name}/versions/{version}/infer")
    assert any((f"POST {route}", 422) in tried for route in infer), "both share one endpoint"
    assert ("POST /v2/repository/models/{name}/unload", 200) in tried


def test_successful_answers_conform_to_openapi_document(
    start: Callable[..., TestClient], encoder: Path
) -> None:
    """What is made up is seldom good."""
    client = start(encoder)
    document = schemathesis.openapi.from_asgi("/openapi.json", client.app)
    infer, binary = "/v2/models/{name}/infer", {"parameters": {"binary_data_output": True}}
    bodies: list[tuple[str, dict[str, Any]]] = [
        (infer, ids_request([2, 4, 3])),
        (infer, ids_request([2, 4, 3]) | binary),
        ("/v1/embeddings", {"model": "tiny", "input": "a"}),
        ("/v1/embeddings", {"model": "tiny", "input": [2, 3], "encoding_format": "base64"}),
    ]
    for path, body in bodies:
        case = document[path]["POST"].Case(
            path_parameters={"name": "tiny"}, body=body, media_type="application/json"
        )
        answer = case.call(session=client)
        assert answer.status_code == 200
        case.validate_response(answer, checks=CONFORMS)


def test_openapi_document_declares_every_path_parameter_once(client: TestClient) -> None:
    for path, operations in client.get("/openapi.json").json()["paths"].items():
        for method, operation in operations.items():
            named = [(one["in"], one["name"]) for one in operation.get("parameters", ())]
            in_path = [name for where, name in named if where == "path"]
            assert len(set(named)) == len(named), (method, path)
            assert sorted(in_path) == sorted(re.findall(r"{(\w+)}", path)), (method, path)


def test_ready_of_unloaded_model_conforms_to_openapi_document(
    start: Callable[..., TestClient], tmp_path: Path
) -> None:
    for name in ("one", "two"):
        write_encoder(tmp_path / name)
    client = start(tmp_path)
    assert client.post("/v2/repository/models/one/unload").status_code == 200
    document = schemathesis.openapi.from_asgi("/openapi.json", client.app)
    case = document["/v2/models/{name}/ready"]["GET"].Case(path_parameters={"name": "one"})
    answer = case.call(session=client)
    assert answer.status_code == 503 and list(answer.json()) == ["error"]
    case.validate_response(answer, checks=CONFORMS[1:])
