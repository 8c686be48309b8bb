"""Hugging Face model in, artifact out: what export promises, and what it refuses."""

from __future__ import annotations

import importlib
import json
import logging
import shutil
import sys
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from attnserve.checks.inspect import inspect
from attnserve.models.artifact import open_artifact
from attnserve.models.export import ExportReport, export
from attnserve.models.tokenizer import load_tokenizer
from attnserve.runtime.session import open_session
from graph_passes.errors import (
    AttnserveError,
    CheckFailed,
    InvalidArgument,
    InvalidModel,
    InvalidOutput,
    MissingExtra,
)
from tests.errors import raises

pytestmark = pytest.mark.export

if find_spec("torch") is None or find_spec("transformers") is None:
    pytest.skip("pip install 'attnserve[torch]'", allow_module_level=True)

SIX = [
    (attention, exporter, opset)
    for attention in ("sdpa", "eager")
    for exporter, opset in (("torchscript", 17), ("dynamo", 18), ("dynamo", 23))
]


@pytest.fixture
def source(tiny_bert: Callable[..., Path], tmp_path: Path) -> Path:
    """A tiny model that the test may change."""
    return Path(shutil.copytree(tiny_bert(), tmp_path / "source"))


def fast(model: Path | str, folder: Path, **options: Any) -> ExportReport:
    return export(str(model), folder, **{"exporter": "torchscript", **options})


def refused(model: Path | str, folder: Path, error: type[AttnserveError], match: str) -> None:
    """The text matches, it has at most three lines, and nothing was written."""
    with pytest.raises(error, match=match) as caught:
        fast(model, folder)
    assert len(str(caught.value).splitlines()) <= 3
    assert not folder.exists() or not any(folder.iterdir())


def write_json(path: Path, content: Any) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content), encoding="utf-8")


# --- what is written ----------------------------------------------------------------------------


@pytest.mark.parametrize(("attention", "exporter", "opset"), SIX)
def test_every_exporter_gives_named_dynamic_axes_at_the_opset_asked_for(
    attention: Any,
    exporter: Any,
    opset: int,
    tiny_bert: Callable[..., Path],
    tiny_export: Callable[..., Path],
    tmp_path: Path,
) -> None:
    import torch

    source = str(tiny_bert(initializer_range=0.3))
    export(source, tmp_path, attention=attention, exporter=exporter, opset=opset)
    artifact = open_artifact(tmp_path)
    model = onnx.load(artifact.model)
    onnx.checker.check_model(model, full_check=True)
    assert {entry.domain: entry.version for entry in model.opset_import}[""] == opset
    axes = {
        value.name: [axis.dim_param or axis.dim_value for axis in value.type.tensor_type.shape.dim]
        for value in [*model.graph.input, *model.graph.output]
    }
    assert axes == {
        "input_ids": ["batch", "sequence"],
        "attention_mask": ["batch", "sequence"],
        "token_type_ids": ["batch", "sequence"],
        "last_hidden_state": ["batch", "sequence", 32],
    }
    assert artifact.record["max_abs_error"] < 1e-5
    assert not any(
        tensor.data_location == onnx.TensorProto.EXTERNAL for tensor in model.graph.initializer
    )
    assert str(Path(torch.__file__).parent).encode() not in artifact.model.read_bytes()
    committed = tiny_export(attention, exporter, opset)
    assert read_alike(tmp_path, committed), "python -m tests.fixtures.make writes it anew"


def read_alike(one: Path, other: Path) -> bool:
    """Whether two models hold the same attention, under the same names and in the same idioms."""
    first, second = (inspect(path).to_json()["attention"] for path in (one, other))
    measured = {"max_abs_error": 0}
    return [block | measured for block in first] == [block | measured for block in second]


def test_the_graph_is_pytorchs_model_at_any_length(
    tiny_bert: Callable[..., Path], tmp_path: Path
) -> None:
    import torch
    import transformers

    folder = tiny_bert()
    session = open_session(export(str(folder), tmp_path).path)
    network = transformers.AutoModel.from_pretrained(folder).eval()
    rng = np.random.default_rng(1)
    for shape in ((1, 1), (1, 2), (5, 64)):
        ids = rng.integers(0, 128, shape)
        feed = {
            "input_ids": ids,
            "attention_mask": np.ones_like(ids),
            "token_type_ids": rng.integers(0, 2, shape),
        }
        with torch.no_grad():
            expected = network(**{name: torch.from_numpy(v) for name, v in feed.items()})
        (computed,) = session.run(None, feed)
        np.testing.assert_allclose(computed, expected.last_hidden_state.numpy(), atol=1e-5)


