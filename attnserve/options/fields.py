"""The types of fields: readers of text, bounds, and names on the command line."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

from pydantic import BeforeValidator, Field

from attnserve.literals import Measure, Precision, SearchMeasure
from attnserve.options.base import Cli, Switch
from attnserve.paths import StrPath, as_paths

# Panels of the help; ``groups`` has the others.
CALIBRATION = "Calibration"
PRECISION = "Precision"


def fail(what: str, fix: str, code: str) -> NoReturn:
    """Raise ``InvalidArgument``, which is imported on use because ``--help`` does not need it."""
    from graph_passes.errors import InvalidArgument

    raise InvalidArgument(what, fix, code=code)


def read_names(value: Any) -> Any:
    """The names in a text, separated by commas; other values as they are."""
    if not isinstance(value, str):
        return value
    names = tuple(name.strip() for name in value.split(","))
    if "" in names:
        raise ValueError("expected names separated by commas, found an empty entry")
    return names


def read_ranks(value: Any) -> Any:
    """One integer, or a tuple of several integers, from a text; other values as they are."""
    ranks = _numbers(value, int, "integers")
    return ranks[0] if isinstance(value, str) and len(ranks) == 1 else ranks


def read_counts(value: Any) -> Any:
    """The integers in a text, separated by commas, or one integer; other values as they are."""
    return (value,) if isinstance(value, int) else _numbers(value, int, "integers")


def read_weights(value: Any) -> Any:
    """The numbers in a text, separated by commas; other values as they are."""
    return _numbers(value, float, "numbers")


def _numbers(value: Any, kind: Callable[[str], float], expected: str) -> Any:
    """The numbers in a text, separated by commas; other values as they are."""
    if not isinstance(value, str):
        return value
    try:
        return tuple(kind(part) for part in value.split(","))
    except ValueError as error:
        raise ValueError(f"expected {expected}, separated by commas") from error


def read_lengths(value: Any) -> Any:
    """A length in tokens, or the ends of a range such as 16-512, from a text, an integer or a pair.

    Raises:
        ValueError: The value is neither, or a length is below 1.
    """
    if isinstance(value, str):
        match = re.fullmatch(r"(-?\d{1,9})(?:-(\d{1,9}))?", value.strip())
        if match is None:
            raise ValueError("expected a number of tokens, or a range of them")
        low, high = match.groups()
        value = int(low) if high is None else (int(low), int(high))
    if isinstance(value, int | tuple | list) and not _are_lengths(value):
        raise ValueError(
            "expected a length of at least 1, or a range from the shortest to the longest"
        )
    return value


def _are_lengths(value: int | tuple[Any, ...] | list[Any]) -> bool:
    """Whether a value is a length, or the shortest and the longest one."""
    ends = [value] if isinstance(value, int) else value
    try:
        return len(ends) in (1, 2) and 1 <= ends[0] <= ends[-1]
    except TypeError:  # texts or pairs in place of numbers
        return False


def read_minutes(value: Any) -> Any:
    """Minutes from a text such as 20m, 90s, 1h or 20; other values as they are."""
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"(\d{1,6}(?:\.\d{1,6})?)\s*([smh]?)", value.strip())
    if match is None:
        raise ValueError("expected a time in minutes, or with a unit (90s, 20m, 1h)")
    return float(match[1]) * {"s": 1 / 60, "m": 1.0, "h": 60.0, "": 1.0}[match[2]]


def read_path(value: Any) -> Any:
    """A ``Path`` for a path of any type; other values as they are."""
    return Path(value) if isinstance(value, os.PathLike) else value


def read_paths(value: Any) -> Any:
    """A tuple of paths, from None, one path or several paths.

    Raises:
        ValueError: The value, or one of its items, is not a path.
    """
    try:
        return tuple(as_paths(value))
    except TypeError as error:
        raise ValueError("expected a path, or several") from error


Allowed = Literal["ffn"]
Lengths = int | tuple[int, int]
"""A number of tokens, or the shortest and the longest one."""
Ranks = int | tuple[int, ...] | dict[str, int]
"""R of every layer, of each layer in order, or by layer name."""

MEASURE = (
    "Measure of quality: correlation of text similarities (similarity), agreement of queries on the"
    " nearest documents of the original (index), order of the documents of a query (tau), R^2 about"
    " the mean (r2), KL divergence of classes (kl), agreement of the most probable token (top1), or"
    " mean cosine (cosine). auto chooses by the kind of output."
)

Cosine = Annotated[float, Field(ge=-1, le=1, examples=[0.99]), Cli(metavar="COSINE")]
Counts = Annotated[
    tuple[Annotated[int, Field(ge=1)], ...],
    BeforeValidator(read_counts, json_schema_input_type=int | Sequence[int] | str),
    Field(examples=["1,8"]),
]
MeasureName = Annotated[Measure, Field(description=MEASURE)]
SearchMeasureName = Annotated[
    SearchMeasure,
    Field(description=f"{MEASURE} score limits the loss of the task score alone."),
]
Names = Annotated[
    tuple[str, ...],
    BeforeValidator(read_names, json_schema_input_type=Sequence[str] | str),
    Field(examples=["0,2"]),
    Cli(metavar="LAYERS"),
]
RemovedShare = Annotated[float, Field(gt=0, lt=1, examples=[0.25]), Cli(metavar="SHARE")]
Minutes = Annotated[float, Field(gt=0, allow_inf_nan=False, examples=["20m, 90s or 1h"])]
File = Annotated[
    Path, BeforeValidator(read_path, json_schema_input_type=StrPath), Cli(metavar="FILE")
]
Files = Annotated[
    tuple[Path, ...],
    BeforeValidator(read_paths, json_schema_input_type=StrPath | Sequence[StrPath]),
    Cli(metavar="FILE", panel=CALIBRATION),
]
TokenizerFile = Annotated[
    File | None, Field(description="tokenizer.json (default: the file beside the model).")
]
INT8 = Switch("--int8", "int8", "Quantize to int8 with 7-bit weights (every CPU).")
Converted = Annotated[
    Precision,
    Cli(
        metavar="NAME",
        panel=PRECISION,
        switches=(
            Switch("--fp16", "float16", "Convert to float16."),
            Switch("--bf16", "bfloat16", "Convert to bfloat16 (GPU only)."),
            INT8,
            Switch(
                "--int8-full",
                "int8-full",
                "Quantize to int8 with 8-bit weights (slower without VNNI, AMX or ARM dotprod).",
            ),
            Switch(
                "--int4",
                "int4",
                "Quantize weights to 4 bits (decoders that run one token at a time).",
            ),
        ),
    ),
]
