"""Checkpoint of a search: its measurements so far, in a file of the user's cache folder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from attnserve.models.artifact import staged
from attnserve.planning.search.block_loss import Losses
from attnserve.planning.search.candidates import LossCurve, ReusePair
from attnserve.runtime.part_latency import default_cache
from graph_passes.errors import AttnserveError

__all__ = ["Checkpoint"]


@dataclass(eq=False)
class Checkpoint:
    """Measurements from which an interrupted search continues.

    Content that cannot be read counts as missing. A folder that cannot be written is ignored.
    """

    path: Path
    content: dict[str, Any] = field(default_factory=dict[str, Any])

    @classmethod
    def open(cls, name: str) -> Checkpoint:
        """Read the checkpoint with this name; empty if there is none."""
        path = default_cache().parent / "plans" / f"{name}.json"
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            content = {}
        return cls(path, content if isinstance(content, dict) else {})

    def losses(self, pairs: Sequence[ReusePair]) -> Losses | None:
        """The stored losses; None if there are none.

        Args:
            pairs: All timed pairs; those with a stored loss are returned with it.
        """
        try:
            curves = {
                key: LossCurve.from_json(curve) for key, curve in self.content["curves"].items()
            }
            stored = self.content["pairs"]
            return Losses(curves, tuple(
                replace(pair, heads=tuple(heads), loss=float(loss))
                for pair in pairs if pair.reader.key in stored
                for heads, loss in [stored[pair.reader.key]]
            ))  # fmt: skip
        except (KeyError, TypeError, ValueError, AttributeError):
            return None

    def put_losses(self, losses: Losses) -> None:
        """Store losses."""
        self.content["curves"] = {key: curve.to_json() for key, curve in losses.curves.items()}
        self.content["pairs"] = {p.reader.key: (p.heads, p.loss) for p in losses.pairs}
        self._write()

    def built(self, digest: str) -> tuple[float, float] | None:
        """(loss, cosine) of the plan with this digest, if it was built."""
        try:
            loss, cosine = self.content["builds"][digest]
            return float(loss), float(cosine)
        except (KeyError, TypeError, ValueError):
            return None

    def add_build(self, digest: str, loss: float, cosine: float) -> None:
        """Store the measurements of a built plan."""
        builds = self.content.get("builds")
        known = dict(builds) if isinstance(builds, dict) else {}  # pyright: ignore
        self.content["builds"] = {**known, digest: (loss, cosine)}
        self._write()

    def remove(self) -> None:
        """Delete the file, once the search has ended."""
        with suppress(OSError):
            self.path.unlink(missing_ok=True)

    def _write(self) -> None:
        with suppress(OSError, AttnserveError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with staged(self.path.parent) as stage:
                (stage / self.path.name).write_text(json.dumps(self.content), encoding="utf-8")
