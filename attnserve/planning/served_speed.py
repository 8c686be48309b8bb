"""Measure the speed-up of a rewritten model as served, over the fused original.

Serving fuses the operators of every model. The reference is therefore the fused original: the
speed-up of fusion is not a gain of a rewrite. Runs of all models are interleaved, and
the length changes from run to run, as it does between requests.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Literal

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
from attnserve.precision.convert import convert, is_bfloat16
from attnserve.precision.schemes import SCHEMES
from attnserve.runtime.by_length import runtimes_by_length, with_pairs
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
        models: Sequence[ir.Model],
        workloads: Sequence[Workload],
        runtimes: Sequence[str] = (),
        min_speedup: float = 0.0,
    ) -> list[Times[Workload]]:
        """``time_models`` on example inputs."""
        job = self.job
        feeds = example_feeds(job.original, workloads, job.context.seed)
        return time_models(
            models, feeds, context=job.context, runtimes=runtimes, min_speedup=min_speedup
        )

    def fastest_runtime(self, precision: Precision) -> str:
        """The runtime that is fastest for the fused original in a precision."""
        runtimes = self.job.runtimes_for(precision)
        if len(runtimes) == 1:
            return runtimes[0]
        model = self.served(self.job.original, precision)
        times = self.time([model], self.job.workloads, runtimes)
        by_runtime = dict(zip(runtimes, times, strict=False))  # no times: it cannot be timed here
        return min(by_runtime, key=lambda name: by_runtime[name].ms, default=runtimes[0])

    def speed_of(
        self,
        rewritten: ir.Model,
        converted: ir.Model,
        plan: Plan,
        verified: Set[str] | None = None,
    ) -> ServedSpeed | None:
        """Time the original, the fused original in both precisions, and the rewritten model.

        All models are timed in all runtimes of the job, because serving selects the fastest one for
        each model.

        Args:
            rewritten: The rewritten model in float32.
            converted: The model in the precision of the plan, as it is written.
            verified: The other runtimes, and pairs of them, in which a model that rounds
                activations is verified (``planning.runtime_verification``); None for all.

        Returns:
            None if the models take different inputs, or cannot be timed here; the log contains the
            reason.
        """
        inputs = ([v.name for v in model.graph.inputs] for model in (self.job.original, converted))
        if len(set(map(tuple, inputs))) > 1:
            return None
        device = self.job.context.device
        if is_bfloat16(converted) and device.provider == "cpu":
            return None
        may_run = with_pairs(self.job.runtimes_for(plan.precision))
        if verified is not None and rounds_activations(converted):
            may_run = [runtime_of(converted, device), *verified]
        runtimes = list(
            dict.fromkeys(
                [
                    *self.job.runtimes_for("float32"),
                    *(runtime for name in may_run for runtime in runtimes_by_length(name)),
                ]
            )
        )
        try:
            stages = self._stages(rewritten, converted, plan, may_run)
            times = self.time(stages.distinct, self.job.workloads, runtimes)
        except AttnserveError as error:  # for example, no memory; the result is written anyway
            log.warning("the speed was not measured: %s", error)
            return None
        if not times:
            return None
        timed = dict(zip(product(runtimes, stages.distinct), times, strict=True))
        return _speed(stages, timed, runtimes, device)

    def _stages(
        self, rewritten: ir.Model, converted: ir.Model, plan: Plan, runtimes: Sequence[str]
    ) -> _Stages:
        original, is_lossy = self.job.original, bool(plan.lossy_blocks)
        fused = self.served(original)
        final: list[ir.Model] = []
        precise: list[ir.Model] = []
        if plan.precision != "float32":
            final = [converted]
            if is_lossy:
                precise = [self.served(original, plan.precision, plan.float_blocks)]
        elif is_lossy:
            final = [rewritten, self.served(rewritten)]
        return _Stages([original], [original, fused], final, precise, plan.precision, runtimes)


@dataclass(frozen=True)
class _Stages:
    """The models that are timed, by stage; of each stage, serving selects the fastest.

    Attributes:
        exported: The original.
        fused: The original as it is served.
        final: The rewritten model, converted and fused; none if it is the original.
        precise: The fused original in the precision of the rewritten model; none if nothing else
            is changed.
        precision: The precision of the rewritten model.
        runtimes: The runtimes, and pairs of them, that may run the models in this precision.
    """

    exported: Sequence[ir.Model]
    fused: Sequence[ir.Model]
    final: Sequence[ir.Model]
    precise: Sequence[ir.Model]
    precision: Precision
    runtimes: Sequence[str]

    @property
    def distinct(self) -> list[ir.Model]:
        """All models, each once."""
        models = (*self.exported, *self.fused, *self.final, *self.precise)
        return list(dict.fromkeys(models))


Timed = Mapping[tuple[str, ir.Model], Times[Workload]]
"""The times of models in runtimes."""


def _speed(stages: _Stages, timed: Timed, runtimes: Sequence[str], device: Device) -> ServedSpeed:
    """The speed-up of each stage over the one before it.

    Args:
        runtimes: The timed runtimes.
    """
    names = with_pairs(runtimes)
    exported = _fastest(timed, stages.exported, names)
    fused = _fastest(timed, stages.fused, names)
    final = _fastest(timed, stages.final, stages.runtimes) if stages.final else fused
    changed = None
    if stages.precision != "float32":
        changed = _fastest(timed, stages.precise, stages.runtimes) if stages.precise else final
    is_lossy = bool(stages.precise) or (bool(stages.final) and changed is None)
    workloads = list(fused.by_shape)
    return ServedSpeed(
        shapes=tuple((workload.batch, workload.length) for workload in workloads),
        phase=workloads[0].phase,
        fusion=fused.speedup_over(exported),
        precision=None if changed is None else changed.speedup_over(fused),
        removal=final.speedup_over(changed or fused) if is_lossy else None,
        served=final.speedup_over(fused),
        served_by_shape=tuple(each.value for each in final.speedups_over(fused).values()),
        runtimes=tuple(runtimes),
        cpu_flags=product_flags(),
        device=device,
    )


def _fastest(timed: Timed, stage: Sequence[ir.Model], runtimes: Sequence[str]) -> Times[Workload]:
    """The times of the fastest model and runtime of a stage.

    Args:
        runtimes: Names of runtimes, and of pairs of them (``by_length``).
    """
    every: list[Times[Workload]] = []
    for model, name in product(stage, runtimes):
        short, long = (timed[runtime, model] for runtime in runtimes_by_length(name))
        lengths = {workload: workload.length for workload in short.by_shape}
        every += [short] if short is long else short.splits(long, lengths).values()
    return min(every, key=lambda times: times.ms)


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
    models: Sequence[ir.Model],
    feeds: Mapping[Workload, Batch],
    *,
    context: RunContext,
    seconds: float | None = None,
    runtimes: Sequence[str] = (),
    min_speedup: float = 0.0,
) -> list[Times[Workload]]:
    """The times of each model, at the workloads that all models run; empty if there are none.

    Times are infinite in another runtime than the first one, if it does not run a model.

    Args:
        seconds: Approximate time of all measurements; None for one by the number of models.
        runtimes: The names of the runtimes; by default, the runtime of the context. All models in
            the first runtime come first.
        min_speedup: The models are timed twice if one has a lower speed-up over the first at a
            shape.
    """
    if not feeds:
        return []
    devices = [replace(context.device, runtime=name) for name in runtimes] or [context.device]
    count = len(models) * len(devices)
    total = SECONDS_PER_MODEL * count if seconds is None else seconds
    workloads, inputs = list(feeds), list(feeds.values())
    if context.timer is not None:
        timed = [TimedModel(model, inputs, device) for device in devices for model in models]
        time_given = partial(context.timer, timed, total)
        times = time_twice_if_slow(lambda: np.array(time_given()), min_speedup)
        return Times.of_models(workloads, times)
    progress = context.stage("time served models")
    with ExitStack() as stack:
        if sum(map(weight_bytes, models)) <= MOST_BYTES:
            call = _Sessions(models, devices).call
        else:
            files = _written(models, stack)
            call = stack.enter_context(Worker(_Sessions, files, devices)).call
        accepted, running = call("accept", inputs)
        if not accepted:
            return []
        samplers = [partial(call, "sample", index) for index in running]

        def time_once() -> np.ndarray:
            measured = TIMER.time(samplers, total, progress=progress).transpose(2, 0, 1)
            shapes, _, rounds = measured.shape
            times = np.full((shapes, count, rounds), np.inf)
            times[:, running] = measured
            return times

        times = time_twice_if_slow(time_once, min_speedup)
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


class _Sessions:
    """Sessions of models on each device, for interleaved timing; ``call`` as in ``Worker``.

    All models run on the first device. A session of another device is None if it fails.
    """

    def __init__(self, models: Sequence[ir.Model | Path], devices: Sequence[Device]) -> None:
        first, *others = devices
        self.required = [open_session(model, first, AS_SERVED) for model in models]
        self.sessions: list[Session | None] = [
            *self.required,
            *(_opened(model, device) for device in others for model in models),
        ]
        self.samplers: list[Callable[[int], np.ndarray] | None] = []

    def call(self, name: Literal["accept", "sample"], *arguments: Any) -> Any:
        return getattr(self, name)(*arguments)

    def accept(self, feeds: Sequence[Batch]) -> tuple[list[int], list[int]]:
        """Keep the inputs that the first device runs, and the sessions that run them.

        Returns:
            The indices of the inputs, and of the sessions.
        """
        accepted = [
            index
            for index, feed in enumerate(feeds)
            # More tokens than a model has positions are refused.
            if all(_runs(session, [feed]) for session in self.required)
        ]
        inputs = [feeds[index] for index in accepted]
        self.samplers = [
            shape_sampler([session.bind(feed) for feed in inputs])
            if session is not None and inputs and _runs(session, inputs)
            else None
            for session in self.sessions
        ]
        return accepted, [index for index, each in enumerate(self.samplers) if each is not None]

    def sample(self, index: int, repeats: int) -> list[float]:
        """Seconds per run of a session at each accepted input, in turn."""
        sampler = self.samplers[index]
        assert sampler is not None
        return sampler(repeats).tolist()


def _opened(model: ir.Model | Path, device: Device) -> Session | None:
    """A session of a model; None if the runtime refuses it, which the log says."""
    try:
        return open_session(model, device, AS_SERVED)
    except AttnserveError as error:
        log.info("%s is not timed: %s", device.runtime, error.what)
        return None


def _runs(session: Session, feeds: Sequence[Batch]) -> bool:
    """Whether a session runs all inputs."""
    try:
        for feed in feeds:
            session.run(None, feed)
    except AttnserveError:
        return False
    return True
