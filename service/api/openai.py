"""OpenAI's embeddings API: POST /v1/embeddings, GET /v1/models.

https://platform.openai.com/docs/api-reference/embeddings

As in OpenAI's API, a text that is too long is refused and not truncated. Token ids are passed to
the model unchanged, with the special tokens that POST /tokenize returns. Ids without special
tokens, such as ids of OpenAI's own tokenizer, are refused, unless ``any_token_ids`` is set.
"""

from __future__ import annotations

import base64
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import APIRouter, Response
from pydantic import BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

from graph_passes.errors import InvalidArgument, InvalidData
from service.api.exchange import Here
from service.api.requests import Body, JsonRoute, Name, serve_at
from service.api.responses import respond
from service.api.texts import (
    SomeTexts,
    VectorOptions,
    embed_texts,
    with_prompt,
    with_token_ids,
)
from service.engine.engine import Engine
from service.errors import InvalidField, UnknownField, UnknownModel

ERRORS: dict[int, tuple[str, str | None]] = {
    401: ("invalid_request_error", "invalid_api_key"),
    429: ("requests", "rate_limit_exceeded"),
}
"""OpenAI's error type and code by status; another status has the type of its class (4xx, 5xx)."""


def _one_kind(value: Any) -> Any:
    """Validate all forms of an input at once, because a union reports one error per form."""
    items = value if type(value) is list else [value]
    if type(value) is list and set(map(type, value)) == {int}:
        items = [value]  # the ids of one text
    kinds = set(map(type, items))
    if kinds == {str} or (kinds == {list} and all(set(map(type, ids)) == {int} for ids in items)):
        return items
    raise PydanticCustomError(
        "input", "expected a text, texts, or one or several non-empty lists of token ids"
    )


Ids = Annotated[list[int], Field(min_length=1)]
IdsOfTexts = Annotated[list[Ids], Field(min_length=1)]

# After validation: a list of texts, or a list of lists of token ids.
Inputs = Annotated[
    list[str] | list[list[int]],
    BeforeValidator(_one_kind, json_schema_input_type=str | SomeTexts | Ids | IdsOfTexts),
    Field(examples=["What is attention?", ["a text", "another"], [101, 7592, 102]]),
]


class EmbeddingsRequest(VectorOptions):
    """OpenAI's request for embeddings, with the extension ``prompt_name``.

    Unknown fields are refused, as by OpenAI.
    """

    model_config = ConfigDict(extra="forbid")

    model: Name
    input: Inputs
    encoding_format: Literal["float", "base64"] = "float"
    """base64 encodes little-endian float32."""
    user: str | None = None
    """Ignored."""


class Embedding(Body):
    """The vector of one input: numbers, or base64 text."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class OpenAIUsage(Body):
    """The number of tokens without padding, as ``prompt_tokens`` and as ``total_tokens``."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingsResponse(Body):
    """Vectors in the order of the inputs."""

    object: Literal["list"] = "list"
    data: list[Embedding]
    model: str
    usage: OpenAIUsage


class ModelCard(Body):
    """A loaded model."""

    id: str
    object: Literal["model"] = "model"
    created: int
    """Modification time of the file, in seconds since 1970."""
    owned_by: str = "attnserve"


class ModelCards(Body):
    """The loaded models."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class OpenAIErrorDetail(Body):
    """An error: its text, type, field and code."""

    message: str
    type: str
    param: str | None
    code: str | None


class OpenAIError(Body):
    """The body of an error below /v1."""

    error: OpenAIErrorDetail


router = APIRouter(
    tags=["OpenAI"],
    route_class=JsonRoute,
    responses={"4XX": {"model": OpenAIError}, "5XX": {"model": OpenAIError}},
)


def render_error(status: int, text: str, error: Exception | None) -> tuple[int, OpenAIError]:
    """(status, body) of an error below /v1; OpenAI answers 400 where other routes answer 422."""
    kind, code = ERRORS.get(
        status, ("invalid_request_error" if status < 500 else "server_error", None)
    )
    param = None
    if isinstance(error, UnknownModel):
        param, code = "model", "model_not_found"
    elif isinstance(error, UnknownField):  # OpenAI does not name the field in ``param``
        text = f"Unrecognized request argument supplied: {error.field}"
    elif isinstance(error, InvalidField):
        param = error.field or None
    detail = OpenAIErrorDetail(message=text, type=kind, param=param, code=code)
    return 400 if status == 422 else status, OpenAIError(error=detail)


# Without /v1 as in text-embeddings-inference.
@serve_at(router, "/v1/embeddings", "/embeddings", response_model=EmbeddingsResponse)
async def embeddings(exchange: Here, body: EmbeddingsRequest) -> Response:
    """One vector per text or list of token ids."""
    engine = exchange.acquire(body.model)
    inputs = with_token_ids(engine, body.input, "input")
    try:
        texts = with_prompt(engine, inputs, body.prompt_name)
        answer, vectors = await embed_texts(
            exchange, engine, texts, truncate=False, dimensions=body.dimensions
        )
    except InvalidField:
        raise
    except (InvalidData, InvalidArgument) as error:
        fix = "shorten it" if error.code == "text.too_long" else error.fix  # no `truncate` here
        raise InvalidField(error.what, fix, field="input") from error
    encoded = map(_base64, vectors) if body.encoding_format == "base64" else vectors
    content = {
        "object": "list",
        "data": [
            {"object": "embedding", "index": index, "embedding": embedding}
            for index, embedding in enumerate(encoded)
        ],
        "model": engine.name,
        "usage": {"prompt_tokens": answer.tokens, "total_tokens": answer.tokens},
    }
    return await respond(exchange, engine, answer, content)


@router.get("/v1/models")
async def models(exchange: Here) -> ModelCards:
    """The loaded models."""
    repository = exchange.repository
    names = dict.fromkeys(engine.name for engine in repository.engines())
    return ModelCards(data=[_card(repository.engine(name)) for name in names])


@serve_at(router, "/v1/models/{name}", method="GET")
async def model(exchange: Here) -> ModelCard:
    """One loaded model."""
    return _card(exchange.engine())


def _card(engine: Engine) -> ModelCard:
    return ModelCard(id=engine.name, created=engine.model.created)


def _base64(vector: np.ndarray) -> str:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode("ascii")
