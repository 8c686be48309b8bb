"""The HTTP API of text-embeddings-inference (TEI), version 1.9.3.

https://huggingface.github.io/text-embeddings-inference

Routes answer for the only model or ``default_model``, and below ``/models/NAME`` for that model.
As extensions, requests may name ``model`` and ``version``. Unknown fields are ignored, as in TEI.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, Literal, TypeVar

import numpy as np
import orjson
from fastapi import APIRouter, Response
from pydantic import BaseModel

from attnserve import __version__
from attnserve.models.tokenizer import Encoding, Text, TextEncoder, Token
from attnserve.serving.loaded_model import ModelFailed
from attnserve.serving.text_tasks import TextTask
from graph_passes.errors import AttnserveError, CheckFailed
from service.api.exchange import Exchange, Here
from service.api.ranking import query_pairs, ranked_by_score
from service.api.requests import Body, JsonRoute, parse_json, serve_at
from service.api.responses import json_response, respond
from service.api.tei_bodies import (
    ClassifierModel,
    ClassifierType,
    DecodeRequest,
    EmbedAllRequest,
    EmbeddingModel,
    EmbeddingType,
    EmbedRequest,
    EmbedSparseRequest,
    Info,
    PredictRequest,
    Rank,
    RerankerType,
    RerankRequest,
    SimilarityParameters,
    SimilarityRequest,
    SimpleToken,
    SparseValue,
    TeiBody,
    TokenizeRequest,
    TruncationOptions,
)
from service.api.texts import (
    Prediction,
    classes,
    cosines_of,
    embed_texts,
    with_prompt,
    with_token_ids,
)
from service.engine.answer import TextAnswer
from service.engine.engine import Engine
from service.errors import EmptyBatch, NotReady, UnsupportedTask

F = TypeVar("F", bound=Callable[..., Any])

# -- errors ---------------------------------------------------------------------------------------

ErrorType = Literal["Unhealthy", "Backend", "Overloaded", "Validation", "Tokenizer", "Empty"]


class TeiError(BaseModel):
    """The body of an error of text-embeddings-inference."""

    error: str
    error_type: ErrorType


ERRORS: dict[int, ErrorType] = {
    424: "Backend",
    429: "Overloaded",
    503: "Unhealthy",
    504: "Overloaded",
}
"""TEI's type of an error by status; another status has the type of its class (4xx, 5xx)."""


def render_error(status: int, text: str, error: Exception | None) -> tuple[int, TeiError]:
    """(status, body) of an error of these routes, with the statuses in which TEI differs."""
    code = error.code if isinstance(error, AttnserveError) else ""
    if isinstance(error, UnsupportedTask | ModelFailed | CheckFailed):
        status = 424
    elif code in ("text.too_long", "text.too_many_tokens"):
        status = 413
    kind: ErrorType = ERRORS.get(status, "Validation" if status < 500 else "Backend")
    if isinstance(error, EmptyBatch):
        kind = "Empty"
    elif code in ("text.tokenizer_failed", "text.not_unicode"):
        kind = "Tokenizer"
    return status, TeiError(error=text, error_type=kind)


# -- routes ---------------------------------------------------------------------------------------

router = APIRouter(
    tags=["text-embeddings-inference"],
    route_class=JsonRoute,
    responses={"4XX": {"model": TeiError}, "5XX": {"model": TeiError}},
)


ROUTES: list[str] = []
"""The paths that ``_route`` serves."""


def _route(path: str, **options: Any) -> Callable[[F], F]:
    """Return a decorator that serves ``path``, also below a model."""
    ROUTES.append(path)
    return serve_at(router, path, f"/models/{{name}}{path}", **options)


@_route("/embed", response_model=list[list[float]])
async def embed(exchange: Here, body: EmbedRequest) -> Response:
    """One vector per text, pooled as configured in the artifact."""
    engine = exchange.acquire(body.model, body.version)
    answer, vectors = await embed_texts(
        exchange,
        engine,
        _inputs(engine, body),
        truncate=body.truncate,
        side=body.side,
        dimensions=body.dimensions,
        normalize=body.normalize,
    )
    return await respond(exchange, engine, answer, vectors)


async def _run(
    exchange: Exchange,
    engine: Engine,
    task: TextTask,
    texts: Sequence[Text | Encoding],
    options: TruncationOptions,
) -> TextAnswer:
    return await exchange.run(
        engine.run_task(
            task,
            texts,
            truncate=options.truncate,
            side=options.side,
            deadline=exchange.deadline(),
        )
    )


