"""Fusion before conversions: operators, costs, and what serving can still gain."""

from __future__ import annotations

from collections import Counter
from functools import cache
from pathlib import Path

import onnx_ir as ir
import pytest

from attnserve import fusion, optimize
from attnserve.checks.certify import read_attention
from attnserve.fusion import fuse, fuse_for, fusion_passes
from attnserve.literals import Precision
from attnserve.models.onnx_files import load_model
from attnserve.planning.plans.apply import apply_plan
from attnserve.planning.plans.plan import Plan
from attnserve.runtime.session import open_session
from graph_passes.analyses import Analyses
from graph_passes.analysis.cost import Cost, model_cost
from graph_passes.errors import InvalidModel
from graph_passes.passes.fuse_attention import FuseAttention
from tests import architectures
from tests.errors import raises
from tests.jobs import job_of


@pytest.mark.parametrize(("precision", "cosine"), [("int8", 0.99), ("int4", 0.95), ("float16", 1)])
def test_optimize_fuses_operators_before_a_conversion(
    precision: Precision, cosine: float, tiny: Path, tmp_path: Path
) -> None:
    """Integers of the products are not matched any more, so that serving could not fuse them."""
    report = optimize(tiny, tmp_path / "new", precision=precision)
    kinds = Counter(node.op_type for node in load_model(tmp_path / "new" / "model.onnx").graph)
    assert (kinds["Attention"], kinds["Gelu"], kinds["Softmax"], kinds["Erf"]) == (2, 2, 0, 0)
    assert len(report.plan.targets(FuseAttention)) == 2
    assert {change.rewrite for change in report.changes} == {"fuse_attention", "fuse_gelu"}
    assert report.record.after.macs == report.record.before.macs
    assert report.fidelity.mean_cosine > cosine - 1e-4


def test_optimize_plan_with_conversion_is_replayed_to_the_same_model(
    tiny: Path, sentences: Path, tmp_path: Path
) -> None:
    """The recorded plan holds the fused operators."""
    report = optimize(tiny, tmp_path / "one", precision="int8", calib=sentences)
    model = load_model(tiny / "model.onnx")
    plan = Plan.from_json(report.plan.to_json())
    again = model.clone()
    plan = Plan(plan.passes)  # without the conversion
    apply_plan(plan, job_of(model), again, fit=False)
    made = load_model(tmp_path / "one" / "model.onnx")
    operators = ("Attention", "Gelu", "Sum", "LayerNormalization")
    old, new = (
        Counter(n.op_type for n in m.graph if n.op_type in operators) for m in (made, again)
    )
    assert old == new and new["Attention"] == new["Gelu"] == 2


def test_optimize_int8_of_pruned_heads_is_fused(tiny: Path, tmp_path: Path) -> None:
    optimize(tiny, tmp_path / "new", prune_heads={"0": [1, 0, 1, 0]}, precision="int8")
    nodes = [
        n for n in load_model(tmp_path / "new" / "model.onnx").graph if n.op_type == "Attention"
    ]
    assert [node.attributes.get_int("q_num_heads", 0) for node in nodes] == [2, 4]


FUSED = {"ALBERT", "BERT", "CLIP vision", "DistilBERT", "GPT-2", "Llama", "MPNet", "T5", "ViT"}


@cache
def committed_cost(path: Path) -> Cost:
    return model_cost(load_model(path), memory=False)


@pytest.mark.parametrize(
    "cell", [c for c in architectures.COMMITTED if c.architecture in FUSED], ids=str
)
@pytest.mark.parametrize("provider", ["cpu", "cuda"])
def test_fuse_adds_no_macs_and_no_weights(cell: architectures.Cell, provider: str) -> None:
    """MACs at no length, and no bytes but for a bias of zeros and sizes; shared weights stay so."""
    model = load_model(cell.committed)
    new = model.clone()
    fuse(new, fusion_passes(new, provider))  # pyright: ignore[reportArgumentType]
    blocks = Analyses.of(new).get(read_attention).blocks
    before, after = committed_cost(cell.committed), model_cost(new, memory=False)
    assert after.macs is not None or before.macs is None
    if before.macs is not None and after.macs is not None:
        for lengths in (dict.fromkeys(before.macs.axes, n) for n in (1, 9, 300)):
            assert after.macs(lengths) <= before.macs(lengths)
    width = max(block.num_heads * block.head_size for block in blocks)
    assert after.bytes <= before.bytes + len(blocks) * (3 * 4 * width + 1024)


def test_fuse_that_adds_macs_is_a_defect(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = iter((10, 10, 20, 30, 10, 10, 21, 30))
    monkeypatch.setattr("attnserve.fusion.count_macs", lambda *_: next(counts))
    model = load_model(tiny / "model.onnx")
    with raises(InvalidModel, "internal.fusion_macs", "21", "20", "512"):
        fuse(model, fusion_passes(model))


def test_fuse_for_nothing_to_fuse_returns_the_model(tiny: Path) -> None:
    model, passes = fuse_for(load_model(tiny / "model.onnx"))
    assert passes
    assert fuse_for(model) == (model, ())


def test_fuse_for_uses_older_operators_where_the_new_ones_do_not_load(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A conversion must not fail, nor lose its fusion, by the age of ONNX Runtime."""
    opened = fusion.open_session

    def older(model: ir.Model) -> object:
        if model.opset_imports[""] >= 23:
            raise InvalidModel("Unsupported model opset", "", code="model.refused")
        return opened(model)

    monkeypatch.setattr(fusion, "open_session", older)
    model, passes = fuse_for(load_model(tiny / "model.onnx"), "int8")
    assert any(isinstance(one, FuseAttention) for one in passes)
    assert model.opset_imports[""] < 23
    open_session(model)


def test_fuse_for_a_defect_converts_unfused_and_says_so(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise InvalidModel("it is broken", "report it", code="internal.certificate")

    monkeypatch.setattr(fusion, "fuse", broken)
    model = load_model(tiny / "model.onnx")
    assert fuse_for(model, "int8") == (model, ())
    assert "it is broken" in caplog.text
