"""Write scored pairs of sentences."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path


def pairs(path: Path, sentences: Path) -> Path:
    """Write sentence pairs, scored by the share of common words."""
    lines = sentences.read_text(encoding="utf-8").splitlines()
    rows = ["score\tsentence1\tsentence2"]
    for a, b in pairwise(lines):
        first, second = set(a.split()), set(b.split())
        rows.append(f"{5 * len(first & second) / len(first | second):.3f}\t{a}\t{b}")
    path.write_text("\n".join(rows) + "\n", encoding="utf-8")
    return path
