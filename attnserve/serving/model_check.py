"""The load check: load and run a model in a child process before this process loads it.

A model file is untrusted: it may crash ONNX Runtime or never finish a run. The child loads it and
runs it once; a crash or a timeout becomes an ``InvalidModel``. Results are cached by content, so
that another check of the same files, also in another process, only reads them.

Another child then tries lossless operator fusion (``served_graph``). The fused model is served
if it is equivalent and faster. Fusion takes seconds for a small model and minutes for a large one,
so it runs in the background while the original is served.
"""

from __future__ import annotations

import logging
import math
import os
import shutil
import signal
import subprocess
import threading
import weakref
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict, replace
from functools import cached_property, partial
from pathlib import Path
from time import monotonic
from typing import Any

from pydantic import TypeAdapter

from attnserve.context import AUTO, Device
from attnserve.models.artifact import Artifact
from attnserve.models.onnx_files import load_model
from attnserve.planning.served_graph.fusion_report import NotFaster
from attnserve.runtime.isolation import (
    Worker,
    WorkerCrashed,
    allowed_environment,
    limit_process,
    run_isolated,
)
from attnserve.runtime.machine import gpu_name
from attnserve.runtime.memory_use import available_bytes, peak_bytes
from attnserve.runtime.temporary import temporary_folder
from attnserve.serving.backends import RunnerOptions
from attnserve.serving.check_cache import CheckCache
from attnserve.serving.check_result import FIX, CachedResult, CheckResult, checksum_of
from attnserve.serving.graph_facts import WARM_UP_LENGTHS, WARM_UP_ROWS, GraphCost, GraphFacts
from attnserve.serving.loaded_model import Model
from attnserve.serving.operator_report import NOT_REWRITTEN, PENDING, OperatorReport
from graph_passes.errors import (
    AttnserveError,
    CannotRewrite,
    InvalidArgument,
    InvalidModel,
    MissingExtra,
    Refusal,
)

__all__ = ["LoadChecker"]

log = logging.getLogger(__name__)

FORWARDED_ERRORS = (InvalidModel, InvalidArgument, MissingExtra)
"""Errors of the child that keep their type; other errors become ``InvalidModel``."""

MEMORY_BYTES, MEMORY_PER_CORE_BYTES, MEMORY_PER_BYTE = 4 << 30, 256 << 20, 10
"""Limit of the memory that the child allocates, in bytes: a floor, a part per core for stacks and
heaps of threads, and a part per byte of the files in the model's folder for several copies (graph,
sessions and fused model)."""

LOADED_BYTES, LOADED_PER_BYTE = 1 << 30, 8
"""Limit of the resident memory of the first run, in bytes: a floor, and a part per byte of the
files in the model's folder. The server needs about the same memory."""

RUN_PER_BYTE = 64
"""Resident memory of the first run, in bytes per byte of its inputs."""

FUSION_TIMEOUT_S, MAX_FUSION_TIMEOUT_S = 300, 3600
"""Bounds of the time limit of operator fusion, which grows with the cost of the model."""

FUSION_TOKENS = 16384
"""Number of tokens that the comparison and one timing of two graphs process."""

MACS_PER_S = 2e10
"""Assumed multiply-accumulates per second of an idle core."""

BUSY = 100
"""Maximum slowdown of the fusion on a busy machine, relative to an idle core."""

FOREGROUND_S = 10.0
"""Seconds for which ``check`` waits for a fusion. Fusions that would take longer on an idle core
run in the background."""

FUSION_MEMORY_BYTES, FUSION_MEMORY_PER_BYTE = 1 << 29, 5
"""Memory that operator fusion needs, in bytes: a floor, and a part per byte of the weights for
several copies in each runtime."""

NICE = 5
"""Nice value of the fusion, so that requests have priority."""

FusionResult = tuple[OperatorReport, GraphCost | None]
"""The result of a fusion, and the cost of the fused model; None if there is none."""

FUSION_RESULT: TypeAdapter[FusionResult] = TypeAdapter(FusionResult)
"""The JSON with which the child of a fusion answers."""

STOPS = (signal.SIGINT, signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM))
"""Signals that end a server and its child processes, without a fault of the model."""


