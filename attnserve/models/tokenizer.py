"""Tokenize texts and pad them to the inputs of a model.

Calibration, evaluation, benchmarks and the service share this module. It needs only numpy and
``tokenizers``.

Dimensions: B texts in a batch, S tokens of the longest text.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property, partial
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import numpy as np
from tokenizers import Tokenizer

from attnserve.literals import Padding, Side
from attnserve.runtime.interface import Session
from graph_passes.errors import AttnserveError, InvalidArgument, InvalidData

if TYPE_CHECKING:
    from jaxtyping import Bool, Int

__all__ = [
    "Encoding",
    "Text",
    "TextEncoder",
    "TextInput",
    "Token",
    "model_inputs",
    "text_input",
    "tokenizer_errors",
]

FILLED = ("input_ids", "attention_mask", "token_type_ids", "position_ids")
INTEGERS = {"tensor(int64)": np.dtype(np.int64), "tensor(int32)": np.dtype(np.int32)}
FLOATS = {"tensor(float)": np.dtype(np.float32), "tensor(float16)": np.dtype(np.float16)}

Text = str | tuple[str, str]
"""A text, or a pair of texts such as a query and a document."""


@dataclass(frozen=True)
class TextInput:
    """An input of a model that takes texts.

    Attributes:
        dtype: Its data type.
        cache: For a cache, the shape of an empty one after the batch axis. Caches stay empty,
            because texts are independent.
    """

    dtype: np.dtype[Any]
    cache: tuple[int, ...] | None = None


def text_input(name: str, dtype: np.dtype[Any], shape: Sequence[Any]) -> TextInput:
    """The input of this name, type and shape, with integers for fixed axes.

    A cache has "past" in its name and four axes, of which the batch is the first, and one is the
    length. Caches of an encoder's tokens are excluded, because they are never empty.
    """
    lengths = [size for size in shape[1:] if not isinstance(size, int)]
    is_cache = "past" in name.lower() and len(shape) == 4 and len(lengths) == 1
    if not is_cache or re.search("encoder|cross", name.lower()):
        return TextInput(dtype)
    return TextInput(dtype, tuple(size if isinstance(size, int) else 0 for size in shape[1:]))


@dataclass(frozen=True, slots=True)
class Encoding:
    """The token ids of a text or pair, with special tokens; ``len()`` is their number."""

    ids: list[int]
    type_ids: list[int]

    @classmethod
    def of(cls, ids: list[int]) -> Encoding:
        """The encoding of one text with these ids."""
        return cls(ids, [0] * len(ids))

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, slots=True)
class Token:
    """A token: the characters ``start`` to ``stop`` of a text, or the name of a special token."""

    id: int
    text: str
    special: bool
    start: int
    stop: int


@dataclass(frozen=True, eq=False, repr=False)
class TextEncoder:
    """An immutable, thread-safe tokenizer.

    Attributes:
        tokenizer: The tokenizer; its truncation and padding are switched off.
        pad_id: Id of the pad token. RoBERTa derives positions from it.
        max_length: Maximum number of tokens of a text, with special tokens; None for no limit.
        padding: The side of padding in a batch.
        template: The text of a pair, with {query} and {document} in place of the two texts. It
            contains all special tokens. None joins pairs as the tokenizer does.
        first_position: The position id of the first token.
        truncation_side: The side at which long texts lose tokens.
        has_types: Whether token_type_ids tell the two texts of a pair apart; False for zeros.
        length: The only number of tokens that the model takes; None for any number.

    Raises:
        InvalidArgument: ``max_length`` allows only special tokens.
    """

    tokenizer: Tokenizer
    _: KW_ONLY
    pad_id: int
    max_length: int | None = None
    padding: Padding = "right"
    template: str | None = None
    first_position: int = 0
    truncation_side: Side = "right"
    has_types: bool = True
    length: int | None = None

    def __post_init__(self) -> None:
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        self.tokenizer.encode("a")  # a tokenizer that fails is refused when it is loaded
        self._check_length(self.max_length)

    def with_length(self, length: int | None) -> TextEncoder:
        """This encoder for a model that takes ``length`` tokens only; None for any number.

        Longer texts are truncated, and shorter ones are padded.
        """
        if length is None:
            return self
        return replace(self, length=length, max_length=min(self.max_length or length, length))

    @cached_property
    def _template(self) -> _Template | None:
        return _Template(self.template) if self.template else None

    @property
    def special_tokens(self) -> int:
        """The number of tokens that every text gets: special tokens, and tokens of the template."""
        if self._template:
            text = self._template.fill("", "")
            return len(self.tokenizer.encode(text, add_special_tokens=False))
        return self.tokenizer.num_special_tokens_to_add(False)

    def encode(
        self,
        texts: Sequence[Text | Encoding],
        *,
        truncate: bool = True,
        side: Side | None = None,
        max_length: int | None = None,
    ) -> list[Encoding]:
        """Tokenize texts or pairs.

        Args:
            texts: The texts. An ``Encoding`` among them counts as tokenized.
            truncate: Truncate texts that are too long, except special tokens; False refuses them.
                Of a pair, the longer text is truncated first; in a template, the document.
            side: The side at which long texts lose tokens; None for ``truncation_side``.
            max_length: Maximum number of tokens, with special tokens; None for the default.

        Raises:
            InvalidData: A text is too long, has no tokens, is not a Unicode string, or the
                tokenizer fails on it.
            InvalidArgument: ``max_length`` allows only special tokens.
        """
        self._check_length(max_length)
        limit = max_length or self.max_length
        with tokenizer_errors():
            try:
                new_encodings = iter(
                    self._encode_batch([x for x in texts if not isinstance(x, Encoding)])
                )
            except TypeError as error:
                raise InvalidData(
                    "a text cannot be tokenized: expected a list of Unicode strings",
                    "remove lone surrogates and values that are not strings",
                    code="text.not_unicode",
                ) from error
        raws = [text if isinstance(text, Encoding) else next(new_encodings) for text in texts]
        encodings = [Encoding(text.ids, text.type_ids) for text in raws]
        for index, encoding in enumerate(encodings):
            if not encoding:
                raise InvalidData(
                    f"text {index} has no tokens", "remove empty texts", code="text.empty"
                )
            if limit is not None and len(encoding) > limit:
                if not truncate:
                    raise InvalidData(
                        f"text {index} has {len(encoding)} tokens, more than the limit of {limit}",
                        "shorten it, or set `truncate`",
                        code="text.too_long",
                    )
                spans = self._spans(texts[index])
                side = side or self.truncation_side
                positions = _kept(raws[index], limit, side, spans, frame=self.frame)
                encodings[index] = _select(raws[index], positions)
        return encodings

    def tokens(
        self, texts: Sequence[str], *, special: bool = True, most: int | None = None
    ) -> list[list[Token]]:
        """The tokens of each whole text, with special tokens if ``special``.

        Raises:
            InvalidData: The tokenizer fails on a text, or the texts have more than ``most`` tokens.
        """
        with tokenizer_errors():
            raws = self.tokenizer.encode_batch(list(texts), add_special_tokens=special)
        count = sum(map(len, raws))
        if most is not None and count > most:
            raise InvalidData(
                f"the texts have {count} tokens, more than the limit of {most}",
                "send fewer or shorter texts",
                code="text.too_many_tokens",
            )
        return [
            [
                Token(id, token if is_special else text[slice(*span)], bool(is_special), *span)
                for id, token, is_special, span in zip(
                    raw.ids, raw.tokens, raw.special_tokens_mask, raw.offsets, strict=True
                )
            ]
            for text, raw in zip(texts, raws, strict=True)
        ]

    def decode(self, rows: Sequence[Sequence[int]], *, skip_special: bool = True) -> list[str]:
        """The text of each list of token ids; ids without a token are left out.

        Raises:
            InvalidData: The tokenizer fails on the ids.
        """
        with tokenizer_errors():
            return self.tokenizer.decode_batch(
                [list(row) for row in rows], skip_special_tokens=skip_special
            )

    @cached_property
    def frame(self) -> tuple[list[int], list[int]]:
        """The special tokens before and after every text."""
        (tokens,) = self.tokens(["a"])
        before = list(takewhile(lambda token: token.special, tokens))
        after = list(takewhile(lambda token: token.special, reversed(tokens[len(before) :])))
        return [token.id for token in before], [token.id for token in reversed(after)]

    def _encode_batch(self, texts: Sequence[Text]) -> list[Any]:
        """The encodings of ``tokenizers``. Texts and pairs in a template are encoded separately."""
        if self._template is None or not any(isinstance(text, tuple) for text in texts):
            return self.tokenizer.encode_batch(list(texts))
        pairs = [self._template.fill(*text) for text in texts if isinstance(text, tuple)]
        filled = iter(self.tokenizer.encode_batch(pairs, add_special_tokens=False))
        plain = iter(self.tokenizer.encode_batch([x for x in texts if not isinstance(x, tuple)]))
        return [next(filled if isinstance(text, tuple) else plain) for text in texts]

    def _spans(self, text: Text | Encoding) -> Sequence[tuple[int, int]] | None:
        """(start, end) of the query and the document in a filled template; None without one."""
        if self._template is None or not isinstance(text, tuple):
            return None
        return self._template.spans(*text)

    def encode_words(self, words: Sequence[str]) -> tuple[Encoding, list[int | None]]:
        """Tokenize a text that is split into words, and find the first token of each word.

        Words have the tokens that they have in a text with spaces between them.

        Returns:
            The tokens, and a place in them for each word: None if it was truncated, or has none.

        Raises:
            InvalidData: The tokenizer fails on it.
        """
        with tokenizer_errors():
            space = " " if self._reads_spaces else ""
            spaced = [*words[:1], *(space + word for word in words[1:])]
            raw = self.tokenizer.encode(spaced, is_pretokenized=True)
        kept = _kept(raw, self.max_length or len(raw), self.truncation_side)
        places: list[int | None] = [None] * len(words)
        word_ids = raw.word_ids
        for place, index in reversed(list(enumerate(kept))):
            if (word := word_ids[index]) is not None:
                places[word] = place
        return _select(raw, kept), places

    @cached_property
    def _reads_spaces(self) -> bool:
        """Whether words have the tokens of a text only with the spaces before them.

        This holds for byte-level tokenizers that do not add these spaces.
        """
        encode = partial(self.tokenizer.encode, add_special_tokens=False)
        text = encode("a a").ids
        plain, spaced = (encode(["a", word], is_pretokenized=True).ids for word in ("a", " a"))
        return text == spaced != plain

    def batch_inputs(
        self, encodings: Sequence[Encoding], inputs: Mapping[str, TextInput]
    ) -> dict[str, np.ndarray]:
        """The model inputs of one batch, padded to its longest text, or to ``length``.

        Position ids count the real tokens, from ``first_position`` on. Caches are empty.

        Args:
            encodings: At least one.
            inputs: The model inputs by name (see ``model_inputs``).

        Returns:
            Integers (B, S), and the caches (B, ...).

        Raises:
            InvalidData: An input of the model is unknown, or the texts differ in length and the
                model has no attention_mask.
        """
        caches = {name: value.cache for name, value in inputs.items() if value.cache is not None}
        if unknown := sorted(inputs.keys() - set(FILLED) - caches.keys()):
            raise InvalidData(
                f"unknown model input {unknown[0]!r}: a tokenizer provides {', '.join(FILLED)}",
                "pass the inputs as arrays (.npz) instead of text",
                code="text.unknown_input",
            )
        mask = self.mask(encodings)
        if "attention_mask" not in inputs and not mask.all():
            raise InvalidData(
                "texts of different lengths cannot share a batch: the model has no attention_mask",
                "use a batch size of 1",
                code="text.no_mask",
            )
        filled: dict[str, np.ndarray] = dict.fromkeys(FILLED, mask)
        for name, rows, pad in (
            ("input_ids", [encoding.ids for encoding in encodings], self.pad_id),
            ("token_type_ids", [encoding.type_ids for encoding in encodings], 0),
        ):
            filled[name] = np.full(mask.shape, pad)
            filled[name][mask] = np.concatenate(rows)
        if not self.has_types:
            filled["token_type_ids"][:] = 0
        filled["position_ids"] = np.maximum(np.cumsum(mask, axis=1) - 1, 0) + self.first_position
        filled |= {name: np.zeros((len(mask), *shape)) for name, shape in caches.items()}
        return {name: filled[name].astype(value.dtype) for name, value in inputs.items()}

    def mask(self, encodings: Sequence[Encoding]) -> Bool[np.ndarray, "B S"]:
        """The real tokens of a batch."""
        lengths = np.array([len(encoding) for encoding in encodings])
        mask = np.arange(self.length or lengths.max()) < lengths[:, None]
        return mask if self.padding == "right" else mask[:, ::-1]

    def batches(
        self,
        encodings: Sequence[Encoding],
        batch_size: int,
        inputs: Mapping[str, TextInput],
    ) -> Iterator[tuple[Int[np.ndarray, " B"], dict[str, np.ndarray]]]:
        """(indices into ``encodings``, model inputs) of batches of similar length.

        Sorting by length reduces padding. The longest texts come first, so that a lack of memory
        is detected at the start.

        Raises:
            InvalidArgument: ``batch_size`` is below 1.
            InvalidData: An input of the model is unknown, or it has no attention_mask for padding.
        """
        if batch_size < 1:
            raise InvalidArgument(
                f"`batch_size` is {batch_size}: expected at least 1",
                "increase it",
                code="text.batch_size",
            )
        lengths = np.array([len(encoding) for encoding in encodings])
        order = np.argsort(-lengths, kind="stable")
        for start in range(0, len(order), batch_size):
            indices = order[start : start + batch_size]
            yield indices, self.batch_inputs([encodings[i] for i in indices], inputs)

    def _check_length(self, max_length: int | None) -> None:
        special = self.special_tokens
        if max_length is not None and max_length <= special:
            raise InvalidArgument(
                f"`max_length` is {max_length}: expected at least {special + 1}, of which {special}"
                " are special tokens",
                "increase it",
                code="text.max_length",
            )


def model_inputs(session: Session) -> dict[str, TextInput]:
    """The inputs of a model that takes texts, by name.

    Raises:
        InvalidData: An input is not a cache, and not int64 or int32.
    """
    inputs_by_name: dict[str, TextInput] = {}
    for value in session.get_inputs():
        dtype = {**INTEGERS, **FLOATS}.get(value.type)
        one = None if dtype is None else text_input(value.name, dtype, value.shape)
        if one is None or (one.cache is None and value.type not in INTEGERS):
            raise InvalidData(
                f"model input {value.name!r} is {value.type}: expected int64 or int32 for text",
                "pass the inputs as arrays (.npz) instead of text",
                code="text.input_type",
            )
        inputs_by_name[value.name] = one
    return inputs_by_name


@contextmanager
def tokenizer_errors(
    kind: type[AttnserveError] = InvalidData,
    what: str = "the tokenizer fails on a text",
    fix: str = "use another text, or check the tokenizer",
    code: str = "text.tokenizer_failed",
) -> Generator[None]:
    """Raise errors of ``tokenizers`` as ``kind``; by default, those of a text.

    The library raises ``Exception``. A panic in its Rust code raises ``PanicException``, a
    ``BaseException`` that cannot be imported.
    """
    try:
        yield
    except (AttnserveError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise kind(f"{what}: {error}", fix, code=code) from error


class _Template:
    """A text with the places {query} and {document}, once each."""

    def __init__(self, text: str) -> None:
        self.parts = re.split(r"(\{query\}|\{document\})", text)

    def fill(self, query: str, document: str) -> str:
        return "".join(self._texts(query, document))

    def spans(self, query: str, document: str) -> list[tuple[int, int]]:
        """(start, end) of the query and of the document in the filled text, in characters."""
        ends = np.cumsum([len(part) for part in self._texts(query, document)])
        found = [self.parts.index(name) for name in ("{query}", "{document}")]
        return [(int(ends[at - 1]), int(ends[at])) for at in found]

    def _texts(self, query: str, document: str) -> list[str]:
        texts = {"{query}": query, "{document}": document}
        return [texts.get(part, part) for part in self.parts]


def _kept(
    encoding: Any,
    limit: int,
    side: Side,
    spans: Sequence[tuple[int, int]] | None = None,
    frame: tuple[list[int], list[int]] = ([], []),
) -> list[int]:
    """The tokens that remain after an encoding of ``tokenizers`` is truncated to ``limit``.

    Special tokens stay; those of an ``Encoding`` are ``frame``, before and after its text. Of a
    pair, the longer text loses tokens until both are equally long. Of a template with these spans,
    the last one loses its tokens first, then the one before.

    The library's own truncation is a state of the tokenizer, which requests with other limits
    share, and it keeps the rest of both texts of a pair in all combinations.
    """
    count = len(encoding)
    order = range(count)[::-1] if side == "right" else range(count)
    if spans is not None:
        offsets: list[tuple[int, int]] = encoding.offsets  # each access makes a new list
        dropped = [
            index
            for start, end in reversed(spans)
            for index in order
            if start <= offsets[index][0] and offsets[index][1] <= end
        ]
    else:
        sequences: list[int | None] = _sequences(encoding, frame)
        texts = [[index for index in order if sequences[index] == text] for text in (0, 1)]
        short, long = sorted(texts, key=len)
        room = max(limit - sequences.count(None), 0)
        long_size = max(room - len(short), (room + 1) // 2)
        dropped = long[: max(len(long) - long_size, 0)] + short[: len(short) + long_size - room]
    gone = set(dropped[: max(count - limit, 0)])
    return [index for index in range(count) if index not in gone]


def _sequences(encoding: Any, frame: tuple[list[int], list[int]]) -> list[int | None]:
    """For each token of an encoding, the text of a pair; None for special tokens."""
    if not isinstance(encoding, Encoding):
        return encoding.sequence_ids
    before, after = frame
    count = len(encoding)
    start = len(before) if encoding.ids[: len(before)] == before else 0
    end = count - (len(after) if encoding.ids[count - len(after) :] == after else 0)
    return [0 if start <= index < end else None for index in range(count)]


def _select(encoding: Any, positions: Sequence[int]) -> Encoding:
    ids, type_ids = encoding.ids, encoding.type_ids  # each access makes a new list
    return Encoding([ids[i] for i in positions], [type_ids[i] for i in positions])
