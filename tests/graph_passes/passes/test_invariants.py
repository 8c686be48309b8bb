"""Each invariant has a model that breaks it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir
import pytest

from graph_passes.analyses import Analyses
from graph_passes.errors import InvariantBroken
from graph_passes.passes.base import RewritePass
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
    model.graph.outputs[0] = ir.Value(
        name="out", type=model.graph.outputs[0].type, shape=model.graph.outputs[0].shape
    )


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


def test_check_invariants_ignores_old_weights() -> None:
    model = attention(constants={"bq": np.full(12, np.nan, np.float32)})
    check_invariants(interface(model), model, after="nothing")


def test_check_invariants_accepts_scalar_minus_infinity() -> None:
    model = attention()
    before = interface(model)
    adds(np.array(-np.inf, np.float32))(model)
    check_invariants(before, model, after="nothing")


# Bodies


def nested() -> ir.Model:
    """A loop in a branch; both read values of outer graphs, and the branches share a name."""
    return ir.from_onnx_text(
        """<ir_version: 10, opset_import: ["" : 17]>
        g (float[2] x, bool c, int64 n) => (float[2] y)
        {
            a = Abs(x)
            y = If (c) <
                then_branch = t () => (float[2] z) {
                    b = Neg(a)
                    z = Loop (n, c, b) <
                        body = l (int64 i, bool k, float[2] s) => (bool more, float[2] r)
                        <float w = {2.0}>
                        { more = Identity(k) d = Mul(s, w) r = Add(d, a) }
                    >
                },
                else_branch = e () => (float[2] q) { b = Sqrt(a) q = Neg(b) }
            >
        }"""
    )


def body(model: ir.Model, name: str) -> ir.Graph:
    return next(graph for graph in model.graph.subgraphs() if graph.name == name)


def captures_what_nobody_makes(model: ir.Model) -> None:
    add = body(model, "l")[-1]
    add.replace_input_with(1, ir.val("lost"))


def captures_from_the_other_branch(model: ir.Model) -> None:
    body(model, "t")[0].replace_input_with(0, body(model, "e")[0].outputs[0])


def captures_what_is_made_later(model: ir.Model) -> None:
    body(model, "t")[0].replace_input_with(0, model.graph.outputs[0])


def makes_no_output_of_a_body(model: ir.Model) -> None:
    body(model, "e").outputs[0] = ir.val("q")


def names_two_values_of_a_body(model: ir.Model) -> None:
    nodes = list(body(model, "l"))
    nodes[1].outputs[0].name = nodes[0].outputs[0].name


def hides_a_value_of_an_outer_graph(model: ir.Model) -> None:
    body(model, "l")[1].outputs[0].name = "a"


def hides_an_outer_value_by_an_input(model: ir.Model) -> None:
    body(model, "l").inputs[2].name = "x"


def adds_nan_to_a_body(model: ir.Model) -> None:
    tensor = ir.tensor(np.array([np.nan], np.float32), name="new")
    body(model, "l").register_initializer(ir.Value(name="new", const_value=tensor))


@pytest.mark.parametrize(
    ("invariant", "change", "text"),
    [
        ("every_value_is_made_before_it_is_read", captures_what_nobody_makes, "reads 'lost'"),
        ("every_value_is_made_before_it_is_read", captures_from_the_other_branch, "reads 'b'"),
        ("every_value_is_made_before_it_is_read", captures_what_is_made_later, "reads 'y'"),
        ("every_value_is_made_before_it_is_read", makes_no_output_of_a_body, "output 'q'"),
        ("names_are_unique", names_two_values_of_a_body, "'more' names two values"),
        ("names_are_unique", hides_a_value_of_an_outer_graph, "'a' names two values"),
        ("names_are_unique", hides_an_outer_value_by_an_input, "'x' names two values"),
        ("new_weights_are_finite", adds_nan_to_a_body, "'new' holds a value"),
    ],
)
def test_rewrite_pass_defect_in_a_body_breaks_an_invariant(
    invariant: str, change: Callable[[ir.Model], None], text: str
) -> None:
    class Defective(RewritePass):
        def rewrite_graph(self, analyses: Analyses) -> bool:
            change(analyses.model)
            return True

    with pytest.raises(InvariantBroken) as broken:
        Defective()(nested())
    assert f"invariant {invariant!r}: " in broken.value.what
    assert text in broken.value.what


@pytest.mark.parametrize("build", [attention, nested])
def test_check_invariants_of_unchanged_model_passes(build: Callable[[], ir.Model]) -> None:
    """Bodies may capture values, and have names of other branches."""
    model = build()
    check_invariants(interface(model), model, after="nothing")


def test_check_invariants_ignores_old_weights_of_bodies() -> None:
    model = nested()
    adds_nan_to_a_body(model)
    check_invariants(interface(model), model, after="nothing")


def test_names_that_were_repeated_before_are_no_violation() -> None:
    """Bodies of ONNX Runtime's generation models have inputs with the names of outer inputs."""
    model = attention()
    uses_a_name_twice(model)
    before = interface(model)
    check_invariants(before, model, after="Pass")
    list(model.graph)[3].outputs[0].name = "k0"
    with pytest.raises(InvariantBroken, match="'k0' names two values"):
        check_invariants(before, model, after="Pass")
