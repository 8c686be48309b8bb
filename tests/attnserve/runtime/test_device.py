"""Whether a GPU can be used."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from attnserve.runtime import device
from attnserve.runtime.onnx_runtime import require_runtime

CUDA = "CUDAExecutionProvider"


@pytest.mark.process
def test_gpu_refusal_reports_errors_and_crashes_of_child(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if CUDA in require_runtime().get_available_providers():
        pytest.skip("this ONNX Runtime has the CUDA provider")
    assert "no CUDA execution provider" in str(device.gpu_refusal())

    def replace(function: Callable[..., Any], *arguments: Any) -> None:
        monkeypatch.setattr(device, "require_cuda", partial(function, *arguments))

    replace(signal.raise_signal, signal.SIGSEGV)
    assert "signal SIGSEGV" in str(device.gpu_refusal())
    replace(sys.exit, "CUDA driver version is insufficient")
    refusal = str(device.gpu_refusal())
    assert refusal.endswith("exit status 1: CUDA driver version is insufficient")
    replace(time.sleep, 60)
    monkeypatch.setattr(device, "TIMEOUT_S", 0.2)
    assert "did not finish within 0.2 s" in str(device.gpu_refusal())
    monkeypatch.setattr(device, "TIMEOUT_S", 60)
    replace({}.get, "nothing")
    assert device.gpu_refusal() is None
