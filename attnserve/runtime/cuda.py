"""CUDA settings of a session and their ONNX Runtime provider options.

This module imports neither ONNX Runtime nor CUDA; ``onnx_runtime.py`` uses the options.
"""

from __future__ import annotations

from dataclasses import dataclass

from graph_passes.errors import InvalidArgument

__all__ = ["DEVICE", "PARITY", "ArenaShrinkPolicy", "Cuda"]

DEVICE = 0
"""Index of the first visible GPU; CUDA_VISIBLE_DEVICES selects which GPU is first."""


@dataclass(frozen=True)
class Cuda:
    """CUDA settings of a session.

    Attributes:
        tf32: Use TF32 for float32 matrix products (10 mantissa bits): faster, but without parity
            with the CPU. Half precision is not affected.
        memory_bytes: Maximum size of the session's arena (weights and activations); None for no
            limit. Memory of the CUDA libraries is not included.
        graphs: Allow CUDA graphs. ONNX Runtime refuses them for models with control flow or with
            operators that run on the CPU.

    Raises:
        InvalidArgument: ``memory_bytes`` is not positive.
    """

    tf32: bool = False
    memory_bytes: int | None = None
    graphs: bool = False

    def __post_init__(self) -> None:
        if self.memory_bytes is not None and self.memory_bytes < 1:
            raise InvalidArgument(
                f"`memory_bytes` is {self.memory_bytes}: expected at least 1",
                "leave it out for no limit",
                code="cuda.memory",
            )

    def provider_options(self) -> dict[str, str]:
        """Options of CUDAExecutionProvider as text.

        The arena grows by the requested size; ONNX Runtime's default doubles it.
        """
        options = {
            "device_id": str(DEVICE),
            "use_tf32": str(int(self.tf32)),
            "arena_extend_strategy": "kSameAsRequested",
        }
        if self.memory_bytes is not None:
            options["gpu_mem_limit"] = str(self.memory_bytes)
        if self.graphs:
            options["enable_cuda_graph"] = "1"
        return options


PARITY = Cuda()
"""Exact float32 products, for comparisons with the CPU."""


class ArenaShrinkPolicy:
    """Decide when a session frees unused GPU memory.

    Shrinking makes the next run allocate again. The arena is shrunk after ``calm`` consecutive runs
    that were each at most a ``quarter`` of the largest run since the last shrink.
    """

    calm = 64
    """Number of consecutive small runs after which the arena is shrunk."""

    quarter = 1 / 4
    """Maximum size of a small run, as a share of the largest."""

    def __init__(self) -> None:
        self._largest = self._recent = self._runs = 0

    def after(self, size: int) -> bool:
        """Record a run of this size (any measure of memory) and return whether to shrink now."""
        if size > self.quarter * self._largest:
            self._largest = max(self._largest, size)
            self._recent = self._runs = 0
            return False
        self._recent = max(self._recent, size)
        self._runs += 1
        if self._runs < self.calm:
            return False
        self._largest = self._recent
        self._recent = self._runs = 0
        return True
