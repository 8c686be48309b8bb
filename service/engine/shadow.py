"""Compare a sample of served requests with the original model, and collect sample texts.

``Shadow`` compares one row of each sampled request with the original model, in a child process
(``attnserve.serving.comparison_process``). With several workers, only worker 0 has a child; the
others pass their rows to it as files. ``Shadow`` also writes the sample of texts. Failures are
logged and counted; they never affect an answer.
"""

from __future__ import annotations

import asyncio
import logging
import pickle
import random
import uuid
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, TypeVar
from weakref import WeakKeyDictionary

from pydantic import TypeAdapter

from attnserve.data.text_sample import TextSample
from attnserve.models.tokenizer import Encoding
from attnserve.runtime.cache import write_atomically
from attnserve.runtime.interface import Feed
from attnserve.serving.comparison_process import (
    ComparisonProcess,
    RowSampler,
    ServedModel,
    ServedRow,
)
from attnserve.serving.live_quality import LiveReport, QualityUpdate
from attnserve.serving.text_tasks import TextTask
from graph_passes.errors import AttnserveError
from service.engine.answer import FollowUp, RowOutputs
from service.engine.row_queue import Row
from service.metrics import Metrics, Version
from service.settings import Settings

T = TypeVar("T")

MAX_PENDING = 8
"""Maximum number of rows that wait for an empty queue or for the child; more are skipped."""

MAX_LINES = 1000
"""Maximum number of texts that wait to be written; more are dropped."""

MAX_FILES = 64
"""Maximum number of rows of other workers that wait for worker 0."""

IDLE_POLL_S = 0.1

Reports = dict[str, tuple[str, LiveReport]]
"""The checksum of a model's files, and its report, by name and version with "\\0" between them."""

REPORTS: TypeAdapter[Reports] = TypeAdapter(Reports)
"""The JSON of reports.json, from which other workers read the reports."""

log = logging.getLogger("attnserve")


