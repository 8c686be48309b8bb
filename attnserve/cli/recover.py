"""``attnserve recover``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import attnserve
from attnserve.cli import options as opt
from attnserve.cli.display import (
    print_json,
    print_line,
    print_qualities,
    print_warnings,
    progress_bars,
    set_log_level,
)

if TYPE_CHECKING:
    from attnserve.recovery.report import RecoverReport

__all__ = ["app"]

app = typer.Typer()


@app.command(
    epilog="Example: attnserve recover new --teacher model --data texts.txt -o out",
    rich_help_panel=opt.COMPRESS,
)
def recover(
    command: typer.Context,
    model: Annotated[
        Path,
        typer.Argument(metavar="REWRITTEN", help="The rewritten .onnx file or artifact folder."),
    ],
    teacher: Annotated[
        Path,
        typer.Option(metavar="ORIGINAL", help="The model that it was made from."),
    ],
    data: opt.TrainingData,
    output: Annotated[Path, opt.output_option("PATH", "Output .onnx file or folder.")],
    minutes: Annotated[
        float, typer.Option(min=0, metavar="N", help="Time of the training.")
    ] = 20.0,
    int8: opt.Int8 = False,
    task: opt.LabeledTask = None,
    measure: opt.CheckMeasure = "auto",
    tokenizer: opt.DataTokenizer = None,
    force: opt.Force = False,
    json: opt.Json = False,
    quiet: opt.Quiet = False,
    verbose: opt.Verbose = False,
    threads: opt.Threads = 0,
    provider: opt.ProviderName = "cpu",
    seed: opt.Seed = 0,
) -> None:
    """Train a rewritten model to give the outputs of its original again (distillation).

    The graph stays as it is; only its weights change. With --int8 they are trained for the
    rounding of int8 kernels, and the result is quantized. An interrupted training continues
    when the command is repeated. Needs PyTorch (extra torch).
    """
    set_log_level(quiet, verbose)
    with progress_bars(quiet) as progress:
        report = attnserve.recover(
            model,
            output,
            teacher=teacher,
            data=data,
            minutes=minutes,
            int8=int8,
            task=task,
            measure=measure,
            tokenizer=tokenizer,
            provider=provider,
            threads=threads,
            seed=seed,
            force=force,
            progress=progress,
        )
    warnings = print_warnings(report.warnings, command.command, quiet=quiet)
    if json:
        print_json({"output": str(report.output), **report.to_json(), "warnings": warnings})
    else:
        _show(report)


def _show(report: RecoverReport) -> None:
    print_line(f"wrote {report.output}")
    print_qualities("quality before", report.before)
    print_qualities("quality", report.after)
    print_line(
        f"cosine to the original: mean {report.before.mean_cosine:.4f} -> "
        f"{report.after.mean_cosine:.4f}, minimum {report.before.min_cosine:.4f} -> "
        f"{report.after.min_cosine:.4f}"
    )
    print_line(report.verdict)
