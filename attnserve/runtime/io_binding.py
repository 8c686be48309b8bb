"""Runs on memory of the device: ONNX Runtime's bindings, values and options of a run."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import numpy as np

from attnserve.runtime.cuda import DEVICE, run_entries
from attnserve.runtime.session import require_runtime

__all__ = [
    "Feed",
    "InputBuffers",
    "Place",
    "binding_of",
    "bound",
    "placed",
    "run_options",
    "shrink_arena",
]

Feed = Mapping[str, np.ndarray]
Place = Literal["cpu", "cuda"]
"""Where buffers lie: on the CPU only in tests, where the same code runs without a GPU."""


def bound(session: Any, feed: Feed) -> Callable[[], object]:
    """A run to be timed: on CUDA from memory of the device to it, and at an end when that is."""
    if "CUDAExecutionProvider" not in session.get_providers():
        return partial(session.run, None, dict(feed))
    binding = binding_of(
        session, {name: placed(array, "cuda") for name, array in feed.items()}, "cuda"
    )

    def run() -> None:
        session.run_with_iobinding(binding)
        binding.synchronize_outputs()

    return run


def binding_of(
    session: Any, inputs: Mapping[str, Any], place: Place, names: Sequence[str] | None = None
) -> Any:
    """Inputs bound to where they are, outputs (None: all) to be made in the same place."""
    binding = session.io_binding()
    for name, value in inputs.items():
        binding.bind_ortvalue_input(name, value)
    for name in names or [value.name for value in session.get_outputs()]:
        binding.bind_output(name, place, DEVICE)
    return binding


class InputBuffers:
    """What one run at a time reads, in memory of the device: that of the last shapes stays there.

    Args:
        most: The shapes whose buffers stay; the one that was used longest ago goes first.
    """

    def __init__(self, place: Place, most: int = 8) -> None:
        self._place: Place = place
        self._most = most
        self._held: OrderedDict[Any, dict[str, Any]] = OrderedDict()

    def filled(self, feed: Feed) -> Mapping[str, Any]:
        """The buffers of these inputs, which hold them until the next call."""
        # By type too: what is copied is as many elements as there are, whatever their size.
        key = tuple((name, array.shape, array.dtype.str) for name, array in feed.items())
        held = self._held.get(key)
        if held is None:
            held = {name: placed(array, self._place) for name, array in feed.items()}
            self._held[key] = held
            if len(self._held) > self._most:
                self._held.popitem(last=False)
        else:
            self._held.move_to_end(key)
            for name, array in feed.items():
                held[name].update_inplace(np.ascontiguousarray(array))
        return held


def placed(array: np.ndarray, place: Place) -> Any:
    return require_runtime().OrtValue.ortvalue_from_numpy(array, place, DEVICE)


def run_options(*, graph: int | None = None, shrink_arena: bool = False) -> Any:
    options = require_runtime().RunOptions()
    for name, value in run_entries(graph=graph, shrink_arena=shrink_arena).items():
        options.add_run_config_entry(name, value)
    return options


def shrink_arena(session: Any, feed: Feed) -> None:
    """Run a small feed, then return what the GPU's arena does not use; nothing on the CPU."""
    if "CUDAExecutionProvider" in session.get_providers():
        session.run(None, dict(feed), run_options(shrink_arena=True))
