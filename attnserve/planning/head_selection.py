"""Head masks for pruning and edges for attention reuse.

They are read from files and objects, or computed from a share of heads or a configuration of the
papers, given measured head similarities and losses.
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
"""By layer, 1 for each head that is kept and 0 for each that is removed."""

MutableEdges = dict[str, dict[int, tuple[str, int]]]
"""As ``graph_passes.passes.reuse_attention.Edges``: by layer and head, (source layer, head)."""

REUSE_FORMS = "partial:K[:P], full:P, alternate, all-end, auto or a .json file of edges"


@dataclass(frozen=True)
class Reuse:
    """A configuration of attention reuse (arXiv 2110.06821).

    Attributes:
        heads: K, the reusing heads of a layer in partial reuse; None for all heads.
        layers: P, the number of reusing layers; None for the number in the paper.
    """

    kind: Literal["partial", "full", "alternate", "all-end", "auto"]
    heads: int | None = None
    layers: int | None = None


def parse_reuse(text: str) -> Reuse:
    """Parse ``partial:K[:P]``, ``full:P``, ``alternate``, ``all-end[:P]`` or ``auto``.

    Raises:
        InvalidArgument: The text is none of these.
    """
    kind, *given = text.split(":")
    counts = {"partial": (1, 2), "full": (1,), "alternate": (0,), "all-end": (0, 1), "auto": (0,)}
    numbers = [number for part in given if (number := _count(part)) is not None]
    if kind not in counts or len(given) not in counts[kind] or len(numbers) < len(given):
        raise InvalidArgument(
            f"`reuse` is {text[:100]!r}: expected {REUSE_FORMS}",
            "for example partial:6",
            code="reuse.form",
        )
    if 0 in numbers:
        raise InvalidArgument(
            f"`reuse` is {text!r}: expected numbers from 1",
            "for example full:2",
            code="reuse.range",
        )
    if kind == "partial":
        return Reuse("partial", numbers[0], numbers[1] if len(numbers) > 1 else None)
    named: dict[str, Any] = {"full": "full", "alternate": "alternate", "all-end": "all-end"}
    return Reuse(named.get(kind, "auto"), None, numbers[0] if numbers else None)


def _count(text: str) -> int | None:
    """Parse a decimal number; None if the text is none, or is too long."""
    return int(text) if text.isdecimal() and len(text) < 100 else None


def reused_layers(reuse: Reuse, count: int) -> range:
    """The indices of the reusing layers, of ``count`` layers, as the paper defines them.

    partial: all but the first and the last; full: P after the first; alternate: every second;
    all-end: P before the last.

    Raises:
        InvalidArgument: The model has too few layers.
    """
    most = count - 2 if reuse.kind in ("partial", "all-end", "auto") else count - 1
    if reuse.kind == "partial" and reuse.layers is not None:
        most = count - 1
    wanted = reuse.layers or (max(count // 2, 1) if reuse.kind == "all-end" else most)
    if most < 1 or wanted > most:
        raise InvalidArgument(
            f"`reuse` {reuse.kind} requests {max(wanted, 1)} of {count} layers, expected at most "
            f"{max(most, 0)}: the first"
            + (" layer never reuses" if most == count - 1 else " and the last layer never reuse"),
            "reuse fewer layers",
            code="reuse.layers",
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
    """The edges of a configuration.

    Args:
        blocks: All attention blocks of the model, in order of execution.
        chosen: The names of the reusing layers.
        masks: Pruned heads are neither sources nor targets.
        similarity: Of all heads; None aligns heads by index, as in the paper.

    Raises:
        InvalidArgument: A layer has fewer heads than requested.
    """
    edges: MutableEdges = {}
    for index, block in enumerate(blocks):
        if block.name not in chosen:
            continue
        kept = _kept(block, masks)
        count = len(kept) if reuse.heads is None else reuse.heads
        if count > block.num_heads:
            raise InvalidArgument(
                f"`reuse` is partial:{count}: {block.name} has {block.num_heads} heads",
                f"reuse 1 to {block.num_heads} heads",
                code="reuse.heads",
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
    """The heads that compute their own probabilities before and after the rewrite."""
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
    """(similarity, head, source) of each head and its most similar exact head, best first."""
    best: dict[int, tuple[float, int, tuple[str, int]]] = {}
    for source in sources:
        between = similarity.between(block.name, source.name)
        for theirs in _exact(source, masks, edges):
            for head in heads:
                alike = float(between[head, theirs])
                if alike > best.get(head, (-1.0, 0, ("", 0)))[0]:  # false for NaN
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
    """A one-to-one assignment to the heads of a single layer with as many exact heads, if any.

    The values can then be permuted instead of the probabilities. A copy of the probabilities would
    cost about half of the time that reuse saves (512 tokens).
    """
    # Imported here: scipy.optimize would slow down the start of every command.
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
    """Algorithm 1 of the paper: the last K heads reuse R[1..K] of the previous layer.

    R lists its exact heads, then its reused ones; a reused head is replaced by its own source.
    """
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
    """Greedily add the least damaging edges within a budget (``reuse="auto"``).

    Reuse changes a head's attention by 1 - c in total variation, where c is the similarity. The
    output then changes by about (1 - c)^2 of the effect of removing the head. A layer reuses at
    least a quarter of its heads or none: with fewer, joining the heads costs more than it saves.

    Args:
        effect: Relative squared change of the output when a head is removed, by layer.
        budget: The allowed sum of estimated changes.
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
    """Remove a share of all heads, lowest scores first; every layer keeps at least one."""
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
    """Remove a share of all heads, those first whose removal adds least loss.

    Args:
        orders: By layer, the heads in the order of removal, and the share of the layer's output
            that is lost once n of them are removed.
        effects: By layer, the effect of each head on the model's output (``leave_one_out``). Their
            sum weights the losses of a layer: later layers compensate much of the loss of earlier
            ones.
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


def layer_name(layer: str, names: Sequence[str], parameter: str = "layers") -> str:
    """Resolve the name of a layer, or its index from 0.

    Args:
        parameter: The Python parameter that holds the layer, for errors.

    Raises:
        InvalidArgument: No layer has this name or index.
    """
    if layer in names:
        return layer
    index = _count(layer)
    if index is not None and index < len(names):
        return names[index]
    raise InvalidArgument(
        f"`{parameter}` names the unknown layer {layer[:100]!r}; the model has {len(names)} "
        f"attention layers, the first is {names[0]!r}",
        "use names or indices (from 0) as `attnserve inspect` lists them",
        code="request.unknown_layer",
    )


def read_masks(
    source: Path | Mapping[str, Any],
    blocks: Sequence[AttentionBlock],
    parameter: str = "prune_heads",
) -> Masks:
    """Read {"layer name or index": [0 or 1 for each head]}, and check it against the model.

    Args:
        parameter: The Python parameter that holds the source, for errors.

    Raises:
        InvalidData: The file cannot be read, or has another structure.
        InvalidArgument: A layer is unknown or named twice, a mask has another length or entries
            other than 0 and 1, or no head of the model is left.
    """
    content = _read_object(source, parameter, '{"layer": [1, 0, ...]}')
    heads = {block.name: block.num_heads for block in blocks}
    masks: Masks = {}
    for layer, mask in content.items():
        name = layer_name(layer, list(heads), parameter)
        if name in masks:
            raise InvalidArgument(
                f"`{parameter}` has two masks for {name}", "give each layer one", code="masks.twice"
            )
        entries = _entries(mask)
        if entries is None or not all(_is_bit(entry) for entry in entries):
            raise InvalidArgument(
                f"`{parameter}`: the mask of {layer} is {_shown(mask)}, expected a list of 0 and 1",
                "write 1 for each head to keep and 0 for each head to remove",
                code="masks.entries",
            )
        try:
            check_mask(name, entries, heads[name])
        except InvalidArgument as error:
            raise InvalidArgument(
                f"`{parameter}`: {error.what}", error.fix, code="masks.length"
            ) from error
        masks[name] = [int(entry) for entry in entries]
    if not any(sum(masks.get(name, [1])) for name in heads):
        raise InvalidArgument(
            f"`{parameter}` removes every head of the model",
            "keep at least one head of one layer",
            code="masks.empty",
        )
    return masks


def read_edges(
    source: Path | Mapping[str, Any], blocks: Sequence[AttentionBlock], parameter: str = "reuse"
) -> MutableEdges:
    """Read {"layer": {"head": ["source layer", head]}}: layers by name or index, heads from 0.

    Args:
        parameter: The Python parameter that holds the source, for errors.

    Raises:
        InvalidData: The file cannot be read, or has another structure.
        InvalidArgument: An edge is malformed or impossible.
    """
    form = '{"layer": {"head": ["earlier layer", head]}}'
    content = _read_object(source, parameter, form)
    names = [block.name for block in blocks]
    edges: MutableEdges = {}
    for layer, heads in content.items():
        name = layer_name(layer, names, parameter)
        if not isinstance(heads, Mapping):
            raise InvalidArgument(
                f"`{parameter}`: {layer} has {_shown(heads)}, expected an object by head",
                f"write {form}",
                code="edges.format",
            )
        given: dict[Any, Any] = dict(heads)  # pyright: ignore[reportUnknownArgumentType]
        taken = edges.setdefault(name, {})
        for key, edge in given.items():
            head = _count(str(key))
            if head is None or not _is_edge(edge):
                raise InvalidArgument(
                    f"`{parameter}`: {layer} has {_shown({str(key): edge})}, expected "
                    '{"head": ["earlier layer", head]}',
                    "count heads from 0",
                    code="edges.format",
                )
            if head in taken:
                raise InvalidArgument(
                    f"`{parameter}`: head {head} of {name} has two sources",
                    "give each head one",
                    code="edges.twice",
                )
            taken[head] = layer_name(str(edge[0]), names, parameter), int(edge[1])
    try:
        check_edges(edges, blocks)
    except InvalidArgument as error:
        raise InvalidArgument(
            f"`{parameter}`: {error.what}", error.fix, code="edges.invalid"
        ) from error
    return {name: taken for name, taken in edges.items() if taken}


def _entries(value: Any) -> list[Any] | None:
    """The entries of a list, tuple or array; None for other values."""
    if isinstance(value, np.ndarray):
        value = value.tolist()
    return list(value) if isinstance(value, list | tuple) else None


def _is_bit(entry: Any) -> bool:
    return isinstance(entry, int | float) and not isinstance(entry, bool) and entry in (0, 1)


def _shown(value: Any) -> str:
    """A value as JSON of at most 80 characters."""
    text = json.dumps(value, default=repr)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _is_edge(edge: Any) -> bool:
    entries = _entries(edge)
    if entries is None or len(entries) != 2:
        return False
    layer, head = entries
    named = isinstance(layer, str | int) and not isinstance(layer, bool)
    return named and isinstance(head, int) and not isinstance(head, bool)


def _read_object(source: Path | Mapping[str, Any], parameter: str, form: str) -> dict[str, Any]:
    if not isinstance(source, Path):
        return {str(key): value for key, value in source.items()}
    try:
        content = json.loads(source.read_text(encoding="utf-8"), object_pairs_hook=_unique_keys)
    except FileNotFoundError as error:
        raise InvalidData(
            f"`{parameter}` {source}: no such file", "check the path", code="request.no_file"
        ) from error
    except OSError as error:
        raise InvalidData(
            f"`{parameter}` {source}: cannot be read: {error.strerror}",
            "check the path",
            code="request.unreadable_file",
        ) from error
    except (ValueError, RecursionError) as error:
        raise InvalidData(
            f"`{parameter}` {source}: not JSON: {error}", f"write {form}", code="request.not_json"
        ) from error
    if not isinstance(content, dict) or not content:
        raise InvalidData(
            f"`{parameter}` {source}: expected an object with entries",
            f"write {form}",
            code="request.not_object",
        )
    return dict(content)  # pyright: ignore[reportUnknownArgumentType]


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build an object, and reject repeated keys."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key is repeated")
    return found
