"""Goals of a search."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from attnserve.options import Goal
from graph_passes.errors import (
    InvalidArgument,
)
from tests.errors import raises


@pytest.mark.parametrize(
    ("goal", "code", "values"),
    [
        ({"keep": 0.9, "target_speedup": 2.0}, "conflict", ("`keep`", "`target_speedup`")),
        ({"keep": 0.0}, "range", ("`keep` is 0.0",)),
        ({"keep": 1.01}, "range", ("`keep` is 1.01",)),
        ({"keep": float("nan")}, "range", ("`keep` is nan",)),
        ({"target_speedup": 0.5}, "range", ("`target_speedup` is 0.5",)),
        ({"target_speedup": float("nan")}, "range", ("`target_speedup` is nan",)),
        ({"keep": 0.9, "task": "sts"}, "conflict", ("`task`", "`eval_data`")),
        ({"keep": 0.9, "eval_data": Path("x.tsv")}, "conflict", ("`task`", "`eval_data`")),
        ({"keep": 0.9, "allow": ("everything",)}, "range", ("everything", "ffn")),
    ],
)
def test_goal_that_is_impossible_is_refused(
    goal: dict[str, Any], code: str, values: tuple[str, ...]
):
    with raises(InvalidArgument, f"goal.{code}", *values):
        Goal(**goal)
