"""MkDocs hook: insert generated parts into pages, and write equations as MathML.

``<!-- generate: searches.planner_speed -->`` on a line of its own is replaced by what that function
of a module of this folder returns. Equations ($...$ and $$...$$) become MathML, which browsers
display without a script, so that the site loads nothing from elsewhere.
"""

from __future__ import annotations

import html
import re
from typing import Any

from latex2mathml.converter import convert

from docs.hooks import reference, training
from docs.hooks.tables import (
    peers,
    readme,
    recovery,
    results,
    rewrites,
    runtimes,
    searches,
    serving,
)

MODULES = {
    module.__name__.rpartition(".")[2]: module
    for module in (
        peers, readme, recovery, results, rewrites, runtimes, searches, serving,
        reference, training,
    )
}  # fmt: skip
DIRECTIVE = re.compile(r"^<!-- generate: (\w+)\.(\w+)(?: ([\w /-]+))? -->$", re.MULTILINE)
EQUATION = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)


def generated(markdown: str) -> str:
    """The page with every directive replaced."""

    def insert(match: re.Match[str]) -> str:
        module, function, arguments = match.groups()
        return getattr(MODULES[module], function)(*(arguments or "").split())

    return DIRECTIVE.sub(insert, markdown)


def on_page_markdown(markdown: str, **_: Any) -> str:
    return generated(markdown)


def on_page_content(content: str, **_: Any) -> str:
    def mathml(match: re.Match[str]) -> str:
        tag, equation = match.groups()
        display = "block" if tag == "div" else "inline"
        return convert(html.unescape(equation), display=display)

    return EQUATION.sub(mathml, content)
