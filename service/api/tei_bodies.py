"""The requests and answers of text-embeddings-inference (TEI); ``tei.py`` has the routes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, PlainValidator, PositiveInt
from pydantic_core import PydanticCustomError

from attnserve.literals import Side
from service.api.requests import Body, Name
from service.errors import EmptyBatch

TokenId = Annotated[int, Field(ge=0, lt=2**31)]
InputType = str | list[TokenId]


def _is_ids(value: Any) -> bool:
    """Whether a value is a non-empty list of token ids."""
    return (
        type(value) is list
        and set(map(type, value)) == {int}
        and 0 <= min(value) <= max(value) < 2**31
    )


def _require(value: Any, is_valid: bool, expected: str) -> Any:
    if value == []:
        raise EmptyBatch("the batch is empty", "send at least one input")
    if not is_valid:
        raise PydanticCustomError("input", "{expected}", {"expected": f"expected {expected}"})
    return value


def _listed(value: Any, is_item: Callable[[Any], bool], expected: str) -> Any:
    """A list of items; a single item becomes a list."""
    items = [value] if is_item(value) else value
    return _require(items, type(items) is list and all(map(is_item, items)), expected)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _to_inputs(value: Any) -> list[str | list[int]]:
    expected = "a text, a non-empty list of token ids, or a list of these"
    return _listed(value, lambda item: _is_text(item) or _is_ids(item), expected)


def _to_ids(value: Any) -> list[list[int]]:
    return _listed(value, _is_ids, "a non-empty list of token ids, or a list of these")


def _to_texts(value: Any) -> list[str]:
    return _listed(value, _is_text, "a text, or a list of texts")


def _to_list(value: Any) -> list[str]:
    if _is_text(value):
        raise PydanticCustomError("input", "expected a list of texts")
    return _to_texts(value)


def _to_sequences(value: Any) -> tuple[bool, list[str | tuple[str, str]]]:
    """(whether the value is a batch, the texts and pairs)."""
    is_batch = type(value) is list and not all(isinstance(item, str) for item in value)
    items = value if is_batch else [[value] if isinstance(value, str) else value]
    is_valid = all(
        type(item) is list and len(item) in (1, 2) and set(map(type, item)) == {str}
        for item in items
    )
    _require(
        value, is_valid, 'a text, a pair of texts, or a batch such as [["a text"], ["a", "b"]]'
    )
    return is_batch, [item[0] if len(item) == 1 else (item[0], item[1]) for item in items]


Single = Annotated[list[str], Field(min_length=1, max_length=1)]
Pair = Annotated[list[str], Field(min_length=2, max_length=2)]
Inputs = Annotated[
    list[str | list[int]],
    PlainValidator(_to_inputs, json_schema_input_type=InputType | list[InputType]),
]
Ids = Annotated[
    list[list[int]],
    PlainValidator(_to_ids, json_schema_input_type=list[TokenId] | list[list[TokenId]]),
]
Texts = Annotated[list[str], PlainValidator(_to_texts, json_schema_input_type=str | list[str])]
TextList = Annotated[list[str], PlainValidator(_to_list, json_schema_input_type=list[str])]
Sequences = Annotated[
    tuple[bool, list[str | tuple[str, str]]],
    PlainValidator(_to_sequences, json_schema_input_type=str | Pair | list[Single | Pair]),
]


class TeiBody(Body):
    """Shared fields, which are extensions of this server."""

    model: Name | None = None
    """Name of the model; by default the model of the path, the only model, or the default model."""
    version: Name | None = None
    """Version of the model; the highest if omitted."""


class Prompted(Body):
    """A prompt of the model."""

    prompt_name: str | None = None
    """A prompt of the model before each text; none if omitted."""


class TruncationOptions(Body):
    """Treatment of texts that are too long."""

    truncate: bool = False
    """Truncate texts that are too long; false refuses them."""
    truncation_direction: Literal["Left", "Right", "left", "right"] = "right"
    """The side at which texts lose tokens."""

    @property
    def side(self) -> Side:
        """The side at which texts lose tokens, as ``Engine.run_task`` takes it."""
        return "left" if self.truncation_direction.lower() == "left" else "right"


class EmbedAllRequest(TeiBody, Prompted, TruncationOptions):
    """Texts or token ids to embed: one vector per token."""

    inputs: Inputs


class EmbedSparseRequest(EmbedAllRequest):
    """Texts or token ids to embed: weights of the vocabulary."""


class EmbedRequest(EmbedAllRequest):
    """Texts or token ids to embed: one vector per text."""

    normalize: bool = True
    """Scale vectors to length one."""
    dimensions: PositiveInt | None = None
    """Return only the first dimensions of each vector."""


class RerankRequest(TeiBody, TruncationOptions):
    """A query, and texts to order by their relevance to it."""

    query: str
    texts: TextList
    raw_scores: bool = False
    """Return the logits; by default the activation of the model, a sigmoid if it states none."""
    return_text: bool = False
    """Return the texts too."""


class PredictRequest(TeiBody, TruncationOptions):
    """Texts or pairs of texts to classify."""

    inputs: Sequences
    """A text, a pair of texts, or a batch: [["a text"], ["another"], ["one of", "a pair"]]."""
    raw_scores: bool = False
    """Return the logits of the classes."""


class SimilarityInput(Body):
    """A text, and the texts to compare with it."""

    source_sentence: str
    sentences: TextList


class SimilarityParameters(Prompted, TruncationOptions):
    """Options of the embedding of the texts."""


class SimilarityRequest(TeiBody):
    """Texts to compare."""

    inputs: SimilarityInput
    parameters: SimilarityParameters | None = None


class TokenizeRequest(TeiBody, Prompted):
    """Texts to tokenize."""

    inputs: Texts
    add_special_tokens: bool = True


class DecodeRequest(TeiBody):
    """Token ids to decode."""

    ids: Ids
    skip_special_tokens: bool = True


class SparseValue(Body):
    """The weight of a token of the vocabulary."""

    index: NonNegativeInt
    value: float


class Rank(Body):
    """The score of one text."""

    index: NonNegativeInt
    """Position of the text in the request."""
    score: float
    text: str | None = None


@dataclass(slots=True)
class SimpleToken:
    """A token; ``start`` and ``stop`` count bytes of UTF-8, and are null for special tokens."""

    id: TokenId
    text: str
    special: bool
    start: NonNegativeInt | None = None
    stop: NonNegativeInt | None = None


class EmbeddingModel(Body):
    """The pooling of an embedding model."""

    pooling: str


class ClassifierModel(Body):
    """The labels of a classifier."""

    id2label: dict[str, str]
    label2id: dict[str, NonNegativeInt]


class EmbeddingType(Body):
    """A model of embeddings."""

    embedding: EmbeddingModel


class ClassifierType(Body):
    """A classifier."""

    classifier: ClassifierModel


class RerankerType(Body):
    """A reranker."""

    reranker: ClassifierModel


class Info(Body):
    """The served model and the limits of the server."""

    model_id: str
    """The id or folder of the exported model, else the name of the model."""
    model_sha: str | None = None
    model_dtype: str
    """The data types in which the model computes."""
    model_type: ClassifierType | EmbeddingType | RerankerType
    served_model_name: str
    max_concurrent_requests: NonNegativeInt
    """Maximum number of waiting texts."""
    max_input_length: NonNegativeInt
    """Maximum number of tokens of a text; of a request if the model has no limit."""
    max_batch_tokens: NonNegativeInt
    max_batch_requests: NonNegativeInt | None = None
    max_client_batch_size: NonNegativeInt
    auto_truncate: bool
    tokenization_workers: NonNegativeInt
    version: str
    sha: str | None = None
    docker_label: str | None = None
