"""``attnserve analyze`` and ``report``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import attnserve
from attnserve.cli import options as opt
from attnserve.cli.command import add_command
from attnserve.cli.display import (
    out,
    print_json,
    print_line,
    print_table,
    progress_bars,
    shorten_names,
)
from attnserve.options import Run, Write

__all__ = ["app"]

app = typer.Typer()


@add_command(
    app,
    epilog="Example: attnserve analyze model.onnx --calib sentences.txt",
    rich_help_panel=opt.CHECK,
)
def analyze(
    model: opt.Model,
    calib: Annotated[Path, typer.Option(metavar="FILE", help=f"Calibration data: {opt.INPUTS}.")],
    output: Annotated[
        Path | None,
        opt.output_option("DIR", "Output folder (default: NAME-analysis beside the model)."),
    ] = None,
    groups: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Heads that Voting-to-Stay keeps per layer (default: half)."
        ),
    ] = None,
    tokenizer: opt.DataTokenizer = None,
    write: opt.Force = Write(),
    show: opt.Show = opt.Show(),
    run: Run = Run(),
) -> None:
    """Report redundancy and head importance per layer (HTML and JSON)."""
    with progress_bars(show) as progress:
        analysis = attnserve.analyze(
            model,
            output,
            calib=calib,
            tokenizer=tokenizer,
            groups=groups,
            run=run,
            force=write.force,
            progress=progress,
        )
    if show.json_:
        print_json({"output": str(analysis.output), **analysis.to_json()})
        return
    rows = analysis.summary()
    names, legend = shorten_names([row.name for row in rows], width=out.width - 62)
    print_table(
        f"{model}: attention on {calib}",
        (
            "",
            "name",
            "heads",
            ">similar",
            ">uniform:.2f",
            ">rank (99 %)",
            ">least energy",
            ">kept (voting)",
        ),
        [
            (
                row.index,
                name,
                f"{row.num_heads} x {row.head_size}",
                None if row.nearest is None else f"{row.nearest} ({row.similarity:.2f})",
                row.uniform,
                None if row.rank is None else f"{row.rank} of {row.full_rank}",
                f"head {row.weakest_head} ({row.weakest_share:.1%})",
                row.kept,
            )
            for row, name in zip(rows, names, strict=True)
        ],
        legend,
    )
    for block in analysis.not_analyzed:
        print_line(f"not analyzed: {block.name}: {block.reason}")
    assert analysis.output is not None
    print_line(f"wrote {analysis.output / 'report.html'}")


@add_command(
    app,
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
    write: opt.Force = Write(),
    show: opt.Show = opt.Show(),
    run: opt.Seed = Run(),
) -> None:
    """Write an HTML page per model: its rewrites, their cost and quality, and its attention."""
    with progress_bars(show) as progress:
        reports = attnserve.report(
            models, output, seed=run.seed, force=write.force, progress=progress
        )
    if show.json_:
        print_json({"reports": [model_report.to_json() for model_report in reports]})
        return
    for model_report in reports:
        print_line(f"wrote {model_report.output}")
