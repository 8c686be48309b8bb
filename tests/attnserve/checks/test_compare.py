"""Comparison of two models: errors, cosines, padding, shapes and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import parser

from attnserve import verify
from attnserve.checks.compare import Tally, compare
from attnserve.models.example_inputs import random_batches
from attnserve.models.onnx_files import load_model
from graph_passes.errors import InvalidArgument, InvalidData, InvalidModel
from tests.errors import raises

HEADER = '<ir_version: 8, opset_import: ["" : 17]> g'


def model(path: Path, text: str) -> Path:
    onnx.save(parser.parse_model(f"{HEADER} {text}"), path)
    return path


def pair(folder: Path, body: str) -> tuple[Path, Path]:
    """y = x, and y = what ``body`` makes of x."""
    signature = (
        "(float[batch, seq, 2] x, int64[batch, seq] attention_mask) => (float[batch, seq, 2] y)"
    )
    first = model(folder / "first.onnx", signature + "{ y = Identity(x) }")
    return first, model(folder / "second.onnx", signature + "{" + body + "}")


def feed(x: list[list[list[float]]], mask: list[list[int]]) -> dict[str, np.ndarray]:
    return {"x": np.array(x, np.float32), "attention_mask": np.array(mask, np.int64)}


def measured(first: Path, second: Path, *batches: dict[str, np.ndarray]):
    return compare(load_model(first), load_model(second), batches, "test")


def test_verify_model_with_itself_is_exact(tiny: Path):
    report = verify(tiny, tiny)
    (output,) = report.outputs
    assert output.name == "last_hidden_state" and report.data == "random inputs"
    assert (output.max_abs_error, output.mean_abs_error, output.relative_error) == (0, 0, 0)
    assert (report.mean_cosine, report.min_cosine) == (1, 1)


def test_compare_errors_and_cosines_of_swapped_numbers(tmp_path: Path):
    # Swapping the two numbers of a token: (3, 4) -> (4, 3), cosine 24/25; (1, 0) -> (0, 1), 0.
    first, second = pair(tmp_path, "i = Constant<value_ints = [1, 0]>() y = Gather<axis = 2>(x, i)")
    (output,) = measured(first, second, feed([[[3, 4], [1, 0]]], [[1, 1]])).outputs
    assert output.max_abs_error == 1
    assert output.mean_abs_error == 1
    assert output.relative_error == pytest.approx((4 / 26) ** 0.5, abs=1e-12)
    assert output.mean_cosine == pytest.approx((24 / 25 + 0) / 2, abs=1e-12)
    assert output.min_cosine == pytest.approx(0, abs=1e-12)


def test_compare_weights_batches_by_tokens(tmp_path: Path):
    first, second = pair(tmp_path, "i = Constant<value_ints = [1, 0]>() y = Gather<axis = 2>(x, i)")
    report = measured(
        first, second, feed([[[1, 1], [1, 1], [1, 1]]], [[1, 1, 1]]), feed([[[1, 0]]], [[1]])
    )
    assert report.mean_cosine == pytest.approx(0.75, abs=1e-12)
    assert report.min_cosine == 0


def test_compare_ignores_padding(tmp_path: Path):
    # y = x * mask: wrong at padding only.
    first, second = pair(
        tmp_path,
        "a = Constant<value_ints = [2]>() m = Unsqueeze(attention_mask, a)"
        " f = Cast<to = 1>(m) y = Mul(x, f)",
    )
    batch = feed([[[3, 4], [5, 6]], [[1, 2], [7, 8]]], [[1, 1], [1, 0]])
    report = measured(first, second, batch)
    assert report.min_cosine == 1 and report.outputs[0].max_abs_error == 0
    batch["attention_mask"][1, 0] = 0
    batch["attention_mask"][1, 1] = 1  # on the left as on the right
    assert measured(first, second, batch).min_cosine == 1


def test_compare_ignores_padding_of_scalar_tokens(tmp_path: Path):
    signature = "(float[batch, seq] x, int64[batch, seq] attention_mask) => (float[batch, seq] y)"
    first = model(tmp_path / "a.onnx", signature + "{ y = Identity(x) }")
    second = model(
        tmp_path / "b.onnx", signature + "{ f = Cast<to = 1>(attention_mask) y = Mul(x, f) }"
    )
    batch = {"x": np.ones((2, 3), np.float32), "attention_mask": np.array([[1, 1, 0], [1, 1, 1]])}
    assert measured(first, second, batch).outputs[0].max_abs_error == 0
    assert measured(second, first, batch).outputs[0].mean_abs_error == 0


@pytest.mark.parametrize(
    ("body", "cosine"),
    [
        ("y = Neg(x)", -1.0),
        ("z = Constant<value_float = 0.0>() y = Mul(x, z)", 0.0),
        ("z = Constant<value_float = 2.0>() y = Mul(x, z)", 1.0),
        ("z = Constant<value_float = 0.0>() n = Div(z, z) y = Add(x, n)", 0.0),
    ],
    ids=["opposite", "zero", "twice", "nan"],
)
def test_compare_extreme_cosines(tmp_path: Path, body: str, cosine: float):
    report = measured(*pair(tmp_path, body), feed([[[3, 4], [1, 2]]], [[1, 1]]))
    assert report.mean_cosine == pytest.approx(cosine, abs=1e-12)
    assert json.loads(json.dumps(report.to_json(), allow_nan=False)), "JSON has no infinity"


def test_compare_equal_zeros_agree(tmp_path: Path):
    report = measured(*pair(tmp_path, "y = Neg(x)"), feed([[[0, 0]]], [[1]]))
    assert (report.mean_cosine, report.outputs[0].relative_error) == (1, 0)


def test_compare_equal_infinities_agree(tmp_path: Path):
    report = measured(*pair(tmp_path, "y = Add(x, x)"), feed([[[-np.inf, np.inf]]], [[1]]))
    (output,) = report.outputs
    assert (output.min_cosine, output.max_abs_error, output.not_finite_rows) == (1, 0, ())


def test_verify_uses_text_data(tiny: Path, sentences: Path):
    report = verify(tiny, tiny, data=sentences)
    assert (report.data, report.min_cosine) == ("sentences.txt", 1)


def test_fidelity_json_has_the_keys_of_the_contract(tiny: Path):
    content = verify(tiny, tiny).to_json()
    assert {"outputs", "mean_cosine", "min_cosine"} <= content.keys()
    assert list(content["outputs"][0]) == [
        "name", "max_abs_error", "mean_abs_error", "relative_error", "mean_cosine", "min_cosine",
    ]  # fmt: skip


# Models that do not belong together


@pytest.mark.parametrize(
    ("first", "second", "code", "values"),
    [
        ("(float[n] x) => (float[n] y) { y = Exp(x) }",
         "(float[n] x) => (float[n] z) { z = Exp(x) }", "signature", ["outputs: y against z"]),
        ("(float[n] x) => (float[n] y) { y = Exp(x) }",
         "(float[n] z) => (float[n] y) { y = Exp(z) }", "signature", ["inputs: x against z"]),
        ("(float[n, 3] x) => (float[n, m] y) { y = Exp(x) }",
         "(float[n, 3] x) => (float[n, m] y) { y = Concat<axis = 1>(x, x) }", "output_shape",
         [(1, 3), (1, 6)]),
    ],
    ids=["outputs", "inputs", "shape"],
)  # fmt: skip
def test_models_of_other_interfaces_are_refused(
    first: str, second: str, code: str, values: list[Any], tmp_path: Path
):
    with raises(InvalidModel, f"compare.{code}", *values):
        verify(model(tmp_path / "a.onnx", first), model(tmp_path / "b.onnx", second))


# Random inputs


def test_random_batches_are_reproducible_by_seed(tiny: Path):
    graph = load_model(tiny / "model.onnx")
    one, two, other = (random_batches(graph, seed) for seed in (7, 7, 8))
    assert [b["input_ids"].shape for b in one] == [(1, 4), (1, 8), (2, 16), (4, 32)]
    assert all((a["input_ids"] == b["input_ids"]).all() for a, b in zip(one, two, strict=True))
    assert any((a["input_ids"] != b["input_ids"]).any() for a, b in zip(one, other, strict=True))


def positions(path: Path, count: int) -> Path:
    """Adds a table of ``count`` positions to every row: longer rows cannot be run."""
    return model(
        path,
        f"""(float[batch, seq] x) => (float[batch, seq] y) <int64[1] zero = {{0}}> {{
            rows = Constant<value_ints = [{count}]>()
            table = ConstantOfShape(rows)
            length = Shape<start = 1>(x)
            used = Slice(table, zero, length)
            y = Add(x, used)
        }}""",
    )


@pytest.mark.parametrize(("count", "shapes"), [(32, 4), (31, 3), (9, 2), (4, 1)])
def test_random_batches_omit_shapes_longer_than_the_model(tmp_path: Path, count: int, shapes: int):
    path = positions(tmp_path / "m.onnx", count)
    assert len(random_batches(load_model(path))) == shapes
    assert verify(path, path).min_cosine == 1
    with raises(InvalidData, "session.inputs_refused"):
        verify(positions(tmp_path / "short.onnx", 2), tmp_path / "short.onnx")


def test_verify_measure_needs_data(tiny: Path):
    with raises(InvalidArgument, "compare.measure", "`data`"):
        verify(tiny, tiny, measure="r2")


AUDIO = """(float[batch, samples] x) => (float[batch, 1, frames] y) {
    one = Constant<value_ints = [1]>()
    window = Constant<value_ints = [1, 1, 400]>()
    kernel = ConstantOfShape<value = float[1] {1.0}>(window)
    channel = Unsqueeze(x, one)
    y = Conv<strides = [320]>(channel, kernel)
}"""
"""The convolution takes windows of 25 ms."""


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        *((f"(int64[{axes}] x) => (int64[{axes}] y) {{ y = Neg(x) }}", shape)
          for axes, shape in (("2, 8", (2, 8)), ("batch, 8", (1, 8)), ("3, seq", (3, 4)))),
        (AUDIO, (1, 1600)),
    ],
)  # fmt: skip
def test_random_batches_keep_fixed_axes_and_have_many_samples_of_audio(
    tmp_path: Path, text: str, shape: tuple[int, int]
):
    path = model(tmp_path / "m.onnx", text)
    assert random_batches(load_model(path))[0]["x"].shape == shape
    assert verify(path, path).min_cosine == 1


def test_verify_model_without_inputs(tmp_path: Path):
    path = model(
        tmp_path / "m.onnx", "() => (float[2] y) { y = Constant<value_floats = [1.0, 2.0]>() }"
    )
    assert verify(path, path).min_cosine == 1


def test_model_of_a_fixed_shape_is_compared_at_that_shape(tmp_path: Path):
    text = f"{HEADER} (int64[b, t] ids) => (float[b, t] y) {{ y = Cast<to = 1>(ids) }}"
    paths = [tmp_path / f"{name}.onnx" for name in ("any", "fixed", "int32")]
    for path, new in zip(
        paths, (text, text.replace("b, t", "1, 16"), text.replace("int64", "int32")), strict=True
    ):
        ir.save(ir.from_onnx_text(new), path)
    assert verify(paths[0], paths[1]).mean_cosine == pytest.approx(1)
    np.savez(tmp_path / "rows.npz", ids=np.arange(160).reshape(10, 16))
    assert verify(paths[0], paths[1], data=tmp_path / "rows.npz").mean_cosine == pytest.approx(1)
    with raises(InvalidModel, "compare.signature", "ids", "INT64", "INT32"):
        verify(paths[0], paths[2])


def test_columns_of_embeddings_are_no_tokens(tmp_path: Path):
    """They may be as many as tokens, whose padding is left out."""
    paths = []
    for name, factor in (("a", "{1, 1, 1, 1}"), ("b", "{1, 1, -1, 3}")):
        text = (
            f'<ir_version: 8, opset_import: ["" : 17]> g'
            " (float[b, t] x, int64[b, t] attention_mask) => (float[b, 4] embedding)"
            f" <float[4] w = {factor}, int64[1] one = {{1}}>"
            " { s = ReduceSum(x, one) embedding = Mul(s, w) }"
        )
        paths.append(tmp_path / f"{name}.onnx")
        ir.save(ir.from_onnx_text(text), paths[-1])
    found = []
    for length in (4, 5):
        mask = np.tile(np.arange(length) < 2, (40, 1)).astype(np.int64)
        arrays = {"x": np.ones((40, length), np.float32), "attention_mask": mask}
        arrays["x"][:, 0] = np.arange(40)
        np.savez(tmp_path / f"{length}.npz", **arrays)
        found.append(verify(*paths, data=tmp_path / f"{length}.npz").mean_cosine)
    assert found == [pytest.approx(4 / (4 * 12) ** 0.5)] * 2


def test_data_whose_masks_hide_every_token_is_refused(tmp_path: Path):
    first, second = pair(tmp_path, "y = Neg(x)")
    with raises(InvalidData, "compare.no_token", "masks"):
        measured(first, second, feed([[[3, 4], [1, 0]]], [[0, 0]]))


def test_padding_of_flattened_tokens_is_not_compared():
    x = np.arange(12.0).reshape(6, 2)
    changed = x.copy()
    changed[[2, 4, 5]] = np.nan
    tally = Tally(by_token=False)
    tally.add(x, changed, {"attention_mask": np.array([[1, 1, 0], [1, 0, 0]])})
    found = tally.result("y")
    assert found.max_abs_error == 0 and tally.tokens == 3


@pytest.mark.parametrize("broken", [np.nan, np.inf])
def test_tally_names_rows_that_are_not_finite_and_has_no_error_for_them(broken: float):
    x = np.arange(24.0).reshape(4, 3, 2)
    changed = x.copy()
    changed[1, 2], changed[3, 0, 1] = broken, broken
    tally = Tally()
    for part in (slice(0, 2), slice(2, 4)):
        tally.add(x[part], changed[part], {"mask": np.ones((2, 3), np.int64)})
    found = tally.result("y")
    assert (found.not_finite_rows, found.excluded_rows) == ((1, 3), ())
    assert (found.max_abs_error, found.mean_abs_error, found.relative_error) == (np.inf,) * 3
    assert found.to_json()["max_abs_error"] is None, "JSON has no infinity"
    assert found.min_cosine == 0 and found.mean_cosine == pytest.approx(10 / 12)
    assert "1, 3" in found.warnings()[0]


def test_tally_leaves_out_rows_that_are_nan_in_the_original():
    x = np.arange(24.0).reshape(4, 3, 2)
    x[2, 1] = np.nan
    tally = Tally()
    tally.add(x, np.where(np.isnan(x), 0, x), {"mask": np.ones((4, 3), np.int64)})
    found = tally.result("y")
    assert (found.not_finite_rows, found.excluded_rows) == ((), (2,))
    assert (found.max_abs_error, found.min_cosine) == (0, 1)
    assert found.to_json()["excluded_rows"] == [2]


def test_compare_original_without_finite_row_is_refused(tmp_path: Path):
    nan = "z = Constant<value_float = 0.0>() n = Div(z, z) y = Add(x, n)"
    first, _ = pair(tmp_path, nan)[::-1]
    with pytest.raises(InvalidData) as caught:
        measured(first, first, feed([[[3, 4], [1, 2]]], [[1, 1]]))
    assert caught.value.code == "compare.not_finite"


def test_compare_outputs_of_one_value_are_reported_once(tmp_path: Path):
    text = (
        "(float[batch, seq, 2] x, int64[batch, seq] attention_mask) => "
        "(float[batch, seq, 2] y, float[batch, seq, 2] again, float[batch, seq, 2] other)"
        "{ y = Neg(x) again = Identity(y) other = Abs(x) }"
    )
    path = model(tmp_path / "a.onnx", text)
    report = measured(path, path, feed([[[3, 4], [1, 2]]], [[1, 1]]))
    assert [output.names for output in report.outputs] == ["y = again", "other"]
    assert report.to_json()["outputs"][0]["same_outputs"] == ["again"]
