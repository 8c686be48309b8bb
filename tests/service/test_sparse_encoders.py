"""Sparse vectors of served models equal those of torch and of sentence-transformers.

tests/attnserve/models/test_folder_settings.py has the settings that are refused.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient

from graph_passes.errors import InvalidArgument, InvalidModel
from tests.errors import raises
from tests.files import write_json
from tests.hub_folders import (
    HIDDEN,
    LIBRARY,
    POSITIONS,
    SENTENCE,
    TEXTS,
    VOCABULARY,
    change,
    tokenizer,
)

pytestmark = [
    pytest.mark.export,
    # The libraries warn about their own use of torch; what they return is compared.
    pytest.mark.filterwarnings("ignore"),
]

if find_spec("sentence_transformers") is None:
    pytest.skip("pip install 'attnserve[dev]'", allow_module_level=True)

POOLING = "1_SpladePooling/config.json"
PROMPTS = {"query": "The Sea ", "document": ""}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of a random model, as sentence-transformers writes it."""
    import torch
    import transformers
    from sentence_transformers import SparseEncoder
    from sentence_transformers.base.modules import Transformer
    from sentence_transformers.sparse_encoder.modules import SpladePooling

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("sparse")
    config = transformers.BertConfig(
        vocab_size=len(VOCABULARY), hidden_size=HIDDEN, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=24, max_position_embeddings=POSITIONS, pad_token_id=0,
    )  # fmt: skip
    network = transformers.BertForMaskedLM(config)
    with torch.no_grad():  # initial weights give vectors that are all alike
        for weight in network.parameters():
            if weight.ndim == 2:
                weight.copy_(0.4 * torch.randn(weight.shape))
    network.save_pretrained(folder / "network")
    tokenizer("bert", folder / "network")
    encoder = Transformer(str(folder / "network"), transformer_task="fill-mask")
    library = SparseEncoder(modules=[encoder, SpladePooling()], device="cpu", prompts=PROMPTS)
    library.save(str(folder / "saved"), create_model_card=False)
    return folder / "saved"


@pytest.fixture
def model(saved: Path, tmp_path: Path) -> Path:
    """The folder, which the test may change."""
    return Path(shutil.copytree(saved, tmp_path / "models" / "model"))


def make_old(folder: Path) -> None:
    """Change a folder to what sentence-transformers 5.0 wrote."""
    package = "sentence_transformers.sparse_encoder.models"
    write_json(folder / "modules.json", [
        {"idx": 0, "name": "0", "path": "", "type": f"{package}.MLMTransformer"},
        {"idx": 1, "name": "1", "path": "1_SpladePooling", "type": f"{package}.SpladePooling"},
    ])  # fmt: skip
    write_json(folder / SENTENCE, {"max_seq_length": POSITIONS, "do_lower_case": False})
    write_json(folder / POOLING, {"pooling_strategy": "max", "activation_function": "relu",
                                  "word_embedding_dimension": None})  # fmt: skip


def by_torch(folder: Path, prompt: str) -> np.ndarray:
    """The formula of SPLADE on the logits of a padded batch: the texts and the vocabulary."""
    import torch
    import transformers

    network = transformers.AutoModelForMaskedLM.from_pretrained(folder).eval()
    texts = [prompt + text for text in TEXTS]
    batch: Any = transformers.AutoTokenizer.from_pretrained(folder)(
        texts, padding=True, truncation=True, max_length=POSITIONS, return_tensors="pt"
    )
    with torch.no_grad():
        logits = network(**batch).logits
    weights = torch.log1p(torch.relu(logits)) * batch["attention_mask"][..., None]
    return weights.max(dim=1).values.numpy()


def by_library(folder: Path, prompt_name: str | None) -> np.ndarray:
    from sentence_transformers import SparseEncoder

    library: Any = SparseEncoder(str(folder), device="cpu")
    return library.encode(TEXTS, prompt_name=prompt_name).to_dense().numpy()


def served(client: TestClient, name: str, prompt_name: str | None) -> np.ndarray:
    body = {"model": name, "inputs": TEXTS, "truncate": True, "prompt_name": prompt_name}
    answer = client.post("/embed_sparse", json=body)
    assert answer.status_code == 200, answer.text
    found = np.zeros((len(TEXTS), len(VOCABULARY)))
    for row, weights in zip(found, answer.json(), strict=True):
        for weight in weights:
            row[weight["index"]] = weight["value"]
    return found


