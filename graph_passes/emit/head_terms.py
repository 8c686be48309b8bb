"""The columns, norm rows and rotary terms of the heads to emit, and why they cannot be emitted.

``heads`` writes the operators. Here no node is inserted, so that passes can ask before a rewrite.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from graph_passes.blocks import AttentionBlock, BroadcastLayout, Norm, Projection, RotaryTerm
from graph_passes.errors import Refusal

__all__ = ["TOKEN_LAYOUT", "HeadTerms", "factor_axes", "head_terms", "heads_refusal", "num_groups"]

TOKEN_LAYOUT = Refusal("token_layout", "its tokens are not laid out as (batch, sequence, size)")


def heads_refusal(part: Projection) -> Refusal | None:
    """Return why heads of a projection cannot be emitted in plain operators; None if they can."""
    if part.is_cached:
        return Refusal(
            "cached",
            "its cached keys and values are inputs of the graph, whose shapes would change",
        )
    if not (part.by_sequence or part.sequence_first):
        return TOKEN_LAYOUT
    try:
        head_terms(part, np.arange(part.num_heads))
    except UnsupportedHeads as error:
        return Refusal("projection_layout", str(error))
    return None


def num_groups(block: AttentionBlock) -> int:
    """G, if each of G key/value heads serves H / G consecutive query heads, else H."""
    heads = np.arange(block.num_heads)
    spread = [head_terms(part, heads).head_groups for part in (block.k, block.v)]
    groups = int(spread[0].max()) + 1
    in_order = heads * groups // len(heads)
    is_even = len(heads) % groups == 0 and all(np.array_equal(group, in_order) for group in spread)
    return groups if is_even else len(heads)


class UnsupportedHeads(Exception):
    """A projection that cannot be emitted, with the reason."""


@dataclass(frozen=True, eq=False)
class HeadTerms:
    """A projection of some heads by distinct head; grouped heads are computed once.

    Attributes:
        base: The columns of W of each distinct head, G x K (of the norm, if any).
        head_groups: The distinct head of each head.
        rotary_terms: Each term with the order of the base elements that it reads.
        group: The row of the norm of each distinct head; empty without a norm.
    """

    base: np.ndarray
    head_groups: np.ndarray
    rotary_terms: tuple[tuple[RotaryTerm, np.ndarray], ...]
    group: np.ndarray


def head_terms(part: Projection, heads: np.ndarray) -> HeadTerms:
    """Return the terms of some heads.

    Raises:
        UnsupportedHeads: The projection cannot be emitted.
    """
    identity = (RotaryTerm(None, part.columns, part.gain, part.offset),)
    rotary_terms = [_of_heads(term, heads) for term in part.rotary_terms or identity]
    first, head_groups = _distinct(rotary_terms, heads)
    base = _read_columns(rotary_terms, first) if part.rotary_terms else part.columns[heads[first]]
    group = np.zeros(0, np.int64)
    if part.norm is not None:
        group = _norm_rows(part.norm, base)
        if part.norm.rotary_terms:
            head_terms(part.norm.operand(part), group)
        if part.rotary_terms:
            base = np.sort(base, axis=1)
        elif not (np.diff(base, axis=1) == 1).all():
            raise UnsupportedHeads("the elements of its q/k norm are reordered")
    ordered_terms = [(_of_heads(term, first), _order(term, first, base)) for term in rotary_terms]
    for term, _ in ordered_terms:
        if term.factor is not None:
            factor_axes(term.factor, heads[first], term.gain != 0)
    return HeadTerms(base, head_groups, tuple(ordered_terms), group)


def _of_heads(term: RotaryTerm, heads: np.ndarray) -> RotaryTerm:
    """The term of selected heads; its factor still covers all heads."""
    return RotaryTerm(term.factor, term.columns[heads], term.gain[heads], term.offset[heads])


def _distinct(terms: Sequence[RotaryTerm], heads: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The first of each group of equal heads, in order, and the group of each head.

    Args:
        terms: The terms of ``heads``.
        heads: The index of each head in the layouts of the factors.
    """
    arrays = [np.where(term.gain != 0, term.columns, -1) for term in terms]
    for term in terms:
        arrays += [term.gain, term.offset]
        if term.factor is not None:
            arrays += [axis[heads] for axis in term.factor.axes if not isinstance(axis, str)]
    rows = np.concatenate(arrays, axis=1)
    _, first, groups = np.unique(rows, axis=0, return_index=True, return_inverse=True)
    order = np.argsort(first)  # distinct heads in order of first use
    return first[order], np.argsort(order)[groups.reshape(-1)]


