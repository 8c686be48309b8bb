"""Count operations instead of measuring time, so that tests give the same result everywhere."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from attnserve.context import Progress, RunContext, TimedModel, ignore_progress
from attnserve.models.measured import ServedSpeed
from attnserve.options import Run
from attnserve.planning.served_speed import ServedTimer
from graph_passes.analysis.axes import named_axes, read_axes
from graph_passes.analysis.cost import macs_at
from graph_passes.analysis.shapes import infer_shapes_at

SPEED_OF = ServedTimer.speed_of
"""What ``count_served`` replaces."""


@dataclass(frozen=True)
class Count:
    """A timer that counts MACs: the more, the more time; a graph whose MACs cannot be counted has
    none.

    Attributes:
        fused: The relative time of attention in one operator of ONNX Runtime.
        standard: The relative time of the operator of ai.onnx.
    """

    fused: float = 0.9
    standard: float = 0.9

    def __call__(self, models: Sequence[TimedModel], seconds: float = 0.0) -> list[np.ndarray]:
        by_model = [
            [self.milliseconds(timed.model, feed) for feed in timed.feeds] for timed in models
        ]
        return [np.array([[ms] * 2 for ms in shape]) for shape in zip(*by_model, strict=True)]

    def milliseconds(self, model: ir.Model, feed: Mapping[str, np.ndarray]) -> float:
        share = self.fused if any(node.domain for node in model.graph) else 1.0
        if any((node.domain, node.op_type) == ("", "Attention") for node in model.graph):
            share = self.standard
        return 0.01 + macs(model, feed) / 1e6 * share


def macs(model: ir.Model, feed: Mapping[str, np.ndarray]) -> int:
    """MACs of one run; 0 if they cannot be counted. Faster than ``model_cost`` at any lengths."""
    inputs = {value.name or "": value for value in model.graph.inputs}
    shapes = {name: array.shape for name, array in feed.items() if name in inputs}
    lengths = read_axes(inputs, shapes) or {}
    if not lengths.keys() >= set(named_axes(model.graph)):
        return 0
    total, uncounted = macs_at(infer_shapes_at(model, lengths), model.graph)
    return 0 if uncounted else total


def counting_clock() -> Callable[[], float]:
    """A clock that runs by 0.2 s at each call: a training has the same steps on every machine."""
    calls = itertools.count()
    return lambda: 0.2 * next(calls)


def equal_times(models: Sequence[TimedModel], seconds: float) -> list[np.ndarray]:
    return [np.ones((len(models), 2)) for _ in models[0].feeds]


class Unfused(ServedTimer):
    """Serves models as they are."""

    def served(self, model: ir.Model, *_: Any) -> ir.Model:
        return model


def measure_unfused(timer: ServedTimer, *arguments: Any, **named: Any) -> ServedSpeed | None:
    """Report equal speeds: to fuse and to count models takes half of the time of ``optimize``."""
    context = replace(timer.job.context, timer=equal_times)
    return SPEED_OF(Unfused(replace(timer.job, context=context)), *arguments, **named)


def set_context(patch: pytest.MonkeyPatch, **fields: Any) -> None:
    """Give the contexts of all commands these fields."""
    make = Run.context

    def context(run: Run, progress: Progress = ignore_progress) -> RunContext:
        return replace(make(run, progress), **fields)

    patch.setattr(Run, "context", context)


@contextmanager
def counted() -> Iterator[None]:
    """Count in all commands, and do not fuse what is served."""
    with pytest.MonkeyPatch.context() as patch:
        set_context(patch, timer=Count())
        patch.setattr(ServedTimer, "speed_of", measure_unfused)
        yield


def fused_is_faster(models: Sequence[Sequence[object]], seconds: float) -> np.ndarray:
    """A timer: fused variants take half of the time of the file. A tiny model is not faster."""
    times = np.ones((len(models[0]), len(models), 16))
    times[:, 0] = 2.0
    return times
