"""Write results atomically; nothing is overwritten without ``force``."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from time import sleep, time
from typing import Literal

import onnx_ir as ir

from attnserve.models.artifact import (
    HUB_FOLDER,
    Artifact,
    companions_to_copy,
    copy_companions,
)
from attnserve.models.checksums import sha256
from attnserve.models.library_files import LIBRARY_FILES, library_model, write_library_files
from attnserve.models.lineage import LineageEntry
from attnserve.models.model_card import CARD, is_own_card, model_card
from attnserve.models.onnx_files import data_file, save_model
from attnserve.models.provenance import state_provenance
from attnserve.models.record import (
    RECORD,
    merged_record,
    parse_record,
    write_record,
)
from attnserve.runtime.external_data import external_files
from attnserve.runtime.locks import open_folder, try_lock
from attnserve.runtime.openvino_runtime import require_openvino
from attnserve.runtime.openvino_writer import write_openvino
from attnserve.runtime.signals import signals_delayed
from graph_passes.errors import InvalidArgument, InvalidModel, InvalidOutput

__all__ = [
    "check_folder",
    "check_openvino",
    "check_output",
    "default_output",
    "output_file",
    "remove_earlier_files",
    "staged",
    "staging_folder",
    "write_for_libraries",
    "write_rewritten",
]

PREFIX = ".attnserve-"
"""Prefix of the names of temporary folders beside an output."""

ABANDONED_S = 60.0
"""Age in seconds below which a folder without a lock may belong to a process that is starting."""

LOCK_POLL_S = 0.05

log = logging.getLogger(__name__)

OPENVINO_FILE = "openvino/openvino_model.xml"
"""Where Optimum Intel and sentence-transformers look for a model; its weights are in a .bin."""


def output_file(output: Path, artifact: Artifact, model: ir.Model, *, force: bool = False) -> Path:
    """Return the .onnx file to write for ``output``, after checks that nothing is overwritten.

    Args:
        output: An .onnx file, or a folder for model.onnx.
        artifact, model: The input, whose files are never overwritten.
        force: Replace other existing files.

    Raises:
        InvalidOutput: ``output`` is a file of the input, exists, or cannot be written.
        InvalidModel: A companion file is a link out of its folder, or is not valid.
    """
    is_file = output.suffix.lower() == ".onnx" and not output.is_dir()
    file = output if is_file else output / "model.onnx"
    # A model above the folder onnx would hide the one in it.
    above = artifact.companion_folder if artifact.folder.name == HUB_FOLDER else None
    if above is not None and _same(file.parent, above):
        raise _is_the_input(file.parent)
    if not is_file and _same(output, artifact.folder):
        raise _is_the_input(output)
    for path in (artifact.model, *external_files(model)):
        for written in (file, data_file(file)):
            if _same(written, path):
                raise _is_the_input(written)
    check_output(file, force=force)
    check_output(data_file(file), force=force)
    if _gets_library_files(file, artifact):
        library_model(artifact, model)  # an error of its files comes before the work
        for name in (*LIBRARY_FILES, OPENVINO_FILE):
            check_output(file.parent / name, force=force)
    if not _same(file.parent, artifact.folder):
        for name, companion in companions_to_copy(artifact).items():
            existing_file = file.parent / name
            if not (
                existing_file.is_file() and companion.read_bytes() == existing_file.read_bytes()
            ):
                check_output(existing_file, force=force)
    record = file.with_name(RECORD)
    # A folder with model.onnx and a record is one artifact; a second model must not be added.
    is_artifact = artifact.model.name == "model.onnx" and _same(file.parent, artifact.folder)
    if record.exists() and (is_artifact or parse_record(record).describes(file.parent) is None):
        check_output(record, force=force)
    return file


def check_openvino(file: Path, artifact: Artifact, model: ir.Model) -> None:
    """Check that an OpenVINO file can be written beside a model.

    Raises:
        InvalidArgument: The output is not a folder of its own, or sentence-transformers cannot load
            the model.
        MissingExtra: OpenVINO is not installed.
    """
    if not _gets_library_files(file, artifact):
        raise InvalidArgument(
            f"`openvino` is set, and `output` is {file}: expected a folder for model.onnx",
            "choose a folder of its own as `output`",
            code="openvino.no_folder",
        )
    if library_model(artifact, model) is None:
        raise InvalidArgument(
            f"`openvino` is set, but sentence-transformers cannot load {artifact.name}: expected"
            " config.json, tokenizer.json, and a graph from tokens to embeddings or scores",
            "leave it out",
            code="openvino.not_loadable",
        )
    require_openvino()


def default_output(model: Path, kind: Literal["optimized", "analysis", "plan"]) -> Path:
    """The default output path of a command, in the parent folder of ``model``.

    For ``minilm.onnx`` and the folder ``minilm`` these are the folders ``minilm-optimized`` and
    ``minilm-analysis``, and the file ``plan.json``.
    """
    if model.name in ("", ".."):  # ".", "a/.."
        model = model.resolve()
    if kind == "plan":
        return model.parent / "plan.json"
    name = model.name if model.is_dir() else model.stem
    return model.parent / f"{name}-{kind}"


def check_output(path: Path, *, source: Path | None = None, force: bool = False) -> None:
    """Check that an output can be written and overwrites nothing.

    Raises:
        InvalidOutput: The output is the input, exists (without ``force``), or cannot be written.
    """
    if source is not None and _same(path, source):
        raise _is_the_input(path)
    if path.exists() and not force and not (path.is_dir() and not any(path.iterdir())):
        raise InvalidOutput(
            f"{path}: the output exists already",
            "choose another `output`, or set `force`",
            code="output.exists",
        )
    parent = path.parent
    while not parent.exists():
        parent = parent.parent
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise InvalidOutput(
            f"{path}: {parent} is not a writable folder",
            "choose another `output`",
            code="output.not_writable",
        )


def check_folder(output: Path) -> None:
    """Check that an output is not a file.

    Raises:
        InvalidOutput: The output is a file.
    """
    if output.exists() and not output.is_dir():
        raise InvalidOutput(
            f"{output}: expected a folder, it is a file",
            "choose another `output`",
            code="output.not_folder",
        )


@contextmanager
def staged(folder: Path, finish: Callable[[Path], None] = lambda _: None) -> Generator[Path]:
    """Yield a temporary folder whose files are moved to ``folder`` when the context succeeds.

    After a failure nothing is moved, and folders that were created are removed. The content of the
    files is on disk before they appear.

    Args:
        finish: Writes files that depend on those in ``folder``; no other process moves files into
            ``folder`` between this call and the move.

    Raises:
        InvalidOutput: ``folder`` cannot be created or written.
    """
    try:
        with ExitStack() as opened:
            try:
                stage = opened.enter_context(staging_folder(folder))
            except OSError as error:
                raise _not_writable(folder, "cannot be written", error) from error
            yield stage
            try:
                with _locked(folder):
                    finish(stage)
                    _move(stage, folder)
            except OSError as error:
                raise _not_writable(folder, "writing failed", error) from error
    except OSError as error:  # raised inside the context, for example by a full disk
        raise InvalidOutput(
            f"{folder}: writing failed: {error.strerror or error}",
            "check the path and the free space, or choose another `output`",
            code="output.write_failed",
        ) from error


def _not_writable(folder: Path, what: str, error: OSError) -> InvalidOutput:
    return InvalidOutput(
        f"{folder}: {what}: {error.strerror}",
        "choose another `output`",
        code="output.not_writable",
    )


@contextmanager
def staging_folder(parent: Path) -> Generator[Path]:
    """Yield a new folder in ``parent``, which is created, and delete it afterwards.

    Created folders that stay empty are deleted too. If this process is killed, a later one deletes
    the new folder.
    """
    new_folders = [path for path in (parent, *parent.parents) if not path.exists()]
    try:
        parent.mkdir(parents=True, exist_ok=True)
        _delete_abandoned(parent)
        folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        try:
            with open_folder(folder) as descriptor:
                try_lock(descriptor)
                yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        with suppress(OSError):  # folders that are not empty stay
            for path in new_folders:  # innermost first
                path.rmdir()


def _move(stage: Path, folder: Path) -> None:
    """Move the files of ``stage`` to ``folder``; a signal is handled before or after all moves.

    The model is moved last, so that its companion files exist when it appears.
    """
    files = [path for path in stage.rglob("*") if path.is_file()]
    files = sorted(files, key=lambda path: (path.suffix == ".onnx", path))
    for path in files:  # before the first move, because it may take long
        _flush(path)
    places = [folder / path.relative_to(stage) for path in files]
    with signals_delayed():
        for place in places:  # before the first move, because one may fail
            place.parent.mkdir(exist_ok=True, parents=True)
        for path, place in zip(files, places, strict=True):
            path.replace(place)
        for parent in {place.parent for place in places}:
            _flush(parent)


@contextmanager
def _locked(folder: Path) -> Generator[None]:
    """Lock ``folder`` against the moves of other processes, where the system can."""
    with open_folder(folder) as descriptor:
        while not try_lock(descriptor):
            sleep(LOCK_POLL_S)
        yield


def _delete_abandoned(folder: Path) -> None:
    """Delete the temporary folders of processes that were killed: no process locks them."""
    for path in folder.glob(f"{PREFIX}*"):
        with suppress(OSError), open_folder(path) as descriptor:
            is_new = time() - path.stat().st_mtime < ABANDONED_S
            if not is_new and try_lock(descriptor, without_locks=False):
                shutil.rmtree(path, ignore_errors=True)


def _flush(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on disk."""
    if os.name != "posix":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_rewritten(
    file: Path,
    model: ir.Model,
    source: Artifact,
    entry: LineageEntry,
    *,
    external: bool,
    openvino: ir.Model | None = None,
) -> None:
    """Write a model that was made from ``source``, its record and companion files, atomically.

    A folder with model.onnx is written for sentence-transformers too, unless it is the folder of
    the source, whose files are kept.

    Args:
        entry: Added to the lineage of the source.
        external: Write the weights to a file beside the model.
        openvino: The graph of the OpenVINO file, if one is written.

    Raises:
        InvalidOutput: The folder cannot be written.
        InvalidModel: OpenVINO refuses the graph.
    """
    state_provenance(model, parent=(entry.rewritten or entry.source).sha256, entry=entry)
    record = source.record.model_copy(
        update={"format": 1, "files": {}, "lineage": (*source.lineage, entry)}
    )

    def finish(stage: Path) -> None:
        files = {
            p.name: sha256(p)
            for p in sorted(stage.iterdir())
            if p.is_file() and p.suffix not in (".json", ".md")
        }
        complete = record.model_copy(update={"files": files})
        write_record(stage, merged_record(file, complete))
        if _gets_library_files(file, source):
            remove_earlier_files(stage, file.parent)

    with staged(file.parent, finish) as stage:
        save_model(model, stage / file.name, external=external)
        copy_companions(source, stage)
        if _gets_library_files(file, source):
            artifact = Artifact(stage / file.name, record)
            write_for_libraries(artifact, model, stage, file.parent, openvino=openvino)


