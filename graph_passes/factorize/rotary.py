"""Reduce queries and keys with rotary positions, plane by plane.

The two elements of plane f of a head are one complex number: x a_hf for queries, y b_gf for keys of
group g. A rotation multiplies it by exp(i theta_f m), so

    score_h(x, m; y, n) = scale * Re sum_f exp(i theta_f (m - n)) (x a_hf) conj(y b_gf)

and complex linear maps within a plane commute with the rotation. Two forms use this:

    truncated   each key group keeps the planes with the largest energy      exact at K
    shared      b_gf ~= sum_r s_fr t_frg: one key head for all groups holds   exact at G K
                y s_fr, and the queries of head h become x a_hf conj(t_frg)

The shared form is a singular value decomposition of the key columns of plane f, weighted by the
energy of the queries that read them. The planes get R_f components each, by singular values.
Biases are one more row of the weights. Elements without a position (partial rotary embeddings) form
planes whose angle is zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from graph_passes.errors import InvalidArgument
from graph_passes.factorize.moments import TokenMoments

if TYPE_CHECKING:
    from jaxtyping import Complex, Float, Int

__all__ = ["RotaryFactors", "RotaryHeads", "shared_keys", "truncated_planes"]

FLOOR = 1e-6
"""Lower bound of a group's query energy, relative to the largest; it keeps divisions stable."""


@dataclass(frozen=True, eq=False)
class RotaryHeads:
    """Queries and keys before the rotation, with the bias as the last row.

    Attributes:
        query: x a_hf.
        key: y b_gf.
        groups: The key group of each query head.
        is_self: Whether queries and keys come from the same tokens.
        turned: The number of rotated planes, which come first; None for all.
    """

    query: Complex[np.ndarray, "H D+1 F"]
    key: Complex[np.ndarray, "G E+1 F"]
    groups: Int[np.ndarray, " H"]
    is_self: bool
    turned: int | None = None

    @property
    def size(self) -> int:
        """K, the number of real elements of a head."""
        return 2 * self.key.shape[2]


@dataclass(frozen=True, eq=False)
class RotaryFactors:
    """Reduced queries and keys, N complex numbers per head.

    Attributes:
        query: x a_hf of the planes of each head, with the bias as the last row.
        key: y b_gf of the planes of each key head, with the bias as the last row.
        groups: The key head of each query head.
        planes: The plane whose angle rotates each complex number of a key head.
        relative_error: The square root of the lost share of the energy of the scores.
    """

    query: Complex[np.ndarray, "H D+1 N"]
    key: Complex[np.ndarray, "G E+1 N"]
    groups: Int[np.ndarray, " H"]
    planes: Int[np.ndarray, "G N"]
    relative_error: float

    @property
    def rank(self) -> int:
        """The number of real elements of all keys of a token."""
        return 2 * self.planes.size


