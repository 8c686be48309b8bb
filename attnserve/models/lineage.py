"""The rewrites of a model as attnserve.json records them: what ``optimize`` and ``recover`` write.

They write one entry each, which is the ``record`` of their report.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, FiniteFloat, SerializeAsAny

from attnserve.literals import MixingKind
from attnserve.models.measured import Fidelity, Measured, Quality, RecordedFidelity, ServedSpeed
from attnserve.models.recorded import Always, Recorded
from attnserve.models.search_record import SearchRecord
from attnserve.runtime.cache import digest
from attnserve.runtime.times import Speedup

__all__ = [
    "NOT_REPORTED",
    "SIZES",
    "AnyEntry",
    "BeforeRecovery",
    "Calibration",
    "LineageEntry",
    "MixingChoice",
    "MixingReport",
    "ModelCost",
    "OptimizeEntry",
    "RecordedChange",
    "RecoverEntry",
    "Source",
    "TokenIds",
    "TrainingRecord",
    "search_of",
]


class Source(Recorded, frozen=True):
    """A file, its checksum, and a checksum of its weights that does not depend on their storage."""

    file: str = "the original"
    sha256: str | None = None
    weights: str | None = None


class ModelCost(Recorded, frozen=True):
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
        documents: Number of distinct rows that are documents, if the rows have roles.
        lengths: Percentiles (0, 5, 50, 95, 100) of the tokens of a row.
        files: The data of each file, if there are several.
    """

    file: str = ""
    rows: int = 0
    distinct_rows: int = 0
    joined_rows: int | None = None
    joined_to: int | tuple[int, int] | None = None
    tokens: int = 0
    fit_rows: int = 0
    fit_tokens: int = 0
    held_out_rows: tuple[int, ...] = ()
    lengths: tuple[int, ...] = ()
    sha256: str = ""
    files: tuple[Calibration, ...] = ()
    weights: tuple[FiniteFloat, ...] = ()
    documents: int | None = None
    token_ids: TokenIds | None = None

    def changed_count(self, now: Calibration) -> str | None:
        """The first count that the same files have in another tokenizer or split; None if none.

        Args:
            now: The data of the files as they are read now. Counts that are not recorded are not
                compared.
        """
        return next(
            (
                f"`{name}` is {getattr(now, name)}, and the record has {getattr(self, name)}"
                for name in COUNTS
                if name in self.model_fields_set and getattr(self, name) != getattr(now, name)
            ),
            None,
        )


COUNTS = ("rows", "distinct_rows", "tokens", "fit_rows", "held_out_rows", "lengths")
"""Fields of ``Calibration`` that depend on the tokenizer and on the split."""

SIZES = ("rank", "heads", "neurons", "head_size", "cache_width")
"""The fields of a change that are sizes, in the order of tables."""


class RecordedChange(Recorded, frozen=True):
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
    relative_error: Always[FiniteFloat | None] = None
    macs_after: Always[int | None] = None
    fitted_error: Always[FiniteFloat | None] = None
    rank: Always[int | None] = None
    heads: Always[int | None] = None
    neurons: Always[int | None] = None
    head_size: Always[int | None] = None
    cache_width: Always[int | None] = None

    @property
    def changed_sizes(self) -> list[str]:
        """The names of the sizes that changed."""
        return [name for name in SIZES if getattr(self, name) is not None]


class MixingReport(Recorded, frozen=True):
    """A mixing that was built and timed; see ``planning.mixing_choice``.

    Attributes:
        error: Error of the outputs on calibration data, or of the weights without data; None if the
            mixing was too slow to be fitted.
        speedup: Speed-up over the fused original, as served.
        slowest: The speed-up at the slowest shape, by the upper end of its interval.
    """

    kind: Annotated[MixingKind, Field(alias="form")]
    error: FiniteFloat | None
    speedup: Speedup
    slowest: Speedup


class MixingChoice(Recorded, frozen=True):
    """The chosen mixing, the reason, and all mixings that were timed."""

    chosen: MixingKind
    why: str
    candidates: Annotated[tuple[MixingReport, ...], Field(alias="forms")]


