"""Option values with a fixed set of names. Nothing heavy is imported: the CLI must start fast."""

from __future__ import annotations

from typing import Literal

__all__ = [
    "INTEGER",
    "Activation",
    "Alignment",
    "Attention",
    "Exporter",
    "Importance",
    "LearnedTask",
    "Measure",
    "Mixing",
    "Padding",
    "Pooling",
    "Precision",
    "SearchMeasure",
    "Side",
    "Similarity",
    "TaskName",
]

Activation = Literal["sigmoid", "softmax", "identity"]
Alignment = Literal["similarity", "index"]
Attention = Literal["sdpa", "eager"]
Exporter = Literal["dynamo", "torchscript"]
Importance = Literal["energy", "loo", "voting"]
LearnedTask = Literal["sts", "classification"]
Measure = Literal["auto", "similarity", "r2", "kl", "top1", "cosine"]
Mixing = Literal["auto", "dense", "sparse"]
Side = Literal["right", "left"]
Padding = Side
Pooling = Literal["mean", "cls", "last", "none"]
Precision = Literal["float32", "float16", "bfloat16", "int8", "int8-full", "int4"]
SearchMeasure = Literal[Measure, "score"]
Similarity = Literal["cosine", "dot"]
INTEGER: tuple[Precision, ...] = ("int8", "int8-full", "int4")
"""Precisions in which single blocks may stay float32."""
TaskName = Literal[
    "sts",
    "classification",
    "retrieval",
    "rerank",
    "perplexity",
    "token-classification",
    "image-classification",
]
