"""A child process that loads a model and runs it once, before the server trusts it.

A graph is input of a stranger: it may crash the runtime, or never come back. It does so in the
child, whose death or silence becomes an error like any other. What has passed is remembered by
content, so that loading the same files again costs no more than reading them.

The child then writes the model in the operators that run fastest (``planning.lossless``): where
these compute the same and are faster, that file is what the server runs. Whatever happens there,
the model is served, as it is.
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
from service.engine.model import AS_IT_IS, Model

__all__ = ["Proven", "Prover", "environment", "python"]

COMPANIONS = ("tokenizer.json", "tokenizer_config.json", "attnserve.json", "config.json")
"""What decides, beside the model, how it is served."""

TOLD: dict[str, type[AttnserveError]] = {
    kind.__name__: kind for kind in (InvalidModel, InvalidArgument, MissingExtra)
}
"""Errors that the child may pass on as they are."""

log = logging.getLogger("attnserve")

PASSED = frozenset(
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

PASSED_PREFIXES = (
    "LC_", "CUDA_", "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "RAYON_", "MALLOC_"
)  # fmt: skip
"""Beginnings of the names of further variables that child processes inherit."""

SEARCH_PATHS = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH")
"""Variables that child processes inherit without their empty and relative entries."""

FIX = "do not serve this file; if you made it, check it with onnx.checker.check_model"


REWRITE_S = 60
"""How long the rewriting may take; then the model is served as it is."""

MOST_BYTES = 1_000_000_000
"""Weights of a model that is rewritten: it takes seconds a gigabyte, and a copy on disk."""


@dataclass(frozen=True)
class Proven:
    """A model that may be loaded.

    Attributes:
        identity: A checksum of all that it is made of.
        rewritten: The same model in the fastest operators; None where its own file is run.
        operators: What was done and how it compares (``Exact``), or why nothing was.
    """

    identity: str
    rewritten: Path | None = None
    operators: Mapping[str, Any] = field(default_factory=lambda: AS_IT_IS)


@dataclass(frozen=True)
class _Proof:
    """What else a model was made of when it ran: the files of its external data."""

    external: tuple[tuple[Path, str], ...]
    rewritten: Path | None = None
    operators: Mapping[str, Any] = field(default_factory=lambda: AS_IT_IS)

    @property
    def holds(self) -> bool:
        """Whether all files are as they were."""
        return all(_sha256(path) == known for path, known in self.external) and (
            self.rewritten is None or self.rewritten.is_file()
        )


class Prover:
    """Tries models in a process of their own, each content once.

    Args:
        provider, threads: How they will be served.
        timeout_s: How long a model may take to load and run.
        rewrite: Whether to look for faster operators that compute the same.
        folder: Where rewritten models lie, made where it is missing; it belongs to the caller. None
            makes one that goes with the prover.
        in_use: The identities of what is loaded: the files of others are taken away before another
            is written.
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
        self._proofs: dict[str, _Proof] = {}

    def prove(self, artifact: Artifact) -> Proven:
        """What may be loaded, once ``artifact`` has run in a child.

        Raises:
            InvalidModel: It cannot be loaded, crashes the runtime, or takes too long.
            InvalidArgument: The provider is not available here.
        """
        content = self._content(artifact)
        proof = self._proofs.get(content)
        if proof is None or not proof.holds:
            self._tidy()
            proof = self._proofs[content] = self._try(artifact, content)
        return Proven(self._identity(content, proof), proof.rewritten, proof.operators)

    def identify(self, artifact: Artifact) -> Proven:
        """The same without a proof, and as it is: for models that are trusted.

        Raises:
            InvalidModel: It cannot be read.
        """
        content = self._content(artifact)
        external = sorted(external_files(load_model(artifact)))
        proof = _Proof(tuple((path, _sha256(path)) for path in external))
        return Proven(
            self._identity(content, proof), None, {"rewritten": False, "why": "it is not probed"}
        )

    def proofs(self) -> dict[str, dict[str, Any]]:
        """What has passed, as JSON, for a prover in another process to ``learn``."""
        return {
            content: {
                "external": [(str(path), checksum) for path, checksum in proof.external],
                "rewritten": None if proof.rewritten is None else str(proof.rewritten),
                "operators": dict(proof.operators),
            }
            for content, proof in self._proofs.items()
        }

    def learn(self, proofs: Mapping[str, Mapping[str, Any]]) -> None:
        """Trust what another prover of the same settings has tried."""
        for content, told in proofs.items():
            external = tuple((Path(path), checksum) for path, checksum in told["external"])
            rewritten = None if told["rewritten"] is None else Path(told["rewritten"])
            self._proofs.setdefault(content, _Proof(external, rewritten, told["operators"]))

    def _tidy(self) -> None:
        """Take away the rewritten models of what is not loaded any more."""
        in_use = self._in_use()
        if in_use is None:  # others are being loaded just now
            return
        for content, proof in list(self._proofs.items()):
            if proof.rewritten is not None and self._identity(content, proof) not in in_use:
                proof.rewritten.unlink(missing_ok=True)

    def _content(self, artifact: Artifact) -> str:
        """Of everything but external data: only a process that may crash asks for its names."""
        digest = hashlib.sha256(_sha256(artifact.model).encode())
        for name in COMPANIONS:
            path = artifact.companion(name)
            digest.update(f" {name} {path and _sha256(path)}".encode())
        return digest.hexdigest()

    def _identity(self, content: str, proof: _Proof) -> str:
        digest = hashlib.sha256(content.encode())
        for path, checksum in proof.external:
            digest.update(f" {path.name} {checksum}".encode())
        return digest.hexdigest()

    def _try(self, artifact: Artifact, content: str) -> _Proof:
        new = self._room(content) if self._rewrite else None
        told, operators = self._ask(artifact, new)
        external = tuple((Path(path), _sha256(Path(path))) for path in told["external"])
        rewritten = None
        if new is not None and operators["rewritten"] and new.is_file():
            rewritten = new.replace(new.with_suffix(".onnx"))
        elif new is not None:
            new.unlink(missing_ok=True)
        return _Proof(external, rewritten, operators)

    def _room(self, content: str) -> Path | None:
        """Where the child may write the rewritten model; None where nobody can write."""
        try:
            if self._folder is None:
                self._folder = Path(tempfile.mkdtemp(prefix="attnserve-"))
                weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
            self._folder.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            log.warning("no model is rewritten: no temporary folder: %s", error)
            return None
        return self._folder / f"{content}.new"

    def _ask(self, artifact: Artifact, new: Path | None) -> tuple[dict[str, Any], dict[str, Any]]:
        """What the child says of the model, and of its rewriting to ``new``.

        Raises:
            InvalidModel, InvalidArgument: See ``prove``.
        """
        name, asked = artifact.model, {
            "model": str(artifact.model),
            "shared": None if artifact.shared is None else str(artifact.shared),
            "provider": self._provider,
            "threads": self._threads,
            "rewrite": None if new is None else str(new),
        }  # fmt: skip
        try:
            done = subprocess.run(
                python("service.engine.isolation"),
                input=json.dumps(asked).encode(),
                capture_output=True,
                timeout=self._timeout_s,
                check=False,
                env=environment(),
            )
            code, said, errors = done.returncode, done.stdout, done.stderr
        except subprocess.TimeoutExpired as error:
            code, said, errors = None, error.stdout or b"", b""
        first, _, second = said.decode(errors="replace").partition("\n")
        told = _parsed(first)
        if told is None and code is None:
            raise InvalidModel(
                f"{name}: it did not load and run within {self._timeout_s:g} s",
                "raise --probe-timeout-s for a large model, else do not serve it",
            )
        if told is None and code is not None and code < 0:
            raise InvalidModel(f"{name}: it crashes ONNX Runtime (signal {-code})", FIX)
        if told is None:
            raise InvalidModel(
                f"{name}: the process that tried it ended with {code}:"
                f" {errors.decode(errors='replace').strip()[-300:]}",
                FIX,
            )
        if "error" in told:
            raise TOLD.get(told["error"], InvalidModel)(told["what"], told["fix"])
        if not self._rewrite:
            return told, dict(AS_IT_IS)
        why = "there is no folder for it"
        if new is not None:
            late = code is None or code == -getattr(signal, "SIGALRM", 0)
            why = "it took too long" if late else f"the process that tried it ended with {code}"
        return told, _parsed(second) or {"rewritten": False, "why": why}


