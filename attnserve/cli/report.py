"""``attnserve report``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import attnserve
from attnserve.cli import options as opt
from attnserve.cli.command import add_command
from attnserve.cli.display import print_json, print_line, progress_bars, set_log_level
from attnserve.options import Run

__all__ = ["app"]

app = typer.Typer()


@add_command(
    app,
    left_out=("threads", "provider", "runtime"),
    epilog="Example: attnserve report minilm-optimized",
    rich_help_panel=opt.CHECK,
)
def report(
    models: Annotated[
        Path,
        typer.Argument(
            metavar="MODELS", help="An .onnx file, an artifact folder or a folder of models."
        ),
    ],
    output: Annotated[
        Path | None,
        opt.output_option("DIR", "Folder for the pages (default: report.html beside each model)."),
    ] = None,
    force: opt.Force = False,
    show: opt.Show = opt.SHOW,
    run: Run = opt.ANY_RUN,
) -> None:
    """Write an HTML page per model: its rewrites, their cost and quality, and its attention."""
    set_log_level(show)
    with progress_bars(show.quiet) as progress:
        reports = attnserve.report(models, output, seed=run.seed, force=force, progress=progress)
    if show.json_:
        print_json({"reports": [each.to_json() for each in reports]})
        return
    for each in reports:
        print_line(f"wrote {each.output}")
