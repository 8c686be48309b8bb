"""Runs on memory of the device: ONNX Runtime's bindings, values and options of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

import numpy as np

from attnserve.device import DEVICE, run_entries
from attnserve.session import require_runtime

__all__ = ["Feed", "Place", "binding_of", "bound", "give_back", "placed", "run_options"]

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


def binding_of(session: Any, inputs: Mapping[str, Any], place: Place) -> Any:
    """Inputs bound to where they are, outputs to be made in the same place."""
    binding = session.io_binding()
    for name, value in inputs.items():
        binding.bind_ortvalue_input(name, value)
    for value in session.get_outputs():
        binding.bind_output(value.name, place, DEVICE)
    return binding


def placed(array: np.ndarray, place: Place) -> Any:
    return require_runtime().OrtValue.ortvalue_from_numpy(array, place, DEVICE)


def run_options(*, graph: int | None = None, give_back: bool = False) -> Any:
    options = require_runtime().RunOptions()
    for name, value in run_entries(graph=graph, give_back=give_back).items():
        options.add_run_config_entry(name, value)
    return options


def give_back(session: Any, feed: Feed) -> None:
    """Run a small feed, then return what the GPU's arena does not use; nothing on the CPU."""
    if "CUDAExecutionProvider" in session.get_providers():
        session.run(None, dict(feed), run_options(give_back=True))
