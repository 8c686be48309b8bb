"""Recover the quality of a rewritten model: distill it from its original, and write the weights."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor

from attnserve.checks.compare import Fidelity, compare, empty_axes, shaped_for
from attnserve.checks.quality import QualityMeter
from attnserve.choices import Measure
from attnserve.context import Progress, Provider, RunContext, ignore_progress
from attnserve.models.artifact import (
    Artifact,
    check_output,
    check_target,
    fingerprint,
    load_model,
    open_artifact,
    sha256,
    versions,
    write_rewritten,
)
from attnserve.models.datasets import (
    Dataset,
    check_calibration_files,
    load_inputs,
    thinned,
)
from attnserve.models.precision import BITS, convert
from attnserve.models.products import MOMENT_TOKENS, collect_ranges
from attnserve.models.quantized import Bits, Int8Activations, int8_activations, int8_weight_bits
from attnserve.models.token_statistics import token_statistics
from attnserve.paths import StrPath, as_path, as_paths
from attnserve.recovery.batches import regroup
from attnserve.recovery.distillation import (
    Objective,
    Teacher,
    matching_states,
    rotary_constants,
)
from attnserve.recovery.module import GraphModule
from attnserve.recovery.operators import HALF
from attnserve.recovery.quantization import fake_operators
from attnserve.recovery.training import Checkpoint, Lesson, Training, train
from attnserve.runtime.cache import cache_folder
from attnserve.runtime.external_data import external_files
from attnserve.runtime.session import Batch, open_session, run
from graph_passes.analysis.cost import parameter_bytes
from graph_passes.errors import CannotRewrite, CheckFailed, InvalidArgument, InvalidData

__all__ = ["RecoverReport", "Recovery", "recover"]

MIN_TEXTS = 8
"""The fewest distinct rows of a file, which is split into parts to fit, to choose and to prove."""

TOLERANCE, HALF_TOLERANCE = 1e-4, 2e-2
"""The largest relative error of PyTorch to ONNX Runtime, in float32 and in half precision."""

EXAMPLES = 8
"""Steps from whose batches the losses are scaled."""

KEPT = ("plan", "before", "after", "batch", "sequence", "break_even_sequence")
"""What the record of the rewrite says of the graph, and what training does not change."""


@dataclass(frozen=True)
class RecoverReport:
    """The quality before and after, on rows that the training never saw.

    Attributes:
        before: The rewritten model against the original.
        after: The result against the original; equal to ``before`` without a gain.
        gain: Whether the result is better. If not, it has the weights of the rewritten model.
        training: The course of the training.
        states: The number of hidden states that were learned, besides the outputs.
        weights: The number of trained elements.
        int8_weight_bits, int8_activations: As in ``OptimizeReport``; None without int8.
        warnings: What the user should know.
    """

    output: Path
    before: Fidelity
    after: Fidelity
    gain: bool
    training: Training
    states: int
    weights: int
    int8_weight_bits: Bits | None = None
    int8_activations: Int8Activations | None = None
    warnings: tuple[str, ...] = ()

    @property
    def verdict(self) -> str:
        """One line for people."""
        old, new = self.before.quality, self.after.quality
        assert old is not None and new is not None
        if not self.gain:
            rounded = "" if self.int8_weight_bits is None else "rounded "
            return (
                f"no gain: {new.measure} {new.value:.4f} after {self.training.steps} steps; "
                f"the {rounded}weights of the rewritten model are returned"
            )
        return (
            f"{new.measure} {old.value:.4f} -> {new.value:.4f} after {self.training.steps} steps "
            f"in {self.training.seconds / 60:.1f} minutes"
        )

    def to_json(self) -> dict[str, Any]:
        int8 = {"weight_bits": self.int8_weight_bits, "activations": self.int8_activations}
        return {
            "fidelity": _fidelity(self.after),
            **self.after.quality_json(),
            "before_recovery": {"fidelity": _fidelity(self.before), **self.before.quality_json()},
            "gain": self.gain,
            "verdict": self.verdict,
            "training": {
                **self.training.to_json(), "states": self.states, "weights": self.weights,
            },
            **{f"int8_{name}": value for name, value in int8.items() if value is not None},
            "warnings": list(self.warnings),
        }  # fmt: skip


def _fidelity(fidelity: Fidelity) -> dict[str, Any]:
    return {
        "mean_cosine": fidelity.mean_cosine,
        "min_cosine": fidelity.min_cosine,
        "data": fidelity.data,
    }


def recover(
    model: StrPath,
    output: StrPath,
    *,
    teacher: StrPath,
    data: StrPath | Sequence[StrPath],
    minutes: float = 20.0,
    int8: bool = False,
    measure: Measure = "auto",
    tokenizer: StrPath | None = None,
    provider: Provider = "cpu",
    threads: int = 0,
    seed: int = 0,
    force: bool = False,
    progress: Progress | None = None,
) -> RecoverReport:
    """Train the weights of a rewritten model on outputs and hidden states of its original.

    The graph keeps its names, inputs and outputs, and without ``int8`` its nodes. The rows are
    split into parts to fit, to choose the best weights, and to prove the result. A result that is
    not better on the last part has the weights of ``model``.

    The state is saved in the user's cache folder with each measurement, so that an interrupted
    training continues when it is called again; with ``minutes`` 0 its best weights are written.

    Args:
        model: The rewritten model, in float32 or half precision.
        output: An .onnx file, or a folder for model.onnx.
        teacher: The original, with the same inputs and outputs.
        data: Unlabelled text (one per line), an .npz or a folder of .npz, or several of them.
        minutes: The time of the training, without loading and proof.
        int8: Train with the rounding of the int8 kernels, and return the model that ``optimize``
            converts with the precision "int8", calibrated on ``data``. ``before`` and ``after`` are
            those of int8 models, and without a gain the conversion of ``model`` is returned.
            ``model`` has to be float32.
        measure: The measure of quality that chooses the weights; see ``attnserve.verify``.
        provider: "cuda" trains on a GPU, in bfloat16 if it has it.
        force: Replace an existing output; never an input.

    Raises:
        MissingExtra: PyTorch is not installed.
        InvalidModel: The models differ in inputs or outputs, or an operator cannot be trained.
        CannotRewrite: The model cannot be converted to int8.
        InvalidArgument, InvalidData, InvalidOutput: The input cannot be used.
        CheckFailed: PyTorch does not compute what ONNX Runtime computes, or the loss is not finite.
    """
    if not 0 <= minutes < math.inf:
        raise InvalidArgument(
            f"`minutes` is {minutes}: expected 0 or more",
            "give for example 20",
            code="recovery.minutes",
        )
    if measure == "score":
        raise InvalidArgument(
            "`measure` is score: there is no task",
            "give another `measure`, or leave it out",
            code="recovery.measure",
        )
    context = RunContext(provider, threads, seed, progress or ignore_progress)
    files = as_paths(data)
    check_calibration_files(files)
    artifact, original_artifact = open_artifact(model), open_artifact(teacher)
    rewritten, original = load_model(artifact), load_model(original_artifact)
    target = check_target(Path(output), artifact, rewritten, force=force)
    for path in (original_artifact.model, *external_files(original)):
        check_output(target, source=Path(path), force=force)
    texts = artifact if artifact.tokenizer is not None else original_artifact
    rows = load_inputs(files, original, texts, tokenizer=as_path(tokenizer))
    before_threads = torch.get_num_threads()
    if threads:
        torch.set_num_threads(threads)
    try:
        recovery = Recovery(rewritten, original, texts, rows, measure, context, int8=int8)
        key = {
            "student": fingerprint(artifact),
            "teacher": fingerprint(original_artifact),
            "data": dict(rows.source),
            "asked": [measure, provider, seed, int8],
            "versions": {**versions(), "torch": torch.__version__},
        }
        checkpoint = Checkpoint(cache_folder() / "recover", _digest(key))
        report, trained = recovery.run(target, 60 * minutes, checkpoint)
    finally:
        torch.set_num_threads(before_threads)
    if not _is_source(artifact, original_artifact):
        other = f"{original_artifact.model} is not the model that {artifact.model} was made from"
        report = replace(report, warnings=(*report.warnings, f"{other}, by its record"))
    _write(artifact, original_artifact, trained, report, rows, seed)
    checkpoint.remove()
    return report


def _is_source(artifact: Artifact, teacher: Artifact) -> bool:
    """Whether the record names the teacher as a source; True if it names none."""
    sources: list[Any] = [(one.get("source") or {}).get("sha256") for one in artifact.lineage]
    return not any(sources) or sha256(teacher.model) in sources


def _digest(record: Any) -> str:
    text = json.dumps(record, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def _require_rows(data: Dataset) -> None:
    """Raises: InvalidData: A file has too few rows to fit, to choose and to prove."""
    sources = (one.source for one in data.files or [data])
    smallest = min(sources, key=lambda source: source["distinct_rows"])
    if smallest["distinct_rows"] < MIN_TEXTS:
        raise InvalidData(
            f"{smallest['file']} has {smallest['distinct_rows']} distinct rows: expected at least "
            f"{MIN_TEXTS}, and thousands for a good result",
            "give more unlabelled text like that to be served",
            code="recovery.few_rows",
        )


def _device(provider: Provider) -> str:
    """Raises: InvalidArgument: PyTorch has no CUDA device."""
    if provider == "cuda" and not torch.cuda.is_available():
        raise InvalidArgument(
            "`provider` is cuda: PyTorch finds no CUDA device",
            "install PyTorch with CUDA, or set `provider` to cpu",
            code="recovery.no_cuda",
        )
    return provider


class Recovery:
    """The models and the data of one recovery.

    Attributes:
        trained: A copy of the rewritten model, whose weights are trained.

    Args:
        rewritten: In float32 or half precision; it is not changed.
        original: The teacher.
        texts: The artifact with the pooling of embeddings.
        data: The rows to learn, and those to choose the best weights.
        measure: The measure of quality that chooses the weights.
        context: Its provider is the device of PyTorch too.
        int8: Train with fake quantization, and measure the int8 conversions of both models.

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
        original: ir.Model,
        texts: Artifact,
        data: Dataset,
        measure: Measure,
        context: RunContext,
        *,
        int8: bool = False,
    ) -> None:
        _require_rows(data)
        device = _device(context.provider)
        self.rewritten, self.original, self.data = rewritten, original, data
        self.texts, self.context, self.int8 = texts, context, int8
        self.new_meter = partial(QualityMeter, original, texts, measure=measure, data=data)
        self.empty = empty_axes(original, rewritten)
        self.calibration = [self._feed(batch) for batch in data.fit]
        self.plain = self._served(rewritten)
        # Raises an error if the models do not have the same inputs and outputs.
        self.first = self._compare(self.plain, data.choose, "choose")
        if not self.first.qualities:
            raise InvalidData(
                "the models have no float output that can be learned",
                "give models with embeddings, logits or features as output",
                code="recovery.no_output",
            )
        self.trained = rewritten.clone()
        pairs = matching_states(original, self.trained)
        pairs = self._equal_shapes(pairs, data.fit[0])
        self.module = GraphModule(
            self.trained, [ours for _, ours in pairs],
            frozen=rotary_constants(self.trained), device=device,
        )  # fmt: skip
        if not self.module.names:
            raise InvalidData(
                "the rewritten model has no float weights that can be trained",
                "recover the float model, and quantize the result",
                code="recovery.no_weights",
            )
        self._check_module()
        self._quantize(self.calibration)
        self.states = [theirs for theirs, _ in pairs]

    def train(self, seconds: float, checkpoint: Checkpoint) -> Training:
        """Train; if the course is better, the best weights are those of ``trained``."""
        data, context = self.data, self.context
        teacher = Teacher(self.original, self.states, context)
        inputs = (*self.original.graph.inputs, *self.rewritten.graph.inputs)
        shapes = [value.shape for value in inputs if value.shape]
        steps = regroup(
            data.fit, context.seed,
            fixed_rows=any(isinstance(shape[0], int) for shape in shapes),
            fixed_length=any(isinstance(shape[1], int) for shape in shapes if len(shape) == 2),
        )  # fmt: skip
        places = np.linspace(0, len(steps) - 1, EXAMPLES).astype(int)
        batches = [batch for i in sorted({*places.tolist()}) for batch in steps[i]]
        examples = [(batch, teacher(batch)) for batch in batches]
        names = [value.name or "" for value in self.original.graph.outputs]
        objective = Objective(
            self.first.qualities, names, len(self.states), self.texts.pooling, examples
        )
        outputs = len(names)
        expected = [teacher(batch)[:outputs] for batch in data.choose]
        lesson = Lesson(steps, teacher, self._feed, objective, partial(self._loss, expected))
        course, best = train(self.module, lesson, seconds, checkpoint, context)
        if course.is_better:
            self.module.write_weights(best)
        return course

    def run(
        self, target: Path, seconds: float, checkpoint: Checkpoint
    ) -> tuple[RecoverReport, ir.Model]:
        """Train, and prove; returns the report and the model to write."""
        data = self.data
        course = self.train(seconds, checkpoint)
        before = after = self._compare(self.plain, data.held_out, "prove")
        result, gain = self.plain, False
        if course.is_better:
            served = self._served(self.trained)
            proved = self._compare(served, data.held_out, "prove")
            gain = _largest_loss(proved) < _largest_loss(before)
            result, after = (served, proved) if gain else (result, before)
        warnings: list[str] = []
        if not gain:
            warnings.append("no gain: give more text like that to be served, or more minutes")
        if course.stopped == "not finite":
            warnings.append("the loss became infinite: the best weights before that are returned")
        if not self.states:
            warnings.append("no hidden states match in both graphs: only the outputs were learned")
        size = sum(weight.numel() for weight in self.module.weights)
        report = RecoverReport(
            target, before, after, gain, course, len(self.states), size,
            int8_weight_bits(result), int8_activations(result), tuple(warnings),
        )  # fmt: skip
        return report, result

    def _served(self, model: ir.Model, rows: Sequence[Batch] | None = None) -> ir.Model:
        """The model as it is served: with ``int8``, converted like ``optimize`` converts it."""
        return convert(model, "int8", rows or self.calibration) if self.int8 else model

    def _quantize(self, rows: Sequence[Batch]) -> None:
        """With ``int8``, let the module compute what the conversion of ``trained`` will."""
        if self.int8:
            ranges = collect_ranges(self.trained, rows)
            self.module.replaced = fake_operators(
                self.trained, BITS["int8"], ranges, self.module.device
            )

    def _feed(self, batch: Batch) -> Batch:
        """The inputs of the rewritten model."""
        return shaped_for(self.rewritten, batch, self.empty)

    def _loss(self, expected: Sequence[list[np.ndarray]], weights: Sequence[Tensor]) -> float:
        """The loss of weights on the rows to choose, computed by ONNX Runtime.

        It is measured often, so that int8 models are converted with few rows.
        """
        self.module.write_weights(weights)
        few = thinned(self.calibration, MOMENT_TOKENS)
        try:
            self._quantize(few)  # ranges of activations follow the weights
            served = self._served(self.trained, few)
        except (CannotRewrite, InvalidData):  # weights or activations are not finite
            return math.inf
        session = open_session(
            served, provider=self.context.provider, threads=self.context.threads, spinning=False
        )
        meter = self.new_meter(split="choose")
        for batch, theirs in zip(self.data.choose, expected, strict=True):
            ours = _by_name(served, run(session, self._feed(batch)))
            pairs = zip(self.original.graph.outputs, theirs, strict=True)
            meter.add(theirs, [ours.get(value.name or "", array) for value, array in pairs], batch)
        losses = [quality.loss for quality in meter.results()]
        return max(losses) if np.isfinite(losses).all() else math.inf

    def _compare(self, model: ir.Model, batches: Sequence[Batch], split: str) -> Fidelity:
        source = f"held out of {self.data.source['file']}"
        return compare(
            self.original, model, batches, source, meter=self.new_meter(split=split),
            context=self.context.labeled(split),
        )  # fmt: skip

    def _equal_shapes(
        self, pairs: Sequence[tuple[ir.Value, ir.Value]], batch: Batch
    ) -> list[tuple[ir.Value, ir.Value]]:
        """The pairs of states whose arrays have the same shape."""
        theirs, ours = zip(*pairs, strict=True) if pairs else ((), ())
        left = Teacher(self.original, theirs, self.context)(batch)
        right = Teacher(self.trained, ours, self.context)(self._feed(batch))
        shapes = zip(left[len(left) - len(pairs) :], right[len(right) - len(pairs) :], strict=True)
        return [pair for pair, (a, b) in zip(pairs, shapes, strict=True) if a.shape == b.shape]

    def _check_module(self) -> None:
        """Compare the module with ONNX Runtime.

        Raises:
            CheckFailed: They differ.
        """
        session = open_session(self.rewritten, threads=self.context.threads, spinning=False)
        graph = self.rewritten.graph
        is_half = any(value.dtype in HALF for value in graph.initializers.values())
        limit = HALF_TOLERANCE if is_half else TOLERANCE
        for batch in (self.data.choose[0], self.data.choose[-1]):
            feed = self._feed(batch)
            expected = run(session, feed)
            with torch.no_grad():
                found = self.module(feed)
            for value, a, b in zip(graph.outputs, expected, found, strict=False):
                error = _relative_error(a, b.cpu().numpy())
                if error > limit:
                    raise CheckFailed(
                        f"output {value.name!r} differs by {error:.1e} between ONNX Runtime and "
                        f"PyTorch, expected at most {limit:.0e}: nothing was written",
                        "report the model: one of its operators is computed differently",
                        code="recovery.mismatch",
                    )


