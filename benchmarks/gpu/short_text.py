"""Latency of one short text with CUDA graphs, and over the service."""

from __future__ import annotations

import http.client
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from time import perf_counter, sleep
from typing import IO, Any

import numpy as np
import onnx_ir as ir

from attnserve.context import Device, Provider
from attnserve.models.example_inputs import example_inputs
from attnserve.runtime.interface import SessionOptions
from attnserve.runtime.interleaved_timer import time_functions
from attnserve.runtime.session import open_session
from attnserve.serving.buckets import Buckets
from attnserve.serving.cuda_graphs import GraphRunner
from benchmarks.gpu.measure import SPEED, Form, Shape
from graph_passes.analysis.workload import Workload
from graph_passes.errors import AttnserveError

GRAPHS = 8
WARM_UP = 20
START_S = 60


def captured(form: Form, shape: Shape, provider: Provider, seconds: float) -> dict[str, Any]:
    """Measure a run with and without a CUDA graph, including copies from and to the host."""
    feed = example_inputs(ir.load(form.path), Workload.of(*shape))
    plain: Any = open_session(form.path, Device(provider), SessionOptions(cuda=SPEED))
    graphs = replace(SPEED, graphs=provider == "cuda")
    session: Any = open_session(form.path, Device(provider), SessionOptions(cuda=graphs))
    runner = GraphRunner(session, Buckets(GRAPHS), device=provider)
    runner.allow_padding(rows=True, tokens=True)
    answers = [runner.run(None, feed)[0] for _ in range(3)]  # the second run captures
    error = np.abs(answers[-1] - plain.run(None, dict(feed))[0]).max()
    runs: dict[str, Callable[[], object]] = {
        "run": lambda: plain.run(None, dict(feed)),
        "on_device": plain.bind(feed),
        "captured": lambda: runner.run(None, feed),
    }
    times = time_functions(list(runs.values()), seconds)
    p50_ms = {f"{name}_p50_ms": float(np.median(ms)) for name, ms in zip(runs, times, strict=True)}
    return {
        "form": form.name, "batch": shape[0], "sequence": shape[1],
        **{name: round(value, 4) for name, value in p50_ms.items()},
        "largest_difference": float(error), "graphs": len(runner.buckets.captured),
    }  # fmt: skip


def served(form: Form, shape: Shape, provider: Provider, requests: int) -> dict[str, Any]:
    """Measure requests to the service over HTTP on this machine, and the runs of the model.

    Raises:
        AttnserveError: The service does not start or answer.
    """
    feed = example_inputs(ir.load(form.path), Workload.of(*shape))
    body = json.dumps({
        "inputs": [
            {"name": name, "datatype": "INT64", "shape": ids.shape, "data": ids.ravel().tolist()}
            for name, ids in feed.items()
        ],
        "parameters": {"binary_data_output": True},
    })  # fmt: skip
    with tempfile.TemporaryFile("w+") as log:
        process = _start(form, provider, log)
        try:
            connection = http.client.HTTPConnection(*_wait_for_address(process, log), timeout=60)
            path = f"/v2/models/{form.path.stem}/infer"
            samples = [_request(connection, path, body) for _ in range(requests + WARM_UP)][
                WARM_UP:
            ]
            connection.close()
        finally:
            process.terminate()
            process.wait()
    total, compute = (np.array(column) for column in zip(*samples, strict=True))
    return {
        "form": form.name, "batch": shape[0], "sequence": shape[1], "requests": requests,
        "request_p50_ms": round(float(np.median(total)), 4),
        "run_p50_ms": round(float(np.median(compute)), 4),
        "overhead_p50_ms": round(float(np.median(total - compute)), 4),
    }  # fmt: skip


def _start(form: Form, provider: Provider, log: IO[str]) -> subprocess.Popen[bytes]:
    environment: Mapping[str, str] = {
        **{k: v for k, v in os.environ.items() if not k.startswith("ATTNSERVE_")},
        "PYTHONPATH": os.pathsep.join(path or os.curdir for path in sys.path),
        "ATTNSERVE_CUDA_GRAPHS": str(GRAPHS),
        "ATTNSERVE_TF32": "true",
    }
    command = [sys.executable, "-P", "-m", "attnserve", "serve", str(form.path), "--port", "0"]
    return subprocess.Popen(
        [*command, "--no-probe", "--provider", provider],
        stdout=subprocess.DEVNULL,
        stderr=log,
        env=environment,
    )


def _wait_for_address(process: subprocess.Popen[bytes], log: IO[str]) -> tuple[str, int]:
    text = ""
    for _ in range(10 * START_S):
        log.seek(0)
        text = log.read()
        match = re.search(r"serving .* at http://([\d.]+):(\d+)$", text, re.MULTILINE)
        if match:
            with suppress(ConnectionRefusedError):  # the line is printed just before listening
                socket.create_connection((match[1], int(match[2]))).close()
                return match[1], int(match[2])
        if process.poll() is not None:
            break
        sleep(0.1)
    raise AttnserveError(f"the service did not start: {text[-300:]}")


def _request(connection: http.client.HTTPConnection, path: str, body: str) -> tuple[float, float]:
    """Send one request; return its milliseconds and those of the run."""
    start = perf_counter()
    connection.request("POST", path, body, {"Content-Type": "application/json"})
    response = connection.getresponse()
    content = response.read()
    spent = perf_counter() - start
    if response.status != 200:
        raise AttnserveError(f"the service answered {response.status}: {content[:200]!r}")
    return 1e3 * spent, float(response.headers["x-compute-ms"])
