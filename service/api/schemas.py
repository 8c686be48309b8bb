"""Schemas of request and response bodies, for validation and the OpenAPI document.

Types are strict: ``"3"`` is not a number and 1 is not a boolean. ``tensors.py`` validates the
``data`` of tensors.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, FailFast, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

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


def _no_bytes(value: Any) -> Any:
    if value == "BYTES":
        raise PydanticCustomError(
            "bytes", "BYTES is not supported; send texts to /embed or /predict"
        )
    return value


class Body(BaseModel):
    model_config = ConfigDict(strict=True)


class Error(Body):
    """The body of an error."""

    error: str


class Extensible(Body):
    """The supported parameters; others belong to extensions and are ignored."""

    model_config = ConfigDict(extra="allow")


class TensorParameters(Extensible):
    binary_data_size: int | None = Field(
        default=None,
        ge=0,
        description="Size in bytes of this tensor after the JSON, instead of ``data``.",
    )


class InputTensor(Body):
    """One input: ``data`` flat in row-major order, or nested like ``shape``, or raw bytes."""

    name: Name
    shape: list[Annotated[int, Field(ge=0)]] = Field(max_length=32, examples=[[1, 3]])
    datatype: Annotated[Datatype, BeforeValidator(_no_bytes)]
    data: list[Any] | None = Field(default=None, examples=[[101, 7592, 102]])
    parameters: TensorParameters = TensorParameters()


class OutputParameters(Extensible):
    binary_data: bool | None = Field(
        default=None,
        description="Send raw bytes after the JSON; overrides ``binary_data_output``.",
    )


class RequestedOutput(Body):
    name: Name
    parameters: OutputParameters = OutputParameters()


class InferParameters(Extensible):
    binary_data_output: bool | None = Field(
        default=None,
        description="Send outputs as raw bytes after the JSON, unless they set ``binary_data``.",
    )
    timeout: int | None = Field(
        default=None,
        ge=0,
        description="Time limit in microseconds (504 when exceeded); 0 for none.",
    )
    priority: int | None = Field(
        default=None, ge=0, description="Ignored: all requests have the same priority."
    )


class InferRequest(Body):
    """Open Inference Protocol v2, inference request. Unknown fields are ignored."""

    id: str | None = Field(None, max_length=1024)
    parameters: InferParameters = InferParameters()
    inputs: Annotated[list[InputTensor], FailFast()] = Field(min_length=1)
    outputs: Annotated[list[RequestedOutput], FailFast()] = Field(
        [], description="All outputs if omitted."
    )


class OutputTensor(Body):
    """One output: ``data`` flat in row-major order; NaN and infinities are null.

    If ``parameters`` has a ``binary_data_size``, raw bytes after the JSON replace ``data``.
    """

    name: str
    shape: list[int]
    datatype: Datatype
    data: list[Any] | None = None
    parameters: TensorParameters | None = None


class InferResponse(Body):
    """Open Inference Protocol v2, inference response; ``parameters`` holds its cost."""

    model_config = ConfigDict(protected_namespaces=())

    model_name: str
    model_version: str
    id: str | None = None
    parameters: Parameters
    outputs: list[OutputTensor]


class TensorMetadata(Body):
    name: str
    datatype: Datatype
    shape: list[int] = Field(description="-1 for axes of any size.")


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


class ModelConfig(BaseModel):
    """The supported fields of Triton's ModelConfig."""

    model_config = ConfigDict(extra="allow")

    name: str
    platform: str
    backend: str
    max_batch_size: int = Field(description="0 if requests cannot be batched.")
    input: list[dict[str, Any]]
    output: list[dict[str, Any]]


class Duration(Body):
    count: int
    ns: int


class InferStatistics(Body):
    success: Duration
    fail: Duration
    queue: Duration
    compute_input: Duration
    compute_infer: Duration
    compute_output: Duration
    cache_hit: Duration = Field(description="Always 0, like cache_miss: there is no cache.")
    cache_miss: Duration


class BatchStatistics(Body):
    batch_size: int
    compute_input: Duration
    compute_infer: Duration
    compute_output: Duration


