"""The data types of the weights of attention and feed-forward blocks, before and after a rewrite.

A rewrite writes new weights in float32 also where those of the original are quantized.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import onnx_ir as ir

from attnserve.models.quantized import quantized_node
from attnserve.planning.plan import Plan
from attnserve.precision.convert import NAMES, nodes_of_blocks
from graph_passes.analysis.constants import constant_tensor, is_constant
from graph_passes.errors import InvalidArgument

__all__ = ["BlockPrecision", "changed_precisions", "describe_precisions", "precision_of_block"]


@dataclass(frozen=True)
class BlockPrecision:
    """Data types of the weights of a block, most elements first: "int8" or "int8+float32".

    Attributes:
        after: None if the block has no weights any more.
    """

    before: str
    after: str | None


def precision_of_block(model: ir.Model, block: str) -> str | None:
    """The data types of a block's weights; None if there is no such block, or no weights."""
    try:
        nodes = nodes_of_blocks(model, [block])
    except InvalidArgument:
        return None
    weights = {id(t): t for node in nodes for value in node.inputs for t in _matrices(value)}
    sizes: Counter[str] = Counter()
    for tensor in weights.values():
        sizes[NAMES.get(tensor.dtype, tensor.dtype.name.lower())] += tensor.size
    return "+".join(name for name, _ in sizes.most_common()) or None


def _matrices(value: ir.Value | None) -> list[ir.TensorProtocol]:
    """The tensors of rank 2 or more that a constant is made of, except integers such as shapes."""
    if value is None or not is_constant(value):
        return []
    tensor, node = constant_tensor(value), value.producer()
    if tensor is not None:
        dtype = tensor.dtype
        is_weight = dtype.is_floating_point() or dtype.bitwidth <= 8
        return [tensor] if is_weight and len(tensor.shape) > 1 else []
    return [] if node is None else [t for one in node.inputs for t in _matrices(one)]


def changed_precisions(
    original: ir.Model, rewritten: ir.Model, plan: Plan
) -> Mapping[str, BlockPrecision]:
    """The precisions of the blocks that a plan changes, if the original holds quantized weights.

    Args:
        rewritten: The rewritten model, before its conversion to the precision of the plan.
    """
    if quantized_node(original) is None:
        return {}
    found: dict[str, BlockPrecision] = {}
    for block in plan.changed:
        before, after = precision_of_block(original, block), precision_of_block(rewritten, block)
        if after is not None and plan.precision != "float32" and block not in plan.float_blocks:
            converted = [plan.precision if name == "float32" else name for name in after.split("+")]
            after = "+".join(dict.fromkeys(converted))
        if before is not None:
            found[block] = BlockPrecision(before, after)
    return found


def describe_precisions(changes: Mapping[str, BlockPrecision]) -> str | None:
    """The changes in one line; None if there are none."""
    groups: dict[BlockPrecision, list[str]] = {}
    for block, change in changes.items():
        groups.setdefault(change, []).append(block)
    parts = [_describe(change, blocks) for change, blocks in groups.items()]
    return "; ".join(parts) or None


def _describe(change: BlockPrecision, blocks: Collection[str]) -> str:
    names = ", ".join(blocks)
    if change.after is None:
        return f"{change.before} weights were removed in {names}"
    if change.after == change.before:
        return f"weights stayed {change.before} in {names}"
    return f"{change.before} weights became {change.after} in {names}"
