"""Plan: JSON round trip, validation, and application to a model."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnserve.checks.certify import Certified
from attnserve.context import ONE_THREAD, RunContext
from attnserve.planning.plans.apply import apply_plan
from attnserve.planning.plans.plan import Convert, Distill, Plan
from attnserve.planning.plans.rewriting import ApplyReport
from graph_passes.analyses import Analyses
from graph_passes.blocks import AttentionBlock, Unmatched
from graph_passes.errors import AttnserveError, CannotRewrite, InvalidArgument, InvalidModel
from graph_passes.passes.base import RewritePass
from graph_passes.passes.collaborate import Collaborate, Mixing
from graph_passes.passes.fold_biases import FoldBiases
from graph_passes.passes.fuse_attention import FuseAttention
from graph_passes.passes.fuse_gelu import FuseGelu
from graph_passes.passes.fuse_residuals import FuseResiduals
from graph_passes.passes.fuse_skip_norm import FuseSkipNorm
from graph_passes.passes.prune_heads import PruneHeads
from graph_passes.passes.prune_neurons import PruneNeurons
from graph_passes.passes.reuse_attention import ReuseAttention
from graph_passes.passes.skip_attention import SkipAttention
from graph_passes.passes.strip_cache import StripCache
from graph_passes.public import PASSES
from tests.attnserve.planning.request.requests import NAMES, planned, stack
from tests.errors import check_length, raises
from tests.graph_passes.graphs import H, K, layers
from tests.jobs import job_of


def passes() -> list[Any]:
    """One of each pass that a plan can hold, in the order of a plan."""
    return [
        StripCache(),
        SkipAttention({NAMES[0]: "constant"}),
        PruneHeads({NAMES[1]: [1, 0, 1]}),
        ReuseAttention({NAMES[3]: {2: (NAMES[1], 0), 0: (NAMES[2], 1)}}),
        PruneNeurons({"ffn_0": [1, 0, 0, 1, 1, 0], "ffn_1": [0] * 11 + [1]}),
        Collaborate({
            NAMES[2]: Mixing(rank=6, head_size=3),
            NAMES[3]: Mixing(rank=K, cache=True),
        }),
        FuseAttention({NAMES[1]: "attention"}),
        FuseGelu(["ffn_1"]),
        FoldBiases(),
        FuseResiduals(),
        FuseSkipNorm(),
    ]  # fmt: skip


ORDER = [rewrite.name for rewrite in passes()]

CONTEXT = RunContext(ONE_THREAD)


def reread(plan: Plan) -> Plan:
    return Plan.from_json(json.loads(json.dumps(plan.to_json(), allow_nan=False)))


def applied(content: Any, model: ir.Model | None = None) -> ApplyReport:
    """Apply the passes of a plan.json to a stack of four layers of three heads."""
    original = stack()[0] if model is None else model
    plan = Plan.from_json({"passes": content})
    job = job_of(original, context=CONTEXT)
    return apply_plan(plan, job, original.clone(), fit=False).applied


# JSON


def test_plan_merged_sorts_passes_by_their_order():
    class Foreign(RewritePass):
        def rewrite_graph(self, analyses: Analyses) -> bool:
            return False

    class Early(Foreign):
        order = 15

    shuffled = [Foreign(), *reversed(passes()), Early()]
    names = [rewrite.name or type(rewrite).__name__ for rewrite in Plan.merged(shuffled).passes]
    assert names == [*ORDER[:2], "Early", *ORDER[2:6], "Foreign", *ORDER[6:]]
    assert {each.name for each in PASSES} - set(ORDER) == {"decompose_attention"}


@pytest.mark.parametrize("precision", ["float32", "float16", "bfloat16", "int8", "int8-full"])
def test_plan_round_trip_keeps_every_pass_and_the_precision(precision: Any):
    plan = Plan(tuple(passes()), precision=precision)
    again = reread(plan)
    assert again.to_json() == plan.to_json()
    assert again.precision == precision
    assert list(map(type, again.passes)) == list(map(type, plan.passes))
    for rewrite in passes():
        for name, params in getattr(rewrite, "targets", {}).items():
            assert again.targets(type(rewrite))[name] == params


def test_plan_round_trip_keeps_order_empty_and_measured_plans():
    backwards = Plan(tuple(reversed(passes())))
    assert [rewrite.name for rewrite in reread(backwards).passes] == ORDER[::-1]
    assert reread(Plan()).to_json() == {"passes": [], "precision": "float32"}
    assert reread(Plan(precision="int8", float_blocks=("a", "b"))).float_blocks == ("a", "b")
    assert Plan.from_json({}).passes == ()
    plan = planned(skip=["2:constant"], prune=0.25, reuse="partial:1", collab_dk=6, head_dk=2)
    assert plan.lossy_blocks and reread(plan).to_json() == plan.to_json()


def test_merged_plan_joins_passes_of_a_kind_and_sorts_them():
    singles = [
        Collaborate({NAMES[3]: Mixing(rank=K)}),
        PruneHeads({NAMES[2]: [0, 1, 1]}),
        PruneHeads({}),
        PruneHeads({NAMES[1]: [1, 0, 1]}),
    ]
    plan = Plan.merged(singles, "int8")
    assert [rewrite.name for rewrite in plan.passes] == ["prune_heads", "collaborate"]
    masks = {name: list(mask) for name, mask in plan.targets(PruneHeads).items()}
    assert masks == {NAMES[1]: [1, 0, 1], NAMES[2]: [0, 1, 1]}
    assert plan.find(Collaborate) is not None and plan.find(SkipAttention) is None
    assert plan.targets(SkipAttention) == {}
    assert plan.precision == "int8"
    assert Plan.merged([PruneHeads({})]).passes == ()


def test_plan_lossy_blocks_lists_blocks_of_lossy_passes_once():
    assert Plan(tuple(passes())).lossy_blocks == [
        NAMES[0], NAMES[1], NAMES[3], "ffn_0", "ffn_1", NAMES[2],
    ]  # fmt: skip
    assert Plan((FuseAttention({NAMES[1]: "attention"}), FuseGelu(["ffn_1"]))).lossy_blocks == []


# Content that is not a plan

NOT_PLANS: dict[str, tuple[Any, str]] = {
    "a list": ([], "plan.invalid"),
    "nothing": (None, "plan.invalid"),
    "a text": ("x" * 10**5, "plan.invalid"),
    "an unknown key": ({"prune": 1}, "plan.invalid"),
    "a long unknown key": ({"x" * 10**5: {}}, "plan.invalid"),
    "an unknown precision": ({"precision": "int3"}, "plan.invalid"),
    "float blocks of a float model": ({"float_blocks": ["a"]}, "plan.invalid"),
    "a list as precision": ({"precision": []}, "plan.invalid"),
    "an object of passes": ({"passes": {}}, "plan.invalid"),
    "no passes": ({"passes": None}, "plan.invalid"),
    "a text as pass": ({"passes": ["prune_heads"]}, "plan.invalid"),
    "a pass without name": ({"passes": [{}]}, "plan.invalid"),
    "a number as name": ({"passes": [{"pass": 1}]}, "plan.invalid"),
    "an unknown pass": ({"passes": [{"pass": "prune"}]}, "pass.unknown"),
    "a long unknown pass": ({"passes": [{"pass": "x" * 10**5}]}, "pass.unknown"),
}
WRONG_TARGETS: dict[str, list[Any]] = {
    "skip_attention": [[], 0, None, "", "AFFINE", "linear", {"kind": "x"}, {"map": [1]}],
    "prune_heads": [1, "101", None, {}, [2, 0], [0.5], [None]],
    "reuse_attention": [1, None, [], {"0": 1}, {"0": ["a"]}, {"0": ["a", -1]}, {"-1": ["a", 0]},
                        {"x": ["a", 0]}, {"0": ["a", 0.5]}],
    "prune_neurons": [None, 1, [2], {}, True, "", "6", "6:", ":98", "x", "5:f", "9" * 5000 + ":f"],
    "collaborate": [1, None, [], {}, {"rank": 0}, {"rank": -1}, {"rank": 1.5}, {"rank": None},
                    {"rank": 4, "head_size": 0}, {"rank": 4, "x": 1}, {"rank": float("nan")}],
    "fuse_attention": [1, None, [], {}, "", "AFFINE", "x" * 10**5],
    "fuse_gelu": [1, None, [], {"x": 1}, "x"],
}  # fmt: skip
for _name, _values in WRONG_TARGETS.items():
    for _number, _value in enumerate(_values):
        _entry = {"pass": _name, "targets": {"block": _value}}
        NOT_PLANS[f"{_name} {_number}"] = {"passes": [_entry]}, "pass.params"
    for _number, _value in enumerate([None, 1, "x", [1]]):
        _entry = {"pass": _name, "targets": _value}
        NOT_PLANS[f"{_name} targets {_number}"] = {"passes": [_entry]}, "pass.params"
    _entry = {"pass": _name, "targets": {}, "more": 1}
    NOT_PLANS[f"{_name} unknown key"] = {"passes": [_entry]}, "pass.params"
NOT_PLANS["targets of a pass without"] = (
    {"passes": [{"pass": "fold_biases", "targets": {}}]},
    "pass.params",
)


@pytest.mark.parametrize("mistake", NOT_PLANS)
def test_plan_from_json_invalid_content_is_refused(mistake: str):
    content, code = NOT_PLANS[mistake]
    with raises(InvalidArgument, code) as caught:
        Plan.from_json(content)
    check_length(caught.value)


@pytest.mark.parametrize(
    ("key", "value"), [("kind", "low_rank"), ("mixing", "low_rank"), ("head_size", "sparse")]
)
def test_plan_from_json_unknown_kind_of_mixing_is_refused_by_key_and_value(key: str, value: str):
    params = {"rank": 4, key: value}
    content = {"passes": [{"pass": "collaborate", "targets": {NAMES[0]: params}}]}
    with raises(InvalidArgument, "pass.params", NAMES[0], key, value) as caught:
        Plan.from_json(content)
    check_length(caught.value)


BLOCKS = st.sampled_from([*NAMES, "ffn_0", "9", ""])
LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(-2, 14), st.floats(),
    st.sampled_from(["affine", "constant", "attention", "multi_head", "6:98"]), st.text(max_size=5),
    st.lists(st.integers(0, 1), min_size=H, max_size=H),
    st.dictionaries(st.sampled_from("012"), st.tuples(BLOCKS, st.integers(0, H)).map(list)),
    st.fixed_dictionaries({"rank": st.integers(-1, 14)}, optional={
        "head_size": st.one_of(st.none(), st.integers(-1, 9)), "cache": st.booleans(),
    }),
    st.just({}),
)  # fmt: skip
ENTRIES = st.one_of(
    LEAVES,
    st.fixed_dictionaries(
        {"pass": st.sampled_from([*ORDER, "x"])},
        optional={"targets": st.one_of(LEAVES, st.dictionaries(BLOCKS, LEAVES, max_size=3))},
    ),
)
PLANS = st.fixed_dictionaries(
    {},
    optional={
        "passes": st.one_of(LEAVES, st.lists(ENTRIES, max_size=3)),
        "precision": st.one_of(LEAVES, st.sampled_from(["float32", "int8"])),
    },
)


@settings(max_examples=150, deadline=None)
@given(PLANS)
def test_plan_from_json_any_content_is_read_or_refused(content: Any):
    try:
        plan = Plan.from_json(content)
    except InvalidArgument as error:
        check_length(error)
        assert error.code in {"plan.invalid", "pass.unknown", "pass.params"}
        return
    assert reread(plan).to_json() == plan.to_json()


# Plans that do not fit the model


def entry(name: str, **targets: Any) -> dict[str, Any]:
    return {"pass": name, "targets": {f"attention_{k[1:]}": v for k, v in targets.items()}}


SKIP = entry("skip_attention", _1="affine")
PRUNE = entry("prune_heads", _1=[1, 0, 1])
FUSE = entry("fuse_attention", _1="attention")
MISMATCHES: dict[str, tuple[list[Any], str]] = {
    "unknown block": ([entry("prune_heads", _9=[1, 0, 1])], "rewrite.unknown_block"),
    "mask too short": ([entry("prune_heads", _1=[1, 0])], "prune_heads.mask_length"),
    "skipped, then pruned": ([SKIP, PRUNE], "rewrite.unknown_block"),
    "skipped, then factored": ([SKIP, entry("collaborate", _1={"rank": 4})],
                               "rewrite.unknown_block"),
    "skipped, then fused": ([SKIP, FUSE], "rewrite.unknown_block"),
    "R out of range": ([entry("collaborate", _1={"rank": H * K + 1})], "collaborate.rank"),
    "R out of range after pruning": ([PRUNE, entry("collaborate", _1={"rank": 2 * K + 1})],
                                     "collaborate.rank"),
    "factored without heads": ([entry("prune_heads", _1=[0, 0, 0]),
                                entry("collaborate", _1={"rank": 4})], "rewrite.unknown_block"),
    "factored without own heads": (
        [entry("reuse_attention", _1={str(h): ["attention_0", h] for h in range(H)}),
         entry("collaborate", _1={"rank": 4})], "rewrite.no_own_heads",
    ),
    "factored twice": ([entry("collaborate", _1={"rank": 4})] * 2, "rewrite.collaborative"),
    "edge to a later layer": ([entry("reuse_attention", _1={"0": ["attention_2", 0]})],
                              "reuse_attention.order"),
    "unknown feed-forward": ([{"pass": "prune_neurons", "targets": {"ffn_9": "6:98"}}],
                             "rewrite.unknown_block"),
    "unknown activation": ([{"pass": "fuse_gelu", "targets": {"ffn_9": {}}}],
                           "rewrite.unknown_block"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISMATCHES)
def test_apply_plan_that_does_not_fit_the_model_is_refused(mistake: str):
    content, code = MISMATCHES[mistake]
    with raises(AttnserveError, code) as caught:
        applied(content)
    check_length(caught.value)


def test_apply_plan_of_a_block_that_is_not_certified_is_refused_before_its_rewrite(
    monkeypatch: pytest.MonkeyPatch,
):
    def certify(
        model: ir.Model, block: AttentionBlock, *args: Any, **options: Any
    ) -> Certified | Unmatched:
        reason = f"read as attention {block.name!r}, not certified: no kernel"
        is_certified = block.name == NAMES[0]
        return Certified(block, 0.0) if is_certified else Unmatched(block.product, reason)

    monkeypatch.setattr("attnserve.checks.certify.certify", certify)
    with raises(CannotRewrite, "rewrite.not_certified", "no kernel", NAMES[1]) as caught:
        applied([PRUNE])
    assert "attnserve inspect" in caught.value.fix and "\n" not in str(caught.value.what)
    check_length(caught.value)


def test_apply_plan_of_a_block_that_is_not_certified_afterwards_reports_its_own_reason(
    monkeypatch: pytest.MonkeyPatch,
):
    def certify(
        model: ir.Model, block: AttentionBlock, *args: Any, **options: Any
    ) -> Certified | Unmatched:
        is_whole = block.num_heads == H
        if is_whole and block.name != NAMES[0]:  # another block, which the plan does not name
            return Certified(block, 0.0)
        return Unmatched(block.product, f"no kernel for {block.name}")

    monkeypatch.setattr("attnserve.checks.certify.certify", certify)
    with raises(InvalidModel, "internal.certificate", f"no kernel for {NAMES[1]}"):
        applied([PRUNE])


# Plans that are applied


def test_apply_plan_passes_refer_to_blocks_as_their_predecessors_leave_them():
    report = applied([
        entry("skip_attention", _0="affine"),
        PRUNE,
        entry("reuse_attention", _2={"0": ["attention_1", 1]}),
        entry("collaborate", _3={"rank": 6, "head_size": 2}),
    ])  # fmt: skip
    assert [(change.rewrite, change.block) for change in report.changes] == [
        ("skip_attention", NAMES[0]), ("prune_heads", NAMES[1]), ("reuse_attention", NAMES[2]),
        ("collaborate", NAMES[3]),
    ]  # fmt: skip
    assert [change.heads for change in report.changes] == [0, 2, 2, 3]
    assert not report.is_exact and all(
        change.relative_error is not None for change in report.changes
    )


def test_apply_plan_full_rank_sharing_is_exact():
    report = applied([entry("collaborate", _1={"rank": H * K})])
    assert report.is_exact and report.changes[0].relative_error == 0


def test_apply_plan_empty_plan_changes_nothing():
    model = layers(2)
    before = ir.to_proto(model).SerializeToString()
    report = apply_plan(Plan(), job_of(layers(2)), model).applied
    assert report.is_exact and report.changes == ()
    assert ir.to_proto(model).SerializeToString() == before


def test_apply_plan_same_plan_gives_the_same_weights():
    plan = reread(planned(prune=0.25, collab_dk=6))
    models = [stack()[0].clone() for _ in range(2)]
    for model in models:
        apply_plan(plan, job_of(stack()[0]), model, fit=False)
    one, two = (model.graph.initializers for model in models)
    assert one.keys() == two.keys()
    for name, value in one.items():
        assert value.const_value is not None and two[name].const_value is not None
        np.testing.assert_array_equal(value.const_value.numpy(), two[name].const_value.numpy())


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"minutes": "x"}, "plan.invalid"),
        ({"minutes": -1}, "plan.invalid"),
        ({"minutes": math.nan}, "plan.invalid"),
        ({"measure": "none"}, "plan.invalid"),
        ({"other": 1}, "plan.invalid"),
        ({"step": "none"}, "training.unknown"),
    ],
    ids=str,
)
def test_plan_with_a_training_that_is_invalid_is_refused(change: dict[str, Any], code: str):
    training = {"step": "distill", "minutes": 2.0, **change}
    with raises(InvalidArgument, code):
        Plan.from_json({"passes": [], "trainings": [training]})


def test_plan_with_a_training_without_minutes_is_refused():
    with raises(InvalidArgument, "plan.invalid", "minutes"):
        Plan.from_json({"passes": [], "trainings": [{"step": "distill"}]})


def test_plan_with_a_training_is_read_again():
    plan = Plan(tuple(passes()), (Distill(minutes=2.0, measure="r2"),), "int8", (NAMES[0],))
    again = reread(plan)
    assert again.to_json() == plan.to_json() and again.trainings == plan.trainings
    assert [type(step) for step in again.steps[-2:]] == [Distill, Convert]
