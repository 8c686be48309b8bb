"""Estimate the output loss of a candidate by overriding output-projection weights at run time.

The output projections of attention blocks and the second matrices of feed-forward blocks become
inputs of one session. A removed head or neuron is then a set of zero rows, so that a candidate
costs one run and no graph is rewritten.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from attnserve.calibration.refit import find_sites, install
from attnserve.checks.quality import QualityMeter
from attnserve.context import RunContext
from attnserve.runtime.session import Batch, open_session, run
from graph_passes.analysis.shapes import infer_shapes_small

if TYPE_CHECKING:
    import onnxruntime
    from jaxtyping import Float

__all__ = ["LossEstimator", "Maps"]

Maps = Mapping[str, tuple["Float[np.ndarray, 'N D']", "Float[np.ndarray, ' D']"]]
"""By block, the weight and the bias of its last map."""


class LossEstimator:
    """A session with the last maps of some blocks as inputs.

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
        self.inputs: dict[str, tuple[str, str]] = {}
        for name in names:
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
            self.inputs[name] = weight.name or "", bias.name or ""
            dtype = np.dtype((weight.dtype or ir.DataType.FLOAT).numpy())
            self.maps[name] = current[0].astype(dtype), current[1].astype(dtype)
            for value in (weight, bias):
                del part.graph.initializers[value.name or ""]
                value.const_value = None
                part.graph.inputs.append(value)
        self.session = self._open(part)
        self.whole = [self._run(batch, {}) for batch in batches]

    def loss(self, maps: Maps) -> float:
        """The additive loss with other last maps (``QualityMeter.additive_loss``)."""
        return self._loss(lambda batch: self._run(batch, maps))

    def loss_of(self, other: ir.Model) -> float:
        """The additive loss of another model."""
        session = self._open(other)
        return self._loss(lambda batch: run(session, batch))

    def _open(self, model: ir.Model) -> onnxruntime.InferenceSession:
        return open_session(
            model,
            provider=self.context.provider,
            threads=self.context.threads,
            spinning=False,
        )

    def _loss(self, outputs: Callable[[Batch], list[np.ndarray]]) -> float:
        meter = self.new_meter()
        for batch, before in zip(self.batches, self.whole, strict=True):
            meter.add(before, outputs(batch), batch)
        return meter.additive_loss()

    def _run(self, batch: Batch, maps: Maps) -> list[np.ndarray]:
        feed = dict(batch)
        for name, names in self.inputs.items():
            own = self.maps[name]
            for key, array, current in zip(names, maps.get(name, own), own, strict=True):
                feed[key] = array.astype(current.dtype, copy=False)
        return run(self.session, feed)
