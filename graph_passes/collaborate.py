"""Collaborate: query and key projections of all heads become shared ones and a mixing matrix."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

from graph_passes.attention import (
    AttentionBlock,
    Capped,
    Floor,
    LogitStep,
    Mask,
    PositionBias,
    Projection,
    Weighted,
)
from graph_passes.constants import constant_array, is_constant
from graph_passes.cp import CollaborativeFactors, TokenMoments, collaborative_factors
from graph_passes.edit import Inserter, emit_heads, remove_unused, replace_uses
from graph_passes.errors import CannotRewrite, InvalidArgument
from graph_passes.find import REWRITTEN, find_attention
from graph_passes.invariants import check, interface
from graph_passes.trace import only_consumer

__all__ = ["INSIDE_OPERATOR", "Collaborate", "cache_width", "factor", "why_not"]

INSIDE_OPERATOR = "its scores are inside a fused operator: decompose it first"
"""The one reason of ``why_not`` that ``DecomposeAttention`` can take away; told last."""

MOST_READERS = 64
"""Nodes between cached keys and their scores; more are not followed."""

WEAK_FILL = -1e3
"""What masked scores are set to must be below this, whatever is subtracted from the others."""


@dataclass(frozen=True, eq=False)
class Collaborate(ir.passes.InPlacePass):
    """Share query and key dimensions between heads (eq. 6 and 7 of arXiv 2006.16362).

    Before: logits_h = s (x W_Q^h + b_Q^h)(y W_K^h + b_K^h)^T
    After:  logits_h = s [ (x W~Q) diag(m_h) (y W~K)^T + v_h^T y^T ]

    The scale s is the graph's own, never one derived from R; the key bias is constant over the keys
    and is dropped; mask, softmax, values and output are not touched. Exact at R = H*K, lossy below.
    Refused (``CannotRewrite``) where ``why_not`` gives a reason.

    Where keys are cached, past (B, H, P, K) an input and present (B, H, P+T, K) an output of the
    graph, and only if ``caches``, the cache holds what all heads share:

    After:  present = [past; y [W~K, v^T]]  (B, 1, P+T, R+H), and from there as above

    Input and output keep their names, types, batch and length; the cached values are not touched.
    The H content logits are left out where there are none. A cache of the original model means
    nothing to the new one.

    Attributes:
        factors: W~Q, W~K, M and v for each block to rewrite, by the block's name (see ``factor``).
            Blocks whose factors are the same arrays share the weights in the graph.
        caches: Rewrite cached keys too, which changes inputs and outputs of the graph.
    """

    factors: Mapping[str, CollaborativeFactors]
    caches: bool = False

    def requires(self, model: ir.Model) -> None:
        blocks = {block.name: block for block in find_attention(model)[0]}
        for name in self.factors:
            reason = "no attention has this name"
            if name in blocks:
                reason = why_not(blocks[name], caches=self.caches)
            if not reason and blocks[name].k.past and blocks[name].graph is not model.graph:
                reason = "its cached keys are handed round inside the body of another node"
            if reason:
                raise CannotRewrite(f"{name}: {reason}", "leave this layer out with --layers")

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        before = interface(model)
        shared: dict[tuple[int, str], ir.Value] = {}
        widths: dict[str, int] = {}
        for block in find_attention(model)[0]:
            if block.name in self.factors:
                factors, cache = self.factors[block.name], _key_cache(block)
                if cache is not None:
                    held = (cache.past[0], cache.present)
                    widths |= {value.name or "": cache_width(factors) for value in held}
                _rewrite(block, factors, cache, shared)
        remove_unused(model)
        check(before.with_caches(widths), model, after="Collaborate")
        return ir.passes.PassResult(model, modified=bool(self.factors))


def why_not(block: AttentionBlock, *, caches: bool = False) -> str:
    """Why a block cannot be given collaborative heads, in one sentence; empty where it can.

    Args:
        caches: Cached keys may be rewritten too.
    """
    if block.form != "standard":
        return f"its heads are {block.form} already"
    if block.position == "rope":
        return "rotary positions stand between the projections and the scores"
    if block.q.norm is not None or block.k.norm is not None:
        return "q/k norm stands between the projections and the scores"
    if block.k.weight is None:
        return "its keys are handed in by the caller: no projection in this graph makes them"
    if block.k.past is not None and not caches:
        return "its cached keys are an input of the graph, made by the original projection"
    if any(isinstance(step, PositionBias) and step.entangled for step in block.steps):
        return "its position bias is computed from its own queries or keys"
    if any(isinstance(step, Capped | Weighted) for step in block.steps):
        return "its logits are capped or weighted before the softmax, so the key bias counts"
    if block.k.num_distinct_heads != block.num_heads:
        return "its key heads are grouped: they share their projections already"
    if any(_fill(step) > WEAK_FILL for step in block.steps):
        return "its mask fills in scores that softmax does not ignore, so the key bias counts"
    if not (block.q.by_sequence and block.k.by_sequence):
        return "its tokens are not laid out as (batch, sequence, size)"
    if block.logits is None:
        return INSIDE_OPERATOR
    if block.logits_axes != (0, 1, 2) and len(block.logits_axes or ()) != 4:
        return "its scores are laid out in an order that is not followed"
    if block.probabilities is None:
        return "its probabilities are nowhere laid out as (batch, heads, queries, keys)"
    if not _only_softmax_reads(block.logits):
        return "its scores are read by more than the softmax, which alone ignores the key bias"
    return "" if block.k.past is None else _why_not_cache(block)


@dataclass(frozen=True, eq=False)
class _KeyCache:
    """Where keys are cached.

    Attributes:
        past: The input of the graph, and the copies that exporters make of it (a Concat of one).
        join: The Concat of the past and the new keys.
    """

    past: tuple[ir.Value, ...]
    join: ir.Node

    @property
    def present(self) -> ir.Value:
        return self.join.outputs[0]


def _key_cache(block: AttentionBlock) -> _KeyCache | None:
    """The cache of a block's keys; None where there is none, or nothing joins it to new keys."""
    return _cache_of(block.k)


