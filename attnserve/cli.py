"""The command line: parse, call one function, print.

Results go to stdout (a table, or one JSON object with --json); progress, warnings and errors go to
stderr. Exit codes: 0 done and true, 1 a check failed, 2 bad input or usage.
"""

from __future__ import annotations

import logging
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import orjson
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

import attnserve
from attnserve.session import Provider
from graph_passes.errors import AttnserveError, CheckFailed, InvalidArgument

__all__ = ["app", "main"]

app = typer.Typer(
    name="attnserve",
    help="Find attention in any transformer ONNX graph, rewrite it, prove it, measure it, serve it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

out = Console(highlight=False)
err = Console(stderr=True, soft_wrap=True, highlight=False)

Model = Annotated[Path, typer.Argument(help="An .onnx file or an artifact folder.", show_default=False)]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress, no warnings.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Details, and tracebacks of errors.")]
Seed = Annotated[int, typer.Option(help="Makes every random choice repeatable.")]
Threads = Annotated[int, typer.Option(min=0, help="Threads of a run; 0 leaves it to ONNX Runtime.")]
ProviderName = Annotated[Provider, typer.Option(help="Execution provider.")]
Tokenizer = Annotated[
    Path | None, typer.Option(help="tokenizer.json, where it is not beside the model.")
]
Force = Annotated[bool, typer.Option("--force", help="Overwrite an existing output.")]


@app.command()
def export(
    model: Annotated[str, typer.Argument(help="Hugging Face id or local folder.", show_default=False)],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder to write.", show_default=False)],
    task: Annotated[str | None, typer.Option(help="Task head; last_hidden_state by default.")] = None,
    exporter: Annotated[str, typer.Option(help="dynamo or torchscript.")] = "dynamo",
    opset: Annotated[int | None, typer.Option(help="ONNX opset; 18 (dynamo), 17 (torchscript).")] = None,
    attention: Annotated[str, typer.Option(help="sdpa or eager.")] = "sdpa",
    force: Force = False,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    seed: Seed = 0,
) -> None:
    """Export a Hugging Face model to ONNX, checked against PyTorch."""
    _setup(quiet, verbose)
    report = attnserve.export(
        model, output, task=task, exporter=exporter, opset=opset, attention=attention, force=force  # type: ignore[arg-type]
    )
    if json:
        _print_json(report.to_json())
        return
    out.print(
        f"{report.path}: {report.exporter}, opset {report.opset}, {report.attention} attention, "
        f"within {report.relative_error:.0e} of PyTorch, {report.seconds:.0f} s"
    )


@app.command()
def inspect(
    model: Model,
    batch: Annotated[int, typer.Option(min=1, help="Batch size to count at.")] = 1,
    seq: Annotated[int, typer.Option(min=1, help="Sequence length to count at.")] = 128,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    seed: Seed = 0,
) -> None:
    """List every attention that was found and certified, and why the rest was not."""
    _setup(quiet, verbose)
    report = attnserve.inspect(model, batch=batch, sequence=seq, seed=seed)
    if json:
        _print_json(report.to_json())
        return
    shown = report.to_json()
    table = Table(title=f"{model}: attention at batch {batch}, {seq} tokens")
    for column in ("", "name", "form", "heads", "scale", "MMACs", "error", "collaborate"):
        table.add_column(column, overflow="fold", justify="right" if column == "MMACs" else "left")
    for index, block in enumerate(shown["attention"]):
        applies = block["rewrites"]["collaborate"]
        grouped = block["num_kv_heads"] != block["num_heads"]
        heads = f"{block['num_heads']}" + (f"/{block['num_kv_heads']}" if grouped else "")
        table.add_row(
            str(index), block["name"], f"{block['form']}, {block['kind']}",
            f"{heads} x {block['head_size']}", f"{block['scale']:.4g}", f"{block['macs'] / 1e6:.1f}",
            f"{block['max_abs_error']:.0e}", "applies" if applies is True else applies,
        )  # fmt: skip
    out.print(table)
    for miss in shown["missed"]:
        out.print(f"missed {miss['node']}: {miss['reason']}", markup=False)
    total = shown["macs"]["total"]
    out.print(
        f"{len(shown['attention'])} certified, {len(shown['missed'])} missed; "
        f"{report.parameters / 1e6:.2f} M parameters; "
        + (f"{total / 1e9:.3f} GMACs, " if total is not None else "MACs not counted, ")
        + f"{report.attention_macs / 1e9:.3f} of them in attention"
    )
    for node in report.uncounted[:5]:
        out.print(f"not counted: {node}", markup=False)


@app.command()
def optimize(
    model: Model,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="OUT.onnx, or a folder.", show_default=False)
    ],
    collab_dk: Annotated[
        str, typer.Option(help="Shared dimension R: one for all layers, or R1,R2,...", show_default=False)
    ],
    layers: Annotated[
        str | None, typer.Option(help="Layers to rewrite: names or indices, comma separated.")
    ] = None,
    calib: Annotated[
        Path | None, typer.Option(help="Text (a sentence a line), .npz, or a folder of .npz.")
    ] = None,
    tokenizer: Tokenizer = None,
    batch: Annotated[int, typer.Option(min=1, help="Batch size to report costs at.")] = 1,
    seq: Annotated[
        int | None, typer.Option(min=1, help="Length to report costs at; the calibration's median, else 128.")
    ] = None,
    min_cosine: Annotated[
        float | None, typer.Option(help="Fail, and write nothing, below this mean cosine.")
    ] = None,
    external_data: Annotated[
        bool, typer.Option("--external-data", help="Keep the weights in a file beside the model.")
    ] = False,
    threads: Threads = 0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Do everything but write.")] = False,
    force: Force = False,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    seed: Seed = 0,
) -> None:
    """Rewrite a model's attention into collaborative heads; prove it; write it."""
    _setup(quiet, verbose)
    ranks = _integers("--collab-dk", collab_dk, least=None)
    with _progress(quiet) as stage:
        report = attnserve.optimize(
            model,
            output,
            collab_dk=ranks[0] if len(ranks) == 1 else ranks,
            calib=calib,
            tokenizer=tokenizer,
            layers=None if layers is None else [name.strip() for name in layers.split(",")],
            batch=batch,
            sequence=seq,
            min_cosine=min_cosine,
            external_data=external_data,
            threads=threads,
            seed=seed,
            force=force,
            dry_run=dry_run,
            progress=stage,
        )
    if not quiet:
        for warning in report.warnings:
            _say(f"warning: {warning}")
    if json:
        _print_json(report.to_json())
        return
    table = Table(title=f"{report.output}" + (" (dry run: nothing was written)" if dry_run else ""))
    for column in ("block", "rewrite", "R", "relative error"):
        table.add_column(column, overflow="fold")
    for step in report.steps:
        table.add_row(step.block, step.rewrite, str(step.rank), f"{step.relative_error:.4f}")
    out.print(table)
    before, after = report.before, report.after
    out.print(
        f"parameters {before.parameters / 1e6:.2f} M -> {after.parameters / 1e6:.2f} M"
        + (
            f", MACs at {report.batch} x {report.sequence} tokens "
            f"{before.macs / 1e9:.3f} G -> {after.macs / 1e9:.3f} G"
            if before.macs and after.macs
            else ""
        )
    )
    out.print(
        f"cosine to the original: mean {report.fidelity.mean_cosine:.4f}, "
        f"least {report.fidelity.min_cosine:.4f} ({report.fidelity.data})"
    )


