"""Measure the speed-up of a rewritten model as served, over the fused original.

Serving fuses the operators of every model. The reference is therefore the fused original: the
speed-up of fusion is not a gain of a rewrite. Runs of all models are interleaved, and
the length changes from run to run, as it does between requests.
"""

from __future__ import annotations

import logging
import math
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import onnx_ir as ir

from attnserve.context import Device, RunContext, TimedModel
from attnserve.fusion import fuse_for
from attnserve.job import Job
from attnserve.literals import Precision
from attnserve.models.example_inputs import example_inputs
from attnserve.models.measured import ServedSpeed
from attnserve.models.onnx_files import save_model
from attnserve.models.quantized import rounds_activations
from attnserve.planning.plans.plan import Plan
from attnserve.planning.runtime_verification import row_runtimes
from attnserve.precision.convert import convert, is_bfloat16
from attnserve.precision.schemes import SCHEMES
from attnserve.runtime.by_length import RowRuntimes, fastest_times
from attnserve.runtime.external_data import weight_bytes
from attnserve.runtime.interface import AS_SERVED, Batch, Session
from attnserve.runtime.interleaved_timer import (
    InterleavedTimer,
    shape_sampler,
    time_twice_if_slow,
)
from attnserve.runtime.isolation import Worker
from attnserve.runtime.machine import product_flags
from attnserve.runtime.session import open_session, runtime_of
from attnserve.runtime.times import Times
from graph_passes.analysis.workload import Workload
from graph_passes.errors import AttnserveError

__all__ = [
    "ServedTimer",
    "example_feeds",
    "time_models",
]

log = logging.getLogger(__name__)

TIMER = InterleavedTimer(sample_seconds=2e-4, min_rounds=6, max_rounds=40)

SECONDS_PER_MODEL = 2.7
"""Approximate time of all measurements of a model."""

MOST_BYTES = 64_000_000
"""Weight size above which sessions are opened in a child process, which frees their memory."""


