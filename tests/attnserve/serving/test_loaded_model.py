"""A loaded model: its inputs, the size of its outputs, and files that change."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import parser

from attnserve.models.artifact import open_artifact
from attnserve.runtime.interface import Session
from attnserve.serving import loaded_model
from attnserve.serving.backends import open_runner
from attnserve.serving.loaded_model import Model
from attnserve.serving.signature import Signature, Tensor
from graph_passes.errors import InvalidArgument, InvalidModel
from tests.errors import raises
from tests.files import write_json
from tests.service.tiny import write_encoder, write_model


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_encoder(tmp_path_factory.mktemp("models") / "tiny")


def load(path: Path) -> Model:
    return Model(open_artifact(path))


def tokens(*rows: list[int]) -> dict[str, np.ndarray]:
    ids = np.array(rows, dtype=np.int64)
    return {"input_ids": ids, "attention_mask": np.ones_like(ids)}


def test_model_unsupported_or_missing_is_refused(tmp_path: Path) -> None:
    text = """
    <ir_version: 10, opset_import: ["": 18]>
    words (string[n] x) => (string[n] y) { y = Identity(x) }
    """
    with raises(InvalidModel, "model.datatype", "'x' is a tensor(string)"):
        load(write_model(tmp_path / "words.onnx", text))
    with raises(InvalidModel, "artifact.missing", "nothing.onnx"):
        load(tmp_path / "nothing.onnx")


@pytest.mark.parametrize("tokenizer", [True, False])
@pytest.mark.parametrize(
    ("axes", "wrong"),
    [
        ({"input_ids": ("N", "N"), "attention_mask": ("N", "N")}, "N"),
        ({"input_ids": ("batch", "batch"), "attention_mask": ("batch", "s")}, "batch"),
        ({"input_ids": ("a", "b"), "attention_mask": ("b", "a")}, "b"),
        ({"input_ids": ("a", "b"), "attention_mask": ("a", "b")}, None),
        ({"input_ids": ("a", "b"), "attention_mask": ("c", "d")}, None),
        ({"input_ids": (3, 5), "attention_mask": ("a", 5)}, None),
    ],
)
def test_model_one_name_for_rows_and_tokens_is_refused(
    tmp_path: Path, axes: dict[str, tuple[str | int, ...]], wrong: str | None, tokenizer: bool
) -> None:
    folder = write_encoder(tmp_path / "m", tokenizer=tokenizer)
    graph = onnx.load(folder / "model.onnx")
    for value in graph.graph.input:
        for dim, axis in zip(value.type.tensor_type.shape.dim, axes[value.name], strict=True):
            dim.Clear()
            if isinstance(axis, str):
                dim.dim_param = axis
            else:
                dim.dim_value = axis
    graph.graph.output[0].type.tensor_type.ClearField("shape")
    graph.graph.output[1].type.tensor_type.ClearField("shape")
    onnx.save(graph, folder / "model.onnx")
    if wrong is None:
        load(folder).close()
        return
    with raises(InvalidModel, "model.axis_name", f"axis '{wrong}'"):
        load(folder)


def test_model_one_name_for_tokens_and_cached_tokens_is_refused_with_texts(tmp_path: Path) -> None:
    """The cache of a text is empty."""
    text = """
    <ir_version: 10, opset_import: ["": 18]>
    decoder (int64[b, s] input_ids, float[b, 2, s, 4] past_0_key)
      => (float[b, s] logits, float[b, 2, s, 4] present)
    { logits = Cast <to = 1> (input_ids) present = Identity(past_0_key) }
    """
    for tokenizer in (True, False):
        folder = write_encoder(tmp_path / f"m{tokenizer}", tokenizer=tokenizer)
        graph = parser.parse_model(text)
        graph.graph.input[1].name = graph.graph.node[1].input[0] = "past_key_values.0.key"
        onnx.save(graph, folder / "model.onnx")
        if not tokenizer:
            load(folder).close()
            continue
        with raises(InvalidModel, "model.axis_name", "axis 's' counts tokens"):
            load(folder)


def test_texts_are_padded_or_truncated_to_a_fixed_length(tmp_path: Path) -> None:
    folder = write_encoder(tmp_path / "m")
    graph = onnx.load(folder / "model.onnx")
    for value in graph.graph.input:
        value.type.tensor_type.shape.dim[1].dim_value = 6
    onnx.save(graph, folder / "model.onnx")
    model, free = load(folder), load(write_encoder(tmp_path / "free"))
    assert (model.fixed_tokens, free.fixed_tokens) == (6, None)
    shapes = model.text_shapes(model.encode(["a b"])[0])
    assert shapes == {"input_ids": (1, 6), "attention_mask": (1, 6)}
    texts = ["a b", "a b c d a b c d"]
    vectors = model.vectors("embed", *_run(model, texts))
    assert vectors.shape == (2, 4)
    expected = free.vectors("embed", *_run(free, ["a b"]))
    np.testing.assert_allclose(vectors[:1], expected, atol=1e-6)
    for each in (model, free):
        each.close()


def test_sessions_pad_within_the_table_of_positions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_encoder(tmp_path / "m")
    write_json(folder / "attnserve.json", {"max_length": 500})
    write_json(folder / "config.json", {"max_position_embeddings": 6})
    lengths: list[int | None] = []

    def record(*arguments: Any, longest: int | None, **options: Any) -> Session:
        lengths.append(longest)
        return open_runner(*arguments, longest=longest, **options)

    monkeypatch.setattr(loaded_model, "open_runner", record)
    load(folder).close()
    assert lengths == [6]


def test_a_length_that_no_text_fits_is_ignored(tmp_path: Path) -> None:
    """Tensors can still be sent."""
    folder = write_encoder(tmp_path / "m")
    graph = onnx.load(folder / "model.onnx")
    for value in graph.graph.input:
        value.type.tensor_type.shape.dim[1].dim_value = 1
    onnx.save(graph, folder / "model.onnx")
    model = load(folder)
    assert model.run(tokens([4]))["last_hidden_state"].shape == (1, 1, 4)
    assert model.fixed_tokens is None
    model.close()


def test_model_whose_record_names_a_missing_output_can_do_no_task(tmp_path: Path) -> None:
    model = load(write_encoder(tmp_path / "m", output="scores"))
    assert not model.can("classify") and not model.can("embed")
    with raises(InvalidArgument, "text.output", "scores"):
        _ = model.tasks
    model.close()


def _run(model: Model, texts: list[str]) -> tuple[dict[str, np.ndarray], np.ndarray]:
    inputs = model.text_inputs(model.encode(texts))
    name = model.text_output("embed")
    return inputs, model.run(inputs, [name])[name]


def test_plan_id_is_computed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan may have megabytes, and every answer has the checksum in its headers."""
    plan = {"layers": [1, 2]}
    model = Model(
        open_artifact(write_encoder(tmp_path / "m", lineage=[{"rewrite": "x", "plan": plan}]))
    )
    first = model.artifact.plan_id
    assert first is not None
    monkeypatch.setattr(json, "dumps", lambda *_, **__: 1 / 0)
    assert model.artifact.plan_id == first
    model.close()


