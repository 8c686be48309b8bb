"""A rewrite of another package: in a plan."""

from __future__ import annotations

import json
from pathlib import Path

import onnx
import pytest

from tests.attnserve.plugins.conftest import Run

CODE = """
from graph_passes import PASSES, RewritePass

class Note(RewritePass):
    name = "note"

    def rewrite_graph(self, context):
        context.model.graph.doc_string = "by a rewrite"
        return True

PASSES.add(Note)
"""


@pytest.mark.process
def test_rewrite_of_another_package(tiny: Path, texts: Path, tmp_path: Path, run: Run):
    plan = tmp_path / "plan.json"
    run(CODE, "plan", tiny, "--calib", texts, "--keep", "0.99", "--seq", "8", "-o", plan)
    content = json.loads(plan.read_text())
    content["plan"]["passes"].append({"pass": "note"})
    plan.write_text(json.dumps(content))
    run(CODE, "optimize", tiny, "--plan", plan, "--calib", texts, "-o", tmp_path / "new")
    assert onnx.load(tmp_path / "new" / "model.onnx").graph.doc_string == "by a rewrite"
