"""Attacks on real servers and commands. An attack is a function that runs until its time is over.

The parts of an attack that chance decides follow from the seed and the number of the case.
"""

from __future__ import annotations

import http.client
import itertools
import os
import resource
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from random import Random
from statistics import median
from time import monotonic
from typing import Any

import numpy as np
import orjson
import psutil

import tests
from tests.attack.overload import Load, serving_workers
from tests.attack.requests import ODD, Asker, Call, calls, mutated, places, write_models
from tests.attnserve.mutations import corrupted
from tests.service.conftest import until
from tests.service.tiny import mean, write_encoder
from tests.service.workers.processes import Server, repository, serving

FIXTURES = Path(__file__).parents[1] / "fixtures" / "onnx"
SHORT = 300_000
"""Largest size in bytes of the fixtures that are corrupted."""

ANSWER_S = 20.0
"""Time in which a server that is not overloaded answers a valid request."""

STOP_S = 60.0
"""Time in which a server ends after SIGTERM, and a command after any signal."""

GROWTH, GROWTH_BYTES = 1.1, 30_000_000
"""Growth of the memory that is a leak, between the second and the last quarter of an attack."""

MIN_SAMPLES = 200
"""Number of samples of the memory without which growth is not judged: it includes the warm-up."""

TINY = {"inputs": "a b", "model": "tiny"}


class Run:
    """The time, the seed and the results of one attack.

    Attributes:
        counts: Number of cases by outcome.
        findings: What must not happen, each with the case that reproduces it.
    """

    def __init__(self, name: str, seconds: float, *, seed: int = 0, first: int = 0) -> None:
        self.name, self.seed = name, seed
        self.counts, self.findings = Counter[str](), list[str]()
        self._seconds, self._end, self._first = seconds, 0.0, first
        self._numbers = itertools.count(first)

    def cases(self) -> Iterator[tuple[int, Random]]:
        """Numbers and generators of cases, for one of several threads; at least one case.

        The time begins with the first case, when the server has started.
        """
        self._end = self._end or monotonic() + self._seconds
        while (number := next(self._numbers)) == self._first or monotonic() < self._end:
            yield number, Random(f"{self.name} {self.seed} {number}")

    def find(self, what: str, number: int | None = None) -> None:
        """Add a finding."""
        again = f"python -m tests.attack --only {self.name} --seed {self.seed}"
        self.findings.append(
            f"{what}\n  {again}{'' if number is None else f' --first {number} --minutes 0'}"
        )

    @contextmanager
    def server(self, models: Path, folder: Path, **settings: object) -> Iterator[Server]:
        """A server that must still live, answer and stop at the end, without a leak."""
        given = {"workers": 1, "probe_cache": False, "access_log": False, **settings}
        with serving(models, folder, **given) as server, _memory(server.process.pid) as memory:
            until(lambda: "serving" in server.log or server.process.poll() is not None, 120)
            yield server
            if server.process.poll() is not None:
                self.find(f"the server ended with {server.process.returncode}: {server.log[-500:]}")
                return
            self.ask_tiny(server.port)
            if "Traceback" in server.log:
                self.find(server.log[server.log.index("Traceback") :][:3000])
            quarter = len(memory) // 4
            early, late = median(memory[quarter : 2 * quarter] or memory), median(memory[-quarter:])
            if len(memory) >= MIN_SAMPLES and late > GROWTH * early + GROWTH_BYTES:
                self.find(f"the memory grew from {early / 1e6:.0f} to {late / 1e6:.0f} MB")
            server.process.terminate()
            try:
                if (status := server.process.wait(STOP_S)) != 0:
                    self.find(f"the server stopped with status {status}: {server.log[-500:]}")
                if server.left:
                    self.find(f"the stopped server left {server.left}")
            except subprocess.TimeoutExpired:
                self.find(f"the server still runs {STOP_S:.0f} s after SIGTERM")

    def ask(self, asker: Asker, call: Call | bytes, number: int | None) -> tuple[int | None, bytes]:
        """The status and answer; without a status, which is a finding, there was none."""
        try:
            return asker.ask(call)
        except (OSError, http.client.HTTPException) as error:
            self.find(f"{call}: {error!r}", number)
            asker.close()  # and opened again
            return None, b""

    def ask_tiny(self, port: int, number: int | None = None) -> None:
        """Ask for an embedding, which must be right."""
        call = Call("POST", "/texts/embed", TINY)
        with closing(Asker(("127.0.0.1", port), ANSWER_S)) as asker:
            status, answer = self.ask(asker, call, number)
        if status not in {None, 200}:
            self.find(f"{call}: {status} {answer[:300]!r}", number)
        elif status and not np.allclose(
            orjson.loads(answer)["embeddings"], mean([2, 4, 5, 3]), atol=1e-5
        ):
            self.find(f"{call}: a wrong answer", number)