class VersionStatistics(Body):
    name: str
    version: str
    last_inference: int = Field(description="Milliseconds since 1970; 0 if there was none.")
    inference_count: int = Field(description="Number of answered rows.")
    execution_count: int = Field(description="Number of runs of the model.")
    inference_stats: InferStatistics
    batch_stats: list[BatchStatistics]


class ModelStatistics(Body):
    """Exact counts and times in nanoseconds."""

    model_stats: list[VersionStatistics]


class IndexRequest(Body):
    ready: bool = Field(default=False, description="Only versions that are ready.")


class IndexEntry(Body):
    name: str
    version: str
    state: Literal["READY", "LOADING", "UNAVAILABLE"]
    reason: str = Field(description="Why the version is not ready.")


class RepositoryRequest(Body):
    parameters: Parameters = {}


class Live(Body):
    live: bool


class Ready(Body):
    ready: bool


Pair = Annotated[list[str], FailFast(), Field(min_length=2, max_length=2)]

# A single text becomes a list. (A union would report the error of the wrong alternative.)
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


class PredictResponse(Body):
    predictions: list[list[Prediction]] = Field(
        description="For each text, most likely class first."
    )
    model: str
    usage: Usage


class SimilarityResponse(Body):
    similarities: list[float] = Field(
        description="Cosine similarities, in the order of the request."
    )
    model: str
    usage: Usage


class TokenizeResponse(Body):
    tokens: list[list[int]] = Field(description="Token ids of each text, including special tokens.")
    model: str
    usage: Usage


class EmbedResponse(Body):
    embeddings: list[list[float]] = Field(
        description="One vector per text, in the order of the request."
    )
    model: str
    usage: Usage


def _one_kind(value: Any) -> Any:
    """Validate all forms of an input at once: a union would report an error for each form."""
    items = value if type(value) is list else [value]
    if type(value) is list and value and set(map(type, value)) <= {int}:
        items = [value]  # the ids of one text
    kinds = set(map(type, items))
    ids = kinds == {list} and all(one and set(map(type, one)) == {int} for one in items)
    if kinds == {str} or ids:
        return items
    raise PydanticCustomError(
        "input", "expected a text, texts, or one or several non-empty lists of token ids"
    )


# After validation: a list of texts, or a list of lists of token ids.
Inputs = Annotated[
    list[str] | list[list[int]],
    BeforeValidator(_one_kind),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "string"}, "minItems": 1},
                {"type": "array", "items": {"type": "integer"}, "minItems": 1},
                {
                    "type": "array",
                    "items": {"type": "array", "items": {"type": "integer"}, "minItems": 1},
                    "minItems": 1,
                },
            ],
            "examples": ["What is attention?", ["a text", "another"], [101, 7592, 102]],
        }
    ),
]


class EmbeddingsRequest(Body):
    """OpenAI's request for embeddings. Unknown fields are refused, as in OpenAI's API."""

    model_config = ConfigDict(extra="forbid")

    model: Name
    input: Inputs
    encoding_format: Literal["float", "base64"] = Field(
        "float", description="base64 encodes little-endian float32."
    )
    dimensions: int | None = Field(
        None, ge=1, description="Must be the size of the model's vectors."
    )
    user: str | None = Field(None, description="Ignored.")


class Embedding(Body):
    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class OpenAIUsage(Body):
    prompt_tokens: int
    total_tokens: int


class EmbeddingsResponse(Body):
    """Vectors in the order of the inputs."""

    object: Literal["list"] = "list"
    data: list[Embedding]
    model: str
    usage: OpenAIUsage


class ModelCard(Body):
    id: str
    object: Literal["model"] = "model"
    created: int = Field(description="Modification time of the file, in seconds since 1970.")
    owned_by: str


class ModelCards(Body):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class OpenAIErrorDetail(Body):
    message: str
    type: str
    param: str | None
    code: str | None


class OpenAIError(Body):
    """The body of an error below /v1."""

    error: OpenAIErrorDetail
