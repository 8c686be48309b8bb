"""Engine: one loaded model with its batcher.

A request is checked against the model, accepted or refused (``Overloaded``), split into rows, and
assembled from the results of its rows. Texts are tokenized in a thread, not on the event loop.
After a failure of the session the engine is not ready: it retries the session, then reloads the
model until the model runs. A request that does not fit into memory fails alone.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Generator, Hashable, Iterable, Sequence
from contextlib import contextmanager
from itertools import chain, repeat
from threading import Lock
from time import perf_counter_ns
from typing import Any, NamedTuple, TypeVar

import numpy as np

from attnserve.data.token_statistics import CalibrationRange, row_ids
from attnserve.literals import Side
from attnserve.models.rows import check_rows, join_rows, join_values, split_rows
from attnserve.models.tokenizer import Encoding, Text, TextEncoder
from attnserve.runtime.interface import Feed, row_length
from attnserve.serving.loaded_model import Model, ModelFailed, OutOfMemory
from attnserve.serving.text_tasks import TextTask
from service.engine.answer import RowOutputs, TensorAnswer, TextAnswer
from service.engine.batcher import Batcher, BatchResult, BatchRun, RequestResult
from service.engine.request_limits import (
    check_encodings,
    check_limit,
    check_tensors,
    check_texts,
)
from service.engine.row_queue import Queue, Row
from service.engine.shadow import Shadow
from service.errors import NotReady, UnsupportedTask, error_class, hide_folders
from service.metrics import ModelMetrics, StageNanoseconds, VersionState
from service.settings import Settings

T = TypeVar("T")

RETRY_S = (0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
"""Delays before each attempt to reload a broken model; the last one repeats."""

COPIES = 2
"""Number of copies of the output tensors of a request: per row, and joined for the answer."""

log = logging.getLogger("attnserve")


class RowKey(NamedTuple):
    """The common properties of the rows of one run.

    Attributes:
        task: The task of texts; None for tensors.
        outputs: The names of the outputs that the rows need.
        group: Further properties. For texts the kernels and, without a mask, the length; for
            tensors the shapes, or a unique object if the row runs alone.
    """

    task: TextTask | None
    outputs: tuple[str, ...]
    group: Hashable


class Engine:
    """Serves one version of a model.

    Args:
        model: A loaded and warmed-up model; the engine closes it.
        settings: Batching parameters and limits of requests.
        metrics: Receives the measurements.
        reload: Loads the same model again after a failure of its session; called in a thread.
        shadow: Receives the rows of answered requests.
        version: A number, as text.
        identity: A checksum of the files of the model, with external data.
    """

    def __init__(
        self,
        model: Model,
        settings: Settings,
        metrics: ModelMetrics,
        reload: Callable[[], Model],
        shadow: Shadow,
        *,
        version: str = "1",
        identity: str = "",
    ) -> None:
        self.model = model
        self.version, self.identity = version, identity
        self._range = CalibrationRange.read(model.artifact.lineage)
        self._shadow = shadow
        self.settings = settings
        self.metrics = metrics
        # Runs on a GPU, of a fixed number of rows, or after a wait take all rows that fit.
        is_divided = model.provider == "cpu" and not model.signature.fixed_rows
        overhead = settings.overhead_tokens(model.run_overhead)
        self.batcher = Batcher(
            self._run,
            Queue(settings.batch_tokens(overhead), overhead, model.max_rows, model.size_multiple),
            max_wait_ms=settings.max_wait_ms,
            max_queue=settings.max_queue,
            concurrency=model.concurrency,
            parts=model.concurrency if is_divided and not settings.max_wait_ms else 1,
            on_batch=self._record_batch,
            on_failure=self._failed,
        )
        # Long texts take seconds to tokenize: /tokenize has a thread of its own.
        self._tokenizer = Batcher(
            lambda _, encodings: BatchResult(encodings),
            Queue(settings.max_inputs),
            max_queue=settings.max_queue,
        )
        self.reload = reload
        self.in_flight = 0
        """Number of open requests."""
        self._users = 0
        self._unused = asyncio.Event()
        self._broken: str | None = None
        self._recovering: asyncio.Task[None] | None = None
        # The end of ``_recovering`` does not end its thread, which may load a model meanwhile.
        self._replacing, self._is_closed = Lock(), False

    @property
    def name(self) -> str:
        return self.model.name

    @property
    def ready(self) -> bool:
        """Whether the model can run; a full queue does not affect readiness."""
        return self._broken is None and not self._is_stuck

    @property
    def reason(self) -> str:
        """The reason why the engine is not ready; empty if it is."""
        stuck = "a run does not end" if self._is_stuck else ""
        return hide_folders(self._broken or stuck, self.settings.model)

    @property
    def state(self) -> VersionState:
        """The state of this version for the metrics and other workers."""
        model = self.model
        return VersionState(
            self.name,
            self.version,
            self.waiting,
            self.in_flight,
            self.ready,
            model.runtime,
            model.precision,
        )

    @property
    def _is_stuck(self) -> bool:
        return self.batcher.is_stuck or self._tokenizer.is_stuck

    # -- requests ---------------------------------------------------------------------------------

    async def infer(
        self,
        inputs: Feed,
        outputs: Sequence[str] = (),
        deadline: float | None = None,
        hold: Callable[[int, float | None], Awaitable[None]] | None = None,
    ) -> TensorAnswer:
        """Run the model on tensors.

        Args:
            inputs: Every input of the model, by name.
            outputs: Names of the outputs to return, in this order; all if empty.
            deadline: On the clock of ``perf_counter``; None for none.
            hold: Waits for free memory, given the bytes of the answer and the deadline.

        Raises:
            InvalidData: The inputs do not fit the model, or an output is unknown.
            TooLarge: Too many tokens or bytes in one request.
            Overloaded: The queue is full.
            DeadlineExceeded: The deadline passed.
            NotReady: The model is broken, or out of memory.
        """
        with self._counted() as started_ns:
            signature = self.model.signature
            signature.check_outputs(outputs)
            signature.check(inputs)
            names = tuple(outputs) or signature.output_names
            expected_bytes = check_tensors(self.model, self.settings, inputs, names)
            if hold is not None:
                await hold(COPIES * expected_bytes, deadline)
            rows = self._tensor_rows(inputs, names)
            result = await self.batcher.submit(rows, deadline)
            computed_ns = perf_counter_ns()
            arrays = [join_values(parts) for parts in zip(*result.results, strict=True)]
            output_bytes = sum(array.nbytes for array in arrays)
            check_limit(output_bytes, self.settings.max_tensor_bytes, "bytes of output tensors")
            answer = TensorAnswer(
                outputs=dict(zip(names, arrays, strict=True)),
                result=result,
                tokens=signature.tokens(inputs),
                padded_tokens=math.prod(signature.ids(inputs).shape[:2]),
                out_of_calibration=self._count_outside(row_ids(inputs)),
                follow_up=self._shadow.follow_up(self, None, names, result.rows),
            )
            self._record_success(result, started_ns, computed_ns)
        return answer

    async def run_task(
        self,
        task: TextTask,
        texts: Sequence[Text | Encoding],
        *,
        truncate: bool = True,
        side: Side | None = None,
        deadline: float | None = None,
    ) -> TextAnswer:
        """Embed, classify or rerank texts; ``vectors`` has one row per text.

        Args:
            task: A row holds the embedding of a text ("embed"), the logits of its classes
                ("classify"), the logit of a query and a text ("rerank"), or the weights of the
                vocabulary ("sparse"). "tokens" has one row per token of all texts
                (``TextAnswer.lengths``).
            texts: One or more texts, pairs of texts, or token ids with the special tokens.
            truncate: Truncate texts that are too long; False refuses them.
            side: The side at which texts lose tokens; None for the tokenizer's own.
            deadline: On the clock of ``perf_counter``; None for none.

        Raises:
            UnsupportedTask: The model has no tokenizer, or has no embeddings, classes or reranker.
            InvalidData: A text is too long, or the model takes no texts.
            InvalidArgument: The outputs of the model are not embeddings.
            TooLarge: Too many texts, characters or tokens in one request.
            Overloaded, DeadlineExceeded, NotReady: In the cases of ``infer``.
        """
        model = self.model
        if (refusal := model.tasks[task]) is not None:
            raise refusal.error("", kind=UnsupportedTask, area="model")
        with self._counted() as started_ns:
            is_short = check_texts(model, self.settings, texts)
            names = (model.text_output(task),)

            def rows() -> list[Row[Encoding, RowOutputs]]:  # in a thread
                encodings = model.encode(texts, truncate=truncate, side=side)
                check_encodings(model, self.settings, task, encodings, names)
                return [self._text_row(task, names, encoding) for encoding in encodings]

            result = await self.batcher.submit_from(rows, len(texts), deadline, is_short=is_short)
            computed_ns = perf_counter_ns()
            vectors = [vector for (vector,) in result.results]
            encodings = [row.payload for row in result.rows]
            lengths = list(map(len, encodings))
            answer = TextAnswer(
                vectors=np.concatenate(vectors) if task == "tokens" else join_values(vectors),
                lengths=lengths,
                result=result,
                tokens=sum(lengths),
                padded_tokens=sum(count * batch.longest for batch, count in result.batches),
                out_of_calibration=self._count_outside(encoding.ids for encoding in encodings),
                follow_up=self._shadow.follow_up(self, task, names, result.rows, texts),
            )
            self._record_success(result, started_ns, computed_ns)
        return answer

    async def tokenize(
        self,
        texts: Sequence[Text | Encoding],
        work: Callable[[TextEncoder], Sequence[T]],
        *,
        deadline: float | None = None,
    ) -> Sequence[T]:
        """Return the result of ``work`` for each text. Only the tokenizer runs, not the model.

        Raises:
            UnsupportedTask: The model has no tokenizer.
            InvalidData: The tokenizer fails on a text.
            TooLarge: Too many texts or characters in one request.
            Overloaded, DeadlineExceeded, NotReady: In the cases of ``infer``.
        """
        with self._counted():
            is_short = check_texts(self.model, self.settings, texts)
            encoder = self.model.encoder
            assert encoder is not None

            def rows() -> list[Row[T, T]]:  # in a thread
                return [Row((), 1, item) for item in work(encoder)]

            result = await self._tokenizer.submit_from(
                rows, len(texts), deadline, is_short=is_short
            )
        return result.results

    # -- lifetime ---------------------------------------------------------------------------------

    @property
    def waiting(self) -> int:
        """Waiting rows, including texts that wait for tokenization."""
        return self.batcher.waiting + self._tokenizer.waiting

    def refuse_all(self, error: Exception) -> None:
        """Answer all open requests with ``error``."""
        self.batcher.refuse_all(error)
        self._tokenizer.refuse_all(error)

    def acquire(self) -> None:
        """Keep the engine open until ``release``."""
        self._users += 1

    def release(self) -> None:
        """Undo one ``acquire``."""
        self._users -= 1
        if not self._users:
            self._unused.set()

    async def retire(self) -> None:
        """Answer the accepted requests, then free the session."""
        while self._users:
            self._unused.clear()
            await self._unused.wait()
        if self._recovering is not None:
            self._recovering.cancel()
        await asyncio.to_thread(self.close)

    def close(self) -> None:
        """Refuse open requests, wait for the current runs, free the session."""
        self.batcher.close()
        self._tokenizer.close()
        with self._replacing:
            self._is_closed = True
            self.model.close()

    # -- runs -------------------------------------------------------------------------------------

    @contextmanager
    def _counted(self) -> Generator[int]:
        """Count an open request and its failure; yield the start of the request in nanoseconds."""
        start_ns = perf_counter_ns()
        self.in_flight += 1
        self.acquire()
        try:
            if self._broken is not None:
                raise NotReady(f"{self.name} is not ready: {self._broken}", "try again later")
            yield start_ns
        except BaseException as error:
            reason = error_class(error).reason
            self.metrics.record_failure(perf_counter_ns() - start_ns, reason)
            raise
        finally:
            self.in_flight -= 1
            self.release()

    def _record_success(
        self, result: RequestResult[Any, RowOutputs], started_ns: int, computed_ns: int
    ) -> None:
        """Record an answered request, which started and was computed at these times."""
        now_ns = perf_counter_ns()
        runs = [batch.result.stage_ns for batch, _ in result.batches]
        before, inside, after = map(sum, zip(*runs, strict=True))
        inside = min(inside, int(result.compute_ms * 1e6))  # concurrent runs take the same time
        stages = StageNanoseconds(
            queue=int(result.queue_ms * 1e6),
            compute_input=int(result.prepare_ms * 1e6) + before,
            compute_infer=inside,
            compute_output=now_ns - computed_ns + after,
        )
        self.metrics.record_success(now_ns - started_ns, stages)

    def _text_row(
        self, task: TextTask, names: tuple[str, ...], encoding: Encoding
    ) -> Row[Encoding, RowOutputs]:
        model, length = self.model, len(encoding)
        tokens = model.fixed_tokens or length
        group = (model.kernels_of(tokens), None if model.signature.takes_mask else length)
        return Row(RowKey(task, names, group), tokens, encoding, real_tokens=length)

    def _tensor_rows(self, inputs: Feed, names: tuple[str, ...]) -> list[Row[Feed, RowOutputs]]:
        ids = self.model.signature.ids(inputs)
        length = max(1, ids.shape[1] if ids.ndim > 1 else 1)
        rows = split_rows(inputs) if self.model.rows_are_independent else None
        if rows is None:
            count = ids.shape[0] if ids.ndim else 1
            return [Row(RowKey(None, names, object()), length * max(1, count), inputs)]
        shapes = tuple((name, inputs[name].shape[1:]) for name in sorted(inputs))
        return [Row(RowKey(None, names, shapes), length, row) for row in rows]

    def _run(self, key: RowKey, payloads: list[Any]) -> BatchResult:
        """Run one batch, in a thread of the batcher."""
        model, task = self.model, key.task
        start_ns = perf_counter_ns()
        inputs = join_rows(payloads) if task is None else model.text_inputs(payloads)
        prepared_ns = perf_counter_ns()
        outputs = tuple(model.run(inputs, key.outputs).values())
        inferred_ns = perf_counter_ns()
        if len(payloads) > 1 or task is not None:
            check_rows(inputs, outputs)
        results: list[RowOutputs]
        if task is not None:
            results = [(row,) for row in model.text_rows(task, payloads, inputs, outputs[0])]
        elif len(payloads) == 1:
            results = [outputs]
        else:
            results = [
                tuple(output[index : index + 1] for output in outputs)
                for index in range(len(payloads))
            ]
        macs = model.macs(inputs)
        ended_ns = perf_counter_ns()
        stage_ns = prepared_ns - start_ns, inferred_ns - prepared_ns, ended_ns - inferred_ns
        return BatchResult(results, macs, model.runtime_for(row_length(inputs)), stage_ns)

    def _count_outside(self, rows: Iterable[Sequence[int] | np.ndarray]) -> int:
        """Count the rows of token ids that are outside of the calibration data."""
        if self._range is None:
            return 0
        reasons_by_row = [reasons for ids in rows if (reasons := self._range.reasons(ids))]
        for reason in chain.from_iterable(reasons_by_row):
            self.metrics.record_outside(reason)
        return len(reasons_by_row)

    # -- failures ---------------------------------------------------------------------------------

    def _record_batch(self, batch: BatchRun) -> None:
        macs, stage_ns = batch.result.macs, batch.result.stage_ns
        self.metrics.record_run(batch.rows, batch.tokens, batch.padded_tokens, macs, stage_ns)

    def _failed(self, error: ModelFailed) -> None:
        """Handle a failure of the session: pause until the model runs again.

        One large request may cause a failed allocation: the model stays ready if it still runs the
        warm-up example.
        """
        if self._recovering is None or self._recovering.done():
            if not isinstance(error, OutOfMemory):
                self._break(error)
            self._recovering = asyncio.get_running_loop().create_task(self._recover())

    def _break(self, error: Exception) -> None:
        self._broken = next(iter(str(error).splitlines()), type(error).__name__)
        log.error("%s version %s is not ready: %s", self.name, self.version, self._broken)
        self.batcher.pause()

    async def _recover(self) -> None:
        """Retry the session, then reload the model until it runs."""
        renew = self.model.warm_up
        for delay in chain(RETRY_S, repeat(RETRY_S[-1])):
            try:
                await asyncio.to_thread(renew)
                break
            except Exception as error:
                self._break(error)
                self.batcher.refuse_all(NotReady(f"{self.name} is not ready: {error}"))
                await asyncio.sleep(delay)
                renew = self._replace
        if self._broken is not None:
            self._broken = None
            log.warning("%s version %s is ready again", self.name, self.version)
            self.batcher.resume()

    def _replace(self) -> None:
        with self._replacing:
            if self._is_closed:
                return
            self.model.close()  # free the old session first: there may be no memory for both
            self.model = self.reload()
