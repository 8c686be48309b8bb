"""Our OpenAPI document beside that of text-embeddings-inference, route by route.

Each difference has a row with its reason in a table of docs/reference/tei.md.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

ROOT = Path(__file__).parents[2]
THEIRS = ROOT.parent / "shared" / "protocols" / "tei-openapi.json"
PAGE = ROOT / "docs" / "reference" / "tei.md"


def resolved(document: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    while True:
        if "$ref" in schema:
            schema = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
        elif len(schema.get("allOf", ())) == 1:
            schema = schema["allOf"][0]
        else:
            return schema


def shape(document: dict[str, Any], schema: dict[str, Any]) -> Any:
    """The JSON type of a schema: a name, [item], fields by name, or a sorted set of forms."""
    schema = resolved(document, schema)
    forms = schema.get("oneOf", schema.get("anyOf"))
    if forms is not None:
        found = [shape(document, form) for form in forms]
        found = [form for form in found if form != "null"]
        flat = [one for form in found for one in (form["or"] if is_union(form) else [form])]
        unique = {json.dumps(one, sort_keys=True): one for one in flat}
        return next(iter(unique.values())) if len(unique) == 1 else {
            "or": [unique[key] for key in sorted(unique)]
        }  # fmt: skip
    if "enum" in schema:
        return " ".join(sorted({str(one).capitalize() for one in schema["enum"]}))
    if schema.get("type") == "array":
        return [shape(document, schema["items"])]
    if "properties" in schema:
        return {name: shape(document, one) for name, one in sorted(schema["properties"].items())}
    return schema.get("type", "any")


def is_union(form: Any) -> bool:
    return isinstance(form, dict) and list(form) == ["or"]


def default(schema: dict[str, Any]) -> Any:
    """The default; TEI's document writes it as text."""
    value = schema.get("default")
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return value.lower() if isinstance(value, str) else value


def fields(document: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    """Each field of a request: (required, default, type); the forms of the type if several."""
    schema = resolved(document, schema)
    found: dict[str, Any] = {}
    for name, field in schema["properties"].items():
        value = default(field)
        found[name] = (name in schema.get("required", ()), value, shape(document, field))
    return found


def body(operation: dict[str, Any]) -> dict[str, Any]:
    return operation["requestBody"]["content"]["application/json"]["schema"]


def answer(operation: dict[str, Any], status: str) -> dict[str, Any] | None:
    responses = operation["responses"]
    found = responses.get(status) or responses.get(f"{status[0]}XX") or {}
    return found.get("content", {}).get("application/json", {}).get("schema")


def differences(ours: dict[str, Any], theirs: dict[str, Any]) -> set[str]:
    """The routes, fields and answers that differ; a field stands for all routes that have it."""
    found: set[str] = set()
    for path, operations in theirs["paths"].items():
        for method, wanted in operations.items():
            given = ours["paths"].get(path, {}).get(method)
            if given is None:
                found.add(f"{method.upper()} {path}")
                continue
            if "requestBody" in wanted:
                mine, its = fields(ours, body(given)), fields(theirs, body(wanted))
                where = f"{path} " if path.startswith("/v1") else ""
                found |= {
                    f"{where}{n}" for n in mine.keys() | its.keys() if mine.get(n) != its.get(n)
                }
            for status in wanted["responses"]:
                mine, its = answer(given, status), answer(wanted, status)
                if (mine and shape(ours, mine)) != (its and shape(theirs, its)):
                    found.add(f"{path} {'errors' if status != '200' else 'answer'}")
    return found


def test_documents_differ_only_where_the_page_says_so(client: TestClient) -> None:
    if not THEIRS.is_file():
        pytest.skip(f"needs TEI's OpenAPI document: {THEIRS.name}")
    ours = client.get("/openapi.json").json()
    section = (
        PAGE.read_text().partition("## Differences from the document")[2].partition("\n## ")[0]
    )
    rows = re.findall(r"^\| (`.+?) \| (.+?) \|$", section, re.MULTILINE)
    assert all(reason.strip() for _, reason in rows)
    stated = {name for names, _ in rows for name in re.findall(r"`([^`]+)`", names)}
    assert differences(ours, json.loads(THEIRS.read_text())) == stated


def test_every_route_of_the_document_exists_below_a_model(client: TestClient) -> None:
    paths = client.get("/openapi.json").json()["paths"]
    routes = re.findall(r"/(\w+)", " ".join(p for p in paths if p.startswith("/models/")))
    assert {"embed", "embed_all", "embed_sparse", "rerank", "predict", "similarity", "tokenize",
            "decode", "info", "health"} <= set(routes)  # fmt: skip


# The metrics of TEI 1.9.3: router/src/http/server.rs, core/src/infer.rs, core/src/queue.rs and
# core/src/tokenization.rs.
TEI_METRICS = {
    *(f"te_request_{what}" for what in ("count", "success", "failure", "duration", "input_length")),
    *(f"te_{task}_{what}" for task in ("embed", "predict") for what in ("count", "success")),
    *(
        f"te_{of}_{part}duration"
        for of in ("request", "embed", "predict")
        for part in ("", "tokenization_", "queue_", "inference_")
    ),
    "te_queue_size",
    "te_batch_next_size",
    "te_batch_next_tokens",
}


def test_table_of_metrics_has_those_of_tei_and_names_existing_series(client: TestClient) -> None:
    section = PAGE.read_text().partition("\n## Metrics")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`.+) \| (.+) \|$", section, re.MULTILINE)
    theirs = [name for left, _ in rows for name in re.findall(r"`(\w+)`", left)]
    assert sorted(theirs) == sorted(TEI_METRICS)

    answer = client.post("/embed", json={"inputs": "a"})
    text = client.get("/metrics").text
    series = dict(re.findall(r"^# TYPE (\w+) (\w+)$", text, re.MULTILINE))
    stages = {f'stage="{stage}"' for stage in re.findall(r'stage="(\w+)"', text)}
    known = {
        *series,
        *(f"{name}_sum" for name, kind in series.items() if kind == "histogram"),
        *stages,
        *answer.headers,
    }
    for left, right in rows:
        ours = re.findall(r"`([^`]+)`", right)
        assert ours and set(ours) <= known, left
