"""Text for stories260K, a small trained language model."""

from __future__ import annotations

import struct
from itertools import pairwise
from pathlib import Path

import numpy as np

LENGTH = 256


def stories(text: Path, tokenizer: Path) -> np.ndarray:
    """Token ids (N, 256) of human stories, one per line of ``text``."""
    encode = Encoder(tokenizer)
    rows: list[list[int]] = []
    for line in filter(None, text.read_text(encoding="utf-8").splitlines()):
        ids = encode(line)
        rows += [ids[start : start + LENGTH] for start in range(0, len(ids) - LENGTH + 1, LENGTH)]
    return np.array(rows, np.int64)


class Encoder:
    """The byte-pair encoder of llama2.c: the pair with the best score is merged first."""

    def __init__(self, path: Path) -> None:
        data, place = path.read_bytes(), 4
        self.pieces: list[bytes] = []
        self.scores: list[float] = []
        while place < len(data):
            score, size = struct.unpack_from("fi", data, place)
            place += 8 + size
            self.pieces.append(data[place - size : place])
            self.scores.append(score)
        self.index = {piece: i for i, piece in enumerate(self.pieces)}
        self.merged = Merges(self)

    def __call__(self, text: str) -> list[int]:
        ids: list[int] = []
        for letter in (" " + text).encode():
            ids.append(self.index.get(bytes([letter]), letter + 3))
        while True:
            scores = [self.merged[pair][0] for pair in pairwise(ids)]
            best = scores.index(max(scores)) if scores else 0
            merged = self.merged[ids[best], ids[best + 1]][1] if scores else -1
            if merged < 0:
                return [1, *ids]
            ids[best : best + 2] = [merged]


class Merges(dict[tuple[int, int], tuple[float, int]]):
    """The score and the index of the piece that two pieces form; -1e9 and -1 if there is none."""

    def __init__(self, encoder: Encoder) -> None:
        self.encoder = encoder

    def __missing__(self, pair: tuple[int, int]) -> tuple[float, int]:
        pieces = self.encoder.pieces
        index = self.encoder.index.get(pieces[pair[0]] + pieces[pair[1]], -1)
        self[pair] = (self.encoder.scores[index] if index >= 0 else -1e9, index)
        return self[pair]
