"""Run models that OpenVINO has compiled, also after runs that break them."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from queue import LifoQueue
from threading import Lock
from typing import Any, Literal

import numpy as np
import onnx_ir as ir

from attnserve.runtime.interface import Feed, RunFailed, ValueInfo
from attnserve.runtime.openvino_graph import RUN, Table

__all__ = ["MOST_ATTEMPTS", "OpenVinoSession", "describe_error"]

MOST_ATTEMPTS = 8
"""Attempts of a run whose model other runs break; two can be too few on a busy machine."""


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
            model = self._compiled_model(feed)
            failure = self._attempt(model, feed)
            if failure is None:
                return
            self.close()
            reports += self._compiled.discard(model)
            del model  # before the next one is compiled
            if reports == min(self._compiled.concurrency, 2):
                self._compiled_model(feed)  # this request waits for it, and not the next one
                raise failure
        raise RunFailed("other runs broke the model again and again", feed, "device")

    def _compiled_model(self, feed: Feed) -> Any:
        try:
            return self._compiled.get()
        except Exception as error:  # RuntimeError for everything
            raise RunFailed(describe_error(error), feed, "device") from error

    def _attempt(self, model: Any, feed: Feed) -> RunFailed | None:
        """Run once; return why the run failed, None if it succeeded."""
        number = next(self._compiled.numbers)
        try:
            if self._model is not model:
                self._start(model)
            # A view, because numpy has several types of the same numbers ("q" and "l" for int64).
            given = {n: array.view(self._types[n]) for n, array in feed.items() if n in self._read}
            given[RUN] = np.array(number)
            self._request.start_async(given, share_inputs=True)  # not ``infer``, which loses errors
            self._request.wait()
            if int(self.output(self._place)) == number:
                return None
        except Exception as error:  # RuntimeError for everything
            kind = _kind(error) if self._model is model else "device"
            failure = RunFailed(describe_error(error), feed, kind)
            failure.__cause__ = error
            return failure
        return RunFailed("the sizes of the inputs do not fit together", feed)

    def close(self) -> None:
        """Free the memory of the compiled model, if no other request uses it."""
        self._model = self._request = None

    def _start(self, model: Any) -> None:
        # The compiled model lacks inputs that no node reads.
        self._read = {name for port in model.inputs for name in port.get_names()}
        self._request = model.create_infer_request()
        self._model = model


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


@dataclass(frozen=True)
class _Info:
    name: str
    type: str
    shape: Sequence[int | str | None]


def _value_info(value: ir.Value) -> _Info:
    element = "" if value.dtype is None else _ELEMENTS.get(value.dtype, value.dtype.name.lower())
    axes = [axis if isinstance(axis, int) else axis.value for axis in value.shape or ()]
    return _Info(value.name or "", f"tensor({element})", axes)


_ELEMENTS = {ir.DataType.FLOAT: "float", ir.DataType.DOUBLE: "double"}
"""Names of element types in type strings that differ from numpy's names."""


def _numpy_type(info: _Info) -> np.dtype[Any]:
    element = info.type.removeprefix("tensor(").removesuffix(")")
    names = {short: kind for kind, short in _ELEMENTS.items()}
    return names.get(element, ir.DataType[element.upper()]).numpy()


def _kind(error: Exception) -> Literal["inputs", "memory", "device"]:
    text = str(error)
    return "memory" if re.search(r"alloc|out of memory", text, re.IGNORECASE) else "inputs"


def describe_error(error: BaseException) -> str:
    """The last meaningful lines of an error of OpenVINO, without positions in its source code."""
    lines = [line.strip().removeprefix("Caught exception: ") for line in str(error).splitlines()]
    said = [
        line[:300] for line in lines if line and not line.startswith(("Exception from", "Check '"))
    ]
    return "; ".join(said[:3]) or type(error).__name__
