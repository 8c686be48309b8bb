"""The runtime OpenVINO on the CPU. Only this module opens its models.

OpenVINO is an optional dependency (extra ``[openvino]``) and is imported on first use. It reads
ONNX, including the operators of com.microsoft that attnserve writes. For short rows in bfloat16 on
a CPU with a matrix unit, its attention is faster as separate products and softmax
(``ONE_KERNEL_ABOVE``). OpenVINO differs from ONNX Runtime in four ways; this module corrects the
first three:

* OpenVINO computes in bfloat16 by default where the CPU supports it. This module computes a model
  in its own types, unless the model states bfloat16 (``inference_precision``).
* OpenVINO reads outside of a table without an error. This module compares indices with the table.
* An omitted input keeps its last value, and arrays of another type are converted. In this module
  both are errors.
* A compiled model returns outputs of a canceled run to later runs, also for a new request.
  ``stop.STOP`` therefore does not end a run.
"""

from __future__ import annotations

import math
import re
import tempfile
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from itertools import count
from pathlib import Path
from queue import LifoQueue
from threading import Lock
from typing import Any, Literal

import numpy as np
import onnx_ir as ir

from attnserve.context import Device
from attnserve.runtime.by_length import LengthRunner
from attnserve.runtime.cache import read_private, write_atomically
from attnserve.runtime.external_data import serialized
from attnserve.runtime.inference_precision import computes_in_bfloat16
from attnserve.runtime.interface import (
    DEFAULT_OPTIONS,
    Feed,
    RunFailed,
    Session,
    SessionOptions,
    ValueInfo,
)
from attnserve.runtime.machine import available_cores, has_matrix_unit
from attnserve.runtime.onnx_reader import read_in_place
from graph_passes.errors import InvalidArgument, InvalidModel, MissingExtra

__all__ = ["OLDEST", "OpenVino", "OpenVinoSession", "require_openvino", "write_openvino"]

OLDEST = (2026, 2)
"""The oldest accepted release: the tests compare results of this and later releases only."""

RUN = "attnserve_run"
"""Input with the number of a run, which is returned after the outputs. If the sizes of the inputs
do not fit together, OpenVINO may return the outputs of the previous run without an exception."""

ONE_KERNEL_ABOVE = 256
"""Tokens of a row above which attention in bfloat16 is one kernel of OpenVINO, which never holds
all scores. It packs keys and values for the matrix unit (AMX), which costs more than it saves for
short rows. One thread, MiniLM, batches of about 480 tokens: with separate operators the model runs
1.02x to 1.26x as fast from 20 to 64 tokens a row, 1.04x to 1.14x from 72 to 250 and 0.95x at 512.
Single rows gain 0.97x to 1.10x. BERT-base: 1.04x to 1.12x up to 256, 1.00x at 512. ModernBERT:
1.01x to 1.13x, and 0.94x. In float32, 0.98x to 1.03x up to 256 tokens, and less above. Without a
matrix unit (AVX-512), 0.95x to 1.04x in bfloat16, so that all rows run in the kernel."""

SEPARATE_OPERATORS = {"SNIPPETS_MODE": "DISABLE"}
"""The setting of OpenVINO that keeps attention as separate operators."""

MOST_ATTEMPTS = 8
"""Attempts of a run whose model other runs break; two can be too few on a busy machine."""

CHECKSUM_BYTES = 32
"""Size of the checksum at the start of a file with a compiled model."""

INSTALL = "pip install 'attnserve[openvino]'"


def require_openvino() -> Any:
    """Import the openvino module, without telemetry unless the user asks for it.

    Raises:
        MissingExtra: OpenVINO is not installed, or too old.
    """
    try:
        installed = version("openvino")
        import openvino
    except (ImportError, PackageNotFoundError) as error:
        raise MissingExtra("OpenVINO is not installed", INSTALL, code="extra.openvino") from error
    release = tuple(int(part) for part in installed.split(".")[:2] if part.isdecimal())
    if release < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise MissingExtra(
            f"OpenVINO {installed} is too old: expected {oldest} or later",
            f"pip install --upgrade 'openvino>={oldest}'",
            code="extra.openvino",
        )
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


