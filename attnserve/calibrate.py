"""Calibration: the inputs a user names, and the statistics a rewrite needs, batch by batch."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import onnx_ir as ir

from attnserve.artifact import Artifact
from attnserve.session import Provider, open_session
from attnserve.text import Encoding, TextEncoder, load_tokenizer, read_sentences
from graph_passes.attention import AttentionBlock
from graph_passes.edit import exposing
from graph_passes.errors import InvalidData
from graph_passes.moments import TokenMoments

__all__ = ["Batch", "Dataset", "collect_moments", "load_inputs", "token_mask"]

Batch = dict[str, np.ndarray]
Progress = Callable[[int, int], None]

BATCH_SIZE = 16
HELD_OUT = 10
"""One row in ten is kept from the fit, for the proof."""
MOST_HELD_OUT = 100


@dataclass(frozen=True, eq=False)
class Dataset:
    """Model inputs in batches of similar length.

    Attributes:
        fit: What statistics are taken from.
        held_out: What fidelity is measured on; the same batches where one row is all there is.
        length: The median number of tokens (or of positions on axis 1); 128 where rows have none.
        lengths: Of every row.
        source: For the record: file, rows, tokens and checksum.
    """

    fit: Sequence[Batch]
    held_out: Sequence[Batch]
    length: int
    source: Mapping[str, Any]
    lengths: Sequence[int] = ()


def load_inputs(
    path: Path,
    model: ir.Model,
    artifact: Artifact,
    *,
    tokenizer: Path | None = None,
    split: bool = True,
) -> Dataset:
    """Read a text (a sentence a line), an .npz (named input arrays) or a folder of .npz.

    Args:
        path: The file or folder.
        model: Tells which inputs to fill.
        artifact: Where the tokenizer lies, and the longest text.
        tokenizer: tokenizer.json, where it is not beside the model.
        split: Keep every tenth row from ``fit``; False leaves all rows in both.

    Raises:
        InvalidData: Empty, unreadable, or not what the model takes; or no tokenizer for a text.
    """
    if not path.exists():
        raise InvalidData(f"{path}: no such file", "check the path")
    wanted = _wanted(model)
    size = _batch_size(model)
    if path.is_dir() or path.suffix.lower() == ".npz":
        rows = _read_arrays(path, wanted)
        lengths = [next((a.shape[1] for a in row.values() if a.ndim > 1), 128) for row in rows]
        make = partial(_array_batches, size=size)
    else:
        encoder_path = tokenizer or artifact.tokenizer
        if encoder_path is None:
            raise InvalidData(
                f"{artifact.folder}: no tokenizer.json beside the model, and {path.name} is text",
                "give one with --tokenizer, or calibrate on an .npz of input arrays",
            )
        encoder = load_tokenizer(encoder_path, max_length=artifact.max_length)
        encodings = encoder.encode(read_sentences(path))
        rows = encodings
        lengths = [len(encoding) for encoding in encodings]
        if "attention_mask" not in wanted:
            size = 1  # nothing could tell padding from text
        make = partial(_text_batches, encoder, inputs=wanted, size=size)

    held, kept = _held_out(len(rows)) if split else (range(len(rows)), range(len(rows)))
    source = {
        "file": path.name,
        "rows": len(rows),
        "tokens": int(sum(lengths)),
        "fit_tokens": int(sum(lengths[i] for i in kept)),
        "sha256": _checksum(path),
    }
    batches = cast(Callable[[Sequence[Any]], list[Batch]], make)
    fit = batches([rows[i] for i in kept])
    proof = batches([rows[i] for i in held])
    return Dataset(fit, proof, int(np.median(lengths)), source, lengths)


def _checksum(path: Path) -> str:
    """Of a file, or of all that is read of a folder."""
    if path.is_file():
        return hashlib.sha256(path.read_bytes()).hexdigest()
    digest = hashlib.sha256()
    for file in sorted(path.glob("*.npz")):
        digest.update(f"{file.name} {hashlib.sha256(file.read_bytes()).hexdigest()}".encode())
    return digest.hexdigest()


def token_mask(batch: Mapping[str, np.ndarray], tokens: Sequence[int]) -> np.ndarray:
    """Which of (B, T) tokens are real: the first input called a mask that has their shape."""
    for name, array in batch.items():
        if "mask" in name and array.shape == tuple(tokens) and array.dtype.kind in "iub":
            return array.astype(bool)
    return np.ones(tokens, dtype=bool)


def collect_moments(
    model: ir.Model,
    blocks: Sequence[AttentionBlock],
    batches: Sequence[Batch],
    *,
    provider: Provider = "cpu",
    threads: int = 0,
    progress: Progress | None = None,
) -> dict[str, TokenMoments]:
    """The moments of what each block reads and attends to, by block name.

    Activations never accumulate: one batch at a time is run and reduced, padding excluded.

    Args:
        blocks: Their probabilities must be values of the graph (decompose fused operators first).

    Raises:
        InvalidData: The model refuses a batch, or its activations are not finite.
    """
    sums = {block.name: _BlockSums(block) for block in blocks}
    values = list(dict.fromkeys(v for block in blocks for v in _observed(block)))
    with exposing(model, values):
        session = open_session(model, provider=provider, threads=threads)
    for done, batch in enumerate(batches, start=1):
        seen = dict(zip(values, run(session, batch), strict=True))
        for block in blocks:
            x, y, probabilities, v = (seen[value] for value in _observed(block))
            sums[block.name].add(x, y, probabilities, v.transpose(block.v.axes), batch)
        if progress is not None:
            progress(done, len(batches))
    return {name: block_sums.moments() for name, block_sums in sums.items()}


def run(session: Any, batch: Batch) -> list[np.ndarray]:
    """All outputs of a session; what ONNX Runtime says of a batch it refuses, in our words.

    Raises:
        InvalidData: The model refuses the batch.
    """
    try:
        return [np.asarray(array) for array in session.run(None, batch)]
    except Exception as error:  # onnxruntime raises a class of its own for each status
        shapes = ", ".join(f"{name} {array.shape}" for name, array in batch.items())
        raise InvalidData(
            f"the model refuses the inputs {shapes}: {str(error).splitlines()[0][:200]}",
            "check that the data fits the model (length, vocabulary, names)",
        ) from error


def _observed(block: AttentionBlock) -> tuple[ir.Value, ir.Value, ir.Value, ir.Value]:
    assert block.probabilities is not None, f"{block.name}: its probabilities are not in the graph"
    assert block.v.output is not None
    return block.x, block.y, block.probabilities, block.v.output


class _BlockSums:
    """Running sums over batches for one block (see ``graph_passes.cp`` for what they are for)."""

    def __init__(self, block: AttentionBlock) -> None:
        self.block = block
        self.queries = 0
        self.x_sum: Any = 0.0
        self.x_products: Any = 0.0
        self.y_spread: Any = 0.0
        self.head_spread: Any = 0.0
        self.writes = _write_root(block)  # H V V

    def add(
        self,
        x: np.ndarray,
        y: np.ndarray,
        probabilities: np.ndarray,
        v: np.ndarray,
        batch: Mapping[str, np.ndarray],
    ) -> None:
        """One batch: x (B, S, D), y (B, T, E), probabilities and v, heads apart or in the batch."""
        real = token_mask(batch, x.shape[:2])
        B, S, own = *x.shape[:2], self.block.own_heads
        p = probabilities.reshape(B, self.block.num_heads, S, -1)[:, own]
        p = np.where(real[:, None, :, None], p, 0)  # padded queries see nothing
        exact = np.promote_types(v.dtype, np.float32)  # squares of half precision overflow
        written = v.reshape(B, -1, *v.shape[-2:]) @ self.writes.astype(exact)  # B H T V
        written = written[:, own]
        x = x.astype(np.float64)
        self.queries += int(real.sum())
        self.x_sum = self.x_sum + x[real].sum(0)
        self.x_products = self.x_products + x[real].T @ x[real]
        for row in range(B):  # one sequence at a time: (H, S, T) in double precision
            self._add_sequence(p[row].astype(np.float64), y[row].astype(float), written[row])

    def _add_sequence(self, p: np.ndarray, y: np.ndarray, written: np.ndarray) -> None:
        """Variances about the mean under p, sum_t p y y^T - ybar ybar^T, of keys and writes.

        Summed over heads and queries that of keys is y^T (diag(sum p) - sum p p^T) y: T x T inside,
        where ybar ybar^T would be multiplied out for every head and query.
        """
        y = y - y.mean(0)  # the same spread, with fewer digits lost to the mean
        rows = p.reshape(-1, p.shape[-1])  # H*S T
        spread = np.diag(rows.sum(0)) - rows.T @ rows  # T T
        self.y_spread = self.y_spread + y.T @ (spread @ y)
        context = p @ written  # H S V
        squares = (p @ (written**2)).sum(-1) - (context**2).sum(-1)  # H S
        self.head_spread = self.head_spread + squares.sum(1)

    def moments(self) -> TokenMoments:
        name = self.block.name
        if not self.queries:
            raise InvalidData(
                f"{name}: the calibration data has no real token", "check the mask input"
            )
        mean = self.x_sum / self.queries
        covariance = self.x_products / self.queries - np.outer(mean, mean)
        keys = self.y_spread / (self.queries * self.block.q.num_heads)
        weight = np.sqrt(np.maximum(self.head_spread / self.queries, 0.0))
        if not all(np.isfinite(array).all() for array in (mean, covariance, keys, weight)):
            raise InvalidData(
                f"{name}: the activations on the calibration data are not finite",
                "check the model and the data",
            )
        return TokenMoments(mean, _symmetric(covariance), _symmetric(keys), weight)


def _write_root(block: AttentionBlock) -> np.ndarray:
    """L_h of L_h L_h^T = W_O^h W_O^hT, so that |v L_h| is the length of what a head writes."""
    if block.output is None:
        identity = np.eye(block.v_head_size)
        return np.broadcast_to(identity, (block.num_heads, *identity.shape))
    rows = block.output.matrix()[block.output.rows].astype(np.float64)  # H V D
    values, vectors = np.linalg.eigh(rows @ rows.swapaxes(1, 2))
    return vectors * np.sqrt(np.maximum(values, 0.0))[:, None, :]


def _symmetric(matrix: np.ndarray) -> np.ndarray:
    return (matrix + matrix.T) / 2


def _held_out(rows: int) -> tuple[list[int], list[int]]:
    """Every tenth row is held out, at least one; with one row it must serve both ends."""
    if rows < 2:
        return [0], [0]
    held = list(range(min(HELD_OUT, rows) - 1, rows, HELD_OUT))[:MOST_HELD_OUT]
    taken = set(held)
    return held, [i for i in range(rows) if i not in taken]


def _wanted(model: ir.Model) -> dict[str, np.dtype[Any]]:
    return {
        value.name: np.dtype(value.dtype.numpy())
        for value in model.graph.inputs
        if value.name and value.name not in model.graph.initializers and value.dtype is not None
    }


def _read_arrays(path: Path, wanted: Mapping[str, np.dtype[Any]]) -> list[Batch]:
    """One entry a row, each input with a leading axis of one."""
    files = sorted(path.glob("*.npz")) if path.is_dir() else [path]
    if not files:
        raise InvalidData(f"{path}: no .npz file in this folder", "name a text or an .npz")
    rows: list[Batch] = []
    for file in files:
        try:
            with file.open("rb") as content, np.load(content, allow_pickle=False) as archive:
                arrays = {name: archive[name] for name in archive.files}
        except Exception as error:  # numpy and zipfile raise many kinds
            raise InvalidData(
                f"{file}: not an .npz of arrays: {error}", "write it with numpy.savez"
            ) from error
        missing, extra = (
            sorted(wanted.keys() - arrays.keys()),
            sorted(arrays.keys() - wanted.keys()),
        )
        if missing or extra:
            raise InvalidData(
                f"{file}: expected the arrays {', '.join(wanted)}; "
                f"missing {missing or 'none'}, not an input {extra or 'none'}",
                "name the arrays as the model names its inputs",
            )
        counts = {name: array.shape[0] if array.ndim else 0 for name, array in arrays.items()}
        if len(set(counts.values())) != 1 or not min(counts.values()):
            raise InvalidData(
                f"{file}: arrays have {counts} rows", "give every input the same number of rows"
            )
        for name, dtype in wanted.items():
            if arrays[name].dtype.kind != dtype.kind:
                raise InvalidData(
                    f"{file}: {name!r} is {arrays[name].dtype}, the model takes {dtype}",
                    "convert the array",
                )
        for row in range(next(iter(counts.values()))):
            rows.append(
                {name: arrays[name][row : row + 1].astype(dtype) for name, dtype in wanted.items()}
            )
    return rows


def _batch_size(model: ir.Model) -> int:
    """What a fixed leading axis of the inputs says, else ``BATCH_SIZE``."""
    leading = [value.shape[0] for value in model.graph.inputs if value.shape]
    return next((size for size in leading if isinstance(size, int) and size > 0), BATCH_SIZE)


def _text_batches(
    encoder: TextEncoder,
    rows: Sequence[Encoding],
    *,
    inputs: Mapping[str, np.dtype[Any]],
    size: int,
) -> list[Batch]:
    return [feed for _, feed in encoder.batches(rows, size, inputs)]


def _array_batches(rows: Sequence[Batch], *, size: int) -> list[Batch]:
    """Rows of the same shapes run together."""
    groups: dict[tuple[tuple[int, ...], ...], list[Batch]] = {}
    for row in rows:
        groups.setdefault(tuple(array.shape for array in row.values()), []).append(row)
    batches: list[Batch] = []
    for group in groups.values():
        for start in range(0, len(group), size):
            chosen = group[start : start + size]
            batches.append({n: np.concatenate([row[n] for row in chosen]) for n in chosen[0]})
    return batches
