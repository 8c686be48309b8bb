"""What all records share: their base class, and the parts that record measured values.

Older versions recorded fewer fields, so most may be missing. Fields that this version does not know
are kept: a newer one may have written them.

A measured value is its own record: ``Quality``, ``Share``, ``Fidelity``, ``Verification`` and
``ServedSpeed`` extend the class here whose name ends in ``Record`` by what is required when it is
measured and by what is not written. A field of a record holds such a value as it is, and writes the
fields of its declared class.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any, cast

from pydantic import (
    BaseModel,
    ConfigDict,
    FiniteFloat,
    SerializerFunctionWrapHandler,
    field_serializer,
    model_serializer,
    model_validator,
)

from attnserve.runtime.interleaved_timer import Speedup

__all__ = [
    "FidelityRecord",
    "Measured",
    "OutputRecord",
    "QualityRecord",
    "Recorded",
    "ServedSpeedRecord",
    "ShapeLatency",
    "ShareRecord",
    "Whole",
    "present",
]


class Recorded(BaseModel, frozen=True):
    """Base class of record parts whose JSON contains only the given fields."""

    model_config = ConfigDict(extra="allow")

    @property
    def json_fields(self) -> Collection[str]:
        """The names of the fields that its JSON contains."""
        return self.model_fields_set

    @model_serializer(mode="wrap")
    def _serialized(self, to_content: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {name: value for name, value in to_content(self).items() if name in self.json_fields}

    def to_json(self, *left_out: str) -> dict[str, Any]:
        """The fields as JSON values, without the named ones."""
        return self.model_dump(mode="json", exclude=set(left_out))

    @property
    def stated(self) -> dict[str, Any]:
        """The values that were given, by field."""
        return {name: getattr(self, name) for name in self.model_fields_set}


def present(**values: Any) -> dict[str, Any]:
    """The values that are neither None nor empty: fields that are written only with a value."""
    return {name: value for name, value in values.items() if value}


class Whole(Recorded, frozen=True):
    """Base class of record parts whose JSON contains all fields; null without a value."""

    @property
    def json_fields(self) -> Collection[str]:
        return {*type(self).model_fields, *self.model_fields_set}


class QualityRecord(Recorded, frozen=True):
    """The recorded part of ``checks.quality.Quality``: the quality of one output.

    Other measures of the same output are further fields, by their names.
    """

    measure: str
    value: FiniteFloat | None = None
    lower: FiniteFloat | None = None
    ci95: tuple[FiniteFloat, FiniteFloat] | None = None
    p5: FiniteFloat | None = None
    constant: FiniteFloat | None = None
    rows: int | None = None
    split: str | None = None
    output: str = ""
    file: str | None = None
    lengths: str | None = None
    same_outputs: tuple[str, ...] = ()
    not_finite_rows: tuple[int, ...] = ()
    excluded_rows: tuple[int, ...] = ()


class Measured(Recorded, frozen=True):
    """Base class of records with the qualities of a model.

    Attributes:
        quality: The lowest of them; None if none was measured.
        qualities: All of them, by output, file and lengths of texts, the lowest first. They are
            written only if there are several.
    """

    quality: QualityRecord | None = None
    qualities: tuple[QualityRecord, ...] = ()

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, content: Any) -> Any:
        """Add the one field that follows from the other."""
        if not isinstance(content, dict):
            return content
        fields = cast("dict[str, Any]", content)
        quality = fields.get("quality")
        qualities = fields.get("qualities")
        if qualities and quality is None and isinstance(qualities, list | tuple):
            return {**fields, "quality": cast("Sequence[Any]", qualities)[0]}
        return {**fields, "qualities": (quality,)} if quality and not qualities else fields

    @property
    def json_fields(self) -> Collection[str]:
        names = super().json_fields
        return names if len(self.qualities) > 1 else {*names} - {"qualities"}


class ShareRecord(Recorded, frozen=True):
    """The recorded part of ``checks.scores.Share``: the kept share of a task's score."""

    value: FiniteFloat
    standard_error: FiniteFloat | None = None
    rows: int | None = None


class OutputRecord(Recorded, frozen=True):
    """The record of ``checks.compare.OutputFidelity``: the errors of one output.

    An infinite error is null in JSON.
    """

    name: str = ""
    max_abs_error: float | None = None
    mean_abs_error: float | None = None
    relative_error: float | None = None
    mean_cosine: float | None = None
    min_cosine: float | None = None
    not_finite_rows: tuple[int, ...] = ()
    excluded_rows: tuple[int, ...] = ()
    same_outputs: tuple[str, ...] = ()

    @field_serializer("max_abs_error", "mean_abs_error", "relative_error")
    def _finite_or_null(self, error: float | None) -> float | None:
        return None if error is None or math.isinf(error) else error


class FidelityRecord(Measured, frozen=True):
    """The record of ``checks.compare.Fidelity``: a comparison with the original.

    Attributes:
        share: The kept share of a task's score, in plans.
    """

    outputs: tuple[OutputRecord, ...] = ()
    mean_cosine: FiniteFloat | None = None
    min_cosine: FiniteFloat | None = None
    data: str | None = None
    share: ShareRecord | None = None


class ShapeLatency(Whole, frozen=True):
    """Latencies in milliseconds of the new model and the original at one shape, and their ratio.

    They are medians of interleaved runs.
    """

    batch: int
    sequence: int
    original_ms: FiniteFloat
    ms: FiniteFloat
    speedup: FiniteFloat


class ServedSpeedRecord(Recorded, frozen=True):
    """The recorded part of ``planning.served_speed.ServedSpeed``: the speed-ups as served.

    Attributes:
        shapes: (batch, length) of each run; ratios are geometric means over them.
        phase: The phase of the runs, see ``Workload``.
        fusion: Speed-up of the fused original over the exported one.
        precision: Speed-up of the fused original in another precision over float32; None in
            float32.
        removal: Speed-up of the rewritten model over the fused original in its precision; None if
            nothing was removed or approximated.
        served: Speed-up of the rewritten model over the fused original in float32.
        served_by_shape: The value of ``served`` at each shape.
    """

    shapes: tuple[tuple[int, int], ...] = ()
    phase: str = "sequence"
    fusion: Speedup | None = None
    precision: Speedup | None = None
    removal: Speedup | None = None
    served: Speedup | None = None
    served_by_shape: tuple[FiniteFloat, ...] = ()