@dataclass(frozen=True)
class Table:
    """A table from which a node reads rows at indices that the inputs determine.

    Attributes:
        name: The name of the node.
        rows: The number of rows of the table.
    """

    name: str
    rows: int


class _Compiled:
    """A compiled model that several requests run.

    A compiled model cannot be used again after inputs of sizes that do not fit together: it may
    repeat the error, return the outputs of the previous run, or end the process.

    Args:
        compile: Returns a new ``openvino.CompiledModel``.
        concurrency: Number of requests that may run it at once.
    """

    def __init__(self, compile: Callable[[], Any], concurrency: int) -> None:
        self._compile, self.concurrency = compile, concurrency
        self._lock = Lock()
        self._model: Any = compile()
        self.numbers = count(1)
        """Numbers of runs: requests share the memory of outputs, so no two have the same."""

    def get(self) -> Any:
        """The compiled model; a new one after ``discard``."""
        with self._lock:
            if self._model is None:
                self._model = self._compile()
            return self._model

    def discard(self, model: Any) -> bool:
        """Let no run start on a broken model; return whether it was in use until now."""
        with self._lock:
            was_used = self._model is model
            if was_used:
                self._model = None
            return was_used


class _Request:
    """An infer request: one run at a time."""

    def __init__(self, compiled: _Compiled, types: Mapping[str, np.dtype[Any]], place: int) -> None:
        self._compiled, self._types, self._place = compiled, types, place
        self._model: Any = None
        self._request: Any = None
        self._read: set[str] = set()

    @property
    def is_closed(self) -> bool:
        """Whether no run has succeeded since ``close``."""
        return self._model is None

    def output(self, index: int) -> np.ndarray:
        """A view of an output of the last run."""
        return self._request.get_output_tensor(index).data

    def infer(self, feed: Feed) -> None:
        """Run the request; again if another request may have broken the model in the meantime.

        A run that reports a broken model first may have broken it, or may have run beside the one
        that did. Beside others, it is therefore refused when it is the first for a second time.

        Raises:
            RunFailed: The inputs are refused; of kind "device", others broke each new model.
        """
        reports = 0
        for _ in range(MOST_ATTEMPTS):
            model = self._compiled.get()
            failure = self._attempt(model, feed)
            if failure is None:
                return
            self.close()
            reports += self._compiled.discard(model)
            del model  # before the next one is compiled
            if reports == min(self._compiled.concurrency, 2):
                self._compiled.get()  # this request waits for the new model, and not the next one
                raise failure
        raise RunFailed("other runs broke the model again and again", feed, "device")

    def _attempt(self, model: Any, feed: Feed) -> RunFailed | None:
        """Run once; return why the run failed, None if it succeeded."""
        if self._model is not model:
            self._start(model)
        number = next(self._compiled.numbers)
        # A view, because numpy has several types of the same numbers ("q" and "l" for int64).
        given = {n: array.view(self._types[n]) for n, array in feed.items() if n in self._read}
        given[RUN] = np.array(number)
        try:
            self._request.start_async(given, share_inputs=True)  # not ``infer``, which loses errors
            self._request.wait()
            if int(self.output(self._place)) == number:
                return None
        except Exception as error:  # RuntimeError for everything
            failure = RunFailed(_describe(error), feed, _kind(error))
            failure.__cause__ = error
            return failure
        return RunFailed("the sizes of the inputs do not fit together", feed)

    def close(self) -> None:
        """Free the memory of the compiled model, if no other request uses it."""
        self._model = self._request = None

    def _start(self, model: Any) -> None:
        self._model = model
        # The compiled model lacks inputs that no node reads.
        self._read = {name for port in model.inputs for name in port.get_names()}
        self._request = model.create_infer_request()


