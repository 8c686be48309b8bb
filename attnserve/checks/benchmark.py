"""Benchmark the latency and memory of several models.

Each model has its own process, so that its peak memory can be measured; one process runs at a time.
Rounds are interleaved (``interleaved_timer``). The speed-up is the median over rounds of first /
model, so that drift cancels; its interval is a bootstrap of the median.

Decoders with a cache are measured in three ways: on as many new tokens as cached tokens; and, as
in text generation, on a prompt without a cache and on one token after a prompt.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from attnserve.context import ONE_THREAD, Device, Progress, Provider, ignore_progress
from attnserve.models.artifact import Artifact, open_artifact
from attnserve.models.example_inputs import example_inputs
from attnserve.models.masks import is_mask
from attnserve.models.onnx_files import load_model
from attnserve.models.rows import with_fixed_sizes
from attnserve.options import Run, Timing
from attnserve.precision.convert import precision_of
from attnserve.runtime.inference_precision import computes_in_bfloat16, precision_in
from attnserve.runtime.interface import Batch, RunFailed
from attnserve.runtime.interleaved_timer import BENCHMARK, Sampler, sampler
from attnserve.runtime.isolation import Worker, WorkerCrashed
from attnserve.runtime.machine import available_cores, cpu_name, gpu_name
from attnserve.runtime.memory_use import peak_bytes
from attnserve.runtime.session import RUNTIMES, open_session, runtime_of
from attnserve.runtime.times import Speedup, paired_speedup
from attnserve.versions import package_versions
from graph_passes.analysis.axes import has_cache
from graph_passes.analysis.cost import model_cost
from graph_passes.analysis.workload import Phase, Workload
from graph_passes.errors import InvalidArgument, InvalidModel

__all__ = ["BenchReport", "Decoding", "Machine", "Measurement", "bench", "describe_machine"]

SHAPE_SECONDS = 8.0
"""Approximate time to measure one shape if the number of rounds is not given."""

DECODING: tuple[Phase, ...] = ("prompt", "token")
"""Further phases that are measured for decoders with a cache."""


@dataclass(frozen=True)
class Decoding:
    """Times of a decoder with a cache; None for runs that the model does not support.

    Attributes:
        first_token_ms: Median time of a prompt of ``sequence`` tokens without a cache.
        per_token_ms: Median time of one token after ``sequence`` cached tokens.
        cache_bytes_per_token: Bytes that a token adds to the cache of its row.
    """

    first_token_ms: float | None
    per_token_ms: float | None
    cache_bytes_per_token: int


@dataclass(frozen=True)
class Measurement:
    """Samples of one model at one shape, and their statistics.

    Attributes:
        model: The path as given.
        batch: Rows.
        sequence: Tokens per row.
        samples_ms: Milliseconds per run, one sample per round.
        first_ms: Samples of the first model in the same rounds.
        macs: Multiply-accumulates of one run; None if they cannot be counted.
        peak_rss_bytes: Peak resident memory of the model's process up to this shape: interpreter,
            ONNX Runtime, session and all shapes measured so far.
        seed: The seed of the bootstrap.
        peak_gpu_bytes: Peak memory of the GPU arena during a run of this shape, in a separate
            session and without weights outside the arena; None on the CPU and if ONNX Runtime does
            not report it.
        decoding: None for a model without a cache.
        runtime: The name of the runtime.
        precision: The data types in which the model computes.
    """

    model: str
    batch: int
    sequence: int
    samples_ms: tuple[float, ...]
    first_ms: tuple[float, ...]
    macs: int | None
    peak_rss_bytes: int
    seed: int = 0
    peak_gpu_bytes: int | None = None
    decoding: Decoding | None = None
    runtime: str = "onnxruntime"
    precision: str = "float32"

    def percentile_ms(self, percent: float) -> float:
        """A percentile of the samples in milliseconds."""
        return float(np.percentile(self.samples_ms, percent))

    @property
    def p50_ms(self) -> float:
        return self.percentile_ms(50)

    @property
    def p90_ms(self) -> float:
        return self.percentile_ms(90)

    @property
    def p99_ms(self) -> float:
        return self.percentile_ms(99)

    @cached_property
    def speedup(self) -> Speedup:
        """The speed-up over the first model."""
        return paired_speedup(
            [np.array(self.first_ms)], [np.array(self.samples_ms)], seed=self.seed
        )

    @property
    def speedup_vs_first(self) -> float:
        return self.speedup.value

    @property
    def speedup_ci95(self) -> tuple[float, float]:
        return self.speedup.low, self.speedup.high

    @property
    def gmacs_per_second(self) -> float | None:
        """1e9 multiply-accumulates per second at the median time."""
        return None if self.macs is None else self.macs / self.p50_ms / 1e6

    def to_json(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "batch": self.batch,
            "sequence": self.sequence,
            "p50_ms": self.p50_ms,
            "p90_ms": self.p90_ms,
            "p99_ms": self.p99_ms,
            "speedup_vs_first": self.speedup_vs_first,
            "speedup_ci95": list(self.speedup_ci95),
            "macs": self.macs,
            "peak_rss_bytes": self.peak_rss_bytes,
            "runtime": self.runtime,
            "precision": self.precision,
            **({} if self.peak_gpu_bytes is None else {"peak_gpu_bytes": self.peak_gpu_bytes}),
            **({} if self.decoding is None else asdict(self.decoding)),
        }


@dataclass(frozen=True)
class Machine:
    """The machine and versions of a measurement.

    ``cores`` is the number that this process may use; ``threads`` is 0 if the runtime chose.
    """

    cpu: str
    cores: int
    gpu: str | None
    provider: Provider
    runtime: str
    threads: int
    platform: str
    python: str
    numpy: str
    onnxruntime: str
    attnserve: str


@dataclass(frozen=True)
class BenchReport:
    """Results for each shape, models in the given order."""

    results: tuple[Measurement, ...]
    machine: Machine

    def to_json(self) -> dict[str, Any]:
        return {
            "results": [result.to_json() for result in self.results],
            "machine": asdict(self.machine),
        }


def bench(
    models: Sequence[Path | str],
    *,
    timing: Timing = Timing(),
    run: Run = Run(threads=1),
    progress: Progress | None = None,
) -> BenchReport:
    """Measure models in interleaved order, at every batch and sequence.

    On CUDA inputs and outputs stay on the device; copies from and to the host are not timed.
    float32 products do not use TF32.

    Args:
        models: .onnx files or artifact folders; speed-ups are relative to the first.
        timing: Shapes to measure at: batch sizes in rows, and lengths in tokens per row. Rounds are
            samples per model and shape; None for about ``SHAPE_SECONDS`` per shape, and as long
            again for decoders with a cache.
        run: Provider, without fallback, threads and seed; one thread by default.
        progress: Called with (stage, hundredths of a shape done, in total).

    Raises:
        InvalidArgument: A number is out of range, the provider is not available, or a model does
            not run at a shape.
        InvalidModel: A model cannot be read, or its process died.
        MissingExtra: ONNX Runtime is not installed.
    """
    if not models:
        raise InvalidArgument(
            "`models` is empty", "pass at least one value", code="benchmark.empty"
        )
    machine = describe_machine(run.device)
    workloads = [Workload.of(*shape) for shape in product(timing.batches, timing.sequences)]
    subjects = [_examine(model, workloads, run) for model in models]
    results: list[Measurement] = []
    phases = 3 if any(subject.cache_bytes for subject in subjects) else 1
    with ExitStack() as stack:
        children = [stack.enter_context(_child(subject)) for subject in subjects]
        for index, workload in enumerate(workloads):

            def advance(phase: int, done: int, in_total: int, index: int = index) -> None:
                step = 100 * (phases * index + phase) + 100 * done // in_total
                (progress or ignore_progress)("bench", step, 100 * phases * len(workloads))

            samplers = [child.feed(workload) for child in children]
            times_ms = BENCHMARK.time(
                samplers, SHAPE_SECONDS, rounds=timing.rounds, progress=partial(advance, 0)
            )
            samples = [tuple(row) for row in times_ms.tolist()]
            decodings = _measure_decoding(children, workload, timing.rounds, advance)
            results += [
                Measurement(
                    model=child.subject.model,
                    batch=child.subject.counted[workload].batch,
                    sequence=child.subject.counted[workload].length,
                    samples_ms=row,
                    first_ms=samples[0],
                    macs=child.subject.macs[workload],
                    peak_rss_bytes=child.peak_rss_bytes(),
                    seed=run.seed,
                    decoding=decoding,
                    runtime=child.subject.device.runtime_name,
                    precision=child.subject.precision,
                )
                for child, row, decoding in zip(children, samples, decodings, strict=True)
            ]
    if run.provider == "cuda":
        feeds = [
            (subject.artifact.model, subject.inputs[workload])
            for workload in workloads
            for subject in subjects
        ]
        results = [
            replace(
                result,
                peak_gpu_bytes=RUNTIMES[run.device.runtime_name].peak_bytes(*each, run.device),
            )
            for result, each in zip(results, feeds, strict=True)
        ]
    return BenchReport(tuple(results), machine)


def describe_machine(device: Device = ONE_THREAD) -> Machine:
    """Describe this machine and its versions.

    Raises:
        MissingExtra: ONNX Runtime is not installed.
    """
    return Machine(
        cpu=cpu_name(),
        cores=available_cores(),
        gpu=gpu_name(),
        provider=device.provider,
        runtime=device.runtime_name,
        threads=device.threads,
        platform=platform.platform(),
        python=platform.python_version(),
        numpy=np.__version__,
        onnxruntime=RUNTIMES["onnxruntime"].version(),
        attnserve=package_versions(["attnserve"]).get("attnserve", "not installed"),
    )


def _measure_decoding(
    children: Sequence[_Child],
    workload: Workload,
    rounds: int | None,
    advance: Callable[[int, int, int], None],
) -> list[Decoding | None]:
    """The times of each model; None without a cache."""
    medians_ms: dict[tuple[Phase, int], float] = {}
    for number, phase in enumerate(DECODING, start=1):
        step = Workload.of(workload.batch, workload.length, phase)
        samplers: dict[int, Sampler] = {}
        for index, child in enumerate(children):
            # Some graphs need a cache, or a cache of fixed length.
            with suppress(InvalidArgument):
                if step in child.subject.inputs:
                    sample = child.feed(step)
                    sample(1)
                    samplers[index] = sample
        if samplers:
            times = BENCHMARK.time(
                list(samplers.values()),
                SHAPE_SECONDS / 2,
                rounds=rounds,
                progress=partial(advance, number),
            )
            rows = zip(samplers, np.median(times, axis=1).tolist(), strict=True)
            medians_ms |= {(phase, index): median for index, median in rows}
    return [
        Decoding(medians_ms.get(("prompt", index)), medians_ms.get(("token", index)), size)
        if (size := child.subject.cache_bytes)
        else None
        for index, child in enumerate(children)
    ]


@dataclass(frozen=True)
class _Subject:
    """A model, and its inputs and MACs at each workload.

    ``cache_bytes`` is the cache size per token; 0 without a cache. ``counted`` maps the requested
    workloads to the workloads that run, with the fixed sizes of the model. ``device`` has the
    runtime of the model, and ``precision`` the data types in which it computes.
    """

    model: str
    artifact: Artifact
    device: Device
    precision: str
    inputs: dict[Workload, Batch]
    macs: dict[Workload, int | None]
    cache_bytes: int
    counted: dict[Workload, Workload]


def _examine(model: Path | str, workloads: Sequence[Workload], run: Run) -> _Subject:
    artifact = open_artifact(Path(model))
    graph = load_model(artifact)
    device = replace(run.device, runtime=runtime_of(graph, run.device))
    precision = precision_in(
        precision_of(graph),
        in_bfloat16=computes_in_bfloat16(graph) and RUNTIMES[device.runtime].computes_bfloat16,
    )
    cache_bytes = _cache_bytes(graph, workloads[0])
    inputs = {workload: example_inputs(graph, workload, run.seed) for workload in workloads}
    for workload in workloads if cache_bytes else ():
        for phase in DECODING:
            step = Workload.of(workload.batch, workload.length, phase)
            with suppress(InvalidArgument):  # a fixed number of new tokens
                inputs[step] = example_inputs(graph, step, run.seed)
    cost = model_cost(graph)
    macs = {
        workload: cost.macs_of({name: array.shape for name, array in inputs[workload].items()})
        for workload in workloads
    }
    counted = {workload: with_fixed_sizes(graph, workload) for workload in workloads}
    return _Subject(
        model=str(model),
        artifact=artifact,
        device=device,
        precision=precision,
        inputs=inputs,
        macs=macs,
        cache_bytes=cache_bytes,
        counted=counted,
    )


def _cache_bytes(graph: ir.Model, workload: Workload) -> int:
    """Bytes that one more token adds to the cached inputs of a row; 0 without a cache."""
    if not has_cache(graph.graph):
        return 0
    one, two = (example_inputs(graph, replace(workload, past=past)) for past in (1, 2))
    names = [name for name in one if not is_mask(name)]
    return sum(two[name].nbytes - one[name].nbytes for name in names) // workload.batch


class _Runner:
    """A model and its session, in a separate process."""

    def __init__(self, model: Path, device: Device) -> None:
        self.session = open_session(model, device)

    def feed(self, inputs: Batch) -> None:
        """Use these inputs in the following samples."""
        with _readable():
            self.sample_of_run = sampler(self.session.bind(inputs))

    def sample(self, repeats: int) -> float:
        """Mean seconds per run."""
        with _readable():
            return self.sample_of_run(repeats)

    def peak_rss_bytes(self) -> int:
        return peak_bytes()


@contextmanager
def _readable() -> Generator[None]:
    """Raise errors of the runtime with only its message; the caller adds model and shape."""
    try:
        yield
    except RunFailed as error:
        raise InvalidArgument(error.reason, code="benchmark.refused") from error


@dataclass(frozen=True)
class _Child:
    """A subject and the process that runs it."""

    subject: _Subject
    worker: Worker

    def feed(self, workload: Workload) -> Sampler:
        """Set the inputs of a workload and return the sampler of the child."""
        self._call(workload, "feed", self.subject.inputs[workload])
        return lambda repeats: self._call(workload, "sample", repeats)

    def peak_rss_bytes(self) -> int:
        return self._call(None, "peak_rss_bytes")

    def _call(self, workload: Workload | None, method: str, *arguments: Any) -> Any:
        try:
            return self.worker.call(method, *arguments)
        except WorkerCrashed as error:
            raise _died(self.subject, error) from error
        except InvalidArgument as error:
            batch, sequence = (workload.batch, workload.length) if workload else (0, 0)
            longest = self.subject.artifact.max_length
            raise InvalidArgument(
                f"{self.subject.model}: does not run at batch {batch}, sequence {sequence}: "
                f"{error.what}",
                f"use a sequence of at most {longest}"
                if longest is not None and sequence > longest
                else "use a shorter sequence or a smaller batch",
                code="benchmark.shape",
            ) from error


@contextmanager
def _child(subject: _Subject) -> Generator[_Child]:
    """Open a session over a model in a new process."""
    try:
        worker = Worker(_Runner, subject.artifact.model, subject.device)
    except WorkerCrashed as error:
        raise _died(subject, error) from error
    with worker:
        yield _Child(subject, worker)


def _died(subject: _Subject, error: WorkerCrashed) -> InvalidModel:
    return InvalidModel(
        f"{subject.model}: {error.what}",
        "it ran out of memory, or the graph crashes ONNX Runtime: try a smaller shape",
        code="benchmark.process_died",
    )
