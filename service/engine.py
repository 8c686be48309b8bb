"""The engine: one model, its tokenizer and its cost, run off the event loop.

Routes hand over named arrays or texts and await an ``Answer``. A request passes three gates: what
it holds is checked against the model, it is admitted (or refused: ``Overloaded``), and it waits for
a worker. Work runs in threads, because ONNX Runtime and the tokenizer release the interpreter's
lock; a request that is cancelled while it waits is never computed.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any, TypeVar

import numpy as np

from attnserve.artifact import load_model, open_artifact
from attnserve.inputs import id_bound
from attnserve.session import open_session
from attnserve.text import load_tokenizer, model_inputs, pool
from graph_passes.cost import model_cost
from graph_passes.errors import CheckFailed, InvalidData, InvalidModel
from service.errors import NotFound, NotReady, Overloaded, TooLarge
from service.settings import Settings

__all__ = ["Answer", "Engine", "Tensor"]

T = TypeVar("T")

DTYPES: Mapping[str, np.dtype[Any]] = {
    "tensor(bool)": np.dtype(np.bool_),
    "tensor(uint8)": np.dtype(np.uint8),
    "tensor(uint16)": np.dtype(np.uint16),
    "tensor(uint32)": np.dtype(np.uint32),
    "tensor(uint64)": np.dtype(np.uint64),
    "tensor(int8)": np.dtype(np.int8),
    "tensor(int16)": np.dtype(np.int16),
    "tensor(int32)": np.dtype(np.int32),
    "tensor(int64)": np.dtype(np.int64),
    "tensor(float16)": np.dtype(np.float16),
    "tensor(float)": np.dtype(np.float32),
    "tensor(double)": np.dtype(np.float64),
}
"""What ONNX Runtime calls the types that can be served."""


@dataclass(frozen=True)
class Tensor:
    """An input or output of the model.

    ``axes`` are sizes, or the names of axes that any size fits (None: without a name). ONNX Runtime
    says no axes for a scalar and for a tensor of any rank alike.
    """

    name: str
    dtype: np.dtype[Any]
    axes: tuple[int | str | None, ...]


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What was computed, and what it cost.

    ``queue_ms`` is the time spent waiting for a worker; ``tokens`` are without padding; ``macs``
    are exact at the true (padded) shape, None where the graph cannot be counted.
    """

    outputs: dict[str, np.ndarray]
    queue_ms: float
    tokenize_ms: float = 0.0
    compute_ms: float
    tokens: int
    macs: int | None


