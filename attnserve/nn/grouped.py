"""Grouped Head Attention: group-constrained training and Voting-to-Stay (arXiv 2305.14380)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from attnserve.calibration.voting import Votes, cosines, elect_heads, group_heads
from attnserve.nn.attention import FixedHeadAttention
from attnserve.nn.latest_call import FeatureMaps
from attnserve.nn.reuse import ReuseAttention
from graph_passes.errors import InvalidArgument

Batch = TypeVar("Batch")

__all__ = ["GroupedHeadAttention", "group_loss", "keep_pillars", "voting_to_stay"]


class GroupedHeadAttention(FixedHeadAttention):
    """Attention whose heads are trained to form C groups (arXiv 2305.14380, equations 3 and 4).

    phi_ij = sum over maps of tau cos(e_i, z_j) is the similarity of head i to unit j, where e_i is
    its value, attention or output map in a batch, and the unit z_j is the mean map of group j, as a
    constant. With g(i) the group of head i, and means over heads i and other groups j:

        "metric" (4B)       L = - alpha mean_i phi_ig(i)     + beta mean_ij phi_ij
        "categorical" (4A)  L = - alpha mean_i log p_ig(i)   - beta mean_ij log(1 - p_ij)

    This follows the paper's description of equation 4, a homogenization and a diversification term.
    The normalization (means) and the bounded second term of (4A) are choices of this class.

    p is the softmax of a linear classifier of phi_i, because attention maps have no fixed size for
    a classifier. The first term makes the heads of a group similar, the second separates the
    groups. (4B) is at least -(alpha + beta) sum(tau); its first term has its minimum exactly where
    all heads of a group are parallel. (4A) is at least 0.

    ALBERT calls one layer several times: its last call gives the maps.

    Groups are found by k-means on the cosines between heads (equation 3). ``reassign`` groups the
    heads again by the batches since the last grouping; training has converged when no head moves.

    Args:
        embed_dim: D.
        num_heads: H.
        head_size: K, and V by default.
        num_groups: C, from 1 to H.
        alpha: Weight of homogenization within groups.
        beta: Weight of diversification between groups.
        tau: Weights of the value, attention and output maps. The paper uses one map at a time.
        objective: "metric" (equation 4B) or "categorical" (4A).
        seed: Selects the starts of k-means.
        options: Further arguments of ``FixedHeadAttention``.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        head_size: int,
        *,
        num_groups: int,
        alpha: float = 0.5,
        beta: float = 0.5,
        tau: tuple[float, float, float] = (1.0, 0.0, 0.0),
        objective: Literal["metric", "categorical"] = "metric",
        seed: int = 0,
        **options: Any,
    ) -> None:
        super().__init__(embed_dim, num_heads, head_size, **options)
        if objective not in ("metric", "categorical"):
            raise InvalidArgument(
                f"`objective` is {objective!r}: expected metric or categorical",
                "choose equation 4B (metric) or 4A (categorical)",
                code="nn.objective",
            )
        if len(tau) != 3 or min(tau) < 0 or not any(tau):
            raise InvalidArgument(
                f"`tau` is {tau}: expected three weights from 0, of which one is positive",
                "for example (1, 0, 0): value maps",
                code="nn.tau",
            )
        if not 1 <= num_groups <= num_heads:
            raise InvalidArgument(
                f"`num_groups` is {num_groups}: expected 1 to {num_heads} (its heads)",
                "choose a number in this range",
                code="nn.num_groups",
            )
        self.num_groups = num_groups
        self.alpha = alpha
        self.beta = beta
        self.tau = tau
        self.seed = seed
        self.keep_maps = True
        self.classifier = nn.Linear(num_groups, num_groups) if objective == "categorical" else None
        if self.classifier is not None:
            nn.init.eye_(self.classifier.weight)
            nn.init.zeros_(self.classifier.bias)
        self.groups: Tensor
        self.register_buffer("groups", torch.full((num_heads,), -1))
        self._seen: np.ndarray | None = None

    def group_loss(self) -> Tensor:
        """Equation 4 of the latest call, a scalar with gradients; the first call finds groups.

        The loss is computed in float32, or in float64 for maps in float64.
        """
        with torch.autocast(self.groups.device.type, enabled=False):
            return self._loss([_wide(_flat(part)) for part in _maps(self.latest.required())])

    def _loss(self, maps: list[Tensor]) -> Tensor:
        """Equation 4 of value, attention and output maps, (H, N) each."""
        grams = np.stack([_gram(part) for part in maps])
        self._seen = grams if self._seen is None else self._seen + grams
        if self.groups[0] < 0:
            self.reassign()
        similarity = self._similarity(maps)  # H C
        in_group = nn.functional.one_hot(self.groups, self.num_groups).bool()
        if self.classifier is None:
            loss = -self.alpha * similarity[in_group].mean()
            return loss + self.beta * similarity[~in_group].mean() if self.num_groups > 1 else loss
        logits = nn.functional.linear(
            similarity, self.classifier.weight.to(similarity), self.classifier.bias.to(similarity)
        )
        loss = -self.alpha * logits.log_softmax(1)[in_group].mean()
        if self.num_groups == 1:
            return loss
        # log(1 - p_j) from the other logits, which does not cancel for p_j near 1.
        itself = torch.eye(self.num_groups, dtype=torch.bool, device=logits.device)
        other_logits = logits[:, None].masked_fill(itself, -torch.inf)  # H C C
        log_complement = other_logits.logsumexp(2) - logits.logsumexp(1, keepdim=True)
        return loss - self.beta * log_complement[~in_group].mean()

    def reassign(self) -> int:
        """Group the heads by the batches since the last call; return the number of moved heads.

        Groups are numbered by their first heads. 0 means that training has converged. Algorithm 1
        tests how far centers move (rho); this method counts heads, because units are means of maps.
        """
        if self._seen is None:
            self._seen = _grams(self)
        likeness = sum(
            (tau * cosines(gram) for tau, gram in zip(self.tau, self._seen, strict=True)),
            np.zeros((self.num_heads, self.num_heads)),
        )
        new_groups = torch.from_numpy(group_heads(likeness, self.num_groups, self.seed))
        num_moved = int((new_groups != self.groups.cpu()).sum())
        self.groups.copy_(new_groups)
        self._seen = None
        return num_moved

    def pruned(self, mask: Iterable[int]) -> FixedHeadAttention:
        """Make a standard layer of the heads whose mask is 1, with the same scale.

        Raises:
            InvalidArgument: The mask is not 0 or 1 for each head, or keeps no head.
        """
        bits = [int(bit) for bit in mask]
        if len(bits) != self.num_heads or not {1} <= {*bits} <= {0, 1}:
            raise InvalidArgument(
                f"`mask` is {bits}: expected 0 or 1 for each of {self.num_heads} heads",
                "keep at least one head",
                code="nn.mask",
            )
        head_mask = torch.tensor(bits, dtype=torch.bool, device=self.groups.device)
        pruned_layer = FixedHeadAttention.from_trained(self.trained().of_heads(head_mask)).train(
            self.training
        )
        for name, weight in pruned_layer.named_parameters():  # frozen weights stay frozen
            weight.requires_grad_(self.get_parameter(name).requires_grad)
        return pruned_layer

    def _similarity(self, maps: list[Tensor]) -> Tensor:
        """phi, the similarity of each head to each group, (H, C)."""
        in_group = nn.functional.one_hot(self.groups, self.num_groups)
        share = in_group.T / in_group.sum(0)[:, None]  # C H
        phi = [
            tau
            * nn.functional.normalize(part, dim=1)
            @ nn.functional.normalize(share.to(part) @ part.detach(), dim=1).T
            for tau, part in zip(self.tau, maps, strict=True)
            if tau
        ]
        return torch.stack(phi).sum(0)


