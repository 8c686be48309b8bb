"""--mixing and --head-dk: the form that costs less, and never more than before at any length."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnserve.checks.compare import verify
from attnserve.checks.inspect import inspect
from attnserve.models.onnx_files import load_model
from attnserve.planning.mixing_cost import choose_head_size, widest_head
from attnserve.planning.optimize import optimize
from graph_passes.analysis.constants import is_constant
from graph_passes.errors import InvalidArgument
from graph_passes.passes.collaborate import Collaborate
from tests.errors import raises

MINILM: dict[str, Any] = {"heads": 12, "head_size": 32, "widths": (384, 384)}
BERT: dict[str, Any] = {"heads": 12, "head_size": 64, "widths": (768, 768)}


# Which form


@pytest.mark.parametrize(("K", "widest"), [(1, 0), (2, 1), (8, 7), (12, 7), (16, 15), (32, 31)])
def test_widest_head_leaves_room_for_content(K: int, widest: int):
    """The content takes one dimension; above 8, heads are padded to multiples of 8."""
    assert widest_head(K) == widest


@pytest.mark.parametrize("longest", [128, 512, None])
def test_choose_head_size_prefers_sparse_above_head_size(longest: int | None):
    """MiniLM at R = 128, BERT at R = 256: where the paper's form costs less than the original
    (up to 171 and 341 tokens), sparse mixing costs less again."""
    assert choose_head_size(128, **MINILM, length=32, longest=longest) == 31
    assert choose_head_size(256, **BERT, length=128, longest=longest) == 63


def test_choose_head_size_prefers_dense_up_to_head_size():
    """R <= K: dense scores cost no more than the original's, at any length."""
    assert choose_head_size(32, **MINILM, length=512, longest=None) is None


def test_choose_head_size_full_rank_is_dense():
    assert choose_head_size(384, **MINILM, length=128, longest=512) is None


@given(
    rank=st.integers(1, 383),
    length=st.integers(1, 512),
    longest=st.one_of(st.none(), st.integers(1, 4096)),
)
def test_choose_head_size_never_costs_more_than_the_original(
    rank: int, length: int, longest: int | None
):
    """By the counts of the module's docstring, up to the longest text."""
    D = E = 384
    H, K = 12, 32
    size = choose_head_size(rank, **MINILM, length=length, longest=longest)

    def saved(S: int) -> int:
        original = H * K * (D + E) + S * H * K
        if size is None:
            return original - (rank * (D + E) + H * (E + rank) + S * H * rank)
        wide = H * K if rank >= H * size else rank
        return original - (wide * (D + E) + H * (E + K) + S * H * K)

    shared = H * K if rank >= H * (K - 1) else rank  # from R = H * 31 on nothing is shared
    sparse_is_cheaper = shared * (D + E) + H * (E + K) <= H * K * (D + E)
    if sparse_is_cheaper:
        assert all(saved(S) >= 0 for S in (1, longest or 10**6))


# In the graph


@pytest.fixture
def forms(tiny: Path, sentences: Path, tmp_path: Path) -> Any:
    """(options) -> form and head size of each layer, as inspect reads the file."""

    def made(**options: Any) -> list[tuple[str, int]]:
        optimize(tiny, tmp_path / "new", calib=sentences, force=True, **options)
        blocks = inspect(tmp_path / "new").reading.blocks
        return [(block.form, block.head_size) for block in blocks]

    return made


def test_optimize_mixing_and_head_dk_set_the_form(forms: Any):
    """Heads of 8 that read 7 shared dimensions and their content; R = 12 of 32."""
    assert forms(collab_dk=12, mixing="dense") == [("collaborative", 12)] * 2
    assert forms(collab_dk=12, mixing="sparse") == [("sparse", 8)] * 2
    assert forms(collab_dk=12, head_dk=5) == [("sparse", 6)] * 2
    assert forms(head_dk=5) == [("standard", 6)] * 2
    assert forms(collab_dk=[12, 28], mixing="sparse") == [("sparse", 8), ("standard", 8)]


