"""Whole graphs in PyTorch against ONNX Runtime, and which of their constants are trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

torch = pytest.importorskip("torch", reason="pip install 'attnserve[torch]'")

import attnserve  # noqa: E402
from attnserve.models.artifact import open_artifact  # noqa: E402
from attnserve.models.example_inputs import random_batches  # noqa: E402
from attnserve.models.onnx_files import load_model  # noqa: E402
from attnserve.recovery.module import (  # noqa: E402
    GraphModule,
    memory_errors,
    rotary_constants,
    trainable_weights,
)
from attnserve.recovery.teacher import matching_states  # noqa: E402
from attnserve.runtime.session import open_session  # noqa: E402
from graph_passes import FuseAttention, FuseGelu, find_attention, find_feed_forward  # noqa: E402
from graph_passes.errors import CannotRewrite, InvalidModel  # noqa: E402
from tests.errors import raises  # noqa: E402
from tests.fixtures.make import BERT  # noqa: E402

GRAPHS = BERT.parent / "onnx"

TOLERANCE = 1e-5
"""The largest error relative to the largest element. Measured: 3e-6 at most."""

EXPORTS = [
    "albert-torchscript17-sdpa", "bert-single-head-dynamo23-sdpa",
    "clip-vision-torchscript17-eager", "embeddinggemma-dynamo18-eager", "gpt-2-torchscript11-eager",
    "jina-v2-alibi-torchscript17-sdpa", "llama-dynamo18-eager", "mpnet-dynamo18-eager",
    "roberta-torchscript17-sdpa", "t5-dynamo18-eager",
]  # fmt: skip


def load(name: str) -> ir.Model:
    return load_model(GRAPHS / f"{name}.onnx")


def arrays(model: ir.Model) -> dict[str, np.ndarray]:
    tensors = {name: value.const_value for name, value in model.graph.initializers.items()}
    return {name: tensor.numpy() for name, tensor in tensors.items() if tensor is not None}


def largest_error(model: ir.Model) -> float:
    module, session = GraphModule(model), open_session(model)
    errors = [0.0]
    for batch in random_batches(model):
        with torch.no_grad():
            found = module(batch)
        for a, b in zip(session.run(None, batch), found, strict=True):
            assert a.shape == tuple(b.shape)
            finite = np.isfinite(a)
            size = np.abs(a[finite]).max(initial=1e-9)
            errors.append(float(np.abs(a - b.numpy())[finite].max(initial=0) / size))
    return max(errors)


@pytest.mark.parametrize("name", EXPORTS)
def test_graph_equals_onnx_runtime(name: str):
    assert largest_error(load(name)) < TOLERANCE


@pytest.mark.parametrize("form", ["attention", "multi_head", "merged", "onnx"])
def test_fused_graph_equals_onnx_runtime(form: Any):
    model = load_model(BERT / "sdpa-dynamo-23-2" / "model.onnx")
    decomposed = load_model(BERT / "eager-dynamo-23-2" / "model.onnx")
    model = decomposed if form == "onnx" else model
    FuseAttention({block.name: form for block in find_attention(model).blocks})(model)
    assert largest_error(model) < TOLERANCE


def test_fused_gelu_equals_onnx_runtime(tiny: Path):
    model = load_model(open_artifact(tiny))
    from graph_passes.passes.base import NoParams

    FuseGelu({block.name: NoParams() for block in find_feed_forward(model)})(model)
    assert any(node.op_type == "Gelu" for node in model.graph)
    assert largest_error(model) < TOLERANCE


@pytest.mark.parametrize(
    "rewrite",
    [{"collab_dk": 12}, {"collab_dk": 16, "head_dk": 4, "mixing": "sparse"},
     {"reuse": "full:1"}, {"skip": ["1"]}, {"prune": 0.5, "ffn": 0.5}],
    ids=str,
)  # fmt: skip
def test_rewritten_graph_equals_onnx_runtime(
    rewrite: dict[str, Any], tiny: Path, sentences: Path, tmp_path: Path
):
    attnserve.optimize(tiny, tmp_path / "new", calib=sentences, **rewrite)
    model = load_model(open_artifact(tmp_path / "new"))
    assert largest_error(model) < TOLERANCE
    pairs = matching_states(load_model(open_artifact(tiny)), model)
    assert len(pairs) == (1 if "skip" in rewrite else 2)


def test_weights_are_all_but_tables_and_masks(tiny: Path):
    model = load_model(open_artifact(tiny))
    floats = {
        name
        for name, value in model.graph.initializers.items()
        if value.dtype == ir.DataType.FLOAT and value.const_value is not None
        if value.const_value.size > 1
    }
    assert {n for n in floats if "embeddings.weight" in n} == floats - {*trainable_weights(model)}


def test_rotary_angles_are_not_trained(shared: Path):
    model = load_model(shared / "models" / "stories260K" / "stories260K.onnx")
    trained = {*trainable_weights(model)} - rotary_constants(model)
    assert not {"cos", "sin", "emb"} & trained
    assert len(trained) == 47


def test_shared_weights_are_one_parameter():
    """ALBERT computes all layers with the same weights."""
    model = load("albert-torchscript17-sdpa")
    module = GraphModule(model)
    assert len(module.names) == len(set(module.names)) == len(module.weights)
    shared = next(n for n in module.names if len([*model.graph.initializers[n].uses()]) > 1)
    index = module.names.index(shared)
    batch = random_batches(model)[0]
    before = open_session(model).run(None, batch)[0]
    with torch.no_grad():
        module.weights[index].mul_(1.5)
        found = module(batch)[0].numpy()
    module.write_weights()
    after = open_session(model).run(None, batch)[0]
    assert np.abs(after - before).max() > 1e-3
    np.testing.assert_allclose(found, after, rtol=0, atol=1e-5 * np.abs(after).max())


def test_every_weight_has_a_finite_gradient(tiny: Path):
    model = load_model(open_artifact(tiny))
    module = GraphModule(model)
    outputs = module(random_batches(model)[-1])
    sum((x * torch.randn_like(x)).sum() for x in outputs).backward()
    for name, weight in zip(module.names, module.weights, strict=True):
        assert weight.grad is not None, name
        assert weight.grad.isfinite().all(), name


def test_written_weights_keep_their_precision():
    model = load("bert-torchscript17-eager-fp16")
    before = arrays(model)
    GraphModule(model).write_weights()
    for name, array in arrays(model).items():
        assert array.dtype == before[name].dtype
        np.testing.assert_array_equal(array, before[name])


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory"), MemoryError(),
              RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried")],
)  # fmt: skip
def test_lack_of_memory_is_one_error(error: Exception, tiny: Path):
    module = GraphModule(load_model(open_artifact(tiny)))
    batch = random_batches(module.model)[0]

    def fail(*_: Any) -> Any:
        raise error

    with raises(CannotRewrite, "recovery.memory"), memory_errors():
        fail()
    if not isinstance(error, MemoryError):
        node = next(node for node in module.model.graph if node.op_type == "MatMul")
        module.replaced = {node: fail}
        with raises(CannotRewrite, "recovery.memory"):
            module(batch)


def test_other_errors_of_a_step_stay_what_they_are():
    with pytest.raises(RuntimeError, match="another"), memory_errors():
        raise RuntimeError("another")


def test_used_statistics_of_a_norm_are_refused():
    graph = """
        <ir_version: 10, opset_import: ["" : 18]>
        g (float[b, 4] x) => (float[b, 4] y, float[b, 1] mean)
        <float[4] w = {1.0, 2.0, 3.0, 4.0}>
        {
            y, mean = LayerNormalization(x, w)
        }
    """
    module = GraphModule(ir.from_onnx_text(graph))
    with raises(InvalidModel, "recovery.operator", "further outputs"):
        module({"x": np.ones((2, 4), np.float32)})


@pytest.mark.parametrize(
    ("operator", "advice"),
    [
        ("MatMulIntegerToFloat", "float model"),
        ("QAttention", "float model"),
        ("MatMulNBits", "float model"),
        ("DequantizeLinear", "float model"),
        ("Quux", "report"),
    ],
)
def test_unknown_operator_says_what_to_do(operator: str, advice: str):
    graph = f"""
        <ir_version: 10, opset_import: ["" : 18, "com.microsoft" : 1]>
        g (float[b, 4] x) => (float[b, 4] y) {{ y = com.microsoft.{operator}(x) }}
    """
    with raises(InvalidModel, "recovery.operator", operator) as caught:
        GraphModule(ir.from_onnx_text(graph))
    assert advice in caught.value.fix


def test_nodes_without_use_are_left_out():
    graph = """
        <ir_version: 10, opset_import: ["" : 18, "com.microsoft" : 1]>
        g (float[b, 4] x) => (float[b, 4] y) { z = com.microsoft.Quux(x)  y = Relu(x) }
    """
    [y] = GraphModule(ir.from_onnx_text(graph))({"x": np.full((2, 4), -1.0, np.float32)})
    assert not y.any()


def test_initializers_that_nothing_reads_may_have_any_type():
    model = ir.from_onnx_text("""
        <ir_version: 10, opset_import: ["" : 18]>
        g (float[b, 4] x) => (float[b, 4] y)
        <float[4] w = {1, 2, 3, 4}, string[1] note = {"unused"}> { y = Add(x, w) }
    """)
    assert GraphModule(model).names == ["w"]
