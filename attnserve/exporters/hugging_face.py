"""Export a Hugging Face model to an artifact: model.onnx, tokenizer files and attnserve.json.

The graph is compared with PyTorch at two shapes before the artifact is written. Code of the model
repository is never run.

torch and transformers are optional dependencies (extra ``[torch]``) and are imported on first use.
Their objects are typed ``Any``.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from attnserve.exporters.heads import (
    chat_template_of_pairs,
    embedding_head,
    first_line,
    pair_template,
    scorer,
    token_score,
)
from attnserve.exporters.torch_graph import (
    PositionalModule,
    compare,
    positional_module,
    random_feeds,
    trace,
)
from attnserve.exporters.transformers_model import (
    SCORING,
    TASKS,
    Task,
    find_folder,
    load_network,
    position_limit,
    quiet,
    require_torch,
    weights_sha256,
)
from attnserve.fusion import fused_for_libraries
from attnserve.literals import Attention, Exporter, Pooling
from attnserve.models.artifact import COMPANIONS, Artifact
from attnserve.models.folder_settings import FolderSettings, given, read_settings
from attnserve.models.onnx_files import save_model
from attnserve.models.outputs import (
    check_output,
    remove_earlier_files,
    staged,
    write_for_libraries,
)
from attnserve.models.provenance import state_provenance
from attnserve.models.record import Record, write_record
from attnserve.models.tokenizer_files import UNBOUNDED, lower_case
from attnserve.options import check_seed
from attnserve.paths import StrPath
from attnserve.runtime.openvino_runtime import require_openvino
from attnserve.versions import package_versions
from graph_passes.errors import AttnserveError, InvalidArgument, InvalidModel

__all__ = ["ExportReport", "export"]

log = logging.getLogger(__name__)

OPSETS = {"dynamo": range(18, 24), "torchscript": range(14, 21)}
"""Opsets that each exporter writes without a conversion of the graph."""

PACKAGES = ("attnserve", "torch", "transformers", "onnx-ir", "onnxruntime")
"""Packages whose versions a record states."""

DEFAULT_OPSET = {"dynamo": 18, "torchscript": 17}
"""The opset of each exporter by default."""

NO_EMBEDDING = {"pooling": "none", "normalize": False}
"""The fields of the record of a graph whose outputs are not embeddings of tokens."""

NEW_TOKENIZER_CLASS = '"tokenizer_class": "TokenizersBackend"'
TOKENIZER_CLASS = '"tokenizer_class": "PreTrainedTokenizerFast"'
"""A class as transformers 5 writes it into tokenizer_config.json, and the name that version 4 and
optimum-onnx know too."""


@dataclass(frozen=True)
class ExportReport:
    """The result of an export.

    Attributes:
        path: The written model.onnx.
        record: The record of the model: the options of the export, and the settings of texts and
            outputs.
        inputs: The names of the inputs.
        outputs: The names of the outputs.
        relative_error: ``max_abs_error`` of the record relative to the largest output.
        seconds: The duration of the export.
    """

    path: Path
    record: Record
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    relative_error: float
    seconds: float

    @property
    def pooling(self) -> Pooling | None:
        """The pooling of hidden states after the graph."""
        return self.record.pooling

    @property
    def normalize(self) -> bool | None:
        """Whether embeddings are normalized after the graph."""
        return self.record.normalize

    @property
    def max_length(self) -> int | None:
        """Maximum tokens of a text; None for no limit."""
        return self.record.max_length

    @property
    def max_abs_error(self) -> float | None:
        """The largest difference between ONNX Runtime and PyTorch, without padding."""
        return self.record.max_abs_error

    def to_json(self) -> dict[str, Any]:
        """The fields, and those of the record, for the output of the command."""
        fields = ("inputs", "outputs", "relative_error", "seconds")
        return {
            "path": str(self.path),
            "activation": None,
            "template": None,
            **self.record.to_json("source", "versions"),
            **{name: getattr(self, name) for name in fields},
        }


def export(
    model: StrPath,
    folder: StrPath,
    *,
    task: str | None = None,
    exporter: Exporter = "dynamo",
    opset: int | None = None,
    attention: Attention = "sdpa",
    dimensions: int | None = None,
    openvino: bool = False,
    seed: int = 0,
    force: bool = False,
) -> ExportReport:
    """Export a Hugging Face model with dynamic axes "batch" and "sequence".

    The settings of sentence-transformers are read from the model's folder (``read_settings``).
    Modules other than one pooling and a normalization become part of the graph, which then contains
    the pooling too.

    Args:
        model: A folder with config.json, weights and tokenizer, or an id on the Hugging Face hub.
        folder: The folder for model.onnx, the tokenizer files and attnserve.json.
        task: One of ``TASKS``; None is "feature-extraction" (output last_hidden_state). "rerank"
            is a classifier of pairs with one logit, or a language model that answers yes or no.
        exporter: "dynamo" (torch.export) or "torchscript" (tracing).
        opset: Opset of ai.onnx; by default 18 for dynamo and 17 for torchscript.
        attention: Attention implementation of transformers; each gives a different graph.
        dimensions: Keep only this many dimensions of an embedding, for models that were trained
            for it (Matryoshka); None for the number in the model's files.
        openvino: Write openvino/openvino_model.xml too, which sentence-transformers loads without
            attnserve.
        seed: Seed of the inputs that trace the model and compare it with PyTorch.
        force: Write into a folder that is not empty.

    Raises:
        InvalidArgument: An argument is invalid, or the type of model is not supported.
        InvalidModel: The model cannot be found, loaded or traced.
        InvalidOutput: ``folder`` exists, is the model's folder, or cannot be written.
        MissingExtra: torch or transformers is not installed.
        CheckFailed: ONNX Runtime and PyTorch disagree; nothing is written.
    """
    start = time.perf_counter()
    model, folder = os.fspath(model), Path(folder)
    task = task or "feature-extraction"
    opset = DEFAULT_OPSET.get(exporter, 0) if opset is None else opset
    check_seed(seed)
    _check_options(task, exporter, opset, attention, dimensions)
    check_output(folder, source=Path(model), force=force)
    loaded = _load(model, task, attention, openvino=openvino)
    if task == "feature-extraction":
        wrapped, fields = _embeddings(loaded, dimensions)
    elif loaded.kind is SCORING:
        wrapped, fields = _pair_scores(loaded)
    else:
        wrapped, fields = _logits(loaded)
    tokenizer = loaded.tokenizer
    limit = position_limit(loaded.network)
    max_length = _max_length(loaded.settings, tokenizer, limit)
    limit = limit and max(limit, max_length or 0)
    example, *feeds = random_feeds(wrapped, tokenizer, limit, seed)
    finish = partial(remove_earlier_files, folder=folder)
    with staged(folder, finish) as stage, tempfile.TemporaryDirectory(dir=stage) as temporary:
        scratch = Path(temporary)
        with _exporter_errors(model, exporter, opset):
            graph = trace(wrapped, example, exporter, opset, limit, scratch)
        state_provenance(graph, parent=weights_sha256(loaded.source))
        save_model(graph, stage / "model.onnx")
        _copy_companions(tokenizer, loaded.source, stage, scratch)
        absolute, relative = compare(wrapped, stage / "model.onnx", feeds)
        record = Record.model_validate(
            {
                **loaded.settings.stated_of_text(),
                **fields,
                "max_length": max_length,
                "task": task,
                "exporter": exporter,
                "opset": opset,
                "attention": attention,
                "max_abs_error": absolute,
                "source": str(Path(model).absolute()) if Path(model).is_dir() else model,
                "versions": package_versions(PACKAGES),
            }
        )
        write_record(stage, record)
        written = Artifact(stage / "model.onnx", record)
        fused = fused_for_libraries(graph) if openvino else None
        write_for_libraries(written, graph, stage, folder, openvino=fused)
    seconds = time.perf_counter() - start
    return ExportReport(
        folder / "model.onnx", record, wrapped.inputs, wrapped.task.outputs, relative, seconds
    )


@dataclass(frozen=True)
class _Loaded:
    """A model in PyTorch.

    Attributes:
        name: The folder or the id of the model.
        source: The folder of the network.
        task: The requested task.
        kind: The class of the network, and its outputs.
        settings: The settings of sentence-transformers.
        torch: The package.
        network: The module of transformers.
        tokenizer: The tokenizer of transformers.
    """

    name: str
    source: Path
    task: str
    kind: Task
    settings: FolderSettings
    torch: Any
    network: Any
    tokenizer: Any


def _load(name: str, task: str, attention: Attention, *, openvino: bool) -> _Loaded:
    """Find a model, and load it for a task.

    Raises:
        InvalidArgument: The type of model is not supported, or ``openvino`` does not fit it.
        InvalidModel: The model cannot be found or loaded.
        MissingExtra: A package is not installed.
    """
    torch, transformers = require_torch()
    folder = find_folder(name)
    settings = read_settings(folder)
    source = folder / settings.network.path
    if settings.is_sparse_encoder:
        _check_sparse_task(settings, task)
    is_scoring = task == "rerank" and settings.is_language_model
    if openvino:
        _check_openvino(task, is_scoring=is_scoring)
    kind = SCORING if is_scoring else TASKS[task]
    network, tokenizer = load_network(transformers, source, kind, attention)
    if settings.transformer.do_lower_case:  # also for programs that read tokenizer.json alone
        lower_case(tokenizer.backend_tokenizer)
    return _Loaded(name, source, task, kind, settings, torch, network, tokenizer)


@contextmanager
def _exporter_errors(model: str, exporter: Exporter, opset: int) -> Generator[None]:
    """Raise errors of PyTorch's exporters, which have many types, as ``InvalidModel``."""
    try:
        yield
    except AttnserveError:
        raise
    except Exception as error:
        raise InvalidModel(
            f"{model}: the {exporter} exporter failed at opset {opset}: {first_line(error)}",
            "try the other `exporter`, eager `attention`, or another `opset`",
            code="export.failed",
        ) from error


