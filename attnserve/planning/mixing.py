"""Dense or sparse mixing: which form of collaborative heads costs less, and never more than before.

Counted are multiply-accumulates a token, at S tokens, of q, k, mixing, content and scores:

    original  H K (D + E)            + S H K
    dense     R (D + E) + H (E + R)  + S H R
    sparse    R (D + E) + H (E + K') + S H K'

Dense scores cost R / K times the original's, so from some length on the paper's form is slower.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from attnserve.choices import Mixing
from graph_passes.emit.collaborative import padded_size

__all__ = ["Mixing", "choose_head_size", "widest_head"]


@dataclass(frozen=True)
class _Macs:
    """MACs a token: ``fixed`` at any length, and ``by_token`` more for each token attended to."""

    fixed: int
    by_token: int

    def at(self, length: float) -> float:
        return self.fixed + length * self.by_token

    def never_above(self, other: _Macs, longest: float) -> bool:
        """At no length from 1 to ``longest`` (both are straight lines)."""
        if math.isinf(longest):
            return self.at(1) <= other.at(1) and self.by_token <= other.by_token
        return self.at(1) <= other.at(1) and self.at(longest) <= other.at(longest)


def widest_head(head_size: int) -> int:
    """The most dimensions that sparse heads can read while their scores cost no more than those of
    heads of size K, their content included; 0 where there is no room."""
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
    """How many dimensions a sparse head should read on average; None where dense mixing is better.

    Args:
        rank: R.
        heads: H, how many heads of the layer compute scores, each of ``head_size`` K.
        widths: D and E, of the tokens that queries and keys are made of.
        length: In tokens; where costs are compared.
        longest: The longest text that the model takes; None counts as any.

    Returns:
        None too where both forms are above the original somewhere: dense mixing is the paper's.
    """
    K, (D, E) = head_size, widths
    size = min(widest_head(K), rank)
    if rank >= heads * K or not size:
        return None
    end = math.inf if longest is None else float(longest)
    padded = padded_size(size + 1)
    wide = heads * padded if rank >= heads * size else rank  # nothing shared, nothing gathered
    original = _Macs(heads * K * (D + E), heads * K)
    dense = _Macs(rank * (D + E) + heads * (E + rank), heads * rank)
    sparse = _Macs(wide * (D + E) + heads * (E + padded), heads * padded)
    forms = [
        (form.at(length), chosen)
        for form, chosen in ((dense, None), (sparse, size))
        if form.never_above(original, end)
    ]
    return min(forms, key=lambda form: form[0])[1] if forms else None
