"""The report of ``optimize``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from attnserve.models.lineage import LineageEntry, ModelCost, StepRecord
from attnserve.models.measured import Fidelity, ServedSpeed
from attnserve.models.quantized import Int8Activations
from attnserve.models.recorded import present
from attnserve.planning.mixing_choice import MixingChoice
from attnserve.planning.plans.plan import Plan
from attnserve.planning.plans.plan_file import PlanRecord

__all__ = ["OptimizeReport"]


@dataclass(frozen=True)
class OptimizeReport:
    """The applied rewrites, and their costs and effects.

    Attributes:
        after: Parameters and MACs of the rewritten model in float32, bytes of its written weights.
        search: The record of the search, if there was one.
        also_verified: The comparison on each file of ``also_prove``.
        other_runtimes: See ``LineageEntry``.
        int8_weight_bits: 8 if the model needs a CPU with VNNI, AMX or ARM dot products; None
            without int8.
        int8_activations: "static" with calibration data, otherwise "per-row"; None without int8.
    """

    output: Path
    before: ModelCost
    after: ModelCost
    steps: tuple[StepRecord, ...]
    fidelity: Fidelity
    break_even_sequence: int | None
    batch: int
    sequence: int
    warnings: tuple[str, ...]
    plan: Plan
    search: PlanRecord | None = None
    also_verified: tuple[Fidelity, ...] = ()
    other_runtimes: Mapping[str, Fidelity] = field(default_factory=dict[str, Fidelity])
    int8_weight_bits: Literal[7, 8] | None = None
    int8_activations: Int8Activations | None = None
    speed: ServedSpeed | None = None
    mixing: MixingChoice | None = None

    def to_json(self) -> dict[str, Any]:
        return self.record.to_json("rewrite")

    @property
    def record(self) -> LineageEntry:
        """The entry of the lineage; ``_write`` adds the inputs."""
        search = self.search
        kinds = [step.rewrite for step in self.steps]
        if search is not None and search.recovered is not None and search.recovered.gain:
            kinds.append("recover")
        if self.plan.precision != "float32":
            kinds.append(self.plan.precision)
        optional = present(
            mixing=self.mixing,
            int8_weight_bits=self.int8_weight_bits,
            int8_activations=self.int8_activations,
            also_verified=self.also_verified,
            other_runtimes=self.other_runtimes,
        )
        if search is not None:
            optional |= {"search": search, "choose": search.choose}
        return LineageEntry(
            rewrite="+".join(dict.fromkeys(kinds)) or "none",
            before=self.before,
            after=self.after,
            steps=self.steps,
            fidelity=self.fidelity.cosines,
            qualities=self.fidelity.qualities,
            break_even_sequence=self.break_even_sequence,
            batch=self.batch,
            sequence=self.sequence,
            warnings=self.warnings,
            plan=self.plan.to_json(),
            served_speedup=self.speed and self.speed.served.value,
            speedups=self.speed,
            **optional,
        )
