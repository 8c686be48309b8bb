"""Resolve the execution provider "auto" to CUDA or the CPU."""

from __future__ import annotations

import logging

from attnserve.runtime.isolation import allowed_environment, run_isolated
from attnserve.runtime.session import require_runtime, why_no_cuda
from graph_passes.errors import AttnserveError
from service.settings import Settings

__all__ = ["on_device"]

TIMEOUT_S = 60
"""Time limit of opening a session on a GPU."""

log = logging.getLogger("attnserve")


def on_device(settings: Settings) -> Settings:
    """Return ``settings`` with the provider "auto" replaced by "cuda" or "cpu".

    A warning says why no GPU is used, unless "auto" is the default and ONNX Runtime is the CPU
    build.

    Raises:
        MissingExtra: ONNX Runtime is not installed.
    """
    if settings.provider != "auto":
        return settings
    built = "CUDAExecutionProvider" in require_runtime().get_available_providers()
    why = _why_no_gpu() if built else "this ONNX Runtime is the build for CPUs"
    if why and (built or "provider" in settings.model_fields_set):
        log.warning("no GPU is used, models are served on the CPU: %s", why)
    return settings.model_copy(update={"provider": "cpu" if why else "cuda"})


def _why_no_gpu() -> str:
    """The reason why no session opens on a GPU; empty if one does.

    A child process tries it, because a broken driver may end the process.
    """
    try:
        why = run_isolated(
            why_no_cuda, timeout_s=TIMEOUT_S, environment=allowed_environment(), silent=True
        )
    except AttnserveError as error:
        return f"no session opened on it: {error.what}"
    return why or ""
