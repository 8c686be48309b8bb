"""Answers of sentence-transformers: as a program, of a stock installation without attnserve.

Usage: python stock_sentence_transformers.py BACKEND JOB.json RESULT.json

JOB has folders, and the texts or pairs that each gets. RESULT has their answers by path.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

CALLS: dict[str, Callable[[Any, list[str]], Any]] = {
    "encode_query": lambda model, texts: model.encode_query(texts),
    "encode_document": lambda model, texts: model.encode_document(texts),
    "truncate_dim": lambda model, texts: model.encode(texts, truncate_dim=5),
    "similarity": lambda model, texts: model.similarity(
        model.encode_query(texts), model.encode_document(texts)
    ),
    "int8": lambda model, texts: model.encode(texts, precision="int8"),
    "ubinary": lambda model, texts: model.encode(texts, precision="ubinary"),
}
"""Methods and options of a SentenceTransformer."""


def vectors(model: Any, texts: list[str], prompts: Sequence[str] = ("",)) -> dict[str, Any]:
    """The vectors of each prompt ("" is the default), and the answer of each of ``CALLS``."""
    encoded = {f"prompt {name}": model.encode(texts, prompt_name=name or None) for name in prompts}
    return encoded | {name: call(model, texts) for name, call in CALLS.items()}


def scores(model: Any, inputs: list[Any]) -> dict[str, Any]:
    """The scores of texts, or of pairs, by a CrossEncoder."""
    return {"scores": [model.predict(one).tolist() for one in inputs]}


def main(backend: str, job: Path, result: Path) -> None:
    from sentence_transformers import CrossEncoder, SentenceTransformer

    # OpenVINO computes in bfloat16 where the CPU has it.
    exact = {"openvino": {"ov_config": {"INFERENCE_PRECISION_HINT": "f32"}}}
    options: dict[str, Any] = {"backend": backend, "device": "cpu"}
    options["model_kwargs"] = exact.get(backend, {})
    answers: dict[str, Any] = {}
    for path, folder in json.loads(job.read_text()).items():
        if folder["kind"] == "embedding":
            model = SentenceTransformer(path, **options)
            answers[path] = vectors(model, folder["inputs"], folder["prompts"])
        else:
            answers[path] = scores(CrossEncoder(path, **options), folder["inputs"])
    result.write_text(json.dumps(answers, default=lambda array: array.tolist()))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
