"""benchmarks/cuda.py: what of it can be checked without a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from attnserve.inputs import example_inputs
from attnserve.session import open_session
from benchmarks import cuda
from graph_passes.find import find_attention


def run(model: ir.Model, inputs: dict[str, np.ndarray]) -> np.ndarray:
    return open_session(model, threads=1).run(None, inputs)[0]


@pytest.fixture
def encoder() -> ir.Model:
    return cuda.random_encoder(layers=2, hidden=32, heads=4, positions=32)


def test_the_encoder_s_attention_is_found_and_its_exact_form_agrees(encoder: ir.Model):
    blocks, misses = find_attention(encoder)
    assert [(b.num_heads, b.head_size) for b in blocks] == [(4, 8)] * 2 and not misses
    new = cuda.collaborative(encoder)
    assert [b.form for b in find_attention(new)[0]] == ["collaborative"] * 2
    inputs = example_inputs(encoder, 3, 16, padded=True)
    np.testing.assert_allclose(run(new, inputs), run(encoder, inputs), rtol=0, atol=1e-4)


def test_float16_computes_in_half_and_keeps_the_interface(encoder: ir.Model):
    inputs = example_inputs(encoder, 3, 16, padded=True)
    expected = run(encoder, inputs)
    cuda.to_float16(encoder)
    assert {v.dtype for v in encoder.graph.initializers.values()} == {
        ir.DataType.FLOAT16,
        ir.DataType.INT64,
    }
    assert [(v.name, v.dtype) for v in encoder.graph.outputs] == [
        ("last_hidden_state", ir.DataType.FLOAT)
    ]
    actual = run(encoder, inputs)
    assert actual.dtype == np.float32
    np.testing.assert_allclose(actual, expected, rtol=0, atol=3e-2)
    assert np.abs(actual - expected).max() > 1e-6  # it did round


def test_float16_reaches_constants_casts_float_inputs_and_subgraphs():
    def model() -> ir.Model:
        return ir.from_onnx_text(
            """<ir_version: 8, opset_import: ["" : 17]>
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
        )

    half = model()
    cuda.to_float16(half)
    assert not [
        v
        for g in half.graphs()
        for n in g
        for v in n.outputs
        if v.dtype == ir.DataType.FLOAT and v not in half.graph.outputs
    ]
    for keep in (True, False):
        inputs = {"x": np.array([1, -2], np.float32), "keep": np.array(keep), "size": np.array([2])}
        results = [open_session(m).run(None, inputs) for m in (model(), half)]
        for expected, actual in zip(*results, strict=True):
            assert actual.dtype == np.float32 and np.isfinite(actual).all()
            np.testing.assert_allclose(actual, np.clip(expected, -65504, 65504), rtol=1e-3)


@pytest.mark.skipif(cuda.why_no_cuda() is None, reason="there is a GPU")
def test_without_a_gpu_it_says_so_in_one_line_and_succeeds():
    done = subprocess.run(
        [sys.executable, Path(cuda.__file__)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert len(done.stdout.splitlines()) == 1 and "nothing measured" in done.stdout


def test_one_model_is_not_enough(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit, match="2"):
        cuda.main(["only.onnx"])
    assert "give two models" in capsys.readouterr().err


def test_the_whole_run_writes_both_precisions(
    encoder: ir.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
):
    """As on a GPU, with the CPU in its place."""
    monkeypatch.setattr(cuda, "why_no_cuda", lambda: None)
    monkeypatch.setattr(cuda, "compare", partial(cuda.compare, provider="cpu"))
    monkeypatch.setattr(cuda, "random_encoder", lambda: encoder.clone(deep_copy=True))
    monkeypatch.setattr(cuda, "RESULT", tmp_path / "new" / "cuda.json")
    assert cuda.main(["--seq", "16"]) == 0
    content = json.loads((tmp_path / "new" / "cuda.json").read_text())
    assert content["machine"]["provider"] == "cuda"
    assert content["precisions"].keys() == {"fp32", "fp16"}
    for result, tolerance in zip(content["precisions"].values(), (1e-4, 5e-2), strict=True):
        assert result["parity"]["outputs"][0]["max_abs_error"] < tolerance
        assert [Path(row["model"]).stem.split("-")[0] for row in result["results"]] == [
            "original",
            "optimized",
        ]
    assert len(capsys.readouterr().out.splitlines()) == 2
