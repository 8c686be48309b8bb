"""Short attacks; ``python -m tests.attack --minutes 60`` runs long ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from service.app import create_app
from service.settings import Settings
from tests.attack.attacks import ATTACKS, Run
from tests.attack.requests import calls
from tests.service.tiny import write_encoder

SECONDS = {"requests": 4, "folders": 6, "slow": 3, "overload": 3}
"""Duration of attacks; the others run one case."""

SLOW = dict.fromkeys(("overload", "signals", "commands"), pytest.mark.process)
"""Marks of attacks that start too many processes for a default test."""


@pytest.mark.parametrize("name", [pytest.param(one, marks=SLOW.get(one, ())) for one in ATTACKS])
def test_attack_finds_nothing(name: str, tmp_path: Path) -> None:
    run = Run(name, SECONDS.get(name, 0))
    ATTACKS[name](run, tmp_path)
    assert not run.findings, "\n".join(run.findings[:5])
    assert run.counts


def test_calls_cover_every_route(tmp_path: Path) -> None:
    app = create_app(Settings(model=write_encoder(tmp_path / "tiny"), probe=False))
    called = [(call.method, call.path) for call in calls()]
    left = [
        (method, route.path)
        for route in app.routes
        for method in getattr(route, "methods", ())
        if method != "HEAD"
        and not any(method == m and route.path_regex.fullmatch(path) for m, path in called)  # type: ignore[attr-defined]
    ]
    assert not left
