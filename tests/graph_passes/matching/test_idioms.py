"""One graph in text for each idiom: what it reads, and the near miss it leaves to others."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from graph_passes.analysis.shapes import ShapeInfo, bind_axes, infer_shapes_at
from graph_passes.blocks import Capped, Floor, LogitStep, Mask, PositionBias, Weighted
from graph_passes.matching.element_map import MatchFailure
from graph_passes.matching.idioms import (
    LOGIT_IDIOMS,
    PROBABILITY_IDIOMS,
    SOFTMAXES,
    LogitMatch,
    SoftmaxMatch,
)
from tests.graph_passes.graphs import graph

LOGITS = "float[b, 3, s, t] l, float[b, 3, s, t] other, bool[b, 1, s, t] seen"
MADE = "float[b, 3, s, t] out"


def facts_of(model: ir.Model) -> ShapeInfo:
    return infer_shapes_at(model, bind_axes(model.graph, batch=2, sequence=5))


def last(model: ir.Model) -> ir.Node:
    return list(model.graph)[-1]


def read(text: str) -> tuple[LogitMatch | None, ir.Model]:
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


def test_a_difference_has_its_logits_first() -> None:
    reading, _ = read("\n out = Sub(l, other)")
    assert reading is not None and [value.name for value in reading.candidates] == ["l"]


@pytest.mark.parametrize("text", ["out = Sum(l, other, other)", "out = Sum(l)", "out = Mod(l, l)"])
def test_no_biased_logits(text: str) -> None:
    assert read(f"\n {text}")[0] is None


@pytest.mark.parametrize("text", ["out = Mul(l, other)", "out = Mul(other, l)"])
def test_weighted_logits(text: str) -> None:
    step = step_of(f"\n {text}")
    assert isinstance(step, Weighted) and step.value.name == "other"


def test_logits_weighted_by_several_numbers() -> None:
    step = step_of("\n out = Mul(l, mixed)")
    assert isinstance(step, Weighted) and step.value.name == "mixed"


@pytest.mark.parametrize("text", ["out = Mul(l, zero)", "out = Mul(infinity, l)"])
def test_no_weighted_logits(text: str) -> None:
    assert read(f"\n {text}")[0] is None


@pytest.mark.parametrize(
    "text",
    [
        "out = Reshape(l, fold)",
        "folded = Reshape(l, fold)\n out = Reshape(folded, unfold)",
        "out = Unsqueeze(l, a0)",
        "up = Unsqueeze(l, a0)\n out = Squeeze(up, a0)",
        "out = Flatten(l)",
        "out = Transpose <perm = [2, 3, 0, 1]> (l)",
    ],
)
def test_moved_logits(text: str) -> None:
    """Where they are moved to is for the labels to find out."""
    reading, model = read(f"\n {text}")
    assert reading is not None and reading.step(reading.candidates[0]) is None
    assert reading.candidates == (last(model).inputs[0],)


@pytest.mark.parametrize("text", ["out = Expand(l, unfold)", "out = Slice(l, a0, a1)"])
def test_no_moved_logits(text: str) -> None:
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


@pytest.mark.parametrize(
    "text", ["out = Cast <to = 1> (l)", "out = CastLike(l, other)", "out = Identity(l)"]
)
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


@pytest.mark.parametrize("text", ["Dropout(l)", "Cast <to = 1> (l)", "Identity(l)"])
def test_forwarded(text: str) -> None:
    assert after(f"out = {text}") == ("forwarded", [text.split("(")[0].split(" ")[0]])


@pytest.mark.parametrize("text", ["Relu(l)", "CastLike(other, l)"])
def test_not_forwarded(text: str) -> None:
    assert after(f"out = {text}") == ("", [])


@pytest.mark.parametrize("text", ["Unsqueeze(l, a0)", "Transpose <perm = [1, 0, 2, 3]> (l)"])
def test_moved_probabilities(text: str) -> None:
    assert after(f"out = {text}") == ("moved_probabilities", [text.split("(")[0].split(" ")[0]])


@pytest.mark.parametrize("text", ["Expand(l, n1)", "Reshape(other, n1)"])
def test_no_moved_probabilities(text: str) -> None:
    assert after(f"out = {text}") == ("", [])


def softmax_of(text: str, opset: int = 17) -> tuple[str, SoftmaxMatch | None]:
    """Which of the softmaxes the last node of a text is, and its reading."""
    constants = {"last_two": np.array([-2, -1], np.int64)}
    model = graph(f"\n {text}", inputs=LOGITS, output=MADE, constants=constants, opset=opset)
    answers = [(idiom, idiom(last(model), facts_of(model), opset)) for idiom in SOFTMAXES]
    found = [(idiom.__name__, answer) for idiom, answer in answers if answer is not None]
    assert len(found) <= 1
    return found[0] if found else ("", None)


STABLE = "top = ReduceMax <axes = [3]> (l)\n less = Sub(l, top)\n e = Exp(less)\n"


@pytest.mark.parametrize(
    ("text", "name", "axis"),
    [
        ("out = Softmax(l)", "softmax", 3),
        ("out = Softmax <axis = 1> (l)", "softmax", 1),
        ("log = LogSoftmax <axis = -2> (l)\n out = Exp(log)", "exponential_of_log_softmax", 2),
        (
            "e = Exp(l)\n sum = ReduceSum(e, last)\n out = Div(e, sum)",
            "softmax_in_parts",
            3,
        ),
        (f"{STABLE} sum = ReduceSum(e, last)\n out = Div(e, sum)", "softmax_in_parts", 3),
    ],
)
def test_softmax(text: str, name: str, axis: int) -> None:
    found, reading = softmax_of(text)
    assert reading is not None
    assert (found, reading.logits.name, reading.axis, reading.bias) == (name, "l", axis, None)
    assert reading.probabilities.name == "out"


def test_softmax_in_parts() -> None:
    """The largest is taken from the logits for the sake of the exponential alone."""
    text = f"{STABLE} sum = ReduceSum <axes = [-1]> (e)\n out = Div(e, sum)"
    name, reading = softmax_of(text, opset=11)
    assert reading is not None
    assert (name, reading.logits.name, reading.axis) == ("softmax_in_parts", "l", 3)


def test_exponential_of_log_softmax() -> None:
    assert softmax_of("log = LogSoftmax(l)\n out = Exp(log)")[0] == "exponential_of_log_softmax"
    assert softmax_of("log = Softmax(l)\n out = Exp(log)")[0] == ""


def test_softmax_with_bias() -> None:
    text = "out = com.microsoft.BiasSoftmax <axis = 3, is_inner_broadcast = 0> (l, other)"
    name, reading = softmax_of(text)
    assert name == "softmax_with_bias" and reading is not None and reading.bias is not None
    assert (reading.logits.name, reading.bias.name, reading.axis) == ("l", "other", 3)


@pytest.mark.parametrize(
    "text",
    [
        "e = Exp(l)\n f = Exp(other)\n sum = ReduceSum(f, last)\n out = Div(e, sum)",
        "e = Exp(l)\n sum = ReduceSum(e, last_two)\n out = Div(e, sum)",
        "e = Exp(l)\n sum = ReduceSum(e)\n out = Div(e, sum)",
        "e = Exp(l)\n sum = ReduceMean <axes = [-1]> (e)\n out = Div(e, sum)",
        "e = Exp(l)\n sum = ReduceSum(e, last)\n out = Div(sum, e)",
        "e = Tanh(l)\n sum = ReduceSum(e, last)\n out = Div(e, sum)",
        "out = com.microsoft.Softmax(l)",
        "out = Hardmax(l)",
    ],
)
def test_no_softmax(text: str) -> None:
    assert softmax_of(text) == ("", None)


def test_softmax_before_opset_13_is_refused_over_several_axes() -> None:
    with pytest.raises(MatchFailure, match="is not over the keys"):
        softmax_of("out = Softmax <axis = 2> (l)", opset=11)
    with pytest.raises(MatchFailure, match="is not over the keys"):
        softmax_of("out = com.microsoft.BiasSoftmax <axis = 2> (l, other)")


def test_every_idiom_is_tested_here() -> None:
    names = {idiom.__name__ for idiom in (*SOFTMAXES, *LOGIT_IDIOMS, *PROBABILITY_IDIOMS)}
    assert {f"test_{name}" for name in names} <= set(globals())
