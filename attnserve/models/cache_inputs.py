"""Caches that must be empty so that two forms of a model take the same inputs."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import onnx_ir as ir

from attnserve.runtime.interface import Batch
from graph_passes.errors import InvalidData

__all__ = ["empty_axes", "is_reshaped_cache", "require_empty", "shaped_for", "stripped_caches"]


def empty_axes(before: ir.Model, after: ir.Model) -> dict[str, int]:
    """Inputs that must be empty for two models to be comparable, and their axis of length 0.

    These are caches whose heads or head size differ, such as (B, H, P, K) and (B, 1, P, R), because
    neither model can read that of the other; caches that only the first model has; and all other
    inputs with the same length P.
    """
    others = {value.name: value for value in after.graph.inputs}
    pairs = ((value, others[value.name]) for value in before.graph.inputs if value.name in others)
    changed = {a.name or "": a.shape[2] for a, b in pairs if is_reshaped_cache(a, b) and a.shape}
    changed |= stripped_caches(before, after)
    lengths = {str(dim) for dim in changed.values() if not isinstance(dim, int) and dim.value}
    equal_length = {
        value.name or "": axis
        for value in before.graph.inputs
        for axis, dim in enumerate(value.shape or ())
        if str(dim) in lengths
    }
    return {**dict.fromkeys(changed, 2), **equal_length}


def stripped_caches(before: ir.Model, after: ir.Model) -> dict[str, ir.SymbolicDim]:
    """The caches (B, H, P, K) that the other model does not have, and their P (``StripCache``)."""
    kept = {value.name for value in after.graph.inputs}
    return {
        value.name or "": length
        for value in before.graph.inputs
        if value.name not in kept and value.shape is not None and len(value.shape) == 4
        if isinstance(length := value.shape[2], ir.SymbolicDim)
    }


def is_reshaped_cache(a: ir.Value, b: ir.Value) -> bool:
    """Whether a value (B, H, T, K) with free T has another H or K in the other model."""
    if a.shape is None or b.shape is None or not len(a.shape) == len(b.shape) == 4:
        return False
    other = [axis for axis in range(4) if a.shape[axis] != b.shape[axis]]
    return bool(other) and set(other) <= {1, 3} and not isinstance(a.shape[2], int)


def require_empty(batches: Sequence[Batch], empty: Collection[str]) -> None:
    """Refuse data with filled caches, which only one of the models can read.

    Raises:
        InvalidData: A cache is not empty.
    """
    for batch in batches:
        for name in empty:
            if name in batch and batch[name].size:
                raise InvalidData(
                    f"the cache {name!r} has shape {batch[name].shape}: expected length 0, because "
                    "the rewritten model has a different cache layout",
                    "use whole sequences, empty caches, and masks of the sequences' length",
                    code="compare.cache_not_empty",
                )


def shaped_for(model: ir.Model, batch: Batch, empty: Collection[str]) -> Batch:
    """The inputs of a model from a batch; empty caches are reshaped, or left out if stripped."""
    missing = set(empty) - {value.name for value in model.graph.inputs}
    feed = {name: array for name, array in batch.items() if name not in missing}
    for value in model.graph.inputs:
        name = value.name or ""
        array = batch.get(name)
        if name not in empty or array is None or value.shape is None:
            continue
        if len(value.shape) == array.ndim:  # otherwise the model reports the error
            pairs = zip(value.shape, array.shape, strict=True)
            feed[name] = array.reshape([a if isinstance(a, int) else n for a, n in pairs])
    return feed
