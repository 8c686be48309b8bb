"""The options of the command line that are generated from types."""

from __future__ import annotations

from typing import Any

import pytest

from attnserve.options import Options
from tests.attnserve.cli.commands import Cli
from tests.attnserve.options.cases import CASES, COMMANDS


@pytest.mark.parametrize(
    ("group", "name", "value"),
    [case for case in CASES if not case[0].option(case[1]).cli.switches],
)
def test_option_out_of_bounds_exits_2_and_is_named(
    cli: Cli, group: type[Options], name: str, value: Any
):
    about = group.option(name)
    flag = about.cli.flags[0] if about.cli.flags else f"--{name.replace('_', '-')}"
    text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
    done = cli(*COMMANDS[group], f"{flag}={text}")
    assert done.code == 2 and flag in done.err
    assert len(done.err.strip().splitlines()) <= 3
