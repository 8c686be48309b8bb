"""benchmarks/cuda.py on the CPU: encoder, forms, cells, bounds and the program."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from time import perf_counter
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest

from attnserve.context import ONE_THREAD
from attnserve.models.example_inputs import example_inputs
from attnserve.models.onnx_files import save_model
from attnserve.runtime.session import open_session, require_cuda
from benchmarks import cuda
from benchmarks.gpu import collab_dk, collaborative_operators
from benchmarks.gpu import measure as measuring
from benchmarks.gpu.encoder import random_encoder, to_half
from benchmarks.gpu.forms import FORMS, OURS, SIZES, THEIRS, Size, collaborative
from benchmarks.gpu.measure import BUDGET, Form, cell, compiled, kernels, timed
from graph_passes.analysis.workload import Workload
from graph_passes.errors import AttnserveError, Refusal
from graph_passes.matching.find import find_attention
from graph_passes.passes.fuse_attention import FuseAttention

ROOT = Path(__file__).parents[2]
FLOAT = ir.DataType.FLOAT
SMALL = Size(2, 64, 4)


def run(model: ir.Model, inputs: dict[str, np.ndarray]) -> np.ndarray:
    return open_session(model, ONE_THREAD).run(None, inputs)[0]


def min_cosine(model: ir.Model, original: ir.Model) -> float:
    """Return the minimum cosine of tokens without padding."""
    inputs = example_inputs(original, Workload.of(3, 16), padded=True)
    kept = inputs["attention_mask"] == 1
    return float(measuring._cosine(run(model, inputs)[kept], run(original, inputs)[kept]).min())


@pytest.fixture
def encoder() -> ir.Model:
    return random_encoder(layers=2, hidden=32, heads=4, positions=32)


# The encoder, and half precision


def test_random_encoder_attention_matches_and_collaborative_form_agrees(encoder: ir.Model):
    blocks, unmatched = find_attention(encoder)
    assert [(b.num_heads, b.head_size) for b in blocks] == [(4, 8)] * 2 and not unmatched
    new = collaborative(encoder)
    assert [b.form for b in find_attention(new).blocks] == ["collaborative"] * 2
    inputs = example_inputs(encoder, Workload.of(3, 16), padded=True)
    np.testing.assert_allclose(run(new, inputs), run(encoder, inputs), rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("half", "dtype"),
    [(ir.DataType.FLOAT16, np.float16), (ir.DataType.BFLOAT16, ml_dtypes.bfloat16)],
)
def test_to_half_keeps_the_interface_and_the_original(
    encoder: ir.Model, half: ir.DataType, dtype: Any
):
    """No CPU runs bfloat16: only the types and finite values are checked."""
    inputs = example_inputs(encoder, Workload.of(3, 16), padded=True)
    expected, new = run(encoder, inputs), encoder.clone(deep_copy=True)
    to_half(new, half)
    weights = [v.const_value for v in new.graph.initializers.values() if v.const_value is not None]
    assert {tensor.dtype for tensor in weights} == {half, ir.DataType.INT64}
    assert all(np.isfinite(t.numpy().astype(np.float32)).all() for t in weights if t.dtype == half)
    assert [(v.name, v.dtype) for v in new.graph.outputs] == [("last_hidden_state", FLOAT)]
    np.testing.assert_array_equal(run(encoder, inputs), expected)  # unchanged
    assert not [v for n in encoder.graph for v in n.outputs if v.dtype == half]
    if dtype is np.float16:
        actual = run(new, inputs)
        assert actual.dtype == np.float32
        np.testing.assert_allclose(actual, expected, rtol=0, atol=3e-2)
        assert np.abs(actual - expected).max() > 1e-6  # it is rounded


def test_to_half_converts_constants_casts_inputs_and_subgraphs():
    text = """<ir_version: 8, opset_import: ["" : 17]>
        g (float[n] x, bool keep, int64[1] size) => (float[n] y, float[n] x2)
        {
          a = Constant<value_float = 0.5>()
          b = Constant<value = float[1] {-3.4e38}>()
          c = Constant<value_floats = [2.0]>()
          zero = ConstantOfShape(size)
          d = Cast<to = 1>(keep)
          e = If(keep) <
            then_branch = g1 () => (float[n] t) { t = Mul(x, c) },
            else_branch = g2 () => (float[n] t2) { t2 = Add(x, b) }
          >
          f = Mul(e, a)  h = Mul(f, d)  y = Add(h, zero)  x2 = Mul(x, c)
        }"""
    model, half = ir.from_onnx_text(text), ir.from_onnx_text(text)
    to_half(half)
    values = [v for g in half.graphs() for n in g for v in n.outputs]
    assert not [v for v in values if v.dtype == FLOAT and v not in half.graph.outputs]
    for keep in (True, False):
        inputs = {"x": np.array([1, -2], np.float32), "keep": np.array(keep), "size": np.array([2])}
        results = [open_session(m).run(None, inputs) for m in (model, half)]
        for expected, actual in zip(*results, strict=True):
            assert actual.dtype == np.float32 and np.isfinite(actual).all()
            np.testing.assert_allclose(actual, np.clip(expected, -65504, 65504), rtol=1e-3)


# Forms

ATTENTION = {
    "fp32": {"Softmax": 2},
    "fp16": {"Softmax": 2},
    "ONNX Runtime fp16": {"Attention": 2},
    "onnxscript fp16": {"MultiHeadAttention": 2},
    "fused fp16": {"Attention": 2},
    "fused bf16": {"Attention": 2},
    "pruned fp16": {"Attention": 2},
    "reused fp16": {"Softmax": 1},
}


@pytest.mark.parametrize("name", FORMS)
def test_forms_keep_the_output_in_other_operators(name: str):
    """Pruned forms keep a cosine of 0.97, because half of this encoder can be pruned."""
    original = SMALL.build(32)
    model = FORMS[name](original.clone(deep_copy=True), SMALL)
    used = Counter(node.op_type for node in model.graph)
    expected = ATTENTION.get(name, {"MultiHeadAttention": 2})
    kinds = ("Attention", "MultiHeadAttention", "Softmax")
    assert {kind: used[kind] for kind in kinds if used[kind]} == expected
    if "bf16" in name:
        weights = [v.const_value for v in model.graph.initializers.values()]
        types = {tensor.dtype for tensor in weights if tensor is not None}
        assert types == {ir.DataType.BFLOAT16, ir.DataType.INT64}
    else:
        assert min_cosine(model, original) >= (0.97 if name == "reused fp16" else 0.99)


def test_forms_without_spare_heads_lose_more_by_pruning():
    """Pruned forms keep their outputs only because the encoder has heads that can be pruned."""
    noise = random_encoder(layers=2, hidden=64, heads=4, positions=32)
    spare, plain = (
        min_cosine(FORMS["pruned fp16"](model.clone(deep_copy=True), SMALL), model)
        for model in (SMALL.build(32), noise)
    )
    assert 1 - plain > 10 * (1 - spare)


def test_forms_have_head_sizes_of_fused_kernels():
    """Multiples of 8 for all sizes, also with half of each head."""
    assert [*THEIRS, *OURS] == [name for name in FORMS if name != "fp32"]
    for size in SIZES.values():
        assert size.hidden % size.heads == 0
        assert size.hidden // size.heads // 2 % 8 == 0
    model = FORMS["sparse fp16"](SMALL.build(32), SMALL)
    assert [block.head_size for block in find_attention(model).blocks] == [8, 8]


# Expressions of collaborative attention


@pytest.mark.parametrize("name", collaborative_operators.EXPRESSIONS)
def test_expressions_compute_attention(name: str):
    """Compared with numpy in double precision, within the rounding of float16."""
    heads, size, rank, batch, tokens = 3, 8, 16, 2, 5
    feed = collaborative_operators.feeds(name, batch, tokens, rank, heads=heads, size=size)
    model = collaborative_operators.graph(name, rank, heads=heads, size=size)
    (got,) = open_session(model).run(None, feed)
    q, k, v = (feed[part].astype(np.float64) for part in "qkv")
    if name == collaborative_operators.OWN:
        logits = np.einsum("bshk,bthk->bhst", *(x.reshape(2, 5, heads, size) for x in (q, k)))
    else:
        mixing = feed["m"].astype(np.float64)[:, 0]  # H R
        logits = np.einsum("bsr,hr,btr->bhst", q, mixing, k)
    e = np.exp(logits - logits.max(-1, keepdims=True))
    values = v.reshape(batch, tokens, heads, size)
    expected = np.einsum("bhst,bthv->bshv", e / e.sum(-1, keepdims=True), values)
    np.testing.assert_allclose(got, expected.reshape(got.shape), rtol=0, atol=5e-3)
    assert np.abs(got).max() > 0.5


# Shared queries and keys, end to end


@pytest.mark.timing
def test_collab_dk_forms_are_built_as_served(tmp_path: Path):
    """Dense and sparse mixing and own dimensions, each beside the original."""
    shapes = ((1, 8), (2, 16))
    done = collab_dk.build(SMALL, (24,), shapes, tmp_path, "cpu", perf_counter() + 60, ["float32"])
    assert done.not_built == {}
    forms = {form.name: form for form in done.forms}
    names = ["fp32", "original float32", "dense 24 float32", "sparse 24 float32", "own 24 float32"]
    assert [name for name in forms if "key mask" not in name] == names
    read = [
        find_attention(ir.load(tmp_path / name)).blocks[0]
        for name in ("dense 24.onnx", "sparse 24.onnx", "own 24.onnx")
    ]
    assert [block.form for block in read] == ["collaborative", "sparse", "standard"]
    assert read[0].head_size >= 24 and read[2].head_size <= 16
    original = ir.load(forms["fp32"].path)
    for name, form in forms.items():
        least = 0.9999 if name.startswith(("fp32", "original")) else 0.9
        assert min_cosine(ir.load(form.path), original) >= least, name


def test_collab_dk_without_time_gives_the_reason(tmp_path: Path):
    done = collab_dk.build(SMALL, (16,), ((1, 8),), tmp_path, "cpu", 0.0, [])
    assert done.not_built == {"dense 16": BUDGET, "sparse 16": BUDGET}


@pytest.mark.parametrize("form", ["attention", "multi_head"])
def test_key_mask_replaces_the_bias(encoder: ir.Model, form: Any):
    """For all rows with a token; a padded batch."""
    fused = encoder.clone(deep_copy=True)
    FuseAttention(dict.fromkeys([b.name for b in find_attention(fused).blocks], form))(fused)
    masked = fused.clone(deep_copy=True)
    assert collab_dk.with_key_mask(masked) and not collab_dk.with_key_mask(masked)
    assert not collab_dk.with_key_mask(encoder)
    assert min_cosine(masked, fused) >= 1 - 1e-5


@pytest.mark.timing
def test_main_measures_forms_of_collab_dk(tmp_path: Path):
    options = ["--tiny-on-cpu", "--collab-dk", "16", "--seconds", "400"]
    assert cuda.main([*options, "--results", str(tmp_path)]) == 0
    content = json.loads((tmp_path / "collab-dk-tiny-on-cpu.json").read_text())
    assert (content["measured"], content["R"]) == (True, [16])
    size = content["sizes"]["tiny"]
    assert size["not_built"] == {}
    wanted = {"fp32"} | {
        f"{name} {precision}"
        for name in ("original", "dense 16", "sparse 16", "own 16")
        for precision in collab_dk.PRECISIONS
    }
    for shape in cuda.TINY_SHAPES[:2]:
        rows = [c for c in size["cells"] if (c["batch"], c["sequence"]) == shape]
        assert wanted <= {row["form"] for row in rows}
        assert all(row["p50_ms"] > 0 for row in rows)
    assert min(size["min_cosine"].values()) > 0.9


# Cells


def test_cell_has_latency_throughput_and_share_of_the_ceiling():
    times = np.array([1.0, 2.0, 3.0])
    assert cell((4, 32), "fp16", times, 10**9, 2.0) == {
        "batch": 4, "sequence": 32, "form": "fp16", "p50_ms": 2.0, "p99_ms": 2.98, "rounds": 3,
        "texts_per_s": 2000.0, "tflops": 1.0, "share_of_ceiling": 0.5,
    }  # fmt: skip
    assert cell((4, 32), "torch", times, None, 2.0)["tflops"] is None
    assert cell((4, 32), "fp16", "no memory", 1, 1.0) == {
        "batch": 4, "sequence": 32, "form": "fp16", "not_measured": "no memory",
    }  # fmt: skip


def test_timed_failing_form_gives_the_reason():
    def fail() -> None:
        raise RuntimeError("out of memory\nand a trace")

    times = timed({"good": lambda: None, "bad": fail}, 0.01)
    assert times["bad"] == "RuntimeError: out of memory"
    assert isinstance(times["good"], np.ndarray) and len(times["good"]) >= 7


def test_timed_without_time_gives_the_reason():
    assert timed({"a": lambda: None}, 0.0) == {"a": BUDGET}
    assert timed({"a": lambda: None}, -1.0) == {"a": BUDGET}
    assert timed({}, 1.0) == {}
    runs = {"a": lambda: None, "b": lambda: None}
    assert timed(runs, 3.0, iter(range(9)).__next__) == {"a": BUDGET, "b": BUDGET}


def test_kernels_are_counted_per_form(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """The child process prints lines as ONNX Runtime does on a GPU."""
    program = """
