"""I/O binding: runs of a session on device memory, and their run options."""

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
"""The device of buffers; "cpu" is for tests without a GPU."""


def bound(session: Any, feed: Feed) -> Callable[[], object]:
    """A function that runs the session on ``feed``, for timing.

    On CUDA, inputs and outputs stay on the device, and the function waits until the run ends.
    """
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
    """Bind inputs and outputs (None: all); outputs are allocated on the device ``place``."""
    binding = session.io_binding()
    for name, value in inputs.items():
        binding.bind_ortvalue_input(name, value)
    for name in names or [value.name for value in session.get_outputs()]:
        binding.bind_output(name, place, DEVICE)
    return binding


class InputBuffers:
    """Device buffers for the inputs of one run at a time, cached by shape.

    Args:
        most: Maximum number of cached shapes; the least recently used one is removed first.
    """

    def __init__(self, place: Place, most: int = 8) -> None:
        self._place: Place = place
        self._most = most
        self._cache: OrderedDict[Any, dict[str, Any]] = OrderedDict()

    def filled(self, feed: Feed) -> Mapping[str, Any]:
        """Copy the inputs into buffers, which are valid until the next call."""
        # update_inplace copies the number of elements and does not check their type.
        key = tuple((name, array.shape, array.dtype.str) for name, array in feed.items())
        buffers = self._cache.get(key)
        if buffers is None:
            buffers = {name: placed(array, self._place) for name, array in feed.items()}
            self._cache[key] = buffers
            if len(self._cache) > self._most:
                self._cache.popitem(last=False)
        else:
            self._cache.move_to_end(key)
            for name, array in feed.items():
                buffers[name].update_inplace(np.ascontiguousarray(array))
        return buffers


def placed(array: np.ndarray, place: Place) -> Any:
    """Copy an array to the device."""
    return require_runtime().OrtValue.ortvalue_from_numpy(array, place, DEVICE)


def run_options(*, graph: int | None = None, shrink_arena: bool = False) -> Any:
    """``onnxruntime.RunOptions`` with the entries of ``run_entries``."""
    options = require_runtime().RunOptions()
    for name, value in run_entries(graph=graph, shrink_arena=shrink_arena).items():
        options.add_run_config_entry(name, value)
    return options


def shrink_arena(session: Any, feed: Feed) -> None:
    """Run a small feed and free the unused memory of the GPU arena; does nothing on the CPU."""
    if "CUDAExecutionProvider" in session.get_providers():
        session.run(None, dict(feed), run_options(shrink_arena=True))
