"""Unmodified clients of other projects get the vectors of the library from ``attnserve serve``.

Each has an environment of its own.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from attnserve.models.artifact import open_artifact
from attnserve.serving.loaded_model import Model
from docs.hooks.tables import results
from tests.clients.environments import ALL, CLIENTS, environment
from tests.service.processes import started
from tests.service.tiny import write_reranker

CALLS = Path(__file__).with_name("calls.py")

KEY = "a-key"
TEXTS = ["A man is playing a guitar.", "Two dogs run in the park", "¿Qué es la atención?"]
QUERY = "What is attention?"
MANY = [f"sentence number {index}" for index in range(40)]
DIMENSIONS = 128
HELLO_WORLD = [15339, 1917]
"""``hello world`` in OpenAI's tokenizer cl100k_base: MiniLM has tokens with these ids too."""

RANKED = ["a b b", "c", "b"]
"""The tiny reranker counts the letters b, and subtracts one."""


@pytest.fixture(scope="module")
def models(
    minilm_export: Callable[[str, str, int], Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    folder = tmp_path_factory.mktemp("models")
    shutil.copytree(minilm_export("sdpa", "dynamo", 18), folder / "minilm")
    write_reranker(folder / "reranker")
    return folder


@pytest.fixture(scope="module")
def addresses(models: Path) -> Iterator[dict[str, str]]:
    """Servers of both models and of the reranker alone, which is then the default."""
    command = ["-m", "attnserve", "serve", "--port", "0"]
    both, reranker = str(models), str(models / "reranker")
    with (
        started([*command, both, "--default-model", "minilm"], ATTNSERVE_API_KEYS=KEY) as (
            first,
            _,
        ),
        started([*command, reranker], ATTNSERVE_API_KEYS=KEY) as (second, _),
    ):
        yield {"url": first, "reranker_url": second}


@pytest.fixture(scope="module")
def model(models: Path) -> Model:
    return Model(open_artifact(models / "minilm"))


def pooled(model: Model, texts: list[str]) -> np.ndarray:
    """The means of the token vectors, not normalized, which the session gives each text alone."""
    name = model.text_output("embed")
    feeds = [model.text_inputs([encoding]) for encoding in model.encode(texts)]
    return np.array([model.run(fed, [name])[name][0].mean(axis=0) for fed in feeds])


def normalized(vectors: np.ndarray) -> np.ndarray:
    return vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)


@pytest.mark.clients
@pytest.mark.parametrize("client", CLIENTS)
def test_client_gets_the_vectors_of_the_library(
    client: str,
    addresses: dict[str, str],
    model: Model,
    tmp_path: Path,
    pytestconfig: pytest.Config,
) -> None:
    writes = pytestconfig.getoption("--write-clients")
    with environment(client, tmp_path, write=writes) as (python, _):
        check(ask(client, python, addresses, model, tmp_path), model)


def ask(
    client: str, python: Path, addresses: dict[str, str], model: Model, folder: Path
) -> dict[str, Any]:
    """The answers of a client; see ``calls.py``."""
    job, result = folder / "job.json", folder / "result.json"
    content = {
        **addresses, "key": KEY, "model": "minilm", "texts": TEXTS, "query": QUERY,
        "many": MANY, "dimensions": DIMENSIONS, "foreign_ids": HELLO_WORLD,
        "ids": [encoding.ids for encoding in model.encode(TEXTS)],
        "inputs": [one.name for one in model.signature.inputs],
        "output": model.text_output("embed"),
        "reranker": "reranker", "ranker_query": "a", "ranked": RANKED,
    }  # fmt: skip
    job.write_text(json.dumps(content))
    # Without settings of the machine, and of ``tests/conftest.py``.
    environment = {name: os.environ[name] for name in ("PATH", "SYSTEMROOT") if name in os.environ}
    done = subprocess.run(
        [python, CALLS, client, job, result], env={**environment, "HOME": str(folder)},
        cwd=folder, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(result.read_text())


def check(answers: dict[str, Any], model: Model) -> None:
    """Compare the answers of a client with what the library gives."""
    means, query = pooled(model, TEXTS), normalized(pooled(model, [QUERY]))[0]
    texts = normalized(means)
    logits = np.array([[0, 1], [2, 0], [1, -1]])
    expected = {
        "texts": texts,
        "texts by their ids": texts,
        "query": query,
        "many texts": normalized(pooled(model, MANY)),
        "dimensions": normalized(means[:, :DIMENSIONS]),
        "not normalized": means,
        "similarities": texts @ query,
        "scores": np.column_stack([logits[:, 0], 1 / (1 + np.exp(-logits[:, 1]))]),
    }
    assert answers
    for name, found in answers.items():
        wanted = expected[name]
        if name == "many texts":
            assert len(found) >= 32
            wanted = wanted[: len(found)]
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5, err_msg=name)


def test_results_are_of_the_clients_that_are_tested() -> None:
    found = results.load("clients")["clients"]
    assert {name: tuple(one["packages"]) for name, one in found.items()} == ALL, (
        "run make test-clients"
    )
    assert {one["outcome"] for one in found.values()} <= {"passes", "does not install"}
