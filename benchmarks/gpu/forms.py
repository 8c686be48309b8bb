"""All measured forms of an encoder: the original, other tools, and attnserve."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir

from attnserve.models.onnx_files import save_model
from benchmarks.gpu.encoder import FLOAT16, random_encoder, to_half
from graph_passes.emit.fused_attention import FusedOperator
from graph_passes.errors import CannotRewrite
from graph_passes.matching.feed_forward import find_feed_forward
from graph_passes.matching.find import find_attention
from graph_passes.passes.collaborate import Collaborate, factor
from graph_passes.passes.fuse_attention import FuseAttention, fusion_refusal
from graph_passes.passes.fuse_gelu import FuseGelu
from graph_passes.passes.fuse_skip_norm import FuseSkipNorm
from graph_passes.passes.prune_heads import PruneHeads
from graph_passes.passes.reuse_attention import ReuseAttention


@dataclass(frozen=True)
class Size:
    """The size of an encoder: layers, hidden size, heads per layer."""

    layers: int
    hidden: int
    heads: int

    def build(self, positions: int) -> ir.Model:
        """Return an encoder with random weights, of which half can be pruned."""
        return random_encoder(
            layers=self.layers,
            hidden=self.hidden,
            heads=self.heads,
            positions=positions,
            spare=True,
        )


SIZES = {
    "BERT-base": Size(12, 768, 12),
    "MiniLM": Size(6, 384, 12),
    "BERT-large": Size(24, 1024, 16),
}

ORIGINAL, FP16 = "fp32", "fp16"
THEIRS = (FP16, "ONNX Runtime fp16", "onnxscript fp16")
"""Forms of ONNX Runtime and onnxscript, in half precision."""


def as_exported(model: ir.Model, size: Size) -> ir.Model:
    return model


def in_float16(model: ir.Model, size: Size) -> ir.Model:
    to_half(model)
    return model


def by_onnxruntime(model: ir.Model, size: Size) -> ir.Model:
    """Apply ONNX Runtime's transformer optimizer and its conversion to float16."""
    from onnxruntime.transformers.optimizer import optimize_model

    with tempfile.TemporaryDirectory(prefix="attnserve-") as folder:
        path = Path(folder) / "model.onnx"
        save_model(model, path)
        optimized = optimize_model(
            str(path),
            model_type="bert",
            num_heads=size.heads,
            hidden_size=size.hidden,
            opt_level=0,
            use_gpu=True,
        )
    fused = optimized.get_fused_operator_statistics()
    if fused["Attention"] + fused["MultiHeadAttention"] < size.layers:
        raise CannotRewrite(f"ONNX Runtime fused {fused['Attention']} layers of {size.layers}")
    optimized.convert_float_to_float16(keep_io_types=True)
    return ir.from_proto(optimized.model)


def by_onnxscript(model: ir.Model, size: Size) -> ir.Model:
    """Apply onnxscript's optimize_for_ort, in float16."""
    from onnxscript.rewriter.ort_fusions import optimize_for_ort

    optimized, _ = optimize_for_ort(model)
    if sum(node.op_type == "MultiHeadAttention" for node in optimized.graph) < size.layers:
        raise CannotRewrite(f"onnxscript did not fuse all of {size.layers} layers")
    to_half(optimized)
    return optimized


def fused(
    model: ir.Model, size: Size, half: ir.DataType = FLOAT16, operator: FusedOperator = "attention"
) -> ir.Model:
    """Fuse attention, GELU and residual norms into operators of ONNX Runtime (lossless)."""
    operators = {
        block.name: operator
        for block in find_attention(model).blocks
        if fusion_refusal(block, operator) is None
    }
    if operators:
        FuseAttention(operators)(model)
    FuseGelu([block.name for block in find_feed_forward(model)])(model)
    FuseSkipNorm()(model)
    to_half(model, half)
    return model


def fused_in_bfloat16(model: ir.Model, size: Size) -> ir.Model:
    return fused(model, size, ir.DataType.BFLOAT16)


def projecting_outside(model: ir.Model, size: Size) -> ir.Model:
    """Fuse with projections of queries, keys and values before the operator."""
    return fused(model, size, operator="multi_head")


def pruned(model: ir.Model, size: Size) -> ir.Model:
    """Prune every second head, and fuse."""
    _prune(model)
    return fused(model, size)


def sparse(model: ir.Model, size: Size) -> ir.Model:
    """Halve the head size by sparse mixing without sharing, and fuse.

    MultiHeadAttention has a fast kernel for keys that are shorter than values. Attention was not
    measured with them.
    """
    _shorten(model)
    return fused(model, size, operator="multi_head")


def pruned_and_sparse(model: ir.Model, size: Size) -> ir.Model:
    _prune(model)
    _shorten(model)
    return fused(model, size, operator="multi_head")


def reused(model: ir.Model, size: Size) -> ir.Model:
    """Reuse the probabilities of one layer in the next; no fused operator supports that."""
    blocks = find_attention(model).blocks
    ReuseAttention(
        {
            second.name: {head: (first.name, head) for head in range(size.heads)}
            for first, second in zip(blocks[::2], blocks[1::2], strict=False)
        }
    )(model)
    return fused(model, size)


FORMS: Mapping[str, Callable[[ir.Model, Size], ir.Model]] = {
    ORIGINAL: as_exported,
    FP16: in_float16,
    "ONNX Runtime fp16": by_onnxruntime,
    "onnxscript fp16": by_onnxscript,
    "fused fp16": fused,
    "MultiHeadAttention fp16": projecting_outside,
    "fused bf16": fused_in_bfloat16,
    "pruned fp16": pruned,
    "sparse fp16": sparse,
    "pruned and sparse fp16": pruned_and_sparse,
    "reused fp16": reused,
}
"""Functions that change a model, by form; those after ``THEIRS`` belong to attnserve."""

OURS = tuple(name for name in FORMS if name not in (ORIGINAL, *THEIRS))


def collaborative(model: ir.Model) -> ir.Model:
    """Return a copy with all layers in collaborative form at R = H*K, which is exact."""
    new = model.clone(deep_copy=True)
    factors = {b.name: factor(b, b.num_heads * b.head_size) for b in find_attention(new).blocks}
    Collaborate.with_factors(factors)(new)
    return new


def _prune(model: ir.Model) -> None:
    blocks = find_attention(model).blocks
    PruneHeads({b.name: [1 - head % 2 for head in range(b.num_heads)] for b in blocks})(model)


def _shorten(model: ir.Model) -> None:
    """Halve the head size; one dimension of each head holds the content term."""
    blocks = find_attention(model).blocks
    factors = {
        b.name: factor(b, b.num_heads * b.head_size, head_size=b.head_size // 2 - 1) for b in blocks
    }
    Collaborate.with_factors(factors, sparse=True)(model)
