"""Search for the fastest plan that keeps the requested quality, by measurement.

The goal is a share of the quality (``keep``) or a speed-up (``target_speedup``).
``docs/concepts/search.md`` explains the stages, and this package lists their types.
"""

from __future__ import annotations

from attnserve.context import AUTO
from attnserve.job import Job
from attnserve.models.output_kinds import require_measurable
from attnserve.options import Goal
from attnserve.planning.search.precision_search import PrecisionSearch
from attnserve.planning.search.precisions import search_precisions
from attnserve.planning.search.search_result import SearchResult

__all__ = ["run_search"]


def run_search(goal: Goal, job: Job) -> SearchResult:
    """Search for a plan; ``attnserve.plan`` describes the goal.

    Times, losses and the measurements of candidates are stored in the user's cache folder, so that
    an interrupted search continues. The caller removes them once the result is written.

    Args:
        job: Its weights are finite.

    Raises:
        CheckFailed: The goal cannot be reached.
        CannotRewrite: The precisions cannot be compared.
        InvalidArgument: The model does not run at the requested shape, or the goal does not fit it.
        InvalidModel: No output has a quality that can be measured.
        InvariantBroken: A pass has a defect.
    """
    if goal.measure != "score":
        require_measurable(job.original)
    if job.target.precision == AUTO:
        return search_precisions(goal, job)
    return PrecisionSearch.run(goal, job).verified()
