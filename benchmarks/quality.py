"""Target, verified and independently measured quality of optimized models, for each measure.

    python -m benchmarks.quality --minilm TRAIN.tsv DEV.tsv --sst2 CLASSIFIER TRAIN.tsv DEV.tsv
        --stories MODEL.onnx TOKENIZER.bin ROWS.npz UNSEEN.npz HUMAN.txt
        --vit MODEL.onnx IMAGES.gz LABELS.gz --translation DATA --wikitext MODEL TEXT OTHER
        [--only MODEL] [--keep K ...] [--resume]

Each model is optimized for every K (``--keep K --allow ffn``, one thread). The result has the
verification of the search, the same measure on unseen rows of the same source and on rows of
another source, and the score of a task. Runs take minutes: the result file is written after each of
them, and ``--resume`` continues it.

    minilm      sentences of TRAIN to calibrate, others of it; sentences of DEV; Spearman of DEV
    sst2        CLASSIFIER is an output of benchmarks.classifier; sentences and accuracy as above
    modernbert  a CLASSIFIER of benchmarks.classifier --scratch; calibrated on sentences of DEV
    stories     stories260K of llama2.c; ROWS and UNSEEN (array idx, 256 tokens) are drawn from the
                model itself (benchmarks.draw); HUMAN has a story a line; perplexity of HUMAN
    vit         a network for MNIST; every seventh image to calibrate, 5,000 others; their accuracy
    translation a model of benchmarks.training.translation on the Multi30k files in DATA, which is
                trained first if there is no checkpoint; pairs of val to calibrate, pairs of test;
                BLEU of test
    wikitext    MODEL is an output of benchmarks.training.language_model on TEXT; paragraphs of TEXT
                that it did not learn; lines of OTHER; perplexity of the former
"""

from __future__ import annotations

import argparse
import gzip
import math
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

import attnserve
from attnserve.context import ONE_THREAD
from attnserve.models.measured import Quality
from attnserve.runtime.session import open_session
from benchmarks._common import (
    classifier_accuracy,
    description,
    labeled_sentences,
    minilm,
    number_table,
    quality_as_searched,
    sentences,
    spread,
    stored_rows,
    sts_score,
    write_lines,
    write_result,
)

KEEP = (0.95, 0.98, 0.99, 0.995)

ROWS, UNSEEN, IMAGES, DEV_ROWS, OTHER_LINES = 1400, 2000, 5000, 600, 500
"""Rows for calibration, a seventh of them for verification; unseen sentences and images."""


@dataclass(frozen=True)
class Case:
    """A model and its data.

    Attributes:
        unseen: Rows of the source of ``calibration`` that are not part of it.
        other: Rows of another source, if there are any.
        task, score: The name of a task, and the score of a model on it.
    """

    model: Path
    calibration: Path
    unseen: Path
    other: Path | None
    task: str
    score: Callable[[Path], float]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=description(__doc__))
    for name, (parts, _) in MODELS.items():
        parser.add_argument(f"--{name}", type=Path, nargs=len(parts), metavar=parts)
    parser.add_argument("--only", choices=MODELS, nargs="+", default=list(MODELS))
    parser.add_argument("--keep", type=float, nargs="+", default=KEEP)
    parser.add_argument("--resume", action="store_true", help="skip what the result file has")
    options = parser.parse_args(arguments)
    files = argparse.Namespace(**{name: getattr(options, name) for name in MODELS})
    rows = stored_rows("quality")
    done = {(row["model"], row["keep"]) for row in rows if options.resume}
    with tempfile.TemporaryDirectory() as name:
        for model in options.only:
            wanted = [keep for keep in options.keep if (model, keep) not in done]
            if not (wanted and (given := getattr(files, model))):
                continue
            (folder := Path(name) / model).mkdir()
            case = MODELS[model][1](folder, *given)
            for keep in wanted:
                row = {"model": model, **measure(case, keep, folder / f"keep-{keep}")}
                rows = merged(rows, row)
                write_result("quality", files, rows=rows)
                print(f"{model}, {keep}: {row['cpu_seconds']:.0f} s, {row['verdict']}", flush=True)
    _show(rows)
    return 0


# The models and their data


