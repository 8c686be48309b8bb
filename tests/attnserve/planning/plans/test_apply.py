"""The loop over the steps of a plan."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx_ir as ir

from attnserve.data.datasets import load_inputs
from attnserve.job import Job
from attnserve.models.artifact import open_artifact
from attnserve.models.onnx_files import load_model
from attnserve.planning.plans.apply import apply_plan
from attnserve.planning.plans.plan import Distill, Plan, State
from graph_passes.passes.prune_heads import PruneHeads
from tests.files import write_lines


def weights(model: ir.Model) -> dict[str, np.ndarray]:
    tensors = ((name, value.const_value) for name, value in model.graph.initializers.items())
    return {name: tensor.numpy().copy() for name, tensor in tensors if tensor is not None}


@dataclass(frozen=True)
class Watching(Distill):
    """A training that only remembers the weights that it is given."""

    seen: list[dict[str, np.ndarray]] = field(default_factory=list)

    def apply(self, state: State) -> None:
        self.seen.append(weights(state.model))


def test_apply_plan_gives_a_training_the_refitted_model(tiny: Path, tmp_path: Path):
    texts = write_lines(
        tmp_path / "texts.txt", (f"a man is playing with {n} dogs" for n in range(60))
    )
    artifact = open_artifact(tiny)
    model = load_model(artifact)
    job = Job(artifact, model, load_inputs(texts, model, artifact))
    block = job.matches.blocks[0]
    mask = [0, *[1] * (block.num_heads - 1)]
    training = Watching()
    plan = Plan((PruneHeads({block.name: mask}),), (training,))
    refitted = weights(apply_plan(plan, job, model.clone()).model)
    assert training.seen[0].keys() == refitted.keys()
    for name, array in refitted.items():
        np.testing.assert_array_equal(training.seen[0][name], array)
    apply_plan(plan, job, model.clone(), fit=False)
    assert training.seen[1].keys() != refitted.keys()  # a refit writes weights of its own
