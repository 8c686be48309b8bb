"""Choose the neurons of feed-forward layers to prune: least output energy, weighted by layer.

Neuron h_j contributes h_j W_2[j]. Its energy is Var(h_j) |W_2[j]|^2, because the refit of W_2 moves
the mean into the bias. The same loss costs more at the model's output in some layers, so each layer
is weighted by the output change when half of its neurons are removed (compare Kwon et al., arXiv
2204.09656, who use Fisher information).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir

from attnserve.calibration.activations import not_finite, observe
from attnserve.context import DEFAULT_CONTEXT, RunContext
from attnserve.models.datasets import real_tokens
from attnserve.runtime.session import Batch, open_session, run
from graph_passes.analysis.constants import origin
from graph_passes.blocks import FeedForwardBlock
from graph_passes.passes.prune_neurons import PruneNeurons

if TYPE_CHECKING:
    from jaxtyping import Float

__all__ = ["layer_weights", "masks_by_energy", "neuron_energy"]

MULTIPLE = 8
"""The number of remaining neurons is a multiple of this, the floats of a vector register."""


def neuron_energy(
    model: ir.Model,
    blocks: Sequence[FeedForwardBlock],
    batches: Sequence[Batch],
    *,
    context: RunContext = DEFAULT_CONTEXT,
) -> dict[str, Float[np.ndarray, " F"]]:
    """Var(h_j) |W_2[j]|^2 over real tokens, by block name.

    Raises:
        InvalidData: The model refuses a batch, or its activations are not finite.
    """
    hidden = [[block.hidden] for block in blocks]
    counts = [0] * len(blocks)  # an encoder and a decoder see different tokens
    sums = [np.zeros((2, block.num_neurons)) for block in blocks]
    for batch, arrays in observe(model, hidden, batches, context, "measure neurons"):
        for index, (block, (array,)) in enumerate(zip(blocks, arrays, strict=True)):
            tokens = real_tokens(array, batch).astype(np.float64)
            if not np.isfinite(tokens).all():
                raise not_finite(block.name)
            sums[index] += tokens.sum(0), np.square(tokens).sum(0)
            counts[index] += len(tokens)
    found: dict[str, np.ndarray] = {}
    for block, (total, squares), count in zip(blocks, sums, counts, strict=True):
        variance = squares / max(count, 1) - np.square(total / max(count, 1))
        norms = np.square(block.second_matrix().astype(np.float64)).sum(axis=1)
        found[block.name] = np.maximum(variance, 0.0) * norms
    return found


def layer_weights(
    model: ir.Model,
    blocks: Sequence[FeedForwardBlock],
    energies: Mapping[str, np.ndarray],
    batch: Batch,
    *,
    context: RunContext = DEFAULT_CONTEXT,
) -> dict[str, float]:
    """The squared relative output change per unit of energy that a layer loses, by block name.

    Blocks that share weights are pruned together and have equal values.
    """
    options: dict[str, Any] = {"provider": context.provider, "threads": context.threads}
    whole = run(open_session(model, spinning=False, **options), batch)
    groups, progress = _sharing(blocks), context.stage("weigh feed-forward layers")
    found: dict[str, float] = {}
    for done, group in enumerate(groups, start=1):
        energy = np.sum([energies[block.name] for block in group], axis=0)
        keep = energy >= np.median(energy)
        keep[np.argmax(energy)] = True
        part = model.clone()
        PruneNeurons({block.name: keep for block in group})(part)
        session = open_session(part, spinning=False, **options)
        outputs = run(session, batch)
        changes = [
            float(np.square(a.astype(np.float64) - b).sum() / (np.square(a - a.mean()).sum() or 1))
            for a, b in zip(whole, outputs, strict=True)
            if a.dtype.kind == "f" and a.shape == b.shape
        ]
        lost = float(energy[~keep].sum())
        found |= {block.name: float(np.mean(changes or [0.0])) / (lost or 1.0) for block in group}
        progress(done, len(groups))
    return found


def masks_by_energy(
    blocks: Sequence[FeedForwardBlock],
    energies: Mapping[str, np.ndarray],
    weights: Mapping[str, float],
    share: float,
) -> dict[str, list[int]]:
    """Masks (1 = keep) that remove about ``share`` of all neurons, by weighted energy.

    The number of remaining neurons of a layer is rounded up to a multiple of ``MULTIPLE``. Blocks
    that share weights have equal masks. Layers that keep all neurons are left out.

    Args:
        share: More than 0 and less than 1.
    """
    groups = _sharing(blocks)
    costs = [
        np.sum([weights[block.name] * energies[block.name] for block in group], axis=0)
        for group in groups
    ]
    everything = np.sort(np.concatenate(costs), kind="stable")
    removed = round(share * len(everything))
    bound = everything[removed - 1] if removed else -np.inf
    masks: dict[str, list[int]] = {}
    for group, cost in zip(groups, costs, strict=True):
        kept = max(-(-int(np.sum(cost > bound)) // MULTIPLE), 1) * MULTIPLE
        mask = np.zeros(len(cost), int)
        mask[np.argsort(-cost, kind="stable")[:kept]] = 1
        masks |= {block.name: mask.tolist() for block in group if not mask.all()}
    return masks


def _sharing(blocks: Sequence[FeedForwardBlock]) -> list[list[FeedForwardBlock]]:
    """Blocks grouped by the weights that they share."""
    groups: dict[ir.Value, list[FeedForwardBlock]] = {}
    for block in blocks:
        groups.setdefault(origin(block.second.weight), []).append(block)
    return list(groups.values())
