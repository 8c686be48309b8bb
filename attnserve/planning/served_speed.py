"""Measure the speed-up of a rewritten model as served, over the fused original.

Serving fuses the operators of every model. The reference is therefore the fused original: the
speed-up of fusion is not a gain of a rewrite. Runs of all models are interleaved, and
each has another length than the one before, as requests have.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx_ir as ir

from attnserve.context import Device, RunContext
from attnserve.fusion import fuse_for
from attnserve.job import Job
from attnserve.literals import Precision
from attnserve.models.example_inputs import example_inputs
from attnserve.models.measured import ServedSpeed
from attnserve.models.onnx_files import save_model
from attnserve.planning.plans.plan import Plan
from attnserve.precision.convert import convert, is_bfloat16
from attnserve.precision.schemes import SCHEMES
from attnserve.runtime.external_data import weight_bytes
from attnserve.runtime.interface import Batch
from attnserve.runtime.interleaved_timer import (
    InterleavedTimer,
    Speedup,
    paired_speedup,
    shape_sampler,
)
from attnserve.runtime.isolation import Worker
from attnserve.runtime.session import open_session
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
    made: dict[tuple[Any, ...], tuple[ir.Model, ir.Model]] = field(
        default_factory=dict[tuple[Any, ...], tuple[ir.Model, ir.Model]]
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
        key = id(model), precision, *float_blocks
        if key not in self.made:
            fused = model.clone()
            if not fuse_for(fused, precision, self.job.context.device.provider, is_timed_only=True):
                fused = model
            converted = convert(
                fused, precision, self.job.calibration, float_blocks=float_blocks, to_nearest=True
            )
            self.made[key] = model, converted
        return self.made[key][1]

    def time(
        self, models: Callable[[], Sequence[ir.Model]], workloads: Sequence[Workload]
    ) -> tuple[list[Workload], list[np.ndarray]] | None:
        """``time_models`` on example inputs.

        Args:
            models: Creates the models.

        Returns:
            None if the models cannot be created or timed on this machine; the log contains the
            reason.
        """
        feeds = example_feeds(self.job.original, workloads, self.job.context.seed)
        try:
            return time_models(models(), feeds, context=self.job.context)
        except AttnserveError as error:  # for example, no memory; the result is written anyway
            log.warning("the speed was not measured: %s", error)
            return None

    def measure(
        self,
        rewritten: ir.Model,
        converted: ir.Model,
        plan: Plan,
    ) -> ServedSpeed | None:
        """Time the original, the fused original in both precisions, and the rewritten model.

        Args:
            rewritten: The rewritten model in float32.
            converted: The model in the precision of the plan, as it is written.

        Returns:
            None if the models take different inputs, or cannot be timed here; the log contains the
            reason.
        """
        inputs = ([v.name for v in model.graph.inputs] for model in (self.job.original, converted))
        if len(set(map(tuple, inputs))) > 1:
            return None
        if is_bfloat16(converted) and self.job.context.device.provider == "cpu":
            return None
        is_lossy, rows = bool(plan.lossy_blocks), dict[str, int]()

        def models() -> list[ir.Model]:
            named = {"original": self.job.original, "fused": self.served(self.job.original)}
            if plan.precision != "float32":
                named["final"] = converted
                if is_lossy:
                    named["precise"] = self.served(
                        self.job.original, plan.precision, plan.float_blocks
                    )
            elif is_lossy:
                named |= {"final": rewritten, "final fused": self.served(rewritten)}
            distinct = {id(model): model for model in named.values()}
            rows.update({name: list(distinct).index(id(model)) for name, model in named.items()})
            return list(distinct.values())

        timed = self.time(models, self.job.workloads)
        if timed is None:
            return None
        times = {name: [runs[row] for runs in timed[1]] for name, row in rows.items()}
        device = self.job.context.device
        return _speed(timed[0], times, plan.precision, is_lossy=is_lossy, device=device)


def _speed(
    workloads: Sequence[Workload],
    times: Mapping[str, Sequence[np.ndarray]],
    precision: Precision,
    *,
    is_lossy: bool,
    device: Device,
) -> ServedSpeed:
    """The speed-ups; of a model and its fused copy, the faster counts: serving selects it."""

    def faster(*names: str) -> str:
        timed = [name for name in names if name in times]
        return min(timed, key=lambda name: sum(np.log(np.median(runs)) for runs in times[name]))

    def gain(before: str, after: str) -> Speedup:
        return paired_speedup(times[before], times[after])

    reference = faster("original", "fused")
    final = faster("final", "final fused") if "final" in times else reference
    changed = None if precision == "float32" else ("precise" if is_lossy else "final")
    pairs = zip(times[reference], times[final], strict=True)
    return ServedSpeed(
        shapes=tuple((workload.batch, workload.length) for workload in workloads),
        phase=workloads[0].phase,
        fusion=gain("original", reference),
        precision=None if changed is None else gain(reference, changed),
        removal=gain(changed or reference, final) if is_lossy else None,
        served=gain(reference, final),
        served_by_shape=tuple(paired_speedup([a], [b]).value for a, b in pairs),
        device=device,
    )


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
) -> tuple[list[Workload], list[np.ndarray]] | None:
    """The workloads that all models run, and milliseconds at each of them: (models, rounds).

    Args:
        seconds: Approximate time of all measurements; None for one by the number of models.

    Returns:
        None if a model accepts none of the shapes.
    """
    total = SECONDS_PER_MODEL * len(models) if seconds is None else seconds
    progress = context.stage("time what is served")
    with ExitStack() as stack:
        if sum(map(weight_bytes, models)) <= MOST_BYTES:
            call = _Sessions(models, context.device).call
        else:
            files = _written(models, stack)
            call = stack.enter_context(Worker(_Sessions, files, context.device)).call
        accepted: list[int] = call("accept", list(feeds.values()))
        if not accepted:
            return None
        samplers = [partial(call, "sample", index) for index in range(len(models))]
        times = TIMER.measure(samplers, total, progress=progress)
    workloads = list(feeds)
    return [workloads[index] for index in accepted], list(times.transpose(2, 0, 1))


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
    """Sessions of several models, for interleaved timing; ``call`` is that of ``Worker``."""

    def __init__(self, models: Sequence[ir.Model | Path], device: Device) -> None:
        self.sessions = [open_session(model, device) for model in models]
        self.samplers: list[Callable[[int], np.ndarray]] = []

    def call(self, name: Literal["accept", "sample"], *arguments: Any) -> Any:
        return getattr(self, name)(*arguments)

    def accept(self, feeds: Sequence[Batch]) -> list[int]:
        """Keep the inputs that all models run, and return their indices."""
        accepted = [index for index, feed in enumerate(feeds) if self._runs(feed)]
        self.samplers = [
            shape_sampler([session.bind(feeds[index]) for index in accepted])
            for session in self.sessions
        ]
        return accepted

    def sample(self, index: int, repeats: int) -> list[float]:
        """See ``shape_sampler``."""
        return self.samplers[index](repeats).tolist()

    def _runs(self, feed: Batch) -> bool:
        try:
            for session in self.sessions:
                session.run(None, feed)
        except AttnserveError:  # more tokens than the model has positions
            return False
        return True
