"""Choose the feed-forward neurons to remove by the predicted loss of their removal.

The neurons of a layer are removed in the order of its loss curve. The numbers of removals of all
layers are chosen together, so that the sum of the losses at the model's output is least.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from attnserve.planning.blocks.configurations import MULTIPLE, LossCurve
from attnserve.planning.blocks.groups import BlockGroup
from attnserve.planning.blocks.pareto import pareto_front
from attnserve.planning.heads.files import Masks

__all__ = ["choose_neurons"]

TIE = 1e-12
"""The loss that is added per removed neuron. Otherwise, only the largest of several numbers of
removals with equal losses would be on the front, and it may exceed the request."""


def choose_neurons(
    groups: Sequence[BlockGroup], curves: Mapping[str, LossCurve], share: float
) -> Masks:
    """Masks (1 = keep) that remove about ``share`` of all neurons, with least predicted loss.

    The number of remaining neurons of a layer is a multiple of ``MULTIPLE``, and at least that. The
    number of removed neurons is rounded down accordingly. Layers that keep all neurons are left
    out.

    Args:
        groups: Feed-forward blocks; blocks of one group have equal masks and are counted once.
        curves: By the key of a group; a group without a curve keeps its neurons.
        share: More than 0 and less than 1.
    """
    # On a single text, every removal may be measured as a total loss. Own losses still differ.
    is_measured = any(curve.loss[0] < curve.loss[-1] for curve in curves.values())
    numbers = [_numbers(group, curves.get(group.key), is_measured) for group in groups]
    total = sum(group.count for group in groups)
    least = total - round(share * total)
    # Neurons stand for the time that they take.
    choice = [choice for choice in pareto_front(numbers) if choice.ms >= least][-1]
    masks: Masks = {}
    for group, of_group, pick in zip(groups, numbers, choice.picks, strict=True):
        _, count = of_group[pick]
        if count < group.count:
            masks |= {name: curves[group.key].mask(count) for name in group.names}
    return masks


def _numbers(
    group: BlockGroup, curve: LossCurve | None, is_measured: bool
) -> list[tuple[float, int]]:
    """The losses of the possible numbers of remaining neurons, with these numbers."""
    numbers = [(0.0, group.count)]
    if curve is None:
        return numbers
    for kept in range(MULTIPLE, group.count, MULTIPLE):
        num_removed = group.count - kept
        loss = curve.at(num_removed) if is_measured else curve.own_loss[num_removed]
        numbers.append((loss + TIE * num_removed, kept))
    return numbers
