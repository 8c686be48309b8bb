"""The configuration files of a model folder, as data models: which keys are read.

A class is one JSON file of transformers or sentence-transformers, or a part of one. A key that is
not a field is refused by name, because it may change vectors or scores. ``ignored`` lists the keys
that do not change them, with reasons. Files of transformers hold many keys of the network, which
the ONNX graph computes already: their classes read some keys and leave the rest.

The names are those that sentence-transformers 6.2 and transformers 5 read, with the older names
that they still accept. Nothing of both libraries is imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, cast

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt, model_validator

from attnserve.literals import Side

__all__ = [
    "FILES",
    "LEGACY_MODES",
    "MODULES",
    "TRANSFORMER_FILES",
    "Dense",
    "Dropout",
    "LayerNorm",
    "Library",
    "LogitScore",
    "Mode",
    "ModuleEntry",
    "Normalize",
    "Pooling",
    "SettingsFile",
    "SpladePooling",
    "TokenizerConfig",
    "Transformer",
    "TransformersConfig",
]

TRANSFORMER_FILES = tuple(
    f"sentence_{name}_config.json"
    for name in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
"""Names of the file of the module Transformer; the first one that holds keys is read."""

WIDTH = "the weights have this size"
PLACE = "where and how the library loads the files"
SPEED = "how the library computes, not its result"

LOADING = dict.fromkeys(
    ("cache_dir", "code_revision", "local_files_only", "revision", "token", "trust_remote_code"),
    PLACE,
)
"""Arguments of every ``from_pretrained``, with the reason why they are ignored."""

Mode = Literal["cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"]

LEGACY_MODES: Mapping[str, Mode] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""Keys of poolings before sentence-transformers 5, in the order of their joined vectors."""

POSITIONS_AFTER_PADDING = frozenset(
    {
        "camembert",
        "data2vec-text",
        "ibert",
        "lilt",
        "longformer",
        "luke",
        "markuplm",
        "mpnet",
        "roberta",
        "roberta-prelayernorm",
        "xlm-roberta",
        "xlm-roberta-xl",
        "xmod",
    }
)
"""Values of ``model_type`` whose position ids start at ``pad_token_id`` + 1."""

N_POSITIONS = frozenset({"codegen", "ctrl", "gpt2", "gpt_bigcode", "gptj", "openai-gpt"})
"""Values of ``model_type`` that state their positions as ``n_positions``."""

ROTARY_TABLES = frozenset({"codegen", "gptj", "roformer"})
"""Values of ``model_type`` whose rotary angles are a table with one row for each position."""


