"""The contract of all rewrites: targets, refusals, JSON, invariants and cached analyses."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Mapping
from typing import Any, ClassVar
from weakref import ref

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnserve.checks.certify import read_attention
from graph_passes.analyses import Analyses
from graph_passes.blocks import AttentionBlock
from graph_passes.emit.attention import emission_refusal, emit_context, emit_output
from graph_passes.emit.editing import Inserter
from graph_passes.emit.probabilities import emit_probabilities
from graph_passes.errors import CannotRewrite, InvalidArgument, InvariantBroken, Refusal
from graph_passes.matching.find import find_attention
from graph_passes.passes import base, decompose_attention
from graph_passes.passes.base import (
    AttentionPass,
    AttentionTargets,
    BlockPass,
    NoParams,
    RewritePass,
    small_shapes,
)
from graph_passes.passes.collaborate import Collaborate, Mixing
from graph_passes.passes.decompose_attention import DecomposeAttention
from graph_passes.passes.fold_biases import FoldBiases
from graph_passes.passes.fuse_attention import FuseAttention
from graph_passes.passes.fuse_gelu import FuseGelu
from graph_passes.passes.fuse_residuals import FuseResiduals
from graph_passes.passes.fuse_skip_norm import FuseSkipNorm
from graph_passes.passes.prune_heads import PruneHeads
from graph_passes.passes.prune_neurons import PruneNeurons, mask_from_hex, mask_to_hex
from graph_passes.passes.reuse_attention import ReuseAttention
from graph_passes.passes.skip_attention import AffineMap, SkipAttention
from graph_passes.passes.strip_cache import StripCache
from graph_passes.public import PASSES
from tests.errors import raises
from tests.graph_passes.graphs import (
    PLAIN_INPUT,
    D,
    H,
    K,
    assert_unchanged,
    feeds,
    fused_parts,
    if_model,
    layers,
    masked,
    run,
)

FIRST, SECOND = "attention_0", "attention_1"
EXACT = 1e-5


class RefuseAll(AttentionPass[NoParams]):
    """A pass that applies to no block."""

    @classmethod
    def refusal(
        cls, block: AttentionBlock, params: NoParams | None, analyses: Analyses
    ) -> Refusal | None:
        return Refusal("never", "it is refused on purpose")

    def rewrite(self, targets: AttentionTargets[NoParams], analyses: Analyses) -> None:
        raise AssertionError


class EmitAgain(AttentionPass[NoParams]):
    """Emit a block again, in nodes whose names begin with the name of the block only."""

    @classmethod
    def refusal(
        cls, block: AttentionBlock, params: NoParams | None, analyses: Analyses
    ) -> Refusal | None:
        return emission_refusal(block)

    def rewrite(self, targets: AttentionTargets[NoParams], analyses: Analyses) -> None:
        info = small_shapes(analyses)
        for block, _ in targets:
            heads = np.arange(block.num_heads)
            make = Inserter(block.graph, block.required_output.nodes[-1], f"{block.name}/any/name")
            probabilities = emit_probabilities(make, block, heads, info)
            context = emit_context(make, block, [(probabilities, heads)], info)
            emit_output(make, block, context, heads, info)


class RenameOutput(RewritePass):
    """A defective pass: it renames an output of the graph after running another pass."""

    inner: ClassVar[RewritePass | None] = None

    def rewrite_graph(self, analyses: Analyses) -> bool:
        if self.inner is not None:
            self.inner(analyses.model)
        analyses.model.graph.outputs[0].name = "renamed"
        return True


class PruneAndRename(RenameOutput):
    """The same defect around a correct pass, whose invariants hold."""

    inner = PruneHeads({FIRST: (1, 0, 1)})


# ---- targets ------------------------------------------------------------------------------------

EXAMPLES: dict[str, RewritePass] = {
    "collaborate": Collaborate({
        FIRST: Mixing(rank=5),
        SECOND: Mixing(rank=6, head_size=3, cache=True),
    }),
    "decompose_attention": DecomposeAttention([FIRST]),
    "fold_biases": FoldBiases(),
    "fuse_attention": FuseAttention({FIRST: "merged"}),
    "fuse_gelu": FuseGelu(["feed_forward_0"]),
    "fuse_residuals": FuseResiduals(),
    "fuse_skip_norm": FuseSkipNorm(),
    "prune_heads": PruneHeads({FIRST: (1, 0, 1)}),
    "prune_neurons": PruneNeurons({"feed_forward_0": [1, 0, 1, 1, 0]}),
    "reuse_attention": ReuseAttention({SECOND: {0: (FIRST, 2), 2: (FIRST, 1)}}),
    "skip_attention": SkipAttention({FIRST: "affine", SECOND: "constant"}),
    "strip_cache": StripCache(),
}  # fmt: skip
"""One pass of each name."""

BLOCK_PASSES = {
    name: rewrite for name, rewrite in EXAMPLES.items() if isinstance(rewrite, BlockPass)
}


def test_registered_passes_have_an_example_here() -> None:
    examples = {name: type(rewrite) for name, rewrite in EXAMPLES.items()}
    assert examples == {each.name: each for each in PASSES}


def test_pass_unknown_name_is_refused() -> None:
    with raises(InvalidArgument, "pass.unknown", "prune_head"):
        _ = PASSES["prune_head"]


def test_pass_with_the_name_of_another_replaces_it_only_if_asked_to() -> None:
    class Mine(PruneHeads):
        name = "prune_heads"

    with raises(InvalidArgument, "pass.duplicate", "prune_heads"):
        PASSES.add(Mine)
    assert PASSES["prune_heads"] is PruneHeads
    with PASSES.restored():
        PASSES.add(Mine, replace=True)
        assert PASSES["prune_heads"] is Mine
    assert PASSES["prune_heads"] is PruneHeads


def test_lossy_pass_of_the_whole_graph_with_a_name_is_refused() -> None:
    with raises(InvalidArgument, "pass.lossy", "LossyGraph"):

        class LossyGraph(RewritePass):  # pyright: ignore[reportUnusedClass]
            name: ClassVar[str] = "lossy_graph"
            lossy: ClassVar[bool] = True


def test_pass_with_any_names_of_nodes_keeps_the_names_of_blocks() -> None:
    model, original = layers(2), layers(2)
    EmitAgain([FIRST])(model)
    again = ir.from_proto(ir.to_proto(model))
    assert [block.name for block in find_attention(again).blocks] == [FIRST, SECOND]
    arrays = feeds(original)
    np.testing.assert_allclose(run(again, arrays), run(original, arrays), atol=EXACT, rtol=0)
    PruneHeads({FIRST: (1, 0, 1)})(again)
    assert [block.num_heads for block in find_attention(again).blocks] == [H - 1, H]


@pytest.mark.parametrize("name", BLOCK_PASSES)
def test_pass_unknown_block_is_refused(name: str) -> None:
    kind = type(BLOCK_PASSES[name])
    (params, *_) = BLOCK_PASSES[name].targets.values()
    model = layers(2)
    error = InvalidArgument if kind is ReuseAttention else CannotRewrite
    with raises(error, "rewrite.unknown_block", "encoder.9"):
        kind({"encoder.9": params})(model)
    assert dict(model.meta) == {}


@pytest.mark.parametrize("name", BLOCK_PASSES)
def test_pass_without_targets_changes_nothing(name: str) -> None:
    model = layers(2)
    assert_unchanged(model, type(BLOCK_PASSES[name])({}))
    assert dict(model.meta) == {}


def test_refusal_raises_cannot_rewrite_with_its_code() -> None:
    model = layers(2)
    before = ir.to_proto(model).SerializeToString()
    with raises(CannotRewrite, "rewrite.never", FIRST, "on purpose"):
        RefuseAll([FIRST])(model)
    assert ir.to_proto(model).SerializeToString() == before
    assert dict(model.meta) == {}


def test_pass_stages_run_in_order_and_a_refused_block_is_not_rewritten() -> None:
    stages: list[str] = []

    class Recorded(RefuseAll):
        @classmethod
        def validate_params(cls, block: AttentionBlock, params: NoParams) -> None:
            stages.append(f"validate {block.name}")

        def prepare(self, analyses: Analyses) -> None:
            stages.append("prepare")

        @classmethod
        def refusal(
            cls, block: AttentionBlock, params: NoParams | None, analyses: Analyses
        ) -> Refusal | None:
            stages.append(f"refusal {block.name}")
            return super().refusal(block, params, analyses) if block.name == SECOND else None

    with raises(CannotRewrite, "rewrite.never", SECOND):
        Recorded([FIRST, SECOND])(layers(2))
    assert stages == [
        f"validate {FIRST}", f"validate {SECOND}", "prepare",
        f"refusal {FIRST}", f"refusal {SECOND}",
    ]  # fmt: skip


def test_pass_parameters_that_do_not_fit_a_block_are_invalid_arguments() -> None:
    with raises(InvalidArgument, "prune_heads.mask_length", SECOND):
        PruneHeads({FIRST: (1, 0, 1), SECOND: (1, 0)})(layers(2))


def test_sizes_of_a_block_are_those_after_the_rewrite() -> None:
    model = layers(2)
    pruned, collaborative = PruneHeads({FIRST: (1, 0, 1)}), Collaborate({FIRST: {"rank": 5}})
    pruned(model)
    assert pruned.sizes(FIRST, find_attention(model).blocks[0]) == {"heads": 2}
    factored = collaborative.fitted(model)
    factored(model)
    block = find_attention(model).blocks[0]
    expected = {"heads": 2, "rank": 5, "head_size": None, "cache_width": None}
    assert factored.sizes(FIRST, block) == expected
    assert (factored.approximation_error(FIRST) or 0) > 0
    assert collaborative.sizes(FIRST, block) == {"heads": 2}
    assert collaborative.approximation_error(FIRST) is None
    assert SkipAttention({FIRST: "affine"}).sizes(FIRST, None) == {"heads": 0}


BAD_PARAMS: dict[str, tuple[type[BlockPass[Any, Any]], Any]] = {
    "mask entry": (PruneHeads, (1, 2, 0)),
    "mask share": (PruneHeads, (1, 0.5, 0)),
    "empty mask": (PruneHeads, ()),
    "mask text": (PruneHeads, "101"),
    "neuron entry": (PruneNeurons, (1, -1)),
    "neuron digits": (PruneNeurons, "5:g8"),
    "neuron bits beyond the length": (PruneNeurons, "5:ff"),
    "edge without a head": (ReuseAttention, {0: (FIRST,)}),
    "edge from a negative head": (ReuseAttention, {0: (FIRST, -1)}),
    "edge of a negative head": (ReuseAttention, {-1: (FIRST, 0)}),
    "rank of zero": (Collaborate, {"rank": 0}),
    "no rank": (Collaborate, {}),
    "unknown parameter": (Collaborate, {"rank": 4, "ranks": 4}),
    "unknown form": (FuseAttention, "packed"),
    "unknown replacement": (SkipAttention, "identity"),
    "parameters of a pass that has none": (DecomposeAttention, {"rank": 4}),
}


@pytest.mark.parametrize("case", BAD_PARAMS)
def test_pass_bad_parameters_are_refused_by_block(case: str) -> None:
    kind, params = BAD_PARAMS[case]
    with raises(InvalidArgument, "pass.params", kind.name, "encoder.9") as caught:
        kind({"encoder.9": params})
    assert "\n" not in caught.value.what and len(caught.value.what) < 500


# ---- JSON ---------------------------------------------------------------------------------------


def read_again(rewrite: RewritePass) -> RewritePass:
    content = json.loads(json.dumps(rewrite.to_json()))
    return PASSES[content["pass"]].from_json(content)


@pytest.mark.parametrize("name", EXAMPLES)
def test_pass_written_as_json_is_read_back_the_same(name: str) -> None:
    again = read_again(EXAMPLES[name])
    assert type(again) is type(EXAMPLES[name])
    assert again.to_json() == EXAMPLES[name].to_json()
    assert vars(again) == vars(EXAMPLES[name])


@pytest.mark.parametrize("name", EXAMPLES)
def test_pass_json_unknown_key_is_refused(name: str) -> None:
    with raises(InvalidArgument, "pass.params", "blocks"):
        PASSES[name].from_json({**EXAMPLES[name].to_json(), "blocks": {}})


@pytest.mark.parametrize("targets", [None, [FIRST], 3, "attention_0"], ids=str)
def test_block_pass_json_targets_that_are_no_object_are_refused(targets: Any) -> None:
    with raises(InvalidArgument, "pass.params"):
        PruneHeads.from_json({"pass": "prune_heads", "targets": targets})


NAMES = st.text(min_size=1, max_size=12)
BITS = st.lists(st.integers(0, 1), min_size=1, max_size=40)
HEADS = st.integers(0, 64)


@pytest.mark.parametrize("kind", [PruneHeads, PruneNeurons])
@given(targets=st.dictionaries(NAMES, BITS, max_size=3))
def test_masks_written_as_json_are_read_back_the_same(
    kind: type[PruneHeads | PruneNeurons], targets: dict[str, list[int]]
) -> None:
    again = read_again(kind(targets))
    assert vars(again)["targets"] == {name: tuple(mask) for name, mask in targets.items()}


@given(mask=BITS)
def test_mask_to_hex_is_inverted_by_mask_from_hex(mask: list[int]) -> None:
    text = mask_to_hex(mask)
    assert mask_from_hex(text) == mask
    assert len(text.partition(":")[2]) == -(-len(mask) // 4)


@given(text=st.text(alphabet="0123456789abcdef:", max_size=8))
def test_mask_from_hex_takes_only_what_mask_to_hex_writes(text: str) -> None:
    try:
        mask = mask_from_hex(text)
    except ValueError:
        return
    assert mask_to_hex(mask) == text


@given(
    edges=st.dictionaries(
        NAMES, st.dictionaries(HEADS, st.tuples(NAMES, HEADS), max_size=4), max_size=3
    )
)
def test_edges_written_as_json_are_read_back_the_same(edges: Any) -> None:
    assert vars(read_again(ReuseAttention(edges)))["targets"] == edges


def test_arrays_are_not_written_as_json() -> None:
    """Factors and fitted maps are computed again when a plan is applied."""
    fitted = AffineMap(np.zeros((D, D), np.float32), np.zeros(D, np.float32))
    assert SkipAttention({FIRST: fitted}).to_json() == SkipAttention({FIRST: "affine"}).to_json()


# ---- invariants ---------------------------------------------------------------------------------


@pytest.mark.parametrize("defective", [RenameOutput(), PruneAndRename()], ids=["alone", "nested"])
def test_pass_that_breaks_an_invariant_raises_and_leaves_no_metadata(
    defective: RewritePass,
) -> None:
    model = layers(1)
    with raises(InvariantBroken, "internal.invariant", "keeps_inputs_and_outputs", "'stream'"):
        defective(model)
    assert dict(model.meta) == {}


# ---- cached analyses ----------------------------------------------------------------------------


def test_analysis_is_computed_once_until_a_pass_changes_the_graph() -> None:
    calls: list[int] = []

    def count_nodes(model: ir.Model, minimum: int = 0) -> int:
        calls.append(minimum)
        return max(minimum, len(model.graph))

    model = layers(2)
    before = Analyses.of(model).get(count_nodes)
    assert Analyses.of(model).get(count_nodes) == before and calls == [0]
    Analyses.of(model).get(count_nodes, minimum=3)
    assert calls == [0, 3]
    PruneHeads({FIRST: (1, 1, 1)})(model)
    assert Analyses.of(model).get(count_nodes) == before and calls == [0, 3]
    assert Analyses.of(model.clone()).get(count_nodes) == before and calls == [0, 3, 0]
    SkipAttention({FIRST: "constant"})(model)
    assert Analyses.of(model).get(count_nodes) < before and calls == [0, 3, 0, 0]


def replace_weight(model: ir.Model) -> None:
    value = next(iter(model.graph.initializers.values()))
    assert value.const_value is not None
    value.const_value = ir.tensor(value.const_value.numpy() * 2)


def remove_node(model: ir.Model) -> None:
    (node,) = [user for user, _ in model.graph.inputs[0].uses()][:1]
    node.outputs[0].replace_all_uses_with(model.graph.inputs[0])
    model.graph.remove(node, safe=True)


def set_length(model: ir.Model) -> None:
    model.graph.inputs[0].shape = ir.Shape([2, 7, D])


EDITS: dict[str, Callable[[ir.Model], object]] = {
    "node removed": remove_node,
    "node inserted": lambda model: model.graph.append(ir.node("Neg", [model.graph.inputs[0]])),
    "node moved": lambda model: model.graph.insert_before(model.graph[0], model.graph[-1]),
    "node renamed": lambda model: setattr(model.graph[0], "name", "other"),
    "operator changed": lambda model: setattr(model.graph[0], "op_type", "Other"),
    "attribute added": lambda model: model.graph[0].attributes.add(ir.AttrInt64("axis", 0)),
    "input replaced": lambda model: model.graph[1].replace_input_with(0, model.graph.inputs[0]),
    "weight replaced": replace_weight,
    "length of an input fixed": set_length,
    "opset raised": lambda model: model.opset_imports.update({"": 99}),
    "graph replaced": lambda model: setattr(model, "graph", model.clone().graph),
}


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_edit_outside_a_pass_is_noticed(edit: Callable[[ir.Model], object]) -> None:
    calls: list[ir.Model] = []
    model = layers(1)
    analyses = Analyses.of(model)
    analyses.get(calls.append)
    edit(model)
    assert not analyses.is_current
    with pytest.raises(RuntimeError, match=r"Analyses\.of"):
        analyses.get(find_attention)
    Analyses.of(model).get(calls.append)
    assert len(calls) == 2


def test_analyses_do_not_keep_a_model() -> None:
    model = layers(2)
    assert Analyses.of(model).get(read_attention).blocks
    weak = ref(model)
    del model
    gc.collect()
    assert weak() is None


def fused_layers() -> ir.Model:
    """Two layers whose scores are inside ai.onnx Attention."""
    parts = fused_parts("Attention <scale = 0.37> (q, k, v)")
    return layers(inputs=PLAIN_INPUT, opset=23, **parts)


READ_ONCE: dict[str, tuple[Callable[[], ir.Model], RewritePass]] = {
    "collaborate": (layers, Collaborate({FIRST: Mixing(rank=5)})),
    "decompose_attention": (fused_layers, DecomposeAttention([FIRST, SECOND])),
    "fuse_attention": (layers, FuseAttention({FIRST: "attention", SECOND: "multi_head"})),
    "prune_heads": (layers, PruneHeads({FIRST: (1, 0, 1), SECOND: (0, 0, 0)})),
    "reuse_attention": (layers, ReuseAttention({SECOND: {0: (FIRST, 1)}})),
    "skip_attention": (layers, SkipAttention({FIRST: "affine"})),
}
READ_TWICE: dict[str, tuple[Callable[[], ir.Model], RewritePass]] = {
    "collaborate, fused": (fused_layers, Collaborate({FIRST: Mixing(rank=5)})),
    "reuse_attention, fused": (fused_layers, ReuseAttention({SECOND: {0: (FIRST, 1)}})),
}


@pytest.mark.parametrize("case", [*READ_ONCE, *READ_TWICE])
def test_pass_finds_attention_once_and_again_only_after_decomposing(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[ir.Model] = []

    def counted(model: ir.Model) -> Any:
        calls.append(model)
        return find_attention(model)

    for module in (base, decompose_attention):
        monkeypatch.setattr(module, "find_attention", counted)
    build, rewrite = (READ_ONCE | READ_TWICE)[case]
    model = build()
    assert rewrite(model).modified
    assert len(calls) == (2 if case in READ_TWICE else 1)
    assert dict(model.meta) == {}


def test_pass_that_only_prepares_reports_the_change() -> None:
    class OnlyPrepares(RewritePass):
        def prepare(self, analyses: Analyses) -> None:
            decompose_attention.decompose_fused(analyses.model, {FIRST})

        def rewrite_graph(self, analyses: Analyses) -> bool:
            return False

    model = fused_layers()
    assert Analyses.of(model).get(find_attention).blocks[0].softmax is None
    assert OnlyPrepares()(model).modified
    assert Analyses.of(model).get(find_attention).blocks[0].softmax is not None
    assert_unchanged(model, OnlyPrepares())


def test_reuse_attention_without_reused_heads_leaves_a_fused_block() -> None:
    assert_unchanged(fused_layers(), ReuseAttention({SECOND: {}}))


# ---- bodies of If -------------------------------------------------------------------------------

IN_BODIES: Mapping[str, RewritePass] = {
    "collaborate": Collaborate({FIRST: Mixing(rank=H * K)}),
    "fuse_attention": FuseAttention({FIRST: "multi_head"}),
    "prune_heads": PruneHeads({FIRST: (1, 0, 1)}),
    "skip_attention": SkipAttention({FIRST: "constant"}),
}


@pytest.mark.parametrize("case", IN_BODIES)
def test_pass_rewrites_one_branch_of_an_if_and_leaves_the_other(case: str) -> None:
    model, arrays = if_model(), {**feeds(layers(1)), "flag": np.array(True)}
    arrays.pop("mask")
    assert IN_BODIES[case](model).modified
    expected = {
        "prune_heads": masked(if_model(), {FIRST: (1, 0, 1)}),
        "skip_attention": masked(if_model(), {FIRST: (0, 0, 0)}),
    }.get(case, if_model())
    bias = if_model().graph.initializers["bo"].const_value
    shift = bias.numpy() if case == "skip_attention" and bias is not None else 0
    np.testing.assert_allclose(run(model, arrays), run(expected, arrays) - shift, atol=EXACT)
    arrays["flag"] = np.array(False)
    np.testing.assert_array_equal(run(model, arrays), run(if_model(), arrays))
    names = [block.name for block in find_attention(model).blocks]
    assert names == ([SECOND] if case == "skip_attention" else [FIRST, SECOND])


def test_reuse_attention_across_branches_of_an_if_is_refused() -> None:
    with raises(CannotRewrite, "rewrite.no_earlier"):
        ReuseAttention({SECOND: {0: (FIRST, 0)}})(if_model())
