"""The base class of records, and the rule which fields their JSON has.

A field has the name of its JSON key, or the key as its alias. Most may be missing, because older
versions recorded fewer. Unknown fields are kept: a newer version may have written them.

JSON has the fields that were given a value. None is no value, and neither is an empty text, list or
mapping: such a field is left out, unless it is required or its type is ``Always``. A field with
``exclude=True`` is a result that is not recorded.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, SerializerFunctionWrapHandler, model_serializer

__all__ = ["Always", "Recorded"]

T = TypeVar("T")

_ALWAYS = object()
Always = Annotated[T, _ALWAYS]
"""The type of a field that JSON has also without a value, then as null or empty."""

NO_VALUES = (None, "", (), [], {})


class Recorded(BaseModel, frozen=True):
    """Base class of records and their parts."""

    model_config = ConfigDict(extra="allow", validate_by_name=True, serialize_by_alias=True)

    @model_serializer(mode="wrap")
    def _serialized(self, to_content: SerializerFunctionWrapHandler) -> dict[str, Any]:
        optional = {
            field.alias or name: name
            for name, field in type(self).model_fields.items()
            if not (field.is_required() or _ALWAYS in field.metadata)
        }
        stated = self.stated
        return {
            key: value
            for key, value in to_content(self).items()
            if key not in optional or stated.get(optional[key]) not in NO_VALUES
        }

    def to_json(self, *left_out: str) -> dict[str, Any]:
        """The fields as JSON values, without the named ones."""
        return self.model_dump(mode="json", exclude=set(left_out))

    @property
    def stated(self) -> dict[str, Any]:
        """The values that were given, by field."""
        return {name: getattr(self, name) for name in self.model_fields_set}
