"""Refuse weights that are not finite."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from graph_passes.analysis.constants import readers
from graph_passes.analysis.operator_sets import operators
from graph_passes.errors import InvalidModel

__all__ = ["require_finite_weights"]


def require_finite_weights(model: ir.Model) -> None:
    """Refuse weights with NaN, and infinite weights that multiply activations.

    Infinity that is added, selected or compared is legal: masks hold it, and the row of padding in
    a table of biases.

    Raises:
        InvalidModel: A weight is not finite.
    """
    for graph in model.graphs():
        for name, value in graph.initializers.items():
            tensor = value.const_value
            if tensor is None or not tensor.dtype.is_floating_point():
                continue
            array = tensor.numpy()
            with np.errstate(invalid="ignore", over="ignore"):
                total = float(np.sum(array, dtype=np.float64))  # finite if all elements are
            if np.isfinite(total) or array.size == 1 or _is_mask(array):
                continue
            number = "NaN" if np.isnan(array).any() else "infinity"
            uses = [*readers(value)]
            if number == "infinity" and uses and all(_takes_infinity(n, array) for n, _ in uses):
                continue
            raise InvalidModel(
                f"the weight {name!r} {tuple(array.shape)} contains {number}",
                "export the model again from a valid checkpoint",
                code="model.not_finite",
            )


def _takes_infinity(node: ir.Node, array: np.ndarray) -> bool:
    """Whether a node may read this constant, which holds infinities."""
    if node.op_type == "Gather":
        rows = np.isinf(np.moveaxis(array, node.attributes.get_int("axis", 0), 0))
        rows = rows.reshape(len(rows), -1)
        return bool((rows == rows[:, :1]).all())
    return node.op_type in INFINITE


INFINITE = operators(
    "Add Clip Compress Concat Equal Exp Expand GatherElements GatherND Greater GreaterOrEqual If"
    " IsInf Less LessOrEqual Loop Max Min Neg Pad Reshape Scan ScatterElements ScatterND Sigmoid"
    " Slice Softmax Sub Sum Tanh Tile Where"
)
"""Operators whose result is a number for an infinite constant and finite activations, or a mask."""


def _is_mask(array: np.ndarray) -> bool:
    """Whether all elements are 0 or -inf, as in a causal mask."""
    return bool(np.all((array == 0) | np.isneginf(array)))
