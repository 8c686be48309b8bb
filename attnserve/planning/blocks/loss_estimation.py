"""Estimate the output loss of a configuration by overriding output-projection weights at run time.

The output projections of attention blocks and the second matrices of feed-forward blocks become
inputs of the model. A removed head or neuron is then a set of zero rows, so that a configuration
costs one run and no graph is rewritten. The run starts in front of the first changed block; what
comes before is computed once if blocks are changed in the order of execution.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from attnserve.calibration.layerwise import LayerwiseRunner, SegmentedModel
from attnserve.calibration.linear_maps import find_sites, install
from attnserve.checks.quality import QualityMeter
from attnserve.context import RunContext
from attnserve.runtime.interface import Batch
from attnserve.runtime.observer import dependents
from attnserve.runtime.session import open_session
from graph_passes.analysis.shapes import infer_shapes_small

if TYPE_CHECKING:
    from jaxtyping import Float

__all__ = ["LossEstimator", "Maps"]

Maps = Mapping[str, tuple["Float[np.ndarray, 'N D']", "Float[np.ndarray, ' D']"]]
"""Last weight and bias of each block: its output projection, or second feed-forward matrix."""


class LossEstimator:
    """A model that takes the last weights of some blocks as inputs, to measure other weights.

    It runs in one session per block. The values in front of the block that was changed last are
    kept for all batches.

    Args:
        names: The attention and feed-forward blocks.
        batches: The data on which losses are measured.
        new_meter: Makes the meter of a comparison.
    """

    def __init__(
        self,
        model: ir.Model,
        names: Sequence[str],
        batches: Sequence[Batch],
        new_meter: Callable[[], QualityMeter],
        context: RunContext,
    ) -> None:
        self.batches = batches
        self.new_meter = new_meter
        self.context = context
        part = model.clone()
        found = find_sites(part, names)
        self.maps: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        self.inputs: dict[str, tuple[ir.Value, ir.Value]] = {}
        for name in (name for name in found if name in names):  # in execution order
            site, shapes = found[name], infer_shapes_small(part, batch=2, sequence=5)
            current = site.weight, site.bias
            product = install(site, np.ones_like(current[0]), np.ones_like(current[1]), shapes)
            assert product is not None, f"{name} has no last product"
            weight = product.inputs[1]
            bias = next(
                each
                for user, _ in product.outputs[0].uses()
                for each in user.inputs
                if each is not None and each.is_initializer()
            )
            assert weight is not None
            self.inputs[name] = weight, bias
            dtype = np.dtype((weight.dtype or ir.DataType.FLOAT).numpy())
            self.maps[name] = current[0].astype(dtype), current[1].astype(dtype)
            for value in (weight, bias):
                del part.graph.initializers[value.name or ""]
                value.const_value = None
                part.graph.inputs.append(value)
        self.places = {name: place for place, name in enumerate(self.inputs)}
        weights = [weight for weight, _ in self.inputs.values()]
        self._part = part
        self._nodes = {name: found[name].owner.nodes for name in self.inputs}
        self._segments = SegmentedModel(part, weights, context)
        self._place, self._states = 0, [self._start(batch) for batch in batches]
        self.original_outputs = [self._segments.finish(0, state) for state in self._states]

    def loss(self, maps: Maps) -> float:
        """The additive loss with other last weights (``QualityMeter.additive_loss``)."""
        changed = {
            value: array.astype(current.dtype, copy=False)
            for name, arrays in maps.items()
            for value, array, current in zip(
                self.inputs[name], arrays, self.maps[name], strict=True
            )
        }
        self._go_to(min((self.places[name] for name in maps), default=0))
        return self._loss(
            self._segments.finish(self._place, state | changed) for state in self._states
        )

    def loss_of(self, other: ir.Model, first: str | None = None) -> float:
        """The additive loss of another model.

        Args:
            first: Its first changed block; the run starts in front of it. None for all of it.
        """
        if first is None:
            session = open_session(other, self.context.device)
            return self._loss(session.run(None, batch) for batch in self.batches)
        self._go_to(self.places[first])
        outputs = [value for node in self._nodes[first] for value in node.outputs]
        changed = dependents(self._part.graph, outputs)
        known = [
            {v.name or "": array for v, array in state.items() if v not in changed}
            for state in self._states
        ]
        runner = LayerwiseRunner(other, self.batches, known=known, context=self.context)
        return self._loss(runner.run_to(list(other.graph.outputs)))

    def _start(self, batch: Batch) -> dict[ir.Value, np.ndarray]:
        own = {
            value.name or "": array
            for name, values in self.inputs.items()
            for value, array in zip(values, self.maps[name], strict=True)
        }
        return self._segments.start(batch | own)

    def _go_to(self, place: int) -> None:
        """Compute the states in front of a block."""
        if place < self._place:
            self._place, self._states = 0, [self._start(batch) for batch in self.batches]
        while self._place < place:
            self._states = [self._segments.run(self._place, state) for state in self._states]
            self._place += 1

    def _loss(self, outputs: Iterable[list[np.ndarray]]) -> float:
        meter = self.new_meter()
        for batch, before, after in zip(self.batches, self.original_outputs, outputs, strict=True):
            meter.add(before, after, batch)
        return meter.additive_loss()
