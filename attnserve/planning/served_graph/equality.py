"""Whether a fused model gives the outputs of the original, up to rounding."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from attnserve.context import Device
from attnserve.fusion import DEFECT
from attnserve.models.example_inputs import example_inputs
from attnserve.models.quantized import rounds_activations
from attnserve.runtime.inference_precision import computes_in_bfloat16
from attnserve.runtime.interface import AS_SERVED, Batch, Session, SessionOptions
from attnserve.runtime.session import open_session
from graph_passes.analysis.shapes import infer_shapes_small
from graph_passes.analysis.workload import Workload
from graph_passes.errors import AttnserveError, CannotRewrite

__all__ = [
    "PLAUSIBLE",
    "TOLERANCES",
    "Reference",
    "Tolerance",
    "computed_type",
    "distance",
    "runnable",
    "shape_name",
]

PRODUCTS = frozenset({"MatMul", "Gemm", "Attention", "MultiHeadAttention"})
"""Operators whose output has the type in which the model computes."""


@dataclass(frozen=True)
class Tolerance:
    """Maximum difference between the outputs of a fused model and of the original.

    Attributes:
        cosine: The lowest cosine of an output vector to the original's.
        error: The highest error of a number, relative to the largest one of its output.
    """

    cosine: float
    error: float


TOLERANCES: Mapping[ir.DataType, Tolerance] = {
    ir.DataType.FLOAT: Tolerance(1 - 1e-6, 1e-5),
    ir.DataType.FLOAT16: Tolerance(1 - 3e-5, 1e-2),
    ir.DataType.BFLOAT16: Tolerance(1 - 2e-3, 6e-2),
}
"""Tolerances by the element type of most products. For all-MiniLM-L6-v2 with fused attention and
norms on an H100, rounding gives 1 - cosine of 1e-12, 4e-6 and 4e-4, and errors of 6e-7, 1e-3 and
8e-3."""

LEAST_EXACT = Tolerance(0.9, 0.2)
"""Limit of the tolerance for models whose activations are rounded to integers.

Rounding in floating point moves few activations to the next integer, which changes an output by
much or not at all. The tolerance therefore grows by ``MARGIN`` times the difference of the original
to itself without the graph optimization of ONNX Runtime. For all-MiniLM-L6-v2 in integers of ONNX
Runtime (dynamic; static with QDQ; int4) on a CPU, at 15 inputs, that is a least cosine of 0.993,
0.938 and 0.999, and an error of 0.05, 0.10 and 0.02. Fused operators differ by as much or less, and
float32 by at least three times as much."""

PLAUSIBLE = Tolerance(0.9, 0.5)
"""Limit of the difference between two runtimes in which a model was verified.

