"""Read a model folder as text-embeddings-inference (TEI) with ONNX Runtime does, without attnserve.

The rules are those of TEI's ``router/src/lib.rs``, ``core/src/tokenization.rs`` and
``backends/ort/src/lib.rs``: only the files that are read here have an effect on its answers.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from tokenizers import Tokenizer

SETTINGS = [
    f"sentence_{name}_config.json"
    for name in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
]
LEGACY = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "lasttoken",
}
POOLINGS = {*LEGACY.values()}


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


class TeiReader:
    """A model of text-embeddings-inference; inputs are truncated at the right.

    Raises:
        ValueError: TEI does not start with this folder.
    """

    def __init__(self, folder: Path) -> None:
        config = read(folder / "config.json")
        names, kind = config["architectures"], config["model_type"]
        self.is_classifier = any(name.endswith("Classification") for name in names)
        self.pad = config.get("pad_token_id", config.get("eos_token_id", 0))
        self.pooling = None if self.is_classifier else pooling_of(folder, kind)
        self.pads_left = read(folder / "tokenizer_config.json").get("padding_side") == "left"
        self.prompts = read(folder / "config_sentence_transformers.json").get("prompts") or {}
        stated = [read(folder / name).get("max_seq_length") for name in SETTINGS]
        offset = self.pad + 1 if kind in ("roberta", "xlm-roberta", "camembert") else 0
        most = config["max_position_embeddings"] - offset
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.tokenizer.no_padding()
        self.tokenizer.enable_truncation(next(filter(None, stated), most))
        files = (folder / "model.onnx", folder / "onnx" / "model.onnx")
        self.session = ort.InferenceSession(next(file for file in files if file.exists()))

    def embed(
        self, texts: Sequence[str], prompt_name: str | None = None, dimensions: int | None = None
    ) -> np.ndarray:
        """The normalized vectors of texts: without a name, no prompt precedes them."""
        start = "" if prompt_name is None else self.prompts[prompt_name]
        outputs, mask = self.run([start + text for text in texts])
        if "sentence_embedding" in outputs:
            vectors = outputs["sentence_embedding"]
        else:
            hidden = outputs.get("last_hidden_state", outputs.get("token_embeddings"))
            vectors = pool(hidden, mask, self.pooling)
        vectors = vectors[:, :dimensions]
        return vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)

    def scores(self, inputs: Sequence[str] | Sequence[tuple[str, str]]) -> np.ndarray:
        """The logits of texts or pairs (``raw_scores``), (B, C)."""
        return self.run(inputs)[0]["logits"]

    def run(self, inputs: Sequence[Any]) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """All outputs by name, of one padded batch, and its mask."""
        encodings = self.tokenizer.encode_batch(inputs)
        size = max(len(one.ids) for one in encodings)

        def padded(rows: Sequence[Sequence[int]], value: int) -> np.ndarray:
            found = np.full((len(rows), size), value, np.int64)
            for one, row in zip(found, rows, strict=True):
                one[slice(size - len(row), size) if self.pads_left else slice(len(row))] = row
            return found

        mask = padded([[1] * len(one.ids) for one in encodings], 0)
        feeds = {"input_ids": padded([one.ids for one in encodings], self.pad),
                 "attention_mask": mask}  # fmt: skip
        for value in self.session.get_inputs():
            if value.name == "token_type_ids":
                feeds[value.name] = padded([one.type_ids for one in encodings], 0)
        names = [value.name for value in self.session.get_outputs()]
        return dict(zip(names, self.session.run(names, feeds), strict=True)), mask


def pooling_of(folder: Path, kind: str) -> str:
    path = folder / "1_Pooling" / "config.json"
    if not path.exists() and "bert" in kind:
        return "cls"
    stated = read(path)
    legacy = [name for key, name in LEGACY.items() if stated.get(key)]
    named = str(stated.get("pooling_mode")).replace("last_token", "lasttoken")
    found = [name for name in (named, *legacy) if name in POOLINGS]
    if not found:
        raise ValueError(f"pooling config {stated} is not supported")
    return found[0]


def pool(hidden: np.ndarray, mask: np.ndarray, pooling: str) -> np.ndarray:
    """Vectors (B, D) of hidden states (B, T, D) with padding on either side."""
    if pooling == "mean":
        return (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdims=True)
    first = mask.argmax(1)
    at = first if pooling == "cls" else first + mask.sum(1) - 1
    return hidden[np.arange(len(hidden)), at]
