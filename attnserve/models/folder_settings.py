"""Read the settings of texts, vectors and scores from a model folder.

Export, ONNX files of the hub and the service share this reader. The files and their keys are in
``settings_files``. Unknown settings that may change vectors or scores are refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from attnserve.literals import Activation, Pooling
from attnserve.models.json_files import read_json
from attnserve.models.record import Record
from attnserve.models.settings_files import (
    MODULES,
    TRANSFORMER_FILES,
    Dense,
    Library,
    LogitScore,
    ModuleEntry,
    Normalize,
    SettingsFile,
    Transformer,
    TransformersConfig,
)
from attnserve.models.settings_files import Pooling as PoolingFile
from graph_passes.errors import InvalidModel

__all__ = [
    "FolderSettings",
    "Module",
    "given",
    "parse_settings",
    "read_settings",
    "torch_name",
]

POOLINGS: Mapping[str, Pooling] = {"mean": "mean", "cls": "cls", "lasttoken": "last"}
"""The poolings of attnserve.json, by their names in sentence-transformers."""

ACTIVATIONS = frozenset({"Identity", "Tanh", "ReLU", "GELU", "SiLU", "Sigmoid"})
"""Supported activations of a module Dense, by their names in ``torch.nn``."""

SCORE_CLASSES: Mapping[Activation, str] = {
    "sigmoid": "torch.nn.modules.activation.Sigmoid",
    "softmax": "torch.nn.modules.activation.Softmax",
    "identity": "torch.nn.modules.linear.Identity",
}
"""The supported activations of scores, with their classes."""

PROBLEMS: Mapping[str | None, Activation] = {
    "multi_label_classification": "sigmoid",
    "regression": "identity",
}
"""The activation of classifiers by ``problem_type`` of transformers; others have the default."""

EMBEDDING_MODULES = frozenset({"Pooling", "Dense", "Normalize", "LayerNorm"})
KINDS = (None, "SentenceTransformer", "CrossEncoder")

NETWORKS = ("Transformer", "MLMTransformer")
"""The modules with a network of transformers; MLMTransformer is that of older sparse encoders."""

NO_NETWORK = ModuleEntry.model_construct(type="", path="")

SPLADE = {"pooling_strategy": "max", "activation_function": "relu"}
"""The supported settings of a module SpladePooling."""

USE_LIBRARY = "use this model in sentence-transformers"

File = TypeVar("File", bound=SettingsFile)


@dataclass(frozen=True)
class Module:
    """A module: the name of its class, its configuration file, and the settings in it."""

    kind: str
    path: Path
    settings: SettingsFile

    @property
    def weights(self) -> Path:
        return self.path.with_name("model.safetensors")


@dataclass(frozen=True)
class FolderSettings:
    """The settings of a model folder.

    Attributes:
        network: The module with the network, one of ``NETWORKS``; empty without modules.json.
        modules: The other modules of modules.json; none without that file.
        library: config_sentence_transformers.json.
        transformer: The settings of the network's module.
        transformer_file: Their file.
        config: The path of config.json, which is read on first use.
    """

    folder: Path
    network: ModuleEntry
    modules: tuple[Module, ...]
    library: Library
    transformer: Transformer
    transformer_file: Path
    config: Path

    @cached_property
    def model(self) -> TransformersConfig:
        """The keys of config.json."""
        return parse_settings(self.config, TransformersConfig)

    @property
    def prompts(self) -> dict[str, str]:
        """Texts before an input; none if all are empty, as sentence-transformers saves them."""
        prompts = {name: text or "" for name, text in (self.library.prompts or {}).items()}
        return prompts if any(prompts.values()) else {}

    @property
    def default_prompt(self) -> str | None:
        """The name of the prompt for inputs that name none; None without one."""
        return self.library.default_prompt_name if self.prompts else None

    @property
    def prompt(self) -> str:
        """The text of the default prompt; empty without one."""
        return self.prompts.get(self.default_prompt or "", "")

    @property
    def prompt_fields(self) -> dict[str, Any]:
        """The fields of a record for prompts; a template of pairs contains the default prompt."""
        return given(prompts=self.prompts, default_prompt=self.default_prompt)

    @property
    def token_score(self) -> LogitScore | None:
        """The score of a generative reranker; None for other models."""
        settings = (module.settings for module in self.modules)
        return next((score for score in settings if isinstance(score, LogitScore)), None)

    @property
    def has_modules(self) -> bool:
        """Whether the folder has modules.json: sentence-transformers saved it."""
        return (self.folder / "modules.json").is_file()

    @property
    def states_messages(self) -> bool:
        """Whether the settings state that texts are written by the chat template."""
        return "message" in (self.transformer.modality_config or {})

    @property
    def infers_messages(self) -> bool:
        """Whether sentence-transformers writes texts by a chat template if the tokenizer has one.

        Its models before version 5.4 have modules.json, and plain texts.
        """
        return self.transformer.modality_config is None and not self.has_modules

    @property
    def is_cross_encoder(self) -> bool:
        """Whether sentence-transformers saved a model that scores pairs."""
        return self.library.model_type == "CrossEncoder"

    @property
    def is_sparse_encoder(self) -> bool:
        """Whether sentence-transformers saved a model that makes sparse vectors."""
        return (
            self.library.model_type == "SparseEncoder"
            or self.network.kind == "MLMTransformer"
            or any(module.kind == "SpladePooling" for module in self.modules)
        )

    @property
    def is_language_model(self) -> bool:
        """Whether the network predicts next tokens."""
        return self.token_score is not None or self.model.is_for("ForCausalLM")

    @property
    def _steps(self) -> tuple[Module, ...]:
        """The modules that make an embedding from hidden states, in order."""
        return tuple(module for module in self.modules if module.kind in EMBEDDING_MODULES)

    @property
    def head(self) -> tuple[Module, ...]:
        """``_steps``, if ``pooling`` and ``normalize`` of a record cannot express them.

        The graph must compute them.
        """
        return () if self._simple_pooling else self._steps

    @property
    def embedding(self) -> dict[str, Any]:
        """The fields of a record that make an embedding of hidden states.

        Without modules the pooling is the mean, or the last token of a language model. With a
        ``head`` it is "none".

        Raises:
            InvalidModel: A module is not supported, or the pooling leaves out prompts.
        """
        self._check_encoder()
        steps = self._steps
        is_decoder = self.model.is_for("ForCausalLM") and self.model.is_causal is not False
        default = "none" if steps else "last" if is_decoder else "mean"
        similarity = self.library.similarity_fn_name
        return {
            "pooling": self._simple_pooling or default,
            "normalize": bool(steps) and _normalizes(steps[-1]),
            **given(
                dimensions=self.library.truncate_dim,
                similarity=None if similarity == "cosine" else similarity,
            ),
            **self.prompt_fields,
        }

    @property
    def sparse_vectors(self) -> dict[str, Any]:
        """The fields of a record that make sparse vectors of the logits of tokens.

        The similarity is not one of them: callers compare sparse vectors.

        Raises:
            InvalidModel: A setting or module is not supported.
        """
        self.check_sparse()
        fields = {"pooling": "none", "normalize": False, "task": "fill-mask"}
        return fields | self.prompt_fields

    def check_sparse(self) -> None:
        """Check that sparse vectors are the largest log(1 + relu(logit)) over the tokens.

        Raises:
            InvalidModel: A setting or module is not supported.
        """
        kinds = [module.kind for module in self.modules]
        if self.has_modules and not (self.network.kind and kinds == ["SpladePooling"]):
            found = ", ".join(filter(None, [self.network.kind, *kinds]))
            raise InvalidModel(
                f"{self.folder / 'modules.json'}: the modules of a sparse encoder are {found}:"
                " expected Transformer and SpladePooling; others are not supported",
                USE_LIBRARY,
                code="export.module",
            )
        for module in self.modules:
            for key, supported in SPLADE.items():
                if (value := getattr(module.settings, key)) != supported:
                    raise InvalidModel(
                        f"{module.path}: {key} is {value}: expected {supported}, other sparse"
                        " vectors are not supported",
                        USE_LIBRARY,
                        code="export.sparse_pooling",
                    )
        if (limit := self.library.max_active_dims) is not None:
            raise InvalidModel(
                f"{self.folder / 'config_sentence_transformers.json'}: max_active_dims is {limit}:"
                " expected null, the number of weights of a sparse vector is not limited",
                "set it to null, and keep the largest weights of each vector yourself",
                code="export.sparse_pooling",
            )
        self._check_output("fill-mask", "logits")

    def activation(self, classes: int, *, of_problem: bool = True) -> Activation | None:
        """The function from logits to scores.

        Args:
            classes: The number of logits of a text.
            of_problem: Whether ``problem_type`` counts, if no cross-encoder settings name an
                activation.

        Returns:
            None for the default: softmax, or the sigmoid of a single logit. sentence-transformers
            returns the logits of several classes by default; they do not count as an activation.

        Raises:
            InvalidModel: The activation is not supported.
        """
        nested = self.model.sentence_transformers
        activation = (
            self.library.activation_fn
            or (nested and nested.activation_fn)
            or self.model.sbert_ce_default_activation_function  # sentence-transformers before 4
        )
        problem = PROBLEMS.get(self.model.problem_type) if of_problem else None
        if activation is None:
            return problem
        scores: dict[str, Activation] = {torch_name(c): a for a, c in SCORE_CLASSES.items()}
        if (name := torch_name(activation)) not in scores:
            raise InvalidModel(
                f"{self.folder}: activation_fn is {activation}: expected one of"
                f" {', '.join(scores)} of torch.nn",
                "remove it from config.json and config_sentence_transformers.json to serve the"
                " sigmoid of the logit",
                code="export.activation",
            )
        return problem if name == "Identity" and classes > 1 else scores[name]

    def record(self) -> Record:
        """The record that an ONNX file in this folder needs; empty without any setting.

        If the graph must compute the head, its output is sentence_embedding, as Optimum writes it.
        The graph of a sparse encoder has the output logits.

        Raises:
            InvalidModel: A setting is not supported.
        """
        path = self.folder / "modules.json"
        return Record.parse(self._stated(), path, "download the model again")

    def _stated(self) -> dict[str, Any]:
        """The fields of ``record``."""
        values = self.stated_of_text() | given(max_length=self.transformer.max_length)
        kinds = {module.kind for module in self.modules} - {"Dropout"}
        if self.states_messages:
            raise _malformed(
                self.transformer_file,
                "modality_config",
                "an ONNX file reads plain texts, found message: a chat template",
            )
        if self.is_sparse_encoder:
            return self.sparse_vectors | {"output": "logits"} | values
        if kinds == {"LogitScore"}:
            return values
        embedding = self.embedding
        if kinds:
            return embedding | given(output="sentence_embedding" if self.head else "") | values
        if embedding["pooling"] != "mean":
            values["pooling"] = embedding["pooling"]
        activation = self.activation(self.model.classes, of_problem=not self.is_cross_encoder)
        return values | self.prompt_fields | given(activation=activation)

    def stated_of_text(self) -> dict[str, Any]:
        """The fields of a record that concern the text."""
        return given(
            lower_case=self.transformer.do_lower_case,
            truncation_side=self.transformer.tokenizer_args.truncation_side,
        )

    @property
    def _simple_pooling(self) -> Pooling | None:
        """The pooling, if it is one of attnserve.json and nothing but normalization follows."""
        if not self._steps:
            return None
        first, *others = self._steps
        if not isinstance(first.settings, PoolingFile) or not all(map(_normalizes, others)):
            return None
        return POOLINGS.get("+".join(first.settings.modes))

    def _check_encoder(self) -> None:
        """Check that the modules make embeddings of texts, and that all of them are known."""
        listed = self.folder / "modules.json"
        if (kind := self.library.model_type) not in KINDS:
            raise InvalidModel(
                f"{self.folder / 'config_sentence_transformers.json'}: model_type is {kind}:"
                f" expected SentenceTransformer, CrossEncoder or SparseEncoder",
                "remove the file to use the network without it",
                code="settings.model_type",
            )
        for module in self.modules:
            self._check_module(module)
        if self._steps and not any(module.kind == "Pooling" for module in self._steps):
            raise InvalidModel(
                f"{listed}: no module Pooling: expected one, which makes one vector of a text",
                "add it, or remove modules.json to use the encoder with mean pooling",
                code="export.pooling",
            )
        if self._steps or (self.has_modules and not self.is_cross_encoder):
            self._check_output()

    def _check_module(self, one: Module) -> None:
        if one.kind not in EMBEDDING_MODULES | {"Dropout"}:
            raise InvalidModel(
                f"{self.folder / 'modules.json'}: the module {one.kind} is not supported",
                "remove it from modules.json to use the encoder without it",
                code="export.module",
            )
        settings = one.settings
        if isinstance(settings, PoolingFile) and not settings.include_prompt and self.prompts:
            raise InvalidModel(
                f"{one.path}: include_prompt is false: a pooling that leaves out the prompt is not"
                " supported",
                "set include_prompt to true, if the embeddings may differ",
                code="export.include_prompt",
            )
        if isinstance(settings, Dense):
            name = settings.activation_function
            if torch_name(name) not in ACTIVATIONS:
                expected = f"expected one of {', '.join(sorted(ACTIVATIONS))} of torch.nn"
                raise _malformed(one.path, "activation_function", f"{expected}, found {name}")

    def _check_output(
        self, task: str = "feature-extraction", output: str = "last_hidden_state"
    ) -> None:
        """Check that the network gives this output of plain texts."""
        transformer = self.transformer
        default = "feature-extraction" if self.network.kind == "Transformer" else task
        modality = transformer.modality_config
        text = modality.get("text") if modality else None
        entries: dict[str, tuple[Any, Any]] = {
            "transformer_task": (transformer.transformer_task or default, task),
            "module_output_name": (transformer.module_output_name, "token_embeddings"),
        }
        if modality is not None:
            names = text and text.method_output_name
            entries["modality_config"] = (sorted({*modality} & {"text", "message"}), ["text"])
            entries["method"] = (text and text.method, "forward")
            entries["method_output_name"] = (
                names[0] if isinstance(names, list) and len(names) == 1 else names,
                output,
            )
        for key, (value, expected_value) in entries.items():
            if value not in (None, expected_value):
                expected = f"expected {expected_value} for embeddings of texts, found {value}"
                raise _malformed(self.transformer_file, key, expected)


def read_settings(*folders: Path) -> FolderSettings:
    """The settings of a model, from the first of these folders that has a file.

    Raises:
        InvalidModel: A file is malformed, or has a key that is not known.
    """

    def find(*parts: str) -> Path:
        paths = [folder.joinpath(*parts) for folder in folders]
        return next((path for path in paths if path.is_file()), paths[-1])

    entries = _entries(find("modules.json"))
    network = next((entry for entry in entries if entry.kind in NETWORKS), NO_NETWORK)
    files = [find(network.path, name) for name in TRANSFORMER_FILES]
    file = next((path for path in files if path.is_file() and read_json(path)), files[0])
    library_file = find("config_sentence_transformers.json")
    settings = FolderSettings(
        find("modules.json").parent,
        network,
        tuple(
            _module(entry.kind, find(entry.path, "config.json"))
            for entry in entries
            if entry is not network
        ),
        parse_settings(library_file, Library),
        parse_settings(file, Transformer),
        file,
        find(network.path, "config.json"),
    )
    if settings.transformer.transformer_task == "fill-mask" and not settings.is_sparse_encoder:
        expected = "expected a SparseEncoder with a module SpladePooling"
        raise _malformed(file, "transformer_task", f"{expected} for fill-mask")
    default = settings.library.default_prompt_name
    if default is not None and default not in (settings.library.prompts or {}):
        expected = f"expected a name of prompts, found {default}"
        raise _malformed(library_file, "default_prompt_name", expected)
    return settings


def _module(kind: str, path: Path) -> Module:
    """A module with its configuration file; those of unknown modules are not read.

    Raises:
        InvalidModel: The file is malformed, or a pooling has none.
    """
    if kind not in MODULES:
        return Module(kind, path, SettingsFile())
    if kind in ("Pooling", "SpladePooling") and not (path.is_file() and read_json(path)):
        raise InvalidModel(
            f"{path}: the pooling is missing", "download the model again", code="export.pooling"
        )
    return Module(kind, path, parse_settings(path, MODULES[kind]))


def parse_settings(path: Path, kind: type[File]) -> File:
    """The settings in a JSON file; the defaults if it does not exist.

    Raises:
        InvalidModel: A value is invalid, or a key is not known.
    """
    content: Any = read_json(path) if path.is_file() else {}
    if not isinstance(content, dict):
        raise InvalidModel(
            f"{path}: expected a JSON object", "download the model again", code="export.config"
        )
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        raise _invalid(path, error) from error


def given(**values: Any) -> dict[str, Any]:
    """The values that are not None or empty, for fields of a record."""
    return {name: value for name, value in values.items() if value}


def torch_name(name: str) -> str:
    """The name of a class of ``torch.nn`` without its modules; "" for other classes."""
    return name.rpartition(".")[2] if name.startswith("torch.nn.") else ""


def _normalizes(module: Module) -> bool:
    return isinstance(module.settings, Normalize) and module.settings.is_of_texts


def _entries(path: Path) -> list[ModuleEntry]:
    if not path.is_file():
        return []
    try:
        return TypeAdapter(list[ModuleEntry]).validate_python(read_json(path))
    except ValidationError as error:
        if error.errors()[0]["type"] == "extra_forbidden":
            raise _invalid(path, error) from error
        raise InvalidModel(
            f"{path}: expected a list of modules with type and path",
            "download the model again",
            code="export.modules",
        ) from error


def _invalid(path: Path, error: ValidationError) -> InvalidModel:
    """The error for the first problem of a file. Unknown keys have a separate code."""
    first = error.errors()[0]
    parts = [str(part) for part in first["loc"] if not str(part).startswith("literal[")]
    key = ".".join(parts)
    if first["type"] == "extra_forbidden":
        return InvalidModel(
            f"{path}: {key} is {str(first['input'])[:80]!r}: this key is not known, and may change"
            " the result",
            "remove it, if the result may differ",
            code="settings.unknown_key",
        )
    return _malformed(path, key, f"{first['msg']}, found {str(first['input'])[:80]!r}")


def _malformed(path: Path, key: str, expected: str) -> InvalidModel:
    return InvalidModel(f"{path}: {key}: {expected}", "correct the file", code="export.config")
