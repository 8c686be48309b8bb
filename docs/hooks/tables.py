"""Markdown tables of the measurements in benchmarks/results."""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, cycle
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"

README_TABLE = re.compile(r"(<!-- results -->\n).*?(<!-- /results -->)", re.DOTALL)

SYSTEMS = {
    "attnserve": "`attnserve serve`",
    "attnserve, 32 texts a request": "`attnserve serve`, 32 texts per request",
    "attnserve --no-rewrite": "`attnserve serve --no-rewrite`",
    "plain": "FastAPI handler with ONNX Runtime, no batching",
    "litserve": "LitServe with batching",
    "sentence-transformers": "sentence-transformers, `encode()` in batches of 32, no server",
    "bare session, one by one": "ONNX Runtime session, one text at a time, no server",
    "bare session as served, one by one": "the same with fused operators",
    "bare session as served, 16 of like length": "the same with fused operators, batches of 16",
}

REUSE_CASES = {
    "layer 3 reuses all": "all heads of layer 3 reused",
    "layer 4 reuses all": "all heads of layer 4 reused",
    "all layers but the first reuse all": "all heads reused in all layers but the first",
}

MIXING_FORMS = {
    "dense": "dense mixing",
    "sparse": "sparse mixing",
    "own": "dimensions of each head",
    "auto": "`--mixing auto`",
}

MIXING_SHAPES = ((1, 16), (1, 128), (1, 512), (8, 16), (8, 128), (8, 512))

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

README_MODELS = {
    "search --keep 0.99, float32, auto": "**attnserve, `--keep 0.99 --allow ffn`**",
    "fused float32, auto": "**attnserve, operators fused only**",
    "as exported, ONNX Runtime float32": "ONNX Runtime, as exported",
    "ONNX Runtime's optimizer": "ONNX Runtime transformer optimizer",
    "as exported, OpenVINO float32": "OpenVINO float32",
    "sentence-transformers": "sentence-transformers (PyTorch) float32",
    "fused bfloat16-cpu, auto": "**attnserve, `--precision bfloat16-cpu`**",
    "as exported, OpenVINO as it is": "OpenVINO, by default {default} on this CPU",
    "search --keep 0.9995, int8-full-bfloat16, auto": (
        "**attnserve, `--precision int8-full-bfloat16 --keep 0.9995`**"
    ),
    "fused int8-full-bfloat16, auto": "**attnserve, `--precision int8-full-bfloat16`**",
    "NNCF int8, rest bfloat16": "OpenVINO, NNCF int8, rest bfloat16",
    "ONNX Runtime's dynamic int8": "ONNX Runtime dynamic int8",
    "--collab-dk 128, auto": "**attnserve, `--collab-dk 128`**",
}
"""Models of peers.json in the README, and their names there: the default goal first, then each
model of attnserve with the peers of about its fidelity."""

STAND_INS = {
    "search --keep 0.99, float32, auto": "similarities",
    "ONNX Runtime's optimizer": "ONNX Runtime's optimizer",
    "--collab-dk 128, auto": BY_HAND,
}
"""Models of planner.json in place of those that an older peers.json lacks."""

PEER_LENGTHS = ("16", "32", "128", "512")

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


