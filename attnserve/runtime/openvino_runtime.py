"""The runtime OpenVINO on the CPU: opening and compilation of models.

OpenVINO is an optional dependency (extra ``[openvino]``) and is imported on first use. It reads
ONNX, including the operators of com.microsoft that attnserve writes. OpenVINO differs from ONNX
Runtime in four ways; the first three are corrected:

* OpenVINO computes in bfloat16 by default where the CPU supports it. This module computes a model
  in its own types, unless the model states bfloat16 (``inference_precision``).
* OpenVINO reads outside of a table without an error. Each run compares indices with the table
  (``openvino_graph``).
* An omitted input keeps its last value, and arrays of another type are converted. Both are errors
  here (``openvino_session``).
* A compiled model returns outputs of a canceled run to later runs, also for a new request.
  ``stop.STOP`` therefore does not end a run.
"""

from __future__ import annotations

import tempfile
from contextlib import suppress
from functools import cache, partial
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import onnx_ir as ir

from attnserve.context import Device
from attnserve.runtime.by_length import LengthRunner
from attnserve.runtime.cache import read_private, write_atomically
from attnserve.runtime.external_data import serialized
from attnserve.runtime.inference_precision import computes_in_bfloat16
from attnserve.runtime.interface import DEFAULT_OPTIONS, Feed, Session, SessionOptions
from attnserve.runtime.machine import available_cores, has_matrix_unit
from attnserve.runtime.onnx_reader import read_in_place
from attnserve.runtime.openvino_graph import check_scales, observe_indices, remove_nan_tests
from attnserve.runtime.openvino_session import OpenVinoSession, describe_error
from graph_passes.errors import InvalidArgument, InvalidModel, MissingExtra, OutdatedExtra

__all__ = ["OLDEST", "OpenVino", "check_release", "require_openvino"]

OLDEST = (2026, 2)
"""The oldest accepted release: the tests compare results of this and later releases only."""

ONE_KERNEL_ABOVE = 256
"""Tokens of a row above which attention in bfloat16 is one kernel of OpenVINO, which never holds
all scores. It packs keys and values for the matrix unit (AMX), which costs more than it saves for
short rows. In float32, and without a matrix unit, separate operators gain little."""

SEPARATE_OPERATORS = {"SNIPPETS_MODE": "DISABLE"}
"""The setting of OpenVINO that keeps attention as separate operators."""

CHECKSUM_BYTES = 32
"""Size of the checksum at the start of a file with a compiled model."""

INSTALL = "pip install 'attnserve[openvino]'"


def check_release() -> None:
    """Check the release of OpenVINO without importing it.

    Raises:
        OutdatedExtra: It is too old.
        MissingExtra: OpenVINO is not installed.
    """
    try:
        installed = version("openvino")
    except PackageNotFoundError as error:
        raise MissingExtra("OpenVINO is not installed", INSTALL, code="extra.openvino") from error
    release = tuple(int(part) for part in installed.split(".")[:2] if part.isdecimal())
    if release < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise OutdatedExtra(
            f"OpenVINO {installed} is too old: expected {oldest} or later",
            f"pip install --upgrade 'openvino>={oldest}'",
            code="extra.openvino",
        )


def require_openvino() -> Any:
    """Import the openvino module, without telemetry unless the user asks for it.

    Raises:
        MissingExtra: OpenVINO is not installed, or too old (``OutdatedExtra``).
    """
    check_release()
    try:
        import openvino
    except ImportError as error:
        raise MissingExtra("OpenVINO is not installed", INSTALL, code="extra.openvino") from error
    return openvino


