"""Routes for texts: embeddings, classification, similarity and tokenization."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Annotated, Any

import numpy as np
from fastapi import APIRouter, Request, Response
from pydantic import BeforeValidator, ConfigDict, FailFast, Field

from graph_passes.errors import InvalidData
from service.api.embedding import add_prompt, cut_vectors
from service.api.requests import (
    Body,
    JsonRoute,
    Name,
    acquire_engine,
    cancel_on_disconnect,
    deadline,
)
from service.api.responses import json_response, respond
from service.engine.engine import Engine

__all__ = ["router"]

router = APIRouter(tags=["Texts"], route_class=JsonRoute)


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

    model: Name | None = Field(None, description="Required if several models are served.")
    version: Name | None = Field(None, description="Version of the model; the highest if omitted.")
    truncate: bool = Field(
        True, description="Truncate texts that are too long; false refuses them."
    )


class EmbedRequest(TextBody):
    """Texts to embed."""

    inputs: Texts
    prompt_name: str | None = Field(
        None, description="The prompt of the model before each text; its default if omitted."
    )
    dimensions: int | None = Field(
        None, ge=1, description="Return only the first dimensions of each vector."
    )


class PredictRequest(TextBody):
    """Texts to classify."""

    inputs: Texts
    top_k: int | None = Field(
        None, ge=1, description="Number of most likely classes to return; all if omitted."
    )


class SimilarityRequest(TextBody):
    """Texts to compare: ``pairs``, or ``source`` with each of ``targets``."""

    pairs: list[Pair] | None = Field(None, min_length=1)
    source: str | None = None
    targets: list[str] | None = Field(None, min_length=1)


class TokenizeRequest(TextBody):
    """Texts to tokenize."""

    inputs: Texts
    truncate: bool = Field(False, description="Truncate texts that are too long.")


class Usage(Body):
    tokens: int = Field(description="Including special tokens, excluding padding.")


class Prediction(Body):
    label: str
    score: float


class TextResponse(Body):
    model: str
    usage: Usage


class PredictResponse(TextResponse):
    predictions: list[list[Prediction]] = Field(
        description="For each text, most likely class first."
    )


class SimilarityResponse(TextResponse):
    similarities: list[float] = Field(
        description="Cosine similarities, in the order of the request."
    )


class TokenizeResponse(TextResponse):
    tokens: list[list[int]] = Field(description="Token ids of each text, including special tokens.")


class EmbedResponse(TextResponse):
    embeddings: list[list[float]] = Field(
        description="One vector per text, in the order of the request."
    )


@router.post("/embed", response_model=EmbedResponse)
async def embed(request: Request, body: EmbedRequest) -> Response:
    """One vector per text, pooled and normalized as configured in the artifact.

    An empty text is valid: its special tokens have a vector.
    """
    engine = acquire_engine(request, body.model, body.version)
    texts = add_prompt(engine, body.inputs, body.prompt_name)
    answer = await cancel_on_disconnect(
        request, engine.embed(texts, truncate=body.truncate, deadline=deadline(request))
    )
    vectors = cut_vectors(engine, answer.outputs["embeddings"], body.dimensions)
    content = {"embeddings": vectors, **_model_and_usage(engine, answer.tokens)}
    return respond(request, engine, answer, content)


@router.post("/predict", response_model=PredictResponse)
async def predict(request: Request, body: PredictRequest) -> Response:
    """The classes of each text, most likely first.

    Scores are the softmax over the classes, for a single class the sigmoid of its logit, or the
    activation of the model. Labels come from ``id2label`` in attnserve.json or config.json; without
    it they are class numbers.
    """
    engine = acquire_engine(request, body.model, body.version)
    answer = await cancel_on_disconnect(
        request, engine.classify(body.inputs, truncate=body.truncate, deadline=deadline(request))
    )
    labels = engine.model.labels
    predictions = [
        [
            {"label": labels.get(at, str(at)), "score": float(scores[at])}
            for at in np.argsort(-scores, kind="stable")[: body.top_k].tolist()
        ]
        for scores in answer.outputs["scores"]
    ]
    content = {"predictions": predictions, **_model_and_usage(engine, answer.tokens)}
    return respond(request, engine, answer, content)


@router.post("/similarity", response_model=SimilarityResponse)
async def similarity(request: Request, body: SimilarityRequest) -> Response:
    """The cosine similarity of pairs of texts, or of one text with each of several."""
    engine = acquire_engine(request, body.model, body.version)
    texts, left, right = _pairs(body)
    answer = await cancel_on_disconnect(
        request,
        engine.embed(add_prompt(engine, texts), truncate=body.truncate, deadline=deadline(request)),
    )
    vectors = answer.outputs["embeddings"].astype(np.float64)
    vectors /= np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), np.finfo(np.float64).tiny)
    cosines = np.clip(np.einsum("nd,nd->n", vectors[left], vectors[right]), -1, 1)
    content = {"similarities": cosines, **_model_and_usage(engine, answer.tokens)}
    return respond(request, engine, answer, content)


@router.post("/tokenize", response_model=TokenizeResponse)
async def tokenize(request: Request, body: TokenizeRequest) -> Response:
    """The token ids of each text, including special tokens. The model is not run."""
    engine = acquire_engine(request, body.model, body.version)
    encodings = await cancel_on_disconnect(
        request, engine.tokenize(body.inputs, truncate=body.truncate, deadline=deadline(request))
    )
    tokens = [encoding.ids for encoding in encodings]
    usage = _model_and_usage(engine, sum(map(len, tokens)))
    return json_response({"tokens": tokens, **usage})


def _model_and_usage(engine: Engine, tokens: int) -> dict[str, Any]:
    return {"model": engine.name, "usage": {"tokens": tokens}}


def _pairs(body: SimilarityRequest) -> tuple[list[str], Sequence[int], Sequence[int]]:
    """(distinct texts, indices of the left texts, indices of the right texts)."""
    if (body.pairs is None) == (body.source is None) or (body.source is None) != (
        body.targets is None
    ):
        raise InvalidData(
            "expected either 'pairs', or 'source' and 'targets'",
            'for example {"source": "a text", "targets": ["another"]}',
        )
    if body.pairs is not None:
        pairs = body.pairs
    else:
        pairs = [[body.source or "", target] for target in body.targets or ()]
    order = {text: at for at, text in enumerate(dict.fromkeys(chain.from_iterable(pairs)))}
    return list(order), [order[left] for left, _ in pairs], [order[right] for _, right in pairs]
