"""Choose the weight and the maps of the group loss, by validation loss of short runs.

    python -m benchmarks.training.group_loss --data FOLDER [--threads N] [--resume]

The paper (arXiv 2305.14380, table 7) chooses them for every data set, for GHT and GHT-PS apart.
Each choice trains GHT-PS for a third of the steps of ``translation``, with seed 0. The loss before
the heads are removed, at half of the steps, counts for GHT, and that at the end for GHT-PS. The
weight 0 is the control, without a group loss. Writes
``benchmarks/results/training/group-loss.json``.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from attnserve.checks.benchmark import describe_machine
from attnserve.context import Device
from attnserve.runtime.machine import product_flags
from benchmarks import _common
from benchmarks.training.data import CACHE, read_corpus
from benchmarks.training.loop import Training
from benchmarks.training.variants import MAPS, VARIANTS, GroupMaps, Settings

WEIGHTS = (0.5, 0.05, 0.005)

CHOICES: tuple[tuple[GroupMaps | None, float], ...] = (
    (None, 0.0),
    *((maps, weight) for maps in MAPS for weight in WEIGHTS),
)
"""Maps and weight of each run; no maps without the loss."""

PATH = _common.RESULTS / "training" / "group-loss.json"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=_common.description(__doc__))
    parser.add_argument("--data", type=Path, required=True, help="folder of the Multi30k files")
    parser.add_argument("--threads", type=int, default=0, help="of torch; 0 is its default")
    parser.add_argument("--resume", action="store_true", help="skip what the result file has")
    options = parser.parse_args(arguments)
    if options.threads:
        torch.set_num_threads(options.threads)
    threads = torch.get_num_threads()
    settings = replace(Settings(), steps=Settings().steps // 3)
    corpus = read_corpus(
        options.data, CACHE, vocabulary=settings.vocabulary, longest=settings.longest
    )
    rows = stored(settings) if options.resume else []
    for maps, weight in CHOICES:
        if any((row["maps"], row["weight"]) == (maps, weight) for row in rows):
            continue
        print(f"{maps or 'no'} maps, weight {weight}", flush=True)
        used = VARIANTS["ght-ps"].group_maps if maps is None else maps
        variant = replace(VARIANTS["ght-ps"], group_weight=weight, group_maps=used)
        training = Training(variant, settings, 0, corpus)
        training.run()
        losses = {point["step"]: point["val_loss"] for point in training.curve}
        rows.append({
            "maps": maps, "weight": weight, "ght": losses[settings.steps // 2],
            "ght_ps": losses[settings.steps],
        })  # fmt: skip
        _common.write_json(
            PATH,
            {
                "command": "python -m benchmarks.training.group_loss"
                f" --data {options.data.name} --threads {threads}",
                "rows": rows,
                "settings": settings.to_json(),
                "machine": asdict(describe_machine(Device(threads=threads))),
                "cpu_flags": product_flags(),
            },
        )
    return 0


def stored(settings: Settings) -> list[dict[str, Any]]:
    """The rows of the result file, if they have these settings."""
    if not PATH.is_file():
        return []
    found = json.loads(PATH.read_text(encoding="utf-8"))
    return found["rows"] if found["settings"] == settings.to_json() else []


if __name__ == "__main__":
    sys.exit(main())
