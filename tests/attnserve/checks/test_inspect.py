"""Attention blocks, cost and unmatched attention of a model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import numpy_helper

from attnserve.checks.inspect import inspect, inspect_graph
from attnserve.models.onnx_files import load_model
from tests.architectures import MINILM_EXPORTS
from tests.fixtures.make import TINY_EXPORTS
from tests.graph_passes.graphs import graph
from tests.onnx_text import SOFTMAX

named = pytest.mark.parametrize(
    "export", TINY_EXPORTS, ids=lambda export: "-".join(map(str, export))
)


PASSES = ("collaborate", "prune_heads", "reuse_attention", "skip_attention")
EVERY = dict.fromkeys(PASSES, True)
FIRST = "it is the first attention block: there are no probabilities to reuse"


@named
def test_inspect_tiny_bert_blocks_and_macs(tiny_export: Callable[..., Path], export: tuple):
    content = inspect(tiny_export(*export), batch=2, sequence=16).to_json()
    assert content["missed"] == []
    first, second = content["attention"]
    assert list(first) == [
        "name", "kind", "num_heads", "num_kv_heads", "reused_heads", "head_size", "v_head_size",
        "input_size", "scale", "position", "form", "idiom", "certified", "max_abs_error", "macs",
        "rewrites",
    ]  # fmt: skip
    expected = {
        "kind": "self",
        "num_heads": 4,
        "num_kv_heads": 4,
        "head_size": 8,
        "v_head_size": 8,
        "input_size": 32,
        "position": "none",
        "form": "standard",
        "certified": True,
        # 4 projections of 2 x 16 tokens, and q k^T and p v of 2 x 4 heads.
        "macs": 4 * 32 * 32 * 32 + 2 * (2 * 4 * 16 * 16 * 8),
    }
    assert expected.items() <= first.items()
    assert first["rewrites"] == EVERY | {"reuse_attention": FIRST} and second["rewrites"] == EVERY
    assert first["scale"] == pytest.approx(8**-0.5, rel=1e-6)
    assert first["max_abs_error"] <= 1e-4
    # Two layers: attention, and the two products of the feed-forward network.
    attention, network = 2 * expected["macs"], 2 * 2 * (2 * 16 * 32 * 64)
    assert content["macs"] == {
        "batch": 2,
        "sequence": 16,
        "total": attention + network,
        "attention": attention,
    }


@pytest.mark.parametrize("export", MINILM_EXPORTS)
def test_inspect_minilm_certifies_every_layer(
    minilm_export: Callable[[str, str, int], Path], export: tuple[str, str, int]
):
    content = inspect(minilm_export(*export)).to_json()
    assert len(content["attention"]) == 6 and content["missed"] == []
    for index, block in enumerate(content["attention"]):
        assert f"layer.{index}" in block["name"]
        assert (block["num_heads"], block["head_size"], block["input_size"]) == (12, 32, 384)
        assert block["scale"] == pytest.approx(32**-0.5, rel=1e-5)
        assert block["certified"] and block["max_abs_error"] <= 1e-4
        assert block["rewrites"] == (EVERY if index else EVERY | {"reuse_attention": FIRST})
    # 6 layers of 4 D^2 + 2 S D MACs a token.
    assert content["macs"]["attention"] == 6 * 128 * (4 * 384**2 + 2 * 128 * 384)


def test_inspect_parameters_are_elements_of_float_weights(tiny: Path):
    proto = onnx.load(tiny / "model.onnx")
    sizes = [numpy_helper.to_array(t).size for t in proto.graph.initializer if t.data_type == 1]
    assert inspect(tiny).parameters == sum(sizes)


def test_inspect_model_without_attention_counts_macs():
    model = ir.from_onnx_text(
        '<ir_version: 8, opset_import: ["" : 17]> g (float[n, 4] x, float[4, 5] w)'
        " => (float[n, 5] y) { y = MatMul(x, w) }"
    )
    content = inspect_graph(model, batch=3, sequence=7).to_json()
    assert content["attention"] == [] and content["missed"] == []
    assert content["macs"] == {"batch": 3, "sequence": 7, "total": 60, "attention": 0}


def test_inspect_softmax_without_attention_is_missed_with_reason():
    (miss,) = inspect_graph(ir.from_onnx_text(SOFTMAX), batch=1, sequence=8).to_json()["missed"]
    assert miss["node"] == "last" and miss["reason"]


def test_inspect_uncounted_operator_is_named_and_total_is_none(tiny: Path):
    model = load_model(tiny / "model.onnx")
    output = model.graph.outputs[0]
    node = ir.node("Mystery", [output], domain="unknown.domain", name="mystery")
    node.outputs[0].name = "mystery"
    model.graph.append(node)
    model.opset_imports["unknown.domain"] = 1
    model.graph.outputs[0] = node.outputs[0]
    content = inspect_graph(model, batch=1, sequence=8).to_json()
    assert content["macs"]["total"] is None
    assert any("mystery" in line for line in content["uncounted"])
    assert len(content["attention"]) == 2, "what is before it is read"


def test_inspect_is_reproducible(tiny: Path):
    assert inspect(tiny, seed=1).to_json() == inspect(tiny, seed=1).to_json()


def test_inspect_rewritten_model_has_its_form(tiny: Path, tmp_path: Path):
    from attnserve import optimize

    optimize(tiny, tmp_path / "new", collab_dk=16, mixing="dense", layers=["0"])
    first, second = inspect(tmp_path / "new", sequence=16).to_json()["attention"]
    assert (first["form"], first["num_heads"], first["head_size"]) == ("collaborative", 4, 16)
    already = "its heads are collaborative already"
    assert first["rewrites"] == EVERY | {
        "collaborate": already,
        "prune_heads": "its heads are collaborative: they share their queries and keys",
        "reuse_attention": FIRST,
    }
    assert second["form"] == "standard" and second["rewrites"] == EVERY
    # x W~Q and y W~K, the mixing, scores over R; a random BERT has no query bias, so no content.
    S, D, R, H = 16, 32, 16, 4
    assert first["macs"] == 2 * S * D * R + 2 * S * D * D + S * H * R + H * S * S * (R + D // H)
    assert first["scale"] == pytest.approx(8**-0.5, rel=1e-6), "never from R"
    assert np.isfinite(first["max_abs_error"])


@pytest.mark.parametrize(
    ("inputs", "counted"),
    [
        ("float[n, 16, 4] x", (3, 16)),
        ("float[2, 16, 4] x", (2, 16)),
        ("float[n, t, 4] x", (3, 128)),
        ("float[n, 16, 4] x, float[n, past, 4] cache", (3, 128)),
    ],
)
def test_inspect_fixed_sizes_are_those_of_the_model(inputs: str, counted: tuple[int, int]):
    model = graph("y = MatMul(x, w)", inputs=inputs, output="float[n, t, 5] y",
                  constants={"w": np.ones((4, 5), np.float32)})  # fmt: skip
    macs = inspect_graph(model, batch=3, sequence=128).to_json()["macs"]
    assert (macs["batch"], macs["sequence"]) == counted
    if "cache" not in inputs:
        assert macs["total"] == counted[0] * counted[1] * 20