class SettingsFile(BaseModel):
    """Base class: unknown keys are refused, ``ignored`` ones are dropped."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        frozen=True,
        protected_namespaces=(),
        defer_build=True,  # all classes at once take a tenth of a second, in each process
    )

    ignored: ClassVar[Mapping[str, str]] = {}
    """Keys that do not change the result, with the reason."""

    @model_validator(mode="before")
    @classmethod
    def _read(cls, content: Any) -> Any:
        if not isinstance(content, dict):
            return content
        keys = cls.renamed(cast(dict[str, Any], content))
        return {key: value for key, value in keys.items() if key not in cls.ignored}

    @classmethod
    def renamed(cls, keys: dict[str, Any]) -> dict[str, Any]:
        """The keys as this class names them; other versions of the libraries have other names."""
        return keys


class ModuleEntry(SettingsFile):
    """An entry of modules.json, which lists the modules in order."""

    ignored = {
        "idx": "the order of the list counts",
        "name": "a name for people",
        "kwargs": "names of arguments that a caller may pass; none is passed here",
    }

    type: str
    """The class of the module; only those of sentence-transformers are read."""
    path: Annotated[str, Field(pattern=r"^(\w[\w.-]{0,98})?$")]
    """The folder of the module inside the model folder; empty for the model folder."""

    @property
    def kind(self) -> str:
        """The name of a class of sentence-transformers; the whole name of others."""
        package, _, name = self.type.partition(".")
        return name.rpartition(".")[2] if package == "sentence_transformers" else self.type


class Library(SettingsFile):
    """config_sentence_transformers.json: settings of the whole model."""

    ignored = {
        "__version__": "versions of libraries",
        "requirements": "versions of libraries",
        "keep_in_fp32_modules": "precision under autocast",
    }

    model_type: str | None = None
    """SentenceTransformer, CrossEncoder or SparseEncoder. Others are refused."""
    prompts: dict[str, str | None] | None = None
    """Texts before an input, by name."""
    default_prompt_name: str | None = None
    """The prompt for inputs that name none."""
    similarity_fn_name: Literal["cosine", "dot"] | None = None
    """The similarity of two vectors. Others are refused."""
    truncate_dim: PositiveInt | None = None
    """The number of dimensions to keep."""
    activation_fn: str | None = None
    """The activation of the scores of a cross-encoder, a class of torch.nn."""
    max_active_dims: PositiveInt | None = None
    """The maximum number of weights of a sparse vector. Must be null for sparse encoders."""


class CallArguments(SettingsFile):
    """``common`` and ``text`` of ``processing_kwargs``: arguments of the tokenizer's call."""

    ignored = {
        "padding": "padding is masked",
        "padding_side": "padding is masked",
        "pad_to_multiple_of": "padding is masked",
        "return_tensors": SPEED,
        "return_attention_mask": SPEED,
        "logits_to_keep": SPEED,
        "verbose": SPEED,
    }

    max_length: PositiveInt | None = None
    """Maximum number of tokens; overrides all other lengths."""
    truncation: Literal[True, "longest_first"] = True
    """Truncation of pairs: the longer text first. Other values are refused."""
    add_special_tokens: Literal[True] = True
    """Must be true."""


class ProcessingArguments(SettingsFile):
    """``processing_kwargs``: arguments of calls, by the kind of input."""

    ignored = {
        "audio": "only texts are read",
        "image": "only texts are read",
        "video": "only texts are read",
    }

    common: CallArguments = CallArguments()
    """Arguments for inputs of any kind."""
    text: CallArguments = CallArguments()
    """Arguments for texts."""
    chat_template: dict[str, Any] = {}
    """Variables of the chat template of a reranker."""


class TokenizerArguments(SettingsFile):
    """``tokenizer_args`` or ``processor_kwargs``; they override tokenizer_config.json."""

    ignored = {
        **LOADING,
        "use_fast": PLACE,
        "padding_side": "padding is masked",
    }

    model_max_length: PositiveInt | None = None
    """Maximum number of tokens."""
    truncation_side: Side | None = None
    """The side at which long texts lose tokens."""


class ModelArguments(SettingsFile):
    """``model_args`` or ``model_kwargs``; none of them changes an ONNX graph."""

    ignored = {
        **LOADING,
        "use_safetensors": PLACE,
        **dict.fromkeys(
            (
                "attn_implementation",
                "device_map",
                "dtype",
                "low_cpu_mem_usage",
                "torch_dtype",
                "unpad_inputs",
                "use_memory_efficient_attention",
            ),
            SPEED,
        ),
        "add_pooling_layer": "the pooler of transformers is not used",
    }


class ConfigArguments(SettingsFile):
    """``config_args`` or ``config_kwargs``; those that change the network are refused."""

    ignored = {
        **LOADING,
        **dict.fromkeys(("unpad_inputs", "use_cache", "use_memory_efficient_attention"), SPEED),
    }


class Modality(SettingsFile):
    """An entry of ``modality_config``: the forward method for one kind of input."""

    ignored = {"format": "how messages are written; see ``message``"}

    method: str
    """The method of the network: forward."""
    method_output_name: str | list[str]
    """The output that is used: last_hidden_state of encoders, logits of others."""


