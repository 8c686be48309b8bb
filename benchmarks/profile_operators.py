"""Time of an encoder by kind of operator, in both runtimes and each precision.

    pip install 'attnserve[openvino,demo]' nncf
    python -m benchmarks.profile_operators [--runs N]

Profiles all-MiniLM-L6-v2 as exported, of NNCF and of attnserve, on one thread with one text. The
six products with weights of a layer tell where an operator belongs: the first four are projections
(queries, keys, values, output), the others the feed-forward. What runs between projections is
attention; what follows the output projection or the feed-forward is normalization, with residual
sums. Conversions round activations, or change types or layouts. "Other" is the embeddings, and the
time of a run outside of its operators, in which the profiler is included.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from timeit import timeit
from typing import Any, NamedTuple

import numpy as np

import attnserve
from attnserve.context import ONE_THREAD
from attnserve.models.artifact import open_artifact
from attnserve.models.example_inputs import example_inputs
from attnserve.models.onnx_files import load_model
from attnserve.runtime.interface import AS_SERVED, Batch
from attnserve.runtime.onnx_runtime import OnnxRuntime
from attnserve.runtime.openvino_runtime import CHECKSUM_BYTES
from attnserve.runtime.session import open_session
from benchmarks._common import CALIBRATION, description, minilm, write_result
from benchmarks.peers import OPENVINO, Peers, quantized_by_nncf, versions
from graph_passes.analysis.workload import Workload

LENGTHS = (128, 512)
KINDS = ("projections", "attention", "feed-forward", "normalization", "conversions", "other")
PRODUCTS = ("projections",) * 4 + ("feed-forward",) * 2
AFTER = ("attention",) * 3 + ("normalization", "feed-forward", "normalization")
"""The kinds of the products with weights of a layer, in the order of a run, and of what follows."""
CONVERSIONS = {"QuantizeLinear", "DequantizeLinear", "FakeQuantize", "Reorder", "Convert", "Cast"}
OBSERVERS = {"Reduce", "ShapeOf"}
"""Operators with which attnserve checks runs of OpenVINO."""


class Operator(NamedTuple):
    name: str
    type: str
    us: float
    is_product: bool


Profiler = Callable[[Batch, int], tuple[float, Sequence[Operator]]]
"""Inputs and runs to the mean microseconds of a run, and those of its operators in their order."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=description(__doc__))
    parser.add_argument("--runs", type=int, default=500, help="of each model and length")
    options = parser.parse_args(arguments)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        original = Path(name, "original")
        attnserve.export(minilm(), original)
        graph, peers = load_model(open_artifact(original)), models(original)
        for model, profile in peers.models.items():
            for length in LENGTHS:
                us, operators = profile(example_inputs(graph, Workload.of(1, length)), options.runs)
                row = {"model": model, "tokens": length, "ms": us / 1e3}
                try:
                    rows.append({**row, "share": shares(us, operators)})
                except ValueError as error:
                    peers.left_out[f"{model}, {length} tokens"] = str(error)
    packages, left_out = versions("onnxruntime", "openvino", "nncf"), peers.left_out
    write_result("profile_operators", options, rows=rows, left_out=left_out, versions=packages)
    return 0


def models(original: Path) -> Peers[Profiler]:
    artifact, peers = open_artifact(original), Peers[Profiler]()

    def optimized(precision: str) -> Path:
        output = original.with_name(precision)
        options: dict[str, Any] = {"calib": CALIBRATION, "threads": 1, "sequence": 128}
        return attnserve.optimize(original, output, precision=precision, **options).output

    def compiled(precision: str) -> bytes:
        """A model of OpenVINO as attnserve serves it."""
        blob = original.with_name(f"{precision}.compiled")
        open_session(optimized(precision), OPENVINO, replace(AS_SERVED, compiled=blob))
        return blob.read_bytes()[CHECKSUM_BYTES:]

    add, exported = peers.add, artifact.model
    add("as exported, ONNX Runtime float32", lambda: by_onnxruntime(exported))
    add("as exported, OpenVINO as it is", lambda: by_openvino(exported))
    nncf = partial(quantized_by_nncf, artifact, [CALIBRATION])
    add("NNCF int8, OpenVINO as it is", lambda: by_openvino(nncf()))
    add("fused int8-full, ONNX Runtime", lambda: by_onnxruntime(optimized("int8-full")))
    for precision in ("bfloat16-cpu", "int8-full-bfloat16"):
        add(f"fused {precision}, OpenVINO", lambda name=precision: by_openvino(compiled(name)))
    return peers


def by_onnxruntime(file: Path) -> Profiler:
    def profile(feed: Batch, runs: int) -> tuple[float, Sequence[Operator]]:
        options = replace(AS_SERVED, profile=file.with_name("profile"))
        session = OnnxRuntime().open(file, ONE_THREAD, options)
        us = 1e6 * timeit(lambda: session.run(None, feed), number=runs) / runs
        found: dict[str, Operator] = {}
        for event in json.loads(session.end_profiling().read_text(encoding="utf-8")):
            if event.get("cat") == "Node":
                name, given = event["name"], event["args"]
                kind, shapes = given["op_name"], given["input_type_shape"]
                is_product = "MatMul" in kind and len(next(iter(shapes[0].values()))) < 4
                spent = (found[name].us if name in found else 0.0) + event["dur"] / runs
                found[name] = Operator(name, kind, spent, is_product)
        return us, [*found.values()]

    return profile


def by_openvino(model: Any) -> Profiler:
    """Profile a file, a model in memory, or the bytes of a compiled model."""
    import openvino

    core: Any = openvino.Core()
    opened = core.import_model if isinstance(model, bytes) else core.compile_model
    settings = {"INFERENCE_NUM_THREADS": 1, "PERFORMANCE_HINT": "LATENCY", "PERF_COUNT": True}

    def profile(feed: Batch, runs: int) -> tuple[float, Sequence[Operator]]:
        compiled = opened(model, "CPU", settings)
        number = np.array(1)  # of the run: an input that attnserve adds
        names = [port.get_any_name() for port in compiled.inputs]
        given = {name: feed.get(name, number) for name in names}
        request = compiled.create_infer_request()
        us = 1e6 * timeit(lambda: request.infer(given, share_inputs=True), number=runs) / runs
        found: list[Operator] = []
        for node in request.get_profiling_info():
            spent, kind = 1e6 * node.real_time.total_seconds(), node.node_type
            found.append(Operator(node.node_name, kind, spent, kind == "FullyConnected"))
        return us, found

    return profile


def shares(us: float, operators: Sequence[Operator]) -> dict[str, float]:
    """The share of each kind in the time of a run.

    Raises:
        ValueError: The layers have another number of products with weights.
    """
    spent: dict[str, float] = dict.fromkeys(KINDS, 0.0)
    products = 0
    for operator in operators:
        kind = AFTER[(products - 1) % len(AFTER)]
        if operator.is_product:
            kind = PRODUCTS[products % len(PRODUCTS)]
            products += 1
        elif not products or operator.type in OBSERVERS:
            kind = "other"
        elif operator.type in CONVERSIONS or "smooth" in operator.name:
            kind = "conversions"
        spent[kind] += operator.us
    if not products or products % len(PRODUCTS):
        raise ValueError(f"{products} products with weights: expected {len(PRODUCTS)} a layer")
    spent["other"] += us - sum(spent.values())
    return {kind: time / us for kind, time in spent.items()}


if __name__ == "__main__":
    sys.exit(main())
