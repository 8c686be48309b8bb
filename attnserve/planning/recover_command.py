"""Train a rewritten model to give the outputs of its original, and write the result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import onnx_ir as ir
import onnx_ir.passes.common as common

from attnserve.checks.labeled_tables import read_labeled, reader_of
from attnserve.checks.quality import check_measure
from attnserve.checks.scores import Score
from attnserve.context import Progress, ignore_progress
from attnserve.data.datasets import Dataset, content_digest, load_inputs
from attnserve.data.token_statistics import calibration_of
from attnserve.fusion import fuse_for, fused_for_libraries
from attnserve.job import Job
from attnserve.literals import LearnedTask
from attnserve.models.artifact import Artifact, open_artifact
from attnserve.models.checksums import fingerprint, last_rewrite_of, source_entry
from attnserve.models.lineage import BeforeRecovery, RecoverEntry
from attnserve.models.onnx_files import data_file, load_model
from attnserve.models.outputs import check_openvino, check_output, output_file, write_rewritten
from attnserve.models.quantized import int8_activations, int8_weight_bits
from attnserve.models.training_result import TrainingResult
from attnserve.options import Run, Target, Training, check_files
from attnserve.paths import StrPath, as_path, as_paths
from attnserve.planning.optimize_warnings import unverified_runtimes
from attnserve.planning.plans.apply import apply_steps, start
from attnserve.planning.plans.plan import TRAININGS, Plan, State
from attnserve.recovery.distillation import check_input
from attnserve.recovery.labels import Labels
from attnserve.recovery.module import trainable_weights
from attnserve.recovery.report import KEPT, RecoverReport
from attnserve.recovery.training import torch_threads
from attnserve.recovery.verification import VerifiedModel, labeled_outputs, verify_model
from attnserve.runtime.cache import digest
from attnserve.runtime.external_data import external_files
from attnserve.runtime.openvino_runtime import OpenVino
from attnserve.runtime.session import runtime_of, selectable_runtimes
from attnserve.versions import package_versions, versions
from graph_passes.analysis.parameters import parameter_bytes
from graph_passes.errors import CheckFailed, InvalidArgument, InvalidModel

__all__ = ["recover"]


def recover(
    model: StrPath,
    output: StrPath,
    *,
    teacher: StrPath,
    data: StrPath | Sequence[StrPath],
    training: Training = Training(),
    run: Run = Run(),
    tokenizer: StrPath | None = None,
    openvino: bool = False,
    force: bool = False,
    progress: Progress | None = None,
) -> RecoverReport:
    """Train the weights of a rewritten model on outputs and hidden states of its original.

    The graph keeps its names, inputs and outputs, and without a conversion its nodes; weights that
    are nodes become initializers. The rows are split into parts to fit, to choose the best weights,
    and to verify the result. If the result is not better on the last part, the weights of ``model``
    are returned.

    The state is saved in the user's cache folder with each measurement, so that an interrupted
    training continues when it is called again; with ``minutes`` 0 its best weights are written.

    Args:
        model: The rewritten model, in float32 or float16, or in bfloat16 on a GPU.
        output: An .onnx file, or a folder for model.onnx.
        teacher: The original, with the same inputs and outputs. If ``model`` has a record, it has
            to name this file as its source.
        data: Text (one per line), an .npz or a folder of .npz, or several of them; with ``task``,
            tables with labels too.
        training: Time, precision and labels. With "int8", ``before`` and ``after`` describe int8
            models, and without a gain the conversion of ``model`` is returned, which has to be
            float32. With ``task``, weights are chosen by the sum of both losses; a gain is then a
            smaller sum and no lower score, and the distance to the original may grow.
        run: Provider, threads and seed. "cuda" trains on a GPU; products are computed in bfloat16
            or float16 if the device has it.
        openvino: Write openvino/openvino_model.xml too; models that OpenVINO runs always get it.
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
    selectable_runtimes(context.device)  # an unknown name is refused before any work
    files = as_paths(data)
    if not files:
        raise InvalidArgument("`data` is empty", "give a file of texts", code="recovery.no_data")
    check_files(files, name="data")
    artifact = open_artifact(model)
    original_artifact = open_artifact(teacher)
    _require_teacher(artifact, original_artifact)
    rewritten = _model_to_train(artifact, training)
    original = load_model(original_artifact)
    file = output_file(Path(output), artifact, rewritten, force=force)
    if openvino:
        check_openvino(file, artifact, rewritten)
    for path in (original_artifact.model, *external_files(original)):
        for written in (file, data_file(file)):
            check_output(written, source=Path(path), force=force)
    texts = artifact if artifact.tokenizer is not None else original_artifact
    rows, labels = _read_rows(files, original, texts, as_path(tokenizer), training.task)
    check_measure(training.measure, rows)
    job = Job(
        texts,
        original,
        rows,
        tokenizer=as_path(tokenizer),
        measure=training.measure,
        target=Target(precision=training.precision),
        context=context,
    )
    key = _checkpoint_key(job, artifact, original_artifact, training, run)
    step = replace(TRAININGS["distill"], minutes=training.minutes, measure=training.measure)
    plan = Plan(trainings=(step,), precision=job.target.precision)
    state = start(plan, job, rewritten, key=key, labels=labels)
    with torch_threads(run.threads):
        entry, result = _recovered(state, artifact, original_artifact, openvino=openvino)
    assert state.training is not None
    has_openvino = openvino or runtime_of(result, context.device) == OpenVino.name
    write_rewritten(
        file,
        result,
        artifact,
        entry,
        external=bool(external_files(rewritten)),
        openvino=fused_for_libraries(result) if has_openvino else None,
    )
    job.checkpoints.remove()
    return RecoverReport(entry, state.training, file)