class Shadow:
    """Compares sampled rows with the original, and collects texts, after their answers were sent.

    Args:
        settings: ``shadow``, ``shadow_rate``, and the settings of the sample of texts.
        metrics: Receives the counts.
        engines: The loaded engines.
        folder: The folder that several workers share.
        worker: The number of this worker.
    """

    def __init__(
        self,
        settings: Settings,
        metrics: Metrics,
        engines: Callable[[], Sequence[ServedModel]],
        *,
        folder: Path | None = None,
        worker: int = 0,
    ) -> None:
        self._settings, self._metrics, self._engines = settings, metrics, engines
        self._folder = folder
        self._is_first = worker == 0
        self._texts = settings.sample_texts and TextSample(
            settings.sample_texts, settings.sample_rate, mask=settings.sample_mask
        )
        self._lines: list[str] = []
        self._samplers: WeakKeyDictionary[ServedModel, RowSampler] = WeakKeyDictionary()
        self._original: ComparisonProcess | None = None
        if settings.shadow is not None and self._is_first:
            self._original = ComparisonProcess(
                settings.shadow,
                settings.device,
                engines,
                _warn,
                timeout_s=settings.probe_timeout_s,
            )
        self._reports: Reports = {}
        self._pool = ThreadPoolExecutor(1, "shadow")
        self.pending: set[asyncio.Task[None]] = set()
        self._can_write = self._can_compare = True

    async def start(self) -> None:
        """Load the original, and check that the served models were made from it.

        Raises:
            InvalidModel: The original cannot be loaded, or fits none of the models.
        """
        if self._original is not None:
            await self._in_thread(self._original.start)

    def close(self) -> None:
        """End the child and drop pending rows and texts."""
        self._can_compare = False  # a comparison that ends here is not a failure to log
        for task in self.pending:
            task.cancel()
        self._pool.shutdown(wait=False, cancel_futures=True)
        if self._original is not None:
            self._original.close()

    def reports(self) -> dict[Version, LiveReport]:
        """The quality report of each compared model."""
        published = self._reports
        if self._folder is not None and not self._is_first:
            with suppress(OSError, ValueError):
                published = REPORTS.validate_json((self._folder / "reports.json").read_bytes())
        reports: dict[Version, LiveReport] = {}
        for engine in self._engines():
            key = (engine.name, engine.version)
            identity, report = published.get("\0".join(key), ("", None))
            if report is not None and identity == engine.identity:
                reports[key] = report
        return reports

    # -- on the event loop ------------------------------------------------------------------------

    def follow_up(
        self,
        engine: ServedModel,
        task: TextTask | None,
        names: Sequence[str],
        rows: Sequence[Row[Encoding, RowOutputs] | Row[Feed, RowOutputs]],
        texts: Sequence[object] = (),
    ) -> FollowUp | None:
        """Create the callback that follows the answer; None for a request outside of the samples.

        Args:
            names: Names of the outputs.
            rows: The rows of the request, with their results.
            texts: The texts of the request.
        """
        sampled_texts = [] if self._texts is None else self._texts.choose(texts)
        sample = None
        if self._is_sampled(engine):
            row = random.choice(rows)
            key = (engine.name, engine.version)
            served = dict(zip(names, row.result, strict=True))
            sample = ServedRow(key, engine.identity, task, row.payload, served)
        if not sampled_texts and sample is None:
            return None

        async def run() -> None:
            is_first = not self._lines
            self._lines = [*self._lines, *sampled_texts][:MAX_LINES]
            if self._lines and is_first:
                self._spawn(self._write_lines())
            if sample is not None and len(self.pending) < MAX_PENDING:
                self._spawn(self._when_idle(sample))
            elif sample is not None:
                self._count(sample.key, "skipped")

        return run

    def _is_sampled(self, engine: ServedModel) -> bool:
        """Whether a row of the request is compared, by the sampler of the model."""
        settings = self._settings
        if settings.shadow is None:
            return False
        if engine not in self._samplers:
            self._samplers[engine] = RowSampler(settings.shadow_rate, settings.workers)
        return self._samplers[engine].is_next()

    def collect(self) -> None:
        """Collect the rows of other workers; worker 0 calls this once a second."""
        if self._original is None or self._folder is None:
            return
        free = max(MAX_PENDING - len(self.pending), 0)
        for path in list(self._folder.glob("*.row"))[:free]:
            try:
                content = path.read_bytes()
                path.unlink()  # before the read: a damaged file is not read again
                sample = pickle.loads(content)  # written by a worker, in a private folder
            except Exception:  # a damaged file must not end the loop that follows loads
                log.exception("a row to compare could not be read")
                continue
            self._spawn(self._when_idle(sample))

    async def _write_lines(self) -> None:
        lines = self._lines
        self._lines = []
        await self._in_thread(self._write_texts, lines)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self.pending.add(task)
        task.add_done_callback(self.pending.discard)

    async def _in_thread(self, work: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, work, *arguments)

    async def _when_idle(self, sample: ServedRow) -> None:
        """Compare a row as soon as no row waits in a queue."""
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

    def _send(self, sample: ServedRow) -> Literal["sent", "skipped"]:
        """Write a row for worker 0."""
        assert self._folder is not None
        with suppress(OSError):
            if len(list(self._folder.iterdir())) < MAX_FILES:
                write_atomically(self._folder / f"{uuid.uuid4().hex}.row", pickle.dumps(sample))
                return "sent"
        return "skipped"

    def _compare(self, sample: ServedRow) -> Literal["compared", "skipped", "failed"]:
        assert self._original is not None
        try:
            update = self._original.compare(sample)
        except Exception as error:
            if self._can_compare:
                log.warning("a comparison with the original failed: %s", str(error).split("\n")[0])
            self._can_compare = False
            return "failed"
        if update is None:
            return "skipped"
        self._can_compare = True
        self._publish(sample, update)
        return "compared"

    def _publish(self, sample: ServedRow, update: QualityUpdate) -> None:
        if update.is_changed:
            _log_change(sample.key, update.report)
        self._reports = {**self._reports, "\0".join(sample.key): (sample.identity, update.report)}
        if self._folder is not None:
            with suppress(OSError):
                write_atomically(self._folder / "reports.json", REPORTS.dump_json(self._reports))


def _warn(error: AttnserveError) -> None:
    log.warning("not compared with the original: %s", str(error).replace("\n", "; "))


def _log_change(key: Version, report: LiveReport) -> None:
    if report.is_broken:
        log.warning(
            "%s version %s violates its quality guarantee: %s %.4f on the last %d compared rows,"
            " guaranteed %.4f; calibrate on texts like these (ATTNSERVE_SAMPLE_TEXTS), or serve the"
            " original",
            *key,
            report.measure,
            report.value,
            report.rows,
            report.guaranteed,
        )
    else:
        log.info("%s version %s meets its quality guarantee again", *key)
