"""Routes of rerankers: order texts by their relevance to a query.

``/v1/rerank`` has the form of Cohere and Jina, ``/v2/rerank`` the form of Cohere's newer clients,
and ``/rerank`` the form of text-embeddings-inference (``tei.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np
from fastapi import APIRouter, Response
from pydantic import BeforeValidator, Field, PositiveInt

from attnserve.literals import Activation
from attnserve.serving.activations import scores_of
from service.api.exchange import Here
from service.api.openai import OpenAIError
from service.api.requests import Body, JsonRoute, Name, serve_at
from service.api.responses import respond
from service.api.texts import TextList
from service.engine.engine import Engine

router = APIRouter(
    tags=["Cohere"],
    route_class=JsonRoute,
    responses={"4XX": {"model": OpenAIError}, "5XX": {"model": OpenAIError}},
)


def _texts_of(value: Any) -> Any:
    """The texts of documents; a document is a text or an object with a text."""
    if not isinstance(value, list):
        return value
    return [document.get("text") if isinstance(document, dict) else document for document in value]


class CohereDocument(Body):
    """The text of a document."""

    text: str


AnyDocuments = Annotated[list[str | CohereDocument], Field(min_length=1)]


class CohereRequest(Body):
    """Cohere's and Jina's request to rerank. Unknown fields are ignored."""

    model: Name | None = None
    """Required if several models are served."""
    query: str
    documents: Annotated[TextList, BeforeValidator(_texts_of, json_schema_input_type=AnyDocuments)]
    top_n: PositiveInt | None = None
    """Number of results; all if omitted."""
    return_documents: bool = False
    """Return the documents too."""


class CohereResult(Body):
    """The score of one document; ``index`` is its position in the request."""

    index: int
    relevance_score: float
    """The logit after the activation of the model; after the sigmoid (0 to 1) if it states none."""
    document: CohereDocument | None = None


class CohereUsage(Body):
    """The number of tokens, without padding."""

    total_tokens: int


class CohereResponse(Body):
    """The most relevant document first."""

    results: list[CohereResult]
    model: str
    usage: CohereUsage


@serve_at(router, "/v1/rerank", "/v2/rerank", response_model=CohereResponse)
async def rerank_documents(exchange: Here, body: CohereRequest) -> Response:
    """The relevance of each document to the query, most relevant first (Cohere, Jina)."""
    engine = exchange.acquire(body.model)
    pairs = query_pairs(engine, body.query, body.documents)
    answer = await exchange.run(engine.run_task("rerank", pairs, deadline=exchange.deadline()))
    ranked = ranked_by_score(answer.vectors, engine.model.artifact.activation)[: body.top_n]
    results = [
        {"index": at, "relevance_score": score}
        | ({"document": {"text": body.documents[at]}} if body.return_documents else {})
        for at, score in ranked
    ]
    usage = {"total_tokens": answer.tokens}
    content = {"results": results, "model": engine.name, "usage": usage}
    return await respond(exchange, engine, answer, content)


def query_pairs(engine: Engine, query: str, texts: Sequence[str]) -> list[tuple[str, str]]:
    """Pairs of the query, after the default prompt of a cross-encoder, and each text."""
    return [(engine.model.artifact.prompt() + query, text) for text in texts]


def ranked_by_score(logits: np.ndarray, activation: Activation | None) -> list[tuple[int, float]]:
    """(index, score) by decreasing logit (texts, 1); texts with equal logits keep their order."""
    scores = scores_of(logits, activation)
    return [(int(at), float(scores[at, 0])) for at in np.argsort(-logits[:, 0], kind="stable")]
