"""Each invariant has a model that breaks it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir
import pytest

from graph_passes.errors import InvariantBroken
from graph_passes.passes.invariants import INVARIANTS, check_invariants, interface
from tests.graph_passes.graphs import attention


def renames_an_output(model: ir.Model) -> None:
    model.graph.outputs[0].name = "answer"


def forgets_a_dynamic_axis(model: ir.Model) -> None:
    model.graph.inputs[0].shape = ir.Shape([1, "sequence", 12])


def changes_a_type(model: ir.Model) -> None:
    model.graph.inputs[0].type = ir.TensorType(ir.DataType.FLOAT16)


def drops_an_input(model: ir.Model) -> None:
    model.graph.inputs.pop()


def raises_the_opset(model: ir.Model) -> None:
    model.opset_imports[""] = 23


def reads_before_it_is_made(model: ir.Model) -> None:
    nodes = list(model.graph)
    model.graph.remove(nodes[0])
    model.graph.append(nodes[0])


def reads_what_nobody_makes(model: ir.Model) -> None:
    model.graph.initializers.pop("bq")


def makes_no_output(model: ir.Model) -> None:
    model.graph.outputs[0] = ir.Value(name="out", type=model.graph.outputs[0].type,
                                      shape=model.graph.outputs[0].shape)  # fmt: skip


def uses_a_name_twice(model: ir.Model) -> None:
    nodes = list(model.graph)
    nodes[1].outputs[0].name = nodes[0].outputs[0].name


def adds(array: np.ndarray) -> Callable[[ir.Model], None]:
    def change(model: ir.Model) -> None:
        tensor = ir.tensor(array, name="new")
        model.graph.register_initializer(ir.Value(name="new", const_value=tensor))

    return change


BREAKS = {
    "keeps_inputs_and_outputs": [
        (renames_an_output, "'out' became"),
        (forgets_a_dynamic_axis, "'x' became"),
        (changes_a_type, "'x' became"),
        (drops_an_input, "inputs or outputs were added or removed"),
    ],
    "keeps_opsets": [(raises_the_opset, "17")],
    "every_value_is_made_before_it_is_read": [
        (reads_before_it_is_made, "reads 'q0', which is not computed before it"),
        (reads_what_nobody_makes, "reads 'bq', which is not computed before it"),
        (makes_no_output, "output 'out' is computed by no node"),
    ],
    "names_are_unique": [(uses_a_name_twice, "'q0' names two values")],
    "new_weights_are_finite": [
        (adds(np.array([1.0, np.nan], np.float32)), "'new' holds a value that is not finite"),
        (adds(np.array([[np.inf]], np.float16)), "'new' holds a value that is not finite"),
        (adds(np.array(np.nan, np.float32)), "'new' holds a value that is not finite"),
    ],
}


def test_invariants_have_examples_here() -> None:
    assert [invariant.__name__ for invariant in INVARIANTS] == list(BREAKS)


@pytest.mark.parametrize(
    ("invariant", "change", "text"),
    [
        (invariant, change, text)
        for invariant, changes in BREAKS.items()
        for change, text in changes
    ],
)
def test_check_invariants_names_the_broken_invariant(
    invariant: str, change: Callable[[ir.Model], None], text: str
) -> None:
    model = attention()
    before = interface(model)
    change(model)
    with pytest.raises(InvariantBroken) as broken:
        check_invariants(before, model, after="Pass")
    assert str(broken.value).startswith(f"Pass violates the invariant {invariant!r}: ")
    assert text in broken.value.what


def test_check_invariants_of_unchanged_model_passes() -> None:
    model = attention()
    check_invariants(interface(model), model, after="nothing")


def test_check_invariants_ignores_old_weights() -> None:
    model = attention(constants={"bq": np.full(12, np.nan, np.float32)})
    check_invariants(interface(model), model, after="nothing")


def test_check_invariants_accepts_scalar_minus_infinity() -> None:
    model = attention()
    before = interface(model)
    adds(np.array(-np.inf, np.float32))(model)
    check_invariants(before, model, after="nothing")
