"""Recover the quality of a rewritten model: distill it from its original, and write the weights."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as common
import torch
from torch import Tensor

from attnserve.checks.compare import Fidelity, compare
from attnserve.checks.quality import QualityMeter, largest_loss
from attnserve.checks.scores import Score
from attnserve.choices import Measure, Precision
from attnserve.context import Progress, Provider, RunContext, ignore_progress
from attnserve.data.datasets import (
    HELD_OUT,
    Dataset,
    content_digest,
    load_inputs,
    thinned,
)
from attnserve.data.text_files import read_sentences
from attnserve.fusion import fuse_for
from attnserve.models.artifact import Artifact, open_artifact
from attnserve.models.cache_inputs import empty_axes, shaped_for
from attnserve.models.checksums import fingerprint, last_rewrite_of
from attnserve.models.masks import token_mask
from attnserve.models.onnx_files import data_file, load_model
from attnserve.models.output_kinds import is_cache_name, probability_outputs, resized_outputs
from attnserve.models.outputs import check_output, check_target
from attnserve.models.quantized import Bits, int8_activations, int8_weight_bits
from attnserve.models.rows import fixed_axes
from attnserve.options import Run, Training, check_files, with_keywords
from attnserve.paths import StrPath, as_path, as_paths
from attnserve.precision.convert import convert, nodes_of_blocks, roundings_of
from attnserve.precision.int8 import Rounding
from attnserve.precision.products import MOMENT_TOKENS, collect_ranges
from attnserve.precision.schemes import SCHEMES
from attnserve.recovery.batches import regroup
from attnserve.recovery.distillation import (
    Answers,
    Objective,
    Teacher,
    matching_states,
    rotary_constants,
)
from attnserve.recovery.labels import (
    Labeled,
    LabeledRow,
    LabelReport,
    Labels,
    read_labeled,
)
from attnserve.recovery.module import GraphModule, trainable_weights
from attnserve.recovery.operators import HALF
from attnserve.recovery.quantization import fake_operators
from attnserve.recovery.report import RecoverReport, write_recovered
from attnserve.recovery.training import Course, Lesson, train
from attnserve.runtime.checkpoint import Checkpoint
from attnserve.runtime.external_data import external_files
from attnserve.runtime.interface import Batch, Session
from attnserve.runtime.session import open_session
from attnserve.versions import versions
from graph_passes.errors import (
    CannotRewrite,
    CheckFailed,
    InvalidArgument,
    InvalidData,
    InvalidModel,
)
from graph_passes.passes.fuse_gelu import FuseGelu, fusible_gelus

__all__ = ["Recovery", "recover"]

MIN_TEXTS = 4 * HELD_OUT
"""Minimum number of distinct rows of a file: four in each held-out part, to rank similarities."""

TOLERANCE, HALF_TOLERANCE = 1e-4, 2e-2
"""Maximum relative difference of PyTorch and ONNX Runtime, in float32 and in half precision."""

DEFAULT_TRAIN, DEFAULT_RUN = Training(), Run()

EXAMPLES = 8
"""Number of steps whose batches determine the scales of the losses."""


@with_keywords
def recover(
    model: StrPath,
    output: StrPath,
    *,
    teacher: StrPath,
    data: StrPath | Sequence[StrPath],
    training: Training = DEFAULT_TRAIN,
    run: Run = DEFAULT_RUN,
    tokenizer: StrPath | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> RecoverReport:
    """Train the weights of a rewritten model on outputs and hidden states of its original.

    The graph keeps its names, inputs and outputs, and without ``int8`` its nodes; weights that are
    nodes become initializers. The rows are
    split into parts to fit, to choose the best weights, and to verify the result. If the result is
    not better on the last part, the weights of ``model`` are returned.

    The state is saved in the user's cache folder with each measurement, so that an interrupted
    training continues when it is called again; with ``minutes`` 0 its best weights are written.
    The fields of the groups are keywords too: ``recover(..., minutes=30)``.

    Args:
        model: The rewritten model, in float32 or float16, or in bfloat16 on a GPU.
        output: An .onnx file, or a folder for model.onnx.
        teacher: The original, with the same inputs and outputs. If ``model`` has a record, it has
            to name this file as its source.
        data: Text (one per line), an .npz or a folder of .npz, or several of them; with ``task``,
            tables with labels too.
        training: Time, rounding and labels. With ``int8``, ``before`` and ``after`` are those of
            int8 models, and without a gain the conversion of ``model`` is returned, which has to be
            float32. With ``task``, weights are chosen by the sum of both losses; a gain is then a
            smaller sum and no lower score, and the distance to the original may grow.
        run: Provider, threads and seed. "cuda" trains on a GPU; products are computed in bfloat16
            or float16 if the device has it.
        force: Replace an existing output; never an input.

    Raises:
        MissingExtra: PyTorch is not installed.
        InvalidModel: The models differ in inputs or outputs, an operator cannot be trained, or
            the record of the rewritten model names another original.
        CannotRewrite: The model cannot be converted to int8.
        InvalidArgument, InvalidData, InvalidOutput: The input cannot be used.
        CheckFailed: PyTorch does not compute what ONNX Runtime computes, or the loss is not finite.
    """
    context = run.context(progress or ignore_progress)
    int8, task, measure = training.int8, training.task, training.measure
    files = as_paths(data)
    if not files:
        raise InvalidArgument("`data` is empty", "give a file of texts", code="recovery.no_data")
    check_files(files, name="data")
    artifact, original_artifact = open_artifact(model), open_artifact(teacher)
    if last_rewrite_of(original_artifact, artifact.lineage) is None:
        raise InvalidModel(
            f"{original_artifact.model} is not the model that {artifact.model} was made from: the"
            " record has other checksums",
            "give the original as `teacher`, the file that was optimized",
            code="recovery.teacher",
        )
    rewritten, original = load_model(artifact), load_model(original_artifact)
    if not trainable_weights(rewritten):  # some converters write weights as nodes
        common.LiftConstantsToInitializersPass()(rewritten)
    if int8:
        fuse_for(rewritten, "int8", run.provider)
    target = check_target(Path(output), artifact, rewritten, force=force)
    for path in (original_artifact.model, *external_files(original)):
        for file in (target, data_file(target)):
            check_output(file, source=Path(path), force=force)
    texts = artifact if artifact.tokenizer is not None else original_artifact
    tables = {} if task is None else read_labeled(files, task, texts)
    rows = load_inputs(
        files, original, texts, tokenizer=as_path(tokenizer), read=partial(_read_texts, tables)
    )
    labels = None
    if task is not None:
        labeled = [row for table in tables.values() for row in table]
        labels = Labels(task, labeled, rows, original, texts, as_path(tokenizer))
    before_threads = torch.get_num_threads()
    if run.threads:
        torch.set_num_threads(run.threads)
    try:
        precision: Precision = "int8" if int8 else "float32"
        recovery = Recovery(
            rewritten, original, texts, rows, measure, context, precision, labels=labels
        )
        key = {
            "student": fingerprint(artifact),
            "teacher": fingerprint(original_artifact),
            "data": [rows.source.to_json(), content_digest(rows)],
            "asked": [measure, run.provider, run.seed, int8, task],
            "served": [texts.pooling, texts.dimensions, texts.output],
            "versions": {**versions(), "torch": torch.__version__},
        }
        checkpoint = Checkpoint("recover", key)
        report, trained = recovery.run(target, 60 * training.minutes, checkpoint)
    finally:
        torch.set_num_threads(before_threads)
    external = bool(external_files(rewritten))
    write_recovered(
        artifact, rewritten, original_artifact, original, trained, report, rows, run.seed,
        external=external,
    )  # fmt: skip
    checkpoint.remove()
    return report


def _read_texts(tables: Mapping[Path, Sequence[LabeledRow]], path: Path) -> list[str]:
    """The texts of a file, or of the labeled rows of a table."""
    if path not in tables:
        return read_sentences(path)
    return [text for row in tables[path] for text in row.texts]


def _require_rows(data: Dataset) -> None:
    """Raises: InvalidData: A file has too few rows to fit, to choose and to verify."""
    sources = (one.source for one in data.files or [data])
    smallest = min(sources, key=lambda source: source.distinct_rows)
    if smallest.distinct_rows < MIN_TEXTS:
        raise InvalidData(
            f"{smallest.file} has {smallest.distinct_rows} distinct rows: expected at least "
            f"{MIN_TEXTS}, and thousands for a good result",
            "give more unlabeled text similar to the served text",
            code="recovery.few_rows",
        )
    if not (data.fit and data.choose and data.held_out):
        raise InvalidData(
            "the files of `data` have nearly the same rows: none are left for one of the parts to "
            "fit, to choose and to prove",
            "give more unlabeled text, each row in one file",
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
        rounding: Rounding of the int8 weights, computed before the training; None in other
            precisions.

    Args:
        rewritten: The rewritten model in float32 or half precision; it is not changed.
        original: The teacher.
        texts: The artifact with the pooling of embeddings.
        data: The training rows, and the rows to choose the best weights.
        measure: The measure of quality that chooses the weights.
        context: Context of the run; its provider is the device of PyTorch too.
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
        original: ir.Model,
        texts: Artifact,
        data: Dataset,
        measure: Measure,
        context: RunContext,
        precision: Precision = "float32",
        float_blocks: Collection[str] = (),
        labels: Labels | None = None,
    ) -> None:
        _require_rows(data)
        device = _device(context.provider)
        self.rewritten, self.original, self.data = rewritten, original, data
        self.texts, self.context = texts, context
        self.precision: Precision = precision
        self.bits: Bits | None = SCHEMES[precision].bits
        self.float_blocks, self.labels = float_blocks, labels
        self.new_meter = partial(QualityMeter, original, texts, measure=measure, data=data)
        self.empty = empty_axes(original, rewritten)
        self.calibration = [self._feed(batch) for batch in data.fit]
        self.rounding: Mapping[tuple[str, bool], Rounding] | None = None
        if self.bits is not None:
            self.rounding = roundings_of(
                rewritten, precision, self.calibration, float_blocks=float_blocks
            )
        self.plain = self._served(rewritten)
        if labels is not None:  # raises an error if the model is not one of the task
            self.teacher_score = labels.score(self._labeled_outputs(original, labels.prove))
        # Raises an error if the models do not have the same inputs and outputs.
        self.first = self._compare(self.plain, data.choose, "choose")
        if not self.first.qualities:
            raise InvalidData(
                "the models have no float output that can be learned",
                "give models with embeddings, logits or features as output",
                code="recovery.no_output",
            )
        self.trained = rewritten.clone()
        graph = _with_fused_gelu(rewritten)
        pairs = matching_states(original, graph)
        pairs = self._equal_shapes(pairs, graph, data.fit[0])
        self.module = GraphModule(
            graph, [ours for _, ours in pairs], frozen=rotary_constants(graph), device=device
        )
        if not self.module.names:
            raise InvalidData(
                "the rewritten model has no float weights that can be trained",
                "recover the float model, and quantize the result",
                code="recovery.no_weights",
            )
        self._check_module()
        self._quantize(self.calibration)
        self.states = [theirs for theirs, _ in pairs]

    def train(self, seconds: float, checkpoint: Checkpoint) -> Course:
        """Train; if the loss decreased, ``trained`` receives the best weights."""
        data, context = self.data, self.context
        teacher = Teacher(self.original, self.states, context)
        inputs = (*self.original.graph.inputs, *self.rewritten.graph.inputs)
        rows, tokens = fixed_axes(value.shape for value in inputs if value.shape)
        steps = regroup(
            data.fit, context.seed,
            fixed_rows=rows is not None, fixed_length=tokens is not None,
        )  # fmt: skip
        places = np.linspace(0, len(steps) - 1, EXAMPLES).astype(int)
        batches = [batch for i in sorted({*places.tolist()}) for batch in steps[i]]
        names = [value.name or "" for value in self.original.graph.outputs]
        objective = Objective(
            self.first.qualities, names, len(self.states), self.texts.pooling, batches, teacher,
            dimensions=self.texts.dimensions, resized=resized_outputs(self.original),
            probabilities=probability_outputs(self.original),
            students=[value.name or "" for value in self.rewritten.graph.outputs],
        )  # fmt: skip
        lesson = Lesson(
            steps, teacher, self._feed, objective, partial(self._loss, Answers(teacher, names)),
            None if self.labels is None else partial(self._labeled_loss, self.labels),
        )  # fmt: skip
        course, best = train(self.module, lesson, seconds, checkpoint, context)
        if course.is_better:
            self._write_weights(best)
        return course

    def run(
        self, target: Path, seconds: float, checkpoint: Checkpoint
    ) -> tuple[RecoverReport, ir.Model]:
        """Train and verify; returns the report and the model to write."""
        before = after = self._prove(self.plain)  # errors come before the training
        course = self.train(seconds, checkpoint)
        result, gain = self.plain, False
        warnings: list[str] = []
        if course.is_better:
            served = self._served(self.trained)
            try:
                proved = self._prove(served)
            except CheckFailed as error:
                warnings.append(f"the trained model: {error.what}")
            else:
                gain = proved.is_better_than(before)
                result, after = (served, proved) if gain else (result, before)
        if not gain:
            warnings.append("no gain: use more text similar to the served text, or more minutes")
        if course.stopped == "not finite":
            warnings.append("the loss became infinite: the best weights before that are returned")
        if not self.states:
            warnings.append("no hidden states match in both graphs: only the outputs were learned")
        size = sum(weight.numel() for weight in self.module.weights)
        scores = None
        if self.labels and before.score is not None and after.score is not None:
            scores = LabelReport(self.labels.counts, self.teacher_score, before.score, after.score)
        report = RecoverReport(
            target, before.fidelity, after.fidelity, gain, course, len(self.states), size,
            int8_weight_bits(result), int8_activations(result), scores, tuple(warnings),
        )  # fmt: skip
        return report, result

    def _served(self, model: ir.Model, rows: Sequence[Batch] | None = None) -> ir.Model:
        """The model as it is served: int8 models are converted as by ``optimize``."""
        if self.bits is None:
            return model
        rows = rows or self.calibration
        return convert(
            model, self.precision, rows, float_blocks=self.float_blocks, rounding=self.rounding
        )

    def _write_weights(self, weights: Sequence[Tensor]) -> None:
        """Write weights into the graph of the module and into ``trained``."""
        self.module.write_weights(weights)
        ours, theirs = (m.graph.initializers for m in (self.module.model, self.trained))
        for name in self.module.names:
            theirs[name].const_value = ours[name].const_value

    def _quantize(self, rows: Sequence[Batch]) -> None:
        """Set up fake quantization in the module, equal to the int8 conversion of ``trained``."""
        if self.bits is not None:
            graph = self.module.model
            ranges = collect_ranges(graph, rows)
            keep = nodes_of_blocks(graph, self.float_blocks)
            self.module.replaced = fake_operators(
                graph, self.bits, ranges, self.module.device, keep=keep,
                rounding=self.rounding,
            )  # fmt: skip

    def _feed(self, batch: Batch) -> Batch:
        """The inputs of the rewritten model."""
        return shaped_for(self.rewritten, batch, self.empty)

    def _loss(self, expected: Answers, weights: Sequence[Tensor]) -> float:
        """The loss of weights on the rows to choose, computed by ONNX Runtime.

        int8 models are converted with few rows, because this runs often.
        """
        self._write_weights(weights)
        few = thinned(self.calibration, MOMENT_TOKENS)
        try:
            self._quantize(few)  # ranges of activations follow the weights
            served = self._served(self.trained, few)
        except (CannotRewrite, InvalidData):  # weights or activations are not finite
            return math.inf
        session = open_session(served, self.context, spinning=False)
        meter = self.new_meter(split="choose")
        for index, batch in enumerate(self.data.choose):
            theirs = expected(index, batch)
            ours = _by_name(served, session.run(None, self._feed(batch)))
            pairs = zip(self.original.graph.outputs, theirs, strict=True)
            meter.add(theirs, [ours.get(value.name or "", array) for value, array in pairs], batch)
        labeled = 0.0
        if self.labels is not None:
            outputs = self._labeled_outputs(served, self.labels.choose, session)
            labeled = self.labels.held_out_loss(outputs)
        return largest_loss(meter.results(), bounded=True) + labeled

    def _labeled_loss(self, labels: Labels, step: int) -> Tensor:
        """The loss of labeled rows in a training step."""
        labeled = labels.step(step, self.context.seed)
        names = [value.name for value in self.trained.graph.outputs]
        found = self.module(self._feed(labeled.batch))
        return labels.loss(found[names.index(labels.output)], labeled)

    def _labeled_outputs(
        self,
        model: ir.Model,
        rows: Sequence[Labeled],
        session: Session | None = None,
    ) -> list[tuple[Labeled, np.ndarray]]:
        """The output of the task for batches of labeled rows."""
        assert self.labels is not None
        opened = session or open_session(model, self.context, spinning=False)
        place = [value.name for value in model.graph.outputs].index(self.labels.output)
        feeds = (one.batch if model is self.original else self._feed(one.batch) for one in rows)
        return [(one, opened.run(None, feed)[place]) for one, feed in zip(rows, feeds, strict=True)]

    def _prove(self, model: ir.Model) -> _HeldOut:
        fidelity = self._compare(model, self.data.held_out, "prove")
        if self.labels is None:
            return _HeldOut(fidelity)
        outputs = self._labeled_outputs(model, self.labels.prove)
        return _HeldOut(fidelity, self.labels.held_out_loss(outputs), self.labels.score(outputs))

    def _compare(self, model: ir.Model, batches: Sequence[Batch], split: str) -> Fidelity:
        source = f"held out of {self.data.source.file}"
        return compare(
            self.original, model, batches, source, meter=self.new_meter(split=split),
            context=self.context.labeled(split),
        )  # fmt: skip

    def _equal_shapes(
        self, pairs: Sequence[tuple[ir.Value, ir.Value]], graph: ir.Model, batch: Batch
    ) -> list[tuple[ir.Value, ir.Value]]:
        """The pairs of states whose arrays have the same shape."""
        theirs, ours = zip(*pairs, strict=True) if pairs else ((), ())
        left = Teacher(self.original, theirs, self.context)(batch)
        right = Teacher(graph, ours, self.context)(self._feed(batch))
        shapes = zip(left[len(left) - len(pairs) :], right[len(right) - len(pairs) :], strict=True)
        return [pair for pair, (a, b) in zip(pairs, shapes, strict=True) if a.shape == b.shape]

    def _check_module(self) -> None:
        """Compare the module with ONNX Runtime, on real tokens: padding may be left undefined.

        Raises:
            CheckFailed: They differ.
        """
        session = open_session(self.rewritten, self.context, spinning=False)
        graph = self.rewritten.graph
        is_half = any(value.dtype in HALF for value in graph.initializers.values())
        limit = HALF_TOLERANCE if is_half else TOLERANCE
        for batch in (self.data.choose[0], self.data.choose[-1]):
            feed = self._feed(batch)
            expected = session.run(None, feed)
            # Convolutions in TF32, the default, would differ by more than the limit.
            with torch.no_grad(), torch.backends.cudnn.flags(allow_tf32=False):
                found = self.module(feed)
            for value, a, tensor in zip(graph.outputs, expected, found, strict=False):
                b = tensor.cpu().numpy()
                if is_cache_name(value.name or ""):
                    continue
                if a.ndim > 2 and a.shape == b.shape:
                    real = token_mask(batch, a.shape[:2])
                    a, b = a[real], b[real]
                error = _relative_error(a, b)
                if not error <= limit:  # NaN too
                    raise CheckFailed(
                        f"output {value.name!r} differs by {error:.1e} between ONNX Runtime and "
                        f"PyTorch, expected at most {limit:.0e}: nothing was written",
                        "report the model: one of its operators is computed differently",
                        code="recovery.mismatch",
                    )


def _with_fused_gelu(model: ir.Model) -> ir.Model:
    """A copy with every GELU as one operator, which has the faster gradient."""
    model = model.clone()
    FuseGelu(fusible_gelus(model))(model)
    return model


@dataclass(frozen=True)
class _HeldOut:
    """A model on rows that the training never saw.

    Attributes:
        labeled_loss, score: Loss and score on labeled rows; 0 and None without labels.
    """

    fidelity: Fidelity
    labeled_loss: float = 0.0
    score: Score | None = None

    @property
    def loss(self) -> float:
        return largest_loss(self.fidelity.qualities, bounded=False) + self.labeled_loss

    def is_better_than(self, other: _HeldOut) -> bool:
        """Whether the loss is smaller, and the score no lower.

        Without a score, no output, file or length class may be below its confidence interval.
        """
        if self.score is not None and other.score is not None:
            return self.loss < other.loss and self.score.value >= other.score.value
        least = {old.subject: old.lower for old in other.fidelity.qualities}
        kept = all(new.value >= least[new.subject] for new in self.fidelity.qualities)
        return kept and self.loss < other.loss


def _by_name(model: ir.Model, arrays: Sequence[np.ndarray]) -> Mapping[str, np.ndarray]:
    return dict(zip((v.name or "" for v in model.graph.outputs), arrays, strict=True))


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