def group_loss(model: nn.Module) -> Tensor:
    """The mean of equation 4 over the grouped layers of a model, for the latest forward pass."""
    return torch.stack([layer.group_loss() for _, layer in _grouped(model)]).mean()


@torch.no_grad()
def voting_to_stay(
    model: nn.Module, batches: Iterable[Batch], run: Callable[[Batch], object]
) -> dict[str, Votes]:
    """Elect one head per group in each grouped layer (V2S, algorithm 1), by module name.

    Each batch votes with each kind of map, in each group, for the head whose map has the largest
    cosine with the mean map of its group. The classifier of equation 4A does not vote.

    Args:
        batches: One epoch of the training data.
        run: Calls the model with a batch. The model is in evaluation mode meanwhile.

    Raises:
        InvalidArgument: The model has no grouped layer, or there are no batches with real tokens.
    """
    layers = _grouped(model)
    training_modules = [module for module in model.modules() if module.training]
    grams: dict[str, list[np.ndarray]] = {name: [] for name, _ in layers}
    model.eval()
    try:
        for batch in batches:
            run(batch)
            for name, layer in layers:
                products = _grams(layer)
                if products.any():  # otherwise the batch is only padding
                    grams[name].append(products)
                    if layer.groups[0] < 0:
                        layer.reassign()
    finally:
        for module in training_modules:
            module.training = True
    if not all(grams.values()):
        raise InvalidArgument(
            "`batches` has no real token",
            "pass the batches of one epoch; a generator can be read only once",
            code="nn.no_batches",
        )
    return {name: elect_heads(grams[name], layer.groups.cpu().numpy()) for name, layer in layers}


