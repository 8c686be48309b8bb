"""Layers that share one set of weights (ALBERT) are factored once and keep sharing it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import numpy as np
import onnx_ir as ir
import pytest

from attnserve import optimize, verify
from attnserve.context import ONE_THREAD
from attnserve.literals import Importance, MixingOption
from attnserve.models.onnx_files import load_model
from attnserve.runtime.session import open_session
from graph_passes.errors import CannotRewrite
from tests.errors import raises
from tests.graph_passes.graphs import PARTS, D, H, K, graph

LAYERS = 3


FOLDED = {
    "q": """
        packed = MatMul(x, Wqkv)
        biased = Add(packed, bqkv)
        q0, k0, v0 = Split <axis = -1> (biased, thirds)
        q1 = Reshape(q0, heads)  q2 = Transpose <perm = [0, 2, 1, 3]> (q1)
        q = Reshape(q2, rows)""",
    "k": """
        k1 = Reshape(k0, heads)  k2 = Transpose <perm = [0, 2, 3, 1]> (k1)
        length = Shape <start = 1, end = 2> (x)  columns = Concat <axis = 0> (minus_1, four, length)
        kT = Reshape(k2, columns)""",
    "v": """
        v1 = Reshape(v0, heads)  v2 = Transpose <perm = [0, 2, 1, 3]> (v1)
        v = Reshape(v2, rows)""",
    "scores": PARTS["scores"],
    "mask": "",
    "softmax": """
        p = Softmax <axis = -1> (s)""",
    "context": """
        c0 = MatMul(p, v)  unfolded = Concat <axis = 0> (minus_1, three, length, four)
        c1 = Reshape(c0, unfolded)  c2 = Transpose <perm = [0, 2, 1, 3]> (c1)
        c = Reshape(c2, merge)""",
    "output": """
        o = MatMul(c, Wo12)
        out = Add(o, bo)""",
}
"""Packed projections whose heads are merged with the batch, as torch.nn.MultiheadAttention."""


def repeated(
    parts: Mapping[str, str], *, constants: Mapping[str, np.ndarray] | None = None, inputs: str = ""
) -> ir.Model:
    """Three attention layers with the same weights."""
    body = "".join(parts.values())
    made = re.findall(r"([\w, ]+) = [A-Z]", body)
    names = {name.strip() for each in made for name in each.split(",")}
    layers = ["\n        layer_0_in = Identity(x)"]
    for layer in range(LAYERS):
        pattern = "|".join(sorted(names, key=len, reverse=True))
        own = re.sub(rf"\b({pattern})\b(?! = -?\d)", rf"layer_{layer}_\1", body)
        layers.append(re.sub(r"\bx\b", f"layer_{layer}_in", own))
        layers.append(f"\n        layer_{layer + 1}_in = Tanh(layer_{layer}_out)")
    layers.append(f"\n        out = Identity(layer_{LAYERS}_in)")
    more = {"inputs": inputs} if inputs else {}
    return graph("".join(layers), constants=constants, **more)


@pytest.fixture
def albert(tmp_path: Path) -> Path:
    path = tmp_path / "albert.onnx"
    ir.save(repeated(PARTS), path)
    return path


@pytest.fixture
def folded(tmp_path: Path) -> Path:
    path, constants = tmp_path / "folded.onnx", {
        "rows": np.array([-1, 0, K]), "minus_1": np.array([-1]), "three": np.array([H]),
        "four": np.array([K]),
    }  # fmt: skip
    constants["rows"] = np.array([-1, 9, K])
    ir.save(repeated(FOLDED, constants=constants, inputs=f"float[batch, 9, {D}] x"), path)
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
    return np.asarray(open_session(path, ONE_THREAD).run(None, feeds)[0])


@pytest.mark.parametrize("rank", [H * K, 6])
def test_optimize_dense_factors_stay_shared(
    albert: Path, calibration: Path, tmp_path: Path, rank: int
):
    report = optimize(
        albert, tmp_path / "new.onnx", collab_dk=rank, mixing="dense", calib=calibration
    )
    factored = [change for change in report.changes if change.rewrite == "collaborate"]
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
    optimize(albert, tmp_path / "new.onnx", collab_dk=H * K, mixing="dense")
    rng = np.random.default_rng(1)
    feeds = {
        "x": rng.standard_normal((2, 7, D)).astype(np.float32),
        "mask": np.where(rng.random((2, 1, 1, 7)) < 0.7, 0, -1e9).astype(np.float32),
    }
    before, after = output(albert, feeds), output(tmp_path / "new.onnx", feeds)
    np.testing.assert_allclose(after, before, rtol=0, atol=1e-5)


@pytest.mark.parametrize("mixing", ["dense", "sparse"])
def test_optimize_content_term_differs_per_layer(
    albert: Path, calibration: Path, tmp_path: Path, mixing: MixingOption
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
    calibrated = optimize(
        albert, tmp_path / "a.onnx", collab_dk=6, mixing="dense", calib=calibration
    ).fidelity
    plain = optimize(albert, tmp_path / "b.onnx", collab_dk=6, mixing="dense").fidelity
    assert calibrated.mean_cosine > 0.9
    with np.load(calibration) as arrays:
        feeds = {name: arrays[name] for name in arrays.files}
    original = output(albert, feeds)
    errors = [np.abs(output(tmp_path / n, feeds) - original).mean() for n in ("a.onnx", "b.onnx")]
    assert errors[0] < 0.7 * errors[1], plain.mean_cosine


@pytest.mark.parametrize("importance", get_args(Importance))
def test_optimize_prune_removes_the_same_heads_of_all_uses(
    albert: Path, calibration: Path, tmp_path: Path, importance: Importance
):
    report = optimize(
        albert, tmp_path / "new.onnx", prune=1 / 3, importance=importance, calib=calibration
    )
    (masks,) = [each.to_json()["targets"] for each in report.plan.passes]
    assert len(masks) == LAYERS
    assert len({tuple(mask) for mask in masks.values()}) == 1
    assert sum(next(iter(masks.values()))) == H - 1
    # A third of the weights and biases; the refit may add biases of the same size.
    assert report.record.after.parameters <= report.record.before.parameters * 2 / 3 + 2 * D
    assert not any("larger than" in warning for warning in report.record.warnings)


def test_optimize_prune_some_of_the_uses_is_refused(albert: Path, calibration: Path):
    with raises(CannotRewrite, "rewrite.shared_weights", "attention_"):
        optimize(albert, prune=1 / 3, layers=["0"], calib=calibration, dry_run=True)


def test_optimize_reuse_leaves_a_shared_output_projection(
    albert: Path, calibration: Path, tmp_path: Path
):
    edges = {"1": {str(head): ["0", head] for head in range(H)}}
    report = optimize(albert, tmp_path / "new.onnx", reuse=edges, calib=calibration)
    (change,) = report.changes
    assert change.fitted_error is None
    assert report.record.after.parameters <= report.record.before.parameters
    assert any(change.block in each and "not refitted" in each for each in report.record.warnings)


@pytest.mark.parametrize("wanted", [{"collab_dk": 6, "mixing": "dense"}, {"head_dk": 3}])
def test_optimize_packed_weights_of_merged_heads_leave_the_graph(
    folded: Path, tmp_path: Path, wanted: dict[str, Any]
):
    """Else the packed weight would stay for its values, beside the new queries and keys."""
    rng = np.random.default_rng(0)
    data = tmp_path / "x.npz"
    np.savez(data, x=rng.standard_normal((40, 9, D)).astype(np.float32))
    report = optimize(folded, tmp_path / "new.onnx", calib=data, **wanted)
    assert len(report.changes) == LAYERS
    assert report.record.after.parameters < report.record.before.parameters + LAYERS * (H + 1) * D
    kept = load_model(tmp_path / "new.onnx").graph.initializers
    assert (D, 3 * H * K) not in {tuple(value.shape or ()) for value in kept.values()}
    assert report.fidelity.mean_cosine > 0.9


def test_optimize_larger_result_warns(albert: Path, calibration: Path, tmp_path: Path):
    """A map in place of one of three attentions with the same weights is an additional weight."""
    report = optimize(albert, tmp_path / "new.onnx", skip=["0"], calib=calibration)
    assert report.record.after.parameters > report.record.before.parameters
    (warning,) = [each for each in report.record.warnings if "larger than the original" in each]
    assert f"{report.record.after.parameters:,}" in warning
    assert f"{report.record.after.bytes:,}" in warning
    assert warning in report.to_json()["warnings"]
