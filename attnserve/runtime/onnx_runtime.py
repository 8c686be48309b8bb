"""The runtime ONNX Runtime. Only this module opens its sessions.

ONNX Runtime is an optional dependency (extra ``[cpu]`` or ``[gpu]``) and is imported on first use.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx
import onnx_ir as ir

from attnserve.context import Device, Provider
from attnserve.runtime import profile
from attnserve.runtime.cuda import DEVICE, Cuda
from attnserve.runtime.external_data import (
    PROTOBUF_LIMIT_BYTES,
    external_files,
    external_folder,
    map_external_data,
    release_mapped_pages,
    serialized,
    weight_bytes,
    without_content,
)
from attnserve.runtime.interface import DEFAULT_OPTIONS, Feed, RunFailed, SessionOptions, ValueInfo
from attnserve.runtime.machine import available_cores
from attnserve.runtime.memory_use import return_freed_memory
from attnserve.runtime.stop import STOP
from attnserve.runtime.workarounds import crashes, safe_copy, safe_graph
from graph_passes.errors import (
    AttnserveError,
    InvalidArgument,
    InvalidModel,
    MissingExtra,
)

__all__ = [
    "BufferDevice",
    "OnnxRuntime",
    "OnnxSession",
    "execution_providers",
    "placed",
    "require_runtime",
    "run_errors",
    "stoppable",
]

BufferDevice = Literal["cpu", "cuda"]
"""The device of buffers; "cpu" is for tests without a GPU."""


def require_runtime() -> Any:
    """Import the onnxruntime module, without telemetry unless the user asks for it.

    Raises:
        MissingExtra: ONNX Runtime is not installed.
    """
    # Set before the import: on some platforms, ONNX Runtime sends usage data to Microsoft.
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    try:
        import onnxruntime
    except ImportError as error:
        raise MissingExtra(
            "ONNX Runtime is not installed: it is needed to run the model",
            "pip install 'attnserve[cpu]' (or 'attnserve[gpu]' on a machine with an NVIDIA GPU)",
            code="extra.onnxruntime",
        ) from error
    return onnxruntime


class OnnxRuntime:
    """ONNX Runtime on the CPU, or on CUDA with operators without a CUDA kernel on the CPU.

    Without a usable CUDA device, "cuda" is an error, without a fallback to the CPU.
    """

    name = "onnxruntime"
    computes_bfloat16 = False
    size_multiple = 1
    short_rows: int | None = None

    def open(
        self, source: Path | ir.Model, device: Device, options: SessionOptions = DEFAULT_OPTIONS
    ) -> OnnxSession:
        """Open a model; above the protobuf limit, it is written to a temporary folder."""
        return _open(source, device, options)

    def version(self) -> str:
        """The version of ONNX Runtime."""
        return require_runtime().__version__

    def peak_bytes(self, source: Path, feed: Feed, device: Device) -> int | None:
        """The peak of the arena during a run, without weights outside of the arena.

        The peak is read from the profile of a separate session, because profiling takes time.
        """
        with tempfile.TemporaryDirectory(prefix="attnserve-", ignore_cleanup_errors=True) as folder:
            profiled = self.open(source, device, SessionOptions(profile=Path(folder) / "runs"))
            for _ in range(2):  # the first run allocates
                profiled.run(None, feed)
            return profile.peak_bytes(profiled.end_profiling())


class OnnxSession:
    """A session of ONNX Runtime.

    Args:
        native: An ``onnxruntime.InferenceSession``.
        weights: Arrays that the session shares; they must live as long as the session.
    """

    def __init__(self, native: Any, weights: Sequence[Any] = ()) -> None:
        self.native = native
        self._weights = weights

    @property
    def is_on_cuda(self) -> bool:
        """Whether the session runs on a GPU."""
        return "CUDAExecutionProvider" in self.native.get_providers()

    def get_inputs(self) -> Sequence[ValueInfo]:
        return self.native.get_inputs()

    def get_outputs(self) -> Sequence[ValueInfo]:
        return self.native.get_outputs()

    def run(self, names: Sequence[str] | None, feed: Feed, options: Any = None) -> list[np.ndarray]:
        """Run the model, with ``onnxruntime.RunOptions``; by default, ``STOP`` ends the run."""
        if options is None and STOP.get() is not None:
            options = stoppable(require_runtime().RunOptions())
        with run_errors(feed):
            return [np.asarray(array) for array in self.native.run(names, dict(feed), options)]

    def bind(self, feed: Feed) -> Callable[[], object]:
        """Return a function that runs the model on ``feed`` and waits for its outputs."""
        if self.is_on_cuda:
            inputs = {name: placed(array, "cuda") for name, array in feed.items()}
            binding = self.binding(inputs, "cuda")

            def run() -> None:
                with run_errors(feed):
                    self.native.run_with_iobinding(binding)
                    binding.synchronize_outputs()

            return run
        arrays = dict(feed)

        def run_on_cpu() -> object:
            with run_errors(feed):
                return self.native.run(None, arrays)

        return run_on_cpu

    def binding(
        self, inputs: Mapping[str, Any], device: BufferDevice, names: Sequence[str] | None = None
    ) -> Any:
        """Bind inputs and outputs (None: all); outputs are allocated on ``device``."""
        binding = self.native.io_binding()
        for name, value in inputs.items():
            binding.bind_ortvalue_input(name, value)
        for name in names or [value.name for value in self.get_outputs()]:
            binding.bind_output(name, device, DEVICE)
        return binding

    def end_profiling(self) -> Path:
        """Write the profile and return its path."""
        return Path(self.native.end_profiling())


def placed(array: np.ndarray, device: BufferDevice) -> Any:
    """Copy an array to the device."""
    return require_runtime().OrtValue.ortvalue_from_numpy(array, device, DEVICE)


def stoppable(options: Any) -> Any:
    """Connect ``STOP`` with these ``onnxruntime.RunOptions``, and return them."""
    if (stop := STOP.get()) is not None:
        stop.connect(lambda: setattr(options, "terminate", True))
    return options


@contextmanager
def run_errors(feed: Feed) -> Generator[None]:
    """Raise errors of a run as ``RunFailed``.

    Types, ranks and names are checked before a model is served, and a graph that loads is well
    formed: the remaining failures on the CPU are sizes and values of inputs, most often a sequence
    that is longer than the model's positions.
    """
    try:
        yield
    except AttnserveError:
        raise
    except Exception as error:  # onnxruntime has an exception class for each status
        raise RunFailed(_describe(error), feed, _kind(error)) from error


def _kind(error: Exception) -> Literal["inputs", "memory", "device"]:
    """The kind of a failed run, see ``RunFailed``."""
    text = str(error)
    if isinstance(error, MemoryError) or re.search(r"allocat|out of memory", text, re.IGNORECASE):
        return "memory"
    if type(error).__name__ in ("EPFail", "EngineError") or "CUDA failure" in text:
        return "device"
    return "inputs"


def _open(source: Path | ir.Model, device: Device, session_options: SessionOptions) -> OnnxSession:
    ort = require_runtime()
    options = _session_options(ort, device, session_options)
    providers = execution_providers(ort, device.provider, session_options.cuda)
    if isinstance(source, ir.Model):
        return _open_in_memory(ort, source, device, options, providers)
    patched = safe_graph(source)
    if patched is not None:
        return _open_in_memory(ort, patched, device, options, providers)
    content = [
        np.fromfile(source.parent / location, np.uint8) for location in session_options.copied
    ]
    if content:
        options.add_external_initializers_from_files_in_memory(
            list(session_options.copied), content, [array.size for array in content]
        )
    return OnnxSession(_start(ort, str(source), source.name, options, providers))


def _session_options(ort: Any, device: Device, session_options: SessionOptions) -> Any:
    """``onnxruntime.SessionOptions``, without external data."""
    options = ort.SessionOptions()
    options.log_severity_level = FATAL  # errors are raised as exceptions
    threads = device.threads or _quota()
    if device.threads:  # concurrent runs share the pool, and each has a thread of its own beside it
        threads = 1 + (threads - 1) * session_options.concurrency
    options.intra_op_num_threads = threads
    entry = FORCE_SPINNING_STOP if session_options.spinning else NO_SPINNING
    options.add_session_config_entry(*entry)
    if session_options.varied_shapes and device.provider == "cpu":  # not measured on GPUs
        options.enable_mem_pattern = False
    if not session_options.optimize:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.add_session_config_entry("session.disable_prepacking", "1")
    if session_options.profile is not None:
        options.enable_profiling = True
        options.profile_file_prefix = str(session_options.profile)
    return options


def _open_in_memory(
    ort: Any, source: ir.Model, device: Device, options: Any, providers: Sequence[Any]
) -> OnnxSession:
    """Open a model in memory, sharing its large weights with the session on the CPU."""
    name = source.graph.name or "the model in memory"
    if crashes(source):
        source = safe_copy(source)
    folder = external_folder(source)
    if folder is None and external_files(source):
        source = source.clone()
        map_external_data(source)
    weights = _shared_weights(source) if device.provider == "cpu" else {}
    if weight_bytes(source) >= 2**24:  # a large model
        return_freed_memory()
        release_mapped_pages(source)
    if _serialized_bytes(source, weights) < PROTOBUF_LIMIT_BYTES:
        if folder is not None:
            options.add_session_config_entry(EXTERNAL_FOLDER, str(folder))
        with without_content(source, weights):
            content = ir.to_proto(source).SerializeToString()
        values = [ort.OrtValue.ortvalue_from_numpy(array) for array in weights.values()]
        if values:
            options.add_external_initializers(list(weights), values)
        return OnnxSession(_start(ort, content, name, options, providers), values)
    with tempfile.TemporaryDirectory(prefix="attnserve-", ignore_cleanup_errors=True) as temporary:
        path = serialized(source, Path(temporary), limit_bytes=0)
        return OnnxSession(_start(ort, str(path), name, options, providers))


def _quota() -> int:
    """Number of usable cores if the process has a limit, which ONNX Runtime ignores; else 0."""
    cores = available_cores()
    return cores if cores < (os.cpu_count() or 1) else 0


FORCE_SPINNING_STOP = "session.force_spinning_stop", "1"
"""The setting that ends the busy waiting with each run. Without it, idle threads take the cores for
a while, which slows down the next run of another session."""

NO_SPINNING = "session.intra_op.allow_spinning", "0"

WARNING, FATAL = 2, 4
"""Levels of the log of ONNX Runtime."""

EXTERNAL_FOLDER = "session.model_external_initializers_file_folder_path"
"""The setting for the folder of the external data of a model in memory."""

SHARED_BYTES = 2**16
"""Minimum size of weights that are shared with a session instead of serialized, which would copy
them."""


def _shared_weights(model: ir.Model) -> dict[str, np.ndarray]:
    """Large constant initializers whose type ONNX Runtime accepts from numpy."""
    shared_weights: dict[str, np.ndarray] = {}
    for name, value in model.graph.initializers.items():
        tensor = value.const_value
        if tensor is None or value.is_graph_input() or tensor.nbytes < SHARED_BYTES:
            continue
        if isinstance(tensor, ir.ExternalTensor):  # ONNX Runtime maps its file
            continue
        if tensor.dtype in (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.INT64):
            shared_weights[name] = np.ascontiguousarray(tensor.numpy())
    return shared_weights


def _serialized_bytes(model: ir.Model, shared_weights: Mapping[str, np.ndarray]) -> int:
    """Size of the weights that are neither shared nor in files."""
    tensors = [v.const_value for v in model.graph.initializers.values()]
    mapped = sum(tensor.nbytes for tensor in tensors if isinstance(tensor, ir.ExternalTensor))
    return weight_bytes(model) - mapped - sum(array.nbytes for array in shared_weights.values())


def _start(ort: Any, source: str | bytes, name: str, options: Any, providers: Sequence[Any]) -> Any:
    """Create an ``onnxruntime.InferenceSession`` from a path or a serialized model.

    Args:
        name: Name of the model, for errors.

    Raises:
        InvalidModel: ONNX Runtime refuses the graph.
        InvalidArgument: No CUDA device is usable.
    """
    try:
        with _without_plugin_warning(ort) if len(providers) > 1 else nullcontext():
            session = ort.InferenceSession(source, options, providers=providers)
    except Exception as error:  # onnxruntime has an exception class for each status
        lacks_kernel = type(error).__name__ == "NotImplemented"  # the graph is valid
        if len(providers) == 1 and lacks_kernel and _holds_bfloat16(source):
            raise InvalidModel(
                f"{name}: the model computes in bfloat16, which ONNX Runtime does not support on "
                f"CPUs: {_describe(error)}",
                "set `provider` to cuda, or convert to float16, which also runs on a CPU",
                code="session.bfloat16_cpu",
            ) from error
        raise InvalidModel(
            f"{name}: ONNX Runtime refuses the graph: {_describe(error)}",
            "check the file with onnx.checker.check_model, or export it again",
            code="session.graph_refused",
        ) from error
    # Without a device, ONNX Runtime falls back to the CPU without an error.
    if len(providers) > 1 and "CUDAExecutionProvider" not in session.get_providers():
        raise InvalidArgument(
            "`provider` is cuda: this machine has no usable CUDA device.",
            "set `provider` to cpu",
            code="session.no_device",
        )
    return session


@contextmanager
def _without_plugin_warning(ort: Any) -> Generator[None]:
    """Suppress the warning of each session on CUDA that the provider is not a plugin.

    The level of the process log cannot be read, so it is set to the default level afterwards.
    """
    ort.set_default_logger_severity(FATAL)
    try:
        yield
    finally:
        ort.set_default_logger_severity(WARNING)


def execution_providers(ort: Any, provider: Provider, cuda: Cuda) -> Sequence[Any]:
    """The execution providers of a session, in order of preference.

    Raises:
        InvalidArgument: ONNX Runtime is not built for CUDA.
    """
    if provider == "cpu":
        return ["CPUExecutionProvider"]
    if hasattr(ort, "preload_dlls"):
        ort.preload_dlls()
    if "CUDAExecutionProvider" not in ort.get_available_providers():
        raise InvalidArgument(
            "`provider` is cuda: this ONNX Runtime has no CUDA execution provider.",
            "pip install 'attnserve[gpu]' for an NVIDIA GPU, or set `provider` to cpu",
            code="session.no_cuda",
        )
    return [("CUDAExecutionProvider", cuda.provider_options()), "CPUExecutionProvider"]


def _holds_bfloat16(source: str | bytes) -> bool:
    """Whether an initializer of a file or a serialized model is bfloat16."""
    if isinstance(source, bytes):
        model = onnx.load_model_from_string(source)
    else:
        model = onnx.load_model(source, load_external_data=False)
    weights = model.graph.initializer
    return any(weight.data_type == onnx.TensorProto.BFLOAT16 for weight in weights)


def _describe(error: BaseException) -> str:
    """The status, the node and the reason of an ONNX Runtime error: at most three of its lines.

    The status number and source locations of ONNX Runtime are omitted.
    """
    text = re.sub(r"^\[ONNXRuntimeError\] : \d+ : (\w+) : ", r"\1: ", str(error).strip())
    text = re.sub(
        r"Non-zero status code returned while running (\S+) node\. Name:'(.*?)' Status Message: ",
        r"\1 node '\2': ",
        text,
    )
    text = re.sub(r"/\S+:\d+ [^\n]*?\)( const)? ", "", text)
    lines = [line.strip()[:300] for line in text.splitlines() if line.strip()]
    return "; ".join(lines[:3]) or type(error).__name__
