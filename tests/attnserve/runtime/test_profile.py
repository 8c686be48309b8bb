"""The peak memory of runs, from profiles of ONNX Runtime."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from attnserve.context import ONE_THREAD
from attnserve.runtime.onnx_runtime import OnnxRuntime
from attnserve.runtime.profile import peak_bytes


def test_peak_bytes_grow_with_the_shape(tmp_path: Path):
    """In the arena of the CPU, in the place of a GPU's."""
    model = write_product(tmp_path)

    def peak(rows: int) -> int | None:
        feed = {"x": np.ones((rows, 256), np.float32)}
        return OnnxRuntime().peak_bytes(model, feed, ONE_THREAD)

    small, large = peak(8), peak(1024)
    assert small is not None and large is not None
    output = 4 * 1024**2  # bytes
    assert small < output <= large < 8 * output


@pytest.mark.parametrize("content", ["", "[", "{}", "[1]", '[{"cat": "Node"}]', "null"])
def test_peak_bytes_of_an_invalid_profile_is_none(content: str, tmp_path: Path):
    path = tmp_path / "profile.json"
    assert peak_bytes(path) is None
    path.write_text(content)
    assert peak_bytes(path) is None


def write_product(folder: Path) -> Path:
    model = ir.from_onnx_text(
        """<ir_version: 8, opset_import: ["" : 17]> g (float[n, 256] x) => (float[n, n] z)
           { y = Relu (x) t = Transpose (y) z = MatMul (y, t) }"""
    )
    ir.save(model, folder / "product.onnx")
    return folder / "product.onnx"