def _minilm(folder: Path, train: Path, dev: Path) -> Case:
    attnserve.export(minilm(), folder / "original")
    files = _texts(folder, *(sentences(file, sys.maxsize) for file in (train, dev)))
    return Case(folder / "original", *files, "Spearman", partial(sts_score, pairs=dev))


def _classifier(folder: Path, model: Path, train: Path, dev: Path) -> Case:
    files = _texts(folder, *(labeled_sentences(file)[0] for file in (train, dev)))
    return Case(model, *files, "accuracy", partial(classifier_accuracy, rows=dev))


def _from_scratch(folder: Path, model: Path, train: Path, dev: Path) -> Case:
    """Calibrate on sentences of DEV, because the network has memorized those of TRAIN."""
    texts = [labeled_sentences(file)[0] for file in (dev, train)]
    files = _texts(folder, *texts, rows=DEV_ROWS)
    return Case(model, *files, "accuracy", partial(classifier_accuracy, rows=dev))


def _texts(
    folder: Path, train: Sequence[str], dev: Sequence[str], rows: int | None = None
) -> tuple[Path, Path, Path]:
    """Write a text for calibration, one that has no sentence of it, and the other text."""
    chosen = dict.fromkeys(spread(train, rows or ROWS))
    unseen = [text for text in dict.fromkeys(train) if text not in chosen]
    return (
        write_lines(folder / "calibration.txt", list(chosen)),
        write_lines(folder / "unseen.txt", spread(unseen, min(UNSEEN, len(unseen)))),
        write_lines(folder / "other.txt", dev),
    )


def _stories(
    folder: Path, model: Path, tokenizer: Path, rows: Path, unseen: Path, human: Path
) -> Case:
    from tests.stories import stories

    np.savez(folder / "human.npz", idx=stories(human, tokenizer))

    texts = folder / "human.npz"
    return Case(model, rows, unseen, texts, "perplexity", partial(_perplexity, texts=texts))


def _perplexity(model: Path, texts: Path) -> float:
    quality = attnserve.verify(model, model, data=texts).quality
    assert quality is not None
    return quality.also["perplexity"]


def _vit(folder: Path, model: Path, images: Path, labels: Path) -> Case:
    pixels = np.frombuffer(gzip.decompress(images.read_bytes())[16:], np.uint8)
    scaled = ((pixels.reshape(-1, 1, 28, 28) / 255 - 0.1307) / 0.3081).astype(np.float32)
    truth = np.frombuffer(gzip.decompress(labels.read_bytes())[8:], np.uint8)
    chosen = np.arange(len(scaled)) % 7 == 0
    others = np.flatnonzero(~chosen)[:IMAGES]
    for name, part in (("calibration", scaled[chosen][:ROWS]), ("unseen", scaled[others])):
        np.savez(folder / f"{name}.npz", image=part)

    def accuracy(model: Path) -> float:
        session, parts = open_session(_graph(model), ONE_THREAD), np.array_split(others, 20)
        found = [np.argmax(session.run(None, {"image": scaled[part]})[0], -1) for part in parts]
        return float((np.concatenate(found) == truth[others]).mean())

    calibration, unseen = folder / "calibration.npz", folder / "unseen.npz"
    return Case(model, calibration, unseen, None, "accuracy", accuracy)


def _translation(folder: Path, data: Path) -> Case:
    from benchmarks.training import exported
    from benchmarks.training.data import CACHE

    training = exported.trained(data, CACHE)
    corpus, model = training.corpus, folder / "original.onnx"
    exported.export(training, model)
    files = [
        exported.write_rows(pairs, folder / name)
        for name, pairs in (("calibration", corpus.val), ("unseen", corpus.test))
    ]

    def bleu(model: Path) -> float:
        return exported.score(_graph(model), corpus, training.settings.longest)

    return Case(model, *files, None, "BLEU", bleu)


def _wikitext(folder: Path, model: Path, text: Path, other: Path) -> Case:
    from benchmarks.training.language_model import learned_and_unseen

    _, paragraphs = learned_and_unseen(text)
    files = {"calibration": paragraphs[::2], "unseen": paragraphs[1::2]}
    files["other"] = spread(sentences(other, sys.maxsize), OTHER_LINES)
    paths = [write_lines(folder / f"{name}.txt", lines) for name, lines in files.items()]
    return Case(model, *paths, "perplexity", partial(_perplexity, texts=paths[1]))


def _graph(model: Path) -> Path:
    return model if model.is_file() else model / "model.onnx"


