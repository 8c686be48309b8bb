"""The tiny encoder, served."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from service.app import create_app
from service.settings import Settings
from tests.service.tiny import write_encoder


@pytest.fixture
def start() -> Iterator[Callable[..., TestClient]]:
    """Start an application on the given settings; it stops with the test.

    Models that are made here are trusted: a process of its own for each takes seconds.
    """
    started: list[TestClient] = []

    def client(model: Path, **settings: object) -> TestClient:
        chosen = {"model": model, "probe": False, **settings}
        app = create_app(Settings.model_validate(chosen))
        started.append(TestClient(app).__enter__())
        return started[-1]

    yield client
    for one in started:
        one.__exit__()


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_encoder(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def client(encoder: Path) -> Iterator[TestClient]:
    """The tiny encoder, served."""
    app = create_app(Settings(model=encoder, probe=False))
    with TestClient(app) as client:
        yield client
