"""Types of the values of options. Imports no large library, for ``--help``."""

from __future__ import annotations

from typing import Literal

__all__ = [
    "Activation",
    "Alignment",
    "Attention",
    "Exporter",
    "Importance",
    "LearnedTask",
    "Measure",
    "MixingKind",
    "MixingOption",
    "Padding",
    "Pooling",
    "Precision",
    "Role",
    "SearchMeasure",
    "Side",
    "Similarity",
    "Split",
    "TaskName",
    "TrainedPrecision",
]

Activation = Literal["sigmoid", "softmax", "identity"]
Alignment = Literal["similarity", "index"]
Attention = Literal["sdpa", "eager"]
Exporter = Literal["dynamo", "torchscript"]
Importance = Literal["energy", "loo", "voting"]
LearnedTask = Literal["sts", "classification"]
Measure = Literal["auto", "similarity", "index", "tau", "r2", "kl", "top1", "cosine"]
MixingKind = Literal["dense", "sparse", "own"]
"""The dimensions that a head reads: all shared ones, some, or own ones that no other head reads."""
MixingOption = Literal["auto", "dense", "sparse"]
Role = Literal["query", "document"]
Side = Literal["right", "left"]
Padding = Side
Pooling = Literal["mean", "cls", "last", "none"]
Precision = str
"""The name of a row of ``precision.schemes.SCHEMES``."""
SearchMeasure = Literal[Measure, "score"]
Similarity = Literal["cosine", "dot"]
Split = Literal["choose", "verify", "held out", "data", "random"]
"""The inputs of a measured quality: the rows to choose, the rows to verify, both, all rows, or
random inputs."""
TaskName = Literal[
    "sts",
    "classification",
    "retrieval",
    "rerank",
    "perplexity",
    "token-classification",
    "image-classification",
]
TrainedPrecision = Literal["float32", "int8"]
