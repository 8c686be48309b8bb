"""Fake quantization against int8 models in ONNX Runtime."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

torch = pytest.importorskip("torch", reason="pip install 'attnserve[torch]'")

from attnserve.data.datasets import load_inputs  # noqa: E402
from attnserve.models.artifact import open_artifact  # noqa: E402
from attnserve.models.onnx_files import load_model  # noqa: E402
from attnserve.precision.convert import (  # noqa: E402
    Precision,
    convert,
    nodes_of_blocks,
    roundings_of,
)
from attnserve.precision.int8_grids import product_groups  # noqa: E402
from attnserve.precision.products import collect_ranges  # noqa: E402
from attnserve.precision.schemes import SCHEMES  # noqa: E402
from attnserve.recovery.module import GraphModule  # noqa: E402
from attnserve.recovery.quantization import fake_operators  # noqa: E402
from attnserve.runtime.interface import Batch  # noqa: E402
from attnserve.runtime.session import open_session  # noqa: E402
from graph_passes import FuseAttention, find_attention  # noqa: E402

TOLERANCE = 1e-5
"""The median relative error of a token. It is not a maximum: where an activation is in the middle
of two bytes, float32 sums that differ in the last bit are rounded to different bytes. Measured:
2e-7 at most, and 7e-4 at least without fake quantization."""


def quantized(
    model: ir.Model,
    rows: list[Batch],
    precision: Precision = "int8",
    float_blocks: Sequence[str] = (),
) -> GraphModule:
    module = GraphModule(model)
    module.replaced = fake_operators(
        model, SCHEMES[precision].bits, collect_ranges(model, rows), torch.device("cpu"),
        float_nodes=nodes_of_blocks(model, float_blocks),
    )  # fmt: skip
    return module


def error(expected: np.ndarray, found: np.ndarray) -> float:
    """The median relative error of a token."""
    assert expected.shape == found.shape
    sizes = (np.linalg.norm(array, axis=-1) for array in (expected - found, expected))
    return float(np.median(np.divide(*sizes)))


def output(module: GraphModule, batch: Batch) -> np.ndarray:
    with torch.no_grad():
        return module(batch)[0].numpy()


@pytest.fixture(scope="module")
def rows(tiny: Path, sentences: Path) -> list[Batch]:
    artifact = open_artifact(tiny)
    return [*load_inputs([sentences], load_model(artifact), artifact).fit]


def plain(folder: Path) -> ir.Model:
    return load_model(open_artifact(folder))


def with_attention(folder: Path) -> ir.Model:
    """com.microsoft Attention, which is served as QAttention."""
    model = plain(folder)
    FuseAttention({block.name: "attention" for block in find_attention(model).blocks})(model)
    assert any(n.op_type == "Attention" and n.domain for n in model.graph)
    return model


def with_large_channels(folder: Path) -> ir.Model:
    """Smoothing divides channels of its activations."""
    model = plain(folder)
    for value in model.graph.initializers.values():
        tensor = value.const_value
        if tensor is not None and "LayerNorm" in (value.name or ""):
            array = tensor.numpy().copy()
            array[3] += 12.0
            value.const_value = ir.Tensor(array, name=value.name)
    return model


@pytest.mark.parametrize("build", [plain, with_attention, with_large_channels])
@pytest.mark.parametrize("precision", ["int8", "int8-full"])
def test_fake_quantization_equals_int8_model_in_onnx_runtime(
    build: Callable[[Path], ir.Model], precision: Precision, tiny: Path, rows: list[Batch]
):
    model = build(tiny)
    module = quantized(model, rows, precision)
    groups = product_groups(model, SCHEMES[precision].bits, collect_ranges(model, rows))
    is_smooth = any(group.grid and group.grid.divisors is not None for group in groups)
    assert is_smooth or build is not with_large_channels
    served = open_session(convert(model, precision, rows, to_nearest=True))
    original = open_session(model)
    for batch in rows[:3]:
        expected = served.run(None, batch)[0]
        assert error(expected, output(module, batch)) < TOLERANCE
        assert error(expected, original.run(None, batch)[0]) > 10 * TOLERANCE


def test_blocks_that_stay_float_are_not_rounded(tiny: Path, rows: list[Batch]):
    model = plain(tiny)
    blocks = [block.name for block in find_attention(model).blocks][:1]
    kept = quantized(model, rows, float_blocks=blocks)
    served = open_session(convert(model, "int8", rows, float_blocks=blocks, to_nearest=True))
    whole = quantized(model, rows)
    for batch in rows[:3]:
        expected = served.run(None, batch)[0]
        assert error(expected, output(kept, batch)) < TOLERANCE
        assert error(expected, output(whole, batch)) > 10 * TOLERANCE


def bytes_of(model: ir.Model) -> dict[str, np.ndarray]:
    """The 8-bit weights."""
    tensors = {name: value.const_value for name, value in model.graph.initializers.items()}
    eight = (ir.DataType.INT8, ir.DataType.UINT8)
    return {
        name: tensor.numpy()
        for name, tensor in tensors.items()
        if tensor is not None and tensor.dtype in eight and tensor.size > 1
    }


@pytest.mark.parametrize("build", [plain, with_attention, with_large_channels])
def test_rounding_of_a_model_is_that_of_its_conversion_and_stays_when_weights_change(
    build: Callable[[Path], ir.Model], tiny: Path, rows: list[Batch]
):
    model = build(tiny)
    rounding = roundings_of(model, "int8", rows)
    expected, nearest = convert(model, "int8", rows), convert(model, "int8", rows, to_nearest=True)
    found = bytes_of(convert(model, "int8", rows, rounding=rounding))
    ours, others = bytes_of(expected), bytes_of(nearest)
    assert found.keys() == ours.keys()
    assert all(np.array_equal(found[name], ours[name]) for name in ours)
    assert any(not np.array_equal(found[name], others[name]) for name in ours)

    module = GraphModule(model)
    random = np.random.default_rng(0)
    for weight in module.weights:  # by about half a step of the bytes
        noise = 0.01 * float(weight.detach().abs().max()) * random.standard_normal(weight.shape)
        weight.data += torch.from_numpy(noise.astype(np.float32))
    module.write_weights()
    module.replaced = fake_operators(
        model, 7, collect_ranges(model, rows), module.device, rounding=rounding
    )
    served = convert(model, "int8", rows, rounding=rounding)
    changed = bytes_of(served)
    assert any(not np.array_equal(found[name], changed[name]) for name in found)
    session = open_session(served)
    for batch in rows[:3]:
        assert error(session.run(None, batch)[0], output(module, batch)) < TOLERANCE
