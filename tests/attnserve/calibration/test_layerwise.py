"""LayerwiseRunner: values equal those of one run; nothing is computed twice or kept too long."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
import pytest

from attnserve.calibration.layerwise import LayerwiseRunner
from attnserve.context import ONE_THREAD, Device
from attnserve.runtime.interface import Batch
from attnserve.runtime.session import open_session
from graph_passes.emit.editing import Inserter, remove_unused, replace_uses
from graph_passes.errors import InvalidData
from tests.errors import raises
from tests.graph_passes.graphs import observing

CHAIN = """
    a = Mul(x, two)
    b = Sin(a)
    c = MatMul(b, W)
    d = Cos(c)
    e = Add(d, x)"""
BRANCH = """
    skip = Exp(x)
    a = Sin(x)
    left, right = Split <axis = -1, num_outputs = 2> (a)
    b = Cos(left)
    c = Concat <axis = -1> (b, right)
    d = Mul(c, skip)"""
BODY = """
    a = Sin(x)
    mean = ReduceMean <keepdims = 0> (a)
    flag = Greater(mean, zero)
    b = Cos(a)
    c = If <
        then_branch = yes () => (float[batch, n, 4] yes_c) { yes_c = Add(a, b) },
        else_branch = no () => (float[batch, n, 4] no_c) { no_c = Sub(a, b) }
    > (flag)
    d = Exp(c)"""
FOLDED = """
    Wt = Transpose(W)
    a = MatMul(x, Wt)
    b = Sin(a)
    c = MatMul(b, Wt)"""
SEQUENCE = """
    a = Sin(x)
    parts = SplitToSequence <axis = -1> (a, pair)
    b = SequenceAt(parts, first)
    c = Cos(b)
    d = SequenceAt(parts, second)
    e = Add(c, d)"""


WEIGHT = ", ".join(str(i / 10) for i in range(16))


def model(body: str, out: str) -> ir.Model:
    return ir.from_onnx_text(f"""<ir_version: 9, opset_import: ["": 18]>
    g (float[batch, n, 4] x) => (float[batch, n, m] {out})
        <float two = {{2}}, float zero = {{0}}, float[4, 4] W = {{{WEIGHT}}},
         int64 pair = {{2}}, int64 first = {{0}}, int64 second = {{1}}> {{ {body} }}""")


def batches(lengths: Sequence[int] = (3, 1, 5)) -> list[Batch]:
    random = np.random.default_rng(0)
    return [{"x": random.standard_normal((2, n, 4)).astype(np.float32)} for n in lengths]


def value(graph: ir.Model, name: str) -> ir.Value:
    if name in graph.graph.initializers:
        return graph.graph.initializers[name]
    made = [v for node in graph.graph for v in node.outputs]
    return next(v for v in (*graph.graph.inputs, *made) if v.name == name)


def values(graph: ir.Model, names: str) -> list[ir.Value]:
    return [value(graph, name) for name in names.split()]


def whole(graph: ir.Model, names: str) -> list[list[np.ndarray]]:
    """Run the whole model once per batch."""
    session = observing(graph, values(graph, names))
    return [session.run(None, batch) for batch in batches()]


def same(actual: Sequence[Sequence[np.ndarray]], expected: Sequence[Sequence[np.ndarray]]) -> None:
    for row, expected_row in zip(actual, expected, strict=True):
        for a, b in zip(row, expected_row, strict=True):
            assert a.dtype == b.dtype
            np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


def kept(runner: LayerwiseRunner) -> set[str | None]:
    """Return the names of the values that are kept per batch, except the inputs."""
    (names,) = {frozenset(held) for held in runner.known}
    return set(names)


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The operators of each session, in order."""
    operators: list[str] = []

    def opened(part: ir.Model, device: Device, **options: object) -> object:
        operators.append(" ".join(node.op_type for node in part.graph))
        return open_session(part, ONE_THREAD)

    monkeypatch.setattr("attnserve.runtime.observer.open_session", opened)
    return operators


SEGMENTS = {
    "chain": (CHAIN, ["a", "b", "c d", "e"]),
    "far apart": (CHAIN, ["b", "e"]),
    "at once": (CHAIN, ["e a c"]),
    "branch": (BRANCH, ["a", "left", "b", "d"]),
    "both parts": (BRANCH, ["right", "c", "d"]),
    "body": (BODY, ["a", "b", "c", "d"]),
    "into a body": (BODY, ["flag", "d"]),
    "constants": (FOLDED, ["a", "Wt", "c"]),
    "sequence": (SEQUENCE, ["a", "c", "e"]),
    "an input": (CHAIN, ["x", "x b", "x e"]),
    "again": (CHAIN, ["b b", "b c", "c", "b"]),
    "an initializer": (CHAIN, ["W b", "d W"]),
    "backwards": (CHAIN, ["d", "b", "e", "a"]),
}


@pytest.mark.parametrize("announced", [True, False])
@pytest.mark.parametrize("case", SEGMENTS)
def test_run_to_segments_equal_one_run(case: str, announced: bool):
    """Announcing later values only decides what is computed again."""
    body, segments = SEGMENTS[case]
    graph = model(body, segments[-1].split()[-1])
    text = ir.to_onnx_text(graph)
    runner = LayerwiseRunner(graph, batches())
    for place, names in enumerate(segments):
        later = [v for after in segments[place + 1 :] for v in values(graph, after)]
        same(
            list(runner.run_to(values(graph, names), later if announced else ())),
            whole(graph, names),
        )
    assert ir.to_onnx_text(graph) == text
    assert not kept(runner)


