"""Tables of what searches find: quality, speed and time."""

from __future__ import annotations

import statistics
from typing import Any

from attnserve.limits import MIN_REMOVAL_GAIN
from docs.hooks.tables.results import load, percent, source, table, times

BY_HAND = "R = 128 by hand"

PLANNER_MODELS = {
    "as exported": "as exported",
    "ONNX Runtime's optimizer": "ONNX Runtime transformer optimizer",
    "onnxscript's optimize_for_ort": "onnxscript `optimize_for_ort`",
    "ONNX Runtime's int8": "ONNX Runtime dynamic int8",
    "fused, nothing removed": "attnserve, fused, nothing removed",
    "attention": "attnserve, attention only",
    "with feed-forwards": "attnserve, attention and FFN",
    "with feed-forwards, int8": "attnserve, attention, FFN and int8",
    "similarities": "attnserve, attention and FFN, similarities kept",
    BY_HAND: "attnserve, `--collab-dk 128`",
}
"""Names of the models in planner.json, and their names in the documentation."""

MIXTURE_MODELS = PLANNER_MODELS | {
    "int8 by hand": "attnserve, fused and int8, nothing removed",
    "int8-full by hand": "attnserve, fused and int8 of 8 bits, nothing removed",
    "with feed-forwards, int8-full": "attnserve, attention, FFN and int8 of 8 bits",
}
"""The models in mixture.json."""

QUALITY_MODELS = {
    "minilm": "all-MiniLM-L6-v2",
    "sst2": "SST-2 classifier",
    "modernbert": "ModernBERT, SST-2",
    "stories": "stories260K",
    "vit": "MNIST transformer",
    "translation": "translator, Multi30k",
    "wikitext": "Llama, WikiText-2",
}
"""Names of the models in quality.json, and their names in the documentation."""

DISAGREEMENTS = {
    "promise": "below the goal",
    "condition": "second condition missed",
    "proof": "verified and unseen rows differ",
}


def planner_quality() -> str:
    rows = [
        [
            PLANNER_MODELS[plan["goal"]].removeprefix("attnserve, "),
            percent(plan["kept"]["stsb_dev.tsv"]),
            percent(plan["kept"]["unseen.tsv"]),
            *(f"{plan['quality_unseen'][key]:.3f}" for key in ("value", "r2", "overlap")),
            f"{plan['seconds']:.0f} s",
        ]
        for plan in load("planner")["plans"]
    ]
    header = [
        "search", "score kept, dev set", "unseen pairs", "similarity, unseen texts", "R²",
        "overlap", "search time",
    ]  # fmt: skip
    return table(header, rows)


def planner_speed() -> str:
    """Speed of all models, and their score where it was measured."""
    speeds, kept = planner_rows(), planner_kept()
    lengths = list(next(iter(speeds.values())))
    rows = [
        [
            shown,
            *(times(speeds[model][length]["vs_exported"]) for length in lengths),
            kept.get(model, ""),
        ]
        for model, shown in PLANNER_MODELS.items()
        if model in speeds  # older results lack some
    ]
    return table(["tokens", *map(str, lengths), "score kept, unseen pairs"], rows)


def planner_other() -> str:
    """Quality of plans that were calibrated on another kind of text."""
    rows = [
        [
            PLANNER_MODELS[plan["goal"]].removeprefix("attnserve, "),
            f"{plan['mean_cosine']:.3f}",
            *(percent(plan["kept"][pairs]) for pairs in ("stsb_dev.tsv", "unseen.tsv")),
        ]
        for plan in load("planner_other")["plans"]
    ]
    return table(["search", "mean cosine", "kept, dev set", "kept, unseen pairs"], rows)


def planner_rows() -> dict[str, dict[int, dict[str, Any]]]:
    """The measured speeds by model and number of tokens."""
    speeds: dict[str, dict[int, dict[str, Any]]] = {}
    for row in load("planner")["speeds"]:
        speeds.setdefault(row["model"], {})[row["sequence"]] = row
    return speeds


