"""Tables and plots of models that are trained after a rewrite."""

from __future__ import annotations

from itertools import cycle
from typing import Any

from docs.hooks.tables.results import load, percent, table, times

TASK_SCORES = {"sts": "STS-B dev, Spearman", "classification": "SST-2 dev, accuracy"}


def recovery() -> str:
    """Quality of smaller encoders before and after training, and their speed."""
    rows: list[list[str]] = []
    for row in load("recovery")["rows"]:
        speeds = row["speedups"]
        for part in ("before", "after"):
            found = row[part]
            trained = f"after {row['minutes']:g} minutes, {_threads(row['threads'])}"
            rows.append([
                row["case"] if part == "before" else "",
                *(
                    times(vs_fastest(speeds, n)) if part == "before" else ""
                    for n in ("128", "512")
                ),
                trained if part == "after" else "before",
                percent(found["kept"]),
                f"{found['mean_cosine']:.4f}",
                *(
                    f"{unseen['value']:.4f}, {unseen['overlap']:.3f}, {unseen['r2']:.4f}"
                    for unseen in (found[kind] for kind in ("sentences", "paragraphs"))
                ),
            ])  # fmt: skip
    lengths = ["128 tokens", "512 tokens"]
    return table(
        ["made smaller by", *lengths, "training", "score kept", "cosine", "unseen sentences",
         "unseen paragraphs"],
        rows,
    )  # fmt: skip


def vs_fastest(speedups: dict[str, dict[str, float]], length: str) -> float:
    """The speed of the smaller model over the fastest of the others."""
    others = [speed[length] for name, speed in speedups.items() if name != "smaller"]
    return speedups["smaller"][length] / max(others)


def _threads(threads: int | str) -> str:
    return "one thread" if threads == 1 else f"{threads} threads"


def recovery_curve() -> str:
    """The loss on held-out rows, relative to that before the training, by minutes."""
    from attnserve.reports.drawing import FIRST, GRID, INK, MUTED, SECOND, THIRD, svg

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        axes.grid(color=GRID)
        colors = (FIRST, SECOND, THIRD, INK, MUTED)
        lines = [(color, style) for style in ("-", "--") for color in colors]
        for (color, style), row in zip(cycle(lines), load("recovery")["rows"], strict=False):
            training = row["training"]
            points = [(0.0, 1.0)] + [
                (seconds / 60, loss / training["first_loss"])
                for seconds, _, loss in training["history"]
            ]
            axes.plot(*zip(*points, strict=True), style, color=color, label=row["case"])
        axes.set_xlabel("minutes of training")
        axes.set_ylabel("loss on held-out rows, before = 1")
        figure.legend(loc="outside lower center")

    return f'<div class="figure">{svg(draw, (7.6, 5.4))}</div>'


def pruning_rounds() -> str:
    """Quality of an encoder that was pruned and trained once, or in turns."""
    rows: list[list[str]] = []
    for row in load("pruning_rounds")["rows"]:
        steps = row["steps"]
        for place, step in enumerate(steps):
            for part in ("before", "after"):
                found = step[part]
                rows.append([
                    str(row["rounds"]) if (place, part) == (0, "before") else "",
                    f"pruning {place + 1}" if part == "before" else "training",
                    f"{step['training']['steps']:,}" if part == "after" else "",
                    percent(found["kept"]),
                    f"{found['mean_cosine']:.4f}",
                    *(f"{found[kind]['overlap']:.3f}" for kind in ("sentences", "paragraphs")),
                ])  # fmt: skip
    return table(
        ["rounds", "after", "steps", "score kept", "cosine", "unseen sentences",
         "unseen paragraphs"],
        rows,
    )  # fmt: skip


def finetuning() -> str:
    """Scores of decomposed encoders before and after the second fine-tuning."""
    rows: list[list[str]] = []
    for task, ranks in _finetuned().items():
        for rank, found in ranks.items():
            cells = [_mean_of(found, key) for key in ("tuned", "decomposed", "tuned_again")]
            name = str(rank) if rank else "not decomposed"
            shown = [percent(cell) for cell in cells]
            steps = ", ".join(str(row["steps"]) for row in found)
            rates = ", ".join(f"{row['learning_rate']:.0e}" for row in found)
            rows.append([TASK_SCORES[task], name, *shown, steps, rates])
    header = ["score", "R", "before", "decomposed", "fine-tuned again", "steps of each seed",
              "learning rates"]  # fmt: skip
    return table(header, rows)


def finetuning_curve() -> str:
    """The scores by R, as in Figure 5 of the paper."""
    from attnserve.reports.drawing import FIRST, GRID, MUTED, SECOND, svg

    def draw(figure: Any) -> None:
        tasks = _finetuned()
        for axes, (task, ranks) in zip(figure.subplots(1, len(tasks), squeeze=False)[0],
                                       tasks.items(), strict=True):  # fmt: skip
            axes.grid(color=GRID)
            sizes = sorted(rank for rank in ranks if rank)
            for key, color, label in (("decomposed", FIRST, "decomposed"),
                                      ("tuned_again", SECOND, "fine-tuned again")):  # fmt: skip
                scores = [100 * _mean_of(ranks[rank], key) for rank in sizes]
                axes.plot(sizes, scores, "o-", color=color, label=label)
            control = [row for found in ranks.values() for row in found if row["rank"] is None]
            if control:
                for key, line, label in (("tuned", "-", "before"),
                                         ("tuned_again", "--", "control")):  # fmt: skip
                    level = 100 * _mean_of(control, key)
                    axes.axhline(level, linestyle=line, color=MUTED, label=label)
            axes.set_xlabel("query and key dimensions R")
            axes.set_ylabel(f"{TASK_SCORES[task]}, %")
        handles, labels = figure.axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=4)

    return f'<div class="figure">{svg(draw, (7.6, 3.6))}</div>'


def _finetuned() -> dict[str, dict[int | None, list[dict[str, Any]]]]:
    """The rows of the seeds by task and R, the control last."""
    found: dict[str, dict[int | None, list[dict[str, Any]]]] = {}
    rows = load("finetuning")["rows"]
    for row in sorted(rows, key=lambda row: (row["task"], -(row["rank"] or 0), row["seed"])):
        found.setdefault(row["task"], {}).setdefault(row["rank"], []).append(row)
    return found


def _mean_of(rows: list[dict[str, Any]], key: str) -> float:
    return sum(row[key] for row in rows) / len(rows)
