"""Classify the outputs of a model by their names, shapes and producers."""

from __future__ import annotations

import re
from functools import partial
from weakref import WeakKeyDictionary

import onnx_ir as ir

from attnserve.models.masks import is_mask
from graph_passes.analysis.constants import origin
from graph_passes.analysis.shapes import infer_shapes_small
from graph_passes.errors import InvalidModel

__all__ = [
    "MIN_CLASSES",
    "VECTOR_NAME",
    "counts_tokens",
    "is_cache_name",
    "probability_outputs",
    "require_measurable",
    "resized_outputs",
    "same_outputs",
    "vocabulary_size",
]

CACHE_NAME = re.compile(r"cache|(?<![a-z])(present(?!ation)|past)")
"""Matches cache names, but not for example "representation"."""

VECTOR_NAME = re.compile(r"embed|pooled|pooler|vecs|representation")
"""Matches names of outputs [batch, n] that are embeddings, for any number of columns."""

MIN_CLASSES = 64
"""Minimum number of columns of an output [batch, n] that counts as an embedding, unless its name, a
softmax or as many names of classes show that the columns are classes."""


def resized_outputs(model: ir.Model) -> set[int]:
    """Indices of the outputs whose last axis depends on the lengths of the inputs.

    Its elements are not features. Examples are the logits of the positions of an answer, and of
    texts by images. The result is cached, because a search makes many meters.
    """
    if model not in _RESIZED:
        _RESIZED[model] = set[int]()
        outputs = model.graph.outputs
        if not all(value.shape and isinstance(value.shape[-1], int) for value in outputs):
            small = partial(infer_shapes_small, model)
            one, two = small(batch=2, sequence=5), small(batch=3, sequence=7)
            shapes = [(one.shape(value), two.shape(value)) for value in outputs]
            _RESIZED[model] |= {i for i, (a, b) in enumerate(shapes) if a and b and a[-1] != b[-1]}
    return _RESIZED[model]


_RESIZED: WeakKeyDictionary[ir.Model, set[int]] = WeakKeyDictionary()
"""The results of ``resized_outputs``."""


def same_outputs(model: ir.Model) -> dict[int, int]:
    """Map the index of each output that equals an earlier output to the index of that output."""
    first: dict[ir.Value, int] = {}
    firsts: dict[int, int] = {}
    for index, value in enumerate(model.graph.outputs):
        place = first.setdefault(origin(value), index)
        if place != index:
            firsts[index] = place
    return firsts


def counts_tokens(model: ir.Model, output: ir.Value) -> bool:
    """Whether axis 1 of an output counts tokens, and is not the width of one vector per text.

    A fixed size is a width, unless a mask input has the same size.
    """
    if output.shape is None or len(output.shape) != 2:
        return output.shape is None or len(output.shape) > 2
    if list(model.graph.outputs).index(output) in resized_outputs(model):
        return True
    size = output.shape[1]
    masks = [value.shape for value in model.graph.inputs if is_mask(value.name or "")]
    return isinstance(size, int) and any(mask and mask[-1] == size for mask in masks)


def probability_outputs(model: ir.Model) -> set[int]:
    """Indices of the outputs of a softmax over their last axis."""
    places: set[int] = set()
    for index, value in enumerate(model.graph.outputs):
        node = value.producer()
        while node is not None and node.op_type in ("Cast", "Identity") and node.inputs[0]:
            node = node.inputs[0].producer()
        if node is None or node.op_type != "Softmax" or value.shape is None:
            continue
        last = len(value.shape) - 1
        default = -1 if (model.opset_imports.get("") or 0) >= 13 else 1
        if node.attributes.get_int("axis", default) in (-1, last):
            places.add(index)
    return places


def vocabulary_size(model: ir.Model) -> int:
    """The number of rows of the token table; 0 without one.

    It is the one that ``input_ids`` chooses rows of, or else the largest. Tables of positions may
    have as many rows as the model has columns.
    """
    sizes: dict[bool, list[int]] = {True: [], False: []}
    for node in model.graph:
        if node.op_type != "Gather" or len(node.inputs) < 2:
            continue
        table, ids = node.inputs[:2]
        if table is None or not table.is_initializer() or table.shape is None:
            continue
        size = table.shape[0] if len(table.shape) == 2 else None
        cast = None if ids is None else ids.producer()
        source = cast.inputs[0] if cast is not None and cast.op_type == "Cast" else ids
        if isinstance(size, int):
            sizes[source is not None and source.name == "input_ids"].append(size)
    return max(sizes[True] or sizes[False], default=0)


def require_measurable(model: ir.Model) -> None:
    """Check that the quality of at least one output can be measured.

    Raises:
        InvalidModel: All are caches, integers (such as the index of the best class) or scalars.
    """
    outputs = model.graph.outputs
    if not any(
        not is_cache_name(value.name or "")
        and (value.dtype is None or value.dtype.is_floating_point())
        and (value.shape is None or len(value.shape) > 0)
        for value in outputs
    ):
        names = ", ".join(value.name or "" for value in outputs)
        raise InvalidModel(
            f"no output is a float per input whose quality can be measured: {names or 'none'}",
            "export the model with its hidden states or logits",
            code="quality.no_output",
        )


def is_cache_name(name: str) -> bool:
    """Whether an output is a cache of keys or values, by the names that exporters give."""
    return CACHE_NAME.search(name.lower()) is not None
