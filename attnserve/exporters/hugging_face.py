"""Export a Hugging Face model to an artifact: model.onnx, tokenizer files and attnserve.json.

The graph is compared with PyTorch at two shapes before the artifact is written. Code of the model
repository is never run.

torch and transformers are optional dependencies (extra ``[torch]``) and are imported on first use.
Their objects are typed ``Any``.
"""

from __future__ import annotations

import inspect
import io
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from attnserve.exporters.heads import (
    embedding_head,
    first_line,
    pair_template,
    scorer,
    token_score,
)
from attnserve.fusion import fused_copy
from attnserve.literals import Activation, Attention, Exporter, Pooling
from attnserve.models.artifact import COMPANIONS, Artifact
from attnserve.models.checksums import path_sha256, sha256
from attnserve.models.folder_settings import EmbeddingSettings, FolderSettings, read_settings
from attnserve.models.onnx_files import load_model, save_model
from attnserve.models.outputs import (
    check_output,
    remove_earlier_openvino,
    staged,
    write_for_libraries,
)
from attnserve.models.provenance import state_provenance
from attnserve.models.record import Record, write_record
from attnserve.models.tokenizer import UNBOUNDED, lower_case
from attnserve.options import check_seed
from attnserve.paths import StrPath
from attnserve.runtime.interface import RunFailed
from attnserve.runtime.openvino_runtime import require_openvino
from attnserve.runtime.session import open_session
from attnserve.runtime.silence import silenced
from attnserve.versions import package_versions
from graph_passes.errors import CheckFailed, InvalidArgument, InvalidModel, MissingExtra

__all__ = ["TASKS", "ExportReport", "Exporter", "Task", "export"]


@dataclass(frozen=True)
class Task:
    """A task of an exported model.

    Attributes:
        auto_class: The class of transformers that loads the model.
        outputs: The exported fields of its output.
        per_token: Whether outputs have the axis "sequence" after "batch".
    """

    auto_class: str
    outputs: tuple[str, ...]
    per_token: bool = True


TASKS = {
    "feature-extraction": Task("AutoModel", ("last_hidden_state",)),
    "sequence-classification": Task(
        "AutoModelForSequenceClassification", ("logits",), per_token=False
    ),
    "token-classification": Task("AutoModelForTokenClassification", ("logits",)),
    "question-answering": Task("AutoModelForQuestionAnswering", ("start_logits", "end_logits")),
    "rerank": Task("AutoModelForSequenceClassification", ("logits",), per_token=False),
    "fill-mask": Task("AutoModelForMaskedLM", ("logits",)),
    "text-generation": Task("AutoModelForCausalLM", ("logits",)),
}
"""The tasks by name."""

OPSETS = {"dynamo": range(18, 24), "torchscript": range(14, 21)}
"""Opsets that each exporter writes without a conversion of the graph."""

DEFAULT_OPSET = {"dynamo": 18, "torchscript": 17}
"""The opset of each exporter by default."""

INPUTS = ("input_ids", "attention_mask", "token_type_ids")
"""The inputs of a graph, if the model takes them and its tokenizer writes them."""

TOLERANCE = 1e-3
"""Maximum difference from PyTorch, relative to the largest output; usual values are 1e-6."""

SCORING = Task("AutoModelForCausalLM", ("logits",), per_token=False)
"""The task "rerank" of a language model whose score is the logit of one token after the pair."""

NO_EMBEDDING = EmbeddingSettings(pooling="none")
"""The settings of a graph whose outputs are not embeddings, or are pooled in the graph."""

EXAMPLE = (2, 7)
"""Batch and sequence of the inputs that trace the model."""

CHECKED = ((3, 11), (1, 24))
"""Batch and sequence of the checks; different from ``EXAMPLE``, to detect constant sizes."""


@contextmanager
def _quiet() -> Generator[None]:
    """Suppress output, warnings and logs of exporters; they report failures as exceptions."""
    silent = io.StringIO()
    with silenced(logging.CRITICAL), redirect_stdout(silent), redirect_stderr(silent):
        yield


