"""Jobs of graphs that are on no disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx_ir as ir

from attnserve.job import Job
from attnserve.models.artifact import Artifact


def job_of(model: ir.Model, **values: Any) -> Job:
    """The job of a graph, with these fields."""
    return Job(Artifact(Path("model.onnx")), model, **values)