class LoadChecker:
    """Runs the load check of models in a child process; equal files are checked once.

    Args:
        device: Device that runs the model later.
        timeout_s: Time limit of loading the model and running it once.
        rewrite: Whether to try operator fusion.
        folder: Folder for results and fused models, created if missing. None creates a temporary
            folder that is deleted with the checker.
        cached: Use the user's cache folder instead, if it is private.
    """

    def __init__(
        self,
        *,
        device: Device,
        timeout_s: float,
        rewrite: bool = False,
        folder: Path | None = None,
        cached: bool = False,
    ) -> None:
        self.device, self._timeout_s = device, timeout_s
        self._rewrite, self._folder, self._is_cached = rewrite, folder, cached
        self._lock = threading.Lock()  # a check and a fusion start children in different threads
        self._children: set[subprocess.Popen[bytes]] = set()
        self._fusions: dict[str, Future[CheckResult]] = {}  # running fusions, by identity
        self.is_closed = False
        """Whether the checker is closed: running and later checks and fusions fail."""

    @cached_property
    def _cache(self) -> CheckCache:
        settings: dict[str, Any] = {
            **asdict(self.device),
            "rewrite": self._rewrite,
            "gpu": gpu_name() if self.device.provider == "cuda" else None,
        }
        if self._is_cached and (cache := CheckCache(**settings)).folder is not None:
            return cache
        if self._folder is None:
            with suppress(OSError):  # the disk is full: no result is kept
                folder = temporary_folder()
                weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
                # The cache locks this folder, and this process locks the parent.
                self._folder = folder / "checks"
        return CheckCache(self._folder or Path(os.devnull), **settings)

    def check(self, artifact: Artifact) -> CheckResult:
        """Run ``artifact`` in a child process.

        Raises:
            InvalidModel: The model cannot be loaded, crashes the runtime, or takes too long.
            InvalidArgument: The provider is not available.
        """
        checksum = checksum_of(artifact)
        result = self._recall(artifact, checksum) or self._try(artifact, checksum)
        if result.operators != PENDING:
            return result
        idle_s = _idle_fusion_s(result.facts)
        timeout_s = min(max(FUSION_TIMEOUT_S, round(BUSY * idle_s)), MAX_FUSION_TIMEOUT_S)
        fusion = self._start_fusion(artifact, result, timeout_s)
        with suppress(TimeoutError):
            return fusion.result(FOREGROUND_S if idle_s <= FOREGROUND_S else 0)
        return replace(result, fusion=fusion)

    def close(self) -> None:
        """Cancel running checks and fusions; running and later ones fail."""
        with self._lock:
            self.is_closed = True
            for child in self._children:
                child.kill()

    def _on_start(self, child: subprocess.Popen[bytes]) -> None:
        with self._lock:
            running = {other for other in self._children if other.poll() is None}
            self._children = running | {child}
            if self.is_closed:
                child.kill()

    def _recall(self, artifact: Artifact, checksum: str) -> CheckResult | None:
        """Read the result of an earlier check; None if no result fits the model."""
        entry = self._cache.read(checksum)
        if entry is None:
            return None
        try:
            cached = CachedResult.model_validate(entry)
            result = CheckResult.of(artifact, checksum, cached.facts, cached.operators)
        except Exception:  # the entry is damaged, or from another version
            return None
        if result.identity != cached.identity:
            return None
        fused_file = None if cached.fused_cost is None else self._cache.file(checksum)
        return replace(result, fused_file=fused_file, fused_cost=cached.fused_cost)

    def _try(self, artifact: Artifact, checksum: str) -> CheckResult:
        """Run a new check, with the errors of ``check``."""
        name = artifact.model
        deadline = monotonic() + self._timeout_s
        try:
            with Worker(
                _CheckProcess,
                artifact,
                self.device,
                timeout_s=self._timeout_s,
                environment=allowed_environment(),
                prepare=partial(limit_process, *self._limits(artifact, self._timeout_s)),
                on_start=self._on_start,
                silent=True,
            ) as child:
                content = child.call("facts", timeout_s=deadline - monotonic())
                facts = GraphFacts.model_validate(content)
                # Before the run, so that a file that is replaced meanwhile is detected.
                result = CheckResult.of(artifact, checksum, facts, self._first_report)
                child.call("run", timeout_s=deadline - monotonic())
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
        self._write(result)
        return result

    @property
    def _first_report(self) -> OperatorReport:
        """The operator report of a model before the fusion."""
        if not self._rewrite:
            return NOT_REWRITTEN
        if self._cache.folder is None:
            return OperatorReport(why="there is no folder for it")
        return PENDING

    def _write(self, result: CheckResult, *, is_final: bool = True) -> None:
        cached = CachedResult(
            identity=result.identity,
            facts=result.facts,
            operators=result.operators,
            fused_cost=result.fused_cost,
        )
        is_fused = result.fused_file is not None
        self._cache.write(result.checksum, cached.to_json(), fused=is_fused, is_final=is_final)

    def _limits(self, artifact: Artifact, timeout_s: float) -> tuple[int, int]:
        """Limits of a child: bytes of memory (0 for none) and seconds of processor time.

        CUDA has no memory limit, because it reserves address space for the whole machine.
        """
        cores = os.cpu_count() or 1
        memory = MEMORY_BYTES + MEMORY_PER_CORE_BYTES * cores + MEMORY_PER_BYTE * _size(artifact)
        return (0 if self.device.provider == "cuda" else memory), math.ceil(timeout_s) * cores

    # -- fusion -----------------------------------------------------------------------------------

    def _start_fusion(
        self, artifact: Artifact, result: CheckResult, timeout_s: float
    ) -> Future[CheckResult]:
        """Start the fusion in a thread, unless it runs already."""
        open_fusion = self._fusions.get(result.identity)
        if open_fusion is not None:
            return open_fusion
        fusion = self._fusions[result.identity] = Future[CheckResult]()
        fusion.set_running_or_notify_cancel()  # one cancelled waiter must not stop the fusion

        def run() -> None:
            try:
                fused = self._fuse_alone(artifact, result, timeout_s)
            except Exception as error:  # for example a full disk
                fused = result.unfused(f"{type(error).__name__}: {error}")
            self._fusions.pop(result.identity, None)
            fusion.set_result(fused)

        threading.Thread(target=run, name="attnserve-fusion", daemon=True).start()
        return fusion

    def _fuse_alone(self, artifact: Artifact, result: CheckResult, timeout_s: float) -> CheckResult:
        """Fuse the model while no other fusion runs in this cache folder.

        Concurrent fusions would distort each other's timings and add up their memory. Another
        process may have fused the same model meanwhile.
        """
        with self._cache.lock(lambda: self.is_closed) as is_locked:
            if not is_locked:
                return result.unfused("the server stops")
            entry = self._recall(artifact, result.checksum)
            if (
                entry is not None
                and entry.identity == result.identity
                and entry.operators != PENDING
            ):
                return entry
            return self._fuse(artifact, result, timeout_s)

    def _fuse(self, artifact: Artifact, result: CheckResult, timeout_s: float) -> CheckResult:
        """Run a new fusion.

        Results that depend on the state of the machine are cached for a limited time, or not at
        all.
        """
        with self._cache.new_file(result.checksum) as file:
            if file is None:
                return result.unfused("there is no folder for it")
            runtimes = 2 if self.device.runtime == AUTO else 1
            if refusal := _resource_refusal(result.facts.weight_bytes, file.parent, runtimes):
                return result.unfused(refusal.reason)
            try:
                operators, fused_cost = self._run_fusion(artifact, file, timeout_s)
            except AttnserveError as error:
                if self._is_stopped(error):
                    return result.unfused(f"the fusion was stopped: {error.what}")
                fused_result, is_final = result.unfused(error.what), False
            else:
                fused_result = replace(result, operators=operators, fused_cost=fused_cost)
                is_final = True
            if not result.is_current(artifact):
                return result.unfused("the files changed during the fusion")
            if fused_result.fused_cost is not None:
                fused_result = replace(fused_result, fused_file=self._cache.keep(file))
        self._write(fused_result, is_final=is_final)
        return fused_result

    def _run_fusion(self, artifact: Artifact, file: Path, timeout_s: float) -> FusionResult:
        """Run ``_fuse_in_child`` in a child process.

        If the fusion fails during the comparison of runtimes, for example because one ends the
        process, the fusion is repeated with the first runtime alone.

        Raises:
            AttnserveError: The fusion fails, without a statement about the model.
        """
        run = partial(
            run_isolated,
            timeout_s=timeout_s,
            environment=allowed_environment(),
            prepare=partial(limit_process, *self._limits(artifact, timeout_s), nice=NICE),
            on_start=self._on_start,
            silent=True,
        )
        try:
            return FUSION_RESULT.validate_python(run(_fuse_in_child, artifact, file, self.device))
        except AttnserveError as error:
            if self.device.runtime != AUTO or self._is_stopped(error):
                raise
            log.warning("%s: the runtimes could not be compared: %s", artifact.model, error.what)
            first = replace(self.device, runtime=self.device.runtime_name)
            content = run(_fuse_in_child, artifact, file, first)
            operators, cost = FUSION_RESULT.validate_python(content)
            return operators.with_refused({AUTO: error.what}), cost

    def _is_stopped(self, error: AttnserveError) -> bool:
        """Whether a child ended because the server or a user ended it."""
        is_signal = isinstance(error, WorkerCrashed) and -(error.status or 0) in STOPS
        return self.is_closed or is_signal


