"""Which fields the JSON of a record has."""

from __future__ import annotations

from typing import Annotated, Any

import pytest
from pydantic import Field

from attnserve.models.recorded import Always, Recorded


class Example(Recorded, frozen=True):
    required: int | None
    optional: Annotated[tuple[int, ...] | None, Field(alias="other")] = None
    number: int = 7
    always: Annotated[Always[tuple[int, ...]], Field(alias="forever")] = ()
    hidden: int = Field(default=0, exclude=True)


@pytest.mark.parametrize(
    ("given", "added"),
    [
        ({}, {}),
        ({"optional": None}, {}),
        ({"optional": ()}, {}),
        ({"other": [1]}, {"other": [1]}),
        ({"number": 7}, {"number": 7}),
        ({"number": 0}, {"number": 0}),
        ({"always": (2,)}, {"forever": [2]}),
        ({"hidden": 3}, {}),
        ({"unknown": None}, {"unknown": None}),
    ],
)
def test_to_json_has_the_fields_with_a_value(given: dict[str, Any], added: dict[str, Any]) -> None:
    written = Example.model_validate({"required": None, **given}).to_json()
    assert written == {"required": None, "forever": [], **added}
    assert Example.model_validate(written).to_json() == written
