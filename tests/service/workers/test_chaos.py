"""Answers of two workers under overload, while models come and go, and workers and clients die.

``CHAOS_SECONDS=60`` runs the load for a minute; the default is short.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import socket
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import monotonic

import numpy as np
import psutil
import pytest

from tests.service.conftest import until
from tests.service.tiny import POSITIONS, hidden_states, ids_request, mean
from tests.service.workers.test_workers import Server, repository, serving

pytestmark = pytest.mark.process

SECONDS = float(os.environ.get("CHAOS_SECONDS", "9"))
CLIENTS = 24
MAX_QUEUE = 4
"""Rows that wait in a worker. Two workers run and hold fewer rows than the clients send."""


class Load:
    """Clients that send one request after the other and check each answer.

    Attributes:
        statuses: Number of answers by status.
        lost: Requests whose connection ended without an answer, by client.
        wrong: Requests with an answer that is not that of their own tokens.
    """

    def __init__(self, server: Server) -> None:
        self.port = server.port
        self.statuses, self.lost, self.wrong = Counter[int](), Counter[int](), list[list[int]]()
        self.done = threading.Event()
        self._lock = threading.Lock()

    def send(self, seed: int) -> None:
        random_ = random.Random(seed)
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        while not self.done.is_set():
            ids = random_.choices(range(4, 8), k=random_.randrange(1, POSITIONS - 2))
            is_text = random_.random() < 0.5
            if is_text:
                text = " ".join("abcd"[token - 4] for token in ids)
                path, body = "/texts/embed", {"inputs": text, "model": "tiny"}
            else:
                path, body = "/v2/models/tiny/infer", ids_request(ids)
            try:
                connection.request("POST", path, json.dumps(body))
                answer = connection.getresponse()
                content = answer.read()
            except (OSError, http.client.HTTPException):
                connection.close()
                with self._lock:
                    self.lost[seed] += 1
                continue
            right = answer.status != 200 or (
                _is_mean(content, ids) if is_text else _are_states(content, ids)
            )
            with self._lock:
                self.statuses[answer.status] += 1
                if not right:
                    self.wrong.append(ids)
        connection.close()

    def disconnect(self) -> None:
        """Send requests and leave before their answers, at random times."""
        random_ = random.Random(0)
        body = json.dumps({"inputs": "a b c", "model": "tiny"}).encode()
        head = b"POST /texts/embed HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body)
        request = head + body
        while not self.done.wait(random_.random() / 100):
            try:
                with socket.create_connection(("127.0.0.1", self.port), timeout=10) as connection:
                    connection.sendall(request[: random_.randrange(len(request) + 1)])
            except OSError:
                continue

    def replace(self, server: Server) -> list[int]:
        """Load and unload another model every two seconds; return the statuses."""
        seen: list[int] = []
        while not self.done.wait(1):
            action = ("unload", "load")[len(seen) % 2]
            try:
                seen.append(server.any_client().post(f"/v2/repository/models/other/{action}"))
            except (OSError, http.client.HTTPException):  # of a worker that was killed
                seen.append(0)
        return seen


def _is_mean(content: bytes, ids: list[int]) -> bool:
    (vector,) = json.loads(content)["embeddings"]
    return np.allclose(vector, mean([2, *ids, 3]), atol=1e-5)


def _are_states(content: bytes, ids: list[int]) -> bool:
    output = next(
        one for one in json.loads(content)["outputs"] if one["name"] == "last_hidden_state"
    )
    expected = hidden_states(np.array([ids]))
    return output["shape"] == [*expected.shape] and np.allclose(
        output["data"], expected.ravel(), atol=1e-5
    )


def _serving(server: Server) -> int:
    """Number of serving workers, or 0 if the connection was lost."""
    try:
        return server.any_client().get("/stats.json")["workers"]["serving"]
    except (OSError, http.client.HTTPException):
        return 0


def test_answers_are_right_while_workers_die_and_models_change(tmp_path: Path) -> None:
    models = repository(tmp_path / "models", "other", "tiny")
    with serving(models, tmp_path, max_queue=MAX_QUEUE) as server:
        server.wait()
        load, killed = Load(server), 0
        with ThreadPoolExecutor(CLIENTS + 2) as threads:
            clients = [threads.submit(load.send, seed) for seed in range(CLIENTS)]
            leaving = threads.submit(load.disconnect)
            replacing = threads.submit(load.replace, server)
            end, pause = monotonic() + SECONDS, min(10, SECONDS / 3)
            while monotonic() < end and not load.done.wait(pause):
                psutil.Process(random.Random(killed).choice(server.pids())).kill()
                killed += 1
                until(lambda: _serving(server) == 1)  # noticed
                until(lambda: _serving(server) == 2, 60)  # replaced
            load.done.set()
            for running in (*clients, leaving):
                running.result()
            replaced = replacing.result()
        print(
            *(dict(load.statuses), "lost", load.lost.total()),
            *("killed", killed, "control", Counter(replaced)),
        )
        assert not load.wrong, load.wrong[:3]
        assert set(load.statuses) <= {200, 429, 503, 504}, load.statuses
        assert load.statuses[200] > 20 * SECONDS and load.statuses[429]
        # A client loses the request that it had sent to the killed worker, and at most one more:
        # Linux ends the connections of a killed process before it closes its listening socket,
        # which still takes a connection that comes at once.
        assert max(load.lost.values(), default=0) <= 2 * killed, load.lost
        assert set(replaced) <= {0, 200, 503}, replaced
        assert "Traceback" not in server.log, server.log[-3000:]
