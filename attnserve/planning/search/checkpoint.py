"""Checkpoint of a search: its measurements so far."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from pydantic import BaseModel, ConfigDict, ValidationError

from attnserve.planning.blocks.configurations import LossCurve
from attnserve.planning.blocks.groups import ReusePair
from attnserve.planning.blocks.loss_curves import BlockLosses
from attnserve.runtime.checkpoint import Checkpoint

__all__ = ["SearchCheckpoint"]


class _Content(BaseModel):
    """File content: the losses (None until measured), and (loss, cosine) by digest of a plan."""

    model_config = ConfigDict(ser_json_inf_nan="constants")

    curves: dict[str, LossCurve] | None = None
    pairs: dict[str, tuple[tuple[int, ...], float]] = {}
    conversion: dict[str, float] = {}
    builds: dict[str, tuple[float, float]] = {}


class SearchCheckpoint:
    """Measurements from which an interrupted search continues; see ``Checkpoint``."""

    def __init__(self, file: Checkpoint) -> None:
        """Read a checkpoint; empty if there is none, or if it is damaged."""
        self._file = file
        self._content = _Content()
        with suppress(ValidationError):
            self._content = _Content.model_validate_json(self._file.read() or b"{}")

    def losses(self, pairs: Sequence[ReusePair]) -> BlockLosses | None:
        """The stored losses; None if there are none.

        Args:
            pairs: All timed pairs; those with a stored loss are returned with it.
        """
        if self._content.curves is None:
            return None
        stored = {pair: self._content.pairs.get(pair.reader.key) for pair in pairs}
        measured_pairs = (replace(pair, heads=v[0], loss=v[1]) for pair, v in stored.items() if v)
        return BlockLosses(self._content.curves, tuple(measured_pairs), self._content.conversion)

    def put_losses(self, losses: BlockLosses) -> None:
        self._content.curves = losses.curves
        self._content.pairs = {p.reader.key: (p.heads, p.loss) for p in losses.pairs}
        self._content.conversion = losses.conversion
        self._write()

    def build(self, plan_digest: str) -> tuple[float, float] | None:
        """(loss, cosine) of the plan with this digest, if it was built."""
        return self._content.builds.get(plan_digest)

    def add_build(self, plan_digest: str, loss: float, cosine: float) -> None:
        """Store the measurements of a built plan."""
        self._content.builds[plan_digest] = loss, cosine
        self._write()

    def _write(self) -> None:
        content = self._content.model_dump_json().encode()
        self._file.write(lambda file: file.write(content))
