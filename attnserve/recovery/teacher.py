"""The outputs and hidden states of the original, which a distillation learns."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial

import numpy as np
import onnx_ir as ir

from attnserve.context import RunContext
from attnserve.models.output_kinds import is_cache_name
from attnserve.runtime.interface import Batch
from attnserve.runtime.session import open_session
from graph_passes.blocks import AttentionBlock
from graph_passes.matching.find import find_attention

__all__ = ["matching_states", "open_teacher", "remembered", "without_caches"]

KEPT_BYTES = 2**30
"""Memory for the outputs of a teacher that one ``remembered`` keeps."""


def matching_states(teacher: ir.Model, student: ir.Model) -> list[tuple[ir.Value, ir.Value]]:
    """Pairs of the same hidden state in both graphs: the inputs of each attention block.

    After the first layer, this state is the residual stream, or its normalization if the layer
    normalizes first. Blocks are paired in order, or by name if a graph has fewer blocks. Without
    pairs, only the outputs are learned.
    """
    ours, theirs = (_blocks(model) for model in (student, teacher))
    if len(ours) == len(theirs):
        pairs = [*zip(theirs, ours, strict=True)]
    else:
        by_name = {block.name: block for block in theirs}
        pairs = [(by_name[block.name], block) for block in ours if block.name in by_name]
    states = dict.fromkeys(
        (a.x, b.x) for a, b in pairs if _is_inside(teacher, a.x) and _is_inside(student, b.x)
    )
    return [*states]


def _blocks(model: ir.Model) -> list[AttentionBlock]:
    return [block for block in find_attention(model).blocks if block.graph is model.graph]


def _is_inside(model: ir.Model, value: ir.Value) -> bool:
    node = value.producer()
    return node is not None and node.graph is model.graph and not value.is_graph_output()


def open_teacher(
    model: ir.Model, states: Sequence[ir.Value], context: RunContext
) -> Callable[[Batch], list[np.ndarray]]:
    """Return a function of a batch to the outputs of a model by ONNX Runtime, then some states.

    States are in float32. The function raises InvalidData if the model refuses the batch.
    """
    model = model.clone()
    values = {value.name: value for node in model.graph for value in node.outputs}
    for state in states:
        # A cast needs no element type, and numpy has none for bfloat16.
        cast = ir.node("Cast", [values[state.name]], {"to": ir.DataType.FLOAT})
        output = cast.outputs[0]
        output.name, output.type = f"{state.name}.float", ir.TensorType(ir.DataType.FLOAT)
        model.graph.append(cast)
        model.graph.outputs.append(output)
    return partial(open_session(model, context.device).run, None)


def without_caches(
    teacher: Callable[[Batch], list[np.ndarray]], names: Sequence[str]
) -> Callable[[Batch], list[np.ndarray]]:
    """Return a function of a batch to one output for each name; caches are empty arrays."""

    def outputs(batch: Batch) -> list[np.ndarray]:
        pairs = zip(names, teacher(batch), strict=False)
        return [np.empty(0, np.float32) if is_cache_name(name) else array for name, array in pairs]

    return outputs


def remembered(
    teacher: Callable[[Batch], list[np.ndarray]], kept: Callable[[np.ndarray], np.ndarray]
) -> Callable[[Hashable, Batch], list[np.ndarray]]:
    """Return a function of a key and a batch that caches the outputs for this batch.

    Outputs are kept up to ``KEPT_BYTES``; outputs of other batches are computed again.

    Args:
        kept: Converts an output to the array that is kept.
    """
    known: dict[Hashable, list[np.ndarray]] = {}

    def outputs(key: Hashable, batch: Batch) -> list[np.ndarray]:
        if key in known:
            return known[key]
        arrays = teacher(batch)
        if sum(array.nbytes for others in known.values() for array in others) < KEPT_BYTES:
            known[key] = [kept(array) for array in arrays]
        return arrays

    return outputs
