"""Run texts in batches, and pool the outputs to embeddings. Callers pass a session.

Dimensions: B texts in a batch, S tokens of the longest text, D hidden size, N texts in total.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from attnserve.literals import Pooling
from attnserve.models.artifact import Artifact
from attnserve.models.rows import fixed_axes
from attnserve.models.tokenizer import Encoding, TextEncoder, model_inputs
from attnserve.runtime.interface import RunFailed, Session
from graph_passes.errors import InvalidArgument, InvalidData

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int

__all__ = [
    "BY_COSINE",
    "VECTOR_OUTPUTS",
    "Embedding",
    "output_name",
    "pool",
    "preferred_output",
    "run_texts",
    "shorten",
]

VECTOR_OUTPUTS = ("sentence_embedding", "last_hidden_state", "token_embeddings")
"""Names that exporters give to the embedding of a text and to hidden states, the best first."""


class Embedding(NamedTuple):
    """How outputs of a model become the vectors of texts that are compared.

    Attributes:
        pooling: The pooling of hidden states; "none" pools them by their mean.
        dimensions: The number of dimensions that vectors keep; None for all.
        is_unit: Whether vectors have length one. Otherwise neighbors depend on the lengths.
    """

    pooling: Pooling = "mean"
    dimensions: int | None = None
    is_unit: bool = True

    @classmethod
    def of(cls, artifact: Artifact) -> Embedding:
        """The embedding of a model; that of a model without tokenizer has the mean of its rows."""
        pooling = "mean" if artifact.tokenizer is None else artifact.pooling
        return cls(pooling, artifact.dimensions, artifact.ranks_unit_vectors)

    def vectors(
        self, output: Float[np.ndarray, "B S D"] | Float[np.ndarray, "B D"], mask: np.ndarray
    ) -> Float[np.ndarray, "B D"]:
        """The vectors of an output; see ``pool``."""
        pooling = "mean" if self.pooling == "none" else self.pooling
        dimensions = min(self.dimensions or output.shape[-1], output.shape[-1])
        return pool(output, mask, pooling, self.is_unit, dimensions)


BY_COSINE = Embedding()


def preferred_output(names: Sequence[str], *, scores: bool = False) -> str:
    """The output from which embeddings or scores are computed, by its name; else the first one.

    A graph with an embedding and hidden states gives the embedding, which it pools itself.
    """
    wanted = ("logits",) if scores else VECTOR_OUTPUTS
    return next((name for name in wanted if name in names), names[0])


def run_texts(
    session: Session,
    encoder: TextEncoder,
    encodings: Sequence[Encoding],
    *,
    batch_size: int = 32,
    output: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Iterator[tuple[Int[np.ndarray, " B"], np.ndarray, Bool[np.ndarray, "B S"]]]:
    """Yield (indices into ``encodings``, a model output, mask of real tokens) of each batch.

    A model with a fixed number of rows gets batches of that many, of which the last one is filled.

    Args:
        output: The name of the output; None selects the embedding (``output_name``).

    Raises:
        InvalidData: The inputs of the model are not tokens, or it refuses a batch.
        InvalidArgument: ``batch_size`` is below 1, or the model has no such output.
    """
    inputs = model_inputs(session)
    output = output_name([value.name for value in session.get_outputs()], output)
    count = 0
    rows, _ = fixed_axes(value.shape for value in session.get_inputs())
    if "attention_mask" not in inputs and len({*map(len, encodings)}) > 1:
        batch_size = 1  # without a mask, texts cannot be padded
    for indices, feed in encoder.batches(encodings, rows or batch_size, inputs):
        mask = encoder.mask([encodings[i] for i in indices])
        padding = 0 if rows is None else rows - len(indices)
        if padding:
            feed = {
                name: np.concatenate([array, np.repeat(array[-1:], padding, axis=0)])
                for name, array in feed.items()
            }
        try:
            (value,) = session.run([output], feed)
        except RunFailed as error:
            raise InvalidData(
                f"the model refuses a batch of {mask.shape[0]} texts x {mask.shape[1]} tokens:"
                f" {error.reason}",
                "reduce `max_length` to the number of positions of the model, or `batch_size`",
                code="text.batch_refused",
            ) from error
        if padding and rows:
            value = value[: len(value) // rows * len(indices)]
        yield indices, value, mask
        count += len(indices)
        if progress is not None:
            progress(count, len(encodings))


def output_name(names: Sequence[str], name: str | None, *, scores: bool = False) -> str:
    """The name of an output, which must be one of ``names``; for None see ``preferred_output``.

    Raises:
        InvalidArgument: The model has no such output.
    """
    if name is not None and name not in names:
        raise InvalidArgument(
            f"`output` is {name!r}: the outputs of the model are {', '.join(names)}",
            "correct it in attnserve.json; or export the folder of the model, so that its modules"
            " become part of the graph",
            code="text.output",
        )
    return name or preferred_output(names, scores=scores)


def pool(
    hidden: Float[np.ndarray, "B S D"] | Float[np.ndarray, "B D"],
    mask: Bool[np.ndarray, "B S"] | Int[np.ndarray, "B S"],
    pooling: Pooling,
    normalize: bool,
    dimensions: int | None = None,
) -> Float[np.ndarray, "B D"]:
    """Pool hidden states to one vector per text.

    Args:
        hidden: One vector per token, or one vector per text (already pooled).
        mask: Nonzero for real tokens, with padding on either side.
        pooling: "mean" of the tokens, "cls" (first token), "last" (last token), or "none" for
            pooled outputs.
        normalize: Scale each vector to length one.
        dimensions: Keep only the first dimensions (Kusupati et al. 2022, Matryoshka Representation
            Learning); None for all.

    Raises:
        InvalidArgument: ``pooling`` is "none" for one vector per token, ``dimensions`` is not from
            1 to D, or the rank is invalid.
    """
    if hidden.ndim not in (2, 3):
        raise InvalidArgument(
            f"the output has shape {hidden.shape}:"
            " expected [batch, sequence, hidden] or [batch, hidden]",
            "choose a model whose first output is a hidden state or an embedding",
            code="text.pool_shape",
        )
    if hidden.ndim == 3 and pooling == "none":
        raise InvalidArgument(
            f"`pooling` is none: expected an output [batch, hidden], found {list(hidden.shape)}",
            "set `pooling` to mean, cls or last",
            code="text.pooling",
        )
    vectors = hidden.astype(np.float32, copy=False)  # float16 sums overflow
    rows = np.arange(len(vectors))
    real = mask != 0
    if hidden.ndim == 3 and pooling == "cls":
        vectors = vectors[rows, real.argmax(axis=1)]  # B D
    elif hidden.ndim == 3 and pooling == "last":
        vectors = vectors[rows, real.shape[1] - 1 - real[:, ::-1].argmax(axis=1)]  # B D
    elif hidden.ndim == 3:
        weights = real.astype(np.float32)  # B S
        vectors = np.einsum("bsd,bs->bd", vectors, weights)
        vectors /= np.maximum(weights.sum(axis=1, keepdims=True), 1)
    return shorten(vectors, dimensions, normalize)


def shorten(
    vectors: Float[np.ndarray, "N D"], dimensions: int | None, normalize: bool
) -> Float[np.ndarray, "N d"]:
    """Keep the first dimensions of vectors, and then scale each to length one if ``normalize``.

    Raises:
        InvalidArgument: ``dimensions`` is not from 1 to D.
    """
    if dimensions is not None and not 1 <= dimensions <= vectors.shape[-1]:
        raise InvalidArgument(
            f"`dimensions` is {dimensions}: expected 1 to {vectors.shape[-1]}, the size of the"
            " vectors",
            "reduce it, or leave it out",
            code="text.dimensions",
        )
    vectors = np.ascontiguousarray(vectors[..., :dimensions])  # as JSON encoders require
    if normalize:
        length = np.linalg.norm(vectors, axis=-1, keepdims=True)  # B 1
        vectors = vectors / np.maximum(length, np.finfo(np.float32).tiny)
    return vectors
