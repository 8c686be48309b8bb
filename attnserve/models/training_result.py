"""The result of a training of a model, and its record."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, cast

from attnserve.models.lineage import TrainingRecord

__all__ = ["TrainingResult"]


@dataclass
class TrainingResult:
    """The extent of a training, and the loss of its best weights.

    Attributes:
        steps: Optimizer steps.
        tokens: Real tokens of all steps.
        seconds: Time of the training, its measurements included.
        stopped: Why it ended: "time", "no gain" or "not finite".
        learning_rate: The maximum of the schedule.
        restarts: Number of restarts with a lower learning rate.
        since: (step, measurement) of the start or the last restart.
        loss: The loss on the rows to choose, of the best weights: ``Losses.bounded``, and
            that of labels.
        first_loss: The same before the training.
        history: (seconds, training loss, loss on the rows to choose) of each measurement.
        states: The number of hidden states that were learned, besides the outputs.
        weights: The number of trained elements.
    """

    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    stopped: str = "time"
    learning_rate: float = 0.0
    restarts: int = 0
    since: tuple[int, int] = (0, 0)
    loss: float = math.inf
    first_loss: float = math.inf
    history: list[tuple[float, float, float]] = field(
        default_factory=list[tuple[float, float, float]]
    )
    states: int = 0
    weights: int = 0

    @property
    def is_better(self) -> bool:
        """Whether the loss on the rows to choose fell: only then are the weights changed."""
        return self.loss < self.first_loss

    @property
    def record(self) -> TrainingRecord:
        """The record of the training; numbers that are not finite are null."""
        return TrainingRecord.model_validate(_finite(asdict(self)))


def _finite(value: Any) -> Any:
    """The value with None for floats that are not finite, for JSON."""
    match value:
        case float():
            return value if math.isfinite(value) else None
        case dict():
            return {key: _finite(item) for key, item in cast(dict[str, Any], value).items()}
        case list() | tuple():
            return [_finite(item) for item in cast(Sequence[Any], value)]
        case _:
            return value
