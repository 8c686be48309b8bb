"""A training step of another package: on the command line, in a plan, and served."""

from __future__ import annotations

import json
from pathlib import Path

import onnx
import pytest

from tests.attnserve.plugins.conftest import Run, check_embeds

CODE = """
from dataclasses import dataclass
from attnserve.models.training_result import TrainingResult
from attnserve.planning.plans.plan import TRAININGS, Train

@dataclass(frozen=True)
class Nothing(Train):
    note: str = "trained by nobody"

    @property
    def name(self):
        return "nothing"

    def check(self, state):
        pass

    def apply(self, state):
        state.model = state.model.clone()
        state.model.graph.doc_string = self.note
        state.training = TrainingResult(steps=1, seconds=1.0, first_loss=1.0, loss=0.5)

TRAININGS.add(Nothing())
"""


@pytest.mark.process
def test_training_of_another_package(
    tiny: Path, texts: Path, tmp_path: Path, run: Run, environment: dict[str, str]
):
    asked = ("--calib", texts, "--target-speedup", "1.01", "--seq", "8", "--recover", "1m")
    plan = tmp_path / "plan.json"
    run(CODE, "plan", tiny, *asked, "--allow", "ffn", "--training", "nothing", "-o", plan)
    content = json.loads(plan.read_text())
    # As good as without training, the result is not verified again: a user adds it by hand.
    content["plan"]["trainings"] = [{"step": "nothing", "minutes": 1.0, "note": "by the plan"}]
    assert content["asked"]["recover"] == 1.0 and content["recovered"]["rounds"][0]["steps"] == 1
    plan.write_text(json.dumps(content))
    run(CODE, "optimize", tiny, "--plan", plan, "--calib", texts, "-o", tmp_path / "new")
    assert onnx.load(tmp_path / "new" / "model.onnx").graph.doc_string == "by the plan"

    check_embeds(tmp_path / "new", environment)
