"""The workload of one run of a model: its rows, new tokens and cached tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Phase", "Workload"]

Phase = Literal["sequence", "prompt", "token"]
"""``prompt``: new tokens and an empty cache. ``token``: one new token after cached tokens.
``sequence``: new tokens, after as many cached tokens if the model has a cache."""


@dataclass(frozen=True, order=True)
class Workload:
    """The tokens of one run: the new tokens of each row, after its cached tokens.

    Attributes:
        batch: Rows.
        new: Tokens per row that the run computes.
        past: Tokens per row in caches; models without a cache ignore it.
    """

    phase: Phase
    batch: int
    new: int
    past: int

    @classmethod
    def of(cls, batch: int, length: int, phase: Phase = "sequence") -> Workload:
        """The workload of a phase; ``length`` counts the cached tokens before a ``token``."""
        new = 1 if phase == "token" else length
        return cls(phase, batch, new, 0 if phase == "prompt" else length)

    @property
    def length(self) -> int:
        """The argument ``length`` of ``of``: cached tokens for a ``token``, else new tokens."""
        return self.past if self.phase == "token" else self.new

    def __str__(self) -> str:
        return f"{self.batch} x {self.length}" + (" (1 new)" if self.phase == "token" else "")
