"""Run a session through captured CUDA graphs: pad inputs to a bucket, replay, slice outputs."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from attnserve.runtime.interface import Feed, SessionWrapper
from attnserve.runtime.io_binding import run_bound, run_options
from attnserve.runtime.onnx_runtime import BufferDevice, OnnxSession, placed
from attnserve.serving.buckets import Bucket, Buckets
from attnserve.serving.padding import Layout

__all__ = ["GraphRunner"]


class GraphRunner(SessionWrapper[OnnxSession]):
    """Run a session and capture frequent shapes as CUDA graphs.

    Inputs are padded to the bucket and copied into the input buffers of the graph; the graph is
    replayed, and padding is removed from the outputs. Padding rows are copies of the first row.
    Padding tokens are zeros, also in the attention mask. Capturing starts after ``allow_padding``.
    Without padding, or with unknown dynamic axes of an output, buckets have the shape of the run.

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
            except Exception:  # no memory, or too long: a run without padding may still succeed
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
