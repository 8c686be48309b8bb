"""analyze: a model's attention on a user's text, as numbers, as a page to look at, as a head mask.

``DIR/analysis.json`` holds every number, ``DIR/report.html`` the plots and what follows from them
(one file, nothing is loaded from elsewhere), ``DIR/mask.json`` the heads that were voted to stay.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np

from attnserve.checks.certify import require_finite_weights
from attnserve.context import Progress, Provider, RunContext, ignore_progress
from attnserve.models.artifact import (
    check_output,
    default_output,
    load_model,
    open_artifact,
    sha256,
    staged,
)
from attnserve.models.datasets import load_inputs
from attnserve.reports.analysis import Analysis, LayerAnalysis, analyze_graph
from attnserve.reports.drawing import require_extra
from attnserve.reports.plots import FIGURES
from graph_passes.errors import InvalidOutput

__all__ = ["Finding", "analyze", "findings", "render"]

Command = Callable[[str, str], str]
"""(name of the new model, options) -> a command line."""

ALIKE = 0.7
"""Similarity of layers from which reuse is worth a try: with it, one whole middle layer of
all-MiniLM-L6-v2 reused another's attention at 99.8 % of its score and more."""

ROUND_TO = 8
"""Suggested shared dimensions are multiples: kernels like them."""

SECTIONS = (
    ("similarity", "Who attends alike"),
    ("spectra", "How many dimensions the projections use"),
    ("bottleneck", "Head size and text length"),
    ("importance", "What each head is worth"),
)


@dataclass(frozen=True)
class Finding:
    """A sentence that the numbers support, and the command that acts on it."""

    text: str
    command: str = ""


def analyze(
    model: Path,
    output: Path | None = None,
    *,
    calib: Path,
    tokenizer: Path | None = None,
    groups: int | None = None,
    provider: Provider = "cpu",
    threads: int = 0,
    seed: int = 0,
    force: bool = False,
    progress: Progress | None = None,
) -> Analysis:
    """Measure a model's attention on a text, and write what was found into a folder.

    Args:
        model: An .onnx file or an artifact folder; never changed.
        output: The folder that receives analysis.json, report.html and mask.json; NAME-analysis
            beside the model by default.
        calib: Text (a sentence a line), .npz or a folder of .npz, of the kind that is served.
        tokenizer: tokenizer.json, where it is not beside the model.
        groups: How many heads of each layer Voting-to-Stay keeps; half of them by default.
        provider, threads: Of the runs; certificates run on the CPU.
        seed: Of the votes' grouping and the certificate.
        force: Write into a folder that holds something already.

    Raises:
        InvalidModel, InvalidArgument, InvalidData, InvalidOutput: See their texts.
    """
    require_extra("jinja2", "matplotlib")
    artifact = open_artifact(model)
    output = output or default_output(model, "analysis")
    if output.exists() and not output.is_dir():
        raise InvalidOutput(
            f"{output}: expected a folder, this is a file",
            "choose another `output`",
            code="output.not_folder",
        )
    check_output(output, force=force)
    graph = load_model(artifact)
    require_finite_weights(graph)
    data = load_inputs(calib, graph, artifact, tokenizer=tokenizer, split=False)
    analysis = analyze_graph(
        graph,
        data,
        source={
            "name": artifact.name,
            "file": artifact.model.name,
            "sha256": sha256(artifact.model),
        },
        groups=groups,
        context=RunContext(provider, threads, seed, progress or ignore_progress),
    )
    files = {
        "analysis.json": _readable(analysis.to_json()) + "\n",
        "report.html": render(analysis, model=model, calib=calib, output=output),
        "mask.json": _readable(analysis.mask) + "\n",
    }
    with staged(output) as stage:
        for name, content in files.items():
            (stage / name).write_text(content, encoding="utf-8")
    return replace(analysis, output=output)


