"""List the certified attention blocks of a model, with their cost and the rewrites that apply."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from attnserve.checks.certify import MatchReport, read_attention
from attnserve.models.artifact import model_file
from attnserve.models.onnx_files import load_model
from attnserve.models.rows import with_fixed_sizes
from attnserve.options import check_seed
from attnserve.paths import StrPath
from graph_passes.analyses import Analyses
from graph_passes.analysis.cost import infer_at, macs_at
from graph_passes.analysis.parameters import parameters
from graph_passes.analysis.workload import Workload
from graph_passes.errors import Refusal
from graph_passes.passes.base import AttentionPass
from graph_passes.passes.skip_attention import Skipped, skipped
from graph_passes.public import PASSES

__all__ = ["Inspection", "inspect"]


@dataclass(frozen=True, eq=False)
class Inspection:
    """Attention blocks and cost of a model at one batch size and sequence length."""

    matches: MatchReport
    block_macs: Mapping[str, int]
    parameters: int
    total_macs: int | None
    batch: int
    sequence: int
    uncounted: tuple[str, ...]
    rewrites: Mapping[str, Mapping[str, Refusal | None]]
    """Why a pass does not apply, by block and name of the pass; None if it does."""
    skipped: tuple[Skipped, ...] = ()

    @property
    def attention_macs(self) -> int:
        return sum(self.block_macs.values())

    def to_json(self) -> dict[str, Any]:
        return {
            "attention": [*self._blocks(), *map(self._gap, self.skipped)],
            "missed": [
                {"node": unmatched.node.name or unmatched.node.op_type, "reason": unmatched.reason}
                for unmatched in self.matches.unmatched
            ],
            "parameters": self.parameters,
            "macs": {
                "batch": self.batch,
                "sequence": self.sequence,
                "total": self.total_macs,
                "attention": self.attention_macs,
            },
            "uncounted": list(self.uncounted),
        }

    def _blocks(self) -> list[dict[str, Any]]:
        return [
            {
                "name": block.name,
                "kind": block.kind,
                "num_heads": block.num_heads,
                "num_kv_heads": block.num_kv_heads,
                "reused_heads": block.num_heads - block.q.num_heads,
                "head_size": block.head_size,
                "v_head_size": block.v_head_size,
                "input_size": block.input_size,
                "scale": block.scale,
                "position": block.position,
                "form": block.form,
                "idiom": block.idiom,
                "certified": True,
                "max_abs_error": certified.max_abs_error,
                "macs": self.block_macs[block.name],
                "rewrites": {
                    name: True if refusal is None else refusal.reason
                    for name, refusal in self.rewrites[block.name].items()
                },
            }
            for certified in self.matches.certified
            for block in (certified.block,)
        ]

    def _gap(self, gap: Skipped) -> dict[str, Any]:
        """The entry of a removed attention block, which is an affine map of its input."""
        sizes = ("num_heads", "num_kv_heads", "reused_heads", "head_size", "v_head_size")
        return {
            "name": gap.name,
            "kind": "self",
            **dict.fromkeys(sizes, 0),
            "input_size": 0 if gap.affine.weight is None else len(gap.affine.weight),
            "scale": 0.0,
            "position": "none",
            "form": "skip",
            "idiom": "skip",
            "certified": True,
            "max_abs_error": 0.0,
            "macs": self.block_macs[gap.name],
            "rewrites": dict.fromkeys(_rewrites(), "its attention was removed"),
        }


def inspect(model: StrPath, *, batch: int = 1, sequence: int = 128, seed: int = 0) -> Inspection:
    """Find and certify the attention blocks of a model and count its MACs.

    Args:
        model: An .onnx file or an artifact folder.
        batch, sequence: Shape for the MAC count; fixed axes keep their size.
        seed: Seed of the inputs that certify the blocks.

    Raises:
        InvalidModel: The file cannot be read.
        InvalidArgument: ``seed`` is negative.
        MissingExtra: ONNX Runtime, which certifies the blocks, is not installed.
    """
    check_seed(seed)
    graph = load_model(model_file(model), in_place=True)
    return inspect_graph(graph, batch=batch, sequence=sequence, seed=seed)


def inspect_graph(model: ir.Model, *, batch: int, sequence: int, seed: int = 0) -> Inspection:
    """Find and certify the attention blocks of a model in memory; see ``inspect``."""
    workload = with_fixed_sizes(model, Workload.of(batch, sequence))
    analyses = Analyses.of(model)
    matches = analyses.get(read_attention, seed=seed)
    gaps = skipped(model)
    kinds = _rewrites().items()
    rewrites = {
        block.name: {name: kind.refusal(block, None, analyses) for name, kind in kinds}
        for block in matches.blocks
    }
    info = infer_at(model, workload)
    total, uncounted = macs_at(info, model.graph)
    return Inspection(
        matches=matches,
        block_macs={
            place.name: macs_at(info, place.nodes)[0] for place in (*matches.blocks, *gaps)
        },
        parameters=parameters(model),
        total_macs=total if not uncounted else None,
        batch=workload.batch,
        sequence=workload.length,
        uncounted=uncounted,
        rewrites=rewrites,
        skipped=tuple(gaps),
    )


def _rewrites() -> dict[str, type[AttentionPass[Any]]]:
    """The lossy attention passes by name."""
    return {
        kind.name: kind
        for kind in sorted(PASSES, key=lambda kind: kind.name)
        if issubclass(kind, AttentionPass) and kind.lossy
    }
