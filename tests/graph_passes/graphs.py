"""Attention in ONNX text, part by part, so that a test shows only what it changes.

Sizes: D = 12, H = 3, K = 4, V = 2, so that no two are mistaken for one another. The scale, 0.37, is
no function of any of them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence

import numpy as np
import onnx
import onnx_ir as ir

from attnserve.checks.certify import read_attention
from attnserve.context import ONE_THREAD
from attnserve.runtime.interface import Session, SessionOptions
from attnserve.runtime.session import open_session
from graph_passes.analysis.constants import constant_array, constant_type, origin
from graph_passes.analysis.shapes import infer_shapes_small
from graph_passes.blocks import AttentionBlock, Weight
from graph_passes.emit.editing import Inserter
from graph_passes.emit.probabilities import probabilities_by_head
from graph_passes.matching.find import find_attention

D, H, K, V = 12, 3, 4, 2
SCALE = 0.37
ROOT = float(np.float32(np.sqrt(np.float32(SCALE))))

PARTS = {
    "q": """
        q0 = MatMul(x, Wq)
        q1 = Add(bq, q0)
        q2 = Reshape(q1, heads)
        q = Transpose <perm = [0, 2, 1, 3]> (q2)""",
    "k": """
        k0 = MatMul(x, Wk)
        k1 = Add(k0, bk)
        k2 = Reshape(k1, heads)
        kT = Transpose <perm = [0, 2, 3, 1]> (k2)""",
    "v": """
        v0 = MatMul(x, Wv)
        v1 = Add(v0, bv)
        v2 = Reshape(v1, v_heads)
        v = Transpose <perm = [0, 2, 1, 3]> (v2)""",
    "scores": """
        s0 = MatMul(q, kT)
        s = Mul(s0, scale)""",
    "mask": """
        m = Add(s, mask)""",
    "softmax": """
        p = Softmax <axis = -1> (m)""",
    "context": """
        c0 = MatMul(p, v)
        c1 = Transpose <perm = [0, 2, 1, 3]> (c0)
        c = Reshape(c1, merge)""",
    "output": """
        o = MatMul(c, Wo)
        out = Add(o, bo)""",
}
"""One self-attention as TorchScript writes it; a test replaces the parts it is about."""

PACKED = """
        packed = MatMul(x, Wqkv)
        biased = Add(packed, bqkv)"""

FUSED = {"scores": "", "mask": "", "softmax": ""}
"""Parts that the operator ``Attention`` holds."""

PLAIN_INPUT = f"float[batch, sequence, {D}] x"
TENSOR = f"float[batch, sequence, {D}]"
FLOAT_MASK = "float[batch, 1, 1, sequence] mask"
BOOL_MASK = "bool[batch, 1, 1, sequence] mask"


def weights(seed: int = 0) -> dict[str, np.ndarray]:
    """Every constant that a text may name."""
    rng = np.random.default_rng(seed)
    shapes: dict[str, tuple[int, ...]] = {
        "Wq": (D, H * K), "Wk": (D, H * K), "Wv": (D, H * V), "Wo": (H * V, D),
        "bq": (H * K,), "bk": (H * K,), "bv": (H * V,), "bo": (D,),
        "Wqkv": (D, 3 * H * K), "bqkv": (3 * H * K,), "Wo12": (H * K, D),
        "Wk1": (D, K), "Wv1": (D, V), "bk1": (K,), "bv1": (V,), "Wo1": (V, D),
        "Wfc": (D, 5), "per_head": (H, 1, 1),
    }  # fmt: skip
    arrays = {
        name: (rng.standard_normal(shape) / 2).astype(np.float32) for name, shape in shapes.items()
    }
    arrays |= {f"{name}T": np.ascontiguousarray(arrays[name].T) for name in ("Wq", "Wk", "Wo")}
    arrays |= {
        "scale": np.float32(SCALE),
        "root": np.float32(ROOT),
        "inverse": np.float32(1 / SCALE),
        "zero": np.float32(0),
        "one": np.float32(1),
        "low": np.float32(-1e9),
        "weak": np.float32(-2),
        "infinity": np.float32(-np.inf),
    }
    integers = {
        "heads": [0, 0, H, K], "v_heads": [0, 0, H, V], "merge": [0, 0, -1],
        "one_head": [0, 0, 1, K], "one_v_head": [0, 0, 1, V],
        "thirds": [H * K] * 3, "packed_heads": [0, 0, 3, H, K], "head_packed": [0, 0, H, 3, K],
        "flat": [-1, D], "unflat": [-1, 5, H, K],
        "i0": 0, "i1": 1, "i2": 2, "i3": 3, "a0": [0], "a1": [1], "a2": [2], "a3": [3],
        "n0": [0], "n12": [12], "n24": [24], "n36": [36], "n1": [1], "last": [-1],
    }  # fmt: skip
    return arrays | {name: np.array(value, np.int64) for name, value in integers.items()}


def graph(
    body: str,
    *,
    inputs: str = f"float[batch, sequence, {D}] x, {FLOAT_MASK}",
    output: str = f"float[batch, sequence, {D}] out",
    opset: int = 17,
    constants: Mapping[str, np.ndarray] | None = None,
) -> ir.Model:
    """A model from the text of its nodes; names nobody makes are constants of ``weights()``."""
    text = f"""<ir_version: 9, opset_import: ["": {opset}, "com.microsoft": 1]>
    layer ({inputs}) => ({output}) {{{body}
    }}"""
    proto = onnx.parser.parse_model(text)
    graphs = list(_bodies(proto.graph))
    made = {name for inner in graphs for node in inner.node for name in node.output}
    made |= {value.name for inner in graphs for value in inner.input}
    arrays = weights() | dict(constants or {})
    read = (name for inner in graphs for node in inner.node for name in node.input)
    for name in dict.fromkeys(read):
        if name in arrays and name not in made:
            proto.graph.initializer.append(onnx.numpy_helper.from_array(arrays[name], name))
    return ir.from_proto(proto)


def _bodies(proto: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """A graph and the bodies of its nodes; what they all capture are constants of the first."""
    yield proto
    for node in proto.node:
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from _bodies(attribute.g)


def attention(
    *,
    inputs: str = f"float[batch, sequence, {D}] x, {FLOAT_MASK}",
    output_type: str = f"float[batch, sequence, {D}] out",
    opset: int = 17,
    constants: Mapping[str, np.ndarray] | None = None,
    **parts: str,
) -> ir.Model:
    """``PARTS`` with some replaced, in one graph."""
    assert parts.keys() <= PARTS.keys()
    body = "".join((PARTS | parts).values())
    return graph(body, inputs=inputs, output=output_type, opset=opset, constants=constants)


def layers(
    count: int = 2,
    *,
    inputs: str = f"float[batch, sequence, {D}] x, {FLOAT_MASK}",
    opset: int = 17,
    same: Collection[str] = (),
    constants: Mapping[str, np.ndarray] | None = None,
    **parts: str,
) -> ir.Model:
    """Layers over one residual stream, x = x + attention(x), each with weights of its own.

    Args:
        same: Weights that all layers share, by their names in ``weights()``.
    """
    body, arrays = "", weights() | dict(constants or {})
    for layer in range(count):
        own = {n: a for n, a in weights(layer).items() if n[0] in "Wb" and n not in same}
        own = {n: arrays[n] if n in (constants or {}) else a for n, a in own.items()}
        arrays |= {f"{name}_{layer}": array for name, array in own.items()}
        names = {name: f"{name}_{layer}" for name in own}
        before = f"x_{layer}" if layer else "x"
        after = "stream" if layer == count - 1 else f"x_{layer + 1}"
        body += renamed("".join((PARTS | parts).values()), f"_{layer}", x=before, **names)
        body += f"\n        {after} = Add({before}, out_{layer})"
    output = f"float[batch, sequence, {D}] stream"
    return graph(body, inputs=inputs, output=output, opset=opset, constants=arrays)


def renamed(text: str, suffix: str, **names: str) -> str:
    """Append a suffix to all values that nodes in text compute, and rename others by ``names``."""
    nodes = onnx.parser.parse_graph(f"g (float x) => (float out) {{{text}\n}}").node
    names |= {name: f"{name}{suffix}" for node in nodes for name in node.output}
    return re.sub(rf"\b({'|'.join(names)})\b", lambda match: names[match[0]], text)


def second_layer(suffix: str = "_1", tokens: str = "out", **parts: str) -> str:
    """``PARTS`` with some replaced, over other tokens, with the same weights."""
    return renamed("".join((PARTS | parts).values()), suffix, x=tokens)


def body_layer(tokens: str, suffix: str = "") -> str:
    """``PARTS`` over other tokens, without the mask, with a suffix of every value."""
    return second_layer(suffix, tokens, mask="\n        m = Identity(s)")


def fused_parts(operator: str) -> dict[str, str]:
    """Parts of an attention whose ``operator`` reads q, k and v with their heads apart."""
    return {
        **FUSED,
        "k": PARTS["k"].replace("kT", "k").replace("0, 2, 3, 1", "0, 2, 1, 3"),
        "context": PARTS["context"].replace("MatMul(p, v)", operator),
    }


def square_layers(heads: int, size: int, count: int = 1) -> ir.Model:
    """Layers without masks and residuals whose heads together are as wide as their tokens."""
    width, rng, body = heads * size, np.random.default_rng(0), ""
    arrays = {"heads": np.array([0, 0, heads, size]), "v_heads": np.array([0, 0, heads, size])}
    for layer in range(count):
        names = {f"{kind}{part}": f"{kind}{part}_{layer}" for part in "qkvo" for kind in "Wb"}
        for name in names.values():
            array = rng.standard_normal((width,) * (2 if name[0] == "W" else 1))
            arrays[name] = array.astype(np.float32)
        text = "".join((PARTS | {"mask": "\n m = Identity(s)"}).values())
        body += renamed(text, f"_{layer}", x=f"out_{layer - 1}" if layer else "x", **names)
    tokens = f"float[batch, sequence, {width}]"
    output = f"{tokens} out_{count - 1}"
    return graph(body, inputs=f"{tokens} x", output=output, constants=arrays)


def if_model() -> ir.Model:
    yes, no = body_layer("x", "_yes"), body_layer("x", "_no").replace("Wq)", "Wk)")
    body = f"""
    out = If (flag) <
        then_branch = yes () => ({TENSOR} out_yes) {{{yes}
        }},
        else_branch = no () => ({TENSOR} out_no) {{{no}
        }}>"""
    return graph(body, inputs=f"{PLAIN_INPUT}, bool flag")


def masked(model: ir.Model, masks: Mapping[str, Sequence[int]]) -> ir.Model:
    """The model whose rows of W_O are zero where a mask is: those heads write nothing."""
    for block in find_attention(model).blocks:
        if (output := block.output) is None or block.name not in masks:
            continue
        weight = output.weight
        assert isinstance(weight, Weight)
        array = constant_array(weight.value).astype(constant_type(weight.value).numpy())
        pruned = output.rows[np.asarray(masks[block.name]) == 0].reshape(-1)
        np.moveaxis(array, weight.contracted[0], 0)[pruned] = 0
        product = output.nodes[-1]
        made = Inserter(block.graph, product, f"{block.name}/masked").constant(array, "weight")
        at = [value is not None and origin(value) is weight.value for value in product.inputs]
        product.replace_input_with(at.index(True), made)
    return model


def grafted(model: ir.Model, edges: Mapping[str, Mapping[int, tuple[str, int]]]) -> ir.Model:
    """What reuse means, with nothing taken away: probabilities replaced head by head."""
    blocks = {block.name: block for block in find_attention(model).blocks}
    facts = infer_shapes_small(model, batch=2, sequence=5)
    new: list[tuple[AttentionBlock, ir.Value]] = []
    for name, heads in edges.items():
        block = blocks[name]
        product = block.context.producer()
        assert product is not None
        make, rows = Inserter(block.graph, product, f"{name}/grafted"), list[ir.Value]()
        for head in range(block.num_heads):
            source, index = heads.get(head, (name, head))
            probabilities = probabilities_by_head(make, blocks[source], facts)
            place = blocks[source].own_heads.tolist().index(index)
            at = make.constant(np.array([place], np.int64), "head")
            rows.append(make.op("Gather", [probabilities, at], "row", axis=1))
        assert block.probabilities is not None
        whole = make.op("Concat", rows, "rows", axis=1)
        shape = make.op("Shape", [block.probabilities], "shape")
        new.append((block, make.op("Reshape", [whole, shape], "in_place")))
    for block, value in new:
        product = block.context.producer()
        assert product is not None and block.probabilities is not None
        product.replace_input_with(list(product.inputs).index(block.probabilities), value)
    return model


def text_of(model: ir.Model) -> str:
    """The nodes of a model as text, without the weights."""
    return re.sub(r"\n\s*\n", "\n", str(model.graph))


def assert_unchanged(model: ir.Model, rewrite: ir.passes.PassBase) -> None:
    """A pass changes nothing, and says so."""
    before = ir.to_proto(model).SerializeToString()
    assert not rewrite(model).modified
    assert ir.to_proto(model).SerializeToString() == before


def only(model: ir.Model) -> AttentionBlock:
    """The one block of a model, certified by running it."""
    matches = read_attention(model)
    assert [miss.reason for miss in matches.unmatched] == []
    assert len(matches.blocks) == 1
    return matches.blocks[0]


def reasons(model: ir.Model) -> list[str]:
    """Why nothing was read."""
    matches = read_attention(model)
    assert matches.blocks == ()
    return [miss.reason for miss in matches.unmatched]


def feeds(
    model: ir.Model, *, batch: int = 2, sequence: int = 7, seed: int = 1
) -> dict[str, np.ndarray]:
    """Normal tokens; masks that hide some keys and never all."""
    rng = np.random.default_rng(seed)
    arrays: dict[str, np.ndarray] = {}
    for value in model.graph.inputs:
        assert value.name is not None and value.shape is not None and value.dtype is not None
        named = {"batch": batch, "sequence": sequence}
        shape = tuple(
            dim if isinstance(dim, int) else named.get(str(dim.value), sequence)
            for dim in value.shape
        )
        if "mask" not in value.name and value.dtype.is_floating_point():
            arrays[value.name] = rng.standard_normal(shape).astype(value.dtype.numpy())
            continue
        seen = rng.random(shape) < 0.7
        seen[..., 0] = True
        if value.dtype.is_floating_point():
            hidden = -1e9 if value.dtype.itemsize > 2 else -6e4
            arrays[value.name] = np.where(seen, 0, hidden).astype(value.dtype.numpy())
        elif len(shape) == 1:  # the lengths of the sequences
            lengths = rng.integers(1, sequence, shape, endpoint=True)
            arrays[value.name] = lengths.astype(value.dtype.numpy())
        else:
            arrays[value.name] = seen.astype(value.dtype.numpy())
    return arrays


def observing(model: ir.Model, values: Sequence[ir.Value], *, optimize: bool = True) -> Session:
    """A session of the model that returns these values in place of its outputs."""
    outputs = list(model.graph.outputs)
    model.graph.outputs[:] = values
    try:
        return open_session(model, ONE_THREAD, SessionOptions(optimize=optimize))
    finally:
        model.graph.outputs[:] = outputs


def run(model: ir.Model, arrays: Mapping[str, np.ndarray]) -> np.ndarray:
    """The first output, by ONNX Runtime without its own rewrites."""
    session = open_session(model, ONE_THREAD, SessionOptions(optimize=False))
    return np.asarray(session.run(None, dict(arrays))[0])


def operators(model: ir.Model) -> Counter[str]:
    return Counter(node.op_type for node in model.graph)
