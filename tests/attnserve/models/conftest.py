"""A linear model with and without external data, and a folder like those of a hub."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from attnserve.models.onnx_files import load_model, save_model
from tests.attnserve.models.files import linear, write_modules
from tests.files import write_json


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    return linear(tmp_path / "plain" / "model.onnx")


@pytest.fixture
def external(plain: Path, tmp_path: Path) -> Path:
    """The model ``plain`` with its weights in model.onnx.data."""
    path = tmp_path / "external" / "model.onnx"
    path.parent.mkdir()
    save_model(load_model(plain), path, external=True)
    return path


@pytest.fixture
def hub(tmp_path: Path) -> Path:
    """A model of sentence-transformers as on the hub: ONNX files in a folder of their own."""
    folder = tmp_path / "encoder"
    linear(folder / "onnx" / "model.onnx")
    shutil.copy(folder / "onnx" / "model.onnx", folder / "onnx" / "model_O2.onnx")
    for name in ("config.json", "tokenizer.json"):
        write_json(folder / name, {"name": name})
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": 256})
    write_modules(folder, "Transformer", "Pooling", "Normalize")
    write_json(folder / "1_Pooling" / "config.json", {"pooling_mode_cls_token": True})
    return folder
