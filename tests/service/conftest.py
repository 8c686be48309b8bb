"""Fixtures of the service: the served tiny encoder, held runs, servers."""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import pytest
import uvicorn
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from attnserve.serving.loaded_model import Model
from service.app import create_app
from service.engine.repository import Repository
from service.settings import Settings
from tests.service.tiny import write_encoder


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


@pytest.fixture(autouse=True)
def log_as_it_was() -> Iterator[None]:
    """Restore the log, which servers and commands that tests start here replace."""
    root, ours = logging.getLogger(), logging.getLogger("attnserve")
    handlers, level = root.handlers[:], root.level
    ours.setLevel(logging.NOTSET)
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    ours.setLevel(logging.NOTSET)


def until(condition: Callable[[], Any], seconds: float = 30) -> Any:
    """The value of ``condition()`` once it is true."""
    end = monotonic() + seconds
    while not (value := condition()):
        assert monotonic() < end, "the condition was not met in time"
        sleep(0.01)
    return value


class HeldRuns:
    """Runs of all models, which wait for ``go``; ``started`` counts them."""

    def __init__(self) -> None:
        self.started, self.go = 0, threading.Event()

    def wait(self, runs: int = 1) -> None:
        """Wait until this number of runs has started."""
        until(lambda: self.started >= runs, 10)


@pytest.fixture
def hold(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], HeldRuns]]:
    """Hold the runs from now on; call it after the models are warmed up."""
    held, run = HeldRuns(), Model.run

    def wait_and_run(*args: Any) -> Any:
        held.started += 1
        assert held.go.wait(20)
        return run(*args)

    def install() -> HeldRuns:
        monkeypatch.setattr(Model, "run", wait_and_run)
        return held

    yield install
    held.go.set()


@contextmanager
def listening(app: Any) -> Iterator[str]:
    """The address of ``app`` behind uvicorn, on a free port of this machine."""
    # On a busy machine, a client may keep a connection idle for seconds.
    config = uvicorn.Config(app, port=0, log_config=None, access_log=False, timeout_keep_alive=600)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        until(lambda: server.started or not thread.is_alive())
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join()


@pytest.fixture
def start() -> Iterator[Callable[..., TestClient]]:
    """Start an application on the given settings; it stops with the test.

    Models are not probed: a child process for each takes seconds.
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
    """Fixtures of the service: the served tiny encoder, held runs, servers."""
    app = create_app(Settings(model=encoder, probe=False))
    with TestClient(app) as client:
        yield client


def samples(client: TestClient) -> dict[str, float]:
    """Every sample of /metrics, as name{label="value"}."""
    text = client.get("/metrics").text
    return {
        sample.name + "".join(f" {key}={value}" for key, value in sorted(sample.labels.items())): (
            sample.value
        )
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


@asynccontextmanager
async def serving(path: Path, limit_s: float = 60, **settings: Any) -> AsyncIterator[Repository]:
    """A repository of the models under ``path``."""
    chosen = Settings.model_validate({"model": path, "probe": False, **settings})
    repository = Repository(chosen)
    async with asyncio.timeout(limit_s):
        await repository.start()
        try:
            yield repository
        finally:
            await repository.close()
