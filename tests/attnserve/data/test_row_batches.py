"""What is known of the rows of a batch."""

from __future__ import annotations

import pickle

import numpy as np

from attnserve.data.query_lists import Lists
from attnserve.data.row_batches import RowBatch, RowInfo, row_info

LISTS = Lists(np.array([0, 0, 1]), np.array([1.0, 0.0, np.nan]))


def test_of_rows_selects_the_lists_of_the_rows() -> None:
    info = RowInfo("a.txt", "query", LISTS).of_rows(np.array([0, 2]))
    assert (info.file, info.role) == ("a.txt", "query") and info.lists is not None
    assert info.lists.query.tolist() == [0, 1]
    np.testing.assert_array_equal(info.lists.relevance, [1, np.nan])


def test_plain_inputs_have_no_info() -> None:
    info = row_info({"x": np.ones((2, 3))})
    assert (info.file, info.role, info.lists) == ("", None, None)


def test_row_batch_keeps_its_info_in_another_process() -> None:
    batch = RowBatch({"x": np.ones((3, 2))}, RowInfo("a.txt", "document", LISTS))
    copy = pickle.loads(pickle.dumps(batch))
    assert row_info(copy).role == "document" and copy["x"].shape == (3, 2)
