"""Text for stories260K, a small trained language model: its tokenizer, and samples of the model.

``python -m tests.stories FOLDER`` draws the committed samples anew; FOLDER holds the model.
"""

from __future__ import annotations

import struct
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import onnxruntime

SAMPLES = Path(__file__).parent / "fixtures" / "stories260K.npz"
LENGTH = 256
SAMPLED = 240


def samples() -> np.ndarray:
    """Token ids (240, 256) that the model has drawn."""
    with np.load(SAMPLES) as archive:
        return archive["idx"].astype(np.int64)


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

    def __call__(self, text: str) -> list[int]:
        ids: list[int] = []
        for letter in (" " + text).encode():
            ids.append(self.index.get(bytes([letter]), letter + 3))
        while True:
            merged = [self.index.get(self.pieces[a] + self.pieces[b], -1) for a, b in pairwise(ids)]
            scores = [self.scores[index] if index >= 0 else -1e9 for index in merged]
            best = int(np.argmax(scores)) if scores else -1
            if best < 0 or merged[best] < 0:
                return [1, *ids]
            ids[best : best + 2] = [merged[best]]


def draw(model: Path) -> np.ndarray:
    """Sample rows from the model at temperature 1."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(model), options)
    random = np.random.default_rng(0)
    parts: list[np.ndarray] = []
    for _ in range(SAMPLED // 30):
        ids = np.ones((30, LENGTH), np.int64)
        for place in range(LENGTH - 1):
            logits = session.run(None, {"idx": ids})[0][:, place].astype(np.float64)
            chances = np.exp(logits - logits.max(1, keepdims=True)).cumsum(1)
            drawn = (chances < random.random((30, 1)) * chances[:, -1:]).sum(1)
            ids[:, place + 1] = drawn
        parts.append(ids)
    return np.concatenate(parts)


if __name__ == "__main__":
    np.savez_compressed(SAMPLES, idx=draw(Path(sys.argv[1]) / "stories260K.onnx").astype(np.uint16))
