"""Tables of models of attnserve beside those of other tools."""

from __future__ import annotations

from typing import Any

from docs.hooks.tables.results import is_measured, load, percent, source, table, times
from docs.hooks.tables.runtimes import RUNTIMES

PEER_LENGTHS = ("16", "32", "128", "512")


def peers(kind: str, name: str = "peers") -> str:
    """The encoder in both CPU runtimes beside its peers.

    Args:
        kind: "turns", with another length at each run, or "repeated".
        name: The result file; another folder has those of another CPU.
    """
    found = load(name)["rows"]
    removal = removal_heading(found)
    rows = [
        [
            row["model"],
            *(times(row[kind][length]["speedup"][0]) for length in PEER_LENGTHS),
            *(by_removal(row) for _ in removal),
            *(f"{row['overlap'][texts]:.3f}" for texts in ("sentences", "paragraphs")),
        ]
        for row in found
    ]
    headings = [f"{length} tokens" for length in PEER_LENGTHS]
    return table(["model", *headings, *removal, "sentences", "paragraphs"], rows)


def removal_heading(rows: list[dict[str, Any]]) -> list[str]:
    """The heading of ``by_removal``; older results lack it."""
    return ["by removal"] if any("removal" in row for row in rows) else []


def by_removal(row: dict[str, Any]) -> str:
    """The speed-up over the fused original in the same precision."""
    return times(row["removal"]["value"]) if row.get("removal") else "-"


def bert_base(name: str) -> str:
    """int8 in the shape of BERT-base, beside NNCF."""
    if not is_measured(name):
        return "No result of it is committed yet."
    rows = load(name)["rows"]
    cells = [[row["model"], *(times(row["turns"][n]["speedup"][0]) for n in PEER_LENGTHS)]
             for row in rows]  # fmt: skip
    level: list[str] = []
    for length in PEER_LENGTHS:
        timed = {row["model"]: row["turns"][length] for row in rows}
        peer, ours = (
            min(
                (model for model in timed if model.startswith(kinds)),
                key=lambda model: timed[model]["p50_ms"],
            )
            for kinds in ("NNCF", "fused int8")
        )
        value, low, high = timed[ours]["over"][peer]
        level.append(f"{times(value)} ({low:.2f} to {high:.2f})")
    cells.append(["fastest int8 of attnserve over the faster model of NNCF", *level])
    shown = table(["model", *(f"{length} tokens" for length in PEER_LENGTHS)], cells)
    return "\n\n".join((shown, source(name), peer_choices(name)))


OPERATORS = ("projections", "attention", "feed-forward", "normalization", "conversions", "other")


def operators(name: str) -> str:
    """The share of the time of a run by kind of operator."""
    if not is_measured(name):
        return "No result of it is committed yet."
    rows = [
        [
            f"{row['model']}, {row['tokens']} tokens",
            f"{row['ms']:.1f} ms",
            *(f"{row['share'][kind]:.0%}" for kind in OPERATORS),
        ]
        for row in load(name)["rows"]
    ]
    return "\n\n".join((table(["model", "time of a run", *OPERATORS], rows), source(name)))


def task_score(name: str) -> str:
    """Encoders that keep the score of one task, beside int8 of other tools."""
    if not is_measured(name):
        return "No result of it is committed yet."
    rows = [
        [
            row["model"],
            *(times(row["turns"][length]["speedup"][0]) for length in PEER_LENGTHS),
            by_removal(row),
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
    lines: list[str] = []
    for model, choice in result["choices"].items():
        runtime, long_rows = choice.get("runtime"), choice.get("long_rows")
        ran = RUNTIMES[runtime] if runtime else f"as it is ({choice['why']})"
        if long_rows:
            ran += f", and {RUNTIMES[long_rows['runtime']]} above {long_rows['above']} tokens"
        lines.append(f"- {model}, auto: {ran}")
    lines += [f"- {model}: left out, {reason}" for model, reason in result["left_out"].items()]
    return "\n".join(lines)


def throughput(name: str = "throughput") -> str:
    """Texts per second beside sentence-transformers, and where they were measured."""
    if not is_measured(name):
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
