"""Tables of single rewrites: their quality, their speed, and the time that they take."""

from __future__ import annotations

from typing import Any

from docs.hooks.tables.results import load, percent, table, times

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
