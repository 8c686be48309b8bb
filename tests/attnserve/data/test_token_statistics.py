"""Token ids that the record of an artifact keeps."""

from __future__ import annotations

import base64
import json
import tracemalloc
import zlib
from pathlib import Path

import numpy as np
import pytest

from attnserve import optimize
from attnserve.data.datasets import Dataset
from attnserve.data.token_statistics import (
    CalibrationRange,
    row_ids,
    seen_ids,
    token_statistics,
    unseen_share,
)
from attnserve.models.artifact import open_artifact
from attnserve.models.lineage import Calibration, LineageEntry, TokenIds
from attnserve.runtime.interface import Batch


def dataset(fit: list[Batch], held_out: list[Batch]) -> Dataset:
    return Dataset(fit, held_out, [], 4, Calibration())


def rows(*ids: list[int]) -> Batch:
    return {"input_ids": np.array(ids)}


def test_token_statistics_of_known_ids():
    masked = rows([1, 9, 4], [9, 5, 0]) | {"attention_mask": np.array([[1, 1, 1], [1, 1, 0]])}
    found = token_statistics(dataset([masked, rows([1, 20])], [rows([1, 2, 300, 20])]))
    assert found is not None and json.dumps(found.to_json())
    assert found.distinct == 5 and found.unseen_share == 0.5
    assert np.flatnonzero(seen_ids(found)).tolist() == [1, 4, 5, 9, 20], "padding is not counted"


def test_unseen_share_of_no_tokens_and_of_unknown_ids():
    seen = np.array([False, True])
    assert unseen_share(np.array([], int), seen) == 0
    assert unseen_share(np.array([1, 0, 7, 1]), seen) == 0.5


def test_token_statistics_of_a_large_vocabulary_are_compact():
    ids = np.random.default_rng(0).integers(0, 30_000, (100, 100))
    found = token_statistics(dataset([{"input_ids": ids}], [{"input_ids": ids}]))
    assert found is not None and found.unseen_share == 0
    assert len(found.seen) < 5200


@pytest.mark.parametrize(
    "batch", [{"x": np.ones((2, 3, 4))}, {"input_ids": np.ones((2, 3), np.float32)}]
)
def test_token_statistics_without_token_ids_are_none(batch: Batch):
    assert token_statistics(dataset([batch], [batch])) is None


def test_optimize_records_token_ids_of_the_calibration(tiny: Path, sentences: Path, tmp_path: Path):
    optimize(tiny, tmp_path / "new", collab_dk=16, mixing="dense", calib=sentences)
    record = open_artifact(tmp_path / "new").lineage[-1].calibration
    assert record is not None and len(record.lengths) == 5
    found = record.token_ids
    assert found is not None and found.distinct == seen_ids(found).sum() > 5
    assert 0 <= found.unseen_share < 0.5


def calibrated(*batches: Batch, lengths: list[int]) -> CalibrationRange | None:
    tokens = token_statistics(dataset([*batches], [*batches]))
    calibration = Calibration(lengths=tuple(lengths), token_ids=tokens)
    entries = [LineageEntry(rewrite="x", calibration=calibration), LineageEntry(rewrite="y")]
    return CalibrationRange.read(entries)


def test_calibration_range_marks_longer_rows_and_rows_of_unknown_tokens():
    found = calibrated(rows([1, 2, 3, 4]), lengths=[2, 2, 3, 4, 4])
    assert found is not None
    assert found.reasons([1, 2, 3, 4]) == found.reasons([]) == ()
    assert found.reasons(np.array([1, 2, 3, 0])) == (), "a quarter is not too much"
    assert found.reasons([1, 2, 0]) == found.reasons([1, 2, 10**9]) == ("tokens",)
    assert found.reasons([1, 2, 3, 4, 1]) == ("length",)
    assert found.reasons(np.arange(10, 20)) == ("length", "tokens")


def test_row_ids_are_those_of_real_tokens():
    batch = {"input_ids": np.array([[1, 2, 0], [3, 4, 5]])}
    masked = batch | {"attention_mask": np.array([[1, 1, 0], [1, 1, 1]])}
    assert [ids.tolist() for ids in row_ids(masked)] == [[1, 2], [3, 4, 5]]
    assert [ids.tolist() for ids in row_ids(batch)] == [[1, 2, 0], [3, 4, 5]]
    assert not list(row_ids({"pixels": np.zeros((1, 3))}))


def test_calibration_range_of_a_decompression_bomb_is_none():
    """The file of a model must not decide how much memory the server takes."""
    bomb = base64.b64encode(zlib.compress(bytes(100_000_000), 9)).decode()
    tracemalloc.start()
    try:
        calibration = Calibration(lengths=(5,), token_ids=TokenIds(seen=bomb))
        assert CalibrationRange.read([LineageEntry(rewrite="x", calibration=calibration)]) is None
        assert tracemalloc.get_traced_memory()[1] < 50_000_000
    finally:
        tracemalloc.stop()


def test_calibration_range_without_token_ids_knows_lengths_only():
    calibration = Calibration(lengths=(1, 1, 1, 1, 2))
    found = CalibrationRange.read([LineageEntry(rewrite="x", calibration=calibration)])
    assert found is not None and found.reasons([900, 901, 902]) == ("length",)


@pytest.mark.parametrize(
    "calibration",
    [None, {}, {"lengths": []}, {"lengths": [1], "token_ids": {"seen": "!"}}],
)
def test_calibration_range_of_missing_or_damaged_records_is_none(calibration: object):
    entry = LineageEntry.model_validate({"rewrite": "x", "calibration": calibration})
    assert CalibrationRange.read([entry]) is None
