"""Run the benchmarks of all tables in README.md and docs, one after the other.

    python -m benchmarks.readme --data FOLDER [--only NAME ...]
    python -m benchmarks.readme --list
    python -m benchmarks.readme --quick FOLDER [--only NAME ...]

Each benchmark is a process of its own with its own rules of timing, and writes its file of
benchmarks/results; then the table of the README is updated. Run it on an idle machine. What fails
or lacks data is named at the end (exit code 1), and its file stays as it is. Training and GPU
results are not part of it. docs/benchmarks.md lists their files.

``--quick`` tries the benchmarks with an encoder of two random layers, generated texts and few
rounds. Its result files in FOLDER have the right form and no meaning.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import cycle, islice
from pathlib import Path

from rich.console import Console

from benchmarks._common import QUICK, description, number_table, write_lines
from benchmarks.search_time import save_random_bert
from docs.hooks.tables.readme import write_readme
from docs.hooks.tables.results import ROOT

STS = "--train {data}/data/sts/stsb_train.tsv --dev {data}/data/sts/stsb_dev.tsv"
TRAIN = "--train {data}/data/sts/stsb_train.tsv"
TEXT = "{data}/data/lm/wikitext2_valid.txt"
SST2 = "{data}/data/sst2/sst2_train.tsv {data}/data/sst2/sst2_dev.tsv"
STORIES = "{data}/models/stories260K/stories260K.onnx"
TOKENIZER = "{data}/models/stories260K/tok512.bin"
HUMAN = "{data}/data/lm/tinystories_sample.txt"
CASES = (
    "--minilm {data}/data/sts/stsb_train.tsv {data}/data/sts/stsb_dev.tsv"
    f" --sst2 {{cache}}/sst2 {SST2} --modernbert {{cache}}/modern {SST2}"
    f" --stories {STORIES} {TOKENIZER} {{cache}}/stories_calib.npz {{cache}}/stories_unseen.npz"
    f" {HUMAN} --vit {{data}}/models/vit_mnist_researchase/vit_mnist_researchase.onnx"
    " {data}/data/mnist/t10k-images-idx3-ubyte.gz {data}/data/mnist/t10k-labels-idx1-ubyte.gz"
    f" --translation {{data}}/data/mt --wikitext {{cache}}/lm {TEXT}"
    " {data}/data/lm/tinyshakespeare.txt"
)


@dataclass(frozen=True)
class Benchmark:
    """The command of a benchmark.

    Attributes:
        minutes: Expected time on two cores.
        options: ``{data}`` and ``{cache}`` are the folders of the options.
        quick: Options that replace or extend these in a quick run; None if it is too large for one.
        packages: Modules that are needed and that ``attnserve`` does not install.
    """

    minutes: int
    options: str = ""
    quick: str | None = None
    packages: tuple[str, ...] = ()

    def words(self, folders: Mapping[str, Path], *, quick: bool) -> list[str]:
        words = shlex.split(f"{self.options} {self.quick or '' if quick else ''}")
        return [word.format_map(folders) for word in words]

    def lacking(self, folders: Mapping[str, Path], *, quick: bool) -> str | None:
        """Why it cannot run, or None."""
        if quick:
            return "it is too large for a quick run" if self.quick is None else None
        for package in self.packages:
            if find_spec(package) is None:
                return f"the package {package} is not installed"
        for word in shlex.split(self.options):
            path = Path(word.format_map(folders))
            if word.startswith("{") and word != "{cache}" and not path.exists():
                return f"{path} does not exist"
        return None


OPENVINO = ("openvino", "nncf")

BENCHMARKS = {
    "peers": Benchmark(35, f"--text {TEXT}", "", (*OPENVINO, "sentence_transformers")),
    "planner": Benchmark(40, f"{STS} --other {TEXT}", "--rounds 2 --rows 40", ("onnxscript",)),
    "task_score": Benchmark(50, STS, packages=OPENVINO),
    "bert_base": Benchmark(12, packages=OPENVINO),
    "profile_operators": Benchmark(6, quick="--runs 3", packages=OPENVINO),
    "serving_load": Benchmark(
        50, "--texts {data}/data/sts/stsb_train.tsv --cache {cache}", packages=("psutil",)
    ),
    "index": Benchmark(
        30,
        "--train {data}/data/sts/stsb_train.tsv --dev {data}/data/sts/stsb_dev.tsv"
        " --models {cache}/index --keep 0.99",
    ),
    "rerank": Benchmark(15, "--model {cache}/reranker --cache {cache}"),
    "throughput": Benchmark(
        25, f"--text {TEXT} --cache {{cache}}/throughput", packages=(*OPENVINO, "psutil")
    ),
    "request_cost": Benchmark(
        4, f"--text {TEXT} --cache {{cache}}/throughput", packages=("openvino", "psutil")
    ),
    "runtimes": Benchmark(
        25, "--vit {data}/models/vit_mnist_researchase/vit_mnist_researchase.onnx",
        packages=("openvino",),
    ),
    "loading": Benchmark(3, f"--text {TEXT}", "--rounds 1", ("openvino",)),
    "mixing": Benchmark(45, STS),
    "fidelity": Benchmark(
        5, "--calib {data}/data/sts/stsb_train.tsv --data {data}/data/sts/stsb_dev.tsv",
        "--ranks 96 --rows 40",
    ),
    "reuse_prune": Benchmark(20, STS, packages=("onnxsim",)),
    "int8": Benchmark(15, STS, "--rounds 2 --rows 40"),
    "mixture": Benchmark(90, f"--text {TEXT}", "--goal attention --keep 0.9"),
    "quality": Benchmark(90, CASES, "--only minilm --keep 0.9"),
    "rotary": Benchmark(3, f"--model {STORIES} --tokenizer {TOKENIZER} --text {HUMAN}"),
    "shapes": Benchmark(30, TRAIN),
    "search_time": Benchmark(55, TRAIN),
    "table1": Benchmark(3, quick="--rounds 2"),
    "cp_speed": Benchmark(
        10, "--layers 12", "--rounds 1 --iterations 1 --layers 1", ("tensorly",)
    ),
    "find_speed": Benchmark(5, quick="--rounds 1 --most 2"),
}  # fmt: skip
"""The benchmarks of the tables: first those of the README."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=description(__doc__))
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared", help="texts, models")
    parser.add_argument("--cache", type=Path, default=ROOT / ".cache" / "benchmarks",
                        help="trained models and environments of peers")  # fmt: skip
    parser.add_argument("--only", choices=BENCHMARKS, nargs="+", default=list(BENCHMARKS))
    parser.add_argument("--quick", type=Path, metavar="FOLDER", help="try it; results go to FOLDER")
    parser.add_argument("--list", action="store_true", help="list benchmarks and their minutes")
    options = parser.parse_args(arguments)
    if options.list:
        return show(options.only)
    quick, environment = options.quick is not None, dict(os.environ)
    folders = {"data": options.data.absolute(), "cache": options.cache.absolute()}
    if quick:
        environment["BENCHMARKS_QUICK"] = str(options.quick.absolute())
        folders["data"] = prepare_quick(options.quick.absolute())
    failed = list(run_all(options.only, folders, environment, quick=quick))
    if not quick:
        write_readme()
    for line in failed:
        print(f"not measured: {line}")
    return 1 if failed else 0