class OpenVinoSession:
    """A model that OpenVINO has compiled; runs beyond ``concurrency`` wait.

    Args:
        compile: Returns a new ``openvino.CompiledModel``. The inputs of the graph are followed by
            ``RUN``, the outputs by the number of the run, then the least and the greatest index of
            each of ``tables``.
        graph: The graph, without its weights.
    """

    def __init__(
        self,
        compile: Callable[[], Any],
        graph: ir.Graph,
        tables: Sequence[Table],
        concurrency: int = 1,
    ) -> None:
        self._tables = tables
        self._inputs = [
            _value_info(value) for value in graph.inputs if value.name not in graph.initializers
        ]
        self._outputs = [_value_info(value) for value in graph.outputs]
        self._types = {info.name: _numpy_type(info) for info in self._inputs}
        compiled = _Compiled(compile, concurrency)
        # Last in, first out: the memory of the request that ran last is in the caches.
        self._free: LifoQueue[_Request] = LifoQueue()
        for _ in range(concurrency):
            self._free.put(_Request(compiled, self._types, len(self._outputs)))

    def get_inputs(self) -> Sequence[ValueInfo]:
        return self._inputs

    def get_outputs(self) -> Sequence[ValueInfo]:
        return self._outputs

    def run(self, names: Sequence[str] | None, feed: Feed) -> list[np.ndarray]:
        """Run the model, and return copies of the named outputs; None for all."""
        self._check(feed)
        places = {info.name: index for index, info in enumerate(self._outputs)}
        chosen = places.values() if names is None else [places[name] for name in names]
        with self._request() as request:
            request.infer(feed)
            self._check_indices(feed, request)
            return [np.array(request.output(index)) for index in chosen]

    def bind(self, feed: Feed) -> Callable[[], object]:
        self._check(feed)
        given = {name: np.ascontiguousarray(array) for name, array in feed.items()}

        def run() -> None:
            with self._request() as request:
                request.infer(given)

        return run

    @contextmanager
    def _request(self) -> Generator[_Request]:
        request = self._free.get()
        try:
            yield request
        finally:
            if request.is_closed:
                with self._free.mutex:  # idle requests would keep the broken model
                    for idle in self._free.queue:
                        idle.close()
            self._free.put(request)

    def _check(self, feed: Feed) -> None:
        """Check the names, types and sizes of the inputs against the graph."""
        sizes: dict[str, int] = {}
        for info in self._inputs:
            array, dtype = feed.get(info.name), self._types[info.name]
            if array is None:
                raise RunFailed(f"the input {info.name} is missing", feed)
            if array.dtype != dtype:
                raise RunFailed(f"{info.name} is {array.dtype}, expected {dtype}", feed)
            if len(info.shape) != array.ndim:
                raise RunFailed(f"{info.name} has {array.ndim} axes, not {len(info.shape)}", feed)
            for axis, size in zip(info.shape, array.shape, strict=True):
                expected = axis if isinstance(axis, int) else sizes.setdefault(axis or "", size)
                if axis is not None and size != expected:
                    raise RunFailed(f"an axis of {info.name} is {size}, expected {expected}", feed)
        if unknown := sorted(feed.keys() - self._types.keys()):
            raise RunFailed(f"the model has no input {unknown[0]}", feed)

    def _check_indices(self, feed: Feed, request: _Request) -> None:
        first = len(self._outputs) + 1
        for place, table in enumerate(self._tables):
            least, greatest = (int(request.output(first + 2 * place + end)) for end in (0, 1))
            if least < -table.rows or greatest >= table.rows:
                index = least if least < -table.rows else greatest
                raise RunFailed(
                    f"{table.name}: the index {index} is outside of its table of {table.rows} rows",
                    feed,
                )


