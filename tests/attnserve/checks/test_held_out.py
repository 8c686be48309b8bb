"""Held-out parts as batches of a data set, and as rows of a task."""

from __future__ import annotations

from typing import Any

import numpy as np

from attnserve.checks.held_out import HeldOut
from attnserve.checks.scores import StsScore, share_kept
from attnserve.data.datasets import Dataset
from attnserve.runtime.interface import Batch

FIT, CHOOSE, FIRST, SECOND = ({"x": np.full((1, 1), number)} for number in range(4))
SOURCE: Any = None


def data(*verify: list[Batch]) -> Dataset:
    return Dataset([FIT], [CHOOSE], verify, 1, SOURCE)


def test_batches_and_records_of_each_part() -> None:
    parts = {part: part.batches(data([FIRST], [SECOND])) for part in HeldOut}
    assert parts == {
        HeldOut.CHOOSE: [CHOOSE],
        HeldOut.VERIFY: [FIRST],
        HeldOut.VERIFY_AGAIN: [SECOND],
        HeldOut.ALL: [CHOOSE, FIRST, SECOND],
    }
    assert [part.split for part in HeldOut] == ["choose", "verify", "verify", "held out"]
    assert [part for part in HeldOut if part.is_unused] == [HeldOut.VERIFY, HeldOut.VERIFY_AGAIN]


def test_share_kept_measures_half_of_the_rows_to_choose_and_the_others_to_verify() -> None:
    cosines = np.random.default_rng(0).normal(size=240)
    score = StsScore(cosines, cosines, seed=0)
    rows = [share_kept(score, score, part=part).rows for part in HeldOut]
    assert rows == [120, 60, 60, 240]
