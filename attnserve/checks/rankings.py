"""Compare rankings of documents: nDCG, and the agreement of two orders."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from jaxtyping import Float

__all__ = ["CUTOFF", "best_agrees", "kendall_tau", "ndcg_at_10"]

CUTOFF = 10
"""Cutoff rank of nDCG, as in BEIR (Thakur et al. 2021)."""


def ndcg_at_10(ranked: Float[np.ndarray, " N"], relevance: Sequence[float]) -> float:
    """nDCG@10 with linear gains (Jarvelin and Kekalainen 2002, as in trec_eval).

    Args:
        ranked: The relevance of the documents in the order of the model.
        relevance: The relevance of all judged documents, of which one is above 0.
    """
    discounts = 1 / np.log2(np.arange(CUTOFF) + 2)
    best = np.sort(np.maximum(relevance, 0))[::-1][:CUTOFF]
    gains = np.maximum(ranked[:CUTOFF], 0)
    return float(gains @ discounts[: len(gains)] / (best @ discounts[: len(best)]))


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
