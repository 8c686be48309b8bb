"""Join short texts to rows of the lengths of the target workloads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from attnserve.data.lengths import length_bounds
from attnserve.models.tokenizer import Encoding, TextEncoder
from attnserve.options import Lengths

__all__ = ["JOINED", "TextJoiner"]

JOINED = 4
"""Texts are joined for lengths that are at least this many times their median length. A model
that is calibrated on sentences alone loses much more quality on paragraphs than on sentences."""


@dataclass(frozen=True, eq=False)
class TextJoiner:
    """Makes rows of several texts each, with lengths spread evenly by their logarithm over a range.

    Attributes:
        lengths: The number of tokens of each text.
        sequence: The length, or range of lengths, of the target workloads.
    """

    encoder: TextEncoder
    texts: Sequence[str]
    lengths: Sequence[int]
    sequence: Lengths

    @property
    def bounds(self) -> tuple[float, int]:
        """The shortest and the longest row in tokens."""
        twice = 2 * float(np.median(self.lengths))
        shortest, longest = length_bounds(self.sequence)
        shortest = twice if isinstance(self.sequence, int) else max(twice, shortest)
        return shortest, min(longest, self.encoder.max_length or longest)

    @property
    def is_needed(self) -> bool:
        """Whether the texts are much shorter than the longest row."""
        return self.bounds[1] >= JOINED * float(np.median(self.lengths))

    def rows(self, indices: Sequence[int]) -> list[Encoding]:
        """Rows of these texts, each of which is part of at most one row.

        A text that is long enough alone is left out, because its row exists already.
        """
        random = np.random.default_rng(len(indices))
        shortest, longest = self.bounds
        special = self.encoder.special_tokens  # each row has special tokens once
        groups: list[list[str]] = []
        remaining_tokens = 0.0
        for index in map(int, random.permutation(np.asarray(indices, int))):
            if remaining_tokens <= 0:
                groups.append([])
                remaining_tokens = shortest * (longest / shortest) ** random.random() - special
            groups[-1].append(self.texts[index])
            remaining_tokens -= self.lengths[index] - special
        joined_texts = [" ".join(group) for group in groups if len(group) > 1]
        return self.encoder.encode(joined_texts, max_length=longest) if joined_texts else []
