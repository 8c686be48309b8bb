"""Environments with packages of other projects, and the file of what works in them.

They are kept in the folder ATTNSERVE_CLIENTS if it is set.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock

from docs.hooks.tables import results

RESULTS = results.RESULTS / "clients.json"

CLIENTS: dict[str, tuple[str, ...]] = {
    "openai": ("openai==3.57.0",),
    "langchain_openai": ("langchain-openai==1.7.4", "openai==3.57.0"),
    "langchain_huggingface_url": (
        "langchain-huggingface==1.2.1", "huggingface-hub==1.33.0", "numpy==2.4.6",
    ),
    "langchain_huggingface": (
        "langchain-huggingface==1.2.3", "huggingface-hub==1.33.0", "numpy==2.4.6",
    ),
    "huggingface_hub": ("huggingface-hub==2.4.0", "numpy==2.4.6"),
    "llama_index_tei": (
        "llama-index-embeddings-text-embeddings-inference==0.6.0", "llama-index-core==0.14.25",
    ),
    "llama_index_openai_like": (
        "llama-index-embeddings-openai-like==0.4.0", "llama-index-core==0.14.25", "openai==3.57.0",
    ),
    "haystack_openai": ("haystack-ai==3.4.1", "openai==3.57.0"),
    "haystack_tei": (
        "huggingface-api-haystack==3.1.0", "haystack-ai==3.4.1", "huggingface-hub==2.4.0",
    ),
    "cohere": ("cohere==7.3.1",),
    "tritonclient": ("tritonclient[http]==2.73.0", "numpy==2.4.6"),
    "kserve": ("kserve==0.21.0", "numpy==2.4.6"),
}  # fmt: skip
"""Clients of the service, by their function in ``calls.py``: the packages, the client first."""

LIBRARIES: dict[str, tuple[str, ...]] = {
    "sentence_transformers_openvino": (
        "sentence-transformers[openvino]==6.2.0", "optimum-intel==2.2.0", "transformers==5.5.4",
        "openvino==2026.4.1", "torch==2.13.0",
    ),
    "sentence_transformers_onnx": (
        "sentence-transformers[onnx]==5.7.0", "optimum-onnx==0.1.0", "transformers==4.57.6",
        "onnxruntime==1.32.0", "torch==2.13.0",
    ),
    "mteb": ("mteb==2.26.24", "datasets==5.2.0"),
}  # fmt: skip
"""Libraries that load our folders, each with a test of its own."""

ALL = CLIENTS | LIBRARIES

UNINSTALLED = {"sentence_transformers_openvino": "torchvision"}
"""A package that is removed: a build of torchvision for GPUs breaks transformers beside a build of
torch for CPUs, and no text needs it."""

WITH_OURS = {"mteb"}
"""Environments that also see the packages of this one, of which tests run in them."""


@contextmanager
def environment(client: str, folder: Path, *, write: bool) -> Iterator[tuple[Path, dict[str, Any]]]:
    """The interpreter of a client and its row of results, which is written at the end.

    Args:
        folder: The folder of the environment, if ATTNSERVE_CLIENTS is not set.
        write: Write the row into the file of results.
    """
    row: dict[str, Any] = {"packages": ALL[client], "outcome": "does not install"}
    try:
        python = python_of(client, Path(os.environ.get("ATTNSERVE_CLIENTS", folder)).absolute())
        row["outcome"] = "fails"
        yield python, row
        row["outcome"] = "passes"
    finally:
        if write:
            write_row(client, row)


def python_of(client: str, folder: Path) -> Path:
    """The interpreter of the environment of a client, which is made if it is missing."""
    place, packages = folder / client, ALL[client]
    made = place / "packages.txt"
    python = place / ("Scripts" if os.name == "nt" else "bin") / "python"
    if made.exists() and made.read_text().split() == list(packages):
        return python
    subprocess.run([sys.executable, "-m", "venv", "--clear", place], check=True)
    pip = [python, "-m", "pip"]
    if client in WITH_OURS:
        packages_of = "import sysconfig; print(sysconfig.get_path('purelib'))"
        site = subprocess.check_output([python, "-c", packages_of], text=True).strip()
        line = f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})"
        (Path(site) / "ours.pth").write_text(line)
    subprocess.run([*pip, "install", "-qq", *packages], check=True)
    if client in UNINSTALLED:
        subprocess.run([*pip, "uninstall", "-qq", "-y", UNINSTALLED[client]], check=True)
    made.write_text("\n".join(packages))
    return python


def write_row(client: str, row: dict[str, Any]) -> None:
    """Replace the row of a client in the file of results."""
    with FileLock(RESULTS.with_suffix(".lock")):
        found = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"clients": {}}
        rows = {**found["clients"], client: row}
        content = {
            "command": "make test-clients",
            "python": platform.python_version(),
            "clients": {name: rows[name] for name in ALL if name in rows},
        }
        RESULTS.write_text(json.dumps(content, indent=2) + "\n")
