"""OpenAI's embeddings over HTTP: POST /v1/embeddings, GET /v1/models.

https://platform.openai.com/docs/api-reference/embeddings

A text that is too long is refused, not cut, as OpenAI does. Token ids go to the model as they are:
special tokens are the sender's affair (POST /tokenize gives them). Errors have OpenAI's body on
every path below /v1 (``service/errors.py``).
"""

from __future__ import annotations

from typing import Any

import orjson
from fastapi import APIRouter, Request, Response

from service.http import accepts, parse_body, respond, served, unless_gone
from service.schemas import (
    EmbeddingsRequest,
    EmbeddingsResponse,
    ModelCard,
    ModelCards,
    OpenAIError,
)

__all__ = ["router"]

router = APIRouter(
    prefix="/v1",
    tags=["OpenAI"],
    responses={"4XX": {"model": OpenAIError}, "5XX": {"model": OpenAIError}},
)


@router.post("/embeddings", response_model=EmbeddingsResponse, **accepts(EmbeddingsRequest))
async def embeddings(request: Request) -> Response:
    """A vector for each text or list of token ids.

    ``dimensions`` is refused unless it is the model's own: a vector that was not trained for it is
    worth little when cut.
    """
    body = await parse_body(request, EmbeddingsRequest)
    engine = served(request, body.model)
    _check_dimensions(body.dimensions, engine.outputs[0].axes[-1:])
    work = (
        engine.embed(body.input, truncate=False)
        if isinstance(body.input[0], str)
        else engine.embed_ids(body.input)
    )
    answer = await unless_gone(request, work)
    vectors = answer.outputs["embeddings"]
    _check_dimensions(body.dimensions, vectors.shape[-1:])
    data = [
        {
            "object": "embedding",
            "index": index,
            "embedding": _as_base64(vector) if body.encoding_format == "base64" else vector,
        }
        for index, vector in enumerate(vectors)
    ]

    def envelope(data: orjson.Fragment, cost: dict[str, int | float]) -> dict[str, Any]:
        return {
            "object": "list",
            "data": data,
            "model": engine.name,
            "usage": {"prompt_tokens": cost["tokens"], "total_tokens": cost["tokens"]},
        }

    return respond(request, engine, answer, data, envelope)


@router.get("/models", response_model=ModelCards)
async def models(request: Request) -> Response:
    """The models that are loaded."""


@router.get("/models/{name}", response_model=ModelCard)
async def model(request: Request, name: str) -> Response:
    """One model."""