def python(module: str) -> list[str]:
    """The command that runs a module of this installation, in ``environment``."""
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
        if name in PASSED or name.startswith((*PASSED_PREFIXES, *prefixes))
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


def _parsed(line: str) -> dict[str, Any] | None:
    """What the child says; None where it said nothing, or died in the middle of it."""
    try:
        told: Any = json.loads(line)
    except ValueError:
        return None
    return told if isinstance(told, dict) else None


def _answer(asked: dict[str, Any]) -> dict[str, Any]:
    """What the child says of a model."""
    try:
        artifact = _artifact(asked)
        model = Model(artifact, provider=asked["provider"], threads=asked["threads"])
        model.warm_up()
        external = sorted(external_files(load_model(artifact)))
    except AttnserveError as error:
        return {"error": type(error).__name__, "what": error.what, "fix": error.fix}
    return {"external": [str(path) for path in external]}


def _rewritten(asked: dict[str, Any]) -> dict[str, Any]:
    """What came of rewriting it: the file is there where "rewritten" is true."""
    from attnserve.planning.lossless import fuse_lossless

    try:
        artifact = _artifact(asked)
        if asked["provider"] != "cpu":
            return {"rewritten": False, "why": "its operators were only measured on CPUs"}
        size = weight_bytes(load_model(artifact))
        if size > MOST_BYTES:
            why = f"it holds {size / 1e9:.1f} GB of weights, more than {MOST_BYTES / 1e9:g}"
            return {"rewritten": False, "why": why}
        found = fuse_lossless(
            artifact, Path(asked["rewrite"]), provider=asked["provider"], threads=asked["threads"]
        )
    except AttnserveError as error:
        return {"rewritten": False, "why": error.what}
    except Exception as error:  # whatever it is, the model itself has run
        return {"rewritten": False, "why": f"{type(error).__name__}: {error}"}
    return {"rewritten": True, **asdict(found)}


def _artifact(asked: dict[str, Any]) -> Artifact:
    return open_artifact(Path(asked["model"]), asked["shared"] and Path(asked["shared"]))


def main() -> None:
    with suppress(OSError):  # where memory runs out, this process goes first and not the server
        Path("/proc/self/oom_score_adj").write_text("1000")
    with suppress(ImportError, ValueError):
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    asked = json.load(sys.stdin)
    answer = _answer(asked)
    print(json.dumps(answer), flush=True)
    if asked["rewrite"] is not None and "error" not in answer:
        if hasattr(signal, "alarm"):  # it ends this process, whatever the runtime is doing
            signal.alarm(REWRITE_S)
        print(json.dumps(_rewritten(asked)), flush=True)


if __name__ == "__main__":
    main()
