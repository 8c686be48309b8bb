"""Reuse configurations, head masks and reuse edges."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnserve.calibration.elimination import Elimination
from attnserve.calibration.similarity import HeadSimilarity
from attnserve.context import DEFAULT_CONTEXT
from attnserve.planning.heads import criteria
from attnserve.planning.heads.criteria import CRITERIA, PruningInput
from attnserve.planning.heads.files import MutableEdges, layer_name, read_edges, read_masks
from attnserve.planning.heads.selection import (
    Removals,
    Reuse,
    edges_by_damage,
    edges_of,
    least_costly_masks,
    parse_reuse,
    reused_layers,
)
from graph_passes.blocks import AttentionBlock
from graph_passes.errors import InvalidArgument, InvalidData
from graph_passes.matching.find import find_attention
from graph_passes.passes.reuse_attention import ReuseAttention, check_edges
from tests.errors import check_length, raises
from tests.graph_passes.graphs import H, layers

L = 4
NAMES = [f"attention_{layer}" for layer in range(L)]


@cache
def blocks(count: int = L) -> tuple[AttentionBlock, ...]:
    """Layers of H heads each, all with the same masks."""
    return tuple(find_attention(layers(count)).blocks)


def alike(count: int = L, seed: int = 0) -> HeadSimilarity:
    """Any similarity of all heads: symmetric, 1 with itself, no two the same."""
    half = np.random.default_rng(seed).random((count * H, count * H))
    matrix = (half + half.T) / 2
    np.fill_diagonal(matrix, 1)
    return HeadSimilarity(tuple(NAMES[:count]), (H,) * count, matrix, 100)


def configured(
    text: str,
    count: int = L,
    *,
    masks: Mapping[str, Sequence[int]] | None = None,
    similarity: HeadSimilarity | None = None,
) -> MutableEdges:
    reuse = parse_reuse(text)
    chosen = [NAMES[layer] for layer in reused_layers(reuse, count)]
    return edges_of(reuse, blocks(count), chosen, masks=masks or {}, similarity=similarity)


# Forms of reuse


@pytest.mark.parametrize(
    ("text", "reuse"),
    [
        ("partial:6", Reuse("partial", 6)),
        ("partial:6:4", Reuse("partial", 6, 4)),
        ("full:1", Reuse("full", None, 1)),
        ("alternate", Reuse("alternate")),
        ("all-end", Reuse("all-end")),
        ("all-end:3", Reuse("all-end", None, 3)),
        ("auto", Reuse("auto")),
    ],
)
def test_parse_reuse_reads_every_form(text: str, reuse: Reuse):
    assert parse_reuse(text) == reuse


@pytest.mark.parametrize(
    "text",
    ["", ":", "partial", "partial:", "partial:a", "partial:-1", "partial:1.5", "partial: 1",
     "partial:1:2:3", "partial:1:", "full", "full:", "full:1:2", "alternate:1", "auto:2",
     "all-end:x", "FULL:1", "full:²", "nothing", "partial:" + "9" * 5000,
     "partial:0", "partial:1:0", "full:0", "all-end:0"],
    ids=lambda text: text[:20],
)  # fmt: skip
def test_parse_reuse_invalid_text_is_refused(text: str):
    code, *values = ("reuse.form", "partial:K[:P]", "full:P", "all-end")
    if text.endswith(":0"):
        code, values = "reuse.range", [text]
    with raises(InvalidArgument, code, *values):
        parse_reuse(text)


@pytest.mark.parametrize(
    ("text", "count", "expected"),
    [  # layers count from 0: of 12, the first is 0 and the last 11
        ("partial:6", 12, range(1, 11)),
        ("partial:6", 3, [1]),
        ("partial:6:1", 12, [1]),
        ("partial:6:11", 12, range(1, 12)),
        ("partial:1:1", 2, [1]),
        ("full:1", 12, [1]),
        ("full:11", 12, range(1, 12)),
        ("full:1", 2, [1]),
        ("alternate", 12, [1, 3, 5, 7, 9, 11]),
        ("alternate", 5, [1, 3]),
        ("alternate", 2, [1]),
        ("all-end", 12, range(5, 11)),
        ("all-end", 3, [1]),
        ("all-end:1", 12, [10]),
        ("all-end:10", 12, range(1, 11)),
        ("auto", 12, range(1, 11)),
    ],
)
def test_reused_layers_are_those_of_the_paper(text: str, count: int, expected: Sequence[int]):
    assert list(reused_layers(parse_reuse(text), count)) == list(expected)


@pytest.mark.parametrize(
    ("text", "count", "wanted", "most"),
    [
        ("partial:1", 2, 1, 0),
        ("partial:1:2", 2, 2, 1),
        ("partial:1:12", 12, 12, 11),
        ("full:12", 12, 12, 11),
        ("full:1", 1, 1, 0),
        ("alternate", 1, 1, 0),
        ("all-end", 2, 1, 0),
        ("all-end:11", 12, 11, 10),
        ("auto", 2, 1, 0),
        ("full:9999999999", 3, 9999999999, 2),
    ],
)
def test_reused_layers_too_many_is_refused(text: str, count: int, wanted: int, most: int):
    with raises(InvalidArgument, "reuse.layers", f"{wanted} of {count}", f"at most {most}"):
        reused_layers(parse_reuse(text), count)


def test_edges_of_more_heads_than_a_layer_has_is_refused():
    assert all(len(heads) == H for heads in configured(f"partial:{H}").values())
    with raises(InvalidArgument, "reuse.heads", "partial:4", "attention_1", "1 to 3"):
        configured("partial:4")


# Sources by index, as in the paper


def algorithm_1(count: int, reused: Sequence[int], K: int) -> MutableEdges:
    """The paper's algorithm, carrying the names of exact heads where it carries probabilities."""
    edges: MutableEdges = {}
    before: list[tuple[str, int]] = []
    for layer in range(count):
        taken = before[:K] if layer in reused else []
        own = [(NAMES[layer], head) for head in range(H - len(taken))]
        if taken:
            edges[NAMES[layer]] = {len(own) + i: source for i, source in enumerate(taken)}
        before = [*own, *taken]
    return edges