@_route("/embed_all", response_model=list[list[list[float]]])
async def embed_all(exchange: Here, body: EmbedAllRequest) -> Response:
    """One vector per token of each text, including special tokens, without pooling."""
    engine = exchange.acquire(body.model, body.version)
    answer = await _run(exchange, engine, "tokens", _inputs(engine, body), body)
    vectors = np.split(answer.vectors, list(accumulate(answer.lengths))[:-1])
    return await respond(exchange, engine, answer, vectors)


@_route("/embed_sparse", response_model=list[list[SparseValue]])
async def embed_sparse(exchange: Here, body: EmbedSparseRequest) -> Response:
    """The weights of the vocabulary above 0 of each text, by a SPLADE model."""
    engine = exchange.acquire(body.model, body.version)
    answer = await _run(exchange, engine, "sparse", _inputs(engine, body), body)
    content = [await _sparse_values(row) for row in answer.vectors]
    return await respond(exchange, engine, answer, content)


async def _sparse_values(row: np.ndarray) -> orjson.Fragment:
    """The weights of one text as JSON. Other requests run between two texts."""
    await asyncio.sleep(0)
    places = np.flatnonzero(row)
    pairs = zip(places.tolist(), row[places].tolist(), strict=True)
    return orjson.Fragment(orjson.dumps([{"index": at, "value": value} for at, value in pairs]))


@_route("/rerank", response_model=list[Rank])
async def rerank(exchange: Here, body: RerankRequest) -> Response:
    """The relevance of each text to the query, most relevant first."""
    engine = exchange.acquire(body.model, body.version)
    pairs = query_pairs(engine, body.query, body.texts)
    answer = await _run(exchange, engine, "rerank", pairs, body)
    activation = "identity" if body.raw_scores else engine.model.artifact.activation
    ranks = [
        {"index": at, "score": score} | ({"text": body.texts[at]} if body.return_text else {})
        for at, score in ranked_by_score(answer.vectors, activation)
    ]
    return await respond(exchange, engine, answer, ranks)


@_route("/predict", response_model=list[Prediction] | list[list[Prediction]])
async def predict(exchange: Here, body: PredictRequest) -> Response:
    """The classes of a text or pair, most likely first; for a batch, a list of these."""
    engine = exchange.acquire(body.model, body.version)
    is_batch, texts = body.inputs
    answer = await _run(exchange, engine, "classify", texts, body)
    predictions = await classes(engine, answer, raw_scores=body.raw_scores)
    return await respond(exchange, engine, answer, predictions if is_batch else predictions[0])


@_route("/similarity", response_model=list[float])
async def similarity(exchange: Here, body: SimilarityRequest) -> Response:
    """The cosine similarity of a text with each of several."""
    engine = exchange.acquire(body.model, body.version)
    options = body.parameters or SimilarityParameters()
    texts = [body.inputs.source_sentence, *body.inputs.sentences]
    answer, vectors = await embed_texts(
        exchange,
        engine,
        _prompted(engine, texts, options.prompt_name),
        truncate=options.truncate,
        side=options.side,
    )
    return await respond(exchange, engine, answer, cosines_of(vectors[:1], vectors[1:])[0])


@_route("/tokenize", response_model=list[list[SimpleToken]])
async def tokenize(exchange: Here, body: TokenizeRequest) -> Response:
    """The tokens of each text. The model is not run, and nothing is truncated."""
    engine = exchange.acquire(body.model, body.version)
    texts = _prompted(engine, body.inputs, body.prompt_name)
    whole = [text for text in texts if isinstance(text, str)]

    def work(encoder: TextEncoder) -> list[orjson.Fragment]:  # in a thread
        most = engine.settings.max_tokens
        rows = encoder.tokens(whole, special=body.add_special_tokens, most=most)
        return [
            orjson.Fragment(orjson.dumps(_simple_tokens(text, row)))
            for text, row in zip(whole, rows, strict=True)
        ]

    tokens = await exchange.run(engine.tokenize(texts, work, deadline=exchange.deadline()))
    return json_response(tokens)


def _simple_tokens(text: str, tokens: Sequence[Token]) -> list[SimpleToken]:
    """The tokens of a text, with their places in its bytes."""
    place = _byte_places(text)
    return [
        SimpleToken(
            id=token.id,
            text=token.text,
            special=token.special,
            start=None if token.special else place[token.start],
            stop=None if token.special else place[token.stop],
        )
        for token in tokens
    ]


def _byte_places(text: str) -> Sequence[int]:
    """The place of each character, and of the end, in the bytes of UTF-8, which TEI counts."""
    if text.isascii():
        return range(len(text) + 1)
    return [*accumulate((len(character.encode()) for character in text), initial=0)]


