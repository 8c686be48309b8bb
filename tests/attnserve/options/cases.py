"""Invalid values of every option, from its type and its bounds."""

from __future__ import annotations

import math
from typing import Any, Literal, get_args, get_origin

from attnserve import options
from attnserve.cli.options import Mteb, Requirements
from attnserve.options import (
    Comparison,
    Data,
    Goal,
    Options,
    Rewrites,
    Run,
    Scoring,
    Target,
    Timing,
    Training,
    Write,
)

GROUPS = (*options.GROUPS, Mteb, Requirements)

COMMANDS: dict[type[Options], list[str]] = {
    Rewrites: ["optimize", "model.onnx"],
    Goal: ["optimize", "model.onnx"],
    Data: ["optimize", "model.onnx"],
    Target: ["optimize", "model.onnx"],
    Run: ["optimize", "model.onnx"],
    Write: ["optimize", "model.onnx"],
    Training: [
        "recover",
        "model.onnx",
        "--teacher",
        "model.onnx",
        "--data",
        "texts.txt",
        "-o",
        "out",
    ],
    Comparison: ["verify", "model.onnx", "model.onnx"],
    Requirements: ["verify", "model.onnx", "model.onnx"],
    Scoring: ["evaluate", "model.onnx"],
    Mteb: ["evaluate", "model.onnx"],
    Timing: ["bench", "model.onnx"],
}
"""A command that has the options of a group, without them."""


def outside(bound: Any) -> list[float]:
    """Values just outside of a bound."""
    limits = {"gt": 0.0, "ge": -1.0, "lt": 0.0, "le": 1.0}
    return [getattr(bound, name) + step for name, step in limits.items() if hasattr(bound, name)]


def invalid(group: type[Options], name: str) -> list[Any]:
    """Values that a field does not take, from its type and its bounds."""
    about = group.option(name)
    if about.kind in (int, float):
        numbers = [value for bound in about.bounds for value in outside(bound)]
        return [*map(about.kind, numbers), math.nan, "nonsense"]
    members = get_args(about.kind)
    if get_origin(about.kind) is tuple and about.bounds:
        items = [(members[0](value),) for bound in about.bounds for value in outside(bound)]
        return [*items, ("nonsense",), "nonsense"]
    if get_origin(about.kind) is tuple and get_origin(members[0]) is Literal:
        return ["nonsense", ("nonsense",)]
    return ["nonsense"] if get_origin(about.kind) is Literal else []


CASES = [
    (group, name, value)
    for group in GROUPS
    for name in group.model_fields
    for value in invalid(group, name)
]
