"""Choose R and the mixing of collaborative heads for each layer of a request.

A layer has one of three mixings. With dense mixing every head reads all R dimensions, as in the
paper. With sparse mixing a head reads some of them. With own dimensions nothing is shared: each
head is truncated separately.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from attnserve.literals import MixingKind
from attnserve.options import Rewrites
from graph_passes.blocks import AttentionBlock
from graph_passes.emit.collaborative import max_read_size, padded_size
from graph_passes.errors import InvalidArgument, Refusal
from graph_passes.passes.collaborate import Mixing, collaborate_refusal, exact_rank

__all__ = ["SharingChooser", "SizedMixing"]


OWN_STEPS = 8
"""Maximum number of head sizes that are tried for own dimensions: 64 in multiples of 8."""


class SizedMixing(NamedTuple):
    """How the heads of all layers share query and key dimensions, if they do.

    Attributes:
        step: For own dimensions, the index of the head size; size 0 is the smallest whose heads
            have at least R dimensions in all.
    """

    kind: MixingKind
    step: int = 0


@dataclass(eq=False)
class SharingChooser:
    """Chooses the shared dimensions of layers, as a request describes them.

    Attributes:
        own_heads: By layer, the number of heads that compute their own probabilities once other
            rewrites are applied. Layers that lose all heads are missing.
        unobserved: Layers that the calibration data cannot reach.
        warnings: Receives the reasons of layers that are left as they are.
    """

    rewrites: Rewrites
    own_heads: Mapping[str, int]
    unobserved: Collection[str]
    warnings: list[str] = field(default_factory=list[str])

    @property
    def mixings(self) -> tuple[SizedMixing, ...]:
        """The mixings that the request allows; several are compared later."""
        rewrites = self.rewrites
        if rewrites.head_dk is not None:
            return (SizedMixing("sparse" if rewrites.collab_dk is not None else "own"),)
        if rewrites.mixing != "auto":
            return (SizedMixing(rewrites.mixing),)
        own = (SizedMixing("own", step) for step in range(OWN_STEPS))
        return (SizedMixing("dense"), SizedMixing("sparse"), *own)

    def choose(
        self, layers: Sequence[tuple[AttentionBlock, int]], mixing: SizedMixing
    ) -> dict[str, Mixing]:
        """The parameters of each layer that can be factored.

        Args:
            layers: Each layer with its R, which is ignored if only ``head_dk`` is requested.

        Raises:
            InvalidArgument: A size is out of range.
            CannotRewrite: A layer that the request names cannot be factored.
        """
        rewrites = self.rewrites
        is_named = rewrites.layers is not None or isinstance(rewrites.collab_dk, Mapping)
        dimensions: dict[str, Mixing] = {}
        for block, asked_rank in layers:
            outcome = self._refusal(block, mixing)
            if outcome is None:
                _check_sizes(rewrites, block, asked_rank)
            own_heads = self.own_heads.get(block.name)
            if own_heads is None or not (own_heads or outcome):
                continue  # no head is left to factor
            if outcome is not None and is_named:
                raise outcome.error(block.name, "leave this layer out of `layers`")
            rank, size = _sizes(rewrites, block, own_heads, asked_rank, mixing)
            outcome = outcome or _mixing(block, own_heads, rank, size, cache=rewrites.collab_cache)
            self.warnings += self._warnings(block, rank, size, outcome)
            if not isinstance(outcome, Refusal):
                dimensions[block.name] = outcome
        return dimensions

    def _warnings(
        self, block: AttentionBlock, rank: int, size: int | None, outcome: Mixing | Refusal
    ) -> Iterator[str]:
        is_asked = self.rewrites.mixing == "sparse" or self.rewrites.head_dk is not None
        if is_asked and size is None:
            yield f"{block.name} gets " + (
                "one shared key head: rotary positions rule out sparse mixing"
                if block.q.rotary_terms
                else "dense mixing: its cache holds the dimensions that all heads share"
            )
        if isinstance(outcome, Refusal):
            yield f"{block.name} is left as it is: {outcome}"
        elif block.name in self.unobserved and rank < exact_rank(block):
            yield (
                f"{block.name} lies in the body of another node, which calibration cannot observe: "
                "it is factored by its weights alone"
            )

    def _refusal(self, block: AttentionBlock, mixing: SizedMixing) -> Refusal | None:
        """Why the queries and keys of a block cannot be reduced by a mixing; None if they can."""
        shared = self.rewrites.head_dk is None and mixing.kind != "own"
        refusal = collaborate_refusal(block, caches=self.rewrites.collab_cache, shared=shared)
        is_cached = refusal is not None and refusal.code == "cached"
        if is_cached and collaborate_refusal(block, caches=True, shared=shared) is None:
            return Refusal(
                "cached",
                "its cached keys are an input of the graph: `collab_cache` rewrites the cache too",
            )
        return refusal


def _check_sizes(rewrites: Rewrites, block: AttentionBlock, rank: int) -> None:
    collab_dk, head_dk = rewrites.collab_dk, rewrites.head_dk
    size = exact_rank(block)
    if block.q.rotary_terms:
        _check_rotary_sizes(rewrites, block, rank)
    if head_dk is not None and not 1 <= head_dk <= block.head_size:
        raise InvalidArgument(
            f"`head_dk` is {head_dk}: expected 1 to {block.head_size} for {block.name}",
            f"{block.head_size} is the size of its heads",
            code="request.range",
        )
    if collab_dk is not None and head_dk is not None and head_dk > rank:
        raise InvalidArgument(
            f"`head_dk` is {head_dk}: {block.name} has {rank} shared dimensions that a head "
            "can read",
            f"choose `head_dk` from 1 to {rank}, or a larger `collab_dk`",
            code="request.range",
        )
    if collab_dk is not None and not 1 <= rank <= size:
        raise InvalidArgument(
            f"`collab_dk` is {rank}: expected 1 to {size} for {block.name}, which has "
            f"{size // block.head_size} heads x {block.head_size}",
            f"choose R from 1 to {size}; {size} is exact",
            code="request.range",
        )


def _check_rotary_sizes(rewrites: Rewrites, block: AttentionBlock, rank: int) -> None:
    collab_dk, head_dk = rewrites.collab_dk, rewrites.head_dk
    for name, number in (("collab_dk", None if collab_dk is None else rank), ("head_dk", head_dk)):
        if number is not None and number % 2:
            raise InvalidArgument(
                f"`{name}` is {number}: expected an even number for {block.name}, "
                "whose rotary positions rotate pairs of elements",
                "choose an even number",
                code="request.range",
            )
    if collab_dk is not None and head_dk is not None:
        raise InvalidArgument(
            f"`collab_dk` shares the keys of {block.name}, which has rotary positions, and "
            "`head_dk` shortens them",
            "give one of them",
            code="request.conflict",
        )


def _sizes(
    rewrites: Rewrites, block: AttentionBlock, own: int, rank: int, mixing: SizedMixing
) -> tuple[int, int | None]:
    """R, and the mean number of dimensions that a head reads; None for dense mixing.

    Args:
        own: The number of heads that compute their own probabilities.
        rank: The requested R.
    """
    size = rewrites.head_dk
    if block.q.rotary_terms:
        if size is None and mixing.kind == "own":
            size = _head_size(block, own, rank, mixing)
    elif mixing.kind != "dense" and not (rewrites.mixing == "auto" and rank >= exact_rank(block)):
        size = None if block.k.is_cached else size or _head_size(block, own, rank, mixing)
    if mixing.kind == "own" and (cut := rewrites.head_dk or size):
        rank = own * cut  # nothing is shared: each head is truncated
    return rank, size


def _mixing(
    block: AttentionBlock, own: int, rank: int, size: int | None, *, cache: bool
) -> Mixing | Refusal:
    """The parameters of a block with ``own`` heads, unless R is too large to compress anything."""
    key_size = -(-own * exact_rank(block) // block.num_heads)
    is_truncated = bool(block.q.rotary_terms) and size is not None
    if own < block.num_heads and rank >= key_size and not is_truncated:
        return Refusal(
            "nothing_shared",
            f"R = {rank} >= {key_size}, the size of the keys of {own} heads: nothing to compress",
        )
    return Mixing(rank=rank, head_size=size, cache=cache)


def _head_size(block: AttentionBlock, own: int, rank: int, mixing: SizedMixing) -> int | None:
    """The number of dimensions that a head reads; None if it cannot read fewer than its own."""
    sizes = head_sizes(block)
    if mixing.kind == "sparse":
        return min(rank, max(sizes, default=block.head_size))
    least = next((i for i, size in enumerate(sizes) if size * own >= rank), len(sizes))
    return sizes[min(least + mixing.step, len(sizes) - 1)] if sizes else None


def head_sizes(block: AttentionBlock) -> list[int]:
    """The numbers of dimensions of a head that cost less than its own, ascending.

    Kernels pad a head to the next size (``padded_size``), so that only padded sizes are worth
    choosing. Under rotary positions there is no content term, which takes one more dimension, and
    sizes are even, because positions rotate pairs of elements.
    """
    if block.q.rotary_terms:
        return [k for k in range(2, block.head_size, 2) if padded_size(k) == k]
    return [k for k in range(1, block.head_size) if max_read_size(k, block.head_size) == k]
