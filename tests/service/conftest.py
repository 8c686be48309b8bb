"""The tiny encoder, served."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from starlette.testclient import TestClient

from service.app import create_app
from service.settings import Settings
from tests.service.tiny import write_encoder


@pytest.fixture(autouse=True)
def log_as_it_was() -> Iterator[None]:
    """A server that a test starts here sets the log up for its process, and takes this one's
    stderr of the moment for it."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@contextmanager
def listening(app: Any) -> Iterator[str]:
    """The address of ``app`` behind uvicorn, on a free port of this machine."""
    config = uvicorn.Config(
        app, port=0, log_config=None, access_log=False, timeout_keep_alive=600
    )  # a client that a busy machine holds up for seconds keeps its connection
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive(), "the server does not come up"
            thread.join(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join()


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
