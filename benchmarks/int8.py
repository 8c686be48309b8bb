"""Quality, batch dependence and speed of int8 schemes for all-MiniLM-L6-v2.

    python -m benchmarks.int8 --train stsb_train.tsv --dev stsb_dev.tsv

The float32 model with fused operators is quantized in several ways. Weights have 7 or 8 bits, and
one scale per column. Activations:

- dynamic: one scale for the whole batch (``onnxruntime.quantization.quantize_dynamic``)
- static: constant scales from the smallest and largest values on the calibration data
- static, clipped: the same, clipped to the 99.99th percentile of absolute values
- static, smoothed: large channels are divided by a constant first
- static, smoothed, corrected: the same with bias correction
- static, smoothed, corrected, rounded: the same, and weights are rounded such that their errors
  cancel (GPTQ); this is ``attnserve optimize --int8``
- per row: the largest absolute value of each token at run time; this is used without calibration
- MatMulNBits: weights in blocks, and ``accuracy_level`` 4. 4 bits have blocks of 32 and weights to
  the nearest, or rounded as above, which is ``attnserve optimize --int4``

The cosine and R^2 (one minus the squared error over the squared distance from the mean) compare the
normalized embeddings of unseen sentences, one at a time, with those of the float32 model. The batch
difference is the largest change of an element if a sentence runs in a batch of 16 instead of alone,
at equal padded length. The speed-up over the float32 model is measured on one thread in interleaved
rounds, as the median of the ratios of one round.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from rich.console import Console

from attnserve.context import ONE_THREAD
from attnserve.data.datasets import load_inputs
from attnserve.fusion import fuse, fusion_passes
from attnserve.models.artifact import open_artifact
from attnserve.models.example_inputs import example_inputs
from attnserve.models.masks import vector_mask
from attnserve.models.onnx_files import load_model
from attnserve.models.quantized import Bits
from attnserve.precision.int4 import quantize_to_int4
from attnserve.precision.int8 import quantize
from attnserve.precision.products import InputMoments, Range, collect_ranges
from attnserve.runtime.interface import Batch
from attnserve.runtime.interleaved_timer import BENCHMARK, time_functions
from attnserve.runtime.observer import observe
from attnserve.runtime.session import open_session
from benchmarks._common import (
    Study,
    encoder_study,
    number_table,
    shortened,
    sts_parser,
    sts_score,
    write_result,
)
from graph_passes.analysis.constants import constant_shape, is_constant
from graph_passes.analysis.workload import Workload

BLOCKS = (16, 32, 64, 128)
"""Block sizes of MatMulNBits."""

LENGTHS = (16, 128, 512)
SECONDS = 30.0
"""Approximate time of the measurements at each length."""

PERCENTILE = 99.99
REFERENCE = "float32"


def main() -> None:
    options = sts_parser(__doc__).parse_args()
    with encoder_study(options.train, options.dev, options.rows) as study:
        models = build(study)
        rows = [
            {"name": name, "bytes": path.stat().st_size, **quality(study, models[REFERENCE], path)}
            for name, path in models.items()
        ]
        for length in LENGTHS:
            for row, speedup in zip(rows, speedups(models, length, options.rounds), strict=True):
                row[f"speedup_{length}"] = speedup
    table = number_table("int8", list(rows[0])[1:])
    for row in rows:
        table.add_row(*[f"{v:.4g}" if isinstance(v, float) else str(v) for v in row.values()])
    Console().print(table)
    packages = ("onnxruntime", "onnx", "onnx-ir", "numpy")
    write_result(
        "int8", options, schemes=rows, threads=1,
        versions={name: version(name) for name in packages},
    )  # fmt: skip


def build(study: Study) -> dict[str, Path]:
    """The file of each scheme, in a folder with the tokenizer."""
    artifact = open_artifact(study.original)
    original = load_model(artifact)
    batches = load_inputs(study.calibration, original, artifact, split=False).fit
    fused = original.clone()
    fuse(fused, fusion_passes(fused))
    for index, node in enumerate(fused.graph):  # the tools identify nodes by name
        node.name = f"{node.op_type}_{index}"
    reference = saved(study, REFERENCE, fused)
    clip = partial(clipped, batches=batches)
    moments = InputMoments(fused, batches)
    models = {REFERENCE: reference}
    for bits in (7, 8):
        forms: dict[str, Callable[[], ir.Model]] = {
            "dynamic": partial(dynamic, reference, reduce_range=bits == 7),
            "static": partial(static, fused, bits, batches, smooth=False, correct=False),
            "static, clipped": partial(
                static, fused, bits, batches, clip, smooth=False, correct=False
            ),
            "static, smoothed": partial(static, fused, bits, batches, correct=False),
            "static, smoothed, corrected": partial(static, fused, bits, batches),
            "static, smoothed, corrected, rounded": partial(
                static, fused, bits, batches, moments=moments
            ),
            "per row": partial(static, fused, bits, ()),
        }
        for name, make in forms.items():
            models[f"{name}, {bits} bits"] = saved(study, f"{name}, {bits} bits", make())
    for size in BLOCKS:
        name = f"MatMulNBits, blocks of {size}, 8 bits"
        models[name] = saved(study, name, in_blocks(reference, size))
    for name, known in (("nearest", None), ("rounded", moments)):
        model = fused.clone()
        quantize_to_int4(model, known)
        name = f"MatMulNBits, {name}, 4 bits"
        models[name] = saved(study, name, model)
    return models


def saved(study: Study, name: str, model: ir.Model) -> Path:
    folder = study.folder / name.replace(" ", "-").replace(",", "")
    shutil.copytree(study.original, folder)
    ir.save(model, folder / "model.onnx")
    return folder / "model.onnx"


def dynamic(path: Path, *, reduce_range: bool) -> ir.Model:
    from onnxruntime.quantization import QuantType, quantize_dynamic

    model = ir.load(path)
    small = [n.name for n in model.graph if n.op_type == "Gather" and not is_word_table(n)]
    target = path.parent / "dynamic.onnx"
    quantize_dynamic(
        path, target, op_types_to_quantize=["MatMul", "Gather"], per_channel=True,
        reduce_range=reduce_range, weight_type=QuantType.QInt8, nodes_to_exclude=small,
        extra_options={"WeightSymmetric": True, "MatMulConstBOnly": True},
    )  # fmt: skip
    return ir.load(target)


def is_word_table(node: ir.Node) -> bool:
    table = node.inputs[0]
    return table is not None and is_constant(table) and constant_shape(table)[0] > 1000


def static(
    fused: ir.Model,
    bits: Bits,
    batches: Sequence[Batch],
    change: Callable[[ir.Model, Any], Any] = lambda _, ranges: ranges,
    **options: Any,
) -> ir.Model:
    model = fused.clone()
    quantize(model, bits, change(model, collect_ranges(model, batches)), **options)
    return model


def clipped(
    model: ir.Model, ranges: dict[str, Range], batches: Sequence[Batch]
) -> dict[str, Range]:
    """Ranges within a percentile of the absolute values of each activation."""
    read = [v for node in model.graph for v in node.outputs if v.name in ranges]
    values: dict[str, list[np.ndarray]] = {name: [] for name in ranges}
    for batch, [arrays] in observe(model, [read], batches[::4]):
        for value, array in zip(read, arrays, strict=True):
            values[value.name or ""].append(
                np.abs(array[vector_mask(array.shape, batch)]).reshape(-1)
            )
    limits = {n: np.percentile(np.concatenate(arrays), PERCENTILE) for n, arrays in values.items()}
    return {
        name: replace(
            range_,
            low=np.maximum(range_.low, -limits[name]),
            high=np.minimum(range_.high, limits[name]),
        )
        for name, range_ in ranges.items()
    }


def in_blocks(path: Path, size: int) -> ir.Model:
    from onnxruntime.quantization.matmul_nbits_quantizer import (
        DefaultWeightOnlyQuantConfig,
        MatMulNBitsQuantizer,
    )

    config = DefaultWeightOnlyQuantConfig(
        block_size=size, is_symmetric=True, accuracy_level=4, bits=8
    )
    quantizer: Any = MatMulNBitsQuantizer(onnx.load(path), algo_config=config)
    quantizer.process()
    return ir.from_proto(quantizer.model.model)


def quality(study: Study, reference: Path, path: Path) -> dict[str, float]:
    artifact = open_artifact(study.original)
    data = load_inputs(study.unseen, load_model(artifact), artifact, split=False)
    pair = [open_session(file, ONE_THREAD) for file in (reference, path)]
    alone = [np.concatenate([embed_rows(s, b, pad=False) for b in data.fit]) for s in pair]
    difference = max(
        np.abs(embed(pair[1], batch) - embed_rows(pair[1], batch, pad=True)).max()
        for batch in data.fit[:8]
    )
    expected, found = alone
    spread = np.square(expected - expected.mean(axis=0)).sum()
    return {
        "cosine": float((expected * found).sum(axis=1).mean()),
        "r2": float(1 - np.square(expected - found).sum() / spread),
        "spearman": sts_score(path, study.pairs),
        "batch_difference": float(difference),
    }


def embed(session: Any, batch: Batch) -> np.ndarray:  # B D
    """Normalized means over the tokens."""
    mask = batch["attention_mask"].astype(float)[..., None]
    sums = (session.run(None, batch)[0] * mask).sum(axis=1)
    return sums / np.linalg.norm(sums, axis=1, keepdims=True)


def embed_rows(session: Any, batch: Batch, *, pad: bool) -> np.ndarray:  # B D
    """The embeddings of texts that run alone, with or without padding."""
    lengths = batch["attention_mask"].sum(axis=1)
    return np.concatenate([
        embed(session, {n: a[row : row + 1, : None if pad else length] for n, a in batch.items()})
        for row, length in enumerate(lengths)
    ])  # fmt: skip


def speedups(models: dict[str, Path], length: int, rounds: int | None) -> list[float]:
    feed = example_inputs(ir.load(models[REFERENCE]), Workload.of(1, length))
    sessions = [open_session(path, ONE_THREAD) for path in models.values()]
    timer = BENCHMARK if rounds is None else replace(BENCHMARK, min_rounds=rounds)
    functions = [partial(session.run, None, feed) for session in sessions]
    times = time_functions(functions, shortened(SECONDS), timer)
    return [float(ratio) for ratio in np.median(times[0] / times, axis=1)]


if __name__ == "__main__":
    main()
