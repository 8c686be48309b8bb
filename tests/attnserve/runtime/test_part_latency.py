"""Cut blocks out of a model, time them in interleaved rounds, and cache the latencies."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from attnserve.context import ONE_THREAD, Device, TimedModel
from attnserve.models.example_inputs import example_inputs
from attnserve.runtime import cache
from attnserve.runtime import part_latency as latency
from attnserve.runtime.inference_precision import compute_in_bfloat16
from attnserve.runtime.interleaved_timer import QUICK
from attnserve.runtime.observer import reads
from attnserve.runtime.part_latency import Cut, LatencyTable, Part, cut_out, default_cache
from attnserve.runtime.session import open_session
from graph_passes.analysis.workload import Workload
from graph_passes.matching.feed_forward import find_feed_forward
from graph_passes.matching.find import find_attention
from graph_passes.passes.fuse_attention import FuseAttention
from graph_passes.passes.prune_heads import PruneHeads
from graph_passes.passes.prune_neurons import PruneNeurons
from tests.graph_passes.graphs import PARTS, K, graph, observing


@pytest.fixture(scope="module")
def feeds(tiny_graph: ir.Model) -> list[dict[str, np.ndarray]]:
    return [
        example_inputs(tiny_graph, Workload.of(2, length), seed=0, padded=True) for length in (5, 9)
    ]


def cuts(model: ir.Model) -> list[Cut]:
    attention = [Cut(b.output.output, (b.x,)) for b in find_attention(model).blocks if b.output]
    return [*attention, *(Cut(b.output, (b.x,)) for b in find_feed_forward(model))]


def outputs(model: ir.Model, feed: Any) -> np.ndarray:
    return open_session(model, ONE_THREAD).run(None, feed)[0]


def assert_part_equals_model(model: ir.Model, cut: Cut, part: Part, feeds: Any) -> None:
    """The part computes the value of ``cut`` as the whole model does."""
    session = observing(model, [cut.output])
    expected = [session.run(None, feed)[0] for feed in feeds]
    for feed, output in zip(part.feeds, expected, strict=True):
        np.testing.assert_allclose(outputs(part.model, feed), output, rtol=0, atol=1e-6)


# Cutting out


def test_cut_out_parts_equal_the_model_and_leave_it_unchanged(tiny_graph: ir.Model, feeds: Any):
    before = ir.to_proto(tiny_graph).SerializeToString()
    parts = cut_out(tiny_graph, cuts(tiny_graph), feeds)
    assert len(parts) == 4
    for cut, part in zip(cuts(tiny_graph), parts, strict=True):
        assert_part_equals_model(tiny_graph, cut, part, feeds)
    assert ir.to_proto(tiny_graph).SerializeToString() == before


@pytest.mark.parametrize("version", [3, 8])
def test_cut_out_weights_listed_as_inputs_stay_weights(
    tiny_graph: ir.Model, feeds: Any, version: int
):
    """Before IR version 4 all weights are inputs; since then these may be replaced by a caller."""
    old = tiny_graph.clone()
    old.graph.inputs.extend(old.graph.initializers.values())
    old.ir_version = version
    first, *_, last = cuts(old)
    parts = cut_out(old, [first, last], feeds)
    for cut, part in zip((first, last), parts, strict=True):
        assert len(part.feeds[0]) == (2 if cut is first else 1)  # tokens, and a mask
        assert_part_equals_model(old, cut, part, feeds)
    assert parts[0].key(0) == cut_out(tiny_graph, cuts(tiny_graph)[:1], feeds)[0].key(0)


def test_cut_out_source_that_is_a_model_output_is_fed(tiny_graph: ir.Model, feeds: Any):
    model = tiny_graph.clone()
    cut = cuts(model)[1]
    model.graph.outputs.extend(cut.sources)
    (part,) = cut_out(model, [cut], feeds)
    assert [value.name for value in part.model.graph.outputs] == [cut.output.name]
    assert_part_equals_model(model, cut, part, feeds)


def test_cut_out_feeds_mask_but_keeps_scale_computed_from_shapes():
    """The scale stays in the part; the mask is computed once, outside of the layer."""
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
    feeds = [example_inputs(model, Workload.of(2, length), seed=0) for length in (5, 9)]
    (cut,) = cuts(model)
    (part,) = cut_out(model, [cut], feeds)
    assert sorted(part.feeds[0]) == ["causal", "x"]
    (block,), _ = find_attention(part.model)
    assert block.scale == pytest.approx(K**-0.5, rel=1e-6)
    assert_part_equals_model(model, cut, part, feeds)


def test_reads_include_outer_values_that_a_subgraph_returns():
    """ONNX Runtime refuses such a subgraph, but the values are still inputs of the node."""
    x, y = (ir.val(name, ir.DataType.FLOAT, ["n"]) for name in "xy")
    flag = ir.val("flag", ir.DataType.BOOL, [])
    double = ir.node("Add", [y, y])
    bodies = {
        "then_branch": ir.Graph([], [x], nodes=[], name="yes"),
        "else_branch": ir.Graph([], double.outputs, nodes=[double], name="no"),
    }
    node = ir.node("If", [flag], attributes=bodies)
    assert set(reads(node)) == {flag, x, y}


# Axes of the inputs


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
def test_cut_out_names_axes_of_batch_and_length(
    tiny_graph: ir.Model, shapes: list[tuple[int, int]], batch: Any, length: Any
):
    feeds = [example_inputs(tiny_graph, Workload.of(b, n), seed=0, padded=True) for b, n in shapes]
    part = cut_out(tiny_graph, cuts(tiny_graph)[:1], feeds)[0]
    tokens, mask = dims(part)
    assert tokens == [batch, length, 32]
    assert mask == [batch, 1, length, length]
    name = find_attention(part.model).blocks[0].name
    fused = part.model.clone()
    FuseAttention({name: "multi_head"})(fused)  # binds the axes to new names
    for fed in part.feeds:
        got, expected = outputs(fused, fed), outputs(part.model, fed)
        np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5)


def test_dim_of_flattened_tokens_is_batch_times_length():
    sizes = [(2, 5), (2, 9)], [(1, 5), (4, 9)], [(1, 5), (4, 5)]
    named = [latency.dim_of(0, tuple(b * n for b, n in pairs), pairs) for pairs in sizes]
    assert named == ["2*sequence", "batch*sequence", "batch*5"]
    assert latency.dim_of(0, (7, 11), sizes[0]) == "axis_7_11"
    assert latency.dim_of(0, (7, 7), sizes[0]) == 7


def test_cut_out_part_has_one_block_and_its_mask_as_input(tiny_graph: ir.Model, feeds: Any):
    for part in cut_out(tiny_graph, cuts(tiny_graph)[:2], feeds):
        blocks, unmatched = find_attention(part.model)
        assert len(blocks) == 1 and not unmatched
        assert not find_feed_forward(part.model)
        (mask,) = (array for array in part.feeds[0].values() if array.ndim == 4)
        assert len(part.feeds[0]) == 2
        assert mask.shape[0] == 2 and mask.shape[-1] == 5
        assert len(np.unique(mask)) == 2  # the second text is padded


@pytest.fixture
def part(tiny_graph: ir.Model, feeds: Any) -> Part:
    """The first block alone."""
    return cut_out(tiny_graph, cuts(tiny_graph)[:1], feeds)[0]


def pruned(part: Part, mask: list[int]) -> Part:
    small = part.model.clone()
    PruneHeads({find_attention(small).blocks[0].name: mask})(small)
    return Part(small, part.feeds)


def test_key_is_equal_for_layers_of_equal_work(tiny_graph: ir.Model, feeds: Any):
    first, second, *feed_forwards = cut_out(tiny_graph, cuts(tiny_graph), feeds)
    assert first.key(0) == second.key(0)
    assert first.key(0) != first.key(1)  # another length
    assert feed_forwards[0].key(0) == feed_forwards[1].key(0) != first.key(0)


def test_key_ignores_the_values_of_short_weights(part: Part):
    other = part.model.clone()
    changed = 0
    for value in other.graph.initializers.values():
        array = value.const_value.numpy() if value.const_value is not None else np.zeros(0)
        if array.dtype.kind == "f" and 1 < array.size <= latency.SMALL:
            value.const_value = ir.tensor(array + 1, name=value.name)
            changed += 1
    assert changed
    assert Part(other, part.feeds).key(0) == part.key(0)


def test_key_depends_on_the_number_of_heads(part: Part):
    small, other = pruned(part, [1, 1, 0, 1]), pruned(part, [0, 1, 1, 1])
    assert small.key(0) == other.key(0) != part.key(0)


def test_key_depends_on_the_computed_precision(part: Part):
    other = part.model.clone()
    compute_in_bfloat16(other)
    assert Part(other, part.feeds).key(0) != part.key(0)


# The table


class Timer:
    """A timer with these results for each shape, in the order of its calls."""

    def __init__(self, *results: list[float]) -> None:
        self.results = list(results)

    def __call__(self, models: Sequence[TimedModel], seconds: float) -> list[np.ndarray]:
        rounds = [1.0, 1.1, 0.9]
        shapes = [self.results.pop(0) for _ in models[0].feeds]
        assert all(len(times) == len(models) for times in shapes)
        return [np.outer(times, rounds) for times in shapes]


@pytest.fixture
def parts(tiny_graph: ir.Model, feeds: Any) -> dict[str, Part]:
    part = cut_out(tiny_graph, cuts(tiny_graph)[:1], feeds[:1])[0]
    return {"whole": part, "3": pruned(part, [1, 1, 1, 0]), "2": pruned(part, [1, 1, 0, 0])}


def test_measure_known_parts_are_read_from_the_cache(parts: Any, tmp_path: Path):
    timer = Timer([4.0, 3.0, 2.0])
    table = LatencyTable(tmp_path / "t.json", ONE_THREAD, timer)
    first = table.time(parts)
    assert first == {"whole": (4.0,), "3": (3.0,), "2": (2.0,)}
    assert table.measured == 3
    again = LatencyTable(tmp_path / "t.json", ONE_THREAD, timer)
    assert again.time(parts) == first  # the timer has no more results
    assert again.measured == 0


def test_measure_names_with_equal_text_are_separate(parts: Any):
    named = {None: parts["whole"], 3: parts["3"], "3": parts["2"]}
    times = LatencyTable(None, ONE_THREAD, timer=Timer([4.0, 3.0, 2.0])).time(named)
    assert times == {None: (4.0,), 3: (3.0,), "3": (2.0,)}


def test_measure_new_part_is_scaled_to_known_parts(parts: Any, tmp_path: Path):
    """The machine runs at half speed when the third part is timed."""
    timer = Timer([4.0, 3.0], [8.0, 4.0])
    known = {name: parts[name] for name in ("whole", "3")}
    LatencyTable(tmp_path / "t.json", timer=timer).time(known)
    times = LatencyTable(tmp_path / "t.json", timer=timer).time(parts)
    assert times == {"whole": (4.0,), "3": (3.0,), "2": (2.0,)}


def test_measure_entries_are_separate_per_thread_count(parts: Any, tmp_path: Path):
    timer, path = Timer([4.0], [2.0]), tmp_path / "t.json"
    whole = {"whole": parts["whole"]}
    LatencyTable(path, ONE_THREAD, timer).time(whole)
    assert LatencyTable(path, Device(threads=2), timer).time(whole) == {"whole": (2.0,)}
    kept = json.loads((tmp_path / "t.json").read_text())
    assert len(kept) == 2 and all("threads" in setting for setting in kept)


def test_setting_depends_on_the_number_of_cores(monkeypatch: pytest.MonkeyPatch):
    def setting(cores: int) -> str:
        monkeypatch.setattr(latency, "available_cores", lambda: cores)
        return LatencyTable(None, ONE_THREAD).setting

    assert setting(2) != setting(16)


def test_setting_depends_on_the_gpu(monkeypatch: pytest.MonkeyPatch):
    gpus: list[str | None] = ["NVIDIA H200", "NVIDIA L4", None]
    monkeypatch.setattr(latency, "gpu_name", lambda: gpus.pop(0))
    settings = [LatencyTable(None, Device("cuda")).setting for _ in range(3)]
    assert len(set(settings)) == 3 and "NVIDIA H200" in settings[0] and not gpus
    assert "NVIDIA" not in LatencyTable(None).setting  # the GPU is not queried


def test_measure_number_of_open_sessions_is_bounded(tiny_graph: ir.Model, feeds: Any):
    """Every group includes the first part, which runs at half speed in the second group."""
    part = cut_out(tiny_graph, cuts(tiny_graph)[2:3], feeds)[0]
    forms = {str(n): Part(narrowed(part.model, n), part.feeds) for n in range(1, 11)}
    first, second = [100.0, 1, 2, 3, 4, 5, 6, 7], [200.0, 16, 18, 20]
    timer = Timer(first, first, second, second)  # two shapes
    table = LatencyTable(None, timer=timer)
    times = table.time({"whole": part, **forms})
    assert not timer.results  # which is why 8 and 4 models were timed at once
    expected = {"whole": 100.0, **{str(n): float(n) for n in range(1, 11)}}
    assert times == {name: (ms, ms) for name, ms in expected.items()}
    assert table.measured == 22


def narrowed(model: ir.Model, kept: int) -> ir.Model:
    small = model.clone()
    block = find_feed_forward(small)[0]
    PruneNeurons({block.name: [1] * kept + [0] * (block.num_neurons - kept)})(small)
    return small


@pytest.mark.parametrize("content", ["", "{", "[]", '{"a": 1}', '{"a": {"b": "c"}}', "\x00"])
def test_measure_damaged_cache_is_replaced(content: str, parts: Any, tmp_path: Path):
    (tmp_path / "t.json").write_text(content)
    table = LatencyTable(tmp_path / "t.json", timer=Timer([4.0]))
    assert table.time({"whole": parts["whole"]}) == {"whole": (4.0,)}
    assert list(json.loads((tmp_path / "t.json").read_text())) == [table.setting]


@pytest.mark.parametrize(
    "failure",
    [
        "the file is a folder",
        "the folder is a file",
        OSError(28, "No space left on device"),
        KeyboardInterrupt(),
    ],
)
def test_measure_failed_write_leaves_no_file(
    failure: str | BaseException, parts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
):  # fmt: skip
    def dump(*_: Any, **__: Any) -> None:
        assert isinstance(failure, BaseException)
        raise failure

    path = tmp_path / "t.json"
    if failure == "the file is a folder":
        path.mkdir()
    elif failure == "the folder is a file":
        (tmp_path / "file").write_text("")
        path = tmp_path / "file" / "t.json"
    else:
        monkeypatch.setattr(cache.Path, "replace", dump)
    before = list(tmp_path.iterdir())
    table = LatencyTable(path, timer=Timer([4.0]))
    if isinstance(failure, KeyboardInterrupt):
        with pytest.raises(KeyboardInterrupt):
            table.time({"whole": parts["whole"]})
    else:
        assert table.time({"whole": parts["whole"]}) == {"whole": (4.0,)}
    assert list(tmp_path.iterdir()) == before


def test_default_cache_follows_environment_variables(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setenv("ATTNSERVE_CACHE", str(tmp_path))
    assert default_cache() == tmp_path / "latency-2.json"
    monkeypatch.delenv("ATTNSERVE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x"))
    assert default_cache().name == "latency-2.json" and "attnserve" in str(default_cache())


def test_default_cache_without_home_directory_is_temporary(monkeypatch: pytest.MonkeyPatch):
    """An arbitrary user id without HOME, as in OpenShift."""

    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(cache.Path, "home", home)
    monkeypatch.delenv("ATTNSERVE_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert default_cache().parent.is_dir() and default_cache() == default_cache()
    assert default_cache().is_relative_to(tempfile.gettempdir())
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert default_cache() == Path("/cache/attnserve/latency-2.json")


def test_measure_with_real_clock_gives_milliseconds(part: Part):
    times = LatencyTable(None, ONE_THREAD).time({"whole": part})["whole"]
    assert len(times) == 2 and all(0 < ms < 1000 for ms in times)


def test_measure_binds_inputs_once(parts: dict[str, Part], monkeypatch: pytest.MonkeyPatch):
    """Inputs are bound once, outside of the timed runs."""
    bindings: list[tuple[ir.Model, Any]] = []
    runs: Counter[ir.Model] = Counter()

    class Bound:
        def __init__(self, model: ir.Model, device: Device) -> None:
            self.model = model

        def bind(self, feed: Any) -> Any:
            bindings.append((self.model, feed))
            return lambda: runs.update([self.model])

    monkeypatch.setattr(latency, "open_session", Bound)
    LatencyTable(None).time(parts)
    assert bindings == [(part.model, part.feeds[0]) for part in parts.values()]
    assert len(runs) == 3 and min(runs.values()) > QUICK.min_rounds