class Engine:
    """A loaded model.

    Args:
        settings: What to load, and its limits.

    Raises:
        InvalidModel: The model cannot be read, or has an input or output that is no plain tensor.
        InvalidArgument: The provider is not available here.
        MissingExtra: ONNX Runtime is not installed.
    """

    def __init__(self, settings: Settings) -> None:
        self.artifact = open_artifact(settings.model)
        self.settings = settings
        model = load_model(self.artifact)
        self._cost = model_cost(model)
        self._id_bounds = {
            value.name: bound for value in model.graph.inputs if (bound := id_bound(value))
        }
        self._session = open_session(
            self.artifact.model, provider=settings.provider, threads=settings.threads
        )
        self.inputs = tuple(_tensor(value) for value in self._session.get_inputs())
        self.outputs = tuple(_tensor(value) for value in self._session.get_outputs())
        path = self.artifact.tokenizer
        self._encoder = load_tokenizer(path, max_length=self.artifact.max_length) if path else None
        self._in_flight = 0
        # Texts have a thread of their own: a short text does not wait behind long runs.
        self._tokenizing = ThreadPoolExecutor(1, "tokenize")
        self._computing = ThreadPoolExecutor(settings.concurrency, "compute")

    @property
    def name(self) -> str:
        return self.artifact.name

    @property
    def in_flight(self) -> int:
        """Requests that wait or run."""
        return self._in_flight

    def close(self) -> None:
        """Finish the runs that have begun, drop the others."""
        self._tokenizing.shutdown(wait=False, cancel_futures=True)
        self._computing.shutdown(wait=True, cancel_futures=True)

    async def infer(self, inputs: Mapping[str, np.ndarray], outputs: Sequence[str] = ()) -> Answer:
        """Run the model.

        Args:
            inputs: Every input of the model, by name.
            outputs: The names of the outputs to return, in this order; all where empty.

        Raises:
            InvalidData: The inputs do not fit the model, or there is no such output.
            TooLarge: More tokens than one request may have.
            Overloaded: Too many requests wait.
            NotReady: Memory ran out.
        """
        known = [output.name for output in self.outputs]
        for name in outputs:
            if name not in known:
                raise InvalidData(f"unknown output {name!r}: expected one of {', '.join(known)}")
        self._check(inputs)
        with self._admitted():
            results, queue_ms, compute_ms = await _timed(
                self._computing, self._run, inputs, outputs or known
            )
        return Answer(
            outputs=results,
            queue_ms=queue_ms,
            compute_ms=compute_ms,
            tokens=self._tokens(inputs),
            macs=self._macs(inputs),
        )

    async def embed(self, texts: Sequence[str], *, truncate: bool) -> Answer:
        """A vector for each text, as ``outputs["embeddings"]`` of shape (texts, hidden size).

        Args:
            texts: At least one.
            truncate: Cut texts that are too long; False refuses them.

        Raises:
            NotFound: There is no tokenizer beside the model, or its outputs are no embeddings.
            InvalidData: A text is too long.
            TooLarge: More texts or tokens than one request may have.
            Overloaded: Too many requests wait.
            NotReady: Memory ran out.
        """
        if self._encoder is None:
            raise NotFound(
                f"{self.name} has no tokenizer.json beside it, which embedding texts needs",
                f"send token ids to /v2/models/{self.name}/infer",
            )
        if len(texts) > self.settings.max_inputs:
            raise TooLarge(
                f"{len(texts)} texts in one request: at most {self.settings.max_inputs}",
                "send them in several requests",
            )
        with self._admitted():
            inputs, queue_ms, tokenize_ms = await _timed(
                self._tokenizing, self._tokenize, texts, truncate
            )
            self._check(inputs)
            vectors, more_queue_ms, compute_ms = await _timed(self._computing, self._embed, inputs)
        return Answer(
            outputs={"embeddings": vectors},
            queue_ms=queue_ms + more_queue_ms,
            tokenize_ms=tokenize_ms,
            compute_ms=compute_ms,
            tokens=self._tokens(inputs),
            macs=self._macs(inputs),
        )

    @contextmanager
    def _admitted(self) -> Iterator[None]:
        if self._in_flight >= self.settings.max_queue + self.settings.concurrency:
            raise Overloaded(f"{self._in_flight} requests wait already", "try again later")
        self._in_flight += 1
        try:
            yield
        finally:
            self._in_flight -= 1

    def _run(self, inputs: Mapping[str, np.ndarray], outputs: Sequence[str]) -> dict[str, Any]:
        try:
            results = self._session.run(list(outputs), dict(inputs))
        except Exception as error:  # onnxruntime raises a class of its own for each status
            raise _run_failed(error, inputs) from error
        return dict(zip(outputs, results, strict=True))

    def _tokenize(self, texts: Sequence[str], truncate: bool) -> dict[str, np.ndarray]:
        assert self._encoder is not None
        encodings = self._encoder.encode(texts, truncate=truncate)
        return self._encoder.batch_inputs(encodings, model_inputs(self._session))

    def _embed(self, inputs: Mapping[str, np.ndarray]) -> np.ndarray:
        first = self.outputs[0].name
        hidden = self._run(inputs, [first])[first]
        mask = inputs.get("attention_mask")
        if mask is None:  # without a mask there is no padding
            mask = np.ones(hidden.shape[:2], dtype=np.bool_)
        vectors = pool(hidden, mask, self.artifact.pooling, self.artifact.normalize)
        if not np.isfinite(vectors).all():
            raise CheckFailed(
                f"{self.name} gives NaN or infinite numbers for these texts",
                "check its weights, and that it does not overflow in half precision",
            )
        return vectors

    def _check(self, inputs: Mapping[str, np.ndarray]) -> None:
        """Refuse, in words, what the runtime would refuse in its own, or answer with nonsense."""
        expected = [tensor.name for tensor in self.inputs]
        for name in inputs:
            if name not in expected:
                raise InvalidData(
                    f"unknown input {name!r}: {self.name} takes {', '.join(expected)}"
                )
        for name in expected:
            if name not in inputs:
                raise InvalidData(
                    f"missing input {name!r}: {self.name} takes {', '.join(expected)}"
                )
        sizes: dict[str, tuple[int, str]] = {}
        for tensor in self.inputs:
            self._check_tensor(tensor, inputs[tensor.name], sizes)
        padded = math.prod(self._ids(inputs).shape[:2])
        if padded > self.settings.max_tokens:
            raise TooLarge(
                f"{padded} tokens in one request, padding included:"
                f" at most {self.settings.max_tokens}",
                "send them in several requests",
            )

    def _check_tensor(
        self, tensor: Tensor, array: np.ndarray, sizes: dict[str, tuple[int, str]]
    ) -> None:
        what = f"input {tensor.name!r}"
        if array.dtype != tensor.dtype:
            raise InvalidData(f"{what} is {array.dtype}: expected {tensor.dtype}")
        fixed = [axis if isinstance(axis, int) else -1 for axis in tensor.axes]
        if fixed and (
            array.ndim != len(fixed)
            or any(want not in (-1, got) for want, got in zip(fixed, array.shape, strict=True))
        ):
            raise InvalidData(f"{what} has shape {list(array.shape)}: expected {fixed}")
        # Ids and masks are never empty; the cache of a decoder is, at its first step.
        if array.size == 0 and array.ndim <= 2:
            raise InvalidData(f"{what} has shape {list(array.shape)}: it is empty")
        # The runtime would broadcast where it can: another answer, at another cost.
        for axis, size in zip(tensor.axes, array.shape, strict=False):
            if isinstance(axis, str) and (known := sizes.setdefault(axis, (size, what)))[0] != size:
                raise InvalidData(
                    f"{what} has shape {list(array.shape)}: its axis {axis!r} is {size},"
                    f" but {known[0]} in {known[1]}"
                )
        # A CUDA Gather reads outside of its table without a word, and -1 is nobody's token.
        bound = self._id_bounds.get(tensor.name)
        if bound and array.size and (array.min() < 0 or array.max() >= bound):
            wrong = array[(array < 0) | (array >= bound)].flat[0]
            raise InvalidData(f"{what} holds {wrong}: expected ids from 0 to {bound - 1}")

    def _ids(self, inputs: Mapping[str, np.ndarray]) -> np.ndarray:
        """The input whose first two axes count tokens."""
        return inputs["input_ids"] if "input_ids" in inputs else inputs[self.inputs[0].name]

    def _tokens(self, inputs: Mapping[str, np.ndarray]) -> int:
        mask = inputs.get("attention_mask")
        if mask is not None:
            return int(np.count_nonzero(mask))
        return math.prod(self._ids(inputs).shape[:2])

    def _macs(self, inputs: Mapping[str, np.ndarray]) -> int | None:
        return self._cost.macs_of({name: array.shape for name, array in inputs.items()})


