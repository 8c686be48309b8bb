"""Latency and memory of models, compared fairly on a machine that drifts.

Each model has a process of its own, so that its peak memory is its own; only one of them works at a
time. A round runs every model once, and rounds alternate their order (A B, B A, ...), so that a
drift of the clock or of the neighbours meets all models alike. A speed-up is the median over the
rounds of first / model, two samples taken within one round: it cancels what both felt. Its interval
is a bootstrap of that median.
"""

from __future__ import annotations

import math
import os
import pickle
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from itertools import product
from pathlib import Path
from typing import Any, cast, get_args

import numpy as np

from attnserve.context import Progress, Provider, RunContext, ignore_progress
from attnserve.models.artifact import Artifact, load_model, open_artifact
from attnserve.models.example_inputs import example_inputs
from attnserve.runtime.io_binding import bound
from attnserve.runtime.profile import read_profile
from attnserve.runtime.session import (
    cpu_name,
    open_session,
    output_of,
    require_runtime,
)
from graph_passes.analysis.cost import model_cost
from graph_passes.errors import AttnserveError, InvalidArgument, InvalidData, InvalidModel

__all__ = ["BenchReport", "Machine", "Measurement", "bench", "describe_machine"]

SHAPE_SECONDS = 8.0
"""About how long one shape is measured where the number of rounds is not given."""

MIN_ROUNDS, MAX_ROUNDS = 20, 200

SAMPLE_SECONDS = 0.002
"""A sample repeats a faster model up to this time, so that clock and wake-up do not show in it."""

RESAMPLES = 2000