@dataclass(frozen=True)
class ExportReport:
    """The result of an export.

    Attributes:
        path: The written model.onnx.
        inputs: The names of the inputs.
        outputs: The names of the outputs.
        embedding: How the outputs become embeddings.
        activation: The function from logits to scores; None without a classifier.
        template: The text of a pair, with {query} and {document}; None if the tokenizer joins them.
        max_length: Maximum tokens of a text; None for no limit.
        max_abs_error: The largest difference between ONNX Runtime and PyTorch, without padding.
        relative_error: The same, relative to the largest output.
        seconds: The duration of the export.
    """

    path: Path
    task: str
    exporter: Exporter
    opset: int
    attention: Attention
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    embedding: EmbeddingSettings
    activation: Activation | None
    template: str | None
    max_length: int | None
    max_abs_error: float
    relative_error: float
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """The fields, for the output of the command."""
        embedding = self.embedding.to_json()
        fields = {key: value for key, value in asdict(self).items() if key != "embedding"}
        return {**fields, **embedding, "path": str(self.path)}

    @property
    def pooling(self) -> Pooling:
        """How hidden states are pooled after the graph."""
        return self.embedding.pooling

    @property
    def normalize(self) -> bool:
        """Whether embeddings are normalized after the graph."""
        return self.embedding.normalize


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
    name = task or "feature-extraction"
    opset = DEFAULT_OPSET.get(exporter, 0) if opset is None else opset
    check_seed(seed)
    _check_options(name, exporter, opset, attention, dimensions)
    model = os.fspath(model)
    folder = Path(folder)
    check_output(folder, source=Path(model), force=force)
    torch, transformers = _require_torch()
    source = _find(model)
    settings = read_settings(source)
    source = source / settings.encoder
    is_scoring = name == "rerank" and settings.is_language_model
    if openvino:
        _check_openvino(name, is_scoring=is_scoring)
    kind = SCORING if is_scoring else TASKS[name]
    network, tokenizer = _load(transformers, source, kind, attention)
    if settings.transformer.do_lower_case:  # also for programs that read tokenizer.json alone
        lower_case(tokenizer.backend_tokenizer)
    limit = _position_limit(network)
    if name == "feature-extraction":
        module = _embeddings(torch, settings, network, dimensions, source)
    elif is_scoring:
        module = _pair_scores(torch, settings, network, tokenizer)
    else:
        module = _logits(settings, network, name, model)
    max_length = _max_length(settings, tokenizer, limit)
    limit = limit and max(limit, max_length or 0)
    inputs = _input_names(module.network, tokenizer)
    wrapper = _wrapper(torch, inputs, module)
    example, *feeds = (
        _example(module.network, tokenizer, inputs, batch, min(sequence, limit or sequence), seed)
        for batch, sequence in (EXAMPLE, *CHECKED)
    )
    finish = partial(remove_earlier_openvino, folder=folder)
    with staged(folder, finish) as stage, tempfile.TemporaryDirectory(dir=stage) as temporary:
        scratch = Path(temporary)
        try:
            graph = _trace(torch, wrapper, example, module.kind, exporter, opset, limit, scratch)
        except Exception as error:
            raise InvalidModel(
                f"{model}: the {exporter} exporter failed at opset {opset}: {first_line(error)}",
                "try the other `exporter`, eager `attention`, or another `opset`",
                code="export.failed",
            ) from error
        state_provenance(graph, parent=_weights_sha256(source))
        save_model(graph, stage / "model.onnx")
        _copy_companions(tokenizer, source, stage, scratch)
        absolute, relative = _compare(
            torch, wrapper, stage / "model.onnx", feeds, module.kind.per_token
        )
        report = ExportReport(
            path=folder / "model.onnx",
            task=name,
            exporter=exporter,
            opset=opset,
            attention=attention,
            inputs=inputs,
            outputs=module.kind.outputs,
            embedding=module.embedding,
            activation=module.activation,
            template=module.template,
            max_length=max_length,
            max_abs_error=absolute,
            relative_error=relative,
            seconds=time.perf_counter() - start,
        )
        record = _record(report, settings, model)
        write_record(stage, record)
        written = Artifact(stage / "model.onnx", record)
        write_for_libraries(
            written, graph, stage, folder, openvino=fused_copy(graph) if openvino else None
        )
    return report