import os, sys
assert os.environ["ORT_ENABLE_ATTENTION_KERNEL_DEBUG_INFO"] == "1"
provider, batch, tokens, *paths = sys.argv[1:]
for path in paths:
    print(f"{path} begins")
    if "flash" in path:
        print("Operator=MultiHeadAttention Node=a DataType=fp16 SdpaKernel=FLASH_ATTENTION")
        print("Operator=MultiHeadAttention Node=b DataType=fp16 SdpaKernel=FLASH_ATTENTION")
    elif "math" in path:
        print("Operator=Attention Node=a DataType=fp16 SdpaKernel=MATH")
"""
    monkeypatch.setattr(measuring, "KERNELS", program)
    forms = [Form(n, tmp_path / f"{n}.onnx", {}) for n in ("flash", "plain", "math")]
    assert cuda._kernels(measuring.Sized(forms), (1, 8), "cuda", 60) == {
        "flash": {"MultiHeadAttention fp16 FLASH_ATTENTION": 2},
        "plain": {},
        "math": {"Attention fp16 MATH": 1},
    }
    monkeypatch.setattr(measuring, "KERNELS", "import sys; sys.exit('no driver')")
    with pytest.raises(AttnserveError, match="no driver"):
        kernels(forms, (1, 8), "cuda", 60)


@pytest.mark.export
def test_compiled_encoder_runs_on_the_cpu():
    make = compiled(SMALL, 32, device="cpu", backend="eager")
    feed = example_inputs(SMALL.build(32), Workload.of(2, 8))
    (hidden,) = make(feed)().to_tuple()  # type: ignore[attr-defined]
    assert hidden.shape == (2, 8, 64) and str(hidden.dtype) == "torch.float16"


# Bounds


def content(**changes: Any) -> dict[str, Any]:
    """Return a result that meets every bound exactly."""

    def row(shape: tuple[int, int], form: str, p50_ms: float, peak: int) -> dict[str, Any]:
        return {"batch": shape[0], "sequence": shape[1], "form": form, "p50_ms": p50_ms,
                "peak_bytes": peak}  # fmt: skip

    cells = [
        row((32, 128), "fp16", 3.0, 100), row((32, 128), "ONNX Runtime fp16", 2.3, 80),
        row((32, 128), "fused fp16", 2.0, 100), row((32, 128), "pruned fp16", 1.0, 500),
        row((32, 512), "fp16", 2.6, 100), row((32, 512), "fused fp16", 2.0, 50),
        row((1, 32), "fp16", 0.97, 100), row((1, 32), "fused fp16", 1.0, 100),
        {"batch": 1, "sequence": 128, "form": "fp16", "not_measured": BUDGET},
    ]  # fmt: skip
    base = {"cells": cells, "min_cosine": {"fused fp16": 0.98, "pruned fp16": 0.979}}
    return {"sizes": {"BERT-base": base}, "cuda_graphs": {"captured_p50_ms": 0.35},
            "service": {"overhead_p50_ms": 1.0}} | changes  # fmt: skip


def test_bounds_hold_at_their_limits_and_fail_beyond():
    """Forms with a cosine below 0.98 do not count."""
    assert [(bound["value"], bound["holds"]) for bound in cuda.bounds(content())] == [
        (1.15, True), (1.3, True), (0.97, True), (1.0, True), (0.35, True), (1.0, True),
    ]  # fmt: skip
    missed = content(cuda_graphs={"captured_p50_ms": 0.351}, service={"overhead_p50_ms": 1.001})
    base = missed["sizes"]["BERT-base"]
    base["cells"][2] |= {"p50_ms": 2.5, "peak_bytes": 101}
    holds = [bound["holds"] for bound in cuda.bounds(missed)]
    assert holds == [False, True, False, False, False, False]
    nothing = content(sizes={}, cuda_graphs="not measured: no", service="not measured: no")
    assert [bound["holds"] for bound in cuda.bounds(nothing)] == [None] * 6


def test_shapes_are_complete_and_unique():
    wanted = {(batch, tokens) for batch in (1, 8, 32, 128) for tokens in (32, 128, 512)}
    assert len(cuda.SHAPES) == 12 and set(cuda.SHAPES) == wanted
    assert set(cuda.SHAPES[:3]) == {(32, 128), (32, 512), (1, 32)}  # shapes of the bounds
    assert list(SIZES) == list(cuda.SHARES)


@pytest.mark.parametrize("labels", [["BERT-base", "MiniLM"], ["tiny"], list(SIZES)])
def test_deadlines_grow_and_leave_a_tenth(labels: list[str]):
    ends = cuda._deadlines({label: SIZES.get(label, SMALL) for label in labels})
    assert list(ends) == labels and list(ends.values()) == sorted(ends.values())
    assert list(ends.values())[-1] == pytest.approx(0.9)


@pytest.mark.parametrize(
    ("card", "name"),
    [("NVIDIA H100 80GB HBM3", "h100-80gb-hbm3"), ("NVIDIA L40S, NVIDIA L40S", "l40s"),
     ("../x", "x"), ("", "unknown")],
)  # fmt: skip
def test_slug_of_the_card_names_the_file(card: str, name: str):
    assert cuda.slug(card) == name


# The program


@pytest.mark.process
@pytest.mark.skipif(Refusal.of(require_cuda) is None, reason="there is a GPU")
def test_main_without_gpu_writes_the_reason_and_exits_0(tmp_path: Path):
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.cuda", "--results", str(tmp_path / "new")],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert len(done.stdout.splitlines()) == 1 and "nothing measured" in done.stdout
    written = json.loads((tmp_path / "new" / "cuda.json").read_text())
    assert (written["measured"], written["why"]) == (False, str(Refusal.of(require_cuda)))
    assert [bound["holds"] for bound in written["bounds"]] == [None] * 6


def test_committed_results_are_measured_on_cuda_or_give_the_reason():
    measured = list((ROOT / "benchmarks/results").glob("cuda-*.json"))
    if not measured:
        content = json.loads((ROOT / "benchmarks/results/cuda.json").read_text())
        assert content["measured"] is False and content["why"]
    for path in measured:
        assert json.loads(path.read_text())["machine"]["provider"] == "cuda"


def test_main_with_one_model_exits_2(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as error:
        cuda.main(["only.onnx"])
    assert error.value.code == 2 and "two models" in capsys.readouterr().err


@pytest.mark.timing
def test_main_compares_a_pair_in_both_precisions(
    encoder: ir.Model, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """With the CPU in place of the GPU."""
    pair = [tmp_path / "original.onnx", tmp_path / "optimized.onnx"]
    for path, model in zip(pair, (encoder, collaborative(encoder)), strict=True):
        save_model(model, path)
    options = ["--seq", "16", "--tiny-on-cpu", "--results", str(tmp_path / "new")]
    assert cuda.main([*map(str, pair), *options]) == 0
    content = json.loads((tmp_path / "new" / "cuda-pair.json").read_text())
    assert content["machine"]["provider"] == "cpu"
    assert content["precisions"].keys() == {"fp32", "fp16"}
    for result, tolerance in zip(content["precisions"].values(), (1e-4, 5e-2), strict=True):
        assert result["parity"]["outputs"][0]["max_abs_error"] < tolerance
        assert len(result["results"]) == 2
    assert len(capsys.readouterr().out.splitlines()) == 2


@pytest.mark.timing
def test_main_measures_every_form_or_gives_the_reason(tmp_path: Path):
    """With the CPU in place of the GPU; it has no kernels for bfloat16."""
    assert cuda.main(["--tiny-on-cpu", "--seconds", "200", "--results", str(tmp_path)]) == 0
    content = json.loads((tmp_path / "cuda-tiny-on-cpu.json").read_text())
    assert content["machine"]["provider"] == "cpu" and content["measured"]
    assert max(content["parity"].values()) < 1e-4
    assert content["matrix_tflops"].keys() == {"fp16", "fp32, TF32 allowed"}
    size = content["sizes"]["tiny"]
    assert "NOT_IMPLEMENTED" in size["not_built"]["fused bf16"]
    missing = set(size["not_built"])
    for shape in cuda.TINY_SHAPES:
        rows = [c for c in size["cells"] if (c["batch"], c["sequence"]) == shape]
        assert {row["form"] for row in rows} == (set(FORMS) | {cuda.TORCH}) - missing
        for row in rows:
            assert row["p50_ms"] <= row["p99_ms"] and row["peak_bytes"] > 0, row
            assert sum(row["operators"].values()) <= 1.001
    rows = content["collaborative_attention"]
    assert [(row["batch"], row["sequence"], row["R"]) for row in rows] == [
        (*shape, 16) for shape in cuda.TINY_SHAPES
    ]
    assert all(row[f"{name}_p50_ms"] > 0 for row in rows for name in ("folded", "own_heads"))
    assert content["cuda_graphs"]["largest_difference"] < 1e-2
    assert 1 <= content["cuda_graphs"]["graphs"] <= 8
    assert content["service"]["overhead_p50_ms"] > 0
    assert content["attention_kernels"]["fused fp16"] == {}  # the CPU prints none
    assert len(content["bounds"]) == 6
    assert content["seconds"] < 300


@pytest.mark.timing
def test_everything_without_time_gives_the_reason(tmp_path: Path):
    content = cuda.everything("cpu", cuda.TINY, cuda.TINY_SHAPES, 0.0, matrix=16, requests=1)
    size = content["sizes"]["tiny"]
    reasons = set(size["not_built"].values()) | {c.get("not_measured") for c in size["cells"]}
    assert reasons <= {BUDGET, *(why for why in size["not_built"].values() if "CUDA" in why)}
    assert isinstance(content["cuda_graphs"], str) and isinstance(content["service"], str)
