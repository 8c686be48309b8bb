"""Measurements on an NVIDIA GPU: parity, kernels, latency, memory, CUDA graphs and the service.

    python -m benchmarks.cuda                                  everything, in less than 8 minutes
    python -m benchmarks.cuda ORIGINAL.onnx OPTIMIZED.onnx [--batch 1 --seq 128]    one pair
    python -m benchmarks.cuda --collab-dk 128 256              shared queries and keys, end to end

Parity is measured first, in float32 without TF32: graphs of the same function must agree. Then
encoders of the sizes of MiniLM, BERT-base and BERT-large are measured at several shapes (texts x
tokens) in the forms of benchmarks/gpu/forms.py. Their weights are random, and half of them can be
pruned. Cells without enough time are "not measured" in the result file,
benchmarks/results/cuda-<card>.json. ``--collab-dk`` measures the forms of
benchmarks/gpu/collab_dk.py alone and writes collab-dk-<card>.json. Without a GPU, cuda.json states
the reason, and the exit code is 0. The exit code is 1 if parity fails.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import accumulate, product
from pathlib import Path
from time import perf_counter
from typing import Any

import onnx_ir as ir

from attnserve import bench, verify
from attnserve.checks.benchmark import describe_machine
from attnserve.context import Device, Provider
from attnserve.literals import Precision
from attnserve.models.artifact import open_artifact
from attnserve.models.onnx_files import load_model, save_model
from attnserve.runtime.machine import product_flags
from attnserve.runtime.session import require_cuda
from benchmarks._common import RESULTS, description, write_json
from benchmarks.gpu import collab_dk
from benchmarks.gpu.collaborative_operators import expressions
from benchmarks.gpu.encoder import random_encoder, to_half
from benchmarks.gpu.forms import ORIGINAL, OURS, SIZES, THEIRS, Size, collaborative
from benchmarks.gpu.measure import (
    BUDGET,
    Shape,
    Sized,
    build,
    compiled,
    kernels,
    matrix_ceiling,
    measure,
)
from benchmarks.gpu.short_text import captured, served
from graph_passes.errors import AttnserveError, Refusal
from graph_passes.matching.find import find_attention
from graph_passes.passes.fuse_attention import FuseAttention

PARITY = 1e-3
"""Largest difference of graphs of the same function, in float32."""
SECONDS = 440.0
COLLAB_DK_SECONDS = 1500.0
"""Half of it is for factorizing, converting and fusing."""
SHARES = {"BERT-base": 0.45, "MiniLM": 0.15, "BERT-large": 0.3}
"""Shares of the seconds of all sizes; a tenth of the time is for one short text."""
COMPILING_S = 300.0
"""The least time limit with which PyTorch compiles, which takes half a minute for each size."""
SHAPES: Sequence[Shape] = (
    (32, 128), (32, 512), (1, 32), (1, 128), (8, 128),
    *(s for s in product((1, 8, 32, 128), (32, 128, 512))
      if s not in {(32, 128), (32, 512), (1, 32), (1, 128), (8, 128)}),
)  # fmt: skip
"""Texts and tokens per text, the most important first."""
SHORT = (1, 32)
COLLAB_DK_SIZES = ("BERT-base", "MiniLM")
TINY = {"tiny": Size(2, 64, 4)}
TINY_SHAPES: Sequence[Shape] = ((1, 8), (2, 8), (2, 32))
TORCH = "torch.compile, SDPA, fp16"
CONDITIONS = (
    "random weights of which half can be pruned; synchronous runs on device memory in interleaved"
    " rounds; float32 with TF32; peaks and shares from ONNX Runtime's profile, in separate"
    " sessions; a peak includes all shapes of fewer tokens"
)


def compare(
    original: Path, optimized: Path, *, batch: int, sequence: int, provider: Provider = "cuda"
) -> dict[str, Any]:
    """Measure parity and latency of one pair."""
    report = bench(
        [original, optimized], batches=(batch,), sequences=(sequence,), provider=provider
    )
    return {
        "parity": verify(original, optimized, provider=provider).to_json(),
        "results": report.to_json()["results"],
    }


def parity(provider: Provider, folder: Path, size: Size, positions: int) -> dict[str, float]:
    """Return the largest difference of each rewritten graph, in float32 without TF32."""
    original = random_encoder(
        layers=size.layers, hidden=size.hidden, heads=size.heads, positions=positions
    )
    fused = original.clone(deep_copy=True)
    FuseAttention({block.name: "multi_head" for block in find_attention(fused).blocks})(fused)
    save_model(original, folder / "original.onnx")
    errors: dict[str, float] = {}
    for name, model in {"collaborative": collaborative(original), "fused": fused}.items():
        save_model(model, folder / f"{name}.onnx")
        report = verify(folder / "original.onnx", folder / f"{name}.onnx", provider=provider)
        errors[name] = max(output.max_abs_error for output in report.outputs)
    return errors


def everything(
    provider: Provider,
    sizes: Mapping[str, Size],
    shapes: Sequence[Shape],
    seconds: float,
    *,
    matrix: int = 8192,
    ranks: Sequence[int] = (128, 256),
    requests: int = 300,
) -> dict[str, Any]:
    """Measure everything and return the content of the result file.

    Args:
        seconds: Time limit.
        matrix: Rows and columns of the matrix product that gives the ceiling.
        ranks: R of the compared expressions of collaborative attention.
        requests: Requests to the service.
    """
    begin = perf_counter()
    positions = max(tokens for _, tokens in shapes)
    content: dict[str, Any] = {
        "measured": True,
        "machine": asdict(describe_machine(Device(provider, 1))),
        "conditions": CONDITIONS,
    }
    with tempfile.TemporaryDirectory(prefix="attnserve-") as name:
        folder = Path(name)
        content["parity"] = _result_or_reason(
            lambda: parity(provider, folder, Size(4, *_widths(sizes)), positions)
        )
        _log("parity", content["parity"])
        ceiling = matrix_ceiling(provider, matrix, min(2.0, seconds / 50))
        content["matrix_tflops"] = ceiling
        _log("TFLOP/s of a matrix product", ceiling)
        content["collaborative_attention"] = _result_or_reason(
            lambda: expressions(provider, shapes[:3], ranks, min(8.0, seconds / 40))
        )
        _log("collaborative attention", content["collaborative_attention"])
        content["sizes"] = {}
        short: Sized | None = None
        deadlines = _deadlines(sizes)
        for label, size in sizes.items():
            deadline = begin + seconds * deadlines[label]
            place = folder / label
            place.mkdir()
            done = build(size, shapes, place, (perf_counter() + deadline) / 2)
            torch = (
                _result_or_reason(lambda size=size: compiled(size, positions))
                if seconds >= COMPILING_S
                else BUDGET
            )
            if isinstance(torch, str):
                done.not_built[TORCH] = torch
            more = {} if isinstance(torch, str) else {TORCH: torch}
            if done.forms:
                measure(done, shapes, provider, deadline, more, ceiling["fp16"])
            content["sizes"][label] = asdict(size) | done.to_json()
            _print(label, done)
            if label in ("MiniLM", *TINY):
                short = done
                content["attention_kernels"] = _result_or_reason(
                    lambda done=done: _kernels(done, shapes[0], provider, seconds / 8)
                )
        form = next((f for f in short.forms if f.name == "fused fp16"), None) if short else None
        if form is None:
            content["cuda_graphs"] = content["service"] = "not measured: the fused graph is missing"
        else:
            left = max(1.0, (begin + seconds - perf_counter()) / 4)
            content["cuda_graphs"] = _result_or_reason(
                lambda: captured(form, SHORT, provider, min(left, 5.0))
            )
            content["service"] = _result_or_reason(lambda: served(form, SHORT, provider, requests))
    content["bounds"] = bounds(content)
    content["seconds"] = round(perf_counter() - begin, 1)
    return content


def shared_dimensions(
    provider: Provider,
    sizes: Mapping[str, Size],
    shapes: Sequence[Shape],
    ranks: Sequence[int],
    seconds: float,
    precisions: Sequence[Precision] = collab_dk.PRECISIONS,
) -> dict[str, Any]:
    """Measure the forms of ``collab_dk`` end to end and return the content of the result file.

    Args:
        seconds: Time limit; half of the time of a size is for building its forms.
    """
    begin = perf_counter()
    content: dict[str, Any] = {
        "measured": True,
        "machine": asdict(describe_machine(Device(provider, 1))),
        "conditions": CONDITIONS,
        "R": list(ranks),
        "sizes": {},
    }
    deadlines = _deadlines(sizes)
    for label, size in sizes.items():
        deadline = begin + seconds * deadlines[label]
        half = (perf_counter() + deadline) / 2
        with tempfile.TemporaryDirectory(prefix="attnserve-") as name:
            done = collab_dk.build(size, ranks, shapes, Path(name), provider, half, precisions)
            measure(done, shapes, provider, deadline)
        content["sizes"][label] = asdict(size) | done.to_json()
        _print(label, done)
    content["seconds"] = round(perf_counter() - begin, 1)
    return content


def _deadlines(sizes: Mapping[str, Size]) -> dict[str, float]:
    """The time at which each size must end, as a share of all seconds."""
    total = sum(SHARES.get(label, 1.0) for label in sizes)
    ends = accumulate(SHARES.get(label, 1.0) for label in sizes)
    return {label: 0.9 * end / total for label, end in zip(sizes, ends, strict=True)}


def bounds(content: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the goals, the measured values and whether they hold; None if not measured."""
    results: list[dict[str, Any]] = []

    def note(what: str, least: float | None, most: float | None, value: float | None) -> None:
        holds = None
        if value is not None:
            holds = (least is None or value >= least) and (most is None or value <= most)
        results.append({"what": what, "at_least": least, "at_most": most, "value": value,
                      "holds": holds})  # fmt: skip

    base = content["sizes"].get("BERT-base")
    speed = {} if base is None else _speedups(base)
    for shape, least in (((32, 128), 1.15), ((32, 512), 1.3)):
        what = f"BERT-base {shape[0]} x {shape[1]}: our best to ONNX Runtime's best, cosine >= 0.98"
        note(what, least, None, speed.get(shape))
    every = [s for size in content["sizes"].values() for s in _speedups(size).values()]
    note("the same at every shape of every size", 0.97, None, min(every, default=None))
    memory = [m for size in content["sizes"].values() for m in _memory(size)]
    note("peak memory of our best to the original's in fp16, every shape", None, 1.0,
         max(memory, default=None))  # fmt: skip
    graphs, service = content["cuda_graphs"], content["service"]
    note("MiniLM 1 x 32: milliseconds with CUDA graphs", None, 0.35,
         graphs["captured_p50_ms"] if isinstance(graphs, dict) else None)  # fmt: skip
    note("milliseconds that the service adds", None, 1.0,
         service["overhead_p50_ms"] if isinstance(service, dict) else None)  # fmt: skip
    return results


