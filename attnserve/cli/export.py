"""``attnserve export``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import attnserve
from attnserve.choices import Attention, Exporter
from attnserve.cli import options as opt
from attnserve.cli.command import add_command
from attnserve.cli.display import print_json, print_line, set_log_level
from attnserve.options import Run

__all__ = ["app"]

app = typer.Typer()


@add_command(
    app,
    left_out=("threads", "provider", "runtime"),
    epilog="Example: attnserve export sentence-transformers/all-MiniLM-L6-v2 -o minilm",
    rich_help_panel=opt.DEPLOY,
)
def export(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A Hugging Face id or a local folder.")
    ],
    output: Annotated[Path, opt.output_option("DIR", "Output folder.")],
    task: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Task head, for example sequence-classification (default: feature-extraction,"
            " which returns last_hidden_state).",
        ),
    ] = None,
    exporter: Annotated[Exporter, typer.Option(help="Exporter of PyTorch.")] = "dynamo",
    opset: Annotated[
        int | None,
        typer.Option(metavar="N", help="ONNX opset (default: 18 for dynamo, 17 for torchscript)."),
    ] = None,
    attention: Annotated[
        Attention, typer.Option(help="Attention implementation to trace.")
    ] = "sdpa",
    dimensions: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Keep the first N dimensions of an embedding (Matryoshka models).",
        ),
    ] = None,
    force: opt.Force = False,
    show: opt.Show = opt.SHOW,
    run: Run = opt.ANY_RUN,
) -> None:
    """Export a Hugging Face model to ONNX and compare it with PyTorch."""
    set_log_level(show)
    report = attnserve.export(
        model, output, task=task, exporter=exporter, opset=opset, attention=attention,
        dimensions=dimensions, seed=run.seed, force=force,
    )  # fmt: skip
    if show.json_:
        print_json(report.to_json())
        return
    print_line(
        f"wrote {report.path}: {report.exporter} exporter, opset {report.opset}, "
        f"{report.attention} attention, relative difference to PyTorch "
        f"{report.relative_error:.0e}, {report.seconds:.0f} s"
    )
