"""Supported architectures as tiny random models, and the ways to export them with PyTorch.

A model is built from a Hugging Face configuration (or is a module of ``tests/networks.py``). The
configuration determines its attention (``tests/attention_layers.py``). A ``Cell`` is one way to
export it, which ``tests/exports.py`` does. The sizes of a model differ as far as possible, so that
axes cannot be confused. All weights are random, including biases and normalizations, so that a
match without one of them has other outputs.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx_ir as ir

from attnserve.context import ONE_THREAD
from attnserve.runtime.session import open_session
from tests.attention_layers import (
    Layer,
    cross_decoder,
    disentangled,
    encoder,
    encoder_decoder,
    gemma3_layers,
    mask_decoder,
    pooling,
    rotary_encoder,
    speech_encoder,
    t5_layers,
    windows,
)
from tests.networks import (
    GROUPED,
    IMAGE,
    POSITIONS,
    SIZES,
    TWO_STACKS,
    VOCABULARY,
    Attention,
    Shape,
    alibi_encoder,
    cache_inputs,
    cached_cross_states,
    cached_states,
    detection_network,
    first_pooled,
    fixed_head_size,
    hugging_face,
    last_pooled,
    mask_decoder_network,
    masks,
    mean_pooled,
    pooling_network,
    states,
    tensor,
    three_heads,
    three_outputs,
    torch_encoder,
    without_biases,
    yes_or_no,
)

Exporter = Literal["torchscript", "dynamo"]
Variant = Literal["", "fp16", "bf16", "dropout"]

GRAPHS = Path(__file__).parent / "fixtures" / "onnx"

LENGTHS = {"batch": 2, "sequence": 7, "source": 9, "past": 6, "samples": 40}
"""Lengths of the traced example. Inputs may have sums of them: "past + sequence"."""

OTHER_LENGTHS = {"batch": 3, "sequence": 5, "source": 8, "past": 4, "samples": 32}
"""Other lengths: a graph that does not run at these does not count as exported."""

TYPES = {"tensor(int64)": np.int64, "tensor(float)": np.float32, "tensor(float16)": np.float16}


@dataclass(frozen=True)
class Cell:
    """One way to export one architecture."""

    architecture: str
    attention: Attention
    exporter: Exporter
    opset: int
    variant: Variant = ""

    @property
    def column(self) -> str:
        parts = (f"{self.exporter}{self.opset}", self.attention, self.variant)
        return "-".join(filter(None, parts))

    @property
    def missed(self) -> bool:
        """Whether no layer matches: from opset 12 on, dropout in training mode is in the graph."""
        return (self.variant == "dropout" and self.opset >= 12) or self.architecture in UNREAD

    @property
    def committed(self) -> Path:
        """The path of the committed graph, which exists for the cells of ``COMMITTED``."""
        return GRAPHS / (re.sub(r"[^a-z0-9]+", "-", str(self).lower()) + ".onnx")

    def __str__(self) -> str:
        return f"{self.architecture}-{self.column}"


@dataclass(frozen=True, eq=False)
class Architecture:
    """A tiny model and its attention layers.

    Attributes:
        build: Builds the network with an implementation of attention; weights are set afterwards.
        layers: Returns the attention layers of a configuration, in order of execution.
        inputs: The shape of each input. The name determines the content: ids, a mask, or floats.
        call: Runs the network on named tensors and returns its outputs by name.
        attentions: The available implementations of attention.
    """

    name: str
    build: Callable[[Attention], Any]
    layers: Callable[[Any], list[Layer]] = encoder
    inputs: Mapping[str, Shape] = field(default_factory=lambda: TEXT)
    call: Callable[..., dict[str, Any]] = states
    attentions: tuple[Attention, ...] = ("eager", "sdpa")


# ---- the table of architectures -----------------------------------------------------------------

TEXT: Mapping[str, Shape] = {
    "input_ids": ("batch", "sequence"),
    "attention_mask": ("batch", "sequence"),
}
PIXELS: Mapping[str, Shape] = {"pixel_values": ("batch", 3, 20, 20)}
SQUARE: Mapping[str, Shape] = {"pixel_values": ("batch", 3, 16, 16)}
TWO_TEXTS: Mapping[str, Shape] = {
    "input_ids": ("batch", "source"),
    "attention_mask": ("batch", "source"),
    "decoder_input_ids": ("batch", "sequence"),
}
FEATURES: Mapping[str, Shape] = {
    "features": ("batch", "source", 24),
    "positions": ("batch", "source", 24),
    "pixel_mask": ("batch", "source"),
}
PROMPTED: Mapping[str, Shape] = {
    "image_embeddings": ("batch", 48, 4, 3),
    "image_positional_embeddings": ("batch", 48, 4, 3),
    "sparse_prompt_embeddings": ("batch", 1, "sequence", 48),
    "dense_prompt_embeddings": ("batch", 48, 4, 3),
}
RAW_AUDIO: Mapping[str, Shape] = {"input_values": ("batch", "samples")}
CACHED: Mapping[str, Shape] = {
    "input_ids": ("batch", "sequence"),
    "attention_mask": ("batch", "past + sequence"),
    **cache_inputs("past_key_values", "batch", 3, "past", 8),
}
CACHED_CROSS: Mapping[str, Shape] = {
    "input_ids": ("batch", "sequence"),
    "encoder_hidden_states": ("batch", "source", 24),
    "encoder_attention_mask": ("batch", "source"),
    **cache_inputs("past_key_values", "batch", 6, "past", 4),
    **cache_inputs("encoder_key_values", "batch", 6, "source", 4),
}

GPT2 = {"vocab_size": VOCABULARY, "n_embd": 24, "n_head": 3, "n_layer": 2, "n_positions": POSITIONS}
WHISPER = {
    **TWO_STACKS,
    "num_mel_bins": 10,
    "max_source_positions": 15,
    "max_target_positions": POSITIONS,
}
BART_DECODER = {**TWO_STACKS, "decoder_layers": 2, "use_cache": True}
DISTILBERT = {
    "vocab_size": VOCABULARY, "dim": 24, "n_heads": 3, "n_layers": 2, "hidden_dim": 40,
    "max_position_embeddings": POSITIONS,
}  # fmt: skip
T5 = {
    "vocab_size": VOCABULARY, "d_model": 20, "d_kv": 6, "num_heads": 4, "d_ff": 40,
    "num_layers": 2, "num_decoder_layers": 1, "use_cache": False,
}  # fmt: skip
DEBERTA = {
    **SIZES, "relative_attention": True, "position_buckets": 8, "pos_att_type": ["p2c", "c2p"],
}  # fmt: skip
DEBERTA_V3 = {
    **DEBERTA, "share_att_key": True, "norm_rel_ebd": "layer_norm", "position_biased_input": False,
    "type_vocab_size": 0,
}  # fmt: skip
MODERN = {
    **SIZES, "local_attention": 4, "pad_token_id": 0, "eos_token_id": 2, "bos_token_id": 1,
    "cls_token_id": 1, "sep_token_id": 2, "layer_types": ["full_attention", "sliding_attention"],
}  # fmt: skip
GEMMA3 = {
    **GROUPED, "sliding_window": 4, "query_pre_attn_scalar": 12,
    "layer_types": ["sliding_attention", "full_attention"],
}  # fmt: skip
SPEECH = {
    **SIZES, "conv_dim": (8, 8), "conv_stride": (3, 2), "conv_kernel": (5, 3),
    "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2,
}  # fmt: skip
SWIN = {
    "embed_dim": 12, "depths": [1, 1], "num_heads": [3, 6], "window_size": 2, "image_size": 16,
    "patch_size": 4,
}  # fmt: skip

TABLE = (
    Architecture("BERT", hugging_face("Bert", **SIZES)),
    Architecture("BERT, single head", hugging_face("Bert", **{**SIZES, "num_attention_heads": 1})),
    Architecture("BERT, no biases", without_biases),
    Architecture("RoBERTa", hugging_face("Roberta", **SIZES)),
    Architecture("DistilBERT", hugging_face("DistilBert", **DISTILBERT)),
    Architecture(
        "ALBERT", hugging_face("Albert", **{**SIZES, "embedding_size": 20, "num_hidden_layers": 3})
    ),
    Architecture("ELECTRA", hugging_face("Electra", **SIZES, embedding_size=20)),
    Architecture(
        "MPNet", hugging_face("MPNet", **SIZES), partial(encoder, position="bias"),
        attentions=("eager",),
    ),
    Architecture(
        "DeBERTa-v2", hugging_face("DebertaV2", **DEBERTA), disentangled, attentions=("eager",)
    ),
    Architecture("ViT", hugging_face("ViT", **IMAGE), inputs=PIXELS),
    Architecture("DeiT", hugging_face("DeiT", **IMAGE), inputs=PIXELS),
    Architecture("CLIP text", hugging_face("CLIPText", **SIZES)),
    Architecture("CLIP vision", hugging_face("CLIPVision", **IMAGE), inputs=PIXELS),
    Architecture("GPT-2", hugging_face("GPT2", **GPT2, use_cache=False)),
    Architecture("GPT-2, cached", hugging_face("GPT2", **GPT2), encoder, CACHED, cached_states),
    Architecture("OPT", hugging_face("OPT", **SIZES, ffn_dim=40, word_embed_proj_dim=24)),
    Architecture("BART", hugging_face("Bart", **TWO_STACKS), encoder_decoder, TWO_TEXTS),
    Architecture(
        "BART decoder, cached", hugging_face("Bart", "decoder", **BART_DECODER), cross_decoder,
        CACHED_CROSS, cached_cross_states,
    ),
    Architecture("Marian", hugging_face("Marian", **TWO_STACKS), encoder_decoder, TWO_TEXTS),
    Architecture("T5", hugging_face("T5", **T5), t5_layers, TWO_TEXTS),
    Architecture(
        "Whisper encoder", hugging_face("Whisper", "encoder", **WHISPER), speech_encoder,
        {"input_features": ("batch", 10, 30)},
    ),
    Architecture(
        "Whisper decoder", hugging_face("Whisper", "decoder", **WHISPER), cross_decoder,
        {**TEXT, "encoder_hidden_states": ("batch", 15, 24)},
    ),
    Architecture("Llama", hugging_face("Llama", **GROUPED), rotary_encoder),
    Architecture(
        "Llama, cached", hugging_face("Llama", **{**GROUPED, "use_cache": True}), rotary_encoder,
        CACHED, cached_states,
    ),
    Architecture("Qwen3", hugging_face("Qwen3", **GROUPED), rotary_encoder),
    Architecture(
        "Qwen3, cached", hugging_face("Qwen3", **{**GROUPED, "use_cache": True}), rotary_encoder,
        CACHED, cached_states,
    ),
    Architecture(
        "Gemma", hugging_face("Gemma", **{**GROUPED, "num_key_value_heads": 1}), rotary_encoder
    ),
    Architecture("fixed head size", fixed_head_size, call=tensor),
    Architecture("ModernBERT", hugging_face("ModernBert", **MODERN), rotary_encoder),
    Architecture("NomicBERT", hugging_face("NomicBert", **SIZES), rotary_encoder),
    Architecture("XLM-R", hugging_face("XLMRoberta", **SIZES)),
    Architecture("BGE-M3", three_heads, call=three_outputs),
    Architecture("Snowflake Arctic", hugging_face("Bert", **SIZES), call=first_pooled),
    Architecture(
        "jina-v2 (ALiBi)", alibi_encoder, partial(encoder, position="bias"), call=tensor
    ),
    Architecture(
        "jina-v3", hugging_face("JinaEmbeddingsV3", **SIZES), rotary_encoder, call=mean_pooled
    ),
    Architecture(
        "DeBERTa-v3", hugging_face("DebertaV2", **DEBERTA_V3), disentangled, attentions=("eager",)
    ),
    Architecture(
        "EmbeddingGemma", hugging_face("Gemma3Text", **GEMMA3, use_bidirectional_attention=True),
        gemma3_layers, call=mean_pooled,
    ),
    Architecture(
        "Qwen3-Embedding", hugging_face("Qwen3", **GROUPED), rotary_encoder, call=last_pooled
    ),
    Architecture(
        "Qwen3-Reranker", hugging_face("Qwen3", model="ForCausalLM", **GROUPED), rotary_encoder,
        call=yes_or_no,
    ),
    Architecture("Gemma 3", hugging_face("Gemma3Text", **GEMMA3), gemma3_layers),
    Architecture("GPT-NeoX", hugging_face("GPTNeoX", **SIZES), rotary_encoder),
    Architecture("SigLIP text", hugging_face("SiglipText", **SIZES)),
    Architecture(
        "SigLIP pooling head", pooling_network, pooling,
        {"hidden_state": ("batch", "source", 24)}, tensor, ("sdpa",),
    ),
    Architecture("DINOv2", hugging_face("Dinov2", **IMAGE), inputs=PIXELS),
    Architecture(
        "DINOv3", hugging_face("DINOv3ViT", **IMAGE, num_register_tokens=2), rotary_encoder, PIXELS
    ),
    Architecture("Swin-v2", hugging_face("Swinv2", **SWIN), windows, SQUARE, attentions=("eager",)),
    Architecture("DETR", detection_network, encoder_decoder, FEATURES, tensor),
    Architecture("SAM mask decoder", mask_decoder_network, mask_decoder, PROMPTED, masks),
    Architecture("Wav2Vec2", hugging_face("Wav2Vec2", **SPEECH), encoder, RAW_AUDIO),
    Architecture("torch.nn", torch_encoder, call=tensor, attentions=("sdpa",)),
    Architecture(
        "torch.nn, fixed length", torch_encoder, encoder,
        {"input_ids": ("batch", 7), "attention_mask": ("batch", 7)}, tensor, ("sdpa",),
    ),
)  # fmt: skip
ARCHITECTURES = {architecture.name: architecture for architecture in TABLE}

# ---- exports -------------------------------------------------------------------------------------

EXPORTERS: tuple[tuple[Exporter, int], ...] = (("torchscript", 17), ("dynamo", 18), ("dynamo", 23))
OLD_OPSETS = (11, 12, 13, 14, 15, 16, 18)

UNREAD = frozenset({"DINOv3"})
"""Architectures whose attention is not matched, for the reasons that docs/support.md gives."""

COMMITTED = (
    Cell("BERT", "eager", "torchscript", 17),
    Cell("BERT, single head", "sdpa", "dynamo", 23),
    Cell("BERT, no biases", "eager", "dynamo", 18),
    Cell("RoBERTa", "sdpa", "torchscript", 17),
    Cell("DistilBERT", "sdpa", "dynamo", 18),
    Cell("ALBERT", "sdpa", "torchscript", 17),
    Cell("ELECTRA", "eager", "dynamo", 23),
    Cell("MPNet", "eager", "dynamo", 18),
    Cell("DeBERTa-v2", "eager", "torchscript", 17),
    Cell("ViT", "sdpa", "dynamo", 23),
    Cell("DeiT", "eager", "dynamo", 18),
    Cell("CLIP text", "sdpa", "dynamo", 18),
    Cell("CLIP vision", "eager", "torchscript", 17),
    Cell("GPT-2", "eager", "torchscript", 11),
    Cell("GPT-2, cached", "eager", "torchscript", 17),
    Cell("OPT", "sdpa", "dynamo", 23),
    Cell("BART", "eager", "dynamo", 18),
    Cell("BART decoder, cached", "sdpa", "dynamo", 18),
    Cell("Marian", "sdpa", "dynamo", 18),
    Cell("T5", "eager", "dynamo", 18),
    Cell("Whisper encoder", "sdpa", "dynamo", 23),
    Cell("Whisper decoder", "eager", "torchscript", 17),
    Cell("Llama", "eager", "dynamo", 18),
    Cell("Llama, cached", "sdpa", "torchscript", 17),
    Cell("Qwen3", "eager", "dynamo", 18),
    Cell("Qwen3, cached", "sdpa", "dynamo", 23),
    Cell("Gemma", "eager", "dynamo", 23),
    Cell("fixed head size", "sdpa", "dynamo", 18),
    Cell("torch.nn", "sdpa", "dynamo", 18),
    Cell("torch.nn, fixed length", "sdpa", "torchscript", 17),
    Cell("ModernBERT", "sdpa", "dynamo", 18),
    Cell("NomicBERT", "sdpa", "torchscript", 17),
    Cell("XLM-R", "eager", "torchscript", 17),
    Cell("BGE-M3", "sdpa", "dynamo", 18),
    Cell("Snowflake Arctic", "sdpa", "torchscript", 17),
    Cell("jina-v2 (ALiBi)", "sdpa", "torchscript", 17),
    Cell("jina-v3", "eager", "torchscript", 17),
    Cell("DeBERTa-v3", "eager", "torchscript", 17),
    Cell("EmbeddingGemma", "eager", "dynamo", 18),
    Cell("Qwen3-Embedding", "eager", "torchscript", 17),
    Cell("Qwen3-Reranker", "sdpa", "torchscript", 17),
    Cell("Gemma 3", "eager", "torchscript", 17),
    Cell("GPT-NeoX", "sdpa", "torchscript", 17),
    Cell("SigLIP text", "eager", "torchscript", 17),
    Cell("SigLIP pooling head", "sdpa", "dynamo", 18),
    Cell("DINOv2", "eager", "torchscript", 17),
    Cell("DETR", "eager", "torchscript", 17),
    Cell("SAM mask decoder", "sdpa", "torchscript", 17),
    Cell("Swin-v2", "eager", "torchscript", 17),
    Cell("Wav2Vec2", "eager", "torchscript", 17),
    Cell("BERT", "eager", "torchscript", 17, "fp16"),
)
"""One export per architecture, and one in half precision: ``python -m tests.fixtures.make`` writes
them to ``tests/fixtures/onnx``, where tests read them without torch."""

MINILM_EXPORTS = (
    ("sdpa", "torchscript", 17),
    ("eager", "torchscript", 17),
    ("sdpa", "dynamo", 18),
    ("sdpa", "dynamo", 23),
)
"""Attention, exporter and opset of the exports of the real encoder."""

EXTERNAL = (COMMITTED[2], COMMITTED[9])
"""Committed exports that keep their external data; the weights of the others are in the graph."""


def cells_of(architecture: Architecture) -> list[Cell]:
    """The exports of an architecture: those of ``EXPORTERS``, and more for a few architectures."""
    name, cells = architecture.name, list[Cell]()
    for attention in architecture.attentions:
        cells += [Cell(name, attention, *exporter) for exporter in EXPORTERS]
        if name in ("BERT", "GPT-2", "T5"):
            cells += [Cell(name, attention, "torchscript", opset) for opset in OLD_OPSETS]
        if name in ("BERT", "Llama"):
            halves: tuple[Variant, ...] = ("fp16", "bf16")
            cells += [Cell(name, attention, *to, half) for to in EXPORTERS[:2] for half in halves]
    if name == "BERT":
        cells += [Cell(name, "eager", "torchscript", opset, "dropout") for opset in (11, 17)]
    return cells


CELLS = [cell for architecture in TABLE for cell in cells_of(architecture)]
"""All cells: docs/support.md shows them, and ``make support`` exports them."""


def pairs_of(cell: Cell) -> set[tuple[Hashable, ...]]:
    """The pairs of properties of a cell that a covering subset has to have.

    Opsets are paired with families of architectures (those whose layers one function describes).
    """
    exporter = (cell.exporter, cell.opset)
    family = repr(ARCHITECTURES[cell.architecture].layers)
    by_architecture = itertools.product(
        [cell.architecture], (cell.exporter, cell.attention, cell.variant)
    )
    others = itertools.combinations((family, exporter, cell.attention, cell.variant), 2)
    return {*by_architecture, *others, (cell.exporter, cell.variant)}


def covering(cells: Sequence[Cell], chosen: Iterable[Cell]) -> tuple[Cell, ...]:
    """The chosen cells, and others until every pair of ``cells`` occurs; in the order of cells."""
    found = list(chosen)
    missing = set().union(*map(pairs_of, cells)).difference(*map(pairs_of, found))
    while missing:
        found.append(max(cells, key=lambda cell: len(pairs_of(cell) & missing)))
        missing -= pairs_of(found[-1])
    return tuple(cell for cell in cells if cell in found)


# ---- runs ----------------------------------------------------------------------------------------


def feeds(
    architecture: Architecture, lengths: Mapping[str, int] = LENGTHS
) -> dict[str, np.ndarray]:
    """Inputs at the given lengths; masks end in padding except in the first row."""
    rng = np.random.default_rng(0)
    made = {}
    for name, dims in architecture.inputs.items():
        shape = [
            dim if isinstance(dim, int) else sum(lengths[part] for part in dim.split(" + "))
            for dim in dims
        ]
        if name.endswith("ids"):
            made[name] = rng.integers(3, VOCABULARY, shape)  # the first ids are padding and ends
        elif name.endswith("mask"):
            kept = np.linspace(shape[1], shape[1] // 2, shape[0]).astype(int)
            made[name] = (np.arange(shape[1]) < kept[:, None]).astype(np.int64)
        else:
            made[name] = rng.standard_normal(shape).astype(np.float32)
    return made


def run(
    source: Path | ir.Model, architecture: Architecture, lengths: Mapping[str, int]
) -> list[np.ndarray]:
    """Run a graph in ONNX Runtime and return all outputs."""
    session = open_session(source, ONE_THREAD)
    made = feeds(architecture, lengths)
    values = {
        value.name: made[value.name].astype(TYPES[value.type]) for value in session.get_inputs()
    }
    return [np.asarray(output) for output in session.run(None, values)]


def assert_same_outputs(
    one: Path | ir.Model, other: Path | ir.Model, cell: Cell, tolerance: float = 1e-5
) -> None:
    """Two graphs have equal, finite outputs at both lengths.

    Exact rewrites differ in the order of sums only; outputs are about 1.
    """
    architecture = ARCHITECTURES[cell.architecture]
    for lengths in (LENGTHS, OTHER_LENGTHS):
        both = (run(each, architecture, lengths) for each in (one, other))
        for got, expected in zip(*both, strict=True):
            assert np.isfinite(expected).all()
            np.testing.assert_allclose(got, expected, atol=tolerance, rtol=tolerance)
