"""Time and memory of the CP decomposition of stacked heads, compared with tensorly's parafac.

    python -m benchmarks.cp_speed --rounds 3 --layers 3

BERT-base shape (H 12, D 768, K 64) at R = 256. The weights are synthetic and resemble trained
weights: all heads read shared directions of decaying strength, with a rotation and noise per head.

Every round runs parafac for a few iterations, then attnserve until its error is at most that of
parafac. parafac receives the stack; building it is not timed. Then complete decompositions are
timed, one per layer, and the growth of resident memory is measured in a separate process.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time
import warnings
from typing import Any

import numpy as np
import tensorly as tl
from rich.console import Console
from rich.progress import track
from rich.table import Table
from tensorly.decomposition import parafac

from benchmarks._common import (
    description,
    numpy_machine,
    peak_memory,
    reset_peak_memory,
    write_result,
)
from graph_passes.factorize.cp import collaborative_factors

H, D, K, R = 12, 768, 64, 256


class Reached(Exception):
    """The target error of the race is reached."""


def synthetic_weights(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return queries and keys (H, D, K): 400 shared directions of strength i^(-1/2), and noise."""
    rng = np.random.default_rng(seed)
    shared = rng.standard_normal((D, 400)) / np.sqrt(np.arange(1, 401))
    queries, keys = (
        shared @ rng.standard_normal((H, 400, K)) / 20 + rng.standard_normal((H, D, K)) / 1000
        for _ in range(2)
    )
    return queries, keys


def race(seed: int, iterations: int) -> dict[str, Any]:
    """Measure the seconds to the same relative error; each uses its own initialization."""
    queries, keys = synthetic_weights(seed)
    stack = tl.tensor(queries @ keys.swapaxes(1, 2))
    parafac_watch, watch = Stopwatch(), Stopwatch()
    with warnings.catch_warnings(action="ignore"):  # its SVD initialization warns that H < R
        _, errors = parafac(
            stack, R, n_iter_max=iterations, tol=0, return_errors=True,
            callback=lambda *_: parafac_watch.lap(),
        )  # fmt: skip

    def stop(iteration: int, error: float) -> None:
        watch.lap()
        if error <= errors[-1] and iteration > 1:  # two sweeps, so that one can be timed
            raise Reached

    watch.restart()
    try:
        reached = collaborative_factors(queries, keys, R, progress=stop).relative_error
        raise RuntimeError(f"parafac's error {errors[-1]:.4f} was not reached: {reached:.4f}.")
    except Reached:
        pass
    return {
        "seed": seed,
        "error": float(errors[-1]),
        "parafac_wall_s": parafac_watch.wall_s,
        "parafac_cpu_s": parafac_watch.cpu_s,
        "ours_wall_s": watch.wall_s,
        "ours_cpu_s": watch.cpu_s,
        "wall_ratio": parafac_watch.wall_s[-1] / watch.wall_s[-1],
        "cpu_ratio": parafac_watch.cpu_s[-1] / watch.cpu_s[-1],
    }


class Stopwatch:
    """Wall and processor seconds since the start, one entry per lap.

    The first lap of parafac is its initialization.
    """

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        self.wall_s: list[float] = []
        self.cpu_s: list[float] = []
        self.start = time.perf_counter(), time.process_time()

    def lap(self) -> None:
        self.wall_s.append(time.perf_counter() - self.start[0])
        self.cpu_s.append(time.process_time() - self.start[1])


def decompose_layer(seed: int) -> dict[str, Any]:
    """Time one layer to convergence and record the error after every sweep."""
    queries, keys = synthetic_weights(seed)
    errors: list[float] = []
    watch = Stopwatch()
    collaborative_factors(queries, keys, R, progress=lambda _, error: errors.append(error))
    watch.lap()
    return {"seed": seed, "wall_s": watch.wall_s[0], "cpu_s": watch.cpu_s[0], "errors": errors}


def memory_bytes(seed: int) -> int:
    """Return the growth of the peak resident memory over three sweeps (Linux).

    Every sweep reaches the peak.
    """
    queries, keys = synthetic_weights(seed)
    before = reset_peak_memory()
    collaborative_factors(queries, keys, R, max_iterations=3)
    return peak_memory() - before


def main() -> None:
    parser = argparse.ArgumentParser(description=description(__doc__))
    parser.add_argument("--rounds", type=int, default=3, help="races against parafac")
    parser.add_argument("--iterations", type=int, default=10, help="iterations of parafac per race")
    parser.add_argument("--layers", type=int, default=3, help="complete decompositions")
    arguments = parser.parse_args()

    rounds = range(arguments.rounds)
    races = [race(seed, arguments.iterations) for seed in track(rounds, "races")]
    layers = [decompose_layer(seed) for seed in track(range(arguments.layers), "layers")]
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        peak = pool.apply(memory_bytes, (0,))
    result = {
        "question": "seconds to the same error, tensorly parafac over ours; seconds a layer",
        **numpy_machine(("numpy", "tensorly")),
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
    write_result("cp_speed", arguments, **result)

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
            f"one layer to convergence: {layer['wall_s']:.2f} s wall, {layer['cpu_s']:.2f} s cpu, "
            f"{len(layer['errors'])} sweeps, error {layer['errors'][-1]:.4f}"
        )
    console.print(f"peak extra memory of one layer: {peak / 2**20:.0f} MiB")


if __name__ == "__main__":
    main()
