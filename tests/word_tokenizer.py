"""A tokenizer whose tokens are the words of a text."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

from tokenizers import Tokenizer, models, pre_tokenizers, processors

TEXT = "[CLS] $A [SEP]"
PAIR = "[CLS] $A [SEP] $B:1 [SEP]:1"
"""Special tokens around a text, and around two texts, as BERT has them."""


def word_tokenizer(
    words: Sequence[str] | Mapping[str, int],
    *,
    single: str | None = None,
    pair: str | None = None,
    unknown: str = "[UNK]",
) -> Tokenizer:
    """A tokenizer that splits texts at spaces and punctuation.

    Args:
        words: The words by id, or the id of each word.
        single: The template of a text; without it, no special tokens are added.
        pair: The template of two texts.
        unknown: The word in place of all others.
    """
    ids = words if isinstance(words, Mapping) else {word: id for id, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(dict(ids), unk_token=unknown))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    if single is not None:
        special = dict.fromkeys(re.findall(r"\[\w+\]", f"{single} {pair}"))
        tokenizer.post_processor = processors.TemplateProcessing(
            single=single, pair=pair, special_tokens=[(word, ids[word]) for word in special]
        )
    return tokenizer


def panicking(tokenizer: Tokenizer) -> str:
    """The tokenizer.json of one that panics on all texts with other characters than "a"."""
    content = json.loads(tokenizer.to_str())
    content["normalizer"] = {"type": "Replace", "pattern": {"String": "a"}, "content": ""}
    content["pre_tokenizer"] = {"type": "FixedLength", "length": 0}
    return json.dumps(content)
