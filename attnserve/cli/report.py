"""``attnserve report``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import attnserve
from attnserve.cli import options as opt
from attnserve.cli.display import print_json, print_line, progress_bars, set_log_level

__all__ = ["app"]

app = typer.Typer()


@app.command(epilog="Example: attnserve report minilm-optimized", rich_help_panel=opt.CHECK)
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
    json: opt.Json = False,
    quiet: opt.Quiet = False,
    verbose: opt.Verbose = False,
    seed: opt.Seed = 0,
) -> None:
    """Write an HTML page per model: its rewrites, their cost and quality, and its attention."""
    set_log_level(quiet, verbose)
    with progress_bars(quiet) as progress:
        reports = attnserve.report(models, output, seed=seed, force=force, progress=progress)
    if json:
        print_json({"reports": [each.to_json() for each in reports]})
        return
    for each in reports:
        print_line(f"wrote {each.output}")
