"""What a session asks of an NVIDIA GPU, in our words and in those of ONNX Runtime.

Nothing here needs a GPU, or ONNX Runtime: options are values, and ``session.py`` uses them.
"""

from __future__ import annotations

from dataclasses import dataclass

from graph_passes.errors import InvalidArgument

__all__ = ["PARITY", "ArenaShrinkPolicy", "Cuda", "run_entries"]

DEVICE = 0
"""The first GPU that the process may see: CUDA_VISIBLE_DEVICES chooses another."""


@dataclass(frozen=True)
class Cuda:
    """How a session uses the GPU.

    Attributes:
        tf32: Let products of float32 round their factors to 10 bits of mantissa: faster, and no
            parity any more. Half precision does not change.
        memory_bytes: The most that the session's arena may hold, weights and activations; None for
            all there is. What CUDA's libraries hold comes on top.
        graphs: Let runs be captured and replayed as CUDA graphs. Refused by ONNX Runtime for a
            model that has control flow, or an operator that CUDA does not have.

    Raises:
        InvalidArgument: ``memory_bytes`` is no positive number.
    """

    tf32: bool = False
    memory_bytes: int | None = None
    graphs: bool = False

    def __post_init__(self) -> None:
        if self.memory_bytes is not None and self.memory_bytes < 1:
            raise InvalidArgument(
                f"GPU memory is {self.memory_bytes} bytes: expected at least 1",
                "leave it out for all there is",
                code="cuda.memory",
            )

    def provider_options(self) -> dict[str, str]:
        """Options of CUDAExecutionProvider, all of them as text.

        The arena grows by what is asked for: by default it doubles, and keeps up to twice as much.
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
"""Exact products, for all that compares numbers."""


def run_entries(*, graph: int | None = None, shrink_arena: bool = False) -> dict[str, str]:
    """Configuration entries of one run on CUDA.

    Args:
        graph: Of a session with CUDA graphs: which one this run captures, the first time, and then
            replays, from 1; None captures nothing.
        shrink_arena: Return what the arena does not use at the end of the run. Only without CUDA
            graphs: those that were captured would replay into memory that is gone.
    """
    entries = {"gpu_graph_id": "-1" if graph is None else str(graph)}
    if shrink_arena:
        entries["memory.enable_memory_arena_shrinkage"] = f"gpu:{DEVICE}"
    return entries


class ArenaShrinkPolicy:
    """When a session returns memory to the device: after a peak, once runs are small again.

    Returning it costs the next run its allocations, so a run does it only after ``calm`` runs in a
    row of which none was larger than a ``quarter`` of the largest since the last time.
    """

    calm, quarter = 64, 1 / 4

    def __init__(self) -> None:
        self._largest = self._recent = self._runs = 0

    def after(self, size: int) -> bool:
        """Whether the run of this size (tokens, or anything that memory grows with) gives back."""
        if size > self.quarter * self._largest:
            self._largest = max(self._largest, size)
            self._recent = self._runs = 0
            return False
        self._recent = max(self._recent, size)
        self._runs += 1
        if self._runs < self.calm:
            return False
        self._largest, self._recent, self._runs = self._recent, 0, 0
        return True
