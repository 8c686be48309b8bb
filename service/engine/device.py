"""Resolve the execution provider "auto" to CUDA or the CPU."""

from __future__ import annotations

import logging
import subprocess

from attnserve.runtime.session import require_runtime
from service.engine.isolation import environment, python
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
        done = subprocess.run(
            [*python("service.engine.device")],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TIMEOUT_S,
            check=False,
            env=environment(),
        )
    except subprocess.TimeoutExpired:
        return f"no session opened on it within {TIMEOUT_S} s"
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"status {done.returncode}"]
        return f"the process that tried it ended: {lines[-1][:200]}"
    return done.stdout.strip()


def main() -> None:
    """Print why CUDA cannot be used, or an empty line (in the child process)."""
    from attnserve.runtime.session import why_no_cuda

    print(why_no_cuda() or "")


if __name__ == "__main__":
    main()