def _size(artifact: Artifact) -> int:
    """The size in bytes of a model and its external data, with the other files of its folder."""
    files = (*artifact.folder.glob("*"), *artifact.folder.glob("*/*"))
    return sum(path.stat().st_size for path in files if path.is_file())


class _CheckProcess:
    """Loads a model and runs it once (in the child)."""

    def __init__(self, artifact: Artifact, device: Device) -> None:
        self._artifact, self._device = artifact, device
        self._facts = GraphFacts.read(artifact)

    def facts(self) -> dict[str, Any]:
        return self._facts.to_json()

    def run(self) -> None:
        model = Model(self._artifact, RunnerOptions(self._device), facts=self._facts)
        model.warm_up()
        if self._device.provider == "cpu":
            self._check_memory()
        model.close()

    def _check_memory(self) -> None:
        """Refuse a small file that computes large constants; images need more memory than texts."""
        size = _size(self._artifact)
        taken = peak_bytes()
        examples = self._facts.examples[:1]
        input_bytes = sum(array.nbytes for example in examples for array in example.values())
        most = LOADED_BYTES + LOADED_PER_BYTE * size + RUN_PER_BYTE * input_bytes
        if taken > most:
            raise InvalidModel(
                f"{self._artifact.model}: a run of {WARM_UP_ROWS} rows takes {taken / 1e6:.0f} MB"
                f" of memory: expected at most {most / 1e6:.0f} MB for a folder of"
                f" {size / 1e6:.3g} MB",
                FIX,
                code="model.memory",
            )


