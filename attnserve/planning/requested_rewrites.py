"""Turn a request for rewrites into a plan; open choices are made by measurements on data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import onnx_ir as ir

from attnserve.calibration.importance import leave_one_out
from attnserve.calibration.similarity import measure_similarity
from attnserve.checks.certify import MatchReport, require_attention
from attnserve.checks.quality import QualityMeter
from attnserve.context import RunContext
from attnserve.data.datasets import Dataset
from attnserve.options import Ranks, Rewrites
from attnserve.paths import StrPath
from attnserve.planning.head_criteria import CRITERIA, PruningInput
from attnserve.planning.head_files import (
    Masks,
    MutableEdges,
    layer_name,
    read_edges,
    read_masks,
)
from attnserve.planning.head_selection import (
    Reuse,
    edges_by_damage,
    edges_of,
    parse_reuse,
    reused_layers,
)
from attnserve.planning.neuron_selection import choose_neurons
from attnserve.planning.plan import Plan
from attnserve.planning.requested_sharing import SharingChooser, SharingForm, refused
from attnserve.planning.search.block_loss import loss_curves
from attnserve.planning.search.candidates import group_blocks
from attnserve.planning.search.limits import MULTIPLE
from attnserve.planning.shared_weights import sharing_groups
from attnserve.runtime.interface import Batch
from graph_passes.blocks import AttentionBlock, FeedForwardBlock
from graph_passes.context import GraphContext
from graph_passes.errors import CannotRewrite, InvalidArgument, Refusal
from graph_passes.matching.feed_forward import find_feed_forward
from graph_passes.matching.find import find_attention
from graph_passes.passes.base import AttentionPass, RewritePass
from graph_passes.passes.collaborate import Collaborate, SharedDimensions
from graph_passes.passes.decompose_attention import decompose_fused
from graph_passes.passes.prune_heads import PruneHeads
from graph_passes.passes.prune_neurons import PruneNeurons
from graph_passes.passes.reuse_attention import ReuseAttention, renumbered, reuse_refusal
from graph_passes.passes.skip_attention import SkipAttention
from graph_passes.passes.strip_cache import StripCache

__all__ = ["PlannedRequest", "plan_request"]

AUTO_BUDGET = 0.04
"""The share of the outputs' variance that ``reuse="auto"`` may change before refitting: R^2 is
about 0.96, and more after it."""

IN_BODY = Refusal("in_body", "it lies in the body of another node, which a session cannot observe")

SAME_NAME = Refusal("same_name", "an attention block has the same name")

KINDS = (":affine", ":constant")


@dataclass(frozen=True, eq=False)
class PlannedRequest:
    """A plan, and warnings about requested rewrites that do not apply.

    Attributes:
        forms: Plans of the same rewrites by form of shared dimensions, including ``plan``; empty if
            the request determines the form.
    """

    plan: Plan
    warnings: tuple[str, ...]
    forms: Mapping[SharingForm, Plan] = field(default_factory=dict["SharingForm", "Plan"])


def plan_request(
    request: Rewrites,
    model: ir.Model,
    report: MatchReport,
    data: Dataset | None,
    context: RunContext,
    *,
    new_meter: Callable[[], QualityMeter],
) -> PlannedRequest:
    """Turn a request into a plan.

    Args:
        report: The certified attention of ``model``.
        new_meter: Makes a meter that compares outputs with those of ``model``.

    Raises:
        InvalidModel: The model has no attention.
        InvalidArgument: The request does not fit the model, or requires calibration data.
        CannotRewrite: A named layer cannot be rewritten, or no layer can.
    """
    if request.has_rewrites:
        require_attention(report)
    return _PlanBuilder(request, GraphContext(model), report, data, context, new_meter).build()


STRIP_FIRST = (
    "layers are chosen before the cache is removed: run `strip_cache` alone, and rewrite its result"
)


@dataclass(eq=False)
class _PlanBuilder:
    """Choose the targets of each rewrite of a request, one kind after the other."""

    request: Rewrites
    graph_context: GraphContext
    report: MatchReport
    data: Dataset | None
    context: RunContext
    new_meter: Callable[[], QualityMeter]
    skipped: dict[str, Literal["affine", "constant"]] = field(default_factory=dict[str, Any])
    masks: Masks = field(default_factory=Masks)
    edges: MutableEdges = field(default_factory=MutableEdges)
    """Reused heads and their sources, numbered as in the original model."""
    warnings: list[str] = field(default_factory=list[str])

    def build(self) -> PlannedRequest:
        self.skipped = self._skipped()
        self.masks = self._masks()
        self.edges = self._edges()
        neurons = PruneNeurons(self._neurons())
        reuse = ReuseAttention(renumbered(self.edges, self.masks))
        others: list[RewritePass] = [
            SkipAttention(self.skipped), PruneHeads(self.masks), reuse, neurons,
            *([StripCache()] if self.request.strip_cache else []),
        ]  # fmt: skip
        plans: dict[SharingForm, Plan] = {}
        for form, shared in self._shared().items():
            plan = Plan.of([*others, Collaborate(shared)], self.request.precision)
            if plan.to_json() not in [known.to_json() for known in plans.values()]:
                plans[form] = plan
        plan = next(iter(plans.values()))
        if self.request.has_rewrites and not plan.passes:
            raise self._nothing("rewritten as requested")
        return PlannedRequest(plan, tuple(self.warnings), plans if len(plans) > 1 else {})

    @property
    def model(self) -> ir.Model:
        return self.graph_context.model

    @property
    def blocks(self) -> tuple[AttentionBlock, ...]:
        return self.report.blocks

    @property
    def names(self) -> list[str]:
        return [block.name for block in self.blocks]

    @property
    def by_name(self) -> dict[str, AttentionBlock]:
        return {block.name: block for block in self.blocks}

    @property
    def requested(self) -> list[str]:
        """The layers that the request names; all if it names none."""
        layers = self.request.layers
        if layers is None:
            return self.names
        return list(dict.fromkeys(layer_name(layer, self.names) for layer in layers))

    @property
    def removed(self) -> set[str]:
        """Layers that lose all heads."""
        return {name for name, mask in self.masks.items() if not any(mask)} | set(self.skipped)

    # ---- skip, prune -----------------------------------------------------------------------------

    def _skipped(self) -> dict[str, Literal["affine", "constant"]]:
        skipped: dict[str, Literal["affine", "constant"]] = {}
        for entry in self.request.skip:
            layer, _, kind = entry.rpartition(":") if entry.endswith(KINDS) else (entry, "", "")
            name = layer_name(layer, self.names, "skip")
            if name in skipped:
                raise InvalidArgument(
                    f"`skip` names {name} twice", "name each layer once", code="request.twice"
                )
            block = self.by_name[name]
            refusal = SkipAttention.refusal(block, None, self.graph_context) or self._in_body(block)
            if refusal is not None:
                raise refused(name, refusal, "leave this layer out of `skip`")
            skipped[name] = "constant" if kind == "constant" else "affine"
        if skipped:
            self._batches("`skip` fits the replacement of an attention to data", "leave `skip` out")
        return skipped

    def _masks(self) -> Masks:
        request = self.request
        if request.prune_heads is not None:
            return self._explicit_masks(request.prune_heads)
        if request.prune is None:
            return {}
        batches = self._batches("`prune` measures the importance of heads", "give `prune_heads`")
        names = [name for name in self.requested if name not in self.skipped]
        blocks: list[AttentionBlock] = []
        for block in self._able(names, PruneHeads):
            if refusal := self._in_body(block):
                self._leave(block, refusal)
            else:
                blocks.append(block)
        blocks = self._with_all_sharing(blocks)
        masks = {}
        if blocks:
            given = PruningInput(self.model, blocks, batches, request.prune, self.context)
            masks = CRITERIA[request.importance](given)
        masks = {name: mask for name, mask in masks.items() if not all(mask)}
        if blocks and not masks:
            heads = sum(block.num_heads for block in blocks)
            self.warnings.append(f"prune {request.prune} of {heads} heads is none")
        return masks

    def _with_all_sharing(self, blocks: Sequence[AttentionBlock]) -> list[AttentionBlock]:
        """Exclude blocks that share weights with a layer that cannot lose the same heads."""
        able = {block.name for block in blocks}
        complete: set[str] = set()
        for group in sharing_groups(self.blocks):
            chosen = [block for block in group if block.name in able]
            counts = {block.num_heads for block in group}
            others = [block.name for block in group if block.name not in able]
            if not others and len(counts) == 1:
                complete |= {block.name for block in group}
                continue
            for block in chosen:
                why = (
                    f"{others[0]}, which keeps its heads"
                    if others
                    else f"layers of {', '.join(map(str, sorted(counts)))} heads"
                )
                refusal = Refusal("shared_weights", f"it shares weights with {why}")
                if self.request.layers is not None:
                    raise refused(block.name, refusal, "name all layers that share weights")
                self._leave(block, refusal)
        return [block for block in blocks if block.name in complete]

    def _explicit_masks(self, source: StrPath | Mapping[str, Any]) -> Masks:
        masks = read_masks(source, self.blocks)
        masks = {name: mask for name, mask in masks.items() if not all(mask)}
        if not masks:
            self.warnings.append("prune_heads removes no head")
        self._require_not_skipped("prune_heads", masks)
        for block in self.blocks:
            if block.name in masks and (
                refusal := PruneHeads.refusal(block, None, self.graph_context)
            ):
                raise refused(block.name, refusal, "take this layer out of the mask")
        return masks

    # ---- reuse -----------------------------------------------------------------------------------

    def _edges(self) -> MutableEdges:
        form = self.request.reuse
        if form is None:
            return {}
        if not isinstance(form, str):
            return self._explicit_edges(form)
        if form.endswith(".json"):
            return self._explicit_edges(Path(form))
        reuse = parse_reuse(form)
        within = reused_layers(reuse, len(self.blocks))
        wanted = [self.names[i] for i in within if self.names[i] in self.requested]
        if not wanted:
            raise InvalidArgument(
                f"`reuse` {form} applies to layers {within.start} to {within[-1]}, "
                "of which `layers` names none",
                "name some of them in `layers`",
                code="request.conflict",
            )
        able = self._able([name for name in wanted if name not in self.removed], ReuseAttention)
        if not able:
            return {}
        edges = self._configured_edges(reuse, [block.name for block in able])
        if reuse.kind == "auto":
            if not edges:
                self.warnings.append("reuse auto: every reuse would change the output too much")
            return edges
        for block in able:
            if block.name not in edges:
                self._leave(block, "no head of an earlier layer can be compared with its heads")
        return edges

    def _configured_edges(self, reuse: Reuse, names: Sequence[str]) -> MutableEdges:
        masks = self.masks
        blocks = [block for block in self.blocks if block.name not in self.removed]
        if self.request.align == "index" and reuse.kind != "auto":
            return edges_of(reuse, blocks, names, masks=masks, similarity=None)
        batches = self._batches(
            "`reuse` aligns heads by the measured similarity of their attention",
            "give `align` index, the alignment of the paper",
        )
        plain = self._decomposed_blocks()
        observed = {block.name for block in plain}
        names = [name for name in names if name in observed]
        blocks = [block for block in blocks if block.name in observed]
        similarity = measure_similarity(self.decomposed, plain, batches, context=self.context)
        if reuse.kind != "auto":
            return edges_of(reuse, blocks, names, masks=masks, similarity=similarity)
        chosen = [block for block in blocks if block.name in names]
        effect = leave_one_out(self.model, chosen, batches, context=self.context)
        return edges_by_damage(
            blocks, names, masks=masks, similarity=similarity, effect=effect, budget=AUTO_BUDGET
        )

    def _explicit_edges(self, form: StrPath | Mapping[str, Any]) -> MutableEdges:
        edges = read_edges(form, self.blocks)
        self._require_not_skipped("reuse", edges)
        for name, heads in edges.items():
            for head, (source, source_head) in heads.items():
                for layer, number in ((name, head), (source, source_head)):
                    mask = self.masks.get(layer)
                    if layer in self.skipped or (mask and not mask[number]):
                        raise InvalidArgument(
                            f"`reuse`: the edge {name}[{head}] <- {source}[{source_head}] needs "
                            f"head {number} of {layer}, which is removed",
                            "take this edge out, or keep the head",
                            code="request.conflict",
                        )
                block = self.by_name[name]
                refusal = reuse_refusal(block, [self.by_name[source]])
                refusal = refusal or ReuseAttention.refusal(block, None, self.graph_context)
                if refusal is not None:
                    raise refused(f"{name} cannot reuse {source}", refusal, "take this edge out")
        return edges

    # ---- collaborate -----------------------------------------------------------------------------

    def _shared(self) -> dict[SharingForm, dict[str, SharedDimensions]]:
        """The shared dimensions of each layer, in each form that the request allows."""
        if self.request.collab_dk is None and self.request.head_dk is None:
            return {SharingForm("dense"): {}}
        chooser = SharingChooser(
            self.request,
            own_heads={b.name: self._own_heads(b) for b in self.blocks
                       if b.name not in self.removed},
            unobserved=[b.name for b in self.blocks if self.data is not None and self._in_body(b)],
        )  # fmt: skip
        ranks = self._ranks(self.request.collab_dk)
        layers = [(block, ranks[block.name]) for block in self.blocks if block.name in ranks]
        first, *others = chooser.forms
        forms = {first: chooser.choose(layers, first)}
        self.warnings += chooser.warnings
        for form in others:
            shared = chooser.choose(layers, form)
            if shared.keys() == forms[first].keys():  # a form may rule out some layers
                forms[form] = shared
        if not (forms[first] or self.skipped or self.masks or self.edges):
            raise self._nothing("factored")
        return forms

    def _own_heads(self, block: AttentionBlock) -> int:
        """The number of heads that compute their own probabilities after pruning and reuse."""
        mask = self.masks.get(block.name, [1] * block.num_heads)
        reused = self.edges.get(block.name, {})
        return sum(1 for head in block.own_heads.tolist() if mask[head] and head not in reused)

    def _ranks(self, collab_dk: Ranks | None) -> dict[str, int]:
        if collab_dk is None:
            return dict.fromkeys(self.requested, 1)  # set by the number of heads of each layer
        if isinstance(collab_dk, int):
            return dict.fromkeys(self.requested, collab_dk)
        if isinstance(collab_dk, Mapping):
            return {
                layer_name(name, self.names, "collab_dk"): rank for name, rank in collab_dk.items()
            }
        if len(collab_dk) != len(self.requested):
            raise InvalidArgument(
                f"`collab_dk` has {len(collab_dk)} sizes for {len(self.requested)} layers",
                "give one R, or one for each layer",
                code="request.range",
            )
        return dict(zip(self.requested, collab_dk, strict=True))

    # ---- neurons ---------------------------------------------------------------------------------

    def _neurons(self) -> Masks:
        """1 for each neuron that stays, by feed-forward."""
        share = self.request.ffn
        if share is None:
            return {}
        batches = self._batches("`ffn` measures the loss of removed neurons", "leave `ffn` out")
        if self.request.layers is not None:
            self.warnings.append("layers names attention blocks: ffn removes neurons of any layer")
        found = group_blocks(self.model, self.blocks, ffn=True)
        groups = [group for group in found if group.kind == "feed_forward"]
        refusals = {name: group.refusal for group in groups for name in group.names}
        for block in self.graph_context.get(find_feed_forward):
            if refusal := self._in_body(block) or refusals.get(block.name, SAME_NAME):
                self.warnings.append(f"{block.name} keeps all its neurons: {refusal}")
        groups = [group for group in groups if group.refusal is None]
        if not groups:
            self.warnings.append("ffn: no feed-forward was found whose neurons can be removed")
            return {}
        losses = loss_curves(
            self.model, groups, batches, new_meter=self.new_meter, context=self.context
        )
        masks = choose_neurons(groups, losses.curves, share)
        if not masks:
            total = sum(group.count for group in groups)
            self.warnings.append(
                f"ffn {share} of {total} neurons is none: the number of remaining neurons of a "
                f"layer is a multiple of {MULTIPLE}"
            )
        return masks

    # ---- helpers ---------------------------------------------------------------------------------

    def _able(
        self, names: Sequence[str], rewrite: type[AttentionPass[Any]]
    ) -> list[AttentionBlock]:
        """The blocks that a rewrite applies to; raise an error if it refuses a requested block."""
        able: list[AttentionBlock] = []
        for block in self.blocks:
            if block.name not in names:
                continue
            refusal = rewrite.refusal(block, None, self.graph_context)
            if refusal is None:
                able.append(block)
            elif self.request.layers is not None:
                raise refused(block.name, refusal, "leave this layer out of `layers`")
            else:
                self._leave(block, refusal)
        return able

    def _leave(self, block: AttentionBlock, reason: Refusal | str) -> None:
        self.warnings.append(f"{block.name} is left as it is: {reason}")
        is_cached = isinstance(reason, Refusal) and reason.code in ("returned", "cached")
        if self.request.strip_cache and is_cached and STRIP_FIRST not in self.warnings:
            self.warnings.append(STRIP_FIRST)

    def _in_body(self, block: AttentionBlock | FeedForwardBlock) -> Refusal | None:
        return None if block.graph is self.model.graph else IN_BODY

    def _nothing(self, rewritten: str) -> CannotRewrite:
        return CannotRewrite(
            f"none of the {len(self.blocks)} attention blocks can be {rewritten}"
            + (f" ({self.warnings[0]})" if self.warnings else ""),
            "`attnserve inspect` lists the reasons by block",
            code="request.nothing",
        )

    def _require_not_skipped(self, parameter: str, layers: Mapping[str, Any]) -> None:
        if both := [name for name in layers if name in self.skipped]:
            raise InvalidArgument(
                f"`{parameter}` names {both[0]}, which `skip` removes",
                "take it out of one of them",
                code="request.conflict",
            )

    def _batches(self, why: str, otherwise: str) -> Sequence[Batch]:
        if self.data is None:
            raise InvalidArgument(
                f"{why}, and there is no data", f"give `calib`, or {otherwise}",
                code="request.no_data",
            )  # fmt: skip
        return self.data.fit

    @cached_property
    def decomposed(self) -> ir.Model:
        """A copy of the model whose fused operators are decomposed where possible."""
        model = self.model.clone()
        with GraphContext.of(model) as graph_context:
            names = [block.name for block in graph_context.get(find_attention)[0]]
            decompose_fused(graph_context, names)
        return model

    def _decomposed_blocks(self) -> list[AttentionBlock]:
        """Certified blocks of the decomposed model whose probabilities can be observed."""
        names, model = set(self.names), self.decomposed
        return [
            block
            for block in find_attention(model)[0]
            if block.name in names and block.probability_values and block.graph is model.graph
        ]
