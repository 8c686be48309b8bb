"""Splitting batches into rows, and joining them."""

from __future__ import annotations

import numpy as np
import pytest

from attnserve.models.rows import check_rows, join_rows, join_values, split_rows
from graph_passes.errors import InvalidData
from tests.errors import raises


def test_split_rows_and_join_rows_are_inverse() -> None:
    batch = {"x": np.arange(6).reshape(3, 2), "y": np.array([1.0, 2.0, 3.0])}
    rows = split_rows(batch)
    assert rows is not None and len(rows) == 3
    assert all(np.shares_memory(row["x"], batch["x"]) for row in rows)
    joined = join_rows(rows)
    for name, array in batch.items():
        np.testing.assert_array_equal(joined[name], array, strict=True)
    assert join_rows(rows[:1]) is rows[0]


@pytest.mark.parametrize(
    "batch",
    [{}, {"x": np.zeros(2), "y": np.zeros(3)}, {"x": np.zeros(2), "y": np.float32(1)}],
    ids=["empty", "other rows", "scalar"],
)
def test_split_rows_without_common_axis_gives_none(batch: dict[str, np.ndarray]) -> None:
    assert split_rows(batch) is None


def test_join_values_of_other_shapes_is_refused() -> None:
    parts = [np.zeros((1, 2)), np.zeros((1, 3))]
    assert join_values(parts[:1]) is parts[0]
    with raises(InvalidData, "rows.shapes", "(1, 2), (1, 3)"):
        join_values(parts)


def test_check_rows_output_with_other_rows_is_refused() -> None:
    inputs = {"x": np.zeros((2, 5))}
    check_rows(inputs, [np.zeros((2, 1)), np.zeros(2)])
    for wrong in (np.zeros((1, 5)), np.float32(1)):
        with raises(InvalidData, "rows.count", "2 rows"):
            check_rows(inputs, [np.zeros(2), np.asarray(wrong)])