def truncated_planes(
    heads: RotaryHeads, head_size: int, moments: TokenMoments | None = None
) -> RotaryFactors:
    """Keep the ``head_size`` / 2 planes with the largest energy of each key group.

    Raises:
        InvalidArgument: ``head_size`` is odd, or not from 2 to K.
    """
    _check("head_size", head_size, heads.size)
    weights, grams = _energies(heads, moments)
    energy = (np.square(weights) * np.einsum("fgg->fg", grams).real).T  # G F
    planes = np.sort(np.argsort(-energy, axis=1, kind="stable")[:, : head_size // 2], axis=1)
    lost = 1 - np.take_along_axis(energy, planes, axis=1).sum() / (energy.sum() or 1.0)
    return RotaryFactors(
        query=np.take_along_axis(heads.query, planes[heads.groups][:, None], axis=2),
        key=np.take_along_axis(heads.key, planes[:, None], axis=2),
        groups=heads.groups,
        planes=planes,
        relative_error=_root(lost) if head_size < heads.size else 0.0,
    )


def shared_keys(
    heads: RotaryHeads, rank: int, moments: TokenMoments | None = None
) -> RotaryFactors:
    """Replace the keys of all groups by one key head of ``rank`` real elements.

    Raises:
        InvalidArgument: ``rank`` is odd, or not from 2 to G * K.
    """
    _check("rank", rank, len(heads.key) * heads.size)
    weights, grams = _energies(heads, moments)
    weighted = weights[:, :, None] * grams * weights[:, None, :]  # F G G
    energy, vectors = np.linalg.eigh(weighted)
    energy = np.maximum(energy, 0.0)
    order = np.argsort(-energy, axis=None, kind="stable")[: rank // 2]
    plane, number = np.unravel_index(np.sort(order), energy.shape)
    components = vectors[plane, :, number]  # N G
    unit = np.sqrt(np.maximum(energy[plane, number], FLOOR * (energy.max() or 1.0)))
    mixing = (weights[plane] * components / unit[:, None]).T  # G N: s = b @ mixing, of energy 1
    back = (components.conj() * unit[:, None] / weights[plane]).T  # G N: b ~= sum of s * back
    loss = 1 - energy[plane, number].sum() / (energy.sum() or 1.0)
    return RotaryFactors(
        query=heads.query[:, :, plane] * back[heads.groups].conj()[:, None],
        key=np.einsum("gen,gn->en", heads.key[:, :, plane], mixing)[None],
        groups=np.zeros(len(heads.groups), np.int64),
        planes=plane[None],
        relative_error=_root(loss) if rank < energy.size * 2 else 0.0,
    )


def _check(name: str, number: int, largest: int) -> None:
    """Check that a size is even and from 2 to ``largest``.

    Raises:
        InvalidArgument: The size is odd or out of range.
    """
    if number % 2 or not 2 <= number <= largest:
        raise InvalidArgument(
            f"`{name}` is {number}: expected an even number from 2 to {largest}, because rotary "
            "positions rotate pairs of elements",
            f"choose an even number; {largest} is exact",
            code="factorize.rotary_size",
        )


def _root(lost: float) -> float:
    """The relative error for a lost share of the energy; never zero, which means exact."""
    return max(float(np.sqrt(max(lost, 0.0))), 1e-8)


def _energies(
    heads: RotaryHeads, moments: TokenMoments | None
) -> tuple[Float[np.ndarray, "F G"], Complex[np.ndarray, "F G G"]]:
    """The root of the energy of each group's queries, and the Gram matrix of the keys, by plane.

    Without moments, tokens are white. In rotated planes, the mean of the keys counts, because the
    rotation by the position makes it differ between keys. In other planes, the mean adds one
    constant to all scores of a query, which softmax ignores. In self-attention, queries and keys
    have the same mean; otherwise the mean of the keys is unknown.
    """
    D = heads.query.shape[1] - 1
    E = heads.key.shape[1] - 1
    moments = moments or TokenMoments(np.zeros(D), np.eye(D), np.eye(E))
    x = np.zeros((D + 1, D + 1))
    mean = np.append(moments.query_mean, 1.0)
    x[:D, :D] = moments.query_covariance
    x += np.outer(mean, mean)
    y = np.zeros((E + 1, E + 1))
    y[:E, :E] = moments.key_covariance
    key_covariance = y
    if heads.is_self:
        y = y + np.outer(mean, mean)
    energy = np.einsum("hdf,de,hef->fh", heads.query.conj(), x, heads.query, optimize=True).real
    if moments.head_weight is not None:
        energy = energy * np.square(moments.head_weight)
    energy = np.stack([energy[:, heads.groups == g].sum(axis=1) for g in range(len(heads.key))], 1)
    floor = FLOOR * (energy.max() or 1.0)
    num_turning = heads.key.shape[2] if heads.turned is None else heads.turned
    turning_keys, still_keys = np.split(heads.key, [num_turning], axis=2)
    grams = np.concatenate(
        [
            np.einsum("gdf,de,hef->fgh", keys.conj(), covariance, keys, optimize=True)
            for keys, covariance in ((turning_keys, y), (still_keys, key_covariance))
        ]
    )
    return np.sqrt(np.maximum(energy, floor)), grams
