"""Read the inputs of a model from .npz files, a batch per row, and join rows of equal shapes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from attnserve.data.row_batches import RowBatch, RowInfo
from attnserve.models.masks import is_mask, padding_value
from attnserve.models.rows import filled, join_rows
from attnserve.runtime.interface import Batch
from graph_passes.errors import InvalidData

__all__ = ["array_batches", "read_arrays", "with_unequal_lengths"]


def read_arrays(
    path: Path,
    wanted: Mapping[str, np.dtype[Any]],
    optional: Mapping[str, np.dtype[Any]] | None = None,
) -> list[Batch]:
    """One batch per row of an .npz or a folder of them; each array has a first axis of size 1.

    Args:
        wanted: The names and types of the arrays.
        optional: The names and types of arrays that may be missing.

    Raises:
        InvalidData: A file is not an .npz, or has not exactly the expected arrays.
    """
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
        more = {name: dtype for name, dtype in (optional or {}).items() if name in arrays}
        dtypes = {**more, **wanted}
        missing, extra = (
            sorted(wanted.keys() - arrays.keys()),
            sorted(arrays.keys() - dtypes.keys()),
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
        for name, dtype in dtypes.items():
            if arrays[name].dtype.kind != dtype.kind:
                raise InvalidData(
                    f"{file}: {name!r} is {arrays[name].dtype}, expected {dtype}",
                    "convert the array",
                    code="data.array_type",
                )
        for row in range(next(iter(counts.values()))):
            rows.append(
                {name: arrays[name][row : row + 1].astype(dtype) for name, dtype in dtypes.items()}
            )
    return rows


def with_unequal_lengths(row: Batch, longest: int | None) -> Batch:
    """Return a row with one more padded token in the source if the lengths were equal.

    ``token_mask`` selects a mask by its shape. With equal lengths, the mask of the source would
    hide tokens of the target.
    """
    targets = [name for name in row if name.startswith("decoder_")]
    if targets:
        sources = [name for name in row if not name.startswith("decoder_")]
    else:
        sources = [name for name in row if name.startswith("encoder_")]
        targets = [name for name in row if not name.startswith("encoder_")]
    masks = [row[name] for name in sources if is_mask(name) and row[name].ndim == 2]
    sizes = {row[name].shape[1] for name in targets if row[name].ndim == 2}
    if not masks or masks[0].shape[1] not in sizes or any(a.ndim > 3 for a in row.values()):
        return row
    size = masks[0].shape[1]
    if longest is not None and size >= longest:
        return row
    arrays = dict(row)
    for name in sources:
        array = row[name]
        if array.ndim in (2, 3) and array.shape[1] == size:
            widths = ((0, 0), (0, 1), *((0, 0),) * (array.ndim - 2))
            arrays[name] = np.pad(array, widths, constant_values=padding_value(name, array))
    return arrays


def array_batches(rows: Sequence[Batch], info: RowInfo, *, size: int, fill: bool) -> list[Batch]:
    """Batches of rows with equal shapes; all of ``size`` rows if ``fill``."""
    groups: dict[tuple[tuple[int, ...], ...], list[Batch]] = {}
    for row in rows:
        groups.setdefault(tuple(array.shape for array in row.values()), []).append(row)
    batches: list[Batch] = []
    for group in groups.values():
        group = filled(group, size) if fill else group
        chunks = (group[start : start + size] for start in range(0, len(group), size))
        batches += [RowBatch(join_rows(chunk), info) for chunk in chunks]
    return batches