def load(name: str) -> dict[str, Any]:
    """A result file of a benchmark."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; the first column is text, the others are numbers."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def source(name: str, part: str | None = None) -> str:
    """The machines, the versions and the command of a result file, in one line."""
    result = load(name)
    measured = result if part is None else result[part]
    machine = {**measured.get("versions", {}), **measured["machine"]}
    threads = str(measured.get("threads", machine["threads"]))
    threads = {"1": "1 thread", "default": "default threads"}.get(threads, f"{threads} threads")
    about = [f"{_cpu(measured)}, {threads}"]
    packages = {"onnxruntime": "ONNX Runtime", "openvino": "OpenVINO", "attnserve": "attnserve"}
    about += [
        f"{shown} {machine[package]}"
        for package, shown in packages.items()
        if machine.get(package, "not installed") != "not installed"
    ]
    if "date" in measured:
        about.append(measured["date"][:10])
    others = {_cpu(row) for row in measured.get("rows", []) if "machine" in row} - {_cpu(measured)}
    if others:
        about.append(f"some rows: {', '.join(sorted(others))}")
    where = f"`benchmarks/results/{name}.json`"
    return f"*{'; '.join(about)}. Command: `{measured['command']}`. Data: {where}.*"


def _cpu(measured: Mapping[str, Any]) -> str:
    """The processor, with the features on which speeds depend where they are known."""
    flags = measured.get("cpu_flags")
    return measured["machine"]["cpu"] + (f" ({' '.join(flags)})" if flags else "")


def clients() -> str:
    """The tested clients of the service."""
    rows = load("clients")["clients"].values()
    lines = ["| client | tested with | outcome |", "|---|---|---|"]
    for row in rows:
        first, *others = (f"`{package}`" for package in row["packages"])
        lines.append(f"| {first} | {', '.join(others)} | {row['outcome']} |")
    return "\n".join(lines)


def times(value: float) -> str:
    return f"{value:.2f}x"


def percent(value: float) -> str:
    return f"{value:.1%}"


def _planner_speeds() -> dict[str, dict[int, dict[str, Any]]]:
    speeds: dict[str, dict[int, dict[str, Any]]] = {}
    for row in load("planner")["speeds"]:
        speeds.setdefault(row["model"], {})[row["sequence"]] = row
    return speeds


def results() -> str:
    """The table of the README: speed and fidelity of attnserve and of other tools."""
    result = load("peers")
    sources = [source("peers")]
    found = {
        row["model"]: [
            *(times(row["turns"][length]["speedup"][0]) for length in PEER_LENGTHS),
            *(f"{row['overlap'][kind]:.3f}" for kind in ("sentences", "paragraphs")),
        ]
        for row in result["rows"]
    }
    if lacking := STAND_INS.keys() - found:
        found |= {name: _stand_in(STAND_INS[name]) for name in lacking}
        sources.append(f"Rows without paragraphs: {source('planner')}")
    default = "bfloat16" if any("bf16" in flag for flag in result["cpu_flags"]) else "float32"
    rows = [
        [shown.format(default=default), *found[name]]
        for name, shown in README_MODELS.items()
        if name in found
    ]
    header = ["model", *(f"{length} tokens" for length in PEER_LENGTHS), "sentences", "paragraphs"]
    return "\n\n".join((table(header, rows), *sources))


def _stand_in(model: str) -> list[str]:
    """Speeds of a model of planner.json, and the neighbors or the score that it keeps."""
    speeds = _planner_speeds()[model]
    plans = {plan["goal"]: plan["quality_unseen"]["overlap"] for plan in load("planner")["plans"]}
    kept = _planner_kept().get(model)
    fidelity = f"{plans[model]:.3f}" if model in plans else f"{kept} of the score" if kept else ""
    return [*(times(speeds[int(n)]["vs_exported"]) for n in PEER_LENGTHS), fidelity, ""]


def _planner_kept() -> dict[str, str]:
    """The shares of the score on the unseen pairs, by model."""
    planner = load("planner")
    kept = {plan["goal"]: plan["kept"] for plan in planner["plans"]}
    kept |= {
        "ONNX Runtime's int8": planner["int8_of_onnxruntime_kept"],
        BY_HAND: planner["by_hand_kept"],
    }
    return {model: percent(pairs["unseen.tsv"]) for model, pairs in kept.items()}


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
    speeds, kept = _planner_speeds(), _planner_kept()
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


def peers(kind: str, name: str = "peers") -> str:
    """The encoder in both CPU runtimes beside its peers.

    Args:
        kind: "turns", with another length at each run, or "repeated".
        name: The result file; another folder has those of another CPU.
    """
    rows = [
        [
            row["model"],
            *(times(row[kind][length]["speedup"][0]) for length in PEER_LENGTHS),
            *(f"{row['overlap'][kind]:.3f}" for kind in ("sentences", "paragraphs")),
        ]
        for row in load(name)["rows"]
    ]
    headings = [f"{length} tokens" for length in PEER_LENGTHS]
    return table(["model", *headings, "sentences", "paragraphs"], rows)


def task_score(name: str) -> str:
    """Encoders that keep the score of one task, beside int8 of other tools."""
    if not (RESULTS / f"{name}.json").is_file():
        return "No result of it is committed yet."
    rows = [
        [
            row["model"],
            *(times(row["turns"][length]["speedup"][0]) for length in PEER_LENGTHS),
            "-" if row.get("removal") is None else times(row["removal"]["value"]),
            percent(row["kept"]),
        ]
        for row in load(name)["rows"]
    ]
    headings = [f"{length} tokens" for length in PEER_LENGTHS]
    shown = table(["model", *headings, "by removal", "score kept"], rows)
    return "\n\n".join((shown, source(name), peer_choices(name)))


def peer_choices(name: str = "peers") -> str:
    """What "auto" ran, and what could not run."""
    result = load(name)
    names = {"onnxruntime": "ONNX Runtime", "openvino": "OpenVINO"}
    lines: list[str] = []
    for model, choice in result["choices"].items():
        runtime, long_rows = choice.get("runtime"), choice.get("long_rows")
        ran = names[runtime] if runtime else f"as it is ({choice['why']})"
        if long_rows:
            ran += f", and {names[long_rows['runtime']]} above {long_rows['above']} tokens"
        lines.append(f"- {model}, auto: {ran}")
    lines += [f"- {model}: left out, {reason}" for model, reason in result["left_out"].items()]
    return "\n".join(lines)


def throughput(name: str = "throughput") -> str:
    """Texts per second beside sentence-transformers, and where they were measured."""
    if not (RESULTS / f"{name}.json").is_file():
        return "No result of it is committed yet."
    result = load(name)
    prefix = "sentence-transformers, "
    peers = [row["system"] for row in result["rows"] if row["system"].startswith(prefix)]
    rows = [
        [
            row["system"],
            f"{row['texts_per_s']:.0f}",
            *(times(row["over"][name][0]) for name in peers),
            *(f"{overlap:.3f}" for overlap in row["overlap"].values()),
        ]
        for row in result["rows"]
    ]
    header = ["system", "texts/s", *(f"over {name.removeprefix(prefix)}" for name in peers),
              *(f"overlap@10, {kind}" for kind in result["texts"])]  # fmt: skip
    return "\n\n".join((table(header, rows), source(name)))


def runtimes(name: str) -> str:
    """The speed of the automatic choice of the runtime over each runtime alone."""
    names = {"onnxruntime": "ONNX Runtime", "openvino": "OpenVINO"}
    rows: list[list[str]] = []
    for row in load(name)["rows"]:
        cells = [
            f"{times(value)} ({low:.2f} to {high:.2f})"
            for value, low, high in (row["mean"][runtime] for runtime in names)
        ]
        lowest = min(min(shape[each][0] for each in names) for shape in row["shapes"].values())
        choice = row["choices"]["auto"]
        runtime = names[choice.get("runtime", "onnxruntime")]
        if long := choice.get("long_rows"):
            runtime += f", {names[long['runtime']]} above {long['above']} tokens"
        threads = "1 thread" if row["threads"] == 1 else f"{row['threads']} threads"
        rows.append([f"{row['model']}, {threads}", *cells, times(lowest), runtime])
    header = ["model", *(f"over {name}" for name in names.values()), "lowest at a shape", "runs in"]
    return "\n\n".join((table(header, rows), source(name)))


def rerank(name: str) -> str:
    """Latency and order of a reranker beside its peers, and where they were measured."""
    result = load(name)
    goals, fastest = result["goals"], result["goals"]["fastest_peer"]
    rows = [
        [
            row["system"],
            *(f"{row[key]:.1f} ms" for key in ("p50_ms", "p90_ms")),
            times(row["over"][fastest][0]),
            *(
                f"{row[key]:.4f} ({' to '.join(f'{end:.4f}' for end in row[f'{key}_ci95'])})"
                for key in ("tau", "top1", "ndcg_at_10")
            ),
            *(f"{row['near'][key]:.4f}" for key in ("tau", "top1")),
        ]
        for row in result["rows"]
    ]
    speedup, low, high = goals["over_fastest_peer"]
    best = (
        f"Fastest model of attnserve that keeps the order: {goals['best']}, {times(speedup)}"
        f" ({low:.2f} to {high:.2f}) the speed of {fastest}. {result['queries']} queries with"
        f" {result['documents']} documents each."
    )
    header = ["system", "p50", "p90", "over the fastest peer", "tau", "top-1", "nDCG@10",
              "tau, near", "top-1, near"]  # fmt: skip
    return "\n\n".join((table(header, rows), best, source(name)))


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
    return "\n\n".join((table(header, rows), source(name)))


def _mixture_rows() -> list[dict[str, Any]]:
    """Rows of other tools first, then searches sorted by goal."""
    order = list(MIXTURE_MODELS)
    rows = load("mixture")["rows"]
    return sorted(rows, key=lambda row: (order.index(row["goal"]), row["keep"] or 0.0))


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


def _interval(quality: dict[str, Any] | None) -> str:
    if quality is None:
        return ""
    ends = " to ".join(f"{end:.4f}" for end in quality["ci95"] or ())
    return f"{quality['value']:.4f} ({ends or 'no interval'}), {quality['rows']:,}"


def fidelity() -> str:
    rows = load("fidelity")["results"]
    by_rank: dict[int, dict[str, Any]] = {}
    for row in rows:
        by_rank.setdefault(row["rank"], {})[row["kind"]] = row
    header = ["R", "weights only: kept", "cosine", "calibrated: kept", "cosine"]
    return table(
        header,
        [
            [
                str(rank),
                *(
                    cell
                    for row in kinds.values()
                    for cell in (percent(row["kept"]), f"{row['mean_cosine']:.3f}")
                ),
            ]
            for rank, kinds in by_rank.items()
        ],
    )


def mixing(model: str) -> str:
    """Speeds of the forms of each R; quality where the weights are trained."""
    result = load("mixing")["models"][model]
    quality = {row["form"]: row for row in result.get("quality", ())}
    speeds = {
        (row["form"], (row["batch"], row["sequence"])): times(row["speedup_vs_first"])
        for row in result["speeds"]
    }
    rows: list[list[str]] = []
    for choice in result["chosen"]:
        for kind, words in MIXING_FORMS.items():
            form = f"{kind} {choice['rank']}"
            words += f": {MIXING_FORMS[choice['chosen']]}" if kind == "auto" else ""
            kept = (
                [f"{quality[form]['mean_cosine']:.3f}", percent(quality[form]["kept"])]
                if quality
                else []
            )
            rows.append([
                f"R = {choice['rank']}, {words}", f"{result['errors'][form]:.3f}", *kept,
                *(speeds[form, shape] for shape in MIXING_SHAPES),
            ])  # fmt: skip
    shapes = [f"{batch} x {length}" for batch, length in MIXING_SHAPES]
    return table(["form", "error", *(["cosine", "kept"] if quality else []), *shapes], rows)


def reuse_prune() -> str:
    return table(
        ["rewrite", "no refit: cosine", "kept", "refit: cosine", "kept"],
        [
            [
                REUSE_CASES.get(row["case"], row["case"]),
                *(
                    cell
                    for key in ("without_refit", "refit")
                    for cell in (f"{row[key]['mean_cosine']:.3f}", percent(row[key]["kept"]))
                ),
            ]
            for row in load("reuse_prune")["results"]
        ],
    )


def reuse_prune_speed() -> str:
    return table(
        ["rewrite", "tokens", "speed-up", "95% interval"],
        [
            [
                REUSE_CASES.get(row["case"], row["case"]),
                str(row["sequence"]),
                times(row["speedup"]),
                " to ".join(times(end) for end in row["speedup_ci95"]),
            ]
            for row in load("reuse_prune")["speed"]
        ],
    )


def rotary() -> str:
    """Shortened keys of a model with rotary positions."""
    return table(
        ["rewrite", "key elements", "MACs of a row", "same next token"],
        [
            [
                {"shared": "`--collab-dk`", "truncated": "`--head-dk`"}[row["form"]],
                str(row["key_elements"]),
                f"{row['macs'] / 1e6:.0f} M",
                percent(row["top1"]),
            ]
            for row in load("rotary")["results"]
            if row["calibrated"]
        ],
    )


def shapes() -> str:
    """Speed and memory of pruned rotary models."""
    lengths = ("128", "512")
    return table(
        ["shape", *(f"{n} tokens, of {what}" for n in lengths for what in ("exported", "best")),
         "memory / model"],
        [
            [
                row["shape"],
                *(
                    times(value)
                    for n in lengths
                    for value in (row["speedup_over"][n]["as exported"], row["vs_best"][n])
                ),
                f"{row['peak_rss_bytes'] / row['model_bytes']:.1f}",
            ]
            for row in load("shapes")["rows"]
        ],
    )  # fmt: skip


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


TASK_SCORES = {"sts": "STS-B dev, Spearman", "classification": "SST-2 dev, accuracy"}


def _finetuned() -> dict[str, dict[int | None, list[dict[str, Any]]]]:
    """The rows of the seeds by task and R, the control last."""
    found: dict[str, dict[int | None, list[dict[str, Any]]]] = {}
    rows = load("finetuning")["rows"]
    for row in sorted(rows, key=lambda row: (row["task"], -(row["rank"] or 0), row["seed"])):
        found.setdefault(row["task"], {}).setdefault(row["rank"], []).append(row)
    return found


def _mean_of(rows: list[dict[str, Any]], key: str) -> float:
    return sum(row[key] for row in rows) / len(rows)


def onnxsim() -> str:
    """Head pruning beside onnxsim's, on the one graph that onnxsim prunes."""
    rows = load("reuse_prune")["onnxsim"]
    tools = list(dict.fromkeys(row["tool"] for row in rows))
    shares = list(dict.fromkeys(row["share"] for row in rows))
    cosine = {(row["tool"], row["share"]): f"{row['mean_cosine']:.3f}" for row in rows}
    return table(
        ["mean cosine", *(f"{share:.0%} of heads pruned" for share in shares)],
        [[tool, *(cosine[tool, share] for share in shares)] for tool in tools],
    )


