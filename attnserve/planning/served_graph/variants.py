"""The graphs that could serve a model, in each runtime."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir

from attnserve.fusion import fuse, fused_operators
from attnserve.models.onnx_files import data_file, save_model
from attnserve.runtime.external_data import weight_bytes
from graph_passes.matching.find import find_attention
from graph_passes.passes.base import RewritePass
from graph_passes.passes.fuse_attention import FuseAttention

__all__ = ["MANY_VARIANTS_BYTES", "Variant", "list_variants"]

MANY_VARIANTS_BYTES = 300_000_000
"""Weight size above which only the fully fused variant is built, because each variant is a copy."""

MAX_VARIANTS = 4
"""Maximum number of fused variants that are timed; each is a session with its own weights."""


@dataclass(frozen=True)
class Variant:
    """An equivalent graph in a runtime.

    Attributes:
        passes: The fusion passes; none for the graph as it is.
        file: The file that it is written to.
        runtime: The name of the runtime.
    """

    passes: Sequence[RewritePass]
    file: Path
    runtime: str

    def write(self, model: ir.Model) -> None:
        """Write a copy of the model after the passes."""
        new = model.clone()
        if self.passes:
            fuse(new, self.passes)
        save_model(new, self.file)

    def remove(self) -> None:
        """Remove the file with its external data."""
        self.file.unlink(missing_ok=True)
        data_file(self.file).unlink(missing_ok=True)


def list_variants(
    model: ir.Model, passes: Sequence[RewritePass], path: Path, runtimes: Sequence[str]
) -> list[Variant]:
    """All variants in each runtime, all blocks fused first; nothing is written.

    The graph as it is counts only if several runtimes are compared.

    Args:
        path: The file of the first variant; the others are beside it.
    """
    fusions = _fusions(model, passes) if passes else []
    if len(runtimes) > 1:
        fusions = [*fusions, ()]
    names = (f"{path.stem}.{number}{path.suffix}" for number in range(1, len(fusions)))
    files = [path, *map(path.with_name, names)]
    return [
        Variant(fusion, file, runtime)
        for runtime in runtimes
        for fusion, file in zip(fusions, files, strict=True)
    ]


def _fusions(model: ir.Model, passes: Sequence[RewritePass]) -> list[Sequence[RewritePass]]:
    """Passes of variants: all blocks fused; then, for each kind of attention, all but that kind.

    Attention of a kind has the same operator, heads and widths, and so the same speed.
    """
    operators = fused_operators(passes)
    if weight_bytes(model) > MANY_VARIANTS_BYTES:
        return [passes]
    kinds: dict[Hashable, list[str]] = {}
    for block in find_attention(model).blocks:
        if block.name in operators:
            sizes = (block.num_heads, block.head_size, block.v_head_size, block.input_size)
            kinds.setdefault((operators[block.name], block.kind, *sizes), []).append(block.name)
    other_passes = [fusion for fusion in passes if not isinstance(fusion, FuseAttention)]
    fusions: list[Sequence[RewritePass]] = [passes]
    for names in kinds.values():
        rest = {name: operator for name, operator in operators.items() if name not in names}
        fusions.append([FuseAttention(rest), *other_passes] if rest else other_passes)
    return fusions[:MAX_VARIANTS]
