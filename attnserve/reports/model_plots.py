"""The plots of a model's report: search, changes, latencies, losses of training."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import chain, cycle, groupby, pairwise
from typing import Any

import numpy as np

from attnserve.models.lineage import LineageEntry, RecoverEntry, search_of
from attnserve.models.search_record import PrecisionPoint, SearchRecord
from attnserve.reports.drawing import FIRST, GRID, INK, MUTED, PAPER, SECOND, THIRD, svg, svg_file
from attnserve.reports.plots import Figure

__all__ = ["figures", "plot_search"]


def figures(rewrite: LineageEntry) -> list[Figure]:
    """The plots that the recorded values of one rewrite allow."""
    plots = (_search(rewrite), _changes(rewrite), _latency(rewrite), _recovery(rewrite))
    return [figure for figure in plots if figure is not None]


def plot_search(search: SearchRecord) -> str:
    """Draw the precisions and the Pareto front of a search as an SVG file.

    Raises:
        MissingExtra: Matplotlib is not installed.
    """
    title = search.verdict.partition(": ")[0] if search.gain else search.verdict
    return svg_file(partial(_draw_search, search, title=title), (_search_width(search), 4.2))


def _search(rewrite: LineageEntry) -> Figure | None:
    """Speed and quality of the precisions, and of the choices of the search."""
    search = search_of(rewrite)
    if search is None or not search.front:
        return None
    width = _search_width(search)
    return Figure(
        "search",
        "Speed and quality of the search",
        ("Left: the original in each precision. Right: " if search.precisions else "")
        + "The choices of the search for which no other choice loses less and is faster, for each "
        "searched precision.",
        svg(partial(_draw_search, search), (width, 3.6)),
        round(100 * width),
    )


def _search_width(search: SearchRecord) -> float:
    return 9.6 if search.precisions else 6.4


def _draw_search(search: SearchRecord, figure: Any, *, title: str = "") -> None:
    """Draw the compared precisions, if there are any, and the front of each searched precision.

    Speed-ups of several precisions are over the fused original in float32, and those of one over
    the original in it.
    """
    panels = figure.subplots(1, 2 if search.precisions else 1, squeeze=False)[0]
    if search.precisions:
        _draw_precisions(search.precisions, panels[0])
    axes, precision, kept = panels[-1], search.goal.precision, search.kept
    fronts = {point.precision: point.front for point in search.precisions if point.front}
    is_common = bool(fronts)
    fronts = fronts or {"predicted Pareto front": search.front}
    predicted: list[tuple[float, float]] = []
    for (label, front), color in zip(fronts.items(), cycle((FIRST, THIRD, MUTED)), strict=False):
        points = [(1 - point.predicted_loss, point.speedup) for point in front]
        axes.plot(*zip(*points, strict=True), color=color, label=label)
        predicted += points
    built = [
        (1 - point.measured_loss, point.speedup)
        for point in chain.from_iterable(fronts.values())
        if point.measured_loss is not None
    ]
    if built:
        axes.plot(*zip(*built, strict=True), "o", color=SECOND, label="built and evaluated")
    plan: list[tuple[float, float]] = []
    if kept is not None and search.speedup is not None and precision == "float32" and not is_common:
        plan.append((kept, search.speedup))
        axes.plot(*plan[0], "D", color=INK, label="plan (whole model, measured)")
    left = min([0.99, *(kept for kept, _ in (*built, *plan))]) - 0.02
    speeds = [speed for kept, speed in (*predicted, *built, *plan) if kept >= left]
    axes.set_xlim(left, 1.002)
    axes.set_ylim(min([1.0, *speeds]) - 0.03, max(1.05, *speeds) * 1.05)
    if is_common:
        axes.set_ylabel("speed-up over the fused original")
    else:
        axes.set_ylabel("speed-up" if precision == "float32" else f"speed-up in {precision}")
    axes.legend(loc="best")
    axes.grid(color=GRID)
    axes.axhline(1.0, color=MUTED, linewidth=0.8, linestyle="--")
    axes.set_xlabel("quality kept: 1 - loss")
    figure.suptitle(title, fontsize="medium")


def _draw_precisions(points: Sequence[PrecisionPoint], axes: Any) -> None:
    """Draw the speed-up of each precision, with the quality that it keeps."""
    places = range(len(points))
    speeds = [point.speedup.value for point in points]
    axes.barh(places, speeds, color=SECOND, height=0.6)
    for place, point in zip(places, points, strict=True):
        text = f"{point.speedup.value:.2f}x, keeps {1 - point.loss:.4f}"
        is_long = point.speedup.value > max(speeds) / 2
        axes.annotate(
            text,
            (point.speedup.value, place),
            (-5 if is_long else 5, 0),
            textcoords="offset points",
            ha="right" if is_long else "left",
            va="center",
            color=PAPER if is_long else INK,
            fontsize=8,
        )
    axes.set_yticks(places, [f"{point.precision}\n{point.runtime}" for point in points])
    axes.set_xlabel("speed-up over the fused original")
    axes.grid(axis="x", color=GRID)


def _changes(rewrite: LineageEntry) -> Figure | None:
    """Error of each change, and the cost after it."""
    changes = [change for change in rewrite.changes if change.relative_error is not None]
    if len(changes) < 2:
        return None
    before = rewrite.before and rewrite.before.macs
    costs = [100 * c.macs_after / before for c in changes if before and c.macs_after is not None]
    has_cost = len(costs) == len(changes)

    def draw(figure: Any) -> None:
        panels = figure.subplots(2 if has_cost else 1, 1, sharex=True, squeeze=False)[:, 0]
        places = np.arange(len(changes))
        panels[0].bar(places, [change.relative_error for change in changes], color=FIRST, width=0.7)
        panels[0].set_ylabel("relative error")
        if has_cost:
            panels[1].bar(places, costs, color=SECOND, width=0.7)
            panels[1].axhline(100, color=MUTED, linewidth=0.8, linestyle="--")
            panels[1].set_ylabel("MACs, % of before")
        starts, names = _groups([change.rewrite for change in changes])
        for axes in panels:
            axes.grid(axis="y", color=GRID)
            axes.set_xlim(-0.5, len(changes) - 0.5)
            axes.tick_params(axis="x", length=0)
            for start in starts[1:-1]:
                axes.axvline(start - 0.5, color=MUTED, linewidth=0.6, linestyle=":")
        middles = [(a + b - 1) / 2 for a, b in pairwise(starts)]
        panels[-1].set_xticks(middles, names)

    return Figure(
        "changes",
        "Error and cost of the changes",
        "One bar per rewritten block, in the order of the table: the relative error of the change."
        + (" Below: the MACs of the whole model after each change." if has_cost else ""),
        svg(draw, (9.6, 3.6 if has_cost else 2.2)),
        960,
    )


def _groups(names: list[str]) -> tuple[list[int], list[str]]:
    """The first index of each run of equal names (and the end), and the name of each run."""
    starts = [0]
    labels = list[str]()
    for name, run in groupby(names):
        starts.append(starts[-1] + len(list(run)))
        labels.append(name)
    return starts, labels


def _latency(rewrite: LineageEntry) -> Figure | None:
    """Latency of the original and of the new model at each measured shape."""
    search = search_of(rewrite)
    speeds = search.speeds if search else ()
    if not speeds:
        return None

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        places = np.arange(len(speeds))
        original_ms = [speed.original_ms for speed in speeds]
        new_ms = [speed.ms for speed in speeds]
        axes.bar(places - 0.2, original_ms, 0.38, color=MUTED, label="original")
        axes.bar(places + 0.2, new_ms, 0.38, color=FIRST, label="new")
        for place, speed in zip(places, speeds, strict=True):
            axes.annotate(
                f"{speed.speedup:.2f}x",
                (place + 0.2, speed.ms),
                (0, 3),
                textcoords="offset points",
                ha="center",
                color=INK,
                fontsize=8,
            )
        axes.set_xticks(places, [f"{speed.batch} x {speed.sequence}" for speed in speeds])
        axes.set(xlabel="batch x tokens", ylabel="median latency in ms")
        axes.grid(axis="y", color=GRID)
        axes.set_ylim(0, 1.12 * max(*original_ms, *new_ms))
        axes.legend(loc="upper left")

    return Figure(
        "latency",
        "Latency",
        "Median of interleaved rounds of both models; the number is the speed-up at that shape.",
        svg(draw, (9.6 if len(speeds) > 4 else 5.6, 3.0)),
        960 if len(speeds) > 4 else 560,
    )


def _recovery(rewrite: LineageEntry) -> Figure | None:
    """Losses of the training against time."""
    history = rewrite.training.history if isinstance(rewrite, RecoverEntry) else ()
    rows = [(s, a, b) for s, a, b in history if a and b and a > 0 and b > 0]
    if len(rows) < 2:
        return None
    from matplotlib.ticker import LogLocator

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        seconds, training, held_out = zip(*rows, strict=True)
        unit, name = (60, "minutes") if seconds[-1] > 300 else (1, "seconds")
        times = np.array(seconds) / unit
        axes.plot(times, training, color=MUTED, label="training rows")
        axes.plot(times, held_out, color=FIRST, label="rows to choose")
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")  # the default is mathematical text
        axes.yaxis.set_minor_formatter("")
        axes.set(xlabel=name, ylabel="loss")
        axes.grid(color=GRID)
        axes.legend(loc="best")

    return Figure(
        "recovery",
        "Loss of the recovery",
        "The loss on the training rows and on the rows to choose, against the time of training.",
        svg(draw, (5.6, 3.0)),
        560,
    )
