"""``attnserve recover``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import attnserve
from attnserve.cli import options as opt
from attnserve.cli.command import add_command
from attnserve.cli.display import (
    print_json,
    print_line,
    print_qualities,
    print_warnings,
    progress_bars,
    set_log_level,
)
from attnserve.options import Run, Train

if TYPE_CHECKING:
    from attnserve.recovery.report import RecoverReport

__all__ = ["app"]

app = typer.Typer()


@add_command(
    app,
    epilog="Example: attnserve recover new --teacher model --data texts.txt -o out",
    rich_help_panel=opt.COMPRESS,
)
def recover(
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
    training: Train,
    run: Run,
    tokenizer: opt.DataTokenizer = None,
    force: opt.Force = False,
    show: opt.Show = opt.SHOW,
) -> None:
    """Train a rewritten model to give the outputs of its original again (distillation).

    The graph stays as it is; only its weights change. With --int8 they are trained for the
    rounding of int8 kernels, and the result is quantized. An interrupted training continues
    when the command is repeated. Needs PyTorch (extra torch).
    """
    set_log_level(show)
    with progress_bars(show.quiet) as progress:
        report = attnserve.recover(
            model, output, teacher=teacher, data=data, tokenizer=tokenizer, training=training,
            run=run, force=force, progress=progress,
        )  # fmt: skip
    warnings = print_warnings(report.warnings, show)
    if show.json_:
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
