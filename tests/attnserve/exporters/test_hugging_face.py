"""Export of Hugging Face models to artifacts: graphs, records, pooling and refusals."""

from __future__ import annotations

import json
import logging
import shutil
import sys
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from attnserve import __version__
from attnserve.checks.inspect import inspect
from attnserve.exporters.hugging_face import ExportReport, export
from attnserve.models.artifact import open_artifact
from attnserve.models.checksums import sha256
from attnserve.models.embeddings import run_texts
from attnserve.models.tokenizer_files import load_encoder
from attnserve.runtime.session import open_session
from graph_passes.errors import (
    AttnserveError,
    CheckFailed,
    InvalidArgument,
    InvalidModel,
    InvalidOutput,
    MissingExtra,
)
from tests.architectures import MINILM_EXPORTS
from tests.attnserve.models.files import encoder_of
from tests.errors import raises
from tests.files import write_json

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


def refused(
    model: Path | str, folder: Path, error: type[AttnserveError], code: str, *values: str
) -> None:
    """Expect an error of at most three lines and no output."""
    with raises(error, code, *values) as caught:
        fast(model, folder)
    assert len(str(caught.value).splitlines()) <= 3
    assert not folder.exists() or not any(folder.iterdir())


# --- output -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("attention", "exporter", "opset"), SIX)
def test_export_has_dynamic_axes_and_the_requested_opset(
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
    assert artifact.record.stated["max_abs_error"] < 1e-5
    assert not any(
        tensor.data_location == onnx.TensorProto.EXTERNAL for tensor in model.graph.initializer
    )
    assert str(Path(torch.__file__).parent).encode() not in artifact.model.read_bytes()
    committed = tiny_export(attention, exporter, opset)
    assert read_alike(tmp_path, committed), "python -m tests.fixtures.make writes it anew"


def read_alike(one: Path, other: Path) -> bool:
    """Whether two models have the same attention blocks, with equal names and idioms."""
    first, second = (inspect(path).to_json()["attention"] for path in (one, other))
    measured = {"max_abs_error": 0}
    return [block | measured for block in first] == [block | measured for block in second]


def test_export_equals_pytorch_at_any_length(
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


def test_export_folder_and_record_are_complete_and_reproducible(
    source: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "new" / "out"
    report = fast(source, folder)
    assert {path.name for path in folder.iterdir()} == {
        "model.onnx", "tokenizer.json", "tokenizer_config.json", "config.json", "attnserve.json",
        "README.md", "modules.json", "config_sentence_transformers.json",
        "sentence_bert_config.json", "1_Pooling",
    }  # fmt: skip
    artifact = open_artifact(folder)
    assert (artifact.pooling, artifact.normalize, artifact.max_length) == ("mean", False, 64)
    record = artifact.record.stated
    assert record["source"] == str(source)
    assert (record["task"], record["exporter"], record["opset"], record["attention"]) == (
        "feature-extraction", "torchscript", 17, "sdpa",
    )  # fmt: skip
    assert {"torch", "transformers"} <= record["versions"].keys()
    assert encoder_of(folder).pad_id == 0
    assert json.loads(json.dumps(report.to_json()))["path"] == str(folder / "model.onnx")
    again, other = (fast(source, tmp_path / str(seed), seed=seed) for seed in (0, 1))
    assert again.path.read_bytes() == other.path.read_bytes() == report.path.read_bytes()
    assert again.relative_error == report.relative_error != other.relative_error


def test_export_metadata_names_version_and_weights(source: Path, tmp_path: Path) -> None:
    made = onnx.load(fast(source, tmp_path / "out").path).metadata_props
    assert {one.key: one.value for one in made if one.key.startswith("attnserve.")} == {
        "attnserve.version": __version__,
        "attnserve.parent_sha256": sha256(source / "model.safetensors"),
    }


def test_export_names_a_tokenizer_class_that_transformers_4_knows(
    source: Path, tmp_path: Path
) -> None:
    path = source / "tokenizer_config.json"
    write_json(path, json.loads(path.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"})
    fast(source, tmp_path / "out")
    written = json.loads((tmp_path / "out" / path.name).read_text())
    assert written["tokenizer_class"] == "PreTrainedTokenizerFast"


@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
def test_export_above_protobuf_limit_writes_external_data(
    exporter: Any, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("attnserve.models.onnx_files.PROTOBUF_LIMIT_BYTES", 1000)
    report = export(str(source), tmp_path / "out", exporter=exporter)
    weights = tmp_path / "out" / "model.onnx.data"
    assert weights.stat().st_size > 50_000 > report.path.stat().st_size // 10
    open_session(report.path)


@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
def test_export_prints_and_warns_nothing(
    exporter: Any, source: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        export(str(source), tmp_path / "out", exporter=exporter)
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
def test_export_task_has_its_outputs(
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


def test_export_untrained_head_is_refused(source: Path, tmp_path: Path) -> None:
    with raises(InvalidModel, "export.missing_weights", "'classifier.bias'"):
        fast(source, tmp_path / "out", task="sequence-classification")


ENCODER = {
    "vocab_size": 128, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4,
    "intermediate_size": 64, "max_position_embeddings": 50, "pad_token_id": 0,
}  # fmt: skip
DISTIL = {
    "vocab_size": 128, "dim": 32, "n_layers": 1, "n_heads": 4, "hidden_dim": 64,
    "max_position_embeddings": 20,
}  # fmt: skip
GPT2 = {"vocab_size": 128, "n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 40}
THREE = ("input_ids", "attention_mask", "token_type_ids")


@pytest.mark.parametrize(
    ("name", "sizes", "inputs", "max_length"),
    [
        ("RobertaConfig", ENCODER, THREE, 49),
        ("DistilBertConfig", DISTIL, THREE[:2], 20),
        ("GPT2Config", GPT2, THREE, 40),
    ],
    ids=["roberta", "distilbert", "gpt2"],
)
@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
def test_export_inputs_and_max_length_of_architectures(
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
    assert report.record.max_length == max_length


@pytest.mark.parametrize("length", [30, 31])
def test_dynamic_rope_is_traced_for_lengths_with_equal_frequencies(
    length: int, source: Path, tmp_path: Path
) -> None:
    import transformers

    (source / "model.safetensors").unlink()
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    config = transformers.Qwen3Config(
        **ENCODER | {"max_position_embeddings": 30},
        head_dim=8,
        num_key_value_heads=1,
        rope_scaling=rope,
    )
    transformers.AutoModel.from_config(config).save_pretrained(source)
    write_json(source / "sentence_bert_config.json", {"max_seq_length": length})
    if length > 30:
        refused(source, tmp_path / "out", InvalidModel, "export.dynamic_rope", "above 30 tokens")
    else:
        assert fast(source, tmp_path / "out").record.max_length == 30


# --- pooling and length of sentence-transformers ------------------------------------------------


def modules(source: Path, *names: str) -> None:
    kinds = [{"idx": 0, "path": "", "type": "sentence_transformers.models.Transformer"}]
    kinds += [
        {"idx": i, "path": f"{i}_{name}", "type": f"sentence_transformers.models.{name}"}
        for i, name in enumerate(names, start=1)
    ]
    write_json(source / "modules.json", kinds)


@pytest.mark.parametrize(
    "config",
    [
        {"pooling_mode_max_tokens": True},
        {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True},
        {"pooling_mode": "weightedmean"},
        {"pooling_mode": ["mean", "max", "lasttoken"]},
    ],
)
@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
def test_export_other_pooling_is_part_of_the_graph(
    config: dict[str, Any], exporter: Any, source: Path, tmp_path: Path
) -> None:
    """Its vectors are those of sentence-transformers: see tests/service/test_hub_folders.py."""
    modules(source, "Pooling")
    write_json(source / "1_Pooling" / "config.json", config)
    report = fast(source, tmp_path / "out", exporter=exporter)
    assert (report.record.pooling, report.outputs) == ("none", ("sentence_embedding",))


def test_export_reads_a_network_in_a_folder_of_its_own(source: Path, tmp_path: Path) -> None:
    """Older folders have the network in 0_Transformer."""
    inner = source / "0_Transformer"
    inner.mkdir()
    for path in [one for one in source.iterdir() if one.is_file()]:
        path.rename(inner / path.name)
    write_json(inner / "sentence_bert_config.json", {"max_seq_length": 11, "do_lower_case": True})
    entries = [{"path": "0_Transformer", "type": "sentence_transformers.models.Transformer"},
               {"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}]  # fmt: skip
    write_json(source / "modules.json", entries)
    write_json(source / "1_Pooling" / "config.json", {"pooling_mode": "cls"})
    report = fast(source, tmp_path / "out", dimensions=20)
    artifact = open_artifact(tmp_path / "out")
    record = artifact.record
    assert report.record == record
    assert (record.pooling, record.max_length, record.lower_case) == ("cls", 11, True)
    assert artifact.dimensions == 20


def test_export_module_after_pooling_is_refused(source: Path, tmp_path: Path) -> None:
    modules(source, "Pooling", "LSTM")
    write_json(source / "1_Pooling" / "config.json", {"pooling_mode": "mean"})
    refused(source, tmp_path / "out", InvalidModel, "export.module", "LSTM")


SMALL = {
    "vocab_size": 128, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 64, "max_position_embeddings": 66, "pad_token_id": 0,
}  # fmt: skip
QWEN = {**SMALL, "num_key_value_heads": 2, "head_dim": 8}
TEXTS = ["red cat", "a dog and the big house by the sea", "sea", "the cat sat"]


def save_random(config: str, auto: str, sizes: dict[str, Any], source: Path) -> Any:
    """Replace the weights of ``source`` by a random network; return it."""
    import torch
    import transformers

    torch.manual_seed(0)
    made = getattr(transformers, config)(**sizes)
    network = getattr(transformers, auto).from_config(made).eval()
    with torch.no_grad():  # initial weights give vectors that are all alike
        for key, weight in network.named_parameters():
            if not key.endswith("bias") and weight.ndim == 2:
                weight.copy_(0.3 * torch.randn(weight.shape))
    for path in source.glob("*.safetensors"):
        path.unlink()
    network.save_pretrained(source)
    return network


def test_export_dimensions_beyond_the_width_or_of_a_classifier_are_refused(
    source: Path, tmp_path: Path
) -> None:
    for options, value in (({"dimensions": 33}, 32), ({"dimensions": 0}, 0),
                           ({"dimensions": 8, "task": "rerank"}, "rerank")):  # fmt: skip
        with raises(InvalidArgument, "export.dimensions", value):
            fast(source, tmp_path / "out", **options)


# --- rerankers and language models --------------------------------------------------------------


@pytest.mark.parametrize("config", ["BertConfig", "XLMRobertaConfig", "ModernBertConfig"])
def test_export_reranker_scores_pairs_like_pytorch(
    config: str, source: Path, tmp_path: Path
) -> None:
    import torch
    import transformers

    auto = "AutoModelForSequenceClassification"
    network = save_random(config, auto, {**SMALL, "num_labels": 1}, source)
    report = fast(source, tmp_path / "out", task="rerank")
    assert open_artifact(report.path).record.task == "rerank"
    pairs = [("the red cat", text) for text in TEXTS]
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    inputs = tokenizer(*map(list, zip(*pairs, strict=True)), padding=True, return_tensors="pt")
    accepted = signature(network.forward).parameters
    with torch.no_grad():
        logits = network(**{n: x for n, x in inputs.items() if n in accepted}).logits.numpy()
    encoder = encoder_of(tmp_path / "out")
    scores = np.empty((len(pairs), 1))
    for indices, output, _ in run_texts(open_session(report.path), encoder, encoder.encode(pairs)):
        scores[indices] = output
    np.testing.assert_allclose(scores, logits, atol=2e-5)
    assert np.ptp(scores) > 1e-3


CHAT = """{% set of = messages | selectattr("role", "eq", "system") | list -%}
{{ of[0].content if of else "relevant" }}: {% for one in messages if one.role != "system" -%}
{{ one.role }} {{ one.content }} {% endfor %}yes or no"""
STATED = "relevant: query {query} document {document} yes or no"
PROMPTED = "the cat: query {query} document {document} yes or no"
LONG = {**QWEN, "max_position_embeddings": 500}
ONE_CLASS = {"num_labels": 1}


def answering(source: Path, chat: str | None) -> Any:
    """Save a tokenizer with the tokens yes and no and this chat template; return it."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    tokenizer.add_tokens(["yes", "no"])
    tokenizer.model_max_length, tokenizer.chat_template = 400, chat
    tokenizer.save_pretrained(source)
    return tokenizer


@pytest.mark.parametrize(
    ("chat", "prompts", "score", "template"),
    [
        (None, None, None, "<Query>: {query}\n<Document>: {document}<|im_end|>\n"),
        (CHAT, None, None, STATED),
        (CHAT, {"own": "the cat"}, (7, 9), PROMPTED),
        (CHAT, None, (7, None), STATED),
    ],
    ids=["default", "chat template", "prompt and tokens", "one token"],
)
def test_export_language_model_reranker_scores_pairs_like_pytorch(
    chat: str | None, prompts: Any, score: Any, template: str, source: Path, tmp_path: Path
) -> None:
    import torch

    network = save_random("Qwen3Config", "AutoModelForCausalLM", LONG, source)
    tokenizer = answering(source, chat)
    if prompts:
        config = {"prompts": prompts, "default_prompt_name": "own", "activation_fn":
                  "torch.nn.modules.linear.Identity"}  # fmt: skip
        write_json(source / "config_sentence_transformers.json", config)
    if score:
        modules(source, "LogitScore")
        ids = dict(zip(("true_token_id", "false_token_id"), score, strict=True))
        write_json(source / "1_LogitScore" / "config.json", ids)
    report = fast(source, tmp_path / "out", task="rerank")
    artifact = open_artifact(report.path)
    made = artifact.record.template
    assert made is not None and template in made
    assert artifact.activation == ("identity" if prompts else None)
    assert report.outputs == ("logits",)
    true, false = score or (len(tokenizer) - 2, len(tokenizer) - 1)
    expected: list[float] = []
    for text in TEXTS:
        filled = made.replace("{query}", "red cat").replace("{document}", text)
        inputs = tokenizer(filled, add_special_tokens=False, return_tensors="pt")
        with torch.no_grad():
            logits = network(inputs["input_ids"]).logits[0, -1]
        expected.append(float(logits[true] - (0 if false is None else logits[false])))
    encoder = load_encoder(artifact)
    encodings = encoder.encode([("red cat", text) for text in TEXTS])
    scores = np.empty(len(TEXTS))
    for indices, output, _ in run_texts(open_session(report.path), encoder, encodings):
        scores[indices] = output[:, 0]
    np.testing.assert_allclose(scores, expected, atol=1e-4)
    assert np.ptp(scores) > 1e-3


def test_export_reranker_writes_pairs_by_the_chat_template(source: Path, tmp_path: Path) -> None:
    CrossEncoder = pytest.importorskip("sentence_transformers").CrossEncoder
    save_random("Qwen3Config", "AutoModelForSequenceClassification", LONG | ONE_CLASS, source)
    answering(source, CHAT)
    library = CrossEncoder(str(source), device="cpu", local_files_only=True)
    expected = library.predict([("red cat", text) for text in TEXTS])
    library.save(str(tmp_path / "saved"), create_model_card=False)
    for folder in (source, tmp_path / "saved"):
        report = fast(folder, tmp_path / "out", task="rerank", force=True)
        artifact = open_artifact(report.path)
        assert artifact.record.template == STATED
        encoder = load_encoder(artifact)
        scores = np.empty(len(TEXTS))
        encodings = encoder.encode([("red cat", text) for text in TEXTS])
        for indices, output, _ in run_texts(open_session(report.path), encoder, encodings):
            scores[indices] = output[:, 0]
        np.testing.assert_allclose(1 / (1 + np.exp(-scores)), expected, atol=1e-5)
    with raises(InvalidModel, "export.no_template", "chat template"):
        fast(tmp_path / "saved", tmp_path / "other", task="sequence-classification")
    with raises(InvalidModel, "export.cross_encoder", "CrossEncoder"):
        fast(tmp_path / "saved", tmp_path / "other")


def test_export_language_model_reranker_of_plain_texts_joins_pairs_by_the_tokenizer(
    source: Path, tmp_path: Path
) -> None:
    save_random("Qwen3Config", "AutoModelForCausalLM", LONG, source)
    answering(source, CHAT)
    modules(source, "LogitScore")
    write_json(source / "1_LogitScore" / "config.json", {"true_token_id": 7, "false_token_id": 9})
    text = {"text": {"method": "forward", "method_output_name": "logits"}}
    stated = {"transformer_task": "text-generation", "modality_config": text}
    write_json(source / "sentence_bert_config.json", stated)
    report = fast(source, tmp_path / "out", task="rerank")
    assert open_artifact(report.path).record.template is None


def test_export_pooler_of_the_network_is_refused(source: Path, tmp_path: Path) -> None:
    modules(source)
    output = {"method": "forward", "method_output_name": "pooler_output"}
    stated = {"modality_config": {"text": output}, "module_output_name": "sentence_embedding"}
    write_json(source / "sentence_bert_config.json", stated)
    with raises(InvalidModel, "export.config", "module_output_name"):
        fast(source, tmp_path / "out")


def test_export_adapter_without_peft_is_refused(source: Path, tmp_path: Path) -> None:
    write_json(source / "adapter_config.json", {})
    with raises(InvalidModel, "export.adapter", "peft"):
        fast(source, tmp_path / "out")


def test_export_language_model_reranker_without_tokens_or_template_is_refused(
    source: Path, tmp_path: Path
) -> None:
    save_random("Qwen3Config", "AutoModelForCausalLM", LONG, source)
    with raises(InvalidModel, "export.answer_tokens", "'yes' and 'no'"):
        fast(source, tmp_path / "out", task="rerank")
    answering(source, chat=None)
    save_random("LlamaConfig", "AutoModelForCausalLM", LONG, source)
    with raises(InvalidModel, "export.no_template", "chat_template.jinja"):
        fast(source, tmp_path / "out", task="rerank")
    capped = {**LONG, "final_logit_softcapping": 3.0}
    save_random("Gemma2Config", "AutoModelForCausalLM", capped, source)
    answering(source, CHAT)
    with raises(InvalidModel, "export.not_linear", "gemma2"):
        fast(source, tmp_path / "out", task="rerank", attention="eager")


@pytest.mark.parametrize(
    ("problem", "activation"), [("multi_label_classification", "sigmoid"), (None, None)]
)
def test_export_classifier_activation_is_that_of_its_problem(
    problem: str | None, activation: str | None, tiny_bert: Callable[..., Path], tmp_path: Path
) -> None:
    folder = tiny_bert("BertForSequenceClassification", num_labels=3, problem_type=problem)
    fast(folder, tmp_path / "out", task="sequence-classification")
    assert open_artifact(tmp_path / "out").activation == activation


def test_export_classifier_of_several_classes_is_no_reranker(
    tiny_bert: Callable[..., Path], tmp_path: Path
) -> None:
    folder = tiny_bert("BertForSequenceClassification", num_labels=4)
    with raises(InvalidArgument, "export.not_reranker", 4):
        fast(folder, tmp_path / "out", task="rerank")


def test_export_language_model_has_logits_like_pytorch(source: Path, tmp_path: Path) -> None:
    import torch

    network = save_random("Qwen3Config", "AutoModelForCausalLM", QWEN, source)
    session = open_session(fast(source, tmp_path / "out", task="text-generation").path)
    ids = np.random.default_rng(0).integers(1, 128, (2, 9))
    with torch.no_grad():
        expected = network(torch.from_numpy(ids)).logits.numpy()
    (computed,) = session.run(None, {"input_ids": ids, "attention_mask": np.ones_like(ids)})
    np.testing.assert_allclose(computed, expected, atol=1e-4)


@pytest.mark.parametrize(("stated", "length"), [(16, 16), (64, 64), (500, 64), (None, 64)])
def test_export_max_length_is_stated_and_at_most_the_positions(
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
        ({"seed": -1}, "run.range", "`seed` is -1"),
    ],
)
def test_export_invalid_option_is_refused(
    options: dict[str, Any], code: str, value: object, tmp_path: Path
) -> None:
    with raises(InvalidArgument, code, value):
        fast("anything", tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("model", ["nobody/no-such-model", "absent", "/absent/folder", "a/b/c"])
def test_export_offline_unknown_model_is_refused(model: str, tmp_path: Path) -> None:
    refused(model, tmp_path / "out", InvalidModel, "export.not_found", model, "local folder")


@pytest.mark.parametrize(
    ("missing", "code"),
    [
        ("config.json", "export.no_config"),
        ("model.safetensors", "export.no_weights"),
        ("tokenizer*", "export.no_tokenizer"),
    ],
)
def test_export_incomplete_folder_is_refused(
    missing: str, code: str, source: Path, tmp_path: Path
) -> None:
    for path in source.glob(missing):
        path.unlink()
    refused(source, tmp_path / "out", InvalidModel, code)


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("config.json", "export.load"),
        ("model.safetensors", "export.load"),
        ("tokenizer.json", "export.tokenizer"),
    ],
)
@pytest.mark.parametrize("content", [b"", b"{", b"\x80\x04 not a valid file"])
def test_export_damaged_file_is_refused(
    name: str, code: str, content: bytes, source: Path, tmp_path: Path
) -> None:
    (source / name).write_bytes(content)
    refused(source, tmp_path / "out", InvalidModel, code, str(source))


def test_export_pickled_weights_are_never_loaded(source: Path, tmp_path: Path) -> None:
    import torch

    (source / "model.safetensors").unlink()
    torch.save({"x": _Hostile(tmp_path / "ran")}, source / "pytorch_model.bin")
    refused(source, tmp_path / "out", InvalidModel, "export.load")
    assert not (tmp_path / "ran").exists()


class _Hostile:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


def test_export_remote_code_is_never_run(source: Path, tmp_path: Path) -> None:
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config["model_type"] = "homemade"
    config["auto_map"] = {"AutoConfig": "own.Config", "AutoModel": "own.Model"}
    write_json(source / "config.json", config)
    (source / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')", encoding="utf-8")
    refused(source, tmp_path / "out", InvalidModel, "export.remote_code")
    assert not (tmp_path / "ran").exists()


def test_export_encoder_decoder_and_image_models_are_refused(source: Path, tmp_path: Path) -> None:
    import transformers

    small = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4,
             "intermediate_size": 64}  # fmt: skip
    image = {"image_size": 32, "patch_size": 16, **small}
    t5 = transformers.T5Config(d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4)
    clip = transformers.CLIPConfig(text_config=small, vision_config=image)
    for config, code, name in (
        (t5, "export.encoder_decoder", "t5"),
        (transformers.ViTConfig(**image), "export.not_text", "vit"),
        (clip, "export.not_text", "clip"),
    ):
        transformers.AutoModel.from_config(config).save_pretrained(source)
        refused(source, tmp_path / "out", InvalidArgument, code, name)


def test_export_difference_from_pytorch_is_refused(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("attnserve.exporters.torch_graph.TOLERANCE", 1e-12)
    refused(source, tmp_path / "out", CheckFailed, "export.differs")


def test_export_nan_weights_are_refused(source: Path, tmp_path: Path) -> None:
    import torch
    import transformers

    network = transformers.AutoModel.from_pretrained(source)
    with torch.no_grad():
        network.encoder.layer[0].output.dense.weight[0, 0] = float("nan")
    network.save_pretrained(source)
    refused(source, tmp_path / "out", CheckFailed, "export.differs", "nan")


def test_export_existing_output_needs_force_and_input_is_refused(
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


def test_export_without_torch_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with raises(MissingExtra, "extra.torch", "pip install 'attnserve[torch]'"):
        fast("anything", tmp_path / "out")


# --- the real model -----------------------------------------------------------------------------


@pytest.mark.parametrize(("attention", "exporter", "opset"), MINILM_EXPORTS)
def test_export_minilm_with_every_exporter(
    attention: str, exporter: str, opset: int, minilm_export: Callable[[str, str, int], Path]
) -> None:
    artifact = open_artifact(minilm_export(attention, exporter, opset))
    assert (artifact.pooling, artifact.normalize, artifact.max_length) == ("mean", True, 256)
    assert artifact.record.stated["max_abs_error"] < 1e-4
