"""Attention in the bodies of If, Loop and Scan, with weights of the outer graph."""

from __future__ import annotations

import re

import numpy as np
import onnx_ir as ir
import pytest

from attnserve.checks.certify import read_attention
from graph_passes.blocks import Weight
from graph_passes.emit.editing import capture_weights
from graph_passes.matching.find import find_attention
from graph_passes.passes.collaborate import Collaborate, factor
from graph_passes.passes.prune_heads import PruneHeads
from tests.graph_passes.graphs import (
    PARTS,
    PLAIN_INPUT,
    SCALE,
    TENSOR,
    D,
    H,
    K,
    V,
    body_layer,
    feeds,
    graph,
    if_model,
    masked,
    only,
    reasons,
    run,
    weights,
)

TURNS = {"turns": np.array(2, np.int64), "yes_turn": np.array(True)}


def loop(body: str, state: str = "out_turn", output: str = "out") -> str:
    """Two turns over x; ``body`` computes the new state from h_in."""
    return f"""
    {output} = Loop (turns, yes_turn, x) <
        body = turn (int64 i, bool go_in, {TENSOR} h_in) => (bool go_out, {TENSOR} {state}) {{
        go_out = Identity(go_in){body}
        }}>"""


def loop_model(tokens: str = "h_in") -> ir.Model:
    return graph(loop(body_layer(tokens, "_turn")), inputs=PLAIN_INPUT, constants=TURNS)


def weight_loop(operator: str) -> ir.Model:
    """A loop with W_Q in its state, which ``operator`` computes anew in each turn."""
    weight = f"float[{D}, {H * K}]"
    body = f"""
    out, last = Loop (turns, yes_turn, x, Wq) <
        body = turn (int64 i, bool go_in, {TENSOR} h_in, {weight} w_in)
            => (bool go_out, {TENSOR} out_turn, {weight} w_out) {{
        go_out = Identity(go_in)
        w_out = {operator}(w_in){body_layer("h_in", "_turn").replace("Wq)", "w_in)")}
        }}>"""
    return graph(body, inputs=PLAIN_INPUT, constants=TURNS)


def scan_model() -> ir.Model:
    body = f"""
    last_h, out = Scan <num_scan_inputs = 1,
        body = turn ({TENSOR} h_in, {TENSOR} x_in) => ({TENSOR} h_out, {TENSOR} out_turn) {{
        h_out = Identity(h_in){body_layer("x_in", "_turn")}
        }}> (x, several)"""
    inputs = f"{PLAIN_INPUT}, float[3, batch, sequence, {D}] several"
    output = f"float[3, batch, sequence, {D}] out"
    return graph(body, inputs=inputs, output=output)


@pytest.mark.parametrize("build", [if_model, loop_model, scan_model])
def test_body_models_run_in_onnx_runtime(build) -> None:  # type: ignore[no-untyped-def]
    x = np.random.default_rng(0).standard_normal((2, 5, D)).astype(np.float32)
    arrays = {"x": x, "flag": np.array(True), "several": np.stack([x] * 3)}
    model = build()
    names = {value.name for value in model.graph.inputs}
    got = run(model, {name: array for name, array in arrays.items() if name in names})
    assert got.shape[-3:] == x.shape and np.isfinite(got).all()


def test_find_attention_in_both_branches_of_an_if() -> None:
    matches = read_attention(if_model())
    assert [miss.reason for miss in matches.unmatched] == []
    yes, no = matches.blocks
    assert yes.graph is not no.graph
    for block in (yes, no):
        assert (block.num_heads, block.head_size, block.input_size) == (H, K, D)
        assert block.scale == pytest.approx(SCALE, rel=1e-6)
        assert block.x.name == "x" and block.output is not None
    assert [block.q.weight and block.q.weight.value.name for block in (yes, no)] == ["Wq", "Wk"]


def test_find_attention_outer_weights_are_shared_by_branches() -> None:
    yes, no = read_attention(if_model()).blocks
    assert yes.v.weight == no.v.weight
    np.testing.assert_array_equal(yes.q.matrix(), weights()["Wq"])