def _cache_of(part: Projection) -> _KeyCache | None:
    past = [] if part.past is None else [part.past.value]
    for node in part.nodes if past else ():
        if node.op_type == "Concat" and node.inputs[0] is past[-1]:
            if len(node.inputs) == 2:
                return _KeyCache(tuple(past), node)
            past += node.outputs if len(node.inputs) == 1 else ()
    return None


def _why_not_cache(block: AttentionBlock) -> str:
    """Why the cache of a block's keys cannot be rewritten; empty where it can."""
    past, cache = block.k.past, _cache_of(block.k)
    assert past is not None
    if not _heads_apart(block.k):
        return "its past keys are not laid out as (batch, heads, tokens, head size)"
    if past.value.graph is not block.graph:
        return "its past keys are no input of the graph that it lies in"
    if cache is None or not cache.present.is_graph_output():
        return "its present keys are not returned as the past and the new ones, joined"
    if any(value.shape is None for value in (past.value, cache.present)):
        return "its past or present keys have no shape in the graph"
    if not _ends_in_scores(block, cache):
        return "its cached keys are read by more than its own scores"
    return ""


def _heads_apart(part: Projection) -> bool:
    """Whether a cache is (B, H, P, K), every head its own."""
    if part.past is None or part.past.positions is not None or len(part.past.axes) != 4:
        return False
    batch, heads, tokens, elements = part.past.axes
    wanted = np.indices(part.columns.shape)
    in_order = np.array_equal(heads, wanted[0]) and np.array_equal(elements, wanted[1])
    return isinstance(batch, str) and isinstance(tokens, str) and in_order


def _ends_in_scores(block: AttentionBlock, cache: _KeyCache) -> bool:
    """Whether nothing but the scores is made of cached keys, besides of their batch and length."""
    held = {*cache.past, cache.present}
    pending, seen = list(held), set[ir.Node]()
    while pending:
        value = pending.pop()
        if value.is_graph_output() and value is not cache.present:
            return False
        for node in {node for node, _ in value.uses()} - seen:
            seen.add(node)
            if len(seen) > MOST_READERS:
                return False
            if value in held and node.op_type == "Shape" and _takes_no_width(node):
                continue
            pending += [made for made in node.outputs if made is not block.logits]
    return True


def _takes_no_width(shape: ir.Node) -> bool:
    """Whether only batch and length are taken of a shape (B, H, T, K)."""
    end = shape.attributes.get_int("end", 4)
    taken = list(range(4))[shape.attributes.get_int("start", 0) : end]
    if set(taken) <= {0, 2}:
        return True
    readers = [node for node, _ in shape.outputs[0].uses()]
    return all(set(_picked(node, taken)) <= {0, 2} for node in readers)


def _picked(node: ir.Node, axes: list[int]) -> list[int]:
    """Which of these a Gather or a Slice picks; all of them where that is not plain."""
    where = node.inputs[1:]
    if not where or not all(is_constant(value) for value in where):
        return axes
    numbers = [constant_array(value).reshape(-1).tolist() for value in where if value is not None]
    if node.op_type == "Gather":
        return [axes[index] for index in numbers[0]]
    if node.op_type == "Slice" and len(numbers) in (2, 3):
        return axes[numbers[0][0] : numbers[1][0]]
    return axes


def _fill(step: LogitStep) -> float:
    """What a step sets masked scores to, which must not matter beside the others."""
    match step:
        case Mask():
            return step.fill
        case Floor():
            return step.low
        case _:
            return -np.inf


def _only_softmax_reads(logits: ir.Value) -> bool:
    node = only_consumer(logits)
    while node is not None and node.op_type != "Softmax":
        node = only_consumer(node.outputs[0])
    return node is not None