def serving_throughput() -> str:
    result = load("serving")["throughput"]
    rates, ratios = result["median_texts_per_s"], result["median_ratio"]
    names = {ours: SYSTEMS[ours].replace("`", "") for ours in result["compared"].values()}
    return table(
        ["system", "texts per second", "attnserve is faster by"],
        [
            [
                shown,
                f"{rates[system]:.0f}",
                f"{times(ratios[system])} ({names[result['compared'][system]]})"
                if system in ratios
                else "",
            ]
            for system, shown in SYSTEMS.items()
        ],
    )


def serving_searched() -> str:
    result = load("serving")["searched"]
    over_plain, over_fastest = (
        {name: ratios[peer] for name, ratios in result["median_ratio"].items()}
        for peer in ("plain", result["fastest_peer"])
    )
    scaling = result["two_workers_over_one"]
    return table(
        ["system", "texts per second", "plain handler", "fastest peer", "two workers", "overlap"],
        [
            [
                name,
                f"{statistics.median(rates):.0f}",
                times(over_plain[name]) if name in over_plain else "",
                times(over_fastest[name]) if name in over_fastest else "",
                times(scaling[name]) if name in scaling else "",
                f"{result['quality'][name]['overlap']:.3f}" if name in result["quality"] else "",
            ]
            for name, rates in result["texts_per_s"].items()
        ],
    )


