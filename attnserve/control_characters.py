"""Escape control characters in untrusted text for terminals and logs."""

from __future__ import annotations

import re

__all__ = ["escape_control"]

CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u2029]")
"""Characters that control a terminal, or end a line, other than a line feed."""


def escape_control(text: str) -> str:
    """``text`` with escapes such as ``\\x1b`` in place of control characters."""
    return CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)
