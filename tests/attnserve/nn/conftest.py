"""Trained layers for the tests of ``attnserve.nn``, which all run torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import pytest

if find_spec("torch") is None or find_spec("transformers") is None:  # the extra [torch]
    collect_ignore_glob = ["test_*.py"]
else:
    import torch


@pytest.fixture(autouse=True)
def _reproducible() -> Iterator[None]:
    torch.set_num_threads(1)  # test machines have few cores
    torch.manual_seed(0)
    yield


@pytest.fixture
def layer_of() -> Callable[..., Any]:
    """``layer_of(**options)``: PyTorch's attention with 4 heads of 4, and random biases."""

    def build(**options: Any) -> Any:
        layer = torch.nn.MultiheadAttention(16, 4, **{"batch_first": True, **options}).eval()
        if layer.in_proj_bias is not None:
            torch.nn.init.normal_(layer.in_proj_bias)
            torch.nn.init.normal_(layer.out_proj.bias)
        return layer

    return build
