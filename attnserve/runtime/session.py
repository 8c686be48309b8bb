"""Open a model in the runtime of a device."""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir

from attnserve.context import CPU, Device
from attnserve.plugins import Registry
from attnserve.runtime.cuda import PARITY, Cuda
from attnserve.runtime.interface import Batch, Runtime, Session, SessionOptions
from attnserve.runtime.onnx_runtime import OnnxRuntime
from attnserve.runtime.openvino_runtime import OpenVino
from graph_passes.errors import AttnserveError, InvalidArgument

__all__ = ["RUNTIMES", "Batch", "open_session", "why_no_cuda"]

RUNTIMES = Registry[Runtime]("runtime", OnnxRuntime(), OpenVino())
"""Runtimes by name (``Device.runtime``)."""


def open_session(
    source: Path | ir.Model,
    device: Device = CPU,
    *,
    optimize: bool = True,
    spinning: bool = True,
    cuda: Cuda = PARITY,
    copied: tuple[str, ...] = (),
    profile: Path | None = None,
) -> Session:
    """Open a model on disk or in memory; see ``SessionOptions``.

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
    options = SessionOptions(optimize, spinning, cuda, copied, profile)
    return RUNTIMES[device.runtime_name].open(source, device, options)


def why_no_cuda() -> str | None:
    """Return why CUDA cannot be used on this machine; None if it can.

    The check opens a session, so the process allocates some GPU memory.

    Raises:
        MissingExtra: ONNX Runtime is not installed.
    """
    graph = ir.from_onnx_text(
        '<ir_version: 8, opset_import: ["" : 17]> g (float[n] x) => (float[n] y) { y = Exp(x) }'
    )
    try:
        open_session(graph, Device("cuda"))
    except AttnserveError as error:
        return error.what
    return None
