"""Results of checks and timings, as values for records.

Fields that are not recorded are excluded from JSON. A number that the record of an older version
lacks is NaN, and is not written again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NamedTuple, cast

from pydantic import BeforeValidator, Field, FiniteFloat, PlainSerializer, model_validator

from attnserve.context import Device
from attnserve.literals import Precision
from attnserve.models.recorded import Always, Recorded
from attnserve.runtime.times import Speedup
from graph_passes.analysis.workload import Phase, Workload

__all__ = [
    "Fidelity",
    "Losses",
    "Measured",
    "OutputFidelity",
    "Quality",
    "RecordedFidelity",
    "ServedSpeed",
    "ShapeLatency",
    "Share",
    "Subject",
]


class Losses(NamedTuple):
    """The loss that a goal limits, 0 for equal outputs; see ``checks.quality.limited_losses``.

    Attributes:
        measured: By the measured values, which verify a model.
        bounded: By the bounds of their intervals, which choose a model.
    """

    measured: float = math.inf
    bounded: float = math.inf


UNKNOWN = Losses()
"""The losses of a value that was read from a record, which does not have them."""


class Subject(NamedTuple):
    """The output and the texts that a quality is measured on.

    Attributes:
        output: The name of the output.
        file: The file of the texts, if there are several; else empty.
        lengths: The lengths of the texts, if short and long ones are measured separately; else
            empty.
    """

    output: str
    file: str
    lengths: str


class Quality(Recorded, frozen=True):
    """The measured quality of one output on held-out texts.

    Other measures of the same output are further fields, by their names: ``also``.

    Attributes:
        measure: The name of the measure.
        value: 1 if both models give the same.
        lower: The lower end of the one-sided 95 % interval; ``value`` for less than
            ``measures.MIN_ROWS`` texts.
        ci95: The two-sided interval; None for as few texts.
        p5: The 5th percentile of the measure of single texts.
        constant: The value of a constant predictor.
        rows: The number of texts.
        documents: The number of documents that the texts search, if the data has a split of queries
            and documents.
        split: The inputs that it is measured on; see ``Split``. JSON has "prove" for "verify".
        output: The name of the output.
        file: The file of the texts, if there are several.
        lengths: The lengths of the texts, if short and long texts are measured separately.
        same_outputs: Names of other outputs that are the same value.
        not_finite_rows: Rows, counted from 0 in the order in which they were compared, with NaN or
            infinity where the original has none.
        excluded_rows: Rows with NaN in the original's output, which are left out.
        losses: The losses that a goal limits; not recorded.
        is_finite: Whether the new model is finite where the original is; not recorded.
    """

    measure: str
    value: float
    lower: float = math.nan
    ci95: Always[tuple[float, float] | None] = None
    p5: float = math.nan
    constant: float = math.nan
    rows: int = 0
    split: Annotated[
        str,
        BeforeValidator(lambda split: "verify" if split == "prove" else split),
        PlainSerializer(lambda split: "prove" if split == "verify" else split),
    ] = ""
    output: str = ""
    file: str = ""
    lengths: str = ""
    same_outputs: tuple[str, ...] = ()
    not_finite_rows: tuple[int, ...] = ()
    excluded_rows: tuple[int, ...] = ()
    documents: int | None = None
    losses: Losses = Field(default=UNKNOWN, exclude=True)
    is_finite: bool = Field(default=True, exclude=True)

    @property
    def also(self) -> Mapping[str, float]:
        """Other measures of the same output, by name, without unknown fields of other types."""
        return {name: x for name, x in (self.model_extra or {}).items() if isinstance(x, float)}

    @property
    def guaranteed(self) -> float:
        """The lower end of the interval, the value without one; a record guarantees it."""
        return self.value if self.ci95 is None else self.ci95[0]

    @property
    def subject(self) -> Subject:
        """The output, and the texts that it is measured on."""
        return Subject(self.output, self.file, self.lengths)

    @property
    def outputs(self) -> str:
        """The name of the output, and of those with the same value, joined by "="."""
        return " = ".join([self.output, *self.same_outputs])

    @property
    def searched(self) -> str:
        """The number of rows, or of queries and of the documents that they search."""
        documents = self.documents
        return f"{self.rows} queries, {documents} documents" if documents else f"{self.rows} rows"

    def describe(self) -> str:
        """One line for people."""
        interval = (
            f"no interval, {self.searched}"
            if self.ci95 is None
            else f"95 % interval {self.ci95[0]:.4f} to {self.ci95[1]:.4f}, {self.searched}"
        )
        others = "".join(f", {name} {value:.4f}" for name, value in self.also.items())
        kinds = [kind for kind in (self.file, self.lengths) if kind]
        measure = f"{', '.join([self.measure, *kinds])}," if kinds else self.measure
        faults = ""
        if not self.is_finite:
            rows = f" in {_describe_rows(self.not_finite_rows)}" if self.not_finite_rows else ""
            faults = f", NaN or infinity of the new model, where the original is finite{rows}"
        if self.excluded_rows:
            rows = _describe_rows(self.excluded_rows)
            faults += f", {rows} left out, because the original gives NaN"
        return (
            f"{measure} {self.value:.4f} ({interval}, 5th percentile {self.p5:.4f}, constant "
            f"predictor {self.constant:.3f}){others}{faults}"
        )


def _describe_rows(rows: Sequence[int]) -> str:
    """Numbers of rows, of which the first five are listed."""
    listed = ", ".join(map(str, rows[:5]))
    more = f" and {len(rows) - 5} more" if len(rows) > 5 else ""
    return f"row{'s' if len(rows) > 1 else ''} {listed}{more}"


class Measured(Recorded, frozen=True):
    """Base class of records with the qualities of a model.

    Attributes:
        quality: The lowest of them; None if none was measured.
        several: All of them, if there are several. A record with the field ``fidelity`` takes those
            of the comparison.
    """

    quality: Quality | None = None
    several: tuple[Quality, ...] = Field(default=(), alias="qualities")

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, content: Any) -> Any:
        """Derive missing ``qualities`` from ``fidelity``, and a missing ``quality`` from them."""
        match content:
            case {"qualities": [first, *rest]} | {"fidelity": Fidelity(qualities=[first, *rest])}:
                return {"quality": first, **content, "qualities": (first, *rest) if rest else ()}
            case _:
                return content

    @property
    def qualities(self) -> tuple[Quality, ...]:
        """All qualities, by output, file and lengths of texts, the lowest first."""
        return self.several or (() if self.quality is None else (self.quality,))


class Share(Recorded, frozen=True):
    """The share of a task's score that a model keeps on some rows.

    Attributes:
        value: The score of the new model divided by the original's.
        standard_error: That of ``value``.
        rows: The number of rows.
        losses: The lost share, which a goal limits; not recorded.
    """

    value: FiniteFloat
    standard_error: FiniteFloat = math.nan
    rows: int = 0
    losses: Losses = Field(default=UNKNOWN, exclude=True)


ErrorNumber = Annotated[
    float,
    BeforeValidator(lambda error: math.inf if error is None else error),
    PlainSerializer(lambda error: None if math.isinf(error) else error),
]
"""An error of an output; an infinite one is null in JSON."""


class OutputFidelity(Recorded, frozen=True):
    """Errors of one output. Cosines are per token, over the last axis.

    Errors are infinite if a number of the new model alone is NaN or infinite, and its token has the
    cosine 0. Tokens with NaN in the original are left out.

    Attributes:
        max_abs_error, mean_abs_error: Of single numbers.
        relative_error: The norm of the difference divided by that of the original.
        not_finite_rows: Rows, counted from 0 in the order of the comparison, with NaN or infinity
            where the original has none.
        excluded_rows: Rows with NaN in the original.
        same_outputs: Names of other outputs that are the same value.
    """

    name: str = ""
    max_abs_error: ErrorNumber = math.nan
    mean_abs_error: ErrorNumber = math.nan
    relative_error: ErrorNumber = math.nan
    mean_cosine: float = math.nan
    min_cosine: float = math.nan
    not_finite_rows: tuple[int, ...] = ()
    excluded_rows: tuple[int, ...] = ()
    same_outputs: tuple[str, ...] = ()

    @property
    def names(self) -> str:
        """The name of the output, and of those with the same value, joined by "="."""
        return " = ".join([self.name, *self.same_outputs])

    def warnings(self) -> list[str]:
        """Warnings about rows that are not finite."""
        warnings: list[str] = []
        if self.not_finite_rows:
            warnings.append(
                f"output {self.names!r} of the new model has other NaN or infinite numbers than "
                f"the original in {_describe_rows(self.not_finite_rows)}"
            )
        if self.excluded_rows:
            warnings.append(
                f"output {self.names!r} of the original is NaN in "
                f"{_describe_rows(self.excluded_rows)}, which are not compared"
            )
        return warnings


class Fidelity(Measured, frozen=True):
    """A comparison of a model with the original.

    Attributes:
        outputs: The errors of each output.
        mean_cosine, min_cosine: Over all outputs except caches.
        data: The source of the inputs.
        is_held_out: Whether the inputs are held-out rows of the calibration data; not recorded.
    """

    outputs: tuple[OutputFidelity, ...] = ()
    mean_cosine: FiniteFloat = math.nan
    min_cosine: FiniteFloat = math.nan
    data: str = ""
    is_held_out: bool = Field(default=False, exclude=True)

    def warnings(self) -> list[str]:
        """Warnings about rows that are not finite, by output."""
        return [warning for output in self.outputs for warning in output.warnings()]


COSINES = PlainSerializer(lambda fidelity: fidelity.to_json("outputs", "quality", "several"))
"""Writes only the cosines of a comparison, in a record that has its qualities beside it."""

RecordedFidelity = Annotated[Fidelity, COSINES]
"""A comparison in a record that has its qualities beside it; JSON has only its cosines."""


class ShapeLatency(Recorded, frozen=True):
    """Latencies in milliseconds of the new model and the original at one shape, and their ratio.

    They are medians of interleaved runs.
    """

    batch: int
    sequence: int
    original_ms: FiniteFloat
    ms: FiniteFloat
    speedup: FiniteFloat


class ServedSpeed(Recorded, frozen=True):
    """The speed-ups of a model in the form that serving runs, each over the form before it.

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
        runtimes: Names of the compared runtimes.
        cpu_flags: The features of the CPU that determine the speed (``PRODUCT_FLAGS``).
        device: Device of the runs; not recorded.
    """

    shapes: tuple[tuple[int, int], ...] = ()
    phase: str = "sequence"
    fusion: Speedup
    precision: Always[Speedup | None] = None
    removal: Always[Speedup | None] = None
    served: Speedup
    served_by_shape: tuple[FiniteFloat, ...] = ()
    runtimes: tuple[str, ...] = ()
    cpu_flags: tuple[str, ...] = ()
    device: Device = Field(default=Device(), exclude=True)

    @property
    def workloads(self) -> list[Workload]:
        phase = cast(Phase, self.phase)
        return [Workload.of(batch, length, phase) for batch, length in self.shapes]

    @property
    def over_exported(self) -> float:
        """The speed-up over the exported model."""
        return self.fusion.value * self.served.value

    def describe(self, precision: Precision) -> str:
        """One line, for example "1.24x by fused operators, 2.40x by int8, 1.00x by removal"."""
        parts = [f"{self.fusion.value:.2f}x by fused operators"]
        if self.precision is not None:
            parts.append(f"{self.precision.value:.2f}x by {precision}")
        if self.removal is not None:
            parts.append(f"{self.removal.value:.2f}x by removal")
        threads = self.device.threads
        where = f"{self.device.provider}, {threads or 'all'} thread{'' if threads == 1 else 's'}"
        return f"{', '.join(parts)} (at {', '.join(map(str, self.workloads))} tokens, {where})"
