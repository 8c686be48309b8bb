"""Resolve the execution provider "auto" to CUDA or the CPU."""

from __future__ import annotations

import logging

from attnserve.runtime.device import is_built_for_gpus, why_no_gpu
from service.settings import Settings

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
    why = why_no_gpu() if built else "this ONNX Runtime is the build for CPUs"
    if why and (built or "provider" in settings.model_fields_set):
        log.warning("no GPU is used, models are served on the CPU: %s", why)
    return settings.model_copy(update={"provider": "cpu" if why else "cuda"})