def _by_shape(size: Mapping[str, Any], key: str) -> dict[Shape, dict[str, float]]:
    """Return one value of the cells, by shape and form."""
    rows: dict[Shape, dict[str, float]] = {}
    for cell in size["cells"]:
        if cell.get(key) is not None:
            rows.setdefault((cell["batch"], cell["sequence"]), {})[cell["form"]] = cell[key]
    return rows


def _faithful(size: Mapping[str, Any]) -> list[str]:
    return [name for name in OURS if size["min_cosine"].get(name, 0) >= 0.98]


def _speedups(size: Mapping[str, Any]) -> dict[Shape, float]:
    """Return the speed-up of the best form (cosine of at least 0.98) over the best other tool."""
    speedups: dict[Shape, float] = {}
    for shape, times in _by_shape(size, "p50_ms").items():
        theirs = [times[name] for name in THEIRS if name in times]
        ours = [times[name] for name in _faithful(size) if name in times]
        if theirs and ours:
            speedups[shape] = round(min(theirs) / min(ours), 4)
    return speedups


def _memory(size: Mapping[str, Any]) -> list[float]:
    """Return the peak memory of the fastest attnserve form over the fp16 original, by shape."""
    peaks, times = _by_shape(size, "peak_bytes"), _by_shape(size, "p50_ms")
    ratios: list[float] = []
    for shape, of_forms in peaks.items():
        ours = [
            name for name in _faithful(size) if name in of_forms and name in times.get(shape, {})
        ]
        if ours and THEIRS[0] in of_forms:
            best = min(ours, key=lambda name: times[shape][name])
            ratios.append(round(of_forms[best] / of_forms[THEIRS[0]], 4))
    return ratios


