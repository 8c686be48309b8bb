"""serving_load: the load generator and the summaries of samples."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from benchmarks.serving.client import cosines, pack, percentiles, unpack
from benchmarks.serving.peers import PROGRAMS
from benchmarks.serving_load import recovery_seconds


@contextmanager
def server(delay_s: float = 0.0, *, hang_up_every: int = 0) -> Iterator[tuple[int, list[str]]]:
    """Serve POST requests with a delay; gives the port and the received bodies."""
    bodies: list[str] = []
    loop = asyncio.new_event_loop()
    started = threading.Event()
    port = 0

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await reader.readuntil(b"\r\n\r\n"):
            length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            bodies.append((await reader.readexactly(length)).decode())
            if hang_up_every and len(bodies) % hang_up_every == 0:
                break
            await asyncio.sleep(delay_s)
            # In two pieces, as over a network.
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\nX-Tokens: 7\r\n")
            await writer.drain()
            writer.write(b"\r\nfour")
        writer.close()

    async def quietly(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await answer(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    async def run() -> None:
        nonlocal port
        listening = await asyncio.start_server(quietly, "127.0.0.1", 0)
        port = listening.sockets[0].getsockname()[1]
        started.set()
        await stop.wait()
        listening.close()

    stop = asyncio.Event()
    thread = threading.Thread(target=loop.run_until_complete, args=(run(),))
    thread.start()
    started.wait()
    try:
        yield port, bodies
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()


def generate(port: int, *phases: dict[str, Any], connections: int = 16) -> list[dict[str, Any]]:
    plan = {"port": port, "path": "/embed", "bodies": ["one", "two"], "phases": phases}
    done = subprocess.run(
        [sys.executable, PROGRAMS / "generator.py"],
        input=json.dumps({**plan, "connections": connections}),
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)


def column(phase: dict[str, Any], name: str) -> list[float]:
    return [row[phase["columns"].index(name)] for row in phase["rows"]]


@pytest.mark.process
def test_closed_loop_sends_the_requested_number_in_order():
    with server() as (port, bodies):
        (phase,) = generate(port, {"concurrency": 1, "requests": 5})
    assert bodies == ["one", "two", "one", "two", "one"]
    assert column(phase, "status") == [200] * 5 and column(phase, "tokens") == [7] * 5


@pytest.mark.process
def test_closed_loop_keeps_the_concurrency():
    with server(0.05) as (port, _):
        (phase,) = generate(port, {"concurrency": 4, "seconds": 0.5})
    assert 20 <= len(phase["rows"]) <= 4 * 11
    assert min(column(phase, "latency_ms")) >= 50


@pytest.mark.process
def test_open_loop_keeps_its_rate_with_slow_answers():
    """With one connection, requests wait; latency counts from the time a request was due."""
    with server(0.1) as (port, _):
        (phase,) = generate(port, {"rate": 50, "seconds": 1}, connections=1)
    assert 25 <= len(phase["rows"]) <= 80
    assert max(column(phase, "latency_ms")) > 1000
    assert all(
        late <= latency
        for late, latency in zip(column(phase, "late_ms"), column(phase, "latency_ms"), strict=True)
    )


@pytest.mark.process
def test_open_loop_late_answers_belong_to_their_phase():
    with server(0.3) as (port, _):
        first, second = generate(
            port, {"rate": 40, "seconds": 0.5}, {"rate": 40, "seconds": 0.5}, connections=64
        )
    for phase in (first, second):
        assert min(column(phase, "due_s")) >= 0 and max(column(phase, "due_s")) <= 0.5


@pytest.mark.process
def test_closed_loop_counts_closed_connections():
    with server(hang_up_every=5) as (port, _):
        (phase,) = generate(port, {"concurrency": 1, "requests": 20})
    assert column(phase, "status").count(0) == 4 and column(phase, "status").count(200) == 16


@pytest.mark.process
def test_closed_loop_without_server_has_status_0():
    with server() as (port, _):
        pass
    (phase,) = generate(port, {"concurrency": 2, "requests": 6})
    assert column(phase, "status") == [0] * 6


def test_pack_keeps_ten_microseconds():
    samples = np.array([0.0, 0.014, 3.14159, 30_000.0])
    assert np.allclose(unpack(pack(samples)), samples, atol=0.005)
    assert len(pack(np.full(10_000, 1.5))) < 200


def test_percentiles_and_cosines_of_small_arrays():
    assert percentiles(np.arange(101.0))["p90"] == 90 and percentiles(np.array([])) == {}
    result = cosines(np.array([[1.0, 0], [2, 2]]), np.array([[3.0, 0], [1, 1]]))
    assert result == {"texts": 2, "min": pytest.approx(1), "mean": pytest.approx(1)}


@pytest.mark.parametrize(
    ("unwell_until", "expected"), [(0.0, 0.0), (1.5, 1.49), (99.0, float("inf"))]
)
def test_recovery_seconds_is_the_time_of_the_last_slow_request(
    unwell_until: float, expected: float
):
    due = np.arange(0, 5, 0.01)
    assert recovery_seconds(due, due < unwell_until) == pytest.approx(expected, abs=0.011)


def test_recovery_seconds_ignores_one_slow_answer():
    due = np.arange(0, 5, 0.01)
    assert recovery_seconds(due, np.isclose(due, 3.0)) == 0