@pytest.mark.parametrize("is_old", [False, True], ids=["version 6", "version 5"])
def test_served_sparse_vectors_equal_those_of_the_libraries(
    model: Path, start: Callable[..., TestClient], is_old: bool
) -> None:
    from attnserve.exporters.hugging_face import export

    if is_old:
        make_old(model)
    exported = model.with_name("export")
    report = export(model, exported, task="fill-mask", exporter="torchscript")
    assert (report.outputs, report.pooling, report.max_length) == (("logits",), "none", POSITIONS)
    (model / "onnx").mkdir()
    shutil.copy(exported / "model.onnx", model / "onnx" / "model.onnx")
    client = start(model.parent, rewrite=False)
    for prompt_name in (None, "query"):
        wanted = by_torch(model, PROMPTS.get(prompt_name or "", ""))
        assert (wanted > 0).any(axis=1).all() and (wanted == 0).any(axis=1).all()
        np.testing.assert_allclose(by_library(model, prompt_name), wanted, atol=1e-5)
        for name in ("export", "model"):
            np.testing.assert_allclose(served(client, name, prompt_name), wanted, atol=1e-5)
    refused = client.post("/texts/embed", json={"model": "model", "inputs": TEXTS[:1]})
    assert not refused.is_success and "/embed_sparse" in refused.text


def test_exported_folder_has_no_files_of_a_dense_model(model: Path) -> None:
    from attnserve.exporters.hugging_face import export
    from attnserve.integrations.sentence_transformers import load

    folder = model.with_name("export")
    export(model, folder, task="fill-mask", exporter="torchscript")
    assert {path.name for path in folder.iterdir()} == {
        "model.onnx", "tokenizer.json", "tokenizer_config.json", "config.json", "attnserve.json",
        "README.md",
    }  # fmt: skip
    assert json.loads((folder / "attnserve.json").read_text())["prompts"] == PROMPTS
    assert "sentence-transformers" not in (folder / "README.md").read_text()
    with raises(InvalidModel, "integration.not_loadable"):
        load(folder)
    with raises(InvalidArgument, "openvino.not_loadable", "fill-mask"):
        export(model, folder, task="fill-mask", openvino=True, force=True)


@pytest.mark.parametrize("task", [None, "rerank", "text-generation"])
def test_export_of_a_sparse_encoder_names_its_task(model: Path, task: str | None) -> None:
    from attnserve.exporters.hugging_face import export

    folder = model.with_name("export")
    with raises(InvalidModel, "export.sparse_encoder", "`task` to fill-mask"):
        export(model, folder, task=task)
    assert not folder.exists()


@pytest.mark.parametrize("task", [None, "fill-mask"])
@pytest.mark.parametrize(
    ("file", "content", "code", "values"),
    [
        (POOLING, {"pooling_strategy": "sum"}, "export.sparse_pooling", ["sum", "max"]),
        (POOLING, {"activation_function": "log1p_relu"}, "export.sparse_pooling", ["log1p_relu"]),
        (POOLING, {"scale": 2}, "settings.unknown_key", ["scale"]),
        (LIBRARY, {"max_active_dims": 8}, "export.sparse_pooling", ["max_active_dims is 8"]),
    ],
)
def test_export_of_other_sparse_vectors_is_refused(
    model: Path,
    task: str | None,
    file: str,
    content: Mapping[str, Any],
    code: str,
    values: list[str],
) -> None:
    from attnserve.exporters.hugging_face import export

    folder = model.with_name("export")
    change(model, {file: content})
    with raises(InvalidModel, code, str(model / file), *values):
        export(model, folder, task=task)
    assert not folder.exists()


def test_export_of_a_sparse_encoder_without_inference_is_refused(saved: Path, tmp_path: Path):
    """Its queries have weights by a table (SparseStaticEmbedding), its documents a network."""
    from sentence_transformers import SparseEncoder
    from sentence_transformers.base.modules import Router, Transformer
    from sentence_transformers.sparse_encoder.modules import SparseStaticEmbedding, SpladePooling

    from attnserve.exporters.hugging_face import export

    network: Any = Transformer(str(saved), transformer_task="fill-mask")
    query = SparseStaticEmbedding(network.tokenizer)
    router = Router.for_query_document(
        query_modules=[query], document_modules=[network, SpladePooling()]
    )
    for name, first in (("router", router), ("table", query)):
        folder = tmp_path / name
        SparseEncoder(modules=[first], device="cpu").save(str(folder), create_model_card=False)
        with raises(InvalidModel, "export.module", type(first).__name__, "SpladePooling"):
            export(folder, tmp_path / "export", task="fill-mask")
