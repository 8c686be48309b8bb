"""Read plan.json, and check that it was made for the same model and data."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import onnx_ir as ir
from pydantic import Field, PlainSerializer, PlainValidator, ValidationError

from attnserve.context import AUTO, Provider, RunContext
from attnserve.data.datasets import Dataset
from attnserve.data.lengths import spread_lengths
from attnserve.job import Job
from attnserve.literals import SearchMeasure
from attnserve.models.artifact import Artifact
from attnserve.models.checksums import fingerprint
from attnserve.models.json_files import first_problem
from attnserve.models.lineage import Calibration, Source
from attnserve.models.measured import Fidelity, ServedSpeed
from attnserve.models.recorded import Always, Recorded
from attnserve.models.search_record import SearchRecord
from attnserve.options import Data, Lengths, Run, Target
from attnserve.planning.plans.plan import HOW_TO_PLAN, Plan
from attnserve.precision.convert import check_cpu
from attnserve.runtime.cache import digest
from attnserve.runtime.session import selectable_runtimes
from graph_passes.analysis.workload import Phase
from graph_passes.errors import CheckFailed, InvalidArgument, InvalidData

__all__ = [
    "FORMAT",
    "Decision",
    "PlanRecord",
    "SavedPlan",
    "TimedBlock",
    "TimedReuse",
]

FORMAT = 2
"""Format version of plan.json. Format 1 (attnserve 0.1) uses other names and is refused."""


class Decision(Recorded, frozen=True):
    """The decision for one block, and the reason.

    Attributes:
        kept, count: The number of heads or neurons afterwards and before.
        head_size: K of truncated queries and keys, with the dimension of the content term.
        rank: The shared dimensions R, if heads share any.
        source: The attention whose probabilities are reused, if any.
        operator: Its implementation: an operator (``BlockOperator``), "skip", "sparse" or "reuse".
        ms_before, ms_after: Latency of the block alone, mean over the requested lengths.
        predicted_loss: The loss at the model's output caused by this block alone: 1 - R^2 of
            embeddings and features, a share of the KL divergence of logits.
        in_float: Whether it is not converted to integers (``Scheme.rest``).
    """

    block: str
    kind: str
    kept: int
    count: int
    head_size: Always[int | None] = None
    rank: Always[int | None] = None
    source: Always[str | None] = None
    operator: Annotated[str, Field(alias="written")]
    ms_before: float
    ms_after: float
    predicted_loss: float
    why: str
    in_float: Always[bool] = False


class TimedBlock(Recorded, frozen=True):
    """The latencies of a block, and of equal ones, in milliseconds at each of the lengths.

    Attributes:
        precision: The precision of its weights if it is another one than that of the search.
        operator: The fastest operator of those in ``operators``.
        kept: By the remaining heads or neurons, with the change if there is one.
    """

    block: str
    kind: str
    precision: str = ""
    lengths: Annotated[tuple[int, ...], Field(alias="sequences")] = ()
    exported: Annotated[tuple[float, ...], Field(alias="as_exported")] = ()
    operator: Annotated[str, Field(alias="written")] = ""
    operators: Annotated[
        Always[Mapping[str, tuple[float, ...]]], Field(alias="forms", default_factory=dict)
    ]
    kept: Mapping[str, tuple[float, ...]] = {}


class TimedReuse(Recorded, frozen=True):
    """The latencies of a block that reuses the probabilities of another one, with that one.

    Attributes:
        source: The other block.
        kept: By the remaining heads.
        saved_ms: Mean time that the reuse saves.
    """

    block: str
    kind: Literal["reuse"]
    source: str
    lengths: Annotated[tuple[int, ...], Field(alias="sequences")] = ()
    kept: Mapping[str, tuple[float, ...]] = {}
    saved_ms: float = 0.0


def _read_plan(content: Any) -> Plan:
    return content if isinstance(content, Plan) else Plan.from_json(content)


class PlanRecord(SearchRecord, frozen=True):
    """The content of plan.json: a plan, and the search that made it.

    Attributes:
        decisions: The decision for each block.
        plan: The plan; empty if the original is returned.
        latency_ms: The latencies of every distinct block, and of every distinct pair.
    """

    format: Literal[2]
    model: Source = Source()
    calibration: Calibration = Calibration()
    speedups: ServedSpeed | None = None
    decisions: Annotated[tuple[Decision, ...], Field(alias="layers")] = ()
    plan: Annotated[Plan, PlainValidator(_read_plan), PlainSerializer(Plan.to_json)] = Plan()
    latency_ms: tuple[TimedReuse | TimedBlock, ...] = ()
    versions: Mapping[str, str] = {}


@dataclass(frozen=True)
class SavedPlan:
    """A plan.json that was read, with the checks that it fits the model, the data and the machine.

    Attributes:
        record: Its content.
    """

    path: Path
    record: PlanRecord

    @classmethod
    def read(cls, path: Path) -> SavedPlan:
        """Read and validate a plan.json; its blocks are checked when the plan is applied.

        Raises:
            InvalidData: The file cannot be read, or is not a plan.
            InvalidArgument: A step of the plan is unknown or invalid.
        """
        return cls(path, _read(path))

    def require_guarantee(self, fidelity: Fidelity) -> None:
        """Check that the model of the plan keeps what its search guarantees.

        The intervals of all qualities are compared, because these rows differ from the
        verification rows of the search.

        Raises:
            CheckFailed: The upper end of an interval is below the guarantee.
        """
        guaranteed = self.record.guaranteed
        if guaranteed is None:
            return
        for quality in fidelity.qualities:
            if quality.ci95 is None or quality.ci95[1] >= guaranteed:
                continue
            subject = ", ".join(filter(None, (quality.measure, quality.file, quality.lengths)))
            raise CheckFailed(
                f"the plan keeps {quality.value:.4f} ({subject}, at most {quality.ci95[1]:.4f}) on"
                f" {fidelity.data}, and its goal is {guaranteed:g}: nothing was written",
                "make a new plan on this machine",
                code="plan.promise",
            )

    @property
    def key(self) -> str:
        """Key of the plan, its model and its data, for the checkpoint of a training."""
        record = self.record
        return digest([record.model.sha256, record.calibration.sha256, record.plan.to_json()])

    def check_run(self, run: Run) -> None:
        """Check that options that affect the model have the values of the search, if given.

        Raises:
            InvalidArgument: One has another value.
        """
        goal = self.record.goal
        planned = {"seed": goal.seed, "provider": goal.provider, "runtime": goal.runtime}
        for name in run.model_fields_set & planned.keys():
            given = getattr(run, name)
            if given not in (AUTO, planned[name]):
                raise InvalidArgument(
                    f"`{name}` is {given}, and {self.path} was made with {planned[name]}",
                    f"leave `{name}` out, or make a new plan with it",
                    code="optimize.conflict",
                )

    def required_measure(self, given: SearchMeasure) -> SearchMeasure:
        """The measure of the guaranteed quality; the given one if the guarantee is a task score.

        Raises:
            InvalidArgument: Another measure is given.
            InvalidData: This version does not know the measure.
        """
        planned = _known(self.path, self.record.goal.measure, SearchMeasure)
        if planned in ("score", given):
            return given
        if given != "auto":
            raise InvalidArgument(
                f"`measure` is {given}, and the goal of {self.path} is in {planned}",
                "leave `measure` out; `attnserve verify` measures in other ways",
                code="optimize.conflict",
            )
        return planned

    def job(
        self,
        artifact: Artifact,
        original: ir.Model,
        data: Data,
        target: Target,
        measure: SearchMeasure,
        context: RunContext,
    ) -> Job:
        """Read the data of the plan, for the device, the seed and the measure of its search.

        The target workloads and the threads are those of the search too, unless they are given:
        they affect what is timed and counted, and not the model.

        Raises:
            InvalidArgument: Another measure is given.
            InvalidData: A file cannot be used, or this version does not know a value of the search.
        """
        goal, device = self.record.goal, context.device
        target = target.model_copy(
            update={
                "batch": target.batch or goal.batch,
                "sequence": target.sequence or _lengths(goal.sequences),
                "phase": target.phase or _known(self.path, goal.phase, Phase),
            }
        )
        provider = _known(self.path, goal.provider, Provider)
        device = replace(device, provider=provider, threads=device.threads or goal.threads)
        in_runtime = replace(device, runtime=goal.runtime)
        job = Job.read(
            artifact,
            original,
            data,
            target,
            measure=self.required_measure(measure),
            joined=self.record.calibration.joined_to,
            context=replace(context, device=in_runtime, seed=goal.seed),
        )
        # The record has the runtime of its losses; serving selects from those that are given.
        return replace(job, runtimes=selectable_runtimes(device))

    def plan_for(self, artifact: Artifact, data: Dataset) -> Plan:
        """Return the plan after checking that it was made for this model and data.

        Raises:
            InvalidArgument: The plan was made for another model or other data.
        """
        expected = {"model": fingerprint(artifact), "calibration": data.source.sha256}
        for what, checksum in expected.items():
            source: Source | Calibration = getattr(self.record, what)
            if source.sha256 != checksum:
                raise InvalidArgument(
                    f"{self.path}: it was made with another {what} ({source.file}, sha256 "
                    f"{(source.sha256 or 'unknown')[:12]}; this one is {checksum[:12]})",
                    "give the model, and the files and weights of `calib`, that it was made with, "
                    "or make a new plan",
                    code="plan.other_input",
                )
        if (change := self.record.calibration.changed_count(data.source)) is not None:
            raise InvalidArgument(
                f"{self.path}: {change}: it was made with another tokenizer, or by another version"
                " of attnserve",
                "give the `tokenizer` that it was made with, or make a new plan",
                code="plan.other_input",
            )
        check_cpu(self.record.plan.precision)
        return self.record.plan


def _lengths(sequences: Sequence[int]) -> Lengths | None:
    """The option that gives these target lengths; None for those of the data."""
    if not sequences:
        return None
    low, high = sequences[0], sequences[-1]
    lengths = low if low == high else (low, high)
    return lengths if spread_lengths(lengths) == tuple(sequences) else None


def _known(path: Path, value: str, kind: Any) -> Any:
    """Check that a value is a member of a ``Literal``; newer versions may write other values.

    Raises:
        InvalidData: The value is not a member.
    """
    if value not in get_args(kind):
        raise InvalidData(
            f"{path}: `asked` names {value}, which this version does not know",
            HOW_TO_PLAN,
            code="plan.invalid",
        )
    return value


def _read(path: Path) -> PlanRecord:
    """The content of plan.json.

    Raises:
        InvalidData: The file cannot be read, or is not a plan.
        InvalidArgument: A step of the plan is unknown or invalid.
    """
    try:
        return PlanRecord.model_validate(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError as error:
        raise InvalidData(f"{path}: no such file", "check the path", code="plan.file") from error
    except OSError as error:
        raise InvalidData(
            f"{path}: cannot be read: {error.strerror}", "check the path", code="plan.file"
        ) from error
    except ValidationError as error:  # a ValueError too
        is_format = error.errors()[0]["loc"] in ((), ("format",))
        raise InvalidData(
            f"{path}: {first_problem(error)}",
            HOW_TO_PLAN,
            code="plan.format" if is_format else "plan.invalid",
        ) from error
    except InvalidArgument as error:
        raise InvalidArgument(f"{path}: {error.what}", error.fix, code=error.code) from error
    except (ValueError, RecursionError) as error:
        raise InvalidData(f"{path}: not JSON: {error}", HOW_TO_PLAN, code="plan.invalid") from error
