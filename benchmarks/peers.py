"""The encoder in both CPU runtimes, beside what other tools make of it.

    pip install 'attnserve[openvino,demo]' nncf sentence-transformers
    python -m benchmarks.peers --text TEXT

All models come from all-MiniLM-L6-v2 and, where they need calibration, from the same 500 sentences
and 150 paragraphs of the first half of TEXT (one paragraph a line). Fidelity is the overlap of the
10 nearest neighbors with those of the exported model, on 500 sentences and 400 paragraphs of the
second half (``benchmarks.mixture.texts``). All models are timed in turns, in one process, on one
thread, one text at a time: "turns" changes the length at each run, as requests do, and "repeated"
repeats one length. "auto" is what ``attnserve serve`` chooses for a file: the faster runtime, or
one for short and one for long texts. A peer that is not installed, or does not run on this CPU, is
left out with the reason in the result file.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
from rich.console import Console

import attnserve
from attnserve.context import ONE_THREAD, Device
from attnserve.data.datasets import load_inputs
from attnserve.literals import Precision
from attnserve.models.artifact import Artifact, open_artifact
from attnserve.models.embeddings import pool
from attnserve.models.example_inputs import example_inputs
from attnserve.models.lineage import OptimizeEntry
from attnserve.models.onnx_files import load_model
from attnserve.planning.served_graph.lossless import fuse_lossless
from attnserve.runtime.interface import Batch
from attnserve.runtime.interleaved_timer import BENCHMARK, time_functions, time_shapes
from attnserve.runtime.machine import has_bfloat16_product
from attnserve.runtime.session import open_session
from attnserve.runtime.times import paired_speedup
from attnserve.serving.backends import RunnerOptions, open_runner
from benchmarks._common import description, minilm, number_table, shortened, write_result
from benchmarks.mixture import texts
from benchmarks.planner import fused_file, other_tools
from graph_passes.analysis.workload import Workload
from graph_passes.errors import AttnserveError, CannotRewrite

LENGTHS = (16, 32, 128, 512)

NEIGHBORS = 10

SECONDS = 25.0
"""Time of the measurement at each length, of both kinds."""

CAREFUL = 0.9995
"""The similarity that the search keeps for an overlap of 0.99."""

GROUP = 64
"""Activations that share a scale in OpenVINO's dynamic quantization."""

EXPORT = "as exported, ONNX Runtime float32"

OPENVINO = Device(threads=1, runtime="openvino")

Run = Callable[[Batch], np.ndarray]
"""Inputs to token outputs (B, T, D)."""

R = TypeVar("R")


@dataclass(frozen=True)
class Peers(Generic[R]):
    """The models of this machine, and why others are left out.

    Attributes:
        models: What runs each model, by name.
        left_out: The reasons by name.
        choices: The runtimes of the models that are run as served, by name.
        removals: The speed-ups over the fused original in the same precision, by name.
    """

    models: dict[str, R] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    choices: dict[str, dict[str, Any]] = field(default_factory=dict)
    removals: dict[str, dict[str, Any]] = field(default_factory=dict)

    def add(self, name: str, make: Callable[[], R]) -> None:
        """Add a model, or the reason why it does not run here."""
        try:
            self.models[name] = make()
        except (AttnserveError, ImportError) as error:
            self.left_out[name] = str(error)
        print(f"{name}: {self.left_out.get(name, 'ready')}", flush=True)

    def add_served(self: Peers[Run], name: str, make: Callable[[], Path]) -> None:
        """Add a folder as it is served, and what removal gains in it."""

        def run() -> Run:
            folder = make()
            if removal := _removal(folder):
                self.removals[f"{name}, auto"] = removal
            return serve_folder(folder, self.choices.setdefault(name, {}))

        self.add(f"{name}, auto", run)


def _removal(folder: Path) -> dict[str, Any] | None:
    """The speed-up over the fused original in the same precision; None if nothing was removed."""
    entry = next(reversed(open_artifact(folder).lineage), None)
    speeds = entry.speedups if isinstance(entry, OptimizeEntry) else None
    return speeds.removal.model_dump() if speeds and speeds.removal else None


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=description(__doc__))
    parser.add_argument("--text", type=Path, required=True, help="one paragraph a line")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        files = texts(options.text, folder)
        attnserve.export(minilm(), folder / "original")
        peers = _peers(folder, [files["calibration sentences"], files["calibration paragraphs"]])
        artifact = open_artifact(folder / "original")
        rows = time_in_turns(peers.models, artifact)
        for kind in ("sentences", "paragraphs"):
            _add_overlap(rows, peers.models, artifact, files[f"unseen {kind}"], kind)
    for row in rows:
        row["removal"] = peers.removals.get(row["model"])
    write_result(
        "peers", options, rows=rows, left_out=peers.left_out, choices=peers.choices,
        versions=versions("onnxruntime", "openvino", "nncf", "sentence-transformers"),
    )  # fmt: skip
    _show(rows)
    return 0


def versions(*packages: str) -> dict[str, str]:
    """The versions of packages that are installed."""
    return {name: version(name) for name in packages if find_spec(name.replace("-", "_"))}