def _by_name(model: ir.Model, arrays: Sequence[np.ndarray]) -> Mapping[str, np.ndarray]:
    return dict(zip((v.name or "" for v in model.graph.outputs), arrays, strict=True))


def _largest_loss(fidelity: Fidelity) -> float:
    losses = [quality.point_loss for quality in fidelity.qualities]
    return max(losses) if np.isfinite(losses).all() else math.inf


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


def _as_int8(kept: Mapping[str, Any], model: ir.Model) -> dict[str, Any]:
    """The record of the rewrite, with the precision and the bytes of the converted model."""
    changed = {"plan": {"precision": "int8"}, "after": {"bytes": parameter_bytes(model)}}
    return {**kept, **{key: {**kept[key], **new} for key, new in changed.items() if key in kept}}


def _write(
    artifact: Artifact,
    teacher: Artifact,
    model: ir.Model,
    report: RecoverReport,
    data: Dataset,
    seed: int,
) -> None:
    last = artifact.lineage[-1] if artifact.lineage else {}
    tokens = token_statistics(data)
    kept = {key: last[key] for key in KEPT if key in last}
    if report.int8_weight_bits is not None:
        kept = _as_int8(kept, model)
    entry = {
        "rewrite": "recover" if report.int8_weight_bits is None else "recover+int8",
        # The quality is measured against the teacher, not against the model before.
        "source": {"file": teacher.model.name, "sha256": sha256(teacher.model)},
        "rewritten": {"file": artifact.model.name, "sha256": sha256(artifact.model)},
        "calibration": {**data.source, **({} if tokens is None else {"token_ids": tokens})},
        "seed": seed,
        **kept,
        **report.to_json(),
        "versions": {**versions(), "torch": torch.__version__},
    }

    external = bool(external_files(model))
    write_rewritten(report.output, model, artifact, entry, external=external)