def _require_teacher(artifact: Artifact, teacher: Artifact) -> None:
    """Check that the record of a rewritten model, if it has one, names the teacher as its source.

    Raises:
        InvalidModel: The record names another original.
    """
    if last_rewrite_of(teacher, artifact.lineage) is None:
        raise InvalidModel(
            f"{teacher.model} is not the model that {artifact.model} was made from: the"
            " record has other checksums",
            "give the original as `teacher`, the file that was optimized",
            code="recovery.teacher",
        )


def _model_to_train(artifact: Artifact, training: Training) -> ir.Model:
    """The rewritten model with its weights as initializers; fused if it is converted."""
    model = load_model(artifact)
    if not trainable_weights(model):  # some converters write weights as nodes
        common.LiftConstantsToInitializersPass()(model)
    if training.precision == "float32":
        return model
    return fuse_for(model, training.precision)[0]  # int8 is for CPUs, also if a GPU trains


def _read_rows(
    files: Sequence[Path],
    original: ir.Model,
    texts: Artifact,
    tokenizer: Path | None,
    task: LearnedTask | None,
) -> tuple[Dataset, Labels | None]:
    """The rows of all files, and the labels of those in tables; None without a task.

    Args:
        texts: The model with the tokenizer.
        tokenizer: A tokenizer.json instead of its own.

    Raises:
        InvalidArgument, InvalidData: A file cannot be read, or does not fit the model or the task.
    """
    tables = {} if task is None else read_labeled(files, task, texts)
    rows = load_inputs(files, original, texts, tokenizer=tokenizer, read=reader_of(tables))
    if task is None:
        return rows, None
    labeled = [row for table in tables.values() for row in table]
    return rows, Labels(task, labeled, rows, original, texts, tokenizer)


def _checkpoint_key(
    job: Job, artifact: Artifact, teacher: Artifact, training: Training, run: Run
) -> str:
    """Key of the training's checkpoint; equal for equal requests, whatever their time limit."""
    served, data = job.artifact, job.required_data
    return digest(
        {
            "student": fingerprint(artifact),
            "teacher": fingerprint(teacher),
            "data": [data.source.to_json(), content_digest(data)],
            "asked": [training.measure, run.provider, run.seed, training.precision, training.task],
            "served": [served.pooling, served.dimensions, served.output],
            "versions": {**versions(), **package_versions(["torch"])},
        }
    )


