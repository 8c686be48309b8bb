"""Lossless operator fusion: the written model, and the models that are refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

import attnserve
from attnserve.checks.certify import read_attention
from attnserve.context import ONE_THREAD, Device
from attnserve.fusion import fuse, fusion_passes
from attnserve.models.artifact import Artifact, open_artifact
from attnserve.models.example_inputs import example_inputs
from attnserve.models.lineage import OptimizeEntry
from attnserve.models.measured import Fidelity
from attnserve.models.onnx_files import load_model, save_model
from attnserve.models.search_record import GoalRecord, SearchRecord
from attnserve.planning.plans.apply import apply_plan
from attnserve.planning.plans.plan import Plan
from attnserve.planning.served_graph import equality, lossless, timing, variants
from attnserve.planning.served_graph.fusion_report import NotFaster
from attnserve.planning.served_graph.lossless import fuse_lossless
from attnserve.precision.convert import convert
from attnserve.runtime import session
from attnserve.runtime.interface import (
    DEFAULT_OPTIONS,
    Batch,
    LongRows,
    RunFailed,
    Runtime,
    Session,
    SessionOptions,
)
from attnserve.runtime.onnx_runtime import OnnxRuntime
from attnserve.runtime.session import open_session
from attnserve.runtime.times import Times
from benchmarks.gpu.encoder import to_half
from graph_passes.analysis.constants import constant_array
from graph_passes.analysis.workload import Workload
from graph_passes.emit.editing import Inserter
from graph_passes.errors import CannotRewrite, InvalidModel
from graph_passes.passes.base import RewritePass
from graph_passes.passes.fuse_skip_norm import FuseSkipNorm
from graph_passes.passes.prune_heads import PruneHeads
from graph_passes.registry import Registry
from tests import architectures
from tests.attnserve.costs import fused_is_faster
from tests.errors import raises
from tests.graph_passes.graphs import graph
from tests.jobs import job_of

LAYERS = 2


@pytest.fixture(scope="module")
def bert(tiny_bert: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    folder = tmp_path_factory.mktemp("exact") / "bert"
    attnserve.export(str(tiny_bert(max_position_embeddings=128)), folder, exporter="torchscript")
    return open_artifact(folder)


Gains = Callable[[int], Sequence[float]]
"""The speed-up of each fused form over the file's at a length."""


class Timer:
    """A timer that gives these speed-ups, each with noise."""

    def __init__(self, gains: Gains, noise: float = 0.0, seed: int = 0) -> None:
        self.gains, self.noise = gains, noise
        self.random = np.random.default_rng(seed)
        self.lengths: list[int] = []
        """The timed lengths."""

    def __call__(self, models: Sequence[Any], seconds: float) -> np.ndarray:
        shapes: list[np.ndarray] = []
        for run in models[0]:
            length = run.args[1]["input_ids"].shape[1]
            self.lengths.append(length)
            means = 1 / np.array([1, *self.gains(length)][: len(models)])
            noises = np.exp(self.noise * self.random.standard_normal((len(means), 16)))
            shapes.append(means[:, None] * noises)
        return np.array(shapes)


def scaled(by: float) -> Callable[[ir.Model], None]:
    """Scale the weight of the last norm, and so every number of the output."""

    def change(model: ir.Model) -> None:
        norm = [node for node in model.graph if node.op_type == "LayerNormalization"][-1]
        weight = constant_array(norm.inputs[1]) * np.float64(by)  # type: ignore[arg-type]
        value = ir.val("scaled", const_value=ir.tensor(weight.astype(np.float32)))
        model.graph.register_initializer(value)
        norm.replace_input_with(1, value)

    return change


def unmasked(model: ir.Model) -> None:
    """Remove the mask, which changes padded rows only."""
    for node in model.graph:
        if node.op_type == "Attention":
            node.replace_input_with(5 if node.domain else 3, None)


def renamed(model: ir.Model) -> None:
    model.graph.outputs[0].name = "other"


