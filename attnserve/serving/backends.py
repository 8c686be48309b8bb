"""Execution backends of the service.

A ``Runner`` has the ``run(names, feed)`` of a session and is thread-safe. ``open_runner`` selects
the backend. ``stop.STOP`` ends a run, except with CUDA graphs.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from queue import Empty, LifoQueue
from typing import Any, Protocol

import numpy as np
import onnx_ir as ir

from attnserve.context import Provider
from attnserve.runtime.cuda import PARITY, ArenaShrinkPolicy, Cuda
from attnserve.runtime.io_binding import Feed, InputBuffers, Place, binding_of, run_options
from attnserve.runtime.session import open_session, require_runtime
from attnserve.runtime.stop import stoppable
from attnserve.serving.buckets import Buckets
from attnserve.serving.cuda_graphs import GraphRunner
from graph_passes.errors import InvalidModel

__all__ = ["ON_CPU", "Runner", "RunnerOptions", "open_runner"]

log = logging.getLogger("attnserve")


class Runner(Protocol):
    """A model that several threads may run concurrently."""

    def get_inputs(self) -> Sequence[Any]:
        """The inputs, as in a session."""
        ...

    def get_outputs(self) -> Sequence[Any]:
        """The outputs, as in a session."""
        ...

    def run(self, names: Sequence[str] | None, feed: Feed) -> list[np.ndarray]:
        """Run the model and return the named outputs (None: all), as a session does."""
        ...

    def allow_padding(self, *, rows: bool, tokens: bool) -> None:
        """Declare that padding a batch with rows or tokens does not change its results."""
        ...


@dataclass(frozen=True)
class RunnerOptions:
    """How a service runs a model.

    Attributes:
        provider, threads, cuda, spinning: See ``open_session``; ``cuda.graphs`` follows
            ``cuda_graphs``.
        cuda_graphs: Maximum number of shapes that are captured as CUDA graphs; 0 for none.
        concurrency: Maximum number of concurrent runs. A session with CUDA graphs has one run at a
            time, so this many sessions are opened, each with its own weights and
            ``cuda.memory_bytes``. Other sessions run all threads.
    """

    provider: Provider = "cpu"
    threads: int = 0
    cuda: Cuda = PARITY
    cuda_graphs: int = 0
    concurrency: int = 1
    spinning: bool = True


ON_CPU = RunnerOptions()


def open_runner(
    source: Path | ir.Model,
    options: RunnerOptions = ON_CPU,
    *,
    longest: int | None = None,
    copied: Sequence[str] = (),
) -> Runner:
    """Open the backend that runs a model in a service.

    Args:
        source, copied: See ``open_session``.
        longest: Maximum sequence length of the model, if known.

    Raises:
        As ``open_session``.
    """
    cuda = options.cuda
    open_one = partial(
        open_session, source, provider=options.provider, threads=options.threads, copied=copied,
        spinning=options.spinning,
    )  # fmt: skip
    if options.provider == "cpu":
        return SessionRunner(open_one())
    if options.cuda_graphs:
        capturing = replace(cuda, graphs=True)
        try:
            sessions = [open_one(cuda=capturing) for _ in range(options.concurrency)]
        except InvalidModel as refused:
            session = open_one(cuda=cuda)  # raises again if graphs were not the reason
            log.warning("running without CUDA graphs: %s", refused.what)
            return IoBindingRunner(session)
        runners = [
            GraphRunner(one, Buckets(options.cuda_graphs, longest=longest)) for one in sessions
        ]
        return runners[0] if len(runners) == 1 else RunnerPool(runners)
    return IoBindingRunner(open_one(cuda=cuda))


class SessionRunner:
    """Run a session directly."""

    def __init__(self, session: Any) -> None:
        self.session = session

    def get_inputs(self) -> Sequence[Any]:
        return self.session.get_inputs()

    def get_outputs(self) -> Sequence[Any]:
        return self.session.get_outputs()

    def run(self, names: Sequence[str] | None, feed: Feed) -> list[np.ndarray]:
        return self.session.run(names, dict(feed), stoppable(require_runtime().RunOptions()))

    def allow_padding(self, *, rows: bool, tokens: bool) -> None:
        """Do nothing: this runner never pads."""


class IoBindingRunner(SessionRunner):
    """Run a CUDA session with I/O binding.

    Inputs are copied into persistent device buffers, and outputs are copied to the host once. The
    arena is shrunk after a peak. Concurrent runs use separate buffers. If a buffer cannot be
    allocated or an input is empty, the session copies the inputs itself.
    """

    def __init__(self, session: Any, place: Place = "cuda") -> None:
        super().__init__(session)
        self._place: Place = place
        self._policy = ArenaShrinkPolicy()
        # Last in, first out: buffers that are not used recently may be of an earlier peak.
        self._free: LifoQueue[InputBuffers] = LifoQueue()
        self._warned = False

    def run(self, names: Sequence[str] | None, feed: Feed) -> list[np.ndarray]:
        shrink_arena = self._policy.after(sum(array.nbytes for array in feed.values()))
        options = stoppable(run_options(shrink_arena=shrink_arena))
        if not all(array.size for array in feed.values()):
            return self.session.run(names, dict(feed), options)
        buffers = self._acquire()
        try:
            binding = binding_of(self.session, buffers.filled(feed), self._place, names)
        except Exception as error:  # no memory, or a type without buffers
            self._warn_once(error)
            return self.session.run(names, dict(feed), options)
        try:
            self.session.run_with_iobinding(binding, options)
            return [value.numpy() for value in binding.get_outputs()]
        finally:
            if shrink_arena:
                self._free_buffers()
            else:
                self._free.put(buffers)

    def _acquire(self) -> InputBuffers:
        try:
            return self._free.get_nowait()
        except Empty:
            return InputBuffers(self._place)

    def _free_buffers(self) -> None:
        with suppress(Empty):
            while True:
                self._free.get_nowait()

    def _warn_once(self, error: Exception) -> None:
        if not self._warned:
            self._warned = True
            log.warning("run without GPU input buffers: %s", str(error).partition("\n")[0])


class RunnerPool:
    """Several sessions of one model, each with one run at a time."""

    def __init__(self, runners: Sequence[Runner]) -> None:
        self.runners = tuple(runners)
        # Last in, first out: the runner that ran last has captured the most graphs.
        self._free: LifoQueue[Runner] = LifoQueue()
        for runner in reversed(self.runners):
            self._free.put(runner)

    def get_inputs(self) -> Sequence[Any]:
        return self.runners[0].get_inputs()

    def get_outputs(self) -> Sequence[Any]:
        return self.runners[0].get_outputs()

    def run(self, names: Sequence[str] | None, feed: Feed) -> list[np.ndarray]:
        with self._acquire() as runner:
            return runner.run(names, feed)

    def allow_padding(self, *, rows: bool, tokens: bool) -> None:
        for runner in self.runners:
            runner.allow_padding(rows=rows, tokens=tokens)

    @contextmanager
    def _acquire(self) -> Generator[Runner]:
        runner = self._free.get()
        try:
            yield runner
        finally:
            self._free.put(runner)
