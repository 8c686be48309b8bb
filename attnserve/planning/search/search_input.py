"""What a search times, and what it records of its request."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from attnserve.data.datasets import content_digest
from attnserve.job import Job
from attnserve.models.checksums import fingerprint, path_sha256
from attnserve.models.example_inputs import example_inputs
from attnserve.models.search_record import GoalRecord
from attnserve.options import Goal
from attnserve.precision.schemes import SCHEMES
from attnserve.runtime.cache import digest
from attnserve.runtime.session import open_session
from attnserve.versions import versions
from graph_passes.analysis.workload import Workload
from graph_passes.errors import InvalidArgument, InvalidData, Refusal

__all__ = ["CHECKED_LENGTHS", "checked_workloads", "goal_record", "search_key"]

CHECKED_LENGTHS = (16, 32, 64, 128, 256, 384, 512)
"""Lengths at which the whole model is timed, interleaved with the original, if it accepts them.
Blocks must not be slower at the shortest and the longest one."""


def checked_workloads(job: Job) -> list[Workload]:
    """The requested workloads and those of ``CHECKED_LENGTHS`` that the model accepts.

    Raises:
        InvalidArgument: The device has no kernels for the precision, or the model does not run at
            a requested workload.
    """
    precision = job.target.precision
    if job.context.device.provider == "cpu" and not SCHEMES[precision].runs_on_cpu:
        raise InvalidArgument(
            f"{precision} cannot be timed on a CPU: ONNX Runtime has no CPU kernels for it",
            "give `provider` cuda, or another `precision`",
            code="search.bfloat16",
        )
    batch, phase = job.requested_workloads[0].batch, job.requested_workloads[0].phase
    others = (Workload.of(batch, length, phase) for length in CHECKED_LENGTHS)
    session = open_session(job.original)

    def run(workload: Workload) -> None:
        session.run(None, example_inputs(job.original, workload, job.context.seed))

    refusals = {
        workload: Refusal.of(partial(run, workload), (InvalidArgument, InvalidData))
        for workload in sorted({*job.requested_workloads, *others})
    }
    accepted = [workload for workload, refusal in refusals.items() if refusal is None]
    for workload in job.requested_workloads:
        if (refusal := refusals[workload]) is None:
            continue
        raise InvalidArgument(
            f"the model does not run at batch {batch}, {workload.length} tokens: "
            f"{refusal.reason[:300]}",
            f"choose `sequence` up to {accepted[-1].length}"
            if accepted
            else "choose another `batch`",
            code="search.shape",
        )
    return accepted


def goal_record(goal: Goal, job: Job) -> GoalRecord:
    """The goal of a search as plan.json records it, with its workloads and its device.

    Raises:
        InvalidData: The file of the task does not exist.
    """
    device = job.context.device
    return GoalRecord(
        keep=goal.keep,
        target_speedup=goal.target_speedup,
        measure=goal.measure,
        task=goal.task,
        eval_data=goal.eval_data and goal.eval_data.name,
        eval_data_sha256=goal.eval_data and _checksum(goal.eval_data),
        allow=goal.allow,
        precision=job.target.precision,
        batch=job.requested_workloads[0].batch,
        sequences=tuple(workload.length for workload in job.requested_workloads),
        phase=job.requested_workloads[0].phase,
        provider=device.provider,
        runtime=device.runtime_name,
        threads=device.threads,
        seed=job.context.seed,
        recover=goal.recover,
    )


def search_key(goal: GoalRecord, job: Job) -> str:
    """The key of the checkpoints of a search; equal for equal requests."""
    artifact, data = job.artifact, job.required_data
    served = [artifact.pooling, artifact.dimensions, artifact.output, content_digest(data)]
    runtimes = list(job.runtimes)
    return digest(
        (fingerprint(artifact), data.source.to_json(), goal.to_json(), served, runtimes, versions())
    )


def _checksum(path: Path) -> str:
    if not path.exists():
        raise InvalidData(f"{path}: no such file", "check the path", code="search.no_file")
    return path_sha256(path)