def _peers(folder: Path, calibration: Sequence[Path]) -> Peers[Run]:
    original = folder / "original"
    artifact, peers = open_artifact(original), Peers[Run]()

    def optimized(precision: Precision, **goal: Any) -> Path:
        """Our model; without a goal, only converted."""
        output = folder / "-".join((precision, *goal, *map(str, goal.values())))
        options: dict[str, Any] = goal or {"sequence": 128}
        if not output.exists():
            attnserve.optimize(
                original, output, precision=precision, calib=calibration, threads=1, **options
            )
        return output

    def converted(precision: Precision, device: Device) -> Run:
        return open_model(open_artifact(optimized(precision)).model, device)

    add = peers.add
    add(EXPORT, lambda: open_model(artifact.model, ONE_THREAD))
    add("as exported, OpenVINO float32", lambda: open_model(artifact.model, OPENVINO))
    add("as exported, OpenVINO as it is", lambda: native(artifact.model))
    tools = other_tools(original, folder)
    add(
        "ONNX Runtime's optimizer",
        lambda: open_model(tools["ONNX Runtime's optimizer"], ONE_THREAD),
    )
    add("ONNX Runtime's dynamic int8", lambda: open_model(tools["ONNX Runtime's int8"], ONE_THREAD))
    add("sentence-transformers", sentence_transformers)
    for rest in ("bfloat16", "float32"):
        add(f"NNCF int8, rest {rest}", partial(nncf_int8, artifact, calibration, rest))
    add("fused, ONNX Runtime float32", lambda: open_model(fused_file(original, folder), ONE_THREAD))
    add("fused, OpenVINO float32", lambda: open_model(fused_file(original, folder), OPENVINO))
    add("fused, OpenVINO bfloat16", lambda: converted("bfloat16-cpu", OPENVINO))
    add("fused int8, ONNX Runtime", lambda: converted("int8", ONE_THREAD))
    add("fused int8-full, ONNX Runtime", lambda: converted("int8-full", ONE_THREAD))
    add("fused int8-full, OpenVINO, rest float32", lambda: converted("int8-full", OPENVINO))
    name = "fused int8-full, OpenVINO, rest bfloat16"
    add(name, lambda: converted("int8-full-bfloat16", OPENVINO))
    name = f"fused, int8 weights, OpenVINO dynamic int8 in groups of {GROUP}"
    add(name, lambda: int8_in_groups(fused_file(original, folder)))
    chosen = peers.add_served
    chosen("fused float32", lambda: original)
    chosen("--collab-dk 128", partial(optimized, "float32", collab_dk=128))
    default = partial(optimized, "float32", keep=0.99, allow=["ffn"])
    chosen("search --keep 0.99, float32", default)
    for precision in ("bfloat16-cpu", "int8-full", "int8-full-bfloat16"):
        chosen(f"fused {precision}", partial(optimized, precision))
    mixed = "int8-full-bfloat16" if has_bfloat16_product() else "int8-full"
    chosen(f"search --keep {CAREFUL}, {mixed}", partial(optimized, mixed, keep=CAREFUL))
    return peers


def serve_folder(folder: Path, choice: dict[str, Any]) -> Run:
    """What ``attnserve serve`` runs of a folder; ``choice`` gets its report."""
    artifact, file = open_artifact(folder), folder / "served.onnx"
    auto = Device(threads=1, runtime="auto")
    try:
        report = fuse_lossless(artifact, file, auto)
    except CannotRewrite as error:  # it is served as it is
        choice["why"] = error.what
        return open_model(artifact.model, ONE_THREAD)
    choice.update(runtime=report.runtime, long_rows=report.long_rows and asdict(report.long_rows))
    device = replace(auto, runtime=report.runtime)
    session = open_runner(file, RunnerOptions(device), long_rows=report.long_rows)
    return lambda feed: session.run(None, feed)[0]


def open_model(model: Path, device: Device) -> Run:
    """A file in the runtime of a device."""
    session = open_session(model, device)
    return lambda feed: session.run(None, feed)[0]


def sentence_transformers() -> Run:
    """The encoder in PyTorch, the default of sentence-transformers, on one thread."""
    import torch

    library: Any = import_module("sentence_transformers")
    torch.set_num_threads(1)
    encoder = library.SentenceTransformer(minilm(), device="cpu")[0]

    @torch.inference_mode()
    def run(feed: Batch) -> np.ndarray:
        tensors = {name: torch.from_numpy(array) for name, array in feed.items()}
        return encoder(tensors)["token_embeddings"].numpy()

    return run


def native(model: Path | Any, options: Mapping[str, Any] = {}) -> Run:
    """OpenVINO's own interface, without what attnserve adds to it."""
    import openvino

    one_thread = {"INFERENCE_NUM_THREADS": 1, "PERFORMANCE_HINT": "LATENCY", "NUM_STREAMS": 1}
    compiled = openvino.Core().compile_model(model, "CPU", {**one_thread, **options})
    request = compiled.create_infer_request()
    return lambda feed: np.array(request.infer(feed)[0])


