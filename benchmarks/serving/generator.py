"""Load generator: a process that sends HTTP/1.1 requests over persistent connections.

    python generator.py < plan.json > samples.json

The plan: {"port", "path", "bodies": [text, ...], "headers": {...}, "connections", "seed",
"phases": [{"rate", "seconds"} or {"concurrency", "seconds" or "requests"}]}. A phase with a rate is
open loop: requests are due at Poisson times, independent of the answers, and latency counts from
the time a request was due. A phase with a concurrency is closed loop: that many requests are always
in flight. Bodies are used in order and repeated.

Each phase returns rows: when a request was due (seconds from the start of the phase), latency (ms),
how late it was sent (ms), status (0: the connection failed or timed out), and the queue, tokenize
and compute milliseconds, tokens, padding waste and MACs from the headers of the answer.
Only the standard library is used, to keep the generator fast.
"""

from __future__ import annotations

import asyncio
import json
import random
import resource
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from itertools import cycle
from time import perf_counter
from typing import Any, NamedTuple

ANSWER_TIMEOUT_S = 30.0
"""Time limit for the last answers of a phase; missing answers count as failures."""

NUMBERS = {
    b"x-queue-ms": "queue_ms",
    b"x-tokenize-ms": "tokenize_ms",
    b"x-compute-ms": "compute_ms",
    b"x-tokens": "tokens",
    b"x-padding-waste": "padding_waste",
    b"x-macs": "macs",
}


class Due(NamedTuple):
    """A request of a phase, and the time when it is due."""

    phase: int
    at: float
    request: bytes


class Connection(asyncio.Protocol):
    """One connection: at most one request at a time."""

    def __init__(self, load: Load) -> None:
        self.load = load
        self.transport: asyncio.Transport | None = None
        self.due: Due | None = None
        self.sent = 0.0
        self.buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def send(self, due: Due) -> None:
        assert self.transport is not None
        self.due, self.sent, self.buffer = due, perf_counter(), b""
        self.transport.write(due.request)

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        end = self.buffer.find(b"\r\n\r\n")
        if end < 0:
            return
        lines = self.buffer[:end].lower().split(b"\r\n")[1:]
        headers = dict(line.split(b": ", 1) for line in lines)
        if len(self.buffer) - end - 4 < int(headers.get(b"content-length", b"0")):
            return
        if headers.get(b"connection") == b"close" and self.transport is not None:
            self.transport.close()
            self.transport = None
        self._done(int(self.buffer[9:12]), headers)

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        if self.due is not None:
            self._done(0, {})

    def _done(self, status: int, headers: Mapping[bytes, bytes]) -> None:
        due, self.due = self.due, None
        if due is not None:
            self.load.answered(self, due, status, headers)


