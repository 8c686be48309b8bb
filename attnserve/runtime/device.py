"""Check in a child process whether a GPU can be used."""

from __future__ import annotations

from functools import partial

from attnserve.runtime.isolation import allowed_environment, run_isolated
from attnserve.runtime.onnx_runtime import require_runtime
from attnserve.runtime.session import require_cuda
from graph_passes.errors import Refusal

__all__ = ["gpu_refusal", "is_built_for_gpus"]

TIMEOUT_S = 60
"""Time limit of opening a session on a GPU."""


def is_built_for_gpus() -> bool:
    """Whether ONNX Runtime is the build for GPUs.

    Raises:
        MissingExtra: ONNX Runtime is not installed.
    """
    return "CUDAExecutionProvider" in require_runtime().get_available_providers()


def gpu_refusal() -> Refusal | None:
    """Return why no session can be opened on a GPU; None if one can.

    The session is opened in a child process, because a broken driver may end the process.
    """
    check = partial(run_isolated, require_cuda, timeout_s=TIMEOUT_S, silent=True)
    return Refusal.of(partial(check, environment=allowed_environment()))
