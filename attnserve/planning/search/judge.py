"""Build choices of a search, and measure their loss and their speed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import onnx_ir as ir

from attnserve.checks.compare import Fidelity, compare
from attnserve.checks.evaluate import ONE_SIDED, Share, score_session, share_kept
from attnserve.context import RunContext
from attnserve.models.example_inputs import example_inputs
from attnserve.models.precision import convert
from attnserve.planning.apply import ApplyReport, apply_plan
from attnserve.planning.plan import Plan
from attnserve.planning.search.candidate_set import CandidateSet
from attnserve.planning.search.checkpoint import Checkpoint, digest
from attnserve.planning.search.goal import SearchInput
from attnserve.planning.search.limits import MIN_SPEEDUP
from attnserve.planning.search.pareto import Choice
from attnserve.planning.search.report import Speed, mean_speedup
from attnserve.runtime.part_latency import Part
from attnserve.runtime.session import open_session

__all__ = ["ROUNDING", "Built", "Judge", "score_model"]

DRIFT = 3.5
"""The largest accepted ratio of cosine loss to score loss. A score on a few hundred rows can stay
while the function changes, and scores on other rows then drop. For all-MiniLM-L6-v2, 99.5 % of the
score on STS-B's dev set came with 98.2 % on about 4,000 other pairs at a cosine of 0.937, and
99.8 % with 99.2 % at 0.965."""

ROUNDING = 1e-4
"""A loss below this comes from rounding."""


@dataclass(frozen=True, eq=False)
class Built:
    """A choice that was built and measured.

    Attributes:
        float32_model: The rewritten model in float32.
        model: The same model in the requested precision.
        share: The kept share of the task's score, if the goal has a task.
        loss: Of the goal's measure, at its lower confidence bound.
    """

    choice: Choice
    plan: Plan
    float32_model: ir.Model
    model: ir.Model
    applied: ApplyReport
    fidelity: Fidelity
    share: Share | None
    loss: float


class Judge:
    """Builds choices and measures them on held-out data; the latest build is kept."""

    def __init__(
        self,
        given: SearchInput,
        candidates: CandidateSet,
        checkpoint: Checkpoint,
        original_score: Any = None,
    ) -> None:
        """Prepare to build choices of ``candidates``.

        Args:
            original_score: The original's score, if the goal has a task.
        """
        self.given = given
        self.candidates = candidates
        self.checkpoint = checkpoint
        self.original_score = original_score
        self.measured: dict[tuple[int, ...], tuple[float, float]] = {}
        """(loss, cosine) of each built choice, those before an interruption included."""
        self._last: Built | None = None

    def loss(self, choice: Choice) -> float:
        """The measured loss of a choice; it is built unless the checkpoint knows its loss."""
        known = self.checkpoint.build(digest(self._plan(choice).to_json()))
        if known is not None:
            self.measured[choice.picks] = known
            return known[0]
        return self.build(choice).loss

    def build(self, choice: Choice) -> Built:
        """Apply the plan of a choice, convert the model, and measure its loss."""
        if self._last is not None and self._last.choice.picks == choice.picks:
            return self._last
        given, plan = self.given, self._plan(choice)
        number = len(self.measured) + (choice.picks not in self.measured)

        def progress(stage: str, done: int, total: int) -> None:
            given.context.progress(f"build {number}: {stage}", done, total)

        float32_model = given.model.clone()
        applied = apply_plan(
            plan, float32_model, replace(given.context, threads=0, progress=progress),
            original=given.model, data=given.data, shape=(given.batch, given.lengths[-1]),
        )  # fmt: skip
        model = convert(float32_model, given.goal.precision, given.data.fit)
        fidelity = compare(
            given.model, model, given.data.held_out, f"held out of {given.data.source['file']}",
            context=RunContext(given.context.provider, progress=progress),
        )  # fmt: skip
        share, loss = self._share_and_loss(model, fidelity, f"build {number}: score")
        self._last = Built(choice, plan, float32_model, model, applied, fidelity, share, loss)
        self.measured[choice.picks] = loss, fidelity.mean_cosine
        self.checkpoint.add_build(digest(plan.to_json()), loss, fidelity.mean_cosine)
        return self._last

    def speedup(self, built: Built) -> float:
        """The measured speed-up of a built model, as geometric mean over the requested lengths."""
        lengths = self.given.lengths
        return mean_speedup(self.compare_speed(built.model, lengths), lengths)

    def compare_speed(self, model: ir.Model, lengths: Sequence[int]) -> list[Speed]:
        """Time a model and the float32 original in interleaved order.

        Lengths at which the model seems slower are timed again.
        """
        given, table = self.given, self.candidates.timing.table
        feeds = tuple(
            example_inputs(given.model, given.batch, length, given.context.seed)
            for length in lengths
        )
        parts = {"original": Part(given.model, feeds), "new": Part(model, feeds)}
        progress = given.context.stage("time the whole model")
        times = table.measure(parts, progress=progress)
        pairs = list(zip(times["original"], times["new"], strict=True))
        if slow := [i for i, (before, after) in enumerate(pairs) if before < MIN_SPEEDUP * after]:
            for part in parts.values():
                for index in slow:
                    table.times_ms.pop(part.key(index), None)
            times = table.measure(parts, progress=progress)
            pairs = list(zip(times["original"], times["new"], strict=True))
        return [
            Speed(given.batch, length, before, after, before / after)
            for length, (before, after) in zip(lengths, pairs, strict=True)
        ]

    def _share_and_loss(
        self, model: ir.Model, fidelity: Fidelity, stage: str
    ) -> tuple[Share | None, float]:
        cosine_loss = 1 - fidelity.mean_cosine
        if self.given.goal.task is None:
            return None, cosine_loss + ONE_SIDED * fidelity.standard_error
        is_same = fidelity.min_cosine > 1 - ROUNDING  # then the score is the same
        score = self.original_score if is_same else score_model(self.given, model, stage)
        share = share_kept(self.original_score, score, seed=self.given.context.seed)
        return share, max(1 - share.lower, cosine_loss / DRIFT)

    def _plan(self, choice: Choice) -> Plan:
        return self.candidates.plan(choice, self.given.goal.precision)


def score_model(given: SearchInput, model: ir.Model, stage: str) -> Any:
    """The score of a model on the task of the goal."""
    goal, context = given.goal, given.context
    assert goal.task is not None and goal.eval_data is not None
    return score_session(
        open_session(model, provider=context.provider), given.artifact, task=goal.task,
        data=goal.eval_data, tokenizer=given.tokenizer,
        context=RunContext(
            context.provider, seed=context.seed,
            progress=lambda _, done, total: context.progress(stage, done, total),
        ),
    )  # fmt: skip
