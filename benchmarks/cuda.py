"""Does the optimized model hold on CUDA: parity and latency against the original, fp32 and fp16.

    python benchmarks/cuda.py [ORIGINAL.onnx OPTIMIZED.onnx] [--batch 1 --seq 128]

Without models it measures a random encoder of BERT-base's layers against its collaborative form at
R = num_heads x head_size, where the two must agree. Where there is no GPU it says so and exits 0.
Writes benchmarks/results/cuda.json.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from onnx_ir.passes.common import InlinePass

from attnserve.artifact import load_model, open_artifact, save_model
from attnserve.measure import bench, describe_machine
from attnserve.session import Provider, open_session
from attnserve.verify import verify
from graph_passes.collaborate import Collaborate, factor
from graph_passes.errors import AttnserveError
from graph_passes.find import find_attention

RESULT = Path(__file__).parent / "results" / "cuda.json"
HALF_MAX = float(np.finfo(np.float16).max)
FLOAT, HALF = ir.DataType.FLOAT, ir.DataType.FLOAT16


def why_no_cuda() -> str | None:
    """Why nothing can run on CUDA here; None where it can."""
    graph = ir.from_onnx_text(
        '<ir_version: 8, opset_import: ["" : 17]> g (float[n] x) => (float[n] y) { y = Exp(x) }'
    )
    try:
        providers = open_session(graph, provider="cuda").get_providers()
    except AttnserveError as error:
        return error.what
    # ONNX Runtime falls back to the CPU in silence.
    return None if "CUDAExecutionProvider" in providers else "no CUDA device can be used here"


def random_encoder(
    *, layers: int = 4, hidden: int = 768, heads: int = 12, positions: int = 512, seed: int = 0
) -> ir.Model:
    """A BERT-like encoder with random weights, as a TorchScript export writes it, at opset 17."""
    random = np.random.default_rng(seed)
    weights: dict[str, np.ndarray] = {}
    lines: list[str] = []

    def weight(name: str, *shape: int) -> str:
        weights[name] = (random.standard_normal(shape) / np.sqrt(shape[0])).astype(np.float32)
        return name

    def dense(out: str, x: str, rows: int, columns: int) -> None:
        w, b = weight(f"{out}_weight", rows, columns), weight(f"{out}_bias", columns)
        lines.append(f"{out}_product = MatMul({x}, {w})  {out} = Add({out}_product, {b})")

    def norm(out: str, a: str, b: str) -> None:
        lines.append(f"{out}_sum = Add({a}, {b})")
        lines.append(f"{out} = LayerNormalization<axis = -1>({out}_sum, ones, zeros)")

    for i in range(layers):
        h = f"h{i}"
        for part, perm in {"q": "0, 2, 1, 3", "k": "0, 2, 3, 1", "v": "0, 2, 1, 3"}.items():
            dense(f"l{i}_{part}", h, hidden, hidden)
            lines.append(f"l{i}_{part}_split = Reshape(l{i}_{part}, split)")
            lines.append(f"l{i}_{part}_heads = Transpose<perm = [{perm}]>(l{i}_{part}_split)")
        lines.append(f"l{i}_product = MatMul(l{i}_q_heads, l{i}_k_heads)")
        lines.append(f"l{i}_scores = Div(l{i}_product, root)")
        lines.append(f"l{i}_masked = Add(l{i}_scores, mask)")
        lines.append(f"l{i}_probabilities = Softmax<axis = -1>(l{i}_masked)")
        lines.append(f"l{i}_context = MatMul(l{i}_probabilities, l{i}_v_heads)")
        lines.append(f"l{i}_tokens = Transpose<perm = [0, 2, 1, 3]>(l{i}_context)")
        lines.append(f"l{i}_merged = Reshape(l{i}_tokens, merge)")
        dense(f"l{i}_output", f"l{i}_merged", hidden, hidden)
        norm(f"l{i}_attended", f"l{i}_output", h)
        dense(f"l{i}_up", f"l{i}_attended", hidden, 4 * hidden)
        lines.append(f"l{i}_relu = Relu(l{i}_up)")
        dense(f"l{i}_down", f"l{i}_relu", 4 * hidden, hidden)
        norm(f"h{i + 1}", f"l{i}_down", f"l{i}_attended")
    weight("words", 1000, hidden)
    weight("places", positions, hidden)
    weights |= {"ones": np.ones(hidden, np.float32), "zeros": np.zeros(hidden, np.float32)}
    root = (hidden / heads) ** 0.5
    text = f"""<ir_version: 8, opset_import: ["" : 17]>
    encoder (int64[batch, sequence] input_ids, int64[batch, sequence] attention_mask)
      => (float[batch, sequence, {hidden}] last_hidden_state)
    <float one = {{1}}, float lowest = {{-3.4028235e38}}, float root = {{{root}}},
     int64[1] begin = {{0}}, int64[1] step = {{1}}, int64[2] mask_axes = {{1, 2}},
     int64[4] split = {{0, 0, {heads}, {hidden // heads}}}, int64[3] merge = {{0, 0, {hidden}}}>
    {{
      kept = Cast<to = 1>(attention_mask)  kept_keys = Unsqueeze(kept, mask_axes)
      dropped = Sub(one, kept_keys)  mask = Mul(dropped, lowest)
      length = Shape<start = 1, end = 2>(input_ids)
      used = Slice(places, begin, length, begin, step)
      tokens = Gather(words, input_ids)  h0 = Add(tokens, used)
      {" ".join(lines)}
      last_hidden_state = Identity(h{layers})
    }}"""
    proto = onnx.parser.parse_model(text)
    proto.graph.initializer.extend(onnx.numpy_helper.from_array(a, n) for n, a in weights.items())
    return ir.from_proto(proto)


def collaborative(model: ir.Model) -> ir.Model:
    """Every layer in collaborative form at R = H*K: another graph of the same function."""
    new = model.clone(deep_copy=True)
    blocks = find_attention(new)[0]
    factors = {b.name: factor(b, b.num_heads * b.head_size) for b in blocks}
    Collaborate(factors)(new)
    return new


def to_float16(model: ir.Model) -> None:
    """Compute in float16 what ``model`` computes in float32; inputs and outputs stay as they are.

    Weights, constants, casts and value types change; floats beyond the range of float16 (a mask's
    lowest float) become its largest finite ones: an infinity would make a row without keys NaN.
    Not for graphs whose operators demand float32 (Resize, quantization scales).
    """
    InlinePass()(model)
    for graph in model.graphs():
        for value in graph.initializers.values():
            tensor = value.const_value  # its type is a fact, the value's own may be unstated
            if tensor is not None and tensor.dtype == FLOAT:
                value.const_value, value.type = _half(tensor), ir.TensorType(HALF)
        for value in (*graph.inputs, *(out for node in graph for out in node.outputs)):
            if value.dtype == FLOAT and not (graph is model.graph and value.is_graph_input()):
                value.dtype = HALF
        for node in graph:
            _make_half(node)
    _cast_at_the_borders(model.graph)


def _half(tensor: ir.TensorProtocol | float | Sequence[float]) -> ir.Tensor:
    array = tensor.numpy() if isinstance(tensor, ir.TensorProtocol) else np.array(tensor)
    name = tensor.name if isinstance(tensor, ir.TensorProtocol) else None
    return ir.tensor(np.clip(array, -HALF_MAX, HALF_MAX).astype(np.float16), name=name)


def _make_half(node: ir.Node) -> None:
    attributes = node.attributes
    if node.op_type == "Cast" and attributes.get_int("to") == FLOAT:
        attributes.add(ir.AttrInt64("to", HALF))
    elif node.op_type == "ConstantOfShape" and "value" not in attributes:
        attributes.add(ir.AttrTensor("value", _half([0.0])))
    for attribute in list(attributes.values()):
        if attribute.type == ir.AttributeType.TENSOR and attribute.as_tensor().dtype == FLOAT:
            attributes.add(ir.AttrTensor(attribute.name, _half(attribute.as_tensor())))
        elif node.op_type == "Constant" and attribute.name in ("value_float", "value_floats"):
            del attributes[attribute.name]
            attributes.add(ir.AttrTensor("value", _half(attribute.value)))


def _cast_at_the_borders(graph: ir.Graph) -> None:
    first = graph[0]
    for value in graph.inputs:
        if value.dtype == FLOAT and value.name not in graph.initializers:
            uses = tuple(value.uses())
            cast = ir.node("Cast", [value], {"to": HALF})
            cast.outputs[0].name = f"{value.name}_float16"
            cast.outputs[0].dtype, cast.outputs[0].shape = HALF, value.shape
            graph.insert_before(first, cast)
            for node, index in uses:
                node.replace_input_with(index, cast.outputs[0])
    for index, value in enumerate(graph.outputs):
        if value.dtype == HALF:
            cast = ir.node("Cast", [value], {"to": FLOAT})
            cast.outputs[0].name, value.name = value.name, f"{value.name}_float16"
            cast.outputs[0].dtype, cast.outputs[0].shape = FLOAT, value.shape
            graph.append(cast)
            graph.outputs[index] = cast.outputs[0]


def compare(
    original: Path, optimized: Path, *, batch: int, sequence: int, provider: Provider = "cuda"
) -> dict[str, Any]:
    """Parity and latency of one pair."""
    report = bench(
        [original, optimized], batches=(batch,), sequences=(sequence,), provider=provider
    )
    return {
        "parity": verify(original, optimized, provider=provider).to_json(),
        "results": report.to_json()["results"],
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("models", nargs="*", type=Path, help="ORIGINAL OPTIMIZED")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--min-cosine", type=float, default=0.9, help="exit 1 below it")
    options = parser.parse_args(arguments)
    if len(options.models) not in (0, 2):
        parser.error("give two models, ORIGINAL and OPTIMIZED, or none")
    if reason := why_no_cuda():
        print(f"benchmarks/cuda.py: nothing measured: {reason}")
        return 0
    precisions: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="attnserve-") as folder:
        for precision in ("fp32", "fp16"):
            paths = [
                Path(folder) / f"{name}-{precision}.onnx" for name in ("original", "optimized")
            ]
            for path, model in zip(paths, _models(options.models), strict=True):
                if precision == "fp16":
                    to_float16(model)
                save_model(model, path)
            result = compare(*paths, batch=options.batch, sequence=options.seq)
            precisions[precision] = result
            _print(precision, result)
    content = {"machine": vars(describe_machine("cuda")), "precisions": precisions}
    RESULT.parent.mkdir(parents=True, exist_ok=True)
    RESULT.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    least = min(result["parity"]["min_cosine"] for result in precisions.values())
    return 0 if least >= options.min_cosine else 1


def _models(paths: Sequence[Path]) -> list[ir.Model]:
    if paths:
        return [load_model(open_artifact(path)) for path in paths]
    encoder = random_encoder()
    return [encoder, collaborative(encoder)]


def _print(precision: str, result: dict[str, Any]) -> None:
    original, optimized = result["results"]
    low, high = optimized["speedup_ci95"]
    worst = max(output["max_abs_error"] for output in result["parity"]["outputs"])
    print(
        f"{precision}: {original['p50_ms']:.3f} -> {optimized['p50_ms']:.3f} ms, "
        f"speed-up {optimized['speedup_vs_first']:.3f} [{low:.3f}, {high:.3f}], "
        f"least cosine {result['parity']['min_cosine']:.6f}, largest error {worst:.2e}"
    )


if __name__ == "__main__":
    try:
        sys.exit(main())
    except AttnserveError as error:
        sys.exit(f"error: {error}")