MODELS: dict[str, tuple[tuple[str, ...], Callable[..., Case]]] = {
    "minilm": (("TRAIN", "DEV"), _minilm),
    "sst2": (("CLASSIFIER", "TRAIN", "DEV"), _classifier),
    "modernbert": (("CLASSIFIER", "TRAIN", "DEV"), _from_scratch),
    "stories": (("MODEL", "TOKENIZER", "ROWS", "UNSEEN", "HUMAN"), _stories),
    "vit": (("MODEL", "IMAGES", "LABELS"), _vit),
    "translation": (("DATA",), _translation),
    "wikitext": (("MODEL", "TEXT", "OTHER"), _wikitext),
}
"""The files of each model, and the function that prepares them."""


def measure(case: Case, keep: float, output: Path) -> dict[str, Any]:
    """Optimize a model, and measure the result on unseen rows and on the task."""
    start, cpu_start = time.perf_counter(), time.process_time()
    report = attnserve.optimize(
        case.model, output, calib=case.calibration, keep=keep, allow=["ffn"], threads=1
    )
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
    search, verified = report.search, report.fidelity.quality
    assert search is not None and verified is not None
    unseen, *others = (
        quality_as_searched(case.model, output, file, case.calibration, verified.lengths)
        for file in (case.unseen, case.other)
        if file is not None
    )
    other = next(iter(others), None)
    return {
        "keep": keep, "verdict": search.verdict, "gain": search.gain,
        "seconds": seconds, "cpu_seconds": cpu_seconds,
        "sequences": search.goal.sequences, "speedup": search.speedup,
        "proofs": [verification.to_json() for verification in search.verifications],
        "unseen": {**unseen.to_json(), "loss": unseen.losses.measured},
        "other": other and {**other.to_json(), "loss": other.losses.measured},
        "task": {"name": case.task, "original": case.score(case.model), "new": case.score(output)},
        "disagree": disagreements(keep, verified, unseen) if search.gain else [],
        "layers": [[d.block, d.kept, d.count, d.operator] for d in search.decisions],
    }  # fmt: skip


def disagreements(keep: float, verified: Quality, unseen: Quality) -> list[str]:
    """Return the disagreements between target, verification and unseen rows.

    "promise": the value on unseen rows is below ``keep`` by more than its interval.
    "condition": it is not, but another condition (a second measure, the worst rows) is not met.
    "proof": the values of the verification and of unseen rows differ by more than both intervals.
    """
    found: list[str] = []
    if unseen.ci95 and unseen.ci95[1] < keep:
        found.append("promise")
    elif 1 - unseen.losses.measured < keep <= unseen.value:
        found.append("condition")
    if verified.ci95 and unseen.ci95:
        halves = [(high - low) / 2 for low, high in (verified.ci95, unseen.ci95)]
        if abs(verified.value - unseen.value) > math.hypot(*halves):
            found.append("proof")
    return found


# The result file


def merged(rows: Sequence[Mapping[str, Any]], new: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the rows with one that replaces the row of the same model and goal, in order."""
    by_goal = {(row["model"], row["keep"]): dict(row) for row in [*rows, new]}
    return [by_goal[key] for key in sorted(by_goal, key=lambda k: (list(MODELS).index(k[0]), k[1]))]


def _show(rows: Sequence[Mapping[str, Any]]) -> None:
    headings = ("keep", "verified", "unseen", "other", "task", "speed-up", "CPU s", "disagree")
    table = number_table("target, verified and unseen quality", headings)
    for row in rows:
        verification = row["proofs"][-1]["quality"] if row["proofs"] else None
        table.add_row(
            f"{row['model']}, {row['unseen']['measure']}", str(row["keep"]),
            *(_cell(part) for part in (verification, row["unseen"], row["other"])),
            "{original:.4f} to {new:.4f}".format(**row["task"]),
            f"{row['speedup']:.2f}x", f"{row['cpu_seconds']:.0f}", ", ".join(row["disagree"]),
        )  # fmt: skip
    Console(width=140).print(table)


def _cell(part: Mapping[str, Any] | None) -> str:
    low, high = (part and part["ci95"]) or (0, 0)
    return f"{part['value']:.4f} ± {(high - low) / 2:.4f}" if part else "-"


if __name__ == "__main__":
    sys.exit(main())
