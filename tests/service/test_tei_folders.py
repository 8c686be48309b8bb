"""Optimized folders give text-embeddings-inference the vectors that are served."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient

import attnserve
from tests.files import read_record, write_json
from tests.fixtures.make import BERT
from tests.tei_reader import TeiReader

EXPORT = BERT / "eager-torchscript-17-2"

TEXTS = ["a dog is running in the park", "the man", "a CHILD was reading . " * 20, "guitar"]

PROMPTS = {"query": "the house and ", "document": "a very "}


@pytest.mark.parametrize(
    "record",
    [
        {"pooling": "mean"},
        {"pooling": "mean", "normalize": True, "max_length": 9},
        {"pooling": "cls"},
        {"pooling": "cls", "normalize": True, "prompts": PROMPTS, "default_prompt": "query"},
        {"pooling": "last"},
        {"pooling": "last", "normalize": True, "dimensions": 7},
    ],
    ids=str,
)
def test_tei_gives_the_served_vectors_of_an_optimized_folder(
    record: dict[str, Any], start: Callable[..., TestClient], tmp_path: Path
) -> None:
    shutil.copytree(EXPORT, tmp_path / "export")
    write_json(tmp_path / "export" / "attnserve.json", {**read_record(EXPORT), **record})
    attnserve.optimize(tmp_path / "export", tmp_path / "new", collab_dk=16, mixing="dense")
    client, reader = start(tmp_path / "new"), TeiReader(tmp_path / "new")
    size = record.get("dimensions")
    for prompt in (None, *record.get("prompts", {})):
        body = {"inputs": TEXTS, "truncate": True, "prompt_name": prompt, "dimensions": size}
        answer = client.post("/embed", json=body)
        assert answer.status_code == 200, answer.text
        found, own = np.array(answer.json()), reader.embed(TEXTS, prompt, size)
        assert (found * own).sum(1).min() >= 0.99999, prompt


def test_tei_refuses_a_pooling_that_it_does_not_have(tmp_path: Path) -> None:
    """The reader is as strict as TEI: the other tests depend on it."""
    shutil.copytree(EXPORT, tmp_path / "new")
    (tmp_path / "new" / "1_Pooling").mkdir()
    write_json(tmp_path / "new" / "1_Pooling" / "config.json", {"pooling_mode": "max"})
    with pytest.raises(ValueError, match="max"):
        TeiReader(tmp_path / "new")
