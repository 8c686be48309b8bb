"""Check in a child process whether a GPU can be used."""

from __future__ import annotations

from attnserve.runtime.isolation import allowed_environment, run_isolated
from attnserve.runtime.onnx_runtime import require_runtime
from attnserve.runtime.session import why_no_cuda
from graph_passes.errors import AttnserveError

__all__ = ["is_built_for_gpus", "why_no_gpu"]

TIMEOUT_S = 60
"""Time limit of opening a session on a GPU."""


def is_built_for_gpus() -> bool:
    """Whether ONNX Runtime is the build for GPUs.

    Raises:
        MissingExtra: ONNX Runtime is not installed.
    """
    return "CUDAExecutionProvider" in require_runtime().get_available_providers()


def why_no_gpu() -> str:
    """Return why no session can be opened on a GPU; empty if one can.

    The session is opened in a child process, because a broken driver may end the process.
    """
    try:
        why = run_isolated(
            why_no_cuda, timeout_s=TIMEOUT_S, environment=allowed_environment(), silent=True
        )
    except AttnserveError as error:
        return f"no session opened on it: {error.what}"
    return why or ""