@pytest.mark.parametrize(
    ("text", "K", "reused"),
    [
        ("partial:1", 1, [1, 2]),
        ("partial:2", 2, [1, 2]),
        ("partial:2:3", 2, [1, 2, 3]),
        ("partial:3", 3, [1, 2]),
        ("full:3", 3, [1, 2, 3]),
        ("full:1", 3, [1]),
        ("alternate", 3, [1, 3]),
        ("all-end", 3, [1, 2]),
        ("all-end:1", 3, [2]),
    ],
)
def test_edges_of_by_index_follow_algorithm_1_to_exact_heads(text: str, K: int, reused: list[int]):
    edges = configured(text)
    assert edges == algorithm_1(L, reused, K)
    check_edges(edges, blocks())


def test_edges_of_by_index_pruned_heads_are_left_out():
    masks = {NAMES[0]: [0, 1, 1], NAMES[1]: [1, 1, 0]}
    edges = configured("partial:1", masks=masks)
    assert edges == {NAMES[1]: {1: (NAMES[0], 1)}, NAMES[2]: {2: (NAMES[1], 0)}}


# Sources by similarity


def exact(
    edges: MutableEdges, masks: Mapping[str, Sequence[int]], before: int
) -> list[tuple[str, int]]:
    """Heads of earlier layers that compute probabilities and stay."""
    return [
        (name, head)
        for name in NAMES[:before]
        for head in range(H)
        if masks.get(name, [1] * H)[head] and head not in edges.get(name, {})
    ]


def value(similarity: HeadSimilarity, name: str, head: int, source: tuple[str, int]) -> float:
    return float(similarity.between(name, source[0])[head, source[1]])


