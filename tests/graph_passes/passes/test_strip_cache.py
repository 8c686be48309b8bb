"""StripCache: the outputs equal those of the original with an empty cache."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from attnserve.context import ONE_THREAD
from attnserve.models.onnx_files import load_model
from attnserve.runtime.session import open_session
from graph_passes.errors import CannotRewrite
from graph_passes.matching.find import find_attention
from graph_passes.passes.strip_cache import StripCache
from tests.architectures import ARCHITECTURES, COMMITTED, Cell, feeds
from tests.errors import raises
from tests.graph_passes.graphs import D, H, K, attention, graph

CACHED = [
    cell
    for cell in COMMITTED
    # ONNX Runtime has no kernel for RotaryEmbedding with angles that sequences share.
    if cell.architecture.endswith("cached") and cell.opset < 23
]


@pytest.mark.parametrize("cell", CACHED, ids=str)
@pytest.mark.parametrize("sequence", [1, 5])
def test_strip_cache_equals_original_with_an_empty_past(cell: Cell, sequence: int) -> None:
    """Cached keys of an encoder stay inputs; other layers are found as before."""
    model = load_model(cell.committed)
    lengths = {"batch": 3, "sequence": sequence, "source": 4, "past": 0}
    arrays = feeds(ARCHITECTURES[cell.architecture], lengths)
    expected = outputs(load_model(cell.committed), arrays)
    StripCache()(model)
    names = [value.name or "" for value in model.graph.inputs]
    assert names == [name for name in arrays if not name.startswith("past_key_values.")]
    got = outputs(model, {name: arrays[name] for name in names})
    assert [*got] == [name for name in expected if not name.startswith("present.")]
    for name, array in got.items():
        np.testing.assert_array_equal(array, expected[name])
    blocks, unmatched = find_attention(model)
    assert len(blocks) == len(find_attention(load_model(cell.committed)).blocks) and not unmatched


@pytest.mark.parametrize("dtype", [ir.DataType.FLOAT16, ir.DataType.BFLOAT16])
def test_strip_cache_of_half_precision_is_valid(dtype: ir.DataType) -> None:
    """The empty cache, whose shape other nodes read, has the precision of the cache."""
    name = dtype.name.lower()
    body = f"""
        k0 = Reshape(x, heads)
        k = Transpose <perm = [0, 2, 1, 3]> (k0)
        present = Concat <axis = 2> (past, k)
        shape = Shape(past)
        length = Gather(shape, i2)
        number = Cast <to = {dtype.value}> (length)
        out = Add(x, number)"""
    tokens, cache = f"{name}[batch, sequence, {D}]", f"{name}[batch, {H}, past, {K}]"
    model = graph(body, inputs=f"{tokens} x, {cache} past", output=f"{tokens} out, {cache} present")
    StripCache()(model)
    assert [value.name for value in model.graph.inputs] == ["x"]
    onnx.checker.check_model(ir.to_proto(model), full_check=True)


def test_strip_cache_without_a_cache_is_refused() -> None:
    with raises(CannotRewrite, "strip_cache.refused"):
        StripCache()(attention())


def test_strip_cache_of_all_outputs_is_refused() -> None:
    model = load_model(CACHED[0].committed)
    kept = [value for value in model.graph.outputs if str(value.name).startswith("present.")]
    model.graph.outputs[:] = kept
    with raises(CannotRewrite, "strip_cache.refused"):
        StripCache()(model)


def test_strip_cache_that_other_nodes_read_is_refused() -> None:
    """Otherwise the keys would lose their cache and the values keep it."""
    model = load_model(CACHED[0].committed)
    past = next(value for value in model.graph.inputs if str(value.name).endswith(".value"))
    node = ir.node("Abs", [past])
    node.outputs[0].name = "other"
    model.graph.append(node)
    with raises(CannotRewrite, "strip_cache.refused"):
        StripCache()(model)


def outputs(model: ir.Model, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    session = open_session(model, ONE_THREAD)
    names = [value.name for value in session.get_outputs()]
    results = [np.asarray(array) for array in session.run(names, arrays)]
    return dict(zip(names, results, strict=True))
