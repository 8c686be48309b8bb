"""Graphs of residual additions and norms, for the passes that fuse them."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from tests.graph_passes.graphs import D, graph

INPUTS = f"float[batch, sequence, {D}] x, float[batch, sequence, {D}] y"

POST = """
 sum = Add(x, y)
 out = LayerNormalization(sum, gain, shift)"""

TWICE = """
 sum = Add(x, y)
 a = LayerNormalization(sum, gain, shift)
 b = LayerNormalization(sum, shift, gain)
 out = Add(a, b)"""


def build(body: str, inputs: str = INPUTS) -> ir.Model:
    random = np.random.default_rng(0)
    constants = {
        "gain": random.standard_normal(D).astype(np.float32),
        "shift": random.standard_normal(D).astype(np.float32),
        "W": random.standard_normal((D, D)).astype(np.float32),
        "matrix": random.standard_normal((5, D)).astype(np.float32),
    }
    return graph(body, inputs=inputs, constants=constants)
