"""Run a model on calibration batches and read activations inside it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from attnserve.calibration.layerwise import LayerwiseRunner
from attnserve.context import RunContext
from attnserve.runtime.session import Batch
from graph_passes.blocks import AttentionBlock
from graph_passes.errors import InvalidData

if TYPE_CHECKING:
    from jaxtyping import Float

__all__ = ["by_head", "no_token", "not_finite", "observe", "probabilities_by_head"]


def observe(
    model: ir.Model,
    values: Sequence[Sequence[ir.Value]],
    batches: Sequence[Batch],
    context: RunContext,
    stage: str,
) -> Iterator[tuple[Batch, list[list[np.ndarray]]]]:
    """Yield each batch with the arrays of these values.

    One batch is in memory at a time, and nodes behind the last of the values do not run.

    Args:
        values: Groups of values, for example one group per block.
        stage: The name under which progress is reported, after each batch.

    Raises:
        InvalidData: The model refuses a batch.
    """
    wanted = list(dict.fromkeys(value for group in values for value in group))
    if not wanted:
        return
    progress = context.stage(stage)
    runs = LayerwiseRunner(model, batches, context=context).peek(wanted)
    for done, (batch, arrays) in enumerate(zip(batches, runs, strict=True), start=1):
        by_value = dict(zip(wanted, arrays, strict=True))
        yield batch, [[by_value[value] for value in group] for group in values]
        progress(done, len(batches))


def by_head(block: AttentionBlock, context: np.ndarray) -> Float[np.ndarray, "B H S V"]:
    """The attention context of a block with its heads on an axis of their own."""
    if block.context_axes is None and context.ndim == 3:
        return context.reshape(*context.shape[:2], block.num_heads, -1).swapaxes(1, 2)
    if block.context_axes is not None:
        context = context.transpose(block.context_axes)
    return context.reshape(-1, block.num_heads, *context.shape[-2:])


def probabilities_by_head(
    block: AttentionBlock, arrays: Sequence[np.ndarray]
) -> Float[np.ndarray, "B H S T"]:
    """The attention probabilities of all heads of a block, from its ``probability_values``."""
    if block.probabilities is not None:
        return arrays[0].reshape(-1, block.num_heads, *arrays[0].shape[-2:])
    own = arrays[: len(arrays) - len(block.reused)]
    parts = [array.reshape(-1, block.q.num_heads, *array.shape[-2:]) for array in own]
    heads = [block.own_heads] * len(own)
    for reused, array in zip(block.reused, arrays[len(own) :], strict=True):
        parts.append(array[:, reused.sources])
        heads.append(reused.heads)
    return np.concatenate(parts, axis=1)[:, np.argsort(np.concatenate(heads))]


def no_token(name: str) -> InvalidData:
    """The error for data whose masks hide every token."""
    return InvalidData(
        f"{name}: the calibration data has no unmasked token",
        "check the mask input",
        code="calibration.no_token",
    )


def not_finite(name: str, what: str = "activations") -> InvalidData:
    """The error for NaN or infinite activations."""
    return InvalidData(
        f"{name}: the {what} on the calibration data are not finite",
        "check the model and the data",
        code="calibration.not_finite",
    )
