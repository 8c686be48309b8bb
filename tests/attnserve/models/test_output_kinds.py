"""What outputs hold, by their names and shapes."""

from __future__ import annotations

import onnx_ir as ir
import pytest

from attnserve.models.output_kinds import counts_tokens, is_cache_name


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("present.0.key", True), ("present_key_values", True), ("presents", True),
        ("past_key_values.3.value", True), ("new_cache_1", True), ("key_cache", True),
        ("layers.0.past", True), ("representation", False), ("presentation", False),
        ("last_hidden_state", False),
    ],
)  # fmt: skip
def test_caches_are_known_by_whole_words(name: str, expected: bool):
    assert is_cache_name(name) is expected


@pytest.mark.parametrize(
    ("mask", "output", "body", "expected"),
    [
        ("b, t", "b, t, 4", "Unsqueeze(x, minus)", True),
        ("b, t", "b", "ReduceSum <keepdims = 0> (x, minus)", False),
        ("b, t", "b, t", "Identity(x)", True),
        ("b, t", "b, n", "ReduceSum <keepdims = 1> (x, minus)", False),
        ("b, t", "b, 8", "Identity(x)", False),
        ("b, 8", "b, 8", "Identity(x)", True),
    ],
)
def test_output_counts_tokens_if_its_length_is_that_of_the_input(
    mask: str, output: str, body: str, expected: bool
):
    model = ir.from_onnx_text(f"""<ir_version: 10, opset_import: ["" : 20]>
        g (float[{mask}] x, int64[{mask}] attention_mask) => (float[{output}] y)
        <int64[1] minus = {{-1}}> {{ y = {body} }}""")
    assert counts_tokens(model, model.graph.outputs[0]) is expected
