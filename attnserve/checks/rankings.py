"""Compare rankings of documents: measures of relevance, and the agreement of two orders."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from graph_passes.errors import MissingExtra

if TYPE_CHECKING:
    from jaxtyping import Float

__all__ = ["Ranking", "best_agrees", "kendall_tau", "measure_rankings"]

GRADES = 10**5
"""The highest grade of a document whose relevance is not a small whole number.

Grades change nDCG by at most about 1e-5."""


@dataclass(frozen=True)
class Ranking:
    """The documents of one query.

    Attributes:
        documents: Their keys in the order of the model, best first.
        relevance: The relevance of all judged documents by key; not judged is 0.
    """

    documents: Sequence[str]
    relevance: Mapping[str, float]

    @classmethod
    def of_scores(cls, scores: Float[np.ndarray, " N"], relevance: Sequence[float]) -> Ranking:
        """All documents are judged. Documents with equal scores keep their order."""
        order = np.argsort(-scores, kind="stable")
        judged = {str(index): value for index, value in enumerate(relevance)}
        return cls([str(index) for index in order], judged)

    def grades(self) -> dict[str, int]:
        """Whole numbers with the ratios of the relevance, which is all that nDCG depends on.

        trec_eval refuses fractions, and its memory is proportional to the highest grade.
        """
        best = max(self.relevance.values(), default=0.0)
        whole = best <= GRADES and all(float(x).is_integer() for x in self.relevance.values())
        scale = 1.0 if whole or best <= 0 else GRADES / best
        return {
            key: max(1, round(value * scale)) if value > 0 else 0
            for key, value in self.relevance.items()
        }


def measure_rankings(
    rankings: Sequence[Ranking], *measures: str
) -> Iterator[Float[np.ndarray, " Q"]]:
    """Yield the values of each measure, such as "nDCG@10", for the queries in order.

    trec_eval computes them, through ir-measures (MacAvaney et al. 2022). nDCG has linear gains.

    Raises:
        MissingExtra: ir-measures is not installed.
    """
    try:
        import ir_measures
    except ImportError as error:
        raise MissingExtra(
            "Measures of rankings need ir-measures, which has no wheel for this processor.",
            "pip install ir-measures (needs a C compiler)",
        ) from error
    grades = {str(query): ranking.grades() for query, ranking in enumerate(rankings)}
    runs = {
        str(query): {key: -float(rank) for rank, key in enumerate(ranking.documents)}
        for query, ranking in enumerate(rankings)
    }
    wanted = [ir_measures.parse_measure(name) for name in measures]
    values = {name: np.zeros(len(rankings)) for name in measures}
    for found in ir_measures.iter_calc(wanted, grades, runs):
        values[str(found.measure)][int(found.query_id)] = found.value
    yield from values.values()


def kendall_tau(a: Float[np.ndarray, " N"], b: Float[np.ndarray, " N"]) -> float:
    """Kendall's tau-b of two lists of scores (Kendall 1945), -1 to 1.

    The value is 1 if all scores within each list are equal, and 0 if that holds for one list.
    """
    from scipy.stats import kendalltau

    is_flat = np.ptp(a) == 0, np.ptp(b) == 0
    if any(is_flat):
        return float(all(is_flat))
    found: Any = kendalltau(a, b)
    return round(float(found.statistic), 12)  # equal orders give 1


def best_agrees(a: Float[np.ndarray, " N"], b: Float[np.ndarray, " N"]) -> bool:
    """Whether the best document of b is one of the best of a."""
    return bool(a[np.argmax(b)] == a.max())
