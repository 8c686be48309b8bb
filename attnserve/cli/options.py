"""Arguments and options that several commands share, and the panels of their help.

An option whose value is None leaves the choice to the library.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, Self

import typer
from pydantic import BeforeValidator, Field, model_validator

from attnserve.options import Cli, Data, Options, Run, Write
from attnserve.options.fields import Cosine, File, fail, read_names
from attnserve.options.groups import OUTPUT
from attnserve.runtime.machine import available_cores

# Panels of commands in `attnserve --help`
COMPRESS = "Compress"
CHECK = "Inspect and check"
DEPLOY = "Export and serve"


def output_option(metavar: str, help: str) -> Any:
    """The option ``--output``, a file or a folder."""
    return typer.Option("--output", "-o", metavar=metavar, help=help)


Model = Annotated[
    Path, typer.Argument(metavar="MODEL", help="An .onnx file or an artifact folder.")
]
INPUTS = "text with one sentence per line, an .npz of input arrays, or a folder of .npz"
DataTokenizer = Annotated[
    Path | None, typer.Option(metavar="FILE", help=Data.model_fields["tokenizer"].description)
]
# Groups with some of their fields as options (``add_command``)
Force = Annotated[Write, "force"]
Seed = Annotated[Run, "seed"]


class Show(Options):
    """Output options of a command."""

    panel = OUTPUT

    json_: Annotated[bool, Cli(flags=("--json",))] = False
    """Print one JSON object on stdout."""
    quiet: Annotated[bool, Cli(flags=("--quiet", "-q"))] = False
    """Hide progress and warnings."""
    verbose: Annotated[bool, Cli(flags=("--verbose", "-v"))] = False
    """Print details, and the traceback of an error."""


class Requirements(Options):
    """Requirements of ``verify`` on the new model."""

    area = "verify"

    again: bool = False
    """Repeat the verification that attnserve.json of NEW records, on the calibration data or on new
    data. Exit with code 1 if a guarantee does not hold."""
    eval_data: File | None = None
    """With `again`: labeled data of a goal with a task."""
    min_cosine: Cosine | None = None
    """Exit with code 1 if the mean cosine is lower."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.eval_data is not None and not self.again:
            fail("`eval_data` is given without `again`", "give `again` too", "verify.usage")
        return self


class Mteb(Options):
    """Tasks of MTEB, and the folder of their results."""

    panel = "Tasks of MTEB"
    area = "mteb"

    mteb: Annotated[
        tuple[str, ...],
        BeforeValidator(read_names),
        Field(examples=["STS17,SciFact"]),
        Cli(metavar="TASK,..."),
    ] = ()
    """Tasks of MTEB in place of `task` (extra mteb). Their scores are written into the model
    card."""
    output: Annotated[Path | None, Cli(metavar="DIR", flags=("--output", "-o"))] = None
    """Folder of the results (default: in the model's folder)."""
    force: bool = False
    """Overwrite existing results."""


def limit_threads(threads: int) -> int:
    """Limit the threads of numpy, scipy and PyTorch, unless environment variables do.

    The libraries read the variables on import: call the function before numpy is imported. OpenBLAS
    threads that wait for a core make a factorization several times slower than a single thread.
    """
    if LIBRARY_THREADS.isdisjoint(os.environ):
        cores = str(threads or available_cores())
        os.environ.update(dict.fromkeys(LIBRARY_THREADS, cores))
    return threads


LIBRARY_THREADS = frozenset({"MKL_NUM_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"})
"""Variables with the number of threads of numpy, scipy and PyTorch."""