class Load:
    """The requests of one phase after another."""

    def __init__(self, plan: Mapping[str, Any]) -> None:
        self.plan = plan
        lines = [f"POST {plan['path']} HTTP/1.1", f"host: 127.0.0.1:{plan['port']}"]
        lines += ["content-type: application/json"]
        lines += [f"{name}: {value}" for name, value in plan.get("headers", {}).items()]
        head = "\r\n".join(lines).encode()
        encoded = (body.encode() for body in plan["bodies"])
        self.requests: Iterator[bytes] = cycle(
            [b"%s\r\ncontent-length: %d\r\n\r\n%s" % (head, len(b), b) for b in encoded]
        )
        self.random = random.Random(plan.get("seed", 0))
        self.idle: list[Connection] = []
        self.connections = 0
        self.waiting: deque[Due] = deque()
        self.starts: list[float] = []
        self.rows: list[list[tuple[float, ...]]] = []
        self.in_flight = 0
        self.left = 0  # closed loop: an answer is followed by the next request
        self.tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> list[dict[str, Any]]:
        facts = [await self._phase(phase) for phase in self.plan["phases"]]
        await self._settle()
        columns = ("due_s", "latency_ms", "late_ms", "status", *NUMBERS.values())
        return [
            {**fact, "columns": columns, "rows": rows}
            for fact, rows in zip(facts, self.rows, strict=True)
        ]

    async def _phase(self, phase: Mapping[str, Any]) -> dict[str, Any]:
        self.rows.append([])
        cpu, started = _cpu_seconds(), perf_counter()
        self.starts.append(started)
        if "rate" in phase:
            await self._open_loop(phase["rate"], phase["seconds"])
        else:
            await self._closed_loop(phase)
        taken = perf_counter() - started
        return {"seconds": taken, "cpu_share": (_cpu_seconds() - cpu) / taken}

    async def _open_loop(self, rate: float, seconds: float) -> None:
        due = started = self.starts[-1]
        while (due := due + self.random.expovariate(rate)) < started + seconds:
            if (wait := due - perf_counter()) > 0:
                await asyncio.sleep(wait)
            self._send(due)
        if (wait := started + seconds - perf_counter()) > 0:
            await asyncio.sleep(wait)

    async def _closed_loop(self, phase: Mapping[str, Any]) -> None:
        self.left = phase.get("requests", sys.maxsize)
        for _ in range(min(phase["concurrency"], self.left)):
            self.left -= 1
            self._send(perf_counter())
        if "seconds" in phase:
            await asyncio.sleep(phase["seconds"])
            self.left = 0
        while self.left > 0:
            await asyncio.sleep(0.005)
        await self._settle()

    async def _settle(self) -> None:
        """Wait for requests in flight; missing answers are failures."""
        deadline = perf_counter() + ANSWER_TIMEOUT_S
        while self.in_flight and perf_counter() < deadline:
            await asyncio.sleep(0.005)
        self.rows[-1] += [
            (0.0, ANSWER_TIMEOUT_S * 1e3, 0.0, 0, *[0] * len(NUMBERS))
        ] * self.in_flight
        self.in_flight = 0

    def _send(self, at: float) -> None:
        self.in_flight += 1
        due = Due(len(self.starts) - 1, at, next(self.requests))
        while self.idle:
            connection = self.idle.pop()
            if connection.transport is not None and not connection.transport.is_closing():
                connection.send(due)
                return
            self.connections -= 1
        self.waiting.append(due)
        self._open()

    def _open(self) -> None:
        if self.connections < self.plan["connections"]:
            self.connections += 1
            task = asyncio.create_task(self._connect())
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)

    async def _connect(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            _, connection = await loop.create_connection(
                lambda: Connection(self), "127.0.0.1", self.plan["port"]
            )
        except OSError:
            self.connections -= 1
            if self.waiting:
                self._record(self.waiting.popleft(), perf_counter(), 0, {})
            return
        self._give_work(connection)

    def _give_work(self, connection: Connection) -> None:
        if self.waiting:
            connection.send(self.waiting.popleft())
        else:
            self.idle.append(connection)

    def answered(
        self, connection: Connection, due: Due, status: int, headers: Mapping[bytes, bytes]
    ) -> None:
        self._record(due, connection.sent, status, headers)
        if connection.transport is not None:
            self._give_work(connection)
        else:
            self.connections -= 1
            if self.waiting:
                self._open()

    def _record(self, due: Due, sent: float, status: int, headers: Mapping[bytes, bytes]) -> None:
        self.in_flight -= 1
        self.rows[due.phase].append(
            (
                round(due.at - self.starts[due.phase], 5),
                round((perf_counter() - due.at) * 1e3, 3),
                round((sent - due.at) * 1e3, 3),
                status,
                *(float(headers.get(name, 0)) for name in NUMBERS),
            )
        )
        if self.left > 0:
            self.left -= 1
            self._send(perf_counter())


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


async def main() -> None:
    load = Load(json.load(sys.stdin))
    json.dump(await load.run(), sys.stdout)


if __name__ == "__main__":
    asyncio.run(main())
