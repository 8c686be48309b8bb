"""Rows for tests of the queue and of the batcher."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from hypothesis import strategies as st

from service.engine.row_queue import AnyRow, Row

LENGTHS = st.integers(1, 40)


def row(tokens: int, key: Hashable = "text", payload: Any = None) -> AnyRow:
    return Row(key, tokens, payload)
