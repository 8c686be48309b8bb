"""Repeat the verification in the record of a model, and test the recorded guarantees."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from glob import escape
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Self, cast, get_args

import onnx_ir as ir

from attnserve.checks.held_out import VERIFIED_PARTS, HeldOut
from attnserve.checks.labeled_tables import read_labeled, reader_of
from attnserve.checks.quality import check_measure
from attnserve.context import AUTO, Device, Progress, ignore_progress
from attnserve.data.datasets import Dataset, load_inputs
from attnserve.job import Job
from attnserve.limits import ROUNDING
from attnserve.literals import LearnedTask, Measure, Split, TaskName
from attnserve.models.artifact import Artifact, open_artifact
from attnserve.models.checksums import check_checksums, last_rewrite_of, path_sha256, sha256
from attnserve.models.lineage import (
    Calibration,
    LineageEntry,
    RecoverEntry,
    Source,
    search_of,
)
from attnserve.models.measured import Fidelity, Quality, Share
from attnserve.models.onnx_files import load_model
from attnserve.models.record import RECORD
from attnserve.models.search_record import GoalRecord, SearchRecord
from attnserve.options import Comparison, Goal, Run
from attnserve.paths import StrPath, as_path
from attnserve.planning.runtime_verification import opener_in
from attnserve.planning.scored_task import ScoredTask
from attnserve.runtime.by_length import RowRuntimes
from attnserve.runtime.interface import Batch
from attnserve.runtime.session import OpenNew, runtime_of, runtimes_of
from graph_passes.errors import InvalidArgument, InvalidData, InvalidModel

__all__ = ["GuaranteeCheck", "VerifyAgainReport", "verify_again"]


@dataclass(frozen=True)
class GuaranteeCheck:
    """A recorded quality, or the recorded share of a task's score, that was measured again.

    Attributes:
        runtime: The runtime, or a pair of them (``RowRuntimes``).
        measure: The measure of a quality, or "score".
        recorded: On new rows, the lowest recorded value of the output.
        kept: The guaranteed quantity: 1 minus the loss of a goal, else the value.
        guarantee: The goal of the search, else the lower end of the recorded interval.
        holds: Whether ``kept`` reaches the guarantee, up to rounding.
    """

    runtime: str
    output: str
    file: str
    lengths: str
    measure: str
    recorded: float | None
    value: float
    kept: float
    guarantee: float
    holds: bool


@dataclass(frozen=True)
class VerifyAgainReport:
    """The result of a repeated verification.

    Attributes:
        fidelity: The comparison in the first runtime.
        is_recorded: Whether the rows are those of the record; else all rows of other data.
        guarantees: One for each quality, and for a score that the goal keeps, in each runtime.
        not_installed: Recorded runtimes that were not measured.
    """

    fidelity: Fidelity
    is_recorded: bool
    guarantees: Sequence[GuaranteeCheck]
    not_installed: Sequence[str]

    @property
    def holds(self) -> bool:
        return all(check.holds for check in self.guarantees)

    def to_json(self) -> dict[str, Any]:
        return {
            **self.fidelity.to_json(),
            "holds": self.holds,
            "rows": "recorded" if self.is_recorded else "new",
            "guarantees": [asdict(check) for check in self.guarantees],
            "not_installed": list(self.not_installed),
        }


class _Rows(NamedTuple):
    """The rows to compare.

    Attributes:
        part: The part of a search; None for all rows to verify, or for new rows.
        names: The recorded names of files that are given under other names.
    """

    data: Dataset
    is_recorded: bool = False
    part: HeldOut | None = None
    names: Mapping[str, str] = MappingProxyType({})

    @property
    def batches(self) -> Sequence[Batch]:
        if not self.is_recorded:
            return self.data.fit
        return self.data.to_verify if self.part is None else self.part.batches(self.data)

    @property
    def split(self) -> Split:
        if not self.is_recorded:
            return "data"
        return "verify" if self.part is None else self.part.split


def verify_again(
    new: StrPath,
    original: StrPath | None = None,
    *,
    comparison: Comparison = Comparison(),
    eval_data: StrPath | None = None,
    run: Run = Run(),
    progress: Progress = ignore_progress,
) -> VerifyAgainReport:
    """Repeat the verification of a model's last rewrite, and test what its record guarantees.

    With the calibration data of the record, the models are compared on the recorded held-out rows;
    with other data, on all its rows. The guarantee is the goal of a search, else the lower
    end of the recorded interval of each quality. It holds if no value is lower by more than
    rounding, in any recorded runtime that is installed.

    Args:
        new: The rewritten model.
        original: The model that it was made from. By default, the file with the recorded name and
            checksum in the folder of ``new``, above it, or in a folder beside it.
        comparison: The calibration data of the record, or other data in the same formats; the
            measure of quality, by default the recorded one.
        eval_data: The labeled data of a goal that keeps a score, or other data for its task.
        run: Provider, threads and runtime, by default the runtime of the search.
        progress: Called with (stage, runs done, runs in total).

    Raises:
        InvalidModel: The record has no verification on data, or a checksum differs.
        InvalidArgument: The original is not found, or ``eval_data`` does not fit the goal.
        InvalidData: The data cannot be used, or the record states other qualities or rows.
    """
    artifact = open_artifact(new)
    entry = _verified_entry(artifact)
    before = _original(artifact, entry.source, as_path(original))
    if last_rewrite_of(before, [entry]) is None:
        raise InvalidModel(
            f"{before.model} is not the model that {artifact.model} was made from: the record has"
            " other checksums",
            f"give {entry.source.file} with sha256 {entry.source.sha256} as `original`",
            code="verify.original",
        )
    search = search_of(entry)
    guaranteed = search and search.guaranteed
    goal = _task_goal(search, as_path(eval_data))
    # A training reads texts as the trained model does.
    texts = artifact if entry.rewritten is not None and artifact.tokenizer is not None else before
    model, source = load_model(artifact), load_model(before, in_place=True)
    rows = _read_rows(entry, comparison.data, source, texts, comparison.tokenizer)
    measure = _measure(entry, comparison.measure)
    check_measure(measure, rows.data)
    context = run.context(progress)
    context = replace(context, device=_device(search, context.device))
    job = Job(
        texts, source, rows.data, tokenizer=comparison.tokenizer, measure=measure, context=context
    )
    device = context.device
    fidelity = job.compare_held_out(model, rows.batches, rows.split)
    first = runtime_of(model, device)
    checks = _checks(first, guaranteed, entry.qualities, fidelity, rows)
    score = None if goal is None or search is None else _GuaranteedScore.of(goal, search, job)
    if score is not None:
        checks.append(score.check(first, model, fidelity))
    not_installed: list[str] = []
    installed = runtimes_of(model, replace(device, runtime=AUTO))
    # Other runtimes ran all rows to verify, whatever the part of the search.
    all_rows = rows._replace(part=None)
    for name, recorded in artifact.other_runtimes.items():
        runtimes = RowRuntimes.parse(name)
        if not {*runtimes} <= {*installed}:
            not_installed.append(name)
            continue
        open_new = opener_in(runtimes, device, all_rows.batches)
        found = job.compare_held_out(model, all_rows.batches, all_rows.split, open_new=open_new)
        checks += _checks(name, guaranteed, recorded.qualities, found, all_rows)
        if score is not None:
            checks.append(score.check_in(name, model, open_new))
    return VerifyAgainReport(fidelity, rows.is_recorded, checks, not_installed)


# ---- record -------------------------------------------------------------------------------------


def _verified_entry(artifact: Artifact) -> LineageEntry:
    """The last rewrite of a model whose files have the recorded checksums.

    Raises:
        InvalidModel: There is none, it was not verified on data, or a checksum differs.
    """
    entry = artifact.lineage[-1] if artifact.lineage else None
    if entry is None or artifact.model.name not in artifact.record.files:
        raise InvalidModel(
            f"{artifact.model}: its folder has no {RECORD} with a rewrite of this file",
            "give the folder that `attnserve optimize` or `attnserve recover` wrote",
            code="verify.no_record",
        )
    if entry.calibration is None or not entry.qualities or entry.source.sha256 is None:
        raise InvalidModel(
            f"{artifact.model}: its last rewrite was not verified on data: nothing is guaranteed",
            "optimize the original again, with calibration data",
            code="verify.no_guarantee",
        )
    check_checksums(artifact)
    return entry


def _original(artifact: Artifact, source: Source, given: Path | None) -> Artifact:
    """The given original, or the one with the recorded name and checksum near the model.

    Raises:
        InvalidArgument: No original is given, and none is found.
    """
    if given is not None:
        return open_artifact(given)
    folder = artifact.folder.resolve()
    name = Path(source.file).name
    near = [folder / name, folder.parent / name, *folder.parent.glob(f"*/{escape(name)}")]
    for path in near:
        if path.is_file() and sha256(path) == source.sha256:
            return open_artifact(path)
    exported = f", an export of {artifact.source}" if artifact.source else ""
    raise InvalidArgument(
        f"`original` is not given, and no {name} with the recorded checksum is near {folder}",
        f"give the model that it was made from{exported} (sha256 {source.sha256})",
        code="verify.no_original",
    )


def _part(search: SearchRecord | None) -> HeldOut | None:
    """The part that the search verified its result on; None without a search or a gain.

    Raises:
        InvalidData: This version does not know the part.
    """
    if search is None or not search.gain or not search.verifications:
        return None
    last = search.verifications[-1].part
    if not last and len(search.verifications) <= len(VERIFIED_PARTS):  # of an earlier version
        return VERIFIED_PARTS[len(search.verifications) - 1]
    return HeldOut[_known(last, [part.name.lower() for part in VERIFIED_PARTS], "part").upper()]


def _task_goal(search: SearchRecord | None, eval_data: Path | None) -> Goal | None:
    """The goal that keeps a score, with the given file; None if no score is guaranteed.

    Raises:
        InvalidArgument: The file is missing, or there is no such goal.
        InvalidData: This version does not know the task.
    """
    goal = search.goal if search is not None and search.gain else GoalRecord()
    if goal.task is None or goal.keep is None:
        if eval_data is not None:
            raise InvalidArgument(
                f"`eval_data` is {eval_data}, and the record guarantees no score of a task",
                "leave it out",
                code="verify.eval_data",
            )
        return None
    if eval_data is None:
        raise InvalidArgument(
            f"the record guarantees {goal.keep:g} of the {goal.task} score on {goal.eval_data}:"
            " expected `eval_data`",
            "give this file, or other labeled data in its format",
            code="verify.eval_data",
        )
    task = cast(TaskName, _known(goal.task, get_args(TaskName), "task"))
    return Goal(keep=goal.keep, task=task, eval_data=eval_data)


def _measure(entry: LineageEntry, given: Measure) -> Measure:
    """The given measure, that of the search, or the only one that is recorded.

    A search that keeps a score alone names no measure of its qualities.

    Raises:
        InvalidData: This version does not know the measure.
    """
    if given != "auto":
        return given
    measures = {quality.measure for quality in entry.qualities}
    measure = measures.pop() if len(measures) == 1 else "auto"
    if (search := search_of(entry)) is not None and search.goal.measure != "score":
        measure = search.goal.measure
    return cast(Measure, _known(measure, get_args(Measure), "measure"))


def _known(value: str, values: Sequence[str], name: str) -> str:
    if value not in values:
        raise InvalidData(
            f"{RECORD}: the {name} of the verification is {value!r}, which this version does not"
            " know",
            "update attnserve, or optimize the original again",
            code="verify.unknown",
        )
    return value


def _device(search: SearchRecord | None, device: Device) -> Device:
    """The device with the runtime of the search, unless another one is given."""
    if search is None or device.runtime != AUTO:
        return device
    return replace(device, runtime=search.goal.runtime)


# ---- rows ---------------------------------------------------------------------------------------


def _read_rows(
    entry: LineageEntry,
    paths: Sequence[Path],
    model: ir.Model,
    artifact: Artifact,
    tokenizer: Path | None,
) -> _Rows:
    """The recorded held-out rows if the files are those of the record, else all their rows.

    Raises:
        InvalidArgument: No file is given.
        InvalidData: Only some are those of the record, they cannot be read, or are split in another
            way.
    """
    calibration = entry.calibration
    assert calibration is not None
    recorded = [file.sha256 for file in calibration.files or [calibration]]
    if not paths:
        raise InvalidArgument(
            f"`data` is not given; the model was verified on rows of {calibration.file}",
            f"give this data (sha256 {', '.join(recorded)}), or new data",
            code="verify.no_data",
        )
    given = {path: path_sha256(path, "*.npz") for path in paths}
    if set(recorded).isdisjoint(given.values()):
        data = load_inputs(paths, model, artifact, tokenizer=tokenizer, split=False)
        return _Rows(data)
    if sorted(given.values()) != sorted(recorded):
        raise InvalidData(
            f"`data` is only a part of the calibration data {calibration.file}, or more than it",
            "give all its files, or only new data",
            code="verify.some_files",
        )
    paths = sorted(paths, key=lambda path: recorded.index(given[path]))
    task = _learned_task(entry)
    data = load_inputs(
        paths,
        model,
        artifact,
        weights=calibration.weights,
        tokenizer=tokenizer,
        sequence=calibration.joined_to,
        read=reader_of({} if task is None else read_labeled(paths, task, artifact)),
    )
    _require_same_counts(calibration, data.source)
    names = {
        now.file: then.file for now, then in zip(data.source.files, calibration.files, strict=True)
    }
    return _Rows(data, True, _part(search_of(entry)), names)


def _learned_task(entry: LineageEntry) -> LearnedTask | None:
    """The task whose labels a training learned; None if it learned none.

    Raises:
        InvalidData: This version does not know the task.
    """
    scores = entry.scores if isinstance(entry, RecoverEntry) else None
    if not scores:
        return None
    task = str(scores.get("before", {}).get("task"))
    return cast(LearnedTask, _known(task, get_args(LearnedTask), "task"))


def _require_same_counts(recorded: Calibration, now: Calibration) -> None:
    """Check that the rows of the calibration data are tokenized and split as recorded.

    Raises:
        InvalidData: A number of rows or tokens differs from the record.
    """
    if (change := recorded.changed_count(now)) is not None:
        raise InvalidData(
            f"{recorded.file}: {change}: its texts are tokenized or split in another way",
            "give the tokenizer and the version of attnserve of the record",
            code="verify.other_split",
        )


# ---- checks -------------------------------------------------------------------------------------


def _checks(
    runtime: str, goal: float | None, recorded: Sequence[Quality], found: Fidelity, rows: _Rows
) -> list[GuaranteeCheck]:
    """Compare the qualities of one runtime with the guarantees.

    Args:
        goal: What the search guarantees of each quality, if it does.

    Raises:
        InvalidData: The record has qualities of other outputs, files or measures.
    """

    def key(quality: Quality) -> object:
        subject = quality.subject
        file = rows.names.get(subject.file, subject.file)
        return subject._replace(file=file) if rows.is_recorded else subject.output

    # By output, the lowest one counts.
    descending = sorted(recorded, key=lambda quality: -quality.guaranteed)
    lowest = {key(quality): quality for quality in descending}
    is_bounded = rows.part is not None and not rows.part.is_unused
    checks: list[GuaranteeCheck] = []
    for quality in found.qualities:
        then = lowest.get(key(quality))
        if then is None or then.measure != quality.measure:
            raise InvalidData(
                f"{RECORD} has no {quality.measure} of {', '.join(filter(None, quality.subject))}",
                "give the recorded measure as `measure`, or optimize the original again",
                code="verify.other_quality",
            )
        losses = quality.losses
        loss = losses.bounded if is_bounded else losses.measured
        kept, guarantee = (quality.value, then.guaranteed) if goal is None else (1 - loss, goal)
        holds = quality.is_finite and kept >= guarantee - ROUNDING
        checks.append(
            GuaranteeCheck(
                runtime,
                *quality.subject,
                quality.measure,
                then.value,
                quality.value,
                kept,
                guarantee,
                holds,
            )
        )
    if missing := lowest.keys() - {key(quality) for quality in found.qualities}:
        raise InvalidData(
            f"{RECORD} has a quality of {next(iter(missing))}, which the models do not give",
            "optimize the original again",
            code="verify.other_quality",
        )
    return checks


@dataclass(frozen=True)
class _GuaranteedScore:
    """The score of a task of which a search keeps a share."""

    task: ScoredTask
    keep: float
    search: SearchRecord
    job: Job

    @classmethod
    def of(cls, goal: Goal, search: SearchRecord, job: Job) -> Self:
        task = ScoredTask.of(goal, job)
        assert task is not None and goal.keep is not None
        return cls(task, goal.keep, search, job)

    def check(self, runtime: str, model: ir.Model, fidelity: Fidelity) -> GuaranteeCheck:
        """The kept share in the runtime of the search, on its rows, or on those of a new file."""
        is_recorded = path_sha256(self.task.data) == self.search.goal.eval_data_sha256
        part = (_part(self.search) if is_recorded else None) or HeldOut.ALL
        share = self.task.share(model, fidelity, part, self.job)
        last = self.search.verifications[-1].share if self.search.verifications else None
        is_bounded = is_recorded and not part.is_unused
        return self._check(runtime, share, is_bounded, last and last.value)

    def check_in(self, runtime: str, model: ir.Model, open_new: OpenNew) -> GuaranteeCheck:
        """The kept share on all rows in another runtime, as when it was verified there."""
        return self._check(runtime, self.task.share_in(model, self.job, open_new))

    def _check(
        self, runtime: str, share: Share, is_bounded: bool = False, recorded: float | None = None
    ) -> GuaranteeCheck:
        kept = 1 - (share.losses.bounded if is_bounded else share.losses.measured)
        return GuaranteeCheck(
            runtime,
            "",
            self.task.data.name,
            "",
            "score",
            recorded,
            share.value,
            kept,
            self.keep,
            kept >= self.keep - ROUNDING,
        )
