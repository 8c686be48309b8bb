"""Paths of the public functions are strings or path objects."""

from __future__ import annotations

import json
import shutil
from pathlib import Path, PurePath

import pytest

import attnserve
from attnserve.paths import as_path, as_paths


def test_as_paths_of_none_one_and_several():
    assert as_path(None) is None and as_path("a") == as_path(PurePath("a")) == Path("a")
    assert as_paths(None) == as_paths([]) == []
    assert as_paths("ab") == as_paths(PurePath("ab")) == as_paths(["ab"]) == [Path("ab")]
    assert as_paths(("a", Path("b"))) == [Path("a"), Path("b")]


def test_public_functions_accept_strings(tiny: Path, sentences: Path, tmp_path: Path):
    model, text, new = str(tiny / "model.onnx"), str(sentences), str(tmp_path / "new")
    other = shutil.copy(text, tmp_path / "other.txt")
    masks = tmp_path / "masks.json"
    masks.write_text(json.dumps({"0": [1, 0, 1, 1]}))
    tokenizer = str(tiny / "tokenizer.json")
    report = attnserve.optimize(
        model, new, prune_heads=str(masks), calib=text, also_prove=[str(other)], tokenizer=tokenizer
    )
    assert report.output == tmp_path / "new" / "model.onnx" and report.output.is_file()
    assert attnserve.inspect(new).parameters < attnserve.inspect(model).parameters
    fidelity = attnserve.verify(model, new, data=text, tokenizer=tokenizer)
    assert fidelity.data == sentences.name


@pytest.mark.usefixtures("no_figures")
def test_evaluate_and_analyze_accept_strings(tiny: Path, sentences: Path, tmp_path: Path):
    pytest.importorskip("matplotlib")
    rows = tmp_path / "rows.tsv"
    rows.write_text(
        "score\tsentence1\tsentence2\n"
        + "".join(f"{n}\t{'dog ' * (n + 1)}\tcat is {'happy ' * n}\n" for n in range(12))
    )
    assert attnserve.evaluate(str(tiny), task="sts", data=str(rows)).rows == 12
    found = attnserve.analyze(str(tiny), str(tmp_path / "analysis"), calib=str(sentences))
    assert found.output == tmp_path / "analysis"
