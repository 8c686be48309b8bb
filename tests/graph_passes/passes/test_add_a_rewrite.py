"""A new rewrite is one class in one file, and this is its test.

Nothing else changes: a pass in ``PASSES`` is known to ``plan.json`` and to ``apply_plan``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import numpy as np
import onnx_ir as ir
import pytest

from attnserve.planning.plans.apply import apply_plan
from attnserve.planning.plans.plan import Plan
from graph_passes.analyses import Analyses
from graph_passes.analysis.constants import constant_array, is_constant
from graph_passes.blocks import AttentionBlock, PositionBias
from graph_passes.emit.editing import replace_uses
from graph_passes.errors import CannotRewrite, InvalidArgument, Refusal
from graph_passes.matching.find import find_attention
from graph_passes.matching.output_projection import only_consumer
from graph_passes.passes.base import AttentionPass, AttentionTargets, NoParams
from graph_passes.public import PASSES
from tests.errors import raises
from tests.graph_passes.graphs import H, feeds, layers, run
from tests.jobs import job_of

# ---- the new file -------------------------------------------------------------------------------


def constant_biases(block: AttentionBlock) -> list[ir.Node]:
    """The additions of a constant that is the same for all keys of a query."""
    biases = [step.value for step in block.steps if isinstance(step, PositionBias)]
    constant = {value for value in biases if is_constant(value) and is_flat(constant_array(value))}
    found: list[ir.Node] = []
    node = None if block.softmax is None else only_consumer(block.softmax.logits)
    while node is not None and node.op_type != "Softmax":
        if not constant.isdisjoint(node.inputs):
            found.append(node)
        node = only_consumer(node.outputs[0])
    return found


def is_flat(array: np.ndarray) -> bool:
    return bool((array == array[..., :1]).all())


def define_pass() -> type[AttentionPass[NoParams]]:
    class RemoveConstantBias(AttentionPass[NoParams]):
        """Remove additive biases that are constant over the keys.

        Before: p = softmax(s q k^T + b), b the same for all keys
        After:  p = softmax(s q k^T)

        Exact: softmax ignores what all scores of a query have in common.
        """

        name = "remove_constant_bias"

        @classmethod
        def refusal(
            cls, block: AttentionBlock, params: NoParams | None, analyses: Analyses
        ) -> Refusal | None:
            if not constant_biases(block):
                return Refusal("no_constant_bias", "none of its biases is constant over the keys")
            return None

        def rewrite(self, targets: AttentionTargets[NoParams], analyses: Analyses) -> None:
            for node in (node for block, _ in targets for node in constant_biases(block)):
                (scores,) = [value for value in node.inputs if value and not is_constant(value)]
                replace_uses(node.outputs[0], scores)

    return RemoveConstantBias


# ---- its test -----------------------------------------------------------------------------------

NAME = "remove_constant_bias"
BIASED = {"mask": "\n m1 = Add(s, per_head)\n m = Add(m1, mask)"}
BY_KEY = np.arange(5, dtype=np.float32)


@pytest.fixture
def remove_constant_bias() -> Iterator[type[AttentionPass[NoParams]]]:
    """The class, registered while a test runs."""
    with PASSES.restored():
        new = define_pass()
        PASSES.add(new)
        yield new


def test_new_pass_is_found_by_its_name(
    remove_constant_bias: type[AttentionPass[NoParams]],
) -> None:
    assert PASSES[NAME] is remove_constant_bias
    assert remove_constant_bias in list(PASSES)


def test_new_pass_that_is_not_added_is_unknown() -> None:
    with raises(InvalidArgument, "pass.unknown"):
        _ = PASSES[NAME]


def test_new_pass_in_a_plan_is_read_back_from_json(
    remove_constant_bias: type[AttentionPass[NoParams]],
) -> None:
    plan = Plan.merged(
        [remove_constant_bias(["attention_1"]), remove_constant_bias(["attention_0"])]
    )
    again = Plan.from_json(json.loads(json.dumps(plan.to_json())))
    assert again.to_json() == plan.to_json()
    assert set(again.targets(remove_constant_bias)) == {"attention_0", "attention_1"}


def test_new_pass_refusal_is_reported_with_its_code(
    remove_constant_bias: type[AttentionPass[NoParams]],
) -> None:
    with raises(CannotRewrite, "rewrite.no_constant_bias", "attention_0"):
        remove_constant_bias(["attention_0"])(layers(1))
    by_key = {"mask": "\n m = Add(s, by_key)"}
    model = layers(1, inputs="float[batch, 5, 12] x", constants={"by_key": BY_KEY}, **by_key)
    with raises(CannotRewrite, "rewrite.no_constant_bias"):
        remove_constant_bias(["attention_0"])(model)


def test_new_pass_applied_by_a_plan_keeps_the_output(
    remove_constant_bias: type[AttentionPass[NoParams]],
) -> None:
    model, original = layers(2, **BIASED), layers(2, **BIASED)
    plan = Plan((remove_constant_bias(["attention_0", "attention_1"]),))
    report = apply_plan(plan, job_of(original), model).applied
    assert report.is_exact
    assert [(change.rewrite, change.block) for change in report.changes] == [
        (NAME, "attention_0"),
        (NAME, "attention_1"),
    ]
    assert "per_head" not in model.graph.initializers
    assert [(b.name, b.num_heads, len(b.steps)) for b in find_attention(model).blocks] == [
        ("attention_0", H, 1),
        ("attention_1", H, 1),
    ]
    arrays = feeds(original)
    np.testing.assert_allclose(run(model, arrays), run(original, arrays), atol=1e-5, rtol=0)
