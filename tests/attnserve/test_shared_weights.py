"""Layers that share one set of weights (ALBERT) are factored once and keep sharing it."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from attnserve.checks.compare import verify
from attnserve.choices import Mixing
from attnserve.models.onnx_files import load_model
from attnserve.planning.optimize import optimize
from attnserve.runtime.session import open_session
from tests.graph_passes.graphs import PARTS, D, H, K, graph

LAYERS = 3


@pytest.fixture
def albert(tmp_path: Path) -> Path:
    """Three attention layers with the same weights."""
    body = "".join(PARTS.values())
    names = set(re.findall(r"^\s*(\w+) =", body, re.MULTILINE))
    layers = ["\n        layer_0_in = Identity(x)"]
    for layer in range(LAYERS):
        pattern = "|".join(sorted(names, key=len, reverse=True))
        own = re.sub(rf"\b({pattern})\b", rf"layer_{layer}_\1", body)
        layers.append(re.sub(r"\bx\b", f"layer_{layer}_in", own))
        layers.append(f"\n        layer_{layer + 1}_in = Tanh(layer_{layer}_out)")
    layers.append(f"\n        out = Identity(layer_{LAYERS}_in)")
    path = tmp_path / "albert.onnx"
    ir.save(graph("".join(layers)), path)
    return path


@pytest.fixture
def calibration(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    path = tmp_path / "tokens.npz"
    x = 0.3 * rng.standard_normal((40, 9, D)) + rng.standard_normal(D)
    np.savez(path, x=x.astype(np.float32), mask=np.zeros((40, 1, 1, 9), np.float32))
    return path


def weights(path: Path) -> dict[str, tuple[int, ...]]:
    """The shapes of query and key weights; exact factors are the original weights."""
    model = load_model(path)
    return {
        name: tuple(value.const_value.shape.numpy())
        for name, value in model.graph.initializers.items()
        if value.const_value is not None and ("/collaborative/" in name or name in ("Wq", "Wk"))
    }


def output(path: Path, feeds: dict[str, np.ndarray]) -> np.ndarray:
    return np.asarray(open_session(path, threads=1).run(None, feeds)[0])


@pytest.mark.parametrize("rank", [H * K, 6])
def test_optimize_dense_factors_stay_shared(
    albert: Path, calibration: Path, tmp_path: Path, rank: int
):
    report = optimize(
        albert, tmp_path / "new.onnx", collab_dk=rank, mixing="dense", calib=calibration
    )
    factored = [step for step in report.steps if step.rewrite == "collaborate"]
    assert len(factored) == LAYERS
    assert len({step.relative_error for step in factored}) == 1, "factored once"
    kept = weights(tmp_path / "new.onnx")
    assert [shape for shape in kept.values() if shape == (D, rank)] == [(D, rank)] * 2, "P and Q"
    assert [shape for shape in kept.values() if shape == (H, 1, rank)] == [(H, 1, rank)]


@pytest.mark.parametrize("rank", [H * 3, 6])
def test_optimize_sparse_factors_stay_shared(
    albert: Path, calibration: Path, tmp_path: Path, rank: int
):
    optimize(
        albert, tmp_path / "new.onnx", collab_dk=rank, mixing="sparse", head_dk=3, calib=calibration
    )
    kept = list(weights(tmp_path / "new.onnx").values())
    query = kept.count((D, rank + 1))  # P; the last column multiplies the content
    assert (query, kept.count((D, rank)), kept.count((D, H))) == (1, 1, LAYERS)
    assert verify(albert, tmp_path / "new.onnx", data=calibration).mean_cosine > 0.9


def test_optimize_exact_factors_keep_the_output(albert: Path, tmp_path: Path):
    optimize(albert, tmp_path / "new.onnx", collab_dk=H * K)
    rng = np.random.default_rng(1)
    feeds = {
        "x": rng.standard_normal((2, 7, D)).astype(np.float32),
        "mask": np.where(rng.random((2, 1, 1, 7)) < 0.7, 0, -1e9).astype(np.float32),
    }
    before, after = output(albert, feeds), output(tmp_path / "new.onnx", feeds)
    np.testing.assert_allclose(after, before, rtol=0, atol=1e-5)


@pytest.mark.parametrize("mixing", ["dense", "sparse"])
def test_optimize_content_term_differs_per_layer(
    albert: Path, calibration: Path, tmp_path: Path, mixing: Mixing
):
    optimize(albert, tmp_path / "new.onnx", collab_dk=6, mixing=mixing, calib=calibration)
    model = load_model(tmp_path / "new.onnx")
    content = [
        value.const_value.numpy()
        for name, value in model.graph.initializers.items()
        if name.endswith("content_weight") and value.const_value is not None
    ]
    assert len(content) == LAYERS
    assert not np.allclose(content[0], content[1], atol=1e-3), "their tokens have different means"


def test_optimize_pooled_calibration_reduces_the_error(
    albert: Path, calibration: Path, tmp_path: Path
):
    calibrated = optimize(albert, tmp_path / "a.onnx", collab_dk=6, calib=calibration).fidelity
    plain = optimize(albert, tmp_path / "b.onnx", collab_dk=6).fidelity
    assert calibrated.mean_cosine > 0.9
    with np.load(calibration) as arrays:
        feeds = {name: arrays[name] for name in arrays.files}
    original = output(albert, feeds)
    errors = [np.abs(output(tmp_path / n, feeds) - original).mean() for n in ("a.onnx", "b.onnx")]
    assert errors[0] < 0.7 * errors[1], plain.mean_cosine
