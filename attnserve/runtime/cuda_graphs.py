"""Runs of a session as captured CUDA graphs: padded up to a bucket, replayed, and cut back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from attnserve.runtime.buckets import Bucket, Buckets
from attnserve.runtime.io_binding import Feed, Place, binding_of, placed, run_options

__all__ = ["GraphRunner", "Layout"]

Axes = tuple[int | str | None, ...]


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
        return self.session.run(names, dict(feed), run_options())

    def _buffers(self, layout: Layout, bucket: Bucket, feed: Feed) -> _Buffers | None:
        """Those of a bucket; None where the model does not take its shape."""
        if bucket not in self._held:
            try:
                held = _Buffers(self.session, layout, bucket, feed, self._place)
            except Exception:  # longer than its positions, or no memory: it may still run as it is
                self.buckets.refuse(bucket)
                return None
            held.options = run_options(graph=self.buckets.captured[bucket])
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
        self._inputs = {name: placed(array, place) for name, array in self._host.items()}
        first = binding_of(session, self._inputs, place)
        session.run_with_iobinding(first, run_options())  # makes the outputs, and captures nothing
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
