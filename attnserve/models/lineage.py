"""The rewrites of a model as attnserve.json and plan.json record them.

``optimize`` and ``recover`` write one entry each. Older versions recorded fewer fields, so most may
be missing. Fields that this version does not know are kept: a newer one may have written them.

A measured value is its own record: ``Quality``, ``Share``, ``Fidelity``, ``Proof`` and
``ServedSpeed`` extend the class here whose name ends in ``Record`` by what is required when it is
measured and by what is not written. A field of a record holds such a value as it is, and writes the
fields of its declared class. The reports of commands (``OptimizeReport``, ``RecoverReport``,
``PlanReport``) have what they write as ``record``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    FiniteFloat,
    field_serializer,
)

from attnserve.runtime.interleaved_timer import Speedup

__all__ = [
    "SIZES",
    "Asked",
    "BeforeRecovery",
    "Calibration",
    "FidelityRecord",
    "FormReport",
    "Measured",
    "MixingChoice",
    "ModelCost",
    "OutputRecord",
    "ProofRecord",
    "QualityRecord",
    "Recorded",
    "Recovered",
    "RewriteRecord",
    "Round",
    "SearchRecord",
    "ServedSpeedRecord",
    "ShapeLatency",
    "ShareRecord",
    "Source",
    "StepRecord",
    "TokenIds",
    "TrainingRecord",
    "Whole",
    "present",
]


class Recorded(BaseModel, frozen=True):
    """Base class of record parts whose JSON contains only the given fields."""

    model_config = ConfigDict(extra="allow")

    def to_json(self, *left_out: str) -> dict[str, Any]:
        """The fields as JSON values, without the named ones."""
        return self.model_dump(mode="json", exclude_unset=True, exclude=set(left_out))

    @property
    def stated(self) -> dict[str, Any]:
        """The values that were given, by field."""
        return {name: getattr(self, name) for name in self.model_fields_set}


def present(**values: Any) -> dict[str, Any]:
    """The values that are neither None nor empty: fields that are written only with a value."""
    return {name: value for name, value in values.items() if value}


class Whole(Recorded, frozen=True):
    """Base class of record parts whose JSON contains all fields; null without a value."""

    def model_post_init(self, context: Any) -> None:
        self.__pydantic_fields_set__.update(type(self).model_fields)


class Source(Recorded, frozen=True):
    """A file, its checksum, and a checksum of its weights that does not depend on their storage."""

    file: str = "the original"
    sha256: str | None = None
    weights: str | None = None


class ModelCost(Whole, frozen=True):
    """Counts at the recorded batch and sequence, and bytes of the weights.

    ``macs`` is None where they cannot be counted.
    """

    parameters: int
    macs: int | None
    bytes: int


class TokenIds(Recorded, frozen=True):
    """The token ids of calibration rows.

    Attributes:
        distinct: The number of distinct ids in the rows to fit.
        unseen_share: The share of the tokens of the held-out rows whose id is not among them.
        seen: These ids: bit i % 8 of byte i // 8 is 1 for each id i. The bytes are compressed
            (zlib) and written in base64.
    """

    distinct: int | None = None
    unseen_share: FiniteFloat = 0.0
    seen: str


class Calibration(Recorded, frozen=True):
    """The data that a model was calibrated on.

    Attributes:
        joined_rows, joined_to: Number of rows that join several texts, and their lengths.
        held_out_rows: Number of rows of each held-out part.
        lengths: Percentiles (0, 5, 50, 95, 100) of the tokens of a row.
        files: The data of each file, if there are several.
    """

    file: str = ""
    rows: int = 0
    distinct_rows: int = 0
    joined_rows: int = 0
    joined_to: int | tuple[int, int] | None = None
    tokens: int = 0
    fit_rows: int = 0
    fit_tokens: int = 0
    held_out_rows: tuple[int, ...] = ()
    lengths: tuple[int, ...] = ()
    sha256: str = ""
    files: tuple[Calibration, ...] = ()
    weights: tuple[FiniteFloat, ...] = ()
    token_ids: TokenIds | None = None


SIZES = ("rank", "heads", "neurons", "head_size", "cache_width")
"""The fields of a step that are sizes, in the order of tables."""


class StepRecord(Whole, frozen=True):
    """One rewrite of one block.

    Attributes:
        rewrite: The name of the pass.
        relative_error: For collaborative factors, the error in the minimized metric. For other
            lossy rewrites, the distance between the block's output and the original's, relative to
            its variation, on calibration data (else random inputs); None if it cannot be observed.
        macs_after: MACs of the whole model.
        fitted_error: The distance after the output projection was refitted, all rewrites of the
            block included; None if it was not refitted.
        rank: R of collaborative heads.
        heads: The number of heads that compute their own probabilities.
        neurons: The number of neurons that a feed-forward has left.
        head_size: The mean number of dimensions that a head reads in sparse mixing.
        cache_width: Elements per token in the cached keys, over all heads.
    """

    rewrite: str
    block: str
    relative_error: FiniteFloat | None = None
    macs_after: int | None = None
    fitted_error: FiniteFloat | None = None
    rank: int | None = None
    heads: int | None = None
    neurons: int | None = None
    head_size: int | None = None
    cache_width: int | None = None

    @property
    def changed_sizes(self) -> list[str]:
        """The names of the sizes that the step changed."""
        return [name for name in SIZES if getattr(self, name) is not None]


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

    def model_post_init(self, context: Any) -> None:
        qualities = self.qualities or ((self.quality,) if self.quality else ())
        if qualities:
            vars(self).update(quality=self.quality or qualities[0], qualities=qualities)
            self.__pydantic_fields_set__.add("quality")
        if len(qualities) < 2:
            self.__pydantic_fields_set__.discard("qualities")


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


class FormReport(Whole, frozen=True):
    """A form of shared dimensions that was built and timed; see ``planning.mixing_choice``.

    Attributes:
        form: "dense", "sparse" or "own".
        error: Error of the outputs on calibration data, or of the weights without data; None if the
            form was too slow to be fitted.
        speedup: Speed-up over the fused original, as served.
        slowest: The speed-up at the slowest shape, by the upper end of its interval.
    """

    form: str
    error: FiniteFloat | None
    speedup: Speedup
    slowest: Speedup


class MixingChoice(Whole, frozen=True):
    """The chosen form of shared dimensions, the reason, and all forms that were timed."""

    chosen: str
    why: str
    forms: tuple[FormReport, ...]


def _present_name(measure: object) -> object:
    """Current name of a measure; 0.1 wrote "mean output cosine" or "share of the X score"."""
    if isinstance(measure, str) and " " in measure:
        return "score" if measure.endswith(" score") else "cosine"
    return measure


class Asked(Recorded, frozen=True):
    """The request of a search; see ``options.Goal``."""

    keep: float | None = None
    target_speedup: float | None = None
    measure: Annotated[str, BeforeValidator(_present_name)] = "auto"
    task: str | None = None
    eval_data: str | None = None
    eval_data_sha256: str | None = None
    allow: tuple[str, ...] = ()
    precision: str = "float32"
    batch: int = 1
    sequences: tuple[int, ...] = ()
    phase: str = "sequence"
    provider: str = "cpu"
    runtime: str = "onnxruntime"
    threads: int = 0
    seed: Annotated[int, Field(strict=True, ge=0)] = 0
    recover: float | None = None


class ProofRecord(Measured, frozen=True):
    """The recorded part of ``planning.search.report.Proof``: a verification on held-out data.

    Attributes:
        loss: The largest of the losses that the goal limits; see ``Quality.loss``.
        share: The kept share of the task's score, if the goal has a task.
    """

    loss: FiniteFloat
    share: ShareRecord | None = None


class Round(Whole, frozen=True):
    """One choice that was built and trained.

    Attributes:
        predicted_speedup, predicted_loss: As in ``Point``.
        built_loss, loss: The measured loss on the data to choose, before and after the training.
        steps, seconds: Steps and time of the training.
        keeps: Whether the loss is within the goal.
    """

    predicted_speedup: float
    predicted_loss: float
    built_loss: float
    loss: float
    steps: int
    seconds: float
    keeps: bool


class Recovered(Whole, frozen=True):
    """The training rounds of a search.

    Attributes:
        gain: Whether a trained model is returned.
        verdict: One line for people.
        torch: The version of PyTorch.
    """

    rounds: tuple[Round, ...]
    gain: bool
    verdict: str
    torch: str


class SearchRecord(Measured, frozen=True):
    """The part of plan.json that is recorded with an optimized model; see ``PlanRecord``.

    Attributes:
        fidelity, quality, qualities: The result of the verification of the returned choice.
        choose: The same quality on the data to choose.
        proofs: All verifications of choices, in order; all but the last missed the goal.
        speedup: The geometric mean over the requested lengths.
    """

    asked: Asked = Asked()
    verdict: str | None = None
    gain: bool = False
    fidelity: FidelityRecord | None = None
    choose: QualityRecord | None = None
    proofs: tuple[ProofRecord, ...] = ()
    speedup: FiniteFloat | None = None
    speeds: tuple[ShapeLatency, ...] = ()
    machine: str | None = None
    recovered: Recovered | None = None


class TrainingRecord(Recorded, frozen=True):
    """The course of a training; see ``recovery.training.Course``.

    ``history`` has (seconds, training loss, loss on held-out rows). Numbers that are not finite are
    null.
    """

    steps: int | None = None
    tokens: int | None = None
    seconds: FiniteFloat | None = None
    stopped: str | None = None
    history: tuple[tuple[FiniteFloat, float | None, float | None], ...] = ()
    states: int | None = None
    weights: int | None = None


class BeforeRecovery(Measured, frozen=True):
    """The quality of the rewritten model before its training."""

    fidelity: FidelityRecord | None = None


class RewriteRecord(Measured, frozen=True):
    """One entry of the lineage.

    Attributes:
        rewrite: The names of the passes, of the training and of the precision, joined by "+".
        source: The model that the quality is measured against.
        rewritten: For a training, the model that was trained.
        plan: The plan that was applied, as ``Plan.to_json`` gives it.
        scores: For a training with labels, the scores as of ``Score.to_json``.
    """

    rewrite: str
    source: Source = Source()
    rewritten: Source | None = None
    calibration: Calibration | None = None
    seed: int | None = None
    before: ModelCost | None = None
    after: ModelCost | None = None
    steps: tuple[StepRecord, ...] = ()
    fidelity: FidelityRecord | None = None
    break_even_sequence: int | None = None
    batch: int | None = None
    sequence: int | None = None
    warnings: tuple[str, ...] = ()
    plan: dict[str, Any] | None = None
    served_speedup: FiniteFloat | None = None
    speedups: ServedSpeedRecord | None = None
    mixing: MixingChoice | None = None
    int8_weight_bits: int | None = None
    int8_activations: str | None = None
    search: SearchRecord | None = None
    choose: QualityRecord | None = None
    also_proved: tuple[FidelityRecord, ...] = ()
    before_recovery: BeforeRecovery | None = None
    scores: dict[str, Any] | None = None
    gain: bool | None = None
    verdict: str | None = None
    training: TrainingRecord | None = None
    versions: Mapping[str, str] = {}
