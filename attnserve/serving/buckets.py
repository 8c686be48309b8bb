"""Select the shapes (buckets) to capture as CUDA graphs.

A captured graph has a fixed shape and keeps its memory until its session is closed. Therefore
shapes are rounded up to a few buckets, a bucket is captured at its second request, and the number
of buckets is limited. Other shapes run without a graph.
"""

from __future__ import annotations

from collections import Counter

__all__ = ["LARGEST", "Bucket", "Buckets", "round_up"]

Bucket = tuple[int, int]
"""(rows, tokens per row)."""

LARGEST = 4096
"""Maximum padded tokens of a bucket: in longer runs, launch overhead is negligible."""

WASTE = 2
"""Maximum ratio of padded to actual size at which a larger captured bucket is used."""

MIN_REQUESTS = 2
"""Number of requests for a bucket after which it is captured."""


def round_up(size: int) -> int:
    """Round up to the next of 1, 2, 3, 4, 6, 8, 12, 16, 24, ... (less than 1.5 times ``size``)."""
    power = 1 << max(size - 1, 0).bit_length()
    return 3 * power // 4 if power >= 4 and size <= 3 * power // 4 else power


class Buckets:
    """The buckets of one session.

    Args:
        most: Maximum number of captured buckets.
        largest: Maximum number of padded tokens of a bucket.
        longest: Maximum sequence length of the model; None if unknown.
    """

    def __init__(self, most: int, *, largest: int = LARGEST, longest: int | None = None) -> None:
        self.most, self.largest, self.longest = most, largest, longest
        self.captured: dict[Bucket, int] = {}
        """The graph number of each captured bucket, from 1."""
        self.refused: set[Bucket] = set()
        """Buckets that the model cannot run."""
        self._requests: Counter[Bucket] = Counter()

    def choose(
        self, batch: int, length: int, *, more_rows: bool = True, longer: bool = True
    ) -> Bucket | None:
        """Choose the bucket to which a run is padded; None to run without a graph.

        Args:
            batch, length: The shape of the run, each at least 1.
            more_rows, longer: Whether rows and tokens may be padded.
        """
        bucket = (
            round_up(batch) if more_rows else batch,
            self._longer(length) if longer else length,
        )
        if bucket in self.captured:
            return bucket
        can_capture = len(self.captured) < self.most and bucket not in self.refused
        if can_capture and bucket[0] * bucket[1] <= self.largest:
            self._requests[bucket] += 1
            if self._requests[bucket] >= MIN_REQUESTS:
                self.captured[bucket] = len(self.captured) + 1
                return bucket
        larger = [
            (rows * tokens, (rows, tokens))
            for rows, tokens in self.captured
            if rows * tokens <= WASTE * batch * length
            and (rows >= batch if more_rows else rows == batch)
            and (tokens >= length if longer else tokens == length)
        ]
        return min(larger)[1] if larger else None

    def refuse(self, bucket: Bucket) -> None:
        """Exclude the bucket that was chosen last, because the model cannot run it.

        The graph number of the bucket is used again.
        """
        number = self.captured.pop(bucket)
        assert number == len(self.captured) + 1, f"{bucket} is not the last one"
        self.refused.add(bucket)

    def _longer(self, length: int) -> int:
        rounded = round_up(length)
        # The position table may be shorter than the bucket.
        return rounded if self.longest is None else max(length, min(rounded, self.longest))