async def _timed(
    executor: ThreadPoolExecutor, work: Callable[..., T], *args: Any
) -> tuple[T, float, float]:
    """(result of ``work``, milliseconds it waited, milliseconds it took)."""
    submitted = perf_counter()

    def run() -> tuple[T, float, float]:
        started = perf_counter()
        result = work(*args)
        return result, (started - submitted) * 1e3, (perf_counter() - started) * 1e3

    return await asyncio.get_running_loop().run_in_executor(executor, run)


def _tensor(value: Any) -> Tensor:
    if value.type not in DTYPES:
        raise InvalidModel(
            f"{value.name!r} is a {value.type}: only tensors of numbers and booleans are served",
            "export the model without it",
        )
    return Tensor(value.name, DTYPES[value.type], tuple(value.shape))


def _run_failed(error: Exception, inputs: Mapping[str, np.ndarray]) -> Exception:
    """What a failed run means: no memory, a broken device, or inputs that the graph cannot take.

    Types, ranks and names are checked before a run, and a graph that loads is well formed, so what
    is left of a failure on the host lies in the sizes and values of the inputs: most often a
    sequence longer than the model's positions.
    """
    text = str(error)
    if re.search(r"allocat|out of memory", text, re.IGNORECASE):
        return NotReady("out of memory for this request", "send fewer or shorter texts at a time")
    if type(error).__name__ == "EPFail" or "CUDA failure" in text:
        return error
    detail = text.strip().rpartition("Status Message: ")[2]
    detail = re.sub(r"^/\S+:\d+ [^)]*\) ", "", detail).splitlines()  # where in its C++ sources
    shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in inputs.items())
    return InvalidData(
        f"the model cannot run {shapes}: {detail[0][:300] if detail else type(error).__name__}",
        "is the sequence longer than the model's positions?",
    )
