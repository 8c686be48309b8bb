"""Lossless operator fusion: write a model in the operators that ONNX Runtime runs fastest.

Attention and GELU become one operator each, and residual sums and biases take as few nodes as
possible. Fusion is exact, except that sums are computed in another order. No fusion adds
multiply-accumulates: heads that share query and key dimensions keep their form. Serving fuses the
models that it loads (``planning.served_graph``). Every conversion of the precision fuses first.
Products with quantized weights do not change.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
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
    "fused_for_libraries",
    "fused_operators",
    "fusion_passes",
    "newest_opset",
    "older_operators",
    "raise_opset_for",
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
        is_timed_only: Skip certification, because the model is only timed.

    Raises:
        CannotRewrite: No block can be fused.
    """
    opsets = newest_opset(model).opset_imports
    analyses = Analyses.of(model)
    shapes = small_shapes(analyses)
    report = analyses.get(find_attention if is_timed_only else read_attention)
    gelus = fusible_gelus(model)
    reasons = [failure.reason for failure in report.unmatched]
    operators_by_block: dict[str, FusedOperator] = {}
    for block in report.blocks:
        if block.graph is not model.graph or block.idiom in IDIOMS.values():
            continue
        for operator in operators or ATTENTION_OPERATORS[provider]:
            refusal = fusion_refusal(block, operator, shapes, opsets)
            if refusal is None:
                operators_by_block[block.name] = operator
                break
            reasons.append(refusal.reason)
    if not operators_by_block and not gelus:
        raise CannotRewrite(
            f"no block can be written in a faster operator: {(reasons or ['none was found'])[0]}",
            "use the model as it is",
            code="fusion.nothing",
        )
    passes: list[RewritePass] = [FuseAttention(operators_by_block)] if operators_by_block else []
    passes += [FuseGelu(gelus)] if gelus else []
    return (*passes, FoldBiases(), RESIDUAL_PASSES[provider][0]())


def older_operators(operators: Iterable[FusedOperator]) -> list[FusedOperator]:
    """The operators that need no new opset.

    Some versions of ONNX Runtime lack the newer ones, or have no fast kernel for them.
    """
    return [operator for operator in operators if operator not in OPSETS]


def fused_operators(passes: Iterable[RewritePass]) -> dict[str, FusedOperator]:
    """The operator of each attention block that the passes fuse."""
    return {
        name: operator
        for graph_pass in passes
        if isinstance(graph_pass, FuseAttention)
        for name, operator in graph_pass.targets.items()
    }


def newest_opset(model: ir.Model) -> ir.Model:
    """A copy in the newest opset that an operator needs; in its own if it cannot be converted."""
    newest = model.clone()
    with suppress(CannotRewrite):
        raise_opset(newest, max(OPSETS.values()))
    return newest


def raise_opset_for(passes: Iterable[RewritePass], model: ir.Model) -> None:
    """Raise the opset of a model to the opset that the fused operators of the passes need.

    Raises:
        CannotRewrite: The model cannot be converted.
    """
    operators = fused_operators(passes).values()
    raise_opset(model, max((OPSETS.get(operator, 0) for operator in operators), default=0))


def fuse(model: ir.Model, passes: Sequence[RewritePass], *, is_timed_only: bool = False) -> None:
    """Run fusion passes on a model in place, and certify the attention that they rewrite.

    Args:
        is_timed_only: Skip certification, because the model is only timed.

    Raises:
        CannotRewrite: The model cannot be converted to the opset of an operator.
        InvalidModel: A rewritten block fails certification, or costs more than before.
    """
    macs_before = [] if is_timed_only else [count_macs(model, workload) for workload in COUNTED]
    raise_opset_for(passes, model)
    for graph_pass in passes:
        graph_pass(model)
    if is_timed_only:
        return
    certified = {block.name for block in Analyses.of(model).get(read_attention).blocks}
    for workload, old_macs in zip(COUNTED, macs_before, strict=True):
        new_macs = count_macs(model, workload)
        if old_macs is not None and new_macs is not None and new_macs > old_macs:
            raise InvalidModel(
                f"the fused model has {new_macs} MACs at {workload} tokens, and the original"
                f" {old_macs}",
                DEFECT,
                code="internal.fusion_macs",
            )
    if lost_names := sorted(fused_operators(passes).keys() - certified):
        raise InvalidModel(
            f"{lost_names[0]} is not certified after its fusion",
            DEFECT,
            code="internal.certificate",
        )


def fuse_for(
    model: ir.Model,
    precision: Precision = "float32",
    provider: Provider = "cpu",
    *,
    is_timed_only: bool = False,
) -> tuple[ir.Model, tuple[RewritePass, ...]]:
    """Fuse operators in a copy of a float32 model, as far as a precision allows.

    The copy may be converted to the precision afterwards: operators that contain the projections
    are left out for integers.

    Args:
        precision: The precision in which the model will run.
        provider: The processor of the model; half precision is for GPUs.
        is_timed_only: Skip certification, because the model is only timed.

    Returns:
        A fused copy and its passes; the model itself and no passes if nothing can be fused, or a
        fused block fails certification (the log has the reason).
    """
    scheme = SCHEMES[precision]
    runs_on: Provider = "cuda" if scheme.provider == "cuda" else provider
    operators: Sequence[FusedOperator] = ATTENTION_OPERATORS[runs_on]
    if scheme.allows_float_blocks:
        operators = [operator for operator in operators if operator not in PROJECTING]
    try:
        copy, passes = _fused_copy(model, runs_on, operators, is_timed_only=is_timed_only)
        if is_timed_only or _is_loaded(copy):
            return copy, passes
        return _fused_copy(model, runs_on, older_operators(operators))
    except CannotRewrite:
        return model, ()
    except InvalidModel as error:  # a defect of the fusion: the model is used without it
        log.warning("operators are not fused: %s", error.what)
        return model, ()


def fused_for_libraries(model: ir.Model, provider: Provider = "cpu") -> ir.Model:
    """The form in which libraries load a model that attnserve does not serve: fused.

    A model with quantized weights is returned as it is: conversions fuse before they write them.
    """
    return model if quantized_node(model) is not None else fuse_for(model, provider=provider)[0]


def _fused_copy(
    model: ir.Model,
    provider: Provider,
    operators: Sequence[FusedOperator],
    *,
    is_timed_only: bool = False,
) -> tuple[ir.Model, tuple[RewritePass, ...]]:
    """A fused copy of a model, and its passes."""
    copy = model.clone()
    passes = fusion_passes(copy, provider, operators, is_timed_only=is_timed_only)
    fuse(copy, passes, is_timed_only=is_timed_only)
    return copy, passes


def _is_loaded(model: ir.Model) -> bool:
    """Whether ONNX Runtime loads the model; tested only for the opset of the newest operators."""
    if model.opset_imports.get("", 0) < max(OPSETS.values()):
        return True
    with suppress(InvalidModel):
        open_session(model)
        return True
    return False
