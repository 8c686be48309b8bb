"""Rows of a batch: split arrays along their first axis, join them again, and fill fixed batches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import cycle, islice
from typing import Any, TypeVar

import numpy as np
import onnx_ir as ir

from attnserve.models.masks import text_mask
from graph_passes.analysis.axes import named_axes
from graph_passes.analysis.workload import Workload
from graph_passes.errors import InvalidData

T = TypeVar("T")

__all__ = [
    "check_rows",
    "filled",
    "fixed_axes",
    "join_rows",
    "join_values",
    "row_content",
    "row_count",
    "split_rows",
    "with_fixed_sizes",
]


def row_count(batch: Mapping[str, np.ndarray]) -> int:
    """The number of rows (texts) of a batch."""
    return max((len(array) for array in batch.values() if array.ndim), default=1)


def split_rows(batch: Mapping[str, np.ndarray]) -> list[dict[str, np.ndarray]] | None:
    """The rows of a batch as views; None if not all arrays have the same first axis."""
    axes = {array.shape[:1] for array in batch.values()}
    if len(axes) != 1 or () in axes:
        return None
    (count,) = axes.pop()
    return [{name: array[at : at + 1] for name, array in batch.items()} for at in range(count)]


def row_content(row: Mapping[str, np.ndarray]) -> bytes:
    """The content of a row without padding; equal rows may be padded differently."""
    mask = text_mask(row)
    if mask is None:
        return b"".join(str(array.shape).encode() + array.tobytes() for array in row.values())
    return b"".join(array[mask].tobytes() for array in row.values())


def filled(rows: Sequence[T], size: int) -> list[T]:
    """Rows, of which the first are repeated until their number is a multiple of ``size``.

    Models with a fixed number of rows take no fewer.
    """
    return [*rows, *islice(cycle(rows), -len(rows) % size)]


def fixed_axes(shapes: Iterable[Iterable[Any] | None]) -> tuple[int | None, int | None]:
    """The fixed numbers of rows and of tokens of inputs; None if dynamic.

    Args:
        shapes: The shapes of the inputs, with integers for fixed axes; None if unknown. Tokens are
            on axis 1 of a matrix.
    """
    ranked = [shape for shape in (tuple(shape or ()) for shape in shapes) if len(shape) > 1]
    rows = (shape[0] for shape in ranked)
    tokens = (shape[1] for shape in ranked if len(shape) == 2)
    first, second = (
        next((size for size in sizes if isinstance(size, int) and size > 0), None)
        for sizes in (rows, tokens)
    )
    return first, second


def with_fixed_sizes(model: ir.Model, workload: Workload) -> Workload:
    """A workload with the rows and tokens that the model is fixed to.

    A size is fixed if no input has a free axis there. Tokens are axis 1 of ids and of hidden states
    (B, T, D).
    """
    inputs = [v for v in model.graph.inputs if v.name not in model.graph.initializers]
    axes = {min(position, 1) for position in named_axes(model.graph).values()}
    rows, _ = fixed_axes(value.shape for value in inputs)
    lengths = (
        value.shape[1]
        for value in inputs
        if value.shape and (len(value.shape) == 3 or (len(value.shape) == 2 and _is_whole(value)))
    )
    tokens = next((length for length in lengths if isinstance(length, int)), None)
    return Workload.of(
        workload.batch if 0 in axes else rows or workload.batch,
        workload.length if 1 in axes else tokens or workload.length,
        workload.phase,
    )


def _is_whole(value: ir.Value) -> bool:
    return value.dtype is not None and value.dtype.is_integer()


def join_rows(rows: Sequence[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """One batch of rows with the same names; a single row is not copied.

    Raises:
        InvalidData: Arrays of one name have different shapes.
    """
    if len(rows) == 1:
        return rows[0]
    return {name: join_values([row[name] for row in rows]) for name in rows[0]}


def join_values(parts: Sequence[np.ndarray]) -> np.ndarray:
    """The rows of one input or output; a single part is not copied.

    Raises:
        InvalidData: Their shapes differ.
    """
    if len(shapes := {part.shape for part in parts}) > 1:
        raise InvalidData(
            f"the rows of an output have the shapes {', '.join(map(str, sorted(shapes)))}:"
            " expected equal shapes",
            "run one row at a time",
            code="rows.shapes",
        )
    return np.concatenate(parts) if len(parts) > 1 else parts[0]


def check_rows(inputs: Mapping[str, np.ndarray], outputs: Sequence[np.ndarray]) -> None:
    """Check that every output has as many rows as the inputs.

    Raises:
        InvalidData: An output has another number of rows.
    """
    rows = next(iter(inputs.values())).shape[:1]
    for output in outputs:
        if output.shape[:1] != rows:
            raise InvalidData(
                f"an output has the shape {list(output.shape)} for {rows[0]} rows of input:"
                " expected one row for each",
                "use the tensors of the output, one row at a time",
                code="rows.count",
            )