def render(analysis: Analysis, *, model: Path, calib: Path, output: Path) -> str:
    """The page: one HTML document that loads nothing.

    Args:
        model, calib, output: As the commands on the page name them.
    """
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("attnserve.reports"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    figures = [figure for draw in FIGURES if (figure := draw(analysis)) is not None]
    return environment.get_template("analysis.html.j2").render(
        analysis=analysis,
        summary=analysis.summary(),
        findings=findings(analysis, model=model, calib=calib, output=output),
        sections=[
            (title, [figure for figure in figures if figure.section == key], key)
            for key, title in SECTIONS
        ],
        content=analysis.to_json(),
    )


def findings(analysis: Analysis, *, model: Path, calib: Path, output: Path) -> list[Finding]:
    """What the numbers say in words, most useful first, with the commands to try."""

    def optimize(name: str, options: str) -> str:
        source, new, text = (shlex.quote(str(p)) for p in (model, output / f"{name}.onnx", calib))
        return f"attnserve optimize {source} -o {new} {options} --calib {text}"

    return [
        *_on_dimensions(analysis, optimize),
        *_on_similarity(analysis, optimize),
        *_on_heads(analysis, optimize, shlex.quote(str(output / "mask.json"))),
        *_on_lengths(analysis),
    ]


def _on_dimensions(analysis: Analysis, optimize: Command) -> Iterator[Finding]:
    rows = {row.index: row for row in analysis.summary()}
    ranked = [rows[x.index] for x in analysis.layers if x.calibrated and rows[x.index].rank]
    if not ranked:
        return
    full = [row.num_heads * row.head_size for row in ranked]
    sizes = [min(_up(row.rank or 0), size) for row, size in zip(ranked, full, strict=True)]
    least, most = (pick(ranked, key=lambda row: row.rank or 0) for pick in (min, max))
    text = f"{least.rank} of {least.full_rank} dimensions hold 99 % of what layer {least.index}"
    text += " asks and answers on this text"
    if most.rank != least.rank:
        text += f"; layer {most.index} needs the most, {most.rank}"
    text += "."
    if sizes == full:
        yield Finding(text + " Nothing is spare: shared dimensions would save little.")
        return
    layers = "" if len(ranked) == len(analysis.layers) else f" --layers {_list(ranked)}"
    dimensions = ",".join(map(str, sizes))
    text += " Heads can share that many dimensions in the place of their own."
    yield Finding(text, optimize("shared", f"--collab-dk {dimensions}{layers}"))


def _on_similarity(analysis: Analysis, optimize: Command) -> Iterator[Finding]:
    pairs = [(row, *m) for row in range(len(analysis.layers)) if (m := analysis.earlier(row))]
    if not pairs:
        return
    row, source, similarity = max(pairs, key=lambda pair: pair[2])
    layer, other = analysis.layers[row].index, analysis.layers[source].index
    if similarity < ALIKE:
        yield Finding(
            f"No layer repeats another: the nearest are layers {other} and {layer} (similarity "
            f"{similarity:.2f}, 1 is the same)."
        )
        return
    alike = sum(pair[2] >= ALIKE for pair in pairs)
    text = f"Layers {other} and {layer} attend alike (similarity {similarity:.2f}, 1 is the same)"
    text += f", and so do {alike} of {len(pairs)} layers with an earlier one" if alike > 1 else ""
    yield Finding(
        text + ": they are candidates for reusing its attention.", optimize("reuse", "--reuse auto")
    )


def _on_heads(analysis: Analysis, optimize: Command, mask: str) -> Iterator[Finding]:
    layer = min(analysis.layers, key=lambda layer: _weak_share(layer)[1])
    count, share = _weak_share(layer)
    if layer.num_heads > 1:
        yield Finding(
            f"{count} of {layer.num_heads} heads of layer {layer.index} write {_percent(share)} of "
            "its energy: the first to prune.",
            optimize("pruned", "--prune 0.1 --importance energy"),
        )
    missed = max(analysis.layers, key=lambda layer: layer.leave_one_out.max())
    head = int(missed.leave_one_out.argmax())
    yield Finding(
        f"Head {head} of layer {missed.index} would be missed most: without it the outputs change "
        f"by {_percent(float(missed.leave_one_out[head]))} of their variance."
    )
    kept = sum(int(layer.votes.mask.sum()) for layer in analysis.layers)
    total = sum(layer.num_heads for layer in analysis.layers)
    yield Finding(
        f"Voting-to-Stay keeps {kept} of {total} heads, one for each group that works alike; "
        "without the training it was made for, check what that costs.",
        optimize("voted", f"--prune-heads {mask}"),
    )


def _on_lengths(analysis: Analysis) -> Iterator[Finding]:
    size = min(layer.head_size for layer in analysis.layers)
    share = float(np.mean(analysis.lengths > size))
    if share == 0:
        yield Finding(
            f"No text is longer than a head is wide ({size}): head size does not limit attention."
        )
    else:
        yield Finding(
            f"{_percent(share)} of the texts are longer than a head is wide ({size}): there, no "
            "single head can attend in every way."
        )


def _weak_share(layer: LayerAnalysis) -> tuple[int, float]:
    """A quarter of the heads, rounded up, and what the weakest so many write together."""
    count = -(-layer.num_heads // 4)
    return count, float(np.sort(layer.energy_share)[:count].sum())


def _up(rank: int) -> int:
    return -(-rank // ROUND_TO) * ROUND_TO


def _list(rows: list[Any]) -> str:
    return ",".join(str(row.index) for row in rows)


def _percent(share: float) -> str:
    return f"{100 * share:.2g} %" if share < 0.1 else f"{100 * share:.0f} %"


def _readable(value: Any, indent: str = "") -> str:
    """JSON with a line for each entry, but a row of numbers on one."""
    inner = indent + "  "
    if isinstance(value, dict) and value:
        pairs = cast(dict[str, Any], value).items()
        lines = [
            f"{inner}{json.dumps(k, ensure_ascii=False)}: {_readable(v, inner)}" for k, v in pairs
        ]
        return "{\n" + ",\n".join(lines) + f"\n{indent}}}"
    if isinstance(value, list) and any(isinstance(v, list | dict) for v in cast(list[Any], value)):
        lines = [inner + _readable(each, inner) for each in cast(list[Any], value)]
        return "[\n" + ",\n".join(lines) + f"\n{indent}]"
    return json.dumps(value, ensure_ascii=False, allow_nan=False)
