"""Conversion to a newer opset: equal results, or an unchanged model."""

from __future__ import annotations

import logging

import numpy as np
import onnx_ir as ir
import pytest

from attnserve.models.opset import raise_opset
from attnserve.runtime.session import open_session
from graph_passes.errors import CannotRewrite
from graph_passes.matching.naming import pin_name, pinned_name
from tests.errors import raises
from tests.graph_passes.graphs import attention, feeds, run, text_of


def mean(opset: int, body: str) -> ir.Model:
    return ir.from_onnx_text(
        f'<ir_version: 8, opset_import: ["": {opset}]>'
        f" g (float[batch, sequence, 4] x) => (float[batch, sequence, 1] y) {{ {body} }}"
    )


@pytest.mark.parametrize("opset", [13, 17, 18, 22])
def test_raise_opset_keeps_results_and_names(opset: int) -> None:
    model, before = attention(opset=opset), attention(opset=opset)
    raise_opset(model, 23)
    assert model.opset_imports[""] == 23
    assert [v.name for v in model.graph.inputs] == [v.name for v in before.graph.inputs]
    assert [v.name for v in model.graph.outputs] == [v.name for v in before.graph.outputs]
    assert {n.outputs[0].name for n in before.graph} <= {n.outputs[0].name for n in model.graph}
    np.testing.assert_array_equal(run(model, feeds(before)), run(before, feeds(before)))


@pytest.mark.parametrize("opset", [17, 18])
def test_raise_opset_keeps_metadata(opset: int) -> None:
    """Recorded block names are metadata of nodes; the converter for old opsets drops them."""
    model = attention(opset=opset)
    model.graph.metadata_props["graph"] = "1"
    product = next(node for node in model.graph if node.outputs[0].name == "s0")
    pin_name(product, "encoder.layer.3")
    raise_opset(model, 23)
    assert model.graph.metadata_props["graph"] == "1"
    names = {node.outputs[0].name: pinned_name(node) for node in model.graph}
    assert {output: name for output, name in names.items() if name} == {"s0": "encoder.layer.3"}


def test_raise_opset_converts_attribute_to_input() -> None:
    """ReduceMean names its axes by an attribute up to opset 17, by an input from 18 on."""
    model = mean(17, "y = ReduceMean <axes = [-1]> (x)")
    x = np.arange(12, dtype=np.float32).reshape(1, 3, 4)
    (expected,) = open_session(model).run(None, {"x": x})
    raise_opset(model, 23)
    node = next(node for node in model.graph if node.op_type == "ReduceMean")
    assert len(node.inputs) == 2 and "axes" not in node.attributes
    np.testing.assert_array_equal(open_session(model).run(None, {"x": x})[0], expected)


@pytest.mark.parametrize("opset", [23, 24])
def test_raise_opset_newer_model_is_unchanged(opset: int) -> None:
    model = attention(opset=opset)
    before = text_of(model)
    raise_opset(model, 23)
    assert text_of(model) == before


def test_raise_opset_unknown_operator_is_refused_and_unchanged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = mean(17, "y = Nonsense(x)")
    before = text_of(model)
    with (
        caplog.at_level(logging.WARNING),
        raises(CannotRewrite, "opset.not_converted", 17),
    ):
        raise_opset(model, 23)
    assert text_of(model) == before
    assert not caplog.records