@app.command()
def verify(
    original: Annotated[Path, typer.Argument(help="The model as it was.", show_default=False)],
    new: Annotated[Path, typer.Argument(help="The model made from it.", show_default=False)],
    data: Annotated[
        Path | None, typer.Option(help="Text, .npz or a folder of .npz; random inputs without it.")
    ] = None,
    tokenizer: Tokenizer = None,
    min_cosine: Annotated[
        float | None, typer.Option(help="Exit 1 below this mean cosine.")
    ] = None,
    threads: Threads = 0,
    provider: ProviderName = "cpu",
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    seed: Seed = 0,
) -> None:
    """Measure how far a rewritten model is from its original."""
    _setup(quiet, verbose)
    with _progress(quiet) as stage:
        report = attnserve.verify(
            original, new, data=data, tokenizer=tokenizer, provider=provider, threads=threads,
            seed=seed, progress=_counted(stage, "verify"),
        )  # fmt: skip
    if json:
        shown = report.to_json()
        _print_json(shown)
    else:
        table = Table(title=f"{new} against {original}, on {report.data}")
        for column in ("output", "max abs", "mean abs", "relative", "mean cosine", "least cosine"):
            table.add_column(column)
        for o in report.outputs:
            table.add_row(
                o.name, f"{o.max_abs_error:.2e}", f"{o.mean_abs_error:.2e}",
                f"{o.relative_error:.4f}", f"{o.mean_cosine:.5f}", f"{o.min_cosine:.5f}",
            )  # fmt: skip
        out.print(table)
    if min_cosine is not None and report.mean_cosine < min_cosine:
        raise CheckFailed(
            f"mean cosine {report.mean_cosine:.5f} on {report.data}, expected at least {min_cosine}",
            "raise the shared dimension, or calibrate",
        )


