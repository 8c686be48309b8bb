"""Blocks cut out of a model, timed alone and in turns, and what is remembered of it."""

from __future__ import annotations

import json
import os
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from attnserve.models.artifact import load_model
from attnserve.models.example_inputs import example_inputs
from attnserve.runtime import part_latency as latency
from attnserve.runtime.interleaved_timer import QUICK
from attnserve.runtime.part_latency import Cut, LatencyTable, Part, cut_out, default_cache
from attnserve.runtime.session import open_session
from graph_passes.emit.editing import exposing
from graph_passes.matching.feed_forward import find_feed_forward
from graph_passes.matching.find import find_attention
from graph_passes.passes.fuse_attention import FuseAttention
from graph_passes.passes.prune_heads import PruneHeads
from graph_passes.passes.prune_neurons import PruneNeurons
from tests.graph_passes.graphs import PARTS, K, graph


@pytest.fixture(scope="module")
def bert(tiny: Path) -> ir.Model:
    return load_model(tiny / "model.onnx")


@pytest.fixture(scope="module")
def feeds(bert: ir.Model) -> list[dict[str, np.ndarray]]:
    return [example_inputs(bert, 2, length, seed=0, padded=True) for length in (5, 9)]


def cuts(model: ir.Model) -> list[Cut]:
    found = [Cut(b.output.output, (b.x,)) for b in find_attention(model)[0] if b.output]
    return [*found, *(Cut(b.output, (b.x,)) for b in find_feed_forward(model))]


# Cutting out


def test_a_part_makes_what_the_model_makes(bert: ir.Model, feeds: Any):
    wanted = cuts(bert)
    parts = cut_out(bert, wanted, feeds)
    assert len(parts) == 4
    for cut, part in zip(wanted, parts, strict=True):
        with exposing(bert, [cut.output]):
            whole = open_session(bert, threads=1)
        alone = open_session(part.model, threads=1)
        for feed, fed in zip(feeds, part.feeds, strict=True):
            expected, got = whole.run(None, feed)[0], alone.run(None, fed)[0]
            np.testing.assert_allclose(got, expected, rtol=0, atol=1e-6)


def outputs(model: ir.Model, feed: Any) -> np.ndarray:
    return open_session(model, threads=1).run(None, feed)[0]


def whole(model: ir.Model, cut: Cut, feed: Any) -> np.ndarray:
    with exposing(model, [cut.output]):
        return outputs(model, feed)


@pytest.mark.parametrize("version", [3, 8])
def test_weights_that_are_listed_as_inputs_are_weights(bert: ir.Model, feeds: Any, version: int):
    """Before IR version 4 all were; since then these are what a caller may replace."""
    old = bert.clone()
    old.graph.inputs.extend(old.graph.initializers.values())
    old.ir_version = version
    first, *_, last = cuts(old)
    parts = cut_out(old, [first, last], feeds)
    for cut, part in zip((first, last), parts, strict=True):
        assert len(part.feeds[0]) == (2 if cut is first else 1)  # tokens, and a mask
        for feed, fed in zip(feeds, part.feeds, strict=True):
            got = outputs(part.model, fed)
            np.testing.assert_allclose(got, whole(old, cut, feed), rtol=0, atol=1e-6)
    assert parts[0].key(0) == cut_out(bert, cuts(bert)[:1], feeds)[0].key(0)


def test_tokens_that_the_model_also_returns_are_fed(bert: ir.Model, feeds: Any):
    """As with output_hidden_states."""
    model = bert.clone()
    cut = cuts(model)[1]
    model.graph.outputs.extend(cut.sources)
    (part,) = cut_out(model, [cut], feeds)
    assert [value.name for value in part.model.graph.outputs] == [cut.output.name]
    np.testing.assert_allclose(
        outputs(part.model, part.feeds[0]), whole(model, cut, feeds[0]), rtol=0, atol=1e-6
    )