def _fuse_in_child(artifact: Artifact, new: Path, device: Device) -> Any:
    """Write the fused model, unless fusion is refused; return the JSON of a ``FusionResult``."""
    # Imported here: only this process needs the modules that rewrite graphs.
    from attnserve.planning.served_graph.lossless import fuse_lossless

    try:
        operators = OperatorReport(fused=fuse_lossless(artifact, new, device))
        cost = GraphCost.of(load_model(replace(artifact, model=new), in_place=True))
    except CannotRewrite as error:
        refused = error.refused if isinstance(error, NotFaster) else {}
        operators, cost = OperatorReport(why=error.what, refused=refused), None
    return FUSION_RESULT.dump_python((operators, cost), mode="json")


def _idle_fusion_s(facts: GraphFacts) -> float:
    """Estimated time of the fusion on an idle core, from its MACs."""
    example = facts.examples[0] if facts.examples else {}
    macs = facts.cost.macs_of({name: array.shape for name, array in example.items()})
    texts = [array for array in example.values() if array.ndim == 2 and array.dtype.kind == "i"]
    tokens = max((text.size for text in texts), default=WARM_UP_ROWS * WARM_UP_LENGTHS[0])
    # Without a count, assume that each weight is multiplied once per token.
    per_token = macs / tokens if example and macs else facts.parameters
    return per_token * FUSION_TOKENS / MACS_PER_S


def _resource_refusal(weights: int, folder: Path, runtimes: int) -> Refusal | None:
    """Return why memory or disk space is insufficient for a fusion; None if it is sufficient.

    Args:
        weights: The size of the weights in bytes.
        folder: The folder of the fused model.
        runtimes: The number of compared runtimes.
    """
    memory = FUSION_MEMORY_BYTES + FUSION_MEMORY_PER_BYTE * weights * runtimes
    available = available_bytes()
    if memory > available:
        needed = (
            f"it needs {memory / 1e9:.1f} GB of memory, and {available / 1e9:.1f} GB are available"
        )
        return Refusal("memory", needed)
    free = shutil.disk_usage(folder).free
    if weights > free:
        needed = f"it needs {weights / 1e9:.1f} GB in the cache folder, which has"
        return Refusal("disk", f"{needed} {free / 1e9:.1f} GB")
    return None
