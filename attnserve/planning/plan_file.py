"""Read plan.json, and check that it was made for the same model and data."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, ValidationError

from attnserve.choices import SearchMeasure
from attnserve.context import Provider, RunContext
from attnserve.data.datasets import Dataset
from attnserve.data.lengths import Lengths
from attnserve.models.artifact import Artifact
from attnserve.models.checksums import fingerprint
from attnserve.planning.plan import HOW_TO_PLAN, Plan, first_problem
from attnserve.precision.convert import check_cpu
from graph_passes.errors import InvalidArgument, InvalidData

__all__ = ["planned_lengths", "planned_quality", "read_plan"]


class _Source(BaseModel):
    """A file that the plan was made with."""

    file: Any = None
    sha256: Any = None
    joined_to: Lengths | None = None


class _Settings(BaseModel):
    """The settings of the search that refitting repeats, and what it had to keep."""

    keep: float | None = None
    measure: SearchMeasure = "auto"
    seed: Annotated[int, Field(strict=True, ge=0)] = 0
    provider: Provider = "cpu"


class _PlanFile(BaseModel):
    """The keys of plan.json that are read; a report of the search is beside them."""

    format: Literal[2]  # plan.FORMAT
    model: _Source = _Source()
    calibration: _Source = _Source()
    asked: _Settings = _Settings()
    gain: bool = False
    plan: Any = None


def read_plan(
    path: Path, artifact: Artifact, data: Dataset, context: RunContext
) -> tuple[Plan, RunContext]:
    """The plan of a file that was made for this model and data, and the context it was fitted in.

    Raises:
        InvalidData: The file cannot be read, or is not a plan.
        InvalidArgument: It was made for another model or other data.
    """
    file = _read(path)
    expected = {"model": fingerprint(artifact), "calibration": data.source["sha256"]}
    for what, digest in expected.items():
        source: _Source = getattr(file, what)
        if source.sha256 != digest:
            raise InvalidArgument(
                f"{path}: it was made with another {what} ({source.file}, sha256 "
                f"{str(source.sha256)[:12]}; this one is {str(digest)[:12]})",
                "give the model, and the files and weights of `calib`, that it was made with, or "
                "make a new plan",
                code="plan.other_input",
            )
    try:
        plan = Plan.from_json(file.plan)
    except InvalidArgument as error:
        raise InvalidArgument(f"{path}: {error.what}", error.fix, code=error.code) from error
    check_cpu(plan.precision)
    # With the threads of the search.
    return plan, replace(context, provider=file.asked.provider, seed=file.asked.seed, threads=0)


def planned_quality(path: Path) -> float | None:
    """The quality that a plan promises; None if its search promised a score, or found no plan.

    Raises:
        InvalidData: The file cannot be read, or is not a plan.
    """
    file = _read(path)
    return file.asked.keep if file.gain and file.asked.measure != "score" else None


def planned_measure(path: Path, given: SearchMeasure) -> SearchMeasure:
    """The measure of quality of a plan's promise; the one that is given if it promises a score.

    Raises:
        InvalidArgument: Another measure is given.
        InvalidData: The file cannot be read, or is not a plan.
    """
    planned = _read(path).asked.measure
    if planned in ("score", given):
        return given
    if given != "auto":
        raise InvalidArgument(
            f"`measure` is {given}, and {path} promises {planned}",
            "leave `measure` out; `attnserve verify` measures in other ways",
            code="optimize.conflict",
        )
    return planned


def planned_lengths(path: Path) -> Lengths | None:
    """The lengths for which the search joined calibration texts; None if it did not.

    Raises:
        InvalidData: The file cannot be read, or is not a plan.
    """
    return _read(path).calibration.joined_to


def _read(path: Path) -> _PlanFile:
    try:
        return _PlanFile.model_validate(json.loads(path.read_text(encoding="utf-8")))
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
    except (ValueError, RecursionError) as error:
        raise InvalidData(f"{path}: not JSON: {error}", HOW_TO_PLAN, code="plan.invalid") from error
