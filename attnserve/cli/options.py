"""Arguments and options that several commands share, and the panels of their help.

An option whose value is None leaves the choice to the library.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from attnserve.choices import TaskName
from attnserve.context import Provider

__all__ = [
    "CALIBRATION",
    "CHECK",
    "COMPRESS",
    "DEPLOY",
    "OUTPUT",
    "PRECISION",
    "REWRITES",
    "RUN",
    "SEARCH",
    "Allow",
    "Batch",
    "Bf16",
    "Calib",
    "DataTokenizer",
    "EvalData",
    "Force",
    "Fp16",
    "Host",
    "Int8",
    "Int8Full",
    "Json",
    "Keep",
    "Length",
    "Model",
    "OptionalCalib",
    "ProviderName",
    "Quiet",
    "Seed",
    "ServerProvider",
    "ServerThreads",
    "TargetSpeedup",
    "Task",
    "Threads",
    "Tokenizer",
    "Verbose",
    "parse_integers",
    "parse_names",
]

# Panels of commands in `attnserve --help`
COMPRESS = "Compress"
CHECK = "Inspect and check"
DEPLOY = "Export and serve"

# Panels of options in the help of a command
SEARCH = "Automatic search"
REWRITES = "Rewrites by hand"
PRECISION = "Precision"
CALIBRATION = "Calibration"
OUTPUT = "Output"
RUN = "Run"

Model = Annotated[
    Path, typer.Argument(metavar="MODEL", help="An .onnx file or an artifact folder.")
]
_CALIB = typer.Option(
    metavar="FILE",
    help="Calibration data: text with one sentence per line, an .npz of input arrays, or a folder"
    " of .npz.",
)
Calib = Annotated[Path, _CALIB]
OptionalCalib = Annotated[Path | None, _CALIB]

Keep = Annotated[
    float | None,
    typer.Option(
        metavar="SHARE",
        help="Find the fastest model that keeps this share of the quality, for example 0.99."
        " Quality is the mean output cosine, or the task score with --eval-data.",
    ),
]
TargetSpeedup = Annotated[
    float | None,
    typer.Option(
        metavar="FACTOR",
        help="Minimum speed-up; minimizes the quality loss subject to it. Excludes --keep.",
        rich_help_panel=SEARCH,
    ),
]
EvalData = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="A .tsv file: --keep applies to its score.", rich_help_panel=SEARCH
    ),
]
Task = Annotated[
    TaskName | None, typer.Option(help="The score of --eval-data.", rich_help_panel=SEARCH)
]
Allow = Annotated[
    str | None,
    typer.Option(
        metavar="ffn", help="Let the search remove feed-forward neurons.", rich_help_panel=SEARCH
    ),
]

Fp16 = Annotated[
    bool,
    typer.Option("--fp16", metavar="", help="Convert to float16.", rich_help_panel=PRECISION),
]
Bf16 = Annotated[
    bool,
    typer.Option(
        "--bf16", metavar="", help="Convert to bfloat16 (GPU only).", rich_help_panel=PRECISION
    ),
]
Int8 = Annotated[
    bool,
    typer.Option(
        "--int8",
        metavar="",
        help="Quantize to int8 with 7-bit weights (every CPU).",
        rich_help_panel=PRECISION,
    ),
]
Int8Full = Annotated[
    bool,
    typer.Option(
        "--int8-full",
        metavar="",
        help="Quantize to int8 with 8-bit weights (CPUs with VNNI, AMX or ARM dot products).",
        rich_help_panel=PRECISION,
    ),
]

_TOKENIZER = "tokenizer.json (default: the file beside the model)."
Tokenizer = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help=_TOKENIZER, rich_help_panel=CALIBRATION),
]
DataTokenizer = Annotated[Path | None, typer.Option(metavar="FILE", help=_TOKENIZER)]

Force = Annotated[
    bool,
    typer.Option(
        "--force", metavar="", help="Overwrite an existing output.", rich_help_panel=OUTPUT
    ),
]
Json = Annotated[
    bool,
    typer.Option(
        "--json", metavar="", help="Print one JSON object on stdout.", rich_help_panel=OUTPUT
    ),
]
Quiet = Annotated[
    bool,
    typer.Option(
        "--quiet", "-q", metavar="", help="Hide progress and warnings.", rich_help_panel=OUTPUT
    ),
]
Verbose = Annotated[
    bool,
    typer.Option(
        "--verbose",
        "-v",
        metavar="",
        help="Print details, and the traceback of an error.",
        rich_help_panel=OUTPUT,
    ),
]

Batch = Annotated[
    int,
    typer.Option(min=1, metavar="N", help="Batch size to optimize for.", rich_help_panel=RUN),
]
Length = Annotated[
    int | None,
    typer.Option(
        "--seq",
        min=1,
        metavar="N",
        help="Sequence length to optimize for and to report costs at (default: the lengths of the"
        " calibration data, else 128).",
        rich_help_panel=RUN,
    ),
]
Threads = Annotated[
    int,
    typer.Option(
        min=0,
        metavar="N",
        help="Threads of ONNX Runtime; 0: ONNX Runtime chooses.",
        rich_help_panel=RUN,
    ),
]
ProviderName = Annotated[Provider, typer.Option(help="Execution provider.", rich_help_panel=RUN)]
Seed = Annotated[
    int, typer.Option(min=0, metavar="N", help="Seed of random choices.", rich_help_panel=RUN)
]

# `serve` and `deploy ray` share these. None leaves the choice to the environment
# (service/settings.py).
Host = Annotated[
    str | None, typer.Option(metavar="ADDRESS", help="Address to listen on (default: 127.0.0.1).")
]
ServerProvider = Annotated[
    str | None,
    typer.Option(
        metavar="auto|cpu|cuda",
        help="Execution provider (default: auto, which is cuda if a GPU can be used).",
        rich_help_panel=RUN,
    ),
]
ServerThreads = Annotated[
    int | None,
    typer.Option(
        min=0,
        metavar="N",
        help="Threads of ONNX Runtime per run (default: 0, ONNX Runtime chooses).",
        rich_help_panel=RUN,
    ),
]


def parse_names(text: str) -> list[str]:
    """Split comma-separated names."""
    return [name.strip() for name in text.split(",")]


def parse_integers(option: str, text: str, *, minimum: int | None = None) -> list[int]:
    """Split comma-separated integers.

    Raises:
        InvalidArgument: A value is not an integer, or is less than ``minimum``.
    """
    from graph_passes.errors import InvalidArgument

    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError as error:
        raise InvalidArgument(
            f"{option} is {text!r}: expected integers, separated by commas",
            f"for example {option} 1,8",
            code="cli.integers",
        ) from error
    if minimum is not None and min(numbers) < minimum:
        raise InvalidArgument(
            f"{option} is {text!r}: expected integers of at least {minimum}",
            f"for example {option} {minimum}",
            code="cli.integers",
        )
    return numbers
