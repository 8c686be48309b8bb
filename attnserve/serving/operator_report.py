"""The operators of a loaded model: the fused operators, or the reason for no fusion."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from attnserve.planning.served_graph.fusion_report import FusionReport
from attnserve.runtime.interface import LongRows

__all__ = ["NOT_REWRITTEN", "PENDING", "OperatorReport"]


@dataclass(frozen=True)
class OperatorReport:
    """The operators that a loaded model runs.

    Attributes:
        fused: The fused operators; None if the model runs without operator fusion.
        why: The reason for no fusion.
        is_pending: Whether a fusion has not ended yet.
    """

    fused: FusionReport | None = None
    why: str = ""
    is_pending: bool = False

    def to_json(self) -> dict[str, Any]:
        if self.fused is not None:
            return {"rewritten": True, **asdict(self.fused)}
        pending = {"pending": True} if self.is_pending else {}
        return {"rewritten": False, **pending, "why": self.why}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> OperatorReport:
        """Read the content that ``to_json`` wrote.

        Raises:
            KeyError, TypeError: The content is not an operator report.
        """
        if not content["rewritten"]:
            return cls(why=content["why"], is_pending="pending" in content)
        values = {name: value for name, value in content.items() if name != "rewritten"}
        if values["long_rows"] is not None:
            values["long_rows"] = LongRows(**values["long_rows"])
        return cls(FusionReport(**values))


NOT_REWRITTEN = OperatorReport(why="operator fusion is off")
PENDING = OperatorReport(why="operator fusion is being tried in the background", is_pending=True)
