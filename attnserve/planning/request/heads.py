"""Choose the attention to skip, and the heads to prune and to reuse, as a request describes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from attnserve.calibration.importance import leave_one_out
from attnserve.calibration.similarity import measure_similarity
from attnserve.paths import StrPath
from attnserve.planning.heads.criteria import (
    CRITERIA,
    PruningInput,
    observable_blocks,
    sharing_groups,
)
from attnserve.planning.heads.files import (
    Masks,
    MutableEdges,
    layer_name,
    read_edges,
    read_masks,
)
from attnserve.planning.heads.selection import (
    Reuse,
    edges_by_damage,
    edges_of,
    parse_reuse,
    reused_layers,
)
from attnserve.planning.request.request import Request
from graph_passes.blocks import AttentionBlock
from graph_passes.errors import InvalidArgument, Refusal
from graph_passes.passes.prune_heads import PruneHeads
from graph_passes.passes.reuse_attention import ReuseAttention, reuse_refusal
from graph_passes.passes.skip_attention import SkipAttention

__all__ = ["HeadSelection", "select_heads"]

AUTO_BUDGET = 0.04
"""The share of the outputs' variance that ``reuse="auto"`` may change before refitting: R^2 is
about 0.96, and more after it."""

KINDS = (":affine", ":constant")

Skipped = dict[str, Literal["affine", "constant"]]
"""The replacement of skipped attention, by layer."""

NO_SOURCE = Refusal("no_source", "no head of an earlier layer can be compared with its heads")

UNOBSERVABLE = Refusal("unobservable", "its attention probabilities cannot be observed")


@dataclass(frozen=True, eq=False)
class HeadSelection:
    """The attention that a request skips, the heads that it prunes, and those that it reuses.

    Attributes:
        skipped: The replacement of each skipped attention.
        masks: 1 for each head that stays, by layer that loses heads.
        edges: Reused heads and their sources, numbered as in the original model.
        own_heads: By layer that keeps any head, the number of those that compute their
            probabilities.
    """

    skipped: Skipped
    masks: Masks
    edges: MutableEdges
    own_heads: Mapping[str, int]


def select_heads(request: Request) -> HeadSelection:
    """Select the heads that a request describes.

    Each selection depends on those before it: skipped layers have no heads to prune, and pruned
    heads cannot be reused. ``request.warnings`` receives the layers that are left as they are.

    Raises:
        InvalidArgument: The request does not fit the model, or there is no data to measure on.
        CannotRewrite: A layer that the request names cannot be rewritten.
    """
    skipped = _skipped(request)
    masks = _masks(request, skipped)
    removed = {name for name, mask in masks.items() if not any(mask)} | skipped.keys()
    remaining = [block for block in request.blocks if block.name not in removed]
    edges = _edges(request, remaining, masks, skipped)
    own_heads: dict[str, int] = {}
    for block in remaining:
        mask = masks.get(block.name, [1] * block.num_heads)
        reused = edges.get(block.name, {})
        heads = block.own_heads.tolist()
        own_heads[block.name] = sum(mask[head] and head not in reused for head in heads)
    return HeadSelection(skipped, masks, edges, own_heads)


def _skipped(request: Request) -> Skipped:
    """The replacement of the attention of each layer that ``skip`` names."""
    skipped: Skipped = {}
    for entry in request.rewrites.skip:
        layer, _, kind = entry.rpartition(":") if entry.endswith(KINDS) else (entry, "", "")
        name = layer_name(layer, request.names, "skip")
        if name in skipped:
            raise InvalidArgument(
                f"`skip` names {name} twice", "name each layer once", code="request.twice"
            )
        block = request.by_name[name]
        refusal = SkipAttention.refusal(block, None, request.analyses)
        refusal = refusal or request.body_refusal(block)
        if refusal is not None:
            raise refusal.error(name, "leave this layer out of `skip`")
        skipped[name] = "constant" if kind == "constant" else "affine"
    if skipped:
        request.batches("`skip` fits the replacement of an attention to data", "leave `skip` out")
    return skipped


def _require_not_skipped(parameter: str, layers: Collection[str], skipped: Skipped) -> None:
    if both := [name for name in layers if name in skipped]:
        raise InvalidArgument(
            f"`{parameter}` names {both[0]}, which `skip` removes",
            "take it out of one of them",
            code="request.conflict",
        )


# ---- pruned heads -------------------------------------------------------------------------------


def _masks(request: Request, skipped: Skipped) -> Masks:
    rewrites = request.rewrites
    masks: Masks = {}
    if rewrites.prune_heads is not None:
        masks = _explicit_masks(request, rewrites.prune_heads, skipped)
    elif rewrites.prune is not None:
        masks = _measured_masks(request, rewrites.prune, skipped)
    return {name: mask for name, mask in masks.items() if not all(mask)}


def _explicit_masks(
    request: Request, source: StrPath | Mapping[str, Any], skipped: Skipped
) -> Masks:
    masks = read_masks(source, request.blocks)
    changed = [block for block in request.blocks if not all(masks.get(block.name, ()))]
    if not changed:
        request.warnings.append("`prune_heads` removes no head")
    _require_not_skipped("prune_heads", [block.name for block in changed], skipped)
    for block in changed:
        if refusal := PruneHeads.refusal(block, None, request.analyses):
            raise refusal.error(block.name, "take this layer out of the mask")
    return masks


def _measured_masks(request: Request, share: float, skipped: Skipped) -> Masks:
    batches = request.batches("`prune` measures the importance of heads", "give `prune_heads`")
    names = [name for name in request.requested_layers if name not in skipped]
    blocks: list[AttentionBlock] = []
    for block in request.applicable_blocks(names, PruneHeads):
        if refusal := request.body_refusal(block):
            request.leave(block, refusal)
        else:
            blocks.append(block)
    importance = request.rewrites.importance
    if importance == "voting":
        fix = "leave this layer out of `layers`, or set `importance` to energy or loo"
        blocks = _observed(request, blocks, fix)
    blocks = _with_all_sharing(request, blocks)
    if not blocks:
        return {}
    pruning = PruningInput(request.model, blocks, batches, share, request.job.context)
    masks = CRITERIA[importance](pruning)
    heads = sum(block.num_heads for block in blocks)
    removed = sum(mask.count(0) for mask in masks.values())
    if not removed:
        request.warnings.append(f"`prune` {share} rounds to 0 of {heads} heads: nothing is removed")
    elif removed < round(share * heads) and all(sum(mask) == 1 for mask in masks.values()):
        request.warnings.append(
            f"`prune` {share} removes {removed} of {heads} heads: every layer keeps one"
        )
    return masks


def _observed(request: Request, blocks: Sequence[AttentionBlock], fix: str) -> list[AttentionBlock]:
    """The blocks whose attention probabilities can be observed.

    Args:
        fix: The alternative for a layer that the request names.

    Raises:
        CannotRewrite: The request names another layer.
    """
    _, observable = observable_blocks(request.model, [block.name for block in blocks])
    names = {block.name for block in observable}
    for block in blocks:
        if block.name in names:
            continue
        refusal = request.body_refusal(block) or UNOBSERVABLE
        if request.rewrites.layers is not None:
            raise refusal.error(block.name, fix)
        request.leave(block, refusal)
    return [block for block in blocks if block.name in names]


def _with_all_sharing(request: Request, blocks: Sequence[AttentionBlock]) -> list[AttentionBlock]:
    """Exclude blocks that share weights with a layer that cannot lose the same heads."""
    complete_names: set[str] = set()
    for group in sharing_groups(request.blocks):
        counts = sorted({block.num_heads for block in group})
        others = [block.name for block in group if block not in blocks]
        if others:
            why = f"{others[0]}, which keeps its heads"
        elif len(counts) > 1:
            why = f"layers of {', '.join(map(str, counts))} heads"
        else:
            complete_names |= {block.name for block in group}
            continue
        refusal = Refusal("shared_weights", f"it shares weights with {why}")
        for block in (block for block in group if block in blocks):
            if request.rewrites.layers is not None:
                raise refusal.error(block.name, "name all layers that share weights")
            request.leave(block, refusal)
    return [block for block in blocks if block.name in complete_names]


# ---- reused heads -------------------------------------------------------------------------------


def _edges(
    request: Request, remaining: Sequence[AttentionBlock], masks: Masks, skipped: Skipped
) -> MutableEdges:
    """The requested edges between blocks that keep any head."""
    form = request.rewrites.reuse
    if form is None:
        return {}
    if isinstance(form, str) and not form.endswith(".json"):
        return _configured_edges(request, form, remaining, masks)
    return _explicit_edges(request, form, masks, skipped)


def _configured_edges(
    request: Request, form: str, remaining: Sequence[AttentionBlock], masks: Masks
) -> MutableEdges:
    reuse = parse_reuse(form)
    within = reused_layers(reuse, len(request.blocks))
    names = [request.names[i] for i in within if request.names[i] in request.requested_layers]
    if not names:
        raise InvalidArgument(
            f"`reuse` {form} applies to layers {within.start} to {within[-1]}, "
            "of which `layers` names none",
            "name some of them in `layers`",
            code="request.conflict",
        )
    reusing = request.applicable_blocks(
        [block.name for block in remaining if block.name in names], ReuseAttention
    )
    by_index = request.rewrites.align == "index" and reuse.kind != "auto"
    if not by_index:
        others = "" if reuse.kind == "auto" else ", or set `align` to index"
        reusing = _observed(request, reusing, f"leave this layer out of `layers`{others}")
    if not reusing:
        return {}
    if by_index:
        names = [block.name for block in reusing]
        edges = edges_of(reuse, remaining, names, masks=masks, similarity=None)
    else:
        edges = _aligned_edges(request, reuse, remaining, reusing, masks)
    if reuse.kind != "auto":
        for block in reusing:
            if block.name not in edges:
                request.leave(block, NO_SOURCE)
    elif not edges:
        request.warnings.append("`reuse` auto: every reuse would change the output too much")
    return edges


def _aligned_edges(
    request: Request,
    reuse: Reuse,
    blocks: Sequence[AttentionBlock],
    reusing: Sequence[AttentionBlock],
    masks: Masks,
) -> MutableEdges:
    """The edges between the most similar heads of blocks.

    Args:
        reusing: Blocks whose probabilities can be observed.
    """
    batches = request.batches(
        "`reuse` aligns heads by the measured similarity of their attention",
        "give `align` index, the alignment of the paper",
    )
    decomposed, observable = observable_blocks(request.model, request.names)
    observed = {block.name for block in observable}
    blocks = [block for block in blocks if block.name in observed]  # a source is observed too
    names = [block.name for block in reusing]
    similarity = measure_similarity(decomposed, observable, batches, context=request.job.context)
    if reuse.kind != "auto":
        return edges_of(reuse, blocks, names, masks=masks, similarity=similarity)
    effect = leave_one_out(request.model, reusing, batches, context=request.job.context)
    return edges_by_damage(
        blocks,
        names,
        masks=masks,
        similarity=similarity,
        effect=effect,
        budget=AUTO_BUDGET,
    )


def _explicit_edges(
    request: Request, form: StrPath | Mapping[str, Any], masks: Masks, skipped: Skipped
) -> MutableEdges:
    edges = read_edges(form, request.blocks)
    _require_not_skipped("reuse", edges, skipped)
    for name, heads in edges.items():
        for head, (source, source_head) in heads.items():
            for layer, number in ((name, head), (source, source_head)):
                mask = masks.get(layer)
                if layer in skipped or (mask and not mask[number]):
                    raise InvalidArgument(
                        f"`reuse`: the edge {name}[{head}] <- {source}[{source_head}] needs "
                        f"head {number} of {layer}, which is removed",
                        "take this edge out, or keep the head",
                        code="request.conflict",
                    )
            block = request.by_name[name]
            refusal = reuse_refusal(block, [request.by_name[source]])
            refusal = refusal or ReuseAttention.refusal(block, None, request.analyses)
            if refusal is not None:
                raise refusal.error(f"{name} cannot reuse {source}", "take this edge out")
    return edges
