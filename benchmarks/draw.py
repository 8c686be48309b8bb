"""Draw rows of tokens from stories260K: data of a language model for benchmarks.quality.

    python -m benchmarks.draw STORIES260K.onnx --rows 1400 --seed 1 -o ROWS.npz

The model has no cache, so that a row would cost as many runs as it has tokens. Here its weights run
in NumPy with a cache (Llama: RMS norms, rotary positions, grouped keys, SwiGLU), and the last rows
are compared with ONNX Runtime. A row starts with the token --start; the temperature is 1.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper

from attnserve.context import ONE_THREAD
from attnserve.runtime.session import open_session
from benchmarks._common import description

BATCH = 200
LENGTH = 256
HEADS, GROUPS, SIZE = 8, 4, 8
EPSILON = 1e-5


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=description(__doc__))
    parser.add_argument("model", type=Path)
    parser.add_argument("--rows", type=int, default=600)
    parser.add_argument("--start", type=int, default=1, help="the first token of each row")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-o", "--output", type=Path, required=True)
    options = parser.parse_args(arguments)
    session = open_session(options.model, ONE_THREAD)
    stored = onnx.load(options.model).graph.initializer
    weights = [numpy_helper.to_array(tensor) for tensor in stored]
    random, parts = np.random.default_rng(options.seed), list[np.ndarray]()
    for start in range(0, options.rows, BATCH):
        rows = min(BATCH, options.rows - start)
        parts.append(tokens := np.full((rows, LENGTH), options.start, np.int64))
        last = draw(logits(weights, tokens), tokens, random)
        expected = session.run(None, {"idx": tokens[-8:]})[0][:, -1]
        if not np.allclose(last[-8:], expected, atol=1e-3):
            raise SystemExit("error: the model is not stories260K")
        print(f"{start + rows} of {options.rows} rows", flush=True)
    np.savez_compressed(options.output, idx=np.concatenate(parts))
    return 0


def draw(
    steps: Iterator[np.ndarray], tokens: np.ndarray, random: np.random.Generator
) -> np.ndarray:
    """Fill rows of tokens (rows, length) from their first token on; returns the last logits."""
    last = next(steps)
    for place in range(1, tokens.shape[1]):
        tokens[:, place] = np.argmax(last + random.gumbel(size=last.shape), -1)
        last = next(steps)
    return last


def logits(weights: list[np.ndarray], tokens: np.ndarray) -> Iterator[np.ndarray]:
    """Yield the logits (rows, vocabulary) after each token; later tokens may still be set."""
    embedding, last_norm, cos, sin, *layers, head = weights
    rows = len(tokens)
    keys = np.zeros((len(layers) // 9, rows, GROUPS, LENGTH, SIZE), np.float32)
    values = np.zeros_like(keys)
    for t in range(LENGTH):
        x = embedding[tokens[:, t]]
        for layer in range(len(layers) // 9):
            norm, q, k, v, out, ffn_norm, gate, up, down = layers[9 * layer : 9 * layer + 9]
            y = _normalized(x, norm)
            query = _rotated((y @ q).reshape(rows, HEADS, SIZE), cos[t], sin[t])
            keys[layer, :, :, t] = _rotated((y @ k).reshape(rows, GROUPS, SIZE), cos[t], sin[t])
            values[layer, :, :, t] = (y @ v).reshape(rows, GROUPS, SIZE)
            query = query.reshape(rows, GROUPS, HEADS // GROUPS, SIZE) / np.float32(SIZE**0.5)
            scores = query @ keys[layer, :, :, : t + 1].swapaxes(-1, -2)
            scores = np.exp(scores - scores.max(-1, keepdims=True))
            scores /= scores.sum(-1, keepdims=True)
            x = x + (scores @ values[layer, :, :, : t + 1]).reshape(rows, -1) @ out
            y = _normalized(x, ffn_norm)
            g = y @ gate
            x = x + (g / (1 + np.exp(-g)) * (y @ up)) @ down
        yield _normalized(x, last_norm) @ head


def _normalized(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + np.float32(EPSILON)) * weight


def _rotated(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    even, odd = x[..., ::2], x[..., 1::2]
    return np.stack((even * cos - odd * sin, even * sin + odd * cos), -1).reshape(x.shape)


if __name__ == "__main__":
    sys.exit(main())
