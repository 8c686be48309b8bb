"""Which tasks a model does with texts, by its outputs and its configuration."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from attnserve.models.artifact import open_artifact
from attnserve.serving.signature import Axes, Signature, Tensor
from attnserve.serving.text_tasks import tasks_of
from graph_passes.errors import InvalidArgument
from tests.errors import raises
from tests.service.tiny import write_model

INPUTS = {"input_ids": ("batch", "sequence"), "attention_mask": ("batch", "sequence")}

TOKENS, CLASSES, PAIRS, FREE = (
    ("batch", "sequence", 8), ("batch", 8), ("batch", 1), ("batch", "n"),
)  # fmt: skip
MASKED = {"architectures": ["XForMaskedLM"], "vocab_size": 8}
CAUSAL = {"architectures": ["XForCausalLM"], "vocab_size": 8}
LABELED = {"id2label": {str(index): "x" for index in range(8)}}

TABLE: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any], set[str]]] = {
    # outputs, config.json, attnserve.json, tasks
    "encoder": ({"last_hidden_state": TOKENS}, {}, {}, {"embed", "tokens"}),
    "pooled": ({"sentence_embedding": CLASSES}, {}, {}, {"embed"}),
    "pooled, with tokens": (
        {"token_embeddings": TOKENS, "sentence_embedding": CLASSES}, {}, {}, {"embed", "tokens"},
    ),
    "pooled, labels of another model": ({"sentence_embedding": CLASSES}, LABELED, {}, {"embed"}),
    "unknown name": ({"output": CLASSES}, {}, {}, {"embed"}),
    "unknown name, labels": ({"output": CLASSES}, LABELED, {}, {"classify"}),
    "classifier": ({"logits": CLASSES}, {}, {}, {"classify"}),
    "classifier of a free number": ({"logits": FREE}, {}, {}, {"classify", "rerank"}),
    "classifier with hidden states": (
        {"logits": CLASSES, "last_hidden_state": TOKENS}, {}, {},
        {"classify", "embed", "tokens"},
    ),
    "reranker": ({"logits": PAIRS}, {}, {}, {"classify", "rerank"}),
    "named scores": (
        {"scores": CLASSES}, {}, {"output": "scores", "activation": "identity"}, {"classify"},
    ),
    "named output": ({"scores": CLASSES}, {}, {"output": "scores"}, {"embed"}),
    "splade": ({"logits": TOKENS}, MASKED, {}, {"sparse"}),
    "splade by its task": ({"logits": TOKENS}, {}, {"task": "fill-mask"}, {"sparse"}),
    "splade, pooled": ({"sparse": CLASSES}, MASKED, {}, {"embed"}),
    "decoder": ({"logits": TOKENS}, CAUSAL, {}, set()),
    "decoder, other name": ({"output": TOKENS}, CAUSAL, {}, set()),
    "one number per token": ({"output": ("batch", "sequence")}, {}, {}, {"embed"}),
    "unknown rank": ({"output": ()}, MASKED, {}, {"embed"}),
}  # fmt: skip
"""Models that share a name of an output, a shape or a configuration."""


def refusals(folder: Path, outputs: Any, config: Any, record: Any) -> Any:
    write_model(folder / "model.onnx", "<ir_version: 10> g (float[n] x) => (float[n] x) {}")
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "attnserve.json").write_text(json.dumps(record))
    signature = Signature("m", tensors(INPUTS), tensors(outputs), {})
    return tasks_of(signature, open_artifact(folder))


def tensors(axes: Mapping[str, Axes]) -> list[Tensor]:
    return [Tensor(name, np.dtype(np.float32), axes[name]) for name in axes]


@pytest.mark.parametrize("case", TABLE)
def test_tasks_follow_from_outputs_and_configuration(case: str, tmp_path: Path) -> None:
    *model, tasks = TABLE[case]
    found = refusals(tmp_path, *model)
    assert {task for task, refusal in found.items() if refusal is None} == tasks
    assert all(
        refusal.reason.startswith("m ") and refusal.fix for refusal in found.values() if refusal
    )


@pytest.mark.parametrize(
    ("case", "route"),
    [
        ("classifier", "/predict"),
        ("reranker", "/rerank"),
        ("splade", "/embed_sparse"),
        ("decoder", "/v2/models/m/infer"),
    ],
)
def test_refused_embeddings_name_the_route_of_the_output(
    case: str, route: str, tmp_path: Path
) -> None:
    refusal = refusals(tmp_path, *TABLE[case][:3])["embed"]
    assert refusal.code == "no_embeddings" and route in refusal.fix


def test_tasks_of_an_output_that_is_missing_are_refused(tmp_path: Path) -> None:
    with raises(InvalidArgument, "text.output", "scores", "logits"):
        refusals(tmp_path, {"logits": CLASSES}, {}, {"output": "scores"})
