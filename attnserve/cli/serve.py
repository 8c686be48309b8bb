"""``attnserve serve``."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from attnserve.cli import options as opt
from attnserve.cli.display import log_level

__all__ = ["app"]

app = typer.Typer()

batching_option = partial(typer.Option, rich_help_panel="Batching and limits")
access_option = partial(typer.Option, rich_help_panel="Access")
quality_option = partial(typer.Option, rich_help_panel="Quality in production")
loading_option = partial(typer.Option, rich_help_panel="Loading of models")


@app.command(
    epilog="Example: attnserve serve model-optimized --port 8000", rich_help_panel=opt.DEPLOY
)
def serve(
    model: Annotated[
        Path,
        typer.Argument(
            metavar="MODEL",
            help="An .onnx file, an artifact folder, or a folder of models"
            " (NAME/VERSION/model.onnx or NAME/model.onnx).",
        ),
    ],
    host: opt.Host = None,
    port: Annotated[
        int | None,
        typer.Option(min=0, max=65535, metavar="N", help="Port (default: 8000); 0: any free port."),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            min=1, max=256, metavar="N", help="Server processes that share the port (default: 1)."
        ),
    ] = None,
    concurrency: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Concurrent runs per process (default: 1)."),
    ] = None,
    max_batch_tokens: Annotated[
        int | None,
        batching_option(
            min=1,
            metavar="N",
            help="Maximum padded tokens of a batch: rows x longest row (default: 512 on a CPU,"
            " 16384 on a GPU).",
        ),
    ] = None,
    max_wait_ms: Annotated[
        float | None,
        batching_option(min=0, metavar="MS", help="Maximum wait for a batch to fill (default: 0)."),
    ] = None,
    max_queue: Annotated[
        int | None,
        batching_option(
            min=0,
            metavar="N",
            help="Maximum rows in the queue (default: 512); the server answers 429 when it is"
            " full.",
        ),
    ] = None,
    timeout_ms: Annotated[
        float | None,
        batching_option(
            metavar="MS",
            help="Default request timeout (default: 30000); the server answers 504 when it is"
            " exceeded.",
        ),
    ] = None,
    api_keys_file: Annotated[
        Path | None,
        access_option(metavar="FILE", help="API keys, one per line (default: no key is required)."),
    ] = None,
    ssl_certfile: Annotated[
        Path | None, access_option(metavar="FILE", help="Certificate: serve HTTPS with it.")
    ] = None,
    ssl_keyfile: Annotated[
        Path | None, access_option(metavar="FILE", help="Private key of the certificate.")
    ] = None,
    ssl_ca_certs: Annotated[
        Path | None,
        access_option(metavar="FILE", help="Authorities of the certificates that clients need."),
    ] = None,
    cors_origins: Annotated[
        str | None,
        access_option(metavar="URL,...", help="Allowed CORS origins, separated by commas."),
    ] = None,
    shadow: Annotated[
        Path | None,
        quality_option(
            metavar="ORIGINAL",
            help="The model that MODEL was optimized from. Compare a share of the answers with it.",
        ),
    ] = None,
    shadow_rate: Annotated[
        float | None,
        quality_option(metavar="R", help="Share of the compared requests (default: 0.005)."),
    ] = None,
    sample_texts: Annotated[
        Path | None,
        quality_option(
            metavar="FILE",
            help="Collect request texts in a file, to calibrate on. It holds what clients send.",
        ),
    ] = None,
    sample_rate: Annotated[
        float | None,
        quality_option(metavar="R", help="Share of the collected texts (default: 0.01)."),
    ] = None,
    sample_mask: Annotated[
        bool | None,
        quality_option(
            "--sample-mask/--no-sample-mask",
            metavar="",
            help="Replace numbers and mail addresses in collected texts (default: off).",
        ),
    ] = None,
    probe: Annotated[
        bool | None,
        loading_option(
            "--probe/--no-probe",
            metavar="",
            help="Load and run each model in a separate process first (default: --probe).",
        ),
    ] = None,
    probe_timeout_s: Annotated[
        float | None, loading_option(metavar="S", help="Timeout of that process (default: 300).")
    ] = None,
    rewrite: Annotated[
        bool | None,
        loading_option(
            "--rewrite/--no-rewrite",
            metavar="",
            help="Use faster equivalent operators, if the separate process confirms equal outputs"
            " (default: --rewrite).",
        ),
    ] = None,
    drain_delay_s: Annotated[
        float | None,
        opt.run_option(
            min=0,
            metavar="S",
            help="Delay at shutdown between not ready and closing the port, for load balancers"
            " (default: 0).",
        ),
    ] = None,
    drain_timeout_s: Annotated[
        float | None,
        opt.run_option(
            min=0.1,
            metavar="S",
            help="Time to answer accepted requests at shutdown; the others are refused"
            " (default: 25).",
        ),
    ] = None,
    threads: opt.ServerThreads = None,
    provider: opt.ServerProvider = None,
    quiet: opt.Quiet = False,
    verbose: opt.Verbose = False,
) -> None:
    """Serve models over HTTP.

    Environment variables set options that are not given (ATTNSERVE_PORT=9000),
    and more settings, which the documentation lists.
    """
    from service.launch import serve as run
    from service.settings import read_settings

    run(
        read_settings(
            model=model,
            host=host,
            port=port,
            workers=workers,
            provider=provider,
            threads=threads,
            concurrency=concurrency,
            max_batch_tokens=max_batch_tokens,
            max_wait_ms=max_wait_ms,
            max_queue=max_queue,
            timeout_ms=timeout_ms,
            api_keys_file=api_keys_file,
            ssl_certfile=ssl_certfile,
            ssl_keyfile=ssl_keyfile,
            ssl_ca_certs=ssl_ca_certs,
            cors_origins=cors_origins,
            shadow=shadow,
            shadow_rate=shadow_rate,
            sample_texts=sample_texts,
            sample_rate=sample_rate,
            sample_mask=sample_mask,
            probe=probe,
            probe_timeout_s=probe_timeout_s,
            rewrite=rewrite,
            drain_delay_s=drain_delay_s,
            drain_timeout_s=drain_timeout_s,
            log_level=log_level(quiet, verbose),
        )
    )
