"""Model repository: the served models, which clients can load and unload.

The path is an .onnx file, an artifact folder, or a folder of models in Triton's layout:
NAME/VERSION/model.onnx, or NAME/model.onnx for version 1. All versions of a model are loaded; the
highest serves requests without a version. ``ModelLoader`` loads them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from attnserve.models.model_folder import ModelLocation
from attnserve.runtime.memory_use import rss_bytes
from graph_passes.errors import AttnserveError, InvalidArgument, InvalidModel
from service.engine.device import on_device
from service.engine.engine import Engine
from service.engine.model_loader import ModelLoader, log_operators
from service.engine.shadow import Shadow
from service.errors import NotReady, Overloaded, UnknownModel, one_line
from service.metrics import Metrics, Second, Version, VersionState
from service.settings import Settings

MAX_LOADS = 8
"""Maximum number of running and waiting loads. Loads run one at a time, because each reads all
files of a model and needs memory for its weights in addition to the served weights."""

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
        settings: The path of the models, and the settings of the service.
        metrics: Receives the measurements of the engines.
        folder: The folder that several workers share; None for a single process.
        worker: The number of this worker.
        alone: Waits until no other process replaces fused models.
    """

    delay_s = 0
    """Age in seconds of the newest second in ``seconds``."""

    def __init__(
        self,
        settings: Settings,
        metrics: Metrics | None = None,
        *,
        folder: Path | None = None,
        worker: int = 0,
        alone: Callable[[], AbstractAsyncContextManager[None]] = nullcontext,
    ) -> None:
        self.settings = settings = on_device(settings)
        self.metrics = metrics or Metrics()
        rows = folder and folder / "shadow"
        self.shadow = Shadow(settings, self.metrics, self.engines, folder=rows, worker=worker)
        self.draining = False
        self.loader = ModelLoader(
            settings, self.metrics, self.shadow, folder=folder and folder / "checks", alone=alone
        )
        self._loads = 0

    # -- queries ----------------------------------------------------------------------------------

    def engine(self, name: str | None = None, version: str | None = None) -> Engine:
        """The engine that serves a model.

        Args:
            name: None for the only model, or ``default_model``.
            version: None for the highest version.

        Raises:
            UnknownModel: Unknown model or version.
            NotReady: The model is not loaded.
        """
        if name is None:
            name = self._only()
        versions = self.loader.by_name.get(name)
        if not versions:
            self._require_started()
            if name in self.loader.known:
                raise NotReady(f"the model {name!r} is not loaded", "load it, or wait until it is")
            names = ", ".join(map(repr, sorted(self.loader.by_name))) or "no model"
            raise UnknownModel(f"unknown model {name!r}: this server has {names}")
        if version is None:
            return versions[max(versions, key=int)]
        if version not in versions:
            has = ", ".join(sorted(versions, key=int))
            raise UnknownModel(f"unknown version {version!r} of {name!r}: it has {has}")
        return versions[version]

    def versions(self, name: str) -> list[str]:
        """The loaded versions of ``name``, lowest first.

        Raises:
            UnknownModel: Unknown model.
            NotReady: The model is not loaded.
        """
        self.engine(name)
        return sorted(self.loader.by_name[name], key=int)

    def abandon(self) -> None:
        """Refuse all open requests."""
        for engine in self.engines():
            engine.refuse_all(NotReady("the server is stopping", "try another server, or later"))

    def engines(self) -> list[Engine]:
        """All loaded engines, sorted by name and version."""
        return self.loader.engines()

    @property
    def ready(self) -> bool:
        """Whether models are loaded, all of them run, and the server is not stopping."""
        loader = self.loader
        return (
            loader.started
            and not self.draining
            and bool(loader.by_name)
            and all(engine.ready for engine in loader.engines())
            and not (self.settings.strict_readiness and loader.missing - loader.by_name.keys())
        )

    def runs(self, engine: Engine) -> bool:
        """Whether ``engine`` runs in every process of its requests, and the server continues."""
        return not self.draining and self.why_not_ready(engine) is None

    def why_not_ready(self, engine: Engine) -> str | None:
        """The reason why a serving process cannot run ``engine``; None if all processes can."""
        return None if engine.ready else engine.reason

    @property
    def workers(self) -> tuple[int, int]:
        """(configured, running) worker processes."""
        return 1, 1

    def states(self) -> list[VersionState]:
        """The state of each loaded version."""
        return [engine.state for engine in self.engines()]

    def seconds(self) -> Mapping[Version, Mapping[int, Second]]:
        """The recent seconds of each version in all workers."""
        return self.metrics.seconds()

    def rss_bytes(self) -> int:
        """Resident memory of all workers."""
        return rss_bytes()

    def index(self) -> list[Entry]:
        """Every version on disk or loaded, sorted by name and version.

        If the path cannot be read, the index lists the loaded versions.
        """
        on_disk: Mapping[str, Mapping[str, ModelLocation]] = {}
        with suppress(AttnserveError):
            on_disk = self.loader.find()
        entries: dict[tuple[str, str], Entry] = {}
        for name, locations in on_disk.items():
            failures = self.loader.failures.get(name, {})
            for version in locations:
                reason = failures.get(version, "not loaded")
                entries[name, version] = Entry(name, version, "UNAVAILABLE", reason)
        for key in self.loader.loading:
            entries[key] = Entry(*key, "LOADING")
        for engine in self.engines():
            key = (engine.name, engine.version)
            why = self.why_not_ready(engine)
            entries[key] = Entry(*key, "READY" if why is None else "UNAVAILABLE", why or "")
        return [entries[key] for key in sorted(entries, key=lambda key: (key[0], int(key[1])))]

    # -- load and unload --------------------------------------------------------------------------

    async def start(self) -> None:
        """Load every model.

        Raises:
            AttnserveError: No model could be loaded (the error of the first model), the original of
                ``settings.shadow`` could not be loaded or fits none of the models, or there is no
                ``default_model``.
        """
        if self.loader.started:
            return
        self.draining = False
        names = await asyncio.to_thread(self.loader.find)
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
                await self.loader.replace(name)
            except AttnserveError as error:
                log.error("%s is not loaded: %s", name, one_line(error))
                self.loader.missing.add(name)
                first_error = first_error or error
        if not self.loader.by_name:
            raise first_error or InvalidModel(
                f"{self.settings.model}: no model in this folder: expected model.onnx,"
                " NAME/model.onnx or NAME/VERSION/model.onnx",
                "check the path",
            )
        await self.shadow.start()
        self.loader.started = True

    async def load(self, name: str) -> None:
        """Load the versions of ``name`` on disk, and replace the loaded versions.

        A version whose files are unchanged is not loaded again. If a version cannot be loaded, the
        loaded one stays in place, and the other versions are loaded nevertheless.

        Raises:
            UnknownModel: The model is not on disk.
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
            await self.change(name, self.loader.replace)
        except AttnserveError as error:
            audit.warning("load of %s failed: %s", name, error.what)
            raise
        finally:
            self._loads -= 1
        audit.info(
            "loaded %s", name, extra={"fields": {"versions": self.loader.identities_of(name)}}
        )

    async def change(self, name: str, change: Callable[[str], Awaitable[None]]) -> None:
        """Apply ``change`` to the versions of ``name`` in every process."""
        await change(name)

    async def unload(self, name: str) -> None:
        """Refuse new requests for ``name``, answer the accepted ones, then free the model.

        Raises:
            UnknownModel: Unknown model.
            NotReady: The models are being loaded.
        """
        self._require_started()
        await self.change(name, self.loader.remove)
        audit.info("unloaded %s", name)

    async def close(self) -> None:
        """Refuse new requests, answer the accepted ones, then free all models."""
        self.draining = True
        await self.loader.close()
        self.shadow.close()

    def log_operators(self) -> None:
        """Log the operator fusion of each loaded version, or the reason for no fusion."""
        for engine in self.engines():
            log_operators(engine)

    def _require_started(self) -> None:
        if not self.loader.started:
            raise NotReady("the models are being loaded", "wait until /v2/health/ready answers 200")

    def _only(self) -> str:
        self._require_started()
        if self.settings.default_model is not None:
            return self.settings.default_model
        if len(self.loader.by_name) == 1:
            return next(iter(self.loader.by_name))
        if not self.loader.by_name:
            raise NotReady("no model is loaded", "load one, or wait until one is")
        names = ", ".join(sorted(self.loader.by_name))
        raise UnknownModel(
            f"this server has several models: {names}",
            "name one, or set ATTNSERVE_DEFAULT_MODEL",
        )
