"""From what is asked for to what is done: filled in by measurement, or refused with a way out."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st

from attnserve.calibrate import Batch, Dataset
from attnserve.carry_out import carry_out
from attnserve.certify import Reading, read_attention
from attnserve.elimination import elimination_order
from attnserve.importance import leave_one_out
from attnserve.request import (
    PARTS,
    Plan,
    Request,
    from_hex,
    make_plan,
    read_plan,
    require_attention,
    to_hex,
)
from attnserve.similarity import measure_similarity
from attnserve.voting import voting_to_stay
from graph_passes.errors import CannotRewrite, InvalidArgument, InvalidModel
from graph_passes.reuse import check_edges
from tests.graph_passes.graphs import PARTS as PARTS_OF_TEXT
from tests.graph_passes.graphs import D, H, K, V, attention, graph, layers
from tests.graph_passes.test_bodies import if_model

L, SIZE = 4, H * K
NAMES = [f"attention_{layer}" for layer in range(L)]


def batches(seed: int, rows: int = 6) -> list[Batch]:
    random = np.random.default_rng(seed)
    return [
        {
            "x": random.standard_normal((rows, length, D)).astype(np.float32),
            "mask": np.zeros((rows, 1, 1, length), np.float32),
        }
        for length in (4, 7)
    ]


@cache
def data() -> Dataset:
    return Dataset(batches(0), batches(1), 7, {"fit_tokens": 66})


@cache
def stack() -> tuple[ir.Model, Reading]:
    """L layers, as a plan reads them; planning changes nothing."""
    model = layers(L)
    return model, read_attention(model)


def plan(
    *, model: ir.Model | None = None, calibrated: bool = True, given: Dataset | None = None,
    **request: Any,
) -> Plan:  # fmt: skip
    graph, reading = stack() if model is None else (model, read_attention(model))
    return make_plan(
        Request(**request), graph, reading, given or (data() if calibrated else None),
        threads=1, report=lambda *_: None,
    )  # fmt: skip


# What may be asked for


def test_nothing_is_no_request():
    with pytest.raises(InvalidArgument, match=r"no rewrite is asked for\n.*--reuse, --prune"):
        Request(layers=["1"], align="index", importance="loo")


def test_two_ways_to_say_which_heads_go_are_one_too_many():
    with pytest.raises(InvalidArgument, match="--prune and --prune-heads both say which heads go"):
        Request(prune=0.5, prune_heads={"0": [1, 0, 1]})


@pytest.mark.parametrize(
    "share", [0, 1, 0.0, 1.0, 1.5, -0.1, float("nan"), float("inf"), -float("inf")]
)
def test_a_share_is_more_than_none_and_less_than_all(share: float):
    with pytest.raises(
        InvalidArgument, match=r"--prune .*expected a share of the heads, more than"
    ):
        Request(prune=share)


@pytest.mark.parametrize("share", [1e-9, 0.5, 1 - 1e-9])
def test_shares_between_are_requests(share: float):
    assert Request(prune=share).prune == share


def test_a_model_without_attention_is_refused():
    model = graph("\n [last] out = Softmax <axis = -1> (x)")
    with pytest.raises(InvalidModel, match=r"no attention was found \(last: .*\)\n.*inspect"):
        require_attention(read_attention(model))
    with pytest.raises(InvalidModel, match="no attention was found"):
        plan(model=model, prune_heads={})


# What is measured is measured on data

NEEDS_DATA: dict[str, tuple[dict[str, Any], str]] = {
    "prune": ({"prune": 0.25}, r"--prune measures .*no data\n.*--calib FILE, or --prune-heads"),
    "reuse": ({"reuse": "partial:1"}, r"--reuse aligns .*no data\n.*--calib FILE, or --align inde"),
    "auto": ({"reuse": "auto", "align": "index"}, "--reuse aligns .*no data"),
    "skip": ({"skip": ["1"]}, r"--skip fits .*to data, and there is none\n.*--calib FILE"),
}


@pytest.mark.parametrize("what", NEEDS_DATA)
def test_what_is_measured_needs_data(what: str):
    request, reason = NEEDS_DATA[what]
    with pytest.raises(InvalidArgument, match=reason):
        plan(calibrated=False, **request)


@pytest.mark.parametrize(
    "request_",
    [
        {"prune_heads": {"0": [1, 0, 1]}},
        {"reuse": {"1": {"0": ["0", 2]}}},
        {"reuse": "partial:1", "align": "index"},
        {"collab_dk": 6},
    ],
    ids=lambda request: ", ".join(request),
)
def test_what_is_named_needs_none(request_: dict[str, Any]):
    assert plan(calibrated=False, **request_).changed


# Each kind of request


def nothing_else(found: Plan, *kinds: str) -> None:
    for kind in {"skip", "masks", "edges", "ranks"} - set(kinds):
        assert not getattr(found, kind), kind


def test_pruning_by_energy_is_by_what_others_cannot_write():
    found = plan(prune=0.25)
    nothing_else(found, "masks")
    model, reading = stack()
    orders = elimination_order(model, reading.blocks, data().fit)
    assert sum(mask.count(0) for mask in found.masks.values()) == 3  # of 12
    for name, mask in found.masks.items():
        gone = [head for head, stays in enumerate(mask) if not stays]
        assert gone and set(gone) == set(orders[name].order[: len(gone)].tolist())


def test_pruning_by_leaving_out_takes_the_least_loss():
    found = plan(prune=0.25, importance="loo")
    model, reading = stack()
    loss = leave_one_out(model, reading.blocks, data().fit)
    ranked = sorted((float(loss[name][h]), name, h) for name in NAMES for h in range(H))
    gone = {(name, h) for name, mask in found.masks.items() for h in range(H) if not mask[h]}
    assert gone == {(name, h) for _, name, h in ranked[:3]}  # no layer loses all here


def test_pruning_by_voting_takes_the_same_number_of_every_layer():
    found = plan(prune=1 / 3, importance="voting")
    assert [mask.count(0) for mask in found.masks.values()] == [1] * L
    model, reading = stack()
    votes = voting_to_stay(
        model, reading.blocks, data().fit, groups=dict.fromkeys(NAMES, 2), seed=0
    )
    assert found.masks == {name: [int(x) for x in votes[name].mask] for name in NAMES}


def test_pruning_keeps_to_the_layers_that_are_named():
    found = plan(prune=0.34, layers=["1", "attention_2"])
    assert set(found.masks) <= {NAMES[1], NAMES[2]}
    assert sum(mask.count(0) for mask in found.masks.values()) == 2  # of 6


@pytest.mark.parametrize("importance", ["energy", "loo"])
def test_every_layer_keeps_a_head_however_much_goes(importance: Any):
    found = plan(prune=0.99, importance=importance)
    assert [sum(mask) for mask in found.masks.values()] == [1] * L


def test_a_share_that_is_no_head_says_so():
    with pytest.raises(CannotRewrite, match=r"as asked \(--prune 0.01 of 12 heads is none\)"):
        plan(prune=0.01)
    found = plan(prune=0.01, collab_dk=6)
    assert not found.masks and "--prune 0.01 of 12 heads is none" in found.warnings


def test_masks_that_are_given_are_taken():
    found = plan(prune_heads={"0": [1, 1, 1], "1": [0, 1, 0], "attention_3": [0, 0, 0]})
    nothing_else(found, "masks")
    assert found.masks == {NAMES[1]: [0, 1, 0], NAMES[3]: [0, 0, 0]}
    with pytest.raises(CannotRewrite, match="--prune-heads takes no head out"):
        plan(prune_heads={"0": [1, 1, 1]})


def test_reuse_takes_the_most_similar_head():
    found = plan(reuse="partial:1")
    nothing_else(found, "edges")
    model, reading = stack()
    similarity = measure_similarity(model, reading.blocks, data().fit)
    (head, source), *more = found.edges[NAMES[1]].items()
    between = similarity.between(NAMES[1], NAMES[0])
    assert not more and between[head, source[1]] == between.max()
    assert list(found.edges) == [NAMES[1], NAMES[2]]


@pytest.mark.parametrize(
    ("reuse", "reused"),
    [("partial:2", [1, 2]), ("full:2", [1, 2]), ("alternate", [1, 3]), ("all-end:1", [2])],
)
@pytest.mark.parametrize("align", ["index", "similarity"])
def test_configurations_reuse_the_layers_of_the_paper(reuse: str, reused: list[int], align: Any):
    found = plan(reuse=reuse, align=align)
    assert list(found.edges) == [NAMES[layer] for layer in reused]
    check_edges(found.edges, stack()[1].blocks)
    heads = 2 if reuse.startswith("partial") else H
    assert all(len(taken) == heads for taken in found.edges.values())


def test_reuse_keeps_to_the_layers_that_are_named():
    assert list(plan(reuse="full:3", layers=["2"]).edges) == [NAMES[2]]
    with pytest.raises(
        InvalidArgument, match="full:1 is about layers 1 to 1, of which --layers names none"
    ):
        plan(reuse="full:1", layers=["0", "2"])


def test_auto_reuses_where_it_does_no_damage():
    """All layers attend nearly alike: their queries and keys are the same, and x changes little."""
    same = ("Wq", "Wk", "bq", "bk")
    quiet = {"Wo": np.full((H * V, D), 1e-3, np.float32), "bo": np.zeros(D, np.float32)}
    model = layers(L, same=same, constants=quiet)
    found = plan(model=model, reuse="auto")
    assert found.edges and set(found.edges) <= {NAMES[1], NAMES[2]}
    for taken in found.edges.values():
        assert all(theirs == head for head, (_, theirs) in taken.items())


def test_auto_that_finds_nothing_says_so():
    with pytest.raises(CannotRewrite, match="--reuse auto: every reuse would change the output"):
        plan(reuse="auto")


def test_a_layer_with_nothing_to_compare_it_with_is_left_and_told(monkeypatch: pytest.MonkeyPatch):
    def incomparable(*_: Any, **__: Any) -> Any:
        model, reading = stack()
        found = measure_similarity(model, reading.blocks, data().fit)
        found.matrix[: 2 * H, 2 * H :] = found.matrix[2 * H :, : 2 * H] = np.nan
        return found

    monkeypatch.setattr("attnserve.request.measure_similarity", incomparable)
    found = plan(reuse="partial:1")
    assert list(found.edges) == [NAMES[1]]
    assert any(NAMES[2] in warning and "be compared" in warning for warning in found.warnings)


@pytest.mark.parametrize(
    ("given", "kind"),
    [("1", "affine"), ("attention_1", "affine"), ("1:affine", "affine"),
     ("1:constant", "constant"), ("attention_1:constant", "constant")],
)  # fmt: skip
def test_a_layer_is_skipped_by_an_affine_map_or_a_constant(given: str, kind: str):
    found = plan(skip=[given])
    nothing_else(found, "skip")
    assert found.skip == {NAMES[1]: kind}


@pytest.mark.parametrize(
    "given", ["9", "", ":", "1:", "1:linear", ":constant", "1:constant:affine"]
)
def test_an_unknown_layer_or_kind_is_not_skipped(given: str):
    with pytest.raises(InvalidArgument, match="--skip: no attention is called"):
        plan(skip=[given])


# Requests together


def test_every_rewrite_in_one_plan():
    found = plan(skip=["2"], prune=0.25, reuse="partial:1", collab_dk=6)
    assert found.skip == {NAMES[2]: "affine"}
    assert NAMES[2] not in found.masks and sum(m.count(0) for m in found.masks.values()) == 2
    assert list(found.edges) == [NAMES[1]], "layer 2 is gone"
    assert found.ranks.keys() <= {NAMES[0], NAMES[1], NAMES[3]}
    for name, heads in found.edges.items():
        for head, (source, theirs) in heads.items():
            assert found.masks.get(name, [1] * H)[head], "no head that goes is reused"
            assert found.masks.get(source, [1] * H)[theirs], "nor a source"


def test_a_plan_as_json_is_a_request_again():
    found = plan(skip=["2:constant"], prune=0.25, reuse="partial:1", collab_dk=6)
    content = found.to_json()
    again = plan(
        skip=[f"{name}:{kind}" for name, kind in content["skip"].items()],
        prune_heads=content["prune_heads"],
        reuse=content["reuse"],
        collab_dk=content["collab_dk"],
        calibrated=True,
    )
    assert again.to_json() == content
    assert (again.skip, again.masks, again.edges, again.ranks) == (
        found.skip, found.masks, found.edges, found.ranks
    )  # fmt: skip
    assert found == plan(skip=["2:constant"], prune=0.25, reuse="partial:1", collab_dk=6)


def test_a_skipped_layer_is_not_pruned_nor_reused():
    with pytest.raises(InvalidArgument, match="--prune-heads names attention_1, which --skip leav"):
        plan(skip=["1"], prune_heads={"1": [1, 0, 1]})
    with pytest.raises(InvalidArgument, match="--reuse names attention_1, which --skip leaves out"):
        plan(skip=["1"], reuse={"1": {"0": ["0", 0]}})
    with pytest.raises(InvalidArgument, match=r"needs head 0 of attention_1, which is taken out"):
        plan(skip=["1"], reuse={"2": {"0": ["1", 0]}})


@pytest.mark.parametrize(
    ("edges", "gone"),
    [({"1": {"0": ["0", 1]}}, "head 1 of attention_0"), ({"1": {"2": ["0", 0]}}, "head 2 of att")],
    ids=["source", "reused"],
)  # fmt: skip
def test_an_edge_of_a_pruned_head_is_refused(edges: dict[str, Any], gone: str):
    masks = {"0": [1, 0, 1], "1": [1, 1, 0]}
    with pytest.raises(InvalidArgument, match=f"needs {gone}.*taken out\n.*leave the head in"):
        plan(prune_heads=masks, reuse=edges)


def test_edges_between_heads_that_stay_keep_the_numbers_of_the_original():
    masks = {"0": [1, 0, 1], "1": [0, 1, 1]}
    found = plan(prune_heads=masks, reuse={"1": {"2": ["0", 2]}})
    assert found.edges == {NAMES[1]: {2: (NAMES[0], 2)}}
    found = plan(prune_heads=masks, reuse="partial:1", layers=["1"])
    ((head, (_, source)),) = found.edges[NAMES[1]].items()
    assert head in (1, 2) and source in (0, 2)


def test_a_layer_that_is_pruned_away_is_no_source():
    found = plan(prune_heads={"0": [0, 0, 0]}, reuse="partial:1")
    assert list(found.edges) == [NAMES[2]] and found.edges[NAMES[2]].popitem()[1][0] == NAMES[1]


# Shared dimensions, of the heads that are left


@pytest.mark.parametrize("R", [0, -1, SIZE + 1])
def test_a_size_out_of_range_is_refused(R: int):
    with pytest.raises(InvalidArgument, match=f"--collab-dk {R}: expected 1 to {SIZE}"):
        plan(collab_dk=R, prune_heads={"0": [1, 0, 1]})


@pytest.mark.parametrize(("R", "factored"), [(2 * K - 1, True), (2 * K, False), (SIZE, False)])
@pytest.mark.parametrize(
    "request_",
    [{"prune_heads": {"1": [1, 0, 1]}}, {"reuse": {"1": {"1": ["0", 0]}}}],
    ids=["pruned", "reused"],
)
def test_a_layer_is_factored_where_its_own_heads_hold_more(
    request_: dict[str, Any], R: int, factored: bool
):
    """Two of three heads are left: from 2 x K on R shares nothing among them."""
    found = plan(collab_dk=R, **request_)
    assert (NAMES[1] in found.ranks) is factored
    assert found.ranks.keys() >= {NAMES[0], NAMES[2], NAMES[3]}
    told = [w for w in found.warnings if "2 own heads hold 8 dimensions" in w and f"R = {R}" in w]
    assert len(told) == (not factored)


@pytest.mark.parametrize(
    "request_",
    [{"prune_heads": {"1": [0, 0, 0]}}, {"reuse": "full:1", "align": "index"}, {"skip": ["1"]},
     {"skip": ["1:constant"]}],
    ids=str,
)  # fmt: skip
def test_a_layer_without_heads_of_its_own_is_not_factored(request_: dict[str, Any]):
    found = plan(collab_dk=6, **request_)
    assert list(found.ranks) == [NAMES[0], NAMES[2], NAMES[3]] and not found.warnings


def test_nothing_left_to_factor_is_no_error_where_something_else_is_done():
    found = plan(collab_dk=6, skip=["1"], layers=["1"])
    assert found.changed == [NAMES[1]] and not found.ranks


def test_sizes_of_no_layer_are_nothing_to_do():
    with pytest.raises(CannotRewrite, match="none of the 4 attention blocks can be factored"):
        plan(collab_dk={})


# Layers that cannot be rewritten


def other_mask() -> ir.Model:
    """The last of three layers has a mask of its own."""
    inputs = f"float[batch, sequence, {D}] x, float[batch, 1, 1, sequence] mask, "
    model = layers(3, inputs=inputs + "float[batch, 1, 1, sequence] own_mask")
    own = next(value for value in model.graph.inputs if value.name == "own_mask")
    next(node for node in model.graph if node.outputs[0].name == "m_2").replace_input_with(1, own)
    return model


def other_length() -> ir.Model:
    """The last of three layers attends to tokens that are handed in."""
    inputs = f"float[batch, sequence, {D}] x, float[batch, memory, {D}] y"
    model = layers(3, inputs=inputs, mask="\n m = Identity(s)")
    memory = next(value for value in model.graph.inputs if value.name == "y")
    for name in ("k0_2", "v0_2"):
        made = next(node for node in model.graph if node.outputs[0].name == name)
        made.replace_input_with(0, memory)
    return model


@pytest.mark.parametrize("build", [other_mask, other_length])
def test_layers_that_attend_otherwise_are_no_source(build: Callable[[], ir.Model]):
    edges = {"2": {"0": ["1", 0]}}
    with pytest.raises(
        CannotRewrite,
        match=r"attention_2 cannot reuse attention_1: no earlier attention has the same .*lengths,",
    ):
        plan(model=build(), calibrated=False, reuse=edges)
    found = plan(model=build(), calibrated=False, reuse="full:2", align="index")
    assert list(found.edges) == [NAMES[1]]
    assert any("attention_2 is left as it is: no earlier" in warning for warning in found.warnings)
    with pytest.raises(CannotRewrite, match=r"attention_2: no earlier .*\n.*out of --layers"):
        plan(model=build(), calibrated=False, reuse="full:2", align="index", layers=["2"])


def test_a_model_of_two_layers_has_no_middle():
    with pytest.raises(InvalidArgument, match="expected at most 0: the first and the last are exa"):
        plan(model=layers(2), reuse="partial:1")
    assert plan(model=layers(2), reuse="partial:1:1").edges.keys() == {NAMES[1]}


def test_the_first_layer_has_nothing_to_take():
    with pytest.raises(InvalidArgument, match="1 layers of 1, expected at most 0"):
        plan(model=attention(), reuse="full:1", align="index", calibrated=False)


NESTED = Dataset(
    [{"x": np.ones((2, 5, D), np.float32), "flag": np.array(True)}], [], 5, {"fit_tokens": 10}
)


def test_what_lies_in_a_body_is_not_measured():
    model = if_model()
    names = [block.name for block in read_attention(model).blocks]
    with pytest.raises(CannotRewrite, match=r"in the body of another node, .*\n.*out of --skip"):
        plan(model=model, given=NESTED, skip=["0"])
    with pytest.raises(CannotRewrite, match=r"be rewritten as asked \(.* body of another node"):
        plan(model=model, given=NESTED, prune=0.5)
    assert plan(model=model, calibrated=False, prune_heads={"0": [1, 0, 1]}).masks == {
        names[0]: [1, 0, 1]
    }


def test_changed_layers_are_those_of_any_rewrite_once():
    found = Plan({"a": "affine"}, {"b": [1, 0]}, {"c": {0: ("a", 0)}}, {"b": 3, "d": 3}, {"d": 2})
    assert found.changed == ["a", "b", "c", "d"]
    content: Mapping[str, Any] = found.to_json()
    assert content == {
        "skip": {"a": "affine"},
        "prune_heads": {"b": [1, 0]},
        "reuse": {"c": {"0": ["a", 0]}},
        "collab_dk": {"b": 3, "d": 3},
        "head_dk": {"d": 2},
        "prune_neurons": {},
        "fuse": {},
        "fuse_gelu": [],
        "sum_residuals": False,
        "precision": "float32",
    }


# A plan that was written is read again, and nothing in it is believed

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
