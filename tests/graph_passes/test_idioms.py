"""One graph in text for each idiom: what it reads, and the near miss it leaves to others."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from graph_passes.attention import Capped, Floor, LogitStep, Mask, PositionBias
from graph_passes.idioms import LOGIT_IDIOMS, PROBABILITY_IDIOMS, LogitReading
from graph_passes.shapes import Facts, bind_axes, interpret
from tests.graph_passes.graphs import graph

LOGITS = "float[b, 3, s, t] l, float[b, 3, s, t] other, bool[b, 1, s, t] seen"
MADE = "float[b, 3, s, t] out"


def facts_of(model: ir.Model) -> Facts:
    return interpret(model, bind_axes(model.graph, batch=2, sequence=5))


def last(model: ir.Model) -> ir.Node:
    return list(model.graph)[-1]


def read(text: str) -> tuple[LogitReading | None, ir.Model]:
    """The answer of the one idiom that answers to the last node of a text."""
    model = graph(
        text,
        inputs=LOGITS,
        output=MADE,
        constants={
            "lows": np.full((1, 1, 5, 5), -np.inf, np.float32),
            "mixed": np.array([1, 2, 3, 4, 5], np.float32),
            "fold": np.array([6, 5, 5]),
            "unfold": np.array([2, 3, 5, 5]),
            "turned": np.array([2, 5, 3, 5]),
            "flattened": np.array([2, 3, 25]),
        },
    )
    answers = [idiom(last(model), facts_of(model)) for idiom in LOGIT_IDIOMS]
    answers = [answer for answer in answers if answer is not None]
    assert len(answers) <= 1
    return (answers[0] if answers else None), model


def step_of(text: str) -> LogitStep | float | None:
    reading, model = read(text)
    assert reading is not None
    assert "l" in [value.name for value in reading.candidates]
    return reading.step(model.graph.inputs[0])


@pytest.mark.parametrize(
    ("text", "scale"),
    [
        ("out = Mul(l, scale)", 0.37),
        ("out = Mul(scale, l)", 0.37),
        ("out = Div(l, inverse)", 0.37),
        ("half = Mul(scale, one)\n out = Mul(l, half)", 0.37),
    ],
)
def test_scaled_logits(text: str, scale: float) -> None:
    assert step_of(f"\n {text}") == pytest.approx(scale, rel=1e-6)


@pytest.mark.parametrize(
    "text",
    [
        "out = Div(scale, l)",
        "out = Mul(l, other)",
        "out = Mul(l, mixed)",
        "out = Mul(l, zero)",
        "out = Div(l, zero)",
        "out = Mul(l, infinity)",
    ],
)
def test_no_scaled_logits(text: str) -> None:
    assert read(f"\n {text}")[0] is None


@pytest.mark.parametrize("text", ["out = Add(l, other)", "out = Add(other, l)"])
def test_biased_logits(text: str) -> None:
    step = step_of(f"\n {text}")
    assert isinstance(step, PositionBias) and step.value.name == "other"


def test_subtracted_bias() -> None:
    step = step_of("\n out = Sub(l, other)")
    assert isinstance(step, PositionBias) and (step.value.name, step.sign) == ("other", -1)


@pytest.mark.parametrize(
    "text",
    [
        "out = Reshape(l, fold)",
        "folded = Reshape(l, fold)\n out = Reshape(folded, unfold)",
        "out = Unsqueeze(l, a0)",
    ],
)
def test_reshaped_logits(text: str) -> None:
    reading, _ = read(f"\n {text}")
    assert reading is not None and reading.step(reading.candidates[0]) is None


@pytest.mark.parametrize("text", ["out = Reshape(l, turned)", "out = Reshape(l, flattened)"])
def test_no_reshaped_logits(text: str) -> None:
    assert read(f"\n {text}")[0] is None


def test_capped_logits() -> None:
    assert step_of("\n out = Tanh(l)") == Capped()


@pytest.mark.parametrize("text", ["out = Max(l, low)", "out = Max(low, l)", "out = Clip(l, low)"])
def test_floored_logits(text: str) -> None:
    step = step_of(f"\n {text}")
    assert isinstance(step, Floor) and step.low == -1e9


@pytest.mark.parametrize(
    "text", ["out = Max(l, other)", "out = Max(l, low, other)", "out = Clip(l, low, one)"]
)
def test_no_floored_logits(text: str) -> None:
    assert read(f"\n {text}")[0] is None


@pytest.mark.parametrize(
    ("text", "fill", "keep"),
    [
        ("out = Where(seen, l, low)", -1e9, True),
        ("out = Where(seen, infinity, l)", -np.inf, False),
        ("out = Where(seen, l, lows)", -np.inf, True),
    ],
)
def test_selected_logits(text: str, fill: float, keep: bool) -> None:
    step = step_of(f"\n {text}")
    assert isinstance(step, Mask)
    assert (step.value.name, step.fill, step.keep) == ("seen", fill, keep)


@pytest.mark.parametrize("text", ["out = Where(seen, l, other)", "out = Where(seen, l, mixed)"])
def test_no_selected_logits(text: str) -> None:
    assert read(f"\n {text}")[0] is None


@pytest.mark.parametrize("text", ["out = Cast <to = 1> (l)", "out = Identity(l)"])
def test_cast_logits(text: str) -> None:
    assert step_of(f"\n {text}") is None


def test_other_operators_are_no_idiom() -> None:
    assert read("\n out = Sigmoid(l)")[0] is None


def after(text: str) -> tuple[str, list[str]]:
    """Which idiom follows the probabilities l, and the nodes it read."""
    model = graph(f"\n {text}", inputs=LOGITS, output=MADE)
    found = [(idiom.__name__, idiom(model.graph.inputs[0])) for idiom in PROBABILITY_IDIOMS]
    name, nodes = next(((name, nodes) for name, nodes in found if nodes), ("", ()))
    return name, [node.op_type for node in nodes]


@pytest.mark.parametrize("zero", ["zero", "nothing"])
def test_safe_softmax(zero: str) -> None:
    text = f"nothing = Constant <value = float {{0}}> ()\n n = IsNaN(l)\n out = Where(n, {zero}, l)"
    assert after(text) == ("safe_softmax", ["IsNaN", "Where"])


@pytest.mark.parametrize(
    "text",
    [
        "n = IsNaN(l)\n out = Where(n, one, l)",
        "n = IsNaN(other)\n out = Where(n, zero, l)",
        "n = IsNaN(l)\n out = Where(n, l, zero)",
        "n = IsInf(l)\n out = Where(n, zero, l)",
        "n = IsNaN(l)\n out = Where(n, other, l)",
    ],
)
def test_no_safe_softmax(text: str) -> None:
    assert after(text) == ("", [])


@pytest.mark.parametrize("op", ["Dropout", "Cast <to = 1>", "Identity"])
def test_forwarded(op: str) -> None:
    assert after(f"out = {op} (l)") == ("forwarded", [op.split(" ")[0]])


def test_not_forwarded() -> None:
    assert after("out = Relu(l)") == ("", [])


def test_every_idiom_is_tested_here() -> None:
    names = {idiom.__name__ for idiom in (*LOGIT_IDIOMS, *PROBABILITY_IDIOMS)}
    assert {f"test_{name}" for name in names} <= set(globals())
