"""The record attnserve.json: fields, and the records of several models in a folder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, cast

import orjson
import pytest

from attnserve.models.artifact import open_artifact
from attnserve.models.lineage import OptimizeEntry, RecoverEntry
from attnserve.models.record import Record, parse_record, write_record
from attnserve.planning.plans.plan_file import PlanRecord
from graph_passes.errors import InvalidModel
from tests.errors import raises


@pytest.mark.parametrize(
    ("content", "value"),
    [
        (b"{", "not valid JSON"),
        (b"", "not valid JSON"),
        (b"\xff\xfe\x00", "not valid JSON"),
        (b'{"loss": NaN}', "not valid JSON"),
        (b'{"source": "\\ud800"}', "not valid JSON"),
        (b'{"normalize": "false"}', "normalize"),
        (b'{"normalize": 1}', "normalize"),
        (b'{"max_length": true}', "max_length"),
        (b'{"max_length": 0}', "max_length"),
        (b'{"pooling": "max"}', "pooling"),
        (b'{"id2label": "A"}', "id2label"),
        (b'{"activation": "tanh"}', "activation"),
        (b'{"template": "{query}"}', "template"),
        (b'{"template": "{query}{document}{query}"}', "template"),
        (b'{"first_position": -1}', "first_position"),
        (b'{"others": {"a.onnx": {"normalize": 0}}}', "normalize"),
        (b'{"others": {"a.onnx": []}}', "others.a.onnx"),
        (b"[1]", "JSON object"),
        (b"null", "JSON object"),
        (b'{"lineage": 3}', "lineage"),
        (b'{"lineage": [{}]}', "lineage.0.rewrite"),
        (b'{"lineage": [{"rewrite": "x", "before": {"macs": 1}}]}', "lineage.0.before.parameters"),
        (b'{"lineage": [{"rewrite": "x", "steps": [{"rewrite": "y"}]}]}', "0.steps.0.block"),
        (b'{"lineage": [{"rewrite": "x", "search": {"speeds": [{"ms": 1}]}}]}', "speeds.0.batch"),
        (b'{"files": []}', "files"),
        (b'{"others": []}', "others"),
        (b'{"others": {"a.onnx": {"files": 3}}}', "files"),
        (b"[" * 100_000, "not valid JSON"),
    ],
)
def test_open_artifact_invalid_record_is_refused(plain: Path, content: bytes, value: str):
    (plain.parent / "attnserve.json").write_bytes(content)
    with raises(InvalidModel, "artifact.record", value):
        open_artifact(plain)


def test_open_artifact_record_can_be_written_as_json(plain: Path):
    """The service answers with parts of the record, and orjson writes no larger integers."""
    content = b'{"rewrite": "x", "later": 1000000000000000000000000000000}'
    content = b'{"lineage": [%b], "max_length": null}' % content
    (plain.parent / "attnserve.json").write_bytes(content)
    artifact = open_artifact(plain)
    assert orjson.loads(orjson.dumps(artifact.lineage[0].to_json())) == {
        "rewrite": "x",
        "later": 1e30,
        **dict.fromkeys(("break_even_sequence", "served_speedup", "speedups")),
        "steps": [],
        "warnings": [],
    }
    assert artifact.max_length is None


def test_open_artifact_record_applies_to_its_model(plain: Path):
    write_record(plain.parent, Record(pooling="cls", files={"other.onnx": "0"}))
    assert open_artifact(plain).pooling == "cls"  # renamed: there is no other
    shutil.copy(plain, plain.with_name("other.onnx"))
    assert open_artifact(plain).pooling == "mean"
    assert open_artifact(plain.with_name("other.onnx")).pooling == "cls"


RECORDS = Path(__file__).parents[2] / "fixtures" / "records"
"""Records and plans that ``attnserve`` 0.1 and 2.0 wrote for tests/fixtures/bert."""

RENAMED = {"mean output cosine": "cosine"}
"""Values of 0.1 by their present names."""


def lost(before: Any, after: Any, place: str = "") -> list[str]:
    """The places of values that are missing or differ."""
    if isinstance(before, dict):
        fields = cast(dict[str, Any], before)
        return [
            one for key in fields for one in lost(fields[key], after.get(key), f"{place}.{key}")
        ]
    if isinstance(before, list):
        items = zip(cast(list[Any], before), after, strict=True)
        return [one for a, b in items for one in lost(a, b, f"{place}[]")]
    return [] if after == RENAMED.get(before, before) else [place]


@pytest.mark.parametrize("path", sorted(RECORDS.glob("*.json")), ids=lambda path: path.stem)
def test_records_of_earlier_versions_are_read_and_written_without_loss(path: Path):
    content = json.loads(path.read_text())
    is_plan = path.stem.endswith("-plan")
    read = PlanRecord.model_validate(content) if is_plan else parse_record(path)
    again = read.to_json()
    assert lost(content, again) == []
    if path.stem.startswith("2.0"):
        assert again == content, "nothing is added either"
    if isinstance(read, Record):
        for entry in read.lineage:
            assert isinstance(entry, RecoverEntry if entry.rewrite == "recover" else OptimizeEntry)
            assert entry.before


def with_unknown(content: Any) -> Any:
    """The content with a field of a later version in each of its objects."""
    if isinstance(content, dict):
        fields = cast(dict[str, Any], content).items()
        return {**{key: with_unknown(value) for key, value in fields}, "later": [1]}
    return [with_unknown(one) for one in content] if isinstance(content, list) else content


@pytest.mark.parametrize("path", sorted(RECORDS.glob("2.0-*.json")), ids=lambda path: path.stem)
def test_fields_of_later_versions_are_kept(path: Path):
    content = json.loads(path.read_text())
    for names in ("versions", "files", "plan"):  # names and values of others
        content.pop(names, None)
    for entry in content.get("lineage", []):
        entry.pop("versions")
    content = with_unknown(content)
    read = PlanRecord if path.stem.endswith("-plan") else Record
    assert lost(content, read.model_validate(content).to_json()) == []


@pytest.mark.parametrize(
    ("mixing", "place"),
    [
        ({"chosen": "low_rank", "why": "", "forms": []}, "lineage.0.mixing.chosen"),
        ({"chosen": "own", "why": "", "forms": [{"form": "low_rank"}]}, "mixing.forms.0.form"),
    ],
)
def test_open_artifact_unknown_kind_of_mixing_is_refused(
    plain: Path, mixing: dict[str, Any], place: str
):
    content = {"lineage": [{"rewrite": "collaborate", "mixing": mixing}]}
    (plain.parent / "attnserve.json").write_text(json.dumps(content))
    with raises(InvalidModel, "artifact.record", place, "low_rank", "dense", "own") as caught:
        open_artifact(plain)
    assert caught.value.exit_code == 2