@dataclass(frozen=True, eq=False)
class ServedTimer:
    """Time rewrites of a model as served, interleaved with the fused original."""

    job: Job
    made: dict[tuple[ir.Model, Precision, tuple[str, ...]], ir.Model] = field(
        default_factory=dict[tuple[ir.Model, Precision, tuple[str, ...]], ir.Model]
    )
    """Models as they are served: each is fused once."""

    def served(
        self,
        model: ir.Model,
        precision: Precision = "float32",
        float_blocks: Sequence[str] = (),
    ) -> ir.Model:
        """A float32 model fused and converted; the model itself if neither changes it."""
        if self.job.context.device.provider == "cpu" and not SCHEMES[precision].runs_on_cpu:
            precision = "float32"
        key = model, precision, tuple(float_blocks)
        if key not in self.made:
            provider = self.job.context.device.provider
            model, _ = fuse_for(model, precision, provider, is_timed_only=True)
            self.made[key] = convert(
                model, precision, self.job.calibration, float_blocks=float_blocks, to_nearest=True
            )
        return self.made[key]

    def time(
        self,
        timed: Sequence[tuple[ir.Model, str]],
        workloads: Sequence[Workload],
        *,
        seconds: float | None = None,
        min_speedup: float = 0.0,
    ) -> list[Times[Workload]]:
        """Time models in runtimes on example inputs; see ``time_models``."""
        context = self.job.context
        feeds = example_feeds(self.job.original, workloads, context.seed)
        return time_models(timed, feeds, context=context, seconds=seconds, min_speedup=min_speedup)

    def compare(
        self, models: Mapping[str, ir.Model], runtimes: Mapping[str, Sequence[str]]
    ) -> dict[str, dict[str, Times[Workload]]]:
        """The times of models by name and by runtime; empty if they cannot be timed.

        Runtimes that refuse a model are left out.

        Raises:
            AttnserveError: A model does not run in its first runtime.
        """
        pairs = {(models[name], runtime): None for name in models for runtime in runtimes[name]}
        times = self.time(list(pairs), self.job.workloads)
        if not times:
            return {}
        timed = {pair: ms for pair, ms in zip(pairs, times, strict=True) if math.isfinite(ms.ms)}
        return {
            name: {
                runtime: timed[model, runtime]
                for runtime in runtimes[name]
                if (model, runtime) in timed
            }
            for name, model in models.items()
        }

    def speed_of(
        self,
        rewritten: ir.Model,
        converted: ir.Model,
        plan: Plan,
        verified: Collection[RowRuntimes] = (),
    ) -> ServedSpeed | None:
        """Time the original, the fused original in both precisions, and the rewritten model.

        The rewritten model is timed in all runtimes that may serve it, because serving selects the
        fastest one. The original is timed in the default runtime, to which the goals and the speeds
        of a search refer.

        Args:
            rewritten: The rewritten model in float32.
            converted: The model in the precision of the plan, as it is written.
            verified: The other runtimes, besides that of the device, in which the converted model
                keeps its quality (``verify_in_other_runtimes``).

        Returns:
            None if the models take different inputs, or cannot be timed here; the log contains the
            reason.
        """
        job = self.job
        inputs = ([v.name for v in model.graph.inputs] for model in (job.original, converted))
        if len(set(map(tuple, inputs))) > 1:
            return None
        device = job.context.device
        if is_bfloat16(converted) and device.provider == "cpu":
            return None
        originals = [RowRuntimes.one(job.runtime_for("float32"))]
        finals = self._may_serve(converted, plan.precision, verified)
        is_converted, is_lossy = plan.precision != "float32", bool(plan.lossy_blocks)
        try:
            models = {"exported": job.original, "fused": self.served(job.original)}
            if is_converted:
                models["result"] = converted
                if is_lossy:  # the fused original in the precision of the plan
                    models["converted"] = self.served(
                        job.original, plan.precision, plan.float_blocks
                    )
            elif is_lossy:
                models |= {"result": rewritten, "fused result": self.served(rewritten)}
            served_in = {
                name: originals if name in ("exported", "fused") else finals for name in models
            }
            times = self.compare(
                models, {name: [*chain(*choices)] for name, choices in served_in.items()}
            )
        except AttnserveError as error:  # for example, no memory; the result is written anyway
            log.warning("the speed was not measured: %s", error)
            return None
        if not times:
            return None

        def fastest_of(*names: str) -> Times[Workload]:
            """Of each stage, serving selects the fastest model and runtime."""
            stage = [fastest_times(times[name], served_in[name]) for name in names if name in times]
            return min(stage, key=lambda each: each.ms)

        at_start, at_fusion = fastest_of("exported"), fastest_of("exported", "fused")
        at_end = fastest_of("result", "fused result") if "result" in models else at_fusion
        at_precision = fastest_of("converted") if "converted" in models else at_end
        before_removal = at_precision if is_converted else at_fusion
        return ServedSpeed(
            shapes=tuple((workload.batch, workload.length) for workload in at_fusion.by_shape),
            phase=job.requested_workloads[0].phase,
            fusion=at_fusion.speedup_over(at_start),
            precision=at_precision.speedup_over(at_fusion) if is_converted else None,
            removal=at_end.speedup_over(before_removal) if is_lossy else None,
            served=at_end.speedup_over(at_fusion),
            served_by_shape=tuple(each.value for each in at_end.speedups_over(at_fusion).values()),
            runtimes=tuple(dict.fromkeys(runtime for each in times.values() for runtime in each)),
            cpu_flags=product_flags(),
            device=device,
        )

    def _may_serve(
        self, converted: ir.Model, precision: Precision, verified: Collection[RowRuntimes]
    ) -> Sequence[RowRuntimes]:
        """The runtimes in which serving may run a model in a precision: its quality is kept there.

        A model with the same outputs in all of them is timed in that of a search.
        """
        if not rounds_activations(converted):
            return [RowRuntimes.one(self.job.runtime_for(precision))]
        first = RowRuntimes.one(runtime_of(converted, self.job.context.device))
        choices = row_runtimes(converted, self.job.runtimes_for(precision))
        return [choice for choice in choices if choice in {first, *verified}] or [first]


def example_feeds(
    model: ir.Model, workloads: Sequence[Workload], seed: int
) -> dict[Workload, Batch]:
    """Example inputs of the workloads that they can be made for."""
    feeds: dict[Workload, Batch] = {}
    for workload in workloads:
        with suppress(AttnserveError):  # fixed axes, or inputs without examples
            feeds[workload] = example_inputs(model, workload, seed)
    return feeds


