"""Open a model in the runtime of a device."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from pathlib import Path

import onnx_ir as ir

from attnserve.context import AUTO, CPU, Device
from attnserve.runtime.inference_precision import computes_in_bfloat16
from attnserve.runtime.interface import DEFAULT_OPTIONS, Batch, Runtime, Session, SessionOptions
from attnserve.runtime.onnx_reader import read_in_place
from attnserve.runtime.onnx_runtime import OnnxRuntime
from attnserve.runtime.openvino_runtime import OpenVino, check_release
from graph_passes.errors import InvalidArgument, MissingExtra, OutdatedExtra
from graph_passes.registry import Registry

__all__ = [
    "RUNTIMES",
    "Batch",
    "OpenNew",
    "open_session",
    "require_cuda",
    "runtime_of",
    "runtimes_of",
    "selectable_runtimes",
    "warn_of_old_runtimes",
]

log = logging.getLogger(__name__)

RUNTIMES = Registry[Runtime]("runtime", OnnxRuntime(), OpenVino(), other_values=(AUTO,))
"""Runtimes by name (``Device.runtime``)."""

OpenNew = Callable[[ir.Model], Session]
"""Opens a model."""


def open_session(
    source: Path | ir.Model, device: Device = CPU, options: SessionOptions = DEFAULT_OPTIONS
) -> Session:
    """Open a model on disk or in memory.

    Raises:
        InvalidModel: The runtime refuses the graph.
        InvalidArgument: The provider is not available, or ``threads`` is negative.
        MissingExtra: The runtime is not installed.
    """
    if device.threads < 0:
        raise InvalidArgument(
            f"`threads` is {device.threads}: expected 0 or more",
            "set `threads` to 0 for the default",
            code="session.threads",
        )
    return RUNTIMES[runtime_of(source, device)].open(source, device, options)


def runtime_of(source: Path | ir.Model, device: Device) -> str:
    """The name of the runtime that opens a model on a device.

    ``AUTO`` is ONNX Runtime, or the runtime that computes the precision that the model states.
    """
    if device.runtime != AUTO or device.provider != "cpu":
        return device.runtime_name
    model = source if isinstance(source, ir.Model) else ir.from_proto(read_in_place(source))
    for runtime in RUNTIMES if computes_in_bfloat16(model) else ():
        if runtime.computes_bfloat16 and _is_usable(runtime.version):
            return runtime.name
    return device.runtime_name


def selectable_runtimes(device: Device) -> list[str]:
    """The names of the runtimes from which serving selects: all installed ones for ``AUTO``.

    The log warns of a runtime that is too old, once per process.

    Raises:
        InvalidArgument: The runtime is unknown.
    """
    if device.runtime != AUTO or device.provider != "cpu":
        return [RUNTIMES[device.runtime_name].name]
    return [runtime.name for runtime in RUNTIMES if _is_usable(runtime.version)]


def warn_of_old_runtimes(device: Device) -> None:
    """Warn as ``selectable_runtimes`` does, in a process that need not import the runtimes."""
    if device.runtime == AUTO and device.provider == "cpu":
        _is_usable(check_release)


def _is_usable(check: Callable[[], object]) -> bool:
    """Whether a check of a runtime passes; a runtime that is not installed needs no warning."""
    try:
        check()
    except OutdatedExtra as error:
        _warn_once(f"{error.what} ({error.fix}): it is not used")
    except MissingExtra:
        pass
    else:
        return True
    return False


@cache
def _warn_once(message: str) -> None:
    log.warning(message)


def runtimes_of(model: ir.Model, device: Device) -> list[str]:
    """The names of the runtimes that may run a model: ``runtime_of``, then the selectable ones."""
    return list(dict.fromkeys([runtime_of(model, device), *selectable_runtimes(device)]))


def require_cuda() -> None:
    """Check that CUDA can be used on this machine.

    The check opens a session, so the process allocates some GPU memory.

    Raises:
        AttnserveError: It cannot be used, or ONNX Runtime is not installed.
    """
    graph = ir.from_onnx_text(
        '<ir_version: 8, opset_import: ["" : 17]> g (float[n] x) => (float[n] y) { y = Exp(x) }'
    )
    open_session(graph, Device("cuda"))
