"""How a session is run: on memory of the device, by several threads, as captured CUDA graphs.

A ``Runner`` is what a service holds: ``run(names, feed)`` as a session's own, for any number of
threads at once. ``open_runner`` chooses the kind. ``bound`` is what a benchmark times.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from queue import LifoQueue
from typing import Any, Literal, Protocol

import numpy as np
import onnx_ir as ir

from attnserve.buckets import Bucket, Buckets
from attnserve.device import DEVICE, PARITY, Cuda, GiveBack, run_entries
from attnserve.session import Provider, open_session, require_runtime
from graph_passes.errors import InvalidModel

__all__ = ["GraphRunner", "Layout", "Place", "Runner", "bound", "give_back", "open_runner"]

Feed = Mapping[str, np.ndarray]
Axes = tuple[int | str | None, ...]
Place = Literal["cpu", "cuda"]
"""Where buffers lie: on the CPU only in tests, where the same code runs without a GPU."""

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
    at_once: int = 1,
) -> Runner:
    """What runs a model in a service.

    Args:
        source, provider, threads, cuda: Of ``open_session``; ``cuda.graphs`` follows ``buckets``.
        buckets: The most shapes that are captured as CUDA graphs; 0 captures none.
        longest: The most tokens a row that the model takes, where that is known.
        at_once: The runs that will be asked for at a time. A session that captures graphs runs one
            at a time, so there are as many sessions, each with its own weights and
            ``cuda.memory_bytes``; any other session runs them all.

    Raises:
        As ``open_session``.
    """
    if provider == "cpu":
        return _Plain(open_session(source, provider="cpu", threads=threads))
    open_one = partial(open_session, source, provider=provider, threads=threads)
    if buckets:
        capturing = replace(cuda, graphs=True)
        try:
            sessions = [open_one(cuda=capturing) for _ in range(at_once)]
        except InvalidModel as refused:
            session = open_one(cuda=cuda)  # raises again where it was not for the graphs
            log.warning("without CUDA graphs: %s", refused.what)
            return _Returning(session)
        runners = [GraphRunner(one, Buckets(buckets, longest=longest)) for one in sessions]
        return runners[0] if len(runners) == 1 else _Pool(runners)
    return _Returning(open_one(cuda=cuda))


def bound(session: Any, feed: Feed) -> Callable[[], object]:
    """A run to be timed: on CUDA from memory of the device to it, and at an end when that is."""
    if "CUDAExecutionProvider" not in session.get_providers():
        return partial(session.run, None, dict(feed))
    binding = _binding(
        session, {name: _placed(array, "cuda") for name, array in feed.items()}, "cuda"
    )

    def run() -> None:
        session.run_with_iobinding(binding)
        binding.synchronize_outputs()

    return run


class _Plain:
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


class _Returning(_Plain):
    """A session on CUDA that gives memory back."""

    def __init__(self, session: Any) -> None:
        super().__init__(session)
        self._peak = GiveBack()

    def run(self, names: Sequence[str] | None, feed: Feed) -> list[np.ndarray]:
        give_back = self._peak.after(sum(array.nbytes for array in feed.values()))
        return self.session.run(names, dict(feed), _options(give_back=give_back))


@dataclass(frozen=True)
class Layout:
    """Where the rows of a batch and the tokens of a row stand in the tensors of a model.

    Attributes:
        rows: The first axis of every input: a name, or its size.
        tokens: The name of the second axis where it varies; empty where no input has such an axis.
        inputs, outputs: The axes of each tensor, by name.
    """

    rows: int | str
    tokens: str
    inputs: Mapping[str, Axes]
    outputs: Mapping[str, Axes]

    @classmethod
    def of(cls, session: Any) -> Layout | None:
        """The layout of a session's model; None where its inputs have other axes that vary."""
        inputs = {value.name: tuple(value.shape) for value in session.get_inputs()}
        outputs = {value.name: tuple(value.shape) for value in session.get_outputs()}
        rows = {axes[0] if axes else None for axes in inputs.values()}
        tokens = {axis for axes in inputs.values() for axis in axes[1:2] if type(axis) is not int}
        rest = {axis for axes in inputs.values() for axis in axes[2:]}
        if len(rows) != 1 or len(tokens) > 1 or not all(type(axis) is int for axis in rest):
            return None
        first, second = rows.pop(), tokens.pop() if tokens else ""
        if first is None or second is None or first == second:  # an axis without a name
            return None
        return cls(first, second, inputs, outputs)

    @property
    def cuts(self) -> bool:
        """Whether every output tells which of its axes grow with what is added."""
        return all(
            axes and all(isinstance(axis, int) or axis in (self.rows, self.tokens) for axis in axes)
            for axes in self.outputs.values()  # no axes at all: of any rank
        )

    def shape(self, feed: Feed) -> Bucket | None:
        """(rows, tokens) of a batch; None where a tensor is empty or they are not all the same."""
        rows = {array.shape[0] for array in feed.values()}
        tokens = {
            feed[name].shape[1]
            for name, axes in self.inputs.items()
            if len(axes) > 1 and axes[1] == self.tokens
        } or {1}
        if len(rows) != 1 or len(tokens) != 1:
            return None
        found = rows.pop(), tokens.pop()
        return found if min(found) > 0 else None

    def padded(self, name: str, bucket: Bucket) -> tuple[int, int | None]:
        """The first two sizes of an input in a bucket; None for a second one that does not vary."""
        axes = self.inputs[name]
        return bucket[0], bucket[1] if len(axes) > 1 and axes[1] == self.tokens else None

    def cut(self, name: str, shape: Bucket) -> tuple[slice, ...]:
        """What of an output belongs to a batch of this shape."""
        sizes = {self.rows: shape[0], self.tokens: shape[1]}
        return tuple(
            slice(sizes[axis]) if isinstance(axis, str) and axis in sizes else slice(None)
            for axis in self.outputs[name]
        )


