"""Time models in sessions like those that serve them, in a child process: its end frees memory."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import onnx_ir as ir

from attnserve.context import ModelTimer, TimedModel
from attnserve.models.onnx_files import save_model
from attnserve.runtime.interface import AS_SERVED
from attnserve.runtime.interleaved_timer import (
    QUICK,
    Sampler,
    shape_sampler,
    time_twice_if_slow,
)
from attnserve.runtime.isolation import Worker
from attnserve.runtime.session import open_session
from graph_passes.errors import AttnserveError

__all__ = ["time_served"]


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

        def time_once() -> np.ndarray:
            return QUICK.time(samplers, seconds, progress=progress).transpose(2, 0, 1)

        return shapes, time_twice_if_slow(time_once, min_speedup)


@contextmanager
def _opened(models: Sequence[TimedModel]) -> Generator[tuple[list[int], list[Sampler]]]:
    """Open models: the indices of the shapes that all run, and a sampler of each model."""
    with ExitStack() as stack:
        graphs = dict.fromkeys(timed.model for timed in models)
        files = {graph: stack.enter_context(_written(graph)) for graph in graphs}
        on_disk = [timed._replace(model=files[timed.model]) for timed in models]
        worker = stack.enter_context(Worker(_Sessions, on_disk))
        yield (
            worker.call("accept"),
            [partial(worker.call, "sample", index) for index in range(len(models))],
        )


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

    def __init__(self, models: Sequence[TimedModel]) -> None:
        self._opened = [
            (open_session(timed.model, timed.device, AS_SERVED), timed.feeds) for timed in models
        ]
        self._samplers: list[Callable[[int], np.ndarray]] = []

    def accept(self) -> list[int]:
        """Time the shapes that all models run, and return their indices."""
        shapes = [shape for shape in range(len(self._opened[0][1])) if self._runs(shape)]
        self._samplers = [
            shape_sampler([session.bind(feeds[shape]) for shape in shapes])
            for session, feeds in self._opened
        ]
        return shapes

    def _runs(self, shape: int) -> bool:
        try:
            for session, feeds in self._opened:
                session.run(None, feeds[shape])
        except AttnserveError:  # more tokens than the model has positions
            return False
        return True

    def sample(self, index: int, repeats: int) -> list[float]:
        """Seconds per run of a model at each shape, in turn."""
        return self._samplers[index](repeats).tolist()
