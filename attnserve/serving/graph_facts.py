"""The properties of a graph that serving needs, as JSON for another process.

Reading a graph takes seconds, and the file may be untrusted, so the service computes them in a
child process.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping
from contextlib import suppress
from fractions import Fraction
from typing import Annotated, Any

import numpy as np
import onnx_ir as ir
from pydantic import PlainSerializer, PlainValidator

from attnserve.models.artifact import Artifact
from attnserve.models.example_inputs import example_inputs, id_bound
from attnserve.models.onnx_files import external_data_locations, load_model
from attnserve.models.quantized import batch_invariant, int8_warning
from attnserve.models.recorded import Recorded
from attnserve.models.rows import fixed_axes
from attnserve.precision.convert import precision_of
from attnserve.runtime.external_data import weight_bytes
from attnserve.runtime.inference_precision import computes_in_bfloat16
from attnserve.serving.signature import Axes
from graph_passes.analysis.cost import Cost, Polynomial, model_cost
from graph_passes.analysis.workload import Workload
from graph_passes.errors import AttnserveError

__all__ = ["WARM_UP_ROWS", "GraphCost", "GraphFacts"]

WARM_UP_ROWS, WARM_UP_LENGTHS = 3, (8, 2, 1)
"""Rows and lengths of the first run; lengths are tried until the model accepts one."""


def _read_polynomial(content: Any) -> Polynomial:
    if isinstance(content, Polynomial):
        return content
    axes, terms = content
    return Polynomial(tuple(axes), {tuple(powers): Fraction(n, d) for powers, n, d in terms})


def _polynomial_to_json(polynomial: Polynomial) -> list[Any]:
    terms = [[list(powers), *c.as_integer_ratio()] for powers, c in polynomial.terms.items()]
    return [list(polynomial.axes), terms]


JsonPolynomial = Annotated[
    Polynomial, PlainValidator(_read_polynomial), PlainSerializer(_polynomial_to_json)
]
"""JSON has the axes, and the exponents, the numerator and the denominator of each term."""


def _read_arrays(content: Any) -> Mapping[str, np.ndarray]:
    if not isinstance(content, str):
        return content
    with np.load(io.BytesIO(base64.b64decode(content)), allow_pickle=False) as arrays:
        return dict(arrays)


def _arrays_to_json(arrays: Mapping[str, np.ndarray]) -> str:
    file = io.BytesIO()
    np.savez(file, allow_pickle=False, **arrays)
    return base64.b64encode(file.getvalue()).decode()


JsonArrays = Annotated[
    Mapping[str, np.ndarray], PlainValidator(_read_arrays), PlainSerializer(_arrays_to_json)
]
"""JSON has base64 of the npz format."""


class GraphCost(Recorded, frozen=True):
    """The properties in which a fused graph differs from its original: ``Cost`` without the graph.

    Attributes:
        macs, node_bytes, parameters, bytes, uncounted: See ``Cost``.
        inputs: The axes of each input, by name; None for an unknown rank. The inputs of ``Cost``
            would keep the graph and all weights in memory.
        weight_bytes: Size of the weights.
    """

    macs: JsonPolynomial | None
    node_bytes: tuple[JsonPolynomial, ...]
    parameters: int
    bytes: int
    uncounted: tuple[str, ...]
    inputs: Mapping[str, Axes | None]
    weight_bytes: int

    @classmethod
    def of(cls, graph: ir.Model) -> GraphCost:
        """The cost of a graph."""
        cost = model_cost(graph)
        return GraphCost(
            macs=cost.macs,
            node_bytes=cost.node_bytes,
            parameters=cost.parameters,
            bytes=cost.bytes,
            uncounted=cost.uncounted,
            inputs={name: _axes(value) for name, value in cost.inputs.items()},
            weight_bytes=weight_bytes(graph),
        )

    @property
    def cost(self) -> Cost:
        """The cost as a function of the inputs."""
        inputs = {
            name: ir.Value(name=name, shape=None if axes is None else ir.Shape(axes))
            for name, axes in self.inputs.items()
        }
        return Cost(self.macs, self.parameters, self.bytes, self.uncounted, inputs, self.node_bytes)


class GraphFacts(GraphCost, frozen=True):
    """Properties of a graph, without a reference to it.

    Attributes:
        id_bounds: Number of valid ids of each input with token ids.
        examples: Inputs of the first run at several lengths; empty if none can be made.
        int8_warning: Why int8 products are inexact on this CPU; None if they are exact.
        batch_invariant: Whether the quantization of a row does not depend on its batch.
        external: Locations of the external data in the model's folder.
        precision: The data types of the weights.
        in_bfloat16: Whether float32 operators are computed in bfloat16.
    """

    id_bounds: Mapping[str, int]
    examples: tuple[JsonArrays, ...]
    int8_warning: str | None
    batch_invariant: bool
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
        bounds = ((value.name or "", id_bound(value)) for value in graph.graph.inputs)
        return cls(
            **GraphCost.of(graph).stated,
            id_bounds={name: bound for name, bound in bounds if bound},
            examples=_examples(graph),
            int8_warning=int8_warning(graph),
            batch_invariant=batch_invariant(graph),
            external=tuple(sorted(external_data_locations(artifact.model))),
            precision=precision_of(graph),
            in_bfloat16=computes_in_bfloat16(graph),
        )

    def with_cost(self, cost: GraphCost) -> GraphFacts:
        """The facts of an equivalent graph with this cost."""
        return self.model_copy(update=cost.stated)


def _axes(value: ir.Value) -> Axes | None:
    if value.shape is None:
        return None
    return tuple(axis if isinstance(axis, int) else axis.value for axis in value.shape)


def _examples(graph: ir.Model) -> tuple[Mapping[str, np.ndarray], ...]:
    examples: list[Mapping[str, np.ndarray]] = []
    shapes = [value.shape for value in graph.graph.inputs if value.shape is not None]
    axis = shapes[0][0] if shapes and len(shapes[0]) else None
    rows = axis if isinstance(axis, int) else WARM_UP_ROWS
    _, tokens = fixed_axes(shapes)
    for length in WARM_UP_LENGTHS if tokens is None else (tokens,):
        with suppress(AttnserveError):  # fixed axes of another length, or unsupported types
            examples.append(example_inputs(graph, Workload.of(rows, length)))
    return tuple(examples)
