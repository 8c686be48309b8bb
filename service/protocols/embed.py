"""POST /embed: texts in, vectors out."""

from __future__ import annotations

from typing import Any

import orjson
from fastapi import APIRouter, Request, Response

from service.http import accepts, parse_body, respond, served, unless_gone
from service.schemas import EmbedRequest, EmbedResponse

__all__ = ["router"]

router = APIRouter(tags=["Texts"])


@router.post("/embed", response_model=EmbedResponse, **accepts(EmbedRequest))
async def embed(request: Request) -> Response:
    """A vector for each text: tokenized, run, pooled and normalized as the artifact says.

    An empty text is a text: its special tokens have a vector.
    """
    engine = served(request)
    body = await parse_body(request, EmbedRequest)
    answer = await unless_gone(request, engine.embed(body.inputs, truncate=body.truncate))

    def envelope(vectors: orjson.Fragment, cost: dict[str, int | float]) -> dict[str, Any]:
        return {
            "embeddings": vectors,
            "model": engine.name,
            "usage": {"tokens": cost["tokens"]},
        }

    return respond(request, engine, answer, answer.outputs["embeddings"], envelope)
