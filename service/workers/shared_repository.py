"""The repository of one worker among several: what one loads or unloads, all do.

A worker that is asked to load a model does so itself, says what every worker is to have (by
checksum), and answers when all that serve have it. The others follow within a tenth of a second,
without a probe of their own. One that starts later loads just that, and refuses to serve where the
files are others by now.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Collection
from contextlib import suppress
from dataclasses import replace
from time import time

from graph_passes.errors import AttnserveError, InvalidModel
from service.engine.engine import Engine
from service.engine.repository import Entry, Repository
from service.errors import NotFound, NotReady
from service.metrics import WINDOW_S, Metrics, Second, rss_bytes
from service.settings import Settings
from service.workers.shared_state import Desired, Runtime, Status, Wanted, as_error, as_told

__all__ = ["SharedRepository"]

TICK_S = 0.1
"""How often a worker looks at what is desired, and says how it is where that has changed."""

SAY_S = 1.0
"""How often it says so where nothing has."""

SETTLE_S = 0.1
"""How long after its end a second is written down: a run's thread may still be counting."""

log = logging.getLogger("attnserve")


class SharedRepository(Repository):
    """The models of one worker, kept the same as those of the others.

    Args:
        worker: Its number, from 0; a worker that takes a dead one's place has its number.
        runtime: What the workers share.
    """

    def __init__(
        self, settings: Settings, metrics: Metrics, *, worker: int, runtime: Runtime
    ) -> None:
        super().__init__(settings, metrics, rewritten=runtime.rewritten)
        self._worker, self._runtime = worker, runtime
        self._status = Status(worker, os.getpid())
        self._serving = False
        self._generation = 0
        self._error: AttnserveError | None = None
        self._seen = (0, 0)
        self._written = int(time())
        self._following: asyncio.Task[None] | None = None
        # A second, so that two changes at once in one worker do not both follow.
        self._catching_up = asyncio.Lock()
        metrics.rss = self._rss
        metrics.workers = lambda: self.workers[1]
        metrics.seconds, metrics.delay_s = self._seconds, 1

    # -- what serves ------------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """Whether all workers that accept connections are ready, and at first that all do."""
        return (
            self._ready_here
            and self._runtime.complete
            and all(peer.ready and not peer.hangs for peer in self._peers())
        )

    def runs(self, engine: Engine) -> bool:
        key = (engine.name, engine.version)
        return engine.ready and all(_runs(peer, key) for peer in self._peers())

    @property
    def workers(self) -> tuple[int, int]:
        return self._runtime.workers, self._serving + len(self._peers())

    def index(self) -> list[Entry]:
        """What is loaded in all workers; READY where it is so in each."""
        peers = self._peers()

        def shared(entry: Entry) -> Entry:
            key = (entry.name, entry.version)
            lacking = [peer.worker for peer in peers if not _runs(peer, key)]
            if entry.state != "READY" or not lacking:
                return entry
            return Entry(*key, "UNAVAILABLE", f"not ready in worker {lacking[0]}")

        return [shared(entry) for entry in super().index()]

    # -- load and unload --------------------------------------------------------------------------

    async def start(self) -> None:
        """Load what is desired: the first worker says what that is, which is what it finds on disk.

        The others wait for it: what is wrong with the models is found, and said, once.

        Raises:
            InvalidModel: The files are not those that the other workers serve, or see ``load``.
        """
        if self._started:
            return
        self.draining = False
        while (desired := self._runtime.desired()) is None and self._worker > 0:
            await asyncio.sleep(TICK_S / 5)
        if desired is None:
            await super().start()
            async with self._runtime.changing():
                self._desire(*self._engines, *(name for name, _ in self._failures))
            return
        await self._reach(desired)
        if self._error is not None:
            raise self._error
        self._started = True

    async def load(self, name: str, versions: Collection[str] | None = None) -> None:
        """Load ``name`` in every worker; see ``Repository.load``.

        Raises:
            NotFound, InvalidModel: See ``Repository.load``.
            NotReady: Another worker hangs, or could not follow.
        """
        if not self._started:  # it loads for itself: nobody is to follow
            await super().load(name, versions)
            return
        failed: AttnserveError | None = None
        async with self._runtime.changing():
            await self._catch_up()
            try:
                await super().load(name)
            except NotFound:
                raise
            except AttnserveError as error:  # its other versions may be new all the same
                failed = error
            await self._others_follow(self._desire(name))
        if failed is not None:
            raise failed

    async def unload(self, name: str) -> None:
        """Unload ``name`` in every worker; see ``Repository.unload``.

        Raises:
            NotFound: There is no such model.
            NotReady: Another worker hangs.
        """
        async with self._runtime.changing():
            await self._catch_up()
            await super().unload(name)
            await self._others_follow(self._desire(name))

    # -- life -------------------------------------------------------------------------------------

    async def join(self) -> None:
        """Reach what is desired now, and follow from here on; with the lock, before it serves.

        Raises:
            AttnserveError: It cannot be reached.
        """
        await self._catch_up()
        if self._error is not None:
            raise self._error
        self._following = asyncio.get_running_loop().create_task(self._follow())

    def say_serving(self) -> None:
        """It accepts connections now."""
        self._serving = True
        self._say()

    async def leave(self) -> None:
        """It accepts none any more, and has answered all: do not follow, do not count."""
        self._serving = False
        if self._following is not None:
            self._following.cancel()
            with suppress(asyncio.CancelledError):
                await self._following
        self._runtime.forget(self._worker)

    # -- inside -----------------------------------------------------------------------------------

    @property
    def _ready_here(self) -> bool:
        return super().ready and self._error is None

    def _peers(self) -> list[Status]:
        return self._runtime.serving(but=self._worker)

    async def _follow(self) -> None:
        """Be as is desired, and say how it is, for ever; a load must not stop the saying."""
        reaching: asyncio.Task[None] | None = None
        while True:
            try:
                idle = (reaching is None or reaching.done()) and not self.draining
                if idle and self._runtime.desired_stamp != self._seen:
                    reaching = asyncio.get_running_loop().create_task(self._catch_up())
                self._say()
                self._say_seconds()
            except OSError as error:  # a full disk: the worker is not heard, and counts as hanging
                log.error("worker %d cannot say how it is: %s", self._worker, error)
            await asyncio.sleep(TICK_S)

    async def _catch_up(self) -> None:
        async with self._catching_up:
            stamp = self._runtime.desired_stamp
            desired = self._runtime.desired()
            if stamp != self._seen and desired is not None:
                await self._reach(desired)
                self._seen = stamp

    async def _reach(self, desired: Desired) -> None:
        """Have what is desired, no more and no less; ``_error`` says why not."""
        self._checker.import_results(desired.proofs)
        first: AttnserveError | None = None
        for name, wanted in desired.models.items():
            try:
                await self._bring(name, wanted)
            except Exception as error:  # whatever it is, the one who asked is waiting for it
                if not isinstance(error, AttnserveError):
                    log.exception("worker %d failed", self._worker)
                    error = NotReady(f"{name}: {type(error).__name__}", "see the log")
                log.error("worker %d: %s", self._worker, str(error).replace("\n", "; "))
                first = first or error
        self._error, self._generation = first, desired.generation

    async def _bring(self, name: str, wanted: Wanted) -> None:
        failed: AttnserveError | None = None
        if self._contents_of(name) != wanted.contents:
            try:
                if wanted.contents:
                    await super().load(name, wanted.contents)
                else:
                    await super().unload(name)
            except AttnserveError as error:  # a version that failed everywhere is as desired
                failed = error
        if self._contents_of(name) != wanted.contents:
            raise failed or InvalidModel(
                f"{name}: its files have changed since another worker loaded them", "load it again"
            )
        for key in [key for key in self._failures if key[0] == name]:
            del self._failures[key]
        self._failures |= {(name, version): why for version, why in wanted.failures.items()}

    def _contents_of(self, name: str) -> dict[str, str]:
        loaded = self._engines.get(name, {})
        return {version: self._contents[engine] for version, engine in loaded.items()}

    def _desire(self, *names: str) -> int:
        """Say that all are to have what is loaded here under ``names``; the generation of that.

        Only with the lock.
        """
        before = self._runtime.desired() or Desired(0, {}, {})
        models = before.models | {
            name: Wanted(
                self._contents_of(name),
                {version: why for (of, version), why in self._failures.items() if of == name},
            )
            for name in names
        }
        generation = before.generation + 1
        self._runtime.desire(Desired(generation, models, self._checker.export_results()))
        self._generation, self._seen = generation, self._runtime.desired_stamp
        if all(self._contents_of(name) == wanted.contents for name, wanted in models.items()):
            self._error = None
        return generation

    async def _others_follow(self, generation: int) -> None:
        """Wait until all workers that serve are at ``generation``.

        Raises:
            AttnserveError: One is not, for the reason that it gives.
            NotReady: One hangs.
        """
        while True:
            waiting = [peer for peer in self._peers() if peer.generation < generation]
            if not waiting:
                break
            for peer in waiting:
                if peer.hangs:
                    raise NotReady(
                        f"worker {peer.worker} (process {peer.pid}) does not answer",
                        "this worker has done as asked; end that process, and it is replaced",
                    )
            await asyncio.sleep(TICK_S / 5)
        for peer in self._peers():
            if peer.error is not None:
                error = as_error(peer.error)
                raise type(error)(f"worker {peer.worker}: {error.what}", error.fix)

    def _say(self) -> None:
        """Say how this worker is, where that has changed or was said long ago."""
        status = Status(
            self._worker,
            os.getpid(),
            serving=self._serving and not self.draining,
            ready=self._ready_here,
            generation=self._generation,
            error=None if self._error is None else as_told(self._error),
            models=self._watch_here(),
            rss_bytes=self._status.rss_bytes,
            at=self._status.at,
        )
        now = time()
        if status != self._status or now - status.at > SAY_S:
            self._status = replace(status, rss_bytes=rss_bytes(), at=now)
            self._runtime.say(self._status)

    def _say_seconds(self) -> None:
        """Write down the seconds that are over, and take away those that nobody asks for."""
        over = int(time() - SETTLE_S)
        for second in range(max(self._written, over - WINDOW_S), over):
            if did := self.metrics.did(second):
                self._runtime.say_second(self._worker, second, did)
            self._runtime.forget_second(self._worker, second - WINDOW_S - 5)
        self._written = max(over, self._written)

    def _seconds(self, of: tuple[str, str], first: int, end: int) -> dict[int, Second]:
        found: dict[int, Second] = {}
        for at, told in self._runtime.read_seconds(first, end).items():
            for *key, did in told:
                if tuple(key) == of:
                    found.setdefault(at, Second(at)).add(did)
        return found

    def _watch_here(self) -> list[tuple[str, str, int, int, bool]]:
        return super()._watch()

    def _watch(self) -> list[tuple[str, str, int, int, bool]]:
        """What is loaded here, with what waits and runs in all workers."""
        peers = {
            (peer.worker, name, version): (waiting, in_flight, ready)
            for peer in self._peers()
            for name, version, waiting, in_flight, ready in peer.models
        }
        found: list[tuple[str, str, int, int, bool]] = []
        for name, version, waiting, in_flight, ready in self._watch_here():
            others = [told for key, told in peers.items() if key[1:] == (name, version)]
            found.append(
                (
                    name,
                    version,
                    waiting + sum(told[0] for told in others),
                    in_flight + sum(told[1] for told in others),
                    ready and all(told[2] for told in others),
                )
            )
        return found

    def _rss(self) -> int:
        return rss_bytes() + sum(peer.rss_bytes for peer in self._peers())


def _runs(peer: Status, key: tuple[str, str]) -> bool:
    """Whether a version runs in another worker."""
    return any((name, version) == key and ready for name, version, _, _, ready in peer.models)
