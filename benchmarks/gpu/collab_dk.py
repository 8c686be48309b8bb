"""Encoders with shared queries and keys (``optimize(collab_dk=R)``), end to end as they are served.

For each R: dense mixing (the paper's three products), sparse mixing, and truncated dimensions of
each head alone, as many as sparse mixing reads. All forms and the original are measured in float32
and float16, as the service would run them, and those in a fused operator with a mask by key too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import onnx_ir as ir

import attnserve
from attnserve.context import Device, Provider
from attnserve.literals import Precision
from attnserve.models.artifact import open_artifact
from attnserve.models.onnx_files import load_model, save_model
from attnserve.planning.served_graph.lossless import fuse_lossless
from benchmarks.gpu.forms import ORIGINAL, Size
from benchmarks.gpu.measure import BUDGET, Form, Shape, Sized, why
from graph_passes.analysis.cost import count_macs
from graph_passes.analysis.workload import Workload
from graph_passes.emit.editing import Inserter
from graph_passes.errors import CannotRewrite
from graph_passes.matching.find import find_attention

__all__ = ["FUSED", "PRECISIONS", "build", "requests", "served_form", "with_key_mask"]

FUSED = "original"
PRECISIONS: Sequence[Precision] = ("float32", "float16")
KEY_MASKS = {"Attention": 3, "MultiHeadAttention": 4}
"""The input of a com.microsoft operator that masks keys, (B, T); input 5 is its bias."""
BIAS = 5


def build(
    size: Size,
    ranks: Sequence[int],
    shapes: Sequence[Shape],
    folder: Path,
    provider: Provider,
    deadline: float,
    precisions: Sequence[Precision] = PRECISIONS,
) -> Sized:
    """Build every form of a size; record the reason for those that fail or have no time."""
    done = Sized()
    source = folder / "source.onnx"
    model = size.build(max(tokens for _, tokens in shapes))
    save_model(model, source)
    _add(done, ORIGINAL, source, model, shapes)
    rewritten: dict[str, Path] = {FUSED: source}
    for rank in ranks:
        for name, arguments in requests(rank, rewritten):
            path = folder / f"{name}.onnx"
            if perf_counter() > deadline:
                done.not_built[name] = BUDGET
                continue
            try:
                attnserve.optimize(source, path, provider=provider, **arguments)
                rewritten[name] = path
            except Exception as error:  # a form that fails does not stop the others
                done.not_built[name] = why(error)
    for (name, path), precision in product(rewritten.items(), precisions):
        served = f"{name} {precision}"
        if perf_counter() > deadline:
            done.not_built[served] = BUDGET
            continue
        try:
            _add_served(done, served, path, shapes, provider, precision)
        except Exception as error:
            done.not_built[served] = why(error)
    return done


def requests(rank: int, rewritten: Mapping[str, Path]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The forms of one R, and the arguments of ``optimize`` for each."""
    sparse = f"sparse {rank}"
    yield f"dense {rank}", {"collab_dk": rank, "mixing": "dense"}
    yield sparse, {"collab_dk": rank, "mixing": "sparse"}
    if sparse in rewritten:
        yield f"own {rank}", {"head_dk": _dimensions(rewritten[sparse])}


def _dimensions(sparse: Path) -> int:
    """The mean number of dimensions that a head reads, without the one of the content term."""
    read: list[int] = []
    for block in find_attention(load_model(open_artifact(sparse))).blocks:
        used = np.any(block.q.matrix(), axis=0)  # the columns of the content term are zero
        read += ((block.q.gain != 0) & used[block.q.columns]).sum(1).tolist()
    return max(1, round(np.mean(read)))


def _add_served(
    done: Sized,
    name: str,
    source: Path,
    shapes: Sequence[Shape],
    provider: Provider,
    precision: Precision,
) -> None:
    """Add a form as it is served, and with a mask by key if its operators have one."""
    if precision != "float32":
        converted = source.with_name(f"{source.stem}-{precision}.onnx")
        attnserve.optimize(source, converted, precision=precision, provider=provider)
        source = converted
    path = served_form(source, source.with_name(f"{source.stem}-{precision}-served.onnx"), provider)
    model = load_model(open_artifact(path))
    _add(done, name, path, model, shapes)
    if with_key_mask(model):
        masked = path.with_name(f"{path.stem}-key-mask.onnx")
        save_model(model, masked)
        _add(done, f"{name}, key mask", masked, model, shapes)


def served_form(source: Path, target: Path, provider: Provider = "cpu") -> Path:
    """The file that the service runs: the fused form if it is faster, else the model as it is."""
    try:
        fuse_lossless(open_artifact(source), target, Device(provider))
    except CannotRewrite:
        return source
    return target


def with_key_mask(model: ir.Model, mask: str = "attention_mask") -> bool:
    """Let fused operators mask keys by an input (B, T) instead of a bias; whether any can."""
    nodes = [
        node
        for node in model.graph
        if node.domain == "com.microsoft"
        and node.op_type in KEY_MASKS
        and len(node.inputs) > BIAS
        and node.inputs[BIAS] is not None
    ]
    if not nodes:
        return False
    given = next(value for value in model.graph.inputs if value.name == mask)
    make = Inserter(model.graph, model.graph[0], "key_mask")
    keys = make.op("Cast", [given], "keys", dtype=ir.DataType.INT32, to=ir.DataType.INT32.value)
    for node in nodes:
        node.replace_input_with(BIAS, None)
        node.replace_input_with(KEY_MASKS[node.op_type], keys)
    return True


def _add(done: Sized, name: str, path: Path, model: ir.Model, shapes: Sequence[Shape]) -> None:
    done.forms.append(
        Form(name, path, {shape: count_macs(model, Workload.of(*shape)) for shape in shapes})
    )
