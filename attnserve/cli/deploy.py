"""``attnserve export``, ``serve`` and ``deploy triton``, ``genai`` and ``ray``."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

import attnserve
from attnserve.cli import options as opt
from attnserve.cli.command import add_command
from attnserve.cli.display import log_level, print_json, print_line, set_log_level
from attnserve.literals import Attention, Exporter
from attnserve.options import Run, Write
from service.settings import RaySettings, Settings

__all__ = ["app"]

app = typer.Typer()
targets = typer.Typer(
    help="Deploy a model to Triton, onnxruntime-genai or Ray Serve.", no_args_is_help=True
)
app.add_typer(targets, name="deploy", rich_help_panel=opt.DEPLOY)


@add_command(
    app,
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
    write: Annotated[Write, "openvino", "force"] = Write(),
    show: opt.Show = opt.Show(),
    run: opt.Seed = Run(),
) -> None:
    """Export a Hugging Face model to ONNX and compare it with PyTorch."""
    set_log_level(show)
    report = attnserve.export(
        model,
        output,
        task=task,
        exporter=exporter,
        opset=opset,
        attention=attention,
        dimensions=dimensions,
        openvino=write.openvino,
        seed=run.seed,
        force=write.force,
    )
    if show.json_:
        print_json(report.to_json())
        return
    record = report.record
    print_line(
        f"wrote {report.path}: {record.exporter} exporter, opset {record.opset}, "
        f"{record.attention} attention, relative difference to PyTorch "
        f"{report.relative_error:.0e}, {report.seconds:.0f} s"
    )


@add_command(
    app,
    epilog="Example: attnserve serve model-optimized --port 8000",
    rich_help_panel=opt.DEPLOY,
)
def serve(settings: Settings, show: Annotated[opt.Show, "quiet", "verbose"] = opt.Show()) -> None:
    """Serve models over HTTP.

    Environment variables set options that are not given (ATTNSERVE_PORT=9000),
    and more settings, which the documentation lists.
    """
    from service.launch import serve as run

    run(settings.logged_at(log_level(show)))


@add_command(
    targets,
    epilog="Example: attnserve deploy triton repository --model model-optimized",
)
def triton(
    repository: Annotated[Path, typer.Argument(metavar="DIR", help="Triton's model repository.")],
    model: Annotated[
        Path, typer.Option(metavar="PATH", help="An .onnx file or an artifact folder.")
    ],
    name: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Model name in the repository (default: the artifact's name)."
        ),
    ] = None,
    max_batch: Annotated[
        int | None,
        typer.Option(
            min=0,
            metavar="N",
            help="Maximum batch size; 0: no batching (default: 32 if the model can be batched).",
        ),
    ] = None,
    max_delay_us: Annotated[
        int, typer.Option(min=0, metavar="US", help="Maximum microseconds to wait for a batch.")
    ] = 0,
    instances: Annotated[
        int,
        typer.Option(min=1, metavar="N", help="Number of copies of the model in Triton."),
    ] = 1,
    write: opt.Force = Write(),
    show: opt.Show = opt.Show(),
    run: Annotated[Run, "threads", "provider"] = Run(),
) -> None:
    """Write a Triton model repository: config.pbtxt, the model and warm-up requests."""
    from attnserve.exporters.triton_repository import write_repository

    set_log_level(show)
    entry = write_repository(
        model,
        repository,
        name=name,
        max_batch=max_batch,
        instances=instances,
        provider=run.provider,
        threads=run.threads,
        max_delay_us=max_delay_us,
        force=write.force,
    )
    if show.json_:
        print_json(asdict(entry))
        return
    batches = f"batches of up to {entry.max_batch_size}" if entry.max_batch_size else "no batching"
    print_line(f"wrote {entry.folder}: {batches}, {entry.instances} instance(s), {entry.provider}")


@add_command(
    targets,
    epilog="Example: attnserve deploy genai folder --model decoder-optimized",
)
def genai(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The new folder.")],
    model: Annotated[
        Path, typer.Option(metavar="PATH", help="An .onnx file or an artifact folder.")
    ],
    write: opt.Force = Write(),
    show: opt.Show = opt.Show(),
    run: Annotated[Run, "provider"] = Run(),
) -> None:
    """Write a folder for onnxruntime-genai, which generates text: genai_config.json and the model.

    The model is a decoder with a cache.
    """
    from attnserve.exporters.genai_folder import write_genai_folder

    set_log_level(show)
    result = write_genai_folder(model, folder, provider=run.provider, force=write.force)
    if show.json_:
        print_json(asdict(result))
        return
    print_line(
        f"wrote {result.folder}: {result.layers} layers, up to {result.context_length} tokens,"
        f" {result.provider}"
    )


@add_command(
    targets,
    epilog="Example: attnserve deploy ray model-optimized --replicas 2 --cpus 4",
)
def ray(
    settings: Annotated[Settings, "model", "host", "port", "provider", "runtime", "threads"],
    scaling: RaySettings,
    show: Annotated[opt.Show, "quiet", "verbose"] = opt.Show(),
) -> None:
    """Serve a model on Ray Serve, with autoscaling over several machines.

    Environment variables set options that are not given
    (ATTNSERVE_RAY_REPLICAS=4).
    """
    from service.deploy.ray import run

    settings = settings.logged_at(log_level(show))
    run(settings.model_copy(update={"model": settings.model.resolve()}), scaling)
