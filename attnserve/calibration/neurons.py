"""Which neurons of feed-forwards may go: those that write least, in layers that matter least.

A neuron h_j writes h_j W_2[j]. What it writes of its own is its variance times |W_2[j]|^2: its mean
goes into the bias when W_2 is fitted again. A loss in one layer costs more at the output than in
another, so layers are weighed by what the output loses when half of one layer's neurons go (output
energy as in Kwon et al., arXiv 2204.09656, who measure it by Fisher information).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from attnserve.context import Provider
from attnserve.models.datasets import token_mask
from attnserve.runtime.session import Batch, open_session, run
from graph_passes.analysis.constants import origin
from graph_passes.emit.editing import exposing
from graph_passes.errors import InvalidData
from graph_passes.matching.feed_forward import FeedForwardBlock
from graph_passes.passes.prune_neurons import PruneNeurons

if TYPE_CHECKING:
    from jaxtyping import Float

__all__ = ["layer_weights", "masks_by_energy", "neuron_energy"]

Progress = Callable[[int, int], None]

MULTIPLE = 8
"""Neurons of a layer stay in multiples of this: so many floats fill a vector register."""


def neuron_energy(
    model: ir.Model,
    blocks: Sequence[FeedForwardBlock],
    batches: Sequence[Batch],
    *,
    provider: Provider = "cpu",
    threads: int = 0,
    progress: Progress | None = None,
) -> dict[str, Float[np.ndarray, " F"]]:
    """Var(h_j) |W_2[j]|^2 over real tokens, by block name.

    Raises:
        InvalidData: The model refuses a batch, or its activations are not finite.
    """
    hidden = [block.hidden for block in blocks]
    with exposing(model, hidden):
        session = open_session(model, provider=provider, threads=threads)
    counts = [0] * len(blocks)  # an encoder and a decoder see different tokens
    sums = [np.zeros((2, block.num_neurons)) for block in blocks]
    for done, batch in enumerate(batches, start=1):
        for index, (block, array) in enumerate(zip(blocks, run(session, batch), strict=True)):
            tokens = _real(array, batch).astype(np.float64)
            if not np.isfinite(tokens).all():
                raise InvalidData(
                    f"{block.name}: the activations on the calibration data are not finite",
                    "check the model and the data",
                )
            sums[index] += tokens.sum(0), np.square(tokens).sum(0)
            counts[index] += len(tokens)
        if progress is not None:
            progress(done, len(batches))
    found: dict[str, np.ndarray] = {}
    for block, (total, squares), count in zip(blocks, sums, counts, strict=True):
        variance = squares / max(count, 1) - np.square(total / max(count, 1))
        norms = np.square(block.second_matrix().astype(np.float64)).sum(axis=1)
        found[block.name] = np.maximum(variance, 0.0) * norms
    return found


def _real(array: np.ndarray, batch: Batch) -> Float[np.ndarray, "M F"]:
    """Without padding; (B, S, F), or (B*S, F) where an exporter flattens the tokens."""
    rows = array.reshape(-1, array.shape[-1])
    if array.ndim == 2:
        masks = (a for n, a in batch.items() if "mask" in n and a.size == len(rows) and a.ndim == 2)
        sizes = next((mask.shape for mask in masks), (1, len(rows)))
    else:
        sizes = array.shape[:2]
    mask = token_mask(batch, sizes).reshape(-1)
    return rows[np.repeat(mask, len(rows) // len(mask))]


def layer_weights(
    model: ir.Model,
    blocks: Sequence[FeedForwardBlock],
    energies: Mapping[str, np.ndarray],
    batch: Batch,
    *,
    provider: Provider = "cpu",
    threads: int = 0,
    progress: Progress | None = None,
) -> dict[str, float]:
    """What a unit of energy that one layer loses costs at the output, as a squared relative change.

    Blocks that share their weights lose them together, and have one weight.
    """
    whole = run(open_session(model, provider=provider, threads=threads), batch)
    groups = _sharing(blocks)
    found: dict[str, float] = {}
    for done, group in enumerate(groups, start=1):
        energy = np.sum([energies[block.name] for block in group], axis=0)
        keep = energy >= np.median(energy)
        keep[np.argmax(energy)] = True
        part = model.clone()
        PruneNeurons({block.name: keep for block in group})(part)
        outputs = run(open_session(part, provider=provider, threads=threads), batch)
        changes = [
            float(np.square(a.astype(np.float64) - b).sum() / (np.square(a - a.mean()).sum() or 1))
            for a, b in zip(whole, outputs, strict=True)
            if a.dtype.kind == "f" and a.shape == b.shape
        ]
        lost = float(energy[~keep].sum())
        found |= {block.name: float(np.mean(changes or [0.0])) / (lost or 1.0) for block in group}
        if progress is not None:
            progress(done, len(groups))
    return found


def masks_by_energy(
    blocks: Sequence[FeedForwardBlock],
    energies: Mapping[str, np.ndarray],
    weights: Mapping[str, float],
    share: float,
) -> dict[str, list[int]]:
    """About a share of all neurons goes: those with the least energy, weighed by layer.

    What stays of each layer is rounded up to a multiple of ``MULTIPLE``; blocks that share their
    weights are given one mask.

    Args:
        share: More than 0 and less than 1.
    """
    groups = _sharing(blocks)
    costs = [
        np.sum([weights[block.name] * energies[block.name] for block in group], axis=0)
        for group in groups
    ]
    everything = np.sort(np.concatenate(costs), kind="stable")
    gone = round(share * len(everything))
    bound = everything[gone - 1] if gone else -np.inf
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
