"""Measures of the relations between texts: similarities, neighbors, orders of documents.

``quality`` lists the measures; ``measures`` has the other ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from attnserve.checks.measures import FeaturesMeter, Meter, Scores, TextSums, finite
from attnserve.checks.rankings import Ranking, best_agrees, kendall_tau, measure_rankings
from attnserve.data.row_batches import row_info
from attnserve.models.embeddings import BY_COSINE, Embedding
from attnserve.models.masks import flat_mask, token_mask
from attnserve.runtime.interface import Batch
from graph_passes.errors import InvalidData

if TYPE_CHECKING:
    from jaxtyping import Bool, Float

__all__ = ["MIN_DOCUMENTS", "NEIGHBORS", "IndexMeter", "OrderMeter", "SimilarityMeter"]

NEIGHBORS = 10
"""Number of nearest neighbors that ``index`` and ``overlap`` compare."""

MIN_DOCUMENTS = 5 * NEIGHBORS
"""Minimum number of documents to compare ``NEIGHBORS``; of fewer documents, a fifth is compared."""

MOST_PAIRED = 3000
"""Maximum number of texts whose pairs are compared; the cost is quadratic (3,000 take 1 GB)."""


class SimilarityMeter(Meter):
    """Rank correlation of pairwise similarities, overlap of neighbors, and R^2 of embeddings.

    Correlation and overlap use at most ``MOST_PAIRED`` texts.
    """

    def __init__(self, embedding: Embedding = BY_COSINE, window: int | None = None) -> None:
        super().__init__(window)  # the sums are the pooled vectors of both models
        self.embedding = embedding
        self.features = FeaturesMeter(window)

    def add(self, a: np.ndarray, b: np.ndarray, batch: Batch) -> None:
        before, after = self._pooled(a, b, batch)
        self.sums.add(before, after)
        self.features.add(before, after, {})

    def _pooled(
        self, a: np.ndarray, b: np.ndarray, batch: Batch
    ) -> tuple[Float[np.ndarray, "B D"], Float[np.ndarray, "B D"]]:
        """The embeddings of both models."""
        if a.shape == b.shape:  # otherwise one of them is pooled
            self._tokens(a, b, batch)  # sets is_finite
        if a.ndim == 2 and (flat := flat_mask(batch, len(a))) is not None:
            a, b = a[flat.reshape(-1)], b[flat.reshape(-1)]
        mask = token_mask(batch, a.shape[:2]) if a.ndim == 3 else np.ones((len(a), 1), bool)
        before, after = (self.embedding.vectors(finite(x), mask) for x in (a, b))
        return before, after

    def additive_loss(self) -> float:
        return self.features.additive_loss()

    def scores(self) -> Scores:
        before, after = self._vectors(self.sums)
        r2 = self.features.scores()
        if len(before) < 4:  # a correlation of three pairs is not meaningful
            return replace(r2, measure="similarity", also={"r2": r2.value})
        x, y = before @ before.T, after @ after.T
        further = {"overlap": float(_overlap(x, y, itself=False).mean()), "r2": r2.value}
        return replace(_pair_correlation(x, y), also=further, second=r2)

    def _vectors(self, sums: TextSums) -> list[Float[np.ndarray, "N D"]]:
        """The vectors of both models, of at most ``MOST_PAIRED`` texts."""
        if not sums.columns:
            return [np.zeros((0, 1))] * 2
        return [_evenly(sums.column(i).astype(np.float64)) for i in (0, 1)]


class OrderMeter(Meter):
    """Kendall's tau between the scores of a query's documents, averaged over the queries.

    Rows must be lists. The sums are the query, the relevance, and both scores of each row. Queries
    with one document are left out.
    """

    def __init__(self, window: int | None = None) -> None:
        super().__init__(window)
        self.features = FeaturesMeter(window)

    def add(self, a: np.ndarray, b: np.ndarray, batch: Batch) -> None:
        lists = row_info(batch).lists
        assert lists is not None
        self._tokens(a, b, batch)  # sets is_finite
        self.sums.add(*lists, *(finite(x).reshape(-1) for x in (a, b)))
        self.features.add(a, b, {})

    def additive_loss(self) -> float:
        return self.features.additive_loss()

    def scores(self) -> Scores:
        query, relevance, before, after = (self.sums.column(i) for i in range(4))
        order = np.argsort(query, kind="stable")
        starts = np.flatnonzero(np.diff(query[order])) + 1
        lists = [rows for rows in np.split(order, starts) if len(rows) > 1]
        r2 = self.features.scores()
        if not lists:
            return replace(r2, measure="tau", also={"r2": r2.value})
        taus = np.array([kendall_tau(before[rows], after[rows]) for rows in lists])
        best = np.array([best_agrees(before[rows], after[rows]) for rows in lists], float)
        chance = float(np.mean([1 / len(rows) for rows in lists]))
        top1 = Scores("top1", float(best.mean()), influence=best, single=best, constant=chance)
        labeled = [rows for rows in lists if np.nanmax(relevance[rows], initial=0) > 0]
        ndcg = {
            name: float(_ndcg(relevance, scores, labeled).mean())
            for name, scores in (("ndcg_at_10", after), ("ndcg_at_10_original", before))
            if labeled
        }
        return Scores(
            measure="tau",
            value=float(taus.mean()),
            influence=taus,
            single=taus,
            also={"top1": top1.value, **ndcg, "r2": r2.value},
            second=top1,
        )


def _ndcg(
    relevance: Float[np.ndarray, " N"], scores: Float[np.ndarray, " N"], lists: Sequence[np.ndarray]
) -> Float[np.ndarray, " Q"]:
    """nDCG@10 of each list of rows; documents without a relevance are not relevant."""
    relevance = np.nan_to_num(relevance, nan=0.0)
    rankings = [Ranking.of_scores(scores[rows], relevance[rows].tolist()) for rows in lists]
    return next(measure_rankings(rankings, "nDCG@10"))


class IndexMeter(SimilarityMeter):
    """Overlap of the documents that queries find in an index of the original's vectors.

    Queries are embedded by both models, documents by the original. The value is the mean share of a
    query's nearest documents that the new model finds too. Without roles, every text is a query,
    and the other texts are its documents. The further measures are symmetric: the new model embeds
    the documents too.
    """

    def __init__(self, embedding: Embedding = BY_COSINE, window: int | None = None) -> None:
        super().__init__(embedding, window)
        self.documents = TextSums()  # the pooled vectors of both
        self.has_roles = False

    def add(self, a: np.ndarray, b: np.ndarray, batch: Batch) -> None:
        role = row_info(batch).role
        self.has_roles |= role is not None
        if role == "document":
            self.documents.add(*self._pooled(a, b, batch))
        else:
            super().add(a, b, batch)

    def scores(self) -> Scores:
        """The overlap, and the symmetric measures beside it.

        Raises:
            InvalidData: The data has no query, or a query has less than two documents.
        """
        has_roles = self.has_roles
        queries = self._vectors(self.sums)
        documents = self._vectors(self.documents) if has_roles else queries
        count = len(documents[0]) - (not has_roles)
        if count < 2 or not len(queries[0]):
            raise InvalidData(
                f"{len(queries[0])} queries search {max(count, 0)} documents: the measure index "
                "needs a query and two documents in every part of the data that is compared",
                "give more rows, of both roles if they have roles, or choose another `measure`",
                code="quality.few_documents",
            )
        (old, new), (old_documents, new_documents) = queries, documents
        found = old @ old_documents.T
        shares = _overlap(found, new @ old_documents.T, itself=has_roles)
        symmetric = _overlap(found, new @ new_documents.T, itself=has_roles)
        texts = map(np.vstack, zip(queries, documents, strict=True)) if has_roles else queries
        x, y = (rows @ rows.T for rows in map(_evenly, texts))
        r2 = self.features.scores()
        further = {"overlap": float(symmetric.mean()), "r2": r2.value}
        if len(x) >= 4:
            further = {"similarity": _pair_correlation(x, y).value, **further}
        return Scores(
            measure="index",
            value=float(shares.mean()),
            influence=shares,
            single=shares,
            constant=_constant_overlap(found, itself=has_roles),
            also=further,
            second=r2,
            documents=count if has_roles else 0,
        )


def _evenly(rows: Float[np.ndarray, "N D"]) -> Float[np.ndarray, "M D"]:
    """All rows, or ``MOST_PAIRED`` evenly spaced ones; batches are sorted by length."""
    count = min(len(rows), MOST_PAIRED)
    return rows[np.linspace(0, max(len(rows) - 1, 0), count).round().astype(int)]


def _pair_correlation(x: Float[np.ndarray, "N N"], y: Float[np.ndarray, "N N"]) -> Scores:
    """Spearman's correlation of two matrices of similarities over pairs of texts.

    A pair belongs to two texts, so that pairs are not independent: the influences are those of the
    jackknife, which leaves texts out one by one (Efron and Stein 1981). Ranks are over all pairs.
    """
    from scipy.stats import rankdata

    n = len(x)
    upper = np.triu_indices(n, 1)
    ranks: list[np.ndarray] = []
    for matrix in (x, y):
        rank = rankdata(np.round(matrix[upper], 9))
        rank = (rank - rank.mean()) / (rank.std() or 1.0)
        triangle = np.zeros((n, n))
        triangle[upper] = rank
        ranks.append(triangle + triangle.T)
    a, b = ranks
    pairs = len(upper[0])
    sums = [product.sum(1) for product in (a, b, a * a, b * b, a * b)]  # of each text
    correlation = _correlation(pairs, [s.sum() / 2 for s in sums])
    correlations_without = _correlation(pairs - (n - 1), [s.sum() / 2 - s for s in sums])
    influence = n * correlation - (n - 1) * correlations_without
    influence = influence - influence.mean() + correlation
    return Scores("similarity", float(correlation), influence, _correlation(n - 1, sums))


def _correlation(count: int, sums: Sequence[Any]) -> Any:
    """Pearson's correlation from the sums of a, b, a^2, b^2 and ab.

    The correlation is 1 if both are constant, and 0 if only one is.
    """
    a, b, aa, bb, ab = sums
    spread_a, spread_b = aa - a * a / count, bb - b * b / count
    product = np.sqrt(np.maximum(spread_a, 0) * np.maximum(spread_b, 0))
    constant = product <= 1e-12 * count
    both = (spread_a <= 1e-12 * count) & (spread_b <= 1e-12 * count)
    correlation = (ab - a * b / count) / np.where(constant, 1.0, product)
    return np.where(constant, np.where(both, 1.0, 0.0), np.clip(correlation, -1, 1))


def _overlap(
    x: Float[np.ndarray, "N M"], y: Float[np.ndarray, "N M"], *, itself: bool
) -> Float[np.ndarray, " N"]:
    """The share of the nearest neighbors of each text that stay.

    Args:
        x, y: The similarities of texts to their possible neighbors, by two models.
        itself: Whether text i may have the neighbor i; False if neighbor i is the text itself.
    """
    neighbors, kept = (_neighbors(matrix, itself=itself) for matrix in (x, y))
    return (neighbors & kept).sum(1) / neighbors.sum(1)


def _constant_overlap(x: Float[np.ndarray, "N M"], *, itself: bool) -> float:
    """The mean overlap of the best constant answer to all texts."""
    neighbors = _neighbors(x, itself=itself)
    count = int(neighbors[0].sum())
    return float(np.sort(neighbors.sum(0))[-count:].sum() / neighbors.sum())


def _neighbors(x: Float[np.ndarray, "N M"], *, itself: bool) -> Bool[np.ndarray, "N M"]:
    """The nearest neighbors of each text by its similarities: 10, or a fifth of few texts."""
    others = np.round(x, 9)
    if not itself:
        np.fill_diagonal(others, -np.inf)
    count = min(NEIGHBORS, max((x.shape[1] - (not itself)) // 5, 1))
    order = np.argsort(-others, axis=1, kind="stable")[:, :count]
    chosen = np.zeros(x.shape, bool)
    np.put_along_axis(chosen, order, True, axis=1)
    return chosen
