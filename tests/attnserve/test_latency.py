"""Blocks cut out of a model, timed alone and in turns, and what is remembered of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from attnserve import latency
from attnserve.artifact import load_model
from attnserve.inputs import example_inputs
from attnserve.latency import Cut, LatencyTable, Part, cut_out, default_cache
from attnserve.session import open_session
from graph_passes.edit import exposing
from graph_passes.feed_forward import find_feed_forward
from graph_passes.find import find_attention
from graph_passes.prune import PruneHeads


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
    assert len(masks) == 1
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
    """What ``in_turns`` is to say, call by call; every call is taken off."""
    said: list[list[float]] = []

    def in_turns(sessions: Any, feeds: Any, *, seconds: float) -> list[np.ndarray]:
        times = said.pop(0)
        assert len(times) == len(sessions) == len(feeds)
        return [np.array([time, 1.1 * time, 0.9 * time]) for time in times]

    monkeypatch.setattr(latency, "in_turns", in_turns)
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
