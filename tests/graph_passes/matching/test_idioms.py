"""Each idiom: the nodes that it matches, and near misses that no idiom of the list matches."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from graph_passes.analysis.axes import bind_axes
from graph_passes.analysis.shapes import ShapeInfo, infer_shapes_at
from graph_passes.analysis.workload import Workload
from graph_passes.matching.element_map import MatchFailure
from graph_passes.matching.idioms import (
    LOGIT_IDIOMS,
    PROBABILITY_IDIOMS,
    SOFTMAXES,
    LogitMatch,
    SoftmaxMatch,
)
from tests.graph_passes.graphs import graph

INPUTS = "float[b, 3, s, t] l, float[b, 3, s, t] other, bool[b, 1, s, t] seen"
CONSTANTS = {
    "lows": np.full((1, 1, 5, 5), -np.inf, np.float32),
    "mixed": np.array([1, 2, 3, 4, 5], np.float32),
    "fold": np.array([6, 5, 5]),
    "unfold": np.array([2, 3, 5, 5]),
    "last_two": np.array([-2, -1], np.int64),
}


def model_of(text: str, opset: int = 17) -> ir.Model:
    output = "float[b, 3, s, t] out"
    return graph(f"\n {text}", inputs=INPUTS, output=output, constants=CONSTANTS, opset=opset)


def shapes_of(model: ir.Model) -> ShapeInfo:
    return infer_shapes_at(model, bind_axes(model.graph, Workload.of(2, 5)))


def match_logits(model: ir.Model) -> tuple[str, LogitMatch | None]:
    """The only logit idiom that matches the last node, and its match."""
    shapes, node = shapes_of(model), model.graph[-1]
    matches = [(idiom.__name__, idiom(node, shapes)) for idiom in LOGIT_IDIOMS]
    matches = [(name, match) for name, match in matches if match is not None]
    assert len(matches) <= 1
    return matches[0] if matches else ("", None)


LOGITS: dict[str, dict[str, Any]] = {
    "scaled_logits": {
        "out = Mul(l, scale)": 0.37,
        "out = Mul(scale, l)": 0.37,
        "out = Div(l, inverse)": 0.37,
        "half = Mul(scale, one)\n out = Mul(l, half)": 0.37,
    },
    "biased_logits": {
        "out = Add(l, other)": ("PositionBias", "other", {"sign": 1}),
        "out = Add(other, l)": ("PositionBias", "other", {"sign": 1}),
        "out = Sub(l, other)": ("PositionBias", "other", {"sign": -1}),
    },
    "weighted_logits": {
        "out = Mul(l, other)": ("Weighted", "other", {}),
        "out = Mul(other, l)": ("Weighted", "other", {}),
        "out = Mul(l, mixed)": ("Weighted", "mixed", {}),
    },
    "selected_logits": {
        "out = Where(seen, l, low)": ("Mask", "seen", {"fill": -1e9, "keep": True}),
        "out = Where(seen, infinity, l)": ("Mask", "seen", {"fill": -np.inf, "keep": False}),
        "out = Where(seen, l, lows)": ("Mask", "seen", {"fill": -np.inf, "keep": True}),
    },
    "cast_logits": dict.fromkeys(
        ("out = Cast <to = 1> (l)", "out = CastLike(l, other)", "out = Identity(l)")
    ),
    "moved_logits": dict.fromkeys(
        (
            "out = Reshape(l, fold)",
            "folded = Reshape(l, fold)\n out = Reshape(folded, unfold)",
            "out = Unsqueeze(l, a0)",
            "up = Unsqueeze(l, a0)\n out = Squeeze(up, a0)",
            "out = Flatten(l)",
            "out = Transpose <perm = [2, 3, 0, 1]> (l)",
        )
    ),
    "capped_logits": {"out = Tanh(l)": ("Capped", "", {})},
    "floored_logits": dict.fromkeys(
        ("out = Max(l, low)", "out = Max(low, l)", "out = Clip(l, low)"),
        ("Floor", "", {"low": -1e9}),
    ),
}
"""Idiom -> text -> the step: a factor, None, or its type, the name of its value and its fields."""


@pytest.mark.parametrize(
    ("idiom", "text"), [(idiom, text) for idiom, texts in LOGITS.items() for text in texts]
)
def test_logit_idiom_matches(idiom: str, text: str) -> None:
    model, expected = model_of(text), LOGITS[idiom][text]
    name, match = match_logits(model)
    assert match is not None and name == idiom
    node = model.graph[-1]
    logits = node.inputs[0] if idiom == "moved_logits" else model.graph.inputs[0]
    assert logits is not None and logits in match.candidates
    assert node.op_type != "Sub" or len(match.candidates) == 1
    step = match.step(logits)
    if not isinstance(expected, tuple):
        assert step == (expected and pytest.approx(expected, rel=1e-6))
        return
    kind, value, fields = expected
    assert type(step).__name__ == kind
    assert getattr(getattr(step, "value", None), "name", "") == value
    assert {key: getattr(step, key) for key in fields} == fields


@pytest.mark.parametrize(
    "text",
    [
        *("out = Div(scale, l)", "out = Mul(l, zero)", "out = Div(l, zero)"),
        *("out = Mul(l, infinity)", "out = Mul(infinity, l)"),
        *("out = Sum(l, other, other)", "out = Sum(l)", "out = Mod(l, l)"),
        *("out = Expand(l, unfold)", "out = Slice(l, a0, a1)"),
        *("out = Max(l, other)", "out = Max(l, low, other)", "out = Clip(l, low, one)"),
        *("out = Where(seen, l, other)", "out = Where(seen, l, mixed)"),
        "out = Sigmoid(l)",
    ],
)
def test_logit_idiom_near_miss_returns_none(text: str) -> None:
    assert match_logits(model_of(text)) == ("", None)


NAN = "n = IsNaN(l)\n out = Where"
PROBABILITIES = {
    "safe_softmax": {
        f"{NAN}(n, zero, l)": ["IsNaN", "Where"],
        f"nothing = Constant <value = float {{0}}> ()\n {NAN}(n, nothing, l)": ["IsNaN", "Where"],
    },
    "forwarded": {
        "out = Dropout(l)": ["Dropout"],
        "out = Cast <to = 1> (l)": ["Cast"],
        "out = Identity(l)": ["Identity"],
    },
    "moved_probabilities": {
        "out = Unsqueeze(l, a0)": ["Unsqueeze"],
        "out = Transpose <perm = [1, 0, 2, 3]> (l)": ["Transpose"],
    },
    "": {
        f"{NAN}(n, one, l)": [],
        f"{NAN}(n, l, zero)": [],
        f"{NAN}(n, other, l)": [],
        "n = IsNaN(other)\n out = Where(n, zero, l)": [],
        "n = IsInf(l)\n out = Where(n, zero, l)": [],
        "out = Relu(l)": [],
        "out = CastLike(other, l)": [],
        "out = Expand(l, n1)": [],
        "out = Reshape(other, n1)": [],
    },
}
"""Idiom -> text -> operators of the matched nodes."""


@pytest.mark.parametrize(
    ("idiom", "text"), [(idiom, text) for idiom, texts in PROBABILITIES.items() for text in texts]
)
def test_probability_idiom_matches(idiom: str, text: str) -> None:
    value = model_of(text).graph.inputs[0]
    matches = [(function.__name__, function(value)) for function in PROBABILITY_IDIOMS]
    name, nodes = next(((name, nodes) for name, nodes in matches if nodes), ("", ()))
    assert (name, [node.op_type for node in nodes]) == (idiom, PROBABILITIES[idiom][text])


def match_softmax(text: str, opset: int = 17) -> tuple[str, SoftmaxMatch | None]:
    """The only softmax idiom that matches the last node of a text, and its match."""
    model = model_of(text, opset)
    matches = [(i.__name__, i(model.graph[-1], shapes_of(model), opset)) for i in SOFTMAXES]
    matches = [(name, match) for name, match in matches if match is not None]
    assert len(matches) <= 1
    return matches[0] if matches else ("", None)


STABLE = "top = ReduceMax <axes = [3]> (l)\n less = Sub(l, top)\n e = Exp(less)\n"
BIAS = "out = com.microsoft.BiasSoftmax <axis = 3, is_inner_broadcast = 0> (l, other)"


@pytest.mark.parametrize(
    ("name", "text", "opset", "axis"),
    [
        ("softmax", "out = Softmax(l)", 17, 3),
        ("softmax", "out = Softmax <axis = 1> (l)", 17, 1),
        ("exponential_of_log_softmax", "log = LogSoftmax(l)\n out = Exp(log)", 17, 3),
        ("exponential_of_log_softmax", "g = LogSoftmax <axis = -2> (l)\n out = Exp(g)", 17, 2),
        ("softmax_in_parts", "e = Exp(l)\n z = ReduceSum(e, last)\n out = Div(e, z)", 17, 3),
        ("softmax_in_parts", f"{STABLE} z = ReduceSum(e, last)\n out = Div(e, z)", 17, 3),
        ("softmax_in_parts", f"{STABLE} z = ReduceSum <axes = [-1]> (e)\n out = Div(e, z)", 11, 3),
        ("softmax_with_bias", BIAS, 17, 3),
    ],
)
def test_softmax_idiom_matches(name: str, text: str, opset: int, axis: int) -> None:
    idiom, match = match_softmax(text, opset)
    assert match is not None
    bias = None if match.bias is None else match.bias.name
    assert (idiom, match.logits.name, match.axis) == (name, "l", axis)
    assert bias == ("other" if name == "softmax_with_bias" else None)
    assert match.probabilities.name == "out"


@pytest.mark.parametrize(
    "text",
    [
        "e = Exp(l)\n f = Exp(other)\n sum = ReduceSum(f, last)\n out = Div(e, sum)",
        "e = Exp(l)\n sum = ReduceSum(e, last_two)\n out = Div(e, sum)",
        "e = Exp(l)\n sum = ReduceSum(e)\n out = Div(e, sum)",
        "e = Exp(l)\n sum = ReduceMean <axes = [-1]> (e)\n out = Div(e, sum)",
        "e = Exp(l)\n sum = ReduceSum(e, last)\n out = Div(sum, e)",
        "e = Tanh(l)\n sum = ReduceSum(e, last)\n out = Div(e, sum)",
        "log = Softmax(l)\n out = Exp(log)",
        "out = com.microsoft.Softmax(l)",
        "out = Hardmax(l)",
    ],
)
def test_softmax_idiom_near_miss_returns_none(text: str) -> None:
    assert match_softmax(text) == ("", None)


@pytest.mark.parametrize(
    ("text", "opset"),
    [
        ("out = Softmax <axis = 2> (l)", 11),
        ("out = com.microsoft.BiasSoftmax <axis = 2> (l, other)", 17),
    ],
)
def test_softmax_idiom_over_several_axes_raises(text: str, opset: int) -> None:
    with pytest.raises(MatchFailure, match="not over the keys"):
        match_softmax(text, opset)


def test_all_idioms_are_tested() -> None:
    assert {idiom.__name__ for idiom in LOGIT_IDIOMS} == LOGITS.keys()
    assert {idiom.__name__ for idiom in PROBABILITY_IDIOMS} == PROBABILITIES.keys() - {""}
    assert len(SOFTMAXES) == 4
