"""Build choices of a search, and measure their loss and their speed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import onnx_ir as ir

from attnserve.checks.compare import Fidelity
from attnserve.checks.evaluate import score_session
from attnserve.checks.quality import ROUNDING, allowed_loss, largest_loss
from attnserve.checks.scores import Score, Share, share_kept
from attnserve.job import Job
from attnserve.models.example_inputs import example_inputs
from attnserve.models.lineage import ShapeLatency
from attnserve.options import Goal
from attnserve.planning.blocks.limits import MIN_GAIN, MIN_SPEEDUP
from attnserve.planning.blocks.pareto import Choice
from attnserve.planning.plans.apply import apply_plan, apply_steps, prepare
from attnserve.planning.plans.plan import Plan
from attnserve.planning.plans.state import State
from attnserve.planning.plans.steps import Train
from attnserve.planning.search.checkpoint import SearchCheckpoint
from attnserve.planning.search.choice_set import ChoiceSet
from attnserve.planning.search.report import Proof, mean_speedup
from attnserve.planning.search.search_input import SearchInput
from attnserve.planning.served_speed import example_feeds, time_models
from attnserve.runtime.cache import digest
from attnserve.runtime.interface import Batch
from attnserve.runtime.interleaved_timer import Speedup, paired_speedup
from attnserve.runtime.part_latency import Part
from attnserve.runtime.session import open_session
from graph_passes.analysis.workload import Workload
from graph_passes.errors import CannotRewrite

__all__ = ["Built", "Judge", "SpeedCheck", "score_model"]

PAIR_SECONDS = 8.0
"""Approximate time of a comparison that decides whether a model is written."""


@dataclass(frozen=True, eq=False)
class Built:
    """A choice that was built and measured.

    Attributes:
        state: The model after the steps of the plan.
        fidelity, share, loss: On the data that the search looks at; ``loss`` is the largest of the
            losses that the goal limits, at their bounds.
    """

    choice: Choice
    plan: Plan
    state: State
    fidelity: Fidelity
    share: Share | None
    loss: float

    @property
    def model(self) -> ir.Model:
        """The model in the precision of the plan."""
        return self.state.result


class SpeedCheck(NamedTuple):
    """The speed of a built model beside the original, and whether it is enough.

    Attributes:
        speeds: Latencies of both models at all checked lengths.
        gain: The geometric mean of the speed-ups at the requested lengths.
        refusal: Why the model is not returned; empty for one that is worth it.
    """

    speeds: Sequence[ShapeLatency]
    gain: float
    refusal: str


@dataclass(eq=False)
class Judge:
    """Builds choices and measures them on data to choose.

    The latest build, the latest that keeps enough, and the latest that removes nothing are held:
    the search ends with one of them.

    Attributes:
        choices: What it builds.
        original_score: The original's score, if the goal has a task.
        measured: (loss, cosine) of each built choice, those before an interruption included.
    """

    search_input: SearchInput
    choices: ChoiceSet
    checkpoint: SearchCheckpoint
    original_score: Score | None = None
    measured: dict[tuple[int, ...], tuple[float, float]] = field(
        default_factory=dict[tuple[int, ...], tuple[float, float]]
    )
    _latest: Built | None = None
    _enough: Built | None = None
    _whole: Built | None = None

    def loss(self, choice: Choice) -> float:
        """The measured loss of a choice, from the checkpoint or by building it."""
        stored = self.checkpoint.build(digest(self._plan(choice).to_json()))
        if stored is not None:
            self.measured[choice.picks] = stored
            return stored[0]
        return self.build(choice).loss

    def build(self, choice: Choice) -> Built:
        """Apply the plan of a choice, convert the model, and measure its loss."""
        for held in (self._latest, self._enough, self._whole):
            if held is not None and held.choice.picks == choice.picks:
                return held
        search_input, plan = self.search_input, self._plan(choice)
        number = len(self.measured) + (choice.picks not in self.measured)
        job = search_input.job.labeled(f"build {number}")
        state = apply_plan(plan, State(job, job.original.clone()))
        self._latest = built = self._built(choice, plan, state)
        if search_input.goal.keep is not None and built.loss <= allowed_loss(
            search_input.goal.keep
        ):
            self._enough = built
        if not plan.lossy_blocks:  # every result is compared with one that removes nothing
            self._whole = built
        self.measured[choice.picks] = built.loss, built.fidelity.mean_cosine
        self.checkpoint.add_build(digest(plan.to_json()), built.loss, built.fidelity.mean_cosine)
        return built

    def train(self, built: Built, training: Train, key: str, label: str) -> Built:
        """Train the model of a choice before its conversion, and measure it again.

        Args:
            key: A name for the checkpoint of the training.
            label: A name of the training, for progress.
        """
        plan = built.plan.with_training(training)
        state = State(
            self.search_input.job.labeled(label),
            built.state.model,
            key=key,
            applied=built.state.applied,
        )
        apply_steps((training, *plan.conversion), prepare(plan, state))
        return self._built(built.choice, plan, state)

    def _built(self, choice: Choice, plan: Plan, state: State) -> Built:
        """Measure a model on the data to choose."""
        data = self.search_input.data
        proof = self._compare(state.result, data.choose, "choose", 0, state.job, bounded=True)
        return Built(choice, plan, state, proof.fidelity, proof.share, proof.loss)

    def verify(self, built: Built, part: int) -> Proof:
        """Verify a built choice on the first or second verification part."""
        parts = [batches for batches in self.search_input.data.prove if batches]
        batches = parts[min(part, len(parts) - 1)]
        return self._compare(
            built.model, batches, "prove", 1 + part, self.search_input.job.labeled("held out")
        )

    def verify_on_all(self, built: Built) -> Proof:
        """Measure a built choice on all data that was held out, by its bounds.

        All of this data was used before, but only for choices with more loss.
        """
        data, job = self.search_input.data, self.search_input.job.labeled("held out")
        batches = [*data.choose, *(batch for part in data.prove for batch in part)]
        return self._compare(built.model, batches, "held out", None, job, bounded=True)

    def time(self, built: Built) -> SpeedCheck:
        """Time a built model and the original at all checked lengths."""
        search_input = self.search_input
        speeds = self.compare_speed(built.model, search_input.checked)
        gain = mean_speedup(speeds, search_input.lengths)
        return SpeedCheck(speeds, gain, _refusal(built.plan, gain, speeds))

    def speedup(self, built: Built) -> float:
        """The measured speed-up of a built model, as geometric mean over the requested lengths."""
        search_input = self.search_input
        return mean_speedup(
            self.compare_speed(built.model, search_input.job.requested), search_input.lengths
        )

    def compare_speed(self, model: ir.Model, workloads: Sequence[Workload]) -> list[ShapeLatency]:
        """Time a model and the float32 original in interleaved order.

        Workloads at which the model seems slower are timed again.
        """
        job, table = self.search_input.job, self.choices.timing.table
        feeds = tuple(
            example_inputs(job.original, workload, job.context.seed) for workload in workloads
        )
        parts = {"original": Part(job.original, feeds), "new": Part(model, feeds)}
        progress = job.context.stage("time the whole model")
        times = table.measure(parts, progress=progress)
        pairs = list(zip(times["original"], times["new"], strict=True))
        if slow := [i for i, (before, after) in enumerate(pairs) if before < MIN_SPEEDUP * after]:
            for part in parts.values():
                for index in slow:
                    table.times_ms.pop(part.key(index), None)
            times = table.measure(parts, progress=progress)
            pairs = list(zip(times["original"], times["new"], strict=True))
        return [
            ShapeLatency(
                batch=workload.batch,
                sequence=workload.length,
                original_ms=before,
                ms=after,
                speedup=before / after,
            )
            for workload, (before, after) in zip(workloads, pairs, strict=True)
        ]

    def paired_speedup(self, slow: Built, fast: Built) -> Speedup:
        """The speed-up of one built model over another at the requested lengths (interleaved runs).

        Raises:
            CannotRewrite: The two models cannot run side by side, for example for lack of memory.
        """
        job = self.search_input.job
        feeds = example_feeds(job.original, job.requested, job.context.seed)
        times = time_models(
            [slow.model, fast.model], feeds, context=job.context, seconds=PAIR_SECONDS
        )
        if times is None:
            raise CannotRewrite(
                "two models of the search cannot be timed beside each other",
                "free memory, and start the search again: it continues",
                code="search.not_timed",
            )
        return paired_speedup([times[0] for times in times[1]], [times[1] for times in times[1]])

    def _compare(
        self,
        model: ir.Model,
        batches: Sequence[Batch],
        split: str,
        rows: int | None,
        job: Job,
        *,
        bounded: bool = False,
    ) -> Proof:
        """Compare a model with the original on batches, and on a part of the rows of the task.

        Args:
            rows: The part, see ``share_kept``; None for all rows.
            bounded: See ``Quality.loss``.
        """
        search_input = self.search_input
        fidelity = job.compare_held_out(model, batches, split)
        losses, share = list[float](), None
        if search_input.goal.measure != "score":
            losses.append(largest_loss(fidelity.qualities, bounded=bounded))
        if search_input.goal.task is not None:
            # Cosines of single numbers, as a reranker returns, are those of their signs.
            outputs = fidelity.outputs
            is_same = bool(outputs) and all(
                output.relative_error < ROUNDING and not output.not_finite_rows
                for output in outputs
            )
            assert self.original_score is not None
            score = self.original_score if is_same else score_model(search_input.goal, job, model)
            share = share_kept(self.original_score, score, part=rows, seed=job.context.seed)
            losses.append(share.loss(bounded=bounded))
        return Proof.of(fidelity, share, max(losses, default=0.0))

    def _plan(self, choice: Choice) -> Plan:
        return self.choices.plan(choice, self.search_input.job.target.precision)


def _refusal(plan: Plan, gain: float, speeds: Sequence[ShapeLatency]) -> str:
    """Why a plan is not returned; empty for one that is worth it."""
    is_lossy = bool(plan.lossy_blocks) or plan.precision != "float32"
    if not (is_lossy or plan.passes):
        return "no configuration of any block is faster within the allowed loss"
    if gain < (MIN_GAIN if is_lossy else 1.0):
        return f"the best model runs at {gain:.2f}x the speed of the original"
    slowest = min(speeds, key=lambda speed: speed.speedup)
    if slowest.speedup < MIN_SPEEDUP:
        return (
            f"the best model runs at {slowest.speedup:.2f}x the speed of the original at "
            f"{slowest.sequence} tokens"
        )
    return ""


def score_model(goal: Goal, job: Job, model: ir.Model) -> Score:
    """The score of a model on the task of a goal."""
    assert goal.task is not None and goal.eval_data is not None
    return score_session(
        open_session(model, job.context), job.artifact, task=goal.task, data=goal.eval_data,
        tokenizer=job.tokenizer, context=job.context,
    )  # fmt: skip