def test_what_follows_from_lengths_is_fed_but_for_numbers():
    """A scale asked of a shape stays the graph's own; a mask is made once, outside of the layer."""
    scores = """
        s0 = MatMul(q, kT)
        size0 = Shape(q)
        size1 = Gather(size0, i3)
        size2 = Cast <to = 1> (size1)
        size = Sqrt(size2)
        s = Div(s0, size)"""
    mask = """
        shape = Shape(x)
        length = Slice(shape, a1, a2)
        square = Concat <axis = 0> (length, length)
        low_all = Expand(low, square)
        causal = Trilu <upper = 1> (low_all, i1)
        m = Add(s, causal)"""
    model = graph("".join({**PARTS, "scores": scores, "mask": mask}.values()))
    feeds = [example_inputs(model, 2, length, seed=0) for length in (5, 9)]
    (cut,) = cuts(model)
    (part,) = cut_out(model, [cut], feeds)
    assert sorted(part.feeds[0]) == ["causal/fed", "x/fed"]
    (block,), _ = find_attention(part.model)
    assert block.scale == pytest.approx(K**-0.5, rel=1e-6)
    for feed, fed in zip(feeds, part.feeds, strict=True):
        got = outputs(part.model, fed)
        np.testing.assert_allclose(got, whole(model, cut, feed), rtol=0, atol=1e-6)


def test_what_a_body_returns_as_it_is_is_read():
    """ONNX Runtime refuses such a body; whoever asks what a node reads is told all the same."""
    x, y = (ir.val(name, ir.DataType.FLOAT, ["n"]) for name in "xy")
    flag = ir.val("flag", ir.DataType.BOOL, [])
    double = ir.node("Add", [y, y])
    bodies = {
        "then_branch": ir.Graph([], [x], nodes=[], name="yes"),
        "else_branch": ir.Graph([], double.outputs, nodes=[double], name="no"),
    }
    node = ir.node("If", [flag], attributes=bodies)
    assert set(latency._reads(node)) == {flag, x, y}


# Axes of what is fed


def dims(part: Part) -> list[list[Any]]:
    return [
        [size if isinstance(size, int) else size.value for size in value.shape or ()]
        for value in part.model.graph.inputs
    ]


@pytest.mark.parametrize(
    ("shapes", "batch", "length"),
    [
        ([(2, 5), (2, 9)], 2, "sequence"),
        ([(1, 5), (4, 5)], "batch", 5),
        ([(1, 5), (4, 9)], "batch", "sequence"),
        ([(5, 5), (9, 9)], "batch", "sequence"),
        ([(1, 5), (4, 9), (4, 5)], "batch", "sequence"),
    ],
)
def test_axes_are_named_by_what_they_count(
    bert: ir.Model, shapes: list[tuple[int, int]], batch: Any, length: Any
):
    feeds = [example_inputs(bert, b, n, seed=0, padded=True) for b, n in shapes]
    part = cut_out(bert, cuts(bert)[:1], feeds)[0]
    tokens, mask = dims(part)
    assert tokens == [batch, length, 32]
    assert mask == [batch, 1, length, length]
    name = find_attention(part.model)[0][0].name
    fused = part.model.clone()
    FuseAttention({name: "multi_head"})(fused)  # binds the axes to lengths of its own
    for fed in part.feeds:
        got, expected = outputs(fused, fed), outputs(part.model, fed)
        np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5)


def test_tokens_in_a_row_are_as_many_as_texts_times_their_length():
    sizes = [(2, 5), (2, 9)], [(1, 5), (4, 9)], [(1, 5), (4, 5)]
    named = [latency._dim(0, tuple(b * n for b, n in pairs), pairs) for pairs in sizes]
    assert named == ["2*sequence", "batch*sequence", "batch*5"]
    assert latency._dim(0, (7, 11), sizes[0]) == "axis_7_11"
    assert latency._dim(0, (7, 7), sizes[0]) == 7


def test_the_model_stays_as_it_was(bert: ir.Model, feeds: Any):
    before = ir.to_proto(bert).SerializeToString()
    cut_out(bert, cuts(bert), feeds)
    assert ir.to_proto(bert).SerializeToString() == before


def test_a_part_holds_one_block_and_nothing_of_others(bert: ir.Model, feeds: Any):
    for part in cut_out(bert, cuts(bert)[:2], feeds):
        blocks, misses = find_attention(part.model)
        assert len(blocks) == 1 and not misses
        assert not find_feed_forward(part.model)


def test_masks_are_fed_as_the_model_computes_them(bert: ir.Model, feeds: Any):
    part = cut_out(bert, cuts(bert)[:1], feeds)[0]
    masks = [array for array in part.feeds[0].values() if array.ndim == 4]
    assert len(masks) == 1 and len(part.feeds[0]) == 2
    assert masks[0].shape[0] == 2 and masks[0].shape[-1] == 5
    assert len(np.unique(masks[0])) == 2  # the second text is padded