_Wrapped = tuple[PositionalModule, Mapping[str, Any]]
"""A module, and the fields of the record that turn its outputs into embeddings or scores."""


def _embeddings(loaded: _Loaded, dimensions: int | None) -> _Wrapped:
    """Hidden states, or embeddings if pooling and normalization cannot express the modules.

    Raises:
        InvalidModel: The weights of a module have other sizes, or the model scores pairs.
        InvalidArgument: ``dimensions`` is more than the size of the embeddings.
    """
    settings = loaded.settings
    if settings.is_cross_encoder:
        raise InvalidModel(
            f"{settings.folder}: the model is a CrossEncoder, which has no embeddings",
            "set `task` to rerank, or to sequence-classification for several classes",
            code="export.cross_encoder",
        )
    embedding = settings.embedding | given(dimensions=dimensions)
    kind, head = loaded.kind, None
    width = loaded.network.config.hidden_size
    if settings.head:
        head = embedding_head(loaded.torch, settings.head)
        kind = Task(kind.auto_class, ("sentence_embedding",), per_token=False)
        width = _head_width(loaded.torch, head, width, loaded.source)
    if (kept := embedding.get("dimensions", 0)) > width:
        raise InvalidArgument(
            f"`dimensions` is {kept}: expected at most {width}, the size of the embeddings",
            "reduce it",
            code="export.dimensions",
        )
    if settings.infers_messages and loaded.tokenizer.chat_template:
        log.warning(
            "%s: texts are read as they are; sentence-transformers writes them by the chat"
            " template, as the folder has no modules.json",
            loaded.name,
        )
    wrapped = positional_module(loaded.torch, loaded.network, loaded.tokenizer, kind, head)
    return wrapped, embedding