class GraphRunner:
    """A session whose frequent shapes are captured as CUDA graphs, at most as many as its buckets.

    A run is padded up to its bucket, copied into the buffers that the graph reads, replayed, and
    its outputs are cut back. Rows are added as copies of the first one; tokens as zeros, of the
    attention mask too. Nothing is captured before ``allow_padding``. Where it allows none, or an
    output does not tell what to cut, a bucket is of the very shape of its runs.

    Args:
        session: With ``Cuda.graphs``.
        buckets: Which shapes are captured.
        place: Where its buffers lie.
    """

    def __init__(self, session: Any, buckets: Buckets, *, place: Place = "cuda") -> None:
        self.session, self.buckets = session, buckets
        self._layout = Layout.of(session)
        self._place: Place = place
        self._names = [value.name for value in session.get_outputs()]
        self._told = self._rows = self._tokens = False
        self._held: dict[Bucket, _Buffers] = {}
        # CUDA graphs belong to the thread that captured them: another one would capture its own.
        self._thread = ThreadPoolExecutor(1, "cuda-graphs")

    def get_inputs(self) -> Sequence[Any]:
        return self.session.get_inputs()

    def get_outputs(self) -> Sequence[Any]:
        return self.session.get_outputs()

    def allow_padding(self, *, rows: bool, tokens: bool) -> None:
        if self._layout is None:
            return
        self._told, cuts = True, self._layout.cuts
        self._rows = rows and cuts and isinstance(self._layout.rows, str)
        self._tokens = tokens and cuts

    def run(self, names: Sequence[str] | None, feed: Feed) -> list[np.ndarray]:
        return self._thread.submit(self._run, names or self._names, feed).result()

    def _run(self, names: Sequence[str], feed: Feed) -> list[np.ndarray]:
        layout = self._layout
        shape = layout.shape(feed) if layout is not None and self._told else None
        if layout is not None and shape is not None:
            bucket = self.buckets.choose(*shape, more_rows=self._rows, longer=self._tokens)
            if bucket is not None and (held := self._buffers(layout, bucket, feed)) is not None:
                return held.run(names, feed, shape)
        return self.session.run(names, dict(feed), _options())

    def _buffers(self, layout: Layout, bucket: Bucket, feed: Feed) -> _Buffers | None:
        """Those of a bucket; None where the model does not take its shape."""
        if bucket not in self._held:
            try:
                held = _Buffers(self.session, layout, bucket, feed, self._place)
            except Exception:  # longer than its positions, or no memory: it may still run as it is
                self.buckets.refuse(bucket)
                return None
            held.options = _options(graph=self.buckets.captured[bucket])
            self._held[bucket] = held
        return self._held[bucket]


