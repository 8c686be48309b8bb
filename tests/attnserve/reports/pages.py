"""Read the pages that the reports write."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest

from attnserve.reports import drawing

HOSTILE = "</title><script>alert(1)</script> & \"'$x_1$"


class Page(HTMLParser):
    """Which tags a page opens and closes, and what their attributes are."""

    VOID = frozenset({"meta", "link", "img", "br", "hr", "input"})

    def __init__(self, content: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(content)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, f"</{tag}> closes nothing"

    def handle_data(self, data: str) -> None:
        self.text += data


def require_self_contained(content: str) -> None:
    """Expect a page without external references and scripts."""
    assert "http://" not in content and "https://" not in content and "@import" not in content
    page = Page(content)
    assert page.open == [] and "script" not in page.tags
    for tag, name, value in page.attributes:
        if name in {"src", "href", "xlink:href", "data", "srcset", "action"}:
            assert value.startswith(("#", "data:image/png;base64,")), (tag, name, value[:60])
        assert not name.startswith("on")
    for target in re.findall(r"url\(([^)]*)\)", content):
        assert target.startswith("#"), target


def hide(monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    """Let a module look as if it was not installed."""
    find_spec = drawing.find_spec
    monkeypatch.setattr(
        drawing, "find_spec", lambda name: None if name == module else find_spec(name)
    )