@contextmanager
def _memory(pid: int) -> Iterator[list[int]]:
    """Resident bytes of the largest of a process and its children, every 0.5 s.

    Their sum would grow when a killed worker is replaced.
    """
    done, samples = threading.Event(), [0]

    def sample() -> None:
        process = psutil.Process(pid)
        while not done.wait(0.5):
            with suppress(psutil.Error):  # one of them has ended
                family = [process, *process.children()]
                samples.append(max(one.memory_info().rss for one in family))

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield samples
    finally:
        done.set()
        thread.join()


# -- requests -------------------------------------------------------------------------------------


def attack_requests(run: Run, folder: Path) -> None:
    """Mutated requests to every route, by four clients."""
    models = write_models(folder / "models")
    with run.server(models, folder, probe=False, default_model="tiny") as server:
        address = ("127.0.0.1", server.port)
        with closing(Asker(address)) as asker:
            for call in calls():
                expected = 422 if "'scores'" in str(call.body) else 200  # a number for each token
                if asker.ask(call)[0] != expected:
                    run.find(f"{call}: expected {expected}")
        with ThreadPoolExecutor(4) as threads:
            list(threads.map(partial(_send_mutated, run), [address] * 4))


def _send_mutated(run: Run, address: tuple[str, int]) -> None:
    with closing(Asker(address)) as asker:
        for number, random in run.cases():
            call = mutated(random.choice(calls()), random)
            if not call:
                continue
            status, answer = run.ask(asker, call, number)
            run.counts[str(status)] += 1
            raw = call if isinstance(call, bytes) else call.raw()
            if status and status >= 500 and not (status == 504 and b"time" in raw):
                run.find(f"{call}: {status} {answer[:300]!r}", number)
            is_refused = isinstance(call, Call) and call.method == "POST" and status in (413, 422)
            if is_refused and "error" not in orjson.loads(answer):
                run.find(f"{call}: {answer[:300]!r}", number)


# -- folders --------------------------------------------------------------------------------------

FILES: dict[str, Any] = {
    "attnserve.json": {"max_length": 8, "pooling": "mean", "normalize": True},
    "tokenizer_config.json": {"model_max_length": 8, "padding_side": "right", "pad_token": "[PAD]"},
    "config.json": {"model_type": "bert", "hidden_size": 4, "id2label": {"0": "a", "1": "b"}},
    "sentence_bert_config.json": {"max_seq_length": 8, "do_lower_case": False},
}


