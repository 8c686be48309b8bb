"""Read how a model folder of sentence-transformers makes embeddings or scores.

The files are modules.json, the config.json of each module, and config_sentence_transformers.json.
Scores of cross-encoders are also described by config.json.
Nothing of sentence-transformers is imported.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

from attnserve.choices import Activation, Pooling, Similarity
from attnserve.models.json_files import read_json
from graph_passes.errors import InvalidModel

__all__ = [
    "Dense",
    "Embedding",
    "TokenScore",
    "read_activation",
    "read_embedding",
    "read_max_length",
    "read_prompt",
    "read_token_score",
    "stated_embedding",
]

POOLINGS: dict[str, Pooling] = {"mean": "mean", "cls": "cls", "lasttoken": "last"}
"""The names of sentence-transformers."""

MODULES = frozenset({"Transformer", "Pooling", "Dense", "Normalize", "Dropout"})
"""The modules of an embedding."""

ACTIVATIONS = ("Identity", "Tanh", "ReLU", "GELU", "SiLU", "Sigmoid")
"""Supported activations of a dense layer, by their names in ``torch.nn``."""


ACTIVATED: dict[str, Activation] = {
    "Sigmoid": "sigmoid", "Softmax": "softmax", "Identity": "identity",
}  # fmt: skip
"""Supported activations of scores, by their names in ``torch.nn``."""


class UnsupportedPooling(InvalidModel):
    """A pooling that an artifact cannot express."""


@dataclass(frozen=True)
class Dense:
    """A linear layer after the pooling: its weights file and its activation in ``torch.nn``."""

    weights: Path
    activation: str


@dataclass(frozen=True)
class Embedding:
    """How hidden states become an embedding, by the keys of attnserve.json.

    ``dimensions`` is the number of dimensions to keep, None for all; ``prompts`` are texts before
    an input by name, and ``default_prompt`` the name of the one that is used without a name.
    ``dense`` are layers between the pooling and the normalization.
    """

    pooling: Pooling = "mean"
    normalize: bool = False
    dimensions: int | None = None
    prompts: dict[str, str] = field(default_factory=dict[str, str])
    default_prompt: str | None = None
    similarity: Similarity = "cosine"
    dense: tuple[Dense, ...] = ()

    def record(self) -> dict[str, Any]:
        """The keys of attnserve.json; those without a value are left out."""
        fields, default = asdict(self), asdict(Embedding())
        del fields["dense"]  # they become part of the graph
        always = ("pooling", "normalize")
        return {key: x for key, x in fields.items() if key in always or x != default[key]}


@dataclass(frozen=True)
class TokenScore:
    """The score of a language model: the logit of one token, less that of another one if given."""

    true_id: int
    false_id: int | None


def read_embedding(folder: Path) -> Embedding:
    """The embedding of a model folder; mean pooling without files of sentence-transformers.

    Raises:
        InvalidModel: A file is malformed, or an artifact cannot express the modules, so that its
            embeddings would differ from those of the model.
    """
    modules = _modules(folder)
    if other := next((kind for kind, _ in modules if kind not in MODULES), None):
        raise InvalidModel(
            f"{folder / 'modules.json'}: the module {other} is not supported",
            "remove it from modules.json to export the encoder without it",
            code="export.module",
        )
    path = folder / "config_sentence_transformers.json"
    settings = _settings(path)
    if settings.pop("similarity_fn_name") not in (None, "cosine", "dot"):
        raise _malformed(path, "similarity_fn_name", "cosine or dot")
    poolings: list[Pooling] = [
        _pooling(folder / path, settings["prompts"]) for path in _paths(modules, "Pooling")
    ]
    return Embedding(
        pooling=poolings[-1] if poolings else "mean",
        normalize=any(kind == "Normalize" for kind, _ in modules),
        dense=tuple(_dense(folder / path) for path in _paths(modules, "Dense")),
        **settings,
    )


def stated_embedding(folder: Path) -> dict[str, Any]:
    """What a model folder states about the embeddings of an ONNX file in it.

    Returns:
        Keys of attnserve.json; none without modules of an embedding. The graph has to compute
        embeddings with dense layers, or with a pooling that is not supported: then they are the
        output sentence_embedding, which Optimum writes.

    Raises:
        InvalidModel: A file is malformed.
    """
    modules = _modules(folder)
    kinds = {kind for kind, _ in modules}
    if "Pooling" not in kinds or not kinds <= MODULES:
        return {}
    settings = _settings(folder / "config_sentence_transformers.json")
    if settings.pop("similarity_fn_name") not in (None, "cosine", "dot"):
        del settings["similarity"]
    made = Embedding(normalize="Normalize" in kinds, **settings)
    length = read_max_length(folder)
    stated = made.record() | ({} if length is None else {"max_length": length})
    try:
        path = _paths(modules, "Pooling")[-1]
        stated["pooling"] = _pooling(folder / path, made.prompts)
    except UnsupportedPooling:
        kinds.add("Dense")
    if "Dense" in kinds:
        stated |= {"output": "sentence_embedding", "pooling": "none"}
    return stated


def read_token_score(folder: Path) -> TokenScore | None:
    """The score of a generative reranker (module LogitScore); None for other models.

    Raises:
        InvalidModel: A file is malformed.
    """
    path = next((path for kind, path in _modules(folder) if kind == "LogitScore"), None)
    if path is None:
        return None
    config = _object(folder / path / "config.json")
    true: Any = config.get("true_token_id")
    false: Any = config.get("false_token_id")
    if not _is_id(true) or not (false is None or _is_id(false)):
        raise _malformed(folder / path / "config.json", "true_token_id", "a token id")
    return TokenScore(true, false)


def read_activation(folder: Path, classes: int) -> Activation | None:
    """What turns the logits of a cross-encoder into scores.

    Args:
        classes: The number of logits of a text.

    Returns:
        None for the default: softmax, or the sigmoid of a single logit. sentence-transformers
        returns the logits of several classes by default; they do not count as an activation.

    Raises:
        InvalidModel: Another activation is stated.
    """
    config = _object(folder / "config.json")
    nested: Any = config.get("sentence_transformers")
    stated = (
        _object(folder / "config_sentence_transformers.json").get("activation_fn")
        or (cast(dict[str, Any], nested).get("activation_fn") if isinstance(nested, dict) else None)
        or config.get("sbert_ce_default_activation_function")  # before version 4
    )
    if stated is None:
        return None
    name = str(stated).rpartition(".")[2]
    if name not in ACTIVATED:
        raise InvalidModel(
            f"{folder}: activation_fn is {stated}: expected one of {', '.join(ACTIVATED)}",
            "remove it from config.json to serve the sigmoid of the logit",
            code="export.activation",
        )
    return None if name == "Identity" and classes > 1 else ACTIVATED[name]


def read_prompt(folder: Path) -> str:
    """The default prompt of a model; empty without one."""
    config = _object(folder / "config_sentence_transformers.json")
    prompts: Any = config.get("prompts")
    found = prompts.get(config.get("default_prompt_name")) if isinstance(prompts, dict) else None
    return found if isinstance(found, str) else ""


def read_max_length(folder: Path) -> int | None:
    """The maximum number of tokens of a text; None if no file states it.

    Raises:
        InvalidModel: The file is malformed.
    """
    path = folder / "sentence_bert_config.json"
    length = _object(path).get("max_seq_length")
    if length is not None and (type(length) is not int or length < 1):
        raise _malformed(path, "max_seq_length", "a number above 0")
    return length


def _modules(folder: Path) -> list[tuple[str, str]]:
    """The class name and the folder of each module, in order."""
    path = folder / "modules.json"
    if not path.is_file():
        return []
    listed: Any = read_json(path)
    try:
        modules = [(str(one["type"]).rpartition(".")[2], str(one["path"])) for one in listed]
    except (TypeError, KeyError):
        modules = None
    # Each module is a folder in that of the model, or this folder.
    if modules is None or not all(re.fullmatch(r"(\w[\w.-]{0,98})?", name) for _, name in modules):
        raise InvalidModel(
            f"{path}: expected a list of modules with type and path",
            "download the model again",
            code="export.modules",
        )
    return modules


def _paths(modules: Sequence[tuple[str, str]], kind: str) -> list[str]:
    return [path for each, path in modules if each == kind]


def _settings(path: Path) -> dict[str, Any]:
    """Fields of an embedding in config_sentence_transformers.json, and similarity_fn_name."""
    config = _object(path)
    prompts, default = config.get("prompts") or {}, config.get("default_prompt_name")
    dimensions, similarity = config.get("truncate_dim"), config.get("similarity_fn_name")
    if not isinstance(prompts, dict) or not all(
        isinstance(text, str) for text in cast(dict[str, Any], prompts).values()
    ):
        raise _malformed(path, "prompts", "an object of texts")
    if default is not None and (not isinstance(default, str) or default not in prompts):
        raise _malformed(path, "default_prompt_name", "a name of prompts")
    if dimensions is not None and (type(dimensions) is not int or dimensions < 1):
        raise _malformed(path, "truncate_dim", "a number above 0")
    if not any(cast(dict[str, str], prompts).values()):
        prompts, default = {}, None  # sentence-transformers saves empty prompts by default
    return {
        "dimensions": dimensions, "prompts": prompts, "default_prompt": default,
        "similarity": similarity or "cosine", "similarity_fn_name": similarity,
    }  # fmt: skip


def _pooling(folder: Path, prompts: dict[str, str]) -> Pooling:
    path = folder / "config.json"
    config = _object(path)
    # Before sentence-transformers 5 there is one boolean key per mode, afterwards one key.
    modes = [key for key in config if key.startswith("pooling_mode_") and config[key] is True]
    modes = [key.removeprefix("pooling_mode_").removesuffix("_tokens") for key in modes]
    modes = [mode.removesuffix("_token") for mode in modes]
    if "pooling_mode" in config:
        value: Any = config["pooling_mode"]
        modes = cast(list[Any], value) if isinstance(value, list) else [value]
        if not all(isinstance(mode, str) for mode in modes):
            raise _malformed(path, "pooling_mode", "a text, or a list of texts")
    if len(modes) != 1 or modes[0] not in POOLINGS:
        raise UnsupportedPooling(
            f"{path}: pooling is {' + '.join(modes) or 'missing'}: expected one of"
            f" {', '.join(POOLINGS)}",
            "remove modules.json to export the encoder with mean pooling",
            code="export.pooling",
        )
    if prompts and config.get("include_prompt") is False:
        raise UnsupportedPooling(
            f"{path}: the pooling leaves out the prompt, which is not supported",
            "set include_prompt to true, if the embeddings may differ",
            code="export.include_prompt",
        )
    return POOLINGS[modes[0]]


def _dense(folder: Path) -> Dense:
    path = folder / "config.json"
    config, weights = _object(path), folder / "model.safetensors"
    activation = str(config.get("activation_function", "Tanh")).rpartition(".")[2]
    is_plain = config.get("module_input_name", "sentence_embedding") == "sentence_embedding"
    if activation not in ACTIVATIONS or not is_plain or config.get("use_residual"):
        raise _malformed(
            path,
            "activation_function, module_input_name and use_residual",
            f"one of {', '.join(ACTIVATIONS)} of sentence_embedding, without a residual",
        )
    if not weights.is_file():
        raise InvalidModel(
            f"{weights}: no such file; pickled weights are never loaded",
            "save the model with sentence-transformers 2.3 or later",
            code="export.no_weights",
        )
    return Dense(weights, activation)


def _object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty if the file does not exist."""
    content: Any = read_json(path) if path.is_file() else {}
    if not isinstance(content, dict):
        raise InvalidModel(
            f"{path}: expected a JSON object", "download the model again", code="export.config"
        )
    return cast(dict[str, Any], content)


def _is_id(value: Any) -> bool:
    return type(value) is int and value >= 0


def _malformed(path: Path, key: str, expected: str) -> InvalidModel:
    return InvalidModel(
        f"{path}: {key}: expected {expected}", "correct the file", code="export.config"
    )