def _logits(loaded: _Loaded) -> _Wrapped:
    """The outputs of a network with the head of a task.

    Raises:
        InvalidArgument: A reranker has several classes.
        InvalidModel: The settings state a chat template, which does not apply to pairs.
    """
    settings, task = loaded.settings, loaded.task
    wrapped = positional_module(loaded.torch, loaded.network, loaded.tokenizer, loaded.kind)
    if settings.is_sparse_encoder:
        return wrapped, settings.sparse_vectors
    if task not in ("rerank", "sequence-classification"):
        return wrapped, NO_EMBEDDING
    classes = loaded.network.config.num_labels
    if task == "rerank" and classes != 1:
        raise InvalidArgument(
            f"{loaded.name}: the model has {classes} classes: a reranker has one score",
            "set `task` to sequence-classification",
            code="export.not_reranker",
        )
    fields = given(activation=settings.activation(classes, of_problem=task != "rerank"))
    template = None
    if task == "rerank" and (settings.states_messages or settings.infers_messages):
        template = chat_template_of_pairs(settings, loaded.tokenizer)
    if template is None and settings.states_messages:
        raise InvalidModel(
            f"{settings.folder}: modality_config states a chat template, which writes no pair of a"
            " query and a document",
            "set `task` to rerank and add the roles query and document, or remove message",
            code="export.no_template",
        )
    fields |= {"template": template} if template else settings.prompt_fields
    return wrapped, NO_EMBEDDING | fields


