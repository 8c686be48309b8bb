"""Time and memory of ``inspect`` for models of 1 to 96 layers.

    python -m benchmarks.find_speed

Encoders with the layers of BERT-base (D 768, H 12, feed-forward 3072, vocabulary 30522), and narrow
encoders (D 384, H 6, feed-forward 1536, vocabulary 1000) up to 96 layers, which would not fit in
memory at full width. The weights are random and in external data. The nodes are those of a
TorchScript export, including the computation of shapes.

Each model is inspected in a separate process. The time covers ``inspect`` from the path to the
JSON, as wall time and processor time. The memory is the growth of the peak resident set since the
imports, including mapped files. The slope is that of log(seconds) over log(layers) from 12 layers
on; 1 is linear.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import onnx
from onnx.external_data_helper import set_external_data
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks._common import (
    description,
    numpy_machine,
    peak_memory,
    reset_peak_memory,
    write_result,
)

LAYERS = {"BERT-base": (1, 2, 4, 12, 24), "narrow": (1, 2, 4, 12, 24, 48, 96)}
SLOPE_FROM = 12
"""Smallest number of layers for the slope; below it, constant costs dominate."""


@dataclass(frozen=True)
class Size:
    """D, H, the neurons of the feed-forward network and the rows of the embedding table."""

    width: int
    heads: int
    neurons: int
    vocabulary: int


SIZES = {"BERT-base": Size(768, 12, 3072, 30522), "narrow": Size(384, 6, 1536, 1000)}

EMBEDDINGS = """
  words = Gather (word_table, input_ids)
  ids_shape = Shape (input_ids)
  length = Gather <axis = 0> (ids_shape, one)
  length1 = Unsqueeze (length, zeros)
  positions = Slice (position_table, zeros, length1, zeros)
  sum = Add (words, positions)
  x0 = LayerNormalization <axis = -1> (sum, gamma, beta)
  mask2 = Unsqueeze (attention_mask, ones_twos)
  mask_float = Cast <to = 1> (mask2)
  hidden = Sub (float_one, mask_float)
  mask = Mul (hidden, lowest)
"""

HEADS = """
  {part}0_L = MatMul (xL, {part}_weight_L)  {part}1_L = Add ({part}_bias_L, {part}0_L)
  {part}_shape_L = Shape ({part}1_L)
  {part}_batch_L = Gather <axis = 0> ({part}_shape_L, zero)
  {part}_length_L = Gather <axis = 0> ({part}_shape_L, one)
  {part}_batch1_L = Unsqueeze ({part}_batch_L, zeros)
  {part}_length1_L = Unsqueeze ({part}_length_L, zeros)
  {part}_heads_L = Concat <axis = 0> ({part}_batch1_L, {part}_length1_L, heads, head_size)
  {part}2_L = Reshape ({part}1_L, {part}_heads_L)
  {part}3_L = Transpose <perm = [0, 2, 1, 3]> ({part}2_L)
"""

LAYER = f"""{"".join(HEADS.format(part=part) for part in "qkv")}
  k4_L = Transpose <perm = [0, 1, 3, 2]> (k3_L)
  scores_L = MatMul (q3_L, k4_L)
  scaled_L = Div (scores_L, root)
  masked_L = Add (scaled_L, mask)
  probabilities_L = Softmax <axis = -1> (masked_L)
  context_L = MatMul (probabilities_L, v3_L)
  tokens_L = Transpose <perm = [0, 2, 1, 3]> (context_L)
  merge_L = Concat <axis = 0> (q_batch1_L, q_length1_L, width)
  merged_L = Reshape (tokens_L, merge_L)
  o0_L = MatMul (merged_L, o_weight_L)
  o1_L = Add (o_bias_L, o0_L)
  o2_L = Add (o1_L, xL)
  y_L = LayerNormalization <axis = -1> (o2_L, gamma, beta)
  up0_L = MatMul (y_L, up_weight_L)
  up_L = Add (up_bias_L, up0_L)
  divided_L = Div (up_L, root_two)
  erf_L = Erf (divided_L)
  more_L = Add (erf_L, float_one)
  both_L = Mul (up_L, more_L)
  gelu_L = Mul (both_L, half)
  down0_L = MatMul (gelu_L, down_weight_L)
  down_L = Add (down_bias_L, down0_L)
  z_L = Add (down_L, y_L)
  xNEXT = LayerNormalization <axis = -1> (z_L, gamma, beta)
