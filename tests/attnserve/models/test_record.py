"""The record attnserve.json: fields, and the records of several models in a folder."""

from __future__ import annotations

import shutil
from pathlib import Path

import orjson
import pytest

from attnserve.models.artifact import open_artifact
from attnserve.models.record import write_record
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
        (b'{"normalize": "false"}', "'normalize'"),
        (b'{"normalize": 1}', "'normalize'"),
        (b'{"max_length": true}', "'max_length'"),
        (b'{"max_length": 0}', "'max_length'"),
        (b'{"pooling": "max"}', "'pooling'"),
        (b'{"id2label": "A"}', "'id2label'"),
        (b'{"activation": "tanh"}', "'activation'"),
        (b'{"template": "{query}"}', "'template'"),
        (b'{"template": "{query}{document}{query}"}', "'template'"),
        (b'{"first_position": -1}', "'first_position'"),
        (b'{"others": {"a.onnx": {"normalize": 0}}}', "'normalize'"),
        (b'{"others": {"a.onnx": []}}', "expected"),
        (b"[1]", "JSON object"),
        (b"null", "JSON object"),
        (b'{"lineage": 3}', "'lineage'"),
        (b'{"files": []}', "'files'"),
        (b'{"others": []}', "'others'"),
        (b'{"others": {"a.onnx": {"files": 3}}}', "'files'"),
        (b"[" * 100_000, "not valid JSON"),
    ],
)
def test_open_artifact_invalid_record_is_refused(plain: Path, content: bytes, value: str):
    (plain.parent / "attnserve.json").write_bytes(content)
    with raises(InvalidModel, "artifact.record", value):
        open_artifact(plain)


def test_open_artifact_record_can_be_written_as_json(plain: Path):
    """The service answers with parts of the record, and orjson writes no larger integers."""
    content = b'{"lineage": [{"before": 1000000000000000000000000000000}], "max_length": null}'
    (plain.parent / "attnserve.json").write_bytes(content)
    artifact = open_artifact(plain)
    assert orjson.loads(orjson.dumps(artifact.lineage)) == [{"before": 1e30}]
    assert artifact.max_length is None


def test_open_artifact_record_applies_to_its_model(plain: Path):
    write_record(plain.parent, {"pooling": "cls", "files": {"other.onnx": "0"}})
    assert open_artifact(plain).pooling == "cls"  # renamed: there is no other
    shutil.copy(plain, plain.with_name("other.onnx"))
    assert open_artifact(plain).pooling == "mean"
    assert open_artifact(plain.with_name("other.onnx")).pooling == "cls"