def test_find_attention_in_the_body_of_a_loop() -> None:
    """The tokens are the state of the loop, whose shape is constant."""
    block = only(loop_model())
    assert (block.num_heads, block.head_size, block.x.name) == (H, K, "h_in")
    assert block.scale == pytest.approx(SCALE, rel=1e-6)


def test_find_attention_in_a_body_over_outer_tokens() -> None:
    block = only(loop_model("x"))
    assert (block.num_heads, block.x.name) == (H, "x")


def test_find_attention_in_the_body_of_a_scan() -> None:
    block = only(scan_model())
    assert (block.num_heads, block.head_size, block.x.name) == (H, K, "x_in")


def test_find_attention_in_a_body_with_outer_keys() -> None:
    outside = "".join(PARTS[part] for part in ("k", "v"))
    inside = body_layer("x", "_yes")
    for name in ("kT_yes", "v_yes"):
        inside = re.sub(rf"\b{name}\b(?! =)", name.removesuffix("_yes"), inside)
    body = f"""{outside}
    out = If (flag) <
        then_branch = yes () => ({TENSOR} out_yes) {{{inside}
        }},
        else_branch = no () => ({TENSOR} out_no) {{
        out_no = Identity(x)
        }}>"""
    model = graph(body, inputs=f"{PLAIN_INPUT}, bool flag")
    block = only(model)
    assert block.k.nodes[0].graph is model.graph
    assert block.q.nodes[0].graph is block.graph is not model.graph


@pytest.mark.parametrize("rank", [H * K, 5])
def test_collaborate_in_branches_of_an_if(rank: int) -> None:
    """At R = H*K the output of either branch stays within 1e-4."""
    model = if_model()
    blocks, _ = find_attention(model)
    Collaborate.with_factors({block.name: factor(block, rank) for block in blocks})(model)
    assert [block.form for block in read_attention(model).blocks] == ["collaborative"] * 2
    x = np.random.default_rng(0).standard_normal((2, 5, D)).astype(np.float32)
    for flag in (True, False):
        arrays = {"x": x, "flag": np.array(flag)}
        difference = np.abs(run(model, arrays) - run(if_model(), arrays)).max()
        assert (difference <= 1e-4) == (rank == H * K)


def test_find_attention_in_a_body_without_projection_is_unmatched() -> None:
    model = graph(
        """
        out = If (flag) <
            then_branch = yes () => (float[batch, sequence, sequence] a) {
                xt = Transpose <perm = [0, 2, 1]> (x)
                s = MatMul(x, xt)
                a = Softmax <axis = -1> (s)
            },
            else_branch = no () => (float[batch, sequence, sequence] b) {
                xt2 = Transpose <perm = [0, 2, 1]> (x)
                b = MatMul(x, xt2)
            }>""",
        inputs=f"float[batch, sequence, {D}] x, bool flag",
        output="float[batch, sequence, sequence] out",
    )
    assert reasons(model) == [
        "the query is 'x', an input of the graph: not the output of a projection"
    ]


def test_find_attention_growing_loop_state_is_matched() -> None:
    grown = "\n grown = Concat <axis = 1> (h_in, out_turn)"
    body = loop(body_layer("h_in", "_turn") + grown, "grown")
    assert only(graph(body, inputs=PLAIN_INPUT, constants=TURNS)).num_heads == H


def test_find_attention_over_growing_loop_output_is_unmatched() -> None:
    """The length of the tokens depends on the number of iterations."""
    body = loop("\n grown = Concat <axis = 1> (h_in, h_in)", "grown", "h") + body_layer("h")
    (said,) = reasons(graph(body, inputs=PLAIN_INPUT, constants=TURNS))
    assert "could not be inferred" in said and "the shape of its state is not constant" in said


def test_find_attention_weight_in_the_state_of_a_loop_is_captured() -> None:
    """The body then reads the weight from the outer graph; the outputs stay the same."""
    model = weight_loop("Identity")
    x = np.random.default_rng(0).standard_normal((2, 5, D)).astype(np.float32)
    before = run(model, {"x": x})
    assert reasons(model)
    capture_weights(model)
    block = only(model)
    assert block.q.weight == Weight(model.graph.initializers["Wq"], (0,))
    np.testing.assert_array_equal(run(model, {"x": x}), before)


