"""The benchmark of queries in an existing index, on a tiny encoder with counted times."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import _common, index
from tests.fixtures.make import BERT
from tests.texts import WORDS


def pairs(path: Path, rows: int, seed: int = 0) -> Path:
    chosen = random.Random(seed)
    texts = [" ".join(chosen.choices(WORDS, k=chosen.randint(3, 9))) for _ in range(2 * rows)]
    lines = [f"1.0\t{one}\t{other}" for one, other in zip(texts[::2], texts[1::2], strict=True)]
    path.write_text("\n".join(["score\tsentence1\tsentence2", *lines]), encoding="utf-8")
    return path


def test_sentences_have_one_role(tmp_path: Path):
    path = index.with_roles(tmp_path / "out.tsv", pairs(tmp_path / "pairs.tsv", 100), 20, 30)
    rows = [line.split("\t") for line in path.read_text().splitlines()[1:]]
    assert [role for role, _ in rows] == ["query"] * 20 + ["document"] * 30
    assert len({text for _, text in rows}) == 50


@pytest.mark.timing(seconds=20)
def test_main_writes_each_search_and_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def bench(models: list[Path], **_: Any) -> SimpleNamespace:
        one = SimpleNamespace(samples_ms=(1.0, 1.0), p50_ms=1.0, speedup_ci95=(1.0, 1.0))
        shapes = [[SimpleNamespace(**vars(one), sequence=n) for _ in models] for n in index.LENGTHS]
        return SimpleNamespace(results=[result for shape in shapes for result in shape])

    monkeypatch.setenv("ATTNSERVE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(_common, "RESULTS", tmp_path)
    monkeypatch.setattr(index, "PRECISIONS", ("float32",))
    monkeypatch.setattr(index.attnserve, "bench", bench)
    models = tmp_path / "models"
    shutil.copytree(BERT / "eager-torchscript-17-2", models / "original")
    train, dev = pairs(tmp_path / "train.tsv", 300), pairs(tmp_path / "dev.tsv", 60, 1)
    given = ["--train", str(train), "--dev", str(dev), "--models", str(models), "--keep", "0.8"]
    assert index.main(given) == 0
    result = json.loads((tmp_path / "index.json").read_text())
    assert [row["measure"] for row in result["rows"]] == ["index", "similarity"]
    for row in result["rows"]:
        assert row["proved"]["measure"] == row["measure"] and row["proved"]["value"] >= 0.8
        assert row["unseen"]["index"]["documents"] > 50 and "overlap" in row["unseen"]["index"]
    assert len(result["speeds"]) == 3 * len(index.LENGTHS)
    assert result["command"].startswith("python -m benchmarks.index") and result["machine"]
    monkeypatch.setattr(index, "optimized", None)
    assert index.main([*given, "--resume"]) == 0
    assert json.loads((tmp_path / "index.json").read_text())["rows"] == result["rows"]