@dataclass(frozen=True)
class _Outputs:
    """The outputs of the graph, and their interpretation.

    Attributes:
        kind: The fields of the network's output, and whether they have an axis of tokens.
        network: The module of transformers.
        head: A module that computes the output from the hidden states; None for the network's own.
        embedding: How the outputs become embeddings.
        activation: The function from logits to scores, if any.
        template: The text of a pair, if the tokenizer does not join its texts.
    """

    kind: Task
    network: Any
    head: Any = None
    embedding: EmbeddingSettings = NO_EMBEDDING
    activation: Activation | None = None
    template: str | None = None


def _embeddings(
    torch: Any, settings: FolderSettings, network: Any, dimensions: int | None, source: Path
) -> _Outputs:
    """Hidden states, or embeddings if pooling and normalization cannot express the modules.

    Raises:
        InvalidModel: The weights of a module have other sizes.
        InvalidArgument: ``dimensions`` is more than the size of the embeddings.
    """
    embedding = settings.embedding
    embedding = replace(embedding, dimensions=dimensions or embedding.dimensions)
    kind = TASKS["feature-extraction"]
    head = None
    width = network.config.hidden_size
    if embedding.head:
        head = embedding_head(torch, embedding.head)
        kind = Task(kind.auto_class, ("sentence_embedding",), per_token=False)
        width = _head_width(torch, head, width, source)
    if (embedding.dimensions or 0) > width:
        raise InvalidArgument(
            f"`dimensions` is {embedding.dimensions}: expected at most {width}, the size of the"
            " embeddings",
            "reduce it",
            code="export.dimensions",
        )
    return _Outputs(kind, network, head, embedding)


def _pair_scores(torch: Any, settings: FolderSettings, network: Any, tokenizer: Any) -> _Outputs:
    """The logit of one token after a pair of texts, from a language model."""
    template = pair_template(settings, tokenizer, network.config.model_type)
    with _quiet():
        network, head = scorer(torch, network, token_score(settings, tokenizer))
    activation = settings.activation(1, of_problem=False)
    return _Outputs(SCORING, network, head, activation=activation, template=template)


def _logits(settings: FolderSettings, network: Any, task: str, model: str) -> _Outputs:
    """The outputs of a network with the head of a task.

    Raises:
        InvalidArgument: A reranker has several classes.
    """
    if task not in ("rerank", "sequence-classification"):
        return _Outputs(TASKS[task], network)
    classes = network.config.num_labels
    if task == "rerank" and classes != 1:
        raise InvalidArgument(
            f"{model}: the model has {classes} classes: a reranker has one score",
            "set `task` to sequence-classification",
            code="export.not_reranker",
        )
    embedding = replace(
        NO_EMBEDDING, prompts=settings.prompts, default_prompt=settings.default_prompt
    )
    activation = settings.activation(classes, of_problem=task != "rerank")
    return _Outputs(TASKS[task], network, embedding=embedding, activation=activation)


def _copy_companions(tokenizer: Any, source: Path, stage: Path, scratch: Path) -> None:
    """Write the tokenizer and config.json to ``stage``, without unused files."""
    with _quiet():
        tokenizer.save_pretrained(scratch)
    shutil.copyfile(source / "config.json", scratch / "config.json")
    for file in COMPANIONS:
        if (scratch / file).is_file():
            (scratch / file).replace(stage / file)