"""


def write_encoder(path: Path, size: Size, layers: int) -> int:
    """Write an encoder and its external data, weight by weight; return the bytes of both files."""
    texts = [LAYER.replace("NEXT", str(i + 1)).replace("xL", f"x{i}").replace("_L", f"_{i}")
             for i in range(layers)]  # fmt: skip
    model = onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["" : 17]>
    encoder (int64[batch, sequence] input_ids, int64[batch, sequence] attention_mask)
    => (float[batch, sequence, {size.width}] x{layers})
    <int64 zero = {{0}}, int64 one = {{1}}, int64[1] zeros = {{0}}, int64[2] ones_twos = {{1, 2}},
     int64[1] heads = {{{size.heads}}}, int64[1] head_size = {{{size.width // size.heads}}},
     int64[1] width = {{{size.width}}}, float root = {{{(size.width / size.heads) ** 0.5}}},
     float root_two = {{{2**0.5}}}, float half = {{0.5}}, float float_one = {{1}},
     float lowest = {{-3e38}}>
    {{{EMBEDDINGS}{"".join(texts)}}}""")
    shapes: dict[str, tuple[int, ...]] = {
        "word_table": (size.vocabulary, size.width),
        "position_table": (512, size.width),
        "gamma": (size.width,),
        "beta": (size.width,),
    }
    for i in range(layers):
        for part, (rows, columns) in {
            **dict.fromkeys("qkvo", (size.width, size.width)),
            "up": (size.width, size.neurons),
            "down": (size.neurons, size.width),
        }.items():
            shapes |= {f"{part}_weight_{i}": (rows, columns), f"{part}_bias_{i}": (columns,)}
    random = np.random.default_rng(layers)
    with path.with_suffix(".data").open("wb") as data:
        for name, shape in shapes.items():
            array = random.standard_normal(shape, np.float32) * np.float32(0.02)
            model.graph.initializer.append(_external(name, array, data))
    onnx.save(model, path)
    return path.stat().st_size + path.with_suffix(".data").stat().st_size


def _external(name: str, array: np.ndarray, data: BinaryIO) -> onnx.TensorProto:
    tensor = onnx.TensorProto(name=name, dims=array.shape, data_type=onnx.TensorProto.FLOAT)
    tensor.raw_data = b""
    set_external_data(tensor, Path(data.name).name, data.tell(), array.nbytes)
    tensor.ClearField("raw_data")
    data.write(array.tobytes())
    return tensor


def inspect_model(path: Path) -> dict[str, Any]:
    """Inspect one model in this process, and measure time and memory (Linux)."""
    from attnserve.checks.inspect import inspect
    from attnserve.runtime.onnx_runtime import require_runtime

    require_runtime()
    before, start, cpu_start = reset_peak_memory(), time.perf_counter(), time.process_time()
    content = inspect(path).to_json()
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
    assert content["missed"] == [], content["missed"]
    return {
        "found": len(content["attention"]),
        "wall_s": seconds,
        "cpu_s": cpu_seconds,
        "baseline_rss_bytes": before,
        "peak_extra_bytes": peak_memory() - before,
    }


def measure(name: str, layers: int, rounds: int) -> dict[str, Any]:
    """Inspect one model in a new process per round."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        size = write_encoder(path, SIZES[name], layers)
        samples = []
        for _ in range(rounds):
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                samples.append(pool.apply(inspect_model, (path,)))
    assert all(sample["found"] == layers for sample in samples)
    return {
        "size": name,
        "layers": layers,
        "file_bytes": size,
        "median_wall_s": statistics.median(sample["wall_s"] for sample in samples),
        "median_cpu_s": statistics.median(sample["cpu_s"] for sample in samples),
        "peak_extra_bytes": max(sample["peak_extra_bytes"] for sample in samples),
        "memory_over_file": max(sample["peak_extra_bytes"] for sample in samples) / size,
        "samples": samples,
    }


def slope(rows: list[dict[str, Any]], clock: str) -> float:
    """Return the slope of log(seconds) over log(layers) from ``SLOPE_FROM`` layers on."""
    long = [row for row in rows if row["layers"] >= SLOPE_FROM]
    x, y = (np.log([row[key] for row in long]) for key in ("layers", f"median_{clock}_s"))
    return float(np.polyfit(x, y, 1)[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=description(__doc__))
    parser.add_argument("--rounds", type=int, default=3, help="processes per model")
    parser.add_argument("--most", type=int, default=96, help="largest number of layers")
    arguments = parser.parse_args()
    cases = [(name, n) for name, counts in LAYERS.items() for n in counts if n <= arguments.most]
    rows = [measure(*case, arguments.rounds) for case in track(cases, "models")]
    result = {
        "question": "seconds and memory of inspect, and how they grow with the layers",
        **numpy_machine(("numpy", "onnx", "onnx-ir", "onnxruntime")),
        "sizes": {name: asdict(size) for name, size in SIZES.items()},
        "weights": "random, separate for each layer, external data",
        "slope": {
            name: {
                clock: slope([row for row in rows if row["size"] == name], clock)
                for clock in ("wall", "cpu")
            }
            for name, counts in LAYERS.items()
            if sum(SLOPE_FROM <= n <= arguments.most for n in counts) > 1
        },
        "models": rows,
    }
    write_result("find_speed", arguments, **result)

    table = Table("size", "layers", "file, MiB", "seconds", "processor seconds", "memory, MiB",
                  "memory / file", title="inspect")  # fmt: skip
    for row in rows:
        table.add_row(
            row["size"],
            str(row["layers"]),
            f"{row['file_bytes'] / 2**20:.0f}",
            f"{row['median_wall_s']:.2f}",
            f"{row['median_cpu_s']:.2f}",
            f"{row['peak_extra_bytes'] / 2**20:.0f}",
            f"{row['memory_over_file']:.2f}",
        )
    console = Console()
    console.print(table)
    for name, slopes in result["slope"].items():
        console.print(
            f"{name}: time grows as layers^{slopes['wall']:.2f} "
            f"(processor time: ^{slopes['cpu']:.2f}), "
            f"from {SLOPE_FROM} layers on"
        )


if __name__ == "__main__":
    main()
