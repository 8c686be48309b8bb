"""Insertion and removal of nodes."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from graph_passes.emit.editing import Inserter, remove_unused, replace_uses
from graph_passes.passes.prune_heads import PruneHeads
from tests.graph_passes.graphs import PARTS, D, H, attention, feeds, graph, masked, run

BODY = """
    a = MatMul(x, Wq)
    out = Add(a, bq)"""


def node_named(model: ir.Model, output: str) -> ir.Node:
    return next(node for node in model.graph if node.outputs[0].name == output)


def test_inserter_nodes_precede_the_anchor_in_order() -> None:
    model = graph(BODY)
    make = Inserter(model.graph, node_named(model, "out"), "layer")
    half = make.constant(np.array(0.5, np.float32), "half")
    made = make.op("Mul", [node_named(model, "a").outputs[0], half], "halved")
    turned = make.op("Transpose", [made], "turned", perm=[0, 2, 1])
    assert [node.outputs[0].name for node in model.graph] == [
        "a",
        "layer/halved",
        "layer/turned",
        "out",
    ]
    assert list(turned.producer().attributes["perm"].as_ints()) == [0, 2, 1]  # type: ignore[union-attr]


def test_inserter_taken_names_get_a_number() -> None:
    model = graph(BODY)
    anchor = node_named(model, "out")
    for _ in range(2):  # a second rewrite of the same layer starts a new Inserter
        Inserter(model.graph, anchor, "layer").constant(np.zeros(1, np.float32), "w")
    make = Inserter(model.graph, anchor, "layer")
    make.op("Abs", [anchor.outputs[0]], "w")
    names = [*model.graph.initializers, *(node.name for node in model.graph)]
    assert {"layer/w", "layer/w_2", "layer/w_3"} <= set(names)


def test_inserter_constant_is_a_typed_copy() -> None:
    model = graph(BODY)
    array = np.arange(6, dtype=np.float16).reshape(2, 3)
    value = Inserter(model.graph, node_named(model, "out"), "layer").constant(array.T, "w")
    array[:] = 0
    assert (value.dtype, value.shape) == (ir.DataType.FLOAT16, ir.Shape([3, 2]))
    assert value.const_value is not None
    assert value.const_value.numpy().tolist() == [[0, 3], [1, 4], [2, 5]]


def test_inserter_scalar_constant_has_no_axes() -> None:
    model = graph(BODY)
    make = Inserter(model.graph, node_named(model, "out"), "layer")
    assert make.constant(np.array(2.0), "c").shape == ir.Shape([])


def test_replace_uses_and_remove_unused_remove_old_nodes() -> None:
    model = graph(BODY)
    old = node_named(model, "a").outputs[0]
    make = Inserter(model.graph, node_named(model, "out"), "layer")
    new = make.op("Abs", [model.graph.inputs[0]], "abs")
    replace_uses(old, new)
    remove_unused(model)
    assert [node.op_type for node in model.graph] == ["Abs", "Add"]
    assert list(model.graph.initializers) == ["bq"]
    assert [value.name for value in model.graph.inputs] == ["x", "mask"]


def test_replace_uses_of_graph_output_keeps_name_and_shape() -> None:
    model = graph(BODY)
    old = model.graph.outputs[0]
    make = Inserter(model.graph, node_named(model, "out"), "layer")
    replace_uses(old, make.op("Abs", [node_named(model, "a").outputs[0]], "abs"))
    remove_unused(model)
    (now,) = model.graph.outputs
    assert (now.name, now.dtype, str(now.shape)) == ("out", old.dtype, str(old.shape))
    assert [node.op_type for node in model.graph] == ["MatMul", "Abs"]
    arrays = feeds(model)
    assert (run(model, arrays) >= 0).all()


POOLED = """
        columns = Transpose <perm = [0, 2, 1]> (raw)
        pooled = AveragePool <kernel_shape = [2], strides = [2]> (columns)
        x = Transpose <perm = [0, 2, 1]> (pooled)"""
IMAGE = """
        patches = Conv <kernel_shape = [32, 32], strides = [32, 32]> (raw, filters)
        columns = Reshape(patches, columns_shape)
        x = Transpose <perm = [0, 2, 1]> (columns)"""
PADDED = """
        raw_shape = Shape(raw)
        length = Slice(raw_shape, a1, a2)
        whole = Max(length, window)
        missing = Sub(whole, length)
        pads = Concat <axis = 0> (no_pads, missing, a0)
        x = Pad (raw, pads)"""


@pytest.mark.parametrize(
    ("tokens", "inputs", "size"),
    [
        (POOLED, f"float[batch, sequence, {D}] raw", 22),
        (IMAGE, "float[batch, 3, height, width] raw", 96),
        (PADDED, f"float[batch, sequence, {D}] raw", 600),
    ],
    ids=["half of the length", "image", "padded to a window"],
)
def test_redirect_shapes_of_tokens_of_another_length(tokens: str, inputs: str, size: int) -> None:
    """The mask has the length of the keys, which is equal to no axis of the inputs."""
    mask = """
        keys_shape = Shape(kT)
        keys = Gather(keys_shape, a3)
        nothing = Expand(zero, keys)
        m = Add(s, nothing)"""
    constants = {
        "filters": np.random.default_rng(0).standard_normal((D, 3, 32, 32)).astype(np.float32),
        "columns_shape": np.array([0, D, -1]), "window": np.array([512]),
        "no_pads": np.zeros(4, np.int64),
    }  # fmt: skip

    def build() -> ir.Model:
        q = tokens + PARTS["q"]
        return attention(q=q, mask=mask, inputs=inputs, constants=constants)

    model, heads = build(), {"attention_0": [0] + [1] * (H - 1)}
    arrays = feeds(model, sequence=size)
    PruneHeads(heads)(model)
    assert "k0" not in {value.name for node in model.graph for value in node.outputs}
    np.testing.assert_allclose(run(model, arrays), run(masked(build(), heads), arrays), atol=1e-4)
