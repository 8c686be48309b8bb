"""Split the distinct rows of files into a part to fit and held-out parts.

The held-out parts are the rows to choose, and two parts of rows to verify.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

import numpy as np

from attnserve.data.file_rows import FileRows
from attnserve.data.query_lists import together
from attnserve.literals import Role
from attnserve.models.rows import row_content
from attnserve.models.tokenizer import Encoding
from attnserve.runtime.interface import Batch
from graph_passes.errors import InvalidData

__all__ = [
    "INVERSE_HELD_OUT_SHARE",
    "LEAST_SEARCHED",
    "FileParts",
    "weighted",
    "without_held_out",
]

INVERSE_HELD_OUT_SHARE = 7
"""Inverse share of the distinct rows in each held-out part."""

MOST_HELD_OUT = 400
"""Maximum number of rows of a held-out part."""

HELD_OUT_PARTS = 3
"""Number of held-out parts: to choose, to verify, and to verify again if the first verification
fails."""

LEAST_SEARCHED = 2 * INVERSE_HELD_OUT_SHARE
"""Minimum number of distinct rows of a file for a search: two in each held-out part, because
qualities are relative to the variation between rows."""


@dataclass(frozen=True, eq=False)
class FileParts:
    """The parts of the rows of a file, as indices.

    Attributes:
        distinct: The rows that are in a part.
        parts: The rows to fit, to choose, to verify, and to verify again; or one part of all rows.
    """

    file: FileRows
    distinct: Sequence[int]
    parts: Sequence[Sequence[int]]

    @staticmethod
    def whole(file: FileRows) -> FileParts:
        """All rows in one part."""
        everything = range(len(file.rows))
        return FileParts(file, everything, [everything])

    @staticmethod
    def of(file: FileRows) -> FileParts:
        """The distinct rows in parts, each of which has rows of both roles."""
        distinct = _distinct(file)
        roles: Sequence[Role | None] = get_args(Role) if file.roles else (None,)
        strata = [
            _split_groups(together(file.rows, file.of_role(distinct, role)), file.lengths)
            for role in roles
        ]
        parts = [[i for part in parts for i in part] for parts in zip(*strata, strict=True)]
        return FileParts(file, distinct, parts)


def without_held_out(splits: Sequence[FileParts]) -> list[FileParts]:
    """The splits without rows that another file has in a later part (to choose or to verify)."""
    contents = [
        [[(index, _content(split.file.rows[index])) for index in part] for part in split.parts]
        for split in splits
    ]
    reduced: list[FileParts] = []
    for split, own in zip(splits, contents, strict=True):
        others = [parts for parts in contents if parts is not own]
        parts: list[list[int]] = []
        for level, part in enumerate(own):
            later = {c for parts in others for rows in parts[level + 1 :] for _, c in rows}
            parts.append([index for index, content in part if content not in later])
        reduced.append(replace(split, parts=parts))
    return reduced


def weighted(splits: Sequence[FileParts], weights: Sequence[float]) -> list[FileParts]:
    """As many rows to fit as possible, in the shares of the weights and of all lengths.

    Raises:
        InvalidData: A file has no row to fit.
    """
    for split in splits:
        if not split.parts[0]:
            raise InvalidData(
                f"{split.file.path.name}: the other files have all its rows to fit among those held"
                " out",
                "leave the file out, or give it rows of its own",
                code="data.no_fit",
            )
    least = min(len(split.parts[0]) / weight for split, weight in zip(splits, weights, strict=True))
    return [
        _with_fit(split, round(weight * least))
        for split, weight in zip(splits, weights, strict=True)
    ]


def _with_fit(split: FileParts, count: int) -> FileParts:
    """A split with about ``count`` rows to fit, of all lengths."""
    fit, *held_out = split.parts
    random = np.random.default_rng(len(fit))
    lengths = [split.file.lengths[i] for i in fit]
    strata = _strata(lengths, min(max(count, 1), len(fit)), random)
    return replace(
        split, parts=[sorted(fit[random.choice(stratum)] for stratum in strata), *held_out]
    )


def _distinct(file: FileRows) -> list[int]:
    """The index of the first of equal rows of one role, as the model sees them."""
    first: dict[tuple[bytes, Role | None], int] = {}
    for index, row in enumerate(file.rows):
        first.setdefault((_content(row), file.roles[index] if file.roles else None), index)
    return list(first.values())


def _content(row: Encoding | Batch) -> bytes:
    """A checksum of a row as the model sees it."""
    if isinstance(row, Encoding):
        content = np.asarray([row.ids, row.type_ids]).tobytes()
    else:
        content = row_content(row)
    return hashlib.sha256(content).digest()


def _split_groups(groups: Sequence[Sequence[int]], lengths: Sequence[int]) -> list[list[int]]:
    """The rows of each part; the rows of a group are in one part (``_split``)."""
    mean_lengths = [sum(lengths[i] for i in group) // len(group) for group in groups]
    return [[i for number in part for i in groups[number]] for part in _split(mean_lengths)]


def _split(lengths: Sequence[int]) -> list[list[int]]:
    """Indices of the rows, or lists, of the part to fit and of each held-out part, by length.

    Rows are sorted by length and cut into strata; each held-out part has one random row of each
    stratum, so that all parts have similar lengths and come from the whole file.
    """
    rows = len(lengths)
    if rows < HELD_OUT_PARTS + 1:
        last = [rows - 1]
        return [list(range(max(rows - 1, 1))), last, last, []]
    random = np.random.default_rng(rows)
    count = min(max(rows // INVERSE_HELD_OUT_SHARE, 1), MOST_HELD_OUT)
    held: list[list[int]] = [[] for _ in range(HELD_OUT_PARTS)]
    for stratum in _strata(lengths, count, random):
        for part, index in zip(held, random.permutation(stratum), strict=False):
            part.append(int(index))
    taken = {index for part in held for index in part}
    return [[index for index in range(rows) if index not in taken], *map(sorted, held)]


def _strata(
    lengths: Sequence[int], count: int, random: np.random.Generator
) -> list[np.ndarray[Any, Any]]:
    """Indices in groups of similar length; indices of equal length are in random order."""
    order = np.lexsort((random.permutation(len(lengths)), np.asarray(lengths)))
    return np.array_split(order, count)
