"""The operators of a loaded model: the fused operators, or the reason for no fusion."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from pydantic import BaseModel, model_serializer, model_validator

from attnserve.planning.served_graph.fusion_report import FusionReport

__all__ = ["NOT_REWRITTEN", "PENDING", "OperatorReport"]


class OperatorReport(BaseModel, frozen=True, extra="forbid"):
    """The operators that a loaded model runs.

    JSON has "rewritten", whether operators are fused, then the fields of ``fused`` or the reason.

    Attributes:
        fused: The fused operators; None if the model runs without operator fusion.
        why: The reason for no fusion.
        is_pending: Whether a fusion has not ended yet.
    """

    fused: FusionReport | None = None
    why: str = ""
    is_pending: bool = False

    @model_serializer
    def to_json(self) -> dict[str, Any]:
        """The report as JSON values."""
        if self.fused is not None:
            return {"rewritten": True, **asdict(self.fused)}
        pending = {"pending": True} if self.is_pending else {}
        return {"rewritten": False, **pending, "why": self.why}

    @model_validator(mode="before")
    @classmethod
    def _read_json(cls, content: Any) -> Any:
        match content:
            case {"rewritten": True, **fused}:
                return {"fused": fused}
            case {"rewritten": False, "why": why, **others}:
                return {"why": why, "is_pending": "pending" in others}
            case _:  # the fields
                return content


NOT_REWRITTEN = OperatorReport(why="operator fusion is off")
PENDING = OperatorReport(why="operator fusion is being tried in the background", is_pending=True)
