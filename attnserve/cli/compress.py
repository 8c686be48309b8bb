"""``attnserve optimize``, ``plan`` and ``recover``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import attnserve
from attnserve.cli import options as opt
from attnserve.cli.command import add_command
from attnserve.cli.display import (
    out,
    print_json,
    print_line,
    print_qualities,
    print_table,
    print_warnings,
    progress_bars,
    shorten_names,
)
from attnserve.limits import MIN_GAIN
from attnserve.options import Data, Goal, Rewrites, Run, Target, Training, Write
from attnserve.options.fields import CALIBRATION, PRECISION

if TYPE_CHECKING:
    from attnserve.models.lineage import OptimizeEntry, RecordedChange
    from attnserve.models.search_record import Point, SearchRecord
    from attnserve.planning.optimize import OptimizeReport
    from attnserve.planning.plans.plan_file import PlanRecord
    from attnserve.recovery.report import RecoverReport

__all__ = ["app"]

app = typer.Typer()

PANELS = (Goal.panel, Rewrites.panel, PRECISION, CALIBRATION, Write.panel, Run.panel)


@add_command(
    app,
    epilog="Example: attnserve optimize model.onnx --keep 0.99 --calib sentences.txt",
    rich_help_panel=opt.COMPRESS,
    panels=PANELS,
)
def optimize(
    model: opt.Model,
    goal: Goal,
    rewrites: Rewrites,
    data: Data,
    write: Write,
    target: Target,
    run: Run,
    output: Annotated[
        Path | None,
        opt.output_option(
            "PATH",
            "Output .onnx file or folder (default: the folder NAME-optimized beside the model).",
        ),
    ] = None,
    plan: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Apply a plan that `attnserve plan` wrote.",
            rich_help_panel=Goal.panel,
        ),
    ] = None,
    show: opt.Show = opt.Show(),
) -> None:
    """Compress a model automatically (--keep) or by hand (--collab-dk, --prune, ...).

    The result is compared with the original, and written with its record
    (attnserve.json) and the tokenizer files.
    """
    with progress_bars(show) as progress:
        report = attnserve.optimize(
            model,
            output,
            goal=goal,
            rewrites=rewrites,
            data=data,
            write=write,
            target=target,
            run=run,
            plan=plan,
            progress=progress,
        )
    warnings = print_warnings(report.record.warnings, show)
    if show.json_:
        print_json({"output": str(report.output), **report.to_json(), "warnings": warnings})
    else:
        _show_report(report, write.dry_run)


def _show_report(report: OptimizeReport, dry_run: bool) -> None:
    """Print the changes, the cost, the quality and the speed of a model."""
    record, precision = report.record, report.plan.precision
    lossy = {graph_pass.name for graph_pass in report.plan.passes if graph_pass.lossy}
    changes = [change for change in record.changes if change.rewrite in lossy]
    title = f"wrote {report.output}"
    if dry_run:
        title = f"{report.output} (dry run: nothing was written)"
    _show_changes(title, changes)
    if precision != "float32":
        count = len(report.plan.float_blocks)
        suffix = f", {count} block{'s' if count > 1 else ''} not converted" if count else ""
        print_line(f"weights in {precision}{suffix}")
    _show_cost(record)
    for fidelity in (report.fidelity, *record.also_verified):
        print_qualities("quality", fidelity)
    print_line(
        f"cosine to the original: mean {report.fidelity.mean_cosine:.4f}, "
        f"minimum {report.fidelity.min_cosine:.4f} ({report.fidelity.data})"
    )
    if record.other_runtimes:
        print_line(f"the quality is the same in {', '.join(record.other_runtimes)}")
    if record.mixing is not None:
        print_line(f"mixing {record.mixing.chosen}: {record.mixing.why}")
    if report.search is not None:
        _show_precisions(report.search)
        print_line(report.search.verdict)
    _show_speed(report, is_changed=bool(changes) or precision != "float32")


def _show_changes(title: str, changes: Sequence[RecordedChange]) -> None:
    """Print the size and the error of each rewritten block."""
    names, legend = shorten_names([change.block for change in changes], width=out.width - 66)
    rows: list[Sequence[object]] = []
    for change, name in zip(changes, names, strict=True):
        rank = "" if change.rank is None else str(change.rank)
        rank += "" if change.head_size is None else f" ({change.head_size} per head)"
        size = "" if change.heads is None else f"{change.heads} heads"
        size = size if change.neurons is None else f"{change.neurons} neurons"
        errors = (change.relative_error, change.fitted_error)
        mmacs = None if change.macs_after is None else change.macs_after / 1e6
        rows.append((name, change.rewrite, size, rank, *errors, mmacs))
    columns = ("block", "rewrite", ">size", ">R", ">error:.4f", ">refitted:.4f", ">MMACs:.1f")
    print_table(title, columns, rows, legend)


def _show_cost(record: OptimizeEntry) -> None:
    """Print parameters and MACs before and after."""
    before, after = record.before, record.after
    assert before is not None and after is not None  # older records may lack them
    print_line(f"parameters {before.parameters / 1e6:.2f} M -> {after.parameters / 1e6:.2f} M")
    if before.macs and after.macs:
        print_line(
            f"MACs at {record.batch} x {record.sequence} tokens: "
            f"{before.macs / 1e9:.3f} G -> {after.macs / 1e9:.3f} G"
        )


def _show_speed(report: OptimizeReport, *, is_changed: bool) -> None:
    """Print the measured speed, unless the verdict of the search states it.

    Args:
        is_changed: Whether the model differs from the fused original.
    """
    speed = report.record.speedups
    if speed is None:
        print_line("speed: not measured (the model takes other inputs, or does not run here)")
        return
    if report.search is None or report.search.speedups is None:
        print_line(f"speed: {speed.describe(report.plan.precision)}")
    if is_changed:
        prefix = "" if speed.served.value >= MIN_GAIN else "no gain: "
        print_line(
            f"{prefix}served, this model runs at {speed.served.value:.2f}x the speed of the fused"
            " original"
        )


@add_command(
    app,
    required=("calib",),
    epilog="Example: attnserve plan model.onnx --keep 0.99 --calib sentences.txt",
    rich_help_panel=opt.COMPRESS,
    panels=PANELS,
)
def plan(
    model: opt.Model,
    goal: Goal,
    data: Annotated[Data, "calib", "calib_weights", "tokenizer"],
    target: Target,
    run: Run,
    output: Annotated[
        Path | None,
        opt.output_option(
            "FILE",
            "Output .json file; a plot (.svg) is written beside it (default: plan.json beside the"
            " model).",
        ),
    ] = None,
    write: opt.Force = Write(),
    show: opt.Show = opt.Show(),
) -> None:
    """Search for the fastest model and write the plan instead of the model.

    `attnserve optimize --plan FILE` applies the plan.
    """
    with progress_bars(show) as progress:
        report = attnserve.plan(
            model,
            output,
            goal=goal,
            data=data,
            target=target,
            run=run,
            force=write.force,
            progress=progress,
        )
    if show.json_:
        print_json({"output": str(report.output), **report.to_json()})
        return
    _show_plan(report.record)
    plot = report.output.with_suffix(".svg")
    print_line(f"wrote {report.output}" + (f", {plot}" if plot.exists() else ""))


def _show_plan(record: PlanRecord) -> None:
    """Print the decision for each block, the Pareto front, and the measured speed-ups."""
    if record.decisions:
        _show_decisions(record)
    _show_precisions(record)
    print_table(
        f"fastest choices by loss in {record.goal.precision} (Pareto front)",
        (">predicted speed-up", ">predicted loss:.4f", ">measured loss:.4f", ">cosine:.4f"),
        [
            (f"{point.speedup:.2f}x", point.predicted_loss, point.measured_loss, point.cosine)
            for point in _sample_front(record.front)
        ],
    )
    if record.speeds:
        print_table(
            f"latency of the whole model, {record.goal.threads or 'all'} thread(s), "
            f"{record.goal.provider}",
            (">batch x tokens", ">original ms:.2f", ">ms:.2f", ">speed-up"),
            [
                (f"{at.batch} x {at.sequence}", at.original_ms, at.ms, f"{at.speedup:.2f}x")
                for at in record.speeds
            ],
        )
    print_qualities("verified quality", record.fidelity)
    print_line(record.verdict)
    if record.recovered is not None and not record.recovered.gain:
        print_line(record.recovered.verdict)


def _show_decisions(record: PlanRecord) -> None:
    """Print the decision for each block, and its reason."""
    from attnserve.precision.schemes import SCHEMES

    names, legend = shorten_names([d.block for d in record.decisions], width=out.width - 56)
    rest = SCHEMES[record.plan.precision].rest
    print_table(
        "plan, block by block",
        ("block", "kept", "operator", ">original ms:.3f", ">ms:.3f", ">speed-up", ">loss:.4f"),
        [
            (
                name,
                f"{each.kept} of {each.count}"
                f" {'heads' if each.kind == 'attention' else 'neurons'}"
                + ("" if each.head_size is None else f" x {each.head_size}")
                + ("" if each.rank is None else f" of {each.rank} shared"),
                each.operator + (f", {rest}" if each.in_float else ""),
                each.ms_before,
                each.ms_after,
                f"{each.ms_before / each.ms_after:.2f}x",
                each.predicted_loss,
            )
            for each, name in zip(record.decisions, names, strict=True)
        ],
        legend,
    )
    for decision, name in zip(record.decisions, names, strict=True):
        print_line(f"{name}, {decision.kind.replace('_', '-')}: {decision.why}")


def _show_precisions(search: SearchRecord) -> None:
    """Print the compared precisions, if there are any."""
    if search.precisions:
        print_table(
            "fused original in each precision",
            ("precision", "runtime", ">speed-up", ">loss to choose:.4f", ""),
            [
                (
                    point.precision,
                    point.runtime,
                    f"{point.speedup.value:.2f}x",
                    point.loss,
                    point.unused or "selected" * search.gain,
                )
                for point in search.precisions
            ],
        )


def _sample_front(points: Sequence[Point]) -> list[Point]:
    """All points that were built, and an even sample of the others, of about 12 points."""
    built = [point for point in points if point.measured_loss is not None]
    step = max(len(points) // max(12 - len(built), 1), 1)
    return [p for i, p in enumerate(points) if p.measured_loss is not None or i % step == 0]


@add_command(
    app,
    epilog="Example: attnserve recover new --teacher model --data texts.txt -o out",
    rich_help_panel=opt.COMPRESS,
)
def recover(
    model: Annotated[
        Path,
        typer.Argument(metavar="REWRITTEN", help="The rewritten .onnx file or artifact folder."),
    ],
    teacher: Annotated[
        Path,
        typer.Option(metavar="ORIGINAL", help="The model that it was made from."),
    ],
    data: Annotated[
        list[Path],
        typer.Option(
            metavar="FILE", help=f"Data like that to be served: {opt.INPUTS}; can be repeated."
        ),
    ],
    output: Annotated[Path, opt.output_option("PATH", "Output .onnx file or folder.")],
    training: Training,
    run: Run,
    tokenizer: opt.DataTokenizer = None,
    write: Annotated[Write, "openvino", "force"] = Write(),
    show: opt.Show = opt.Show(),
) -> None:
    """Train a rewritten model to give the outputs of its original again (distillation).

    Only the weights of the graph change. With --int8, weights are trained for the rounding of
    int8 kernels, and the result is quantized. An interrupted training continues when the
    command is repeated. The command needs PyTorch (extra torch).
    """
    with progress_bars(show) as progress:
        report = attnserve.recover(
            model,
            output,
            teacher=teacher,
            data=data,
            tokenizer=tokenizer,
            training=training,
            run=run,
            openvino=write.openvino,
            force=write.force,
            progress=progress,
        )
    warnings = print_warnings(report.record.warnings, show)
    if show.json_:
        print_json({"output": str(report.output), **report.to_json(), "warnings": warnings})
    else:
        _show_recovery(report)


def _show_recovery(report: RecoverReport) -> None:
    print_line(f"wrote {report.output}")
    print_qualities("quality before", report.before)
    print_qualities("quality", report.after)
    print_line(
        f"cosine to the original: mean {report.before.mean_cosine:.4f} -> "
        f"{report.after.mean_cosine:.4f}, minimum {report.before.min_cosine:.4f} -> "
        f"{report.after.min_cosine:.4f}"
    )
    print_line(report.record.verdict)
