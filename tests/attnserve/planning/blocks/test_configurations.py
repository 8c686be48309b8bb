"""Configurations of each block: groups, latencies, losses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from attnserve.calibration.elimination import eliminate_neurons
from attnserve.checks.certify import read_attention
from attnserve.checks.quality import QualityMeter
from attnserve.context import ONE_THREAD, RunContext
from attnserve.data.datasets import load_inputs
from attnserve.models.artifact import Artifact, open_artifact
from attnserve.models.example_inputs import example_inputs
from attnserve.models.onnx_files import load_model
from attnserve.planning.blocks.configurations import (
    BlockConfig,
    LossCurve,
    Replaced,
    Reusing,
    Shared,
    Truncated,
)
from attnserve.planning.blocks.groups import BlockGroup, ReusePair, group_blocks
from attnserve.planning.blocks.latencies import Latencies
from attnserve.planning.blocks.loss_curves import BlockLosses, loss_curves
from attnserve.planning.plans.plan_file import Decision
from attnserve.planning.search.block_timing import BlockLatency, BlockTimer
from attnserve.planning.search.checkpoint import SearchCheckpoint
from attnserve.planning.search.estimates import Estimates, changes_to_measure, paired_groups
from attnserve.runtime.checkpoint import Checkpoint
from attnserve.runtime.interface import Batch
from attnserve.runtime.part_latency import LatencyTable, Part
from attnserve.runtime.session import open_session
from graph_passes.analysis.workload import Workload
from graph_passes.blocks import Block
from graph_passes.errors import InvalidModel, InvariantBroken
from graph_passes.passes.skip_attention import SkipAttention
from tests.architectures import ARCHITECTURES, Cell, cells_of
from tests.attnserve.costs import Count
from tests.errors import raises

Build = Callable[..., Path]


CONTEXT = RunContext(ONE_THREAD)

REPLACED = Replaced()
"""An affine map in place of an attention."""


def meters(model: ir.Model) -> Callable[[], QualityMeter]:
    return lambda: QualityMeter(model, Artifact(Path("model.onnx")), measure="cosine")


@pytest.fixture(scope="module")
def groups(tiny_graph: ir.Model) -> list[BlockGroup]:
    return group_blocks(tiny_graph, read_attention(tiny_graph).blocks, ffn=True)


@pytest.fixture(scope="module")
def curves(
    tiny_graph: ir.Model, groups: list[BlockGroup], tiny_batches: list[Batch]
) -> dict[str, LossCurve]:
    return loss_curves(
        tiny_graph, groups, tiny_batches, new_meter=meters(tiny_graph), context=CONTEXT
    ).curves


# Groups


def test_group_blocks_is_one_group_per_block(groups: list[BlockGroup]):
    assert [(g.kind, g.count, len(g.blocks), g.refusal) for g in groups] == [
        ("attention", 4, 1, None),
        ("attention", 4, 1, None),
        ("feed_forward", 64, 1, None),
        ("feed_forward", 64, 1, None),
    ]


def test_group_blocks_without_ffn_keeps_all_neurons(tiny_graph: ir.Model):
    found = group_blocks(tiny_graph, read_attention(tiny_graph).blocks, ffn=False)
    codes = {group.kind: group.refusal and group.refusal.code for group in found}
    assert codes == {"attention": None, "feed_forward": "not_allowed"}


def test_group_blocks_shared_weights_are_one_group(
    exported: Callable[[Cell], tuple[Path, str]],
):
    """ALBERT: rewritten alike, or the model would grow."""
    path, reason = exported(cells_of(ARCHITECTURES["ALBERT"])[0])
    assert not reason
    model = load_model(path)
    groups = group_blocks(model, read_attention(model).blocks, ffn=True)
    assert [(group.kind, len(group.blocks) > 1) for group in groups] == [
        ("attention", True),
        ("feed_forward", True),
    ]


# Times


def timer_of(graph: ir.Model, table: LatencyTable, *others: int) -> BlockTimer:
    """A timer at 16 tokens and, where no part may be slower, at other lengths."""
    feed, *more = (example_inputs(graph, Workload.of(1, length)) for length in (16, *others))
    return BlockTimer(graph, table, [feed], more)


@pytest.fixture
def timed(tiny_graph: ir.Model, groups: list[BlockGroup]) -> dict[Block, BlockLatency]:
    table = LatencyTable(None, ONE_THREAD, Count())
    return timer_of(tiny_graph, table, 32).time_blocks(groups)


def test_time_blocks_times_every_configuration(
    timed: dict[Block, BlockLatency], groups: list[BlockGroup]
):
    for group in groups:
        configs = timed[group.blocks[0]].configs
        wanted = range(1, 5) if group.kind == "attention" else range(8, 65, 8)
        skipped = [REPLACED] if group.kind == "attention" else []
        assert set(configs) == {*skipped, *(BlockConfig(kept) for kept in wanted)}
        for shorter, longer in configs.values():
            assert shorter < longer
        first = [configs[config].mean for config in sorted(configs, key=lambda config: config.kept)]
        assert first == sorted(first)


def test_time_blocks_selects_fastest_implementation(
    timed: dict[Block, BlockLatency], groups: list[BlockGroup]
):
    for group in groups:
        found = timed[group.blocks[0]]
        if group.kind == "attention":
            assert found.operator == "attention"
            assert found.configs[BlockConfig(4)].mean < found.original.mean
        else:
            assert found.operator == "gelu"
            assert found.configs[BlockConfig(64)].mean < found.original.mean


def test_time_blocks_skips_operator_without_kernel(
    tiny_graph: ir.Model, groups: list[BlockGroup], monkeypatch: pytest.MonkeyPatch
):
    """ONNX Runtime says so when a session is opened."""

    def lacks(part: Any, *given: Any, **named: Any) -> Any:
        if any(node.op_type == "Attention" for node in part.graph):
            raise InvalidModel("no kernel", "none")
        return open_session(part, *given, **named)

    monkeypatch.setattr("attnserve.planning.search.part_timing.open_session", lacks)
    found = timer_of(tiny_graph, LatencyTable(None, timer=Count())).time_blocks(groups)
    forms = {found[g.blocks[0]].operator for g in groups if g.kind == "attention"}
    assert forms == {"multi_head"}


class SlowAtSecondShape(LatencyTable):
    """Everything but the original takes 1.2 times as long as it at the second shape."""

    def time(self, parts: Mapping[Any, Part]) -> dict[Any, tuple[float, ...]]:
        found = super().time(parts)
        slow = 1.2 * found[None][1]
        return {name: ms if name is None else (ms[0], slow) for name, ms in found.items()}


def test_time_blocks_skips_implementation_slower_at_any_length(
    tiny_graph: ir.Model, groups: list[BlockGroup]
):
    """One operator is faster at the requested length, and slower at another."""
    table = SlowAtSecondShape(None, timer=Count())
    found = timer_of(tiny_graph, table, 32).time_blocks(groups)
    for group in groups:
        assert found[group.blocks[0]].operator is None
        configs = Estimates(found, {}).unit(group).configs
        assert [config.group_configs for config in configs] == [(BlockConfig(group.count),)]
        assert configs[0].ms == found[group.blocks[0]].original.mean


def test_latencies_mean_is_over_requested_and_a_speedup_counts_everywhere():
    original, faster = Latencies((4.0, 2.0), (1.0,)), Latencies((2.0, 1.0), (1.03,))
    assert (original.mean, faster.mean) == (3.0, 1.5)
    assert [*Latencies.total([original, faster])] == pytest.approx([6.0, 3.0, 2.03])
    assert [*faster.saved_over(original)] == pytest.approx([2.0, 1.0, -0.03])
    assert faster.keeps_up_with(original)
    assert not replace(faster, extremes=(1.04,)).keeps_up_with(original)
    assert not original.keeps_up_with(faster)


# Losses


def test_loss_curve_rises_with_removals(curves: dict[str, LossCurve], groups: list[BlockGroup]):
    for group in groups:
        curve = curves[group.key]
        losses = [curve.at(gone) for gone in range(group.count)]
        assert losses[0] == 0.0
        assert losses == sorted(losses) and losses[-1] > 0
        assert sorted(curve.order) == list(range(group.count))


def test_loss_curve_equals_measurements_at_measured_shares(curves: dict[str, LossCurve]):
    for curve in curves.values():
        for gone, loss in zip(curve.removed_counts, curve.loss, strict=True):
            assert curve.at(gone) == pytest.approx(loss, rel=1e-6)


def test_loss_curve_mask_keeps_last_removals(curves: dict[str, LossCurve]):
    for curve in curves.values():
        kept = len(curve.order) // 4
        mask = np.array(BlockConfig(kept).mask(curve.order))
        assert mask.sum() == kept
        assert set(np.flatnonzero(mask)) == set(curve.order[-kept:])


def test_shared_config_must_outrun_separate_dimensions():
    shared, separate = Shared(4, 7, 16), Truncated(4, 7)
    assert shared.less_lossy == separate
    assert separate.less_lossy is None and BlockConfig(4).less_lossy is None
    assert REPLACED.less_lossy is None


def test_checkpoint_losses_round_trip(
    curves: dict[str, LossCurve], groups: list[BlockGroup], monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
):  # fmt: skip
    monkeypatch.setenv("ATTNSERVE_CACHE", str(tmp_path))
    configs = REPLACED, Truncated(4, 3), Shared(4, 3, 8)
    changes = {config.change: 0.1 * place for place, config in enumerate(configs)}
    written = {key: replace(curve, changed=changes) for key, curve in curves.items()}
    timed, other = ReusePair(*groups[:2], {}, 1.0), ReusePair(*groups[1::-1], {}, 1.0)
    pair = replace(timed, heads=(2, 3, 0, 1), loss=0.1)
    file = Checkpoint("plans", "x")
    assert SearchCheckpoint(file).losses([timed]) is None
    SearchCheckpoint(file).put_losses(BlockLosses(written, (pair,), {"a": 0.5}))
    SearchCheckpoint(file).add_build("a", 0.1, 0.9)
    again = SearchCheckpoint(file)
    losses = again.losses([timed, other])
    assert losses is not None and losses.conversion == {"a": 0.5}
    assert {k: vars(v) for k, v in losses.curves.items()} == {
        k: vars(v) for k, v in written.items()
    }
    assert [vars(each) for each in losses.pairs] == [vars(pair)]
    assert again.build("a") == (0.1, 0.9) and again.build("b") is None


def test_loss_curves_of_one_text(tiny_graph: ir.Model, groups: list[BlockGroup], tiny_batches: Any):
    found = loss_curves(
        tiny_graph, groups, tiny_batches[:1], new_meter=meters(tiny_graph), context=CONTEXT
    ).curves
    assert set(found) == {group.key for group in groups}


# Options


def test_configs_of_group_are_faster_at_more_loss(
    timed: dict[Block, BlockLatency], groups: list[BlockGroup], curves: dict[str, LossCurve]
):
    for group in groups:
        configs = Estimates(timed, curves).unit(group).configs
        assert configs[0].group_configs == (BlockConfig(group.count),) and configs[0].loss == 0
        assert len(configs) > 1
        for a, b in pairwise(configs):
            assert a.group_configs[0].kept > b.group_configs[0].kept
            assert a.ms > b.ms and a.loss <= b.loss


def test_configs_lossy_conversion_keeps_block_in_float(
    timed: dict[Block, BlockLatency], groups: list[BlockGroup], curves: dict[str, LossCurve]
):
    group = groups[0]
    slower = {
        block: replace(
            each,
            original=Latencies.total([each.original] * 4),
            configs={config: Latencies.total([ms] * 4) for config, ms in each.configs.items()},
        )
        for block, each in timed.items()
    }
    lossless = Estimates(timed, curves, slower, {group.key: 0.0}).unit(group).configs
    # In float32 it is slower, and nothing is gained; the last one is kept as it is unreduced.
    assert not any(config.in_float for config in lossless[:-1])
    assert lossless[-1].is_unreduced((group,)) and lossless[-1].in_float
    lossy = Estimates(timed, curves, slower, {group.key: 0.01}).unit(group).configs
    assert lossy[0].in_float == {0} and lossy[0].loss == 0
    assert not lossy[-1].in_float and lossy[-1].loss >= 0.01
    faster = Estimates(slower, curves, timed, {group.key: 0.01}).unit(group).configs
    assert all(config.in_float for config in faster[:-1])  # int8 is slower and lossy
    assert faster[-1].is_unreduced((group,))


def test_configs_of_pair_keep_blocks_in_float(
    timed: dict[Block, BlockLatency], groups: list[BlockGroup], curves: dict[str, LossCurve]
):
    source, reader = (group for group in groups if group.kind == "attention")
    pair = ReusePair(source, reader, {4: timed[source.blocks[0]].original}, 1.0, (0, 1, 2, 3), 0.1)
    found = Estimates(timed, curves, timed, {reader.key: 0.01}).unit(pair).configs
    assert found[0].in_float == {1} and found[0].loss == 0


# Neurons that go, and what the others take over


def test_eliminate_neurons_removes_redundant_neuron_first():
    random = np.random.default_rng(0)
    tokens = random.standard_normal((500, 6))
    tokens[:, 4] = 2 * tokens[:, 1]
    weight = random.standard_normal((6, 3))
    found = eliminate_neurons(np.cov(tokens.T, bias=True), weight, 1)
    assert found.order[0] in (1, 4)
    assert found.losses[1] < 1e-3 < 0.04 < found.losses[2]


def test_eliminate_neurons_loss_is_that_of_least_squares():
    """Against ridge regression on the neurons that stay."""
    random = np.random.default_rng(1)
    tokens = random.standard_normal((400, 8)) @ random.standard_normal((8, 8))
    tokens -= tokens.mean(0)
    weight = random.standard_normal((8, 5))
    gram = tokens.T @ tokens / len(tokens)
    found = eliminate_neurons(gram, weight, 2)
    kept = np.setdiff1d(np.arange(8), found.order[:4])
    best = np.linalg.lstsq(tokens[:, kept], tokens @ weight, rcond=None)[0]
    lost = np.square(tokens @ weight - tokens[:, kept] @ best).sum() / len(tokens)
    total = np.square(tokens @ weight).sum() / len(tokens)
    assert found.losses[4] == pytest.approx(lost / total, rel=0.05)  # a small ridge apart


def test_eliminate_neurons_uneven_steps_remove_all():
    found = eliminate_neurons(np.eye(7), np.ones((7, 2)), 3)
    assert sorted(found.order.tolist()) == list(range(7))
    assert len(found.losses) == 8
    assert found.losses[-1] == pytest.approx(1, rel=0.01)


# Queries and keys with fewer dimensions


def cut_attention(group: BlockGroup) -> bool:
    return group.kind == "attention"


def test_time_blocks_times_truncated_heads(
    short_enough: None, timed: dict[Block, BlockLatency], groups: list[BlockGroup]
):
    for group in filter(cut_attention, groups):
        configs = timed[group.blocks[0]].configs
        truncated = {config for config in configs if type(config) is Truncated}
        assert truncated == {Truncated(kept, 3) for kept in range(1, 5)}
        for kept in range(1, 5):
            assert [*configs[Truncated(kept, 3)]] < [*configs[BlockConfig(kept)]]
        assert {config for config in configs if type(config) is Shared} == {Shared(4, 3, 8)}


class FastSharing(LatencyTable):
    """Shared dimensions take a tenth of their time, at the only shape."""

    def time(self, parts: Mapping[Any, Part]) -> dict[Any, tuple[float, ...]]:
        found = super().time(parts)
        return {
            name: (0.1 * ms if isinstance(name, Shared) else ms,) for name, (ms,) in found.items()
        }


def test_time_blocks_times_fewer_heads_that_share_dimensions_if_sharing_is_fast(
    short_enough: None, tiny_graph: ir.Model, groups: list[BlockGroup]
):
    table = FastSharing(None, ONE_THREAD, Count())
    found = timer_of(tiny_graph, table).time_blocks(groups)
    for group in filter(cut_attention, groups):
        configs = found[group.blocks[0]].configs
        shared = {config for config in configs if type(config) is Shared}
        assert shared == {Shared(4, 3, 8), *(Shared(kept, 3, 4) for kept in (1, 2, 3))}


@pytest.mark.parametrize("export", [("eager", "dynamo", 18), ("sdpa", "dynamo", 23)], ids=str)
def test_loss_curves_of_other_changes(
    short_enough: None, tiny_export: Build, sentences: Path, export: tuple[Any, ...]
):
    """However the attention is written; and heads that are gone lose nothing by being cut."""
    folder = tiny_export(*export)
    model = load_model(folder / "model.onnx")
    batches = list(load_inputs(sentences, model, open_artifact(folder), split=False).fit)
    groups = group_blocks(model, read_attention(model).blocks, ffn=False)
    configs = Truncated(4, 3), Shared(4, 3, 8), REPLACED
    changes = {group.key: configs for group in filter(cut_attention, groups)}
    found = loss_curves(
        model, groups, batches, changes=changes, new_meter=meters(model), context=CONTEXT
    ).curves
    for group in filter(cut_attention, groups):
        curve = found[group.key]
        losses = {config: curve.changed[config.change] for config in configs}
        assert len(curve.changed) == len(configs)
        assert 0 < losses[Truncated(4, 3)] < losses[Shared(4, 3, 8)] < 0.5  # sharing costs more
        assert 0 < losses[REPLACED] < 1.5
        assert Truncated(4, 3).loss(curve) == losses[Truncated(4, 3)]
        assert Truncated(2, 3).loss(curve) == pytest.approx(
            curve.at(2) + losses[Truncated(4, 3)] / 2
        )
        assert Shared(2, 3, 4).loss(curve) == pytest.approx(
            curve.at(2) + losses[Shared(4, 3, 8)] / 2
        )
        assert BlockConfig(2).loss(curve) == curve.at(2)
        assert REPLACED.loss(curve) == losses[REPLACED]


def test_config_unmeasured_loss_is_infinite(curves: dict[str, LossCurve]):
    for curve in curves.values():
        assert curve.changed == {}
        assert Truncated(2, 3).loss(curve) == REPLACED.loss(curve) == float("inf")


def test_configs_of_small_heads_are_not_truncated(groups: list[BlockGroup]):
    """Half of 8 dimensions is not a multiple of 8."""
    for group in filter(cut_attention, groups):
        assert not any(config.is_fitted for config in group.configs)


# Dimensions that heads share, and layers that are left out


def test_changes_to_measure_sharing_only_if_faster_than_separate(
    timed: dict[Block, BlockLatency], groups: list[BlockGroup]
):
    group = next(filter(cut_attention, groups))
    own, shared = Truncated(4, 3), Shared(4, 3, 8)
    configs = {
        BlockConfig(4): Latencies((5.0,), (5.0,)),
        BlockConfig(2): Latencies((3.0,), (3.0,)),
        own: Latencies((4.0,), (4.0,)),
        Truncated(2, 3): Latencies((2.0,), (2.0,)),
    }
    for ms, wanted in ((4.0, [own]), (3.9, [own]), (3.8, [own, shared])):
        with_shared = {**configs, shared: Latencies((ms,), (9.0,))}
        found = replace(timed[group.blocks[0]], configs=with_shared)
        assert changes_to_measure(group, found) == wanted
    skip = {REPLACED: Latencies((1.0,), (1.0,))}
    with_skip = replace(timed[group.blocks[0]], configs={**configs, **skip})
    assert changes_to_measure(group, with_skip) == [own, REPLACED]


@pytest.mark.parametrize(("multiple", "ranks"), [(4, (4, 4, 4, 8)), (1, (2, 4, 6, 8))])
def test_configs_of_fewer_heads_share_fewer_dimensions(
    groups: list[BlockGroup],
    monkeypatch: pytest.MonkeyPatch,
    multiple: int,
    ranks: tuple[int, ...],
):
    """In proportion, in multiples, and never none; all kinds of configurations in order."""
    monkeypatch.setattr("attnserve.planning.blocks.groups.MULTIPLE", multiple)
    for group in filter(cut_attention, groups):
        assert group.configs == [
            REPLACED,
            *(BlockConfig(kept) for kept in range(1, 5)),
            *(Truncated(kept, 3) for kept in range(1, 5)),
            *(Shared(kept, 3, rank) for kept, rank in enumerate(ranks, start=1)),
        ]


@pytest.mark.parametrize(
    ("config", "text"),
    [(BlockConfig(8), "8"), (REPLACED, "none"), (Truncated(8, 15), "8 x 16"),
     (Shared(8, 15, 80), "8 x 16 of 80 shared"),
     (Reusing(8, {}, "first", 0.1), "8 as first")],
)  # fmt: skip
def test_block_config_text(config: BlockConfig, text: str):
    assert str(config) == text


# Probabilities of the layer before


SLOW_OPERATORS = Count(fused=2.0, standard=2.0)
"""Attention is fastest as exported."""


def handed_on(
    tiny_graph: ir.Model, groups: list[BlockGroup], count: Count
) -> tuple[dict[Block, BlockLatency], list[ReusePair]]:
    timer = timer_of(tiny_graph, LatencyTable(None, ONE_THREAD, count), 32)
    timed = timer.time_blocks(groups)
    return timed, timer.time_pairs(groups, timed)


def test_time_pairs_and_configs_of_reuse(
    tiny_graph: ir.Model, groups: list[BlockGroup], tiny_batches: list[Batch]
):
    timed, (pair,) = handed_on(tiny_graph, groups, SLOW_OPERATORS)
    attention = [group for group in groups if group.kind == "attention"]
    assert [pair.source, pair.reader] == attention
    assert sorted(pair.times) == [1, 2, 3, 4] and pair.saved_ms > 0
    both = sum(timed[group.blocks[0]].configs[BlockConfig(4)].mean for group in attention)
    assert pair.times[4].mean == pytest.approx(both - pair.saved_ms)
    found = loss_curves(
        tiny_graph,
        groups,
        tiny_batches,
        pairs=[pair],
        new_meter=meters(tiny_graph),
        context=CONTEXT,
    )
    (pair_losses,) = found.pairs
    assert sorted(pair_losses.heads) == [0, 1, 2, 3]  # each head of the source is taken by one
    assert 0 < pair_losses.loss < 1
    (chosen, *others) = paired_groups(groups, found.pairs)
    assert chosen is pair_losses
    assert others == [group for group in groups if group.kind == "feed_forward"]
    configs = Estimates(timed, found.curves).unit(chosen).configs
    assert configs[0].group_configs == (BlockConfig(4), BlockConfig(4)) and configs[0].loss == 0
    reused = [o.group_configs for o in configs if o.sources == {pair.source.names[0]}]
    assert reused and all(
        (a, b) == (BlockConfig(b.kept), Reusing(b.kept, {}, pair.source.names[0], 0.0))
        for a, b in reused
    )
    for a, b in pairwise(configs):
        assert a.ms > b.ms and a.loss <= b.loss


@pytest.mark.parametrize("is_slow", [True, False])
def test_loss_curves_pair_that_is_slow_or_without_edges_is_left_out(
    is_slow: bool, tiny_graph: ir.Model, groups: list[BlockGroup], tiny_batches: list[Batch],
    monkeypatch: pytest.MonkeyPatch,
):  # fmt: skip
    """A slow pair is timed once; where no similarity could be measured there are no edges."""
    _, (pair,) = handed_on(tiny_graph, groups, Count(fused=0.1) if is_slow else SLOW_OPERATORS)
    if is_slow:
        assert list(pair.times) == [4] and pair.saved_ms < 0
        assert paired_groups(groups, [pair]) == groups
    else:
        monkeypatch.setattr("attnserve.planning.blocks.change_losses.edges_of", lambda *_, **__: {})
    found = loss_curves(
        tiny_graph,
        groups,
        tiny_batches,
        pairs=[pair],
        new_meter=meters(tiny_graph),
        context=CONTEXT,
    )
    assert found.pairs == ()


@pytest.mark.parametrize("is_pair", [False, True])
def test_loss_curves_defect_of_a_pass_is_an_error(
    is_pair: bool, tiny_graph: ir.Model, groups: list[BlockGroup], tiny_batches: list[Batch],
    monkeypatch: pytest.MonkeyPatch,
):  # fmt: skip
    """It is no change that is left out."""

    def defect(*_: object, **__: object) -> None:
        raise InvariantBroken("a pass violates an invariant")

    _, pairs = handed_on(tiny_graph, groups, SLOW_OPERATORS)
    monkeypatch.setattr("attnserve.planning.blocks.change_losses.apply_config", defect)
    pairs, changes = (pairs, {}) if is_pair else ([], {groups[0].key: [REPLACED]})
    with raises(InvariantBroken, "internal.invariant"):
        loss_curves(
            tiny_graph,
            groups,
            tiny_batches,
            changes,
            pairs,
            new_meter=meters(tiny_graph),
            context=CONTEXT,
        )


def test_paired_groups_overlapping_pairs_take_the_best(groups: list[BlockGroup]):
    """The pair that loses least is taken first."""
    first, second = (group for group in groups if group.kind == "attention")
    third = replace(second, blocks=())
    pairs = [
        ReusePair(first, second, {}, 1.0, loss=0.2),
        ReusePair(second, third, {}, 1.0, loss=0.1),
    ]
    groups = [first, second, third]
    assert paired_groups(groups, pairs) == [first, pairs[1]]
    assert paired_groups(groups, [replace(pairs[0], loss=float("inf"))]) == groups


@pytest.mark.parametrize(
    ("config", "fields"),
    [
        (BlockConfig(4), {"kept": 4}),
        (Truncated(4, 7), {"kept": 4, "head_size": 8}),
        (Shared(4, 7, 16), {"kept": 4, "head_size": 8, "rank": 16}),
        (Reusing(4, {0: 1}, "layer", 0.1), {"kept": 4, "source": "layer"}),
        (REPLACED, {"kept": 0}),
    ],
    ids=str,
)
def test_decision_records_every_configuration(config: BlockConfig, fields: dict[str, Any]) -> None:
    written = Decision(
        block="layer", kind="attention", count=8, **config.recorded, operator="attention",
        ms_before=2.0, ms_after=1.0, predicted_loss=0.0, why="",
    ).to_json()  # fmt: skip
    without = dict.fromkeys(("head_size", "rank", "source"))
    assert {name: written[name] for name in ("kept", *without)} == {**without, **fields}


@pytest.mark.parametrize(
    ("config", "operators", "change"),
    [
        (BlockConfig(4), None, ""),
        (REPLACED, "skip", "replacing it by an affine map loses 0.2500"),
        (Truncated(4, 7), None, "queries and keys of 8 dimensions lose 0.0300"),
        (
            Shared(4, 7, 16),
            "sparse",
            "queries and keys of 8 dimensions of 16 shared ones lose 0.0400",
        ),
        (
            Reusing(4, {}, "layer", 0.5),
            "reuse",
            "reusing the probabilities of layer in all heads loses 0.5000",
        ),
    ],
    ids=str,
)
def test_configuration_names_its_operators_and_its_change(
    config: BlockConfig,
    operators: str | None,
    change: str,
    groups: list[BlockGroup],
    curves: dict[str, LossCurve],
) -> None:
    """All four heads are kept."""
    group = next(filter(cut_attention, groups))
    losses = {REPLACED: 0.25, Truncated(4, 7): 0.03, Shared(4, 7, 16): 0.04}
    changed = {config.change: loss for config, loss in losses.items()}
    curve = replace(curves[group.key], changed=changed)
    assert config.plain_operators == operators
    assert "; ".join(config.reasons(group.noun, curve)) == change
    assert config.is_fitted == change.startswith("queries")


def test_config_of_a_reader_has_the_heads_and_the_loss_of_its_pair(
    groups: list[BlockGroup], curves: dict[str, LossCurve]
):
    source, reader = filter(cut_attention, groups)
    pair = ReusePair(source, reader, {}, 1.0, heads=(2, 3, 0, 1), loss=0.1)
    curve, of_source = curves[reader.key], replace(curves[source.key], order=(3, 0, 1, 2))
    assert BlockConfig(2).mask(of_source.order) == [0, 1, 1, 0]
    config = pair.reusing(2, of_source)
    assert config == Reusing(2, {}, source.names[0], 0.1)
    mask = config.mask(curve.order)
    assert mask == [1, 0, 0, 1]  # those that take heads 2 and 1
    # By the numbers of heads after pruning.
    *_, reuse = reader.passes(reader.blocks[0], config, mask)
    assert reuse.targets == {reader.names[0]: {0: (source.names[0], 1), 1: (source.names[0], 0)}}
    assert config.loss(curve) == curve.at(2) + 0.1 * 2 / 4
    removed, reused = config.reasons(reader.noun, curve)
    assert "2 removed heads" in removed
    assert source.names[0] in reused and "0.1000" in reused
    assert config.sources == (source.names[0],)
    kept = BlockConfig(2)
    assert kept.sources == ()


def test_config_without_attention_removes_no_heads_before(
    groups: list[BlockGroup], curves: dict[str, LossCurve]
):
    group = next(filter(cut_attention, groups))
    curve = replace(curves[group.key], changed={REPLACED.change: 0.25})
    (replacing,) = group.passes(group.blocks[0], REPLACED, REPLACED.mask(curve.order))
    assert replacing.name == SkipAttention.name
    (reason,) = REPLACED.reasons(group.noun, curve)
    assert "0.2500" in reason
