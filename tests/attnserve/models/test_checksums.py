"""Checksums of files and folders."""

from __future__ import annotations

from pathlib import Path

from attnserve.models.checksums import path_sha256, sha256


def test_path_sha256_of_a_folder_covers_names_and_contents_of_the_pattern(tmp_path: Path):
    def of(files: dict[str, str], pattern: str = "**/*") -> str:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        for name, content in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(content)
        return path_sha256(folder, pattern)

    first = of({"a.tsv": "1", "b/c.tsv": "2"})
    assert first == of({"b/c.tsv": "2", "a.tsv": "1"})
    assert first != of({"a.tsv": "1", "b/c.tsv": "3"})
    assert first != of({"a.tsv": "1", "b/d.tsv": "2"})
    assert of({"a.npz": "1"}, "*.npz") == of({"a.npz": "1", "b.txt": "2"}, "*.npz")
    (file,) = tmp_path.glob("0/a.tsv")
    assert path_sha256(file) == sha256(file)
