"""Collaborate: share query and key dimensions between heads."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping
from typing import ClassVar, Self

import numpy as np
import onnx_ir as ir
from pydantic import BaseModel, Field, InstanceOf

from graph_passes.analyses import Analyses
from graph_passes.analysis.shapes import ShapeInfo
from graph_passes.blocks import (
    AttentionBlock,
    Capped,
    Floor,
    LogitStep,
    Mask,
    Weighted,
)
from graph_passes.emit.attention import KEY_TERM, entangled_bias_refusal
from graph_passes.emit.caches import cache_of, cache_refusal, has_separate_heads
from graph_passes.emit.collaborative import cache_width, dense_logits, max_read_size, sparse_logits
from graph_passes.emit.editing import Inserter, in_precision, replace_uses, type_of
from graph_passes.emit.heads import TOKEN_LAYOUT, emit_heads, heads_refusal
from graph_passes.emit.rotary import rotary_heads, rotary_logits, rotary_planes
from graph_passes.errors import InvalidArgument, Refusal
from graph_passes.factorize.cp import CollaborativeFactors, collaborative_factors, fold_mean
from graph_passes.factorize.moments import TokenMoments, pool_moments
from graph_passes.factorize.rotary import RotaryFactors, shared_keys, truncated_planes
from graph_passes.factorize.sparse import sparse_factors
from graph_passes.matching.layout import only_consumer
from graph_passes.passes.base import AttentionPass, AttentionTargets, MomentsOf, small_shapes
from graph_passes.passes.conditions import (
    QK_NORM,
    no_probabilities_refusal,
    quantized_refusal,
    rotary_or_norm_refusal,
)
from graph_passes.passes.decompose_attention import decompose_fused, decomposition_refusal
from graph_passes.passes.invariants import CacheShape

__all__ = [
    "Collaborate",
    "Mixing",
    "collaborate_refusal",
    "exact_rank",
    "factor",
    "sharing_refusal",
]

WEAK_FILL = -1e3
"""Masked scores must be below this, so that softmax ignores them whatever the key bias is."""


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

    With rotary positions, pairs of elements are reduced before they are rotated, see
    ``factorize.rotary``: heads keep the pairs with the largest energy, or all groups share the
    keys. The result is standard attention with smaller heads, or with one key head.

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
        analyses: Analyses,
        moments_of: MomentsOf | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> Self:
        """The pass with the factors of every block.

        Blocks with equal query and key weights share P, Q and M; their moments are pooled.
        """
        if not self.targets:
            return self
        self.require_applicable(analyses)
        moments: Mapping[str, TokenMoments] = {}
        if moments_of is not None:
            lossy = {
                block.name for block, params in self._changed(analyses) if _is_lossy(block, params)
            }
            # Truncated heads are refitted once, after the pass; shared keys need exact inputs.
            moments = moments_of(lossy, any(params.is_dense for params in self.targets.values()))
        targets = self._changed(analyses)
        factors: dict[str, CollaborativeFactors | RotaryFactors] = {}
        for uses in _equal_weights(targets):
            first = uses[0]
            params = self.targets[first.name]
            known_moments = [moments[block.name] for block in uses if block.name in moments]
            is_pooled = len(uses) > 1 and len(known_moments) == len(uses)
            pool = pool_moments(known_moments) if is_pooled else None
            block_factors = factor(
                first,
                params.rank,
                head_size=params.head_size,
                moments=pool or (known_moments[0] if known_moments else None),
            )
            for block in uses:
                factors[block.name] = block_factors
                if (
                    pool is not None
                    and block_factors.relative_error > 0
                    and isinstance(block_factors, CollaborativeFactors)
                ):
                    mean = moments[block.name].query_mean
                    factors[block.name] = fold_mean(
                        block_factors, block.q.heads(), block.k.heads(), mean
                    )
                if progress is not None:
                    progress(len(factors), len(targets))
        fitted = {
            name: params.model_copy(update={"factors": factors.get(name)})
            for name, params in self.targets.items()
        }
        return type(self)(fitted)

    def unfitted(self, analyses: Analyses) -> Self:
        """The pass with placeholder factors, for models that are only timed.

        Rotary positions get their own factors, which are computed from the weights.
        """
        self.require_applicable(analyses)
        targets = dict(self.targets)
        for block, params in self._changed(analyses):
            if block.q.rotary_terms:
                continue
            heads = len(block.own_heads)
            rank = params.rank
            size = min(params.head_size or rank, rank)
            mixing = np.zeros((heads, rank))
            columns = (np.arange(heads)[:, None] * size + np.arange(size)) % rank  # H K'
            np.put_along_axis(mixing, columns, 1.0, axis=1)
            query, key = (
                np.full((part.matrix().shape[0], rank), 1e-2) for part in (block.q, block.k)
            )
            content = np.full((heads, len(key)), 1e-2)
            factors = CollaborativeFactors(query, key, mixing, content, 1.0, 0)
            targets[block.name] = params.model_copy(update={"factors": factors})
        return type(self)(targets)

    def sizes(self, name: str, block: AttentionBlock | None) -> dict[str, int | None]:
        params = self.targets[name]
        if block is None or (factors := params.factors) is None:
            return super().sizes(name, block)
        width = None
        if block.k.is_cached and isinstance(factors, CollaborativeFactors):
            width = cache_width(factors)
        shared = {"rank": factors.rank, "head_size": params.head_size, "cache_width": width}
        return super().sizes(name, block) | shared

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
            return collaborate_refusal(block, shared=True)
        if refusal := collaborate_refusal(block, caches=params.cache, shared=params.is_dense):
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

    def prepare(self, analyses: Analyses) -> bool:
        """Decompose fused targets: the scores inside a fused operator cannot be replaced."""
        return decompose_fused(analyses, self.targets.keys())

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
                logits = sparse_logits(make, block, factors, shared=uses[id(factors.key)] > 1)
            _replace_logits(make, block, logits, info)


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


def _factors(block: AttentionBlock, params: Mixing) -> CollaborativeFactors | RotaryFactors:
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
    block: AttentionBlock, *, caches: bool = False, shared: bool = False
) -> Refusal | None:
    """Return why the queries and keys of a block cannot be reduced; None if they can.

    Args:
        caches: Cached keys may be rewritten too; not under rotary positions.
        shared: Heads share their keys, under rotary positions; if not, each head is truncated.
    """
    is_rotary = any(part.rotary_terms for part in (block.q, block.k))
    if is_rotary and block.q.num_heads:
        return _rotary_refusal(block, shared=shared)
    return sharing_refusal(block, caches=caches)


def _rotary_refusal(block: AttentionBlock, *, shared: bool) -> Refusal | None:
    """Return why pairs of elements under rotary positions cannot be reduced; None if they can."""
    if refusal := quantized_refusal(block):
        return refusal
    parts = (block.q, block.k)
    if any(part.norm is not None for part in parts):
        return QK_NORM
    for part in parts:
        if refusal := heads_refusal(part):
            return refusal
    if block.content is not None:
        return KEY_TERM
    if refusal := entangled_bias_refusal(block):
        return refusal
    planes = [rotary_planes(part) for part in parts]
    if planes[0] is None or planes[1] is None:
        return Refusal("rotary_layout", "its rotary positions do not rotate pairs of elements")
    if not np.array_equal(planes[0].elements, planes[1].elements):
        return Refusal("rotary_layout", "its rotary positions pair queries and keys differently")
    if shared and not (planes[0].is_rotation and planes[1].is_rotation):
        return Refusal(
            "rotary_angles", "the elements of a pair are not known to have the same rotary angle"
        )
    return _scores_refusal(block)


def _scores_refusal(block: AttentionBlock) -> Refusal | None:
    """Return why the scores of a block cannot be replaced; None if they can."""
    if block.softmax is None:
        return decomposition_refusal(block)
    if block.softmax.axes != (0, 1, 2) and len(block.softmax.axes) != 4:
        return Refusal("score_layout", "its scores are laid out in an order that is not followed")
    return no_probabilities_refusal(block)


def sharing_refusal(block: AttentionBlock, *, caches: bool = False) -> Refusal | None:
    """Return why the queries and keys of a block cannot be factored; None if they can.

    Args:
        caches: Cached keys may be rewritten too.
    """
    if refusal := quantized_refusal(block):
        return refusal
    if not block.q.num_heads:
        return Refusal("no_own_heads", "all its heads reuse the probabilities of another layer")
    if block.is_collaborative or block.is_sparse:
        return Refusal("collaborative", "its heads are collaborative already")
    if block.content is not None:
        return KEY_TERM
    if refusal := rotary_or_norm_refusal(block):
        return refusal
    if not block.k.has_weight:
        return Refusal(
            "external_keys",
            "its keys are inputs of the graph: no projection in the graph computes them",
        )
    if block.k.is_cached and not caches:
        return Refusal(
            "cached", "its cached keys are an input of the graph, made by the original projection"
        )
    if refusal := entangled_bias_refusal(block):
        return refusal
    if any(isinstance(step, Capped | Weighted) for step in block.steps):
        return Refusal(
            "capped", "its logits are capped or weighted: the key bias cannot be dropped"
        )
    if block.k.num_distinct_heads != block.q.num_heads:
        return Refusal("grouped", "its key heads are grouped: they share their projections already")
    if any(_fill(step) > WEAK_FILL for step in block.steps):
        return Refusal(
            "weak_mask",
            "its mask value is not ignored by softmax: the key bias cannot be dropped",
        )
    if not (block.q.by_sequence and block.k.by_sequence):
        return TOKEN_LAYOUT
    if block.k.is_cached and (refusal := cache_refusal(block)):
        return refusal
    if refusal := _scores_refusal(block):
        return refusal
    if block.softmax is not None and not _only_softmax_reads(block.softmax.logits):
        return Refusal(
            "scores_shared",
            "its scores have other readers than the softmax: the key bias cannot be dropped",
        )
    return None


def _fill(step: LogitStep) -> float:
    """The number that a step sets masked scores to; -inf if it masks none."""
    match step:
        case Mask():
            return step.fill
        case Floor():
            return step.low
        case _:
            return -np.inf


def _only_softmax_reads(logits: ir.Value) -> bool:
    node = only_consumer(logits)
    while node is not None and node.op_type != "Softmax":
        node = only_consumer(node.outputs[0])
    return node is not None


def factor(
    block: AttentionBlock,
    rank: int,
    *,
    head_size: int | None = None,
    moments: TokenMoments | None = None,
    progress: Callable[[int, float], None] | None = None,
) -> CollaborativeFactors | RotaryFactors:
    """Decompose the heads of a block into R shared dimensions.

    Args:
        block: A block without a ``collaborate_refusal``.
        rank: R, from 1 to H*K (exact there).
        head_size: For sparse mixing, the dimensions that a head reads on average, from 1 to K. No
            head reads more than K, or than the padded size of the average allows.
        moments: Token moments of the block's input; without them only the weights are approximated.
        progress: Called after each sweep with its number, from 1, and the relative error.

    Raises:
        InvalidArgument: R is out of range.
    """
    if block.q.rotary_terms:
        heads = rotary_heads(block)
        if head_size is None:
            return shared_keys(heads, rank, moments)
        return truncated_planes(heads, head_size, moments)
    _check_rank(block, rank)
    q, k, bias = block.q.heads(), block.k.heads(), block.q.offset
    if head_size is None:
        return collaborative_factors(
            q, k, rank, query_bias=bias, moments=moments, progress=progress
        )
    return sparse_factors(
        q,
        k,
        rank,
        head_size,
        max_head_size=max_read_size(head_size, block.head_size),
        query_bias=bias,
        moments=moments,
        progress=progress,
    )


def _replace_logits(
    make: Inserter, block: AttentionBlock, logits: ir.Value, info: ShapeInfo
) -> None:
    """Replace the logits of a block by new ones, (B, H, S, T), in the original precision."""
    _unpack_values(block)
    assert block.softmax is not None
    old = block.softmax.logits
    logits.type = ir.TensorType(block.q.dtype)
    logits = in_precision(make, logits, type_of(old, info) or block.q.dtype, info)
    replace_uses(old, _laid_out(make, logits, block.softmax.axes))


def _laid_out(make: Inserter, logits: ir.Value, axes: tuple[int, ...]) -> ir.Value:
    """Emit logits (B, H, S, T) in the layout of the graph, which ``axes`` permutes back."""
    if len(axes) == 4:
        back = [int(axis) for axis in np.argsort(axes)]
        in_order = axes == (0, 1, 2, 3)
        return logits if in_order else make.op("Transpose", [logits], "laid_out", perm=back)
    return _folded(make, logits)


def _folded(make: Inserter, value: ir.Value) -> ir.Value:
    """Emit (B, H, S, T) as (B*H, S, T)."""
    parts = [make.integers([-1], "rows"), make.lengths(value, 2, 4)]
    return make.op("Reshape", [value, make.op("Concat", parts, "rows_of", axis=0)], "folded")


def _unpack_values(block: AttentionBlock) -> None:
    """Emit a separate product for values that share one product with queries or keys.

    If values are cached, the product computes the new values.
    """
    v = block.v
    packed = not {*v.nodes}.isdisjoint((*block.q.nodes, *block.k.nodes))
    if not packed or not v.by_sequence or v.output is None:
        return
    if not v.is_cached and v.layout != "B T H*K":
        # Before the first that may read them: Shape nodes come before the scores.
        make = Inserter(block.graph, v.nodes[-1], f"{block.name}/value")
        values = emit_heads(make, v, v.scale)
        if v.layout == "B*H T K":
            values = _folded(make, values)
        if (back := [int(axis) for axis in np.argsort(v.axes)]) != [0, 1, 2, 3]:
            values = make.op("Transpose", [values], "laid_out", perm=back)
        replace_uses(v.output, values)
    elif v.layout == "B H T K" and (cache := cache_of(v)) is not None and has_separate_heads(v):
        make = Inserter(block.graph, cache.join, f"{block.name}/value")
        cache.join.replace_input_with(1, emit_heads(make, v, 1.0))