some_masks = st.lists(
    st.sampled_from([(1, 1, 1), (1, 1, 0), (0, 1, 1), (1, 0, 1), (0, 1, 0)]), min_size=L, max_size=L
)


@settings(max_examples=60)
@given(seed=st.integers(0, 10**6), K=st.integers(1, H), P=st.integers(1, L - 1), masks=some_masks)
def test_edges_of_partial_reuse_takes_most_similar_exact_heads(
    seed: int, K: int, P: int, masks: list[tuple[int, ...]]
):
    similarity = alike(seed=seed)
    masked = dict(zip(NAMES, masks, strict=True))
    edges = configured(f"partial:{K}:{P}", masks=masked, similarity=similarity)
    check_edges(edges, blocks())  # every source is earlier, and not reused itself
    assert list(edges) == NAMES[1 : P + 1]
    for layer, (name, taken) in enumerate(edges.items(), start=1):
        mine = [head for head in range(H) if masked[name][head]]
        sources = exact(edges, masked, layer)
        assert len(taken) == min(K, len(mine)) and set(taken) <= set(mine)
        assert set(taken.values()) <= set(sources)
        if len(taken) < len(mine):
            best = {h: max(sources, key=lambda s, h=h: value(similarity, name, h, s)) for h in mine}
            nearest = sorted(mine, key=lambda h: -value(similarity, name, h, best[h]))
            assert taken == {head: best[head] for head in nearest[:K]}


@settings(max_examples=30)
@given(seed=st.integers(0, 10**6))
def test_edges_of_full_reuse_is_the_best_assignment_to_one_layer(seed: int):
    """The assignment to all heads of one layer with the highest mean similarity."""
    similarity = alike(seed=seed)
    edges = configured("alternate", similarity=similarity)
    assert list(edges) == [NAMES[1], NAMES[3]]
    for name, sources in ((NAMES[1], [NAMES[0]]), (NAMES[3], [NAMES[0], NAMES[2]])):
        assignments = [
            {head: (source, theirs) for head, theirs in enumerate(order)}
            for source in sources
            for order in permutations(range(H))
        ]
        best = max(
            assignments,
            key=lambda assignment, name=name: sum(
                value(similarity, name, head, source) for head, source in assignment.items()
            ),
        )
        assert edges[name] == best


def test_edges_of_full_reuse_without_equal_layer_takes_nearest_heads():
    """The first layer lost a head: no layer has as many, so that some head serves two."""
    masks = {NAMES[0]: [1, 1, 0]}
    edges = configured("full:1", masks=masks, similarity=alike())
    taken = edges[NAMES[1]]
    assert sorted(taken) == [0, 1, 2] and set(taken.values()) <= {(NAMES[0], 0), (NAMES[0], 1)}


def test_edges_of_nan_similarity_is_no_source():
    similarity = alike()
    similarity.matrix[: 2 * H, 2 * H :] = similarity.matrix[2 * H :, : 2 * H] = np.nan
    edges = configured("full:3", similarity=similarity)
    assert set(edges) == {NAMES[1], NAMES[3]}, "layer 2 has nothing before it to compare with"
    assert {source for source, _ in edges[NAMES[3]].values()} == {NAMES[2]}


def test_edges_of_head_reused_in_the_model_is_no_source():
    model = layers(3)
    ReuseAttention({NAMES[1]: {0: (NAMES[0], 2)}})(model)
    found = find_attention(model).blocks
    (reused,) = found[1].reused
    similarity = alike(3)
    similarity.matrix[:] = 0.1
    similarity.matrix[2 * H :, H + reused.heads[0]] = 0.9  # more alike than any exact head
    reuse = Reuse("partial", 2)
    edges = edges_of(reuse, found, [NAMES[2]], masks={}, similarity=similarity)
    assert len(edges[NAMES[2]]) == 2
    assert (NAMES[1], int(reused.heads[0])) not in edges[NAMES[2]].values()
    check_edges(edges, found)


# Sources by damage


