"""Settings that all stages of a run share: device, seed and progress callback."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

if TYPE_CHECKING:
    import numpy as np
    import onnx_ir as ir

__all__ = [
    "AUTO",
    "CPU",
    "DEFAULT_CONTEXT",
    "ONE_THREAD",
    "Device",
    "ModelTimer",
    "Progress",
    "Provider",
    "RunContext",
    "TimedModel",
    "ignore_progress",
]

Provider = Literal["cpu", "cuda"]
"""The kind of processor."""

AUTO = "auto"
"""The fastest runtime in serving, by measurements; in other commands see ``runtime_of`` and
``Job.runtime_for``. As a precision, the fastest one that meets the goal of a search."""

Progress = Callable[[str, int, int], None]
"""Receives (stage name, steps done, steps in total)."""


def ignore_progress(stage: str, done: int, total: int) -> None:
    """Report nothing."""


@dataclass(frozen=True)
class Device:
    """The runtime, provider and threads that run a model.

    Attributes:
        provider: The kind of processor.
        threads: Intra-op threads of a session; 0 leaves the choice to the runtime, which takes no
            more than the CPU quota of a container.
        runtime: Name of the runtime library in ``RUNTIMES``, or ``AUTO``.
    """

    provider: Provider = "cpu"
    threads: int = 0
    runtime: str = "onnxruntime"

    @property
    def runtime_name(self) -> str:
        """Name of the runtime in ``RUNTIMES``, without a measurement."""
        return "onnxruntime" if self.runtime == AUTO else self.runtime


CPU = Device()
ONE_THREAD = Device(threads=1)


class TimedModel(NamedTuple):
    """A model to time on a device, and its inputs at each shape."""

    model: ir.Model
    feeds: Sequence[Mapping[str, np.ndarray]]
    device: Device


class ModelTimer(Protocol):
    """Times models."""

    def __call__(self, models: Sequence[TimedModel], seconds: float) -> Sequence[np.ndarray]:
        """Milliseconds of one run of each model, (models, rounds), at each shape.

        Args:
            models: All have the same number of shapes.
            seconds: Approximate time of all runs.
        """
        ...


@dataclass(frozen=True)
class RunContext:
    """The settings of a run.

    Attributes:
        device: The runtime, provider and threads that run the models.
        seed: The seed of every random choice.
        progress: Called after each step of a long stage.
        clock: The seconds since any time in the past, which limit a training.
        timer: Replaces the measurement of models and of their parts, whose results depend on the
            machine; None to measure.
    """

    device: Device = CPU
    seed: int = 0
    progress: Progress = ignore_progress
    clock: Callable[[], float] = time.monotonic
    timer: ModelTimer | None = None

    def stage(self, name: str) -> Callable[[int, int], None]:
        """Return a callback (steps done, steps in total) for one stage."""
        return partial(self.progress, name)

    def on_all_threads(self) -> RunContext:
        """A context whose runtime chooses the number of threads, for work that is not timed."""
        return replace(self, device=replace(self.device, threads=0))

    def labeled(self, label: str) -> RunContext:
        """Return a context that puts a label before the names of its stages."""

        def progress(stage: str, done: int, total: int) -> None:
            self.progress(f"{label}: {stage}", done, total)

        return replace(self, progress=progress)


DEFAULT_CONTEXT = RunContext()
"""CPU, threads chosen by ONNX Runtime, seed 0, no progress."""