class TrainingRecord(Recorded, frozen=True):
    """The recorded part of ``training_result.TrainingResult``.

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

    fidelity: RecordedFidelity | None = None


class LineageEntry(Measured, frozen=True):
    """The part of an entry that ``optimize`` and ``recover`` both write.

    Fields have the order of the keys in files. ``versions`` and two others follow the fields of one
    command, so that both classes of entries declare them.

    Attributes:
        rewrite: The names of the passes, of the training and of the precision, joined by "+".
        source: The model that the quality is measured against.
        rewritten: For a training, the model that was trained.
        changes: The changes of single blocks; a training has none.
        plan: The plan that was applied, as ``Plan.to_json`` gives it.
    """

    rewrite: str
    source: Source = Source()
    rewritten: Source | None = None
    calibration: Calibration | None = None
    seed: int | None = None
    before: ModelCost | None = None
    after: ModelCost | None = None
    changes: Annotated[tuple[RecordedChange, ...], Field(alias="steps")] = ()
    fidelity: RecordedFidelity | None = None
    break_even_sequence: Always[int | None] = None
    batch: int | None = None
    sequence: int | None = None
    warnings: Always[tuple[str, ...]] = ()
    plan: dict[str, Any] | None = None

    @property
    def plan_id(self) -> str | None:
        """Checksum of the plan; None without a plan."""
        return None if self.plan is None else digest(self.plan)[:12]


class OptimizeEntry(LineageEntry, frozen=True):
    """An entry of ``optimize``.

    Attributes:
        changes: As in ``LineageEntry``, also if there are none.
        search: The search that made the plan. For a plan from a file, it has only the goal, and in
            ``gain`` whether the goal is reached.
        quality_to_choose: As in ``SearchRecord``.
        trained: The training of the plan, if it has one (``RecoverEntry.training``, whose key marks
            an entry of ``recover``).
        other_runtimes: The comparisons in other runtimes and pairs of runtimes in which the quality
            is kept (``planning.runtime_verification``).
    """

    changes: Annotated[Always[tuple[RecordedChange, ...]], Field(alias="steps")] = ()
    served_speedup: Always[FiniteFloat | None] = None
    speedups: Always[ServedSpeed | None] = None
    mixing: MixingChoice | None = None
    int8_weight_bits: int | None = None
    int8_activations: str | None = None
    trained: TrainingRecord | None = None
    search: SearchRecord | None = None
    quality_to_choose: Annotated[Quality | None, Field(alias="choose")] = None
    also_verified: Annotated[tuple[Fidelity, ...], Field(alias="also_proved")] = ()
    other_runtimes: Mapping[str, Fidelity] = {}
    versions: Mapping[str, str] = {}


class RecoverEntry(LineageEntry, frozen=True):
    """An entry of ``recover``.

    Attributes:
        scores: For a training with labels, ``Score.to_json`` of the original (``teacher``), and of
            the rewritten model ``before`` and ``after``, on verification rows. Their labels were
            not used, but a text of a pair may have been, alone or in another pair. ``rows`` has the
            number of rows to fit, to choose and to verify.
    """

    int8_weight_bits: int | None = None
    int8_activations: str | None = None
    before_recovery: BeforeRecovery
    scores: dict[str, Any] | None = None
    gain: bool
    verdict: str
    training: TrainingRecord
    versions: Mapping[str, str] = {}


NOT_REPORTED = ("rewrite", "source", "rewritten", "calibration", "seed", "versions")
"""Fields of an entry that the JSON of a command leaves out."""


def search_of(entry: LineageEntry) -> SearchRecord | None:
    """The search that made the plan of an entry, or its goal alone, if there was one."""
    return entry.search if isinstance(entry, OptimizeEntry) else None


def _read(content: object) -> object:
    """The entry of the command that wrote this JSON; only ``recover`` records a training."""
    if not isinstance(content, dict):
        return content
    return (RecoverEntry if "training" in content else OptimizeEntry).model_validate(content)


AnyEntry = Annotated[SerializeAsAny[LineageEntry], BeforeValidator(_read)]
"""An entry of either command, as a field."""
