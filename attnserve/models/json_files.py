"""Read JSON files beside a model."""

from __future__ import annotations

import json
import reprlib
from pathlib import Path
from typing import Any, cast

from pydantic import ValidationError

from graph_passes.errors import InvalidModel

__all__ = ["first_problem", "json_object", "read_json"]


def read_json(path: Path) -> Any:
    """The content of a JSON file beside a model.

    Raises:
        InvalidModel: The file cannot be read, or is nested too deeply.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidModel(
            f"{path}: not valid JSON: {error}", "copy or remove the file", code="artifact.json"
        ) from error


def json_object(path: Path) -> dict[str, Any]:
    """The content of a JSON file beside a model; empty if it is not an object.

    Raises:
        InvalidModel: The file is not JSON.
    """
    content = read_json(path)
    return cast(dict[str, Any], content) if isinstance(content, dict) else {}


def first_problem(error: ValidationError) -> str:
    """The first error of a validation: place, value, and the expected value."""
    first = error.errors(include_url=False)[0]
    # Members of a union are named by their types, for example "list[any]".
    parts = [str(part) for part in first["loc"] if not str(part).endswith("]")]
    place = ".".join(parts)[:100] or "content"
    return f"{place} is {reprlib.repr(first['input'])}: {first['msg']}"
