"""Sequence lengths of target workloads: one length, or a range."""

from __future__ import annotations

from attnserve.options import Lengths

__all__ = ["length_bounds", "middle_length", "spread_lengths"]


def length_bounds(sequence: Lengths) -> tuple[int, int]:
    """The shortest and the longest length."""
    return (sequence, sequence) if isinstance(sequence, int) else sequence


def middle_length(sequence: Lengths) -> int:
    """The length, or the geometric mean of both ends of a range."""
    low, high = length_bounds(sequence)
    return round((low * high) ** 0.5)


def spread_lengths(sequence: Lengths) -> tuple[int, ...]:
    """The length, or both ends of a range and their geometric mean, in order."""
    low, high = length_bounds(sequence)
    return tuple(dict.fromkeys((low, middle_length(sequence), high)))
