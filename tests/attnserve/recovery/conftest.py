"""The tests of ``attnserve.recovery`` run torch."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest

from tests.attnserve.costs import counting_clock

torch = pytest.importorskip("torch", reason="pip install 'attnserve[torch]'")


@pytest.fixture(autouse=True)
def _reproducible(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    torch.set_num_threads(1)  # test machines have few cores
    torch.manual_seed(0)
    before = os.environ.get("ATTNSERVE_CACHE")
    os.environ["ATTNSERVE_CACHE"] = str(tmp_path_factory.mktemp("cache"))
    yield
    os.environ.pop("ATTNSERVE_CACHE")
    if before is not None:
        os.environ["ATTNSERVE_CACHE"] = before


@pytest.fixture
def counted_clock(in_context: Callable[..., None]) -> None:
    """A clock that runs by calls: a training has the same steps on every machine."""
    in_context(clock=counting_clock())
