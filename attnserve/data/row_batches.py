"""Batches of rows, with the file, the role and the lists of the rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from attnserve.data.query_lists import Lists
from attnserve.literals import Role
from attnserve.models.masks import token_mask
from attnserve.runtime.interface import Batch

if TYPE_CHECKING:
    from jaxtyping import Int

__all__ = ["RowBatch", "RowInfo", "row_info", "thinned"]

PATCHES = 64
"""The assumed number of tokens of an image."""


@dataclass(frozen=True, eq=False, slots=True)
class RowInfo:
    """The file, the role and the lists of the B rows of a batch.

    Attributes:
        file: The name of the file of the rows; empty if unknown.
        role: The role of all rows; None without roles.
        lists: The lists of documents that the rows belong to; None if they are not lists.
    """

    file: str = ""
    role: Role | None = None
    lists: Lists | None = None

    def of_rows(self, rows: Int[np.ndarray, " N"]) -> RowInfo:
        """The information of some rows, by their indices."""
        if self.lists is None:
            return self
        return replace(self, lists=Lists(*(column[rows] for column in self.lists)))


class RowBatch(dict[str, np.ndarray]):
    """Model inputs by name, with the ``RowInfo`` of their rows."""

    def __init__(self, inputs: Mapping[str, np.ndarray], info: RowInfo) -> None:
        super().__init__(inputs)
        self.info = info


def row_info(batch: Batch) -> RowInfo:
    """The information of the rows of a batch; empty if it is not a ``RowBatch``."""
    return batch.info if isinstance(batch, RowBatch) else RowInfo()


def thinned(batches: Sequence[Batch], tokens: int) -> list[Batch]:
    """Evenly spaced batches with about ``tokens`` tokens, at least one; all if they have fewer."""
    counts = [_token_count(batch) for batch in batches]
    wanted = max(round(len(batches) * tokens / max(sum(counts), 1)), 1)
    if wanted >= len(batches):
        return list(batches)
    places = (np.arange(wanted) + 0.5) * len(batches) / wanted
    return [batches[int(place)] for place in places]


def _token_count(batch: Batch) -> int:
    """The number of real tokens; rows that are not sequences of ids count as an image's patches."""
    ids = next((x for x in batch.values() if x.ndim == 2 and x.dtype.kind in "iu"), None)
    if ids is not None:
        return int(token_mask(batch, ids.shape).sum())
    return PATCHES * max((len(x) for x in batch.values() if x.ndim), default=1)