def keep_pillars(model: nn.Module, votes: Mapping[str, Votes]) -> None:
    """Replace grouped layers by standard layers of their elected heads, in place (GHT-PS).

    Raises:
        InvalidArgument: ``model`` is a grouped layer itself, another layer reuses probabilities of
            a grouped layer, which is removed, or a vote is for no layer.
    """
    layers = _grouped(model)
    if unknown := sorted(votes.keys() - {name for name, _ in layers}):
        raise InvalidArgument(
            f"`votes` has `{unknown[0]}`, which is not a grouped layer of `model`",
            "pass the module that voted, not a compiled or wrapped one around it",
            code="nn.votes",
        )
    layers = [(name, layer) for name, layer in layers if name in votes]
    sources = {
        id(module.source) for module in model.modules() if isinstance(module, ReuseAttention)
    }
    for name, layer in layers:
        if not name or id(layer.passed_on) in sources:
            raise InvalidArgument(
                f"`{name}` is reused by another layer" if name else "`model` is the layer itself",
                "remove heads before the wiring" if name else "call `pruned` of the layer",
                code="nn.keep_pillars",
            )
    pruned_layers = {id(layer): layer.pruned(votes[name].mask.tolist()) for name, layer in layers}
    places = [(name, module) for name, module in model.named_modules(remove_duplicate=False)]
    for name, module in places:
        if id(module) in pruned_layers:  # a layer may be at several places
            model.set_submodule(name, pruned_layers[id(module)])


def _grouped(model: nn.Module) -> list[tuple[str, GroupedHeadAttention]]:
    """The grouped layers of a model with their names.

    Raises:
        InvalidArgument: There is no grouped layer.
    """
    layers = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, GroupedHeadAttention)
    ]
    if not layers:
        raise InvalidArgument(
            "`model` has no GroupedHeadAttention",
            "create its layers with GroupedHeadAttention, or use `swap`",
            code="nn.no_groups",
        )
    return layers


def _maps(maps: FeatureMaps) -> list[Tensor]:
    """Values, probabilities and outputs (B, H, T, X), zero at padding."""
    queries = maps.queries[:, None, :, None]
    keys = maps.keys[:, None, :, None]
    return [maps.values * keys, maps.probabilities * queries, maps.outputs * queries]


def _flat(part: Tensor) -> Tensor:
    """Reshape (B, H, T, X) to (H, B*T*X)."""
    return part.transpose(0, 1).flatten(1)


def _wide(part: Tensor) -> Tensor:
    """Convert to at least float32: sums over tokens overflow or lose digits in half precision."""
    return part if part.dtype == torch.float64 else part.float()


def _gram(part: Tensor) -> np.ndarray:
    """The inner products of the rows, in float64."""
    part = _wide(part.detach())
    return (part @ part.T).double().cpu().numpy()


def _grams(layer: GroupedHeadAttention) -> np.ndarray:
    """Products (3, H, H) of the heads' maps of the latest call."""
    return np.stack([_gram(_flat(part)) for part in _maps(layer.latest.required())])
