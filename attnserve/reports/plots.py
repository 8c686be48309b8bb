"""The plots of an analysis, each with a caption, and the Pareto front of a plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from attnserve.calibration.spectra import Spectrum
from attnserve.reports.analysis import SHARES, Analysis
from attnserve.reports.drawing import (
    FIRST,
    GRID,
    INK,
    MUTED,
    PAPER,
    SECOND,
    THIRD,
    heatmap,
    scale_below,
    scale_beside,
    span,
    svg,
    svg_file,
)

__all__ = ["FIGURES", "Figure", "pareto_front"]

MOST_NUMBERS = 16
"""Heatmaps with at most this many rows have labels in their cells."""

PARTS = (("query", "W_Q", FIRST), ("key", "W_K", SECOND), ("product", "W_Q W_K\u1d40", THIRD))
PERCENT = np.linspace(0, 100, 201)


@dataclass(frozen=True)
class Figure:
    """One plot.

    Attributes:
        section: The section of the report.
        title, caption: Text; the caption explains how to read the plot.
        svg: An inline SVG element without external references.
        width: Maximum width in pixels.
    """

    section: str
    title: str
    caption: str
    svg: str
    width: int


def layer_similarity(analysis: Analysis) -> Figure | None:
    """Figure 2 of arXiv 2110.06821, with the mean over heads in the place of the best."""
    best = analysis.similarity.best()
    count = len(best)
    below = np.where(np.tri(count, k=-1, dtype=bool), best, np.nan)[1:, :-1]
    if np.isnan(below).all():
        return None
    low, top = span(below)
    labels = [str(layer.index) for layer in analysis.layers]
    size = min(6.4, 1.6 + 0.55 * count)

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        heatmap(axes, below, labels[1:], labels[:-1], low, top, numbers=count <= MOST_NUMBERS)
        axes.set(xlabel="earlier layer", ylabel="layer")
        scale_beside(axes, low, top, "similarity")

    return Figure(
        "similarity",
        "Whose attention each layer repeats",
        "Each row is a layer, each column an earlier one, each cell the similarity (0 to 1) of the "
        "row's heads with their best matches there, on average: a strong cell is a layer that "
        "could take the other's attention instead of computing its own.",
        svg(draw, (size + 0.9, size)),
        int(100 * size),
    )


def head_similarity(analysis: Analysis) -> Figure | None:
    """c of eq. 3 for every pair of heads."""
    similarity = analysis.similarity
    matrix = similarity.matrix.copy()
    np.fill_diagonal(matrix, np.nan)
    ends = np.cumsum([0, *similarity.heads])
    low, top = span(matrix)

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        heatmap(axes, matrix, [], [], low, top)
        for end in ends[1:-1]:
            axes.axhline(end - 0.5, color=MUTED, linewidth=0.5)
            axes.axvline(end - 0.5, color=MUTED, linewidth=0.5)
        middles, labels = (ends[:-1] + ends[1:] - 1) / 2, [str(x.index) for x in analysis.layers]
        axes.set_xticks(middles, labels)
        axes.set_yticks(middles, labels)
        axes.tick_params(length=0)
        axes.set(xlabel="heads, by layer", ylabel="heads, by layer")
        scale_beside(axes, low, top, "similarity")

    return Figure(
        "similarity",
        "Every head with every other",
        "Each row and column is a head, in the order of execution, with lines between layers: a "
        "strong cell outside the blocks on the diagonal is a head that repeats another layer's.",
        svg(draw, (7.4, 6.4)),
        680,
    )


def sequential_similarity(analysis: Analysis) -> Figure | None:
    """Figure 3 of arXiv 2110.06821."""
    ranks = analysis.similarity.sequential()
    rows = [layer for layer in analysis.layers if layer.name in ranks]
    if not rows:
        return None
    most = max(len(ranks[layer.name]) for layer in rows)
    table = np.full((len(rows), most), np.nan)
    for row, layer in enumerate(rows):
        table[row, : len(ranks[layer.name])] = ranks[layer.name]

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        x = np.arange(len(rows))
        for rank in range(most):
            axes.plot(x, table[:, rank], "-o", color=FIRST, linewidth=1, markersize=3.5, alpha=0.35)
        named = (("most alike head", np.nanmax, FIRST), ("median", np.nanmedian, SECOND))
        for label, of, colour in (*named, ("least alike head", np.nanmin, THIRD)):
            axes.plot(x, of(table, axis=1), "-o", color=colour, markersize=4.5, label=label)
        axes.set_xticks(x, [str(layer.index) for layer in rows])
        axes.set(xlabel="layer", ylabel="similarity to the layer before", ylim=(0, 1.02))
        axes.grid(axis="y")
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3, borderaxespad=0.2)

    return Figure(
        "similarity",
        "How far each layer repeats the one before it",
        "For each layer (across), the similarity of each of its heads with its best match in the "
        "layer before, one thin line a rank: high lines are heads that add little of their own.",
        svg(draw, (6.8, 3.6)),
        680,
    )


def captured_variance(analysis: Analysis) -> Figure | None:
    """Figure 1 of arXiv 2006.16362."""
    if not any(layer.weights for layer in analysis.layers):
        return None

    def draw(figure: Any) -> None:
        panels = figure.subplots(1, 2, sharey=True)
        titles = ("Each head by itself", "The heads of a layer together")
        for axes, title, of in zip(panels, titles, (_of_heads, _of_layer), strict=True):
            for part, label, colour in PARTS:
                for metric, dashes in (("weights", (0, (3, 2))), ("calibrated", "-")):
                    curves = [of(s) for s in _spectra(analysis, metric, part)]
                    if curves:
                        name = label + (" by weights" if metric == "weights" else " on the data")
                        y = np.mean(curves, axis=0)
                        axes.plot(PERCENT, 100 * y, color=colour, linestyle=dashes, label=name)
            axes.set(title=title, xlabel="directions kept, % of all", xlim=(0, 100), ylim=(0, 101))
            axes.axhline(99, color=MUTED, linewidth=0.6)
            axes.grid()
        figure.get_layout_engine().set(wspace=0.06)
        panels[0].set_ylabel("captured variance, %")
        panels[1].annotate("99 %", (100, 97), ha="right", va="top", fontsize=8, color=MUTED)
        handles, labels = panels[1].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=3)

    return Figure(
        "spectra",
        "How much a few directions hold",
        "The share of energy (squared singular values) that the largest directions hold, averaged "
        "over layers: a curve that turns early means that fewer dimensions do the same work, solid "
        "where directions count as this text uses them, dashed by the weights alone.",
        svg(draw, (8.6, 4.4)),
        860,
    )


def layer_ranks(analysis: Analysis) -> Figure | None:
    """The directions that hold 99 %, layer by layer."""
    rows = [layer for layer in analysis.layers if layer.weights]
    if not rows:
        return None

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        x = np.arange(len(rows))
        for part, label, colour in PARTS:
            shift = 0.22 * ([p for p, *_ in PARTS].index(part) - 1)
            for metric, filled in (("weights", False), ("calibrated", True)):
                found = [_rank_of(layer, metric, part) for layer in rows]
                style: dict[str, Any] = {"facecolor": colour if filled else "none"}
                axes.scatter(
                    x + shift, found, s=34, edgecolor=colour, linewidth=1.3, **style,
                    label=label + (" on the data" if filled else " by weights"),
                )  # fmt: skip
        for row, layer in enumerate(rows):
            assert layer.weights is not None
            full = len(layer.weights.query.layer)
            axes.hlines(full, row - 0.4, row + 0.4, color=MUTED, linewidth=1)
        axes.set_xticks(x, [str(layer.index) for layer in rows])
        axes.set(xlabel="layer", ylabel="directions that hold 99 %")
        axes.set_ylim(bottom=0)
        axes.grid(axis="y")
        figure.legend(loc="outside lower center", ncols=3)

    return Figure(
        "spectra",
        "Directions that hold 99 %, layer by layer",
        "Filled dots are weighted by the data, hollow dots use the weights only, and the line is "
        "the maximum: shared dimensions must serve every head, so choose them by W_Q and W_K; the "
        "product sums over heads, which cancel.",
        svg(draw, (7.2, 4.2)),
        720,
    )


def bottleneck(analysis: Analysis) -> Figure | None:
    """Theorem 1 of arXiv 2002.07028, on the texts themselves."""
    sizes = sorted({layer.head_size for layer in analysis.layers})
    rows = [layer for layer in analysis.layers if layer.ranks is not None]

    def draw(figure: Any) -> None:
        left, *others = np.atleast_1d(figure.subplots(1, 3 if rows else 1))
        longest = max(int(analysis.lengths.max()), *sizes)
        bins = np.arange(0, longest + 2 + longest // 40, max(1, longest // 40))
        left.hist(analysis.lengths, bins=bins, color=FIRST, alpha=0.75)
        for size in sizes:
            left.axvline(size, color=THIRD, linewidth=1.4)
            left.annotate(
                f"K = {size}", (size, 1), (4, 0), xycoords=("data", "axes fraction"),
                textcoords="offset points", va="top", color=THIRD,
            )  # fmt: skip
        left.set(title="Lengths of the texts", xlabel="tokens, n", ylabel="texts")
        titles = ("Rank of the scores", "Rank of the attention")
        for axes, title, which in zip(others, titles, ("scores", "probabilities"), strict=False):
            for row, layer in enumerate(rows):
                ranks = layer.ranks
                assert ranks is not None
                shade = 0.25 + 0.65 * row / max(1, len(rows) - 1)
                y = np.median(getattr(ranks, which), axis=1)
                axes.plot(ranks.sizes, y, "o", color=FIRST, alpha=shade, markersize=3.2, mew=0)
            top = max(int(layer.ranks.sizes.max()) for layer in rows if layer.ranks is not None)
            axes.plot((0, top), (0, top), color=MUTED, linewidth=0.8)
            if which == "scores":
                axes.hlines(sizes, 0, top, color=THIRD, linewidth=1.4)
            axes.set(title=title, xlabel="tokens, n", ylabel="rank, median head")
            axes.set(xlim=(0, top * 1.04), ylim=(0, top * 1.06))
            axes.grid()
        figure.get_layout_engine().set(wspace=0.05)

    return Figure(
        "bottleneck",
        "What a head could tell apart, and what it does",
        "A head of size K (orange) cannot attend in every way over more than K tokens: left, how "
        "many texts are that long; then, one dot a text and layer (later layers stronger), how "
        "many dimensions the scores and the attention use, up to n (the thin line).",
        svg(draw, (9.6, 3.2) if rows else (4.6, 3.2)),
        960 if rows else 460,
    )


def importance(analysis: Analysis) -> Figure | None:
    """What each head is worth by each measure, and who was voted to stay."""
    heads = max(layer.num_heads for layer in analysis.layers)
    labels = [str(layer.index) for layer in analysis.layers]
    measures = (
        ("energy_share", "Energy, share of the layer"),
        ("leave_one_out", "Change without the head"),
        ("sensitivity", "Sensitivity to its gate"),
    )
    height = 1.5 + 0.26 * len(labels)

    def draw(figure: Any) -> None:
        panels, bars = figure.subplots(2, 3, height_ratios=[0.26 * len(labels), 0.09])
        for axes, bar, (name, title) in zip(panels, bars, measures, strict=True):
            table = _table(analysis, lambda layer, name=name: getattr(layer, name), heads)
            top = float(np.nanmax(table)) or 1.0
            heatmap(axes, table, labels, _sparse(heads), 0.0, top)
            scale_below(bar, top)
            stay = _table(analysis, lambda layer: layer.votes.mask, heads)
            y, x = np.nonzero(np.nan_to_num(stay))
            axes.plot(x, y, "o", color=PAPER, markersize=4.4, mew=1.1, markeredgecolor=INK)
            axes.set(title=title, xlabel="head")
        panels[0].set_ylabel("layer")

    return Figure(
        "importance",
        "Three measures of a head, and the vote",
        "Each row is a layer, each column a head; stronger is worth more, on each panel's own "
        "scale: how much the head writes, how much the model's outputs change without it (squared, "
        "relative), and how much they change with its gate; a dot is a head voted to stay.",
        svg(draw, (10.2, height + 0.6)),
        1000,
    )


FIGURES: Sequence[Callable[[Analysis], Figure | None]] = (
    layer_similarity,
    sequential_similarity,
    head_similarity,
    captured_variance,
    layer_ranks,
    bottleneck,
    importance,
)
"""In the order of the page; None where there is nothing to draw."""


def _spectra(analysis: Analysis, metric: str, part: str) -> list[Spectrum]:
    variances = [getattr(layer, metric) for layer in analysis.layers]
    return [s for v in variances if v is not None and (s := getattr(v, part)) is not None]


def _of_layer(spectrum: Spectrum) -> np.ndarray:
    return _on_grid(spectrum.layer)


def _of_heads(spectrum: Spectrum) -> np.ndarray:
    return np.mean([_on_grid(head) for head in spectrum.heads], axis=0)


def _on_grid(captured: np.ndarray) -> np.ndarray:
    x = np.linspace(0, 100, len(captured) + 1)
    return np.interp(PERCENT, x, np.concatenate([[0.0], captured]))


def _rank_of(layer: Any, metric: str, part: str) -> float:
    variance = getattr(layer, metric)
    spectrum = None if variance is None else getattr(variance, part)
    return np.nan if spectrum is None else spectrum.rank(SHARES[1])


def _table(analysis: Analysis, of: Callable[[Any], np.ndarray], heads: int) -> np.ndarray:
    table = np.full((len(analysis.layers), heads), np.nan)
    for row, layer in enumerate(analysis.layers):
        table[row, : layer.num_heads] = of(layer)
    return table


def _sparse(count: int) -> list[str]:
    step = 1 if count <= 16 else 4
    return [str(i) if i % step == 0 else "" for i in range(count)]


def pareto_front(
    predicted: Sequence[tuple[float, float]],
    built: Sequence[tuple[float, float]],
    plan: tuple[float, float] | None,
    *,
    title: str,
) -> str:
    """Draw the Pareto front of a plan as an SVG file; all points are (cosine, speed-up).

    Args:
        predicted: Points of the predicted front.
        built: Points of models that were built and evaluated.
        plan: The measured point of the plan, if it improves on the original.

    Raises:
        MissingExtra: Matplotlib is not installed.
    """

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        axes.grid(color=GRID)
        if predicted:
            axes.plot(*zip(*predicted, strict=True), color=FIRST, label="predicted Pareto front")
        if built:
            axes.plot(*zip(*built, strict=True), "o", color=SECOND, label="built and evaluated")
        if plan is not None:
            axes.plot([plan[0]], [plan[1]], "D", color=INK, label="plan (whole model, measured)")
        left = min([0.99, *(cosine for cosine, _ in built)]) - 0.02
        speeds = [speed for cosine, speed in predicted if cosine >= left]
        top = max(1.05, *speeds, 0.0 if plan is None else plan[1])
        axes.set_xlim(left, 1.002)
        axes.set_ylim(min([1.0, *speeds]) - 0.03, top * 1.05)
        axes.axhline(1.0, color=MUTED, linewidth=0.8, linestyle="--")
        axes.set_xlabel("mean output cosine to the original")
        axes.set_ylabel("speed-up")
        axes.set_title(title)
        axes.legend(loc="best")

    return svg_file(draw, (7.0, 4.2))
