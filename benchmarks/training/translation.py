"""Train translators with the papers' attention layers, and score them on Multi30k en-de.

    python -m benchmarks.training.translation --data FOLDER [--only NAME ...] [--seeds 0 1 2]
                                              [--minutes M] [--resume]

Writes ``benchmarks/results/training/translation-NAME-SEED.json`` as soon as a run is finished. The
models and their claims are in ``variants.py``. All get the same steps on the same batches.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from dataclasses import asdict
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from attnserve.checks.benchmark import describe_machine
from attnserve.context import Device
from attnserve.runtime.machine import product_flags
from benchmarks import _common
from benchmarks.training.data import CACHE, Corpus, read_corpus
from benchmarks.training.loop import Training
from benchmarks.training.variants import SAME, VARIANTS, Settings, Variant, find


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    if find_spec("sacrebleu") is None:
        raise SystemExit("sacrebleu, which scores translations, is missing: pip install sacrebleu")
    if options.threads:
        torch.set_num_threads(options.threads)
    settings = Settings()
    corpus = read_corpus(
        options.data, options.cache, vocabulary=settings.vocabulary, longest=settings.longest
    )
    deadline = time.monotonic() + 60 * options.minutes
    for seed in options.seeds:
        for variant in find(options.only):
            if options.resume and is_finished(variant, seed, settings):
                print(f"{variant.name}, seed {seed}: finished before", flush=True)
            elif not measure(variant, seed, settings, corpus, options, deadline):
                print("the time is over: continue with --resume", flush=True)
                return 0
    return 0


def parse(arguments: list[str] | None) -> argparse.Namespace:
    names = [*VARIANTS, *SAME]
    parser = argparse.ArgumentParser(description=_common.description(__doc__))
    parser.add_argument("--data", type=Path, required=True, help="folder of the Multi30k files")
    parser.add_argument(
        "--only", nargs="+", default=list(VARIANTS), choices=names, metavar="NAME",
        help=f"models to train; default: all of {', '.join(names)}",
    )  # fmt: skip
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop after this time")
    parser.add_argument("--resume", action="store_true", help="keep finished runs, continue others")
    parser.add_argument("--cache", type=Path, default=CACHE, help="vocabulary and checkpoints")
    parser.add_argument("--threads", type=int, default=0, help="of torch; 0 is its default")
    return parser.parse_args(arguments)


def measure(
    variant: Variant,
    seed: int,
    settings: Settings,
    corpus: Corpus,
    options: argparse.Namespace,
    deadline: float,
) -> bool:
    """Train one model, score it and write its result; False if the time ran out before."""
    checkpoint = options.cache / f"{variant.name}-{seed}.pt"
    training = Training(variant, settings, seed, corpus)
    if not training.run(checkpoint, resume=options.resume, deadline=deadline, say=_say):
        return False
    score, signature = bleu(training.translations(corpus.test), corpus.references)
    _say(f"{variant.name}, seed {seed}: BLEU {score:.2f}")
    command = ["python -m benchmarks.training.translation", f"--data {options.data.name}"]
    command += [f"--only {variant.name} --seeds {seed} --threads {torch.get_num_threads()}"]
    result = {
        "command": " ".join(command),
        "variant": variant.name,
        "configuration": asdict(variant),
        "seed": seed,
        "bleu": score,
        "signature": signature,
        **training.result,
        "settings": settings.to_json(),
        "pairs": len(corpus.train),
        "machine": machine(training),
        "cpu_flags": product_flags(),
    }
    _common.write_json(result_path(variant, seed), result)
    return True


def result_path(variant: Variant, seed: int) -> Path:
    return _common.RESULTS / "training" / f"translation-{variant.name}-{seed}.json"


def is_finished(variant: Variant, seed: int, settings: Settings) -> bool:
    """Whether there is a result of the same variant and settings."""
    path = result_path(variant, seed)
    if not path.is_file():
        return False
    found = json.loads(path.read_text(encoding="utf-8"))
    return (found["configuration"], found["settings"]) == (asdict(variant), settings.to_json())


def bleu(hypotheses: list[str], references: list[str]) -> tuple[float, str]:
    """The corpus BLEU of sacreBLEU and its signature."""
    from sacrebleu.metrics import BLEU

    metric = BLEU()
    return metric.corpus_score(hypotheses, [references]).score, str(metric.get_signature())


def machine(training: Training) -> dict[str, Any]:
    """The machine, the threads of torch, and the share of the processor that the steps got.

    ``shared`` is True if other processes used the machine: the steps per second are then not
    comparable with those of other runs.
    """
    threads = torch.get_num_threads()
    load, share = os.getloadavg()[0], training.cpu_seconds / (training.seconds * threads)
    return {
        **asdict(describe_machine(Device(threads=threads))),
        "torch": version("torch"),
        "load_1min": load,
        "cpu_share": share,
        "shared": load > threads + 0.5 or share < 0.9,
    }


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
