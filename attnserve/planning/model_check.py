"""Check a model in a child process, before this process loads it.

A model file is untrusted: it may crash ONNX Runtime or never finish a run. The child loads it and
runs it once; a crash or a timeout becomes an ``InvalidModel``. Results are cached by content, so
that another check of the same files, also in another process, only reads them.

The child then tries lossless operator fusion (``lossless_passes``). The fused model is to be run if
it computes the same and is faster.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import subprocess
import weakref
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from time import monotonic
from typing import Any

from attnserve.context import Provider
from attnserve.models.artifact import Artifact
from attnserve.models.check_cache import CheckCache
from attnserve.models.checksums import sha256
from attnserve.models.graph_facts import GraphFacts
from attnserve.models.loaded_model import NOT_REWRITTEN, Model
from attnserve.models.onnx_validation import external_file
from attnserve.runtime.isolation import Worker, WorkerCrashed, allowed_environment, limit_process
from attnserve.runtime.session import gpu_name
from attnserve.runtime.temporary import temporary_folder
from graph_passes.errors import (
    AttnserveError,
    CannotRewrite,
    InvalidArgument,
    InvalidModel,
    MissingExtra,
)

__all__ = ["CheckResult", "IsolationChecker", "identify"]

CONFIGURATION_FILES = ("tokenizer.json", "tokenizer_config.json", "attnserve.json", "config.json")
"""Files beside the model that change its results."""

FORWARDED_ERRORS = (InvalidModel, InvalidArgument, MissingExtra)
"""Errors that keep their type when the child raises them; others become ``InvalidModel``."""

FIX = "do not use this file; if you made it, check it with onnx.checker.check_model"

MEMORY_BYTES, MEMORY_PER_CORE_BYTES, MEMORY_PER_BYTE = 4 << 30, 256 << 20, 10
"""Address space of the child: a floor, the stacks and heaps of threads, and several copies of the
files in the model's folder (graph, sessions and fused model)."""

FUSION_TIMEOUT_S = 60
"""Time limit of operator fusion; when it passes, the original model is run."""

MAX_BYTES = 1_000_000_000
"""Largest weights for which fusion is tried: it takes seconds per gigabyte, and a copy on disk."""


@dataclass(frozen=True)
class CheckResult:
    """A model that passed the check.

    Attributes:
        identity: A checksum of all its files.
        external: Its external data files with their checksums.
        rewritten: The model with fused operators; None if the original is run.
        operators: The fusion report, or why there was no fusion.
        facts: ``GraphFacts`` as JSON.
        running: Facts of the model with fused operators that replace those of ``facts``.
    """

    identity: str
    external: tuple[tuple[Path, str], ...]
    rewritten: Path | None
    operators: Mapping[str, Any]
    facts: Mapping[str, Any]
    running: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def external_is_current(self) -> bool:
        """Whether the external data is unchanged."""
        with suppress(InvalidModel):
            return all(sha256(path) == checksum for path, checksum in self.external)
        return False


