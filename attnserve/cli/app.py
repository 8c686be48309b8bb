"""The command line: parse, call one function, print.

Results go to stdout (a table, or one JSON object with --json); progress, warnings and errors go to
stderr. Exit codes: 0 done and true, 1 a check failed, 2 bad input or usage.
"""

from __future__ import annotations

import logging
import re
import sys
import traceback
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table

import attnserve
from attnserve.choices import (
    Alignment,
    Attention,
    Exporter,
    Importance,
    Mixing,
    Pooling,
    Precision,
    TaskName,
)
from attnserve.context import Provider

if TYPE_CHECKING:  # what imports ONNX is imported where it is used: `--help` does not need it
    from attnserve.checks.benchmark import Measurement
    from attnserve.planning.report import PlanReport, Point
    from graph_passes.errors import AttnserveError

__all__ = ["app", "main"]

app = typer.Typer(
    name="attnserve",
    help="Find attention in any transformer ONNX graph; rewrite, prove, measure and serve it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

INTERRUPTED = 130
"""The exit code of a program that Ctrl-C ended."""

out = Console(highlight=False)
err = Console(stderr=True, soft_wrap=True, highlight=False)

Model = Annotated[
    Path, typer.Argument(help="An .onnx file or an artifact folder.", show_default=False)
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress, no warnings.")]
Verbose = Annotated[
    bool, typer.Option("--verbose", "-v", help="Details, and tracebacks of errors.")
]
Seed = Annotated[int, typer.Option(min=0, help="Makes every random choice repeatable.")]
Threads = Annotated[int, typer.Option(min=0, help="Threads of a run; 0 leaves it to ONNX Runtime.")]
ProviderName = Annotated[Provider, typer.Option(help="Execution provider.")]
Tokenizer = Annotated[
    Path | None, typer.Option(help="tokenizer.json, where it is not beside the model.")
]
Keep = Annotated[
    float | None,
    typer.Option(
        help="Find the fastest model that keeps this much: of the mean output cosine, or with "
        "--eval-data of the task's score.",
        show_default=False,
    ),
]
TargetSpeedup = Annotated[
    float | None,
    typer.Option(help="Or the model that loses least and is so much faster.", show_default=False),
]
EvalData = Annotated[
    Path | None, typer.Option(help="A .tsv to score on, for --keep.", show_default=False)
]
ScoredTask = Annotated[
    TaskName | None, typer.Option(help="What to score on --eval-data.", show_default=False)
]
Allow = Annotated[
    str | None,
    typer.Option(help="What a search may change beyond attention: ffn.", show_default=False),
]
Fp16 = Annotated[bool, typer.Option("--fp16", help="16-bit weights, after all else.")]
Bf16 = Annotated[
    bool, typer.Option("--bf16", help="16-bit weights with the range of 32, for GPUs alone.")
]
Int8 = Annotated[
    bool,
    typer.Option("--int8", help="8-bit integers, after all else; weights of 7 bits, for any CPU."),
]
Int8Full = Annotated[
    bool,
    typer.Option(
        "--int8-full",
        help="The same with weights of 8 bits: for CPUs with VNNI, AMX or ARM dot products only.",
    ),
]
Force = Annotated[bool, typer.Option("--force", help="Overwrite an existing output.")]


def _print_version(wanted: bool) -> None:
    if wanted:
        _line(f"attnserve {attnserve.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Options of the program itself."""


@app.command()
def export(
    model: Annotated[
        str, typer.Argument(help="Hugging Face id or local folder.", show_default=False)
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Folder to write.", show_default=False)
    ],
    task: Annotated[
        str | None, typer.Option(help="Task head; last_hidden_state by default.")
    ] = None,
    exporter: Annotated[Exporter, typer.Option(help="The tracer of PyTorch.")] = "dynamo",
    opset: Annotated[
        int | None, typer.Option(help="ONNX opset; 18 (dynamo), 17 (torchscript).")
    ] = None,
    attention: Annotated[Attention, typer.Option(help="The implementation to trace.")] = "sdpa",
    force: Force = False,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    seed: Seed = 0,
) -> None:
    """Export a Hugging Face model to ONNX, checked against PyTorch."""
    _setup(quiet, verbose)
    report = attnserve.export(
        model,
        output,
        task=task,
        exporter=exporter,
        opset=opset,
        attention=attention,
        force=force,
    )
    if json:
        _print_json(report.to_json())
        return
    _line(
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
    blocks = shown["attention"]
    names, legend = _short([block["name"] for block in blocks], room=out.width - 66)
    table = _table(
        f"{model}: attention at batch {batch}, {seq} tokens",
        ("", "name", "form", "heads", ">scale", ">MMACs", ">error", "rewrites"),
    )
    refused: dict[str, dict[str, list[int]]] = {}
    for index, (block, name) in enumerate(zip(blocks, names, strict=True)):
        rewrites = block["rewrites"]
        for rewrite, reason in rewrites.items():
            if reason is not True:
                refused.setdefault(reason, {}).setdefault(rewrite, []).append(index)
        applies = [rewrite for rewrite, reason in rewrites.items() if reason is True]
        grouped = block["num_kv_heads"] != block["num_heads"]
        heads = f"{block['num_heads']}" + (f"/{block['num_kv_heads']}" if grouped else "")
        reused = f", {block['reused_heads']} reused" if block["reused_heads"] else ""
        table.add_row(
            str(index),
            name,
            block["form"] + (" cross" if block["kind"] == "cross" else ""),
            "-" if block["form"] == "skip" else f"{heads} x {block['head_size']}{reused}",
            "-" if block["form"] == "skip" else f"{block['scale']:.4g}",
            f"{block['macs'] / 1e6:.1f}",
            f"{block['max_abs_error']:.0e}",
            "all" if len(applies) == len(rewrites) else ", ".join(applies) or "none",
        )
    if blocks:
        out.print(table)
    if legend:
        _line(legend)
    for reason, without in refused.items():
        for layers in dict.fromkeys(tuple(layers) for layers in without.values()):
            names = [rewrite for rewrite, where in without.items() if tuple(where) == layers]
            _line(f"no {' or '.join(names)} for {_ranges(layers)}: {reason}")
    for miss in shown["missed"]:
        _line(f"missed {miss['node']}: {miss['reason']}")
    total = shown["macs"]["total"]
    _line(
        f"{len(blocks)} certified, {len(shown['missed'])} missed; "
        f"{report.parameters / 1e6:.2f} M parameters; "
        + (f"{total / 1e9:.3f} GMACs, " if total is not None else "MACs not counted, ")
        + f"{report.attention_macs / 1e9:.3f} of them in attention"
    )
    uncounted: dict[str, list[str]] = {}
    for node, _, reason in (line.partition(": ") for line in report.uncounted):
        uncounted.setdefault(reason, []).append(node)
    for reason, nodes in list(uncounted.items())[:5]:
        more = f" and {len(nodes) - 1} more" if len(nodes) > 1 else ""
        _line(f"not counted: {nodes[0]}{more}: {reason}")


@app.command()
def analyze(
    model: Model,
    calib: Annotated[
        Path,
        typer.Option(
            help="Text (a sentence a line), .npz, or a folder of .npz.", show_default=False
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="Folder to write; NAME-analysis beside the model by default.",
            show_default=False,
        ),
    ] = None,
    tokenizer: Tokenizer = None,
    groups: Annotated[
        int | None,
        typer.Option(help="Heads of each layer that Voting-to-Stay keeps; half by default."),
    ] = None,
    threads: Threads = 0,
    provider: ProviderName = "cpu",
    force: Force = False,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    seed: Seed = 0,
) -> None:
    """Measure what attention does on a text: what repeats, what is spare, what heads are worth."""
    _setup(quiet, verbose)
    with _progress(quiet) as stage:
        analysis = attnserve.analyze(
            model,
            output,
            calib=calib,
            tokenizer=tokenizer,
            groups=groups,
            provider=provider,
            threads=threads,
            seed=seed,
            force=force,
            progress=stage,
        )
    if json:
        _print_json({"output": str(analysis.output), **analysis.to_json()})
        return
    rows = analysis.summary()
    names, legend = _short([row.name for row in rows], room=out.width - 56)
    table = _table(
        f"{model}: attention on {calib}",
        ("", "name", "heads", ">most like", ">99 % in", ">weakest head", ">stay"),
    )
    for row, name in zip(rows, names, strict=True):
        table.add_row(
            str(row.index),
            name,
            f"{row.num_heads} x {row.head_size}",
            "-" if row.nearest is None else f"{row.nearest} ({row.similarity:.2f})",
            "-" if row.rank is None else f"{row.rank} of {row.full_rank}",
            f"{row.weakest_head} ({row.weakest_share:.1%})",
            str(row.kept),
        )
    out.print(table)
    if legend:
        _line(legend)
    for each in analysis.not_analysed:
        _line(f"not analysed {each.name}: {each.reason}")
    assert analysis.output is not None
    _line(f"wrote {analysis.output / 'report.html'}")


@app.command()
def optimize(
    model: Model,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="OUT.onnx, or a folder; NAME-optimized beside the model by default.",
            show_default=False,
        ),
    ] = None,
    collab_dk: Annotated[
        str | None,
        typer.Option(
            help="Shared dimension R: one for all layers, or R1,R2,...", show_default=False
        ),
    ] = None,
    collab_cache: Annotated[
        bool,
        typer.Option(
            "--collab-cache",
            help="Rewrite a decoder's cached keys too: its cache shrinks to R, and changes shape.",
        ),
    ] = False,
    mixing: Annotated[
        Mixing,
        typer.Option(help="A head reads all shared dimensions, some, or what costs less."),
    ] = "auto",
    head_dk: Annotated[
        int | None,
        typer.Option(
            help="Dimensions a head reads on average (sparse); its own without --collab-dk.",
            show_default=False,
        ),
    ] = None,
    reuse: Annotated[
        str | None,
        typer.Option(
            help="Heads that take the probabilities of earlier layers: partial:K[:P], full:P, "
            "alternate, all-end, auto, or a .json file of edges.",
            show_default=False,
        ),
    ] = None,
    align: Annotated[
        Alignment, typer.Option(help="Reused heads take the most similar ones, or by index.")
    ] = "similarity",
    prune: Annotated[
        float | None,
        typer.Option(help="Share of the heads that goes, least important first."),
    ] = None,
    importance: Annotated[
        Importance,
        typer.Option(help="What others cannot write, loss without it, or Voting-to-Stay."),
    ] = "energy",
    prune_heads: Annotated[
        Path | None, typer.Option(help='Or a mask: {"layer": [1, 0, ...]}.', show_default=False)
    ] = None,
    skip: Annotated[
        str | None,
        typer.Option(
            help="Layers whose attention becomes an affine map, or LAYER:constant.",
            show_default=False,
        ),
    ] = None,
    ffn: Annotated[
        float | None,
        typer.Option(help="Share of the feed-forward neurons that goes.", show_default=False),
    ] = None,
    keep: Keep = None,
    target_speedup: TargetSpeedup = None,
    eval_data: EvalData = None,
    task: ScoredTask = None,
    allow: Allow = None,
    fp16: Fp16 = False,
    bf16: Bf16 = False,
    int8: Int8 = False,
    int8_full: Int8Full = False,
    plan: Annotated[
        Path | None,
        typer.Option(help="Carry out what `attnserve plan` wrote.", show_default=False),
    ] = None,
    refit: Annotated[
        bool,
        typer.Option(
            "--refit/--no-refit", help="With --calib, fit the outputs of rewritten layers again."
        ),
    ] = True,
    layers: Annotated[
        str | None, typer.Option(help="Layers to rewrite: names or indices, comma separated.")
    ] = None,
    calib: Annotated[
        Path | None, typer.Option(help="Text (a sentence a line), .npz, or a folder of .npz.")
    ] = None,
    tokenizer: Tokenizer = None,
    batch: Annotated[int, typer.Option(min=1, help="Batch size to be fast at.")] = 1,
    seq: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Length to be fast at, and to report costs at; the calibration's, else 128.",
        ),
    ] = None,
    min_cosine: Annotated[
        float | None, typer.Option(help="Fail, and write nothing, below this mean cosine.")
    ] = None,
    external_data: Annotated[
        bool, typer.Option("--external-data", help="Keep the weights in a file beside the model.")
    ] = False,
    threads: Threads = 0,
    provider: ProviderName = "cpu",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Do everything but write.")] = False,
    force: Force = False,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    seed: Seed = 0,
) -> None:
    """Rewrite a model by hand (--prune ...) or by search (--keep); prove it; write it."""
    _setup(quiet, verbose)
    ranks = None if collab_dk is None else _integers("--collab-dk", collab_dk, least=None)
    with _progress(quiet) as stage:
        report = attnserve.optimize(
            model,
            output,
            collab_dk=ranks[0] if ranks is not None and len(ranks) == 1 else ranks,
            collab_cache=collab_cache,
            mixing=mixing,
            head_dk=head_dk,
            reuse=reuse,
            align=align,
            prune=prune,
            importance=importance,
            prune_heads=prune_heads,
            skip=() if skip is None else _names(skip),
            ffn=ffn,
            keep=keep,
            target_speedup=target_speedup,
            eval_data=eval_data,
            task=task,
            allow=_allowed(allow),
            plan=plan,
            precision=_precision(fp16, bf16, int8, int8_full),
            refit=refit,
            calib=calib,
            tokenizer=tokenizer,
            layers=None if layers is None else _names(layers),
            batch=batch,
            sequence=seq,
            min_cosine=min_cosine,
            external_data=external_data,
            provider=provider,
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
        _print_json({"output": str(report.output), **report.to_json()})
        return
    steps = [step for step in report.steps if step.rewrite != "fuse"]
    names, legend = _short([step.block for step in steps], room=out.width - 66)
    table = _table(
        f"{report.output} (dry run: nothing was written)" if dry_run else f"wrote {report.output}",
        ("block", "rewrite", ">left", ">R", ">error", ">fitted", ">MMACs"),
    )
    for step, name in zip(steps, names, strict=True):
        rank = step.rank if step.head_size is None else f"{step.rank} ({step.head_size} a head)"
        left = "" if step.heads is None else f"{step.heads} heads"
        left = left if step.neurons is None else f"{step.neurons} neurons"
        cells = (left, rank)
        table.add_row(
            name,
            step.rewrite,
            *("" if cell is None else str(cell) for cell in cells),
            *("-" if e is None else f"{e:.4f}" for e in (step.relative_error, step.fitted_error)),
            "-" if step.macs_after is None else f"{step.macs_after / 1e6:.1f}",
        )
    if steps:
        out.print(table)
    if legend:
        _line(legend)
    before, after = report.before, report.after
    if report.plan.precision != "float32":
        _line(f"weights in {report.plan.precision}")
    _line(f"parameters {before.parameters / 1e6:.2f} M -> {after.parameters / 1e6:.2f} M")
    if before.macs and after.macs:
        _line(
            f"MACs at {report.batch} x {report.sequence} tokens: "
            f"{before.macs / 1e9:.3f} G -> {after.macs / 1e9:.3f} G"
        )
    _line(
        f"cosine to the original: mean {report.fidelity.mean_cosine:.4f}, "
        f"least {report.fidelity.min_cosine:.4f} ({report.fidelity.data})"
    )
    if report.found is not None:
        _line(report.found.verdict)


@app.command()
def plan(
    model: Model,
    calib: Annotated[
        Path,
        typer.Option(
            help="Text (a sentence a line), .npz, or a folder of .npz.", show_default=False
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="A .json file, with a plot beside it; plan.json beside the model by default.",
            show_default=False,
        ),
    ] = None,
    keep: Keep = None,
    target_speedup: TargetSpeedup = None,
    eval_data: EvalData = None,
    task: ScoredTask = None,
    allow: Allow = None,
    fp16: Fp16 = False,
    bf16: Bf16 = False,
    int8: Int8 = False,
    int8_full: Int8Full = False,
    tokenizer: Tokenizer = None,
    batch: Annotated[int, typer.Option(min=1, help="Batch size to be fast at.")] = 1,
    seq: Annotated[
        int | None,
        typer.Option(min=1, help="Length to be fast at; the calibration text's, else 128."),
    ] = None,
    threads: Threads = 0,
    provider: ProviderName = "cpu",
    force: Force = False,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    seed: Seed = 0,
) -> None:
    """Find the fastest form that keeps enough, by measurement; `optimize --plan` carries it out."""
    _setup(quiet, verbose)
    with _progress(quiet) as stage:
        report = attnserve.plan(
            model,
            output,
            calib=calib,
            keep=keep,
            target_speedup=target_speedup,
            eval_data=eval_data,
            task=task,
            allow=_allowed(allow),
            precision=_precision(fp16, bf16, int8, int8_full),
            tokenizer=tokenizer,
            batch=batch,
            sequence=seq,
            provider=provider,
            threads=threads,
            seed=seed,
            force=force,
            progress=stage,
        )
    if json:
        _print_json({"output": str(report.output), **report.to_json()})
        return
    _show_plan(report)
    assert report.output is not None
    plot = report.output.with_suffix(".svg")
    _line(f"wrote {report.output}" + (f", {plot}" if plot.exists() else ""))


def _allowed(text: str | None) -> list[Any]:
    return [] if text is None else _names(text)


def _precision(fp16: bool, bf16: bool, int8: bool, int8_full: bool) -> Precision:
    asked: dict[str, tuple[bool, Precision]] = {
        "--fp16": (fp16, "float16"), "--bf16": (bf16, "bfloat16"), "--int8": (int8, "int8"),
        "--int8-full": (int8_full, "int8-full"),
    }  # fmt: skip
    given = [name for name, (is_given, _) in asked.items() if is_given]
    if len(given) > 1:
        from graph_passes.errors import InvalidArgument

        raise InvalidArgument(f"{' and '.join(given)} exclude each other", "give one of them")
    return asked[given[0]][1] if given else "float32"


def _show_plan(report: PlanReport) -> None:
    """What was decided for each block, what was found on the way, and how fast it all is."""
    if report.decisions:
        names, legend = _short([d.block for d in report.decisions], room=out.width - 52)
        table = _table(
            "the plan, block by block",
            ("block", "kept", "written", ">ms", ">before", ">speed-up", ">loss"),
        )
        for decision, name in zip(report.decisions, names, strict=True):
            what = "heads" if decision.kind == "attention" else "neurons"
            cut = "" if decision.head_size is None else f" x {decision.head_size}"
            cut += "" if decision.rank is None else f" of {decision.rank} shared"
            table.add_row(
                name,
                f"{decision.kept} of {decision.count} {what}{cut}",
                decision.written,
                f"{decision.ms_after:.3f}",
                f"{decision.ms_before:.3f}",
                f"{decision.ms_before / decision.ms_after:.2f}x",
                f"{decision.predicted_loss:.4f}",
            )
        out.print(table)
        if legend:
            _line(legend)
        for decision, name in zip(report.decisions, names, strict=True):
            _line(f"{name}, {decision.kind.replace('_', '-')}: {decision.why}")
    table = _table(
        "the fastest choices found, by what they lose",
        (">speed-up", ">cosine, predicted", ">measured", ">lost of the goal"),
    )
    for point in _few(report.front):
        table.add_row(
            f"{point.speedup:.2f}x",
            f"{1 - point.predicted_loss:.4f}",
            "" if point.cosine is None else f"{point.cosine:.4f}",
            "" if point.measured_loss is None else f"{point.measured_loss:.4f}",
        )
    out.print(table)
    if report.speeds:
        table = _table(
            f"the whole model, {report.asked['threads'] or 'all'} thread(s), "
            f"{report.asked['provider']}",
            (">batch x tokens", ">original ms", ">ms", ">speed-up"),
        )
        for speed in report.speeds:
            table.add_row(
                f"{speed.batch} x {speed.sequence}",
                f"{speed.original_ms:.2f}",
                f"{speed.ms:.2f}",
                f"{speed.speedup:.2f}x",
            )
        out.print(table)
    _line(report.verdict)


def _few(points: Sequence[Point], most: int = 12) -> list[Point]:
    """Those that were built, and some of the others between."""
    built = [point for point in points if point.measured_loss is not None]
    step = max(len(points) // max(most - len(built), 1), 1)
    return [p for i, p in enumerate(points) if p.measured_loss is not None or i % step == 0]


@app.command()
def verify(
    original: Annotated[Path, typer.Argument(help="The model as it was.", show_default=False)],
    new: Annotated[Path, typer.Argument(help="The model made from it.", show_default=False)],
    data: Annotated[
        Path | None, typer.Option(help="Text, .npz or a folder of .npz; random inputs without it.")
    ] = None,
    tokenizer: Tokenizer = None,
    min_cosine: Annotated[float | None, typer.Option(help="Exit 1 below this mean cosine.")] = None,
    threads: Threads = 0,
    provider: ProviderName = "cpu",
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    seed: Seed = 0,
) -> None:
    """Measure how far a rewritten model is from its original."""
    from attnserve.checks.compare import check_cosine_bound

    _setup(quiet, verbose)
    check_cosine_bound(min_cosine)
    with _progress(quiet) as stage:
        report = attnserve.verify(
            original, new, data=data, tokenizer=tokenizer, provider=provider, threads=threads,
            seed=seed, progress=stage,
        )  # fmt: skip
    if json:
        shown = report.to_json()
        _print_json(shown)
    else:
        table = _table(
            f"{new} against {original}, on {report.data}",
            ("output", ">max abs", ">mean abs", ">relative", ">mean cosine", ">least cosine"),
        )
        for output in report.outputs:
            table.add_row(
                output.name,
                f"{output.max_abs_error:.2e}",
                f"{output.mean_abs_error:.2e}",
                f"{output.relative_error:.4f}",
                f"{output.mean_cosine:.5f}",
                f"{output.min_cosine:.5f}",
            )
        out.print(table)
    if min_cosine is not None and report.mean_cosine < min_cosine:
        from graph_passes.errors import CheckFailed

        raise CheckFailed(
            f"mean cosine {report.mean_cosine:.5f} on {report.data}, "
            f"expected at least {min_cosine}",
            "ask for less: more heads or dimensions that stay, a higher --keep, or text like this"
            " one to calibrate on",
        )


@app.command()
def evaluate(
    model: Model,
    task: Annotated[TaskName, typer.Option(help="What to score.", show_default=False)],
    data: Annotated[Path, typer.Option(help="A .tsv with a header line.", show_default=False)],
    pooling: Annotated[
        Pooling | None, typer.Option(help="How tokens become a vector; as the artifact says.")
    ] = None,
    max_length: Annotated[
        int | None, typer.Option(min=1, help="Truncate texts to so many tokens.")
    ] = None,
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
            model,
            task=task,
            data=data,
            pooling=pooling,
            max_length=max_length,
            tokenizer=tokenizer,
            provider=provider,
            threads=threads,
            seed=seed,
            progress=stage,
        )
    shown = score.to_json()
    if json:
        _print_json(shown)
        return
    _line(", ".join(f"{key} {_number(value)}" for key, value in shown.items()))


@app.command()
def bench(
    models: Annotated[
        list[Path],
        typer.Argument(help="Models; speed-ups are against the first.", show_default=False),
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
            progress=stage,
        )  # fmt: skip
    if json:
        _print_json(report.to_json())
        return
    names, legend = _model_names(models)
    for line in legend:
        _line(line)
    table = _table(
        f"latency in ms, batch x tokens, {threads or 'all'} thread(s), {provider}",
        ("model", ">p50", ">p90", ">p99", ">speed-up", ">95 %", ">GMACs", ">GMAC/s", ">MiB")
        + ((">GPU MiB",) if provider == "cuda" else ()),
    )
    for index, result in enumerate(report.results):
        if index % len(models) == 0:
            table.add_section()
            table.add_row(f"{result.batch} x {result.sequence}", style="bold")
        peak = "-" if result.peak_gpu_bytes is None else f"{result.peak_gpu_bytes / 2**20:.0f}"
        more = (peak,) if provider == "cuda" else ()
        table.add_row(names[index % len(models)], *_latency_cells(result), *more)
    out.print(table)


def _latency_cells(result: Measurement) -> Sequence[str]:
    low, high = result.speedup_ci95
    rate = result.gmacs_per_second
    return (
        *(f"{time:.2f}" for time in (result.p50_ms, result.p90_ms, result.p99_ms)),
        f"{result.speedup_vs_first:.2f}x",
        f"{low:.2f}-{high:.2f}",
        "-" if result.macs is None else f"{result.macs / 1e9:.3f}",
        "-" if rate is None else f"{rate:.1f}",
        f"{result.peak_rss_bytes / 2**20:.0f}",
    )


# What `serve` and `deploy ray` share; None leaves it to the environment (service/settings.py).
Host = Annotated[str | None, typer.Option(help="Address to listen on; 127.0.0.1 where left out.")]
ServedBy = Annotated[
    str | None,
    typer.Option(
        help="cpu, cuda, or auto: cuda where a GPU can be used (where left out).",
        show_default=False,
    ),
]
ServedWith = Annotated[
    int | None, typer.Option(min=0, help="Threads of one run; 0 leaves it to ONNX Runtime.")
]


@app.command()
def serve(
    model: Annotated[
        Path,
        typer.Argument(
            help="An .onnx file, an artifact folder, or a folder of models"
            " (NAME/VERSION/model.onnx or NAME/model.onnx)."
        ),
    ],
    host: Host = None,
    port: Annotated[
        int | None,
        typer.Option(min=0, max=65535, help="8000 where left out; 0 takes any free port."),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(min=1, max=256, help="Processes that serve, as one; 1 where left out."),
    ] = None,
    provider: ServedBy = None,
    threads: ServedWith = None,
    concurrency: Annotated[
        int | None, typer.Option(min=1, help="Runs at once; 1 where left out.")
    ] = None,
    max_batch_tokens: Annotated[
        int | None, typer.Option(min=1, help="Padded tokens of a batch: rows x longest.")
    ] = None,
    max_wait_ms: Annotated[
        float | None,
        typer.Option(min=0, help="How long a free slot waits for a batch to fill; 0: not at all."),
    ] = None,
    max_queue: Annotated[
        int | None, typer.Option(min=0, help="Rows that may wait; past it the answer is 429.")
    ] = None,
    timeout_ms: Annotated[
        float | None, typer.Option(help="Time of a request that names none; past it 504.")
    ] = None,
    api_keys_file: Annotated[
        Path | None, typer.Option(help="A file with an API key a line; else everybody may ask.")
    ] = None,
    cors_origins: Annotated[
        str | None, typer.Option(help="Origins whose pages may ask, separated by commas.")
    ] = None,
    probe: Annotated[
        bool | None,
        typer.Option(
            "--probe/--no-probe",
            help="Load and run a model in a process of its own before it is trusted.",
        ),
    ] = None,
    probe_timeout_s: Annotated[
        float | None, typer.Option(help="Time for a model to load and run once; 300.")
    ] = None,
    rewrite: Annotated[
        bool | None,
        typer.Option(
            "--rewrite/--no-rewrite",
            help="Run a model in faster operators where the probe finds them to compute the same.",
        ),
    ] = None,
    drain_delay_s: Annotated[
        float | None,
        typer.Option(min=0, help="Seconds between not being ready and not listening any more."),
    ] = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Serve models over HTTP.

    What is not given here comes from the environment (ATTNSERVE_PORT=9000); limits of requests do
    only: see service/settings.py.
    """
    from service.app import serve as run
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
            cors_origins=cors_origins,
            probe=probe,
            probe_timeout_s=probe_timeout_s,
            rewrite=rewrite,
            drain_delay_s=drain_delay_s,
            log_level="error" if quiet else "debug" if verbose else None,
        )
    )


deploy = typer.Typer(
    help="Put a model into another server: Triton, Ray Serve.", no_args_is_help=True
)
app.add_typer(deploy, name="deploy")


@deploy.command()
def triton(
    repository: Annotated[
        Path, typer.Argument(metavar="DIR", help="Triton's repository.", show_default=False)
    ],
    model: Annotated[
        Path, typer.Option(help="An .onnx file or an artifact folder.", show_default=False)
    ],
    name: Annotated[
        str | None, typer.Option(help="Of the model there; its own by default.")
    ] = None,
    max_batch: Annotated[
        int | None,
        typer.Option(help="Rows of a batch; 0 for none; 32 where the model can.", min=0),
    ] = None,
    max_delay_us: Annotated[
        int, typer.Option(help="Microseconds to wait for a batch to fill.", min=0)
    ] = 0,
    instances: Annotated[int, typer.Option(help="Copies that run at once.", min=1)] = 1,
    threads: Threads = 0,
    provider: ProviderName = "cpu",
    force: Force = False,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Write a Triton model repository: config.pbtxt, the model, and warm-up requests."""
    from service.deploy.triton import write_repository

    _setup(quiet, verbose)
    written = write_repository(
        model, repository, name=name, max_batch=max_batch, instances=instances,
        provider=provider, threads=threads, max_delay_us=max_delay_us, force=force,
    )  # fmt: skip
    if json:
        _print_json(written.to_json())
        return
    batches = (
        f"batches of up to {written.max_batch_size}" if written.max_batch_size else "no batches"
    )
    _line(f"{written.folder}: {batches}, {written.instances} instance(s), {written.provider}")


@deploy.command("ray")
def deploy_ray(
    model: Model,
    host: Host = None,
    port: Annotated[int | None, typer.Option(min=1, max=65535, help="8000 where left out.")] = None,
    replicas: Annotated[
        int | None, typer.Option(min=1, help="The least that run; 1 where left out.")
    ] = None,
    max_replicas: Annotated[
        int | None, typer.Option(min=1, help="Scale up to so many; left out, no scaling.")
    ] = None,
    target_ongoing: Annotated[
        float | None,
        typer.Option(help="Requests a replica has before another starts; 16 where left out."),
    ] = None,
    cpus: Annotated[
        float | None, typer.Option(min=0, help="Cores a replica reserves; 1 where left out.")
    ] = None,
    gpus: Annotated[
        float | None, typer.Option(min=0, help="GPUs a replica reserves; none where left out.")
    ] = None,
    address: Annotated[
        str | None, typer.Option(help="Of a running Ray cluster; else one is started here.")
    ] = None,
    threads: ServedWith = None,
    provider: ServedBy = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Serve on Ray Serve: replicas, autoscaling, several machines.

    What is not given here comes from the environment (ATTNSERVE_RAY_REPLICAS=4).
    """
    from service.deploy.ray import RaySettings, run
    from service.settings import read, read_settings

    settings = read_settings(
        model=model.resolve(), host=host, port=port, threads=threads, provider=provider,
        log_level="error" if quiet else "debug" if verbose else None,
    )  # fmt: skip
    given = {
        "replicas": replicas, "max_replicas": max_replicas, "target_ongoing": target_ongoing,
        "cpus": cpus, "gpus": gpus, "address": address,
    }  # fmt: skip
    run(settings, read(RaySettings, given))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the exit code, after one short error where there is one."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        result = app(args=given, prog_name="attnserve", standalone_mode=False)
    except KeyboardInterrupt:
        return _interrupted()
    except Exception as error:
        return _failed(error, given)
    if result == INTERRUPTED:  # what typer makes of Ctrl-C
        return _interrupted()
    return result if isinstance(result, int) else 0


def _failed(error: Exception, arguments: Sequence[str]) -> int:
    """Print one short error; returns the exit code."""
    from graph_passes.errors import AttnserveError

    if (usage := getattr(error, "format_message", None)) is not None:  # click's own errors
        context = getattr(error, "ctx", None)
        command = getattr(context, "command_path", "attnserve")
        if message := usage():
            _show(AttnserveError(message, f"see `{command} --help`"))
        return 2
    if type(error).__name__ == "Abort":
        return _interrupted()
    if isinstance(error, AttnserveError):
        _show(error)
    elif isinstance(error, OSError):  # a path that no check could foresee
        where = f"{error.filename}: " if error.filename else ""
        _show(AttnserveError(f"{where}{error.strerror or error}", "check the path"))
    else:
        _show(
            AttnserveError(
                f"unexpected {type(error).__name__}: {str(error)[:300]}",
                "add --verbose for the traceback, and please report it with the input",
            )
        )
    if {"-v", "--verbose"} & set(arguments):
        traceback.print_exc(file=sys.stderr)
    return error.exit_code if isinstance(error, AttnserveError) else 2


def _setup(quiet: bool, verbose: bool) -> None:
    level = logging.ERROR if quiet else logging.DEBUG if verbose else logging.WARNING
    logging.getLogger("attnserve").setLevel(level)


def _interrupted() -> int:
    _say("interrupted: no partial output was written")
    return INTERRUPTED


def _say(text: str) -> None:
    err.print(text, markup=False)


def _line(text: str) -> None:
    """A sentence on stdout, on one line for whoever reads it by program."""
    out.print(text, markup=False, soft_wrap=True)


def _table(title: str, columns: Sequence[str]) -> Table:
    """Columns by name; ``>`` before it aligns to the right. It fits 80 characters without lines.

    The title is printed at once, on one line: a table would wrap it at its own width.
    """
    out.print(f"[bold]{escape(title)}[/bold]", soft_wrap=True)
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for column in columns:
        right = column.startswith(">")
        table.add_column(
            column.removeprefix(">"), justify="right" if right else "left", overflow="fold"
        )
    return table


def _ranges(numbers: Sequence[int]) -> str:
    """0-3, 5: runs of numbers that go up, each as its ends."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _short(names: Sequence[str], room: int) -> tuple[list[str], str]:
    """Names that fit, by what tells them apart, and a line that says so; all as they are if short.

    ``model.layer.0.attention`` and ``model.layer.1.attention`` become ``..layer.0``, ``..layer.1``.
    """
    if len(names) < 2 or max(map(len, names)) <= room:
        return [escape(name) for name in names], ""
    parts = [re.split(r"(?<=[./])", name) for name in names]  # a separator ends each part
    shared = _alike(parts)
    tail = _alike([part[shared:][::-1] for part in parts])
    start = max(shared - 1, 0)  # the last shared part tells what the rest counts
    short = ["".join(part[start : len(part) - tail or None]).rstrip("./") for part in parts]
    short = [f"..{name}" if start else name for name in short]
    return [escape(name) for name in short], f"{short[0]} is {names[0]}, and so on"


def _alike(rows: Sequence[Sequence[str]]) -> int:
    """How many entries all rows begin with."""
    columns = zip(*rows, strict=False)
    return sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, columns))


def _model_names(models: Sequence[Path]) -> tuple[list[str], list[str]]:
    """The artifacts' names where short and distinct; else numbers, and what they stand for."""
    from attnserve.models.artifact import open_artifact

    names = [open_artifact(model).name for model in models]
    if len(set(names)) == len(names) and max(map(len, names)) <= 10:
        return [escape(name) for name in names], []
    numbers = [str(number) for number in range(1, len(models) + 1)]
    return numbers, [f"{n}: {model}" for n, model in zip(numbers, models, strict=True)]


OPTIONS = {"sequence": "--seq", "sequences": "--seq", "batches": "--batch"}
"""Options whose name differs from the Python parameter."""


def _with_options(text: str) -> str:
    """Replace parameters of the Python API in backticks by the options of the command line."""
    command: Any = typer.main.get_command(app)
    known = {name for each in command.commands.values() for p in each.params for name in p.opts}

    def option(match: re.Match[str]) -> str:
        name = OPTIONS.get(match[1], "--" + match[1].replace("_", "-"))
        return name if name in known else match[0]

    return re.sub(r"`([a-z_]+)`", option, text)


def _show(error: AttnserveError) -> None:
    what, fix = _with_options(error.what), _with_options(error.fix)
    _say(f"error: {what}" + (f"\n  {fix}" if fix else ""))


def _print_json(value: dict[str, Any]) -> None:
    import orjson  # Ctrl-C during this import ends Python with a segmentation fault

    sys.stdout.write(orjson.dumps(value, option=orjson.OPT_INDENT_2).decode() + "\n")


def _number(value: object) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(_number(v) for v in value) + "]"
    return f"{value:.4f}" if isinstance(value, float) else str(value)


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",")]


def _integers(option: str, text: str, *, least: int | None = 1) -> list[int]:
    from graph_passes.errors import InvalidArgument

    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError as error:
        raise InvalidArgument(
            f"{option} {text!r}: expected whole numbers, comma separated",
            f"for example {option} 1,8",
        ) from error
    if least is not None and min(numbers) < least:
        raise InvalidArgument(f"{option} {text!r}: expected numbers from {least} up", "raise it")
    return numbers


@contextmanager
def _progress(quiet: bool) -> Generator[Callable[[str, int, int], None]]:
    """One bar a stage on stderr, with the time left; nothing where stderr is no terminal."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(
        *columns, console=err, transient=True, disable=quiet or not err.is_terminal
    ) as bars:
        tasks: dict[str, Any] = {}

        def stage(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total)
            bars.update(tasks[what], completed=done, total=total)

        yield stage


if __name__ == "__main__":
    sys.exit(main())
