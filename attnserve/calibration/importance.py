"""Head importance, by three measures.

    head_energy     energy of the head's output about its mean
    leave_one_out   change of the model outputs without the head, and its sum over a block
    sensitivity     change of the model outputs with the head's gate (Michel et al. 2019,
                    arXiv 1905.10650)

One calibration batch is run and reduced at a time. Padding is excluded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir

from attnserve.calibration.activations import by_head, evenly
from attnserve.calibration.gated_model import GatedModel, Output
from attnserve.context import DEFAULT_CONTEXT, RunContext
from attnserve.models.masks import no_token, not_finite, token_mask
from attnserve.models.rows import row_count
from attnserve.runtime.interface import Batch
from attnserve.runtime.observer import observe
from graph_passes.blocks import AttentionBlock

if TYPE_CHECKING:
    from jaxtyping import Float

__all__ = ["head_energy", "leave_one_out", "leave_one_out_total", "sensitivity"]

MOST_ROWS = 64
"""Approximate number of texts that the gated model runs on, in whole batches spread evenly."""

SIGNS = 2
"""Number of random sign vectors per block in ``leave_one_out_total``."""

STEP = 1 / 64
"""Step of a gate in each direction. The truncation error of a central difference is proportional to
the square of the step, the rounding error of float32 to its inverse; both are near 1e-4."""


# Energy


def head_energy(
    model: ir.Model,
    blocks: Sequence[AttentionBlock],
    batches: Sequence[Batch],
    *,
    context: RunContext = DEFAULT_CONTEXT,
) -> dict[str, Float[np.ndarray, " H"]]:
    """The energy of each head about its mean over real tokens, by block name.

    With c_h the attention context of head h, the energy is E |(c_h - E c_h) W_O^h|^2. The mean
    output of a head can move into a bias, so that only the deviation is lost. Without an output
    projection, the result is the energy of the attention context itself.

    Raises:
        InvalidData: The model refuses a batch, a block sees no real token, or its contexts are not
            finite.
    """
    sums = {block.name: _Energy(block) for block in blocks}
    values = [[block.context] for block in blocks]
    for batch, arrays in observe(model, values, batches, context, "measure energy"):
        for block, (heads,) in zip(blocks, arrays, strict=True):
            sums[block.name].add(by_head(block, heads), batch)
    return {name: energy.result() for name, energy in sums.items()}


class _Energy:
    """Running sums and Gram matrices of the attention context of each head."""

    def __init__(self, block: AttentionBlock) -> None:
        self.block = block
        self.tokens = 0
        self.total: Any = 0.0  # H V
        self.products: Any = 0.0  # H V V

    def add(self, head_outputs: Float[np.ndarray, "B H S V"], batch: Batch) -> None:
        """Add the attention context of one batch."""
        B, _, S, _ = head_outputs.shape
        real = token_mask(batch, (B, S))
        heads = head_outputs.swapaxes(1, 2)[real].swapaxes(0, 1).astype(np.float64)  # H Q V
        self.tokens += heads.shape[1]
        self.total = self.total + heads.sum(1)
        self.products = self.products + heads.swapaxes(1, 2) @ heads

    def result(self) -> Float[np.ndarray, " H"]:
        """The energy of each head.

        Raises:
            InvalidData: The data has no real token, or the contexts are not finite.
        """
        if not self.tokens:
            raise no_token(self.block.name)
        mean = self.total / self.tokens
        covariance = self.products / self.tokens - mean[:, :, None] * mean[:, None, :]
        if self.block.output is not None:
            rows = self.block.output.matrix()[self.block.output.rows].astype(np.float64)  # H V D
            energy = np.einsum("hvw,hvw->h", covariance, rows @ rows.swapaxes(1, 2))
        else:
            energy = np.trace(covariance, axis1=1, axis2=2)
        if not np.isfinite(energy).all():
            raise not_finite(self.block.name)
        return np.maximum(energy, 0.0)


# Gates


def leave_one_out(
    model: ir.Model,
    blocks: Sequence[AttentionBlock],
    batches: Sequence[Batch],
    *,
    context: RunContext = DEFAULT_CONTEXT,
) -> dict[str, Float[np.ndarray, " H"]]:
    """The relative squared change of the outputs without each head, by block name.

    The change is E |out - out without h|^2 / E |out - E out|^2 over unmasked tokens, averaged over
    the float outputs except caches and probabilities. The bias of the output projection stays.
    The cost is one run of the layers from the block on, per head and batch.

    Args:
        blocks: Blocks of the main graph; fused operators may stay as they are.

    Raises:
        InvalidModel: No output is of floats.
        InvalidData: The model refuses a batch, no token is real, or outputs are not finite.
    """
    gates = [list(1 - np.eye(block.num_heads)) for block in blocks]
    return _changes(model, blocks, batches, gates, most_rows=MOST_ROWS, context=context)


def leave_one_out_total(
    model: ir.Model,
    blocks: Sequence[AttentionBlock],
    batches: Sequence[Batch],
    *,
    context: RunContext = DEFAULT_CONTEXT,
    most_rows: int = MOST_ROWS,
) -> dict[str, float]:
    """An estimate of the sum of ``leave_one_out`` over the heads of each block, by block name.

    The context of each head is multiplied by 1 + s_h / sqrt(H) with random signs s_h, which changes
    the outputs about as much as one head does. In the mean over the signs, the squared change times
    H is the sum over heads (Hutchinson's estimator), if the outputs are linear in the gates.

    Args:
        most_rows: In place of ``MOST_ROWS``; the cost is ``SIGNS`` runs per block and batch.

    Raises:
        InvalidModel, InvalidData: In the cases of ``leave_one_out``.
    """
    signs = np.random.default_rng(context.seed)
    gates = [
        [1 + signs.choice([-1, 1], block.num_heads) / block.num_heads**0.5 for _ in range(SIGNS)]
        for block in blocks
    ]
    changes = _changes(model, blocks, batches, gates, most_rows=most_rows, context=context)
    return {block.name: block.num_heads * float(changes[block.name].mean()) for block in blocks}


def _changes(
    model: ir.Model,
    blocks: Sequence[AttentionBlock],
    batches: Sequence[Batch],
    gates: Sequence[Sequence[np.ndarray]],
    *,
    most_rows: int,
    context: RunContext,
) -> dict[str, Float[np.ndarray, " N"]]:
    """The relative squared change of the outputs with each of N gates (H,), by block name."""
    gated_model = GatedModel(model, blocks, context)
    full = _FullRun(gated_model, batches, most_rows)
    totals = [np.zeros((len(vectors), gated_model.num_outputs)) for vectors in gates]
    progress = context.stage("leave heads out")
    variations = [[(vector,) for vector in vectors] for vectors in gates]
    for change in gated_model.vary(full.sample, full.outputs, variations, progress):
        (gated_outputs,) = change.outputs
        pairs = zip(change.full_outputs, gated_outputs, strict=True)
        for i, ((out, real), (gated_out, _)) in enumerate(pairs):
            squares = np.square(out[real] - gated_out[real])
            totals[change.block][change.variation, i] += squares.sum()
    return gated_model.by_block([total / full.tokens / full.variances for total in totals])


def sensitivity(
    model: ir.Model,
    blocks: Sequence[AttentionBlock],
    batches: Sequence[Batch],
    *,
    context: RunContext = DEFAULT_CONTEXT,
) -> dict[str, Float[np.ndarray, " H"]]:
    """E_x |d out(x) / d xi_h| at xi_h = 1, by block name; xi_h multiplies the context of head h.

    The result is I_h of Michel et al. (2019) with the norm of the outputs in place of the loss,
    because the texts have no labels. The derivative is a central difference of ``STEP``, accurate
    to about 1e-3 in float32. The norm of a text is the root mean square over its unmasked tokens,
    divided by the root of E |out - E out|^2, and averaged over outputs as in ``leave_one_out``.
    The cost is two runs per head and batch.

    Args:
        blocks: Blocks of the main graph; fused operators may stay as they are.

    Raises:
        InvalidModel, InvalidData: In the cases of ``leave_one_out``.
    """
    gated_model = GatedModel(model, blocks, context)
    full = _FullRun(gated_model, batches, MOST_ROWS)
    totals = [np.zeros((block.num_heads, gated_model.num_outputs)) for block in blocks]
    progress = context.stage("measure sensitivity")
    steps = [STEP * np.eye(block.num_heads) for block in blocks]
    variations = [[(1 + step, 1 - step) for step in of_block] for of_block in steps]
    for change in gated_model.vary(full.sample, full.outputs, variations, progress):
        upper, lower = change.outputs
        for i, ((up, real), (down, _)) in enumerate(zip(upper, lower, strict=True)):
            squares = np.where(real, np.square((up - down) / (2 * STEP)).sum(-1), 0.0)
            norms = np.sqrt(squares.sum(1) / np.maximum(1, real.sum(1)))
            totals[change.block][change.variation, i] += norms.sum()
    return gated_model.by_block([total / full.texts / np.sqrt(full.variances) for total in totals])


def _some(batches: Sequence[Batch], most_rows: int) -> list[Batch]:
    """Batches with about ``most_rows`` texts, spread evenly; at least one batch.

    Batches are not cut: a model may have a fixed batch size.
    """
    rows = sum(map(row_count, batches))
    if rows <= most_rows:
        return list(batches)
    return evenly(batches, max(1, len(batches) * most_rows // rows))


class _FullRun:
    """The outputs of a model with all gates at 1.

    Attributes:
        sample: The batches that ran.
        outputs: The O outputs of each batch.
        tokens: The number of real tokens of each output (O,).
        texts: The number of texts with a real token of each output (O,).
        variances: E |out - E out|^2 of each output (O,); see ``_variance``.

    Raises:
        InvalidData: An output has no real token, or is not finite.
    """

    def __init__(self, model: GatedModel, batches: Sequence[Batch], most_rows: int) -> None:
        self.sample = _some(batches, most_rows)
        self.outputs = [model.run(batch) for batch in self.sample]
        by_output = [[out[i] for out in self.outputs] for i in range(model.num_outputs)]
        self.tokens = np.array([sum(int(real.sum()) for _, real in out) for out in by_output])
        self.texts = np.array([sum(int(real.any(1).sum()) for _, real in out) for out in by_output])
        self.variances = np.array(
            [_variance(*pair) for pair in zip(by_output, model.output_names, strict=True)]
        )


def _variance(outputs: Sequence[Output], name: str | None) -> float:
    """E |out - E out|^2 over tokens; infinite for a constant output, whose changes then count 0.

    Each width of vectors has its own mean.

    Raises:
        InvalidData: The output has no real token, or is not finite.
    """
    count, squares = 0, 0.0
    sums: dict[int, tuple[int, Any]] = {}
    for out, real in outputs:
        vectors = out[real]
        rows, width = vectors.shape
        before, total = sums.get(width, (0, 0.0))
        sums[width] = before + rows, total + vectors.sum(0)
        count += rows
        squares += float(np.square(vectors).sum())
    if not count:
        raise no_token(f"output {name!r}")
    if not np.isfinite(squares):
        raise not_finite(f"output {name!r}")
    means = sum(float(np.square(total).sum()) / rows for rows, total in sums.values() if rows)
    variance = max(0.0, squares - means) / count
    floor = 1e-12 * squares / count  # the rounding error of a constant output
    return variance if variance > floor else np.inf
