"""Values that a model accepts, made from its graph alone.

Timing a model, and comparing it with its rewritten form where no text is given, need inputs that
are valid (token ids inside the vocabulary, masks that mask something or nothing) and reproducible.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from graph_passes.errors import InvalidArgument, InvalidModel

__all__ = ["example_inputs", "id_bound"]

FALLBACK_IDS = 16
"""Ids are drawn below this where the graph does not show which table they index."""

SAME_IDS = frozenset({"Cast", "Flatten", "Identity", "Reshape", "Squeeze", "Unsqueeze"})
"""Operators between an input and the table it indexes that leave the ids what they are."""

FUSED_TABLES = {0: 2, 1: 4, 8: 3}
"""com.microsoft EmbedLayerNormalization: the input that holds ids -> the input it indexes."""


def example_inputs(
    model: ir.Model, batch: int, sequence: int, seed: int = 0, *, padded: bool = False
) -> dict[str, np.ndarray]:
    """Random inputs of one shape, by name, the same for the same seed.

    The first axis is the batch, every other symbolic axis the sequence, and an axis of fixed size
    keeps its size. By type and name: a mask is all ones, token types are zeros, position ids count
    up, other integers are ids drawn from the table that they index (``id_bound``), booleans are
    true, floats are normal.

    Args:
        model: Only its graph is read; weights stay on disk.
        batch: Rows, at least 1.
        sequence: Tokens a row, at least 1.
        seed: Of the ids, the floats and the padding.
        padded: Masks of shape (batch, sequence) end in zeros, at lengths drawn between half the
            sequence and all of it; the first row stays full.

    Raises:
        InvalidArgument: A fixed axis of the model is not of the size asked for, or there are fewer
            positions than tokens.
        InvalidModel: An input has no shape, or a type that holds no number.
    """
    for option, size in (("batch", batch), ("sequence", sequence)):
        if size < 1:
            raise InvalidArgument(
                f"{option} is {size}: expected at least 1", f"raise {option}", code="inputs.range"
            )
    random = np.random.default_rng(seed)
    lengths = random.integers((sequence + 1) // 2, sequence, size=batch, endpoint=True)
    lengths[0] = sequence
    inputs: dict[str, np.ndarray] = {}
    for value in model.graph.inputs:
        # Before IR version 4 a graph lists its initializers among its inputs.
        if value.name is None or value.name in model.graph.initializers:
            continue
        shape = _shape(value, batch, sequence)
        content = _content(value, shape, random)
        if padded and "mask" in value.name.lower() and shape == (batch, sequence):
            content = np.arange(sequence) < lengths[:, None]
        inputs[value.name] = np.array(content, dtype=_dtype(value), order="C")
    return inputs


def id_bound(value: ir.Value) -> int | None:
    """How many rows the smallest table has that ``value`` indexes; None where it indexes none.

    A table is a constant whose first axis a Gather (or a fused embedding) reads, at the ids as they
    come or after operators that only change their shape or type.
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
    # A quantized table is read before it is scaled: look through to the integers.
    while table is not None and (producer := table.producer()) is not None:
        if producer.op_type not in ("Cast", "DequantizeLinear", "Identity"):
            break
        table = producer.inputs[0]
    tensor = None if table is None else ir.convenience.get_const_tensor(table)
    rows = tensor.shape[0] if tensor is not None and len(tensor.shape) > 0 else None
    return rows if isinstance(rows, int) else None


def _shape(value: ir.Value, batch: int, sequence: int) -> tuple[int, ...]:
    if value.shape is None:
        raise InvalidModel(
            f"input {value.name!r} has no shape: its values cannot be made",
            "export the model again, with shapes",
            code="inputs.no_shape",
        )
    # Of an image or a hidden state the fixed axes are not tokens; of a vector they may be anything.
    rank, holds_tokens = len(value.shape), _dtype(value).kind in "iub"
    shape: list[int] = []
    for axis, size in enumerate(value.shape):
        option, asked = ("sequence", sequence) if axis else ("batch", batch)
        if not isinstance(size, int):
            size = asked
        elif size != asked and ((axis == 0 and rank > 1) or (rank == 2 and holds_tokens)):
            raise InvalidArgument(
                f"input {value.name!r} has a fixed {option} of {size}, asked for {asked}",
                f"use {option} {size}, or export the model with a dynamic axis",
                code="inputs.fixed_axis",
            )
        shape.append(size)
    return tuple(shape)


def _content(value: ir.Value, shape: tuple[int, ...], random: np.random.Generator) -> Any:
    """The values of one input, in any type: the caller casts them to the input's."""
    name = (value.name or "").lower()
    kind = _dtype(value).kind
    if kind not in "biuf":
        raise InvalidModel(
            f"input {value.name!r} is of type {value.dtype}: expected numbers",
            "export the model with numeric inputs",
            code="inputs.type",
        )
    # Ones in a mask of floats are right twice: "keep" where it is a factor, and the same for every
    # key, which softmax ignores, where it is added to the scores.
    if kind == "b" or "mask" in name:
        return np.ones(shape)
    if kind == "f":
        return random.standard_normal(shape)
    if "token_type" in name or "segment" in name:
        return np.zeros(shape)
    bound = id_bound(value)
    if "position" in name:
        if bound is not None and shape and shape[-1] > bound:
            raise InvalidArgument(
                f"sequence {shape[-1]} is longer than the {bound} positions of the model",
                f"use a sequence of at most {bound}",
                code="inputs.too_long",
            )
        return np.broadcast_to(np.arange(shape[-1] if shape else 1), shape)
    return random.integers(0, FALLBACK_IDS if bound is None else bound, size=shape)


def _dtype(value: ir.Value) -> np.dtype[Any]:
    if value.dtype is None or value.dtype == ir.DataType.STRING:
        return np.dtype(object)
    return np.dtype(value.dtype.numpy())
