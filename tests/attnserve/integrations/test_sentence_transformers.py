"""Loaded models do what the original does in sentence-transformers.

tests/service/test_hub_folders.py compares the vectors and scores of all kinds of folders.
"""

from __future__ import annotations

import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from attnserve.integrations.sentence_transformers import load
from graph_passes.errors import InvalidArgument, InvalidModel
from tests.errors import raises
from tests.hub_folders import CASES, LIBRARY, QUERY, TEXTS, Case, change, then, write_folder

pytestmark = [pytest.mark.export, pytest.mark.filterwarnings("ignore")]

if find_spec("sentence_transformers") is None:
    pytest.skip("pip install 'attnserve[dev]'", allow_module_level=True)

PROMPTS = {"query": "The Sea ", "document": "a big "}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with prompts, whose similarity is the dot product."""
    path = tmp_path_factory.mktemp("hub") / "hub"
    case = Case(modules=then("cls"))
    write_folder(case, path)
    change(path, {LIBRARY: {"prompts": PROMPTS, "similarity_fn_name": "dot"}})
    return path


@pytest.fixture(scope="module")
def models(folder: Path) -> tuple[Any, Any]:
    """The model on the runtime here, and in torch."""
    from sentence_transformers import SentenceTransformer

    return load(folder), SentenceTransformer(str(folder), device="cpu")


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("encode", {}),
        ("encode", {"truncate_dim": 5}),
        ("encode", {"prompt_name": "query"}),
        ("encode", {"prompt": "Dog "}),
        ("encode", {"normalize_embeddings": True, "batch_size": 2}),
        ("encode_query", {}),
        ("encode_document", {}),
    ],
)
def test_vectors_equal_those_of_the_original(
    models: tuple[Any, Any], method: str, options: dict[str, Any]
):
    own, original = (getattr(model, method)(TEXTS, **options) for model in models)
    np.testing.assert_allclose(own, original, atol=1e-5)


@pytest.mark.parametrize("precision", ["int8", "uint8", "binary", "ubinary"])
def test_quantized_vectors_equal_those_of_the_original(models: tuple[Any, Any], precision: str):
    own, original = (model.encode(TEXTS, precision=precision) for model in models)
    assert own.dtype == original.dtype and own.shape == original.shape
    if precision.endswith("binary"):
        assert (own == original).all()
    else:  # a value at the border of two integers may be rounded to either
        assert np.abs(own.astype(int) - original.astype(int)).max() <= 1


def test_settings_equal_those_of_the_original(models: tuple[Any, Any]):
    own, original = models
    assert own.prompts == original.prompts
    assert own.similarity_fn_name == original.similarity_fn_name == "dot"
    assert own.max_seq_length == original.max_seq_length
    vectors = own.encode(TEXTS)
    np.testing.assert_allclose(
        own.similarity(vectors, vectors), original.similarity(vectors, vectors)
    )


def test_options_precede_the_record(folder: Path):
    model: Any = load(folder, truncate_dim=3, similarity_fn_name="cosine")
    assert model.encode(TEXTS).shape == (len(TEXTS), 3)
    assert model.similarity_fn_name == "cosine"


def test_openvino_gives_the_same_vectors(folder: Path, models: tuple[Any, Any]):
    pytest.importorskip("openvino")
    model: Any = load(folder, runtime="openvino", threads=1)
    np.testing.assert_allclose(model.encode(TEXTS), models[1].encode(TEXTS), atol=1e-5)


def test_cross_encoder_ranks_as_the_original(tmp_path: Path):
    from sentence_transformers import CrossEncoder

    write_folder(CASES["cross-encoder"], tmp_path / "hub")
    own: Any = load(tmp_path / "hub")
    original = CrossEncoder(str(tmp_path / "hub"), device="cpu")
    ranks = [[one["corpus_id"] for one in model.rank(QUERY, TEXTS)] for model in (own, original)]
    assert ranks[0] == ranks[1]


@pytest.mark.parametrize(
    ("file", "content", "code"),
    [
        ("modules.json", "{", "artifact.json"),
        ("modules.json", '[{"type": "mine.Pooling", "path": ""}]', "export.module"),
        ("1_Pooling/config.json", None, "export.pooling"),
        ("config.json", "[", "artifact.json"),
        ("config.json", "{}", "integration.not_loadable"),
        (LIBRARY, '{"model_type": "SparseEncoder"}', "export.module"),
    ],
)
def test_broken_folder_is_refused_by_the_usual_error(
    folder: Path, tmp_path: Path, file: str, content: str | None, code: str
):
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    (copy / file).unlink() if content is None else (copy / file).write_text(content)
    with raises(InvalidModel, code):
        load(copy)


def test_unknown_runtime_is_refused(folder: Path):
    with raises(InvalidArgument, "runtime.unknown"):
        load(folder, runtime="none")