def attack_folders(run: Run, folder: Path) -> None:
    """Loads of model folders with a file that is corrupted, cut, of another kind or missing."""
    models = write_models(folder / "models")
    graphs = sorted(path for path in FIXTURES.glob("*.onnx") if path.stat().st_size < SHORT)
    load = Call("POST", "/v2/repository/models/attacked/load")
    with (
        run.server(models, folder, probe=True, rewrite=False) as server,
        closing(Asker(("127.0.0.1", server.port), 150)) as asker,
    ):
        for number, random in run.cases():
            change = _write_attacked(models / "attacked", number, random, graphs)
            status, answer = run.ask(asker, load, number)
            used = Call("POST", "/embed", TINY | {"model": "attacked"})
            code = (run.ask(asker, used, number)[0] or 500) if status == 200 else 422
            run.counts[str(status)] += 1
            is_model = (models / "attacked" / "model.onnx").is_file()
            if status not in ({200, 422} if is_model else {404}) or code >= 500:
                run.find(f"load after {change}: {status} {answer[:500]!r}; embed: {code}", number)
            elif status != 200 and "\n" in orjson.loads(answer)["error"]:
                run.find(f"load after {change}: an error of several lines: {answer!r}", number)
            run.ask_tiny(server.port, number)


def _write_attacked(folder: Path, number: int, random: Random, graphs: list[Path]) -> str:
    """Write an encoder with one file changed; return what was changed."""
    shutil.rmtree(folder, ignore_errors=True)
    write_encoder(folder)
    for name, content in FILES.items():
        (folder / name).write_bytes(orjson.dumps(content))
    name = random.choice(["model.onnx", "model.onnx", "tokenizer.json", *FILES])
    path = folder / name
    content = path.read_bytes()
    change = random.choice(["bytes", "bytes", "value", "value", "value", "cut", "kind", "graph"])
    match change:
        case "graph":
            path = folder / "model.onnx"
            content, change = corrupted(number, [path, *graphs])
        case "value" if path.suffix == ".json":
            tree = orjson.loads(content)
            *above, last = random.choice(list(places(tree)))
            parent: Any = tree
            for key in above:
                parent = parent[key]
            parent[last] = random.choice(ODD)
            content = orjson.dumps(tree)
            change = f"{[*above, last]} = {str(parent[last])[:50]}"
        case "cut":
            content = content[: random.randrange(len(content))]
        case "kind":
            path.unlink()
            kind = random.choice(
                ["absent", "folder", "pipe", path.name, "/dev/zero", "/etc/passwd"]
            )
            if kind == "folder":
                path.mkdir()
            elif kind == "pipe":
                os.mkfifo(path)
            elif kind != "absent":
                path.symlink_to(kind)
            return f"{name}: {kind}"
        case _:
            changed = bytearray(content)
            for _ in range(random.choice([1, 1, 4, 64])):
                changed[random.randrange(len(changed))] = random.randrange(256)
            content = bytes(changed)
    path.write_bytes(content)
    return f"{path.name}: {change}"


# -- slow clients ---------------------------------------------------------------------------------


def attack_slowly(run: Run, folder: Path) -> None:
    """Connections that send by the byte, never read, leave, or say nothing."""
    models = repository(folder / "models", "tiny")
    with run.server(models, folder, probe=False, max_connections=100, max_queue=10**6) as server:
        opened: list[socket.socket] = []
        for number, random in run.cases():
            behavior = random.choice([_drip, _never_read, _reset, _idle])
            run.counts[behavior.__name__.strip("_")] += 1
            with suppress(OSError):  # the server may end a connection at any time
                opened.append(socket.create_connection(("127.0.0.1", server.port), ANSWER_S))
                opened[-1].settimeout(0.2)
                behavior(opened[-1], random)
            for _ in range(max(0, len(opened) - 150)):
                opened.pop(random.randrange(len(opened))).close()
            if number % 10 == 0:
                run.ask_tiny(server.port, number)
        for connection in opened:
            connection.close()


REQUEST = Call("POST", "/texts/embed", {"inputs": ["a b"] * 2000, "model": "tiny"}).raw()


def _drip(connection: socket.socket, random: Random) -> None:
    for byte in REQUEST[: random.randrange(40)]:
        connection.send(bytes([byte]))


def _never_read(connection: socket.socket, random: Random) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    for _ in range(random.randrange(20)):
        connection.sendall(REQUEST)