def test_optimize_auto_mixing_is_decided_at_longest_text(forms: Any):
    """The tiny model takes 64 tokens; R = 16 of 32 breaks even before, R = 8 never."""
    assert forms(collab_dk=16) == [("sparse", 8)] * 2
    assert forms(collab_dk=8) == [("collaborative", 8)] * 2


def test_optimize_auto_mixing_of_full_rank_is_dense(forms: Any):
    assert forms(collab_dk=32) == [("collaborative", 32)] * 2


def test_optimize_steps_report_rank_and_head_size(tiny: Path, sentences: Path, tmp_path: Path):
    report = optimize(tiny, tmp_path / "new", collab_dk=12, head_dk=6, calib=sentences)
    assert [(step.rank, step.head_size) for step in report.steps] == [(12, 6)] * 2
    assert all(0 < (step.relative_error or 0) < 1 for step in report.steps)
    shared = report.plan.targets(Collaborate).values()
    assert [params.head_size for params in shared] == [6, 6]


def test_optimize_sparse_mixing_is_close_to_dense(tiny: Path, sentences: Path, tmp_path: Path):
    for mixing in ("dense", "sparse"):
        optimize(tiny, tmp_path / mixing, collab_dk=16, mixing=mixing, calib=sentences, refit=False)
    dense, sparse = (
        verify(tiny, tmp_path / mixing, data=sentences).mean_cosine
        for mixing in ("dense", "sparse")
    )
    assert sparse > dense - 0.01


@pytest.mark.parametrize(
    ("options", "code", "values"),
    [
        ({"collab_dk": 16, "mixing": "dense", "head_dk": 4}, "conflict", ("`head_dk` 4", "dense")),
        ({"mixing": "sparse", "prune": 0.5}, "conflict", ("`mixing` sparse", "`collab_dk`")),
        ({"collab_dk": 16, "head_dk": 9}, "range", ("`head_dk` is 9", "1 to 8")),
        ({"head_dk": 0}, "range", ("`head_dk` is 0", "1 to 8")),
        ({"collab_dk": 3, "head_dk": 4}, "range", ("`head_dk` is 4", "3 shared dimensions")),
    ],
)
def test_optimize_impossible_mixing_is_refused(
    options: dict[str, Any], code: str, values: tuple[str, ...], tiny: Path, sentences: Path,
    tmp_path: Path,
):  # fmt: skip
    with raises(InvalidArgument, f"request.{code}", *values):
        optimize(tiny, tmp_path / "new", calib=sentences, **options)
    assert not any(tmp_path.iterdir())


def test_optimize_head_dk_counts_remaining_heads(tiny: Path, sentences: Path, tmp_path: Path):
    """After pruning, R and the sizes count for the heads that stay."""
    report = optimize(
        tiny, tmp_path / "new", prune_heads={"0": [1, 0, 1, 1]}, head_dk=4, calib=sentences
    )
    ranks = [step.rank for step in report.steps if step.rewrite == "collaborate"]
    assert ranks == [12, 16]
    blocks = inspect(tmp_path / "new").reading.blocks
    assert [(b.num_heads, b.head_size) for b in blocks] == [(3, 5), (4, 5)]


def test_optimize_sparse_model_can_be_quantized(tiny: Path, sentences: Path, tmp_path: Path):
    """Every product with a weight becomes one of integers, at a mean cosine of 0.99."""
    from onnxruntime.quantization import quantize_dynamic

    optimize(tiny, tmp_path / "new", collab_dk=12, mixing="sparse", calib=sentences)
    path = tmp_path / "new" / "model.onnx"
    quantize_dynamic(path, tmp_path / "int8.onnx")
    nodes = [node.op_type for node in load_model(tmp_path / "int8.onnx").graph]
    weighted = [
        node
        for node in load_model(path).graph
        if node.op_type == "MatMul" and is_constant(node.inputs[1])
    ]
    assert nodes.count("MatMulInteger") == len(weighted)
    assert verify(path, tmp_path / "int8.onnx").mean_cosine > 0.99
