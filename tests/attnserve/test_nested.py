"""Attention in subgraphs and functions, and graphs that need repair."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from onnx import parser

from attnserve import optimize
from attnserve.checks.inspect import inspect
from attnserve.context import ONE_THREAD
from attnserve.models.onnx_files import load_model
from attnserve.runtime.session import open_session
from graph_passes.errors import InvalidModel
from tests.errors import raises
from tests.graph_passes.graphs import D, H, K, attention, if_model


@pytest.fixture
def branches(tmp_path: Path) -> Path:
    """An If with attention in both branches."""
    path = tmp_path / "if.onnx"
    ir.save(if_model(), path)
    return path


def both(path: Path, x: np.ndarray) -> list[np.ndarray]:
    session = open_session(path, ONE_THREAD)
    return [np.asarray(session.run(None, {"x": x, "flag": np.array(f)})[0]) for f in (True, False)]


def test_optimize_rewrites_both_branches_of_an_if(branches: Path, tmp_path: Path):
    optimize(branches, tmp_path / "new.onnx", collab_dk=H * K, mixing="dense")
    blocks = inspect(tmp_path / "new.onnx").to_json()["attention"]
    assert [block["form"] for block in blocks] == ["collaborative"] * 2
    x = np.random.default_rng(0).standard_normal((2, 5, D)).astype(np.float32)
    for before, after in zip(both(branches, x), both(tmp_path / "new.onnx", x), strict=True):
        np.testing.assert_allclose(after, before, rtol=0, atol=1e-5)


def test_optimize_calibration_of_subgraphs_warns(branches: Path, tmp_path: Path):
    rng = np.random.default_rng(0)
    rows = {"x": rng.standard_normal((8, 5, D)).astype(np.float32), "flag": np.ones(8, bool)}
    np.savez(tmp_path / "rows.npz", **rows)
    report = optimize(
        branches, tmp_path / "new.onnx", collab_dk=4, mixing="dense", calib=tmp_path / "rows.npz"
    )
    assert sum("by its weights alone" in warning for warning in report.record.warnings) == 2


def test_inspect_sorts_nodes(tmp_path: Path):
    whole = ir.to_proto(attention())
    nodes = list(whole.graph.node)
    del whole.graph.node[:]
    whole.graph.node.extend(reversed(nodes))
    path = tmp_path / "reversed.onnx"
    path.write_bytes(whole.SerializeToString())
    assert len(inspect(path).matches.blocks) == 1


def test_load_model_cycle_is_refused(tmp_path: Path):
    text = """<ir_version: 9, opset_import: ["": 17]>
    g (float[n, 4] x) => (float[n, 4] y) { a = Add(x, y)
        y = Add(a, x) }"""
    path = tmp_path / "cycle.onnx"
    path.write_bytes(parser.parse_model(text).SerializeToString())
    with raises(InvalidModel, "artifact.malformed", "cycle"):
        load_model(path)
