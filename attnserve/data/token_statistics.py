"""Token ids of calibration data, to detect traffic that differs from the calibration data."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from attnserve.data.datasets import Dataset
from attnserve.models.lineage import Calibration, LineageEntry, TokenIds
from attnserve.models.masks import token_mask
from attnserve.runtime.interface import Batch

if TYPE_CHECKING:
    from jaxtyping import Bool, Int

__all__ = [
    "CalibrationRange",
    "calibration_of",
    "row_ids",
    "seen_ids",
    "token_statistics",
    "unseen_share",
]

INPUT = "input_ids"

MOST_IDS = 1 << 24
"""Maximum number of ids, above any vocabulary size, to bound the memory that a file can request."""

MOST_UNSEEN = 0.25
"""A row is outside of the calibration data if its share of unseen tokens is larger than this value
and than twice the share of the held-out calibration rows."""


@dataclass(frozen=True, eq=False)
class CalibrationRange:
    """The range of the calibration data of an artifact.

    Attributes:
        longest: The number of tokens of the longest row; None if unknown.
        seen: Whether each id occurs; the last entry stands for all larger ids. None if unknown.
        most_unseen: The largest share of ids of a row that are not seen.
    """

    longest: int | None
    seen: Bool[np.ndarray, " V"] | None
    most_unseen: float = MOST_UNSEEN

    @classmethod
    def read(cls, lineage: Sequence[LineageEntry]) -> CalibrationRange | None:
        """The range in the last calibration of a lineage; None if it is missing or damaged."""
        records = [entry.calibration for entry in lineage if entry.calibration is not None]
        if not records or not records[-1].lengths:
            return None
        tokens = records[-1].token_ids
        try:
            seen = None if tokens is None else np.append(seen_ids(tokens), False)
        except (ValueError, zlib.error):
            return None
        share = 0.0 if tokens is None else tokens.unseen_share
        return cls(records[-1].lengths[-1], seen, max(MOST_UNSEEN, 2 * share))

    def reasons(self, ids: Sequence[int] | Int[np.ndarray, " T"]) -> tuple[str, ...]:
        """Reasons why a row is outside of the calibration data: "length", "tokens", both or none.

        The service calls this method for every row, so it must be fast: about 10 us for 16 ids.
        """
        is_long = self.longest is not None and len(ids) > self.longest
        is_new = False
        if self.seen is not None and len(ids):
            places = np.minimum(ids, len(self.seen) - 1)
            seen_count = int(np.count_nonzero(self.seen[places]))
            is_new = len(ids) - seen_count > self.most_unseen * len(ids)
        names = ("length",) if is_long else ()
        return (*names, "tokens") if is_new else names


def row_ids(batch: Mapping[str, np.ndarray]) -> Iterable[Int[np.ndarray, " T"]]:
    """The token ids of each row without padding; nothing if the batch holds no such ids."""
    ids = batch.get(INPUT)
    if ids is None or ids.ndim != 2:
        return ()
    return (row[real] for row, real in zip(ids, token_mask(batch, ids.shape), strict=True))


def token_statistics(data: Dataset) -> TokenIds | None:
    """Statistics of the token ids of a dataset, for the record of an artifact.

    Returns:
        None if the model has no integer input ``input_ids`` (B, S). The ids take about 5 kB for a
        vocabulary of 30,000.
    """
    fitted, held_out = (_token_ids(part) for part in (data.fit, data.held_out))
    if fitted is None or held_out is None:
        return None
    seen = np.zeros(fitted.max(initial=-1) + 1, bool)
    seen[fitted] = True
    packed = np.packbits(seen, bitorder="little").tobytes()
    return TokenIds(
        distinct=int(seen.sum()),
        unseen_share=unseen_share(held_out, seen),
        seen=base64.b64encode(zlib.compress(packed, 9)).decode("ascii"),
    )


def calibration_of(data: Dataset) -> Calibration:
    """The record of the calibration data of a model."""
    tokens = token_statistics(data)
    return data.source if tokens is None else data.source.model_copy(update={"token_ids": tokens})


def seen_ids(statistics: TokenIds) -> Bool[np.ndarray, " V"]:
    """Whether each id up to the largest one occurs in the rows to fit, from their statistics.

    Raises:
        ValueError, zlib.error: The statistics are damaged, or name ids above ``MOST_IDS``.
    """
    unpacker = zlib.decompressobj()
    packed = unpacker.decompress(base64.b64decode(statistics.seen), MOST_IDS // 8)
    if not unpacker.eof:
        raise ValueError("the ids are truncated, or more than any vocabulary has")
    return np.unpackbits(np.frombuffer(packed, np.uint8), bitorder="little").astype(bool)


def unseen_share(ids: Int[np.ndarray, " T"], seen: Bool[np.ndarray, " V"]) -> float:
    """The share of token ids that are not seen; 0 for an empty array."""
    known = seen[ids[ids < len(seen)]]
    return 1 - float(known.sum()) / len(ids) if len(ids) else 0.0


def _token_ids(batches: Sequence[Batch]) -> Int[np.ndarray, " T"] | None:
    """The ids of all tokens without padding; None if they are not found."""
    parts = [np.zeros(0, np.int64)]
    for batch in batches:
        ids = batch.get(INPUT)
        if ids is None or ids.ndim != 2 or ids.dtype.kind not in "iu":
            return None
        parts.append(ids[token_mask(batch, ids.shape)].astype(np.int64))
    return np.concatenate(parts)
