"""The heartbeats of a worker process."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import cast

import pytest

from service.engine.repository import Repository
from service.settings import Settings
from service.workers import worker
from service.workers.shared_repository import SharedRepository
from service.workers.shared_state import SharedState


@pytest.fixture
def supervisor(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """The supervisor's end of a socket to which heartbeats are sent in place of standard input."""
    ours, theirs = socket.socketpair()
    write = os.write
    theirs.setblocking(False)
    monkeypatch.setattr(os, "write", lambda _, data: write(theirs.fileno(), data))
    monkeypatch.setattr(worker, "BEAT_S", 0)
    with ours, theirs:
        yield ours


def server(folder: Path) -> worker.WorkerServer:
    settings = Settings(model=folder)
    repository = cast(SharedRepository, Repository(settings))
    return worker.WorkerServer(None, repository, SharedState(folder, 2))


def beat(one: worker.WorkerServer, seconds: float) -> None:
    async def limited() -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(one.beat(), seconds)

    asyncio.run(limited())


def test_beat_full_socket_of_a_suspended_supervisor_does_not_block(
    tmp_path: Path, supervisor: socket.socket
) -> None:
    with suppress(BlockingIOError):
        while True:
            os.write(0, b"." * 65536)
    one = server(tmp_path)
    beat(one, 0.1)
    assert not one.is_orphaned and supervisor.recv(1) == b"."


def test_beat_after_end_of_the_supervisor_stops_the_worker(
    tmp_path: Path, supervisor: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda *signaled: sent.append(signaled))
    supervisor.close()
    one = server(tmp_path)
    beat(one, 5)
    assert one.is_orphaned and sent == [(os.getpid(), signal.SIGTERM)]
