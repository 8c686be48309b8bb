"""plan: the fastest form of a model that keeps what it must, found by measurement.

1. Every form of every block is timed on this machine (``block_times``): fewer heads or neurons,
   shorter or shared queries and keys, none at all, the probabilities of the layer before, each in
   the operators that are fastest here.
2. What the model's output loses by it is measured on calibration texts (``block_losses``); losses
   of different blocks add up nearly.
3. ``pareto_front`` gives the fastest choice for every predicted loss.
4. Choices are built, fitted, and judged on texts that no fit saw, until the allowed loss is used
   up but not exceeded; then the whole model is timed beside the original, at seven lengths.

What is slower than the original somewhere is not returned: then the plan is to leave it as it is.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import onnx_ir as ir

from attnserve.checks.certify import read_attention, require_finite_weights
from attnserve.checks.compare import Fidelity, compare
from attnserve.checks.evaluate import ONE_SIDED, TASKS, Share, TaskName, score_session, share_kept
from attnserve.context import DEFAULT_CONTEXT, RunContext
from attnserve.models.artifact import (
    Artifact,
    fingerprint,
    sha256,
    versions,
)
from attnserve.models.datasets import Dataset
from attnserve.models.example_inputs import example_inputs
from attnserve.models.opset import raise_opset
from attnserve.models.precision import Precision, convert
from attnserve.planning.apply import ApplyReport, apply_plan
from attnserve.planning.block_loss import loss_curves
from attnserve.planning.block_timing import time_blocks, time_pairs, time_residual_fusion
from attnserve.planning.candidates import (
    Block,
    BlockConfig,
    BlockLatency,
    ChoiceUnit,
    LossCurve,
    Option,
    ReusePair,
    TiedBlocks,
    changes_to_measure,
    group_blocks,
    options_of,
    passes_of,
    units_of,
)
from attnserve.planning.checkpoint import Checkpoint
from attnserve.planning.pareto import Choice, pareto_front
from attnserve.planning.plan import Plan
from attnserve.planning.report import Decision, PlanReport, Point, Speed
from attnserve.planning.request import require_attention
from attnserve.runtime.part_latency import LatencyTable, Part, default_cache
from attnserve.runtime.session import open_session, run
from graph_passes.errors import (
    CannotRewrite,
    CheckFailed,
    InvalidArgument,
    InvalidData,
)
from graph_passes.passes.base import RewritePass
from graph_passes.passes.fold_biases import FoldBiases
from graph_passes.passes.fuse_attention import OPSETS, FuseAttention
from graph_passes.passes.fuse_gelu import FuseGelu
from graph_passes.passes.fuse_residuals import FuseResiduals
from graph_passes.passes.reuse_attention import ReuseAttention, renumbered

__all__ = ["Allowed", "Goal", "SearchResult", "search"]

Allowed = Literal["ffn"]

CHECKED = (16, 32, 64, 128, 256, 384, 512)
"""Lengths at which the whole model is timed beside the original, where it takes them; no form of a
block may be slower at the shortest and the longest."""

SLOWEST = 0.97
"""Of the original's speed, at any of these lengths: less is a loss, not noise."""

LEAST_GAIN = 1.01
"""Speed-up at the lengths asked for, below which a lossy model is not worth its loss."""

MOST_BUILDS = 5

TIGHT = 0.9
"""The share of the allowed loss from which on it counts as used up."""

NEAR = 1.01
"""Choices whose predicted speeds differ by less are not told apart by building both."""

COSINE_A_POINT = 2.5
"""A first guess: how much more of the cosine is lost than of a task's score."""

DRIFT = 3.5
"""How much more of the cosine than of a score may be lost. A score of some hundred rows can stay
while the function drifts, and other rows then lose: for all-MiniLM-L6-v2 99.5 % on STS-B's dev set
went with 98.2 % on some 4,000 other pairs at a cosine of 0.937, 99.8 % with 99.2 % at 0.965."""

ROUNDING = 1e-4
"""Of a loss: what is the same but for rounding keeps everything."""


