"""Texts in: vectors, classes, likenesses or tokens out."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
from fastapi import APIRouter, Request, Response

from graph_passes.errors import InvalidData
from service.api.routes import (
    JsonRoute,
    acquire_engine,
    cancel_on_disconnect,
    deadline,
    json_response,
    respond,
)
from service.api.schemas import (
    EmbedRequest,
    EmbedResponse,
    PredictRequest,
    PredictResponse,
    SimilarityRequest,
    SimilarityResponse,
    TokenizeRequest,
    TokenizeResponse,
)
from service.engine.answer import Answer
from service.engine.engine import Engine

__all__ = ["router"]

router = APIRouter(tags=["Texts"], route_class=JsonRoute)


@router.post("/embed", response_model=EmbedResponse)
async def embed(request: Request, body: EmbedRequest) -> Response:
    """A vector for each text: tokenized, run, pooled and normalized as the artifact says.

    An empty text is a text: its special tokens have a vector.
    """
    engine = acquire_engine(request, body.model, body.version)
    answer = await cancel_on_disconnect(
        request, engine.embed(body.inputs, truncate=body.truncate, deadline=deadline(request))
    )

    return _told(request, engine, answer, "embeddings", answer.outputs["embeddings"])


@router.post("/predict", response_model=PredictResponse)
async def predict(request: Request, body: PredictRequest) -> Response:
    """The classes of each text, the likeliest first.

    Scores are the softmax over the classes; of a single class, the sigmoid of its logit. Labels are
    those of ``id2label`` in attnserve.json or config.json, else the numbers of the classes.
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

    return _told(request, engine, answer, "predictions", predictions)


@router.post("/similarity", response_model=SimilarityResponse)
async def similarity(request: Request, body: SimilarityRequest) -> Response:
    """The cosine between texts: of each pair, or of one text with each of many."""
    engine = acquire_engine(request, body.model, body.version)
    texts, left, right = _compared(body)
    answer = await cancel_on_disconnect(
        request, engine.embed(texts, truncate=body.truncate, deadline=deadline(request))
    )
    vectors = answer.outputs["embeddings"].astype(np.float64)
    vectors /= np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), np.finfo(np.float64).tiny)
    cosines = np.clip(np.einsum("nd,nd->n", vectors[left], vectors[right]), -1, 1)

    return _told(request, engine, answer, "similarities", cosines)


@router.post("/tokenize", response_model=TokenizeResponse)
async def tokenize(request: Request, body: TokenizeRequest) -> Response:
    """The token ids of each text, special tokens included; nothing is run."""
    engine = acquire_engine(request, body.model, body.version)
    encodings = await engine.tokenize(body.inputs, truncate=body.truncate)
    return json_response(
        {
            "tokens": [encoding.ids for encoding in encodings],
            **_about(engine, {"tokens": sum(map(len, encodings))}),
        }
    )


def _told(request: Request, engine: Engine, answer: Answer, key: str, value: Any) -> Response:
    """``value`` under ``key``, and what it is of and cost."""
    return respond(
        request, engine, answer, value,
        lambda written, cost: {key: written, **_about(engine, cost)},
    )  # fmt: skip


def _about(engine: Engine, cost: dict[str, int | float]) -> dict[str, Any]:
    return {"model": engine.name, "usage": {"tokens": cost["tokens"]}}


def _compared(body: SimilarityRequest) -> tuple[list[str], Sequence[int], Sequence[int]]:
    """(texts, each once; which of them is on the left of each comparison; which on the right)."""
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
