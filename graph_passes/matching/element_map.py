"""Element maps: the column and token of a projection that each element of a value comes from.

A ``LinearTrace`` represents a value by element maps. The functions of this module are arithmetic on
traces; ``LayoutReader`` applies them to the nodes of a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from graph_passes.analysis.shapes import ShapeInfo
from graph_passes.blocks import Linear, Norm

__all__ = [
    "CachedHeads",
    "ElementMap",
    "LinearTrace",
    "MatchFailure",
    "PositionFactor",
    "TermByHead",
    "TracedNorm",
    "add_traces",
    "concat_traces",
    "describe",
    "known_shape",
    "split_heads",
    "split_last_axis",
]


class MatchFailure(Exception):
    """A value that does not match, with the reason for ``Unmatched``."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class UnsupportedNode(MatchFailure):
    """A node that belongs neither to a projection nor to positions."""

    def __init__(self, node: ir.Node, role: str, advice: str = "") -> None:
        place = f"{describe(node)} is not supported between the {role} projection and the product"
        super().__init__(f"{place}: {advice}" if advice else place)
        self.node = node


def describe(node: ir.Node) -> str:
    """The operator and name of a node, for messages."""
    return f"{node.op_type} {node.name!r}" if node.name else node.op_type


class PositionFactor(NamedTuple):
    """The factor of a term: ``value``, or ``value[positions]`` (see BroadcastLayout).

    ``past`` marks a cache of heads.
    """

    value: ir.Value
    positions: ir.Value | None = None
    is_last_position: bool = False
    past: bool = False


@dataclass(frozen=True, eq=False)
class ElementMap:
    """The source of each element of a value: arrays of the value's shape.

        element = factor[factor_index] * ( gain * product[tokens, columns] + offset )

    Attributes:
        columns: The column of the product.
        tokens: The token of the product, by number in the order of the product.
        gain: The factor of the product's element.
        offset: The summand after the gain.
        factor_index: The flat index into the position factor of the term; unused if the factor
            is 1.
    """

    columns: np.ndarray
    tokens: np.ndarray
    gain: np.ndarray
    offset: np.ndarray
    factor_index: np.ndarray

    def arrays(self) -> tuple[np.ndarray, ...]:
        """All arrays in the order of the fields."""
        return self.columns, self.tokens, self.gain, self.offset, self.factor_index

    def map(self, change: Callable[[np.ndarray], np.ndarray]) -> ElementMap:
        """Apply a function, for example a layout change, to each array."""
        return ElementMap(*map(change, self.arrays()))

    def take(self, index: np.ndarray) -> ElementMap:
        """Select elements by flat index; the result has the shape of ``index``."""
        return self.map(lambda array: _picked(array, index))

    def scaled_by(self, factor: np.ndarray | float) -> ElementMap:
        """The map of the elements times ``factor``."""
        return replace(self, gain=self.gain * factor, offset=self.offset * factor)

    def broadcast_to(self, shape: tuple[int, ...]) -> ElementMap:
        return self.map(lambda array: np.broadcast_to(array, shape))

    @property
    def used(self) -> np.ndarray:
        """Mask of the elements where the term is not zero."""
        return (self.gain != 0) | (self.offset != 0)


def split_last_axis(array: np.ndarray, heads: int) -> np.ndarray:
    """Reshape (B, T, H*K) to (B, H, T, K)."""
    return np.moveaxis(array.reshape(*array.shape[:2], heads, -1), 2, 1)


def _picked(array: np.ndarray, index: np.ndarray) -> np.ndarray:
    """``array.reshape(-1)[index]``, without a copy for constant arrays."""
    if not any(array.strides) and array.size:
        return np.broadcast_to(array.flat[0], index.shape)
    return array.reshape(-1)[index]


@dataclass(frozen=True, eq=False)
class TracedNorm:
    """A q/k norm, and the terms that it normalizes if rotary embeddings precede it.

    Attributes:
        terms: By group (G, L) instead of by head, with factor indices (N, G, L) of the N tokens:
            the numbers of sequences and of their tokens are known once the heads are split.
    """

    norm: Norm
    terms: Mapping[PositionFactor | None, TermByHead] = field(
        default_factory=dict[PositionFactor | None, "TermByHead"]
    )