def test_run_to_computes_every_node_once(ran: list[str]):
    graph = model(CHAIN, "e")
    runner = LayerwiseRunner(graph, batches())
    for place, name in enumerate("bce"):
        for _ in runner.run_to(values(graph, name), values(graph, " ".join("bce"[place + 1 :]))):
            pass
    assert ran == ["Mul Sin", "MatMul", "Cos Add"]


def test_run_to_known_values_run_nothing(ran: list[str]):
    graph = model(CHAIN, "e")
    runner = LayerwiseRunner(graph, batches())
    list(runner.run_to(values(graph, "b"), values(graph, "b e")))
    list(runner.run_to(values(graph, "b x"), values(graph, "e")))
    list(runner.run_to([], values(graph, "e")))
    assert ran == ["Mul Sin"]


def test_run_to_keeps_only_values_that_are_needed_later():
    graph = model(BRANCH, "d")
    runner = LayerwiseRunner(graph, batches())
    for names, later, left in (
        ("left", "d", {"left", "right"}),  # skip depends on the input only, and is not needed yet
        ("b", "d", {"b", "right"}),
        ("skip", "d", {"b", "right", "skip"}),
        ("c", "d", {"c", "skip"}),
        ("d", "", set[str]()),
    ):
        list(runner.run_to(values(graph, names), values(graph, later)))
        assert kept(runner) == left


@pytest.mark.parametrize(
    ("text", "output", "wanted", "announced", "left"),
    [
        (BODY, "d", "flag b", "d", {"a", "b", "flag"}),  # a subgraph reads them
        (FOLDED, "c", "Wt a", "c", {"a"}),  # no constants
    ],
)
def test_run_to_keeps_values_that_later_nodes_read(
    text: str, output: str, wanted: str, announced: str, left: set[str]
):
    graph = model(text, output)
    runner = LayerwiseRunner(graph, batches())
    list(runner.run_to(values(graph, wanted), values(graph, announced)))
    assert kept(runner) == left


def test_run_to_keeps_announced_values_until_they_are_read(ran: list[str]):
    graph = model(CHAIN, "e")
    runner = LayerwiseRunner(graph, batches())
    list(runner.run_to(values(graph, "d"), values(graph, "b")))
    assert kept(runner) == {"b"}
    same(list(runner.run_to(values(graph, "b"))), whole(graph, "b"))
    assert len(ran) == 1 and not kept(runner)


def test_run_to_later_nodes_may_be_edited():
    graph = model(CHAIN, "e")
    runner = LayerwiseRunner(graph, batches())
    list(runner.run_to(values(graph, "b"), values(graph, "e")))
    product = value(graph, "c").producer()
    assert product is not None
    make = Inserter(graph.graph, product, "new")
    shifted = make.op("Add", [value(graph, "b"), make.constant(np.ones(4, np.float32), "one")], "s")
    weight = make.constant(np.eye(4, dtype=np.float32), "weight")
    replace_uses(value(graph, "c"), make.op("MatMul", [shifted, weight], "product"))
    remove_unused(graph)
    assert all(node is not product for node in graph.graph)
    same(list(runner.run_to(values(graph, "d"), values(graph, "e"))), whole(graph, "d"))
    same(list(runner.run_to(values(graph, "e"))), whole(graph, "e"))


def test_run_to_edited_node_may_read_dropped_values():
    graph = model(CHAIN, "e")
    runner = LayerwiseRunner(graph, batches())
    list(runner.run_to(values(graph, "c"), values(graph, "e")))
    last = value(graph, "e").producer()
    assert last is not None
    last.replace_input_with(1, value(graph, "a"))
    same(list(runner.run_to(values(graph, "e"))), whole(graph, "e"))


def test_run_without_a_new_cache_does_not_advance(ran: list[str]):
    graph = model(CHAIN, "e")
    runner = LayerwiseRunner(graph, batches())
    list(runner.run_to(values(graph, "b"), values(graph, "e")))
    same(list(runner.run_to(values(graph, "e b"), None)), whole(graph, "e b"))
    assert kept(runner) == {"b"}
    weight = graph.graph.initializers["W"]
    weight.const_value = ir.tensor(np.ones((4, 4), np.float32), name="W")
    same(list(runner.run_to(values(graph, "e"))), whole(graph, "e"))
    assert ran == ["Mul Sin", "MatMul Cos Add", "MatMul Cos Add"]


def test_run_to_repeated_node_gets_new_names():
    """Split runs again for the dropped output, while the other output is kept."""
    graph = model(BRANCH, "d")
    runner = LayerwiseRunner(graph, batches())
    list(runner.run_to(values(graph, "left"), values(graph, "b")))
    assert kept(runner) == {"left"}
    same(list(runner.run_to(values(graph, "c"))), whole(graph, "c"))


def test_feed_converts_batches_to_inputs():
    graph = model(CHAIN, "e")
    negated = [{"other": -batch["x"]} for batch in batches()]
    runner = LayerwiseRunner(graph, negated, feed=lambda batch: {"x": -batch["other"]})
    list(runner.run_to(values(graph, "b"), values(graph, "e")))
    same(list(runner.run_to(values(graph, "e"))), whole(graph, "e"))


def test_run_to_without_batches_is_empty():
    graph = model(CHAIN, "e")
    assert list(LayerwiseRunner(graph, []).run_to(values(graph, "e"))) == []


def test_run_to_invalid_batch_is_refused():
    graph = model(CHAIN, "e")
    wrong = [{"x": np.zeros((2, 3, 5), np.float32)}]
    with raises(InvalidData, "session.inputs_refused", "x (2, 3, 5)"):
        list(LayerwiseRunner(graph, wrong).run_to(values(graph, "e")))
    missing = [{"y": np.zeros((2, 3, 4), np.float32)}]
    with raises(InvalidData, "session.inputs_refused"):
        list(LayerwiseRunner(graph, missing).run_to(values(graph, "e")))