def time_models(
    timed: Sequence[tuple[ir.Model, str]],
    feeds: Mapping[Workload, Batch],
    *,
    context: RunContext,
    seconds: float | None = None,
    min_speedup: float = 0.0,
) -> list[Times[Workload]]:
    """The times of models in runtimes, at the workloads that all of them run; empty without any.

    A model must run in the first runtime that it is timed in. Its times are infinite in another one
    that refuses it.

    Args:
        timed: Each model with the name of a runtime.
        seconds: Approximate time of all measurements; None for one by the number of models.
        min_speedup: The models are timed twice if one has a lower speed-up over the first at a
            shape.
    """
    if not feeds:
        return []
    models = list(dict.fromkeys(model for model, _ in timed))
    pairs = [
        _Pair(models.index(model), replace(context.device, runtime=name)) for model, name in timed
    ]
    indices = [pair.model for pair in pairs]
    total = SECONDS_PER_MODEL * len(timed) if seconds is None else seconds
    workloads, inputs = list(feeds), list(feeds.values())
    if context.timer is not None:
        given = [TimedModel(models[pair.model], inputs, pair.device) for pair in pairs]
        time_given = partial(context.timer, given, total)
        times = time_twice_if_slow(lambda: np.array(time_given()), min_speedup, indices)
        return Times.of_models(workloads, times)
    progress = context.stage("time served models")
    with ExitStack() as stack:
        if sum(weight_bytes(models[pair.model]) for pair in pairs) <= MOST_BYTES:
            call = _Sessions(models, pairs).call
        else:
            files = _written(models, stack)
            call = stack.enter_context(Worker(_Sessions, files, pairs)).call
        accepted, reasons = call("accept", inputs)
        refused: dict[int, str] = dict(map(tuple, reasons))
        for index, reason in refused.items():
            log.warning("%s is not timed: %s", pairs[index].device.runtime, reason)
        if not accepted:
            return []
        running = [index for index in range(len(pairs)) if index not in refused]
        samplers = [partial(call, "sample", index) for index in running]

        def time_once() -> np.ndarray:
            measured = TIMER.time(samplers, total, progress=progress).transpose(2, 0, 1)
            shapes, _, rounds = measured.shape
            times = np.full((shapes, len(pairs), rounds), np.inf)
            times[:, running] = measured
            return times

        times = time_twice_if_slow(time_once, min_speedup, indices)
    return Times.of_models([workloads[index] for index in accepted], times)


def _written(models: Sequence[ir.Model], stack: ExitStack) -> list[Path]:
    """Files of the models, in a folder that the stack removes."""
    folder = tempfile.TemporaryDirectory(prefix="attnserve-", ignore_cleanup_errors=True)
    path = Path(stack.enter_context(folder))
    files = [path / str(index) / "model.onnx" for index in range(len(models))]
    for model, file in zip(models, files, strict=True):
        file.parent.mkdir()
        save_model(model, file)
    return files


class _Pair(NamedTuple):
    """A model, by its index, on a device."""

    model: int
    device: Device


class _Sessions:
    """Sessions of models on devices, for interleaved timing; ``call`` as in ``Worker``.

    Attributes:
        sessions: One for each pair; None if the runtime refuses the model, and another one runs it.
        refused: The reasons, by the index of the pair.
    """

    def __init__(self, models: Sequence[ir.Model | Path], pairs: Sequence[_Pair]) -> None:
        self.required = {
            index
            for index, pair in enumerate(pairs)
            if pair.model not in {earlier.model for earlier in pairs[:index]}
        }
        self.refused: dict[int, str] = {}
        self.sessions: list[Session | None] = []
        for index, pair in enumerate(pairs):
            session = None
            try:
                session = open_session(models[pair.model], pair.device, AS_SERVED)
            except AttnserveError as error:
                if index in self.required:
                    raise
                self.refused[index] = error.what
            self.sessions.append(session)
        self.samplers: dict[int, Callable[[int], np.ndarray]] = {}

    def call(self, name: Literal["accept", "sample"], *arguments: Any) -> Any:
        return getattr(self, name)(*arguments)

    def accept(self, feeds: Sequence[Batch]) -> tuple[list[int], list[tuple[int, str]]]:
        """Keep the inputs that all required sessions run, and the other sessions that run them.

        Returns:
            The indices of the inputs, and of refused pairs with the reasons.
        """
        accepted = [
            index
            for index, feed in enumerate(feeds)
            if not any(self._failure(required, [feed]) for required in self.required)
        ]
        inputs = [feeds[index] for index in accepted]
        for index, session in enumerate(self.sessions):
            if session is None or not inputs:
                continue
            if reason := self._failure(index, inputs):
                self.refused[index] = reason
            else:
                self.samplers[index] = shape_sampler([session.bind(feed) for feed in inputs])
        return accepted, list(self.refused.items())

    def sample(self, index: int, repeats: int) -> list[float]:
        """Seconds per run of a session at each accepted input, in turn."""
        return self.samplers[index](repeats).tolist()

    def _failure(self, index: int, feeds: Sequence[Batch]) -> str:
        """Why a session does not run inputs, such as more tokens than the model has positions."""
        session = self.sessions[index]
        assert session is not None
        try:
            for feed in feeds:
                session.run(None, feed)
        except AttnserveError as error:
            return error.what
        return ""