@app.command()
def evaluate(
    model: Model,
    task: Annotated[str, typer.Option(help="sts or classification.", show_default=False)],
    data: Annotated[Path, typer.Option(help="A .tsv with a header line.", show_default=False)],
    pooling: Annotated[str | None, typer.Option(help="mean, cls or none; as the artifact says.")] = None,
    max_length: Annotated[int | None, typer.Option(min=1, help="Truncate texts to so many tokens.")] = None,
    tokenizer: Tokenizer = None,
    threads: Threads = 0,
    provider: ProviderName = "cpu",
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    seed: Seed = 0,
) -> None:
    """Score a model on a task: Spearman correlation, or accuracy."""
    _setup(quiet, verbose)
    with _progress(quiet) as stage:
        score = attnserve.evaluate(
            model, task=task, data=data, pooling=pooling, max_length=max_length,  # type: ignore[arg-type]
            tokenizer=tokenizer, provider=provider, threads=threads, seed=seed,
            progress=_counted(stage, "evaluate"),
        )  # fmt: skip
    shown = score.to_json()
    if json:
        _print_json(shown)
        return
    out.print(", ".join(f"{key} {_number(value)}" for key, value in shown.items()))


@app.command()
def bench(
    models: Annotated[
        list[Path], typer.Argument(help="Models; speed-ups are against the first.", show_default=False)
    ],
    batch: Annotated[str, typer.Option(help="Batch sizes, comma separated.")] = "1",
    seq: Annotated[str, typer.Option(help="Sequence lengths, comma separated.")] = "128",
    threads: Annotated[int, typer.Option(min=0, help="Threads of a run.")] = 1,
    provider: ProviderName = "cpu",
    rounds: Annotated[
        int | None, typer.Option(min=1, help="Interleaved rounds a shape; by time if not given.")
    ] = None,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    seed: Seed = 0,
) -> None:
    """Measure latency side by side, in interleaved rounds."""
    _setup(quiet, verbose)
    with _progress(quiet) as stage:
        report = attnserve.bench(
            models, batches=_integers("--batch", batch), sequences=_integers("--seq", seq),
            threads=threads, provider=provider, rounds=rounds, seed=seed,
            progress=_counted(stage, "bench"),
        )  # fmt: skip
    if json:
        _print_json(report.to_json())
        return
    table = Table(title=f"latency, {threads or 'all'} thread(s), {provider}")
    columns = ("model", "batch", "tokens", "p50 ms", "p90", "p99", "speed-up", "95 %", "GMACs", "GMAC/s", "peak MiB")  # fmt: skip
    for column in columns:
        table.add_column(column, justify="left" if column == "model" else "right", overflow="fold")
    for result in report.results:
        r = result.to_json()
        low, high = r["speedup_ci95"]
        gmacs = "-" if r["macs"] is None else f"{r['macs'] / 1e9:.3f}"
        rate = "-" if r["macs"] is None else f"{r['macs'] / 1e6 / r['p50_ms']:.1f}"
        table.add_row(
            r["model"], str(r["batch"]), str(r["sequence"]), f"{r['p50_ms']:.2f}", f"{r['p90_ms']:.2f}",
            f"{r['p99_ms']:.2f}", f"{r['speedup_vs_first']:.2f}x", f"{low:.2f}-{high:.2f}", gmacs, rate,
            f"{r['peak_rss_bytes'] / 2**20:.0f}",
        )  # fmt: skip
    out.print(table)


