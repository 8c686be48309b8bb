"""Products with quantized weights in ONNX text, as each tool writes them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tests.graph_passes.graphs import weights

DYNAMIC = """
        {y}_b, {y}_s, {y}_z = DynamicQuantizeLinear({x})"""
STATIC = """
        {y}_b = QuantizeLinear({x}, step, middle)"""
PACKED = "K = {D}, N = {N}, bits = 4, block_size = 16"

PRODUCTS = {
    "MatMulInteger": f"""{DYNAMIC}
        {{y}}_i = MatMulInteger({{y}}_b, {{W}}8, {{y}}_z)
        {{y}}_f = Cast <to = 1> ({{y}}_i)
        {{y}}_t = Mul({{y}}_s, {{W}}s)
        {{y}} = Mul({{y}}_f, {{y}}_t)""",
    "MatMulInteger, scales of columns": f"""{STATIC}
        {{y}}_i = MatMulInteger({{y}}_b, {{W}}8, middle)
        {{y}}_f = Cast <to = 1> ({{y}}_i)
        {{y}} = Mul({{W}}s, {{y}}_f)""",
    "MatMulInteger, one scale": f"""{STATIC}
        {{y}}_i = MatMulInteger({{y}}_b, {{W}}8, middle)
        {{y}}_f = Cast <to = 1> ({{y}}_i)
        {{y}} = Mul({{y}}_f, small)""",
    "MatMulIntegerToFloat": f"""{DYNAMIC}
        {{y}} = com.microsoft.MatMulIntegerToFloat({{y}}_b, {{W}}8, {{y}}_s, {{W}}s, {{y}}_z)""",
    "scales of rows": """
        {y}_a = Abs({x})
        {y}_m = ReduceMax <axes = [-1]> ({y}_a)
        {y}_u = Div({x}, {y}_m)
        {y}_b = QuantizeLinear({y}_u, unit, middle)
        {y}_r = com.microsoft.MatMulIntegerToFloat({y}_b, {W}8, unit, {W}s, middle)
        {y} = Mul({y}_r, {y}_m)""",
    "DynamicQuantizeMatMul": """
        {y} = com.microsoft.DynamicQuantizeMatMul({x}, {W}8, {W}s)""",
    "MatMulNBits": f"""
        {{y}} = com.microsoft.MatMulNBits <{PACKED}> ({{x}}, {{W}}4, {{W}}s)""",
    "QLinearMatMul": f"""{STATIC}
        {{y}}_q = QLinearMatMul({{y}}_b, step, middle, {{W}}8, small, nothing, wide, middle)
        {{y}} = DequantizeLinear({{y}}_q, wide, middle)""",
    "QDQ": f"""{STATIC}
        {{y}}_d = DequantizeLinear({{y}}_b, step, middle)
        {{y}}_w = DequantizeLinear <axis = 1> ({{W}}8, {{W}}s)
        {{y}}_p = MatMul({{y}}_d, {{y}}_w)
        {{y}}_q = QuantizeLinear({{y}}_p, wide, middle)
        {{y}} = DequantizeLinear({{y}}_q, wide, middle)""",
    "weights only": """
        {y}_w = DequantizeLinear <axis = 1> ({W}8, {W}s)
        {y} = MatMul({x}, {y}_w)""",
    "transposed weights only": """
        {y}_d = DequantizeLinear <axis = 0> ({W}8T, {W}s)
        {y}_w = Transpose <perm = [1, 0]> ({y}_d)
        {y} = MatMul({x}, {y}_w)""",
    "smoothed": """
        {y}_x = Mul({x}, {W}_smooth)
        {y} = com.microsoft.DynamicQuantizeMatMul({y}_x, {W}8, {W}s)""",
    "QGemm": """
        {y}_n = Shape({x})
        {y}_l = Slice({y}_n, n0, a2)
        {y}_1 = Concat <axis = 0> ({y}_l, last)
        {y}_0 = Concat <axis = 0> (last, {W}_rows)
        {y}_x = Reshape({x}, {y}_0)
        {y}_b = QuantizeLinear({y}_x, step, middle)
        {y}_p = com.microsoft.QGemm({y}_b, step, middle, {W}8, small, nothing)
        {y} = Reshape({y}_p, {y}_1)""",
}
"""The product ``y`` of the tokens ``x`` and the weight ``W``, by how it is written."""


def product(how: str, y: str, x: str, weight: str) -> str:
    rows, columns = quantized_weights([weight])[f"{weight}8"].shape
    return PRODUCTS[how].format(y=y, x=x, W=weight, D=rows, N=columns)


def quantized_weights(
    names: Sequence[str] = ("Wq", "Wk", "Wv", "Wo", "Wqkv", "W1", "W2"),
) -> dict[str, np.ndarray]:
    """The constants that the products read."""
    arrays: dict[str, np.ndarray] = {
        "step": np.float32(0.02), "middle": np.uint8(128), "small": np.float32(0.01),
        "wide": np.float32(0.05), "unit": np.float32(1 / 127), "nothing": np.int8(0),
    }  # fmt: skip
    rng = np.random.default_rng(5)
    shapes = {name: array.shape for name, array in weights().items()}
    shapes |= {"W1": (12, 20), "W2": (20, 12)}
    for name in names:
        rows, columns = shapes[name]
        bytes_ = rng.integers(-64, 64, (rows, columns)).astype(np.int8)
        arrays |= {
            f"{name}8": bytes_,
            f"{name}8T": bytes_.T.copy(),
            f"{name}s": rng.uniform(0.005, 0.02, columns).astype(np.float32),
            f"{name}4": rng.integers(0, 256, (columns, -(-rows // 16), 8)).astype(np.uint8),
            f"{name}_smooth": rng.uniform(0.5, 2, rows).astype(np.float32),
            f"{name}_rows": np.array([rows]),
        }
        if rows > 16:  # a scale for each block of each column
            arrays[f"{name}s_blocks"] = rng.uniform(0.005, 0.02, columns * 2).astype(np.float32)
    return arrays
