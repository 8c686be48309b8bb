"""Evaluate a model folder on tasks of MTEB, and write the scores into its model card.

Source: Muennighoff et al. 2023, MTEB: Massive Text Embedding Benchmark. The package is an optional
dependency, and is imported on first use. Its objects are typed ``Any``.
"""

from __future__ import annotations

import warnings
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from attnserve.context import Progress, ignore_progress
from attnserve.integrations.sentence_transformers import load
from attnserve.models.artifact import COMPANIONS, Artifact, open_artifact
from attnserve.models.checksums import fingerprint, path_sha256, sha256
from attnserve.models.model_card import CARD, TaskScore, is_own_card, with_scores
from attnserve.models.outputs import check_folder, check_output, staged
from attnserve.options import Run
from attnserve.paths import StrPath, as_path
from attnserve.runtime.cache import digest
from graph_passes.errors import AttnserveError, InvalidArgument, InvalidData, MissingExtra

__all__ = ["MtebReport", "evaluate_mteb"]

FOLDER = "mteb"
"""The folder of results in a model folder, with a folder for each revision, as in MTEB."""


@dataclass(frozen=True)
class MtebReport:
    """The scores of the tasks.

    Attributes:
        scores: The score of each task, in the requested order.
        files: The result files in MTEB's format, in the same order.
        card: The model card with the scores; None if the folder has no card that may be changed.
    """

    scores: Sequence[TaskScore]
    files: Sequence[Path]
    card: Path | None

    def to_json(self) -> dict[str, Any]:
        return {
            "results": [
                {**asdict(score), "file": str(file)}
                for score, file in zip(self.scores, self.files, strict=True)
            ],
            "card": self.card and str(self.card),
        }


def evaluate_mteb(
    model: StrPath,
    tasks: str | Sequence[str],
    *,
    data: StrPath | None = None,
    output: StrPath | None = None,
    run: Run = Run(),
    batch_size: int = 32,
    force: bool = False,
    progress: Progress | None = None,
) -> MtebReport:
    """Score a model on tasks of MTEB, and write the results of each task as JSON.

    ``integrations.sentence_transformers.load`` loads the model. The results of a task are written
    when it ends: they stay if a later task fails.

    Args:
        model: An artifact folder or .onnx file that sentence-transformers can load.
        tasks: Names of tasks.
        data: A folder with the data sets of the tasks, each in a folder with the name that it has
            on the Hugging Face hub, with or without the owner. By default, MTEB takes them from the
            cache or downloads them.
        output: The folder of the results. The default is ``mteb/REVISION`` in the model's folder
            (the revision is a checksum of the model, its tokenizer and its settings); the model
            card then gets a table.
        run: Provider, threads and runtime.
        batch_size: Texts per batch.
        force: Replace existing results.
        progress: Called with (stage, tasks done, tasks in total).

    Raises:
        MissingExtra: mteb or sentence-transformers is not installed.
        InvalidArgument: A task is unknown, or combines others.
        InvalidModel: sentence-transformers cannot load the model.
        InvalidData: The data of a task is not found, or the task does not fit the model.
        InvalidOutput: A result exists already, or cannot be written.
    """
    library = _import_library()
    artifact = open_artifact(model)
    names = list(dict.fromkeys([tasks] if isinstance(tasks, str) else tasks))
    loaded = [_task(library, name, as_path(data)) for name in names]
    root = artifact.folder if output is None else Path(output)
    folder = root / FOLDER / _revision(artifact)[:12] if output is None else root
    check_folder(folder)
    files = [folder / f"{task.metadata.name}.json" for task in loaded]
    for file in files:
        check_output(file, force=force)
    card = root / CARD
    has_card = output is None and artifact.model.name == "model.onnx" and card.is_file()
    has_card = has_card and is_own_card(card)
    scores = _earlier(library, folder) if has_card else {}
    device = run.device
    encoder = load(
        artifact.model, runtime=device.runtime, provider=device.provider, threads=device.threads
    )
    stage = run.context(progress or ignore_progress).stage("mteb")
    for index, (task, file) in enumerate(zip(loaded, files, strict=True)):
        result = _evaluate(library, encoder, task, batch_size)
        scores[task.metadata.name] = _score(task, result)
        with staged(root) as temporary:
            path = temporary / file.relative_to(root)
            path.parent.mkdir(parents=True, exist_ok=True)
            result.to_disk(path)
            if has_card:
                text = with_scores(card.read_text(encoding="utf-8"), [*scores.values()])
                (temporary / CARD).write_text(text, encoding="utf-8")
        stage(index + 1, len(loaded))
    found = [scores[task.metadata.name] for task in loaded]
    return MtebReport(found, files, card if has_card else None)


