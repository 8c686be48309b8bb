"""Resolve the execution provider "auto" to CUDA or the CPU."""

from __future__ import annotations

import logging

from attnserve.runtime.device import gpu_refusal, is_built_for_gpus
from graph_passes.errors import Refusal
from service.settings import Settings

CPU_BUILD = Refusal("cpu_build", "this ONNX Runtime is the build for CPUs")

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
    built = is_built_for_gpus()
    refusal = gpu_refusal() if built else CPU_BUILD
    if refusal and (built or "provider" in settings.model_fields_set):
        log.warning("no GPU is used, models are served on the CPU: %s", refusal)
    return settings.model_copy(update={"provider": "cpu" if refusal else "cuda"})
