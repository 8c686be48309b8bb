"""The operations on the scaled logits before the softmax: masks, biases and bounds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import onnx_ir as ir

__all__ = [
    "Capped",
    "Causal",
    "Floor",
    "FullLengths",
    "KeyLengths",
    "KeyMask",
    "LogitStep",
    "Mask",
    "PositionBias",
    "Scaled",
    "Weighted",
]


@dataclass(frozen=True, eq=False)
class PositionBias:
    """logits + sign * value: an additive mask or a position bias.

    Attributes:
        value: Broadcasts to the logits.
        axes: The permutation of the logits at this step to (B, H, S, T); None for the identity.
        entangled: Whether the value depends on the queries or keys of the same block.
    """

    value: ir.Value
    sign: Literal[1, -1] = 1
    axes: tuple[int, ...] | None = None
    entangled: bool = False


@dataclass(frozen=True, eq=False)
class Mask:
    """Logits are replaced by ``fill`` where the boolean ``value`` differs from ``keep``.

    ``axes`` is the permutation of the logits at this step to (B, H, S, T); None for the identity.
    """

    value: ir.Value
    fill: float
    keep: bool
    axes: tuple[int, ...] | None = None


@dataclass(frozen=True, eq=False)
class KeyMask:
    """``fill`` is added to the logits of keys whose (B, T) ``value`` is not positive.

    If ``queries`` is 0, the value is (B, S, T): one mask per query.
    """

    value: ir.Value
    fill: float
    queries: Literal[0, 1] = 1


@dataclass(frozen=True, eq=False)
class KeyLengths:
    """Each of B sequences has ``value + extra`` keys; logits of further keys become ``fill``."""

    value: ir.Value
    extra: int
    fill: float


@dataclass(frozen=True, eq=False)
class FullLengths:
    """Sequence lengths of a cache: ``value`` is T - 1 per sequence, ``total`` is T.

    An operator may accept sequences of different lengths; the block describes full ones.
    """

    value: ir.Value
    total: ir.Value


@dataclass(frozen=True)
class Causal:
    """Query s attends to keys t <= s, or t <= s + T - S if ``ends_together``."""

    ends_together: bool = False


@dataclass(frozen=True, eq=False)
class Weighted:
    """logits * value: the multiplicative mask of older decoders.

    ``axes`` is the permutation of the logits at this step to (B, H, S, T); None for the identity.
    """

    value: ir.Value
    axes: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Scaled:
    """logits * factor, after an earlier step."""

    factor: float


@dataclass(frozen=True)
class Capped:
    """tanh(logits); with ``Scaled`` before and after, a soft cap."""


@dataclass(frozen=True)
class Floor:
    """max(logits, ``low``)."""

    low: float


LogitStep = (
    PositionBias
    | Mask
    | Weighted
    | KeyMask
    | KeyLengths
    | FullLengths
    | Causal
    | Scaled
    | Capped
    | Floor
)
"""One operation on the scaled logits before the softmax."""