def _revision(artifact: Artifact) -> str:
    """A checksum of what the scores depend on: the model, its companion files and its settings."""
    paths = {name: artifact.companion(name) for name in COMPANIONS}
    files = {name: sha256(path) for name, path in paths.items() if path is not None}
    # The origin of the model has no effect.
    settings = artifact.record.to_json("lineage", "versions", "max_abs_error", "source", "others")
    return digest([fingerprint(artifact), files, settings])


def _import_library() -> Any:
    """The package mteb.

    Raises:
        MissingExtra: The package is not installed.
    """
    try:
        return import_module("mteb")
    except ImportError as error:
        raise MissingExtra(
            f"mteb cannot be imported: {error}",
            "pip install 'attnserve[mteb]'",
            code="extra.mteb",
        ) from error


def _task(library: Any, name: str, data: Path | None) -> Any:
    """A task with its data.

    Raises:
        InvalidArgument: The task does not exist, or combines others.
        InvalidData: The data of the task is not found, or cannot be read.
    """
    try:
        task = library.get_task(name)
    except KeyError as error:
        raise InvalidArgument(
            f"`mteb` is {name!r}, which is not a task of mteb {library.__version__}:"
            f" {error.args[0]}",
            "choose one of https://docs.mteb.org/overview/available_tasks",
            code="mteb.unknown_task",
        ) from error
    metadata = task.metadata
    repository = metadata.dataset.get("path")
    if repository is None or hasattr(metadata, "tasks"):
        raise InvalidArgument(
            f"`mteb` is {name}, which combines other tasks",
            "name these tasks",
            code="mteb.combined_task",
        )
    if data is not None:
        folders = data / repository, data / repository.rpartition("/")[2]
        folder = next((path for path in folders if path.is_dir()), None)
        if folder is None:
            raise InvalidData(
                f"{data}: expected the data of {name} in a folder {repository}",
                _how_to_download(repository),
                code="mteb.no_folder",
            )
        # The files may differ from the revision on the hub.
        dataset = {"path": str(folder), "revision": f"sha256:{path_sha256(folder)}"}
        task.metadata = metadata.model_copy(update={"dataset": {**metadata.dataset, **dataset}})
    try:
        with _no_notes():
            task.load_data()
    except Exception as error:  # other packages may raise anything
        raise InvalidData(
            f"the data of {name} cannot be loaded: {type(error).__name__}: {str(error)[:200]}",
            _how_to_download(repository),
            code="mteb.data",
        ) from error
    return task


def _how_to_download(repository: str) -> str:
    return (
        f"`hf download {repository} --repo-type dataset --local-dir DATA/{repository}`, then give"
        " DATA as `data`"
    )


@contextmanager
def _no_notes() -> Generator[None]:
    """Hide warnings for developers, about the use of other packages by mteb."""
    with warnings.catch_warnings():
        for category in (FutureWarning, DeprecationWarning):
            warnings.simplefilter("ignore", category)
        yield


def _evaluate(library: Any, encoder: Any, task: Any, batch_size: int) -> Any:
    """The result of a task.

    Raises:
        InvalidData: The task cannot be evaluated, for example because it is not for rerankers.
    """
    options = {"batch_size": batch_size, "show_progress_bar": False}
    try:
        with _no_notes():
            (result,) = library.evaluate(
                encoder,
                task,
                cache=None,
                co2_tracker=False,
                encode_kwargs=options,
                show_progress_bar=False,
            ).task_results
    except AttnserveError:
        raise
    except Exception as error:  # other packages may raise anything
        raise InvalidData(
            f"{task.metadata.name}: {type(error).__name__}: {str(error)[:200]}",
            "choose a task for models of this kind, and data in its layout",
            code="mteb.failed",
        ) from error
    return result


def _score(task: Any, result: Any) -> TaskScore:
    return TaskScore(
        task=result.task_name,
        metric=task.metadata.main_score,
        value=float(result.get_score()),
        splits=tuple(result.scores),
        revision=result.dataset_revision,
        mteb=result.mteb_version,
    )


def _earlier(library: Any, folder: Path) -> dict[str, TaskScore]:
    """The scores of a folder of results by task.

    Raises:
        InvalidData: A file is not a result of a known task.
    """
    scores: dict[str, TaskScore] = {}
    for path in sorted(folder.glob("*.json")):
        try:
            result = library.TaskResult.from_disk(path)
            scores[result.task_name] = _score(library.get_task(result.task_name), result)
        except Exception as error:  # other packages may raise anything
            raise InvalidData(
                f"{path}: not a result of MTEB: {type(error).__name__}",
                "remove the file, or give another `output`",
                code="mteb.result",
            ) from error
    return scores
