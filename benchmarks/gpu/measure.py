"""Measure all forms of an encoder, shape by shape, within a time limit.

Runs read and write device memory and wait for the device, in interleaved rounds. Memory and the
shares of operators come from ONNX Runtime's profile, in separate sessions because profiling costs
time. Cells without enough time state that as their reason.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import onnx_ir as ir

from attnserve.context import Device, Provider
from attnserve.models.example_inputs import example_inputs
from attnserve.models.onnx_files import save_model
from attnserve.runtime.cuda import Cuda
from attnserve.runtime.interface import SessionOptions
from attnserve.runtime.interleaved_timer import QUICK, time_functions
from attnserve.runtime.io_binding import shrink_arena
from attnserve.runtime.session import open_session
from benchmarks.gpu.forms import FORMS, ORIGINAL, Size
from benchmarks.gpu.profiles import AttentionKernel, attention_kernels, read_runs
from graph_passes.analysis.cost import count_macs
from graph_passes.analysis.workload import Workload
from graph_passes.errors import AttnserveError

Shape = tuple[int, int]
"""Texts and tokens per text."""

SPEED = Cuda(tf32=True)
SLICE_S = 4.0
"""Maximum seconds for one shape of one size."""
PROFILES = 20
"""A profile takes at most this fraction, one in ``PROFILES``, of the remaining time."""
SMALL = (1, 8)
TOP = 6
"""Number of reported operators, by their share of the time."""
BUDGET = "budget: no time was left"


@dataclass(frozen=True)
class Form:
    """One form of one size, on disk; ``macs`` by shape."""

    name: str
    path: Path
    macs: Mapping[Shape, int | None]


@dataclass
class Sized:
    """The measurements of one size.

    Attributes:
        cells: One entry per shape and form of the result file.
        not_built: The reason why a form is missing, by form.
        fidelity: Minimum cosine of tokens to the original, by form.
    """

    forms: list[Form] = field(default_factory=list[Form])
    cells: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    not_built: dict[str, str] = field(default_factory=dict[str, str])
    fidelity: dict[str, float] = field(default_factory=dict[str, float])

    def to_json(self) -> dict[str, Any]:
        return {"not_built": self.not_built, "min_cosine": self.fidelity, "cells": self.cells}


def build(size: Size, shapes: Sequence[Shape], folder: Path, deadline: float) -> Sized:
    """Build every form of a size; record the reason for those that fail or have no time."""
    done = Sized()
    original = size.build(max(tokens for _, tokens in shapes))
    for name, make in FORMS.items():
        if perf_counter() > deadline:
            done.not_built[name] = BUDGET
            continue
        try:
            model = make(original.clone(deep_copy=True), size)
            path = folder / f"{name.replace(' ', '-')}.onnx"
            save_model(model, path)
            macs = {shape: count_macs(model, Workload.of(*shape)) for shape in shapes}
            done.forms.append(Form(name, path, macs))
        except Exception as error:  # other tools raise any exception
            done.not_built[name] = why(error)
    return done


def measure(
    done: Sized,
    shapes: Sequence[Shape],
    provider: Provider,
    deadline: float,
    more: Mapping[str, Callable[[Mapping[str, np.ndarray]], Callable[[], object]]] | None = None,
    ceiling: float | None = None,
) -> None:
    """Measure latency, memory and operator shares of all forms, in the order of ``shapes``.

    Args:
        more: Forms without a session of ONNX Runtime: functions from inputs to a run.
        ceiling: Measured TFLOP/s of a matrix product in half precision.
    """
    graph = ir.load(done.forms[0].path)
    feeds = {shape: example_inputs(graph, Workload.of(*shape)) for shape in {*shapes, SMALL}}
    sessions: dict[str, Any] = {}
    profiles: dict[str, dict[Shape, dict[str, Any]]] = {}
    for form in list(done.forms):
        try:
            sessions[form.name] = open_session(
                form.path, Device(provider), SessionOptions(cuda=SPEED)
            )
            sessions[form.name].run(None, feeds[SMALL])
        except Exception as error:  # bfloat16 on a CPU
            sessions.pop(form.name, None)
            done.not_built[form.name] = why(error)
            done.forms.remove(form)
            continue
    compared = Workload.of(2, max(t for _, t in shapes) // 2)
    done.fidelity |= _fidelity(sessions, example_inputs(graph, compared, seed=1, padded=True))
    for form in done.forms:
        until = perf_counter() + (deadline - perf_counter()) / PROFILES
        profiles[form.name] = profiled(form, feeds, shapes, provider, until)
    for index, shape in enumerate(shapes):
        left = deadline - perf_counter()
        seconds = min(SLICE_S, left / (len(shapes) - index))
        runs = {name: session.bind(feeds[shape]) for name, session in sessions.items()}
        runs |= {name: make(feeds[shape]) for name, make in (more or {}).items()}
        times = timed(runs, seconds)
        for form in done.forms:
            profile = profiles[form.name].get(shape, {"peak_bytes": None, "not_profiled": BUDGET})
            done.cells.append(cell(shape, form.name, times[form.name], form.macs[shape], ceiling)
                              | profile)  # fmt: skip
        done.cells += [cell(shape, name, times[name], None, ceiling) for name in more or {}]
        for session in sessions.values():
            shrink_arena(session, feeds[SMALL])


def timed(
    runs: Mapping[str, Callable[[], object]],
    seconds: float,
    clock: Callable[[], float] = perf_counter,
) -> dict[str, np.ndarray | str]:
    """Return milliseconds per round, or the reason why there are none, by form."""
    results: dict[str, np.ndarray | str] = {}
    able: dict[str, Callable[[], object]] = {}
    spent = 0.0
    for name, run in runs.items():
        if spent * QUICK.min_rounds > seconds or seconds <= 0:
            results[name] = BUDGET
            continue
        try:
            run()  # allocates memory and selects kernels
            start = clock()
            run()
            spent += clock() - start
            able[name] = run
        except Exception as error:  # usually out of memory
            results[name] = why(error)
    if able and spent * QUICK.min_rounds > 2 * seconds:
        results |= dict.fromkeys(able, BUDGET)
    elif able:
        results |= zip(able, time_functions(list(able.values()), seconds), strict=True)
    return results


def cell(
    shape: Shape,
    form: str,
    times: np.ndarray | str,
    macs: int | None,
    ceiling: float | None,
) -> dict[str, Any]:
    """Return one entry of the result file."""
    row: dict[str, Any] = {"batch": shape[0], "sequence": shape[1], "form": form}
    if isinstance(times, str):
        return row | {"not_measured": times}
    p50, p99 = np.percentile(times, (50, 99))
    tflops = None if macs is None else 2 * macs / p50 / 1e9
    return row | {
        "p50_ms": round(float(p50), 4),
        "p99_ms": round(float(p99), 4),
        "rounds": len(times),
        "texts_per_s": round(shape[0] / p50 * 1e3, 1),
        "tflops": None if tflops is None else round(float(tflops), 3),
        "share_of_ceiling": None if tflops is None or not ceiling else round(tflops / ceiling, 4),
    }


def profiled(
    form: Form,
    feeds: Mapping[Shape, Mapping[str, np.ndarray]],
    shapes: Sequence[Shape],
    provider: Provider,
    deadline: float,
) -> dict[Shape, dict[str, Any]]:
    """Return peak memory and operator shares by shape; a peak includes all smaller shapes."""
    order = sorted(shapes, key=lambda shape: (shape[0] * shape[1], shape[1]))
    prefix = form.path.with_suffix("")
    session: Any = open_session(
        form.path, Device(provider), SessionOptions(cuda=SPEED, profile=prefix)
    )
    ran: list[Shape] = []
    failed: dict[Shape, dict[str, Any]] = {}
    for shape in order:
        if perf_counter() > deadline:
            break
        try:
            for _ in range(2):  # the first run allocates
                session.run(None, dict(feeds[shape]))
            ran.append(shape)
        except Exception as error:
            failed[shape] = {"peak_bytes": None, "not_profiled": why(error)}
            break
    path = Path(session.end_profiling())
    runs = read_runs(path)[1::2] if ran else ()
    path.unlink(missing_ok=True)
    return failed | {
        shape: {
            "peak_bytes": one.peak_bytes,
            "timed": one.timed,
            "operators": {name: round(share, 4) for name, share in [*one.shares.items()][:TOP]},
        }
        for shape, one in zip(ran, runs, strict=False)
    }


def _fidelity(sessions: Mapping[str, Any], feed: Mapping[str, np.ndarray]) -> dict[str, float]:
    kept = feed["attention_mask"] == 1
    tokens = {name: session.run(None, dict(feed))[0][kept] for name, session in sessions.items()}
    if ORIGINAL not in tokens:
        return {}
    first = tokens[ORIGINAL]
    return {name: round(float(_cosine(first, other).min()), 5) for name, other in tokens.items()}


def _cosine(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return (a * b).sum(-1) / (np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1))


def compiled(
    size: Size, positions: int, *, device: str = "cuda", backend: str = "inductor"
) -> Callable[[Mapping[str, np.ndarray]], Callable[[], object]]:
    """Return the encoder in PyTorch: compiled, scaled_dot_product_attention, float16.

    Raises:
        ImportError, RuntimeError: PyTorch is missing, or has no such device.
    """
    import torch
    from transformers import BertConfig, BertModel

    if device == "cuda" and not torch.cuda.is_available():
        raise RuntimeError("this PyTorch has no CUDA device")
    config = BertConfig(
        vocab_size=1000,
        hidden_size=size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        intermediate_size=4 * size.hidden,
        max_position_embeddings=positions,
        attn_implementation="sdpa",
    )
    model = BertModel(config, add_pooling_layer=False).half().to(device).eval()
    fast: Any = torch.compile(model, dynamic=True, backend=backend)

    def make(feed: Mapping[str, np.ndarray]) -> Callable[[], object]:
        inputs = {name: torch.from_numpy(array).to(device) for name, array in feed.items()}

        def run() -> object:
            with torch.inference_mode():
                output = fast(**inputs)
            if device == "cuda":
                torch.cuda.synchronize()
            return output

        return run

    return make


def matrix_ceiling(provider: Provider, n: int, seconds: float) -> dict[str, float]:
    """Measure TFLOP/s of one n x n x n product, the maximum for any graph on this card."""
    ceilings: dict[str, float] = {}
    for dtype, name in ((ir.DataType.FLOAT16, "fp16"), (ir.DataType.FLOAT, "fp32, TF32 allowed")):
        kind = "float16" if dtype == ir.DataType.FLOAT16 else "float"
        graph = ir.from_onnx_text(
            f'<ir_version: 8, opset_import: ["" : 17]> product ({kind}[n, n] a, {kind}[n, n] b)'
            f" => ({kind}[n, n] c) {{ c = MatMul(a, b) }}"
        )
        random = np.random.default_rng(0)
        feed = {x: random.standard_normal((n, n)).astype(dtype.numpy()) for x in "ab"}
        session = open_session(graph, Device(provider), SessionOptions(cuda=SPEED))
        (times,) = time_functions([session.bind(feed)], seconds)
        ceilings[name] = round(2 * n**3 / float(np.median(times)) / 1e9, 3)
    return ceilings


KERNELS = """
import sys
from pathlib import Path
import onnx_ir as ir
from attnserve.context import Device
from attnserve.models.example_inputs import example_inputs
from attnserve.runtime.session import open_session
from graph_passes.analysis.workload import Workload
provider, batch, tokens, *paths = sys.argv[1:]
feed = example_inputs(ir.load(paths[0]), Workload.of(int(batch), int(tokens)), padded=True)
for path in paths:
    try:
        print(f"{path} begins", flush=True)
        open_session(Path(path), Device(provider)).run(None, feed)
    except Exception as error:
        print(f"{path} failed: {type(error).__name__}", flush=True)
"""


def kernels(
    forms: Sequence[Form], shape: Shape, provider: Provider, seconds: float
) -> dict[str, tuple[AttentionKernel, ...]]:
    """Return the attention kernels that ONNX Runtime selects, by form.

    ONNX Runtime prints them if an environment variable is set when the process starts. One child
    process runs all forms.

    Raises:
        AttnserveError: The process failed.
    """
    arguments = [provider, *map(str, shape), *(str(form.path) for form in forms)]
    done = subprocess.run(
        [sys.executable, "-P", "-c", KERNELS, *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=seconds,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path or os.curdir for path in sys.path),
            "ORT_ENABLE_ATTENTION_KERNEL_DEBUG_INFO": "1",
        },
    )
    if done.returncode:
        raise AttnserveError(f"attention kernels: {done.stderr.strip()[-300:]}")
    selected: dict[str, tuple[AttentionKernel, ...]] = {}
    for form in forms:
        own = done.stdout.partition(f"{form.path} begins\n")[2].partition(" begins\n")[0]
        selected[form.name] = attention_kernels(own)
    return selected


def why(error: Exception) -> str:
    """The type of an error and the first line of its message."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}"
