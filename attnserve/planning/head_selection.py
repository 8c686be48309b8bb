"""Which heads go, and which take whose probabilities: what a user names, as masks and edges.

A request is a file (a mask, edges) or a few words (a fraction, a configuration of the papers); the
words are filled in by what was measured on calibration data.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from attnserve.calibration.similarity import HeadSimilarity
from attnserve.choices import Alignment
from graph_passes.blocks import AttentionBlock
from graph_passes.errors import InvalidArgument, InvalidData
from graph_passes.passes.prune_heads import check_mask
from graph_passes.passes.reuse_attention import check_edges, reuse_refusal

__all__ = [
    "Alignment",
    "Masks",
    "Reuse",
    "edges_by_damage",
    "edges_of",
    "layer_name",
    "masks_by_loss",
    "masks_by_score",
    "parse_reuse",
    "read_edges",
    "read_masks",
    "reused_layers",
]

Masks = dict[str, list[int]]
"""By layer, 1 for each head that stays and 0 for each that goes."""
MutableEdges = dict[str, dict[int, tuple[str, int]]]
"""See ``graph_passes.passes.reuse_attention.Edges``."""

FORMS = "partial:K[:P], full:P, alternate, all-end, auto or a .json file of edges"


@dataclass(frozen=True)
class Reuse:
    """A configuration of arXiv 2110.06821.

    Attributes:
        kind: Its name.
        heads: K for partial reuse; all otherwise.
        layers: P, how many layers reuse; the paper's own number where it is not given.
    """

    kind: Literal["partial", "full", "alternate", "all-end", "auto"]
    heads: int | None = None
    layers: int | None = None


def parse_reuse(text: str) -> Reuse:
    """``partial:K[:P]``, ``full:P``, ``alternate``, ``all-end`` or ``auto``.

    Raises:
        InvalidArgument: It is none of these.
    """
    kind, *given = text.split(":")
    counts = {"partial": (1, 2), "full": (1,), "alternate": (0,), "all-end": (0, 1), "auto": (0,)}
    numbers = [number for part in given if (number := _count(part)) is not None]
    if kind not in counts or len(given) not in counts[kind] or len(numbers) < len(given):
        raise InvalidArgument(f"--reuse {text!r}: expected {FORMS}", "for example partial:6")
    if 0 in numbers:
        raise InvalidArgument(f"--reuse {text!r}: expected numbers from 1 up", "for example full:2")
    if kind == "partial":
        return Reuse("partial", numbers[0], numbers[1] if len(numbers) > 1 else None)
    named: dict[str, Any] = {"full": "full", "alternate": "alternate", "all-end": "all-end"}
    return Reuse(named.get(kind, "auto"), None, numbers[0] if numbers else None)


def _count(text: str) -> int | None:
    """What a number from 0 up says, of a length that ``int`` reads."""
    return int(text) if text.isdecimal() and len(text) < 100 else None


def reused_layers(reuse: Reuse, count: int) -> range:
    """Which of ``count`` layers, from 0, reuse: as the paper says of each configuration.

    Partial reuse leaves the first and the last exact; full reuse takes the P after the first;
    alternate takes the even ones (counted from 1); all-end the P before the last.

    Raises:
        InvalidArgument: There are not so many layers.
    """
    most = count - 2 if reuse.kind in ("partial", "all-end", "auto") else count - 1
    if reuse.kind == "partial" and reuse.layers is not None:
        most = count - 1
    wanted = reuse.layers or (max(count // 2, 1) if reuse.kind == "all-end" else most)
    if most < 1 or wanted > most:
        raise InvalidArgument(
            f"--reuse {reuse.kind}: {max(wanted, 1)} layers of {count}, expected at most "
            f"{max(most, 0)}: the first"
            + (" is exact" if most == count - 1 else " and the last are exact"),
            "reuse fewer layers",
        )
    match reuse.kind:
        case "alternate":
            return range(1, count, 2)
        case "all-end":
            return range(count - 1 - wanted, count - 1)
        case _:
            return range(1, 1 + wanted)


def edges_of(
    reuse: Reuse,
    blocks: Sequence[AttentionBlock],
    chosen: Sequence[str],
    *,
    masks: Mapping[str, Sequence[int]],
    similarity: HeadSimilarity | None,
) -> MutableEdges:
    """The edges of a configuration, aligned by similarity, or by index where there is none.

    Args:
        blocks: All of the model, in order of execution.
        chosen: The layers that reuse.
        masks: Heads that are pruned are neither sources nor reused.
        similarity: Of all heads.

    Raises:
        InvalidArgument: A layer has not so many heads.
    """
    edges: MutableEdges = {}
    for index, block in enumerate(blocks):
        if block.name not in chosen:
            continue
        kept = _kept(block, masks)
        count = len(kept) if reuse.heads is None else reuse.heads
        if count > block.num_heads:
            raise InvalidArgument(
                f"--reuse partial:{count}: {block.name} has {block.num_heads} heads",
                f"reuse 1 to {block.num_heads} heads",
            )
        sources = [b for b in blocks[:index] if reuse_refusal(block, [b]) is None]
        if similarity is None:
            found = _by_index(block, sources, kept, min(count, len(kept)), masks, edges)
        elif count >= len(kept):
            found = _whole_layer(block, sources, kept, masks, edges, similarity)
        else:
            ranked = _nearest(block, sources, kept, masks, edges, similarity)
            found = {head: source for _, head, source in ranked[:count]}
        if found:
            edges[block.name] = found
    return edges


def _kept(block: AttentionBlock, masks: Mapping[str, Sequence[int]]) -> list[int]:
    mask = masks.get(block.name, (1,) * block.num_heads)
    return [head for head, stays in enumerate(mask) if stays]


def _exact(
    block: AttentionBlock, masks: Mapping[str, Sequence[int]], edges: MutableEdges
) -> list[int]:
    """Heads that compute their own probabilities, now and after the rewrite."""
    taken = edges.get(block.name, {})
    own = set(block.own_heads.tolist())
    return [head for head in _kept(block, masks) if head not in taken and head in own]


def _nearest(
    block: AttentionBlock,
    sources: Sequence[AttentionBlock],
    heads: Sequence[int],
    masks: Mapping[str, Sequence[int]],
    edges: MutableEdges,
    similarity: HeadSimilarity,
) -> list[tuple[float, int, tuple[str, int]]]:
    """For each head its most similar exact head: (similarity, head, source), the nearest first."""
    best: dict[int, tuple[float, int, tuple[str, int]]] = {}
    for source in sources:
        between = similarity.between(block.name, source.name)
        for theirs in _exact(source, masks, edges):
            for head in heads:
                alike = float(between[head, theirs])
                if alike > best.get(head, (-1.0, 0, ("", 0)))[0]:  # NaN never is
                    best[head] = alike, head, (source.name, theirs)
    return sorted(best.values(), key=lambda found: -found[0])


def _whole_layer(
    block: AttentionBlock,
    sources: Sequence[AttentionBlock],
    heads: Sequence[int],
    masks: Mapping[str, Sequence[int]],
    edges: MutableEdges,
    similarity: HeadSimilarity,
) -> dict[int, tuple[str, int]]:
    """Every head another one of a single layer, where one has as many exact heads.

    Then nothing is copied: the values follow the order of the source (at 512 tokens a copy of the
    probabilities costs as much as half of what their reuse saves), and the fit loses nothing.
    """
    # Here, for every command would wait for it.
    from scipy.optimize import linear_sum_assignment

    best: tuple[float, dict[int, tuple[str, int]]] = (-1.0, {})
    for source in sources:
        exact = _exact(source, masks, edges)
        if len(exact) != len(heads) or len(exact) != len(_kept(source, masks)):
            continue
        between = similarity.between(block.name, source.name)[np.ix_(heads, exact)]
        if np.isnan(between).any():
            continue
        mine, theirs = linear_sum_assignment(-between)
        alike = float(between[mine, theirs].mean())
        if alike > best[0]:
            pairs = zip(mine.tolist(), theirs.tolist(), strict=True)
            best = alike, {heads[a]: (source.name, exact[b]) for a, b in pairs}
    if best[1]:
        return best[1]
    nearest = _nearest(block, sources, heads, masks, edges, similarity)
    found = {head: source for _, head, source in nearest}
    return found if len(found) == len(heads) else {}


def _by_index(
    block: AttentionBlock,
    sources: Sequence[AttentionBlock],
    kept: Sequence[int],
    count: int,
    masks: Mapping[str, Sequence[int]],
    edges: MutableEdges,
) -> dict[int, tuple[str, int]]:
    """Algorithm 1: the last K heads take R[1..K] of the layer before, R being its exact heads, then
    those it took itself. A head that was taken is followed to where it is exact."""
    if not sources:
        return {}
    before = sources[-1]
    taken = edges.get(before.name, {})
    forwarded = [(before.name, head) for head in _exact(before, masks, edges)]
    forwarded += [taken[head] for head in sorted(taken)]
    mine = kept[len(kept) - count :]
    return dict(zip(mine, forwarded, strict=False))


def edges_by_damage(
    blocks: Sequence[AttentionBlock],
    chosen: Sequence[str],
    *,
    masks: Mapping[str, Sequence[int]],
    similarity: HeadSimilarity,
    effect: Mapping[str, np.ndarray],
    budget: float,
) -> MutableEdges:
    """As many edges as may be, the least damaging first (``--reuse auto``).

    Taking another's probabilities moves a head's attention by 1 - c in total variation, so what it
    writes moves by about that share, and the output by (1 - c)^2 of what leaving the head out does.
    A layer reuses a quarter of its heads or more, or none: fewer save less than joining them costs.

    Args:
        effect: Squared change of the output, over its variation, when a head is left out.
        budget: The sum of all such changes that is allowed.
    """
    candidates: list[tuple[float, int, int, tuple[str, int]]] = []
    for index, block in enumerate(blocks):
        if block.name in chosen:
            sources = [b for b in blocks[:index] if reuse_refusal(block, [b]) is None]
            for source in sources:
                between = similarity.between(block.name, source.name)
                for head in _kept(block, masks):
                    for theirs in _exact(source, masks, {}):
                        damage = float(effect[block.name][head] * (1 - between[head, theirs]) ** 2)
                        if np.isfinite(damage):
                            candidates.append((damage, index, head, (source.name, theirs)))
    edges: MutableEdges = {}
    exact: set[tuple[str, int]] = set()
    spent = 0.0
    for damage, index, head, source in sorted(candidates):
        name = blocks[index].name
        taken = head in edges.get(name, {}) or (name, head) in exact
        if taken or source[1] in edges.get(source[0], {}) or spent + damage > budget:
            continue
        edges.setdefault(name, {})[head] = source
        exact.add(source)
        spent += damage
    heads = {block.name: block.num_heads for block in blocks}
    few = [name for name, taken in edges.items() if 4 * len(taken) < heads[name]]
    return {name: taken for name, taken in edges.items() if name not in few}


def masks_by_score(scores: Mapping[str, np.ndarray], fraction: float) -> Masks:
    """A share of all heads goes, the lowest scores first; every layer keeps one."""
    ranked = sorted(
        (float(score), name, head)
        for name, found in scores.items()
        for head, score in enumerate(found)
    )
    masks = {name: [1] * len(found) for name, found in scores.items()}
    left = _share(fraction, len(ranked))
    for _, name, head in ranked:
        if left and sum(masks[name]) > 1:
            masks[name][head] = 0
            left -= 1
    return masks


def masks_by_loss(
    orders: Mapping[str, tuple[Sequence[int], np.ndarray]],
    fraction: float,
    effects: Mapping[str, np.ndarray],
) -> Masks:
    """A share of all heads goes, layer by layer in the order of what their loss adds.

    Args:
        orders: By layer, the heads from the first to go, and the share of the layer's own output
            that is lost once so many are gone.
        effects: By layer, what each head does to the model's output (``leave_one_out``). Summed,
            they say what a loss in this layer costs there: later layers take back much of what is
            lost in early ones.
    """
    steps = sorted(
        (float(added) * float(np.sum(effects[name])), name, step)
        for name, (_, losses) in orders.items()
        for step, added in enumerate(np.maximum.accumulate(np.diff(losses))[:-1])
    )
    total = sum(len(heads) for heads, _ in orders.values())
    gone = dict.fromkeys(orders, 0)
    for _, name, step in steps[: _share(fraction, total)]:
        gone[name] = max(gone[name], step + 1)
    return {
        name: [int(head not in heads[: gone[name]]) for head in range(len(heads))]
        for name, (heads, _) in orders.items()
    }


def _share(fraction: float, heads: int) -> int:
    return round(fraction * heads)


def layer_name(layer: str, names: Sequence[str], option: str = "--layers") -> str:
    """The layer that a name or an index from 0 stands for.

    Raises:
        InvalidArgument: None does.
    """
    if layer in names:
        return layer
    index = _count(layer)
    if index is not None and index < len(names):
        return names[index]
    raise InvalidArgument(
        f"{option}: no attention is called {layer[:100]!r}; the model has {len(names)}, "
        f"the first of them {names[0]!r}",
        "use names or indices (from 0) as `attnserve inspect` lists them",
    )


def read_masks(
    source: Path | Mapping[str, Any],
    blocks: Sequence[AttentionBlock],
    option: str = "--prune-heads",
) -> Masks:
    """{"layer name or index": [0 or 1 for each head]}, checked against the model.

    Args:
        option: What the user gave them with, for errors.

    Raises:
        InvalidData: The file cannot be read, or is no such object.
        InvalidArgument: A layer is unknown or named twice, a mask has another length or entries
            that are neither 0 nor 1, or no head of the model is left.
    """
    content = _object(source, option, '{"layer": [1, 0, ...]}')
    heads = {block.name: block.num_heads for block in blocks}
    masks: Masks = {}
    for layer, mask in content.items():
        name = layer_name(layer, list(heads), option)
        if name in masks:
            raise InvalidArgument(f"{option}: {name} has two masks", "give each layer one")
        entries = _entries(mask)
        if entries is None or not all(_is_bit(entry) for entry in entries):
            raise InvalidArgument(
                f"{option}: {layer} has {_shown(mask)}, expected a list of 0 and 1",
                "write 1 for each head that stays and 0 for each that goes",
            )
        try:
            check_mask(name, entries, heads[name])
        except InvalidArgument as error:
            raise InvalidArgument(f"{option}: {error.what}", error.fix) from error
        masks[name] = [int(entry) for entry in entries]
    if not any(sum(masks.get(name, [1])) for name in heads):
        raise InvalidArgument(
            f"{option}: every head of every layer is 0, so no attention would be left",
            "keep at least one head of one layer",
        )
    return masks


def read_edges(
    source: Path | Mapping[str, Any], blocks: Sequence[AttentionBlock], option: str = "--reuse"
) -> MutableEdges:
    """{"layer": {"head": ["source layer", head]}}, layers by name or index, heads from 0.

    Args:
        option: What the user gave them with, for errors.

    Raises:
        InvalidData: The file cannot be read, or is no such object.
        InvalidArgument: An edge is malformed or impossible.
    """
    form = '{"layer": {"head": ["earlier layer", head]}}'
    content = _object(source, option, form)
    names = [block.name for block in blocks]
    edges: MutableEdges = {}
    for layer, heads in content.items():
        name = layer_name(layer, names, option)
        if not isinstance(heads, Mapping):
            raise InvalidArgument(
                f"{option}: {layer} has {_shown(heads)}, expected an object by head",
                f"write {form}",
            )
        given: dict[Any, Any] = dict(heads)  # pyright: ignore[reportUnknownArgumentType]
        taken = edges.setdefault(name, {})
        for key, edge in given.items():
            head = _count(str(key))
            if head is None or not _is_edge(edge):
                raise InvalidArgument(
                    f"{option}: {layer} has {_shown({str(key): edge})}, expected "
                    '{"head": ["earlier layer", head]}',
                    "count heads from 0",
                )
            if head in taken:
                raise InvalidArgument(
                    f"{option}: head {head} of {name} has two sources", "give each head one"
                )
            taken[head] = layer_name(str(edge[0]), names, option), int(edge[1])
    try:
        check_edges(edges, blocks)
    except InvalidArgument as error:
        raise InvalidArgument(f"{option}: {error.what}", error.fix) from error
    return {name: taken for name, taken in edges.items() if taken}


def _entries(value: Any) -> list[Any] | None:
    """The entries of a list, of JSON or of Python; None where it is none."""
    if isinstance(value, np.ndarray):
        value = value.tolist()
    return list(value) if isinstance(value, list | tuple) else None


def _is_bit(entry: Any) -> bool:
    return isinstance(entry, int | float) and not isinstance(entry, bool) and entry in (0, 1)


def _shown(value: Any) -> str:
    """A value as JSON, no longer than a line can hold."""
    text = json.dumps(value, default=repr)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _is_edge(edge: Any) -> bool:
    entries = _entries(edge)
    if entries is None or len(entries) != 2:
        return False
    layer, head = entries
    named = isinstance(layer, str | int) and not isinstance(layer, bool)
    return named and isinstance(head, int) and not isinstance(head, bool)


def _object(source: Path | Mapping[str, Any], option: str, form: str) -> dict[str, Any]:
    if not isinstance(source, Path):
        return {str(key): value for key, value in source.items()}
    try:
        content = json.loads(source.read_text(encoding="utf-8"), object_pairs_hook=_once)
    except FileNotFoundError as error:
        raise InvalidData(f"{option} {source}: no such file", "check the path") from error
    except OSError as error:
        why = f"{option} {source}: cannot be read: {error.strerror}"
        raise InvalidData(why, "check the path") from error
    except (ValueError, RecursionError) as error:
        raise InvalidData(f"{option} {source}: not JSON: {error}", f"write {form}") from error
    if not isinstance(content, dict) or not content:
        raise InvalidData(f"{option} {source}: expected an object, {form}", "see the README")
    return dict(content)  # pyright: ignore[reportUnknownArgumentType]


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object whose keys are all different."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key is there twice")
    return found
