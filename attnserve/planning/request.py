"""A request becomes a plan: what is done to each layer, by what was asked and what was measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import onnx_ir as ir

from attnserve.calibration.elimination import elimination_order
from attnserve.calibration.importance import leave_one_out
from attnserve.calibration.neurons import MULTIPLE, layer_weights, masks_by_energy, neuron_energy
from attnserve.calibration.similarity import HeadSimilarity, measure_similarity
from attnserve.calibration.voting import voting_to_stay
from attnserve.checks.certify import MatchReport
from attnserve.choices import Importance
from attnserve.context import Provider, RunContext
from attnserve.models.datasets import Dataset
from attnserve.models.precision import Precision
from attnserve.planning.head_selection import (
    Alignment,
    Masks,
    MutableEdges,
    Reuse,
    edges_by_damage,
    edges_of,
    handed_on,
    layer_name,
    masks_by_loss,
    masks_by_score,
    parse_reuse,
    read_edges,
    read_masks,
    reused_layers,
)
from attnserve.planning.mixing import Mixing, choose_head_size, widest_head
from attnserve.planning.plan import Plan
from attnserve.runtime.session import Batch
from graph_passes.blocks import AttentionBlock
from graph_passes.errors import CannotRewrite, InvalidArgument, InvalidModel
from graph_passes.matching.feed_forward import FeedForwardBlock, find_feed_forward
from graph_passes.matching.find import find_attention
from graph_passes.passes import prune_neurons
from graph_passes.passes import refusals as rewrites
from graph_passes.passes.decompose_attention import DecomposeAttention

__all__ = [
    "Importance",
    "Ranks",
    "Request",
    "make_plan",
    "require_attention",
]

Ranks = int | Sequence[int] | Mapping[str, int]
Stage = Callable[[str, int, int], None]

AUTO_BUDGET = 0.04
"""Squared change of the output, over its variation, that ``--reuse auto`` allows before the fit:
a cosine of about 0.98, and more after it."""

WEIGHING_ROWS = 16
"""Texts on which layers are weighed against each other: sums over heads need few."""

INSIDE_BODY = "it lies in the body of another node, where nothing can be measured"

LEAST_OWN = "its {heads} own heads hold {size} dimensions, so that R = {rank} shares nothing"


@dataclass(frozen=True, eq=False)
class Request:
    """What a user asks for (see ``optimize`` for each).

    ``layers`` narrows whatever does not name its layers itself.
    """

    collab_dk: Ranks | None = None
    collab_cache: bool = False
    mixing: Mixing = "auto"
    head_dk: int | None = None
    reuse: str | Path | Mapping[str, Any] | None = None
    align: Alignment = "similarity"
    prune: float | None = None
    importance: Importance = "energy"
    prune_heads: Path | Mapping[str, Any] | None = None
    skip: Sequence[str] = ()
    ffn: float | None = None
    layers: Sequence[str] | None = None
    precision: Precision = "float32"

    @property
    def rewrites(self) -> bool:
        """Whether any is asked for."""
        given = (self.collab_dk, self.head_dk, self.reuse, self.prune, self.prune_heads, self.ffn)
        return any(value is not None for value in given) or bool(self.skip)

    def __post_init__(self) -> None:
        if not self.rewrites and self.precision == "float32":
            raise InvalidArgument(
                "no rewrite is asked for",
                "give --keep or --target-speedup to have them chosen, or --collab-dk, --head-dk, "
                "--reuse, --prune, --prune-heads, --skip, --ffn, --fp16, --bf16, --int8 or "
                "--int8-full",
            )
        if self.head_dk is not None and self.mixing == "dense":
            raise InvalidArgument(
                f"--head-dk {self.head_dk} is about sparse mixing, and --mixing is dense: every "
                "head reads all shared dimensions",
                "leave one of them out",
            )
        if self.mixing != "auto" and self.collab_dk is None and self.head_dk is None:
            raise InvalidArgument(
                f"--mixing {self.mixing} is a form of collaborative heads", "give --collab-dk R"
            )
        if self.prune is not None and self.prune_heads is not None:
            raise InvalidArgument(
                "--prune and --prune-heads both say which heads go", "give one of them"
            )
        if self.prune is not None and not 0 < self.prune < 1:
            raise InvalidArgument(
                f"--prune {self.prune}: expected a share of the heads, more than 0 and less than 1",
                "for example --prune 0.25",
            )
        if self.ffn is not None and not 0 < self.ffn < 1:
            raise InvalidArgument(
                f"--ffn {self.ffn}: expected a share of the feed-forward neurons, more than 0 and "
                "less than 1",
                "for example --ffn 0.25",
            )
        others = (self.collab_dk, self.head_dk, self.reuse, self.prune)
        if self.ffn is not None and self.layers is not None and all(o is None for o in others):
            raise InvalidArgument(
                "--layers names attentions, and --ffn takes neurons out of any layer",
                "leave --layers out",
            )


def make_plan(
    request: Request,
    graph: ir.Model,
    reading: MatchReport,
    data: Dataset | None,
    *,
    provider: Provider = "cpu",
    threads: int = 0,
    seed: int = 0,
    length: int = 128,
    longest: int | None = None,
    report: Stage,
) -> Plan:
    """Turn a request into a plan, measuring on ``data`` what the request leaves open.

    Args:
        length, longest: In tokens: where costs are compared, and the most that the model takes.

    Raises:
        InvalidModel: The model has no attention.
        InvalidArgument: The request does not fit the model, or needs data and there is none.
        CannotRewrite: A layer that was named cannot be rewritten, or no layer can.
    """
    if request.rewrites:
        require_attention(reading)
    maker = _Maker(request, graph, reading, data, provider, threads, seed, length, longest, report)
    skip = maker.skip()
    masks = maker.masks(skip)
    edges = maker.edges(skip, masks)
    ranks, head_sizes = maker.ranks(skip, masks, edges)
    plan = Plan(skip, masks, edges, ranks, head_sizes, maker.neurons(),
                precision=request.precision, warnings=maker.warnings)  # fmt: skip
    if request.rewrites and not plan.changed and not plan.neurons:
        raise CannotRewrite(
            f"none of the {len(reading.blocks)} attention blocks can be rewritten as asked"
            + (f" ({maker.warnings[0]})" if maker.warnings else ""),
            "`attnserve inspect MODEL` says why, block by block",
        )
    return plan


def require_attention(reading: MatchReport) -> None:
    """Raises: InvalidModel: The model has no attention."""
    if reading.blocks:
        return
    misses = "; ".join(
        f"{m.node.name or m.node.op_type}: {m.reason}" for m in reading.unmatched[:2]
    )
    raise InvalidModel(
        "no attention was found"
        + (f" ({misses[:400]})" if misses else ": the graph has no softmax"),
        "`attnserve inspect MODEL` lists everything that was read and why the rest was not",
    )


@dataclass(eq=False)
class _Maker:
    """Fills in a request, one kind of rewrite after the other."""

    request: Request
    graph: ir.Model
    reading: MatchReport
    data: Dataset | None
    provider: Provider
    threads: int
    seed: int
    length: int
    longest: int | None
    report: Stage
    warnings: list[str] = field(default_factory=list[str])
    plain: ir.Model | None = None
    """The model with probabilities in the graph, made when they are first asked for."""

    @property
    def blocks(self) -> tuple[AttentionBlock, ...]:
        return self.reading.blocks

    @property
    def names(self) -> list[str]:
        return [block.name for block in self.blocks]

    @property
    def asked(self) -> list[str]:
        """The layers that ``--layers`` names; all without it."""
        layers = self.request.layers
        if layers is None:
            return self.names
        return list(dict.fromkeys(layer_name(layer, self.names) for layer in layers))

    def skip(self) -> dict[str, Literal["affine", "constant"]]:
        chosen: dict[str, Literal["affine", "constant"]] = {}
        for entry in self.request.skip:
            layer, _, kind = entry.rpartition(":") if entry.endswith(KINDS) else (entry, "", "")
            name = layer_name(layer, self.names, "--skip")
            block = self.blocks[self.names.index(name)]
            if reason := rewrites.skip(block) or self._handed_on(block) or self._hidden(block):
                raise CannotRewrite(f"{name}: {reason}", "leave this layer out of --skip")
            chosen[name] = "constant" if kind == "constant" else "affine"
        if chosen and self.data is None:
            raise InvalidArgument(
                "--skip fits what stands for an attention to data, and there is none",
                "give --calib FILE",
            )
        return chosen

    def masks(self, skip: Mapping[str, str]) -> Masks:
        request = self.request
        if request.prune_heads is not None:
            masks = read_masks(request.prune_heads, self.blocks)
            masks = {name: mask for name, mask in masks.items() if not all(mask)}
            if not masks:
                self.warnings.append("--prune-heads takes no head out")
            self._apart("--prune-heads", masks, skip)
            for block in self.blocks:
                reason = rewrites.prune(block) or self._handed_on(block)
                if block.name in masks and reason:
                    raise CannotRewrite(
                        f"{block.name}: {reason}", "take this layer out of the mask"
                    )
            return masks
        if request.prune is None:
            return {}
        batches = self._batches("--prune measures which heads matter", "--prune-heads FILE.json")
        blocks = self._able([name for name in self.asked if name not in skip], "prune")
        blocks = [block for block in blocks if self._seen(block)]
        masks = self._measured_masks(blocks, request.prune, batches) if blocks else {}
        masks = {name: mask for name, mask in masks.items() if not all(mask)}
        if blocks and not masks:
            heads = sum(block.num_heads for block in blocks)
            self.warnings.append(f"--prune {request.prune} of {heads} heads is none")
        return masks

    def _measured_masks(
        self, blocks: Sequence[AttentionBlock], fraction: float, batches: Sequence[Batch]
    ) -> Masks:
        match self.request.importance:
            case "energy":
                found = elimination_order(self.graph, blocks, batches, context=self._context())
                orders = {n: (e.order.tolist(), e.losses) for n, e in found.items()}
                effects = leave_one_out(
                    self.graph, blocks, batches, most_rows=WEIGHING_ROWS,
                    context=self._context(),
                )  # fmt: skip
                return masks_by_loss(orders, fraction, effects)
            case "loo":
                return masks_by_score(
                    leave_one_out(self.graph, blocks, batches, context=self._context()),
                    fraction,
                )
            case "voting":
                names = {block.name for block in blocks}
                plain = [b for b in self._plain_blocks() if b.name in names]
                groups = {
                    b.name: max(1, b.num_heads - round(fraction * b.num_heads)) for b in plain
                }
                votes = voting_to_stay(
                    self._plain(), plain, batches, groups=groups, context=self._context()
                )
                return {name: [int(x) for x in found.mask] for name, found in votes.items()}

    def edges(self, skip: Mapping[str, str], masks: Masks) -> MutableEdges:
        given = self.request.reuse
        if given is None:
            return {}
        if not isinstance(given, str) or given.endswith(".json"):
            source = Path(given) if isinstance(given, str) else given
            return self._given_edges(read_edges(source, self.blocks), skip, masks)
        reuse = parse_reuse(given)
        within = reused_layers(reuse, len(self.blocks))
        wanted = [self.names[i] for i in within if self.names[i] in self.asked]
        if not wanted:
            raise InvalidArgument(
                f"--reuse {given} is about layers {within.start} to {within[-1]}, "
                "of which --layers names none",
                "widen --layers",
            )
        gone = {name for name, mask in masks.items() if not any(mask)} | set(skip)
        able = self._able([name for name in wanted if name not in gone], "reuse")
        if not able:
            return {}
        stays = [block for block in self.blocks if block.name not in gone]
        edges = self._configured(reuse, [block.name for block in able], stays, masks)
        if reuse.kind == "auto":
            if not edges:
                self.warnings.append("--reuse auto: every reuse would change the output too much")
            return edges
        reason = "no exact head of an earlier layer can be compared with its heads"
        self.warnings += [
            f"{block.name} is left as it is: {reason}" for block in able if block.name not in edges
        ]
        return edges

    def _configured(
        self,
        reuse: Reuse,
        names: Sequence[str],
        blocks: Sequence[AttentionBlock],
        masks: Masks,
    ) -> MutableEdges:
        if self.request.align == "index" and reuse.kind != "auto":
            return edges_of(reuse, blocks, names, masks=masks, similarity=None)
        batches = self._batches(
            "--reuse aligns heads by how alike they attend, which is measured",
            "--align index for the paper's own alignment",
        )
        seen = {block.name for block in self._plain_blocks()}
        names = [name for name in names if name in seen]
        blocks = [block for block in blocks if block.name in seen]
        similarity = measure_similarity(
            self._plain(), self._plain_blocks(), batches, context=self._context()
        )
        if reuse.kind == "auto":
            return self._auto(names, blocks, masks, similarity, batches)
        return edges_of(reuse, blocks, names, masks=masks, similarity=similarity)

    def _auto(
        self,
        names: Sequence[str],
        blocks: Sequence[AttentionBlock],
        masks: Masks,
        similarity: HeadSimilarity,
        batches: Sequence[Batch],
    ) -> MutableEdges:
        chosen = [block for block in blocks if block.name in names]
        effect = leave_one_out(self.graph, chosen, batches, context=self._context())
        return edges_by_damage(
            blocks, names, masks=masks, similarity=similarity, effect=effect, budget=AUTO_BUDGET
        )

    def _given_edges(
        self, edges: MutableEdges, skip: Mapping[str, str], masks: Masks
    ) -> MutableEdges:
        self._apart("--reuse", edges, skip)
        by_name = {block.name: block for block in self.blocks}
        for name, heads in edges.items():
            for head, (source, theirs) in heads.items():
                for layer, number in ((name, head), (source, theirs)):
                    if layer in skip or not masks.get(layer, (1,) * (number + 1))[number]:
                        raise InvalidArgument(
                            f"--reuse: the edge {name}[{head}] <- {source}[{theirs}] needs head "
                            f"{number} of {layer}, which is taken out",
                            "take this edge out, or leave the head in",
                        )
                block = by_name[name]
                if reason := rewrites.reuse(block, [by_name[source]]) or self._handed_on(block):
                    raise CannotRewrite(
                        f"{name} cannot reuse {source}: {reason}", "take this edge out"
                    )
        return edges

    def ranks(
        self, skip: Mapping[str, str], masks: Masks, edges: MutableEdges
    ) -> tuple[dict[str, int], dict[str, int]]:
        """R of each layer, and how many dimensions a head reads where mixing is sparse."""
        collab_dk, head_dk = self.request.collab_dk, self.request.head_dk
        if collab_dk is None and head_dk is None:
            return {}, {}
        ranks = self._ranks(collab_dk)
        head_sizes: dict[str, int] = {}
        named = self.request.layers is not None or isinstance(collab_dk, Mapping)
        gone = {name for name, mask in masks.items() if not any(mask)} | set(skip)
        for block in self.blocks:
            rank, name = ranks.get(block.name), block.name
            if rank is None:
                continue
            size = block.num_heads * block.head_size
            reason = rewrites.collaborate(block, caches=self.request.collab_cache)
            if not reason and head_dk is not None and not 1 <= head_dk <= block.head_size:
                raise InvalidArgument(
                    f"--head-dk {head_dk}: expected 1 to {block.head_size} for {name}",
                    f"{block.head_size} is the size of its heads",
                )
            if not reason and collab_dk is not None and head_dk is not None and head_dk > rank:
                raise InvalidArgument(
                    f"--head-dk {head_dk}: {name} has {rank} shared dimensions "
                    "that a head can read",
                    f"choose --head-dk from 1 to {rank}, or a larger --collab-dk",
                )
            if not reason and not 1 <= rank <= size:
                raise InvalidArgument(
                    f"--collab-dk {rank}: expected 1 to {size} for {name}, which has "
                    f"{block.num_heads} heads x {block.head_size}",
                    f"choose R from 1 to {size}; {size} is exact",
                )
            mask, taken = masks.get(name, [1] * block.num_heads), edges.get(name, {})
            own = sum(1 for head in block.own_heads.tolist() if mask[head] and head not in taken)
            if collab_dk is None and head_dk is not None:
                rank = ranks[name] = max(own, 1) * head_dk  # each head its own: truncation
            if name in gone or not (own or reason):
                del ranks[name]  # nothing is left to factor
            elif reason or (own < block.num_heads and rank >= own * block.head_size):
                if named and reason:
                    raise CannotRewrite(f"{name}: {reason}", "leave this layer out of --layers")
                reason = reason or LEAST_OWN.format(
                    heads=own, size=own * block.head_size, rank=rank
                )
                self.warnings.append(f"{name} is left as it is: {reason}")
                del ranks[name]
            else:
                if self.data is not None and rank < size and self._hidden(block):
                    self.warnings.append(
                        f"{name} lies in the body of another node, where calibration cannot see "
                        "it: it is factored by its weights alone"
                    )
                sparse = self._head_size(block, own, rank)
                if sparse is not None:
                    head_sizes[name] = sparse
        if not ranks and not (skip or masks or edges):
            raise CannotRewrite(
                f"none of the {len(self.blocks)} attention blocks can be factored"
                + (f" ({self.warnings[0]})" if self.warnings else ""),
                "`attnserve inspect MODEL` says why, block by block",
            )
        return ranks, head_sizes

    def _head_size(self, block: AttentionBlock, own: int, rank: int) -> int | None:
        """How many dimensions a head of a layer reads; all R, in dense mixing, is None."""
        mixing, head_dk = self.request.mixing, self.request.head_dk
        if mixing == "dense":
            return None
        if block.k.past is not None:
            if mixing == "sparse" or head_dk is not None:
                self.warnings.append(
                    f"{block.name} gets dense mixing: its cache holds what all heads share"
                )
            return None
        if head_dk is not None:
            return head_dk
        if mixing == "sparse":
            return min(rank, widest_head(block.head_size) or block.head_size)
        return choose_head_size(
            rank,
            heads=own,
            head_size=block.head_size,
            widths=(block.input_size, block.k.matrix().shape[0]),
            length=self.length,
            longest=self.longest,
        )

    def _ranks(self, collab_dk: Ranks | None) -> dict[str, int]:
        if collab_dk is None:
            return dict.fromkeys(self.asked, 1)  # set for each layer by its heads
        if isinstance(collab_dk, int):
            return dict.fromkeys(self.asked, collab_dk)
        if isinstance(collab_dk, Mapping):
            return {layer_name(name, self.names): rank for name, rank in collab_dk.items()}
        if len(collab_dk) != len(self.asked):
            raise InvalidArgument(
                f"--collab-dk names {len(collab_dk)} sizes for {len(self.asked)} layers",
                "give one R, or one for each layer",
            )
        return dict(zip(self.asked, collab_dk, strict=True))

    def neurons(self) -> Masks:
        """Which neurons of which feed-forwards stay."""
        share = self.request.ffn
        if share is None:
            return {}
        batches = self._batches("--ffn measures which neurons matter", "leave it out")
        if self.request.layers is not None:
            self.warnings.append("--layers names attentions: --ffn takes neurons out of any layer")
        blocks: list[FeedForwardBlock] = []
        for block in find_feed_forward(self.graph):
            inside = block.graph is not self.graph.graph
            reason = INSIDE_BODY if inside else prune_neurons.why_not(block)
            if reason:
                self.warnings.append(f"{block.name} keeps all its neurons: {reason}")
            else:
                blocks.append(block)
        if not blocks:
            self.warnings.append("--ffn: no feed-forward was found whose neurons could go")
            return {}
        energies = neuron_energy(self.graph, blocks, batches, context=self._context())
        weights = layer_weights(self.graph, blocks, energies, batches[0], context=self._context())
        masks = masks_by_energy(blocks, energies, weights, share)
        if not masks:
            self.warnings.append(f"--ffn {share} takes out less than {MULTIPLE} neurons a layer")
        return masks

    def _able(self, names: Sequence[str], rewrite: str) -> list[AttentionBlock]:
        """The blocks that a rewrite applies to. Others that the user named are an error."""
        able: list[AttentionBlock] = []
        for index, block in enumerate(self.blocks):
            if block.name not in names:
                continue
            reason = rewrites.REWRITES[rewrite](block, self.blocks[:index])
            reason = reason or self._handed_on(block)
            if not reason:
                able.append(block)
            elif self.request.layers is not None:
                raise CannotRewrite(f"{block.name}: {reason}", "leave this layer out of --layers")
            else:
                self.warnings.append(f"{block.name} is left as it is: {reason}")
        return able

    def _seen(self, block: AttentionBlock) -> bool:
        """Whether a session can return what the block computes."""
        if reason := self._hidden(block):
            self.warnings.append(f"{block.name} is left as it is: {reason}")
        return not reason

    def _hidden(self, block: AttentionBlock) -> str:
        if block.graph is self.graph.graph:
            return ""
        return INSIDE_BODY

    def _handed_on(self, block: AttentionBlock) -> str:
        return handed_on(block, self.blocks)

    def _apart(self, option: str, layers: Mapping[str, Any], skip: Mapping[str, str]) -> None:
        both = next((name for name in layers if name in skip), None)
        if both is not None:
            raise InvalidArgument(
                f"{option} names {both}, which --skip leaves out altogether", "take it out of one"
            )

    def _batches(self, why: str, otherwise: str) -> Sequence[Batch]:
        if self.data is None:
            raise InvalidArgument(f"{why}: there is no data", f"give --calib FILE, or {otherwise}")
        return self.data.fit

    def _plain(self) -> ir.Model:
        """The model with every fused operator decomposed that can be."""
        if self.plain is None:
            self.plain = self.graph.clone()
            fused = [b for b in find_attention(self.plain)[0] if b.probabilities is None]
            names = frozenset(b.name for b in fused if not rewrites.why_not_source(b))
            DecomposeAttention(names)(self.plain)
        return self.plain

    def _plain_blocks(self) -> list[AttentionBlock]:
        plain = self._plain()
        names = set(self.names)
        return [
            block
            for block in find_attention(plain)[0]
            if block.name in names
            and block.probabilities is not None
            and block.graph is plain.graph
        ]

    def _context(self) -> RunContext:
        return RunContext(self.provider, self.threads, self.seed, self.report)


KINDS = (":affine", ":constant")
