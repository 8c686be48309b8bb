"""Choose the attention to skip, the heads to prune and those to reuse, as a request describes them.

Each selection depends on those before it: skipped layers have no heads to prune, and pruned heads
cannot be reused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from attnserve.calibration.importance import leave_one_out
from attnserve.calibration.similarity import measure_similarity
from attnserve.paths import StrPath
from attnserve.planning.heads.criteria import CRITERIA, PruningInput
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
from attnserve.planning.heads.shared_weights import sharing_groups
from attnserve.planning.request.request import Request
from graph_passes.blocks import AttentionBlock
from graph_passes.errors import InvalidArgument, Refusal
from graph_passes.passes.prune_heads import PruneHeads
from graph_passes.passes.reuse_attention import ReuseAttention, reuse_refusal
from graph_passes.passes.skip_attention import SkipAttention

__all__ = ["Replacements", "choose_edges", "choose_masks", "choose_skipped", "removed_layers"]

Replacements = dict[str, Literal["affine", "constant"]]
"""The replacement of the attention of each skipped layer."""

AUTO_BUDGET = 0.04
"""The share of the outputs' variance that ``reuse="auto"`` may change before refitting: R^2 is
about 0.96, and more after it."""

KINDS = (":affine", ":constant")

NO_SOURCE = Refusal("no_source", "no head of an earlier layer can be compared with its heads")


def removed_layers(skipped: Replacements, masks: Masks) -> set[str]:
    """Layers that lose all heads."""
    return {name for name, mask in masks.items() if not any(mask)} | set(skipped)


def choose_skipped(request: Request) -> Replacements:
    """The replacement of the attention of each layer that ``skip`` names.

    Raises:
        InvalidArgument: A layer is unknown or named twice, or there is no data to fit on.
        CannotRewrite: The attention of a layer cannot be replaced.
    """
    skipped: Replacements = {}
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


def choose_masks(request: Request, skipped: Replacements) -> Masks:
    """1 for each head that stays, by layer that loses heads."""
    rewrites = request.rewrites
    if rewrites.prune_heads is not None:
        return _explicit_masks(request, skipped, rewrites.prune_heads)
    if rewrites.prune is None:
        return {}
    batches = request.batches("`prune` measures the importance of heads", "give `prune_heads`")
    names = [name for name in request.requested_layers if name not in skipped]
    blocks: list[AttentionBlock] = []
    for block in request.applicable_blocks(names, PruneHeads):
        if refusal := request.body_refusal(block):
            request.leave(block, refusal)
        else:
            blocks.append(block)
    blocks = _with_all_sharing(request, blocks)
    masks = {}
    if blocks:
        pruning = PruningInput(request.model, blocks, batches, rewrites.prune, request.job.context)
        masks = CRITERIA[rewrites.importance](pruning)
    masks = {name: mask for name, mask in masks.items() if not all(mask)}
    if blocks and not masks:
        heads = sum(block.num_heads for block in blocks)
        request.warnings.append(
            f"`prune` {rewrites.prune} rounds to 0 of {heads} heads: nothing is removed"
        )
    return masks


def _with_all_sharing(request: Request, blocks: Sequence[AttentionBlock]) -> list[AttentionBlock]:
    """Exclude blocks that share weights with a layer that cannot lose the same heads."""
    names = {block.name for block in blocks}
    complete_names: set[str] = set()
    for group in sharing_groups(request.blocks):
        chosen = [block for block in group if block.name in names]
        counts = {block.num_heads for block in group}
        others = [block.name for block in group if block.name not in names]
        if not others and len(counts) == 1:
            complete_names |= {block.name for block in group}
            continue
        for block in chosen:
            why = (
                f"{others[0]}, which keeps its heads"
                if others
                else f"layers of {', '.join(map(str, sorted(counts)))} heads"
            )
            refusal = Refusal("shared_weights", f"it shares weights with {why}")
            if request.rewrites.layers is not None:
                raise refusal.error(block.name, "name all layers that share weights")
            request.leave(block, refusal)
    return [block for block in blocks if block.name in complete_names]


def _explicit_masks(
    request: Request, skipped: Replacements, source: StrPath | Mapping[str, Any]
) -> Masks:
    masks = read_masks(source, request.blocks)
    masks = {name: mask for name, mask in masks.items() if not all(mask)}
    if not masks:
        request.warnings.append("`prune_heads` removes no head")
    _require_not_skipped("prune_heads", masks, skipped)
    for block in request.blocks:
        if block.name in masks and (refusal := PruneHeads.refusal(block, None, request.analyses)):
            raise refusal.error(block.name, "take this layer out of the mask")
    return masks


def choose_edges(request: Request, skipped: Replacements, masks: Masks) -> MutableEdges:
    """Reused heads and their sources, numbered as in the original model."""
    form = request.rewrites.reuse
    if form is None:
        return {}
    if not isinstance(form, str):
        return _explicit_edges(request, skipped, masks, form)
    if form.endswith(".json"):
        return _explicit_edges(request, skipped, masks, Path(form))
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
    blocks = request.applicable_blocks(
        [name for name in names if name not in removed_layers(skipped, masks)], ReuseAttention
    )
    if not blocks:
        return {}
    edges = _configured_edges(request, skipped, masks, reuse, [block.name for block in blocks])
    if reuse.kind == "auto":
        if not edges:
            request.warnings.append("`reuse` auto: every reuse would change the output too much")
        return edges
    for block in blocks:
        if block.name not in edges:
            request.leave(block, NO_SOURCE)
    return edges


def _configured_edges(
    request: Request, skipped: Replacements, masks: Masks, reuse: Reuse, names: Sequence[str]
) -> MutableEdges:
    removed = removed_layers(skipped, masks)
    blocks = [block for block in request.blocks if block.name not in removed]
    if request.rewrites.align == "index" and reuse.kind != "auto":
        return edges_of(reuse, blocks, names, masks=masks, similarity=None)
    batches = request.batches(
        "`reuse` aligns heads by the measured similarity of their attention",
        "give `align` index, the alignment of the paper",
    )
    decomposed, observable = request.observable
    observed = {block.name for block in observable}
    names = [name for name in names if name in observed]
    blocks = [block for block in blocks if block.name in observed]
    similarity = measure_similarity(decomposed, observable, batches, context=request.job.context)
    if reuse.kind != "auto":
        return edges_of(reuse, blocks, names, masks=masks, similarity=similarity)
    reusing = [block for block in blocks if block.name in names]
    effect = leave_one_out(request.model, reusing, batches, context=request.job.context)
    return edges_by_damage(
        blocks, names, masks=masks, similarity=similarity, effect=effect, budget=AUTO_BUDGET
    )


def _explicit_edges(
    request: Request, skipped: Replacements, masks: Masks, form: StrPath | Mapping[str, Any]
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


def _require_not_skipped(parameter: str, layers: Mapping[str, Any], skipped: Replacements) -> None:
    if both := [name for name in layers if name in skipped]:
        raise InvalidArgument(
            f"`{parameter}` names {both[0]}, which `skip` removes",
            "take it out of one of them",
            code="request.conflict",
        )
