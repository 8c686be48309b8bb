"""Write files of models, and read folders."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper, parser

LINEAR = """<ir_version: 10, opset_import: ["" : 18]>
linear (float[n, 64] x) => (float[n, 64] y) { y = MatMul(x, w) }"""


def linear(path: Path) -> Path:
    model = parser.parse_model(LINEAR)
    weight = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)
    model.graph.initializer.append(numpy_helper.from_array(weight, "w"))
    path.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(model, path)
    return path


def tree(folder: Path) -> dict[str, bytes | None]:
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
    }


def write_json(path: Path, content: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content), encoding="utf-8")


def write_modules(folder: Path, *names: str) -> None:
    kinds = [f"sentence_transformers.models.{name}" for name in names]
    paths = ["", *(f"{i}_{name}" for i, name in enumerate(names[1:], start=1))]
    modules = [{"path": path, "type": kind} for path, kind in zip(paths, kinds, strict=True)]
    write_json(folder / "modules.json", modules)
