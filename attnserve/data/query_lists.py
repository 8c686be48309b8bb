"""Lists of the documents of a query, which a reranker orders."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from attnserve.data.text_files import QueryDocument, has_pairs, read_pairs
from attnserve.models.tokenizer import Encoding, Text, TextEncoder

if TYPE_CHECKING:
    from jaxtyping import Float, Int

__all__ = [
    "MIN_LISTED",
    "ListedRow",
    "Lists",
    "encode_listed",
    "lists_of_rows",
    "read_listed",
    "together",
]

MIN_LISTED = 2
"""Minimum mean number of documents per query to measure their order."""


class Lists(NamedTuple):
    """The query number and the relevance (NaN if unknown) of each row of a batch."""

    query: Int[np.ndarray, " B"]
    relevance: Float[np.ndarray, " B"]


@dataclass(frozen=True, slots=True)
class ListedRow(Encoding):
    """The tokens of a query and a document, the number of the query, and the relevance."""

    query: int = 0
    relevance: float = math.nan


def read_listed(path: Path, read: Callable[[Path], list[str]]) -> list[QueryDocument | str]:
    """The rows of a file for a reranker: queries with documents, and single texts.

    A table has columns with names (``read_pairs``). Other files are read by ``read``: a line has a
    query, a tab and a document; a line without a tab is a single text.
    """
    if has_pairs(path):
        return [*read_pairs(path, labeled=False)]
    rows = (line.partition("\t") for line in read(path))
    return [QueryDocument(first, second) if tab else first for first, tab, second in rows]


def encode_listed(
    encoder: TextEncoder, rows: Sequence[QueryDocument | str], least: int
) -> Sequence[Encoding]:
    """The tokens of rows, as ``ListedRow`` if the rows are lists.

    Rows are lists if they have ``least`` queries, with ``MIN_LISTED`` documents in the mean.
    """
    pairs = [row if isinstance(row, QueryDocument) else None for row in rows]
    texts: list[Text] = [row if isinstance(row, str) else row[:2] for row in rows]
    encodings = encoder.encode(texts)
    queries = dict.fromkeys(pair.query for pair in pairs if pair is not None)
    if len(queries) < least or len(rows) < MIN_LISTED * len(queries) or not queries:
        return encodings
    numbers = {query: number for number, query in enumerate(queries)}
    return [
        ListedRow(encoding.ids, encoding.type_ids, len(rows) + index)  # a separate list
        if pair is None
        else ListedRow(encoding.ids, encoding.type_ids, numbers[pair.query], pair.relevance)
        for index, (encoding, pair) in enumerate(zip(encodings, pairs, strict=True))
    ]


def lists_of_rows(rows: Sequence[Encoding]) -> Lists | None:
    """The lists of the rows of a batch; None for rows without lists."""
    listed = [row for row in rows if isinstance(row, ListedRow)]
    if len(listed) < len(rows):
        return None
    return Lists(
        np.array([row.query for row in listed]), np.array([row.relevance for row in listed])
    )


def together(rows: Sequence[Any], indices: Sequence[int]) -> list[list[int]]:
    """Group indices so that no split divides a group: the rows of a list, or single rows."""
    groups: dict[Hashable, list[int]] = {}
    for index in indices:
        row = rows[index]
        key = ("list", row.query) if isinstance(row, ListedRow) else index
        groups.setdefault(key, []).append(index)
    return list(groups.values())
