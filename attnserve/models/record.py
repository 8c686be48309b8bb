"""The record of a model, attnserve.json: its fields, and records of several models in a folder."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

from graph_passes.errors import InvalidModel

__all__ = [
    "RECORD",
    "check_fields",
    "described_model",
    "merged_record",
    "parse_record",
    "read_record",
    "write_record",
]

RECORD = "attnserve.json"
"""The file name of the record."""

FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "lineage": (lambda value: isinstance(value, list), "a JSON list"),
    "files": (lambda value: isinstance(value, dict), "a JSON object"),
    "pooling": (
        lambda value: value in (None, "mean", "cls", "last", "none"), "mean, cls, last or none",
    ),
    "padding": (lambda value: value in (None, "right", "left"), "right or left"),
    "similarity": (lambda value: value in (None, "cosine", "dot"), "cosine or dot"),
    "lower_case": (lambda value: isinstance(value, bool | None), "true or false"),
    "truncation_side": (lambda value: value in (None, "right", "left"), "right or left"),
    "normalize": (lambda value: isinstance(value, bool | None), "true or false"),
    "max_length": (lambda value: _is_count(value), "a number of tokens above 0"),
    "dimensions": (lambda value: _is_count(value), "a number of dimensions above 0"),
    "output": (lambda value: isinstance(value, str | None), "the name of an output"),
    "prompts": (lambda value: _is_texts(value), "a JSON object of texts"),
    "default_prompt": (lambda value: isinstance(value, str | None), "a name of prompts"),
    "activation": (
        lambda value: value in (None, "sigmoid", "softmax", "identity"),
        "sigmoid, softmax or identity",
    ),
    "template": (
        lambda value: value is None or _is_template(value),
        "a text with {query} and {document}, once each",
    ),
    "first_position": (
        lambda value: value is None or (type(value) is int and value >= 0), "a position from 0",
    ),
    "id2label": (lambda value: isinstance(value, dict | list | None), "a JSON object or list"),
}  # fmt: skip
"""Fields of the record: what is valid, in code and in words."""


def merged_record(target: Path, record: dict[str, Any]) -> dict[str, Any]:
    """Add the records of other models in the folder of ``target`` under "others", by file name."""
    path = target.with_name(RECORD)
    if not path.is_file():
        return record
    earlier = parse_record(path)
    others: dict[str, Any] = earlier.pop("others", {})
    name = described_model(earlier, path.parent)
    if name is not None:
        others[name] = earlier
    others.pop(target.name, None)
    return {**record, "others": others} if others else record


def write_record(folder: Path, record: dict[str, Any]) -> None:
    """Write attnserve.json as indented JSON."""
    text = json.dumps(record, indent=2, ensure_ascii=False, allow_nan=False)
    (folder / RECORD).write_text(text + "\n", encoding="utf-8")


def read_record(model: Path) -> dict[str, Any]:
    """The record of one model; empty if attnserve.json describes only other models."""
    path = model.with_name(RECORD)
    if not path.is_file():
        return {}
    record = parse_record(path)
    others: dict[str, Any] = record.pop("others", {})
    if model.name in others:
        return others[model.name]
    return record if described_model(record, path.parent) in (model.name, None) else {}


def described_model(record: dict[str, Any], folder: Path) -> str | None:
    """The existing model in ``folder`` that the top level of the record describes, if any."""
    files = record.get("files", {"model.onnx": ""})  # exports have no "files"
    return next(
        (name for name in files if name.endswith(".onnx") and (folder / name).is_file()), None
    )


def parse_record(path: Path) -> dict[str, Any]:
    """The content of a file attnserve.json, with the records of other models under "others".

    Raises:
        InvalidModel: It cannot be read, or a value is invalid.
    """
    # orjson reads only what it can write: the service answers with parts of the record. Not at the
    # top of the module: Ctrl-C during this import ends Python with a segmentation fault.
    import orjson

    fix = "restore or remove the file"
    try:
        parsed: Any = orjson.loads(path.read_bytes())
    except (OSError, orjson.JSONDecodeError) as error:
        place = error.strerror if isinstance(error, OSError) else f"line {error.lineno}"
        raise InvalidModel(
            f"{path}: not valid JSON: {place}", fix, code="artifact.record"
        ) from error
    if not isinstance(parsed, dict):
        raise InvalidModel(f"{path}: expected a JSON object", fix, code="artifact.record")
    record = cast(dict[str, Any], parsed)
    others: Any = record.get("others", {})
    if not isinstance(others, dict) or not all(isinstance(one, dict) for one in others.values()):
        raise InvalidModel(
            f"{path}: 'others': expected a JSON object of objects", fix, code="artifact.record"
        )
    for entry in (record, *cast(dict[str, dict[str, Any]], others).values()):
        check_fields(path, entry, fix)
    return record


def check_fields(path: Path, entry: Mapping[str, Any], fix: str) -> None:
    """Check the values of a record, and that it can be written as JSON.

    Raises:
        InvalidModel: A value is invalid, holds lone surrogates, or is a number of over 64 bits.
    """
    import orjson

    for key, (is_valid, expected) in FIELDS.items():
        if key in entry and not is_valid(entry[key]):
            raise InvalidModel(
                f"{path}: {key!r} is {str(entry[key])[:80]!r}: expected {expected}",
                fix,
                code="artifact.record",
            )
    try:
        orjson.dumps(entry)
    except TypeError as error:
        raise InvalidModel(f"{path}: {error}", fix, code="artifact.record") from error


def _is_count(value: Any) -> bool:
    return value is None or (type(value) is int and value > 0)


def _is_texts(value: Any) -> bool:
    return value is None or (
        isinstance(value, dict)
        and all(isinstance(text, str) for text in cast(dict[str, Any], value).values())
    )


def _is_template(value: Any) -> bool:
    return isinstance(value, str) and value.count("{query}") == value.count("{document}") == 1
