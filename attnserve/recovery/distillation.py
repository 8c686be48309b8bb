"""A rewritten model and its original, ready to train: data, loss and measurement."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from functools import cached_property

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor

from attnserve.checks.quality import largest_loss
from attnserve.data.datasets import require_rows
from attnserve.data.row_batches import thinned
from attnserve.data.splits import INVERSE_HELD_OUT_SHARE
from attnserve.job import Job
from attnserve.literals import Precision
from attnserve.models.cache_inputs import empty_axes, shaped_for
from attnserve.models.masks import token_mask
from attnserve.models.measured import Fidelity
from attnserve.models.output_kinds import is_cache_name, probability_outputs, resized_outputs
from attnserve.models.quantized import Bits
from attnserve.models.rows import fixed_axes
from attnserve.precision.convert import convert, nodes_of_blocks, roundings_of
from attnserve.precision.int8_grids import Rounding
from attnserve.precision.products import MOMENT_TOKENS, WeightKey, collect_ranges
from attnserve.precision.schemes import SCHEMES
from attnserve.recovery.batches import regroup
from attnserve.recovery.labels import Labels
from attnserve.recovery.loss import DistillationLoss
from attnserve.recovery.module import GraphModule, rotary_constants
from attnserve.recovery.operators.registry import HALF
from attnserve.recovery.quantization import fake_operators
from attnserve.recovery.teacher import matching_states, open_teacher, remembered, without_caches
from attnserve.runtime.inference_precision import KEY
from attnserve.runtime.interface import Batch, owned
from attnserve.runtime.session import open_session
from graph_passes.errors import CannotRewrite, CheckFailed, InvalidArgument, InvalidData
from graph_passes.passes.fuse_gelu import FuseGelu, fusible_gelus

__all__ = ["Distillation", "check_input"]

MIN_TEXTS = 4 * INVERSE_HELD_OUT_SHARE
"""Minimum number of distinct rows of a file: four in each held-out part, to rank similarities."""

TOLERANCE, HALF_TOLERANCE = 1e-4, 2e-2
"""Maximum relative difference of PyTorch and ONNX Runtime, in float32 and in half precision."""

EXAMPLES = 8
"""Number of steps whose batches determine the scales of the losses."""


def check_input(job: Job) -> None:
    """Check the rows and the device of a training.

    Raises:
        InvalidData: A file has too few rows to fit, to choose and to verify.
        InvalidArgument: PyTorch has no CUDA device.
    """
    more = "give more unlabeled text similar to the served text, thousands of rows if possible"
    require_rows(job.required_data, MIN_TEXTS, fix=more, code="recovery.few_rows")
    if job.context.device.provider == "cuda" and not torch.cuda.is_available():
        raise InvalidArgument(
            "`provider` is cuda: PyTorch finds no CUDA device",
            "install PyTorch with CUDA, or set `provider` to cpu",
            code="recovery.no_cuda",
        )


class Distillation:
    """A rewritten model (the student) that learns the outputs of its original (the teacher).

    The constructor checks that the models and the data can be trained. ``training.train`` trains
    the student.

    Attributes:
        calibration: The rows to fit, as inputs of the rewritten model.
        rounding: Rounding of the int8 weights, computed before the training; None in other
            precisions.
        first: The rewritten model, in the precision of the served model, compared with the original
            on the rows to choose.
        student: A copy of the rewritten model, whose weights are trained.
        module: The rewritten model in PyTorch.
        states: The hidden states of the original that the module learns beside the outputs.

    Args:
        rewritten: The rewritten model in float32 or half precision; it is not changed.
        job: The teacher, the training rows and those to choose the best weights, the measure of
            quality that chooses them, and the context, whose provider is the device of PyTorch too.
        precision: Precision of the served model. With "int8" and "int8-full", fake quantization is
            trained and conversions are measured; another one is trained and measured in float.
        float_blocks: Blocks that stay float32 in int8.
        labels: Labeled rows to learn too.

    Raises:
        InvalidModel: The models differ in inputs or outputs, or an operator cannot be trained.
        CannotRewrite: The model cannot be converted to int8.
        InvalidArgument: PyTorch has no CUDA device.
        InvalidData: Nothing in the models or in the data can be learned.
        CheckFailed: PyTorch does not compute what ONNX Runtime computes.
    """

    def __init__(
        self,
        rewritten: ir.Model,
        job: Job,
        precision: Precision = "float32",
        float_blocks: Collection[str] = (),
        labels: Labels | None = None,
    ) -> None:
        check_input(job)
        self.job = job
        self.rewritten = rewritten
        self.data = job.required_data
        self.precision: Precision = precision
        self.bits: Bits | None = SCHEMES[precision].bits
        self.float_blocks = float_blocks
        self.labels = labels
        self.empty = empty_axes(job.original, rewritten)
        self.calibration = [self.feed(batch) for batch in self.data.fit]
        self.rounding: Mapping[WeightKey, Rounding] | None = None
        if self.bits is not None:
            self.rounding = roundings_of(
                rewritten, precision, self.calibration, float_blocks=float_blocks
            )
        self.first = _compare(job, self._served(rewritten))
        self.student = rewritten.clone()
        self.module, self.states = _module_of(job, rewritten)
        self._quantize(self.calibration)

    @cached_property
    def teacher(self) -> Callable[[Batch], list[np.ndarray]]:
        """The outputs of the original, then the ``states``."""
        return open_teacher(self.job.original, self.states, self.job.context)

    @cached_property
    def _expected(self) -> Callable[[Hashable, Batch], list[np.ndarray]]:
        """The outputs of the original for the rows to choose; caches are empty."""
        return remembered(without_caches(self.teacher, self._output_names), owned)

    @property
    def _output_names(self) -> list[str]:
        return [value.name or "" for value in self.job.original.graph.outputs]

    def batches(self) -> list[list[Batch]]:
        """The batches of each training step, inputs of the original."""
        inputs = (*self.job.original.graph.inputs, *self.rewritten.graph.inputs)
        rows, tokens = fixed_axes(value.shape for value in inputs)
        return regroup(
            self.data.fit,
            self.job.context.seed,
            fixed_rows=rows is not None,
            fixed_length=tokens is not None,
        )

    def loss(self, steps: Sequence[Sequence[Batch]]) -> DistillationLoss:
        """The loss of a batch, with the scales of some of these steps.

        Raises:
            InvalidData: No output or state depends on the data.
        """
        original, artifact = self.job.original, self.job.artifact
        places = np.linspace(0, len(steps) - 1, EXAMPLES).astype(int)
        examples = [batch for i in sorted({*places.tolist()}) for batch in steps[i]]
        return DistillationLoss(
            self.first.qualities,
            self._output_names,
            len(self.states),
            artifact.pooling,
            examples,
            self.teacher,
            dimensions=artifact.dimensions,
            resized=resized_outputs(original),
            probabilities=probability_outputs(original),
            student_outputs=[value.name or "" for value in self.rewritten.graph.outputs],
        )

    def labeled_loss(self, step: int) -> Tensor | None:
        """The weighted loss of labeled rows in a training step; None without labels."""
        labels = self.labels
        if labels is None:
            return None
        labeled = labels.step(step, self.job.context.seed)
        names = [value.name for value in self.student.graph.outputs]
        outputs = self.module(self.feed(labeled.batch))
        return labels.loss(outputs[names.index(labels.output)], labeled)

    def loss_to_choose(self, weights: Sequence[Tensor]) -> float:
        """The loss of weights on the rows to choose, by ONNX Runtime; infinite if it has no value.

        int8 models are converted with few rows, because this runs often.
        """
        self.write_weights(weights)
        few = thinned(self.calibration, MOMENT_TOKENS)
        try:
            self._quantize(few)  # ranges of activations follow the weights
            model = self._served(self.student, few)
        except (CannotRewrite, InvalidData):  # weights or activations are not finite
            return math.inf
        session = open_session(model, self.job.context.device)
        meter = self.job.meter(data=self.data, split="choose")
        for index, batch in enumerate(self.data.choose):
            expected = self._expected(index, batch)
            outputs = session.run(None, self.feed(batch))
            by_name = dict(zip((value.name for value in model.graph.outputs), outputs, strict=True))
            pairs = zip(self._output_names, expected, strict=True)
            meter.add(expected, [by_name.get(name, array) for name, array in pairs], batch)
        labeled_loss = 0.0
        if self.labels is not None:
            outputs = self.labels.outputs(session, self.labels.choose, self.feed)
            labeled_loss = self.labels.held_out_loss(outputs)
        return largest_loss(meter.results(), bounded=True) + labeled_loss

    def write_weights(self, weights: Sequence[Tensor]) -> None:
        """Write weights into the graph of the module and into ``student``."""
        self.module.write_weights(weights)
        ours, theirs = (m.graph.initializers for m in (self.module.model, self.student))
        for name in self.module.names:
            theirs[name].const_value = ours[name].const_value

    def feed(self, batch: Batch) -> Batch:
        """The inputs of the rewritten model."""
        return shaped_for(self.rewritten, batch, self.empty)

    def _served(self, model: ir.Model, rows: Sequence[Batch] | None = None) -> ir.Model:
        """The served form of a model: int8 models are converted as by ``optimize``."""
        if self.bits is None:
            return model
        rows = rows or self.calibration
        return convert(
            model, self.precision, rows, float_blocks=self.float_blocks, rounding=self.rounding
        )

    def _quantize(self, rows: Sequence[Batch]) -> None:
        """Set up fake quantization in the module, equal to the int8 conversion of ``student``."""
        if self.bits is not None:
            graph = self.module.model
            ranges = collect_ranges(graph, rows)
            float_nodes = nodes_of_blocks(graph, self.float_blocks)
            self.module.replaced = fake_operators(
                graph,
                self.bits,
                ranges,
                self.module.device,
                float_nodes=float_nodes,
                rounding=self.rounding,
            )


def _compare(job: Job, model: ir.Model) -> Fidelity:
    """Compare a model with the original on the rows to choose.

    Raises:
        InvalidModel: The models differ in inputs or outputs.
        InvalidData: No output can be learned.
    """
    rows = job.required_data.choose
    fidelity = job.labeled("choose").compare_held_out(model, rows, "choose")
    if not fidelity.qualities:
        raise InvalidData(
            "the models have no float output that can be learned",
            "give models with embeddings, logits or features as output",
            code="recovery.no_output",
        )
    return fidelity


def _module_of(job: Job, model: ir.Model) -> tuple[GraphModule, list[ir.Value]]:
    """The model in PyTorch, and the states of the original that match states of the model.

    Raises:
        InvalidModel: An operator cannot be trained.
        InvalidData: No weight can be trained.
        CheckFailed: PyTorch does not compute what ONNX Runtime computes.
    """
    data, device = job.required_data, job.context.device
    empty = empty_axes(job.original, model)
    graph = model.clone()
    graph.metadata_props.pop(KEY, None)  # PyTorch computes in the precision of the weights
    plain = graph.clone()
    FuseGelu(fusible_gelus(graph))(graph)  # one operator has the faster gradient
    pairs = matching_states(job.original, graph)
    if pairs:
        arrays = [
            open_teacher(each, states, job.context)(shaped_for(each, data.fit[0], empty))
            for each, states in zip((job.original, graph), zip(*pairs, strict=True), strict=True)
        ]
        shapes = zip(pairs, *(found[-len(pairs) :] for found in arrays), strict=True)
        pairs = [pair for pair, a, b in shapes if a.shape == b.shape]
    module = GraphModule(
        graph, [ours for _, ours in pairs], frozen=rotary_constants(graph), device=device.provider
    )
    if not module.names:
        raise InvalidData(
            "the rewritten model has no float weights that can be trained",
            "recover the float model, and quantize the result",
            code="recovery.no_weights",
        )
    session = open_session(plain, device)
    for batch in (data.choose[0], data.choose[-1]):
        feed = shaped_for(model, batch, empty)
        _check_outputs(module, feed, session.run(None, feed))
    return module, [theirs for theirs, _ in pairs]


def _check_outputs(module: GraphModule, batch: Batch, expected: Sequence[np.ndarray]) -> None:
    """Compare the module with ONNX Runtime, on real tokens: padding may be left undefined.

    Raises:
        CheckFailed: The outputs differ.
    """
    graph = module.model.graph
    is_half = any(value.dtype in HALF for value in graph.initializers.values())
    limit = HALF_TOLERANCE if is_half else TOLERANCE
    # Convolutions in TF32, the default, would differ by more than the limit.
    with torch.no_grad(), torch.backends.cudnn.flags(allow_tf32=False):
        outputs = module(batch)
    for value, a, tensor in zip(graph.outputs, expected, outputs, strict=False):
        b = tensor.cpu().numpy()
        if is_cache_name(value.name or ""):
            continue
        if a.ndim > 2 and a.shape == b.shape:
            mask = token_mask(batch, a.shape[:2])
            a, b = a[mask], b[mask]
        error = _relative_error(a, b)
        if not error <= limit:  # NaN too
            raise CheckFailed(
                f"output {value.name!r} differs by {error:.1e} between ONNX Runtime and "
                f"PyTorch, expected at most {limit:.0e}: nothing was written",
                "report the model: one of its operators is computed differently",
                code="recovery.mismatch",
            )


def _relative_error(a: np.ndarray, b: np.ndarray) -> float:
    """|a - b| / |a| of the finite elements of a; infinite for different shapes."""
    if a.shape != b.shape:
        return math.inf
    finite = np.isfinite(a)
    if a.dtype.kind != "f":
        return float((a != b).any())
    x, y = (array.astype(np.float64)[finite] for array in (a, b))
    size = float(np.linalg.norm(x))
    error = float(np.linalg.norm(x - y))
    return error / size if size else error
