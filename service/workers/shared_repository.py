"""Model repository of one worker, synchronized with the other workers.

The worker that receives a load or unload request applies it, writes the target state (checksums of
the model files), and answers once all serving workers have reached it. The others follow within
0.1 s and skip the load check. A worker that starts later loads the same target state, and does
not serve if the files have changed since.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from time import monotonic, time

from attnserve.runtime.isolation import error_from_json, error_to_json
from attnserve.runtime.memory_use import rss_bytes
from graph_passes.errors import AttnserveError, InvalidModel
from service.engine.engine import Engine
from service.engine.repository import Repository
from service.errors import NotReady, UnknownModel, one_line
from service.metrics import Metrics, Second, Version, VersionState
from service.settings import Settings
from service.workers.shared_state import SharedState, Status, TargetModel, TargetState

TICK_S = 0.1
"""Interval of the checks for a new target state, and of status updates."""

MAX_RETRIES = 4
"""Maximum number of repeated attempts to reach a target state, after 1, 2, 4 and 8 s."""

log = logging.getLogger("attnserve")


class SharedRepository(Repository):
    """The models of one worker.

    Args:
        worker: Number of the worker, from 0; a replacement has the number of its predecessor.
        state: The state shared by the workers.
    """

    delay_s = 1

    def __init__(
        self, settings: Settings, metrics: Metrics, *, worker: int, state: SharedState
    ) -> None:
        super().__init__(settings, metrics, folder=state.path, worker=worker, alone=state.lock)
        self._worker, self._state = worker, state
        self._status = Status(worker)
        self.serving = False
        """Whether this worker accepts connections and has loaded the target state."""
        self._generation = 0
        self._error: AttnserveError | None = None
        self._attempts, self._retry_at = 0, 0.0
        self._following: asyncio.Task[None] | None = None
        # In addition to the lock of the target state: two tasks of this worker may apply one state.
        self._applying = asyncio.Lock()

    # -- state over all workers -------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """Whether at least half of the workers are ready; False until all have served once.

        A single worker that cannot follow a load, or is being replaced, must not make the server
        not ready.
        """
        num_ready = self.ready_here + sum(peer.ready for peer in self._peers())
        return self._state.complete and 2 * num_ready >= self._state.workers

    @property
    def workers(self) -> tuple[int, int]:
        return self._state.workers, self.serving + len(self._peers())

    def why_not_ready(self, engine: Engine) -> str | None:
        if not engine.ready:
            return engine.reason
        others = [peer for peer in self._peers() if not peer.runs(engine.name, engine.version)]
        return f"not ready in worker {others[0].worker}" if others else None

    def states(self) -> list[VersionState]:
        """The versions loaded in this worker, with the queues and requests of all workers."""
        theirs = [state for peer in self._peers() for state in peer.models]

        def merged(state: VersionState) -> VersionState:
            every = [state, *(other for other in theirs if other[:2] == state[:2])]
            return state._replace(
                waiting=sum(status.waiting for status in every),
                in_flight=sum(status.in_flight for status in every),
                ready=all(status.ready for status in every),
            )

        return [merged(state) for state in super().states()]

    def seconds(self) -> Mapping[Version, Mapping[int, Second]]:
        return self._state.seconds()

    def rss_bytes(self) -> int:
        return rss_bytes() + sum(peer.rss_bytes for peer in self._peers())

    # -- load and unload --------------------------------------------------------------------------

    async def start(self) -> None:
        """Load the target state. Worker 0 defines it by loading the models on disk.

        The other workers wait for worker 0, so that an invalid model is reported once.

        Raises:
            InvalidModel: No model can be loaded, or the files differ from the files that the other
                workers serve.
        """
        while (target := self._state.target()) is None and self._worker > 0:
            await asyncio.sleep(TICK_S)
        if target is None:
            await super().start()
            async with self._state.lock():
                self._set_target(*self.loader.by_name, *self.loader.failures)
            return
        await self._apply(target)
        self._require_models()
        self.loader.missing |= {name for name, model in target.models.items() if model.failures}
        try:
            await self.shadow.start()  # in worker 0 if it is a replacement
        except AttnserveError as error:
            log.warning("the original is not loaded: %s", one_line(error))
        self.loader.started = True

    async def change(self, name: str, change: Callable[[str], Awaitable[None]]) -> None:
        """Apply ``change`` in every worker.

        Raises:
            NotReady: The change cannot be written for the other workers.
            AttnserveError: Another worker could not follow.
        """
        failure: AttnserveError | None = None
        async with self._state.lock():
            await self._follow_target()
            try:
                await change(name)
            except UnknownModel:
                raise
            except AttnserveError as error:  # other versions may have been loaded
                failure = error
            try:
                generation = self._set_target(name)
            except OSError as error:
                self._generation = -1  # this worker too returns to the old target state
                raise NotReady(
                    f"the other workers cannot follow a change of {name}: {error.strerror}",
                    "check the free space of the folder for temporary files",
                    code="workers.not_written",
                ) from error
            await self._wait_for_peers(generation)
        if failure is not None:
            raise failure

    # -- life cycle -------------------------------------------------------------------------------

    async def join(self, open_port: Callable[[], Awaitable[None]] | None = None) -> None:
        """Load the target state, accept connections, and follow the target state from now on.

        Args:
            open_port: Accepts connections; None if they are accepted already.

        Raises:
            AttnserveError: The target state cannot be reached.
        """
        await self.start()
        async with self._state.lock():  # the target must not change between reaching it and serving
            await self._follow_target()
            self._require_models()
            self._following = asyncio.get_running_loop().create_task(self._run())
            if open_port is not None:
                await open_port()
            self.serving = True
            self._report_status()

    def log_operators(self) -> None:
        """Log the operator fusion of each loaded version, once for all workers."""
        if self._worker == 0:
            super().log_operators()

    async def leave(self) -> None:
        """Stop following the target state and remove the status, after the drain."""
        self.serving = False
        if self._following is not None:
            self._following.cancel()
            with suppress(asyncio.CancelledError):
                await self._following
        self._state.remove_status(self._worker)

    # -- internal ---------------------------------------------------------------------------------

    def _require_models(self) -> None:
        """Raise the error of a model if no model is loaded; loaded models are served despite it."""
        if self._error is not None and not self.loader.by_name:
            raise self._error

    @property
    def ready_here(self) -> bool:
        return super().ready and self._error is None

    def _peers(self) -> list[Status]:
        return self._state.serving(but=self._worker)

    async def _run(self) -> None:
        """Follow the target state and report the status; a load does not delay the reports."""
        applying: asyncio.Task[None] | None = None
        second, can_report = 0, True
        while True:
            try:
                if (applying is None or applying.done()) and not self.draining:
                    applying = asyncio.get_running_loop().create_task(self._follow_target())
                self._report_status()
                if (now := int(time())) != second:
                    second = now
                    self.shadow.collect()
                    recorded = self.metrics.seconds()
                    self._state.set_seconds(
                        [(*of, list(seconds.values())) for of, seconds in recorded.items()]
                    )
                can_report = True
            except OSError as error:  # for example a full disk: the other workers see no status
                if can_report:
                    log.error("worker %d cannot report its status: %s", self._worker, error)
                can_report = False
            await asyncio.sleep(TICK_S)

    async def _follow_target(self) -> None:
        """Reach a new target state; retry after a failure.

        If all attempts fail, this process ends, and the supervisor starts another one, unless the
        reason is a file, which a restart does not change.
        """
        async with self._applying:
            target = self._state.target()
            if target is None:
                return
            if target.generation != self._generation:
                self._attempts = 0
            elif self._error is None or not self.serving or monotonic() < self._retry_at:
                return
            elif self._attempts > MAX_RETRIES and not isinstance(self._error, InvalidModel):
                log.error("worker %d ends: it cannot load what the others serve", self._worker)
                os.kill(os.getpid(), signal.SIGTERM)
                return
            await self._apply(target)
            self._retry_at = monotonic() + 2.0 ** min(self._attempts, MAX_RETRIES + 1)
            self._attempts += 1

    async def _apply(self, target: TargetState) -> None:
        """Load and unload models until the loaded ones equal ``target``; store one error.

        An error that a restart may fix has precedence over an error of a file.
        """
        first: AttnserveError | None = None
        for name, model in target.models.items():
            try:
                await self._apply_model(name, model)
            except AttnserveError as error:
                log.error("worker %d: %s", self._worker, one_line(error))
                first = error if first is None or isinstance(first, InvalidModel) else first
        self._error, self._generation = first, target.generation

    async def _apply_model(self, name: str, target: TargetModel) -> None:
        failure: AttnserveError | None = None
        identities = self.loader.identities_of(name)
        if identities != target.identities:
            try:
                if target.identities:
                    await self.loader.replace(name, target.identities)
                else:
                    await self.loader.remove(name)
            except AttnserveError as error:  # may be a version that failed in every worker
                failure = error
        for version, engine in list(self.loader.by_name.get(name, {}).items()):
            if engine.identity not in (target.identities.get(version), identities.get(version)):
                self.loader.retire(engine)  # two workers must not serve different files
        if self.loader.identities_of(name) != target.identities:
            raise failure or InvalidModel(
                f"{name}: its files have changed since another worker loaded them",
                "load it again",
                code="model.changed",
            )
        self.loader.failures[name] = dict(target.failures)

    def _set_target(self, *names: str) -> int:
        """Make the versions of ``names`` that this worker has loaded the target of all workers.

        The caller holds the lock.

        Returns:
            The generation of the new target state.
        """
        before = self._state.target() or TargetState(0, {})
        models = before.models | {
            name: TargetModel(self.loader.identities_of(name), self.loader.failures.get(name, {}))
            for name in names
        }
        generation = before.generation + 1
        self._state.set_target(TargetState(generation, models))
        self._generation = generation
        if all(
            self.loader.identities_of(name) == model.identities for name, model in models.items()
        ):
            self._error = None
        return generation

    async def _wait_for_peers(self, generation: int) -> None:
        """Wait until all serving workers have reached ``generation``.

        The supervisor kills a worker that hangs, and removes its status.

        Raises:
            AttnserveError: A worker could not reach the target state.
        """
        while any(peer.generation < generation for peer in self._peers()):
            await asyncio.sleep(TICK_S / 5)
        for peer in self._peers():
            if peer.error is not None:
                error = error_from_json(peer.error, NotReady)
                raise type(error)(f"worker {peer.worker}: {error.what}", error.fix, code=error.code)

    def _report_status(self) -> None:
        """Write the status after a change."""
        status = Status(
            self._worker,
            serving=self.serving and not self.draining,
            ready=self.ready_here,
            generation=self._generation,
            error=None if self._error is None else error_to_json(self._error),
            models=super().states(),
            rss_bytes=rss_bytes(),
        )
        if status != self._status:
            self._state.set_status(status)
            self._status = status