class Transformer(SettingsFile):
    """sentence_bert_config.json, or one of its older names: the tokenizer and the network."""

    ignored = {"unpad_inputs": SPEED, "cache_dir": PLACE}

    max_seq_length: PositiveInt | None = None
    """Maximum number of tokens of a text; overrides that of the tokenizer."""
    do_lower_case: bool | None = None
    """Whether texts are converted to lower case before they are tokenized."""
    transformer_task: (
        Literal[
            "feature-extraction",
            "sequence-classification",
            "text-generation",
            "any-to-any",
            "fill-mask",
        ]
        | None
    ) = None
    """The head of the network. Others are refused. ``fill-mask`` is for sparse encoders only."""
    modality_config: dict[str, Modality] | None = None
    """The method for texts. ``message`` (texts in a chat template) is for rerankers only."""
    module_output_name: str | None = None
    """Name of the output: token_embeddings, scores or causal_logits."""
    processing_kwargs: ProcessingArguments = ProcessingArguments()
    """Arguments of the tokenizer's call."""
    tokenizer_args: TokenizerArguments = TokenizerArguments()
    """Arguments that load the tokenizer; also named ``processor_kwargs``."""
    model_args: ModelArguments = ModelArguments()
    """Arguments that load the network; also named ``model_kwargs``."""
    config_args: ConfigArguments = ConfigArguments()
    """Arguments that load config.json; also named ``config_kwargs``."""
    tokenizer_name_or_path: None = None
    """Must be null: the tokenizer is in the folder."""
    query_length: None = None
    """Must be null."""
    document_length: None = None
    """Must be null."""
    query_expansion: None = None
    """Must be null."""

    @classmethod
    def renamed(cls, keys: dict[str, Any]) -> dict[str, Any]:
        """Newer names of arguments as the older ones, and null as no argument."""
        keys = dict(keys)
        for old, new in (
            ("tokenizer_args", "processor_kwargs"),
            ("model_args", "model_kwargs"),
            ("config_args", "config_kwargs"),
        ):
            if new in keys:
                keys.setdefault(old, keys.pop(new))
        parts = ("processing_kwargs", "tokenizer_args", "model_args", "config_args")
        return {key: x for key, x in keys.items() if x is not None or key not in parts}

    @property
    def max_length(self) -> int | None:
        call = self.processing_kwargs
        return (
            call.common.max_length
            or call.text.max_length
            or self.tokenizer_args.model_max_length
            or self.max_seq_length
        )


class Pooling(SettingsFile):
    """config.json of a module Pooling: one vector per text from its token vectors."""

    ignored = {"embedding_dimension": WIDTH, "word_embedding_dimension": WIDTH}

    pooling_mode: Mode | Annotated[list[Mode], Field(min_length=1)] = "mean"
    """The pooling, or several whose vectors are joined. The older boolean keys
    ``pooling_mode_...`` are read too."""
    include_prompt: bool = True
    """Must be true if the model has prompts."""

    @classmethod
    def renamed(cls, keys: dict[str, Any]) -> dict[str, Any]:
        """The boolean keys before sentence-transformers 5 as ``pooling_mode``."""
        active = [mode for key, mode in LEGACY_MODES.items() if keys.get(key)]
        rest = {key: value for key, value in keys.items() if key not in LEGACY_MODES}
        return rest if len(rest) == len(keys) else {"pooling_mode": active or "mean", **rest}

    @property
    def modes(self) -> tuple[Mode, ...]:
        one = self.pooling_mode
        return (one,) if isinstance(one, str) else tuple(one)


class ValueModule(SettingsFile):
    """Base class of modules that map one value (of tokens or of a text) to another."""

    module_input_name: Literal["sentence_embedding", "token_embeddings"] = "sentence_embedding"
    """Name of the input value."""
    module_output_name: Literal["sentence_embedding", "token_embeddings"] | None = None
    """Name of the output value (default: the input value)."""

    @property
    def output(self) -> str:
        return self.module_output_name or self.module_input_name


class Dense(ValueModule):
    """config.json of a module Dense: a linear layer with an activation."""

    ignored = {"in_features": WIDTH, "out_features": WIDTH, "bias": WIDTH}

    activation_function: str = "torch.nn.modules.activation.Tanh"
    """The activation, a class of torch.nn."""
    use_residual: bool = False
    """Whether the input is added to the output."""