def _recovered(
    state: State, artifact: Artifact, teacher: Artifact, *, openvino: bool
) -> tuple[RecoverEntry, ir.Model]:
    """Apply a plan of one training, and verify its result and the model without it.

    Args:
        state: The state before the training.
        artifact, teacher: The rewritten model and the original on disk; the job's artifact has the
            tokenizer.
        openvino: Whether a file for OpenVINO is written.

    Returns:
        The entry of the lineage, and the model to write.
    """
    job, labels, rewritten = state.job, state.labels, state.model
    check_input(job)
    teacher_score = None
    if labels is not None:  # raises an error if the model is not one of the task
        teacher_score = labels.score(labeled_outputs(job, job.original, labels))
    plain_model = apply_steps(state.plan.conversion, start(state.plan, job, rewritten)).result
    before = verify_model(job, plain_model, labels)  # raises errors before training
    trained_model = apply_steps(state.plan.steps, state).result
    training = state.training
    assert training is not None
    result_model, after, gain = plain_model, before, False
    warnings: list[str] = []
    if training.is_better:
        try:
            verification = verify_model(job, trained_model, labels)
        except CheckFailed as error:
            warnings.append(f"the trained model: {error.what}")
        else:
            if gain := verification.is_better_than(before):
                result_model, after = trained_model, verification
    warnings += _warnings(job, result_model, training, gain=gain, openvino=openvino)
    scores = None
    if labels and teacher_score and before.score and after.score:
        scores = _TaskScores(labels.counts, teacher_score, before.score, after.score)
    bits = int8_weight_bits(result_model)
    entry = RecoverEntry(
        rewrite="recover" if bits is None else "recover+int8",
        # The quality is measured against the teacher, not against the rewritten model.
        source=source_entry(teacher, job.original),
        rewritten=source_entry(artifact, rewritten),
        calibration=calibration_of(job.required_data),
        seed=job.context.seed,
        fidelity=after.fidelity,
        before_recovery=BeforeRecovery(fidelity=before.fidelity),
        gain=gain,
        verdict=_verdict(before, after, scores, training, gain, bits is not None),
        training=training.record,
        warnings=tuple(warnings),
        scores=scores and scores.to_json(),
        int8_weight_bits=bits,
        int8_activations=int8_activations(result_model),
        versions={**versions(), **package_versions(["torch"])},
        **_kept(artifact, result_model),
    )
    return entry, result_model


@dataclass(frozen=True)
class _TaskScores:
    """The scores of a task on labeled rows to verify.

    Attributes:
        rows: The numbers of labeled rows in each part of the data.
        teacher: The score of the original.
        before, after: The scores of the rewritten model and of the result.
    """

    rows: Mapping[str, int]
    teacher: Score
    before: Score
    after: Score

    def to_json(self) -> dict[str, Any]:
        return {
            "rows": dict(self.rows),
            "teacher": self.teacher.to_json(),
            "before": self.before.to_json(),
            "after": self.after.to_json(),
        }


def _warnings(
    job: Job, model: ir.Model, training: TrainingResult, *, gain: bool, openvino: bool
) -> list[str]:
    """Warnings about a training, and about runtimes in which its result was not measured.

    Args:
        model: The model to write.
        openvino: Whether a file for OpenVINO is written.
    """
    warnings: list[str] = []
    if not gain:
        warnings.append("no gain: use more text similar to the served text, or more minutes")
    if training.stopped == "not finite":
        warnings.append("the loss became infinite: the best weights before that are returned")
    if not training.states:
        warnings.append("no hidden states match in both graphs: only the outputs were learned")
    measured = runtime_of(model, job.context.device)
    warnings += [
        f"the quality was not measured in {runtime}: use the model in {measured}"
        f" (`runtime` {measured})"
        for runtime in unverified_runtimes(job, model, openvino=openvino)
    ]
    return warnings


def _kept(artifact: Artifact, model: ir.Model) -> dict[str, Any]:
    """The fields of ``KEPT`` in the last record, with the precision and the bytes of the result."""
    last = artifact.lineage[-1].stated if artifact.lineage else {}
    fields = {name: last[name] for name in KEPT if name in last}
    if int8_weight_bits(model) is not None:
        if "plan" in fields:
            fields["plan"] = {**fields["plan"], "precision": "int8"}
        if "after" in fields:
            fields["after"] = fields["after"].model_copy(update={"bytes": parameter_bytes(model)})
    return fields


def _verdict(
    before: VerifiedModel,
    after: VerifiedModel,
    scores: _TaskScores | None,
    training: TrainingResult,
    gain: bool,
    rounded: bool,
) -> str:
    """The result in one line for people.

    Args:
        rounded: Whether the model is an int8 model.
    """
    new = after.fidelity.quality
    assert new is not None
    qualities = before.fidelity.qualities
    old = next(quality for quality in qualities if quality.subject == new.subject)
    if not gain:
        return (
            f"no gain: {new.measure} {new.value:.4f} after {training.steps} steps; the "
            f"{'rounded ' * rounded}weights of the rewritten model are returned"
        )
    scored = ""
    if scores is not None:
        scored = (
            f"score {scores.before.value:.4f} -> {scores.after.value:.4f} (original "
            f"{scores.teacher.value:.4f}), "
        )
    return (
        f"{scored}{new.measure} {old.value:.4f} -> {new.value:.4f} after {training.steps} steps "
        f"in {training.seconds / 60:.1f} minutes"
    )