@app.command()
def serve(
    model: Model,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes any free port.")] = 8000,
    threads: Threads = 0,
    provider: ProviderName = "cpu",
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Serve a model over HTTP; further settings by environment (see service/settings.py)."""
    from service.app import serve as run
    from service.settings import Settings

    _setup(quiet, verbose)
    level = "error" if quiet else "debug" if verbose else "info"
    run(Settings(model=model, host=host, port=port, threads=threads, provider=provider, log_level=level))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the exit code, after one short error where there is one."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        result = app(args=given, prog_name="attnserve", standalone_mode=False)
    except AttnserveError as error:
        _show(error)
        _trace(given)
        return error.exit_code
    except KeyboardInterrupt:
        _say("interrupted: nothing half-written is left behind")
        return 130
    except Exception as error:
        if (usage := getattr(error, "format_message", None)) is not None:  # click's own errors
            context = getattr(error, "ctx", None)
            command = getattr(context, "command_path", "attnserve")
            if message := usage():
                _show(AttnserveError(message, f"see `{command} --help`"))
            return 2
        if type(error).__name__ in ("Abort", "Exit"):
            return getattr(error, "exit_code", 130)
        _show(
            AttnserveError(
                f"unexpected {type(error).__name__}: {str(error)[:300]}",
                "add --verbose for the traceback, and please report it with the input",
            )
        )
        _trace(given)
        return 2
    return result if isinstance(result, int) else 0


def _setup(quiet: bool, verbose: bool) -> None:
    level = logging.ERROR if quiet else logging.DEBUG if verbose else logging.WARNING
    logging.getLogger("attnserve").setLevel(level)


def _say(text: str) -> None:
    err.print(text, markup=False)


def _show(error: AttnserveError) -> None:
    _say(f"error: {error.what}" + (f"\n  {error.fix}" if error.fix else ""))


def _trace(arguments: Sequence[str]) -> None:
    if {"-v", "--verbose"} & set(arguments):
        traceback.print_exc(file=sys.stderr)


def _print_json(value: dict[str, Any]) -> None:
    sys.stdout.write(orjson.dumps(value, option=orjson.OPT_INDENT_2).decode() + "\n")


def _number(value: object) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(_number(v) for v in value) + "]"
    return f"{value:.4f}" if isinstance(value, float) else str(value)


def _integers(option: str, text: str, *, least: int | None = 1) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError as error:
        raise InvalidArgument(
            f"{option} {text!r}: expected whole numbers, comma separated", f"for example {option} 1,8"
        ) from error
    if least is not None and min(numbers) < least:
        raise InvalidArgument(f"{option} {text!r}: expected numbers from {least} up", "raise it")
    return numbers


@contextmanager
def _progress(quiet: bool) -> Iterator[Callable[[str, int, int], None]]:
    """One bar a stage on stderr, with the time left; nothing where stderr is no terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=err, transient=True, disable=quiet or not err.is_terminal) as bars:
        tasks: dict[str, Any] = {}

        def stage(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total)
            bars.update(tasks[what], completed=done, total=total)

        yield stage


def _counted(stage: Callable[[str, int, int], None], what: str) -> Callable[[int, int], None]:
    return lambda done, total: stage(what, done, total)


if __name__ == "__main__":
    sys.exit(main())
