"""How a service runs a model: by several threads, in one session or several.

A ``Runner`` is what a service holds: ``run(names, feed)`` as a session's own, for any number of
threads at once. ``open_runner`` chooses the kind.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from queue import Empty, LifoQueue
from typing import Any, Protocol

import numpy as np
import onnx_ir as ir

from attnserve.context import Provider
from attnserve.runtime.buckets import Buckets
from attnserve.runtime.cuda import PARITY, ArenaShrinkPolicy, Cuda
from attnserve.runtime.cuda_graphs import GraphRunner
from attnserve.runtime.io_binding import Feed, InputBuffers, Place, binding_of, run_options
from attnserve.runtime.session import open_session
from graph_passes.errors import InvalidModel

__all__ = ["Runner", "open_runner"]

log = logging.getLogger("attnserve")


class Runner(Protocol):
    """A model that several threads may run at once."""

    def get_inputs(self) -> Sequence[Any]:
        """Its inputs, as a session tells them."""
        ...

    def get_outputs(self) -> Sequence[Any]:
        """Its outputs, as a session tells them."""
        ...

    def run(self, names: Sequence[str] | None, feed: Feed) -> list[np.ndarray]:
        """The outputs of these names (None: all), as a session gives them."""
        ...

    def allow_padding(self, *, rows: bool, tokens: bool) -> None:
        """Say what may be added to a batch without changing the answers to what it holds."""
        ...


def open_runner(
    source: Path | ir.Model,
    *,
    provider: Provider,
    threads: int = 0,
    cuda: Cuda = PARITY,
    buckets: int = 0,
    longest: int | None = None,
    concurrency: int = 1,
) -> Runner:
    """What runs a model in a service.

    Args:
        source, provider, threads, cuda: Of ``open_session``; ``cuda.graphs`` follows ``buckets``.
        buckets: The most shapes that are captured as CUDA graphs; 0 captures none.
        longest: The most tokens a row that the model takes, where that is known.
        concurrency: The number of concurrent runs. A session that captures graphs runs one
            at a time, so there are as many sessions, each with its own weights and
            ``cuda.memory_bytes``; any other session runs them all.

    Raises:
        As ``open_session``.
    """
    if provider == "cpu":
        return SessionRunner(open_session(source, provider="cpu", threads=threads))
    open_one = partial(open_session, source, provider=provider, threads=threads)
    if buckets:
        capturing = replace(cuda, graphs=True)
        try:
            sessions = [open_one(cuda=capturing) for _ in range(concurrency)]
        except InvalidModel as refused:
            session = open_one(cuda=cuda)  # raises again where it was not for the graphs
            log.warning("without CUDA graphs: %s", refused.what)
            return IoBindingRunner(session)
        runners = [GraphRunner(one, Buckets(buckets, longest=longest)) for one in sessions]
        return runners[0] if len(runners) == 1 else RunnerPool(runners)
    return IoBindingRunner(open_one(cuda=cuda))


class SessionRunner:
    """A session as it is: any number of threads may run it."""

    def __init__(self, session: Any) -> None:
        self.session = session

    def get_inputs(self) -> Sequence[Any]:
        return self.session.get_inputs()

    def get_outputs(self) -> Sequence[Any]:
        return self.session.get_outputs()

    def run(self, names: Sequence[str] | None, feed: Feed) -> list[np.ndarray]:
        return self.session.run(names, dict(feed))

    def allow_padding(self, *, rows: bool, tokens: bool) -> None:
        """Nothing is padded."""


class IoBindingRunner(SessionRunner):
    """A session on CUDA: what a run reads is copied into buffers that stay on the device, what it
    made is copied out once, and memory is given back after a peak.

    Runs at once have buffers of their own. Where none can be had, or an input is empty, the session
    copies for itself.
    """

    def __init__(self, session: Any, place: Place = "cuda") -> None:
        super().__init__(session)
        self._place: Place = place
        self._peak = ArenaShrinkPolicy()
        # The last ones that ran are the first to run again: the others may be of an older peak.
        self._free: LifoQueue[InputBuffers] = LifoQueue()
        self._warned = False

    def run(self, names: Sequence[str] | None, feed: Feed) -> list[np.ndarray]:
        shrink_arena = self._peak.after(sum(array.nbytes for array in feed.values()))
        options = run_options(shrink_arena=shrink_arena)
        if not all(array.size for array in feed.values()):
            return self.session.run(names, dict(feed), options)
        buffers = self._taken()
        try:
            binding = binding_of(self.session, buffers.filled(feed), self._place, names)
        except Exception as error:  # no memory, or of a type that has no buffers
            self._tell(error)
            return self.session.run(names, dict(feed), options)
        try:
            self.session.run_with_iobinding(binding, options)
            return [value.numpy() for value in binding.get_outputs()]
        finally:
            if shrink_arena:
                self._forget()
            else:
                self._free.put(buffers)

    def _taken(self) -> InputBuffers:
        try:
            return self._free.get_nowait()
        except Empty:
            return InputBuffers(self._place)

    def _forget(self) -> None:
        with suppress(Empty):
            while True:
                self._free.get_nowait()

    def _tell(self, error: Exception) -> None:
        if not self._warned:
            self._warned = True
            log.warning("a run without buffers on the GPU: %s", str(error).partition("\n")[0])


class RunnerPool:
    """Several sessions of one model, each of which runs one batch at a time."""

    def __init__(self, runners: Sequence[Runner]) -> None:
        self.runners = tuple(runners)
        # The last one that ran is the first to run again: it has captured the most.
        self._free: LifoQueue[Runner] = LifoQueue()
        for runner in reversed(self.runners):
            self._free.put(runner)

    def get_inputs(self) -> Sequence[Any]:
        return self.runners[0].get_inputs()

    def get_outputs(self) -> Sequence[Any]:
        return self.runners[0].get_outputs()

    def run(self, names: Sequence[str] | None, feed: Feed) -> list[np.ndarray]:
        with self._taken() as runner:
            return runner.run(names, feed)

    def allow_padding(self, *, rows: bool, tokens: bool) -> None:
        for runner in self.runners:
            runner.allow_padding(rows=rows, tokens=tokens)

    @contextmanager
    def _taken(self) -> Generator[Runner]:
        runner = self._free.get()
        try:
            yield runner
        finally:
            self._free.put(runner)
