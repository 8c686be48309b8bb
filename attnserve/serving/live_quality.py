"""Measure the quality of served artifacts on live rows, and test the quality guarantee.

The guarantee is tested sequentially ("looks"): after 16 rows, then 1.5 times as many up to the
window, then every ``LOOK_STEP`` rows. At look k the upper end of a one-sided interval of the
quality is compared with the guaranteed value, with the error probability

    alpha_k = ALPHA / (k (k + 1)),    k = 1, 2, ...

These sum to ALPHA. By the union bound, an artifact that meets its guarantee raises a false alarm at
any of infinitely many looks with a probability of at most ALPHA. The interval is that of
``intervals.mean_lower_bound`` on the losses; it is asymptotic. The tests simulate it: at most 4 %
of long runs have a false alarm, for exponential, gamma, log-normal, normal and uniform losses and
for correlations of similarities.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, cast, get_args

import numpy as np
from pydantic import Field

from attnserve.checks.meters import new_meter
from attnserve.context import Device
from attnserve.intervals import mean_lower_bound
from attnserve.limits import ROUNDING
from attnserve.literals import Measure
from attnserve.models.artifact import Artifact
from attnserve.models.checksums import last_rewrite_of
from attnserve.models.embeddings import BY_COSINE, Embedding
from attnserve.models.lineage import LineageEntry, search_of
from attnserve.models.recorded import Recorded
from attnserve.runtime.interface import Batch
from attnserve.serving.backends import RunnerOptions
from attnserve.serving.loaded_model import Model
from attnserve.serving.text_tasks import TextTask
from graph_passes.errors import InvalidModel

__all__ = [
    "ALPHA",
    "WINDOW",
    "Guarantee",
    "LiveComparison",
    "LiveQuality",
    "LiveReport",
    "QualityUpdate",
    "read_guarantee",
]

WINDOW = 256
"""Number of last rows that are measured."""

FIRST_LOOK, LOOK_GROWTH, LOOK_STEP = 16, 1.5, 64

ALPHA = 0.05
"""Maximum probability of a false alarm over all looks."""

REFRESH = 8
"""The estimate is updated when the rows have grown by 1 / ``REFRESH``, or by ``LOOK_STEP``."""


@dataclass(frozen=True)
class Guarantee:
    """The quality guarantee in the record of an artifact.

    Attributes:
        measure: The measure, "auto" if the record has none.
        value: The guaranteed quality; None without a guarantee.
        output: The name of the measured output; empty if the record has none.
        window: The number of last rows that are measured. For the overlap of an index, which falls
            with the number of documents, it is the number of the verification, at most ``WINDOW``.
    """

    measure: Measure = "auto"
    value: float | None = None
    output: str = ""
    window: int = WINDOW


def read_guarantee(artifact: Artifact, original: Artifact) -> Guarantee:
    """Read the quality that an artifact guarantees relative to its original.

    A rewrite guarantees the goal of its search, else the lower end of its confidence interval, else
    its value. Several rewrites guarantee 1 minus the sum of their losses. Rewrites that were
    measured on random inputs, or by different measures, have no guarantee. The measure "index" of
    queries and documents has none either, because the rows of a service have no such split.

    Raises:
        InvalidModel: The artifact was made from another model.
    """
    entries = artifact.lineage
    if not entries:
        return Guarantee()
    start = last_rewrite_of(original, entries)
    if start is None:
        raise InvalidModel(
            f"{original.model} is not the model that {artifact.name} was made from: the record has"
            " other checksums",
            "give the model that the artifact was optimized from",
            code="quality.other_original",
        )
    entries = entries[start:]
    quality = entries[-1].quality
    # A row of a request does not have the order that tau measures.
    if quality is None or quality.measure not in {*get_args(Measure)} - {"tau"}:
        return Guarantee()
    losses = [1 - value for value in map(_guaranteed, entries) if value is not None]
    measures = {entry.quality and entry.quality.measure for entry in entries}
    is_known = len(losses) == len(entries) and len(measures) == 1 and not quality.documents
    value = min(1 - sum(losses), 1 - ROUNDING) if is_known else None  # no guarantee is closer to 1
    rows = quality.rows if quality.measure == "index" and value is not None else WINDOW
    window = min(max(rows, FIRST_LOOK), WINDOW)
    return Guarantee(cast(Measure, quality.measure), value, quality.output, window)


def _guaranteed(entry: LineageEntry) -> float | None:
    """The guarantee of one rewrite; None without one."""
    quality = entry.quality
    if quality is None or quality.split == "random":
        return None
    search = search_of(entry)
    goal = search and search.guaranteed
    return quality.guaranteed if goal is None else goal


class LiveReport(Recorded, frozen=True):
    """The quality of the last rows, "quality" in /stats.json.

    Attributes:
        measure: The name of the measure.
        value: The quality; None before the first four rows.
        ci95: The two-sided interval; None for less than ``measures.MIN_ROWS`` rows.
        guaranteed: The guaranteed quality; None without a guarantee.
        is_broken: Whether a violation of the guarantee was detected, and it was not met again
            since.
        rows: The number of measured rows, at most ``WINDOW``.
        also: Other measures of the same rows, by name; None for NaN, which JSON lacks.
    """

    measure: Measure
    value: float | None
    ci95: tuple[float, float] | None
    guaranteed: Annotated[float | None, Field(alias="promise")]
    is_broken: Annotated[bool, Field(alias="broken")]
    rows: int
    also: Mapping[str, float | None]


class QualityUpdate(Recorded, frozen=True):
    """The report after the comparison of a row, and whether its ``is_broken`` has changed."""

    report: LiveReport
    is_changed: bool


class LiveQuality:
    """Measures the quality of the last rows, and tests a guarantee.

    Args:
        measure: The name of the measure; not "auto".
        guaranteed: The guaranteed quality; None tests nothing.
        window: The number of last rows.
    """

    def __init__(
        self,
        measure: Measure,
        guaranteed: float | None,
        embedding: Embedding = BY_COSINE,
        window: int = WINDOW,
    ) -> None:
        self._meter = new_meter(measure, embedding, window)
        self._rows = self._looks = self._measured_at = 0
        self._next_look = FIRST_LOOK
        self.report = LiveReport(
            measure=measure,
            value=None,
            ci95=None,
            guaranteed=guaranteed,
            is_broken=False,
            rows=0,
            also={},
        )
        """The last estimate."""

    def add(self, original: np.ndarray, served: np.ndarray, inputs: Batch) -> bool:
        """Add the outputs (1, ...) of both models for one row.

        Returns:
            Whether ``report.is_broken`` has changed: a violation was detected, or the value of the
            window meets the guarantee again.
        """
        self._meter.add(original, served, inputs)
        self._rows += 1
        is_look = self._rows == self._next_look
        wait = min(max(self._rows // REFRESH, 1), LOOK_STEP)
        if self._rows < 4 or not (is_look or self._rows - self._measured_at >= wait):
            return False
        self._measured_at = self._rows
        scores = self._meter.scores()
        report = self.report
        is_broken = report.is_broken
        if is_look:
            self._looks += 1
            grown = min(int(self._rows * LOOK_GROWTH), WINDOW)
            self._next_look = grown if grown > self._rows else self._rows + LOOK_STEP
            if report.guaranteed is not None:
                is_broken = self._is_broken(scores.influence, report.guaranteed, is_broken)
        self.report = LiveReport(
            measure=report.measure,
            value=scores.value,
            ci95=scores.ci95,
            guaranteed=report.guaranteed,
            is_broken=is_broken,
            rows=len(scores.influence),
            also=scores.also,
        )
        return is_broken != report.is_broken

    def _is_broken(self, influence: np.ndarray, guaranteed: float, was_broken: bool) -> bool:
        """Whether the guarantee is violated at the present look, by the influences of the rows."""
        if was_broken:
            return float(influence.mean()) < guaranteed
        confidence = 1 - ALPHA / (self._looks * (self._looks + 1))
        return -mean_lower_bound(-influence, confidence) < guaranteed


MEASURES: Mapping[TextTask, Sequence[Measure]] = {
    "embed": ["similarity", "index"],
    "classify": ["kl", "top1", "r2"],
    "rerank": ["r2"],
    "tokens": [],
    "sparse": [],
}
"""Measures by the task of a text."""


class LiveComparison:
    """Compares served artifacts with their original, as the object of an ``isolation.Worker``."""

    def __init__(self, artifact: Artifact, device: Device) -> None:
        self._model = Model(artifact, RunnerOptions(replace(device, threads=1)))
        self._model.warm_up()
        self._watched: dict[str, tuple[LiveQuality, str]] = {}

    def watch(
        self, key: str, artifact: Artifact, input_types: list[list[Any]], measure: Measure
    ) -> None:
        """Register a served model for comparison.

        Args:
            input_types: ``Signature.input_types`` of the served model.
            measure: The measure if the record of the artifact has none.

        Raises:
            InvalidModel: The model has other inputs, or was made from another model.
        """
        original = self._model.artifact
        if (original_types := self._model.signature.input_types) != input_types:
            raise InvalidModel(
                f"{original.model}: it takes {original_types}, but {artifact.name} takes"
                f" {input_types}",
                "give the model that the artifact was optimized from",
                code="shadow.inputs",
            )
        guarantee = read_guarantee(artifact, original)
        measure = measure if guarantee.measure == "auto" else guarantee.measure
        quality = LiveQuality(measure, guarantee.value, Embedding.of(artifact), guarantee.window)
        # All requests are measured on one output, if possible on the output for texts.
        model = self._model
        output = guarantee.output or model.signature.outputs[0].name
        if model.encoder is not None:
            task = "classify" if model.can("classify") else "embed"
            output = artifact.output or model.text_output(task)
        self._watched[key] = quality, output

    def compare(
        self,
        key: str,
        task: TextTask | None,
        inputs: Mapping[str, np.ndarray],
        served: Mapping[str, np.ndarray],
    ) -> dict[str, Any] | None:
        """Run the original on a row.

        Returns:
            The JSON of a ``QualityUpdate``; None if the served outputs cannot be measured.
        """
        quality, name = self._watched[key]
        served_output = served.get(name)
        if served_output is None or len(served_output) != 1:
            return None
        if task and quality.report.measure not in MEASURES[task]:
            return None
        original_output = self._model.run(inputs, [name])[name][:1]
        row = {name: array[:1] for name, array in inputs.items()}
        is_changed = quality.add(original_output, served_output, row)
        return QualityUpdate(report=quality.report, is_changed=is_changed).to_json()
