"""Check models in a child process before the server loads them.

A model file is untrusted: it may crash ONNX Runtime or never finish a run. The child loads it and
runs it once; a crash or a timeout becomes an ``InvalidModel``. Results are cached by content, so
that loading the same files again only reads them.

The child then tries lossless operator fusion (``planning.lossless``). If the fused model computes
the same and is faster, the server runs that file. If fusion fails, the server runs the original.

Protocol: one JSON request on stdin; two JSON lines on stdout, for the check and for the fusion.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from attnserve.context import Provider
from attnserve.models.artifact import Artifact, load_model, open_artifact, sha256
from attnserve.runtime.external_data import external_files
from attnserve.runtime.session import weight_bytes
from graph_passes.errors import AttnserveError, InvalidArgument, InvalidModel, MissingExtra
from service.engine.model import NOT_REWRITTEN, Model

__all__ = ["CheckResult", "IsolationChecker", "environment", "python"]

CONFIGURATION_FILES = ("tokenizer.json", "tokenizer_config.json", "attnserve.json", "config.json")
"""Files beside the model that change how it is served."""

FORWARDED_ERRORS: dict[str, type[AttnserveError]] = {
    kind.__name__: kind for kind in (InvalidModel, InvalidArgument, MissingExtra)
}
"""Errors that keep their type when the child reports them."""

log = logging.getLogger("attnserve")

INHERITED = frozenset(
    {
        "HOME", "USER", "LANG", "LANGUAGE", "TZ", "TMPDIR", "TEMP", "TMP",
        "LD_PRELOAD", "GLIBC_TUNABLES", "TOKENIZERS_PARALLELISM",
        "NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES", "NVIDIA_TF32_OVERRIDE",
        "PYTHONHOME", "PYTHONUSERBASE", "PYTHONNOUSERSITE", "PYTHONFAULTHANDLER",
        "PYTHONDONTWRITEBYTECODE", "PYTHONUNBUFFERED", "PYTHONUTF8", "PYTHONWARNINGS",
        "SSL_CERT_FILE", "SSL_CERT_DIR",
        "SYSTEMROOT", "WINDIR", "USERPROFILE", "APPDATA", "LOCALAPPDATA",
    }
)  # fmt: skip
"""Environment variables that child processes inherit. NVIDIA's are listed one by one:
NVIDIA_API_KEY is a secret."""

INHERITED_PREFIXES = (
    "LC_", "CUDA_", "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "RAYON_", "MALLOC_"
)  # fmt: skip
"""Beginnings of the names of further variables that child processes inherit."""

SEARCH_PATHS = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH")
"""Variables that child processes inherit without their empty and relative entries."""

FIX = "do not serve this file; if you made it, check it with onnx.checker.check_model"

FUSION_TIMEOUT_S = 60
"""Time limit of operator fusion; when it passes, the original model is served."""

MAX_BYTES = 1_000_000_000
"""Largest weights for which fusion is tried: it takes seconds per gigabyte, and a copy on disk."""


@dataclass(frozen=True)
class CheckResult:
    """A model that passed the check.

    Attributes:
        identity: A checksum of all its files.
        rewritten: The model with fused operators; None if the original is run.
        operators: The fusion report, or why there was no fusion.
    """

    identity: str
    rewritten: Path | None = None
    operators: Mapping[str, Any] = field(default_factory=lambda: NOT_REWRITTEN)


@dataclass(frozen=True)
class _Record:
    """Result of a check: external data files with their checksums, and the fused model."""

    external: tuple[tuple[Path, str], ...]
    rewritten: Path | None = None
    operators: Mapping[str, Any] = field(default_factory=lambda: NOT_REWRITTEN)

    @property
    def is_current(self) -> bool:
        """Whether all files are unchanged."""
        return all(_sha256(path) == checksum for path, checksum in self.external) and (
            self.rewritten is None or self.rewritten.is_file()
        )


class IsolationChecker:
    """Checks models in a child process, each content once.

    Args:
        provider, threads: Settings of the runs that serve the model.
        timeout_s: Time limit of loading the model and running it once.
        rewrite: Whether to try operator fusion.
        folder: Folder for fused models, created if missing. None creates a temporary folder that is
            deleted with the checker.
        in_use: Returns the identities of the loaded models, or None while they change. Fused files
            of other models are deleted.
    """

    def __init__(
        self,
        *,
        provider: Provider,
        threads: int,
        timeout_s: float,
        rewrite: bool = False,
        folder: Path | None = None,
        in_use: Callable[[], Collection[str] | None] = lambda: None,
    ) -> None:
        self._provider, self._threads, self._timeout_s = provider, threads, timeout_s
        self._rewrite, self._folder, self._in_use = rewrite, folder, in_use
        self._records: dict[str, _Record] = {}

    def check(self, artifact: Artifact) -> CheckResult:
        """Run ``artifact`` in a child process.

        Raises:
            InvalidModel: It cannot be loaded, crashes the runtime, or takes too long.
            InvalidArgument: The provider is not available.
        """
        content = self._content(artifact)
        record = self._records.get(content)
        if record is None or not record.is_current:
            self._delete_unused()
            record = self._records[content] = self._try(artifact, content)
        return CheckResult(self._identity(content, record), record.rewritten, record.operators)

    def identify(self, artifact: Artifact) -> CheckResult:
        """The result for a trusted model, without a check and without fusion.

        Raises:
            InvalidModel: It cannot be read.
        """
        content = self._content(artifact)
        external = sorted(external_files(load_model(artifact)))
        record = _Record(tuple((path, _sha256(path)) for path in external))
        return CheckResult(
            self._identity(content, record), None, {"rewritten": False, "why": "it is not probed"}
        )

    def export_results(self) -> dict[str, dict[str, Any]]:
        """All results as JSON, for ``import_results`` in another process."""
        return {
            content: {
                "external": [(str(path), checksum) for path, checksum in record.external],
                "rewritten": None if record.rewritten is None else str(record.rewritten),
                "operators": dict(record.operators),
            }
            for content, record in self._records.items()
        }

    def import_results(self, results: Mapping[str, Mapping[str, Any]]) -> None:
        """Add the results of another checker with the same settings."""
        for content, result in results.items():
            external = tuple((Path(path), checksum) for path, checksum in result["external"])
            rewritten = None if result["rewritten"] is None else Path(result["rewritten"])
            self._records.setdefault(content, _Record(external, rewritten, result["operators"]))

    def _delete_unused(self) -> None:
        """Delete the fused files of models that are not loaded."""
        in_use = self._in_use()
        if in_use is None:  # other models are being loaded
            return
        for content, record in list(self._records.items()):
            if record.rewritten is not None and self._identity(content, record) not in in_use:
                record.rewritten.unlink(missing_ok=True)

    def _content(self, artifact: Artifact) -> str:
        """A checksum without external data: listing its files needs the graph, which may crash."""
        digest = hashlib.sha256(_sha256(artifact.model).encode())
        for name in CONFIGURATION_FILES:
            path = artifact.companion(name)
            digest.update(f" {name} {path and _sha256(path)}".encode())
        return digest.hexdigest()

    def _identity(self, content: str, record: _Record) -> str:
        digest = hashlib.sha256(content.encode())
        for path, checksum in record.external:
            digest.update(f" {path.name} {checksum}".encode())
        return digest.hexdigest()

    def _try(self, artifact: Artifact, content: str) -> _Record:
        new = self._new_file(content) if self._rewrite else None
        report, operators = self._run_child(artifact, new)
        external = tuple((Path(path), _sha256(Path(path))) for path in report["external"])
        rewritten = None
        if new is not None and operators["rewritten"] and new.is_file():
            rewritten = new.replace(new.with_suffix(".onnx"))
        elif new is not None:
            new.unlink(missing_ok=True)
        return _Record(external, rewritten, operators)

    def _new_file(self, content: str) -> Path | None:
        """The file for the fused model; None if its folder cannot be written."""
        try:
            if self._folder is None:
                self._folder = Path(tempfile.mkdtemp(prefix="attnserve-"))
                weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
            self._folder.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            log.warning("operator fusion is off: no temporary folder: %s", error)
            return None
        return self._folder / f"{content}.new"

    def _run_child(
        self, artifact: Artifact, new: Path | None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """The child's reports of the check, and of the fusion to ``new``.

        Raises:
            InvalidModel, InvalidArgument: See ``check``.
        """
        name, request = artifact.model, {
            "model": str(artifact.model),
            "shared": None if artifact.shared is None else str(artifact.shared),
            "provider": self._provider,
            "threads": self._threads,
            "rewrite": None if new is None else str(new),
        }  # fmt: skip
        try:
            done = subprocess.run(
                python("service.engine.isolation"),
                input=json.dumps(request).encode(),
                capture_output=True,
                timeout=self._timeout_s,
                check=False,
                env=environment(),
            )
            code, output, errors = done.returncode, done.stdout, done.stderr
        except subprocess.TimeoutExpired as error:
            code, output, errors = None, error.stdout or b"", b""
        first, _, second = output.decode(errors="replace").partition("\n")
        report = _parse(first)
        if report is None and code is None:
            raise InvalidModel(
                f"{name}: it did not load and run within {self._timeout_s:g} s",
                "raise `probe_timeout_s` for a large model, otherwise do not serve it",
                code="model.timeout",
            )
        if report is None and code is not None and code < 0:
            raise InvalidModel(
                f"{name}: it crashes ONNX Runtime (signal {-code})", FIX, code="model.crash"
            )
        if report is None:
            raise InvalidModel(
                f"{name}: the process that tried it ended with {code}:"
                f" {errors.decode(errors='replace').strip()[-300:]}",
                FIX,
                code="model.crash",
            )
        if "error" in report:
            kind = FORWARDED_ERRORS.get(report["error"], InvalidModel)
            raise kind(report["what"], report["fix"], code=report["code"])
        if not self._rewrite:
            return report, dict(NOT_REWRITTEN)
        why = "there is no folder for it"
        if new is not None:
            late = code is None or code == -getattr(signal, "SIGALRM", 0)
            why = "it took too long" if late else f"the process that tried it ended with {code}"
        return report, _parse(second) or {"rewritten": False, "why": why}


def python(module: str) -> list[str]:
    """The command that runs a module of this installation; use it with ``environment``."""
    return [sys.executable, "-P", "-m", module]


def environment(*prefixes: str) -> dict[str, str]:
    """The environment of a child process: an allow-list that holds no secrets.

    The child imports the same ``attnserve`` as this process. Search paths keep only absolute
    folders that exist. An empty or relative entry means the working folder, which may hold a
    downloaded model: its ``random.py`` would be imported in place of the standard library's.

    Args:
        prefixes: Beginnings of further variable names to pass on.
    """
    kept = {
        name: value
        for name, value in os.environ.items()
        if name in INHERITED or name.startswith((*INHERITED_PREFIXES, *prefixes))
    }
    installation = str(Path(__file__).absolute().parents[2])
    paths = {name: _absolute(os.environ.get(name, "")) for name in SEARCH_PATHS}
    paths["PYTHONPATH"] = [installation, *paths["PYTHONPATH"]]
    return kept | {name: os.pathsep.join(found) for name, found in paths.items() if found}


def _absolute(paths: str) -> list[str]:
    """The absolute entries of a search path that exist."""
    found = paths.split(os.pathsep)
    return [path for path in found if Path(path).is_absolute() and os.access(path, os.F_OK)]


def _sha256(path: Path) -> str:
    try:
        return sha256(path)
    except OSError as error:
        raise InvalidModel(f"{path}: cannot be read: {error.strerror}", "check the path") from error


def _parse(line: str) -> dict[str, Any] | None:
    """A report of the child; None if it is missing or incomplete."""
    try:
        report: Any = json.loads(line)
    except ValueError:
        return None
    return report if isinstance(report, dict) else None


def _check(request: dict[str, Any]) -> dict[str, Any]:
    """Load the model and run it once (in the child)."""
    try:
        artifact = _artifact(request)
        model = Model(artifact, provider=request["provider"], threads=request["threads"])
        model.warm_up()
        external = sorted(external_files(load_model(artifact)))
    except AttnserveError as error:
        return {
            "error": type(error).__name__,
            "what": error.what,
            "fix": error.fix,
            "code": error.code,
        }
    return {"external": [str(path) for path in external]}


def _fuse(request: dict[str, Any]) -> dict[str, Any]:
    """Write the model with fused operators (in the child); report if and why not."""
    from attnserve.planning.lossless import fuse_lossless

    try:
        artifact = _artifact(request)
        if request["provider"] != "cpu":
            return {"rewritten": False, "why": "operator fusion supports only the CPU"}
        size = weight_bytes(load_model(artifact))
        if size > MAX_BYTES:
            why = f"it holds {size / 1e9:.1f} GB of weights, more than {MAX_BYTES / 1e9:g}"
            return {"rewritten": False, "why": why}
        found = fuse_lossless(
            artifact,
            Path(request["rewrite"]),
            provider=request["provider"],
            threads=request["threads"],
        )
    except AttnserveError as error:
        return {"rewritten": False, "why": error.what}
    except Exception as error:  # the model itself has passed its check
        return {"rewritten": False, "why": f"{type(error).__name__}: {error}"}
    return {"rewritten": True, **asdict(found)}


def _artifact(request: dict[str, Any]) -> Artifact:
    return open_artifact(Path(request["model"]), request["shared"] and Path(request["shared"]))


def main() -> None:
    with suppress(OSError):  # out of memory: end this process, not the server
        Path("/proc/self/oom_score_adj").write_text("1000")
    with suppress(ImportError, ValueError):
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    request = json.load(sys.stdin)
    report = _check(request)
    print(json.dumps(report), flush=True)
    if request["rewrite"] is not None and "error" not in report:
        if hasattr(signal, "alarm"):  # it ends this process inside native code too
            signal.alarm(FUSION_TIMEOUT_S)
        print(json.dumps(_fuse(request)), flush=True)


if __name__ == "__main__":
    main()
