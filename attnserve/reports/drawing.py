"""Draw plots as SVG that is embedded in a page and follows its theme.

Matplotlib draws with placeholder colors (``INK``, ``FIRST``, ...), which become CSS variables in
the SVG. Heatmaps use one hue with varying opacity, which works in light and dark themes. Text is
not converted to paths, and has the font of the page.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np

from graph_passes.errors import MissingExtra

__all__ = [
    "FIRST",
    "GRID",
    "INK",
    "MUTED",
    "PAPER",
    "SECOND",
    "THIRD",
    "heatmap",
    "require_extra",
    "scale_below",
    "scale_beside",
    "span",
    "svg",
    "svg_file",
]

INK, MUTED, GRID = "#0b0b01", "#0b0b02", "#0b0b03"
FIRST, SECOND, THIRD = "#0b0b04", "#0b0b05", "#0b0b06"
PAPER = "#0b0b07"
ROLES = {
    INK: "ink",
    MUTED: "muted",
    GRID: "grid",
    FIRST: "c1",
    SECOND: "c2",
    THIRD: "c3",
    PAPER: "paper",
}
HUE = (0.20, 0.47, 0.80)
"""Hue of heatmaps, readable on white and on black."""

STYLE: dict[str, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "attnserve",
    "font.size": 9,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "axes.axisbelow": True,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 9.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlecolor": INK,
    "text.color": INK,
    "text.parse_math": False,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "lines.solid_capstyle": "round",
}


def span(values: np.ndarray) -> tuple[float, float]:
    """The range of the values, rounded outwards to tenths."""
    if np.isnan(values).all():
        return 0.0, 1.0
    low = float(np.floor(10 * np.nanmin(values))) / 10
    return low, max(float(np.ceil(10 * np.nanmax(values))) / 10, low + 0.1)


def _shades(values: np.ndarray, low: float, top: float) -> np.ndarray:
    """RGBA values of one hue, with opacity proportional to the value; NaN is transparent."""
    shades = np.empty((*values.shape, 4))
    shades[..., :3] = HUE
    shades[..., 3] = np.nan_to_num(0.04 + 0.9 * np.clip((values - low) / (top - low or 1), 0, 1))
    return shades


def heatmap(
    axes: Any,
    values: np.ndarray,
    rows: Sequence[str],
    columns: Sequence[str],
    low: float,
    top: float,
    *,
    numbers: bool = False,
) -> None:
    """Draw a heatmap; ``rows`` and ``columns`` label the axes and may be empty."""
    axes.imshow(_shades(values, low, top), interpolation="none", aspect="auto")
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    axes.set_yticks(range(len(rows)), rows)
    axes.set_xticks(range(len(columns)), columns)
    if numbers:
        for (y, x), value in np.ndenumerate(values):
            if np.isfinite(value):
                axes.text(x, y, f"{value:.2f}", ha="center", va="center", color=INK)


def scale_beside(axes: Any, low: float, top: float, label: str) -> None:
    """Draw a vertical color bar as one image; matplotlib would draw one rectangle per shade."""
    bar = axes.inset_axes((1.03, 0.25, 0.028, 0.5))
    ramp = np.linspace(top, low, 64)[:, None]
    bar.imshow(_shades(ramp, low, top), aspect="auto", extent=(0, 1, low, top))
    bar.spines[:].set_visible(False)
    bar.set_xticks([])
    bar.yaxis.tick_right()
    bar.set_yticks((low, (low + top) / 2, top))
    bar.tick_params(length=2, labelsize=8)
    bar.set_title(label, fontsize=8.5, fontweight="normal")
    bar.patch.set_visible(False)


def scale_below(bar: Any, top: float) -> None:
    """Draw a horizontal color bar from 0 in its own axes."""
    ramp = np.linspace(0, top, 64)[None, :]
    bar.imshow(_shades(ramp, 0.0, top), aspect="auto", extent=(0, top, 0, 1))
    bar.spines[:].set_visible(False)
    bar.set_yticks([])
    ends = (0.0, top / 2, top)
    bar.set_xticks(ends, [f"{value:.2g}" for value in ends])
    bar.tick_params(length=2, labelsize=8)


def require_extra(*modules: str) -> None:
    """Check that optional modules of the reports are installed.

    Raises:
        MissingExtra: A module is not installed.
    """
    missing = [name for name in modules if find_spec(name) is None]
    if missing:
        raise MissingExtra(
            f"reports and plots need {' and '.join(missing)}, which is not installed",
            "pip install 'attnserve[report]'",
            code="extra.report",
        )


def svg(draw: Callable[[Any], None], size: tuple[float, float]) -> str:
    """Draw a figure of this size (inches) as an SVG element for a page.

    Raises:
        MissingExtra: Matplotlib is not installed.
    """
    require_extra("matplotlib")
    import matplotlib
    from matplotlib.figure import Figure as Canvas  # no pyplot: no global state

    style: Any = STYLE
    with matplotlib.rc_context(style):
        canvas: Any = Canvas(figsize=size, layout="constrained")
        canvas.patch.set_visible(False)
        draw(canvas)
        for axes in canvas.axes:
            axes.patch.set_visible(False)
        content = io.BytesIO()
        canvas.savefig(content, format="svg", metadata={"Date": None})
    return _inline(content.getvalue().decode())


def _inline(content: str) -> str:
    """Remove prologue, metadata, namespaces and fixed size from an SVG file."""
    content = content[content.index("<svg") :]
    content = re.sub(r"<metadata>.*?</metadata>", "", content, flags=re.DOTALL)
    content = re.sub(r' xmlns(:xlink)?="[^"]*"', "", content)
    content = re.sub(r'(<svg[^>]*?) width="[^"]*" height="[^"]*"', r"\1", content, count=1)
    content = re.sub(r'<g id="[^"]*">', "<g>", content)  # ids must be unique in a page
    for color, role in ROLES.items():
        content = content.replace(color, f"var(--{role})")
    return content


def svg_file(draw: Callable[[Any], None], size: tuple[float, float]) -> str:
    """Draw a figure as a standalone SVG file that follows the theme of the viewer."""
    content = svg(draw, size)
    space = '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
    return content.replace("<svg", space, 1).replace(">", f"><style>{THEME}</style>", 1) + "\n"


THEME = """
svg { font-family: system-ui, sans-serif; background: var(--paper);
  --ink: #1a1f24; --muted: #66707a; --grid: #e3e7ea; --paper: #ffffff;
  --c1: #2f6fcb; --c2: #c2571a; --c3: #3d8a4a; }
@media (prefers-color-scheme: dark) { svg {
  --ink: #e8eaed; --muted: #9aa4ae; --grid: #31373d; --paper: #16191c;
  --c1: #6aa5f5; --c2: #f08d4f; --c3: #74c285; } }
"""