@dataclass(frozen=True)
class Goal:
    """What a plan must keep or reach, and what it may use.

    Attributes:
        keep: The mean cosine of the outputs to the original's on held-out texts, by the lower end
            of its 95 % interval; with ``task`` the share of the task's score, likewise.
        target_speedup: Or how much faster it must be, at the least loss.
        task, eval_data: The score, and the file it is measured on.
        allow: Rewrites beyond attention.
        precision: Of the weights, after all rewrites.
    """

    keep: float | None = None
    target_speedup: float | None = None
    task: TaskName | None = None
    eval_data: Path | None = None
    allow: tuple[Allowed, ...] = ()
    precision: Precision = "float32"

    def __post_init__(self) -> None:
        if (self.keep is None) == (self.target_speedup is None):
            raise InvalidArgument(
                "a plan needs one goal: how much to keep, or how much faster to be",
                "give --keep X or --target-speedup S, not both",
            )
        if self.keep is not None and not 0 < self.keep <= 1:
            raise InvalidArgument(
                f"--keep {self.keep}: expected a share, more than 0 and at most 1",
                "for example --keep 0.99",
            )
        if self.target_speedup is not None and not 1 <= self.target_speedup < 1000:
            raise InvalidArgument(
                f"--target-speedup {self.target_speedup}: expected a factor from 1 up",
                "for example --target-speedup 1.5",
            )
        if (self.task is None) != (self.eval_data is None):
            raise InvalidArgument(
                "--eval-data and --task belong together: the file, and what to score on it",
                f"give both; --task is {' or '.join(TASKS)}",
            )
        for name in self.allow:
            if name not in get_args(Allowed):
                raise InvalidArgument(
                    f"--allow {name!r}: expected {', '.join(get_args(Allowed))}", "for example ffn"
                )

    @property
    def measure(self) -> str:
        """What a loss is a loss of."""
        return "mean output cosine" if self.task is None else f"share of the {self.task} score"


@dataclass(frozen=True, eq=False)
class SearchResult:
    """A report, and the model that it is about.

    Attributes:
        exact: The rewritten model in float32; ``convert`` gives it its precision.
    """

    report: PlanReport
    exact: ir.Model
    done: ApplyReport


def search(
    goal: Goal,
    artifact: Artifact,
    graph: ir.Model,
    data: Dataset,
    *,
    tokenizer: Path | None = None,
    batch: int = 1,
    sequence: int | None = None,
    context: RunContext = DEFAULT_CONTEXT,
) -> SearchResult:
    """See ``plan``.

    What takes long (times, losses, what was built) is kept in the user's cache folder until the
    plan is made, so that a search that was interrupted goes on where it stopped.
    """
    if goal.precision == "bfloat16" and context.provider == "cpu":
        raise InvalidArgument(
            "bfloat16 cannot be timed on a CPU: ONNX Runtime has no kernels for it there",
            "search with --provider cuda, or for --fp16",
        )
    lengths = (sequence,) if sequence else _quartiles(data)
    possible, why = _runnable(graph, batch, sorted({*lengths, *CHECKED}), context.seed)
    if refused := [length for length in lengths if length not in possible]:
        raise InvalidArgument(
            f"the model does not run at batch {batch}, {refused[0]} tokens: {why[:300]}",
            f"choose --seq up to {max(possible)}" if possible else "choose another --batch",
        )
    asked = {
        "keep": goal.keep,
        "target_speedup": goal.target_speedup,
        "measure": goal.measure,
        "task": goal.task,
        "eval_data": goal.eval_data and goal.eval_data.name,
        "eval_data_sha256": goal.eval_data and _digest_of(goal.eval_data),
        "allow": list(goal.allow),
        "precision": goal.precision,
        "batch": batch,
        "sequences": list(lengths),
        "provider": context.provider,
        "threads": context.threads,
        "seed": context.seed,
    }
    runner = _Search(
        goal, artifact, graph, data, tokenizer, asked, lengths, possible, batch, context
    )
    return runner.run()


def _quartiles(data: Dataset) -> tuple[int, ...]:
    """The middle of each quarter of the calibration texts, by length."""
    found = np.quantile(data.lengths, (0.125, 0.375, 0.625, 0.875)).round().astype(int)
    return tuple(dict.fromkeys(max(int(length), 1) for length in found))


