"""Voting-to-Stay: select the most representative head of each group of similar heads.

Grouped Head Attention (ACL 2023), section 3.2 and algorithm 1: heads are clustered by feature maps,
each batch votes for the most typical head of each cluster, and the head with most votes stays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from attnserve.calibration.activations import by_head, probabilities_by_head, probabilities_of
from attnserve.context import DEFAULT_CONTEXT, RunContext
from attnserve.models.masks import no_token, not_finite, token_mask
from attnserve.runtime.interface import Batch
from attnserve.runtime.observer import observe
from graph_passes.blocks import AttentionBlock
from graph_passes.errors import InvalidArgument

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int

__all__ = ["Votes", "cosines", "elect_heads", "group_heads", "k_means", "voting_to_stay"]

RESTARTS = 10
"""Number of k-means runs, of which the best is used."""


@dataclass(frozen=True, eq=False)
class Votes:
    """Groups and votes of the heads of one layer.

    Attributes:
        groups: The group of each head, numbered from 0 in the order of their first heads.
        votes: Number of votes of each head: one vote per group, batch and kind of feature map
            (values, probabilities, contexts).
        mask: 1 for the head of each group with most votes (the first of equals), 0 for the others.
    """

    groups: Int[np.ndarray, " H"]
    votes: Int[np.ndarray, " H"]
    mask: Int[np.ndarray, " H"]


def voting_to_stay(
    model: ir.Model,
    blocks: Sequence[AttentionBlock],
    batches: Sequence[Batch],
    *,
    groups: int | Mapping[str, int],
    context: RunContext = DEFAULT_CONTEXT,
) -> dict[str, Votes]:
    """Group the heads of each layer and elect one head per group (V2S, algorithm 1), by block name.

    A head has three feature maps: its values (real keys), its probabilities and its contexts (real
    queries). Heads are grouped by k-means on E of the paper, here from all three maps: the cosines
    between the heads' maps over all data, averaged over the three. Then each batch votes three
    times in each group, for the head whose map has the largest cosine with the mean map of its
    group, eta of the paper. The model is not trained: the group-constrained training of the paper,
    which makes the groups pronounced, is in ``attnserve.nn.grouped``.

    Only the inner products of heads are stored per batch, H x H for each kind of map.

    Args:
        blocks: Their values and probabilities must be values of the graph.
        groups: C, the number of groups: for all layers, or by block name. No group is empty.
        context: The settings of the run; the seed selects the starts of k-means.

    Raises:
        InvalidArgument: ``groups`` is not between 1 and H, or lacks a block.
        InvalidData: The model refuses a batch, a block sees no real token, or its activations are
            not finite.
    """
    num_groups = {block.name: _groups(block, groups) for block in blocks}
    grams: dict[str, list[np.ndarray]] = {block.name: [] for block in blocks}  # 3 H H a batch
    values = [_feature_maps(block) for block in blocks]
    for batch, feature_maps in observe(model, values, batches, context, "vote on heads"):
        for block, maps in zip(blocks, feature_maps, strict=True):
            products = _products(block, maps, batch)
            if products.any():  # otherwise the batch is only padding
                grams[block.name].append(products)
    return {
        block.name: _elect(block, grams[block.name], num_groups[block.name], context.seed)
        for block in blocks
    }


def _groups(block: AttentionBlock, groups: int | Mapping[str, int]) -> int:
    """The number of groups of a block.

    Raises:
        InvalidArgument: The number is missing, or not between 1 and H.
    """
    count = groups.get(block.name) if isinstance(groups, Mapping) else groups
    if count is None:
        raise InvalidArgument(
            f"{block.name}: `groups` has no number for this block",
            "name every block, or pass one number for all",
            code="voting.groups_missing",
        )
    if not 1 <= count <= block.num_heads:
        raise InvalidArgument(
            f"{block.name}: `groups` is {count}: expected 1 to {block.num_heads} (its heads)",
            "choose a number in this range",
            code="voting.groups",
        )
    return count


def _feature_maps(block: AttentionBlock) -> list[ir.Value]:
    """The values, the context and the probabilities of a block."""
    values = block.v.output
    assert values is not None, f"{block.name}: its values are not in the graph"
    return [values, block.context, *probabilities_of(block)]


def _products(
    block: AttentionBlock, seen: Sequence[np.ndarray], batch: Batch
) -> Float[np.ndarray, "3 H H"]:
    """Inner products of the heads' values, probabilities and contexts in one batch.

    Args:
        seen: The elements of ``_feature_maps``.
    """
    values, head_outputs, *probabilities = seen
    contexts = by_head(block, head_outputs)
    B, _, S, V = contexts.shape
    values = values.transpose(block.v.axes)
    if block.v.layout == "B T H*K":
        values = values.reshape(*values.shape[:2], -1, V).swapaxes(1, 2)
    values = values.reshape(B, -1, *values.shape[-2:])  # B G T V
    values = values.repeat(block.num_heads // values.shape[1], axis=1)
    queries = token_mask(batch, (B, S))
    keys = token_mask(batch, (B, values.shape[2]))
    p_by_head = probabilities_by_head(block, probabilities)
    maps = [(values, keys), (p_by_head, queries), (contexts, queries)]
    return np.stack([_gram(array, real) for array, real in maps])


def _gram(
    array: Float[np.ndarray, "B H T X"], real: Bool[np.ndarray, "B T"]
) -> Float[np.ndarray, "H H"]:
    """Inner products of one kind of feature map over the real tokens."""
    heads = array.swapaxes(1, 2)[real].swapaxes(0, 1).astype(np.float32)  # H Q X
    flat = heads.reshape(array.shape[1], -1)
    return (flat @ flat.T).astype(np.float64)


def _elect(
    block: AttentionBlock, grams: Sequence[Float[np.ndarray, "3 H H"]], count: int, seed: int
) -> Votes:
    """The groups and votes of one layer.

    Raises:
        InvalidData: The data has no real token, or activations are not finite.
    """
    if not grams:
        raise no_token(block.name)
    total = np.sum(grams, axis=0)
    if not np.isfinite(total).all():
        raise not_finite(block.name)
    likeness = np.mean([cosines(gram) for gram in total], axis=0)
    return elect_heads(grams, group_heads(likeness, count, seed))


def group_heads(likeness: Float[np.ndarray, "H H"], count: int, seed: int) -> Int[np.ndarray, " H"]:
    """The group of each head by k-means (equation 3), numbered in the order of their first heads.

    Args:
        likeness: Inner products of the heads' feature maps, for example ``cosines``.
        count: C, the number of groups, from 1 to H. No group is empty.
    """
    return k_means(_coordinates(likeness), count, seed)


def elect_heads(
    grams: Sequence[Float[np.ndarray, "N H H"]], groups: Int[np.ndarray, " H"]
) -> Votes:
    """Count the votes of each batch and kind of feature map (algorithm 1).

    Args:
        grams: For each batch, the inner products of the heads' maps of each kind.
        groups: The group of each head.
    """
    members = [np.flatnonzero(groups == group) for group in np.unique(groups)]
    votes = np.zeros(len(groups), dtype=np.int64)
    for gram in (gram for batch in grams for gram in batch):
        for group in members:
            votes[group[np.argmax(_typical(gram[np.ix_(group, group)]))]] += 1
    mask = np.zeros(len(groups), dtype=np.int64)
    for group in members:
        mask[group[np.argmax(votes[group])]] = 1
    return Votes(groups, votes, mask)


def cosines(gram: Float[np.ndarray, "H H"]) -> Float[np.ndarray, "H H"]:
    """Cosines of vectors from their inner products; cosines with a zero vector are 0."""
    norms = np.sqrt(np.diag(gram))
    norms = np.where(norms > 0, norms, 1.0)
    return gram / norms[:, None] / norms


def _typical(gram: Float[np.ndarray, "M M"]) -> Float[np.ndarray, " M"]:
    """eta: the cosine of each group member with the group mean, from inner products."""
    norms = np.sqrt(np.diag(gram) * max(float(gram.mean()), 0.0))
    eta = gram.mean(1) / np.where(norms > 0, norms, 1.0)
    return np.round(eta, 6)  # ties up to rounding: the first head wins


def _coordinates(gram: Float[np.ndarray, "H H"]) -> Float[np.ndarray, "H H"]:
    """Points with these inner products."""
    values, vectors = np.linalg.eigh((gram + gram.T) / 2)
    return vectors * np.sqrt(np.maximum(values, 0.0))


def k_means(points: Float[np.ndarray, "N X"], count: int, seed: int) -> Int[np.ndarray, " N"]:
    """Labels of the best of ``RESTARTS`` k-means runs, numbered by first occurrence.

    No cluster is empty: a small jitter makes equal points distinct, and runs with an empty cluster
    are repeated.
    """
    from scipy.cluster.vq import ClusterError, kmeans2

    random = np.random.default_rng(seed)
    scale = 1e-8 * (float(np.abs(points).max(initial=0.0)) or 1.0)
    points = points + scale * random.standard_normal(points.shape)
    runs: list[tuple[float, np.ndarray]] = []
    for _ in range(100):  # attempts, until RESTARTS of them have no empty cluster
        try:
            centers, labels = kmeans2(
                points, count, iter=100, minit="++", missing="raise", rng=random
            )
        except ClusterError:
            continue
        runs.append((float(np.square(points - centers[labels]).sum()), labels))
        if len(runs) == RESTARTS:
            break
    assert runs, "every run of k-means had an empty cluster"
    lowest = min(cost for cost, _ in runs)
    best = next(labels for cost, labels in runs if cost <= lowest + 1e-9)
    _, firsts, inverse = np.unique(best, return_index=True, return_inverse=True)
    return np.argsort(np.argsort(firsts))[inverse.reshape(-1)]
