"""The bodies of requests and answers, as clients see them.

They validate what ``orjson`` has parsed, and they are the OpenAPI document. Types are strict: a
``"3"`` is no number and a 1 is no boolean. Tensor ``data`` is left as parsed: the codec of
``protocols/open_inference.py`` checks it, in numpy.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, FailFast, Field, WithJsonSchema

__all__ = [
    "Datatype",
    "EmbedRequest",
    "EmbedResponse",
    "Error",
    "InferRequest",
    "InferResponse",
    "InputTensor",
    "Live",
    "ModelMetadata",
    "ModelReady",
    "OutputTensor",
    "PredictRequest",
    "PredictResponse",
    "Prediction",
    "Ready",
    "RequestedOutput",
    "ServerMetadata",
    "SimilarityRequest",
    "SimilarityResponse",
    "TensorMetadata",
    "TokenizeRequest",
    "TokenizeResponse",
    "Usage",
]

Datatype = Literal[
    "BOOL",
    "UINT8",
    "UINT16",
    "UINT32",
    "UINT64",
    "INT8",
    "INT16",
    "INT32",
    "INT64",
    "FP16",
    "FP32",
    "FP64",
]

Parameters = dict[str, Any]
Name = Annotated[str, Field(max_length=1024)]


class Body(BaseModel):
    model_config = ConfigDict(strict=True)


class Error(Body):
    """Every answer that is not a success."""

    error: str


class InputTensor(Body):
    """One input: ``data`` flat in row-major order, or nested as ``shape`` says."""

    name: Name
    shape: list[Annotated[int, Field(ge=0)]] = Field(max_length=32, examples=[[1, 3]])
    datatype: Datatype
    data: list[Any] = Field(examples=[[101, 7592, 102]])
    parameters: Parameters = {}


class RequestedOutput(Body):
    name: Name
    parameters: Parameters = {}


class InferRequest(Body):
    """Open Inference Protocol v2, inference request. Unknown fields are extensions: ignored."""

    id: str | None = Field(None, max_length=1024)
    parameters: Parameters = {}
    inputs: Annotated[list[InputTensor], FailFast()] = Field(min_length=1)
    outputs: Annotated[list[RequestedOutput], FailFast()] = Field(
        [], description="All of them where left out."
    )


class OutputTensor(Body):
    """One output: ``data`` flat in row-major order. JSON has no NaN and no infinity: both null."""

    name: str
    shape: list[int]
    datatype: Datatype
    data: list[Any]


class InferResponse(Body):
    """Open Inference Protocol v2, inference response; ``parameters`` say what it cost."""

    model_config = ConfigDict(protected_namespaces=())

    model_name: str
    model_version: str
    id: str | None = None
    parameters: Parameters
    outputs: list[OutputTensor]


class TensorMetadata(Body):
    name: str
    datatype: Datatype
    shape: list[int] = Field(description="-1 where any size goes.")


class ModelMetadata(Body):
    name: str
    versions: list[str]
    platform: str
    inputs: list[TensorMetadata]
    outputs: list[TensorMetadata]


class ModelReady(Body):
    name: str
    ready: bool


class ServerMetadata(Body):
    name: str
    version: str
    extensions: list[str]


class Live(Body):
    live: bool


class Ready(Body):
    ready: bool


Pair = Annotated[list[str], FailFast(), Field(min_length=2, max_length=2)]

# One text is a list of one. (A union would answer bad lists with what is wrong with a string.)
Texts = Annotated[
    list[str],
    FailFast(),
    Field(min_length=1),
    BeforeValidator(lambda value: [value] if isinstance(value, str) else value),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "string"}, "minItems": 1},
            ],
            "examples": ["What is attention?", ["a text", "another"]],
        }
    ),
]


class TextBody(Body):
    """What requests with texts share. An unknown field is refused: it would not do what its sender
    expects."""

    model_config = ConfigDict(extra="forbid")

    model: Name | None = Field(None, description="Needed where several models are served.")
    version: Name | None = Field(None, description="Of the model; the highest where left out.")
    truncate: bool = Field(True, description="Cut texts that are too long; false refuses them.")


class EmbedRequest(TextBody):
    """Texts to embed."""

    inputs: Texts


class PredictRequest(TextBody):
    """Texts to classify."""

    inputs: Texts
    top_k: int | None = Field(None, ge=1, description="The likeliest classes; all where left out.")


class SimilarityRequest(TextBody):
    """Texts to compare: ``pairs``, or ``source`` with each of ``targets``."""

    pairs: list[Pair] | None = Field(None, min_length=1)
    source: str | None = None
    targets: list[str] | None = Field(None, min_length=1)


class TokenizeRequest(TextBody):
    """Texts to tokenize."""

    inputs: Texts
    truncate: bool = Field(False, description="Cut texts that are too long for the model.")


class Usage(Body):
    tokens: int = Field(description="Special tokens included, padding not.")


class Prediction(Body):
    label: str
    score: float


class PredictResponse(Body):
    predictions: list[list[Prediction]] = Field(description="Of each text, the likeliest first.")
    model: str
    usage: Usage


class SimilarityResponse(Body):
    similarities: list[float] = Field(description="Cosines, -1 to 1, in the order sent.")
    model: str
    usage: Usage


class TokenizeResponse(Body):
    tokens: list[list[int]] = Field(description="Ids of each text, special tokens included.")
    model: str
    usage: Usage


class EmbedResponse(Body):
    embeddings: list[list[float]] = Field(description="One vector a text, in the order sent.")
    model: str
    usage: Usage
