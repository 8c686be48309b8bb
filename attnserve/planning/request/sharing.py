"""The mixings that a request allows for the queries and keys of each layer.

The kind of a mixing says which dimensions a head reads. With dense mixing, every head reads all R
shared dimensions, as in the paper. With sparse mixing, a head reads some of them. With own
dimensions, nothing is shared: each head is truncated separately.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from attnserve.literals import MixingKind
from attnserve.options import Rewrites
from attnserve.planning.heads.files import layer_name
from attnserve.planning.request.request import Request
from graph_passes.blocks import AttentionBlock
from graph_passes.emit.collaborative import max_read_size, padded_size
from graph_passes.errors import InvalidArgument, Refusal
from graph_passes.passes.collaborate import Mixing, collaborate_refusal, exact_rank

__all__ = ["allowed_mixings"]

OWN_STEPS = 8
"""Maximum number of head sizes that are tried for own dimensions: 64 in multiples of 8."""

NEEDS_COLLAB_CACHE = Refusal(
    "cached", "its cached keys are an input of the graph: `collab_cache` rewrites the cache too"
)


def allowed_mixings(
    request: Request, own_heads: Mapping[str, int]
) -> dict[MixingKind, list[dict[str, Mixing]]]:
    """The alternatives for each kind of mixing that the request allows: the mixings by layer.

    Own dimensions have several alternatives, in ascending size. All rewrite the same layers, and
    the warnings of the request are those of the first alternative.

    Args:
        own_heads: By layer, the number of heads that compute their own probabilities once other
            rewrites are applied. Layers that lose all heads are missing.

    Raises:
        InvalidArgument: A size is out of range.
        CannotRewrite: A layer that the request names cannot be factored.
    """
    ranks = _ranks(request, own_heads)
    layers = [
        _Layer(request.rewrites, block, own_heads.get(block.name), ranks[block.name])
        for block in request.blocks
        if block.name in ranks
    ]
    allowed: dict[MixingKind, list[dict[str, Mixing]]] = {}
    distinct: list[dict[str, Mixing]] = []
    for kind, steps in _kinds(request.rewrites).items():
        for step in range(steps):
            outcomes = {layer.block: layer.mixing(kind, step) for layer in layers}
            mixings = {b.name: each for b, each in outcomes.items() if isinstance(each, Mixing)}
            if not distinct:
                _warn(request, outcomes)
            elif mixings.keys() != distinct[0].keys() or mixings in distinct:
                continue
            distinct.append(mixings)
            allowed.setdefault(kind, []).append(mixings)
    return allowed


def _kinds(rewrites: Rewrites) -> dict[MixingKind, int]:
    """The kinds of mixing that a request allows, and how many head sizes of each are tried."""
    if rewrites.head_dk is not None:
        return {"own" if rewrites.collab_dk is None else "sparse": 1}
    if rewrites.mixing != "auto":
        return {rewrites.mixing: 1}
    return {"dense": 1, "sparse": 1, "own": OWN_STEPS}


def _ranks(request: Request, own_heads: Mapping[str, int]) -> dict[str, int]:
    """R by layer; for ``head_dk`` alone, the number of dimensions of all heads of the layer."""
    collab_dk, head_dk = request.rewrites.collab_dk, request.rewrites.head_dk
    if collab_dk is None:
        requested = [] if head_dk is None else request.requested_layers
        return {name: own_heads.get(name, 0) * (head_dk or 0) for name in requested}
    if isinstance(collab_dk, int):
        return dict.fromkeys(request.requested_layers, collab_dk)
    if isinstance(collab_dk, Mapping):
        return {
            layer_name(name, request.names, "collab_dk"): rank for name, rank in collab_dk.items()
        }
    if len(collab_dk) != len(request.requested_layers):
        raise _out_of_range(
            f"`collab_dk` has {len(collab_dk)} sizes for {len(request.requested_layers)} layers",
            "give one R, or one for each layer",
        )
    return dict(zip(request.requested_layers, collab_dk, strict=True))


def _warn(request: Request, outcomes: Mapping[AttentionBlock, Mixing | Refusal | None]) -> None:
    """Warn of layers that are left, get another mixing than requested, or cannot be calibrated."""
    wants_sparse = request.rewrites.mixing == "sparse" or request.rewrites.head_dk is not None
    for block, mixing in outcomes.items():
        if isinstance(mixing, Refusal):
            request.leave(block, mixing)
        if not isinstance(mixing, Mixing):
            continue
        if mixing.is_dense and wants_sparse:
            request.warnings.append(
                f"{block.name} gets one shared key head: rotary positions rule out sparse mixing"
                if block.q.rotary_terms
                else f"{block.name} gets dense mixing: its cache holds the dimensions that all "
                "heads share"
            )
        is_unobserved = request.job.data is not None and request.body_refusal(block) is not None
        if is_unobserved and mixing.rank < exact_rank(block):
            request.warnings.append(
                f"{block.name} lies in the body of another node, which calibration cannot observe: "
                "it is factored by its weights alone"
            )


@dataclass(frozen=True, eq=False)
class _Layer:
    """A layer whose queries and keys are to be factored.

    Attributes:
        heads: The number of heads that compute their own probabilities once other rewrites are
            applied; None if the layer loses all heads.
        rank: The requested R.
    """

    rewrites: Rewrites
    block: AttentionBlock
    heads: int | None
    rank: int

    @property
    def is_rotary(self) -> bool:
        """Whether pairs of the elements of queries and keys are rotated."""
        return bool(self.block.q.rotary_terms)

    def mixing(self, kind: MixingKind, step: int) -> Mixing | Refusal | None:
        """The mixing of a kind, or the reason why the layer is left; None if no head is left.

        Args:
            step: The index of the head size of own dimensions; size 0 is the smallest whose heads
                have at least R dimensions in all.

        Raises:
            InvalidArgument: A size is out of range.
            CannotRewrite: The request names the layer, which cannot be factored.
        """
        rewrites, block = self.rewrites, self.block
        head_size = self._head_size(kind, step)
        refusal = self._refusal(shares_keys=head_size is None)
        if refusal is None:
            self._check_sizes()
        if self.heads is None or not (self.heads or refusal):
            return None
        if refusal is not None:
            if rewrites.layers is not None or isinstance(rewrites.collab_dk, Mapping):
                raise refusal.error(block.name, "leave this layer out of `layers`")
            return refusal
        rank = self.rank if kind != "own" or head_size is None else self.heads * head_size
        key_size = -(-self.heads * exact_rank(block) // block.num_heads)
        is_truncated = self.is_rotary and head_size is not None
        if self.heads < block.num_heads and rank >= key_size and not is_truncated:
            return Refusal(
                "nothing_shared",
                f"R = {rank} >= {key_size}, the size of the keys of {self.heads} heads: nothing to "
                "compress",
            )
        return Mixing(rank=rank, head_size=head_size, cache=rewrites.collab_cache)

    def _head_size(self, kind: MixingKind, step: int) -> int | None:
        """The mean number of dimensions that a head reads; None if it reads all R."""
        rewrites, block = self.rewrites, self.block
        if block.k.is_cached and not self.is_rotary:
            return None  # the cache holds the dimensions that all heads share
        if rewrites.head_dk is not None:
            return rewrites.head_dk
        if kind == "dense" or (kind == "sparse" and self.is_rotary):
            return None
        if rewrites.mixing == "auto" and self.rank >= exact_rank(block) and not self.is_rotary:
            return None  # dense mixing is exact
        sizes = self._smaller_sizes()
        if kind == "sparse":
            return min(self.rank, max(sizes, default=block.head_size))
        sufficient = [size for size in sizes if size * (self.heads or 0) >= self.rank]
        sizes = sufficient or sizes[-1:]
        return sizes[min(step, len(sizes) - 1)] if sizes else None

    def _smaller_sizes(self) -> list[int]:
        """The numbers of dimensions of a head that cost less than its own, ascending.

        Kernels pad a head to the next size (``padded_size``), so that only padded sizes are worth
        choosing. Under rotary positions there is no content term, which takes one more dimension,
        and sizes are even, because positions rotate pairs of elements.
        """
        head_size = self.block.head_size
        if self.is_rotary:
            return [k for k in range(2, head_size, 2) if padded_size(k) == k]
        return [k for k in range(1, head_size) if max_read_size(k, head_size) == k]

    def _refusal(self, *, shares_keys: bool) -> Refusal | None:
        """Why the queries and keys cannot be factored; None if they can."""
        caches = self.rewrites.collab_cache
        refuse = partial(collaborate_refusal, self.block, shares_keys=shares_keys)
        refusal = refuse(caches=caches)
        if refusal and refuse(caches=True) is None:
            return NEEDS_COLLAB_CACHE
        return refusal

    def _check_sizes(self) -> None:
        """Check the requested sizes.

        Raises:
            InvalidArgument: One is out of range.
        """
        name, size, full = self.block.name, self.block.head_size, exact_rank(self.block)
        head_dk = self.rewrites.head_dk
        rank = None if self.rewrites.collab_dk is None else self.rank
        if self.is_rotary:
            for parameter, number in (("collab_dk", rank), ("head_dk", head_dk)):
                if number is not None and number % 2:
                    raise _out_of_range(
                        f"`{parameter}` is {number}: expected an even number for {name}, whose "
                        "rotary positions rotate pairs of elements",
                        "choose an even number",
                    )
            if rank is not None and head_dk is not None:
                raise InvalidArgument(
                    f"`collab_dk` shares the keys of {name}, which has rotary positions, and "
                    "`head_dk` shortens them",
                    "give one of them",
                    code="request.conflict",
                )
        if head_dk is not None and not 1 <= head_dk <= size:
            raise _out_of_range(
                f"`head_dk` is {head_dk}: expected 1 to {size} for {name}",
                f"{size} is the size of its heads",
            )
        if rank is None:
            return
        if head_dk is not None and head_dk > rank:
            raise _out_of_range(
                f"`head_dk` is {head_dk}: {name} has {rank} shared dimensions that a head can read",
                f"choose `head_dk` from 1 to {rank}, or a larger `collab_dk`",
            )
        if not 1 <= rank <= full:
            raise _out_of_range(
                f"`collab_dk` is {rank}: expected 1 to {full} for {name}, which has "
                f"{full // size} heads x {size}",
                f"choose R from 1 to {full}; {full} is exact",
            )


def _out_of_range(what: str, fix: str) -> InvalidArgument:
    return InvalidArgument(what, fix, code="request.range")
