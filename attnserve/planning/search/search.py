"""Search for the fastest plan that keeps the requested quality, by measurement.

1. Time: every configuration of every block, each in its fastest implementation (``model_timing``).
2. Loss: the loss of the model's output for each of them, on calibration data (``block_loss``); the
   losses of different blocks nearly add up.
3. Candidates: the Pareto front of predicted time and loss (``candidate_set``).
4. Select: choices of the front are built, refitted, and measured on the data to choose until the
   allowed loss is used up (``front_search``). The whole model is then timed beside the original.
5. Verify: the choice is measured once on unused held-out data. If it misses the target, a choice
   with less loss is verified on other data.

With ``Goal.recover``, faster choices are trained before the verification (``recovery_search``).

A removal is kept only if it is significantly faster than the fused original in the same precision,
which is returned otherwise. If the model is slower than the original at some length, the plan is
empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import onnx_ir as ir

from attnserve.checks.certify import read_attention, require_attention
from attnserve.checks.quality import allowed_loss
from attnserve.data.datasets import content_digest
from attnserve.job import Job
from attnserve.models.checksums import fingerprint, path_sha256
from attnserve.models.example_inputs import example_inputs
from attnserve.models.lineage import Asked, Recovered, Source, Speed
from attnserve.models.opset import raise_opset
from attnserve.models.output_kinds import require_measurable
from attnserve.options import Goal
from attnserve.planning.blocks.candidates import group_blocks
from attnserve.planning.blocks.limits import MIN_REMOVAL_GAIN
from attnserve.planning.blocks.loss_curves import Losses, conversion_losses, loss_curves
from attnserve.planning.plans.state import State
from attnserve.planning.search.candidate_set import CandidateSet
from attnserve.planning.search.checkpoint import SearchCheckpoint
from attnserve.planning.search.estimates import changes_to_measure
from attnserve.planning.search.explain import explain, front_points
from attnserve.planning.search.front_search import FrontSearch
from attnserve.planning.search.judge import Built, Judge, score_model
from attnserve.planning.search.model_timing import ModelTiming, time_model
from attnserve.planning.search.recovery_search import RecoverySearch, training_of
from attnserve.planning.search.report import PlanReport, Proof
from attnserve.planning.search.search_input import SearchInput
from attnserve.planning.served_speed import ServedTimer
from attnserve.precision.convert import convert
from attnserve.precision.schemes import SCHEMES
from attnserve.runtime.cache import digest
from attnserve.runtime.session import open_session
from attnserve.versions import versions
from graph_passes.analysis.workload import Workload
from graph_passes.emit.fused_attention import OPSETS
from graph_passes.errors import CannotRewrite, CheckFailed, InvalidArgument, InvalidData

__all__ = ["SearchResult", "search"]

CHECKED_LENGTHS = (16, 32, 64, 128, 256, 384, 512)
"""Lengths at which the whole model is timed beside the original, if the model accepts them. Blocks
must not be slower at the shortest and the longest one."""


@dataclass(frozen=True, eq=False)
class SearchResult:
    """The report of a search, and the model after all steps of the plan."""

    report: PlanReport
    state: State


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
    given, precision = _search_input(goal, job), job.target.precision
    newest = job.original.clone()
    with suppress(CannotRewrite):  # operators of newer opsets are then no candidates
        raise_opset(newest, max(OPSETS.values()))
    attention = read_attention(newest, seed=job.context.seed)
    require_attention(attention)
    if precision != "float32":
        # Fails early if the model cannot be converted.
        convert(job.original, precision, given.data.fit[:1], to_nearest=True)
    if goal.recover is not None:
        training_of(goal).check(State(job.labeled("can be trained"), job.original))
    original_score = None
    if goal.task is not None:
        original_score = score_model(goal, job.labeled("original"), job.original)
    checkpoint = SearchCheckpoint(_key(given))
    groups = group_blocks(newest, attention.blocks, ffn="ffn" in goal.allow)
    timing = time_model(given, newest, groups)
    losses = _estimate_losses(given, newest, timing, checkpoint)
    candidates = CandidateSet.of(timing, losses)
    front = FrontSearch(goal, candidates, Judge(given, candidates, checkpoint, original_score))
    best = front.run()
    if best is not None and goal.keep is not None:
        best = front.as_fast_with_less_loss(best)
    if goal.recover is None:
        result = _result(front, *_proved(front, best))
    else:
        result = _recovered(front, best, 60 * goal.recover)
    checkpoint.remove()
    return result


def _recovered(front: FrontSearch, plain: Built | None, seconds: float) -> SearchResult:
    """The result with training, or without it if that is no better."""
    recovery = RecoverySearch(front, _key(front.judge.given), seconds)
    best, proofs, report = recovery.run(plain)
    if best is None:
        best, others = _proved(front, plain)
        proofs = [*proofs, *others]
    result = _result(front, best, proofs, report)
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
    if refused := [each for each in job.requested if each not in checked]:
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
        sequences=tuple(each.length for each in job.requested),
        phase=phase,
        provider=context.provider,
        runtime=context.runtime,
        threads=context.threads,
        seed=context.seed,
    )
    if goal.recover is not None:
        asked = asked.model_copy(update={"recover": goal.recover})
    return SearchInput(goal, job, data, checked, asked)


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


def _key(given: SearchInput) -> str:
    """Key of the checkpoint; equal for equal requests."""
    artifact, data = given.job.artifact, given.data
    served = [artifact.pooling, artifact.dimensions, artifact.output, content_digest(data)]
    asked = given.asked.to_json()
    return digest((fingerprint(artifact), data.source.to_json(), asked, served, versions()))


# ---- losses -------------------------------------------------------------------------------------


def _estimate_losses(
    given: SearchInput, model: ir.Model, timing: ModelTiming, checkpoint: SearchCheckpoint
) -> Losses:
    """The losses of all candidates, from the checkpoint if it has them."""
    known = checkpoint.losses(timing.pairs)
    if known is not None:
        return known
    changes = {
        group.key: changes_to_measure(group, timing.blocks[group.blocks[0]], target=timing.target)
        for group in timing.groups
    }
    job = given.job
    context = replace(job.context, threads=0, seed=0)
    losses = loss_curves(
        model, timing.groups, given.data.fit, changes, timing.pairs, new_meter=job.meter,
        context=context,
    )  # fmt: skip
    if timing.in_float:
        conversion = conversion_losses(
            model, timing.groups, given.data.fit, job.target.precision, new_meter=job.meter,
            context=context,
        )  # fmt: skip
        losses = losses._replace(conversion=conversion)
    checkpoint.put_losses(losses)
    return losses


# ---- result -------------------------------------------------------------------------------------


def _proved(front: FrontSearch, best: Built | None) -> tuple[Built | None, list[Proof]]:
    """A choice that keeps its promise on data that no choice has seen, and all proofs, in order.

    If two choices fail, no unused data is left: a third one is measured on all held-out data, by
    its confidence bounds. If that fails too, a lossless choice is returned; None if that fails
    because of its precision.
    """
    if best is None:
        return None, []
    goal, judge = front.goal, front.judge
    proofs = [judge.prove(best, 0)]
    for attempt in (1, 2, 3):
        if goal.keep is None or proofs[-1].loss <= allowed_loss(goal.keep):
            break
        if not best.choice.loss:
            break
        if attempt < 3:
            best = front.more_careful(best, proofs[-1].loss, goal.keep)
        else:
            best = judge.build(judge.candidates.front[0])
        proofs.append(judge.prove_on_all(best) if attempt == 2 else judge.prove(best, attempt))
    if goal.keep is not None and (best.choice.loss or front.precision != "float32"):
        best = best if proofs[-1].loss <= allowed_loss(goal.keep) else None
    return best, proofs


def _worth_removing(
    front: FrontSearch, best: Built, proofs: Sequence[Proof]
) -> tuple[Built, Sequence[Proof], str]:
    """The best choice, or the choice without removal if it is about as fast; and the reason."""
    if not best.plan.changed:
        return best, proofs, ""
    plain, whole = front.nothing_removed()
    if whole is None:  # it misses the speed-up of the goal
        return best, proofs, ""
    gain = front.judge.paired_speedup(whole, best)
    if gain.low >= MIN_REMOVAL_GAIN:
        return best, proofs, ""
    proved, others = _proved(plain, whole)
    if proved is not None and proved is not whole:  # it keeps more blocks in float32
        gain = front.judge.paired_speedup(proved, best)
    if proved is None or gain.low >= MIN_REMOVAL_GAIN:
        return best, proofs, ""
    reason = (
        f"nothing is removed: the best removal runs at {gain.value:.2f}x ({gain.low:.2f} to "
        f"{gain.high:.2f}) the speed of the fused original in {front.precision}, expected at "
        f"least {MIN_REMOVAL_GAIN}x"
    )
    return proved, others, reason


def _result(
    front: FrontSearch,
    best: Built | None,
    proofs: Sequence[Proof],
    recovered: Recovered | None = None,
) -> SearchResult:
    """The best choice, or an empty plan if it is not faster than the original."""
    judge, goal, note = front.judge, front.goal, ""
    given = judge.given
    if best is not None:
        best, proofs, note = _worth_removing(front, best, proofs)
    if best is None:
        best = judge.build(judge.candidates.front[0])
        reason = (
            f"the best candidate reaches {1 - proofs[-1].loss:.4f} on held-out data, "
            f"target {given.goal.keep:g}"
            if proofs
            else f"the lossless candidate reaches {1 - best.loss:.4f}, target {given.goal.keep:g}"
        )
        return _no_gain(judge, best, reason, recovered)
    timed = judge.time(best)
    if timed.refusal and best.plan.changed:  # for example, it is slower at a length
        other, others = _proved(*front.nothing_removed())
        if other is not None:
            note = f"nothing is removed: with a removal {timed.refusal}"
            best, proofs, timed = other, others, judge.time(other)
    if timed.refusal:
        if (goal.target_speedup or 1) > 1:
            raise CheckFailed(
                f"`target_speedup` is {goal.target_speedup:g}: {timed.refusal}",
                "lower it, or search for `keep`",
                code="search.target_speedup",
            )
        return _no_gain(judge, best, timed.refusal, recovered, timed.speeds)
    if recovered is not None and note:
        recovered = _without_gain(recovered, note)
    proof = proofs[-1]
    kept: list[str] = []
    if proof.fidelity.quality is not None:
        quality = proof.fidelity.quality
        kept.append(f"{quality.measure} {quality.value:.4f}")
    if proof.share is not None:
        kept.append(
            f"{proof.share.value:.2%} of the {goal.task} score (standard error "
            f"{proof.share.standard_error:.2%})"
        )
    speed = ServedTimer(given.job).measure(best.state.model, best.model, best.plan)
    verdict = f"{timed.gain:.2f}x as fast, keeping {', '.join(kept)}"
    if speed is not None:
        verdict += f": {speed.describe(best.plan.precision)}"
    if recovered is not None and recovered.gain:
        verdict += f" ({recovered.verdict})"
    verdict += f"; {note}" if note else ""
    report = replace(
        _report(judge, best, verdict),
        rewrites=best.plan,
        gain=True,
        fidelity=proof.fidelity,
        share=proof.share,
        speeds=timed.speeds,
        chosen=best.fidelity,
        proofs=tuple(proofs),
        recovered=recovered,
        speed=speed,
    )
    return SearchResult(report, best.state)


def _without_gain(recovered: Recovered, reason: str) -> Recovered:
    verdict = f"training brings no gain: {reason}"
    return recovered.model_copy(update={"gain": False, "verdict": verdict})


def _no_gain(
    judge: Judge,
    best: Built,
    reason: str,
    recovered: Recovered | None,
    speeds: Sequence[Speed] = (),
) -> SearchResult:
    """The empty plan, which leaves the model unchanged."""
    verdict = f"no gain: {reason}; the original is returned"
    if recovered is not None:
        recovered = _without_gain(recovered, reason)
    report = replace(_report(judge, best, verdict), speeds=speeds, recovered=recovered)
    job = judge.given.job
    return SearchResult(report, State(job, job.original))


def _report(judge: Judge, best: Built, verdict: str) -> PlanReport:
    """The report of a search that returns the original."""
    given, timing, artifact = judge.given, judge.candidates.timing, judge.given.job.artifact
    return PlanReport(
        model=Source(file=artifact.model.name, sha256=fingerprint(artifact)),
        calibration=given.data.source,
        asked=given.asked,
        verdict=verdict,
        decisions=explain(judge.candidates, best.choice),
        front=front_points(judge.candidates, judge.measured),
        timed=timing.to_json(),
        versions=versions(),
        machine=timing.table.setting,
    )
