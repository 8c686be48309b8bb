"""The result of a recovery, and its record."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch

from attnserve.data.token_statistics import calibration_of
from attnserve.fusion import fused_copy
from attnserve.job import JobWithData
from attnserve.models.artifact import Artifact
from attnserve.models.checksums import source_entry
from attnserve.models.lineage import BeforeRecovery, LineageEntry
from attnserve.models.measured import Fidelity
from attnserve.models.outputs import write_rewritten
from attnserve.models.quantized import Bits, Int8Activations
from attnserve.models.recorded import present
from attnserve.models.training_result import TrainingResult
from attnserve.recovery.labels import LabelReport
from attnserve.versions import versions
from graph_passes.analysis.parameters import parameter_bytes

__all__ = ["RecoverReport", "write_recovered"]

KEPT = ("plan", "before", "after", "batch", "sequence", "break_even_sequence")
"""Fields of the rewrite's record about the graph, which training does not change."""


@dataclass(frozen=True)
class RecoverReport:
    """The quality before and after training, on rows that were not used in the training.

    Attributes:
        before: The rewritten model against the original.
        after: The result against the original; equal to ``before`` without a gain.
        gain: Whether the result is better. If not, it has the weights of the rewritten model.
        training: The result of the training.
        int8_weight_bits, int8_activations: As in ``OptimizeReport``; None without int8.
        scores: The scores on labeled rows that were not used in the training; None without labels.
        warnings: Warnings for the user.
    """

    output: Path
    before: Fidelity
    after: Fidelity
    gain: bool
    training: TrainingResult
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
        return self.record.to_json("rewrite")

    @property
    def record(self) -> LineageEntry:
        """The entry of the lineage; ``write_recovered`` adds the inputs."""
        return LineageEntry(
            rewrite="recover" if self.int8_weight_bits is None else "recover+int8",
            fidelity=self.after.cosines,
            qualities=self.after.qualities,
            before_recovery=BeforeRecovery(
                fidelity=self.before.cosines, qualities=self.before.qualities
            ),
            gain=self.gain,
            verdict=self.verdict,
            training=self.training.record,
            warnings=self.warnings,
            **present(
                scores=self.scores and self.scores.to_json(),
                int8_weight_bits=self.int8_weight_bits,
                int8_activations=self.int8_activations,
            ),
        )


def write_recovered(
    artifact: Artifact,
    rewritten: ir.Model,
    teacher: Artifact,
    job: JobWithData,
    model: ir.Model,
    report: RecoverReport,
    *,
    external: bool,
    openvino: bool,
) -> None:
    """Write the model of a report with its record.

    Args:
        artifact, rewritten: The rewritten model, whose files are kept.
        teacher: The original on disk; the job's artifact is the one with the tokenizer.
        model: The result.
        external: Whether the weights are in a file of their own.
        openvino: Whether an OpenVINO file is written, if it can be.
    """
    last = artifact.lineage[-1].stated if artifact.lineage else {}
    fields = {name: last[name] for name in KEPT if name in last}
    if report.int8_weight_bits is not None:
        if "plan" in fields:
            fields["plan"] = {**fields["plan"], "precision": "int8"}
        if "after" in fields:
            fields["after"] = fields["after"].model_copy(update={"bytes": parameter_bytes(model)})
    inputs = {
        # The quality is measured against the teacher, not against the rewritten model.
        "source": source_entry(teacher, job.original),
        "rewritten": source_entry(artifact, rewritten),
        "calibration": calibration_of(job.data),
        "seed": job.context.seed,
        "versions": {**versions(), "torch": torch.__version__},
    }
    entry = report.record.model_copy(update={**inputs, **fields})
    write_rewritten(
        report.output,
        model,
        artifact,
        entry,
        external=external,
        openvino=fused_copy(model) if openvino else None,
    )
