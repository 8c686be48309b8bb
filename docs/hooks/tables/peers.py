"""Tables of models of attnserve beside those of other tools."""

from __future__ import annotations

from docs.hooks.tables.results import is_measured, load, percent, source, table, times
from docs.hooks.tables.runtimes import RUNTIMES

PEER_LENGTHS = ("16", "32", "128", "512")


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
    if not is_measured(name):
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
