"""The properties of a graph that serving needs, as JSON for another process.

Reading a graph takes seconds, and the file may be untrusted, so the service computes them in a
child process.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import numpy as np
import onnx_ir as ir

from attnserve.models.artifact import Artifact
from attnserve.models.example_inputs import example_inputs, id_bound
from attnserve.models.onnx_files import external_data_locations, load_model
from attnserve.models.quantized import batch_invariant, int8_warning
from attnserve.models.rows import fixed_axes
from attnserve.precision.convert import precision_of
from attnserve.runtime.external_data import weight_bytes
from attnserve.runtime.inference_precision import computes_in_bfloat16
from graph_passes.analysis.cost import Cost, Polynomial, model_cost
from graph_passes.analysis.workload import Workload
from graph_passes.errors import AttnserveError

__all__ = ["WARM_UP_ROWS", "GraphFacts"]

WARM_UP_ROWS, WARM_UP_LENGTHS = 3, (8, 2, 1)
"""Rows and lengths of the first run; lengths are tried until the model accepts one."""


@dataclass(frozen=True, eq=False)
class GraphFacts:
    """Properties of a graph, without a reference to it.

    Attributes:
        cost: Cost of the graph; its inputs are copies, because graph inputs would keep the graph
            and all weights in memory.
        id_bounds: Number of valid ids of each input with token ids.
        examples: Inputs of the first run at several lengths; empty if none can be made.
        int8_warning: Why int8 products are inexact on this CPU; None if they are exact.
        batch_invariant: Whether the quantization of a row does not depend on its batch.
        weight_bytes: Size of the weights.
        external: Locations of the external data in the model's folder.
        precision: The data types of the weights.
        in_bfloat16: Whether float32 operators are computed in bfloat16.
    """

    cost: Cost
    id_bounds: Mapping[str, int]
    examples: Sequence[Mapping[str, np.ndarray]]
    int8_warning: str | None
    batch_invariant: bool
    weight_bytes: int
    external: tuple[str, ...]
    precision: str
    in_bfloat16: bool

    @classmethod
    def read(cls, artifact: Artifact) -> GraphFacts:
        """Read the graph of a model.

        Raises:
            InvalidModel: The model cannot be read.
        """
        graph = load_model(artifact, in_place=True)
        cost = model_cost(graph)
        shapes = {name: ir.Value(name=name, shape=v.shape) for name, v in cost.inputs.items()}
        bounds = ((value.name or "", id_bound(value)) for value in graph.graph.inputs)
        return cls(
            replace(cost, inputs=shapes),
            {name: bound for name, bound in bounds if bound},
            _examples(graph),
            int8_warning(graph),
            batch_invariant(graph),
            weight_bytes(graph),
            tuple(sorted(external_data_locations(artifact.model))),
            precision_of(graph),
            computes_in_bfloat16(graph),
        )

    def cost_json(self) -> dict[str, Any]:
        """The properties in which an equivalent graph differs, as JSON values."""
        macs = self.cost.macs
        return {
            "macs": None if macs is None else _polynomial_to_json(macs),
            "node_bytes": [_polynomial_to_json(size) for size in self.cost.node_bytes],
            "parameters": self.cost.parameters,
            "bytes": self.cost.bytes,
            "uncounted": list(self.cost.uncounted),
            "inputs": {
                name: value.shape and [d if isinstance(d, int) else d.value for d in value.shape]
                for name, value in self.cost.inputs.items()
            },
            "weight_bytes": self.weight_bytes,
        }

    def with_costs(self, costs: Mapping[str, Any]) -> GraphFacts:
        """The facts of an equivalent graph with this ``cost_json``."""
        return self.from_json({**self.to_json(), **costs})

    def to_json(self) -> dict[str, Any]:
        """The properties as JSON values; arrays are base64 of the npz format."""
        return {
            **self.cost_json(),
            "id_bounds": dict(self.id_bounds),
            "examples": [_encoded(example) for example in self.examples],
            "int8_warning": self.int8_warning,
            "batch_invariant": self.batch_invariant,
            "external": list(self.external),
            "precision": self.precision,
            "in_bfloat16": self.in_bfloat16,
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> GraphFacts:
        """The inverse of ``to_json``."""
        inputs = {
            name: ir.Value(name=name, shape=None if dims is None else ir.Shape(dims))
            for name, dims in content["inputs"].items()
        }
        return cls(
            Cost(
                content["macs"] and _polynomial_from_json(content["macs"]),
                content["parameters"],
                content["bytes"],
                tuple(content["uncounted"]),
                inputs,
                tuple(map(_polynomial_from_json, content["node_bytes"])),
            ),
            content["id_bounds"],
            [_decoded(text) for text in content["examples"]],
            content["int8_warning"],
            content["batch_invariant"],
            content["weight_bytes"],
            tuple(content["external"]),
            content["precision"],
            content["in_bfloat16"],
        )


def _polynomial_to_json(polynomial: Polynomial) -> list[Any]:
    terms = [[list(powers), *c.as_integer_ratio()] for powers, c in polynomial.terms.items()]
    return [list(polynomial.axes), terms]


def _polynomial_from_json(content: list[Any]) -> Polynomial:
    axes, terms = content
    return Polynomial(tuple(axes), {tuple(powers): Fraction(n, d) for powers, n, d in terms})


def _encoded(arrays: Mapping[str, np.ndarray]) -> str:
    file = io.BytesIO()
    np.savez(file, allow_pickle=False, **arrays)
    return base64.b64encode(file.getvalue()).decode()


def _decoded(text: str) -> dict[str, np.ndarray]:
    with np.load(io.BytesIO(base64.b64decode(text)), allow_pickle=False) as arrays:
        return dict(arrays)


def _examples(graph: ir.Model) -> list[dict[str, np.ndarray]]:
    examples: list[dict[str, np.ndarray]] = []
    shapes = [value.shape for value in graph.graph.inputs if value.shape is not None]
    axis = shapes[0][0] if shapes and len(shapes[0]) else None
    rows = axis if isinstance(axis, int) else WARM_UP_ROWS
    _, tokens = fixed_axes(shapes)
    for length in WARM_UP_LENGTHS if tokens is None else (tokens,):
        with suppress(AttnserveError):  # fixed axes of another length, or unsupported types
            examples.append(example_inputs(graph, Workload.of(rows, length)))
    return examples
