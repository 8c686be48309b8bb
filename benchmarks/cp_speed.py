"""How fast is the CP decomposition of stacked heads, beside tensorly's parafac?

    python benchmarks/cp_speed.py --rounds 3 --layers 3

BERT-base shape (H 12, D 768, K 64) at R = 256. The weights are synthetic and only look trained: all
heads read shared directions of decaying strength, each with a rotation and some noise of its own.

Every round runs parafac for a few iterations, then ours until it is at parafac's error or below.
parafac is given the stack: forming it is not counted. Whole decompositions follow, one a layer, and
the growth of resident memory that one brings, in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import statistics
import sys
import time
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import tensorly as tl
from rich.console import Console
from rich.progress import track
from rich.table import Table
from tensorly.decomposition import parafac

from graph_passes.factorize.cp import collaborative_factors

RESULT = Path(__file__).parent / "results" / "cp_speed.json"
H, D, K, R = 12, 768, 64, 256


class Reached(Exception):
    """Ours is at the error that it was raced to."""


def trained_looking(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Queries and keys (H, D, K): 400 shared directions of strength i^(-1/2), and noise."""
    rng = np.random.default_rng(seed)
    shared = rng.standard_normal((D, 400)) / np.sqrt(np.arange(1, 401))
    queries, keys = (
        shared @ rng.standard_normal((H, 400, K)) / 20 + rng.standard_normal((H, D, K)) / 1000
        for _ in range(2)
    )
    return queries, keys


def race(seed: int, iterations: int) -> dict[str, Any]:
    """Seconds to the same relative error, parafac first; both from their own start."""
    queries, keys = trained_looking(seed)
    stack = tl.tensor(queries @ keys.swapaxes(1, 2))
    theirs, ours = Stopwatch(), Stopwatch()
    with warnings.catch_warnings(action="ignore"):  # its svd start says that H < R
        _, errors = parafac(
            stack, R, n_iter_max=iterations, tol=0, return_errors=True,
            callback=lambda *_: theirs.lap(),
        )  # fmt: skip

    def stop(iteration: int, error: float) -> None:
        ours.lap()
        if error <= errors[-1] and iteration > 1:  # the second, so that one sweep can be timed
            raise Reached

    ours.restart()
    try:
        reached = collaborative_factors(queries, keys, R, progress=stop).relative_error
        raise RuntimeError(f"parafac's error {errors[-1]:.4f} was not reached: {reached:.4f}.")
    except Reached:
        pass
    return {
        "seed": seed,
        "error": float(errors[-1]),
        "parafac_wall_s": theirs.wall_s,
        "parafac_cpu_s": theirs.cpu_s,
        "ours_wall_s": ours.wall_s,
        "ours_cpu_s": ours.cpu_s,
        "wall_ratio": theirs.wall_s[-1] / ours.wall_s[-1],
        "cpu_ratio": theirs.cpu_s[-1] / ours.cpu_s[-1],
    }


class Stopwatch:
    """Wall and processor seconds since the start, one entry a lap; parafac's first is its start."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        self.wall_s: list[float] = []
        self.cpu_s: list[float] = []
        self.start = time.perf_counter(), time.process_time()

    def lap(self) -> None:
        self.wall_s.append(time.perf_counter() - self.start[0])
        self.cpu_s.append(time.process_time() - self.start[1])


def whole(seed: int) -> dict[str, Any]:
    """One layer to convergence, with the error after every sweep."""
    queries, keys = trained_looking(seed)
    errors: list[float] = []
    watch = Stopwatch()
    collaborative_factors(queries, keys, R, progress=lambda _, error: errors.append(error))
    watch.lap()
    return {"seed": seed, "wall_s": watch.wall_s[0], "cpu_s": watch.cpu_s[0], "errors": errors}


def memory_bytes(seed: int) -> int:
    """Growth of the peak resident set over three sweeps (the peak is in every sweep); Linux."""
    queries, keys = trained_looking(seed)
    Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
    before = resident_bytes("VmRSS")
    collaborative_factors(queries, keys, R, max_iterations=3)
    return resident_bytes("VmHWM") - before


def resident_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(field))


def cpu_model() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if sys.platform == "linux" else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="races against parafac")
    parser.add_argument("--iterations", type=int, default=10, help="of parafac in each race")
    parser.add_argument("--layers", type=int, default=3, help="whole decompositions")
    arguments = parser.parse_args()

    rounds = range(arguments.rounds)
    races = [race(seed, arguments.iterations) for seed in track(rounds, "races")]
    layers = [whole(seed) for seed in track(range(arguments.layers), "layers")]
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        peak = pool.apply(memory_bytes, (0,))
    result = {
        "question": "seconds to the same error, tensorly parafac over ours; seconds a layer",
        "command": " ".join(["python", "benchmarks/cp_speed.py", *sys.argv[1:]]),
        "machine": {
            "cpu": cpu_model(),
            "cores": os.cpu_count(),
            "threads": os.environ.get("OPENBLAS_NUM_THREADS", "default"),
            "load_1min": os.getloadavg()[0],
        },
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("numpy", "tensorly")},
        },
        "shape": {"H": H, "D": D, "K": K, "R": R},
        "weights": "synthetic: shared directions of strength i^(-1/2) and noise, float64",
        "median_wall_ratio": statistics.median(sample["wall_ratio"] for sample in races),
        "median_cpu_ratio": statistics.median(sample["cpu_ratio"] for sample in races),
        "median_layer_wall_s": statistics.median(layer["wall_s"] for layer in layers),
        "median_layer_cpu_s": statistics.median(layer["cpu_s"] for layer in layers),
        "total_layers_wall_s": sum(layer["wall_s"] for layer in layers),
        "peak_extra_memory_bytes": peak,
        "races": races,
        "layers": layers,
    }
    RESULT.write_text(json.dumps(result, indent=2) + "\n")

    table = Table("", "tensorly parafac", "ours", "ratio", title="Seconds to the same error")
    for index, sample in enumerate(races):
        for clock in ("wall", "cpu"):
            theirs, ours = sample[f"parafac_{clock}_s"], sample[f"ours_{clock}_s"]
            table.add_row(
                f"round {index}, error {sample['error']:.4f}, {clock}",
                f"{theirs[-1]:.1f} ({len(theirs) - 1} iterations)",
                f"{ours[-1]:.2f} ({len(ours)} sweeps)",
                f"{sample[f'{clock}_ratio']:.0f}x",
            )
    console = Console()
    console.print(table)
    for layer in layers:
        console.print(
            f"a layer to convergence: {layer['wall_s']:.2f} s wall, {layer['cpu_s']:.2f} s cpu, "
            f"{len(layer['errors'])} sweeps, error {layer['errors'][-1]:.4f}"
        )
    console.print(f"peak extra memory of a layer: {peak / 2**20:.0f} MiB")


if __name__ == "__main__":
    main()
