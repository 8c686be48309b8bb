"""Search for the fastest plan that keeps the requested quality, by measurement.

1. Time: every configuration of every block, each with its fastest operator (``model_timing``).
2. Loss: the loss of the model's output for each of them, on calibration data
   (``blocks.loss_curves``); the losses of different blocks nearly add up.
3. Choices: the Pareto front of predicted time and loss (``choice_set``).
4. Select: choices of the front are built, refitted, and measured on the data to choose until the
   allowed loss is used up (``front_search``). The whole model is then timed beside the original.
5. Verify: the choice is measured once on unused held-out data. If it misses the goal, a choice
   with less loss is verified on other data.

With ``Goal.recover``, faster choices are trained before the verification (``recovery_search``).

A removal is kept only if it is significantly faster than the fused original in the same precision,
which is returned otherwise. If the model is slower than the original at some length, the plan is
empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import onnx_ir as ir

from attnserve.checks.certify import read_attention, require_attention
from attnserve.checks.quality import allowed_loss
from attnserve.data.datasets import content_digest
from attnserve.job import Job
from attnserve.models.checksums import fingerprint, path_sha256
from attnserve.models.example_inputs import example_inputs
from attnserve.models.opset import raise_opset
from attnserve.models.output_kinds import require_measurable
from attnserve.models.search_record import Asked
from attnserve.options import Goal
from attnserve.planning.blocks.configurations import group_blocks
from attnserve.planning.blocks.loss_curves import Losses, conversion_losses, loss_curves
from attnserve.planning.plans.apply import start
from attnserve.planning.plans.plan import Plan
from attnserve.planning.search.checkpoint import SearchCheckpoint
from attnserve.planning.search.choice_set import ChoiceSet
from attnserve.planning.search.estimates import changes_to_measure
from attnserve.planning.search.front_search import FrontSearch
from attnserve.planning.search.judge import Built, Judge, ScoredTask
from attnserve.planning.search.model_timing import ModelTiming, time_model
from attnserve.planning.search.recovery_search import RecoverySearch, training_of
from attnserve.planning.search.search_input import SearchInput
from attnserve.planning.search.verdict import SearchResult, result_of, verify_choice
from attnserve.precision.convert import convert
from attnserve.precision.schemes import SCHEMES
from attnserve.runtime.cache import digest
from attnserve.runtime.session import open_session
from attnserve.versions import versions
from graph_passes.analysis.workload import Workload
from graph_passes.emit.fused_attention import OPSETS
from graph_passes.errors import CannotRewrite, InvalidArgument, InvalidData

__all__ = ["SearchResult", "search"]

CHECKED_LENGTHS = (16, 32, 64, 128, 256, 384, 512)
"""Lengths at which the whole model is timed beside the original, if the model accepts them. Blocks
must not be slower at the shortest and the longest one."""


def search(goal: Goal, job: Job) -> SearchResult:
    """Search for a plan; ``attnserve.plan`` describes the goal.

    Times, losses and builds are stored in the user's cache folder until the search ends, so that an
    interrupted search continues.

    Args:
        job: With data, and weights that are finite.

    Raises:
        CheckFailed: The goal cannot be reached.
        InvalidArgument: The model does not run at the requested shape, or the goal does not fit it.
        InvalidModel: No output has a quality that can be measured.
    """
    if goal.measure != "score":
        require_measurable(job.original)
    search_input, precision = _search_input(goal, job), job.target.precision
    newest = job.original.clone()
    with suppress(CannotRewrite):  # operators of newer opsets are then no choices
        raise_opset(newest, max(OPSETS.values()))
    attention = read_attention(newest, seed=job.context.seed)
    require_attention(attention)
    if precision != "float32":
        # Fails early if the model cannot be converted.
        convert(job.original, precision, search_input.data.fit[:1], to_nearest=True)
    if goal.recover is not None:
        training_of(goal).check(start(Plan(), job.labeled("can be trained"), job.original))
    task = ScoredTask.of(goal, job)
    checkpoint = SearchCheckpoint(_key(search_input))
    groups = group_blocks(newest, attention.blocks, ffn="ffn" in goal.allow)
    timing = time_model(search_input, newest, groups)
    losses = _estimate_losses(search_input, newest, timing, checkpoint)
    allowed = None if goal.keep is None else allowed_loss(goal.keep)
    judge = Judge(search_input, timing.table, checkpoint, allowed, task)
    front_search = FrontSearch(goal, ChoiceSet.of(timing, losses, precision), judge)
    best = front_search.run()
    if best is not None and goal.keep is not None:
        best = front_search.as_fast_with_less_loss(best)
    if goal.recover is None:
        result = result_of(front_search, *verify_choice(front_search, best))
    else:
        recovery = RecoverySearch(front_search, _key(search_input), 60 * goal.recover)
        result = _recovered(recovery, best)
    checkpoint.remove()
    return result


def _recovered(recovery: RecoverySearch, plain: Built | None) -> SearchResult:
    """The result with training, or without it if that is no better."""
    best, verifications, report = recovery.run(plain)
    if best is None:
        best, others = verify_choice(recovery.front_search, plain)
        verifications = [*verifications, *others]
    result = result_of(recovery.front_search, best, verifications, report)
    recovery.remove_checkpoints()
    return result


# ---- input --------------------------------------------------------------------------------------


def _search_input(goal: Goal, job: Job) -> SearchInput:
    target, context, data = job.target, job.context, job.data
    assert data is not None
    if context.provider == "cpu" and not SCHEMES[target.precision].runs_on_cpu:
        raise InvalidArgument(
            "bfloat16 cannot be timed on a CPU: ONNX Runtime has no CPU kernels for it",
            "give `provider` cuda, or `precision` float16",
            code="search.bfloat16",
        )
    phase = job.requested[0].phase
    others = (Workload.of(target.batch, length, phase) for length in CHECKED_LENGTHS)
    workloads = sorted({*job.requested, *others})
    checked, reason = _accepted(job.original, workloads, context.seed)
    if refused := [workload for workload in job.requested if workload not in checked]:
        raise InvalidArgument(
            f"the model does not run at batch {target.batch}, {refused[0].length} tokens: "
            f"{reason[:300]}",
            f"choose `sequence` up to {checked[-1].length}"
            if checked
            else "choose another `batch`",
            code="search.shape",
        )
    asked = Asked(
        keep=goal.keep,
        target_speedup=goal.target_speedup,
        measure=goal.measure,
        task=goal.task,
        eval_data=goal.eval_data and goal.eval_data.name,
        eval_data_sha256=goal.eval_data and _checksum(goal.eval_data),
        allow=goal.allow,
        precision=target.precision,
        batch=target.batch,
        sequences=tuple(workload.length for workload in job.requested),
        phase=phase,
        provider=context.provider,
        runtime=context.runtime_name,
        threads=context.threads,
        seed=context.seed,
    )
    if goal.recover is not None:
        asked = asked.model_copy(update={"recover": goal.recover})
    return SearchInput(job, data, checked, asked)


def _accepted(
    model: ir.Model, workloads: Sequence[Workload], seed: int
) -> tuple[list[Workload], str]:
    """The workloads that the model runs, and the first error of the others."""
    session, accepted, reason = open_session(model), list[Workload](), ""
    for workload in workloads:
        try:
            session.run(None, example_inputs(model, workload, seed))
        except (InvalidArgument, InvalidData) as error:
            reason = reason or error.what
            continue
        accepted.append(workload)
    return accepted, reason


def _checksum(path: Path) -> str:
    if not path.exists():
        raise InvalidData(f"{path}: no such file", "check the path", code="search.no_file")
    return path_sha256(path)


def _key(search_input: SearchInput) -> str:
    """Key of the checkpoint; equal for equal requests."""
    artifact, data = search_input.job.artifact, search_input.data
    served = [artifact.pooling, artifact.dimensions, artifact.output, content_digest(data)]
    asked = search_input.asked.to_json()
    return digest((fingerprint(artifact), data.source.to_json(), asked, served, versions()))


# ---- losses -------------------------------------------------------------------------------------


def _estimate_losses(
    search_input: SearchInput, model: ir.Model, timing: ModelTiming, checkpoint: SearchCheckpoint
) -> Losses:
    """The losses of all choices, from the checkpoint if it has them."""
    stored = checkpoint.losses(timing.pairs)
    if stored is not None:
        return stored
    changes = {
        group.key: changes_to_measure(
            group, timing.blocks[group.blocks[0]], num_requested=timing.num_requested
        )
        for group in timing.groups
    }
    job = search_input.job
    context = replace(job.context, threads=0, seed=0)
    losses = loss_curves(
        model, timing.groups, search_input.data.fit, changes, timing.pairs, new_meter=job.meter,
        context=context,
    )  # fmt: skip
    if timing.float_latencies:
        conversion = conversion_losses(
            model, timing.groups, search_input.data.fit, job.target.precision, new_meter=job.meter,
            context=context,
        )  # fmt: skip
        losses = losses._replace(conversion=conversion)
    checkpoint.put_losses(losses)
    return losses
