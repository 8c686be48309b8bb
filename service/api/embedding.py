"""Prompts and dimensions of embeddings, which a request may choose."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from attnserve.models.tokenizer import shorten
from service.engine.engine import Engine, Text
from service.errors import InvalidField

__all__ = ["add_prompt", "cut_vectors"]


def add_prompt(engine: Engine, texts: Sequence[Text], name: str | None = None) -> Sequence[Text]:
    """Texts after the prompt with this name, or after the default prompt of the model.

    Token ids have no prompt.

    Raises:
        InvalidField: The model has no such prompt, or token ids were sent for it.
    """
    artifact = engine.model.artifact
    if name is not None and name not in artifact.prompts:
        known = ", ".join(sorted(artifact.prompts)) or "none"
        raise InvalidField(
            f"prompt_name is {name!r}, but prompts of {engine.name} are {known}",
            "leave it out",
            field="prompt_name",
        )
    if name is not None and not all(isinstance(text, str) for text in texts):
        raise InvalidField("prompt_name is for texts, not token ids", field="prompt_name")
    prompt = artifact.prompt() if name is None else artifact.prompts[name]
    return [prompt + text if isinstance(text, str) else text for text in texts]


def cut_vectors(engine: Engine, vectors: np.ndarray, dimensions: int | None) -> np.ndarray:
    """The first dimensions of vectors, normalized again if the model normalizes.

    Raises:
        InvalidField: The vectors have fewer dimensions.
    """
    if dimensions in (None, vectors.shape[1]):
        return vectors
    if dimensions > vectors.shape[1]:
        raise InvalidField(
            f"dimensions is {dimensions}, but vectors of {engine.name} have {vectors.shape[1]}",
            "reduce it, or leave it out",
            field="dimensions",
        )
    return shorten(vectors, dimensions, engine.model.artifact.normalize)
