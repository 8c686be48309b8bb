"""Expect errors of attnserve by their stable code instead of their text."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import pytest

from graph_passes.errors import AttnserveError


@contextmanager
def raises(
    error: type[AttnserveError], code: str, *values: Any
) -> Generator[pytest.ExceptionInfo[AttnserveError]]:
    """Expect ``error`` with this code; its text contains each of ``values``."""
    with pytest.raises(error) as caught:
        yield caught
    assert caught.value.code == code, f"{caught.value.code}: {caught.value}"
    for value in values:
        assert str(value) in str(caught.value)


def check_length(error: AttnserveError) -> None:
    """Two lines that fit on a screen, and the exit code of bad input."""
    lines = str(error).splitlines()
    assert error.exit_code == 2 and len(lines) == 2 and max(map(len, lines)) < 500