class IsolationChecker:
    """Checks models in a child process, each content once.

    Args:
        provider, threads: Settings of later runs of the model.
        timeout_s: Time limit of loading the model and running it once.
        rewrite: Whether to try operator fusion.
        folder: Folder for results and fused models, created if missing. None creates a temporary
            folder that is deleted with the checker.
        cached: Use the user's cache folder instead, if it is private.
    """

    def __init__(
        self,
        *,
        provider: Provider,
        threads: int,
        timeout_s: float,
        rewrite: bool = False,
        folder: Path | None = None,
        cached: bool = False,
    ) -> None:
        self._provider, self._threads, self._timeout_s = provider, threads, timeout_s
        self._rewrite, self._folder, self._is_cached = rewrite, folder, cached
        self._child: subprocess.Popen[bytes] | None = None
        self._is_closed = False

    @cached_property
    def _cache(self) -> CheckCache:
        settings: dict[str, Any] = {
            "provider": self._provider,
            "threads": self._threads,
            "rewrite": self._rewrite,
            "gpu": gpu_name() if self._provider == "cuda" else None,
        }
        if self._is_cached and (cache := CheckCache(**settings)).folder is not None:
            return cache
        if self._folder is None:
            with suppress(OSError):  # the disk is full: nothing is kept
                self._folder = temporary_folder()
                weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        return CheckCache(self._folder or Path(os.devnull), **settings)

    def check(self, artifact: Artifact) -> CheckResult:
        """Run ``artifact`` in a child process.

        Raises:
            InvalidModel: It cannot be loaded, crashes the runtime, or takes too long.
            InvalidArgument: The provider is not available.
        """
        content = _content(artifact)
        return self._recall(artifact, content) or self._try(artifact, content)

    def close(self) -> None:
        """End the check that is running: it fails, as any later one does."""
        self._is_closed = True
        if self._child is not None:
            self._child.kill()

    def _on_start(self, child: subprocess.Popen[bytes]) -> None:
        self._child = child
        if self._is_closed:
            child.kill()

    def _recall(self, artifact: Artifact, content: str) -> CheckResult | None:
        """The result of an earlier check; None if there is none that fits the model."""
        stored = self._cache.read(content)
        if stored is None:
            return None
        try:
            result = _result(artifact, content, stored["facts"], stored["operators"])
            is_fused, running = result.operators["rewritten"], stored["running"]
        except Exception:  # of another version, or damaged
            return None
        if result.identity != stored["identity"]:
            return None
        fused = self._cache.file(content) if is_fused else None
        return replace(result, rewritten=fused, running=running)

    def _try(self, artifact: Artifact, content: str) -> CheckResult:
        """The result of a new check.

        Raises:
            InvalidModel, InvalidArgument: See ``check``.
        """
        fused = self._cache.file(content) if self._rewrite else None
        new = fused and fused.with_suffix(f".{os.getpid()}.new")
        name, deadline = artifact.model, monotonic() + self._timeout_s
        try:
            with Worker(
                _Child, artifact, self._provider, self._threads,
                timeout_s=self._timeout_s,
                environment=allowed_environment(),
                prepare=partial(limit_process, *self._limits(artifact)),
                on_start=self._on_start,
                silent=True,
            ) as child:  # fmt: skip
                facts = child.call("facts", timeout_s=deadline - monotonic())
                # Before the run, so that a file that is replaced meanwhile is detected.
                result = _result(artifact, content, facts, NOT_REWRITTEN)
                child.call("run", timeout_s=deadline - monotonic())
                operators, is_final = self._fuse(child, new, deadline)
                running = operators.pop("running", {})
        except FORWARDED_ERRORS:
            raise
        except WorkerCrashed as error:
            if error.timed_out:
                raise InvalidModel(
                    f"{name}: it did not load and run within {self._timeout_s:g} s",
                    "raise `probe_timeout_s` for a large model, otherwise do not use it",
                    code="model.timeout",
                ) from error
            raise InvalidModel(f"{name}: {error.what}", FIX, code="model.crash") from error
        except AttnserveError as error:
            raise InvalidModel(error.what, error.fix, code=error.code) from error
        result = replace(result, operators=operators)
        if fused and new and operators["rewritten"] and new.is_file():
            result = replace(result, rewritten=new.replace(fused), running=running)
        elif new:
            new.unlink(missing_ok=True)
        stored = {"identity": result.identity, "facts": facts, "operators": operators,
                  "running": dict(result.running)}  # fmt: skip
        is_fused = result.rewritten is not None
        self._cache.write(content, stored, fused=is_fused, is_final=is_final)
        return result

    def _limits(self, artifact: Artifact) -> tuple[int, int]:
        """Limits of the child: bytes of address space (0 for none) and seconds of processor time.

        CUDA reserves address space for all memory of the machine.
        """
        cores = os.cpu_count() or 1
        files = (*artifact.folder.glob("*"), *artifact.folder.glob("*/*"))  # external data too
        size = sum(path.stat().st_size for path in files if path.is_file())
        memory = MEMORY_BYTES + MEMORY_PER_CORE_BYTES * cores + MEMORY_PER_BYTE * size
        return (0 if self._provider == "cuda" else memory), math.ceil(self._timeout_s) * cores

    def _fuse(
        self, child: Worker, new: Path | None, deadline: float
    ) -> tuple[dict[str, Any], bool]:
        """The report of the fusion, and whether it would be the same again.

        A failure does not fail the check.
        """
        if not self._rewrite:
            return dict(NOT_REWRITTEN), True
        if new is None:
            return {"rewritten": False, "why": "there is no folder for it"}, False
        timeout_s = round(min(FUSION_TIMEOUT_S, deadline - monotonic()), 1)
        try:
            return child.call("fuse", new, timeout_s=timeout_s), True
        except AttnserveError as error:
            return {"rewritten": False, "why": error.what}, isinstance(error, CannotRewrite)