def test_the_folder_holds_model_tokenizer_and_record_and_nothing_else(
    source: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "new" / "out"
    report = fast(source, folder)
    assert {path.name for path in folder.iterdir()} == {
        "model.onnx", "tokenizer.json", "tokenizer_config.json", "config.json", "attnserve.json",
    }  # fmt: skip
    artifact = open_artifact(folder)
    assert (artifact.pooling, artifact.normalize, artifact.max_length) == ("mean", False, 64)
    record = artifact.record
    assert record["source"] == str(source)
    assert (record["task"], record["exporter"], record["opset"], record["attention"]) == (
        "feature-extraction", "torchscript", 17, "sdpa",
    )  # fmt: skip
    assert {"torch", "transformers"} <= record["versions"].keys()
    assert load_tokenizer(folder).pad_id == 0
    assert json.loads(json.dumps(report.to_json()))["path"] == str(folder / "model.onnx")


def test_the_same_model_exports_to_the_same_bytes(source: Path, tmp_path: Path) -> None:
    first, second = (fast(source, tmp_path / name).path for name in ("one", "two"))
    assert first.read_bytes() == second.read_bytes()


@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
def test_a_model_over_the_protobuf_limit_keeps_its_weights_beside_it(
    exporter: Any, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("attnserve.models.artifact.PROTOBUF_LIMIT_BYTES", 1000)
    report = export(str(source), tmp_path / "out", exporter=exporter)
    weights = tmp_path / "out" / "model.onnx.data"
    assert weights.stat().st_size > 50_000 > report.path.stat().st_size // 10
    open_session(report.path)


def test_exporting_is_silent(
    source: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        export(str(source), tmp_path / "dynamo")
        fast(source, tmp_path / "torchscript")
    assert capfd.readouterr() == ("", "")
    assert not caught
    assert logging.root.manager.disable == logging.NOTSET


# --- tasks and architectures --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("task", "cls", "outputs"),
    [
        ("sequence-classification", "BertForSequenceClassification", {"logits": (3, 4)}),
        ("token-classification", "BertForTokenClassification", {"logits": (3, 5, 4)}),
        ("fill-mask", "BertForMaskedLM", {"logits": (3, 5, 128)}),
        (
            "question-answering",
            "BertForQuestionAnswering",
            {"start_logits": (3, 5), "end_logits": (3, 5)},
        ),
    ],
)
def test_a_task_exports_its_head(
    task: str,
    cls: str,
    outputs: dict[str, tuple[int, ...]],
    tiny_bert: Callable[..., Path],
    tmp_path: Path,
) -> None:
    labels = {} if task in ("fill-mask", "question-answering") else {"num_labels": 4}
    report = fast(tiny_bert(cls, **labels), tmp_path, task=task)
    assert report.outputs == tuple(outputs)
    assert open_artifact(tmp_path).pooling == "none"
    ids = np.full((3, 5), 9)
    feed = {"input_ids": ids, "attention_mask": ids * 0 + 1, "token_type_ids": ids * 0}
    computed = open_session(report.path).run(None, feed)
    assert [array.shape for array in computed] == list(outputs.values())


def test_a_head_that_was_never_trained_is_refused(source: Path, tmp_path: Path) -> None:
    with raises(InvalidModel, "export.missing_weights", "'classifier.bias'"):
        fast(source, tmp_path / "out", task="sequence-classification")


@pytest.mark.parametrize(
    ("name", "sizes", "inputs", "max_length"),
    [
        (
            "RobertaConfig",
            {
                "vocab_size": 128, "hidden_size": 32, "num_hidden_layers": 1,
                "num_attention_heads": 4, "intermediate_size": 64,
                "max_position_embeddings": 50, "pad_token_id": 0,
            },
            ("input_ids", "attention_mask", "token_type_ids"),
            49,
        ),
        (
            "DistilBertConfig",
            {
                "vocab_size": 128, "dim": 32, "n_layers": 1, "n_heads": 4, "hidden_dim": 64,
                "max_position_embeddings": 20,
            },
            ("input_ids", "attention_mask"),
            20,
        ),
        (
            "GPT2Config",
            {
                "vocab_size": 128, "n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 40
            },
            ("input_ids", "attention_mask", "token_type_ids"),
            40,
        ),
    ],
    ids=["roberta", "distilbert", "gpt2"],
)  # fmt: skip
@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
def test_inputs_and_length_are_the_architectures(
    name: str,
    sizes: dict[str, int],
    inputs: tuple[str, ...],
    max_length: int,
    exporter: Any,
    source: Path,
    tmp_path: Path,
) -> None:
    import transformers

    (source / "model.safetensors").unlink()
    config = getattr(transformers, name)(**sizes)
    transformers.AutoModel.from_config(config).save_pretrained(source)
    report = fast(source, tmp_path / "out", exporter=exporter)
    assert report.inputs == inputs
    assert report.max_length == max_length


# --- pooling and length, as sentence-transformers wrote them ------------------------------------


def modules(source: Path, *names: str) -> None:
    kinds = [{"idx": 0, "path": "", "type": "sentence_transformers.models.Transformer"}]
    kinds += [
        {"idx": i, "path": f"{i}_{name}", "type": f"sentence_transformers.models.{name}"}
        for i, name in enumerate(names, start=1)
    ]
    write_json(source / "modules.json", kinds)


@pytest.mark.parametrize(
    ("config", "pooling"),
    [
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "cls"),
        ({"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}, "mean"),
        ({"pooling_mode": "mean"}, "mean"),
        ({"pooling_mode": ["cls"]}, "cls"),
    ],
)
@pytest.mark.parametrize("normalize", [True, False])
def test_pooling_is_read_from_the_folder(
    config: dict[str, Any], pooling: str, normalize: bool, source: Path, tmp_path: Path
) -> None:
    modules(source, "Pooling", *(["Normalize"] if normalize else []))
    write_json(source / "1_Pooling" / "config.json", config)
    report = fast(source, tmp_path / "out")
    assert (report.pooling, report.normalize) == (pooling, normalize)


@pytest.mark.parametrize(
    "config",
    [
        {"pooling_mode_max_tokens": True},
        {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True},
        {"pooling_mode": "lasttoken"},
        {"pooling_mode": ["mean", "max"]},
        {},
    ],
)
def test_pooling_that_an_artifact_cannot_say_is_refused(
    config: dict[str, Any], source: Path, tmp_path: Path
) -> None:
    modules(source, "Pooling")
    write_json(source / "1_Pooling" / "config.json", config)
    refused(source, tmp_path / "out", InvalidModel, "expected mean or cls")


def test_a_layer_after_the_encoder_is_refused(source: Path, tmp_path: Path) -> None:
    modules(source, "Pooling", "Dense")
    refused(source, tmp_path / "out", InvalidModel, "the module Dense is not supported")


@pytest.mark.parametrize("content", [{"a": 1}, ["x"], [{"type": "Pooling"}]])
def test_a_malformed_modules_file_is_refused(content: Any, source: Path, tmp_path: Path) -> None:
    write_json(source / "modules.json", content)
    refused(source, tmp_path / "out", InvalidModel, "modules.json: expected a list of modules")


@pytest.mark.parametrize(("stated", "length"), [(16, 16), (64, 64), (500, 64), (None, 64)])
def test_length_is_the_folders_and_at_most_the_positions(
    stated: int | None, length: int, source: Path, tmp_path: Path
) -> None:
    write_json(source / "sentence_bert_config.json", {"max_seq_length": stated})
    assert fast(source, tmp_path / "out").max_length == length


# --- refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "code", "value"),
    [
        ({"task": "translation"}, "export.choice", "`task` is 'translation'"),
        ({"exporter": "tf2onnx"}, "export.choice", "expected one of dynamo, torchscript"),
        ({"attention": "flash"}, "export.choice", "expected one of sdpa, eager"),
        ({"opset": 17, "exporter": "dynamo"}, "export.opset", "18 to 23"),
        ({"opset": 24, "exporter": "dynamo"}, "export.opset", 24),
        ({"opset": 21}, "export.opset", "14 to 20"),
        ({"opset": 0}, "export.opset", 0),
    ],
)
def test_an_option_without_such_a_value_is_refused(
    options: dict[str, Any], code: str, value: object, tmp_path: Path
) -> None:
    with raises(InvalidArgument, code, value):
        fast("anything", tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("model", ["nobody/no-such-model", "absent", "/absent/folder", "a/b/c"])
def test_offline_a_model_that_is_not_here_says_what_to_do(model: str, tmp_path: Path) -> None:
    match = r"no such folder, and not found(.|\n)*pass a local folder"
    refused(model, tmp_path / "out", InvalidModel, match)


@pytest.mark.parametrize(
    ("missing", "match"),
    [
        ("config.json", "has no config.json"),
        ("model.safetensors", "has no weights\nput model.safetensors into the folder"),
        ("tokenizer*", "has no tokenizer"),
    ],
)
def test_a_folder_that_lacks_something_is_refused(
    missing: str, match: str, source: Path, tmp_path: Path
) -> None:
    for path in source.glob(missing):
        path.unlink()
    refused(source, tmp_path / "out", InvalidModel, match)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
@pytest.mark.parametrize("content", [b"", b"{", b"\x80\x04 not what it says"])
def test_a_broken_file_is_refused(name: str, content: bytes, source: Path, tmp_path: Path) -> None:
    (source / name).write_bytes(content)
    refused(source, tmp_path / "out", InvalidModel, str(source))


def test_a_pickle_among_the_weights_is_never_run(source: Path, tmp_path: Path) -> None:
    import torch

    (source / "model.safetensors").unlink()
    torch.save({"x": _Hostile(tmp_path / "ran")}, source / "pytorch_model.bin")
    refused(source, tmp_path / "out", InvalidModel, "cannot load it")
    assert not (tmp_path / "ran").exists()


class _Hostile:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


def test_code_of_the_model_is_never_run(source: Path, tmp_path: Path) -> None:
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config["model_type"] = "homemade"
    config["auto_map"] = {"AutoConfig": "own.Config", "AutoModel": "own.Model"}
    write_json(source / "config.json", config)
    (source / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')", encoding="utf-8")
    refused(source, tmp_path / "out", InvalidModel, "custom Python code, which is never run")
    assert not (tmp_path / "ran").exists()


def test_what_does_not_read_tokens_alone_is_not_exported_yet(source: Path, tmp_path: Path) -> None:
    import transformers

    small = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4,
             "intermediate_size": 64}  # fmt: skip
    image = {"image_size": 32, "patch_size": 16, **small}
    for config, match in (
        (transformers.T5Config(d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4), "t5"),
        (transformers.ViTConfig(**image), "vit is not a text model"),
        (
            transformers.CLIPConfig(text_config=small, vision_config=image),
            "clip is not a text model",
        ),
    ):
        transformers.AutoModel.from_config(config).save_pretrained(source)
        refused(source, tmp_path / "out", InvalidArgument, match)


def test_a_difference_from_pytorch_leaves_nothing_behind(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The package offers a function of this name: ask for the module.
    monkeypatch.setattr(importlib.import_module("attnserve.models.export"), "TOLERANCE", 1e-12)
    refused(source, tmp_path / "out", CheckFailed, "ONNX Runtime and PyTorch differ by")


def test_weights_that_are_not_finite_are_refused(source: Path, tmp_path: Path) -> None:
    import torch
    import transformers

    network = transformers.AutoModel.from_pretrained(source)
    with torch.no_grad():
        network.encoder.layer[0].output.dense.weight[0, 0] = float("nan")
    network.save_pretrained(source)
    refused(source, tmp_path / "out", CheckFailed, "differ by nan")


def test_an_output_that_exists_needs_force_and_the_model_itself_is_never_one(
    source: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    fast(source, out)
    before = (out / "model.onnx").stat().st_mtime_ns
    with raises(InvalidOutput, "output.exists"):
        fast(source, out)
    assert (out / "model.onnx").stat().st_mtime_ns == before
    fast(source, out, force=True)
    assert (out / "model.onnx").stat().st_mtime_ns != before
    with raises(InvalidOutput, "output.is_input"):
        fast(source, source, force=True)


def test_without_torch_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with raises(MissingExtra, "extra.torch", "pip install 'attnserve[torch]'"):
        fast("anything", tmp_path / "out")


# --- the real model -----------------------------------------------------------------------------


@pytest.mark.parametrize(("attention", "exporter", "opset"), SIX)
def test_minilm_exports_six_ways(
    attention: str, exporter: str, opset: int, minilm_export: Callable[[str, str, int], Path]
) -> None:
    artifact = open_artifact(minilm_export(attention, exporter, opset))
    assert (artifact.pooling, artifact.normalize, artifact.max_length) == ("mean", True, 256)
    assert artifact.record["max_abs_error"] < 1e-4
