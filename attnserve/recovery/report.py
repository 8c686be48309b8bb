"""The result of a recovery, and its record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch

from attnserve.checks.compare import Fidelity
from attnserve.data.datasets import Dataset
from attnserve.data.token_statistics import token_statistics
from attnserve.models.artifact import Artifact
from attnserve.models.checksums import source_entry
from attnserve.models.outputs import write_rewritten
from attnserve.models.quantized import Bits, Int8Activations
from attnserve.recovery.labels import LabelReport
from attnserve.recovery.training import Training
from attnserve.versions import versions
from graph_passes.analysis.parameters import parameter_bytes

__all__ = ["RecoverReport", "write_recovered"]

KEPT = ("plan", "before", "after", "batch", "sequence", "break_even_sequence")
"""What the record of the rewrite says of the graph, and what training does not change."""


@dataclass(frozen=True)
class RecoverReport:
    """The quality before and after, on rows that the training never saw.

    Attributes:
        before: The rewritten model against the original.
        after: The result against the original; equal to ``before`` without a gain.
        gain: Whether the result is better. If not, it has the weights of the rewritten model.
        training: The course of the training.
        states: The number of hidden states that were learned, besides the outputs.
        weights: The number of trained elements.
        int8_weight_bits, int8_activations: As in ``OptimizeReport``; None without int8.
        scores: The scores on labeled rows that the training never saw; None without labels.
        warnings: What the user should know.
    """

    output: Path
    before: Fidelity
    after: Fidelity
    gain: bool
    training: Training
    states: int
    weights: int
    int8_weight_bits: Bits | None = None
    int8_activations: Int8Activations | None = None
    scores: LabelReport | None = None
    warnings: tuple[str, ...] = ()

    @property
    def verdict(self) -> str:
        """One line for people."""
        new = self.after.quality
        assert new is not None
        old = next(one for one in self.before.qualities if one.subject == new.subject)
        if not self.gain:
            rounded = "" if self.int8_weight_bits is None else "rounded "
            return (
                f"no gain: {new.measure} {new.value:.4f} after {self.training.steps} steps; "
                f"the {rounded}weights of the rewritten model are returned"
            )
        scores = "" if self.scores is None else f"{self.scores.line}, "
        return (
            f"{scores}{new.measure} {old.value:.4f} -> {new.value:.4f} after "
            f"{self.training.steps} steps in {self.training.seconds / 60:.1f} minutes"
        )

    def to_json(self) -> dict[str, Any]:
        int8 = {"weight_bits": self.int8_weight_bits, "activations": self.int8_activations}
        return {
            "fidelity": _fidelity(self.after),
            **self.after.quality_json(),
            "before_recovery": {"fidelity": _fidelity(self.before), **self.before.quality_json()},
            **({} if self.scores is None else {"scores": self.scores.to_json()}),
            "gain": self.gain,
            "verdict": self.verdict,
            "training": {
                **self.training.to_json(), "states": self.states, "weights": self.weights,
            },
            **{f"int8_{name}": value for name, value in int8.items() if value is not None},
            "warnings": list(self.warnings),
        }  # fmt: skip


def _fidelity(fidelity: Fidelity) -> dict[str, Any]:
    return {
        "mean_cosine": fidelity.mean_cosine,
        "min_cosine": fidelity.min_cosine,
        "data": fidelity.data,
    }


def _as_int8(kept: Mapping[str, Any], model: ir.Model) -> dict[str, Any]:
    """The record of the rewrite, with the precision and the bytes of the converted model."""
    changed = {"plan": {"precision": "int8"}, "after": {"bytes": parameter_bytes(model)}}
    return {**kept, **{key: {**kept[key], **new} for key, new in changed.items() if key in kept}}


def write_recovered(
    artifact: Artifact,
    rewritten: ir.Model,
    teacher: Artifact,
    original: ir.Model,
    model: ir.Model,
    report: RecoverReport,
    data: Dataset,
    seed: int,
    *,
    external: bool,
) -> None:
    """Write the model of a report with its record.

    Args:
        artifact, rewritten: The rewritten model, whose files are kept.
        teacher, original: The model that it was made from.
        model: The result.
        data: What was learned.
        external: Whether the weights are in a file of their own.
    """
    last = artifact.lineage[-1] if artifact.lineage else {}
    tokens = token_statistics(data)
    kept = {key: last[key] for key in KEPT if key in last}
    if report.int8_weight_bits is not None:
        kept = _as_int8(kept, model)
    entry = {
        "rewrite": "recover" if report.int8_weight_bits is None else "recover+int8",
        # The quality is measured against the teacher, not against the model before.
        "source": source_entry(teacher, original),
        "rewritten": source_entry(artifact, rewritten),
        "calibration": {**data.source, **({} if tokens is None else {"token_ids": tokens})},
        "seed": seed,
        **kept,
        **report.to_json(),
        "versions": {**versions(), "torch": torch.__version__},
    }
    write_rewritten(report.output, model, artifact, entry, external=external)
