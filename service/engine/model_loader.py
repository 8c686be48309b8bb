"""Load, replace and free the models of one process.

A new version is loaded and warmed up before the old one stops; the old one answers its accepted
requests before its session is freed. A model whose operators are fused in the background is
replaced in the same way after the fusion.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, nullcontext
from functools import partial
from pathlib import Path

from attnserve.context import AUTO, Device
from attnserve.models.artifact import open_artifact
from attnserve.models.model_folder import ModelLocation, find_models
from attnserve.serving.backends import RunnerOptions
from attnserve.serving.check_result import CheckResult, identify
from attnserve.serving.checked_loading import CheckedModel, load_checked
from attnserve.serving.loaded_model import Model
from attnserve.serving.model_check import LoadChecker
from attnserve.serving.operator_report import OperatorReport
from graph_passes.errors import AttnserveError, InvalidModel
from service.engine.engine import Engine
from service.engine.shadow import Shadow
from service.errors import NotReady, UnknownModel, hide_folders
from service.metrics import Metrics
from service.settings import Settings

NOT_BATCH_INVARIANT = (
    "its dynamic quantization makes an answer depend on the other rows of a run, so that every row "
    "runs alone; convert the float32 model with `attnserve optimize` to let rows share a run"
)

log = logging.getLogger("attnserve")


class ModelLoader:
    """The loaded models of this process.

    Args:
        settings: The path of the models, and the settings of the service.
        metrics: Receives the measurements of the engines.
        shadow: Receives the rows of answered requests.
        folder: Folder for the results of load checks; see ``LoadChecker``.
        alone: Waits until no other process replaces fused models.

    Attributes:
        by_name: The engines by name and version.
        loading: The names and versions that are being loaded.
        failures: The reasons of failed loads, by name and version.
        missing: Models that could not be loaded at the start.
        known: The names of the models that were last found on disk.
        started: Whether the start has ended. Until then, a path that cannot be read is an error of
            the settings.
    """

    def __init__(
        self,
        settings: Settings,
        metrics: Metrics,
        shadow: Shadow,
        *,
        folder: Path | None,
        alone: Callable[[], AbstractAsyncContextManager[None]] = nullcontext,
    ) -> None:
        self.settings, self._metrics, self._shadow, self._alone = settings, metrics, shadow, alone
        self._new_checker = partial(
            LoadChecker,
            timeout_s=settings.probe_timeout_s,
            rewrite=settings.rewrite,
            folder=folder,
            cached=settings.probe_cache,
        )
        self._checkers = self._new_checkers()
        self.by_name: dict[str, dict[str, Engine]] = {}
        self.loading: set[tuple[str, str]] = set()
        self.failures: dict[str, dict[str, str]] = {}
        self.missing: set[str] = set()
        self.known: frozenset[str] = frozenset()
        self.started = False
        self._changing = asyncio.Lock()
        self._retiring: set[asyncio.Task[None]] = set()
        self._fusing: set[asyncio.Task[None]] = set()

    def engines(self) -> list[Engine]:
        """All engines, sorted by name and version."""
        return [
            versions[version]
            for _, versions in sorted(self.by_name.items())
            for version in sorted(versions, key=int)
        ]

    def identities_of(self, name: str) -> dict[str, str]:
        """The checksum of each loaded version of a model."""
        return {version: engine.identity for version, engine in self.by_name.get(name, {}).items()}

    async def replace(self, name: str, versions: Collection[str] | None = None) -> None:
        """Load ``versions`` of ``name``, None for all, and replace the loaded versions.

        If one version cannot be loaded, the other versions are replaced nevertheless.

        Raises:
            UnknownModel: The model is not on disk.
            AttnserveError: A version cannot be loaded; the loaded one stays in place.
        """
        async with self._changing:
            locations = (await asyncio.to_thread(self.find)).get(name, {})
            if versions is not None:
                locations = {
                    version: locations[version] for version in versions if version in locations
                }
            if not locations:
                raise UnknownModel(f"unknown model {name!r}: it is not on disk")
            serving = self.by_name.get(name, {})
            following: dict[str, Engine] = {}
            first_error: AttnserveError | None = None
            for version in sorted(locations, key=int):
                key = (name, version)
                self.loading.add(key)
                try:
                    engine = await self._prepare(name, version, locations[version])
                    self.failures.get(name, {}).pop(version, None)
                except AttnserveError as error:
                    reason = hide_folders(error.what, self.settings.model)
                    self.failures.setdefault(name, {})[version] = reason
                    first_error = first_error or error
                    if version not in serving:
                        continue
                    engine = serving[version]
                finally:
                    self.loading.discard(key)
                following[version] = engine
            if following:  # otherwise the loaded versions stay
                self.by_name[name] = following
                for engine in serving.values():
                    if engine not in following.values():
                        self._free(engine)
            if first_error is not None:
                raise first_error

    async def remove(self, name: str) -> None:
        """Retire all versions of a model.

        Raises:
            UnknownModel: The model is neither loaded nor on disk.
        """
        async with self._changing:
            if name not in self.by_name and name not in await asyncio.to_thread(self.find):
                raise UnknownModel(f"unknown model {name!r}: it is not on disk")
            engines = self.by_name.pop(name, None)
            self.missing.discard(name)
            for engine in (engines or {}).values():
                self._free(engine)
            self.failures.pop(name, None)

    def retire(self, engine: Engine) -> None:
        """Refuse new requests for an engine, let it answer the accepted ones, then free it."""
        versions = self.by_name[engine.name]
        del versions[engine.version]
        if not versions:
            del self.by_name[engine.name]
        self._free(engine)

    def stop(self) -> None:
        """End the check of a model that is being loaded, and fusions in the background."""
        for checker in self._checkers.values():
            checker.close()
        for task in self._fusing:
            task.cancel()

    async def settled(self) -> None:
        """Wait until all replaced and removed engines are freed."""
        while self._retiring:
            await asyncio.gather(*self._retiring)

    async def close(self) -> None:
        """Answer the accepted requests, then free all models. Models can be loaded again."""
        self.stop()
        for engine in self.engines():
            self.retire(engine)
        await self.settled()
        self._checkers = self._new_checkers()
        self.started = False

    def _new_checkers(self) -> dict[Device, LoadChecker]:
        """A checker for each device of a model: models may have other numbers of threads."""
        models = map(self.settings.for_model, self.settings.model_limits)
        devices = [self.settings.device, *(settings.device for settings in models)]
        return {device: self._new_checker(device=device) for device in devices}

    def checker_of(self, name: str) -> LoadChecker:
        """The checker of a model."""
        return self._checkers[self.settings.for_model(name).device]

    # -- loading ----------------------------------------------------------------------------------

    async def _prepare(self, name: str, version: str, location: ModelLocation) -> Engine:
        """The engine of the model at ``location``: the current one if unchanged, else a new one."""
        served_engine = self.by_name.get(name, {}).get(version)

        def is_served(checked: CheckResult) -> bool:
            """Whether ``served_engine`` runs these files, and their fusion has no new result."""
            if (
                served_engine is None
                or not served_engine.ready
                or checked.identity != served_engine.identity
            ):
                return False
            done = served_engine.model.operators
            is_news = checked.fused_file is not None or checked.fusion is not None
            return done.fused is not None or done.is_pending or not is_news

        try:
            checked_model = await asyncio.to_thread(self._load, name, version, location, is_served)
        except AttnserveError:
            raise
        except Exception as error:  # a failure of one model must not affect the others
            log.exception("%s version %s cannot be loaded", name, version)
            raise NotReady(
                f"{name} cannot be loaded: {type(error).__name__}",
                "see the log of the server",
                code="model.unexpected",
            ) from error
        if checked_model is None:
            assert served_engine is not None
            return served_engine
        return self._serve(name, version, location, checked_model)

    def _serve(
        self, name: str, version: str, location: ModelLocation, checked_model: CheckedModel
    ) -> Engine:
        """Create the engine of a loaded model; a fusion in the background replaces the engine."""

        def reload() -> Model:
            again = self._load(name, version, location)
            assert again is not None
            if again.identity != checked_model.identity:
                again.model.close()
                raise NotReady(f"the files of {name} have changed", "load it again")
            return again.model

        engine = Engine(
            checked_model.model,
            self.settings.for_model(name),
            self._metrics.series(name, version),
            reload,
            self._shadow,
            version=version,
            identity=checked_model.identity,
        )
        if self.started:
            log_operators(engine)
        if checked_model.fusion is not None:
            task = asyncio.ensure_future(self._serve_fused(engine, location, checked_model.fusion))
            self._fusing.add(task)
            task.add_done_callback(self._fusing.discard)
        return engine

    async def _serve_fused(
        self, engine: Engine, location: ModelLocation, fusion: Future[CheckResult]
    ) -> None:
        """Wait for the fusion, then replace an engine by the engine of the fused model."""
        name, version = engine.name, engine.version
        checked = await asyncio.wrap_future(fusion)
        # One replacement at a time: it holds the old and the new weights.
        async with self._alone(), self._changing:
            if self.by_name.get(name, {}).get(version) is not engine:
                return
            if self.checker_of(name).is_closed:
                return
            if checked.fused_file is None:
                engine.model.operators = self._shown(checked.operators)
                log_operators(engine)
                return
            try:
                checked_model = await asyncio.to_thread(self._load, name, version, location)
            except Exception as error:  # the model is served without the fusion
                log.warning("%s version %s is not fused: %s", name, version, error)
                operators = checked.unfused(str(error)).operators
                engine.model.operators = self._shown(operators)
                return
            assert checked_model is not None
            if checked_model.identity != engine.identity:  # the files were replaced
                await asyncio.to_thread(checked_model.model.close)
                return
            if checked_model.fusion is not None:  # the result was not stored: do not retry forever
                reason = "the result of the load check could not be stored"
                engine.model.operators = OperatorReport(why=reason)
                await asyncio.to_thread(checked_model.model.close)
                return
            self.by_name[name][version] = self._serve(name, version, location, checked_model)
            self._free(engine)

    def _load(
        self,
        name: str,
        version: str,
        location: ModelLocation,
        is_served: Callable[[CheckResult], bool] = lambda checked: False,
    ) -> CheckedModel | None:
        """Load the model; None if ``is_served``, see ``load_checked``.

        Raises:
            InvalidModel: The model cannot be loaded, or changed during loading.
        """
        settings = self.settings.for_model(name)
        options = RunnerOptions(
            settings.device,
            cuda=settings.cuda,
            cuda_graphs=settings.cuda_graphs,
            concurrency=settings.concurrency,
            spinning=not settings.shares_cores,
        )
        open_model = partial(Model, options=options, name=name)
        check = self.checker_of(name).check if settings.probe else identify
        artifact = open_artifact(location.path, location.companion_folder)
        checked_model = load_checked(artifact, check, open_model, is_served)
        if checked_model is None:
            return None
        model = checked_model.model
        model.operators = self._shown(model.operators)
        if model.int8_warning is not None:
            log.warning("%s version %s: %s", name, version, model.int8_warning)
        if not model.batch_invariant:
            log.warning("%s version %s: %s", name, version, NOT_BATCH_INVARIANT)
        return checked_model

    def _shown(self, operators: OperatorReport) -> OperatorReport:
        """The report of operators without paths of this server, because clients see the report."""
        hide = partial(hide_folders, served=self.settings.model)
        refused = {name: hide(why) for name, why in operators.refused_runtimes.items()}
        shown = operators.with_refused(refused)
        return shown.model_copy(update={"why": hide(operators.why)})

    def _free(self, engine: Engine) -> None:
        task = asyncio.ensure_future(engine.retire())
        self._retiring.add(task)
        task.add_done_callback(self._retiring.discard)

    def find(self) -> Mapping[str, Mapping[str, ModelLocation]]:
        """The models on disk, by name and version.

        Raises:
            InvalidModel: The file or folder does not exist or cannot be read.
            NotReady: The path was readable when the server started, but is no longer.
        """
        try:
            models = find_models(self.settings.model, must_exist=self.started)
        except OSError as error:
            if self.started:
                raise NotReady("the model repository cannot be read", "try again later") from error
            raise InvalidModel(
                f"{self.settings.model}: cannot be read: {error.strerror}", "check its permissions"
            ) from error
        self.known = frozenset(models)
        return models


def log_operators(engine: Engine) -> None:
    """Log the operator fusion of a model or the reason for none, and the refused runtimes."""
    done = engine.model.operators
    if done.fused is not None:
        attention, gelu = done.fused.attention, done.fused.gelu
        operators = f" with fused operators ({attention} attention, {gelu} GELU)"
        log.info(
            "%s runs%s in %s: speed-up %.2fx, cosine %.9f",
            engine.name,
            operators if attention or gelu else "",
            engine.model.runtime,
            done.fused.speedup,
            done.fused.min_cosine,
        )
    elif engine.settings.probe and engine.settings.rewrite:
        log.info("%s runs without fused operators: %s", engine.name, done.why)
    for runtime, why in done.refused_runtimes.items():
        if runtime == AUTO:
            log.info("%s: the runtimes were not compared: %s", engine.name, why)
        else:
            log.info("%s does not run in %s: %s", engine.name, runtime, why)
