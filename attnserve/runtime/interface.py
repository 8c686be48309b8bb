"""Protocols of a runtime and of an open model.

ONNX Runtime is one implementation (``onnx_runtime.py``). Code outside this package uses only these
protocols. A package adds a runtime with an entry point (``graph_passes.registry``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Literal, Protocol, TypeVar

import numpy as np
import onnx_ir as ir

from attnserve.context import Device
from attnserve.runtime.cuda import PARITY, Cuda
from graph_passes.errors import InvalidData

__all__ = [
    "AS_SERVED",
    "DEFAULT_OPTIONS",
    "Batch",
    "Feed",
    "LongRows",
    "RunFailed",
    "Runtime",
    "Session",
    "SessionOptions",
    "SessionWrapper",
    "ValueInfo",
    "owned",
    "row_length",
]

Batch = dict[str, np.ndarray]
"""The inputs of one run, by name."""

Feed = Mapping[str, np.ndarray]
"""The read-only inputs of one run."""


class RunFailed(InvalidData):
    """A run ended without a result.

    Attributes:
        reason: Message of the runtime, in one line.
        kind: "inputs" (the graph cannot take these sizes or values), "memory" (the run does not
            fit) or "device" (the device or the session is broken).
    """

    def __init__(
        self, reason: str, feed: Feed, kind: Literal["inputs", "memory", "device"] = "inputs"
    ) -> None:
        shapes = ", ".join(f"{name} {array.shape}" for name, array in feed.items())
        super().__init__(
            f"the model refuses the inputs {shapes}: {reason}",
            "check that the data fits the model (length, vocabulary, names)",
            code="session.inputs_refused",
        )
        self.reason = reason
        self.kind = kind


class ValueInfo(Protocol):
    """An input or output of a model."""

    @property
    def name(self) -> str: ...

    @property
    def type(self) -> str:
        """ONNX type string, for example "tensor(float)"."""
        ...

    @property
    def shape(self) -> Sequence[int | str | None]:
        """Sizes of the axes; a name or None for dynamic axes."""
        ...


class Session(Protocol):
    """An open model. Several threads may run it at once."""

    def get_inputs(self) -> Sequence[ValueInfo]:
        """The inputs, without initializers."""
        ...

    def get_outputs(self) -> Sequence[ValueInfo]: ...

    def run(self, names: Sequence[str] | None, feed: Feed) -> list[np.ndarray]:
        """Run the model and return the named outputs (None for all).

        Outputs may be views of session memory (``owned``). ``stop.STOP`` ends the run, if the
        runtime supports it.

        Raises:
            RunFailed: The model refuses the batch, or the run fails.
        """
        ...

    def bind(self, feed: Feed) -> Callable[[], object]:
        """Return a function that runs the model on ``feed`` and waits for the end, for timing.

        Inputs and outputs stay on the device.
        """
        ...


S = TypeVar("S", bound=Session)


class SessionWrapper(Generic[S]):
    """A session around another one; subclasses prepare its runs, or choose a session for them."""

    def __init__(self, session: S) -> None:
        self.session = session

    def get_inputs(self) -> Sequence[ValueInfo]:
        return self.session.get_inputs()

    def get_outputs(self) -> Sequence[ValueInfo]:
        return self.session.get_outputs()

    def session_of(self, feed: Feed) -> S:
        """The session that runs these inputs."""
        return self.session

    def run(self, names: Sequence[str] | None, feed: Feed) -> list[np.ndarray]:
        return self.session_of(feed).run(names, feed)

    def bind(self, feed: Feed) -> Callable[[], object]:
        return self.session_of(feed).bind(feed)


@dataclass(frozen=True)
class LongRows:
    """The runtime that is faster for long rows of a model, and the length from which it is used.

    Attributes:
        above: Rows with more tokens are long. The runtime depends only on the length of the row, so
            that a row has the same result in every batch.
        runtime: The name of the runtime.
    """

    above: int
    runtime: str


def row_length(feed: Feed) -> int | None:
    """The number of tokens of each row; None without tokens."""
    ids = feed.get("input_ids")
    return ids.shape[1] if ids is not None and ids.ndim == 2 else None


@dataclass(frozen=True)
class SessionOptions:
    """Options of a session.

    Attributes:
        optimize: False disables the graph optimizations of the runtime.
        spinning: Idle threads of ONNX Runtime wait busily for the next operator until the run ends,
            so that it starts at once. False for concurrent runs that share cores.
        cuda: CUDA settings; by default exact float32 products.
        concurrency: Number of concurrent runs with ``Device.threads`` each. In ONNX
            Runtime, more runs are possible, and their threads wait for each other.
        varied_shapes: Runs have many shapes, so that ONNX Runtime stores no memory pattern for
            each: on a CPU, they take memory.
        copied: Locations of external data that is read into memory. ONNX Runtime maps other files:
            changing them changes the results, and truncating them ends the process.
        profile: Path prefix of the file of the profile.
        compiled: File with the compiled model, for runtimes with a long compilation: a missing or
            invalid file is written. Only this user may write to its folder, and the name depends
            on the model, the device, the machine and the versions.
    """

    optimize: bool = True
    spinning: bool = True
    cuda: Cuda = PARITY
    concurrency: int = 1
    varied_shapes: bool = False
    copied: tuple[str, ...] = ()
    profile: Path | None = None
    compiled: Path | None = None


DEFAULT_OPTIONS = SessionOptions()

AS_SERVED = SessionOptions(varied_shapes=True)
"""Options of a session that is timed in place of the one that serves the model alone."""


class Runtime(Protocol):
    """A library that runs ONNX models."""

    name: str
    """The name that selects the runtime, such as "onnxruntime"."""

    computes_bfloat16: bool
    """Whether the runtime computes a float32 model in bfloat16 if the model states bfloat16
    (``inference_precision``). Other runtimes compute in float32, which is more exact."""

    size_multiple: int
    """Serving pads the number of tokens of a run to a multiple of this number, because the runtime
    compiles kernels for each number of tokens; 1 for no padding."""

    @property
    def short_rows(self) -> int | None:
        """Tokens of a row above which the runtime uses other kernels, whose results differ by
        rounding; None if it does not. Short and long rows do not share a batch."""
        ...

    def open(self, source: Path | ir.Model, device: Device, options: SessionOptions) -> Session:
        """Open a model on disk or in memory.

        Raises:
            InvalidModel: The runtime refuses the graph.
            InvalidArgument: The provider is not available.
            MissingExtra: The library is not installed.
        """
        ...

    def version(self) -> str:
        """The version of the library.

        Raises:
            MissingExtra: The library is not installed.
        """
        ...

    def peak_bytes(self, source: Path, feed: Feed, device: Device) -> int | None:
        """Peak device memory during a run of these inputs; None if unknown."""
        ...


def owned(array: np.ndarray) -> np.ndarray:
    """Return an output that is safe to keep: a copy, if the array is a view of session memory.

    An output of a closed session keeps all memory of that session, packed weights included.
    """
    return array if array.flags.owndata else array.copy()
