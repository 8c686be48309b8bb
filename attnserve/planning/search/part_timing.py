"""Time parts of a model at the workloads of a search, in the precision of its result."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import onnx_ir as ir

from attnserve.context import Progress, ignore_progress
from attnserve.literals import Precision
from attnserve.planning.blocks.latencies import Latencies
from attnserve.precision.convert import convert
from attnserve.precision.half import LARGEST
from attnserve.runtime.interface import Batch
from attnserve.runtime.part_latency import Cut, LatencyTable, Part, cut_out
from attnserve.runtime.session import open_session
from graph_passes.analysis.shapes import set_missing_types
from graph_passes.emit.editing import remove_unused
from graph_passes.errors import IMPOSSIBLE

__all__ = ["PartTimer", "without_casts"]

log = logging.getLogger(__name__)

Key = TypeVar("Key", bound=Hashable)

NOTHING_TO_CONVERT = frozenset({"precision.already", "precision.no_weights", "precision.unchanged"})
"""Codes of the conversions that leave a part as it is; any other error is a failure."""


@dataclass(frozen=True, eq=False)
class PartTimer:
    """Times parts of a model at several shapes, interleaved with the exported part.

    Attributes:
        requested, extremes: Inputs of the model at each workload; see ``Latencies``.
        precision: Precision of the model after all rewrites.
    """

    model: ir.Model
    table: LatencyTable
    requested: Sequence[Batch]
    extremes: Sequence[Batch] = ()
    precision: Precision = "float32"
    progress: Progress = ignore_progress

    @property
    def feeds(self) -> tuple[Batch, ...]:
        """Inputs of the model at all workloads."""
        return (*self.requested, *self.extremes)

    def cut_out(self, model: ir.Model, cuts: Sequence[Cut]) -> Sequence[Part]:
        """Extract parts of a model that takes the same inputs."""
        return cut_out(model, cuts, self.feeds, device=self.table.device)

    def time(self, original: Part, others: Mapping[Any, Part]) -> dict[Any, Latencies]:
        """The latencies of converted parts by key; None is the original."""
        parts = {None: original, **others}
        count = len(self.requested)
        return {
            key: Latencies(ms[:count], ms[count:]) for key, ms in self.table.time(parts).items()
        }

    def runs(self, part: Part) -> bool:
        """Whether the provider has kernels for the operators and types of a part."""
        try:
            session = open_session(part.model, self.table.device)
            for feed in part.feeds:
                session.run(None, feed)
        except IMPOSSIBLE:
            return False
        return True

    def convertible(self, parts: Mapping[Key, Part]) -> dict[Key, Part]:
        """The parts in the precision of the timer, without those whose conversion fails."""
        converted: dict[Key, Part] = {}
        for key, part in parts.items():
            try:
                converted[key] = self.converted(part)
            except IMPOSSIBLE as error:
                log.warning("variant %s: not timed in %s: %s", key, self.precision, error.what)
        return converted

    def converted(self, part: Part) -> Part:
        """The part in the precision of the timer; unchanged if it has nothing to convert.

        Raises:
            AttnserveError: The conversion fails.
        """
        if self.precision == "float32":
            return part
        try:
            model = convert(part.model, self.precision, part.feeds, to_nearest=True)
        except IMPOSSIBLE as error:
            if error.code not in NOTHING_TO_CONVERT:
                raise
            return part
        converted = Part(model, part.feeds)
        # numpy has no bfloat16, so that such a part is timed with its casts.
        return without_casts(converted) if self.precision == "float16" else converted


def without_casts(part: Part) -> Part:
    """Remove the casts at the inputs and outputs of a float16 part.

    The whole model has them only at its own inputs and outputs. Inputs that are also read in
    float32, and outputs that are computed in float32, are unchanged.
    """
    model = part.model.clone()
    set_missing_types(model)
    halved: set[str] = set()
    for value in model.graph.inputs:
        casts = [user for user, _ in value.uses()]
        if value.dtype == ir.DataType.FLOAT and casts and all(map(_is_to_float16, casts)):
            value.type = ir.TensorType(ir.DataType.FLOAT16)
            halved.add(value.name or "")
            for cast in casts:
                cast.outputs[0].replace_all_uses_with(value)
    for place, value in enumerate(model.graph.outputs):
        cast = value.producer()
        made = cast.inputs[0] if cast is not None and cast.op_type == "Cast" else None
        if made is not None and made.producer() and made.dtype == ir.DataType.FLOAT16:
            made.name, value.name = value.name, made.name
            model.graph.outputs[place] = made
    remove_unused(model)
    feeds = [
        {
            name: array.clip(-LARGEST, LARGEST).astype(np.float16) if name in halved else array
            for name, array in feed.items()
        }
        for feed in part.feeds
    ]
    return Part(model, tuple(feeds))


def _is_to_float16(node: ir.Node) -> bool:
    made = node.outputs[0]
    return (
        node.op_type == "Cast"
        and node.attributes.get_int("to", 1) == ir.DataType.FLOAT16
        and not made.is_graph_output()
    )
