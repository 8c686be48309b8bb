"""Check the committed benchmark results against the goals of the project."""

from __future__ import annotations

import pytest

from benchmarks.quality import MODELS
from docs.hooks.tables.results import load


@pytest.mark.parametrize("model", ["MiniLM", "BERT-base"])
def test_auto_mixing_is_not_slower_than_the_fused_original_or_the_best_form(model: str):
    """``--collab-dk`` at a half, a third and a quarter: 0.98 at every shape, 0.98 of the best.

    Two files of one form differ by up to 0.03 in the mean of one run, and by 0.1 at one shape. So
    the choice of the best form counts, and at a shape the upper end of the interval.
    """
    found = load("mixing")["models"][model]
    shapes = {(row["batch"], row["sequence"]) for row in found["speeds"]}
    assert shapes >= {(batch, length) for batch in (1, 8) for length in (16, 128, 512)}
    assert len(found["summary"]) == 3
    for row, choice in zip(found["summary"], found["chosen"], strict=True):
        cells = [cell for cell in found["speeds"] if cell["form"] == f"auto {row['rank']}"]
        assert min(cell["speedup_ci95"][1] for cell in cells) >= 0.98
        assert choice["chosen"] == row["best"] or row["auto_vs_best"] >= 0.98


def test_auto_mixing_loses_no_more_than_dense_mixing():
    found = load("mixing")["models"]["MiniLM"]
    quality = {row["form"]: row["mean_cosine"] for row in found["quality"]}
    for choice in found["chosen"]:
        assert quality[f"dense {choice['rank']}"] - quality[f"auto {choice['rank']}"] <= 0.003


SEARCH_RUNS = 180 / 0.0289
"""Longest search, in runs of the exported model at 128 tokens: 180 s on the machine where the goal
was set. Machines differ in speed by more than the search may vary."""


def test_planner_reaches_its_quality_and_speed_goals():
    """Speeds are relative to the fastest of the exported model and two stock optimizers."""
    planned = load("planner")
    speeds = {(row["model"], row["sequence"]): row for row in planned["speeds"]}
    plans = {row["goal"]: row for row in planned["plans"] if row["calibrated_on"] == "--train"}
    for goal, share, at_128, at_512 in (
        ("attention", 0.99, 1.14, 1.27),
        ("with feed-forwards", 0.99, 1.5, 1.5),
        ("with feed-forwards, int8", 0.99, 2.5, 2.3),
    ):
        assert speeds[goal, 128]["vs_best"] >= at_128
        assert speeds[goal, 512]["vs_best"] >= at_512
        assert min(plans[goal]["kept"].values()) >= share - 0.003
        assert min(row["vs_exported"] for (name, _), row in speeds.items() if name == goal) >= 0.97
    run_s = speeds["as exported", 128]["p50_ms"] / 1000
    assert plans["with feed-forwards"]["seconds"] / run_s <= SEARCH_RUNS
    for length in (128, 512):
        assert speeds["with feed-forwards, int8", length]["vs_int8"] >= 1.15
    by_hand = [row for (name, _), row in speeds.items() if name == "R = 128 by hand"]
    assert min(row["vs_exported"] for row in by_hand) >= 0.97


def test_static_int8_is_closer_than_dynamic_int8_as_fast_and_batch_invariant():
    """Timing noise is some percent: at least 0.97 of the speed of dynamic quantization."""
    rows = {row["name"]: row for row in load("int8")["schemes"]}
    for bits in (7, 8):
        dynamic, ours = (
            rows[f"dynamic, {bits} bits"],
            rows[f"static, smoothed, corrected, {bits} bits"],
        )
        per_row = rows[f"per row, {bits} bits"]
        for row in (ours, per_row):
            assert row["r2"] >= max(0.98, dynamic["r2"]) and row["cosine"] > dynamic["cosine"]
            assert row["batch_difference"] == 0 < dynamic["batch_difference"]
    speeds = [key for key in rows["float32"] if key.startswith("speedup")]
    dynamic, ours = rows["dynamic, 7 bits"], rows["static, smoothed, corrected, 7 bits"]
    assert all(ours[key] >= 0.97 * dynamic[key] for key in speeds)


def test_searches_keep_their_promises_on_unseen_rows():
    rows = load("quality")["rows"]
    assert {row["model"] for row in rows} == set(MODELS)
    assert not [(row["model"], row["keep"]) for row in rows if "promise" in row["disagree"]]


def test_a_language_model_keeps_tokens_and_perplexity():
    """At 0.99: next-token agreement 0.97, and a perplexity that is at most 1 % higher."""
    rows = {(row["model"], row["keep"]): row for row in load("quality")["rows"]}
    for model in ("stories", "wikitext"):
        row = rows[model, 0.99]
        assert row["unseen"]["value"] >= 0.97
        assert row["task"]["new"] <= 1.01 * row["task"]["original"]


def test_pruned_rotary_shapes_are_faster_than_the_best_stock_graph():
    for row in load("shapes")["rows"]:
        assert min(row["vs_best"].values()) >= 1.25


def test_rotary_forms_are_exact_at_full_size_and_sharing_loses_less():
    """Logits change by at most 1e-4 at full size; top-1 agreement at equal key elements below."""
    rows = {(r["form"], r["key_elements"]): r for r in load("rotary")["results"] if r["calibrated"]}
    for form in ("truncated", "shared"):
        assert rows[form, 32]["largest_change"] <= 1e-4
    for elements in (24, 16):
        assert rows["shared", elements]["top1"] >= rows["truncated", elements]["top1"] + 0.1


def test_training_brings_back_the_score_and_most_of_the_similarities():
    (row,) = [
        row for row in load("recovery")["rows"] if row["case"].startswith("half of the heads")
    ]
    before, after = row["before"], row["after"]
    assert after["kept"] >= 1.0 > before["kept"]
    assert after["mean_cosine"] >= 0.98 > before["mean_cosine"]
    for kind in ("sentences", "paragraphs"):
        assert 1 - after[kind]["r2"] <= (1 - before[kind]["r2"]) / 2