@settings(max_examples=40)
@given(seed=st.integers(0, 10**6), budget=st.sampled_from([0.0, 0.01, 0.1, 1.0, 100.0]))
def test_edges_by_damage_keep_the_budget_and_exact_sources(seed: int, budget: float):
    similarity = alike(seed=seed)
    effect = {name: np.random.default_rng(seed + 1).random(H) for name in NAMES}
    edges = edges_by_damage(
        blocks(), NAMES[1:], masks={}, similarity=similarity, effect=effect, budget=budget
    )
    check_edges(edges, blocks())
    damage = sum(
        effect[name][head] * (1 - value(similarity, name, head, source)) ** 2
        for name, taken in edges.items()
        for head, source in taken.items()
    )
    assert damage <= budget
    assert all(4 * len(taken) >= H for taken in edges.values())
    assert bool(edges) or budget < 1


def test_edges_by_damage_least_damaging_edge_comes_first():
    similarity = alike()
    effect = {name: np.ones(H) for name in NAMES}
    damage, name, head, source = min(
        ((1 - value(similarity, NAMES[layer], head, source)) ** 2, NAMES[layer], head, source)
        for layer in (1, 2)
        for head in range(H)
        for source in exact({}, {}, layer)
    )

    def edges(budget: float) -> MutableEdges:
        return edges_by_damage(
            blocks(), NAMES[1:3], masks={}, similarity=similarity, effect=effect, budget=budget
        )

    assert edges(damage) == {name: {head: source}}
    assert edges(damage * (1 - 1e-9)) == {}


def test_edges_by_damage_nan_effect_is_never_chosen():
    similarity = alike()
    effect = {name: np.full(H, np.nan) for name in NAMES}
    effect[NAMES[2]] = np.array([np.nan, 1e-9, np.nan])
    edges = edges_by_damage(
        blocks(), NAMES[1:], masks={}, similarity=similarity, effect=effect, budget=1.0
    )
    assert list(edges) == [NAMES[2]] and list(edges[NAMES[2]]) == [1]


# Pruned heads

scores = st.lists(
    st.lists(st.floats(0, 1, allow_subnormal=False), min_size=1, max_size=6), min_size=1, max_size=5
)


def by_score(scores: Mapping[str, np.ndarray], fraction: float) -> dict[str, list[int]]:
    """The masks of heads with these scores."""
    return least_costly_masks(
        {name: Removals.by_score(layer) for name, layer in scores.items()}, fraction
    )


@given(scores=scores, fraction=st.floats(0.01, 0.99))
def test_least_costly_masks_remove_lowest_scores_and_keep_one_per_layer(
    scores: list[list[float]], fraction: float
):
    named = {f"layer {i}": np.array(values) for i, values in enumerate(scores)}
    masks = by_score(named, fraction)
    total = sum(map(len, scores))
    removed = sum(mask.count(0) for mask in masks.values())
    assert removed == min(round(fraction * total), total - len(scores))
    assert all(sum(mask) >= 1 for mask in masks.values())
    for name, mask in masks.items():  # whoever stays is worth as much, of its layer
        lost = [named[name][h] for h in range(len(mask)) if not mask[h]]
        kept = [named[name][h] for h in range(len(mask)) if mask[h]]
        assert not lost or max(lost) <= min(kept)


def test_least_costly_masks_share_is_of_all_heads():
    scores = {"a": np.array([5, 6, 7, 8]), "b": np.array([1, 2, 3, 4])}
    assert by_score(scores, 0.25) == {"a": [1, 1, 1, 1], "b": [0, 0, 1, 1]}
    masks = by_score(scores, 0.5)
    assert masks == {"a": [0, 1, 1, 1], "b": [0, 0, 0, 1]}, "the last of a layer stays"


@pytest.mark.parametrize(("fraction", "removed"), [(0.124, 0), (0.126, 1), (0.374, 1), (0.376, 2)])
def test_least_costly_masks_share_is_rounded_to_whole_heads(fraction: float, removed: int):
    assert by_score({"a": np.arange(4)}, fraction)["a"].count(0) == removed


