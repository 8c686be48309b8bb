"""Render the HTML pages of the reports: one document each, without external references."""

from __future__ import annotations

import shlex
from typing import Any

from attnserve.reports.drawing import require_extra

__all__ = ["render_page"]


def render_page(template: str, **values: Any) -> str:
    """Render a template of ``attnserve/reports/templates``; all values are escaped.

    Raises:
        MissingExtra: jinja2 is not installed.
    """
    require_extra("jinja2")
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("attnserve.reports"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["quote"] = shlex.quote
    return environment.get_template(template).render(**values)
