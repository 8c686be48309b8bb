"""Which runs are captured as a CUDA graph, and at which shape.

A captured graph has one shape, and it keeps its memory until its session is closed: ONNX Runtime
has no way to drop one. So shapes are padded up to few buckets, a bucket is captured only once it
was asked for again, and there are never more than so many; what fits none of them runs as it is.
"""

from __future__ import annotations

from collections import Counter

__all__ = ["LARGEST", "Bucket", "Buckets", "round_up"]

Bucket = tuple[int, int]
"""Rows and tokens a row."""

LARGEST = 4096
"""Padded tokens from which a run is long enough to hide how it is started."""

WASTE = 2
"""A captured bucket may be this many times what is asked of it, where there is no closer one."""

AGAIN = 2
"""A bucket is captured the second time that it is asked for: the first may be the only one."""


def round_up(size: int) -> int:
    """The next of 1, 2, 3, 4, 6, 8, 12, 16, 24, ...: less than half as much again."""
    power = 1 << max(size - 1, 0).bit_length()
    return 3 * power // 4 if power >= 4 and size <= 3 * power // 4 else power


class Buckets:
    """The buckets of one session, as its runs come.

    Args:
        most: How many are captured at most.
        largest: The padded tokens of the largest.
        longest: The most tokens a row that the model takes; None where it is not known.
    """

    def __init__(self, most: int, *, largest: int = LARGEST, longest: int | None = None) -> None:
        self.most, self.largest, self.longest = most, largest, longest
        self.captured: dict[Bucket, int] = {}
        """The number of each captured bucket, from 1."""
        self.refused: set[Bucket] = set()
        """What the model does not run at."""
        self._asked: Counter[Bucket] = Counter()

    def choose(
        self, batch: int, length: int, *, more_rows: bool = True, longer: bool = True
    ) -> Bucket | None:
        """The bucket that a run is padded to; None where it runs as it is.

        Args:
            batch, length: Of what is to run, each at least 1.
            more_rows, longer: Whether the model lets itself be padded with rows, or with tokens.
        """
        bucket = (
            round_up(batch) if more_rows else batch,
            self._longer(length) if longer else length,
        )
        if bucket in self.captured:
            return bucket
        room = len(self.captured) < self.most and bucket not in self.refused
        if room and bucket[0] * bucket[1] <= self.largest:
            self._asked[bucket] += 1  # of at most ``largest`` tokens: there are not many
            if self._asked[bucket] >= AGAIN:
                self.captured[bucket] = len(self.captured) + 1
                return bucket
        held = [
            (rows * tokens, (rows, tokens))
            for rows, tokens in self.captured
            if rows * tokens <= WASTE * batch * length
            and (rows >= batch if more_rows else rows == batch)
            and (tokens >= length if longer else tokens == length)
        ]
        return min(held)[1] if held else None

    def refuse(self, bucket: Bucket) -> None:
        """The bucket that was chosen last cannot run: it is not chosen again, and its number is."""
        number = self.captured.pop(bucket)
        assert number == len(self.captured) + 1, f"{bucket} is not the last one"
        self.refused.add(bucket)

    def _longer(self, length: int) -> int:
        rounded = round_up(length)
        # A table of positions may end before the bucket does.
        return rounded if self.longest is None else max(length, min(rounded, self.longest))