@dataclass(frozen=True)
class _Info:
    name: str
    type: str
    shape: Sequence[int | str | None]


def _value_info(value: ir.Value) -> _Info:
    element = "" if value.dtype is None else _ELEMENTS.get(value.dtype, value.dtype.name.lower())
    axes = (
        []
        if value.shape is None
        else [axis if isinstance(axis, int) else axis.value for axis in value.shape]
    )
    return _Info(value.name or "", f"tensor({element})", axes)


_ELEMENTS = {ir.DataType.FLOAT: "float", ir.DataType.DOUBLE: "double"}
"""Names of element types in type strings that differ from numpy's names."""


def _numpy_type(info: _Info) -> np.dtype[Any]:
    element = info.type.removeprefix("tensor(").removesuffix(")")
    names = {short: kind for kind, short in _ELEMENTS.items()}
    return names.get(element, ir.DataType[element.upper()]).numpy()


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
            _check_scales(described.graph)
            _remove_nan_tests(model)
            tables = _observe_indices(model)
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
            f"{name}: OpenVINO refuses the graph: {_describe(error)}",
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


def write_openvino(
    model: ir.Model, path: Path, *, output: str, name: str, is_repeated: bool = False
) -> None:
    """Write a graph with one output as OpenVINO IR: ``path`` (.xml), and its weights (.bin).

    Weights keep their types. The file cannot state the precision of computation: OpenVINO uses
    bfloat16 where the CPU has it, unless INFERENCE_PRECISION_HINT is f32.

    Args:
        output: The output to keep.
        name: The name of the output in the file.
        is_repeated: Whether the output, one vector per text [B, D], is repeated at each token of
            ``input_ids`` [B, S] to [B, S, D].

    Raises:
        InvalidModel: OpenVINO refuses the graph.
        MissingExtra: OpenVINO is not installed, or too old.
    """
    openvino = require_openvino()
    from openvino import opset13 as operators

    names = [value.name for value in model.graph.outputs]
    try:
        with tempfile.TemporaryDirectory(prefix="attnserve-", ignore_cleanup_errors=True) as folder:
            _check_scales(model.graph)
            read = openvino.Core().read_model(serialized(model, Path(folder)))
            value = read.get_results()[names.index(output)].input_value(0)
            inputs = read.get_parameters()
            if is_repeated:
                ids = next(one for one in inputs if "input_ids" in one.output(0).get_names())
                width = operators.gather(
                    operators.shape_of(value), np.array([1]), np.array(0, np.int64)
                )
                shape = operators.concat([operators.shape_of(ids), width], 0)
                row = operators.unsqueeze(value, np.array(1, np.int64))
                value = operators.broadcast(row, shape).output(0)
            value.set_names({name})
            graph = openvino.Model([operators.result(value)], inputs, "attnserve")
            openvino.save_model(graph, path, compress_to_fp16=False)
    except Exception as error:  # RuntimeError for everything
        raise InvalidModel(
            f"{path.name}: OpenVINO refuses the graph: {_describe(error)}",
            "write the model without `openvino`, for ONNX Runtime",
            code="session.graph_refused",
        ) from error


def _check_scales(graph: ir.Graph) -> None:
    """Refuse com.microsoft Attention with another scale than the default, which OpenVINO uses."""
    for node in graph.all_nodes():
        if (node.domain, node.op_type) != ("com.microsoft", "Attention"):
            continue
        scale, heads = (
            node.attributes.get_float("scale", 0.0),
            node.attributes.get_int("num_heads", 1),
        )
        sizes = node.attributes.get_ints("qkv_hidden_sizes", ())
        width = sizes[0] if sizes else _last_size(node.inputs[1]) // 3
        if scale and width and not math.isclose(scale, (width / heads) ** -0.5, rel_tol=1e-4):
            raise ValueError(f"it would compute {node.name} with another scale than {scale:g}")


