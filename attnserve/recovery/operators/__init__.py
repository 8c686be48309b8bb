"""ONNX operators in PyTorch, by domain and name.

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
from attnserve.recovery.operators.registry import (
    HALF,
    ON_HOST,
    OPERATORS,
    Call,
    Operator,
    tensor_of,
)

__all__ = [
    "HALF",
    "ON_HOST",
    "OPERATORS",
    "Call",
    "Operator",
    "attention",
    "elementwise",
    "images",
    "normalization",
    "products",
    "reductions",
    "shapes",
    "tensor_of",
]
