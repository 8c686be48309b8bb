"""Read activations inside a model: the batches, the values and their layout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import onnx_ir as ir

from graph_passes.blocks import AttentionBlock

if TYPE_CHECKING:
    from jaxtyping import Float

__all__ = ["by_head", "evenly", "probabilities_by_head", "probabilities_of"]

T = TypeVar("T")


def evenly(items: Sequence[T], most: int) -> list[T]:
    """At most ``most`` of the items, spread evenly."""
    count = min(len(items), most)
    return [items[int((i + 0.5) * len(items) / count)] for i in range(count)]


def by_head(block: AttentionBlock, array: np.ndarray) -> Float[np.ndarray, "B H S V"]:
    """The elements of ``block.context``, with the heads on an axis of their own."""
    if block.context_axes is None:
        return array.reshape(*array.shape[:2], block.num_heads, -1).swapaxes(1, 2)
    array = array.transpose(block.context_axes)
    return array.reshape(-1, block.num_heads, *array.shape[-2:])


def probabilities_of(block: AttentionBlock) -> tuple[ir.Value, ...]:
    """The ``probability_values`` of a block, which must be in the graph."""
    values = block.probability_values
    assert values, f"{block.name}: its probabilities are not in the graph"
    return values


def probabilities_by_head(
    block: AttentionBlock, arrays: Sequence[np.ndarray]
) -> Float[np.ndarray, "B H S T"]:
    """The attention probabilities of all heads of a block.

    Args:
        arrays: The elements of ``block.probability_values``.
    """
    if block.probabilities is not None:
        return arrays[0].reshape(-1, block.num_heads, *arrays[0].shape[-2:])
    own = arrays[: len(arrays) - len(block.reused)]
    arrays_by_head = [array.reshape(-1, block.q.num_heads, *array.shape[-2:]) for array in own]
    heads = [block.own_heads] * len(own)
    for reused, array in zip(block.reused, arrays[len(own) :], strict=True):
        arrays_by_head.append(array[:, reused.sources])
        heads.append(reused.heads)
    return np.concatenate(arrays_by_head, axis=1)[:, np.argsort(np.concatenate(heads))]