@given(
    steps=st.lists(
        st.lists(st.floats(0, 1, allow_subnormal=False), min_size=1, max_size=6),
        min_size=1,
        max_size=5,
    ),
    fraction=st.floats(0.01, 0.99),
    seed=st.integers(0, 99),
)
def test_least_costly_masks_follow_the_order_of_each_layer(
    steps: list[list[float]], fraction: float, seed: int
):
    random = np.random.default_rng(seed)
    removals = {
        f"layer {i}": Removals(random.permutation(len(costs)).tolist(), costs)
        for i, costs in enumerate(steps)
    }
    masks = least_costly_masks(removals, fraction)
    total = sum(map(len, steps))
    removed = {name: mask.count(0) for name, mask in masks.items()}
    assert sum(removed.values()) == min(round(fraction * total), total - len(steps))
    for name, mask in masks.items():
        order, _ = removals[name]
        assert sum(mask) >= 1
        assert {head for head, stays in enumerate(mask) if not stays} == set(order[: removed[name]])


def test_least_costly_masks_cheapest_step_of_any_layer_is_next():
    removals = {
        "a": Removals([2, 0, 1], [0.1, 0.4, 0.5]),
        "b": Removals([0, 1, 2], [0.2, 0.1, 0.7]),
    }
    expected = {
        1: ([1, 1, 0], [1, 1, 1]),
        2: ([1, 1, 0], [0, 1, 1]),
        3: ([1, 1, 0], [0, 0, 1]),
        4: ([0, 1, 0], [0, 0, 1]),
    }
    for heads, (a, b) in expected.items():
        assert least_costly_masks(removals, heads / 6) == {"a": a, "b": b}


def test_by_energy_weighs_layers_by_effect_on_output(monkeypatch: pytest.MonkeyPatch):
    early, last = NAMES[:2]
    elimination = Elimination(np.arange(H), np.array([0, 0.1, 0.3, 1]))
    for name, result in (
        ("elimination_order", {early: elimination, last: elimination}),
        ("leave_one_out_total", {early: 0.4, last: 4.0}),
    ):
        monkeypatch.setattr(criteria, name, lambda *_, result=result, **__: result)
    model = layers(2)
    masks = [
        CRITERIA["energy"](PruningInput(model, blocks(2), [], heads / 6, DEFAULT_CONTEXT))
        for heads in (1, 2, 3)
    ]
    assert masks[0] == {early: [0, 1, 1], last: [1, 1, 1]}
    assert masks[1] == {early: [0, 0, 1], last: [1, 1, 1]}
    assert masks[2] == {early: [0, 0, 1], last: [0, 1, 1]}


# Names of layers


def test_layer_name_reads_a_name_or_else_an_index_from_0():
    assert layer_name("1", NAMES) == layer_name("attention_1", NAMES) == NAMES[1]
    assert layer_name("0", ["1", "0"]) == "0"


@pytest.mark.parametrize("layer", ["4", "-1", "", "1.0", "²", "attention", "9" * 5000])
def test_layer_name_unknown_layer_is_refused(layer: str):
    with raises(InvalidArgument, "request.unknown_layer", "`skip`", NAMES[0]) as caught:
        layer_name(layer, NAMES, "skip")
    assert len(str(caught.value)) < 400


# Masks of a user


def write(path: Path, content: Any) -> Path:
    text = content if isinstance(content, str) else json.dumps(content)
    path.write_text(text, encoding="utf-8")
    return path


def test_read_masks_by_name_or_index(tmp_path: Path):
    content = {"attention_2": [1, 1, 1], "0": [1, 0, 1], "1": [0, 0, 0]}
    expected = {"attention_2": [1, 1, 1], "attention_0": [1, 0, 1], "attention_1": [0, 0, 0]}
    assert read_masks(write(tmp_path / "m.json", content), blocks()) == expected
    assert read_masks(content, blocks()) == expected
    assert read_masks({0: (1, 0, 1)}, blocks()) == {"attention_0": [1, 0, 1]}
    assert read_masks({"0": np.array([1, 0, 1])}, blocks()) == {"attention_0": [1, 0, 1]}
    assert read_masks({"0": [1.0, 0.0, 1]}, blocks()) == {"attention_0": [1, 0, 1]}


