"""A plan that was written is read again, and nothing in it is believed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st

from attnserve.checks.certify import read_attention
from attnserve.planning.apply import carry_out
from attnserve.planning.plan import PARTS, Plan, from_hex, read_plan, to_hex
from graph_passes.errors import InvalidArgument
from tests.attnserve.planning.test_request import NAMES, SIZE, other_mask, plan, stack
from tests.graph_passes.graphs import PARTS as PARTS_OF_TEXT
from tests.graph_passes.graphs import H, K, V, graph

FEED_FORWARDS = {"ffn_0": 6, "ffn_1": 12}


def read(content: Mapping[str, Any], *, checked: bool = True) -> Plan:
    return read_plan(content, stack()[1].blocks, FEED_FORWARDS if checked else None)


def everything() -> Plan:
    return Plan(
        skip={NAMES[0]: "constant"},
        masks={NAMES[1]: [1, 0, 1]},
        edges={NAMES[3]: {2: (NAMES[1], 0), 0: (NAMES[2], 1)}},
        ranks={NAMES[2]: 6, NAMES[3]: K},
        head_sizes={NAMES[2]: 3},
        neurons={"ffn_0": [1, 0, 0, 1, 1, 0], "ffn_1": [0] * 11 + [1]},
        forms={},
        gelu=["ffn_1"],
        sums=True,
        precision="int8",
    )


@pytest.mark.parametrize("checked", [True, False])
def test_a_plan_that_is_written_and_read_is_the_plan(checked: bool):
    fused = Plan({}, {NAMES[1]: [1, 0, 1]}, {}, {}, {},
                 forms={NAMES[1]: "attention", NAMES[2]: "multi_head"})  # fmt: skip
    for whole in (everything(), fused, Plan({}, {}, {}, {}, {})):
        assert set(whole.to_json()) == set(PARTS)
        assert read(json.loads(json.dumps(whole.to_json())), checked=checked) == whole
    assert read({}) == Plan({}, {}, {}, {}, {})


def test_a_plan_that_was_made_is_read_as_it_was_made():
    found = plan(skip=["2:constant"], prune=0.25, reuse="partial:1", collab_dk=6, head_dk=2)
    again = read(json.loads(json.dumps(found.to_json())))
    assert again.to_json() == found.to_json() and again.changed


def test_what_a_plan_says_of_an_index_is_said_of_its_layer():
    found = read({
        "skip": {"0": "affine"}, "prune_heads": {"1": [1, 0, 1]}, "reuse": {"3": {"0": ["2", 1]}},
        "collab_dk": {"3": 6}, "head_dk": {"3": 2}, "fuse": {"1": "attention"},
    })  # fmt: skip
    edges: Any = {NAMES[3]: {0: (NAMES[2], 1)}}
    assert found == Plan({NAMES[0]: "affine"}, {NAMES[1]: [1, 0, 1]}, edges, {NAMES[3]: 6},
                         {NAMES[3]: 2}, forms={NAMES[1]: "attention"})  # fmt: skip
    model = stack()[0].clone()
    done = carry_out(found, model, stack()[0], None, fit=False, report=lambda *_: None)
    assert [(step.rewrite, step.block) for step in done.steps] == [
        ("skip", NAMES[0]), ("prune", NAMES[1]), ("reuse", NAMES[3]), ("collaborate", NAMES[3]),
        ("fuse", NAMES[1]),
    ]  # fmt: skip


def test_masks_of_which_all_stay_are_no_rewrite():
    assert read({"prune_heads": {"1": [1, 1, 1]}, "prune_neurons": {"ffn_0": "6:fc"}}) == read({})


NO_OBJECTS: list[Any] = [[], [1], "x", 1, 0.5, True, None, float("inf")]
NO_SIZES: list[Any] = [0, -1, SIZE + 1, 10**30, 1.0, 0.5, float("inf"), float("nan"), True, None,
                       "3", [], [3], {}]  # fmt: skip
NO_NAMES: list[Any] = [[], ["affine"], {}, {"x": 1}, 0, 1.5, True, None, "", "AFFINE", "linear",
                       float("nan"), "x" * 10**5]  # fmt: skip


def mistakes() -> dict[str, tuple[Any, str]]:
    objects = ("skip", "prune_heads", "reuse", "collab_dk", "head_dk", "prune_neurons", "fuse")
    found: dict[str, tuple[Any, str]] = {}
    for part in objects:
        for i, value in enumerate(NO_OBJECTS):
            found[f"{part} no object {i}"] = {part: value}, f"{part} is .*expected an object"
    for part in ("skip", "fuse"):
        for i, value in enumerate(NO_NAMES):
            found[f"{part} no name {i}"] = {part: {"0": value}}, f"{part} of attention_0 is"
    for i, value in enumerate(NO_NAMES):
        found[f"no precision {i}"] = {"precision": value}, "precision is .*float16, bfloat16, int8"
    for i, value in enumerate([[], "true", 1, 0, None, {}, 0.0]):
        found[f"no sums {i}"] = {"sum_residuals": value}, "sum_residuals is .*False, True"
    for i, value in enumerate([{}, "ffn_0", None, 1, [1], [["ffn_0"]], [None], True]):
        found[f"no gelu {i}"] = {"fuse_gelu": value}, "fuse_gelu is .*a list of names"
    for i, value in enumerate(NO_SIZES):
        found[f"no rank {i}"] = {"collab_dk": {"0": value}}, f"collab_dk of .*expected 1 to {SIZE}"
        sizes = {"collab_dk": {"0": 6}, "head_dk": {"0": value}}
        found[f"no size {i}"] = sizes, f"head_dk of attention_0 is .*expected 1 to {K}"
    for part in ("skip", "prune_heads", "reuse", "collab_dk", "head_dk", "fuse"):
        for i, layer in enumerate(["x", "", "9", "-1", "0.0", "attention_9", "0" * 200, "²"]):
            found[f"{part} unknown {i}"] = {part: {layer: 1}}, "no attention is called"
        twice = {part: {"1": 1, "attention_1": 1}}
        found[f"{part} twice"] = twice, f"{part} names attention_1 twice"
    for i, value in enumerate(
        [None, 1, [], [1, 0, 0, 1, 1, 0], {}, True, "", "6", "6:", ":98", "x"]
    ):
        neurons = {"prune_neurons": {"ffn_0": value}}
        found[f"no neurons {i}"] = neurons, "prune_neurons of ffn_0: .*is no mask"
    return found


MISTAKES: dict[str, tuple[Any, str]] = mistakes() | {
    "an unknown part": ({"skipp": {}}, "'skipp' is none of skip, prune_heads"),
    "a long unknown part": ({"x" * 10**5: {}}, "is none of skip, prune_heads"),
    "more than the head holds": (
        {"collab_dk": {"0": 6}, "head_dk": {"0": K + 1}},
        f"expected 1 to {K}",
    ),
    "more than is shared": ({"collab_dk": {"0": 2}, "head_dk": {"0": 3}}, "expected 1 to 2"),
    "sparse, not factored": (
        {"head_dk": {"0": 2}},
        "head_dk names attention_0, which collab_dk do",
    ),
    "more than pruning left": (
        {"prune_heads": {"1": [1, 0, 1]}, "collab_dk": {"1": 2 * K + 1}},
        f"2 heads x {K} .*expected 1 to {2 * K}",
    ),
    "more than reuse left": (
        {"reuse": {"1": {"0": ["0", 0], "1": ["0", 0]}}, "collab_dk": {"1": K + 1}},
        f"1 heads x {K} .*expected 1 to {K}",
    ),
    "factored without heads": (
        {"prune_heads": {"1": [0, 0, 0]}, "collab_dk": {"1": 4}},
        "collab_dk names attention_1, of whose own heads none is left",
    ),
    "factored without own heads": (
        {"reuse": {"1": {str(h): ["0", h] for h in range(H)}}, "collab_dk": {"1": 4}},
        "of whose own heads none is left",
    ),
    "skipped and pruned": (
        {"skip": {"1": "affine"}, "prune_heads": {"attention_1": [1, 0, 1]}},
        "prune_heads names attention_1, which skip leaves out",
    ),
    "skipped and reused": (
        {"skip": {"1": "affine"}, "reuse": {"1": {"0": ["0", 0]}}},
        "reuse names attention_1, which skip leaves out",
    ),
    "skipped and factored": (
        {"skip": {"1": "affine"}, "collab_dk": {"1": 4}},
        "collab_dk names attention_1, which skip leaves out",
    ),
    "skipped and fused": (
        {"skip": {"1": "affine"}, "fuse": {"1": "attention"}},
        "fuse names attention_1, which skip leaves out",
    ),
    "skipped and a source": (
        {"skip": {"1": "affine"}, "reuse": {"2": {"0": ["1", 0]}}},
        "needs head 0 of attention_1, which is taken out",
    ),
    "pruned and a source": (
        {"prune_heads": {"1": [1, 0, 1]}, "reuse": {"2": {"0": ["1", 1]}}},
        r"attention_2\[0\] <- attention_1\[1\] needs head 1 of attention_1, which is taken out",
    ),
    "pruned and reused": (
        {"prune_heads": {"2": [0, 1, 1]}, "reuse": {"2": {"0": ["1", 1]}}},
        "needs head 0 of attention_2, which is taken out",
    ),
    "fused and factored": (
        {"fuse": {"1": "attention"}, "collab_dk": {"1": 4}},
        "fuse and collab_dk both name attention_1",
    ),
    "fused and reused": (
        {"fuse": {"1": "attention"}, "reuse": {"1": {"0": ["0", 0]}}},
        "fuse and reuse both name attention_1",
    ),
    "fused and a source": (
        {"fuse": {"0": "attention"}, "reuse": {"1": {"0": ["0", 0]}}},
        "fuse and reuse both name attention_0",
    ),
    "a short mask": ({"prune_heads": {"1": [1, 0]}}, "mask of attention_1 has 2 entries"),
    "a mask of text": ({"prune_heads": {"1": "101"}}, 'has "101", expected a list of 0 and 1'),
    "a mask of true": ({"prune_heads": {"1": [True, 0, 1]}}, "expected a list of 0 and 1"),
    "no head left": ({"prune_heads": {n: [0] * H for n in NAMES}}, "no attention would be left"),
    "an edge forward": ({"reuse": {"1": {"0": ["2", 0]}}}, "must be an earlier layer"),
    "an edge of no head": ({"reuse": {"1": {"9": ["0", 0]}}}, "attention_1 has no head 9"),
    "an edge from nowhere": ({"reuse": {"1": {"0": ["x", 0]}}}, "no attention is called 'x'"),
    "no edge": ({"reuse": {"1": {"0": [0]}}}, "expected .*earlier layer"),
    "a list of edges": ({"reuse": {"1": [["0", 0]]}}, "expected an object by head"),
    "an edge of a reused head": (
        {"reuse": {"1": {"0": ["0", 0]}, "2": {"0": ["1", 0]}}},
        "the source is reused itself",
    ),
    "an unknown feed-forward": (
        {"prune_neurons": {"ffn_9": "6:98"}},
        "prune_neurons names 'ffn_9', and no feed-forward has this name",
    ),
    "an unknown activation": ({"fuse_gelu": ["ffn_9"]}, "fuse_gelu names 'ffn_9', and no feed-f"),
    "neurons of another": ({"prune_neurons": {"ffn_0": "12:980"}}, "a mask of 12, expected 6"),
    "no neuron left": (
        {"prune_neurons": {"ffn_0": "6:00"}},
        "prune_neurons of ffn_0 leaves no neu",
    ),
}


def told(error: InvalidArgument) -> str:
    """Two lines that fit on a screen, the first of which says where it is from."""
    lines = str(error).splitlines()
    assert error.exit_code == 2 and len(lines) == 2 and max(map(len, lines)) < 500
    assert lines[0].startswith("--plan: ")
    return lines[0]


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_a_plan_is_told_in_a_line(mistake: str):
    content, reason = MISTAKES[mistake]
    with pytest.raises(InvalidArgument, match=reason) as caught:
        read(content)
    told(caught.value)


def test_names_of_feed_forwards_are_checked_where_they_are_known():
    content = {"prune_neurons": {"ffn_9": "6:98"}, "fuse_gelu": ["ffn_8"]}
    assert read(content, checked=False).neurons == {"ffn_9": [1, 0, 0, 1, 1, 0]}
    with pytest.raises(InvalidArgument, match="leaves no neuron"):
        read({"prune_neurons": {"ffn_9": "6:00"}}, checked=False)


def test_a_plan_for_a_model_without_attention():
    assert read_plan(Plan({}, {}, {}, {}, {}).to_json(), []) == Plan({}, {}, {}, {}, {})
    for part in ("skip", "prune_heads", "reuse", "collab_dk", "head_dk", "fuse"):
        with pytest.raises(InvalidArgument, match=f"{part} names '0', and the model has no att"):
            read_plan({part: {"0": 1}}, [])


def test_a_layer_that_a_rewrite_does_not_apply_to_is_told_with_its_reason():
    model = other_mask()
    blocks = read_attention(model).blocks
    with pytest.raises(InvalidArgument, match=r"attention_2 cannot be given .*no earlier att") as (
        caught
    ):
        read_plan({"reuse": {"2": {"0": ["1", 0]}}}, blocks)
    told(caught.value)
    model = graph("".join({**PARTS_OF_TEXT, "output": "\n out = Identity(c)"}.values()),
                  output=f"float[batch, sequence, {H * V}] out")  # fmt: skip
    blocks = read_attention(model).blocks
    assert blocks and blocks[0].output is None
    for content, done in (
        ({"skip": {"0": "affine"}}, "skipped"),
        ({"prune_heads": {"0": [1, 0, 1]}}, "pruned"),
    ):
        with pytest.raises(InvalidArgument, match=f"cannot be {done}: its context does not") as (
            caught
        ):
            read_plan(content, blocks)
        told(caught.value)


LAYERS = st.sampled_from(["0", "1", "2", "3", *NAMES, "9", "x", ""])
LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(-2, 14), st.floats(),
    st.sampled_from(["affine", "constant", "attention", "multi_head", "float32", "int8", "6:98"]),
    st.text(max_size=5), st.lists(st.integers(0, 1), min_size=H, max_size=H),
    st.dictionaries(st.sampled_from("012"), st.tuples(LAYERS, st.integers(0, H)).map(list)),
)  # fmt: skip
PLANS = st.dictionaries(
    st.sampled_from(PARTS), st.one_of(LEAVES, st.dictionaries(LAYERS, LEAVES, max_size=3))
)


@settings(max_examples=400, deadline=None)
@drawn(PLANS)
def test_anything_is_a_plan_or_a_mistake_in_one(content: dict[str, Any]):
    try:
        found = read(content, checked=False)
    except InvalidArgument as error:
        told(error)
        return
    assert read(json.loads(json.dumps(found.to_json())), checked=False) == found


# Masks of neurons, as a file holds them


@drawn(st.lists(st.integers(0, 1), min_size=1, max_size=200))
def test_a_mask_of_neurons_is_read_as_it_was_written(mask: list[int]):
    text = to_hex(mask)
    assert from_hex(text) == mask
    assert to_hex(np.array(mask).tolist()) == to_hex([bool(x) for x in mask]) == text
    assert len(text) == len(f"{len(mask)}:") + -(-len(mask) // 4)


def test_the_first_neuron_is_the_highest_bit():
    assert to_hex([1] * 8 + [0] * 4) == "12:ff0"
    assert to_hex([1, 0, 0, 0, 0]) == "5:80" and from_hex("5:08") == [0, 0, 0, 0, 1]


@pytest.mark.parametrize(
    "text",
    ["", ":", "0:", "0:0", "4", "4:", ":f", "4:ff", "5:f", "4:g", "4:0xf", "+4:f", "-4:f", " 4:f",
     "4:f ", "4 :f", "4: f", "4:-f", "8:+f", "8:f_f", "12:f_f", "04:f", "4.0:f", "4e0:f", "4:F",
     "٤:f", "4:f\n", "4:f:f", "3:f", "5:0f", "9999999999:f", "4:" + "f" * 10**5,
     "9" * 5000 + ":f", "\x00", "4:\x00"],
)  # fmt: skip
def test_what_was_not_written_so_is_no_mask(text: str):
    with pytest.raises(ValueError, match=r"is no mask|more bits than") as caught:
        from_hex(text)
    assert len(str(caught.value)) < 100


@drawn(st.one_of(st.text(max_size=12), st.from_regex(r"[0-9]{1,2}:[0-9a-f]{1,4}", fullmatch=True)))
def test_a_mask_is_written_in_one_way(text: str):
    try:
        mask = from_hex(text)
    except ValueError:
        return
    assert to_hex(mask) == text
