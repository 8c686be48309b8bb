"""The limits of a request: bytes, texts, characters, tokens and the memory of its run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from attnserve.models.tokenizer import Encoding, Text
from attnserve.runtime.interface import Feed
from attnserve.serving.loaded_model import Model
from attnserve.serving.text_tasks import TextTask
from service.errors import TooLarge, UnsupportedTask
from service.settings import Settings

SHORT_CHARACTERS = 2000
"""Maximum number of characters of a request with short texts. Tokenizing them takes about 1 ms, in
the thread of a free slot, or else in another thread than longer texts (``Batcher.submit_from``)."""


def check_limit(count: int, limit: int, what: str) -> None:
    """Raise ``TooLarge`` if ``count`` is above ``limit``."""
    if count > limit:
        raise TooLarge(
            f"{count} {what} in one request: at most {limit}", "send several smaller requests"
        )


def check_tensors(model: Model, settings: Settings, inputs: Feed, outputs: Sequence[str]) -> int:
    """Refuse tensors of too many bytes or tokens, or whose run needs too much memory.

    Returns:
        The size of the output tensors in bytes.

    Raises:
        TooLarge: A limit is exceeded.
    """
    input_bytes = sum(array.nbytes for array in inputs.values())
    check_limit(input_bytes, settings.max_tensor_bytes, "bytes of input tensors")
    padded_tokens = math.prod(model.signature.ids(inputs).shape[:2])
    check_limit(padded_tokens, settings.max_padded_tokens, "padded tokens")
    shapes = {name: array.shape for name, array in inputs.items()}
    run_shapes = shapes
    if model.rows_are_independent:  # the batcher bounds the rows of a run
        run_shapes = {name: (1, *shape[1:]) for name, shape in shapes.items()}
    return _check_size(model, settings, shapes, run_shapes, outputs)


def check_texts(model: Model, settings: Settings, texts: Sequence[Text | Encoding]) -> bool:
    """Refuse too many or too long texts.

    Returns:
        Whether the texts are short in total (``SHORT_CHARACTERS``).

    Raises:
        UnsupportedTask: The model has no tokenizer.
        TooLarge: There are too many texts, or a text has too many characters.
    """
    if model.encoder is None:
        raise UnsupportedTask(
            f"{model.name} has no tokenizer.json, which texts need",
            f"send token ids to /v2/models/{model.name}/infer",
        )
    check_limit(len(texts), settings.max_inputs, "texts")
    limit = settings.max_text_chars
    counts = [sum(map(len, text)) if isinstance(text, tuple) else len(text) for text in texts]
    for index, count in enumerate(counts):
        if count > limit:
            raise TooLarge(
                f"text {index} has {count} characters: at most {limit}", "cut it into parts"
            )
    return sum(counts) <= SHORT_CHARACTERS


def check_encodings(
    model: Model,
    settings: Settings,
    task: TextTask,
    encodings: Sequence[Encoding],
    outputs: Sequence[str],
) -> None:
    """Refuse tokenized texts of too many tokens, or whose run or answer needs too much memory.

    Raises:
        TooLarge: A limit is exceeded.
    """
    tokens = sum(map(len, encodings))
    check_limit(tokens, settings.max_tokens, "tokens")
    # Pooling makes the answer small, but the run needs the memory for its longest row.
    longest = max(encodings, key=len)
    shapes = model.text_shapes(longest)
    _check_size(model, settings, shapes, shapes, outputs)
    vectors = tokens if task == "tokens" else len(encodings)
    size = vectors * model.signature.vector_bytes(shapes, outputs)
    check_limit(size, settings.max_tensor_bytes, "bytes of vectors")


def _check_size(
    model: Model,
    settings: Settings,
    shapes: Mapping[str, tuple[int, ...]],
    row: Mapping[str, tuple[int, ...]],
    outputs: Sequence[str],
) -> int:
    """The bytes of the output tensors, by the shapes of the inputs of a request and of one row.

    Raises:
        TooLarge: The outputs of the request, or an operator of its run, have too many bytes.
    """
    size = model.signature.output_bytes(shapes, outputs)
    check_limit(size, settings.max_tensor_bytes, "bytes of output tensors")
    needed = model.run_bytes(row)
    limit = settings.max_run_bytes
    if needed is not None and needed > limit:
        raise TooLarge(
            f"an operator of {model.name} needs {needed} bytes at this length: at most {limit}",
            "send a shorter input, or raise ATTNSERVE_MAX_RUN_BYTES",
        )
    return size
