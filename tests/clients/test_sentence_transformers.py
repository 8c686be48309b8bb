"""A stock installation of sentence-transformers runs our graphs, and gives the same vectors.

optimum-intel needs another version of transformers than ``constraints.txt`` has, so the test makes
an environment of its own, or uses the one whose Python is in ATTNSERVE_STOCK_PYTHON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from attnserve.models.artifact import open_artifact
from attnserve.serving.loaded_model import Model
from tests.hub_folders import CASES, QUERY, TEXTS, Case, expected, write_folder

pytestmark = [
    pytest.mark.clients,
    pytest.mark.export,
    pytest.mark.filterwarnings("ignore"),  # of the libraries, about their own use of torch
]

if find_spec("sentence_transformers") is None or find_spec("openvino") is None:
    pytest.skip("pip install 'attnserve[dev]'", allow_module_level=True)

STOCK = "sentence-transformers[openvino]==6.2.0"
SCRIPT = Path(__file__).with_name("stock_sentence_transformers.py")

FOLDERS = (
    "mean", "cls", "qwen", "normalized", "dense", "dense, normalized", "prompts", "default prompt",
    "dimensions", "lower case", "cross-encoder", "classes",
)  # fmt: skip

EXACT_RANK = 16
"""Shared dimensions with which ``collab_dk`` is lossless for these networks."""


@pytest.fixture(scope="session")
def stock_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment with stock packages."""
    if given := os.environ.get("ATTNSERVE_STOCK_PYTHON"):
        return Path(given)
    folder = tmp_path_factory.mktemp("stock")
    python = folder / ("Scripts" if os.name == "nt" else "bin") / "python"
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    subprocess.run([python, "-m", "pip", "install", "-q", STOCK], check=True)
    return python


def test_stock_library_gives_the_vectors_of_the_original(
    stock_python: Path, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    import attnserve
    from attnserve.exporters.hugging_face import export
    from attnserve.integrations.sentence_transformers import load

    wanted: dict[str, dict[str, np.ndarray]] = {}
    own: dict[str, dict[str, np.ndarray]] = {}
    folders: list[dict[str, Any]] = []
    for name in FOLDERS:
        case, place = CASES[name], tmp_path / name.replace(",", "").replace(" ", "-")
        write_folder(case, place / "hub")
        task = {"rerank": "rerank", "classifier": "sequence-classification"}.get(case.kind)
        export(place / "hub", place / "export", task=task, exporter="torchscript", openvino=True)
        kinds = ["export"]
        if case.network != "qwen":  # the norms of its queries and keys allow no shared dimensions
            kinds.append("optimized")
            attnserve.optimize(
                place / "export", place / "optimized", collab_dk=EXACT_RANK, mixing="dense",
                openvino=True,
            )  # fmt: skip
        values = original(case, place)
        for kind in kinds:
            path = str(place / kind)
            wanted[path] = values
            own[path] = answers(load(path), case, [*values])
            folders.append(
                {"path": path, "kind": case.kind, "prompts": [*values], "inputs": inputs(case)}
            )
    job, result = tmp_path / "job.json", tmp_path / "result.json"
    job.write_text(json.dumps({"texts": TEXTS, "folders": folders}))
    environment = {**os.environ, "PYTHONPATH": "", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [stock_python, "-W", "ignore", SCRIPT, job, result],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    stock = json.loads(result.read_text())
    lowest: dict[str, float] = {}
    for path, by_prompt in wanted.items():
        for prompt, values in by_prompt.items():
            libraries = {"stock": stock[path], "integration": own[path]}
            if values.ndim == 2 and "classes" not in path:
                libraries["service"] = {prompt: served(Path(path), prompt)}
            for library, found in libraries.items():
                one = np.array(found[prompt])
                assert one.shape == values.shape, (path, library)
                if values.ndim == 2:
                    norms = np.linalg.norm(one, axis=1) * np.linalg.norm(values, axis=1)
                    cosine = float(((one * values).sum(1) / norms).min())
                    assert cosine >= 0.99999, (path, library, prompt)
                    lowest[library] = min(lowest.get(library, 1.0), cosine)
                if library != "service":  # it normalizes shortened vectors again
                    np.testing.assert_allclose(one, values, rtol=1e-4, atol=1e-4, err_msg=path)
    for library, cosine in lowest.items():
        record_property(f"lowest cosine, {library}", cosine)
        print(f"lowest cosine, {library}: 1 - {1 - cosine:.1e}, {len(wanted)} folders")


def served(folder: Path, prompt: str) -> np.ndarray:
    """The vectors of the service."""
    artifact = open_artifact(folder)
    model = Model(artifact)
    start = artifact.prompt(prompt) if prompt else artifact.prompt()
    fed = model.text_inputs(model.encode([start + text for text in TEXTS]))
    name = model.text_output("embed")
    return model.vectors("embed", fed, model.run(fed, [name])[name])


def inputs(case: Case) -> list[Any]:
    """Pairs of a cross-encoder, or texts of a classifier."""
    return [[QUERY, text] for text in TEXTS] if case.kind == "rerank" else TEXTS


def original(case: Case, place: Path) -> dict[str, np.ndarray]:
    """The vectors by prompt, or scores, of the original in torch."""
    if case.kind == "embedding":
        return expected(case, place / "hub", place / "copy")
    from sentence_transformers import CrossEncoder

    return answers(CrossEncoder(str(place / "hub"), device="cpu"), case, [""])


def answers(model: Any, case: Case, prompts: list[str]) -> dict[str, np.ndarray]:
    if case.kind == "embedding":
        return {name: np.array(model.encode(TEXTS, prompt_name=name or None)) for name in prompts}
    return {"": np.array([model.predict(one) for one in inputs(case)])}