def planner_kept() -> dict[str, str]:
    """The shares of the score on the unseen pairs, by model."""
    planner = load("planner")
    kept = {plan["goal"]: plan["kept"] for plan in planner["plans"]}
    kept |= {
        "ONNX Runtime's int8": planner["int8_of_onnxruntime_kept"],
        BY_HAND: planner["by_hand_kept"],
    }
    return {model: percent(pairs["unseen.tsv"]) for model, pairs in kept.items()}


def quality() -> str:
    """The goal of each search, its verification, and the measure on unseen rows."""
    rows = [
        [
            f"{QUALITY_MODELS[row['model']]}, {row['unseen']['measure']}",
            f"{row['keep']:g}",
            _interval(row["proofs"][-1]["quality"]) if row["gain"] else "no gain",
            *(_interval(row[part]) if row["gain"] else "" for part in ("unseen", "other")),
            ", ".join(DISAGREEMENTS[name] for name in row["disagree"]) if row["gain"] else "",
        ]
        for row in load("quality")["rows"]
    ]
    return table(["model and measure", "goal", "verified", "unseen", "other rows", "beyond"], rows)


def quality_tasks() -> str:
    """Task scores and speed of the same searches."""
    rows = [
        [
            QUALITY_MODELS[row["model"]],
            f"{row['keep']:g}",
            row["task"]["name"],
            *(f"{row['task'][model]:.4f}" for model in ("original", "new")),
            times(row["speedup"]),
            f"{row['cpu_seconds']:.0f} s",
        ]
        for row in load("quality")["rows"]
    ]
    header = ["model", "goal", "task", "original", "optimized", "speed-up", "processor time"]
    return table(header, rows)


def _interval(quality: dict[str, Any] | None) -> str:
    if quality is None:
        return ""
    ends = " to ".join(f"{end:.4f}" for end in quality["ci95"] or ())
    return f"{quality['value']:.4f} ({ends or 'no interval'}), {quality['rows']:,}"


def mixture() -> str:
    """Speed and quality of searches on sentences and paragraphs."""
    rows = [
        [
            MIXTURE_MODELS[row["goal"]],
            f"{row['keep']:g}" if row["keep"] else "",
            *(times(row["speedups"][length][0]) for length in ("128", "256", "512")),
            *(
                f"{unseen['value']:.4f}, {unseen['overlap']:.3f}, {unseen['r2']:.4f}"
                for unseen in (row["unseen"][kind] for kind in ("sentences", "paragraphs"))
            ),
        ]
        for row in _mixture_rows()
    ]
    lengths = ["128 tokens", "256 tokens", "512 tokens"]
    return table(["rewrites", "goal", *lengths, "unseen sentences", "unseen paragraphs"], rows)


def mixture_curve() -> str:
    """Speed-up against the share of neighbors that stay, on sentences and on paragraphs."""
    from attnserve.reports.drawing import FIRST, GRID, INK, MUTED, SECOND, THIRD, svg

    styles: dict[str, dict[str, Any]] = {
        "attention": {"color": FIRST, "marker": "o"},
        "with feed-forwards": {"color": SECOND, "marker": "o"},
        "with feed-forwards, int8": {"color": INK, "marker": "o"},
        "with feed-forwards, int8-full": {"color": THIRD, "marker": "o"},
        "ONNX Runtime's optimizer": {"color": MUTED, "marker": "D", "linestyle": ""},
        "onnxscript's optimize_for_ort": {"color": MUTED, "marker": "x", "linestyle": ""},
        "ONNX Runtime's int8": {"color": INK, "marker": "D", "linestyle": ""},
        "fused, nothing removed": {"color": FIRST, "marker": "s", "linestyle": ""},
        "int8 by hand": {"color": INK, "marker": "s", "linestyle": ""},
        "int8-full by hand": {"color": THIRD, "marker": "s", "linestyle": ""},
    }
    rows = _mixture_rows()

    def draw(figure: Any) -> None:
        panels = figure.subplots(1, 2, sharey=True)
        for axes, kind in zip(panels, ("sentences", "paragraphs"), strict=True):
            axes.grid(color=GRID)
            for goal in dict.fromkeys(row["goal"] for row in rows):
                points = [
                    (row["unseen"][kind]["overlap"], row["speedups"]["128"][0], row["keep"])
                    for row in rows
                    if row["goal"] == goal
                ]
                x, y, _ = zip(*points, strict=True)
                axes.plot(x, y, label=MIXTURE_MODELS[goal].replace("`", ""), **styles[goal])
                for a, b, share in points:
                    if share:
                        axes.annotate(f"{share:g}", (a, b), (3, 4), textcoords="offset points",
                                      fontsize=8, color=MUTED)  # fmt: skip
            axes.set_title(kind)
            axes.set_xlabel("overlap@10 with the original")
        panels[0].set_ylabel("speed-up at 128 tokens")
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)

    return f'<div class="figure">{svg(draw, (8.6, 4.6))}</div>'