def _check_options(
    task: str, exporter: str, opset: int, attention: str, dimensions: int | None
) -> None:
    """Check the arguments of ``export``.

    Raises:
        InvalidArgument: One is invalid.
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


def _require_torch() -> tuple[Any, Any]:
    """Import torch and transformers.

    Raises:
        MissingExtra: One is not installed.
    """
    try:
        with _quiet():
            import torch
            import transformers
    except ImportError as error:
        raise MissingExtra(
            f"{error.name or 'torch'} is not installed: export runs the model in PyTorch",
            "pip install 'attnserve[torch]'",
            code="extra.torch",
        ) from error
    return torch, transformers


def _find(model: str) -> Path:
    """The model's folder: ``model`` itself, or a snapshot from the hub without unused weights.

    Raises:
        InvalidModel: The model does not exist, or the hub cannot be reached.
    """
    if (folder := Path(model)).is_dir():
        return folder
    if folder.is_file():
        raise InvalidModel(
            f"{model}: expected a Hugging Face id or a folder, found a file",
            "pass the folder of the model",
            code="export.not_folder",
        )
    from huggingface_hub import snapshot_download

    patterns = ["*.json", "*.txt", "*.model", "*.jinja"]
    elsewhere = ["onnx/*", "openvino/*"]  # the same weights in other formats
    try:
        snapshot = Path(
            snapshot_download(model, allow_patterns=patterns, ignore_patterns=elsewhere)
        )
        for weights in ("*.safetensors", "pytorch_model*.bin"):
            if not any(snapshot.glob("*.safetensors")):
                snapshot_download(model, allow_patterns=weights, ignore_patterns=elsewhere)
    except Exception as error:  # OSError, HfHubHTTPError, HFValidationError, ...
        raise InvalidModel(
            f"{model}: no such folder, and not found on the Hugging Face hub or in its cache"
            f" ({first_line(error)})",
            "pass a local folder with config.json, weights and tokenizer; or an id, when online",
            code="export.not_found",
        ) from error
    return snapshot


@_quiet()
def _load(transformers: Any, source: Path, task: Task, attention: Attention) -> tuple[Any, Any]:
    """The network in evaluation mode and float32, and its tokenizer.

    Raises:
        InvalidModel: A file of the folder is missing or invalid.
        InvalidArgument: The input is not text, or the model is an encoder-decoder.
    """
    if not (source / "config.json").is_file():
        raise InvalidModel(
            f"{source}: the folder has no config.json",
            "pass the folder of a saved model",
            code="export.no_config",
        )
    options = {"local_files_only": True, "trust_remote_code": False}
    try:
        config = transformers.AutoConfig.from_pretrained(source, **options)
        config.use_cache = False  # past keys and values are not exported
        if getattr(config, "is_encoder_decoder", False):
            raise InvalidArgument(
                f"{source}: {config.model_type} is an encoder-decoder, which is not supported",
                "pass an encoder or a decoder-only model",
                code="export.encoder_decoder",
            )
        network, loading = getattr(transformers, task.auto_class).from_pretrained(
            source, config=config, attn_implementation=attention, dtype="float32",
            output_loading_info=True, **options,
        )  # fmt: skip
    except InvalidArgument:
        raise
    except Exception as error:
        raise _load_error(source, attention, error) from error
    if network.main_input_name != "input_ids" or not hasattr(config, "vocab_size"):
        raise InvalidArgument(
            f"{source}: {config.model_type} is not a text model; other models are not supported",
            "pass a text model",
            code="export.not_text",
        )
    # Poolers are not exported. Other missing weights would be initialized randomly.
    random = sorted(k for k in loading["missing_keys"] if not k.rpartition("pooler.")[1])
    if random:
        raise InvalidModel(
            f"{source}: the weights do not include {random[0]!r}, which {task.auto_class} needs"
            f" ({len(random)} missing)",
            "choose the `task` that the model was trained for",
            code="export.missing_weights",
        )
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(source, **options)
    except Exception as error:
        raise InvalidModel(
            f"{source}: the tokenizer cannot be loaded: {first_line(error)}",
            "put tokenizer.json and tokenizer_config.json into the folder",
            code="export.tokenizer",
        ) from error
    # Without tokenizer files, transformers creates a tokenizer with special tokens only.
    files = tokenizer.vocab_files_names.values()
    if not tokenizer.is_fast or not any((source / file).is_file() for file in files):
        raise InvalidModel(
            f"{source}: the folder has no tokenizer that can be saved as tokenizer.json",
            "put the model's tokenizer.json into the folder",
            code="export.no_tokenizer",
        )
    return network.eval(), tokenizer


def _load_error(source: Path, attention: Attention, error: Exception) -> InvalidModel:
    """The error of a model that transformers does not load."""
    text = str(error)
    if "trust_remote_code" in text:
        return InvalidModel(
            f"{source}: the model needs custom Python code, which is never run",
            "choose a model whose architecture is part of transformers",
            code="export.remote_code",
        )
    if attention == "sdpa" and "scaled_dot_product_attention" in text:
        return InvalidModel(
            f"{source}: the model does not support sdpa attention",
            "set `attention` to eager",
            code="export.no_sdpa",
        )
    if isinstance(error, OSError) and "no file named" in text:
        return InvalidModel(
            f"{source}: the folder has no weights",
            "put model.safetensors into the folder",
            code="export.no_weights",
        )
    return InvalidModel(
        f"{source}: transformers cannot load it: {first_line(error)}",
        "check config.json and the weights, or download the model again",
        code="export.load",
    )


def _weights_sha256(source: Path) -> str | None:
    """The checksum of the file of weights, or of all files that hold them; None without one."""
    patterns = ("*.safetensors", "pytorch_model*.bin")
    pattern = next((one for one in patterns if any(source.glob(one))), "")
    files = [*source.glob(pattern)] if pattern else []
    if not files:
        return None
    return sha256(files[0]) if len(files) == 1 else path_sha256(source, pattern)


def _position_limit(network: Any) -> int | None:
    """Maximum sequence length of the position embeddings; None without such a limit."""
    positions = getattr(network.config, "max_position_embeddings", None)
    if not isinstance(positions, int) or positions < 1:
        return None
    for name, module in network.named_modules():
        padding_idx = getattr(module, "padding_idx", None)
        if name.endswith("position_embeddings") and padding_idx is not None:
            return positions - padding_idx - 1  # in RoBERTa, positions start at padding_idx + 1
    return positions


def _input_names(network: Any, tokenizer: Any) -> tuple[str, ...]:
    accepted = inspect.signature(network.forward).parameters
    return tuple(n for n in INPUTS if n in accepted and n in tokenizer.model_input_names)


def _wrapper(torch: Any, names: tuple[str, ...], outputs: _Outputs) -> Any:
    """Wrap the network as a module with positional tensors as inputs and a tuple as output.

    With a head, the output is computed by the head from the hidden states.
    """

    class Wrapper(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = outputs.network
            self.head = outputs.head

        def forward(self, *values: Any) -> Any:
            inputs = dict(zip(names, values, strict=True))
            result = self.network(**inputs, return_dict=True)
            if self.head is not None:
                return (self.head(result.last_hidden_state, inputs["attention_mask"]),)
            return tuple(getattr(result, output) for output in outputs.kind.outputs)

    # dynamo uses the mode of the outermost module and exports Dropout nodes in training mode.
    return Wrapper().eval()


def _example(
    network: Any, tokenizer: Any, names: tuple[str, ...], batch: int, sequence: int, seed: int
) -> dict[str, np.ndarray]:
    """Random inputs; with several rows, the last one has padding."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, network.config.vocab_size, (batch, sequence))
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
    ids[ids == pad] = (pad + 1) % network.config.vocab_size
    mask = np.ones_like(ids)
    if batch > 1:
        mask[-1, sequence - sequence // 3 :] = 0
    ids[mask == 0] = pad
    num_types = max(min(getattr(network.config, "type_vocab_size", 2) or 1, 2), 1)
    types = np.broadcast_to(np.arange(sequence) * num_types // sequence, ids.shape).copy()
    values = {"input_ids": ids, "attention_mask": mask, "token_type_ids": types}
    return {name: values[name] for name in names}


@_quiet()
def _trace(
    torch: Any,
    wrapper: Any,
    example: Mapping[str, np.ndarray],
    task: Task,
    exporter: Exporter,
    opset: int,
    limit: int | None,
    scratch: Path,
) -> ir.Model:
    """Run the exporter and return the graph, with dynamic axes "batch" and "sequence"."""
    values = tuple(torch.from_numpy(value) for value in example.values())
    options: dict[str, Any] = {
        "opset_version": opset,
        "input_names": list(example),
        "output_names": list(task.outputs),
    }
    if exporter == "dynamo":
        dims = {
            0: torch.export.Dim("batch", min=1, max=2**15),
            1: torch.export.Dim("sequence", min=2, max=limit or 2**17),
        }
        program = torch.onnx.export(
            wrapper,
            values,
            dynamo=True,
            verbose=False,
            dynamic_shapes=((dims,) * len(values),),
            **options,
        )
        for node in program.model.graph.all_nodes():
            # Stack traces contain paths and source lines of this machine.
            node.metadata_props.pop("pkg.torch.onnx.stack_trace", None)
        return program.model
    axes = {0: "batch", 1: "sequence"}
    dynamic = dict.fromkeys(example, axes)
    dynamic |= dict.fromkeys(task.outputs, axes if task.per_token else {0: "batch"})
    with torch.no_grad():
        torch.onnx.export(
            wrapper, values, scratch / "traced.onnx", dynamo=False, dynamic_axes=dynamic, **options
        )
    return load_model(scratch / "traced.onnx")


def _compare(
    torch: Any, wrapper: Any, path: Path, feeds: list[dict[str, np.ndarray]], per_token: bool
) -> tuple[float, float]:
    """Largest absolute and relative error of the graph against PyTorch, without padding.

    Raises:
        CheckFailed: The relative error is above ``TOLERANCE``, or a number is not finite.
    """
    session = open_session(path)
    absolute = relative = 0.0
    for feed in feeds:
        with torch.no_grad(), _quiet():
            torch_outputs = wrapper(*(torch.from_numpy(value) for value in feed.values()))
        real: Any = slice(None)
        if per_token and "attention_mask" in feed:
            real = feed["attention_mask"] != 0
        try:
            onnx_outputs = session.run(None, feed)
        except RunFailed as error:
            raise CheckFailed(
                f"ONNX Runtime fails on the exported graph at shape"
                f" {feed['input_ids'].shape}: {error.reason}",
                "nothing was written: try the other `exporter` or another `opset`",
                code="export.does_not_run",
            ) from error
        for expected_output, computed_output in zip(torch_outputs, onnx_outputs, strict=True):
            reference = expected_output.numpy()[real]
            with np.errstate(invalid="ignore"):
                difference = float(np.abs(computed_output[real] - reference).max())
            scale = float(np.abs(reference).max())
            if not difference <= TOLERANCE * scale:  # also true for NaN
                raise CheckFailed(
                    f"ONNX Runtime and PyTorch differ by {difference:.3g} at shape"
                    f" {feed['input_ids'].shape}: expected at most {TOLERANCE * scale:.3g}",
                    "nothing was written: try the other `exporter`, `attention` or `opset`",
                    code="export.differs",
                )
            absolute = max(absolute, difference)
            relative = max(relative, difference / scale if scale else 0.0)
    return absolute, relative


def _head_width(torch: Any, head: Any, width: int, source: Path) -> int:
    """The size of the embeddings that a head makes of hidden states of this size.

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
    """Maximum tokens of a text: from the model's files, else the tokenizer, within the positions.

    Rotary and relative positions limit only texts of models that state no length, as in
    sentence-transformers.
    """
    if (stated := settings.transformer.max_length) is not None:
        return stated if settings.model.relative else min(stated, limit or stated)
    # transformers sets 1e30 for a tokenizer without a limit.
    bounded = tokenizer.model_max_length if tokenizer.model_max_length <= UNBOUNDED else None
    return min((n for n in (bounded, limit) if n), default=None)


def _record(report: ExportReport, settings: FolderSettings, source: str) -> Record:
    """The record of the artifact.

    Args:
        source: The exported model, as the caller named it.
    """
    fields = asdict(report)
    kept = ("max_length", "task", "exporter", "opset", "attention", "max_abs_error")
    scores = {key: fields[key] for key in ("activation", "template") if fields[key] is not None}
    packages = ("attnserve", "torch", "transformers", "onnx-ir", "onnxruntime")
    return Record.model_validate({
        **settings.stated_of_text(),
        **report.embedding.to_json(),
        **scores,
        **{key: fields[key] for key in kept},
        "source": source,
        "versions": package_versions(packages),
    })  # fmt: skip
