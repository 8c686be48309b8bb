"""The uvicorn server of a process: what a drain loses, and whose addresses it believes."""

from __future__ import annotations

import asyncio
import gc
import signal
from pathlib import Path

import pytest
import uvicorn
from fastapi import FastAPI

from service.engine.repository import Repository
from service.errors import ServiceError
from service.metrics import Metrics
from service.server import Server
from service.settings import Settings
from tests.errors import raises


@pytest.fixture
def server(tmp_path: Path) -> Server:
    return Server(FastAPI(), Repository(Settings(model=tmp_path), Metrics()))


@pytest.mark.parametrize("cut", [0, 2])
def test_answers_that_are_cut_during_the_drain_are_an_error(
    server: Server, monkeypatch: pytest.MonkeyPatch, cut: int
) -> None:
    def run(self: Server, sockets: object) -> None:
        self.server_state.cut_answers = 1  # before the drain: the client's own fault
        self.handle_exit(signal.SIGTERM, None)
        self.server_state.cut_answers += cut

    monkeypatch.setattr(uvicorn.Server, "run", run)
    if cut:
        with raises(ServiceError, "server.drain_timeout", "2 connections"):
            server.run()
    else:
        server.run()


def test_sigterm_after_the_models_are_loaded_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The task that loads them still logs their operators then."""
    repository = Repository(Settings(model=tmp_path), Metrics())
    server = Server(FastAPI(), repository)

    async def nothing(*_: object) -> None:
        server.started = True

    def run(self: Server, sockets: object) -> None:
        async def start() -> None:
            await server.startup()
            while not server.should_exit:
                await asyncio.sleep(0)

        asyncio.run(start())

    monkeypatch.setattr(
        repository, "log_operators", lambda: server.handle_exit(signal.SIGTERM, None)
    )
    monkeypatch.setattr(server, "load", nothing)
    monkeypatch.setattr(gc, "freeze", lambda: None)
    monkeypatch.setattr(uvicorn.Server, "run", run)
    monkeypatch.setattr(uvicorn.Server, "startup", nothing)
    server.run()
    assert server.should_exit


@pytest.mark.parametrize("proxies", [None, "127.0.0.1"])
def test_address_of_the_client_is_read_from_headers_of_named_proxies_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, proxies: str | None
) -> None:
    monkeypatch.delenv("FORWARDED_ALLOW_IPS", raising=False)
    if proxies is not None:
        monkeypatch.setenv("FORWARDED_ALLOW_IPS", proxies)
    found = Server(FastAPI(), Repository(Settings(model=tmp_path), Metrics())).config
    assert found.proxy_headers == (proxies is not None)
    assert proxies is None or found.forwarded_allow_ips == proxies
