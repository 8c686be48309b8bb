"""Search of the real encoder by the clock; ``benchmarks/planner.py`` measures its results."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

import attnserve
from attnserve import verify

pytestmark = pytest.mark.usefixtures("cache", "real_clock")


@pytest.mark.timing(seconds=240)
def test_optimize_real_encoder_is_faster_by_the_clock(
    minilm_export: Any, shared: Path, tmp_path: Path
):
    """The promised similarities hold on sentences of another file within 0.005."""
    lines = (shared / "data/sts/stsb_train.tsv").read_text(encoding="utf-8").splitlines()[1:]
    calib = tmp_path / "calib.txt"
    calib.write_text("\n".join(line.split("\t")[1] for line in lines[::20]), encoding="utf-8")
    unseen = tmp_path / "unseen.txt"
    unseen.write_text("\n".join(line.split("\t")[2] for line in lines[5::12]), encoding="utf-8")
    source = Path(shutil.copytree(minilm_export("sdpa", "dynamo", 18), tmp_path / "model"))
    report = attnserve.optimize(
        source, tmp_path / "out", calib=calib, keep=0.98, sequence=128, threads=1
    )
    assert report.search is not None and report.search.gain
    assert report.search.speedup > 1.1
    assert min(speed.speedup for speed in report.search.speeds) > 0.97
    quality = verify(source, tmp_path / "out", data=unseen).quality
    assert quality is not None and quality.measure == "similarity"
    assert quality.value > 0.98 - 0.005
