"""Load an untrusted model whose files may change during loading."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass

from attnserve.models.artifact import Artifact
from attnserve.models.checksums import check_checksums
from attnserve.serving.check_result import CheckResult
from attnserve.serving.loaded_model import Model
from graph_passes.errors import AttnserveError, InvalidModel

__all__ = ["CheckedModel", "load_checked"]


@dataclass(frozen=True)
class CheckedModel:
    """A model that was checked, loaded and warmed up, with the result of its load check.

    Attributes:
        identity: A checksum of all files of the model.
        fusion: The result of the fusion in the background: load the model again if it has fused
            operators. None if no fusion runs.
    """

    identity: str
    model: Model
    fusion: Future[CheckResult] | None


def load_checked(
    artifact: Artifact,
    check: Callable[[Artifact], CheckResult],
    open_model: Callable[..., Model],
    is_served: Callable[[CheckResult], bool],
) -> CheckedModel | None:
    """Run the load check of a model, load it, and warm it up.

    Args:
        check: ``LoadChecker.check``, or ``identify`` for a trusted model.
        open_model: ``Model`` with all options except ``graph``, ``operators`` and ``facts``.
        is_served: Returns whether a checked model is loaded already.

    Returns:
        The model; None if it is loaded already.

    Raises:
        InvalidModel: The model cannot be loaded, or changed during loading.
    """
    file_states = _file_states(artifact)
    check_checksums(artifact)
    checked = check(artifact)
    if is_served(checked):
        return None
    model = _open(artifact, checked, open_model)
    if _file_states(artifact) != file_states or not checked.external_is_current:
        model.close()
        raise InvalidModel(f"{artifact.model}: changed while it was being loaded", "load it again")
    return CheckedModel(checked.identity, model, checked.fusion)


def _open(artifact: Artifact, checked: CheckResult, open_model: Callable[..., Model]) -> Model:
    """Load and warm up the fused model; if that fails, the original.

    Raises:
        AttnserveError: The original cannot be loaded.
    """
    try:
        model = open_model(
            artifact,
            graph=checked.fused_file,
            operators=checked.operators,
            facts=checked.running_facts,
        )
        model.warm_up()
        model.prepare_batches()
    except AttnserveError as error:
        if checked.fused_file is None:
            raise
        # For example a deleted file, or no memory.
        return _open(artifact, checked.unfused(error.what), open_model)
    return model


def _file_states(artifact: Artifact) -> tuple[object, ...]:
    """Inodes, sizes and times of the model's files, to detect changes without reading them."""
    states: list[object] = []
    with suppress(OSError):
        for path in sorted(artifact.folder.iterdir()):
            if path.suffix in (".onnx", ".data", ".json") or path.name.startswith(
                artifact.model.name
            ):
                info = path.stat()
                states.append((path.name, info.st_ino, info.st_size, info.st_mtime_ns))
    return tuple(states)
