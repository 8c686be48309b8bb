"""Clients of other projects against a served model, each in an environment of its own.

`make test-clients` sets ATTNSERVE_CLIENTS to the folder of the environments, installs those that
are missing, and writes docs/reference/clients.md.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx2
import numpy as np
import pytest

from service.app import create_app
from service.settings import Settings
from tests.service.api.test_ranking import write_reranker
from tests.service.conftest import listening
from tests.service.tiny import hidden_states, mean, write_encoder

ROOT = Path(__file__).parents[2]
FOLDER = os.environ.get("ATTNSERVE_CLIENTS")
PAGE = ROOT / "docs" / "reference" / "clients.md"
TEXTS = ["a b c", "d"]

CLIENTS: dict[str, tuple[str, ...]] = {
    "openai": ("openai==3.57.0",),
    "langchain_openai": ("langchain-openai==1.7.4",),
    "langchain_huggingface": ("langchain-huggingface==1.2.3", "numpy==2.4.6"),
    "llama_index_tei": ("llama-index-embeddings-text-embeddings-inference==0.6.0",),
    "llama_index_openai": ("llama-index-embeddings-openai-like==0.4.0",),
    "haystack_openai": ("haystack-ai==3.4.1",),
    "haystack_tei": ("huggingface-api-haystack==3.1.0", "haystack-ai==3.4.1"),
    "tritonclient": ("tritonclient[http]==2.73.0",),
    "kserve": ("kserve==0.21.0",),
    "cohere": ("cohere==7.3.1",),
}
"""The packages of each client."""

HEAD = """# Tested clients

`make test-clients` installs these versions, calls the service with each, and compares the answers.

| client | packages |
|---|---|
"""

pytestmark = [
    pytest.mark.clients,
    pytest.mark.skipif(FOLDER is None, reason="`make test-clients` installs the clients"),
]


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("models")
    write_encoder(folder / "tiny")
    write_reranker(folder / "reranker")
    with listening(create_app(Settings(model=folder, probe=False, default_model="tiny"))) as url:
        yield url


@pytest.fixture(scope="module")
def passed() -> Iterator[list[str]]:
    """The rows of the clients that pass; all of them replace the page."""
    rows: list[str] = []
    yield rows
    if len(rows) == len(CLIENTS):
        PAGE.write_text(HEAD + "\n".join(rows) + "\n")


def python_of(client: str) -> Path:
    """The interpreter of the environment with the packages of a client."""
    packages = CLIENTS[client]
    environment = Path(str(FOLDER)) / "-".join(packages).replace("[", "-").replace("]", "")
    python = environment / ("Scripts" if os.name == "nt" else "bin") / "python"
    stamp = environment / ".installed"
    if not stamp.exists():
        subprocess.run([sys.executable, "-m", "venv", environment], check=True)
        subprocess.run([python, "-m", "pip", "install", "-q", *packages], check=True)
        stamp.touch()
    return python


@pytest.mark.parametrize("client", CLIENTS)
def test_client_gives_the_answers_of_plain_http(
    client: str, address: str, passed: list[str]
) -> None:
    done = subprocess.run(
        [python_of(client), Path(__file__).with_name("calls.py"), client, address],
        capture_output=True, text=True, timeout=120,
        env={**os.environ, "PYTHONPATH": "", "HF_HUB_OFFLINE": "0"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    vectors = [mean([2, 4, 5, 6, 3]), mean([2, 7, 3])]
    if client in ("tritonclient", "kserve"):
        expected = hidden_states(np.array([[2, 7, 3]]))[0]
    elif client == "cohere":
        body = {"model": "reranker", "query": "b", "documents": ["a", "b b"]}
        results = httpx2.post(f"{address}/v2/rerank", json=body).json()["results"]
        expected = [[one["index"], one["relevance_score"]] for one in results]
    elif client in ("langchain_huggingface", "llama_index_tei"):
        expected = [
            vector / np.linalg.norm(vector) for vector in vectors
        ]  # TEI's default, which Haystack overrides
    else:
        expected = vectors
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    passed.append(f"| `{client}` | {', '.join(f'`{name}`' for name in CLIENTS[client])} |")
