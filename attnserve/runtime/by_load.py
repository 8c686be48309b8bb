"""Run a model with all threads if it is the only run, and else with few threads for each run.

Threads of one run wait for each other at each operator, and those of different runs do not. Runs
with one thread each therefore end before the same runs with all threads, one after the other.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from threading import Barrier

from attnserve.runtime.interface import Feed, Session, SessionWrapper

__all__ = ["IS_ALONE", "LoadRunner", "run_together"]

IS_ALONE: ContextVar[bool] = ContextVar("is_alone", default=True)
"""Whether no other run of the model is due while the run in this thread takes place."""


class LoadRunner(SessionWrapper[Session]):
    """Choose the session of a run by ``IS_ALONE``.

    Args:
        alone: A session with all threads.
        concurrent: A session of the same file for concurrent runs, with few threads for each.
    """

    def __init__(self, alone: Session, concurrent: Session) -> None:
        super().__init__(alone)
        self._concurrent = concurrent

    def session_of(self, feed: Feed) -> Session:
        return self.session if IS_ALONE.get() else self._concurrent


def run_together(run: Callable[[], object], runs: int) -> None:
    """Run a session several times at once, so that everything needed for that is prepared."""
    barrier = Barrier(runs)

    def run_one(_: int) -> None:
        IS_ALONE.set(False)
        barrier.wait()
        run()

    with ThreadPoolExecutor(runs) as pool:
        list(pool.map(run_one, range(runs)))
