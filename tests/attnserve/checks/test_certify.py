"""Certification: correct matches pass, and every wrong match is detected."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from attnserve.checks.certify import (
    SHAPES,
    SINGLE,
    TOLERANCE,
    Certified,
    Evaluate,
    certify,
    onnx_reference,
    onnx_runtime,
    read_attention,
)
from attnserve.models.onnx_files import load_model
from attnserve.runtime.session import open_session
from graph_passes.analysis.axes import bind_axes
from graph_passes.analysis.shapes import infer_shapes_at
from graph_passes.analysis.workload import Workload
from graph_passes.blocks import AttentionBlock, Unmatched
from graph_passes.errors import InvalidModel
from graph_passes.matching.find import find_attention
from tests.errors import raises
from tests.graph_passes.graphs import attention
from tests.onnx_text import EXP

EXPORTS = [("eager", "torchscript", 17), ("sdpa", "dynamo", 23)]  # all six: test_architectures.py


def certify_block(
    model: ir.Model,
    block: AttentionBlock,
    *,
    runs: Sequence[Evaluate] = (onnx_runtime,),
    shapes: Sequence[tuple[int, int]] = SHAPES,
    **changes: Any,
) -> Certified | Unmatched:
    facts = [
        infer_shapes_at(model, bind_axes(model.graph, Workload.of(batch, sequence)))
        for batch, sequence in shapes
    ]
    block = dataclasses.replace(block, **changes)
    given = [(lambda: facts, evaluate) for evaluate in runs]
    return certify(model, block, given)


@pytest.fixture
def graph(tiny: Path) -> ir.Model:
    return load_model(tiny / "model.onnx")


@pytest.mark.parametrize("export", EXPORTS, ids=lambda export: "-".join(map(str, export)))
def test_read_attention_certifies_plain_and_fused_blocks(
    tiny_export: Callable[..., Path], export: tuple
):
    matches = read_attention(load_model(tiny_export(*export) / "model.onnx"))
    assert len(matches.blocks) == 2 and matches.unmatched == ()
    assert [(b.num_heads, b.head_size, b.input_size) for b in matches.blocks] == [(4, 8, 32)] * 2
    assert [b.scale for b in matches.blocks] == [pytest.approx(8**-0.5, rel=1e-6)] * 2
    assert all(certified.max_abs_error <= TOLERANCE for certified in matches.certified)


def test_certify_correct_match_has_small_error(graph: ir.Model):
    result = certify_block(graph, find_attention(graph).blocks[0])
    assert isinstance(result, Certified) and 0 <= result.max_abs_error <= TOLERANCE


@pytest.mark.parametrize("factor", [1.001, -1.0, 8**0.5, 0.0])
def test_certify_wrong_scale_is_unmatched(graph: ir.Model, factor: float):
    block = find_attention(graph).blocks[0]
    result = certify_block(graph, block, scale=block.scale * factor)
    assert isinstance(result, Unmatched)
    assert "the graph computes something else" in result.reason
    assert "at most 1e-04 allowed" in result.reason and block.name in result.reason


def test_certify_swapped_projections_are_unmatched(graph: ir.Model):
    block = find_attention(graph).blocks[0]
    # softmax(k q^T) is not softmax(q k^T): the reading must say which is which.
    assert isinstance(certify_block(graph, block, q=block.k, k=block.q), Unmatched)
    assert isinstance(certify_block(graph, block, v=block.k), Unmatched)


def test_certify_reordered_heads_are_unmatched(graph: ir.Model):
    block = find_attention(graph).blocks[0]
    columns = block.q.columns[::-1].copy()
    assert isinstance(
        certify_block(graph, block, q=dataclasses.replace(block.q, columns=columns)), Unmatched
    )


def test_certify_missing_mask_is_unmatched(graph: ir.Model):
    block = find_attention(graph).blocks[0]
    assert block.steps
    assert isinstance(certify_block(graph, block, steps=()), Unmatched)


def test_certify_wrong_output_projection_is_unmatched(graph: ir.Model):
    one, other = find_attention(graph).blocks
    assert one.output is not None and other.output is not None
    wrong = dataclasses.replace(one.output, weight=other.output.weight)
    assert isinstance(certify_block(graph, one, output=wrong), Unmatched)


def test_certify_wrong_query_bias_is_unmatched_and_key_bias_has_no_effect(graph: ir.Model):
    block = find_attention(graph).blocks[0]
    # Softmax ignores what is the same for all keys: q b_K^T is.
    offset = block.q.offset + np.linspace(-3, 3, 32).reshape(4, 8)
    assert isinstance(
        certify_block(graph, block, q=dataclasses.replace(block.q, offset=offset)), Unmatched
    )
    assert isinstance(
        certify_block(graph, block, k=dataclasses.replace(block.k, offset=offset)), Certified
    )


def test_read_attention_nan_weights_are_unmatched(graph: ir.Model):
    weight = find_attention(graph).blocks[0].q.weight.value
    assert weight.const_value is not None
    array = weight.const_value.numpy().copy()
    array[0, 0] = np.nan
    weight.const_value = ir.tensor(array, name=weight.name)
    matches = read_attention(graph)
    assert len(matches.blocks) == 1 and len(matches.unmatched) == 1


def test_read_attention_falls_back_to_reference_evaluator(graph: ir.Model):
    graph.opset_imports[""] = 9999
    with raises(InvalidModel, "session.graph_refused"):
        open_session(graph)
    matches = read_attention(graph)
    assert len(matches.blocks) == 2 and matches.unmatched == ()
    assert all(certified.max_abs_error <= TOLERANCE for certified in matches.certified)


def test_certify_reference_evaluator_detects_wrong_scale(graph: ir.Model):
    block = find_attention(graph).blocks[0]
    (result, wrong) = (
        certify_block(graph, block, runs=[onnx_reference], scale=block.scale * factor)
        for factor in (1, 2)
    )
    assert isinstance(result, Certified) and result.max_abs_error <= TOLERANCE
    assert isinstance(wrong, Unmatched) and "the graph computes something else" in wrong.reason


def refuses(model: ir.Model, feeds: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    raise RuntimeError(f"no kernel for {len(feeds)} inputs\nand a long trace")


def test_certify_first_evaluator_that_runs_decides(graph: ir.Model):
    block = find_attention(graph).blocks[0]
    result = certify_block(graph, block, runs=[refuses, onnx_runtime])
    assert isinstance(result, Certified)
    wrong = certify_block(graph, block, runs=[refuses, onnx_runtime], scale=2 * block.scale)
    assert isinstance(wrong, Unmatched) and "the graph computes something else" in wrong.reason


def test_certify_without_working_evaluator_reports_first_reason(graph: ir.Model):
    block = find_attention(graph).blocks[0]
    result = certify_block(graph, block, runs=[refuses, refuses])
    assert isinstance(result, Unmatched)
    assert re.fullmatch(
        rf"read as attention '{block.name}', not certified: refuses: no kernel for \d+ inputs",
        result.reason,
    )


def test_certify_error_of_the_project_is_reported_as_it_is(graph: ir.Model):
    def own(model: ir.Model, feeds: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        raise InvalidModel("no such operator")

    block = find_attention(graph).blocks[0]
    result = certify_block(graph, block, runs=[own])
    assert isinstance(result, Unmatched)
    assert result.reason == f"read as attention {block.name!r}, not certified: no such operator"


def test_certify_positions_differ():
    """Equal positions would hide that a block reads the wrong rows of its table of angles."""
    angles = np.random.default_rng(0).uniform(0, 6, (16, 2))
    model = attention(
        scores="\n q9 = RotaryEmbedding(q, cos, sin, where)\n s0 = MatMul(q9, kT)"
        "\n s = Mul(s0, scale)",
        inputs="float[batch, sequence, 12] x, float[batch, 1, 1, sequence] mask,"
        " int64[batch, sequence] where",
        constants={"cos": np.cos(angles).astype("f4"), "sin": np.sin(angles).astype("f4")},
        opset=23,
    )
    seen: list[np.ndarray] = []

    def watched(model: ir.Model, feeds: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        seen.append(feeds["where"])
        return onnx_runtime(model, feeds)

    (block,), _ = find_attention(model)
    assert isinstance(certify_block(model, block, runs=[watched]), Certified)
    assert all(len(np.unique(where)) > 1 for where in seen)


def test_certify_nan_result_is_unmatched(graph: ir.Model):
    def nothing(model: ir.Model, feeds: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        return [np.full_like(array, np.nan) for array in onnx_runtime(model, feeds)]

    result = certify_block(graph, find_attention(graph).blocks[0], runs=[nothing])
    assert isinstance(result, Unmatched) and "difference inf" in result.reason


def test_certify_graph_limited_to_batch_one_uses_single_shapes():
    """ONNX Runtime wants a row of angles for each sequence; PyTorch's exporter writes one."""
    scores = "\n q9 = RotaryEmbedding(q, cos, sin)\n s0 = MatMul(q9, kT)\n s = Mul(s0, scale)"
    angles = "float[1, sequence, 2] cos, float[1, sequence, 2] sin"
    inputs = f"float[batch, sequence, 12] x, float[batch, 1, 1, sequence] mask, {angles}"
    model = attention(scores=scores, inputs=inputs, opset=23)
    (block,), _ = find_attention(model)
    assert isinstance(certify_block(model, block), Unmatched)
    assert isinstance(certify_block(model, block, shapes=SINGLE), Certified)
    assert len(read_attention(model).blocks) == 1


def test_read_attention_names_operator_without_kernel():
    softmax = "\n p = com.microsoft.BiasSoftmax <axis = 3, is_inner_broadcast = 0> (s, mask)"
    inputs = "float[batch, sequence, 12] x, float[batch, 3, sequence, sequence] mask"
    matches = read_attention(attention(mask="", softmax=softmax, inputs=inputs))
    assert matches.blocks == ()
    assert "BiasSoftmax" in matches.unmatched[0].reason


def test_read_attention_is_reproducible_by_seed(graph: ir.Model):
    one, two = (read_attention(graph, seed=3).certified[0].max_abs_error for _ in range(2))
    assert one == two


def test_read_attention_leaves_the_graph_unchanged(graph: ir.Model):
    read_attention(graph)  # gives some constants the names of their values
    before = ir.to_onnx_text(graph)
    read_attention(graph, seed=1)
    assert ir.to_onnx_text(graph) == before


def test_read_attention_without_attention_is_empty():
    model = ir.from_onnx_text(EXP)
    matches = read_attention(model)
    assert (matches.certified, matches.unmatched) == ((), ())