class OpenVino:
    """OpenVINO on the CPU."""

    name = "openvino"
    computes_bfloat16 = True
    size_multiple = 8

    @property
    def short_rows(self) -> int | None:
        return ONE_KERNEL_ABOVE if has_matrix_unit() else None

    def open(
        self, source: Path | ir.Model, device: Device, options: SessionOptions = DEFAULT_OPTIONS
    ) -> Session:
        """Open a model. ``options.optimize`` has no effect: OpenVINO always optimizes."""
        if device.provider != "cpu":
            raise InvalidArgument(
                f"`provider` is {device.provider}: OpenVINO runs on CPUs here",
                "set `provider` to cpu, or `runtime` to onnxruntime",
                code="session.provider",
            )
        if options.profile is not None:
            raise InvalidArgument(
                "OpenVINO writes no profile files",
                "set `runtime` to onnxruntime",
                code="session.profile",
            )
        return _open(require_openvino(), source, device, options, self.short_rows)

    def version(self) -> str:
        return require_openvino().get_version().partition("-")[0]

    def peak_bytes(self, source: Path, feed: Feed, device: Device) -> int | None:
        """Return None: models run in the memory of the process."""
        return None


@cache
def _core(openvino: Any, copied: bool) -> Any:
    """OpenVINO, which stays loaded: its CPU plugin replaces the stack of signal handlers.

    If two plugins are deleted in the order in which they were made, that stack is unmapped
    memory, and the next signal ends the process with a segmentation fault.
    """
    core = openvino.Core()
    if copied:
        core.set_property({"ENABLE_MMAP": False})
    return core


def _open(
    openvino: Any,
    source: Path | ir.Model,
    device: Device,
    options: SessionOptions,
    short_rows: int | None,
) -> Session:
    name = source.name if isinstance(source, Path) else source.graph.name or "the model in memory"
    core = _core(openvino, bool(options.copied))
    try:
        with tempfile.TemporaryDirectory(prefix="attnserve-", ignore_cleanup_errors=True) as folder:
            if isinstance(source, Path):
                described = ir.from_proto(read_in_place(source))
                model = core.read_model(source)
            else:
                described = source
                model = core.read_model(serialized(source, Path(folder)))
            check_scales(described.graph)
            remove_nan_tests(model)
            tables = observe_indices(model)
            in_bfloat16 = computes_in_bfloat16(described)
            threads = device.threads or available_cores()
            settings = {
                "INFERENCE_PRECISION_HINT": "bf16" if in_bfloat16 else "f32",
                "INFERENCE_NUM_THREADS": threads * options.concurrency,
                "NUM_STREAMS": options.concurrency,
                "ENABLE_CPU_PINNING": False,  # other sessions and processes share the cores
            }

            def compiled(kernels: dict[str, Any], file: Path | None = None) -> OpenVinoSession:
                compile = partial(_compiled, core, model, settings | kernels, file)
                return OpenVinoSession(compile, described.graph, tables, options.concurrency)

            if not in_bfloat16 or short_rows is None:
                return compiled({}, options.compiled)
            try:
                short = compiled(SEPARATE_OPERATORS, options.compiled)
            except RuntimeError:  # a release without this setting, which is not documented
                return compiled({}, options.compiled)

            def open_long() -> Session:
                with suppress(Exception):  # RuntimeError for everything, as for lack of memory
                    return compiled({})
                return short

            return LengthRunner(short, open_long, short_rows)
    except Exception as error:  # RuntimeError for everything
        raise InvalidModel(
            f"{name}: OpenVINO refuses the graph: {describe_error(error)}",
            "set `runtime` to onnxruntime",
            code="session.graph_refused",
        ) from error


def _compiled(core: Any, model: Any, settings: dict[str, Any], file: Path | None) -> Any:
    """Read the compiled model from ``SessionOptions.compiled``, or compile and write it."""
    if file is None:
        return core.compile_model(model, "CPU", settings)
    content = read_private(file) or b""
    checksum, blob = content[:CHECKSUM_BYTES], content[CHECKSUM_BYTES:]
    if checksum == sha256(blob).digest():  # damaged files can end the process
        with suppress(Exception):  # RuntimeError for everything
            return core.import_model(blob, "CPU", settings)
    compiled = core.compile_model(model, "CPU", settings)
    blob = compiled.export_model().getvalue()
    with suppress(OSError):  # the disk is full: the next process compiles again
        write_atomically(file, sha256(blob).digest() + blob)
    return compiled
