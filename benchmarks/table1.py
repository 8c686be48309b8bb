"""Table 1 of "Multi-Head Attention: Collaborate Instead of Concatenate" (arXiv 2006.16362).

    python -m benchmarks.table1 [--rounds 40]

One attention layer at 128 tokens, with concatenated and with collaborative heads: ONNX graphs
without biases as in the paper, rewritten by ``Collaborate`` and counted by ``analysis.cost``. The
paper counts the mixing product twice and one multiply-accumulate as one FLOP; mixing is counted
once here. The milliseconds of the paper (a GPU of 2020) are printed next to those of this machine,
measured in interleaved rounds on one thread.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from rich.console import Console
from rich.table import Table

from attnserve import bench
from attnserve.checks.benchmark import BenchReport
from attnserve.models.onnx_files import save_model
from benchmarks._common import description, write_result
from graph_passes.analysis.cost import Cost, break_even, model_cost
from graph_passes.factorize.cp import CollaborativeFactors
from graph_passes.matching.find import find_attention
from graph_passes.passes.collaborate import Collaborate

TOKENS = 128
COLUMNS = (
    {"name": "FairSeq, section 4.1", "size": 512, "heads": 8, "rank": 128,
     "paper": {"params_1e6": (1.05, 0.66), "flops_1e8": (1.51, 1.09), "ms": (0.99, 0.81)}},
    {"name": "HuggingFace, section 4.2", "size": 768, "heads": 12, "rank": 256,
     "paper": {"params_1e6": (2.36, 1.58), "flops_1e8": (3.27, 2.65), "ms": (1.71, 1.65)}},
)  # fmt: skip


def attention_layer(size: int, heads: int, seed: int = 0) -> ir.Model:
    """Return one layer of concatenated heads over x (batch, sequence, size), without biases."""
    model = onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["" : 17]>
    layer (float[batch, sequence, {size}] x) => (float[batch, sequence, {size}] y)
    <int64[4] split = {{0, 0, {heads}, {size // heads}}}, int64[3] merge = {{0, 0, {size}}},
     float root = {{{(size / heads) ** 0.5}}}>
    {{
      q = MatMul(x, w_q)  q_split = Reshape(q, split)
      q_heads = Transpose<perm = [0, 2, 1, 3]>(q_split)
      k = MatMul(x, w_k)  k_split = Reshape(k, split)
      k_heads = Transpose<perm = [0, 2, 3, 1]>(k_split)
      v = MatMul(x, w_v)  v_split = Reshape(v, split)
      v_heads = Transpose<perm = [0, 2, 1, 3]>(v_split)
      product = MatMul(q_heads, k_heads)
      scores = Div(product, root)
      probabilities = Softmax<axis = -1>(scores)
      context = MatMul(probabilities, v_heads)
      tokens = Transpose<perm = [0, 2, 1, 3]>(context)
      merged = Reshape(tokens, merge)
      y = MatMul(merged, w_o)
    }}""")
    random = np.random.default_rng(seed)
    for name in ("w_q", "w_k", "w_v", "w_o"):
        weight = (random.standard_normal((size, size)) / size**0.5).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(weight, name))
    return ir.from_proto(model)


def collaborative_layer(size: int, heads: int, rank: int) -> ir.Model:
    """Return the layer as ``Collaborate`` writes it; cost and speed do not depend on the values."""
    layer = attention_layer(size, heads)
    random = np.random.default_rng(1)
    factors = CollaborativeFactors(
        query=random.standard_normal((size, rank)) / size**0.5,
        key=random.standard_normal((size, rank)) / size**0.5,
        mixing=random.standard_normal((heads, rank)) / rank**0.5,
        content=np.zeros((heads, size)),
        relative_error=0.0,
        iterations=0,
    )
    Collaborate.with_factors({find_attention(layer).blocks[0].name: factors})(layer)
    return layer


def macs_of_one_sequence(cost: Cost) -> int:
    """Return the MACs of one sequence of ``TOKENS`` tokens."""
    macs = cost.macs_of({"x": (1, TOKENS, 1)})
    assert macs is not None, cost.uncounted
    return macs


