"""What happens with a share of the requests after their answers.

``Shadow`` runs one row of a share of the requests through the original model, in a child process of
low priority, and compares it with the answer (``attnserve.checks.live_quality``). With several
workers, only worker 0 has a child: the others hand their rows over as files. ``Shadow`` also writes
the sample of texts. Nothing here affects an answer: failures are logged and counted.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import pickle
import random
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from math import ceil
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, Literal, TypeVar
from weakref import WeakKeyDictionary

import numpy as np

from attnserve.checks.live_quality import LiveComparison
from attnserve.models.artifact import check_files, open_artifact
from attnserve.models.loaded_model import TextTask
from attnserve.models.text_sample import TextSample
from attnserve.runtime.isolation import Worker, WorkerCrashed, allowed_environment
from graph_passes.errors import AttnserveError, InvalidModel
from service.engine.batcher import RequestResult
from service.metrics import Metrics, Version
from service.settings import Settings

if TYPE_CHECKING:
    from service.engine.engine import Engine

__all__ = ["FIRST_RATE", "FIRST_ROWS", "FollowUp", "Shadow"]

T = TypeVar("T")

FIRST_ROWS, FIRST_RATE = 64, 0.04
"""The first rows are taken at no lower rate than this, so that 1,600 requests suffice to find a
broken promise. It is a cost of 64 rows once."""

MAX_PENDING = 8
"""Rows that wait for an empty queue or for the child; further ones are skipped."""

MAX_LINES = 1000
"""Texts that wait to be written; further ones are dropped."""

MAX_FILES = 64
"""Rows of other workers that wait for worker 0."""

NICE = 10
"""Priority of the child: a tenth of the processor time of a server that competes for it."""

IDLE_POLL_S = 0.1
RUN_TIMEOUT_S = 60.0
RESTART_S = 60.0
"""A child that has failed is started again after this time."""

FollowUp = Callable[[], Awaitable[None]]
"""Called after the answer was sent."""

log = logging.getLogger("attnserve")


@dataclass(frozen=True, eq=False)
class Sample:
    """One answered row.

    Attributes:
        task: None for a row of tensors.
        payload: The ``Encoding`` of a text, or the inputs.
        outputs: The outputs that were served; of a text, its vector or its scores.
    """

    key: Version
    task: TextTask | None
    payload: Any
    outputs: Mapping[str, np.ndarray]


class Shadow:
    """The follow-up of answered requests.

    Args:
        settings: ``shadow``, ``shadow_rate``, and those of the sample of texts.
        metrics: Receives the counts; ``metrics.quality`` is set to the reports of this object.
        engines: The loaded engines.
        folder: The folder that several workers share.
        worker: The number of this worker.
    """

    def __init__(
        self,
        settings: Settings,
        metrics: Metrics,
        engines: Callable[[], list[Engine]],
        *,
        folder: Path | None = None,
        worker: int = 0,
    ) -> None:
        self._settings, self._metrics, self._engines = settings, metrics, engines
        self._folder, self._is_first = folder, worker == 0
        self._texts = settings.sample_texts and TextSample(
            settings.sample_texts, settings.sample_rate, mask=settings.sample_mask
        )
        self._lines: list[str] = []
        self._gap, self._taken = _Gap(), 0
        self._first_rows = ceil(FIRST_ROWS / settings.workers)
        self._child: Worker | None = None
        self._restart_at = 0.0
        self._watched: WeakKeyDictionary[Engine, bool] = WeakKeyDictionary()
        self._reports: dict[str, dict[str, Any]] = {}
        self._pool = ThreadPoolExecutor(1, "shadow")
        self._pending: set[asyncio.Task[None]] = set()
        self._can_write = self._can_compare = True
        metrics.quality = self.reports

    async def start(self) -> None:
        """Load the original, and check that it is that of the served models.

        Raises:
            InvalidModel: The original cannot be loaded, or fits none of the models.
        """
        if self._settings.shadow is not None and self._is_first:
            await self._in_thread(self._start_child)

    def close(self) -> None:
        """End the child and drop what is pending."""
        self._can_compare = False  # a comparison that ends here is no failure to log
        for task in self._pending:
            task.cancel()
        self._pool.shutdown(wait=False, cancel_futures=True)
        if self._child is not None:
            self._child.close()

    def reports(self) -> dict[Version, dict[str, Any]]:
        """The quality of each model that is compared; see ``LiveReport``."""
        found = self._reports
        if self._folder is not None and not self._is_first:
            with suppress(OSError, ValueError):
                found = json.loads((self._folder / "reports.json").read_text())
        keys = [(engine.name, engine.version) for engine in self._engines()]
        return {key: found["\0".join(key)] for key in keys if "\0".join(key) in found}

    # -- on the event loop ------------------------------------------------------------------------

    def follow_up(
        self,
        engine: Engine,
        task: TextTask | None,
        names: Sequence[str],
        result: RequestResult,
        texts: Sequence[object] = (),
    ) -> FollowUp | None:
        """What to do after the answer; None for most requests.

        Args:
            names: Of the outputs.
            result: Of each row: its outputs, or the vector of a text.
            texts: The texts of the request.
        """
        chosen = [] if self._texts is None else self._texts.choose(texts)
        sample = None
        if self._settings.shadow is not None and self._is_next():
            at = random.randrange(len(result.rows))
            outputs = result.results[at] if task is None else (result.results[at],)
            key = (engine.name, engine.version)
            sample = Sample(
                key, task, result.rows[at].payload, dict(zip(names, outputs, strict=True))
            )
        if not chosen and sample is None:
            return None

        async def run() -> None:
            is_first = not self._lines
            self._lines = [*self._lines, *chosen][:MAX_LINES]
            if self._lines and is_first:
                self._spawn(self._write_lines())
            if sample is not None and len(self._pending) < MAX_PENDING:
                self._spawn(self._when_idle(sample))
            elif sample is not None:
                self._count(sample.key, "skipped")

        return run

    def collect(self) -> None:
        """Take over the rows of other workers; worker 0 calls this once a second."""
        if self._settings.shadow is None or self._folder is None or not self._is_first:
            return
        for path in list(self._folder.glob("*.row"))[: MAX_PENDING - len(self._pending)]:
            with suppress(OSError):
                sample = pickle.loads(path.read_bytes())  # of a worker, in a private folder
                path.unlink()
                self._spawn(self._when_idle(sample))

    async def _write_lines(self) -> None:
        lines, self._lines = self._lines, []
        await self._in_thread(self._write_texts, lines)

    def _is_next(self) -> bool:
        rate = self._settings.shadow_rate
        if self._taken < self._first_rows:
            rate = max(rate, FIRST_RATE)
        taken = self._gap.step(round(1 / rate))
        self._taken += taken
        return taken

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._pending.add(task)
        task.add_done_callback(self._pending.discard)

    async def _in_thread(self, work: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, work, *arguments)

    async def _when_idle(self, sample: Sample) -> None:
        """Hand over a row once no row waits in a queue."""
        while any(engine.waiting for engine in self._engines()):
            await asyncio.sleep(IDLE_POLL_S)
        work = self._compare if self._is_first else self._send
        self._count(sample.key, await self._in_thread(work, sample))

    def _count(self, key: Version, result: str) -> None:
        self._metrics.shadow_rows.labels(*key, result).inc()

    # -- in the thread ----------------------------------------------------------------------------

    def _write_texts(self, texts: list[str]) -> None:
        assert self._texts is not None
        try:
            self._texts.write(texts)
            self._can_write = True
        except OSError as error:
            if self._can_write:
                log.warning("the sample of texts is not written: %s", error)
            self._can_write = False

    def _send(self, sample: Sample) -> Literal["sent", "skipped"]:
        """Write a row for worker 0."""
        assert self._folder is not None
        with suppress(OSError):
            if len(list(self._folder.iterdir())) < MAX_FILES:
                path = self._folder / f"{uuid.uuid4().hex}.new"
                path.write_bytes(pickle.dumps(sample))
                path.rename(path.with_suffix(".row"))
                return "sent"
        return "skipped"

    def _compare(self, sample: Sample) -> Literal["compared", "skipped", "failed"]:
        engine = next((e for e in self._engines() if (e.name, e.version) == sample.key), None)
        try:
            if engine is None or not self._has_child() or not self._is_watched(engine):
                return "skipped"
            assert self._child is not None
            inputs = engine.model.text_inputs([sample.payload]) if sample.task else sample.payload
            report = self._child.call(
                "compare", str(sample.key), sample.task, inputs, dict(sample.outputs),
                timeout_s=RUN_TIMEOUT_S,
            )  # fmt: skip
        except Exception as error:
            if self._can_compare:
                log.warning("a comparison with the original failed: %s", str(error).split("\n")[0])
            self._can_compare = False
            if isinstance(error, WorkerCrashed) and self._child is not None:
                self._child.close()
                self._child, self._restart_at = None, monotonic() + RESTART_S
            return "failed"
        self._can_compare = True
        if report is None:
            return "skipped"
        self._publish(sample.key, report)
        return "compared"

    def _publish(self, key: Version, report: dict[str, Any]) -> None:
        if report.pop("changed"):
            _log_change(key, report)
        self._reports = {**self._reports, "\0".join(key): report}
        if self._folder is not None:
            with suppress(OSError):
                new = self._folder / "reports.new"
                new.write_text(json.dumps(self._reports))
                new.replace(self._folder / "reports.json")

    def _has_child(self) -> bool:
        if self._child is None and monotonic() >= self._restart_at:
            self._restart_at = monotonic() + RESTART_S
            self._start_child()
        return self._child is not None

    def _start_child(self) -> None:
        """Start the child; in this thread, which must not end before the child."""
        path, settings = self._settings.shadow, self._settings
        assert path is not None
        artifact = open_artifact(path)
        check_files(artifact)
        lower_priority = partial(os.nice, NICE) if os.name == "posix" else None
        self._watched.clear()
        try:
            child = Worker(
                LiveComparison, artifact, settings.provider, timeout_s=settings.probe_timeout_s,
                environment=allowed_environment(), prepare=lower_priority, silent=True,
            )  # fmt: skip
        except WorkerCrashed as error:
            raise InvalidModel(f"{artifact.model}: {error.what}", "check the original") from error
        self._child = child
        errors = [error for engine in self._engines() if (error := self._watch(engine))]
        if errors and not any(self._watched.values()):
            child.close()
            self._child = None
            raise errors[0]
        for error in errors:
            _warn(error)

    def _is_watched(self, engine: Engine) -> bool:
        """Whether an engine is compared; one that was loaded after the child is added."""
        if engine not in self._watched and (error := self._watch(engine)) is not None:
            _warn(error)
        return self._watched[engine]

    def _watch(self, engine: Engine) -> AttnserveError | None:
        """Let the child compare an engine; the error says why it cannot."""
        assert self._child is not None
        model = engine.model
        try:
            self._child.call(
                "watch", str((engine.name, engine.version)), model.artifact, model.signature,
                "kl" if model.classifies else "similarity" if model.encoder else "r2",
                timeout_s=RUN_TIMEOUT_S,
            )  # fmt: skip
        except InvalidModel as error:
            self._watched[engine] = False
            return error
        self._watched[engine] = True
        return None


class _Gap:
    """Chooses one of so many steps, at random in each block of them."""

    def __init__(self) -> None:
        self._at = self._chosen = self._size = 0

    def step(self, size: int) -> bool:
        if self._at >= self._size:
            self._at, self._size, self._chosen = 0, size, random.randrange(size)
        self._at += 1
        return self._at - 1 == self._chosen


def _warn(error: AttnserveError) -> None:
    log.warning("not compared with the original: %s", str(error).replace("\n", "; "))


def _log_change(key: Version, report: Mapping[str, Any]) -> None:
    if report["broken"]:
        log.warning(
            "%s version %s breaks its promise: %s %.4f on the last %d compared rows, promised %.4f;"
            " calibrate on texts like these (--sample-texts), or serve the original",
            *key, report["measure"], report["value"], report["rows"], report["promise"],
        )  # fmt: skip
    else:
        log.info("%s version %s keeps its promise again", *key)