def _reset(connection: socket.socket, random: Random) -> None:
    connection.sendall(REQUEST[: random.randrange(len(REQUEST) + 1)])
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def _idle(connection: socket.socket, random: Random) -> None:
    if random.random() < 0.5:
        connection.shutdown(socket.SHUT_WR)


# -- overload -------------------------------------------------------------------------------------

CLIENTS = 24
MAX_QUEUE = 4
"""Rows that wait in a worker. Two workers run and hold fewer rows than the clients send."""


def attack_with_overload(run: Run, folder: Path) -> None:
    """Overload of two workers, while models come and go, and workers and clients die."""
    models = repository(folder / "models", "other", "tiny")
    settings = {"workers": 2, "probe": False, "max_queue": MAX_QUEUE}
    with run.server(models, folder, **settings) as server:
        server.wait()
        load, killed = Load(server), 0
        with ThreadPoolExecutor(CLIENTS + 2) as threads:
            try:
                clients = [threads.submit(load.send, seed) for seed in range(CLIENTS)]
                leaving = threads.submit(load.disconnect)
                replacing = threads.submit(load.replace, server)
                for _, random in run.cases():
                    if load.done.wait(random.uniform(0.5, 4)):
                        break
                    psutil.Process(random.choice(server.pids())).kill()
                    killed += 1
                    until(lambda: serving_workers(server) == 1)  # noticed
                    until(lambda: serving_workers(server) == 2, 60)  # replaced
            except AssertionError:
                run.find("a killed worker was not replaced within 60 s")
            finally:
                load.done.set()
            for running in (*clients, leaving):
                running.result()
            replaced = replacing.result()
        run.counts += Counter({str(status): count for status, count in load.statuses.items()})
        run.counts += Counter(lost=load.lost.total(), killed=killed)
        if load.wrong:
            run.find(f"wrong answers, as that of the tokens {load.wrong[0]}")
        if not {200, 429} <= load.statuses.keys() <= {200, 429, 503, 504}:
            run.find(f"statuses of an overload: {load.statuses}")
        # A client loses the request that it had sent to the killed worker, and at most one more:
        # Linux ends the connections of a killed process before it closes its listening socket,
        # which still takes a connection that comes at once.
        if max(load.lost.values(), default=0) > 2 * killed:
            run.find(f"{killed} workers were killed, and a client lost {max(load.lost.values())}")
        if not set(replaced) <= {0, 200, 503}:
            run.find(f"statuses of load and unload: {Counter(replaced)}")


# -- signals and full disks -----------------------------------------------------------------------