def test_layers_that_do_the_same_work_have_one_key(bert: ir.Model, feeds: Any):
    first, second, *feed_forwards = cut_out(bert, cuts(bert), feeds)
    assert first.key(0) == second.key(0)
    assert first.key(0) != first.key(1)  # another length
    assert feed_forwards[0].key(0) == feed_forwards[1].key(0) != first.key(0)


def test_fewer_heads_are_other_work(bert: ir.Model, feeds: Any):
    part = cut_out(bert, cuts(bert)[:1], feeds)[0]
    small = part.model.clone()
    PruneHeads({find_attention(small)[0][0].name: [1, 1, 0, 1]})(small)
    other = part.model.clone()
    PruneHeads({find_attention(other)[0][0].name: [0, 1, 1, 1]})(other)
    assert Part(small, part.feeds).key(0) != part.key(0)
    assert Part(small, part.feeds).key(0) == Part(other, part.feeds).key(0)


# The table


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[list[float]]:
    """What ``time_sessions`` returns, call by call."""
    said: list[list[float]] = []

    def time_sessions(sessions: Any, feeds: Any, *, seconds: float) -> list[np.ndarray]:
        times = said.pop(0)
        assert len(times) == len(sessions) == len(feeds)
        return [np.array([time, 1.1 * time, 0.9 * time]) for time in times]

    monkeypatch.setattr(latency, "time_sessions", time_sessions)
    return said


@pytest.fixture
def parts(bert: ir.Model, feeds: Any) -> dict[str, Part]:
    part = cut_out(bert, cuts(bert)[:1], feeds[:1])[0]
    found = {"whole": part}
    for kept in (3, 2):
        small = part.model.clone()
        name = find_attention(small)[0][0].name
        PruneHeads({name: [1] * kept + [0] * (4 - kept)})(small)
        found[str(kept)] = Part(small, part.feeds)
    return found


def test_times_are_measured_once(parts: Any, clock: list[list[float]], tmp_path: Path):
    clock.append([4.0, 3.0, 2.0])
    table = LatencyTable(tmp_path / "t.json", threads=1)
    first = table.measure(parts)
    assert first == {"whole": (4.0,), "3": (3.0,), "2": (2.0,)}
    assert table.measured == 3
    again = LatencyTable(tmp_path / "t.json", threads=1)
    assert again.measure(parts) == first  # the clock has nothing more to say
    assert again.measured == 0


def test_what_is_new_is_in_proportion_to_what_is_known(
    parts: Any, clock: list[list[float]], tmp_path: Path
):
    """The machine runs at half the speed when the third form is timed."""
    clock.append([4.0, 3.0])
    LatencyTable(tmp_path / "t.json").measure({n: parts[n] for n in ("whole", "3")})
    clock.append([8.0, 4.0])
    times = LatencyTable(tmp_path / "t.json").measure(parts)
    assert times == {"whole": (4.0,), "3": (3.0,), "2": (2.0,)}


def test_other_threads_are_other_entries(parts: Any, clock: list[list[float]], tmp_path: Path):
    clock += [[4.0], [2.0]]
    whole = {"whole": parts["whole"]}
    LatencyTable(tmp_path / "t.json", threads=1).measure(whole)
    assert LatencyTable(tmp_path / "t.json", threads=2).measure(whole) == {"whole": (2.0,)}
    kept = json.loads((tmp_path / "t.json").read_text())
    assert len(kept) == 2 and all("threads" in setting for setting in kept)


def test_other_cores_are_other_entries(monkeypatch: pytest.MonkeyPatch):
    def setting(cores: int) -> str:
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)), raising=False)
        return LatencyTable(None, threads=1).setting

    assert setting(2) != setting(16)
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    assert LatencyTable(None, threads=1).setting == setting(16)


def test_other_gpus_are_other_entries(monkeypatch: pytest.MonkeyPatch):
    found: list[str | None] = ["NVIDIA H200", "NVIDIA L4", None]
    monkeypatch.setattr(latency, "output_of", lambda *_: found.pop(0))
    settings = [LatencyTable(None, provider="cuda").setting for _ in range(3)]
    assert len(set(settings)) == 3 and "NVIDIA H200" in settings[0] and not found
    assert "NVIDIA" not in LatencyTable(None).setting  # and nobody is asked