def serving_latency() -> str:
    added = load("serving")["latency"]["added_ms"]
    names = {
        "ours": "`attnserve serve`",
        "plain": "FastAPI handler",
        "ours, over runs with pauses": "`attnserve serve`, over runs with 1 ms between them",
    }
    return table(
        ["added to one run of the served graph", "p50", "p90", "p99"],
        [
            [shown, *(f"{added[name][q]:.2f} ms" for q in ("p50", "p90", "p99"))]
            for name, shown in names.items()
        ],
    )


def serving_overload() -> str:
    phases = load("serving")["overload"]["phases"]
    statuses = ("200", "429", "504")
    return table(
        ["phase", "offered per second", *(f"HTTP {code}" for code in statuses), "p50", "p99"],
        [
            [
                name,
                f"{phase['offered_per_s']:.0f}",
                *(f"{phase['statuses'].get(code, 0):,}" for code in statuses),
                f"{phase['latency_ms']['p50']:.0f} ms",
                f"{phase['latency_ms']['p99']:.0f} ms",
            ]
            for name, phase in phases.items()
        ],
    )


def serving_footprint() -> str:
    """Resident memory of a server and of the process that checks models."""
    servers = load("serving")["footprint"]["servers"]

    def row(name: str, server: str, part: str, *, warm: bool) -> list[str]:
        found = servers[server]
        peaks = (found["start"][part], found["replacement"][part])
        cells = (found["warm_bytes"] if warm else 0, *peaks)
        return [name, *(f"{cell / 2**20:.0f} MiB" if cell else "" for cell in cells)]

    return table(
        ["MiniLM", "warm", "peak of the start", "peak of a replacement"],
        [
            row("server", "with the check", "server", warm=True),
            row("process that checks the model", "with the check", "check", warm=False),
            row("both at the same time", "with the check", "both", warm=True),
            row("server with `--no-probe`", "without", "server", warm=True),
        ],
    )


