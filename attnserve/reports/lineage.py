"""The rewrites of a model as attnserve.json records them, checked and with types.

``optimize`` and ``recover`` write one entry each. Older versions recorded fewer fields, so all but
the name of the rewrite may be missing; unknown fields are ignored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, FiniteFloat, ValidationError

from graph_passes.errors import InvalidModel

__all__ = ["Rewrite", "read_lineage"]


class Recorded(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class Source(Recorded):
    file: str = "the original"
    sha256: str | None = None


class Cost(Recorded):
    """Elements of parameters, MACs at the recorded shape, and bytes of the weights."""

    parameters: int | None = None
    macs: int | None = None
    bytes: int | None = None


class QualityEntry(Recorded):
    """One measured quality, as in ``attnserve verify --json``."""

    measure: str
    value: FiniteFloat | None = None
    ci95: tuple[FiniteFloat, FiniteFloat] | None = None
    p5: FiniteFloat | None = None
    constant: FiniteFloat | None = None
    rows: int | None = None
    split: str | None = None
    output: str | None = None
    lengths: str | None = None
    file: str | None = None


class Fidelity(Recorded):
    mean_cosine: FiniteFloat | None = None
    min_cosine: FiniteFloat | None = None
    data: str | None = None


class Calibration(Recorded):
    file: str | None = None
    rows: int | None = None
    tokens: int | None = None
    sha256: str | None = None


class Step(Recorded):
    """One rewrite of one block; the fields are those of ``attnserve.planning.apply.Step``."""

    rewrite: str
    block: str
    relative_error: FiniteFloat | None = None
    fitted_error: FiniteFloat | None = None
    macs_after: int | None = None
    rank: int | None = None
    heads: int | None = None
    neurons: int | None = None
    head_size: int | None = None
    cache_width: int | None = None

    @property
    def changed_sizes(self) -> list[str]:
        """The names of the sizes that the step changed."""
        sizes = ("rank", "heads", "neurons", "head_size", "cache_width")
        return [name for name in sizes if getattr(self, name) is not None]


class Speed(Recorded):
    """Median latencies in milliseconds at one shape, from interleaved rounds."""

    batch: int
    sequence: int
    original_ms: FiniteFloat
    ms: FiniteFloat
    speedup: FiniteFloat


class Ratio(Recorded):
    """A speed-up with its 95 % interval."""

    value: FiniteFloat
    ci95: tuple[FiniteFloat, FiniteFloat]


class Speedups(Recorded):
    """Speed-ups as served, each over the form before it; ``served`` over the fused original."""

    shapes: tuple[tuple[int, int], ...] = ()
    fusion: Ratio | None = None
    precision: Ratio | None = None
    removal: Ratio | None = None
    served: Ratio | None = None


class Search(Recorded):
    verdict: str | None = None
    speedup: FiniteFloat | None = None
    speeds: tuple[Speed, ...] = ()
    machine: str | None = None
    choose: QualityEntry | None = None


class Training(Recorded):
    """What ``recover`` did; ``history`` has (seconds, training loss, loss on held-out rows)."""

    steps: int | None = None
    tokens: int | None = None
    seconds: FiniteFloat | None = None
    stopped: str | None = None
    history: tuple[tuple[FiniteFloat, float | None, float | None], ...] = ()


class BeforeRecovery(Recorded):
    quality: QualityEntry | None = None


class Rewrite(Recorded):
    """One entry of the lineage."""

    rewrite: str
    source: Source = Source()
    calibration: Calibration | None = None
    seed: int | None = None
    before: Cost = Cost()
    after: Cost = Cost()
    batch: int | None = None
    sequence: int | None = None
    steps: tuple[Step, ...] = ()
    fidelity: Fidelity | None = None
    quality: QualityEntry | None = None
    qualities: tuple[QualityEntry, ...] = ()
    verdict: str | None = None
    speedups: Speedups | None = None
    search: Search | None = None
    training: Training | None = None
    before_recovery: BeforeRecovery | None = None
    warnings: tuple[str, ...] = ()
    versions: dict[str, str] = {}

    @property
    def measured(self) -> tuple[QualityEntry, ...]:
        """All qualities that were measured for this rewrite."""
        return self.qualities or ((self.quality,) if self.quality else ())


def read_lineage(entries: Sequence[Mapping[str, Any]], *, path: str) -> tuple[Rewrite, ...]:
    """The entries of a record's lineage, oldest first.

    Args:
        path: The record, for messages.

    Raises:
        InvalidModel: A field has a wrong type.
    """
    found: list[Rewrite] = []
    for index, entry in enumerate(entries):
        try:
            found.append(Rewrite.model_validate(entry))
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, ("lineage", index, *first["loc"])))
            raise InvalidModel(
                f"{path}: {place}: {first['msg']}",
                "restore or remove the file",
                code="artifact.record",
            ) from error
    return tuple(found)
