"""The report of a recovery, and the writing of its model with the record."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch

from attnserve.data.token_statistics import calibration_of
from attnserve.fusion import fused_for_libraries
from attnserve.job import Job
from attnserve.models.artifact import Artifact
from attnserve.models.checksums import source_entry
from attnserve.models.lineage import RecoverEntry
from attnserve.models.measured import Fidelity
from attnserve.models.outputs import write_rewritten
from attnserve.models.training_result import TrainingResult
from attnserve.versions import versions
from graph_passes.analysis.parameters import parameter_bytes

__all__ = ["RecoverReport", "write_recovered"]

KEPT = ("plan", "before", "after", "batch", "sequence", "break_even_sequence")
"""Fields of the rewrite's record about the graph, which training does not change."""


@dataclass(frozen=True)
class RecoverReport:
    """The quality before and after training, on rows that were not used in the training.

    Attributes:
        record: The entry of the lineage; ``write_recovered`` adds the inputs.
        before: The rewritten model against the original, with the errors of each output.
        after: The result against the original; equal to ``before`` without a gain.
        training: The result of the training.
        output: The .onnx file.
    """

    record: RecoverEntry
    before: Fidelity
    after: Fidelity
    training: TrainingResult
    output: Path

    def to_json(self) -> dict[str, Any]:
        return self.record.to_json("rewrite")


def write_recovered(
    artifact: Artifact,
    rewritten: ir.Model,
    teacher: Artifact,
    job: Job,
    model: ir.Model,
    report: RecoverReport,
    *,
    external: bool,
    openvino: bool,
) -> None:
    """Write the model of a report with its record.

    Args:
        artifact, rewritten: The rewritten model, whose files are kept.
        teacher: The original on disk; the job's artifact has the tokenizer.
        model: The result.
        external: Whether the weights are in a separate file.
        openvino: Whether an OpenVINO file is written, if possible.
    """
    last = artifact.lineage[-1].stated if artifact.lineage else {}
    fields = {name: last[name] for name in KEPT if name in last}
    if report.record.int8_weight_bits is not None:
        if "plan" in fields:
            fields["plan"] = {**fields["plan"], "precision": "int8"}
        if "after" in fields:
            fields["after"] = fields["after"].model_copy(update={"bytes": parameter_bytes(model)})
    inputs = {
        # The quality is measured against the teacher, not against the rewritten model.
        "source": source_entry(teacher, job.original),
        "rewritten": source_entry(artifact, rewritten),
        "calibration": calibration_of(job.required_data),
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
        openvino=fused_for_libraries(model) if openvino else None,
    )
