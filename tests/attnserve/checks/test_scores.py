"""Shares of scores that a model keeps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import attnserve
from attnserve.checks.scores import share_kept
from graph_passes.errors import CheckFailed
from tests.attnserve.sentence_pairs import pairs
from tests.errors import raises


def test_share_kept_of_equal_scores_is_one_and_of_negative_score_fails(
    model: Path, sentences: Path, tmp_path: Path
):
    score = attnserve.evaluate(model, task="sts", data=pairs(tmp_path / "p.tsv", sentences))
    share = share_kept(score, score)
    assert share.value == 1 and share.standard_error == 0 and share.losses == (0, 0)
    with raises(CheckFailed, "evaluate.score_not_positive", "score is -"):
        share_kept(replace(score, cosines=-score.cosines), score)  # type: ignore[type-var]