def identify(artifact: Artifact) -> CheckResult:
    """The result for a trusted model, without a check and without fusion.

    Raises:
        InvalidModel: It cannot be read.
    """
    content, facts = _content(artifact), GraphFacts.read(artifact).to_json()
    return _result(artifact, content, facts, {"rewritten": False, "why": "it is not probed"})


def _content(artifact: Artifact) -> str:
    """A checksum without external data: listing its files needs the graph, which may crash."""
    digest = hashlib.sha256(sha256(artifact.model).encode())
    for name in CONFIGURATION_FILES:
        path = artifact.companion(name)
        digest.update(f" {name} {path and sha256(path)}".encode())
    # Other files state it too, for example those of sentence-transformers.
    digest.update(json.dumps(artifact.record, sort_keys=True).encode())
    return digest.hexdigest()


def _result(
    artifact: Artifact, content: str, facts: Mapping[str, Any], operators: Mapping[str, Any]
) -> CheckResult:
    """The result for a model; ``content`` is its checksum without the external data."""
    folder = artifact.folder
    locations = GraphFacts.from_json(facts).external
    external = [folder / location for location in locations]
    if any(external_file(artifact.model, location) is None for location in locations):
        raise InvalidModel(f"{artifact.model}: external data is outside its folder", FIX)
    checksums = tuple((path, sha256(path)) for path in external)
    digest = hashlib.sha256(content.encode())
    for path, checksum in checksums:
        digest.update(f" {path.name} {checksum}".encode())
    return CheckResult(digest.hexdigest(), checksums, None, operators, facts)


class _Child:
    """A model that is loaded and run once (in the child)."""

    def __init__(self, artifact: Artifact, provider: Provider, threads: int) -> None:
        self._artifact, self._threads = artifact, threads
        self._provider: Provider = provider
        self._facts = GraphFacts.read(artifact)

    def facts(self) -> dict[str, Any]:
        return self._facts.to_json()

    def run(self) -> None:
        model = Model(
            self._artifact, provider=self._provider, threads=self._threads, facts=self._facts
        )
        model.warm_up()
        model.close()

    def fuse(self, new: Path) -> dict[str, Any]:
        """Write the model with fused operators; "running" are its costs."""
        # Imported here: only this process needs the modules that rewrite graphs.
        from attnserve.planning.lossless_passes import fuse_lossless

        size = self._facts.weight_bytes
        if size > MAX_BYTES:
            raise CannotRewrite(
                f"it holds {size / 1e9:.1f} GB of weights, more than {MAX_BYTES / 1e9:g}"
            )
        found = fuse_lossless(self._artifact, new, provider=self._provider, threads=self._threads)
        running = GraphFacts.read(replace(self._artifact, model=new)).cost_json()
        return {"rewritten": True, **asdict(found), "running": running}
