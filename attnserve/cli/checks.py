"""``attnserve inspect``, ``verify``, ``evaluate`` and ``bench``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import attnserve
from attnserve.cli import options as opt
from attnserve.cli.command import add_command
from attnserve.cli.display import (
    format_ranges,
    out,
    print_json,
    print_line,
    print_qualities,
    print_table,
    print_warnings,
    progress_bars,
    set_log_level,
    shorten_names,
)
from attnserve.options import Comparison, Run, Scoring, Timing

if TYPE_CHECKING:
    from attnserve.checks.benchmark import Measurement
    from attnserve.checks.inspect import Inspection
    from attnserve.models.measured import Fidelity
    from attnserve.planning.verify_again import VerifyAgainReport

__all__ = ["app"]

app = typer.Typer()

ONE_THREAD = Run(threads=1)


@add_command(
    app,
    epilog="Example: attnserve inspect model.onnx --seq 512",
    rich_help_panel=opt.CHECK,
)
def inspect(
    model: opt.Model,
    sequence: Annotated[
        int, typer.Option("--seq", min=1, metavar="N", help="Sequence length to count MACs at.")
    ] = 128,
    batch: Annotated[int, typer.Option(min=1, metavar="N", help="Batch size to count at.")] = 1,
    show: opt.Show = opt.Show(),
    run: opt.Seed = Run(),
) -> None:
    """List the attention blocks of a model, with their costs and the passes that apply.

    Attention that is not matched, or fails certification, is listed with a reason.
    """
    set_log_level(show)
    report = attnserve.inspect(model, batch=batch, sequence=sequence, seed=run.seed)
    content = report.to_json()
    if show.json_:
        print_json(content)
        return
    blocks: list[dict[str, Any]] = content["attention"]
    if blocks:
        _show_blocks(
            f"{model}: attention at batch {report.batch}, {report.sequence} tokens", blocks
        )
    for unmatched in content["missed"]:
        print_line(f"unmatched {unmatched['node']}: {unmatched['reason']}")
    total = content["macs"]["total"]
    print_line(
        f"{len(blocks)} certified, {len(content['missed'])} unmatched; "
        f"{report.parameters / 1e6:.2f} M parameters; "
        + (f"{total / 1e9:.3f} GMACs, " if total is not None else "MACs not counted, ")
        + f"{report.attention_macs / 1e9:.3f} of them in attention"
    )
    _show_uncounted(report)


def _show_blocks(title: str, blocks: Sequence[dict[str, Any]]) -> None:
    names, legend = shorten_names([block["name"] for block in blocks], width=out.width - 66)
    rows: list[Sequence[object]] = []
    layers_by_reason: dict[str, dict[str, list[int]]] = {}
    for index, (block, name) in enumerate(zip(blocks, names, strict=True)):
        rewrites = block["rewrites"]
        for rewrite, reason in rewrites.items():
            if reason is not True:
                layers_by_reason.setdefault(reason, {}).setdefault(rewrite, []).append(index)
        applicable = sum(reason is True for reason in rewrites.values())
        has_groups = block["num_kv_heads"] != block["num_heads"]
        heads = f"{block['num_heads']}" + (f"/{block['num_kv_heads']}" if has_groups else "")
        reuse = f", {block['reused_heads']} reused" if block["reused_heads"] else ""
        is_removed = block["form"] == "skip"
        row = (
            index,
            name,
            block["form"] + (" cross" if block["kind"] == "cross" else ""),
            None if is_removed else f"{heads} x {block['head_size']}{reuse}",
            None if is_removed else block["scale"],
            block["macs"] / 1e6,
            block["max_abs_error"],
            "all" if applicable == len(rewrites) else f"{applicable} of {len(rewrites)}",
        )
        rows.append(row)
    columns = ("", "name", "form", "heads", ">scale:.4g", ">MMACs:.1f", ">error:.0e", "rewrites")
    print_table(title, columns, rows, legend)
    for reason, layers_by_rewrite in layers_by_reason.items():
        for layers in dict.fromkeys(tuple(layers) for layers in layers_by_rewrite.values()):
            rewrites = [
                rewrite
                for rewrite, indices in layers_by_rewrite.items()
                if tuple(indices) == layers
            ]
            print_line(f"no {' or '.join(rewrites)} for {format_ranges(layers)}: {reason}")


def _show_uncounted(report: Inspection) -> None:
    """Print the nodes whose MACs were not counted, one line for each of the first five reasons."""
    nodes_of: dict[str, list[str]] = {}
    for node, _, reason in (line.partition(": ") for line in report.uncounted):
        nodes_of.setdefault(reason, []).append(node)
    for reason, nodes in list(nodes_of.items())[:5]:
        more = f" and {len(nodes) - 1} more" if len(nodes) > 1 else ""
        print_line(f"MACs not counted: {nodes[0]}{more}: {reason}")


@add_command(
    app,
    epilog="Example: attnserve verify model.onnx new.onnx --data sentences.txt",
    rich_help_panel=opt.CHECK,
)
def verify(
    original: Annotated[
        Path,
        typer.Argument(
            metavar="ORIGINAL", help="The original model; with `--again`, may be left out."
        ),
    ],
    new: Annotated[
        Path | None, typer.Argument(metavar="NEW", help="The rewritten model.", show_default=False)
    ] = None,
    comparison: Comparison = Comparison(),
    requirements: opt.Requirements = opt.Requirements(),
    show: opt.Show = opt.Show(),
    run: Run = Run(),
) -> None:
    """Compare the outputs of a rewritten model with those of its original.

    With --again, compare them as the record of the rewritten model says, and test its guarantees.
    """
    from graph_passes.errors import InvalidArgument

    guarantees: VerifyAgainReport | None = None
    with progress_bars(show) as progress:
        if requirements.again:
            before, after = (None, original) if new is None else (original, new)
            guarantees = attnserve.verify_again(
                after,
                before,
                comparison=comparison,
                eval_data=requirements.eval_data,
                run=run,
                progress=progress,
            )
            report = guarantees.fidelity
        elif new is None:
            raise InvalidArgument(
                "NEW is missing", "give ORIGINAL and NEW, or `again`", code="verify.usage"
            )
        else:
            report = attnserve.verify(
                original, new, comparison=comparison, run=run, progress=progress
            )
    if show.json_:
        print_json((guarantees or report).to_json())
    else:
        reference = original if new else "its original"
        _show_errors(f"{new or original} compared with {reference} on {report.data}", report)
        if guarantees is not None:
            _show_guarantees(guarantees)
    _check_errors(report, requirements, show)
    if guarantees is not None:
        _require_guarantees(guarantees, show)


def _show_errors(title: str, report: Fidelity) -> None:
    """Print the errors of each output, and the measured qualities."""
    columns = (
        "output",
        ">max abs:.2e",
        ">mean abs:.2e",
        ">relative:.4f",
        ">mean cosine:.5f",
        ">min cosine:.5f",
    )
    rows = [
        (
            output.names,
            output.max_abs_error,
            output.mean_abs_error,
            output.relative_error,
            output.mean_cosine,
            output.min_cosine,
        )
        for output in report.outputs
    ]
    print_table(title, columns, rows)
    print_qualities("quality", report)


def _check_errors(report: Fidelity, requirements: opt.Requirements, show: opt.Show) -> None:
    """Print warnings, and fail if an output is not finite or its cosine is too low.

    Raises:
        CheckFailed: It fails.
    """
    from graph_passes.errors import CheckFailed

    warnings = report.warnings()
    if any(output.not_finite_rows for output in report.outputs):
        raise CheckFailed(
            "; ".join(warnings),
            "compare a model in a more exact precision (float16 overflows at 65,504)",
            code="verify.not_finite",
        )
    print_warnings(warnings, show)
    min_cosine = requirements.min_cosine
    if min_cosine is not None and report.mean_cosine < min_cosine:
        raise CheckFailed(
            f"mean cosine {report.mean_cosine:.5f} on {report.data}, "
            f"expected at least {min_cosine}",
            "compress less (keep more heads or dimensions, raise `keep`), or calibrate on text"
            " like the data",
            code="verify.min_cosine",
        )


def _show_guarantees(report: VerifyAgainReport) -> None:
    print_table(
        f"guarantees of the record, on {'recorded' if report.is_recorded else 'new'} rows",
        ("measure", "of", ">recorded:.4f", ">now:.4f", ">kept:.4f", ">guarantee:.4f", "holds"),
        [
            (
                check.measure,
                ", ".join(filter(None, (check.output, check.file, check.lengths, check.runtime))),
                check.recorded,
                check.value,
                check.kept,
                check.guarantee,
                "yes" if check.holds else "no",
            )
            for check in report.guarantees
        ],
    )


def _require_guarantees(report: VerifyAgainReport, show: opt.Show) -> None:
    """Name the runtimes that were not measured, and fail if a guarantee does not hold."""
    from graph_passes.errors import CheckFailed

    if report.not_installed:
        missing = ", ".join(report.not_installed)
        print_warnings([f"not installed, so not verified: {missing}"], show)
    broken = [check for check in report.guarantees if not check.holds]
    if broken:
        check = min(broken, key=lambda check: check.kept - check.guarantee)
        raise CheckFailed(
            f"{check.measure} keeps {check.kept:.4f} in {check.runtime} on {report.fidelity.data},"
            f" and the record guarantees {check.guarantee:.4f}",
            "calibrate on data like this, or optimize with a lower goal",
            code="verify.guarantee",
        )


@add_command(
    app,
    epilog="Example: attnserve evaluate model.onnx --task sts --data sts-dev.tsv",
    rich_help_panel=opt.CHECK,
)
def evaluate(
    model: opt.Model,
    scoring: Scoring = Scoring(),
    mteb: opt.Mteb = opt.Mteb(),
    show: opt.Show = opt.Show(),
    run: Run = Run(),
) -> None:
    """Compute a task score, such as a correlation, an accuracy, nDCG or perplexity."""
    _check_evaluate(scoring, mteb)
    with progress_bars(show) as progress:
        if mteb.mteb:
            report = attnserve.evaluate_mteb(
                model,
                mteb.mteb,
                data=scoring.data,
                output=mteb.output,
                force=mteb.force,
                run=run,
                progress=progress,
            )
        else:
            report = attnserve.evaluate(model, scoring=scoring, run=run, progress=progress)
    content = report.to_json()
    if show.json_:
        print_json(content)
        return
    for row in content.get("results", [content]):
        print_line(", ".join(f"{key} {_format(value)}" for key, value in row.items()))


def _check_evaluate(scoring: Scoring, mteb: opt.Mteb) -> None:
    """Check that the options belong to a task with data, or to tasks of MTEB.

    Raises:
        InvalidArgument: Options of both or of neither are given, or data is missing.
    """
    from graph_passes.errors import InvalidArgument

    names = {name for group in (scoring, mteb) for name, _ in group.changed()}
    others = {"output", "force"} if "task" in names else {"pooling", "max_length", "tokenizer"}
    if ("task" in names) == ("mteb" in names) or ("data" not in names and "task" in names):
        what, how = "expected `task` with `data`, or `mteb`", "give one of them"
    elif wrong := sorted(names & others):
        what = f"`{wrong[0]}` has no effect with `{'task' if 'task' in names else 'mteb'}`"
        how = "leave it out"
    else:
        return
    raise InvalidArgument(what, how, code="evaluate.usage")


def _format(value: object) -> str:
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_format(v) for v in value) + "]"
    return f"{value:.4f}" if isinstance(value, float) else str(value)


@add_command(
    app,
    epilog="Example: attnserve bench model.onnx new.onnx --batch 1,8 --seq 32,128",
    rich_help_panel=opt.CHECK,
)
def bench(
    models: Annotated[
        list[Path],
        typer.Argument(metavar="MODEL...", help="Models; speed-ups are relative to the first."),
    ],
    timing: Timing = Timing(),
    show: opt.Show = opt.Show(),
    run: Run = ONE_THREAD,
) -> None:
    """Measure the latency and memory of models in interleaved rounds."""
    with progress_bars(show) as progress:
        report = attnserve.bench(models, timing=timing, run=run, progress=progress)
    if show.json_:
        print_json(report.to_json())
        return
    names, legend = _model_names(models)
    for line in legend:
        print_line(line)
    for name, result in zip(names, report.results, strict=False):
        print_line(f"{name} runs in {result.runtime}, {result.precision}")
    columns = (
        "model",
        ">p50:.2f",
        ">p90:.2f",
        ">p99:.2f",
        ">speed-up",
        ">95 % CI",
        ">GMACs:.3f",
        ">GMAC/s:.1f",
        ">MiB:.0f",
        ">GPU MiB:.0f",
    )
    count = len(columns) - (run.provider != "cuda")
    rows: list[Sequence[object]] = []
    for index, result in enumerate(report.results):
        if index % len(models) == 0:
            rows.append((f"{result.batch} x {result.sequence}",))
        rows.append((names[index % len(models)], *_latencies(result))[:count])
    print_table(
        f"latency in ms by batch x tokens, {run.threads or 'all'} thread(s), {run.provider}",
        columns[:count],
        rows,
    )
    if any(result.decoding for result in report.results):
        _show_decoding(report.results, names)


def _show_decoding(results: Sequence[Measurement], names: Sequence[str]) -> None:
    rows: list[Sequence[object]] = []
    for index, result in enumerate(results):
        if index and index % len(names) == 0:
            rows.append(())
        if (decoding := result.decoding) is not None:
            times = (decoding.first_token_ms, decoding.per_token_ms)
            shape = (result.batch, result.sequence)
            rows.append((names[index % len(names)], *shape, *times, decoding.cache_bytes_per_token))
    print_table(
        "ms to the first token of a prompt, and to the next after it",
        (
            "model",
            ">batch",
            ">prompt",
            ">first token:.2f",
            ">next token:.2f",
            ">cache bytes per token:,",
        ),
        rows,
    )


def _latencies(result: Measurement) -> Sequence[object]:
    low, high = result.speedup_ci95
    return (
        result.p50_ms,
        result.p90_ms,
        result.p99_ms,
        f"{result.speedup_vs_first:.2f}x",
        f"{low:.2f}-{high:.2f}",
        None if result.macs is None else result.macs / 1e9,
        result.gmacs_per_second,
        result.peak_rss_bytes / 2**20,
        None if result.peak_gpu_bytes is None else result.peak_gpu_bytes / 2**20,
    )


def _model_names(models: Sequence[Path]) -> tuple[list[str], list[str]]:
    """The names of the artifacts if they are short and distinct, else numbers with a legend."""
    from attnserve.models.artifact import open_artifact

    names = [open_artifact(model).name for model in models]
    if len(set(names)) == len(names) and max(map(len, names)) <= 10:
        return names, []
    numbers = [str(number) for number in range(1, len(models) + 1)]
    return numbers, [f"{n}: {model}" for n, model in zip(numbers, models, strict=True)]