def _mixture_rows() -> list[dict[str, Any]]:
    """Rows of other tools first, then searches sorted by goal."""
    order = list(MIXTURE_MODELS)
    rows = load("mixture")["rows"]
    return sorted(rows, key=lambda row: (order.index(row["goal"]), row["keep"] or 0.0))


def index(name: str) -> str:
    """What queries keep in an index of the original's vectors, and their speed."""
    result = load(name)
    lengths = sorted({speed["sequence"] for speed in result["speeds"]})
    speeds = {(speed["model"], speed["sequence"]): speed for speed in result["speeds"]}
    rows = [
        [
            f"{row['measure']}, {row['precision']}, {row['keep']:g}",
            *(f"{found['index'][key]:.4f}" for key in ("value", "overlap")),
            f"{found['similarity']['value']:.4f}",
            *(times(speeds[row["name"], length]["vs_fused"]) for length in lengths),
        ]
        if (found := row["unseen"]) is not None and (row["name"], lengths[0]) in speeds
        else [f"{row['measure']}, {row['precision']}, {row['keep']:g}", *["-"] * (3 + len(lengths))]
        for row in result["rows"]
    ]
    header = ["goal", "index", "overlap", "similarity", *(f"{at} tokens" for at in lengths)]
    return "\n\n".join((table(header, rows), _fastest_queries(result), source(name)))


def _fastest_queries(result: dict[str, Any]) -> str:
    """The fastest model of each measure, or that none is faster than the fused original."""
    ratios: dict[str, list[float]] = {}
    for speed in result["speeds"]:
        ratios.setdefault(speed["model"], []).append(speed["vs_fused"])
    lines: list[str] = []
    for goal in dict.fromkeys((row["measure"], row["keep"]) for row in result["rows"]):
        rows = [row for row in result["rows"] if (row["measure"], row["keep"]) == goal]
        found = {
            row["precision"]: statistics.geometric_mean(ratios[row["name"]])
            for row in rows
            if row["name"] in ratios
        }
        measure, keep = goal
        tried = ", ".join(row["precision"] for row in rows)
        fastest = max(found, key=lambda precision: found[precision], default="")
        if fastest and found[fastest] >= MIN_REMOVAL_GAIN:
            said = f"{fastest} makes queries {times(found[fastest])} as fast on average"
        else:
            said = "no precision makes queries faster"
        lines.append(f"- {measure}, {keep:g}: {said}; tried: {tried}")
    return "\n".join(lines)


def search_time() -> str:
    """Time and memory of a search of large encoders."""
    return table(
        ["shape", "layers", "width", "minutes", "processor minutes", "peak memory / model"],
        [
            [
                row["size"],
                str(row["layers"]),
                str(row["width"]),
                f"{row['minutes']:.0f}",
                f"{row['cpu_minutes']:.0f}",
                f"{row['peak_rss_bytes'] / row['model_bytes']:.1f}",
            ]
            for row in load("search_time")["rows"]
        ],
    )
