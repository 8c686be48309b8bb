"""What each block could become, how long that takes on this machine, and what it would lose.

Times are measured on the block alone (``latency``). The loss of a few sizes is measured at the
output of the whole model, with the block's last map fitted in closed form to what is left
(``whatif``); between them it follows the share of the block's own output that others cannot take
over (``elimination``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import numpy as np
import onnx_ir as ir

from attnserve.calibrate import Batch, collect_moments, run
from attnserve.elimination import RIDGE, Elimination, eliminate, eliminate_neurons
from attnserve.latency import Cut, LatencyTable, Part, cut_out
from attnserve.pareto import Option
from attnserve.precision import Precision, convert
from attnserve.refit import Moments, context_moments
from attnserve.session import Provider, open_session
from attnserve.whatif import WhatIf
from graph_passes import activation, emit, fuse, prune_neurons, rewrites
from graph_passes.activation import FuseGelu
from graph_passes.attention import AttentionBlock
from graph_passes.collaborate import Collaborate, factor
from graph_passes.constants import origin
from graph_passes.decompose import DecomposeAttention
from graph_passes.errors import AttnserveError
from graph_passes.feed_forward import FeedForwardBlock, find_feed_forward
from graph_passes.find import find_attention
from graph_passes.fuse import Form, FuseAttention
from graph_passes.moments import TokenMoments
from graph_passes.prune import PruneHeads
from graph_passes.prune_neurons import PruneNeurons
from graph_passes.residual import SumResiduals, find_residuals
from graph_passes.shapes import Facts, interpret_small

if TYPE_CHECKING:
    from jaxtyping import Float

__all__ = [
    "Block",
    "Curve",
    "Group",
    "Size",
    "Timed",
    "group_blocks",
    "loss_curves",
    "options_of",
    "sums_are_faster",
    "time_blocks",
]

Stage = Callable[[str, int, int], None]
Block = AttentionBlock | FeedForwardBlock
Kind = Literal["attention", "feed_forward"]
Emission = Form | Literal["gelu", "as exported"]

FORMS: Sequence[Form] = get_args(Form)

SIZES = 24
"""About how many sizes of a feed-forward, and at most of an attention, are timed."""

MULTIPLE = 8
"""Neurons stay in multiples of this: so many floats fill a vector register."""

PROBES = (0.25, 0.5, 0.75)
"""Shares of a block that are taken out to see what the output loses."""

PROBE_ROWS = 48
"""Texts that are asked."""

MOMENT_ROWS = 300
"""About how many texts tell which dimensions of queries and keys matter."""

NO_SLOWER = 1.03
"""A form may take this many times what the block takes as it was exported, at every length: the
speed of a whole model may nowhere fall below 0.97 of the original's."""


class Size(NamedTuple):
    """How much of a block is left.

    Attributes:
        kept: Heads or neurons.
        head_size: Dimensions of queries and keys, the content term's among them, where they are
            cut to the strongest of each head; None where they are as they were.
    """

    kept: int
    head_size: int | None = None

    def __str__(self) -> str:
        return f"{self.kept}" if self.head_size is None else f"{self.kept} x {self.head_size}"


@dataclass(frozen=True, eq=False)
class Group:
    """Blocks that share their last weight, and so are rewritten alike; mostly one.

    Attributes:
        count: Heads or neurons.
        why_not: Why nothing can be taken out; empty where it can.
    """

    kind: Kind
    blocks: tuple[Block, ...]
    count: int
    why_not: str

    @property
    def names(self) -> list[str]:
        return [block.name for block in self.blocks]

    @property
    def key(self) -> str:
        """What it is called where things are kept by name."""
        return f"{self.kind} {self.names[0]}"


@dataclass(frozen=True, eq=False)
class Timed:
    """Milliseconds of one block at each shape.

    Attributes:
        original: As it was exported.
        emission: How it is written, where another way than the exporter's is faster.
        sizes: By how much is kept.
    """

    original: tuple[float, ...]
    emission: Emission
    sizes: Mapping[Size, tuple[float, ...]]


