"""Load a transformers model, its tokenizer and its settings.

Code of the model repository is never run.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Generator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from attnserve.exporters.heads import first_line
from attnserve.literals import Attention
from attnserve.models.checksums import path_sha256, sha256
from attnserve.runtime.silence import silenced
from graph_passes.errors import InvalidArgument, InvalidModel, MissingExtra

__all__ = [
    "SCORING",
    "TASKS",
    "Task",
    "find_folder",
    "load_network",
    "position_limit",
    "quiet",
    "require_torch",
    "weights_sha256",
]


@dataclass(frozen=True)
class Task:
    """A task of an exported model.

    Attributes:
        auto_class: The class of transformers that loads the model.
        outputs: The exported fields of the model's output.
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

SCORING = Task("AutoModelForCausalLM", ("logits",), per_token=False)
"""The task "rerank" of a language model whose score is the logit of one token after the pair."""

OFFLINE = {"local_files_only": True, "trust_remote_code": False}
"""Arguments of every ``from_pretrained``."""

WEIGHTS = ("*.safetensors", "*pytorch_model*.bin")
"""The files of weights, also in folders of modules, in the order of preference."""


@contextmanager
def quiet() -> Generator[None]:
    """Suppress output, warnings and logs of exporters; they report failures as exceptions."""
    silent = io.StringIO()
    with silenced(logging.CRITICAL), redirect_stdout(silent), redirect_stderr(silent):
        yield


def require_torch() -> tuple[Any, Any]:
    """Import torch and transformers.

    Raises:
        MissingExtra: torch or transformers is not installed.
    """
    try:
        with quiet():
            import torch
            import transformers
    except ImportError as error:
        raise MissingExtra(
            f"{error.name or 'torch'} is not installed: export runs the model in PyTorch",
            "pip install 'attnserve[torch]'",
            code="extra.torch",
        ) from error
    return torch, transformers


def find_folder(model: str) -> Path:
    """Find the model's folder: ``model``, or a snapshot from the hub without unused weights.

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
        for weights in WEIGHTS:
            if not any(snapshot.rglob("*.safetensors")):
                snapshot_download(model, allow_patterns=weights, ignore_patterns=elsewhere)
    except Exception as error:  # OSError, HfHubHTTPError, HFValidationError, ...
        raise InvalidModel(
            f"{model}: no such folder, and not found on the Hugging Face hub or in its cache"
            f" ({first_line(error)})",
            "pass a local folder with config.json, weights and tokenizer; or an id, when online",
            code="export.not_found",
        ) from error
    return snapshot


@quiet()
def load_network(
    transformers: Any, source: Path, task: Task, attention: Attention
) -> tuple[Any, Any]:
    """Load the network, in evaluation mode and float32, and its tokenizer.

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
    if (source / "adapter_config.json").is_file() and find_spec("peft") is None:
        raise InvalidModel(
            f"{source}: the folder has an adapter, which transformers ignores without peft",
            "pip install peft, or remove adapter_config.json to use the model without the adapter",
            code="export.adapter",
        )
    network = _network(transformers, source, task, attention)
    return network.eval(), _tokenizer(transformers, source)


def _network(transformers: Any, source: Path, task: Task, attention: Attention) -> Any:
    """Load the network of a text model with all of its weights.

    Raises:
        InvalidModel: A file is invalid, or weights are missing.
        InvalidArgument: The input is not text, or the model is an encoder-decoder.
    """
    try:
        config = transformers.AutoConfig.from_pretrained(source, **OFFLINE)
        config.use_cache = False  # past keys and values are not exported
        if getattr(config, "is_encoder_decoder", False):
            raise InvalidArgument(
                f"{source}: {config.model_type} is an encoder-decoder, which is not supported",
                "pass an encoder or a decoder-only model",
                code="export.encoder_decoder",
            )
        network, loading = getattr(transformers, task.auto_class).from_pretrained(
            source,
            config=config,
            attn_implementation=attention,
            dtype="float32",
            output_loading_info=True,
            **OFFLINE,
        )
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
    return network


def _tokenizer(transformers: Any, source: Path) -> Any:
    """Load a tokenizer that can be saved as tokenizer.json.

    Raises:
        InvalidModel: There is none, or it cannot be loaded.
    """
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(source, **OFFLINE)
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
    return tokenizer


def _load_error(source: Path, attention: Attention, error: Exception) -> InvalidModel:
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


def weights_sha256(source: Path) -> str | None:
    """The checksum of the file of weights, or of all files of weights; None without weights."""
    for pattern in WEIGHTS:
        if files := [*source.glob(pattern)]:
            return sha256(files[0]) if len(files) == 1 else path_sha256(source, pattern)
    return None


def position_limit(network: Any) -> int | None:
    """Maximum sequence length of the position embeddings; None without such a limit."""
    positions = getattr(network.config, "max_position_embeddings", None)
    if not isinstance(positions, int) or positions < 1:
        return None
    for name, module in network.named_modules():
        padding_idx = getattr(module, "padding_idx", None)
        if name.endswith("position_embeddings") and padding_idx is not None:
            return positions - padding_idx - 1  # in RoBERTa, positions start at padding_idx + 1
    return positions