def factor(
    block: AttentionBlock,
    rank: int,
    *,
    moments: TokenMoments | None = None,
    progress: Callable[[int, float], None] | None = None,
) -> CollaborativeFactors:
    """Decompose the heads of a block into R shared dimensions.

    Args:
        block: Any block that ``why_not`` has nothing against.
        rank: R, from 1 to H*K (exact there).
        moments: Of the tokens the block sees; without them the weights alone are approximated.
        progress: See ``cp.collaborative_factors``.

    Raises:
        InvalidArgument: R is out of range.
    """
    exact = block.num_heads * block.head_size
    if not 1 <= rank <= exact:
        raise InvalidArgument(
            f"{block.name}: a shared dimension of {rank}: expected 1 to {exact} "
            f"({block.num_heads} heads x {block.head_size})",
            f"choose R from 1 to {exact}; {exact} is exact",
        )
    return collaborative_factors(
        block.q.heads(),
        block.k.heads(),
        rank,
        query_bias=block.q.offset,
        moments=moments,
        progress=progress,
    )


def cache_width(factors: CollaborativeFactors) -> int:
    """The numbers that cached keys take a token: R, and H where there are content logits."""
    return factors.rank + (len(factors.content) if np.any(factors.content) else 0)


def _rewrite(
    block: AttentionBlock,
    factors: CollaborativeFactors,
    cache: _KeyCache | None,
    shared: dict[tuple[int, str], ir.Value],
) -> None:
    """``shared`` holds the constants made so far, by array, for layers that share their weights."""
    make = Inserter(block.graph, block.product, f"{block.name}{REWRITTEN}".rstrip("/"))
    dtype = block.q.dtype.numpy()
    rank, heads = factors.rank, block.num_heads

    def weight(array: np.ndarray, name: str) -> ir.Value:
        return make.constant(array.astype(dtype), name)

    def shared_weight(array: np.ndarray, shape: tuple[int, ...], name: str) -> ir.Value:
        if (id(array), name) not in shared:
            shared[id(array), name] = weight(array.reshape(shape), name)
        return shared[id(array), name]

    def shaped(value: ir.Value, columns: int, name: str) -> ir.Value:
        shape = make.constant(np.array([0, 1, -1, columns], np.int64), f"{name}_shape")
        return make.op("Reshape", [value, shape], name)  # B 1 T columns

    scale = weight(np.array(block.scale), "scale")
    q = make.op(
        "MatMul", [block.x, shared_weight(factors.query, (-1, rank), "query_weight")], "query"
    )  # B S R
    q = shaped(make.op("Mul", [q, scale], "scaled_query"), rank, "query_tokens")
    mixing = shared_weight(factors.mixing, (heads, 1, rank), "mixing")  # H 1 R
    q = make.op("Mul", [q, mixing], "mixed_query")  # B H S R
    k = make.op(
        "MatMul", [block.y, shared_weight(factors.key, (-1, rank), "key_weight")], "key"
    )  # B T R
    k = make.op("Transpose", [shaped(k, rank, "key_tokens")], "shared_key", perm=[0, 1, 3, 2])
    logits = make.op("MatMul", [q, k], "scores")  # B H S T
    if np.any(factors.content):
        content = make.op(
            "MatMul", [block.y, weight(factors.content.T, "content_weight")], "content"
        )
        content = shaped(
            make.op("Mul", [content, scale], "scaled_content"), heads, "content_tokens"
        )
        content = make.op("Transpose", [content], "content_logits", perm=[0, 3, 1, 2])  # B H 1 T
        logits = make.op("Add", [logits, content], "logits")
    _unpack_values(block)
    assert block.logits is not None
    replace_uses(block.logits, _laid_out(make, logits, block))


def _laid_out(make: Inserter, logits: ir.Value, block: AttentionBlock) -> ir.Value:
    """Logits (B, H, S, T) as the graph lays them out."""
    axes = block.logits_axes
    assert axes is not None
    if len(axes) == 4:
        back = [int(axis) for axis in np.argsort(axes)]
        in_order = axes == (0, 1, 2, 3)
        return logits if in_order else make.op("Transpose", [logits], "laid_out", perm=back)
    ends = [make.constant(np.array([n], np.int64), name) for n, name in ((2, "from"), (4, "to"))]
    lengths = make.op("Slice", [make.op("Shape", [logits], "shape"), *ends], "lengths")  # S T
    rows = make.constant(np.array([-1], np.int64), "rows")
    return make.op(
        "Reshape", [logits, make.op("Concat", [rows, lengths], "rows_of", axis=0)], "folded"
    )


def _unpack_values(block: AttentionBlock) -> None:
    """Where one product makes queries, keys and values, the values get a product of their own."""
    v = block.v
    packed = v.nodes and v.nodes[0] in (block.q.nodes[0], block.k.nodes[0])
    if not packed or not v.by_sequence or v.output is None or v.layout != "B H T K":
        return
    # Before the first that may read them: Shape nodes come before the scores.
    make = Inserter(block.graph, v.nodes[-1], f"{block.name}/value")
    replace_uses(v.output, emit_heads(make, v, v.scale))
