"""The kinds of operators of an encoder, by their place in a run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from benchmarks.profile_operators import (
    KINDS,
    Operator,
    Profiler,
    by_onnxruntime,
    by_openvino,
    shares,
)
from tests.fixtures.make import BERT

MODEL = BERT / "eager-torchscript-17-2" / "model.onnx"


def product(us: float) -> Operator:
    return Operator("product", "MatMul", us, True)


def other(us: float, kind: str = "Add", name: str = "other") -> Operator:
    return Operator(name, kind, us, False)


def test_shares_follow_the_place_in_the_layer():
    layer = [
        product(1), product(1), other(4, "Softmax"), product(1), product(1),
        other(3), other(2, "QuantizeLinear"), product(10), other(5, "Gelu"),
        other(1, name="smooth"), product(10), other(3, "LayerNormalization"),
    ]  # fmt: skip
    found = shares(100.0, [other(7, "Gather"), *layer, *layer, other(1, "Reduce")])
    assert found == pytest.approx({
        "projections": 0.08, "attention": 0.08, "feed-forward": 0.5, "normalization": 0.12,
        "conversions": 0.06, "other": 0.16,
    })  # fmt: skip


@pytest.mark.parametrize("products", [0, 7])
def test_shares_of_unknown_layers_are_refused(products: int):
    with pytest.raises(ValueError, match=f"{products} products"):
        shares(1.0, [other(1), *([product(1)] * products)])


@pytest.mark.parametrize("profiler", [by_onnxruntime, by_openvino])
def test_profiles_name_the_products_of_each_layer(
    profiler: Callable[[Path], Profiler], tmp_path: Path
):
    pytest.importorskip("openvino")
    file = tmp_path / "model.onnx"
    file.write_bytes(MODEL.read_bytes())
    ids = np.ones((1, 8), np.int64)
    feed = {"input_ids": ids, "attention_mask": ids, "token_type_ids": ids}
    us, operators = profiler(file)(feed, 3)
    assert sum(operator.is_product for operator in operators) == 12
    found = shares(us, operators)
    assert found.keys() == set(KINDS) and sum(found.values()) == pytest.approx(1)
    assert min(found.values()) >= 0
