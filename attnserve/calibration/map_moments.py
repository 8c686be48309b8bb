"""Moments of the input and the target of a linear map, over the real tokens of batches.

Only sums are stored (``ridge.FitMoments``), so the data may have any length.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from attnserve.calibration.layerwise import LayerwiseRunner
from attnserve.calibration.linear_maps import Site, last_map
from attnserve.calibration.ridge import FitMoments
from attnserve.context import DEFAULT_CONTEXT, RunContext
from attnserve.data.row_batches import thinned
from attnserve.models.masks import flat_mask, is_mask, no_token, not_finite, token_mask
from attnserve.models.rows import row_count
from attnserve.runtime.interface import Batch
from graph_passes.blocks import Block

__all__ = ["MomentSum", "Tokens", "enough", "last_map_moments", "real_tokens"]


def last_map_moments(
    model: ir.Model,
    blocks: Sequence[Block],
    batches: Sequence[Batch],
    *,
    context: RunContext = DEFAULT_CONTEXT,
) -> Iterator[tuple[str, FitMoments]]:
    """Yield each block's name, and the moments of the input and output of its last linear map.

    The last linear map is the output projection of attention, or the second product of a
    feed-forward layer. Blocks are in execution order. Moments of one block are in memory at a time:
    all feed-forwards of an 8-billion-parameter model would take 67 GB.

    Raises:
        InvalidData: The model refuses a batch, or its activations are not finite.
    """
    order = {value: place for place, node in enumerate(model.graph) for value in node.outputs}
    sites = sorted(map(last_map, blocks), key=lambda site: order.get(site.output, len(order)))
    values = [[v for v in (site.tokens, site.output) if v is not None] for site in sites]
    runner = LayerwiseRunner(model, batches, context=context)
    for index, site in enumerate(sites):
        sums = MomentSum()
        runs = runner.run_to(values[index], list(chain(*values[index + 1 :])))
        for batch, arrays in zip(batches, runs, strict=True):
            activations = dict(zip(values[index], arrays, strict=True))
            output = activations[site.output]
            tokens = real_tokens(site, activations, output, batch, site.sequence_first)
            sums.add(tokens.inputs, tokens.targets)
        moments = sums.moments()
        if not moments.count:
            raise no_token(site.name)
        yield site.name, moments


def enough(batches: Sequence[Batch], blocks: Sequence[Block]) -> list[Batch]:
    """Batches with enough tokens to fit the last linear maps of these blocks.

    Enough are 32 tokens for each input, and at least 8192 tokens. With fewer tokens the quality
    falls: in a prototype, MiniLM lost an eighth of its neurons, and 13 instead of 27 tokens per
    input raised its loss by 23 %.
    """
    widest = max((block.last_width for block in blocks), default=0)
    return thinned(batches, max(8192, 32 * widest))


class MomentSum:
    """Moments of tokens, buffered: one product of many rows is faster than many of few rows.

    Up to 1024 rows are buffered.
    """

    def __init__(self) -> None:
        self.sum: FitMoments | None = None
        self.pieces: list[tuple[np.ndarray, np.ndarray]] = []

    def add(self, inputs: np.ndarray, targets: np.ndarray) -> None:
        """Add rows of inputs (M, N) and targets (M, D)."""
        self.pieces.append((inputs, targets))
        if sum(len(rows) for rows, _ in self.pieces) >= 1024:
            self.moments()

    def join(self, other: FitMoments) -> None:
        """Add moments of other rows."""
        if self.sum is None:
            self.sum = other
        else:
            self.sum += other

    def moments(self) -> FitMoments:
        """The moments of all rows so far; later rows change them."""
        if self.pieces:
            inputs, targets = (np.concatenate(rows) for rows in zip(*self.pieces, strict=True))
            self.pieces = []
            self.join(FitMoments.of(inputs, targets))
        assert self.sum is not None
        return self.sum


class Tokens(NamedTuple):
    """The unmasked tokens of a batch, in float64.

    Attributes:
        inputs: Inputs of the map, (M, N).
        targets: The outputs to which the map is fitted, (M, D).
        texts: The index of each token's text in the batch, (M,).
    """

    inputs: np.ndarray
    targets: np.ndarray
    texts: np.ndarray


def real_tokens(
    site: Site,
    activations: Mapping[ir.Value, np.ndarray],
    output: np.ndarray,
    batch: Batch,
    is_sequence_first: bool,
) -> Tokens:
    """The unmasked tokens of a site in a batch.

    Args:
        activations: The input and the residual of the site.
        output: The output of the site in the original, with the residual if the site has one.
        is_sequence_first: Whether the output is (S, B, D).

    Raises:
        InvalidData: The activations are not finite.
    """
    if site.residual is not None:
        output = output - activations[site.residual]
    texts = _text_of(output, batch, is_sequence_first)
    real = texts >= 0
    targets = output.reshape(-1, output.shape[-1])[real].astype(np.float64)
    if site.tokens is None:
        inputs = np.zeros((len(targets), 0))
    else:
        inputs = activations[site.tokens].reshape(len(real), -1)[real].astype(np.float64)
    if not (np.isfinite(inputs).all() and np.isfinite(targets).all()):
        raise not_finite(site.name)
    return Tokens(inputs, targets, texts[real])


def _text_of(output: np.ndarray, batch: Batch, is_sequence_first: bool) -> np.ndarray:
    """The index of the text of each token, -1 for padding.

    The output is (B, S, D), (B*S, D), or (S, B, D) if ``is_sequence_first``. Windows of an image
    count as one text.
    """
    rows = int(np.prod(output.shape[:-1]))
    if output.ndim == 2:
        mask = flat_mask(batch, rows)
        first, second = (1, rows) if mask is None else mask.shape
    else:
        first, second = output.shape[:2]
        has_sequence_first_mask = any(
            is_mask(n) and a.shape == (second, first) for n, a in batch.items()
        )
        is_sequence_first = is_sequence_first or (has_sequence_first_mask and first != second)
    sizes = (second, first) if is_sequence_first else (first, second)
    text = np.arange(sizes[0]) * row_count(batch) // sizes[0]
    texts = np.where(token_mask(batch, sizes), text[:, None], -1)
    texts = texts.T if is_sequence_first else texts
    return np.repeat(texts.reshape(-1), rows // texts.size)
