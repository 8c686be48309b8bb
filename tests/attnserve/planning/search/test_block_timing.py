"""Timed parts in float16 have no casts at their inputs and outputs."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping

import numpy as np
import onnx_ir as ir
import pytest

from attnserve.literals import Precision
from attnserve.models.example_inputs import example_inputs
from attnserve.planning.blocks.groups import BlockGroup, group_blocks
from attnserve.planning.search import block_timing, part_timing
from attnserve.planning.search.block_timing import BlockTimer
from attnserve.planning.search.estimates import Estimates
from attnserve.planning.search.part_timing import NOTHING_TO_CONVERT, PartTimer, without_casts
from attnserve.precision.convert import convert
from attnserve.precision.half import LARGEST
from attnserve.runtime.part_latency import LatencyTable, Part
from attnserve.runtime.session import open_session
from benchmarks.gpu.encoder import random_encoder
from graph_passes.analysis.workload import Workload
from graph_passes.errors import AttnserveError, CannotRewrite, InvariantBroken
from graph_passes.matching.find import find_attention
from tests.errors import raises

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


def encoder(layers: int = 1) -> tuple[ir.Model, list[BlockGroup]]:
    model = random_encoder(layers=layers, hidden=32, heads=4, positions=16)
    return model, group_blocks(model, find_attention(model).blocks, ffn=True)


class EqualTimes(LatencyTable):
    """Every part takes 1 ms.

    Attributes:
        parts: All parts that were timed.
    """

    def __init__(self) -> None:
        super().__init__(None)
        self.parts: list[Part] = []

    def time(self, parts: Mapping[str, Part]) -> dict[str, tuple[float, ...]]:
        self.parts.extend(parts.values())
        return {name: (1.0,) * len(part.feeds) for name, part in parts.items()}


@pytest.mark.parametrize("precision", ["float16", "float32"])
def test_block_timer_forms_and_configs_use_precision(
    precision: Precision,
):
    """Original, forms and configs alike: their masks are fed in float16 too."""
    model, groups = encoder()
    table, feeds = EqualTimes(), [example_inputs(model, Workload.of(1, 8))]
    BlockTimer(model, table, feeds, precision=precision).time_blocks(groups)
    assert len(table.parts) > 8
    expected = np.float16 if precision == "float16" else np.float32
    for each in table.parts:
        read = {value.name for value in each.model.graph.inputs if value.uses()}
        assert read and {each.feeds[0][name or ""].dtype for name in read} == {np.dtype(expected)}
        assert operators(each)["Cast"] == 0


def test_block_timer_part_that_cannot_be_converted_is_unchanged():
    model = ir.from_onnx_text(
        '<ir_version: 10, opset_import: ["" : 17]> g (float[b, 4] x) => (float[b, 4] y)'
        " { y = Tanh(x) }"
    )
    given = Part(model, ({"x": np.ones((1, 4), np.float32)},))
    timer = PartTimer(model, LatencyTable(None), given.feeds, precision="float16")
    assert timer.converted(given) is given


def broken(*_: object, **__: object) -> ir.Model:
    raise ValueError("a defect of the conversion")


def test_block_timer_failed_conversion_is_not_timed_and_block_stays_float32(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    model, groups = encoder()
    feeds = [example_inputs(model, Workload.of(1, 8))]
    in_float = BlockTimer(model, EqualTimes(), feeds).time_blocks(groups)
    monkeypatch.setattr("attnserve.precision.schemes.quantize", broken)
    table = EqualTimes()
    timer = BlockTimer(model, table, feeds, precision="int8")
    with caplog.at_level(logging.WARNING):
        timed = timer.time_blocks(groups)
    assert timed == {} and table.parts == [] and timer.time_pairs(groups, timed) == []
    for group in groups:
        assert group.blocks[0].name in caplog.text
        unit = Estimates(timed, {}, in_float, {group.key: 0.01}).unit(group)
        assert unit.configs and all(config.in_float == {0} for config in unit.configs)
    assert "a defect of the conversion" in caplog.text


def test_block_timer_failed_conversion_is_refused_if_blocks_must_be_converted(
    monkeypatch: pytest.MonkeyPatch,
):
    model, groups = encoder()
    feeds = [example_inputs(model, Workload.of(1, 8))]
    monkeypatch.setattr("attnserve.precision.schemes.to_float16", broken)
    table = EqualTimes()
    timer = BlockTimer(model, table, feeds, precision="float16")
    with pytest.raises(CannotRewrite) as refused:
        timer.time_blocks(groups)
    assert refused.value.code == "precision.failed" and table.parts == []


def test_block_timer_failed_conversion_of_operator_leaves_it_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    model, groups = encoder()
    feeds = [example_inputs(model, Workload.of(1, 8))]

    def converted(part: ir.Model, *args: object, **keywords: object) -> ir.Model:
        if any(node.domain == "com.microsoft" for node in part.graph):
            raise CannotRewrite("fused", code="precision.does_not_run")
        return part.clone()

    whole = BlockTimer(model, EqualTimes(), feeds).time_blocks(groups)
    assert any(latency.operators for latency in whole.values())
    monkeypatch.setattr(part_timing, "convert", converted)
    table = EqualTimes()
    timed = BlockTimer(model, table, feeds, precision="int8").time_blocks(groups)
    assert timed.keys() == whole.keys() and table.parts
    assert all(node.domain != "com.microsoft" for part in table.parts for node in part.model.graph)
    assert "not timed in int8: fused" in caplog.text


def defect(*_: object, **__: object) -> None:
    raise InvariantBroken("a pass violates an invariant")


@pytest.mark.parametrize(
    ("module", "function"),
    [(block_timing, "apply_config"), (block_timing, "fusion_of"), (part_timing, "convert")],
)
def test_block_timer_defect_of_a_pass_is_an_error(
    module: object, function: str, monkeypatch: pytest.MonkeyPatch
):
    """It is no configuration that is left out."""
    model, groups = encoder()
    feeds = [example_inputs(model, Workload.of(1, 8))]
    monkeypatch.setattr(module, function, defect)
    timer = BlockTimer(model, EqualTimes(), feeds, precision="int8")
    with raises(InvariantBroken, "internal.invariant"):
        timer.time_blocks(groups)


def test_block_timer_defect_of_reused_probabilities_is_an_error(monkeypatch: pytest.MonkeyPatch):
    model, groups = encoder(layers=2)
    timer = BlockTimer(model, EqualTimes(), [example_inputs(model, Workload.of(1, 8))])
    timed = timer.time_blocks(groups)
    monkeypatch.setattr(block_timing, "apply_config", defect)
    with raises(InvariantBroken, "internal.invariant"):
        timer.time_pairs(groups, timed)


@pytest.mark.parametrize(
    "code", [*sorted(NOTHING_TO_CONVERT), "precision.failed", "precision.does_not_run"]
)
def test_block_timer_only_parts_without_weights_stay_unconverted(
    code: str, monkeypatch: pytest.MonkeyPatch
):
    def refuses(*_: object, **__: object) -> ir.Model:
        raise CannotRewrite("refused", code=code)

    monkeypatch.setattr(part_timing, "convert", refuses)
    given = part("y = MatMul(x, w)")
    timer = PartTimer(given.model, LatencyTable(None), given.feeds, precision="int8")
    if code in NOTHING_TO_CONVERT:
        assert timer.converted(given) is given
    else:
        with pytest.raises(AttnserveError):
            timer.converted(given)
