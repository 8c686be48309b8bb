"""Settings that all stages of a run share: provider, threads, seed and progress callback."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

__all__ = ["DEFAULT_CONTEXT", "Progress", "Provider", "RunContext", "ignore_progress"]

Provider = Literal["cpu", "cuda"]
"""The ONNX Runtime execution provider."""

Progress = Callable[[str, int, int], None]
"""Receives (stage name, steps done, steps in total)."""


def ignore_progress(stage: str, done: int, total: int) -> None:
    """Report nothing."""


@dataclass(frozen=True)
class RunContext:
    """Settings of a run.

    Attributes:
        provider: The execution provider of every session.
        threads: Intra-op threads of a session; 0 leaves the choice to ONNX Runtime.
        seed: The seed of every random choice.
        progress: Called after each step of a long stage.
    """

    provider: Provider = "cpu"
    threads: int = 0
    seed: int = 0
    progress: Progress = ignore_progress

    def stage(self, name: str) -> Callable[[int, int], None]:
        """Return a callback (steps done, steps in total) for one stage."""
        return partial(self.progress, name)

    def labeled(self, label: str) -> RunContext:
        """Return a context that puts a label before the names of its stages."""

        def progress(stage: str, done: int, total: int) -> None:
            self.progress(f"{label}: {stage}", done, total)

        return replace(self, progress=progress)


DEFAULT_CONTEXT = RunContext()
"""CPU, threads chosen by ONNX Runtime, seed 0, no progress."""