def attack_servers_with_signals(run: Run, folder: Path) -> None:
    """Servers that a signal ends while they load a model, and that start again."""
    models = repository(folder / "models", "tiny", "other")
    for number, random in run.cases():
        ending = random.choice([signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
        delay = random.uniform(0, 1)
        settings = {"workers": random.choice([1, 2]), "probe": True, "probe_cache": False}
        with serving(models, folder / str(number), **settings) as server:
            until(lambda s=server: "serving" in s.log or s.process.poll() is not None, 120)
            write_encoder(models / "other" / str(number + 2))
            loading = threading.Thread(target=_load, args=(server.port, "other"))
            loading.start()
            loading.join(delay)
            server.process.send_signal(ending)
            try:
                status = server.process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                status = None
            loading.join(STOP_S)
        run.counts[f"{ending.name} {status}"] += 1
        if status not in {0, -ending} or "Traceback" in server.log:
            run.find(f"{ending.name}: status {status}; {server.log[-1000:]}", number)
        shutil.rmtree(models / "other" / str(number + 2))
        with run.server(models, folder / f"{number} again", probe=False) as server:
            run.ask_tiny(server.port, number)


def _load(port: int, name: str) -> None:
    with suppress(OSError, http.client.HTTPException), closing(Asker(("127.0.0.1", port))) as asker:
        asker.ask(Call("POST", f"/v2/repository/models/{name}/load"))


def attack_commands(run: Run, folder: Path) -> None:
    """``optimize`` that a signal ends or a full disk stops while it writes a folder.

    A full disk is a limit of the size of files. The folder must be readable, or refused with an
    error, and another ``optimize`` must replace it.
    """
    graph = FIXTURES / "bert-torchscript17-eager.onnx"
    for number, random in run.cases():
        output = folder / f"{number}"
        arguments = ["optimize", graph, "--collab-dk", "8", "--output", output, "--force"]
        if random.random() < 0.5 and _command(arguments).returncode:
            run.find("optimize failed", number)
        kind = random.choice([signal.SIGKILL, signal.SIGINT, "full disk"])
        if kind == "full disk":
            size = int(graph.stat().st_size * random.uniform(0, 1.2))
            done = _command(
                arguments, lambda n=size: resource.setrlimit(resource.RLIMIT_FSIZE, (n, n))
            )
        else:
            done = _command(arguments, ended_by=(kind, output, random.uniform(0, 0.05)))
        name = kind if isinstance(kind, str) else kind.name
        run.counts[f"{name} {done.returncode}"] += 1
        allowed = {0, 2} if kind == "full disk" else {0, 130, -kind}
        if done.returncode not in allowed or b"Traceback" in done.stderr:
            run.find(f"{name}: status {done.returncode}: {done.stderr[-2000:]!r}", number)
        if (output / "model.onnx").exists():
            read = _command(["inspect", output])
            if read.returncode not in {0, 2} or b"Traceback" in read.stderr:
                run.find(f"inspect after {name}: {read.stderr[-2000:]!r}", number)
        elif done.returncode == 0:
            run.find(f"{name}: status 0 without a model", number)
        again = _command(arguments)
        if again.returncode:
            run.find(f"optimize after {name}: {again.stderr[-2000:]!r}", number)
        shutil.rmtree(output, ignore_errors=True)


def _command(
    arguments: list[Any],
    prepare: Callable[[], None] | None = None,
    ended_by: tuple[signal.Signals, Path, float] | None = None,
) -> subprocess.CompletedProcess[bytes]:
    """Run a command; ``ended_by`` is a signal, and the seconds after the start of the output."""
    command = [sys.executable, "-m", "attnserve", *map(str, arguments)]
    with subprocess.Popen(
        command,
        cwd=Path(tests.__path__[0]).parent,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        preexec_fn=prepare,
    ) as process:
        try:
            if ended_by is not None:
                number, output, delay = ended_by
                until(lambda: [*output.glob(".attnserve-*")] or process.poll() is not None, 120)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(delay)
                process.send_signal(number)
            _, errors = process.communicate(timeout=300)
        finally:
            process.kill()
    return subprocess.CompletedProcess(command, process.returncode, stderr=errors)


def attack_with_a_full_disk(run: Run, folder: Path) -> None:
    """Servers that cannot write files of more than some bytes, as with a full disk."""
    models = write_models(folder / "models")
    for number, random in run.cases():
        settings = {"workers": random.choice([1, 2]), "sample_texts": folder / "texts"}
        settings["default_model"] = "tiny"
        with run.server(models, folder / str(number), **settings) as server:
            size = random.choice([0, 1, 4096])
            for pid in (server.process.pid, *server.pids()):
                psutil.Process(pid).rlimit(psutil.RLIMIT_FSIZE, (size, size))
            with closing(Asker(("127.0.0.1", server.port), 150)) as asker:
                for call in calls():
                    status, answer = run.ask(asker, call, number)
                    run.counts[str(status)] += 1
                    if status == 500 or (
                        status and status > 500 and not call.path.endswith("load")
                    ):
                        run.find(f"{call}, no file above {size} bytes: {answer[:300]!r}", number)


ATTACKS: dict[str, Callable[[Run, Path], None]] = {
    "requests": attack_requests,
    "folders": attack_folders,
    "slow": attack_slowly,
    "overload": attack_with_overload,
    "signals": attack_servers_with_signals,
    "commands": attack_commands,
    "disk": attack_with_a_full_disk,
}