GONE = [0] * H
MASKS: dict[str, tuple[Any, str, str]] = {
    "too short": ({"0": [1, 0]}, "masks.length", "2 entries, expected 3"),
    "too long": ({"0": [1, 0, 1, 1]}, "masks.length", "4 entries, expected 3"),
    "empty": ({"0": []}, "masks.length", "0 entries, expected 3"),
    "unknown layer": ({"4": [1, 0, 1]}, "request.unknown_layer", "'4'"),
    "layer twice": ({"0": [1, 0, 1], "attention_0": [1, 1, 0]}, "masks.twice", "attention_0"),
    "every layer removed": (dict.fromkeys("0123", GONE), "masks.empty", ""),
    "2": ({"0": [1, 2, 0]}, "masks.entries", "[1, 2, 0]"),
    "-1": ({"0": [1, -1, 0]}, "masks.entries", ""),
    "a half": ({"0": [1, 0.5, 0]}, "masks.entries", ""),
    "text": ({"0": [1, "1", 0]}, "masks.entries", ""),
    "null": ({"0": [1, None, 0]}, "masks.entries", "[1, null, 0]"),
    "true": ({"0": [1, True, 0]}, "masks.entries", "[1, true, 0]"),
    "not a number": ('{"0": [1, NaN, 0]}', "masks.entries", ""),
    "nested list": ({"0": [1, [1], 0]}, "masks.entries", ""),
    "number for a list": ({"0": 1}, "masks.entries", "value 1"),
    "object for a list": ({"0": {"0": 1}}, "masks.entries", ""),
    "long text": ({"0": "1" * 10**5}, "masks.entries", ""),
    "not JSON": ("{0: [1]}", "request.not_json", ""),
    "empty file": ("", "request.not_json", ""),
    "key twice": ('{"0": [1, 0, 1], "0": [1, 1, 0]}', "request.not_json", "repeated"),
    "list at the top": ([[1, 0, 1]], "request.not_object", '{"layer": [1, 0'),
    "null at the top": (None, "request.not_object", ""),
    "empty object": ({}, "request.not_object", ""),
    "unclosed brackets": ("[" * 10**5, "request.not_json", ""),
    "too many digits": ('{"0": [' + "1" * 5000 + ", 0, 1]}", "request.not_json", ""),
}


@pytest.mark.parametrize("read", [read_masks, read_edges])
@pytest.mark.parametrize(
    ("name", "content", "code"),
    [
        ("none.json", None, "request.no_file"),
        (".", None, "request.unreadable_file"),
        ("binary.json", bytes(range(128, 256)), "request.not_json"),
        ("x" * 300 + ".json", None, "request.unreadable_file"),
    ],
)
def test_read_file_that_cannot_be_read_is_refused(
    tmp_path: Path, read: Callable[..., Any], name: str, content: bytes | None, code: str
):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    parameter = "`prune_heads`" if read is read_masks else "`reuse`"
    with raises(InvalidData, code, parameter, path):
        read(path, blocks())


# Edges of a user


def test_read_edges_by_name_or_index(tmp_path: Path):
    content = {"attention_2": {"0": ["0", 2], "1": ["attention_1", 0]}, "1": {"2": [0, 1]}}
    expected = {
        "attention_2": {0: ("attention_0", 2), 1: ("attention_1", 0)},
        "attention_1": {2: ("attention_0", 1)},
    }
    assert read_edges(write(tmp_path / "e.json", content), blocks()) == expected
    assert read_edges(content, blocks()) == expected
    assert read_edges(expected, blocks()) == expected, "as a plan holds them"
    assert read_edges({1: {2: (0, 1)}}, blocks()) == {"attention_1": {2: ("attention_0", 1)}}
    assert read_edges({"1": {}}, blocks()) == {}, "layers without edges are left out"


