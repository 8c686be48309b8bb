"""A child process that loads a model and runs it once, before the server trusts it.

A graph is input of a stranger: it may crash the runtime, or never come back. It does so in the
child, whose death or silence becomes an error like any other. What has passed is remembered by
content, so that loading the same files again costs no more than reading them.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attnserve.artifact import Artifact, load_model, open_artifact, sha256
from attnserve.session import Provider, external_files
from graph_passes.errors import AttnserveError, InvalidArgument, InvalidModel, MissingExtra

__all__ = ["Prover", "environment", "python"]

COMPANIONS = ("tokenizer.json", "tokenizer_config.json", "attnserve.json", "config.json")
"""What decides, beside the model, how it is served."""

TOLD: dict[str, type[AttnserveError]] = {
    kind.__name__: kind for kind in (InvalidModel, InvalidArgument, MissingExtra)
}
"""Errors that the child may pass on as they are."""

FIX = "do not serve this file; if you made it, check it with onnx.checker.check_model"


@dataclass(frozen=True)
class _Proof:
    """What else a model was made of when it ran: the files of its external data."""

    external: tuple[tuple[Path, str], ...]


class Prover:
    """Tries models in a process of their own, each content once.

    Args:
        provider, threads: How they will be served.
        timeout_s: How long a model may take to load and run.
    """

    def __init__(self, *, provider: Provider, threads: int, timeout_s: float) -> None:
        self._provider, self._threads, self._timeout_s = provider, threads, timeout_s
        self._proofs: dict[str, _Proof] = {}

    def prove(self, artifact: Artifact) -> str:
        """A checksum of all that ``artifact`` is made of, once it has run in a child.

        Raises:
            InvalidModel: It cannot be loaded, crashes the runtime, or takes too long.
            InvalidArgument: The provider is not available here.
        """
        content = self._content(artifact)
        proof = self._proofs.get(content)
        if proof is None or any(_sha256(path) != known for path, known in proof.external):
            external = self._try(artifact)
            proof = _Proof(tuple((path, _sha256(path)) for path in external))
            self._proofs[content] = proof
        return self._identity(content, proof)

    def identify(self, artifact: Artifact) -> str:
        """The same checksum without a proof: for models that are trusted.

        Raises:
            InvalidModel: It cannot be read.
        """
        content = self._content(artifact)
        external = sorted(external_files(load_model(artifact)))
        return self._identity(content, _Proof(tuple((path, _sha256(path)) for path in external)))

    def proofs(self) -> dict[str, list[tuple[str, str]]]:
        """What has passed, for a prover in another process to ``learn``."""
        return {
            content: [(str(path), checksum) for path, checksum in proof.external]
            for content, proof in self._proofs.items()
        }

    def learn(self, proofs: Mapping[str, Sequence[tuple[str, str]]]) -> None:
        """Trust what another prover of the same settings has tried."""
        for content, external in proofs.items():
            found = tuple((Path(path), checksum) for path, checksum in external)
            self._proofs.setdefault(content, _Proof(found))

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

    def _try(self, artifact: Artifact) -> Sequence[Path]:
        asked = {
            "model": str(artifact.model),
            "shared": None if artifact.shared is None else str(artifact.shared),
            "provider": self._provider,
            "threads": self._threads,
        }
        name = artifact.model
        try:
            done = subprocess.run(
                python("service.probe"),
                input=json.dumps(asked),
                capture_output=True,
                text=True,
                errors="replace",
                timeout=self._timeout_s,
                check=False,
                env=environment(),
            )
        except subprocess.TimeoutExpired:
            raise InvalidModel(
                f"{name}: it did not load and run within {self._timeout_s:g} s",
                "raise --probe-timeout-s for a large model, else do not serve it",
            ) from None
        if done.returncode < 0:
            raise InvalidModel(f"{name}: it crashes ONNX Runtime (signal {-done.returncode})", FIX)
        try:
            told: dict[str, Any] = json.loads(done.stdout)
        except ValueError:
            raise InvalidModel(
                f"{name}: the process that tried it ended with {done.returncode}:"
                f" {done.stderr.strip()[-300:]}",
                FIX,
            ) from None
        if "error" in told:
            raise TOLD.get(told["error"], InvalidModel)(told["what"], told["fix"])
        return [Path(path) for path in told["external"]]


def python(module: str) -> list[str]:
    """The command that runs a module of this installation, in ``environment``."""
    return [sys.executable, "-P", "-m", module]


def environment() -> dict[str, str]:
    """Of a child: it finds this installation and nothing else, and is told no secret."""
    paths = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    kept = {k: v for k, v in os.environ.items() if not k.startswith("ATTNSERVE_")}
    return kept | {"PYTHONPATH": paths}


def _sha256(path: Path) -> str:
    try:
        return sha256(path)
    except OSError as error:
        raise InvalidModel(f"{path}: cannot be read: {error.strerror}", "check the path") from error


def _answer(asked: dict[str, Any]) -> dict[str, Any]:
    """What the child says of a model."""
    from service.model import Model

    shared = asked["shared"]
    try:
        artifact = open_artifact(Path(asked["model"]), shared and Path(shared))
        model = Model(artifact, provider=asked["provider"], threads=asked["threads"])
        model.warm_up()
        external = sorted(external_files(load_model(artifact)))
    except AttnserveError as error:
        return {"error": type(error).__name__, "what": error.what, "fix": error.fix}
    return {"external": [str(path) for path in external]}


def main() -> None:
    with suppress(OSError):  # where memory runs out, this process goes first and not the server
        Path("/proc/self/oom_score_adj").write_text("1000")
    with suppress(ImportError, ValueError):
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    print(json.dumps(_answer(json.load(sys.stdin))))


if __name__ == "__main__":
    main()
