"""The table of the README: ``python -m docs.hooks.tables.readme`` updates it."""

from __future__ import annotations

import re

from docs.hooks.tables.peers import PEER_LENGTHS, by_removal, removal_heading
from docs.hooks.tables.results import ROOT, load, source, table, times
from docs.hooks.tables.searches import BY_HAND, planner_kept, planner_rows

README_TABLE = re.compile(r"(<!-- results -->\n).*?(<!-- /results -->)", re.DOTALL)

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


def results() -> str:
    """The table of the README: speed and fidelity of attnserve and of other tools."""
    result = load("peers")
    sources = [source("peers")]
    removal = removal_heading(result["rows"])
    found = {
        row["model"]: [
            *(times(row["turns"][length]["speedup"][0]) for length in PEER_LENGTHS),
            *(by_removal(row) for _ in removal),
            *(f"{row['overlap'][kind]:.3f}" for kind in ("sentences", "paragraphs")),
        ]
        for row in result["rows"]
    }
    if lacking := STAND_INS.keys() - found:
        found |= {name: _stand_in(STAND_INS[name], removal) for name in lacking}
        sources.append(f"Rows without paragraphs: {source('planner')}")
    default = "bfloat16" if any("bf16" in flag for flag in result["cpu_flags"]) else "float32"
    rows = [
        [shown.format(default=default), *found[name]]
        for name, shown in README_MODELS.items()
        if name in found
    ]
    headings = [f"{length} tokens" for length in PEER_LENGTHS]
    header = ["model", *headings, *removal, "sentences", "paragraphs"]
    return "\n\n".join((table(header, rows), *sources))


def _stand_in(model: str, removal: list[str]) -> list[str]:
    """Speeds of a model of planner.json, and the neighbors or the score that it keeps."""
    speeds = planner_rows()[model]
    plans = {plan["goal"]: plan["quality_unseen"]["overlap"] for plan in load("planner")["plans"]}
    kept = planner_kept().get(model)
    fidelity = f"{plans[model]:.3f}" if model in plans else f"{kept} of the score" if kept else ""
    shown = [times(speeds[int(n)]["vs_exported"]) for n in PEER_LENGTHS]
    return [*shown, *("-" for _ in removal), fidelity, ""]


def with_results(readme: str) -> str:
    """The README with its table of results as measured."""
    return README_TABLE.sub(lambda match: f"{match[1]}{results()}\n{match[2]}", readme)


def write_readme() -> None:
    path = ROOT / "README.md"
    path.write_text(with_results(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    write_readme()
