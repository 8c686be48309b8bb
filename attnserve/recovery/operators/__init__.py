"""ONNX operators in PyTorch, by domain and name (``registry``).

Each operator is a function (call, inputs ...) -> output, or a tuple of outputs. An omitted input is
None. Shapes, axes and other integers that an operator reads on the host are tensors on the CPU
(``GraphModule`` keeps them there), so that no operator waits for the GPU.
"""

from attnserve.recovery.operators import (
    attention,
    elementwise,
    images,
    normalization,
    products,
    reductions,
    shapes,
)

__all__ = [
    "attention",
    "elementwise",
    "images",
    "normalization",
    "products",
    "reductions",
    "shapes",
]
