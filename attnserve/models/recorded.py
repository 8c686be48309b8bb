"""The base classes of records: which fields their JSON has.

A field has the name of its JSON key, or the key as its alias. Most may be missing, because older
versions recorded fewer. Unknown fields are kept: a newer version may have written them.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from pydantic import BaseModel, ConfigDict, SerializerFunctionWrapHandler, model_serializer

__all__ = ["Recorded", "RecordedWithNulls", "without_empty"]


class Recorded(BaseModel, frozen=True):
    """Base class of record parts whose JSON contains only the given fields."""

    model_config = ConfigDict(extra="allow", validate_by_name=True, serialize_by_alias=True)

    @property
    def json_fields(self) -> Collection[str]:
        """The names of the fields that its JSON contains."""
        return self.model_fields_set

    @model_serializer(mode="wrap")
    def _serialized(self, to_content: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields = type(self).model_fields
        keys = {fields[name].alias or name if name in fields else name for name in self.json_fields}
        return {key: value for key, value in to_content(self).items() if key in keys}

    def to_json(self, *left_out: str) -> dict[str, Any]:
        """The fields as JSON values, without the named ones."""
        return self.model_dump(mode="json", exclude=set(left_out))

    @property
    def stated(self) -> dict[str, Any]:
        """The values that were given, by field."""
        return {name: getattr(self, name) for name in self.model_fields_set}


def without_empty(**values: Any) -> dict[str, Any]:
    """The values that are not 0, None or empty, for fields that are omitted otherwise."""
    return {name: value for name, value in values.items() if value}


class RecordedWithNulls(Recorded, frozen=True):
    """Base class of record parts whose JSON contains all fields; null without a value."""

    @property
    def json_fields(self) -> Collection[str]:
        return {*type(self).model_fields, *self.model_fields_set}
