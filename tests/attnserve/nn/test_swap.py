"""Swapped layers in models of transformers, and their graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
import transformers

import attnserve
from attnserve.checks.inspect import inspect
from attnserve.context import ONE_THREAD
from attnserve.nn import (
    AttentionLayer,
    CollaborativeAttention,
    FixedHeadAttention,
    GroupedHeadAttention,
    TrainedAttention,
    group_loss,
    keep_pillars,
    reuse_transformer,
    swap,
    voting_to_stay,
)
from attnserve.runtime.session import open_session
from graph_passes.analysis.shapes import infer_shapes_small
from graph_passes.errors import InvalidArgument
from tests.errors import raises
from tests.exports import quiet

Convert = Callable[[Sequence[TrainedAttention]], Sequence[AttentionLayer]]

BERT = {
    "hidden_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 32,
    "vocab_size": 50,
}
BART = {
    **{f"{part}_{name}": n for part in ("encoder", "decoder")
       for name, n in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 32))},
    "d_model": 16, "vocab_size": 50, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2,
    "decoder_start_token_id": 2, "forced_eos_token_id": 2,
}  # fmt: skip
DISTIL = {"dim": 16, "n_layers": 2, "n_heads": 4, "hidden_dim": 32, "vocab_size": 50}
VIT = {**BERT, "image_size": 8, "patch_size": 4}

LLAMA = {**BERT, "num_key_value_heads": 2}

MODELS: dict[str, tuple[str, dict[str, Any], int]] = {
    "BERT": ("Bert", BERT, 4),
    "BERT decoder": ("Bert", {**BERT, "is_decoder": True, "add_cross_attention": True}, 8),
    "RoBERTa": ("Roberta", BERT, 4),
    "DistilBERT": ("DistilBert", DISTIL, 2),
    "ALBERT": ("Albert", {**BERT, "embedding_size": 8}, 1),
    "ViT": ("ViT", {k: v for k, v in VIT.items() if k != "vocab_size"}, 4),
    "BART": ("Bart", BART, 6),
    "Marian": ("Marian", BART, 6),
    "Llama": ("Llama", LLAMA, 4),
    "Mistral": ("Mistral", {**LLAMA, "sliding_window": 3}, 4),
    "Qwen2": ("Qwen2", LLAMA, 4),
}
"""Class, configuration and number of attention modules."""

ROTARY = ("Llama", "Mistral", "Qwen2")


def build(name: str, attention: str = "sdpa", **changes: Any) -> Any:
    cls, sizes, _ = MODELS[name]
    sizes = {**sizes, **changes}
    config = getattr(transformers, f"{cls}Config")(**sizes, attn_implementation=attention)
    model = getattr(transformers, f"{cls}Model")(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def feeds(name: str) -> dict[str, Any]:
    if name == "ViT":
        return {"pixel_values": torch.randn(2, 3, 8, 8)}
    ids, mask = torch.randint(3, 50, (2, 6)), torch.ones(2, 6, dtype=torch.long)
    mask[1, 4:] = 0
    made = {"input_ids": ids, "attention_mask": mask}
    if name == "BERT decoder":
        other = {"encoder_hidden_states": torch.randn(2, 5, 16), "encoder_attention_mask": mask}
        made |= {**other, "encoder_attention_mask": mask[:, 1:], "use_cache": False}
    if MODELS[name][0] in ("Bart", "Marian"):
        made |= {"decoder_input_ids": ids[:, :5], "use_cache": False}
    if name in ROTARY:
        made["use_cache"] = False
    return made


def collaborative(rank: int, head_size: int | None = None) -> Convert:
    return lambda layers: [
        CollaborativeAttention.from_trained(layer, rank=rank, head_size=head_size)
        for layer in layers
    ]


def widened(layers: Sequence[TrainedAttention]) -> list[FixedHeadAttention]:
    return [FixedHeadAttention.from_trained(each, head_size=6) for each in layers]


def grouped(layers: Sequence[TrainedAttention]) -> list[GroupedHeadAttention]:
    return [GroupedHeadAttention.from_trained(layer, num_groups=2) for layer in layers]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", MODELS)
def test_swap_of_the_same_function_keeps_outputs(name: str, attention: str):
    model, inputs = build(name, attention), feeds(name)
    convert = collaborative(8 if name in ROTARY else 16)
    with torch.no_grad():
        before = model(**inputs).last_hidden_state
        assert len(swap(model, convert)) == MODELS[name][2]
        after = model(**inputs).last_hidden_state
    real = slice(0, 4) if name != "ViT" else slice(None)
    torch.testing.assert_close(after[:, real], before[:, real], atol=1e-5, rtol=0)


def test_swapped_model_trains_with_group_loss_and_keeps_pillars():
    model, inputs = build("BERT"), feeds("BERT")
    swap(model, grouped)
    model(**inputs)
    group_loss(model).backward()
    assert model.encoder.layer[0].attention.self.layer.v_proj.weight.grad.any()
    votes = voting_to_stay(model, [inputs], lambda batch: model(**batch))
    assert [int(each.mask.sum()) for each in votes.values()] == [2] * 4
    parameters = model.num_parameters()
    keep_pillars(model, votes)
    assert parameters - model.num_parameters() == 4 * 2 * 4 * (16 * 4 + 3)
    assert model(**inputs).last_hidden_state.isfinite().all()


@pytest.mark.parametrize(("name", "head_size"), [("BERT", None), ("BERT", 3), ("Qwen2", None)])
def test_weights_load_into_a_model_swapped_in_the_same_way(name: str, head_size: int | None):
    model, inputs = build(name), feeds(name)
    swap(model, collaborative(6, head_size))
    other = type(model)(model.config).eval()
    swap(other, collaborative(6, head_size))
    other.load_state_dict(model.state_dict())
    with torch.no_grad():
        expected, found = (each(**inputs).last_hidden_state for each in (model, other))
    torch.testing.assert_close(found, expected, atol=0, rtol=0)


def test_swap_keeps_dropout_mode_biases_and_frozen_weights():
    config = transformers.BertConfig(**BERT, attention_probs_dropout_prob=0.37)
    model = transformers.BertModel(config).train().requires_grad_(False)
    model.encoder.layer[1].requires_grad_(True)
    swap(model, widened)
    layers = [layer.attention.self.layer for layer in model.encoder.layer]
    assert [layer.dropout for layer in layers] == [0.37] * 4
    assert all(layer.training for layer in layers)
    trained = [any(p.requires_grad for p in layer.parameters()) for layer in layers]
    assert trained == [False, True, False, False]
    assert all(layer.q_proj.bias is not None for layer in layers)

    llama = build("Llama")
    for convert in (widened, grouped, lambda layers: reuse_transformer(layers, "partial:2")):
        swap(llama, convert)
        assert not any("self_attn" in n and "bias" in n for n, _ in llama.named_parameters())
        llama = build("Llama")
    swap(llama, collaborative(8))
    assert not any("self_attn" in n and "bias" in n for n, _ in llama.named_parameters())


@pytest.mark.parametrize(("windows", "fits"), [(2, False), (3, False), (4, True)])
def test_probabilities_of_other_windows_are_not_reused(windows: int, fits: bool):
    sizes = {**LLAMA, "use_sliding_window": True, "sliding_window": 2, "max_window_layers": windows}
    model = transformers.Qwen2Model(transformers.Qwen2Config(**sizes))
    if fits:
        swap(model, lambda layers: reuse_transformer(layers, "alternate"))
        return
    with raises(InvalidArgument, "nn.reuse_window", "layers."):
        swap(model, lambda layers: reuse_transformer(layers, f"full:{windows}" if windows == 2
                                                     else "alternate"))  # fmt: skip
    assert type(model.layers[1].self_attn).__name__ == "Qwen2Attention"


@pytest.mark.parametrize(
    ("convert", "code", "values"),
    [
        (lambda layers: [torch.nn.MultiheadAttention(16, 4, batch_first=True)] * len(layers),
         "layer", ("MultiheadAttention", "16")),
        (lambda layers: [FixedHeadAttention(8, 2, 4, batch_first=True)] * len(layers), "layer",
         ("FixedHeadAttention", "16")),
        (lambda layers: [FixedHeadAttention(16, 4, 4, kdim=8) for _ in layers], "layer",
         ("widths",)),
        (lambda layers: collaborative(16)(layers[:1]), "layer_count", ("1", "4")),
    ],
    ids=["of PyTorch", "size", "width of the keys", "number"],
)  # fmt: skip
def test_layers_that_do_not_fit_leave_model_unchanged(
    convert: Any, code: str, values: tuple[str, ...]
):
    model = build("BERT")
    before = [type(module) for module in model.modules()]
    with raises(InvalidArgument, f"nn.{code}", *values):
        swap(model, convert)
    assert [type(module) for module in model.modules()] == before


def test_wrapped_projections_are_refused():
    """As those of adapters and of quantized models, whose weights are not all of the layer."""

    class Wrapped(torch.nn.Linear):
        pass

    model = build("BERT")
    model.encoder.layer[1].attention.self.query = Wrapped(16, 16)
    with raises(InvalidArgument, "nn.projections", "encoder.layer.1", "adapters"):
        swap(model, collaborative(16))


def test_cache_is_refused():
    model, inputs = build("BERT decoder"), feeds("BERT decoder")
    swap(model, collaborative(16))
    with raises(InvalidArgument, "nn.cache", "use_cache=False"):
        model(**{**inputs, "use_cache": True})


def test_unsupported_model_is_refused_by_name():
    sizes = {**BERT, "num_hidden_layers": 1}
    model = transformers.Qwen3Model(transformers.Qwen3Config(**sizes))
    with raises(InvalidArgument, "nn.unsupported_model", "Qwen3Model", "DistilBERT"):
        swap(model, collaborative(16))


@pytest.mark.parametrize(
    ("convert", "code"),
    [
        (collaborative(4, 3), "nn.rotary"),
        (collaborative(9), "factorize.rotary_size"),
        (lambda layers: [CollaborativeAttention(16, 4, 8) for _ in layers], "nn.rotary"),
    ],
    ids=["sparse", "odd", "without positions"],
)
def test_rotary_positions_need_pairs_of_shared_keys(convert: Convert, code: str):
    model = build("Llama")
    with raises(InvalidArgument, code):
        swap(model, convert)
    assert type(model.layers[0].self_attn).__name__ == "LlamaAttention"


class Encoder(torch.nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Any, attention_mask: Any) -> Any:
        return self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state


CONVERSIONS: dict[str, tuple[Convert, list[tuple[Any, ...]]]] = {
    "collaborative": (collaborative(8), [("collaborative", 4, 8)] * 2),
    "one key head": (collaborative(6), [("standard", 4, 6)] * 2),  # with rotary positions
    "sparse": (collaborative(10, 3), [("sparse", 4, 3)] * 2),
    "widened": (widened, [("standard", 4, 6)] * 2),
    "pruned": (
        lambda layers: [layer.pruned([0, 1, 1, 0]) for layer in grouped(layers)],
        [("standard", 2, 4)] * 2,
    ),
    "partial": (
        lambda layers: reuse_transformer(layers, "partial:2"),
        [("standard", 4, 4), ("reuse", 4, 4), ("reuse", 4, 4), ("standard", 4, 4)],
    ),
    "full": (
        lambda layers: reuse_transformer(layers, "full:2"),
        [("standard", 4, 4), ("reuse", 4, 4), ("reuse", 4, 4), ("standard", 4, 4)],
    ),
}


def export(model: Any, inputs: dict[str, Any], path: Path) -> Path:
    dims = {0: torch.export.Dim("batch", max=40), 1: torch.export.Dim("sequence", min=2, max=40)}
    with quiet(), torch.no_grad():
        torch.onnx.export(
            Encoder(model).eval(), tuple(inputs.values()), str(path), dynamo=True,
            dynamic_shapes=(dims, dims), input_names=list(inputs), output_names=["y"],
            opset_version=18, verbose=False,
        )  # fmt: skip
    return path


@pytest.mark.parametrize(
    ("architecture", "name"),
    [
        *(("BERT", name) for name in ("collaborative", "sparse", "widened", "pruned", "full")),
        *(("Llama", name) for name in ("one key head", "widened", "pruned", "partial")),
    ],
)
def test_exported_graph_is_certified_in_its_form(architecture: str, name: str, tmp_path: Path):
    convert, expected = CONVERSIONS[name]
    model = build(architecture, num_hidden_layers=len(expected))
    swap(model, convert)
    model.config.use_cache = False
    inputs = {key: feeds(architecture)[key] for key in ("input_ids", "attention_mask")}
    path = export(model, inputs, tmp_path / "model.onnx")
    report = inspect(path).to_json()
    found = report["attention"]
    sizes = [size for _, _, size in expected]
    assert report["missed"] == []
    assert all(block["certified"] for block in found)
    assert [(b["form"], b["num_heads"]) for b in found] == [e[:2] for e in expected]
    assert all(b["head_size"] >= size for b, size in zip(found, sizes, strict=True))
    assert [b["scale"] for b in found] == pytest.approx([0.5] * len(expected))

    shorter = {key: value[:1, :4] for key, value in inputs.items()}
    session = open_session(path, ONE_THREAD)
    with torch.no_grad():
        theirs = model(**shorter).last_hidden_state
    [ours] = session.run(None, {key: value.numpy() for key, value in shorter.items()})
    torch.testing.assert_close(torch.from_numpy(ours), theirs, atol=1e-5, rtol=1e-4)


def test_trained_model_is_grouped_voted_and_recovered(tmp_path: Path):
    model = build("BERT")
    inputs = {key: feeds("BERT")[key] for key in ("input_ids", "attention_mask")}
    teacher = export(model, inputs, tmp_path / "original.onnx")
    swap(model, grouped)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(3):
        model(**inputs)
        optimizer.zero_grad()
        group_loss(model).backward()
        optimizer.step()
    keep_pillars(model, voting_to_stay(model, [inputs], lambda batch: model(**batch)))
    pruned = export(model.eval(), inputs, tmp_path / "pruned.onnx")
    assert [block["num_heads"] for block in inspect(pruned).to_json()["attention"]] == [2] * 4
    ids = np.random.default_rng(0).integers(1, 50, (200, 8))
    np.savez(tmp_path / "ids.npz", input_ids=ids, attention_mask=np.ones_like(ids))
    report = attnserve.recover(
        pruned, tmp_path / "out.onnx", teacher=teacher, data=tmp_path / "ids.npz", minutes=0.05
    )
    assert report.record.gain


def fixed(layers: Sequence[TrainedAttention]) -> list[FixedHeadAttention]:
    return [FixedHeadAttention.from_trained(each) for each in layers]


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize(("name", "causal"), [("Llama", False), ("BERT", True)])
def test_is_causal_of_a_call_is_followed(name: str, causal: bool, attention: str):
    model = build(name, attention)
    inputs = {"input_ids": feeds(name)["input_ids"], "is_causal": causal}
    if name == "Llama":
        inputs["use_cache"] = False
    with torch.no_grad():
        before = model(**inputs).last_hidden_state
        swap(model, fixed)
        after = model(**inputs).last_hidden_state
    torch.testing.assert_close(after, before, atol=1e-5, rtol=0)


def test_each_projection_stays_frozen_or_trainable():
    model = build("BERT")
    for layer in model.encoder.layer[:2]:
        layer.attention.self.requires_grad_(False)
    model.encoder.layer[2].requires_grad_(False)
    swap(model, fixed)
    trained = [
        {name.partition(".")[0] for name, weight in each.attention.self.layer.named_parameters()
         if weight.requires_grad}
        for each in model.encoder.layer
    ]  # fmt: skip
    every = {"q_proj", "k_proj", "v_proj", "out_proj"}
    assert trained == [{"out_proj"}, {"out_proj"}, set(), every]


def test_frozen_heads_stay_frozen_when_others_are_removed():
    model = build("BERT").requires_grad_(False)
    swap(model, grouped)
    batch = feeds("BERT")
    keep_pillars(model, voting_to_stay(model, [batch], lambda one: model(**one)))
    assert not any(weight.requires_grad for weight in model.parameters())


def test_query_biases_that_are_zero_can_be_learned():
    config = transformers.BertConfig(**BERT)
    model = transformers.BertModel(config)  # its biases are zero
    swap(model, collaborative(16))
    content = model.encoder.layer[0].attention.self.layer.content
    assert content is not None and not content.weight.any()
    with torch.no_grad():
        content.weight.fill_(1.0)
    other = transformers.BertModel(config).requires_grad_(False)
    swap(other, collaborative(16))
    other.load_state_dict(model.state_dict())
    assert not any(weight.requires_grad for weight in other.parameters())


def test_layers_of_another_type_take_the_type_of_the_model():
    model = build("BERT").to(torch.bfloat16)
    swap(model, lambda layers: [FixedHeadAttention(16, 4, 4, batch_first=True) for _ in layers])
    assert {weight.dtype for weight in model.parameters()} == {torch.bfloat16}
    assert model(**feeds("BERT")).last_hidden_state.isfinite().all()


def test_swapped_models_and_single_modules_are_refused():
    model = build("BERT")
    with raises(InvalidArgument, "nn.unsupported_model", "as a whole"):
        swap(model.encoder.layer[0].attention.self, fixed)
    swap(model, fixed)
    with raises(InvalidArgument, "nn.swapped"):
        swap(model, fixed)


def test_reuse_across_groups_of_albert_is_refused():
    config = transformers.AlbertConfig(
        **{**BERT, "num_hidden_layers": 6}, embedding_size=8, num_hidden_groups=3
    )
    model = transformers.AlbertModel(config)
    with raises(InvalidArgument, "nn.reuse_group", "several times"):
        swap(model, lambda layers: reuse_transformer(layers, "full:1"))
    config = transformers.AlbertConfig(**BERT, embedding_size=8, inner_group_num=3)
    model = transformers.AlbertModel(config).eval()
    swap(model, lambda layers: reuse_transformer(layers, "full:1"))
    with torch.no_grad():
        assert model(torch.tensor([[3, 4, 5]])).last_hidden_state.isfinite().all()


@pytest.mark.parametrize("configuration", ["full:2", "partial:2", "partial:3"])
def test_reuse_is_read_from_a_torchscript_export(configuration: str, tmp_path: Path):
    model = build("BERT", "eager")
    swap(model, lambda layers: reuse_transformer(layers, configuration))
    model, inputs = Encoder(model).eval(), feeds("BERT")
    names = ["input_ids", "attention_mask"]
    with quiet(), torch.no_grad():
        torch.onnx.export(
            model, tuple(inputs[name] for name in names), str(tmp_path / "m.onnx"),
            dynamo=False, input_names=names, output_names=["y"], opset_version=17,
            dynamic_axes={name: {0: "batch", 1: "sequence"} for name in [*names, "y"]},
        )  # fmt: skip
    report = inspect(tmp_path / "m.onnx").to_json()
    assert report["missed"] == []
    forms = [block["form"] for block in report["attention"]]
    assert forms == ["standard", "reuse", "reuse", "standard"]
    shapes = infer_shapes_small(ir.load(tmp_path / "m.onnx"), batch=2, sequence=5)
    joined = [v for v in shapes.known if (node := v.producer()) and node.op_type == "Concat"]
    assert not [v.name for v in joined if (shapes.shape(v) or ())[-2:] == (5, 5)]
    shorter = {name: inputs[name][:1, :4] for name in names}
    with torch.no_grad():
        theirs = model(*shorter.values())
    session = open_session(tmp_path / "m.onnx", ONE_THREAD)
    [ours] = session.run(None, {name: value.numpy() for name, value in shorter.items()})
    torch.testing.assert_close(torch.from_numpy(ours), theirs, atol=1e-5, rtol=1e-4)
