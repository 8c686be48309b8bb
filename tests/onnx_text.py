"""Models from ONNX text."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

EXP = '<ir_version: 8, opset_import: ["" : 17]> g (float[n] x) => (float[n] y) { y = Exp(x) }'
"""A model without attention."""

SOFTMAX = (
    '<ir_version: 8, opset_import: ["" : 17]> g (float[n, 4] x) => (float[n, 4] y)'
    " { [last] y = Softmax<axis = -1>(x) }"
)
"""A softmax that is no attention; its node is named "last"."""


def with_weights(text: str, /, **weights: np.ndarray) -> ir.Model:
    """The model of a text whose undefined names are these weights; those nobody reads are left out.

    A weight that only the body of a node reads is an initializer of the main graph as well.
    """
    model = ir.from_onnx_text(text)
    for node in list(model.graph.all_nodes()):
        for place, value in enumerate(node.inputs):
            if value is None or value.name not in weights:
                continue
            if value.name not in model.graph.initializers:
                tensor = ir.tensor(weights[value.name], name=value.name)
                model.graph.register_initializer(ir.val(value.name, const_value=tensor))
            node.replace_input_with(place, model.graph.initializers[value.name])
    return model
