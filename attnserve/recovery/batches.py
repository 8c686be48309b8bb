"""Training batches of rows of similar length, with about the same number of tokens each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from attnserve.models.masks import is_sequence, padding_value, text_mask
from attnserve.models.rows import row_content, split_rows
from attnserve.runtime.interface import Batch

__all__ = [
    "TOKENS",
    "can_be_mixed",
    "count_tokens",
    "grouped",
    "mixed",
    "place_of_step",
    "regroup",
    "row_contents",
]

Item = TypeVar("Item")

TOKENS = 1000
"""Tokens of a training batch."""

ROWS = 16
"""Number of rows of a batch whose rows are not texts."""


def regroup(
    batches: Sequence[Batch], seed: int, *, fixed_rows: bool = False, fixed_length: bool = False
) -> list[list[Batch]]:
    """Put the rows of batches into steps of about ``TOKENS`` tokens.

    A step is one batch: texts of similar length, padded, or other rows of equal shape. A text is a
    row whose inputs are all (B, T), one of them a mask.

    Args:
        fixed_rows: The model fixes B: a step is several of the given batches.
        fixed_length: The model fixes T: texts keep their padding.
    """
    if fixed_rows:
        return _steps([batches[i] for i in np.random.default_rng(seed).permutation(len(batches))])
    return [[batch] for batch in _regrouped(batches, seed, fixed_length)]


def place_of_step(step: int, count: int, seed: int, *stream: int) -> int:
    """The place of a step among ``count`` ones; each epoch has its own random order.

    Args:
        stream: Numbers that distinguish the order from others of the same seed.
    """
    epoch, place = divmod(step, count)
    return int(np.random.default_rng((seed, epoch, *stream)).permutation(count)[place])


def grouped(
    items: Iterable[Item], tokens_of: Callable[[Item], int], least: int = 1
) -> list[list[Item]]:
    """Consecutive items in groups of about ``TOKENS`` tokens, all as long as the last one.

    Args:
        tokens_of: The tokens of an item. Items are sorted by it.
        least: The fewest items of a group, except of the last one.
    """
    groups: list[list[Item]] = [[]]
    for item in items:
        tokens = (len(groups[-1]) + 1) * tokens_of(item)
        if tokens > TOKENS and len(groups[-1]) >= least:
            groups.append([])
        groups[-1].append(item)
    return groups


def _steps(batches: Sequence[Batch]) -> list[list[Batch]]:
    steps: list[list[Batch]] = []
    tokens = TOKENS
    for batch in batches:
        if tokens >= TOKENS:
            steps.append([])
            tokens = 0
        steps[-1].append(batch)
        tokens += count_tokens(batch)
    return steps


def _regrouped(batches: Sequence[Batch], seed: int, fixed_length: bool) -> list[Batch]:
    texts: list[Batch] = []
    others: dict[tuple[tuple[int, ...], ...], list[Batch]] = {}
    for batch in batches:
        for row in split_rows(batch) or [batch]:
            if fixed_length or text_mask(row) is None:
                others.setdefault(tuple(a.shape for a in row.values()), []).append(row)
            else:
                texts.append(_trimmed(row))
    random = np.random.default_rng(seed)
    texts = [texts[i] for i in random.permutation(len(texts))]
    pads, is_left = _padding(batches)
    groups = grouped(sorted(texts, key=_length), _length) if texts else []
    merged = [_joined(group, pads, is_left=is_left) for group in groups]
    for rows in others.values():
        rows = [rows[i] for i in random.permutation(len(rows))]
        size = max(TOKENS // _row_tokens(rows[0]), 1)
        merged += [
            _joined(rows[start : start + size], pads, is_left=is_left)
            for start in range(0, len(rows), size)
        ]
    return merged


def can_be_mixed(batch: Batch) -> bool:
    """Whether the batch has several rows, and all are texts."""
    mask = text_mask(batch)
    return mask is not None and len(mask) > 1


def mixed(batch: Batch, random: np.random.Generator) -> Batch:
    """Mix texts as augmentation: each row up to a random token, continued by another row.

    A batch that cannot be mixed is returned unchanged.
    """
    mask = text_mask(batch)
    if mask is None or not can_be_mixed(batch):
        return batch
    other = random.permutation(len(mask))
    lengths = mask.sum(1)
    shortest = np.minimum(lengths, lengths[other])  # no padding comes between the two texts
    cut = random.integers(1, np.maximum(shortest, 2))
    places = np.arange(mask.shape[1])
    if not mask[:, 0].all() and mask[:, -1].all():  # padding is on the left: count from the end
        places = places[::-1]
    is_own = places < cut[:, None]
    return {name: np.where(is_own, array, array[other]) for name, array in batch.items()}


def count_tokens(batch: Batch) -> int:
    """The number of real tokens of a batch; a row without tokens counts like 1 of ``ROWS``."""
    mask = text_mask(batch)
    if mask is not None:
        return int(mask.sum())
    ids = _ids(batch)
    return len(next(iter(batch.values()))) * TOKENS // ROWS if ids is None else int(ids.size)


def _ids(batch: Batch) -> np.ndarray | None:
    """The first integer input (B, T)."""
    return next((a for a in batch.values() if a.ndim == 2 and a.dtype.kind in "iu"), None)


def _row_tokens(row: Batch) -> int:
    """The token count of a row that is not a text, such as an image, or ids after a cache."""
    if is_sequence(row):
        return _length(row)
    ids = _ids(row)
    return TOKENS // ROWS if ids is None else max(ids.shape[1], 1)


def row_contents(batch: Batch) -> Iterator[bytes]:
    """The content of each row, to find equal rows."""
    return map(row_content, split_rows(batch) or [batch])


def _length(batch: Batch) -> int:
    return max(next(iter(batch.values())).shape[1], 1)


def _padding(batches: Sequence[Batch]) -> tuple[dict[str, Any], bool]:
    """Values of the inputs at padding, if there is any, and whether padding is on the left."""
    pads: dict[str, Any] = {}
    is_left = False
    for batch in batches:
        mask = text_mask(batch)
        if mask is None or mask.all():
            continue
        is_left |= bool(mask[:, -1].all())
        row, place = np.argwhere(~mask)[0]
        for name, array in batch.items():
            pads.setdefault(name, array[row, place])
    return pads, is_left


def _trimmed(row: Batch) -> Batch:
    """A row without the padding around its text."""
    mask = text_mask(row)
    assert mask is not None
    used = np.flatnonzero(mask[0])
    first, last = (used[0], used[-1]) if len(used) else (0, mask.shape[1] - 1)
    return {name: array[:, first : last + 1] for name, array in row.items()}


def _joined(rows: Sequence[Batch], pads: Mapping[str, Any], *, is_left: bool) -> Batch:
    """Join rows to one batch; shorter rows are padded like the given batches."""
    if len(rows) == 1:
        return dict(rows[0])
    joined: Batch = {}
    for name in rows[0]:
        arrays = [row[name] for row in rows]
        if is_sequence(rows[0]):
            longest = max(a.shape[1] for a in arrays)
            arrays = [
                np.pad(
                    a,
                    ((0, 0), (longest - a.shape[1], 0)[:: 1 if is_left else -1]),
                    constant_values=pads.get(name, padding_value(name, a)),
                )
                for a in arrays
            ]
        joined[name] = np.concatenate(arrays)
    return joined
