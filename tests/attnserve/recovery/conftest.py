"""The tests of ``attnserve.recovery`` run torch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="pip install 'attnserve[torch]'")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.export)


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
