"""Write the analysis of a model's attention as a report.

``DIR/analysis.json`` has all numbers, ``DIR/report.html`` the findings and plots (one file without
external references), ``DIR/mask.json`` the heads that Voting-to-Stay keeps.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import numpy as np

from attnserve.checks.finite_weights import require_finite_weights
from attnserve.context import Progress, ignore_progress
from attnserve.data.datasets import load_inputs
from attnserve.models.artifact import open_artifact
from attnserve.models.checksums import sha256
from attnserve.models.onnx_files import load_model
from attnserve.models.outputs import check_folder, check_output, default_output, staged
from attnserve.options import Run
from attnserve.paths import StrPath, as_path
from attnserve.reports.analysis import Analysis, LayerAnalysis, analyze_graph
from attnserve.reports.drawing import require_extra
from attnserve.reports.pages import render_page
from attnserve.reports.plots import FIGURES

__all__ = ["Finding", "analyze", "findings", "render"]

SIMILAR = 0.7
"""Minimum similarity of two layers at which reuse is suggested. At this similarity, a middle layer
of all-MiniLM-L6-v2 reused another layer's attention and kept at least 99.8 % of its score."""

MARGIN = 0.05
"""Minimum difference between the similarity and the similarity to uniform attention. Two heads that
differ independently from uniform attention are more similar to it than to each other."""

ROUND_TO = 8
"""Suggested shared dimensions are multiples of this, for efficient kernels."""

SECTIONS = (
    ("similarity", "Similarity of attention"),
    ("spectra", "Dimensions of the query and key projections"),
    ("bottleneck", "Head size and text length"),
    ("importance", "Head importance"),
)


@dataclass(frozen=True)
class Finding:
    """One result of the analysis.

    Attributes:
        text: The result as text.
        parameters: Arguments of ``attnserve.optimize`` that apply the result, as text; or empty.
    """

    text: str
    parameters: Mapping[str, str] = field(default_factory=dict[str, str])