def _last_size(value: ir.Value | None) -> int:
    """The size of the last axis; 0 if it is unknown."""
    size = None if value is None or not value.shape else value.shape[-1]
    return size if isinstance(size, int) else 0


def _remove_nan_tests(model: Any) -> None:
    """Remove the tests for NaN behind attention whose mask is finite.

    The ONNX operator returns 0 for a query whose keys are all masked by -inf. Masks of fused models
    are finite (``graph_passes.emit.fused_attention``).
    """
    for node in model.get_ordered_ops():
        if node.get_type_name() != "Select":
            continue
        condition, _, value = (node.input_value(place) for place in range(3))
        if condition.get_node().get_type_name() == "IsNaN" and _has_finite_mask(value.get_node()):
            for reader in node.output(0).get_target_inputs():
                reader.replace_source_output(value)


def _has_finite_mask(node: Any) -> bool:
    """Whether a node is attention without a mask, or with one that has a finite lower bound."""
    if node.get_type_name() != "ScaledDotProductAttention":
        return False
    if node.get_input_size() < 4:
        return True
    mask = node.input_value(3).get_node()
    is_bounded = mask.get_type_name() == "Maximum"
    bounds = [mask, *(mask.input_value(place).get_node() for place in range(2) if is_bounded)]
    return any(
        bound.get_type_name() == "Constant" and bool(np.isfinite(bound.get_data()).all())
        for bound in bounds
    )


def _observe_indices(model: Any) -> list[Table]:
    """Add the least and the greatest index of each table read to the outputs of a model."""
    from openvino import opset13 as operators

    tables: list[Table] = []
    results = [operators.result(_run_number(model))]
    for node in model.get_ordered_ops():
        if node.get_type_name() != "Gather":
            continue
        data, indices, axis = (node.input_value(position) for position in range(3))
        if axis.get_node().get_type_name() != "Constant":
            continue
        if indices.get_node().get_type_name() == "Constant":
            continue
        rank = data.partial_shape.rank
        place = int(axis.get_node().get_data())
        length = data.partial_shape[place] if rank.is_static else None
        if length is None or not length.is_static:
            continue
        tables.append(Table(node.get_friendly_name(), length.get_length()))
        flat = operators.reshape(indices, np.array([-1], np.int64), special_zero=False)
        for reduce in (operators.reduce_min, operators.reduce_max):
            index = reduce(flat, np.array(0, np.int64), keep_dims=False)
            results.append(operators.result(index))
        kind = indices.element_type.to_dtype().type
        inside = operators.maximum(indices, np.array(-tables[-1].rows, kind))
        inside = operators.minimum(inside, np.array(tables[-1].rows - 1, kind))
        node.input(1).replace_source_output(inside.output(0))
    model.add_results(results)
    return tables


def _run_number(model: Any) -> Any:
    """Add the input ``RUN``; return its value, computed after all outputs of the model."""
    from openvino import opset13 as operators

    number = operators.parameter([], np.int64, name=RUN)
    number.output(0).set_names({RUN})
    model.add_parameters([number])
    shapes = [operators.shape_of(result.input_value(0)) for result in model.get_results()]
    size = operators.reduce_sum(operators.concat(shapes, 0), np.array([0], np.int64))
    return operators.minimum(number, operators.add(number, size))


def _kind(error: Exception) -> Literal["inputs", "memory", "device"]:
    text = str(error)
    return "memory" if re.search(r"alloc|out of memory", text, re.IGNORECASE) else "inputs"


def _describe(error: BaseException) -> str:
    """The last meaningful lines of an error of OpenVINO, without positions in its source code."""
    lines = [line.strip().removeprefix("Caught exception: ") for line in str(error).splitlines()]
    said = [
        line[:300] for line in lines if line and not line.startswith(("Exception from", "Check '"))
    ]
    return "; ".join(said[:3]) or type(error).__name__
