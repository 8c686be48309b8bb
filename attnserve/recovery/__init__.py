"""Recover the quality of a rewritten graph by distillation from its original.

Needs the extra ``[torch]``. ``Distillation`` is a pair of models that is ready to train, and
``training.train`` trains it. ``GraphModule`` computes an ONNX graph in PyTorch, with gradients.
"""

from __future__ import annotations

from graph_passes.errors import MissingExtra

try:
    import torch as _torch  # noqa: F401 # pyright: ignore[reportUnusedImport]
except ImportError as error:
    raise MissingExtra(
        f"{error.name or 'torch'} is not installed: training needs PyTorch",
        "pip install 'attnserve[torch]'",
        code="extra.torch",
    ) from error

from attnserve.recovery.distillation import Distillation
from attnserve.recovery.module import GraphModule

__all__ = ["Distillation", "GraphModule"]
