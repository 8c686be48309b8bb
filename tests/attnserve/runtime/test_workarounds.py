"""Graphs at which ONNX Runtime crashes are changed, and compute the same."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from attnserve.precision.convert import convert
from attnserve.runtime.session import open_session
from attnserve.runtime.workarounds import crashes, part_transposes, safe_copy

PERMS = [[1, 0, 2], [1, 2, 0], [1, 2, 0, 3], [1, 2, 3, 0]]


def transposed(perm: list[int], dtype: str = "float16") -> ir.Model:
    """Transpose and MatMul with a constant weight (8, 8)."""
    axes, others = (", ".join(f"{name}{i}" for i in range(len(perm))) for name in "ab")
    matrix = weight().astype({"float16": np.float16, "float": np.float32}[dtype])
    return ir.from_onnx_text(
        f"""<ir_version: 9, opset_import: ["": 18]>
        g ({dtype}[{axes}] x) => ({dtype}[{others}] y) {{
            t = Transpose <perm = {perm}> (x)
            y = MatMul(t, w)
        }}""",
        initializers=[ir.tensor(matrix, name="w")],
    )


def weight() -> np.ndarray:
    return np.random.default_rng(0).standard_normal((8, 8)).astype(np.float32)


def tokens(perm: list[int], dtype: type = np.float16) -> np.ndarray:
    """The last axis after the permutation has 8 elements."""
    sizes = [2, 3, 4, 5][: len(perm)]
    sizes[perm[-1]] = 8
    return np.random.default_rng(1).standard_normal(sizes).astype(dtype)


@pytest.mark.parametrize("from_file", [False, True])
@pytest.mark.parametrize("perm", PERMS, ids=str)
def test_transposed_float16_operand_runs(perm: list[int], from_file: bool, tmp_path: Path):
    model, x = transposed(perm), tokens(perm)
    assert crashes(model)
    if from_file:
        ir.save(model, tmp_path / "m.onnx")
    (found,) = open_session(tmp_path / "m.onnx" if from_file else model).run(None, {"x": x})
    expected = x.astype(np.float32).transpose(perm) @ weight()
    np.testing.assert_allclose(found, expected, atol=0.05)  # float16 with sums of 8 products
    assert found.shape == expected.shape


def test_models_are_not_changed_in_place():
    model = transposed(PERMS[0])
    nodes = [*model.graph]
    open_session(model)
    assert [*model.graph] == nodes
    changed = safe_copy(model)
    assert not crashes(changed)
    part_transposes(changed)
    assert [node.op_type for node in changed.graph] == ["Transpose", "Reshape", "MatMul"]


def test_other_transposes_and_float32_stay():
    assert not crashes(transposed(PERMS[0], "float"))
    assert not crashes(transposed([0, 2, 1]))
    assert not crashes(transposed([0, 2, 1, 3]))


def test_float16_model_is_written_without_the_pattern():
    model = convert(transposed(PERMS[0], "float"), "float16")
    assert not crashes(model)
    assert any(node.op_type == "Reshape" for node in model.graph)
    x = tokens(PERMS[0], np.float32)
    (found,) = open_session(model).run(None, {"x": x})
    np.testing.assert_allclose(found, x.transpose(PERMS[0]) @ weight(), atol=0.05)


def test_changed_models_can_be_changed_again():
    """A rewrite may add another product of the transposed value."""
    model = transposed(PERMS[0])
    part_transposes(model)
    product = ir.node("MatMul", [model.graph[0].outputs[0], model.graph.initializers["w"]])
    product.outputs[0].name = "z"
    model.graph.append(product)
    assert crashes(model)
    part_transposes(model)
    assert not crashes(model)
    (found,) = open_session(model).run(None, {"x": tokens(PERMS[0])})
    assert np.isfinite(found).all()