def analyze(
    model: StrPath,
    output: StrPath | None = None,
    *,
    calib: StrPath,
    tokenizer: StrPath | None = None,
    groups: int | None = None,
    run: Run = Run(),
    force: bool = False,
    progress: Progress | None = None,
) -> Analysis:
    """Measure a model's attention on a text and write the report to a folder.

    Args:
        model: An .onnx file or an artifact folder; it is not changed.
        output: Folder for analysis.json, report.html and mask.json; by default NAME-analysis beside
            the model.
        calib: Text (one sentence per line), .npz or a folder of .npz, similar to the served data.
        tokenizer: Path of tokenizer.json; by default beside the model.
        groups: Number of heads that Voting-to-Stay keeps in each layer; by default half of them.
        run: Session settings, and the seed of head grouping and certification. Blocks are
            certified on the CPU.
        force: Write into a folder that is not empty.

    Raises:
        InvalidModel: The model cannot be read, or no attention can be measured.
        InvalidArgument: ``groups`` or a session setting is invalid.
        InvalidData: ``calib`` cannot be read or does not fit the model.
        InvalidOutput: ``output`` exists, or cannot be written.
        MissingExtra: jinja2, matplotlib or ONNX Runtime is not installed.
    """
    require_extra("jinja2", "matplotlib")
    model, calib = Path(model), Path(calib)
    artifact = open_artifact(model)
    output = as_path(output) or default_output(model, "analysis")
    check_folder(output)
    check_output(output, force=force)
    graph = load_model(artifact)
    require_finite_weights(graph)
    data = load_inputs(calib, graph, artifact, tokenizer=as_path(tokenizer), split=False)
    analysis = analyze_graph(
        graph,
        data,
        source={
            "name": artifact.name,
            "file": artifact.model.name,
            "sha256": sha256(artifact.model),
        },
        groups=groups,
        context=run.context(progress or ignore_progress),
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
    """Render the report as one HTML document without external references.

    Args:
        model, calib, output: Paths that the suggested commands contain.
    """
    figures = [figure for draw in FIGURES if (figure := draw(analysis)) is not None]
    return render_page(
        "analysis.html.j2",
        analysis=analysis,
        summary=analysis.summary(),
        model=str(model),
        calib=str(calib),
        findings=findings(analysis, output),
        sections=[
            (title, [figure for figure in figures if figure.section == key], key)
            for key, title in SECTIONS
        ],
        content=analysis.to_json(),
    )


def findings(analysis: Analysis, output: Path) -> list[Finding]:
    """Describe the results of an analysis, the most useful first.

    Args:
        output: The folder of mask.json and of the models in ``Finding.parameters``.
    """
    return [
        *_dimension_findings(analysis, output),
        *_similarity_findings(analysis, output),
        *_head_findings(analysis, output),
        *_length_findings(analysis),
    ]


def _dimension_findings(analysis: Analysis, output: Path) -> Iterator[Finding]:
    rows = {row.index: row for row in analysis.summary()}
    ranked = [rows[x.index] for x in analysis.layers if x.calibrated and rows[x.index].rank]
    if not ranked:
        return
    full_ranks = [row.num_heads * row.head_size for row in ranked]
    sizes = [min(_up(row.rank or 0), size) for row, size in zip(ranked, full_ranks, strict=True)]
    min_row, max_row = (pick(ranked, key=lambda row: row.rank or 0) for pick in (min, max))
    text = (
        f"Layer {min_row.index} needs {min_row.rank} of {min_row.full_rank} query and key "
        "dimensions for 99 % of the variance on this text"
    )
    text += (
        f"; layer {max_row.index} needs the most, {max_row.rank}."
        if max_row.rank != min_row.rank
        else "."
    )
    if sizes == full_ranks:
        yield Finding(f"{text} Shared query and key dimensions would save little.")
        return
    parameters = {
        "output": str(output / "shared.onnx"),
        "collab_dk": ",".join(map(str, sizes)),
    }
    if len(ranked) < len(analysis.layers):
        parameters["layers"] = ",".join(str(row.index) for row in ranked)
    yield Finding(f"{text} The heads of a layer can share query and key dimensions.", parameters)


def _similarity_findings(analysis: Analysis, output: Path) -> Iterator[Finding]:
    pairs = [(row, *m) for row in range(len(analysis.layers)) if (m := analysis.earlier(row))]
    if not pairs:
        return
    uniform = analysis.similarity.baseline()
    similar = [pair for pair in pairs if pair[2] >= SIMILAR]
    reusable = [pair for pair in similar if pair[2] >= uniform[pair[0]] + MARGIN]
    row, source, similarity = max(reusable or pairs, key=lambda pair: pair[2])
    layer, source_layer = analysis.layers[row].index, analysis.layers[source].index
    text = (
        f"Layers {source_layer} and {layer} have the most similar attention "
        f"({similarity:.2f} of 1; "
        f"uniform attention: {uniform[row]:.2f})."
    )
    if similar and not reusable:
        yield Finding(
            f"{text} Attention is nearly uniform, as in a model that is not trained: the similarity"
            " is not a reason to reuse another layer's attention."
        )
        return
    if not reusable:
        yield Finding(f"{text} No layer is similar enough to reuse another layer's attention.")
        return
    if len(reusable) > 1:
        text += f" {len(reusable)} of {len(pairs)} layers are similar to an earlier layer."
    yield Finding(
        f"{text} A similar layer can reuse the attention probabilities of the earlier one.",
        {"output": str(output / "reuse.onnx"), "reuse": "auto"},
    )


def _head_findings(analysis: Analysis, output: Path) -> Iterator[Finding]:
    layer = min(analysis.layers, key=lambda layer: _weak_share(layer)[1])
    count, share = _weak_share(layer)
    if layer.num_heads > 1:
        heads = "1 head" if count == 1 else f"{count} heads"
        yield Finding(
            f"The weakest {heads} of {layer.num_heads} in layer {layer.index} produce "
            f"{_percent(share)} of its output energy. Prune such heads first.",
            {"output": str(output / "pruned.onnx"), "prune": "0.1", "importance": "energy"},
        )
    layer = max(analysis.layers, key=lambda layer: layer.leave_one_out.max())
    head = int(layer.leave_one_out.argmax())
    change = _percent(float(layer.leave_one_out[head]))
    yield Finding(
        f"Head {head} of layer {layer.index} is the most important one: without it, the mean "
        f"squared change of the model outputs is {change} of their variance."
    )
    kept = sum(int(layer.votes.mask.sum()) for layer in analysis.layers)
    total = sum(layer.num_heads for layer in analysis.layers)
    yield Finding(
        f"Voting-to-Stay keeps {kept} of {total} heads, one per group of similar heads. The method "
        "assumes training afterwards, so check the quality without it.",
        {"output": str(output / "voted.onnx"), "prune_heads": str(output / "mask.json")},
    )


def _length_findings(analysis: Analysis) -> Iterator[Finding]:
    size = min(layer.head_size for layer in analysis.layers)
    share = float(np.mean(analysis.lengths > size))
    if share == 0:
        text = f"No text has more tokens than the head size ({size}). The head size is sufficient."
    else:
        text = (
            f"{_percent(share)} of the texts have more tokens than the head size ({size}). A head "
            "cannot represent every attention pattern over so many tokens."
        )
    yield Finding(text)


def _weak_share(layer: LayerAnalysis) -> tuple[int, float]:
    """A quarter of the number of heads, rounded up, and the energy share of so many weakest."""
    count = -(-layer.num_heads // 4)
    return count, float(np.sort(layer.energy_share)[:count].sum())


def _up(rank: int) -> int:
    return -(-rank // ROUND_TO) * ROUND_TO


def _percent(share: float) -> str:
    return f"{100 * share:.2g} %" if share < 0.1 else f"{100 * share:.0f} %"


def _readable(value: Any, indent: str = "") -> str:
    """JSON with one line per entry and per list of numbers."""
    inner = indent + "  "
    if isinstance(value, dict) and value:
        pairs = cast(dict[str, Any], value).items()
        lines = [
            f"{inner}{json.dumps(k, ensure_ascii=False)}: {_readable(v, inner)}" for k, v in pairs
        ]
        return "{\n" + ",\n".join(lines) + f"\n{indent}}}"
    if isinstance(value, list) and any(isinstance(v, list | dict) for v in cast(list[Any], value)):
        lines = [inner + _readable(entry, inner) for entry in cast(list[Any], value)]
        return "[\n" + ",\n".join(lines) + f"\n{indent}]"
    return json.dumps(value, ensure_ascii=False, allow_nan=False)
