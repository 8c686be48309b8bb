"""Read JSON files beside a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from graph_passes.errors import InvalidModel

__all__ = ["read_json"]


def read_json(path: Path) -> Any:
    """The content of a JSON file beside a model.

    Raises:
        InvalidModel: It cannot be read, or is nested too deeply.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidModel(
            f"{path}: not valid JSON: {error}", "copy or remove the file", code="artifact.json"
        ) from error
