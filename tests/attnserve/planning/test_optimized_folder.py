"""What ``optimize`` writes for other programs: metadata of the file, model card, OpenVINO."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest

from attnserve import __version__, optimize
from attnserve.models.artifact import open_artifact
from attnserve.models.checksums import sha256
from attnserve.models.model_card import CARD
from attnserve.runtime.machine import cpu_name
from tests.files import last_entry


@pytest.fixture(scope="module")
def folder(tiny: Path, sentences: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An optimized folder; shared."""
    path = tmp_path_factory.mktemp("optimized") / "new"
    optimize(tiny, path, collab_dk=16, prune=0.5, calib=sentences, threads=1)
    return path


def section(folder: Path, heading: str) -> str:
    """The text below a heading of the card."""
    text = (folder / CARD).read_text(encoding="utf-8")
    return text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


def test_metadata_names_version_parent_and_plan(folder: Path, tiny: Path) -> None:
    stated = {one.key: one.value for one in onnx.load(folder / "model.onnx").metadata_props}
    assert stated["attnserve.version"] == __version__
    assert stated["attnserve.parent_sha256"] == sha256(tiny / "model.onnx")
    plan = open_artifact(folder).plan_id
    assert plan and stated["attnserve.plan"] == plan
    assert stated["attnserve.rewrite"] == last_entry(folder)["rewrite"]


def test_card_has_the_changes_of_each_rewrite(
    folder: Path, sentences: Path, tmp_path: Path
) -> None:
    optimize(folder, tmp_path / "again", ffn=0.5, calib=sentences)
    for path, rewrites in ((folder, 1), (tmp_path / "again", 2)):
        header, _, *rows = section(path, "Changes").strip().split("\n")
        assert header == "| rewrite | parameters | MACs | weights |" and len(rows) == rewrites
        assert all(row.count(" to ") == 3 for row in rows)
    entry = last_entry(folder)
    before, after = (entry[key]["bytes"] / 1e6 for key in ("before", "after"))
    assert before > after and f"{before:.2f} MB to {after:.2f} MB" in section(folder, "Changes")


def test_card_has_the_speed_with_the_machine(folder: Path) -> None:
    text = section(folder, "Speed").replace("\\", "")
    served = last_entry(folder)["speedups"]["served"]
    low, high = served["ci95"]
    assert f"{served['value']:.2f} times as fast" in text
    assert f"{low:.2f} to {high:.2f}" in text and "1 thread" in text
    assert text.strip().endswith(f" Measured on {cpu_name()}.")


@pytest.mark.parametrize("options", [{"runtime": "openvino"}, {"precision": "bfloat16-cpu"}])
def test_model_that_openvino_runs_has_its_file_without_a_request(
    options: dict[str, Any], model: Path, tmp_path: Path, cpu_with: Callable[..., None]
) -> None:
    pytest.importorskip("openvino")
    cpu_with(bfloat16=True)
    file = Path("openvino", "openvino_model.xml")
    optimize(model, tmp_path / "openvino", collab_dk=16, mixing="dense", **options)
    assert (tmp_path / "openvino" / file).is_file()
    assert (tmp_path / "openvino" / file).with_suffix(".bin").is_file()
    assert 'backend="openvino"' in section(tmp_path / "openvino", "Load")
    optimize(model, tmp_path / "other", collab_dk=16, mixing="dense", runtime="onnxruntime")
    assert not (tmp_path / "other" / file).exists()
