"""What a search for the score of one task gains, beside int8 of other tools.

    pip install 'attnserve[openvino,demo]' nncf
    python -m benchmarks.task_score --train STSB_TRAIN.tsv --dev STSB_DEV.tsv [--minutes 20]

Searches for the fastest all-MiniLM-L6-v2 that keeps 99 % of the Spearman correlation on --dev
(``--keep 0.99 --measure score --allow ffn``), in float32 and in int8, and once more in int8 with
--minutes of training. Models are calibrated on sentences of --train. The share of the score that
they keep is then measured on the pairs of --train without a sentence of the calibration, which
nothing was chosen on. All models are timed in turns, in one process, on one thread, one text at a
time, with another length at each run, as requests have. "auto" is what ``attnserve serve`` runs.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

import attnserve
from attnserve.checks.evaluate import score_session
from attnserve.context import ONE_THREAD
from attnserve.models.artifact import Artifact, open_artifact
from attnserve.runtime.interface import Feed, Session, SessionWrapper
from attnserve.runtime.session import open_session
from benchmarks._common import (
    description,
    minilm,
    number_table,
    sentences,
    spread,
    write_lines,
    write_result,
)
from benchmarks.peers import (
    EXPORT,
    LENGTHS,
    Peers,
    Run,
    native,
    nncf_int8,
    open_model,
    time_in_turns,
    versions,
)
from benchmarks.planner import unseen_pairs

KEEP = 0.99

ROWS = 900
"""Sentences for calibration."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=description(__doc__))
    parser.add_argument("--train", type=Path, required=True, help="score, sentence1, sentence2")
    parser.add_argument("--dev", type=Path, required=True, help="score, sentence1, sentence2")
    parser.add_argument("--minutes", type=int, default=20, help="of training; 0 for none")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        attnserve.export(minilm(), folder / "original")
        calibration = write_lines(
            folder / "calibration.txt", spread(sentences(options.train, sys.maxsize), ROWS)
        )
        pairs = unseen_pairs(options.train, calibration, folder / "unseen.tsv")
        artifact = open_artifact(folder / "original")
        peers = Peers[Run]()
        verdicts = _add(peers, artifact, calibration, options.dev, options.minutes)
        rows = time_in_turns(peers.models, artifact)
        exported = open_session(artifact.model)
        scores = {
            name: _score(_Scored(exported, run), artifact, pairs)
            for name, run in peers.models.items()
        }
    for row in rows:
        row["kept"] = scores[row["model"]] / scores[EXPORT]
        row["removal"] = peers.removals.get(row["model"])
        row["verdict"] = verdicts.get(row["model"])
    write_result(
        "task_score", options, rows=rows, left_out=peers.left_out, choices=peers.choices,
        spearman=scores[EXPORT], versions=versions("onnxruntime", "openvino", "nncf"),
    )  # fmt: skip
    _show(rows)
    return 0


def _add(
    peers: Peers[Run], artifact: Artifact, calibration: Path, dev: Path, minutes: int
) -> dict[str, str]:
    """Add all models; the verdicts of the searches by model."""
    original, verdicts = artifact.folder, dict[str, str]()
    peers.add(EXPORT, lambda: open_model(artifact.model, ONE_THREAD))
    peers.add("as exported, OpenVINO as it is", lambda: native(artifact.model))
    for rest in ("bfloat16", "float32"):
        name = f"NNCF int8, rest {rest}"
        peers.add(name, partial(nncf_int8, artifact, [calibration], rest))

    def ours(name: str, **options: Any) -> None:
        def make() -> Path:
            output = original.with_name(name.replace(" ", "-"))
            report = attnserve.optimize(
                original, output, calib=calibration, threads=1, sequence=128, **options
            )
            if report.search:
                verdicts[f"{name}, auto"] = report.search.verdict
            return output

        peers.add_served(name, make)

    peers.add_served("fused float32", lambda: original)
    ours("fused int8-full-bfloat16", precision="int8-full-bfloat16")
    score: dict[str, Any] = {
        "keep": KEEP, "measure": "score", "task": "sts", "eval_data": dev, "allow": ["ffn"],
    }  # fmt: skip
    ours("search, float32", **score)
    ours("search, int8-full-bfloat16", precision="int8-full-bfloat16", **score)
    if minutes:
        name = f"search, int8-full-bfloat16, {minutes} min of training"
        ours(name, precision="int8-full-bfloat16", recover=minutes, **score)
    return verdicts


@dataclass(eq=False)
class _Scored(SessionWrapper[Session]):
    """Runs a model in place of the exported one, to score it.

    Attributes:
        session: The exported model, which has the same inputs and outputs.
    """

    session: Session
    model: Run

    def run(self, names: Sequence[str] | None, feed: Feed) -> list[np.ndarray]:
        return [self.model(dict(feed))]


def _score(session: Session, artifact: Artifact, pairs: Path) -> float:
    """The Spearman correlation of a model on STS pairs."""
    return score_session(session, artifact, task="sts", data=pairs).to_json()["spearman"]


def _show(rows: Sequence[dict[str, Any]]) -> None:
    headings = (*(f"{length} tokens" for length in LENGTHS), "score kept")
    table = number_table("speed over the export, and the share of the score that is kept", headings)
    for row in rows:
        speeds = [f"{row['turns'][str(length)]['speedup'][0]:.2f}x" for length in LENGTHS]
        table.add_row(row["model"], *speeds, f"{row['kept']:.1%}")
    Console(width=140).print(table)


if __name__ == "__main__":
    sys.exit(main())
