"""The rewrites of a model as attnserve.json and plan.json record them.

``optimize`` and ``recover`` write one entry each. Older versions recorded fewer fields, so most may
be missing. Fields that this version does not know are kept: a newer one may have written them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, FiniteFloat

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
    "ProofRecord",
    "QualityRecord",
    "Recorded",
    "Recovered",
    "RewriteRecord",
    "Round",
    "Search",
    "ShareRecord",
    "Source",
    "Speed",
    "Speedups",
    "StepRecord",
    "TokenIds",
    "TrainingRecord",
    "Whole",
]


class Recorded(BaseModel):
    """Base class of record parts whose JSON contains only the given fields."""

    model_config = ConfigDict(extra="allow", frozen=True)

    def to_json(self, *left_out: str) -> dict[str, Any]:
        """The fields as JSON values, without the named ones."""
        return self.model_dump(mode="json", exclude_unset=True, exclude=set(left_out))

    @property
    def stated(self) -> dict[str, Any]:
        """The values that were given, by field."""
        return {name: getattr(self, name) for name in self.model_fields_set}


class Whole(Recorded):
    """Base class of record parts whose JSON contains all fields; null without a value."""

    def model_post_init(self, context: Any) -> None:
        self.__pydantic_fields_set__.update(type(self).model_fields)


class Source(Recorded):
    """A file, its checksum, and a checksum of its weights that does not depend on their storage."""

    file: str = "the original"
    sha256: str | None = None
    weights: str | None = None


class ModelCost(Whole):
    """Counts at the recorded batch and sequence, and bytes of the weights.

    ``macs`` is None where they cannot be counted.
    """

    parameters: int
    macs: int | None
    bytes: int


class TokenIds(Recorded):
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


class Calibration(Recorded):
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


class StepRecord(Whole):
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


class QualityRecord(Recorded):
    """The measured quality of an output; see ``checks.quality.Quality``.

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


class Measured(Recorded):
    """The lowest of several qualities, and all of them, by output, file and lengths of texts."""

    quality: QualityRecord | None = None
    qualities: tuple[QualityRecord, ...] = ()


class ShareRecord(Recorded):
    """The kept share of a task's score."""

    value: FiniteFloat
    standard_error: FiniteFloat | None = None
    rows: int | None = None


class FidelityRecord(Measured):
    """A comparison with the original; ``outputs`` as of ``OutputFidelity.to_json``."""

    outputs: tuple[dict[str, Any], ...] = ()
    mean_cosine: FiniteFloat | None = None
    min_cosine: FiniteFloat | None = None
    data: str | None = None
    share: ShareRecord | None = None


class Speed(Whole):
    """Latencies of the new model and the original at one length: medians of interleaved runs."""

    batch: int
    sequence: int
    original_ms: FiniteFloat
    ms: FiniteFloat
    speedup: FiniteFloat


class Speedups(Recorded):
    """Speed-ups as served: each step over the one before; ``served`` over the fused original."""

    shapes: tuple[tuple[int, int], ...] = ()
    phase: str = "sequence"
    fusion: Speedup | None = None
    precision: Speedup | None = None
    removal: Speedup | None = None
    served: Speedup | None = None
    served_by_shape: tuple[FiniteFloat, ...] = ()


class FormReport(Whole):
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


class MixingChoice(Whole):
    """The chosen form of shared dimensions, the reason, and all forms that were timed."""

    chosen: str
    why: str
    forms: tuple[FormReport, ...]


def _present_name(measure: object) -> object:
    """Current name of a measure; 0.1 wrote "mean output cosine" or "share of the X score"."""
    if isinstance(measure, str) and " " in measure:
        return "score" if measure.endswith(" score") else "cosine"
    return measure


class Asked(Recorded):
    """The goal and the target of a search; see ``options.Goal`` and ``options.Target``."""

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


class ProofRecord(Measured):
    """The verification of a choice on held-out rows that no fit and no choice has used."""

    loss: FiniteFloat
    share: ShareRecord | None = None


class Round(Whole):
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


class Recovered(Whole):
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


class Search(Measured):
    """The part of plan.json that is recorded with an optimized model.

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
    speeds: tuple[Speed, ...] = ()
    machine: str | None = None
    recovered: Recovered | None = None


class TrainingRecord(Recorded):
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


class BeforeRecovery(Measured):
    """The quality of the rewritten model before its training."""

    fidelity: FidelityRecord | None = None


class RewriteRecord(Measured):
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
    speedups: Speedups | None = None
    mixing: MixingChoice | None = None
    int8_weight_bits: int | None = None
    int8_activations: str | None = None
    search: Search | None = None
    choose: QualityRecord | None = None
    also_proved: tuple[FidelityRecord, ...] = ()
    before_recovery: BeforeRecovery | None = None
    scores: dict[str, Any] | None = None
    gain: bool | None = None
    verdict: str | None = None
    training: TrainingRecord | None = None
    versions: Mapping[str, str] = {}

    @property
    def measured(self) -> tuple[QualityRecord, ...]:
        """All qualities that were measured for this rewrite."""
        return self.qualities or ((self.quality,) if self.quality else ())
