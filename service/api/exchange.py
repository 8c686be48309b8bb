"""The state of a request until its answer was sent, which the routes and the middleware share."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field

from fastapi import Request

from service.budget import Budget
from service.engine.repository import Repository

SMALL_BYTES = 262_144
"""Maximum size of an answer that does not wait for free memory."""


@dataclass
class Exchange:
    """A request and its answer.

    Attributes:
        repository: The models of the service.
        bodies, answers: The memory of the bodies of all open requests, and of their answers.
        held: What is released after the answer was sent.
        started: The time of the last byte of the body, on the clock of ``perf_counter``.
        raw: The raw tensors after the JSON.
        cost: The cost of the answer by name, for the log and the tracing span.
    """

    repository: Repository
    bodies: Budget
    answers: Budget
    held: ExitStack = field(default_factory=ExitStack)
    started: float = 0.0
    raw: bytes | memoryview = b""
    cost: Mapping[str, str | float] = field(default_factory=dict[str, str | float])

    @classmethod
    def of(cls, request: Request) -> Exchange:
        """The state of a request, which ``ObserveRequests`` creates."""
        return request.scope["attnserve"]

    async def hold_answer(self, size: int, deadline: float | None) -> None:
        """Wait for ``size`` free bytes for an answer, and reserve them until it was sent.

        Small answers do not wait, because the limit of waiting rows bounds their total.

        Raises:
            DeadlineExceeded: The deadline passed before the bytes were free.
        """
        if size > SMALL_BYTES:
            await self.answers.wait(size, deadline)
            self.held.callback(self.answers.give_back, size)
