"""Start the servers and programs of serving_load.py, each on the cores for servers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console

from benchmarks._common import free_port, is_ready

ROOT = Path(__file__).parents[2]
PROGRAMS = Path(__file__).parent

CONSTRAINTS = (ROOT / "constraints.txt").read_text().split()
TORCH, ONNXRUNTIME, OPENVINO = (
    next(line for line in CONSTRAINTS if line.startswith(f"{package}=="))
    for package in ("torch", "onnxruntime", "openvino")
)

SERVER = ("onnxruntime", "tokenizers", "numpy", "uvloop", "httptools")
PEERS: Mapping[str, tuple[str, ...]] = {
    "plain": ("fastapi", "uvicorn", "orjson", *SERVER),
    "litserve": ("litserve", *SERVER),
    # The last release whose ONNX backend can be installed.
    "sentence-transformers": (
        TORCH,
        ONNXRUNTIME,
        OPENVINO,
        "sentence-transformers[onnx,openvino]==5.7.0",
    ),
    "cross-encoder": (TORCH, OPENVINO, "sentence-transformers[openvino]==6.2.0"),
    "cross-encoder-onnx": (TORCH, ONNXRUNTIME, "sentence-transformers[onnx]==5.7.0"),
}
"""Packages of the virtual environment of each peer."""

UNCONSTRAINED = {"sentence-transformers", "cross-encoder", "cross-encoder-onnx"}
"""Peers installed without constraints.txt: they need other versions of transformers."""

console = Console(stderr=True, highlight=False, soft_wrap=True)


@dataclass(frozen=True)
class Setup:
    """Settings shared by all sections.

    Attributes:
        seconds: Duration of one throughput measurement.
        overload_s: Duration of the overload.
        requests: Requests of the memory section.
    """

    model: Path
    texts: tuple[str, ...]
    cache: Path
    server_cores: tuple[int, ...]
    generator_cores: tuple[int, ...]
    rounds: int
    seconds: float
    deadline_ms: int
    overload_s: float
    requests: int

    @property
    def threads(self) -> int:
        return len(self.server_cores)


def all_cores(model: Path, cache: Path, texts: Sequence[str] = ()) -> Setup:
    """All cores serve and send: clients that wait need none."""
    cores = tuple(sorted(os.sched_getaffinity(0)))
    return Setup(
        model=model, texts=tuple(texts), cache=cache, server_cores=cores, generator_cores=cores,
        rounds=0, seconds=0, deadline_ms=0, overload_s=0, requests=0,
    )  # fmt: skip


def pinned(cores: Sequence[int]) -> Callable[[], None]:
    return partial(os.sched_setaffinity, 0, cores)


Server = AbstractContextManager[tuple[int, psutil.Process]]
"""Gives the port and the process of a server, and stops it at the end of the block."""

PORT = "PORT"
"""The place of the port in a command."""


@contextmanager
def _serve(setup: Setup, health: str, *command: object) -> Generator[tuple[int, psutil.Process]]:
    """Start a server and wait until it answers at path ``health``."""
    port = free_port()
    arguments = [str(port if part is PORT else part) for part in command]
    process = subprocess.Popen(
        arguments,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "TOKENIZERS_PARALLELISM": "false"},
        preexec_fn=pinned(setup.server_cores),
    )
    try:
        if not is_ready(f"http://127.0.0.1:{port}{health}", process, 90):
            raise SystemExit(f"did not start: {' '.join(arguments)}")
        yield port, psutil.Process(process.pid)
    finally:
        children = psutil.Process(process.pid).children(recursive=True)
        process.terminate()
        try:
            process.wait(timeout=15)
        except subprocess.TimeoutExpired:
            process.kill()
        for child in children:
            with suppress(psutil.NoSuchProcess):
                child.kill()


def attnserve_server(setup: Setup, *options: str, model: Path | None = None) -> Server:
    return _serve(
        setup, "/v2/health/ready", sys.executable, "-m", "attnserve", "serve",
        model or setup.model, "--port", PORT, "--threads", setup.threads, "--quiet", *options,
    )  # fmt: skip


def plain_server(setup: Setup, *, handler: str, threads: int) -> Server:
    program = PROGRAMS / "peer_plain.py"
    python = peer_python(setup, "plain")
    return _serve(setup, "/health", python, program, setup.model, PORT, threads, handler)


def litserve_server(setup: Setup, *, batch: int, timeout_s: float) -> Server:
    program = PROGRAMS / "peer_litserve.py"
    python = peer_python(setup, "litserve")
    return _serve(
        setup, "/health", python, program, setup.model, PORT, setup.threads, batch, timeout_s
    )


class Program:
    """A program that answers a line of JSON with a line of JSON."""

    def __init__(self, setup: Setup, *command: object) -> None:
        self.process = subprocess.Popen(
            [str(part) for part in command],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=pinned(setup.server_cores),
        )

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()

    def read(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline() or "null")

    def ask(self, question: Any) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(question) + "\n")
        self.process.stdin.flush()
        return self.read()


def bare_session(setup: Setup, *graph: Path) -> Program:
    program = PROGRAMS / "bare.py"
    return Program(setup, sys.executable, program, setup.model, setup.threads, *graph)


def sentence_transformers(setup: Setup, folder: Path, backend: str = "onnx") -> Program:
    python = peer_python(setup, "sentence-transformers")
    program = PROGRAMS / "peer_sentence_transformers.py"
    return Program(setup, python, program, folder, setup.threads, backend)


def cross_encoder(setup: Setup, folder: Path, backend: str) -> Program:
    program = PROGRAMS / "peer_cross_encoder.py"
    python = peer_python(setup, "cross-encoder-onnx" if backend == "onnx" else "cross-encoder")
    return Program(setup, python, program, folder, setup.threads, backend)


def fused_graph(setup: Setup) -> tuple[Path, dict[str, Any]]:
    """Write the graph that attnserve serves; return it and its comparison with the original."""
    path = setup.cache / "exact.onnx"
    command = (sys.executable, PROGRAMS / "exact.py", setup.model, setup.threads, path)
    with Program(setup, *command) as program:
        return path, program.read()


def peer_python(setup: Setup, peer: str) -> Path:
    """Return the interpreter of a peer's virtual environment; create it if it is missing."""
    folder = setup.cache / peer
    stamp, packages = folder / ".installed", "\n".join(PEERS[peer])
    python = folder / "bin" / "python"
    if not stamp.is_file() or stamp.read_text() != packages:
        console.print(f"installing {peer}: some minutes, once")
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        bounds = [] if peer in UNCONSTRAINED else ["-c", str(ROOT / "constraints.txt")]
        install = [python, "-m", "pip", "install", "-q", *bounds, *PEERS[peer]]
        subprocess.run(install, check=True)
        stamp.write_text(packages)
    return python


def peer_versions(setup: Setup, peer: str) -> dict[str, str]:
    listed = subprocess.run(
        [peer_python(setup, peer), "-m", "pip", "list", "--format=json"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    kept = {name.partition("[")[0].partition("==")[0] for name in PEERS[peer]}
    kept |= {
        "onnxruntime",
        "transformers",
        "optimum-onnx",
        "optimum-intel",
        "openvino",
        "fastapi",
        "uvicorn",
        "starlette",
    }
    return {p["name"]: p["version"] for p in json.loads(listed) if p["name"].lower() in kept}
