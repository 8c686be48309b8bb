"""Compare served rows with the original model, in a child process of low priority."""

from __future__ import annotations

import math
import os
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Protocol
from weakref import WeakKeyDictionary

import numpy as np

from attnserve.context import Device
from attnserve.literals import Measure
from attnserve.models.artifact import open_artifact
from attnserve.models.checksums import check_checksums
from attnserve.models.tokenizer import Encoding
from attnserve.runtime.interface import Feed
from attnserve.runtime.isolation import Worker, WorkerCrashed, allowed_environment
from attnserve.serving.live_quality import LiveComparison, QualityUpdate
from attnserve.serving.loaded_model import Model
from attnserve.serving.text_tasks import TextTask
from graph_passes.errors import AttnserveError, InvalidModel

__all__ = ["ComparisonProcess", "RowSampler", "ServedModel", "ServedRow"]

FIRST_ROWS, FIRST_RATE = 64, 0.04
"""Number of first rows with a minimum sampling rate, and that rate. With them, 1,600 requests
suffice to detect a violated quality guarantee, at the one-time cost of 64 rows."""

NICE = 10
"""Nice value of the child, which gets a tenth of the processor time of a competing server."""

RUN_TIMEOUT_S = 60.0
RESTART_S = 60.0
"""Seconds before a failed child is restarted."""


class RowSampler:
    """Samples requests for comparison: one random request of each block.

    Args:
        rate: The share of the requests.
        samplers: The number of samplers, one in each process, which share ``FIRST_ROWS``.
    """

    def __init__(self, rate: float, samplers: int = 1) -> None:
        self._rate = rate
        self._first_rows = math.ceil(FIRST_ROWS / samplers)
        self._size = self._at = self._chosen = 0

    def is_next(self) -> bool:
        """Whether the next request is sampled."""
        if self._at == self._size:  # a new block of requests begins
            is_first = self._first_rows > 0
            self._first_rows -= 1
            self._size = round(1 / (max(self._rate, FIRST_RATE) if is_first else self._rate))
            self._at = 0
            self._chosen = random.randrange(self._size)
        self._at += 1
        return self._at - 1 == self._chosen


class ServedModel(Protocol):
    """A served version of a rewritten model."""

    version: str
    identity: str
    model: Model

    @property
    def name(self) -> str: ...

    @property
    def waiting(self) -> int:
        """Number of rows in the queue of the model."""
        ...


@dataclass(frozen=True, eq=False)
class ServedRow:
    """One answered row.

    Attributes:
        key: Name and version of the model that answered.
        identity: The checksum of the model's files, because another model may get the name later.
        task: The task of the text; None for a row of tensors.
        payload: A text, or the inputs.
        outputs: The served outputs; for a text, the vector or the scores.
    """

    key: tuple[str, str]
    identity: str
    task: TextTask | None
    payload: Encoding | Feed
    outputs: Mapping[str, np.ndarray]


class ComparisonProcess:
    """A ``LiveComparison`` in a child process, which is restarted after a failure.

    A single thread makes all calls; it ends after the child.

    Args:
        original: An .onnx file or an artifact folder.
        device: Device of the original.
        served: Returns the currently served models.
        on_refusal: Called with the reason if a served model cannot be compared.
        timeout_s: Time limit of loading the original and running it once.
    """

    def __init__(
        self,
        original: Path,
        device: Device,
        served: Callable[[], Sequence[ServedModel]],
        on_refusal: Callable[[AttnserveError], object],
        *,
        timeout_s: float,
    ) -> None:
        self._original, self._device = original, device
        self._served, self._on_refusal, self._timeout_s = served, on_refusal, timeout_s
        self._child: Worker | None = None
        self._restart_at = 0.0
        self._is_compared: WeakKeyDictionary[ServedModel, bool] = WeakKeyDictionary()

    def start(self) -> None:
        """Start the child.

        Raises:
            InvalidModel: The original cannot be loaded, or fits none of the models.
        """
        artifact = open_artifact(self._original)
        check_checksums(artifact)
        lower_priority = partial(os.nice, NICE) if os.name == "posix" else None
        self._is_compared.clear()
        try:
            self._child = Worker(
                LiveComparison,
                artifact,
                self._device,
                timeout_s=self._timeout_s,
                environment=allowed_environment(),
                prepare=lower_priority,
                silent=True,
            )
        except WorkerCrashed as error:
            raise InvalidModel(f"{artifact.model}: {error.what}", "check the original") from error
        errors = [
            error
            for served_model in self._served()
            if (error := self._watch(self._child, served_model))
        ]
        if errors and not any(self._is_compared.values()):
            self._end_child(self._restart_at)
            raise errors[0]
        for error in errors:
            self._on_refusal(error)

    def close(self) -> None:
        """End the child and do not restart it."""
        self._end_child(math.inf)

    def compare(self, row: ServedRow) -> QualityUpdate | None:
        """Run the original on a row; see ``LiveComparison.compare``.

        Returns:
            None also without a child, or if the model is no longer served or cannot be compared.

        Raises:
            AttnserveError: The comparison or the start of the child failed.
        """
        wanted = (*row.key, row.identity)
        served = next(
            (
                served_model
                for served_model in self._served()
                if (served_model.name, served_model.version, served_model.identity) == wanted
            ),
            None,
        )
        if served is None:
            return None
        try:
            if self._child is None:
                if monotonic() < self._restart_at:
                    return None
                self._restart_at = monotonic() + RESTART_S
                self.start()
            assert self._child is not None
            # Models that were loaded after the start are compared too.
            if served not in self._is_compared and (error := self._watch(self._child, served)):
                self._on_refusal(error)
            if not self._is_compared[served]:
                return None
            model, payload = served.model, row.payload
            inputs = model.text_inputs([payload]) if isinstance(payload, Encoding) else payload
            update = self._child.call(
                "compare",
                str(row.key),
                row.task,
                inputs,
                dict(row.outputs),
                timeout_s=RUN_TIMEOUT_S,
            )
            return None if update is None else QualityUpdate.model_validate(update)
        except WorkerCrashed:
            self._end_child(monotonic() + RESTART_S)
            raise

    def _end_child(self, restart_at: float) -> None:
        self._restart_at = restart_at
        if self._child is not None:
            self._child.close()
            self._child = None

    def _watch(self, child: Worker, served: ServedModel) -> AttnserveError | None:
        """Register a model in the child; return the error if the model cannot be compared."""
        model = served.model
        error = None
        try:
            child.call(
                "watch",
                str((served.name, served.version)),
                model.artifact,
                model.signature.input_types,
                _default_measure(model),
                timeout_s=RUN_TIMEOUT_S,
            )
        except InvalidModel as reason:
            error = reason
        self._is_compared[served] = error is None
        return error


def _default_measure(model: Model) -> Measure:
    """The measure for a model whose record states no measure."""
    if model.can("classify"):
        return "r2" if model.can("rerank") else "kl"
    return "similarity" if model.encoder else "r2"
