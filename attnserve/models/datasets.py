"""Model inputs read from text or .npz files, split into parts to fit, to choose and to prove."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import onnx_ir as ir

from attnserve.models.artifact import Artifact
from attnserve.models.lengths import Lengths, length_bounds
from attnserve.models.tokenizer import Encoding, TextEncoder, load_tokenizer, read_sentences
from attnserve.runtime.session import Batch
from graph_passes.errors import InvalidData

__all__ = ["HELD_OUT", "JOINED", "Dataset", "load_inputs", "real_tokens", "token_mask"]

BATCH_SIZE = 16

HELD_OUT = 7
"""Each held-out part has one distinct row in this many."""

MOST_HELD_OUT = 400
"""The most rows of a held-out part."""

WIDE = 4
"""Lengths are not alike if the 95th percentile is this many times the 5th."""

JOINED = 4
"""Texts are joined for lengths that are at least this many times their median length: MiniLM keeps
0.99 of the cosine of sentences and 0.79 of paragraphs if it is calibrated on sentences alone."""

MIN_KIND = 10
"""The fewest short or long texts of a held-out part that are measured apart."""

HELD_OUT_PARTS = 3
"""Choose, prove, and a second proof after the first one failed."""


@dataclass(frozen=True, eq=False)
class Dataset:
    """Model inputs in batches of similar length, in disjoint parts of distinct rows.

    The parts depend on the file alone, so that other commands with the same file hold out the same
    rows. Files of less than four rows have parts that are equal or empty.

    Attributes:
        fit: Batches for statistics and fits.
        choose: Batches that a search may look at as often as it likes.
        prove: Parts that are looked at once, the second only if a proof on the first one fails.
        length: Median of ``lengths``.
        lengths: Number of tokens (or size of axis 1) of each row, joined rows included; 128 for
            rows without axis 1.
        source: File name, rows, tokens and checksum, for records.
    """

    fit: Sequence[Batch]
    choose: Sequence[Batch]
    prove: Sequence[Sequence[Batch]]
    length: int
    source: Mapping[str, Any]
    lengths: Sequence[int] = ()

    @property
    def held_out(self) -> list[Batch]:
        """All batches for a proof."""
        return [batch for part in self.prove for batch in part]

    @property
    def length_edge(self) -> int | None:
        """The length that separates short and long texts; None if lengths are alike.

        Quality is measured for both apart, because similarities within one kind of text are harder
        to keep than those between kinds.
        """
        if not len(self.lengths):
            return None
        low, high = np.percentile(self.lengths, (5, 95))
        edge = round(float(low * high) ** 0.5)
        short = int((np.asarray(self.lengths) <= edge).sum())
        enough = min(short, len(self.lengths) - short) >= MIN_KIND * HELD_OUT
        return edge if high >= WIDE * low and enough else None


def load_inputs(
    path: Path,
    model: ir.Model,
    artifact: Artifact,
    *,
    tokenizer: Path | None = None,
    sequence: Lengths | None = None,
    split: bool = True,
) -> Dataset:
    """Read a text (one sentence per line), an .npz (named input arrays) or a folder of .npz.

    Args:
        path: The file or folder.
        model: The model whose inputs are filled.
        artifact: Its artifact, for the tokenizer and the maximum length of a text.
        tokenizer: Path of tokenizer.json; by default the artifact's.
        sequence: The length, or range of lengths, that the model should be fast at. If texts are
            much shorter, rows of mixed lengths up to it, or over the range, are made of several
            texts of the same part, beside the texts.
        split: Split the distinct rows into parts; False puts all rows into each part.

    Raises:
        InvalidData: The data is empty, unreadable or does not fit the model, or text is given
            without a tokenizer.
    """
    if not path.exists():
        raise InvalidData(f"{path}: no such file", "check the path", code="data.missing")
    wanted = _wanted(model)
    size = _batch_size(model)
    join: Callable[[Sequence[int]], Sequence[Any]] | None = None
    if path.is_dir() or path.suffix.lower() == ".npz":
        rows = _read_arrays(path, wanted)
        lengths = [next((a.shape[1] for a in row.values() if a.ndim > 1), 128) for row in rows]
        make = partial(_array_batches, size=size)
    else:
        encoder_path = tokenizer or artifact.tokenizer
        if encoder_path is None:
            raise InvalidData(
                f"{path.name} is text, but {artifact.folder} has no tokenizer.json",
                "pass its path as `tokenizer`, or use an .npz of input arrays",
                code="data.no_tokenizer",
            )
        encoder = load_tokenizer(encoder_path, max_length=artifact.max_length)
        texts = read_sentences(path)
        rows = encoder.encode(texts)
        lengths = [len(encoding) for encoding in rows]
        if sequence is not None:
            median = float(np.median(lengths))
            shortest, longest = length_bounds(sequence)
            longest = min(longest, artifact.max_length or longest)
            if longest >= JOINED * median:
                shortest = 2 * median if isinstance(sequence, int) else max(2 * median, shortest)
                join = partial(_joined, encoder, texts, lengths, shortest, longest)
        if "attention_mask" not in wanted:
            size = 1  # without a mask, rows cannot be padded
        make = partial(_text_batches, encoder, inputs=wanted, size=size)

    everything = range(len(rows))
    distinct = _distinct(rows) if split else everything
    fit, choose, *prove = (
        _split([lengths[i] for i in distinct]) if split else (everything, everything, everything)
    )
    places = [[distinct[i] for i in part] for part in (fit, choose, *prove)]
    made = [[] if join is None else join(part) for part in places]
    parts = [[*(rows[i] for i in part), *more] for part, more in zip(places, made, strict=True)]
    more_lengths = [len(row) for more in made for row in more]
    all_lengths = [*lengths, *more_lengths]
    source = {
        "file": path.name,
        "rows": len(rows),
        "distinct_rows": len(distinct),
        **({"joined_rows": len(more_lengths), "joined_to": sequence} if more_lengths else {}),
        "tokens": int(sum(lengths)),
        "fit_tokens": int(sum(lengths[i] for i in places[0]) + sum(map(len, made[0]))),
        "held_out_rows": [len(part) for part in parts[1:]],
        "lengths": np.percentile(all_lengths, (0, 5, 50, 95, 100)).round().astype(int).tolist(),
        "sha256": _checksum(path),
    }
    batches = cast(Callable[[Sequence[Any]], list[Batch]], make)
    for_fit, for_choice, *for_proof = map(batches, parts)
    return Dataset(for_fit, for_choice, for_proof, int(np.median(lengths)), source, all_lengths)


def _joined(
    encoder: TextEncoder,
    texts: Sequence[str],
    lengths: Sequence[int],
    shortest: float,
    longest: int,
    chosen: Sequence[int],
) -> list[Encoding]:
    """Rows of several texts each, with lengths spread evenly by their logarithm over a range.

    Each text is part of at most one row. A text that is long enough alone is left out, because its
    row exists already.
    """
    random = np.random.default_rng(len(chosen))
    special = encoder.special_tokens  # each row has them once
    groups: list[list[str]] = []
    remaining_tokens = 0.0
    for index in map(int, random.permutation(np.asarray(chosen, int))):
        if remaining_tokens <= 0:
            groups.append([])
            remaining_tokens = shortest * (longest / shortest) ** random.random() - special
        groups[-1].append(texts[index])
        remaining_tokens -= lengths[index] - special
    joined = [" ".join(group) for group in groups if len(group) > 1]
    return encoder.encode(joined, max_length=longest) if joined else []


def _checksum(path: Path) -> str:
    """SHA-256 of a file, or of the names and contents of all .npz files of a folder."""
    if path.is_file():
        return hashlib.sha256(path.read_bytes()).hexdigest()
    digest = hashlib.sha256()
    for file in sorted(path.glob("*.npz")):
        digest.update(f"{file.name} {hashlib.sha256(file.read_bytes()).hexdigest()}".encode())
    return digest.hexdigest()


def token_mask(batch: Mapping[str, np.ndarray], tokens: Sequence[int]) -> np.ndarray:
    """The mask of real tokens (B, T): the first input with "mask" in its name and this shape."""
    for name, array in batch.items():
        if "mask" in name and array.shape == tuple(tokens) and array.dtype.kind in "iub":
            return array.astype(bool)
    return np.ones(tokens, dtype=bool)


def real_tokens(array: np.ndarray, batch: Mapping[str, np.ndarray]) -> np.ndarray:  # M F
    """The rows of unmasked tokens of (B, S, F), or (B*S, F) if the exporter flattens tokens."""
    rows = array.reshape(-1, array.shape[-1])
    if array.ndim == 2:
        masks = (a for n, a in batch.items() if "mask" in n and a.size == len(rows) and a.ndim == 2)
        sizes = next((mask.shape for mask in masks), (1, len(rows)))
    else:
        sizes = array.shape[:2]
    mask = token_mask(batch, sizes).reshape(-1)
    return rows[np.repeat(mask, len(rows) // len(mask))]


def _distinct(rows: Sequence[Encoding | Batch]) -> list[int]:
    """The index of the first of equal rows, as the model sees them."""
    first: dict[bytes, int] = {}
    for index, row in enumerate(rows):
        if isinstance(row, Encoding):
            content = np.asarray([row.ids, row.type_ids]).tobytes()
        else:
            content = b"".join(str(a.shape).encode() + a.tobytes() for a in row.values())
        first.setdefault(hashlib.sha256(content).digest(), index)
    return list(first.values())


def _split(lengths: Sequence[int]) -> list[list[int]]:
    """Indices to fit, and those of each held-out part, stratified by length.

    Rows are sorted by length and cut into strata; each held-out part has one random row of each
    stratum, so that all parts have like lengths and come from the whole file.
    """
    rows = len(lengths)
    if rows < HELD_OUT_PARTS + 1:
        last = [rows - 1]
        return [list(range(max(rows - 1, 1))), last, last, []]
    random = np.random.default_rng(rows)
    order = np.lexsort((random.permutation(rows), np.asarray(lengths)))
    count = min(max(rows // HELD_OUT, 1), MOST_HELD_OUT)
    held: list[list[int]] = [[] for _ in range(HELD_OUT_PARTS)]
    for stratum in np.array_split(order, count):
        for part, index in zip(held, random.permutation(stratum), strict=False):
            part.append(int(index))
    taken = {index for part in held for index in part}
    return [[index for index in range(rows) if index not in taken], *map(sorted, held)]


def _wanted(model: ir.Model) -> dict[str, np.dtype[Any]]:
    return {
        value.name: np.dtype(value.dtype.numpy())
        for value in model.graph.inputs
        if value.name and value.name not in model.graph.initializers and value.dtype is not None
    }


def _read_arrays(path: Path, wanted: Mapping[str, np.dtype[Any]]) -> list[Batch]:
    """One batch per row, in which each input has a first axis of size 1."""
    files = sorted(path.glob("*.npz")) if path.is_dir() else [path]
    if not files:
        raise InvalidData(
            f"{path}: the folder has no .npz file",
            "pass a text file or an .npz",
            code="data.no_npz",
        )
    rows: list[Batch] = []
    for file in files:
        try:
            with file.open("rb") as content, np.load(content, allow_pickle=False) as archive:
                arrays = {name: archive[name] for name in archive.files}
        except Exception as error:  # numpy and zipfile raise exceptions of many types
            raise InvalidData(
                f"{file}: not an .npz of arrays: {error}",
                "write it with numpy.savez",
                code="data.not_npz",
            ) from error
        missing, extra = (
            sorted(wanted.keys() - arrays.keys()),
            sorted(arrays.keys() - wanted.keys()),
        )
        if missing or extra:
            raise InvalidData(
                f"{file}: expected the arrays {', '.join(wanted)}; "
                f"missing {missing or 'none'}, not an input {extra or 'none'}",
                "use the input names of the model as array names",
                code="data.array_names",
            )
        counts = {name: array.shape[0] if array.ndim else 0 for name, array in arrays.items()}
        if len(set(counts.values())) != 1 or not min(counts.values()):
            raise InvalidData(
                f"{file}: arrays have {counts} rows",
                "give every input the same number of rows",
                code="data.array_rows",
            )
        for name, dtype in wanted.items():
            if arrays[name].dtype.kind != dtype.kind:
                raise InvalidData(
                    f"{file}: {name!r} is {arrays[name].dtype}, expected {dtype}",
                    "convert the array",
                    code="data.array_type",
                )
        for row in range(next(iter(counts.values()))):
            rows.append(
                {name: arrays[name][row : row + 1].astype(dtype) for name, dtype in wanted.items()}
            )
    return rows


def _batch_size(model: ir.Model) -> int:
    """The fixed size of the first axis of the inputs, else ``BATCH_SIZE``."""
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
    """Batches of rows with equal shapes."""
    groups: dict[tuple[tuple[int, ...], ...], list[Batch]] = {}
    for row in rows:
        groups.setdefault(tuple(array.shape for array in row.values()), []).append(row)
    batches: list[Batch] = []
    for group in groups.values():
        for start in range(0, len(group), size):
            chosen = group[start : start + size]
            batches.append({n: np.concatenate([row[n] for row in chosen]) for n in chosen[0]})
    return batches