@_route("/decode", response_model=list[str])
async def decode(exchange: Here, body: DecodeRequest) -> Response:
    """The text of each list of token ids. The model is not run."""
    engine = exchange.acquire(body.model, body.version)
    rows = [Encoding.of(ids) for ids in body.ids]
    work = partial(TextEncoder.decode, rows=body.ids, skip_special=body.skip_special_tokens)
    texts = await exchange.run(engine.tokenize(rows, work, deadline=exchange.deadline()))
    return json_response(texts)


@_route("/info", method="GET")
async def info(exchange: Here) -> Info:
    """The served model and the limits of the server."""
    engine = exchange.engine()
    model, settings = engine.model, engine.settings
    encoder = model.encoder
    return Info(
        model_id=model.artifact.source or engine.name,
        model_dtype=model.precision,
        model_type=_model_type(engine),
        served_model_name=engine.name,
        max_concurrent_requests=settings.max_queue,
        max_input_length=(encoder and encoder.max_length) or settings.max_tokens,
        max_batch_tokens=engine.batcher.queue.budget,
        max_client_batch_size=settings.max_inputs,
        auto_truncate=False,
        tokenization_workers=1,
        version=__version__,
    )


@_route("/health", method="GET", response_class=Response)
async def health(exchange: Here) -> Response:
    """200 if the model of the path runs; without a model in the path, if the server is ready."""
    repository = exchange.repository
    runs = repository.runs(exchange.engine()) if exchange.path else repository.ready
    if not runs:
        raise NotReady("unhealthy", "wait until the models are loaded, or see the log")
    return Response()


@router.get("/ping", response_class=Response)
async def ping(exchange: Here) -> Response:
    """The same answer as /health."""
    return await health(exchange)


MainRoute = tuple[TextTask, Any, type[Body]]
"""(task, route, request)."""

MAIN: Sequence[MainRoute] = (
    ("sparse", embed_sparse, EmbedSparseRequest),
    ("rerank", rerank, RerankRequest),
    ("classify", predict, PredictRequest),
    ("embed", embed, EmbedRequest),
)
"""The main route of a model is that of its first task, else the last."""

SIMILARITY: MainRoute = ("embed", similarity, SimilarityRequest)
"""The main route in place of the last one if ``inputs`` is an object, which no other route takes.

TEI has it instead if its environment variable TASK is "sentence-similarity".
"""


class MainRequest(TeiBody):
    """The fields of a request that decide its route."""

    inputs: Any = None


@serve_at(router, "/", "/invocations", "/models/{name}", include_in_schema=False)
async def invoke(exchange: Here) -> Response:
    """The main route of the model: /embed, /embed_sparse, /rerank, /predict or /similarity."""
    content = await exchange.read_body()
    request = parse_json(content, MainRequest)
    engine = exchange.engine(request.model, request.version)
    row = next((row for row in MAIN if engine.model.can(row[0])), MAIN[-1])
    _, route, schema = SIMILARITY if row is MAIN[-1] and isinstance(request.inputs, dict) else row
    body = parse_json(content, schema)
    del content, request  # they may be large, and the route may wait
    return await route(exchange, body)


PREFIXES = (*ROUTES, "/models", "/invocations", "/ping", "/")
"""Prefixes of the paths with errors of this form; "/" stands for that path alone."""


def _inputs(engine: Engine, body: EmbedAllRequest) -> Sequence[Text | Encoding]:
    """The texts and token ids of a request, with its prompt."""
    return _prompted(engine, with_token_ids(engine, body.inputs, "inputs"), body.prompt_name)


def _prompted(
    engine: Engine, texts: Sequence[Text | Encoding], name: str | None
) -> Sequence[Text | Encoding]:
    """The texts, with a prompt if the request names one: TEI has no default prompt."""
    return texts if name is None else with_prompt(engine, texts, name)


def _model_type(engine: Engine) -> ClassifierType | EmbeddingType | RerankerType:
    model = engine.model
    if model.can("sparse"):
        return EmbeddingType(embedding=EmbeddingModel(pooling="splade"))
    if not model.can("classify"):
        return EmbeddingType(embedding=EmbeddingModel(pooling=model.artifact.pooling))
    labels = {index: str(label) for index, label in model.labels.items()}
    names = ClassifierModel(
        id2label={str(index): label for index, label in labels.items()},
        label2id={label: index for index, label in labels.items()},
    )
    if model.can("rerank"):
        return RerankerType(reranker=names)
    return ClassifierType(classifier=names)
