"""Read a tokenizer: tokenizer.json, and the settings that transformers applies to it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, normalizers, pre_tokenizers

from attnserve.models.artifact import Artifact
from attnserve.models.folder_settings import parse_settings
from attnserve.models.settings_files import TokenizerConfig, TransformersConfig
from attnserve.models.tokenizer import TextEncoder, tokenizer_errors
from graph_passes.errors import InvalidData, InvalidModel

__all__ = ["UNBOUNDED", "load_encoder", "longest_text", "lower_case"]

PAD_TOKENS = ("[PAD]", "<pad>")
UNBOUNDED = 1_000_000
"""Values of ``model_max_length`` from which there is no limit; Hugging Face writes 1e30."""

BERT_TOKENIZERS = frozenset(
    f"{name}Tokenizer"
    for name in (
        "Bert",
        "ConvBert",
        "DPRContextEncoder",
        "DPRQuestionEncoder",
        "DPRReader",
        "DistilBert",
        "Electra",
        "Funnel",
        "LayoutLM",
        "Lxmert",
        "MPNet",
        "MobileBert",
        "RetriBert",
        "Splinter",
        "SqueezeBert",
    )
)
"""Values of ``tokenizer_class`` whose normalizer transformers makes by tokenizer_config.json."""

GPT2_TOKENIZERS = frozenset(
    f"{name}Tokenizer" for name in ("Bart", "Deberta", "GPT2", "LED", "Longformer", "Roberta")
)
"""Values of ``tokenizer_class`` whose space before a text is that of tokenizer_config.json."""

BERT_MODELS = frozenset({
    "align", "bark", "bert", "blip", "bros", "chinese_clip", "convbert", "distilbert", "dpr",
    "electra", "ernie", "flava", "funnel", "git", "grounding-dino", "layoutlm", "lxmert",
    "megatron-bert", "mm-grounding-dino", "mobilebert", "mpnet", "nezha", "nomic_bert", "qdqbert",
    "realm", "retribert", "splinter", "squeezebert", "tvp", "vilt", "visual_bert",
})  # fmt: skip
"""Values of ``model_type`` whose tokenizers are in ``BERT_TOKENIZERS`` if no file names a class."""

SENTENCEPIECE_KEYS: Mapping[str, tuple[str, ...]] = {
    "albert": ("do_lower_case", "keep_accents", "add_prefix_space"),
    "debertav2": ("do_lower_case", "split_by_punct", "add_prefix_space"),
    "xlnet": ("do_lower_case",),
    **dict.fromkeys(("barthez", "bigbird", "camembert", "xlmroberta"), ("add_prefix_space",)),
}
"""Keys of tokenizer_config.json that transformers 5 applies and transformers 4 does not, by the
class of the tokenizer, or by ``model_type``, in lower case."""


def load_encoder(artifact: Artifact, tokenizer: Path | None = None) -> TextEncoder:
    """The text encoder of an artifact.

    The maximum length of a text comes from the record, else from tokenizer_config.json. It is
    limited by the table of positions. Texts lose tokens at the side that the record names, else
    tokenizer_config.json, else tokenizer.json.

    Args:
        tokenizer: Another tokenizer.json, or its folder; None for that of the artifact.
            tokenizer_config.json is read in the same folder, if it exists.

    Raises:
        InvalidData: The file does not exist.
        InvalidModel: The file is not a valid tokenizer.json, or tokenizer_config.json or
            config.json is invalid.
        InvalidArgument: The maximum length allows only special tokens.
    """
    path = tokenizer or artifact.tokenizer or artifact.folder
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise InvalidData(
            f"{file}: no such file; text input needs the model's tokenizer",
            "pass the path of its tokenizer.json as `tokenizer`",
            code="text.no_tokenizer",
        )
    with tokenizer_errors(
        InvalidModel,
        f"{file}: not a tokenizer.json",
        "copy it again; convert a vocab.txt or .model file first",
        "text.not_tokenizer",
    ):
        file_tokenizer = Tokenizer.from_str(file.read_text(encoding="utf-8"))
    config = parse_settings(file.with_name("tokenizer_config.json"), TokenizerConfig)
    settings, record = artifact.settings, artifact.record
    with tokenizer_errors(
        InvalidModel, f"{file}: the tokenizer fails", "copy it again", "text.tokenizer_failed"
    ):
        side = (file_tokenizer.truncation or {}).get("direction", "right")
        _configure(file_tokenizer, config, settings)
        if record.lower_case:
            lower_case(file_tokenizer)
        return TextEncoder(
            file_tokenizer,
            pad_id=_pad_id(file_tokenizer, config, file, settings),
            max_length=_longest(artifact, config),
            padding=record.padding or "right",
            template=record.template,
            first_position=artifact.first_position,
            truncation_side=record.truncation_side or config.truncation_side or side,
            has_types="token_type_ids" in (config.model_input_names or ("token_type_ids",)),
        )


def longest_text(artifact: Artifact) -> int | None:
    """The maximum number of tokens of a text, as of ``load_encoder``; None for no limit.

    Raises:
        InvalidModel: tokenizer_config.json or config.json is invalid.
    """
    file = artifact.tokenizer or artifact.folder / "tokenizer.json"
    return _longest(
        artifact, parse_settings(file.with_name("tokenizer_config.json"), TokenizerConfig)
    )


def _longest(artifact: Artifact, config: TokenizerConfig) -> int | None:
    settings = artifact.settings
    limits = [artifact.max_length, settings.table_size]
    if artifact.max_length is None:
        stated_length = config.model_max_length
        is_bounded = isinstance(stated_length, int) and 0 < stated_length <= UNBOUNDED
        limits = [stated_length if is_bounded else None, settings.positions]
    return min((limit for limit in limits if limit), default=None)


def lower_case(tokenizer: Tokenizer) -> None:
    """Convert texts to lower case before anything else, as ``do_lower_case`` does."""
    normalizer: Any = tokenizer.normalizer
    rest = [] if normalizer is None else [normalizer]
    tokenizer.normalizer = normalizers.Sequence([normalizers.Lowercase(), *rest])


def _configure(tokenizer: Tokenizer, config: TokenizerConfig, model: TransformersConfig) -> None:
    """Apply the settings that transformers applies after reading tokenizer.json."""
    stated = config.tokenizer_class or model.tokenizer_class
    name = str(stated).removesuffix("Fast")
    if name in BERT_TOKENIZERS or (stated is None and model.model_type in BERT_MODELS):
        tokenizer.normalizer = normalizers.BertNormalizer(
            handle_chinese_chars=bool(config.tokenize_chinese_chars),
            strip_accents=config.strip_accents,
            lowercase=bool(config.do_lower_case),
        )
    if config.split_special_tokens:
        tokenizer.encode_special_tokens = True
    kind = re.sub(r"[-_]|Tokenizer.*", "", str(stated or model.model_type)).lower()
    _check_keys(tokenizer, config, SENTENCEPIECE_KEYS.get(kind, ()))
    before: Any = tokenizer.pre_tokenizer
    if name in GPT2_TOKENIZERS and isinstance(before, pre_tokenizers.ByteLevel):
        before.add_prefix_space = bool(config.add_prefix_space)
        tokenizer.pre_tokenizer = before
    # A token without an id would get one that the network does not have.
    _add_tokens(tokenizer, config)
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    texts = map(_content, config.additional_special_tokens or [])
    tokenizer.add_special_tokens(
        [text for text in texts if text not in known and tokenizer.token_to_id(text) is not None]
    )


def _check_keys(tokenizer: Tokenizer, config: TokenizerConfig, keys: Sequence[str]) -> None:
    """Check that tokenizer.json does what these keys state.

    Raises:
        InvalidModel: tokenizer.json does the opposite.
    """
    parts: tuple[Any, Any] = (tokenizer.normalizer, tokenizer.pre_tokenizer)
    normalizer, before = (b"" if part is None else part.__getstate__() for part in parts)
    done = {
        "do_lower_case": b'"Lowercase"' in normalizer,
        "keep_accents": b'"StripAccents"' not in normalizer,
        "split_by_punct": b'"Punctuation"' in before,
        "add_prefix_space": b'"prepend_scheme":"never"' not in before,
    }
    for key in keys:
        stated = getattr(config, key)
        if key in config.model_fields_set and bool(stated) != done[key]:
            raise InvalidModel(
                f"tokenizer_config.json: {key} is {stated}, but tokenizer.json does the opposite:"
                " versions of transformers differ",
                "correct the one that the model was not trained with",
                code="text.contradiction",
            )


def _add_tokens(tokenizer: Tokenizer, config: TokenizerConfig) -> None:
    """Add the tokens of ``added_tokens_decoder``; their flags override those of tokenizer.json.

    Raises:
        InvalidModel: A token would get another id.
    """
    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    for number, entry in sorted(
        (config.added_tokens_decoder or {}).items(), key=lambda item: int(item[0])
    ):
        content, size = entry["content"], tokenizer.get_vocab_size()
        if tokenizer.token_to_id(content) is None and size != int(number):
            raise InvalidModel(
                f"tokenizer_config.json: added_tokens_decoder: the id of {content!r} is {number},"
                f" but tokenizer.json has {size} tokens without it",
                "remove it, or add it to tokenizer.json",
                code="text.contradiction",
            )
        token = AddedToken(content, **{flag: entry[flag] for flag in flags if flag in entry})
        add = tokenizer.add_special_tokens if token.special else tokenizer.add_tokens
        add([token])


def _content(token: Any) -> str:
    """The text of a token in tokenizer_config.json, which is a string or an object."""
    return str(token.get("content") if isinstance(token, dict) else token)


def _pad_id(
    tokenizer: Tokenizer, config: TokenizerConfig, file: Path, model: TransformersConfig
) -> int:
    """The id of the pad token, from the first file that states one in the vocabulary.

    As in transformers, special_tokens_map.json overrides tokenizer_config.json, unless the latter
    has ``added_tokens_decoder``, and both override tokenizer.json. Decoders find the last token of
    a text by the pad token of config.json.
    """
    stated = [config.pad_token]
    if config.added_tokens_decoder is None:
        special = parse_settings(file.with_name("special_tokens_map.json"), TokenizerConfig)
        stated.insert(0, special.pad_token)
    for token in stated:
        found = None if token is None else tokenizer.token_to_id(_content(token))
        if found is not None:
            return found
    if tokenizer.padding is not None:
        return int(tokenizer.padding["pad_id"])
    pad_id = model.pad_token_id if "pad_token_id" in model.model_fields_set else None
    if type(pad_id) is int and pad_id >= 0:
        return pad_id
    return next((x for x in map(tokenizer.token_to_id, PAD_TOKENS) if x is not None), 0)
