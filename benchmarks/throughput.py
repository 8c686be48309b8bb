"""Texts per second of `attnserve serve` and of sentence-transformers, and their fidelity.

    pip install 'attnserve[openvino,demo]' nncf psutil
    python -m benchmarks.throughput --text TEXT --cache FOLDER [--rounds N] [--seconds S]

The texts are 1,500 sentences and 500 paragraphs of the second half of TEXT, mixed; models are
calibrated on the first half. ``attnserve serve`` answers requests of 32 texts from four clients,
and single texts from eight. sentence-transformers encodes 512 of the texts in one call, which sorts
them by length into batches of 32, in its own process and in an environment that this program makes
in FOLDER. All use all cores, the clients too, and take
turns; the speed-ups are those of one round. The overlap is that of the ten nearest texts with the
exported model, for the sentences and for the paragraphs.
"""

from __future__ import annotations

import argparse
import random
import shutil
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

import attnserve
from attnserve.intervals import bootstrap_interval
from attnserve.literals import Precision
from attnserve.models.artifact import open_artifact
from benchmarks._common import description, minilm, number_table, write_result
from benchmarks.mixture import halves, sentences_of, shortened, texts
from benchmarks.peers import neighbor_overlap, quantized_by_nncf
from benchmarks.serving.client import body, embeddings, send_load
from benchmarks.serving.peers import (
    Setup,
    all_cores,
    attnserve_server,
    peer_versions,
    sentence_transformers,
)

PRECISIONS: Sequence[Precision] = ("bfloat16-cpu", "int8-full", "int8-full-bfloat16")
COUNTS = {"sentences": 1500, "paragraphs": 500}
REQUESTS = {"requests of 32": (32, 4), "single texts": (1, 8)}
"""Texts a request, and clients."""

TEXTS = 512
"""Number of texts that a peer encodes in one call."""

PEER = "sentence-transformers, "
ORIGINAL = "attnserve, float32"
REFERENCE = f"{PEER}openvino"


@dataclass(frozen=True)
class System:
    """A system that is measured.

    Attributes:
        rate: Texts per second, by the seconds of the measurement.
        embed: The vectors of texts, (texts, width).
    """

    rate: Callable[[float], float]
    embed: Callable[[Sequence[str]], np.ndarray]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=description(__doc__))
    parser.add_argument("--text", type=Path, required=True, help="one paragraph a line")
    parser.add_argument("--cache", type=Path, required=True, help="models and environments")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=8.0, help="of one measurement")
    options = parser.parse_args(arguments)
    unseen = unseen_texts(options.text)
    mixed = tuple(text for kind in unseen.values() for text in kind)
    mixed = tuple(random.Random(0).sample(mixed, len(mixed)))
    setup = all_cores(Path(minilm()), options.cache, mixed)
    models = build(options.cache, options.text)
    with ExitStack() as stack:
        systems = dict(started(stack, setup, models))
        rates = measured(systems, options.rounds, options.seconds)
        vectors = {
            kind: {name: systems[name].embed(rows) for name in unique(systems)}
            for kind, rows in unseen.items()
        }
    rows = [row(name, rates, vectors) for name in systems]
    show(rows)
    write_result(
        "throughput", options, rows=rows, threads=setup.threads,
        texts={kind: len(found) for kind, found in unseen.items()},
        versions=peer_versions(setup, "sentence-transformers"),
    )  # fmt: skip
    return 0


def unseen_texts(source: Path) -> dict[str, list[str]]:
    """Sentences and paragraphs of the half that no model is calibrated on."""
    _, half = halves(source)
    sentences = sentences_of(half)
    random.Random(0).shuffle(sentences)
    found = {"sentences": sentences, "paragraphs": shortened(half)}
    return {kind: rows[: COUNTS[kind]] for kind, rows in found.items()}


def build(cache: Path, source: Path) -> dict[str, Path]:
    """Write the models that are not in ``cache`` yet; return them by the name of the system."""
    models = build_own(cache, source)
    original = models[ORIGINAL]
    models[f"{PEER}openvino int8 (NNCF)"] = nncf = cache / "nncf"
    if not nncf.exists():
        import openvino

        quantized = quantized_by_nncf(open_artifact(original), calibration_files(cache, source))
        shutil.copytree(minilm(), nncf)
        (nncf / "openvino").mkdir()
        openvino.save_model(quantized, nncf / "openvino" / "openvino_model.xml", False)
    models[REFERENCE] = models[f"{PEER}torch"] = Path(minilm())
    models[f"{PEER}onnx"] = onnx = cache / "onnx"
    if not onnx.exists():
        shutil.copytree(minilm(), onnx)
        (onnx / "onnx").mkdir()
        shutil.copyfile(original / "model.onnx", onnx / "onnx" / "model.onnx")
    return models


def build_own(cache: Path, source: Path) -> dict[str, Path]:
    """``build``, for the models of attnserve."""
    cache.mkdir(parents=True, exist_ok=True)
    original = cache / "original"
    if not original.exists():
        attnserve.export(minilm(), original)
    models = {ORIGINAL: original}
    for precision in PRECISIONS:
        models[f"attnserve, {precision}"] = path = cache / precision
        if not path.exists():
            calibration = calibration_files(cache, source)
            attnserve.optimize(original, path, precision=precision, calib=calibration, sequence=128)
    return models


