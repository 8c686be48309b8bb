"""Lossless operator fusion: write a model in the operators that ONNX Runtime runs fastest.

Attention and GELU become one operator each, and residual sums and biases take as few nodes as
possible. Fusion is exact, except that sums are computed in another order. No fusion adds
multiply-accumulates: heads that share query and key dimensions keep their form. Serving fuses the
models that it loads (``planning.served_graph``). Every conversion of the precision fuses first.
Products with quantized weights do not change.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress

import onnx_ir as ir

from attnserve.checks.certify import read_attention
from attnserve.context import Provider
from attnserve.literals import Precision
from attnserve.models.opset import raise_opset
from attnserve.models.quantized import quantized_node
from attnserve.precision.schemes import SCHEMES
from attnserve.runtime.session import open_session
from graph_passes.analyses import Analyses
from graph_passes.analysis.cost import count_macs
from graph_passes.analysis.workload import Workload
from graph_passes.emit.fused_attention import OPSETS, FusedOperator
from graph_passes.errors import CannotRewrite, InvalidModel
from graph_passes.matching.find import find_attention
from graph_passes.passes.base import RewritePass, small_shapes
from graph_passes.passes.fold_biases import FoldBiases
from graph_passes.passes.fuse_attention import IDIOMS, FuseAttention, fusion_refusal
from graph_passes.passes.fuse_gelu import FuseGelu, fusible_gelus
from graph_passes.passes.fuse_residuals import FuseResiduals
from graph_passes.passes.fuse_skip_norm import FuseSkipNorm

log = logging.getLogger(__name__)

__all__ = [
    "ATTENTION_OPERATORS",
    "DEFECT",
    "RESIDUAL_PASSES",
    "fuse",
    "fuse_for",
    "fused_copy",
    "fusion_passes",
]

DEFECT = "this is a defect of attnserve: please report it with the model; nothing was written"

ATTENTION_OPERATORS: Mapping[Provider, Sequence[FusedOperator]] = {
    "cpu": ("onnx", "attention", "multi_head"),
    "cuda": ("attention", "multi_head", "onnx"),
}
"""Attention operators, fastest first; the first that applies is used."""

PROJECTING: frozenset[FusedOperator] = frozenset({"attention", "merged"})
"""Operators that contain the projections; integer conversions cannot convert these."""

COUNTED = tuple(Workload.of(*shape) for shape in ((1, 1), (2, 1), (1, 512), (1, 4096)))
"""Workloads at which the MACs of the fused model are compared with the MACs of the original."""

RESIDUAL_PASSES: Mapping[Provider, Sequence[type[FuseResiduals | FuseSkipNorm]]] = {
    "cpu": (FuseResiduals,),
    "cuda": (FuseSkipNorm, FuseResiduals),
}
"""Passes for residual additions, usually fastest first; a search times them. On CPUs, ONNX Runtime
itself writes the operator of ``FuseSkipNorm``."""


def fusion_passes(
    model: ir.Model,
    provider: Provider = "cpu",
    operators: Sequence[FusedOperator] | None = None,
    *,
    is_timed_only: bool = False,
) -> tuple[RewritePass, ...]:
    """The passes that fuse every possible block.

    Args:
        operators: Attention operators, of which the first that applies is used; None for the
            ``ATTENTION_OPERATORS`` of the provider.
        is_timed_only: See ``fuse``.

    Raises:
        CannotRewrite: No block can be fused.
    """
    with Analyses.of(model) as analyses:
        return _fusion_passes(analyses, provider, operators, is_timed_only)


def _fusion_passes(
    analyses: Analyses,
    provider: Provider,
    operators: Sequence[FusedOperator] | None,
    is_timed_only: bool,
) -> tuple[RewritePass, ...]:
    model = analyses.model
    shapes = small_shapes(analyses)
    opsets = dict(model.opset_imports)
    with suppress(CannotRewrite):
        newest = model.clone()
        raise_opset(newest, max(OPSETS.values()))
        opsets = dict(newest.opset_imports)
    if is_timed_only:
        blocks, unmatched = analyses.get(find_attention)
    else:
        report = analyses.get(read_attention)
        blocks, unmatched = report.blocks, report.unmatched
    reasons = [failure.reason for failure in unmatched]
    operators_by_block: dict[str, FusedOperator] = {}
    for block in blocks:
        if block.graph is not model.graph or block.idiom in IDIOMS.values():
            continue
        for operator in operators or ATTENTION_OPERATORS[provider]:
            refusal = fusion_refusal(block, operator, shapes, opsets)
            if refusal is None:
                operators_by_block[block.name] = operator
                break
            reasons.append(refusal.reason)
    gelu = fusible_gelus(model)
    if not operators_by_block and not gelu:
        raise CannotRewrite(
            f"no block can be written in a faster operator: {(reasons or ['none was found'])[0]}",
            "use the model as it is",
            code="fusion.nothing",
        )
    fused: list[RewritePass] = [FuseAttention(operators_by_block)] if operators_by_block else []
    fused += [FuseGelu(gelu)] if gelu else []
    return (*fused, FoldBiases(), RESIDUAL_PASSES[provider][0]())


def fuse(model: ir.Model, passes: Sequence[RewritePass], *, is_timed_only: bool = False) -> None:
    """Run fusion passes on a model in place, and certify the attention that they rewrite.

    Args:
        is_timed_only: Skip certification, because the model is only timed.

    Raises:
        CannotRewrite: The model cannot be converted to the opset of an operator.
        InvalidModel: A rewritten block fails certification, or costs more than before.
    """
    attention = [graph_pass for graph_pass in passes if isinstance(graph_pass, FuseAttention)]
    operators: set[FusedOperator] = {
        operator for graph_pass in attention for operator in graph_pass.targets.values()
    }
    opset = max((OPSETS.get(operator, 0) for operator in operators), default=0)
    with Analyses.of(model) as analyses:
        macs_before = [] if is_timed_only else [count_macs(model, workload) for workload in COUNTED]
        if model.opset_imports.get("", 0) < opset:
            raise_opset(model, opset)
            analyses.invalidate()
        for graph_pass in passes:
            graph_pass(model)
        if is_timed_only:
            return
        certified = {block.name for block in analyses.get(read_attention).blocks}
    for workload, old_macs in zip(COUNTED, macs_before, strict=True):
        new_macs = count_macs(model, workload)
        if old_macs is not None and new_macs is not None and new_macs > old_macs:
            raise InvalidModel(
                f"the fused model has {new_macs} MACs at {workload} tokens, and the original"
                f" {old_macs}",
                DEFECT,
                code="internal.fusion_macs",
            )
    names = {name for graph_pass in attention for name in graph_pass.targets}
    if lost_names := sorted(names - certified):
        raise InvalidModel(
            f"{lost_names[0]} is not certified after its fusion",
            DEFECT,
            code="internal.certificate",
        )


def fuse_for(
    model: ir.Model,
    precision: Precision,
    provider: Provider = "cpu",
    *,
    is_timed_only: bool = False,
) -> tuple[RewritePass, ...]:
    """Fuse operators of a float32 model in place, as far as a precision allows.

    The model may be converted to the precision afterwards: operators that contain the projections
    are left out for integers.

    Args:
        precision: The precision in which the model will run.
        provider: The processor of the model; half precision is for GPUs.
        is_timed_only: See ``fuse``.

    Returns:
        The passes; none if nothing can be fused, or a fused block fails certification (the log has
        the reason).
    """
    scheme = SCHEMES[precision]
    runs_on: Provider = "cuda" if scheme.provider == "cuda" else provider
    operators: Sequence[FusedOperator] = ATTENTION_OPERATORS[runs_on]
    if scheme.allows_float_blocks:
        operators = [operator for operator in operators if operator not in PROJECTING]
    try:
        fused, passes = _fused_copy(model, runs_on, operators, is_timed_only=is_timed_only)
        if not (is_timed_only or _is_loaded(fused)):  # this ONNX Runtime lacks the new operators
            operators = [operator for operator in operators if operator not in OPSETS]
            fused, passes = _fused_copy(model, runs_on, operators)
    except CannotRewrite:
        return ()
    except InvalidModel as error:  # a defect of the fusion: convert the model without it
        log.warning("operators are not fused: %s", error.what)
        return ()
    model.graph = fused.graph
    model.functions.clear()
    model.functions.update(fused.functions)
    return passes


def fused_copy(model: ir.Model, provider: Provider = "cpu") -> ir.Model:
    """A copy with fused operators; the model itself if it has quantized weights.

    Conversions to integers fuse before they write such weights.
    """
    if quantized_node(model) is not None:
        return model
    copy = model.clone()
    fuse_for(copy, "float32", provider)
    return copy


def _fused_copy(
    model: ir.Model,
    provider: Provider,
    operators: Sequence[FusedOperator],
    *,
    is_timed_only: bool = False,
) -> tuple[ir.Model, tuple[RewritePass, ...]]:
    """A fused copy of a model, and its passes; see ``fusion_passes`` and ``fuse``."""
    fused = model.clone()
    with Analyses.of(fused):  # blocks are found once for the choice and for the first pass
        passes = fusion_passes(fused, provider, operators, is_timed_only=is_timed_only)
        fuse(fused, passes, is_timed_only=is_timed_only)
    return fused, passes


def _is_loaded(model: ir.Model) -> bool:
    """Whether ONNX Runtime loads the model; tested only for the opset of the newest operators."""
    if model.opset_imports.get("", 0) < max(OPSETS.values()):
        return True
    with suppress(InvalidModel):
        open_session(model)
        return True
    return False