def test_fuse_lossless_writes_one_operator_per_block_and_equal_outputs(
    bert: Artifact, tmp_path: Path
) -> None:
    before = bert.model.read_bytes()
    found = fuse_lossless(bert, tmp_path / "new.onnx", ONE_THREAD, fused_is_faster)
    assert (found.attention, found.gelu, found.speedup) == (LAYERS, LAYERS, pytest.approx(2.0))
    assert found.min_cosine >= 1 - 1e-9 and found.max_error < 5e-6
    assert bert.model.read_bytes() == before
    old, new = load_model(bert), load_model(tmp_path / "new.onnx")
    kinds = [node.op_type for node in new.graph]
    assert (kinds.count("Attention"), kinds.count("Gelu")) == (LAYERS, LAYERS)
    assert "Softmax" not in kinds and "Erf" not in kinds
    feed = example_inputs(old, Workload.of(5, 21), seed=9, padded=True)
    a, b = (
        open_session(path, ONE_THREAD).run(None, feed)[0]
        for path in (bert.model, tmp_path / "new.onnx")
    )
    assert np.abs(a - b).max() < 1e-5 * np.abs(a).max()


def test_fuse_lossless_half_precision_is_accepted(bert: Artifact, tmp_path: Path) -> None:
    """Half precision rounds more, so that its outputs may differ by more."""
    save_model(convert(load_model(bert), "float16"), tmp_path / "half.onnx")
    half = open_artifact(tmp_path / "half.onnx")
    found = fuse_lossless(half, tmp_path / "new.onnx", ONE_THREAD, fused_is_faster)
    assert (found.attention, found.gelu) == (LAYERS, LAYERS)
    assert 1e-5 < found.max_error < equality.TOLERANCES[ir.DataType.FLOAT16].error


PLANNED = {
    "ALBERT", "BART", "BERT", "CLIP vision", "DETR", "GPT-NeoX", "ModernBERT", "MPNet", "NomicBERT",
    "Wav2Vec2", "jina-v2 (ALiBi)",
}  # fmt: skip


@pytest.mark.parametrize(
    "cell", [c for c in architectures.COMMITTED if c.architecture in PLANNED], ids=str
)
def test_fusion_plan_for_a_gpu_keeps_outputs(cell: architectures.Cell) -> None:
    """Compared on the CPU, within 1e-5, or 2e-2 in float16."""
    model = load_model(cell.committed)
    new = model.clone()
    fuse(new, fusion_passes(model, "cuda"))
    kinds = Counter(node.op_type for node in new.graph)
    assert kinds["SkipLayerNormalization"] >= 2 and "Softmax" not in kinds
    architecture = architectures.ARCHITECTURES[cell.architecture]
    feed = architectures.feeds(architecture, architectures.OTHER_LENGTHS)
    exact = 2e-2 if "fp16" in str(cell) else 1e-5
    for before, after in zip(outputs(model, feed), outputs(new, feed), strict=True):
        np.testing.assert_allclose(after, before, rtol=0, atol=exact)


def test_plan_that_fuses_residuals_before_a_lossy_pass_is_refused() -> None:
    (cell,) = (c for c in architectures.COMMITTED if str(c) == "BERT-torchscript17-eager")
    model, original = load_model(cell.committed), load_model(cell.committed)
    block = read_attention(model).blocks[0]
    prune = PruneHeads({block.name: [1] + [0] * (block.num_heads - 1)})
    with raises(CannotRewrite, "refit.residual", block.name):
        plan = Plan((FuseSkipNorm(), prune))
        apply_plan(plan, job_of(original), model)


@pytest.mark.parametrize("cell", architectures.COMMITTED[:1], ids=str)
def test_computed_type_is_that_of_the_products(cell: architectures.Cell) -> None:
    """Weights may be stored in another type."""
    model = load_model(cell.committed)
    assert equality.computed_type(model) == ir.DataType.FLOAT
    half = model.clone(deep_copy=True)
    to_half(half)
    assert equality.computed_type(half) == ir.DataType.FLOAT16
    for name, value in list(model.graph.initializers.items()):
        if value.dtype == ir.DataType.FLOAT:
            make = Inserter(model.graph, model.graph[0], f"stored/{name}")
            stored = make.constant(value.const_value.numpy(), "half", ir.DataType.FLOAT16)
            ir.convenience.replace_all_uses_with(value, make.op("Cast", [stored], "single", to=1))
    assert equality.computed_type(model) == ir.DataType.FLOAT