def column(name: str, size: int, heads: int, rank: int, paper: dict[str, Any]) -> dict[str, Any]:
    """Count one column of the table; ``paper`` holds the numbers of the paper."""
    before = model_cost(attention_layer(size, heads))
    after = model_cost(collaborative_layer(size, heads, rank))
    assert before.macs is not None and after.macs is not None
    macs = macs_of_one_sequence(before), macs_of_one_sequence(after)
    mixing = TOKENS * heads * rank
    return {
        "name": name,
        "size": size,
        "heads": heads,
        "rank": rank,
        "parameters": [before.parameters, after.parameters],
        "macs": list(macs),
        "macs_as_the_paper_counts": [macs[0], macs[1] + mixing],
        "break_even_tokens": break_even(before.macs, after.macs),
        "break_even_tokens_without_mixing": 2 * size * (size - rank) / (heads * rank - size),
        "paper": paper,
    }


def measure(rounds: int | None) -> tuple[list[list[float]], list[list[float]], BenchReport]:
    """Return p50 milliseconds and speed-ups of the two layers of each column."""
    milliseconds, ratios, report = [], [], None
    for entry in COLUMNS:
        size, heads, rank = (int(entry[key]) for key in ("size", "heads", "rank"))  # type: ignore[call-overload]
        with tempfile.TemporaryDirectory() as folder:
            paths = [Path(folder) / f"{kind}.onnx" for kind in ("concatenated", "collaborative")]
            save_model(attention_layer(size, heads), paths[0])
            save_model(collaborative_layer(size, heads, rank), paths[1])
            report = bench(paths, batches=[1], sequences=[TOKENS], threads=1, rounds=rounds)
        milliseconds.append([r.p50_ms for r in report.results])
        ratios.append([report.results[1].speedup_vs_first, *report.results[1].speedup_ci95])
    assert report is not None
    return milliseconds, ratios, report


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=description(__doc__))
    parser.add_argument("--rounds", type=int, help="interleaved rounds; default: by time")
    options = parser.parse_args(arguments)
    columns = [column(**entry) for entry in COLUMNS]  # type: ignore[arg-type]
    milliseconds, ratios, report = measure(options.rounds)
    table = Table(title=f"Table 1, one layer, {TOKENS} tokens: ours (paper)")
    for heading in ("", *(f"{c['name']}: {c['size']} -> {c['rank']}" for c in columns)):
        table.add_column(heading)

    def row(label: str, ours: str, scale: float, key: str) -> None:
        cells = []
        for c in columns:
            a, b = (value / scale for value in c[ours])
            x, y = c["paper"][key]
            cells.append(f"{a:.2f} -> {b:.2f} ({x} -> {y})")
        table.add_row(label, *cells)

    row("parameters, 1e6", "parameters", 1e6, "params_1e6")
    row("FLOPs as the paper counts, 1e8", "macs_as_the_paper_counts", 1e8, "flops_1e8")
    row("MACs, mixing once, 1e8", "macs", 1e8, "flops_1e8")
    cells = []
    for c, ms, (ratio, low, high) in zip(columns, milliseconds, ratios, strict=True):
        x, y = c["paper"]["ms"]
        cells.append(f"{ms[0]:.2f} -> {ms[1]:.2f} ({x} -> {y})")
        c |= {"p50_ms": ms, "speedup": ratio, "speedup_ci95": [low, high]}
    table.add_row("milliseconds", *cells)
    table.add_row("speed-up", *(f"{r[0]:.2f}x [{r[1]:.2f}, {r[2]:.2f}]" for r in ratios))
    table.add_row(
        "costs more MACs from",
        *(
            f"{c['break_even_tokens']} tokens "
            f"({c['break_even_tokens_without_mixing']:.0f} without mixing)"
            for c in columns
        ),
    )
    Console().print(table)
    write_result("table1", options, columns=columns, machine=asdict(report.machine))
    return 0


if __name__ == "__main__":
    sys.exit(main())
