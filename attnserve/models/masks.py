"""Read the mask inputs of models: which tokens are real."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from graph_passes.errors import InvalidData

if TYPE_CHECKING:
    from jaxtyping import Bool

__all__ = [
    "flat_mask",
    "is_mask",
    "is_sequence",
    "marks_padding",
    "no_token",
    "not_finite",
    "padding_value",
    "read_mask",
    "text_mask",
    "token_mask",
    "vector_mask",
]

ADDED = -1.0
"""Additive masks contain 0 for real tokens, and values below this for other tokens."""

MUCH_LESS = -1e4
"""Padding value of additive masks if no row contains padding; representable in float16."""


def is_mask(name: str) -> bool:
    """Whether the name of an input names an attention or padding mask."""
    return "mask" in name.lower()


def marks_padding(name: str, dtype: np.dtype[Any]) -> bool:
    """Whether a boolean mask is true for padding, as ``key_padding_mask`` of PyTorch is."""
    return dtype.kind == "b" and is_mask(name) and "pad" in name.lower()


def read_mask(name: str, array: np.ndarray) -> Bool[np.ndarray, ...]:
    """The tokens that a mask keeps: a boolean, integer, multiplicative or additive mask."""
    if array.dtype.kind != "f":
        return array.astype(bool) != marks_padding(name, array.dtype)
    return array > ADDED if (array <= 0).all() else array > 0.5


def padding_value(name: str, array: np.ndarray) -> Any:
    """The value of an input at padding."""
    if not is_mask(name):
        return 0
    if array.dtype.kind == "f":
        return MUCH_LESS if (array <= 0).all() else 0
    return int(marks_padding(name, array.dtype))


def token_mask(batch: Mapping[str, np.ndarray], tokens: Sequence[int]) -> Bool[np.ndarray, "B T"]:
    """The real tokens of a value (B, T, ...): by the first mask input of this shape."""
    for name, array in batch.items():
        if is_mask(name) and array.shape == tuple(tokens):
            return read_mask(name, array)
    return np.ones(tokens, dtype=bool)


def is_sequence(batch: Mapping[str, np.ndarray]) -> bool:
    """Whether all inputs have one shape (B, T)."""
    shapes = {array.shape for array in batch.values()}
    return len(shapes) == 1 and len(next(iter(shapes))) == 2


def text_mask(batch: Mapping[str, np.ndarray]) -> Bool[np.ndarray, "B T"] | None:
    """The real tokens of texts; None if the rows are not texts that can be padded."""
    if not is_sequence(batch):
        return None
    return next((read_mask(n, a) for n, a in batch.items() if is_mask(n)), None)


def flat_mask(batch: Mapping[str, np.ndarray], rows: int) -> Bool[np.ndarray, "B T"] | None:
    """The first mask input (B, T) of this many elements, for values (B*T, ...), if any."""
    for name, array in batch.items():
        if is_mask(name) and array.ndim == 2 and array.size == rows:
            return read_mask(name, array)
    return None


def vector_mask(shape: Sequence[int], batch: Mapping[str, np.ndarray]) -> Bool[np.ndarray, ...]:
    """Which vectors of a value (B, T, ..., D), (B*T, D) or (B, D) belong to real tokens.

    Returns:
        An array of the shape without D.
    """
    if len(shape) == 2:
        flat = flat_mask(batch, shape[0])
        is_flat = flat is not None and len(flat) != shape[0]
        return flat.reshape(-1) if flat is not None and is_flat else np.ones(shape[:1], bool)
    mask = token_mask(batch, shape[:2])
    return np.broadcast_to(mask.reshape(*mask.shape, *(1,) * (len(shape) - 3)), shape[:-1])


def no_token(name: str) -> InvalidData:
    """The error for data whose masks hide every token."""
    return InvalidData(
        f"{name}: the calibration data has no unmasked token",
        "check the mask input",
        code="calibration.no_token",
    )


def not_finite(name: str, what: str = "activations") -> InvalidData:
    """The error for NaN or infinite activations."""
    return InvalidData(
        f"{name}: the {what} on the calibration data are not finite",
        "check the model and the data",
        code="calibration.not_finite",
    )
