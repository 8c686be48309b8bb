"""Collaborate: share query and key dimensions between heads."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import ClassVar, Self

import numpy as np
import onnx_ir as ir
from pydantic import BaseModel, Field, InstanceOf

from graph_passes.analyses import Analyses
from graph_passes.blocks import AttentionBlock
from graph_passes.emit.caches import cache_of
from graph_passes.emit.collaborative import cache_width, dense_logits, sparse_logits
from graph_passes.emit.editing import Inserter
from graph_passes.emit.probabilities import replace_logits
from graph_passes.emit.rotary import rotary_logits
from graph_passes.errors import InvalidArgument, Refusal
from graph_passes.factorize.cp import CollaborativeFactors, fold_mean
from graph_passes.factorize.moments import TokenMoments, pool_moments
from graph_passes.factorize.rotary import RotaryFactors
from graph_passes.passes.base import AttentionPass, AttentionTargets, MomentsOf, small_shapes
from graph_passes.passes.decompose_attention import decompose_fused
from graph_passes.passes.invariants import CacheShape
from graph_passes.passes.reduced_planes import plane_factors, rotary_refusal
from graph_passes.passes.shared_dimensions import (
    placeholder_factors,
    shared_factors,
    sharing_refusal,
)

__all__ = [
    "Collaborate",
    "Mixing",
    "collaborate_refusal",
    "exact_rank",
    "factor",
]

HeadFactors = CollaborativeFactors | RotaryFactors


class Mixing(BaseModel, frozen=True, extra="forbid"):
    """The shared dimensions that each head reads: all (dense mixing) or some (sparse mixing).

    If R is large enough, each head of sparse mixing has its own dimensions. Under rotary positions,
    dense mixing shares the elements of one key head of all groups, from 2 to G*K (exact); in sparse
    mixing each head keeps its own ``head_size`` elements, whatever R is.

    Attributes:
        rank: R, the number of dimensions from which all heads read together, from 1 to H*K (exact).
        head_size: The mean number of dimensions that a head reads; None if it reads all R.
        cache: Rewrite cached keys too, which changes inputs and outputs of the graph.
        factors: The factor matrices (default: computed from the weights). Not stored in plan.json.
    """

    rank: int = Field(ge=1)
    head_size: int | None = Field(default=None, ge=1)
    cache: bool = False
    factors: InstanceOf[CollaborativeFactors] | InstanceOf[RotaryFactors] | None = Field(
        default=None, exclude=True
    )

    @property
    def is_dense(self) -> bool:
        """Whether every head reads all R dimensions."""
        return self.head_size is None


class Collaborate(AttentionPass[Mixing]):
    """Share query and key dimensions between heads (eq. 6 and 7 of arXiv 2006.16362).

    Before: logits_h = s (x W_Q^h + b_Q^h)(y W_K^h + b_K^h)^T
    After:  logits_h = s [ (x W~Q) diag(m_h) (y W~K)^T + v_h^T y^T ]

    Dense mixing multiplies all shared dimensions in every head. Sparse mixing multiplies only those
    whose m_h is not zero, as ordinary multi-head attention (``emit.collaborative``). The scale s is
    the graph's own, never derived from R. The key bias is constant over the keys, so softmax
    ignores it, and it is dropped. Mask, softmax, values and output do not change. Exact at R = H*K,
    lossy below. Fused operators are decomposed first.

    If keys are cached, past (B, H, P, K) an input and present (B, H, P+T, K) an output of the
    graph, and ``cache`` is set, the cache holds the shared dimensions:

    After:  present = [past; y [W~K, v^T]]  (B, 1, P+T, R+H), and from there as above

    Input and output keep their names, types, batch and length; cached values do not change. The H
    content logits are left out if there are none. A cache of the original model cannot be read by
    the new one.

    ``passes.shared_dimensions`` computes W~Q, W~K and m. With rotary positions,
    ``passes.reduced_planes`` reduces pairs of elements before they are rotated: heads keep the
    pairs with the largest energy, or all groups share the keys. The result is standard attention
    with smaller heads, or with one key head.

    Attributes:
        targets: R and the mixing of each block. Layers with the same weights share their factors.
    """

    name: ClassVar[str] = "collaborate"
    lossy: ClassVar[bool] = True
    order: ClassVar[int] = 50

    @classmethod
    def with_factors(
        cls,
        factors: Mapping[str, CollaborativeFactors],
        *,
        sparse: bool = False,
        cache: bool = False,
    ) -> Collaborate:
        """Return a pass that installs precomputed factors, by block name."""
        targets: dict[str, Mixing] = {}
        for name, whole in factors.items():
            size = whole.rank if sparse else None
            targets[name] = Mixing(rank=whole.rank, head_size=size, cache=cache, factors=whole)
        return cls(targets)

    def fitted(
        self,
        model: ir.Model,
        moments_of: MomentsOf | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> Self:
        """The pass with the factors of every block.

        Blocks with equal query and key weights share P, Q and M; their moments are pooled.
        """
        if not self.targets:
            return self
        analyses = self.require_applicable(model)
        moments: Mapping[str, TokenMoments] = {}
        if moments_of is not None:
            lossy = {
                block.name for block, params in self._changed(analyses) if _is_lossy(block, params)
            }
            # Truncated heads are refitted once, after the pass; shared keys need exact inputs.
            moments = moments_of(lossy, any(params.is_dense for params in self.targets.values()))
        targets = self._changed(Analyses.of(model))
        factors: dict[str, HeadFactors] = {}
        for blocks in _equal_weights(targets):
            for block, block_factors in _common_factors(blocks, self.targets, moments):
                factors[block.name] = block_factors
                if progress is not None:
                    progress(len(factors), len(targets))
        fitted = {
            name: params.model_copy(update={"factors": factors.get(name)})
            for name, params in self.targets.items()
        }
        return type(self)(fitted)

    def unfitted(self, model: ir.Model) -> Self:
        """The pass with placeholder factors, for models that are only timed.

        Rotary positions get their own factors, which are computed from the weights.
        """
        analyses = self.require_applicable(model)
        targets = dict(self.targets)
        for block, params in self._changed(analyses):
            if not block.q.rotary_terms:
                factors = placeholder_factors(block, params.rank, params.head_size)
                targets[block.name] = params.model_copy(update={"factors": factors})
        return type(self)(targets)

    def sizes(self, name: str, block: AttentionBlock | None) -> dict[str, int | None]:
        params = self.targets[name]
        if block is None or (factors := params.factors) is None:
            return super().sizes(name, block)
        width = None
        if block.k.is_cached and isinstance(factors, CollaborativeFactors):
            width = cache_width(factors)
        sizes = {"rank": factors.rank, "head_size": params.head_size, "cache_width": width}
        return super().sizes(name, block) | sizes

    def approximation_error(self, name: str) -> float | None:
        factors = self.targets[name].factors
        return None if factors is None else factors.relative_error

    @classmethod
    def validate_params(cls, block: AttentionBlock, params: Mixing) -> None:
        if block.q.num_heads and params.factors is None and _has_shared(block, params):
            _check_rank(block, params.rank)

    @classmethod
    def refusal(
        cls, block: AttentionBlock, params: Mixing | None, analyses: Analyses
    ) -> Refusal | None:
        if params is None:
            return collaborate_refusal(block, shares_keys=True)
        if refusal := collaborate_refusal(block, caches=params.cache, shares_keys=params.is_dense):
            return refusal
        if block.k.is_cached and block.graph is not analyses.model.graph:
            return Refusal("cache_scope", "its cached keys stay inside the body of a node")
        if block.k.is_cached and not params.is_dense:
            return Refusal(
                "cache_sparse",
                "its cache holds shared dimensions: only dense mixing reads them",
            )
        return None

    def caches(self, analyses: Analyses) -> Mapping[str, CacheShape | None]:
        shapes: dict[str, CacheShape] = {}
        for block, params in self._changed(analyses):
            if (cache := cache_of(block.k)) is not None:
                factors = _factors(block, params)
                assert isinstance(factors, CollaborativeFactors)
                shape = CacheShape(1, cache_width(factors))  # what all heads share
                shapes |= {value.name or "": shape for value in (cache.past[0], cache.present)}
        return shapes

    def prepare(self, analyses: Analyses) -> None:
        """Decompose fused targets: the scores inside a fused operator cannot be replaced."""
        decompose_fused(analyses.model, self.targets.keys())

    def rewrite(self, targets: AttentionTargets[Mixing], analyses: Analyses) -> None:
        info = small_shapes(analyses)
        factored = [(block, params, _factors(block, params)) for block, params in targets]
        uses = Counter(id(factors.key) for _, _, factors in factored)
        for block, params, factors in factored:
            make = Inserter(block.graph, block.product, f"{block.name}/collaborative")
            if isinstance(factors, RotaryFactors):
                logits = rotary_logits(make, block, factors)
            elif params.is_dense:
                logits = dense_logits(make, block, factors, cache_of(block.k))
            else:
                logits = sparse_logits(make, block, factors, gather=uses[id(factors.key)] > 1)
            replace_logits(make, block, logits, info)


def _is_lossy(block: AttentionBlock, params: Mixing) -> bool:
    if params.head_size is not None and params.head_size < block.head_size:
        return True
    return _has_shared(block, params) and params.rank < exact_rank(block)


def _has_shared(block: AttentionBlock, params: Mixing) -> bool:
    """Whether R applies: under rotary positions, truncated heads share nothing."""
    return params.is_dense or not block.q.rotary_terms


def _equal_weights(targets: AttentionTargets[Mixing]) -> list[list[AttentionBlock]]:
    """Blocks grouped by equal query and key weights and equal parameters."""
    groups: dict[tuple[object, ...], list[AttentionBlock]] = {}
    for block, params in targets:
        arrays = (block.q.heads(), block.q.offset, block.k.heads())
        digests = [hashlib.sha256(np.ascontiguousarray(a).tobytes()).digest() for a in arrays]
        shapes = [array.shape for array in arrays]
        key = (params.rank, params.head_size, *digests, *shapes)
        groups.setdefault(key, []).append(block)
    return list(groups.values())


def _common_factors(
    blocks: Sequence[AttentionBlock],
    targets: Mapping[str, Mixing],
    moments: Mapping[str, TokenMoments],
) -> Iterator[tuple[AttentionBlock, HeadFactors]]:
    """Yield blocks of equal weights with their factors, which differ in the mean of the tokens."""
    params = targets[blocks[0].name]
    known = [moments[block.name] for block in blocks if block.name in moments]
    is_pooled = len(blocks) > 1 and len(known) == len(blocks)
    pool = pool_moments(known) if is_pooled else next(iter(known), None)
    factors = factor(blocks[0], params.rank, head_size=params.head_size, moments=pool)
    for block in blocks:
        if is_pooled and factors.relative_error > 0 and isinstance(factors, CollaborativeFactors):
            mean = moments[block.name].query_mean
            yield block, fold_mean(factors, block.q.heads(), block.k.heads(), mean)
        else:
            yield block, factors


def _factors(block: AttentionBlock, params: Mixing) -> HeadFactors:
    """The given factors; by default, factors computed from the weights alone."""
    return params.factors or factor(block, params.rank, head_size=params.head_size)


def exact_rank(block: AttentionBlock) -> int:
    """The smallest lossless R: H*K, or G*K under rotary positions."""
    heads = block.k.num_distinct_heads if block.q.rotary_terms else block.q.num_heads
    return heads * block.head_size


def _check_rank(block: AttentionBlock, rank: int) -> None:
    """Check that R is from 1 to ``exact_rank``.

    Raises:
        InvalidArgument: R is below 1 or too large.
    """
    exact = exact_rank(block)
    if not 1 <= rank <= exact:
        raise InvalidArgument(
            f"{block.name}: a shared dimension of {rank}: expected 1 to {exact} "
            f"({exact // block.head_size} heads x {block.head_size})",
            f"choose R from 1 to {exact}; {exact} is exact",
            code="collaborate.rank",
        )


def collaborate_refusal(
    block: AttentionBlock, *, caches: bool = False, shares_keys: bool = False
) -> Refusal | None:
    """Return why the queries and keys of a block cannot be reduced; None if they can.

    Args:
        caches: Cached keys may be rewritten too; not under rotary positions.
        shares_keys: Heads share their keys, under rotary positions; if not, each head is truncated.
    """
    is_rotary = any(part.rotary_terms for part in (block.q, block.k))
    if is_rotary and block.q.num_heads:
        return rotary_refusal(block, shares_keys=shares_keys)
    return sharing_refusal(block, caches=caches)


def factor(
    block: AttentionBlock,
    rank: int,
    *,
    head_size: int | None = None,
    moments: TokenMoments | None = None,
) -> HeadFactors:
    """Decompose the heads of a block without a ``collaborate_refusal``.

    Args:
        rank: R, from 1 to H*K (exact there).
        head_size: For sparse mixing, the dimensions that a head reads on average, from 1 to K. No
            head reads more than K, or than the padded size of the average allows.
        moments: Token moments of the block's input; without them only the weights are approximated.

    Raises:
        InvalidArgument: A size is out of range.
    """
    if block.q.rotary_terms:
        return plane_factors(block, rank, head_size, moments)
    _check_rank(block, rank)
    return shared_factors(block, rank, head_size, moments)