def write_for_libraries(
    artifact: Artifact,
    model: ir.Model,
    stage: Path,
    folder: Path,
    *,
    openvino: ir.Model | None = None,
) -> None:
    """Write the files for other libraries and people: settings, model card and OpenVINO file.

    Args:
        artifact: The model in ``stage``.
        folder: The folder that ``stage`` is moved to. A README.md of the user there is kept.
        openvino: The graph of the OpenVINO file, if one is written; ``model`` if OpenVINO refuses
            it.

    Raises:
        InvalidModel: OpenVINO refuses both.
    """
    view = library_model(artifact, model)
    if view is not None:
        write_library_files(view, stage)
    file = stage / OPENVINO_FILE
    if openvino is not None and view is not None:
        file.parent.mkdir()
        write = partial(
            write_openvino,
            path=file,
            output=view.output,
            name=view.output_name,
            is_repeated=view.repeats_vector,
        )
        try:
            write(openvino)
        except InvalidModel as error:  # of a fused operator that this release lacks
            log.warning("the OpenVINO file has no fused operators: %s", error.what)
            write(model)
    if is_own_card(folder / CARD):
        text = model_card(artifact, view, has_openvino=file.is_file())
        (stage / CARD).write_text(text, encoding="utf-8")


def remove_earlier_files(stage: Path, folder: Path) -> None:
    """Remove files for other libraries that describe an earlier model, if none follow them."""
    openvino = (OPENVINO_FILE, OPENVINO_FILE.replace(".xml", ".bin"))
    for name in (*LIBRARY_FILES, *openvino):
        if not (stage / name).exists():
            (folder / name).unlink(missing_ok=True)


def _gets_library_files(file: Path, source: Artifact) -> bool:
    """Whether the files of other libraries are written beside a model.

    They describe the one model of a folder. In the folder of the source, they are the user's.
    """
    is_own = any(_same(file.parent, folder) for folder in source.folders)
    return file.name == "model.onnx" and not is_own


def _same(path: Path, other: Path) -> bool:
    """Whether two paths are the same file, also through links or different case."""
    if path.exists() and other.exists():
        return path.samefile(other)
    return path.resolve() == other.resolve()


def _is_the_input(path: Path) -> InvalidOutput:
    return InvalidOutput(
        f"{path}: the output is the input model",
        "choose another `output`",
        code="output.is_input",
    )
