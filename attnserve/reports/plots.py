"""The plots of an analysis, each with a caption."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from attnserve.calibration.spectra import ScoreRanks, Spectrum
from attnserve.reports.analysis import SHARES, Analysis, LayerAnalysis
from attnserve.reports.drawing import (
    FIRST,
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
)

__all__ = ["FIGURES", "Figure"]

MOST_NUMBERS = 16
"""Heatmaps with at most this many rows have labels in their cells."""

PARTS = (("query", "W_Q", FIRST), ("key", "W_K", SECOND), ("product", "W_Q W_K\u1d40", THIRD))
METRICS = {"weights": "weights only", "calibrated": "weighted by data"}
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
    """Plot figure 2 of arXiv 2110.06821, with the mean over heads instead of the best head."""
    similarity = analysis.similarity.best()
    count = len(similarity)
    triangle = np.where(np.tri(count, k=-1, dtype=bool), similarity, np.nan)[1:, :-1]
    if np.isnan(triangle).all():
        return None
    low, top = span(triangle)
    labels = [str(layer.index) for layer in analysis.layers]
    size = min(6.4, 1.6 + 0.55 * count)

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        heatmap(axes, triangle, labels[1:], labels[:-1], low, top, numbers=count <= MOST_NUMBERS)
        axes.set(xlabel="earlier layer", ylabel="layer")
        scale_beside(axes, low, top, "similarity")

    return Figure(
        "similarity",
        "Similarity to earlier layers",
        "Rows are layers, columns are earlier layers. A cell is the mean similarity (0 to 1) of "
        "the row's heads to their best matches in the column's layer. A layer with a strong cell "
        "could reuse the attention of that earlier layer.",
        svg(draw, (size + 0.9, size)),
        int(100 * (size + 0.9)),
    )


def head_similarity(analysis: Analysis) -> Figure | None:
    """Plot the similarity c (eq. 3 of arXiv 2110.06821) of every pair of heads."""
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
        middles = (ends[:-1] + ends[1:] - 1) / 2
        labels = [str(x.index) for x in analysis.layers]
        axes.set_xticks(middles, labels)
        axes.set_yticks(middles, labels)
        axes.tick_params(length=0)
        axes.set(xlabel="heads, by layer", ylabel="heads, by layer")
        scale_beside(axes, low, top, "similarity")

    return Figure(
        "similarity",
        "Similarity of all heads",
        "Rows and columns are heads in execution order, with lines between layers. A strong cell "
        "outside the diagonal blocks is a head that repeats a head of another layer.",
        svg(draw, (7.4, 6.4)),
        680,
    )


def sequential_similarity(analysis: Analysis) -> Figure | None:
    """Plot figure 3 of arXiv 2110.06821."""
    ranks = analysis.similarity.sequential()
    rows = [layer for layer in analysis.layers if layer.name in ranks]
    if not rows:
        return None
    width = max(len(ranks[layer.name]) for layer in rows)
    table = np.full((len(rows), width), np.nan)
    for row, layer in enumerate(rows):
        table[row, : len(ranks[layer.name])] = ranks[layer.name]

    baseline = dict(
        zip(analysis.similarity.layers, analysis.similarity.baseline().tolist(), strict=True)
    )
    uniform = [baseline[layer.name] for layer in rows]

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        x = np.arange(len(rows))
        for rank in range(width):
            axes.plot(x, table[:, rank], "-o", color=FIRST, linewidth=1, markersize=3.5, alpha=0.35)
        named = (("most similar head", np.nanmax, FIRST), ("median", np.nanmedian, SECOND))
        for label, of, color in (*named, ("least similar head", np.nanmin, THIRD)):
            axes.plot(x, of(table, axis=1), "-o", color=color, markersize=4.5, label=label)
        if analysis.similarity.uniform is not None:
            axes.plot(x, uniform, "--", color="0.4", linewidth=1.2, label="uniform attention")
        axes.set_xticks(x, [str(layer.index) for layer in rows])
        axes.set(xlabel="layer", ylabel="similarity to the previous layer", ylim=(0, 1.02))
        axes.grid(axis="y")
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, borderaxespad=0.2)

    return Figure(
        "similarity",
        "Similarity to the previous layer",
        "For each layer, the similarity of its heads to their best matches in the previous layer, "
        "sorted, with one thin line per rank. Heads on high lines repeat the previous layer. The "
        "dashed line is the mean similarity to uniform attention: heads of an untrained model are "
        "nearly uniform, and so similar. Only lines above it are a reason for reuse.",
        svg(draw, (6.8, 3.6)),
        680,
    )


def captured_variance(analysis: Analysis) -> Figure | None:
    """Plot figure 1 of arXiv 2006.16362."""
    if not any(layer.weights for layer in analysis.layers):
        return None

    def draw(figure: Any) -> None:
        panels = figure.subplots(1, 2, sharey=True)
        titles = ("Single heads (mean)", "All heads of a layer")
        for axes, title, of in zip(panels, titles, (_of_heads, _of_layer), strict=True):
            for part, label, color in PARTS:
                for metric, dashes in (("weights", (0, (3, 2))), ("calibrated", "-")):
                    spectra = [_spectrum(layer, metric, part) for layer in analysis.layers]
                    curves = [of(spectrum) for spectrum in spectra if spectrum is not None]
                    if curves:
                        name = f"{label}, {METRICS[metric]}"
                        y = np.mean(curves, axis=0)
                        axes.plot(PERCENT, 100 * y, color=color, linestyle=dashes, label=name)
            axes.set(title=title, xlabel="directions, % of all", xlim=(0, 100), ylim=(0, 101))
            axes.axhline(99, color=MUTED, linewidth=0.6)
            axes.grid()
        figure.get_layout_engine().set(wspace=0.06)
        panels[0].set_ylabel("captured variance, %")
        panels[1].annotate("99 %", (100, 97), ha="right", va="top", fontsize=8, color=MUTED)
        handles, labels = panels[1].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=3)

    return Figure(
        "spectra",
        "Captured variance",
        "The share of the variance (squared singular values) in the largest directions, averaged "
        "over layers. With a steep curve, fewer dimensions are sufficient. Solid lines are "
        "weighted by the data, dashed lines use the weights only.",
        svg(draw, (8.6, 4.4)),
        860,
    )


def layer_ranks(analysis: Analysis) -> Figure | None:
    """Plot the number of directions that hold 99 % of the variance in each layer."""
    rows = [layer for layer in analysis.layers if layer.weights]
    if not rows:
        return None

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        x = np.arange(len(rows))
        for place, (part, label, color) in enumerate(PARTS):
            for metric, face in (("weights", "none"), ("calibrated", color)):
                spectra = [_spectrum(layer, metric, part) for layer in rows]
                axes.scatter(
                    x + 0.22 * (place - 1),
                    [np.nan if s is None else s.rank(SHARES[1]) for s in spectra],
                    s=34,
                    edgecolor=color,
                    linewidth=1.3,
                    facecolor=face,
                    label=f"{label}, {METRICS[metric]}",
                )
        for row, layer in enumerate(rows):
            assert layer.weights is not None
            full_rank = len(layer.weights.query.layer)
            axes.hlines(full_rank, row - 0.4, row + 0.4, color=MUTED, linewidth=1)
        axes.set_xticks(x, [str(layer.index) for layer in rows])
        axes.set(xlabel="layer", ylabel="directions for 99 %")
        axes.set_ylim(bottom=0)
        axes.grid(axis="y")
        figure.legend(loc="outside lower center", ncols=3)

    return Figure(
        "spectra",
        "Directions that hold 99 % of the variance, by layer",
        "Filled dots are weighted by the data, hollow dots use the weights only, and the line is "
        "the maximum. Choose shared dimensions by W_Q and W_K. The rank of the product is too low: "
        "it sums over heads, which cancel.",
        svg(draw, (7.2, 4.2)),
        720,
    )


def bottleneck(analysis: Analysis) -> Figure | None:
    """Plot theorem 1 of arXiv 2002.07028, evaluated on the calibration texts."""
    sizes = sorted({layer.head_size for layer in analysis.layers})
    ranks = [layer.ranks for layer in analysis.layers if layer.ranks is not None]

    def draw(figure: Any) -> None:
        panels = figure.subplots(1, 3 if ranks else 1, squeeze=False)[0]
        _draw_lengths(panels[0], analysis.lengths, sizes)
        if ranks:
            _draw_ranks(panels[1], ranks, "scores", sizes)
            _draw_ranks(panels[2], ranks, "probabilities", [])
        figure.get_layout_engine().set(wspace=0.05)

    return Figure(
        "bottleneck",
        "Text length and rank of attention",
        "A head of size K (orange) cannot represent every attention pattern over more than K "
        "tokens. Left: the lengths of the texts. Middle and right: the ranks of scores and "
        "probabilities, one dot per text and layer (later layers are more opaque). The thin line "
        "is n.",
        svg(draw, (9.6, 3.2) if ranks else (4.6, 3.2)),
        960 if ranks else 460,
    )


def _draw_lengths(axes: Any, lengths: np.ndarray, sizes: Sequence[int]) -> None:
    """Draw a histogram of the lengths of texts, with the sizes of heads."""
    longest = max(int(lengths.max()), *sizes)
    bins = np.arange(0, longest + 2 + longest // 40, max(1, longest // 40))
    axes.hist(lengths, bins=bins, color=FIRST, alpha=0.75)
    for size in sizes:
        axes.axvline(size, color=THIRD, linewidth=1.4)
        axes.annotate(
            f"K = {size}",
            (size, 1),
            (4, 0),
            xycoords=("data", "axes fraction"),
            textcoords="offset points",
            va="top",
            color=THIRD,
        )
    axes.set(title="Text length", xlabel="tokens, n", ylabel="texts")
    axes.locator_params(axis="y", integer=True)


def _draw_ranks(axes: Any, layers: Sequence[ScoreRanks], name: str, sizes: Sequence[int]) -> None:
    """Draw the median rank of the scores or probabilities of each text, with the sizes of heads."""
    for row, ranks in enumerate(layers):
        shade = 0.25 + 0.65 * row / max(1, len(layers) - 1)
        y = np.median(getattr(ranks, name), axis=1)
        axes.plot(ranks.sizes, y, "o", color=FIRST, alpha=shade, markersize=3.2, mew=0)
    top = max(int(ranks.sizes.max()) for ranks in layers)
    axes.plot((0, top), (0, top), color=MUTED, linewidth=0.8)
    axes.hlines(sizes, 0, top, color=THIRD, linewidth=1.4)
    axes.set(title=f"Rank of the {name}", xlabel="tokens, n", ylabel="rank, median head")
    axes.set(xlim=(0, top * 1.04), ylim=(0, top * 1.06))
    axes.locator_params(integer=True)
    axes.grid()


def importance(analysis: Analysis) -> Figure | None:
    """Plot the importance of each head by three measures, and the heads kept by Voting-to-Stay."""
    heads = max(layer.num_heads for layer in analysis.layers)
    labels = [str(layer.index) for layer in analysis.layers]
    measures = (
        ("energy_share", "Share of the layer's energy"),
        ("leave_one_out", "Leave-one-out change"),
        ("sensitivity", "Gate sensitivity"),
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
        "Three importance measures and the vote",
        "Rows are layers and columns are heads. A stronger cell is a more important head; each "
        "panel has its own scale. Left: the head's share of the output energy. Middle: the "
        "relative squared change of the model outputs without the head. Right: the change of the "
        "outputs with the head's gate. Dots mark the heads that Voting-to-Stay keeps.",
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
"""The functions of all figures in the order of the page; each returns None without data."""


def _spectrum(layer: LayerAnalysis, metric: str, part: str) -> Spectrum | None:
    """A part of the captured variance of a layer, by a metric of ``METRICS``; None without one."""
    variance = getattr(layer, metric)
    return None if variance is None else getattr(variance, part)


def _of_layer(spectrum: Spectrum) -> np.ndarray:
    return _on_grid(spectrum.layer)


def _of_heads(spectrum: Spectrum) -> np.ndarray:
    return np.mean([_on_grid(head) for head in spectrum.heads], axis=0)


def _on_grid(captured: np.ndarray) -> np.ndarray:
    x = np.linspace(0, 100, len(captured) + 1)
    return np.interp(PERCENT, x, np.concatenate([[0.0], captured]))


def _table(analysis: Analysis, of: Callable[[Any], np.ndarray], heads: int) -> np.ndarray:
    table = np.full((len(analysis.layers), heads), np.nan)
    for row, layer in enumerate(analysis.layers):
        table[row, : layer.num_heads] = of(layer)
    return table


def _sparse(count: int) -> list[str]:
    step = 1 if count <= 16 else 4
    return [str(i) if i % step == 0 else "" for i in range(count)]