def _kernels(done: Sized, shape: Shape, provider: Provider, seconds: float) -> dict[str, Any]:
    """Count the attention operators of each form by kernel."""
    counts: dict[str, Any] = {}
    forms = [form for form in done.forms if form.name != ORIGINAL]
    for form, used in kernels(forms, shape, provider, seconds).items():
        names = [f"{kernel.operator} {kernel.dtype} {kernel.kernel}" for kernel in used]
        counts[form] = {name: names.count(name) for name in dict.fromkeys(names)}
    return counts


def _result_or_reason(work: Any) -> Any:
    """Return the result of ``work``, or one line with the reason of its failure."""
    try:
        return work()
    except Exception as error:  # a failed part does not stop the others
        first = str(error).strip().partition("\n")[0]
        return f"not measured: {type(error).__name__}: {first[:200]}"


def _widths(sizes: Mapping[str, Size]) -> tuple[int, int]:
    first = next(iter(sizes.values()))
    return first.hidden, first.heads


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=description(__doc__))
    parser.add_argument("models", nargs="*", type=Path, help="ORIGINAL OPTIMIZED")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--min-cosine", type=float, default=0.9, help="minimum cosine of a pair")
    parser.add_argument("--seconds", type=float, default=None, help="time limit")
    parser.add_argument("--collab-dk", nargs="+", type=int, metavar="R", default=[],
                        help="measure shared queries and keys alone, at these R")  # fmt: skip
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the result file")
    # To test this program without a GPU.
    parser.add_argument("--tiny-on-cpu", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if len(options.models) not in (0, 2):
        parser.error("give two models, ORIGINAL and OPTIMIZED, or none")
    provider: Provider = "cpu" if options.tiny_on_cpu else "cuda"
    if provider == "cuda" and (refusal := Refusal.of(require_cuda)):
        why = refusal.reason
        print(f"benchmarks/cuda.py: nothing measured: {why}")
        if not options.models and not options.collab_dk:
            nothing = {"sizes": {}, "cuda_graphs": why, "service": why}
            content = {"measured": False, "why": why, "bounds": bounds(nothing)}
            write_json(options.results / "cuda.json", content)
        return 0
    if options.models:
        return _pair(options, provider)
    given = sys.argv[1:] if arguments is None else arguments
    command = {
        "command": " ".join(["python -m benchmarks.cuda", *given]),
        "cpu_flags": product_flags(),
    }
    seconds = SECONDS if options.seconds is None else options.seconds
    if options.collab_dk:
        tiny = options.tiny_on_cpu
        sizes = {name: SIZES[name] for name in options.sizes if name in COLLAB_DK_SIZES}
        content = shared_dimensions(
            provider, TINY if tiny else sizes, TINY_SHAPES[:2] if tiny else SHAPES,
            options.collab_dk, options.seconds or COLLAB_DK_SECONDS,
        )  # fmt: skip
        path = options.results / f"collab-dk-{_card(content, provider)}.json"
        write_json(path, content | command)
        return 0
    content = (
        everything(provider, TINY, TINY_SHAPES, seconds, matrix=64, ranks=(16,), requests=20)
        if options.tiny_on_cpu
        else everything(provider, {name: SIZES[name] for name in options.sizes}, SHAPES, seconds)
    )
    content |= command
    write_json(options.results / f"cuda-{_card(content, provider)}.json", content)
    for bound in content["bounds"]:
        print(f"{'not measured' if bound['holds'] is None else bound['holds']}: {bound['what']}: "
              f"{bound['value']}")  # fmt: skip
    errors = content["parity"]
    return 0 if isinstance(errors, dict) and max(errors.values()) <= PARITY else 1


def _card(content: Mapping[str, Any], provider: Provider) -> str:
    return slug((content["machine"]["gpu"] if provider == "cuda" else "tiny on cpu") or "unknown")


def slug(card: str) -> str:
    """Return the name of the first card for a file name: "NVIDIA L40S, ..." -> "l40s"."""
    words = re.findall(r"[a-z0-9]+", card.partition(",")[0].lower())
    return "-".join(word for word in words if word != "nvidia") or "unknown"


def _pair(options: argparse.Namespace, provider: Provider) -> int:
    """Measure two models in float32 and in float16."""
    precisions: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="attnserve-") as folder:
        for precision in ("fp32", "fp16"):
            paths = [Path(folder) / f"{n}-{precision}.onnx" for n in ("original", "optimized")]
            for path, source in zip(paths, options.models, strict=True):
                model: ir.Model = load_model(open_artifact(source))
                if precision == "fp16":
                    to_half(model)
                save_model(model, path)
            result = compare(*paths, batch=options.batch, sequence=options.seq, provider=provider)
            precisions[precision] = result
            _print_pair(precision, result)
    content = {"machine": asdict(describe_machine(Device(provider, 1))), "precisions": precisions}
    write_json(options.results / "cuda-pair.json", content)
    least = min(result["parity"]["min_cosine"] for result in precisions.values())
    return 0 if least >= options.min_cosine else 1


def _log(what: str, value: Any) -> None:
    print(f"{what}: {value}", file=sys.stderr)


def _print(label: str, done: Sized) -> None:
    for name, why in done.not_built.items():
        _log(f"{label}, {name}: not measured", why)
    for cell in done.cells:
        at = f"{label} {cell['batch']} x {cell['sequence']}, {cell['form']}"
        _log(at, cell.get("not_measured") or f"{cell['p50_ms']:.3f} ms")


def _print_pair(precision: str, result: dict[str, Any]) -> None:
    original, optimized = result["results"]
    low, high = optimized["speedup_ci95"]
    worst = max(output["max_abs_error"] for output in result["parity"]["outputs"])
    print(
        f"{precision}: {original['p50_ms']:.3f} -> {optimized['p50_ms']:.3f} ms, "
        f"speed-up {optimized['speedup_vs_first']:.3f} [{low:.3f}, {high:.3f}], "
        f"minimum cosine {result['parity']['min_cosine']:.6f}, largest error {worst:.2e}"
    )


if __name__ == "__main__":
    try:
        sys.exit(main())
    except AttnserveError as error:
        sys.exit(f"error: {error}")