@dataclass(frozen=True, eq=False)
class Curve:
    """What the model's output loses when parts of one group go.

    Attributes:
        order: Heads or neurons, from the first to go.
        own_loss: The share of the block's own output that is lost once n are gone, n = 0 .. count.
        gone, loss: How many were taken out, and one minus the cosine of the model's output.
        shorter: (head size, loss) where all heads stay and their queries and keys are cut.
    """

    order: tuple[int, ...]
    own_loss: tuple[float, ...]
    gone: tuple[int, ...]
    loss: tuple[float, ...]
    shorter: tuple[tuple[int, float], ...] = ()

    def of(self, size: Size) -> float:
        """Losses add up nearly; heads that are gone lose nothing by being cut."""
        share = size.kept / len(self.order)
        cut = 0.0 if size.head_size is None else share * dict(self.shorter)[size.head_size]
        return self.at(len(self.order) - size.kept) + cut

    def at(self, gone: int) -> float:
        """Between two probes the loss follows a power of the block's own loss."""
        if gone == 0:
            return 0.0
        x = np.log(np.maximum([self.own_loss[n] for n in self.gone], 1e-12))
        y = np.log(np.maximum(self.loss, 1e-12))
        here = float(np.log(max(self.own_loss[gone], 1e-12)))
        if len(x) == 1 or here <= x[0]:
            return float(np.exp(y[0] + min(here - x[0], 0.0)))  # in proportion
        place = min(int(np.searchsorted(x, here)), len(x) - 1)
        run = max(float(x[place] - x[place - 1]), 1e-9)
        slope = float(np.clip((y[place] - y[place - 1]) / run, 0.0, 4.0))
        return float(np.exp(y[place - 1] + slope * (here - x[place - 1])))

    def mask(self, kept: int) -> list[int]:
        """1 for each that stays."""
        stays = np.ones(len(self.order), int)
        stays[list(self.order[: len(self.order) - kept])] = 0
        return stays.tolist()

    def to_json(self) -> dict[str, Any]:
        return {"order": list(self.order), "own_loss": list(self.own_loss),
                "gone": list(self.gone), "loss": list(self.loss),
                "shorter": [list(pair) for pair in self.shorter]}  # fmt: skip


def group_blocks(model: ir.Model, attention: Sequence[AttentionBlock], *, ffn: bool) -> list[Group]:
    """Attentions that were certified, and feed-forwards, in groups.

    Blocks in the body of another node are left out: no session can look into them.
    """
    found: dict[object, list[Block]] = {}
    for block in attention:
        if block.graph is model.graph and block.output is not None:
            found.setdefault(origin(block.output.weight), []).append(block)
    for block in find_feed_forward(model):
        if block.graph is model.graph:
            found.setdefault(origin(block.second.weight), []).append(block)
    groups: list[Group] = []
    taken = {block.name for block in attention}
    for blocks in found.values():
        first = blocks[0]
        if isinstance(first, FeedForwardBlock):
            ours = [block for block in blocks if isinstance(block, FeedForwardBlock)]
            reason = next(filter(None, map(prune_neurons.why_not, ours)), "")
            if taken & {block.name for block in ours}:
                continue  # nothing could tell it from the attention of that name
            reason = reason or ("" if ffn else "neurons stay unless --allow ffn is given")
            groups.append(Group("feed_forward", tuple(blocks), first.num_neurons, reason))
            continue
        facts = interpret_small(model, batch=2, sequence=5)
        theirs = [block for block in blocks if isinstance(block, AttentionBlock)]
        reasons = [_why_not(block, attention, facts) for block in theirs]
        reason = next(filter(None, reasons), "")
        groups.append(Group("attention", tuple(blocks), first.num_heads, reason))
    return groups


def _why_not(block: AttentionBlock, others: Sequence[AttentionBlock], facts: Facts) -> str:
    if reason := rewrites.prune(block) or emit.why_not(block, facts):
        return reason
    for other in others:
        if any(reused.value is block.probabilities for reused in other.reused):
            return f"{other.name} takes its probabilities"
    return ""


