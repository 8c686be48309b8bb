"""A request for rewrites by hand: the layers that it names, and which rewrites they allow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import onnx_ir as ir

from attnserve.job import Job
from attnserve.options import Rewrites
from attnserve.planning.heads.files import layer_name
from attnserve.runtime.interface import Batch
from graph_passes.analyses import Analyses
from graph_passes.blocks import AttentionBlock, Block
from graph_passes.errors import InvalidArgument, Refusal
from graph_passes.passes.base import AttentionPass

__all__ = ["Request"]

IN_BODY = Refusal("in_body", "it lies in the body of another node, which a session cannot observe")

STRIP_FIRST = (
    "layers are chosen before the cache is removed: run `strip_cache` alone, and rewrite its result"
)


@dataclass(eq=False)
class Request:
    """The rewrites that are requested of a model.

    Attributes:
        warnings: Receives the reasons of layers that are left as they are.
    """

    rewrites: Rewrites
    job: Job
    analyses: Analyses
    warnings: list[str] = field(default_factory=list[str])

    @property
    def model(self) -> ir.Model:
        return self.analyses.model

    @property
    def blocks(self) -> tuple[AttentionBlock, ...]:
        return self.job.matches.blocks

    @property
    def names(self) -> list[str]:
        return [block.name for block in self.blocks]

    @property
    def by_name(self) -> dict[str, AttentionBlock]:
        return {block.name: block for block in self.blocks}

    @property
    def requested_layers(self) -> list[str]:
        """The layers that the request names; all if it names none."""
        layers = self.rewrites.layers
        if layers is None:
            return self.names
        return list(dict.fromkeys(layer_name(layer, self.names) for layer in layers))

    def applicable_blocks(
        self, names: Sequence[str], rewrite: type[AttentionPass[Any]]
    ) -> list[AttentionBlock]:
        """The blocks that a rewrite applies to.

        Raises:
            CannotRewrite: The rewrite refuses a layer that the request names.
        """
        blocks: list[AttentionBlock] = []
        for block in self.blocks:
            if block.name not in names:
                continue
            refusal = rewrite.refusal(block, None, self.analyses)
            if refusal is None:
                blocks.append(block)
            elif self.rewrites.layers is not None:
                raise refusal.error(block.name, "leave this layer out of `layers`")
            else:
                self.leave(block, refusal)
        return blocks

    def leave(self, block: AttentionBlock, refusal: Refusal) -> None:
        """Warn that a layer is not rewritten."""
        self.warnings.append(f"{block.name} is left as it is: {refusal}")
        is_cached = refusal.code in ("returned", "cached")
        if self.rewrites.strip_cache and is_cached and STRIP_FIRST not in self.warnings:
            self.warnings.append(STRIP_FIRST)

    def body_refusal(self, block: Block) -> Refusal | None:
        """Why a block cannot be measured, if it lies in the body of a node; None if it can."""
        return None if block.graph is self.model.graph else IN_BODY

    def batches(self, why: str, otherwise: str) -> Sequence[Batch]:
        """The calibration rows.

        Args:
            why: Their purpose, for the error.
            otherwise: The fix for a request without data.

        Raises:
            InvalidArgument: There is no data.
        """
        if self.job.data is None:
            raise InvalidArgument(
                f"{why}, and there is no data",
                f"give `calib`, or {otherwise}",
                code="request.no_data",
            )
        return self.job.data.fit
