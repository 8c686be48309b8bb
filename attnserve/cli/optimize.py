"""``attnserve optimize`` and ``attnserve plan``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

import attnserve
from attnserve.choices import Alignment, Importance, Mixing
from attnserve.cli import options as opt
from attnserve.cli.display import (
    make_table,
    out,
    print_json,
    print_line,
    print_qualities,
    print_warnings,
    progress_bars,
    set_log_level,
    shorten_names,
)

if TYPE_CHECKING:
    from attnserve.planning.optimize import OptimizeReport
    from attnserve.planning.plan_file import Point
    from attnserve.planning.search.goal import Allowed
    from attnserve.planning.search.report import PlanReport

__all__ = ["app"]

app = typer.Typer()


@app.command(
    epilog="Example: attnserve optimize model.onnx --keep 0.99 --calib sentences.txt",
    rich_help_panel=opt.COMPRESS,
)
def optimize(
    command: typer.Context,
    model: opt.Model,
    keep: opt.Keep = None,
    collab_dk: Annotated[
        str | None,
        typer.Option(
            metavar="R",
            help="Compress by hand: the queries and keys of all heads share R dimensions. One"
            " number for all layers, or one per layer (R1,R2,...).",
        ),
    ] = None,
    calib: opt.OptionalCalibs = None,
    output: Annotated[
        Path | None,
        opt.output_option(
            "PATH",
            "Output .onnx file or folder (default: the folder NAME-optimized beside the model).",
        ),
    ] = None,
    target_speedup: opt.TargetSpeedup = None,
    eval_data: opt.EvalData = None,
    task: opt.Task = None,
    measure: opt.GoalMeasure = "auto",
    allow: opt.Allow = None,
    recover: opt.Recover = None,
    plan: Annotated[
        Path | None,
        opt.search_option(metavar="FILE", help="Apply a plan that `attnserve plan` wrote."),
    ] = None,
    mixing: Annotated[
        Mixing,
        opt.rewrite_option(
            help="Dimensions that a head with --collab-dk reads: all R (dense), some (sparse), or"
            " the fastest of both and of own dimensions, by measured time at equal error (auto)."
        ),
    ] = "auto",
    head_dk: Annotated[
        int | None,
        opt.rewrite_option(
            metavar="K",
            help="Average number of Q/K dimensions per head (sparse mixing). Without --collab-dk,"
            " each head keeps its own dimensions.",
        ),
    ] = None,
    collab_cache: Annotated[
        bool,
        opt.flag(
            "--collab-cache",
            panel=opt.REWRITES,
            help="Store the shared dimensions in a decoder's KV cache. The cache becomes smaller"
            " and changes its shape.",
        ),
    ] = False,
    reuse: Annotated[
        str | None,
        opt.rewrite_option(
            metavar="FORM",
            help="Reuse attention probabilities of earlier layers: partial:K[:P], full:P,"
            " alternate, all-end, auto, or a .json file of edges.",
        ),
    ] = None,
    align: Annotated[
        Alignment,
        opt.rewrite_option(
            help="Heads whose probabilities --reuse takes: the most similar ones, or those with"
            " the same index."
        ),
    ] = "similarity",
    prune: Annotated[
        float | None,
        opt.rewrite_option(
            metavar="SHARE", help="Share of the heads to remove, least important first."
        ),
    ] = None,
    importance: Annotated[
        Importance,
        opt.rewrite_option(
            help="Head-importance criterion: output energy not recoverable from other heads"
            " (energy), leave-one-out loss (loo), or Voting-to-Stay (voting)."
        ),
    ] = "energy",
    prune_heads: Annotated[
        Path | None,
        opt.rewrite_option(
            metavar="FILE",
            help='Heads to keep (1) and to remove (0), as .json: {"layer": [1, 0, ...]}.',
        ),
    ] = None,
    skip: Annotated[
        str | None,
        opt.rewrite_option(
            metavar="LAYERS",
            help="Layers whose attention is replaced by an affine map, or by a constant"
            " (LAYER:constant).",
        ),
    ] = None,
    ffn: Annotated[
        float | None,
        opt.rewrite_option(metavar="SHARE", help="Share of the feed-forward neurons to remove."),
    ] = None,
    strip_cache: Annotated[
        bool,
        opt.flag(
            "--strip-cache",
            panel=opt.REWRITES,
            help="Remove a decoder's KV cache from the inputs and outputs, for models that only"
            " take whole sequences.",
        ),
    ] = False,
    layers: Annotated[
        str | None,
        opt.rewrite_option(
            metavar="LAYERS",
            help="Layers to rewrite: comma-separated names or indices (default: all).",
        ),
    ] = None,
    fp16: opt.Fp16 = False,
    bf16: opt.Bf16 = False,
    int8: opt.Int8 = False,
    int8_full: opt.Int8Full = False,
    int4: opt.Int4 = False,
    also_prove: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="Also compare on these inputs, for example text of another kind; can be repeated.",
            rich_help_panel=opt.CALIBRATION,
        ),
    ] = None,
    calib_weights: opt.CalibWeights = None,
    tokenizer: opt.Tokenizer = None,
    refit: Annotated[
        bool,
        opt.flag(
            "--refit/--no-refit",
            help="Fit the output projections of rewritten layers to the calibration data.",
            panel=opt.CALIBRATION,
        ),
    ] = True,
    min_cosine: Annotated[
        float | None,
        typer.Option(
            metavar="COSINE",
            help="Exit with code 1 and write nothing if the mean output cosine is lower.",
            rich_help_panel=opt.OUTPUT,
        ),
    ] = None,
    external_data: Annotated[
        bool,
        opt.flag(
            "--external-data",
            help="Write the weights to a file beside the model.",
            panel=opt.OUTPUT,
        ),
    ] = False,
    dry_run: Annotated[
        bool,
        opt.flag(
            "--dry-run", help="Compute and report everything, and write nothing.", panel=opt.OUTPUT
        ),
    ] = False,
    force: opt.Force = False,
    json: opt.Json = False,
    quiet: opt.Quiet = False,
    verbose: opt.Verbose = False,
    batch: opt.Batch = 1,
    seq: opt.Length = None,
    threads: opt.Threads = 0,
    provider: opt.ProviderName = "cpu",
    seed: opt.Seed = 0,
) -> None:
    """Compress a model automatically (--keep) or by hand (--collab-dk, --prune, ...).

    The result is compared with the original, and written with its record
    (attnserve.json) and the tokenizer files.
    """
    set_log_level(quiet, verbose)
    ranks = None if collab_dk is None else opt.parse_integers("--collab-dk", collab_dk)
    with progress_bars(quiet) as progress:
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
            skip=opt.parse_names(skip),
            ffn=ffn,
            strip_cache=strip_cache,
            keep=keep,
            target_speedup=target_speedup,
            eval_data=eval_data,
            task=task,
            measure=measure,
            allow=cast("list[Allowed]", opt.parse_names(allow)),
            recover=opt.parse_minutes("--recover", recover),
            plan=plan,
            precision=opt.parse_precision(
                fp16=fp16, bf16=bf16, int8=int8, int8_full=int8_full, int4=int4
            ),
            refit=refit,
            calib=calib or (),
            calib_weights=opt.parse_weights(calib_weights),
            also_prove=also_prove or (),
            tokenizer=tokenizer,
            layers=opt.parse_names(layers) or None,
            batch=batch,
            sequence=opt.parse_lengths(seq),
            min_cosine=min_cosine,
            external_data=external_data,
            provider=provider,
            threads=threads,
            seed=seed,
            force=force,
            dry_run=dry_run,
            progress=progress,
        )
    warnings = print_warnings(report.warnings, command.command, quiet=quiet)
    if json:
        print_json({"output": str(report.output), **report.to_json(), "warnings": warnings})
    else:
        _show_report(report, dry_run)


NO_GAIN = 1.01
"""Speed-ups below it are no gain."""


def _show_report(report: OptimizeReport, dry_run: bool) -> None:
    lossy = {rewrite.name for rewrite in report.plan.passes if rewrite.lossy}
    steps = [step for step in report.steps if step.rewrite in lossy]
    names, legend = shorten_names([step.block for step in steps], width=out.width - 66)
    table = make_table(
        f"{report.output} (dry run: nothing was written)" if dry_run else f"wrote {report.output}",
        ("block", "rewrite", ">size", ">R", ">error", ">refitted", ">MMACs"),
    )
    for step, name in zip(steps, names, strict=True):
        rank = "" if step.rank is None else str(step.rank)
        rank += "" if step.head_size is None else f" ({step.head_size} per head)"
        size = "" if step.heads is None else f"{step.heads} heads"
        size = size if step.neurons is None else f"{step.neurons} neurons"
        table.add_row(
            name,
            step.rewrite,
            size,
            rank,
            *("-" if e is None else f"{e:.4f}" for e in (step.relative_error, step.fitted_error)),
            "-" if step.macs_after is None else f"{step.macs_after / 1e6:.1f}",
        )
    if steps:
        out.print(table)
    if legend:
        print_line(legend)
    before, after = report.before, report.after
    if report.plan.precision != "float32":
        kept = len(report.plan.float_blocks)
        rest = f", {kept} block{'s' * (kept > 1)} in float32" if kept else ""
        print_line(f"weights in {report.plan.precision}{rest}")
    print_line(f"parameters {before.parameters / 1e6:.2f} M -> {after.parameters / 1e6:.2f} M")
    if before.macs and after.macs:
        print_line(
            f"MACs at {report.batch} x {report.sequence} tokens: "
            f"{before.macs / 1e9:.3f} G -> {after.macs / 1e9:.3f} G"
        )
    for fidelity in (report.fidelity, *report.also_proved):
        print_qualities("quality", fidelity)
    print_line(
        f"cosine to the original: mean {report.fidelity.mean_cosine:.4f}, "
        f"minimum {report.fidelity.min_cosine:.4f} ({report.fidelity.data})"
    )
    if report.mixing is not None:
        print_line(f"mixing {report.mixing.chosen}: {report.mixing.why}")
    if report.found is not None:
        print_line(report.found.verdict)
    if (speed := report.speed) is not None:
        if report.found is None or report.found.speed is None:  # the verdict has it
            print_line(f"speed: {speed.describe(report.plan.precision)}")
        if steps or report.plan.precision != "float32":
            gains = speed.served.value >= NO_GAIN
            print_line(
                f"{'' if gains else 'no gain: '}served, this model runs at "
                f"{speed.served.value:.2f}x the speed of the fused original"
            )
    else:
        print_line("speed: not measured (the model takes other inputs, or does not run here)")


@app.command(
    epilog="Example: attnserve plan model.onnx --keep 0.99 --calib sentences.txt",
    rich_help_panel=opt.COMPRESS,
)
def plan(
    model: opt.Model,
    calib: opt.Calibs,
    keep: opt.Keep = None,
    output: Annotated[
        Path | None,
        opt.output_option(
            "FILE",
            "Output .json file; a plot (.svg) is written beside it (default: plan.json beside the"
            " model).",
        ),
    ] = None,
    target_speedup: opt.TargetSpeedup = None,
    eval_data: opt.EvalData = None,
    task: opt.Task = None,
    measure: opt.GoalMeasure = "auto",
    allow: opt.Allow = None,
    fp16: opt.Fp16 = False,
    bf16: opt.Bf16 = False,
    int8: opt.Int8 = False,
    int8_full: opt.Int8Full = False,
    int4: opt.Int4 = False,
    calib_weights: opt.CalibWeights = None,
    tokenizer: opt.Tokenizer = None,
    force: opt.Force = False,
    json: opt.Json = False,
    quiet: opt.Quiet = False,
    verbose: opt.Verbose = False,
    batch: opt.Batch = 1,
    seq: opt.Length = None,
    threads: opt.Threads = 0,
    provider: opt.ProviderName = "cpu",
    seed: opt.Seed = 0,
) -> None:
    """Search for the fastest model and write the plan instead of the model.

    `attnserve optimize --plan FILE` applies the plan.
    """
    set_log_level(quiet, verbose)
    with progress_bars(quiet) as progress:
        report = attnserve.plan(
            model,
            output,
            calib=calib or (),
            calib_weights=opt.parse_weights(calib_weights),
            keep=keep,
            target_speedup=target_speedup,
            eval_data=eval_data,
            task=task,
            measure=measure,
            allow=cast("list[Allowed]", opt.parse_names(allow)),
            precision=opt.parse_precision(
                fp16=fp16, bf16=bf16, int8=int8, int8_full=int8_full, int4=int4
            ),
            tokenizer=tokenizer,
            batch=batch,
            sequence=opt.parse_lengths(seq),
            provider=provider,
            threads=threads,
            seed=seed,
            force=force,
            progress=progress,
        )
    if json:
        print_json({"output": str(report.output), **report.to_json()})
        return
    _show_plan(report)
    assert report.output is not None
    plot = report.output.with_suffix(".svg")
    print_line(f"wrote {report.output}" + (f", {plot}" if plot.exists() else ""))


def _show_plan(report: PlanReport) -> None:
    """Print the decision for each block, the Pareto front, and the measured speed-ups."""
    if report.decisions:
        names, legend = shorten_names([d.block for d in report.decisions], width=out.width - 56)
        table = make_table(
            "plan, block by block",
            ("block", "kept", "form", ">original ms", ">ms", ">speed-up", ">loss"),
        )
        for decision, name in zip(report.decisions, names, strict=True):
            what = "heads" if decision.kind == "attention" else "neurons"
            size = "" if decision.head_size is None else f" x {decision.head_size}"
            size += "" if decision.rank is None else f" of {decision.rank} shared"
            table.add_row(
                name,
                f"{decision.kept} of {decision.count} {what}{size}",
                decision.written + (", float32" if decision.in_float else ""),
                f"{decision.ms_before:.3f}",
                f"{decision.ms_after:.3f}",
                f"{decision.ms_before / decision.ms_after:.2f}x",
                f"{decision.predicted_loss:.4f}",
            )
        out.print(table)
        if legend:
            print_line(legend)
        for decision, name in zip(report.decisions, names, strict=True):
            print_line(f"{name}, {decision.kind.replace('_', '-')}: {decision.why}")
    table = make_table(
        "fastest choices by loss (Pareto front)",
        (">predicted speed-up", ">predicted loss", ">measured loss", ">cosine"),
    )
    for point in _sample_front(report.front):
        table.add_row(
            f"{point.speedup:.2f}x",
            f"{point.predicted_loss:.4f}",
            "" if point.measured_loss is None else f"{point.measured_loss:.4f}",
            "" if point.cosine is None else f"{point.cosine:.4f}",
        )
    out.print(table)
    if report.speeds:
        table = make_table(
            f"latency of the whole model, {report.asked.threads or 'all'} thread(s), "
            f"{report.asked.provider}",
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
    print_qualities("proof", report.fidelity)
    print_line(report.verdict)


def _sample_front(points: Sequence[Point], limit: int = 12) -> list[Point]:
    """All points that were built, and an even sample of the others."""
    built = [point for point in points if point.measured_loss is not None]
    step = max(len(points) // max(limit - len(built), 1), 1)
    return [p for i, p in enumerate(points) if p.measured_loss is not None or i % step == 0]
