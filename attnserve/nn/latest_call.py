"""The stored results of a layer's latest call: feature maps, and reused probabilities."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from graph_passes.errors import InvalidArgument

__all__ = ["FeatureMaps", "Latest", "PassedOn"]


@dataclass(frozen=True, eq=False)
class FeatureMaps:
    """Feature maps of the heads of a layer in one call (arXiv 2305.14380, section 3.1).

    Attributes:
        values: V^, (B, H, T, V).
        probabilities: A, (B, H, S, T), before dropout.
        outputs: O, the contexts before W_O, (B, H, S, V).
        queries: Mask of the queries that are real tokens, (B, S).
        keys: Mask of the keys that are real tokens, to which any query attends, (B, T).
    """

    values: Tensor
    probabilities: Tensor
    outputs: Tensor
    queries: Tensor
    keys: Tensor


class Latest:
    """The feature maps of the latest call; None before the first call.

    A copy of the model starts empty. A separate object keeps ``torch.export`` from treating the
    maps as state of the model.
    """

    def __init__(self) -> None:
        self.maps: FeatureMaps | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Latest:
        return memo.setdefault(id(self), Latest())

    def __getstate__(self) -> dict[str, Any]:
        return {"maps": None}

    def put(self, maps: FeatureMaps) -> None:
        """Store the maps, unless a backward pass calls the layer again.

        Raises:
            InvalidArgument: A backward pass calls the layer, and the stored maps have no gradients.
        """
        if not _is_repeated():
            self.maps = maps
        elif self.maps is not None and maps.values.requires_grad > self.maps.values.requires_grad:
            raise InvalidArgument(
                "reentrant gradient checkpointing gives feature maps no gradients",
                "pass use_reentrant=False, or turn checkpointing off",
                code="nn.checkpointing",
            )

    def required(self) -> FeatureMaps:
        """The maps of the latest call.

        Raises:
            InvalidArgument: The layer was not called, or does not keep feature maps.
        """
        if self.maps is None:
            raise InvalidArgument(
                "the layer has no feature maps: it was not called, or does not keep them",
                "set `keep_maps` of the layer and call it first",
                code="nn.no_maps",
            )
        return self.maps


class PassedOn:
    """Attention probabilities of a layer's latest call, for the layers that reuse them.

    Probabilities without gradients are kept until all of these layers have read them, and
    probabilities with gradients until the next call. Copies of the model start empty.

    In the backward pass, gradient checkpointing calls layers again. A reusing layer then gets the
    same probabilities again, or an error if later calls have replaced them.
    """

    def __init__(self, readers: int = 0) -> None:
        self._readers = readers
        self._probabilities: tuple[Tensor, ...] | None = None
        self._tokens: list[Tensor | None] = []
        self._unread = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> PassedOn:
        return memo.setdefault(id(self), PassedOn(self._readers))

    def __getstate__(self) -> dict[str, Any]:
        return PassedOn(self._readers).__dict__

    def add_reader(self) -> int:
        """Register a layer that reads in each call; return its index."""
        self._readers += 1
        return self._readers - 1

    def put(self, probabilities: tuple[Tensor, ...]) -> None:
        """Store the parts of the probabilities, unless a backward pass calls the layer again."""
        if self._readers and not _is_repeated():
            self._probabilities = probabilities
            self._unread = self._readers
            self._tokens = [None] * self._readers

    def take(self, reader: int, tokens: Tensor) -> tuple[Tensor, ...]:
        """Return the parts of the probabilities to the reader with this index, queries (B, S, D).

        Raises:
            InvalidArgument: The layer was not called before, or the backward pass needs the
                probabilities of an earlier call.
        """
        probabilities = self._probabilities
        if _is_repeated():
            first_tokens = self._tokens[reader] if self._tokens else None
            if (
                probabilities is None
                or first_tokens is None
                or not torch.equal(first_tokens, tokens)
            ):
                raise InvalidArgument(
                    "gradient checkpointing needs probabilities of an earlier call, which are gone",
                    "turn it off; or use use_reentrant=False and one call of the model in each"
                    " backward pass",
                    code="nn.checkpointing",
                )
            return probabilities
        if probabilities is None:
            raise InvalidArgument(
                "the layer whose probabilities are reused was not called before",
                "call the layers in order, all of them in each call of the model",
                code="nn.no_probabilities",
            )
        if torch.is_grad_enabled():
            self._tokens[reader] = tokens.detach()
            return probabilities
        self._unread -= 1
        if self._unread == 0:
            self._probabilities = None
        return probabilities


def _is_repeated() -> bool:
    """Whether a backward pass calls layers again, for gradient checkpointing."""
    if torch.compiler.is_compiling():
        return False
    # torch.utils.checkpoint has the same test for a backward pass.
    return torch._C._current_graph_task_id() != -1  # pyright: ignore[reportPrivateUsage]
