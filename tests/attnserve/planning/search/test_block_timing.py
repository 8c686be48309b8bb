"""Timed parts in float16 have no casts at their inputs and outputs."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx_ir as ir
import pytest

from attnserve.literals import Precision
from attnserve.models.example_inputs import example_inputs
from attnserve.planning.blocks.groups import group_blocks
from attnserve.planning.search.block_timing import BlockTimer, without_casts
from attnserve.precision.convert import convert
from attnserve.precision.half import LARGEST
from attnserve.runtime.part_latency import LatencyTable, Part
from attnserve.runtime.session import open_session
from benchmarks.gpu.encoder import random_encoder
from graph_passes.analysis.workload import Workload
from graph_passes.matching.find import find_attention

W = np.random.default_rng(0).standard_normal((4, 4)).astype(np.float32)
FLOAT, FLOAT16 = ir.DataType.FLOAT, ir.DataType.FLOAT16


def part(body: str, inputs: str = "float[b, 4] x", outputs: str = "float[b, 4] y") -> Part:
    """A part in float16, as the planner converts it, fed with numbers up to 1e30."""
    head = '<ir_version: 10, opset_import: ["" : 17]> g '
    model = ir.from_onnx_text(f"{head} ({inputs}) => ({outputs}) {{ {body} }}")
    weight = ir.val("w", const_value=ir.tensor(W, name="w"))
    model.graph.register_initializer(weight)
    for node in model.graph:
        for place, value in enumerate(node.inputs):
            if value is not None and value.name == "w":
                node.replace_input_with(place, weight)
    feed = {value.name or "": np.float32([[1, -2, 0.5, 1e30]]) for value in model.graph.inputs}
    return Part(convert(model, "float16"), (feed,))


def operators(part: Part) -> Counter[str]:
    return Counter(node.op_type for node in part.model.graph)


def border(part: Part) -> tuple[list[str | None], list[ir.DataType | None]]:
    values = (*part.model.graph.inputs, *part.model.graph.outputs)
    return [value.name for value in values], [value.dtype for value in values]


def test_without_casts_removes_casts_of_inputs_and_outputs():
    given = part("z = MatMul(x, w) y = Tanh(z)")
    assert operators(given)["Cast"] == 2
    made = without_casts(given)
    assert operators(made) == {"MatMul": 1, "Tanh": 1}
    assert border(made) == (["x", "y"], [FLOAT16, FLOAT16])
    assert made.feeds[0]["x"].dtype == np.float16
    np.testing.assert_array_equal(made.feeds[0]["x"], np.float16([[1, -2, 0.5, LARGEST]]))
    assert operators(given)["Cast"] == 2 and given.feeds[0]["x"].dtype == np.float32


def test_without_casts_computes_the_same():
    given = part("z = MatMul(x, w) y = Tanh(z)")
    feed = {"x": np.float32([[1, -2, 0.5, 3]])}
    made = without_casts(Part(given.model, (feed,)))
    expected = open_session(given.model).run(None, feed)[0]
    found = open_session(made.model).run(None, dict(made.feeds[0]))[0]
    assert found.dtype == np.float16
    np.testing.assert_allclose(found, expected, rtol=2**-10)  # a CPU casts as late as it can


def test_without_casts_keeps_inner_casts():
    made = without_casts(part("z = MatMul(x, w) m = Max(z, z) y = MatMul(m, w)"))
    assert operators(made)["Cast"] == 2  # around Max, which the tool leaves in float32


def test_without_casts_keeps_float32_inputs_and_outputs():
    """Of another's making: the tool casts every input, and every output."""
    model = ir.from_onnx_text(
        """<ir_version: 10, opset_import: ["" : 17]>
        g (float[b, 4] x, float[b, 4] a) => (float[b, 4] y, float[b, 4] z)
        { h = Cast <to = 10> (x) g = Cast <to = 10> (a) p = Mul(h, g) z = Cast <to = 1> (p)
          y = Max(x, z) }"""
    )
    feed = {name: np.ones((1, 4), np.float32) for name in ("x", "a")}
    made = without_casts(Part(model, (feed,)))
    assert border(made) == (["x", "a", "y", "z"], [FLOAT, FLOAT16, FLOAT, FLOAT16])
    assert operators(made) == {"Cast": 2, "Mul": 1, "Max": 1}
    assert [a.dtype for a in made.feeds[0].values()] == [np.float32, np.float16]
    assert open_session(made.model).run(None, dict(made.feeds[0]))[0].tolist() == [[1.0] * 4]


def test_without_casts_keeps_integers():
    given = part("i = Gather(w, k) z = Add(x, i) y = MatMul(z, w)", "float[b, 4] x, int64[b] k")
    feed = {"x": np.ones((2, 4), np.float32), "k": np.array([1, 3])}
    made = without_casts(Part(given.model, (feed,)))
    assert made.feeds[0]["k"].dtype == np.int64 and made.feeds[0]["x"].dtype == np.float16
    assert border(made)[1] == [FLOAT16, ir.DataType.INT64, FLOAT16]


@pytest.mark.parametrize("precision", ["float16", "float32"])
def test_block_timer_forms_and_configs_use_precision(
    precision: Precision, monkeypatch: pytest.MonkeyPatch
):
    """Original, forms and configs alike: their masks are fed in float16 too."""
    seen: list[Part] = []

    def measured(self: LatencyTable, parts: dict[str, Part], **_: object) -> object:
        seen.extend(parts.values())
        return {name: (1.0,) * len(part.feeds) for name, part in parts.items()}

    monkeypatch.setattr(LatencyTable, "measure", measured)
    model = random_encoder(layers=1, hidden=32, heads=4, positions=16)
    groups = group_blocks(model, find_attention(model).blocks, ffn=True)
    feeds = [example_inputs(model, Workload.of(1, 8))]
    BlockTimer(model, LatencyTable(None), feeds, precision=precision).time_blocks(groups)
    assert len(seen) > 8
    expected = np.float16 if precision == "float16" else np.float32
    for each in seen:
        read = {value.name for value in each.model.graph.inputs if value.uses()}
        assert read and {each.feeds[0][name or ""].dtype for name in read} == {np.dtype(expected)}
        assert operators(each)["Cast"] == 0


def test_block_timer_part_that_cannot_be_converted_is_unchanged():
    model = ir.from_onnx_text(
        '<ir_version: 10, opset_import: ["" : 17]> g (float[b, 4] x) => (float[b, 4] y)'
        " { y = Tanh(x) }"
    )
    given = Part(model, ({"x": np.ones((1, 4), np.float32)},))
    timer = BlockTimer(model, LatencyTable(None), given.feeds, precision="float16")
    assert timer._converted(given) is given
