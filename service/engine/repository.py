"""Model repository: loads, replaces and unloads the served models.

The path is an .onnx file, an artifact folder, or a folder of models in Triton's layout:
NAME/VERSION/model.onnx, or NAME/model.onnx for version 1. All versions of a model are loaded; the
highest serves requests without a version. A new version is loaded and warmed up before the old one
stops; the old one answers its accepted requests before its session is freed. A model whose
operators are fused in the background is replaced in the same way when that has ended.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from attnserve.models.artifact import open_artifact
from attnserve.models.model_folder import ModelLocation, find_models
from attnserve.serving.backends import RunnerOptions
from attnserve.serving.check_result import CheckResult, identify
from attnserve.serving.checked_loading import CheckedModel, load_checked
from attnserve.serving.loaded_model import Model
from attnserve.serving.model_check import LoadChecker
from attnserve.serving.operator_report import OperatorReport, unfused
from graph_passes.errors import AttnserveError, InvalidArgument, InvalidModel
from service.engine.device import on_device
from service.engine.engine import Engine
from service.engine.shadow import Shadow
from service.errors import NotFound, NotReady, Overloaded, UnknownModel, hide_folders
from service.metrics import Metrics, VersionState
from service.settings import Settings

NOT_BATCH_INVARIANT = (
    "its dynamic quantization makes an answer depend on the other rows of a run, so that every row "
    "runs alone; convert the float32 model with `attnserve optimize` to let rows share a run"
)

MAX_LOADS = 8
"""Maximum number of running and waiting loads. They run one at a time, because each reads all files
of its model and needs memory for its weights beside the served ones."""

log = logging.getLogger("attnserve")
audit = logging.getLogger("attnserve.audit")
"""Audit log of loads and unloads; lines of a request contain its client and key."""


@dataclass(frozen=True)
class Entry:
    """A version of a model, on disk or loaded; ``reason`` says why it is not ready."""

    name: str
    version: str
    state: Literal["READY", "LOADING", "UNAVAILABLE"]
    reason: str = ""


class Repository:
    """The models under one path.

    Args:
        settings: The path, and how to serve its models.
        metrics: Receives the measurements of the engines.
        folder: The folder that several workers share; None for a single process.
        worker: The number of this worker.
    """

    def __init__(
        self,
        settings: Settings,
        metrics: Metrics | None = None,
        *,
        folder: Path | None = None,
        worker: int = 0,
    ) -> None:
        self.settings = settings = on_device(settings)
        self.metrics = metrics or Metrics()
        self.metrics.watch = self._watch
        rows = folder and folder / "shadow"
        self.shadow = Shadow(settings, self.metrics, self.engines, folder=rows, worker=worker)
        self.draining = False
        self._new_checker = partial(
            LoadChecker,
            device=settings.device,
            timeout_s=settings.probe_timeout_s,
            rewrite=settings.rewrite,
            folder=folder and folder / "checks",
            cached=settings.probe_cache,
        )
        self._checker = self._new_checker()
        self._engines: dict[str, dict[str, Engine]] = {}
        self._loading: set[tuple[str, str]] = set()
        self._failures: dict[str, dict[str, str]] = {}  # why loads failed, by name and version
        self._missing: set[str] = set()  # models that could not be loaded at the start
        self._loads = 0
        self._changing = asyncio.Lock()
        self._retiring: set[asyncio.Task[None]] = set()
        self._fusing: set[asyncio.Task[None]] = set()
        self._known: frozenset[str] = frozenset()
        self._started = False

    # -- queries ----------------------------------------------------------------------------------

    def engine(self, name: str | None = None, version: str | None = None) -> Engine:
        """The engine that serves a model.

        Args:
            name: None for the only model, or ``default_model``.
            version: None for the highest.

        Raises:
            NotFound: Unknown model or version.
            NotReady: The model is not loaded.
        """
        if name is None:
            name = self._only()
        versions = self._engines.get(name)
        if not versions:
            self._require_started()
            if name in self._known:
                raise NotReady(f"the model {name!r} is not loaded", "load it, or wait until it is")
            names = ", ".join(map(repr, sorted(self._engines))) or "no model"
            raise UnknownModel(f"unknown model {name!r}: this server has {names}")
        if version is None:
            return versions[max(versions, key=int)]
        if version not in versions:
            has = ", ".join(sorted(versions, key=int))
            raise NotFound(f"unknown version {version!r} of {name!r}: it has {has}")
        return versions[version]

    def versions(self, name: str) -> list[str]:
        """The loaded versions of ``name``, lowest first.

        Raises:
            NotFound, NotReady: See ``engine``.
        """
        self.engine(name)
        return sorted(self._engines[name], key=int)

    def abandon(self) -> None:
        """Refuse all open requests."""
        for engine in self.engines():
            engine.refuse_all(NotReady("the server is stopping", "try another server, or later"))

    def engines(self) -> list[Engine]:
        """All loaded engines, sorted by name and version."""
        return [
            versions[version]
            for _, versions in sorted(self._engines.items())
            for version in sorted(versions, key=int)
        ]

    @property
    def ready(self) -> bool:
        """Whether models are loaded, all of them run, and the server is not stopping."""
        return (
            self._started
            and not self.draining
            and bool(self._engines)
            and all(engine.ready for engine in self.engines())
            and not (self.settings.strict_readiness and self._missing - self._engines.keys())
        )

    def runs(self, engine: Engine) -> bool:
        """Whether ``engine`` runs in every process that serves its requests."""
        return self._why_not_ready(engine) is None

    def _why_not_ready(self, engine: Engine) -> str | None:
        """Why a process cannot run ``engine``; None if all can."""
        return None if engine.ready else engine.reason

    @property
    def workers(self) -> tuple[int, int]:
        """(configured, running) worker processes."""
        return 1, 1

    def index(self) -> list[Entry]:
        """Every version on disk or loaded, sorted by name and version.

        If the path cannot be read, the index lists the loaded versions.
        """
        on_disk: Mapping[str, Mapping[str, ModelLocation]] = {}
        with suppress(AttnserveError):
            on_disk = self._find()
        entries: dict[tuple[str, str], Entry] = {}
        for name, locations in on_disk.items():
            failures = self._failures.get(name, {})
            for version in locations:
                reason = failures.get(version, "not loaded")
                entries[name, version] = Entry(name, version, "UNAVAILABLE", reason)
        for key in self._loading:
            entries[key] = Entry(*key, "LOADING")
        for engine in self.engines():
            key = (engine.name, engine.version)
            why = self._why_not_ready(engine)
            entries[key] = Entry(*key, "READY" if why is None else "UNAVAILABLE", why or "")
        return [entries[key] for key in sorted(entries, key=lambda key: (key[0], int(key[1])))]

    # -- load and unload --------------------------------------------------------------------------

    async def start(self) -> None:
        """Load every model.

        Raises:
            AttnserveError: No model could be loaded; the error of the first one. Also raised if the
                original of ``settings.shadow`` could not be loaded, or fits none of the models, and
                if there is no ``default_model``.
        """
        if self._started:
            return
        self.draining = False
        names = await asyncio.to_thread(self._find)
        if unknown := set(self.settings.model_limits) - names.keys():
            log.warning("model_limits: unknown model %s", ", ".join(sorted(unknown)))
        default = self.settings.default_model
        if names and default is not None and default not in names:
            raise InvalidArgument(
                f"default_model: unknown model {default!r}",
                f"name one of {', '.join(sorted(names))}",
                code="service.default_model",
            )
        first_error: AttnserveError | None = None
        for name in sorted(names):
            try:
                await self._replace(name)
            except AttnserveError as error:
                log.error("%s is not loaded: %s", name, str(error).replace("\n", "; "))
                self._missing.add(name)
                first_error = first_error or error
        if not self._engines:
            raise first_error or InvalidModel(
                f"{self.settings.model}: no model in this folder: expected model.onnx,"
                " NAME/model.onnx or NAME/VERSION/model.onnx",
                "check the path",
            )
        await self.shadow.start()
        self._started = True

    async def load(self, name: str) -> None:
        """Load the versions of ``name`` on disk; they replace the loaded ones.

        A version whose files are unchanged is not loaded again. If a version cannot be loaded, the
        loaded one stays in place, and the other versions are loaded nevertheless.

        Raises:
            NotFound: The model is not on disk.
            InvalidModel: A version cannot be loaded.
            Overloaded: Too many loads wait.
            NotReady: The models are being loaded.
        """
        self._require_started()
        self._loads += 1
        try:
            if self._loads > MAX_LOADS:
                raise Overloaded(
                    f"{MAX_LOADS} loads of models run or wait already, which is the maximum",
                    "try again later",
                )
            await self._change(name, self._replace)
        except AttnserveError as error:
            audit.warning("load of %s failed: %s", name, error.what)
            raise
        finally:
            self._loads -= 1
        audit.info("loaded %s", name, extra={"fields": {"versions": self._contents_of(name)}})

    async def _change(self, name: str, change: Callable[[str], Awaitable[None]]) -> None:
        """Apply ``change`` to the versions of ``name`` in every process."""
        await change(name)

    async def _replace(self, name: str, versions: Collection[str] | None = None) -> None:
        """Load ``versions`` of ``name``, None for all; see ``load`` for the rest."""
        async with self._changing:
            locations = (await asyncio.to_thread(self._find)).get(name, {})
            if versions is not None:
                locations = {
                    version: locations[version] for version in versions if version in locations
                }
            if not locations:
                raise UnknownModel(f"unknown model {name!r}: it is not on disk")
            serving = self._engines.get(name, {})
            following: dict[str, Engine] = {}
            first_error: AttnserveError | None = None
            for version in sorted(locations, key=int):
                key = (name, version)
                self._loading.add(key)
                try:
                    engine = await self._prepare(name, version, locations[version])
                    self._failures.get(name, {}).pop(version, None)
                except AttnserveError as error:
                    reason = hide_folders(error.what, self.settings.model)
                    self._failures.setdefault(name, {})[version] = reason
                    first_error = first_error or error
                    if version not in serving:
                        continue
                    engine = serving[version]
                finally:
                    self._loading.discard(key)
                following[version] = engine
            if following:  # otherwise those that were loaded stay
                self._engines[name] = following
                for engine in serving.values():
                    if engine not in following.values():
                        self._retire(engine)
            if first_error is not None:
                raise first_error

    async def unload(self, name: str) -> None:
        """Refuse new requests for ``name``, answer the accepted ones, then free the model.

        Raises:
            NotFound: Unknown model.
            NotReady: The models are being loaded.
        """
        self._require_started()
        await self._change(name, self._remove)
        audit.info("unloaded %s", name)

    async def _remove(self, name: str) -> None:
        async with self._changing:
            if name not in self._engines and name not in await asyncio.to_thread(self._find):
                raise UnknownModel(f"unknown model {name!r}: it is not on disk")
            engines = self._engines.pop(name, None)
            self._missing.discard(name)
            for engine in (engines or {}).values():
                self._retire(engine)
            self._failures.pop(name, None)

    def stop_loading(self) -> None:
        """End the check of a model that is being loaded, and fusions in the background."""
        self._checker.close()
        for task in self._fusing:
            task.cancel()

    async def settled(self) -> None:
        """Wait until all replaced and unloaded engines are freed."""
        while self._retiring:
            await asyncio.gather(*self._retiring)

    async def close(self) -> None:
        """Refuse new requests, answer the accepted ones, then free all models."""
        self.draining = True
        self.stop_loading()
        for engine in self.engines():
            self._retire(engine)
        self._engines.clear()
        await self.settled()
        self.shadow.close()
        self._checker = self._new_checker()  # for another start
        self._started = False

    def log_operators(self) -> None:
        """Log the operator fusion of each loaded version, or why there was none."""
        for engine in self.engines():
            _log_operators(engine)

    # -- loading ----------------------------------------------------------------------------------

    def _contents_of(self, name: str) -> dict[str, str]:
        """The checksum of each loaded version of a model."""
        return {version: engine.content for version, engine in self._engines.get(name, {}).items()}

    def _require_started(self) -> None:
        if not self._started:
            raise NotReady("the models are being loaded", "wait until /v2/health/ready answers 200")

    def _only(self) -> str:
        self._require_started()
        if self.settings.default_model is not None:
            return self.settings.default_model
        if len(self._engines) == 1:
            return next(iter(self._engines))
        if not self._engines:
            raise NotReady("no model is loaded", "load one, or wait until one is")
        names = ", ".join(sorted(self._engines))
        raise NotFound(
            f"this server has several models: {names}",
            "name one, or set ATTNSERVE_DEFAULT_MODEL",
        )

    async def _prepare(self, name: str, version: str, location: ModelLocation) -> Engine:
        """The engine of the model at ``location``: the current one if unchanged, else a new one."""
        served_engine = self._engines.get(name, {}).get(version)

        def is_served(checked: CheckResult) -> bool:
            """Whether ``served_engine`` runs it, and nothing new is known of its fusion."""
            if (
                served_engine is None
                or not served_engine.ready
                or checked.identity != served_engine.content
            ):
                return False
            done = served_engine.model.operators
            is_news = checked.rewritten is not None or checked.fusion is not None
            return done["rewritten"] or "pending" in done or not is_news

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
        """Create the engine of a loaded model; it is replaced after a fusion in the background."""

        def reload() -> Model:
            again = self._load(name, version, location)
            if again is None or again.identity != checked_model.identity:
                raise NotReady(f"the files of {name} have changed", "load it again")
            return again.model

        engine = Engine(
            checked_model.model,
            self.settings.for_model(name),
            self.metrics.series(name, version),
            reload,
            self.shadow,
            version=version,
            content=checked_model.identity,
        )
        if self._started:
            _log_operators(engine)
        if checked_model.fusion is not None:
            task = asyncio.ensure_future(self._serve_fused(engine, location, checked_model.fusion))
            self._fusing.add(task)
            task.add_done_callback(self._fusing.discard)
        return engine

    async def _serve_fused(
        self, engine: Engine, location: ModelLocation, fusion: Future[CheckResult]
    ) -> None:
        """Replace an engine by the engine of the fused model, after the fusion."""
        name, version = engine.name, engine.version
        checked = await asyncio.wrap_future(fusion)
        async with self._alone(), self._changing:
            if self._engines.get(name, {}).get(version) is not engine or self.draining:
                return
            if checked.rewritten is None:
                engine.model.operators = self._shown(checked.operators)
                _log_operators(engine)
                return
            try:
                checked_model = await asyncio.to_thread(self._load, name, version, location)
            except Exception as error:  # the model is served as it is
                log.warning("%s version %s is not fused: %s", name, version, error)
                engine.model.operators = self._shown(unfused(str(error)))
                return
            assert checked_model is not None
            if checked_model.identity != engine.content:  # the files were replaced
                await asyncio.to_thread(checked_model.model.close)
                return
            if checked_model.fusion is not None:  # its result was not stored: do not retry forever
                reason = "the result of the load check could not be stored"
                engine.model.operators = unfused(reason)
                await asyncio.to_thread(checked_model.model.close)
                return
            self._engines[name][version] = self._serve(name, version, location, checked_model)
            self._retire(engine)

    @asynccontextmanager
    async def _alone(self) -> AsyncGenerator[None]:
        """Wait until no other worker replaces fused models."""
        yield

    def _load(
        self,
        name: str,
        version: str,
        location: ModelLocation,
        is_served: Callable[[CheckResult], bool] = lambda checked: False,
    ) -> CheckedModel | None:
        """Load the model; None if ``is_served``, see ``load_checked``.

        Raises:
            InvalidModel: It cannot be loaded, or changed during loading.
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
        check = self._checker.check if settings.probe else identify
        artifact = open_artifact(location.path, location.shared)
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
        """A report of operators without paths of this server, because clients see it."""
        hide = partial(hide_folders, served=self.settings.model)
        if operators["rewritten"] is True:
            refused = operators.get("refused", {})
            return {**operators, "refused": {name: hide(why) for name, why in refused.items()}}
        return {**operators, "why": hide(operators["why"])}

    def _retire(self, engine: Engine) -> None:
        task = asyncio.ensure_future(engine.retire())
        self._retiring.add(task)
        task.add_done_callback(self._retiring.discard)

    def _watch(self) -> list[VersionState]:
        return [
            VersionState(
                engine.name,
                engine.version,
                engine.waiting,
                engine.in_flight,
                engine.ready,
                engine.model.runtime,
                engine.model.precision,
            )
            for engine in self.engines()
        ]

    def _find(self) -> Mapping[str, Mapping[str, ModelLocation]]:
        """The models on disk, by name and version.

        Raises:
            InvalidModel: The file or folder does not exist or cannot be read.
            NotReady: The path was readable when the server started, and is not now.
        """
        try:
            models = find_models(self.settings.model, must_exist=self._started)
        except OSError as error:
            if self._started:
                raise NotReady("the model repository cannot be read", "try again later") from error
            raise InvalidModel(
                f"{self.settings.model}: cannot be read: {error.strerror}", "check its permissions"
            ) from error
        self._known = frozenset(models)
        return models


def _log_operators(engine: Engine) -> None:
    done = engine.model.operators
    if done["rewritten"] is True:
        attention, gelu = done["attention"], done["gelu"]
        fused = f" with fused operators ({attention} attention, {gelu} GELU)"
        log.info(
            "%s runs%s in %s: speed-up %.2fx, cosine %.9f",
            engine.name,
            fused if attention or gelu else "",
            engine.model.runtime,
            done["speedup"],
            done["min_cosine"],
        )
    elif engine.settings.probe and engine.settings.rewrite:
        log.info("%s runs without fused operators: %s", engine.name, done["why"])
