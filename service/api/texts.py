"""Routes for texts: embeddings, classes, similarity and token ids, with the number of tokens.

``tei.py`` has the same tasks in the form of text-embeddings-inference.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Annotated, Any

import numpy as np
import orjson
from fastapi import APIRouter, Response
from pydantic import BeforeValidator, ConfigDict, FailFast, Field, PositiveInt

from attnserve.literals import Side
from attnserve.models.embeddings import shorten
from attnserve.models.tokenizer import Encoding, Text, TextEncoder
from attnserve.serving.activations import scores_of
from attnserve.serving.loaded_model import SEND_TEXTS
from graph_passes.errors import InvalidData
from service.api.exchange import Exchange, Here
from service.api.requests import Body, JsonRoute, Name
from service.api.responses import JSON, SLICE, json_response, respond
from service.engine.answer import TextAnswer
from service.engine.engine import Engine
from service.engine.request_limits import check_limit
from service.errors import InvalidField

router = APIRouter(prefix="/texts", tags=["Texts"], route_class=JsonRoute)

MAX_PAIRS = 10_000
"""Maximum number of pairs of a similarity request; distinct texts have a separate limit."""

Pair = Annotated[list[str], FailFast(), Field(min_length=2, max_length=2)]
SomeTexts = Annotated[list[str], Field(min_length=1)]
TextList = Annotated[SomeTexts, FailFast()]

# A single text becomes a list. (A union would report the error of the wrong alternative.)
Texts = Annotated[
    TextList,
    BeforeValidator(
        lambda value: [value] if isinstance(value, str) else value,
        json_schema_input_type=str | SomeTexts,
    ),
    Field(examples=["What is attention?", ["a text", "another"]]),
]


class TextBody(Body):
    """Shared fields of requests with texts. Unknown fields are refused."""

    model_config = ConfigDict(extra="forbid")

    model: Name | None = None
    """Required if several models are served."""
    version: Name | None = None
    """Version of the model; the highest if omitted."""
    truncate: bool = True
    """Truncate texts that are too long; false refuses them."""


class VectorOptions(Body):
    """Shared fields of requests for vectors."""

    prompt_name: str | None = None
    """The prompt of the model before each text; its default if omitted."""
    dimensions: PositiveInt | None = None
    """Return only the first dimensions of each vector."""


class TextEmbedRequest(VectorOptions, TextBody):
    """Texts to embed."""

    inputs: Texts


class TextPredictRequest(TextBody):
    """Texts to classify."""

    inputs: Texts
    top_k: PositiveInt | None = None
    """Number of most likely classes to return; all if omitted."""


class TextSimilarityRequest(TextBody):
    """Texts to compare: ``pairs``, or ``source`` with each of ``targets``."""

    pairs: list[Pair] | None = Field(None, min_length=1, max_length=MAX_PAIRS, fail_fast=True)
    source: str | None = None
    targets: list[str] | None = Field(None, min_length=1, max_length=MAX_PAIRS, fail_fast=True)


class TextTokenizeRequest(TextBody):
    """Texts to tokenize."""

    inputs: Texts
    truncate: bool = False
    """Truncate texts that are too long."""


class Usage(Body):
    """The number of tokens of a request."""

    tokens: int
    """Including special tokens, excluding padding."""


@dataclass(slots=True)
class Prediction:
    """A class with its score."""

    label: str
    score: float


class TextResponse(Body):
    """Shared fields of answers to requests with texts."""

    model: str
    usage: Usage


class TextPredictResponse(TextResponse):
    """The classes of each text."""

    predictions: list[list[Prediction]]
    """For each text, most likely class first."""


class TextSimilarityResponse(TextResponse):
    """The similarities of pairs of texts."""

    similarities: list[float]
    """Cosine similarities, in the order of the request."""


class TextTokenizeResponse(TextResponse):
    """The token ids of each text."""

    tokens: list[list[int]]
    """Token ids of each text, including special tokens."""


class TextEmbedResponse(TextResponse):
    """The embeddings of texts."""

    embeddings: list[list[float]]
    """One vector per text, in the order of the request."""


async def embed_texts(
    exchange: Exchange,
    engine: Engine,
    texts: Sequence[Text | Encoding],
    *,
    truncate: bool,
    side: Side | None = None,
    dimensions: int | None = None,
    normalize: bool | None = None,
) -> tuple[TextAnswer, np.ndarray]:
    """Embed texts and token ids; vectors are cut to ``dimensions`` and then normalized.

    Args:
        texts: With their prompt (``with_prompt``).
        side: The side at which long texts lose tokens; None for the tokenizer's own.
        normalize: None if the model normalizes.

    Raises:
        InvalidField: The vectors have fewer dimensions.
    """
    if dimensions is not None:
        _check_dimensions(engine, dimensions, _vector_size(engine))
    answer = await exchange.run(
        engine.run_task("embed", texts, truncate=truncate, side=side, deadline=exchange.deadline())
    )
    vectors = answer.vectors
    if dimensions is not None:
        _check_dimensions(engine, dimensions, vectors.shape[1])
    is_normal = engine.model.artifact.normalize if normalize is None else normalize
    return answer, shorten(vectors, dimensions, is_normal)


def _vector_size(engine: Engine) -> int | None:
    """The number of dimensions of a vector; None if only a run shows it."""
    model = engine.model
    if not model.can("embed"):
        return None  # ``Engine.run_task`` refuses the request
    if model.artifact.dimensions is not None:
        return model.artifact.dimensions
    axes = model.signature.axes_of(model.text_output("embed"))
    return axes[-1] if axes and isinstance(axes[-1], int) else None


def _check_dimensions(engine: Engine, dimensions: int, size: int | None) -> None:
    """Refuse more ``dimensions`` than the ``size`` of a vector, if that is known."""
    if size is not None and dimensions > size:
        raise InvalidField(
            f"dimensions is {dimensions}, but vectors of {engine.name} have {size}",
            "reduce it, or leave it out",
            field="dimensions",
        )


def with_prompt(
    engine: Engine,
    texts: Sequence[Text | Encoding],
    name: str | None = None,
) -> list[Text | Encoding]:
    """Put a prompt of the model before texts; token ids have no prompt.

    Args:
        name: The name of the prompt; None for the default prompt of the model.

    Raises:
        InvalidField: The model has no such prompt, or token ids were sent for it.
    """
    artifact = engine.model.artifact
    if name is not None and name not in artifact.prompts:
        prompts = ", ".join(sorted(artifact.prompts)) or "none"
        raise InvalidField(
            f"prompt_name is {name!r}, but prompts of {engine.name} are {prompts}",
            "leave it out",
            field="prompt_name",
        )
    if name is not None and not all(isinstance(text, str) for text in texts):
        raise InvalidField(
            f"prompt_name is {name!r}, but the input has token ids: expected texts",
            "send texts, or leave prompt_name out",
            field="prompt_name",
        )
    prompt = artifact.prompt() if name is None else artifact.prompts[name]
    return [prompt + text if isinstance(text, str) else text for text in texts]


def with_token_ids(
    engine: Engine, inputs: Sequence[str | list[int]], field: str
) -> list[str | Encoding]:
    """Convert token ids to ``Encoding``; texts stay.

    Raises:
        InvalidField: Ids do not begin with the special token of the model (end, if texts begin
            with none), and ``any_token_ids`` is off: they come from another tokenizer.
    """
    encoder = engine.model.encoder
    for index, ids in enumerate(inputs):
        if isinstance(ids, str) or encoder is None or engine.settings.any_token_ids:
            continue
        before, after = encoder.frame
        what = "begin" if before and ids[: len(before)] != before else ""
        if not before and after and ids[-len(after) :] != after:
            what = "end"
        if what:
            raise InvalidField(
                f"token ids {index} of {field} do not {what} with {before or after}, as those of"
                f" {engine.name} do: they come from another tokenizer",
                f"{SEND_TEXTS}; ATTNSERVE_ANY_TOKEN_IDS=true accepts them",
                field=field,
            )
    return [x if isinstance(x, str) else Encoding.of(x) for x in inputs]


@router.post("/embed", response_model=TextEmbedResponse)
async def embed(exchange: Here, body: TextEmbedRequest) -> Response:
    """One vector per text, pooled and normalized as configured in the artifact.

    An empty text is valid: it is embedded as its special tokens.
    """
    engine = exchange.acquire(body.model, body.version)
    texts = with_prompt(engine, body.inputs, body.prompt_name)
    answer, vectors = await embed_texts(
        exchange, engine, texts, truncate=body.truncate, dimensions=body.dimensions
    )
    content = {"embeddings": vectors, **_model_and_usage(engine, answer.tokens)}
    return await respond(exchange, engine, answer, content)


@router.post("/predict", response_model=TextPredictResponse)
async def predict(exchange: Here, body: TextPredictRequest) -> Response:
    """The classes of each text, most likely first.

    Scores are the softmax over the classes, for a single class the sigmoid of its logit, or the
    activation of the model. Labels come from ``id2label`` in attnserve.json or config.json; without
    it they are class numbers.
    """
    engine = exchange.acquire(body.model, body.version)
    texts = with_prompt(engine, body.inputs)
    deadline = exchange.deadline()
    answer = await exchange.run(
        engine.run_task("classify", texts, truncate=body.truncate, deadline=deadline)
    )
    predictions = await classes(engine, answer, body.top_k)
    content = {"predictions": predictions, **_model_and_usage(engine, answer.tokens)}
    return await respond(exchange, engine, answer, content)


@router.post("/similarity", response_model=TextSimilarityResponse)
async def similarity(exchange: Here, body: TextSimilarityRequest) -> Response:
    """The cosine similarity of pairs of texts, or of one text with each of several."""
    engine = exchange.acquire(body.model, body.version)
    texts, left, right = _pairs(body)
    prompted = with_prompt(engine, texts)
    answer, vectors = await embed_texts(exchange, engine, prompted, truncate=body.truncate)
    # All products of distinct texts: their number is limited, and there may be many more pairs.
    distinct, rows = np.unique(left, return_inverse=True)
    products = await asyncio.to_thread(cosines_of, vectors[distinct], vectors)
    cosines = products[rows, right]
    content = {"similarities": cosines, **_model_and_usage(engine, answer.tokens)}
    return await respond(exchange, engine, answer, content)


@router.post("/tokenize", response_model=TextTokenizeResponse)
async def tokenize(exchange: Here, body: TextTokenizeRequest) -> Response:
    """The token ids of each text, including special tokens. The model is not run."""
    engine = exchange.acquire(body.model, body.version)
    work = partial(TextEncoder.encode, texts=body.inputs, truncate=body.truncate)
    encodings = await exchange.run(engine.tokenize(body.inputs, work, deadline=exchange.deadline()))
    tokens = [encoding.ids for encoding in encodings]
    count = sum(map(len, tokens))
    check_limit(count, engine.settings.max_tokens, "tokens")
    usage = _model_and_usage(engine, count)
    return json_response({"tokens": tokens, **usage})


async def classes(
    engine: Engine, answer: TextAnswer, top_k: int | None = None, *, raw_scores: bool = False
) -> list[orjson.Fragment]:
    """For each text the JSON of its ``Prediction`` of each class, most likely first.

    There may be millions of scores: other requests run between the texts.
    """
    labels = engine.model.labels
    activation = "identity" if raw_scores else engine.model.artifact.activation
    rows: list[orjson.Fragment] = []
    for scores in scores_of(answer.vectors, activation):
        predictions = [
            Prediction(labels.get(index, str(index)), float(scores[index]))
            for index in np.argsort(-scores, kind="stable")[:top_k].tolist()
        ]
        rows.append(orjson.Fragment(orjson.dumps(predictions, option=JSON)))
        if answer.vectors.size > SLICE:
            await asyncio.sleep(0)
    return rows


def cosines_of(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """The cosine similarity of each vector [L, D] with each of others [R, D], as [L, R]."""

    def scaled(vectors: np.ndarray) -> np.ndarray:
        vectors = vectors.astype(np.float64)
        lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
        return vectors / np.maximum(lengths, np.finfo(np.float64).tiny)

    return np.clip(scaled(left) @ scaled(right).T, -1, 1)


def _model_and_usage(engine: Engine, tokens: int) -> dict[str, Any]:
    return {"model": engine.name, "usage": {"tokens": tokens}}


def _pairs(body: TextSimilarityRequest) -> tuple[list[str], Sequence[int], Sequence[int]]:
    """(distinct texts, indices of the left texts, indices of the right texts)."""
    fields = {"pairs": body.pairs, "source": body.source, "targets": body.targets}
    given = [name for name, value in fields.items() if value is not None]
    if given not in (["pairs"], ["source", "targets"]):
        raise InvalidData(
            f"the request has {' and '.join(given) or 'no texts'}: "
            "expected either 'pairs', or 'source' and 'targets'",
            'for example {"source": "a text", "targets": ["another"]}',
        )
    pairs = body.pairs or [[body.source or "", target] for target in body.targets or ()]
    order = {text: at for at, text in enumerate(dict.fromkeys(chain.from_iterable(pairs)))}
    return list(order), [order[left] for left, _ in pairs], [order[right] for _, right in pairs]
