"""Run a session through captured CUDA graphs: pad inputs to a bucket, replay, slice outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from attnserve.runtime.interface import Feed, Session, ValueInfo
from attnserve.runtime.io_binding import run_bound, run_options
from attnserve.runtime.onnx_runtime import BufferDevice, OnnxSession, placed
from attnserve.serving.buckets import Bucket, Buckets
from attnserve.serving.signature import Axes

__all__ = ["GraphRunner", "Layout"]


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
        """The first two sizes of an input in a bucket; the second is None for a fixed axis."""
        axes = self.inputs[name]
        return bucket[0], bucket[1] if len(axes) > 1 and axes[1] == self.tokens else None

    def cut(self, name: str, shape: Bucket) -> tuple[slice, ...]:
        """The slices of a padded output that belong to a batch of this shape."""
        sizes = {self.rows: shape[0], self.tokens: shape[1]}
        return tuple(
            slice(sizes[axis]) if isinstance(axis, str) and axis in sizes else slice(None)
            for axis in self.outputs[name]
        )


class CudaRunner:
    """A session on CUDA whose runs are prepared by a subclass."""

    def __init__(self, session: OnnxSession) -> None:
        self.session = session

    def get_inputs(self) -> Sequence[ValueInfo]:
        return self.session.get_inputs()

    def get_outputs(self) -> Sequence[ValueInfo]:
        return self.session.get_outputs()

    def bind(self, feed: Feed) -> Callable[[], object]:
        return self.session.bind(feed)


class GraphRunner(CudaRunner):
    """Run a session and capture frequent shapes as CUDA graphs.

    A run is padded to its bucket, copied into the input buffers of the graph and replayed; padding
    is removed from the outputs. Padding rows are copies of the first row. Padding tokens are zeros,
    also in the attention mask. Capturing starts after ``allow_padding``. If padding is not allowed,
    or an output has unknown dynamic axes, buckets have the exact shape of their runs.

    Args:
        session: A session with ``Cuda.graphs``.
        buckets: Selects the shapes to capture.
        device: Device of the buffers.
    """

    def __init__(
        self, session: OnnxSession, buckets: Buckets, *, device: BufferDevice = "cuda"
    ) -> None:
        super().__init__(session)
        self.buckets = buckets
        self._layout = Layout.of(session)
        self._device: BufferDevice = device
        self._names = [value.name for value in session.get_outputs()]
        self._may_capture = self._rows = self._tokens = False
        self._buffers: dict[Bucket, _Buffers] = {}
        # A CUDA graph can be replayed only by the thread that captured it.
        self._thread = ThreadPoolExecutor(1, "cuda-graphs")

    def allow_padding(self, *, rows: bool, tokens: bool) -> None:
        """Declare that padding a batch with rows or tokens does not change its results."""
        if self._layout is None:
            return
        self._may_capture = True
        can_slice = self._layout.can_slice
        self._rows = rows and can_slice and isinstance(self._layout.rows, str)
        self._tokens = tokens and can_slice

    def run(self, names: Sequence[str] | None, feed: Feed) -> list[np.ndarray]:
        return self._thread.submit(self._run, names or self._names, feed).result()

    def _run(self, names: Sequence[str], feed: Feed) -> list[np.ndarray]:
        layout = self._layout
        shape = layout.shape(feed) if layout is not None and self._may_capture else None
        if layout is not None and shape is not None:
            bucket = self.buckets.choose(*shape, more_rows=self._rows, longer=self._tokens)
            if bucket is not None and (buffers := self._buffers_of(layout, bucket, feed)):
                return buffers.run(names, feed, shape)
        return self.session.run(names, feed, run_options())

    def _buffers_of(self, layout: Layout, bucket: Bucket, feed: Feed) -> _Buffers | None:
        """The buffers of a bucket; None if the model cannot run its shape."""
        if bucket not in self._buffers:
            try:
                buffers = _Buffers(self.session, layout, bucket, feed, self._device)
            except Exception:  # no memory, or too long: the run may still succeed without padding
                self.buckets.refuse(bucket)
                return None
            buffers.options = run_options(graph=self.buckets.captured[bucket])
            self._buffers[bucket] = buffers
        return self._buffers[bucket]


class _Buffers:
    """The input and output buffers of the captured graph of one bucket."""

    def __init__(
        self, session: OnnxSession, layout: Layout, bucket: Bucket, feed: Feed, device: BufferDevice
    ) -> None:
        self._session, self._layout = session, layout
        self._copies = device == "cuda"
        self._host: dict[str, np.ndarray] = {}
        for name, array in feed.items():
            rows, tokens = layout.padded(name, bucket)
            row_shape = array.shape[1:] if tokens is None else (tokens, *array.shape[2:])
            self._host[name] = np.zeros((rows, *row_shape), array.dtype)
        self._fill(feed)
        self._inputs = {name: placed(array, device) for name, array in self._host.items()}
        binding = session.binding(self._inputs, device)
        run_bound(session, binding, run_options(), feed)  # allocates the outputs, without capture
        self._outputs = dict(zip(layout.outputs, binding.get_outputs(), strict=True))
        self._binding = session.native.io_binding()
        for name, value in self._inputs.items():
            self._binding.bind_ortvalue_input(name, value)
        for name, value in self._outputs.items():
            self._binding.bind_ortvalue_output(name, value)
        self.options: Any = None

    def run(self, names: Sequence[str], feed: Feed, shape: Bucket) -> list[np.ndarray]:
        self._fill(feed)
        for name, value in self._inputs.items():
            value.update_inplace(self._host[name])
        run_bound(self._session, self._binding, self.options, feed)
        arrays = [self._outputs[name].numpy()[self._layout.cut(name, shape)] for name in names]
        # numpy() copies from the device. On the CPU it is a view, which the next run overwrites.
        return arrays if self._copies else [array.copy() for array in arrays]

    def _fill(self, feed: Feed) -> None:
        for name, array in feed.items():
            buffer, rows = self._host[name], array.shape[0]
            if buffer.shape[1:] == array.shape[1:]:
                buffer[:rows] = array
            else:
                buffer[:rows, : array.shape[1]] = array
                buffer[:rows, array.shape[1] :] = 0
            buffer[rows:] = buffer[:1]