def _runnable(
    graph: ir.Model, batch: int, lengths: Sequence[int], seed: int
) -> tuple[list[int], str]:
    """The lengths that the model takes, and why not others: how many positions it has is often not
    to be seen."""
    session, found, why = open_session(graph), list[int](), ""
    for length in lengths:
        try:
            run(session, example_inputs(graph, batch, length, seed))
        except (InvalidArgument, InvalidData) as error:
            why = why or error.what
            continue
        found.append(length)
    return found, why


def _digest_of(path: Path) -> str:
    if not path.is_file():
        raise InvalidData(f"{path}: no such file", "check the path")
    return sha256(path)


@dataclass(frozen=True, eq=False)
class _Built:
    choice: Choice
    decided: Plan
    exact: ir.Model
    """In float32; ``graph`` in the precision asked for."""
    graph: ir.Model
    done: ApplyReport
    fidelity: Fidelity
    share: Share | None
    loss: float
    """Of what the goal measures, by its lower bound; with a task also by ``DRIFT``."""


@dataclass(eq=False)
class _Search:
    goal: Goal
    artifact: Artifact
    graph: ir.Model
    data: Dataset
    tokenizer: Path | None
    asked: dict[str, Any]
    lengths: tuple[int, ...]
    possible: Sequence[int]
    """Lengths to check at, those asked for included."""
    batch: int
    context: RunContext
    newest: ir.Model = field(init=False)
    """The same model in the newest opset that a form of a block is written in."""
    timed_at: list[int] = field(default_factory=list[int])
    groups: list[TiedBlocks] = field(default_factory=list[TiedBlocks])
    timed: dict[Block, BlockLatency] = field(default_factory=dict[Block, BlockLatency])
    curves: dict[str, LossCurve] = field(default_factory=dict[str, LossCurve])
    pairs: list[ReusePair] = field(default_factory=list[ReusePair])
    units: list[tuple[ChoiceUnit, ReusePair | None]] = field(
        default_factory=list[tuple[ChoiceUnit, ReusePair | None]]
    )
    options: list[list[Option]] = field(default_factory=list[list[Option]])
    front: list[Choice] = field(default_factory=list[Choice])
    table: LatencyTable = field(default_factory=lambda: LatencyTable(None))
    rest_ms: float = 0.0
    """What the model takes beside its blocks, once residuals are written as is fastest."""
    saved_ms: float = 0.0
    """By writing residuals in another operator."""
    before: Any = None
    """The original's score on the task."""
    last: _Built | None = None
    measured: dict[tuple[int, ...], tuple[float, float]] = field(
        default_factory=dict[tuple[int, ...], tuple[float, float]]
    )
    """(loss, cosine) of each choice that was built, now or before an interruption."""
    checkpoint: Checkpoint = field(default_factory=lambda: Checkpoint(Path("none")))

    def run(self) -> SearchResult:
        require_finite_weights(self.graph)
        self.newest = self.graph.clone()
        with suppress(CannotRewrite):  # then forms in newer operators are no candidates
            raise_opset(self.newest, max(OPSETS.values()))
        reading = read_attention(self.newest, seed=self.context.seed)
        require_attention(reading)
        if self.goal.precision != "float32":
            convert(self.graph, self.goal.precision)  # what cannot be converted is said at once
        if self.goal.task is not None:
            self.before = self._score(self.graph, "score the original")
        elif all(v.shape is not None and v.shape[-1:] == (1,) for v in self.graph.graph.outputs):
            raise InvalidArgument(
                "the model's output is one number, whose cosine says nothing",
                "give --eval-data FILE and --task, to keep a share of a score",
            )
        record = (fingerprint(self.artifact), self.data.source, self.asked, versions())
        key = hashlib.sha256(json.dumps(record, sort_keys=True, default=str).encode())
        self.checkpoint = Checkpoint.open(key.hexdigest()[:24])
        self.groups = group_blocks(self.newest, reading.blocks, ffn="ffn" in self.goal.allow)
        self._time()
        self._weigh()
        self.units = units_of(self.groups, self.pairs)
        self.options = [
            options_of(unit, self.timed, self.curves, pair, target=len(self.lengths))
            for unit, pair in self.units
        ]
        self.front = pareto_front(self.options)
        best = self._fastest() if self.goal.target_speedup is None else self._at_speed()
        searched = self._finish(best)
        self.checkpoint.close()
        return searched

    def _time(self) -> None:
        target = len(self.lengths)
        others = [length for length in self.possible if length not in self.lengths]
        guards = dict.fromkeys((*others[:1], *others[-1:]))
        self.timed_at = [*self.lengths, *guards]
        feeds = [
            example_inputs(self.graph, self.batch, length, self.context.seed)
            for length in self.timed_at
        ]
        self.table = LatencyTable(
            default_cache(), provider=self.context.provider, threads=self.context.threads
        )
        self.timed = time_blocks(
            self.newest, self.groups, feeds, self.table, target=target,
            precision=self.goal.precision, report=self.context.progress,
        )  # fmt: skip
        self.pairs = time_pairs(
            self.newest, self.groups, feeds, self.table, self.timed, target=target,
            precision=self.goal.precision, report=self.context.progress,
        )  # fmt: skip
        self.saved_ms = time_residual_fusion(
            self.newest, feeds, self.table, target=target, precision=self.goal.precision
        )
        model = convert(self.graph, self.goal.precision)
        times = self.table.measure({"model": Part(model, tuple(feeds))})["model"]
        blocks = [block for group in self.groups for block in group.blocks]
        now = sum(float(np.mean(self.timed[block].original[:target])) for block in blocks)
        # Alone, blocks may take longer than together: then the rest is taken to be nothing.
        self.rest_ms = max(float(np.mean(times[:target])) - now - self.saved_ms, 0.0)

    def _weigh(self) -> None:
        curves, pairs = self.checkpoint.curves(), self.checkpoint.pair_losses()
        if curves is None or pairs is None:
            target = len(self.lengths)
            changes = {g.key: changes_to_measure(g, self.timed[g.blocks[0]], target=target)
                       for g in self.groups}  # fmt: skip
            found = loss_curves(
                self.newest, self.groups, self.data.fit, changes=changes, pairs=self.pairs,
                provider=self.context.provider, report=self.context.progress,
            )  # fmt: skip
            curves = found.curves
            pairs = {pair.reader.key: (pair.heads, pair.loss) for pair in found.pairs}
            self.checkpoint.put("curves", {name: c.to_json() for name, c in curves.items()})
            self.checkpoint.put("pairs", pairs)
        self.curves = curves
        self.pairs = [
            replace(pair, heads=pairs[pair.reader.key][0], loss=pairs[pair.reader.key][1])
            if pair.reader.key in pairs
            else pair
            for pair in self.pairs
        ]

    def _predicted(self, choice: Choice) -> float:
        """Milliseconds of the whole model, mean over the lengths asked for."""
        return self.rest_ms + choice.ms

    def _speedup_of(self, choice: Choice) -> float:
        """Against the original as it is, in the precision asked for."""
        target = len(self.lengths)
        blocks = [block for group in self.groups for block in group.blocks]
        now = sum(float(np.mean(self.timed[block].original[:target])) for block in blocks)
        return (self.rest_ms + self.saved_ms + now) / max(self._predicted(choice), 1e-9)

    def _fastest(self) -> _Built | None:
        """The fastest choice that keeps enough; None where the first, which takes nothing out,
        does not.

        The measured loss rises with the predicted one, in a proportion that the first builds tell;
        then the choices between the last that keeps enough and the first that does not are halved.
        """
        assert self.goal.keep is not None
        allowed = 1 - self.goal.keep
        whole = self._loss(self.front[0])  # what the operators and the precision cost
        if whole > max(allowed, ROUNDING):
            if self.goal.precision == "float32":
                return None
            raise CheckFailed(
                f"{self.goal.precision} weights alone keep {1 - whole:.4f} of the "
                f"{self.goal.measure}, expected {self.goal.keep}",
                "lower --keep, or leave the precision as it is",
            )
        if whole >= allowed:
            return self._built(self.front[0])
        low, high = 0, len(self.front)  # kept enough; did not
        guess = (allowed - whole) * (1.0 if self.goal.task is None else COSINE_A_POINT)
        for _ in range(MOST_BUILDS):
            index = min(max(self._index_of(guess), low + 1), high - 1)
            if not low < index < high or self._are_near(low, high):
                break
            loss = self._loss(self.front[index])
            if loss <= allowed:
                low = index
                if loss >= TIGHT * allowed:
                    break
            else:
                high = index
            guess = self._next_guess(low, high, allowed, whole)
        return self._built(self.front[low])

    def _are_near(self, low: int, high: int) -> bool:
        """Whether nothing between two choices is worth building."""
        if high == len(self.front):
            return False
        slow, fast = (self._predicted(self.front[index]) for index in (low, high))
        return slow < NEAR * fast

    def _index_of(self, predicted_loss: float) -> int:
        """The fastest choice that is predicted to lose no more."""
        losses = [choice.loss for choice in self.front]
        return int(np.searchsorted(losses, predicted_loss, side="right")) - 1

    def _next_guess(self, low: int, high: int, allowed: float, whole: float) -> float:
        """Where the allowed loss lies on the line through the nearest builds, within bounds."""
        below = self.front[low].loss
        under = self.measured[self.front[low].picks][0]
        if high == len(self.front):
            gain = (allowed - whole) / max(under - whole, 1e-9)
            return below * float(np.clip(0.98 * gain, 1.05, 3.0))
        above, over = self.front[high].loss, self.measured[self.front[high].picks][0]
        share = (allowed - under) / max(over - under, 1e-9)
        # The least that is taken out has the uncertainty of a score: until something is known to
        # keep enough, the line from nothing aims too high every time.
        most = 0.9 if low else 0.5
        return below + float(np.clip(0.96 * share, 0.1, most)) * (above - below)

    def _at_speed(self) -> _Built:
        """The least loss among the choices that are fast enough, as whole models are timed."""
        wanted = self.goal.target_speedup
        assert wanted is not None
        first = self._speedup(self._built(self.front[0]))
        if first >= wanted:
            return self._built(self.front[0])
        low, high = 0, len(self.front) - 1  # too slow; fast enough, or the fastest there is
        fast = self._speedup(self._built(self.front[high]))
        if fast < wanted:
            raise CheckFailed(
                f"--target-speedup {wanted}: the fastest model found runs {fast:.2f}x as fast",
                "lower it" + ("" if "ffn" in self.goal.allow else ", or give --allow ffn"),
            )
        reached = {low: first, high: fast}
        for _ in range(MOST_BUILDS):
            index = self._between(low, high, wanted, reached)
            if index is None:
                break
            reached[index] = self._speedup(self._built(self.front[index]))
            if reached[index] >= wanted:
                high = index
                if reached[index] < NEAR * wanted:
                    break
            else:
                low = index
        return self._built(self.front[high])

    def _between(
        self, low: int, high: int, wanted: float, reached: Mapping[int, float]
    ) -> int | None:
        """The choice that should just be fast enough, by the times of the two around it; None where
        nothing lies between them."""
        if high - low < 2 or self._are_near(low, high):
            return None
        slow, fast = (1 / reached[index] for index in (low, high))
        ends = [self._predicted(self.front[index]) for index in (low, high)]
        share = min(max((slow - 1 / wanted) / max(slow - fast, 1e-9), 0.05), 0.95)
        aim = ends[0] + share * (ends[1] - ends[0])
        times = np.array([self._predicted(choice) for choice in self.front])
        index = int(np.searchsorted(-times, -aim))
        return min(max(index, low + 1), high - 1)

    def _speedup(self, built: _Built) -> float:
        speeds = self._speeds(built.graph, self.lengths)
        return float(np.exp(np.mean([np.log(speed.speedup) for speed in speeds])))

    def _loss(self, choice: Choice) -> float:
        known = self.checkpoint.built(_digest(self._plan_of(choice)))
        if known is not None:
            self.measured[choice.picks] = known
            return known[0]
        return self._built(choice).loss

    def _built(self, choice: Choice) -> _Built:
        if self.last is not None and self.last.choice.picks == choice.picks:
            return self.last
        decided, graph = self._plan_of(choice), self.graph.clone()
        number = len(self.measured) + (choice.picks not in self.measured)

        def report(what: str, done: int, total: int) -> None:
            self.context.progress(f"build {number}: {what}", done, total)

        context = replace(self.context, threads=0, progress=report)
        done = apply_plan(
            decided, graph, context, original=self.graph, data=self.data,
            shape=(self.batch, self.lengths[-1]),
        )  # fmt: skip
        exact, graph = graph, convert(graph, self.goal.precision)
        fidelity = compare(
            self.graph, graph, self.data.held_out, f"held out of {self.data.source['file']}",
            context=RunContext(self.context.provider, progress=report),
        )  # fmt: skip
        share, loss = None, 1 - fidelity.mean_cosine
        if self.goal.task is None:
            loss += ONE_SIDED * fidelity.standard_error
        else:
            # What computes the same has the same score.
            same = fidelity.min_cosine > 1 - ROUNDING
            score = self.before if same else self._score(graph, f"build {number}: score")
            share = share_kept(self.before, score, seed=self.context.seed)
            loss = max(1 - share.lower, loss / DRIFT)
        self.last = _Built(choice, decided, exact, graph, done, fidelity, share, loss)
        self.measured[choice.picks] = loss, fidelity.mean_cosine
        builds = self.checkpoint.content.get("builds")
        known = builds if isinstance(builds, dict) else {}
        self.checkpoint.put("builds", {**known, _digest(decided): (loss, fidelity.mean_cosine)})
        return self.last

    def _score(self, graph: ir.Model, what: str) -> Any:
        assert self.goal.task is not None and self.goal.eval_data is not None
        return score_session(
            open_session(graph, provider=self.context.provider), self.artifact, task=self.goal.task,
            data=self.goal.eval_data, tokenizer=self.tokenizer,
            context=RunContext(
                self.context.provider, seed=self.context.seed,
                progress=lambda _, done, total: self.context.progress(what, done, total),
            ),
        )  # fmt: skip

    def _plan_of(self, choice: Choice) -> Plan:
        """The passes that make a choice."""
        passes: list[RewritePass] = []
        masks: dict[str, list[int]] = {}
        edges: dict[str, dict[int, tuple[str, int]]] = {}
        for (unit, pair), options, pick in zip(self.units, self.options, choice.picks, strict=True):
            sizes = options[pick].sizes
            sources = {size.source for size in sizes}
            plain = {
                n
                for g, s in zip(unit, sizes, strict=True)
                if s.needs_plain_operators
                for n in g.names
            }
            for group, size in zip(unit, sizes, strict=True):
                mask = self._mask(group, size, pair)
                for block in group.blocks:
                    passes += passes_of(block, size, mask)
                    masks[block.name] = mask
                    if size.source is not None:
                        assert pair is not None
                        edges[block.name] = pair.edges(mask)
                    implementation = self.timed[block].implementation
                    if implementation == "gelu":
                        passes.append(FuseGelu([block.name]))
                    elif implementation != "as exported" and block.name not in {*sources, *plain}:
                        passes.append(FuseAttention({block.name: implementation}))
        passes.append(ReuseAttention(renumbered(edges, masks)))
        if self.saved_ms > 0:
            passes += [FoldBiases(), FuseResiduals()]
        return Plan.of(passes, self.goal.precision)

    def _mask(self, group: TiedBlocks, size: BlockConfig, pair: ReusePair | None) -> list[int]:
        """1 for each head or neuron of a group that stays."""
        if not size.kept or size.kept == group.count:
            return [1] * group.count
        if size.source is None:
            return self.curves[group.key].mask(size.kept)
        assert pair is not None
        return pair.masks(self.curves[pair.source.key], size.kept)[1]

    def _speeds(self, graph: ir.Model, lengths: Sequence[int]) -> list[Speed]:
        """The whole model beside the original, which is in float32 whatever was asked for."""
        feeds = [example_inputs(self.graph, self.batch, n, self.context.seed) for n in lengths]
        parts = {"original": Part(self.graph, tuple(feeds)), "new": Part(graph, tuple(feeds))}

        def report(done: int, total: int) -> None:
            self.context.progress("time the whole model", done, total)

        times = self.table.measure(parts, progress=report)
        pairs = list(zip(times["original"], times["new"], strict=True))
        if slow := [i for i, (before, after) in enumerate(pairs) if before < SLOWEST * after]:
            for part in parts.values():  # once more, to be sure
                for index in slow:
                    self.table.times_ms.pop(part.key(index), None)
            times = self.table.measure(parts, progress=report)
            pairs = list(zip(times["original"], times["new"], strict=True))
        return [
            Speed(self.batch, length, before, after, before / after)
            for length, (before, after) in zip(lengths, pairs, strict=True)
        ]

    def _finish(self, best: _Built | None) -> SearchResult:
        if best is None:
            built = self._built(self.front[0])
            why = (
                f"written in the fastest operators the model keeps {1 - built.loss:.4f} of the "
                f"{self.goal.measure}"
            )
            return self._nothing(why, built, [])
        decided = best.decided
        speeds = self._speeds(best.graph, self.possible)
        wanted = [speed.speedup for speed in speeds if speed.sequence in self.lengths]
        gain = float(np.exp(np.mean(np.log(wanted))))
        slow = min(speeds, key=lambda speed: speed.speedup)
        lossy = bool(decided.changed) or decided.precision != "float32"
        if not (lossy or decided.passes):
            why = "no form of any block is faster within the allowed loss"
            return self._nothing(why, best, speeds)
        if gain < (LEAST_GAIN if lossy else 1.0):
            why = f"what was found runs at {gain:.2f}x the speed of the original"
            return self._nothing(why, best, speeds)
        if slow.speedup < SLOWEST:
            why = (
                f"what was found runs at {slow.speedup:.2f}x the speed of the original at "
                f"{slow.sequence} tokens"
            )
            return self._nothing(why, best, speeds)
        kept = f"{best.fidelity.mean_cosine:.4f} mean output cosine"
        if best.share is not None:
            kept = (
                f"{best.share.value:.2%} of the {self.goal.task} score "
                f"(standard error {best.share.standard_error:.2%})"
            )
        verdict = f"{gain:.2f}x as fast, keeping {kept}"
        report = self._reported(best, decided, verdict, True, best.fidelity, best.share, speeds)
        return SearchResult(report, best.exact, best.done)

    def _nothing(self, why: str, best: _Built, speeds: Sequence[Speed]) -> SearchResult:
        """The plan that leaves the model as it is."""
        same = Fidelity((), 1.0, 1.0, "the original itself")
        verdict = f"no gain: {why}; the original is returned"
        report = self._reported(best, Plan(), verdict, False, same, None, speeds)
        return SearchResult(report, self.graph, ApplyReport((), exact=True))

    def _reported(
        self,
        best: _Built,
        decided: Plan,
        verdict: str,
        gain: bool,
        fidelity: Fidelity,
        share: Share | None,
        speeds: Sequence[Speed],
    ) -> PlanReport:
        return PlanReport(
            model={"file": self.artifact.model.name, "sha256": fingerprint(self.artifact)},
            calibration=dict(self.data.source),
            asked=self.asked,
            rewrites=decided,
            gain=gain,
            verdict=verdict,
            decisions=tuple(self._decisions(best.choice)),
            front=tuple(self._points()),
            speeds=tuple(speeds),
            fidelity=fidelity,
            share=share,
            timed=self._table(),
            versions=versions(),
            machine=self.table.setting,
        )

    def _points(self) -> list[Point]:
        """Some fifty choices of the front, evenly by their time, and all that were built."""
        count = min(len(self.front), 50)
        chosen = set(np.linspace(0, len(self.front) - 1, count).round().astype(int).tolist())
        chosen |= {i for i, choice in enumerate(self.front) if choice.picks in self.measured}
        points: list[Point] = []
        for index in sorted(chosen):
            choice = self.front[index]
            loss, cosine = self.measured.get(choice.picks, (None, None))
            points.append(Point(self._speedup_of(choice), choice.loss, loss, cosine))
        return points

    def _decisions(self, choice: Choice) -> list[Decision]:
        found: list[Decision] = []
        target = len(self.lengths)
        for (unit, pair), options, pick in zip(self.units, self.options, choice.picks, strict=True):
            option = options[pick]
            for group, size in zip(unit, option.sizes, strict=True):
                curve = self.curves.get(group.key)
                why = _why(unit, group, size, options, pick, curve, pair)
                loss = self._loss_of(group, size, pair)
                for block in group.blocks:
                    timed = self.timed[block]
                    before = float(np.mean(timed.original[:target]))
                    after, written = self._ms_after(timed, size, option.sizes, pair)
                    found.append(
                        Decision(
                            block.name,
                            group.kind,
                            size.kept,
                            group.count,
                            size.head_size,
                            size.rank,
                            size.source,
                            written,
                            before,
                            after,
                            loss,
                            why,
                        )
                    )
        order = {block: i for i, block in enumerate(b.name for g in self.groups for b in g.blocks)}
        return sorted(found, key=lambda decision: order[decision.block])

    def _loss_of(self, group: TiedBlocks, size: BlockConfig, pair: ReusePair | None) -> float:
        curve = self.curves.get(group.key)
        if curve is None or size == BlockConfig(group.count):
            return 0.0
        if size.source is None:
            return curve.of(size) or 0.0
        assert pair is not None
        return curve.at(group.count - size.kept) + pair.loss * size.kept / group.count

    def _ms_after(
        self,
        timed: BlockLatency,
        size: BlockConfig,
        sizes: Sequence[BlockConfig],
        pair: ReusePair | None,
    ) -> tuple[float, str]:
        """Milliseconds of one block, and how it is written; of a pair half of both."""
        target = len(self.lengths)
        if pair is not None and any(each.source for each in sizes):
            both = float(np.mean(pair.times[size.kept][:target]))
            return both / 2, "reuse" if size.source else "as exported"
        written = timed.implementation if size.kept else "skip"
        written = "sparse" if size.rank is not None else written
        return float(np.mean(timed.sizes[size][:target])), written

    def _table(self) -> list[dict[str, Any]]:
        """Every form of every block that differs from those before."""
        rows: list[dict[str, Any]] = []
        seen: set[int] = set()
        for group in self.groups:
            for block in group.blocks:
                timed = self.timed[block]
                if id(timed) in seen:
                    continue
                seen.add(id(timed))
                rows.append({
                    "block": block.name,
                    "kind": group.kind,
                    "sequences": self.timed_at,
                    "as_exported": list(timed.original),
                    "written": timed.implementation,
                    "forms": {form: list(ms) for form, ms in timed.forms.items()},
                    "kept": {str(s): list(timed.sizes[s]) for s in sorted(timed.sizes, key=_order)},
                })  # fmt: skip
        for pair in self.pairs:
            if id(pair.times) not in seen:
                seen.add(id(pair.times))
                rows.append({
                    "block": pair.reader.names[0],
                    "kind": "reuse",
                    "source": pair.source.names[0],
                    "sequences": self.timed_at,
                    "kept": {str(kept): list(ms) for kept, ms in pair.times.items()},
                    "saved_ms": pair.saved_ms,
                })  # fmt: skip
        return rows


