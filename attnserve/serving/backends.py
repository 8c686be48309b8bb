"""Sessions of the service: ``open_runner`` selects how a model runs.

``stop.STOP`` ends a run, except in OpenVINO and with CUDA graphs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from queue import LifoQueue

import numpy as np
import onnx_ir as ir

from attnserve.context import CPU, Device
from attnserve.runtime.by_length import LengthRunner
from attnserve.runtime.by_load import LoadRunner
from attnserve.runtime.cuda import PARITY, ArenaShrinkPolicy, Cuda
from attnserve.runtime.interface import Feed, LongRows, Session, SessionOptions, SessionWrapper
from attnserve.runtime.io_binding import InputBuffers, run_bound, run_options
from attnserve.runtime.machine import available_cores
from attnserve.runtime.onnx_runtime import BufferDevice, OnnxSession, stoppable
from attnserve.runtime.session import RUNTIMES, open_session, runtime_of
from attnserve.serving.buckets import Buckets
from attnserve.serving.cuda_graphs import GraphRunner
from attnserve.serving.padding import PaddingRunner
from graph_passes.errors import InvalidModel

__all__ = [
    "MOST_RUNS",
    "ON_CPU",
    "RunnerOptions",
    "RunnerPool",
    "open_runner",
    "sessions_by_least_length",
]

log = logging.getLogger("attnserve")

MOST_RUNS = 4
"""Concurrent runs on a CPU with at least twice as many cores; with fewer, one run per core."""

MOST_COPIED_BYTES = 500_000_000
"""Size of the weights above which one run at a time is chosen: concurrent runs need a copy."""


@dataclass(frozen=True)
class RunnerOptions:
    """Options of a served model's session.

    Attributes:
        device: Device of the model.
        cuda: CUDA settings of a session; ``cuda.graphs`` follows ``cuda_graphs``.
        spinning: Wait busily for the next operator during a run.
        cuda_graphs: Maximum number of shapes that are captured as CUDA graphs; 0 for none.
        concurrency: Maximum number of concurrent runs. A session with CUDA graphs has one run at a
            time, so this many sessions are opened, each with its own weights and
            ``cuda.memory_bytes``. On a CPU, runs share the cores (``LoadRunner``). 0 chooses it
            (``with_concurrency``).
    """

    device: Device = CPU
    cuda: Cuda = PARITY
    cuda_graphs: int = 0
    concurrency: int = 1
    spinning: bool = True

    def with_concurrency(self, weight_bytes: int) -> RunnerOptions:
        """Choose ``concurrency`` if it is 0: several runs if the session uses all cores of a CPU.

        Args:
            weight_bytes: Size of the weights in memory for one run at a time.
        """
        if self.concurrency:
            return self
        cores, threads = available_cores(), self.device.threads
        uses_all = self.device.provider == "cpu" and not 0 < threads < cores
        several = uses_all and weight_bytes <= MOST_COPIED_BYTES
        runs = cores if cores < 2 * MOST_RUNS else MOST_RUNS
        return replace(self, concurrency=runs if several else 1)


ON_CPU = RunnerOptions()


def open_runner(
    source: Path | ir.Model,
    options: RunnerOptions = ON_CPU,
    *,
    longest: int | None = None,
    long_rows: LongRows | None = None,
    copied: Sequence[str] = (),
    compiled: Path | None = None,
) -> Session:
    """Open the session that runs a model in a service.

    Args:
        source: A model on disk or in memory.
        copied: Locations of external data that is read into memory.
        compiled: File for the compiled model, which is read, or written if it is missing.
        longest: Maximum sequence length of the model, if known.
        long_rows: The runtime of long rows, on the CPU; None for one runtime.

    Raises:
        InvalidModel: The runtime refuses the graph.
        InvalidArgument: The provider is not available.
        MissingExtra: The runtime is not installed.
    """
    open_one = partial(open_session, source)
    device = options.device
    plain = SessionOptions(
        spinning=options.spinning,
        cuda=options.cuda,
        varied_shapes=True,
        copied=tuple(copied),
        compiled=compiled,
    )
    if device.provider == "cpu":
        multiple = RUNTIMES[runtime_of(source, options.device)].size_multiple
        session = _open_on_cores(open_one, options, plain)
        if multiple > 1 and longest is not None:
            session = PaddingRunner(session, multiple=multiple, longest=longest)
        if long_rows is None:
            return session
        other = replace(options, device=replace(options.device, runtime=long_rows.runtime))
        long = open_runner(source, other, longest=longest, copied=copied, compiled=compiled)
        return LengthRunner(session, lambda: long, long_rows.above)
    if options.cuda_graphs:
        capturing = replace(plain, cuda=replace(options.cuda, graphs=True))
        try:
            sessions = [open_one(device, capturing) for _ in range(options.concurrency)]
        except InvalidModel as refused:
            session = open_one(device, plain)  # raises again if graphs were not the reason
            log.warning("running without CUDA graphs: %s", refused.what)
            return _with_io_binding(session)
        runners = [
            GraphRunner(onnx_session, Buckets(options.cuda_graphs, longest=longest))
            for onnx_session in sessions
            if isinstance(onnx_session, OnnxSession)
        ]
        return RunnerPool(runners) if len(runners) > 1 else [*runners, *sessions][0]
    return _with_io_binding(open_one(device, plain))


def _open_on_cores(
    open_one: Callable[[Device, SessionOptions], Session],
    options: RunnerOptions,
    plain: SessionOptions,
) -> Session:
    """Open the sessions of concurrent runs on a CPU.

    Args:
        open_one: Opens the model.
        plain: Options of a session that runs alone.
    """
    device, concurrency = options.device, options.concurrency
    # ``compiled`` is the file of the model that runs alone.
    concurrent = replace(plain, concurrency=concurrency, compiled=None)
    share = max(1, available_cores() // concurrency)
    if 0 < device.threads <= share and concurrency > 1:
        return open_one(device, concurrent)
    alone = open_one(device, plain)
    if concurrency == 1 or available_cores() == 1:
        return alone
    waiting = replace(concurrent, spinning=False)  # concurrent runs take turns on the cores
    return LoadRunner(alone, open_one(replace(device, threads=share), waiting))


def sessions_by_least_length(session: Session) -> dict[int, Session]:
    """The sessions of which a session consists, by the least length of their rows."""
    if isinstance(session, LengthRunner):
        return {0: session.short, session.above + 1: session.long}
    return {0: session}


def _with_io_binding(session: Session) -> Session:
    return IoBindingRunner(session) if isinstance(session, OnnxSession) else session


class IoBindingRunner(SessionWrapper[OnnxSession]):
    """Run a CUDA session with I/O binding.

    Inputs are copied into persistent device buffers, and outputs are copied to the host once. The
    arena is shrunk after a peak. Concurrent runs use separate buffers. If a buffer cannot be
    allocated or an input is empty, the session copies the inputs itself.
    """

    def __init__(self, session: OnnxSession, device: BufferDevice = "cuda") -> None:
        super().__init__(session)
        self._device: BufferDevice = device
        self._policy = ArenaShrinkPolicy()
        # Last in, first out: the oldest buffers may belong to an earlier peak.
        self._free: list[InputBuffers] = []
        self._warned = False

    def run(self, names: Sequence[str] | None, feed: Feed) -> list[np.ndarray]:
        shrink_arena = self._policy.after(sum(array.nbytes for array in feed.values()))
        options = stoppable(run_options(shrink_arena=shrink_arena))
        if not all(array.size for array in feed.values()):
            return self.session.run(names, feed, options)
        try:
            buffers = self._free.pop()
        except IndexError:
            buffers = InputBuffers(self._device)
        try:
            binding = self.session.binding(buffers.filled(feed), self._device, names)
        except Exception as error:  # no memory, or a type without buffers
            if not self._warned:
                log.warning("run without GPU input buffers: %s", str(error).partition("\n")[0])
            self._warned = True
            return self.session.run(names, feed, options)
        try:
            run_bound(self.session, binding, options, feed)
            return [value.numpy() for value in binding.get_outputs()]
        finally:
            if shrink_arena:
                self._free.clear()
            else:
                self._free.append(buffers)


class RunnerPool(SessionWrapper[OnnxSession]):
    """Several sessions of one model, each with one run at a time."""

    def __init__(self, runners: Sequence[GraphRunner]) -> None:
        super().__init__(runners[0].session)
        self.runners = tuple(runners)
        # Last in, first out: the most recent runner has captured the most graphs.
        self._free: LifoQueue[GraphRunner] = LifoQueue()
        for runner in reversed(self.runners):
            self._free.put(runner)

    def run(self, names: Sequence[str] | None, feed: Feed) -> list[np.ndarray]:
        runner = self._free.get()
        try:
            return runner.run(names, feed)
        finally:
            self._free.put(runner)

    def allow_padding(self, *, rows: bool, tokens: bool) -> None:
        for runner in self.runners:
            runner.allow_padding(rows=rows, tokens=tokens)
