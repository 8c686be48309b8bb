"""``attnserve analyze``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import attnserve
from attnserve.cli import options as opt
from attnserve.cli.command import add_command
from attnserve.cli.display import (
    make_table,
    out,
    print_json,
    print_line,
    progress_bars,
    set_log_level,
    shorten_names,
)
from attnserve.options import Run

__all__ = ["app"]

app = typer.Typer()


@add_command(
    app,
    epilog="Example: attnserve analyze model.onnx --calib sentences.txt",
    rich_help_panel=opt.CHECK,
)
def analyze(
    model: opt.Model,
    calib: opt.Calib,
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
    force: opt.Force = False,
    show: opt.Show = opt.SHOW,
    run: Run = opt.ANY_RUN,
) -> None:
    """Report redundancy and head importance per layer (HTML and JSON)."""
    set_log_level(show)
    with progress_bars(show.quiet) as progress:
        analysis = attnserve.analyze(
            model,
            output,
            calib=calib,
            tokenizer=tokenizer,
            groups=groups,
            run=run,
            force=force,
            progress=progress,
        )
    if show.json_:
        print_json({"output": str(analysis.output), **analysis.to_json()})
        return
    rows = analysis.summary()
    names, legend = shorten_names([row.name for row in rows], width=out.width - 62)
    table = make_table(
        f"{model}: attention on {calib}",
        (
            "",
            "name",
            "heads",
            ">similar / uniform",
            ">rank (99 %)",
            ">least energy",
            ">kept (voting)",
        ),
    )
    for row, name in zip(rows, names, strict=True):
        table.add_row(
            str(row.index),
            name,
            f"{row.num_heads} x {row.head_size}",
            "-" if row.nearest is None else f"{row.nearest} ({row.similarity:.2f})",
            f"{row.uniform:.2f}",
            "-" if row.rank is None else f"{row.rank} of {row.full_rank}",
            f"head {row.weakest_head} ({row.weakest_share:.1%})",
            str(row.kept),
        )
    out.print(table)
    if legend:
        print_line(legend)
    for block in analysis.not_analyzed:
        print_line(f"not analyzed: {block.name}: {block.reason}")
    assert analysis.output is not None
    print_line(f"wrote {analysis.output / 'report.html'}")
