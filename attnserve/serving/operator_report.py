"""The operators of a loaded model: the fused operators, or the reason for no fusion."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from pydantic import BaseModel, Field, model_serializer, model_validator

from attnserve.planning.served_graph.fusion_report import FusionReport

__all__ = ["NOT_REWRITTEN", "PENDING", "OperatorReport"]


class OperatorReport(BaseModel, frozen=True, extra="forbid"):
    """The operators that a loaded model runs.

    JSON has "rewritten", whether operators are fused, then the fields of ``fused`` or the reason.

    Attributes:
        fused: The fused operators; None if the model runs without operator fusion.
        why: The reason for no fusion.
        is_pending: Whether a fusion has not ended yet.
        refused: Without a fusion, why another runtime does not run the model, by its name. See
            ``refused_runtimes``.
    """

    fused: FusionReport | None = None
    why: str = ""
    is_pending: bool = False
    refused: Mapping[str, str] = Field(default_factory=dict[str, str])

    @property
    def refused_runtimes(self) -> Mapping[str, str]:
        """Why other runtimes do not run the model, by name; ``AUTO`` if none was compared."""
        return self.refused if self.fused is None else self.fused.refused

    def with_refused(self, refused: Mapping[str, str]) -> OperatorReport:
        """The report with other ``refused_runtimes``."""
        if self.fused is None:
            return self.model_copy(update={"refused": refused})
        return self.model_copy(update={"fused": replace(self.fused, refused=refused)})

    @model_serializer
    def to_json(self) -> dict[str, Any]:
        """The report as JSON values."""
        if self.fused is not None:
            return {"rewritten": True, **asdict(self.fused)}
        pending = {"pending": True} if self.is_pending else {}
        refused = {"refused": dict(self.refused)} if self.refused else {}
        return {"rewritten": False, **pending, "why": self.why, **refused}

    @model_validator(mode="before")
    @classmethod
    def _read_json(cls, content: Any) -> Any:
        match content:
            case {"rewritten": True, **fused}:
                return {"fused": fused}
            case {"rewritten": False, "why": why, **others}:
                refused = others.get("refused", {})
                return {"why": why, "is_pending": "pending" in others, "refused": refused}
            case _:  # the fields
                return content


NOT_REWRITTEN = OperatorReport(why="operator fusion is off")
PENDING = OperatorReport(why="operator fusion is being tried in the background", is_pending=True)
