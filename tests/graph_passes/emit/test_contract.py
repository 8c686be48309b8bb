"""The contract of emission: each graph of attention, rewritten by each pass that emits one.

A rewritten graph computes what the original does (with some heads masked, if heads are removed),
and is found again under the same name. A graph that a pass cannot emit is refused with a code.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial

import numpy as np
import onnx_ir as ir
import pytest

from attnserve.models.opset import raise_opset
from graph_passes.analyses import Analyses
from graph_passes.blocks import AttentionBlock, Capped
from graph_passes.emit.fused_attention import OPSETS, FusedOperator
from graph_passes.errors import CannotRewrite
from graph_passes.matching.find import find_attention
from graph_passes.matching.operators import FUSED_OPERATORS
from graph_passes.passes.base import AttentionPass, RewritePass
from graph_passes.passes.collaborate import Collaborate, exact_rank
from graph_passes.passes.decompose_attention import DecomposeAttention
from graph_passes.passes.fuse_attention import IDIOMS, FuseAttention
from graph_passes.passes.prune_heads import PruneHeads
from tests.errors import raises
from tests.graph_passes.graphs import feeds, masked, only, run
from tests.graph_passes.layouts import (
    ALL_LAYOUTS,
    SINGLE_CONTEXT,
    SINGLE_MASK,
    SINGLE_OUTPUT,
    VARIANTS,
    cross_attention,
    half_precision,
    layout,
    variant,
)
from tests.graph_passes.operators import OPERATORS, any_feeds


@dataclass(frozen=True)
class Source:
    """A graph with one attention, its inputs, and the tolerance of its precision."""

    build: Callable[[], ir.Model]
    feed: Callable[[ir.Model], dict[str, np.ndarray]] = feeds
    atol: float = 1e-5


HALF_PRECISION: Mapping[str, Callable[[], ir.Model]] = {
    "half precision": half_precision,
    "half precision, softmax in single": partial(half_precision, "float", **SINGLE_MASK),
    "half precision, context in single": partial(half_precision, "float", **SINGLE_CONTEXT),
    "half precision, output in single": partial(half_precision, "float", **SINGLE_OUTPUT),
}
SOURCES = (
    {name: Source(partial(layout, name)) for name in ALL_LAYOUTS}
    | {name: Source(partial(variant, name)) for name in VARIANTS}
    | {name: Source(build, atol=2e-2) for name, build in HALF_PRECISION.items()}
    | {"cross attention": Source(cross_attention, any_feeds)}
    | {name: Source(case.model, any_feeds) for name, case in OPERATORS.items() if case.runs}
)


@dataclass(frozen=True)
class Emission:
    """A rewrite of one block, and the heads that it keeps."""

    rewrite: Callable[[AttentionBlock], AttentionPass]
    kept: Callable[[int], list[int]] = lambda heads: [1] * heads
    form: FusedOperator | None = None


def odd_heads(heads: int) -> list[int]:
    return [head % 2 for head in range(heads)]


def even_heads(heads: int) -> list[int]:
    return [1 - head % 2 for head in range(heads)]


def share(block: AttentionBlock, *, sparse: bool) -> Collaborate:
    """All dimensions, which is exact."""
    params = {"rank": exact_rank(block), "head_size": block.head_size if sparse else None}
    return Collaborate({block.name: params})


EMISSIONS = {
    "odd heads": Emission(lambda b: PruneHeads({b.name: odd_heads(b.num_heads)}), odd_heads),
    "even heads": Emission(lambda b: PruneHeads({b.name: even_heads(b.num_heads)}), even_heads),
    "shared dimensions": Emission(partial(share, sparse=False)),
    "sparse dimensions": Emission(partial(share, sparse=True)),
    "decomposed": Emission(lambda b: DecomposeAttention([b.name])),
} | {
    form: Emission(lambda b, form=form: FuseAttention({b.name: form}), form=form) for form in IDIOMS
}


@cache
def found(source: str, opset: int) -> tuple[ir.Model, AttentionBlock]:
    """The graph at this opset at least, or as it is, and its block; no test changes them."""
    model = SOURCES[source].build()
    if opset:
        raise_opset(model, opset)
    (block,), _ = Analyses.of(model).get(find_attention)
    return model, block


def block_of(source: str, emission: str) -> tuple[ir.Model, AttentionBlock, AttentionPass]:
    """The unchanged graph for an emission, its block, and the pass."""
    rewrite, form = EMISSIONS[emission].rewrite, EMISSIONS[emission].form
    model, block = found(source, 0 if form is None else OPSETS.get(form, 0))
    return model, block, rewrite(block)


@cache
def refusal_code(source: str, emission: str) -> str:
    """Why the pass cannot emit the graph; empty if it can."""
    model, block, rewrite = block_of(source, emission)
    refusal = rewrite.refusal(block, rewrite.targets[block.name], Analyses.of(model))
    return "" if refusal is None else refusal.code


@cache
def outputs(source: str, mask: tuple[int, ...]) -> np.ndarray:
    """The outputs of the graph whose heads are masked."""
    model, block = found(source, 0)
    arrays = SOURCES[source].feed(model)
    return run(model if all(mask) else masked(model.clone(), {block.name: mask}), arrays)


@pytest.mark.parametrize("emission", EMISSIONS)
@pytest.mark.parametrize("source", SOURCES)
def test_emission_keeps_the_output_or_is_refused_with_its_code(source: str, emission: str) -> None:
    unchanged, block, rewrite = block_of(source, emission)
    if code := refusal_code(source, emission):
        prepares = type(rewrite).prepare is not RewritePass.prepare  # before it is refused
        with raises(CannotRewrite, f"rewrite.{code}"):
            rewrite(unchanged.clone() if prepares else unchanged)
        return
    model = unchanged.clone()
    mask = tuple(EMISSIONS[emission].kept(block.num_heads))
    atol = SOURCES[source].atol * (10 if isinstance(rewrite, Collaborate) else 1)
    rewrite(model)
    after = only(model) if block.k.past is None else find_attention(model).blocks[0]
    assert (after.name, after.kind, after.num_heads) == (block.name, block.kind, sum(mask))
    assert after.v_head_size == block.v_head_size
    assert_form(after, block, emission)
    if block.k.past is not None:  # such an operator is the form already
        return
    expected = outputs(source, mask)
    got = run(model, SOURCES[source].feed(found(source, 0)[0]))
    assert got.dtype == expected.dtype
    np.testing.assert_allclose(got, expected, atol=atol, rtol=atol)
    if not all(mask):
        unmasked = outputs(source, (1,) * block.num_heads)
        assert np.abs(expected.astype(float) - unmasked).max() > 10 * atol


def assert_form(after: AttentionBlock, before: AttentionBlock, emission: str) -> None:
    """The block is found as what was emitted; scales, positions and head sizes stay."""
    nodes = {node.op_type for node in after.graph.all_nodes()}
    if emission == "shared dimensions":
        assert after.form == ("standard" if before.position == "rope" else "collaborative")
    if emission in ("shared dimensions", "sparse dimensions"):
        return  # a query bias is a dimension more
    assert after.form == "standard" and after.head_size == before.head_size
    assert after.position == before.position or (after.num_heads, before.position) == (1, "bias")
    if emission == "decomposed":
        cap = 3 if any(isinstance(step, Capped) for step in before.steps) else 1  # divides first
        assert after.scale == pytest.approx(before.scale / cap, rel=1e-5)
    if form := EMISSIONS[emission].form:
        assert after.idiom == IDIOMS[form] and after.num_kv_heads == before.num_kv_heads
        # OpenVINO ignores the scale of com.microsoft Attention: its queries contain the factor.
        projects = form == "attention" and before.idiom != IDIOMS[form]
        scale = before.head_size**-0.5 if projects else before.scale
        assert after.scale == pytest.approx(scale, rel=1e-6)
        assert "Softmax" not in nodes
    else:
        assert not nodes & FUSED_OPERATORS and after.probabilities is not None


HEADS = {"no_output_projection": 2, "cached": 16, "cache_lengths": 1, "projection_layout": 4}
SHARING = {
    "weak_mask": 1, "capped": 4, "grouped": 4, "qk_norm": 6, "token_layout": 1, "cached": 15,
    "external_keys": 1, "projection_layout": 4, "rotary_layout": 2,
}  # fmt: skip
FUSION = {
    "no_output_projection": 2, "weak_mask": 1, "capped": 4, "grouped": 3, "rotary": 9, "qk_norm": 6,
    "token_layout": 1, "cached": 11, "cache_lengths": 1,
}  # fmt: skip
HEADS_BEFORE = {
    "no_output_projection": 2, "weak_mask": 1, "capped": 4, "token_layout": 1, "cached": 12,
    "cache_lengths": 1, "projection_layout": 4,
}  # fmt: skip
"""Of the operators that take heads, which may be turned, normalized or grouped before."""
REFUSED: Mapping[str, Mapping[str, int]] = {
    "odd heads": HEADS,
    "even heads": HEADS,
    "shared dimensions": SHARING | {"rotary_angles": 2},
    "sparse dimensions": SHARING,
    "decomposed": {"decomposed": 59, "cached": 19, "operator_rotary": 1},
    "attention": FUSION | {"tokens_differ": 6, "cached": 13},
    "multi_head": HEADS_BEFORE,
    "merged": FUSION | {"tokens_differ": 2},
    "onnx": HEADS_BEFORE | {"no_output_projection": 1, "capped": 2, "cached": 13},
}
"""The number of graphs that each pass refuses, by code."""


@pytest.mark.parametrize("emission", EMISSIONS)
def test_emission_refuses_as_many_graphs_as_before(emission: str) -> None:
    codes = Counter(refusal_code(source, emission) for source in SOURCES)
    assert len(SOURCES) == codes.total() and codes.pop("") > 40
    assert codes == REFUSED[emission]