def _read_columns(terms: Sequence[RotaryTerm], heads: np.ndarray) -> np.ndarray:
    """The columns of W that the terms of each head read, (G, K).

    Raises:
        UnsupportedHeads: Heads read different numbers of columns.
    """
    read = np.concatenate([np.where(term.gain != 0, term.columns, -1) for term in terms], axis=1)
    columns = [np.unique(row[row >= 0]) for row in read[heads]]
    if len({len(row) for row in columns}) > 1:
        raise UnsupportedHeads("its rotary embedding covers different numbers of elements by head")
    return np.stack(columns)


def _norm_rows(norm: Norm, base: np.ndarray) -> np.ndarray:
    """The row of the norm that each head reads, given its columns (G, K) of the flattened norm.

    Raises:
        UnsupportedHeads: A head does not read one whole row.
    """
    length = norm.columns.shape[1]
    rows = base // length
    if base.shape[1] != length or not (rows == rows[:, :1]).all():
        raise UnsupportedHeads("its q/k norm covers all heads together")
    return rows[:, 0]


def _order(term: RotaryTerm, first: np.ndarray, base: np.ndarray) -> np.ndarray:
    """The base element of each element of a term, which must be the same in each head."""
    columns = term.columns[first]
    is_used = term.gain[first] != 0
    if np.array_equal(columns, base):
        return np.arange(base.shape[1])
    pairs = zip(base, columns, strict=True)
    order = np.array([np.searchsorted(np.sort(read), wanted) for read, wanted in pairs])
    common = np.where(is_used, order, 0).max(axis=0)
    if not ((order == common) | ~is_used).all():
        raise UnsupportedHeads("its rotary embedding has another order of elements in each head")
    return common


def factor_axes(
    spread: BroadcastLayout, heads: np.ndarray, is_used: np.ndarray
) -> tuple[tuple[str, np.ndarray | None], ...]:
    """The role of each axis of the factor, and the selected elements.

    Roles are "batch", "token", "head", "element", "both" for elements that differ by head, or ""
    for a single element.

    Raises:
        UnsupportedHeads: The layout is not supported.
    """
    if spread.is_last_position or (spread.positions is not None and spread.axes[:1] != ("batch",)):
        raise UnsupportedHeads("its operator computes the rotary positions")
    roles: list[tuple[str, np.ndarray | None]] = []
    for axis in spread.axes:
        if isinstance(axis, str):
            roles.append((axis, None))
            continue
        index = np.where(is_used, axis[heads], -1)
        by_element = index.max(axis=0)
        by_head = index.max(axis=1)
        if not is_used.any() or (index[is_used] == index[is_used][0]).all():
            roles.append(("", np.array(max(index.max(), 0))))
        elif ((index == by_element) | ~is_used).all():
            roles.append(("element", np.maximum(by_element, 0)))
        elif ((index == by_head[:, None]) | ~is_used).all():
            roles.append(("head", np.maximum(by_head, 0)))
        else:
            roles.append(("both", np.maximum(index, 0)))
    names = [role for role, _ in roles if role]
    if (
        len(names) != len(set(names))
        or "token" not in names
        or ("both" in names and {"head", "element"} & {*names})
    ):
        raise UnsupportedHeads("the layout of its rotary angles is not supported")
    return tuple(roles)