Inputs = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Measurement:
    """One model at one shape: a sample a round, and what follows from the samples.

    Attributes:
        model: The path as given.
        batch: Rows.
        sequence: Tokens a row.
        samples_ms: Milliseconds a run, one sample a round.
        first_ms: The same of the first model, in the same rounds.
        macs: Multiply-accumulates of one run; None where the graph cannot be counted.
        peak_rss_bytes: Most memory the model's process has held so far: interpreter, ONNX Runtime,
            session and every shape measured until now.
        seed: Of the bootstrap.
        peak_gpu_bytes: Most memory in use at once in the GPU's arena during a run of this shape,
            weights left out that ONNX Runtime holds outside of it, in a session of its own; None on
            the CPU and where ONNX Runtime does not tell.
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

    def percentile_ms(self, percent: float) -> float:
        """The time that ``percent`` of the samples stay within, in milliseconds."""
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

    @property
    def ratios(self) -> np.ndarray:
        """First model's time over this one's, round by round: float64 (N,), above 1 is faster."""
        return np.divide(self.first_ms, self.samples_ms)

    @property
    def speedup_vs_first(self) -> float:
        return float(np.median(self.ratios))

    @property
    def speedup_ci95(self) -> tuple[float, float]:
        """Bootstrap interval of ``speedup_vs_first``: (2.5th, 97.5th percentile)."""
        random = np.random.default_rng(self.seed)
        resampled = random.choice(self.ratios, size=(RESAMPLES, len(self.ratios)))  # resample, N
        low, high = np.percentile(np.median(resampled, axis=1), (2.5, 97.5))
        return float(low), float(high)

    @property
    def gmacs_per_second(self) -> float | None:
        """1e9 multiply-accumulates achieved a second, at the median time."""
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
            **({} if self.peak_gpu_bytes is None else {"peak_gpu_bytes": self.peak_gpu_bytes}),
        }


@dataclass(frozen=True)
class Machine:
    """What the numbers were measured on.

    ``cores`` are those this process may use; ``threads`` is 0 where ONNX Runtime chose.
    """

    cpu: str
    cores: int
    gpu: str | None
    provider: Provider
    threads: int
    platform: str
    python: str
    numpy: str
    onnxruntime: str
    attnserve: str


@dataclass(frozen=True)
class BenchReport:
    """Models in the order given, for each shape."""

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
    batches: Sequence[int] = (1,),
    sequences: Sequence[int] = (128,),
    threads: int = 1,
    provider: Provider = "cpu",
    rounds: int | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> BenchReport:
    """Measure models side by side, at every batch and sequence.

    On CUDA a run reads memory of the device and writes there, and it is over when that is: copies
    from and to the host do not count. Products of float32 are exact there (no TF32).

    Args:
        models: .onnx files or artifact folders; speed-ups are against the first.
        batches: Rows to measure at.
        sequences: Tokens a row to measure at.
        threads: Intra-op threads; 0 leaves the choice to ONNX Runtime.
        provider: The execution provider, which must be there: no falling back.
        rounds: Samples a model and shape; None fits them into about ``SHAPE_SECONDS`` a shape.
        seed: Of the random inputs and of the bootstrap.
        progress: Called in hundredths of a shape.

    Raises:
        InvalidArgument: A number is out of range, the provider is not there, or a model does not
            run at a shape.
        InvalidModel: A model cannot be read, or its process died.
        MissingExtra: ONNX Runtime is not installed.
    """
    tell = RunContext(progress=progress or ignore_progress).stage("bench")
    _check_arguments(models, batches, sequences, threads, provider, rounds)
    machine = describe_machine(provider, threads)
    shapes = list(product(batches, sequences))
    subjects = [_examine(model, shapes, seed) for model in models]
    results: list[Measurement] = []
    with ExitStack() as stack:
        children = [
            stack.enter_context(_child(subject.artifact.model, provider, threads))
            for subject in subjects
        ]
        for index, shape in enumerate(shapes):
            repeats, seconds = _warm_up(subjects, children, shape)
            count = rounds or _rounds_within(SHAPE_SECONDS, seconds)
            samples: list[list[_Sample]] = []  # N rounds of one sample a model
            for done in range(count):
                samples.append(_round(children, repeats, backwards=done % 2 == 1))
                tell(100 * index + 100 * (done + 1) // count, 100 * len(shapes))
            results += _measurements(subjects, shape, samples, seed)
    if provider == "cuda":
        feeds = [(one.artifact.model, one.inputs[shape]) for shape in shapes for one in subjects]
        results = [
            replace(result, peak_gpu_bytes=peak_of_runs(*each, provider=provider, threads=threads))
            for result, each in zip(results, feeds, strict=True)
        ]
    return BenchReport(tuple(results), machine)


def peak_of_runs(
    model: Path, inputs: Inputs, *, provider: Provider, threads: int = 0
) -> int | None:
    """Most memory in use at once in the provider's arena while these inputs run, by ONNX Runtime's
    profile of a session of its own, for profiling costs time; None where it does not tell."""
    with tempfile.TemporaryDirectory(prefix="attnserve-", ignore_cleanup_errors=True) as folder:
        prefix = Path(folder) / "runs"
        session: Any = open_session(model, provider=provider, threads=threads, profile=prefix)
        for _ in range(2):  # the first allocates
            session.run(None, dict(inputs))
        try:
            return read_profile(Path(session.end_profiling())).peak_bytes
        except InvalidData:
            return None


def describe_machine(provider: Provider = "cpu", threads: int = 1) -> Machine:
    """This machine, its versions, and how it is used.

    Raises:
        MissingExtra: ONNX Runtime is not installed.
    """
    try:
        version = metadata.version("attnserve")
    except metadata.PackageNotFoundError:  # run from a checkout
        version = "not installed"
    affinity = getattr(os, "sched_getaffinity", None)  # not on macOS or Windows
    return Machine(
        cpu=cpu_name(),
        cores=len(affinity(0)) if affinity else os.cpu_count() or 1,
        gpu=output_of("nvidia-smi", "--query-gpu=name", "--format=csv,noheader"),
        provider=provider,
        threads=threads,
        platform=platform.platform(),
        python=platform.python_version(),
        numpy=np.__version__,
        onnxruntime=require_runtime().__version__,
        attnserve=version,
    )


@dataclass(frozen=True)
class _Subject:
    """A model to measure: what to feed it, and what it costs, at each (batch, sequence)."""

    model: str
    artifact: Artifact
    inputs: dict[tuple[int, int], dict[str, np.ndarray]]
    macs: dict[tuple[int, int], int | None]


def _examine(model: Path | str, shapes: Sequence[tuple[int, int]], seed: int) -> _Subject:
    artifact = open_artifact(Path(model))
    graph = load_model(artifact)
    inputs = {shape: example_inputs(graph, *shape, seed) for shape in shapes}
    cost = model_cost(graph)
    macs = {
        shape: cost.macs_of({name: array.shape for name, array in arrays.items()})
        for shape, arrays in inputs.items()
    }
    return _Subject(str(model), artifact, inputs, macs)


def _warm_up(
    subjects: Sequence[_Subject], children: Sequence[_Child], shape: tuple[int, int]
) -> tuple[list[int], float]:
    """(runs a sample of each model, seconds a round takes)."""
    batch, sequence = shape
    repeats: list[int] = []
    seconds = 0.0
    for subject, child in zip(subjects, children, strict=True):
        try:
            child.run(1, subject.inputs[shape])  # allocates, and picks kernels
            sample = child.run(3)
        except InvalidArgument as error:
            longest = subject.artifact.max_length
            where = f"{subject.model}: does not run at batch {batch}, sequence {sequence}"
            raise InvalidArgument(
                f"{where}: {error.what}",
                f"use a sequence of at most {longest}"
                if longest is not None and sequence > longest
                else "use a shorter sequence or a smaller batch",
            ) from error
        repeats.append(max(1, math.ceil(SAMPLE_SECONDS / sample.seconds)))
        seconds += repeats[-1] * sample.seconds
    return repeats, seconds


def _round(children: Sequence[_Child], repeats: Sequence[int], *, backwards: bool) -> list[_Sample]:
    """One sample of every model, in the order of the models whatever order they ran in."""
    order = range(len(children))
    taken = {i: children[i].run(repeats[i]) for i in (reversed(order) if backwards else order)}
    return [taken[i] for i in order]


def _measurements(
    subjects: Sequence[_Subject],
    shape: tuple[int, int],
    samples: Sequence[Sequence[_Sample]],
    seed: int,
) -> list[Measurement]:
    by_model = list(zip(*samples, strict=True))
    times_ms = [tuple(1e3 * sample.seconds for sample in column) for column in by_model]
    return [
        Measurement(
            model=subject.model,
            batch=shape[0],
            sequence=shape[1],
            samples_ms=times,
            first_ms=times_ms[0],
            macs=subject.macs[shape],
            peak_rss_bytes=column[-1].peak_rss_bytes,
            seed=seed,
        )
        for subject, column, times in zip(subjects, by_model, times_ms, strict=True)
    ]


def _rounds_within(budget_seconds: float, round_seconds: float) -> int:
    """An even number: both orders of the models weigh the same."""
    rounds = int(budget_seconds / round_seconds)
    return min(max(rounds - rounds % 2, MIN_ROUNDS), MAX_ROUNDS)


def _check_arguments(
    models: Sequence[Path | str],
    batches: Sequence[int],
    sequences: Sequence[int],
    threads: int,
    provider: Provider,
    rounds: int | None,
) -> None:
    for option, values in (("model", models), ("batch", batches), ("sequence", sequences)):
        if len(values) == 0:
            raise InvalidArgument(f"no {option} to measure", f"give at least one {option}")
    for option, least, values in (
        ("batch", 1, batches),
        ("sequence", 1, sequences),
        ("rounds", 1, () if rounds is None else (rounds,)),
        ("threads", 0, (threads,)),
    ):
        if min(values, default=least) < least:
            raise InvalidArgument(
                f"{option} is {min(values)}: expected at least {least}", f"raise {option}"
            )
    if provider not in get_args(Provider):
        raise InvalidArgument(
            f"provider is {provider!r}: expected one of {', '.join(get_args(Provider))}",
            "choose one of these",
        )


# The child process. Requests and answers are pickles over its standard input and output: a plain
# `python -c` works from scripts, notebooks and tests alike, where multiprocessing would import the
# caller's __main__ a second time and count it as the model's memory.


@dataclass(frozen=True)
class _Sample:
    seconds: float  # a run, mean over the repeats
    peak_rss_bytes: int


@dataclass(frozen=True)
class _Child:
    model: Path
    process: subprocess.Popen[bytes]

    def run(self, repeats: int, inputs: Inputs | None = None) -> _Sample:
        """Time ``repeats`` runs on ``inputs`` (None: the inputs of the last call)."""
        return self.ask((repeats, inputs))

    def ask(self, request: Any) -> _Sample:
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            pickle.dump(request, self.process.stdin)
            self.process.stdin.flush()
            answer: _Sample | AttnserveError = pickle.load(self.process.stdout)
        except (EOFError, OSError, pickle.UnpicklingError) as error:
            status = self.process.wait()
            raise InvalidModel(
                f"{self.model}: ONNX Runtime's process ended with status {status}",
                "it ran out of memory, or the graph crashes ONNX Runtime: try a smaller shape",
            ) from error
        if isinstance(answer, AttnserveError):
            raise answer
        return answer


@contextmanager
def _child(model: Path, provider: Provider, threads: int) -> Generator[_Child]:
    """A process that holds a session over ``model`` and runs it when told to."""
    command = [sys.executable, "-P", "-c", "from attnserve.checks.benchmark import work; work()"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p or os.curdir for p in sys.path)}
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
    )
    with process:
        try:
            child = _Child(model, process)
            child.ask((model, provider, threads))
            yield child
        finally:
            process.kill()


def work() -> None:
    """In the child: open the session that the first request names, then run it as asked."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    requests = sys.stdin.buffer
    # What libraries print must not mix with the answers: it goes to standard error.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    session: Any = None
    inputs: Inputs = {}
    while True:
        try:
            request = pickle.load(requests)
        except EOFError:
            return
        seconds = 0.0
        try:
            if session is None:
                model, provider, threads = request
                session = open_session(model, provider=provider, threads=threads)
            else:
                repeats, inputs = request[0], inputs if request[1] is None else request[1]
                seconds = _seconds_a_run(session, inputs, repeats)
            answer = _Sample(seconds, _peak_rss_bytes())
        except AttnserveError as error:
            answer = error
        pickle.dump(answer, answers)
        answers.flush()


def _seconds_a_run(session: Any, inputs: Inputs, repeats: int) -> float:
    try:
        run = bound(session, inputs)
        start = time.perf_counter()
        for _ in range(repeats):
            run()
        return (time.perf_counter() - start) / repeats
    except Exception as error:  # onnxruntime raises a class of its own for each status
        raise InvalidArgument(str(error).strip().partition("\n")[0][:300]) from error


def _peak_rss_bytes() -> int:
    """The most memory that this process has had in RAM.

    On Linux ``ru_maxrss`` survives fork and exec, so that a child of a large process begins with
    its parent's peak; VmHWM does not.
    """
    status = Path("/proc/self/status")
    if status.is_file():
        lines = status.read_text().splitlines()
        return 1024 * int(next(line for line in lines if line.startswith("VmHWM")).split()[1])
    if sys.platform == "win32":
        import psutil

        return int(cast(Any, psutil.Process().memory_info()).peak_wset)
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak
