"""Pad the runs of runtimes that compile kernels for each size.

OpenVINO compiles kernels for each new number of tokens of a run (rows x longest row). That can take
longer than the run, above all in int8. Runs are therefore padded to few sizes, which are compiled
before the first request.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Protocol, runtime_checkable

import numpy as np

from attnserve.runtime.by_load import run_together
from attnserve.runtime.interface import Feed, Session, SessionWrapper
from attnserve.serving.buckets import Bucket
from attnserve.serving.signature import Axes

__all__ = ["Layout", "PaddingRunner", "PaddingSession", "padded_length", "run_overhead"]

LARGEST = 512
"""Maximum tokens of a run that is compiled before the first request."""

SECONDS = 3.0
"""Seconds after which no further size is compiled before the first request."""

OVERHEAD_TOKENS, OVERHEAD_LENGTH = (32, 256), 16
"""Tokens of the two runs whose times give the cost of starting a run; maximum tokens of a row."""

OVERHEAD_RUNS, OVERHEAD_SECONDS = 4, 0.5
"""Maximum number of runs at each number of tokens, and seconds after which two runs suffice. The
first run compiles kernels."""

OVERHEAD_SHARE = 0.5
"""Fraction of the cost of starting a run that a row may add as padding. For requests of 30 pairs
(17 to 46 tokens each) and MiniLM in float32, bfloat16 and int8, in ONNX Runtime and OpenVINO on one
and two threads, half gave the least time within the noise; the cost is 10 (float32) to 70 tokens
(bfloat16)."""


@dataclass(frozen=True)
class Layout:
    """The batch and sequence axes of the inputs and outputs of a model.

    Attributes:
        rows: Name or size of the first axis of all inputs.
        tokens: Name of the dynamic second axis; empty if no input has one.
        inputs, outputs: The axes of each tensor, by name.
    """

    rows: int | str
    tokens: str
    inputs: Mapping[str, Axes]
    outputs: Mapping[str, Axes]

    @classmethod
    def of(cls, session: Session) -> Layout | None:
        """The layout of a session's model; None if its inputs have other dynamic axes."""
        inputs = {value.name: tuple(value.shape) for value in session.get_inputs()}
        outputs = {value.name: tuple(value.shape) for value in session.get_outputs()}
        rows = {axes[0] if axes else None for axes in inputs.values()}
        tokens = {axis for axes in inputs.values() for axis in axes[1:2] if type(axis) is not int}
        feature_axes = {axis for axes in inputs.values() for axis in axes[2:]}
        if len(rows) != 1 or len(tokens) > 1 or not all(type(axis) is int for axis in feature_axes):
            return None
        first = rows.pop()
        second = tokens.pop() if tokens else ""
        if first is None or not isinstance(second, str) or first == second:  # an axis has no name
            return None
        return cls(first, second, inputs, outputs)

    @property
    def can_slice(self) -> bool:
        """Whether all dynamic axes of the outputs are known, so that padding can be removed."""
        return all(
            axes and all(isinstance(axis, int) or axis in (self.rows, self.tokens) for axis in axes)
            for axes in self.outputs.values()  # without axes, the rank is unknown
        )

    def shape(self, feed: Feed) -> Bucket | None:
        """(rows, tokens) of a batch; None if they differ between tensors or one is 0."""
        rows = {array.shape[0] for array in feed.values()}
        tokens = {
            feed[name].shape[1]
            for name, axes in self.inputs.items()
            if len(axes) > 1 and axes[1] == self.tokens
        } or {1}
        if len(rows) != 1 or len(tokens) != 1:
            return None
        shape = rows.pop(), tokens.pop()
        return shape if min(shape) > 0 else None

    def padded(self, name: str, bucket: Bucket) -> tuple[int, int | None]:
        """The first two sizes of an input in a bucket; the second is None if that axis is fixed."""
        axes = self.inputs[name]
        return bucket[0], bucket[1] if len(axes) > 1 and axes[1] == self.tokens else None

    def cut(self, name: str, shape: Bucket) -> tuple[slice, ...]:
        """The slices of a padded output that belong to a batch of this shape."""
        sizes = {self.rows: shape[0], self.tokens: shape[1]}
        return tuple(
            slice(sizes[axis]) if isinstance(axis, str) and axis in sizes else slice(None)
            for axis in self.outputs[name]
        )


def padded_length(rows: int, length: int, multiple: int) -> int:
    """The least length that makes the number of tokens of a run a multiple."""
    step = multiple // math.gcd(rows, multiple)
    return -(-length // step) * step


@runtime_checkable
class PaddingSession(Session, Protocol):
    """A session that pads its runs, if padding does not change their results."""

    def allow_padding(self, *, rows: bool, tokens: bool) -> None:
        """Declare that padding a batch with rows or tokens does not change its results."""
        ...


def run_overhead(session: Session, example: Feed) -> int | None:
    """The padding that costs half as much as starting a run, in tokens; None for other inputs.

    Args:
        example: Inputs that the session runs.
    """
    layout = Layout.of(session)
    if layout is None or not layout.tokens or isinstance(layout.rows, int):
        return None
    shape = layout.shape(example)
    if shape is None:
        return None
    length = min(shape[1], OVERHEAD_LENGTH)
    small, large = (tokens // length * length for tokens in OVERHEAD_TOKENS)
    seconds: list[float] = []
    for tokens in (small, large):
        feed = _repeated(layout, example, (tokens // length, length))
        times: list[float] = []
        while len(times) < 2 or (len(times) < OVERHEAD_RUNS and sum(times) < OVERHEAD_SECONDS):
            start = perf_counter()
            session.run(None, feed)
            times.append(perf_counter() - start)
        seconds.append(min(times))
    per_token = (seconds[1] - seconds[0]) / (large - small)
    if per_token <= 0:
        return LARGEST
    return min(round(OVERHEAD_SHARE * max(seconds[0] / per_token - small, 0.0)), LARGEST)


class PaddingRunner(SessionWrapper[Session]):
    """A session of few sizes: rows are padded with zeros, also in the attention mask.

    Args:
        session: The inner session; runs are not padded before ``allow_padding``.
        multiple: The number of tokens of a run is padded to a multiple of this number.
        longest: Maximum sequence length of the model, which padding does not exceed.
    """

    def __init__(self, session: Session, *, multiple: int, longest: int) -> None:
        super().__init__(session)
        self._multiple, self._longest = multiple, longest
        self._layout: Layout | None = None

    @property
    def multiple(self) -> int:
        """The number of tokens of a run is padded to a multiple of this number."""
        return 1 if self._layout is None else self._multiple

    def allow_padding(self, *, rows: bool, tokens: bool) -> None:
        """Pad runs from now on if ``tokens`` may be padded; rows are never added."""
        layout = Layout.of(self.session)
        self._layout = layout if tokens and layout and layout.tokens and layout.can_slice else None

    def compile_sizes(self, example: Feed, least: int, concurrency: int = 1) -> None:
        """Run the padded sizes, smallest first, until all are compiled or the time is over.

        Args:
            example: Inputs of at least one row and token.
            least: The least number of tokens of a run.
            concurrency: Number of concurrent runs.
        """
        layout, length, end = self._layout, self._multiple, perf_counter() + SECONDS
        if layout is None or isinstance(layout.rows, int) or length > self._longest:
            return
        for rows in range(-(-least // length), LARGEST // length + 1):
            if perf_counter() > end:
                return
            feed = _repeated(layout, example, (max(rows, 1), length))
            self.session.run(None, feed)
            if concurrency > 1:
                run_together(partial(self.session.run, None, feed), concurrency)

    def run(self, names: Sequence[str] | None, feed: Feed) -> list[np.ndarray]:
        layout = self._layout
        shape = layout.shape(feed) if layout is not None else None
        if layout is None or shape is None:
            return self.session.run(names, feed)
        length = padded_length(*shape, self._multiple)
        padded = shape[0], length
        if length == shape[1] or length > self._longest:
            return self.session.run(names, feed)
        outputs = self.session.run(names, _padded(layout, feed, padded))
        names = names or list(layout.outputs)
        return [
            np.ascontiguousarray(output[layout.cut(name, shape)])
            for name, output in zip(names, outputs, strict=True)
        ]


def _padded(layout: Layout, feed: Feed, shape: Bucket) -> dict[str, np.ndarray]:
    """Inputs with zeros behind the tokens of each row."""
    padded: dict[str, np.ndarray] = {}
    for name, array in feed.items():
        tokens = layout.padded(name, shape)[1]
        padded[name] = array
        if tokens is not None:
            padded[name] = np.zeros((array.shape[0], tokens, *array.shape[2:]), array.dtype)
            padded[name][:, : array.shape[1]] = array
    return padded


def _repeated(layout: Layout, example: Feed, shape: Bucket) -> dict[str, np.ndarray]:
    """The rows and tokens of an example, repeated to a shape."""
    repeated: dict[str, np.ndarray] = {}
    for name, array in example.items():
        rows, tokens = layout.padded(name, shape)
        indices = np.arange(rows) % array.shape[0]
        array = array[indices]
        if tokens is not None:
            array = array[:, np.arange(tokens) % array.shape[1]]
        repeated[name] = array
    return repeated