class _Buffers:
    """What a captured graph reads and writes, at one bucket."""

    def __init__(
        self, session: Any, layout: Layout, bucket: Bucket, feed: Feed, place: Place
    ) -> None:
        self._session, self._layout = session, layout
        self._copies = place == "cuda"
        self._host: dict[str, np.ndarray] = {}
        for name, array in feed.items():
            rows, tokens = layout.padded(name, bucket)
            rest = array.shape[1:] if tokens is None else (tokens, *array.shape[2:])
            self._host[name] = np.zeros((rows, *rest), array.dtype)
        self._fill(feed)
        self._inputs = {name: _placed(array, place) for name, array in self._host.items()}
        first = _binding(session, self._inputs, place)
        session.run_with_iobinding(first, _options())  # makes the outputs, and captures nothing
        self._outputs = dict(zip(layout.outputs, first.get_outputs(), strict=True))
        self._binding = session.io_binding()
        for name, value in self._inputs.items():
            self._binding.bind_ortvalue_input(name, value)
        for name, value in self._outputs.items():
            self._binding.bind_ortvalue_output(name, value)
        self.options: Any = None

    def run(self, names: Sequence[str], feed: Feed, shape: Bucket) -> list[np.ndarray]:
        self._fill(feed)
        for name, value in self._inputs.items():
            value.update_inplace(self._host[name])
        self._session.run_with_iobinding(self._binding, self.options)
        found = [self._outputs[name].numpy()[self._layout.cut(name, shape)] for name in names]
        # From the device it is a copy already; the next run must not write into these answers.
        return found if self._copies else [array.copy() for array in found]

    def _fill(self, feed: Feed) -> None:
        for name, array in feed.items():
            buffer, rows = self._host[name], array.shape[0]
            if buffer.shape[1:] == array.shape[1:]:
                buffer[:rows] = array
            else:
                buffer[:rows, : array.shape[1]] = array
                buffer[:rows, array.shape[1] :] = 0
            buffer[rows:] = buffer[:1]


class _Pool:
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


def _binding(session: Any, inputs: Mapping[str, Any], place: Place) -> Any:
    """Inputs bound to where they are, outputs to be made in the same place."""
    binding = session.io_binding()
    for name, value in inputs.items():
        binding.bind_ortvalue_input(name, value)
    for value in session.get_outputs():
        binding.bind_output(value.name, place, DEVICE)
    return binding


def _placed(array: np.ndarray, place: Place) -> Any:
    return require_runtime().OrtValue.ortvalue_from_numpy(array, place, DEVICE)


def _options(*, graph: int | None = None, give_back: bool = False) -> Any:
    options = require_runtime().RunOptions()
    for name, value in run_entries(graph=graph, give_back=give_back).items():
        options.add_run_config_entry(name, value)
    return options


def give_back(session: Any, feed: Feed) -> None:
    """Run a small feed, then return what the GPU's arena does not use; nothing on the CPU."""
    if "CUDAExecutionProvider" in session.get_providers():
        session.run(None, dict(feed), _options(give_back=True))
