"""Calibration files whose rows are queries or documents."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from attnserve.data.datasets import Dataset, load_inputs, require_rows
from attnserve.data.row_batches import row_info
from attnserve.data.splits import LEAST_SEARCHED
from attnserve.data.text_files import read_roles
from attnserve.models.artifact import open_artifact
from attnserve.models.onnx_files import load_model
from graph_passes.errors import InvalidData
from tests.errors import raises
from tests.files import write_lines

QUERIES = [f"dog {'cat ' * n}is" for n in range(1, 22)]
DOCUMENTS = [f"the man {'is playing ' * n}guitar" for n in range(1, 29)]


def table(path: Path, *rows: Sequence[str], header: str = "role\ttext") -> Path:
    return write_lines(path, [header, *map("\t".join, rows)])


@pytest.fixture
def split(tmp_path: Path) -> Path:
    rows = [("query", text) for text in QUERIES] + [("document", text) for text in DOCUMENTS]
    rows = [rows[i] for i in np.random.default_rng(0).permutation(len(rows))]
    return table(tmp_path / "split.tsv", *rows)


def read(path: Path | Sequence[Path], folder: Path, **options: Any) -> Dataset:
    artifact = open_artifact(folder)
    return load_inputs(path, load_model(artifact), artifact, **options)


def counts(batches: Sequence[Any]) -> tuple[int, int]:
    """The number of queries and of documents."""
    found = {"query": 0, "document": 0}
    for batch in batches:
        role = row_info(batch).role
        assert role is not None
        found[role] += len(batch["input_ids"])
    return found["query"], found["document"]


def test_each_part_has_queries_and_documents(split: Path, tiny: Path):
    data = read(split, tiny)
    assert [counts(part) for part in (data.choose, *data.verify)] == [(3, 4)] * 3
    assert counts(data.fit) == (12, 16)
    assert (data.source.distinct_rows, data.source.documents) == (49, 28)
    assert data.source.to_json()["documents"] == 28
    whole = read(split, tiny, split=False)
    assert counts(whole.fit) == (21, 28)


def test_lengths_of_queries_are_known(split: Path, tiny: Path):
    data = read(split, tiny)
    queries = data.of_queries()
    assert len(queries.lengths) == 21 and len(data.lengths) == 49
    assert queries.length < data.length and row_info(data.choose[-1]).role == "document"


def test_data_without_roles_is_as_before(sentences: Path, tiny: Path):
    data = read(sentences, tiny)
    assert data.of_queries() is data and "documents" not in data.source.to_json()
    assert {row_info(batch).role for batch in data.choose} == {None}


def test_text_may_be_a_query_and_a_document(tiny: Path, tmp_path: Path):
    both = [(role, text) for role in ("query", "document") for text in QUERIES]
    data = read(table(tmp_path / "both.tsv", *both, both[0]), tiny)
    assert (data.source.rows, data.source.distinct_rows) == (43, 42)
    assert counts(data.choose) == (3, 3)


def test_joined_rows_have_the_role_of_their_texts(tiny: Path, tmp_path: Path):
    words = ["dog", "cat", "man", "woman", "guitar", "ball", "is", "the"]
    texts = [f"{one} {other}" for one in words for other in words]
    rows = [("query", text) for text in texts] + [("document", f"a {text}") for text in texts]
    data = read(table(tmp_path / "c.tsv", *rows), tiny, sequence=64)
    queries, documents = counts(data.fit)
    assert queries > 64 - 3 * 9 and documents > 64 - 3 * 9
    assert data.source.fit_rows == queries + documents
    assert len(data.query_lengths) > 64 and max(data.query_lengths) > 16


def test_files_with_and_without_roles_are_read_together(split: Path, sentences: Path, tiny: Path):
    data = read([split, sentences], tiny)
    with_roles, without = data.files
    assert {row_info(batch).role for batch in with_roles.choose} == {"query", "document"}
    assert {row_info(batch).role for batch in without.choose} == {None}
    assert len(data.of_queries().lengths) == 21 + len(without.lengths)


# Arrays


def arrays(path: Path, role: Any, rows: int = 30, **more: Any) -> Path:
    random = np.random.default_rng(0)
    ids = random.integers(5, 20, (rows, 8))
    ones = np.ones_like(ids)
    inputs = {"input_ids": ids, "attention_mask": ones, "token_type_ids": 0 * ones}
    np.savez(path, **inputs, **({} if role is None else {"role": role}), **more)
    return path


def test_arrays_have_roles(tiny: Path, tmp_path: Path):
    path = arrays(tmp_path / "rows.npz", np.array(["query", "document"] * 15))
    data = read(path, tiny, split=False)
    assert counts(data.fit) == (15, 15)
    assert "role" not in data.fit[0]


def test_folder_of_arrays_has_roles_in_all_files_or_none(tiny: Path, tmp_path: Path):
    (folder := tmp_path / "rows").mkdir()
    arrays(folder / "0.npz", np.array(["query"] * 30))
    arrays(folder / "1.npz", np.array(["document"] * 30))
    data = read(folder, tiny, split=False)
    assert counts(data.fit) == (30, 30)
    arrays(folder / "2.npz", None)
    with raises(InvalidData, "data.role", "row 60"):
        read(folder, tiny)


@pytest.mark.parametrize(
    ("role", "code"),
    [
        (np.array(["query"] * 30), "data.role_count"),
        (np.array(["query"] * 29 + ["document"]), "data.role_count"),
        (np.array(["document"] * 30), "data.role_count"),
        (np.array(["query"] * 28 + ["passage"] * 2), "data.role"),
        (np.array([["query", "document"]] * 30), "data.role"),
        (np.array(["query", "document"]), "data.array_rows"),
        (np.arange(30), "data.array_type"),
        (np.array(["query", None] * 15, object), "data.not_npz"),
    ],
)
def test_arrays_with_wrong_roles_are_refused(role: Any, code: str, tiny: Path, tmp_path: Path):
    with raises(InvalidData, code, "rows.npz"):
        read(arrays(tmp_path / "rows.npz", role), tiny)


# Tables


@pytest.mark.parametrize(
    ("rows", "code", "value"),
    [
        ([("query", "a dog")] * 20, "data.role_count", "0 the role document"),
        ([("query", "a dog"), ("document", "a cat")], "data.role_count", "and 1 the role"),
        ([("document", "a cat")] * 3, "data.role_count", "0 rows have the role query"),
        ([("query", "a"), ("Document", "b")], "data.role", "line 3"),
        ([("query", "a"), ("", "b")], "evaluate.empty_field", "line 3"),
        ([("query",)], "evaluate.field_count", "line 2"),
        ([("query\x1b[31m" * 90, "a")], "data.role", "line 2"),
    ],
)
def test_tables_with_wrong_roles_are_refused(
    rows: list[tuple[str, ...]], code: str, value: str, tiny: Path, tmp_path: Path
):
    with raises(InvalidData, code, value):
        read(table(tmp_path / "c.tsv", *rows), tiny)


@pytest.mark.parametrize("header", ["text\tother", "role\tother", "roles\ttext"])
def test_tables_without_both_columns_have_no_roles(header: str, tmp_path: Path):
    assert read_roles(table(tmp_path / "c.tsv", ("query", "a"), header=header)) == []


def test_roles_are_those_of_all_texts_of_a_row(tmp_path: Path):
    rows = ("query", "a", "b"), ("document", "c", "d"), ("document", "e", "f")
    found = read_roles(table(tmp_path / "c.tsv", *rows, header="role\tsentence1\tsentence2"))
    assert found == ["query", "query", *["document"] * 4]


def test_other_texts_than_those_of_the_roles_are_refused(split: Path, tiny: Path):
    with raises(InvalidData, "data.role", "49 texts"):
        read(split, tiny, read=lambda _: QUERIES)


@pytest.mark.parametrize("few", ["query", "document"])
def test_search_needs_rows_of_both_roles(few: str, tiny: Path, tmp_path: Path):
    rows = [("query", text) for text in QUERIES] + [("document", text) for text in DOCUMENTS]
    kept = [row for row in rows if row[0] != few] + [row for row in rows if row[0] == few][:5]
    data = read(table(tmp_path / "c.tsv", *kept), tiny)
    with raises(InvalidData, "data.few_rows", f"at least {LEAST_SEARCHED} of both"):
        require_rows(data, LEAST_SEARCHED, fix="give more", code="data.few_rows")


def test_role_that_is_an_input_of_the_model_is_one(tmp_path: Path, minimal: Callable[..., Path]):
    folder = minimal(tmp_path)
    data = read(arrays_of_role(tmp_path / "r.npz"), folder, split=False)
    assert "role" in data.fit[0] and row_info(data.fit[0]).role is None


def arrays_of_role(path: Path) -> Path:
    np.savez(path, role=np.ones((4, 3), np.float32))
    return path


@pytest.fixture
def minimal() -> Callable[..., Path]:
    import onnx
    import onnx.parser

    def build(folder: Path) -> Path:
        text = (
            '<ir_version: 8, opset_import: ["" : 17]> g (float[b, t] role) => (float[b, t] y) '
            "{ y = Identity(role) }"
        )
        onnx.save(onnx.parser.parse_model(text), folder / "model.onnx")
        return folder

    return build
