"""Tables and plots of the models trained in benchmarks/training, beside the papers' claims."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from benchmarks.training.variants import EXPERIMENTS, SAME, VARIANTS
from docs.hooks.tables.results import RESULTS, table

MISSING = "not measured"

Run = dict[str, Any]


def runs(name: str) -> list[Run]:
    """The runs of a variant by seed. Empty if it was not measured.

    Raises:
        ValueError: The results are of different settings or texts, which cannot be compared, or
            the variant has changed since.
    """
    stored = _all_runs()
    if len({json.dumps([run["settings"], run["pairs"]], sort_keys=True) for run in stored}) > 1:
        raise ValueError(f"{RESULTS / 'training'}: different settings, run all variants again")
    variant = VARIANTS[SAME.get(name, name)]
    found = [run for run in stored if run["variant"] == variant.name]
    if any(run["configuration"] != asdict(variant) for run in found):
        raise ValueError(f"{RESULTS / 'training'}: {name} has changed, run it again")
    return sorted(found, key=lambda run: run["seed"])


def translation(experiment: str) -> str:
    """BLEU, size and speed of the variants of one paper, and the claims of the paper."""
    rows = [
        [name, claim, *_measured(runs(name))] for name, claim in EXPERIMENTS[experiment].items()
    ]
    header = [
        "variant", "the paper", "BLEU", "validation loss", "seeds", "parameters", "MACs",
        "steps/s of processor time",
    ]  # fmt: skip
    return table(header, rows)


def translation_curves(experiment: str) -> str:
    """Validation loss by step, the mean of the seeds; nothing if no variant was measured."""
    from attnserve.reports.drawing import FIRST, GRID, INK, MUTED, SECOND, THIRD, svg

    colors, lines = (FIRST, SECOND, THIRD, INK, MUTED), ("-", "--")
    measured = {name: found for name in EXPERIMENTS[experiment] if (found := runs(name))}
    if not measured:
        return f"*Curves: {MISSING}.*"

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        axes.grid(color=GRID)
        for place, (name, found) in enumerate(measured.items()):
            style = lines[place // len(colors) % len(lines)]
            points = zip(*(run["curve"] for run in found), strict=True)
            steps, losses = zip(*map(_point, points), strict=True)
            axes.plot(steps, losses, style, color=colors[place % len(colors)], label=name)
        axes.set_xlabel("steps")
        axes.set_ylabel("validation loss, nats per token")
        figure.legend(loc="outside right upper")

    return f'<div class="figure">{svg(draw, (7.6, 3.6))}</div>'


def group_loss() -> str:
    """Validation losses of GHT and GHT-PS by the maps and the weight of the group loss."""
    path = RESULTS / "training" / "group-loss.json"
    if not path.is_file():
        return f"*{MISSING}*"
    found = json.loads(path.read_text(encoding="utf-8"))
    rows = [
        [row["maps"] or "none", f"{row['weight']:g}", f"{row['ght']:.3f}", f"{row['ght_ps']:.3f}"]
        for row in found["rows"]
    ]
    source = (
        f"*{found['machine']['cpu']}. Command: `{found['command']}`."
        " Data: `benchmarks/results/training/group-loss.json`.*"
    )
    return "\n\n".join([table(["maps", "weights", "GHT", "GHT-PS"], rows), source])


def translation_source() -> str:
    """The machines, the settings and the command."""
    found = _all_runs()
    progress = f"{len({run['variant'] for run in found})} of {len(VARIANTS)} models measured"
    command = "`python -m benchmarks.training.translation --data FOLDER`"
    if not found:
        return f"*{progress}. Command: {command}.*"
    machines = {_machine(run["machine"]) for run in found}
    settings = found[0]["settings"]
    return (
        f"*{progress}: {settings['steps']:,} steps of at most {settings['batch_tokens']:,} tokens,"
        f" {settings['layers']} + {settings['layers']} layers, D = {settings['width']}."
        f" {'; '.join(sorted(machines))}. Command: {command}. Data: `benchmarks/results/training`.*"
    )


def _all_runs() -> list[Run]:
    paths = sorted((RESULTS / "training").glob("translation-*.json"))
    return [json.loads(path.read_text(encoding="utf-8")) for path in paths]


def _machine(machine: dict[str, Any]) -> str:
    shared = ", shared with other processes" if machine["shared"] else ""
    return f"{machine['cpu']}, {machine['threads']} threads, torch {machine['torch']}{shared}"


def _point(points: tuple[dict[str, float], ...]) -> tuple[float, float]:
    return points[0]["step"], statistics.fmean(point["val_loss"] for point in points)


def _measured(found: list[Run]) -> list[str]:
    if not found:
        return [MISSING, *[""] * 5]

    def mean(value: Callable[[Run], float]) -> float:
        return statistics.fmean(map(value, found))

    scores = [run["bleu"] for run in found]
    spread = f" ({min(scores):.1f} to {max(scores):.1f})" if len(scores) > 1 else ""
    return [
        f"{statistics.fmean(scores):.1f}{spread}",
        f"{mean(lambda run: run['curve'][-1]['val_loss']):.3f}",
        str(len(found)),
        f"{found[0]['parameters'] / 1e6:.2f} M",
        f"{found[0]['macs'] / 1e6:.1f} M",
        f"{mean(lambda run: run['steps_per_cpu_s']):.2f}",
    ]
