"""``attnserve deploy triton``, ``attnserve deploy genai`` and ``attnserve deploy ray``."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from attnserve.cli import options as opt
from attnserve.cli.display import log_level, print_json, print_line, set_log_level

__all__ = ["app"]

app = typer.Typer(
    help="Deploy a model to Triton, onnxruntime-genai or Ray Serve.", no_args_is_help=True
)

scaling_option = partial(typer.Option, rich_help_panel="Scaling")


@app.command(epilog="Example: attnserve deploy triton repository --model model-optimized")
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
    instances: Annotated[int, typer.Option(min=1, metavar="N", help="Model instances.")] = 1,
    force: opt.Force = False,
    json: opt.Json = False,
    quiet: opt.Quiet = False,
    verbose: opt.Verbose = False,
    threads: opt.Threads = 0,
    provider: opt.ProviderName = "cpu",
) -> None:
    """Write a Triton model repository: config.pbtxt, the model and warm-up requests."""
    from attnserve.exporters.triton_repository import write_repository

    set_log_level(quiet, verbose)
    written = write_repository(
        model,
        repository,
        name=name,
        max_batch=max_batch,
        instances=instances,
        provider=provider,
        threads=threads,
        max_delay_us=max_delay_us,
        force=force,
    )
    if json:
        print_json(written.to_json())
        return
    batches = (
        f"batches of up to {written.max_batch_size}" if written.max_batch_size else "no batching"
    )
    print_line(
        f"wrote {written.folder}: {batches}, {written.instances} instance(s), {written.provider}"
    )


@app.command(epilog="Example: attnserve deploy genai folder --model decoder-optimized")
def genai(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The new folder.")],
    model: Annotated[
        Path, typer.Option(metavar="PATH", help="An .onnx file or an artifact folder.")
    ],
    force: opt.Force = False,
    json: opt.Json = False,
    quiet: opt.Quiet = False,
    verbose: opt.Verbose = False,
    provider: opt.ProviderName = "cpu",
) -> None:
    """Write a folder for onnxruntime-genai, which generates text: genai_config.json and the model.

    The model is a decoder with a cache.
    """
    from attnserve.exporters.genai_folder import write_genai_folder

    set_log_level(quiet, verbose)
    written = write_genai_folder(model, folder, provider=provider, force=force)
    if json:
        print_json(written.to_json())
        return
    print_line(
        f"wrote {written.folder}: {written.layers} layers, up to {written.context_length} tokens,"
        f" {written.provider}"
    )


@app.command(epilog="Example: attnserve deploy ray model-optimized --replicas 2 --cpus 4")
def ray(
    model: opt.Model,
    host: opt.Host = None,
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, metavar="N", help="Port (default: 8000).")
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="Address of a running Ray cluster (default: start one on this machine).",
        ),
    ] = None,
    replicas: Annotated[
        int | None,
        scaling_option(min=1, metavar="N", help="Minimum number of replicas (default: 1)."),
    ] = None,
    max_replicas: Annotated[
        int | None,
        scaling_option(
            min=1, metavar="N", help="Maximum number of replicas (default: no scaling)."
        ),
    ] = None,
    target_ongoing: Annotated[
        float | None,
        scaling_option(
            metavar="N",
            help="Concurrent requests per replica above which replicas are added (default: 16).",
        ),
    ] = None,
    cpus: Annotated[
        float | None, scaling_option(min=0, metavar="N", help="CPU cores per replica (default: 1).")
    ] = None,
    gpus: Annotated[
        float | None, scaling_option(min=0, metavar="N", help="GPUs per replica (default: 0).")
    ] = None,
    threads: opt.ServerThreads = None,
    provider: opt.ServerProvider = None,
    quiet: opt.Quiet = False,
    verbose: opt.Verbose = False,
) -> None:
    """Serve a model on Ray Serve, with autoscaling over several machines.

    Environment variables set options that are not given
    (ATTNSERVE_RAY_REPLICAS=4).
    """
    from service.deploy.ray import RaySettings, run
    from service.settings import read, read_settings

    settings = read_settings(
        model=model.resolve(), host=host, port=port, threads=threads, provider=provider,
        log_level=log_level(quiet, verbose)
    )  # fmt: skip
    scaling = {
        "replicas": replicas, "max_replicas": max_replicas, "target_ongoing": target_ongoing,
        "cpus": cpus, "gpus": gpus, "address": address,
    }  # fmt: skip
    run(settings, read(RaySettings, scaling))