@dataclass(frozen=True, eq=False)
class LinearTrace:
    """A value in terms of one product: scale times the sum of its terms (see ``ElementMap``).

    Attributes:
        source: The product; None if the value holds cached heads only.
        scale: The product of all scalar factors.
        terms: The terms by their position factor. The only factor is None (1), except for rotary
            embeddings (cosines and sines) and caches (a factor of the offset 1).
        nodes: The nodes from the product to the value, in order.
        norm: The q/k norm, whose output then takes the place of the product.
    """

    source: Linear | None
    scale: float
    terms: dict[PositionFactor | None, ElementMap]
    nodes: tuple[ir.Node, ...]
    norm: TracedNorm | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return next(iter(self.terms.values())).columns.shape

    @property
    def has_no_factor(self) -> bool:
        """Whether the only factor is 1."""
        return set(self.terms) == {None}

    def append_node(self, node: ir.Node, scale: float = 1.0) -> LinearTrace:
        """The trace of a node's output, which is ``scale`` times this value."""
        return replace(self, scale=self.scale * scale, nodes=(*self.nodes, node))

    def map_terms(self, change: Callable[[ElementMap], ElementMap]) -> LinearTrace:
        """Apply a function to each term."""
        return replace(self, terms={f: change(term) for f, term in self.terms.items()})

    def scaled_by(self, factor: np.ndarray | float) -> LinearTrace:
        """Multiply the gains and offsets."""
        return self.map_terms(lambda term: term.scaled_by(factor))

    def add_offset(self, added: np.ndarray) -> LinearTrace:
        """Add a constant to the value."""
        offset = added / self.scale
        return self.map_terms(lambda term: replace(term, offset=term.offset + offset))

    def fold_scale(self) -> LinearTrace:
        """Multiply the scale into the gains, so that traces with different scales can be added."""
        return replace(self.scaled_by(self.scale), scale=1.0)


def concat_traces(
    node: ir.Node, pieces: Sequence[LinearTrace], axis: int, role: str
) -> LinearTrace:
    """Concatenate traces of one product; a factor that a trace lacks has gain zero."""
    pieces = [piece.fold_scale() for piece in pieces]
    source, norm = _common(
        pieces, MatchFailure(f"{describe(node)} joins the {role} of several projections")
    )
    factors = dict.fromkeys(factor for piece in pieces for factor in piece.terms)
    rotations = {frozenset(f for f in piece.terms if f and not f.past) for piece in pieces}
    is_last = axis % len(pieces[0].shape) == len(pieces[0].shape) - 1
    if len(rotations) > 1 and not is_last and not any(f and f.past for f in factors):
        raise MatchFailure(f"the {role} is rotated for some of its tokens only")
    terms: dict[PositionFactor | None, ElementMap] = {}
    for factor in factors:
        parts = [piece.terms.get(factor) or _nothing_of(piece) for piece in pieces]
        arrays = zip(*(part.arrays() for part in parts), strict=True)
        try:
            terms[factor] = ElementMap(*(np.concatenate(array, axis) for array in arrays))
        except ValueError as error:
            raise MatchFailure(f"{describe(node)} could not be evaluated: {error}") from error
    nodes = dict.fromkeys(n for piece in pieces for n in piece.nodes)
    return LinearTrace(source, 1.0, terms, (*nodes, node), norm)


def add_traces(node: ir.Node, traces: Sequence[LinearTrace], role: str) -> LinearTrace:
    """Add or subtract two traces of one product with disjoint factors."""
    a, b = (trace.fold_scale() for trace in traces)
    advice = "it adds two projections; merge adapters (LoRA) before the export"
    source, norm = _common((a, b), UnsupportedNode(node, role, advice))
    if a.shape != b.shape or set(a.terms) & set(b.terms) or source is None:
        raise UnsupportedNode(node, role)
    if node.op_type == "Sub":
        b = b.scaled_by(-1.0)
    nodes = dict.fromkeys((*a.nodes, *b.nodes, node))
    return LinearTrace(source, 1.0, {**a.terms, **b.terms}, tuple(nodes), norm)


def _common(
    pieces: Sequence[LinearTrace], failure: MatchFailure
) -> tuple[Linear | None, TracedNorm | None]:
    """The common product and norm of all traces except caches.

    Raises:
        MatchFailure: The given ``failure``, if the traces have no common product and norm.
    """
    projected = [piece for piece in pieces if piece.source is not None]
    if len({(p.source.node, p.norm and p.norm.norm.node) for p in projected if p.source}) > 1:
        raise failure
    return (projected[0].source, projected[0].norm) if projected else (None, None)


def _nothing_of(piece: LinearTrace) -> ElementMap:
    """An element map with gain and offset zero, for a factor that the trace lacks."""
    term = next(iter(piece.terms.values()))
    return replace(term.scaled_by(0.0), factor_index=np.zeros_like(term.factor_index))


class TermByHead(NamedTuple):
    """One term of a trace by head: (H, K) arrays, and factor indices (B, H, T, K).

    ``sequence_first`` means that tokens are ordered (T, B) instead of (B, T).
    """

    columns: np.ndarray
    gain: np.ndarray
    offset: np.ndarray
    factor_index: np.ndarray
    sequence_first: bool = False

    @property
    def is_used(self) -> bool:
        """Whether an element is not zero."""
        return bool(self.gain.any() or self.offset.any())


