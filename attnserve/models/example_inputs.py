"""Generate valid and reproducible random inputs of a model from its graph.

They are used to time a model, and to compare it with its rewritten form if no data is given. Token
ids are inside the vocabulary, and masks are valid.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx_ir as ir

from attnserve.models.masks import is_mask, marks_padding
from attnserve.models.rows import fixed_axes
from attnserve.runtime.interface import Batch
from attnserve.runtime.session import open_session
from graph_passes.analysis.axes import bind_axes, input_shape
from graph_passes.analysis.shapes import SAMPLES
from graph_passes.analysis.workload import Workload
from graph_passes.errors import InvalidArgument, InvalidData, InvalidModel

__all__ = ["example_inputs", "id_bound", "random_batches"]

FALLBACK_IDS = 16
"""Upper bound of ids if the table that they index is unknown."""

SAME_IDS = frozenset({"Cast", "Flatten", "Identity", "Reshape", "Squeeze", "Unsqueeze"})
"""Operators that do not change ids, between an input and the table that it indexes."""

FUSED_TABLES = {0: 2, 1: 4, 8: 3}
"""com.microsoft EmbedLayerNormalization: the input that holds ids -> the input it indexes."""

RANDOM_SHAPES = ((1, 4), (1, 8), (2, 16), (4, 32))
"""(batch, sequence) of the random inputs; models with few positions use the first of them."""

AUDIO_SHAPES = tuple((batch, tokens * SAMPLES) for batch, tokens in RANDOM_SHAPES)
"""(batch, samples) for audio models, which accept no ``RANDOM_SHAPES``: convolutions shorten a
recording."""


def example_inputs(
    model: ir.Model, workload: Workload, seed: int = 0, *, padded: bool = False
) -> dict[str, np.ndarray]:
    """Random inputs of one run, by name, reproducible by seed.

    The first axis is the batch, and every other symbolic axis counts tokens; the mask of a model
    with a cache covers past and new tokens (``bind_axes``). Fixed axes keep their size. Values
    depend on type and name: masks keep all tokens, token types are zeros, position ids count up,
    other integers are random ids of the table that they index (``id_bound``), booleans are true,
    and floats are standard normal.

    Args:
        model: The model; only its graph is read.
        workload: At least one row of one token.
        seed: Seed of ids, floats and padding.
        padded: Let masks of shape (batch, tokens) hide the ends of rows, from random lengths of
            at least half the tokens on. The first row is not padded.

    Raises:
        InvalidArgument: A fixed axis has another size, or the model has too few positions.
        InvalidModel: An input has no shape, or is not numeric.
    """
    batch, sequence = workload.batch, workload.new
    for option, size in (("batch", batch), ("sequence", sequence)):
        if size < 1:
            raise InvalidArgument(
                f"`{option}` is {size}: expected at least 1",
                f"increase `{option}`",
                code="inputs.range",
            )
    random = np.random.default_rng(seed)
    lengths = random.integers((sequence + 1) // 2, sequence, size=batch, endpoint=True)
    lengths[0] = sequence
    inputs: dict[str, np.ndarray] = {}
    axes = bind_axes(model.graph, workload)
    for value in model.graph.inputs:
        # Before IR version 4 a graph lists its initializers among its inputs.
        if value.name is None or value.name in model.graph.initializers:
            continue
        shape = _shape(value, batch, sequence, axes)
        content = _content(value, shape, random)
        if padded and is_mask(value.name) and shape == (batch, sequence):
            content = np.arange(sequence) < lengths[:, None]
            if marks_padding(value.name, _dtype(value)):
                content = ~content
        inputs[value.name] = np.array(content, dtype=_dtype(value), order="C")
    return inputs


def random_batches(
    model: ir.Model, seed: int = 0, *, empty: Mapping[str, int] | None = None
) -> list[Batch]:
    """Valid random inputs at each of ``RANDOM_SHAPES`` that the model accepts; some have padding.

    The number of positions is often not visible in the graph, so each shape is tried, and
    ``AUDIO_SHAPES`` if there is none. Axes of fixed size keep their size.

    Args:
        empty: The empty inputs, and their axis of length 0.

    Raises:
        InvalidArgument, InvalidData: The model runs at none of the shapes.
    """
    session = open_session(model)
    fixed_batch, fixed_sequence = fixed_axes(value.shape for value in model.graph.inputs)
    batches: list[Batch] = []
    failure: InvalidArgument | InvalidData | None = None
    for shapes in (RANDOM_SHAPES, AUDIO_SHAPES):
        for index, (batch, sequence) in enumerate(shapes):
            try:
                workload = Workload.of(
                    fixed_batch or batch,
                    fixed_sequence or sequence,
                    "prompt" if empty else "sequence",
                )
                inputs = example_inputs(model, workload, seed + index, padded=True)
                for name, axis in (empty or {}).items():
                    inputs[name] = inputs[name].take(range(0), axis)
                session.run(None, inputs)
            except (InvalidArgument, InvalidData) as error:  # the model has fewer positions
                failure = failure or error
                break
            batches.append(inputs)
        if batches:
            return batches
    assert failure is not None
    raise failure


def id_bound(value: ir.Value) -> int | None:
    """The number of rows of the smallest table that ``value`` indexes; None if it indexes none.

    A table is a constant that a Gather on axis 0 or a fused embedding reads. Operators that only
    change the shape or type of the ids may be in between.
    """
    bounds: list[int] = []
    reached = [value]
    while reached:
        for node, index in reached.pop().uses():
            if node.op_type in SAME_IDS and index == 0:
                reached.append(node.outputs[0])
            elif (rows := _table_rows(node, index)) is not None:
                bounds.append(rows)
    return min(bounds, default=None)


def _table_rows(node: ir.Node, index: int) -> int | None:
    if node.op_type == "Gather" and index == 1 and node.attributes.get_int("axis", 0) == 0:
        table = node.inputs[0]
    elif node.op_type == "EmbedLayerNormalization" and index in FUSED_TABLES:
        table = node.inputs[FUSED_TABLES[index]]
    else:
        return None
    # A quantized table is dequantized after the lookup; follow it to the integers.
    while table is not None and (producer := table.producer()) is not None:
        if producer.op_type not in ("Cast", "DequantizeLinear", "Identity"):
            break
        table = producer.inputs[0]
    tensor = None if table is None else ir.convenience.get_const_tensor(table)
    rows = tensor.shape[0] if tensor is not None and len(tensor.shape) > 0 else None
    return rows if isinstance(rows, int) else None


def _shape(value: ir.Value, batch: int, sequence: int, axes: Mapping[str, int]) -> tuple[int, ...]:
    if value.shape is None:
        raise InvalidModel(
            f"input {value.name!r} has no shape, so no values can be generated",
            "export the model again, with shapes",
            code="inputs.no_shape",
        )
    # Fixed axes of images and hidden states are not tokens; those of vectors are unknown.
    rank = len(value.shape)
    holds_tokens = _dtype(value).kind in "iub"
    lengths = input_shape(value, axes)
    shape: list[int] = []
    for axis, size in enumerate(value.shape):
        option, requested = ("sequence", sequence) if axis else ("batch", batch)
        if not isinstance(size, int):
            size = requested if lengths is None else lengths[axis]
        elif size != requested and ((axis == 0 and rank > 1) or (rank == 2 and holds_tokens)):
            raise InvalidArgument(
                f"`{option}` is {requested}, but input {value.name!r} has the fixed size {size}",
                f"set `{option}` to {size}, or export the model with a dynamic axis",
                code="inputs.fixed_axis",
            )
        shape.append(size)
    return tuple(shape)


def _content(value: ir.Value, shape: tuple[int, ...], random: np.random.Generator) -> Any:
    """The values of one input, in any data type; the caller casts them."""
    name = (value.name or "").lower()
    kind = _dtype(value).kind
    if kind not in "biuf":
        raise InvalidModel(
            f"input {value.name!r} is of type {value.dtype}: expected numbers",
            "export the model with numeric inputs",
            code="inputs.type",
        )
    if marks_padding(name, _dtype(value)):
        return np.zeros(shape)
    # A float mask of ones keeps all keys, both as a factor and as a constant added to the scores.
    if kind == "b" or is_mask(name):
        return np.ones(shape)
    if kind == "f":
        return random.standard_normal(shape)
    if "token_type" in name or "segment" in name:
        return np.zeros(shape)
    bound = id_bound(value)
    if "position" in name:
        if bound is not None and shape and shape[-1] > bound:
            raise InvalidArgument(
                f"`sequence` is {shape[-1]}, but the model has {bound} positions",
                f"set `sequence` to at most {bound}",
                code="inputs.too_long",
            )
        return np.broadcast_to(np.arange(shape[-1] if shape else 1), shape)
    return random.integers(0, FALLBACK_IDS if bound is None else bound, size=shape)


def _dtype(value: ir.Value) -> np.dtype[Any]:
    if value.dtype in (None, ir.DataType.STRING, ir.DataType.UNDEFINED):
        return np.dtype(object)
    return np.dtype(value.dtype.numpy())