def nncf_int8(artifact: Artifact, calibration: Sequence[Path], rest: str | None = None) -> Run:
    """``quantized_by_nncf``, run in OpenVINO.

    Args:
        rest: The precision of what is not int8; None leaves it to OpenVINO.
    """
    import openvino

    types = {"bfloat16": openvino.Type.bf16, "float32": openvino.Type.f32}
    options = {} if rest is None else {"INFERENCE_PRECISION_HINT": types[rest]}
    return native(quantized_by_nncf(artifact, calibration), options)


def int8_in_groups(model: Path) -> Run:
    """int8 weights by NNCF; OpenVINO rounds activations in groups in each run."""
    import openvino

    nncf: Any = import_module("nncf")
    compressed = nncf.compress_weights(openvino.Core().read_model(model))
    return native(compressed, {"DYNAMIC_QUANTIZATION_GROUP_SIZE": GROUP})


def quantized_by_nncf(artifact: Artifact, calibration: Sequence[Path]) -> Any:
    """NNCF's quantization after training, for transformers: a model of OpenVINO."""
    import openvino

    nncf: Any = import_module("nncf")

    data = load_inputs(calibration, load_model(artifact), artifact)
    rows = [
        {name: array[row : row + 1] for name, array in batch.items()}
        for batch in data.fit
        for row in range(len(next(iter(batch.values()))))
    ]
    return nncf.quantize(
        openvino.Core().read_model(artifact.model),
        nncf.Dataset(rows),
        model_type=nncf.ModelType.TRANSFORMER,
        subset_size=len(rows),
    )


def time_in_turns(
    models: Mapping[str, Run], artifact: Artifact, over: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """The speed of each model over the first one, with its interval, by length.

    Args:
        over: Models over which the speed of each model is stated too.
    """
    graph = load_model(artifact)
    feeds = [example_inputs(graph, Workload.of(1, length)) for length in LENGTHS]
    runs = [[partial(run, feed) for feed in feeds] for run in models.values()]
    times = {
        "turns": time_shapes(runs, shortened(SECONDS * len(LENGTHS)), BENCHMARK),
        "repeated": [
            time_functions(each, shortened(SECONDS), BENCHMARK) for each in zip(*runs, strict=True)
        ],
    }
    rows: list[dict[str, Any]] = [{"model": name} for name in models]
    for (kind, by_length), (index, row) in product(times.items(), enumerate(rows)):
        row[kind] = {}
        for length, ms in zip(LENGTHS, by_length, strict=True):
            speedups = [
                paired_speedup([ms[place]], [ms[index]])
                for place in (0, *map(list(models).index, over))
            ]
            first, *others = ([speedup.value, *speedup.ci95] for speedup in speedups)
            row[kind][str(length)] = {
                "speedup": first,
                "p50_ms": float(np.median(ms[index])),
                **({"over": dict(zip(over, others, strict=True))} if over else {}),
            }
    return rows


def _add_overlap(
    rows: Sequence[dict[str, Any]],
    models: Mapping[str, Run],
    artifact: Artifact,
    file: Path,
    kind: str,
) -> None:
    """Add the overlap of each model's neighbors with those of the exported model."""
    batches = load_inputs(file, load_model(artifact), artifact, split=False).fit

    def vectors(run: Run) -> np.ndarray:  # N D
        found = [
            pool(run(batch), batch["attention_mask"], artifact.pooling, artifact.normalize, None)
            for batch in batches
        ]
        return np.concatenate(found)

    expected = vectors(models[EXPORT])
    for row in rows:
        overlap = neighbor_overlap(expected, vectors(models[row["model"]]))
        row.setdefault("overlap", {})[kind] = overlap


def neighbor_overlap(expected: np.ndarray, found: np.ndarray) -> float:
    """The mean share of the nearest texts of a text that are the same in both, (texts, width)."""
    pairs = zip(_neighbors(expected), _neighbors(found), strict=True)
    return float(np.mean([len(set(a) & set(b)) / NEIGHBORS for a, b in pairs]))


def _neighbors(vectors: np.ndarray) -> list[list[int]]:
    """The nearest other texts of each text, by cosine."""
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    similarities = unit @ unit.T
    np.fill_diagonal(similarities, -np.inf)
    return np.argsort(-similarities, axis=1)[:, :NEIGHBORS].tolist()


def _show(rows: Sequence[dict[str, Any]]) -> None:
    headings = (*(f"{length} tokens" for length in LENGTHS), "sentences", "paragraphs")
    for kind in ("turns", "repeated"):
        table = number_table(f"speed over the export ({kind}), and overlap@10", headings)
        for row in rows:
            table.add_row(
                row["model"],
                *(f"{row[kind][str(length)]['speedup'][0]:.2f}x" for length in LENGTHS),
                *(f"{row['overlap'][texts]:.3f}" for texts in ("sentences", "paragraphs")),
            )
        Console(width=140).print(table)


if __name__ == "__main__":
    sys.exit(main())
