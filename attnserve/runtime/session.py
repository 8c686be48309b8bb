"""Open ONNX Runtime sessions; no other module does.

ONNX Runtime is an optional dependency (extra ``[cpu]`` or ``[gpu]``) and is imported on first use.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
import onnx
import onnx_ir as ir

from attnserve.context import Provider
from attnserve.runtime.cpu import available_cores
from attnserve.runtime.cuda import PARITY, Cuda
from attnserve.runtime.external_data import (
    external_files,
    external_folder,
    map_external_data,
    release_mapped_pages,
    without_content,
)
from attnserve.runtime.memory import return_freed_memory
from attnserve.runtime.workarounds import crashes, safe_copy, safe_graph
from graph_passes.errors import (
    AttnserveError,
    InvalidArgument,
    InvalidData,
    InvalidModel,
    MissingExtra,
)

if TYPE_CHECKING:
    import onnxruntime

__all__ = [
    "PROTOBUF_LIMIT_BYTES",
    "Batch",
    "cpu_name",
    "describe_error",
    "gpu_name",
    "lacks_kernels",
    "open_session",
    "output_of",
    "owned",
    "require_runtime",
    "run",
    "weight_bytes",
    "why_no_cuda",
]

Batch = dict[str, np.ndarray]
"""The inputs of one run, by name."""

LINES, LINE = 3, 300
"""Lines of an error of ONNX Runtime that are shown, and characters of each."""

PROTOBUF_LIMIT_BYTES = 2**31 - 2**20
"""A protobuf message is limited to 2 GiB; larger models need external data."""


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


def open_session(
    source: Path | ir.Model,
    *,
    provider: Provider = "cpu",
    threads: int = 0,
    optimize: bool = True,
    spinning: bool = True,
    cuda: Cuda = PARITY,
    profile: Path | None = None,
    copied: Sequence[str] = (),
) -> onnxruntime.InferenceSession:
    """Open a session for a model on disk or in memory.

    Args:
        source: An .onnx file, or a model in memory. A model above the protobuf limit is written to
            a temporary folder.
        provider: The execution provider. With "cuda", operators without a CUDA kernel run on the
            CPU. Without a usable CUDA device this is an error; there is no fallback to the CPU.
        threads: Intra-op threads; 0 for ONNX Runtime's default, or for the CPU quota of a container
            if that is less.
        optimize: False disables the graph optimizations of ONNX Runtime.
        spinning: Let idle threads wait actively, which is fastest for a session alone. The threads
            of sessions that take turns would occupy each other's cores: two or three times slower.
        cuda: CUDA settings; by default exact float32 products.
        profile: Path prefix of the file that ``end_profiling`` writes.
        copied: Locations of external data that is read into memory. ONNX Runtime maps other files:
            changing them changes the results, and truncating them ends the process.

    Raises:
        InvalidModel: ONNX Runtime refuses the graph.
        InvalidArgument: The provider is not available, or ``threads`` is negative.
        MissingExtra: ONNX Runtime is not installed.
    """
    if threads < 0:
        raise InvalidArgument(
            f"`threads` is {threads}: expected 0 or more",
            "set `threads` to 0 for the default",
            code="session.threads",
        )
    ort = require_runtime()
    options = ort.SessionOptions()
    options.log_severity_level = FATAL  # errors are raised as exceptions
    options.intra_op_num_threads = threads or _quota()
    if not spinning:
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    if not optimize:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.add_session_config_entry("session.disable_prepacking", "1")
    if profile is not None:
        options.enable_profiling, options.profile_file_prefix = True, str(profile)
    providers = _providers(ort, provider, cuda)
    if isinstance(source, Path):
        patched = safe_graph(source)
        if patched is None:
            content = [np.fromfile(source.parent / location, np.uint8) for location in copied]
            if content:
                options.add_external_initializers_from_files_in_memory(
                    list(copied), content, [array.size for array in content]
                )
            return _start(ort, str(source), source.name, options, providers)
        source = patched
    name = source.graph.name or "the model in memory"
    if crashes(source):
        source = safe_copy(source)
    folder = external_folder(source)
    if folder is None and external_files(source):
        source = source.clone()
        map_external_data(source)
    shared = _shared_weights(source) if provider == "cpu" else {}
    if weight_bytes(source) >= LARGE_BYTES:
        return_freed_memory()
        release_mapped_pages(source)
    if _serialized_bytes(source, shared) < PROTOBUF_LIMIT_BYTES:
        if folder is not None:
            options.add_session_config_entry(EXTERNAL_FOLDER, str(folder))
        with without_content(source, shared):
            content = ir.to_proto(source).SerializeToString()
        values = [ort.OrtValue.ortvalue_from_numpy(array) for array in shared.values()]
        if values:
            options.add_external_initializers(list(shared), values)
        session = _start(ort, content, name, options, providers)
        if values:
            _WEIGHTS[session] = values
        return session
    with tempfile.TemporaryDirectory(prefix="attnserve-", ignore_cleanup_errors=True) as temporary:
        path = Path(temporary) / "model.onnx"
        source = source.clone()
        map_external_data(source)
        ir.save(source, path, external_data="model.onnx.data")
        return _start(ort, str(path), name, options, providers)


def _quota() -> int:
    """Cores of this process if it may not use all, else 0. ONNX Runtime ignores CPU quotas."""
    cores = available_cores()
    return cores if cores < (os.cpu_count() or 1) else 0


WARNING, FATAL = 2, 4
"""Levels of the log of ONNX Runtime."""

EXTERNAL_FOLDER = "session.model_external_initializers_file_folder_path"
"""The setting for the folder of the external data of a model in memory."""

LARGE_BYTES = 2**24
"""Minimum size of the weights of a model in memory for which freed memory is returned first."""

SHARED_BYTES = 2**16
"""Minimum size of weights that are shared with a session instead of serialized. A session of
BERT-base opens in a third of the time."""

_WEIGHTS: WeakKeyDictionary[Any, list[Any]] = WeakKeyDictionary()
"""Shared weights by session, which must live as long as the session."""


def _shared_weights(model: ir.Model) -> dict[str, np.ndarray]:
    """Large constant initializers whose type ONNX Runtime accepts from numpy."""
    found: dict[str, np.ndarray] = {}
    for name, value in model.graph.initializers.items():
        tensor = value.const_value
        if tensor is None or value.is_graph_input() or tensor.nbytes < SHARED_BYTES:
            continue
        if isinstance(tensor, ir.ExternalTensor):  # ONNX Runtime maps its file
            continue
        if tensor.dtype in (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.INT64):
            found[name] = np.ascontiguousarray(tensor.numpy())
    return found


def _serialized_bytes(model: ir.Model, shared: Mapping[str, np.ndarray]) -> int:
    """Size of the weights that are neither shared nor in files."""
    tensors = [v.const_value for v in model.graph.initializers.values()]
    mapped = sum(tensor.nbytes for tensor in tensors if isinstance(tensor, ir.ExternalTensor))
    return weight_bytes(model) - mapped - sum(array.nbytes for array in shared.values())


def weight_bytes(model: ir.Model) -> int:
    """Size in bytes of all initializers, on disk or in memory."""
    values = (value for graph in model.graphs() for value in graph.initializers.values())
    return sum(value.const_value.nbytes for value in values if value.const_value is not None)


def why_no_cuda() -> str | None:
    """Return why CUDA cannot be used on this machine; None if it can.

    The check opens a session, so the process allocates some GPU memory.

    Raises:
        MissingExtra: ONNX Runtime is not installed.
    """
    require_runtime()
    graph = ir.from_onnx_text(
        '<ir_version: 8, opset_import: ["" : 17]> g (float[n] x) => (float[n] y) { y = Exp(x) }'
    )
    try:
        open_session(graph, provider="cuda")
    except AttnserveError as error:
        return error.what
    return None


def _start(
    ort: Any, source: str | bytes, name: str, options: Any, providers: Sequence[Any]
) -> onnxruntime.InferenceSession:
    try:
        with _quiet(ort) if len(providers) > 1 else nullcontext():
            session = ort.InferenceSession(source, options, providers=providers)
    except Exception as error:  # onnxruntime has an exception class for each status
        if len(providers) == 1 and _is_of_kernels(error) and _holds_bfloat16(source):
            raise InvalidModel(
                f"{name}: the model computes in bfloat16, which ONNX Runtime does not support on "
                f"CPUs: {describe_error(error)}",
                "set `provider` to cuda, or convert to float16, which also runs on a CPU",
                code="session.bfloat16_cpu",
            ) from error
        raise InvalidModel(
            f"{name}: ONNX Runtime refuses the graph: {describe_error(error)}",
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
def _quiet(ort: Any) -> Generator[None]:
    """Suppress the warning of each session on CUDA that the provider is not a plugin.

    It is logged by the process, whose level cannot be read: afterwards, it is the default.
    """
    ort.set_default_logger_severity(FATAL)
    try:
        yield
    finally:
        ort.set_default_logger_severity(WARNING)


def _providers(ort: Any, provider: Provider, cuda: Cuda) -> Sequence[Any]:
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


def lacks_kernels(error: InvalidModel) -> bool:
    """Whether a session was refused only because a kernel is missing; the graph is valid."""
    return _is_of_kernels(error.__cause__)


def _is_of_kernels(error: BaseException | None) -> bool:
    return type(error).__name__ == "NotImplemented"


def _holds_bfloat16(source: str | bytes) -> bool:
    model = (
        onnx.load_model_from_string(source)
        if isinstance(source, bytes)
        else onnx.load_model(source, load_external_data=False)
    )
    return any(one.data_type == onnx.TensorProto.BFLOAT16 for one in model.graph.initializer)


def describe_error(error: BaseException) -> str:
    """The status, the node and the reason of an error of ONNX Runtime: at most three of its lines.

    Left out are the number of the status and the place in the sources of ONNX Runtime.
    """
    text = re.sub(r"^\[ONNXRuntimeError\] : \d+ : (\w+) : ", r"\1: ", str(error).strip())
    text = re.sub(
        r"Non-zero status code returned while running (\S+) node\. Name:'(.*?)' Status Message: ",
        r"\1 node '\2': ",
        text,
    )
    text = re.sub(r"/\S+:\d+ [^\n]*?\)( const)? ", "", text)
    lines = [line.strip()[:LINE] for line in text.splitlines() if line.strip()]
    return "; ".join(lines[:LINES]) or type(error).__name__


def cpu_name() -> str:
    """The model name of the processor."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return (
        output_of("sysctl", "-n", "machdep.cpu.brand_string")
        or platform.processor()
        or platform.machine()
    )


