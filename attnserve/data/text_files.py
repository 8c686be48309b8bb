"""Text files: lines, and the columns of tables."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, cast, get_args

from attnserve.literals import Role
from graph_passes.errors import InvalidData

__all__ = [
    "QueryDocument",
    "check_roles",
    "has_pairs",
    "read_number",
    "read_pairs",
    "read_roles",
    "read_sentences",
    "read_table",
    "read_text",
]

TEXT_COLUMNS = ("text", "sentence", "sentence1", "sentence2")
"""Text columns in the tables of ``evaluate``."""

ROLE = "role"
"""The column of a table that splits its texts into queries and documents."""

QUERY, DOCUMENT = ("query",), ("document", "passage", "text")
RELEVANCE = ("relevance", "label", "score")
"""Columns of queries and documents in the tables of ``evaluate``."""


class QueryDocument(NamedTuple):
    """A query and a document, and its relevance; NaN if it is not known."""

    query: str
    document: str
    relevance: float = math.nan


def read_text(path: Path) -> str:
    """Read a UTF-8 file; a byte order mark is removed and line ends become ``\\n``.

    Raises:
        InvalidData: The file cannot be read, or is not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise InvalidData(
            f"{path}: cannot be read: {error.strerror}", "check the path", code="text.unreadable"
        ) from error
    except UnicodeDecodeError as error:
        raise InvalidData(
            f"{path}: not UTF-8 text (byte {error.start})",
            "convert it to UTF-8",
            code="text.not_utf8",
        ) from error


def read_sentences(path: Path) -> list[str]:
    """Read the stripped, non-blank lines of a text file, or the texts of a table.

    A table is a .tsv file whose first line names one of ``TEXT_COLUMNS``.

    Raises:
        InvalidData: The file has no text, cannot be read as UTF-8, or is a malformed table.
    """
    header = _header(path)
    if columns := [(name,) for name in TEXT_COLUMNS if name in header]:
        return [text for _, texts in read_table(path, *columns) for text in texts]
    sentences = [line.strip() for line in _lines(path) if line.strip()]
    if not sentences:
        raise InvalidData(
            f"{path}: the file has no text", "write one sentence per line", code="text.empty_file"
        )
    return sentences


def read_roles(path: Path) -> list[Role]:
    """The role of each text of ``read_sentences``; empty without a column ``role``.

    Raises:
        InvalidData: The table is malformed, or ``check_roles`` refuses its roles.
    """
    header = _header(path)
    texts = sum(name in header for name in TEXT_COLUMNS)
    if not texts or ROLE not in header:
        return []
    rows = read_table(path, (ROLE,))
    lines = [f"line {line}" for line, _ in rows]
    roles = check_roles(path, [role for _, (role,) in rows], lines)
    return [role for role in roles for _ in range(texts)]


def check_roles(path: Path, roles: Sequence[str], places: Sequence[str]) -> list[Role]:
    """Check the roles of the rows of a file.

    Args:
        places: The place of each row, for messages.

    Raises:
        InvalidData: A role is unknown, no row is a query, or less than two are documents.
    """
    for role, place in zip(roles, places, strict=True):
        if role not in get_args(Role):
            raise InvalidData(
                f"{path}, {place}: role {role[:40]!r}: expected {' or '.join(get_args(Role))}",
                "correct the row",
                code="data.role",
            )
    queries, documents = (roles.count(role) for role in get_args(Role))
    if not queries or documents < 2:
        raise InvalidData(
            f"{path}: {queries} rows have the role query, and {documents} the role document: "
            "expected at least one query and two documents",
            "add rows, or remove the roles",
            code="data.role_count",
        )
    return cast("list[Role]", list(roles))


def read_table(path: Path, *columns: tuple[str, ...]) -> list[tuple[int, tuple[str, ...]]]:
    """Read (line number from 1, requested columns) of each row of a tab-separated file.

    Each of ``columns`` lists the possible names of a column, in order of preference.

    Raises:
        InvalidData: A column or a field is missing or empty, or there is no row.
    """
    lines = _lines(path)
    header = _names(lines[0])
    places: list[int] = []
    for names in columns:
        column = next((name for name in names if name in header), None)
        if column is None:
            raise InvalidData(
                f"{path}, line 1: no column {' or '.join(names)} in {header[:8]}",
                f"begin with a line of tab-separated names: {', '.join(c[0] for c in columns)}",
                code="evaluate.no_column",
            )
        places.append(header.index(column))
    rows: list[tuple[int, tuple[str, ...]]] = []
    for number, line in enumerate(lines[1:], start=2):
        if not line.strip():
            continue
        fields = line.split("\t")
        if len(fields) != len(header):
            raise InvalidData(
                f"{path}, line {number}: {len(fields)} tab-separated fields, the header has"
                f" {len(header)}",
                "write the columns of the header in each row, and no tab in a text",
                code="evaluate.field_count",
            )
        row = tuple(fields[place].strip() for place in places)
        if not all(row):
            name = columns[row.index("")][0]
            raise InvalidData(
                f"{path}, line {number}: {name} is empty",
                "fill or remove the row",
                code="evaluate.empty_field",
            )
        rows.append((number, row))
    if not rows:
        raise InvalidData(
            f"{path}: no rows after the header line",
            "add one row per line",
            code="evaluate.no_rows",
        )
    return rows


def has_pairs(path: Path) -> bool:
    """Whether a file is a .tsv whose first line names columns of queries and documents."""
    header = _header(path)
    return all(any(name in header for name in names) for names in (QUERY, DOCUMENT))


def read_pairs(path: Path, *, labeled: bool = True) -> list[QueryDocument]:
    """Read the queries and documents of a table.

    Args:
        labeled: Require the relevance of the documents.

    Raises:
        InvalidData: A relevance is not a finite number; otherwise see ``read_table``.
    """
    columns = (QUERY, DOCUMENT)
    if labeled or any(name in RELEVANCE for name in _header(path)):
        rows = read_table(path, *columns, RELEVANCE)
        return [
            QueryDocument(query, document, read_number(path, line, relevance, "relevance"))
            for line, (query, document, relevance) in rows
        ]
    return [QueryDocument(query, text) for _, (query, text) in read_table(path, *columns)]


def read_number(path: Path, line: int, text: str, name: str = "score") -> float:
    """The finite number that a field of a table contains.

    Args:
        path, line, name: Place and name of the field, for messages.

    Raises:
        InvalidData: The text is not a finite number.
    """
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise InvalidData(
            f"{path}, line {line}: {name} {text!r} is not a finite number",
            "correct the row",
            code="evaluate.score_not_number",
        )
    return value


def _lines(path: Path) -> list[str]:
    # str.splitlines also splits at U+2028 and form feeds, which may be part of a sentence.
    return read_text(path).split("\n")


def _names(line: str) -> list[str]:
    """The names of the columns of a table, in lower case."""
    return [name.strip().lower() for name in line.split("\t")]


def _header(path: Path) -> list[str]:
    """The names of the columns of a .tsv file; empty for other files."""
    return _names(_lines(path)[0]) if path.suffix.lower() == ".tsv" else []
