"""The measure "index" from the command line to the record, the card and the report."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from tests.attnserve.cli.commands import Cli, refused
from tests.files import last_entry
from tests.texts import WORDS


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ATTNSERVE_CACHE", str(tmp_path / "cache"))


def rows(queries: int, documents: int) -> str:
    chosen = random.Random(0)
    lines = ["role\ttext"]
    for role, count, words in (("query", queries, 4), ("document", documents, 12)):
        lines += [f"{role}\t{' '.join(chosen.choices(WORDS, k=words))}" for _ in range(count)]
    return "\n".join(lines)


@pytest.fixture
def split(tmp_path: Path) -> Path:
    path = tmp_path / "split.tsv"
    path.write_text(rows(80, 120))
    return path


def test_optimize_states_the_index_and_the_symmetric_measures(
    cli: Cli, tiny: Path, split: Path, tmp_path: Path
):
    new = tmp_path / "new"
    given = ("--int8", "--calib", split, "--measure", "index")
    quality = cli("optimize", tiny, "-o", new, *given, "--json").json()["quality"]
    assert quality["measure"] == "index" and 0 < quality["value"] < 1
    assert {"similarity", "overlap", "r2"} < quality.keys()
    assert quality["rows"] > 20 and quality["documents"] > 30
    entry = last_entry(new)
    assert entry["quality"] == quality and entry["calibration"]["documents"] > 100
    card = (new / "README.md").read_text()
    assert "| index |" in card and f"overlap {quality['overlap']:.4f}" in card
    assert f"{quality['rows']} queries, {quality['documents']} documents" in card
    assert cli("report", new).code == 0
    page = next(new.glob("*.html")).read_text()
    assert "queries by this model" in page and f"{quality['documents']} documents" in page


def test_verify_measures_the_index(cli: Cli, tiny: Path, split: Path, tmp_path: Path):
    same = cli("verify", tiny, tiny, "--data", split, "--measure", "index", "--json").json()
    assert same["quality"]["value"] == same["quality"]["overlap"] == 1
    assert same["quality"]["documents"] == 120 and same["quality"]["rows"] == 80
    shown = cli("verify", tiny, tiny, "--data", split, "--measure", "index").out
    assert "index 1.0000" in " ".join(shown.split()) and "overlap 1.0000" in " ".join(shown.split())


def test_verify_without_roles_compares_all_rows(cli: Cli, tiny: Path, sentences: Path):
    found = cli("verify", tiny, tiny, "--data", sentences, "--measure", "index", "--json").json()
    assert found["quality"]["rows"] == 60 and "documents" not in found["quality"]


@pytest.mark.timing(seconds=10)
@pytest.mark.usefixtures("cache")
def test_plan_and_search_keep_the_index(cli: Cli, tiny: Path, split: Path, tmp_path: Path):
    goal = ("--keep", 0.7, "--allow", "ffn", "--measure", "index", "--threads", 1)
    plan = tmp_path / "plan.json"
    planned = cli("plan", tiny, "-o", plan, "--calib", split, *goal, "--json").json()
    assert planned["quality"]["measure"] == "index" and planned["quality"]["value"] >= 0.7
    asked = json.loads(plan.read_text())["asked"]
    assert asked["measure"] == "index"
    assert max(asked["sequences"]) < 9, "timed at the lengths of queries"
    new = tmp_path / "new"
    cli("optimize", tiny, "-o", new, "--calib", split, "--plan", plan, "--json").json()
    assert last_entry(new)["quality"]["measure"] == "index"
    searched = cli("optimize", tiny, "-o", tmp_path / "s", "--calib", split, *goal, "--json").json()
    assert searched["quality"] == planned["quality"]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (rows(60, 0), "0 the role document"),
        (rows(60, 1), "1 the role document"),
        (rows(0, 60), "0 rows have the role query"),
        (rows(60, 3), "needs a query and two documents"),
        ("role\ttext\nquery\ta dog\npassage\ta cat", "line 3"),
        ("role\ttext\nquery\ta dog\ndocument", "line 3"),
    ],
)
def test_files_with_too_few_documents_are_refused(
    text: str, value: str, cli: Cli, tiny: Path, tmp_path: Path
):
    path = tmp_path / "hostile.tsv"
    path.write_text(text)
    new = tmp_path / "new"
    done = cli("optimize", tiny, "-o", new, "--calib", path, "--int8", "--measure", "index")
    refused(done, value)
    assert not new.exists()


def test_few_documents_give_a_warning_and_no_search(cli: Cli, tiny: Path, tmp_path: Path):
    path = tmp_path / "few.tsv"
    path.write_text(rows(60, 7))
    new, given = tmp_path / "new", ("--calib", path, "--measure", "index")
    done = cli("optimize", tiny, "-o", new, *given, "--int8")
    assert done.code == 0 and "queries searched 2 held-out documents" in done.err
    refused(cli("optimize", tiny, "-o", tmp_path / "s", *given, "--keep", 0.9), "7 documents")
