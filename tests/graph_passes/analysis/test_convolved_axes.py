"""Dynamic axes of images and spectrograms have the one length that the graph can run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import numpy_helper, parser

from attnserve.checks.inspect import inspect
from attnserve.models.example_inputs import example_inputs
from attnserve.runtime.session import open_session
from graph_passes.analysis.axes import bind_axes, named_axes
from graph_passes.analysis.convolved_axes import convolved_lengths
from graph_passes.analysis.workload import Workload
from tests.architectures import Cell

WIDTH, PATCH = 8, 4


def graph(body: str, **weights: np.ndarray) -> ir.Model:
    model = parser.parse_model(
        f"""<ir_version: 10, opset_import: ["" : 18]>
        g (float[batch, channels, height, width] pixel_values) => (float[] y) {{ {body} }}"""
    )
    weights["kernel"] = np.zeros((WIDTH, 3, PATCH, PATCH), np.float32)
    model.graph.initializer.extend(numpy_helper.from_array(w, n) for n, w in weights.items())
    return ir.from_proto(model)


def patches(source: str = "pixel_values", stride: int = PATCH) -> str:
    return f"p = Conv<strides = [{stride}, {stride}]>({source}, kernel)"


def table(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.float32)


@pytest.mark.parametrize("more", [0, 1, 2])
def test_lengths_follow_from_learned_positions(more: int) -> None:
    model = graph(f"{patches()} y = Add(p, positions)", positions=table(1, 25 + more, WIDTH))
    assert convolved_lengths(model.graph) == {"channels": 3, "height": 20, "width": 20}
    assert named_axes(model.graph).keys() == {"batch"}
    lengths = bind_axes(model.graph, Workload.of(2, 7))
    assert lengths == {"batch": 2, "channels": 3, "height": 20, "width": 20}


def test_lengths_follow_from_gathered_positions() -> None:
    model = graph(
        f"{patches()} g = Gather(positions, ids) y = Add(p, g)",
        positions=table(50, WIDTH),
        ids=np.arange(50)[None],
    )
    assert convolved_lengths(model.graph)["height"] == 28


def test_image_may_be_normalized_first() -> None:
    body = "a = Sub(pixel_values, mean) b = Div(a, mean)" + patches("b")
    model = graph(f"{body} y = Add(p, positions)", mean=table(1), positions=table(1, 17, WIDTH))
    assert convolved_lengths(model.graph) == {"channels": 3, "height": 16, "width": 16}


@pytest.mark.parametrize(
    "convolution",
    [
        "q, scale, zero = DynamicQuantizeLinear(pixel_values)"
        " i = ConvInteger<strides = [4, 4]>(q, rounded, zero) p = Cast<to = 1>(i)",
        "k = DequantizeLinear(rounded, one) p = Conv<strides = [4, 4]>(pixel_values, k)",
    ],
    ids=["dynamic", "static"],
)
def test_lengths_of_a_quantized_model(convolution: str) -> None:
    rounded = np.zeros((WIDTH, 3, PATCH, PATCH), np.uint8)
    model = graph(
        f"{convolution} y = Add(p, positions)",
        rounded=rounded, one=np.float32([1]), positions=table(1, 26, WIDTH),
    )  # fmt: skip
    assert convolved_lengths(model.graph) == {"channels": 3, "height": 20, "width": 20}


@pytest.mark.parametrize(
    ("body", "shape"),
    [
        (f"{patches()} y = Identity(p)", (1, 24, WIDTH)),  # no square
        (f"{patches()} y = Identity(p)", (1, 1, WIDTH)),  # the token of the class only
        (f"{patches()} y = Identity(p)", (1, 26, WIDTH + 1)),
        (f"{patches()} y = MatMul(p, positions)", (49, WIDTH)),  # a projection
        (f"{patches(stride=2)} y = Identity(p)", (1, 26, WIDTH)),  # overlapping windows
    ],
)
def test_without_learned_positions_only_channels_are_known(
    body: str, shape: tuple[int, ...]
) -> None:
    model = graph(body, positions=table(*shape))
    assert convolved_lengths(model.graph) == {"channels": 3}
    lengths = convolved_lengths(model.graph, sides=(9, 8))
    assert lengths == {"channels": 3, "height": 9, "width": 8}


@pytest.mark.parametrize("body", ["y = Identity(pixel_values)", "y = ReduceMean(pixel_values)"])
def test_inputs_that_are_no_images_are_free(body: str) -> None:
    assert convolved_lengths(graph(body).graph) == {}


def spectrogram(end: str, **weights: np.ndarray) -> ir.Model:
    """Two convolutions, of which the second halves the length, as in Whisper."""
    model = parser.parse_model(
        f"""<ir_version: 10, opset_import: ["" : 20]>
        g (float[batch, features, length] input_features) => (float[] y) {{
            a = Conv<pads = [1, 1]>(input_features, first)
            b = Gelu(a)
            c = Conv<pads = [1, 1], strides = [2]>(b, second)
            d = Gelu(c)
            e = Transpose<perm = [0, 2, 1]>(d)
            {end}
        }}"""
    )
    weights |= {"first": table(WIDTH, 80, 3), "second": table(WIDTH, WIDTH, 3)}
    model.graph.initializer.extend(numpy_helper.from_array(w, n) for n, w in weights.items())
    return ir.from_proto(model)


@pytest.mark.parametrize("shape", [(1500, WIDTH), (1, 1500, WIDTH)])
def test_length_of_a_spectrogram_follows_from_its_positions(shape: tuple[int, ...]) -> None:
    model = spectrogram("y = Add(e, positions)", positions=table(*shape))
    assert convolved_lengths(model.graph) == {"features": 80, "length": 3000}


@pytest.mark.parametrize("end", ["y = Add(e, bias)", "y = MatMul(e, positions)"])
def test_length_of_a_spectrogram_without_positions_is_free(end: str) -> None:
    model = spectrogram(end, bias=table(WIDTH), positions=table(WIDTH, WIDTH))
    assert convolved_lengths(model.graph) == {"features": 80}


CELLS = [
    Cell("ViT", "sdpa", "dynamo", 23),
    Cell("DeiT", "eager", "dynamo", 18),
    Cell("CLIP vision", "eager", "torchscript", 17),
]


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.architecture)
def test_models_with_all_axes_dynamic_are_read_and_run(cell: Cell, tmp_path: Path) -> None:
    """Optimum exports images of vision transformers so."""
    model = onnx.load(cell.committed)
    for name, dim in zip(
        ("batch_size", "num_channels", "height", "width"),
        model.graph.input[0].type.tensor_type.shape.dim,
        strict=True,
    ):
        dim.dim_param = name
    del model.graph.value_info[:]
    onnx.save(model, path := tmp_path / "model.onnx")
    expected, found = inspect(cell.committed), inspect(path)
    assert not found.matches.unmatched
    assert len(found.matches.certified) == len(expected.matches.certified) > 0
    assert found.total_macs == expected.total_macs
    inputs = example_inputs(ir.from_proto(model), Workload.of(2, 128))
    assert inputs["pixel_values"].shape == (2, 3, 20, 20)
    assert np.asarray(open_session(path).run(None, inputs)[0]).shape[0] == 2
