"""Every operator of the table against ONNX Runtime, on random inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

torch = pytest.importorskip("torch", reason="pip install 'attnserve[torch]'")

from attnserve.recovery.module import GraphModule  # noqa: E402
from attnserve.recovery.operators.registry import OPERATORS  # noqa: E402
from attnserve.runtime.session import open_session  # noqa: E402
from graph_passes.errors import InvalidModel  # noqa: E402
from tests.errors import raises  # noqa: E402

MS = "com.microsoft"
Random = np.random.Generator


@dataclass(frozen=True)
class Case:
    """An operator and its random inputs; None is an input that is left out."""

    operator: str
    inputs: Callable[[Random], list[np.ndarray | None]]
    attributes: dict[str, Any] = field(default_factory=dict)
    domain: str = ""
    opset: int = 18
    outputs: int = 1

    def __str__(self) -> str:
        return "-".join([self.operator, *self.attributes, *([str(self.opset)])])


def floats(random: Random, *shape: int) -> np.ndarray:
    return random.standard_normal(shape, dtype=np.float32)


def embedding(random: Random) -> list[np.ndarray | None]:
    """Ids and segments (2, 5), three tables, a norm and a mask."""
    made = [random.integers(0, n, (2, 5)).astype(np.int32) for n in (7, 2)]
    tables = [floats(random, n, 8) for n in (7, 9, 2)]
    mask = np.array([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]], np.int32)
    return [*made, *tables, floats(random, 8), floats(random, 8), mask]


def grouped_query(random: Random, past: int) -> list[np.ndarray | None]:
    """Four heads and two groups of size 16, five tokens (one text, if behind a cache), angles."""
    B = 1 if past else 2
    cache = [floats(random, B, 2, past, 16) for _ in range(2)]
    angles = floats(random, 16, 8)
    length = np.full(B, past + 4, np.int32)
    return [*(floats(random, B, 5, n) for n in (64, 32, 32)), *cache, length,
            np.array(past + 5, np.int32), np.cos(angles), np.sin(angles)]  # fmt: skip


def positive(random: Random, *shape: int) -> np.ndarray:
    return np.abs(floats(random, *shape)) + np.float32(0.1)


def ints(*values: Any) -> np.ndarray:
    return np.array(values, np.int64)


def bools(random: Random, *shape: int) -> np.ndarray:
    return random.random(shape) < 0.5


def ids(random: Random, size: int, *shape: int) -> np.ndarray:
    return random.integers(-size, size, shape)


def shape_of(random: Random, rank: int = 3) -> tuple[int, ...]:
    return tuple(int(n) for n in random.integers(1, 5, rank))


def pair(random: Random) -> list[np.ndarray | None]:
    """Two arrays that broadcast."""
    shape = shape_of(random)
    other = [n if random.random() < 0.6 else 1 for n in shape][int(random.integers(0, 3)) :]
    return [floats(random, *shape), floats(random, *other)]


def one(random: Random) -> list[np.ndarray | None]:
    return [floats(random, *shape_of(random))]


def special(random: Random) -> list[np.ndarray | None]:
    array = floats(random, 4, 5)
    array[0, 0], array[1, 1] = np.nan, -np.inf
    return [array]


def heads(random: Random, *, groups: int = 2, mask: Any = None) -> list[np.ndarray | None]:
    """Queries (2, 5, 4*6), keys and values (2, 7, groups*6), and a mask."""
    shown = None if mask is None else mask(random)
    return [
        floats(random, 2, 5, 24),
        *(floats(random, 2, 7, groups * 6) for _ in range(2)),
        *([] if shown is None else [shown]),
    ]


def hidden_row(random: Random) -> np.ndarray:
    """A mask (2, 1, 5, 7) that hides all keys of one query."""
    mask = bools(random, 2, 1, 5, 7)
    mask[:, :, :, 0] = True
    mask[0, 0, 2] = False
    return mask


def rotary(random: Random, rank: int, *, first: bool) -> list[np.ndarray | None]:
    x = floats(random, 2, 4, 5, 6) if rank == 4 else floats(random, 2, 5, 24)
    angles = floats(random, 9, 3)
    positions = random.integers(0, 9, (2, 5))
    cached = [np.cos(angles), np.sin(angles)]
    return [x, *cached, positions] if first else [x, positions, *cached]


def unary(name: str, make: Any = one) -> Case:
    return Case(name, make)


CASES = [
    *[unary(name) for name in ("Abs", "Ceil", "Cos", "Erf", "Exp", "Floor", "Identity", "Neg",
                               "Relu", "Round", "Sigmoid", "Sign", "Sin", "Softplus", "Tanh",
                               "Elu", "LeakyRelu", "HardSigmoid", "HardSwish", "Dropout", "Shape",
                               "Size")],
    *[unary(name, lambda r: [positive(r, *shape_of(r))]) for name in ("Log", "Reciprocal", "Sqrt")],
    *[unary(name, special) for name in ("IsNaN", "IsInf")],
    *[Case("Resize", lambda r, size=size: [floats(r, 2, 3, 4, 6), None, *size], dict(form))
      for size in ([None, ints(2, 3, 7, 5)], [np.array([1, 1, 2, 2], np.float32)])
      for form in ({"nearest_mode": "floor", "coordinate_transformation_mode": "asymmetric"},
                   {"mode": "linear"},
                   {"mode": "linear", "coordinate_transformation_mode": "align_corners"},
                   {"mode": "cubic", "coordinate_transformation_mode": "pytorch_half_pixel"})],
    Case("BatchNormalization", lambda r: [floats(r, 2, 3, 4, 5), *(floats(r, 3) for _ in range(3)),
                                          positive(r, 3)], {"epsilon": 1e-3}),
    unary("GlobalAveragePool", lambda r: [floats(r, 2, 3, 4, 5)]),
    Case("Not", lambda r: [bools(r, 3, 4)]),
    *[Case(name, pair) for name in ("Add", "Mul", "Sub", "Greater", "GreaterOrEqual", "Less",
                                    "LessOrEqual", "Max", "Min", "Sum", "Mean", "CastLike")],
    *[Case(name, lambda r: [*pair(r), floats(r, 1)]) for name in ("Max", "Min", "Sum", "Mean")],
    *[Case(name, lambda r: [bools(r, 3, 4), bools(r, 4)]) for name in ("And", "Or", "Xor")],
    Case("Equal", lambda r: [ids(r, 2, 3, 4), ids(r, 2, 4)]),
    Case("Div", lambda r: [floats(r, 3, 4), positive(r, 4)]),
    Case("Div", lambda r: [ids(r, 9, 3, 4), ints(-2, 3, 4, -5)]),
    Case("Pow", lambda r: [positive(r, 3, 4), floats(r, 4)]),
    Case("Pow", lambda r: [floats(r, 3, 4), np.array(2, np.float32)]),
    Case("Pow", lambda r: [ids(r, 5, 3, 4), ints(2)]),
    Case("Mod", lambda r: [ids(r, 9, 3, 4), ints(-2, 3, 4, -5)]),
    Case("Mod", lambda r: [floats(r, 3, 4), positive(r, 4)], {"fmod": 1}),
    Case("Where", lambda r: [bools(r, 3, 1), floats(r, 3, 4), floats(r, 1)]),
    Case("Clip", lambda r: [floats(r, 3, 4), np.array(-0.5, np.float32)]),
    Case("Clip", lambda r: [floats(r, 3, 4), None, np.array(0.5, np.float32)]),
    Case("Clip", one, {"min": -0.1, "max": 0.4}, opset=10),
    Case("Cast", one, {"to": onnx.TensorProto.INT64}),
    Case("Cast", lambda r: [bools(r, 3)], {"to": onnx.TensorProto.FLOAT}),
    Case("Gelu", one, opset=20),
    Case("Gelu", one, {"approximate": "tanh"}, opset=20),
    Case("Swish", one, opset=24),
    Case("Gelu", one, domain=MS),
    Case("BiasGelu", lambda r: [floats(r, 2, 3, 4), floats(r, 4)], domain=MS),
    Case("FastGelu", lambda r: [floats(r, 2, 3, 4), floats(r, 4)], domain=MS),
    Case("FastGelu", one, domain=MS),
    Case("QuickGelu", one, {"alpha": 1.5}, domain=MS),
    Case("Constant", lambda r: [], {"value_floats": [1.0, 2.0]}),
    Case("Constant", lambda r: [], {"value": onnx.numpy_helper.from_array(ints(3, 4))}),
    Case("Shape", one, {"start": 1, "end": -1}),
    Case("Reshape", lambda r: [floats(r, 2, 3, 4), ints(0, -1)]),
    Case("Reshape", lambda r: [floats(r, 0, 3), ints(3, 0)], {"allowzero": 1}),
    Case("Flatten", lambda r: [floats(r, 2, 3, 4)], {"axis": -1}),
    Case("Transpose", lambda r: [floats(r, 2, 3, 4)]),
    Case("Transpose", lambda r: [floats(r, 2, 3, 4)], {"perm": [1, 2, 0]}),
    Case("Unsqueeze", lambda r: [floats(r, 2, 3), ints(-1, 0)]),
    Case("Unsqueeze", lambda r: [floats(r, 2, 3)], {"axes": [1]}, opset=11),
    Case("Squeeze", lambda r: [floats(r, 2, 1, 3, 1), ints(-1)]),
    Case("Squeeze", lambda r: [floats(r, 2, 1, 3, 1)]),
    Case("Concat", lambda r: [floats(r, 2, 3), floats(r, 2, 1)], {"axis": -1}),
    Case("Split", lambda r: [floats(r, 2, 7), ints(3, 4)], {"axis": 1}, outputs=2),
    Case("Split", lambda r: [floats(r, 2, 7)], {"axis": 1, "num_outputs": 2}, outputs=2),
    Case("Slice", lambda r: [floats(r, 4, 5), ints(1, -9), ints(2**62, -1), ints(0, -1)]),
    Case("Slice", lambda r: [floats(r, 4, 7), ints(-1), ints(-(2**62)), ints(1), ints(-2)]),
    Case("Expand", lambda r: [floats(r, 3, 1), ints(2, 1, 4)]),
    Case("Tile", lambda r: [floats(r, 2, 3), ints(2, 3)]),
    Case("Gather", lambda r: [floats(r, 4, 5, 3), ids(r, 5, 2, 3)], {"axis": 1}),
    Case("Gather", lambda r: [floats(r, 4, 5), np.array(-1, np.int64)]),
    Case("GatherElements", lambda r: [floats(r, 4, 5), ids(r, 5, 4, 2)], {"axis": 1}),
    Case("GatherND", lambda r: [floats(r, 3, 4, 5), ids(r, 3, 6, 2)]),
    Case("GatherND", lambda r: [floats(r, 3, 4, 5), ids(r, 4, 3, 6, 1)], {"batch_dims": 1}),
    Case("ConstantOfShape", lambda r: [ints(2, 3)]),
    Case("ConstantOfShape", lambda r: [ints(2)],
         {"value": onnx.numpy_helper.from_array(ints(7))}),
    Case("Range", lambda r: [np.array(n, np.int64) for n in (1, 9, 3)]),
    Case("Trilu", lambda r: [floats(r, 4, 5)], {"upper": 0}),
    Case("Trilu", lambda r: [floats(r, 2, 4, 5), np.array(1, np.int64)]),
    Case("OneHot", lambda r: [ids(r, 3, 4), np.array(3, np.int64), floats(r, 2)], {"axis": 0}),
    Case("CumSum", lambda r: [floats(r, 3, 4), np.array(1, np.int64)]),
    Case("CumSum", lambda r: [ids(r, 5, 3, 4), np.array(0, np.int64)],
         {"exclusive": 1, "reverse": 1}),
    Case("Pad", lambda r: [floats(r, 3, 4), ints(0, 1, 2, 0), np.array(2, np.float32)]),
    *[Case(name, lambda r: [floats(r, 2, 3, 4), ints(-1, 0)], {"keepdims": keep})
      for name in ("ReduceMean", "ReduceSum", "ReduceMax", "ReduceMin", "ReduceL2", "ReduceProd")
      for keep in (0, 1)],
    Case("ReduceMean", lambda r: [floats(r, 2, 3)], {"axes": [1]}, opset=11),
    Case("ReduceSum", lambda r: [floats(r, 2, 3), ints()], {"noop_with_empty_axes": 1}),
    Case("ArgMax", lambda r: [floats(r, 3, 4)], {"axis": 1, "keepdims": 0}),
    Case("MatMul", lambda r: [floats(r, 2, 1, 3, 4), floats(r, 5, 4, 2)]),
    Case("MatMul", lambda r: [floats(r, 4), floats(r, 4, 2)]),
    Case("Gemm", lambda r: [floats(r, 3, 4), floats(r, 5, 4), floats(r, 5)],
         {"transB": 1, "alpha": 0.5, "beta": 2.0}),
    Case("Gemm", lambda r: [floats(r, 4, 3), floats(r, 4, 5)], {"transA": 1}),
    *(Case("FusedGemm", lambda r: [floats(r, 3, 4), floats(r, 5, 4), floats(r, 5)],
           {"transB": 1, "activation": name}, MS)
      for name in ("Relu", "Sigmoid", "Softplus", "Tanh")),
    Case("FusedGemm", lambda r: [floats(r, 3, 4), floats(r, 4, 5)],
         {"activation": "LeakyRelu", "activation_alpha": 0.2}, MS),
    Case("FusedMatMul", lambda r: [floats(r, 2, 3, 4), floats(r, 2, 5, 4)],
         {"transB": 1, "alpha": 0.3}, MS),
    Case("Einsum", lambda r: [floats(r, 2, 3, 4), floats(r, 4, 5, 6)],
         {"equation": "b s d, d h k -> b h s k"}),
    Case("Softmax", lambda r: [floats(r, 2, 3, 4)], {"axis": 1}),
    Case("Softmax", lambda r: [floats(r, 2, 3, 4)], opset=11),
    Case("LogSoftmax", lambda r: [floats(r, 2, 3, 4)]),
    Case("LayerNormalization", lambda r: [floats(r, 2, 3, 4), floats(r, 4), floats(r, 4)]),
    Case("LayerNormalization", lambda r: [floats(r, 2, 3, 4), floats(r, 3, 4)], {"axis": 1}),
    Case("RMSNormalization", lambda r: [floats(r, 2, 3, 4), floats(r, 4)], opset=23),
    Case("SimplifiedLayerNormalization", lambda r: [floats(r, 2, 3, 4), floats(r, 4)],
         {"epsilon": 1e-3}),
    Case("SkipLayerNormalization",
         lambda r: [floats(r, 2, 3, 4), floats(r, 2, 3, 4), *[floats(r, 4) for _ in range(3)]],
         domain=MS, outputs=4),
    Case("SkipSimplifiedLayerNormalization",
         lambda r: [floats(r, 2, 3, 4), 1e-4 * floats(r, 2, 3, 4), floats(r, 4)], domain=MS,
         outputs=4),
    Case("SkipSimplifiedLayerNormalization",  # its epsilon counts
         lambda r: [1e-4 * floats(r, 2, 3, 4), 1e-4 * floats(r, 2, 3, 4), floats(r, 4)], domain=MS,
         outputs=4),
    Case("EmbedLayerNormalization", embedding, domain=MS, outputs=3),
    Case("EmbedLayerNormalization", lambda r: embedding(r)[:7], domain=MS, outputs=2),
    Case("EmbedLayerNormalization",
         lambda r: [*embedding(r), r.integers(0, 9, (2, 5)).astype(np.int32)], {"epsilon": 1e-3},
         MS, outputs=3),
    Case("InstanceNormalization", lambda r: [floats(r, 2, 3, 9), floats(r, 3), floats(r, 3)]),
    Case("Conv", lambda r: [floats(r, 2, 3, 8, 8), floats(r, 5, 3, 2, 3), floats(r, 5)],
         {"strides": [2, 1], "pads": [1, 0, 0, 2]}),
    Case("Conv", lambda r: [floats(r, 2, 4, 9), floats(r, 6, 2, 3)],
         {"group": 2, "dilations": [2]}),
    Case("ConvTranspose", lambda r: [floats(r, 2, 3, 5, 6), floats(r, 3, 4, 2, 3), floats(r, 4)],
         {"strides": [2, 3], "pads": [1, 0, 1, 0], "output_padding": [1, 0]}),
    Case("ConvTranspose", lambda r: [floats(r, 2, 4, 9), floats(r, 4, 3, 3)],
         {"group": 2, "dilations": [2]}),
    Case("MaxPool", lambda r: [floats(r, 2, 3, 7, 8)],
         {"kernel_shape": [3, 2], "strides": [2, 1], "pads": [1, 0, 0, 1]}),
    Case("MaxPool", lambda r: [floats(r, 2, 3, 9)], {"kernel_shape": [2], "dilations": [2]}),
    Case("AveragePool", lambda r: [floats(r, 2, 3, 7, 8)],
         {"kernel_shape": [3, 2], "strides": [2, 1]}),
    Case("AveragePool", lambda r: [floats(r, 2, 3, 9)],
         {"kernel_shape": [2], "pads": [1, 0], "count_include_pad": 1}),
    Case("GroupNormalization", lambda r: [floats(r, 2, 6, 5), floats(r, 2), floats(r, 2)],
         {"num_groups": 2}),
    Case("GroupNormalization", lambda r: [floats(r, 2, 6, 5), floats(r, 6), floats(r, 6)],
         {"num_groups": 2, "epsilon": 1e-2}, opset=21),
    Case("PRelu", lambda r: [floats(r, 2, 3, 5), floats(r, 3, 1)]),
    Case("ScatterElements", lambda r: [floats(r, 3, 4), np.array([[1, -1], [2, 0]]),
                                       floats(r, 2, 2)], {"axis": 1}),
    Case("ScatterElements", lambda r: [floats(r, 3, 4), np.array([[1, 1], [0, 1]]),
                                       floats(r, 2, 2)], {"reduction": "add"}),
    Case("ScatterND", lambda r: [floats(r, 4, 3, 5), np.array([[1, 2], [0, -1]]),
                                 floats(r, 2, 5)]),
    Case("ScatterND", lambda r: [floats(r, 6), np.array([[1], [1], [4]]), floats(r, 3)],
         {"reduction": "add"}),
    *[Case("TopK", lambda r: [r.integers(0, 4, (3, 6, 2)).astype(np.float32), np.array([4])],
           {"axis": 1, "largest": largest}, outputs=2) for largest in (0, 1)],
    *[Case("Attention", lambda r, m=mask: heads(r, mask=m),
           {"q_num_heads": 4, "kv_num_heads": 2, **more}, opset=23)
      for mask in (None, hidden_row, lambda r: floats(r, 5, 7))
      for more in ({}, {"scale": 0.3}, {"is_causal": 1})],
    Case("Attention", heads, {"q_num_heads": 4, "kv_num_heads": 2, "softcap": 2.0}, opset=23),
    Case("Attention", lambda r: [floats(r, 2, 4, 5, 6), floats(r, 2, 2, 7, 6),
                                 floats(r, 2, 2, 7, 8)], opset=23),
    Case("Attention", lambda r: [*heads(r), None, floats(r, 2, 2, 3, 6), floats(r, 2, 2, 3, 6)],
         {"q_num_heads": 4, "kv_num_heads": 2}, opset=23, outputs=3),
    Case("MultiHeadAttention", lambda r: heads(r, groups=4), {"num_heads": 4}, MS),
    Case("MultiHeadAttention",
         lambda r: [*heads(r, groups=4), floats(r, 72), None, floats(r, 1, 4, 5, 7)],
         {"num_heads": 4, "scale": 0.3}, MS),
    Case("MultiHeadAttention",
         lambda r: [floats(r, 2, 5, 24), floats(r, 2, 5, 24), floats(r, 2, 5, 24), None,
                    np.array([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]], np.int32)],
         {"num_heads": 4, "unidirectional": 1}, MS),
    Case("Attention", lambda r: [floats(r, 2, 5, 8), floats(r, 8, 36), floats(r, 36), None, None,
                                 floats(r, 1, 1, 5, 5)],
         {"num_heads": 3, "qkv_hidden_sizes": [12, 12, 12]}, MS),
    Case("Attention", lambda r: [floats(r, 2, 5, 8), floats(r, 8, 36), floats(r, 36),
                                 np.array([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]], np.int32)],
         {"num_heads": 3, "unidirectional": 1}, MS),
    Case("Attention", lambda r: [floats(r, 2, 5, 8), floats(r, 8, 36), floats(r, 36),
                                 np.array([3, 5], np.int32)], {"num_heads": 3}, MS),
    *[Case("GroupQueryAttention", lambda r, n=past: grouped_query(r, n),
           {"num_heads": 4, "kv_num_heads": 2, "do_rotary": 1, **more}, MS, outputs=3)
      for past in (0, 3)
      for more in ({}, {"rotary_interleaved": 1}, {"local_window_size": 2}, {"softcap": 2.0},
                   {"scale": 0.3})],
    Case("GroupQueryAttention", lambda r: grouped_query(r, 0)[:7],
         {"num_heads": 4, "kv_num_heads": 2}, MS, outputs=3),
    Case("GroupQueryAttention", lambda r: [floats(r, 1, 5, 128), None, None,
                                           *grouped_query(r, 3)[3:]],
         {"num_heads": 4, "kv_num_heads": 2, "do_rotary": 1}, MS, outputs=3),
    Case("GroupQueryAttention", lambda r: [*grouped_query(r, 0), None, floats(r, 1, 4, 5, 5)],
         {"num_heads": 4, "kv_num_heads": 2, "do_rotary": 1}, MS, outputs=3),
    *[Case("RotaryEmbedding", lambda r, k=rank: rotary(r, k, first=True),
           {"interleaved": turned, "num_heads": 4}, opset=23)
      for rank in (3, 4) for turned in (0, 1)],
    Case("RotaryEmbedding", lambda r: [floats(r, 2, 4, 5, 6), floats(r, 2, 5, 2),
                                       floats(r, 2, 5, 2)],
         {"rotary_embedding_dim": 4}, opset=23),
    *[Case("RotaryEmbedding", lambda r, k=rank: rotary(r, k, first=False),
           {"interleaved": turned}, MS)
      for rank in (3, 4) for turned in (0, 1)],
]  # fmt: skip


def built(case: Case, arrays: list[np.ndarray | None]) -> ir.Model:
    """A graph of one node."""
    node = onnx.helper.make_node(
        case.operator,
        ["" if array is None else f"i{i}" for i, array in enumerate(arrays)],
        [f"o{i}" for i in range(case.outputs)],
        "node", domain=case.domain, **case.attributes,
    )  # fmt: skip
    inputs = [
        onnx.helper.make_tensor_value_info(
            f"i{i}", onnx.helper.np_dtype_to_tensor_dtype(array.dtype), array.shape
        )
        for i, array in enumerate(arrays)
        if array is not None
    ]
    outputs = [onnx.ValueInfoProto(name=name) for name in node.output]
    graph = onnx.helper.make_graph([node], "g", inputs, outputs)
    imports = [onnx.helper.make_opsetid("", case.opset), onnx.helper.make_opsetid(MS, 1)]
    return ir.from_proto(onnx.helper.make_model(graph, opset_imports=imports, ir_version=10))


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_operator_equals_onnx_runtime(case: Case, seed: int):
    """Relative to the largest element, within 2e-5; integers and booleans are equal."""
    arrays = case.inputs(np.random.default_rng(seed))
    model = built(case, arrays)
    feed = {f"i{i}": array for i, array in enumerate(arrays) if array is not None}
    expected = open_session(model).run(None, feed)
    with torch.no_grad():
        found = GraphModule(model)(feed)
    for a, b in zip(expected, (x.numpy() for x in found), strict=True):
        if case.operator.startswith("Skip") and not b.size:
            continue  # statistics for training, which ONNX Runtime leaves out
        assert a.shape == b.shape
        assert a.dtype == b.dtype
        if a.dtype.kind == "f":
            largest = float(np.abs(a[np.isfinite(a)]).max(initial=1.0))
            np.testing.assert_allclose(b, a, rtol=0, atol=2e-5 * largest)
        else:
            np.testing.assert_array_equal(b, a)


def test_table_has_a_case_for_each_operator():
    assert {(case.domain, case.operator) for case in CASES} == set(OPERATORS)


@pytest.mark.parametrize("operator", ["Softmax", "Attention"])
def test_query_without_keys_has_finite_gradient(operator: str):
    """A graph that replaces the NaN of such a row by 0 can be trained."""
    x = torch.randn(1, 1, 3, 3, requires_grad=True)
    hidden = torch.zeros(1, 1, 3, 3, dtype=torch.bool)
    hidden[0, 0, 1] = True
    node = ir.Node("", operator, [], num_outputs=1)
    from attnserve.recovery.operators.registry import Call

    if operator == "Softmax":
        y = OPERATORS["", operator](Call(node, 18), x.masked_fill(hidden, -torch.inf))
        assert y[0, 0, 1].isnan().all()
        y = torch.where(y.isnan(), torch.zeros_like(y), y)
    else:
        y = OPERATORS["", operator](Call(node, 23), x, x, x, ~hidden)[0]
        assert (y[0, 0, 1] == 0).all()
    (y * torch.randn_like(y)).sum().backward()
    assert x.grad is not None and x.grad.isfinite().all()


@pytest.mark.parametrize(
    ("operator", "domain"), [("NonZero", ""), ("DynamicQuantizeLinear", ""), ("Inverse", MS)]
)
def test_unsupported_operator_names_operator_and_node(operator: str, domain: str):
    outputs = 3 if "Quantize" in operator else 1
    case = Case(operator, lambda r: [], domain=domain, outputs=outputs)
    with raises(InvalidModel, "recovery.operator", f"{operator} of node 'node'") as caught:
        GraphModule(built(case, [np.ones((2, 2), np.float32)]))
    assert ("quantize the result" in caught.value.fix) == ("Quantize" in operator)


def test_unsupported_form_names_operator_and_node():
    case = Case("Pad", lambda r: [], {"mode": "reflect"})
    arrays: list[np.ndarray | None] = [np.ones((3, 4), np.float32), ints(0, 1, 0, 1)]
    module = GraphModule(built(case, arrays))
    with raises(InvalidModel, "recovery.operator", "Pad of node 'node'", "reflect"):
        module({"i0": arrays[0], "i1": arrays[1]})
