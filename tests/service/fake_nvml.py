"""A stand-in for the ``pynvml`` module, of a machine with GPUs."""

from __future__ import annotations

from types import SimpleNamespace

import pytest


class FakeNvml:
    """Report ``used`` bytes on every GPU, and record the GPUs that were asked for.

    Args:
        lost: Every GPU fails.
    """

    class NVMLError(Exception):
        pass

    def __init__(self, used: int = 7, *, lost: bool = False) -> None:
        self.used, self._lost = used, lost
        self.devices: list[int | str] = []

    def nvmlInit(self) -> None:  # noqa: N802
        if self._lost:
            raise self.NVMLError

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int | str:  # noqa: N802
        return self._handle(index)

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int | str:  # noqa: N802
        return self._handle(uuid)

    def nvmlDeviceGetMemoryInfo(self, device: int | str) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(total=100, free=100 - self.used, used=self.used)

    def _handle(self, device: int | str) -> int | str:
        if self._lost:
            raise self.NVMLError
        self.devices.append(device)
        return device


def use_nvml(monkeypatch: pytest.MonkeyPatch, nvml: FakeNvml | None) -> None:
    """Make the service use ``nvml``; None for a machine without a GPU."""
    monkeypatch.setattr("attnserve.runtime.memory_use.load_nvml", lambda: nvml)