A CPU that computes products in another way than that of the verification exceeds it. For
all-MiniLM-L6-v2 in int8, as torch exports it, ONNX Runtime and OpenVINO differ by a cosine of 0.96
and an error of 0.30."""

MARGIN = 2.0

COMPARED = tuple(Workload.of(*shape) for shape in ((1, 1), (1, 7), (3, 16), (4, 33), (2, 128)))
"""(batch, sequence) of the compared inputs; in each, all rows but the first are padded. Shapes that
the model refuses are left out, but at least one must run."""


@dataclass(frozen=True)
class Reference:
    """The original, with its outputs.

    Attributes:
        session: The model as it is.
        runs: Inputs, each with its outputs.
        accepted: The accepted difference of a fused model.
    """

    session: Session
    runs: Sequence[tuple[Batch, Sequence[np.ndarray]]]
    accepted: Tolerance

    @classmethod
    def of(cls, path: Path, model: ir.Model, device: Device) -> Reference:
        """Open a model on a device, and run it on padded inputs.

        Raises:
            CannotRewrite: The model runs on no example inputs.
        """
        session = open_session(path, device, AS_SERVED)
        runs = list(runnable(model, COMPARED, session, padded=True))
        accepted = TOLERANCES[computed_type(model)]
        if rounds_activations(model):
            optimizing = replace(device, runtime="onnxruntime")
            plain, optimized = (
                open_session(path, optimizing, SessionOptions(optimize=optimize))
                for optimize in (False, True)
            )
            accepted = _widened(accepted, [feed for feed, _ in runs], plain, optimized)
        return cls(session, runs, accepted)

    def compare(self, session: Session) -> tuple[float, float]:
        """(least cosine, largest error) of a session to the original.

        Raises:
            CannotRewrite: The outputs differ by more than ``accepted``, or by name, type or shape.
        """
        for side in ("get_inputs", "get_outputs"):
            expected, actual = (
                [(value.name, value.type, value.shape) for value in getattr(opened, side)()]
                for opened in (self.session, session)
            )
            if expected != actual:
                raise CannotRewrite(
                    f"the fused model has {actual}, expected {expected}",
                    DEFECT,
                    code="fusion.interface",
                )
        outputs = [output.name for output in self.session.get_outputs()]
        accepted = self.accepted
        differences: list[tuple[float, float]] = []
        for feed, expected in self.runs:
            for name, before, after in zip(outputs, expected, session.run(None, feed), strict=True):
                cosine, error = distance(before, after)
                if not (cosine >= accepted.cosine and error <= accepted.error):  # also if NaN
                    raise CannotRewrite(
                        f"output {name!r} of the fused model differs at {shape_name(feed)}: cosine "
                        f"{cosine:.7f}, error {error:.1e} of its largest number",
                        "use the model as it is",
                        code="fusion.differs",
                    )
                differences.append((cosine, error))
        cosines, errors = zip(*differences, strict=True)
        return min(cosines), max(errors)


def _widened(
    accepted: Tolerance, feeds: Sequence[Batch], plain: Session, optimized: Session
) -> Tolerance:
    """The tolerance of a model that rounds activations.

    Args:
        accepted: That of its floating-point type, to which ``MARGIN`` times the difference between
            the sessions is added.
        plain, optimized: The original without and with the graph optimization of ONNX Runtime.
    """
    distances = [
        distance(before, after)
        for feed in feeds
        for before, after in zip(plain.run(None, feed), optimized.run(None, feed), strict=True)
    ]
    cosine = accepted.cosine - MARGIN * (1 - min(cosine for cosine, _ in distances))
    error = accepted.error + MARGIN * max(error for _, error in distances)
    return Tolerance(max(cosine, LEAST_EXACT.cosine), min(error, LEAST_EXACT.error))


def computed_type(model: ir.Model) -> ir.DataType:
    """The floating-point type of most products, of the runtime that computes least exactly."""
    if computes_in_bfloat16(model):
        return ir.DataType.BFLOAT16
    known = infer_shapes_small(model, batch=2, sequence=5).known
    types = Counter(
        known[node.outputs[0]].dtype
        for node in model.graph.all_nodes()
        if node.op_type in PRODUCTS and node.outputs[0] in known
    )
    return max(TOLERANCES, key=lambda dtype: types[dtype])


def distance(before: np.ndarray, after: np.ndarray) -> tuple[float, float]:
    """(least cosine over the last axis, largest difference over the largest number)."""
    if before.shape != after.shape:
        return 0.0, np.inf
    if np.array_equal(before, after):
        return 1.0, 0.0
    width = before.shape[-1] if before.ndim else 1
    a, b = (array.astype(np.float64).reshape(-1, width) for array in (before, after))
    with np.errstate(all="ignore"):  # infinity and NaN fail the check
        norms = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
        cosines = np.where(norms > 0, (a * b).sum(axis=1) / norms, (a == b).all(axis=1))
        return float(cosines.min()), float(np.abs(a - b).max() / np.abs(a).max())


def runnable(
    model: ir.Model, workloads: Sequence[Workload], session: Any, *, padded: bool = False
) -> Iterator[tuple[Batch, list[np.ndarray]]]:
    """Example inputs and the session's outputs, at the workloads that the model accepts.

    Raises:
        CannotRewrite: The model accepts no workload.
    """
    taken, why = 0, ""
    for seed, workload in enumerate(workloads):
        try:
            feed = example_inputs(model, workload, seed, padded=padded)
            outputs = session.run(None, feed)
        except AttnserveError as error:  # fixed axes, fewer positions, inputs without examples
            why = why or error.what
            continue
        taken += 1
        yield feed, outputs
    if not taken:
        raise CannotRewrite(
            f"the model runs on no example inputs: {why}",
            "use the model as it is",
            code="fusion.no_inputs",
        )


def shape_name(feed: Batch) -> str:
    """The shape of the first input."""
    return " x ".join(map(str, next(iter(feed.values())).shape))
