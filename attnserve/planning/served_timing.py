"""Time models in sessions like those that serve them.

A served session with several threads is the only one of its process, and its idle threads wait
busily for the next operator. In one process, such sessions disturb each other. Without busy
waiting, ONNX Runtime takes up to twice as long for small models, and the slower of two runtimes may
be chosen. Models with several threads are therefore timed in one process each; with one thread,
they share a process, whose end frees their memory.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import onnx_ir as ir

from attnserve.context import ModelTimer, TimedModel
from attnserve.models.onnx_files import save_model
from attnserve.runtime.interface import AS_SERVED, SessionOptions
from attnserve.runtime.interleaved_timer import (
    QUICK,
    Sampler,
    shape_sampler,
    time_twice_if_slow,
)
from attnserve.runtime.isolation import Worker
from attnserve.runtime.machine import available_cores
from attnserve.runtime.session import open_session
from graph_passes.errors import AttnserveError

__all__ = ["time_served"]

PAUSE_SECONDS = 5e-3
"""Pause after the sample of a process, in which its idle threads end their busy waiting: those of
ONNX Runtime wait for 1 ms."""


def time_served(
    models: Sequence[TimedModel],
    seconds: float,
    *,
    min_speedup: float = 0.0,
    timer: ModelTimer | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[list[int], np.ndarray]:
    """Time models whose shape changes from run to run, as it does between requests.

    Args:
        models: All have the same provider, threads and shapes.
        seconds: Approximate time of all measurements.
        min_speedup: The models are timed twice if one has a lower speed-up over the first at a
            shape (``time_twice_if_slow``).
        timer: Replaces the measurement.
        progress: Called after each round.

    Returns:
        The indices of the shapes that all models run, and the milliseconds of a run,
        (shapes, models, rounds).

    Raises:
        AttnserveError: A model cannot be opened.
    """
    if timer is not None:
        times = time_twice_if_slow(lambda: np.asarray(timer(models, seconds)), min_speedup)
        return list(range(len(times))), times
    with _opened(models) as (shapes, samplers):
        if not shapes:
            return [], np.empty((0, len(models), 0))
        interleaved = replace(QUICK, pause_seconds=PAUSE_SECONDS if _are_apart(models) else 0.0)

        def time_once() -> np.ndarray:
            return interleaved.time(samplers, seconds, progress=progress).transpose(2, 0, 1)

        return shapes, time_twice_if_slow(time_once, min_speedup)


@contextmanager
def _opened(models: Sequence[TimedModel]) -> Generator[tuple[list[int], list[Sampler]]]:
    """Open models in child processes.

    Yields the indices of the shapes that all models run, and a sampler of these for each model.
    """
    are_apart = _are_apart(models)
    options = replace(AS_SERVED, spinning=are_apart)
    with ExitStack() as stack:
        graphs = dict.fromkeys(timed.model for timed in models)
        files = {graph: stack.enter_context(_written(graph)) for graph in graphs}
        on_disk = [timed._replace(model=files[timed.model]) for timed in models]
        groups = [[timed] for timed in on_disk] if are_apart else [on_disk]
        workers = [stack.enter_context(Worker(_Sessions, group, options)) for group in groups]
        accepted: list[list[int]] = [worker.call("accepted") for worker in workers]
        shapes = [shape for shape in accepted[0] if all(shape in each for each in accepted)]
        for worker in workers:
            worker.call("use", shapes)
        yield (
            shapes,
            [
                partial(worker.call, "sample", index)
                for worker, group in zip(workers, groups, strict=True)
                for index in range(len(group))
            ],
        )


def _are_apart(models: Sequence[TimedModel]) -> bool:
    """Whether each model is timed in a process of its own."""
    device = models[0].device
    return device.provider == "cpu" and device.threads != 1 and available_cores() > 1


@contextmanager
def _written(model: ir.Model | Path) -> Generator[Path]:
    """The file of a model; of a model in memory, a new file that is removed afterwards."""
    if isinstance(model, Path):
        yield model
        return
    with tempfile.TemporaryDirectory(prefix="attnserve-", ignore_cleanup_errors=True) as folder:
        file = Path(folder, "model.onnx")
        save_model(model, file)
        yield file


class _Sessions:
    """Sessions of models, in a child process."""

    def __init__(self, models: Sequence[TimedModel], options: SessionOptions) -> None:
        self._opened = [
            (open_session(timed.model, timed.device, options), timed.feeds) for timed in models
        ]
        self._samplers: list[Callable[[int], np.ndarray]] = []

    def accepted(self) -> list[int]:
        """The indices of the shapes that all models run."""
        return [shape for shape in range(len(self._opened[0][1])) if self._runs(shape)]

    def _runs(self, shape: int) -> bool:
        try:
            for session, feeds in self._opened:
                session.run(None, feeds[shape])
        except AttnserveError:  # more tokens than the model has positions
            return False
        return True

    def use(self, shapes: Sequence[int]) -> None:
        """Time these shapes."""
        self._samplers = [
            shape_sampler([session.bind(feeds[shape]) for shape in shapes])
            for session, feeds in self._opened
        ]

    def sample(self, index: int, repeats: int) -> list[float]:
        """Seconds per run of a model at each shape, in turn."""
        return self._samplers[index](repeats).tolist()
