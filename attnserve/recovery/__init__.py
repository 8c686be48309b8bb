"""Recover the quality of a rewritten graph by distillation from its original.

Needs the extra ``[torch]``. ``Recovery`` is the training; ``GraphModule`` computes an ONNX graph in
PyTorch, with gradients.
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

from attnserve.recovery.module import GraphModule
from attnserve.recovery.recovery import Recovery
from attnserve.recovery.report import RecoverReport

__all__ = ["GraphModule", "RecoverReport", "Recovery"]
