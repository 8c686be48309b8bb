"""I/O binding: runs of a session on device memory, and their run options."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import numpy as np

from attnserve.runtime.cuda import DEVICE
from attnserve.runtime.interface import Feed
from attnserve.runtime.onnx_runtime import (
    BufferDevice,
    OnnxSession,
    placed,
    require_runtime,
    run_errors,
)

__all__ = ["InputBuffers", "run_bound", "run_options", "shrink_arena"]


class InputBuffers:
    """Device buffers for the inputs of one run at a time, cached by shape.

    Args:
        most: Maximum number of cached shapes; the least recently used one is removed first.
    """

    def __init__(self, device: BufferDevice, most: int = 8) -> None:
        self._device: BufferDevice = device
        self._most = most
        self._cache: OrderedDict[Any, dict[str, Any]] = OrderedDict()

    def filled(self, feed: Feed) -> Mapping[str, Any]:
        """Copy the inputs into buffers, which are valid until the next call."""
        # update_inplace copies the number of elements and does not check their type.
        key = tuple((name, array.shape, array.dtype.str) for name, array in feed.items())
        buffers = self._cache.get(key)
        if buffers is None:
            buffers = {name: placed(array, self._device) for name, array in feed.items()}
            self._cache[key] = buffers
            if len(self._cache) > self._most:
                self._cache.popitem(last=False)
        else:
            self._cache.move_to_end(key)
            for name, array in feed.items():
                buffers[name].update_inplace(np.ascontiguousarray(array))
        return buffers


def run_options(*, graph: int | None = None, shrink_arena: bool = False) -> Any:
    """``onnxruntime.RunOptions`` of one run on CUDA.

    Args:
        graph: Number (from 1) of the CUDA graph that the first run captures and later runs replay;
            None for a run without a graph.
        shrink_arena: Free the unused memory of the arena after the run. Not allowed with CUDA
            graphs, which would replay into freed memory.
    """
    options = require_runtime().RunOptions()
    options.add_run_config_entry("gpu_graph_id", "-1" if graph is None else str(graph))
    if shrink_arena:
        options.add_run_config_entry("memory.enable_memory_arena_shrinkage", f"gpu:{DEVICE}")
    return options


def run_bound(session: OnnxSession, binding: Any, options: Any, feed: Feed) -> None:
    """Run a session on bound values; ``feed`` describes them in errors.

    Raises:
        RunFailed: The model refuses the inputs, or the run fails.
    """
    with run_errors(feed):
        session.native.run_with_iobinding(binding, options)


def shrink_arena(session: OnnxSession, feed: Feed) -> None:
    """Run a small feed and free the unused memory of the GPU arena; no effect on the CPU."""
    if session.is_on_cuda:
        session.run(None, feed, run_options(shrink_arena=True))
