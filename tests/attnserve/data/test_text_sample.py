"""The file of collected texts."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from attnserve.data import text_sample
from attnserve.data.text_sample import TextSample


def test_sample_appends_one_line_per_text(tmp_path: Path):
    file = tmp_path / "texts.txt"
    file.write_text("before\n")
    file.chmod(0o644)
    sample = TextSample(file, 1)
    sample.write(["a\nb\r\nc\x85d\u2028e", "  ", "f\ud800"])
    TextSample(file, 1).write(["g"])
    assert file.read_text() == "before\na b c d e\nf?\ng\n"
    assert file.stat().st_mode & 0o777 == 0o600


def test_sample_keeps_a_share_of_texts(tmp_path: Path):
    sample = TextSample(tmp_path / "texts.txt", 0.25)
    assert 150 < len(sample.choose(["a"] * 1000)) < 350
    assert TextSample(tmp_path, 1).choose([[1, 2], "a"]) == ["a"]


def test_sample_stops_at_its_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(text_sample, "MAX_BYTES", 10)
    sample = TextSample(tmp_path / "texts.txt", 1)
    for text in ("12345", "1234567", "123"):
        sample.write([text])
    assert sample.path.read_text() == "12345\n123\n"


def test_mask_replaces_numbers_and_addresses_equally(tmp_path: Path):
    sample = TextSample(tmp_path / "texts.txt", 1, mask=True)
    text = f"call 0123456789 or jo.doe+x@mail.example.org, room 12, 0123456789 {'7' * 400}"
    sample.write([text])
    (line,) = sample.path.read_text().splitlines()
    number, address = line.split()[1], line.split()[3]
    assert number.isdigit() and len(number) == 10 and line.count(number) == 2
    assert "0123456789" not in line and "jo.doe" not in line
    assert address.endswith("@example.com,") and len(line.split()[-1]) == 400


@pytest.mark.parametrize("unit", ["a", "a.", "a@", "a@b.", "1", "a1", "a@b.c@", "é+"])
def test_mask_takes_time_in_proportion_to_the_text(tmp_path: Path, unit: str):
    """A text of a client must not hold the interpreter: 20,000 letters took 6 s."""
    text = (unit * 200_000)[:200_000]
    start = time.process_time()
    TextSample(tmp_path / "texts.txt", 1, mask=True).write([text])
    assert time.process_time() - start < 5


def test_sample_refuses_pipes_and_folders_without_blocking(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, tmp_path / "missing" / "file"):
        with pytest.raises(OSError):
            TextSample(path, 1).write(["a"])
