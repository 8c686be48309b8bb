"""How long each form of each block takes on this machine, alone and beside what it is now."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, get_args

import numpy as np
import onnx_ir as ir

from attnserve.context import Progress
from attnserve.models.precision import LARGEST, Precision, convert
from attnserve.planning.candidates import (
    NO_SLOWER,
    Block,
    BlockConfig,
    BlockLatency,
    Implementation,
    ReusePair,
    TiedBlocks,
    apply_config,
    configs_of,
    reuse,
)
from attnserve.runtime.part_latency import Cut, LatencyTable, Part, cut_out
from attnserve.runtime.session import Batch, open_session, run
from graph_passes.analysis.shapes import ShapeInfo, infer_shapes_small, state_types
from graph_passes.blocks import AttentionBlock, FeedForwardBlock
from graph_passes.emit.editing import remove_unused
from graph_passes.errors import AttnserveError
from graph_passes.matching.feed_forward import find_feed_forward
from graph_passes.matching.find import find_attention
from graph_passes.passes.fuse_attention import FuseAttention, FusedOperator, fusion_refusal
from graph_passes.passes.fuse_gelu import FuseGelu, gelu_refusal
from graph_passes.passes.fuse_residuals import FuseResiduals, find_residuals
from graph_passes.passes.reuse_attention import reuse_refusal

__all__ = ["time_blocks", "time_pairs", "time_residual_fusion", "without_casts"]

FORMS: Sequence[FusedOperator] = get_args(FusedOperator)


def time_blocks(
    model: ir.Model,
    groups: Sequence[TiedBlocks],
    feeds: Sequence[Batch],
    table: LatencyTable,
    *,
    target: int,
    precision: Precision = "float32",
    report: Progress,
) -> dict[Block, BlockLatency]:
    """Every way to write a block, and every size of it in the fastest of them.

    Blocks that do the same work are timed once.

    Args:
        feeds: Inputs of the model at each shape, the first ``target`` being those to be fast at.
    """
    blocks = [block for group in groups for block in group.blocks]
    parts = cut_out(model, [_cut(block) for block in blocks], feeds, provider=table.provider)
    alike: dict[tuple[Any, ...], list[tuple[Block, Part]]] = {}
    facts = infer_shapes_small(model, batch=2, sequence=5)
    frozen = {block for group in groups if group.refusal for block in group.blocks}
    forms = {block: _forms(block, facts, model.opset_imports) for block in blocks}
    for block, part in zip(blocks, parts, strict=True):
        keys = (part.key(index) for index in range(len(feeds)))
        alike.setdefault((*keys, forms[block], block in frozen), []).append((block, part))
    found: dict[Block, BlockLatency] = {}
    for done, ((*_, able, whole), same) in enumerate(alike.items(), start=1):
        block, part = same[0]
        timed = _time(block, part, table, target, precision, able, whole=whole)
        found |= {each: timed for each, _ in same}
        report("time blocks", done, len(alike))
    return found


def _forms(block: Block, facts: ShapeInfo, opsets: Mapping[str, int]) -> tuple[Implementation, ...]:
    """The operators that a block can be written in, where it stands in the whole model."""
    if isinstance(block, FeedForwardBlock):
        return () if gelu_refusal(block, facts, opsets) else ("gelu",)
    return tuple(form for form in FORMS if fusion_refusal(block, form, facts, opsets) is None)


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
    forms: Sequence[Implementation],
    *,
    whole: bool,
) -> BlockLatency:
    """Ways to write the block first, then its sizes in the fastest of them."""
    original = _converted(part, precision)
    written: dict[Implementation, Part] = {}
    for form in forms:
        made = _written(part, form)
        if made is not None and _runs(_converted(made, precision), table):
            written[form] = made
    times = _measure(table, original, written, precision)
    bounds = NO_SLOWER * np.array(times[None])
    safe = {form: times[form] for form in written if (np.array(times[form]) <= bounds).all()}
    fastest: Implementation = "as exported"
    for form in written:
        if form in safe and _mean(safe[form], target) < _mean(
            safe.get(fastest, times[None]), target
        ):
            fastest = form
    start = safe.get(fastest, times[None])
    forms_ms: dict[Implementation, tuple[float, ...]] = {form: times[form] for form in written}
    count = block.num_neurons if isinstance(block, FeedForwardBlock) else block.num_heads
    if whole:
        return BlockLatency(times[None], fastest, {BlockConfig(count): start}, forms_ms)
    wanted = configs_of(block)
    found = _sizes(part, wanted, fastest, table, original, precision)
    for size in [size for size in wanted if size.rank is not None and size in found]:
        own = found.get(size._replace(rank=None))
        if own is not None and _mean(found[size], target) < _mean(own, target):
            fewer = [size.of(each.kept) for each in wanted if each.head_size and not each.rank]
            found |= _sizes(part, fewer, fastest, table, original, precision)
    return BlockLatency(times[None], fastest, {**found, BlockConfig(count): start}, forms_ms)


def _sizes(
    part: Part,
    wanted: Sequence[BlockConfig],
    form: Implementation,
    table: LatencyTable,
    original: Part,
    precision: Precision,
) -> dict[BlockConfig, tuple[float, ...]]:
    """The times of what can be made of a part, each written in this form where one can hold it."""
    made: dict[BlockConfig, Part] = {}
    for size in wanted:
        less = _smaller(part, size)
        if less is not None and form != "as exported" and not size.needs_plain_operators:
            less = _written(less, form)
        if less is not None:
            made[size] = less
    times = _measure(table, original, made, precision)
    return {size: times[size] for size in made}


def _runs(part: Part, table: LatencyTable) -> bool:
    """Whether the provider has the operators: not every version has all, for every type."""
    try:
        session = open_session(part.model, provider=table.provider, threads=table.threads)
        for feed in part.feeds:
            run(session, feed)
    except AttnserveError:
        return False
    return True


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
        made = Part(convert(part.model, precision), part.feeds)
    except AttnserveError:  # nothing in it that could be converted
        return part
    # numpy has no bfloat16 to be fed: such a part is timed with its casts.
    return without_casts(made) if precision == "float16" else made


def without_casts(part: Part) -> Part:
    """A part in float16 as it stands in the whole, where what it is given and gives is float16.

    ``convert`` casts inputs and outputs, of the whole once, of its parts each time. An input that
    anything reads in float32 too stays float32, and so does an output that is made in it.
    """
    model = part.model.clone()
    state_types(model)
    halved: set[str] = set()
    for value in model.graph.inputs:
        casts = [user for user, _ in value.uses()]
        if value.dtype == ir.DataType.FLOAT and casts and all(map(_is_to_float16, casts)):
            value.type = ir.TensorType(ir.DataType.FLOAT16)
            halved.add(value.name or "")
            for cast in casts:
                cast.outputs[0].replace_all_uses_with(value)
    for place, value in enumerate(model.graph.outputs):
        cast = value.producer()
        made = cast.inputs[0] if cast is not None and cast.op_type == "Cast" else None
        if made is not None and made.producer() and made.dtype == ir.DataType.FLOAT16:
            made.name, value.name = value.name, made.name
            model.graph.outputs[place] = made
    remove_unused(model)
    feeds = [{name: array.clip(-LARGEST, LARGEST).astype(np.float16) if name in halved else array
              for name, array in feed.items()} for feed in part.feeds]  # fmt: skip
    return Part(model, tuple(feeds))


def _is_to_float16(node: ir.Node) -> bool:
    made = node.outputs[0]
    return (
        node.op_type == "Cast"
        and node.attributes.get_int("to", 1) == ir.DataType.FLOAT16
        and not made.is_graph_output()
    )


def _smaller(part: Part, size: BlockConfig) -> Part | None:
    """With less of its block left; None where a part of it cannot go."""
    small = part.model.clone()
    blocks = [*find_attention(small)[0], *find_feed_forward(small)]
    if not blocks:
        return None
    try:
        apply_config(small, blocks[0], size)
    except AttnserveError:  # heads in groups of which a part cannot go
        return None
    return Part(small, part.feeds)


def _written(part: Part, form: Implementation) -> Part | None:
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


def time_pairs(
    model: ir.Model,
    groups: Sequence[TiedBlocks],
    feeds: Sequence[Batch],
    table: LatencyTable,
    timed: Mapping[Block, BlockLatency],
    *,
    target: int,
    precision: Precision = "float32",
    report: Progress,
) -> list[ReusePair]:
    """Attentions that could take the probabilities of the nearest one before them, both together.

    The two must then be written in plain operators: those that hold a whole attention return no
    probabilities. Where that is no faster than both in their fastest form with all their heads, no
    smaller number of heads is timed.
    """
    able = [g for g in groups if g.kind == "attention" and not g.refusal and len(g.blocks) == 1]
    found: list[ReusePair] = []
    known: dict[
        tuple[BlockLatency, BlockLatency], tuple[Mapping[int, tuple[float, ...]], float]
    ] = {}
    for index, reader in enumerate(able):
        source = next((s for s in reversed(able[:index]) if _may_hand_on(s, reader)), None)
        if source is None:
            continue
        now = timed[source.blocks[0]], timed[reader.blocks[0]]
        if now not in known:  # blocks that do the same work were timed once
            known[now] = _together(model, source, reader, feeds, table, now, target, precision)
        times, saved_ms = known[now]
        if times:
            found.append(ReusePair(source, reader, times, saved_ms))
        report("time pairs", index + 1, len(able))
    return found


def _may_hand_on(source: TiedBlocks, reader: TiedBlocks) -> bool:
    first, second = source.blocks[0], reader.blocks[0]
    assert isinstance(first, AttentionBlock) and isinstance(second, AttentionBlock)
    return source.count == reader.count and reuse_refusal(second, [first]) is None


def _together(
    model: ir.Model,
    source: TiedBlocks,
    reader: TiedBlocks,
    feeds: Sequence[Batch],
    table: LatencyTable,
    now: tuple[BlockLatency, BlockLatency],
    target: int,
    precision: Precision,
) -> tuple[dict[int, tuple[float, ...]], float]:
    """Milliseconds of both by the heads that stay, nothing where they cannot be written so; and
    what they save with all their heads."""
    whole = cut_out(model, [_cut(source.blocks[0]), _cut(reader.blocks[0])], feeds,
                    provider=table.provider)  # fmt: skip
    original = _converted(whole[0], precision)

    def timed(numbers: Sequence[int]) -> dict[int, tuple[float, ...]]:
        """All in one run, each part in turn with the source as it was exported."""
        parts: dict[tuple[int, int], Part] = {}
        for kept in numbers:
            for index, part in enumerate(_handed_on(model, source, reader, kept, feeds, table)):
                parts[kept, index] = part
        ms = _measure(table, original, parts, precision)
        return {
            kept: tuple(a + b for a, b in zip(ms[kept, 0], ms[kept, 1], strict=True))
            for kept in numbers
            if (kept, 0) in parts
        }

    times = timed([source.count])
    if not times:
        return {}, 0.0
    fused = sum(_mean(each.sizes[BlockConfig(source.count)], target) for each in now)
    saved_ms = fused - _mean(times[source.count], target)
    if saved_ms > 0:
        times |= timed([size.kept for size in now[0].sizes if 0 < size.kept < source.count
                        and size == BlockConfig(size.kept)])  # fmt: skip
    return times, saved_ms


def _handed_on(
    model: ir.Model,
    source: TiedBlocks,
    reader: TiedBlocks,
    kept: int,
    feeds: Sequence[Batch],
    table: LatencyTable,
) -> Sequence[Part]:
    """Both, with so many heads; nothing where they cannot be written so."""
    names = source.names[0], reader.names[0]
    new = model.clone()
    edges = {names[1]: {head: (names[0], head) for head in range(kept)}}
    mask = [1] * kept + [0] * (source.count - kept)
    try:
        reuse(new, edges, dict.fromkeys(names, mask) if kept < source.count else {})
        blocks = {block.name: block for block in find_attention(new)[0]}
        return cut_out(new, [_cut(blocks[name]) for name in names], feeds, provider=table.provider)
    except (AttnserveError, KeyError):  # heads in groups, or nothing that can be cut out
        return ()


def time_residual_fusion(
    model: ir.Model,
    feeds: Sequence[Batch],
    table: LatencyTable,
    *,
    target: int,
    precision: Precision = "float32",
) -> float:
    """Milliseconds that ``FuseResiduals`` saves in a whole run, mean over the target shapes.

    0 if it is slower at any shape.
    """
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
            FuseResiduals()(summed)
            original = _converted(part, precision)
            times = _measure(table, original, {"sum": Part(summed, part.feeds)}, precision)
            known[key] = np.array(times[None]) - np.array(times["sum"])
        saved.append(known[key])
    total = np.sum(saved, axis=0) if saved else np.zeros(1)
    return float(np.mean(total[:target])) if (total > 0).all() else 0.0
