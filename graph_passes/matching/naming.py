"""What blocks are called: by what their nodes and weights agree on, and still after a rewrite."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Protocol

import onnx_ir as ir

from graph_passes.analysis.constants import is_constant
from graph_passes.blocks import AttentionBlock

__all__ = ["assign_names", "pin_name", "pin_names", "pinned_name"]

REWRITTEN = re.compile("/(collaborative|fused|pruned|reuse)/")
"""Stands in the names of what a rewrite puts into a graph, after the block's name."""

PINNED = "attnserve.name"
"""Key of a node's ``metadata_props``: the name of the block whose product it is."""


class Named(Protocol):
    """A block: attention or feed-forward."""

    @property
    def name(self) -> str: ...
    @property
    def product(self) -> ir.Node: ...


def pin_names(blocks: Iterable[Named]) -> None:
    """Record the names of blocks in their graph, so that rewrites do not change them."""
    for block in blocks:
        pin_name(block.product, block.name)


def pin_name(product: ir.Node, name: str) -> None:
    """Record the name of the block whose product this node is."""
    product.metadata_props[PINNED] = name


def pinned_name(product: ir.Node) -> str | None:
    """The name that was recorded for the block of this node."""
    return product.metadata_props.get(PINNED)


def assign_names(blocks: Sequence[AttentionBlock]) -> list[AttentionBlock]:
    """Names the exporter's own nodes and weights agree on, else attention_<index>."""
    names = [_common_name(block) for block in blocks]
    return [
        replace(block, name=name if name and names.count(name) == 1 else f"attention_{index}")
        for index, (block, name) in enumerate(zip(blocks, names, strict=True))
    ]


def _common_name(block: AttentionBlock) -> str:
    """The dotted path that the names of the projections' nodes and constants share.

    A rewritten block has its name in those of its nodes.
    """
    if (pinned := pinned_name(block.product)) is not None:
        return pinned
    for node in (*block.q.nodes[:1], *block.v.nodes[:1]):
        if (mark := REWRITTEN.search(node.name or "")) is not None:
            return (node.name or "")[: mark.start()]
    groups: list[list[str]] = []
    parts = (block.q, block.k, block.v) if block.q.nodes else (block.v,) * 3
    for projection in parts:
        constants = [
            value
            for node in projection.nodes[:2]
            for value in (projection.weight, *node.inputs)
            if is_constant(value)
        ]
        names = [assign_names.name or "" for assign_names in (*projection.nodes[:1], *constants)]
        groups.append([name for name in names if len(_parts(name)) > 1])
    for q in groups[0]:
        for k in groups[1]:
            for v in groups[2]:
                paths = [_parts(name) for name in (q, k, v)]
                common = _common_start(*paths, paths[0][:-1])
                if len(common) > 1 and any(c.isdigit() for part in common for c in part):
                    return ".".join(common)
    return ""


def _common_start(*paths: list[str]) -> list[str]:
    same = [len(set(parts)) == 1 for parts in zip(*paths, strict=False)]
    return paths[0][: same.index(False) if False in same else len(same)]


def _parts(name: str) -> list[str]:
    return [part for part in re.split(r"[/.]", name) if part]
