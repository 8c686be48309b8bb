from __future__ import annotations

import logging

import pytest

from attnserve.cli.app import main
from tests.attnserve.cli.commands import Cli, Outcome


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Cli:
    # `serve` sends the log to stderr for good, which here is closed after the test.
    monkeypatch.setattr(logging, "basicConfig", lambda **_: None)

    def run(*arguments: object) -> Outcome:
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        return Outcome(code, *capsys.readouterr())

    return run
