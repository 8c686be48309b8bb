"""Choose dense or sparse mixing of collaborative heads by their cost.

MACs per token at S tokens, of q, k, mixing, content and scores:

    original  H K (D + E)            + S H K
    dense     R (D + E) + H (E + R)  + S H R
    sparse    R (D + E) + H (E + K') + S H K'

Dense scores cost R / K times the original's, so that dense mixing is slower from some length on.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from attnserve.choices import Mixing
from graph_passes.emit.collaborative import padded_size

__all__ = ["Mixing", "choose_head_size", "widest_head"]


@dataclass(frozen=True)
class _Macs:
    """MACs per token: ``fixed``, plus ``by_token`` for each token that is attended to."""

    fixed: int
    by_token: int

    def at(self, length: float) -> float:
        return self.fixed + length * self.by_token

    def never_above(self, other: _Macs, longest: float) -> bool:
        """Whether it is at most the other at every length from 1 to ``longest``."""
        if math.isinf(longest):
            return self.at(1) <= other.at(1) and self.by_token <= other.by_token
        return self.at(1) <= other.at(1) and self.at(longest) <= other.at(longest)


def widest_head(head_size: int) -> int:
    """The most dimensions that sparse heads can read at the cost of heads of size K.

    The content term takes one more dimension. 0 if there is no room.
    """
    return max((k for k in range(head_size) if padded_size(k + 1) <= head_size), default=0)


def choose_head_size(
    rank: int,
    *,
    heads: int,
    head_size: int,
    widths: tuple[int, int],
    length: int,
    longest: int | None,
) -> int | None:
    """The mean number of dimensions that a sparse head should read; None if dense mixing is better.

    Args:
        rank: R.
        heads: H, the number of heads that compute scores, each of ``head_size`` K.
        widths: D and E, the widths of the inputs of queries and keys.
        length: The number of tokens at which costs are compared.
        longest: The most tokens that the model accepts; None means any number.

    Returns:
        Also None if both forms cost more than the original at some length.
    """
    K, (D, E) = head_size, widths
    size = min(widest_head(K), rank)
    if rank >= heads * K or not size:
        return None
    end = math.inf if longest is None else float(longest)
    padded = padded_size(size + 1)
    wide = heads * padded if rank >= heads * size else rank  # nothing is shared or gathered
    original = _Macs(heads * K * (D + E), heads * K)
    dense = _Macs(rank * (D + E) + heads * (E + rank), heads * rank)
    sparse = _Macs(wide * (D + E) + heads * (E + padded), heads * padded)
    forms = [
        (form.at(length), chosen)
        for form, chosen in ((dense, None), (sparse, size))
        if form.never_above(original, end)
    ]
    return min(forms, key=lambda form: form[0])[1] if forms else None