def show(names: list[str]) -> int:
    table = number_table("benchmarks", ("minutes",))
    for name in names:
        table.add_row(name, str(BENCHMARKS[name].minutes))
    table.add_row("all", str(sum(BENCHMARKS[name].minutes for name in names)))
    Console().print(table)
    return 0


def run_all(
    names: list[str], folders: Mapping[str, Path], environment: Mapping[str, str], *, quick: bool
) -> Iterator[str]:
    """Run the benchmarks, and yield what was not measured and why."""
    for place, name in enumerate(names, start=1):
        benchmark = BENCHMARKS[name]
        if reason := benchmark.lacking(folders, quick=quick):
            yield f"{name}: {reason}"
            continue
        expected = "" if quick else f", about {benchmark.minutes} minutes"
        print(f"[{place}/{len(names)}] {name}{expected}", flush=True)
        words = benchmark.words(folders, quick=quick)
        command = [sys.executable, "-m", f"benchmarks.{name}", *words]
        started = time.perf_counter()
        code = subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode
        print(f"{name}: {(time.perf_counter() - started) / 60:.1f} minutes", flush=True)
        if code:
            yield f"{name}: exit code {code}: {shlex.join(command[1:])}"


def prepare_quick(folder: Path) -> Path:
    """Write the encoder and the data of a quick run, and return the folder of the data."""
    if QUICK:
        raise SystemExit("BENCHMARKS_QUICK is set: a quick run sets it itself")
    data = folder / "data"
    for part in ("data/sts", "data/lm"):
        (data / part).mkdir(parents=True)
    save_random_bert(folder / "model", 2, 192, 12)
    texts = (ROOT / "benchmarks" / "calibration.txt").read_text(encoding="utf-8").splitlines()
    pairs = [
        f"{5 * kept / 9:.2f}\t{text}\t{' '.join([*text.split()[:kept], other])}"
        for kept, text, other in zip(cycle(range(10)), texts, reversed(texts), strict=False)
    ]
    header = "score\tsentence1\tsentence2"
    write_lines(data / "data/sts/stsb_train.tsv", [header, *pairs[:120]])
    write_lines(data / "data/sts/stsb_dev.tsv", [header, *pairs[120:160]])
    # benchmarks.mixture takes its sentences from what is left after 150 and 400 paragraphs.
    paragraphs = [" ".join(islice(cycle(texts), start, start + 8)) for start in range(900)]
    write_lines(data / "data/lm/wikitext2_valid.txt", paragraphs)
    return data


if __name__ == "__main__":
    sys.exit(main())
