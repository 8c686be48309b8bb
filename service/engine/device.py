"""Where models are served: on a GPU where one can be used, and what is said where none can."""

from __future__ import annotations

import logging
import subprocess

from attnserve.runtime.session import require_runtime
from service.engine.isolation import environment, python
from service.settings import Settings

__all__ = ["on_device"]

ASK_S = 60
"""How long opening a session on a GPU may take."""

log = logging.getLogger("attnserve")


def on_device(settings: Settings) -> Settings:
    """``settings`` with a provider: "auto" becomes "cuda", or "cpu" and a line of the log why.

    The line is left out where nobody can have thought of a GPU: "auto" was not asked for by name,
    and ONNX Runtime is the build for CPUs.

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
    """Why no session opens on a GPU; empty where one does.

    A process of its own finds out: a broken driver may end it, and this one may never run a model.
    """
    try:
        done = subprocess.run(
            [*python("service.engine.device")],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=ASK_S,
            check=False,
            env=environment(),
        )
    except subprocess.TimeoutExpired:
        return f"no session opened on it within {ASK_S} s"
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"status {done.returncode}"]
        return f"the process that tried it ended: {said[-1][:200]}"
    return done.stdout.strip()


def main() -> None:
    """In the process that finds out: say why not, in a line, or nothing."""
    from attnserve.runtime.session import why_no_cuda

    print(why_no_cuda() or "")


if __name__ == "__main__":
    main()
