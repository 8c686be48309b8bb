"""Output of the commands: tables, JSON, progress bars, warnings and errors."""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from collections import Counter
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.text import Text

from attnserve.control_characters import escape_control
from attnserve.options import GROUPS

if TYPE_CHECKING:  # imported on use, because `--help` must start fast
    from attnserve.cli.options import Show
    from attnserve.context import Progress
    from attnserve.models.measured import Fidelity

__all__ = [
    "format_ranges",
    "log_level",
    "option_names",
    "out",
    "print_json",
    "print_line",
    "print_message",
    "print_qualities",
    "print_table",
    "print_warnings",
    "progress_bars",
    "set_log_level",
    "shorten_names",
    "with_options",
]


class _Console(Console):
    """A console that escapes control characters in names from files."""

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(escape_control(text), **options)


out = _Console(highlight=False)
err = _Console(stderr=True, soft_wrap=True, highlight=False)


def option_names(command: Any) -> dict[str, str]:
    """Map each parameter of a command's Python function to its option or argument."""
    names: dict[str, str] = {}
    for param in command.params:
        if param.param_type_name == "argument":
            names[param.name] = param.metavar or param.name.upper()
        else:  # see ``Option.flag``
            options = param.secondary_opts if param.default is True else param.opts
            names[param.name] = options[0]
    return names


def with_options(text: str, options: Mapping[str, str]) -> str:
    """Replace the parameter names in backticks by their options; keep other words."""
    return re.sub(r"`(\w+)`", lambda match: options.get(match[1], match[0]), text)


def log_level(show: Show) -> str | None:
    """The log level that ``--quiet`` and ``--verbose`` request."""
    return "error" if show.quiet else "debug" if show.verbose else None


def set_log_level(show: Show) -> None:
    """Set the log level that ``--quiet`` and ``--verbose`` request; the default is warnings."""
    level = log_level(show) or "warning"
    logging.getLogger("attnserve").setLevel(level.upper())


def print_qualities(title: str, fidelity: Fidelity) -> None:
    """Print one line for each quality, with the name of the output if there are several."""
    outputs = {quality.outputs for quality in fidelity.qualities}
    several = len(outputs) > 1 or any(quality.same_outputs for quality in fidelity.qualities)
    for quality in fidelity.qualities:
        of = f" of {quality.outputs}" if several else ""
        print_line(f"{title}{of} ({fidelity.data}): {quality.describe()}")


def print_message(text: str) -> None:
    """Print a message on stderr."""
    err.print(text, markup=False)


def print_warnings(warnings: Sequence[str], show: Show) -> list[str]:
    """Print warnings, unless quiet; return the warnings with the names of options."""
    options = {name: group.option(name).flag for group in GROUPS for name in group.model_fields}
    messages = [with_options(warning, options) for warning in warnings]
    if not show.quiet:
        for warning in messages:
            print_message(f"warning: {warning}")
    return messages


def print_line(text: str) -> None:
    """Print one line on stdout. It is not wrapped, so that programs can read it."""
    out.print(text, markup=False, soft_wrap=True)


def print_json(value: dict[str, Any]) -> None:
    """Print a value as indented JSON on stdout; paths as text."""
    import orjson  # Ctrl-C during this import ends Python with a segmentation fault

    try:
        text = orjson.dumps(value, default=os.fspath, option=orjson.OPT_INDENT_2).decode()
    except TypeError:  # an integer of more than 64 bits, for example the cost of a damaged model
        text = json.dumps(value, indent=2, default=os.fspath)
    sys.stdout.write(text + "\n")


def print_table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[object]], legend: str = ""
) -> None:
    """Print a title, a table without borders that fits into 80 characters, and a legend.

    The title is printed on one line, because a table wraps its title at its own width.

    Args:
        columns: Names of the columns, and after a colon the format of their values (``loss:.4f``);
            ``>`` before a name aligns the column to the right.
        rows: The values; None is shown as a dash. A row with fewer values than columns begins a
            section, and is its title if it has any. Without rows, only the title is printed.
    """
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    out.print(f"[bold]{escape(title)}[/bold]", soft_wrap=True)
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    formats: list[str] = []
    for column in columns:
        name, _, form = column.partition(":")
        formats.append(form)
        right = name.startswith(">")
        table.add_column(
            name.removeprefix(">"), justify="right" if right else "left", overflow="fold"
        )
    for row in rows:
        begins_section = len(row) < len(columns)
        if begins_section:
            table.add_section()
        cells = [
            "-" if value is None else escape(value if isinstance(value, str) else f"{value:{form}}")
            for value, form in zip(row, formats[: len(row)], strict=True)
        ]
        if cells:
            table.add_row(*cells, style="bold" if begins_section else None)
    if table.rows:
        out.print(table)
    if legend:
        print_line(legend)


def format_ranges(numbers: Sequence[int]) -> str:
    """Write consecutive numbers as ranges: ``0-3, 5``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def shorten_names(names: Sequence[str], width: int) -> tuple[list[str], str]:
    """Remove the common prefix and suffix of names that are longer than ``width``.

    ``model.layer.0.attention`` and ``model.layer.1.attention`` become ``..layer.0``, ``..layer.1``.
    If names have nothing in common, the largest set with the same first part is shortened.

    Returns:
        The names, and a line that explains the shortened names ("" if names are unchanged).
    """
    parts = {name: re.split(r"(?<=[./])", name) for name in names}  # a separator ends each part
    firsts = Counter(parts[name][0] for name in names)
    alike = [n for n in names if parts[n][0] == firsts.most_common(1)[0][0]] if names else []
    if len(alike) < 2 or max(map(len, names)) <= width:
        return list(names), ""
    rows = [parts[name] for name in alike]
    prefix_length = _common_length(rows)
    tail = _common_length([row[prefix_length:][::-1] for row in rows])
    start = max(prefix_length - 1, 0)  # the last shared part describes the parts that differ
    prefix = ".." if start else ""
    abbreviations = {
        name: prefix + "".join(row[start : len(row) - tail or None]).rstrip("./")
        for name, row in zip(alike, rows, strict=True)
    }
    example = alike[0]
    legend = (
        ""
        if abbreviations[example] == example
        else f"{abbreviations[example]} is {example}, and so on"
    )
    return [abbreviations.get(name, name) for name in names], legend


def _common_length(rows: Sequence[Sequence[str]]) -> int:
    """The length of the common prefix."""
    columns = zip(*rows, strict=False)
    return sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, columns))


@contextmanager
def progress_bars(show: Show) -> Generator[Progress]:
    """Set the log level, and show one bar per stage on stderr, with the time left.

    No bars are shown with ``--quiet``, or if stderr is not a terminal.
    """
    set_log_level(show)
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(
        *columns, console=err, transient=True, disable=show.quiet or not err.is_terminal
    ) as bars:
        tasks: dict[str, Any] = {}

        def update(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage, total=total)
            bars.update(tasks[stage], completed=done, total=total)

        yield update
