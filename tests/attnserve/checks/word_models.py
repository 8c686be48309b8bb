"""Models that look up a row of a table for each word of a text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx_ir as ir
from tokenizers import Tokenizer

from tests.onnx_text import with_weights


def vectors_of(width: int) -> str:
    """The graph of a model whose vectors of tokens are the rows of its table."""
    return f"""<ir_version: 10, opset_import: ["" : 18]>
tokens (int64[batch, sequence] input_ids, int64[batch, sequence] attention_mask)
=> (float[batch, sequence, {width}] last_hidden_state) {{
    last_hidden_state = Gather(table, input_ids)
}}"""


def write_artifact(
    folder: Path,
    text: str,
    table: np.ndarray,
    tokenizer: Tokenizer,
    record: Mapping[str, object] | None = None,
) -> Path:
    """Write a model, its tokenizer and, if there is one, its record."""
    ir.save(with_weights(text, table=table), folder / "model.onnx")
    tokenizer.save(str(folder / "tokenizer.json"))
    if record is not None:
        (folder / "attnserve.json").write_text(json.dumps(record), encoding="utf-8")
    return folder
