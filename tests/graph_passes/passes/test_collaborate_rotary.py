"""Collaborate under rotary positions: truncated planes and shared keys."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from attnserve.checks.certify import read_attention
from attnserve.context import ONE_THREAD
from attnserve.models.onnx_files import load_model
from attnserve.models.opset import raise_opset
from attnserve.runtime.session import open_session
from graph_passes.analyses import Analyses
from graph_passes.errors import CannotRewrite, InvalidArgument
from graph_passes.matching.find import find_attention
from graph_passes.passes.collaborate import Collaborate, exact_rank
from graph_passes.passes.fuse_attention import FuseAttention
from graph_passes.passes.prune_heads import PruneHeads
from tests.architectures import Cell, assert_same_outputs
from tests.errors import raises

CELLS = {
    Cell("Llama", "eager", "dynamo", 18): (6, 3),
    Cell("ModernBERT", "sdpa", "dynamo", 18): (3, 3),
    Cell("NomicBERT", "sdpa", "torchscript", 17): (3, 3),
    Cell("jina-v3", "eager", "torchscript", 17): (3, 3),  # queries and keys have biases
    Cell("GPT-NeoX", "sdpa", "torchscript", 17): (3, 3),  # a quarter of each head is turned
}
"""The numbers of query heads and key groups; heads have 8 elements."""
K = 8
LLAMA = next(iter(CELLS))

each_cell = pytest.mark.parametrize("cell", CELLS, ids=str)


def rewrite(model: ir.Model, rank: int, head_size: int | None = None) -> ir.Model:
    shared = {"rank": rank, "head_size": head_size}
    found = Analyses.of(model).get(find_attention)  # the pass reads the same blocks
    names = [block.name for block in found.blocks]
    Collaborate(dict.fromkeys(names, shared))(model)
    return model


def sizes(model: ir.Model) -> set[tuple[int, int, int]]:
    """Query heads, key heads and head size of each certified block."""
    matches = read_attention(model)
    assert matches.unmatched == ()
    return {(b.num_heads, b.k.num_distinct_heads, b.head_size) for b in matches.blocks}


@each_cell
def test_collaborate_rotary_at_full_size_is_exact(cell: Cell) -> None:
    heads, groups = CELLS[cell]
    model = load_model(cell.committed)
    shared = rewrite(model.clone(), groups * K)
    assert sizes(shared) == {(heads, 1, groups * K)}
    assert_same_outputs(shared, model, cell)
    whole = rewrite(model.clone(), groups * K, K)
    assert sizes(whole) == {(heads, groups, K)}
    assert_same_outputs(whole, model, cell)


@each_cell
def test_collaborate_rotary_makes_queries_and_keys_smaller(cell: Cell) -> None:
    heads, groups = CELLS[cell]
    model = load_model(cell.committed)
    assert sizes(rewrite(model.clone(), 6)) == {(heads, 1, 6)}
    assert sizes(rewrite(model.clone(), 6 * groups, 6)) == {(heads, groups, 6)}


def test_collaborate_rotary_pruned_model_is_exact_at_full_size() -> None:
    """The scale lies in the factors of the rotation after pruning."""
    model = load_model(LLAMA.committed)
    PruneHeads({block.name: [1, 1, 1, 1, 0, 0] for block in find_attention(model).blocks})(model)
    assert {exact_rank(block) for block in find_attention(model).blocks} == {2 * K}
    assert_same_outputs(rewrite(model.clone(), 2 * K), model, LLAMA)
    assert_same_outputs(rewrite(model.clone(), 2 * K, K), model, LLAMA)


@pytest.mark.parametrize("head_size", [None, 6])
def test_collaborate_rotary_result_is_fused(head_size: int | None) -> None:
    """Groups that keep different planes have different angles."""
    model = load_model(LLAMA.committed)
    raise_opset(model, 23)
    rewrite(model, 18, head_size)
    fused, names = model.clone(), [block.name for block in find_attention(model).blocks]
    FuseAttention(dict.fromkeys(names, "onnx"))(fused)
    assert {block.idiom for block in read_attention(fused).blocks} == {"attention_operator"}
    assert_same_outputs(fused, model, LLAMA)


REFUSED = {
    Cell("Qwen3", "eager", "dynamo", 18): "qk_norm",
    Cell("Llama, cached", "sdpa", "torchscript", 17): "cached",
}


@pytest.mark.parametrize("cell", REFUSED, ids=str)
def test_collaborate_rotary_unsupported_block_raises(cell: Cell) -> None:
    model = load_model(cell.committed)
    block = find_attention(model).blocks[0]
    refusal = Collaborate.refusal(block, None, Analyses.of(model))
    assert refusal is not None
    assert refusal.code == REFUSED[cell]
    with raises(CannotRewrite, f"rewrite.{refusal.code}"):
        rewrite(model, 8)


@pytest.mark.parametrize(("rank", "head_size", "code"), [
    (26, None, "collaborate.rank"), (7, None, "factorize.rotary_size"),
    (21, 7, "factorize.rotary_size"),
])  # fmt: skip
def test_collaborate_rotary_invalid_size_raises(
    rank: int, head_size: int | None, code: str
) -> None:
    with raises(InvalidArgument, code):
        rewrite(load_model(LLAMA.committed), rank, head_size)


def test_collaborate_rotary_trained_model_at_full_size(shared: Path) -> None:
    """stories260K, a trained model of 8 heads in 4 groups: logits change by at most 1e-4."""
    path = shared / "models" / "stories260K" / "stories260K.onnx"
    if not path.is_file():
        pytest.skip("stories260K is not stored beside the project")
    model = load_model(path)
    tokens = {"idx": np.random.default_rng(0).integers(3, 500, (1, 256))}
    (expected,) = open_session(model, ONE_THREAD).run(None, tokens)
    for rank, head_size in ((32, None), (32, 8)):
        new = rewrite(model.clone(), rank, head_size)
        (got,) = open_session(new, ONE_THREAD).run(None, tokens)
        assert np.abs(got - expected).max() <= 1e-4
