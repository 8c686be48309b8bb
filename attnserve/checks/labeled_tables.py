"""Labeled tables, which ``evaluate`` scores and ``recover`` learns, as the model reads them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from attnserve.checks.task_data import label_names, read_label
from attnserve.data.text_files import read_number, read_sentences, read_table
from attnserve.literals import LearnedTask
from attnserve.models.artifact import Artifact
from graph_passes.errors import InvalidArgument

__all__ = ["LabeledRow", "read_labeled", "read_labeled_table", "reader_of"]


@dataclass(frozen=True)
class LabeledRow:
    """A line of a table: its texts, one or two, and its label or score."""

    line: int
    texts: tuple[str, ...]
    label: float


def read_labeled_table(path: Path, task: LearnedTask, artifact: Artifact) -> list[LabeledRow]:
    """The rows of a labeled table, with the prompt that the service puts before texts.

    Raises:
        InvalidData: The table does not fit the task.
    """
    prompt = artifact.prompt()
    if task == "sts":
        return [
            LabeledRow(line, (prompt + first, prompt + second), read_number(path, line, score))
            for line, (score, first, second) in read_table(
                path, ("score",), ("sentence1",), ("sentence2",)
            )
        ]
    names = label_names(artifact)
    return [
        LabeledRow(line, (prompt + text,), read_label(path, line, label, names))
        for line, (label, text) in read_table(path, ("label",), ("text", "sentence"))
    ]


def read_labeled(
    files: Sequence[Path], task: LearnedTask, artifact: Artifact
) -> dict[Path, list[LabeledRow]]:
    """The labeled rows of the tables (.tsv) among the files, with the prompts of the model.

    Raises:
        InvalidArgument: No file is a table.
        InvalidData: A table does not fit the task.
    """
    tables = [path for path in files if path.suffix.lower() == ".tsv"]
    if not tables:
        raise InvalidArgument(
            f"`task` is {task}, and no file of `data` is a table (.tsv) with labels",
            "give one, with the columns that `attnserve evaluate` reads",
            code="recovery.no_table",
        )
    return {path: read_labeled_table(path, task, artifact) for path in tables}


def reader_of(tables: Mapping[Path, Sequence[LabeledRow]]) -> Callable[[Path], list[str]]:
    """A function for ``load_inputs`` that reads the texts of labeled rows, or of another file."""

    def read(path: Path) -> list[str]:
        if path not in tables:
            return read_sentences(path)
        return [text for row in tables[path] for text in row.texts]

    return read