def time_blocks(
    model: ir.Model,
    groups: Sequence[Group],
    feeds: Sequence[Batch],
    table: LatencyTable,
    *,
    target: int,
    precision: Precision = "float32",
    report: Stage,
) -> dict[Block, Timed]:
    """Every way to write a block, and every size of it in the fastest of them.

    Blocks that do the same work are timed once.

    Args:
        feeds: Inputs of the model at each shape, the first ``target`` being those to be fast at.
    """
    blocks = [block for group in groups for block in group.blocks]
    parts = cut_out(model, [_cut(block) for block in blocks], feeds, provider=table.provider)
    alike: dict[tuple[Any, ...], list[tuple[Block, Part]]] = {}
    facts = interpret_small(model, batch=2, sequence=5)
    frozen = {block for group in groups if group.why_not for block in group.blocks}
    forms = {block: _forms(block, facts, model.opset_imports) for block in blocks}
    for block, part in zip(blocks, parts, strict=True):
        keys = (part.key(index) for index in range(len(feeds)))
        alike.setdefault((*keys, forms[block], block in frozen), []).append((block, part))
    found: dict[Block, Timed] = {}
    for done, ((*_, able, whole), same) in enumerate(alike.items(), start=1):
        block, part = same[0]
        timed = _time(block, part, table, target, precision, able, whole=whole)
        found |= {each: timed for each, _ in same}
        report("time blocks", done, len(alike))
    return found


def _forms(block: Block, facts: Facts, opsets: Mapping[str, int]) -> tuple[Emission, ...]:
    """The operators that a block can be written in, where it stands in the whole model."""
    if isinstance(block, FeedForwardBlock):
        return () if activation.why_not(block, facts, opsets) else ("gelu",)
    return tuple(form for form in FORMS if not fuse.why_not(block, form, facts, opsets))


def _cut(block: Block) -> Cut:
    if isinstance(block, FeedForwardBlock):
        return Cut(block.output, (block.x,))
    assert block.output is not None
    return Cut(block.output.output, tuple(dict.fromkeys((block.x, block.y))))


