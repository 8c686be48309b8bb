"""Block names, from the common path of node and weight names; stable across rewrites."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace

import onnx_ir as ir

from graph_passes.analysis.constants import is_constant
from graph_passes.blocks import AttentionBlock, Block, BlockT

__all__ = [
    "assign_names",
    "attention_name",
    "common_path",
    "pin_inserted",
    "pin_name",
    "pin_names",
    "pinned_name",
]

REWRITE_MARK = re.compile("/(collaborative|fused|pruned|reuse)/")
"""Part of the names of nodes that a rewrite of this package inserts, after the block's name."""

SKIP_MARK = "/skip/"
"""The same for nodes that replace a removed block."""

NAME_KEY = "attnserve.name"
"""Key in ``metadata_props`` of a block's product: the name of the block."""


def pin_names(blocks: Iterable[Block]) -> None:
    """Record block names in the graph, so that rewrites preserve them."""
    for block in blocks:
        pin_name(block.product, block.name)


def pin_name(product: ir.Node, name: str) -> None:
    """Record the name of a block at its product."""
    product.metadata_props[NAME_KEY] = name


def pin_inserted(nodes: Iterable[ir.Node], names: Collection[str]) -> None:
    """Record the blocks of inserted nodes, whose names begin with the name of the block and "/".

    Blocks whose nodes have a mark need no record.
    """
    block_names = {node: (node.name or "").partition("/")[0] for node in nodes}
    marked = {
        name
        for node, name in block_names.items()
        if REWRITE_MARK.search(node.name or "") or SKIP_MARK in (node.name or "")
    }
    for node, name in block_names.items():
        if name in names and name not in marked:
            pin_name(node, name)


def pinned_name(product: ir.Node) -> str | None:
    """The recorded block name of a product, if any."""
    return product.metadata_props.get(NAME_KEY)


def assign_names(
    blocks: Sequence[BlockT], prefix: str, derive_name: Callable[[BlockT], str]
) -> list[BlockT]:
    """Assign each block its recorded or derived name if that is unique, or <prefix>_<index>."""
    names = [pinned_name(block.product) or derive_name(block) for block in blocks]
    return [
        replace(block, name=name if name and names.count(name) == 1 else f"{prefix}_{index}")
        for index, (block, name) in enumerate(zip(blocks, names, strict=True))
    ]


def attention_name(block: AttentionBlock) -> str:
    """The common path of the names of the projections' nodes and constants, or an empty string.

    Nodes of a rewritten block contain its name.
    """
    for node in (*block.q.nodes[:1], *block.v.nodes[:1]):
        if (mark := REWRITE_MARK.search(node.name or "")) is not None:
            return (node.name or "")[: mark.start()]
    groups: list[list[str | None]] = []
    for projection in (block.q, block.k, block.v) if block.q.nodes else (block.v,) * 3:
        weight = None if projection.weight is None else projection.weight.value
        values = [v for node in projection.nodes[:2] for v in (weight, *node.inputs)]
        constants = [value.name for value in values if is_constant(value)]
        groups.append([*(node.name for node in projection.nodes[:1]), *constants])
    return common_path(groups)


def common_path(groups: Sequence[Sequence[str | None]]) -> str:
    """The first common dotted path of one name of each group that contains a number, if any."""
    paths = [[[p for p in re.split(r"[/.]", n or "") if p] for n in group] for group in groups]
    for first, *others in itertools.product(*paths):
        levels = zip(first[:-1], *others, strict=False)
        common = [level[0] for level in itertools.takewhile(lambda v: len(set(v)) == 1, levels)]
        if len(common) > 1 and any(c.isdigit() for part in common for c in part):
            return ".".join(common)
    return ""