def outputs(model: ir.Model, arrays: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    session: Any = open_session(model, ONE_THREAD)
    names = [value.name for value in session.get_inputs()]
    return [np.asarray(array) for array in session.run(None, {n: arrays[n] for n in names})]


def test_fuse_lossless_fused_model_is_refused(bert: Artifact, tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    fuse_lossless(bert, tmp_path / "one" / "model.onnx", ONE_THREAD, fused_is_faster)
    again = open_artifact(tmp_path / "one")
    with raises(CannotRewrite, "fusion.nothing"):
        fuse_lossless(again, tmp_path / "two.onnx", ONE_THREAD, fused_is_faster)
    assert not (tmp_path / "two.onnx").exists()


@pytest.mark.parametrize(
    ("change", "code", "values"),
    [
        (scaled(1 + 5e-5), "differs", ("'last_hidden_state'", "1 x 1", "cosine 1.0")),
        (scaled(np.nan), "differs", ("'last_hidden_state'", "1 x 1", "nan")),
        (unmasked, "differs", ("3 x 16",)),
        (renamed, "interface", ("'other'", "'last_hidden_state'")),
    ],
    ids=["small error", "nan", "padded rows", "output name"],
)
def test_fuse_lossless_different_result_is_refused(
    bert: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    change: Callable[[ir.Model], None], code: str, values: Sequence[str],
) -> None:  # fmt: skip
    def fuse_and_change(model: ir.Model, passes: Sequence[RewritePass]) -> None:
        fuse(model, passes)
        change(model)

    monkeypatch.setattr(variants, "fuse", fuse_and_change)
    with raises(CannotRewrite, f"fusion.{code}", *values):
        fuse_lossless(bert, tmp_path / "new.onnx", ONE_THREAD)


def test_fuse_lossless_without_kernel_falls_back_to_older_operator(
    bert: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lacks(source: Path, *given: Any) -> Any:
        graph = ir.load(source).graph
        if any((n.domain, n.op_type) == ("", "Attention") for n in graph):
            raise InvalidModel(f"{source}: no kernel", "none")
        return open_session(source, *given)

    monkeypatch.setattr(lossless, "open_session", lacks)
    found = fuse_lossless(bert, tmp_path / "new.onnx", ONE_THREAD, fused_is_faster)
    assert found.attention == LAYERS
    nodes = load_model(tmp_path / "new.onnx").graph
    assert [n.domain for n in nodes if n.op_type == "Attention"] == ["com.microsoft"] * LAYERS


SCALES = {"cosine": 2.0, "rounding": 1.05}
"""The scale of the outputs in a runtime with a fault."""


class OtherRuntime(OnnxRuntime):
    """A second runtime: ONNX Runtime, or one that fails in a way."""

    name = "other"

    def __init__(self, fault: str) -> None:
        self._fault = fault

    def open(
        self, source: Path | ir.Model, device: Device, options: SessionOptions = DEFAULT_OPTIONS
    ) -> Session:
        assert isinstance(source, Path)
        model = ir.load(source)
        if self._fault == "refuses the graph":
            raise InvalidModel(f"{source}: refuses the graph", "none")
        if self._fault in SCALES:
            scaled(SCALES[self._fault])(model)
        if self._fault == "refuses the inputs":
            return Failing(super().open(model, device, options))
        return super().open(model, device, options)


class Failing:
    """A session whose runs fail."""

    def __init__(self, opened: Session) -> None:
        self._opened = opened

    def __getattr__(self, name: str) -> Any:
        return getattr(self._opened, name)

    def run(self, names: object, feed: Batch) -> list[np.ndarray]:
        raise RunFailed("no memory", feed)


AUTO = Device(threads=1, runtime="auto")


def use_other_runtime(monkeypatch: pytest.MonkeyPatch, fault: str = "") -> None:
    both = Registry[Runtime]("runtime", OnnxRuntime(), OtherRuntime(fault))
    monkeypatch.setattr(session, "RUNTIMES", both)


@pytest.mark.parametrize(
    ("fault", "gain", "runtime"),
    [
        ("", 3.0, "other"),
        ("", 1.0, "onnxruntime"),
        ("refuses the graph", 3.0, "onnxruntime"),
        ("refuses the inputs", 3.0, "onnxruntime"),
        ("cosine", 3.0, "onnxruntime"),
    ],
)
def test_fuse_lossless_runtime_auto_takes_the_fastest_that_is_equal(
    bert: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    fault: str, gain: float, runtime: str,
) -> None:  # fmt: skip
    use_other_runtime(monkeypatch, fault)
    timer = Timer(lambda length: [1.5, 1.4, 1.5 * gain, 1.4 * gain, gain])
    found = fuse_lossless(bert, tmp_path / "new.onnx", AUTO, timer)
    assert (found.runtime, found.attention) == (runtime, LAYERS)
    assert found.speedup == pytest.approx(4.5 if runtime == "other" else 1.5)
    assert (fault in found.refused["other"]) if fault else found.refused == {}
    assert sorted(one.name for one in tmp_path.iterdir()) == ["new.onnx"]


def test_fuse_lossless_slow_result_names_the_refused_runtimes(
    bert: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_other_runtime(monkeypatch, "refuses the graph")
    with raises(NotFaster, "fusion.slow", "1.00x") as caught:
        fuse_lossless(bert, tmp_path / "new.onnx", AUTO, Timer(lambda length: [1.0, 1.0]))
    (why,) = caught.value.refused.values()
    assert caught.value.refused.keys() == {"other"} and "refuses the graph" in why


@pytest.mark.parametrize(
    ("fault", "verified", "gains", "runtimes"),
    [
        ("rounding", ["other"], (3.0, 3.0), ("other", None)),
        ("rounding", ["other"], (0.5, 1.9), ("onnxruntime", None)),  # the pair is not verified
        ("rounding", ["other", "onnxruntime+other"], (0.5, 2.0),
         ("onnxruntime", LongRows(32, "other"))),
        ("rounding", ["other", "onnxruntime+other"], (2.0, 0.5), ("onnxruntime", None)),
        ("rounding", ["onnxruntime+other"], (3.0, 3.0), ("onnxruntime", None)),
        ("cosine", ["other"], (3.0, 3.0), ("onnxruntime", None)),  # as if on another CPU
    ],
)  # fmt: skip
def test_fuse_lossless_runtime_with_other_outputs_needs_a_verification(
    bert: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str,
    verified: Sequence[str], gains: tuple[float, float], runtimes: tuple[str, LongRows | None],
) -> None:  # fmt: skip
    """The other runtime is faster by ``gains`` at 16 and 64 tokens."""
    use_other_runtime(monkeypatch, fault)
    by_length = dict(zip((16, 64), gains, strict=True))
    timer = Timer(lambda length: [1.5, 1.4, 1.5 * by_length[length], 1.4 * by_length[length], 1.0])
    same = Fidelity(outputs=(), mean_cosine=1.0, min_cosine=1.0, data="texts")
    entry = OptimizeEntry(rewrite="int8", other_runtimes=dict.fromkeys(verified, same))
    artifact = replace(bert, record=bert.record.model_copy(update={"lineage": (entry,)}))
    found = fuse_lossless(artifact, tmp_path / "new.onnx", AUTO, timer)
    assert (found.runtime, found.long_rows) == runtimes


@pytest.mark.parametrize(
    ("rounds", "verified", "gains", "runtime"),
    [
        (True, [], [0.5, 0.5], "other"),  # slow, but the only one with a known quality
        (True, ["onnxruntime"], [0.5, 0.5, 0.5, 1.5, 1.5], "onnxruntime"),
        (False, [], [1.5, 1.5], "onnxruntime"),  # a float model has the same quality in each
    ],
)
def test_fuse_lossless_trusts_outputs_in_the_runtime_of_the_search(
    bert: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rounds: bool,
    verified: Sequence[str], gains: list[float], runtime: str,
) -> None:  # fmt: skip
    use_other_runtime(monkeypatch, "rounding")
    monkeypatch.setattr(lossless, "rounds_activations", lambda model: rounds)
    search = SearchRecord(gain=True, goal=GoalRecord(runtime="other"))
    entry = OptimizeEntry(
        rewrite="int8", search=search, other_runtimes=dict.fromkeys(verified, Fidelity())
    )
    artifact = replace(bert, record=bert.record.model_copy(update={"lineage": (entry,)}))
    found = fuse_lossless(artifact, tmp_path / "new.onnx", AUTO, Timer(lambda length: gains))
    assert found.runtime == runtime


@pytest.mark.parametrize(
    ("long_gain", "runtimes"),
    [
        ({16: 0.5, 64: 2.0}, ("onnxruntime", LongRows(32, "other"))),
        ({16: 2.0, 64: 0.5}, ("other", LongRows(32, "onnxruntime"))),
        ({16: 0.9, 64: 1.005}, ("onnxruntime", None)),  # as fast as one runtime alone
        ({16: 1.5, 64: 1.2}, ("other", None)),
    ],
)
def test_fuse_lossless_runtime_auto_runs_long_rows_in_the_faster_runtime(
    bert: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    long_gain: dict[int, float], runtimes: tuple[str, LongRows | None],
) -> None:  # fmt: skip
    """The other runtime is faster by this, for the same file."""
    use_other_runtime(monkeypatch)
    timer = Timer(lambda length: [1.5, 1.4, 1.5 * long_gain[length], 1.4 * long_gain[length], 1.0])
    found = fuse_lossless(bert, tmp_path / "new.onnx", AUTO, timer)
    assert (found.runtime, found.long_rows) == runtimes
    gains = [1.5 * max(1.0, gain) for gain in long_gain.values()]
    if found.long_rows:
        assert list(found.speedups.values()) == pytest.approx([gains[0]] * 2 + gains[1:])
    assert sorted(one.name for one in tmp_path.iterdir()) == ["new.onnx"]
    monkeypatch.setattr(lossless, "MANY_VARIANTS_BYTES", 0)  # each session holds the weights
    with suppress(CannotRewrite):  # one runtime is slower than the file at a length
        assert fuse_lossless(bert, tmp_path / "new.onnx", AUTO, timer).long_rows is None


def test_fuse_lossless_runtime_auto_unfused_graph_may_be_faster(
    bert: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_other_runtime(monkeypatch)
    timer = Timer(lambda length: [1.5, 1.4, 1.6, 1.7, 2.0])
    found = fuse_lossless(bert, tmp_path / "new.onnx", AUTO, timer)
    assert (found.runtime, found.attention, found.gelu) == ("other", 0, 0)
    assert found.speedup == pytest.approx(2.0)
    assert found.kept == [block.name for block in read_attention(load_model(bert)).blocks]


@pytest.mark.parametrize(
    ("gains", "why"),
    [
        ({16: 1.02, 64: 1.021}, None),
        ({16: 1.019, 64: 1.019}, "1.02x"),
        ({16: 1.5, 64: 0.969}, "0.97x as fast at 1 x 64"),
        ({16: 1.5, 64: 0.971}, None),
    ],
)
def test_fuse_lossless_slow_result_is_refused(
    bert: Artifact,
    tmp_path: Path,
    gains: dict[int, float],
    why: str | None,
) -> None:
    timer = Timer(lambda length: [gains[length]] * variants.MAX_VARIANTS)
    if why is None:
        fuse_lossless(bert, tmp_path / "new.onnx", ONE_THREAD, timer)
        return
    with raises(CannotRewrite, "fusion.slow", why):
        fuse_lossless(bert, tmp_path / "new.onnx", ONE_THREAD, timer)


@pytest.mark.parametrize(
    ("gain", "is_slow"),
    [(1.1, False), (1.01, True), (0.9, True)],
    ids=["faster", "equal", "slower"],
)
def test_shapes_that_the_original_runs_do_not_count(gain: float, is_slow: bool) -> None:
    """Only long rows run in another runtime; the mean over all shapes is 1.02x with 1.1x."""
    times = {shape: np.full(8, 10.0) for shape in ("16", "64", "128", "256", "512")}
    original, split = Times(times), Times(times | {"512": times["512"] / gain})
    lengths = {shape: int(shape) for shape in times}
    assert (timing.speed_refusal(original, split, lengths) is not None) == is_slow
    assert timing.speed_refusal(original, original, lengths) is not None


@pytest.mark.parametrize(("gain", "is_slow"), [(1.5, False), (1.05, True)])
def test_a_length_is_slow_by_the_mean_over_batch_sizes(gain: float, is_slow: bool) -> None:
    """One row of 16 tokens runs 0.8x as fast, and eight rows by the gain."""
    times = {shape: np.full(8, 10.0) for shape in ("1 x 16", "8 x 16", "1 x 128")}
    gains = {"1 x 16": 0.8, "8 x 16": gain, "1 x 128": 1.5}
    faster = Times({shape: ms / gains[shape] for shape, ms in times.items()})
    lengths = {"1 x 16": 16, "8 x 16": 16, "1 x 128": 128}
    assert (timing.speed_refusal(Times(times), faster, lengths) is not None) == is_slow


@pytest.mark.parametrize(
    ("gains", "attention"),
    [
        ([{16: 1.1, 64: 1.1}, {16: 1.3, 64: 1.3}], 0),  # attention is faster as the file has it
        ([{16: 1.3, 64: 1.3}, {16: 1.3, 64: 1.3}], LAYERS),
        ([{16: 1.1, 64: 1.1}, {16: 9.0, 64: 0.9}], LAYERS),  # the other is slower at a length
        ([{16: 9.0, 64: 0.9}, {16: 1.1, 64: 1.1}], 0),
        ([{16: 1.015, 64: 1.015}, {16: 1.021, 64: 1.021}], 0),  # only the other gains enough
    ],
)
def test_fuse_lossless_keeps_blocks_that_are_faster_in_the_file(
    bert: Artifact,
    tmp_path: Path,
    gains: list[dict[int, float]],
    attention: int,
) -> None:
    """All blocks fused, and all but attention, which has one kind here."""
    timer = Timer(lambda length: [gain[length] for gain in gains])
    found = fuse_lossless(bert, tmp_path / "new.onnx", ONE_THREAD, timer)
    assert (found.attention, found.gelu, len(found.kept)) == (attention, LAYERS, LAYERS - attention)
    kinds = Counter(node.op_type for node in load_model(tmp_path / "new.onnx").graph)
    assert (kinds["Attention"], kinds["Gelu"]) == (attention, LAYERS)
    assert [path.name for path in tmp_path.iterdir()] == ["new.onnx"]


@pytest.mark.parametrize("seed", range(5))
def test_fuse_lossless_noisy_times_fuse_all_blocks(
    bert: Artifact, tmp_path: Path, seed: int
) -> None:
    """The standard deviation of a time is a quarter of it, as on a busy machine."""
    timer = Timer(lambda length: [1.15, 1.15], noise=0.25, seed=seed)
    found = fuse_lossless(bert, tmp_path / "new.onnx", ONE_THREAD, timer)
    assert (found.attention, len(found.kept)) == (LAYERS, 0)


@pytest.mark.parametrize("seed", range(5))
def test_fuse_lossless_noisy_times_refuse_slow_lengths_and_take_faster_forms(
    bert: Artifact, tmp_path: Path, seed: int
) -> None:
    """The standard deviation of a time is 5 %, and 16 rounds give intervals of about +-4 %."""
    timer = Timer(lambda length: [{16: 1.5, 64: 0.85}[length]] * 2, noise=0.05, seed=seed)
    with raises(CannotRewrite, "fusion.slow", "at 1 x 64"):
        fuse_lossless(bert, tmp_path / "new.onnx", ONE_THREAD, timer)
    timer = Timer(lambda length: [1.1, 1.4], noise=0.05, seed=seed)
    found = fuse_lossless(bert, tmp_path / "new.onnx", ONE_THREAD, timer)
    assert (found.attention, len(found.kept)) == (0, LAYERS)


@pytest.mark.parametrize("slow", [0, 1])
def test_fuse_lossless_slow_form_is_timed_twice(bert: Artifact, tmp_path: Path, slow: int) -> None:
    """One of the two forms seems slow at first."""

    def gains(length: int) -> list[float]:
        return [0.9 if form == slow and len(timer.lengths) <= 3 else 1.9 for form in range(2)]

    timer = Timer(gains)
    found = fuse_lossless(bert, tmp_path / "new.onnx", ONE_THREAD, timer)
    assert found.attention == LAYERS and timer.lengths == [16, 16, 64] * 2


def test_fuse_lossless_without_attention_is_refused(tmp_path: Path) -> None:
    save_model(graph("\n out = Relu(x)"), tmp_path / "model.onnx")
    with raises(CannotRewrite, "fusion.nothing"):
        fuse_lossless(open_artifact(tmp_path), tmp_path / "new.onnx")


def test_fuse_lossless_without_runnable_inputs_is_refused(
    bert: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    too_long = Workload.of(1, 100_000)  # it has fewer positions
    monkeypatch.setattr(equality, "COMPARED", (too_long,))
    with raises(CannotRewrite, "fusion.no_inputs"):
        fuse_lossless(bert, tmp_path / "new.onnx", ONE_THREAD)


def test_distance_cosine_and_error() -> None:
    a = np.array([[3.0, 4.0], [0.0, 0.0]], np.float32)
    assert equality.distance(a, a) == (1.0, 0.0)
    assert equality.distance(a, a[:1]) == (0.0, np.inf)
    cosine, error = equality.distance(a, np.array([[3.0, 4.0], [0.0, 1.0]], np.float32))
    assert (cosine, error) == (0.0, 0.25)  # nothing became something
    cosine, error = equality.distance(a, np.array([[4.0, 3.0], [0.0, 0.0]], np.float32))
    assert (cosine, error) == (pytest.approx(0.96), 0.25)
    assert equality.distance(0 * a, a) == (0.0, np.inf)  # something where nothing was
    flags = np.array([True, False])
    assert equality.distance(flags, ~flags)[1] > 1e-2
    assert equality.distance(np.array(2.0), np.array(2.0)) == (1.0, 0.0)
