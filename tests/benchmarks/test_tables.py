"""Tables of results that are not committed on every machine, from small results."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from docs.hooks.tables import peers, readme, results, searches, serving

Write = Callable[..., None]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Write a result file with the entries that all have."""
    monkeypatch.setattr(results, "RESULTS", tmp_path)

    def write(name: str, **content: Any) -> None:
        common = {"command": "run", "machine": {"cpu": "a CPU", "threads": 1}, "cpu_flags": []}
        (tmp_path / f"{name}.json").write_text(json.dumps({**common, **content}), encoding="utf-8")

    return write


@pytest.mark.parametrize(
    "table", [peers.bert_base, peers.operators, serving.request_cost, peers.throughput]
)
def test_table_without_a_result_says_so(table: Callable[[str], str], write: Write):
    assert table("missing") == "No result of it is committed yet."


def cells(p50_ms: float, **over: float) -> dict[str, Any]:
    ratios = {name.replace("_", " "): [ratio, ratio, ratio] for name, ratio in over.items()}
    cell = {"speedup": [1.0, 1.0, 1.0], "p50_ms": p50_ms, "over": ratios}
    return dict.fromkeys(peers.PEER_LENGTHS, cell)


def test_int8_is_compared_with_the_faster_model_of_nncf(write: Write):
    rows = [
        {"model": "NNCF int8, rest float32", "turns": cells(4.0)},
        {"model": "NNCF int8, rest bfloat16", "turns": cells(3.0)},
        {"model": "fused, ONNX Runtime float32", "turns": cells(1.0)},
        {"model": "fused int8-full, OpenVINO", "turns": cells(5.0)},
        {
            "model": "fused int8-full, auto",
            "turns": cells(
                2.0, **{"NNCF int8, rest bfloat16": 1.5, "NNCF int8, rest float32": 2.0}
            ),
        },
    ]
    write("bert_base", rows=rows, choices={}, left_out={"a peer": "not installed"})
    shown = peers.bert_base("bert_base")
    assert f"over the faster model of NNCF |{' 1.50x (1.50 to 1.50) |' * 4}" in shown
    assert "a peer: left out, not installed" in shown


@pytest.mark.parametrize("removal", [None, {"value": 1.25, "ci95": [1.2, 1.3]}])
def test_gain_of_removal_has_a_column_once_it_is_measured(removal: Any, write: Write):
    kept = {"sentences": 1.0, "paragraphs": 1.0}
    row: dict[str, Any] = {"turns": cells(1.0), "overlap": kept}
    names = [*readme.README_MODELS]
    write("peers", rows=[{"model": name, **row} for name in names])
    assert "by removal" not in peers.peers("turns") + readme.results()
    measured = [{"model": name, **row, "removal": None} for name in names]
    measured[0]["removal"] = removal
    write("peers", rows=measured)
    for table in (peers.peers("turns"), readme.results()):
        header, _, first, *others = table.split("\n\n")[0].splitlines()
        assert "| by removal |" in header
        assert (" 1.25x |" if removal else " - |") in first
        assert all(" - |" in line for line in others)


def test_shares_of_operators_and_costs_of_requests_are_shown(write: Write):
    share = dict.fromkeys(peers.OPERATORS, 0.125)
    write("operators", rows=[{"model": "a model", "tokens": 128, "ms": 7.25, "share": share}])
    shown = peers.operators("operators")
    assert f"| a model, 128 tokens | 7.2 ms |{' 12% |' * len(share)}" in shown
    rates = {"requests of 32": [100.0, 110.0], "single texts": [80.0, 90.0]}
    write(
        "request_cost", rows=[{"model": "m", "texts_per_s": rates, "share": [0.81, 0.8, 0.82]}],
        cost=[{"clients": 8, "cpu_ms": 1.25, "session_ms": 0.125}], tokens=[29, 32], threads=2,
    )  # fmt: skip
    shown = serving.request_cost("request_cost")
    assert "| m | 105 | 85 | 81% (80% to 82%) |" in shown
    assert "| 8 | 1.25 ms | 0.12 ms |" in shown and "2 threads" in shown


def test_index_says_which_precisions_were_tried_and_that_none_is_faster(write: Write):
    unseen = {"index": {"value": 0.99, "overlap": 0.9}, "similarity": {"value": 0.99}}
    rows = [
        {"name": f"{measure}-{precision}", "measure": measure, "precision": precision,
         "keep": 0.99, "unseen": unseen}
        for measure in ("index", "similarity")
        for precision in ("float32", "int8-full")
    ]  # fmt: skip
    timed = {"index-float32": 1.01, "similarity-float32": 1.1, "similarity-int8-full": 4.0}
    speeds = [
        {"model": name, "sequence": length, "vs_fused": ratio}
        for name, ratio in timed.items()
        for length in (8, 32)
    ]
    write("index", rows=rows, speeds=speeds)
    shown = searches.index("index")
    assert "- index, 0.99: no precision makes queries faster; tried: float32, int8-full" in shown
    assert "- similarity, 0.99: int8-full makes queries 4.00x as fast on average" in shown
    assert "| index, int8-full, 0.99 | - | - | - | - | - |" in shown