def _time(
    block: Block,
    part: Part,
    table: LatencyTable,
    target: int,
    precision: Precision,
    forms: Sequence[Emission],
    *,
    whole: bool,
) -> Timed:
    """Ways to write the block first, then its sizes in the fastest of them."""
    original = _converted(part, precision)
    written: dict[Emission, Part] = {}
    for form in forms:
        made = _written(part, form)
        if made is not None and _runs(_converted(made, precision), table):
            written[form] = made
    times = _measure(table, original, written, precision)
    bounds = NO_SLOWER * np.array(times[None])
    safe = {form: times[form] for form in written if (np.array(times[form]) <= bounds).all()}
    fastest: Emission = "as exported"
    for form in written:
        if form in safe and _mean(safe[form], target) < _mean(
            safe.get(fastest, times[None]), target
        ):
            fastest = form
    start = safe.get(fastest, times[None])
    count = block.num_neurons if isinstance(block, FeedForwardBlock) else block.num_heads
    if whole:
        return Timed(times[None], fastest, {Size(count): start})
    multiple = MULTIPLE if isinstance(block, FeedForwardBlock) else 1
    step = max(count // SIZES // multiple, 1) * multiple
    wanted = [Size(kept) for kept in range(step, count, step)]
    if isinstance(block, AttentionBlock) and (cut := _shorter(block)) is not None:
        wanted += [Size(kept, cut) for kept in (*range(step, count, step), count)]
    smaller: dict[Size, Part] = {}
    for size in wanted:
        less = _smaller(part, size, count)
        made = less if less is None or fastest == "as exported" else _written(less, fastest)
        if made is not None:
            smaller[size] = made
    found = _measure(table, original, smaller, precision)
    sizes = {size: found[size] for size in smaller}
    return Timed(times[None], fastest, {**sizes, Size(count): start})


def _runs(part: Part, table: LatencyTable) -> bool:
    """Whether the provider has the operators: not every version has all, for every type."""
    try:
        session = open_session(part.model, provider=table.provider, threads=table.threads)
        for feed in part.feeds:
            run(session, feed)
    except AttnserveError:
        return False
    return True


def _shorter(block: AttentionBlock) -> int | None:
    """Half of a head's dimensions, where queries and keys can be cut to so many."""
    half = block.head_size // 2
    able = half and half % MULTIPLE == 0 and block.k.past is None and not rewrites.truncate(block)
    return half if able else None


def _mean(times: Sequence[float], target: int) -> float:
    return float(np.mean(times[:target]))


def _measure(
    table: LatencyTable, original: Part, forms: Mapping[Any, Part], precision: Precision
) -> dict[Any, tuple[float, ...]]:
    """By form; None is the original."""
    parts = {None: original, **{key: _converted(form, precision) for key, form in forms.items()}}
    named = {str(key): part for key, part in parts.items()}
    times = table.measure(named)
    return {key: times[str(key)] for key in parts}


def _converted(part: Part, precision: Precision) -> Part:
    if precision == "float32":
        return part
    try:
        return Part(convert(part.model, precision), part.feeds)
    except AttnserveError:  # nothing in it that could be converted
        return part


def _smaller(part: Part, size: Size, count: int) -> Part | None:
    """With fewer heads or neurons, or shorter heads; None where a part of them cannot go."""
    small = part.model.clone()
    mask = [1] * size.kept + [0] * (count - size.kept)
    attention, neurons = find_attention(small)[0], find_feed_forward(small)
    try:
        if attention:
            if size.kept < count:
                PruneHeads({attention[0].name: mask})(small)
            if size.head_size is not None:
                _shorten(small, attention[0].name, size.head_size, None)
        elif neurons:
            PruneNeurons({neurons[0].name: mask})(small)
        else:
            return None
    except AttnserveError:  # heads in groups of which a part cannot go
        return None
    return Part(small, part.feeds)


def _shorten(model: ir.Model, name: str, head_size: int, moments: TokenMoments | None) -> None:
    """Cut the queries and keys of one attention: one dimension is that of the content term."""
    _decompose(model, [name])
    block = next(block for block in find_attention(model)[0] if block.name == name)
    rank = block.num_heads * block.head_size  # nothing is shared
    found = factor(block, rank, head_size=head_size - 1, moments=moments)
    Collaborate({name: found}, mixing="sparse")(model)


def _decompose(model: ir.Model, names: Collection[str]) -> None:
    """Give these attentions logits and probabilities that are values of the graph."""
    blocks = [block for block in find_attention(model)[0] if block.name in names]
    inside = [block.name for block in blocks if block.logits is None or not block.probabilities]
    if inside:
        DecomposeAttention(frozenset(inside))(model)


def _written(part: Part, form: Emission) -> Part | None:
    """With operators of ONNX Runtime; None where there is none for it."""
    small = part.model.clone()
    attention, neurons = find_attention(small)[0], find_feed_forward(small)
    try:
        if form == "gelu":
            if not neurons:
                return None
            FuseGelu([neurons[0].name])(small)
            return Part(small, part.feeds)
        if form == "as exported" or not attention:
            return None
        FuseAttention({attention[0].name: form})(small)
    except AttnserveError:
        return None
    block = next(iter(find_attention(small)[0]), None)
    if block is None or block.output is None:
        return None
    # What is made of masks is made once for all layers: it is fed, not timed.
    return cut_out(small, [_cut(block)], part.feeds)[0]


def sums_are_faster(
    model: ir.Model,
    feeds: Sequence[Batch],
    table: LatencyTable,
    *,
    target: int,
    precision: Precision = "float32",
) -> float:
    """Milliseconds that ``SumResiduals`` saves of a whole run, mean over the target shapes; 0 where
    it is slower at any shape."""
    norms = [node for node in find_residuals(model) if node.graph is model.graph]
    cuts: list[Cut] = []
    for norm in norms:
        added = norm.inputs[0]
        node = None if added is None else added.producer()
        assert node is not None
        cuts.append(Cut(norm.outputs[0], tuple(v for v in node.inputs if v is not None)))
    saved: list[np.ndarray] = []
    known: dict[str, np.ndarray] = {}
    for part in cut_out(model, cuts, feeds, provider=table.provider) if cuts else ():
        key = part.key(0)
        if key not in known:
            summed = part.model.clone()
            SumResiduals()(summed)
            original = _converted(part, precision)
            times = _measure(table, original, {"sum": Part(summed, part.feeds)}, precision)
            known[key] = np.array(times[None]) - np.array(times["sum"])
        saved.append(known[key])
    total = np.sum(saved, axis=0) if saved else np.zeros(1)
    return float(np.mean(total[:target])) if (total > 0).all() else 0.0


def loss_curves(
    model: ir.Model,
    groups: Sequence[Group],
    batches: Sequence[Batch],
    *,
    provider: Provider = "cpu",
    threads: int = 0,
    report: Stage,
) -> dict[str, Curve]:
    """By the key of each group of which something can be taken out.

    Raises:
        InvalidData: The model refuses a batch, or its activations are not finite.
    """
    able = [group for group in groups if not group.why_not]
    if not able:
        return {}
    blocks = [block for group in able for block in group.blocks]
    probes, rest = _apart(batches)
    moments = context_moments(
        model, blocks, rest, provider=provider, threads=threads,
        progress=lambda done, total: report("measure blocks", done, total),
    )  # fmt: skip
    ask = WhatIf(model, [b.name for b in blocks], probes, provider=provider, threads=threads)
    curves: dict[str, Curve] = {}
    for done, group in enumerate(able, start=1):
        total = _total([moments[name] for name in group.names])
        found, rows, weight = _elimination(group, total)
        count, gone, losses = group.count, list[int](), list[float]()
        for share in PROBES:
            n = max(round(share * count), 1)
            if n >= count or n in gone:
                continue
            kept = np.setdiff1d(np.arange(count), found.order[:n])
            fitted = _fitted(total, weight, rows[kept].reshape(-1))
            gone.append(n)
            losses.append(ask.cosine_loss(dict.fromkeys(group.names, fitted)))
        rising = np.maximum.accumulate(np.maximum(losses, 1e-9)) if losses else np.zeros(0)
        own = np.maximum.accumulate(found.losses)
        if losses:
            curves[group.key] = Curve(
                tuple(found.order.tolist()), tuple(own.tolist()), tuple(gone),
                tuple(rising.tolist()),
            )  # fmt: skip
        report("weigh blocks", done, len(able))
    cuts = {group: cut for group in able if (cut := _cut_of(group)) is not None}
    cuts = {group: cut for group, cut in cuts.items() if group.key in curves}
    losses = _losses_of_cuts(model, cuts, ask, rest, provider, threads, report)
    for key, pair in losses.items():
        curves[key] = replace(curves[key], shorter=(pair,))
    return curves


def _cut_of(group: Group) -> int | None:
    """The shorter head size to weigh; none for layers that share their weights."""
    block = group.blocks[0]
    if isinstance(block, FeedForwardBlock) or len(group.blocks) > 1:
        return None
    return _shorter(block)


def _losses_of_cuts(
    model: ir.Model,
    cuts: Mapping[Group, int],
    ask: WhatIf,
    batches: Sequence[Batch],
    provider: Provider,
    threads: int,
    report: Stage,
) -> dict[str, tuple[int, float]]:
    """(head size, loss) by the key of each group whose queries and keys can be cut."""
    if not cuts:
        return {}
    names = [group.names[0] for group in cuts]
    plain = model.clone()
    _decompose(plain, names)
    blocks = [block for block in find_attention(plain)[0] if block.name in names]
    some = batches[:: max(len(batches) * PROBE_ROWS // MOMENT_ROWS // len(ask.batches), 1)]
    moments = collect_moments(plain, blocks, some, provider=provider, threads=threads)
    found: dict[str, tuple[int, float]] = {}
    for done, (group, cut) in enumerate(cuts.items(), start=1):
        name, changed = group.names[0], plain.clone()
        with suppress(AttnserveError):  # then it is no candidate
            _shorten(changed, name, cut, moments[name])
            found[group.key] = cut, max(ask.loss_of(changed), 1e-9)
        report("weigh shorter heads", done, len(cuts))
    return found


def _apart(batches: Sequence[Batch]) -> tuple[list[Batch], list[Batch]]:
    """About ``PROBE_ROWS`` rows of short and of long texts to ask about, and the others to fit to:
    a block with many neurons fits its own texts better than any others."""
    if len(batches) < 2:
        return list(batches), list(batches)
    rows = [max((len(a) for a in batch.values() if a.ndim), default=1) for batch in batches]
    count = min(max(round(PROBE_ROWS / max(np.mean(rows), 1)), 1), len(batches) // 2)
    places = np.linspace(0, len(batches) - 1, 2 * count + 1)[1::2].round().astype(int).tolist()
    probes = [batches[index] for index in dict.fromkeys(places)]
    return probes, [batch for index, batch in enumerate(batches) if index not in places]


def _total(parts: Sequence[Moments]) -> Moments:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def _elimination(group: Group, moments: Moments) -> tuple[Elimination, np.ndarray, np.ndarray]:
    """The order, which rows of the last weight each head or neuron owns, and that weight."""
    block = group.blocks[0]
    if isinstance(block, FeedForwardBlock):
        weight = block.second_matrix().astype(np.float64)
        rows = np.arange(block.num_neurons)[:, None]
        step = max(block.num_neurons // (2 * SIZES) // MULTIPLE, 1) * MULTIPLE
        return eliminate_neurons(moments.covariance, weight, step), rows, weight
    assert block.output is not None
    weight, rows = block.output.matrix().astype(np.float64), block.output.rows
    flat = rows.reshape(-1)
    found = eliminate(moments.covariance[np.ix_(flat, flat)], weight[flat], block.num_heads)
    return found, rows, weight


def _fitted(
    moments: Moments, weight: Float[np.ndarray, "N D"], kept: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The map that comes nearest to what the whole weight makes, of these rows alone."""
    gram = moments.covariance
    unit = RIDGE * (float(np.trace(gram)) / len(gram) or 1.0)
    fitted = np.zeros_like(weight)
    inner = gram[np.ix_(kept, kept)] + unit * np.eye(len(kept))
    fitted[kept] = np.linalg.solve(inner, gram[kept] @ weight + unit * weight[kept])
    return fitted, (moments.t - moments.c @ fitted) / max(moments.count, 1)


def options_of(
    group: Group, timed: Mapping[Block, Timed], curve: Curve | None, *, target: int
) -> list[Option]:
    """The forms of a group that are slower than it is now at no shape, the whole group first."""
    times = [timed[block] for block in group.blocks]
    original = np.sum([each.original for each in times], axis=0)
    whole = Size(group.count)
    options: list[Option] = []
    for size in set.intersection(*(set(each.sizes) for each in times)):
        ms = np.sum([each.sizes[size] for each in times], axis=0)
        if size != whole and (curve is None or (ms > NO_SLOWER * original).any()):
            continue
        if curve is not None and size.head_size not in (None, *dict(curve.shorter)):
            continue
        loss = 0.0 if size == whole or curve is None else curve.of(size)
        options.append(Option(size.kept, loss, float(np.mean(ms[:target])), size.head_size))
    options.sort(key=lambda option: (option.loss, option.ms))
    rising = options[:1]
    for option in options[1:]:  # what loses more and is no faster is of no use
        if option.ms < rising[-1].ms:
            rising.append(option)
    return rising
