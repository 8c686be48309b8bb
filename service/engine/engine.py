"""The engine: one loaded model behind its batcher.

A request is checked against the model, admitted (or refused: ``Overloaded``), split into rows, and
rejoined from the batches that its rows ran in. Texts are tokenized in a thread, not on the loop.
When a session breaks the engine is not ready: it tries the session again, reloads it where that
does not help, and is ready again only when the model runs.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Generator, Hashable, Mapping, Sequence
from contextlib import contextmanager
from time import perf_counter_ns
from typing import Any

import numpy as np

from attnserve.models.tokenizer import Encoding
from graph_passes.errors import CheckFailed, InvalidArgument, InvalidData
from service.engine.answer import Answer
from service.engine.batcher import Batch, Batcher, BatchResult, RequestResult, Row
from service.engine.model import Model, TextTask
from service.errors import DeadlineExceeded, NotFound, NotReady, Overloaded, TooLarge
from service.metrics import Metrics, ModelMetrics
from service.settings import Settings

__all__ = ["Engine", "Text"]

Text = str | Sequence[int]
"""A text, or the ids of its tokens, special ones included."""

RETRY_S = (0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
"""How long to wait before a broken model is reloaded again; the last one from then on."""

REASONS: Mapping[type[BaseException], str] = {
    Overloaded: "overloaded",
    DeadlineExceeded: "deadline",
    asyncio.CancelledError: "gone",
    TooLarge: "too_large",
    InvalidData: "invalid",
    InvalidArgument: "invalid",
    NotFound: "invalid",
    NotReady: "not_ready",
    CheckFailed: "not_finite",
    BaseException: "error",
}
"""Why a request has no answer, as the metrics say it."""

SHORT_CHARACTERS = 2000
"""Characters that are tokenized in about a millisecond: the thread that runs them does it, where it
is free, which saves the ways between two threads and the loop."""

KNOWN_MACS = 1024
"""Shapes whose cost is remembered."""

log = logging.getLogger("attnserve")


class Engine:
    """A model that serves.

    Args:
        model: Loaded and warm; it belongs to the engine from here on.
        settings: How to batch, and the limits of requests.
        metrics: Where to report.
        reload: Loads the same model anew, for when its session is broken; called in a thread.
    """

    def __init__(
        self,
        model: Model,
        settings: Settings,
        metrics: ModelMetrics | None = None,
        reload: Callable[[], Model] | None = None,
    ) -> None:
        self.model = model
        self.settings = settings
        self.metrics = metrics or Metrics().of(model.name, model.version)
        self.batcher = Batcher(
            self._run,
            budget=settings.batch_tokens,
            overhead=settings.overhead_tokens,
            max_rows=model.max_rows,
            max_wait_ms=settings.max_wait_ms,
            max_queue=settings.max_queue,
            concurrency=settings.concurrency,
            on_batch=self._record_batch,
            on_failure=self._failed,
        )
        self._reload = reload
        self._in_flight = 0
        self._users = 0
        self._unused: asyncio.Event | None = None
        self._broken: str | None = None
        self._recovering: asyncio.Task[None] | None = None
        self._macs: OrderedDict[tuple[Any, ...], int | None] = OrderedDict()

    @property
    def name(self) -> str:
        return self.model.name

    @property
    def version(self) -> str:
        return self.model.version

    @property
    def in_flight(self) -> int:
        """Requests that wait or run."""
        return self._in_flight

    @property
    def ready(self) -> bool:
        """Whether the model runs; a full queue is no reason why it should not."""
        return self._broken is None

    @property
    def reason(self) -> str:
        """Why it is not ready."""
        return self._broken or ""

    def statistics(self) -> dict[str, Any]:
        """Exact statistics, in the shape of the v2 protocol."""
        return self.metrics.statistics()

    # -- requests ---------------------------------------------------------------------------------

    async def infer(
        self,
        inputs: Mapping[str, np.ndarray],
        outputs: Sequence[str] = (),
        deadline: float | None = None,
    ) -> Answer:
        """Run the model on tensors.

        Args:
            inputs: Every input of the model, by name.
            outputs: The names of the outputs to return, in this order; all where empty.
            deadline: On the clock of ``perf_counter``; None for none.

        Raises:
            InvalidData: The inputs do not fit the model, or there is no such output.
            TooLarge: More tokens or bytes than one request may have.
            Overloaded: Too many rows wait.
            DeadlineExceeded: There was no answer in time.
            NotReady: The model is broken, or memory ran out.
        """
        with self._counted() as stages:
            model = self.model
            model.check_outputs(outputs)
            model.check(inputs)
            self._check_size(inputs)
            names = tuple(outputs or (output.name for output in model.outputs))
            rows = self._tensor_rows(inputs, names)
            self.batcher.check_room(len(rows))
            outcome = await self.batcher.submit(rows, deadline)
            started = perf_counter_ns()
            parts = outcome.results
            joined = parts[0] if len(parts) == 1 else map(np.concatenate, zip(*parts, strict=True))
            answer = self._answer(
                dict(zip(names, joined, strict=True)),
                outcome,
                tokens=model.tokens(inputs),
                padded=math.prod(model.ids(inputs).shape[:2]),
            )
            _add_stages(stages, outcome, output_ns=perf_counter_ns() - started)
        return answer

    async def embed(
        self, texts: Sequence[Text], *, truncate: bool = True, deadline: float | None = None
    ) -> Answer:
        """A vector for each text, as ``outputs["embeddings"]`` of shape (texts, hidden size).

        Args:
            texts: At least one.
            truncate: Cut texts that are too long; False refuses them.
            deadline: On the clock of ``perf_counter``; None for none.

        Raises:
            NotFound: There is no tokenizer beside the model.
            InvalidData: A text is too long, or the model takes no texts.
            InvalidArgument: Its outputs are no embeddings.
            TooLarge: More texts, characters or tokens than one request may have.
            Overloaded, DeadlineExceeded, NotReady: See ``infer``.
        """
        return await self._texts("embed", "embeddings", texts, truncate, deadline)

    async def classify(
        self, texts: Sequence[Text], *, truncate: bool = True, deadline: float | None = None
    ) -> Answer:
        """A score for each text and class, as ``outputs["scores"]`` of shape (texts, classes).

        Those of a text sum to one; a single class has the sigmoid of its logit.

        Args, Raises: See ``embed``; NotFound also where the model has no classes.
        """
        if not self.model.classifies:
            raise NotFound(
                f"{self.name} has no classes: no output 'logits' of shape [batch, classes]",
                "use /embed for vectors",
            )
        return await self._texts("classify", "scores", texts, truncate, deadline)

    async def tokenize(self, texts: Sequence[str], *, truncate: bool = False) -> list[Encoding]:
        """The tokens of each text.

        Raises:
            NotFound: There is no tokenizer beside the model.
            InvalidData: It is no text.
            TooLarge: More texts or characters than one request may have.
        """
        self.model.require_tokenizer()
        self._check_texts(texts)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self.batcher.prepare_pool, self._encode, texts, truncate)

    # -- life -------------------------------------------------------------------------------------

    def acquire(self) -> None:
        """Keep the engine open until ``release``."""
        self._users += 1

    def release(self) -> None:
        self._users -= 1
        if not self._users and not self._in_flight and self._unused is not None:
            self._unused.set()

    async def retire(self) -> None:
        """Answer all that was accepted, then free the session."""
        self._unused = asyncio.Event()
        while self._users or self._in_flight:
            self._unused.clear()
            await self._unused.wait()
        if self._recovering is not None:
            self._recovering.cancel()
        await asyncio.to_thread(self.close)

    def close(self) -> None:
        """Finish the runs that have begun, drop the others, free the session."""
        self.batcher.close()
        self.model.close()

    # -- inside -----------------------------------------------------------------------------------

    @contextmanager
    def _counted(self) -> Generator[dict[str, int]]:
        """Count a request; its stages are filled in by who answers it."""
        started = perf_counter_ns()
        stages: dict[str, int] = {}
        self._in_flight += 1
        try:
            if self._broken is not None:
                raise NotReady(f"{self.name} is not ready: {self._broken}", "try again later")
            yield stages
        except BaseException as error:
            kind = next(kind for kind in type(error).__mro__ if kind in REASONS)
            self.metrics.record_failure(perf_counter_ns() - started, REASONS[kind])
            raise
        else:
            self.metrics.record_success(perf_counter_ns() - started, stages)
        finally:
            self._in_flight -= 1
            if not self._users and not self._in_flight and self._unused is not None:
                self._unused.set()

    async def _texts(
        self,
        task: TextTask,
        output: str,
        texts: Sequence[Text],
        truncate: bool,
        deadline: float | None,
    ) -> Answer:
        with self._counted() as stages:
            model = self.model
            model.require_tokenizer()
            self._check_texts(texts)
            tokens = 0

            def rows() -> list[Row]:  # in a thread
                nonlocal tokens
                encodings = self._encode(texts, truncate)
                tokens = sum(map(len, encodings))
                if tokens > self.settings.max_tokens:
                    raise TooLarge(
                        f"{tokens} tokens in one request: at most {self.settings.max_tokens}",
                        "send them in several requests",
                    )
                return [
                    Row((task,) if model.takes_mask else (task, len(one)), len(one), one)
                    for one in encodings
                ]

            outcome = await self.batcher.submit_from(
                rows, len(texts), deadline, is_short=sum(map(len, texts)) <= SHORT_CHARACTERS
            )
            started = perf_counter_ns()
            answer = self._answer(
                {output: np.stack(outcome.results)},
                outcome,
                tokens=tokens,
                padded=sum(count * batch.longest for batch, count in outcome.batches),
            )
            _add_stages(stages, outcome, output_ns=perf_counter_ns() - started)
        return answer

    def _encode(self, texts: Sequence[Text], truncate: bool) -> list[Encoding]:
        if all(isinstance(text, str) for text in texts):
            return self.model.encode([str(text) for text in texts], truncate=truncate)
        limit = self.model.encoder.max_length if self.model.encoder else None
        found: list[Encoding] = []
        for index, text in enumerate(texts):
            if isinstance(text, str):
                raise InvalidData("texts and token ids in one request", "send them apart")
            if not text:
                raise InvalidData(f"text {index} has no tokens", "remove empty texts")
            if limit is not None and len(text) > limit and not truncate:
                raise InvalidData(
                    f"text {index} has {len(text)} tokens, more than the limit of {limit}",
                    "shorten it, or ask for truncation",
                )
            # Here and not in its batch: strangers would be refused with it.
            bound = self.model.vocabulary
            if wrong := [token for token in text if not 0 <= token < bound]:
                raise InvalidData(
                    f"text {index} holds {wrong[0]}: expected ids from 0 to {bound - 1}"
                )
            ids = list(text)[:limit]
            found.append(Encoding(ids, [0] * len(ids)))
        return found

    def _tensor_rows(self, inputs: Mapping[str, np.ndarray], names: tuple[str, ...]) -> list[Row]:
        ids = self.model.ids(inputs)
        length = max(1, ids.shape[1] if ids.ndim > 1 else 1)
        counts = {array.shape[:1] for array in inputs.values()}
        if not self.model.rows_are_independent or len(counts) != 1 or () in counts:
            count = ids.shape[0] if ids.ndim else 1
            return [Row(("alone", names, object()), length * max(1, count), dict(inputs))]
        key = ("together", names, tuple((name, inputs[name].shape[1:]) for name in sorted(inputs)))
        return [
            Row(key, length, {name: array[at : at + 1] for name, array in inputs.items()})
            for at in range(ids.shape[0])
        ]

    def _run(self, key: Hashable, payloads: list[Any]) -> BatchResult:
        """Run one batch, in a worker."""
        assert isinstance(key, tuple)
        model, started = self.model, perf_counter_ns()
        if key[0] in ("alone", "together"):
            inputs: dict[str, np.ndarray] = payloads[0]
            if len(payloads) > 1:
                inputs = {
                    name: np.concatenate([payload[name] for payload in payloads]) for name in inputs
                }
            ready = perf_counter_ns()
            outputs = tuple(model.run(inputs, key[1]).values())
            ran = perf_counter_ns()
            if key[0] == "alone" or len(payloads) == 1:
                results: Sequence[Any] = [outputs]
            else:
                results = [
                    tuple(output[at : at + 1] for output in outputs) for at in range(len(payloads))
                ]
        else:
            inputs = model.text_inputs(payloads)
            ready = perf_counter_ns()
            name = model.text_output(key[0])
            output = model.run(inputs, [name])[name]
            ran = perf_counter_ns()
            results = model.vectors(key[0], inputs, output)[: len(payloads)]  # type: ignore[assignment]
        macs = self._macs_of(inputs)
        ended = perf_counter_ns()
        return BatchResult(results, macs, ready - started, ran - ready, ended - ran)

    def _macs_of(self, inputs: Mapping[str, np.ndarray]) -> int | None:
        shapes = tuple((name, array.shape) for name, array in inputs.items())
        if shapes not in self._macs:
            self._macs[shapes] = self.model.macs(inputs)
            if len(self._macs) > KNOWN_MACS:
                self._macs.popitem(last=False)
        return self._macs.get(shapes)

    def _answer(
        self,
        outputs: dict[str, np.ndarray],
        outcome: RequestResult,
        *,
        tokens: int,
        padded: int,
    ) -> Answer:
        macs: int | None = 0
        for batch, count in outcome.batches:
            if batch.result.macs is None or macs is None:
                macs = None
            else:
                macs += batch.result.macs * count // batch.rows
        return Answer(
            outputs=outputs,
            queue_ms=outcome.queue_ms,
            tokenize_ms=outcome.prepare_ms,
            compute_ms=outcome.compute_ms,
            tokens=tokens,
            padded_tokens=padded,
            macs=macs,
            batch_rows=tuple(batch.rows for batch, _ in outcome.batches),
        )

    def _check_size(self, inputs: Mapping[str, np.ndarray]) -> None:
        size = sum(array.nbytes for array in inputs.values())
        if size > self.settings.max_tensor_bytes:
            raise TooLarge(
                f"{size} bytes of tensors in one request: at most {self.settings.max_tensor_bytes}",
                "send fewer rows at a time",
            )
        padded = math.prod(self.model.ids(inputs).shape[:2])
        if padded > self.settings.max_tokens:
            raise TooLarge(
                f"{padded} tokens in one request, padding included:"
                f" at most {self.settings.max_tokens}",
                "send them in several requests",
            )

    def _check_texts(self, texts: Sequence[Text]) -> None:
        settings = self.settings
        if len(texts) > settings.max_inputs:
            raise TooLarge(
                f"{len(texts)} texts in one request: at most {settings.max_inputs}",
                "send them in several requests",
            )
        for index, text in enumerate(texts):
            if len(text) > settings.max_text_chars:
                raise TooLarge(
                    f"text {index} has {len(text)} characters: at most {settings.max_text_chars}",
                    "cut it into parts",
                )

    # -- when it breaks ---------------------------------------------------------------------------

    def _record_batch(self, batch: Batch) -> None:
        result = batch.result
        self.metrics.record_run(
            rows=batch.rows,
            tokens=batch.tokens,
            padded_tokens=batch.padded_tokens,
            macs=result.macs,
            stage_ns=(result.input_ns, result.infer_ns, result.output_ns),
        )

    def _failed(self, error: NotReady) -> None:
        """A run failed for a reason that is not its request's: not ready until it runs again."""
        if self._broken is not None:
            return
        self._broken = error.what
        log.error("%s version %s is not ready: %s", self.name, self.version, error.what)
        self.batcher.pause()
        self._recovering = asyncio.get_running_loop().create_task(self._recover())

    async def _recover(self) -> None:
        """Try the session again, then reload it, until it runs."""
        try:
            await asyncio.to_thread(self.model.warm_up)
        except Exception as error:
            self.batcher.refuse_waiting(NotReady(f"{self.name} is not ready: {error}"))
            await self._replace()
        self._broken = None
        log.warning("%s version %s is ready again", self.name, self.version)
        self.batcher.resume()

    async def _replace(self) -> None:
        attempt = 0
        while True:
            await asyncio.sleep(RETRY_S[min(attempt, len(RETRY_S) - 1)])
            attempt += 1
            try:
                if self._reload is None:
                    await asyncio.to_thread(self.model.warm_up)
                    return
                # The old session goes first: there may be no memory for both.
                self.model.close()
                self.model = await asyncio.to_thread(self._reload)
                return
            except Exception as error:
                self._broken = str(error).splitlines()[0]
                log.error("%s version %s: %s", self.name, self.version, self._broken)


def _add_stages(stages: dict[str, int], outcome: RequestResult, *, output_ns: int) -> None:
    """Nanoseconds of one request, by stage of the v2 protocol."""
    runs = [batch.result for batch, _ in outcome.batches]
    stages["queue"] = int(outcome.queue_ms * 1e6)
    stages["compute_input"] = int(outcome.prepare_ms * 1e6) + sum(ran.input_ns for ran in runs)
    stages["compute_infer"] = sum(ran.infer_ns for ran in runs)
    stages["compute_output"] = output_ns + sum(ran.output_ns for ran in runs)