UTILIZATION = 0.6
"""The planned share of a replica's capacity."""


def capacity() -> str:
    """Capacity and cost of one replica."""
    result = load("serving")
    found = result["throughput"]
    rate = found["median_texts_per_s"]["attnserve"]
    cost = found["last_round"]["attnserve"]["per_text"]
    latency = result["overload"]["phases"]["before"]["latency_ms"]
    hours = 1e6 / rate / 3600
    rows = {
        "cores": f"{len(found['server_cores'])}",
        "texts per second at saturation, one text per request": f"{rate:.0f}",
        "tokens per text": f"{cost['tokens']:.1f}",
        "MACs per text, with padding": f"{cost['macs'] / 1e9:.3f} G",
        "MACs per second at saturation": f"{cost['macs'] * rate / 1e9:.1f} G",
        "latency at half the capacity, p50 and p99": f"{latency['p50']:.1f} ms,"
        f" {latency['p99']:.1f} ms",
        "memory after warm-up": f"{result['memory']['rss_before_bytes'] / 2**20:.0f} MiB",
        "MACs per million texts": f"{cost['macs'] * 1e6 / 1e12:.0f} T",
        "machine-hours per million texts, fully used": f"{hours:.2f}",
        f"machine-hours per million texts, {UTILIZATION:.0%} used": f"{hours / UTILIZATION:.2f}",
    }
    return table(["one replica", "value"], [list(row) for row in rows.items()])


