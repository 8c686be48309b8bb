"""The scores of class logits."""

from __future__ import annotations

import numpy as np

from attnserve.literals import Activation
from graph_passes.errors import InvalidData

__all__ = ["scores_of"]


def scores_of(logits: np.ndarray, activation: Activation | None) -> np.ndarray:
    """The scores of logits of shape (texts, classes).

    Args:
        activation: None for softmax, or the sigmoid of a single class.
    """
    if logits.ndim != 2:
        raise InvalidData(
            f"the output of the model has the shape {list(logits.shape)}:"
            " expected [batch, classes]",
            "use a model with a classification head",
        )
    logits = logits.astype(np.float64)
    if activation is None:
        activation = "sigmoid" if logits.shape[1] == 1 else "softmax"
    if activation == "identity":
        return logits
    if activation == "sigmoid":
        with np.errstate(over="ignore"):
            return 1 / (1 + np.exp(-logits))
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)