def test_output_bytes_counts_axes_of_unknown_size_as_one() -> None:
    single = np.dtype(np.float32)
    inputs = (Tensor("x", single, ("batch", None)), Tensor("y", single, (None, "width")))
    outputs = (
        Tensor("a", single, ("batch", "width", 7)),
        Tensor("b", single, (None, 3)),
        Tensor("c", np.dtype(np.float64), ("batch", "other")),
    )
    signature = Signature("m", inputs, outputs, {})
    shapes = {"x": (5, 11), "y": (11, 13)}
    assert [signature.output_bytes(shapes, [name]) for name in "abc"] == [5 * 13 * 7 * 4, 12, 40]
    assert signature.output_bytes(shapes, ["b", "c"]) == 52


def test_model_without_glibc_is_closed(encoder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ctypes.CDLL(None) raises TypeError on Windows."""

    def refuse(name: object) -> None:
        raise TypeError("argument of type 'NoneType' is not iterable")

    monkeypatch.setattr("attnserve.runtime.memory_use.ctypes.CDLL", refuse)
    Model(open_artifact(encoder)).close()


@pytest.mark.parametrize("location", ["weights.bin", "./weights.bin"])
def test_model_external_data_changed_in_place_keeps_answers(tmp_path: Path, location: str) -> None:
    """ONNX Runtime would map the file; truncating it would end this process."""
    folder = write_encoder(tmp_path / "m")
    proto = onnx.load(folder / "model.onnx")
    onnx.save(
        proto,
        folder / "model.onnx",
        save_as_external_data=True,
        location="weights.bin",
        size_threshold=0,
    )
    proto = onnx.load(folder / "model.onnx", load_external_data=False)
    for tensor in proto.graph.initializer:
        next(each for each in tensor.external_data if each.key == "location").value = location
    (folder / "model.onnx").write_bytes(proto.SerializeToString())
    model = Model(open_artifact(folder))
    inputs = tokens([2, 4, 5, 3])
    before = model.run(inputs)
    data = folder / "weights.bin"
    with data.open("r+b") as file:
        file.write(bytes(data.stat().st_size))
    after = model.run(inputs)
    assert all(np.array_equal(after[name], array) for name, array in before.items())
    model.close()
