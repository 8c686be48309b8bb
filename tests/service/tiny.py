"""Tiny models and a tiny tokenizer; nothing is downloaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper, parser
from tokenizers import Tokenizer

from tests.word_tokenizer import PAIR, TEXT, word_tokenizer

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "b", "c", "d"]
HIDDEN, POSITIONS = 4, 8

ENCODER = """
<ir_version: 10, opset_import: ["": 18]>
tiny (int64[batch, sequence] input_ids, int64[batch, sequence] attention_mask)
  => (float[batch, sequence, 4] last_hidden_state, bool[batch, sequence] kept)
{
    words = Gather(words_table, input_ids)
    length = Shape<start = 1, end = 2>(input_ids)
    places = Slice(places_table, zero, length, one)
    embedded = Add(words, places)
    last_hidden_state = MatMul(embedded, dense)
    kept = Cast<to = 9>(attention_mask)
}
"""

# Outputs equal inputs, for every datatype.
ECHO = """
<ir_version: 10, opset_import: ["": 18]>
echo (bool[n] b, uint8[n] u8, uint64[n] u64, int8[n] i8, int64[n] i64, float16[n] f16,
      float[n, 2] f32, double f64)
  => (bool[n] b_out, uint8[n] u8_out, uint64[n] u64_out, int8[n] i8_out, int64[n] i64_out,
      float16[n] f16_out, float[n, 2] f32_out, double f64_out)
{
    b_out = Identity(b)
    u8_out = Identity(u8)
    u64_out = Identity(u64)
    i8_out = Identity(i8)
    i64_out = Identity(i64)
    f16_out = Identity(f16)
    f32_out = Identity(f32)
    f64_out = Identity(f64)
}
"""


def tables() -> dict[str, np.ndarray]:
    """The weights of the encoder: small integers, so that sums are exact."""
    rng = np.random.default_rng(0)
    return {
        "words_table": rng.integers(-8, 8, (len(WORDS), HIDDEN)).astype(np.float32),
        "places_table": rng.integers(-8, 8, (1, POSITIONS, HIDDEN)).astype(np.float32),
        "dense": np.eye(HIDDEN, dtype=np.float32)[::-1].copy(),
    }


def hidden_states(ids: np.ndarray) -> np.ndarray:
    """What the encoder computes for ``ids``, shape (batch, sequence, hidden)."""
    table = tables()
    places = table["places_table"][:, : ids.shape[1]]
    return (table["words_table"][ids] + places) @ table["dense"]


def mean(ids: list[int]) -> np.ndarray:
    """The mean-pooled vector of one text."""
    return hidden_states(np.array([ids]))[0].mean(axis=0)


def write_encoder(folder: Path, *, tokenizer: bool = True, **record: object) -> Path:
    """An artifact folder with the tiny encoder."""
    folder.mkdir()
    model = parser.parse_model(ENCODER)
    constants = tables() | {"zero": np.array([0]), "one": np.array([1])}
    model.graph.initializer.extend(
        numpy_helper.from_array(value, name) for name, value in constants.items()
    )
    onnx.save(model, folder / "model.onnx")
    if tokenizer:
        make_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "attnserve.json").write_text(json.dumps({"max_length": POSITIONS, **record}))
    return folder


def write_model(path: Path, text: str, *, tokenizer: bool = False) -> Path:
    """A model without weights, with the tiny tokenizer beside it if it takes texts."""
    onnx.save(parser.parse_model(text), path)
    if tokenizer:
        make_tokenizer().save(str(path.parent / "tokenizer.json"))
    return path


def ids_request(*rows: list[int]) -> dict[str, Any]:
    """A v2 request of the encoder: rows of ids of one length, nothing masked."""
    shape = [len(rows), len(rows[0])]
    flat = [token for row in rows for token in row]
    return {
        "inputs": [
            {"name": "input_ids", "shape": shape, "datatype": "INT64", "data": flat},
            {
                "name": "attention_mask",
                "shape": shape,
                "datatype": "INT64",
                "data": [1] * len(flat),
            },
        ]
    }


def make_tokenizer() -> Tokenizer:
    return word_tokenizer(WORDS, single=TEXT)


# The logit of a pair is the number of letters "b" in its second text, minus one.
RERANKER = """
<ir_version: 10, opset_import: ["": 18]>
pairs (int64[batch, sequence] input_ids, int64[batch, sequence] attention_mask,
       int64[batch, sequence] token_type_ids)
  => (float[batch, 1] logits)
  <int64 letter = {5}, int64[1] axis = {1}, float one = {1}>
{
    same = Equal(input_ids, letter)
    ones = Cast<to = 7>(same)
    counted = Mul(ones, token_type_ids)
    sums = ReduceSum(counted, axis)
    numbers = Cast<to = 1>(sums)
    logits = Sub(numbers, one)
}
"""


def pair_tokenizer() -> Tokenizer:
    return word_tokenizer(WORDS, single=TEXT, pair=PAIR)


def write_reranker(folder: Path, graph: str = RERANKER, **record: object) -> Path:
    folder.mkdir()
    write_model(folder / "model.onnx", graph)
    pair_tokenizer().save(str(folder / "tokenizer.json"))
    content = {"max_length": 9, "task": "rerank", **record}
    (folder / "attnserve.json").write_text(json.dumps(content))
    return folder


PROMPTS = {"query": "b ", "document": "c "}

# The logits of three classes: how often a, b and c are in the text.
CLASSIFIER = """
<ir_version: 10, opset_import: ["": 18]>
counts (int64[batch, sequence] input_ids, int64[batch, sequence] attention_mask)
  => (float[batch, 3] logits)
  <int64[3] letters = {4, 5, 6}, int64[1] last = {2}, int64[1] middle = {1}>
{
    ids = Unsqueeze(input_ids, last)
    same = Equal(ids, letters)
    ones = Cast<to = 1>(same)
    logits = ReduceSum<keepdims = 0>(ones, middle)
}
"""


def write_classifier(folder: Path, **record: object) -> Path:
    folder.mkdir()
    write_model(folder / "model.onnx", CLASSIFIER, tokenizer=True)
    (folder / "attnserve.json").write_text(json.dumps(record))
    return folder


def cosine(one: list[int], other: list[int]) -> float:
    a, b = mean(one), mean(other)
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


FOREVER = """
<ir_version: 10, opset_import: ["": 18]>
forever (float[n] x) => (float[n] y) <int64 trips = {4611686018427387904}, bool go = {1}> {
    y = Loop(trips, go, x) <
        body = step (int64 i, bool on, float[n] a) => (bool still, float[n] b) {
            still = Identity(on)
            b = Add(a, a)
        }
    >
}
"""
"""A model whose check never ends."""