def _order(size: BlockConfig) -> tuple[int, int, int]:
    return size.head_size or 0, size.rank or 0, size.kept


def _digest(decided: Plan) -> str:
    text = json.dumps(decided.to_json(), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def _why(
    unit: ChoiceUnit,
    group: TiedBlocks,
    size: BlockConfig,
    options: Sequence[Option],
    pick: int,
    curve: LossCurve | None,
    pair: ReusePair | None,
) -> str:
    """Why a block got what it got, in a sentence."""
    what = "heads" if group.kind == "attention" else "neurons"
    if group.refusal:
        return f"nothing can be taken out: {group.refusal}"
    if curve is None:
        return f"it has too few {what} to take any out"
    if len(options) == 1:
        return f"no smaller number of {what} is faster here at every length"
    parts: list[str] = []
    if not size.kept:
        parts.append(f"an affine map in its place loses {curve.of(size) or 0:.4f} of cosine")
    elif size.kept < group.count:
        own = curve.own_loss[group.count - size.kept]
        parts.append(
            f"the {group.count - size.kept} {what} that go hold {own:.1%} of its output that "
            "others cannot take over"
        )
    if size.head_size is not None:
        lost = (curve.of(size) or 0.0) - (curve.of(BlockConfig(size.kept)) or 0.0)
        of = "" if size.rank is None else f" of {size.rank} that heads share"
        parts.append(
            f"queries and keys of {size.head_size} dimensions{of} lose {lost:.4f} of cosine"
        )
    if size.source is not None and pair is not None:
        parts.append(
            f"all heads with the probabilities of {size.source} lose {pair.loss:.4f} of cosine"
        )
    if pick + 1 < len(options):
        now, following = options[pick], options[pick + 1]
        saved, lost = now.ms - following.ms, following.loss - now.loss
        smaller = following.sizes[unit.index(group)]
        others = " and its pair" if len(unit) > 1 else ""
        parts.append(
            f"{smaller} {what}{others} would save {saved:.3f} ms more and lose {lost:.4f} of cosine"
        )
    return "; ".join(parts)