def calibration_files(cache: Path, source: Path) -> list[Path]:
    """Write the sentences and the paragraphs of the half for calibration."""
    files = texts(source, cache)
    return [files["calibration sentences"], files["calibration paragraphs"]]


def started(
    stack: ExitStack, setup: Setup, models: Mapping[str, Path]
) -> Sequence[tuple[str, System]]:
    """Start all servers and programs."""
    systems: list[tuple[str, System]] = []
    for name, path in models.items():
        if name.startswith(PEER):
            systems.append((name, peer(stack, setup, path, name.removeprefix(PEER).split()[0])))
            continue
        port, _ = stack.enter_context(attnserve_server(setup, model=path))
        systems += [
            (f"{name}, {kind}", served(setup, port, *shape)) for kind, shape in REQUESTS.items()
        ]
    return systems


def served(setup: Setup, port: int, size: int, clients: int) -> System:
    """A server, in requests of ``size`` texts."""
    parts = [setup.texts[at : at + size] for at in range(0, len(setup.texts), size)]
    bodies = [body(part) for part in parts]

    def rate(seconds: float) -> float:
        (phase,) = send_load(setup, port, bodies, {"concurrency": clients, "seconds": seconds})
        if phase.statuses.keys() != {"200"}:
            raise SystemExit(f"the server answered {phase.statuses}")
        return phase.answers_per_s * len(setup.texts) / len(parts)

    return System(rate, partial(embeddings, port))


def peer(stack: ExitStack, setup: Setup, folder: Path, backend: str) -> System:
    """A backend of sentence-transformers."""
    program = stack.enter_context(sentence_transformers(setup, folder, backend))
    program.read()

    def rate(seconds: float) -> float:
        found = program.ask({"texts": setup.texts[:TEXTS], "seconds": seconds, "batch": None})
        return found["texts"] / found["seconds"]

    def embed(rows: Sequence[str]) -> np.ndarray:
        parts = [rows[at : at + 32] for at in range(0, len(rows), 32)]
        answers = [program.ask({"texts": part, "seconds": 0, "batch": 32}) for part in parts]
        return np.concatenate([np.array(answer["vectors"]) for answer in answers])

    return System(rate, embed)


def unique(systems: Mapping[str, System]) -> list[str]:
    """The names without a second way to send texts to the same server."""
    single = ", single texts"
    return [name for name in systems if not name.endswith(single)]


def measured(systems: Mapping[str, System], rounds: int, seconds: float) -> dict[str, list[float]]:
    """Texts per second of each system by round; the order of the systems rotates."""
    names = list(systems)
    for name in names:
        systems[name].rate(min(seconds, 3.0))
    rates: dict[str, list[float]] = {name: [] for name in names}
    for index in range(rounds):
        at = index * 3 % len(names)
        for name in names[at:] + names[:at]:
            rates[name].append(systems[name].rate(seconds))
            print(f"round {index + 1}: {name}: {rates[name][-1]:.0f} texts/s", flush=True)
    return rates


def row(
    name: str, rates: Mapping[str, list[float]], vectors: Mapping[str, Mapping[str, np.ndarray]]
) -> dict[str, Any]:
    """The rate, the ratio over each peer with its interval, and the overlap of a system."""
    over: dict[str, list[float]] = {}
    for other in rates:
        if other.startswith(PEER):
            over[other] = ratio(rates[name], rates[other])
    embedded = name.replace("single texts", "requests of 32")
    exported = f"{ORIGINAL}, requests of 32"
    return {
        "system": name,
        "texts_per_s": statistics.median(rates[name]),
        "rounds": rates[name],
        "over": over,
        "overlap": {
            kind: neighbor_overlap(found[exported], found[embedded])
            for kind, found in vectors.items()
        },
    }


def ratio(rates: Sequence[float], others: Sequence[float]) -> list[float]:
    """The median ratio of two rates by round, with the ends of its 95 % interval."""
    values = np.divide(rates, others)

    def median(rows: np.ndarray) -> np.ndarray:
        return np.median(values[rows], axis=-1)

    return [float(np.median(values)), *bootstrap_interval(median, len(values), seed=0)]


def show(rows: Sequence[dict[str, Any]]) -> None:
    peers = [row["system"] for row in rows if row["system"].startswith(PEER)]
    columns = ("texts/s", *(f"over {name.removeprefix(PEER)}" for name in peers), *COUNTS)
    table = number_table("texts per second, and overlap@10", columns)
    for row in rows:
        table.add_row(
            row["system"], f"{row['texts_per_s']:.0f}",
            *(f"{row['over'][name][0]:.2f}x" for name in peers),
            *(f"{row['overlap'][kind]:.3f}" for kind in COUNTS),
        )  # fmt: skip
    Console(width=150).print(table)


if __name__ == "__main__":
    sys.exit(main())
