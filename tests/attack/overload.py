"""Clients that send more than workers take, check each answer, and load and unload a model."""

from __future__ import annotations

import http.client
import json
import random
import socket
import threading
from collections import Counter

import numpy as np

from tests.service.tiny import POSITIONS, hidden_states, ids_request, mean
from tests.service.workers.processes import Server


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


def serving_workers(server: Server) -> int:
    """Number of serving workers, or 0 if the connection was lost."""
    try:
        return server.any_client().get("/stats.json")["workers"]["serving"]
    except (OSError, http.client.HTTPException):
        return 0
