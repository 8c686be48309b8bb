"""Real servers with one worker or several."""

from __future__ import annotations

import http.client
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

import service
from tests.service.conftest import until
from tests.service.tiny import write_encoder

PROGRAM = """
import sys
import service.workers.supervisor
from service.launch import serve
from service.settings import Settings
from graph_passes.errors import AttnserveError
service.workers.supervisor.HANG_S = 3
try:
    serve(Settings.model_validate({}))
except KeyboardInterrupt:
    sys.exit(130)
except AttnserveError as error:
    print(f"error: {error.what}", file=sys.stderr)
    sys.exit(error.exit_code)
"""


class Server:
    """A real server with workers, on a free port of the loopback.

    Attributes:
        temporary: Where it keeps what its workers share.
    """

    def __init__(self, process: subprocess.Popen[bytes], log: Path, temporary: Path) -> None:
        self.process, self._log, self.temporary = process, log, temporary
        self._clients: list[Client] = []

    @property
    def log(self) -> str:
        return self._log.read_text()

    @property
    def port(self) -> int:
        found = re.search(r"serving .+ at http://127\.0\.0\.1:(\d+)\n", self.log)
        assert found, self.log
        return int(found[1])

    def wait(self, workers: int = 2) -> None:
        until(lambda: "serving" in self.log or self.process.poll() is not None)
        if workers > 1:
            assert "workers:" in self.log or until(lambda: "workers:" in self.log), self.log

    @property
    def left(self) -> list[Path]:
        """What it shared between its workers, and should have taken away."""
        return list(self.temporary.glob("attnserve-*"))

    def pids(self) -> list[int]:
        return [child.pid for child in psutil.Process(self.process.pid).children()]

    def client(self, pid: int) -> Client:
        """A connection that the worker ``pid`` has accepted."""
        while True:
            client = self.any_client()
            client.get("/v2/health/live")
            if client.is_served_by(pid):
                return client
            client.close()

    def any_client(self) -> Client:
        self._clients.append(Client(self.port))
        return self._clients[-1]

    def close(self) -> None:
        for client in self._clients:
            client.close()


class Client:
    """One connection, kept: to one worker."""

    def __init__(self, port: int) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)

    def is_served_by(self, pid: int) -> bool:
        assert self._connection.sock is not None
        port = self._connection.sock.getsockname()[1]
        worker = psutil.Process(pid)
        ask = getattr(worker, "net_connections", None) or worker.connections  # since psutil 6
        return any(one.raddr and one.raddr.port == port for one in ask("tcp"))

    def ask(self, method: str, path: str, body: Any = None) -> tuple[int, bytes]:
        self._connection.request(method, path, None if body is None else json.dumps(body))
        answer = self._connection.getresponse()
        return answer.status, answer.read()

    def get(self, path: str) -> Any:
        return json.loads(self.ask("GET", path)[1])

    def post(self, path: str, body: Any = None) -> int:
        return self.ask("POST", path, body)[0]

    @property
    def ready(self) -> bool:
        return self.ask("GET", "/v2/health/ready")[0] == 200

    def index(self) -> list[tuple[str, str, str]]:
        found = json.loads(self.ask("POST", "/v2/repository/index")[1])
        return [(entry["name"], entry["version"], entry["state"]) for entry in found]

    def close(self) -> None:
        self._connection.close()


@contextmanager
def serving(model: Path, folder: Path, **settings: object) -> Iterator[Server]:
    """Two workers; killed at the end, where they still live."""
    temporary = folder / "temporary"
    temporary.mkdir(parents=True)
    given = {"model": model, "port": 0, "workers": 2, "probe": False, **settings}
    environment = {f"ATTNSERVE_{name.upper()}": str(value) for name, value in given.items()}
    log = folder / "log"
    with (
        log.open("wb") as stderr,
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM],
            cwd=Path(service.__file__).parents[1],
            stderr=stderr,
            env=os.environ | {"TMPDIR": str(temporary)} | environment,
        ) as process,
    ):
        server = Server(process, log, temporary)
        try:
            yield server
        finally:
            server.close()
            if process.poll() is None:
                for pid in server.pids():
                    psutil.Process(pid).kill()
                process.kill()


def repository(folder: Path, *names: str) -> Path:
    """A folder of models, version 1 of each."""
    for name in names:
        (folder / name).mkdir(parents=True)
        write_encoder(folder / name / "1")
    return folder