def replicas() -> str:
    """Number of replicas for a peak load, with one spare."""
    rate = load("serving")["throughput"]["median_texts_per_s"]["attnserve"]
    peaks = (100, 1_000, 10_000, 100_000)
    needed = [math.ceil(peak / (UTILIZATION * rate)) + 1 for peak in peaks]
    return table(
        ["peak, texts per second", *(f"{peak:,}" for peak in peaks)],
        [["replicas", *(f"{count:,}" for count in needed)]],
    )


def table1() -> str:
    """Table 1 of arXiv 2006.16362, computed and measured here."""
    rows: list[list[str]] = []
    for column in load("table1")["columns"]:
        low, high = column["speedup_ci95"]
        rows.append(
            [
                f"{column['name']}: D = {column['size']}, H = {column['heads']},"
                f" R = {column['rank']}",
                " to ".join(f"{number / 1e6:.2f} M" for number in column["parameters"]),
                " to ".join(f"{number / 1e6:.0f} M" for number in column["macs"]),
                f"{times(column['speedup'])} ({low:.2f} to {high:.2f})",
                f"{column['break_even_tokens']} tokens",
            ]
        )
    header = ["layer", "parameters", "MACs", "speed-up", "dense mixing is cheaper below"]
    return table(header, rows)


def cp_speed() -> str:
    result = load("cp_speed")
    shape = result["shape"]
    size = f"H = {shape['H']}, D = {shape['D']}, K = {shape['K']}, R = {shape['R']}"
    return table(
        ["decomposition of one layer", "value"],
        [
            ["size", size],
            ["median time", f"{result['median_layer_wall_s']:.1f} s"],
            ["peak extra memory", f"{result['peak_extra_memory_bytes'] / 2**20:.0f} MiB"],
            [
                "time of tensorly `parafac` to the same error / ours",
                f"{result['median_wall_ratio']:.0f}x",
            ],
        ],
    )


