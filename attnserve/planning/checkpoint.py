"""What a long search has measured so far, kept on disk."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from attnserve.models.artifact import staged
from attnserve.planning.candidates import LossCurve
from attnserve.runtime.part_latency import default_cache
from graph_passes.errors import AttnserveError

__all__ = ["Checkpoint"]


@dataclass(eq=False)
class Checkpoint:
    """What was measured so far, on disk: a search that is interrupted goes on from there."""

    path: Path
    content: dict[str, Any] = field(default_factory=dict[str, Any])

    @classmethod
    def open(cls, name: str) -> Checkpoint:
        path = default_cache().parent / "plans" / f"{name}.json"
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            content = {}
        return cls(path, content if isinstance(content, dict) else {})

    def curves(self) -> dict[str, LossCurve] | None:
        try:
            return {n: LossCurve.from_json(c) for n, c in self.content["curves"].items()}
        except (KeyError, TypeError, ValueError, AttributeError):
            return None

    def pair_losses(self) -> dict[str, tuple[tuple[int, ...], float]] | None:
        """(heads, loss) of pairs, by the key of the reader."""
        try:
            known = self.content["pairs"]
            return {key: (tuple(heads), float(loss)) for key, (heads, loss) in known.items()}
        except (KeyError, TypeError, ValueError, AttributeError):
            return None

    def built(self, key: str) -> tuple[float, float] | None:
        """(loss, cosine) of what was built."""
        try:
            loss, cosine = self.content["builds"][key]
            return float(loss), float(cosine)
        except (KeyError, TypeError, ValueError):
            return None

    def put(self, key: str, value: Any) -> None:
        self.content[key] = value
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with staged(self.path.parent) as stage:
                (stage / self.path.name).write_text(json.dumps(self.content), encoding="utf-8")
        except (OSError, AttnserveError):  # then nothing is remembered
            return

    def close(self) -> None:
        with suppress(OSError):
            self.path.unlink(missing_ok=True)
