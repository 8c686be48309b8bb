"""Draw rows of tokens from a language model without a cache: data for benchmarks.quality.

    python -m benchmarks.draw MODEL.onnx --rows 600 --seed 1 -o ROWS.npz

The model has one input of token ids, [batch, length] with a fixed length, and returns logits. Each
row starts with the token --start and is drawn with temperature 1. The whole row is computed for
every token: 600 rows of 256 tokens of stories260K take about 20 minutes on one core.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np

from attnserve.runtime.session import open_session, run
from benchmarks._common import description

BATCH = 50


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=description(__doc__))
    parser.add_argument("model", type=Path)
    parser.add_argument("--rows", type=int, default=600)
    parser.add_argument("--start", type=int, default=1, help="the first token of each row")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-o", "--output", type=Path, required=True)
    options = parser.parse_args(arguments)
    session = open_session(options.model, threads=1)
    random, parts = np.random.default_rng(options.seed), list[np.ndarray]()
    for start in range(0, options.rows, BATCH):
        rows = min(BATCH, options.rows - start)
        parts.append(draw(session, rows, options.start, random))
        print(f"{start + rows} of {options.rows} rows", flush=True)
    arrays: dict[str, Any] = {session.get_inputs()[0].name: np.concatenate(parts)}
    np.savez_compressed(options.output, **arrays)
    return 0


def draw(session: Any, rows: int, start: int, random: np.random.Generator) -> np.ndarray:
    """Return token ids (rows, length)."""
    given = session.get_inputs()[0]
    tokens = np.full((rows, given.shape[1]), start, np.int64)
    for place in range(1, tokens.shape[1]):
        logits = np.asarray(run(session, {given.name: tokens})[0])[:, place - 1]
        tokens[:, place] = np.argmax(logits + random.gumbel(size=logits.shape), -1)
    return tokens


if __name__ == "__main__":
    sys.exit(main())
