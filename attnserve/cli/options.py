"""Arguments and options that several commands share, and the panels of their help.

An option whose value is None leaves the choice to the library.
"""

from __future__ import annotations

import os
import re
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attnserve.choices import LearnedTask, Measure, Precision, SearchMeasure, TaskName
from attnserve.context import Provider
from attnserve.runtime.cpu import available_cores

if TYPE_CHECKING:
    from attnserve.data.lengths import Lengths

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

search_option = partial(typer.Option, rich_help_panel=SEARCH)
rewrite_option = partial(typer.Option, rich_help_panel=REWRITES)
run_option = partial(typer.Option, rich_help_panel=RUN)


def flag(*names: str, help: str, panel: str) -> Any:
    """An option without a value."""
    return typer.Option(*names, metavar="", help=help, rich_help_panel=panel)


def output_option(metavar: str, help: str) -> Any:
    """``--output``, which names a file or a folder."""
    return typer.Option("--output", "-o", metavar=metavar, help=help)


Model = Annotated[
    Path, typer.Argument(metavar="MODEL", help="An .onnx file or an artifact folder.")
]
_INPUTS = "text with one sentence per line, an .npz of input arrays, or a folder of .npz"
_CALIB = typer.Option(metavar="FILE", help=f"Calibration data: {_INPUTS}.")
Calib = Annotated[Path, _CALIB]
_CALIBS = typer.Option(
    metavar="FILE",
    help=f"Calibration data: {_INPUTS}; can be repeated. The quality of each file is measured.",
)
Calibs = Annotated[list[Path], _CALIBS]
OptionalCalibs = Annotated[list[Path] | None, _CALIBS]
TrainingData = Annotated[
    list[Path],
    typer.Option(
        metavar="FILE",
        help=f"Data like that to be served: {_INPUTS}; can be repeated.",
    ),
]
LabeledTask = Annotated[
    LearnedTask | None,
    typer.Option(help="Learn the labels of the tables (.tsv) in --data too."),
]
CalibWeights = Annotated[
    str | None,
    typer.Option(
        metavar="W1,W2,...",
        help="Shares of several --calib files in the rows that are fitted, for example 3,1"
        " (default: all rows of all files).",
        rich_help_panel=CALIBRATION,
    ),
]

Keep = Annotated[
    float | None,
    typer.Option(
        metavar="SHARE",
        help="Find the fastest model that keeps this share of the quality, for example 0.99."
        " Quality is --measure, and with --eval-data the task score as well.",
    ),
]
TargetSpeedup = Annotated[
    float | None,
    search_option(
        metavar="FACTOR",
        help="Minimum speed-up; minimizes the quality loss subject to it. Excludes --keep.",
    ),
]
EvalData = Annotated[
    Path | None,
    search_option(
        metavar="FILE",
        help="Labeled data, as for `evaluate --data`: --keep applies to its score.",
    ),
]
Task = Annotated[TaskName | None, search_option(help="The score of --eval-data.")]
_MEASURE = (
    "Measure of quality: correlation of text similarities (similarity), R^2 about the mean (r2),"
    " KL divergence of classes (kl), agreement of the most probable token (top1), or mean cosine"
    " (cosine). auto chooses by the kind of output."
)
GoalMeasure = Annotated[
    SearchMeasure, search_option(help=f"{_MEASURE} score limits the loss of the task score alone.")
]
CheckMeasure = Annotated[Measure, typer.Option(help=_MEASURE)]
Recover = Annotated[
    str | None,
    search_option(
        metavar="TIME",
        help="Train faster candidates on the calibration data within the search, for example 20m"
        " (extra torch).",
    ),
]
Allow = Annotated[
    str | None, search_option(metavar="ffn", help="Let the search remove feed-forward neurons.")
]

Fp16 = Annotated[bool, flag("--fp16", help="Convert to float16.", panel=PRECISION)]
Bf16 = Annotated[bool, flag("--bf16", help="Convert to bfloat16 (GPU only).", panel=PRECISION)]
Int8 = Annotated[
    bool, flag("--int8", help="Quantize to int8 with 7-bit weights (every CPU).", panel=PRECISION)
]
Int8Full = Annotated[
    bool,
    flag(
        "--int8-full",
        help="Quantize to int8 with 8-bit weights (CPUs with VNNI, AMX or ARM dot products).",
        panel=PRECISION,
    ),
]
Int4 = Annotated[
    bool,
    flag(
        "--int4",
        help="Quantize weights to 4 bits (decoders that run one token at a time).",
        panel=PRECISION,
    ),
]

_TOKENIZER = "tokenizer.json (default: the file beside the model)."
Tokenizer = Annotated[
    Path | None, typer.Option(metavar="FILE", help=_TOKENIZER, rich_help_panel=CALIBRATION)
]
DataTokenizer = Annotated[Path | None, typer.Option(metavar="FILE", help=_TOKENIZER)]

Force = Annotated[bool, flag("--force", help="Overwrite an existing output.", panel=OUTPUT)]
Json = Annotated[bool, flag("--json", help="Print one JSON object on stdout.", panel=OUTPUT)]
Quiet = Annotated[bool, flag("--quiet", "-q", help="Hide progress and warnings.", panel=OUTPUT)]
Verbose = Annotated[
    bool,
    flag("--verbose", "-v", help="Print details, and the traceback of an error.", panel=OUTPUT),
]

