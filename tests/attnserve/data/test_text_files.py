from __future__ import annotations

from pathlib import Path

import pytest

from attnserve.data.text_files import read_sentences, read_table
from graph_passes.errors import InvalidData
from tests.errors import raises


@pytest.mark.parametrize(
    ("content", "sentences"),
    [
        (b"one\ntwo\n", ["one", "two"]),
        (b"\xef\xbb\xbfone\r\n\r\n  two \r\n", ["one", "two"]),
        ("a\u2028b\x0cc\nd".encode(), ["a\u2028b\x0cc", "d"]),
    ],
    ids=["plain", "mark-blank-crlf", "separators-inside"],
)
def test_read_sentences_are_non_blank_lines(
    content: bytes, sentences: list[str], tmp_path: Path
) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes(content)
    assert read_sentences(path) == sentences


@pytest.mark.parametrize(
    ("content", "code"),
    [(b"", "empty_file"), (b"\n \n", "empty_file"), (b"ok\n\xff", "not_utf8"),
     (None, "unreadable")],
)  # fmt: skip
def test_read_sentences_empty_binary_or_absent_file_is_refused(
    content: bytes | None, code: str, tmp_path: Path
) -> None:
    path = tmp_path / "text.txt"
    if content is not None:
        path.write_bytes(content)
    with raises(InvalidData, f"text.{code}", path) as caught:
        read_sentences(path)
    assert caught.value.fix
    with raises(InvalidData, "text.unreadable", tmp_path):
        read_sentences(tmp_path)


def test_calibration_text_is_varied() -> None:
    sentences = read_sentences(Path(__file__).parents[3] / "benchmarks" / "calibration.txt")
    words = [len(sentence.split()) for sentence in sentences]
    assert len(sentences) >= 320
    assert len({sentence.lower() for sentence in sentences}) == len(sentences)
    assert min(words) >= 3 and max(words) <= 45
    assert min(words) <= 5 and max(words) >= 30


def test_tables_give_the_texts_of_their_columns(tmp_path: Path) -> None:
    path = tmp_path / "pairs.tsv"
    path.write_text("score\tSentence1\tsentence2\n4.2\ta cat\ta dog\n0\tone\ttwo\n")
    assert read_sentences(path) == ["a cat", "a dog", "one", "two"]
    path.write_text("label\tsentence\n1\tgood\n")
    assert read_sentences(path) == ["good"]
    path.write_text("which cat?\tthe black one\n")  # pairs of a reranker, without names
    assert read_sentences(path) == ["which cat?\tthe black one"]
    path.write_text("label\tsentence\n1\n")
    with raises(InvalidData, "evaluate.field_count", "line 2"):
        read_sentences(path)


@pytest.mark.parametrize(
    ("content", "code", "fix"),
    [
        ("text\n1\n", "evaluate.no_column", "text, score"),
        ("score\ttext\n1\n", "evaluate.field_count", "row"),
        ("score\ttext\n1\t \n", "evaluate.empty_field", "row"),
        ("score\ttext\n \n", "evaluate.no_rows", "row"),
    ],
)
def test_read_table_errors_name_the_file_and_the_fix(
    content: str, code: str, fix: str, tmp_path: Path
) -> None:
    path = tmp_path / "table.tsv"
    path.write_text(content)
    with raises(InvalidData, code, path) as caught:
        read_table(path, ("text", "sentence"), ("score",))
    assert fix in caught.value.fix