EDGES: dict[str, tuple[Any, str, str]] = {
    "forward": ({"0": {"0": ["1", 0]}}, "edges.invalid", "attention_0"),
    "to the same layer": ({"1": {"0": ["1", 1]}}, "edges.invalid", "attention_1"),
    "to itself": ({"1": {"0": ["1", 0]}}, "edges.invalid", "attention_1"),
    "from a reused head": (
        {"1": {"0": ["0", 0]}, "2": {"1": ["1", 0]}},
        "edges.invalid",
        "attention_2[1] <- attention_1[0]",
    ),
    "unknown head": ({"1": {"3": ["0", 0]}}, "edges.invalid", "head 3, expected 0 to 2"),
    "unknown source head": ({"1": {"0": ["0", 3]}}, "edges.invalid", "head 3, expected 0 to 2"),
    "negative source head": ({"1": {"0": ["0", -1]}}, "edges.invalid", "head -1"),
    "huge source head": ({"1": {"0": ["0", 10**30]}}, "edges.invalid", "head 1000"),
    "huge head": ({"1": {"9" * 50: ["0", 0]}}, "edges.invalid", "head 999"),
    "endless head": ({"1": {"9" * 5000: ["0", 0]}}, "edges.format", "count heads from 0"),
    "negative head": ({"1": {"-1": ["0", 0]}}, "edges.format", '{"-1": '),
    "head that is not a number": ({"1": {"a": ["0", 0]}}, "edges.format", '{"a": '),
    "unknown layer": ({"x": {"0": ["0", 0]}}, "request.unknown_layer", "'x'"),
    "unknown source": ({"1": {"0": ["x", 0]}}, "request.unknown_layer", "'x'"),
    "negative source": ({"1": {"0": [-1, 0]}}, "request.unknown_layer", "'-1'"),
    "source alone": ({"1": {"0": ["0"]}}, "edges.format", '["0"]'),
    "source of three": ({"1": {"0": ["0", 1, 2]}}, "edges.format", ""),
    "number for a source": ({"1": {"0": 0}}, "edges.format", ""),
    "null for a source": ({"1": {"0": None}}, "edges.format", ""),
    "text for a head": ({"1": {"0": ["0", "1"]}}, "edges.format", ""),
    "half head": ({"1": {"0": ["0", 0.5]}}, "edges.format", ""),
    "true for a head": ({"1": {"0": ["0", True]}}, "edges.format", ""),
    "true for a layer": ({"1": {"0": [True, 0]}}, "edges.format", ""),
    "list of heads": ({"1": [["0", 0]]}, "edges.format", '[["0", 0]]'),
    "two sources": ('{"1": {"0": ["0", 0], "00": ["0", 1]}}', "edges.twice", "head 0"),
    "two sources by name": (
        {"1": {"0": ["0", 0]}, "attention_1": {"0": ["0", 1]}},
        "edges.twice",
        "head 0 of attention_1",
    ),
    "head twice": ('{"1": {"0": ["0", 0], "0": ["0", 1]}}', "request.not_json", "repeated"),
    "list at the top": ([["1", 0, "0", 0]], "request.not_object", ""),
    "not JSON": ("1 <- 0", "request.not_json", ""),
}


MISTAKES = [(read_masks, "`prune_heads`", *mistake) for mistake in MASKS.items()]
MISTAKES += [(read_edges, "`reuse`", *mistake) for mistake in EDGES.items()]


@pytest.mark.parametrize(("read", "parameter", "name", "mistake"), MISTAKES)
def test_read_invalid_content_is_refused(
    tmp_path: Path, read: Callable[..., Any], parameter: str, name: str, mistake: Any
):
    content, code, value = mistake
    path = write(tmp_path / "file.json", content)
    error = InvalidData if code.startswith("request.not_") else InvalidArgument
    with raises(error, code, parameter, value) as caught:
        read(path, blocks())
    check_length(caught.value)
