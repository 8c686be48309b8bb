"""Write models, and lists of modules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper, parser

from attnserve.models.artifact import Artifact
from attnserve.models.record import Record
from attnserve.models.tokenizer import TextEncoder
from attnserve.models.tokenizer_files import load_encoder
from tests.files import write_json

LINEAR = """<ir_version: 10, opset_import: ["" : 18]>
linear (float[n, 64] x) => (float[n, 64] y) { y = MatMul(x, w) }"""


def linear(path: Path) -> Path:
    model = parser.parse_model(LINEAR)
    weight = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)
    model.graph.initializer.append(numpy_helper.from_array(weight, "w"))
    path.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(model, path)
    return path


def encoder_of(path: Path, **record: Any) -> TextEncoder:
    """The encoder of a tokenizer.json, or of a folder with one, with these fields of a record."""
    folder = path if path.is_dir() else path.parent
    return load_encoder(Artifact(folder / "model.onnx", Record(**record)), path)


def write_modules(folder: Path, *names: str) -> None:
    kinds = [f"sentence_transformers.models.{name}" for name in names]
    paths = ["", *(f"{i}_{name}" for i, name in enumerate(names[1:], start=1))]
    modules = [{"path": path, "type": kind} for path, kind in zip(paths, kinds, strict=True)]
    write_json(folder / "modules.json", modules)
