"""Choose the feed-forward neurons to remove by the predicted loss of their removal.

The neurons of a layer are removed in the order of its loss curve. The numbers of removals of all
layers are chosen together, so that the sum of the losses at the model's output is least.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from attnserve.planning.blocks.configurations import MULTIPLE, BlockConfig, LossCurve
from attnserve.planning.blocks.groups import FeedForwardGroup, feed_forward_groups
from attnserve.planning.blocks.loss_curves import loss_curves
from attnserve.planning.blocks.pareto import pareto_front
from attnserve.planning.heads.files import Masks
from attnserve.planning.request.request import Request
from graph_passes.errors import Refusal
from graph_passes.matching.feed_forward import find_feed_forward

__all__ = ["choose_neurons", "neuron_masks"]

SAME_NAME = Refusal("same_name", "an attention block has the same name")

TIE = 1e-12
"""The loss that is added per removed neuron. Otherwise, only the largest of several numbers of
removals with equal losses would be on the front, and it may exceed the request."""


def choose_neurons(request: Request) -> Masks:
    """1 for each neuron that stays, by feed-forward that loses neurons.

    Raises:
        InvalidArgument: There is no data to measure on.
    """
    share = request.rewrites.ffn
    if share is None:
        return {}
    batches = request.batches("`ffn` measures the loss of removed neurons", "leave `ffn` out")
    if request.rewrites.layers is not None:
        request.warnings.append(
            "`layers` names attention blocks: `ffn` removes neurons of any layer"
        )
    groups = feed_forward_groups(request.model, request.blocks)
    refusals = {name: group.refusal for group in groups for name in group.names}
    for block in request.analyses.get(find_feed_forward):
        if refusal := request.body_refusal(block) or refusals.get(block.name, SAME_NAME):
            request.warnings.append(f"{block.name} keeps all its neurons: {refusal}")
    groups = [group for group in groups if group.refusal is None]
    if not groups:
        request.warnings.append(
            "`ffn` removes nothing: no feed-forward has neurons that can be removed"
        )
        return {}
    losses = loss_curves(
        request.model, groups, batches, new_meter=request.job.meter, context=request.job.context
    )
    masks = neuron_masks(groups, losses.curves, share)
    if not masks:
        total = sum(group.count for group in groups)
        request.warnings.append(
            f"`ffn` {share} rounds to 0 of {total} neurons: the number of remaining neurons of a "
            f"layer is a multiple of {MULTIPLE}"
        )
    return masks


def neuron_masks(
    groups: Sequence[FeedForwardGroup], curves: Mapping[str, LossCurve], share: float
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
            mask = BlockConfig(count).mask(curves[group.key].order)
            masks |= dict.fromkeys(group.names, mask)
    return masks


def _numbers(
    group: FeedForwardGroup, curve: LossCurve | None, is_measured: bool
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