def test_few_sessions_are_open_at_once(
    bert: ir.Model, feeds: Any, clock: list[list[float]], monkeypatch: pytest.MonkeyPatch
):
    """Each beside the first, which runs at half the speed in the second turn."""
    part = cut_out(bert, cuts(bert)[2:3], feeds)[0]
    forms = {str(n): Part(narrowed(part.model, n), part.feeds) for n in range(1, 11)}
    parts = {"whole": part, **forms}
    open_now: weakref.WeakSet[Any] = weakref.WeakSet()
    most: list[int] = []

    class Session:
        pass

    def opened(*_: Any, **__: Any) -> Session:
        session = Session()
        open_now.add(session)
        most.append(len(open_now))
        return session

    monkeypatch.setattr(latency, "open_session", opened)
    first, second = [100.0, 1, 2, 3, 4, 5, 6, 7], [200.0, 16, 18, 20]
    clock += [first, first, second, second]  # two shapes
    told: list[tuple[int, int]] = []
    table = LatencyTable(None)
    times = table.measure(parts, progress=lambda *done: told.append(done))
    assert max(most) == 8 and not clock and told == [(1, 2), (2, 2)]
    expected = {"whole": 100.0, **{str(n): float(n) for n in range(1, 11)}}
    assert times == {name: (ms, ms) for name, ms in expected.items()}
    assert table.measured == 22


def narrowed(model: ir.Model, kept: int) -> ir.Model:
    small = model.clone()
    block = find_feed_forward(small)[0]
    PruneNeurons({block.name: [1] * kept + [0] * (block.num_neurons - kept)})(small)
    return small


@pytest.mark.parametrize("content", ["", "{", "[]", '{"a": 1}', '{"a": {"b": "c"}}', "\x00"])
def test_a_damaged_file_is_measured_again(
    content: str, parts: Any, clock: list[list[float]], tmp_path: Path
):
    clock.append([4.0])
    (tmp_path / "t.json").write_text(content)
    table = LatencyTable(tmp_path / "t.json")
    assert table.measure({"whole": parts["whole"]}) == {"whole": (4.0,)}
    assert list(json.loads((tmp_path / "t.json").read_text())) == [table.setting]


def test_a_folder_that_cannot_be_written_costs_the_memory_only(
    parts: Any, clock: list[list[float]], tmp_path: Path
):
    clock.append([4.0])
    (tmp_path / "file").write_text("in the way")
    table = LatencyTable(tmp_path / "file" / "t.json")
    assert table.measure({"whole": parts["whole"]}) == {"whole": (4.0,)}


def full(*_: Any, **__: Any) -> None:
    raise OSError(28, "No space left on device")


def stopped(*_: Any, **__: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("fails", ["in the way", full, stopped])
def test_a_write_that_fails_leaves_nothing_behind(
    fails: Any, parts: Any, clock: list[list[float]], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):  # fmt: skip
    clock.append([4.0])
    path = tmp_path / "t.json"
    if isinstance(fails, str):
        path.mkdir()
    else:
        monkeypatch.setattr(latency.json, "dump", fails)
    before = list(tmp_path.iterdir())
    table = LatencyTable(path)
    if fails is stopped:
        with pytest.raises(KeyboardInterrupt):
            table.measure({"whole": parts["whole"]})
    else:
        assert table.measure({"whole": parts["whole"]}) == {"whole": (4.0,)}
    assert list(tmp_path.iterdir()) == before


def test_the_cache_lies_where_it_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("ATTNSERVE_CACHE", str(tmp_path))
    assert default_cache() == tmp_path / "latency.json"
    monkeypatch.delenv("ATTNSERVE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x"))
    assert default_cache().name == "latency.json" and "attnserve" in str(default_cache())


def test_a_real_clock_gives_real_times(bert: ir.Model, feeds: Any):
    part = cut_out(bert, cuts(bert)[:1], feeds)[0]
    times = LatencyTable(None, threads=1).measure({"whole": part})["whole"]
    assert len(times) == 2 and all(0 < ms < 1000 for ms in times)


def test_what_is_timed_is_a_run_on_the_device_s_own_memory(monkeypatch: pytest.MonkeyPatch):
    """Each session is bound to its inputs once, outside of the clock."""
    bound: list[tuple[Any, Any]] = []
    runs = {"a": 0, "b": 0}

    def bind(session: str, feed: Any) -> Any:
        bound.append((session, feed))

        def run() -> None:
            runs[session] += 1

        return run

    monkeypatch.setattr(latency, "bound", bind)
    times = latency.time_sessions(["a", "b"], [{"x": 1}, {"x": 2}], seconds=0.01)
    assert bound == [("a", {"x": 1}), ("b", {"x": 2})]
    assert len(times) == 2 and min(runs.values()) > QUICK.min_rounds