class CachedHeads(NamedTuple):
    """The cached heads (B, H, P, K), which precede the heads of the tokens.

    Attributes:
        factor: The cache.
        heads: The term of the cache. The gain is zero, and each offset is the scale of the cache.
    """

    factor: PositionFactor
    heads: TermByHead

    @property
    def scale(self) -> float:
        """The scalar factor of the cache."""
        return float(self.heads.offset.flat[0])


def split_heads(
    trace: LinearTrace, axes: Sequence[int], role: str
) -> tuple[dict[PositionFactor | None, TermByHead], CachedHeads | None]:
    """Split a trace into heads, and check that each token keeps its position.

    Args:
        trace: The trace of a projection.
        axes: The permutation of the value to (B, H, T, K) or (B*H, T, K).
        role: Name of the projection, for messages.

    Returns:
        The terms of the tokens, and the cached heads, if any.

    Raises:
        MatchFailure: Heads are split in another way, or depend on the position of the token.
    """
    laid_out = {
        factor: term.map(lambda array: _by_head(array.transpose(axes), trace, role))
        for factor, term in trace.terms.items()
    }
    present = {f: term for f, term in laid_out.items() if f is None or not f.past}
    cached = [(f, term) for f, term in laid_out.items() if f is not None and f.past]
    if not cached:
        return {f: _uniform(term, trace, role) for f, term in present.items()}, None
    if len(cached) > 1:
        raise MatchFailure(f"the {role} joins several caches")
    factor, past = cached[0]
    where = np.asarray(past.used.any(axis=(0, 1, 3)))
    length = int(where.sum())
    if not where[:length].all() or any(p.used[:, :, :length].any() for p in present.values()):
        raise MatchFailure(f"the cache of the {role} does not precede its tokens")
    factor_index = past.factor_index[:, :, :length]
    offset = past.offset[:, :, :length]
    if not (offset == offset.flat[0]).all() or past.gain.any():
        raise MatchFailure(f"the cache of the {role} is scaled element by element")
    zeros = np.zeros(offset.shape[1::2])
    cached_heads = TermByHead(zeros.astype(np.int64), zeros, zeros + offset.flat[0], factor_index)
    terms = {
        f: _uniform(term.map(lambda array: array[:, :, length:]), trace, role)
        for f, term in present.items()
    }
    return terms, CachedHeads(factor, cached_heads)


def _by_head(array: np.ndarray, trace: LinearTrace, role: str) -> np.ndarray:
    """Reshape an array of an element map to (B, H, T, K)."""
    if array.ndim < 2:
        raise MatchFailure(f"the {role} is a single row")
    length, size = array.shape[-2:]
    if trace.source is None or any(factor and factor.past for factor in trace.terms):
        if array.ndim != 4:
            raise MatchFailure(f"the cache of the {role} is not laid out as (B, H, T, K)")
        return array
    total = trace.source.rows.size
    if length == 0 or total % length:
        raise MatchFailure(
            f"the {role} holds {total} tokens, not a multiple of the length {length}"
        )
    try:
        return array.reshape(total // length, -1, length, size)
    except ValueError as error:
        raise MatchFailure(f"the {role} is laid out as {array.shape}, not (B, H, T, K)") from error


def _uniform(term: ElementMap, trace: LinearTrace, role: str) -> TermByHead:
    """A term by head; its columns, gain and offset must be the same for each token."""
    assert trace.source is not None
    batch, _, length, _ = term.columns.shape
    if batch * length != trace.source.rows.size:
        raise MatchFailure(
            f"the {role} holds {trace.source.rows.size} tokens, not {batch} sequences of {length}"
        )
    batches, _, tokens, _ = np.ogrid[:batch, :1, :length, :1]
    orders = {False: batches * length + tokens, True: tokens * batch + batches}
    sequence_first = next(
        (key for key, order in orders.items() if ((term.tokens == order) | ~term.used).all()),
        None,
    )
    if sequence_first is None:
        raise MatchFailure(f"the layout of the {role} reorders tokens")
    columns, _, gain, offset, factor_index = term.arrays()
    for array in (columns, gain, offset):
        if not (array == array[:1, :, :1]).all():
            raise MatchFailure(f"the {role} depends on the position of the token")
    return TermByHead(
        columns[0, :, 0], gain[0, :, 0], offset[0, :, 0], factor_index, sequence_first
    )


def known_shape(value: ir.Value, info: ShapeInfo) -> tuple[int, ...]:
    """The shape of a value.

    Raises:
        MatchFailure: The shape is unknown.
    """
    shape = info.shape(value)
    if shape is None:
        raise MatchFailure(
            f"the shape of {value.name!r} could not be inferred: {info.explain(value)}"
        )
    return shape