Batch = Annotated[int, run_option(min=1, metavar="N", help="Batch size to optimize for.")]
Length = Annotated[
    str | None,
    run_option(
        "--seq",
        metavar="N|N-M",
        help="Sequence length to optimize for and to report costs at, or a range such as 16-512"
        " (default: the lengths of the calibration data, else 128).",
    ),
]


def _limit_threads(threads: int) -> int:
    """Limit the threads of the other libraries, unless the environment does.

    They read their variables when they are loaded, so this works before numpy is imported. Threads
    of OpenBLAS that wait for a core make a factorization several times slower than one thread.
    """
    if LIBRARY_THREADS.isdisjoint(os.environ):
        cores = str(threads or available_cores())
        os.environ.update(dict.fromkeys(LIBRARY_THREADS, cores))
    return threads


LIBRARY_THREADS = frozenset({"MKL_NUM_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"})
"""Variables with the number of threads of numpy, scipy and PyTorch."""

Threads = Annotated[
    int,
    run_option(
        min=0,
        metavar="N",
        help="Threads of ONNX Runtime, numpy and PyTorch; 0: each of them chooses.",
        callback=_limit_threads,
    ),
]
ProviderName = Annotated[Provider, run_option(help="Execution provider.")]
Seed = Annotated[int, run_option(min=0, metavar="N", help="Seed of random choices.")]

# `serve` and `deploy ray` share these. None leaves the choice to the environment
# (service/settings.py).
Host = Annotated[
    str | None, typer.Option(metavar="ADDRESS", help="Address to listen on (default: 127.0.0.1).")
]
ServerProvider = Annotated[
    str | None,
    run_option(
        metavar="auto|cpu|cuda",
        help="Execution provider (default: auto, which is cuda if a GPU can be used).",
    ),
]
ServerThreads = Annotated[
    int | None,
    run_option(
        min=0,
        metavar="N",
        help="Threads of ONNX Runtime per run (default: 0, ONNX Runtime chooses).",
    ),
]


def parse_precision(
    *, fp16: bool, bf16: bool, int8: bool, int8_full: bool, int4: bool
) -> Precision:
    """The precision that the flags request.

    Raises:
        InvalidArgument: More than one flag is set.
    """
    precisions: dict[str, tuple[bool, Precision]] = {
        "--fp16": (fp16, "float16"), "--bf16": (bf16, "bfloat16"), "--int8": (int8, "int8"),
        "--int8-full": (int8_full, "int8-full"), "--int4": (int4, "int4"),
    }  # fmt: skip
    flags = [name for name, (is_set, _) in precisions.items() if is_set]
    if len(flags) > 1:
        from graph_passes.errors import InvalidArgument

        raise InvalidArgument(
            f"{' and '.join(flags)} exclude each other", "give one of them", code="cli.precision"
        )
    return precisions[flags[0]][1] if flags else "float32"


def parse_lengths(text: str | None) -> Lengths | None:
    """The length, or the range of lengths, of ``--seq``.

    Raises:
        InvalidArgument: It is neither.
    """
    if text is None:
        return None
    match = re.fullmatch(r"(-?\d{1,9})(?:-(\d{1,9}))?", text.strip())
    if match is None:
        from graph_passes.errors import InvalidArgument

        raise InvalidArgument(
            f"--seq is {text!r}: expected a number of tokens, or a range of them",
            "for example --seq 128, or --seq 16-512",
            code="cli.lengths",
        )
    low, high = match.groups()
    return int(low) if high is None else (int(low), int(high))


def parse_minutes(option: str, text: str | None) -> float | None:
    """The minutes of a time such as 20m, 90s, 1.5h or 20 (minutes).

    Raises:
        InvalidArgument: It is none.
    """
    if text is None:
        return None
    match = re.fullmatch(r"(\d{1,6}(?:\.\d{1,6})?)\s*([smh]?)", text.strip())
    if match is None:
        from graph_passes.errors import InvalidArgument

        raise InvalidArgument(
            f"{option} is {text!r}: expected a time in minutes",
            f"for example {option} 20m, {option} 90s or {option} 1h",
            code="cli.minutes",
        )
    return float(match[1]) * {"s": 1 / 60, "m": 1.0, "h": 60.0, "": 1.0}[match[2]]


def parse_names(text: str | None) -> list[str]:
    """Split comma-separated names; an option that is not given has none."""
    return [] if text is None else [name.strip() for name in text.split(",")]


def parse_weights(text: str | None) -> list[float]:
    """Split the numbers of ``--calib-weights``.

    Raises:
        InvalidArgument: A value is not a number.
    """
    try:
        return [] if text is None else [float(part) for part in text.split(",")]
    except ValueError as error:
        from graph_passes.errors import InvalidArgument

        raise InvalidArgument(
            f"--calib-weights is {text!r}: expected numbers, separated by commas",
            "for example --calib-weights 3,1",
            code="cli.weights",
        ) from error


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