class Normalize(ValueModule):
    """config.json of a module Normalize, if there is one: vectors of length one."""

    @property
    def is_of_texts(self) -> bool:
        return {self.module_input_name, self.output} == {"sentence_embedding"}


class LayerNorm(ValueModule):
    """config.json of a module LayerNorm."""

    ignored = {"dimension": WIDTH}


class Dropout(SettingsFile):
    """config.json of a module Dropout, which has no effect at inference."""

    ignored = {"dropout": "for training"}


class SpladePooling(SettingsFile):
    """config.json of a module SpladePooling: one sparse vector per text from token logits."""

    ignored = {
        "embedding_dimension": "the logits have this size",
        "word_embedding_dimension": "the logits have this size",
        "chunk_size": SPEED,
    }

    pooling_strategy: Literal["max", "sum"] = "max"
    """Must be max."""
    activation_function: Literal["relu", "log1p_relu"] = "relu"
    """Must be relu."""


class LogitScore(SettingsFile):
    """config.json of a module LogitScore: the score of a reranker that is a language model."""

    true_token_id: NonNegativeInt
    """The token whose logit is the score."""
    false_token_id: NonNegativeInt | None = None
    """The token whose logit is subtracted."""
    module_input_name: Literal["causal_logits"] = "causal_logits"
    """Must be causal_logits."""


MODULES: Mapping[str, type[SettingsFile]] = {
    kind.__name__: kind
    for kind in (Pooling, Dense, Normalize, LayerNorm, Dropout, SpladePooling, LogitScore)
}
"""The modules that are read after the network, by the name of their class. Others are refused."""


class CrossEncoder(SettingsFile):
    """``sentence_transformers`` in config.json."""

    ignored = {"version": "version of the library"}

    activation_fn: str | None = None
    """The activation of scores, a class of torch.nn."""


class TransformersConfig(SettingsFile):
    """config.json of transformers: the keys of the tokenizer and of scores."""

    model_config = ConfigDict(extra="ignore")

    model_type: str | None = None
    """Determines where position ids start, and the tokenizer's class if no file names it."""
    tokenizer_class: Any = None
    """The tokenizer's class, if tokenizer_config.json names none."""
    architectures: Any = None
    """A name that ends in ForCausalLM or ForSequenceClassification determines the task."""
    is_causal: Any = True
    """False for a language model whose tokens attend to all others: mean pooling by default."""
    max_position_embeddings: Any = None
    """The maximum number of tokens."""
    n_positions: Any = None
    """The maximum number of tokens in configurations of GPT-2."""
    pad_token_id: Any = 1
    """Position ids of RoBERTa's family start after it."""
    id2label: Any = None
    """Names of the classes, by number."""
    num_labels: Any = None
    """The number of classes, if ``id2label`` is absent."""
    problem_type: (
        Literal["regression", "single_label_classification", "multi_label_classification"] | None
    ) = None
    """Problem type of classifiers, which selects the activation identity, softmax or sigmoid."""
    sentence_transformers: CrossEncoder | None = None
    """Settings of cross-encoders (sentence-transformers 4 and 5)."""
    sbert_ce_default_activation_function: str | None = None
    """The activation of cross-encoders (before sentence-transformers 4)."""
    relative: bool = Field(default=False, exclude=True)  # not a key of the file
    """Whether positions are rotary or relative, so that no table limits them."""

    @classmethod
    def renamed(cls, keys: dict[str, Any]) -> dict[str, Any]:
        """The keys, with ``relative``."""
        rotary = str(keys.get("model_type")) not in ROTARY_TABLES and any(
            "rope" in key or "rotary" in key for key in keys
        )
        biased = keys.get("position_biased_input", True)
        return {**keys, "relative": rotary or (bool(keys.get("relative_attention")) and not biased)}

    @property
    def first_position(self) -> int:
        """The position id of the first token."""
        if self.model_type not in POSITIONS_AFTER_PADDING:
            return 0
        return self.pad_token_id + 1 if type(self.pad_token_id) is int else 0

    @property
    def positions(self) -> int | None:
        """The maximum number of tokens of the positions; None if unknown."""
        stated = self.max_position_embeddings
        if stated is None and self.model_type in N_POSITIONS:
            stated = self.n_positions
        left = stated - self.first_position if type(stated) is int else 0
        return left if left > 0 else None

    @property
    def table_size(self) -> int | None:
        """``positions``, if they are a table; longer texts would exceed it."""
        return None if self.relative else self.positions

    @property
    def classes(self) -> int:
        """The number of classes, as transformers counts them."""
        if isinstance(self.id2label, (dict, list)) and self.id2label:
            return len(cast(dict[str, Any], self.id2label))
        return self.num_labels if type(self.num_labels) is int else 2

    @property
    def labels(self) -> Any:
        """``id2label``; transformers omits it for its default of two classes."""
        if self.id2label is None and self.is_for("ForSequenceClassification"):
            return [f"LABEL_{at}" for at in range(self.classes)]
        return self.id2label

    def is_for(self, task: str) -> bool:
        """Whether the class of the network ends in this name, such as "ForCausalLM"."""
        names: Any = self.architectures
        names = cast(list[Any], names) if isinstance(names, list) else []
        return any(str(name).endswith(task) for name in names)