def test_capture_weights_keeps_a_state_that_changes() -> None:
    model = weight_loop("Neg")
    capture_weights(model)
    assert reasons(model)


@pytest.mark.parametrize("operator", ["BeamSearch", "GreedySearch", "Sampling"])
def test_find_attention_in_the_decoder_of_a_search(operator: str) -> None:
    """The decoder declares its inputs: a cache among them, and a mask of old and new tokens."""
    layer = body_layer("emb", "_turn")
    for made, old, past in (("kT", "[0, 2, 3, 1]", "key"), ("v", "[0, 2, 1, 3]", "value")):
        head = f"{made}_turn = Transpose <perm = {old}>"
        assert head in layer
        layer = layer.replace(head, f"new_{past} = Transpose <perm = [0, 2, 1, 3]>")
        turned = "[0, 1, 3, 2]" if made == "kT" else "[0, 1, 2, 3]"
        at = layer.index("\n", layer.index(f"new_{past} ="))
        joined = f"""
        all_{past} = Concat <axis = 2> (past_{past}, new_{past})
        {made}_turn = Transpose <perm = {turned}> (all_{past})"""
        layer = layer[:at] + joined + layer[at:]
    text = f"""
    out = com.microsoft.{operator} <decoder_start_token_id = 1, eos_token_id = 2,
        pad_token_id = 0, decoder = step (
            int64[rows, new] ids, int64[rows, all] attention_mask,
            float[rows, {H}, past_length, {K}] past_key,
            float[rows, {H}, past_length, {V}] past_value
        ) => ({TENSOR} out_turn) {{
        emb = Gather(table, ids){layer}
    }}> (input_ids, n24, n1)"""
    table = np.random.default_rng(0).standard_normal((20, D)).astype(np.float32)
    model = graph(
        text,
        inputs="int32[batch, sequence] input_ids",
        output="int32[batch, longest] out",
        constants={"table": table},
    )
    matches = read_attention(model)
    assert [miss.reason for miss in matches.unmatched] == []
    (block,) = matches.blocks
    assert (block.num_heads, block.head_size) == (H, K)


@pytest.mark.parametrize(("part", "output"), [("q", "q"), ("k", "kT"), ("v", "v")])
def test_find_attention_squeeze_in_an_if_is_followed(part: str, output: str) -> None:
    """TorchScript writes Squeeze of an axis of unknown length as an If of two ranks."""

    def model() -> ir.Model:
        text = PARTS[part].replace(f" {output} = ", " whole = ") + squeezed("whole", output)
        return graph("".join((PARTS | {part: text}).values()))

    assert only(model()).num_heads == H
    arrays, rewritten = feeds(model()), model()
    blocks, _ = find_attention(rewritten)
    Collaborate.with_factors({block.name: factor(block, H * K) for block in blocks})(rewritten)
    np.testing.assert_allclose(run(rewritten, arrays), run(model(), arrays), atol=1e-4)
    pruned, masks = model(), {block.name: [1, 0, 1] for block in blocks}
    PruneHeads(masks)(pruned)
    np.testing.assert_allclose(run(pruned, arrays), run(masked(model(), masks), arrays), atol=1e-4)


def test_find_attention_mask_squeezed_in_an_if_is_read() -> None:
    text = "\n wide = Unsqueeze(mask, a0)" + squeezed("wide", "narrow", taken=True)
    text += "\n m = Add(s, narrow)"
    assert only(graph("".join((PARTS | {"mask": text}).values()))).num_heads == H


def squeezed(value: str, output: str, *, taken: bool = False) -> str:
    """An If that squeezes the first axis of a value if its length is 1."""
    ranks = [", ".join(f"{branch}{axis}" for axis in range(4)) for branch in ("yes", "no")]
    return f"""
        shape_of = Shape({value})
        first = Gather(shape_of, i0)
        is_one = Equal(first, i1)
        {output} = If (is_one) <
            then_branch = yes () => (float[{ranks[0]}] narrow_yes) {{
                narrow_yes = Squeeze({value}, a0)
            }},
            else_branch = no () => (float[{ranks[1]}{", more" * taken}] narrow_no) {{
                narrow_no = Identity({value})
            }}>"""