def inspect_speed() -> str:
    rows = [row for row in load("find_speed")["models"] if row["size"] == "BERT-base"]
    return table(
        ["BERT-base with layers", "file", "time of `inspect`", "peak extra memory"],
        [
            [
                str(row["layers"]),
                f"{row['file_bytes'] / 2**20:.0f} MiB",
                f"{row['median_wall_s']:.2f} s",
                f"{row['peak_extra_bytes'] / 2**20:.0f} MiB",
            ]
            for row in rows
        ],
    )


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


def loading() -> str:
    """Load time and memory in one runtime and in both."""
    return table(
        ["precision", "runtimes", "first load, s", "later loads, s", "memory, MB", "file, MB"],
        [
            [
                row["precision"],
                row["runtimes"],
                f"{row['first_s']:.2f}",
                f"{row['again_s']:.2f}",
                f"{row['memory_bytes'] / 1e6:.0f}",
                f"{row['file_bytes'] / 1e6:.0f}",
            ]
            for row in load("loading")["rows"]
        ],
    )


def int8() -> str:
    """Quality, batch dependence and speed of int8 schemes."""
    result = load("int8")
    lengths = [int(key.removeprefix("speedup_")) for key in result["schemes"][0] if "speed" in key]
    return table(
        ["activations and weights", "cosine", "R^2", "Spearman", "batch difference"]
        + [f"{length} tokens" for length in lengths],
        [
            [
                row["name"],
                f"{row['cosine']:.4f}",
                f"{row['r2']:.4f}",
                f"{row['spearman']:.4f}",
                f"{row['batch_difference']:.0e}" if row["batch_difference"] else "0",
                *(f"{row[f'speedup_{length}']:.2f}x" for length in lengths),
            ]
            for row in result["schemes"]
        ],
    )


def cuda() -> str:
    """The goals on a GPU and what was measured of them, and all forms by shape, for each card."""
    parts: list[str] = []
    for path in sorted(RESULTS.glob("cuda-*.json")):
        result = load(path.stem)
        machine = result["machine"]
        parity = result["parity"]
        error = parity if isinstance(parity, str) else f"{max(parity.values()):.0e}"
        parts.append(
            f"{machine['gpu']}, ONNX Runtime {machine['onnxruntime']}. Parity in float32: largest"
            f" difference {error}."
        )
        parts += [_gpu_goals(result), *_gpu_forms(result)]
        parts.append(f"*Command: `{result['command']}`. Data: `benchmarks/results/{path.name}`.*")
    return "\n\n".join(parts) or "Nothing was measured."


def _gpu_goals(result: Mapping[str, Any]) -> str:
    rows: list[list[str]] = []
    for bound in result["bounds"]:
        low, high, value = bound["at_least"], bound["at_most"], bound["value"]
        goal = f"at least {low}" if low is not None else f"at most {high}"
        rows.append([bound["what"], goal, "not measured" if value is None else f"{value:.2f}"])
    return table(["quantity", "goal", "measured"], rows)


def _gpu_forms(result: Mapping[str, Any]) -> Iterator[str]:
    """Speed-ups over the exported model in float16, by size."""
    for label, size in result["sizes"].items():
        latency: dict[tuple[int, int], dict[str, float]] = {}
        for cell in size["cells"]:
            if "p50_ms" in cell:
                shape = cell["batch"], cell["sequence"]
                latency.setdefault(shape, {})[cell["form"]] = cell["p50_ms"]
        forms = [form for form in dict.fromkeys(chain(*latency.values())) if "fp32" not in form]
        forms = [form for form in forms if form != "fp16"]
        rows = [
            [f"{shape[0]} x {shape[1]}"]
            + [times(each["fp16"] / each[form]) if form in each else "" for form in forms]
            for shape, each in sorted(latency.items())
            if "fp16" in each
        ]
        yield f"{label}: speed-up over the exported model in float16, by texts x tokens"
        yield table(["", *(form.removesuffix(" fp16") for form in forms)], rows)


def with_results(readme: str) -> str:
    """The README with its table of results as measured."""
    return README_TABLE.sub(lambda match: f"{match[1]}{results()}\n{match[2]}", readme)


def write_readme() -> None:
    path = ROOT / "README.md"
    path.write_text(with_results(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    write_readme()