class TokenizerConfig(SettingsFile):
    """tokenizer_config.json of transformers: settings that tokenizer.json does not contain."""

    model_config = ConfigDict(extra="ignore")

    model_max_length: Any = None
    """Maximum number of tokens, if nothing else sets it (``max_len`` in old files)."""
    truncation_side: Side | None = None
    """The side at which long texts lose tokens; overrides that in tokenizer.json."""
    pad_token: Any = None
    """The padding token; overrides that in tokenizer.json. Without ``added_tokens_decoder``,
    ``pad_token`` of special_tokens_map.json overrides both."""
    model_input_names: list[str] | None = None
    """Inputs of the network; without ``token_type_ids``, these are zeros."""
    tokenizer_class: Any = None
    """For BERT's and GPT-2's family, the following keys override tokenizer.json, as in
    transformers."""
    do_lower_case: bool | None = True
    """Whether words are converted to lower case (BERT's family)."""
    strip_accents: bool | None = None
    """Whether accents are removed (BERT's family)."""
    tokenize_chinese_chars: bool | None = True
    """Whether Chinese characters are words (BERT's family)."""
    split_special_tokens: bool | None = False
    """Whether special tokens in a text are read as plain text."""
    add_prefix_space: bool | None = False
    """Whether a text gets a space before it (GPT-2's family)."""
    keep_accents: bool | None = None
    """Whether accents are kept. For tokenizers of SentencePiece, where versions of transformers
    differ, this key, ``split_by_punct``, ``do_lower_case`` and ``add_prefix_space`` must agree with
    tokenizer.json."""
    split_by_punct: bool | None = None
    """Whether punctuation is separated."""
    added_tokens_decoder: dict[str, dict[str, Any]] | None = None
    """Added tokens by id; their flags override those of tokenizer.json."""
    additional_special_tokens: list[str | dict[str, Any]] | None = None
    """Special tokens that tokenizer.json may lack (``extra_special_tokens`` in newer files)."""

    @classmethod
    def renamed(cls, keys: dict[str, Any]) -> dict[str, Any]:
        newer = keys.get("extra_special_tokens")
        return {
            "model_max_length": keys.get("max_len"),
            "additional_special_tokens": [*newer.values()] if isinstance(newer, dict) else newer,
            **keys,
        }


FILES: tuple[type[SettingsFile], ...] = (
    ModuleEntry,
    Library,
    Transformer,
    ProcessingArguments,
    CallArguments,
    TokenizerArguments,
    ModelArguments,
    ConfigArguments,
    Modality,
    Pooling,
    Dense,
    Normalize,
    LayerNorm,
    Dropout,
    SpladePooling,
    LogitScore,
    TransformersConfig,
    CrossEncoder,
    TokenizerConfig,
)
"""All files and parts of files, in the order of the documentation."""
