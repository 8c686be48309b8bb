"""Random sentences."""

from __future__ import annotations

import random
from pathlib import Path

WORDS = ["a", "the", "man", "woman", "dog", "cat", "is", "playing", "with", "guitar", "ball"]


def write_sentences(path: Path, count: int, longest: int = 12, seed: int = 1) -> Path:
    """Write this number of sentences of 3 to ``longest`` words, one in each line."""
    chosen = random.Random(seed)
    lines = [" ".join(chosen.choices(WORDS, k=chosen.randint(3, longest))) for _ in range(count)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path