def _pair_scores(loaded: _Loaded) -> _Wrapped:
    """The logit of one token after a pair of texts, from a language model."""
    settings, network, tokenizer = loaded.settings, loaded.network, loaded.tokenizer
    fields = given(activation=settings.activation(1, of_problem=False))
    if settings.states_messages or settings.transformer.modality_config is None:
        fields |= {"template": pair_template(settings, tokenizer, network.config.model_type)}
    else:
        fields |= settings.prompt_fields
    with quiet():
        base, head = scorer(loaded.torch, network, token_score(settings, tokenizer))
    wrapped = positional_module(loaded.torch, base, tokenizer, SCORING, head)
    return wrapped, NO_EMBEDDING | fields


def _copy_companions(tokenizer: Any, source: Path, stage: Path, scratch: Path) -> None:
    """Write the tokenizer and config.json to ``stage``, without unused files."""
    with quiet():
        tokenizer.save_pretrained(scratch)
    settings = scratch / "tokenizer_config.json"
    if settings.is_file():
        text = settings.read_text(encoding="utf-8")
        settings.write_text(text.replace(NEW_TOKENIZER_CLASS, TOKENIZER_CLASS), encoding="utf-8")
    shutil.copyfile(source / "config.json", scratch / "config.json")
    for file in COMPANIONS:
        if (scratch / file).is_file():
            (scratch / file).replace(stage / file)


def _check_options(
    task: str, exporter: str, opset: int, attention: str, dimensions: int | None
) -> None:
    """Check the arguments of ``export``.

    Raises:
        InvalidArgument: An argument is invalid.
    """
    for option, value, values in (
        ("task", task, TASKS),
        ("exporter", exporter, OPSETS),
        ("attention", attention, ("sdpa", "eager")),
    ):
        if value not in values:
            raise InvalidArgument(
                f"`{option}` is {value!r}: expected one of {', '.join(values)}",
                "choose one of them",
                code="export.choice",
            )
    opsets = OPSETS[exporter]
    if opset not in opsets:
        raise InvalidArgument(
            f"`opset` is {opset}: the {exporter} exporter writes {opsets[0]} to {opsets[-1]}",
            f"leave `opset` out for {DEFAULT_OPSET[exporter]}",
            code="export.opset",
        )
    if dimensions is not None and (dimensions < 1 or task != "feature-extraction"):
        raise InvalidArgument(
            f"`dimensions` is {dimensions} for the task {task}: expected a number above 0, and"
            " the task feature-extraction",
            "leave it out",
            code="export.dimensions",
        )


def _check_openvino(task: str, *, is_scoring: bool) -> None:
    """Check that an OpenVINO file can be written for a task.

    Raises:
        InvalidArgument: sentence-transformers cannot load the model.
        MissingExtra: OpenVINO is not installed.
    """
    if is_scoring or task not in ("feature-extraction", "sequence-classification", "rerank"):
        raise InvalidArgument(
            f"`openvino` is set for the task {task}: sentence-transformers loads embeddings,"
            " classifiers and cross-encoders only",
            "leave it out",
            code="openvino.not_loadable",
        )
    require_openvino()


def _check_sparse_task(settings: FolderSettings, task: str) -> None:
    """Check that a sparse encoder is supported, and exported with its logits of words.

    Raises:
        InvalidModel: A setting or module is not supported, or the task has another output.
    """
    settings.check_sparse()  # before the task: no task helps a model that is not supported
    if task != "fill-mask":
        raise InvalidModel(
            f"{settings.folder}: the model is a SparseEncoder, which has sparse vectors only:"
            f" expected the task fill-mask, found {task}",
            "set `task` to fill-mask",
            code="export.sparse_encoder",
        )


def _head_width(torch: Any, head: Any, width: int, source: Path) -> int:
    """The size of the embeddings of a head, given the size of the hidden states.

    Raises:
        InvalidModel: The weights of a module have other sizes.
    """
    try:
        with torch.no_grad():
            output = head(torch.zeros(1, 2, width), torch.ones(1, 2, dtype=torch.int64))
    except RuntimeError as error:
        raise InvalidModel(
            f"{source}: the modules do not fit hidden states of size {width}: {first_line(error)}",
            "download the model again",
            code="export.load",
        ) from error
    return int(output.shape[-1])


def _max_length(settings: FolderSettings, tokenizer: Any, limit: int | None) -> int | None:
    """Maximum tokens of a text, by the model's files, else the tokenizer, and the positions.

    As in sentence-transformers, the number of rotary and relative positions is a limit only for
    models that state no length.
    """
    if (stated := settings.transformer.max_length) is not None:
        return stated if settings.model.relative else min(stated, limit or stated)
    # transformers sets 1e30 for a tokenizer without a limit.
    bounded = tokenizer.model_max_length if tokenizer.model_max_length <= UNBOUNDED else None
    return min((n for n in (bounded, limit) if n), default=None)