def gpu_name() -> str | None:
    """The model names of the NVIDIA GPUs, separated by commas; None without one."""
    return output_of("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")


def output_of(program: str, *arguments: str) -> str | None:
    """The output of a program on one line; None if it is missing or fails."""
    path = shutil.which(program)
    if path is None:
        return None
    done = subprocess.run([path, *arguments], capture_output=True, text=True, check=False)
    return ", ".join(done.stdout.split("\n")).strip(", ") or None if done.returncode == 0 else None


def run(session: Any, batch: Batch) -> list[np.ndarray]:
    """Run a batch and return all outputs, which lie in the memory of the session (``owned``).

    Raises:
        InvalidData: The model refuses the batch.
    """
    try:
        return [np.asarray(array) for array in session.run(None, batch)]
    except Exception as error:  # onnxruntime has an exception class for each status
        shapes = ", ".join(f"{name} {array.shape}" for name, array in batch.items())
        raise InvalidData(
            f"the model refuses the inputs {shapes}: {describe_error(error)}",
            "check that the data fits the model (length, vocabulary, names)",
            code="session.inputs_refused",
        ) from error


def owned(array: np.ndarray) -> np.ndarray:
    """An output that may be kept: a copy if the array lies in the memory of a session.

    An output of a closed session keeps all memory of that session, packed weights included: 59 MB
    for one output of 2 MB.
    """
    return array if array.flags.owndata else array.copy()
