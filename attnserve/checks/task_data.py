"""Files of the tasks: queries with documents and judgments, and labeled words."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from attnserve.data.text_files import read_number, read_table, read_text
from attnserve.models.artifact import Artifact
from graph_passes.errors import InvalidData, InvalidModel

__all__ = [
    "Sentence",
    "label_names",
    "read_judgments",
    "read_label",
    "read_texts",
    "read_words",
    "require_relevant",
]


def read_label(path: Path, line: int, text: str, names: Mapping[str, int]) -> int:
    """The number of the class that a field of a table contains, by its name or as an integer.

    Args:
        path, line: The place of the field, for messages.
        names: The numbers of the classes by name.

    Raises:
        InvalidData: The text is neither a name nor an integer from 0.
    """
    if text in names:
        return names[text]
    if text.isascii() and text.isdigit():
        return int(text)
    examples = ", ".join(sorted(names, key=lambda name: names[name])[:8]) or "none"
    raise InvalidData(
        f"{path}, line {line}: label {text!r}: expected an integer from 0, or a name of the"
        f" model's config.json ({examples})",
        "correct the row, or put the model's config.json into its folder",
        code="evaluate.unknown_label",
    )


def label_names(artifact: Artifact) -> dict[str, int]:
    """The numbers of the classes by name; empty if there are no valid names."""
    with suppress(InvalidModel):  # integers need no names
        return {name: index for index, name in artifact.labels.items()}
    return {}


def read_texts(folder: Path, *names: str) -> dict[str, str]:
    """The texts of a folder by id, from the first of these files that exists.

    A .tsv file has the columns id and text. A .jsonl file (BEIR) has an object per line with _id,
    text and optionally title, which is put before the text.

    Raises:
        InvalidData: None of the files exists, a line is malformed, or an id is repeated.
    """
    path = _first_file(folder, *names)
    rows: list[tuple[int, tuple[str, ...]]] = []
    if path.suffix == ".tsv":
        rows = read_table(path, ("id", "_id"), ("text",))
    else:
        for line, text in enumerate(read_text(path).split("\n"), start=1):
            if text.strip():
                rows.append((line, _beir_row(path, line, text)))
    texts: dict[str, str] = {}
    for line, (key, text) in rows:
        if key in texts:
            raise InvalidData(
                f"{path}, line {line}: the id {key!r} is repeated",
                "give each text its own id",
                code="evaluate.repeated_id",
            )
        texts[key] = text
    if not texts:
        raise InvalidData(f"{path}: no texts", "add one per line", code="evaluate.no_rows")
    return texts


def _first_file(folder: Path, *names: str) -> Path:
    """The first of the files of a folder that exists.

    Raises:
        InvalidData: None of them exists.
    """
    path = next((file for name in names if (file := folder / name).is_file()), None)
    if path is None:
        raise InvalidData(
            f"{folder}: expected a folder with {' or '.join(names)}",
            "see the formats in the documentation of evaluate",
            code="evaluate.no_file",
        )
    return path


def _beir_row(path: Path, line: int, text: str) -> tuple[str, str]:
    try:
        row: Any = json.loads(text)
        key = row["_id"]
        body = row["text"]
        title = row.get("title") or ""
        if not all(isinstance(value, str) for value in (key, body, title)):
            raise TypeError
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InvalidData(
            f"{path}, line {line}: expected an object with the texts _id and text",
            "correct the line",
            code="evaluate.json_line",
        ) from error
    return key, f"{title} {body}".strip()


def read_judgments(
    folder: Path, queries: Mapping[str, str], documents: Mapping[str, str]
) -> dict[str, dict[str, float]]:
    """The relevance of documents by query, from qrels.tsv or qrels/test.tsv (BEIR).

    Queries without a relevant document are left out.

    Raises:
        InvalidData: The file is missing or malformed, or names an unknown query or document.
    """
    path = _first_file(folder, "qrels.tsv", "qrels/test.tsv")
    columns = ("query", "query-id"), ("document", "corpus-id"), ("relevance", "score")
    judgments: dict[str, dict[str, float]] = {}
    for line, (query, document, relevance) in read_table(path, *columns):
        for kind, key, texts in (("query", query, queries), ("document", document, documents)):
            if key not in texts:
                raise InvalidData(
                    f"{path}, line {line}: unknown {kind} {key!r}",
                    "add it to the file of the texts, or remove the line",
                    code="evaluate.unknown_id",
                )
        value = read_number(path, line, relevance, "relevance")
        judgments.setdefault(query, {})[document] = value
    judged = {query: grades for query, grades in judgments.items() if max(grades.values()) > 0}
    require_relevant(path, judged)
    return judged


def require_relevant(path: Path, judged: Mapping[str, object]) -> None:
    """Check that a query of a file has a relevant document.

    Raises:
        InvalidData: There is no such query.
    """
    if not judged:
        raise InvalidData(
            f"{path}: no document has a relevance above 0",
            "add relevant documents",
            code="evaluate.no_relevant",
        )


class Sentence(NamedTuple):
    """A sentence of a CoNLL file, with one label for each word; ``line`` is its first line."""

    line: int
    words: list[str]
    labels: list[str]


def read_words(path: Path) -> list[Sentence]:
    """The sentences of a CoNLL file.

    A line has a word and, as its last column, the label, separated by tabs or spaces. An empty line
    ends a sentence; lines of -DOCSTART- are skipped.

    Raises:
        InvalidData: The file cannot be read, has no words, or a line has no label.
    """
    sentences: list[Sentence] = []
    is_new = True
    for line, text in enumerate(read_text(path).split("\n"), start=1):
        fields = text.split()
        if not fields or fields[0] == "-DOCSTART-":
            is_new = True
            continue
        if len(fields) < 2:
            raise InvalidData(
                f"{path}, line {line}: expected a word and its label, found {text.strip()[:40]!r}",
                "write both, separated by a tab",
                code="evaluate.no_label",
            )
        if is_new:
            sentences.append(Sentence(line, [], []))
            is_new = False
        sentences[-1].words.append(fields[0])
        sentences[-1].labels.append(fields[-1])
    if not sentences:
        raise InvalidData(
            f"{path}: no words", "write a word and its label per line", code="evaluate.no_rows"
        )
    return sentences
