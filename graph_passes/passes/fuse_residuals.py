"""FuseResiduals: write residual additions in the operator that runs fastest."""

from __future__ import annotations

from typing import ClassVar

import onnx_ir as ir

from graph_passes.analyses import Analyses
from graph_passes.analysis.constants import is_constant
from graph_passes.analysis.required import graph_of, input_of, producer_of
from graph_passes.emit.editing import Inserter, remove_unused, replace_uses
from graph_passes.passes.base import RewritePass

__all__ = ["FuseResiduals", "find_residuals", "residual_of"]


class FuseResiduals(RewritePass):
    """Write the sum before a LayerNormalization as Sum instead of Add.

    Before: y = LayerNormalization(Add(a, b))
    After:  y = LayerNormalization(Sum(a, b))

    Exact. ONNX Runtime fuses the first into SkipLayerNormalization, whose CPU kernel is slower than
    both nodes (ONNX Runtime 1.31). It does not fuse the second. On a GPU the first may be faster:
    measure.
    """

    name: ClassVar[str] = "fuse_residuals"
    order: ClassVar[int] = 130

    def rewrite_graph(self, analyses: Analyses) -> bool:
        norms = find_residuals(analyses.model)
        for added in dict.fromkeys(input_of(norm, 0) for norm in norms):
            node = producer_of(added)
            make = Inserter(graph_of(node), node, f"{added.name}/residual")
            replace_uses(added, make.op("Sum", list(node.inputs), "sum"))
        remove_unused(analyses.model)
        return bool(norms)


def find_residuals(model: ir.Model) -> list[ir.Node]:
    """All LayerNormalization nodes of a sum of two computed values."""
    norms: list[ir.Node] = []
    for node in model.graph.all_nodes():
        is_norm = node.op_type == "LayerNormalization" and not node.domain
        added = node.inputs[0] if is_norm else None
        adds = None if added is None else added.producer()
        if adds is None or adds.domain or adds.op_type != "Add":
            continue
        if not any(value is None or is_constant(value) for value in adds.inputs):
            norms.append(node)
    return norms


def residual_of(output: ir.Value) -> tuple[ir.Value, ir.Value] | None:
    """The residual that is added to a sublayer's output, and the sum.

    None if the output has readers other than one addition of two computed values.
    """
    users = [user for user, _ in output.uses()]
    if len(users) != 1 or output.is_graph_output() or len(users[0].inputs) != 2:
        return None
    adds = users[0]
    if adds.domain or adds.op_type not in ("Add", "Sum"):
        return None
    others = [value for value in adds.inputs if value is not output]
    if len(others) != 1 or others[0] is None or is_constant(others[0]):
        return None
    return others[0], adds.outputs[0]
