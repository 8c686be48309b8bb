"""Sequence lengths at which a model should be fast: one length, or a range."""

from __future__ import annotations

from graph_passes.errors import InvalidArgument

__all__ = ["Lengths", "check_lengths", "length_bounds", "middle_length", "spread_lengths"]

Lengths = int | tuple[int, int]
"""A number of tokens, or the shortest and the longest one."""


def check_lengths(sequence: Lengths | None) -> None:
    """Check the parameter ``sequence``.

    Raises:
        InvalidArgument: A length is less than 1, or the range is reversed.
    """
    if sequence is None:
        return
    low, high = length_bounds(sequence)
    if not 1 <= low <= high:
        given = sequence if isinstance(sequence, int) else f"{low}-{high}"
        raise InvalidArgument(
            f"`sequence` is {given}: expected a length of at least 1, or a range from the shortest "
            "to the longest length",
            "for example 128, or a range from 16 to 512",
            code="sequence.range",
        )


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
