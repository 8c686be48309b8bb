"""Latencies of the configurations of a block, which ``search.block_timing`` measures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from attnserve.planning.blocks.configurations import BlockConfig, BlockOperator

__all__ = ["BlockLatency"]


@dataclass(frozen=True, eq=False)
class BlockLatency:
    """Milliseconds of one block at each shape.

    Attributes:
        original: Latency as exported.
        operator: The fastest operator.
        configs: The latencies of each configuration with that operator.
        operators: The latencies of the whole block with each fused operator.
    """

    original: tuple[float, ...]
    operator: BlockOperator
    configs: Mapping[BlockConfig, tuple[float, ...]]
    operators: Mapping[BlockOperator, tuple[float, ...]]
